"""Single values that stand for a whole vector: its squared norm, and its digests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from swarm.digest import digest_of
from swarm.model.fixed_point import in_float64
from swarm.wire.codec import bytes_of

_SLICE = 1 << 20
"""Elements that are reduced at once: a fixed number, since it decides the rounding."""
_ROW = 1 << 10
"""Of which each row is summed by itself: `_SLICE` holds few enough that one thread adds the rows."""


def sqnorm(vector: torch.Tensor) -> float:
    """The sum of squares, in float64 whatever the dtype: a stage's share of `total_sqnorm`.

    Replicas with the same bits get the same number on the same kind of device, whatever their thread counts.
    """
    return float(sum(_sum_of_squares(part) for part in vector.split(_SLICE)))


def _sum_of_squares(part: torch.Tensor) -> float:
    """torch shares one long sum among its threads, which decides its rounding; a row is one thread's."""
    squares = in_float64(part).square()
    whole = squares.numel() - squares.numel() % _ROW
    rows = squares[:whole].view(-1, _ROW).sum(dim=1)
    return float((rows.sum() + squares[whole:].sum()).item())


def add_tensor(digest: Any, name: str, tensor: torch.Tensor) -> None:
    """Have a hash of `hashlib` go over a tensor and what it is."""
    digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
    digest.update(bytes_of(tensor) if tensor.numel() else b"")


def vectors_digest(vectors: Iterable[torch.Tensor], *, on_device: bool) -> str:
    """32 hex digits over the bits of all vectors, one after the other.

    `on_device`: of their `device_digest`s instead, so that no vector of a GPU is copied to the host.
    """
    found = list(vectors)
    if on_device:
        digests = [device_digest(vector) for vector in found]
        return digests[0] if len(digests) == 1 else digest_of("".join(digests).encode()).hex()[:32]
    return digest_of(*map(bytes_of, found)).hex()[:32]


def state_digest(state: Mapping[str, torch.Tensor], *, whole: bool = True) -> str:
    """What a replica says of a state. `whole`: of all vectors. Else of those that decide what microbatches of
    the next step give, comparable among devices of one kind only, and on a GPU computed there: bringing
    gigabytes to the host at every step would cost more than the step.
    """
    names = sorted(state) if whole else [name for name in _NEXT_STEP if name in state]
    on_device = not whole and state["weights"].device.type != "cpu"
    return vectors_digest([state[name] for name in names], on_device=on_device)


_NEXT_STEP = ("weights", "statistics", "dropped_bits")


def device_digest(vector: torch.Tensor) -> str:
    """32 hex digits from two sums modulo 2^64 over the bits, weighted by position; on the vector's device.

    Finds accidents, not forgeries: a change of any one element changes both sums.
    """
    flat = vector.detach().contiguous().view(-1)
    words = flat.view({1: torch.int8, 2: torch.int16}.get(flat.element_size(), torch.int32))
    sums = torch.zeros(2, dtype=torch.int64, device=words.device)
    for number, part in enumerate(words.split(_SLICE)):
        place = torch.arange(part.numel(), device=part.device, dtype=torch.int64) + number * _SLICE
        for i, factor in enumerate((0x9E3779B97F4A7C1, 0x2545F4914F6CDD1D)):
            sums[i] += (part.to(torch.int64) * ((place * factor) | 1)).sum()
    return "".join(f"{total % 2**64:016x}" for total in sums.tolist())
