"""The single process goes on from any state that stages save, and says what each stage found and has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from swarm.ids import Microbatch
from swarm.model.reductions import state_digest
from swarm.model.reference import SingleProcess
from tests.model.chain import Chain, batch_of, tiny_run
from tests.model.graph.test_custom_exact import CASES as CUSTOM
from tests.model.graph.test_custom_exact import CustomModel, cut_of, run_of, samples
from tests.seeds import some

CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "delayed": {"delayed_updates": True},
    "sgd": {"optimizer": {"name": "sgd", "momentum": 0.9, "weight_decay": 0.05}},
    "sgd without momentum": {"optimizer": {"name": "sgd", "momentum": 0.0}},
    "bfloat16": {"dtype": "bfloat16"},
    "rounded16": {"codec": {"forward": "blockwise8", "backward": "blockwise8", "reduce": "rounded16"}},
    "muon, groups": {
        "optimizer": {"name": "muon", "muon": ("layers.*",), "groups": ("*.up.* lr=0.5", "head.* lr=2.0")},
    },
    "muon, delayed": {"optimizer": {"name": "muon", "muon": ("*",)}, "delayed_updates": True},
    "bfloat16 moments": {"optimizer": {"moments": "bfloat16", "groups": ("*.up.* lr=0.5",)}},
    "bfloat16 moments, delayed": {"optimizer": {"moments": "bfloat16"}, "delayed_updates": True},
    "bfloat16 moments, sgd": {"optimizer": {"name": "sgd", "momentum": 0.9, "moments": "bfloat16"}},
    "bfloat16 moments, muon": {
        "optimizer": {"name": "muon", "muon": ("layers.*",), "moments": "bfloat16"},
    },
    "z-loss, wsd": {"model": {"z_loss": 0.01}, "optimizer": {"schedule": "wsd", "decay_steps": 2}},
    "warm-up, clipped": {"optimizer": {"warmup_steps": 2, "schedule": "cosine", "clip_norm": 0.01}},
}


def state_of(chain: Chain) -> Callable[[int], dict[str, torch.Tensor]]:
    return lambda stage: chain.stages[stage].state.copy()


QUICK = ("muon, groups", "bfloat16 moments")


@pytest.mark.parametrize(
    ("case", "start"),
    some([("adamw", 0), *((case, 2) for case in CASES)], quick=[(case, 2) for case in QUICK]),
)
def test_from_a_saved_state_it_computes_the_same_bits_as_the_stages(case: str, start: int) -> None:
    codec = {"forward": "blockwise8", "backward": "blockwise8"}
    run = tiny_run(**{"dtype": "float32", "steps": 4, "codec": codec, **CASES[case]})
    chain = Chain(run)
    for t in range(start):
        chain.step(t)
    reference = SingleProcess(run, batch_of(run), version=start, state=state_of(chain))
    for t in range(start, run.steps):
        for stage, compute in enumerate(chain.stages):
            ours, theirs = reference.state_of(stage), compute.state.copy()
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(value, theirs[name]) for name, value in ours.items()), (t, stage)
            assert all(state_digest(ours, whole=w) == compute.state.digest(whole=w) for w in (True, False))
        assert chain.step(t) == reference.step(t)
        assert all(reference.sum_of(stage).abs().max() > 0 for stage in range(run.S))
    assert all(
        torch.equal(value, reference.named_weights()[name]) for name, value in chain.named_weights().items()
    )


@pytest.mark.parametrize("case", some(["tied, delayed", "batch norm"], quick=["tied, delayed"]))
def test_of_a_custom_model_too_and_the_sums_are_each_stages_own(case: str) -> None:
    name, changes = CUSTOM[case]
    run = run_of(name, cut_of(name, 3), **changes)
    chain = CustomModel(run)
    chain.step(0)
    batch = partial(samples, run)
    reference = SingleProcess(run, batch, version=1, state=state_of(chain))
    for t in range(1, run.steps):
        chain.begin(t)
        for m in range(run.M):
            chain.microbatch(Microbatch(t, m))
        own = [stage.sums.value(stage.sums.of(t)).clone() for stage in chain.stages]
        chain.apply(t)
        reference.step(t)
        for stage, theirs in enumerate(own):
            assert torch.equal(reference.sum_of(stage), theirs), (t, stage)
            saved = chain.stages[stage].state.copy()
            assert all(torch.equal(value, saved[n]) for n, value in reference.state_of(stage).items())
