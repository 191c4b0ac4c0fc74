"""How long it takes from one peer to another; near ones are preferred without starving the others."""

from __future__ import annotations

from collections import Counter, deque
from functools import partial

import pytest

from swarm.policy.link_latency import DEFAULT_S, MAX_PAIRS, LinkLatency
from swarm.policy.router import Router

CITIES = {"a0": "a", "a1": "a", "b0": "b", "b1": "b"}
NEXT = {"a2": "a", "a3": "a", "b2": "b", "b3": "b"}


def far_s(here: str, there: str) -> float:
    return 0.01 if here[0] == there[0] else 1.0


def test_a_way_that_was_never_gone_costs_nothing_so_that_it_is_tried_once() -> None:
    ways = LinkLatency()
    assert ways.price_s("a", "b") == 0.0
    ways.began(["a", "b"])
    assert ways.price_s("a", "b") == DEFAULT_S


def test_a_way_takes_what_it_took_at_least_and_it_has_a_direction() -> None:
    ways = LinkLatency()
    for took_s in (0.3, 0.25, 9.0):
        ways.took("a", "b", took_s)
    assert ways.least_s("a", "b") == pytest.approx(0.25, rel=0.01)
    assert ways.least_s("b", "a") == 0.0


def test_a_way_that_became_longer_is_known_to_be_after_some_hundred_times() -> None:
    ways = LinkLatency()
    ways.took("a", "b", 0.1)
    for _ in range(20):
        ways.took("a", "b", 0.4)
    assert ways.least_s("a", "b") < 0.11
    for _ in range(400):
        ways.took("a", "b", 0.4)
    assert ways.least_s("a", "b") == 0.4


def test_the_price_of_a_way_counts_what_is_in_flight_on_it_until_that_has_come_back() -> None:
    ways = LinkLatency()
    for there in ("b", "c"):
        ways.took("a", there, 0.2)
    ways.began(["a", "b", "d"])
    ways.began(["a", "b", "d"])
    assert [ways.price_s("a", there) for there in ("b", "c")] == pytest.approx([0.6, 0.2])
    ways.ended(["a", "b", "d"])
    assert ways.price_s("a", "b") == pytest.approx(0.4)
    ways.ended(["a", "b", "d"])
    assert ways.price_s("a", "b") == pytest.approx(0.2)
    assert not ways._in_flight


def test_the_links_of_a_peer_share_its_microbatches_and_round_trips_keep_none_busy() -> None:
    ways = LinkLatency()
    assert ways.busy_s("p", 2, 1) == 0.0
    ways.took("a", "p", 0.5)
    assert ways.busy_s("p", 2, 1) == 0.0, "the round trip is not known"
    ways.took("a", "p", 0.5, 0.1)
    assert ways.busy_s("p", 1, 1) == pytest.approx(0.2, rel=0.01)
    assert ways.busy_s("p", 2, 1) == pytest.approx(0.1, rel=0.01), "half through each, of which one is known"
    ways.took("b", "p", 0.5, 0.1)
    assert ways.busy_s("p", 2, 1) == pytest.approx(0.1, rel=0.01)
    assert ways.busy_s("p", 0, 0) == ways.busy_s("q", 2, 1) == 0.0
    ways.took("p", "c", 0.8, 0.2)
    assert ways.busy_s("p", 2, 1) == pytest.approx(0.3), "all through one"
    ways.took("p", "c", 0.1, 0.2)
    assert ways.busy_s("p", 2, 1) == pytest.approx(0.1, rel=0.01), "less than a round trip: no time"


def test_the_oldest_of_too_many_ways_are_forgotten() -> None:
    ways = LinkLatency()
    for i in range(MAX_PAIRS + 2):
        ways.took("a", f"b{i}", 1.0)
    assert [ways.least_s("a", f"b{i}") for i in range(4)] == [0.0, 0.0, 1.0, 1.0]


def wired(speeds: dict[str, float]) -> tuple[Counter[str], Counter[bool]]:
    """A thousand microbatches through peers of two cities: who got how many, how many stayed in a city."""
    router, ways = Router(), LinkLatency()
    for stage, there in enumerate((CITIES, NEXT)):
        router.set_peers(stage, there)
        for peer in there:
            for _ in range(6):
                router.answered(stage, peer, 1 / speeds.get(peer, 10.0))
    got, stayed = Counter[str](), Counter[bool]()
    for _ in range(1000):
        here = router.route(0, now=0.0).peer
        there = router.route(1, now=0.0, latency_s=partial(ways.price_s, here)).peer
        ways.took(here, there, far_s(here, there))
        got[there] += 1
        stayed[here[0] == there[0]] += 1
    return got, stayed


def test_microbatches_stay_where_they_are_near_and_everybody_keeps_its_share() -> None:
    got, stayed = wired({})
    assert stayed[True] >= 980
    assert all(abs(count - 250) <= 12 for count in got.values()), got


def test_where_a_city_has_too_few_for_its_work_only_what_is_too_much_goes_far() -> None:
    """Of stage 1 three quarters of the speed are in b, of stage 0 a half: a quarter has to go."""
    got, stayed = wired({"a2": 5.0, "a3": 5.0, "b2": 15.0, "b3": 15.0})
    assert 700 <= stayed[True] <= 760
    assert all(abs(got[peer] - 125) <= 12 for peer in ("a2", "a3"))
    assert all(abs(got[peer] - 375) <= 12 for peer in ("b2", "b3"))


def test_a_peer_that_is_far_from_all_gets_its_share_all_the_same() -> None:
    router, ways = Router(), LinkLatency()
    router.set_peers(1, ["near", "far"])
    for peer in ("near", "far"):
        for _ in range(6):
            router.answered(1, peer, 0.1)
            ways.took("here", peer, 5.0 if peer == "far" else 0.01)
    latency_s = partial(ways.price_s, "here")
    got = Counter(router.route(1, now=0.0, latency_s=latency_s).peer for _ in range(1000))
    assert got["far"] >= 470


@pytest.mark.parametrize("names", [("a", "b", "c", "d"), ("d", "b", "a", "c")])
def test_equal_ways_between_equal_peers_are_all_used_alike(names: tuple[str, ...]) -> None:
    """16 ways, 480 microbatches of which 32 are in flight. With turns alone four ways carried them all."""
    router, ways = Router(caller="me"), LinkLatency()
    heres, theres = names, tuple(name.upper() for name in names)
    for stage, there in enumerate((heres, theres)):
        router.set_peers(stage, there)
        for peer in there:
            for _ in range(6):
                router.answered(stage, peer, 0.05)
    used, in_flight = Counter[tuple[str, str]](), deque[tuple[str, str]]()
    for _ in range(480):
        here = router.route(0, now=0.0).peer
        there = router.route(1, now=0.0, latency_s=partial(ways.price_s, here)).peer
        used[here, there] += 1
        ways.began((here, there))
        in_flight.append((here, there))
        if len(in_flight) == 32:
            gone = in_flight.popleft()
            ways.ended(gone)
            ways.took(*gone, 0.2)
    assert len(used) == 16
    assert max(used.values()) <= 36


def test_what_is_known_of_a_peer_whose_ways_are_forgotten_is_forgotten_too() -> None:
    ways = LinkLatency()
    for number in range(MAX_PAIRS + 10):
        ways.took(f"p{number}", "b", 0.2, rtt_s=0.1)
    assert len(ways._least_s) == len(ways._rtt_s) == MAX_PAIRS == len(ways._sides) - 1
    assert ways.busy_s("p0", 0, 1) == 0.0 < ways.busy_s("p10", 0, 1)
