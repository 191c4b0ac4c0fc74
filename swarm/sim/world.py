"""One swarm, one schedule of faults, from one seed: does it end as it must?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from swarm.ids import Stage
from swarm.sim import faults
from swarm.sim.check import Checks, Violation
from swarm.sim.clock import Clock
from swarm.sim.dice import Dice
from swarm.sim.faults import Fault
from swarm.sim.network import Lines, Network
from swarm.sim.paused import PausedPeer, Snapshot
from swarm.sim.peer import StagePeer
from swarm.sim.terms import LIFE_S, Directory, Shelf, Terms
from swarm.sim.trainer import Trainer

FAULTS_WITHIN_S = 3.0
"""Without faults a run of these sizes takes about so long."""
MOST_FAULTS = 6
END_WITHIN_S = 180.0
"""After the last fault. A ban lasts up to 30 s, a lost stage is looked for after 6 s, a record lives 20 s."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a schedule."""

    seed: int
    violation: str
    """Empty: every invariant held, and the run came to its end."""
    terms: Terms
    faults: Counter[str]
    looked: Counter[str]
    events: int
    ended_s: float
    """Virtual time."""
    undone: int
    replayed: int
    eras: int


class World:
    """Everything that a seed says."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.seed, self._trace = seed, trace
        self.dice = dice = Dice(seed)
        self.clock = Clock()
        self.terms = Terms(
            stages=dice.pick((1, 2, 2, 2, 2, 3)),
            microbatches=dice.pick((2, 2, 3)),
            steps=dice.pick((2, 2, 2, 2, 2, 3)),
            delayed_updates=dice.chance(0.3),
            checkpoint_every=dice.pick((0, 1, 1, 2)),
            tied=seed % 3 == 0,
        )
        bad = dice.pick((0.0, 0.0, 0.01, 0.04))
        self._bad = Lines(most_s=dice.pick((0.01, 0.03, 0.06)), lost=bad, doubled=2 * bad, late=bad)
        self.network = Network(self.clock, dice, self._bad)
        if trace is not None:
            self.network.trace = self.say
        self.directory = Directory(self.clock)
        self.checks = Checks(self.terms)
        self.shelf = Shelf(self.terms.stages)
        self.peers: list[StagePeer] = []
        self.paused: list[PausedPeer] = []
        """All that ever paused; those that live are paused now."""
        self.trainers: list[Trainer] = []
        self.injected: Counter[str] = Counter()
        self._points: dict[str, list[int]] = {}
        self._window = dice.pick((None, 1, 2, 4))
        self._names = dice.shuffled([f"p{i:02}" for i in range(60)])
        for stage in range(self.terms.stages):
            for _ in range(dice.pick((1, 2, 2, 2, 3))):
                self.add_peer(stage)
        for _ in range(dice.pick((1, 1, 2))):
            self.add_trainer()
        self.schedule = faults.schedule(dice, most=MOST_FAULTS, within_s=FAULTS_WITHIN_S)
        for fault in self.schedule:
            self.clock.after(fault.at_s, None, self._inject, fault)
        ends = [fault.at_s + fault.lasts_s for fault in self.schedule]
        self.calm_s = max([FAULTS_WITHIN_S, *ends])
        self.clock.after(self.calm_s, None, self._calm)
        self.clock.after(self.calm_s + 15.0, None, self._see_to_trainers)

    def say(self, text: str) -> None:
        if self._trace is not None:
            self._trace(f"{self.clock.now:9.3f}  {text}")

    def add_peer(self, stage: Stage, before: PausedPeer | None = None) -> StagePeer:
        """`before`: who resumes so."""
        dice = self.dice
        name, kept = (self._names[len(self.peers)], None) if before is None else (before.name, before.kept)
        peer = StagePeer(
            self.clock, name, stage, self.terms, self.network, self.directory,
            self.checks, self.shelf, dice, None if self._trace is None else self.say,
            compute_s=dice.pick((0.005, 0.01, 0.04)), max_inflight=dice.pick((1, 2, 4)), kept=kept,
        )  # fmt: skip
        peer.at_point = self._at_point
        self.peers.append(peer)
        peer.start()
        return peer

    def add_trainer(self) -> Trainer:
        number, dice = len(self.trainers), Dice(self.seed * 64 + len(self.trainers))
        orders: dict[int, list[int]] = {}

        def order(t: int) -> list[int]:
            if t not in orders:
                orders[t] = dice.shuffled(range(self.terms.microbatches))
            return orders[t]

        trainer = Trainer(
            self.clock, f"t{number}", self.terms, self.network, self.directory, order, window=self._window
        )
        self.trainers.append(trainer)
        trainer.start()
        return trainer

    # -- faults -----------------------------------------------------------------------------------

    def _safe(self) -> list[StagePeer]:
        """Peers whose stage keeps somebody without them."""
        there = self._staying()
        return [p for p in self.peers if p.alive and there[p.stage] > (p.joined and not p.leaving)]

    def _staying(self) -> Counter[Stage]:
        """How many serve each stage, and mean to."""
        return Counter(p.stage for p in self.peers if p.alive and p.joined and not p.leaving)

    def _inject(self, fault: Fault) -> None:
        kind = fault.kind
        safe = self._safe()
        living = [p for p in self.peers if p.alive]
        if kind in ("kill", "cut power"):
            there = self._staying()
            mortal = [*safe, *(p for p in self.paused if p.alive and there[p.stage])]
            if not mortal:
                return
            self._kill(mortal[int(fault.who * len(mortal))], quietly=kind == "cut power")
        elif kind == "kill at":
            self._points.setdefault(fault.point, []).append(fault.number)
            return  # counted when it happens
        elif kind == "stop":
            if not living:
                return
            peer = living[int(fault.who * len(living))]
            if peer.stopped:
                return
            self.say(f"*** {peer.name} is stopped for {fault.lasts_s:.1f} s")
            self.network.stop(peer.name)
            self.clock.after(fault.lasts_s, None, self._go_on, peer)
        elif kind == "cut":
            nodes = sorted(p.name for p in (*living, *self.paused) if p.alive)
            nodes += [t.name for t in self.trainers if t.alive]
            if len(nodes) < 2:
                return
            side = self.dice.shuffled(nodes)[: 1 + int(fault.who * (len(nodes) - 1))]
            self.say(f"*** {', '.join(sorted(side))} are cut off for {fault.lasts_s:.1f} s")
            self.network.cut(side)
            self.clock.after(fault.lasts_s, None, self._heal)
        elif kind == "leave":
            staying = [p for p in safe if p.joined and not p.leaving]
            if not staying:
                return
            staying[int(fault.who * len(staying))].leave()
        elif kind == "join":
            peer = self.add_peer(int(fault.who * self.terms.stages))
            self.say(f"*** {peer.name} joins stage {peer.stage}")
        elif kind == "lose sum":
            if not living:
                return
            living[int(fault.who * len(living))].breaks += 1
        elif kind == "kill trainer":
            running = [t for t in self.trainers if t.alive]
            if not running:
                return
            trainer = running[int(fault.who * len(running))]
            self.say(f"*** trainer {trainer.name} dies")
            self.network.kill(trainer.name, quietly=False)
            self.clock.after(fault.lasts_s, None, self._another_trainer)
        elif kind == "storm":
            self.say("*** a storm begins")
            self.network.lines = Lines(most_s=self._bad.most_s, lost=0.2, doubled=0.15, late=0.15)
            self.clock.after(min(1.0, fault.lasts_s), None, self._storm_ends)
        elif kind == "pause":
            there = [p for p in living if not p.leaving]
            if not there:
                return
            peer = there[int(fault.who * len(there))]
            self.say(f"*** the owner of {peer.name} wants its device for {fault.lasts_s:.1f} s")
            peer.pause(partial(self._is_paused, peer, self.clock.now + fault.lasts_s))
        elif kind == "lose stage":
            stage = int(fault.who * self.terms.stages)
            self.say(f"*** all of stage {stage} die")
            for peer in living:
                if peer.stage == stage:
                    self._kill(peer, quietly=False)
            self.clock.after(fault.lasts_s / 2, None, self._another_peer, stage)
        self.injected[kind] += 1

    def _is_paused(self, peer: StagePeer, until_s: float, kept: Snapshot | None) -> None:
        paused = PausedPeer(
            self.clock, peer.name, peer.stage, kept, self.network, self.directory, self.shelf
        )
        self.paused.append(paused)
        self.clock.after(max(0.0, until_s - self.clock.now), None, self._resume, paused)

    def _resume(self, paused: PausedPeer) -> None:
        if paused.alive:
            self.say(f"*** {paused.name} resumes")
            self.add_peer(paused.stage, paused)

    def _kill(self, peer: StagePeer | PausedPeer, *, quietly: bool) -> None:
        self.say(f"*** {peer.name} of stage {peer.stage} dies{', and nobody is told' if quietly else ''}")
        self.network.kill(peer.name, quietly=quietly)
        self.directory.died(peer.name, forgotten_s=self.dice.between(0.5, LIFE_S))

    def _another_trainer(self, _: None) -> None:
        self.add_trainer()

    def _another_peer(self, stage: Stage) -> None:
        self.add_peer(stage)

    def _at_point(self, peer: StagePeer, point: str) -> None:
        waiting = self._points.get(point)
        if not waiting:
            return
        waiting[0] -= 1
        if waiting[0] <= 0:
            del waiting[0]
            if peer in self._safe():
                self.injected["kill at"] += 1
                self.say(f"*** at the point {point!r}:")
                self._kill(peer, quietly=self.dice.chance(0.3))

    def _go_on(self, peer: StagePeer) -> None:
        if peer.alive and peer.stopped:
            self.say(f"*** {peer.name} goes on")
            peer.go_on()

    def _heal(self, _: None) -> None:
        self.say("*** the cut is healed")
        self.network.heal()

    def _storm_ends(self, _: None) -> None:
        self.say("*** the storm is over")
        self.network.lines = self._bad

    def _calm(self, _: None) -> None:
        """From here on nothing fails."""
        self.say("*** from here on nothing fails")
        self._points.clear()
        self._bad = self.network.lines = Lines(most_s=self._bad.most_s)
        for peer in self.peers:
            peer.breaks = 0

    def _see_to_trainers(self, _: None) -> None:
        """Those that saw the last step taken have gone home; a stage that was lost then needs them again."""
        if not any(t.alive and t.version < self.terms.steps for t in self.trainers):
            self.add_trainer()

    # -- the end ----------------------------------------------------------------------------------

    def finished(self) -> bool:
        """Every living peer holds the last version."""
        steps = self.terms.steps
        if any(p.alive for p in self.paused) or any(p.pausing for p in self.peers):
            return False
        for peer in self.peers:
            if peer.alive and not peer.leaving and peer.weights.version < steps:
                return False
        stages = {p.stage for p in self.peers if p.alive and p.joined}
        return len(stages) == self.terms.stages

    def run(self) -> Outcome:
        violation = ""
        try:
            if not self.clock.run(until=self.finished, limit_s=self.calm_s + END_WITHIN_S):
                where = ", ".join(
                    f"{p.name} of stage {p.stage} at {p.version}" for p in self.peers if p.alive
                )
                violation = (
                    f"liveness: {self.clock.now - self.calm_s:.0f} s after the last fault the run has not "
                    f"taken its {self.terms.steps} steps: {where}"
                )
            else:
                for peer in self.peers:
                    if peer.alive and peer.joined and not peer.leaving:
                        self.checks.at_the_end(peer.stage, peer.name, peer.weights)
        except Violation as error:
            violation = str(error)
        except AssertionError as error:
            violation = f"an assertion of the policies failed: {error!r}"
        if violation:
            self.say(violation)
        return Outcome(
            seed=self.seed,
            violation=violation,
            terms=self.terms,
            faults=self.injected,
            looked=self.checks.looked,
            events=self.clock.events,
            ended_s=self.clock.now,
            undone=sum(p.undone for p in self.peers),
            replayed=sum(t.replayed for t in self.trainers),
            eras=max(p.era.number for p in self.peers),
        )


def run_schedule(seed: int, trace: Callable[[str], None] | None = None) -> Outcome:
    """The schedule of `seed`, to its end. With the same code the same outcome, event by event."""
    return World(seed, trace).run()
