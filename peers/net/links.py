"""One stream between two peers, seen from either end: frames in, frames out, and signs of life.

Reading is a small state machine over two places: a scratch buffer, where prefixes, headers and small
bodies are parsed, and the buffer that a body belongs to, into which the kernel writes directly. Memory is
bounded by the protocol itself (credit before ACCEPT, sizes after), so reading never has to pause and a
heartbeat is never stuck behind a body that nobody takes.

Writing has two queues: frames that carry no body go first, then bodies in chunks, one body after the other:
that first which would be through first if the link had only it to send. So of bodies alike, such as
microbatches, the first arrives while the last still wait, and the other end has something to do; if they
shared the line, all would come late together. A small body passes large ones, and each lets about as many
bytes pass as it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

from peers.net.gauge import LineGauge
from peers.net.pacer import Pacer
from peers.ports import Answer, Buffer
from swarm.errors import BadAnswer, Busy, PeerFault, PeerGone, PeerSilent, SwarmError, from_wire, short
from swarm.ids import PeerId
from swarm.wire import frames
from swarm.wire.frames import FrameError, Kind, Prefix

logger = logging.getLogger(__name__)

ALIVE_EVERY_S = 1.0
SILENCE_S = 3.5
"""Three heartbeats and a half."""
SEND_STALL_S = 10.0
"""A peer that takes none of an answer for this long is given up."""
EARLY_BYTES_PER_LINK = 8 * frames.WINDOW_BYTES
"""What one caller can make us hold of bodies that we did not accept yet."""
_SCRATCH_BYTES = 128 * 1024
"""More than the largest header; a header has to lie in it as a whole."""
_MAX_OPENING_BYTES = 64 * 1024
"""Of p2pd's message that opens a stream."""
_HIGH_WATER_BYTES = 2 * frames.CHUNK_BYTES
_TICK_S = 0.25
_UNLIMITED = 1 << 62


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

    __slots__ = ("_index", "_offset", "buffers", "call", "credit", "due", "left", "on_sent")

    def __init__(
        self, call: int, buffers: Sequence[memoryview], credit: int, on_sent: Callable[[], None] | None = None
    ) -> None:
        self.call, self.buffers, self.credit, self.on_sent = call, buffers, credit, on_sent
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


def read_varint(data: memoryview) -> tuple[int, int] | None:
    """An unsigned protobuf varint at the start: (value, its bytes), or None if it is incomplete.

    Raises:
        FrameError: longer than 5 bytes.
    """
    value = 0
    for index in range(min(len(data), 5)):
        value |= (data[index] & 0x7F) << (7 * index)
        if not data[index] & 0x80:
            return value, index + 1
    if len(data) >= 5:
        raise FrameError("an opening message of impossible length")
    return None


def pack_varint(value: int) -> bytes:
    packed = bytearray()
    while value > 0x7F:
        packed.append(value & 0x7F | 0x80)
        value >>= 7
    packed.append(value)
    return bytes(packed)


class FrameLink(asyncio.BufferedProtocol):
    """What both ends share. Subclasses give frames their meaning."""

    def __init__(self) -> None:
        self.peer: PeerId = ""
        self.gauge = LineGauge()
        """The transport has one for all links with a peer."""
        self.pacer: Pacer | None = None
        """The transport has one for all links."""
        self._turn_bytes = 0
        """What may be sent of bodies now; 0: a turn has to be taken first."""
        self._turn: asyncio.TimerHandle | None = None
        self.sent_bytes = 0
        self.received_bytes = 0
        self.closed = asyncio.get_running_loop().create_future()
        """Done when the connection is gone."""
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._start, self._end = 0, 0
        self._opening = True
        self._prefix: Prefix | None = None
        self._chunk_left = 0
        self._sink: Sink | EarlySink | None = None
        self._direct = False
        self._sink_call = 0
        self._over = False
        self._finishing = False
        self._finished = False
        """The other end was told that nothing follows: what is said now is lost, as if it came too late."""
        self._urgent: deque[bytes] = deque()
        self._bulk: list[Outgoing] = []
        """Bodies of which something may be sent."""
        self._paused_since: float | None = None
        self._last_byte = self._loop.time()
        self._last_tick = self._last_byte
        self._ticker: asyncio.TimerHandle | None = None

    @property
    def last_byte_at(self) -> float:
        """When something came last, on the clock of the event loop."""
        return self._last_byte

    # -- what subclasses say --------------------------------------------------------------------

    def _opened(self, message: bytes) -> None:
        """p2pd's opening message arrived."""
        raise NotImplementedError

    def _frame(self, prefix: Prefix, header: bytes) -> None:
        """A frame without body arrived."""
        raise NotImplementedError

    def _sink_for(self, prefix: Prefix) -> Sink | EarlySink | None:
        """Where the chunk goes; None to discard it."""
        raise NotImplementedError

    def _chunk_done(self, sink: Sink | EarlySink) -> None:
        """A chunk that was not discarded is complete."""
        raise NotImplementedError

    def _lost(self, fault: PeerFault) -> None:
        """The link is over, once, because of this."""
        raise NotImplementedError

    def _tick(self, now: float) -> bool:
        """Look at the clocks; False stops the ticking until `_keep_ticking` is called again."""
        raise NotImplementedError

    # -- reading --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it
        self._transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES, low=frames.CHUNK_BYTES)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._chunk_left and self._start == self._end and self._sink is not None:
            self._direct = True
            return self._sink.view()[: self._chunk_left]
        self._direct = False
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start and _SCRATCH_BYTES - self._end < _SCRATCH_BYTES // 4:
            left = self._end - self._start
            self._scratch[:left] = bytes(self._scratch[self._start : self._end])
            self._start, self._end = 0, left
        return self._scratch[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._over:
            return
        self._last_byte = self._loop.time()
        self.received_bytes += nbytes
        self.gauge.brought_bytes += nbytes
        try:
            if self._direct and self._sink is not None:
                self._take(self._sink, nbytes)
            else:
                self._end += nbytes
                self._parse()
        except FrameError as error:
            self.fail(BadAnswer(self.peer, str(error)))

    @property
    def brought_bytes(self) -> int:
        """By all links with this peer, but for what is still to be looked at here."""
        return self.gauge.brought_bytes - (self._end - self._start)

    def _gauge_body(self, size: int, since: float, brought_before: int) -> None:
        """A body is complete that was announced then. All that came meanwhile tells of the line: who waits
        for others to be sent first has no slower one."""
        self.gauge.received(size, self.gauge.brought_bytes - brought_before, self._last_byte - since)

    def _take(self, sink: Sink | EarlySink, count: int) -> None:
        sink.advance(count)
        self._chunk_left -= count
        if not self._chunk_left:
            self._sink = None
            self._chunk_done(sink)

    def _parse(self) -> None:
        while not self._over:
            available = self._end - self._start
            if self._chunk_left:
                count = min(available, self._chunk_left)
                if not count:
                    return
                if self._sink is None:
                    self._chunk_left -= count
                else:
                    view = self._sink.view()
                    count = min(count, view.nbytes)
                    view[:count] = self._scratch[self._start : self._start + count]
                    self._take(self._sink, count)
                self._start += count
            elif self._prefix is not None:
                size = self._prefix.header_bytes
                if available < size:
                    return
                header = bytes(self._scratch[self._start : self._start + size])
                self._start += size
                prefix, self._prefix = self._prefix, None
                self._frame(prefix, header)
            elif self._opening:
                message = self._read_opening(available)
                if message is None:
                    return
                self._opening = False
                self._opened(message)
            elif available >= frames.PREFIX_BYTES:
                prefix = frames.unpack_prefix(self._scratch, self._start)
                self._start += frames.PREFIX_BYTES
                if prefix.kind is Kind.BODY:
                    self._sink = self._sink_for(prefix)
                    if self._sink is not None:
                        self._sink.begin(prefix.body_bytes)
                    self._chunk_left = prefix.body_bytes
                else:
                    self._prefix = prefix
            else:
                return

    def _read_opening(self, available: int) -> bytes | None:
        found = read_varint(self._scratch[self._start : self._end])
        if found is None:
            return None
        size, used = found
        if size > _MAX_OPENING_BYTES:
            raise FrameError(f"an opening message of {size} bytes")
        if available < used + size:
            return None
        self._start += used + size
        return bytes(self._scratch[self._start - size : self._start])

    def _replace_sink(self, old: EarlySink, new: Sink | None) -> None:
        """Let the rest of a chunk that is under way go elsewhere. Between two reads only."""
        if self._sink is old:
            self._sink = new

    # -- writing --------------------------------------------------------------------------------

    def _send(self, frame: bytes) -> None:
        if not self._over and not self._finished:
            self._urgent.append(frame)
            self._pump()

    def _send_body(self, outgoing: Outgoing) -> None:
        if not self._over and not self._finished:
            if outgoing.due is None:
                outgoing.due = self.sent_bytes + outgoing.left
            self._bulk.append(outgoing)
            self._pump()

    def _pump(self) -> None:
        transport = self._transport
        if transport is None:
            return
        while self._paused_since is None and not self._over and not self._opening:
            if self._urgent:
                frame = self._urgent.popleft()
                self.sent_bytes += len(frame)
                if self.pacer is not None:
                    self.pacer.took(len(frame), now=self._loop.time())
                transport.write(frame)
            elif self._bulk:
                most = self._may_send()
                if not most:
                    return
                outgoing = self._first_body()
                chunk = outgoing.take(most)
                self.sent_bytes += frames.PREFIX_BYTES + chunk.nbytes
                transport.write(frames.pack_prefix(Kind.BODY, outgoing.call, 0, chunk.nbytes))
                transport.write(chunk)
                if not outgoing.left or not outgoing.credit:
                    self._bulk.remove(outgoing)
                if not outgoing.left and outgoing.on_sent is not None:
                    outgoing.on_sent()
            else:
                if self._finishing and not self._finished and not transport.is_closing():
                    self._finished = True
                    with contextlib.suppress(OSError, RuntimeError):
                        transport.write_eof()
                return

    def _first_body(self) -> Outgoing:
        """That is due first; of those, of the oldest call."""
        return min(self._bulk, key=lambda outgoing: (outgoing.due, outgoing.call))

    def _may_send(self) -> int:
        """Bytes of a body; 0 if its turn is still to come."""
        pacer = self.pacer
        if pacer is None:
            return frames.CHUNK_BYTES
        if not self._turn_bytes and self._turn is None:
            first = self._first_body()
            wanted = min(pacer.turn_bytes, frames.CHUNK_BYTES, first.left, first.credit)
            wait_s = pacer.take(wanted + frames.PREFIX_BYTES, now=self._loop.time())
            if wait_s > 0:
                self._turn = self._loop.call_later(wait_s, self._turn_comes, wanted)
            else:
                self._turn_bytes = wanted
        now, self._turn_bytes = self._turn_bytes, 0
        return now

    def _turn_comes(self, nbytes: int) -> None:
        self._turn, self._turn_bytes = None, nbytes
        self._pump()

    def pause_writing(self) -> None:
        if self._paused_since is None:
            self._paused_since = self._loop.time()

    def resume_writing(self) -> None:
        self._paused_since = None
        self._pump()

    # -- clocks ---------------------------------------------------------------------------------

    def _keep_ticking(self) -> None:
        if self._ticker is None and not self._over:
            self._last_tick = self._loop.time()
            self._ticker = self._loop.call_later(_TICK_S, self._on_tick)

    def _on_tick(self) -> None:
        self._ticker = None
        if self._over:
            return
        now = self._loop.time()
        late = now - self._last_tick - _TICK_S
        if late > _TICK_S:
            # It was us who slept (a busy loop, a stopped process): bytes may be waiting to be read.
            self._last_byte += late
            if self._paused_since is not None:
                self._paused_since += late
        self._last_tick = now
        if self._tick(now) and not self._over:
            self._ticker = self._loop.call_later(_TICK_S, self._on_tick)

    # -- the end --------------------------------------------------------------------------------

    def fail(self, fault: PeerFault) -> None:
        """Drop the connection now; whoever waits on it gets this fault."""
        if self._over:
            return
        self._over = True
        if self._ticker is not None:
            self._ticker.cancel()
        self._urgent.clear()
        self._bulk.clear()
        self._sink = None
        if self._transport is not None:
            self._transport.abort()
        elif not self.closed.done():
            self.closed.set_result(None)
        self._lost(fault)

    def finish(self) -> None:
        """Let everything queued go out, then tell the other end that nothing follows."""
        if not self._finishing:
            self._finishing = True
            self._pump()

    def eof_received(self) -> bool:
        self.fail(PeerGone(self.peer, "the connection broke"))
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail(PeerGone(self.peer, "the connection broke"))
        if not self.closed.done():
            self.closed.set_result(None)


class _Pending:
    """A call whose answer the caller waits for."""

    __slots__ = (
        "brought_before", "future", "header", "heard", "max_answer_bytes", "outgoing", "since", "sink",
        "size",
    )  # fmt: skip

    def __init__(
        self,
        future: asyncio.Future[Answer],
        max_answer_bytes: int,
        outgoing: Outgoing | None,
        *,
        size: int,
        since: float,
    ) -> None:
        self.future, self.max_answer_bytes, self.outgoing = future, max_answer_bytes, outgoing
        self.size, self.since, self.heard = size, since, False
        """Bytes of the call; when it was made, then when its answer began; whether the other end has said
        anything to it."""
        self.brought_before = 0
        """What had come from this peer when the answer began."""
        self.sink: Sink | None = None
        self.header = b""


class CallerLink(FrameLink):
    """The end that calls."""

    def __init__(self, peer: PeerId, request: bytes, silence_s: float = SILENCE_S) -> None:
        """`request` asks p2pd to open the stream; `opened` gets p2pd's answer."""
        super().__init__()
        self.peer = peer
        self.opened: asyncio.Future[bytes] = self._loop.create_future()
        self.relayed = False
        """It passes a third peer."""
        self._request = request
        self._silence_s = silence_s
        self._calls: dict[int, _Pending] = {}
        self._newest = 0
        self._waiting_since = 0.0
        self.lost_because: PeerFault | None = None

    @property
    def usable(self) -> bool:
        return not self._over and self._newest < 0xFFFFFFFF

    @property
    def pending(self) -> int:
        return len(self._calls)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self._transport is not None
        self._transport.write(pack_varint(len(self._request)) + self._request)

    def _opened(self, message: bytes) -> None:
        if not self.opened.done():
            self.opened.set_result(message)

    async def call(
        self, method: str, header: bytes, body: Sequence[memoryview], max_answer_bytes: int
    ) -> Answer:
        """Send, wait, and if the caller is cancelled, say so to the other end."""
        if self._over:
            raise PeerGone(self.peer, "the connection broke")
        call = self._newest + 1
        frame = frames.pack_call(call, method, header, [part.nbytes for part in body])
        self._newest = call
        outgoing = Outgoing(call, body, frames.WINDOW_BYTES)
        pending = _Pending(
            self._loop.create_future(), max_answer_bytes, outgoing if outgoing.left else None,
            size=len(frame) + outgoing.left, since=self._loop.time(),
        )  # fmt: skip
        if not self._calls:
            self._waiting_since = self._loop.time()
        self._calls[call] = pending
        self._keep_ticking()
        self._send(frame)
        if outgoing.left:
            self._send_body(outgoing)
        try:
            return await pending.future
        finally:
            if call in self._calls:
                self._forget(call)
                self._send(frames.pack_prefix(Kind.ABORT, call))

    def _forget(self, call: int) -> _Pending:
        pending = self._calls.pop(call)
        if pending.outgoing is not None and pending.outgoing in self._bulk:
            self._bulk.remove(pending.outgoing)
        if self._sink is not None and self._sink is pending.sink:
            self._sink = None
        return pending

    def _fail_call(self, call: int, error: SwarmError) -> None:
        pending = self._forget(call)
        if not pending.future.done():
            pending.future.set_exception(error)

    def _frame(self, prefix: Prefix, header: bytes) -> None:
        if prefix.kind is Kind.ALIVE:
            self._alive(prefix.call, set(frames.unpack_alive(header)))
            return
        if prefix.kind not in (Kind.ACCEPT, Kind.RESULT, Kind.ERROR):
            raise FrameError(f"{prefix.kind.name}, which only a caller may send")
        if prefix.call > self._newest:
            raise FrameError(f"{prefix.kind.name} for call {prefix.call}, which was never made")
        pending = self._calls.get(prefix.call)
        if pending is None:
            return  # given up before
        if not pending.heard:
            pending.heard = True
            self.gauge.answered(self._last_byte - pending.since, pending.size)
        if prefix.kind is Kind.ACCEPT:
            self._accepted(pending)
        elif pending.sink is not None:
            raise FrameError("a second answer to one call")
        elif prefix.kind is Kind.ERROR:
            fields = frames.unpack_error(header)
            self._fail_call(prefix.call, from_wire(self.peer, fields))
        else:
            self._result(prefix.call, pending, header)

    def _accepted(self, pending: _Pending) -> None:
        outgoing = pending.outgoing
        if outgoing is not None and outgoing.credit < _UNLIMITED // 2:
            parked = outgoing.left > 0 and outgoing.credit == 0
            outgoing.credit = _UNLIMITED
            if parked:
                self._send_body(outgoing)

    def _result(self, call: int, pending: _Pending, header: bytes) -> None:
        result = frames.unpack_result(header)
        total = sum(result.body_sizes)
        if total > pending.max_answer_bytes:
            text = f"an answer of {total} bytes; at most {pending.max_answer_bytes} fit"
            self._fail_call(call, BadAnswer(self.peer, text))
            self._send(frames.pack_prefix(Kind.ABORT, call))
            return
        if pending.outgoing is not None and pending.outgoing in self._bulk:
            self._bulk.remove(pending.outgoing)
        pending.outgoing = None  # it is answered: the rest of the body is of no use, whatever is accepted now
        pending.header, pending.size, pending.since = result.header, total, self._last_byte
        pending.brought_before = self.brought_bytes
        pending.sink = Sink(result.body_sizes)
        self._finish_if_complete(call, pending)

    def _finish_if_complete(self, call: int, pending: _Pending) -> None:
        if pending.sink is not None and not pending.sink.left:
            del self._calls[call]
            self._gauge_body(pending.size, pending.since, pending.brought_before)
            if not pending.future.done():
                pending.future.set_result(Answer(pending.header, pending.sink.buffers))

    def _sink_for(self, prefix: Prefix) -> Sink | None:
        if prefix.call > self._newest:
            raise FrameError(f"BODY for call {prefix.call}, which was never made")
        pending = self._calls.get(prefix.call)
        if pending is None:
            return None
        if pending.sink is None:
            raise FrameError("BODY before its RESULT")
        self._sink_call = prefix.call
        return pending.sink

    def _chunk_done(self, sink: Sink | EarlySink) -> None:
        pending = self._calls.get(self._sink_call)
        if pending is not None:
            self._finish_if_complete(self._sink_call, pending)

    def _alive(self, newest_seen: int, working_on: set[int]) -> None:
        if newest_seen > self._newest:
            raise FrameError(f"ALIVE speaks of call {newest_seen}, which was never made")
        for call in [call for call in self._calls if call <= newest_seen and call not in working_on]:
            self._fail_call(call, PeerSilent(self.peer, "the answer was lost"))

    def _tick(self, now: float) -> bool:
        if not self._calls:
            return False
        quiet_s = now - max(self._last_byte, self._waiting_since)
        if quiet_s > self._silence_s:
            self.fail(PeerSilent(self.peer, f"no sign of life for {quiet_s:.1f} s"))
        return True

    def _lost(self, fault: PeerFault) -> None:
        self.lost_because = fault
        if not self.opened.done():
            self.opened.set_exception(fault)
            self.opened.exception()  # seen: whoever dials may be gone
        calls, self._calls = self._calls, {}
        for pending in calls.values():
            if not pending.future.done():
                pending.future.set_exception(type(fault)(self.peer, _bare(fault)))


def _bare(fault: PeerFault) -> str:
    """Its text without the peer, which the constructor adds."""
    return fault.text.removeprefix(f"peer {short(fault.peer)}: ")


class ServedCall:
    """A call as its handler sees it: fulfils `peers.ports.Request`."""

    def __init__(self, link: CalleeLink, call: int, header: frames.CallHeader) -> None:
        self.peer = link.peer
        self.method = header.method
        self.header = header.header
        self.body_sizes: Sequence[int] = header.body_sizes
        self.call = call
        self.total = sum(header.body_sizes)
        self.early: EarlySink | None = EarlySink(self.total)
        self.sink: Sink | None = None
        self.refusal: SwarmError | None = None
        """Why the body cannot be had any more."""
        self.waiter: asyncio.Future[None] | None = None
        self.announced_at = link.last_byte_at
        self.brought_before = link.brought_bytes
        self.accepted_at = 0.0
        self._link = link

    async def accept(self) -> list[memoryview]:
        """Receive the body.

        Raises:
            PeerGone: the caller went away, or gave the call up.
            PeerSilent: the caller stopped sending.
            Busy: too many bodies of this caller are waiting to be accepted.
        """
        if self.sink is None:
            self._link.accept(self)
        assert self.sink is not None
        if self.sink.left:
            self.waiter = asyncio.get_running_loop().create_future()
            try:
                await self.waiter
            finally:
                self.waiter = None
        return self.sink.buffers

    def refuse(self, error: SwarmError) -> None:
        """The rest of the body will not come."""
        if self.refusal is None:
            self.refusal = error
        self.early = None
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_exception(error)


class CalleeLink(FrameLink):
    """The end that is called."""

    def __init__(
        self,
        on_open: Callable[[CalleeLink, bytes], None],
        on_call: Callable[[CalleeLink, int, frames.CallHeader], SwarmError | None],
        silence_s: float = SILENCE_S,
    ) -> None:
        """`on_open` sets `peer` from p2pd's message; `on_call` starts a handler, or says why not."""
        super().__init__()
        self._on_open, self._on_call = on_open, on_call
        self._silence_s = silence_s
        self._newest = 0
        self._working: dict[int, ServedCall | None] = {}
        """Calls not answered in full; None for one whose answer is being written."""
        self._receiving: dict[int, ServedCall] = {}
        """Calls whose body is not complete."""
        self._sending: dict[int, Outgoing] = {}
        self._last_alive = 0.0
        self.lost_because: PeerFault | None = None

    def _opened(self, message: bytes) -> None:
        self._on_open(self, message)

    def _frame(self, prefix: Prefix, header: bytes) -> None:
        if prefix.kind is Kind.CALL:
            if prefix.call <= self._newest:
                raise FrameError(f"CALL {prefix.call} after call {self._newest}")
            self._newest = prefix.call
            self._call(prefix.call, frames.unpack_call(header))
        elif prefix.kind is Kind.ABORT:
            if prefix.call > self._newest:
                raise FrameError(f"ABORT of call {prefix.call}, which was never made")
            self._abort(prefix.call)
        else:
            raise FrameError(f"{prefix.kind.name}, which only a callee may send")

    def _call(self, call: int, header: frames.CallHeader) -> None:
        if len(self._working) >= frames.MAX_PENDING:
            error: SwarmError | None = Busy(f"{frames.MAX_PENDING} calls of yours are pending already")
        else:
            error = self._on_call(self, call, header)
        if error is not None:
            self._send(frames.pack_error(call, error.to_wire()))

    def start(self, served: ServedCall) -> None:
        """A handler is going to work on this."""
        if not self._working:
            self._last_alive = self._loop.time()
        self._working[served.call] = served
        if served.total:
            self._receiving[served.call] = served
        self._keep_ticking()

    def _abort(self, call: int) -> None:
        self._working.pop(call, None)
        served = self._receiving.pop(call, None)
        if served is not None:
            self._drop_early(served)
            served.refuse(PeerGone(self.peer, "gave the call up"))
        outgoing = self._sending.pop(call, None)
        if outgoing is not None and outgoing in self._bulk:
            self._bulk.remove(outgoing)

    def _drop_early(self, served: ServedCall) -> None:
        if served.early is not None:
            self._replace_sink(served.early, None)
        if self._sink is not None and self._sink is served.sink:
            self._sink = None

    def _sink_for(self, prefix: Prefix) -> Sink | EarlySink | None:
        if prefix.call > self._newest:
            raise FrameError(f"BODY for call {prefix.call}, which was never made")
        served = self._receiving.get(prefix.call)
        if served is None:
            return None
        self._sink_call = prefix.call
        if served.sink is not None:
            return served.sink
        if served.early is not None:
            held = sum(other.early.held for other in self._receiving.values() if other.early is not None)
            if held + prefix.body_bytes > EARLY_BYTES_PER_LINK:
                del self._receiving[prefix.call]
                served.refuse(Busy("too many bodies of yours are waiting to be accepted"))
                return None
        return served.early

    def _chunk_done(self, sink: Sink | EarlySink) -> None:
        served = self._receiving.get(self._sink_call)
        if served is None:
            return
        early = served.early
        accepted = served.sink is not None and not served.sink.left
        if accepted or (early is not None and early.received == early.announced):
            self._gauge_body(served.total, served.announced_at, served.brought_before)
        if not accepted:
            return
        del self._receiving[self._sink_call]
        if served.waiter is not None and not served.waiter.done():
            served.waiter.set_result(None)

    def accept(self, served: ServedCall) -> None:
        """Reserve the body's buffers, move in what came already, ask for the rest."""
        if served.refusal is not None:
            raise served.refusal
        if self._over:
            raise self.lost_because or PeerGone(self.peer, "the connection broke")
        if served.call not in self._working:
            raise PeerGone(self.peer, "gave the call up")
        sink = Sink(served.body_sizes)
        early, served.sink, served.early = served.early, sink, None
        served.accepted_at = self._loop.time()
        if early is not None:
            early.pour_into(sink)
            self._replace_sink(early, sink)
        if not sink.left:
            self._receiving.pop(served.call, None)
        elif served.total > frames.WINDOW_BYTES:
            self._send(frames.pack_prefix(Kind.ACCEPT, served.call))

    def answer(self, served: ServedCall, header: bytes, body: Sequence[memoryview]) -> None:
        """Send the result. Raises ValueError if it is over a limit of the framing."""
        frame = frames.pack_result(served.call, header, [part.nbytes for part in body])
        if not self._end_of(served):
            return
        outgoing = Outgoing(served.call, body, _UNLIMITED, lambda: self._sent(served.call))
        if not outgoing.left:
            del self._working[served.call]
            self._send(frame)
            return
        self._working[served.call] = None
        self._sending[served.call] = outgoing
        self._send(frame)
        self._send_body(outgoing)

    def answer_error(self, served: ServedCall, error: SwarmError) -> None:
        if self._end_of(served):
            del self._working[served.call]
            self._send(frames.pack_error(served.call, error.to_wire()))

    def lose_answer(self, served: ServedCall) -> None:
        """A fault on order: the call is over and nothing is sent."""
        if self._end_of(served):
            del self._working[served.call]

    def corrupt_answer(self, served: ServedCall) -> None:
        """A fault on order: bytes that are no frame."""
        if self._end_of(served):
            del self._working[served.call]
            self._send(b"\xff" * frames.PREFIX_BYTES)

    def _end_of(self, served: ServedCall) -> bool:
        """The handler is done: forget a body that it did not take. False if nobody wants the answer."""
        if self._receiving.pop(served.call, None) is not None:
            self._drop_early(served)
        served.early = None
        return not self._over and served.call in self._working

    def _sent(self, call: int) -> None:
        self._working.pop(call, None)
        self._sending.pop(call, None)

    def _tick(self, now: float) -> bool:
        if self._paused_since is not None and now - self._paused_since > SEND_STALL_S:
            self.fail(PeerSilent(self.peer, f"took no bytes for {SEND_STALL_S:g} s"))
            return False
        if not self._working:
            return bool(self._bulk) or self._paused_since is not None
        if now - self._last_alive >= ALIVE_EVERY_S - _TICK_S / 2:
            self._last_alive = now
            self._send(frames.pack_alive(self._newest, list(self._working)))
        awaited = [served.accepted_at for served in self._receiving.values() if served.waiter is not None]
        if awaited and now - max(self._last_byte, min(awaited)) > self._silence_s:
            self.fail(PeerSilent(self.peer, f"its body stopped coming {now - self._last_byte:.1f} s ago"))
        return True

    def _lost(self, fault: PeerFault) -> None:
        self.lost_because = fault
        receiving, self._receiving = self._receiving, {}
        for served in receiving.values():
            served.refuse(type(fault)(self.peer, _bare(fault)))
        self._working.clear()
        self._sending.clear()
