"""A direct connection over a slow line, in virtual time: what is small waits for little, and nothing stands
still."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import pytest

from peers.net.bandwidth import Traffic
from peers.net.connection import ClientConnection, ServedCall, ServerConnection
from peers.net.direct.paths import OPENING
from peers.net.direct.records import Opener, Sealer
from peers.net.direct.stream import CHUNK_S, SealedStream
from swarm.wire import frames

pytestmark = pytest.mark.virtual_time

PART_BYTES = 190_000
"""A chunk of an all-reduce between four replicas with a million weights."""
TICK_S = 0.005
RTT_S = 0.1
PACKET_BYTES = 1448


class Tcp(asyncio.Transport):
    """A socket, its kernel, and the line behind them."""

    def __init__(self, stream: SealedStream, bytes_per_s: float, late_s: float = 0.0) -> None:
        """`late_s`: how long the process takes to notice that the kernel asks for more."""
        super().__init__()
        self.stream, self.bytes_per_s, self.late_s = stream, bytes_per_s, late_s
        self.window_bytes_per_s = bytes_per_s
        """The pace that its window allows: what it keeps to itself may be slower, as it is with BBR."""
        self.other: Tcp | None = None
        self.most_unsent = 1 << 30
        self._waits, self._unsent, self._paused, self._woken = b"", b"", False, False
        stream.connection_made(self)

    # -- as a socket

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        """Linux' `struct tcp_info`."""
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        info = bytearray(232)
        struct.pack_into("=I", info, 16, PACKET_BYTES)
        struct.pack_into("=I", info, 68, int(1e6 * RTT_S))
        struct.pack_into("=I", info, 80, max(1, int(self.window_bytes_per_s * RTT_S / PACKET_BYTES)))
        struct.pack_into("=Q", info, 160, int(self.bytes_per_s))
        return bytes(info[:size])

    def setsockopt(self, level: int, option: int, value: int) -> None:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
        self.most_unsent = value

    # -- as a transport

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self if name == "socket" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == 0, "what waits in the process is passed by nothing"

    def write(self, data: Any) -> None:
        self._waits += bytes(data)
        self._push()
        if self._waits and not self._paused:
            self._paused = True
            self.stream.pause_writing()

    def abort(self) -> None:
        """A test ends."""

    # -- what the kernel does

    def _push(self) -> None:
        room = max(0, self.most_unsent - len(self._unsent))
        self._unsent, self._waits = self._unsent + self._waits[:room], self._waits[room:]

    def _wake(self) -> None:
        self._woken = False
        self._push()
        if self._paused and not self._waits:
            self._paused = False
            self.stream.resume_writing()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            size = int(self.bytes_per_s * TICK_S)
            sent, self._unsent = self._unsent[:size], self._unsent[size:]
            while sent and self.other is not None:
                room = self.other.stream.get_buffer(-1)
                part, sent = sent[: len(room)], sent[len(room) :]
                room[: len(part)] = part
                self.other.stream.buffer_updated(len(part))
            if self._paused and not self._woken and 2 * len(self._unsent) < self.most_unsent:
                self._woken = True
                loop.call_later(self.late_s, self._wake)


class Pair:
    """A caller, a peer that takes all that comes and answers at once, and the line from one to the other."""

    def __init__(self, bytes_per_s: float, late_s: float = 0.0) -> None:
        self.client = ClientConnection("server", OPENING)
        server = ServerConnection(
            lambda link, message: ("caller", Traffic(most_peers=1).of("caller")), self._called
        )
        self.client.direct = server.direct = True
        there, back = bytes(32), bytes([1]) * 32
        to_client = Sealer(back)
        near = SealedStream(self.client, Sealer(there), Opener(back))
        far = SealedStream(server, to_client, Opener(there), hello=bytes(to_client.seal([OPENING])))
        self.line, answers = Tcp(near, bytes_per_s, late_s), Tcp(far, 1e9)
        self.line.other, answers.other = answers, self.line
        self._tasks = [asyncio.ensure_future(tcp.run()) for tcp in (self.line, answers)]

    def _called(self, link: ServerConnection, call: ServedCall) -> None:
        async def answer() -> None:
            await call.accept()
            link.answer(call, b"", [])

        self._tasks.append(asyncio.ensure_future(answer()))

    async def call(self, size: int) -> float:
        """Send a body of that size; how long it took."""
        began = asyncio.get_running_loop().time()
        await self.client.call("take", b"head", [memoryview(bytes(size))] if size else [], 0)
        return asyncio.get_running_loop().time() - began

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.mark.parametrize(("size", "window"), [(0, 1), (32, 1), (32, 20)])
async def test_a_report_passes_the_parts_of_an_all_reduce(size: int, window: int) -> None:
    """Reports and directives have 3 s; without them a replica is left out, and its microbatches run again."""
    pair = Pair(bytes_per_s=250_000.0)
    pair.line.window_bytes_per_s *= window
    parts = [asyncio.ensure_future(pair.call(PART_BYTES)) for _ in range(12)]
    took_s = list[float]()
    while not all(part.done() for part in parts):
        await asyncio.sleep(0.25)
        took_s.append(await pair.call(size))
    await pair.close()
    assert len(took_s) > 10
    assert max(took_s) < 1.5
    assert sorted(took_s)[len(took_s) // 2] < 5 * CHUNK_S
    assert max(part.result() for part in parts) < 1.1 * 12 * PART_BYTES / 250_000.0, "the line is used"


async def test_a_process_that_is_late_uses_the_line_all_the_same() -> None:
    pair = Pair(bytes_per_s=1e6, late_s=CHUNK_S)
    took_s = await pair.call(4 * frames.WINDOW_BYTES)
    await pair.close()
    assert took_s < 1.1 * 4 * frames.WINDOW_BYTES / 1e6


async def test_a_line_that_becomes_fast_is_found_to_be() -> None:
    pair = Pair(bytes_per_s=100_000.0)
    await pair.call(PART_BYTES)
    assert pair.line.most_unsent < 3 * CHUNK_S * pair.line.bytes_per_s
    pair.line.bytes_per_s = pair.line.window_bytes_per_s = 1e8
    await pair.call(4 * frames.WINDOW_BYTES)
    await pair.close()
    assert pair.client.chunk_bytes == frames.CHUNK_BYTES
