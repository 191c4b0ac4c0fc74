"""A replica's sum, made again from its microbatches while the run goes on."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from swarm.audit.answers import FAR
from swarm.audit.contributions import Recount
from swarm.audit.projection import coefficients, product
from swarm.errors import Stale
from swarm.ids import Microbatch
from swarm.manifest import Run
from swarm.model.stage import StageCompute
from swarm.wire.codec import Encoded
from tests.audit.roundings import nearly_equal_numbers
from tests.model.chain import Chain, tiny_run
from tests.seeds import cases

CHUNK = (100, 400)


def exact_run(**changes: Any) -> Run:
    codec = {"forward": "blockwise8", "backward": "blockwise8"}
    return tiny_run(**{"dtype": "float32", "codec": codec, **changes})


CHANGES: list[dict[str, Any]] = [{}, {"dtype": "bfloat16"}, {"delayed_updates": True}]


def step_of(chain: Chain, t: int, stage: int, share: Sequence[int]) -> list[tuple[int, Any, Any]]:
    """Compute a step, and add a share of it; (m, inputs, gradients of the outputs) of that at a stage."""
    kept: list[tuple[int, Any, Any]] = []
    chain.begin(t)
    for m in share:
        forwards, last = chain.forward(Microbatch(t, m))
        found = chain.stages[-1].loss_gradients(Microbatch(t, m), last, weights=True)
        chain.stages[-1].add(found)
        grads = chain.backward(forwards, found.answer)
        inputs: Sequence[Encoded] = forwards[stage].inputs if stage < chain.run.S - 1 else last
        kept.append((m, inputs, grads[stage] if stage < chain.run.S - 1 else ()))
    return kept


@pytest.mark.parametrize(
    ("changes", "stage"),
    cases(
        [*itertools.product(CHANGES, range(3))],
        name="{0}-{1}",
        quick=lambda changes, stage: CHANGES.index(changes) == stage,
    ),
)
def test_an_honest_sum_is_made_again_to_the_bit_though_the_step_is_over(
    stage: int, changes: dict[str, Any]
) -> None:
    chain = Chain(exact_run(**changes))
    chain.step(0)
    kept = step_of(chain, 1, stage, (2, 0))
    contributed = chain.stages[stage].sums.of(1).clone()
    recount = Recount(chain.stages[stage].snapshot(1), 1, CHUNK)
    chain.apply(1)
    chain.step(2)
    for m, inputs, grads in kept[::-1]:
        recount.add(m, inputs, grads, nullcontext())
    assert torch.equal(recount.total(), contributed)
    part = contributed[100:500]
    assert part.count_nonzero() and not recount.is_far(part)
    for lie in (-part, part * 0, part * 100, part + part // 2, part[1:]):
        assert recount.is_far(lie)
    rounding = (1e-6 * part * torch.randn(400)).to(torch.int64)
    assert not recount.is_far(part + rounding)
    off = Counter[bool]()
    for seed in range(100):
        r = coefficients(bytes([seed]), 0, 0, 400)
        assert not recount.is_off(product(part, r), r)
        assert not recount.is_off(product(part + rounding, r), r)
        off.update(recount.is_off(product(lie, r), r) for lie in (-part, part * 0, part * 100))
    assert off[True] >= (200 if changes.get("dtype") == "bfloat16" else 290)


def test_a_sum_of_inputs_that_make_the_most_of_rounding_is_not_far() -> None:
    compute, _, given, other = nearly_equal_numbers(1e4)
    recount = Recount(compute.snapshot(0), 0, (0, compute.numel))
    recount.add(0, *given, lock=nullcontext())
    other.sums.begin(0)
    other.add(other.gradients_of(Microbatch(0, 0), *given))
    theirs = other.sums.of(0)
    ours = recount.total()
    assert (ours - theirs).double().norm() > FAR["float32"] * ours.double().norm(), "it tests nothing"
    assert not recount.is_far(theirs) and recount.is_far(-20 * theirs)


def test_what_is_nothing_but_rounding_is_not_far() -> None:
    """Two microbatches that cancel each other: on another device other bits are left."""
    chain = Chain(exact_run())
    (one,) = step_of(chain, 0, 2, (0,))
    recount = Recount(chain.stages[2].snapshot(0), 0, CHUNK)
    recount.add(*one, lock=nullcontext())
    recount._compute.sums.of(0).zero_()  # type: ignore
    noise = (chain.stages[2].sums.of(0)[100:500].double() * 4e-7).to(torch.int64)
    assert noise.count_nonzero() and not recount.is_far(noise)
    assert recount.is_far(chain.stages[2].sums.of(0)[100:500])


def test_a_snapshot_is_of_one_step_and_changes_nothing() -> None:
    chain = Chain(exact_run())
    stage: StageCompute = chain.stages[1]
    before = stage.state.digest()
    snapshot = stage.snapshot(0)
    with pytest.raises(Stale):
        snapshot.snapshot(0).sums.of(-1)
    chain.step(0)
    assert stage.state.digest() != before
    assert torch.equal(snapshot.state.weights(0), StageCompute(chain.run, 1).state.weights(0))
    with pytest.raises(Stale):
        stage.snapshot(0)


def test_tokens_that_were_sent_on_are_compared_to_the_bit() -> None:
    """Labels that are off in one place are no rounding of any device."""
    chain = Chain(exact_run())
    m, inputs, grads = step_of(chain, 0, 0, range(1))[0]
    recount = Recount(chain.stages[0].snapshot(0), 0, CHUNK)
    hidden, tokens = recount.add(m, inputs, grads, nullcontext())
    off = bytearray(memoryview(tokens.buffers[0]).cast("B"))
    off[0] ^= 1
    assert not recount.sent_other(m, [hidden, tokens], [hidden, tokens], inputs)
    assert recount.sent_other(m, [hidden, tokens], [hidden, Encoded(tokens.meta, [off])], inputs)
