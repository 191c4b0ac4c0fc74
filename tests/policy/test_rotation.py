"""While steps are not taken the coordinators change, and all peers come to the same."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from swarm.ids import PeerId
from swarm.policy.backoff import STEPS
from swarm.policy.rotation import FIRST_LATE_S, LATE_S, SLEPT_S, Rotation

PEERS = ["ann", "bob", "cid"]


class Watched:
    """A peer's turns, with a clock. `ann` coordinates before `bob`, and `bob` before `cid`."""

    def __init__(self) -> None:
        self.rotation, self.now = Rotation(), 100.0
        self.rotation.stepped(now=self.now)

    def steps(self, number: int, *, each_s: float = 0.5) -> None:
        for _ in range(number):
            self.waits(each_s)
            self.rotation.stepped(now=self.now)

    def waits(self, seconds: float, coordinators: Callable[[], list[PeerId]] | None = None) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            self.rotation.charge(coordinators() if coordinators else [self.first], t=7, now=self.now)

    @property
    def first(self) -> PeerId:
        return self.rotation.awake(PEERS, now=self.now)[0]


def test_a_state_that_was_fetched_after_a_cut_says_nothing_of_how_long_steps_take() -> None:
    this = Watched()
    this.waits(26.0)
    this.rotation.stepped(now=this.now, alone=False)
    this.waits(60.0)
    assert this.first == "bob"


def test_a_first_step_that_was_held_up_by_a_cut_is_not_taken_for_usual() -> None:
    """Seed 120149: after a step of 32 s a run waited for a coordinator for 320 s."""
    this = Watched()
    this.steps(1, each_s=26.0)
    this.waits(75.0)
    assert this.first == "ann"
    this.waits(10.0)
    assert this.first == "bob"


def test_a_coordinator_under_which_no_step_is_taken_makes_way_for_the_next() -> None:
    this = Watched()
    this.steps(3)
    this.waits(24.0)
    assert this.first == "ann"
    this.waits(2.0)
    assert this.first == "bob"
    this.waits(24.0)
    assert this.first == "bob", "its turn began as the other's ended"
    this.waits(3.0)
    assert this.first == "cid"


def test_before_the_first_step_there_is_more_time() -> None:
    this = Watched()
    this.waits(FIRST_LATE_S - 1.0)
    assert this.first == "ann"
    this.waits(3.0)
    assert this.first == "bob"


def test_coordinators_of_steps_in_time_cost_nothing() -> None:
    this = Watched()
    this.steps(50, each_s=LATE_S - 1.0)
    assert this.first == "ann"


def test_late_steps_add_up() -> None:
    this = Watched()
    this.steps(10)
    this.steps(2, each_s=LATE_S + 3.0)
    assert this.first == "bob"


def test_what_is_usual_follows_from_the_steps() -> None:
    this = Watched()
    this.steps(5, each_s=8.0)
    this.waits(70.0)
    assert this.first == "ann"
    this.waits(15.0)
    assert this.first == "bob"


def test_a_peer_that_was_away_saw_nobody_hold_anything_up() -> None:
    this = Watched()
    this.steps(3)
    this.now += 60.0 + SLEPT_S
    this.waits(9.0)
    assert this.first == "ann"


def test_one_that_came_late_in_a_step_is_charged_from_then_on() -> None:
    """After a cut those that could be reached again rested at once, each in another's view (seed 700330)."""
    this = Watched()
    this.waits(FIRST_LATE_S - 2.0, lambda: ["eve"])
    this.waits(FIRST_LATE_S - 1.0)
    assert this.first == "ann"
    this.waits(3.0)
    assert this.first == "bob"


def test_where_all_cost_too_much_the_one_whose_rest_ends_first_coordinates() -> None:
    this = Watched()
    this.steps(3)
    seen: list[PeerId] = []

    def noted() -> list[PeerId]:
        seen.append(this.first)
        return [this.first]

    this.waits(600.0, noted)
    assert set(seen[-300:]) == set(PEERS)


def test_one_that_coordinates_another_stage_is_charged_by_itself() -> None:
    this = Watched()
    this.steps(3)
    this.waits(30.0, lambda: [this.first, "zoe"])
    assert this.rotation.awake(["zoe", "yan"], now=this.now) == ["yan"]


def test_each_has_a_whole_turn_before_one_that_rested_has_another_and_later_turns_are_longer() -> None:
    this = Watched()
    this.steps(3)
    turns: list[tuple[PeerId, float]] = []

    def noted() -> list[PeerId]:
        if not turns or turns[-1][0] != this.first:
            turns.append((this.first, this.now))
        return [this.first]

    this.waits(600.0, noted)
    names, began = [name for name, _ in turns], [at for _, at in turns]
    lasted = [end - start for start, end in pairwise(began)]
    assert names[:3] == PEERS and min(lasted[:3]) >= 25.0
    assert max(names[:6].count(name) for name in PEERS) <= 2
    assert min(lasted[3:]) >= 2 * LATE_S


def test_under_whom_a_late_step_was_taken_coordinates_the_next_ones_too() -> None:
    this = Watched()
    this.steps(3)
    this.waits(60.0)
    assert this.first == "cid"
    this.steps(1)
    this.waits(20.0)
    assert this.first == "cid", "ann has rested"
    this.steps(1)
    this.steps(STEPS)
    assert this.first == "ann", "all steps were in time for a while"
