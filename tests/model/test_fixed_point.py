"""Sums that do not depend on the order of their terms."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import SetupError
from swarm.manifest import audit_run
from swarm.model.fixed_point import BITS, add_exact, in_float64, largest_term, to_float
from swarm.model.stage import StageCompute


def summed(terms: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(terms[0].numel(), dtype=torch.int64)
    for term in terms:
        add_exact(total, term)
    return total


@given(seed=st.integers(0, 2**32), count=st.integers(1, 40), spread=st.integers(0, 12))
def test_any_order_gives_the_same_bits(seed: int, count: int, spread: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    terms = [torch.randn(7, generator=draw) * 10.0 ** -(i % (spread + 1)) for i in range(count)]
    order = torch.randperm(count, generator=draw).tolist()
    assert torch.equal(summed(terms), summed([terms[i] for i in order]))


@given(seed=st.integers(0, 2**32))
def test_taking_a_term_out_again_leaves_no_trace(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    a, b = torch.randn(50_000, generator=draw), torch.randn(50_000, generator=draw) * 1e-6
    assert torch.equal(summed([a, b, -a]), summed([b]))


def test_the_value_is_that_of_the_float64_sum_to_float32_precision() -> None:
    draw = torch.Generator().manual_seed(1)
    terms = [torch.randn(1000, generator=draw) for _ in range(64)]
    expected = torch.stack(terms).double().sum(0)
    assert torch.allclose(to_float(summed(terms), torch.float64), expected, rtol=0, atol=64 * 2.0**-BITS)
    assert to_float(summed(terms), torch.float32).dtype == torch.float32


@pytest.mark.parametrize("microbatches", [1, 16, 8192])
def test_a_whole_step_of_the_largest_terms_fits(microbatches: int) -> None:
    largest = torch.tensor([largest_term(microbatches)])
    total = torch.zeros(1, dtype=torch.int64)
    for _ in range(microbatches):
        add_exact(total, largest)
    assert to_float(total, torch.float64).item() == largest.item() * microbatches


def test_a_device_without_float64_has_its_host_compute_that() -> None:
    class OnMps:
        device = torch.device("mps")

        def cpu(self) -> torch.Tensor:
            return torch.ones(3)

    found = in_float64(OnMps())  # type: ignore[arg-type]
    assert (found.dtype, found.device.type) == (torch.float64, "cpu")
    with pytest.raises(SetupError, match=r"float64.* cannot be computed on --device mps"):
        StageCompute(audit_run(), 0, "mps")
