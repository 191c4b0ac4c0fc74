"""The stages of a run one after another in one process: what `SingleProcess` computes a step with.

What goes from stage to stage passes its codec, and what a stage adds up over the microbatches of a step it
rounds as a stage of a swarm does. Nothing here is `StageCompute`'s.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn

from swarm.ids import Microbatch
from swarm.manifest import Run
from swarm.model.fixed_point import add_exact, to_float
from swarm.model.gpt import boundary_dtype, build_stage, replace_parameters, weights_dtype
from swarm.model.graph.ir import Value
from swarm.model.graph.remote_autodiff import backward
from swarm.model.graph.specialize import Traced
from swarm.model.graph.stage_module import cut
from swarm.model.same_bits import aligned
from swarm.model.stage import sqnorm
from swarm.model.stage_function import Output
from swarm.wire.codec import decode, encode, places_of, round_trip


class Totals(NamedTuple):
    """The totals of a step's microbatches."""

    gradients: dict[str, torch.Tensor]
    """By the name of the parameter, not divided by M."""
    sqnorm: float
    """The sum of their squares, added up as stages do."""


class Chain(Protocol):
    """All stages of a run."""

    parameters: dict[str, nn.Parameter]
    """The newest weights by full name: those that the optimizer changes."""

    def loss(self, rows: Any, mb: Microbatch, *, grad: bool) -> float:
        """The loss of a microbatch; `rows`: its samples. `grad`: its gradient is added up."""
        ...

    def totals(self) -> Totals:
        """The totals since the last call."""
        ...

    def take(self, M: int) -> None:
        """Prepare to take a step of M microbatches; afterwards the optimizer changes `parameters`."""
        ...

    def buffers(self) -> dict[str, torch.Tensor]:
        """The part of the weights that has no gradient: batch norms' statistics."""
        ...


class _Boundary(torch.autograd.Function):
    """The codecs between two stages, one forward and one backward.

    The gradient treats rounding as the identity, and what a top-k leaves out as zero.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, forward: str, backward: str) -> torch.Tensor:
        sent = encode(hidden, forward)
        ctx.codec, ctx.places = backward, places_of(sent)
        return decode(*sent, device=hidden.device)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return round_trip(grads[0], ctx.codec, places=ctx.places), None, None


class DecoderChain:
    """The built-in decoder: plain modules, and one graph through all stages."""

    def __init__(self, run: Run, device: torch.device) -> None:
        self._run, self._device = run, device
        self.stages = nn.ModuleList(build_stage(run, stage) for stage in range(run.S)).to(device)
        # With delayed updates a step is computed with the weights before the newest.
        self._held = copy.deepcopy(self.stages) if run.delayed_updates else self.stages
        self.parameters = {
            name: parameter for stage in self.stages for name, parameter in stage.named_parameters()
        }
        self._sums = [_Sum(exact=run.adds_exactly) for _ in range(run.S)]

    def loss(self, rows: Any, mb: Microbatch, *, grad: bool) -> float:
        """`rows`: tokens [B, T+1]."""
        run = self._run
        tokens = torch.from_numpy(rows.astype(np.int64)).to(self._device)
        x, labels = tokens[:, :-1], tokens[:, 1:]
        autocast = torch.autocast(self._device.type, torch.bfloat16, enabled=run.dtype == "bfloat16")
        with torch.set_grad_enabled(grad):
            for number, stage in enumerate(self._held):
                with autocast:
                    x = stage(x, labels if number == run.S - 1 else None, mb=mb)
                if number < run.S - 1:
                    forward = run.codec.forward_at(number)
                    backward = run.codec.backward_at(number, forward)
                    x = _Boundary.apply(x.to(boundary_dtype(run)), forward, backward)
            if grad:
                x.backward()
                for stage, total in zip(self._held, self._sums, strict=True):
                    total.add_gradients(stage)
        return float(x.item())

    def totals(self) -> Totals:
        """The totals; no weight is in two stages."""
        gradients = [
            total.settle(dict(stage.named_parameters()))
            for stage, total in zip(self.stages, self._sums, strict=True)
        ]
        squares = 0.0
        for own in gradients:
            squares += _sqnorm(own.values())
        return Totals({name: grad for own in gradients for name, grad in own.items()}, squares)

    def take(self, M: int) -> None:
        """Do nothing: the decoder has only weights."""
        if self._run.delayed_updates:
            for held, newest in zip(self._held.parameters(), self.parameters.values(), strict=True):
                held.data.copy_(newest)

    def buffers(self) -> dict[str, torch.Tensor]:
        """None."""
        return {}


class StageModuleChain:
    """A custom model: each stage module computed and differentiated by itself.

    A parameter that several stages hold is one tensor here, and so are a batch norm's statistics.
    """

    def __init__(self, run: Run, traced: Traced, assignment: Sequence[int], device: torch.device) -> None:
        self._run, self._device = run, device
        self.parameters = {
            name: nn.Parameter(traced.parameters[name].detach().to(device, copy=True))
            for name in traced.graph.parameters
        }
        # With delayed updates a step is computed with the weights before the newest.
        held = {
            name: p.detach().clone() if run.delayed_updates else p.detach()
            for name, p in self.parameters.items()
        }
        self._held, self._pieces = held, cut(traced, assignment, seed=run.seed)
        for piece in self._pieces:
            replace_parameters(piece, lambda name, _: held[name])
            piece.to(device)
        self._sums = [_Sum(exact=run.adds_exactly) for _ in self._pieces]

    def loss(self, rows: Any, mb: Microbatch, *, grad: bool) -> float:
        """`rows`: the model's inputs, in their order."""
        run, last = self._run, len(self._pieces) - 1
        arriving = [aligned(torch.as_tensor(values)).to(self._device) for values in rows]
        taken: list[list[torch.Tensor]] = []
        given: list[Output] = []
        places: list[list[torch.Tensor | None]] = [[None] * len(arriving)]
        """Of each stage's inputs: where the numbers were that a top-k kept."""
        for number, piece in enumerate(self._pieces):
            plan = piece.plan
            with torch.set_grad_enabled(grad):
                leaves = [
                    tensor.requires_grad_(grad and value.differentiable)
                    for value, tensor in zip(plan.inputs, arriving, strict=True)
                ]
                entering = [
                    leaf.to(getattr(torch, value.dtype))
                    for value, leaf in zip(plan.inputs, leaves, strict=True)
                ]
                with torch.autocast(self._device.type, torch.bfloat16, enabled=run.dtype == "bfloat16"):
                    output = piece(*entering, mb=mb)
                if number < last:
                    leaving = map(self._leaving, plan.outputs, output.values)
                    output = output._replace(values=tuple(leaving))
            if number < last:
                forward = run.codec.forward_at(number)
                arriving, kept = [], []
                for value, tensor in zip(plan.outputs, output.values, strict=True):
                    arrived, where = self._sent(tensor, forward) if value.differentiable else (tensor, None)
                    arriving.append(arrived.detach().clone(memory_format=torch.contiguous_format))
                    kept.append(where)
                places.append(kept)
            taken.append(leaves)
            given.append(output)
        (loss,) = given[-1].values
        if grad:
            self._backward(taken, given, places)
        return float(loss.item())

    def _sent(self, tensor: torch.Tensor, codec: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(what arrives, where the numbers are that a top-k keeps)."""
        sent = encode(tensor, codec)
        return decode(*sent, device=self._device), places_of(sent)

    def _backward(
        self,
        taken: Sequence[Sequence[torch.Tensor]],
        given: Sequence[Output],
        places: Sequence[Sequence[torch.Tensor | None]],
    ) -> None:
        codec = self._run.codec
        (loss,) = given[-1].values
        back = {self._pieces[-1].plan.outputs[0].name: torch.ones_like(loss)}
        for number in reversed(range(len(self._pieces))):
            piece = self._pieces[number]
            back = backward(piece, taken[number], given[number], back)
            for value, kept in zip(piece.plan.inputs, places[number], strict=True):
                if value.name in back:
                    answer = codec.backward_at(number - 1, codec.forward_at(number - 1))
                    back[value.name] = round_trip(back[value.name], answer, places=kept)
            self._sums[number].add_gradients(piece)
            for name, told in given[number].statistics.items():
                self._sums[number].add(name, told)

    def _leaving(self, value: Value, tensor: torch.Tensor) -> torch.Tensor:
        """As it is sent: rounded where the run is of less precision than its weights."""
        dtype = getattr(torch, value.dtype)
        if value.differentiable and dtype == weights_dtype(self._run):
            dtype = boundary_dtype(self._run)
        return tensor.to(dtype)

    def totals(self) -> Totals:
        """A parameter's total is the sum of its stages', in their order; its square counts at the first."""
        gradients: dict[str, torch.Tensor] = {}
        first: list[list[str]] = []
        for piece, total in zip(self._pieces, self._sums, strict=True):
            own = total.settle({name: piece.get_parameter(name) for name in piece.plan.parameters})
            first.append([name for name in own if name not in gradients])
            for name, grad in own.items():
                gradients[name] = gradients[name] + grad if name in gradients else grad
        squares = 0.0
        for names in first:
            squares += _sqnorm(gradients[name] for name in names)
        return Totals(gradients, squares)

    @torch.no_grad()
    def take(self, M: int) -> None:
        """The means of batch norms' statistics enter here."""
        totals: dict[str, torch.Tensor] = {}
        for piece, total in zip(self._pieces, self._sums, strict=True):
            buffers = {name: piece.get_buffer(name) for name in piece.statistics}
            for name, told in total.settle(buffers).items():
                totals[name] = totals[name] + told if name in totals else told
        means = {name: total * (1.0 / M) for name, total in totals.items()}
        for piece in self._pieces:
            piece.take_statistics(means)
        if self._run.delayed_updates:
            for name, newest in self.parameters.items():
                self._held[name].copy_(newest)

    def buffers(self) -> dict[str, torch.Tensor]:
        """Batch norms' statistics."""
        return {name: piece.get_buffer(name) for piece in self._pieces for name in piece.statistics}


class _Sum:
    """The sum of one stage in a step, by name: as whole numbers, or as floats."""

    def __init__(self, *, exact: bool) -> None:
        self._exact = exact
        self._totals: dict[str, torch.Tensor] = {}

    def add(self, name: str, term: torch.Tensor) -> None:
        """`term` keeps its memory to itself."""
        total = self._totals.get(name)
        if self._exact:
            if total is None:
                total = torch.zeros(term.numel(), dtype=torch.int64, device=term.device)
                self._totals[name] = total
            add_exact(total, term)
        elif total is None:
            self._totals[name] = term.detach().clone()
        else:
            total.add_(term)

    def add_gradients(self, module: nn.Module) -> None:
        """Add the gradients of a module's parameters, which then have none."""
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                self.add(name, parameter.grad)
                parameter.grad = None

    def settle(self, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The sums of these names, in the shape and dtype of their tensors; they begin anew."""
        settled: dict[str, torch.Tensor] = {}
        for name, tensor in like.items():
            total = self._totals.pop(name, None)
            if total is None:
                settled[name] = torch.zeros_like(tensor)
            elif self._exact:
                settled[name] = to_float(total, tensor.dtype).view_as(tensor)
            else:
                settled[name] = total
        return settled


def _sqnorm(sums: Iterable[torch.Tensor]) -> float:
    """Of one stage's sums in their order, added up as a stage does: matrices first."""
    ordered = sorted(sums, key=lambda vector: vector.dim() < 2)
    return sqnorm(torch.cat([vector.detach().reshape(-1) for vector in ordered])) if ordered else 0.0
