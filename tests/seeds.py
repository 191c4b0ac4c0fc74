"""Tests of random runs: a few of their seeds in the quick part, the others where there is time."""

from __future__ import annotations

from typing import Any

import pytest


def seeds(count: int, *, quick: int) -> list[Any]:
    """Parameters 0 … count - 1, of which only the first `quick` are not `slow`."""
    return [n if n < quick else pytest.param(n, marks=pytest.mark.slow) for n in range(count)]
