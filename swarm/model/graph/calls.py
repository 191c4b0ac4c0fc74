"""How an operator of the graph is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.fx.node import map_aggregate


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for a value in the arguments of a call."""

    name: str


RANDOM, DEVICE = Ref("draws:"), Ref("device:")
"""The chance of the microbatch (`kernels.SeededRandom`), and the device that computes. No value is called
so."""


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
class Statistic:
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
