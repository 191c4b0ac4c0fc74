"""A model as a graph of operators, and how each is computed: plain data, made by tracing
(`swarm.model.graph.trace`) or by hand.

Nodes are ATen calls, edges the tensors between them; FusionLLM (Tang et al., 2024, section 3) calls it the
OP-DAG. A *cut* of it is `assignment`, the stage of each operator by its index.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import map_aggregate


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
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    tied: tuple[tuple[str, ...], ...]
    """Groups of names of one tensor; the first of each is the one in `parameters`."""

    @property
    def makers(self) -> dict[str, Operator]:
        """By the names of their outputs."""
        return {output: op for op in self.operators for output in op.outputs}


# --- how operators are computed -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for a value in the arguments of a call."""

    name: str


RANDOM, DEVICE = Ref("draws:"), Ref("device:")
"""The microbatch's chance (`kernels.SeededRandom`), and the device that computes. No value is called so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A function and its arguments, in which `Ref`s stand for values."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[str, ...]
    """Names of what it returns. Those of statistics are no values of the graph."""
    several: bool
    """It returns a sequence, even if of one."""
    plain: bool
    """To be computed without autocast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormStatistic:
    """A batch norm call's statistic of a microbatch, and the buffer that it is for."""

    buffer: str
    value: str
    """Name of the output that holds it."""
    weight: float
    """1 / the number of calls of this batch norm in the model: a buffer gets the mean of them."""
    momentum: float


def refs(args: Any) -> list[Ref]:
    """All values in the arguments of a call."""
    found: list[Ref] = []
    map_aggregate(args, lambda part: found.append(part) if isinstance(part, Ref) else None)
    return found
