"""A swarm of real processes under faults of every kind, and what it did to the result: nothing.

    python scripts/bench/recovery/chaos.py                    # 200 faults; about half an hour on two cores
    python scripts/bench/recovery/chaos.py --quick            # each kind once, two peers a stage; two minutes
    python scripts/bench/recovery/chaos.py --faults 1000 --seed 7 --without partition

3 stages × 3 peers, 2 trainers and a keeper train a small model in float64; as root, each of them on a host of
its own (`netlab.py`), so that cables can be pulled. A seed chooses kinds, victims and moments. Who leaves is
replaced, by peers of a given stage or by such that choose one and may move: joins and moves are faults too.
At the end

- every (t, m) counted exactly once in every stage, by the ledgers of all reduces that were applied;
- the weights equal those of a single process to 1e-9, relative to the largest of each tensor;
- no process, socket directory or shared memory of anybody is left.

Before the first fault and after the last one the whole swarm trains undisturbed: the time that the same steps
take in that way is what the time lost is counted against. A stage is never left without a healthy member,
except by the kind `stage loss`. Exit code 1 if anything is not as it must be.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import psutil
import torch

from peers import events
from peers.cli import COMMANDS, Exit
from scripts.bench.common.arguments import parser_of
from scripts.bench.common.netlab import Lab, Link, why_not
from swarm.ids import Stage
from swarm.manifest import CodecSpec, Run, demo_run
from swarm.model.reference import SingleProcess
from tests.process.swarm_processes import Program, Swarm, farthest

STALL_S = 240.0
"""Limit for a step, whatever was done to the swarm; with everything healed or not."""
BACK_S = 180.0
"""Limit for who was hung or cut off to take a step again."""
TOLERANCE = 1e-9
POINTS = ("forward:5", "backward:5", "reduce:3", "prepared:2", "joining")
"""Moments at which a peer is made to kill itself."""

WEIGHTS: dict[str, float] = {
    "kill": 4,  # SIGKILL of a peer
    "kill at a point": 2,  # of a peer that joined for it, in the middle of something
    "kill two": 1,  # of two stages, at once
    "hang": 3,  # SIGSTOP, and later SIGCONT
    "kill p2pd": 2,
    "hang p2pd": 2,
    "leave": 3,  # SIGTERM
    "leave at once": 1,  # SIGTERM twice
    "extra join": 1,
    "kill trainer": 2,
    "kill trainers": 1,  # all of them; none for a while
    "kill bootstrap": 1,
    "kill keeper": 1,
    "cut": 3,  # a host's cable
    "cut link": 2,  # between two hosts
    "partition": 2,
    "thin out": 1,  # all but one peer of a stage leave, and nobody joins it: others have to move
    "stage loss": 1,  # SIGKILL of a whole stage
}
"""Kinds of faults, and how often each comes."""
NEED_LAB = frozenset(("cut", "cut link", "partition"))


def chaos_run(microbatches: int = 12) -> Run:
    """3 layers of width 32 on 3 stages, 16 tokens a sample, float64, codec none.

    Steps may take a tenth of a second: checkpoints are further apart than the looks of a keeper.
    The rate is low: what reassociated sums differ by (1e-16) must not grow to 1e-9 by training on it for
    thousands of steps.
    """
    base = demo_run(stages=3, steps=1_000_000, codec="none", seed=3)
    return replace(
        base,
        name="chaos",
        dtype="float64",
        checkpoint_every=25,
        rebalance_every_s=10,
        model=replace(base.model, hidden=32, heads=4, ffn_hidden=64),
        data=replace(base.data, sequence_length=16),
        batch=replace(base.batch, microbatch_size=2, microbatches_per_step=microbatches),
        optimizer=replace(base.optimizer, lr=3e-4, warmup_steps=2),
        codec=CodecSpec(forward="none", backward="none"),
    )


def deck(rng: random.Random, kinds: dict[str, float]) -> Iterator[str]:
    """Kinds of faults for ever, each about as often as it weighs, none forgotten for long."""
    while True:
        hand = [kind for kind, weight in kinds.items() for _ in range(round(weight))]
        rng.shuffle(hand)
        yield from hand


def missing_here() -> dict[str, str]:
    """Kinds of faults that cannot be made here, and why."""
    found = {}
    if reason := why_not():
        found |= dict.fromkeys(NEED_LAB, f"a network lab {reason}")
    if "keeper" not in COMMANDS:
        found["kill keeper"] = "there is no keeper"
    return found


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is played."""

    faults: int = 200
    seed: int = 1
    replicas: int = 3
    control_steps: int = 60
    """Undisturbed, before and after."""
    microbatches: int = 12
    window: int = 3
    """Of each trainer. If all of a step fits into both, they mostly run the same microbatches."""
    pause_s: float = 4.0
    """Mean time between two faults."""
    longest_spell_s: float = 12.0
    """That anything hangs or is cut off."""
    thin_s: float = 40.0
    """For how long nobody joins a stage that was thinned out: a few periods of rebalancing."""
    once: bool = False
    """Each kind once, and then the end, however many faults that makes."""
    without: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    job_s: float = 0.0
    """What a forward takes at least, and a backward."""
    log: Path | None = None


def quick(options: Options) -> Options:
    """The short form."""
    return replace(
        options,
        once=True,
        replicas=2,
        control_steps=5,
        microbatches=6,
        window=2,
        pause_s=0.7,
        longest_spell_s=5.0,
        thin_s=12.0,
        job_s=0.2,
    )


@dataclass
class Tally:
    """What happened."""

    injected: Counter[str] = field(default_factory=Counter)
    survived: Counter[str] = field(default_factory=Counter)
    """Faults after which the run took a step."""
    back_s: dict[str, list[float]] = field(default_factory=dict)
    """By kind: from the end of a fault to the victim's next step."""
    longest_stall_s: float = 0.0
    skipped: dict[str, str] = field(default_factory=dict)


CONTACTS = 8
"""Addresses that a newcomer is given."""


class ChaosSwarm(Swarm):
    """A swarm whose programs join at healthy peers, wherever these are."""

    job_s = 0.0
    unwell: Callable[[Program], bool] = staticmethod(lambda program: False)
    rng = random.Random(0)

    def roaming_peer(self, *extra: str) -> Program:
        """Start a peer that chooses its stage, and may move to another."""
        words = ["--device", "cpu", "--threads", "1", "--max-inflight", "8", *extra]
        return self.start(self._name("peer"), ["peer", *self.membership(), *words])

    def _joins(self) -> list[str]:
        up = [p for p in self.programs if p.returncode is None and p.heard(events.Started)]
        self.rng.shuffle(up)
        up.sort(key=self.unwell)
        return [word for program in up[:CONTACTS] for word in ("--join", program.address)]


class Chaos:
    """One swarm, and all that is done to it. `play()`."""

    def __init__(self, swarm: ChaosSwarm, options: Options, folder: Path, say: Callable[[str], None]) -> None:
        self.swarm, self.options, self._folder, self._say = swarm, options, folder, say
        swarm.job_s = options.job_s
        self.rng = random.Random(options.seed)
        self.tally = Tally(skipped=missing_here())
        swarm.unwell = lambda program: bool(self._ails.get(program)) or program in self._doomed
        self._ails: dict[Program, Counter[str]] = {}
        """What is wrong with a peer, made by us; empty = nothing."""
        self._doomed: set[Program] = set()
        self._later: list[tuple[float, Callable[[], None]]] = []
        """(monotonic time, what to do then)."""
        self._returning: dict[Program, tuple[str, float]] = {}
        """Healed: (kind, Unix time). Well again once it takes a step."""
        self._pending: Counter[str] = Counter()
        """Faults since the last step that was taken."""
        self._thin: Stage | None = None
        """The stage that nobody joins for now."""
        self._not_wanted = 0
        """Peers that left it and are not replaced for now."""
        self._resting = False
        self._disks = 0
        self._done: list[tuple[float, str]] = []
        """(Unix time, fault)."""
        self._moved_at = time.monotonic()
        self._version = 0
        """Of the run, as far as trainers have told."""
        self._read: dict[Program, int] = {}
        self._version_of: dict[Program, int] = {}
        self._said_at = 0.0

    # -- the play ---------------------------------------------------------------------------------

    def play(self) -> None:
        """Start everything, do it all, and come to rest with a whole swarm."""
        swarm, options = self.swarm, self.options
        self._start_bootstrap()
        swarm.hear(swarm.programs[0], events.JoinLine)
        swarm.peers(options.replicas)
        self._refill_trainers()
        self._start_keeper()
        swarm.until_version(swarm.version() + 3)
        self.before_s = self._undisturbed()

        self.began_at, self.began_version = time.time(), self._version
        kinds = self._kinds()
        for kind in itertools.islice(deck(self.rng, kinds), len(kinds) if options.once else None):
            if not options.once and sum(self.tally.injected.values()) >= options.faults:
                break
            self._inject(kind)
            self._wait(self.rng.expovariate(1.0 / options.pause_s) if self.rng.random() > 0.15 else 0.0)
        self._come_to_rest()
        self.ended_at, self.ended_version = time.time(), self._version

        self.after_s = self._undisturbed()
        for trainer in self._living("trainer"):
            swarm.leaves(trainer)
        self._hear()
        self.steps = self._version + 3  # what was in flight may have made one more than was heard
        swarm.train_to(self.steps, "--window", str(self.options.window))
        self._all_reach(self.steps)

    def _all_reach(self, version: int) -> None:
        """Wait until every peer that serves says that it is there."""
        end = time.monotonic() + BACK_S
        while set(found := self.swarm.versions().values()) != {version}:
            assert time.monotonic() < end, f"not all peers reach version {version}: {sorted(found)}"
            self.swarm.listen(0.5)

    def _kinds(self) -> dict[str, float]:
        chosen = {k: w for k, w in WEIGHTS.items() if not self.options.only or k in self.options.only}
        return {
            kind: 1 if self.options.once else weight
            for kind, weight in chosen.items()
            if kind not in self.options.without and kind not in self.tally.skipped
        }

    def _undisturbed(self) -> float:
        """Mean seconds a step of the whole swarm when nobody disturbs it."""
        self._say("undisturbed")
        self._hear()
        first, began_at = self._version, time.time()
        while self._version < first + self.options.control_steps:
            self._tick("undisturbed")
        times = self._step_times(began_at)
        return (times[max(times)] - times[min(times)]) / (max(times) - min(times))

    def _step_times(self, since: float) -> dict[int, float]:
        """When each step since then was first heard to be done (Unix seconds)."""
        times: dict[int, float] = {}
        for program in self.swarm.programs:
            for event in program.heard(events.StepDone):
                if event.at >= since:
                    times[event.t] = min(event.at, times.get(event.t, event.at))
        return times

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while True:
            self._tick(f"{sum(self.tally.injected.values())} of {self.options.faults} faults")
            if time.monotonic() >= end:
                return

    def _tick(self, what: str) -> None:
        """Listen for a moment, do what is due, replace what is gone, notice what stands still."""
        swarm, now = self.swarm, time.monotonic()
        swarm.listen(0.1)
        self._forgive_stranded()
        swarm.assert_none_ended()
        for item in [item for item in self._later if item[0] <= now]:
            self._later.remove(item)
            item[1]()
        self._hear()
        self._refill()
        stalled_s = now - self._moved_at
        self.tally.longest_stall_s = max(self.tally.longest_stall_s, stalled_s)
        assert stalled_s < STALL_S, f"no step for {stalled_s:.0f} s\n{self._picture()}\n{swarm.story()}"
        for program, (kind, at) in self._returning.items():
            assert time.time() - at < BACK_S, (
                f"{program.name} takes no step {BACK_S:.0f} s after '{kind}'\n"
                f"{self._picture()}\n{program.story()}"
            )
        if now - self._said_at > 5:
            self._said_at = now
            self._say(f"{what}, {self._picture()}")

    def _forgive_stranded(self) -> None:
        """A newcomer all of whose contacts died while it started ends with a word: as it must."""
        for program in self.swarm.programs:
            if not program.sentenced and program.returncode == Exit.SETUP and not self._started(program):
                program.wait()
                if "can be reached" in "".join(program.errors):
                    program.sentenced = True
                    self._returning.pop(program, None)
                    self._note("contacts died", program.name)

    def _started(self, program: Program) -> bool:
        return bool(program.heard(events.Serving) or program.heard(events.StepDone))

    def _picture(self) -> str:
        counts = [len(self.swarm.serving(stage)) for stage in range(self.swarm.run.S)]
        ill = sorted({kind for ails in self._ailing().values() for kind in ails})
        since = time.monotonic() - self._moved_at
        return (
            f"version {self._version}, peers {' '.join(map(str, counts))}, "
            f"{len(self._living('trainer'))} trainers"
            + (f", now {', '.join(ill)}" if ill else "")
            + (f", no step for {since:.0f} s" if since > 3 else "")
        )

    def _hear(self) -> None:
        """Take in what the programs said since the last time."""
        for program in self.swarm.programs:
            start = self._read.get(program, 0)
            news = program.events[start:]
            self._read[program] = start + len(news)
            for event in news:
                if isinstance(event, events.StepDone) and event.t + 1 > self._version:
                    self._version = event.t + 1
                    self._moved_at = time.monotonic()
                    self.tally.survived += self._pending
                    self._pending.clear()
                elif isinstance(event, events.Stepped):
                    self._version_of[program] = event.t + 1
                    self._is_back(program, event)
                elif isinstance(event, events.RolledBack):
                    self._version_of[program] = event.step
                    self._version = min(self._version, event.step)
                elif isinstance(event, events.Serving | events.StateFetched):
                    self._version_of[program] = event.version
                elif isinstance(event, events.Paused):
                    self._returning.pop(program, None)  # to be a spare is as good
                elif isinstance(event, events.Moved):
                    self._note("move", f"{program.name} {event.words()}")

    def _is_back(self, program: Program, event: events.Stepped) -> None:
        """It took a step with the others, and not one that it had in hand when it was stopped."""
        kind, at = self._returning.get(program, ("", 0.0))
        if kind and event.at > at and event.t + 1 >= self._version:
            del self._returning[program]
            self.tally.back_s.setdefault(kind, []).append(event.at - at)

    def _note(self, kind: str, words: str) -> None:
        self.tally.injected[kind] += 1
        self._pending[kind] += 1
        self._done.append((time.time(), f"{kind}: {words}"))
        self._say(f"{kind}: {words}")

    # -- who is there -----------------------------------------------------------------------------

    def _living(self, kind: str) -> list[Program]:
        return [
            p
            for p in self.swarm.programs
            if p.name.startswith(kind) and p.returncode is None and p not in self._doomed
        ]

    def _ailing(self) -> dict[Program, Counter[str]]:
        """Who lives and lacks something."""
        return {p: ails for p, ails in self._ails.items() if ails and p.returncode is None}

    def _stage_of(self, program: Program) -> Stage | None:
        served = program.heard(events.Serving)
        return served[-1].stage if served else None

    def _well(self, stage: Stage) -> list[Program]:
        """Peers of a stage that serve, lack nothing, and are up to date."""
        # What a program says from now on is not read yet.
        read = filter(self._version_of.__contains__, self._living("peer"))
        serving = [program for program in read if self._stage_of(program) == stage]
        newest = max((self._version_of[program] for program in serving), default=0)
        return [
            program
            for program in serving
            if self._version_of[program] == newest >= self._version - 1
            and not self._ails.get(program)
            and program not in self._returning
        ]

    def _victims(self, spare: int = 1) -> list[Program]:
        """Peers whose stage keeps `spare` healthy ones without them."""
        found = []
        for stage in range(self.swarm.run.S):
            well = self._well(stage)
            if len(well) > spare:
                found += well
        return found

    def _later_do(self, seconds: float, do: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, do))

    def _disk(self) -> list[str]:
        """Some have one of their own for checkpoints, and most have not."""
        self._disks += 1
        return ["--checkpoint-dir", str(self._folder / f"disk{self._disks}")] if self._disks % 3 == 0 else []

    # -- replacing --------------------------------------------------------------------------------

    def _start_bootstrap(self) -> None:
        key, port = self._folder / "bootstrap.key", "0"
        former = [p for p in self.swarm.programs if p.name == "bootstrap"]
        if former:  # its address is known to many
            port = former[0].address.split("/tcp/")[1].split("/")[0]
        self.swarm.start_bootstrap("--identity", str(key), "--port", port)

    def _start_keeper(self) -> None:
        if "keeper" in COMMANDS:
            self.swarm.keeper(self._folder / "kept")

    def _refill_trainers(self) -> None:
        for _ in range(2 - len(self._living("trainer"))):
            self.swarm.trainer("--window", str(self.options.window))

    def _refill(self) -> None:
        """Peers join when some are missing, two at a time."""
        peers = self._living("peer")
        starting = [p for p in peers if self._stage_of(p) is None]
        there = [p for p in peers if p not in starting and not self._ails.get(p, Counter())["leaves"]]
        if len(starting) >= 2:
            return
        counts = [sum(self._stage_of(p) == stage for p in there) for stage in range(self.swarm.run.S)]
        for program in starting:
            if "stage" in program.name:
                counts[int(program.name.split()[3])] += 1
        needy = min((s for s in range(self.swarm.run.S) if s != self._thin), key=lambda s: counts[s])
        if self._resting:
            if counts[needy] < self.options.replicas:
                self._note("join", self.swarm.peer(needy).name)
        elif len(there) + len(starting) + self._not_wanted < self.swarm.run.S * self.options.replicas:
            roams = self._thin is None and self.rng.random() < 0.5
            start = self.swarm.roaming_peer if roams else partial(self.swarm.peer, needy)
            program = start(*self._disk())
            self._note("join", program.name)

    # -- faults -----------------------------------------------------------------------------------

    def _inject(self, kind: str) -> None:
        """Do it as soon as it can be done without harm; not at all if that takes too long."""
        end = time.monotonic() + 30
        action = getattr(self, "_" + kind.replace(" ", "_"))
        while not action():
            if time.monotonic() > end:
                self._say(f"{kind}: nobody to do it to, skipped")
                return
            self._wait(0.2)
        self.swarm.take_census()

    def _one(self) -> Program | None:
        victims = self._victims()
        return self.rng.choice(victims) if victims else None

    def _kill(self) -> bool:
        if (victim := self._one()) is None:
            return False
        self._note("kill", victim.name)
        self.swarm.kill(victim)
        return True

    def _kill_two(self) -> bool:
        victims = self._victims()
        by_stage = [[p for p in victims if self._stage_of(p) == stage] for stage in range(self.swarm.run.S)]
        there = [members for members in by_stage if members]
        if len(there) < 2:
            return False
        pair = [self.rng.choice(members) for members in self.rng.sample(there, 2)]
        self._note("kill two", " and ".join(p.name for p in pair))
        self.swarm.kill(*pair)
        return True

    def _kill_at_a_point(self) -> bool:
        point = self.rng.choice(POINTS)
        stage = self.rng.choice(range(self.swarm.run.S))
        doomed = self.swarm.peer(stage, kill_at=point)
        self._doomed.add(doomed)
        self._note("kill at a point", f"{doomed.name} at {point}")
        self._later_do(40.0, lambda: self._give_up(doomed))
        return True

    def _give_up(self, doomed: Program) -> None:
        """Its point never came; it goes like any other, so that it does not stay for ever."""
        if doomed.returncode is None:
            self.swarm.kill(doomed)

    def _ail(self, kind: str, victim: Program, seconds: float, heal: Callable[[], None]) -> None:
        """`kind` begins now and ends after `seconds`."""
        self._ails.setdefault(victim, Counter())[kind] += 1

        def end() -> None:
            heal()
            ails = self._ails[victim]
            ails[kind] -= 1
            self._ails[victim] = +ails
            if victim.returncode is None and not self._ails[victim]:
                self._returning[victim] = (kind, time.time())

        self._later_do(seconds, end)

    def _spell_s(self) -> float:
        """How long something hangs or is cut off: sometimes shorter than anybody would notice."""
        return self.rng.choice(
            (self.rng.uniform(0.5, 3.0), self.rng.uniform(3.0, self.options.longest_spell_s))
        )

    def _hang(self) -> bool:
        if (victim := self._one()) is None:
            return False
        seconds = self._spell_s()
        self._note("hang", f"{victim.name} for {seconds:.1f} s")
        victim.stop()
        self._ail("hang", victim, seconds, victim.cont)
        return True

    def _p2pd(self, program: Program) -> psutil.Process | None:
        with contextlib.suppress(psutil.Error, KeyError):
            return program.family().p2pd
        return None

    def _kill_p2pd(self) -> bool:
        victim = self._one()
        if victim is None or (p2pd := self._p2pd(victim)) is None:
            return False
        self._note("kill p2pd", victim.name)
        p2pd.kill()
        self._ail("kill p2pd", victim, 0.0, lambda: None)
        return True

    def _hang_p2pd(self) -> bool:
        victim = self._one()
        if victim is None or (p2pd := self._p2pd(victim)) is None:
            return False
        seconds = self._spell_s()
        self._note("hang p2pd", f"{victim.name} for {seconds:.1f} s")
        p2pd.suspend()

        def resume() -> None:
            with contextlib.suppress(psutil.NoSuchProcess):
                p2pd.resume()

        self._ail("hang p2pd", victim, seconds, resume)
        return True

    def _go(self, victim: Program, *, at_once: bool) -> None:
        """SIGTERM, and again if it has to be at once."""
        victim.sentenced = True
        self._ails.setdefault(victim, Counter())["leaves"] += 1
        victim.signal(signal.SIGTERM)
        if at_once:
            self._later_do(0.05, lambda: self._term(victim))
        self._later_do(45.0, lambda: self._must_be_gone(victim))

    def _term(self, victim: Program) -> None:
        if victim.returncode is None:
            victim.signal(signal.SIGTERM)

    def _must_be_gone(self, victim: Program) -> None:
        assert victim.returncode is not None, f"{victim.name} does not leave\n{victim.story()}"
        # The second signal may come when it is past the point where it hears signals.
        assert victim.returncode in (0, 130, -signal.SIGTERM), victim.story()

    def _leave(self) -> bool:
        if (victim := self._one()) is None:
            return False
        self._note("leave", victim.name)
        self._go(victim, at_once=False)
        return True

    def _leave_at_once(self) -> bool:
        if (victim := self._one()) is None:
            return False
        self._note("leave at once", victim.name)
        self._go(victim, at_once=True)
        return True

    def _extra_join(self) -> bool:
        if len(self._living("peer")) >= self.swarm.run.S * (self.options.replicas + 1):
            return False
        stage = self.rng.choice(range(self.swarm.run.S))
        self._note("extra join", self.swarm.peer(stage).name)
        return True

    def _kill_trainer(self) -> bool:
        trainers = [p for p in self._living("trainer") if p.heard(events.StepDone)]
        if not trainers:
            return False
        victim = self.rng.choice(trainers)
        self._note("kill trainer", victim.name)
        self.swarm.kill(victim)
        self._later_do(self.rng.uniform(0.0, 4.0), self._refill_trainers)
        return True

    def _kill_trainers(self) -> bool:
        trainers = self._living("trainer")
        if len(trainers) < 2:
            return False
        self._note("kill trainers", " and ".join(p.name for p in trainers))
        self.swarm.kill(*trainers)
        self._later_do(self.rng.uniform(1.0, 8.0), self._refill_trainers)
        return True

    def _kill_bootstrap(self) -> bool:
        if not (living := self._living("bootstrap")):
            return False
        self._note("kill bootstrap", "")
        self.swarm.kill(*living)
        self._later_do(self.rng.uniform(2.0, 20.0), self._start_bootstrap)
        return True

    def _kill_keeper(self) -> bool:
        if not (living := self._living("keeper")):
            return False
        self._note("kill keeper", "")
        self.swarm.kill(*living)
        self._later_do(self.rng.uniform(2.0, 10.0), self._start_keeper)
        return True

    def _cut(self) -> bool:
        assert self.swarm.lab is not None
        lab, victim = self.swarm.lab, self._one()
        if victim is None:
            return False
        seconds, host = self._spell_s(), victim.host
        self._note("cut", f"{victim.name} for {seconds:.1f} s")
        lab.cut(host)
        self._ail("cut", victim, seconds, lambda: lab.heal(host))
        return True

    def _cut_link(self) -> bool:
        assert self.swarm.lab is not None
        lab, victim = self.swarm.lab, self._one()
        others = [p for p in self._living("peer") if p is not victim and self._stage_of(p) is not None]
        if victim is None or not others:
            return False
        other, seconds = self.rng.choice(others), self._spell_s()
        ends = victim.host, other.host
        self._note("cut link", f"{victim.name} to {other.name} for {seconds:.1f} s")
        lab.cut(*ends)
        self._ail("cut link", victim, seconds, lambda: lab.heal(*ends))
        return True

    def _partition(self) -> bool:
        assert self.swarm.lab is not None
        lab = self.swarm.lab
        if self._ailing():
            return False  # links that two faults have cut are healed by the first that ends
        hosts = sorted({p.host for p in self.swarm.programs if p.returncode is None})
        self.rng.shuffle(hosts)
        middle = self.rng.randint(1, len(hosts) - 1)
        one, other = hosts[:middle], hosts[middle:]
        seconds = self._spell_s()
        self._note("partition", f"{len(one)} | {len(other)} for {seconds:.1f} s")
        lab.partition(one, other)

        def heal() -> None:
            lab.partition(one, other, on=False)

        for victim in self._living("peer"):
            self._ail("partition", victim, seconds, heal)
        return True

    def _thin_out(self) -> bool:
        stage = self.rng.choice(range(self.swarm.run.S))
        well = self._well(stage)
        if len(well) < 2 or self._thin is not None or self._ailing():
            return False
        leaving = self.rng.sample(well, len(well) - 1)
        self._thin, self._not_wanted = stage, len(leaving)
        self._note("thin out", f"stage {stage}: {', '.join(p.name for p in leaving)} leave")
        for victim in leaving:
            self._go(victim, at_once=False)

        def again() -> None:
            self._thin, self._not_wanted = None, 0

        self._later_do(self.options.thin_s, again)
        return True

    def _stage_loss(self) -> bool:
        stage = self.rng.choice(range(self.swarm.run.S))
        members = [p for p in self._living("peer") if self._stage_of(p) == stage]
        doomed = [p for p in self._doomed if p.returncode is None]
        if self._ailing() or self._returning or doomed:
            return False
        if stage == self._thin:
            self._thin, self._not_wanted = None, 0
        self._note("stage loss", f"stage {stage}: {', '.join(p.name for p in members)}")
        self.swarm.kill(*members)
        return True

    def log(self) -> str:
        """Everything that was said and done, in order."""
        lines = [(at, "chaos", words) for at, words in self._done]
        for program in self.swarm.programs:
            name = program.name
            if started := program.heard(events.Started):
                name += f" [{started[0].peer[-6:]}]"
            lines += [(event.at, name, event.words()) for event in list(program.events)]
            lines += [(time.time(), name, line) for line in (*program.other_lines, *program.errors)]
        return "".join(
            f"{time.strftime('%H:%M:%S', time.localtime(at))}.{int(at * 1000) % 1000:03} {name}: {words}\n"
            for at, name, words in sorted(lines)
        )

    def _come_to_rest(self) -> None:
        """Everything that is due happens, and everybody is there and well."""
        self._say("coming to rest")
        self._resting = True

        def whole() -> bool:
            stages = range(self.swarm.run.S)
            return (
                not self._later
                and not self._returning
                and all(len(self._well(stage)) >= self.options.replicas for stage in stages)
                and bool(self._living("bootstrap"))
                and len(self._living("trainer")) >= 2
            )

        end = time.monotonic() + 4 * STALL_S
        while not whole():
            self._tick("coming to rest")
            assert time.monotonic() < end, f"the swarm does not come to rest\n{self._picture()}"
        first = self._version
        while self._version < first + 2:
            self._tick("coming to rest")


# --- what came of it ----------------------------------------------------------------------------------------


def play(options: Options, say: Callable[[str], None]) -> dict[str, Any]:
    """A whole run under faults, compared with the single process; the row that says it all.

    Raises:
        AssertionError: something is not as it must be; the text says what.
    """
    run, lab = chaos_run(options.microbatches), None
    folder = Path(tempfile.mkdtemp(prefix="swarm-chaos-"))
    try:
        if not why_not():
            # A few hosts more than programs: who leaves or dies still has one when the next joins.
            lab = Lab(
                [f"h{i}" for i in range(3 * options.replicas + 14)], link=Link(delay_s=0.001), queue_s=1.0
            )
        with ChaosSwarm(folder, run, lab=lab) as swarm:
            chaos = Chaos(swarm, options, folder, say)
            try:
                chaos.play()
                weights = swarm.weights()
            except BaseException:
                say(f"after {dict(chaos.tally.injected)}")
                raise
            finally:
                if options.log is not None:
                    options.log.write_text(chaos.log())
        if lab is not None:
            assert not lab.inhabitants(), f"processes are left: {lab.inhabitants()}"
    finally:
        if lab is not None:
            lab.close()
        shutil.rmtree(folder, ignore_errors=True)
    torch.set_num_threads(1)  # of a model that small, more only wait for each other
    single, said_at = SingleProcess(swarm.run, swarm.data.batch), time.monotonic()
    for t in range(chaos.steps):
        single.step(t)
        if time.monotonic() - said_at > 5:
            said_at = time.monotonic()
            say(f"the same in a single process: step {t} of {chaos.steps}")
    return row(chaos, farthest(weights, single), in_lab=lab is not None)


def row(chaos: Chaos, difference: float, *, in_lab: bool) -> dict[str, Any]:
    """All that was counted."""
    swarm, tally, run = chaos.swarm, chaos.tally, chaos.swarm.run
    audits = swarm.audits()
    wrong = {cell: found for cell, found in audits.items() if set(found) != {(0, 0)}}
    cells = {(stage, t) for stage in range(run.S) for t in range(chaos.steps)}
    replayed = sum(e.count for p in swarm.programs for e in p.heard(events.Replayed))
    undone = sum(e.count for p in swarm.programs for e in p.heard(events.Undone))
    void = sum(len(p.heard(events.RoundAborted)) for p in swarm.programs)
    rolled = sum(len(p.heard(events.RolledBack)) for p in swarm.programs)
    steps = chaos.ended_version - chaos.began_version
    took_s = chaos.ended_at - chaos.began_at
    undisturbed_s = steps * (chaos.before_s + chaos.after_s) / 2
    injected = sum(tally.injected.values())
    return {
        "seed": chaos.options.seed,
        "faults": injected,
        "survived": sum(tally.survived.values()),
        "by_kind": dict(sorted(tally.injected.items())),
        "skipped_kinds": tally.skipped,
        "network_lab": in_lab,
        "steps": chaos.steps,
        "weights_differ": difference,
        "wrong_audits": {f"stage {stage} step {t}": found for (stage, t), found in wrong.items()},
        "steps_without_audit": sorted(cells - audits.keys())[:20],
        "cells": len(cells),
        "cells_without_audit": len(cells - audits.keys()),
        "replayed_percent": round(100 * replayed / (chaos.steps * run.M), 2),
        "replayed": replayed,
        "undone": undone,
        "void_rounds": void,
        "roll_backs": rolled,
        "chaos_steps": steps,
        "chaos_s": round(took_s, 1),
        "undisturbed_s": round(undisturbed_s, 1),
        "s_per_step_before": round(chaos.before_s, 4),
        "s_per_step_after": round(chaos.after_s, 4),
        "lost_s": round(took_s - undisturbed_s, 1),
        "lost_s_per_fault": round((took_s - undisturbed_s) / injected, 2),
        "lost_percent": round(100 * (took_s - undisturbed_s) / took_s, 1),
        "longest_stall_s": round(tally.longest_stall_s, 1),
        "back_s": {
            kind: {"median": round(statistics.median(each), 2), "max": round(max(each), 2), "n": len(each)}
            for kind, each in sorted(tally.back_s.items())
        },
    }


def verdict(found: dict[str, Any]) -> str:
    """What is not as it must be, in words; nothing if all is well."""
    wrong = []
    if found["weights_differ"] > TOLERANCE:
        wrong.append(f"the weights differ by {found['weights_differ']:.2e}")
    if found["wrong_audits"]:
        wrong.append(f"microbatches are missing or counted twice: {found['wrong_audits']}")
    if found["survived"] != found["faults"]:
        wrong.append(f"{found['faults'] - found['survived']} faults were the last ones of the run")
    return "; ".join(wrong)


def table(found: dict[str, Any]) -> str:
    """For people."""
    width = max(map(len, found["by_kind"]))
    lines = [f"{'fault':<{width}}  times  back after (median, max)"]
    for kind, times in found["by_kind"].items():
        back = found["back_s"].get(kind)
        lines.append(
            f"{kind:<{width}}  {times:5}" + (f"  {back['median']:.1f} s, {back['max']:.1f} s" if back else "")
        )
    lines += [f"{kind:<{width}}      –  {why}" for kind, why in found["skipped_kinds"].items()]
    lines += [
        "",
        f"{found['faults']} faults, {found['survived']} survived; {found['steps']} steps",
        f"weights differ from a single process by {found['weights_differ']:.1e} (limit {TOLERANCE:.0e})",
        f"{found['cells']} sums of a stage and step: {len(found['wrong_audits'])} wrong, "
        f"{found['cells_without_audit']} of which no ledger was told",
        f"{found['replayed_percent']} % of the work run again, {found['undone']} duplicates undone, "
        f"{found['void_rounds']} void rounds",
        f"{found['chaos_s']} s under faults, {found['undisturbed_s']} s undisturbed: "
        f"{found['lost_s_per_fault']} s lost a fault; the longest stall was {found['longest_stall_s']} s",
    ]
    return "\n".join(lines)


def speaker() -> Callable[[str], None]:
    """Lines with the time since the start, to standard error."""
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {text}", file=sys.stderr, flush=True)

    return say


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--faults", type=int, default=200, help="how many at least (default: 200)")
    parser.add_argument("--seed", type=int, default=1, help="of kinds, victims and moments (default: 1)")
    parser.add_argument("--quick", action="store_true", help="each kind once, 2 peers a stage")
    parser.add_argument("--replicas", type=int, default=3, help="peers of each stage (default: 3)")
    parser.add_argument("--pause", type=float, default=4.0, help="mean seconds between faults (default: 4)")
    parser.add_argument(
        "--without", action="append", default=[], choices=tuple(WEIGHTS), metavar="KIND", help="repeatable"
    )
    parser.add_argument(
        "--only", action="append", default=[], choices=tuple(WEIGHTS), metavar="KIND",
        help="repeatable; kinds: " + ", ".join(WEIGHTS),
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="the JSON line only, without the table")
    parser.add_argument(
        "--log", type=Path, metavar="FILE", help="all that the programs said, in order of time"
    )
    return parser.parse_args(arguments)


def main() -> int:
    args = parse()
    options = Options(
        faults=args.faults, seed=args.seed, replicas=args.replicas, pause_s=args.pause,
        without=tuple(args.without), only=tuple(args.only), log=args.log,
    )  # fmt: skip
    if args.quick:
        options = quick(options)
    try:
        found = play(options, speaker())
    except AssertionError as error:
        print(error, file=sys.stderr)
        print(json.dumps({"rows": [{"seed": options.seed, "failed": str(error)[:2000]}]}), flush=True)
        return 1
    wrong = verdict(found)
    if not args.json:
        print(table(found))
    if wrong:
        print(f"NOT AS IT MUST BE: {wrong}", file=sys.stderr)
    print(json.dumps({"rows": [found]}), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # everything is ended by then
        sys.exit("stopped")
