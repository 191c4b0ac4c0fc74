"""Random numbers that are functions of names: initial weights and dropout masks.

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


class Dropout:
    """The dropout of one microbatch. Whole-number arithmetic, so the masks are the same on every device.

    torch's own generators differ between CPU and CUDA: a microbatch that is recomputed on another kind of
    device would have another gradient.
    """

    def __init__(self, seed: int, mb: Microbatch, p: float) -> None:
        self._key = ("dropout", seed, mb.t, mb.m)
        self._p = p

    def __call__(self, x: torch.Tensor, site: str) -> torch.Tensor:
        """`x` with each element zeroed with probability p, the others scaled by 1 / (1 - p).

        `site` names the place in the model, such as `layers.3.attention`.
        """
        if not self._p:
            return x
        bits = seed_of(*self._key, site)
        word = torch.arange(x.numel(), device=x.device, dtype=torch.int64)
        word = (word * (bits & 0x7FFFFFFF | 1) + (bits >> 31)) & _MASK32
        # A 32-bit integer hash (two multiply-xorshift rounds). Both factors are below 2^31, so that no
        # product leaves the 63 bits of int64: an overflow would be undefined.
        word = ((word ^ (word >> 15)) * 0x2C1B3C6D) & _MASK32
        word = ((word ^ (word >> 12)) * 0x297A2D39) & _MASK32
        word = word ^ (word >> 15)
        keep = (word >= int(self._p * 2**32)).view(x.shape)
        return x * (keep.to(x.dtype) * (1.0 / (1.0 - self._p)))
