"""Where a run goes on after a stage was lost."""

from __future__ import annotations

import pytest

from swarm.errors import Refused
from swarm.ids import Generation, Position
from swarm.manifest import audit_run
from swarm.protocol.rollback import (
    FAR_BACK_S,
    MAX_GENERATIONS,
    Join,
    check_position,
    furthest,
    is_alone_ahead,
    is_disproved,
    is_followed,
    is_one_step,
    join_by,
    may_leave,
    newest_start,
    plan_rollback,
    worth_waiting_s,
)


def test_the_newest_version_that_all_stages_can_get() -> None:
    assert newest_start(2, {0: [2, 4], 1: [4, 6]}, most=9) == 4
    assert newest_start(2, {0: [2, 4], 1: [2, 4]}, most=3) == 2
    assert newest_start(2, {0: [2, 4], 1: [6]}, most=9) == 0
    assert newest_start(3, {0: [2], 1: [2]}, most=9) == 0
    assert newest_start(2, {}, most=9) == 0


def test_of_two_standings_the_later_era_holds_whatever_the_versions() -> None:
    assert Position(Generation(1, 4), 4) > Position(Generation(0, 0), 9)
    assert Position(Generation(1, 6), 6) > Position(Generation(1, 4), 8)
    assert Position(Generation(1, 4), 5) > Position(Generation(1, 4), 4)


def test_one_gradient_brings_a_peer_a_step_further_in_its_own_era() -> None:
    mine = Position(Generation(1, 4), 5)
    assert is_one_step(mine, Position(Generation(1, 4), 6))
    for far in (5, 7):
        assert not is_one_step(mine, Position(Generation(1, 4), far))
    assert not is_one_step(mine, Position(Generation(2, 4), 6))


def test_only_a_long_way_back_is_worth_waiting() -> None:
    assert worth_waiting_s(0, 1000, checkpoint_every=0) == 0.0
    assert worth_waiting_s(980, 1000, checkpoint_every=10) == 0.0
    assert worth_waiting_s(979, 1000, checkpoint_every=10) == FAR_BACK_S
    assert worth_waiting_s(0, 15, checkpoint_every=10) == 0.0


@pytest.mark.parametrize(
    ("generation", "version", "text"),
    [
        (Generation(), 6, "a report of version 6 of a run of 5 steps"),
        (Generation(), -1, "a report of version -1 of a run of 5 steps"),
        (Generation(1, 3), 2, "a report of version 2 in a generation that starts at version 3"),
        (Generation(MAX_GENERATIONS + 1, 0), 0, "an impossible generation"),
        (Generation(1, 6), 5, "an impossible generation"),
    ],
)
def test_what_no_peer_can_be_at_is_refused(generation: Generation, version: int, text: str) -> None:
    with pytest.raises(Refused, match=text):
        check_position(generation, version, audit_run(steps=5), what="a report")


@pytest.mark.parametrize(
    ("mine", "replicas", "run", "does"),
    [
        (0, [], 0, Join.SERVE),  # the first of all
        (4, [], 0, Join.SERVE),  # it resumed, and nobody else is there
        (0, [], 3, Join.LOST),
        (0, [2], 3, Join.DOWNLOAD),
        (3, [3], 3, Join.SERVE),
        (4, [3], 3, Join.DOWNLOAD),  # our checkpoint is of another life of the run
        (4, [0], 0, Join.SERVE),  # who has not begun follows us
        (3, [2], 3, Join.SERVE),
    ],
)
def test_what_a_newcomer_does(mine: int, replicas: list[int], run: int, does: Join) -> None:
    def position(version: int) -> Position:
        return Position(Generation(), version)

    assert join_by(position(mine), [position(replica) for replica in replicas], position(run)) is does


def test_a_lost_stage_goes_on_or_a_new_era_starts() -> None:
    run = Position(Generation(1, 2), 8)

    def back(saved: dict[int, list[int]], waited_s: float = 0.0, **also: bool) -> tuple[Position, float]:
        return plan_rollback(1, 2, run, saved, waited_s=waited_s, checkpoint_every=2, steps=20, **also)

    assert back({0: [], 1: [8]}) == (run, 0.0)
    at = {start: Position(Generation(2, start, lost_stage=1, lost_version=8), start) for start in (2, 6, 12)}
    assert back({0: [4, 6], 1: [4, 6]}) == (at[6], 0.0)
    assert back({0: [2], 1: [2]}) == (at[2], FAR_BACK_S)
    assert back({0: [2], 1: [2]}, 20.0) == (at[2], FAR_BACK_S - 20.0)
    assert back({0: [2], 1: [2]}, from_keeper=True) == (at[2], 0.0)
    assert back({0: [12], 1: [12]}) == (at[12], 0.0)


def test_a_replica_where_the_run_was_disproves_that_its_stage_is_lost() -> None:
    claimed = Generation(2, 6, lost_stage=1, lost_version=8)

    def at(version: int, generation: Generation | None = None) -> Position:
        return Position(generation or Generation(1, 2), version)

    assert is_disproved(claimed, [at(7), at(8)], run_version=8)
    assert is_disproved(claimed, [at(9)], run_version=8)
    assert not is_disproved(claimed, [], run_version=8)
    assert not is_disproved(claimed, [at(7), at(9, claimed), at(9, Generation(3, 0))], run_version=8)
    lie = Generation(2, 6, lost_stage=1, lost_version=20)
    assert is_disproved(lie, [at(8)], run_version=8), "where the run was is known better than that"


def test_the_larger_half_decides_whether_a_generation_is_followed() -> None:
    claimed = Generation(2, 6, lost_stage=1, lost_version=8)
    there, before = Position(claimed, 6), Position(Generation(1, 2), 8)
    follows, stays = (there, 1), (before, 1)
    assert is_followed(claimed, [follows, follows, stays, stays])
    assert not is_followed(claimed, [follows, stays, stays])
    assert not is_followed(claimed, [follows, follows, stays, stays, stays])
    assert not is_followed(claimed, [follows, stays]), "one of several is none"
    assert is_followed(claimed, [follows]), "all that have voice are"
    assert is_followed(claimed, [follows, (Position(Generation(3, 0), 0), 1)])
    assert not is_followed(claimed, [follows, follows, (before, 3)])
    assert is_followed(claimed, [(there, 2), follows, (before, 3)])


def test_who_is_two_versions_ahead_of_all_others_is_alone_there() -> None:
    known = Position(Generation(1, 2), 8)
    assert not is_alone_ahead(Position(Generation(1, 2), 9), known)
    assert is_alone_ahead(Position(Generation(1, 2), 10), known)
    assert not is_alone_ahead(Position(Generation(2, 10), 10), known)  # another generation is another matter
    assert not is_alone_ahead(Position(Generation(), 10), known)


def test_one_of_several_says_not_alone_where_the_run_is() -> None:
    here, next_one, far = (Position(Generation(1, 2), version) for version in (8, 9, 10))
    assert furthest([(here, 30), (next_one, 30)]) == next_one
    assert furthest([(here, 30), (here, 30), (far, 100)]) == here
    assert furthest([(far, 30)]) == far, "all that have voice are"
    assert furthest([(here, 30), (here, 30), (Position(Generation(2, 9), 9), 100)]) == here
    assert furthest([]) == Position()


def test_the_last_with_a_version_stays_while_a_replica_has_yet_to_get_it() -> None:
    mine = Position(Generation(1, 2), 8)
    assert not may_leave(mine, [Position(Generation(1, 2), 7), Position(Generation(), 9)])
    assert may_leave(mine, [Position(Generation(1, 2), 7), mine])
    assert may_leave(mine, [])
