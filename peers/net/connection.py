"""One stream between two peers, seen from either end: frames, calls and clocks on an event loop.

Memory is bounded by the protocol itself (credit before ACCEPT, sizes after), so reading never has to pause,
and a heartbeat is never stuck behind a body that no handler takes.

A call goes through these states; a frame that fits none breaks the protocol:

    client  waiting ─ACCEPT→ waiting    waiting ─RESULT→ answering ─BODY→ answering    waiting ─ERROR→ over
    server  announced ─accept→ receiving ─BODY→ received ─answer→ sending → over       ABORT ends any
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from peers.clock import now_s
from peers.net.bandwidth import OBSERVED_EVERY_S, UNPACKED_BYTES, Line, Traffic
from peers.net.body_buffers import UNLIMITED, Body, Outbox, Outgoing
from peers.net.timings import DEFAULT_TIMINGS, NetTimings
from peers.ports import Answer, Buffer
from peers.waiting import fail
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
)
from swarm.ids import PeerId
from swarm.wire import frames
from swarm.wire.frames import FrameError, Kind, OtherVersionError, Prefix
from swarm.wire.version import PROTOCOL_VERSION, differ

LATE_S = 0.1
"""p2pd and the programs at both ends may be late by so much, without a queue."""
SMOOTH = 8
"""p2pd takes bytes in bursts: of what it took, so large a part is told at each observation."""
_BOTH_HEAR = frozenset({Kind.PING, Kind.PONG})
_MAX_OPENING_BYTES = 64 * 1024
"""Of p2pd's message that opens a stream."""
LEFT_S = 1.0
"""A peer that gives up what is sent to it, and took nothing for so long, had us hold it for nothing."""
MAX_WAITING = 4 * frames.MAX_PENDING
"""Frames for a peer that takes no bytes: four for each call that it may have pending."""
MAX_PARTS, NEXT_TURN_S = 64, 1e-6
"""Of what came that are looked at before others have their turn: 32 calls, a hundredth of a second."""


class StreamDelay:
    """How long p2pd and the line keep what a stream sends: asked of the other end, which answers at once.

    A `peers.net.bandwidth.Gauge`. What p2pd took has arrived, but for what its buffers hold.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._told_bytes = 0
        """Of what was sent."""
        self._asked_at: float | None = None
        """When, if there is no answer yet."""
        self._answered_at, self._waited_s, self._least_s = float("-inf"), 0.0, float("inf")
        """When the last answer came, how long after its question, and the least so long."""

    def asks(self, line: Line, now: float) -> bool:
        """Whether to ask now, as a body is sent."""
        if self._asked_at is not None or now - self._answered_at < OBSERVED_EVERY_S:
            return False
        self._asked_at, self._least_s = now, min(self._least_s, line.least_round_trip_s)
        line.limiter.gauges.add(self)
        return True

    def answered(self, now: float) -> None:
        """A PONG came. Raises FrameError: it was not asked for."""
        if self._asked_at is None:
            raise FrameError("PONG without PING")
        self._waited_s, self._asked_at, self._answered_at = now - self._asked_at, None, now
        self._least_s = min(self._least_s, self._waited_s)

    def __call__(self) -> tuple[int, float]:
        since = (self._outbox.sent_bytes - self._told_bytes) // SMOOTH
        self._told_bytes += since
        waited_s = self._waited_s
        if self._asked_at is not None:
            waited_s = max(waited_s, now_s() - self._asked_at)
        return since, max(0.0, waited_s - self._least_s - LATE_S)


class Connection(asyncio.Protocol):
    """What both ends share. Subclasses give frames their meaning."""

    hears: frozenset[Kind]
    """Kinds of frames that the other end may send."""
    role: str

    def __init__(self, timings: NetTimings) -> None:
        self._loop = asyncio.get_running_loop()
        self.peer: PeerId = ""
        self.timings = timings
        self.direct = False
        """It passes no p2pd (`peers.net.direct`)."""
        self.in_memory = False
        """It does not leave this machine (`peers.net.direct.memory`)."""
        self.closed = self._loop.create_future()
        """Done when the connection is gone."""
        self.line = Line(Traffic(most_peers=1))
        """The transport has one for all links with a peer."""
        self.outbox = Outbox()
        self.chunk_bytes = frames.CHUNK_BYTES
        """Of a body, that are sent at a time: nothing passes a chunk."""
        self.lost_because: PeerFault | None = None
        """Why it is over, if it is."""
        self.on_rest: Callable[[Connection], None] = lambda link: None
        """Told whenever the other end is slowed down."""
        self._transport: asyncio.Transport | None = None
        self.write: Callable[[Sequence[Buffer]], None] = self._write_as_it_is
        """Sends the parts of a frame; another one where they are sealed."""
        self._newest = 0
        """Number of the newest call."""
        self.last_byte_at = self._loop.time()
        self.waits = self.outbox.gauge = StreamDelay(self.outbox)
        self._came = memoryview(b"")
        """What is still to be looked at."""
        self._opened = False
        """p2pd's message that opens the stream has arrived."""
        self._prefix: Prefix | None = None
        self._chunk_left = 0
        self._body: Body | None = None
        """Of the chunk that is under way; None if it is discarded."""
        self._deaf = False
        """Nothing is heard any more."""
        self._resting = 0
        """Rests that are not over: nothing is read."""
        self._finishing = self._finished = False
        """Nothing follows what is queued; all of that is sent: what is said now came too late."""
        self._paused_since: float | None = None
        self._ticker: asyncio.TimerHandle | None = None
        self._tick_at = 0.0
        self._turn: asyncio.TimerHandle | None = None

    @property
    def over(self) -> bool:
        return self.lost_because is not None

    # -- what subclasses say --------------------------------------------------------------------

    def _open(self, message: bytes) -> None:
        """p2pd's opening message arrived. Raises FrameError."""

    def _frame(self, prefix: Prefix, header: bytes, now: float) -> None:
        """A frame without body arrived."""

    def _body_for(self, prefix: Prefix) -> Body | None:
        """Where the chunk goes; None to discard it."""

    def _body_came(self, call: int) -> None:
        """The last chunk of the body of a call is complete."""

    def _lost(self, fault: PeerFault) -> None:
        """The link is over, once, because of this."""

    def _check_clocks(self, now: float) -> bool:
        """Act on what took too long; whether the clocks have to be checked again."""
        raise NotImplementedError

    # -- reading --------------------------------------------------------------------------------

    def data_received(self, data: Buffer) -> None:
        """These came, or nothing yet but a sign of life. They may change when this returns."""
        if self.over or self._deaf:
            return
        self.last_byte_at = self._loop.time()
        if self._opened:
            self.line.count(received=len(data), in_memory=self.in_memory)
        if data:
            self._came = memoryview(bytes(self._came) + bytes(data) if self._came else data)
        try:
            for _ in range(MAX_PARTS):
                if self.over or self._resting or not self._parse():
                    break
            else:
                self.rest(NEXT_TURN_S)
        except FrameError as error:
            self._broken(error)
        if data:
            self._came = memoryview(bytes(self._came))
        self.flush()

    def rest(self, rests_s: float) -> None:
        """Read nothing for so long: the other end has sent more than it may."""
        if rests_s > 0 and not self.over and self._transport is not None:
            self._resting += 1
            self._transport.pause_reading()
            self._loop.call_later(rests_s, self._go_on)

    def _go_on(self) -> None:
        """A rest is over: read what waited."""
        self._resting -= 1
        if not self._resting and not self.over and self._transport is not None:
            self._transport.resume_reading()
            self.data_received(b"")

    def eof_received(self) -> bool:
        self.fail(PeerGone(self.peer, "the connection broke"))
        return False

    def _broken(self, error: FrameError) -> None:
        """The other end has broken the protocol."""
        self.fail(BadAnswer(self.peer, str(error)))

    def _take(self, size: int) -> memoryview | None:
        """The next bytes, if they are here."""
        if len(self._came) < size:
            return None
        taken, self._came = self._came[:size], self._came[size:]
        return taken

    def _parse(self) -> bool:
        """Take the next part of what came: of a body, a header, or a prefix; whether it was here."""
        if self._chunk_left:
            part = self._take(min(len(self._came), self._chunk_left))
            if not part:
                return False
            self._chunk_left -= len(part)
            if (body := self._body) is not None:
                body.put(part)
                if not body.left:
                    # All that came meanwhile: a body that others were sent before has no slower line.
                    came_bytes = self.line.received_bytes - body.came_before
                    self.line.received(body.total, came_bytes, self.last_byte_at - body.since)
                    self._body_came(body.call)
        elif self._prefix is not None:
            header = self._take(self._prefix.header_bytes)
            if header is None:
                return False
            prefix, self._prefix = self._prefix, None
            if prefix.kind is Kind.PING:
                self._send(frames.pack_prefix(Kind.PONG, 0))
            elif prefix.kind is Kind.PONG:
                self.waits.answered(self.last_byte_at)
            elif prefix.kind is Kind.PACKED:  # what it stands for comes before the rest
                part = frames.unpack_part(bytes(header))
                self._begin(Prefix(Kind.BODY, prefix.call, len(part) // UNPACKED_BYTES, len(part)))
                self._came, rest = memoryview(part), self._came
                self._parse()
                self._came = rest
            else:
                self._frame(prefix, bytes(header), self.last_byte_at)
        elif not self._opened:
            found = read_varint(self._came)
            if found is not None and found[0] > _MAX_OPENING_BYTES:
                raise FrameError(f"an opening message of {found[0]} bytes")
            message = None if found is None else self._take(sum(found))
            if found is None or message is None:
                return False
            self._opened = True
            self._open(bytes(message[found[1] :]))
            self.line.count(received=len(self._came), in_memory=self.in_memory)
        else:
            packed = self._take(frames.PREFIX_BYTES)
            if packed is None:
                return False
            self._begin(frames.unpack_prefix(packed))
        return True

    def _begin(self, prefix: Prefix) -> None:
        if prefix.kind not in self.hears and prefix.kind not in _BOTH_HEAR:
            raise FrameError(f"{prefix.kind.name}, which only a {self.role} may send")
        rests_s = self.line.pays(prefix, now=self._loop.time())
        if rests_s > 0:
            self.rest(rests_s)
            self.on_rest(self)
        if prefix.kind is not Kind.BODY:
            self._prefix = prefix
            return
        self._check_made(prefix)
        self._body = self._body_for(prefix)
        if self._body is not None:
            self._body.begin(prefix.body_bytes)
        self._chunk_left = prefix.body_bytes

    def _check_made(self, prefix: Prefix) -> None:
        if prefix.call > self._newest:
            preposition = "of" if prefix.kind is Kind.ABORT else "for"
            raise FrameError(f"{prefix.kind.name} {preposition} call {prefix.call}, which was never made")

    # -- writing --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it
        self._transport.set_write_buffer_limits(high=0)

    def _send(self, frame: bytes, body: Outgoing | None = None) -> None:
        if not self.over and not self._finished:
            self.outbox.frames.append(frame)
            if self._paused_since is not None and len(self.outbox.frames) > MAX_WAITING:
                # Later: the sender of this may be about to wait for what the end of the link ends.
                self._loop.call_soon(self.fail, PeerSilent(self.peer, "took no bytes of too many frames"))
            if body is not None and body.left:
                self.outbox.add(body)

    def flush(self) -> None:
        """Send what may be sent now; after each change of what there is to send."""
        transport, outbox = self._transport, self.outbox
        if transport is None or self.over or (outbox.empty and not self._finishing):
            return
        limiter = None if self.in_memory else self.line.limiter
        while self._opened and self._paused_since is None:
            before = outbox.sent_bytes
            frame, whole = outbox.next(limiter, self.chunk_bytes, self._loop.time())
            if not frame:
                break
            self.write(frame)
            if whole is not None:
                self._body_sent(whole)
            if len(frame) > 1 and not self.direct and self.waits.asks(self.line, self._loop.time()):
                self._send(frames.pack_prefix(Kind.PING, 0))
            self.line.count(sent=outbox.sent_bytes - before, in_memory=self.in_memory)
        if outbox.turn_at is not None and self._turn is None:
            self._turn = self._loop.call_later(max(0.0, outbox.turn_at - self._loop.time()), self._turn_comes)
        if self._finishing and not self._finished and self._opened and outbox.empty:
            self._finished = True
            with contextlib.suppress(OSError, RuntimeError):
                transport.write_eof()

    def _write_as_it_is(self, parts: Sequence[Buffer]) -> None:
        assert self._transport is not None
        for part in parts:  # asyncio's `writelines` of Python 3.12 does not ask to pause
            self._transport.write(part)

    def _turn_comes(self) -> None:
        self._turn = None
        self.flush()

    def _body_sent(self, call: int) -> None:
        """The last chunk of a body is on its way."""

    def pause_writing(self) -> None:
        """The other end takes no more bytes."""
        self._paused_since = self._loop.time()

    def resume_writing(self) -> None:
        self._paused_since = None
        self.flush()

    # -- clocks and the end ---------------------------------------------------------------------

    def _keep_ticking(self) -> None:
        if self._ticker is None and not self.over:
            self._tick_at = self._loop.time() + self.timings.tick_s
            self._ticker = self._loop.call_later(self.timings.tick_s, self._tick)

    def _tick(self) -> None:
        now = self._loop.time()
        late, self._ticker = now - self._tick_at, None
        if late > self.timings.tick_s:
            # This process slept (a busy loop, a stop signal): bytes may be waiting to be read.
            self.last_byte_at = min(now, self.last_byte_at + late)
            if self._paused_since is not None:
                self._paused_since = min(now, self._paused_since + late)
        if self._check_clocks(now):
            self._keep_ticking()
        self.flush()

    def finish(self) -> None:
        """Let everything queued go out, then tell the other end that nothing follows."""
        self._finishing = True
        self.flush()

    def fail(self, fault: PeerFault) -> None:
        """Drop the connection now; whatever waits on it gets this fault."""
        if self.over:
            return
        self.lost_because = fault
        for timer in (self._ticker, self._turn):
            if timer is not None:
                timer.cancel()
        self.outbox.clear()
        if self.outbox.gauge is not None:
            self.line.limiter.gauges.discard(self.outbox.gauge)
        self._body, self._came = None, memoryview(b"")
        if self._transport is not None:
            self._transport.abort()
        else:
            self.closed.set_result(None)
        self._lost(fault)

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail(PeerGone(self.peer, "the connection broke"))
        if not self.closed.done():
            self.closed.set_result(None)


@dataclass(slots=True, eq=False)
class _Pending:
    """A call whose answer the caller waits for."""

    answer: asyncio.Future[Answer]
    max_answer_bytes: int
    outgoing: Outgoing
    size: int
    """Bytes of the call."""
    since: float
    """When it was made."""
    ahead: int = 0
    """Of its body, beyond what each may send, before the other end has said anything to it."""
    heard: bool = False
    """The other end has said something to it."""
    body: Body | None = None
    """Of its answer, once that began."""
    header: bytes = b""


class ClientConnection(Connection):
    hears = frozenset({Kind.ALIVE, Kind.ACCEPT, Kind.RESULT, Kind.ERROR, Kind.BODY, Kind.PACKED})
    role = "caller"

    def __init__(self, peer: PeerId, request: bytes, timings: NetTimings = DEFAULT_TIMINGS) -> None:
        """`request` asks p2pd to open the stream, empty where none does; `opened` gets p2pd's answer."""
        super().__init__(timings)
        self.peer = peer
        self.opened: asyncio.Future[bytes] = self._loop.create_future()
        self.relayed = False
        """It passes a third peer."""
        self._request = request
        self._calls: dict[int, _Pending] = {}
        self._waiting_since = 0.0
        self._ahead = frames.AHEAD_BYTES
        """What may still be sent of bodies before they are accepted, beyond `WINDOW_BYTES` of each."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._request:
            self.write((self._request,))

    def _open(self, message: bytes) -> None:
        if not self.opened.done():
            self.opened.set_result(message)

    @property
    def usable(self) -> bool:
        return not self.over and self._newest < 0xFFFFFFFF

    @property
    def pending(self) -> int:
        """How many calls wait for their answer."""
        return len(self._calls)

    async def call(
        self, method: str, header: bytes, body: Sequence[memoryview], max_answer_bytes: int
    ) -> Answer:
        """Send, wait, and if the caller is cancelled, say so to the other end.

        Raises:
            ValueError: it is over a limit of the framing.
            PeerFault, SwarmError: what became of it, as `peers.ports.Transport.call` says.
        """
        if self.over:
            raise PeerGone(self.peer, "the connection broke")
        number, now = self._newest + 1, self._loop.time()
        frame = frames.pack_call(number, method, header, [part.nbytes for part in body])
        self._newest = number
        outgoing, answer = Outgoing(number, body, frames.WINDOW_BYTES), self._loop.create_future()
        ahead = max(0, min(self._ahead, outgoing.left - outgoing.credit))
        outgoing.credit += ahead
        self._ahead -= ahead
        if not self._calls:
            self._waiting_since = now
        size = len(frame) + outgoing.left
        self._calls[number] = _Pending(answer, max_answer_bytes, outgoing, size, now, ahead)
        self._keep_ticking()
        self._send(frame, outgoing)
        self.flush()
        try:
            return await answer
        finally:
            if number in self._calls:
                self._forget(number)
                self._send(frames.pack_prefix(Kind.ABORT, number))
                self.flush()

    def _forget(self, number: int) -> asyncio.Future[Answer]:
        pending = self._calls.pop(number)
        self._give_back(pending)
        self.outbox.drop(pending.outgoing)
        if self._body is pending.body:
            self._body = None
        return pending.answer

    def _give_back(self, pending: _Pending) -> None:
        """Others may send ahead what it has sent."""
        self._ahead += pending.ahead
        pending.ahead = 0

    def _fault(self, number: int, error: SwarmError) -> None:
        fail(self._forget(number), error)

    def _frame(self, prefix: Prefix, header: bytes, now: float) -> None:
        if prefix.kind is Kind.ALIVE:
            return
        self._check_made(prefix)
        call, pending = prefix.call, self._calls.get(prefix.call)
        if pending is None:
            return  # given up before
        self._give_back(pending)
        if not pending.heard:
            pending.heard = True
            self.line.answered(now - pending.since, pending.size)
        if prefix.kind is Kind.ACCEPT:
            parked = pending.outgoing.left > 0 and pending.outgoing.credit == 0
            pending.outgoing.credit = UNLIMITED
            if parked:
                self.outbox.add(pending.outgoing)
        elif pending.body is not None:
            raise FrameError("a second answer to one call")
        elif prefix.kind is Kind.ERROR:
            self._fault(call, from_wire(self.peer, frames.unpack_error(header)))
        else:
            self._result(call, pending, header, now)

    def _result(self, call: int, pending: _Pending, header: bytes, now: float) -> None:
        result = frames.unpack_result(header)
        total = sum(result.body_sizes)
        if total > pending.max_answer_bytes:
            text = f"an answer of {total} bytes; at most {pending.max_answer_bytes} fit"
            self._fault(call, BadAnswer(self.peer, text))
            self._send(frames.pack_prefix(Kind.ABORT, call))
            return
        # It is answered: the rest of the body is of no use, whatever is accepted now.
        self.outbox.drop(pending.outgoing)
        pending.outgoing.left = 0
        pending.header = result.header
        pending.body = Body(call, result.body_sizes, now, self.line.received_bytes - len(self._came))
        pending.body.accept()
        self.line.wants(total, now=now)
        if not total:
            self._body_came(call)

    def _body_for(self, prefix: Prefix) -> Body | None:
        pending = self._calls.get(prefix.call)
        if pending is not None and pending.body is None:
            raise FrameError("BODY before its RESULT")
        return pending.body if pending is not None else None

    def _body_came(self, call: int) -> None:
        pending = self._calls[call]
        assert pending.body is not None
        answer = self._forget(call)
        if not answer.done():
            answer.set_result(Answer(pending.header, pending.body.buffers))

    def _check_clocks(self, now: float) -> bool:
        if not self._calls:
            return False
        quiet_s = now - max(self.last_byte_at, self._waiting_since)
        if quiet_s > self.timings.silence_s:
            self.fail(PeerSilent(self.peer, f"no sign of life for {quiet_s:.1f} s"))
        return not self.over

    def _lost(self, fault: PeerFault) -> None:
        for call in list(self._calls):
            self._fault(call, _again(fault, self.peer))
        fail(self.opened, fault)  # the task that dials may be gone


@dataclass(slots=True, eq=False)
class ServedCall:
    """A call as the end that is called has it, and as its handler sees it (`peers.ports.Request`)."""

    link: ServerConnection
    number: int
    peer: PeerId
    method: str
    header: bytes
    body_sizes: Sequence[int]
    incoming: Body | None
    """None: it is not wanted any more."""
    refusal: SwarmError | None = None
    """Why the body cannot be had any more."""
    accepted_at: float = 0.0
    waiting: asyncio.Future[None] | None = None
    """For the body: what its handler waits for."""
    outgoing: Outgoing | None = None
    """Of its answer."""
    unread_bytes: int = 0
    """Of its answer, if strangers may ask for it, until that is sent."""

    @property
    def passed_bytes(self) -> int:
        """What is here of the body, and what was sent of the answer."""
        if (answer := self.outgoing) is not None:
            return sum(self.body_sizes) + answer.total - answer.left
        return self.incoming.total - self.incoming.left if self.incoming is not None else 0

    async def accept(self) -> list[memoryview]:
        """Reserve the body's buffers, move in what came already, ask for the rest, and wait for it.

        Raises:
            PeerGone, PeerSilent: the caller went away, or gave the call up.
            Busy: too many bodies of this caller are waiting to be accepted.
        """
        if self.refusal is not None:
            raise self.refusal
        body = self.incoming
        assert body is not None
        if not body.accepted:
            body.accept()
            self.link.accepted(self)
        if body.left:
            self.waiting = asyncio.get_running_loop().create_future()
            try:
                await self.waiting
            finally:
                self.waiting = None
        return body.buffers


class ServerConnection(Connection):
    hears = frozenset({Kind.CALL, Kind.ABORT, Kind.BODY, Kind.PACKED})
    role = "callee"

    def __init__(
        self, on_open: Callable[[ServerConnection, bytes], tuple[PeerId, Line]],
        on_call: Callable[[ServerConnection, ServedCall], None], timings: NetTimings = DEFAULT_TIMINGS,
    ) -> None:  # fmt: skip
        """`on_open`: which peer p2pd's message introduces. `on_call` starts a handler, or raises why not."""
        super().__init__(timings)
        self._on_open, self._on_call = on_open, on_call
        self._calls: dict[int, ServedCall] = {}
        """Those not answered in full."""
        self._last_alive = 0.0

    @property
    def busy(self) -> bool:
        """Its caller waits for answers."""
        return bool(self._calls)

    def awaits(self, call: ServedCall) -> bool:
        """Whether its caller has not given it up."""
        return call.number in self._calls

    def _open(self, message: bytes) -> None:
        self.peer, self.line = self._on_open(self, message)

    # -- what the caller says -------------------------------------------------------------------

    def _frame(self, prefix: Prefix, header: bytes, now: float) -> None:
        if prefix.kind is Kind.ABORT:
            self._check_made(prefix)
            self._abort(prefix.call)
            return
        number = prefix.call
        if number <= self._newest:
            raise FrameError(f"CALL {number} after call {self._newest}")
        self._newest, called = number, frames.unpack_call(header)
        if len(self._calls) >= frames.MAX_PENDING:
            busy = Busy(f"{frames.MAX_PENDING} calls of yours are pending already")
            self._send(frames.pack_error(number, busy.to_wire()))
            return
        if not self._calls:
            self._last_alive = now
        came_bytes = self.line.received_bytes - len(self._came)
        body = Body(number, called.body_sizes, now, came_bytes, self.line.holds)
        call = self._calls[number] = ServedCall(
            self, number, self.peer, called.method, called.header, called.body_sizes, body
        )
        self._keep_ticking()
        try:
            self._on_call(self, call)
        except SwarmError as refusal:
            self.answer_error(call, refusal)

    def _abort(self, number: int) -> None:
        call = self._calls.pop(number, None)
        if call is not None:
            self._refuse_body(call, PeerGone(self.peer, "gave the call up"))
            self.outbox.drop(call.outgoing)
            self._is_read(call, left=True)

    def _refuse_body(self, call: ServedCall, error: SwarmError) -> None:
        """The rest of the body will not come, if it is wanted."""
        if call.incoming is not None and (call.incoming.left or not call.incoming.accepted):
            self._forget_body(call)
            call.refusal = error
            if call.waiting is not None and not call.waiting.done():
                call.waiting.set_exception(error)

    def _forget_body(self, call: ServedCall) -> None:
        if call.incoming is not None:
            call.incoming.give_back()
            if self._body is call.incoming:
                self._body = None
        call.incoming = None

    def _broken(self, error: FrameError) -> None:
        """Tell a caller of another version so, by a frame of that one, which has the same for an error."""
        if not isinstance(error, OtherVersionError):
            super()._broken(error)
            return
        text = differ("the peer that was called", PROTOCOL_VERSION, "its caller", error.version)
        refusal = OtherVersion(text, version=PROTOCOL_VERSION) if error.version else Refused(text)
        self._send(frames.pack_error(error.call, refusal.to_wire(), error.version))
        self._finishing = self._deaf = True

    # -- bodies ---------------------------------------------------------------------------------

    def _body_for(self, prefix: Prefix) -> Body | None:
        call = self._calls.get(prefix.call)
        if call is None or call.incoming is None:
            return None
        if not call.incoming.accepted and not self.line.may_hold(prefix.body_bytes):
            self._refuse_body(call, Busy("too many bodies of yours are waiting to be accepted"))
        return call.incoming

    def _body_came(self, call: int) -> None:
        served = self._calls[call]
        if served.waiting is not None and not served.waiting.done():
            served.waiting.set_result(None)

    def accepted(self, call: ServedCall) -> None:
        """A handler wants the body of a call: ask for what is not sent before."""
        call.accepted_at = self._loop.time()
        self.line.wants(sum(call.body_sizes), now=call.accepted_at)
        if sum(call.body_sizes) > frames.WINDOW_BYTES:
            self._send(frames.pack_prefix(Kind.ACCEPT, call.number))
            self.flush()

    # -- answers --------------------------------------------------------------------------------

    def answer(
        self, call: ServedCall, header: bytes, body: Sequence[memoryview], *, to_strangers: bool = False
    ) -> None:
        """Send the result. Raises ValueError if it is over a limit of the framing."""
        frame = frames.pack_result(call.number, header, [part.nbytes for part in body])
        self._forget_body(call)
        if not self.awaits(call):
            return
        call.outgoing = Outgoing(call.number, body, UNLIMITED)
        call.unread_bytes = call.outgoing.left * to_strangers
        self.line.gives(call.unread_bytes)
        self._send(frame, call.outgoing)
        if not call.outgoing.left:
            del self._calls[call.number]
        self.flush()

    def answer_error(self, call: ServedCall, error: SwarmError) -> None:
        """Send an error instead of a result, and forget the call."""
        self._forget_body(call)
        if self._calls.pop(call.number, None) is not None:
            self._send(frames.pack_error(call.number, error.to_wire()))
            self.flush()

    def _body_sent(self, call: int) -> None:
        if (sent := self._calls.pop(call, None)) is not None:
            self._is_read(sent)

    def _is_read(self, call: ServedCall, *, left: bool = False) -> None:
        """Nothing is held any more of an answer; `left`: though it was not sent to its end."""
        if call.unread_bytes:
            if left and self.stuck_s(now := self._loop.time()) >= LEFT_S:
                self.line.left_unread_at = now
            self.line.gives(-call.unread_bytes)
            call.unread_bytes = 0

    @property
    def waiting_bytes(self) -> int:
        """Of frames without a body that it does not take."""
        return sum(map(len, self.outbox.frames)) if self._paused_since is not None else 0

    def stuck_s(self, now: float) -> float:
        """How long it has taken nothing of answers that strangers may ask for; 0: it has none to take."""
        since, waits = self._paused_since, self.line.unread_bytes
        return now - since if waits and since is not None else 0.0

    # -- clocks and the end ---------------------------------------------------------------------

    def _check_clocks(self, now: float) -> bool:
        stall_s = self.timings.send_stall_s
        if self._paused_since is not None and now - self._paused_since > stall_s:
            self.fail(PeerSilent(self.peer, f"took no bytes for {stall_s:g} s"))
            return False
        if not self._calls:
            return not self.outbox.empty or self._paused_since is not None
        if now - self._last_alive >= self.timings.alive_every_s - self.timings.tick_s / 2:
            self._last_alive = now
            self._send(frames.pack_prefix(Kind.ALIVE, 0))
        awaited = [call.accepted_at for call in self._calls.values() if call.waiting is not None]
        if awaited and now - max(self.last_byte_at, min(awaited)) > self.timings.silence_s:
            self.fail(PeerSilent(self.peer, f"its body stopped coming {now - self.last_byte_at:.1f} s ago"))
        return not self.over

    def excuse(self) -> None:
        """Its caller leaves no answer unread: our end is about to end the stream."""
        for call in self._calls.values():
            self._is_read(call)

    def _lost(self, fault: PeerFault) -> None:
        calls, self._calls = self._calls, {}
        for call in calls.values():
            self._refuse_body(call, _again(fault, self.peer))
            self._is_read(call, left=True)


def _again(fault: PeerFault, peer: PeerId) -> PeerFault:
    """The same fault, for another call: a traceback belongs to one."""
    return type(fault)(peer, fault.why)


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
