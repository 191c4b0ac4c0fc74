"""Products of sums: honest results always fit, others do not, and coefficients are the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from swarm.audit.projection import MODULUS, coefficients, fits, product, reduced_of
from swarm.model.fixed_point import SCALE
from swarm.wire.codec import chunk_digest

SEED = b"all nonces"


def contributions(kind: str, numel: int, members: int, seed: int) -> list[torch.Tensor]:
    """Fixed-point sums as they come, and as somebody would choose them."""
    rng = np.random.default_rng(seed)
    match kind:
        case "gradients":
            values = rng.standard_normal((members, numel)) * 1e-3
        case "wide":  # 25 orders of magnitude beside each other
            values = rng.standard_normal((members, numel)) * 10.0 ** rng.uniform(-13, 4, (members, numel))
        case "cancel":  # all but the last bits of what two of them send
            values = rng.standard_normal((members, numel)) * 1e-3
            values[1] = -values[0] + 1e-12
        case "halves":  # every rounding is the largest there is
            values = (2.0**24 + 1) * np.ones((members, numel)) * 2.0**-40 / members
        case "largest":
            values = np.full((members, numel), 2.0**17 / members)
    return [torch.from_numpy((row * SCALE).astype(np.int64)) for row in values]


def expected_of(parts: list[torch.Tensor], numel: int) -> int:
    r = coefficients(SEED, 0, 0, numel)
    return sum(product(part, r) for part in parts) % MODULUS


@pytest.mark.parametrize("kind", ["gradients", "wide", "cancel", "halves", "largest"])
@pytest.mark.parametrize("numel", [1, 7, 1000, 40_000])
def test_an_honest_result_fits_unless_it_is_so_large_that_products_tell_little(kind: str, numel: int) -> None:
    for seed in range(40):
        parts = contributions(kind, numel, 3, seed)
        result = reduced_of(parts, rounded=False)
        is_large = result.double().norm() > 2.0**15  # of such a one nobody is sure
        assert fits(result, coefficients(SEED, 0, 0, numel), expected_of(parts, numel)) is not bool(is_large)


@pytest.mark.parametrize("kind", ["gradients", "wide", "largest"])
def test_a_rounded_sum_fits_to_the_last_bit_or_not(kind: str) -> None:
    parts = contributions(kind, 1000, 3, 1)
    result, r = reduced_of(parts, rounded=True), coefficients(SEED, 0, 0, 1000)
    assert result.dtype == torch.int64 and fits(result, r, expected_of(parts, 1000))
    for at in range(1000):
        lie = result.clone()
        lie[at] += 1
        assert not fits(lie, r, expected_of(parts, 1000))


@pytest.mark.parametrize("numel", [1, 7, 1000, 40_000])
@pytest.mark.parametrize(
    "lie", ["sign", "zero", "times 100", "one element", "a thousandth", "infinite", "nan", "huge", "largest"]
)
def test_another_result_does_not(lie: str, numel: int) -> None:
    missed = 0
    for seed in range(40):
        parts = contributions("gradients", numel, 3, seed)
        result = reduced_of(parts, rounded=False)
        match lie:
            case "sign":
                result = -result
            case "zero":
                result = torch.zeros_like(result)
            case "times 100":
                result *= 100
            case "one element":
                result[numel // 2] += 1e-3
            case "a thousandth":
                result += 1e-3 * result.norm() * torch.randn(numel) / numel**0.5
            case "infinite":
                result[0] = float("inf")
            case "nan":
                result[-1] = float("nan")
            case "huge":  # the rounding of so large a number is more than 2^64 units
                result[0] = 1e15
            case "largest":
                result[0] = torch.finfo(torch.float32).max
        missed += fits(result, coefficients(SEED, 0, 0, numel), expected_of(parts, numel))
    assert missed <= (2 if lie == "a thousandth" else 0)


def test_what_is_moved_from_one_element_to_another_is_found() -> None:
    """With coefficients of 8 bits two of them were alike once in 128 times, however large the lie."""
    r = coefficients(SEED, 0, 0, 4000)
    for at in range(0, 4000, 2):
        result = torch.tensor([0.5, 1.5], dtype=torch.float32)
        assert not fits(result, r[at : at + 2], product(torch.tensor([int(SCALE)] * 2), r[at : at + 2]))


def test_products_are_exact_whatever_the_size_of_the_numbers() -> None:
    numbers = [2**62, -(2**62), 2**62 - 1, -(2**63), 2**63 - 1, 1, -1, 0]
    r = coefficients(SEED, 1, 2, len(numbers))
    exact = sum(int(a) * b for a, b in zip(r, numbers, strict=True)) % MODULUS
    assert product(torch.tensor(numbers), r) == exact


def test_coefficients_are_odd_differ_by_chunk_and_stay_what_they_are() -> None:
    r = coefficients(SEED, 0, 0, 100_003)
    assert (r % 2 != 0).all() and abs(r.astype(int)).max() == 32767
    assert abs(r.mean()) < 250.0
    for other in (coefficients(SEED, 0, 1, 100), coefficients(SEED, 1, 0, 100), coefficients(b"", 0, 0, 100)):
        assert (other != r[:100]).mean() > 0.9
    # Peers with another one would find liars everywhere.
    assert chunk_digest(torch.from_numpy(r)).hex()[:16] == "28144fc668b607ba"
