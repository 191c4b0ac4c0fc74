"""Direct connections to and from peers that can be dialled: listening, granting, dialling.

Nothing here is needed for a call: where it fails, the stream of p2pd is there, and stays.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from peers.net.bandwidth import Allowance
from peers.net.connection import ClientConnection, Connection, ServerConnection
from peers.net.direct.handshake import (
    TICKET_BYTES,
    Agreed,
    AskDirect,
    Asking,
    GrantDirect,
    grant,
)
from peers.net.direct.records import LENGTH_BYTES, TAG_BYTES, Opener, Sealer, SealError
from peers.net.direct.stream import SealedStream
from peers.net.identity import Identity, plain_ip
from peers.net.tasks import TaskKeeper
from peers.net.timings import NetTimings
from peers.ports import Answer, Request
from peers.waiting import within
from swarm.errors import Busy, PeerGone, Refused, SetupError
from swarm.ids import PeerId
from swarm.wire import frames
from swarm.wire.messages import pack, unpack, unpack_answer

METHOD = "direct"
OPENING = b"\0"
"""The first record each way: a connection that opens with an empty message, where p2pd says something."""
HELLO_BYTES = TICKET_BYTES + LENGTH_BYTES + len(OPENING) + TAG_BYTES
"""What a stranger on the port may say, and what is held of it, until it has shown a ticket and a record."""
MAX_KNOCKS = 64
"""Strangers at a time; one more takes the place of the one that came first."""
KNOCKS_PER_S = 100.0
KNOCKS_AT_ONCE = 256.0
"""Connections beyond wait in the kernel, which refuses them when its queue is full."""
MAX_STREAMS = 256
"""Each takes 64 kB. A peer works with fewer, and more stay on p2pd; grants that are not used yet count."""
MAX_HOSTS = 2
"""Of a peer, that are tried."""
_TCP = (
    ("TCP_NOTSENT_LOWAT", frames.CHUNK_BYTES),
    *(("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)),
)
"""No long queue in the kernel, which heartbeats and small bodies could not pass. Seconds, seconds, times: a
router forgets connections that are idle, and says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectOptions:
    """Whether and where this peer takes direct connections."""

    host: str | None = "127.0.0.1"
    """An IP address; None: only dial others."""
    port: int = 0
    """0: the system chooses one."""
    after_bytes: int = 1 << 20
    """Pairs that moved less stay on p2pd: they need no second connection."""


@dataclass(frozen=True, slots=True)
class _Granted:
    """A connection that may come."""

    peer: PeerId
    keys: Agreed
    until: float


class _Knock(asyncio.BufferedProtocol):
    """A connection to our port that has shown nothing yet."""

    def __init__(self, paths: DirectPaths) -> None:
        self._paths, self._hello, self._here = paths, memoryview(bytearray(HELLO_BYTES)), 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._tcp = cast(asyncio.Transport, transport)
        self._paths.knocks[self] = None
        self._timer = asyncio.get_running_loop().call_later(self._paths.timings.knock_s, self.abort)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._hello[self._here :]

    def buffer_updated(self, nbytes: int) -> None:
        self._here += nbytes
        if self._here == HELLO_BYTES:
            self._forget()
            if not self._paths.admit(bytes(self._hello), self._tcp):
                self.abort()

    def abort(self) -> None:
        """Break the connection."""
        self._forget()
        self._tcp.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()

    def _forget(self) -> None:
        self._timer.cancel()
        self._paths.knocks.pop(self, None)


class DirectPaths:
    """The direct connections of one peer, both ways."""

    def __init__(
        self,
        signer: Identity,
        options: DirectOptions,
        timings: NetTimings,
        receive: Callable[[PeerId], ServerConnection],
    ) -> None:
        """`receive` makes our end of a connection that a peer was granted."""
        self.options, self.timings = options, timings
        self.port = 0
        """That we listen on."""
        self.streams: set[Connection] = set()
        self.knocks: dict[_Knock, None] = {}
        """The oldest first."""
        self._signer, self._receive = signer, receive
        self._tasks = TaskKeeper()
        self._listener: socket.socket | None = None
        self._granted: dict[bytes, _Granted] = {}
        """By ticket, the oldest first."""

    # -- the end that is called -----------------------------------------------------------------

    def listen(self) -> None:
        """Begin to take connections, if that is wanted. Raises SetupError: the port cannot be had."""
        if self.options.host is None or self._listener is not None:
            return
        ip = plain_ip(self.options.host)
        listener = socket.socket(socket.AF_INET6 if ip.version == 6 else socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self.options.host, self.options.port))
            listener.listen(MAX_KNOCKS)
        except OSError as error:
            listener.close()
            raise SetupError(
                f"port {self.options.port} for direct connections cannot be had on {self.options.host} "
                f"({error.strerror}): choose another one with --direct-port, or --no-direct"
            ) from None
        listener.setblocking(False)
        self._listener, self.port = listener, listener.getsockname()[1]
        self._tasks.create_task(self._accept(listener))

    async def close(self) -> None:
        """Take no more connections. Those that are there belong to others."""
        await self._tasks.close()
        if self._listener is not None:
            self._listener.close()
        self._granted.clear()
        for knock in list(self.knocks):
            knock.abort()

    async def _accept(self, listener: socket.socket) -> None:
        loop, pace = asyncio.get_running_loop(), Allowance(KNOCKS_PER_S, KNOCKS_AT_ONCE)
        while True:
            try:
                came, _ = await loop.sock_accept(listener)
            except OSError:  # it is gone again, or files are short
                await asyncio.sleep(1 / KNOCKS_PER_S)
                continue
            if len(self.knocks) >= MAX_KNOCKS:
                next(iter(self.knocks)).abort()
            try:
                _set_up(came)
                await loop.connect_accepted_socket(lambda: _Knock(self), came)
            except OSError:  # the stranger is gone
                came.close()
            await asyncio.sleep(pace.take(1.0, now=loop.time()))

    async def grant(self, request: Request) -> Answer:
        """A handler of the transport: answers `AskDirect`."""
        ask = unpack(request.header, AskDirect)
        if not self.port:
            raise Refused("no direct connections are taken here")
        now = asyncio.get_running_loop().time()
        for ticket, granted in list(self._granted.items()):
            if granted.until < now or granted.peer == request.peer:
                del self._granted[ticket]
        if len(self.streams) + len(self._granted) >= MAX_STREAMS:
            raise Busy(f"{MAX_STREAMS} direct connections are open")
        answer, keys = grant(self._signer, request.peer, ask, self.port)
        self._granted[keys.ticket] = _Granted(request.peer, keys, now + self.timings.grant_s)
        return Answer(pack(answer))

    def admit(self, hello: bytes, tcp: asyncio.Transport) -> bool:
        """Whether this opens a connection that was granted; then it is open, and cannot be opened again."""
        ticket = hello[:TICKET_BYTES]
        granted = self._granted.get(ticket)
        if granted is None or granted.until < asyncio.get_running_loop().time():
            return False
        opener = Opener(granted.keys.to_callee)
        try:
            opening = opener.put(hello[TICKET_BYTES:])
        except SealError:
            return False
        if not opening:
            return False
        del self._granted[ticket]
        end = self._receive(granted.peer)
        end.direct = True
        stream = SealedStream(end, Sealer(granted.keys.to_caller), opener)
        self._keep(end)
        tcp.set_protocol(stream)
        stream.connection_made(tcp)
        end.data_received(opening)
        if not end.over:  # refused meanwhile
            stream.write(OPENING)
        return True

    def _keep(self, end: Connection) -> None:
        self.streams.add(end)
        end.closed.add_done_callback(lambda _: self.streams.discard(end))

    # -- the end that calls ---------------------------------------------------------------------

    async def dial(self, link: ClientConnection, hosts: Iterable[str]) -> ClientConnection:
        """A direct connection to the peer of a link, which is asked over it.

        Raises:
            PeerFault, SwarmError, OSError, asyncio.TimeoutError: there is none.
        """
        peer, limit_s = link.peer, self.timings.direct_s
        if len(self.streams) >= MAX_STREAMS:
            raise Busy(f"{MAX_STREAMS} direct connections are open")
        asking = Asking(self._signer, peer)
        answer = await within(link.call(METHOD, pack(asking.ask()), (), 0), limit_s)
        given = unpack_answer(peer, answer.header, GrantDirect)
        keys = asking.agree(given)
        tcp = await _first_that_connects([(host, given.port) for host in hosts][:MAX_HOSTS], limit_s)
        end = ClientConnection(peer, OPENING, link.timings)
        end.line, end.direct = link.line, True
        stream = SealedStream(end, Sealer(keys.to_callee), Opener(keys.to_caller), keys.ticket)
        try:
            await asyncio.get_running_loop().create_connection(lambda: stream, sock=tcp)
            await within(end.opened, limit_s)
        except BaseException:
            end.fail(PeerGone(peer, "no direct connection came about"))
            raise
        self._keep(end)
        return end


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
        except (OSError, asyncio.TimeoutError) as error:
            tcp.close()
            failed = error
        except BaseException:
            tcp.close()
            raise
    raise failed


def _set_up(tcp: socket.socket) -> None:
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _TCP:
        if hasattr(socket, name):
            tcp.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
