"""The shape of a stage's state, without any of its memory: for readers and keepers of states; and version 0.

The weights of a stage are one vector: the decayed parameters (two or more dimensions) first, then the others,
each in the module's order. The optimizer's vectors lie beside it. Every parameter begins on a cache line, as
in a single process, since its place decides the last bits of some products (`swarm.model.same_bits`): the
numbers between two parameters are 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple, TypeAlias

import torch

from swarm.errors import SetupError
from swarm.ids import Stage
from swarm.manifest import Run
from swarm.model.custom import custom_model, drawn
from swarm.model.fixed_point import blocks_of
from swarm.model.gpt import initial_value, stage_skeleton, weights_dtype
from swarm.model.optimizer import vector_layout
from swarm.model.reductions import add_tensor
from swarm.model.same_bits import CACHE_LINE_BYTES, aligned

LINE = CACHE_LINE_BYTES // 4
"""Numbers of float32 in a cache line; parameters begin at multiples of it."""
ROUNDED_BYTES = {"rounded16": 2.1, "rounded8": 1.1}
"""Of a number of a rounded sum on its way, and of the answer to it."""
SUM_BYTES = 5.25
"""Of a number of an exact sum on its way (`swarm.wire.whole_numbers`): 5.6 to 4.9 in a decoder's first steps
(3.3 million weights)."""


class Span(NamedTuple):
    """Position of a parameter in the flat vector."""

    start: int
    end: int
    shape: torch.Size


class Layout(NamedTuple):
    """Layout of a stage's weights, and of a step's sum: there the statistics of batch norms follow them. In a
    state these have a vector of their own.
    """

    spans: dict[str, Span]
    """By full name, in their order."""
    decayed: int
    """How many numbers of the vector decay: the first ones."""
    numel: int
    statistics: dict[str, float]
    """The momentum of each buffer of a batch norm, by full name, in their order."""
    terms: dict[str, Span]
    """Where the gradient of each weight, and each statistic, lies in a sum."""

    @property
    def statistics_numel(self) -> int:
        return sum(self.terms[name].shape.numel() for name in self.statistics)

    @property
    def blocks(self) -> dict[str, slice]:
        """Where the blocks of each weight lie in `dropped_bits`, if a run rounds gradients."""
        found: dict[str, slice] = {}
        end = 0
        for name, span in self.spans.items():
            start, end = end, end + blocks_of(span.end - span.start)
            found[name] = slice(start, end)
        return found

    @property
    def sum_numel(self) -> int:
        return self.numel + self.statistics_numel

    def views(self, flat: torch.Tensor, statistics: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """The parameters in a flat vector by full name, and statistics in theirs; they share its memory."""
        found = {name: flat[start:end].view(shape) for name, (start, end, shape) in self.spans.items()}
        if statistics is not None:
            for name in self.statistics:
                start, end, shape = self.terms[name]
                found[name] = statistics[start - self.numel : end - self.numel].view(shape)
        return found

    def terms_of(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The gradients and statistics in a sum by full name, likewise."""
        return {name: flat[start:end].view(shape) for name, (start, end, shape) in self.terms.items()}


def make_layout(
    shapes: Mapping[str, torch.Size], statistics: Mapping[str, tuple[torch.Size, float]] | None = None
) -> Layout:
    """How parameters of these shapes lie in a vector; `statistics`: batch norms' (shape, momentum)."""
    spans: dict[str, Span] = {}
    end = decayed = 0
    for name in sorted(shapes, key=lambda name: len(shapes[name]) < 2):  # stable: matrices first
        start = -(-end // LINE) * LINE
        end = start + shapes[name].numel()
        spans[name] = Span(start, end, shapes[name])
        decayed = end if len(shapes[name]) >= 2 else decayed
    momenta: dict[str, float] = {}
    terms, at = dict(spans), end
    for name, (shape, momentum) in (statistics or {}).items():
        momenta[name] = momentum
        terms[name] = Span(at, at + shape.numel(), shape)
        at += shape.numel()
    return Layout(spans, decayed, end, momenta, terms)


@lru_cache(maxsize=256)  # a module is built to find it
def stage_layout(run: Run, stage: Stage) -> Layout:
    """How the weights of a stage lie in its vector."""
    if not run.brings_model:
        return make_layout({name: one.shape for name, one in stage_skeleton(run, stage).named_parameters()})
    model = custom_model(run)
    traced, plan = model.traced, model.plans[stage]
    told = [told for index in plan.operators for told in traced.statistics.get(index, ())]
    return make_layout(
        {name: torch.Size(traced.graph.values[name].shape) for name in plan.parameters},
        {one.buffer: (traced.buffers[one.buffer].shape, one.momentum) for one in told},
    )


def shared_terms(run: Run, stage: Stage) -> dict[Stage, tuple[str, ...]]:
    """Other stage -> the weights and statistics that it holds as well as `stage` does, sorted.

    Tied weights: what a step does to them is the sum of what all stages that hold them found.
    """
    if not run.brings_model and run.built_in.head == "free":  # their stages have nothing in common
        return {}
    own = stage_layout(run, stage).terms.keys()
    common = {other: own & stage_layout(run, other).terms.keys() for other in range(run.S) if other != stage}
    return {other: tuple(sorted(names)) for other, names in common.items() if names}


MET_WEIGHTS, MET_MOMENTUM = "met_weights", "met_momentum"
"""Names of vectors in a stage's state: how they were after the last meeting of islands, with statistics."""


def empty_state(run: Run, stage: Stage) -> dict[str, torch.Tensor]:
    """The names, shapes and dtypes of `StageState.copy`, as tensors of the meta device."""
    layout, dtype = stage_layout(run, stage), weights_dtype(run)
    vectors = {"weights": (layout.numel, dtype), **vector_layout(run.optimizer, layout.numel, dtype)}
    if run.islands.count > 1:
        vectors[MET_WEIGHTS] = (layout.sum_numel, dtype)
        if run.islands.outer_momentum:
            vectors[MET_MOMENTUM] = (layout.numel, dtype)
    if layout.statistics:
        vectors["statistics"] = (layout.statistics_numel, dtype)
    if run.rounds_sums:
        blocks = sum(blocks_of(end - start) for start, end, _ in layout.spans.values())
        vectors["dropped_bits"] = (blocks, torch.uint8)
    if run.delayed_updates:
        vectors["weights_previous"] = vectors["weights"]
    return {name: torch.empty(n, dtype=kind, device="meta") for name, (n, kind) in vectors.items()}


# --- version 0 ---

Reader: TypeAlias = Callable[[Sequence[str], torch.Size], torch.Tensor]
"""Names of a tensor, any of which is right, and its shape -> the tensor. Raises SetupError: it has none."""
_readers: dict[str, Reader] = {}
"""Run's id -> where this machine has the weights that it starts from: as with code that a manifest names, a
matter of the machine, and what is read is compared with what the manifest pins."""


def start_from(run: Run, reader: Reader) -> None:
    """Have this process read the weights of the run's version 0 there."""
    _readers[run.whole.id] = reader


def can_start(run: Run) -> bool:
    """Whether version 0 can be made here."""
    return not run.start.weights or run.whole.id in _readers


def start_shapes(run: Run, stage: Stage) -> dict[str, torch.Size]:
    """The tensors of a stage that are read where the run starts from, by full name, sorted."""
    shapes = {name: span.shape for name, span in stage_layout(run, stage).terms.items()}
    if run.brings_model:
        model = custom_model(run)
        if run.lora.rank:  # what is trained is not there yet
            shapes = {name: shapes[name] for name in stage_layout(run, stage).statistics}
        frozen = model.traced.parameters.keys() & set(model.plans[stage].buffers)
        shapes |= {name: model.traced.parameters[name].shape for name in frozen}
    return dict(sorted(shapes.items()))


def start_tensors(run: Run, stage: Stage) -> dict[str, torch.Tensor]:
    """What a stage starts with, read and compared with the manifest's digest.

    Raises:
        SetupError: it is not here, a tensor is missing or has another shape, or a number differs or is not
            finite.
    """
    if not can_start(run):
        raise SetupError(
            f"the weights that run {run.whole.id} starts from are not here: give their folder with --start"
        )
    aliases = {names[0]: names for names in custom_model(run).traced.graph.tied} if run.brings_model else {}
    read, dtype = _readers[run.whole.id], weights_dtype(run)
    found = {
        name: finite(name, aligned(read(aliases.get(name, (name,)), shape).to(dtype)))
        for name, shape in start_shapes(run, stage).items()
    }
    if run.start.digests and start_digest(found, found.__getitem__) != run.start.digests[stage]:
        raise SetupError(
            f"the weights that stage {stage} starts with are others here than in the run "
            f"({run.start.digests[stage][:12]}…): take those that the run's owner has"
        )
    return found


def finite(name: str, weight: torch.Tensor) -> torch.Tensor:
    """A weight of version 0. Raises SetupError: the first step would come to nothing with it."""
    if not bool(weight.isfinite().all()):
        raise SetupError(f"{name}, a weight that the run starts with, is not finite: it has NaN or infinity")
    return weight


def start_digest(names: Iterable[str], value: Callable[[str], torch.Tensor]) -> str:
    """SHA-256 of what a stage starts with: each asked for when it is its turn."""
    digest = hashlib.sha256()
    for name in sorted(names):
        add_tensor(digest, name, value(name))
    return digest.hexdigest()


def initial_state(run: Run, stage: Stage, device: str | torch.device = "cpu") -> dict[str, torch.Tensor]:
    """`StageState.copy` of version 0, a function of the run alone. Raises SetupError: as `start_tensors`."""
    # Not `zeros_like`: of a tensor without data that takes 40 times as long.
    state = {
        name: torch.zeros(empty.shape, dtype=empty.dtype, device=device)
        for name, empty in empty_state(run, stage).items()
    }
    layout = stage_layout(run, stage)
    places = layout.views(state["weights"], state.get("statistics"))
    given = start_tensors(run, stage) if run.start.weights else {}
    others = drawn(run, stage) if run.brings_model else (
        (name, initial_value(run, name, view.shape)) for name, view in places.items() if name not in given
    )  # fmt: skip
    for name, value in chain(given.items(), others):
        if name in places:
            places[name].copy_(value)
    if "weights_previous" in state:
        state["weights_previous"].copy_(state["weights"])
    if MET_WEIGHTS in state:
        torch.cat(
            [state[name] for name in ("weights", "statistics") if name in state], out=state[MET_WEIGHTS]
        )
    return state


def reduce_bytes(run: Run, stage: Stage) -> float:
    """Of a stage's sum and of the settled answer to it, the mean: a reduce sends as many of either."""
    numel = stage_layout(run, stage).sum_numel
    if run.rounds_sums:
        return ROUNDED_BYTES[run.codec.reduce] * numel
    settled_bytes = (8 if run.dtype == "float64" else 4) * numel
    return ((SUM_BYTES * numel if run.adds_exactly else settled_bytes) + settled_bytes) / 2
