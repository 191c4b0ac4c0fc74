"""What a trainer does next."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.ids import Microbatch
from swarm.protocol.ledger import everything
from swarm.protocol.worklist import LOST_AFTER_S, REPLAY_AFTER_S, WorkItem, WorkList

M = 4
ALL = everything(M)


@pytest.fixture
def todo() -> WorkList:
    """Walks 2, 0, 3, 1 in every step."""
    return WorkList(lambda t: [2, 0, 3, 1])


def start_all(todo: WorkList, newest: int = 0, *, now: float = 0.0) -> list[WorkItem]:
    started = []
    while (work := todo.next(newest, now=now)) is not None:
        started.append(work)
    return started


def numbers(started: list[WorkItem]) -> list[int]:
    return [work.microbatch.m for work in started]


def test_it_walks_a_step_in_its_own_order_then_the_next(todo: WorkList) -> None:
    started = start_all(todo, 1)
    assert [work.microbatch for work in started] == [
        *(Microbatch(0, m) for m in (2, 0, 3, 1)),
        *(Microbatch(1, m) for m in (2, 0, 3, 1)),
    ]
    assert all(work.deepest == -1 and not work.replay for work in started)


def test_it_starts_nothing_beyond_the_newest_step(todo: WorkList) -> None:
    assert numbers(start_all(todo, 0)) == [2, 0, 3, 1]
    assert todo.next(-1, now=0.0) is None


def test_it_skips_what_others_have_claimed(todo: WorkList) -> None:
    todo.lacking(0, [0b1010, ALL], now=0.0)
    assert numbers(start_all(todo)) == [3, 1]


def test_one_that_failed_is_started_again(todo: WorkList) -> None:
    start_all(todo)
    todo.failed(Microbatch(0, 3))
    assert numbers(start_all(todo)) == [3]


def test_one_that_finished_is_not_started_again_without_reason(todo: WorkList) -> None:
    for work in start_all(todo):
        todo.finished(work.microbatch)
    assert start_all(todo, now=100.0) == []
    assert todo.next_wakeup(0, now=0.0) is None


def test_after_the_run_went_back_what_was_done_since_is_to_be_done_again(todo: WorkList) -> None:
    for work in start_all(todo, 1)[:5]:
        todo.finished(work.microbatch)
    todo.stepped(1)
    todo.went_back(0)
    assert [work.microbatch for work in start_all(todo, 1)] == [
        *(Microbatch(0, m) for m in (2, 0, 3, 1)),
        *(Microbatch(1, m) for m in (2, 0, 3, 1)),
    ]


def test_a_finished_one_that_is_lacking_runs_again_only_after_a_while(todo: WorkList) -> None:
    for work in start_all(todo):
        todo.finished(work.microbatch)
    todo.lacking(0, [0, 0b0100, 0], now=1.0)
    assert todo.next(0, now=1.0) is None
    assert todo.next_wakeup(0, now=1.0) == 1.0 + REPLAY_AFTER_S
    again = todo.next(0, now=1.0 + REPLAY_AFTER_S)
    assert again == WorkItem(Microbatch(0, 2), deepest=1, replay=True)
    assert todo.replayed == 1


def test_nothing_wakes_a_trainer_for_a_step_that_may_not_begin(todo: WorkList) -> None:
    todo.lacking(1, [ALL, ALL], now=0.0)
    assert todo.next_wakeup(0, now=5.0) is None
    assert todo.next_wakeup(1, now=5.0) == 5.0


def test_one_that_all_stages_had_and_lack_was_lost_and_runs_again_soon(todo: WorkList) -> None:
    for work in start_all(todo):
        todo.finished(work.microbatch)
    todo.lacking(0, [0, 0b0001, 0], now=0.5)  # 0 is not yet reported
    todo.lacking(0, [0, 0b0101, 0], now=0.6)  # 2 was
    assert todo.next_wakeup(0, now=0.6) == 0.6 + LOST_AFTER_S
    assert numbers(start_all(todo, now=0.6 + LOST_AFTER_S)) == [2]
    # Its replay was answered: from here on reports lag behind it again.
    todo.finished(Microbatch(0, 2))
    todo.lacking(0, [0, 0b0100, 0], now=0.8)
    assert start_all(todo, now=0.8 + LOST_AFTER_S) == []
    assert numbers(start_all(todo, now=0.8 + REPLAY_AFTER_S)) == [2]


def test_what_is_lacking_is_run_again_in_its_own_order(todo: WorkList) -> None:
    for work in start_all(todo):
        todo.finished(work.microbatch)
    todo.lacking(0, [ALL, ALL], now=1.0)
    assert numbers(start_all(todo, now=1.0 + REPLAY_AFTER_S)) == [2, 0, 3, 1]


def test_a_replay_reaches_to_the_last_stage_that_lacks_it(todo: WorkList) -> None:
    for work in start_all(todo):
        todo.finished(work.microbatch)
    todo.lacking(0, [0b1, 0, 0b1], now=0.0)
    again = todo.next(0, now=1.0)
    assert again is not None and again.deepest == 2


def test_a_replay_is_not_repeated_while_it_runs(todo: WorkList) -> None:
    for work in start_all(todo):
        todo.finished(work.microbatch)
    todo.lacking(0, [0b1], now=0.0)
    assert numbers(start_all(todo, now=1.0)) == [0]
    todo.lacking(0, [0b1], now=2.0)
    assert start_all(todo, now=100.0) == []
    assert todo.next_wakeup(0, now=100.0) is None


def test_after_a_replay_it_must_be_lacking_for_a_while_once_more(todo: WorkList) -> None:
    for work in start_all(todo):
        todo.finished(work.microbatch)
    todo.lacking(0, [0b1], now=0.0)
    again = todo.next(0, now=1.0)
    assert again is not None
    todo.finished(again.microbatch)
    todo.lacking(0, [0b1], now=1.2)
    assert todo.next(0, now=1.5) is None
    assert todo.next(0, now=1.2 + REPLAY_AFTER_S) is not None


def test_one_that_is_no_longer_lacking_starts_its_time_afresh(todo: WorkList) -> None:
    for work in start_all(todo):
        todo.finished(work.microbatch)
    todo.lacking(0, [0b1], now=0.0)
    todo.lacking(0, [0], now=0.3)
    assert todo.next_wakeup(0, now=0.3) is None
    todo.lacking(0, [0b1], now=0.6)
    assert todo.next(0, now=0.6) is None
    assert todo.next(0, now=0.6 + LOST_AFTER_S) is not None


def test_one_claimed_by_a_trainer_that_died_is_started_after_a_while(todo: WorkList) -> None:
    todo.lacking(0, [0, 0], now=0.0)
    assert start_all(todo) == []
    todo.lacking(0, [0b1, 0b1], now=1.0)
    start_all(todo, now=1.0)  # as soon as nobody claims it, it is as good as new
    todo.failed(Microbatch(0, 0))
    again = todo.next(0, now=1.0 + REPLAY_AFTER_S)
    assert again is not None and again.microbatch == Microbatch(0, 0)
    assert again.deepest == -1 and not again.replay


def test_steps_that_are_over_are_forgotten(todo: WorkList) -> None:
    start_all(todo)
    todo.stepped(1)
    todo.failed(Microbatch(0, 1))
    todo.finished(Microbatch(0, 2))
    todo.lacking(0, [ALL], now=0.0)
    assert start_all(todo, 0) == []
    assert numbers(start_all(todo, 1)) == [2, 0, 3, 1]
    todo.stepped(0)
    assert todo.next(0, now=9.0) is None, "the swarm does not go back because of late news"


def test_the_oldest_step_goes_first(todo: WorkList) -> None:
    start_all(todo, 1)
    todo.failed(Microbatch(1, 0))
    todo.failed(Microbatch(0, 1))
    first = todo.next(1, now=0.0)
    assert first is not None and first.microbatch == Microbatch(0, 1)


def test_news_of_no_stage_at_all_are_no_news(todo: WorkList) -> None:
    todo.lacking(0, [], now=0.0)
    assert numbers(start_all(todo)) == [2, 0, 3, 1]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["start", "finish", "fail", "lack"]), st.integers(0, M - 1), st.integers(0, ALL)
        )
    )
)
def test_nothing_runs_twice_at_once_and_what_is_lacking_is_run_in_the_end(
    actions: list[tuple[str, int, int]],
) -> None:
    todo, running, now = WorkList(lambda t: range(M)), set(), 0.0
    for action, m, bitmap in actions:
        now += 0.1
        if action == "start" and (work := todo.next(0, now=now)) is not None:
            assert work.microbatch.m not in running
            running.add(work.microbatch.m)
        elif action == "finish" and m in running:
            running.discard(m)
            todo.finished(Microbatch(0, m))
        elif action == "fail" and m in running:
            running.discard(m)
            todo.failed(Microbatch(0, m))
        elif action == "lack":
            todo.lacking(0, [bitmap, bitmap], now=now)
    for m in list(running):
        todo.failed(Microbatch(0, m))
    todo.lacking(0, [ALL, ALL], now=now + 1.0)
    assert sorted(numbers(start_all(todo, now=now + 2.0))) == list(range(M))


def test_what_nobody_started_is_counted_and_what_this_trainer_ran() -> None:
    todo = WorkList(lambda t: range(8))
    assert todo.unstarted(0) == 8
    first = todo.next(0, now=0.0)
    assert first is not None
    assert todo.unstarted(0) == 7
    todo.finished(first.microbatch)
    todo.lacking(0, [0b11110000, 0, 0], now=0.0)  # others have the first four
    assert todo.unstarted(0) == 4
    assert todo.ran(0) == 1
    todo.stepped(1)
    assert (todo.ran(0), todo.unstarted(1)) == (0, 8)
