"""Where a run goes on after a stage was lost."""

from __future__ import annotations

import pytest

from swarm.errors import Refused
from swarm.ids import Era, Standing
from swarm.policy.eras import FAR_BACK_S, MOST_ERAS, check_standing, newest_start, worth_waiting_s
from swarm.run import counting_run


def test_the_newest_version_that_all_stages_can_get() -> None:
    assert newest_start(2, {0: [2, 4], 1: [4, 6]}, most=9) == 4
    assert newest_start(2, {0: [2, 4], 1: [2, 4]}, most=3) == 2
    assert newest_start(2, {0: [2, 4], 1: [6]}, most=9) == 0
    assert newest_start(3, {0: [2], 1: [2]}, most=9) == 0
    assert newest_start(2, {}, most=9) == 0


def test_of_two_standings_the_later_era_holds_whatever_the_versions() -> None:
    assert Standing(Era(1, 4), 4) > Standing(Era(0, 0), 9)
    assert Standing(Era(1, 6), 6) > Standing(Era(1, 4), 8)
    assert Standing(Era(1, 4), 5) > Standing(Era(1, 4), 4)
    assert Era(2, 4).next(8) == Era(3, 8)


def test_only_a_long_way_back_is_worth_waiting() -> None:
    assert worth_waiting_s(0, 1000, checkpoint_every=0) == 0.0
    assert worth_waiting_s(980, 1000, checkpoint_every=10) == 0.0
    assert worth_waiting_s(979, 1000, checkpoint_every=10) == FAR_BACK_S
    assert worth_waiting_s(0, 15, checkpoint_every=10) == 0.0


@pytest.mark.parametrize(
    ("era", "version", "text"),
    [
        (Era(), 6, "a report of version 6 of a run of 5 steps"),
        (Era(), -1, "a report of version -1 of a run of 5 steps"),
        (Era(1, 3), 2, "a report of version 2 in an era that starts at version 3"),
        (Era(MOST_ERAS + 1, 0), 0, "an impossible era"),
        (Era(1, 6), 5, "an impossible era"),
    ],
)
def test_what_no_peer_can_be_at_is_refused(era: Era, version: int, text: str) -> None:
    with pytest.raises(Refused, match=text):
        check_standing(era, version, counting_run(steps=5), what="a report")
