"""While steps are late the coordinators change, and all peers come to the same."""

from __future__ import annotations

from itertools import pairwise

from swarm.ids import PeerId
from swarm.policy.backoff import STEPS
from swarm.policy.rotation import (
    FIRST_LATE_S,
    FIRST_TURN_S,
    LATE_S,
    SLEPT_S,
    SLOW_S,
    TURN_STEPS,
    Rotation,
    turn_of,
)

PEERS = ["ann", "bob", "cid"]


class Watched:
    """A peer's turns, with a clock. `ann` coordinates before `bob`, and `bob` before `cid`."""

    def __init__(self) -> None:
        self.rotation, self.now, self.version = Rotation(), 100.0, 0
        self.rotation.stepped(now=self.now)

    def steps(self, number: int, *, each_s: float = 0.5) -> None:
        for _ in range(number):
            self.waits(each_s)
            self.rotation.stepped(now=self.now)

    def takes(self, version: int, slow: PeerId, *, slow_s: float, least_s: float = 0.2) -> list[PeerId]:
        """Who began to coordinate each step up to a version, where turns go by steps: one under `slow` ends
        after `slow_s`, or soon after another one's turn began.
        """
        seen = list[PeerId]()
        while self.version < version:
            self.rotation.at(self.version)
            seen.append(self.first)
            late_s = slow_s if self.first == slow else 0.0
            while late_s > 0.0 and self.first == slow:
                self.waits(min(1.0, late_s))
                late_s -= 1.0
            self.steps(1, each_s=least_s)
            self.version += 1
        return seen

    def waits(self, seconds: float) -> list[PeerId]:
        """Whose turn it was, second by second."""
        end, seen = self.now + seconds, list[PeerId]()
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            self.rotation.waits(now=self.now)
            seen.append(self.first)
        return seen

    @property
    def first(self) -> PeerId:
        return self.rotation.in_turn(PEERS)[0]


def test_a_state_that_was_fetched_after_a_cut_says_nothing_of_how_long_steps_take() -> None:
    this = Watched()
    this.waits(26.0)
    this.rotation.stepped(now=this.now, steps=0)
    this.waits(60.0)
    assert this.first != "ann"


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
    this.waits(FIRST_TURN_S - 1.0)
    assert this.first == "ann"
    this.waits(2.0)
    assert this.first == "bob"
    this.waits(23.0)
    assert this.first == "bob"
    this.waits(2.0)
    assert this.first == "cid"


def test_who_had_the_turn_is_named_once_when_a_step_becomes_late_and_once_when_that_turn_is_over() -> None:
    this, named = Watched(), dict[float, str]()
    this.steps(3)
    stepped = this.now
    for _ in range(45):
        this.now += 1.0
        turn = this.rotation.waits(now=this.now)
        if turn is not None:
            named[this.now - stepped] = this.rotation.in_turn(PEERS, turn)[0]
    assert named == {11.0: "ann", 13.0: "ann", 37.0: "bob"}
    this.rotation.stepped(now=this.now)
    told = [this.rotation.waits(now=this.now + after_s) for after_s in (4.0, 8.0, 11.0, 12.0)]
    assert told[:2] == [None, None] and told[2] is not None and told[3] is None


def test_one_that_comes_to_a_run_gives_the_step_that_goes_on_more_time() -> None:
    this = Watched()
    this.waits(FIRST_LATE_S - 1.0)
    assert this.first == "ann" and not this.rotation.late
    this.waits(3.0)
    assert this.first == "bob"


def test_all_count_a_first_step_from_when_it_began_however_long_each_had_waited() -> None:
    """Peers that had come one by one, and waited for a trainer, saw other coordinators for 20 steps."""
    seen = list[list[PeerId]]()
    for idle_s in (3.0, 60.0):
        this = Watched()
        for begun in (False, True):
            this.rotation.expects(5.0, begun=begun, now=this.now)
            after = this.waits(0.0 if begun else idle_s)
        for _ in range(40):
            this.rotation.expects(5.0, begun=True, now=this.now)
            after += this.waits(1.0)
        seen.append(after[-40:])
    assert seen[0] == seen[1]
    assert [seen[0].count(peer) for peer in PEERS] == [15, 24, 1]


def test_time_before_a_step_was_late_is_not_of_the_next_turn() -> None:
    """Of two, one that lied had most of the honest one's turn end before it began: 124 s for 68."""
    this = Watched()
    this.steps(2)
    this.steps(1, each_s=LATE_S + 1.0)
    assert this.first == "ann"
    seen = this.waits(LATE_S + 40.0)
    assert seen.count("bob") == 24, "all of its turn but the second in which the step was found to be late"
    assert [peer for peer, after in pairwise([*seen, ""]) if peer != after] == PEERS


def test_coordinators_of_steps_in_time_keep_their_turn() -> None:
    this = Watched()
    this.steps(50, each_s=LATE_S - 1.0)
    assert this.first == "ann" and not this.rotation.late


def test_late_steps_add_up() -> None:
    this = Watched()
    this.steps(10)
    this.steps(2, each_s=LATE_S + 3.0)
    assert this.first == "bob"


def test_slow_steps_that_are_not_late_by_themselves_are_late_together() -> None:
    """A coordinator that had each step take 9 s cost 181 s in 20 steps, and kept its turn."""
    this = Watched()
    this.steps(10)
    this.steps(3, each_s=2.8)
    assert not this.rotation.late
    this.steps(1, each_s=2.8)
    assert this.rotation.late and this.first == "ann"
    this.steps(1, each_s=2.8)
    assert this.first == "bob"


def test_steps_that_are_slow_now_and_then_are_not_late() -> None:
    this = Watched()
    for _ in range(10):
        this.steps(STEPS // 2)
        this.steps(1, each_s=LATE_S / 2 - 0.5)
    this.steps(STEPS, each_s=SLOW_S)
    assert this.first == "ann" and not this.rotation.late


def test_steps_that_take_longer_than_they_did_are_late_no_more_once_that_is_usual() -> None:
    this = Watched()
    this.steps(40)
    this.steps(60, each_s=4.0)
    assert not this.rotation.late


def test_all_come_to_the_turn_of_the_one_that_ends_a_late_step() -> None:
    """One looks once a second; the step ended a moment after another one had looked, whose turn that was. The
    first followed the coordinator before for 20 steps, and was a second behind in each.
    """
    for looked_s, later_s in ((0.01, 0.0), (-0.9, 0.0), (-0.9, 0.3)):
        this = Watched()
        this.steps(3)
        began_s, this.now = this.now, this.now + later_s
        this.rotation.stepped(now=this.now)
        this.waits(FIRST_TURN_S + looked_s - later_s)
        this.rotation.stepped(now=began_s + FIRST_TURN_S + 0.02)
        assert this.first == "bob", (looked_s, later_s)


def test_what_is_usual_follows_from_the_steps() -> None:
    this = Watched()
    this.steps(5, each_s=8.0)
    this.waits(70.0)
    assert this.first == "ann"
    this.waits(15.0)
    assert this.first == "bob"


def test_time_in_which_others_took_the_step_is_taken_back() -> None:
    this = Watched()
    this.steps(3)
    this.steps(1, each_s=LATE_S + 10.0)
    this.waits(LATE_S + 30.0)
    assert this.first == "cid"
    this.rotation.waits(now=this.now, passed=lambda: True)
    assert this.first == "bob", "what was late before the last step counts"
    this.waits(LATE_S)
    assert this.first == "bob"


def test_who_leads_while_others_take_steps_without_it_takes_its_turn_back_once() -> None:
    """They do not follow it. It would wait for them for ever, and for what they have."""
    this = Watched()
    this.steps(3)
    for leads, first in ((True, "ann"), (True, "bob"), (False, "ann"), (True, "bob")):
        this.waits(LATE_S)
        for _ in range(int(FIRST_TURN_S) + 1):
            this.now += 1.0
            this.rotation.waits(now=this.now, leads=leads, passed=lambda: True)
        assert this.first == first
    this.rotation.stepped(now=this.now)
    this.waits(LATE_S + 1.0)
    this.rotation.waits(now=this.now, leads=True, passed=lambda: True)
    assert this.first == "bob", "of the next step it may be late again"


def test_a_peer_that_was_away_saw_nobody_hold_anything_up() -> None:
    this = Watched()
    this.steps(3)
    this.now += 60.0 + SLEPT_S
    this.waits(9.0)
    assert this.first == "ann" and not this.rotation.late


def test_two_that_saw_the_same_steps_see_the_same_turns_whomever_they_reached() -> None:
    """Where each charged the coordinators that it saw, those of one stage saw others for minutes."""
    one, other = Watched(), Watched()
    other.now += 0.7
    for this in (one, other):
        this.steps(3)
    seen = [this.waits(600.0) for this in (one, other)]
    assert sum(a != b for a, b in zip(*seen, strict=True)) <= len(set(PEERS)) * 4
    assert set(seen[0]) == set(PEERS)


def test_each_has_a_turn_before_one_has_another_and_later_turns_are_longer() -> None:
    this = Watched()
    this.steps(3)
    seen = this.waits(25.0 * 3 * 7 - FIRST_TURN_S - 2.0)
    began = [0, *(at for at in range(1, len(seen)) if seen[at] != seen[at - 1]), len(seen)]
    lasted = [end - start for start, end in pairwise(began)]
    assert [seen[at] for at in began[:-1]] == PEERS * 3
    assert [round(s / FIRST_TURN_S) for s in lasted] == [1, 2, 2, 4, 4, 4, 8, 8, 8]


def test_a_late_step_is_told_of_until_twenty_were_in_time() -> None:
    this = Watched()
    this.steps(3)
    this.waits(LATE_S)
    assert not this.rotation.late
    this.waits(20.0)
    assert this.first == "bob" and this.rotation.late
    this.steps(STEPS)
    assert this.first == "bob" and this.rotation.late, "the last of the late steps was one of them"
    this.steps(1)
    assert this.first == "ann" and not this.rotation.late, "all steps were in time for a while"


def test_where_there_is_nobody_it_is_nobodys_turn() -> None:
    this = Watched()
    this.waits(200.0)
    assert this.rotation.in_turn([]) == [] and this.rotation.in_turn(["ann"]) == ["ann"]


# --- turns by the number of the step ---


def test_turns_are_short_at_first_and_then_of_64_steps() -> None:
    began = [version for version in range(300) if not version or turn_of(version) != turn_of(version - 1)]
    assert began == [0, 1, 2, 4, 8, 16, 32, 64, 128, 192, 256]
    assert [turn_of(version) for version in began] == [*range(len(began))]


def test_of_two_turns_in_a_row_each_pair_has_two_coordinators_and_all_have_turns() -> None:
    for peers in (PEERS[:2], PEERS, [f"peer {number}" for number in range(9)]):
        rotation, first = Rotation(), list[PeerId]()
        for turn in range(400):
            rotation.at(turn * TURN_STEPS)
            first.append(rotation.in_turn(peers)[0])
            assert sorted(rotation.in_turn(peers)) == sorted(peers)
        assert not any(first[turn] == first[turn + 1] for turn in range(0, 400, 2))
        counts = [first.count(peer) for peer in peers]
        assert min(counts) > 0.5 * 400 / len(peers) and max(counts) < 1.5 * 400 / len(peers)


def test_who_leaves_changes_no_turn_but_its_own() -> None:
    peers, rotation = [f"peer {number}" for number in range(9)], Rotation()
    for turn in range(100):
        rotation.at(turn * TURN_STEPS)
        first = rotation.in_turn(peers)[0]
        for gone in peers:
            left = rotation.in_turn([peer for peer in peers if peer != gone])[0]
            assert (left != first) == (gone == first)


def test_one_that_is_slow_from_the_first_step_on_is_found_by_what_steps_take_under_others() -> None:
    """Run coordinators that answered each summary 2 s late made steps of 0.2 s take 4 s, for ever."""
    for slow in PEERS:
        this = Watched()
        this.takes(8, slow, slow_s=4.0)
        began_s = this.now
        seen = this.takes(600, slow, slow_s=4.0)
        assert this.now - began_s < len(seen) * 0.2 + 30.0 * len(seen) / STEPS
        assert seen.count(slow) < len(seen) / 6


def test_one_under_which_steps_take_longer_and_longer_teaches_nobody_that_this_is_usual() -> None:
    """Each time less than three times as long as before: 97 s in 20 steps, and more to come."""
    this, slow_s = Watched(), 0.9
    this.takes(25, "", slow_s=0.0)
    began_s = this.now
    for version in range(45, 600, 20):
        this.takes(version, "cid", slow_s=slow_s)
        slow_s *= 2.5
    assert this.now - began_s < 575 * 0.2 + 30.0 * 575 / STEPS


def test_where_steps_take_longer_under_all_that_becomes_usual() -> None:
    this = Watched()
    this.takes(100, "", slow_s=0.0)
    this.takes(200, "", slow_s=0.0, least_s=4.0)
    assert not this.rotation.late
    assert this.takes(201, "", slow_s=0.0, least_s=12.0) and not this.rotation.late


def test_a_turn_of_one_step_says_not_how_long_steps_take() -> None:
    """Of one whose result was there already it would be next to nothing."""
    this = Watched()
    this.steps(40, each_s=20.0)
    this.steps(1, each_s=210.0)
    this.steps(1, each_s=0.1)
    this.steps(1, each_s=430.0)
    first = this.first
    for _ in range(6):
        this.steps(1, each_s=20.0)
        assert this.first == first


def test_those_for_whom_a_step_was_late_and_others_see_the_same_turns() -> None:
    """Over the end of a turn two coordinated their stage, one of them itself alone."""
    one, other = Watched(), Watched()
    for this in (one, other):
        this.takes(TURN_STEPS - 1, "", slow_s=0.0)
    one.steps(1, each_s=LATE_S + 1.0)
    assert one.rotation.late and not other.rotation.late
    for this in (one, other):
        this.rotation.at(2 * TURN_STEPS)
    assert one.rotation.in_turn(PEERS) == other.rotation.in_turn(PEERS)


def test_no_turn_of_strangers_begins_by_the_number_of_a_step() -> None:
    """There may be any number of them: one with voice would coordinate next to never."""
    rotation = Rotation()
    firsts = {voice: set[str]() for voice in (0, 30)}
    for version in range(0, 40 * TURN_STEPS, TURN_STEPS):
        rotation.at(version)
        for voice, first in firsts.items():
            first.add(rotation.in_turn(PEERS, voice={PEERS[-1]: voice})[0])
    assert firsts == {0: {rotation.in_turn(PEERS, voice={})[0]}, 30: {*PEERS}}


def test_of_strangers_the_second_begins_three_steps_of_a_run() -> None:
    """Else of two strangers the first, late from the first step on, is taken for what is usual."""
    rotation, firsts = Rotation(), list[PeerId]()
    for version in range(6):
        rotation.at(version)
        firsts.append(rotation.in_turn(PEERS, voice={})[0])
    assert firsts == ["ann", "bob", "bob", "bob", "ann", "ann"]
    assert rotation.in_turn(PEERS[:1], voice={}) == ["ann"]


def test_one_that_catches_up_learns_how_long_steps_take() -> None:
    """Told late of each, it took no step alone, and let a coordinator have each of its own last 30 s."""
    this = Watched()
    this.waits(2.0)
    this.rotation.stepped(now=this.now, steps=4, ahead=2)
    this.waits(LATE_S + 1.0)
    assert this.rotation.late
    this.waits(FIRST_TURN_S)
    assert this.first == "bob"
    this.rotation.stepped(now=this.now, steps=2)
    assert this.first == "ann", "it was late for this one only"
    other = Watched()
    other.rotation.stepped(now=other.now, ahead=3)
    other.waits(2.0)
    other.rotation.stepped(now=other.now, steps=4)
    other.waits(LATE_S + 1.0)
    assert not other.rotation.late, "others had taken most of these steps before"


def test_one_that_catches_up_after_it_slept_has_not_seen_how_long_steps_take() -> None:
    """It took the time since it woke up for that of the steps that the others had taken while it slept."""
    this = Watched()
    this.waits(12.0)
    this.rotation.stepped(now=this.now)
    this.now += 60.0
    this.waits(2.0)
    this.rotation.stepped(now=this.now, steps=5)
    this.waits(12.0)
    assert not this.rotation.late


def test_a_step_after_one_of_which_this_peer_was_told_late_says_not_how_long_steps_take() -> None:
    """It took 0.04 s for it and 2 s for the others, and their turns differed for the rest of the run."""
    this = Watched()
    for took_s, ahead in ((12.0, 1), (0.04, 0), (12.0, 0)):
        this.waits(took_s)
        this.rotation.stepped(now=this.now, ahead=ahead)
    assert not this.rotation.late
    for ahead in (1, 1):
        this.waits(0.5)
        this.rotation.stepped(now=this.now, ahead=ahead)
    this.waits(LATE_S + 1.0)
    assert this.rotation.late, "it was told of both late"


def test_a_step_of_which_this_peer_is_told_late_says_not_how_long_steps_take() -> None:
    """One of two, told 3 s late of a run's third step, kept its turn for 43 s; for all others it was over."""
    this = Watched()
    for took_s, ahead in ((0.2, 0), (6.5, 0), (4.0, 1)):
        this.waits(took_s)
        this.rotation.stepped(now=this.now, ahead=ahead)
    this.waits(LATE_S + 1.0)
    assert this.rotation.late


def test_while_steps_are_late_no_turn_begins_by_their_number() -> None:
    this = Watched()
    this.takes(TURN_STEPS - 1, "", slow_s=0.0)
    this.waits(20.0)
    assert this.rotation.late
    both = this.rotation.in_turn(PEERS[:2])
    this.rotation.stepped(now=this.now)
    this.rotation.at(TURN_STEPS)
    assert this.rotation.in_turn(PEERS[:2]) == both
    this.takes(TURN_STEPS + 2 * STEPS, "", slow_s=0.0)
    assert not this.rotation.late and this.rotation.in_turn(PEERS[:2]) == both, "two turns further"
