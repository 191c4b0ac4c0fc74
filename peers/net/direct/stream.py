"""The stream of a direct connection: for a socket a protocol, for a `Connection` the transport below it."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from collections.abc import Sequence
from typing import cast

from peers.clock import now_s
from peers.net.bandwidth import Allowance
from peers.net.connection import Connection
from peers.net.direct.records import SMALL_BYTES, Opener, Sealer
from swarm.errors import PeerGone, Refused
from swarm.wire import frames
from swarm.wire.buffers import Buffer

SMALL_PER_S = 4096.0
"""Small records that are read: as many as frames of a caller in a second (`peers.net.bandwidth`). Chunks of
bodies come in larger ones."""
SMALL_AT_ONCE = 16384.0
CHUNK_S = 0.1
"""A chunk of a body is what TCP sends in this. While it has one the kernel asks for more: we may be late."""
_LEAST_CHUNK_BYTES = 8192
FRESH_S = 0.02
"""So long the pace of TCP is believed: on a fast line many chunks pass in it."""
_TCP_INFO = struct.Struct("=16xI48xI8xI36xQ20xI8xQ")
"""Of Linux 4.9: bytes of a packet; smoothed round trip, in microseconds; packets that may be on their way;
bytes that have arrived; the least round trip; bytes that arrive in a second. Older ones tell less."""


def _observed(tcp: socket.socket) -> tuple[int, int, int, int, int, int]:
    """What the kernel knows of a connection, see `_TCP_INFO`; zeros for what it does not tell."""
    told = tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    return _TCP_INFO.unpack(told.ljust(_TCP_INFO.size, b"\0"))


class Stream(asyncio.Transport, asyncio.BufferedProtocol):
    """What comes on the socket is read into one buffer again and again."""

    def __init__(self, end: Connection, opening: bytes, hello: bytes = b"") -> None:
        """`opening`: what its end hears first; `hello`: what is said on the socket then, as it is."""
        super().__init__()
        self.end, self._opening, self._hello = end, opening, hello
        self._below = cast(asyncio.Transport, None)
        """There from `connection_made` on; nothing else is called before."""
        self._small = Allowance(SMALL_PER_S, SMALL_AT_ONCE)

    # -- as a protocol of the socket ------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._below = cast(asyncio.Transport, transport)
        if self.end.over:  # given up meanwhile
            self._below.abort()
            return
        self.end.connection_made(self)
        if self._opening:
            self.end.data_received(self._opening)
        if self._hello and not self.end.over:  # else refused meanwhile
            self._below.write(self._hello)

    def pause_writing(self) -> None:
        self.end.pause_writing()

    def resume_writing(self) -> None:
        self.end.resume_writing()

    def _small_came(self, count: int) -> None:
        """So many small records or reads: too many of them cost time as frames do."""
        self.end.rest(self._small.take(count, now=now_s()))

    def eof_received(self) -> bool:
        return self.end.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self.end.connection_lost(exc)

    # -- as the transport of its end ------------------------------------------------------------

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._below.set_write_buffer_limits(high=high, low=low)

    def write(self, data: Buffer) -> None:
        self.writelines((data,))

    def write_eof(self) -> None:
        self._below.write_eof()

    def abort(self) -> None:
        self._below.abort()

    def pause_reading(self) -> None:
        self._below.pause_reading()

    def resume_reading(self) -> None:
        self._below.resume_reading()


class PlainStream(Stream):
    """Carries all as it is, between processes of one machine and user."""

    def __init__(self, end: Connection, opening: bytes, hello: bytes = b"") -> None:
        super().__init__(end, opening, hello)
        self._came = memoryview(bytearray(frames.CHUNK_BYTES))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._came

    def buffer_updated(self, nbytes: int) -> None:
        if self.end.over:
            return
        self.end.data_received(self._came[:nbytes])
        if nbytes < SMALL_BYTES:
            self._small_came(1)

    def writelines(self, list_of_data: Sequence[Buffer]) -> None:  # type: ignore
        self._below.writelines(list_of_data)


class SealedStream(Stream):
    """Seals what its end writes, and gives it what the other end sealed: nothing else reaches it."""

    def __init__(
        self, end: Connection, sealer: Sealer, opener: Opener, opening: bytes = b"", hello: bytes = b""
    ) -> None:
        super().__init__(end, opening, hello)
        self._sealer, self._opener = sealer, opener
        self._arrived = 0
        """Bytes at the other end, when that was observed last."""
        self._observed_at = float("-inf")
        self._most_unsent = 0
        """Bytes that the kernel takes beyond what it has sent; 0: any."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.end.outbox.gauge = self._gauge if sys.platform == "linux" else None
        if self.end.outbox.gauge and not self.end.over:
            self.end.line.limiter.gauges.add(self.end.outbox.gauge)

    def connection_lost(self, exc: Exception | None) -> None:
        self.end.line.limiter.gauges.discard(self._gauge)
        super().connection_lost(exc)

    def _gauge(self) -> tuple[int, float]:
        """See `peers.net.bandwidth.Gauge`."""
        if self.end.over:
            return 0, 0.0
        _, rtt_us, _, arrived, least_rtt_us, _ = _observed(self._below.get_extra_info("socket"))
        since, self._arrived = arrived - self._arrived, arrived
        return since, 1e-6 * max(0, rtt_us - least_rtt_us)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._opener.room()

    def buffer_updated(self, nbytes: int) -> None:
        if self.end.over:
            return
        try:
            plain = self._opener.came(nbytes)
        except Refused as error:
            # Anybody on the way can change bytes: that is no fault of the peer.
            self.end.fail(PeerGone(self.end.peer, f"the direct connection was disturbed: {error.text}"))
            return
        self.end.data_received(plain)
        if self._opener.small:
            self._small_came(self._opener.small)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        super().set_write_buffer_limits(high=high, low=low)
        self._keep_queue_short()

    def _keep_queue_short(self) -> None:
        """Queue by the pace of the line, which TCP knows however late we are with what it sends."""
        tcp, self._observed_at = self._below.get_extra_info("socket"), now_s()
        if tcp is None or not hasattr(socket, "TCP_NOTSENT_LOWAT"):
            return
        if sys.platform == "linux":
            packet_bytes, rtt_us, packets, _, _, arrives = _observed(tcp)
            may_per_s = 1e6 * packet_bytes * packets / max(1, rtt_us)
            chunk_bytes = int(CHUNK_S * min(may_per_s, arrives or may_per_s))
            self.end.chunk_bytes = max(_LEAST_CHUNK_BYTES, min(frames.CHUNK_BYTES, chunk_bytes))
        if self._most_unsent != 2 * self.end.chunk_bytes:
            self._most_unsent = 2 * self.end.chunk_bytes
            tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, self._most_unsent)

    def writelines(self, list_of_data: Sequence[Buffer]) -> None:  # type: ignore
        """As few records as it takes, for all of these together."""
        if len(list_of_data) > 1 and now_s() - self._observed_at >= FRESH_S:  # a chunk of a body
            self._keep_queue_short()
        self._below.write(self._sealer.seal(list_of_data))
