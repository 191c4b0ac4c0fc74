"""The open steps of a stage peer: what it has, what is in progress, what it keeps until a step is taken."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from peers.clock import now_s
from swarm.digest import Digest
from swarm.ids import PeerId, Stage
from swarm.protocol.ledger import Ledger, everything, union_of
from swarm.protocol.rounds import Commit, Plan
from swarm.protocol.step import ReplicaStep
from swarm.protocol.worklist import LOST_AFTER_S
from swarm.wire.codec import Encoded
from swarm.wire.messages import LedgerCounts, Work, WorkDone

HOLD_S = LOST_AFTER_S
"""What was taken out, since another replica has it, is not added again for so long: else a peer that feeds it
to all of them, again and again, has the step never end. Twice as long each time that it came back sooner than
what a stage lacks."""


@dataclass(slots=True)
class KeptMicrobatch:
    """A microbatch's boundary tensors, encoded, in host memory until the step is taken.

    They answer a repeated request, and retract a duplicate (run that backward again and subtract).
    """

    inputs: list[Encoded]
    grads_out: Sequence[Encoded]
    """What the next stage answered; nothing at the last stage."""
    answer: WorkDone
    grads_in: Sequence[Encoded]
    """What this stage answered; nothing at stage 0."""
    outputs: Sequence[Encoded] = ()
    """What was sent on, for audits; nothing at the last stage, and where answers are not audited."""
    asked: tuple[PeerId, Work] | None = None
    """The sender of the inputs, and what it signed, to be asked for later; None: answers are not audited."""
    since_s: float = field(default_factory=now_s)
    """When it was computed, or passed on last."""

    @property
    def inputs_digest(self) -> Digest:
        """As its receipt has it; empty: there is none."""
        receipt = next((hop.receipt for hop in self.answer.hops), None)
        return b"" if receipt is None else receipt.inputs

    @property
    def by(self) -> set[PeerId]:
        """Those that the inputs came through, and that computed a gradient of them at this stage or later."""
        caller, work = self.asked or ("", None)
        through = work.through if work is not None else ()
        return {caller, *(link.peer for link in through), *(hop.peer for hop in self.answer.hops)}


@dataclass(slots=True)
class Job:
    """A microbatch that is being computed; more than one caller may wait for it."""

    done: asyncio.Future[KeptMicrobatch]
    has_body: bool = False
    """What it is computed from has come."""


class OpenStep(ReplicaStep):
    """Step `t` at one peer, with its tensors and tasks."""

    def __init__(self, t: int, ledger: Ledger) -> None:
        super().__init__(t, ledger)
        self.opened_s = now_s()
        self.held_s = dict[PeerId, float]()
        """How long its rounds have waited for those for which that was too long."""
        self.jobs: dict[int, Job] = {}
        self.kept: dict[int, KeptMicrobatch] = {}
        """Where answers are audited it goes with the next step that is taken, else with this one."""
        self.given: dict[int, KeptMicrobatch] = {}
        """What its sum held when it last told its products: it is audited by that, whatever came since."""
        self.sent_on: dict[tuple[int, Digest], KeptMicrobatch] = {}
        """Where answers are audited, by what went in: that of those that were sent on, answered or not; of
        those that were answered and do not count, all. The latest two for each microbatch of the step."""
        self._noting = threading.Lock()  # and not the books, which are held as long as a gradient is added
        self.false = 0
        """Bitmap: of liars, to be taken out once the sum, which is frozen, is open again."""
        self._taken_out, self._hold_s, self._held_until_s = 0, HOLD_S, float("-inf")
        self._came_too_soon = False
        self.reduced: torch.Tensor | None = None
        """The stage's summed gradient with each microbatch in it once, flat."""
        self.reduced_there = asyncio.Event()
        self.shared: dict[Stage, torch.Tensor] = {}
        """By stage: what others found of the weights that they hold as well. At a meeting by island what it
        has changed, and behind the last island by part what all have."""
        self.doubted = False
        """A liar was convicted since: other stages may find something else of those weights by now."""
        self.getting: dict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        """The holder of one gets what that island has changed, at a meeting."""
        self.added_up = asyncio.Event()
        """At a meeting: the sum of the part that is this island's is there."""
        self.whole: torch.Tensor | None = None
        """`reduced` with those: what the step is taken with."""
        self.commit: Commit | None = None
        """The commit that the step was taken with."""
        self.counts: LedgerCounts | None = None
        self.work: dict[str, asyncio.Task[Any]] = {}
        """Running tasks of this step by kind: reduce, fetch, thaw, retract, meeting."""
        self.ending: set[asyncio.Task[Any]] = set()
        """Tasks that were told to stop and may not have noticed yet."""

    def may_add(self, m: int, *, now: float) -> bool:
        """Whether the weight gradient of `m` may be added to the sum now."""
        is_held = self._taken_out >> m & 1 and now < self._held_until_s
        self._came_too_soon |= bool(is_held)
        return self.ledger.may_add(m) and not is_held

    def takes_out(self, microbatches: int, *, now: float) -> None:
        """Note that these are subtracted, since another replica counts them."""
        if self._came_too_soon and microbatches & self._taken_out:
            self._came_too_soon, self._hold_s = False, 2 * self._hold_s
        self._taken_out |= microbatches
        self._held_until_s = now + self._hold_s if microbatches else self._held_until_s

    def send_on(self, m: int, inputs: Digest, kept: KeptMicrobatch) -> None:
        """Keep what goes into a microbatch that is sent on. On any thread."""
        with self._noting:
            self.sent_on.pop((m, inputs), None)
            if len(self.sent_on) >= 2 * self.ledger.microbatches:
                del self.sent_on[next(iter(self.sent_on))]
            self.sent_on[m, inputs] = kept

    def put_by(self, kept: KeptMicrobatch) -> None:
        """Keep what was answered and does not count, or no more: it is audited as what does."""
        if kept.asked is not None:
            self.send_on(kept.asked[1].m, kept.inputs_digest, kept)

    def shown(self, m: int, inputs: Digest) -> KeptMicrobatch | None:
        """What this peer shows: what it gave, or what counts; or anything that was made of these `inputs`."""
        kept = self.kept.get(m)
        if not inputs:
            return self.given.get(m, kept)
        return kept if kept and kept.inputs_digest == inputs else self.sent_on.get((m, inputs))

    def give_all(self, name: str) -> None:
        super().give_all(name)
        if name:
            self.given = {m: kept for m, kept in self.kept.items() if kept.asked is not None}

    def answers_for(self, before: OpenStep) -> None:
        """Take over what the same step, which is begun again, gave and answered: others may ask for that."""
        self.given, self.sent_on = before.given, before.sent_on
        for kept in before.kept.values():
            self.put_by(kept)

    def work_of(self, peer: PeerId) -> int:
        """What is in the sum of a peer's work. In a job that holds the books."""
        return sum(1 << m for m, kept in self.kept.items() if peer in kept.by)

    def loss_of(self, m: int) -> float:
        """Last stage: the loss of a microbatch in the sum. Its sum may be lost at any moment: then 0."""
        kept = self.kept.get(m)
        return 0.0 if kept is None else kept.answer.loss

    def drop(self) -> None:
        """The sum is lost: its ledger goes with it. In a job that holds the books."""
        self.ledger.clear()
        self.answers_for(self)
        self.kept.clear()

    def keep_result(self, commit: Commit) -> None:
        """Keep of the step, which was taken, only what replicas ask for that missed it, or audit answers."""
        self.commit, self.whole = commit, None
        self.kept = {m: kept for m, kept in self.kept.items() if kept.asked is not None}

    def stop(self, kind: str) -> None:
        """End the task of that kind, if there is one, within a few turns of the loop."""
        task = self.work.pop(kind, None)
        if task is not None and not task.done():
            task.cancel()
            self.ending.add(task)
            task.add_done_callback(self.ending.discard)

    async def stopped(self) -> None:
        """Return when all that was stopped has ended. Until then a reduce may still give out the sum."""
        while self.ending:
            await asyncio.wait(self.ending)

    def close(self, *, taken: bool = False) -> None:
        """The step was taken or given up: nothing of it may change a sum any more."""
        if taken:
            self.take()
        self.abort()
        for kind in list(self.work):
            self.stop(kind)


def count_ledgers(plan: Plan, microbatches: int) -> LedgerCounts:
    """Count, from the ledgers of a round, what is missing and what is in twice."""
    union, total = union_of(plan.ledgers), sum(ledger.bit_count() for ledger in plan.ledgers)
    missing = (everything(microbatches) & ~union).bit_count()
    return LedgerCounts(steps=1, missing=missing, duplicated=total - union.bit_count())
