"""How long to wait for a peer that shows signs of life."""

from __future__ import annotations

from swarm.policy.patience import LEAST_S, UNKNOWN_S, Patience


def test_before_any_answer_the_limit_is_long() -> None:
    assert Patience().limit_s == UNKNOWN_S


def test_fast_answers_never_bring_the_limit_below_a_minute() -> None:
    patience = Patience()
    for _ in range(100):
        patience.answered(0.01)
    assert patience.limit_s == LEAST_S


def test_a_peer_twenty_times_slower_is_waited_for_also_with_three_microbatches_in_its_queue() -> None:
    patience = Patience()
    for _ in range(100):
        patience.answered(30.0)
    assert patience.limit_s >= 3 * 20 * 30.0 - 1e-6
