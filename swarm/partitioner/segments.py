"""The operators of a graph in a row, and what every stretch of it costs as a stage.

A topological order turns a cut of the graph into places to cut a row at. The values that are made before a
place and read after it cross there, those for later stages too: calls are nested, and what skips a stage is
carried through it. Some operators are not in the row: each stage computes those that it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from swarm.model.graph.ir import DTYPE_BYTES, OpGraph
from swarm.model.graph.partition import recomputed
from swarm.model.layout import Holding
from swarm.partitioner.memory import Kept, MemoryLine, state_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WireTerms:
    """Bytes on the wire of a number with a gradient; numbers without one travel as they are."""

    forward_bytes: float | None = None
    """By the codec; None: as it is."""
    backward_bytes: float | None = None

    def of(self, dtype: str, numel: int) -> tuple[float, float]:
        """(forward, backward) bytes of a differentiable tensor."""
        raw = DTYPE_BYTES[dtype]
        forth = raw if self.forward_bytes is None else self.forward_bytes
        back = raw if self.backward_bytes is None else self.backward_bytes
        return forth * numel, back * numel


@dataclass(frozen=True, slots=True)
class Stretches:
    """Stretches that begin at one place, by their length less one."""

    seconds: np.ndarray
    """[devices, n - start] of a microbatch, forward and backward."""
    memory: np.ndarray
    """[n - start] bytes."""
    again: np.ndarray
    """[n - start] bytes of weights that an earlier stretch holds too: their gradients have to be added up."""


class Facts:
    """The facts that do not depend on the order: readers, shared memory, and what autograd keeps.

    A stage computes some values itself instead of receiving them (`swarm.model.graph.partition.recomputed`).
    """

    def __init__(self, graph: OpGraph) -> None:
        self.kept = Kept(graph)
        free = recomputed(graph)
        self.row = tuple(op.index for op in graph.operators if op.index not in free)
        """The operators that are computed once, in the graph's order."""
        maker = {name: op.index for op in graph.operators for name in op.outputs}
        reads: dict[int, frozenset[str]] = {}
        needs: dict[int, frozenset[int]] = {}
        for op in graph.operators:
            helpers = {maker[name] for name in op.inputs if maker.get(name) in free}
            plain = frozenset(name for name in op.inputs if maker.get(name) not in free)
            reads[op.index] = plain.union(*(reads[helper] for helper in helpers))
            needs[op.index] = frozenset(helpers).union(*(needs[helper] for helper in helpers))
        self.reads = {index: tuple(sorted(reads[index])) for index in self.row}
        """Inputs of the model and outputs of operators in the row: what has to be there for an operator."""
        self.needs = needs
        """Indices of the operators that have to be computed beside it."""
        alike = {name: group[0] for group in graph.tied for name in group}
        self.weights = {
            index: frozenset(
                alike.get(name, name)
                for number in (index, *needs[index])
                for name in (*graph.operators[number].parameters, *graph.operators[number].buffers)
            )
            for index in self.row
        }
        """Names of the parameters and buffers that it reads; of tied ones the first."""
        self.before = {
            index: tuple(sorted({maker[name] for name in self.reads[index] if name in maker}))
            for index in self.row
        }
        """The operators whose outputs it reads."""
        read = {source for sources in self.before.values() for source in sources}
        self.ends = tuple(index for index in self.row if index not in read)
        """Those whose outputs no operator reads: the loss."""


class OrderedGraph:
    """A graph in a given order: what a cut at any place sends, and what any stretch costs."""

    def __init__(
        self,
        graph: OpGraph,
        order: Sequence[int],
        seconds: np.ndarray,
        holding: Holding,
        wire: WireTerms,
        facts: Facts,
    ) -> None:
        """`order`: `facts.row`, in a topological order. `seconds`: [devices, operators], by index."""
        self.order = tuple(order)
        self.n = n = len(order)
        self._memory = MemoryLine(graph, facts.kept, facts.reads, order, holding)
        self.forward_bytes, self.backward_bytes = _boundary_bytes(graph, facts, order, wire)
        trains = [any(name in graph.parameters for name in facts.weights[index]) for index in order]
        self.trains = np.array(trains, dtype=bool)
        """Which operators read a parameter."""
        devices = len(seconds)
        # What several operators share, as columns: seconds by device, memory, weights that are held again.
        amounts: dict[str | int, np.ndarray] = {}
        self._needs: list[list[str | int]] = []
        for index in order:
            names = [*sorted(facts.weights[index]), *sorted(facts.needs[index])]
            self._needs.append(names)
            for name in names:
                if name in amounts:
                    continue
                column = np.zeros(devices + 2)
                if isinstance(name, str):
                    column[devices] = state_bytes(graph, name, holding)
                    column[devices + 1] = graph.values[name].nbytes * (name in graph.parameters)
                else:
                    column[:devices] = seconds[:, name]
                    column[devices] = facts.kept.saved[name]
                amounts[name] = column
        self._amounts, self._devices = amounts, devices
        self._next: list[list[int | None]] = [[] for _ in range(n)]
        ahead: dict[str | int, int] = {}
        for number in reversed(range(n)):
            self._next[number] = [ahead.get(name) for name in self._needs[number]]
            ahead.update(dict.fromkeys(self._needs[number], number))
        self._first = ahead
        self._base = np.zeros((devices + 2, n))
        self._base[:devices] = seconds[:, list(order)]

    def stretches(self):
        """For each place to begin at, in order, a function that computes its `Stretches`."""
        fresh = self._base.copy()
        for name, number in self._first.items():
            column = self._amounts[name].copy()
            column[-1] = 0.0  # the first to hold it
            fresh[:, number] += column
        for start in range(self.n):
            yield lambda start=start: self._stretches(fresh, start)
            for name, following in zip(self._needs[start], self._next[start], strict=True):
                if following is not None:
                    fresh[:, following] += self._amounts[name]

    def _stretches(self, fresh: np.ndarray, start: int) -> Stretches:
        sums = np.cumsum(fresh[:, start:], axis=1)
        d = self._devices
        return Stretches(sums[:d], sums[d] + self._memory.peak(start), sums[d + 1])


def _boundary_bytes(
    graph: OpGraph, facts: Facts, order: Sequence[int], wire: WireTerms
) -> tuple[np.ndarray, np.ndarray]:
    """([n + 1] forward, [n + 1] backward) bytes that cross after so many operators."""
    made = dict.fromkeys(graph.inputs, 0)
    last: dict[str, int] = {}
    for number, index in enumerate(order):
        made.update(dict.fromkeys(graph.operators[index].outputs, number + 1))
        last.update(dict.fromkeys(facts.reads[index], number))
    forth, back = np.zeros(len(order) + 2), np.zeros(len(order) + 2)
    for name, until in last.items():
        value = graph.values[name]
        sent, returned = wire.of(value.dtype, value.numel) if value.differentiable else (value.nbytes, 0.0)
        # It crosses from where it is made up to the place before its last reader.
        for steps, nbytes in ((forth, sent), (back, returned)):
            steps[made[name]] += nbytes
            steps[until + 1] -= nbytes
    return np.cumsum(forth)[: len(order) + 1], np.cumsum(back)[: len(order) + 1]
