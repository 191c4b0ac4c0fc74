"""Samples and orders are functions of names alone."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.data import (
    CHUNK_TOKENS,
    POOL_CHUNKS,
    _window,
    permuted,
    sample_offsets,
    token_dtype,
    trainer_order,
)
from swarm.errors import SetupError
from swarm.manifest import Run, audit_run, demo_run, parse_run, pin
from tests.seeds import some

PINNED = pin(demo_run(), "ab" * 32, 500_000)


def test_the_samples_of_a_microbatch_never_change_between_machines_and_versions() -> None:
    # Numbers written down: a change of this stream changes every run that was ever published.
    assert [sample_offsets(audit_run(), 0, m) for m in range(4)] == [[3420], [2452], [3908], [3356]]
    assert sample_offsets(audit_run(), 1, 0) == [1060]
    large = pin(audit_run(), "ab" * 32, 10**12)
    assert [sample_offsets(large, 10**9, m) for m in range(2)] == [[273310603308], [939842321460]]
    assert trainer_order("run", 3, "alice", 8) == [0, 2, 1, 5, 6, 7, 4, 3]


@given(
    t=st.integers(0, 10**9), m=st.integers(0, 65_535), tokens=st.integers(130, 2**48), size=st.integers(1, 64)
)
def test_every_sample_lies_inside_the_tokens(t: int, m: int, tokens: int, size: int) -> None:
    run = _sized(pin(PINNED, "ab" * 32, tokens), size)
    offsets = sample_offsets(run, t, m)
    assert len(offsets) == size
    assert all(offset >= 0 and offset + run.data.sequence_length + 1 <= tokens for offset in offsets)


@given(name=st.text(max_size=9), count=st.integers(1, 3000))
def test_a_permutation_takes_each_place_to_another(name: str, count: int) -> None:
    assert sorted(permuted(name, place, count) for place in range(count)) == list(range(count))


@given(name=st.text(max_size=9), count=st.integers(1, 2**60), place=st.integers(0, 2**60))
def test_a_permutation_of_any_size_stays_inside(name: str, count: int, place: int) -> None:
    assert 0 <= permuted(name, place % count, count) < count


@pytest.mark.parametrize("count", some([3, 10, 300], quick=[3, 10]))
def test_a_permutation_is_uniform(count: int) -> None:
    """Where its first place goes, and how far from there its second: chi-squared below its 99.99 %."""
    rounds = 100 * count
    ends = [(permuted(f"{n}", 0, count), permuted(f"{n}", 1, count)) for n in range(rounds)]
    for found in (Counter(a for a, _ in ends), Counter((b - a) % count for a, b in ends)):
        expected = rounds / len(found)
        assert len(found) >= count - 1
        excess = sum((n - expected) ** 2 / expected for n in found.values()) - len(found)
        assert excess < 4 * (2 * len(found)) ** 0.5 + 12, found


@given(windows=st.integers(1, 3000), chunk=st.integers(1, 30))
def test_chunks_and_pools_have_each_window_once(windows: int, chunk: int) -> None:
    order = [_window("1 2", place, windows, chunk) for place in range(windows)]
    assert sorted(order) == list(range(windows))
    pool = {window // chunk for window in order[: POOL_CHUNKS * chunk]}
    assert len(pool) <= POOL_CHUNKS + 1, "windows of a pool are near to each other"


@given(tokens=st.integers(10, 900), length=st.integers(1, 9), seed=st.integers(0, 9), warm=st.integers(0, 12))
def test_an_epoch_has_each_window_once(tokens: int, length: int, seed: int, warm: int) -> None:
    """With a batch warm-up of some steps, too."""
    batch = replace(PINNED.batch, warmup_steps=warm, warmup_microbatches=min(warm, 1))
    data = replace(PINNED.data, tokens=tokens, sequence_length=length)
    run = replace(PINNED, seed=seed, data=data, batch=batch)
    windows, left = divmod(tokens - 1, length)
    offsets = list(itertools.islice(drawn(run), 2 * windows))
    for epoch in (offsets[:windows], offsets[windows:]):
        start = min(epoch)
        assert start <= left and sorted(epoch) == list(range(start, start + windows * length, length))


def drawn(run: Run) -> Iterator[int]:
    """The offsets of all samples of a run, in order."""
    for t in itertools.count():
        for m in range(run.microbatches(t)):
            yield from sample_offsets(run, t, m)


@given(
    weights=st.lists(st.integers(1, 12), min_size=2, max_size=5),
    windows=st.lists(st.integers(1, 30), min_size=5, max_size=5),
    seed=st.integers(0, 9),
)
def test_a_mixture_has_exactly_the_weight_of_each_source(
    weights: list[int], windows: list[int], seed: int
) -> None:
    length = 7
    sources = [(weight, 1 + length * count) for weight, count in zip(weights, windows, strict=False)]
    run = replace(mixed(sources, length), seed=seed)
    starts = list(itertools.accumulate((tokens for _, tokens in sources), initial=0))
    turn, turns = sum(weights), 7
    offsets = list(itertools.islice(drawn(run), turns * turn))
    for first in range(0, len(offsets), turn):
        of = Counter(bisect_right(starts, offset) - 1 for offset in offsets[first : first + turn])
        assert [of[number] for number in range(len(weights))] == weights
    for start, count, (weight, tokens) in zip(starts, windows, sources, strict=False):
        own = Counter(offset for offset in offsets if start <= offset < start + tokens)
        epochs, more = divmod(turns * weight, count)
        assert sorted(own.values()) == [epochs] * (count - more) * (epochs > 0) + [epochs + 1] * more
        assert all(offset + length < start + tokens for offset in own), "no sample has tokens of two sources"


def mixed(sources: list[tuple[int, int]], length: int = 7) -> Run:
    mixture = " ".join(f"{weight}*{tokens}" for weight, tokens in sources)
    tokens = sum(tokens for _, tokens in sources)
    data = replace(PINNED.data, source="files", tokens=tokens, sequence_length=length, mixture=mixture)
    return replace(PINNED, data=data)


def test_turns_of_a_mixture_differ_and_so_do_its_sources() -> None:
    run = mixed([(6, 701), (6, 701)])
    offsets = list(itertools.islice(drawn(run), 24))
    first, second = ([offset < 701 for offset in turn] for turn in (offsets[:12], offsets[12:]))
    assert first != second and sum(first) == sum(second) == 6
    assert [o for o in offsets if o < 701] != [o - 701 for o in offsets if o >= 701]


@pytest.mark.parametrize(
    "wrong", ["7*", "0*5000", "7*5000 3*01", "7*5000  3*5000", "7*5000 3*4999", "9*9993 1*7", " 7*10000"]
)
def test_a_mixture_that_cannot_be_is_refused(wrong: str) -> None:
    good = mixed([(7, 5000), (3, 5000)])
    assert parse_run(good.to_toml()) == good
    with pytest.raises(SetupError, match=r"data\.mixture = .* it must be "):
        replace(good, data=replace(good.data, mixture=wrong))


def test_epochs_differ_in_their_order_and_in_what_is_left_over() -> None:
    run = replace(PINNED, data=replace(PINNED.data, tokens=1 + 128 * 40 + 100))
    offsets = list(itertools.islice(drawn(run), 400))
    epochs = [offsets[start : start + 40] for start in range(0, 400, 40)]
    assert len({min(epoch) for epoch in epochs}) > 5
    assert len({tuple(offset - min(epoch) for offset in epoch) for epoch in epochs}) == 10


def test_samples_are_spread_evenly_over_what_one_pool_holds() -> None:
    run = _sized(pin(PINNED, "ab" * 32, 10**12), 4000)
    offsets = sample_offsets(run, 5, 6)
    chunks = Counter(offset // CHUNK_TOKENS for offset in offsets)
    assert len(chunks) <= 2 * POOL_CHUNKS, "who fetches them needs little at a time"
    counts = [sum(1 for offset in offsets if offset * 10 // 10**12 == tenth) for tenth in range(10)]
    assert all(80 < count < 900 for count in counts), counts


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
