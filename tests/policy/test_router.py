"""Stochastic wiring: who gets the next microbatch of a stage."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.policy.backoff import Backoff
from swarm.policy.fair_queue import DEFAULT_WORK_S, RETRY_PERIODS, Candidate, FairQueue
from swarm.policy.router import PACE_FROM, NoPeerForStage, Pace, Router

FAST, SLOW = "fast", "slow"


@pytest.fixture
def router() -> Router:
    """Stage 0 has a peer that answers in 10 ms and one that needs 30 ms."""
    router = Router()
    router.set_peers(0, [SLOW, FAST])
    router.answered(0, FAST, 0.01)
    router.answered(0, SLOW, 0.03)
    return router


def picks(router: Router, number: int, *, now: float = 0.0) -> list[str]:
    return [router.route(0, now=now).peer for _ in range(number)]


def test_a_stage_that_nobody_announced_has_no_peer() -> None:
    with pytest.raises(NoPeerForStage, match="no peer for stage 3: none is announced") as caught:
        Router().route(3, now=0.0)
    assert caught.value.stage == 3
    assert caught.value.retry_at == float("inf")


def test_when_all_rest_the_error_says_when_the_first_rest_ends(router: Router) -> None:
    router.failed(FAST, now=1.0)
    router.failed(SLOW, now=1.5)
    with pytest.raises(NoPeerForStage, match="no peer for stage 0: all of them are in backoff") as caught:
        router.route(0, now=1.6)
    assert caught.value.retry_at == 2.0


def test_when_all_that_do_not_rest_are_excluded_it_may_be_tried_again_at_once(router: Router) -> None:
    with pytest.raises(NoPeerForStage) as caught:
        router.route(0, now=5.0, exclude=[FAST, SLOW])
    assert caught.value.retry_at == 5.0


def test_a_peer_that_missed_its_reply_rests_until_the_ban_ends(router: Router) -> None:
    router.failed(FAST, now=10.0)
    assert set(picks(router, 5, now=10.9)) == {SLOW}
    assert FAST in picks(router, 5, now=11.0)


def test_an_answer_ends_the_rest_of_a_peer(router: Router) -> None:
    router.failed(FAST, now=10.0)
    router.answered(0, FAST, 0.01)
    assert FAST in picks(router, 2, now=10.0)


def test_work_is_shared_in_proportion_to_speed(router: Router) -> None:
    assert Counter(picks(router, 400)) == {FAST: 300, SLOW: 100}


def test_work_is_interleaved_rather_than_given_in_bursts(router: Router) -> None:
    order = picks(router, 40)
    runs = [order[i : i + 4].count(SLOW) for i in range(0, 40, 4)]
    assert set(runs) == {1}


def test_equal_peers_take_turns_in_an_order_that_each_caller_has_for_itself() -> None:
    orders = set[tuple[str, ...]]()
    for caller in "pqrstuvw":
        for names in ("abc", "cba"):
            router = Router(caller=caller)
            router.set_peers(0, names)
            first, second = (picks(router, 3) for _ in range(2))
            assert first == second
            orders.add((caller, *first))
    assert len(orders) == 8, "the order in which they came does not matter"
    assert len({order[1:] for order in orders}) > 2


def test_the_first_peer_is_expected_to_need_the_guess() -> None:
    router = Router()
    router.set_peers(0, ["a"])
    route = router.route(0, now=0.0)
    assert route.work_s == DEFAULT_WORK_S


def test_a_newcomer_is_expected_to_be_as_fast_as_the_median(router: Router) -> None:
    router.set_peers(0, [FAST, SLOW, "new"])
    routes = [router.route(0, now=0.0) for _ in range(10)]
    first = next(r for r in routes if r.peer == "new")
    assert not first.measured and first.clock_s == 0.03


def test_a_newcomer_is_tried_soon_but_not_given_all_that_the_others_ever_got(router: Router) -> None:
    picks(router, 400)
    router.set_peers(0, [FAST, SLOW, "new"])
    router.answered(0, "new", 0.01)
    after = picks(router, 70)
    assert "new" in after[:3]
    assert Counter(after)["new"] == 30


def test_a_peer_that_rested_is_not_given_its_backlog_in_one_burst(router: Router) -> None:
    router.failed(FAST, now=0.0)
    picks(router, 100, now=0.5)
    after = picks(router, 40, now=1.0)
    assert abs(Counter(after)[FAST] - 30) <= 1


def test_what_is_known_of_a_peer_that_stays_is_kept_and_of_one_that_left_is_forgotten(router: Router) -> None:
    router.set_peers(0, [FAST])
    assert router.peers(0) == [FAST]
    router.set_peers(0, [FAST, SLOW])
    routes = {r.peer: r for r in (router.route(0, now=0.0) for _ in range(4))}
    assert routes[FAST].work_s == 0.01
    assert not router.knows(0, SLOW)


def test_an_answer_of_a_peer_that_left_changes_nothing(router: Router) -> None:
    router.set_peers(0, [SLOW])
    router.answered(0, FAST, 0.001)
    router.answered(7, FAST, 0.001)
    assert router.peers(0) == [SLOW]
    assert router.peers(7) == []


def test_a_slow_first_answer_is_forgotten_with_the_second() -> None:
    router = Router()
    router.set_peers(0, [FAST])
    router.answered(0, FAST, 3.0)
    router.answered(0, FAST, 0.002)
    assert router.route(0, now=0.0).work_s == 0.002


def test_a_change_of_speed_is_followed_within_a_few_answers(router: Router) -> None:
    for _ in range(10):
        router.answered(0, FAST, 0.01)
    for _ in range(3):
        router.answered(0, FAST, 0.09)
    expected = {r.peer: r.work_s for r in (router.route(0, now=0.0) for _ in range(8))}
    assert expected[FAST] == 0.09


def test_one_slow_answer_is_not_held_against_a_peer(router: Router) -> None:
    for took_s in (0.01, 0.01, 4.0):
        router.answered(0, FAST, took_s)
    assert Counter(picks(router, 40)) == {FAST: 30, SLOW: 10}


def test_stages_do_not_share_their_peers(router: Router) -> None:
    router.set_peers(1, ["other"])
    assert router.route(1, now=0.0).peer == "other"
    assert "other" not in router.peers(0)


def test_a_peer_rests_at_every_stage_it_ever_served(router: Router) -> None:
    router.set_peers(1, [FAST])
    router.failed(FAST, now=0.0)
    with pytest.raises(NoPeerForStage):
        router.route(1, now=0.5)


@given(st.lists(st.floats(0.001, 10.0), min_size=1, max_size=6))
def test_nobody_falls_behind_its_share_by_more_than_one_turn(times: list[float]) -> None:
    router = Router()
    peers = [f"p{i}" for i in range(len(times))]
    router.set_peers(0, peers)
    for peer, took_s in zip(peers, times, strict=True):
        router.answered(0, peer, took_s)
    given_s = dict.fromkeys(peers, 0.0)
    for _ in range(60):
        route = router.route(0, now=0.0)
        given_s[route.peer] += route.work_s
        busiest, idlest = max(given_s.values()), min(given_s.values())
        assert busiest - idlest <= max(times) + 1e-9


def test_a_much_slower_peer_gets_nothing_that_the_step_would_end_up_waiting_for() -> None:
    router = Router()
    router.set_peers(0, ["a", "b", SLOW])
    for peer, took_s in (("a", 0.01), ("b", 0.02), (SLOW, 0.4)):
        for _ in range(6):
            router.answered(0, peer, took_s)
    began = [router.route(0, now=1.0).peer for _ in range(100)]
    assert SLOW in began, "without a horizon it has its share"
    assert SLOW in [router.route(0, now=1.0, horizon_s=0.5).peer for _ in range(100)]
    late = [router.route(0, now=1.0, horizon_s=0.3).peer for _ in range(1000)]
    assert set(late) == {"a", "b"}, "b is slower than a, and not by much"
    ended = [router.route(0, now=1.0, horizon_s=0.0).peer for _ in range(100)]
    assert set(ended) == {"a", "b"}, "somebody has to do what is left"


def test_a_peer_that_is_kept_out_is_tried_again_now_and_then() -> None:
    router = Router()
    router.set_peers(0, [FAST, SLOW])
    for peer, took_s in [(FAST, 0.01), (SLOW, 0.4)] * 6:
        router.answered(0, peer, took_s)
    now, tried = 100.0, []
    for _ in range(2000):
        now += 0.01
        if router.route(0, now=now, horizon_s=0.0).peer == SLOW:
            tried.append(now)
    assert len(tried) >= 2
    assert min(b - a for a, b in itertools.pairwise(tried)) >= RETRY_PERIODS * 0.4
    for _ in range(3):
        router.answered(0, SLOW, 0.01)
    assert SLOW in [router.route(0, now=now, horizon_s=0.0).peer for _ in range(3)], "it became fast"


def test_a_newcomer_is_not_kept_out_before_it_is_warm_nor_anybody_for_some_milliseconds() -> None:
    router = Router()
    router.set_peers(0, [FAST, "new", "near"])
    for peer, took_s in [(FAST, 0.001), ("near", 0.04)] * 6:
        router.answered(0, peer, took_s)
    for _ in range(4):
        router.answered(0, "new", 0.5)
    assert {router.route(0, now=1.0, horizon_s=0.0).peer for _ in range(2000)} == {FAST, "new", "near"}
    for _ in range(2):
        router.answered(0, "new", 0.5)
    router.route(0, now=1.0, horizon_s=0.0)
    assert {router.route(0, now=1.0, horizon_s=0.0).peer for _ in range(2000)} == {FAST, "near"}


def test_the_only_peer_of_a_stage_is_used_however_slow_it_is() -> None:
    router = Router()
    router.set_peers(0, [SLOW])
    router.answered(0, SLOW, 9.0)
    assert router.route(0, now=0.0, horizon_s=0.0).peer == SLOW
    router.set_peers(0, [SLOW, FAST])
    router.answered(0, FAST, 0.1)
    router.failed(FAST, now=0.0)
    assert router.route(0, now=0.5, horizon_s=0.0).peer == SLOW


NAMES = [f"p{i}" for i in range(6)]
OPERATIONS = st.one_of(
    st.tuples(st.just("set"), st.sets(st.sampled_from(NAMES), min_size=1)),
    st.tuples(st.just("answered"), st.sampled_from(NAMES), st.floats(0.001, 3.0)),
    st.tuples(st.just("failed"), st.sampled_from(NAMES), st.booleans()),
    st.tuples(st.just("heard"), st.sampled_from(NAMES)),
    st.tuples(st.just("wait"), st.floats(0.0, 40.0)),
    st.tuples(st.just("route"), st.sets(st.sampled_from(NAMES)), st.sampled_from([0.0, 0.3, float("inf")])),
)


@given(st.lists(OPERATIONS, max_size=60), st.booleans())
def test_whatever_happens_somebody_is_chosen_who_may_be_if_there_is_one(
    operations: list[tuple[Any, ...]], probed: bool
) -> None:
    router, now = Router(Backoff(probed=probed)), 100.0
    there = set(NAMES)
    router.set_peers(0, there)
    for kind, *rest in operations:
        if kind == "set":
            there = rest[0]
            router.set_peers(0, there)
        elif kind == "answered":
            router.answered(0, rest[0], rest[1])
        elif kind == "failed":
            router.failed(rest[0], now=now, silent=rest[1])
        elif kind == "heard":
            router.backoff.heard(rest[0])
        elif kind == "wait":
            now += rest[0]
        else:
            usable = {p for p in there if p not in rest[0] and not router.backoff.in_backoff(p, now=now)}
            try:
                assert router.route(0, now=now, exclude=rest[0], horizon_s=rest[1]).peer in usable
            except NoPeerForStage as nobody:
                assert not usable
                assert nobody.retry_at >= now
        assert router.peers(0) == sorted(there)
    # In the end all are well: once what a slow one was charged is made up for, each gets its share.
    for peer in there:
        for _ in range(6):
            router.answered(0, peer, 1.0)
    for _ in range(8 * len(there)):
        router.route(0, now=now)
    got = Counter(router.route(0, now=now).peer for _ in range(40 * len(there)))
    assert all(abs(got[peer] - 40) <= 1 for peer in there)


def test_the_cost_of_a_choice_does_not_grow_with_the_number_of_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in looks at candidates, not in time: 20 of 4 000 rest, 20 are late, all have answered."""
    looks = Counter[str]()

    def counted(of: type, name: str) -> None:
        real = getattr(of, name)

        def call(self: Any, *args: Any) -> Any:
            looks[name] += 1
            return real(self, *args)

        monkeypatch.setattr(of, name, call)

    counted(FairQueue, "_put")
    counted(Candidate, "in_time")
    router, peers = Router(), [f"p{i:04}" for i in range(4000)]
    router.set_peers(0, peers)
    for i, peer in enumerate(peers):
        for _ in range(6):
            router.answered(0, peer, 50.0 if i < 20 else 0.1)
    for peer in peers[20:40]:
        router.failed(peer, now=0.0)
    for _ in range(100):
        router.route(0, now=0.5, horizon_s=1.0)
    looks.clear()
    for _ in range(500):
        router.answered(0, router.route(0, now=0.5, horizon_s=1.0).peer, 0.1)
    assert sum(looks.values()) <= (20 + 6) * 500


def by_way(times_s: list[float]) -> Router:
    """Microbatches by way of one peer take 0.1 s, and by way of the other as said; both work for 10 ms."""
    router = Router()
    router.set_peers(0, [SLOW, FAST])
    for took_s in times_s:
        router.answered(0, FAST, 0.01, 0.1)
        router.answered(0, SLOW, 0.01, took_s)
    return router


def test_a_step_waits_for_no_peer_by_way_of_which_all_takes_much_longer_whatever_it_says() -> None:
    router = by_way([4.3] * 6)
    late_s = 4.3 - 3 * 0.1 - 1.0
    for now in (0.0, RETRY_PERIODS * late_s):  # it may have become faster
        assert [router.route(0, now=now, horizon_s=0.5).peer for _ in range(1000)].count(SLOW) == 1
    router.answered(0, SLOW, 0.01, 0.1)
    router.answered(0, SLOW, 0.01, 0.1)
    assert SLOW in {router.route(0, now=100.0, horizon_s=0.5).peer for _ in range(3)}


@pytest.mark.parametrize("times_s", [[4.3, 4.3, 4.3, 0.1, 4.3, 4.3], [4.3] * 4, [1.2] * 6])
def test_a_peer_keeps_its_share_if_another_is_late_now_and_then_or_it_is_not_late_by_much(
    times_s: list[float],
) -> None:
    router = by_way(times_s)
    got = Counter(router.route(0, now=0.0, horizon_s=0.5).peer for _ in range(100))
    assert got[SLOW] == 50


def test_where_all_takes_long_by_way_of_all_nobody_is_late() -> None:
    router = Router()
    router.set_peers(0, [SLOW, FAST])
    for _ in range(6):
        router.answered(0, FAST, 0.01, 4.0)
        router.answered(0, SLOW, 0.01, 9.0)
    assert Counter(router.route(0, now=0.0, horizon_s=0.5).peer for _ in range(100))[SLOW] == 50


def shares(
    works_s: Mapping[str, Callable[[float], float]],
    said_s: Mapping[str, float],
    *,
    callers: int = 1,
    behind_s: float = 0.0,
) -> list[Counter[str]]:
    """Who computes how many of each 250 microbatches, 24 at once of each caller, and 0.1 s elsewhere.

    `works_s`: of a device at a time; `said_s`: what it says instead; `behind_s`: of the device behind all.
    """
    behind_free_s = 0.0
    now, free_s, got, done = 0.0, dict.fromkeys(works_s, 0.0), [Counter[str]() for _ in range(8)], 0
    routers, due = (
        [Router(caller=f"t{i}") for i in range(callers)],
        list[tuple[float, int, str, float, float]](),
    )

    def begin(caller: int) -> None:
        nonlocal behind_free_s
        peer = routers[caller].route(0, now=now).peer
        work_s = works_s[peer](now)
        free_s[peer] = max(now, free_s[peer]) + work_s
        behind_free_s = max(behind_free_s, free_s[peer]) + behind_s
        ends_s = behind_free_s if behind_s else free_s[peer]
        heapq.heappush(due, (ends_s + 0.1, caller, peer, now, work_s))

    for caller, router in enumerate(routers):
        router.set_peers(0, works_s)
        for _ in range(24):
            begin(caller)
    while done < 2000:
        now, caller, peer, began, work_s = heapq.heappop(due)
        routers[caller].answered(0, peer, said_s.get(peer, work_s), now - began, now=now, share=1 / callers)
        got[done // 250][peer] += 1
        done += 1
        begin(caller)
    return got


@pytest.mark.parametrize("slower", [1.0, 3.0])
@pytest.mark.parametrize("callers", [1, 3])
def test_one_that_says_that_it_needs_no_time_gets_little_more_than_it_can_do(
    slower: float, callers: int
) -> None:
    """It got nearly all, and the others nothing."""
    works_s = {"a": lambda _: 0.05 * slower, "b": lambda _: 0.05, "c": lambda _: 0.05}
    for got in shares(works_s, {"a": 1e-6}, callers=callers)[1:]:
        assert got["a"] < 1.35 * 250 / (1 + 2 * slower)


@pytest.mark.parametrize("callers", [1, 3])
def test_honest_peers_have_the_share_that_they_say_however_different_they_are(callers: int) -> None:
    works_s = {"a": lambda _: 0.02, "b": lambda _: 0.05, "c": lambda _: 0.2}
    got = sum(shares(works_s, {}, callers=callers)[1:], Counter())
    assert [got[name] / 1750 for name in "abc"] == pytest.approx([50 / 75, 20 / 75, 5 / 75], rel=0.05)


def test_what_waits_behind_all_of_a_stage_is_held_against_none_of_it() -> None:
    works_s = {"a": lambda _: 0.005, "b": lambda _: 0.01, "c": lambda _: 0.01}
    got = sum(shares(works_s, {}, behind_s=0.05), Counter())
    assert [got[name] / 2000 for name in "abc"] == pytest.approx([0.5, 0.25, 0.25], rel=0.02)


def test_one_that_gets_faster_in_truth_is_soon_given_more() -> None:
    works_s = {"a": lambda now: 0.3 if now < 10.0 else 0.02, "b": lambda _: 0.05, "c": lambda _: 0.05}
    got = shares(works_s, {})
    assert got[0]["a"] < 40 and got[-1]["a"] == pytest.approx(250 * 50 / 90, rel=0.1)


def test_the_pace_is_that_of_the_answers_and_not_of_the_waits_between_steps() -> None:
    pace, now = Pace(), 0.0
    for n in range(PACE_FROM + 1):
        assert pace.horizon_s(1) == float("inf")
        now += 5.0 if n % 5 == 4 else 0.02
        pace.answered(now=now)
    assert pace.horizon_s(10) == pytest.approx(0.2)
    pace.stepped(0.25)  # three others run as many
    assert pace.horizon_s(10) == pytest.approx(0.05)
    pace.stepped(0.0)  # it ran none of a step: that says nothing
    assert pace.horizon_s(10) == pytest.approx(0.05)
    assert pace.horizon_s(0) == 0.0
