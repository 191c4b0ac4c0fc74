"""The bodies of calls and answers: where they are received, and what is left of them to send."""

from __future__ import annotations

from collections.abc import Sequence

from peers.ports import Buffer
from swarm.wire import frames
from swarm.wire.frames import FrameError


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

    __slots__ = ("_parts", "_used", "announced", "held", "received")

    _PART_BYTES = 16 * 1024
    """Small chunks share a part, so that a million of one byte cost what they hold."""

    def __init__(self, announced: int) -> None:
        self.announced = announced
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

    def view(self) -> memoryview:
        return self._parts[-1][self._used[-1] :]

    def advance(self, count: int) -> None:
        self._used[-1] += count

    def pour_into(self, sink: Sink) -> None:
        for part, used in zip(self._parts, self._used, strict=True):
            sink.put(part[:used])


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
