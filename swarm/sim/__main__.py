"""Random fault schedules through the simulated protocol of steps: `python -m swarm.sim --help`."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TextIO

from swarm.sim.faults import KINDS
from swarm.sim.world import Outcome, run_schedule

EXAMPLE = """\
examples:
  python -m swarm.sim --schedules 10000     ten thousand swarms, each with its own faults
  python -m swarm.sim --seed 4711 --trace   one of them again, event by event
"""

MOST_SHOWN = 5
INVARIANTS = {
    "I1": "each microbatch once in every step that was taken",
    "I2": "equal versions have equal weights, those of the manifest",
    "I3": "an answer was computed with the version that was asked for",
    "I4": "weights at the end are the same whatever failed",
}


def main(argv: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Exit code 0: all invariants held; 1: one was violated; 2: wrong usage; 130: stopped by Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m swarm.sim",
        description="Simulate the protocol of steps under random faults, in virtual time.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--schedules", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one (default: 0)")
    parser.add_argument("--seed", type=int, help="run the schedule of this seed only")
    parser.add_argument("--trace", action="store_true", help="say what happens; with --seed")
    args = parser.parse_args(argv)
    if args.trace and args.seed is None:
        parser.error("--trace needs --seed: the trace of which schedule?")
    if args.schedules < 1:
        parser.error(f"--schedules {args.schedules}: at least 1")
    if args.seed is not None:
        trace = (lambda line: print(line, file=out)) if args.trace else None
        outcomes = [run_schedule(args.seed, trace)]
        return report(outcomes, 0.0, out)
    began = time.monotonic()
    seeds = range(args.first, args.first + args.schedules)
    outcomes: list[Outcome] = []
    try:
        outcomes.extend(with_progress(seeds, sys.stderr))
    except KeyboardInterrupt:
        print(f"stopped after {len(outcomes)} of {len(seeds)} schedules", file=sys.stderr)
        if outcomes:
            report(outcomes, time.monotonic() - began, out)
        return 130
    return report(outcomes, time.monotonic() - began, out)


def with_progress(seeds: Sequence[int], screen: TextIO) -> Iterable[Outcome]:
    """The outcomes of `seeds`; on a terminal, how far it is."""
    gc.collect()
    gc.disable()  # one schedule leaves a few thousand small circles behind: collected together they cost less
    shown_at = 0.0
    try:
        for number, seed in enumerate(seeds, start=1):
            yield run_schedule(seed)
            if number % 50 == 0:
                gc.collect()
            now = time.monotonic()
            if screen.isatty() and (now - shown_at > 0.2 or number == len(seeds)):
                shown_at = now
                bar = "█" * (30 * number // len(seeds))
                print(f"\r{bar:░<30} {number} of {len(seeds)} schedules", end="", file=screen, flush=True)
    finally:
        gc.enable()
        if screen.isatty():
            print(file=screen)


def report(outcomes: Sequence[Outcome], seconds: float, out: TextIO) -> int:
    """The table, the violations, and one line of JSON."""
    injected: Counter[str] = Counter()
    looked: Counter[str] = Counter()
    for outcome in outcomes:
        injected.update(outcome.faults)
        looked.update(outcome.looked)
    violations = [o for o in outcomes if o.violation]
    events = sum(o.events for o in outcomes)
    print(f"{len(outcomes)} schedules, {events} events, {sum(injected.values())} faults", file=out)
    for kind, _ in KINDS:
        print(f"  {kind:<14}{injected[kind]:>9}", file=out)
    print("checked", file=out)
    for name, meaning in INVARIANTS.items():
        print(f"  {name:<14}{looked[name]:>9}  {meaning}", file=out)
    print(f"  {'liveness':<14}{len(outcomes):>9}  the run ends after the last fault", file=out)
    for outcome in violations[:MOST_SHOWN]:
        print(f"\nseed {outcome.seed}: {outcome.violation}", file=out)
        print(f"  again: python -m swarm.sim --seed {outcome.seed} --trace", file=out)
    if len(violations) > MOST_SHOWN:
        print(f"\n… and {len(violations) - MOST_SHOWN} more", file=out)
    summary = {
        "rows": [
            {
                "name": "protocol of steps",
                "schedules": len(outcomes),
                "events": events,
                "faults": dict(sorted(injected.items())),
                "checked": dict(sorted(looked.items())),
                "violations": [o.seed for o in violations],
                "undone": sum(o.undone for o in outcomes),
                "replayed": sum(o.replayed for o in outcomes),
                "eras": sum(o.eras for o in outcomes),
                "slowest_s": round(max(o.ended_s for o in outcomes), 1),
                "seconds": round(seconds, 1),
            }
        ]
    }
    print(json.dumps(summary), file=out)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
