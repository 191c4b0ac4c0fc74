"""What many schedules came to, in words and in one line of JSON; and of one that fails, the fewest faults."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TextIO

from peers.sim.faults import KINDS, Fault
from peers.sim.invariants import INVARIANTS
from peers.sim.world import Outcome, World

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
        "name": "shipped classes",
        "schedules": len(outcomes),
        "callbacks": callbacks,
        "calls": sum(outcome.calls for outcome in outcomes),
        "faults": dict(sorted(injected.items())),
        "checked": dict(sorted(looked.items())),
        "violations": [outcome.seed for outcome in violations],
        "undone": sum(outcome.undone for outcome in outcomes),
        "replayed": sum(outcome.replayed for outcome in outcomes),
        "generations": sum(outcome.generations for outcome in outcomes),
        "slowest_s": round(max((outcome.ended_s for outcome in outcomes), default=0.0), 1),
        "cpu_s": round(cpu_s, 1),
        "schedules_per_cpu_s": round(len(outcomes) / cpu_s, 1) if cpu_s else None,
    }
    print(json.dumps({"rows": [row]}), file=out)
    return 1 if violations else 0


def shrink(seed: int, play: Callable[[World], Outcome] = World.play) -> tuple[list[Fault], Outcome]:
    """The fewest faults of the schedule of `seed`, without which it would hold, and what they lead to.

    Each fault is left out in turn, as long as the same kind of invariant is violated.
    """
    world = World(seed)
    faults = list(world.schedule or ())
    outcome = play(world)
    if not outcome.violation:
        return faults, outcome
    kind = outcome.violation.partition(":")[0]
    number = 0
    while number < len(faults):
        fewer = faults[:number] + faults[number + 1 :]
        found = play(World(seed, schedule=fewer))
        if found.violation.partition(":")[0] == kind:
            faults, outcome, number = fewer, found, 0
        else:
            number += 1
    return faults, outcome


def timeline(seed: int, faults: Sequence[Fault]) -> list[str]:
    """What happens with those faults, line by line."""
    lines: list[str] = []
    World(seed, trace=lines.append, schedule=list(faults)).play()
    return lines
