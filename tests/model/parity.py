"""Whole models of the zoo and random cuts of them, and whether these compute the same.

Tolerance: 1e-9 relative to the largest number of a gradient. Only the order of a few sums may differ: a
value's or a weight's gradient from several stages.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import nn

from swarm.ids import Microbatch
from swarm.model.graph.capture import find_loss
from swarm.model.graph.ir import OpGraph
from swarm.model.graph.remote_autodiff import gradients
from swarm.model.graph.stage_module import cut
from swarm.model.graph.trace import Traced, trace
from tests.model import zoo

MB = Microbatch(0, 0)


class FullModel(NamedTuple):
    """A model, and what one process computes."""

    traced: Traced
    inputs: dict[str, torch.Tensor]
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]


def compute(model: nn.Module, traced: Traced, inputs: dict[str, torch.Tensor]) -> FullModel:
    model.zero_grad()
    loss = find_loss(model(**inputs))
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return FullModel(traced, inputs, loss.detach(), found)


@cache
def whole(name: str) -> FullModel:
    torch.manual_seed(0)
    model, sample = zoo.MODELS[name]()
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
