"""Sums that do not depend on the order of their terms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import SetupError
from swarm.ids import Microbatch
from swarm.manifest import IslandsSpec, audit_run
from swarm.model import fixed_point
from swarm.model.fixed_point import (
    BITS,
    BLOCK,
    MOST_DROPPED,
    Rounded,
    add_exact,
    blocks_of,
    dropped_after,
    in_float64,
    largest_norm,
    largest_term,
    to_float,
)
from swarm.model.seeded_random import fractions, words
from swarm.model.stage import StageCompute

RUN = audit_run()
CPU = torch.device("cpu")


def summed(terms: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(terms[0].numel(), dtype=torch.int64)
    for term in terms:
        add_exact(total, term)
    return total


def rounded(m: int, dropped: torch.Tensor, *, t: int = 0, name: str = "layers.0.up") -> Rounded:
    return Rounded.of(RUN, Microbatch(t, m), name, dropped)


def test_a_narrow_gradient_is_added_as_the_same_numbers_made_wide() -> None:
    narrow = (torch.randn(300, 500) * torch.logspace(-12, 3, 500)).to(torch.bfloat16)
    sums = [torch.zeros(narrow.numel(), dtype=torch.int64) for _ in range(2)]
    add_exact(sums[0], narrow)
    add_exact(sums[1], narrow.float())
    assert torch.equal(*sums) and sums[0].any()
    norm = largest_norm(narrow)
    assert norm.dtype == torch.float32 and norm >= narrow.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_number_is_cut_to_whole_units_wherever_it_lies_in_a_gradient(dtype: torch.dtype) -> None:
    more_than_is_widened_at_once = (1 << 19) + (1 << 16) + 1
    term = torch.randn(more_than_is_widened_at_once) * torch.logspace(-16, 3, more_than_is_widened_at_once)
    term = term.to(dtype)
    assert torch.equal(summed([term]), (term.double() * 2.0**BITS).to(torch.int64))
    dropped = torch.randint(0, MOST_DROPPED, (blocks_of(len(term)),)).to(torch.uint8)
    how, sums = rounded(0, dropped), torch.zeros(len(term), dtype=torch.int64)
    add_exact(sums, term, how)
    assert torch.equal(sums, how.part(term.float(), 0).to(torch.int64))


def test_a_kernel_is_given_the_numbers_of_a_gradient_one_behind_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Autograd's gradient of a sum is one number expanded, and that of a stack every other one of it."""
    weight, other = (torch.nn.Parameter(torch.ones(7, device="meta")) for _ in range(2))
    (of_sum,) = torch.autograd.grad(weight.sum(), weight)
    (of_stack,) = torch.autograd.grad(torch.stack([weight, other], 1).square().sum(), weight)
    assert (of_sum.stride(), of_stack.stride()) == ((0,), (2,))
    given = list[torch.Tensor]()
    monkeypatch.setattr(fixed_point, "_fused_add", lambda *_: lambda _, flat: given.append(flat))
    for term in (of_sum, of_stack):
        add_exact(torch.empty(7, dtype=torch.int64, device="meta"), term)
    assert [flat.stride() for flat in given] == [(1,), (1,)]


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


@given(seed=st.integers(0, 2**32), numel=st.integers(1, 3 * BLOCK), numbers=st.integers(1, 12))
def test_rounded_sums_have_no_order_and_what_is_taken_out_leaves_no_trace(
    seed: int, numel: int, numbers: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    terms = [torch.randn(numel, generator=draw) * 10.0 ** -(i % 5) for i in range(numbers)]
    dropped = torch.randint(0, MOST_DROPPED + 1, (blocks_of(numel),), generator=draw, dtype=torch.uint8)
    there, back = torch.zeros(numel, dtype=torch.int64), torch.zeros(numel, dtype=torch.int64)
    for m, term in enumerate(terms):
        add_exact(there, term, rounded(m, dropped))
    for m in torch.randperm(numbers, generator=draw).tolist():
        add_exact(back, terms[m], rounded(m, dropped))
    assert torch.equal(there, back)
    for m, term in enumerate(terms):
        add_exact(there, -term, rounded(m, dropped))
    assert not there.any()


def test_rounding_is_right_on_average_and_never_off_by_a_whole_unit() -> None:
    """Over microbatches, steps and weights: none of them has the draws of another."""
    terms = torch.linspace(-3.0, 3.0, BLOCK + 7).repeat(400, 1)
    dropped = torch.full((2,), BITS, dtype=torch.uint8)  # whole numbers are left
    for index in range(3):
        total, most = torch.zeros(BLOCK + 7, dtype=torch.int64), 0.0
        for i, term in enumerate(terms):
            t, m, name = [(0, i, "a"), (i, 0, "a"), (0, 0, f"a{i}")][index]
            alone = torch.zeros_like(total)
            add_exact(alone, term, rounded(m, dropped, t=t, name=name))
            most = max(most, (alone - term).abs().max().item())
            total += alone
        mean = total / len(terms)
        assert 0.9 < most < 1.0
        assert (mean - terms[0]).abs().max().item() < 0.12, "five times what 400 draws leave"
        assert (mean - terms[0]).abs().mean().item() < 0.03


def test_what_is_drawn_for_a_place_does_not_depend_on_how_much_is_drawn() -> None:
    whole = fractions(123456789123456789, 0, 10_001, CPU)
    assert torch.equal(fractions(123456789123456789, 4096, 777, CPU), whole[4096 : 4096 + 777])
    by_word = words(123456789123456789, 0, 5001, CPU)
    pairs = torch.stack((by_word & 0xFFFF, by_word >> 16), dim=1).view(-1)[:10_001]
    assert torch.equal(whole, pairs.float() / 2**16), "what other devices draw"
    assert whole.min() >= 0.0 and whole.max() < 1.0 and abs(whole.mean().item() - 0.5) < 0.01
    term, dropped = torch.full((3 << 17,), 0.3), torch.full((blocks_of(3 << 17),), BITS, dtype=torch.uint8)
    total = torch.zeros(term.numel(), dtype=torch.int64)
    add_exact(total, term, rounded(0, dropped))
    parts = total.split(1 << 17)
    assert not torch.equal(parts[0], parts[1]) and not torch.equal(parts[1], parts[2])


@given(seed=st.integers(0, 2**32), exponent=st.integers(-60, 17), kept=st.sampled_from([14, 6]))
def test_the_largest_sum_of_a_block_keeps_so_many_bits(seed: int, exponent: int, kept: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    total = torch.randn(2 * BLOCK + 9, generator=draw).clamp(-2, 2) * 2.0 ** (exponent - 1)
    total[BLOCK : 2 * BLOCK] = 0.0
    before = torch.tensor([0, 17, 40], dtype=torch.uint8)
    dropped = dropped_after(total, before, kept)
    assert dropped[1] == 17, "nothing is known of it"
    whole = torch.zeros(total.numel(), dtype=torch.int64)
    add_exact(whole, total, rounded(0, dropped))
    for block in (0, 2):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        largest = whole[part].abs().max().item()
        assert largest <= 1 << kept
        assert largest >= 1 << (kept - 1) or not dropped[block]
        unit = 2.0 ** (int(dropped[block]) - BITS)
        value = to_float(whole, torch.float64, dropped)[part]
        assert (value - total[part]).abs().max().item() < unit


def test_without_a_step_before_nothing_is_dropped() -> None:
    """The first step of a run, or of a weight, is rounded as all runs round."""
    term = torch.randn(1000) * 1e-3
    total = torch.zeros(1000, dtype=torch.int64)
    add_exact(total, term, rounded(0, torch.zeros(4, dtype=torch.uint8)))
    assert (total - summed([term])).abs().max() <= 1


def test_islands_are_rounded_apart_and_alike_wherever_a_microbatch_is_computed() -> None:
    """Else what rounding takes from one it takes from all, and their mean is off."""
    run = replace(audit_run(steps=6), islands=IslandsSpec(count=2, local_steps=2))
    none = torch.zeros(4, dtype=torch.uint8)
    seeds = [Rounded.of(run.island(one), Microbatch(3, 1), "up", none).seed for one in (0, 1, 1)]
    assert seeds[0] != seeds[1] == seeds[2]


def test_a_device_without_float64_has_its_host_compute_that() -> None:
    class OnMps:
        device = torch.device("mps")

        def cpu(self) -> torch.Tensor:
            return torch.ones(3)

    found = in_float64(OnMps())  # type: ignore[arg-type]
    assert (found.dtype, found.device.type) == (torch.float64, "cpu")
    with pytest.raises(SetupError, match=r"float64.* cannot be computed on --device mps"):
        StageCompute(audit_run(), 0, "mps")
