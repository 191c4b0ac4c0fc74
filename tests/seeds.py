"""Tests of many cases: a few of them are quick, every fourth of the others is `slow`, the rest `further`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest


def seeds(count: int, *, quick: int) -> list[Any]:
    """Parameters 0 … count - 1, of which the first `quick` are so."""
    return some(range(count), quick=range(quick))


def some(every: Sequence[Any], *, quick: Sequence[Any]) -> list[Any]:
    """Parameters, of which the `quick` ones are so."""
    marks = _marks_of_others()
    return [one if one in quick else pytest.param(*_fields(one), marks=next(marks)) for one in every]


def cases(every: Sequence[tuple[Any, ...]], *, name: str, quick: Callable[..., object]) -> list[Any]:
    """A parameter for each case, named by a format of its fields."""
    marks = _marks_of_others()
    return [
        pytest.param(
            *case,
            id=name.format(*(getattr(field, "__name__", field) for field in case)),
            marks=[] if quick(*case) else next(marks),
        )
        for case in every
    ]


def _marks_of_others() -> Iterator[pytest.MarkDecorator]:
    while True:
        yield from 3 * [pytest.mark.further]
        yield pytest.mark.slow


def _fields(one: Any) -> Sequence[Any]:
    return one if isinstance(one, tuple) else (one,)
