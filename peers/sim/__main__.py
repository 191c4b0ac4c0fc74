"""Random fault schedules through the classes that ship: `python -m peers.sim --help`."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TextIO

import torch

from peers.progress import Bar
from peers.sim.report import report, shrink, timeline
from peers.sim.world import Outcome, run_schedule
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
    """Exit code 0: all invariants held; 1: one was violated; 2: wrong usage; 130: stopped by Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m peers.sim",
        description="Run swarms of the real classes under random faults, in virtual time.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--schedules", type=int, default=200, help="how many (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the first one (default: 0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share them (default: 1)")
    parser.add_argument("--replay", action="store_true", help="say what happens with this one seed")
    parser.add_argument(
        "--shrink", action="store_true", help="find the faults that this one seed needs to fail"
    )
    args = parser.parse_args(argv)
    for name in ("schedules", "jobs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: at least 1")
    torch.set_num_threads(1)
    if args.shrink:
        faults, outcome = shrink(args.seed)
        if not outcome.violation:
            print(f"seed {args.seed} holds", file=out)
            return 0
        print(f"seed {args.seed} fails with {len(faults)} faults: {outcome.violation}", file=out)
        for line in (*(fault.words() for fault in faults), "", *timeline(args.seed, faults)):
            print(line, file=out)
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
    gc.collect()
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
                raise
    finally:
        gc.enable()
        gc.unfreeze()


def begin_work(parent_pid: int) -> None:
    """Prepare a worker: one thread, and an end with the program that started it, also by SIGKILL."""
    torch.set_num_threads(1)
    die_with_parent(parent_pid)


def play(seed: int) -> tuple[Outcome, float]:
    """One schedule, and the seconds of a processor that it took."""
    began = time.process_time()
    outcome = run_schedule(seed)
    if seed % COLLECT_EVERY == 0:
        gc.collect()
    return outcome, time.process_time() - began


if __name__ == "__main__":
    sys.exit(main())
