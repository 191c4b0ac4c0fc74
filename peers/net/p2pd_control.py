# pyright: reportAttributeAccessIssue=false
# (protobuf's generated modules and hivemind's attributes carry no types)
"""Talking to our p2pd: requests on its control socket, and the client that hivemind's DHT uses.

Streams for calls are opened here too, but not by hivemind's client: that reads a stream through
`asyncio.StreamReader`, which copies every byte twice more than needed, and leaks its socket when an
attempt is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast
from uuid import UUID, uuid4

from google.protobuf.message import DecodeError

from peers.net._hivemind import P2P, Client, ControlClient, DaemonConnector, Multiaddr, PeerID, p2pd_pb2
from peers.net.connection_state import FrameError, pack_varint, read_varint
from peers.net.identity import (
    CIRCUIT,
    MAX_ADDRESSES,
    Place,
    public_key_of,
    split_peer_id,
    tcp_places,
    without_peer_id,
)
from peers.net.p2pd import shortage
from peers.net.timings import DEFAULT_TIMINGS
from peers.waiting import within
from swarm.errors import SwarmError
from swarm.ids import PeerId

_MAX_RESPONSE_BYTES = 4 * 1024 * 1024
_MAX_DHT_HANDLERS = 512
"""Calls of strangers to our DHT node that may be worked on at a time; each takes about 1 ms."""
_P2P = pack_varint(421)
"""The code of `/p2p` in a multiaddr's bytes."""


class ControlError(SwarmError):
    """p2pd says no, or says nothing. `text` is its reason."""

    code = "control"


class ShortOfFiles(ControlError):
    """We could not even ask: this process or machine has no free file descriptors. p2pd may be well."""


def _not_asked(error: OSError) -> ControlError:
    short = shortage(error)
    return ShortOfFiles(short) if short else ControlError(f"p2pd cannot be reached: {error}")


class _OneResponse(asyncio.Protocol):
    """Sends one request and reads one response, each with its length before it."""

    def __init__(self, request: bytes) -> None:
        self.response: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._request = request
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(pack_varint(len(self._request)) + self._request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            found = read_varint(memoryview(bytes(self._received[:5])))
            if found is None or len(self._received) < sum(found):
                if found is None or found[0] <= _MAX_RESPONSE_BYTES:
                    return
                raise FrameError(f"p2pd announces an answer of {found[0]} bytes")
        except FrameError as error:
            self._fail(str(error))
            return
        if not self.response.done():
            self.response.set_result(bytes(self._received[found[1] : sum(found)]))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("p2pd closed the connection")

    def _fail(self, text: str) -> None:
        if not self.response.done():
            self.response.set_exception(ControlError(text))
            self.response.exception()  # seen: the task that asked may be gone


class DaemonControl:
    """Requests to the p2pd that listens at `path`."""

    def __init__(self, path: Path, timeout_s: float = DEFAULT_TIMINGS.control_s) -> None:
        self._path, self._timeout_s = str(path), timeout_s

    async def _ask(self, kind: str, timeout_s: float | None = None, **fields: Any) -> Any:
        """The answer to a request of this kind, as a p2pd_pb2.Response.

        Raises:
            ControlError: p2pd refused, ended, or did not answer in time.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        request = _request(kind, **fields)
        loop = asyncio.get_running_loop()
        try:
            transport, protocol = await loop.create_unix_connection(lambda: _OneResponse(request), self._path)
        except OSError as error:
            raise _not_asked(error) from None
        try:
            data = await within(protocol.response, timeout_s)
        except asyncio.TimeoutError:
            raise ControlError(f"no answer within {timeout_s:g} s") from None
        finally:
            transport.abort()
        return check_response(data)

    async def identify(self) -> tuple[PeerId, tuple[str, ...]]:
        """Our peer id, and the addresses that p2pd believes to be reachable at (without the id)."""
        response = await self._ask("IDENTIFY")
        addresses = tuple(str(Multiaddr(raw)) for raw in response.identify.addrs)
        return PeerID(response.identify.id).to_base58(), addresses

    async def connect(self, peer: PeerId, addresses: Sequence[str], timeout_s: float) -> None:
        """Connect to a peer, at these addresses or those that p2pd knows; at once if it is already.

        A bare TCP connection is tried first. libp2p waits longer after each dial that failed (5, 6, 9, 14 s …
        5 minutes), and would long not see that a peer is back.

        Raises:
            ControlError: it cannot be reached.
        """
        places = tcp_places(addresses)
        if places and peer not in await self.connected():
            end = asyncio.get_running_loop().time() + timeout_s
            await _one_listens(places, timeout_s)
            timeout_s = max(0.1, end - asyncio.get_running_loop().time())
        request = p2pd_pb2.ConnectRequest(
            peer=peer_bytes(peer), addrs=_raw_addresses(addresses), timeout=max(1, round(timeout_s))
        )
        await self._ask("CONNECT", timeout_s, connect=request)

    async def disconnect(self, peer: PeerId) -> None:
        """Close the connections to a peer: one that is silent may hold packets back for long after a cut."""
        request = p2pd_pb2.DisconnectRequest(peer=peer_bytes(peer))
        await self._ask("DISCONNECT", disconnect=request)

    async def _ends(self) -> list[tuple[PeerId, bytes]]:
        """The far end of each connection: the peer, and the multiaddr without its id."""
        response = await self._ask("LIST_PEERS")
        return [(PeerID(info.id).to_base58(), raw) for info in response.peers for raw in info.addrs]

    async def connected(self) -> set[PeerId]:
        """The peers that p2pd is connected to."""
        return {peer for peer, _ in await self._ends()}

    async def connections(self, peer: PeerId) -> list[str]:
        """The far ends of our connections to a peer, as multiaddrs without its id."""
        return [str(Multiaddr(raw)) for other, raw in await self._ends() if other == peer]

    async def relayed(self) -> set[PeerId]:
        """The peers that p2pd is connected to through relays only."""
        ends = await self._ends()
        return {peer for peer, _ in ends} - {peer for peer, raw in ends if CIRCUIT not in str(Multiaddr(raw))}

    async def is_direct(self, peer: PeerId) -> bool:
        """Whether a connection to a peer passes no relay."""
        return any(CIRCUIT not in address for address in await self.connections(peer))

    async def serve_streams(self, protocol: str, socket_path: Path) -> None:
        """From now on p2pd brings incoming streams of the protocol to the unix socket."""
        request = p2pd_pb2.StreamHandlerRequest(
            addr=Multiaddr(f"/unix{socket_path}").to_bytes(), proto=[protocol], balanced=False
        )
        await self._ask("STREAM_HANDLER", streamHandler=request)

    async def open_stream(self, make: Callable[[bytes], Any], peer: PeerId, protocol: str) -> Any:
        """A connection to p2pd whose protocol object, `make(request)`, asks for a stream to the peer."""
        wanted = p2pd_pb2.StreamOpenRequest(peer=peer_bytes(peer), proto=[protocol])
        request = _request("STREAM_OPEN", streamOpen=wanted)
        loop = asyncio.get_running_loop()
        try:
            _, link = await loop.create_unix_connection(lambda: make(request), self._path)
        except OSError as error:
            raise _not_asked(error) from None
        return link


def _request(kind: str, **fields: Any) -> bytes:
    return p2pd_pb2.Request(type=p2pd_pb2.Request.Type.Value(kind), **fields).SerializeToString()


def check_response(data: bytes) -> Any:
    """A p2pd_pb2.Response from its bytes. Raises ControlError if it is malformed or says no."""
    response = p2pd_pb2.Response()
    try:
        response.ParseFromString(data)
    except DecodeError as error:
        raise ControlError(f"p2pd answered something else: {error}") from None
    if response.type == p2pd_pb2.Response.ERROR:
        raise ControlError(" ".join(response.error.msg[:300].split()))  # of several lines, with bullets
    return response


def stream_peer(data: bytes) -> PeerId:
    """The peer that opened an incoming stream, from p2pd's p2pd_pb2.StreamInfo."""
    info = p2pd_pb2.StreamInfo()
    try:
        info.ParseFromString(data)
    except DecodeError as error:
        raise FrameError(f"p2pd introduced a stream with something else: {error}") from None
    return PeerID(info.peer).to_base58()


def peer_bytes(peer: PeerId) -> bytes:
    """Raises ControlError if this is no peer id."""
    try:
        return PeerID.from_base58(peer).to_bytes()
    except ValueError:
        raise ControlError(f"{peer[:80]!r} is not a peer id") from None


async def _one_listens(places: Sequence[Place], timeout_s: float) -> None:
    """Return as soon as one of the places takes a TCP connection.

    Raises:
        ControlError: none does, with the reasons.
    """
    reasons: list[str] = []

    async def knock(host: str, port: int) -> bool:
        try:
            _, writer = await within(asyncio.open_connection(host, port), timeout_s)
        except asyncio.TimeoutError:
            words = f"no connection within {timeout_s:g} s"
        except (OSError, ValueError, OverflowError) as error:
            words = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        else:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            return True
        reasons.append(f"{host}:{port}: {words}")
        return False

    knocks = [asyncio.ensure_future(knock(place.host, place.port)) for place in set(places)]
    try:
        for knocked in asyncio.as_completed(knocks):
            if await knocked:
                return
    finally:
        for knocked in knocks:
            knocked.cancel()
        await asyncio.gather(*knocks, return_exceptions=True)
    raise ControlError("; ".join(sorted(reasons))[:300])


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


class _SafeControl(ControlClient):
    """hivemind's control client with three holes closed, each of which ends or exhausts a long run.

    - A call that is cancelled in the same loop turn in which its answer arrives makes the reading
      task set a result on a cancelled future, which ends that task: no later call is ever answered.
    - A handler whose caller cancels is never forgotten.
    - Any number of handlers may run at a time.
    """

    async def call_unary_handler(self, peer_id: PeerID, proto: str, data: bytes) -> bytes:
        call_id = uuid4()
        request = p2pd_pb2.PersistentConnectionRequest(
            callId=call_id.bytes,
            callUnary=p2pd_pb2.CallUnaryRequest(peer=peer_id.to_bytes(), proto=proto, data=data),
        )
        if request.ByteSize() > self.persistent_conn_max_msg_size // 2:
            raise ControlError(f"a DHT message of {len(data)} bytes")
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._pending_calls[call_id] = answer
        try:
            await self._pending_messages.put(request)
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            self._pending_messages.put_nowait(
                p2pd_pb2.PersistentConnectionRequest(callId=call_id.bytes, cancel=p2pd_pb2.Cancel())
            )
            raise
        finally:
            self._pending_calls.pop(call_id, None)
            if answer.done() and not answer.cancelled():
                answer.exception()  # seen

    async def _handle_persistent_request(self, call_id: UUID, request: Any) -> None:
        try:
            if len(self._handler_tasks) > _MAX_DHT_HANDLERS:
                busy = p2pd_pb2.CallUnaryResponse(error=b"too busy")
                self._pending_messages.put_nowait(
                    p2pd_pb2.PersistentConnectionRequest(callId=call_id.bytes, unaryResponse=busy)
                )
                return
            await super()._handle_persistent_request(call_id, request)
        except KeyError:
            pass  # the parent's own attempt to forget the handler
        finally:
            self._handler_tasks.pop(call_id, None)

    async def close_and_wait(self) -> None:
        """`close` only asks the tasks to end."""
        tasks = [task for task in (self._read_task, self._write_task) if task is not None]
        tasks += list(self._handler_tasks.values())
        for task in tasks:
            task.cancel()
        for call in self._pending_calls.values():
            call.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class AttachedP2P(P2P):
    """hivemind's P2P on a p2pd that another object owns; for the DHT, which uses unary calls only."""

    control: _SafeControl

    @classmethod
    async def attach(cls, control_path: Path, client_path: Path) -> AttachedP2P:
        """Connect to the p2pd at `control_path`. Raises ControlError if it cannot be reached."""
        self = cls()
        self._daemon_listen_maddr = Multiaddr(f"/unix{control_path}")
        self._client_listen_maddr = Multiaddr(f"/unix{client_path}")
        client = Client(_initialized_with_create=True)
        try:
            self.control = await _SafeControl.create(
                daemon_connector=DaemonConnector(self._daemon_listen_maddr),
                listen_maddr=self._client_listen_maddr,
            )
        except OSError as error:
            raise _not_asked(error) from None
        except asyncio.IncompleteReadError as error:
            raise ControlError(f"p2pd cannot be reached: {error}") from None
        client.control = self.control
        self._client = client
        self._alive = True
        await self._ping_daemon()
        return self

    @property
    def answering(self) -> bool:
        """Whether the persistent connection to p2pd is up."""
        task = self.control._read_task
        return task is not None and not task.done()

    async def close(self) -> None:
        """End every task of the client."""
        await self.control.close_and_wait()
        await self.shutdown()
