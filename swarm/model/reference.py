"""The same run in a single process: what every swarm must arrive at, and what `--verify` compares with.

Deliberately not built on `StageCompute`: plain modules, one graph through all stages, gradients in `.grad`,
torch's own optimizer. Only the weights' initial values and the codecs at the boundaries are shared.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from swarm.data import sample_offsets
from swarm.errors import SetupError
from swarm.ids import Microbatch
from swarm.model.exact import add_exact, to_float
from swarm.model.gpt import boundary_dtype, build_stage
from swarm.model.stage import sqnorm
from swarm.run import Run
from swarm.wire.codec import decode, encode, places_of, round_trip


class _Boundary(torch.autograd.Function):
    """What a tensor goes through between two stages: one codec forward, one backward.

    What rounds is taken for the identity by the gradient, what a top-k leaves out for the zero that it is.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, forward: str, backward: str) -> torch.Tensor:
        sent = encode(hidden, forward)
        ctx.codec, ctx.places = backward, places_of(sent)
        return decode(*sent, device=hidden.device)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return round_trip(grads[0], ctx.codec, places=ctx.places), None, None


class SingleProcess:
    """All stages of a run, chained, with the codecs' round trips at the boundaries."""

    def __init__(
        self, run: Run, batch: Callable[[list[int]], np.ndarray], device: str | torch.device = "cpu"
    ) -> None:
        """`batch`: offsets -> tokens [B, T+1], such as a dataset's method of that name.

        Raises:
            SetupError: the optimizer is adamw8bit, which has no reference, or what is sent depends on routes.
        """
        if run.optimizer.name == "adamw8bit":
            raise SetupError('optimizer.name = "adamw8bit" cannot be verified: there is no reference for it')
        if run.depends_on_routes:
            raise SetupError(
                "a run with codec.adaptive cannot be verified: what it arrives at depends on its routes"
            )
        self.run, self.version = run, 0
        self._batch, self._device = batch, torch.device(device)
        self._stages = nn.ModuleList(build_stage(run, stage) for stage in range(run.S)).to(self._device)
        # With delayed updates a step is computed with the weights before the newest.
        self._previous = copy.deepcopy(self._stages) if run.delayed_updates else self._stages
        spec, parameters = run.optimizer, list(self._stages.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": spec.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        if spec.name == "adamw":
            self._optimizer: torch.optim.Optimizer = torch.optim.AdamW(
                groups, lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps, foreach=False
            )
        else:
            # torch's SGD has no decoupled decay: it is done by hand in `step`.
            for group in groups:
                group["decay"] = group.pop("weight_decay")
            self._optimizer = torch.optim.SGD(groups, lr=spec.lr, momentum=spec.momentum, foreach=False)

    def loss(self, mb: Microbatch, *, grad: bool = True) -> float:
        """The mean loss of a microbatch of the present step; `grad`: also add its gradient."""
        run = self.run
        rows = self._batch(sample_offsets(run, mb.t, mb.m))
        tokens = torch.from_numpy(rows.astype(np.int64)).to(self._device)
        x, labels = tokens[:, :-1], tokens[:, 1:]
        autocast = torch.autocast(self._device.type, torch.bfloat16, enabled=run.dtype == "bfloat16")
        with torch.set_grad_enabled(grad):
            for number, stage in enumerate(self._previous):
                with autocast:
                    x = stage(x, labels if number == run.S - 1 else None, mb=mb)
                if number < run.S - 1:
                    forward = run.codec.forward_at(number)
                    backward = run.codec.backward_at(number, forward)
                    x = _Boundary.apply(x.to(boundary_dtype(run)), forward, backward)
            if grad:
                x.backward()
        return float(x.item())

    def step(self, t: int) -> list[float]:
        """Do step `t`, the next one; the losses of its microbatches in order."""
        assert t == self.version, "steps are done in order"
        run, spec = self.run, self.run.optimizer
        held = list(self._previous.parameters())
        exact = (
            [torch.zeros(p.numel(), dtype=torch.int64, device=p.device) for p in held]
            if run.adds_exactly
            else []
        )
        losses = []
        for m in range(run.M):
            losses.append(self.loss(Microbatch(t, m)))
            for total, parameter in zip(exact, held, strict=False):
                if parameter.grad is not None:
                    add_exact(total, parameter.grad)
                    parameter.grad = None
        for total, parameter in zip(exact, held, strict=False):
            parameter.grad = to_float(total, parameter.dtype).view_as(parameter)
        parameters = list(self._stages.parameters())
        sums = [p.grad if p.grad is not None else torch.zeros_like(p) for p in held]
        # One factor for the mean and the clipping, as the stages have it: two would round twice.
        scale = 1.0 / run.M
        if spec.clip_norm:
            norm = math.sqrt(self._sqnorm(sums)) / run.M
            scale *= min(1.0, spec.clip_norm / (norm + 1e-6))
        grads = [total * scale for total in sums]
        newest = [p.detach().clone() for p in parameters] if run.delayed_updates else []
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        lr = spec.lr_at(t, run.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
            for parameter in group["params"]:
                parameter.data.mul_(1.0 - lr * group.get("decay", 0.0))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        for parameter, value in zip(held, newest, strict=False):
            parameter.data.copy_(value)
            parameter.grad = None
        self.version = t + 1
        return losses

    def _sqnorm(self, sums: list[torch.Tensor]) -> float:
        """Of all parameters' sums, added up as stages do: matrices first, then stage by stage."""
        left, total = iter(sums), 0.0
        for stage in self._stages:
            own = sorted((next(left) for _ in stage.parameters()), key=lambda vector: vector.dim() < 2)
            total += sqnorm(torch.cat([vector.reshape(-1) for vector in own]))
        return total

    def named_weights(self) -> dict[str, torch.Tensor]:
        """The newest weights of all stages by full name, on the CPU."""
        return {
            name: parameter.detach().cpu().clone()
            for stage in self._stages
            for name, parameter in stage.named_parameters()
        }
