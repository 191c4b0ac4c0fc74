"""What a trainer counts of the work of peers, and vouches for."""

from __future__ import annotations

from swarm.ids import Microbatch
from swarm.protocol.voice import (
    MAX_STEPS,
    MIN_MICROBATCHES,
    MIN_STEPS,
    RENEW_EVERY,
    VALID_STEPS,
    LastContributions,
    WorkCount,
    Worked,
    renewal,
)
from swarm.records import Voucher

PEER = "p"


def worked(steps: int, each: int = 3, *, first: int = 0, count: WorkCount | None = None) -> WorkCount:
    """A peer that answered `each` microbatches in each of `steps` steps."""
    count = count or WorkCount()
    for t in range(first, first + steps):
        for m in range(each):
            count.answered(PEER, Microbatch(t, m))
    return count


def vouched(count: WorkCount, version: int = 1000) -> list[tuple[int, int]]:
    return [(w.steps, w.t) for w in count.renew(version)]


def test_ten_steps_and_twenty_five_microbatches_are_vouched_for() -> None:
    """So of those that were there from the start, all have voice at step 20, and none before the others."""
    assert 2 * MIN_STEPS == RENEW_EVERY
    assert worked(MIN_STEPS).renew(20) == [Worked(PEER, MIN_STEPS, MIN_STEPS - 1)]
    assert worked(MIN_STEPS - 1, 9).renew(20) == []
    assert worked(MIN_STEPS, 2).renew(20) == [] and 2 * MIN_STEPS < MIN_MICROBATCHES
    assert vouched(worked(25, 2), 25) == [(25, 24)]


def test_a_voucher_says_what_the_one_before_it_said_whoever_gave_that() -> None:
    count = worked(19)
    assert [w.before for w in count.renew(20)] == [0]
    assert [w.before for w in worked(9, first=19, count=count).renew(40)] == [19]
    count = worked(30)
    count.shown(PEER, Voucher("other", 25, 20, b""))
    assert [w.before for w in count.renew(40)] == [25]


def test_an_answer_counts_once() -> None:
    count = worked(MIN_STEPS, 2)
    for _ in range(9):
        worked(1, 2, first=MIN_STEPS - 1, count=count)
    assert vouched(count, 20) == []


def test_steps_that_are_run_again_after_a_rollback_count_nothing() -> None:
    count = worked(9, 4)
    for _ in range(5):
        worked(6, 4, first=3, count=count)
    assert vouched(count, 9) == []
    assert vouched(worked(5, 4, first=9, count=count), 20) == [(14, 13)]


def test_more_than_a_hundred_steps_count_no_more() -> None:
    assert vouched(worked(300), 300) == [(MAX_STEPS, 299)]


def test_who_does_no_work_gets_no_other_voucher_and_is_forgotten() -> None:
    count = worked(30)
    assert vouched(count, 40) == [(30, 29)]
    assert vouched(count, 60) == []
    assert vouched(worked(1, first=70, count=count), 80) == [(31, 70)]
    assert vouched(count, 71 + VALID_STEPS) == []
    assert vouched(worked(25, first=400, count=count), 440) == [(25, 424)]


def test_a_trainer_goes_on_from_what_another_vouched_for() -> None:
    count = WorkCount()
    count.shown(PEER, Voucher("other", 40, 60, b""))
    assert vouched(count, 60) == [], "it says nothing that the peer does not have"
    worked(5, 1, first=58, count=count)
    assert vouched(count, 63) == [(42, 62)], "steps up to 60 are counted already"


def test_a_voucher_that_says_less_than_was_counted_changes_nothing() -> None:
    count = worked(30)
    count.shown(PEER, Voucher("other", 25, 100, b""))
    assert vouched(worked(1, first=50, count=count), 60) == [(31, 50)]


def test_only_answers_that_change_something_are_looked_at() -> None:
    count = worked(5, 4)
    assert not count.wants(PEER, Microbatch(3, 9)) and not count.wants(PEER, Microbatch(4, 3))
    assert count.wants(PEER, Microbatch(4, 4)) and count.wants(PEER, Microbatch(5, 0))
    assert count.wants("another", Microbatch(0, 0))
    enough = worked(20, 4)
    assert not enough.wants(PEER, Microbatch(19, 4)), "there are microbatches enough"
    assert enough.wants(PEER, Microbatch(20, 0))


def test_vouchers_are_renewed_when_the_run_passes_each_twentieth_step() -> None:
    assert [v for v in range(1, 61) if renewal(v - 1, v)] == [20, 40, 60]
    assert renewal(19, 23) and renewal(10, 90) and not renewal(20, 39) and not renewal(45, 20)


def test_a_count_knows_at_which_stage_a_peer_answered_last() -> None:
    count = worked(3)
    count.answered(PEER, Microbatch(3, 0), 2)
    assert count.stage_of(PEER) == 2


def test_a_replica_knows_who_contributed_lately_as_long_as_it_adds_up_itself() -> None:
    seen = LastContributions()
    assert seen.last("a", version=0) is None is seen.last("a", version=50)
    for t in range(30, 40):
        seen.added_up({"a": 0b10 if t < 33 else 0, "b": 1, "c": 0}, t)
    assert [seen.last(peer, version=40) for peer in "abcd"] == [32, 39, 30, 30]
    assert seen.last("b", version=39 + MIN_STEPS) == 39
    assert seen.last("b", version=40 + MIN_STEPS) is None, "it was in no round since"
    seen.added_up({"b": 1}, 33 + VALID_STEPS)
    assert seen.last("a", version=240) == 30, "that is forgotten"
