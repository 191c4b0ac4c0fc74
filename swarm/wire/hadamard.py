"""Four bits a number, after blocks were rotated so that an outlier is shared by all of its block.

A block of 256 numbers is multiplied by the Hadamard matrix of that size (all entries 1 or -1, over 16; its
own inverse), as TAH-Quant does with smaller tiles (arXiv 2506.01352). What comes is nearly normal whatever
the block held, so 15 equal steps from the negative of its largest magnitude to that magnitude serve it well:
the error of a block is 0.12 of its norm. The last block is filled up with zeros.

A rotation is sums and differences of pairs, without a product that a device could fuse: all devices give the
same bytes.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from swarm.wire.tensor_meta import BLOCK

_ROOT = math.isqrt(BLOCK)
"""No number of a rotated block is larger than so many times the largest before."""
MAX_SCALE = torch.finfo(torch.bfloat16).max / (2 * _ROOT)
"""What comes of numbers with this scale is finite in every dtype, whatever their bytes are."""
MAX_NUMBER = MAX_SCALE / _ROOT
_STEPS = 7
"""Of either sign. A number travels as its step plus 8."""


def quantize(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Floats [N], none above MAX_NUMBER -> (uint8, two numbers a byte; float32, a scale a block)."""
    blocks = -(-flat.numel() // BLOCK)
    padded = functional.pad(flat.float(), (0, blocks * BLOCK - flat.numel()))
    x = _rotated(padded.view(blocks, BLOCK).t())
    scales = x.abs().amax(0)
    steps = x.div_(torch.where(scales > 0, scales, 1.0)).mul_(_STEPS).round_().add_(8)
    low, high = steps.to(torch.uint8).chunk(2)
    return (low | high << 4).t().contiguous().view(-1), scales


def dequantize(quantized: torch.Tensor, scales: torch.Tensor, numel: int) -> torch.Tensor:
    """The numbers, nearly: float32 [numel]. `scales`: none above MAX_SCALE."""
    both = quantized.view(-1, BLOCK // 2).t()
    steps = torch.cat([both & 15, both >> 4]).float().sub_(8)
    # A GPU divides by a Python number by multiplying with its reciprocal, which rounds another way.
    return _rotated(steps.mul_(scales / torch.full_like(scales, _STEPS))).t().reshape(-1)[:numel]


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """The rotation of each column of [BLOCK, blocks], in new memory."""
    here = x.contiguous() / _ROOT
    there = torch.empty_like(here)
    for half in range(BLOCK.bit_length() - 1):
        old, new = (y.view(BLOCK >> half + 1, 2, x.shape[1] << half) for y in (here, there))
        torch.add(old[:, 0], old[:, 1], out=new[:, 0])
        torch.sub(old[:, 0], old[:, 1], out=new[:, 1])
        here, there = there, here
    return here
