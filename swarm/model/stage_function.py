"""What a stage computes, apart from where its weights are: tensors in, tensors out.

The decoder and the audit model have one tensor with a gradient at each boundary, and carry the tokens beside
it; a custom model has the values that its cut needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from swarm.ids import Microbatch, Stage
from swarm.manifest import Run
from swarm.model.custom import custom_model, stage_module
from swarm.model.gpt import stage_skeleton
from swarm.model.stage_io import StageInput, stage_inputs

Values: TypeAlias = Sequence[torch.Tensor | None]


class Output(NamedTuple):
    values: tuple[torch.Tensor, ...]
    """As the stage's outputs; those that came in are the same tensors."""
    statistics: dict[str, torch.Tensor]
    """Buffer -> the microbatch's statistic, without gradient. Empty but for batch norm in training."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StageFunction:
    """One stage's forward, as a function of its weights, its inputs and the name of the microbatch."""

    takes: tuple[StageInput, ...]
    gives: tuple[StageInput, ...]
    """The inputs of the next stage; empty at the last one, which has a loss."""
    dtypes: tuple[torch.dtype | None, ...]
    """In which it computes with each of `takes`, on the device; None: that only passes through."""
    passes: Mapping[int, int] = field(default_factory=dict)
    """Output without a gradient -> the input that it is, unchanged."""
    module: Callable[[], nn.Module]
    """A new one each time. Its parameters have shapes; their numbers do not count."""
    compute: Callable[[nn.Module, Values, Microbatch | None], Output]
    """Outputs as `gives` has them (what passes is not looked at), or the loss; in the module's dtypes.
    Without a microbatch it evaluates: nothing is dropped, nor added to the loss."""
    halves: bool
    """It is computed in bfloat16 where that does no harm: by autocast."""
    alone: bool = False
    """One microbatch at a time: a weight's gradient has three parts or more, and torch adds that of what
    autocast rounded, which it keeps for all threads, when the one that rounded would."""
    lock: AbstractContextManager[object] | None = None
    """Held for as long by the threads of a peer. Without, what others have rounded is not forgotten."""

    def apply(
        self, module: nn.Module, given: Values, mb: Microbatch | None, device: torch.device
    ) -> tuple[list[torch.Tensor], Output]:
        """The inputs that have a gradient, as they came, and what is computed with all of them."""
        leaves: list[torch.Tensor] = []
        values: list[torch.Tensor | None] = []
        for what, dtype, value in zip(self.takes, self.dtypes, given, strict=True):
            if value is not None and what.graded:
                leaves.append(value.requires_grad_(mb is not None))
            values.append(None if value is None or dtype is None else value.to(dtype))
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=self.halves)
        alone = self.lock if self.alone else None
        # Without a graph an LSTM, or attention with a learned mask, has another kernel, of other last bits.
        with alone or nullcontext(), torch.set_grad_enabled(mb is not None), autocast:
            if alone is not None:
                torch.clear_autocast_cache()
            return leaves, self.compute(module, values, mb)

    def graded(self, made: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of the outputs those that have a gradient, in the dtypes of the boundary; or the loss."""
        if not self.gives:
            return [made[0]]
        return [made[n].to(getattr(torch, what.dtype)) for n, what in enumerate(self.gives) if what.graded]


def stage_function(run: Run, stage: Stage) -> StageFunction:
    return _custom(run, stage) if run.brings_model else _built_in(run, stage)


def _built_in(run: Run, stage: Stage) -> StageFunction:
    first, last = stage == 0, stage == run.S - 1
    hidden = () if first else (getattr(torch, run.dtype),)
    reads = first or last or run.built_in.bottleneck or run.data.document_mask

    def compute(module: nn.Module, values: Values, mb: Microbatch | None) -> Output:
        *hidden, tokens = values
        ids, labels = (None, None) if tokens is None else (tokens[:, :-1], tokens[:, 1:])
        return Output((module(*hidden or (ids,), labels, ids_BT=ids, mb=mb),), {})

    return StageFunction(
        takes=stage_inputs(run, stage), gives=() if last else stage_inputs(run, stage + 1),
        dtypes=(*hidden, torch.int64 if reads else None), passes={} if last else {1: len(hidden)},
        module=lambda: stage_skeleton(run, stage), compute=compute, halves=run.dtype == "bfloat16",
    )  # fmt: skip


def _custom(run: Run, stage: Stage) -> StageFunction:
    model = custom_model(run)
    graph, plan = model.traced.graph, model.plans[stage]
    read = {name for index in plan.operators for name in graph.operators[index].inputs}
    parts = [name for index in plan.operators for name in graph.operators[index].parameters]
    comes = {value.name: number for number, value in enumerate(plan.inputs)}
    dtypes = [
        getattr(torch, value.dtype) if value.differentiable or value.name in read else None
        for value in plan.inputs
    ]
    passes = {
        number: comes[value.name]
        for number, value in enumerate(plan.outputs)
        if value.name in comes and not value.differentiable
    }

    return StageFunction(
        takes=stage_inputs(run, stage), gives=() if stage == run.S - 1 else stage_inputs(run, stage + 1),
        dtypes=tuple(dtypes), passes=passes, module=lambda: stage_module(run, stage),
        compute=lambda module, values, mb: module(*values, mb=mb), halves=run.dtype == "bfloat16",
        alone=run.dtype == "bfloat16" and any(parts.count(name) > 2 for name in plan.parameters),
    )  # fmt: skip
