"""The bodies of calls and answers: where they are received, and what is still to be sent in which order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from peers.net.bandwidth import SMALL_BYTES, Gauge, RateLimiter
from peers.ports import Buffer
from swarm.wire import frames
from swarm.wire.frames import FrameError, Kind

UNLIMITED = 1 << 62
MIN_PACKED_BYTES = 1024
"""Of a smaller part, the code itself is most."""
MIN_SAVED = 0.03
"""Of the first part of a body: else the rest goes as it is."""


def new_buffer(size: int) -> memoryview:
    """`size` writable bytes. Large ones are not cleared first: they are about to be overwritten."""
    if size < 65536:
        return memoryview(bytearray(size))
    import numpy

    return numpy.empty(size, dtype=numpy.uint8).data


def flat(part: Buffer) -> memoryview:
    """The bytes of any contiguous buffer."""
    view = memoryview(part)
    return view.cast("B") if view.nbytes else memoryview(b"")


class Body:
    """A body that comes. Until it is accepted, nothing is reserved for what was only announced."""

    def __init__(
        self, call: int, sizes: Sequence[int], since: float, came_before: int,
        holds: Callable[[int], None] = lambda size: None,
    ) -> None:  # fmt: skip
        """Announced `since`; `came_before`: what had come by all links with the peer, up to that.

        `holds` is told of bytes that are held before it is accepted, and of fewer when they are not.
        """
        self.call, self.sizes, self.since, self.came_before = call, sizes, since, came_before
        self.total, self._holds = sum(sizes), holds
        self.left = self.total
        """Bytes still to come."""
        self.accepted = False
        self.buffers: list[memoryview] = []
        self._early = bytearray()
        self._index, self._offset = 0, 0

    def begin(self, size: int) -> None:
        """A chunk of `size` bytes is about to come."""
        if size > self.left:
            raise FrameError(f"a body with {size - self.left} bytes more than announced")
        come = self.total - self.left + size
        if not self.accepted and come > frames.WINDOW_BYTES + frames.AHEAD_BYTES:
            raise FrameError(f"{come} bytes of a body before it was accepted")

    def put(self, data: memoryview) -> None:
        self.left -= data.nbytes
        if self.accepted:
            self._fill(data)
        else:
            self._early += data
            self._holds(data.nbytes)

    def accept(self) -> None:
        """Reserve the buffers, and move in what came."""
        early, self.accepted = self._early, True
        self.buffers = [new_buffer(size) for size in self.sizes]
        self._fill(memoryview(early))
        self.give_back()

    def _fill(self, data: memoryview) -> None:
        while data:
            room = self.buffers[self._index][self._offset :]
            count = min(room.nbytes, data.nbytes)
            room[:count] = data[:count]
            self._offset, data = self._offset + count, data[count:]
            if count == room.nbytes:
                self._index, self._offset = self._index + 1, 0

    def give_back(self) -> None:
        """Hold nothing any more of what came before it was accepted."""
        self._holds(-len(self._early))
        self._early = bytearray()


class Outgoing:
    """A body on its way out."""

    def __init__(self, call: int, buffers: Sequence[memoryview], credit: int) -> None:
        self.call, self.buffers, self.credit = call, buffers, credit
        self.total = self.left = sum(buffer.nbytes for buffer in buffers)
        self.due: int | None = None
        """Bytes of the link after which it would be through, were it alone; None: not queued yet."""
        self.packs = True
        """Its parts, so far, took fewer bytes packed."""
        self._index, self._offset = 0, 0

    def take(self, most: int = frames.CHUNK_BYTES) -> memoryview:
        """The next chunk; at least 1 byte while `left` and `credit` are not 0."""
        while self._offset == self.buffers[self._index].nbytes:
            self._index, self._offset = self._index + 1, 0
        size = min(most, self.credit, self.buffers[self._index].nbytes - self._offset)
        chunk = self.buffers[self._index][self._offset : self._offset + size]
        self._offset += size
        self.left -= size
        self.credit -= size
        self.buffers = self.buffers if self.left else ()
        return chunk


class Outbox:
    """What one stream still has to send.

    Frames that carry no body go first, then bodies in chunks, one body after the other: that first which
    would be through first if the link had only it to send. So of bodies alike, such as microbatches, the
    first arrives while the last still wait, and the other end has something to do; if they shared the line,
    all would come late together. A small body passes large ones, and each lets about as many bytes pass as
    it has; but one like a frame, such as a report, waits for none, however many are late.
    """

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.turn_at: float | None = None
        """When to ask for the next frame again, if the limit of the upload makes it wait."""
        self._turn_bytes = 0
        """What may be sent of bodies then."""
        self._bodies: list[Outgoing] = []
        self.sent_bytes = 0
        self.gauge: Gauge | None = None
        """Of its link."""

    @property
    def empty(self) -> bool:
        return not self.frames and not self._bodies

    def add(self, outgoing: Outgoing) -> None:
        """Send a body, as far as its credit goes."""
        if outgoing.due is None:
            outgoing.due = self.sent_bytes + outgoing.left if outgoing.left > SMALL_BYTES else 0
        self._bodies.append(outgoing)

    def drop(self, outgoing: Outgoing | None) -> None:
        """Send nothing more of a body; nothing if it is not here."""
        if outgoing in self._bodies:
            self._bodies.remove(outgoing)

    def clear(self) -> None:
        self.frames.clear()
        self._bodies.clear()

    def next(self, limiter: RateLimiter | None, most: int, now: float) -> tuple[Sequence[Buffer], int | None]:
        """The next frame in parts, with at most so many bytes of a body, if one may be sent now; and the call
        whose body is complete with it."""
        frame, whole = (), None
        if self.frames:
            frame = (urgent := self.frames.popleft(),)
            self.sent_bytes += len(urgent)
            if limiter is not None:
                limiter.took(len(urgent), now=now)
        elif self._bodies:
            # That is due first; of those, of the oldest call.
            outgoing = min(self._bodies, key=lambda one: (one.due, one.call))
            packs = limiter if limiter and outgoing.packs and limiter.is_slow(self.gauge) else None
            most = min(most, frames.MAX_PACKED_BYTES) if packs else most
            if most := self._may_send(outgoing, limiter, most, now):
                frame, size = _framed(outgoing, outgoing.take(most), packs, now)
                self.sent_bytes += frames.PREFIX_BYTES + size
                if not outgoing.left or not outgoing.credit:
                    self._bodies.remove(outgoing)
                whole = None if outgoing.left else outgoing.call
        return frame, whole

    def _may_send(self, outgoing: Outgoing, limiter: RateLimiter | None, most: int, now: float) -> int:
        """Bytes of a body, at most so many; 0 if its turn is still to come, at `turn_at`."""
        if limiter is None:
            return most
        if self.turn_at is None:
            wanted = min(limiter.turn_bytes, most, outgoing.left, outgoing.credit)
            wait_s = limiter.take(wanted + frames.PREFIX_BYTES, now=now, link=self.gauge)
            self._turn_bytes, self.turn_at = wanted, now + wait_s
        if now < self.turn_at:
            return 0
        self.turn_at = None
        return self._turn_bytes


def _framed(
    outgoing: Outgoing, chunk: memoryview, packs: RateLimiter | None, now: float
) -> tuple[Sequence[Buffer], int]:
    """A part of a body as a frame, and its bytes. `packs`: of the slow line for which it is to be packed."""
    if packs and MIN_PACKED_BYTES <= chunk.nbytes <= frames.MAX_PACKED_BYTES:
        packed = frames.pack_part(chunk)
        saved = chunk.nbytes - len(packed)
        outgoing.packs = saved > MIN_SAVED * chunk.nbytes
        if saved > 0:
            packs.returned(saved, now=now)
            return (frames.pack_prefix(Kind.PACKED, outgoing.call, len(packed)), packed), len(packed)
    return (frames.pack_prefix(Kind.BODY, outgoing.call, 0, chunk.nbytes), chunk), chunk.nbytes
