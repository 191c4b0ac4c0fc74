"""The search for a layout: structured starts, then an evolution of the best of them.

Deterministic: the seed, and what the caller's clock says, decide everything. Anytime: whenever the clock is
past the budget the best so far is the answer, and that is never worse than the structured starts that were
looked at, of which the first two (by pipeline and by stage) always are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from swarm.plan.cost import AdditiveCost, AdditiveTerms, additive_cost
from swarm.plan.grid import Grid
from swarm.plan.layouts import anneal, clustered_grid, shapes

POPULATION = 10
NEWCOMERS = 0.3
"""Part of the evolution's turns that go to a new start instead of a member."""
BLURS = (0.05, 0.15, 0.3)
"""Of distances, for a new start to be another one; see `clustered_grid`."""
HOPELESS = 1.5
"""A new start that costs so many times the best is not improved."""
LEAST_HEAT, MOST_HEAT = 0.003, 0.03
"""Of annealing, in parts of the best cost. Outside nothing was found on DT-FM's layouts (2026-11-22)."""
HOT, HOTTER = 0.1, 10.0
"""One turn in ten is ten times hotter: small layouts of wild prices have optima that no mild turn reaches."""
LEAST_STEPS, MOST_STEPS = 200, 600
"""Of one annealing."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What a search came to."""

    cost: AdditiveCost
    start_s: float
    """The least cost of a structured start, before any swap."""
    origin: str
    """Which start the answer descends from."""
    turns: int
    """Of the evolution."""


@dataclass(slots=True, eq=False)
class _Member:
    total_s: float
    cost: AdditiveCost
    shape: tuple[int, int]
    bands: bool


def search_additive(
    terms: AdditiveTerms, *, seed: int, budget_s: float, spent_s: Callable[[], float]
) -> Found:
    """A layout of small additive cost.

    Args:
        spent_s: seconds spent so far, by any clock that starts at 0 and never goes back.
    """
    rng = np.random.default_rng(seed)

    def over() -> bool:
        return spent_s() >= budget_s

    members: list[_Member] = []
    start_s = math.inf
    grid: Grid | None = None
    for shape, bands in _plans(terms):
        if len(members) >= 2 and over():
            break
        cost = additive_cost(terms, clustered_grid(terms, shape, rng, bands=bands))
        start_s = min(start_s, cost.total_s)
        if cost.total_s < HOPELESS * start_s:
            grid = Grid(terms, cost.grid) if grid is None else grid
            grid.place(cost.grid)
            better = additive_cost(terms, anneal(grid, steps=grid.size, heat_s=0.0, rng=rng, stop=over))
            cost = min(cost, better, key=lambda c: c.total_s)
        members.append(_Member(cost.total_s, cost, shape, bands))
    assert grid is not None
    members = _best_of(members)
    turns = 0
    while not over() and terms.stages * terms.replicas > 1:
        turns += 1
        _evolve(terms, grid, members, rng, over)
        members = _best_of(members)
    best = members[0]
    origin = f"clusters of {best.shape[0]} stages × {best.shape[1]} pipelines" + ", banded" * best.bands
    return Found(best.cost, start_s, origin, turns)


def _plans(terms: AdditiveTerms) -> list[tuple[tuple[int, int], bool]]:
    """The starts (shape, bands) in order: by pipeline, by stage, then all banded ones, which cost little."""
    all_shapes = list(shapes(terms.stages, terms.replicas))
    banded = [(shape, True) for shape in all_shapes if shape[0] < terms.stages]
    return [
        *((shape, False) for shape in all_shapes[:2]),
        *banded,
        *((shape, False) for shape in all_shapes[2:]),
    ]


def _evolve(
    terms: AdditiveTerms,
    grid: Grid,
    members: list[_Member],
    rng: np.random.Generator,
    over: Callable[[], bool],
) -> None:
    """One turn: a member is annealed and takes its own place if better, or a new start joins."""
    best_s = members[0].total_s
    heat_s = best_s * math.exp(rng.uniform(math.log(LEAST_HEAT), math.log(MOST_HEAT)))
    if rng.random() < HOT:
        heat_s *= HOTTER
    if rng.random() < NEWCOMERS:
        like = members[int(len(members) * rng.random() * rng.random())]
        blur = float(rng.choice(BLURS))
        start = additive_cost(terms, clustered_grid(terms, like.shape, rng, bands=like.bands, blur=blur))
        if start.total_s > HOPELESS * best_s:
            return
        grid.place(start.grid)
        found = additive_cost(terms, anneal(grid, steps=LEAST_STEPS, heat_s=heat_s, rng=rng, stop=over))
        found = min(start, found, key=lambda c: c.total_s)
        if all(abs(found.total_s - member.total_s) > 1e-9 * best_s for member in members):
            members.append(_Member(found.total_s, found, like.shape, like.bands))
        return
    member = members[int(len(members) * rng.random() ** 2)]
    steps = int(rng.integers(LEAST_STEPS, MOST_STEPS))
    grid.place(member.cost.grid)
    found = additive_cost(terms, anneal(grid, steps=steps, heat_s=heat_s, rng=rng, stop=over))
    if found.total_s < member.total_s:
        member.total_s, member.cost = found.total_s, found


def _best_of(members: list[_Member]) -> list[_Member]:
    return sorted(members, key=lambda member: member.total_s)[:POPULATION]
