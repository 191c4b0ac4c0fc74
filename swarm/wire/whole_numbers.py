"""Whole numbers of 64 bits in as many bytes as the largest of a block needs: how exact sums travel.

A sum of gradients is a whole number of 2^-44 (`swarm.model.fixed_point`), so what it is worth decides how
many of its 8 bytes say anything: 5 or 6 of a decoder's. Nothing is lost. A block of 256 has one width:

    0 bytes   all are zero                     5, 6, 8 bytes   the same, and the high bytes of each
    4 bytes   the low half, signed

Two buffers: a byte for the width of each block; then the low halves of all blocks that have any, in their
order, and the high bytes of those of width 5, of 6, and of 8. Zeros fill the last block. Little-endian. Whole
bytes, since what is saved must be worth its time on a fast line as well: 7 ms to pack and 2 ms to unpack a
million numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from swarm.errors import Refused
from swarm.wire.buffers import Buffer

BLOCK = 256
_HIGH: dict[int, type[np.signedinteger]] = {5: np.int8, 6: np.int16, 8: np.int32}
"""The high bytes, by the width of a block."""


def pack(values: torch.Tensor) -> list[Buffer]:
    """`values`: int64, 1-D, host memory. They are copied."""
    halves = _halves(values.numpy())
    low, high = halves[..., 0], halves[..., 1]
    least, most = high.min(axis=1), high.max(axis=1)
    widths = np.full(len(high), 8, np.uint8)
    widths[(least >= -(1 << 15)) & (most < 1 << 15)] = 6
    widths[(least >= -(1 << 7)) & (most < 1 << 7)] = 5
    short = np.flatnonzero((least >= -1) & (most <= 0))
    if len(short):
        fits = (high[short] == low[short] >> 31).all(axis=1)
        zero = fits & ~low[short].any(axis=1)
        widths[short[fits]], widths[short[zero]] = 4, 0
    lows = low if widths.all() else low[widths > 0]
    parts = [lows.tobytes()]
    parts += [high[widths == width].astype(kind).tobytes() for width, kind in _HIGH.items()]
    return [widths.tobytes(), b"".join(parts)]


def most_bytes(numel: int) -> tuple[int, int]:
    """The sizes of the two buffers, at most; the first is always so long."""
    blocks = -(-numel // BLOCK)
    return blocks, 8 * BLOCK * blocks


def unpack(buffers: Sequence[Buffer], numel: int, *, name: str = "a tensor") -> torch.Tensor:
    """The `numel` numbers, int64, in fresh memory.

    Raises:
        Refused: not what `pack` makes.
    """
    if len(buffers) != 2:
        raise Refused(f"{name} came in {len(buffers)} buffers; expected 2")
    widths, data = (np.frombuffer(buffer, np.uint8) for buffer in buffers)
    if len(widths) != most_bytes(numel)[0] or not np.isin(widths, (0, 4, *_HIGH)).all():
        raise Refused(f"{name} has other blocks than {numel} numbers")
    if len(data) != BLOCK * int(widths.sum(dtype=np.int64)):
        raise Refused(f"{name} came in {len(data)} bytes; its blocks have others")
    numbers = np.zeros((len(widths), BLOCK), np.int64)
    halves = numbers.view(np.int32).reshape(len(widths), BLOCK, 2)
    at = int((widths > 0).sum()) * BLOCK * 4
    lows = np.frombuffer(data[:at], np.int32).reshape(-1, BLOCK)
    if widths.all():
        halves[..., 0] = lows
    else:
        halves[widths > 0, :, 0] = lows
    halves[widths == 4, :, 1] = halves[widths == 4, :, 0] >> 31
    for width, kind in _HIGH.items():
        there = np.flatnonzero(widths == width)
        end = at + len(there) * BLOCK * (width - 4)
        halves[there, :, 1] = np.frombuffer(data[at:end], kind).reshape(-1, BLOCK)
        at = end
    if numbers.reshape(-1)[numel:].any():
        raise Refused(f"{name} has numbers behind its last one")
    return torch.from_numpy(numbers.reshape(-1)[:numel])


def _halves(numbers: np.ndarray) -> np.ndarray:
    """Low and high halves, int32 [blocks, BLOCK, 2]; the last block is filled with zeros."""
    missing = -len(numbers) % BLOCK
    if missing:
        numbers = np.concatenate((numbers, np.zeros(missing, np.int64)))
    return np.ascontiguousarray(numbers).view(np.int32).reshape(-1, BLOCK, 2)
