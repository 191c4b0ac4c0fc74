"""What counts, once each."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import Refused
from swarm.protocol.ledger import (
    MAX_MICROBATCHES,
    Bitmap,
    Claim,
    Ledger,
    check_bitmap,
    everything,
    members_of,
)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(t=3, microbatches=5)


def test_a_microbatch_is_claimed_once_then_being_done_then_done(ledger: Ledger) -> None:
    assert ledger.claim(2) is Claim.NEW
    assert ledger.claim(2) is Claim.DOING
    ledger.record(2)
    assert ledger.claim(2) is Claim.DONE
    ledger.release(2)
    assert ledger.claim(2) is Claim.DONE
    assert (ledger.done, ledger.in_progress) == (0b100, 0)


def test_one_whose_computation_failed_may_be_claimed_again(ledger: Ledger) -> None:
    ledger.claim(0)
    ledger.release(0)
    assert ledger.claim(0) is Claim.NEW


@pytest.mark.parametrize("m", [-1, 5, 1000])
def test_a_microbatch_outside_the_step_cannot_be_claimed(ledger: Ledger, m: int) -> None:
    with pytest.raises(ValueError, match=f"microbatch {m} is not in 0 … 4"):
        ledger.claim(m)
    assert ledger.in_progress == 0


def test_counting_twice_is_a_bug_of_ours_and_stops_us(ledger: Ledger) -> None:
    ledger.record(1)
    assert not ledger.may_add(1)
    with pytest.raises(AssertionError, match="microbatch 1 of step 3 would count twice"):
        ledger.record(1)


def test_nothing_enters_or_leaves_a_sum_that_is_promised_to_a_round(ledger: Ledger) -> None:
    ledger.record(1)
    ledger.freeze("round")
    assert not ledger.may_add(0)
    with pytest.raises(AssertionError):
        ledger.record(0)
    with pytest.raises(AssertionError):
        ledger.remove(1)
    ledger.thaw()
    assert ledger.may_add(0)
    ledger.remove(1)
    assert ledger.done == 0


def test_what_is_not_in_the_sum_cannot_be_taken_out(ledger: Ledger) -> None:
    with pytest.raises(AssertionError):
        ledger.remove(4)


def test_a_microbatch_that_was_taken_out_may_enter_again(ledger: Ledger) -> None:
    ledger.record(1)
    ledger.remove(1)
    assert ledger.claim(1) is Claim.NEW
    ledger.record(1)
    assert ledger.done == 0b10


def test_those_that_enter_again_are_counted_and_no_others(ledger: Ledger) -> None:
    ledger.record(0)
    ledger.record(1)
    ledger.remove(1)
    ledger.record(2)
    assert ledger.returned == 0
    for returned in (1, 2):
        ledger.record(1)
        assert ledger.returned == returned
        ledger.remove(1)


def test_a_dropped_sum_takes_its_ledger_and_its_promise_with_it_but_not_what_is_running(
    ledger: Ledger,
) -> None:
    ledger.record(1)
    ledger.claim(2)
    ledger.freeze("round")
    ledger.clear()
    assert (ledger.done, ledger.in_progress, ledger.frozen_for) == (0, 0b100, None)


@given(st.data(), st.integers(1, 70))
def test_a_bitmap_survives_the_wire(data: st.DataObject, microbatches: int) -> None:
    bitmap = data.draw(st.integers(0, everything(microbatches)))
    assert Bitmap.unpacked(Bitmap(bitmap).packed()) == bitmap
    assert sum(1 << m for m in members_of(bitmap)) == bitmap
    assert list(members_of(bitmap)) == sorted(members_of(bitmap))


def test_everything_is_all_microbatches() -> None:
    assert list(members_of(everything(5))) == [0, 1, 2, 3, 4]
    assert everything(0) == 0


def test_a_bitmap_with_a_bit_beyond_the_step_is_refused() -> None:
    with pytest.raises(Refused, match="the ledger names a microbatch beyond 8"):
        check_bitmap(1 << 9, 9)
    check_bitmap(1 << 8, 9)


@given(st.lists(st.integers(1, 300), max_size=60))
def test_a_bitmap_is_said_in_runs_where_that_is_shorter(lengths: list[int]) -> None:
    bits = "".join("01"[at & 1] * length for at, length in enumerate(lengths))[:MAX_MICROBATCHES]
    bitmap = Bitmap(int(bits[::-1] or "0", 2))
    assert Bitmap.unpacked(bitmap.packed()) == bitmap
    assert len(bitmap.packed()) <= 1 + min(
        (bitmap.bit_length() + 7) // 8, 4 * (bitmap & ~(bitmap << 1)).bit_count()
    )


def test_all_of_a_step_and_one_microbatch_of_it_are_said_in_a_few_bytes() -> None:
    assert [len(Bitmap(b).packed()) for b in (0, 1, everything(8192), 1 << 8191)] == [0, 2, 4, 4]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\2", "a bitmap of an unknown form, 2"),
        (b"\0" + bytes(1025), "a bitmap of 8200 microbatches; a step has up to 8192"),
        (b"\1\x80\x80\x80\x01\1", "a bitmap with an impossible run"),
        (b"\1\x01", "a bitmap whose runs are not of a step of at most 8192 microbatches"),
        (b"\1\x01\x81", "a bitmap whose runs are not of a step of at most 8192 microbatches"),
        (b"\1\x01\x01\x00\x01", "a bitmap whose runs are not of a step of at most 8192 microbatches"),
        (b"\1\x01\x80\x40", "a bitmap whose runs are not of a step of at most 8192 microbatches"),
    ],
)
def test_a_bitmap_that_no_step_has_is_not_read(data: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        Bitmap.unpacked(data)


@pytest.mark.parametrize("data", [None, 7, "3"])
def test_a_bitmap_travels_as_bytes(data: object) -> None:
    with pytest.raises(ValueError, match="a bitmap is bytes"):
        Bitmap.unpacked(data)


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "freeze", "thaw", "clear"]), st.integers(0, 4))))
def test_whatever_is_done_in_whatever_order_each_microbatch_counts_at_most_once(
    actions: list[tuple[str, int]],
) -> None:
    ledger, counted = Ledger(0, 5), [0] * 5
    for action, m in actions:
        if action == "add" and ledger.claim(m) is Claim.NEW:
            if ledger.may_add(m):
                counted[m] += 1
                ledger.record(m)
            ledger.release(m)
        elif action == "remove" and ledger.frozen_for is None and ledger.done >> m & 1:
            counted[m] -= 1
            ledger.remove(m)
        elif action == "freeze":
            ledger.freeze(f"round {m}")
        elif action == "thaw":
            ledger.thaw()
        elif action == "clear":
            counted = [0] * 5
            ledger.clear()
        assert counted == [ledger.done >> i & 1 for i in range(5)]
