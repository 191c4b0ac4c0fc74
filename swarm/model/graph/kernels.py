"""Replacements for the few operators that a stage must not run as they are: random ones and writes in place.

All take and return tensors, have no state, and are differentiable by autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from swarm.ids import Microbatch
from swarm.model.seeded_random import dropped, seed_of, words


@dataclass(frozen=True, slots=True)
class SeededRandom:
    seed: int
    """The run's."""
    mb: Microbatch | None
    """None: nothing is dropped, and what is drawn else is the same each time."""

    def drop(self, x: torch.Tensor, p: float, site: str) -> torch.Tensor:
        """`x` with each element zeroed with probability `p`, the others scaled by 1 / (1 - p)."""
        if p == 1.0 and self.mb is not None:
            return x * 0.0
        return dropped(x, site, p=p, seed=self.seed, mb=self.mb)

    def words(self, form: torch.Tensor, site: str, each: int = 1) -> torch.Tensor:
        """Words of 32 bits, as int64, of the shape of `form`; with `each`, so many of that shape."""
        name = ("evaluation",) if self.mb is None else (self.mb.t, self.mb.m)
        found = words(seed_of("draws", self.seed, *name, site), 0, each * form.numel(), form.device)
        return found.view([*([each] if each > 1 else []), *form.shape])


def dropout(chance: SeededRandom, x: torch.Tensor, p: float, *, site: str) -> torch.Tensor:
    """aten.dropout in training."""
    return chance.drop(x, p, site)


def feature_dropout(chance: SeededRandom, x: torch.Tensor, p: float, *, site: str) -> torch.Tensor:
    """aten.feature_dropout in training, [N, C, ..]: whole channels are dropped."""
    ones = torch.ones((*x.shape[:2], *(1 for _ in x.shape[2:])), dtype=x.dtype, device=x.device)
    return x * chance.drop(ones, p, site)


def attention(
    chance: SeededRandom, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    mask: torch.Tensor | None = None, p: float = 0.0, causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False, site: str,
) -> torch.Tensor:  # fmt: skip
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
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, running_mean: torch.Tensor,
    running_var: torch.Tensor, eps: float, cudnn: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """aten.batch_norm in training: (output, mean, unbiased variance of the microbatch).

    The buffers lend their form only. With a momentum of 1 torch's own update gives its statistics.
    """
    mean, var = torch.zeros_like(running_mean), torch.zeros_like(running_var)
    return torch.ops.aten.batch_norm.default(x, weight, bias, mean, var, True, 1.0, eps, cudnn), mean, var


def uniform(
    chance: SeededRandom, form: torch.Tensor, low: float = 0.0, high: float = 1.0, *, site: str
) -> torch.Tensor:
    """Numbers from `low` to below `high`. Of each draw the form of a tensor counts, not its numbers."""
    bits = _BITS.get(form.dtype, 24)  # that no number is rounded up to `high`
    fraction = (chance.words(form, site) >> (32 - bits)).to(form.dtype) * 2.0**-bits
    return fraction if (low, high) == (0.0, 1.0) else fraction * (high - low) + low


def normal(
    chance: SeededRandom, form: torch.Tensor, mean: float = 0.0, std: float = 1.0, *, site: str
) -> torch.Tensor:
    """Bell-shaped numbers, by Box and Muller's way; none is further off than 5.9 `std`."""
    one, other = _open(chance.words(form, site, each=2))
    bell = (-2.0 * one.log()).sqrt() * torch.cos(2.0 * math.pi * other)
    return (bell * std + mean).to(form.dtype)


def exponential(chance: SeededRandom, form: torch.Tensor, rate: float = 1.0, *, site: str) -> torch.Tensor:
    """Exponentially distributed numbers, above 0."""
    return (_open(chance.words(form, site)).log() / -rate).to(form.dtype)


def bernoulli(
    chance: SeededRandom, form: torch.Tensor, p: float | torch.Tensor = 0.5, *, site: str
) -> torch.Tensor:
    """1 with probability `p`, else 0; in an evaluation `p`, so that what is divided by it drops nothing."""
    if chance.mb is None and form.dtype.is_floating_point:
        return (
            p.to(form.dtype).expand(form.shape) if isinstance(p, torch.Tensor) else torch.full_like(form, p)
        )
    least = (p.to(_wide(form.device)) if isinstance(p, torch.Tensor) else p) * 2.0**32
    return (chance.words(form, site) < least).to(form.dtype)


def integers(chance: SeededRandom, form: torch.Tensor, low: int, high: int, *, site: str) -> torch.Tensor:
    """Whole numbers from `low` to below `high`."""
    return (chance.words(form, site) % (high - low) + low).to(form.dtype)


KINDS: dict[str, Callable[..., torch.Tensor]] = {
    draw.__name__: draw
    for draw in (uniform, normal, exponential, bernoulli, integers, dropout, feature_dropout)
}
"""By name, since calls have no functions in their arguments."""
_BITS = {torch.bfloat16: 8, torch.float16: 11}


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _open(words: torch.Tensor) -> torch.Tensor:
    """Fractions whose logarithm is finite."""
    return ((words >> 8).to(_wide(words.device)) + 0.5) * 2.0**-24


def draw(
    chance: SeededRandom, shape: Sequence[int], dtype: torch.dtype, device: torch.device, kind: str,
    *others: Any, site: str,
) -> torch.Tensor:  # fmt: skip
    """A new tensor of such numbers."""
    return KINDS[kind](chance, torch.empty(shape, dtype=dtype, device=device), *others, site=site)


Views: TypeAlias = Sequence[tuple[Callable[..., Any] | None, Sequence[Any], dict[str, Any]]]
"""They lead to a part of a tensor: (operator, its other arguments, its keywords); None for one of several
that a view gives."""


def draw_through(
    chance: SeededRandom, whole: torch.Tensor, views: Views, kind: str, *others: Any, site: str
) -> torch.Tensor:
    """As `write_through`: such numbers are written to the part."""
    whole = whole.clone()
    part = _part(whole, views)
    part.copy_(KINDS[kind](chance, part, *others, site=site))
    return whole


def write_through(
    whole: torch.Tensor, views: Views, op: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> torch.Tensor:
    """A copy of `whole`, to a part of which `op` has written in place."""
    whole = whole.clone()
    op(_part(whole, views), *args, **kwargs)
    return whole


def _part(whole: torch.Tensor, views: Views) -> torch.Tensor:
    part: Any = whole
    for view, others, keywords in views:
        part = part[others[0]] if view is None else view(part, *others, **keywords)
    return part


def plain(op: Callable[..., Any]) -> Callable[..., Any]:
    """Takes the device and the arguments of `op`, and calls it without autocast, as the model asked for."""

    def run(device: torch.device, /, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, enabled=False):
            return op(*args, **kwargs)

    return run
