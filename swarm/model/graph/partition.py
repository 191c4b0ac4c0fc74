"""Cuts of an operator graph into stages: what each computes, takes and gives; and which cut is the best.

What is carried through stages, and what each computes for itself: docs/design.md, *Any model*. Which cut is
the best for devices that are all alike and lines that are slow, and which orders of the operators are tried:
*Where a model is cut*. In a given order the best one is found exactly. What every stage computes for itself
(`recomputed`) is in no row, and little work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from swarm.errors import SetupError, count
from swarm.model.graph.ir import NormStatistic, OpGraph, Value
from swarm.wire.tensor_meta import ITEM_BYTES, MAX_DIMS


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    stage: int
    operators: tuple[int, ...]
    """Indices of what it computes, in order; some are computed on other stages, too."""
    inputs: tuple[Value, ...]
    """What comes in: for stage 0 the model's inputs, for the others what the stage before gives."""
    outputs: tuple[Value, ...]
    """What goes out, of the last stage the loss. A value that is also in `inputs` passes unchanged."""
    parameters: tuple[str, ...]
    """That it reads, in the graph's order."""
    buffers: tuple[str, ...]

    @property
    def bytes_out(self) -> int:
        """Of what goes out, uncompressed."""
        return sum(value.nbytes for value in self.outputs)


def plan_stages(graph: OpGraph, assignment: Sequence[int]) -> tuple[StagePlan, ...]:
    """The stages of a cut. Raises SetupError: it is no cut of this graph; names an operator that is wrong."""
    free = recomputed(graph)
    _check(graph, assignment, free)
    makers = graph.makers
    # A fixed order of all values that can cross a boundary: inputs, then operators' outputs.
    ranks = {name: rank for rank, name in enumerate((*graph.inputs, *makers))}
    plans: list[StagePlan] = []
    wanted = {graph.loss}  # what the stage has to give
    for stage in reversed(range(max(assignment) + 1)):
        computed = {op.index for op in graph.operators if assignment[op.index] == stage} - free
        needed = [*wanted, *(name for index in computed for name in graph.operators[index].inputs)]
        while needed:
            maker = makers.get(needed.pop())
            if maker is not None and maker.index in free - computed:
                computed.add(maker.index)
                needed += maker.inputs
        ops = [graph.operators[i] for i in sorted(computed)]
        taken = wanted.union(*(op.inputs for op in ops)).difference(*(op.outputs for op in ops))
        inputs = graph.inputs if stage == 0 else sorted(taken, key=ranks.__getitem__)
        plans.append(
            StagePlan(
                stage=stage,
                operators=tuple(op.index for op in ops),
                inputs=tuple(graph.values[name] for name in inputs),
                outputs=tuple(graph.values[name] for name in sorted(wanted, key=ranks.__getitem__)),
                parameters=_read(graph.parameters, (name for op in ops for name in op.parameters)),
                buffers=_read(graph.buffers, (name for op in ops for name in op.buffers)),
            )
        )
        wanted = taken
    return tuple(reversed(plans))


def shared_parameters(
    plans: Sequence[StagePlan], statistics: Mapping[int, Sequence[NormStatistic]] | None = None
) -> dict[str, tuple[int, ...]]:
    """The parameters that several stages read, and which: their gradients have to be added up. Likewise the
    buffers that they tell of by `statistics`, which are those of operators.
    """
    readers: dict[str, tuple[int, ...]] = {}
    for plan in plans:
        told = [told.buffer for index in plan.operators for told in (statistics or {}).get(index, ())]
        for name in dict.fromkeys((*plan.parameters, *told)):
            readers[name] = (*readers.get(name, ()), plan.stage)
    return {name: stages for name, stages in readers.items() if len(stages) > 1}


def recomputed(graph: OpGraph) -> frozenset[int]:
    """The operators that every stage computes for itself where it needs them, by index.

    They need no weights, and the inputs of the model that they follow from are no larger than what they make.
    """
    roots: dict[str, frozenset[str]] = {name: frozenset((name,)) for name in graph.inputs}
    found: set[int] = set()
    for op in graph.operators:
        if not op.cheap and (op.parameters or op.buffers or not all(name in roots for name in op.inputs)):
            continue
        sources = frozenset[str]().union(*(roots[name] for name in op.inputs))
        roots.update(dict.fromkeys(op.outputs, sources))
        made = sum(graph.values[name].nbytes for name in op.outputs)
        if sum(graph.values[name].nbytes for name in sources) <= made:
            found.add(op.index)
    return frozenset(found)


def _read(all_names: Sequence[str], read: Iterable[str]) -> tuple[str, ...]:
    found = set(read)
    return tuple(name for name in all_names if name in found)


def _check(graph: OpGraph, assignment: Sequence[int], free: frozenset[int]) -> None:
    if len(assignment) != len(graph.operators):
        raise SetupError(
            f"a cut of {len(graph.operators)} operators names the stage of {len(assignment)}; cut it again"
        )
    empty = set(range(max(assignment, default=0) + 1)) - set(assignment)
    if empty or min(assignment, default=0) < 0:
        raise SetupError(f"a cut whose stages are {sorted(set(assignment))}: they must count up from 0")
    makers = graph.makers
    for op in graph.operators:
        for name in op.inputs:
            source = makers.get(name)
            if source and source.index not in free and assignment[source.index] > assignment[op.index]:
                raise SetupError(
                    f"operator {op.name} of stage {assignment[op.index]} reads {name}, which stage "
                    f"{assignment[source.index]} makes: values flow to later stages only"
                )
    last = makers[graph.loss]
    if assignment[last.index] != max(assignment):
        raise SetupError(
            f"operator {last.name} makes the loss on stage {assignment[last.index]}: "
            f"it belongs to the last stage, {max(assignment)}"
        )


# --- where to cut -------------------------------------------------------------------------------------------

WORTH = 0.2
"""A cut that sends less may take this part longer to compute."""
RANDOM_ORDERS = 24
"""Depth-first, with branches in a random order: tried besides the graph's own."""
NEVER_S = 1e9
"""A stage takes that much longer whose output cannot travel, such as complex numbers."""
NEARLY = 1e-9
"""Relative: what is gained below this is rounding."""

Cost: TypeAlias = tuple[np.ufunc, int]
"""How the cost so far and that of one more stage make one, and which of the two that is: the stage's seconds,
or the bytes over the boundary behind it."""
_SLOWEST, _WIDEST, _SENT = (np.maximum, 0), (np.maximum, 1), (np.add, 1)


def find_cut(graph: OpGraph, seconds: Sequence[float], stages: int) -> tuple[int, ...]:
    """The stage of each operator, by index; of those that several stages compute, the first of them.

    Args:
        seconds: of each operator, for a microbatch.

    Raises:
        SetupError: fewer operators with weights than stages.
    """
    task = _Task(graph)
    trained = sum(task.trains[index] for index in task.row)
    if trained < stages:
        raise SetupError(
            f"{count(trained, 'operator')} with weights: too few for {stages} stages. One without trains "
            "nothing: cut the model into fewer stages"
        )
    rows = [_Row(task, order, seconds) for order in _orders(task)]

    def least(cost: Cost, most_s: float = math.inf, most_bytes: float = math.inf) -> tuple[float, _Row]:
        found = [row.cut(stages, cost, most_s, most_bytes)[0] for row in rows]
        return min(found) * (1 + NEARLY), rows[int(np.argmin(found))]

    enough_s = least(_SLOWEST)[0] * (1 + WORTH)
    most_bytes = least(_WIDEST, enough_s)[0]
    most_s = least(_SLOWEST, enough_s, most_bytes)[0]
    row = least(_SENT, most_s, most_bytes)[1]
    ends = row.cut(stages, _SENT, most_s, most_bytes)[1]
    stage_of: dict[int, int] = {}
    for stage, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        for index in row.order[start:end]:
            for computed in (index, *task.helpers[index]):
                stage_of.setdefault(computed, stage)
    return tuple(stage_of.get(op.index, 0) for op in graph.operators)


class _Task:
    """What of a graph does not depend on the order."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.trains = [bool(op.parameters) for op in graph.operators]
        """Of each operator, whether it reads a weight."""
        free = recomputed(graph)
        self.row = tuple(op.index for op in graph.operators if op.index not in free)
        """The operators that are computed once, in the graph's order."""
        self.makers = {name: op.index for name, op in graph.makers.items()}
        self.reads: dict[int, frozenset[str]] = {}
        """What has to be there for an operator: inputs of the model and outputs of operators in the row."""
        self.helpers: dict[int, frozenset[int]] = {}
        """The operators that have to be computed beside it."""
        for op in graph.operators:
            own = frozenset(self.makers[name] for name in op.inputs if self.makers.get(name) in free)
            there = frozenset(name for name in op.inputs if self.makers.get(name) not in free)
            self.reads[op.index] = there.union(*(self.reads[helper] for helper in own))
            self.helpers[op.index] = own.union(*(self.helpers[helper] for helper in own))


class _Row:
    """The operators in one order, with what a stage between two places takes, and what crosses a place."""

    def __init__(self, task: _Task, order: Sequence[int], seconds: Sequence[float]) -> None:
        self.order = order
        self._seconds = np.cumsum([0.0, *(seconds[index] for index in order)])
        self._trained = np.cumsum([0, *(task.trains[index] for index in order)])
        self._bytes, stuck = _boundaries(task, order)
        self._end_s = self._seconds + NEVER_S * (stuck > 0)

    def cut(self, stages: int, cost: Cost, most_s: float, most_bytes: float) -> tuple[float, list[int]]:
        """The least cost of a cut, and the place after each stage's last operator.

        `most_s`, `most_bytes`: no stage takes longer, no boundary sends more; the cost is infinite if no cut
        keeps to that.
        """
        n, (join, which) = len(self.order), cost
        best = np.full((stages + 1, n + 1), math.inf)
        origin = np.zeros((stages + 1, n + 1), dtype=np.int64)  # where the last of so many stages begins
        best[0, 0] = 0.0
        for start in range(n):
            ends = slice(start + 1, None)
            took_s, nbytes = self._end_s[ends] - self._seconds[start], self._bytes[ends]
            fits = (took_s <= most_s) & (nbytes <= most_bytes) & (self._trained[ends] > self._trained[start])
            found = np.where(fits, join(best[:-1, start, None], (took_s, nbytes)[which]), math.inf)
            less = found < best[1:, ends]
            best[1:, ends][less] = found[less]
            origin[1:, ends][less] = start
        places = [n]
        for stage in range(stages, 1, -1):
            places.append(int(origin[stage, places[-1]]))
        return float(best[stages, n]), places[::-1]


def _boundaries(task: _Task, order: Sequence[int]) -> np.ndarray:
    """[2, n + 1] what crosses after so many operators: bytes, there and, of what has a gradient, back; and
    the tensors that cannot travel.

    A weight that several operators read crosses too: if they are on several stages, its gradients have to be
    added up.
    """
    graph = task.graph
    first = dict.fromkeys(graph.inputs, 0)
    last: dict[str, int] = {}
    for place, index in enumerate(order):
        op = graph.operators[index]
        first.update(dict.fromkeys(op.outputs, place + 1))
        for name in op.parameters:
            first.setdefault(name, place + 1)
        last.update(dict.fromkeys((*task.reads[index], *op.parameters), place))
    steps = np.zeros((len(order) + 2, 2))
    for name, until in last.items():
        value = graph.values[name]
        travels = value.dtype in (*ITEM_BYTES, "bool") and len(value.shape) <= MAX_DIMS
        nbytes = value.nbytes * (2 if value.differentiable else 1)
        crosses = np.array([nbytes, name in task.makers and not travels])
        # From where it is made up to the place before its last reader.
        steps[first[name]] += crosses
        steps[until + 1] -= crosses
    return np.cumsum(steps, axis=0)[:-1].T


def _orders(task: _Task) -> list[tuple[int, ...]]:
    """Different topological orders, the graph's own first; one for a chain."""
    rng = np.random.default_rng(0)
    ranks = (rng.permutation(len(task.row)).tolist() for _ in range(RANDOM_ORDERS))
    found = [_depth_first(task, dict(zip(task.row, rank, strict=True))) for rank in ranks]  # type: ignore
    return list(dict.fromkeys([task.row, *found]))


def _depth_first(task: _Task, rank: Mapping[int, int]) -> tuple[int, ...]:
    """Each operator as late as what needs it allows; of several branches that of the highest rank first."""
    done: dict[int, None] = {}
    stack = [(task.makers[task.graph.loss], False)]
    while stack:
        index, ready = stack.pop()
        if ready:
            done[index] = None
        elif index not in done:
            stack.append((index, True))
            # The last is done first.
            needs = {task.makers[name] for name in task.reads[index] if name in task.makers}
            stack += [(need, False) for need in sorted(needs, key=rank.__getitem__)]
    return tuple(done)
