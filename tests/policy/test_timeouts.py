"""How long to wait for a peer that shows signs of life."""

from __future__ import annotations

import math
from contextlib import ExitStack

from swarm.policy.backoff import BUDGET_S
from swarm.policy.router import Router
from swarm.policy.timeouts import (
    MIN_S,
    TIMES_EXPECTED,
    TRIAL_S,
    USUAL_HOLD_S,
    AdaptiveTimeout,
    CallLimits,
    expected_s,
)
from swarm.records import PeerRecord


def record(peer: str, speed: float, state: str = "serving") -> PeerRecord:
    return PeerRecord(peer=peer, run="run", stage=0, state=state, version=0, speed=speed)  # type: ignore[arg-type]


def test_before_any_answer_the_limit_follows_from_what_peers_measured() -> None:
    timeout = AdaptiveTimeout()
    assert timeout.limit_s == MIN_S
    timeout.expected_s = 20.0
    assert timeout.limit_s == 60.0


def test_before_any_answer_each_call_that_is_given_up_doubles_the_limit() -> None:
    timeout = AdaptiveTimeout()
    for number in range(4):
        assert timeout.limit_s == MIN_S * 2**number
        timeout.gave_up(timeout.limit_s)


def test_fast_answers_never_bring_the_limit_below_a_few_seconds_for_each_stage() -> None:
    for stages in (1, 3):
        timeout = AdaptiveTimeout(min_s=MIN_S * stages)
        for _ in range(100):
            timeout.answered(0.01)
        assert timeout.limit_s == MIN_S * stages


def test_a_peer_ten_times_slower_than_the_others_is_waited_for() -> None:
    timeout = AdaptiveTimeout()
    for _ in range(100):
        timeout.answered(3.0)
    assert timeout.limit_s == 30.0


def test_a_few_slow_answers_change_nothing_and_calls_given_up_count_as_slow() -> None:
    timeout = AdaptiveTimeout()
    for _ in range(8):
        timeout.answered(3.0)
    for _ in range(7):
        timeout.gave_up(30.0)
    assert timeout.limit_s == 30.0
    for _ in range(2):  # now most are: the stage has become slow
        timeout.gave_up(30.0)
    assert timeout.limit_s == 60.0


def test_what_is_expected_is_the_median_of_each_stage_and_liars_change_it_little() -> None:
    fast, slow = [record(p, 10.0) for p in "abc"], [record("d", 0.5)]
    assert math.isclose(expected_s([fast, slow]), 2.1)
    assert math.isclose(expected_s([[*fast, record("z", 1e-300)], slow]), 2.1)
    assert expected_s([[], [record("z", math.inf)]]) == expected_s([[record("z", 0.0)]]) == 0.0
    assert expected_s([fast, [], slow, []]) == 2 * expected_s([fast, slow])  # the others may be like these


def limits_of(*peers: str, stages: int = 2) -> tuple[Router, CallLimits]:
    """Of the calls to these peers of stage 0, none of which has answered."""
    router = Router()
    router.set_peers(0, peers)
    return router, CallLimits(router, 0, stages)


def test_one_that_has_never_answered_has_less_time_and_twice_as_much_each_time() -> None:
    router, limits = limits_of("a", "z")
    usual_s = 2 * MIN_S
    assert limits.limit_s("z", [], t=0) == usual_s  # nobody is known: all may be waking up
    router.answered(0, "a", 0.1)
    limits.answered(0.2, now=0.0)
    limits_s = []
    for after_s in (0.0, 10.0, 20.0):
        limits_s.append(limits.limit_s("z", [], t=0))
        router.failed("z", now=after_s, silent=True)
    assert limits_s == [TRIAL_S + 0.6, TRIAL_S + 0.6, 2 * (TRIAL_S + 0.6)]
    assert limits.limit_s("z", [], t=0) == limits.limit_s("a", [], t=0) == usual_s
    router.answered(0, "z", 5.0)
    assert limits.limit_s("z", [], t=0) == usual_s


def test_one_that_failed_has_the_time_of_one_that_has_never_answered_until_it_answers() -> None:
    """In each of three steps a peer that answers no more took as long as in the first."""
    router, limits = limits_of("a", "z")
    for peer in ("a", "z"):
        router.answered(0, peer, 0.2)
        limits.answered(0.2, now=0.0)
    router.failed("z", now=0.0, silent=True)
    assert (limits.limit_s("z", [], t=0), limits.limit_s("a", [], t=0)) == (TRIAL_S + 0.6, 2 * MIN_S)
    router.answered(0, "z", 0.2)
    assert limits.limit_s("z", [], t=0) == 2 * MIN_S


def test_one_that_was_charged_has_the_time_of_an_unknown_one_and_of_its_own_answers_for_twenty_steps() -> (
    None
):
    """A tarpit answered once, and each caller waited for the next answer as long as for the first."""
    router, limits = limits_of("a", "z")
    for took_s in (0.2, 1.4):
        router.answered(0, "z", took_s, took_s)
        limits.answered(0.2, now=0.0)
    router.backoff.charge("z", t=3, since_s=7.0, now=7.0)
    assert limits.limit_s("z", [], t=22) == TRIAL_S + 3 * 1.4
    assert limits.limit_s("z", [], t=23) == 2 * MIN_S


def test_one_that_was_charged_has_the_less_time_the_more_callers_learn_that_for_themselves() -> None:
    """Of 7 callers each lost as much as one of 2."""
    router, limits = limits_of("a", "z")
    router.answered(0, "z", 0.2)
    limits.answered(0.2, now=0.0)
    router.backoff.charge("z", t=3, since_s=7.0, now=7.0)
    limits_s = []
    for callers in (2, 4, 5, 100):
        limits.callers = callers
        limits_s.append(round(limits.limit_s("z", [], t=3) - 0.6, 3))
    assert limits_s == [TRIAL_S, 2.0, 1.6, USUAL_HOLD_S], "one may hold a call until its step opens"
    assert limits.limit_s("a", [], t=3) == TRIAL_S + 0.6, "an unknown one was charged with nothing"


def test_one_that_says_it_has_begun_needs_half_of_the_time() -> None:
    """Who asked again for what another had waited for gave it to the same tarpit, for as long again."""
    for usual_s, begun_s in ((0.2, MIN_S), (1.0, TRIAL_S + 3.0)):
        router, limits = limits_of("z")
        with limits.call("z", [], t=0, begun=True) as limit_s:
            assert limit_s == 2 * MIN_S, "nothing is known yet"
        router.answered(0, "z", usual_s)
        limits.answered(usual_s, now=0.0)
        with limits.call("z", [], t=0, begun=True) as limit_s:
            assert limit_s == begun_s


def test_calls_given_up_make_the_limit_longer_only_if_nobody_answers_meanwhile() -> None:
    router, usual_s = Router(), 2 * MIN_S
    router.set_peers(0, ["a", "z"])
    router.answered(0, "a", 0.2)
    limits = CallLimits(router, 0, 2)
    for now in range(40):
        limits.answered(0.2, now=float(now))
        for _ in range(2):
            limits.lost("z", t=now, since_s=now - usual_s, now=float(now))
        assert limits.limit_s("a", [], t=now) == usual_s
    for _ in range(40):
        limits.lost("z", t=50, since_s=40.0, now=40.0 + usual_s)
    assert limits.limit_s("a", [], t=50) == 2 * usual_s


def test_a_refusal_costs_nothing_but_one_that_takes_longer_than_usual() -> None:
    """One that took 4 s each time to say that it is busy was charged with nothing, for ever."""
    router, limits = limits_of("a", "z")
    for number in range(20):
        for peer, took_s in (("a", USUAL_HOLD_S), ("z", 4.0)):
            limits.put_off(peer, t=number, since_s=10.0 * number, now=10.0 * number + took_s)
    assert router.backoff.rests("z", now=200.0) and not router.backoff.rests("a", now=200.0)


def test_calls_to_a_slow_peer_are_waited_for_one_after_the_other_before_the_first_answer() -> None:
    """A laptop that takes 10 s for a microbatch was lost after 25 s, with six of them to do."""
    slow = [[record("a", 0.2)], [record("b", 0.2)]]
    limits = CallLimits(Router(), 0, 2)
    with ExitStack() as calls:
        limits_s = [calls.enter_context(limits.call("a", slow, t=0)) for _ in range(6)]
    assert limits_s == [TIMES_EXPECTED * 10.0 * before for before in range(1, 7)]
    with limits.call("a", slow, t=0) as limit_s:
        assert limit_s == limits_s[0]


def test_strangers_that_say_that_they_are_slow_do_not_make_a_call_longer() -> None:
    there = [[record("a", 10.0), *(record(stranger, 1e-3) for stranger in "xyz")]]
    with CallLimits(Router(), 0, 1).call("x", there, t=0) as limit_s:
        assert limit_s == BUDGET_S


def test_where_calls_take_long_a_peer_may_cost_three_of_them() -> None:
    router, limits = limits_of("a", "z", stages=1)
    for peer in ("a", "z"):
        router.answered(0, peer, 40.0)
        limits.answered(40.0, now=0.0)
    assert limits.limit_s("a", [], t=0) == 120.0
    limits.lost("z", t=0, since_s=0.0, now=119.0)
    assert not router.backoff.rests("z", now=119.0)
    limits.lost("z", t=1, since_s=119.0, now=121.0)
    assert router.backoff.rests("z", now=121.0)
