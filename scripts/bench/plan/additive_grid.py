"""The additive objective of a grid, stage by pipeline, and of all grids that are one swap away.

A grid's rows are stages and its columns pipelines, so the slowest pair of a boundary is a maximum over
columns and no matching is needed while searching;
`additive_objective.additive_cost` orders rows and columns afterwards.

Maxima make plains: most swaps change no maximum. The search therefore looks at a *smooth* cost in which each
maximum over columns or stages is an 8-norm, and whose changes by all N²/2 swaps are a few dozen operations on
[N, N] arrays. It only guides, so it is kept in single precision, in units of the largest price. Matrices are
kept in the order of the grid, so that a stage is a slice: position `s · D + d` is stage `s` of pipeline `d`.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided

from scripts.bench.plan.additive_objective import AdditiveTerms

LONGEST = 4
"""Stages of a segment that is exchanged for another."""
KNOWN, LOOKED_AT = 8192, 256
"""Pairs of segments that are drawn once, and that are looked at in a step."""

_INF, _ZERO = np.float32(np.inf), np.float32(0.0)


def _swap_rows(matrix: np.ndarray, i: int, j: int) -> None:
    kept = matrix[i].copy()
    matrix[i] = matrix[j]
    matrix[j] = kept


class Segments:
    """Exchanges of segments of two pipelines, drawn by chance: 2 to `LONGEST` stages of one with as many
    others of another or the same, in the same order or turned round. So devices that are near one another
    move together, where one after the other would first lose the lines between them.

    Kept as the places to look at in a grid's matrices, whatever grid it is. M exchanges.
    """

    def __init__(self, stages: int, replicas: int, rng: np.random.Generator) -> None:
        size, count, every_S1 = stages * replicas, KNOWN, np.arange(stages)[:, None]
        length_M = rng.integers(2, min(LONGEST, stages // 2) + 1, count)
        first_M = rng.integers(0, stages - 2 * length_M + 1)
        # So many stages that lie between the two segments, of those that are left.
        second_M = first_M + length_M + rng.integers(0, stages - 2 * length_M - first_M + 1)
        x_M, y_M = rng.integers(0, replicas, (2, count))
        turned_M = rng.random(count) < 0.5

        def inside(begin_M: np.ndarray) -> np.ndarray:
            return (every_S1 >= begin_M) & (every_S1 < begin_M + length_M)

        def came_from(here_M: np.ndarray, there_M: np.ndarray) -> np.ndarray:
            place_SM = every_S1 - here_M
            return there_M + np.where(turned_M, length_M - 1 - place_SM, place_SM)

        in_first_SM, in_second_SM = inside(first_M), inside(second_M)
        new_first_SM = came_from(first_M, second_M) * replicas + y_M
        new_second_SM = came_from(second_M, first_M) * replicas + x_M
        x_SM = np.where(in_first_SM, new_first_SM, every_S1 * replicas + x_M)
        y_SM = np.where(in_second_SM, new_second_SM, every_S1 * replicas + y_M)
        alone_M = x_M == y_M
        x_SM = np.where(alone_M & in_second_SM, new_second_SM, x_SM)
        self.edge_x_CBm = _looked_at(x_SM[:-1] * size + x_SM[1:])
        self.edge_y_CBm = _looked_at(np.where(alone_M, 0, y_SM[:-1] * size + y_SM[1:]))
        self.rest_CBm = _looked_at(np.arange(stages - 1)[:, None] * replicas**2 + x_M * replicas + y_M)
        joined_SM = np.repeat(every_S1 * replicas * (size + 1), count, axis=1)
        joined_SM = np.where(in_first_SM, (every_S1 * replicas + x_M) * size + new_first_SM, joined_SM)
        self.joined_CSm = _looked_at(
            np.where(in_second_SM, (every_S1 * replicas + y_M) * size + new_second_SM, joined_SM)
        )
        self._first_M, self._length_M, self._x_M, self._from_SM = first_M, length_M, x_M, new_first_SM
        self._replicas = replicas

    def swaps(self, exchange: int) -> list[tuple[int, int]]:
        """The pairs of positions that change places."""
        first, x = int(self._first_M[exchange]), int(self._x_M[exchange])
        rows = range(first, first + int(self._length_M[exchange]))
        return [(row * self._replicas + x, int(self._from_SM[row, exchange])) for row in rows]


class Grid:
    """A grid that can be changed by swaps. Letters: N positions, S stages, D pipelines."""

    def __init__(self, terms: AdditiveTerms, grid_SD: np.ndarray, segments: Segments | None = None) -> None:
        self.stages, self.replicas = grid_SD.shape
        self.terms, self.segments = terms, segments
        self._squarings = 3
        size = grid_SD.size
        self._unit_s = max(float(terms.exchange_s.max()), float(terms.transfer_s.max())) or 1.0
        self._exchange_all_NN = (terms.exchange_s / self._unit_s).astype(np.float32)
        self._others_DD = 1.0 - np.eye(self.replicas, dtype=np.float32)
        self._without_two_DxDD = _without_two(self.replicas)
        self._without_two_SxSS = _without_two(self.stages)
        self._not_self_DD = np.where(np.eye(self.replicas, dtype=bool), -_INF, _ZERO)
        self._below_NN = np.where(np.tri(size, dtype=bool), _INF, _ZERO)
        self._twin_of = twins(terms)
        self.has_twins = len(set(self._twin_of.tolist())) < size
        # What `changes_s` writes: the changes, and of one place the boundary above it and the one below.
        self._change_NN = np.empty((size, size), dtype=np.float32)
        self._same_SDD = _blocks(self._change_NN, self.replicas)
        self._above_PN, self._below_PN = np.empty((2, size - self.replicas, size), dtype=np.float32)
        self._above_BDD = _blocks(self._above_PN, self.replicas)
        self._below_BDD = _blocks(self._below_PN[:, self.replicas :], self.replicas)
        self.place(grid_SD)

    def _power(self, x: np.ndarray) -> np.ndarray:
        """x to the power of the norm, by squaring: `**` takes ten times as long."""
        y = x * x
        for _ in range(self._squarings - 1):
            y *= y
        return y

    def _root(self, x: np.ndarray) -> np.ndarray:
        """The root to it, in place."""
        for _ in range(self._squarings):
            np.sqrt(x, out=x)
        return x

    def sharpen(self, squarings: int) -> None:
        """From now on with this norm: of 2, 4, 8 for 1, 2, 3."""
        if squarings != self._squarings:
            self._squarings = squarings
            self.place(self.grid)

    def place(self, grid_SD: np.ndarray) -> None:
        """Start again from this grid."""
        self._device_N = grid_SD.ravel().copy()
        here = np.ix_(self._device_N, self._device_N)
        self._exchange_NN = self._exchange_all_NN[here]
        # Twice the price, there and back: a norm of doubled numbers is doubled.
        self._power_NN = self._power((2.0 * self.terms.transfer_s[here] / self._unit_s).astype(np.float32))
        if self.has_twins:
            kind_N = self._twin_of[self._device_N]
            self._twins_NN = np.where(kind_N[:, None] == kind_N, _INF, _ZERO)
        size = len(self._device_N)
        self._within_exchange_SDD = _blocks(self._exchange_NN, self.replicas)
        self._within_SDD = _blocks(self._power_NN, self.replicas)
        self._across_BDD = _blocks(self._power_NN[:, self.replicas :], self.replicas)
        self._slowest_S = np.empty(self.stages, dtype=np.float32)
        self._joined_NN = np.empty((size, size), dtype=np.float32)
        for stage in range(self.stages):
            self._measure(stage)

    @property
    def size(self) -> int:
        """N, positions."""
        return len(self._device_N)

    @property
    def grid(self) -> np.ndarray:
        """[S, D] the device of each stage and pipeline."""
        return self._device_N.reshape(self.stages, self.replicas).copy()

    def _measure(self, *stages: int) -> None:
        """What the stages' exchanges cost, and would cost with one member replaced by any other device."""
        which_n, size = list(stages), self.size
        exchange_nDN = self._exchange_NN.reshape(self.stages, self.replicas, size)[which_n]
        inside_nDD = self._within_exchange_SDD[which_n]
        sum_nD = inside_nDD.sum(axis=2)
        self._slowest_S[which_n] = sum_nD.max(axis=1)
        without_nDD = sum_nD[:, :, None] - inside_nDD + self._not_self_DD  # of member k when i is gone
        joined_nDN = (without_nDD[:, :, :, None] + exchange_nDN[:, :, None, :]).max(axis=1)
        np.maximum(joined_nDN, exchange_nDN.sum(axis=1, keepdims=True) - exchange_nDN, out=joined_nDN)
        self._joined_NN.reshape(self.stages, self.replicas, size)[which_n] = self._power(joined_nDN)

    def swap(self, i: int, j: int) -> None:
        """The devices at two positions change places."""
        matrices = [self._exchange_NN, self._power_NN]
        for matrix_NN in [*matrices, self._twins_NN] if self.has_twins else matrices:
            _swap_rows(matrix_NN, i, j)
            _swap_rows(matrix_NN.T, i, j)
        _swap_rows(self._joined_NN.T, i, j)
        self._device_N[[i, j]] = self._device_N[[j, i]]
        a, b = i // self.replicas, j // self.replicas
        if a == b:
            _swap_rows(self._joined_NN, i, j)
        else:
            self._measure(a, b)

    def swap_all(self, pairs: list[tuple[int, int]]) -> None:
        """One pair of positions after the other."""
        for i, j in pairs:
            self.swap(i, j)

    def _edges(self, matrix_NN: np.ndarray) -> np.ndarray:
        """[S - 1, D] of each boundary and pipeline."""
        return matrix_NN.diagonal(self.replicas).reshape(self.stages - 1, self.replicas)

    def cost_s(self) -> float:
        """The additive cost with the rows and columns as they are: never below `additive_cost`."""
        edge_s = self.terms.transfer_s[self._device_N[: -self.replicas], self._device_N[self.replicas :]]
        slowest_s = edge_s.reshape(self.stages - 1, self.replicas).max(axis=1, initial=0.0)
        return float(self._slowest_S.max()) * self._unit_s + 2.0 * float(slowest_s.sum())

    def smooth_s(self) -> float:
        """What `changes_s` are changes of: 8-norms in place of maxima."""
        edges = self._root(self._edges(self._power_NN).sum(axis=1)).sum()
        slowest = self._root(self._power(self._slowest_S).sum(keepdims=True))[0]
        return float(slowest + edges) * self._unit_s

    def changes_s(self) -> np.ndarray:
        """[N, N], above the diagonal: by how much `smooth_s` changes when two positions swap; else inf.

        Twins, whose swap changes nothing, are inf too. Single precision; the next call writes over it.
        """
        change_NN = self._change_NN
        self._measure_exchanges()
        if self.stages > 1:
            self._add_transfers()
        change_NN *= self._unit_s
        change_NN += self._below_NN
        if self.has_twins:
            change_NN += self._twins_NN
        return change_NN

    def segment_changes_s(self, chunk: int) -> np.ndarray:
        """[m] by how much `smooth_s` changes with the exchanges of segments from `chunk * LOOKED_AT` on."""
        segments = self.segments
        assert segments is not None
        rest_BX = self._edges(self._power_NN) @ self._without_two_DxDD
        edges_Bm = rest_BX.take(segments.rest_CBm[chunk])
        edges_Bm += self._power_NN.take(segments.edge_x_CBm[chunk])
        edges_Bm += self._power_NN.take(segments.edge_y_CBm[chunk])
        after_m = self._root(edges_Bm).sum(axis=0)
        after_m += self._root(self._joined_NN.take(segments.joined_CSm[chunk]).sum(axis=0))
        return after_m * np.float32(self._unit_s) - np.float32(self.smooth_s())

    def _measure_exchanges(self) -> None:
        """Write the changes of what exchanges cost."""
        stages, replicas, change_NN = self.stages, self.replicas, self._change_NN
        power_S = self._power(self._slowest_S)
        rest_SS = (power_S @ self._without_two_SxSS).reshape(stages, stages)
        np.add(self._joined_NN, self._joined_NN.T, out=change_NN)
        change_NN.reshape(stages, replicas, stages, replicas)[...] += rest_SS[:, None, :, None]
        self._root(change_NN)
        change_NN -= self._root(power_S.sum(keepdims=True))
        self._same_SDD[...] = 0.0

    def _add_transfers(self) -> None:
        """Add to them the changes of what transfers cost."""
        replicas, power_NN, within_SDD = self.replicas, self._power_NN, self._within_SDD
        above_PN, below_PN = self._above_PN, self._below_PN
        edge_BD = self._edges(power_NN)  # B = S - 1 boundaries
        rest_P1 = (edge_BD @ self._others_DD).reshape(-1, 1)
        before_B = self._root(edge_BD.sum(axis=1))
        before_P1, before_B11 = np.repeat(before_B, replicas)[:, None], before_B[:, None, None]
        # Another device in a place: the boundary above the place (of all but the first stage), the one below.
        for own_PN, next_PN in ((above_PN, power_NN[:-replicas]), (below_PN, power_NN[replicas:])):
            np.add(rest_P1, next_PN, out=own_PN)
            self._root(own_PN)
            own_PN -= before_P1
        # Places of neighbouring stages are not independent of one another at the boundary that they share.
        kept_BDD = (edge_BD @ self._without_two_DxDD).reshape(-1, replicas, replicas)
        joint_BDD = self._root(kept_BDD + within_SDD[:-1] + within_SDD[1:]) - before_B11
        diagonal = np.arange(replicas)
        joint_BDD[:, diagonal, diagonal] = 0.0  # the edge between the two is turned round
        self._above_BDD[...] = 0.0
        self._below_BDD[...] = joint_BDD
        own_NN = np.zeros_like(power_NN)
        own_NN[:-replicas] = below_PN
        own_NN[replicas:] += above_PN
        self._change_NN += own_NN
        self._change_NN += own_NN.T
        # Two of one stage: the two boundaries see their edges crossed.
        kept_BDD += self._across_BDD
        kept_BDD += self._across_BDD.transpose(0, 2, 1)
        crossed_BDD = self._root(kept_BDD) - before_B11
        self._same_SDD[:-1] = crossed_BDD
        self._same_SDD[-1] = 0.0
        self._same_SDD[1:] += crossed_BDD


def _blocks(matrix_NN: np.ndarray, replicas: int) -> np.ndarray:
    """[s, D, D] a view of the blocks on the diagonal, of as many stages as fit."""
    count, (down, right) = min(matrix_NN.shape) // replicas, matrix_NN.strides
    return as_strided(matrix_NN, (count, replicas, replicas), (replicas * (down + right), down, right))


def _looked_at(places_XM: np.ndarray) -> np.ndarray:
    """[C, X, m] the same in chunks of `LOOKED_AT` exchanges, each in one piece of memory."""
    return places_XM.reshape(len(places_XM), -1, LOOKED_AT).transpose(1, 0, 2).copy()


def _without_two(size: int) -> np.ndarray:
    """[size, size²]: times it, a vector becomes its sums without elements i and j, for all i and j.

    The sum less the two would not do: next to one large 8th power the others are lost in rounding.
    """
    others = 1.0 - np.eye(size, dtype=np.float32)
    return (others[:, :, None] * others[:, None, :]).reshape(size, size * size)


def twins(terms: AdditiveTerms) -> np.ndarray:
    """[N] a number that two devices share if they cost the same with every other one.

    Swapping them changes nothing. Where nearly all differ (measured lines), everybody is said to be single.
    """
    size = len(terms.exchange_s)
    kind_N = np.full(size, -1)
    firsts: list[int] = []
    # Twins have the same prices, in another order: so most devices need not be compared.
    sorted_NX = np.sort(np.hstack([terms.exchange_s, terms.transfer_s]), axis=1)
    sums_N = np.ascontiguousarray(sorted_NX).sum(axis=1).tolist()
    for device in range(size):
        for kind, first in enumerate(firsts):
            if sums_N[device] != sums_N[first]:
                continue
            same_N = terms.exchange_s[device] == terms.exchange_s[first]
            same_N &= terms.transfer_s[device] == terms.transfer_s[first]
            same_N[[device, first]] = True
            if same_N.all():
                kind_N[device] = kind
                break
        else:
            kind_N[device] = len(firsts)
            firsts.append(device)
            if len(firsts) > 64:
                return np.arange(size)
    return kind_N
