"""The open steps of a stage peer: what it has, what it is doing, what it keeps until the step is taken."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from swarm.ids import Stage
from swarm.policy.ledger import Ledger, everything
from swarm.policy.rounds import Held, Plan
from swarm.wire.codec import Encoded
from swarm.wire.messages import Audit, WorkDone


@dataclass(slots=True)
class Kept:
    """A microbatch's boundary tensors, encoded, in host memory until the step is taken.

    They answer a repeated request, and undo a duplicate (run that backward again and subtract).
    """

    inputs: list[Encoded]
    grads_out: Sequence[Encoded]
    """What the next stage answered; nothing at the last stage."""
    answer: WorkDone
    grads_in: Sequence[Encoded]
    """What this stage answered; nothing at stage 0."""


@dataclass(slots=True)
class Job:
    """A microbatch that is being computed; more than one caller may wait for it."""

    done: asyncio.Future[Kept]


@dataclass(slots=True)
class OpenStep:
    """Step `t` at one peer, from its first microbatch to its `go`."""

    t: int
    ledger: Ledger
    jobs: dict[int, Job] = field(default_factory=dict)
    kept: dict[int, Kept] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    """Last stage: of microbatches that were handed over, which have nothing kept."""
    handing: bool = False
    """This member leaves, and its sum is on its way to a mate: it counts nowhere until it is there."""
    reduced: torch.Tensor | None = None
    """The stage's summed gradient with each microbatch in it once, flat."""
    reduced_there: asyncio.Event = field(default_factory=asyncio.Event)
    shared: dict[Stage, torch.Tensor] = field(default_factory=dict)
    """Of weights that other stages hold as well: what those found."""
    whole: torch.Tensor | None = None
    """`reduced` with those: what the step is taken with."""
    completing: bool = False
    """The stage's sum is here, and other stages' parts of it are on their way."""
    held: Held | None = None
    """What is said of it, once all is here that taking the step needs."""
    audited: Audit | None = None
    reducing: str = ""
    """The round that this member works on."""
    reduce_began_s: float = 0.0
    adopt_told_s: float = 0.0
    """When this member was first told that a mate holds the result of that round; 0: not yet."""
    failed_round: str = ""
    """The last round that failed here."""
    work: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    """Running tasks of this step by kind: reduce, fetch, undo."""
    ending: set[asyncio.Task[Any]] = field(default_factory=set)
    """Tasks that were told to stop and may not have noticed yet."""
    over: bool = False

    def loss_of(self, m: int) -> float:
        """Last stage: the loss of a microbatch in the sum. Its sum may be lost at any moment: then 0."""
        kept = self.kept.get(m)
        return self.losses.get(m, 0.0) if kept is None else kept.answer.loss

    def drop(self) -> None:
        """The sum is lost or given away: its ledger goes with it. On the device thread."""
        self.ledger.clear()
        self.kept.clear()
        self.losses.clear()

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

    def close(self) -> None:
        """The step was taken or given up: nothing of it may change a sum any more."""
        self.over = True
        for kind in list(self.work):
            self.stop(kind)


def audit(plan: Plan, microbatches: int, undone: int) -> Audit:
    """Count, from the ledgers of a round, what is missing and what is in twice."""
    union, total = 0, 0
    for ledger in plan.ledgers:
        union |= ledger
        total += ledger.bit_count()
    missing = (everything(microbatches) & ~union).bit_count()
    return Audit(steps=1, missing=missing, duplicated=total - union.bit_count(), undone=undone)
