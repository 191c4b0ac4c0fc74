"""The meta of a tensor in a header, and the number of bytes that an honest one has.

Apart from the codecs because trainers read headers too, and need no torch for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from swarm.codecs import KNOWN, PPM, parse_codec
from swarm.errors import Refused

BLOCK = 256
"""Numbers that share one scale in blockwise8 and hadamard4. The scales are 1.6 % of blockwise8's bytes; a
small block keeps an outlier from drowning more than its 255 neighbours."""

MIN_ROW = 256
"""Least length of a row of a top-k: in shorter rows a part of a hundredth would be rounded too much."""

MAX_DIMS = 8
MAX_TENSOR_BYTES = 1 << 36
"""64 GiB: no stage of a feasible run has a flat vector above that, and no sum below overflows. What a peer
receives is bounded by what it expects, not by this."""

ITEM_BYTES = {
    "float32": 4, "bfloat16": 2, "float64": 8, "float16": 2,
    "uint8": 1, "uint16": 2, "uint32": 4, "int32": 4, "int64": 8,
}  # fmt: skip
"""Bytes of a number, by dtype."""
_FLOATS = frozenset({"float32", "bfloat16", "float64", "float16"})
_BLOCKWISE = frozenset({"float32", "bfloat16", "float64"})


class TensorMeta(msgspec.Struct, frozen=True):
    shape: tuple[int, ...]
    dtype: str
    """The tensor's dtype before encoding, and again after decoding."""
    codec: str

    @property
    def words(self) -> str:
        """For errors; short, whatever a stranger wrote: `float32[2, 17] as bf16`."""
        return f"{self.dtype[:12]}{list(self.shape[:MAX_DIMS])} as {self.codec[:26]}"


class IndexLayout(NamedTuple):
    """How the places of a top-k are encoded: see `swarm.wire.topk`."""

    low: int
    """Low bits of each place that are written as they are; 0: a bitmap."""
    unary_bits: int
    """Length in bits of the unary row (what is above the low bits), or of the bitmap."""
    nbytes: int


def index_layout(numel: int, kept: int) -> IndexLayout:
    """The shortest encoding of which `kept` of `numel` numbers travel; among equal ones the fewest low bits.

    low = 0:    ceil(numel / 8)
    low > 0:    ceil((kept + ((numel - 1) >> low)) / 8) + low * ceil(kept / 8)
    """
    best = IndexLayout(0, numel, -(-numel // 8))
    for low in range(1, (numel // max(1, kept)).bit_length() + 1):
        unary_bits = kept + (max(1, numel) - 1 >> low)
        nbytes = -(-unary_bits // 8) + low * -(-kept // 8)
        if nbytes < best.nbytes:
            best = IndexLayout(low, unary_bits, nbytes)
    return best


def row_length(shape: tuple[int, ...]) -> int:
    """Numbers in a row of a top-k: the shortest tail of the shape that has `MIN_ROW` of them, or all.

    For [B, T, H] one token's H, if that is 256 or more; for a vector all of it.
    """
    length = 1
    for size in reversed(shape):
        if length >= MIN_ROW:
            break
        length *= size
    return length


def kept_of(shape: tuple[int, ...], keep_ppm: int) -> tuple[int, int]:
    """(rows, numbers kept of each, rounded up) of a tensor of this shape under a top-k."""
    length = row_length(shape)
    rows = math.prod(shape) // length if length else 0
    return rows, -(-length * keep_ppm // PPM)


def encoded_sizes(meta: TensorMeta) -> list[int]:
    """Bytes of each buffer of an honest tensor with this meta.

    One buffer for `none` and `bf16`, two (the numbers, then the scales) for `blockwise8` and `hadamard4`, the
    latter of whole blocks. A top-k has one more in front, of `index_layout(...).nbytes`; the others are those
    of a vector of the values that it keeps.

    Raises:
        Refused: unknown dtype or codec, a codec that does not fit the dtype, an impossible shape.
    """
    item = ITEM_BYTES.get(meta.dtype)
    if item is None:
        raise Refused(f"unknown dtype {meta.dtype[:20]!r}; known are {', '.join(ITEM_BYTES)}")
    codec = parse_codec(meta.codec)
    if codec is None:
        raise Refused(f"unknown codec {meta.codec[:20]!r}; known are {KNOWN}")
    if len(meta.shape) > MAX_DIMS:
        raise Refused(f"a tensor of {len(meta.shape)} dimensions; at most {MAX_DIMS} are allowed")
    numel = extent = 1
    for size in meta.shape:
        if not 0 <= size <= MAX_TENSOR_BYTES:
            raise Refused(f"impossible size {size} in the shape of a tensor")
        numel *= size  # bounded: at most 8 factors of 37 bits
        extent *= size or 1  # torch's strides overflow in an empty tensor too
    if extent * item > MAX_TENSOR_BYTES:
        raise Refused(f"a tensor of {extent * item} bytes; at most {MAX_TENSOR_BYTES} are allowed")
    carried = {"none": ITEM_BYTES, "bf16": _FLOATS}.get(codec.values, _BLOCKWISE)
    if meta.dtype not in carried or (codec.keep_ppm < PPM and meta.dtype not in _FLOATS):
        raise Refused(f"codec {meta.codec} does not carry {meta.dtype}")
    if codec.keep_ppm == PPM:
        return _value_sizes(numel, item, codec.values)
    rows, keep = kept_of(meta.shape, codec.keep_ppm)
    return [index_layout(numel, rows * keep).nbytes, *_value_sizes(rows * keep, item, codec.values)]


def buffer_sizes(metas: Sequence[TensorMeta]) -> list[int]:
    return [size for meta in metas for size in encoded_sizes(meta)]


def _value_sizes(numel: int, item: int, values: str) -> list[int]:
    if values == "none":
        return [numel * item]
    if values == "bf16":
        return [numel * 2]
    blocks = -(-numel // BLOCK)
    return [numel if values == "blockwise8" else blocks * BLOCK // 2, blocks * 4]
