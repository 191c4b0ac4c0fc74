"""The stream of a direct connection: for TCP a protocol, for a `Connection` the transport below it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

from peers.net.bandwidth import Allowance
from peers.net.connection import Connection
from peers.net.direct.records import SMALL_BYTES, Opener, Sealer, SealError
from swarm.errors import PeerGone
from swarm.wire.buffers import Buffer

SMALL_PER_S = 4096.0
"""Small records that are read: as many as frames of a caller in a second (`peers.net.bandwidth`). Chunks of
bodies come in larger ones."""
SMALL_AT_ONCE = 16384.0


class SealedStream(asyncio.Transport, asyncio.BufferedProtocol):
    """Seals what its end writes, and gives it what the other end sealed: nothing else reaches it."""

    def __init__(self, end: Connection, sealer: Sealer, opener: Opener, hello: bytes = b"") -> None:
        """`hello`: what is sent first, as it is."""
        super().__init__()
        self._end, self._sealer, self._opener, self._hello = end, sealer, opener, hello
        self._tcp = cast(asyncio.Transport, None)
        """There from `connection_made` on; nothing else is called before."""
        self._small = Allowance(SMALL_PER_S, SMALL_AT_ONCE)
        self._paused = self._resting = False
        """Nothing is read: the end wants nothing; the other end sends too many small records."""

    # -- as a protocol of TCP -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._tcp = cast(asyncio.Transport, transport)
        if self._end.over:  # given up meanwhile
            self._tcp.abort()
            return
        if self._hello:
            self._tcp.write(self._hello)
        self._end.connection_made(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._opener.room()

    def buffer_updated(self, nbytes: int) -> None:
        if self._end.over:
            return
        try:
            plain = self._opener.came(nbytes)
        except SealError as error:
            # Anybody on the way can change bytes: that is no fault of the peer.
            self._end.fail(PeerGone(self._end.peer, f"the direct connection was disturbed: {error}"))
            return
        if not plain:
            self._end.heard()
            return
        if len(plain) < SMALL_BYTES:
            self._rest()
        self._end.data_received(plain)

    def _rest(self) -> None:
        """A small record came: read nothing more for a while, if there are too many of them."""
        loop = asyncio.get_running_loop()
        rests_s = self._small.take(1.0, now=loop.time())
        if rests_s > 0:
            self._resting = True
            self._tcp.pause_reading()
            loop.call_later(rests_s, self._go_on)

    def _go_on(self) -> None:
        self._resting = False
        if not self._paused and not self._end.over:
            self._tcp.resume_reading()

    def eof_received(self) -> bool:
        return self._end.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end.connection_lost(exc)

    def pause_writing(self) -> None:
        self._end.pause_writing()

    def resume_writing(self) -> None:
        self._end.resume_writing()

    # -- as the transport of its end ------------------------------------------------------------

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._tcp.set_write_buffer_limits(high=high, low=low)

    def write(self, data: Buffer) -> None:
        self.writelines((data,))

    def writelines(self, list_of_data: Sequence[Buffer]) -> None:
        """As few records as it takes, for all of these together."""
        for sealed in self._sealer.seal(list_of_data):
            self._tcp.write(sealed)

    def write_eof(self) -> None:
        self._tcp.write_eof()

    def abort(self) -> None:
        self._tcp.abort()

    def pause_reading(self) -> None:
        self._paused = True
        self._tcp.pause_reading()

    def resume_reading(self) -> None:
        self._paused = False
        if not self._resting:
            self._tcp.resume_reading()
