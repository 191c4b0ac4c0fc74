"""Single values that stand for a whole vector: its squared norm, and its digests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from swarm.digest import digest_of
from swarm.model.fixed_point import in_float64
from swarm.wire.codec import bytes_of

_ROW = 1 << 16
"""Squares that are added up at once: a fixed number, since it decides the rounding."""
_ON_HOST, _ON_DEVICE = 1 << 18, 1 << 22
"""Elements that are in work at once: few enough for a cache, and enough for a GPU."""


def sqnorm(vector: torch.Tensor, device: torch.device | None = None) -> float:
    """The sum of squares, in float64 whatever the dtype: a stage's share of `total_sqnorm`.

    A function of the numbers alone: halves are added to each other until one number is left, which all
    devices do alike. `device`: that computes it; None: the vector's.
    """
    device = vector.device if device is None else device
    parts = vector.split(_ON_HOST if device.type == "cpu" else _ON_DEVICE)
    total = torch.cat([_halved(_squares(part.to(device))) for part in parts])
    while len(total) > 1:
        total = _halved(total)
    return float(total.sum())


def _squares(part: torch.Tensor) -> torch.Tensor:
    wide = in_float64(part)
    return wide.square() if wide is part else wide.square_()  # in fresh memory it takes twice as long


def _halved(numbers: torch.Tensor) -> torch.Tensor:
    """The sum of each row of `_ROW` numbers; the last is as long as it has to be. Overwrites them."""
    width = min(_ROW, 1 << (len(numbers) - 1).bit_length())
    lacking = -len(numbers) % width
    rows = (torch.nn.functional.pad(numbers, (0, lacking)) if lacking else numbers).view(-1, width)
    while width > 1:
        width //= 2
        rows[:, :width] += rows[:, width : 2 * width]
    return rows[:, 0]


def add_tensor(digest: Any, name: str, tensor: torch.Tensor) -> None:
    """Have a hash of `hashlib` go over a tensor and what it is."""
    digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
    digest.update(bytes_of(tensor) if tensor.numel() else b"")


def vectors_digest(vectors: Iterable[torch.Tensor], *, on_device: bool) -> str:
    """32 hex digits over the bits of all vectors, one after the other.

    `on_device`: of their `device_digest`s instead, so that no vector of a GPU is copied to the host.
    """
    if on_device:
        digests = list(map(device_digest, vectors))
        return digests[0] if len(digests) == 1 else digest_of("".join(digests).encode()).hex()[:32]
    return digest_of(*map(bytes_of, vectors)).hex()[:32]


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
    size = _ON_HOST if words.device.type == "cpu" else _ON_DEVICE
    for number, part in enumerate(words.split(size)):
        place = torch.arange(part.numel(), device=part.device, dtype=torch.int64) + number * size
        for i, factor in enumerate((0x9E3779B97F4A7C1, 0x2545F4914F6CDD1D)):
            sums[i] += (part.to(torch.int64) * ((place * factor) | 1)).sum()
    return "".join(f"{total % 2**64:016x}" for total in sums.tolist())
