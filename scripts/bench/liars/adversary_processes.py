"""Liars among real processes on loopback: how soon each is found, and what it costs.

    python scripts/bench/liars/adversary_processes.py                     all lies
    python scripts/bench/liars/adversary_processes.py --lie zero --replicas 3 --steps 60

3 stages of 5 replicas by default, a bootstrap and a named trainer, each a process with its own p2pd; the
decoder and the text of `adversary.py --decoder`. A forward takes 60 ms at least, and so does a backward, so
that the cores are not what a run waits for. One liar in each stage (`--liars 1`: in stage 1 only) begins
at step 32, when all have voice. Of each lie are told: after how many microbatches that a liar answered
meanwhile, or steps, the first honest peer left it out; who was accused falsely; and loss and steps a second
from then on against those of a run without liars. Sums are exact, so an honest run has the same losses to
the last bit each time. The last line is an object of rows for `tables.py --store liars`.

    python scripts/bench/liars/adversary_processes.py --lie "sybils: silent" --honest-steps 60

Of many identities of one process (`sybils.py`) is told how many steps were taken in each minute after they
announced themselves, against the minute before in the same run, and whether each microbatch counted once.

    python scripts/bench/liars/adversary_processes.py --lie keeper --replicas 2 --honest-steps 8 --steps 20

Of a keeper that gives out flipped weights of whatever version is asked for: a stage is killed whole, and
whether the weights in the end are those of one process, to the bit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from peers.events import Kept, Note, RolledBack, StateFetched, StepDone, Trouble
from peers.net.identity import Identity
from scripts.bench.liars import sybils
from scripts.bench.liars.adversary import ADDED, SUMS, decoder_run
from scripts.bench.liars.lying_peers import ANSWERED, BEGAN, HOLDING_UP, KEEPER, LIE, LIES, TOOK
from swarm.errors import short
from tests.process.forkserver import ForkServer
from tests.process.swarm_processes import Processes, Program, Swarm

JOB_S = 0.06
BESIDE = (*sybils.SYBILS, KEEPER)
"""Who is no peer of a stage: their runs are compared with themselves."""
CHECKPOINT_EVERY = 4
MINUTE_S, MANY_STEPS = 60.0, 20_000
STEP_S = 20.0
"""Limit for one step, on average: the machine may be loaded."""


@dataclass
class Played:
    """One run."""

    found_microbatches: list[int] = field(default_factory=list)
    found_steps: list[int] = field(default_factory=list)
    not_found: int = 0
    falsely: set[str] = field(default_factory=set)
    losses: dict[int, float] = field(default_factory=dict)
    at: dict[int, float] = field(default_factory=dict)
    """When each step was told."""


@contextlib.contextmanager
def lying(lie: str) -> Iterator[None]:
    """Programs that are started meanwhile lie."""
    os.environ[LIE] = lie
    try:
        yield
    finally:
        del os.environ[LIE]


def play(lie: str | None, options: argparse.Namespace) -> Played:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        key = folder / "trainer.key"
        run, _ = decoder_run(options.seed, options.steps, Identity.load_or_create(key).peer_id)
        with Swarm(folder, run) as swarm:
            swarm.job_s = JOB_S
            swarm.bootstrap()
            liars, honest = [], []
            for stage in range(run.S):
                for number in range(options.replicas):
                    if lie and number == 1 and (options.liars > 1 or stage == 1):
                        with lying(f"{lie}:{options.honest_steps}"):
                            # In memory nothing limits what a tarpit sends.
                            liars.append(swarm.peer(stage, "--no-direct"))
                        liars[-1].sentenced = True
                    else:
                        honest.append(swarm.peer(stage, "--no-direct"))
            swarm.all_serve()
            trainer = swarm.trainer("--identity", str(key))
            limit_s = 60.0 + STEP_S * options.steps
            try:
                swarm.until(lambda: swarm.version() >= options.steps, "the run does not end", limit_s)
            except AssertionError:
                print(swarm.story(), file=sys.stderr)
                raise
            return told(trainer, liars, honest, options)


def play_sybils(lie: str, options: argparse.Namespace) -> dict[str, object]:
    """A run that strangers come to, and its row."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        key = folder / "trainer.key"
        run, _ = decoder_run(options.seed, MANY_STEPS, Identity.load_or_create(key).peer_id)
        with Swarm(folder, run) as swarm:
            swarm.job_s = JOB_S
            swarm.bootstrap()
            os.environ[sybils.COUNT] = str(options.identities)
            with lying(f"{lie}:{options.honest_steps}"):
                words = ["peer", *swarm.membership(), "--stage", "1", "--device", "cpu", "--no-direct"]
                crowd = swarm.start("sybils", words)
            honest = [swarm.peer(at, "--no-direct") for at in range(run.S) for _ in range(options.replicas)]

            def when(words: str) -> float | None:
                return next((note.at for note in crowd.heard(Note) if note.text.startswith(words)), None)

            swarm.all_serve()
            swarm.until(lambda: when(sybils.READY), "the sybils are not up", 300.0)
            trainer = swarm.trainer("--identity", str(key))
            limit_s = 60.0 + STEP_S * options.honest_steps
            swarm.until(lambda: when(sybils.BEGAN), "the sybils do not begin", limit_s)
            began = when(sybils.BEGAN)
            assert began is not None
            end = time.monotonic() + MINUTE_S * options.minutes
            while time.monotonic() < end:
                swarm.assert_none_ended()
                swarm.listen(1.0)
            at = [event.at for event in trainer.heard(StepDone)]
            taken = [
                sum(0 <= when - began - MINUTE_S * minute < MINUTE_S for when in at)
                for minute in range(-1, options.minutes)
            ]
            found = told(trainer, [], honest, options)
            for who in sorted(found.falsely):
                print(who, file=sys.stderr)
            audits = {audit for of in swarm.audits().values() for audit in of}
            called = [note.text for note in crowd.heard(Note) if note.text.startswith(sybils.TAKEN)][-1]
            return {
                "lie": lie,
                "identities": options.identities,
                "peers": f"{run.S} × {options.replicas}",
                "before": taken[0],
                "taken": ", ".join(map(str, taken[1:])),
                "after": round(statistics.mean(taken[2:]) / taken[0], 2),
                "called": int(called.split()[-2]),
                "falsely": len(found.falsely),
                "not_once": len(audits - {(0, 0)}),
            }


def play_keeper(options: argparse.Namespace) -> dict[str, object]:
    """A stage is lost beside two honest keepers and one that gives out flipped weights."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        key = folder / "trainer.key"
        run, _ = decoder_run(options.seed, options.steps, Identity.load_or_create(key).peer_id)
        run = replace(run, checkpoint_every=CHECKPOINT_EVERY)
        with Swarm(folder, run) as swarm:
            swarm.job_s = JOB_S
            swarm.bootstrap()
            with lying(f"{KEEPER}:{options.honest_steps}"):
                liar = swarm.keeper(folder / "false")
            honest = [swarm.keeper(folder / f"true{number}") for number in range(2)]
            lost = [swarm.peer(1, "--no-direct") for _ in range(options.replicas)]
            for at in (0, 2):
                for _ in range(options.replicas):
                    swarm.peer(at, "--no-direct")
            swarm.all_serve()
            swarm.trainer("--identity", str(key))
            limit_s = 120.0 + STEP_S * options.steps
            swarm.until(
                lambda: any(note.text.startswith(BEGAN) for note in liar.heard(Note)), "no lie", limit_s
            )
            swarm.until(lambda: all(one.heard(Kept) for one in honest), "nothing is kept", limit_s)
            at = swarm.version()
            swarm.kill(*lost)
            new = [swarm.peer(1, "--no-direct") for _ in range(options.replicas)]
            swarm.until(lambda: swarm.version() >= options.steps, "the run does not end", limit_s)
            fetched = [event for peer in new for event in peer.heard(StateFetched)]
            names = {one.peer_id: "honest" for one in honest} | {liar.peer_id: "liar"}
            back = [event.step for peer in new for event in peer.heard(RolledBack)]
            single = swarm.single_process(options.steps).named_weights()
            weights = swarm.weights()
            same = all(torch.equal(weights[name], single[name]) for name in single)
            return {
                "lie": KEEPER, "peers": f"{run.S} × {options.replicas}, 3 keepers", "lost_at": at,
                "sources": ", ".join(sorted({names.get(event.source, "a replica") for event in fetched})),
                "back_to": min(back, default=None), "same_bits": same,
            }  # fmt: skip


def told(
    trainer: Program, liars: list[Program], honest: list[Program], options: argparse.Namespace
) -> Played:
    found = Played()
    for event in trainer.heard(StepDone):
        assert event.loss is not None
        found.losses[event.t], found.at[event.t] = event.loss, event.at
    names = {short(liar.peer_id) for liar in liars}
    left_out: dict[str, float] = {}
    for program in [*honest, trainer]:
        for event in program.heard(Trouble):
            if " is left out: " in event.text:
                accused = event.text.split()[1]
                if accused in names:
                    left_out[accused] = min(event.at, left_out.get(accused, event.at))
                else:
                    found.falsely.add(f"{accused} by {program.name}: {event.text}")
    for liar in liars:
        at = left_out.get(short(liar.peer_id))
        answered, taken = (numbers(liar, what) for what in (ANSWERED, TOOK))
        if not answered or at is None:
            found.not_found += 1
            continue
        found.found_microbatches.append(until(at, answered) - answered[0][1])
        found.found_steps.append(until(at, taken) - taken[0][1] + 1)
    return found


def numbers(liar: Program, what: str) -> list[tuple[float, int]]:
    """The numbers that a liar said of something, and when."""
    return [(note.at, int(note.text.split()[-1])) for note in liar.heard(Note) if note.text.startswith(what)]


def until(at: float, told: list[tuple[float, int]]) -> int:
    """The last number that was told until then, or the first."""
    return max([number for when, number in told if when <= at], default=told[0][1])


def row(lie: str, options: argparse.Namespace, clean: Played) -> dict[str, object]:
    began = time.monotonic()
    if lie in sybils.SYBILS:
        return play_sybils(lie, options)
    if lie == KEEPER:
        return play_keeper(options)
    one = play(lie, options)
    in_steps = lie in SUMS or lie in ADDED
    found = one.found_steps if in_steps else one.found_microbatches
    last = sorted(clean.losses)[-10:]

    def loss(played: Played) -> float:
        return statistics.mean(played.losses[t] for t in last)

    def took_s(played: Played) -> float:
        return played.at[max(played.at)] - played.at[options.honest_steps]

    for who in sorted(one.falsely):
        print(who, file=sys.stderr)
    return {
        "lie": lie,
        "unit": "" if lie in HOLDING_UP else "steps" if in_steps else "microbatches",
        "found": ", ".join(map(str, sorted(found))),
        "not_found": None if lie in HOLDING_UP else one.not_found,
        "falsely": len(one.falsely),
        "loss": f"{100 * abs(loss(one) - loss(clean)) / loss(clean):.2g} %",
        "throughput": round(took_s(clean) / took_s(one), 2),
        "took_s": round(time.monotonic() - began),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lie", choices=(*LIES, *BESIDE), action="append", help="this one; or several")
    parser.add_argument("--replicas", type=int, default=5, help="of each stage (%(default)s)")
    parser.add_argument("--liars", type=int, choices=(1, 3), default=3, help="1: in stage 1 only")
    parser.add_argument("--steps", type=int, default=60, help="of each run (%(default)s)")
    parser.add_argument("--honest-steps", type=int, default=32, help="before the liars begin (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--identities", type=int, default=100, help="of the sybils (%(default)s)")
    parser.add_argument("--minutes", type=int, default=3, help="that sybils are watched (%(default)s)")
    parser.add_argument("--clean", type=Path, help="keep the run without liars in this file, or take it")
    options = parser.parse_args()
    Processes.fork_server = ForkServer(["scripts.bench.liars.lying_peers"])
    rows: list[dict[str, object]] = []
    try:
        clean = without_liars(options)
        for lie in options.lie or LIES:
            try:
                rows.append(row(lie, options, clean))
            except AssertionError as error:
                print(error, file=sys.stderr)
                rows.append({"lie": lie, "failed": str(error).splitlines()[0][:200]})
            print(json.dumps(rows[-1]), flush=True)
    finally:
        Processes.fork_server.close()
    print(json.dumps({"rows": rows}))
    return int(any(one.get("failed") or one.get("falsely") for one in rows))


def without_liars(options: argparse.Namespace) -> Played:
    if options.lie and set(options.lie) <= {*BESIDE}:
        return Played()
    if options.clean and options.clean.exists():
        known = json.loads(options.clean.read_text())
        losses, at = ({int(t): value for t, value in known[name].items()} for name in ("losses", "at"))
        return Played(losses=losses, at=at)
    clean = play(None, options)
    if options.clean:
        options.clean.write_text(json.dumps({"losses": clean.losses, "at": clean.at}))
    return clean


if __name__ == "__main__":
    sys.exit(main())
