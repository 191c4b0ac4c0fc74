"""A brought model in a swarm in one event loop: tied weights on two stages, batch norms, peers that die."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from swarm.errors import SetupError
from swarm.manifest import (
    BatchSpec,
    CodecSpec,
    CustomModelSpec,
    DataSpec,
    ModelSpec,
    OptimizerSpec,
    Run,
    write_cut,
)
from swarm.model.gradient_sum import SharedWeights
from swarm.model.graph.custom_model import custom_model, pin_model
from swarm.model.layout import shared_terms
from swarm.model.reference import SingleProcess
from swarm.model.stage import StageCompute
from tests.model.chain import weights_of
from tests.peers.loops import Swarm, swarm
from tests.seeds import some

pytestmark = pytest.mark.virtual_time

SAMPLES = 64
CUTS: dict[CustomModelSpec, str] = {}
"""Where each model is cut: to find that takes longer than a test, and it is the same for all terms here."""


def gpt2_run(**changes: Any) -> Run:
    """Two layers whose embedding is the head as well, on three stages."""
    config = (
        '{"model_type":"gpt2","vocab_size":256,"n_positions":16,"n_embd":16,"n_layer":2,"n_head":2,'
        '"resid_pdrop":0.1,"embd_pdrop":0.0,"attn_pdrop":0.0}'
    )
    terms: dict[str, Any] = {
        "name": "brought",
        "seed": 3,
        "steps": 3,
        "model": CustomModelSpec(kind="hf", config=config, stages=3),
        "data": DataSpec(source="tales", sequence_length=8, tokens=1000),
        "batch": BatchSpec(microbatch_size=2, microbatches_per_step=4),
        "optimizer": OptimizerSpec(lr=1e-2, clip_norm=0.5),
        "codec": CodecSpec(forward="none", backward="none"),
    }
    run = Run(**{**terms, **changes})
    if run.model not in CUTS:
        CUTS[run.model] = write_cut(custom_model(run).assignment)
    return replace(run, model=replace(run.model, cut=CUTS[run.model]))


def resnet_run(**changes: Any) -> Run:
    """Batch norms on every stage."""
    return gpt2_run(
        model=CustomModelSpec(kind="code", source="tests.model.graph.zoo:resnet", stages=3, vocab_size=7),
        data=DataSpec(source="code", code="tests.model.graph.zoo:resnet", sequence_length=1, tokens=SAMPLES),
        **changes,
    )


class Text:
    """Tokens drawn of their offsets."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def batch(self, offsets: list[int]) -> Any:
        return np.stack([np.random.default_rng(at).integers(0, 256, 9).astype(np.uint8) for at in offsets])


class Images(Text):
    """Noise, and a class."""

    def batch(self, offsets: list[int]) -> Any:
        dice = [np.random.default_rng(at) for at in offsets]
        dtype = "float64" if self._run.dtype == "float64" else "float32"
        images = np.stack([one.standard_normal((3, 32, 32)).astype(dtype) for one in dice])
        return [images, np.stack([one.integers(0, 7) for one in dice])]


def one_process(run: Run, data: Text) -> dict[str, torch.Tensor]:
    reference = SingleProcess(run, data.batch)
    for t in range(run.steps):
        reference.step(t)
    return reference.named_weights()


def check(built: Swarm, expected: dict[str, torch.Tensor], *, tolerance: float) -> None:
    """All that live have the weights of one process."""
    for name, peer in built.live():
        found = weights_of(peer.core.compute)
        for weight, value in found.items():
            worst = (value.double() - expected[weight].double()).abs().max().item()
            assert worst <= tolerance * expected[weight].abs().max().item(), (name, weight, worst)


def llama_run(**changes: Any) -> Run:
    """The built-in decoder with a tied head."""
    terms: dict[str, Any] = {"hidden": 16, "heads": 2, "kv_heads": 1, "ffn_hidden": 24, "vocab_size": 256}
    model = ModelSpec(**terms, layers=3, mlp="swiglu", head="tied", dropout=0.1, stages=3)
    return replace(gpt2_run(**changes), model=model)


@pytest.mark.parametrize(
    ("run_of", "name", "dtype", "delayed", "moments"),
    some(
        [
            (gpt2_run, "transformer.wte.weight", "float32", False, "float32"),
            (gpt2_run, "transformer.wte.weight", "float64", True, "float32"),
            (llama_run, "tokens.weight", "float32", True, "bfloat16"),
        ],
        quick=[(llama_run, "tokens.weight", "float32", True, "bfloat16")],
    ),
)
async def test_tied_weights_with_a_death_are_those_of_one_process(
    run_of: Callable[..., Run], name: str, dtype: str, delayed: bool, moments: Any
) -> None:
    run = run_of(dtype=dtype, delayed_updates=delayed, codec=CodecSpec(forward="bf16", backward="none"))
    run = replace(run, optimizer=replace(run.optimizer, moments=moments))
    assert name in shared_terms(run, 0)[2]
    data = Text(run)
    async with swarm(run, batches=data) as built:
        await built.until_serving()
        built.on_call("held", lambda caller, callee: built.kill(callee), nth=3)
        built.add_trainer("t")
        await built.until_finished()
        assert len(built.live()) == 5
        check(built, one_process(run, data), tolerance=0.0 if dtype == "float32" else 1e-9)


@pytest.mark.slow
async def test_the_statistics_of_batch_norms_are_those_of_one_process_whoever_died() -> None:
    run = resnet_run(steps=2)
    data = Images(run)
    async with swarm(run, batches=data) as built:
        await built.until_serving()
        built.on_call("part", lambda caller, callee: built.kill(callee), nth=2)
        built.add_trainer("t")
        await built.until_finished(limit_s=100.0)
        assert len(built.live()) == 5
        expected = one_process(run, data)
        assert sum("running_mean" in name for name in expected) == 23
        check(built, expected, tolerance=0.0)


async def test_a_member_that_missed_a_step_takes_what_is_shared_from_who_has_it() -> None:
    """It slept while the others averaged; a gradient, and the other stage's part of it, bring it back."""
    run = gpt2_run(steps=4)
    data = Text(run)
    async with swarm(run, batches=data) as built:
        await built.until_serving()
        built.add_trainer("t")
        await built.until_version(1)
        built.network.stop("s2p1")
        await built.until(lambda: built.peers["s2p0"].core.version >= 2)
        built.network.go_on("s2p1")
        await built.until_finished()
        check(built, one_process(run, data), tolerance=0.0)


@pytest.mark.slow
async def test_who_reaches_nobody_of_the_other_stage_takes_what_a_replica_was_told() -> None:
    run = gpt2_run()
    data = Text(run)
    async with swarm(run, batches=data) as built:
        await built.until_serving()
        built.network.cut(["s2p1"], ["s0p0", "s0p1"])
        built.add_trainer("t")
        await built.until_finished()
        check(built, one_process(run, data), tolerance=0.0)


@pytest.mark.slow
async def test_a_member_that_has_no_memory_for_its_result_says_so_and_the_round_is_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = gpt2_run()
    data = Text(run)
    complete, broken = SharedWeights.complete, []

    def without_memory(self: SharedWeights, reduced: torch.Tensor, shared: Any) -> torch.Tensor:
        if self._stage == 2 and len(broken) < 3:
            broken.append(1)
            raise MemoryError("no memory")
        return complete(self, reduced, shared)

    monkeypatch.setattr(SharedWeights, "complete", without_memory)
    async with swarm(run, replicas=1, batches=data) as built:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)  # it tells of a bug
        await built.until_serving()
        built.add_trainer("t")
        await built.until_finished()
        assert broken
        check(built, one_process(run, data), tolerance=0.0)


def test_a_peer_that_would_begin_with_other_weights_serves_no_stage() -> None:
    """As one whose processor rounds differently than the owner's."""
    run = pin_model(gpt2_run())
    assert isinstance(run.model, CustomModelSpec)
    first, *others = run.model.digests
    pinned = replace(run, model=replace(run.model, digests=(first, *("0" * 64 for _ in others))))
    StageCompute(pinned, 0)
    with pytest.raises(SetupError, match=r"model\.digests: stage 1 of the model begins with other weights"):
        StageCompute(pinned, 1)
