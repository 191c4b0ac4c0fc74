"""Moving to a stage that needs this device more, by a rule that all peers apply to the same records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from peers import events
from peers.clock import unix_s
from peers.ports import Directory
from peers.stage.state import StageCore
from peers.transfer.spare import judged, words_of
from peers.waiting import happens
from swarm.ids import PeerId, Stage
from swarm.policy.rebalance import is_due, rebalance
from swarm.policy.spares import SpareDecision
from swarm.records import PeerRecord

BOUNDARY_S = 10.0
"""A peer that moves goes without a step boundary after this: perhaps the run waits for its coming."""
STAY_WITH_VOICE = 3
"""Replicas that one with voice leaves behind. Each says itself how fast it is: one that lies could have the
others go until it is alone, or one of two, and add what it likes."""


class Moving:
    """Decides with all others which peers move, and sends this one off if it is among them.

    Args:
        movable: whether this one may be; if not, it only says what was decided.
        go: ends this peer's service, so that its device can serve the other stage.
        stand_by: ends it until a step takes no longer with this peer, or no other serves.
        record: this peer as it is now.
    """

    def __init__(
        self, core: StageCore, directory: Directory, *, movable: bool, go: Callable[[Stage], None],
        stand_by: Callable[[SpareDecision], None], record: Callable[[], PeerRecord],
    ) -> None:  # fmt: skip
        self._core, self._directory = core, directory
        self._movable, self._go, self._stand_by, self._record = movable, go, stand_by, record
        self.going = False
        """It is about to move: no replica may rely on its staying."""
        self.decided = ""
        """The last decision on which peers move, and why."""

    async def run(self) -> None:
        """Decide in the middle of every period, until this peer leaves."""
        core, run = self._core, self._core.run
        period_s = run.rebalance_every_s
        while not core.leaving:
            now = unix_s()
            middle_s = (now // period_s + 0.5) * period_s
            await asyncio.sleep(middle_s - now + (period_s if middle_s <= now else 0))
            await self._directory.refresh()
            lag_s = self._directory.lag_s
            if not is_due(period_s=period_s, lag_s=lag_s, now_s=unix_s()):
                self.decided = f"not in this period: what others do is seen here after {lag_s:.0f} s"
                continue
            records = list(self._directory.peers())
            decision = await asyncio.to_thread(  # it takes a while in a large run
                rebalance, records, stages=run.cells, period_s=period_s, now_s=unix_s(), place=run.place
            )
            self.decided = decision.why
            move = next((move for move in decision.moves if move.peer == core.me), None)
            if move is not None and self._movable:
                await self.move(move.to_stage, why=move.why, going={other.peer for other in decision.moves})
            else:
                await self.stand_by_if_slow()

    async def stand_by_if_slow(self) -> bool:
        """End this peer's service if a step is so much longer with it, and another keeps the stage (I6)."""
        if self._core.run.cells > self._core.run.S:
            return False  # the prediction knows no islands
        verdict = await judged(self._core.run, self._directory, self._record())
        if verdict is None or not verdict.spare:
            return False
        voice = self._core.voice()
        if voice and voice.keys().isdisjoint(verdict.stay):
            return False  # what those say of their speed was not seen by others
        self.going = True  # as in `move`
        going = {r.peer for r in self._core.replicas()}.difference(verdict.stay)
        if await self._may_go(going=going):
            self._stand_by(verdict)
            return True
        self.going = False
        self.decided = f"{words_of(verdict)}; it serves: too few replicas of stage {self._core.stage} answer"
        return False

    async def _may_go(self, *, going: Collection[PeerId], rescues: bool = False) -> bool:
        core = self._core
        least = STAY_WITH_VOICE if core.me in core.voice() and not rescues else 1
        return await core.keep_stage(going=going, least=least)

    async def move(self, to_stage: Stage, *, why: str, going: Collection[PeerId]) -> None:
        """Leave for another stage after the next step: until then this peer's sum is part of its stage's.

        It stays if no replica keeps this stage (I6), now or after that step. `going`: others that leave it.
        """
        core = self._core
        self.going = True  # said before asking: of two that ask each other at once neither goes
        rescues = not any(record.state == "serving" for record in self._directory.at(to_stage))
        moves = await self._may_go(going=going, rescues=rescues)
        if moves:
            core.emit(events.Moved(stage=core.stage, to_stage=to_stage, why=why))
            core.stepped.clear()
            await happens(core.stepped, BOUNDARY_S)
            moves = await self._may_go(going=going, rescues=rescues)  # some may have died meanwhile
        if moves:
            self._go(to_stage)
        else:
            self.going = False
            self.decided = (
                f"{why}; it stays: too few replicas of {core.run.place(core.run.cell(core.stage))} answer"
            )
