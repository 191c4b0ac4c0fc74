"""The same run in a single process: what every swarm must arrive at, and what `--verify` compares with.

Deliberately not built on `StageCompute`: plain modules, gradients in `.grad`, torch's own optimizer. Only the
weights' initial values and the codecs at the boundaries are shared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from swarm.data import sample_offsets
from swarm.errors import SetupError
from swarm.ids import Microbatch
from swarm.manifest import Run
from swarm.model.graph.custom_model import custom_model, model_inputs
from swarm.model.reference_pipeline import Chain, DecoderChain, StageModuleChain
from swarm.model.same_bits import use_threads_of


class SingleProcess:
    """All stages of a run in a row, with the codecs' round trips at the boundaries."""

    def __init__(
        self,
        run: Run,
        batch: Callable[[list[int]], Any],
        device: str | torch.device = "cpu",
        *,
        chain: Chain | None = None,
    ) -> None:
        """`batch`: offsets -> samples, as a dataset's method of that name. `chain`: instead of the run's own.

        Raises:
            SetupError: the optimizer is adamw8bit, which has no reference, or what is sent depends on routes.
        """
        if run.optimizer.name == "adamw8bit":
            raise SetupError('optimizer.name = "adamw8bit" cannot be verified: there is no reference for it')
        if run.depends_on_routes:
            raise SetupError(
                "a run with codec.adaptive cannot be verified: what it arrives at depends on its routes"
            )
        self.run, self.version, self._batch = run, 0, batch
        self.chain = chain or _chain_of(run, torch.device(device))
        spec, parameters = run.optimizer, list(self.chain.parameters.values())
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
        use_threads_of(self.run)
        rows = self._batch(sample_offsets(self.run, mb.t, mb.m))
        if self.run.brings_model:
            rows = model_inputs(self.run, rows)
        return self.chain.loss(rows, mb, grad=grad)

    def step(self, t: int) -> list[float]:
        """Do step `t`, the next one; return the losses of its microbatches in order."""
        assert t == self.version, "steps are done in order"
        run, spec = self.run, self.run.optimizer
        losses = [self.loss(Microbatch(t, m)) for m in range(run.M)]
        sums, sqnorm = self.chain.totals()
        # One factor for the mean and the clipping, as the stages have it: two would round twice.
        scale = 1.0 / run.M
        if spec.clip_norm:
            norm = math.sqrt(sqnorm) / run.M
            scale *= min(1.0, spec.clip_norm / (norm + 1e-6))
        self.chain.take(run.M)
        for name, parameter in self.chain.parameters.items():
            parameter.grad = sums[name] * scale
        lr = spec.lr_at(t, run.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
            for parameter in group["params"]:
                parameter.data.mul_(1.0 - lr * group.get("decay", 0.0))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.version = t + 1
        return losses

    def named_weights(self) -> dict[str, torch.Tensor]:
        """The newest weights of all stages by full name, on the CPU."""
        found = {**self.chain.parameters, **self.chain.buffers()}
        return {name: tensor.detach().cpu().clone() for name, tensor in found.items()}


def _chain_of(run: Run, device: torch.device) -> Chain:
    if not run.brings_model:
        return DecoderChain(run, device)
    model = custom_model(run)
    return StageModuleChain(run, model.traced, model.assignment, device)
