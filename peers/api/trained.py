"""Trained weights as a module that can be called."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from swarm.errors import SetupError
from swarm.model.gpt import given_decoder

if TYPE_CHECKING:
    from torch import nn

    from peers.api.run import Run


def trained_module(run: Run, weights: Mapping[str, torch.Tensor], steps: int) -> nn.Module:
    """The model of a run with weights by full name, after so many steps, in evaluation mode.

    A module that was given from Python comes back as a copy of what it is; the built-in decoder takes tokens
    and gives logits.

    Raises:
        SetupError: the run has the audit model, which computes nothing.
    """
    terms = run.terms
    if run.module is not None:
        from swarm.model.graph.capture import WithLoss
        from swarm.model.graph.full_model import fill

        model, loss = copy.deepcopy((run.module, run.loss))
        fill(WithLoss(model, loss), weights, steps)
        return model.eval()
    if terms.brings_model:
        from swarm.model.graph.full_model import FullModel

        return FullModel(terms, weights, steps=steps).module
    if terms.model.kind != "gpt":
        raise SetupError(f'model.kind = "{terms.model.kind}" is there to count microbatches: it is no model')
    return given_decoder(terms, weights, torch.device("cpu"))
