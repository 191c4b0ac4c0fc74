"""The digest that a GPU computes on itself, checked on the CPU."""

from __future__ import annotations

import torch

from swarm.model.reductions import device_digest


def test_a_change_of_any_bit_or_of_the_order_changes_the_digest() -> None:
    vector = torch.arange(3_000_000, dtype=torch.float32)
    digest = device_digest(vector)
    assert len(digest) == 32 and digest == device_digest(vector.clone())
    for index in (0, 1_048_576, 2_999_999):
        other = vector.clone()
        other[index] = torch.nextafter(other[index], torch.tensor(1e9))
        assert device_digest(other) != digest
    assert device_digest(vector.flip(0)) != digest


def test_any_float_dtype_has_a_digest() -> None:
    ones, zeros = torch.ones(8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)
    assert device_digest(ones) != device_digest(zeros)
