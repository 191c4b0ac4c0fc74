"""The stream of a direct connection: the protocol of its socket, between that and a `Connection`."""

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


class Stream(asyncio.BufferedProtocol):
    """What comes on the socket is read into one buffer again and again; all else is for its end."""

    def __init__(self, end: Connection, opening: bytes, hello: bytes = b"") -> None:
        """`opening`: what its end hears first; `hello`: what is said on the socket then, as it is."""
        self.end, self._opening, self._hello = end, opening, hello
        self.pause_writing, self.resume_writing = end.pause_writing, end.resume_writing
        self.eof_received, self.connection_lost = end.eof_received, end.connection_lost
        self._small = Allowance(SMALL_PER_S, SMALL_AT_ONCE)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        below = cast(asyncio.Transport, transport)
        if self.end.over:  # given up meanwhile
            below.abort()
            return
        self.end.connection_made(below)
        if self._opening:
            self.end.data_received(self._opening)
        if self._hello and not self.end.over:  # else refused meanwhile
            below.write(self._hello)

    def _small_came(self, count: int) -> None:
        """So many small records or reads: too many of them cost time as frames do."""
        self.end.rest(self._small.take(count, now=now_s()))


class PlainStream(Stream):
    """Carries all as it is, between processes of one machine and user."""

    def __init__(self, end: Connection, opening: bytes, hello: bytes = b"") -> None:
        super().__init__(end, opening, hello)
        self._came = memoryview(bytearray(frames.CHUNK_BYTES))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.end.write = cast(asyncio.Transport, transport).writelines  # at once: small reads are counted
        super().connection_made(transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._came

    def buffer_updated(self, nbytes: int) -> None:
        if self.end.over:
            return
        self.end.data_received(self._came[:nbytes])
        if nbytes < SMALL_BYTES:
            self._small_came(1)


class SealedStream(Stream):
    """Seals what its end writes, and gives it what the other end sealed: nothing else reaches it."""

    def __init__(
        self, end: Connection, sealer: Sealer, opener: Opener, opening: bytes = b"", hello: bytes = b""
    ) -> None:
        super().__init__(end, opening, hello)
        self._sealer, self._opener = sealer, opener
        self._below = cast(asyncio.Transport, None)
        """There from `connection_made` on; nothing else is called before."""
        end.write = self._write
        self._arrived = 0
        """Bytes at the other end, when that was observed last."""
        self._observed_at = float("-inf")
        self._most_unsent = 0
        """Bytes that the kernel takes beyond what it has sent; 0: any."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._below = cast(asyncio.Transport, transport)
        self._keep_queue_short()
        super().connection_made(transport)
        self.end.outbox.gauge = self._gauge if sys.platform == "linux" else None
        if self.end.outbox.gauge and not self.end.over:
            self.end.line.limiter.gauges.add(self.end.outbox.gauge)

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
            # A router on the way can change bytes: that is no fault of the peer.
            self.end.fail(PeerGone(self.end.peer, f"the direct connection was disturbed: {error.text}"))
            return
        self.end.data_received(plain)
        if self._opener.small:
            self._small_came(self._opener.small)

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

    def _write(self, parts: Sequence[Buffer]) -> None:
        """As few records as it takes, for all of these together."""
        if len(parts) > 1 and now_s() - self._observed_at >= FRESH_S:  # a chunk of a body
            self._keep_queue_short()
        self._below.write(self._sealer.seal(parts))
