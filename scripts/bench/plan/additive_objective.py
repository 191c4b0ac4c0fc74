"""The additive objective, for comparison: seconds of a step if nothing overlaps.

DT-FM: Yuan et al., Decentralized Training of Foundation Models in Heterogeneous Environments, NeurIPS 2022,
section 3.

Computing takes no time, and each stage has the same number of devices, D.

    data parallel     2 · (latency + gradient / (bandwidth · D)) for a pair; a device's are added up over its
                      stage, the slowest device of all stages counts
    pipeline          latency + activation / bandwidth for a pair; between two stages, the slowest pair of the
                      best one-to-one matching counts; added up along the best order of the stages
    total             data parallel + 2 · pipeline (forward and backward)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from scipy.optimize import linear_sum_assignment

from swarm.errors import SetupError
from swarm.plan.network import Network

MAX_EXACT_STAGES = 12
"""Beyond it the best order of stages is sought, not proved: the exact tables double with each stage."""


@dataclass(frozen=True, slots=True, eq=False)
class AdditiveTerms:
    """The two prices of every pair of devices. Symmetric, with zeros on the diagonal."""

    stages: int
    exchange_s: np.ndarray
    """[N, N] seconds of gradient exchange between two members of one stage, there and back."""
    transfer_s: np.ndarray
    """[N, N] seconds of one way of the activations between two neighbours in a pipeline."""

    def __post_init__(self) -> None:
        devices = len(self.exchange_s)
        if self.exchange_s.shape != (devices, devices) or self.transfer_s.shape != (devices, devices):
            raise SetupError(
                f"prices of {list(self.exchange_s.shape)} and {list(self.transfer_s.shape)} pairs: "
                "both must be of every device with every device"
            )
        if self.stages < 1 or devices < self.stages:
            raise SetupError(f"{devices} devices cannot serve {self.stages} stages: each needs at least one")
        if devices % self.stages:
            raise SetupError(
                f"{devices} devices do not divide into {self.stages} stages of equal size, "
                "which the additive objective is about"
            )

    @property
    def replicas(self) -> int:
        """D: devices of each stage."""
        return len(self.exchange_s) // self.stages


def additive_terms(
    network: Network, *, stages: int, gradient_bytes: float, activation_bytes: float
) -> AdditiveTerms:
    """The prices of a network's pairs; of a pair with two speeds the slower counts.

    Args:
        gradient_bytes: of one stage; each member of D is sent its D-th part.
        activation_bytes: what one step sends over one boundary, of one pipeline.
    """
    for what, nbytes in (("gradient", gradient_bytes), ("activation", activation_bytes)):
        if not 0 <= nbytes < np.inf:
            raise SetupError(f"{nbytes:g} {what} bytes: they cannot be negative or infinite")
    latency_NN, bandwidth_NN = network.pairs()
    seconds_per_byte_NN = 8.0 / np.minimum(bandwidth_NN, bandwidth_NN.T)
    replicas = max(1, len(network) // max(1, stages))
    exchange_NN = 2.0 * (latency_NN + gradient_bytes * seconds_per_byte_NN / replicas)
    transfer_NN = latency_NN + activation_bytes * seconds_per_byte_NN
    for price_NN in (exchange_NN, transfer_NN):
        np.fill_diagonal(price_NN, 0.0)
    return AdditiveTerms(stages, exchange_NN, transfer_NN)


@dataclass(frozen=True, slots=True, eq=False)
class AdditiveCost:
    """What a division into stages costs, and the layout that has this cost."""

    exchange_s: float
    """Data parallel: of the slowest device."""
    transfer_s: float
    """Pipeline: one way, along all boundaries."""
    grid: np.ndarray
    """[S, D] device of each stage (rows, in the best order) and pipeline (columns, matched best)."""

    @property
    def total_s(self) -> float:
        return self.exchange_s + 2.0 * self.transfer_s


def additive_cost(terms: AdditiveTerms, grid_SD: np.ndarray) -> AdditiveCost:
    """The cost of the stages that are the rows of `grid_SD`, whatever the order of rows and columns."""
    stages, replicas = grid_SD.shape
    a_P, b_P = np.triu_indices(stages, 1)
    slowest_SS, pair_SS = np.zeros((stages, stages)), np.zeros((stages, stages), dtype=np.int64)
    slowest_P, to_PD = bottleneck_matchings(terms.transfer_s[grid_SD[a_P][:, :, None], grid_SD[b_P][:, None]])
    slowest_SS[a_P, b_P] = slowest_SS[b_P, a_P] = slowest_P
    pair_SS[a_P, b_P] = pair_SS[b_P, a_P] = np.arange(len(a_P))
    transfer_s, order = shortest_open_path(slowest_SS)
    columns_D = np.arange(replicas)
    rows = [grid_SD[order[0]]]
    for a, b in pairwise(order):
        to_D = to_PD[pair_SS[a, b]]
        columns_D = (to_D if a < b else np.argsort(to_D))[columns_D]
        rows.append(grid_SD[b][columns_D])
    return AdditiveCost(float(exchanges_s(terms, grid_SD[None])[0]), transfer_s, np.array(rows))


def exchanges_s(terms: AdditiveTerms, stages_RSD: np.ndarray) -> np.ndarray:
    """[R] seconds of the slowest device of each division."""
    return terms.exchange_s[stages_RSD[..., None], stages_RSD[:, :, None]].sum(axis=3).max(axis=(1, 2))


def costs_in_order_s(terms: AdditiveTerms, stages_RSD: np.ndarray) -> np.ndarray:
    """[R] as `additive_cost` of each division with its stages in this order."""
    price_RBDD = terms.transfer_s[stages_RSD[:, :-1, :, None], stages_RSD[:, 1:, None]]
    slowest_K, _ = bottleneck_matchings(price_RBDD.reshape(-1, *price_RBDD.shape[2:]))
    return exchanges_s(terms, stages_RSD) + 2.0 * slowest_K.reshape(price_RBDD.shape[:2]).sum(axis=1)


def bottleneck_matchings(price_KDD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The perfect matchings whose largest price is smallest: [K] that price, [K, D] the column of each row.

    A matching that minimises the sum of high powers is nearly always it; what is left is proved by asking for
    one without any price that high.
    """
    rows_D = np.arange(price_KDD.shape[1])
    power_KDD = price_KDD / np.maximum(price_KDD.max(axis=(1, 2), keepdims=True), 1e-300)
    for _ in range(3):
        power_KDD *= power_KDD
    columns_KD = np.empty(price_KDD.shape[:2], dtype=np.int64)
    for k, power_DD in enumerate(power_KDD):
        columns_KD[k] = linear_sum_assignment(power_DD)[1]
    value_K = np.take_along_axis(price_KDD, columns_KD[:, :, None], axis=2).max(axis=(1, 2))
    least_K = np.maximum(price_KDD.min(axis=1).max(axis=1), price_KDD.min(axis=2).max(axis=1))
    for k in np.flatnonzero(value_K > least_K):
        while value_K[k] > least_K[k]:
            too_much_DD = price_KDD[k] >= value_K[k]
            other_D = linear_sum_assignment(too_much_DD)[1]
            if too_much_DD[rows_D, other_D].any():
                break
            columns_KD[k], value_K[k] = other_D, price_KDD[k, rows_D, other_D].max()
    return value_K, columns_KD


def shortest_open_path(length_SS: np.ndarray) -> tuple[float, list[int]]:
    """The order of all nodes with the shortest way from the first to the last, both free.

    Exact (Held and Karp) up to `MAX_EXACT_STAGES` nodes; beyond, insertion and 2-opt, which may miss it.
    """
    nodes = len(length_SS)
    if nodes > MAX_EXACT_STAGES:
        return _short_open_path(length_SS)
    best = np.full((1 << nodes, nodes), np.inf)
    last_S = np.arange(nodes)
    best[1 << last_S, last_S] = 0.0
    for count in range(1, nodes):
        sets_SX = _subsets(nodes, count)
        added_SX = (best[sets_SX] + length_SS.T[:, None]).min(axis=2)
        best[sets_SX | (1 << last_S)[:, None], last_S[:, None]] = added_SX
    visited = (1 << nodes) - 1
    order = [int(best[visited].argmin())]
    total = float(best[visited, order[0]])
    while len(order) < nodes:
        visited ^= 1 << order[-1]
        order.append(int((best[visited] + length_SS[:, order[-1]]).argmin()))
    return total, order[::-1]


@lru_cache(maxsize=128)
def _subsets(nodes: int, count: int) -> np.ndarray:
    """[S, X] all sets (as bits) of `count` out of `nodes` nodes, without each one of these."""
    every = [s for s in range(1 << nodes) if s.bit_count() == count]
    return np.array([[s for s in every if not s >> without & 1] for without in range(nodes)], dtype=np.int64)


def _short_open_path(length_SS: np.ndarray) -> tuple[float, list[int]]:
    nodes = len(length_SS)
    best: tuple[float, list[int]] | None = None
    spread = np.argsort(length_SS.sum(axis=1), kind="stable")
    for first in dict.fromkeys([*spread[-4:].tolist(), *spread[:2].tolist()]):
        order, left = [int(first)], set(range(nodes)) - {int(first)}
        while left:
            order.append(min(left, key=lambda node: (length_SS[order[-1], node], node)))
            left.remove(order[-1])
        _two_opt(order, length_SS)
        total = float(length_SS[order[:-1], order[1:]].sum())
        if best is None or total < best[0]:
            best = total, order
    assert best is not None
    return best


def _two_opt(order: list[int], length_SS: np.ndarray) -> None:
    """Turn pieces round while the way gets shorter. A free end is an edge of length 0 to nowhere."""
    nodes = len(order)
    padded = np.zeros((nodes + 1, nodes + 1))
    padded[:nodes, :nodes] = length_SS
    for _ in range(10 * nodes):
        tour = np.array([nodes, *order, nodes])
        here = padded[tour[:-1], tour[1:]]
        # Edges i and j (i < j) are replaced: what lies between them is turned round.
        change = (
            padded[tour[:-1][:, None], tour[:-1][None]]
            + padded[tour[1:][:, None], tour[1:][None]]
            - here[:, None]
            - here[None]
        )
        change[np.tri(nodes + 1, dtype=bool)] = 0.0
        i, j = divmod(int(change.argmin()), nodes + 1)
        if change[i, j] > -1e-12:
            return
        order[i:j] = order[i:j][::-1]
