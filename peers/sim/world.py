"""One swarm of the classes that ship, one schedule of faults, from one seed: does it end as it must?"""

from __future__ import annotations

import gc
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from unittest.mock import patch

import numpy as np
import torch

from peers import events, fault_points
from peers.owner.commands import Owner
from peers.sim import faults
from peers.sim.device import SimDevice
from peers.sim.directory import Dht, SimDirectory
from peers.sim.faults import Fault
from peers.sim.invariants import Invariants, Violation
from peers.sim.loop import VirtualLoop
from peers.sim.network import Lines, Network, SimTransport
from peers.sim.processes import PROCESS, Killed, Process
from peers.stage import pause
from peers.stage.pause import PausedPeer
from peers.stage.server import StagePeer, StageSettings
from peers.trainer import Trainer, TrainerSettings
from peers.transfer.server import Snapshot
from swarm.data import token_dtype
from swarm.errors import SwarmError
from swarm.ids import PeerId, Stage
from swarm.manifest import Run, audit_run
from swarm.model.stage import Gradients, StageCompute, SumLost
from swarm.sim.dice import Dice

FAULTS_WITHIN_S = 3.0
"""Without faults a run of these sizes takes about so long."""
MAX_FAULTS = 8
END_WITHIN_S = 240.0
"""After the last fault. A ban lasts up to 30 s, a lost stage is looked for after 6 s, a record lives 20 s,
and a newer checkpoint is waited for for 60 s."""
LOOK_S = 0.1
THREAD_S = (0.0002, 0.003)
"""How long a job of a worker thread takes."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a schedule."""

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


class Zeros:
    """Data for the audit model, whose result does not depend on it."""

    def __init__(self, run: Run) -> None:
        shape = (run.batch.microbatch_size, run.data.sequence_length + 1)
        self._batch = np.zeros(shape, dtype=token_dtype(run.model.vocab_size))

    def batch(self, offsets: list[int]) -> np.ndarray:
        return self._batch


class AuditCompute(StageCompute):
    """A stage of the audit model, whose additions may be told to break.

    `tied`: the weights of the first stage are those of the last one as well, and each adds to both.
    """

    breaks = 0

    def __init__(self, run: Run, stage: Stage, *, tied: bool = False) -> None:
        super().__init__(run, stage)
        ends = {0, run.S - 1}
        if tied and stage in ends and len(ends) == 2:
            (other,) = ends - {stage}
            self.shares = {other: tuple(self._layout.terms)}

    def add(self, found: Gradients) -> None:
        t = found.mb.t
        if self.breaks and t in self._sums:
            self.breaks -= 1
            self._sums[t].zero_()
            raise SumLost(f"the sum of step {t} is lost", t=t)
        super().add(found)


@dataclass(eq=False)
class Member:
    """One process that serves a stage, or pauses."""

    name: PeerId
    process: Process
    transport: SimTransport
    directory: SimDirectory
    owner: Owner
    job_s: float
    peer: StagePeer | None = None
    stage: Stage = 0
    told_to_leave: bool = False
    breaks: int = 0
    undone: int = 0

    @property
    def alive(self) -> bool:
        return self.process.alive and self.process.main is not None and not self.process.main.done()

    @property
    def stays(self) -> bool:
        """It serves, and means to."""
        peer = self.peer
        if not self.alive or peer is None or not peer.core.joined:
            return False
        device = peer.core.device
        going = self.told_to_leave or peer.core.leaving or peer.going
        return not (going or device.hangs or device.dies)  # type: ignore[attr-defined]


@dataclass(eq=False)
class TrainerMember:
    """One process that trains."""

    name: PeerId
    process: Process
    trainer: Trainer

    @property
    def alive(self) -> bool:
        return self.process.alive and self.process.main is not None and not self.process.main.done()


@dataclass
class World:
    """Everything that a seed says. `schedule`: other faults than those that it says."""

    seed: int
    trace: Callable[[str], None] | None = None
    schedule: Sequence[Fault] | None = None
    injected: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.dice = dice = dice_of(self.seed, "the world")
        self.run = replace(
            audit_run(
                stages=dice.pick((1, 2, 2, 2, 2, 3)),
                steps=dice.pick((2, 2, 2, 2, 2, 3)),
                microbatches_per_step=dice.pick((2, 2, 3)),
            ),
            delayed_updates=dice.chance(0.3),
            checkpoint_every=dice.pick((0, 1, 1, 2)),
        )
        bad = dice.pick((0.0, 0.0, 0.01, 0.04))
        self._bad = Lines(most_s=dice.pick((0.01, 0.03, 0.06)), lost=bad, doubled=2 * bad, late=bad)
        threads = dice_of(self.seed, "threads")
        self.loop = VirtualLoop(lambda: threads.between(*THREAD_S))
        self.network = Network(self.loop, dice_of(self.seed, "the network"), self._bad, trace=self.say)
        self.dht = Dht(self.loop, dice_of(self.seed, "the directory"))
        self.tied = self.run.S > 1 and dice_of(self.seed, "tied weights").chance(1 / 3)
        self.checks = Invariants(self.run, tied=self.tied)
        self.members: list[Member] = []
        self.trainers: list[TrainerMember] = []
        self.violation = ""
        self.over = False
        self._digest = hashlib.sha256()
        self._points: dict[str, list[int]] = {}
        self._window = dice.pick((None, 1, 2, 4))
        self._names = dice.shuffled([f"p{i:02}" for i in range(60)])
        self._first = [dice.pick((1, 2, 2, 2, 3)) for _ in range(self.run.S)]
        self._first_trainers = dice.pick((1, 1, 2))
        drawn = faults.schedule(dice_of(self.seed, "faults"), most=MAX_FAULTS, within_s=FAULTS_WITHIN_S)
        self.schedule = drawn if self.schedule is None else self.schedule
        ends = [fault.at_s + fault.lasts_s for fault in self.schedule]
        self.calm_s = max([FAULTS_WITHIN_S, *ends])

    def say(self, text: str) -> None:
        """One line of the timeline."""
        line = f"{self.loop.now_s:9.3f}  {text}"
        self._digest.update(line.encode())
        if self.trace is not None:
            self.trace(line)

    # -- members ----------------------------------------------------------------------------------

    def add_peer(self, stage: Stage) -> Member:
        """A new process that serves `stage`."""
        name = self._names[len(self.members)]
        process = Process(name)
        transport = self.network.add(process)
        member = Member(
            name, process, transport, SimDirectory(self.dht, process), Owner(),
            job_s=self.dice.pick((0.005, 0.01, 0.04)), stage=stage,
        )  # fmt: skip
        settings = StageSettings(
            max_inflight=self.dice.pick((1, 2, 4)), joined_at=self.loop.unix_s() + self.dice.between(0, 0.01)
        )
        self.members.append(member)
        process.start(self.loop, self._serve(member, settings))
        return member

    async def _serve(self, member: Member, settings: StageSettings) -> None:
        emit = partial(self._heard, member)

        async def build(stage: Stage, kept: Snapshot | None) -> StagePeer:
            compute = AuditCompute(self.run, stage, tied=self.tied)
            compute.breaks, member.breaks = member.breaks, 0
            peer = StagePeer(
                self.run, stage, compute, member.transport, member.directory, settings, emit, kept=kept,
                device=SimDevice(self.network.dice, member.job_s),
            )  # fmt: skip
            member.peer, member.stage = peer, stage
            member.transport.on_gone = peer.peer_gone
            self._watch_weights(member, compute)
            return peer

        def hold(stage: Stage, kept: Snapshot | None) -> PausedPeer:
            member.peer, member.transport.on_gone = None, None
            return PausedPeer(
                self.run, stage, kept, member.transport, member.directory, settings, member.owner
            )

        try:
            await pause.serve(member.stage, member.owner, build, hold, device="cpu", emit=emit)
        except SwarmError as error:
            self.say(f"{member.name} ends: {error.text}")

    def _watch_weights(self, member: Member, compute: AuditCompute) -> None:
        """Look at the weights whenever they change."""

        def looked(change: Callable[..., None]) -> Callable[..., None]:
            def changed(*args: object) -> None:
                change(*args)
                self._check(self.checks.holds, member.name, compute)

            return changed

        compute.apply = looked(compute.apply)  # type: ignore[method-assign]
        compute.load_state = looked(compute.load_state)  # type: ignore[method-assign]
        complete = compute.complete

        def completed(reduced: torch.Tensor, shared: Mapping[Stage, torch.Tensor]) -> torch.Tensor:
            for other, part in {compute.stage: reduced, **shared}.items():
                self._check(self.checks.part, member.name, compute.stage, other, part)
            return complete(reduced, shared)

        compute.complete = completed  # type: ignore[method-assign]

    def add_trainer(self) -> TrainerMember:
        """A new process that trains."""
        process = Process(f"t{len(self.trainers)}")
        trainer = Trainer(
            self.run, Zeros(self.run), self.network.add(process), SimDirectory(self.dht, process),
            TrainerSettings(window=self._window), lambda event: self._heard(member, event),
        )  # fmt: skip
        member = TrainerMember(process.name, process, trainer)
        self.trainers.append(member)
        process.start(self.loop, self._train(member))
        return member

    async def _train(self, member: TrainerMember) -> None:
        try:
            await member.trainer.run()
            self.say(f"{member.name} goes home")
        except SwarmError as error:
            self.say(f"{member.name} ends: {error.text}")

    def _heard(self, member: Member | TrainerMember, event: events.Event) -> None:
        self.say(f"{member.name}: {event.words()}")
        if isinstance(event, events.StepDone) and event.loss is not None:
            self._check(self.checks.loss, member.name, event.t, event.loss)
        if isinstance(event, events.Undone) and isinstance(member, Member):
            member.undone += event.count

    def _check(self, look: Callable[..., None], *args: object) -> None:
        try:
            look(*args)
        except Violation as violation:
            self.violation = self.violation or str(violation)

    # -- faults -----------------------------------------------------------------------------------

    def _safe(self) -> list[Member]:
        """Peers whose stage keeps somebody without them."""
        there = self._staying()
        return [m for m in self.members if m.alive and m.peer and there[m.stage] > m.stays]

    def _staying(self) -> Counter[Stage]:
        """How many serve each stage, and mean to."""
        return Counter(m.stage for m in self.members if m.stays)

    def _inject(self, fault: Fault) -> None:
        happen = getattr(self, f"_fault_{fault.kind.replace(' ', '_')}")
        if happen(fault):
            self.injected[fault.kind] += 1

    def _pick(self, members: Sequence[Member], fault: Fault) -> Member | None:
        return members[int(fault.who * len(members))] if members else None

    def _living(self) -> list[Member]:
        return [m for m in self.members if m.alive]

    def _fault_kill(self, fault: Fault, *, quietly: bool = False) -> bool:
        there = self._staying()
        paused = [m for m in self.members if m.alive and m.peer is None and there[m.stage]]
        member = self._pick([*self._safe(), *paused], fault)
        if member is not None:
            self._kill(member, quietly=quietly)
        return member is not None

    def _fault_cut_power(self, fault: Fault) -> bool:
        return self._fault_kill(fault, quietly=True)

    def _fault_kill_at(self, fault: Fault) -> bool:
        self._points.setdefault(fault.point, []).append(fault.number)
        return False  # counted when it happens

    def _fault_stop(self, fault: Fault) -> bool:
        member = self._pick([m for m in self._living() if not m.process.stopped], fault)
        if member is None:
            return False
        self.say(f"*** {member.name} is stopped for {fault.lasts_s:.1f} s")
        self.network.stop(member.name)
        self.loop.call_later(fault.lasts_s, self._go_on, member)
        return True

    def _go_on(self, member: Member) -> None:
        if member.process.alive:
            self.say(f"*** {member.name} goes on")
            self.network.go_on(member.name)

    def _side(self, fault: Fault) -> list[PeerId]:
        """Some of all processes, but not all."""
        names = sorted(m.name for m in (*self.members, *self.trainers) if m.alive)
        return self.dice.shuffled(names)[: 1 + int(fault.who * (len(names) - 1))] if len(names) > 1 else []

    def _fault_cut(self, fault: Fault, *, one_way: bool = False) -> bool:
        side = self._side(fault)
        if not side:
            return False
        how = "reach nobody of the rest" if one_way else "are cut off"
        self.say(f"*** {', '.join(sorted(side))} {how} for {fault.lasts_s:.1f} s")
        number = self.network.cut(side, one_way=one_way)
        self.loop.call_later(fault.lasts_s, self._heal, number)
        return True

    def _fault_cut_one_way(self, fault: Fault) -> bool:
        return self._fault_cut(fault, one_way=True)

    def _heal(self, number: int) -> None:
        self.say("*** the cut is healed")
        self.network.heal(number)

    def _fault_cut_off(self, fault: Fault) -> bool:
        side = self._side(fault)
        if not side:
            return False
        self.say(f"*** {', '.join(sorted(side))} reach nobody of the DHT for {fault.lasts_s:.1f} s")
        self.dht.cut_off.update(side)
        self.loop.call_later(fault.lasts_s, self.dht.cut_off.difference_update, side)
        return True

    def _fault_leave(self, fault: Fault) -> bool:
        member = self._pick([m for m in self._safe() if m.stays], fault)
        if member is None:
            return False
        self.say(f"*** {member.name} of stage {member.stage} is told to leave")
        member.told_to_leave = True  # a stopped process hears of it later
        self.loop.call_soon(member.owner.leave, context=member.process.context)
        return True

    def _fault_join(self, fault: Fault) -> bool:
        member = self.add_peer(int(fault.who * self.run.S))
        self.say(f"*** {member.name} joins stage {member.stage}")
        return True

    def _fault_lose_sum(self, fault: Fault) -> bool:
        member = self._pick([m for m in self._living() if m.peer], fault)
        if member is None or member.peer is None:
            return False
        member.peer.core.compute.breaks += 1  # type: ignore[attr-defined]
        return True

    def _fault_kill_trainer(self, fault: Fault) -> bool:
        running = [t for t in self.trainers if t.alive]
        if not running:
            return False
        trainer = running[int(fault.who * len(running))]
        self.say(f"*** trainer {trainer.name} dies")
        self.network.kill(trainer.name, quietly=False)
        self.loop.call_later(fault.lasts_s, self.add_trainer)
        return True

    def _fault_storm(self, fault: Fault) -> bool:
        self.say("*** a storm begins")
        self.network.lines = Lines(most_s=self._bad.most_s, lost=0.2, doubled=0.15, late=0.15)
        self.loop.call_later(min(1.0, fault.lasts_s), self._storm_ends)
        return True

    def _storm_ends(self) -> None:
        self.say("*** the storm is over")
        self.network.lines = self._bad

    def _fault_lose_stage(self, fault: Fault) -> bool:
        stage = int(fault.who * self.run.S)
        self.say(f"*** all of stage {stage} die")
        for member in self._living():
            if member.stage == stage and member.peer is not None:
                self._kill(member, quietly=False)
        self.loop.call_later(fault.lasts_s / 2, self.add_peer, stage)
        return True

    def _fault_pause(self, fault: Fault) -> bool:
        serving = [m for m in self._living() if m.peer and not m.peer.core.leaving]
        member = self._pick(serving, fault)
        if member is None:
            return False
        self.say(f"*** the owner of {member.name} wants its device for {fault.lasts_s:.1f} s")
        context = member.process.context
        self.loop.call_soon(member.owner.pause, "by hand", "the owner wants it", context=context)
        self.loop.call_later(fault.lasts_s, self._resume, member)
        return True

    def _resume(self, member: Member) -> None:
        if member.process.alive:
            self.say(f"*** the owner of {member.name} gives its device back")
            self.loop.call_soon(member.owner.resume, "by hand", context=member.process.context)

    def _fault_move(self, fault: Fault) -> bool:
        if self.run.S == 1:
            return False
        member = self._pick([m for m in self._safe() if m.stays], fault)
        if member is None or member.peer is None:
            return False
        to = (member.stage + 1 + int(fault.who * 97) % (self.run.S - 1)) % self.run.S
        self.say(f"*** {member.name} moves from stage {member.stage} to {to}")
        member.process.spawn(self.loop, member.peer.move(to, why="a fault", going=set()))
        return True

    def _fault_wrong_clock(self, fault: Fault) -> bool:
        member = self._pick(self._living(), fault)
        if member is None:
            return False
        error_s = (fault.lasts_s - 3.5) * 1000
        self.say(f"*** the clock of {member.name} jumps by {error_s:.0f} s")
        member.process.clock_error_s += error_s
        if fault.lasts_s < 1.0:
            self.loop.call_later(fault.lasts_s, self._right_clock, member)
        return True

    def _right_clock(self, member: Member) -> None:
        self.say(f"*** the clock of {member.name} is right again")
        member.process.clock_error_s = 0.0

    def _fault_device_hangs(self, fault: Fault) -> bool:
        member = self._pick([m for m in self._safe() if m.peer], fault)
        if member is None or member.peer is None:
            return False
        self.say(f"*** the device of {member.name} hangs; it is killed {fault.lasts_s:.1f} s later")
        member.peer.core.device.hangs = True  # type: ignore[attr-defined]
        self.loop.call_later(fault.lasts_s, self._kill_hung, member)
        return True

    def _kill_hung(self, member: Member) -> None:
        if member.alive:
            self._kill(member, quietly=False)

    def _fault_device_dies(self, fault: Fault) -> bool:
        member = self._pick([m for m in self._safe() if m.peer], fault)
        if member is None or member.peer is None:
            return False
        self.say(f"*** the device of {member.name} dies")
        member.peer.core.device.dies = True  # type: ignore[attr-defined]
        return True

    def _kill(self, member: Member, *, quietly: bool) -> None:
        told = ", and nobody is told" if quietly else ""
        self.say(f"*** {member.name} of stage {member.stage} dies{told}")
        self.network.kill(member.name, quietly=quietly)

    def _at_point(self, point: str) -> None:
        """A process passes a fault point: it may die there, between two instructions."""
        waiting = self._points.get(point)
        process = PROCESS.get()
        if not waiting or process is None:
            return
        waiting[0] -= 1
        if waiting[0] <= 0:
            del waiting[0]
            member = next((m for m in self._safe() if m.process is process), None)
            if member is not None:
                self.injected["kill at"] += 1
                self.say(f"*** at the point {point!r}:")
                self._kill(member, quietly=self.dice.chance(0.3))
                raise Killed

    def _calm(self) -> None:
        """From here on nothing fails."""
        self.say("*** from here on nothing fails")
        self._points.clear()
        self._bad = self.network.lines = Lines(most_s=self._bad.most_s)
        self.dht.cut_off.clear()
        for member in self.members:
            member.breaks = 0
            if member.peer is not None:
                member.peer.core.compute.breaks = 0  # type: ignore[attr-defined]

    def _see_to_trainers(self) -> None:
        """Those that saw the last step taken have gone home; a stage that was lost then needs them again."""
        if not any(t.alive for t in self.trainers):
            self.add_trainer()

    # -- the end ----------------------------------------------------------------------------------

    def _look(self) -> None:
        """Whether it is over; looked for now and then."""
        self.over = bool(self.violation or self.loop.bugs) or (
            self.loop.now_s >= self.calm_s and self._finished()
        )
        self.loop.call_later(LOOK_S, self._look)

    def _finished(self) -> bool:
        """Every living peer holds the last version."""
        serving = [m for m in self._living() if not m.owner.left]
        for member in serving:
            if member.peer is None or member.peer.core.leaving:
                return False
            if member.peer.core.version < self.run.steps or not member.peer.core.joined:
                return False
        return {m.stage for m in serving} == set(range(self.run.S))

    def play(self) -> Outcome:
        """The schedule, to its end."""
        with ExitStack() as stack:
            stack.enter_context(self.loop.running())
            stack.enter_context(patch.object(fault_points, "on_point", self._at_point))
            # Who pauses collects what is on the device. Here that would be most of the time.
            stack.enter_context(patch.object(gc, "collect", lambda: 0))
            self._begin()
            ended = self.loop.run(lambda: self.over, limit_s=self.calm_s + END_WITHIN_S)
            if self.loop.bugs:
                self.violation = self.violation or f"bug: {self.loop.bugs[0]}"
            if not ended and not self.violation:
                where = ", ".join(
                    f"{m.name} of stage {m.stage} at {m.peer.core.version if m.peer else 'pause'}"
                    for m in self._living()
                )
                self.violation = (
                    f"liveness: {self.loop.now_s - self.calm_s:.0f} s after the last fault the run has not "
                    f"taken its {self.run.steps} steps: {where}"
                )
            elif not self.violation:
                for member in self.members:
                    if member.stays and member.peer is not None:
                        self._check(self.checks.at_the_end, member.name, member.peer.core.compute)
            if self.violation:
                self.say(self.violation)
            outcome = self._outcome()
            self._close()
        return outcome

    def _begin(self) -> None:
        for stage, count in enumerate(self._first):
            for _ in range(count):
                self.add_peer(stage)
        for _ in range(self._first_trainers):
            self.add_trainer()
        assert self.schedule is not None
        for fault in self.schedule:
            self.loop.call_later(fault.at_s, self._inject, fault)
        self.loop.call_later(self.calm_s, self._calm)
        self.loop.call_later(self.calm_s + 15.0, self._see_to_trainers)
        self._look()

    def _outcome(self) -> Outcome:
        numbers = [m.peer.core.generation.number for m in self.members if m.peer is not None]
        return Outcome(
            seed=self.seed,
            violation=self.violation,
            faults=self.injected,
            looked=self.checks.looked,
            callbacks=self.loop.callbacks,
            calls=self.network.calls,
            ended_s=self.loop.now_s,
            undone=sum(m.undone for m in self.members),
            replayed=sum(t.trainer.replayed for t in self.trainers),
            generations=max(numbers, default=0),
            digest=self._digest.hexdigest()[:16],
        )

    def _close(self) -> None:
        """Forget every task, without running any of them."""
        for member in (*self.members, *self.trainers):
            member.process.end()


def dice_of(seed: int, purpose: str) -> Dice:
    """Chance for one purpose: what is drawn for it changes nothing of the others."""
    return Dice(int.from_bytes(hashlib.sha256(f"{seed} {purpose}".encode()).digest()[:8], "big"))


def run_schedule(seed: int, trace: Callable[[str], None] | None = None) -> Outcome:
    """The schedule of `seed`, to its end. With the same code the same outcome, event by event."""
    return World(seed, trace).play()
