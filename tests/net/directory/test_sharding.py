"""How a stage's records are spread over keys, and found again."""

from __future__ import annotations

from collections import Counter

import pytest

from peers.net.lookup import MAX_LEVEL, Scale, StageKey, homes, shards_at

SCALE = Scale()
FULL = SCALE.full
level_for, levels_to_read, shards_to_read = SCALE.level_for, SCALE.levels_to_read, SCALE.shards_to_read


def peers(count: int) -> list[str]:
    return [f"p{number}" for number in range(count)]


def test_a_small_stage_has_one_key() -> None:
    assert level_for(1) == level_for(FULL) == 0
    assert {homes(peer, 3, 0) for peer in peers(50)} == {(StageKey(3, 0, 0),)}
    assert shards_to_read(3, Counter({0: 9})) == [StageKey(3, 0, 0)]


@pytest.mark.parametrize("members", [9, 130, 1000, 10_000])
def test_no_key_of_any_level_holds_much_more_than_it_should(members: int) -> None:
    level = level_for(members)
    held = Counter(shard for peer in peers(members) for shard in homes(peer, 0, level))
    assert max(held.values()) <= 2 * FULL
    assert sum(held.values()) <= 1.5 * members
    if members > FULL:
        assert held[StageKey(0, 0, 0)] > FULL / 8, "enough to learn from how far the others are spread"


def test_every_peer_is_found_by_one_that_knows_only_the_sample_of_level_0() -> None:
    level = level_for(2000)
    lies = {peer: homes(peer, 5, level) for peer in peers(2000)}
    seen = [peer for peer, where in lies.items() if StageKey(5, 0, 0) in where]
    read = set(shards_to_read(5, Counter({level: len(seen)})))
    assert all(read.intersection(where) for where in lies.values())


def test_readers_go_further_before_writers_do() -> None:
    for members in range(0, 9000, 7):
        assert level_for(members) in levels_to_read(Counter({0: members})) or members == 0
        assert level_for(members * 20 // 19 + 1) in levels_to_read(Counter({0: members}))


def test_a_level_that_few_claim_is_not_read_and_none_beyond_the_last() -> None:
    assert levels_to_read(Counter({0: 40, 3: 2})) == [0]
    assert levels_to_read(Counter({0: 30, 1: 12})) == [0, 1]
    assert levels_to_read(Counter({1: 0})) == [0]
    assert levels_to_read(Counter({0: 10**6})) == list(range(MAX_LEVEL + 1))


def test_a_stage_that_grows_and_shrinks_a_little_stays_on_its_level() -> None:
    level = level_for(FULL + 1)
    assert level == 1
    assert all(level_for(members, level) == level for members in range(FULL // 2, 4 * FULL))
    assert level_for(FULL // 2 - 1, level) == 0
    assert level_for(10**6) == MAX_LEVEL
    assert level_for(0, MAX_LEVEL) == 0


def test_a_shard_is_split_into_four_and_a_sample_is_part_of_the_next() -> None:
    for peer in peers(300):
        deep = {shard.level: shard.number for shard in homes(peer, 0, 3)}
        assert deep[3] % 16 == homes(peer, 0, 2)[0].number
        # One that is on level 0 besides 3 is on those between as well.
        assert 0 not in deep or {1, 2} <= deep.keys()
    assert len(shards_at(0, 2)) == 16
