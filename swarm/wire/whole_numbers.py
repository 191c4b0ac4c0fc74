"""Whole numbers of 64 bits in as many bytes as the largest of a block needs: how exact sums travel.

A sum of gradients is a whole number (`swarm.model.fixed_point`), so what it is worth decides how many of its
8 bytes say anything: 5 or 6 of a multiple of 2^-44, 1 to 3 of one that was rounded. Nothing is lost. A block
of 256 has one width:

    0 bytes   all are zero                     3 bytes         the low quarter, and the third byte
    1 byte    the low byte, signed             4 bytes         the low half, signed
    2 bytes   the low quarter, signed          5, 6, 8 bytes   the same, and the high bytes of each

Two buffers: a byte for the width of each block; then, each of all blocks that have it and in their order,
the low halves (4 bytes and more), the low quarters (2 and 3), the third bytes (3), the low bytes (1), and
the high bytes of those of width 5, of 6, and of 8. Zeros fill the last block. Little-endian. Whole bytes,
since what is saved must be worth its time on a fast line as well: 7 ms to pack and 2 ms to unpack a million
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from swarm.errors import Refused
from swarm.wire.buffers import Buffer

BLOCK = 256
WIDTHS = (0, 1, 2, 3, 4, 5, 6, 8)
_HIGH: dict[int, type[np.signedinteger]] = {5: np.int8, 6: np.int16, 8: np.int32}
"""The high bytes, by the width of a block."""


def pack(values: torch.Tensor) -> list[Buffer]:
    """`values`: int64, 1-D, host memory. They are copied."""
    halves = _halves(values.numpy())
    low, high = halves[..., 0], halves[..., 1]
    least, most = high.min(axis=1), high.max(axis=1)
    widths = np.full(len(high), 8, np.uint8)
    widths[_within(least, most, 16)] = 6
    widths[_within(least, most, 8)] = 5
    short = np.flatnonzero((least >= -1) & (most <= 0))
    if len(short):
        lows = low[short]
        fits = (high[short] == lows >> 31).all(axis=1)
        least, most = lows.min(axis=1), lows.max(axis=1)
        for width, which in (
            (4, fits),
            (3, fits & _within(least, most, 24)),
            (2, fits & _within(least, most, 16)),
            (1, fits & _within(least, most, 8)),
            (0, fits & (least == 0) & (most == 0)),
        ):
            widths[short[which]] = width
    quarters, thirds = low[(widths == 2) | (widths == 3)], low[widths == 3]
    parts = [low[widths >= 4], quarters.astype(np.int16), (thirds >> 16).astype(np.int8)]
    parts.append(low[widths == 1].astype(np.int8))
    parts += [high[widths == width].astype(kind) for width, kind in _HIGH.items()]
    return [widths.tobytes(), b"".join(part.tobytes() for part in parts)]


def most_bytes(numel: int) -> tuple[int, int]:
    """The sizes of the two buffers, at most; the first is always so long."""
    blocks = -(-numel // BLOCK)
    return blocks, 8 * BLOCK * blocks


def unpack(buffers: Sequence[Buffer], numel: int, *, name: str = "a tensor") -> torch.Tensor:
    """The `numel` numbers, int64, in fresh memory. Raises Refused: not what `pack` makes."""
    if len(buffers) != 2:
        raise Refused(f"{name} came in {len(buffers)} buffers; expected 2")
    widths, data = (np.frombuffer(buffer, np.uint8) for buffer in buffers)
    if len(widths) != most_bytes(numel)[0] or not np.isin(widths, WIDTHS).all():
        raise Refused(f"{name} has other blocks than {numel} numbers")
    if len(data) != BLOCK * int(widths.sum(dtype=np.int64)):
        raise Refused(f"{name} came in {len(data)} bytes; its blocks have others")
    numbers = np.zeros((len(widths), BLOCK), np.int64)
    halves = numbers.view(np.int32).reshape(len(widths), BLOCK, 2)
    at = 0

    def take(count: int, kind: type[np.signedinteger]) -> np.ndarray:
        """The next of so many blocks."""
        nonlocal at
        start, at = at, at + count * BLOCK * np.dtype(kind).itemsize
        return np.frombuffer(data[start:at], kind).reshape(-1, BLOCK)

    long, quarters, thirds = widths >= 4, (widths == 2) | (widths == 3), np.flatnonzero(widths == 3)
    halves[long, :, 0] = take(int(long.sum()), np.int32)
    numbers[quarters] = take(int(quarters.sum()), np.int16)
    if len(thirds):
        numbers[thirds] = (numbers[thirds] & 0xFFFF) | take(len(thirds), np.int8).astype(np.int64) << 16
    numbers[widths == 1] = take(int((widths == 1).sum()), np.int8)
    halves[widths == 4, :, 1] = halves[widths == 4, :, 0] >> 31
    for width, kind in _HIGH.items():
        there = np.flatnonzero(widths == width)
        halves[there, :, 1] = take(len(there), kind)
    if numbers.reshape(-1)[numel:].any():
        raise Refused(f"{name} has numbers behind its last one")
    return torch.from_numpy(numbers.reshape(-1)[:numel])


def _within(least: np.ndarray, most: np.ndarray, bits: int) -> np.ndarray:
    """Where signed numbers of so many bits are enough."""
    return (least >= -(1 << (bits - 1))) & (most < 1 << (bits - 1))


def _halves(numbers: np.ndarray) -> np.ndarray:
    """Low and high halves, int32 [blocks, BLOCK, 2]; the last block is filled with zeros."""
    missing = -len(numbers) % BLOCK
    if missing:
        numbers = np.concatenate((numbers, np.zeros(missing, np.int64)))
    return np.ascontiguousarray(numbers).view(np.int32).reshape(-1, BLOCK, 2)
