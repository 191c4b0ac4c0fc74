"""Random numbers that are functions of names: initial weights, dropout masks, and what rounds gradients.

Nothing here has state, so a recomputed or retracted microbatch gets the same numbers, and so does another
split of the model into stages.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch

from swarm.ids import Microbatch

_MASK32 = 0xFFFFFFFF


def seed_of(*names: object) -> int:
    """63 bits from the names, the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(names).encode()).digest()[:8], "little") >> 1


def initial_normal(seed: int, name: str, shape: Sequence[int], std: float) -> torch.Tensor:
    """The initial value of parameter `name`: float32 on the CPU, bell-shaped, the same bits everywhere.

    The sum of four 16-bit words, shifted and scaled: nearly normal (it ends at 3.46 std), and whole-number
    arithmetic. torch's own normal_ goes through logarithms and cosines whose last bits differ between
    processors, and then peers would disagree about version 0.
    """
    count = math.prod(shape)
    words = np.random.PCG64(seed_of("weights", seed, name)).random_raw(count).astype("<u8", copy=False)
    total = words.view("<u2").reshape(count, 4).sum(axis=1, dtype=np.int32)
    scale = std / math.sqrt((65536**2 - 1) / 3)
    return torch.from_numpy(total - 2 * 65535).to(torch.float32).mul_(scale).view(*shape)


def words(seed: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    """`count` words of 32 bits, from the one at place `start` on, as int64; `seed`: of 63 bits.

    A 32-bit integer hash of the place (two multiply-xorshift rounds). All factors are below 2^31, so that no
    product leaves the 63 bits of int64: an overflow would be undefined.
    """
    word = torch.arange(start, start + count, device=device, dtype=torch.int64)
    word = (word * (seed & 0x7FFFFFFF | 1) + (seed >> 31)) & _MASK32
    word = ((word ^ (word >> 15)) * 0x2C1B3C6D) & _MASK32
    word = ((word ^ (word >> 12)) * 0x297A2D39) & _MASK32
    return word ^ (word >> 15)


def fractions(seed: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    """Numbers of 16 bits from 0 to below 1, from the one at place `start` (even) on: float32.

    One is drawn for each gradient that is rounded, so the host does without words of 64 bits.
    """
    assert not start % 2
    pairs = -(-count // 2)
    if device.type != "cpu":
        word = words(seed, start // 2, pairs, device)
        halves = torch.stack((word & 0xFFFF, word >> 16), dim=1).view(-1)[:count].to(torch.float32)
    else:
        word = np.arange(pairs, dtype=np.uint32)
        factor = seed & 0x7FFFFFFF | 1
        word *= np.uint32(factor)
        word += np.uint32((start // 2 * factor + (seed >> 31)) & _MASK32)
        for shift, by in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
            word ^= word >> np.uint32(shift)
            word *= np.uint32(by)
        word ^= word >> np.uint32(15)
        halves = torch.from_numpy(word.astype("<u4", copy=False).view("<u2")[:count].astype(np.float32))
    return halves.mul_(2.0**-16)


def dropped(x: torch.Tensor, site: str, *, p: float, seed: int, mb: Microbatch | None) -> torch.Tensor:
    """`x` with each element zeroed with probability `p`, the others scaled by 1 / (1 - p); as it is without a
    microbatch. `site` names the place in the model, such as `layers.3.attention`.

    Whole-number arithmetic, so the masks are the same on every device. torch's own generators differ between
    CPU and CUDA: a microbatch that is recomputed on another kind of device would have another gradient.
    """
    if not p or mb is None:
        return x
    word = words(seed_of("dropout", seed, mb.t, mb.m, site), 0, x.numel(), x.device)
    keep = (word >= int(p * 2**32)).view(x.shape)
    return x * (keep.to(x.dtype) * (1.0 / (1.0 - p)))
