"""A caller has some of the answers that it got computed again, by another replica of the stage.

The coin falls when the answer, and the receipt for it, are here: nothing in the work tells an audit. Trainers
do it for stage 0, and stage peers for the stage behind them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from peers.ports import Directory, Transport
from peers.voices import Voices
from peers.waiting import TaskKeeper
from swarm.audit.unusual import AnswerScreen, Honest
from swarm.errors import BadAnswer, Busy, PeerFault, SwarmError
from swarm.ids import Microbatch, PeerId, Stage
from swarm.manifest import Run
from swarm.protocol.statements import Coin, Toss
from swarm.wire.evidence import AuditAnswer, Audited
from swarm.wire.messages import WorkDone, pack, unpack_answer

SHARE = 0.015
"""Of the answers that are computed again: a liar is found in its 67th microbatch, on average."""
AUDIT_S = 20.0
"""Limit for one audit; its step may be over much sooner."""
AT_ONCE = 4
JUDGES = 2
"""A peer is left alone when so many say that its answer is wrong: one of them may lie."""
MAX_ASKED, BUSY_S = 8, 0.1
"""Who audits as much as it can is asked again after the others: strange answers come many at a time."""


class AuditCaller:
    """Args: on_fault: told of a peer whose answer did not fit, which is to be left alone for a while."""

    def __init__(
        self, run: Run, transport: Transport, directory: Directory, on_fault: Callable[[PeerFault], None]
    ) -> None:
        self._run, self._transport, self._directory = run, transport, directory
        self._voices = Voices(run, transport.signer, directory)
        self._on_fault = on_fault
        self._tasks = TaskKeeper()
        self._screen = AnswerScreen()

    def answered(self, stage: Stage, mb: Microbatch, done: WorkDone) -> None:
        """Note an answer, whose receipt was checked."""
        strange = self._screen.strange_loss(done.loss)
        if not done.hops:
            return
        toss = Toss("audit", stage, mb.t, f"{mb.m} {done.hops[0].peer}")
        coin = Coin(self._transport.signer, self._run.id, toss)
        if coin.falls(SHARE) or strange:
            self._ask(stage, mb, done, strange)

    def decoded(
        self, stage: Stage, mb: Microbatch, done: WorkDone, length: float, turned: Honest | None
    ) -> None:
        """Note the norm of the gradient in an answer; `turned`: what follows is unlike the others'."""
        strange = self._screen.strange_length(length)
        if turned or strange:
            self._ask(stage, mb, done, turned or strange)

    def _ask(self, stage: Stage, mb: Microbatch, done: WorkDone, honest: Honest | None) -> None:
        """Have an answer computed again."""
        hop = done.hops[0] if done.hops else None
        if hop is None or hop.receipt is None or len(self._tasks) >= AT_ONCE:
            return
        voice = self._voices.of(stage)
        there = (r.peer for r in self._directory.at(stage) if r.state == "serving")
        others = sorted(peer for peer in there if peer != hop.peer and (peer in voice or not voice))
        if not others:
            return
        coin = Coin(self._transport.signer, self._run.id, Toss("judge", stage, mb.t, str(mb.m)))
        said, signature = hop.receipt.statement(stage, mb, done.loss), hop.receipt.signature
        ask = AuditAnswer(run=self._run.id, peer=hop.peer, statement=said, signature=signature)
        first = coin.below(len(others))
        judges = [*others[first:], *others[:first]]
        self._tasks.create_task(self._audit(judges, ask, honest))

    async def _audit(self, judges: Sequence[PeerId], ask: AuditAnswer, honest: Honest | None) -> None:
        against, wanted, left = 0, min(JUDGES, len(judges)), deque(judges)
        for _ in range(MAX_ASKED):
            judge = left.popleft()
            try:
                answer = await self._transport.call(judge, "audit", pack(ask), deadline_s=AUDIT_S)
                if unpack_answer(judge, answer.header, Audited).fits:
                    if honest:
                        honest()
                    return
            except Busy:
                left.append(judge)
                await asyncio.sleep(BUSY_S)
                continue
            except SwarmError:
                return  # the step is over
            against += 1
            if against == wanted:
                self._on_fault(BadAnswer(ask.peer, "its answer was computed again, and is another"))
                return

    async def close(self) -> None:
        """Ask nothing more."""
        await self._tasks.close()
