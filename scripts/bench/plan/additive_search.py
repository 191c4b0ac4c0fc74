"""The search for a layout of small additive cost (DT-FM's objective): starts, a race of them, and many small
disturbances of its best.

Deterministic: the seed, and what the caller's clock says, decide everything. Anytime: whenever the clock is
past the budget the best so far is the answer, and that is never worse than the structured starts that were
looked at, of which the first two (by pipeline and by stage) always are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from scripts.bench.plan.additive_grid import KNOWN, LOOKED_AT, Grid, Segments
from scripts.bench.plan.additive_objective import (
    AdditiveCost,
    AdditiveTerms,
    additive_cost,
    costs_in_order_s,
)
from scripts.bench.plan.additive_stages import Divisions
from swarm.plan.search import even_clusters, shapes

ROUNDS, MAX_RACED = (12, 6, 3, 1), 256
"""How many of the best layouts are annealed in each round, which all take as long: which start is the best
shows only in what annealing makes of it. With more devices, whose steps are slow, there is no race."""
STARTING = 0.5
"""Part of the budget after which no more starts are made; it matters to a thousand devices only."""
TOGETHER, RACING, DISTURBING = 0.15, 0.5, 0.9
"""Parts of what the starts leave of the budget after which these have been annealed together as sets of
devices, the rounds end, and small disturbances of the best do. The rest is a cooler annealing of the best.
Where devices are alike, sets find less, and the rounds have the time of all three (2026-11-29)."""
Phase = tuple[int, float, float, float]
"""Of an annealing: squarings of the norm, heat at first and last in parts of the cost, part of the time."""
SOFT: tuple[Phase, ...] = ((1, 0.016, 0.008, 0.4), (2, 0.012, 0.003, 0.5), (3, 0.003, 0.001, 0.1))
HARD: tuple[Phase, ...] = ((2, 0.012, 0.003, 0.6), (3, 0.003, 0.001, 0.4))
"""Of the rounds: every second start is annealed in one way, the others in the other, so that it is the race
that decides. With the 2-norm all lines of a boundary count and not its slowest alone: where every line
differs, a hot grid finds which devices belong together. Elsewhere it finds less (2026-11-28)."""
COOL: tuple[Phase, ...] = ((2, 0.004, 0.002, 0.5), (3, 0.004, 0.001, 0.5))
COLD: tuple[Phase, ...] = ((3, 0.0005, 0.0001, 1.0),)
"""Of the last annealing, after a race and without one: few steps from a start must not go uphill."""
SIDE_BY_SIDE = 16
"""Divisions that are annealed together: then numpy's calls are no longer most of a step."""
SETS: tuple[Phase, ...] = ((1, 0.016, 0.005, 0.6), (2, 0.006, 0.002, 0.3), (3, 0.002, 0.0005, 0.1))
DISTURBED: tuple[Phase, ...] = ((3, 0.008, 0.002, 0.6), (4, 0.002, 0.0005, 0.4))
STEPS = 128
"""Of a disturbance: short, so that most of a good layout stays."""
DISTURBED_FROM = (8, 2)
"""How many of the best layouts are disturbed, at first and last."""
LAST_HEAT = 0.2
"""Of the first, in `anneal`. 0.1 to 0.3 did alike on DT-FM's layouts (2026-11-22)."""
KEPT = 10
"""Swaps that are not undone at once: when the annealing is cool, half of its steps went back and forth."""
REMATCHED = 100
"""Swaps after which pipelines are matched and stages ordered anew, as no swap could."""

SEGMENTS_WEIGHT = 2.4
"""Logarithm of how many pairs of segments each that is looked at stands for; 64 devices in 8 stages have
2,816, of which 256 are."""

MAX_PLACED = 256
"""Clusters whose places are sought; the time grows with their square. More stay as they come."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What a search came to."""

    cost: AdditiveCost
    start_s: float
    """The least cost of a structured start, before any swap."""
    origin: str
    """Which start the answer descends from."""
    turns: int
    """How often a layout was annealed."""


@dataclass(slots=True, eq=False)
class _Member:
    cost: AdditiveCost
    shape: tuple[int, int]
    bands: bool
    phases: Sequence[Phase] = SOFT


def search_additive(
    terms: AdditiveTerms, *, seed: int, budget_s: float, spent_s: Callable[[], float]
) -> Found:
    """A layout of small additive cost.

    Args:
        spent_s: seconds spent so far, by any clock that starts at 0 and never goes back.
    """
    rng = np.random.default_rng(seed)
    begun: dict[float, _Member] = {}
    clusters_of = cache(lambda size: even_clusters(terms.transfer_s, size))
    for made, (shape, bands) in enumerate(_plans(terms)):
        if made >= 2 and spent_s() >= STARTING * budget_s:
            break
        cost = additive_cost(
            terms, clustered_grid(terms, shape, clusters_of(shape[0] * shape[1]), rng, bands=bands)
        )
        begun.setdefault(round(cost.total_s, 9), _Member(cost, shape, bands))
    members = [begun[total_s] for total_s in sorted(begun)]
    start_s, turns, started_s = members[0].cost.total_s, 0, spent_s()
    segments = Segments(terms.stages, terms.replicas, rng) if terms.stages >= 4 else None
    grid = Grid(terms, members[0].cost.grid, segments)

    def until_s(part: float) -> float:
        return started_s + part * (budget_s - started_s)

    def improve(member: _Member, end_s: float, phases: Sequence[Phase]) -> None:
        nonlocal turns
        begun_s = spent_s()

        def share() -> float:
            return (spent_s() - begun_s) / max(end_s - begun_s, 1e-9)

        if begun_s < end_s and grid.size > 1:
            turns += 1
            better = long_anneal(grid, member.cost, rng, share, phases)
            member.cost = min(member.cost, better, key=lambda cost: cost.total_s)

    for member in members[::2]:
        member.phases = HARD
    raced = grid.size <= MAX_RACED
    together: list[_Member] = []
    if raced and terms.stages > 1 and not grid.has_twins:
        together = [replace(members[number % len(members)]) for number in range(SIDE_BY_SIDE)]
        divisions = Divisions(terms, np.array([member.cost.grid for member in together]))
        begun_s = spent_s()
        lasts_s = max(until_s(TOGETHER) - begun_s, 1e-9)
        if anneal_sets(divisions, together, rng, lambda: (spent_s() - begun_s) / lasts_s, SETS):
            for member, stages_SD in zip(together, divisions.stages, strict=True):
                member.cost = additive_cost(terms, stages_SD)
    raced_from_s, entered = spent_s(), members[: ROUNDS[0]]
    race_s = raced * (until_s(RACING if together else DISTURBING) - raced_from_s)
    each_s = max(0.0, race_s) / len(ROUNDS)
    for number, count in enumerate(ROUNDS):
        members = members[:count]
        for place, member in enumerate(members):
            improve(member, raced_from_s + each_s * (number + (place + 1) / len(members)), member.phases)
        members.sort(key=lambda member: member.cost.total_s)
    if together:
        members = sorted([*entered, *together], key=lambda member: member.cost.total_s)
        turns += _disturb(divisions, members, rng, spent_s, until_s(DISTURBING))
    improve(members[0], budget_s, COOL if raced else COLD)
    best = members[0]
    origin = f"clusters of {best.shape[0]} stages × {best.shape[1]} pipelines" + ", banded" * best.bands
    return Found(best.cost, start_s, origin, turns)


def _disturb(
    divisions: Divisions,
    members: list[_Member],
    rng: np.random.Generator,
    spent_s: Callable[[], float],
    until_s: float,
) -> int:
    """Anneal the best `members`, which get sorted, for a few steps again and again; how often."""
    terms, turns, begun_s = divisions.terms, 0, spent_s()
    while (now_s := spent_s()) < until_s:
        first, last = DISTURBED_FROM
        kept = min(len(members), round(first * (last / first) ** ((now_s - begun_s) / (until_s - begun_s))))
        tried = [members[number % kept] for number in range(SIDE_BY_SIDE)]
        divisions.place(np.array([member.cost.grid for member in tried]))
        steps = iter(range(STEPS))

        def share(steps: Iterator[int] = steps) -> float:
            return next(steps, STEPS) / STEPS if spent_s() < until_s else 1.0

        anneal_sets(divisions, tried, rng, share, DISTURBED)
        # Matching in this order of the stages is a fraction of the work, and nearly always says it.
        found_s = costs_in_order_s(terms, divisions.stages)
        for member, stages_SD, cost_s in zip(tried, divisions.stages, found_s, strict=True):
            if cost_s < member.cost.total_s:
                member.cost = min(member.cost, additive_cost(terms, stages_SD), key=lambda cost: cost.total_s)
        members.sort(key=lambda member: member.cost.total_s)
        turns += 1
    return turns


def anneal_sets(
    divisions: Divisions, members: Sequence[_Member], rng: np.random.Generator, share: Callable[[], float],
    phases: Sequence[Phase],
) -> int:  # fmt: skip
    """Anneal divisions together, each by what its layout costs, until `share` is 1; in how many steps."""
    cost_R, begun, steps = np.array([member.cost.total_s for member in members]), 0.0, 0
    for squarings, first, last, part in phases:
        divisions.sharpen(squarings)
        while (done := (share() - begun) / part) < 1.0:
            divisions.step(cost_R * first * (last / first) ** done, rng)
            steps += 1
        begun += part
    return steps


def _plans(terms: AdditiveTerms) -> list[tuple[tuple[int, int], bool]]:
    """The starts (shape, bands) in order: by pipeline, by stage, then all banded ones, which cost little."""
    all_shapes = list(shapes(terms.stages, terms.replicas))
    banded = [(shape, True) for shape in all_shapes if shape[0] < terms.stages]
    return [
        *((shape, False) for shape in all_shapes[:2]),
        *banded,
        *((shape, False) for shape in all_shapes[2:]),
    ]


# --- layouts made by rule ---


def megatron_grid(devices: int, stages: int) -> np.ndarray:
    """[S, D] in the order that the devices were named in: the first D serve stage 0, the next D stage 1.

    This is how Megatron-LM numbers its ranks when tensors are not split: data parallel ranks are neighbours.
    """
    return np.arange(devices).reshape(stages, devices // stages)


def random_grid(devices: int, stages: int, rng: np.random.Generator) -> np.ndarray:
    """[S, D], each device anywhere."""
    return rng.permutation(devices).reshape(stages, devices // stages)


def clustered_grid(
    terms: AdditiveTerms, shape: tuple[int, int], clusters: np.ndarray, rng: np.random.Generator, *,
    bands: bool = False,
) -> np.ndarray:  # fmt: skip
    """[S, D] of clusters that fill blocks of `shape`.

    Args:
        clusters: `even_clusters` of as many devices as a block has.
        bands: put the tightest clusters into the same stages. Else their places are sought on the coarse
            grid, where each cluster is one device.
    """
    (a, b), replicas = shape, terms.replicas
    rows, columns = terms.stages // a, replicas // b
    if bands:
        width = np.array([terms.transfer_s[np.ix_(c, c)].max() for c in clusters])
        clusters = clusters[np.argsort(width, kind="stable")]
    elif rows > 1 and 2 < len(clusters) <= MAX_PLACED:
        clusters = clusters[_coarse_places(terms, clusters, rows, b, rng)]
    blocks = clusters.reshape(rows, columns, a, b)
    return blocks.transpose(0, 2, 1, 3).reshape(terms.stages, replicas)


def _coarse_places(
    terms: AdditiveTerms, clusters: np.ndarray, rows: int, b: int, rng: np.random.Generator
) -> np.ndarray:
    """The clusters in the order of their places, row by row, as a search with means for distances has it."""
    count, size = clusters.shape
    here = np.ix_(clusters.ravel(), clusters.ravel())
    means = [
        price_NN[here].reshape(count, size, count, size).mean(axis=(1, 3))
        for price_NN in (terms.exchange_s * b, terms.transfer_s)
    ]
    for mean_CC in means:
        np.fill_diagonal(mean_CC, 0.0)
    coarse = AdditiveTerms(rows, *means)
    grid = Grid(coarse, random_grid(count, rows, rng))
    for heat in (0.01, 0.0):
        anneal(grid, steps=60, heat_s=heat * coarse.transfer_s.max() * rows, rng=rng)
    return additive_cost(coarse, grid.grid).grid.ravel()


def anneal(grid: Grid, *, steps: int, heat_s: float, rng: np.random.Generator) -> np.ndarray:
    """Swap `steps` times, each time the best of all swaps after a draw of chance has been taken off each.

    With Gumbel draws times `heat_s` this is a draw from all swaps by exp(-change / heat): annealing without a
    rejected step (Bortz, Kalos and Lebowitz's n-fold way). The heat falls to `LAST_HEAT` of itself. Without
    heat it is a descent, which ends where no swap makes the smooth cost smaller.

    Returns the grid of the least `cost_s` on the way, in which `grid` is left.
    """
    best_s, best_SD = grid.cost_s(), grid.grid
    size = grid.size
    draws = _gumbel(rng, size) if heat_s else None
    smooth_s = grid.smooth_s()
    for step in range(steps):
        pairs = drawn(grid, heat_s * LAST_HEAT ** (step / steps), draws, rng)
        if not pairs:
            break
        grid.swap_all(pairs)
        if not heat_s:
            after_s = grid.smooth_s()
            if not after_s < smooth_s * (1 - 1e-6):
                grid.swap_all(pairs[::-1])
                break
            smooth_s = after_s
        cost_s = grid.cost_s()
        if cost_s < best_s:
            best_s, best_SD = cost_s, grid.grid
    grid.place(best_SD)
    return best_SD


def long_anneal(
    grid: Grid, start: AdditiveCost, rng: np.random.Generator, share: Callable[[], float],
    phases: Sequence[Phase],
) -> AdditiveCost:  # fmt: skip
    """The best layout of one annealing in phases that lasts until `share` of its time is 1."""
    terms, best, step, begun = grid.terms, start, 0, 0.0
    kept: deque[tuple[int, int]] = deque(maxlen=min(KEPT, grid.size // 4))
    grid.place(start.grid)
    draws = _gumbel(rng, grid.size)
    for squarings, first, last, part in phases:
        if share() >= begun + part:
            begun += part
            continue
        grid.sharpen(squarings)
        least_s, least_SD = grid.cost_s(), grid.grid
        while (done := (share() - begun) / part) < 1.0:
            step += 1
            pairs = drawn(grid, start.total_s * first * (last / first) ** done, draws, rng, kept)
            if not pairs:
                break
            kept.append(pairs[0])
            grid.swap_all(pairs)
            cost_s = grid.cost_s()
            if cost_s < least_s:
                least_s, least_SD = cost_s, grid.grid
            if step % REMATCHED == 0:
                matched = additive_cost(terms, grid.grid)
                best = min(best, matched, key=lambda cost: cost.total_s)
                if matched.total_s < cost_s * (1 - 1e-9):
                    grid.place(matched.grid)
            if step % (10 * REMATCHED) == 0:
                draws = _gumbel(rng, grid.size)
        best = min(best, additive_cost(terms, least_SD), key=lambda cost: cost.total_s)
        begun += part
    return best


def drawn(
    grid: Grid, heat_s: float, draws: np.ndarray | None, rng: np.random.Generator,
    kept: Iterable[tuple[int, int]] = (),
) -> list[tuple[int, int]]:  # fmt: skip
    """The positions that change places in one step: two, or those of two segments. None: all are twins.

    `kept`: pairs that do not.
    """
    change_NN, size = grid.changes_s(), grid.size
    for pair in kept:
        change_NN[pair] = np.inf
    if draws is not None:
        offset = int(rng.integers(0, len(draws) - size * size + 1))
        change_NN += np.float32(heat_s) * draws[offset : offset + size * size].reshape(size, size)
    i, j = divmod(int(change_NN.argmin()), size)
    if not change_NN[i, j] < np.inf:
        return []
    if draws is not None and grid.segments is not None:
        offset = int(rng.integers(0, len(draws) - LOOKED_AT + 1))
        chunk = offset % (KNOWN // LOOKED_AT)
        change_m = grid.segment_changes_s(chunk)
        change_m += np.float32(heat_s) * (
            draws[offset : offset + len(change_m)] - np.float32(SEGMENTS_WEIGHT)
        )
        best = int(change_m.argmin())
        if change_m[best] < change_NN[i, j]:
            return grid.segments.swaps(chunk * LOOKED_AT + best)
    return [(i, j)]


def _gumbel(rng: np.random.Generator, size: int) -> np.ndarray:
    """Negative Gumbel draws, a few thousand more than one step needs: steps start at different places."""
    exponential = rng.standard_exponential(size * size + 65_536, dtype=np.float32)
    return np.log(np.maximum(exponential, np.float32(1e-30)))
