"""What a stage's state looks like, known without making it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from swarm.manifest import OptimizerSpec, Run, audit_run, demo_run
from swarm.model.layout import empty_state, initial_state, reduce_bytes
from swarm.model.same_bits import CACHE_LINE_BYTES
from swarm.model.stage import StageCompute

SMALL = replace(demo_run(stages=2), model=replace(demo_run(stages=2).model, layers=2, hidden=32, heads=2))


@pytest.mark.parametrize(
    "run",
    [
        SMALL,
        replace(SMALL, dtype="bfloat16", delayed_updates=True),
        replace(SMALL, dtype="float64", model=replace(SMALL.model, norm="layernorm", positions="learned")),
        replace(SMALL, optimizer=OptimizerSpec(name="sgd", lr=0.1)),
        replace(SMALL, optimizer=OptimizerSpec(name="sgd", lr=0.1, momentum=0.9)),
        replace(SMALL, codec=replace(SMALL.codec, reduce="rounded16")),
        audit_run(stages=2),
    ],
)
def test_the_empty_and_the_initial_state_are_like_the_real_one(run: Run) -> None:
    for stage in range(run.S):
        compute = StageCompute(run, stage)
        state, empty = compute.state.copy(), empty_state(run, stage)
        assert {name: (t.shape, t.dtype) for name, t in state.items()} == {
            name: (t.shape, t.dtype) for name, t in empty.items()
        }
        assert all(t.is_meta for t in empty.values())
        initial = initial_state(run, stage)
        assert list(initial) == list(state)
        assert all(torch.equal(initial[name], state[name]) for name in state)


def test_planners_know_that_a_rounded_reduce_takes_less_than_half_of_the_bytes() -> None:
    by_codec = [
        reduce_bytes(replace(SMALL, codec=replace(SMALL.codec, reduce=reduce)), 0)
        for reduce in ("none", "rounded16", "rounded8")
    ]
    assert by_codec[0] > 2 * by_codec[1] > 3.5 * by_codec[2]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_parameter_begins_on_a_cache_line_whatever_comes_before_it(dtype: str) -> None:
    """In a single process it does; some products of small matrices depend on it."""
    odd = replace(SMALL.built_in, hidden=36, ffn_hidden=49, heads=3, vocab_size=257, norm="layernorm")
    run = replace(SMALL, dtype=dtype, model=odd)
    for stage in range(run.S):
        compute = StageCompute(run, stage)
        module = compute._modules[0]
        assert any(parameter.numel() % 16 for parameter in module.parameters())
        assert not [name for name, p in module.named_parameters() if p.data_ptr() % CACHE_LINE_BYTES]
        held = sum(parameter.numel() for parameter in module.parameters())
        assert compute.numel > held and compute.state.weights(0).count_nonzero() <= held
