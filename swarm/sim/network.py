"""Calls between processes over lines that lose, double, delay and reorder, and can be cut.

What a caller can observe is what it would observe with `peers.net`: an answer, an error that was answered, a
connection that broke (at once), or silence (after `SILENCE_S`: nothing was heard, or the other side no longer
knows of the call). Heartbeats are not sent; the network knows when they would have stopped.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from types import CoroutineType
from typing import Any

from swarm.errors import Leaving, PeerGone, PeerSilent, SwarmError
from swarm.ids import PeerId
from swarm.sim.clock import Clock, Future, Process
from swarm.sim.dice import Dice

SILENCE_S = 3.5
ALIVE_EVERY_S = 1.0

Handler = Callable[[PeerId, Any], Any]
"""(who asks, question) -> the answer, or a coroutine that returns it. A SwarmError is an answer too."""


@dataclass(slots=True)
class Lines:
    """How bad the lines are. Probabilities are for each message."""

    least_s: float = 0.005
    most_s: float = 0.05
    lost: float = 0.0
    doubled: float = 0.0
    late: float = 0.0
    """Probability of a delay of up to `late_s` instead."""
    late_s: float = 2.0


class Node(Process):
    """A process with an address: a machine on the network."""

    def __init__(self, clock: Clock, name: PeerId) -> None:
        super().__init__(clock, name)
        self.handlers: dict[str, Handler] = {}
        self.on_gone: Callable[[PeerId], None] | None = None
        """Called when a connection to somebody breaks."""


class _Call:
    __slots__ = ("callee", "caller", "method", "result", "taken_by")

    def __init__(self, caller: Node, callee: PeerId, method: str, result: Future[Any]) -> None:
        self.caller, self.callee, self.method, self.result = caller, callee, method, result
        self.taken_by: Node | None = None


class Network:
    """All nodes and the lines between them."""

    def __init__(self, clock: Clock, dice: Dice, lines: Lines) -> None:
        self.clock, self.dice, self.lines = clock, dice, lines
        self.nodes: dict[PeerId, Node] = {}
        self.trace: Callable[[str], None] | None = None
        self._cut: frozenset[PeerId] = frozenset()
        """Those on the other side of a partition."""
        self._open: dict[_Call, None] = {}

    def add(self, node: Node) -> None:
        self.nodes[node.name] = node

    def replace(self, node: Node) -> None:
        """What has this address now ends, and `node` goes on in the same process: connections stay."""
        before = self.nodes[node.name]
        before.kill()
        self.nodes[node.name] = node
        for call in list(self._open):
            if call.caller is before:
                del self._open[call]
            elif call.taken_by is before:
                self._answer(call, node, Leaving("this peer pauses"))

    # -- calls ------------------------------------------------------------------------------------

    def call(
        self, caller: Node, callee: PeerId, method: str, question: Any, deadline_s: float | None = None
    ) -> Future[Any]:
        """Await it: the answer.

        Raises:
            PeerGone, PeerSilent: no answer.
            SwarmError: whatever the other side answered.
        """
        result: Future[Any] = Future(self.clock, caller)
        call = _Call(caller, callee, method, result)
        if deadline_s is not None:
            self.clock.after(deadline_s, caller, self._too_late, call)
        target = self.nodes.get(callee)
        if target is None or not target.alive:
            self._refuse(call)
            return result
        self._open[call] = None
        if target.stopped:
            self.clock.after(SILENCE_S, None, self._check_stopped, call)
        self._send(call, caller.name, callee, None, self._arrive, (call, question))
        return result

    def _send(
        self,
        call: _Call,
        source: PeerId,
        destination: PeerId,
        process: Process | None,
        arrive: Callable[[Any], None],
        message: Any,
    ) -> None:
        lines, dice = self.lines, self.dice
        if self.is_cut(source, destination):
            self._silence(call, SILENCE_S)
            return
        roll = dice.number()
        if roll < lines.lost:
            if self.trace is not None:
                self.trace(f"lost: {call.method} between {source} and {destination}")
            self._silence(call, dice.between(ALIVE_EVERY_S, SILENCE_S))
            return
        roll -= lines.lost
        if roll < lines.late:
            delay_s = dice.between(lines.most_s, lines.late_s)
        else:
            # What follows the first digits of a number is as good as another number.
            delay_s = lines.least_s + (lines.most_s - lines.least_s) * (1000.0 * roll % 1.0)
            if roll < lines.late + lines.doubled:
                self.clock.after(delay_s + dice.between(0.0, lines.late_s), process, arrive, message)
        self.clock.after(delay_s, process, arrive, message)

    def _arrive(self, message: tuple[_Call, Any]) -> None:
        call, question = message
        callee = self.nodes[call.callee]
        if not callee.alive:
            return
        if callee.stopped:
            callee.backlog.append((self._arrive, message))
            return
        call.taken_by = callee
        try:
            answer = callee.handlers[call.method](call.caller.name, question)
        except SwarmError as error:
            self._answer(call, callee, error)
            return
        if type(answer) is CoroutineType or isinstance(answer, Future):
            callee.spawn(self._finish(call, callee, answer))
        else:
            self._answer(call, callee, answer)

    async def _finish(self, call: _Call, callee: Node, answer: Awaitable[Any]) -> None:
        try:
            found = await answer
        except SwarmError as error:
            found = error
        self._answer(call, callee, found)

    def _answer(self, call: _Call, callee: Node, answer: Any) -> None:
        if call in self._open:
            self._send(call, callee.name, call.caller.name, call.caller, self._back, (call, answer))

    def _back(self, message: tuple[_Call, Any]) -> None:
        call, answer = message
        self._open.pop(call, None)
        if isinstance(answer, SwarmError):
            call.result.fail(answer)
        else:
            call.result.resolve(answer)

    # -- how calls fail ---------------------------------------------------------------------------

    def _silence(self, call: _Call, seconds: float) -> None:
        self.clock.after(seconds, call.caller, self._silent, call)

    def _silent(self, call: _Call) -> None:
        self._open.pop(call, None)
        call.result.fail(PeerSilent(call.callee, "no sign of life"))

    def _too_late(self, call: _Call) -> None:
        if not call.result.done:
            self._open.pop(call, None)
            call.result.fail(PeerSilent(call.callee, f"no answer to {call.method} in time"))

    def _refuse(self, call: _Call) -> None:
        self.clock.after(self.dice.between(0.001, 0.1), call.caller, self._gone, call)

    def _gone(self, call: _Call) -> None:
        self._open.pop(call, None)
        call.result.fail(PeerGone(call.callee, "the connection broke"))

    def _check_stopped(self, call: _Call) -> None:
        if call in self._open and self.nodes[call.callee].stopped:
            self.clock.soon(call.caller, self._silent, call)

    # -- faults -----------------------------------------------------------------------------------

    def kill(self, name: PeerId, *, quietly: bool) -> None:
        """End a node: its connections break, or, with a machine that lost its power, nobody is told."""
        node = self.nodes[name]
        node.kill()
        for call in list(self._open):
            if call.callee == name:
                if quietly:
                    self._silence(call, SILENCE_S)
                else:
                    self._refuse(call)
            elif call.caller is node:
                del self._open[call]
        if not quietly:
            for other in self.nodes.values():
                if other.alive and other.on_gone is not None and not self.is_cut(name, other.name):
                    self.clock.after(self.dice.between(0.001, 0.1), other, other.on_gone, name)

    def stop(self, name: PeerId) -> None:
        """As SIGSTOP: what is asked of it falls silent."""
        self.nodes[name].stop()
        for call in self._open:
            if call.callee == name:
                self.clock.after(SILENCE_S, None, self._check_stopped, call)

    def cut(self, side: Iterable[PeerId]) -> None:
        """Nothing crosses between `side` and the rest until `heal`."""
        self._cut = frozenset(side)
        self.clock.after(SILENCE_S, None, self._check_cut, None)

    def heal(self) -> None:
        self._cut = frozenset()

    def is_cut(self, a: PeerId, b: PeerId) -> bool:
        return bool(self._cut) and (a in self._cut) != (b in self._cut)

    def _check_cut(self, _: None) -> None:
        for call in self._open:
            if self.is_cut(call.caller.name, call.callee):
                self.clock.soon(call.caller, self._silent, call)
