"""Who rests after a failure, and how long."""

from __future__ import annotations

import pytest

from swarm.policy.backoff import FIRST_BACKOFF_S, MAX_BACKOFF_S, MAX_PEERS, Backoff


@pytest.fixture
def backoff() -> Backoff:
    return Backoff(first_s=1.0, longest_s=5.0)


def test_a_peer_that_never_failed_does_not_rest(backoff: Backoff) -> None:
    assert not backoff.in_backoff("a", now=0.0)
    assert backoff.ends("a") == float("-inf")


def test_a_peer_that_failed_rests_until_the_ban_ends(backoff: Backoff) -> None:
    assert backoff.failed("a", now=10.0) == 1.0
    assert backoff.in_backoff("a", now=10.999)
    assert not backoff.in_backoff("a", now=11.0)
    assert backoff.ends("a") == 11.0


def test_each_failure_after_a_rest_doubles_the_next_rest_up_to_the_longest(backoff: Backoff) -> None:
    now, rests = 0.0, []
    for _ in range(5):
        rests.append(backoff.failed("a", now=now))
        now = backoff.ends("a")
    assert rests == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_failures_while_it_rests_are_the_same_event_and_add_nothing(backoff: Backoff) -> None:
    backoff.failed("a", now=0.0)
    assert backoff.failed("a", now=0.25) == 0.75
    assert backoff.ends("a") == 1.0
    assert backoff.failed("a", now=1.0) == 2.0, "not 4: two of the three calls saw one failure"


def test_an_answer_ends_the_rest_and_forgets_the_history(backoff: Backoff) -> None:
    backoff.failed("a", now=0.0)
    backoff.failed("a", now=1.0)
    backoff.answered("a")
    assert not backoff.in_backoff("a", now=1.0)
    assert backoff.failed("a", now=2.0) == 1.0


def test_the_rest_of_one_peer_is_not_the_rest_of_another(backoff: Backoff) -> None:
    backoff.failed("a", now=0.0)
    assert not backoff.in_backoff("b", now=0.0)
    backoff.answered("b")
    assert backoff.in_backoff("a", now=0.0)


def test_the_defaults_start_short_and_stay_below_half_a_minute() -> None:
    backoff, now = Backoff(), 0.0
    assert backoff.failed("a", now=now) == FIRST_BACKOFF_S
    for _ in range(10):
        now = backoff.ends("a")
        assert backoff.failed("a", now=now) <= MAX_BACKOFF_S == 30.0


def test_a_silent_peer_rests_until_it_is_heard_if_somebody_asks_for_it() -> None:
    backoff = Backoff(first_s=1.0, longest_s=5.0, probed=True)
    backoff.failed("a", now=0.0, silent=True)
    assert backoff.silent() == ["a"]
    assert backoff.in_backoff("a", now=100.0), "who is given work while it hangs costs the time to notice"
    backoff.heard("a")
    assert backoff.silent() == []
    assert not backoff.in_backoff("a", now=0.1), "not longer either"


def test_without_anybody_who_asks_a_silent_peer_rests_as_any_other(backoff: Backoff) -> None:
    backoff.failed("a", now=0.0, silent=True)
    assert backoff.silent() == []
    assert not backoff.in_backoff("a", now=1.0)
    backoff.heard("a")
    assert backoff.failed("a", now=1.0) == 2.0


def test_one_that_answers_questions_but_no_work_rests_longer_each_time() -> None:
    backoff, now = Backoff(first_s=1.0, longest_s=5.0, probed=True), 0.0
    rests = []
    for _ in range(4):
        backoff.failed("a", now=now, silent=True)
        backoff.heard("a")
        rests.append(max(0.0, backoff.ends("a") - now))
        now = max(now, backoff.ends("a"))
    assert rests == [0.0, 2.0, 4.0, 5.0]
    backoff.answered("a")
    backoff.failed("a", now=now, silent=True)
    backoff.heard("a")
    assert not backoff.in_backoff("a", now=now)


def test_nonsense_rests_for_its_time_however_lively_its_peer_is() -> None:
    backoff = Backoff(first_s=1.0, probed=True)
    backoff.failed("a", now=0.0)
    backoff.failed("a", now=0.1, silent=True)
    backoff.heard("a")
    assert backoff.in_backoff("a", now=0.9)
    assert not backoff.in_backoff("a", now=1.0)


def test_nobody_asks_for_ever_after_one_that_is_announced_no_more() -> None:
    backoff = Backoff(first_s=1.0, probed=True)
    backoff.failed("a", now=0.0, silent=True)
    backoff.forget("a")
    assert backoff.silent() == []
    assert not backoff.in_backoff("a", now=1.0)


def test_a_crowd_that_fails_is_not_remembered_for_ever() -> None:
    backoff = Backoff(probed=True)
    for name in ("first", "honest", *map(str, range(MAX_PEERS - 2))):
        backoff.failed(name, now=0.0, silent=True)
    backoff.failed("honest", now=2.0, silent=True)
    for number in range(10):
        backoff.failed(f"more {number}", now=3.0, silent=True)
    assert not backoff.is_failing("first") and backoff.is_failing("honest")
    assert len(backoff.silent()) == len(backoff._until) == len(backoff._last_s) == MAX_PEERS
