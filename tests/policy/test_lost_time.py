"""What a peer may cost the run before it is left out, and for how long."""

from __future__ import annotations

import pytest

from swarm.policy.backoff import BUDGET_ROUNDS, BUDGET_S, FIRST_REST_S, MAX_PEERS, Backoff


def test_a_peer_that_costs_little_is_not_left_out() -> None:
    lost = Backoff()
    for t in range(200):
        assert not lost.charge("a", t=t, since_s=100.0 * t, now=100.0 * t + 0.9)


def test_20_seconds_within_20_steps_are_too_much_and_each_rest_is_twice_the_last() -> None:
    lost, now, rests = Backoff(), 1000.0, []
    assert not lost.charge("a", t=0, since_s=now, now=now + BUDGET_S - 1.0)
    now += BUDGET_S
    for _ in range(3):
        assert lost.charge("a", t=1, since_s=now, now=now + 1.0)
        rests.append(lost.rests_until_s("a") - now - 1.0)
        now = lost.rests_until_s("a")
    assert rests == [FIRST_REST_S, 2 * FIRST_REST_S, 4 * FIRST_REST_S]


def test_one_that_rested_is_tried_for_as_long_as_that_lasted() -> None:
    backoff = Backoff()
    assert not backoff.is_tried("a", now=0.0)
    for began in (0.0, FIRST_REST_S):
        backoff.charge("a", t=0, since_s=began, now=began, rounds=BUDGET_ROUNDS)
    for now, tried in ((1.0, True), (3 * FIRST_REST_S + 1.0, True), (5 * FIRST_REST_S, False)):
        assert backoff.is_tried("a", now=now) is tried


def test_a_second_counts_once_however_many_waited_through_it() -> None:
    lost = Backoff()
    for _ in range(100):
        assert not lost.charge("a", t=0, since_s=0.0, now=10.0)


def test_two_aborted_rounds_are_too_much() -> None:
    lost = Backoff()
    assert not lost.charge("a", t=0, since_s=0.0, now=0.0, rounds=1)
    assert lost.charge("a", t=19, since_s=1.0, now=1.0, rounds=1)
    assert not lost.charge("b", t=0, since_s=0.0, now=0.0, rounds=1)
    assert not lost.charge("b", t=20, since_s=1.0, now=1.0, rounds=1)


def test_answers_do_not_end_a_rest_and_the_last_peer_of_all_is_asked_all_the_same() -> None:
    backoff = Backoff()
    backoff.charge("a", t=0, since_s=0.0, now=BUDGET_S)
    backoff.answered("a")
    assert backoff.in_backoff("a", now=BUDGET_S + 1.0)
    assert not backoff.relent(["a", "b"], now=BUDGET_S + 1.0)
    assert backoff.relent(["a"], now=BUDGET_S + 1.0)
    assert not backoff.in_backoff("a", now=BUDGET_S + 1.0)


def test_strangers_fill_no_memory() -> None:
    lost = Backoff()
    for number in range(MAX_PEERS + 100):
        lost.charge(f"p{number}", t=0, since_s=0.0, now=BUDGET_S)
    assert lost.rests_until_s("p0") < 0 < lost.rests_until_s(f"p{MAX_PEERS}")


def test_a_call_gets_what_its_peer_may_still_cost_or_all_if_that_is_nothing() -> None:
    """A limit of no time at all would end each call before it began."""
    backoff = Backoff()
    assert backoff.within_budget_s("bob", 40.0, t=0) == BUDGET_S
    backoff.charge("bob", t=0, since_s=0.0, now=15.0)
    assert backoff.within_budget_s("bob", 40.0, t=0) == BUDGET_S - 15.0
    backoff.charge("bob", t=0, since_s=15.0, now=BUDGET_S - 1e-12)
    assert backoff.within_budget_s("bob", 40.0, t=0) == 40.0


def test_one_that_aborts_a_round_is_charged_with_those_that_failed_for_an_unseen_cause() -> None:
    backoff = Backoff()
    backoff.aborted("ann", t=0, since_s=0.0, now=0.0)
    assert not backoff.rests("ann", now=0.0)
    backoff.unclear_rounds = 1
    backoff.aborted("bob", t=0, since_s=0.0, now=0.0)
    assert backoff.rests("bob", now=0.0)


def test_a_charge_of_no_time_covers_nothing_of_a_call_that_began_before() -> None:
    lost = Backoff()
    lost.charge("z", t=0, since_s=5.0, now=5.0)
    lost.charge("z", t=0, since_s=0.0, now=10.0)
    assert lost.left_s("z", t=0) == BUDGET_S - 10.0
    assert lost.was_charged("z", t=0) and not lost.was_charged("z", t=20) and not lost.was_charged("a", t=0)


def test_an_account_has_one_charge_for_each_step_however_often_it_is_charged() -> None:
    """The coordinator charges in each decision of a step, often with no time."""
    backoff = Backoff()
    for tick in range(1000):
        backoff.charge("bob", t=tick // 100, since_s=tick / 100, now=(tick + tick % 2 / 2) / 100)
    assert len(backoff._accounts["bob"].charges) == 10
    assert backoff.left_s("bob", t=9) == pytest.approx(BUDGET_S - 2.5)
    assert backoff.left_s("bob", t=20) == pytest.approx(BUDGET_S - 2.25), "the first step is over"


def test_what_alone_may_cost_no_more_rests_no_longer_each_time() -> None:
    """For moments that are not seen one replica would reduce all of a stage for an hour."""
    backoff, now = Backoff(), 100.0
    for t in range(0, 80, 20):
        assert backoff.charge("", t=t, since_s=now - 8.0, now=now, most_s=8.0)
        assert backoff.rests_until_s("") == now + FIRST_REST_S
        now += FIRST_REST_S + 8.0
    assert backoff.charge("", t=80, since_s=now - 25.0, now=now)
    assert backoff.rests_until_s("") == now + 2 * FIRST_REST_S
