"""Sums that do not depend on the order of their terms.

Each gradient is rounded once, to a multiple of 2^-44, and whole numbers are added (Kulisch's accumulator; one
64-bit word suffices here, since gradients of a mean loss are bounded). 2^-44 = 6e-14: Adam's eps is 1e-8, so
what is rounded away is five orders below what Adam can tell from zero.

With `codec.reduce = "rounded16"` or `"rounded8"` a gradient is rounded further, in blocks of 256 numbers of a
weight, up or down at random by name: docs/design.md, *Exactness*, has why and how far. Nothing saturates:
where a gradient is larger than before, its sum has more bits (`swarm.wire.whole_numbers`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from swarm.codecs import ROUNDED
from swarm.ids import Microbatch
from swarm.manifest import Run
from swarm.model.seeded_random import fractions, seed_of

BITS = 44
"""Bits of the fraction. 63 - 44 = 19 bits are left for whole numbers without a sign: sums up to 524 288."""
SCALE = 2.0**BITS
_DEVICE_SLICE = 1 << 26
"""Elements: 800 MB on a GPU, of which a launch is long enough to hide the next."""
_SLICE = 1 << 15
"""Elements: few calls, and what is computed with them stays in an L2 cache."""
_WIDENED = 1 << 19
"""Elements of bfloat16 that are floats at a time: a matrix of GPT-3's would take 2.4 GB at once."""
BLOCK = 256
"""Numbers of a weight, in their order, of which the same bits are dropped; its last block may be shorter."""
MOST_DROPPED = 63 - min(ROUNDED.values())
_UNITS = np.ldexp(1.0, np.arange(MOST_DROPPED + 1) - BITS)
"""What a sum of gradients of which so many bits are dropped is a multiple of."""


class Rounded(NamedTuple):
    """How the gradient of a weight is rounded."""

    dropped: torch.Tensor
    """The bits that each of its blocks is without, uint8."""
    seed: int
    """Of what is drawn for this microbatch."""

    @classmethod
    def of(cls, run: Run, mb: Microbatch, name: str, dropped: torch.Tensor) -> Rounded:
        """That of one microbatch and one weight, by its full name."""
        return cls(dropped, seed_of("rounding", run.seed, *run.named(mb), name))

    def part(self, term: torch.Tensor, start: int) -> torch.Tensor:
        """Numbers of the gradient from `start` on, the first of a block, as they are added (still floats).

        Towards zero and away from it by the number's sign: what is subtracted was added.
        """
        first = start // BLOCK
        units = _units(self.dropped[first : first + blocks_of(len(term))], term.dtype)
        scaled = _by_block(term, 1.0 / units)
        return scaled.add_(torch.copysign(fractions(self.seed, start, len(term), term.device), scaled))


def blocks_of(numel: int) -> int:
    """How many blocks the gradient of a weight has."""
    return -(-numel // BLOCK)


def _units(dropped: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`_UNITS` of blocks."""
    return torch.from_numpy(_UNITS).to(dtype).to(dropped.device)[dropped.long()]


def _by_block(numbers: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Numbers from the first of a block on, each times the factor of its block."""
    found, blocks = torch.empty_like(numbers), len(numbers) // BLOCK
    whole = slice(blocks * BLOCK)
    torch.mul(numbers[whole].view(-1, BLOCK), factors[:blocks, None], out=found[whole].view(-1, BLOCK))
    found[whole.stop :] = numbers[whole.stop :] * factors[blocks:]
    return found


def dropped_after(total: torch.Tensor, dropped: torch.Tensor, kept_bits: int) -> torch.Tensor:
    """The bits that the blocks of a weight drop in the next step.

    Args:
        total: the value of the sum of this step, floats.
        dropped: what they drop in this step. Where the sum is zero they drop the same in the next one.
    """
    filled = torch.nn.functional.pad(total.reshape(-1), (0, -total.numel() % BLOCK))
    largest = torch.linalg.vector_norm(filled.view(-1, BLOCK), ord=torch.inf, dim=1).cpu()
    wanted = (torch.frexp(largest).exponent + (BITS - kept_bits)).clamp(0, MOST_DROPPED).to(torch.uint8)
    return torch.where(largest > 0, wanted, dropped.cpu()).to(dropped.device)


def largest_term(microbatches: int) -> float:
    """The largest gradient of a microbatch that cannot overflow a step's sum: more means divergence."""
    return 2.0 ** (62 - BITS) / microbatches


def largest_norm(term: torch.Tensor) -> torch.Tensor:
    """A number that nothing in `term` exceeds, found in half the time of the largest magnitude: its norm."""
    return torch.linalg.vector_norm(term, dtype=torch.promote_types(term.dtype, torch.float32))


def add_exact(total: torch.Tensor, term: torch.Tensor, rounded: Rounded | None = None) -> None:
    """Add `term` (floats, any shape, within `largest_term`) to `total` (int64, 1-D, as many elements)."""
    flat = term.detach().reshape(-1).contiguous()  # a kernel reads its memory, whatever its stride
    if flat.device.type == "cpu":
        # numpy multiplies, and converts float32 to int64, in 2/3 of torch's time.
        wide, sums = torch.promote_types(flat.dtype, torch.float32), total.numpy()
        for begin in range(0, len(flat), _WIDENED):
            terms = flat[begin : begin + _WIDENED].to(wide).numpy()
            for start in range(0, len(terms), _SLICE):
                part, at = terms[start : start + _SLICE], begin + start
                scaled = part * SCALE if rounded is None else rounded.part(torch.from_numpy(part), at).numpy()
                sums[at : at + _SLICE] += scaled.astype(np.int64)
        return
    fused = _fused_add(flat.device, flat.dtype) if rounded is None else None
    if fused is not None:
        fused(total, flat)
        return
    for start in range(0, len(flat), _DEVICE_SLICE):  # a matrix of GPT-3's would take 7 GB at once
        part = flat[start : start + _DEVICE_SLICE].to(torch.promote_types(flat.dtype, torch.float32))
        scaled = part * SCALE if rounded is None else rounded.part(part, start)
        total[start : start + _DEVICE_SLICE].add_(scaled.to(torch.int64))


_ADD = """
extern "C" __global__ void add_exact(long long *total, const FROM *term, int numel) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < numel) total[i] += (long long)(VALUE * SCALE);
}
"""
_VALUES = {
    torch.float32: ("float", "term[i]"),
    torch.bfloat16: ("unsigned short", "__int_as_float((int)term[i] << 16)"),
}
_THREADS = 256


@functools.cache
def _fused_add(
    device: torch.device, dtype: torch.dtype
) -> Callable[[torch.Tensor, torch.Tensor], None] | None:
    """`add_exact` of flat terms in one pass over memory, where torch takes three. None: not here."""
    if device.type != "cuda" or torch.version.cuda is None or dtype not in _VALUES:
        return None
    kind, value = _VALUES[dtype]
    source = _ADD.replace("FROM", kind).replace("VALUE", value).replace("SCALE", f"{SCALE}f")
    try:
        with torch.cuda.device(device):
            kernel = torch.cuda._compile_kernel(source, "add_exact")  # type: ignore[attr-defined]
    except (AttributeError, OSError, RuntimeError):  # another torch, or one without the compiler
        return None

    def add(total: torch.Tensor, flat: torch.Tensor) -> None:
        with torch.cuda.device(device):
            for start in range(0, len(flat), _DEVICE_SLICE):
                part = flat[start : start + _DEVICE_SLICE]
                blocks, into = -(-len(part) // _THREADS), total[start : start + len(part)]
                kernel(grid=(blocks, 1, 1), block=(_THREADS, 1, 1), args=[into, part, len(part)])

    return add


def to_float(total: torch.Tensor, dtype: torch.dtype, dropped: torch.Tensor | None = None) -> torch.Tensor:
    """The value of a sum, in `dtype`: two roundings, the same everywhere. Where `in_float64` is.

    `dropped`: as `Rounded` has them, if it is that of a weight whose gradients were rounded.
    """
    found = in_float64(total)
    if dropped is None:
        return (found / SCALE).to(dtype)
    return _by_block(found, _units(dropped.to(found.device), torch.float64)).to(dtype)


def in_float64(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers; on the host if the device has no such type."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()
