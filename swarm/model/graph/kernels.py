"""Replacements for the few operators that a stage must not run as they are: random ones and writes in place.

All take and return tensors, have no state, and are differentiable by autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swarm.ids import Microbatch
from swarm.model.seeded_random import Dropout


@dataclass(frozen=True, slots=True)
class SeededRandom:
    """The random numbers of one microbatch."""

    seed: int
    """The run's."""
    mb: Microbatch | None
    """None: nothing is dropped."""

    def drop(self, x: torch.Tensor, p: float, site: str) -> torch.Tensor:
        """`x` with each element zeroed with probability `p`, the others scaled by 1 / (1 - p)."""
        if self.mb is None:
            return x
        return Dropout(self.seed, self.mb, p)(x, site) if p < 1.0 else x * 0.0


def dropout(chance: SeededRandom, x: torch.Tensor, p: float, *, site: str) -> torch.Tensor:
    """aten.dropout in training."""
    return chance.drop(x, p, site)


def feature_dropout(chance: SeededRandom, x: torch.Tensor, p: float, *, site: str) -> torch.Tensor:
    """aten.feature_dropout in training, [N, C, ..]: whole channels are dropped."""
    ones = torch.ones((*x.shape[:2], *(1 for _ in x.shape[2:])), dtype=x.dtype, device=x.device)
    return x * chance.drop(ones, p, site)


def attention(
    chance: SeededRandom,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    p: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    site: str,
) -> torch.Tensor:
    """aten.scaled_dot_product_attention with dropout, [.., L, E], [.., S, E], [.., S, D] -> [.., L, D].

    Written out, since fused kernels draw their dropout from generators of their own.
    """
    L, S = q.shape[-2], k.shape[-2]
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        mask = torch.ones((L, S), dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return chance.drop(torch.ops.aten._safe_softmax(scores, -1), p, site) @ v


def batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    eps: float,
    cudnn: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """aten.batch_norm in training: (output, mean, unbiased variance of the microbatch).

    The buffers lend their form only. With a momentum of 1 torch's own update gives its statistics.
    """
    mean, var = torch.zeros_like(running_mean), torch.zeros_like(running_var)
    y = torch.ops.aten.batch_norm.default(x, weight, bias, mean, var, True, 1.0, eps, cudnn)
    return y, mean, var


def write_through(
    whole: torch.Tensor,
    views: Sequence[tuple[Callable[..., Any] | None, Sequence[Any], dict[str, Any]]],
    op: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """A copy of `whole`, to a part of which `op` has written in place; `views` lead to that part.

    Each view is (operator, its other arguments, its keywords); None for one of several that a view gives.
    """
    whole = whole.clone()
    part: Any = whole
    for view, others, keywords in views:
        part = part[others[0]] if view is None else view(part, *others, **keywords)
    op(part, *args, **kwargs)
    return whole


def plain(op: Callable[..., Any]) -> Callable[..., Any]:
    """Takes the device and the arguments of `op`, and calls it without autocast, as the model asked for."""

    def run(device: torch.device, /, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, enabled=False):
            return op(*args, **kwargs)

    return run
