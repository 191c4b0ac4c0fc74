"""Products of sums with random coefficients: a result is what its contributions add up to, or its product
differs from theirs.

Coefficients are odd whole numbers from -32767 to 32767, and products are exact, modulo 2^64. Where a result
was rounded to float32, its product may differ by that of the rounding errors, each at most 2^-24 of its
element: by Hoeffding's inequality more than `DEVIATIONS` times 32767 · 2^-24 · |result| with a probability of
2 exp(-DEVIATIONS² / 2) = 5e-56. What is missed, and how often: docs/decisions/audits.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from swarm.model.fixed_point import SCALE, to_float

LARGEST = 32767
"""Of a coefficient."""
DEVIATIONS = 16.0
MAX_CHANCE = 2.0**-9
"""That a lie fits: the larger a result says that it is, the more its rounding may be, and modulo 2^64 all."""
ROUNDING = 2.0**-24 * (1.0 + 2.0**-20)
"""Of int64 to float64 to float32."""
_SLICE = 1 << 13
"""Elements: what is computed with them stays in an L2 cache. And numpy's BLAS takes one thread for a product
of fewer than 10,000: on cores that others use, waiting for more of them takes 60 times as long."""
MODULUS = 1 << 64


def coefficients(seed: bytes, owner: int, index: int, numel: int) -> npt.NDArray[np.int16]:
    """Those of chunk `index` of the part of an owner, by its place among the members."""
    key = hashlib.sha256(seed + owner.to_bytes(4, "little") + index.to_bytes(4, "little")).digest()
    raw = np.random.SFC64(int.from_bytes(key, "little")).random_raw(-(-numel // 4))
    raw |= np.uint64(0x0001_0001_0001_0001)  # in place: a copy takes four times as long
    return raw.astype("<u8", copy=False).view("<i2")[:numel].astype(np.int16, copy=False)


def product(contribution: torch.Tensor, r: npt.NDArray[np.int16]) -> int:
    """Of a contribution (int64, 1-D, host), modulo 2^64."""
    values, total = contribution.numpy(), 0
    for start in range(0, len(values), _SLICE):
        part = slice(start, start + _SLICE)
        total += int(np.dot(values[part], r[part].astype(np.int64)))
    return total % MODULUS


def fits(result: torch.Tensor, r: npt.NDArray[np.int16], expected: int) -> bool:
    """Whether a result (1-D, host; floats, or whole numbers where sums are rounded) is surely that of
    contributions whose products add up to `expected`, modulo 2^64. Another may be, where it is very large.
    """
    if result.dtype == torch.int64:
        return product(result, r) == expected
    values, value, square = result.numpy(), 0.0, 0.0
    for start in range(0, len(values), _SLICE):
        part = values[start : start + _SLICE].astype(np.float64)
        value += float(np.dot(part, r[start : start + _SLICE].astype(np.float64)))
        square += float(np.dot(part, part))
    if not np.isfinite(value):
        return False
    differs = (int(value * SCALE) - expected) % MODULUS
    most = DEVIATIONS * LARGEST * ROUNDING * square**0.5 * SCALE + 1.0
    return min(differs, MODULUS - differs) <= most <= MODULUS * MAX_CHANCE / 2


def reduced_of(contributions: Sequence[torch.Tensor], *, rounded: bool) -> torch.Tensor:
    """What an owner makes of these contributions, all of one length: the value of their sum, or the sum."""
    total = torch.zeros_like(contributions[0])
    for contribution in contributions:
        total += contribution
    return total if rounded else to_float(total, torch.float32)
