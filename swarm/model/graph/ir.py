"""A model as a graph of operators: plain data, made by tracing (`swarm.model.graph.trace`) or by hand.

Nodes are ATen calls, edges the tensors between them; FusionLLM (Tang et al., 2024, section 3) calls it the
OP-DAG. A *cut* of it is `assignment`, the stage of each operator by its index.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor that flows: an input of the model, a parameter, a buffer, or the output of an operator."""

    name: str
    """Unique in the graph."""
    shape: tuple[int, ...]
    """Of the sample microbatch."""
    dtype: str
    """torch's name of it."""
    differentiable: bool
    """Floating point, and depends on a parameter: a gradient comes back for it."""

    @property
    def numel(self) -> int:
        """How many numbers."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Of its numbers, uncompressed."""
        return self.numel * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One ATen call, or one of a Function of the model's own."""

    index: int
    """Its place in a topological order."""
    name: str
    """The traced node's, unique."""
    target: str
    """Such as `aten.addmm.default`; or the class with its module."""
    module: str
    """Full name of the module that it belongs to, `layers.3.attention`; "" if none."""
    inputs: tuple[str, ...]
    """Values it reads (inputs of the model, outputs of operators), without duplicates."""
    parameters: tuple[str, ...]
    """Parameters it reads."""
    buffers: tuple[str, ...]
    """Buffers and constant tensors it reads."""
    outputs: tuple[str, ...]
    """Values it makes: several for split, topk, ..."""
    cheap: bool
    """It depends on constants and shapes alone, so a stage can compute it from nothing that must be sent:
    masks, rotary tables, positions."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class OpGraph:
    """All operators of a model with its loss, in a topological order."""

    operators: tuple[Operator, ...]
    values: Mapping[str, Value]
    """By name: inputs, parameters, buffers, outputs of operators."""
    inputs: tuple[str, ...]
    """The model's inputs, in order."""
    loss: str
    """The value that is the scalar loss."""
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    tied: tuple[tuple[str, ...], ...]
    """Groups of names of one tensor; the first of each is the one in `parameters`."""
