"""One stream between two peers, seen from either end, without IO.

Bytes, calls and times go in, events and bytes come out:

    view = state.buffer()                       # write some bytes there, then
    state.received(nbytes, now=...)
    while state.events: event = state.events.popleft()
    while frame := state.next_frame(now=...): ...   # a sequence of buffers to send

Reading is a small state machine over two places: a scratch buffer, where prefixes, headers and small
bodies are parsed, and the buffer that a body belongs to, into which the kernel writes directly. Memory is
bounded by the protocol itself (credit before ACCEPT, sizes after), so reading never has to pause and a
heartbeat is never stuck behind a body that nobody takes.

A call goes through these states; a frame that its table does not name breaks the protocol:

    client  WAITING ─ACCEPT→ WAITING    WAITING ─RESULT→ ANSWERING ─BODY→ ANSWERING    WAITING ─ERROR→ over
    server  announced ─accept→ receiving ─BODY→ received ─answer→ sending → over       ABORT ends any
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from peers.net.bandwidth import BandwidthEstimator
from peers.net.body_buffers import UNLIMITED, EarlySink, Outbox, Outgoing, Sink
from peers.net.timings import NetTimings
from peers.ports import Answer, Buffer
from swarm.errors import (
    BadAnswer,
    Busy,
    OtherVersion,
    PeerFault,
    PeerGone,
    PeerSilent,
    Refused,
    SwarmError,
    from_wire,
    short,
)
from swarm.ids import PeerId
from swarm.wire import frames
from swarm.wire.frames import FrameError, Kind, OtherVersionError, Prefix
from swarm.wire.version import PROTOCOL_VERSION, differ

EARLY_BYTES_PER_LINK = 8 * frames.WINDOW_BYTES
"""What one caller can make us hold of bodies that we did not accept yet."""
_SCRATCH_BYTES = 128 * 1024
"""More than the largest header; a header has to lie in it as a whole."""
_MAX_OPENING_BYTES = 64 * 1024
"""Of p2pd's message that opens a stream."""


class Opened(NamedTuple):
    """p2pd's opening message arrived. Nothing is read after it until `introduce`."""

    message: bytes


class Called(NamedTuple):
    """A call arrived: work on it and `answer`, or `answer_error`."""

    call: Incoming


class BodyEnded(NamedTuple):
    """The body of a call that was accepted is complete, or will not come because of `error`."""

    call: Incoming
    error: SwarmError | None


class Answered(NamedTuple):
    """What became of one of our calls."""

    call: int
    answer: Answer | SwarmError


Event: TypeAlias = Opened | Called | BodyEnded | Answered


class ConnectionState:
    """What both ends share. Subclasses give frames their meaning."""

    hears: frozenset[Kind]
    """Kinds of frames that the other end may send."""
    role: str

    def __init__(self, timings: NetTimings, *, now: float) -> None:
        self.peer: PeerId = ""
        self.timings = timings
        self.estimator = BandwidthEstimator()
        """The transport has one for all links with a peer."""
        self.over = False
        self.lost_because: PeerFault | None = None
        """Why it is over, if it is."""
        self.last_byte_at = now
        self.finished = False
        """All is sent, and nothing follows: what is said now is lost, as if it came too late."""
        self._newest = 0
        """Number of the newest call."""
        self.events: deque[Event] = deque()
        """What happened, for the caller to take."""
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._start, self._end = 0, 0
        self._opening, self._held = True, False
        self._prefix: Prefix | None = None
        self._chunk_left = 0
        self._sink: Sink | EarlySink | None = None
        """Of the chunk that is under way; None if it is discarded."""
        self._sink_call = 0
        self._direct = False
        self._finishing = self._deaf = False
        self.outbox = Outbox()
        self._paused_since: float | None = None
        self._last_tick: float | None = None

    # -- what subclasses say --------------------------------------------------------------------

    def _frame(self, prefix: Prefix, header: bytes, now: float) -> None:
        """A frame without body arrived."""
        raise NotImplementedError

    def _sink_for(self, prefix: Prefix) -> Sink | EarlySink | None:
        """Where the chunk goes; None to discard it."""
        raise NotImplementedError

    def _chunk_done(self) -> None:
        """A chunk of `_sink_call` that was not discarded is complete."""
        raise NotImplementedError

    def _lost(self, fault: PeerFault) -> None:
        """The link is over, once, because of this."""
        raise NotImplementedError

    def _check_clocks(self, now: float) -> bool:
        """Act on what took too long; whether the clocks have to be checked again."""
        raise NotImplementedError

    # -- reading --------------------------------------------------------------------------------

    def buffer(self) -> memoryview:
        """Where the next bytes are to be written; never empty."""
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

    def received(self, nbytes: int, *, now: float) -> None:
        """So many bytes were written into `buffer()`."""
        if self.over or self._deaf:
            return
        self.last_byte_at = now
        self.estimator.received_bytes += nbytes
        self._read(now, nbytes)

    def _read(self, now: float, nbytes: int = 0) -> None:
        try:
            if nbytes and self._direct and self._sink is not None:
                self._take(self._sink, nbytes)
            else:
                self._end += nbytes
                self._parse(now)
        except OtherVersionError as error:
            self._other_version(error)
        except FrameError as error:
            self.fail(BadAnswer(self.peer, str(error)))

    def introduce(self, peer: PeerId, estimator: BandwidthEstimator, *, now: float) -> None:
        """`Opened` was understood: go on reading what the peer at the other end says."""
        self.peer, self.estimator, self._held = peer, estimator, False
        estimator.received_bytes += self._end - self._start
        self._read(now)

    def _other_version(self, error: OtherVersionError) -> None:
        self.fail(BadAnswer(self.peer, str(error)))

    @property
    def _came_bytes(self) -> int:
        """By all links with this peer, but for what is still to be looked at here."""
        return self.estimator.received_bytes - (self._end - self._start)

    def _estimate(self, size: int, since: float, came_before: int) -> None:
        """A body is complete that was announced then. All that came meanwhile tells of the line: a body that
        waits for others to be sent first has no slower one."""
        self.estimator.received(size, self.estimator.received_bytes - came_before, self.last_byte_at - since)

    def _take(self, sink: Sink | EarlySink, count: int) -> None:
        sink.advance(count)
        self._chunk_left -= count
        if not self._chunk_left:
            self._sink = None
            self._chunk_done()

    def _parse(self, now: float) -> None:
        while not self.over and not self._held:
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
                self._frame(prefix, header, now)
            elif self._opening:
                message = self._read_opening(available)
                if message is None:
                    return
                self._opening, self._held = False, True
                self.events.append(Opened(message))
            elif available >= frames.PREFIX_BYTES:
                prefix = frames.unpack_prefix(self._scratch, self._start)
                self._start += frames.PREFIX_BYTES
                self._begin(prefix)
            else:
                return

    def _begin(self, prefix: Prefix) -> None:
        """A frame begins."""
        if prefix.kind not in self.hears:
            raise FrameError(f"{prefix.kind.name}, which only a {self.role} may send")
        if prefix.kind is not Kind.BODY:
            self._prefix = prefix
            return
        self._check_made(prefix)
        self._sink_call = prefix.call
        self._sink = self._sink_for(prefix)
        if self._sink is not None:
            self._sink.begin(prefix.body_bytes)
        self._chunk_left = prefix.body_bytes

    def _check_made(self, prefix: Prefix) -> None:
        if prefix.call > self._newest:
            preposition = "of" if prefix.kind is Kind.ABORT else "for"
            raise FrameError(f"{prefix.kind.name} {preposition} call {prefix.call}, which was never made")

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

    # -- writing --------------------------------------------------------------------------------

    def _send(self, frame: bytes) -> None:
        if not self.over and not self.finished:
            self.outbox.frames.append(frame)

    def _send_body(self, outgoing: Outgoing) -> None:
        if not self.over and not self.finished:
            self.outbox.add(outgoing)

    def next_frame(self, *, now: float) -> Sequence[Buffer]:
        """What to send next, or nothing. After `finish`, `finished` says that nothing follows."""
        if self._paused_since is not None or self.over or self._opening:
            return ()
        outbox = self.outbox
        if outbox.empty:
            self.finished = self._finishing
            return ()
        before = outbox.sent_bytes
        frame, whole = outbox.next(now)
        if whole is not None:
            self._body_sent(whole)
        self.estimator.sent_bytes += outbox.sent_bytes - before
        return frame

    def _body_sent(self, call: int) -> None:
        """The last chunk of a body is on its way."""

    def pause_writing(self, *, now: float) -> None:
        """The other end takes no more bytes."""
        if self._paused_since is None:
            self._paused_since = now

    def resume_writing(self) -> None:
        self._paused_since = None

    # -- clocks ---------------------------------------------------------------------------------

    @property
    def ticking(self) -> bool:
        """Whether `tick` is to be called every `timings.tick_s`."""
        return self._last_tick is not None

    def _keep_ticking(self, now: float) -> None:
        if self._last_tick is None and not self.over:
            self._last_tick = now

    def tick(self, *, now: float) -> None:
        """Check the clocks."""
        if self.over or self._last_tick is None:
            return
        tick_s = self.timings.tick_s
        late = now - self._last_tick - tick_s
        if late > tick_s:
            # It was us who slept (a busy loop, a stopped process): bytes may be waiting to be read.
            self.last_byte_at += late
            if self._paused_since is not None:
                self._paused_since += late
        self._last_tick = now
        if not self._check_clocks(now):
            self._last_tick = None

    # -- the end --------------------------------------------------------------------------------

    def fail(self, fault: PeerFault) -> None:
        """Nothing is sent or heard any more; what waits for the other end gets this fault."""
        if self.over:
            return
        self.over, self.lost_because = True, fault
        self._last_tick = None
        self.outbox.clear()
        self._sink = None
        self._lost(fault)

    def finish(self) -> None:
        """Send what is queued, and nothing after it."""
        self._finishing = True


class Waiting(enum.IntEnum):
    """How far one of our calls is."""

    WAITING = 0
    """There is no answer yet."""
    ANSWERING = 1
    """The body of its answer is coming."""
    OVER = 2


_CLIENT_MOVES = {
    (Waiting.WAITING, Kind.ACCEPT): Waiting.WAITING,
    (Waiting.WAITING, Kind.RESULT): Waiting.ANSWERING,
    (Waiting.WAITING, Kind.ERROR): Waiting.OVER,
    (Waiting.ANSWERING, Kind.ACCEPT): Waiting.ANSWERING,
    (Waiting.ANSWERING, Kind.BODY): Waiting.ANSWERING,
}
"""What a frame makes of a call. Any other frame breaks the protocol."""


@dataclass(slots=True, eq=False)
class _Pending:
    """A call whose answer the caller waits for."""

    max_answer_bytes: int
    outgoing: Outgoing | None
    size: int
    """Bytes of the call, then of its answer."""
    since: float
    """When it was made, then when its answer began."""
    state: Waiting = Waiting.WAITING
    heard: bool = False
    """The other end has said something to it."""
    came_before: int = 0
    """What had come from this peer when the answer began."""
    sink: Sink = field(default_factory=lambda: Sink(()))
    header: bytes = b""


class ClientState(ConnectionState):
    """The end that calls. Events: `Opened`, `Answered`."""

    hears = frozenset({Kind.ALIVE, Kind.ACCEPT, Kind.RESULT, Kind.ERROR, Kind.BODY})
    role = "caller"

    def __init__(self, timings: NetTimings, *, now: float) -> None:
        super().__init__(timings, now=now)
        self._calls: dict[int, _Pending] = {}
        self._waiting_since = 0.0

    @property
    def usable(self) -> bool:
        return not self.over and self._newest < 0xFFFFFFFF

    @property
    def pending(self) -> int:
        """How many calls wait for their answer."""
        return len(self._calls)

    def call(
        self, method: str, header: bytes, body: Sequence[memoryview], max_answer_bytes: int, *, now: float
    ) -> int:
        """Make a call; its number.

        Raises:
            ValueError: it is over a limit of the framing.
        """
        call = self._newest + 1
        frame = frames.pack_call(call, method, header, [part.nbytes for part in body])
        self._newest = call
        outgoing = Outgoing(call, body, frames.WINDOW_BYTES)
        if not self._calls:
            self._waiting_since = now
        self._calls[call] = _Pending(
            max_answer_bytes, outgoing if outgoing.left else None, len(frame) + outgoing.left, now
        )
        self._keep_ticking(now)
        self._send(frame)
        if outgoing.left:
            self._send_body(outgoing)
        return call

    def abort(self, call: int) -> None:
        """Give a call up, and say so to the other end; nothing if it is over."""
        if call in self._calls:
            self._forget(call)
            self._send(frames.pack_prefix(Kind.ABORT, call))

    def _forget(self, call: int) -> None:
        pending = self._calls.pop(call)
        self.outbox.drop(pending.outgoing)
        if self._sink is not None and self._sink is pending.sink:
            self._sink = None

    def _end_call(self, call: int, answer: Answer | SwarmError) -> None:
        self._forget(call)
        self.events.append(Answered(call, answer))

    def _move(self, pending: _Pending, kind: Kind) -> None:
        state = _CLIENT_MOVES.get((pending.state, kind))
        if state is None:
            raise FrameError("BODY before its RESULT" if kind is Kind.BODY else "a second answer to one call")
        pending.state = state

    def _frame(self, prefix: Prefix, header: bytes, now: float) -> None:
        if prefix.kind is Kind.ALIVE:
            self._alive(prefix.call, set(frames.unpack_alive(header)))
            return
        self._check_made(prefix)
        call, pending = prefix.call, self._calls.get(prefix.call)
        if pending is None:
            return  # given up before
        if not pending.heard:
            pending.heard = True
            self.estimator.answered(now - pending.since, pending.size)
        self._move(pending, prefix.kind)
        if prefix.kind is Kind.ACCEPT:
            self._accepted(pending)
        elif prefix.kind is Kind.ERROR:
            self._end_call(call, from_wire(self.peer, frames.unpack_error(header)))
        else:
            self._result(call, pending, header, now)

    def _accepted(self, pending: _Pending) -> None:
        outgoing = pending.outgoing
        if outgoing is not None and outgoing.credit < UNLIMITED // 2:
            parked = outgoing.left > 0 and outgoing.credit == 0
            outgoing.credit = UNLIMITED
            if parked:
                self._send_body(outgoing)

    def _result(self, call: int, pending: _Pending, header: bytes, now: float) -> None:
        result = frames.unpack_result(header)
        total = sum(result.body_sizes)
        if total > pending.max_answer_bytes:
            text = f"an answer of {total} bytes; at most {pending.max_answer_bytes} fit"
            self._end_call(call, BadAnswer(self.peer, text))
            self._send(frames.pack_prefix(Kind.ABORT, call))
            return
        # It is answered: the rest of the body is of no use, whatever is accepted now.
        self.outbox.drop(pending.outgoing)
        pending.outgoing = None
        pending.header, pending.size, pending.since = result.header, total, now
        pending.came_before = self._came_bytes
        pending.sink = Sink(result.body_sizes)
        self._end_if_complete(call, pending)

    def _end_if_complete(self, call: int, pending: _Pending) -> None:
        if not pending.sink.left:
            self._estimate(pending.size, pending.since, pending.came_before)
            self._end_call(call, Answer(pending.header, pending.sink.buffers))

    def _sink_for(self, prefix: Prefix) -> Sink | None:
        pending = self._calls.get(prefix.call)
        if pending is None:
            return None
        self._move(pending, Kind.BODY)
        return pending.sink

    def _chunk_done(self) -> None:
        pending = self._calls.get(self._sink_call)
        if pending is not None:
            self._end_if_complete(self._sink_call, pending)

    def _alive(self, newest_seen: int, working_on: set[int]) -> None:
        if newest_seen > self._newest:
            raise FrameError(f"ALIVE speaks of call {newest_seen}, which was never made")
        for call in [call for call in self._calls if call <= newest_seen and call not in working_on]:
            self._end_call(call, PeerSilent(self.peer, "the answer was lost"))

    def _check_clocks(self, now: float) -> bool:
        if not self._calls:
            return False
        quiet_s = now - max(self.last_byte_at, self._waiting_since)
        if quiet_s > self.timings.silence_s:
            self.fail(PeerSilent(self.peer, f"no sign of life for {quiet_s:.1f} s"))
        return not self.over

    def _lost(self, fault: PeerFault) -> None:
        self.events.extend(Answered(call, _again(fault, self.peer)) for call in self._calls)
        self._calls.clear()


@dataclass(slots=True, eq=False)
class Incoming:
    """A call as the end that is called has it."""

    number: int
    header: frames.CallHeader
    announced_at: float
    came_before: int
    """What had come from this peer when it was announced."""
    total: int = field(init=False)
    """Bytes of its body."""
    early: EarlySink | None = field(init=False)
    """Of its body, before it was accepted."""
    sink: Sink | None = None
    """Of its body, once it was accepted."""
    refusal: SwarmError | None = None
    """Why the body cannot be had any more."""
    accepted_at: float = 0.0
    awaited: bool = False
    """A handler waits for the body."""

    def __post_init__(self) -> None:
        self.total = sum(self.header.body_sizes)
        self.early = EarlySink(self.total)


class ServerState(ConnectionState):
    """The end that is called. Events: `Opened`, `Called`, `BodyEnded`."""

    hears = frozenset({Kind.CALL, Kind.ABORT, Kind.BODY})
    role = "callee"

    def __init__(self, timings: NetTimings, *, now: float) -> None:
        super().__init__(timings, now=now)
        self._working: set[int] = set()
        """Calls not answered in full."""
        self._receiving: dict[int, Incoming] = {}
        """Calls whose body is not complete."""
        self._sending: dict[int, Outgoing] = {}
        """Calls whose answer is being written."""
        self._last_alive = 0.0

    # -- what the caller says -------------------------------------------------------------------

    def _frame(self, prefix: Prefix, header: bytes, now: float) -> None:
        if prefix.kind is Kind.ABORT:
            self._check_made(prefix)
            self._abort(prefix.call)
            return
        if prefix.call <= self._newest:
            raise FrameError(f"CALL {prefix.call} after call {self._newest}")
        self._newest = prefix.call
        self._called(prefix.call, frames.unpack_call(header), now)

    def _called(self, number: int, header: frames.CallHeader, now: float) -> None:
        if len(self._working) >= frames.MAX_PENDING:
            busy = Busy(f"{frames.MAX_PENDING} calls of yours are pending already")
            self._send(frames.pack_error(number, busy.to_wire()))
            return
        call = Incoming(number, header, now, self._came_bytes)
        if not self._working:
            self._last_alive = now
        self._working.add(number)
        if call.total:
            self._receiving[number] = call
        self._keep_ticking(now)
        self.events.append(Called(call))

    def _abort(self, number: int) -> None:
        self._working.discard(number)
        call = self._receiving.pop(number, None)
        if call is not None:
            self._refuse_body(call, PeerGone(self.peer, "gave the call up"))
        self.outbox.drop(self._sending.pop(number, None))

    def _refuse_body(self, call: Incoming, error: SwarmError) -> None:
        """The rest of the body will not come."""
        self._discard_chunk(call)
        call.early = None
        if call.refusal is None:
            call.refusal = error
            self.events.append(BodyEnded(call, error))

    def _discard_chunk(self, call: Incoming) -> None:
        if self._sink is not None and self._sink in (call.early, call.sink):
            self._sink = None

    def _other_version(self, error: OtherVersionError) -> None:
        """Say so with a frame of that version, which has the same for an error; hear no more."""
        text = differ("the peer that was called", PROTOCOL_VERSION, "its caller", error.version)
        refusal = OtherVersion(text, version=PROTOCOL_VERSION) if error.version else Refused(text)
        self._send(frames.pack_error(error.call, refusal.to_wire(), error.version))
        self.finish()
        self._deaf = True

    # -- bodies ---------------------------------------------------------------------------------

    def _sink_for(self, prefix: Prefix) -> Sink | EarlySink | None:
        call = self._receiving.get(prefix.call)
        if call is None:
            return None
        if call.sink is not None:
            return call.sink
        held = sum(other.early.held for other in self._receiving.values() if other.early is not None)
        if held + prefix.body_bytes > EARLY_BYTES_PER_LINK:
            del self._receiving[prefix.call]
            self._refuse_body(call, Busy("too many bodies of yours are waiting to be accepted"))
        return call.early

    def _chunk_done(self) -> None:
        call = self._receiving.get(self._sink_call)
        if call is None:
            return
        early = call.early
        complete = call.sink is not None and not call.sink.left
        if complete or (early is not None and early.received == early.announced):
            self._estimate(call.total, call.announced_at, call.came_before)
        if complete:
            del self._receiving[self._sink_call]
            self.events.append(BodyEnded(call, None))

    def accept(self, call: Incoming, *, now: float) -> Sink:
        """Reserve the body's buffers, move in what came already, ask for the rest.

        If something is `left`, `BodyEnded` follows.

        Raises:
            PeerGone, PeerSilent: the caller went away, or gave the call up.
            Busy: too many bodies of this caller are waiting to be accepted.
        """
        if call.refusal is not None:
            raise call.refusal
        if call.sink is not None:
            return call.sink
        if self.lost_because is not None:
            raise self.lost_because
        if call.number not in self._working:
            raise PeerGone(self.peer, "gave the call up")
        sink = Sink(call.header.body_sizes)
        early, call.sink, call.early = call.early, sink, None
        call.accepted_at = now
        if early is not None:
            early.pour_into(sink)
            if self._sink is early:
                self._sink = sink  # the rest of a chunk that is under way
        if not sink.left:
            self._receiving.pop(call.number, None)
        elif call.total > frames.WINDOW_BYTES:
            self._send(frames.pack_prefix(Kind.ACCEPT, call.number))
        return sink

    # -- answers --------------------------------------------------------------------------------

    def answer(self, call: Incoming, header: bytes, body: Sequence[memoryview]) -> None:
        """Send the result. Raises ValueError if it is over a limit of the framing."""
        frame = frames.pack_result(call.number, header, [part.nbytes for part in body])
        if not self._end_of(call):
            return
        outgoing = Outgoing(call.number, body, UNLIMITED)
        self._send(frame)
        if outgoing.left:
            self._sending[call.number] = outgoing
            self._send_body(outgoing)
        else:
            self._working.discard(call.number)

    def answer_error(self, call: Incoming, error: SwarmError) -> None:
        """Send an error instead of a result, and forget the call."""
        if self._end_of(call):
            self._working.discard(call.number)
            self._send(frames.pack_error(call.number, error.to_wire()))

    def _end_of(self, call: Incoming) -> bool:
        """The handler is done: forget a body that it did not take. False if the answer is not wanted."""
        if self._receiving.pop(call.number, None) is not None:
            self._discard_chunk(call)
        call.early = None
        return not self.over and call.number in self._working

    def _body_sent(self, call: int) -> None:
        self._working.discard(call)
        self._sending.pop(call, None)

    # -- clocks and the end ---------------------------------------------------------------------

    def _check_clocks(self, now: float) -> bool:
        stall_s = self.timings.send_stall_s
        if self._paused_since is not None and now - self._paused_since > stall_s:
            self.fail(PeerSilent(self.peer, f"took no bytes for {stall_s:g} s"))
            return False
        if not self._working:
            return not self.outbox.empty or self._paused_since is not None
        if now - self._last_alive >= self.timings.alive_every_s - self.timings.tick_s / 2:
            self._last_alive = now
            self._send(frames.pack_alive(self._newest, list(self._working)))
        awaited = [call.accepted_at for call in self._receiving.values() if call.awaited]
        if awaited and now - max(self.last_byte_at, min(awaited)) > self.timings.silence_s:
            quiet_s = now - self.last_byte_at
            self.fail(PeerSilent(self.peer, f"its body stopped coming {quiet_s:.1f} s ago"))
        return not self.over

    def _lost(self, fault: PeerFault) -> None:
        receiving, self._receiving = self._receiving, {}
        for call in receiving.values():
            self._refuse_body(call, _again(fault, self.peer))
        self._working.clear()
        self._sending.clear()


def _again(fault: PeerFault, peer: PeerId) -> PeerFault:
    """The same fault, for another call: a traceback belongs to one."""
    return type(fault)(peer, fault.text.removeprefix(f"peer {short(fault.peer)}: "))


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
