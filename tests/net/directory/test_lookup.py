"""Which nodes are asked for which keys."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.clock import now_s
from peers.net.lookup import Scale, nodes_to_ask
from peers.net.record_reader import SLOW_S, ask_around
from peers.sim.loop import run_virtual

virtual = pytest.mark.virtual_time


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


async def asked(
    holders: Holders, spare: Holders | None = None, *, answers: int = 1, dead: Collection[str] = (),
    late_s: Mapping[str, float] = MappingProxyType({}), limit_s: float = 5.0,
) -> tuple[list[tuple[str, list[int]]], float]:  # fmt: skip
    """Which nodes were asked for which keys, in order, and how long that took."""
    found, began = list[tuple[str, list[int]]](), now_s()

    async def answer(node: str) -> bool:
        await asyncio.sleep(late_s.get(node, 0.0))
        return node not in dead

    def ask(node: str, keys: Sequence[int]) -> asyncio.Task[bool]:
        found.append((node, sorted(keys)))
        return asyncio.ensure_future(answer(node))

    await ask_around(holders, spare or {}, ask, random.Random(0), answers=answers, limit_s=limit_s)
    return found, now_s() - began


@virtual
async def test_one_answer_for_each_key_is_enough() -> None:
    found, _ = await asked({1: ["a", "b"], 2: ["a", "b"]})
    assert [keys for _, keys in found] == [[1, 2]]
    assert await asked({}) == await asked({1: []}, answers=2) == ([], 0.0)


@virtual
async def test_the_keys_of_a_node_that_does_not_answer_are_asked_of_all_others_in_turn() -> None:
    found, _ = await asked({1: ["a", "b", "c"], 2: ["a", "b", "c"]}, dead="abc")
    assert sorted(found) == [("a", [1, 2]), ("b", [1, 2]), ("c", [1, 2])]


@virtual
async def test_a_fresh_node_asks_two_for_each_key_and_only_one_if_there_is_only_one() -> None:
    found, _ = await asked({1: ["a", "b", "c"], 2: ["a"], 3: []}, answers=2)
    assert sorted(key for _, keys in found for key in keys) == [1, 1, 2]


@virtual
async def test_a_late_node_is_not_waited_for_and_its_answer_still_counts() -> None:
    found, took_s = await asked({1: ["a", "b"]}, late_s={"a": 9.0, "b": 0.1})
    assert took_s < 2 * SLOW_S and found[-1] == ("b", [1])
    found, took_s = await asked({1: ["a", "b"]}, late_s={"a": 2.0, "b": 0.1}, dead="b")
    assert len(found) == 2 and 2.0 <= took_s < 2.2, "the late one is all that is left"
    _, took_s = await asked({1: ["a"]}, late_s={"a": 99.0}, limit_s=5.0)
    assert took_s == pytest.approx(5.0)


@virtual
async def test_without_an_answer_nodes_further_away_are_asked_with_one_they_are_not() -> None:
    found, _ = await asked({1: ["a"]}, {1: ["a", "z"]}, answers=2, dead="a")
    assert found == [("a", [1]), ("z", [1])]
    found, _ = await asked({1: ["a"]}, {1: ["z"]}, answers=2)
    assert found == [("a", [1])]


@given(st.data())
def test_it_ends_with_an_answer_from_every_key_that_one_alive_holds(data: st.DataObject) -> None:
    nodes = [f"n{n}" for n in range(8)]
    some = st.lists(st.sampled_from(nodes), max_size=5)
    holders = data.draw(st.dictionaries(st.integers(0, 15), some, max_size=16))
    dead = data.draw(st.sets(st.sampled_from(nodes)))
    late_s = data.draw(st.dictionaries(st.sampled_from(nodes), st.sampled_from([0.1, 0.7])))
    found, _ = run_virtual(asked(holders, answers=2, dead=dead, late_s=late_s, limit_s=60.0))
    for key, holding in holders.items():
        answering = [node for node, keys in found if key in keys and node not in dead]
        assert len(answering) == len(set(answering)) >= min(2, len(set(holding) - dead))
