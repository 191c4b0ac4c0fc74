"""Calls between processes over lines that lose, double, delay and reorder, and can be cut one way or both.

What a caller can observe is what it would observe with `peers.net`: an answer, an error that was answered,
a connection that broke (at once), or silence (after `silence_s`). Heartbeats are not sent; the network knows
when they would have stopped. The body of a call follows when its handler accepts it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from peers.ports import Answer, Buffer, Handler, NetworkPath
from peers.sim.dice import Dice
from peers.sim.lines import Lines, Sent
from peers.sim.loop import WORLD as _WORLD
from peers.sim.loop import Process, VirtualLoop
from peers.waiting import fail
from swarm.errors import BadAnswer, PeerGone, PeerSilent, Refused, SwarmError, from_wire
from swarm.ids import PeerId
from swarm.wire.frames import MAX_HEADER_BYTES

SILENCE_S = 3.5
"""As `peers.net.connection`."""
ALIVE_EVERY_S = 1.0


@dataclass(eq=False, slots=True)
class _Call:
    """One call on its way. `result` is what the caller waits for."""

    number: int
    caller: SimTransport
    callee: SimTransport
    method: str
    header: bytes
    body: list[memoryview]
    result: asyncio.Future[Answer]
    made_s: float
    abandoned: bool = False
    passing: list[tuple[float, float, int]] = field(default_factory=list)
    """Of its body and its answer: since when they are on their way, for how long, and their bytes."""


class _Request:
    """Fulfils `peers.ports.Request`."""

    def __init__(self, network: Network, call: _Call) -> None:
        self._network, self._call = network, call
        self.peer = call.caller.peer_id
        self.header = call.header
        self.body_sizes: Sequence[int] = tuple(part.nbytes for part in call.body)

    @property
    def passed_bytes(self) -> int:
        """What is here of the body, and there of the answer: both come evenly."""
        now = self._network.loop.now_s
        return sum(int(n * min(1.0, (now - since) / lasts)) for since, lasts, n in self._call.passing)

    async def accept(self) -> list[memoryview]:
        """The body, copied, so that both sides may write to theirs.

        Raises:
            PeerGone, PeerSilent: the caller died, gave the call up, or is cut off.
        """
        call, network = self._call, self._network
        if call.body:
            size, now = sum(self.body_sizes), network.loop.now_s
            sent = Sent(self.peer, call.callee.peer_id, size, now, call.made_s)
            lasts_s = network.lines.lasts_s(sent, network.dice)
            call.passing.append((now, max(lasts_s, 1e-9), size))
            await asyncio.sleep(lasts_s)
        if call.abandoned or not call.caller.process.alive:
            raise PeerGone(self.peer, "went away before its body arrived")
        if call.caller.process.stopped or network.is_cut(self.peer, call.callee.peer_id):
            await asyncio.sleep(network.silence_s)
            raise PeerSilent(self.peer, "its body did not arrive in time")
        return [memoryview(bytearray(part)) for part in call.body]


class SimSigner:
    """Fulfils `swarm.protocol.statements.Signer`: a keyed hash, which no simulated peer makes for another."""

    def __init__(self, peer_id: PeerId) -> None:
        self.peer_id = peer_id

    def sign(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, key=self.peer_id.encode()[:64]).digest()

    def verify(self, peer: PeerId, data: bytes, signature: bytes) -> bool:
        return SimSigner(peer).sign(data) == signature


class SimTransport:
    """Fulfils `peers.ports.Transport`."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network, self.process = network, process
        self.peer_id: PeerId = process.name
        self.signer = SimSigner(process.name)
        self.handlers: dict[str, tuple[Handler, int]] = {}
        self.calls: Counter[str] = Counter()
        """How often each method of this peer was called."""
        self.lines: dict[PeerId, NetworkPath] = {}
        self.on_gone: Callable[[PeerId], None] | None = None
        """Told of each connection that broke."""

    def invited(self, peer: PeerId, /) -> bool:
        return peer in self._network.invited

    def serve(self, method: str, handler: Handler, *, max_body_bytes: int = 0) -> None:
        self.handlers[method] = (handler, max_body_bytes)

    async def call(
        self, peer: PeerId, method: str, header: bytes, body: Sequence[Buffer] = (), *,
        max_answer_bytes: int = 0, deadline_s: float | None = None,
    ) -> Answer:  # fmt: skip
        assert peer != self.peer_id, "p2pd dials no peer from itself"
        if len(header) > MAX_HEADER_BYTES:
            raise ValueError(f"header of {len(header)} bytes; the limit is {MAX_HEADER_BYTES}")
        answer = await self._network.call(self, peer, method, header, body, deadline_s)
        size = _size(answer.body)
        if size > max_answer_bytes:
            raise BadAnswer(peer, f"an answer of {size} bytes; at most {max_answer_bytes} fit")
        was = self.lines.get(peer, NetworkPath())
        sent_bytes = was.sent_bytes + len(header) + _size(body)
        came_bytes = was.received_bytes + len(answer.header) + size
        trip_s = self._network.lines.round_trip_s(self.peer_id, peer)
        self.lines[peer] = NetworkPath(trip_s, was.bandwidth_bps, sent_bytes, came_bytes, was.memory_bytes)
        return answer


@dataclass
class Network:
    """All processes, and the lines between them."""

    loop: VirtualLoop
    dice: Dice
    calm: Lines
    """How the lines are at other times than in a storm."""
    silence_s: float = SILENCE_S
    """After how long a caller gives up a peer that does not answer."""
    breaks_s: tuple[float, float] = (0.001, 0.1)
    """After how long a broken connection is noticed."""
    trace: Callable[[str], None] = lambda _: None
    on_deliver: Callable[[PeerId, PeerId, str], None] | None = None
    """Called as (caller, callee, method) for each call that reaches its callee."""
    transports: dict[PeerId, SimTransport] = field(default_factory=dict)
    invited: frozenset[PeerId] = frozenset()
    """By the run's owner."""
    calls: int = 0
    _open: dict[int, _Call] = field(default_factory=dict)
    _cuts: dict[int, tuple[frozenset[PeerId], frozenset[PeerId] | None, bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lines = self.calm

    def add(self, process: Process) -> SimTransport:
        """What a new process speaks through."""
        transport = self.transports[process.name] = SimTransport(self, process)
        return transport

    # -- calls ------------------------------------------------------------------------------------

    async def call(
        self, caller: SimTransport, peer: PeerId, method: str, header: bytes, body: Sequence[Buffer],
        deadline_s: float | None,
    ) -> Answer:  # fmt: skip
        loop = self.loop
        result: asyncio.Future[Answer] = loop.create_future()
        callee = self.transports.get(peer)
        if callee is None or not (callee.process.alive or callee.process.stopped):
            await asyncio.sleep(self.dice.between(*self.breaks_s))
            raise PeerGone(peer, "cannot be reached")
        self.calls += 1
        views = [memoryview(part).cast("B") if memoryview(part).nbytes else memoryview(b"") for part in body]
        call = _Call(self.calls, caller, callee, method, header, views, result, loop.now_s)
        self._open[call.number] = call
        timer = None
        if deadline_s is not None:
            why = f"no answer to {method!r} within {deadline_s:.4g} s"
            timer = loop.call_later(deadline_s, self._silent, call, why)
        if callee.process.stopped:
            loop.call_later(self.silence_s, self._check_stopped, call)
        self._send(call, len(header), self._arrive)
        try:
            return await result
        except asyncio.CancelledError:
            call.abandoned = True
            raise
        finally:
            self._open.pop(call.number, None)
            if timer is not None:
                timer.cancel()

    def _send(self, call: _Call, size_bytes: int, arrive: Callable[..., None], *outcome: object) -> None:
        lines, dice, loop = self.lines, self.dice, self.loop
        source, destination = call.caller.peer_id, call.callee.peer_id
        if outcome:
            source, destination = destination, source
        if self.is_cut(source, destination):
            loop.call_later(self.silence_s, self._silent, call, context=_WORLD)
            return
        chance = dice.number()
        if chance < lines.lost:
            self.trace(f"lost: {call.method} from {source} to {destination}")
            loop.call_later(dice.between(ALIVE_EVERY_S, self.silence_s), self._silent, call, context=_WORLD)
            return
        chance -= lines.lost
        if chance < lines.late:
            delay_s = dice.between(lines.most_s, lines.late_s)
        else:
            delay_s = lines.lasts_s(Sent(source, destination, size_bytes, loop.now_s), dice)
            if outcome:
                call.passing.append((loop.now_s, max(delay_s, 1e-9), size_bytes))
            if chance < lines.late + lines.doubled:
                again_s = delay_s + dice.between(0.0, lines.late_s)
                loop.call_later(again_s, arrive, call, *outcome, context=_WORLD)
        loop.call_later(delay_s, arrive, call, *outcome, context=_WORLD)

    def _arrive(self, call: _Call) -> None:
        process = call.callee.process
        if process.alive:
            process.spawn(self.loop, self._handle(call))

    async def _handle(self, call: _Call) -> None:
        """At the callee: a process that is stopped does nothing of this before it goes on."""
        call.callee.calls[call.method] += 1
        if self.on_deliver is not None:
            self.on_deliver(call.caller.peer_id, call.callee.peer_id, call.method)
        outcome: Answer | SwarmError
        try:
            handler, max_body_bytes = call.callee.handlers.get(call.method, (None, 0))
            if handler is None:
                raise Refused(f"no such method: {call.method!r}")
            size = _size(call.body)
            if size > max_body_bytes:
                raise Refused(f"a body of {size} bytes; {call.method!r} takes {max_body_bytes}")
            answer = await handler(_Request(self, call))
            outcome = Answer(bytes(answer.header), [memoryview(bytearray(part)) for part in answer.body])
        except SwarmError as error:
            outcome = error
        except Exception as error:  # noqa: BLE001  as the real transport; here it is told as well
            if call.callee.process.alive:  # else it was only closed where it stood
                self.loop.bug(f"the handler of {call.method!r} failed", error)
            outcome = Refused(f"internal error: {type(error).__name__}: {error}"[:500])
        self._answer(call, outcome)

    def _answer(self, call: _Call, outcome: Answer | SwarmError) -> None:
        if call.number in self._open and not call.abandoned:
            size = 64 if isinstance(outcome, SwarmError) else len(outcome.header) + _size(outcome.body)
            self._send(call, size, self._back, outcome)

    def _back(self, call: _Call, outcome: Answer | SwarmError) -> None:
        if isinstance(outcome, SwarmError):
            fail(call.result, from_wire(call.callee.peer_id, outcome.to_wire()))
        elif not call.result.done():
            call.result.set_result(outcome)

    # -- how calls fail ---------------------------------------------------------------------------

    def _silent(self, call: _Call, why: str = "") -> None:
        fail(call.result, PeerSilent(call.callee.peer_id, why or f"no sign of life for {self.silence_s} s"))

    def _check_stopped(self, call: _Call) -> None:
        if call.callee.process.stopped:
            self._silent(call)

    # -- faults -----------------------------------------------------------------------------------

    def kill(self, name: PeerId, *, quietly: bool = False) -> None:
        """End a process: its connections break, or, with a machine that lost its power, no peer is told."""
        ended = self.transports[name].process
        ended.kill()
        for call in list(self._open.values()):
            if call.callee.process is ended:
                if quietly:
                    self.loop.call_later(self.silence_s, self._silent, call, context=_WORLD)
                else:
                    delay_s, broke = self.dice.between(*self.breaks_s), PeerGone(name, "the connection broke")
                    self.loop.call_later(delay_s, fail, call.result, broke, context=_WORLD)
            elif call.caller.process is ended:
                call.abandoned = True
                del self._open[call.number]
        if not quietly:
            for other in self.transports.values():
                if other.process.alive and other.on_gone is not None and not self.is_cut(name, other.peer_id):
                    delay_s = self.dice.between(*self.breaks_s)
                    self.loop.call_later(delay_s, other.on_gone, name, context=other.process.context)

    def stop(self, name: PeerId) -> None:
        """As SIGSTOP: what is asked of it falls silent."""
        self.transports[name].process.stop()
        for call in self._open.values():
            if call.callee.peer_id == name:
                self.loop.call_later(self.silence_s, self._check_stopped, call, context=_WORLD)

    def go_on(self, name: PeerId) -> None:
        self.transports[name].process.go_on(self.loop)

    def cut(
        self, side: Iterable[PeerId], other: Iterable[PeerId] | None = None, *, one_way: bool = False
    ) -> int:
        """Nothing crosses from `side` to `other` (the rest unless given), nor, unless `one_way`, back.

        The number is for `heal`.
        """
        number = max(self._cuts, default=0) + 1
        self._cuts[number] = frozenset(side), None if other is None else frozenset(other), one_way
        self.loop.call_later(self.silence_s, self._check_cut, number, context=_WORLD)
        return number

    def heal(self, number: int | None = None) -> None:
        """End a cut, or all."""
        for cut in list(self._cuts) if number is None else (number,):
            self._cuts.pop(cut, None)

    def is_cut(self, source: PeerId, destination: PeerId) -> bool:
        """Whether a message would be lost for sure."""
        for side, other, one_way in self._cuts.values():
            if source in side and _in_other(destination, side, other):
                return True
            if not one_way and destination in side and _in_other(source, side, other):
                return True
        return False

    def _check_cut(self, number: int) -> None:
        if number in self._cuts:
            for call in list(self._open.values()):
                names = call.caller.peer_id, call.callee.peer_id
                if self.is_cut(*names) or self.is_cut(*reversed(names)):
                    self._silent(call)


def _in_other(peer: PeerId, side: frozenset[PeerId], other: frozenset[PeerId] | None) -> bool:
    return peer not in side if other is None else peer in other


def _size(body: Sequence[Buffer]) -> int:
    return sum(memoryview(part).nbytes for part in body) if body else 0
