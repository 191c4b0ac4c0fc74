"""`swarm.reference`: the same run in this process, to compare with."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from peers.api.run import Run
from peers.api.steps import Step
from peers.api.trained import trained_module
from swarm.model.reference import SingleProcess
from swarm.model.same_bits import threads_as_before

if TYPE_CHECKING:
    from torch import nn


class Reference:
    """A run in one process, step by step; iterating it takes the steps that are left."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._single = SingleProcess(run.terms, run.open_data().batch)

    def __iter__(self) -> Iterator[Step]:
        terms, single = self.run.terms, self._single
        while single.version < terms.steps:
            t, began = single.version, time.monotonic()
            with threads_as_before():
                losses = single.step(t)
            tokens = len(losses) * terms.tokens_per_step / terms.M
            yield Step(
                t=t, steps=terms.steps, losses=tuple(losses),
                loss=sum(losses) / len(losses) if losses else None,
                tokens_per_s=tokens / (time.monotonic() - began),
            )  # fmt: skip

    def weights(self) -> dict[str, torch.Tensor]:
        """The trained weights by full name; takes the steps that are left."""
        for _ in self:
            pass
        return self._single.named_weights()

    def model(self) -> nn.Module:
        """The trained model, in evaluation mode; takes the steps that are left."""
        return trained_module(self.run, self.weights(), self.run.terms.steps)


def reference(run: Run) -> Reference:
    """The same run in one process: its losses and weights are what every swarm has to arrive at.

    Raises:
        SetupError: the run has none, since its result depends on routes, or its optimizer needs a GPU.
    """
    return Reference(run)
