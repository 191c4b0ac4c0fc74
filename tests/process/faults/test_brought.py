"""Models of users, trained by processes one of which is killed, equal the same run in a single process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from peers.events import StepDone
from swarm.manifest import (
    BatchSpec,
    CodecSpec,
    CustomModelSpec,
    DataSpec,
    LoraSpec,
    OptimizerSpec,
    Run,
    StartSpec,
)
from swarm.model.graph.lora import is_adapter
from swarm.model.reference import SingleProcess
from tests.process.forkserver import ForkServer
from tests.process.models import CLASSES
from tests.process.swarm_processes import Processes, Swarm, farthest

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module", autouse=True)
def tracing(tracing_server: ForkServer) -> Iterator[None]:
    """Programs are forked from a process that can trace already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Processes, "fork_server", tracing_server)
        yield


def run_of(model: CustomModelSpec, data: DataSpec, lr: float) -> Run:
    """float64 and codec none: only the order of additions differs from one process."""
    return Run(
        name="brought",
        seed=1,
        steps=8,
        dtype="float64",
        model=model,
        data=data,
        batch=BatchSpec(microbatch_size=8, microbatches_per_step=6),
        optimizer=OptimizerSpec(lr=lr, weight_decay=0.01, beta2=0.99),
        codec=CodecSpec(forward="none", backward="none"),
    )


def gpt2() -> Run:
    """transformers' own, two layers of 32, tied embedding, dropout as its config has it."""
    config = {
        "model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 256, "n_positions": 64,
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    model = CustomModelSpec(kind="hf", config=json.dumps(config), stages=3, vocab_size=256)
    return run_of(model, DataSpec(source="tales", sequence_length=32), lr=3e-3)


def resnet() -> Run:
    """A user's code, batch norms and images."""
    model = CustomModelSpec(kind="code", source="tests.process.models:resnet", stages=3, vocab_size=CLASSES)
    data = DataSpec(source="code", code="tests.process.models:images", sequence_length=1)
    return run_of(model, data, lr=1e-3)


def test_a_swarm_with_a_death_in_it_trains_the_model_of_one_process(tmp_path: Path) -> None:
    """Losses and weights 1e-9 relative, each microbatch once, and the loss falls.

    A model of transformers is in the next test, and both are in tests/peers/runs/test_brought.py.
    """
    with Swarm(tmp_path, resnet()) as swarm:
        swarm.bootstrap()
        doomed = swarm.peer(1, kill_at="backward:6")
        for stage in range(swarm.run.S):
            swarm.peer(stage)
        swarm.all_serve()
        trainer = swarm.trainer("--window", "6")
        swarm.dies(doomed)
        swarm.ends(trainer)
        told = trainer.heard(StepDone)
        weights = swarm.audited_weights()
    assert [event.t for event in told] == list(range(swarm.run.steps))
    single = SingleProcess(swarm.run, swarm.data.batch)
    means = []
    for event in told:
        losses = single.step(event.t)
        means.append(sum(losses) / swarm.run.M)
        if event.losses:  # the trainer may hear of a step before it has all of its answers
            assert event.losses == pytest.approx(losses, rel=1e-9)
    assert sum(bool(event.losses) for event in told) > swarm.run.steps // 2
    assert farthest(weights, single) < 1e-9
    assert means[-1] < 0.9 * means[0]


def test_a_folder_of_transformers_is_trained_further_to_the_bits_of_one_process(tmp_path: Path) -> None:
    """Of each stage one peer has the folder; the others get what it starts with from them.

    With adapters, so what is frozen as well; without them such a run is like those above from version 0 on.
    """
    import torch

    transformers = pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    torch.manual_seed(5)
    config = json.loads(gpt2().model.config)  # type: ignore[union-attr]
    given = transformers.GPT2LMHeadModel(transformers.GPT2Config(**config))
    given.save_pretrained(tmp_path / "gpt2")
    # In few steps all microbatches of a stage may go to the same peer: the one that dies would get none.
    run = replace(gpt2(), steps=30, dtype="float32", start=StartSpec(weights="folder"))
    run = replace(run, lora=LoraSpec(rank=4, targets=("c_attn", "c_fc")))
    with Swarm(tmp_path, run, start=tmp_path / "gpt2") as swarm:
        swarm.bootstrap()
        doomed = swarm.peer(1, kill_at="backward:6")
        for stage in range(run.S):
            swarm.peer(stage, "--start", str(tmp_path / "gpt2"))
        swarm.all_serve()
        trainer = swarm.trainer("--window", "6")
        swarm.dies(doomed)
        swarm.ends(trainer)
        weights = swarm.audited_weights()
    single = SingleProcess(swarm.run, swarm.data.batch)
    first = single.named_weights()
    own = dict(given.named_parameters())
    assert all(torch.equal(tensor, own[name]) for name, tensor in first.items() if not is_adapter(name))
    for t in range(run.steps):
        single.step(t)
    expected = single.named_weights()
    assert weights.keys() == expected.keys() and all(map(is_adapter, weights))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
