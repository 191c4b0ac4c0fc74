"""A chunk of a flat tensor on its way: of an exact sum packed (`swarm.wire.whole_numbers`), else as it is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swarm.wire import whole_numbers
from swarm.wire.buffers import Buffer
from swarm.wire.codec import Encoded, decode, dtype_name, encode
from swarm.wire.tensor_meta import TensorMeta, encoded_sizes


def chunk_meta(numel: int, dtype: torch.dtype) -> TensorMeta:
    """What a chunk is announced as."""
    return TensorMeta((numel,), dtype_name(dtype), "none")


def pack_chunk(chunk: torch.Tensor, *, name: str) -> Encoded:
    """`chunk`: 1-D, host memory. Raises Refused: it has numbers that are not finite."""
    if chunk.dtype == torch.int64:
        return Encoded(chunk_meta(chunk.numel(), chunk.dtype), whole_numbers.pack(chunk))
    return encode(chunk, "none", name=name)


def unpack_chunk(body: Sequence[Buffer], numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The chunk; that of an exact sum in fresh memory. Raises Refused: its bytes are none."""
    if dtype == torch.int64:
        return whole_numbers.unpack(body, numel, name="a chunk")
    return decode(chunk_meta(numel, dtype), body, name="a chunk")


def most_chunk_bytes(numel: int, dtype: torch.dtype) -> int:
    """How long the body of a chunk is at most."""
    return sum(whole_numbers.most_bytes(numel) if dtype == torch.int64 else _sizes(numel, dtype))


def chunk_may_have(sizes: Sequence[int], numel: int, dtype: torch.dtype) -> bool:
    """Whether a chunk may come in buffers of these sizes."""
    if dtype != torch.int64:
        return list(sizes) == _sizes(numel, dtype)
    widths, most = whole_numbers.most_bytes(numel)
    return len(sizes) == 2 and sizes[0] == widths and sizes[1] <= most


def _sizes(numel: int, dtype: torch.dtype) -> list[int]:
    return encoded_sizes(chunk_meta(numel, dtype))
