"""What a keeper fetches next: first what completes the newest common version, never what is of no use."""

from __future__ import annotations

import random

import pytest

from swarm.policy.keeping import borne_out, newest_common, next_download, reached, worth_fetching


@pytest.mark.parametrize(
    ("versions", "newest"),
    [
        ({0: [10, 20], 1: [20, 30]}, 20),
        ({0: [10], 1: [20]}, None),
        ({0: [10], 1: []}, None),
        ({0: [10]}, 10),
        ({}, None),
    ],
)
def test_the_newest_common_version(versions: dict[int, list[int]], newest: int | None) -> None:
    assert newest_common(versions) == newest


@pytest.mark.parametrize(
    ("have", "offered", "wanted"),
    [
        # what all stages can be had at comes first, though one stage has newer
        ({0: [], 1: []}, {0: [10, 20], 1: [10]}, (0, 10)),
        ({0: [10], 1: []}, {0: [10, 20], 1: [10]}, (1, 10)),
        # then the newest of a stage
        ({0: [10], 1: [10]}, {0: [10, 20], 1: [10]}, (0, 20)),
        ({0: [10, 20], 1: [10]}, {0: [10, 20], 1: [10]}, None),
        # older than what is complete here: of no use
        ({0: [20], 1: [20]}, {0: [10], 1: [10]}, None),
        # an old version completes a step that is newer than the newest complete one
        ({0: [10, 40], 1: [10, 30]}, {0: [30], 1: []}, (0, 30)),
        # the stage that is furthest behind first
        ({0: [10, 20], 1: [10], 2: [10]}, {0: [30], 1: [], 2: [25]}, (2, 25)),
        ({0: [], 1: []}, {0: [], 1: []}, None),
        # one stage cannot be had at all: the others are kept all the same, the newest of each
        ({0: [], 1: []}, {0: [10, 20], 1: []}, (0, 20)),
    ],
)
def test_what_is_fetched_next(
    have: dict[int, list[int]], offered: dict[int, list[int]], wanted: tuple[int, int] | None
) -> None:
    assert next_download(have, offered) == wanted


def test_whatever_is_offered_the_newest_version_that_all_can_be_had_at_is_fetched_and_then_nothing() -> None:
    rng = random.Random(5)
    for _ in range(500):
        stages = range(rng.randint(1, 4))

        def some() -> dict[int, list[int]]:
            return {s: sorted(rng.sample(range(0, 60, 10), rng.randint(0, 4))) for s in stages}  # noqa: B023

        have, offered = some(), some()
        best = newest_common({s: {*have[s], *offered[s]} for s in stages})
        fetched: list[tuple[int, int]] = []
        while (wanted := next_download(have, offered)) is not None:
            stage, version = wanted
            assert version in offered[stage] and version not in have[stage]
            have[stage].append(version)
            fetched.append(wanted)
            assert len(fetched) <= 2 * len(stages)
        assert newest_common(have) == best
        assert next_download(have, {s: [] for s in stages}) is None


def test_the_run_has_come_as_far_as_its_last_stage_says() -> None:
    assert reached({0: {"a": 20}, 1: {"b": 22, "c": 5}}, {}) == 20
    assert reached({0: {}, 1: {"b": 30}}, {}) == 30
    assert reached({0: {}, 1: {}}, {}) is None


def test_one_that_lies_about_its_step_moves_nothing() -> None:
    assert reached({0: {"a": 20}, 1: {"b": 20, "liar": 10**9}}, {}) == 20


def test_liars_in_every_stage_move_nothing_where_others_have_voice() -> None:
    said = {0: {"a": 20, "l": 10**9, "m": 10**9}, 1: {"b": 22, "n": 10**9}}
    assert reached(said, {"a": 30, "b": 30}) == 20
    assert reached(said, {"b": 30}) == 22


def test_a_version_without_voice_takes_the_place_of_none_with_it() -> None:
    offered = {8: ["a", "l"], 9: ["l", "m"]}
    assert worth_fetching(offered, {}, have_voiced=False) == offered
    assert worth_fetching(offered, {}, have_voiced=True) == {}
    assert worth_fetching(offered, {"a": 30}, have_voiced=False) == {8: ["a", "l"]}
    assert worth_fetching(offered, {"b": 30}, have_voiced=False) == {}


def test_a_version_that_most_of_those_without_voice_have_is_one() -> None:
    offered = {4: ["k", "m"], 8: ["k", "l"], 9: ["l"]}
    assert set(borne_out(offered, (), {})) == {4, 8}
    assert borne_out({4: ["k"], 9: ["l"]}, (), {}) == {}
    assert set(borne_out({4: ["k"]}, (), {})) == {4}
    assert borne_out({}, (), {}) == {}


def test_where_a_founder_keeps_versions_there_are_those_and_what_peers_with_voice_have() -> None:
    offered = {4: ["k", "m"], 8: ["m", "l"], 9: ["l", "m"]}
    assert set(borne_out(offered, ["k", "z"], {})) == {4}
    assert set(borne_out(offered, ["k"], {"l": 30})) == {4, 8, 9}
    assert set(borne_out({8: ["l"], 9: ["m"]}, ["k"], {"l": 30})) == {8, 9}
