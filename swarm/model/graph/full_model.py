"""A custom model as one module, with given weights, in evaluation mode.

No dropout, running statistics, no codec: it is the model that leaves the swarm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from swarm.errors import SetupError
from swarm.manifest import Run
from swarm.model.graph.capture import WithLoss
from swarm.model.graph.custom_model import build, frozen_weights
from swarm.model.same_bits import aligned, use_threads_of

COUNTER = "num_batches_tracked"


class FullModel:
    """A custom model that gives its loss; `module` is the model alone."""

    def __init__(
        self,
        run: Run,
        weights: Mapping[str, torch.Tensor],
        *,
        steps: int = 0,
        device: str | torch.device = "cpu",
    ) -> None:
        """`weights`: trained parameters and batch norms' statistics, by full name, after so many `steps`.

        What no stage trains is as the run started with it, or as the model's code initialises it.

        Raises:
            SetupError: the model, or what it started with, cannot be had here; weights are not of it.
        """
        made = build(run)
        self.module: nn.Module = made.module
        self._with_loss = WithLoss(self.module, made.loss)
        if run.start.weights:
            for stage in range(run.S):
                fill(self._with_loss, frozen_weights(run, stage), 0)
        fill(self._with_loss, weights, steps)
        self._run, self._device = run, torch.device(device)
        self._with_loss.eval().to(self._device)
        example = (tuple(made.args), dict(made.kwargs), tuple(made.targets))
        self._example, self._form = pytree.tree_flatten(example)

    @torch.no_grad()
    def loss(self, inputs: Sequence[torch.Tensor | np.ndarray]) -> float:
        """The loss of a batch; `inputs`: the model's, in their order, with any number of samples."""
        use_threads_of(self._run)
        rest = iter(inputs)
        leaves: list[Any] = [
            aligned(torch.as_tensor(next(rest))).to(self._device, leaf.dtype)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in self._example
        ]
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._run.dtype == "bfloat16"):
            return float(self._with_loss(*pytree.tree_unflatten(leaves, self._form)).item())


@torch.no_grad()
def fill(whole: WithLoss, weights: Mapping[str, torch.Tensor], steps: int) -> None:
    """Give a model and its loss the trained weights and statistics, by full name, of so many steps.

    Raises:
        SetupError: they are not of it.
    """
    own = {**whole.weights(), **whole.tensors()}
    if strange := sorted(weights.keys() - own.keys()):
        raise SetupError(f"weights that this model does not have: {', '.join(strange[:5])}")
    for name, tensor in weights.items():
        if tensor.shape != own[name].shape:
            raise SetupError(
                f"weights {name} have shape {list(tensor.shape)}; expected {list(own[name].shape)}"
            )
        own[name].copy_(tensor)
        counter = own.get(f"{name.removesuffix('running_mean')}{COUNTER}")
        if counter is not None:
            counter.fill_(steps)
