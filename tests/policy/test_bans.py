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


def test_a_silent_peer_rests_until_it_is_heard_if_somebody_asks_for_it() -> None:
    bans = Bans(first_s=1.0, longest_s=5.0, probed=True)
    bans.failed("a", now=0.0, silent=True)
    assert bans.silent() == ["a"]
    assert bans.resting("a", now=100.0), "who is given work while it hangs costs the time to notice"
    bans.heard("a")
    assert bans.silent() == []
    assert not bans.resting("a", now=0.1), "not longer either"


def test_without_anybody_who_asks_a_silent_peer_rests_as_any_other(bans: Bans) -> None:
    bans.failed("a", now=0.0, silent=True)
    assert bans.silent() == []
    assert not bans.resting("a", now=1.0)
    bans.heard("a")
    assert bans.failed("a", now=1.0) == 2.0


def test_one_that_answers_questions_but_no_work_rests_longer_each_time() -> None:
    bans, now = Bans(first_s=1.0, longest_s=5.0, probed=True), 0.0
    rests = []
    for _ in range(4):
        bans.failed("a", now=now, silent=True)
        bans.heard("a")
        rests.append(max(0.0, bans.ends("a") - now))
        now = max(now, bans.ends("a"))
    assert rests == [0.0, 2.0, 4.0, 5.0]
    bans.answered("a")
    bans.failed("a", now=now, silent=True)
    bans.heard("a")
    assert not bans.resting("a", now=now)


def test_nonsense_rests_for_its_time_however_lively_its_peer_is() -> None:
    bans = Bans(first_s=1.0, probed=True)
    bans.failed("a", now=0.0)
    bans.failed("a", now=0.1, silent=True)
    bans.heard("a")
    assert bans.resting("a", now=0.9)
    assert not bans.resting("a", now=1.0)


def test_nobody_asks_for_ever_after_one_that_is_announced_no_more() -> None:
    bans = Bans(first_s=1.0, probed=True)
    bans.failed("a", now=0.0, silent=True)
    bans.forget("a")
    assert bans.silent() == []
    assert not bans.resting("a", now=1.0)
