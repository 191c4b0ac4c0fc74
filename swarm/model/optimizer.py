"""AdamW and SGD on flat vectors: weights of version t + 1 from version t and the reduced gradient.

Element by element the arithmetic of torch.optim's (tested), in slices that stay in the cache: one pass over
memory instead of a dozen, and no temporary of the model's size.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from swarm.errors import SetupError
from swarm.manifest import OptimizerSpec

_SLICE_CPU = 1 << 16
"""Elements: five float32 slices of this are 1.3 MB, less than an L2 cache of a server core."""
_SLICE_CUDA = 1 << 24
"""Elements: large enough to hide the launches, small enough (64 MB) to be no matter of memory."""
_BLOCK_8BIT = 256
"""bitsandbytes' own block of its 8-bit optimizers."""


def vector_layout(
    spec: OptimizerSpec, numel: int, decayed: int, dtype: torch.dtype
) -> dict[str, tuple[int, torch.dtype]]:
    """The optimizer's vectors: name -> (length, dtype)."""
    if spec.name == "adamw":
        return {"exp_avg": (numel, dtype), "exp_avg_sq": (numel, dtype)}
    if spec.name == "sgd":
        return {"momentum": (numel, dtype)} if spec.momentum else {}
    blocks = sum(-(-part // _BLOCK_8BIT) for part in (decayed, numel - decayed))
    return {
        "exp_avg": (numel, torch.uint8),
        "exp_avg_sq": (numel, torch.uint8),
        "exp_avg_scale": (blocks, torch.float32),
        "exp_avg_sq_scale": (blocks, torch.float32),
    }


class FlatOptimizer:
    """The moments of one stage, and the step. `vectors` is its whole state, by name."""

    def __init__(
        self, spec: OptimizerSpec, numel: int, decayed: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """The first `decayed` of the `numel` weights decay: those with 2 or more dimensions.

        Raises:
            SetupError: adamw8bit without CUDA.
        """
        self._spec, self._decayed, self._numel, self._device = spec, decayed, numel, device
        if spec.name == "adamw8bit":
            if device.type != "cuda":
                raise SetupError(
                    'optimizer.name = "adamw8bit" needs a CUDA device, and this peer computes on '
                    f'{device.type}: join with a GPU, or join a run whose optimizer is "adamw"'
                )
            # Bytes of 0 are not numbers of 0, but blocks of scale 0 are.
            self._codes = [_dynamic_map(signed).to(device) for signed in (True, False)]
        self.vectors: dict[str, torch.Tensor] = {
            name: torch.zeros(length, dtype=kind, device=device)
            for name, (length, kind) in vector_layout(spec, numel, decayed, dtype).items()
        }

    def _parts(self) -> list[tuple[int, int, float]]:
        """(start, end, weight decay) of the two parts of the flat vector; empty ones left out."""
        parts = [(0, self._decayed, self._spec.weight_decay), (self._decayed, self._numel, 0.0)]
        return [part for part in parts if part[0] < part[1]]

    @torch.no_grad()
    def step(
        self, t: int, lr: float, old: torch.Tensor, new: torch.Tensor, grad: torch.Tensor, scale: float
    ) -> None:
        """Write into `new` the weights after step `t`, from `old` (may be the same) and `scale * grad`.

        `grad` is only read.
        """
        length = _SLICE_CUDA if self._device.type == "cuda" else _SLICE_CPU
        update = self._adamw if self._spec.name == "adamw" else self._sgd
        block = 0
        for first, last, decay in self._parts():
            for start in range(first, last, length):
                part = slice(start, min(start + length, last))
                if self._spec.name == "adamw8bit":
                    blocks = slice(block, block + -(-(part.stop - start) // _BLOCK_8BIT))
                    block = blocks.stop
                    if new is not old:
                        new[part].copy_(old[part])
                    self._adamw_8bit(t, lr, part, blocks, new[part], grad[part], scale, decay)
                    continue
                torch.mul(old[part], 1.0 - lr * decay, out=new[part])
                update(t, lr, part, new[part], grad[part] * scale)

    def _adamw(self, t: int, lr: float, part: slice, weights: torch.Tensor, grad: torch.Tensor) -> None:
        spec = self._spec
        mean, square = self.vectors["exp_avg"][part], self.vectors["exp_avg_sq"][part]
        mean.lerp_(grad, 1.0 - spec.beta1)
        square.mul_(spec.beta2).addcmul_(grad, grad, value=1.0 - spec.beta2)
        correction1, correction2 = 1.0 - spec.beta1 ** (t + 1), 1.0 - spec.beta2 ** (t + 1)
        root = square.sqrt().div_(math.sqrt(correction2)).add_(spec.eps)
        weights.addcdiv_(mean, root, value=-lr / correction1)

    def _sgd(self, t: int, lr: float, part: slice, weights: torch.Tensor, grad: torch.Tensor) -> None:
        if self._spec.momentum:
            grad = self.vectors["momentum"][part].mul_(self._spec.momentum).add_(grad)
        weights.add_(grad, alpha=-lr)

    def _adamw_8bit(
        self,
        t: int,
        lr: float,
        part: slice,
        blocks: slice,
        weights: torch.Tensor,
        grad: torch.Tensor,
        scale: float,
        decay: float,
    ) -> None:
        from bitsandbytes import functional

        spec, vectors = self._spec, self.vectors
        update: Any = functional.optimizer_update_8bit_blockwise
        update(
            "adam", grad, weights, vectors["exp_avg"][part], vectors["exp_avg_sq"][part],
            spec.beta1, spec.beta2, 0.0, 0.0, spec.eps, t + 1, lr, *self._codes,
            vectors["exp_avg_scale"][blocks], vectors["exp_avg_sq_scale"][blocks],
            decay, gnorm_scale=scale, skip_zeros=False,
        )  # fmt: skip


def _dynamic_map(signed: bool) -> torch.Tensor:
    """bitsandbytes' map of a byte for the first (signed) and the second moment."""
    from bitsandbytes.functional import create_dynamic_map

    return create_dynamic_map(signed=signed)
