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

from scripts.bench.additive_objective import AdditiveTerms


def _power(x: np.ndarray) -> np.ndarray:
    """x⁸, in three steps: `**` takes ten times as long."""
    y = x * x
    y *= y
    y *= y
    return y


def _root(x: np.ndarray) -> np.ndarray:
    """The 8th root, in place. Differences may have rounded to below 0."""
    np.maximum(x, 0.0, out=x)
    np.sqrt(x, out=x)
    np.sqrt(x, out=x)
    return np.sqrt(x, out=x)


_INF, _ZERO = np.float32(np.inf), np.float32(0.0)


def _swap_rows(matrix: np.ndarray, i: int, j: int) -> None:
    kept = matrix[i].copy()
    matrix[i] = matrix[j]
    matrix[j] = kept


class Grid:
    """A grid that can be changed by swaps. Letters: N positions, S stages, D pipelines."""

    def __init__(self, terms: AdditiveTerms, grid_SD: np.ndarray) -> None:
        self.stages, self.replicas = grid_SD.shape
        self.terms = terms
        size = grid_SD.size
        self._unit_s = max(float(terms.exchange_s.max()), float(terms.transfer_s.max())) or 1.0
        self._exchange_all_NN = (terms.exchange_s / self._unit_s).astype(np.float32)
        self._others_DD = 1.0 - np.eye(self.replicas, dtype=np.float32)
        self._without_two_DxDD = _without_two(self.replicas)
        self._without_two_SxSS = _without_two(self.stages)
        self._not_self_DD = np.where(np.eye(self.replicas, dtype=bool), -_INF, _ZERO)
        self._below_NN = np.where(np.tri(size, dtype=bool), _INF, _ZERO)
        self._twin_of = twins(terms)
        self._has_twins = len(set(self._twin_of.tolist())) < size
        self.place(grid_SD)

    def place(self, grid_SD: np.ndarray) -> None:
        """Start again from this grid."""
        self._device_N = grid_SD.ravel().copy()
        here = np.ix_(self._device_N, self._device_N)
        self._exchange_NN = self._exchange_all_NN[here]
        self._transfer_NN = self.terms.transfer_s[here]
        self._power_NN = _power((self._transfer_NN / self._unit_s).astype(np.float32))
        if self._has_twins:
            kind_N = self._twin_of[self._device_N]
            self._twins_NN = np.where(kind_N[:, None] == kind_N, _INF, _ZERO)
        size = len(self._device_N)
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

    def _measure(self, stage: int) -> None:
        """What the stage's exchange costs, and would cost with one member replaced by any other device."""
        rows = slice(stage * self.replicas, (stage + 1) * self.replicas)
        exchange_DN = self._exchange_NN[rows]
        inside_DD = exchange_DN[:, rows]
        sum_D = inside_DD.sum(axis=1)
        self._slowest_S[stage] = sum_D.max()
        without_DD = sum_D[:, None] - inside_DD + self._not_self_DD  # of member k when i is gone
        joined_DN = (without_DD[:, :, None] + exchange_DN[:, None, :]).max(axis=0)
        np.maximum(joined_DN, exchange_DN.sum(axis=0) - exchange_DN, out=joined_DN)
        self._joined_NN[rows] = _power(joined_DN)

    def swap(self, i: int, j: int) -> None:
        """The devices at two positions change places."""
        matrices = [self._exchange_NN, self._transfer_NN, self._power_NN]
        for matrix_NN in [*matrices, self._twins_NN] if self._has_twins else matrices:
            _swap_rows(matrix_NN, i, j)
            _swap_rows(matrix_NN.T, i, j)
        _swap_rows(self._joined_NN.T, i, j)
        self._device_N[[i, j]] = self._device_N[[j, i]]
        a, b = i // self.replicas, j // self.replicas
        if a == b:
            _swap_rows(self._joined_NN, i, j)
        else:
            self._measure(a)
            self._measure(b)

    def _edges(self, matrix_NN: np.ndarray) -> np.ndarray:
        """[S - 1, D] of each boundary and pipeline."""
        return matrix_NN.diagonal(self.replicas).reshape(self.stages - 1, self.replicas)

    def cost_s(self) -> float:
        """The additive cost with the rows and columns as they are: never below `additive_cost`."""
        slowest_s = float(self._slowest_S.max()) * self._unit_s
        return slowest_s + 2.0 * float(self._edges(self._transfer_NN).max(axis=1, initial=0.0).sum())

    def smooth_s(self) -> float:
        """What `changes_s` are changes of: 8-norms in place of maxima."""
        edges = _root(self._edges(self._power_NN).sum(axis=1)).sum()
        slowest = _root(_power(self._slowest_S).sum(keepdims=True))[0]
        return float(slowest + 2.0 * edges) * self._unit_s

    def changes_s(self) -> np.ndarray:
        """[N, N], above the diagonal: by how much `smooth_s` changes when two positions swap; else inf.

        Twins, whose swap changes nothing, are inf too. Single precision.
        """
        change_NN = self._exchange_changes_s()
        if self.stages > 1:
            change_NN += self._transfer_changes_s()
        change_NN *= self._unit_s
        change_NN += self._below_NN
        if self._has_twins:
            change_NN += self._twins_NN
        return change_NN

    def _exchange_changes_s(self) -> np.ndarray:
        stages, replicas = self.stages, self.replicas
        power_S = _power(self._slowest_S)
        rest_SS = (power_S @ self._without_two_SxSS).reshape(stages, stages)
        change_NN = self._joined_NN + self._joined_NN.T
        change_SDSD = change_NN.reshape(stages, replicas, stages, replicas)
        change_SDSD += rest_SS[:, None, :, None]
        _root(change_NN)
        change_NN -= _root(power_S.sum(keepdims=True))
        every = np.arange(stages)
        change_SDSD[every, :, every, :] = 0.0
        return change_NN

    def _transfer_changes_s(self) -> np.ndarray:
        stages, replicas, power_NN = self.stages, self.replicas, self._power_NN
        edge_BD = self._edges(power_NN)  # B = S - 1 boundaries
        rest_BD = edge_BD @ self._others_DD
        before_B = _root(edge_BD.sum(axis=1))
        rest_N1 = rest_BD.reshape(-1, 1)
        before_N1 = np.repeat(before_B, replicas)[:, None]
        # A device j in the place of q: the boundary above q, then the one below it.
        own_NN = np.zeros_like(power_NN)
        own_NN[replicas:] = _root(rest_N1 + power_NN[:-replicas])
        own_NN[replicas:] -= before_N1
        below_NN = _root(rest_N1 + power_NN[replicas:])
        below_NN -= before_N1
        own_NN[:-replicas] += below_NN
        change_NN = own_NN + own_NN.T
        # Two places at one boundary are not independent of one another.
        change_SDSD = change_NN.reshape(stages, replicas, stages, replicas)
        every = np.arange(stages)
        power_SDSD = power_NN.reshape(stages, replicas, stages, replicas)
        across_BDD = power_SDSD[every[:-1], :, every[1:], :]
        within_SDD = power_SDSD[every, :, every, :]
        before_B11 = before_B[:, None, None]
        kept_BDD = (edge_BD @ self._without_two_DxDD).reshape(-1, replicas, replicas)
        # Neighbouring stages: what was added above for the shared boundary is replaced.
        joint_BDD = _root(kept_BDD + within_SDD[:-1] + within_SDD[1:]) - before_B11
        diagonal = np.arange(replicas)
        joint_BDD[:, diagonal, diagonal] = 0.0  # the edge between the two is turned round
        joint_BDD -= _root(rest_BD[:, :, None] + within_SDD[1:]) - before_B11
        joint_BDD -= _root(rest_BD[:, None, :] + within_SDD[:-1]) - before_B11
        change_SDSD[every[:-1], :, every[1:], :] += joint_BDD
        # Two of one stage: the two boundaries see their edges crossed.
        crossed_BDD = _root(kept_BDD + across_BDD + across_BDD.transpose(0, 2, 1)) - before_B11
        same_SDD = np.zeros_like(within_SDD)
        same_SDD[:-1] += crossed_BDD
        same_SDD[1:] += crossed_BDD
        change_SDSD[every, :, every, :] = same_SDD
        change_NN *= 2.0
        return change_NN


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
    for device in range(size):
        for kind, first in enumerate(firsts):
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
