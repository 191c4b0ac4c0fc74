"""Random fault schedules through the classes that ship: `python -m peers.sim --help`."""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TextIO

import torch

from peers.options import whole
from peers.progress import Bar
from peers.sim.faults import KINDS, Fault
from peers.sim.invariants import INVARIANTS
from peers.sim.world import Outcome, World, run_schedule
from peers.system import die_with_parent

EXAMPLE = """\
examples:
  python -m peers.sim --schedules 2000 --jobs 2   two thousand swarms, each with its own faults
  python -m peers.sim --seed 4711 --replay        one of them again, event by event
  python -m peers.sim --seed 4711 --shrink        with as few faults as still make it fail
"""
COLLECT_EVERY = 25
"""One schedule leaves a few thousand circles behind: collected together they cost less."""


def main(argv: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Exit code 0: all invariants held; 1: one was violated; 2: wrong usage; 130: Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(
        prog="python -m peers.sim",
        description="Run swarms of the real classes under random faults, in virtual time.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--schedules", type=whole(1), default=200, help="how many (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the first one (default: 0)")
    parser.add_argument("--jobs", type=whole(1), default=1, help="processes that share them (default: 1)")
    parser.add_argument("--replay", action="store_true", help="say what happens with this one seed")
    parser.add_argument(
        "--shrink", action="store_true", help="find the faults that this one seed needs to fail"
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.shrink:
        faults, outcome = shrink(args.seed)
        if not outcome.violation:
            print(f"seed {args.seed} holds", file=out)
            return 0
        print(f"seed {args.seed} fails with {len(faults)} faults: {outcome.violation}", file=out)
        print(*(fault.words() for fault in faults), "", sep="\n", file=out)
        World(args.seed, trace=lambda line: print(line, file=out), schedule=faults).play()
        return 1
    if args.replay:
        began = time.process_time()
        outcome = run_schedule(args.seed, lambda line: print(line, file=out))
        return report([outcome], time.process_time() - began, out)
    seeds = range(args.seed, args.seed + args.schedules)
    outcomes: list[Outcome] = []
    cpu_s = 0.0
    try:
        with Bar("playing", len(seeds), unit="schedules") as bar:
            for outcome, took_s in played(seeds, args.jobs):
                outcomes.append(outcome)
                cpu_s += took_s
                bar(1)
    except KeyboardInterrupt:
        print(f"stopped after {len(outcomes)} of {len(seeds)} schedules", file=sys.stderr)
        if outcomes:
            report(outcomes, cpu_s, out)
        return 130
    return report(outcomes, cpu_s, out)


def played(seeds: Iterable[int], jobs: int) -> Iterator[tuple[Outcome, float]]:
    """The outcomes of `seeds` in their order, and the seconds of a processor that each took."""
    gc.freeze()
    gc.disable()
    try:
        if jobs == 1:
            yield from map(play, seeds)
            return
        with ProcessPoolExecutor(jobs, initializer=begin_work, initargs=(os.getpid(),)) as pool:
            try:
                yield from pool.map(play, seeds, chunksize=4)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for worker in multiprocessing.active_children():
                    worker.terminate()  # a chunk may take a minute
                raise
    finally:
        gc.enable()


def begin_work(parent_pid: int) -> None:
    """Prepare a worker: one thread, and an end with the program that started it, also by SIGKILL."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    die_with_parent(parent_pid)


def play(seed: int) -> tuple[Outcome, float]:
    """One schedule, and the seconds of a processor that it took."""
    began = time.process_time()
    try:
        outcome = run_schedule(seed)
    except KeyboardInterrupt:
        if multiprocessing.parent_process() is not None:
            os._exit(130)  # a worker would go on with the next chunk
        raise
    if seed % COLLECT_EVERY == 0:
        gc.collect()
    return outcome, time.process_time() - began


MAX_SHOWN = 5


def report(outcomes: Sequence[Outcome], cpu_s: float, out: TextIO) -> int:
    """The table, the violations, and one line of JSON. 1 if there is a violation, else 0."""
    injected = sum((outcome.faults for outcome in outcomes), Counter[str]())
    looked = sum((outcome.looked for outcome in outcomes), Counter[str]())
    violations = [outcome for outcome in outcomes if outcome.violation]
    callbacks = sum(outcome.callbacks for outcome in outcomes)
    print(f"{len(outcomes)} schedules, {callbacks} callbacks, {sum(injected.values())} faults", file=out)
    for kind in KINDS:
        print(f"  {kind:<16}{injected[kind]:>9}", file=out)
    print("checked", file=out)
    for name, meaning in INVARIANTS.items():
        print(f"  {name:<16}{looked[name]:>9}  {meaning}", file=out)
    print(f"  {'liveness':<16}{len(outcomes):>9}  the run ends after the last fault", file=out)
    for outcome in violations[:MAX_SHOWN]:
        print(f"\nseed {outcome.seed}: {outcome.violation}", file=out)
        print(f"  again: python -m peers.sim --seed {outcome.seed} --replay", file=out)
    if len(violations) > MAX_SHOWN:
        print(f"\n… and {len(violations) - MAX_SHOWN} more", file=out)
    row = {
        "name": "shipped classes", "schedules": len(outcomes), "callbacks": callbacks,
        "calls": sum(outcome.calls for outcome in outcomes),
        "faults": dict(sorted(injected.items())), "checked": dict(sorted(looked.items())),
        "violations": [outcome.seed for outcome in violations],
        "undone": sum(outcome.undone for outcome in outcomes),
        "replayed": sum(outcome.replayed for outcome in outcomes),
        "generations": sum(outcome.generations for outcome in outcomes),
        "slowest_s": round(max((outcome.ended_s for outcome in outcomes), default=0.0), 1),
        "cpu_s": round(cpu_s, 1),
        "schedules_per_cpu_s": round(len(outcomes) / cpu_s, 1) if cpu_s else None,
    }  # fmt: skip
    print(json.dumps({"rows": [row]}), file=out)
    return 1 if violations else 0


def shrink(seed: int) -> tuple[list[Fault], Outcome]:
    """The fewest faults of the schedule of `seed`, without which it would hold, and what they lead to.

    Each fault is left out in turn, as long as the same kind of invariant is violated.
    """
    world = World(seed)
    faults = list(world.schedule or ())
    outcome = world.play()
    if not outcome.violation:
        return faults, outcome
    kind = outcome.violation.partition(":")[0]
    number = 0
    while number < len(faults):
        fewer = faults[:number] + faults[number + 1 :]
        found = World(seed, schedule=fewer).play()
        if found.violation.partition(":")[0] == kind:
            faults, outcome, number = fewer, found, 0
        else:
            number += 1
    return faults, outcome


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # disks in memory go as on Ctrl-C
    sys.exit(main())
