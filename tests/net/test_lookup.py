"""Which nodes are asked for which keys."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.net.lookup import Lookup, Scale, nodes_to_ask


def test_few_nodes_are_asked_and_other_ones_each_time() -> None:
    nodes = [f"n{n}" for n in range(6)]
    small = dict.fromkeys(range(16), nodes[:3])
    first = [next(iter(nodes_to_ask(small, random.Random(seed)))) for seed in range(20)]
    assert set(first) == set(nodes[:3])
    large = {key: [f"n{(key * 7 + n) % 40}" for n in range(5)] for key in range(16)}
    for seed in range(20):
        asked = nodes_to_ask(large, random.Random(seed))
        assert sorted(key for keys in asked.values() for key in keys) == list(range(16))
        assert len(asked) <= 16
    assert nodes_to_ask({1: []}, random.Random(0)) == {}


def test_of_many_nodes_no_more_are_asked_than_allowed_and_the_most_urgent_keys_first() -> None:
    apart = {key: [f"n{key}-{n}" for n in range(5)] for key in (7, 3, 9, 1)}
    for seed in range(10):
        asked = nodes_to_ask(apart, random.Random(seed), most=2)
        assert [key for keys in asked.values() for key in keys] == [7, 3]
    together = {key: ["a", "b"] for key in (7, 3, 9, 1)}
    ((_, keys),) = nodes_to_ask(together, random.Random(0), most=2).items()
    assert keys == [7, 3, 9, 1]
    assert nodes_to_ask(apart, random.Random(0), most=0) == {}


def test_times_stretch_with_the_number_of_peers_between_two_bounds() -> None:
    stretch = Scale().stretch
    assert stretch(0) == stretch(9) == stretch(200) == 1.0
    assert stretch(1000) == 5.0
    assert stretch(10_000) == stretch(10**6) == 20.0


Holders = dict[int, list[str]]


def lookup(holders: Holders, spare: Holders | None = None, answers: int = 1) -> Lookup[int, str]:
    return Lookup(holders, spare or {}, random.Random(0), answers=answers)


def test_one_answer_for_each_key_is_enough() -> None:
    reading = lookup({1: ["a", "b"], 2: ["a", "b"]})
    ((node, keys),) = reading.ask().items()
    assert sorted(keys) == [1, 2]
    assert not reading.over
    assert reading.ask() == {}, "no other while that one may answer"
    reading.answered(node, keys)
    assert reading.over
    assert reading.ask() == {}


def test_the_keys_of_a_node_that_does_not_answer_are_asked_of_all_others_in_turn() -> None:
    reading, asked = lookup({1: ["a", "b", "c"], 2: ["a", "b", "c"]}), []
    while not reading.over:
        ((node, keys),) = reading.ask().items()
        assert sorted(keys) == [1, 2]
        asked.append(node)
        reading.failed(node, keys)
    assert sorted(asked) == ["a", "b", "c"]
    assert reading.ask() == {}


def test_a_fresh_node_asks_two_for_each_key_and_only_one_if_there_is_only_one() -> None:
    reading = lookup({1: ["a", "b", "c"], 2: ["a"], 3: []}, answers=2)
    asked = reading.ask()
    assert sorted(key for keys in asked.values() for key in keys) == [1, 1, 2]
    for node, keys in asked.items():
        assert not reading.over
        reading.answered(node, keys)
    assert reading.over


def test_a_late_node_is_not_waited_for_and_its_answer_still_counts() -> None:
    reading = lookup({1: ["a", "b"]})
    ((first, keys),) = reading.ask().items()
    reading.late(first, keys)
    ((second, _),) = reading.ask().items()
    assert {first, second} == {"a", "b"}
    assert reading.ask() == {}
    reading.failed(second, keys)
    assert not reading.over, "the late one may still answer"
    reading.answered(first, keys)
    assert reading.over


def test_without_an_answer_nodes_further_away_are_asked_with_one_they_are_not() -> None:
    reading = lookup({1: ["a"]}, {1: ["a", "z"]}, answers=2)
    assert reading.ask() == {"a": [1]}
    reading.failed("a", [1])
    assert reading.ask() == {"z": [1]}, "not a again"
    reading.failed("z", [1])
    assert reading.over
    reading = lookup({1: ["a"]}, {1: ["z"]}, answers=2)
    reading.answered("a", reading.ask()["a"])
    assert reading.over


@given(st.data())
def test_it_ends_with_an_answer_from_every_key_that_one_alive_holds(data: st.DataObject) -> None:
    nodes = [f"n{n}" for n in range(8)]
    some = st.lists(st.sampled_from(nodes), max_size=5)
    holders = data.draw(st.dictionaries(st.integers(0, 15), some, max_size=16))
    dead = data.draw(st.sets(st.sampled_from(nodes)))
    reading = Lookup(holders, {}, random.Random(data.draw(st.integers(0, 9))), answers=2)
    answered: dict[int, set[str]] = {key: set() for key in holders}
    for _ in range(100):
        for node, keys in reading.ask().items():
            if node in dead:
                data.draw(st.sampled_from([reading.failed, reading.late]))(node, keys)
                reading.failed(node, keys)
            else:
                reading.answered(node, keys)
                for key in keys:
                    answered[key].add(node)
        if reading.over:
            break
    assert reading.over
    for key, holding in holders.items():
        assert len(answered[key]) == min(2, len(set(holding) - dead))


@pytest.mark.parametrize("answers", [1, 2])
def test_nothing_to_ask_is_over_at_once(answers: int) -> None:
    assert lookup({}, answers=answers).over
    assert lookup({1: []}, answers=answers).over
