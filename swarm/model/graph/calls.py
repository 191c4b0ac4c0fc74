"""How an operator of the graph is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


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


@dataclass(frozen=True, slots=True)
class Template:
    """The arguments of a call, sorted out once: most are a value or contain none."""

    fixed: list[Any]
    """With a gap for what is filled in."""
    values: list[tuple[int, str]]
    """(place, value)."""
    nested: list[tuple[int, Any]]
    """(place, a sequence with values in it)."""

    @staticmethod
    def of(args: Sequence[Any]) -> Template:
        """For these arguments."""
        made = Template(list(args), [], [])
        for place, arg in enumerate(args):
            if isinstance(arg, Ref):
                made.values.append((place, arg.name))
            elif any(True for _ in refs(arg)):
                made.nested.append((place, arg))
        return made

    def filled(self, env: Mapping[str, Any]) -> list[Any]:
        """The arguments with the values of `env`."""
        args = self.fixed.copy()
        for place, name in self.values:
            args[place] = env[name]
        for place, arg in self.nested:
            args[place] = _filled(arg, env)
        return args


def _filled(arg: Any, env: Mapping[str, Any]) -> Any:
    kind = type(arg)
    if kind is Ref:
        return env[arg.name]
    if kind is tuple or kind is list:
        return kind([_filled(part, env) for part in arg])
    if kind is dict:
        return {key: _filled(part, env) for key, part in arg.items()}
    return arg
