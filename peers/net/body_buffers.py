"""The bodies of calls and answers: where they are received, and what is still to be sent in which order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from peers.net.bandwidth import RateLimiter
from peers.ports import Buffer
from swarm.wire import frames
from swarm.wire.frames import FrameError, Kind

UNLIMITED = 1 << 62


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


class Sink:
    """Buffers of stated sizes, filled in order."""

    __slots__ = ("_index", "_offset", "buffers", "left")

    def __init__(self, sizes: Sequence[int]) -> None:
        self.buffers = [new_buffer(size) for size in sizes]
        self.left = sum(sizes)
        self._index, self._offset = 0, 0

    def begin(self, size: int) -> None:
        """A chunk of `size` bytes is about to come."""
        if size > self.left:
            raise FrameError(f"a body with {size - self.left} bytes more than announced")

    def view(self) -> memoryview:
        """Where the next bytes go; not empty while `left` is not 0."""
        while self._offset == self.buffers[self._index].nbytes:
            self._index, self._offset = self._index + 1, 0
        return self.buffers[self._index][self._offset :]

    def advance(self, count: int) -> None:
        self._offset += count
        self.left -= count

    def put(self, data: memoryview) -> None:
        """Copy data in."""
        while data:
            view = self.view()
            count = min(view.nbytes, data.nbytes)
            view[:count] = data[:count]
            self.advance(count)
            data = data[count:]


class EarlySink:
    """What came before the body was accepted: nothing is reserved for what was only announced."""

    __slots__ = ("_holds", "_parts", "_used", "announced", "held", "received")

    _PART_BYTES = 16 * 1024
    """Small chunks share a part, so that a million of one byte cost what they hold."""

    def __init__(self, announced: int, holds: Callable[[int], None]) -> None:
        """`holds` is told of each byte that is held, and of all when they are given back."""
        self.announced, self._holds = announced, holds
        self.held = 0
        """Bytes reserved."""
        self.received = 0
        """Bytes received or about to be."""
        self._parts: list[memoryview] = []
        self._used: list[int] = []

    def begin(self, size: int) -> None:
        self.received += size
        if self.received > self.announced:
            raise FrameError(f"a body with {self.received - self.announced} bytes more than announced")
        if self.received > frames.WINDOW_BYTES:
            raise FrameError(f"{self.received} bytes of a body before it was accepted")
        if not self._parts or self._parts[-1].nbytes - self._used[-1] < size:
            self._parts.append(memoryview(bytearray(max(size, self._PART_BYTES))))
            self._used.append(0)
            self.held += self._parts[-1].nbytes
            self._holds(self._parts[-1].nbytes)

    def view(self) -> memoryview:
        return self._parts[-1][self._used[-1] :]

    def advance(self, count: int) -> None:
        self._used[-1] += count

    def pour_into(self, sink: Sink) -> None:
        for part, used in zip(self._parts, self._used, strict=True):
            sink.put(part[:used])

    def give_back(self) -> None:
        """Hold nothing any more."""
        self._holds(-self.held)
        self.held = 0
        self._parts, self._used = [], []


class Outgoing:
    """A body on its way out."""

    __slots__ = ("_index", "_offset", "buffers", "call", "credit", "due", "left")

    def __init__(self, call: int, buffers: Sequence[memoryview], credit: int) -> None:
        self.call, self.buffers, self.credit = call, buffers, credit
        self.left = sum(buffer.nbytes for buffer in buffers)
        self.due: int | None = None
        """Bytes of the link after which it would be through, were it alone; None: not queued yet."""
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
        return chunk


class Outbox:
    """What one stream still has to send.

    Frames that carry no body go first, then bodies in chunks, one body after the other: that first which
    would be through first if the link had only it to send. So of bodies alike, such as microbatches, the
    first arrives while the last still wait, and the other end has something to do; if they shared the line,
    all would come late together. A small body passes large ones, and each lets about as many bytes pass as
    it has.
    """

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.limiter: RateLimiter | None = None
        """One for all links of the transport."""
        self.turn_at: float | None = None
        """When to ask for the next frame again, if the limit of the upload makes it wait."""
        self._turn_bytes = 0
        """What may be sent of bodies then."""
        self._bodies: list[Outgoing] = []
        self.sent_bytes = 0

    @property
    def empty(self) -> bool:
        return not self.frames and not self._bodies

    def add(self, outgoing: Outgoing) -> None:
        """Send a body, as far as its credit goes."""
        if outgoing.due is None:
            outgoing.due = self.sent_bytes + outgoing.left
        self._bodies.append(outgoing)

    def drop(self, outgoing: Outgoing | None) -> None:
        """Send nothing more of a body; nothing if it is not here."""
        if outgoing in self._bodies:
            self._bodies.remove(outgoing)

    def clear(self) -> None:
        self.frames.clear()
        self._bodies.clear()

    def next(self, now: float) -> tuple[Sequence[Buffer], int | None]:
        """The next frame in parts, if one may be sent now; and the call whose body is complete with it."""
        frame, whole = (), None
        if self.frames:
            urgent = self.frames.popleft()
            frame = (urgent,)
            self.sent_bytes += len(urgent)
            if self.limiter is not None:
                self.limiter.took(len(urgent), now=now)
        elif self._bodies:
            # That is due first; of those, of the oldest call.
            outgoing = min(self._bodies, key=lambda one: (one.due, one.call))
            most = self._may_send(outgoing, now)
            if most:
                chunk = outgoing.take(most)
                frame = (frames.pack_prefix(Kind.BODY, outgoing.call, 0, chunk.nbytes), chunk)
                self.sent_bytes += frames.PREFIX_BYTES + chunk.nbytes
                if not outgoing.left or not outgoing.credit:
                    self._bodies.remove(outgoing)
                whole = None if outgoing.left else outgoing.call
        return frame, whole

    def _may_send(self, outgoing: Outgoing, now: float) -> int:
        """Bytes of a body; 0 if its turn is still to come, at `turn_at`."""
        limiter = self.limiter
        if limiter is None:
            return frames.CHUNK_BYTES
        if self.turn_at is None:
            wanted = min(limiter.turn_bytes, frames.CHUNK_BYTES, outgoing.left, outgoing.credit)
            wait_s = limiter.take(wanted + frames.PREFIX_BYTES, now=now)
            self._turn_bytes, self.turn_at = wanted, now + wait_s
        if now < self.turn_at:
            return 0
        self.turn_at = None
        return self._turn_bytes
