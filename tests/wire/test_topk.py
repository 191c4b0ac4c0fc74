"""Top-k: what is kept, in how many bytes, and what a stranger cannot do with it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.codecs import PPM, Codec
from swarm.errors import Refused
from swarm.wire.codec import decode, encode, round_trip
from swarm.wire.tensor_meta import TensorMeta, encoded_sizes, index_layout, kept_of, row_length
from swarm.wire.topk import largest, pack_places, unpack_places

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def expected(x: torch.Tensor, keep_ppm: int) -> torch.Tensor:
    """By the definition: of each row the largest magnitudes, of equal ones the first."""
    rows, keep = kept_of(tuple(x.shape), keep_ppm)
    result = torch.zeros_like(x).view(rows, -1)
    for row, numbers in enumerate(x.reshape(rows, -1)):
        order = sorted(range(len(numbers)), key=lambda i: (-abs(numbers[i].item()), i))[:keep]
        result[row, order] = numbers[order]
    return result.view(x.shape)


# --- what is kept


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ratio", ["0.01", "0.05", "0.25", "0.6", "0.999999"])
@pytest.mark.parametrize("shape", [(3, 5, 300), (2, 4, 8, 40), (1,), (7,), (2, 3), (257,), (70_000,)])
def test_the_largest_of_each_row_come_back_as_they_were_and_zeros(
    shape: tuple[int, ...], ratio: str, dtype: torch.dtype
) -> None:
    x = normal(*shape, dtype=dtype)
    kept = round_trip(x, f"topk:{ratio}")
    if x.numel() < 10_000:
        assert torch.equal(kept, expected(x, round(float(ratio) * PPM)))
    rows, keep = kept_of(shape, round(float(ratio) * PPM))
    by_row, all_of_row = kept.view(rows, -1), x.view(rows, -1)
    assert (by_row != 0).sum(1).tolist() == [keep] * rows
    dropped = torch.where(by_row == 0, all_of_row, 0).abs().amax(1)
    assert (dropped <= torch.where(by_row == 0, math.inf, by_row.abs()).amin(1)).all()


@given(
    numbers=st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 1e-40]), min_size=1, max_size=60),
    keep_ppm=st.integers(1, PPM - 1),
)
def test_of_equal_magnitudes_the_first_are_kept(numbers: list[float], keep_ppm: int) -> None:
    x = torch.tensor(numbers)
    assert torch.equal(round_trip(x, Codec(keep_ppm, "none").name), expected(x, keep_ppm))


def test_ties_in_some_rows_leave_the_others_alone() -> None:
    x = normal(600, 256)
    x[::3] = 0.5
    x[5, 100:] = 7.0
    assert torch.equal(round_trip(x, "topk:0.1"), expected(x, 100_000))


def test_a_token_keeps_what_it_keeps_whatever_comes_after_it() -> None:
    x = normal(2, 6, 256)
    changed = x.clone()
    changed[:, 3:] *= 1000
    a, b = round_trip(x, "topk:0.05"), round_trip(changed, "topk:0.05")
    assert torch.equal(a[:, :3], b[:, :3]) and not torch.equal(a[:, 3:], b[:, 3:])


@pytest.mark.parametrize(
    ("shape", "length"),
    [((2, 8, 512), 512), ((2, 8, 256), 256), ((2, 8, 64), 512), ((4, 16), 64), ((), 1), ((0,), 0)],
)
def test_a_row_is_the_shortest_tail_of_the_shape_that_is_long_enough(
    shape: tuple[int, ...], length: int
) -> None:
    assert row_length(shape) == length


@pytest.mark.parametrize("values", ["bf16", "blockwise8"])
def test_the_kept_values_have_the_precision_of_their_codec(values: str) -> None:
    x = normal(8, 1024)
    kept = round_trip(x, "topk:0.1")
    both = round_trip(x, f"topk:0.1+{values}")
    assert torch.equal(both != 0, kept != 0)
    assert torch.equal(both[kept != 0], round_trip(x[kept != 0], values))


# --- in how many bytes


@given(
    shape=st.lists(st.integers(0, 40), max_size=3).map(tuple),
    keep_ppm=st.integers(1, PPM - 1),
    values=st.sampled_from(["none", "bf16", "blockwise8"]),
)
def test_the_bytes_are_those_of_the_formula_places_included(
    shape: tuple[int, ...], keep_ppm: int, values: str
) -> None:
    encoded = encode(normal(*shape), Codec(keep_ppm, values).name)
    assert [memoryview(buffer).nbytes for buffer in encoded.buffers] == encoded_sizes(encoded.meta)
    rows, keep = kept_of(shape, keep_ppm)
    assert encoded_sizes(encoded.meta)[1:] == encoded_sizes(TensorMeta((rows * keep,), "float32", values))


@pytest.mark.parametrize(("kept", "bits"), [(0.01, 8.57), (0.05, 6.25), (0.1, 5.25), (0.25, 4.0), (0.5, 2.0)])
def test_a_place_takes_at_most_half_a_bit_more_than_it_must(kept: float, bits: float) -> None:
    numel = 1 << 20
    count = round(numel * kept)
    took = 8 * index_layout(numel, count).nbytes / count
    least = (math.lgamma(numel + 1) - math.lgamma(count + 1) - math.lgamma(numel - count + 1)) / math.log(2)
    assert took == pytest.approx(bits, abs=0.01)
    assert took - least / count < (0.6 if kept < 0.2 else 0.8)


@given(numel=st.integers(1, 1 << 36), data=st.data())
def test_the_places_never_take_more_than_a_bitmap_and_little_more_than_the_best_code(
    numel: int, data: st.DataObject
) -> None:
    kept = data.draw(st.integers(0, numel))
    layout = index_layout(numel, kept)
    assert layout.nbytes <= -(-numel // 8)
    assert layout.nbytes == -(-layout.unary_bits // 8) + layout.low * -(-kept // 8)
    assert layout.nbytes <= kept * (2 + math.log2(numel / max(1, kept))) / 8 + 8 + layout.low


def test_of_codes_of_equal_size_that_with_the_fewest_low_bits_is_the_format() -> None:
    """A quarter of a million: a bitmap, 1 and 2 low bits take 131 072 bytes each."""
    assert index_layout(1 << 20, 1 << 18) == (0, 1 << 20, 1 << 17)
    assert index_layout(1 << 20, 1 << 17).low == 2


@given(data=st.data())
def test_places_come_back(data: st.DataObject) -> None:
    rows, length = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 300))
    keep = data.draw(st.integers(1, length))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    by_row = [np.sort(rng.choice(length, keep, replace=False)) + row * length for row in range(rows)]
    places = np.concatenate(by_row)
    packed = pack_places(places, rows * length)
    assert len(packed) == index_layout(rows * length, rows * keep).nbytes
    assert unpack_places(memoryview(packed), rows * length, rows, keep, name="x").tolist() == places.tolist()


def test_rows_of_many_slices_are_picked_from_alike() -> None:
    bits = np.random.default_rng(1).integers(-(2**31), 2**31 - 1, (700, 300), dtype=np.int32)
    whole = np.concatenate([largest(row[None], 7) + 300 * number for number, row in enumerate(bits)])
    assert largest(bits, 7).tolist() == whole.tolist()


# --- what is refused


def packed(places: list[int], numel: int) -> bytes:
    return pack_places(np.array(places, dtype=np.int64), numel)


def refuse(index: bytes, text: str, *, shape: tuple[int, ...] = (1000,), codec: str = "topk:0.003") -> None:
    meta = TensorMeta(shape, "float32", codec)
    sizes = encoded_sizes(meta)
    assert len(index) == sizes[0], "of the right size, or that is what would be refused"
    with pytest.raises(Refused, match=text):
        decode(meta, [index, *(bytes(size) for size in sizes[1:])], name="hidden")


def test_places_that_no_honest_peer_sends_are_refused() -> None:
    good = packed([3, 500, 999], 1000)
    decode(TensorMeta((1000,), "float32", "topk:0.003"), [good, bytes(12)])
    layout = index_layout(1000, 3)
    unary = -(-layout.unary_bits // 8)
    refuse(bytes(unary) + good[unary:], "hidden has 0 places; expected 3")
    refuse(b"\xff" + good[1:], "hidden has .* places; expected 3")
    # The same high part three times with the same low bits, and with falling ones.
    refuse(packed([8, 8, 8], 1000), "hidden has places that are not in order, or one twice")
    refuse(packed([8, 10, 9], 1000), "not in order")


def test_places_beyond_the_tensor_or_in_another_row_are_refused() -> None:
    # 1000 numbers leave room for places up to 1023 in the low bits of the last.
    refuse(packed([3, 500, 1001], 1000), "hidden has places outside of their rows")
    two_rows = {"shape": (2, 500), "codec": "topk:0.002"}
    decode(TensorMeta((2, 500), "float32", "topk:0.002"), [packed([7, 507], 1000), bytes(8)])
    refuse(packed([7, 8], 1000), "outside of their rows", **two_rows)
    refuse(packed([507, 508], 1000), "outside of their rows", **two_rows)


def test_a_bitmap_with_too_many_or_too_few_is_refused() -> None:
    shape, codec = (16,), "topk:0.5"
    decode(TensorMeta(shape, "float32", codec), [b"\xff\x00", bytes(32)])
    refuse(b"\xff\x01", "hidden has 9 places; expected 8", shape=shape, codec=codec)
    refuse(b"\xfe\x00", "hidden has 7 places; expected 8", shape=shape, codec=codec)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_kept_value_that_is_not_finite_is_refused(bad: float) -> None:
    meta, (index, _) = encode(normal(1000), "topk:0.003")
    with pytest.raises(Refused, match=r"^hidden is not finite$"):
        decode(meta, [index, torch.tensor([1.0, bad, 1.0]).numpy().data], name="hidden")


def test_a_scale_of_kept_values_that_is_impossible_is_refused() -> None:
    meta, (index, numbers, _) = encode(normal(1000), "topk:0.003+blockwise8")
    with pytest.raises(Refused, match="hidden has scales that are not finite"):
        decode(meta, [index, numbers, torch.tensor([math.nan]).numpy().data], name="hidden")


@given(index=st.binary(min_size=125, max_size=125), low=st.sampled_from([1, 2, 40, 80, 200, 400, 900]))
def test_whatever_is_sent_as_places_is_refused_or_is_what_was_asked_for(index: bytes, low: int) -> None:
    meta = TensorMeta((1000,), "float32", Codec(low * 1000, "none").name)
    sizes = encoded_sizes(meta)
    try:
        tensor = decode(meta, [index[: sizes[0]], torch.ones(low).numpy().data])
    except Refused:
        return
    assert (int((tensor != 0).sum()), float(tensor.sum())) == (low, low)
