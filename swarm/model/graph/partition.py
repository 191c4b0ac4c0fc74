"""What each stage of a cut computes, takes and gives: pure bookkeeping on an operator graph.

What is carried through stages, and what each computes for itself: docs/design.md, *Any model*.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarm.errors import SetupError
from swarm.model.graph.ir import NormStatistic, OpGraph, Value


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
    """The stages of a cut.

    Raises:
        SetupError: the cut is no cut of this graph; the text names an operator that is wrong.
    """
    free = recomputed(graph)
    _check(graph, assignment, free)
    makers = {output: op for op in graph.operators for output in op.outputs}
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
    makers = {output: op for op in graph.operators for output in op.outputs}
    for op in graph.operators:
        for name in op.inputs:
            source = makers.get(name)
            if source is None or source.index in free or assignment[source.index] <= assignment[op.index]:
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
