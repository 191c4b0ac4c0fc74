"""Direct connections to and from peers that can be dialled: listening, granting, dialling.

Nothing here is needed for a call: where it fails, the stream of p2pd is there, and stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from peers.clock import now_s
from peers.net.bandwidth import Allowance
from peers.net.connection import ClientConnection, Connection, ServerConnection
from peers.net.direct import memory
from peers.net.direct.handshake import TICKET_BYTES, AskDirect, Asking, GrantDirect, SharedSecret, grant
from peers.net.direct.records import LENGTH_BYTES, TAG_BYTES, Opener, Sealer
from peers.net.direct.stream import PlainStream, SealedStream, Stream
from peers.net.identity import Identity, plain_ip
from peers.net.timings import NetTimings
from peers.ports import Answer, Request
from peers.waiting import TaskKeeper, within
from swarm.errors import Busy, PeerGone, Refused, SetupError, SwarmError
from swarm.ids import PeerId
from swarm.wire.messages import pack, unpack, unpack_answer

METHOD = "direct"
OPENING = b"\0"
"""The first record each way: a connection that opens with an empty message, where p2pd says something."""
SEALED_OPENING_BYTES = LENGTH_BYTES + len(OPENING) + TAG_BYTES
HELLO_BYTES = TICKET_BYTES + SEALED_OPENING_BYTES
"""What a stranger on the port may say, and what is held of it, until it has shown a ticket and a record."""
MAX_KNOCKS = 64
"""Strangers at a time on the port, and as many of this machine; one more takes the place of the first."""
KNOCKS_PER_S = 100.0
KNOCKS_AT_ONCE = 256.0
"""Connections beyond wait in the kernel, which refuses them when its queue is full."""
MAX_STREAMS = 256
"""Each takes 256 kB. A peer works with fewer, and more stay on p2pd; grants that are not used yet count."""
MAX_HOSTS = 2
"""Of a peer, that are tried."""
KNOCK_AGAIN_S = 0.1
_TCP = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
"""Seconds, seconds, times: a router forgets connections that are idle, and says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectOptions:
    """Whether and where this peer takes direct connections."""

    host: str | None = "127.0.0.1"
    """An IP address; None: only dial others."""
    outside: str = ""
    """The IP address at which others see this peer, at the ports that it sends from; empty: at others, or not
    known. Two peers that cannot be dialled connect to one another at the same time."""
    port: int = 0
    """0: the system chooses one."""
    after_bytes: int = 1 << 18
    """Pairs that moved less stay on p2pd: they need no second connection."""
    memory: bool = memory.AVAILABLE
    """Hand over in memory what goes to another process of this machine and user."""


@dataclass(frozen=True, slots=True)
class _Granted:
    """A connection that may come."""

    peer: PeerId
    keys: SharedSecret
    until: float


class DirectPaths:
    """The direct connections of one peer, both ways."""

    def __init__(
        self, signer: Identity, options: DirectOptions, timings: NetTimings,
        receive: Callable[[PeerId], ServerConnection],
    ) -> None:  # fmt: skip
        """`receive` makes our end of a connection that a peer was granted."""
        self.options, self.timings = options, timings
        self.port = 0
        """That we listen on."""
        self.near = False
        """Processes of this machine can connect."""
        self.streams: set[Connection] = set()
        self.knocks: dict[asyncio.Task[None], bool] = {}
        """Strangers that have shown nothing yet, the oldest first; whether they are of this machine."""
        self._signer, self._receive = signer, receive
        self._tasks = TaskKeeper()
        self._listeners: list[socket.socket] = []
        self._granted: dict[bytes, _Granted] = {}
        """By ticket, the oldest first."""
        self._knocking: dict[PeerId, asyncio.Task[None]] = {}
        """At the routers of callers."""

    # -- the end that is called -----------------------------------------------------------------

    def listen(self) -> None:
        """Begin to take connections, if that is wanted. Raises SetupError: the port cannot be had."""
        if self._listeners:
            return
        if self.options.host is not None:
            listener = self._tcp_listener(self.options.host)
            self.port = listener.getsockname()[1]
            self._listeners.append(listener)
        if self.options.memory and (near := memory.listener_of(self._signer.peer_id)):
            self.near = True
            self._listeners.append(near)
        for listener in self._listeners:
            self._tasks.create_task(self._accept(listener, near=listener.family == socket.AF_UNIX))

    def _tcp_listener(self, host: str) -> socket.socket:
        family = socket.AF_INET6 if plain_ip(host).version == 6 else socket.AF_INET
        try:
            listener = socket.create_server((host, self.options.port), family=family, backlog=MAX_KNOCKS)
        except OSError as error:
            raise SetupError(
                f"port {self.options.port} for direct connections cannot be had on {host} "
                f"({os.strerror(error.errno or 0)}): choose another one with --direct-port, or --no-direct"
            ) from None
        listener.setblocking(False)
        return listener

    async def close(self) -> None:
        """Take no more connections. Those that are there belong to others."""
        await self._tasks.close()
        for listener in self._listeners:
            listener.close()
        self._granted.clear()

    async def _accept(self, listener: socket.socket, *, near: bool) -> None:
        loop, pace = asyncio.get_running_loop(), Allowance(KNOCKS_PER_S, KNOCKS_AT_ONCE)
        while True:
            try:
                came, _ = await loop.sock_accept(listener)
            except OSError:  # it is gone again, or files are short
                await asyncio.sleep(1 / KNOCKS_PER_S)
                continue
            try:
                self._knocked(came, near=near)
            except OSError:  # the stranger is gone
                came.close()
            await asyncio.sleep(pace.take(1.0, now=loop.time()))

    def _knocked(self, came: socket.socket, *, near: bool) -> None:
        """A stranger connected to the port, or a process of this machine: it is held until it has shown what
        it may, or later ones have taken its place."""
        if near and not memory.of_this_user(came):
            came.close()
            return
        if not near:
            _set_up(came)
        alike = [knock for knock, is_near in self.knocks.items() if is_near is near]
        if len(alike) >= MAX_KNOCKS:
            del self.knocks[alike[0]]
            alike[0].cancel()
        knock = self._tasks.create_task(self._let_in(came, near=near))
        self.knocks[knock] = near
        knock.add_done_callback(lambda _: self.knocks.pop(knock, None))

    async def _let_in(self, came: socket.socket, *, near: bool) -> None:
        """Open the connection that was granted to the one that came, if it shows so in time."""
        stream: Stream | None = None
        try:
            stream = self.admit(await within(_hear(came, HELLO_BYTES), self.timings.knock_s), near=near)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: stream, came)
        except BaseException:
            came.close()
            if stream is not None:
                stream.end.fail(PeerGone(stream.end.peer, "no direct connection came about"))
            raise

    def admit(self, hello: bytes, *, near: bool) -> Stream:
        """What was granted, once, for the socket on which a ticket was said, and the record that proves its
        key. Raises Refused: they open nothing."""
        ticket = hello[:TICKET_BYTES]
        granted = self._granted.get(ticket)
        if granted is None or granted.until < now_s():
            raise Refused("a ticket that opens nothing")
        opener = Opener(granted.keys.to_callee)
        opening = _opened(opener, hello[TICKET_BYTES:])
        del self._granted[ticket]
        end, sealer = self._receive(granted.peer), Sealer(granted.keys.to_caller)
        end.direct, end.in_memory = True, near
        self._keep(end)
        reply = bytes(sealer.seal([OPENING]))
        if near:
            return PlainStream(end, opening, reply)
        return SealedStream(end, sealer, opener, opening, reply)

    async def grant(self, request: Request) -> Answer:
        """A handler of the transport: answers `AskDirect`."""
        ask = unpack(request.header, AskDirect)
        knocks = not self.port and bool(ask.host and self.options.outside)
        if not (self.port or self.near or knocks):
            raise Refused("no direct connections are taken here")
        now = now_s()
        for ticket, granted in list(self._granted.items()):
            if granted.until < now or granted.peer == request.peer:
                del self._granted[ticket]
        if len(self.streams) + len(self._granted) >= MAX_STREAMS:
            raise Busy(f"{MAX_STREAMS} direct connections are open")
        with contextlib.ExitStack() as unused:
            place, tcp = ("", self.port), None
            if knocks:
                _check_public(ask.host)
                tcp, place = self._outwards(unused)
            answer, keys = grant(self._signer, request.peer, ask, place[1], place[0])
            self._granted[keys.ticket] = _Granted(request.peer, keys, now + self.timings.grant_s)
            if tcp is not None:
                self._begin_to_knock(request.peer, tcp, (ask.host, ask.port), unused.pop_all())
        return Answer(pack(answer))

    def _begin_to_knock(
        self, peer: PeerId, tcp: socket.socket, place: tuple[str, int], unused: contextlib.ExitStack
    ) -> None:
        """Knock at the router of a caller from now on; what was begun for it before ends."""
        if (before := self._knocking.get(peer)) is not None:
            before.cancel()
        knocking = self._knocking[peer] = self._tasks.create_task(self._meet(tcp, place, unused))

        def ended(_: object) -> None:
            unused.close()
            if self._knocking.get(peer) is knocking:
                del self._knocking[peer]

        knocking.add_done_callback(ended)

    def _outwards(self, unused: contextlib.ExitStack) -> tuple[socket.socket, tuple[str, int]]:
        """A socket to knock from, and the place at which others see it."""
        ip = plain_ip(self.options.outside)
        tcp = socket.socket(socket.AF_INET6 if ip.version == 6 else socket.AF_INET, socket.SOCK_STREAM)
        unused.callback(tcp.close)
        tcp.setblocking(False)
        _set_up(tcp)
        tcp.bind(("", 0))
        return tcp, (self.options.outside, tcp.getsockname()[1])

    async def _meet(self, tcp: socket.socket, place: tuple[str, int], unused: contextlib.ExitStack) -> None:
        """Knock at the router of a caller, which knocks at ours, and let the caller in."""
        await within(self._knock(tcp, place), 2 * self.timings.direct_s)
        unused.pop_all()
        await self._let_in(tcp, near=False)

    async def _knock(self, tcp: socket.socket, place: tuple[str, int]) -> None:
        """Connect to a socket that connects to this one, through both routers."""
        while True:
            try:
                return await asyncio.get_running_loop().sock_connect(tcp, place)
            except ConnectionError:  # refused by a router that has no hole yet; Linux says so twice
                await asyncio.sleep(KNOCK_AGAIN_S)

    def _keep(self, end: Connection) -> None:
        self.streams.add(end)
        end.closed.add_done_callback(lambda _: self.streams.discard(end))

    # -- the end that calls ---------------------------------------------------------------------

    async def dial(self, link: ClientConnection, hosts: Sequence[str]) -> ClientConnection:
        """A direct connection to the peer of a link, which is asked over it.

        Raises:
            PeerFault, SwarmError, OSError, asyncio.TimeoutError: there is none.
        """
        peer, limit_s = link.peer, self.timings.direct_s
        if len(self.streams) >= MAX_STREAMS:
            raise Busy(f"{MAX_STREAMS} direct connections are open")
        with contextlib.ExitStack() as unused:
            near = memory.connect(peer) if self.options.memory else None
            tcp, place = None, ("", 0)
            if near is not None:
                unused.callback(near.close)
            elif self.options.outside:
                tcp, place = self._outwards(unused)
            elif not hosts:
                raise PeerGone(peer, "it is reached through relays only")
            asking = Asking(self._signer, peer)
            answer = await within(link.call(METHOD, pack(asking.ask(*place)), (), 0), limit_s)
            given = unpack_answer(peer, answer.header, GrantDirect)
            keys = asking.agree(given)
            if near is not None:
                with contextlib.suppress(SwarmError, OSError, asyncio.TimeoutError):
                    end = await self._open(link, keys, near, near=True)
                    unused.pop_all()
                    return end
            if tcp is not None and given.host:
                _check_public(given.host)
                await within(self._knock(tcp, (given.host, given.port)), limit_s)
                unused.pop_all()
                return await self._open(link, keys, tcp, near=False)
        tcp = await _first_that_connects([(host, given.port) for host in hosts][:MAX_HOSTS], limit_s)
        return await self._open(link, keys, tcp, near=False)

    async def _open(
        self, link: ClientConnection, keys: SharedSecret, over: socket.socket, *, near: bool
    ) -> ClientConnection:
        """The connection that was granted, over a socket that is connected; `near`: to this machine."""
        loop, sealer, opener = asyncio.get_running_loop(), Sealer(keys.to_callee), Opener(keys.to_caller)
        end = ClientConnection(link.peer, b"", link.timings)
        end.line, end.direct, end.in_memory = link.line, True, near
        try:
            await loop.sock_sendall(over, keys.ticket + bytes(sealer.seal([OPENING])))
            opening = _opened(opener, await within(_hear(over, SEALED_OPENING_BYTES), self.timings.direct_s))
            stream = PlainStream(end, opening) if near else SealedStream(end, sealer, opener, opening)
            connect = loop.create_unix_connection if near else loop.create_connection
            await connect(lambda: stream, sock=over)
        except BaseException:
            over.close()
            end.fail(PeerGone(link.peer, "no direct connection came about"))
            raise
        self._keep(end)
        return end


def _opened(opener: Opener, sealed: bytes) -> bytes:
    """What is in a whole record. Raises Refused: it is not what the other end sealed."""
    opener.room()[: len(sealed)] = sealed
    if opening := bytes(opener.came(len(sealed))):
        return opening
    raise Refused("less than a record")


async def _hear(came: socket.socket, nbytes: int) -> bytes:
    """The first bytes that are said. Raises OSError."""
    hello = b""
    while len(hello) < nbytes:
        part = await asyncio.get_running_loop().sock_recv(came, nbytes - len(hello))
        if not part:
            raise OSError("the stranger is gone")
        hello += part
    return hello


async def _first_that_connects(places: Sequence[tuple[str, int]], limit_s: float) -> socket.socket:
    """A connection to one of these. Raises OSError or asyncio.TimeoutError: to none."""
    failed: Exception = OSError("the peer has no host that could be dialled")
    for place in places:
        tcp = socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET, socket.SOCK_STREAM)
        tcp.setblocking(False)
        try:
            _set_up(tcp)
            await within(asyncio.get_running_loop().sock_connect(tcp, place), limit_s / len(places))
            return tcp
        except BaseException as error:
            tcp.close()
            if not isinstance(error, OSError | asyncio.TimeoutError):
                raise
            failed = error
    raise failed


def _check_public(host: str) -> None:
    """Raises Refused: no peer has us connect to what is in our own network."""
    with contextlib.suppress(ValueError):
        if plain_ip(host).is_global:
            return
    raise Refused(f"{host} is no address of the internet")


def _set_up(tcp: socket.socket) -> None:
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _TCP:
        if hasattr(socket, name):
            tcp.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
