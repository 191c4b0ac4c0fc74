"""Starts of the search that keep near devices together: clusters in blocks of stages × pipelines.

A start cuts the devices into clusters of a · b near ones and gives each cluster `a` consecutive stages of `b`
pipelines. `a = 1` keeps a stage's members together (cheap exchange), `b = 1` a pipeline's (cheap transfers);
what lies between is often better than both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

import numpy as np

from swarm.plan.network import Job, Network

MAX_PLACED = 8
"""Clusters whose places are sought; the time grows with their square. More stay in order of their width."""
RANDOM_ORDERS = 8
"""From which places are sought, besides the order of width."""
MAX_SWAPS = 300
"""Of one clustering. 64 devices need fewer than 40; with 1024 it is a second."""


def clustered_layouts(
    network: Network, job: Job, cost_s: Callable[[np.ndarray], float], rng: np.random.Generator
) -> Iterator[tuple[str, np.ndarray]]:
    """(shape, [N] stages) of every shape, if the devices divide evenly into stages.

    The tightest clusters come into the same stages; a few change places as long as that makes `cost_s` less.
    """
    stages, replicas = job.stages, len(network) // job.stages
    bandwidth_NN = network.bandwidth_matrix_bps()
    near_NN = 8.0 * max(job.forward_bytes, default=0.0) / np.minimum(bandwidth_NN, bandwidth_NN.T)
    near_NN += network.latency_matrix_s()
    np.fill_diagonal(near_NN, 0.0)
    for a, b in shapes(stages, replicas):
        if a * b == 1:
            continue
        clusters = even_clusters(near_NN, a * b)
        width = np.array([near_NN[np.ix_(c, c)].max() for c in clusters])

        def layout(order: np.ndarray, a: int = a, b: int = b, clusters: np.ndarray = clusters) -> np.ndarray:
            blocks = clusters[order].reshape(stages // a, replicas // b, a, b)
            of_N = np.empty(len(network), dtype=np.int64)
            of_N[blocks.transpose(0, 2, 1, 3).ravel()] = np.arange(len(network)) // replicas
            return of_N

        yield f"clusters {a} × {b}", layout(_placed(np.argsort(width, kind="stable"), layout, cost_s, rng))


def _placed(
    order: np.ndarray,
    layout: Callable[[np.ndarray], np.ndarray],
    cost_s: Callable[[np.ndarray], float],
    rng: np.random.Generator,
) -> np.ndarray:
    """The clusters in a cheap order, which no swap of two improves; `order` if they are many."""
    if not 2 < len(order) <= MAX_PLACED:
        return order
    found: list[tuple[float, np.ndarray]] = []
    for start in (order, *(rng.permutation(order) for _ in range(RANDOM_ORDERS))):
        best, best_s, improved = start, cost_s(layout(start)), True
        while improved:
            improved = False
            for i, j in combinations(range(len(order)), 2):
                swapped = best.copy()
                swapped[[i, j]] = best[[j, i]]
                swapped_s = cost_s(layout(swapped))
                if swapped_s < best_s * (1 - 1e-9):
                    best, best_s, improved = swapped, swapped_s, True
        found.append((best_s, best))
    return min(found, key=lambda one: one[0])[1]


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
    for _ in range(MAX_SWAPS):
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
