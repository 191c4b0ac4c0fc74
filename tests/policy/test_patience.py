"""How long to wait for a peer that shows signs of life."""

from __future__ import annotations

from swarm.policy.timeouts import MIN_S, UNKNOWN_S, AdaptiveTimeout


def test_before_any_answer_the_limit_is_long() -> None:
    assert AdaptiveTimeout().limit_s == UNKNOWN_S


def test_fast_answers_never_bring_the_limit_below_a_minute() -> None:
    patience = AdaptiveTimeout()
    for _ in range(100):
        patience.answered(0.01)
    assert patience.limit_s == MIN_S


def test_a_peer_twenty_times_slower_is_waited_for_also_with_three_microbatches_in_its_queue() -> None:
    patience = AdaptiveTimeout()
    for _ in range(100):
        patience.answered(30.0)
    assert patience.limit_s >= 3 * 20 * 30.0 - 1e-6
