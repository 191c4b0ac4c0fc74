"""Tests of many runs: a few of their seeds and cases in the quick part, the others where there is time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest


def seeds(count: int, *, quick: int) -> list[Any]:
    """Parameters 0 … count - 1, of which only the first `quick` are not `slow`."""
    return [n if n < quick else pytest.param(n, marks=pytest.mark.slow) for n in range(count)]


def some(every: Sequence[Any], *, quick: Sequence[Any]) -> list[Any]:
    """Parameters, of which only the `quick` ones are not `slow`."""
    return [one if one in quick else pytest.param(*_fields(one), marks=pytest.mark.slow) for one in every]


def _fields(one: Any) -> Sequence[Any]:
    return one if isinstance(one, tuple) else (one,)


def cases(every: Sequence[tuple[Any, ...]], *, name: str, quick: Callable[..., object]) -> list[Any]:
    """A parameter for each case, named by a format of its fields; those that are not `quick` are `slow`."""
    return [
        pytest.param(
            *case,
            id=name.format(*(getattr(field, "__name__", field) for field in case)),
            marks=[] if quick(*case) else pytest.mark.slow,
        )
        for case in every
    ]
