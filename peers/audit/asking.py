"""A peer has some of the answers that it got computed again, by another replica of the stage that gave them.

Trainers those of stage 0, stage peers those of the stage behind them (and more: `peers.audit.neighbours`).
The coin falls when the receipt is here: nothing in the work tells an audit.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from peers.ports import Buffer, Directory, Transport
from peers.voices import Voices
from peers.waiting import TaskKeeper
from swarm.audit.unusual import LEAST_LOSS, Honest, Unusual
from swarm.errors import BadAnswer, Busy, PeerFault, SwarmError
from swarm.ids import Microbatch, PeerId, Stage
from swarm.manifest import Run
from swarm.protocol.statements import Coin, Signature, Toss
from swarm.wire.evidence import AuditAnswer, Audited
from swarm.wire.messages import WorkDone, pack, unpack_answer
from swarm.wire.receipts import Answered, Link

if TYPE_CHECKING:  # a trainer needs no torch
    from swarm.wire.codec import Encoded

SHARE = 0.015
"""Of the answers that are computed again: a liar is found in its 67th microbatch, on average."""
AUDIT_S = 20.0
"""Limit for one audit; its step may be over much sooner."""
AT_ONCE = 4
JUDGES = 2
"""A peer is left alone when so many say that its answer is wrong: one of them may lie."""
MAX_ASKED, BUSY_S = 8, 0.1
"""One that audits as much as it can is asked again after the others: strange answers come many at a time."""


class AuditCaller:
    """Args: on_fault: told of a peer of a stage that is to be left alone for a while, as its answer did not
    fit; or what it sent on, as two judges say. And whether two do.
    """

    def __init__(
        self, run: Run, transport: Transport, directory: Directory,
        on_fault: Callable[[Stage, PeerFault, bool], None],
    ) -> None:  # fmt: skip
        self._run, self._transport, self._directory = run, transport, directory
        self._voices = Voices(run, transport.signer, directory)
        self._on_fault = on_fault
        self._tasks = TaskKeeper()
        self._losses = Unusual(LEAST_LOSS, relative=True)

    def answered(self, stage: Stage, mb: Microbatch, done: WorkDone) -> None:
        """Note an answer, whose receipt was checked."""
        strange = self._losses.strange(done.loss)
        if not done.hops:
            return
        if self._falls(SHARE, Toss("audit", stage, mb.t, f"{mb.m} {done.hops[0].peer}")) or strange:
            self._ask_again(stage, mb, done, strange)

    def _falls(self, share: float, toss: Toss) -> bool:
        return Coin(self._transport.signer, self._run.id, toss).falls(share)

    def _ask_again(self, stage: Stage, mb: Microbatch, done: WorkDone, honest: Honest | None) -> None:
        if done.hops and (receipt := done.hops[0].receipt) is not None:
            self._ask(done.hops[0].peer, receipt.statement(stage, mb, done.loss), receipt.signature, honest)

    def _ask(
        self, accused: PeerId, said: Answered, signature: Signature, honest: Honest | None,
        sent: Sequence[Encoded] = (), through: tuple[Link, ...] = (),
    ) -> None:  # fmt: skip
        """Have an answer computed again, or what was `sent` on, by its receipt."""
        stage = said.stage
        if len(self._tasks) >= AT_ONCE:
            return
        voice = self._voices.of(stage)
        there = (r.peer for r in self._directory.at(stage) if r.state == "serving")
        others = sorted(peer for peer in there if peer != accused and (peer in voice or not voice))
        if not others:
            return
        coin = Coin(self._transport.signer, self._run.id, Toss("judge", stage, said.t, str(said.m)))
        metas = tuple(one.meta for one in sent)
        ask = AuditAnswer(
            run=self._run.id, peer=accused, statement=said, signature=signature, sent=metas, through=through
        )
        first = coin.below(len(others))
        self._tasks.create_task(self._audit([*others[first:], *others[:first]], ask, honest, sent))

    async def _audit(
        self, judges: Sequence[PeerId], ask: AuditAnswer, honest: Honest | None, sent: Sequence[Encoded]
    ) -> None:
        against, wanted, left = 0, min(JUDGES, len(judges)), deque(judges)
        for _ in range(MAX_ASKED):
            judge = left.popleft()
            try:
                found = await self._judged(judge, ask, [])
                if found.asks and sent:
                    found = await self._judged(judge, ask, [buffer for one in sent for buffer in one.buffers])
                if found.fits:
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
                if wanted == JUDGES or not sent:
                    what = "what it sent on" if sent else "its answer"
                    fault = BadAnswer(ask.peer, f"{what} was computed again, and is another")
                    self._on_fault(ask.statement.stage, fault, wanted == JUDGES)
                return

    async def _judged(self, judge: PeerId, ask: AuditAnswer, body: Sequence[Buffer]) -> Audited:
        answer = await self._transport.call(judge, "audit", pack(ask), body, deadline_s=AUDIT_S)
        return unpack_answer(judge, answer.header, Audited)

    async def close(self) -> None:
        await self._tasks.close()
