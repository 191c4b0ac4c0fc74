"""Who rests after a failure, and how long."""

from __future__ import annotations

import pytest

from swarm.policy.bans import FIRST_BAN_S, LONGEST_BAN_S, Bans


@pytest.fixture
def bans() -> Bans:
    return Bans(first_s=1.0, longest_s=5.0)


def test_a_peer_that_never_failed_does_not_rest(bans: Bans) -> None:
    assert not bans.resting("a", now=0.0)
    assert bans.ends("a") == float("-inf")


def test_a_peer_that_failed_rests_until_the_ban_ends(bans: Bans) -> None:
    assert bans.failed("a", now=10.0) == 1.0
    assert bans.resting("a", now=10.999)
    assert not bans.resting("a", now=11.0)
    assert bans.ends("a") == 11.0


def test_each_failure_after_a_rest_doubles_the_next_rest_up_to_the_longest(bans: Bans) -> None:
    now, rests = 0.0, []
    for _ in range(5):
        rests.append(bans.failed("a", now=now))
        now = bans.ends("a")
    assert rests == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_failures_while_it_rests_are_the_same_event_and_add_nothing(bans: Bans) -> None:
    bans.failed("a", now=0.0)
    assert bans.failed("a", now=0.25) == 0.75
    assert bans.ends("a") == 1.0
    assert bans.failed("a", now=1.0) == 2.0, "not 4: two of the three calls saw one failure"


def test_an_answer_ends_the_rest_and_forgets_the_history(bans: Bans) -> None:
    bans.failed("a", now=0.0)
    bans.failed("a", now=1.0)
    bans.answered("a")
    assert not bans.resting("a", now=1.0)
    assert bans.failed("a", now=2.0) == 1.0


def test_the_rest_of_one_peer_is_not_the_rest_of_another(bans: Bans) -> None:
    bans.failed("a", now=0.0)
    assert not bans.resting("b", now=0.0)
    bans.answered("b")
    assert bans.resting("a", now=0.0)


def test_the_defaults_start_short_and_stay_below_half_a_minute() -> None:
    bans, now = Bans(), 0.0
    assert bans.failed("a", now=now) == FIRST_BAN_S
    for _ in range(10):
        now = bans.ends("a")
        assert bans.failed("a", now=now) <= LONGEST_BAN_S == 30.0
