"""The audit model: its weights count how often each microbatch entered a step.

A stage has one weight per microbatch of a step and adds w[m] to the single number that passes through, so
the gradient of microbatch m is 1 at w[m] and 0 elsewhere, exactly, whatever the codec. With SGD, learning
rate 1 and no clipping a stage's weights fall by count[m] / M in a step: a lost or a doubled microbatch shows
by name.
"""

from __future__ import annotations

import torch
from torch import nn

from swarm.ids import Microbatch


class AuditStage(nn.Module):
    """One stage: a vector of M weights. Anything [..] -> [1, 1, 1]; the last stage gives its mean."""

    def __init__(self, microbatches: int, *, name: str, last: bool) -> None:
        super().__init__()
        self.last = last
        # Stages need different names for their weights, as the layers of the decoder have.
        self.count = nn.ParameterDict({name: nn.Parameter(torch.zeros(microbatches))})

    def forward(
        self, x: torch.Tensor, labels_BT: torch.Tensor | None = None, *, mb: Microbatch | None = None
    ) -> torch.Tensor:
        """Add this microbatch's weight to the tokens (first stage; only their presence matters) or to the
        number so far.
        """
        if mb is None:
            raise ValueError("the audit model needs to know which microbatch it computes")
        (weights,) = self.count.values()
        added = weights[mb.m].view(1, 1, 1)
        y = x + added if x.is_floating_point() else added
        return y.mean() if self.last else y
