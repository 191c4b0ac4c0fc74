"""A failing schedule with as few faults as still make it fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from peers.sim.faults import Fault
from peers.sim.world import Outcome, World


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
