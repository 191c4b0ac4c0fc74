"""Tensors to bytes and back: what comes back, what it costs, and what is refused."""

from __future__ import annotations

import hashlib
import math
import re

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.codecs import VALUES
from swarm.errors import Refused
from swarm.wire.codec import Encoded, bytes_of, decode, dynamic_code, encode, round_trip
from swarm.wire.hadamard import MAX_NUMBER, MAX_SCALE
from swarm.wire.tensor_meta import BLOCK, ITEM_BYTES, TensorMeta, encoded_sizes

CODECS = VALUES
SPARSE = (
    *("topk:0.01", "topk:0.3", "topk:0.05+bf16", "topk:0.999999+bf16", "topk:0.05+blockwise8"),
    "topk:0.05+hadamard4",
)
FLOATS = (torch.float32, torch.bfloat16, torch.float64)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sizes(tensor: torch.Tensor, codec: str) -> int:
    """Bytes that it takes, all buffers together."""
    return sum(encoded_sizes(encode(tensor, codec).meta))


def same(a: Encoded, b: Encoded) -> bool:
    return a.meta == b.meta and [bytes(x) for x in a.buffers] == [bytes(x) for x in b.buffers]


def test_the_sizes_of_numbers_are_those_of_torch() -> None:
    assert {name: getattr(torch, name).itemsize for name in ITEM_BYTES} == ITEM_BYTES


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("codec", CODECS)
def test_a_tensor_comes_back_with_its_shape_and_dtype_and_nearly_its_numbers(
    codec: str, dtype: torch.dtype
) -> None:
    x = normal(3, 100, 7, dtype=dtype)
    y = round_trip(x, codec)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    error = ((y - x).double().norm() / x.double().norm()).item()
    assert error <= {"none": 0.0, "bf16": 2e-3, "blockwise8": 1.3e-2, "hadamard4": 0.125}[codec]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.int64])
def test_whole_numbers_travel_exactly(dtype: torch.dtype) -> None:
    x = torch.tensor([[0, 1, 2], [200, 254, 255]]).to(dtype)
    y = round_trip(x, "none")
    assert y.dtype == dtype and y.tolist() == x.tolist()


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,), (BLOCK,), (BLOCK + 1,), (70_000,)])
@pytest.mark.parametrize("codec", CODECS[:3])
def test_any_shape_travels(codec: str, shape: tuple[int, ...]) -> None:
    x = torch.full(shape, 0.5)
    assert torch.equal(round_trip(x, codec), x)


@pytest.mark.parametrize("codec", (*CODECS, *SPARSE))
@given(numel=st.integers(0, 2000), dtype=st.sampled_from(["float32", "bfloat16", "float64"]))
def test_the_sizes_are_known_from_the_meta_alone(codec: str, numel: int, dtype: str) -> None:
    encoded = encode(torch.ones(numel, dtype=getattr(torch, dtype)), codec)
    assert encoded_sizes(encoded.meta) == [memoryview(b).nbytes for b in encoded.buffers]


def test_blockwise8_takes_a_quarter_of_the_bytes_and_the_scales() -> None:
    assert sizes(torch.ones(4, 512, 64), "blockwise8") == 4 * 512 * 64 * (1 + 4 / 256)


# --- hadamard4 ---------------------------------------------------------------------------------


def test_hadamard4_takes_half_a_byte_a_number_and_the_scales() -> None:
    assert sizes(torch.ones(4, 512, 64), "hadamard4") == 4 * 512 * 64 * (1 / 2 + 4 / BLOCK)
    assert sizes(torch.ones(3), "hadamard4") == BLOCK / 2 + 4, "whole blocks"


@pytest.mark.parametrize("place", [0, 77, 255])
def test_an_outlier_is_shared_by_its_block(place: int) -> None:
    """Fifteen steps to 20 would leave nothing of the others."""
    x = normal(BLOCK, seed=3)
    x[place] = 20.0
    assert (round_trip(x, "hadamard4") - x).square().mean().sqrt() < 0.2


@given(numel=st.integers(1, 700), seed=st.integers(0, 99))
def test_hadamard4_rounds_what_the_matrix_gives(numel: int, seed: int) -> None:
    x = normal(numel, seed=seed)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < BLOCK:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    blocks = torch.nn.functional.pad(x.double(), (0, -numel % BLOCK)).view(-1, BLOCK)
    rotated = blocks @ matrix / 16
    scales = rotated.abs().amax(1, keepdim=True)
    rounded = torch.round(rotated / scales * 7) / 7 * scales
    expected = (rounded @ matrix / 16).view(-1)[:numel]
    # A number in the middle between two steps may go to either.
    off = (round_trip(x, "hadamard4").double() - expected).abs().max()
    assert off < 1e-5 or off < scales.max() / 7 / 16 * 1.01


def test_hadamard4_gives_these_bytes() -> None:
    """On every device. A change here changes every run that has it."""
    digest = hashlib.sha256()
    for buffer in encode(((torch.arange(1000) * 7919) % 1013 - 500) / 64, "hadamard4").buffers:
        digest.update(buffer)
    assert digest.hexdigest()[:16] == "34f6d02a23353872"


def test_a_meta_survives_msgpack() -> None:
    meta = TensorMeta((2, 3), "bfloat16", "blockwise8")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(meta), type=TensorMeta) == meta


# --- blockwise8 is bitsandbytes' ---------------------------------------------------------------


@pytest.mark.slow  # its import takes seconds
def test_the_codes_are_those_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    assert torch.equal(dynamic_code(), functional.create_dynamic_map())


def odd_tensors() -> dict[str, torch.Tensor]:
    steps = (torch.arange(1 << 16).double() * 2 / 65535 - 1).float()
    x = normal(300_000)
    return {
        "normal": x,
        "heavy tails": x**5,
        "mostly small": x * torch.rand(x.shape, generator=torch.Generator().manual_seed(2)) ** 8,
        "not whole blocks": x[: 3 * BLOCK + 77],
        "one": torch.tensor([-3.5]),
        "zeros": torch.zeros(1000),
        "zeros and others": torch.cat([torch.zeros(BLOCK), x[:BLOCK], torch.zeros(3)]),
        "denormal": x[:1000] * 1e-39,
        "inverse overflows": x[:1000] * 2.9e-39,
        "huge": x[:1000] * 5e37,
        # every step of the table, its neighbours, and a 1 in every block so that nothing is scaled
        "steps": torch.cat(
            [
                torch.cat([part, torch.ones(1)])
                for s in (0.0, 1e-6, -1e-6)
                for part in (steps + s).clamp(-1, 1).split(255)
            ]
        ),
    }


def test_blockwise8_gives_the_bits_that_it_gave_when_it_was_compared_with_bitsandbytes() -> None:
    digest = hashlib.sha256(bytes_of(dynamic_code()))
    for buffer in encode(odd_tensors()["steps"], "blockwise8").buffers:
        digest.update(buffer)
    assert digest.hexdigest() == "b0f8bcccd8f26b7469ad0bc9f7a0a4cba6a6788bc44a0d8894a88d4fd86a235c"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", odd_tensors())
def test_blockwise8_gives_the_bits_of_bitsandbytes(name: str, dtype: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    x = odd_tensors()[name].to(dtype)
    quantized, state = functional.quantize_blockwise(x, blocksize=BLOCK)
    encoded = encode(x, "blockwise8")
    assert bytes(encoded.buffers[0]) == bytes(quantized.numpy().data)
    assert bytes(encoded.buffers[1]) == bytes(state.absmax.numpy().data)
    assert torch.equal(decode(*encoded), functional.dequantize_blockwise(quantized, state))


def test_the_step_of_a_number_needs_no_fused_multiply_add() -> None:
    """At every boundary between two of the 65536 steps, for 40 floats on each side of it."""
    boundary = ((torch.arange(1, 1 << 16).double() - 0.5) / 32767.5).float().view(torch.int32)
    for away in range(-40, 41):
        w = (boundary + away).view(torch.float32)
        fused = (w.double() * 32767.5 + 0.5).float().int()  # exact in float64, then rounded once
        assert torch.equal((w * -0.5 + 0.5 + w * 32768).int(), fused)


@pytest.mark.parametrize("codec", (*CODECS, *SPARSE))
def test_the_same_tensor_gives_the_same_bytes_whatever_its_strides_and_the_threads(codec: str) -> None:
    x = normal(300, 400)
    before = torch.get_num_threads()
    encodings = [encode(x, codec), encode(x.t().contiguous().t(), codec)]
    try:
        torch.set_num_threads(2)
        encodings.append(encode(x, codec))
    finally:
        torch.set_num_threads(before)
    assert same(encodings[0], encodings[1]) and same(encodings[0], encodings[2])


def test_what_is_decoded_from_blockwise8_is_not_the_buffers() -> None:
    meta, buffers = encode(normal(1000), "blockwise8")
    copy = [bytearray(b) for b in buffers]
    decode(meta, copy).zero_()
    assert [bytes(b) for b in copy] == [bytes(b) for b in buffers]


@pytest.mark.parametrize("codec", (*CODECS, *SPARSE))
def test_buffers_may_be_read_only_or_misaligned(codec: str) -> None:
    x = normal(100)
    meta, buffers = encode(x, codec)
    expected = round_trip(x, codec)
    frozen = decode(meta, [bytes(b) for b in buffers])
    shifted = decode(meta, [memoryview(bytearray(b"x" + bytes(b)))[1:] for b in buffers])
    assert torch.equal(frozen, expected) and torch.equal(shifted, expected)


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("codec", (*CODECS, *SPARSE))
@pytest.mark.parametrize("place", [0, 300, 599])
def test_a_number_that_is_not_finite_is_not_sent(
    codec: str, bad: float, dtype: torch.dtype, place: int
) -> None:
    x = normal(600, dtype=dtype)
    x[place] = bad
    with pytest.raises(Refused, match=r"^the output is not finite$"):
        encode(x, codec, name="the output")


@pytest.mark.parametrize("codec", ["bf16", "blockwise8", "hadamard4", "topk:0.5+bf16", "topk:0.5+blockwise8"])
def test_a_number_that_is_too_large_for_the_codec_is_not_sent(codec: str) -> None:
    with pytest.raises(Refused, match="not finite"):
        encode(torch.tensor([1e300], dtype=torch.float64), codec)
    with pytest.raises(Refused, match="not finite"):
        encode(torch.tensor([torch.finfo(torch.float32).max]), "bf16")


@pytest.mark.parametrize("codec", ["none", "bf16"])
def test_a_number_that_is_not_finite_is_not_taken(codec: str) -> None:
    meta, buffers = encode(torch.ones(10), codec)
    ones = bytes(memoryview(buffers[0]))
    nan = b"\xff\xff" if codec == "bf16" else b"\xff\xff\xff\xff"
    with pytest.raises(Refused, match="hidden is not finite"):
        decode(meta, [ones[: -len(nan)] + nan], name="hidden")


@pytest.mark.parametrize("codec", ["bf16", "topk:0.5+bf16"])
def test_a_number_that_float16_cannot_hold_is_not_taken(codec: str) -> None:
    """It was finite as it came, and infinite as it was taken."""
    meta, buffers = encode(torch.full((10,), 1e30, dtype=torch.bfloat16), codec)
    assert decode(meta, buffers).isfinite().all()
    with pytest.raises(Refused, match="hidden is not finite"):
        decode(TensorMeta((10,), "float16", codec), buffers, name="hidden")


@pytest.mark.parametrize("codec", ["blockwise8", "hadamard4"])
@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0])
def test_a_scale_that_is_impossible_is_not_taken(codec: str, scale: float) -> None:
    meta, buffers = encode(normal(600), codec)
    scales = torch.tensor([1.0, scale, 1.0])
    with pytest.raises(Refused, match="hidden has scales that are not finite"):
        decode(meta, [buffers[0], scales.numpy().data], name="hidden")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_no_bytes_make_a_number_of_hadamard4_that_is_not_finite(dtype: str) -> None:
    meta, worst = TensorMeta((BLOCK,), dtype, "hadamard4"), bytes(BLOCK // 2)
    most = torch.tensor([MAX_SCALE])
    assert decode(meta, [worst, most.numpy().data]).isfinite().all()
    with pytest.raises(Refused, match="scales that are not finite"):
        decode(meta, [worst, (most * 1.01).numpy().data])
    largest = torch.full((BLOCK,), MAX_NUMBER * 0.99, dtype=getattr(torch, dtype))
    assert torch.equal(round_trip(largest, "hadamard4").sign(), largest.sign())


def test_a_scale_that_bfloat16_cannot_hold_is_not_taken() -> None:
    _, buffers = encode(torch.full((10,), 3.4e38), "blockwise8")
    with pytest.raises(Refused, match="not finite"):
        decode(TensorMeta((10,), "bfloat16", "blockwise8"), buffers)


def test_what_is_not_expected_is_refused_by_name() -> None:
    meta, buffers = encode(torch.ones(2, 3), "bf16")
    for other in ({"shape": (3, 2)}, {"dtype": "bfloat16"}, {"codec": "none"}):
        expected = msgspec.structs.replace(meta, **other)
        with pytest.raises(Refused, match=re.escape(f"hidden is {meta.words}; expected {expected.words}")):
            decode(meta, buffers, expected=expected, name="hidden")
    assert meta.words == "float32[2, 3] as bf16"
    with pytest.raises(Refused, match=r"hidden came in buffers of \[11\] bytes; expected \[12\]"):
        decode(meta, [bytes(11)], name="hidden")
    with pytest.raises(Refused, match=r"hidden came in buffers of \[\] bytes; expected \[12\]"):
        decode(meta, [], name="hidden")


@pytest.mark.parametrize(
    ("meta", "text"),
    [
        (TensorMeta((1,), "complex64", "none"), "unknown dtype 'complex64'; known are float32"),
        (
            TensorMeta((1,), "float32", "zip"),
            "unknown codec 'zip'; known are none, bf16, blockwise8, hadamard4, topk:R",
        ),
        (TensorMeta((1,) * 9, "float32", "none"), "a tensor of 9 dimensions; at most 8 are allowed"),
        (TensorMeta((-1,), "float32", "none"), "impossible size -1 in the shape of a tensor"),
        (TensorMeta((1 << 90,), "float32", "none"), "impossible size"),
        (TensorMeta((1 << 30,) * 8, "uint8", "none"), "a tensor of .* bytes; at most"),
        (TensorMeta((0, 589, 5287, 34954, 84736055), "float32", "none"), "a tensor of .* bytes; at most"),
        (TensorMeta((1,), "int64", "bf16"), "codec bf16 does not carry int64"),
        (TensorMeta((1,), "uint8", "blockwise8"), "codec blockwise8 does not carry uint8"),
        (TensorMeta((1,), "float16", "blockwise8"), "codec blockwise8 does not carry float16"),
        (TensorMeta((1,), "float16", "hadamard4"), "codec hadamard4 does not carry float16"),
        (TensorMeta((1,), "int64", "topk:0.5"), "codec topk:0.5 does not carry int64"),
        (TensorMeta((1,), "float16", "topk:0.5+blockwise8"), "codec topk:.* does not carry float16"),
        (TensorMeta((1,), "float32", "topk:0.50"), "unknown codec 'topk:0.50'; known are none"),
    ],
)
def test_an_impossible_meta_is_refused_before_anything_is_allocated(meta: TensorMeta, text: str) -> None:
    with pytest.raises(Refused, match=text):
        encoded_sizes(meta)
    with pytest.raises(Refused, match=text):
        decode(meta, [])


metas = st.builds(
    TensorMeta,
    st.lists(st.integers(-2, 1 << 40), max_size=10).map(tuple),
    st.sampled_from(["float32", "bfloat16", "uint8", "no such dtype"]) | st.text(max_size=5),
    st.sampled_from([*CODECS, *SPARSE, "no such codec"]) | st.text(max_size=5),
)


@given(meta=metas, buffers=st.lists(st.binary(max_size=64), max_size=3))
def test_whatever_a_stranger_sends_is_a_tensor_or_refused(meta: TensorMeta, buffers: list[bytes]) -> None:
    try:
        tensor = decode(meta, buffers)
    except Refused:
        return
    assert tuple(tensor.shape) == meta.shape
    assert not tensor.is_floating_point() or bool(tensor.isfinite().all())
