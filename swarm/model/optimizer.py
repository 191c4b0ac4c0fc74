"""AdamW, SGD and Muon on flat vectors: weights of version t + 1 from version t and the reduced gradient.

Element by element the arithmetic of torch.optim's (tested), in slices that stay in the cache: one pass over
memory instead of a dozen, and no temporary of the model's size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from swarm.manifest import OptimizerSpec, OptimizerTerms
from swarm.model.seeded_random import fractions, seed_of

_SLICE_CPU = 1 << 16
"""Elements: five float32 slices of this are 1.3 MB, less than an L2 cache of a server core."""
_SLICE_CUDA = 1 << 24
"""Elements: large enough to hide the launches, small enough (64 MB) to be no matter of memory."""


class ParameterGroup(NamedTuple):
    """A part of the flat vector whose weights are stepped alike."""

    start: int
    end: int
    terms: OptimizerTerms
    shape: torch.Size | None = None
    """Of a matrix of Muon's, which is a part of its own."""
    name: str = ""
    """Of a weight that is a part of its own."""


def parts_of(
    spec: OptimizerSpec, spans: Mapping[str, tuple[int, int, torch.Size]]
) -> tuple[ParameterGroup, ...]:
    """The vector in parts, in order; what lies between two weights belongs to the later one."""
    parts: list[ParameterGroup] = []
    for name, (start, end, shape) in spans.items():
        terms, last = spec.terms_of(name, len(shape)), parts[-1] if parts else None
        if terms.is_muon or spec.moments == "bfloat16":
            parts.append(ParameterGroup(start, end, terms, shape if terms.is_muon else None, name))
        elif last is not None and last.terms == terms:
            parts[-1] = last._replace(end=end)
        else:
            parts.append(ParameterGroup(last.end if last is not None else 0, end, terms))
    return tuple(part for part in parts if part.start < part.end)


def vector_layout(spec: OptimizerSpec, numel: int, dtype: torch.dtype) -> dict[str, tuple[int, torch.dtype]]:
    """The optimizer's vectors: name -> (length, dtype)."""
    if spec.moments == "bfloat16":
        dtype = torch.bfloat16
    if spec.name == "sgd":
        return {"momentum": (numel, dtype)} if spec.momentum else {}
    return {"exp_avg": (numel, dtype), "exp_avg_sq": (numel, dtype)}


MUON_BETA = 0.95
"""Of its mean of gradients, which looks a step ahead (Nesterov)."""
_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of an odd polynomial that brings all of 0 … 1 near 1 within five rounds (Jordan, 2024)."""
_ROUNDS = 5
_RMS = 0.2
"""Of an update of AdamW, about: so both take the same learning rate and decay (Liu et al., 2025)."""


def muon_update(mean: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """What Muon takes from a matrix, without the learning rate; `mean`, that of its gradients, is brought up
    to date.

    The mean gradient with all of its singular values near 1, in the dtype of the weights.
    """
    mean.lerp_(grad, 1.0 - MUON_BETA)
    found = grad.lerp(mean, MUON_BETA)
    rows, columns = found.shape
    found = found.T.contiguous() if rows > columns else found
    found /= torch.linalg.matrix_norm(found).clamp_(min=1e-7)
    a, b, c = _SCHULZ
    for _ in range(_ROUNDS):
        square = found @ found.T
        found = torch.addmm(found, torch.addmm(square, square, square, beta=b, alpha=c), found, beta=a)
    found = found.T.contiguous() if rows > columns else found
    return found.mul_(_RMS * math.sqrt(max(rows, columns)))


def moment_seed(seed: int, number: int, vector: str, weight: str) -> int:
    """Of how a moment of a weight is rounded after a step of the run with that seed; `number`: which."""
    return seed_of("moments", seed, number, vector, weight)


def to_bfloat16(numbers: torch.Tensor, seed: int, start: int) -> torch.Tensor:
    """float32 to bfloat16, rounded up or down in size at random, by how near it is to either: on average
    the number itself. `start` (even): the place of the first in its weight.

    To the nearest, a mean that a step changes by less than 1/256 of itself would never change.
    """
    drawn = fractions(seed, start, numbers.numel(), numbers.device).mul_(65536.0).to(torch.int32)
    return drawn.add_(numbers.view(torch.int32)).bitwise_and_(-65536).view(torch.float32).to(torch.bfloat16)


class FlatOptimizer:
    """The step of one stage."""

    def __init__(
        self, spec: OptimizerSpec, parts: Sequence[ParameterGroup], vectors: dict[str, torch.Tensor],
        device: torch.device, seed: int = 0,
    ) -> None:  # fmt: skip
        """`vectors`: the moments, as `vector_layout` has them, are among these. `seed`: the run's."""
        self._spec, self._parts, self._device, self._seed = spec, parts, device, seed
        self.vectors = vectors

    @torch.no_grad()
    def step(
        self, t: int, lr: float, old: torch.Tensor, new: torch.Tensor, grad: torch.Tensor, scale: float, *,
        number: int | None = None,
    ) -> None:  # fmt: skip
        """Write into `new` the weights after step `t` of this optimizer, from `old` (may be the same) and
        `scale * grad`, which is only read.

        `number`: by which chance knows the step, where that is another one.
        """
        self._number = t if number is None else number
        length = _SLICE_CUDA if self._device.type == "cuda" else _SLICE_CPU
        for whole in self._parts:
            rate, decay = lr * whole.terms.lr, whole.terms.decay
            update, size = self._sgd if self._spec.name == "sgd" else self._adamw, length
            if whole.shape is not None:
                update, size = self._muon, whole.end - whole.start
            for start in range(whole.start, whole.end, size):
                part = slice(start, min(start + size, whole.end))
                torch.mul(old[part], 1.0 - rate * decay, out=new[part])
                update(t, rate, whole, part, new[part], grad[part] * scale)

    def _moment(self, vector: str, part: slice) -> torch.Tensor:
        """What is computed with: the moment itself, or its numbers."""
        kept = self.vectors[vector][part]
        return kept.float() if kept.dtype == torch.bfloat16 else kept

    def _keep(self, vector: str, whole: ParameterGroup, part: slice, moment: torch.Tensor) -> None:
        kept = self.vectors[vector][part]
        if kept.dtype == torch.bfloat16:
            seed = moment_seed(self._seed, self._number, vector, whole.name)
            kept.copy_(to_bfloat16(moment.view(-1), seed, part.start - whole.start))

    def _adamw(
        self, t: int, lr: float, whole: ParameterGroup, part: slice, weights: torch.Tensor, grad: torch.Tensor
    ) -> None:
        spec = self._spec
        mean, square = self._moment("exp_avg", part), self._moment("exp_avg_sq", part)
        mean.lerp_(grad, 1.0 - spec.beta1)
        square.mul_(spec.beta2).addcmul_(grad, grad, value=1.0 - spec.beta2)
        correction1, correction2 = 1.0 - spec.beta1 ** (t + 1), 1.0 - spec.beta2 ** (t + 1)
        root = square.sqrt().div_(math.sqrt(correction2)).add_(spec.eps)
        weights.addcdiv_(mean, root, value=-lr / correction1)
        self._keep("exp_avg", whole, part, mean)
        self._keep("exp_avg_sq", whole, part, square)

    def _muon(
        self, t: int, lr: float, whole: ParameterGroup, part: slice, weights: torch.Tensor, grad: torch.Tensor
    ) -> None:
        assert whole.shape is not None
        mean = self._moment("exp_avg", part).view(whole.shape)
        weights.view(whole.shape).add_(muon_update(mean, grad.view(whole.shape)), alpha=-lr)
        self._keep("exp_avg", whole, part, mean)

    def _sgd(
        self, t: int, lr: float, whole: ParameterGroup, part: slice, weights: torch.Tensor, grad: torch.Tensor
    ) -> None:
        if self._spec.momentum:
            grad = self._moment("momentum", part).mul_(self._spec.momentum).add_(grad)
            self._keep("momentum", whole, part, grad)
        weights.add_(grad, alpha=-lr)
