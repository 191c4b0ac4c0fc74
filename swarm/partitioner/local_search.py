"""Local improvement of a cut: operators move to the stage before or after, with those that must go along."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from swarm.model.graph.ir import OpGraph
from swarm.partitioner.segments import Facts, WireTerms

NEARLY = 1e-9
"""Relative: what is gained below this is rounding."""


class Moves:
    """The costs of cuts of one graph, fast enough to try thousands; memory is not considered."""

    def __init__(
        self,
        graph: OpGraph,
        facts: Facts,
        wire: WireTerms,
        stage_seconds: np.ndarray,
        bandwidths_bps: Sequence[float],
        latencies_s: Sequence[float],
        sharing_s: float,
    ) -> None:
        """`stage_seconds`: [S, operators], by index. `sharing_s`: seconds by byte of weights that several
        stages hold.
        """
        self._S = len(stage_seconds)
        self._before, self._after = facts.before, facts.after
        self._row = np.array(facts.row, dtype=np.int64)
        self._seconds, self._sharing_s = stage_seconds, sharing_s
        self._bandwidths, self._latencies = np.array(bandwidths_bps), np.array(latencies_s)

        cheap = [(name, index) for index in facts.row for name in facts.needs[index]]
        self._cheap = np.array(cheap, dtype=np.int64).reshape(-1, 2)
        names = [name for name in graph.parameters if any(name in facts.weights[i] for i in facts.row)]
        place = {name: number for number, name in enumerate(names)}
        held = [(place[n], index) for index in facts.row for n in facts.weights[index] if n in place]
        self._held = np.array(held, dtype=np.int64).reshape(-1, 2)
        self._weight_bytes = np.array([float(graph.values[name].nbytes) for name in names])
        self._trained = np.array(sorted({index for _, index in held}), dtype=np.int64)

        maker = {name: index for index in facts.row for name in graph.operators[index].outputs}
        readers: dict[str, list[int]] = {}
        for index in facts.row:
            for name in facts.reads[index]:
                readers.setdefault(name, []).append(index)
        self._makers = np.array([maker.get(name, -1) for name in readers], dtype=np.int64)
        self._readers = np.array([index for those in readers.values() for index in those], dtype=np.int64)
        counts = [len(those) for those in readers.values()]
        self._starts = np.concatenate(([0], np.cumsum(counts)[:-1])).astype(np.int64)
        values = [graph.values[name] for name in readers]
        both = [wire.of(v.dtype, v.numel) if v.differentiable else (float(v.nbytes), 0.0) for v in values]
        self._bytes = np.array(both).reshape(-1, 2).T

    def cost(self, stages: np.ndarray) -> tuple[float, float, tuple[int, ...]]:
        """(period, latency, the stages that a move has to leave for a shorter period). `stages`: by index.

        The period is inf if a stage has no weights.
        """
        S = self._S
        row_stages = stages[self._row]
        compute = np.bincount(row_stages, weights=self._seconds[row_stages, self._row], minlength=S)
        if len(self._cheap):
            pairs = np.unique(self._cheap[:, 0] * S + stages[self._cheap[:, 1]])
            compute += np.bincount(pairs % S, weights=self._seconds[pairs % S, pairs // S], minlength=S)
        if (np.bincount(stages[self._trained], minlength=S) == 0).any():
            return math.inf, math.inf, ()
        first = np.where(self._makers < 0, 0, stages[self._makers])
        last = np.maximum.reduceat(stages[self._readers], self._starts)
        sent = [
            np.cumsum(
                np.bincount(first, weights=nbytes, minlength=S)
                - np.bincount(last, weights=nbytes, minlength=S)
            )[: S - 1]
            for nbytes in self._bytes
        ]
        forth, back = (8 * nbytes / self._bandwidths for nbytes in sent)
        busy = np.maximum(forth, back)
        held = np.unique(self._held[:, 0] * S + stages[self._held[:, 1]])
        again = self._weight_bytes[held // S].sum() - self._weight_bytes.sum()
        latency = float(
            (compute.sum() + forth.sum() + back.sum()) + 2 * self._latencies.sum() + again * self._sharing_s
        )
        slowest, line = int(compute.argmax()), int(busy.argmax())
        if compute[slowest] >= busy[line]:
            return float(compute[slowest]), latency, (slowest,)
        return float(busy[line]), latency, (line, line + 1)

    def climb(self, assignment: Sequence[int], most: int) -> list[int]:
        """Make the best move out of what limits the period, again and again; at most so many are tried."""
        stages = np.array(assignment, dtype=np.int64)
        period, latency, limits = self.cost(stages)
        while most > 0:
            best = None
            for group, to in self._moves(stages, limits):
                most -= 1
                changed = stages.copy()
                changed[group] = to
                cost = self.cost(changed)
                if is_less(cost[:2], (period, latency) if best is None else best[0][:2]):
                    best = cost, changed
            if best is None:
                break
            (period, latency, limits), stages = best
        return [int(stage) for stage in stages]

    def _moves(self, stages: np.ndarray, limits: Sequence[int]) -> list[tuple[list[int], int]]:
        """(operators, stage that they go to): each operator of these stages, with those that must go
        along.
        """
        found: dict[tuple[tuple[int, ...], int], None] = {}
        for stage in limits:
            for index in self._row[stages[self._row] == stage]:
                for neighbours, to in ((self._after, stage + 1), (self._before, stage - 1)):
                    between = len(limits) == 2 and to not in limits  # of a line only what crosses it
                    if 0 <= to < self._S and not between:
                        found[tuple(sorted(_closure(int(index), neighbours, stages))), to] = None
        return [(list(group), to) for group, to in found]


def is_less(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether a (period, latency) is smaller than another, by the period or else by the latency."""
    if one[0] < other[0] * (1 - NEARLY):
        return True
    return one[0] <= other[0] * (1 + NEARLY) and one[1] < other[1] * (1 - NEARLY)


def _closure(index: int, neighbours: Mapping[int, Sequence[int]], stages: np.ndarray) -> set[int]:
    """An operator, and all of its stage that follow it (or come before it)."""
    found, waiting = {index}, [index]
    while waiting:
        for other in neighbours[waiting.pop()]:
            if stages[other] == stages[index] and other not in found:
                found.add(other)
                waiting.append(other)
    return found
