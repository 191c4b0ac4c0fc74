"""Sums and means of Python floats that are the same bits on every machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def total_of(terms: Iterable[float]) -> float:
    """The sum, rounded once. `sum` rounds after each term in Python 3.11 and not in 3.12, so that peers would
    disagree. Infinite if it is beyond the floats, and not a number if infinities of both signs are in it.
    """
    try:
        return math.fsum(terms)
    except OverflowError:
        return math.inf
    except ValueError:
        return math.nan


def mean_of(terms: Sequence[float]) -> float:
    """The mean of one or more numbers, from `total_of`."""
    return total_of(terms) / len(terms)
