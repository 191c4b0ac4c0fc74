"""What a trainer does next. Pure: times are monotonic seconds given by the caller.

Trainers need no coordinator: each walks the microbatches of a step in its own pseudo-random order and skips
those that are done or in progress. One that was done and is lacking is run again, but only after it has been
lacking for a while: reports lag behind the work. If all stages were reported to have it, it is lacking
because a peer died with it, and that report is not stale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from swarm.ids import Microbatch, Stage
from swarm.protocol.ledger import everything, forget_before, members_of, union_of

REPLAY_AFTER_S = 0.4
"""How long a finished microbatch must be reported lacking before it is run again: several reports."""
LOST_AFTER_S = 0.2
"""The same for one that all stages had: a new coordinator hears of the others' ledgers a message later."""


class WorkItem(msgspec.Struct, frozen=True):
    """Run `microbatch`; `deepest` is the last stage that lacks it if some stages already have it, else -1."""

    microbatch: Microbatch
    deepest: Stage
    replay: bool


class _Step(msgspec.Struct):
    order: Sequence[int]
    cursor: int = 0
    done: int = 0
    running: int = 0
    taken: int = 0
    """Microbatches seen claimed at stage 0."""
    lacking: list[int] = []
    """Per stage, microbatches that no replica has or computes."""
    had: int = 0
    """Microbatches once reported as claimed at all stages, since they were last run here."""
    due_s: dict[int, float] = {}
    """Lacking microbatches: when each may be run again."""


class WorkList:
    """The microbatches that this trainer may start, step by step.

    Args:
        order: `t` -> this trainer's permutation of the step's microbatches, 0 … M-1.
    """

    def __init__(self, order: Callable[[int], Sequence[int]]) -> None:
        self._order = order
        self._steps: dict[int, _Step] = {}
        self._oldest = 0
        self.replayed = 0

    def stepped(self, version: int) -> None:
        """Note that the run's weights are at `version`: steps before it are over."""
        self._oldest = max(self._oldest, version)
        forget_before(self._oldest, self._steps)

    def went_back(self, version: int) -> None:
        """Note that the run goes on from `version`, which it had passed: what came since is done again."""
        self._oldest = version
        self._steps.clear()

    def lacking(self, t: int, by_stage: Sequence[int], *, now: float) -> None:
        """Note what step `t` lacks: per stage, the microbatches that no replica has or computes."""
        if t < self._oldest:
            return
        step = self._step(t)
        step.lacking = list(by_stage)
        anywhere, whole = union_of(by_stage), everything(len(step.order))
        step.taken = whole & ~by_stage[0] if by_stage else 0
        for m in [m for m in step.due_s if not anywhere >> m & 1]:
            del step.due_s[m]
        for m in members_of(anywhere):
            step.due_s.setdefault(m, now + (LOST_AFTER_S if step.had >> m & 1 else REPLAY_AFTER_S))
        step.had |= whole & ~anywhere

    def next(self, newest: int, *, now: float) -> WorkItem | None:
        """The next microbatch to start, from the oldest step up to `newest`; None: nothing to do now."""
        for t in range(self._oldest, newest + 1):
            work = self._fresh(t) or self._again(t, now)
            if work is not None:
                self._step(t).running |= 1 << work.microbatch.m
                self.replayed += work.replay
                return work
        return None

    def finished(self, microbatch: Microbatch) -> None:
        """Note that a microbatch was answered. Reports that it is lacking count from now."""
        step = self._steps.get(microbatch.t)
        if step is not None:
            step.running &= ~(1 << microbatch.m)
            step.done |= 1 << microbatch.m
            step.had &= ~(1 << microbatch.m)
            step.due_s.pop(microbatch.m, None)

    def failed(self, microbatch: Microbatch) -> None:
        """Note that a microbatch was not answered: it is to be started again."""
        step = self._steps.get(microbatch.t)
        if step is not None:
            step.running &= ~(1 << microbatch.m)
            step.cursor = 0

    def unstarted(self, t: int) -> int:
        """How many microbatches of step `t` no trainer has started, as far as is known here."""
        step = self._step(t)
        return len(step.order) - (step.done | step.running | step.taken).bit_count()

    def ran(self, t: int) -> int:
        """How many microbatches of step `t` this trainer got an answer for."""
        step = self._steps.get(t)
        return 0 if step is None else step.done.bit_count()

    def next_wakeup(self, newest: int, *, now: float) -> float | None:
        """When a lacking microbatch of a step up to `newest` becomes due; None: no timer needed."""
        steps = [step for t, step in self._steps.items() if t <= newest]
        due = [due_s for step in steps for m, due_s in step.due_s.items() if not step.running >> m & 1]
        return max(now, min(due)) if due else None

    def _fresh(self, t: int) -> WorkItem | None:
        step = self._step(t)
        skip = step.done | step.running | step.taken
        while step.cursor < len(step.order):
            m = step.order[step.cursor]
            if not skip >> m & 1:
                return WorkItem(Microbatch(t, m), -1, replay=False)
            step.cursor += 1
        return None

    def _again(self, t: int, now: float) -> WorkItem | None:
        """A microbatch that was done or claimed, and has been lacking at some stage for long enough."""
        step = self._step(t)
        for m in step.order if step.due_s else ():  # not all trainers begin with the same
            if m in step.due_s and now >= step.due_s[m] and not step.running >> m & 1:
                deepest = max(s for s, bitmap in enumerate(step.lacking) if bitmap >> m & 1)
                step.due_s[m] = now + REPLAY_AFTER_S
                step.had &= ~(1 << m)
                had = any(not bitmap >> m & 1 for bitmap in step.lacking) or bool(step.done >> m & 1)
                return WorkItem(Microbatch(t, m), deepest if had else -1, replay=had)
        return None

    def _step(self, t: int) -> _Step:
        if t not in self._steps:
            self._steps[t] = _Step(order=self._order(t))
        return self._steps[t]
