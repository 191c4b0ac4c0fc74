"""Samples and orders are functions of names alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.data import sample_offsets, token_dtype, trainer_order
from swarm.errors import SetupError
from swarm.manifest import Run, audit_run, demo_run, pin

PINNED = pin(demo_run(), "ab" * 32, 500_000)


def test_the_samples_of_a_microbatch_never_change_between_machines_and_versions() -> None:
    # Numbers written down: a change of this stream changes every run that was ever published.
    assert sample_offsets(audit_run(), 0, 0) == [3531]
    assert sample_offsets(audit_run(), 0, 1) == [936]
    assert sample_offsets(audit_run(), 1, 0) == [1320]
    assert trainer_order("run", 3, "alice", 8) == [0, 2, 1, 5, 6, 7, 4, 3]


@given(
    t=st.integers(0, 10**9), m=st.integers(0, 65_535), tokens=st.integers(130, 2**48), size=st.integers(1, 64)
)
def test_every_sample_lies_inside_the_tokens(t: int, m: int, tokens: int, size: int) -> None:
    run = _sized(pin(PINNED, "ab" * 32, tokens), size)
    offsets = sample_offsets(run, t, m)
    assert len(offsets) == size
    assert all(offset >= 0 and offset + run.data.sequence_length + 1 <= tokens for offset in offsets)


def test_first_and_last_window_are_both_drawn_when_there_are_two() -> None:
    run = _sized(pin(PINNED, "ab" * 32, PINNED.data.sequence_length + 2), 64)
    assert set(sample_offsets(run, 0, 0)) == {0, 1}


def test_samples_are_spread_evenly() -> None:
    run = _sized(PINNED, 4000)
    offsets = sample_offsets(run, 5, 6)
    tenth = (run.data.tokens - run.data.sequence_length) / 10
    counts = [sum(1 for offset in offsets if int(offset / tenth) == i) for i in range(10)]
    assert all(320 < count < 480 for count in counts), counts  # 400 ± 4 standard deviations


def test_microbatches_steps_and_seeds_have_different_samples() -> None:
    drawn = [tuple(sample_offsets(PINNED, t, m)) for t in range(5) for m in range(5)]
    drawn.append(tuple(sample_offsets(replace(PINNED, seed=2), 0, 0)))
    assert len(set(drawn)) == 26


def test_what_does_not_concern_the_data_does_not_change_the_samples() -> None:
    other = replace(PINNED, name="other", model=replace(PINNED.model, layers=12))
    assert sample_offsets(other, 3, 4) == sample_offsets(PINNED, 3, 4)


def test_a_run_that_is_not_pinned_has_no_samples_and_says_so() -> None:
    with pytest.raises(SetupError, match=r"data\.tokens is not set .* pin the run"):
        sample_offsets(demo_run(), 0, 0)


@given(count=st.integers(1, 300), t=st.integers(0, 10**9), trainer=st.text(max_size=60))
def test_a_trainer_walks_every_microbatch_once(count: int, t: int, trainer: str) -> None:
    assert sorted(trainer_order("run", t, trainer, count)) == list(range(count))


def test_two_trainers_walk_differently_and_so_does_one_in_two_steps() -> None:
    orders = [trainer_order("run", t, who, 16) for who in ("alice", "bob") for t in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [(2, "uint8"), (256, "uint8"), (257, "uint16"), (65_536, "uint16"), (65_537, "uint32")],
)
def test_tokens_are_as_narrow_as_the_vocabulary_allows(vocab: int, dtype: str) -> None:
    assert token_dtype(vocab) == dtype


def _sized(run: Run, microbatch_size: int) -> Run:
    return replace(run, batch=replace(run.batch, microbatch_size=microbatch_size))
