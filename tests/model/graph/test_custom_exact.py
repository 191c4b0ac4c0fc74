"""A custom model's stages, chained through their wire format, equal the single process to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from swarm.data import sample_offsets
from swarm.ids import Microbatch
from swarm.manifest import (
    BatchSpec,
    CodecSpec,
    CustomModelSpec,
    DataSpec,
    IslandsSpec,
    OptimizerSpec,
    Run,
    write_cut,
)
from swarm.model.graph.custom_model import custom_model, model_inputs
from swarm.model.graph.partition import shared_parameters
from swarm.model.graph.trace import trace
from swarm.model.reference import SingleProcess
from swarm.model.stage import StageCompute, foretold_bytes
from swarm.model.stage_function import stage_function
from swarm.wire.codec import Encoded, encode
from tests.model.chain import Chain, farthest, loss_of_single
from tests.model.graph import zoo
from tests.model.graph.parity import cut, random_cuts
from tests.model.test_meeting import meet
from tests.seeds import some


def run_of(name: str, assignment: Sequence[int], **changes: Any) -> Run:
    terms: dict[str, Any] = {
        "name": "custom",
        "seed": 0,
        "steps": 3,
        "model": CustomModelSpec(
            kind="code",
            source=f"tests.model.graph.zoo:{name}",
            stages=max(assignment, default=0) + 1,
            vocab_size=7 if name in ("resnet", "deep", "quantised", "biased") else 41,
            cut=write_cut(assignment),
        ),
        "data": DataSpec(source="code", code=f"tests.model.graph.zoo:{name}", sequence_length=1, tokens=1000),
        "batch": BatchSpec(microbatch_size=3, microbatches_per_step=2),
        "optimizer": OptimizerSpec(lr=1e-3, clip_norm=0.5),
        "codec": CodecSpec(forward="none", backward="none"),
    }
    return Run(**{**terms, **changes})


@cache
def sample_of(name: str) -> tuple[torch.Tensor, ...]:
    """The model's own."""
    return getattr(zoo, name)()[1]


def samples(run: Run, offsets: list[int]) -> list[np.ndarray]:
    """Others for each microbatch, in the shapes of the model's own sample."""
    assert isinstance(run.model, CustomModelSpec)
    chance = np.random.default_rng(offsets[0])
    return [
        chance.standard_normal(x.shape, dtype=np.float32)
        if x.is_floating_point()
        else x.numpy() if x.dtype == torch.bool
        else chance.integers(1, 7, x.shape)
        for x in sample_of(run.model.source.partition(":")[2])
    ]  # fmt: skip


class CustomModel(Chain):
    """All stages of a custom model, and what stages that share a weight tell one another at the end."""

    def forward(self, mb: Microbatch) -> tuple[list[Any], list[Encoded]]:
        rows = samples(self.run, sample_offsets(self.run, *mb))
        kept, wire = [], [encode(value, "none") for value in model_inputs(self.run, rows)]
        for stage in self.stages[:-1]:
            kept.append(stage.forward(mb, wire))
            wire = kept[-1].outputs
        return kept, wire


def cut_of(name: str, stages: int) -> Sequence[int]:
    """One that splits what is shared, with weights in each stage."""
    graph = custom_model(run_of(name, [])).traced.graph
    found = ([*random_cuts(graph, stages - 1, seed)][stages - 2] for seed in range(1, 100))
    with_weights = {index for index, op in enumerate(graph.operators) if op.parameters}
    return next(cut for cut in found if len({cut[index] for index in with_weights}) == stages)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("gpt2", {}),
    "tied, delayed": ("gpt2", {"delayed_updates": True, "steps": 4}),
    "tied, 8 bits": ("gpt2", {"codec": CodecSpec(forward="blockwise8", backward="blockwise8")}),
    "tied, bfloat16": ("gpt2", {"dtype": "bfloat16", "codec": CodecSpec(forward="bf16", backward="bf16")}),
    "two inputs, top-k": (
        "encoder_decoder",
        {"codec": CodecSpec(forward="topk:0.3+blockwise8", backward="blockwise8")},
    ),
    "tied, rounded": ("gpt2", {"codec": CodecSpec(forward="none", backward="none", reduce="rounded16")}),
    "batch norm, rounded": (
        "resnet",
        {"codec": CodecSpec(forward="none", backward="none", reduce="rounded16"), "steps": 4},
    ),
    "random numbers": ("deep", {"steps": 4}),
    "random numbers, bfloat16": (
        "deep",
        {"dtype": "bfloat16", "codec": CodecSpec(forward="blockwise8", backward="blockwise8")},
    ),
    "own functions": ("quantised", {}),
    "own functions, bfloat16": ("quantised", {"dtype": "bfloat16"}),
    "batch norm": ("resnet", {"codec": CodecSpec(forward="blockwise8", backward="bf16")}),
}


QUICK = ("tied, rounded", "random numbers", "own functions, bfloat16")


@pytest.mark.parametrize("case", some(list(CASES), quick=QUICK))
def test_no_loss_no_weight_and_no_statistic_differs_by_a_bit(case: str) -> None:
    name, changes = CASES[case]
    run = run_of(name, cut_of(name, 3), **changes)
    assert shared_parameters(custom_model(run).plans) or name != "gpt2"
    chain = CustomModel(run)
    single = SingleProcess(run, lambda offsets: samples(run, offsets))
    for t in range(run.steps):
        assert chain.step(t) == single.step(t)
    assert farthest(chain.named_weights(), single.named_weights()) == 0.0


@pytest.mark.slow
def test_islands_of_a_custom_model_meet_as_those_of_one_process_do() -> None:
    terms = run_of("resnet", cut_of("resnet", 2), islands=IslandsSpec(count=2, local_steps=2))
    single = SingleProcess(terms, lambda offsets: samples(terms, offsets))
    chains: list[Chain] = [CustomModel(terms.island(number)) for number in range(2)]
    for t in range(2):
        assert [loss for chain in chains for loss in chain.step(t)] == single.step(t)
    meet(chains, 2)
    single.step(2)
    assert all(farthest(chain.named_weights(), single.named_weights()) == 0.0 for chain in chains)


@pytest.mark.parametrize(("model", "dtype"), [("tied", "bfloat16"), ("tied", "float32"), ("bag", "bfloat16")])
def test_a_table_that_is_read_three_times_in_bfloat16_is_read_by_one_thread_at_a_time(
    model: str, dtype: str
) -> None:
    spec = CustomModelSpec(kind="code", source=f"tests.model.graph.custom_models:{model}", stages=1)
    data = DataSpec(source="tales", sequence_length=5)
    run = run_of(
        "gpt2",
        [],
        model=spec,
        data=data,
        dtype=dtype,
        batch=BatchSpec(microbatch_size=2, microbatches_per_step=1),
    )
    assert stage_function(run, 0).alone is ((model, dtype) == ("tied", "bfloat16"))


def test_a_microbatch_of_a_models_own_functions_keeps_what_was_foretold() -> None:
    run = run_of("quantised", cut_of("quantised", 3))
    for stage in range(run.S):
        kept = [StageCompute(run, stage, "cpu", recompute=again).saved_bytes() for again in (False, True)]
        assert foretold_bytes(run, stage) == kept[0] > kept[1]


def test_frozen_weights_are_no_memory_of_a_microbatch() -> None:
    """Of a model of billions of weights each microbatch in flight was counted with all of them."""
    run = run_of("gpt2", [0] * len(custom_model(run_of("gpt2", [])).assignment))
    spec = replace(run.model, frozen=("blocks.*.weight",))  # type: ignore[call-arg]
    some, every = StageCompute(replace(run, model=spec), 0), StageCompute(run, 0)
    assert foretold_bytes(some.run, 0) == some.saved_bytes() < every.saved_bytes()


@pytest.mark.parametrize("name", ["quantised", "biased"])
def test_what_is_computed_again_gives_the_same_bits(name: str) -> None:
    run = run_of(name, cut_of(name, 2 if name == "biased" else 3))
    once, again = (CustomModel(run, recompute=recompute) for recompute in (False, True))
    single = SingleProcess(run, lambda offsets: samples(run, offsets))
    for t in range(run.steps):
        first = loss_of_single(single, Microbatch(t, 0))
        assert once.step(t) == again.step(t) == (losses := single.step(t)) and first == losses[0]
    assert farthest(once.named_weights(), again.named_weights()) == 0.0


def test_a_function_under_autocast_computes_what_the_module_does() -> None:
    torch.manual_seed(0)
    model, (x, labels) = zoo.quantised()
    traced = trace(model, (x, labels))
    (piece,) = cut(traced, [0] * len(traced.graph.operators), seed=0)
    losses = []
    for compute in (lambda: model(x, labels), lambda: piece(x, labels, mb=Microbatch(0, 0)).values[0]):
        with torch.autocast("cpu", torch.bfloat16):
            loss = compute()
        loss.backward()
        losses.append(loss)
    assert torch.equal(*losses)
    for name, parameter in piece.named_parameters():
        expected = model.get_parameter(name).grad
        assert parameter.grad is not None and expected is not None
        assert torch.equal(parameter.grad, expected)
