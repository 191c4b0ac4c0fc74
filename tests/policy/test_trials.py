"""How many peers that never answered are tried, and what that spares a run."""

from __future__ import annotations

from itertools import count

import pytest

from swarm.policy.router import FIRST_PAUSE_S, MAX_PAUSE_S, Router, Trials


def known(*peers: str) -> Router:
    """A router to which those peers have answered, when it began."""
    router = Router()
    router.set_peers(0, peers)
    for _ in peers:
        router.answered(0, router.route(0, now=0.0).peer, 0.1)
    return router


def test_one_is_tried_and_after_silence_none_for_twice_as_long() -> None:
    trials, now, peers = Trials(), 0.0, (f"z{number}" for number in count())
    for pause_s in (FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S):
        assert trials.may(now=now)
        trials.began(next(peers), now=now)
        assert not trials.may(now=now + pause_s - 1.0)
        now += pause_s
    for _ in range(20):
        assert trials.may(now=now)
        trials.began(next(peers), now=now)
        now += MAX_PAUSE_S
    assert trials.may(now=now)


def test_those_that_answer_make_room_for_more() -> None:
    trials, rounds, peers = Trials(), [], (f"a{number}" for number in count())
    for second in range(5):
        tried = []
        while trials.may(now=float(second)):
            tried.append(next(peers))
            trials.began(tried[-1], now=float(second))
        for peer in tried:
            trials.answered(peer)
        rounds.append(len(tried))
    assert rounds == [1, 2, 4, 8, 16]


def test_one_that_refuses_makes_place_for_another() -> None:
    router = known("a")
    router.set_peers(0, ["a", "x", "y", "z"])
    first, second = {router.route(0, now=0.0).peer for _ in range(6)} - {"a"}
    router.failed(first, now=0.1, silent=True)
    assert {router.route(0, now=0.2).peer for _ in range(6)} == {"a"}
    router.failed(second, now=0.3)
    (third,) = {"x", "y", "z"} - {first, second}
    assert {router.route(0, now=0.4).peer for _ in range(6)} == {"a", third}


@pytest.mark.parametrize(("took_s", "released"), [(1.2, True), (1.4, False)])
def test_one_that_its_caller_passed_by_at_once_makes_place_for_another(took_s: float, released: bool) -> None:
    """Callers may know a peer later than the trainer that sends them there. Silence is not forgiven."""
    router = Router()
    router.set_peers(0, ["a"])
    router.answered(0, router.route(0, now=0.0).peer, 0.1, 0.1)
    router.set_peers(0, ["a", "x", "y", "z"])
    first, second = {router.route(0, now=0.0).peer for _ in range(6)} - {"a"}
    router.passed_by(0, first, took_s)
    tried = {router.route(0, now=0.2).peer for _ in range(6)} - {"a"}
    assert len(tried - {first, second}) == released


@pytest.mark.parametrize(("comes_at", "given"), [(1, 4 + 4), (60, 1 + 4)])
def test_a_hundred_identities_that_never_answer_get_little_of_the_work(comes_at: int, given: int) -> None:
    """Of a microbatch a second for ten minutes: four at once where three others have just answered, and one
    where that was long ago; then one each time.
    """
    router = known("a", "b", "c")
    router.set_peers(0, ["a", "b", "c", *(f"z{number:03}" for number in range(100))])
    chosen = [router.route(0, now=float(second)).peer for second in range(comes_at, comes_at + 600)]
    assert sum(peer.startswith("z") for peer in chosen) == given


def test_where_none_has_answered_all_are_tried() -> None:
    router = Router()
    router.set_peers(0, ["a", "b", "c"])
    assert {router.route(0, now=0.0).peer for _ in range(3)} == {"a", "b", "c"}


def test_what_was_sent_before_any_answered_keeps_none_of_those_that_answer_from_more() -> None:
    router = Router()
    router.set_peers(0, ["a", "b"])
    for _ in range(12):
        router.route(0, now=0.0)
    for peer in ("a", "b"):
        router.answered(0, peer, 0.1)
    router.set_peers(0, ["a", "b", "c"])
    assert {router.route(0, now=0.1).peer for _ in range(6)} == {"a", "b", "c"}


def test_what_must_go_to_one_that_is_known_goes_to_another_only_where_none_is() -> None:
    router = Router()
    router.set_peers(0, ["a", "b", "c"])
    assert len({router.route(0, now=0.0, known=True).peer for _ in range(3)}) == 3
    router = Router()
    router.set_peers(0, ["a", "b", "c"])
    router.answered(0, "b", 0.1)
    assert {router.route(0, now=0.0, known=True).peer for _ in range(9)} == {"b"}


def test_one_that_was_silent_is_tried_again_like_one_that_has_never_answered() -> None:
    """Each of its callers gave a tarpit its share of each step until that had cost too much."""
    router = known("a", "z")
    router.failed("z", now=1.0, silent=True)
    assert router.answering(0) == ["a"]
    assert {router.route(0, now=30.0).peer for _ in range(9)} == {"a"}, "it was tried, and did not answer"
    assert {router.route(0, now=99.0, known=True).peer for _ in range(9)} == {"a"}
    assert [router.route(0, now=99.0).peer for _ in range(9)].count("z") == 1
    router.answered(0, "z", 0.1)
    assert router.answering(0) == ["a", "z"]
    assert [router.route(0, now=99.0).peer for _ in range(9)].count("z") > 1
    router.failed("z", now=99.0)
    assert router.knows(0, "z"), "it said no, or is gone: it may have begun again"
