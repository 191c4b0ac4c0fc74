"""Layouts made by rule: the two baselines, and the structured starts of the search.

A start cuts the devices into clusters of a · b near ones and gives each cluster `a` consecutive stages of `b`
pipelines. `a = 1` keeps a stage's members together (cheap exchange), `b = 1` a pipeline's (cheap transfers);
what lies between is often better than both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from swarm.plan.additive_grid import Grid
from swarm.plan.objectives import AdditiveTerms, additive_cost

LAST_HEAT = 0.2
"""Of the first. 0.1 to 0.3 did alike on DT-FM's layouts (2026-11-22)."""

MAX_PLACED = 256
"""Clusters whose places are sought; the time grows with their square. More stay as they come."""

MAX_CLUSTER_SWAPS = 300
"""Of one clustering. 64 devices need fewer than 40; with 1024 it is a second."""


def megatron_grid(devices: int, stages: int) -> np.ndarray:
    """[S, D] in the order that the devices were named in: the first D serve stage 0, the next D stage 1.

    This is how Megatron-LM numbers its ranks when tensors are not split: data parallel ranks are neighbours.
    """
    return np.arange(devices).reshape(stages, devices // stages)


def random_grid(devices: int, stages: int, rng: np.random.Generator) -> np.ndarray:
    """[S, D], each device anywhere."""
    return rng.permutation(devices).reshape(stages, devices // stages)


def shapes(stages: int, replicas: int) -> Iterator[tuple[int, int]]:
    """All (a, b) that divide the grid: by pipeline (b = 1) and by stage (a = 1) first, then the others."""
    tall = [a for a in range(stages, 0, -1) if stages % a == 0]
    wide = [b for b in range(replicas, 0, -1) if replicas % b == 0]
    yield stages, 1
    yield 1, replicas
    for a in tall:
        for b in wide:
            if (a, b) not in ((stages, 1), (1, replicas), (stages, replicas)):
                yield a, b


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


def even_clusters(near_NN: np.ndarray, size: int) -> np.ndarray:
    """[N / size, size] devices in clusters of one size, with small distances inside.

    Each cluster grows around the device that is farthest from all that are left; then pairs of devices change
    clusters while that makes the sum of the inner distances smaller (Kernighan and Lin's exchange, without
    their look-ahead).
    """
    devices = len(near_NN)
    count = devices // size
    if size in (1, devices):
        return np.arange(devices).reshape(count, size)
    of_N = np.empty(devices, dtype=np.int64)
    left_N = np.ones(devices, dtype=bool)
    remote_N = near_NN.sum(axis=1)
    for cluster in range(count):
        seed = int(np.where(left_N, remote_N, -1.0).argmax())
        members = [seed]
        left_N[seed] = False
        distance_N = near_NN[seed].copy()
        while len(members) < size:
            nearest = int(np.where(left_N, distance_N, np.inf).argmin())
            members.append(nearest)
            left_N[nearest] = False
            distance_N += near_NN[nearest]
        of_N[members] = cluster
        remote_N -= near_NN[:, members].sum(axis=1)
    to_NC = np.stack([near_NN[:, of_N == cluster].sum(axis=1) for cluster in range(count)], axis=1)
    every = np.arange(devices)
    for _ in range(MAX_CLUSTER_SWAPS):
        there_NN = to_NC[:, of_N] - to_NC[every, of_N][:, None]
        change_NN = there_NN + there_NN.T - 2.0 * near_NN
        change_NN[of_N[:, None] == of_N] = 0.0
        i, j = divmod(int(change_NN.argmin()), devices)
        if change_NN[i, j] > -1e-9 * near_NN[i].sum():
            break
        ci, cj = of_N[i], of_N[j]
        to_NC[:, ci] += near_NN[:, j] - near_NN[:, i]
        to_NC[:, cj] += near_NN[:, i] - near_NN[:, j]
        of_N[i], of_N[j] = cj, ci
    return np.argsort(of_N, kind="stable").reshape(count, size)


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
        change_NN = grid.changes_s()
        if draws is not None:
            offset = int(rng.integers(0, len(draws) - size * size + 1))
            noise_NN = draws[offset : offset + size * size].reshape(size, size)
            change_NN += np.float32(heat_s * LAST_HEAT ** (step / steps)) * noise_NN
        i, j = divmod(int(change_NN.argmin()), size)
        if not change_NN[i, j] < np.inf:
            break  # all are twins
        grid.swap(i, j)
        if not heat_s:
            after_s = grid.smooth_s()
            if not after_s < smooth_s * (1 - 1e-6):
                grid.swap(i, j)
                break
            smooth_s = after_s
        cost_s = grid.cost_s()
        if cost_s < best_s:
            best_s, best_SD = cost_s, grid.grid
    grid.place(best_SD)
    return best_SD


def _gumbel(rng: np.random.Generator, size: int) -> np.ndarray:
    """Negative Gumbel draws, a few thousand more than one step needs: steps start at different places."""
    exponential = rng.standard_exponential(size * size + 65_536, dtype=np.float32)
    return np.log(np.maximum(exponential, np.float32(1e-30)))
