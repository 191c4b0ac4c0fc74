"""What the state of a stage looks like, without any of its memory: for who keeps or reads states.

The weights of a stage are one vector: the decayed parameters (two or more dimensions) first, then the others,
each in the module's order. The optimizer's vectors lie beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from swarm.errors import Refused
from swarm.ids import Stage
from swarm.model.gpt import initial_value, stage_skeleton, weights_dtype
from swarm.model.optimizer import vector_layout
from swarm.run import Run


class Span(NamedTuple):
    """Where a parameter lies in the flat vector."""

    start: int
    end: int
    shape: torch.Size


class Layout(NamedTuple):
    """Of the weights of one stage."""

    spans: dict[str, Span]
    """By full name, in their order."""
    decayed: int
    """So many numbers of the vector decay: the first."""
    numel: int

    def views(self, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters of a flat vector by full name; they share its memory."""
        for name, (start, end, shape) in self.spans.items():
            yield name, flat[start:end].view(shape)


def layout_of(module: nn.Module) -> Layout:
    """How the parameters of a stage's module lie in its vector."""
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    spans: dict[str, Span] = {}
    end = decayed = 0
    for name in sorted(shapes, key=lambda name: len(shapes[name]) < 2):  # stable: matrices first
        start, end = end, end + shapes[name].numel()
        spans[name] = Span(start, end, shapes[name])
        decayed = end if len(shapes[name]) >= 2 else decayed
    return Layout(spans, decayed, end)


def stage_layout(run: Run, stage: Stage) -> Layout:
    """How the weights of a stage lie in its vector."""
    return layout_of(stage_skeleton(run, stage))


def empty_state(run: Run, stage: Stage) -> dict[str, torch.Tensor]:
    """The names, shapes and dtypes of `StageCompute.state()`, as tensors of the meta device."""
    layout, dtype = stage_layout(run, stage), weights_dtype(run)
    vectors = {
        "weights": (layout.numel, dtype),
        **vector_layout(run.optimizer, layout.numel, layout.decayed, dtype),
    }
    if run.delayed_updates:
        vectors["weights_previous"] = vectors["weights"]
    return {name: torch.empty(n, dtype=kind, device="meta") for name, (n, kind) in vectors.items()}


def initial_weights(run: Run, layout: Layout, device: torch.device) -> torch.Tensor:
    """The vector of version 0, a function of the run alone."""
    weights = torch.empty(layout.numel, dtype=weights_dtype(run), device=device)
    for name, view in layout.views(weights):
        view.copy_(initial_value(run, name, view.shape))
    return weights


def initial_state(run: Run, stage: Stage) -> dict[str, torch.Tensor]:
    """`StageCompute.state()` of version 0, on the CPU: nothing is in the optimizer's vectors yet."""
    weights = initial_weights(run, stage_layout(run, stage), torch.device("cpu"))
    return {
        name: weights if name.startswith("weights") else torch.zeros_like(empty, device="cpu")
        for name, empty in empty_state(run, stage).items()
    }


def named_weights(run: Run, stage: Stage, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parameters in a stage's vector `weights`, by full name; they share its memory.

    Raises:
        Refused: the vector does not fit the stage.
    """
    layout, dtype = stage_layout(run, stage), weights_dtype(run)
    if flat.shape != (layout.numel,) or flat.dtype != dtype:
        raise Refused(
            f"weights of {list(flat.shape)} numbers of {flat.dtype}; "
            f"stage {stage} has [{layout.numel}] of {dtype}"
        )
    return dict(layout.views(flat))
