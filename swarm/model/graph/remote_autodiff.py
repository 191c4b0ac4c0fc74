"""Remote automatic differentiation in one process: the specification of a pipeline of stage modules.

FusionLLM (Tang et al., 2024, section 4). Each stage sees tensors that are cut off from the stage before; what
comes back over a boundary is the gradient of each differentiable value that went out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from swarm.ids import Microbatch
from swarm.model.graph.ir import Value
from swarm.model.graph.stage_module import StageModule
from swarm.model.stage_function import Output


class Gradients(NamedTuple):
    """The gradients of one microbatch."""

    loss: torch.Tensor
    parameters: dict[str, torch.Tensor]
    """By name; of a parameter that several stages hold the sum over them."""
    statistics: dict[str, torch.Tensor]
    """By buffer; likewise."""


def gradients(pieces: Sequence[StageModule], inputs: Mapping[str, torch.Tensor], mb: Microbatch) -> Gradients:
    """Compute a microbatch through all stages, and back. `inputs` by name.

    The modules' parameters have no `.grad`, before and after.
    """
    passing = dict(inputs)
    taken: list[list[torch.Tensor]] = []
    given: list[Output] = []
    for piece in pieces:
        taken.append([_leaf(value, passing[value.name]) for value in piece.plan.inputs])
        given.append(piece(*taken[-1], mb=mb))
        passing = {v.name: out for v, out in zip(piece.plan.outputs, given[-1].values, strict=True)}
    (loss,) = given[-1].values
    total: dict[str, torch.Tensor] = {}
    statistics: dict[str, torch.Tensor] = {}
    back = {pieces[-1].plan.outputs[0].name: torch.ones_like(loss)}
    for piece, leaves, output in zip(reversed(pieces), reversed(taken), reversed(given), strict=True):
        back = backward(piece, leaves, output, back)
        for name, parameter in piece.named_parameters():
            _add(total, name, parameter.grad)
            parameter.grad = None
        for name, told in output.statistics.items():
            _add(statistics, name, told)
    return Gradients(loss.detach(), total, statistics)


def backward(
    piece: StageModule, leaves: Sequence[torch.Tensor], output: Output, back: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Add to the `.grad` of the module's parameters; return the gradients of its differentiable inputs by
    name.

    `back`: those of its differentiable outputs. An input that is passed on gets the sum of both.
    """
    roots = [
        (out, back[value.name])
        for value, out in zip(piece.plan.outputs, output.values, strict=True)
        if value.differentiable and out.requires_grad
    ]
    torch.autograd.backward([out for out, _ in roots], [grad for _, grad in roots])
    return {
        value.name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for value, leaf in zip(piece.plan.inputs, leaves, strict=True)
        if value.differentiable
    }


def _leaf(value: Value, tensor: torch.Tensor) -> torch.Tensor:
    """As it arrives on another machine: on its own, and contiguous."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).requires_grad_(value.differentiable)


def _add(total: dict[str, torch.Tensor], name: str, grad: torch.Tensor | None) -> None:
    if grad is not None:
        total[name] = total[name] + grad if name in total else grad
