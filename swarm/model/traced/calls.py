"""How an operator of the graph is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for a value in the arguments of a call."""

    name: str


DRAWS, DEVICE = Ref("draws:"), Ref("device:")
"""The chance of the microbatch (`kernels.Draws`), and the device that computes. No value is called so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What to call with what; `Ref`s in the arguments stand for values."""

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
    """What a batch norm call tells of a microbatch, and the buffer that it is for."""

    buffer: str
    value: str
    """Name of the output that holds it."""
    weight: float
    """1 / the number of calls of this batch norm in the model: a buffer gets the mean of them."""
    momentum: float


def refs(args: Any) -> Iterator[Ref]:
    """All values in the arguments of a call."""
    if isinstance(args, Ref):
        yield args
    elif isinstance(args, Mapping):
        for part in args.values():
            yield from refs(part)
    elif isinstance(args, (list, tuple)):
        for part in args:
            yield from refs(part)


def filled(args: Any, value: Callable[[str], Any]) -> Any:
    """The arguments with `value(name)` in place of each `Ref`."""
    kind = type(args)
    if kind is Ref:
        return value(args.name)
    if kind is tuple:
        return tuple([filled(arg, value) for arg in args])
    if kind is list:
        return [filled(arg, value) for arg in args]
    if kind is dict:
        return {key: filled(arg, value) for key, arg in args.items()}
    return args
