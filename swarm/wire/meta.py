"""What a header says of a tensor, and how many bytes an honest one has.

Apart from the codecs because trainers read headers too, and need no torch for it.
"""

from __future__ import annotations

import msgspec

from swarm.errors import Refused

CODECS = ("none", "bf16", "blockwise8")

BLOCK = 256
"""Numbers that share one scale in blockwise8. The scales are 1.6 % of the bytes; the smaller block
costs little and stops an outlier from drowning more than its 255 neighbours."""

MAX_DIMS = 8
MAX_TENSOR_BYTES = 1 << 36
"""64 GiB: no stage of a run we could hold has a flat vector above that, and no sum below overflows.
It only keeps the arithmetic honest: what a peer receives is bounded by what it expects."""

ITEM_BYTES = {
    "float32": 4, "bfloat16": 2, "float64": 8, "float16": 2,
    "uint8": 1, "uint16": 2, "uint32": 4, "int32": 4, "int64": 8,
}  # fmt: skip
"""Bytes of a number of each dtype that travels."""
_FLOATS = frozenset({"float32", "bfloat16", "float64", "float16"})
_BLOCKWISE = frozenset({"float32", "bfloat16", "float64"})


class TensorMeta(msgspec.Struct, frozen=True):
    """What a header says of one tensor."""

    shape: tuple[int, ...]
    dtype: str
    """Of the tensor before encoding, and again after decoding."""
    codec: str


def encoded_sizes(meta: TensorMeta) -> list[int]:
    """Bytes of each buffer of an honest tensor with this meta.

    Raises:
        Refused: unknown dtype or codec, a codec that does not fit the dtype, an impossible shape.
    """
    item = ITEM_BYTES.get(meta.dtype)
    if item is None:
        raise Refused(f"unknown dtype {meta.dtype[:20]!r}; known are {', '.join(ITEM_BYTES)}")
    if meta.codec not in CODECS:
        raise Refused(f"unknown codec {meta.codec[:20]!r}; known are {', '.join(CODECS)}")
    if len(meta.shape) > MAX_DIMS:
        raise Refused(f"a tensor of {len(meta.shape)} dimensions; at most {MAX_DIMS} are allowed")
    numel = 1
    for size in meta.shape:
        if not 0 <= size <= MAX_TENSOR_BYTES:
            raise Refused(f"impossible size {size} in the shape of a tensor")
        numel *= size  # bounded: at most 8 factors of 37 bits
    if numel * item > MAX_TENSOR_BYTES:
        raise Refused(f"a tensor of {numel * item} bytes; at most {MAX_TENSOR_BYTES} are allowed")
    if meta.codec == "none":
        return [numel * item]
    if meta.codec == "bf16":
        if meta.dtype not in _FLOATS:
            raise Refused(f"codec bf16 does not carry {meta.dtype}")
        return [numel * 2]
    if meta.dtype not in _BLOCKWISE:
        raise Refused(f"codec blockwise8 does not carry {meta.dtype}")
    return [numel, -(-numel // BLOCK) * 4]
