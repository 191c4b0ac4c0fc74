# (protobuf's generated modules and hivemind's attributes carry no types)
"""Talking to our p2pd: requests on its control socket, and the short calls between peers that the DHT makes.

hivemind's client does both, but opens streams that copy every byte twice more than needed, leaks a socket
when an attempt is cancelled, reads nothing more after a call that is cancelled while its answer arrives, and
runs any number of handlers at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

import base58
from google.protobuf.message import DecodeError

from peers.clock import now_s
from peers.net._hivemind import Multiaddr, p2pd_pb2
from peers.net.connection import FrameError, pack_varint, read_varint
from peers.net.identity import (
    CIRCUIT,
    MAX_ADDRESSES,
    Endpoint,
    public_key_of,
    split_peer_id,
    tcp_endpoints,
    without_peer_id,
)
from peers.net.timings import DEFAULT_TIMINGS
from peers.system import shortage
from peers.waiting import TaskKeeper, fail, within
from swarm.errors import SwarmError
from swarm.ids import PeerId

_MAX_MESSAGE_BYTES = 8 * 1024 * 1024
"""Of p2pd. It passes on 4 MiB of a stranger, and what it adds must not end our connection."""
_SHORT_CALLS = "swarm.dht"
_MAX_HANDLERS = 512
"""Calls of strangers to our DHT node that may be worked on at a time; each takes about 1 ms."""
_MAX_LOOKUPS = 2
"""Names that are looked up at a time. Each may keep one of few threads for half a minute, if no name server
answers; p2pd looks others up without any."""
_P2P = pack_varint(421)
"""The code of `/p2p` in a multiaddr's bytes."""

CallHandler: TypeAlias = Callable[[bytes, PeerId], Awaitable[bytes]]
"""Answers a short call of a peer."""


class ControlError(SwarmError):
    """p2pd says no, or says nothing. `text` is its reason."""

    code = "control"


class NobodyListens(ControlError):
    """Where a peer is to be dialled."""


class ShortOfFiles(ControlError):
    """We could not even ask: this process or machine has no free file descriptors. p2pd may be well."""


def _not_asked(error: OSError) -> ControlError:
    short = shortage(error)
    return ShortOfFiles(short) if short else ControlError(f"p2pd cannot be reached: {error}")


def _delimited(message: Any) -> bytes:
    """A protobuf message with its length before it."""
    data = message.SerializeToString()
    return pack_varint(len(data)) + data


async def _read_message(reader: asyncio.StreamReader) -> bytes:
    """Raises ControlError if p2pd ends before it, or says something impossible."""
    size, found = b"", None
    try:
        while found is None:
            size += await reader.readexactly(1)
            found = read_varint(memoryview(size))
        if found[0] > _MAX_MESSAGE_BYTES:
            raise ControlError(f"p2pd announces an answer of {found[0]} bytes")
        return await reader.readexactly(found[0])
    except FrameError as error:
        raise ControlError(str(error)) from None
    except (asyncio.IncompleteReadError, OSError):
        raise ControlError("p2pd closed the connection") from None


class DaemonControl:
    """Requests to the p2pd that listens at `path`, where another one may take the place of one that died;
    and, after `attach`, short calls to peers."""

    def __init__(self, path: Path, timeout_s: float = DEFAULT_TIMINGS.control_s) -> None:
        self.path, self._timeout_s = path, timeout_s
        self._tasks = TaskKeeper()
        self._writer: asyncio.StreamWriter | None = None
        """Of the connection for short calls."""
        self._pending: dict[bytes, asyncio.Future[bytes]] = {}
        self._handler: CallHandler | None = None
        self._handling: dict[bytes, asyncio.Task[None]] = {}
        self._lookups: set[asyncio.Future[Any]] = set()

    async def _ask(self, kind: str, timeout_s: float | None = None, **fields: Any) -> Any:
        """The answer to a request, as a p2pd_pb2.Response. Raises ControlError: a refusal, or none."""
        _, writer, response = await self._begin(kind, timeout_s, **fields)
        writer.transport.abort()
        return response

    async def _begin(
        self, kind: str, timeout_s: float | None = None, **fields: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Any]:
        """A connection to p2pd that begins with a request, and the answer to it. Raises as `_ask`."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            reader, writer = await asyncio.open_unix_connection(str(self.path))
        except OSError as error:
            raise _not_asked(error) from None
        try:
            writer.write(_request(kind, **fields))
            return reader, writer, check_response(await within(_read_message(reader), timeout_s))
        except BaseException as error:
            writer.transport.abort()
            if isinstance(error, asyncio.TimeoutError):
                raise ControlError(f"no answer within {timeout_s:g} s") from None
            raise

    async def identify(self) -> tuple[PeerId, tuple[str, ...]]:
        """Our peer id, and the addresses that p2pd believes to be reachable at (without the id)."""
        found = (await self._ask("IDENTIFY")).identify
        return _peer_id(found.id), tuple(str(Multiaddr(raw)) for raw in found.addrs)

    async def connect(self, peer: PeerId, addresses: Sequence[str], timeout_s: float) -> None:
        """Connect to a peer, at these addresses or those that p2pd knows; at once if it is already.

        A bare TCP connection is tried first. libp2p waits longer after each dial that failed (5, 6, 9, 14 s …
        5 minutes), and would long not see that a peer is back.

        Raises:
            ControlError: it cannot be reached.
        """
        endpoints = set(tcp_endpoints(addresses))
        names = sum(endpoint.ip is None for endpoint in endpoints)
        knocks = not names or names + len(self._lookups) <= _MAX_LOOKUPS
        if endpoints and knocks and peer not in await self.connections(peer):
            end = now_s() + timeout_s
            await _one_listens(endpoints, timeout_s, self._lookups)
            timeout_s = max(0.1, end - now_s())
        request = p2pd_pb2.ConnectRequest(
            peer=peer_bytes(peer), addrs=_raw_addresses(addresses), timeout=max(1, round(timeout_s))
        )
        await self._ask("CONNECT", timeout_s, connect=request)

    async def disconnect(self, peer: PeerId) -> None:
        """Close the connections to a peer: one that is silent may hold packets back for long after a cut."""
        await self._ask("DISCONNECT", disconnect=p2pd_pb2.DisconnectRequest(peer=peer_bytes(peer)))

    async def connections(self, *of: PeerId) -> dict[PeerId, list[str]]:
        """Of each peer that p2pd is connected to, the far ends as multiaddrs without its id; or `of` some,
        since to read those of a thousand takes 16 ms.
        """
        response, wanted = await self._ask("LIST_PEERS"), {*map(peer_bytes, of)}
        found: dict[PeerId, list[str]] = defaultdict(list)
        for info in response.peers:
            if not of or info.id in wanted:
                found[_peer_id(info.id)] += [str(Multiaddr(raw)) for raw in info.addrs]
        return found

    async def is_direct(self, peer: PeerId) -> bool:
        """Whether a connection to a peer passes no relay."""
        return any(CIRCUIT not in address for address in (await self.connections(peer))[peer])

    @property
    def streams_path(self) -> Path:
        """The unix socket to which p2pd brings incoming streams."""
        return self.path.with_name("streams.sock")

    async def serve_streams(self, protocol: str) -> None:
        """From now on p2pd brings incoming streams of the protocol to `streams_path`."""
        address = Multiaddr(f"/unix{self.streams_path}").to_bytes()
        request = p2pd_pb2.StreamHandlerRequest(addr=address, proto=[protocol], balanced=False)
        await self._ask("STREAM_HANDLER", streamHandler=request)

    async def open_stream(self, make: Callable[[bytes], Any], peer: PeerId, protocol: str) -> Any:
        """A connection to p2pd whose protocol object, `make(request)`, asks for a stream to the peer."""
        wanted = p2pd_pb2.StreamOpenRequest(peer=peer_bytes(peer), proto=[protocol])
        request = _request("STREAM_OPEN", streamOpen=wanted)
        loop = asyncio.get_running_loop()
        try:
            _, link = await loop.create_unix_connection(lambda: make(request), str(self.path))
        except OSError as error:
            raise _not_asked(error) from None
        return link

    # -- short calls between peers --------------------------------------------------------------

    async def attach(self) -> None:
        """Open the connection for short calls: the p2pd ends with it. Raises ControlError if that fails."""
        reader, self._writer, _ = await self._begin("PERSISTENT_CONN_UPGRADE")
        self._tasks.create_task(self._read_calls(reader))

    async def detach(self) -> None:
        """End it, and all calls."""
        await self._tasks.close()
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None

    async def serve_calls(self, handler: CallHandler) -> None:
        """Answer the short calls of peers from now on. Raises ControlError."""
        self._handler = handler
        request = p2pd_pb2.AddUnaryHandlerRequest(proto=_SHORT_CALLS, balanced=False)
        try:
            await within(self._lasting(addUnaryHandler=request), self._timeout_s)
        except asyncio.TimeoutError:
            raise ControlError(f"no answer within {self._timeout_s:g} s") from None

    async def call_peer(self, peer: PeerId, data: bytes) -> bytes:
        """The answer to a short call. Raises ControlError: there is none, or it is an error."""
        if len(data) > _MAX_MESSAGE_BYTES // 4:
            raise ControlError(f"a DHT message of {len(data)} bytes")
        request = p2pd_pb2.CallUnaryRequest(peer=peer_bytes(peer), proto=_SHORT_CALLS, data=data)
        return await self._lasting(callUnary=request)

    async def _lasting(self, **fields: Any) -> bytes:
        """The answer to a request on the connection for short calls."""
        call, answer = uuid4().bytes, asyncio.get_running_loop().create_future()
        self._pending[call] = answer
        try:
            self._say(call, **fields)
            return await answer
        except asyncio.CancelledError:
            with contextlib.suppress(ControlError):
                self._say(call, cancel=p2pd_pb2.Cancel())
            raise
        finally:
            del self._pending[call]

    def _say(self, call: bytes, **fields: Any) -> None:
        if self._writer is None or self._writer.is_closing():
            raise ControlError("p2pd closed the connection")
        self._writer.write(_delimited(p2pd_pb2.PersistentConnectionRequest(callId=call, **fields)))

    async def _read_calls(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                message = p2pd_pb2.PersistentConnectionResponse()
                message.ParseFromString(await _read_message(reader))
                self._heard(message)
                await asyncio.sleep(0)  # many may be here: those before are worked on, and other streams read
        finally:
            if self._writer is not None:
                self._writer.transport.abort()
            for answer in self._pending.values():
                fail(answer, ControlError("p2pd closed the connection"))

    def _heard(self, message: Any) -> None:
        call, answer, response = message.callId, self._pending.get(message.callId), message.callUnaryResponse
        if message.HasField("requestHandling"):
            if len(self._handling) >= _MAX_HANDLERS:
                self._say(call, unaryResponse=p2pd_pb2.CallUnaryResponse(error=b"too busy"))
                return
            task = self._handling[call] = self._tasks.create_task(self._handle(call, message.requestHandling))
            task.add_done_callback(lambda _: self._handling.pop(call, None))
        elif message.HasField("cancel"):
            if call in self._handling:
                self._handling[call].cancel()
        elif answer is None or answer.done():
            pass  # given up before
        elif message.HasField("daemonError"):
            fail(answer, ControlError(_text(message.daemonError.message)))
        elif response.HasField("error"):
            fail(answer, ControlError(response.error.decode(errors="replace")))
        else:
            answer.set_result(response.response)

    async def _handle(self, call: bytes, request: Any) -> None:
        assert self._handler is not None
        try:
            answer = await self._handler(request.data, _peer_id(request.peer))
            response = p2pd_pb2.CallUnaryResponse(response=answer)
        except Exception as error:  # noqa: BLE001  whatever a stranger's bytes are to protobuf
            response = p2pd_pb2.CallUnaryResponse(error=repr(error)[:300].encode())
        self._say(call, unaryResponse=response)


def _request(kind: str, **fields: Any) -> bytes:
    return _delimited(p2pd_pb2.Request(type=p2pd_pb2.Request.Type.Value(kind), **fields))


def check_response(data: bytes) -> Any:
    """A p2pd_pb2.Response from its bytes. Raises ControlError if it is malformed or says no."""
    response = p2pd_pb2.Response()
    try:
        response.ParseFromString(data)
    except DecodeError as error:
        raise ControlError(f"p2pd answered something else: {error}") from None
    if response.type == p2pd_pb2.Response.ERROR:
        why = _text(response.error.msg)[:300]  # of several lines, with bullets
        raise ControlError(" ".join(why.split()))
    return response


def _text(value: str | bytes) -> str:
    """protobuf gives a string that is no UTF-8 as bytes: a stranger's words may be in it."""
    return value if isinstance(value, str) else value.decode(errors="replace")


def stream_peer(data: bytes) -> PeerId:
    """The peer that opened an incoming stream, from p2pd's p2pd_pb2.StreamInfo."""
    info = p2pd_pb2.StreamInfo()
    try:
        info.ParseFromString(data)
    except DecodeError as error:
        raise FrameError(f"p2pd introduced a stream with something else: {error}") from None
    return _peer_id(info.peer)


def peer_bytes(peer: PeerId) -> bytes:
    """Raises ControlError if this is no peer id."""
    try:
        return base58.b58decode(peer)
    except ValueError:
        raise ControlError(f"{peer[:80]!r} is not a peer id") from None


def _peer_id(data: bytes) -> PeerId:
    return base58.b58encode(data).decode()


async def _connect(endpoint: Endpoint, lookups: set[asyncio.Future[Any]]) -> None:
    """Raises OSError or ValueError. Ends the connection itself: a caller that gave up would lose it, open.

    A lookup goes on when its caller gave up, since its thread does: `lookups` has it until then.
    """
    loop, host = asyncio.get_running_loop(), endpoint.host
    if endpoint.ip is None:
        family = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}.get(endpoint.kind, socket.AF_UNSPEC)
        lookup = asyncio.ensure_future(loop.getaddrinfo(host, endpoint.port, family=family))
        lookups.add(lookup)
        lookup.add_done_callback(lambda done: lookups.discard(done) or done.cancelled() or done.exception())
        host = str((await asyncio.shield(lookup))[0][4][0])
    knocking, _ = await loop.create_connection(asyncio.Protocol, host, endpoint.port)
    knocking.abort()


async def _one_listens(
    endpoints: Collection[Endpoint], timeout_s: float, lookups: set[asyncio.Future[Any]]
) -> None:
    """Return as soon as one of the endpoints takes a TCP connection. Raises ControlError: why none does."""
    reasons: list[str] = []

    async def knock(endpoint: Endpoint) -> str:
        """Why it takes none; nothing if it does."""
        try:
            await within(_connect(endpoint, lookups), timeout_s)
            return ""
        except asyncio.TimeoutError:
            words = f"no connection within {timeout_s:g} s"
        except (OSError, ValueError, OverflowError) as error:
            words = os.strerror(n) if (n := getattr(error, "errno", 0) or 0) > 0 else str(error)
        return f"{endpoint.host}:{endpoint.port}: {words}"

    knocking = TaskKeeper()
    try:
        for knocked in asyncio.as_completed([knocking.create_task(knock(end)) for end in endpoints]):
            if not (why := await knocked):
                return
            reasons.append(why)
    finally:
        await knocking.close()
    raise NobodyListens("; ".join(sorted(reasons))[:300])


def _raw_addresses(addresses: Sequence[str]) -> list[bytes]:
    """Those that can be parsed: a stranger's record may hold anything."""
    raw: list[bytes] = []
    for address in addresses[:MAX_ADDRESSES]:
        with contextlib.suppress(Exception):
            raw.append(_raw_address(without_peer_id(address)))
    return raw


def _raw_address(address: str) -> bytes:
    """Its bytes. Raises all sorts of errors if it is no multiaddr: p2pd refuses all for one that is none.

    hivemind writes the id of a relay as a CID, which go-multiaddr does not read.
    """
    relay, circuit, _ = address.partition(CIRCUIT)
    if not circuit:
        return Multiaddr(address).to_bytes()
    place, peer = split_peer_id(relay)
    if public_key_of(peer) is None:
        raise ValueError(f"{peer[:80]!r} is not a peer id")
    id_bytes = peer_bytes(peer)
    length = pack_varint(len(id_bytes))
    return Multiaddr(place).to_bytes() + _P2P + length + id_bytes + Multiaddr(circuit).to_bytes()
