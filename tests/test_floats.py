"""Sums of floats are the same bits on every machine."""

from __future__ import annotations

import math

from swarm.floats import mean_of, total_of


def test_a_sum_is_rounded_once_on_every_version_of_python() -> None:
    assert total_of([2.0**53, 1.0, 1.0]) == 2.0**53 + 2.0
    assert mean_of([2.0**53, 1.0, 1.0, 0.0]) == (2.0**53 + 2.0) / 4


def test_a_sum_beyond_the_floats_is_infinite() -> None:
    """Strangers sign norms; one that cannot be added must not end who adds it."""
    assert total_of([1e308, 1e308]) == math.inf
    assert total_of([math.inf, 1.0]) == math.inf


def test_infinities_of_both_signs_add_up_to_no_number() -> None:
    """Strangers tell losses, too."""
    assert math.isnan(total_of([math.inf, 1.0, -math.inf]))
