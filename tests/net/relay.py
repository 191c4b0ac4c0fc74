"""A stand-in for p2pd in the same event loop: real unix sockets, no libp2p, and links that can be stopped."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from peers.net._hivemind import p2pd_pb2
from peers.net.connection import pack_varint
from peers.net.identity import Identity
from peers.net.p2pd_control import ControlError, peer_bytes
from peers.net.transport import NetTransport
from swarm.ids import PeerId
from swarm.wire import frames


class Relay:
    """Brings streams from one transport to another, as p2pd would."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.paths: dict[PeerId, Path] = {}
        self.dials: list[PeerId] = []
        self.direct: set[PeerId] = set()
        """Peers with relayed addresses to which libp2p has found a direct way."""
        self.hidden: set[PeerId] = set()
        """Peers that are reached through a relay of libp2p only."""
        self.flips = False
        """Direct connections change the bytes that they carry."""
        self.disconnects: list[tuple[PeerId, PeerId]] = []
        self.strangers: list[RawCallee] = []
        self.latency_s = 0.0
        """One way."""
        self.bandwidth_bps = 0.0
        """0 = as fast as it goes."""
        self._running: dict[PeerId, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._transports: list[NetTransport] = []
        self._pairs: list[tuple[PeerId, PeerId, list[asyncio.StreamWriter]]] = []
        self.ports: dict[tuple[PeerId, PeerId], asyncio.AbstractServer] = {}
        """Where direct connections of a caller to a callee are carried, as streams are."""

    async def add(self, **options: Any) -> NetTransport:
        """A transport of a new peer."""
        identity = Identity.generate()
        peer = identity.peer_id
        path = self.directory / f"{len(self.paths)}.sock"
        transport = NetTransport(_Control(self, peer, path), identity, **options)  # type: ignore[arg-type]
        await transport.start()
        self.paths[peer] = path
        self._running[peer] = asyncio.Event()
        self._running[peer].set()
        self._transports.append(transport)
        if (direct := transport._dialer.direct) is not None:
            connects = direct._open
            direct._open = lambda link, keys, over, *, near: connects(
                link, keys, self._between(peer, link.peer, over) if near else over, near=near
            )
        return transport

    def _between(self, caller: PeerId, callee: PeerId, far: socket.socket) -> socket.socket:
        """What the caller has instead of its socket to a callee of its machine."""
        near, ours = socket.socketpair()
        near.setblocking(False)
        self._start(self._carry_near(caller, callee, ours, far))
        return near

    async def _carry_near(
        self, caller: PeerId, callee: PeerId, ours: socket.socket, far: socket.socket
    ) -> None:
        ends = await asyncio.open_unix_connection(sock=ours), await asyncio.open_unix_connection(sock=far)
        await self._both_ways(caller, callee, *ends[0], *ends[1])

    def freeze(self, peer: PeerId) -> None:
        """Nothing comes out of the peer, and nothing goes in, until `thaw`."""
        self._running[peer].clear()

    def thaw(self, peer: PeerId) -> None:
        self._running[peer].set()

    def sever(self, peer: PeerId) -> None:
        """Break every stream of the peer."""
        for caller, callee, writers in self._pairs:
            if peer in (caller, callee):
                for writer in writers:
                    writer.transport.abort()

    async def close(self) -> None:
        for event in self._running.values():
            event.set()
        for server in self.ports.values():
            server.close()
        await asyncio.gather(*(transport.close() for transport in self._transports))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(stranger.close() for stranger in self.strangers))

    async def carry(self, caller: PeerId, callee: PeerId, far: socket.socket) -> None:
        """Answer the opening request and pump bytes both ways until an end breaks."""
        near_reader, near_writer = await asyncio.open_unix_connection(sock=far)
        await read_message(near_reader)
        far_reader, far_writer = await asyncio.open_unix_connection(str(self.paths[callee]))
        far_writer.write(introduction(caller))
        near_writer.write(message(p2pd_pb2.Response(type=p2pd_pb2.Response.OK).SerializeToString()))
        await self._both_ways(caller, callee, near_reader, near_writer, far_reader, far_writer)

    async def at(self, caller: PeerId, callee: PeerId) -> str:
        """Where the caller reaches the callee: a host at which it does not listen, with a relay there."""
        host = f"127.0.1.{1 + list(self.paths).index(caller)}"
        transport = next((found for found in self._transports if found.peer_id == callee), None)
        direct = transport._dialer.direct if transport is not None else None
        if direct is not None and direct.port and (caller, callee) not in self.ports:

            async def carry(near_reader: asyncio.StreamReader, near_writer: asyncio.StreamWriter) -> None:
                task = asyncio.current_task()
                assert task is not None
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                try:
                    far_reader, far_writer = await asyncio.open_connection("127.0.0.1", direct.port)
                except OSError:
                    near_writer.transport.abort()
                    return
                await self._both_ways(caller, callee, near_reader, near_writer, far_reader, far_writer)

            self.ports[caller, callee] = await asyncio.start_server(carry, host, direct.port)
        return f"/ip4/{host}/tcp/1"

    async def _both_ways(
        self,
        caller: PeerId,
        callee: PeerId,
        near_reader: asyncio.StreamReader,
        near_writer: asyncio.StreamWriter,
        far_reader: asyncio.StreamReader,
        far_writer: asyncio.StreamWriter,
    ) -> None:
        self._pairs.append((caller, callee, [near_writer, far_writer]))
        task = asyncio.ensure_future(self._pump(near_reader, far_writer, caller, callee))
        try:
            await self._pump(far_reader, near_writer, callee, caller)
        finally:
            task.cancel()
            for writer in (near_writer, far_writer):
                writer.transport.abort()
            await asyncio.gather(task, return_exceptions=True)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, source: PeerId, target: PeerId
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 18 if not self.bandwidth_bps else 4096):
                if self.latency_s or self.bandwidth_bps:
                    await asyncio.sleep(self.latency_s + 8 * len(data) / (self.bandwidth_bps or math.inf))
                await self._running[source].wait()
                await self._running[target].wait()
                if self.flips and writer.get_extra_info("socket").family == socket.AF_INET:
                    data = bytes([*data[:-1], data[-1] ^ 1])
                writer.write(data)
                await writer.drain()
            writer.write_eof()

    def start(self, caller: PeerId, callee: PeerId, far: socket.socket) -> None:
        self._start(self.carry(caller, callee, far))

    def _start(self, carrying: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(carrying)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Control:
    """What a transport uses of `peers.net.p2pd_control.DaemonControl`."""

    def __init__(self, relay: Relay, peer: PeerId, streams_path: Path) -> None:
        self._relay, self._peer, self.streams_path = relay, peer, streams_path

    async def connect(self, peer: PeerId, addresses: Sequence[str], timeout_s: float) -> None:
        if peer not in self._relay.paths:
            raise ControlError("all dials failed")

    async def connections(self, *of: PeerId) -> dict[PeerId, list[str]]:
        far = f"/ip4/127.0.0.9/tcp/1/p2p/{self._peer}/p2p-circuit"
        return {
            peer: [far if peer in self._relay.hidden else await self._relay.at(self._peer, peer)]
            for peer in self._relay.paths
        }

    async def is_direct(self, peer: PeerId) -> bool:
        return peer in self._relay.direct

    async def disconnect(self, peer: PeerId) -> None:
        self._relay.disconnects.append((self._peer, peer))

    async def serve_streams(self, protocol: str) -> None:
        assert self.streams_path.exists()

    async def open_stream(self, make: Callable[[bytes], Any], peer: PeerId, protocol: str) -> Any:
        self._relay.dials.append(peer)
        if peer not in self._relay.paths:
            raise ControlError("all dials failed")
        near, far = socket.socketpair()
        _, link = await asyncio.get_running_loop().create_unix_connection(
            lambda: make(message(b"open")), sock=near
        )
        self._relay.start(self._peer, peer, far)
        return link


def message(data: bytes) -> bytes:
    """With its length before it, as p2pd writes."""
    return pack_varint(len(data)) + data


def introduction(caller: PeerId) -> bytes:
    """What p2pd says first on an incoming stream."""
    info = p2pd_pb2.StreamInfo(peer=peer_bytes(caller), addr=b"", proto="x")
    return message(info.SerializeToString())


async def read_message(reader: asyncio.StreamReader) -> bytes:
    length = (await reader.readexactly(1))[0]
    assert length < 128
    return await reader.readexactly(length)


class RawCaller:
    """A stranger with a socket, who writes what he likes to a transport."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: PeerId) -> None:
        self.reader, self.writer, self.peer = reader, writer, peer

    @classmethod
    async def open(cls, path: Path, peer: PeerId | None = None) -> RawCaller:
        reader, writer = await asyncio.open_unix_connection(str(path))
        peer = peer or Identity.generate().peer_id
        writer.write(introduction(peer))
        return cls(reader, writer, peer)

    async def frame(self) -> tuple[frames.Prefix, bytes]:
        """The next frame that is no heartbeat, and what follows its prefix."""
        while True:
            prefix = frames.unpack_prefix(await self.reader.readexactly(frames.PREFIX_BYTES))
            data = await self.reader.readexactly(prefix.header_bytes + prefix.body_bytes)
            if prefix.kind is not frames.Kind.ALIVE:
                return prefix, data

    async def closed(self) -> None:
        """Wait until the other end closes."""
        with contextlib.suppress(OSError):
            while await self.reader.read(65536):
                pass

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


class RawCallee:
    """A stranger who is called, and answers what he likes: a server at a path that a relay dials."""

    def __init__(self, answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]) -> None:
        self._answer = answer
        self._server: asyncio.AbstractServer | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def listen(self, relay: Relay) -> PeerId:
        identity = Identity.generate()
        peer = identity.peer_id
        path = relay.directory / f"raw{len(relay.paths)}.sock"
        self._server = await asyncio.start_unix_server(self._serve, str(path))
        relay.paths[peer] = path
        relay._running[peer] = asyncio.Event()
        relay._running[peer].set()
        relay.strangers.append(self)
        return peer

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await read_message(reader)
            await self._answer(reader, writer)
        writer.transport.abort()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def open_links(transport: NetTransport) -> tuple[int, int]:
    """How many streams are open: to peers that it calls, and from peers that call it."""
    return len(transport._dialer.links), len(transport._incoming)


def direct_links(transport: NetTransport) -> tuple[int, int]:
    """How many of them pass no p2pd."""
    links = transport._dialer.links.values(), transport._incoming
    return sum(link.direct for link in links[0]), sum(link.direct for link in links[1])


def memory_links(transport: NetTransport) -> tuple[int, int]:
    """How many of them hand over in memory."""
    links = transport._dialer.links.values(), transport._incoming
    return sum(link.in_memory for link in links[0]), sum(link.in_memory for link in links[1])


class FakeSocket(asyncio.Transport):
    """What a stream does to the connection below it."""

    def __init__(self) -> None:
        super().__init__()
        self.did: list[str] = []

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """It is never full."""

    def write(self, data: object) -> None:
        """What is said is not looked at."""

    def pause_reading(self) -> None:
        self.did.append("pause")

    def resume_reading(self) -> None:
        self.did.append("resume")

    def abort(self) -> None:
        self.did.append("abort")
