"""Whole models of the zoo and random cuts of them, and whether these compute the same.

Tolerance: 1e-9 relative to the largest number of a gradient. Only the order of a few sums may differ: a
value's or a weight's gradient from several stages.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import nn

from swarm.ids import Microbatch
from swarm.model.graph.capture import find_loss
from swarm.model.graph.ir import OpGraph, Value
from swarm.model.graph.lazy_tensors import LazyTensors, seeded
from swarm.model.graph.partition import plan_stages
from swarm.model.graph.stage_module import StageModule
from swarm.model.graph.trace import Traced, trace
from swarm.model.stage_function import Output
from tests.model.graph import zoo

MB = Microbatch(0, 0)


class FullModel(NamedTuple):
    """A model, and what one process computes."""

    traced: Traced
    inputs: dict[str, torch.Tensor]
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]


def cut(traced: Traced, assignment: Sequence[int], *, seed: int) -> list[StageModule]:
    """The stage modules of a cut. Raises SetupError: the cut is no cut of this graph."""
    return [StageModule(traced, plan, seed=seed) for plan in plan_stages(traced.graph, assignment)]


def compute(model: nn.Module, traced: Traced, inputs: dict[str, torch.Tensor]) -> FullModel:
    model.zero_grad()
    loss = find_loss(model(**inputs))
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return FullModel(traced, inputs, loss.detach(), found)


@cache
def whole(name: str) -> FullModel:
    lazy = LazyTensors(0)  # as runs with seed 0 begin
    with seeded(0), lazy.noted():
        model, sample = zoo.MODELS[name]()
    lazy.fill_all(model.modules(), sample)
    model = model.double().train()
    args = tuple(x.double() if x.is_floating_point() else x for x in sample)
    traced = trace(model, args)
    return compute(model, traced, dict(zip(traced.graph.inputs, args, strict=True)))


def random_order(graph: OpGraph, dice: random.Random) -> list[int]:
    """Any topological order of the operators."""
    makers = {output: op.index for op in graph.operators for output in op.outputs}
    waiting = {op.index: {makers[n] for n in op.inputs if n in makers} for op in graph.operators}
    order: list[int] = []
    while waiting:
        ready = [index for index, needs in waiting.items() if not needs]
        order.append(dice.choice(ready))
        del waiting[order[-1]]
        for needs in waiting.values():
            needs.discard(order[-1])
    return order


def random_cuts(graph: OpGraph, count: int, seed: int) -> Iterator[list[int]]:
    """Cuts into 2 to 8 stages, contiguous in random topological orders."""
    dice = random.Random(seed)
    for number in range(count):
        order = random_order(graph, dice)
        stages = min(2 + number % 7, len(order))
        ends = sorted(dice.sample(range(1, len(order)), stages - 1))
        assignment = [0] * len(order)
        for place, index in enumerate(order):
            assignment[index] = sum(end <= place for end in ends)
        yield assignment


def check_parity(one: FullModel, count: int) -> None:
    for assignment in random_cuts(one.traced.graph, count, seed=1):
        pieces = cut(one.traced, assignment, seed=0)
        got = gradients(pieces, one.inputs, MB)
        torch.testing.assert_close(got.loss, one.loss, rtol=1e-9, atol=0)
        assert set(got.parameters) == set(one.gradients)
        for name, expected in one.gradients.items():
            error = (got.parameters[name] - expected).abs().max().item()
            assert error <= 1e-9 * expected.abs().max().item(), (name, assignment)


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
