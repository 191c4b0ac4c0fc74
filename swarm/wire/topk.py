"""The largest numbers of a tensor, and where they were in few bits.

**Which.** Of each row of a tensor (`.tensor_meta.row_length`), as a rule one token's hidden vector, the same
number of elements is kept, those largest in magnitude, of equal ones the first. By rows and not by tensor as
in FusionLLM (Tang et al., 2024): what a token keeps then depends on no other token, neither of its future,
which a causal model must not see, nor of another sample.

**Where.** By Elias and Fano's quasi-succinct code (Elias, 1974): the lowest `low` bits of each place as they
are, the rest in unary: the i-th place, p, sets bit (p >> low) + i of a row of k ones among zeros. Where `low`
would be 0, a bitmap of n bits is smaller, and is taken. (Sizes: `swarm.wire.tensor_meta.index_layout`.)

Bits are packed with the highest first; the unary row, or the bitmap, is followed by `low` rows of k bits, one
for each low bit from the lowest on, each padded with zeros to a whole byte.
"""

from __future__ import annotations

import numpy as np

from swarm.errors import Refused
from swarm.wire.tensor_meta import index_layout

_SLICE = 1 << 16
"""Numbers per slice: their magnitudes, twice, fit into an L2 cache of 1 MB."""


def largest(bits: np.ndarray, keep: int) -> np.ndarray:
    """Places of the `keep` largest numbers of each row, ascending.

    Args:
        bits: rows of numbers [R, L] as signed integers of their width: without its sign, a float's bits are
            ordered as its magnitude. No NaN.
        keep: 1 … L.

    Returns:
        int64 [R * keep], as if the rows were one vector.
    """
    rows, length = bits.shape
    places = np.empty(rows * keep, dtype=np.int64)
    magnitude_mask = np.iinfo(bits.dtype).max
    at_once = max(1, _SLICE // length)
    for row in range(0, rows, at_once):
        magnitudes = bits[row : row + at_once] & magnitude_mask
        found = _largest(magnitudes, keep)
        found += row * length
        places[row * keep : row * keep + len(found)] = found
    return places


def _largest(magnitudes: np.ndarray, keep: int) -> np.ndarray:
    rows, length = magnitudes.shape
    least = np.partition(magnitudes, length - keep, axis=1)[:, length - keep, None]
    kept = magnitudes >= least
    found = np.flatnonzero(kept)
    if len(found) == rows * keep:
        return found
    # Several equal the smallest that is kept: the first of them are taken.
    tied = np.flatnonzero(np.count_nonzero(kept, axis=1) > keep)
    above = magnitudes[tied] > least[tied]
    equal = magnitudes[tied] == least[tied]
    room = keep - np.count_nonzero(above, axis=1)[:, None]
    kept[tied] = above | (equal & (np.cumsum(equal, axis=1) <= room))
    return np.flatnonzero(kept)


def pack_places(places: np.ndarray, numel: int) -> bytes:
    """Encode ascending places (int64, each once, below `numel`) as `index_layout` describes."""
    layout = index_layout(numel, len(places))
    ones = np.zeros(layout.unary_bits, dtype=np.uint8)
    if layout.low == 0:
        ones[places] = 1
        return np.packbits(ones).tobytes()
    ones[(places >> layout.low) + np.arange(len(places))] = 1
    lows = [np.packbits((places >> bit & 1).astype(np.uint8)) for bit in range(layout.low)]
    return b"".join(part.tobytes() for part in (np.packbits(ones), *lows))


def unpack_places(packed: memoryview, numel: int, rows: int, keep: int, *, name: str) -> np.ndarray:
    """The places that were packed, int64 [rows * keep]: `keep` in each of `rows` equal parts of `numel`.

    `packed` has the number of bytes that `index_layout` gives. Memory is a few times that of the decoded
    places.

    Raises:
        Refused: not so many places in each row, or not in order.
    """
    count = rows * keep
    layout = index_layout(numel, count)
    data = np.frombuffer(packed, dtype=np.uint8)
    unary_bytes = -(-layout.unary_bits // 8)
    places = np.flatnonzero(np.unpackbits(data[:unary_bytes], count=layout.unary_bits).view(bool))
    if len(places) != count:
        raise Refused(f"{name} has {len(places)} places; expected {count}")
    if layout.low:
        places -= np.arange(count)
        planes = data[unary_bytes:].reshape(layout.low, -(-count // 8))
        for plane in planes[::-1]:
            places <<= 1
            places |= np.unpackbits(plane, count=count)
        if count and (np.diff(places) <= 0).any():
            raise Refused(f"{name} has places that are not in order, or one twice")
    by_row = places.reshape(rows, keep)
    starts = np.arange(rows) * (numel // rows if rows else 0)
    if count and ((by_row[:, 0] < starts).any() or (by_row[:, -1] >= starts + numel // rows).any()):
        raise Refused(f"{name} has places outside of their rows")
    return places
