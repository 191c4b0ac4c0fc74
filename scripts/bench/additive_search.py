"""The search for a layout of small additive cost (DT-FM's objective): starts, then long annealing.

Deterministic: the seed, and what the caller's clock says, decide everything. Anytime: whenever the clock is
past the budget the best so far is the answer, and that is never worse than the structured starts that were
looked at, of which the first two (by pipeline and by stage) always are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from scripts.bench.additive_grid import Grid
from scripts.bench.additive_objective import AdditiveCost, AdditiveTerms, additive_cost
from swarm.plan.clusters import even_clusters, shapes

STARTING = 0.5
"""Part of the budget after which no more starts are made; it matters to a thousand devices only."""
HEAT, LAST_HEAT = 0.015, 0.001
"""Of annealing, at its beginning and end, in parts of the cost that it begins with."""
HOTTER = 0.15
"""Of every other annealing: optima of wild prices may resemble no start."""
SWEEPS = 1000
"""Swaps for each device in one annealing, if there is time. One long annealing finds more than many short
ones (2026-11-24): 64 devices have time for one in ten seconds."""
REMATCHED = 100
"""Swaps after which pipelines are matched and stages ordered anew, as no swap could."""
MAX_PLACED = 256
"""Clusters whose places are sought; the time grows with their square. More stay as they come."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What a search came to."""

    cost: AdditiveCost
    start_s: float
    """The least cost of a structured start, before any swap."""
    turns: int
    """How often it was annealed."""


def search_additive(
    terms: AdditiveTerms, *, seed: int, budget_s: float, spent_s: Callable[[], float]
) -> Found:
    """A layout of small additive cost.

    Args:
        spent_s: seconds spent so far, by any clock that starts at 0 and never goes back.
    """
    rng = np.random.default_rng(seed)
    starts: list[AdditiveCost] = []
    for shape, bands in _plans(terms):
        if len(starts) >= 2 and spent_s() >= STARTING * budget_s:
            break
        starts.append(additive_cost(terms, clustered_grid(terms, shape, rng, bands=bands)))
    starts.sort(key=lambda cost: cost.total_s)
    best, turns = starts[0], 0
    while spent_s() < budget_s and terms.stages * terms.replicas > 1:
        begun_s, start = spent_s(), starts[turns % len(starts)]

        def progress(step: int, begun_s: float = begun_s) -> float:
            by_time = (spent_s() - begun_s) / (budget_s - begun_s)
            return max(by_time, step / (SWEEPS * len(terms.exchange_s)))

        heat_s = start.total_s * (HEAT if turns % 2 == 0 else HOTTER)
        found = anneal(Grid(terms, start.grid), heat_s, rng, progress)
        best = min(best, found, key=lambda cost: cost.total_s)
        turns += 1
    return Found(best, starts[0].total_s, turns)


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
    terms: AdditiveTerms, shape: tuple[int, int], rng: np.random.Generator, *, bands: bool = False
) -> np.ndarray:
    """[S, D] of clusters that fill blocks of `shape`.

    Args:
        bands: put the tightest clusters into the same stages. Else their places are sought on the coarse
            grid, where each cluster is one device.
    """
    (a, b), replicas = shape, terms.replicas
    clusters = even_clusters(terms.transfer_s, a * b)
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
    found = anneal(grid, 0.01 * coarse.transfer_s.max() * rows, rng, lambda step: step / 120)
    return found.grid.ravel()


def anneal(
    grid: Grid, heat_s: float, rng: np.random.Generator, progress: Callable[[int], float]
) -> AdditiveCost:
    """Swap until `progress` is 1, each time the best of all swaps after a draw of chance has been taken off
    each; the best layout that was met.

    With Gumbel draws times `heat_s` this is a draw from all swaps by exp(-change / heat): annealing without a
    rejected step (Bortz, Kalos and Lebowitz's n-fold way). The heat falls by `LAST_HEAT` ÷ `HEAT`.

    Args:
        progress: how much of the annealing is over after so many swaps, 0 to 1.
    """
    terms, size, step = grid.terms, grid.size, 0
    best = additive_cost(terms, grid.grid)
    draws = _gumbel(rng, size)
    while (done := progress(step)) < 1.0:
        step += 1
        change_NN = grid.changes_s()
        offset = int(rng.integers(0, len(draws) - size * size + 1))
        noise_NN = draws[offset : offset + size * size].reshape(size, size)
        change_NN += np.float32(heat_s * (LAST_HEAT / HEAT) ** done) * noise_NN
        i, j = divmod(int(change_NN.argmin()), size)
        if not change_NN[i, j] < np.inf:
            break  # all are twins
        grid.swap(i, j)
        if step % REMATCHED == 0 or grid.cost_s() < best.total_s:
            matched = additive_cost(terms, grid.grid)
            best = min(best, matched, key=lambda cost: cost.total_s)
            if matched.total_s < grid.cost_s() * (1 - 1e-9):
                grid.place(matched.grid)
        if step % (10 * REMATCHED) == 0:
            draws = _gumbel(rng, size)
    return best


def _gumbel(rng: np.random.Generator, size: int) -> np.ndarray:
    """Negative Gumbel draws, a few thousand more than one step needs: steps start at different places."""
    exponential = rng.standard_exponential(size * size + 65_536, dtype=np.float32)
    return np.log(np.maximum(exponential, np.float32(1e-30)))
