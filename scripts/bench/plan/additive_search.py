"""The search for a layout of small additive cost (DT-FM's objective): starts, then an evolution of the best.

Deterministic: the seed, and what the caller's clock says, decide everything. Anytime: whenever the clock is
past the budget the best so far is the answer, and that is never worse than the structured starts that were
looked at, of which the first two (by pipeline and by stage) always are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from scripts.bench.plan.additive_grid import KNOWN, LOOKED_AT, Grid, Segments
from scripts.bench.plan.additive_objective import AdditiveCost, AdditiveTerms, additive_cost
from swarm.plan.search import even_clusters, shapes

POPULATION = 10
NEWCOMERS = 0.3
"""Part of the evolution's turns that go to a new start instead of a member."""
STARTING = 0.5
"""Part of the budget after which no more starts are made; it matters to a thousand devices only."""
BLURS = (0.05, 0.15, 0.3)
"""Of distances, for a new start to be another one; see `clustered_grid`."""
HOPELESS = 1.5
"""A new start that costs so many times the best is not improved."""
MIN_HEAT, MAX_HEAT = 0.003, 0.03
"""Of annealing, in parts of the best cost. Outside nothing was found on DT-FM's layouts (2026-11-22)."""
HOT, HOTTER = 0.1, 10.0
"""One turn in ten starts anywhere, ten times as hot: optima of wild prices may resemble no start."""
MIN_STEPS, FIRST_STEPS, MORE_STEPS, MAX_STEPS = 200, 400, 40, 2500
"""Of one annealing: the most are `FIRST_STEPS`, and `MORE_STEPS` more each turn. Long ones find more where
every line differs, but take their time from the others: with 500 to 2500 from the beginning, and fewer
newcomers, one jittered layout of DT-FM's was 2 to 5 % cheaper after 10 s, another 2 to 3 % dearer
(2026-11-22)."""
LAST_HEAT = 0.2
"""Of the first. 0.1 to 0.3 did alike on DT-FM's layouts (2026-11-22)."""
DESCENDING, EVOLVING, HOT_ANNEALING = 0.3, 0.5, 0.85
"""Parts of the budget after which starts are not improved any more, the evolution ends, and the long
annealing that starts hot. The rest is a cooler one of the best."""
LONG = ((1, 0.016, 0.008, 0.4), (2, 0.012, 0.003, 0.5), (3, 0.003, 0.001, 0.1))
LONG_COOL = ((2, 0.004, 0.002, 0.5), (3, 0.004, 0.001, 0.5))
"""Of these annealings: squarings of the norm, heat at first and at last, part of the time. With the 2-norm
all lines of a boundary count and not its slowest alone, so that a hot grid still finds which devices belong
together (2026-11-27)."""
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
    for shape, bands in _plans(terms):
        if len(members) >= 2 and spent_s() >= STARTING * budget_s:
            break
        cost = additive_cost(terms, clustered_grid(terms, shape, rng, bands=bands))
        members.append(_Member(cost.total_s, cost, shape, bands))
    members.sort(key=lambda member: member.total_s)
    start_s = members[0].total_s
    segments = Segments(terms.stages, terms.replicas, rng) if terms.stages >= 4 else None
    grid = Grid(terms, members[0].cost.grid, segments)
    for member in members:
        if spent_s() >= DESCENDING * budget_s or member.total_s > HOPELESS * start_s:
            break
        grid.place(member.cost.grid)
        better = additive_cost(terms, anneal(grid, steps=grid.size, heat_s=0.0, rng=rng, stop=over))
        if better.total_s < member.total_s:
            member.total_s, member.cost = better.total_s, better
    members = _best_of(members)
    turns = 0
    while spent_s() < EVOLVING * budget_s and terms.stages * terms.replicas > 1:
        turns += 1
        _evolve(terms, grid, members, rng, over, min(MAX_STEPS, FIRST_STEPS + MORE_STEPS * turns))
        members = _best_of(members)
    for until, phases in ((HOT_ANNEALING, LONG), (1.0, LONG_COOL)):
        if not over() and terms.stages * terms.replicas > 1:
            begun_s, until_s = spent_s(), until * budget_s

            def share(begun_s: float = begun_s, until_s: float = until_s) -> float:
                return (spent_s() - begun_s) / max(until_s - begun_s, 1e-9)

            better = long_anneal(grid, members[0].cost, rng, share, phases)
            members[0].cost = min(members[0].cost, better, key=lambda cost: cost.total_s)
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
    most_steps: int,
) -> None:
    """One turn: a member is annealed and takes its own place if better, or a new start joins."""
    best_s = members[0].total_s
    heat_s = best_s * math.exp(rng.uniform(math.log(MIN_HEAT), math.log(MAX_HEAT)))
    hot = rng.random() < HOT
    if hot or rng.random() < NEWCOMERS:
        like = members[int(len(members) * rng.random() * rng.random())]
        blur = float(rng.choice(BLURS))
        if hot:
            start = additive_cost(terms, random_grid(grid.size, terms.stages, rng))
            heat_s *= HOTTER
        else:
            start = additive_cost(terms, clustered_grid(terms, like.shape, rng, bands=like.bands, blur=blur))
        if not hot and start.total_s > HOPELESS * best_s:
            return
        grid.place(start.grid)
        found = additive_cost(terms, anneal(grid, steps=MIN_STEPS, heat_s=heat_s, rng=rng, stop=over))
        found = min(start, found, key=lambda c: c.total_s)
        if all(abs(found.total_s - member.total_s) > 1e-9 * best_s for member in members):
            members.append(_Member(found.total_s, found, like.shape, like.bands))
        return
    member = members[int(len(members) * rng.random() ** 2)]
    steps = int(math.exp(rng.uniform(math.log(MIN_STEPS), math.log(most_steps))))
    grid.place(member.cost.grid)
    found = additive_cost(terms, anneal(grid, steps=steps, heat_s=heat_s, rng=rng, stop=over))
    if found.total_s < member.total_s:
        member.total_s, member.cost = found.total_s, found


def _best_of(members: list[_Member]) -> list[_Member]:
    return sorted(members, key=lambda member: member.total_s)[:POPULATION]


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
    terms: AdditiveTerms, shape: tuple[int, int], rng: np.random.Generator, *, bands: bool = False,
    blur: float = 0.0,
) -> np.ndarray:  # fmt: skip
    """[S, D] of clusters that fill blocks of `shape`.

    Args:
        bands: put the tightest clusters into the same stages. Else their places are sought on the coarse
            grid, where each cluster is one device.
        blur: how far (standard deviation of a logarithm) distances are changed by chance before clustering.
    """
    (a, b), replicas = shape, terms.replicas
    near_NN = terms.transfer_s
    if blur:
        factor_NN = np.exp(blur * rng.standard_normal(near_NN.shape))
        near_NN = near_NN * np.sqrt(factor_NN * factor_NN.T)
    clusters = even_clusters(near_NN, a * b)
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


def anneal(
    grid: Grid,
    *,
    steps: int,
    heat_s: float,
    rng: np.random.Generator,
    stop: Callable[[], bool] = lambda: False,
) -> np.ndarray:
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
        if stop():
            break
        pairs = _drawn(grid, heat_s * LAST_HEAT ** (step / steps), draws, rng)
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
    phases: Sequence[tuple[int, float, float, float]],
) -> AdditiveCost:  # fmt: skip
    """The best layout of one annealing in phases such as `LONG` that lasts until `share` of its time is 1."""
    terms, best, step, begun = grid.terms, start, 0, 0.0
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
            pairs = _drawn(grid, start.total_s * first * (last / first) ** done, draws, rng)
            if not pairs:
                break
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


def _drawn(
    grid: Grid, heat_s: float, draws: np.ndarray | None, rng: np.random.Generator
) -> list[tuple[int, int]]:
    """The positions that change places in one step: two, or those of two segments. None: all are twins."""
    change_NN, size = grid.changes_s(), grid.size
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
