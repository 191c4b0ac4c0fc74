"""What each stage of a cut computes, takes and gives: pure bookkeeping on an operator graph.

Stages call one another in a row, so a value that skips over stages is carried through them. A value that
follows from constants is computed where it is needed. One that follows from the model's inputs alone (a mask
made of the padding) is computed there too, if those inputs pass anyway or are smaller; else it is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarm.errors import SetupError
from swarm.model.graph.ir import Operator, OpGraph, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage of a cut."""

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
    """The stages of a cut.

    Raises:
        SetupError: the cut is no cut of this graph; the text names an operator that is wrong.
    """
    _check(graph, assignment)
    makers = {output: op for op in graph.operators for output in op.outputs}
    roots = _roots(graph)
    ranks = _ranks(graph)
    plans: list[StagePlan] = []
    wanted = {graph.loss}  # what the stage has to give
    for stage in reversed(range(max(assignment) + 1)):
        here = _Stage(graph, makers, roots, frozenset(i for i, s in enumerate(assignment) if s == stage))
        here.compute(wanted, everything=not stage)
        indices = sorted(here.computed)
        ops = [graph.operators[i] for i in indices]
        taken = {name for op in ops for name in op.inputs} | wanted
        taken -= {name for op in ops for name in op.outputs}
        inputs = graph.inputs if stage == 0 else sorted(taken, key=ranks.__getitem__)
        plans.append(
            StagePlan(
                stage=stage,
                operators=tuple(indices),
                inputs=tuple(graph.values[name] for name in inputs),
                outputs=tuple(graph.values[name] for name in sorted(wanted, key=ranks.__getitem__)),
                parameters=_read(graph.parameters, (name for op in ops for name in op.parameters)),
                buffers=_read(graph.buffers, (name for op in ops for name in op.buffers)),
            )
        )
        wanted = taken
    return tuple(reversed(plans))


def shared_parameters(plans: Sequence[StagePlan]) -> dict[str, tuple[int, ...]]:
    """The parameters that several stages read, and which: their gradients have to be added up."""
    holders: dict[str, list[int]] = {}
    for plan in plans:
        for name in plan.parameters:
            holders.setdefault(name, []).append(plan.stage)
    return {name: tuple(stages) for name, stages in holders.items() if len(stages) > 1}


class _Stage:
    """Finds what one stage has to compute."""

    def __init__(
        self,
        graph: OpGraph,
        makers: dict[str, Operator],
        roots: dict[str, frozenset[str]],
        own: frozenset[int],
    ) -> None:
        self._graph, self._makers, self._roots, self._own = graph, makers, roots, own
        self.computed: set[int] = set()

    def compute(self, wanted: set[str], *, everything: bool) -> None:
        """Fill `computed`. `everything`: the model's inputs are here, whatever follows from them is free."""
        # Own work first: it says what has to come in anyway.
        own = {i for i in self._own if not self._free(self._graph.operators[i])}
        self.computed = set(own)
        needs = wanted | {name for i in own for name in self._graph.operators[i].inputs}
        passing = {name for name in needs if name in self._graph.inputs}
        # The later ones first: what they are computed from is needed then.
        open_names = sorted(needs, key=lambda name: self._makers[name].index if name in self._makers else -1)
        while open_names:
            name = open_names.pop()
            maker = self._makers.get(name)
            if maker is None or maker.index in self.computed or not self._free(maker):
                continue
            missing = self._roots[name] - passing
            cost = sum(self._graph.values[root].nbytes for root in missing)
            if everything or cost < self._graph.values[name].nbytes or not missing:
                passing |= missing
                self.computed.add(maker.index)
                open_names.extend(maker.inputs)

    def _free(self, op: Operator) -> bool:
        return op.outputs[0] in self._roots


def _roots(graph: OpGraph) -> dict[str, frozenset[str]]:
    """Value -> the model's inputs that it is computed from, for those that need no weights; also inputs."""
    roots = {name: frozenset((name,)) for name in graph.inputs}
    for op in graph.operators:
        if op.cheap:
            roots.update(dict.fromkeys(op.outputs, frozenset()))
        elif not op.parameters and not op.buffers and all(name in roots for name in op.inputs):
            found = frozenset[str]().union(*(roots[name] for name in op.inputs))
            roots.update(dict.fromkeys(op.outputs, found))
    return roots


def _ranks(graph: OpGraph) -> dict[str, int]:
    """A fixed order of all values that can cross a boundary: inputs, then operators' outputs."""
    names = (*graph.inputs, *(name for op in graph.operators for name in op.outputs))
    return {name: rank for rank, name in enumerate(names)}


def _read(all_names: Sequence[str], read: Iterable[str]) -> tuple[str, ...]:
    found = set(read)
    return tuple(name for name in all_names if name in found)


def _check(graph: OpGraph, assignment: Sequence[int]) -> None:
    if len(assignment) != len(graph.operators):
        raise SetupError(
            f"a cut of {len(graph.operators)} operators names the stage of {len(assignment)}; cut it again"
        )
    empty = set(range(max(assignment, default=0) + 1)) - set(assignment)
    if empty or min(assignment, default=0) < 0:
        raise SetupError(f"a cut whose stages are {sorted(set(assignment))}: they must count up from 0")
    makers = {output: op for op in graph.operators for output in op.outputs}
    for op in graph.operators:
        for name in op.inputs:
            source = makers.get(name)
            if source is None or source.cheap or assignment[source.index] <= assignment[op.index]:
                continue
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
