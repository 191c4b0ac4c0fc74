"""One swarm of the classes that ship, one schedule of faults, from one seed: does it end as it must?"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from unittest.mock import patch

from peers import fault_points
from peers.audit.verdicts import Verdicts
from peers.sim import faults
from peers.sim.faults import Fault
from peers.sim.setting import Setting, dice_of, setting_of
from peers.sim.swarm import Swarm
from peers.stage import all_reduce
from peers.storage import checkpoint
from peers.transfer import leases
from swarm.manifest import tables

MAX_FAULTS = 8
END_WITHIN_S = 240.0
"""After the last fault. A ban lasts up to 30 s, a lost stage is looked for after 6 s, a record lives 20 s,
and a newer checkpoint is waited for for 60 s."""
EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class Outcome:
    seed: int
    violation: str
    """Empty: every invariant held, and the run came to its end."""
    faults: Counter[str]
    looked: Counter[str]
    callbacks: int
    calls: int
    ended_s: float
    """Virtual time."""
    undone: int
    replayed: int
    generations: int
    digest: str
    """Of the timeline: two runs of a seed that differ have another."""


@dataclass
class World:
    """Everything that a seed says. `schedule`, `setting`: other faults, and another swarm, than it says."""

    seed: int
    trace: Callable[[str], None] | None = None
    schedule: Sequence[Fault] | None = None
    setting: Setting | None = None
    end_within_s: float = END_WITHIN_S

    def __post_init__(self) -> None:
        self.swarm = Swarm(self.setting or setting_of(self.seed), self.trace)
        setting = self.swarm.setting
        within_s = setting.faults_within_s
        if self.schedule is None:
            dice = dice_of(self.seed, "faults")
            self.schedule = faults.schedule(dice, setting.has, most=MAX_FAULTS, within_s=within_s)
        self.calm_s = max([within_s, *(fault.at_s + fault.lasts_s for fault in self.schedule)])
        self.over = False

    def play(self) -> Outcome:
        swarm, loop = self.swarm, self.swarm.loop
        with ExitStack() as stack:
            stack.enter_context(patch.object(fault_points, "on_point", swarm.pass_point))
            stack.enter_context(patch.object(Verdicts, "leave_out", swarm.convicts))
            # A peer that pauses collects garbage of the device. Here that would be most of the time.
            stack.enter_context(swarm.disks.in_use())
            if swarm.setting.crowd:
                stack.enter_context(patch.object(all_reduce, "SMALL_CHUNK_ELEMENTS", 1))
                stack.enter_context(patch.object(leases, "CHUNK_BYTES", 8))
            if swarm.setting.parts:
                stack.enter_context(patch.object(tables, "SUMMED_FROM", 2))
            stack.enter_context(patch.object(gc, "collect", lambda: 0))
            stack.enter_context(loop.running())
            self._begin()
            ended = loop.run(lambda: self.over, limit_s=self.calm_s + self.end_within_s)
            if loop.bugs:
                swarm.violation = swarm.violation or f"bug: {loop.bugs[0]}"
            if not ended and not swarm.violation:
                swarm.violation = self._stands_still()
            elif not swarm.violation:
                self._check_the_end()
            if swarm.violation:
                swarm.say(swarm.violation)
            return self._outcome()

    def _begin(self) -> None:
        swarm, setting, call_later = self.swarm, self.swarm.setting, self.swarm.loop.call_later
        for stage, count in enumerate(setting.first_peers):
            for _ in range(count):
                swarm.add_peer(stage)
        for _ in range(setting.first_trainers):
            swarm.add_trainer()
        if setting.keeper:
            swarm.add_keeper()
        assert self.schedule is not None
        for fault in self.schedule:
            call_later(fault.at_s, faults.inject, swarm, fault)
        call_later(self.calm_s, faults.calm, swarm)
        call_later(self.calm_s + 15.0, self._see_to_trainers)
        self._observe()

    def _see_to_trainers(self) -> None:
        """Those that saw the last step taken have gone home; a stage that was lost then needs them again."""
        if not any(t.alive for t in self.swarm.trainers):
            self.swarm.add_trainer()

    # -- the end ----------------------------------------------------------------------------------

    def _observe(self) -> None:
        """Whether it is over; asked now and then."""
        swarm = self.swarm
        self.over = bool(swarm.violation or swarm.loop.bugs) or (
            swarm.loop.now_s >= self.calm_s and self._finished()
        )
        swarm.loop.call_later(EVERY_S, self._observe)

    def _finished(self) -> bool:
        """Every living peer has the last version; those that were told to leave, and trainers, have ended."""
        swarm = self.swarm
        for member in swarm.living():
            core = member.serving.peer.core if member.serving else None
            if core is None or core.leaving or core.version < swarm.run.steps or not core.joined:
                return False
        still = any(m.alive for m in swarm.trainers)
        return not still and {m.stage for m in swarm.living()} == set(range(swarm.run.cells))

    def _stands_still(self) -> str:
        swarm = self.swarm
        where = ", ".join(
            f"{m.name} of stage {m.stage} at {m.serving.peer.core.version if m.serving else 'pause'}"
            for m in swarm.living()
        )
        return (
            f"liveness: {swarm.loop.now_s - self.calm_s:.0f} s after the last fault the run has not "
            f"taken its {swarm.run.steps} steps: {where}"
        )

    def _check_the_end(self) -> None:
        swarm = self.swarm
        for member in swarm.peers:
            if member.stays and member.serving is not None:
                swarm.check(swarm.checks.holds, member.name, member.serving.compute)
        for folder, stage in product((disk.folder for disk in swarm.disks.all), range(swarm.run.S)):
            for step in checkpoint.saved_steps(folder, swarm.run, stage):
                tensors = checkpoint.Checkpoint(folder, swarm.run, stage, step).load()
                swarm.check(swarm.checks.saved, folder.name, stage, step, tensors)

    def _outcome(self) -> Outcome:
        swarm = self.swarm
        numbers = [m.serving.peer.core.generation.number for m in swarm.peers if m.serving is not None]
        return Outcome(
            seed=self.seed, violation=swarm.violation, faults=swarm.injected, looked=swarm.checks.looked,
            callbacks=swarm.loop.callbacks, calls=swarm.network.calls, ended_s=swarm.loop.now_s,
            undone=swarm.undone,
            replayed=sum(one.replayed for t in swarm.trainers for one in t.trainer.trainers),
            generations=max(numbers, default=0), digest=swarm.digest,
        )  # fmt: skip


def run_schedule(seed: int, trace: Callable[[str], None] | None = None) -> Outcome:
    """The schedule of `seed`, to its end. With the same code the same outcome, event by event."""
    return World(seed, trace).play()
