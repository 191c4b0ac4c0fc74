"""Manifests drawn at random, played with faults: keys together that no other test has together."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from peers.events import Evaluated, StepDone
from peers.stage.settings import Checkpoints
from swarm.errors import SetupError
from swarm.evaluation import eval_offsets, is_due, mean_loss, microbatches, version_of
from swarm.manifest import EvalSpec, IslandsSpec, Run
from swarm.model.evaluate import loss_of
from swarm.model.reference import SingleProcess
from tests.model.chain import TEXT, batch_of, tiny_run
from tests.peers.islands.test_islands import Text, train
from tests.peers.loops import Swarm, swarm
from tests.seeds import some

pytestmark = pytest.mark.virtual_time

CODECS = ("none", "bf16", "blockwise8", "hadamard4")


def drawn(seed: int) -> Run:
    """A run whose sums are exact; what a manifest cannot have together is drawn again."""
    dice = random.Random(seed)
    while True:
        try:
            return _drawn(dice)
        except SetupError:
            continue


def _drawn(dice: random.Random) -> Run:
    one, some = dice.choice, dice.sample
    S, steps = one((1, 2, 3)), dice.randint(2, 4)
    optimizer: dict[str, Any] = {
        "name": one(("adamw", "sgd", "muon")),
        "lr": 0.01,
        "clip_norm": one((0.0, 0.1)),
    }
    optimizer |= {"muon": ("*.up.*",)} if optimizer["name"] == "muon" else {}
    optimizer |= {"moments": one(("float32", "bfloat16")), "schedule": one(("constant", "cosine", "linear"))}
    optimizer |= {"groups": some(("*norm* weight_decay=0.3", "tokens.* lr=0", "*0* lr=2"), one((0, 1, 2)))}
    model = {
        "layers": S, "stages": S, "hidden": 16, "heads": 4, "ffn_hidden": 12, "kv_heads": one((0, 1, 2)),
        "norm": one(("rmsnorm", "layernorm")), "positions": one(("rotary", "learned")),
        "mlp": one(("gelu", "swiglu")), "head": one(("free", "tied")), "qk_norm": one((True, False)),
        "dropout": one((0.0, 0.2)), "z_loss": one((0.0, 0.1)), "bottleneck": one((0, 0, 5)) if S > 1 else 0,
    }  # fmt: skip
    codec = {
        "forward": [one((*CODECS, "topk:0.2", "topk:0.3+bf16")) for _ in range(S - 1)] or "none",
        "backward": one(CODECS), "reduce": one(("none", "rounded16", "rounded8")),
    }  # fmt: skip
    M = one((1, 2, 4))
    batch = {"microbatches_per_step": M, "warmup_steps": one((0, 2)), "warmup_microbatches": one((0, 1))}
    data = {"sequence_length": 8, "document_mask": one((True, False)), "eos": one((-1, 7))}
    islands = {"count": 2, "local_steps": 1, "codec": one(CODECS)} if dice.random() < 0.3 else {}
    held_out = (
        {"every": 2, "samples": 2, "sha256": "a" * 64, "tokens": len(TEXT)} if one((True, False)) else {}
    )
    return tiny_run(
        steps=steps, dtype=one(("float32", "bfloat16")), delayed_updates=one((True, False)), model=model,
        optimizer=optimizer, codec=codec, batch=batch, data=data, islands=IslandsSpec(**islands),
        eval=EvalSpec(**held_out), checkpoint_every=2,
    )  # fmt: skip


def strike(s: Swarm, dice: random.Random, number: int, saves: Checkpoints) -> None:
    """One of the faults that there are."""
    name = dice.choice([name for name, _ in s.live()])
    cell = int(name[1])
    kind = dice.choice(("kill", "lose", "join", "pause", "hang"))
    if kind == "kill" and len([other for other, _ in s.live() if other[1] == name[1]]) > 1:
        s.kill(name)
    elif kind == "lose":
        for other in [other for other, _ in s.live() if other[1] == name[1]]:
            s.kill(other)
        s.add_peer(f"s{cell}new{number}", cell, checkpoints=saves)
    elif kind == "join":
        s.add_peer(f"s{cell}more{number}", cell, checkpoints=saves)
    elif kind == "pause":
        s.owners[name].pause("by hand", "swarm pause")
        asyncio.get_running_loop().call_later(1.0, s.owners[name].resume)
    elif kind == "hang":
        s.network.stop(name)
        asyncio.get_running_loop().call_later(2.0, s.network.go_on, name)


@pytest.mark.parametrize("seed", some(range(16), quick=[1]))
async def test_what_a_drawn_run_comes_to_follows_from_its_manifest_alone(seed: int, tmp_path: Path) -> None:
    """Weights, moments and statistics of all stages, losses and evaluations: to the last bit."""
    run, dice, saves = drawn(seed), random.Random(f"faults {seed}"), Checkpoints(folder=tmp_path)
    data, single, evaluations = Text(batch_of(run)), SingleProcess(run, batch_of(run)), dict[int, float]()
    weights, losses = [single.named_weights()], list[list[float]]()
    for t in range(run.steps):
        losses.append(single.step(t))
        weights.append(single.named_weights())
    for version in {version_of(run, t) for t in range(run.steps + 1) if is_due(run, t)}:
        loss = loss_of(run, weights[version])
        each = [loss(data.batch(eval_offsets(run, e))) for e in range(microbatches(run))]
        evaluations[version] = mean_loss(each, [run.batch.microbatch_size] * len(each))
    async with swarm(run, replicas=0, batches=data) as s:
        for cell in range(run.cells):
            for replica in range(2):
                s.add_peer(f"s{cell}p{replica}", cell, checkpoints=saves)
        for island in range(run.islands.count):
            s.add_trainer(f"trainer {island}", island=island, held_out=data)
        for number in range(3):
            await asyncio.sleep(0.6 * dice.random())
            strike(s, dice, number, saves)

        def is_over() -> bool:
            if all(s.tasks[name].done() for name in s.trainers):  # a stage may be lost after they saw the end
                train(s, f"later {len(s.trainers)}")
            return s.finished and len({name[1] for name, _ in s.live()}) == run.cells

        await s.until(is_over, limit_s=300.0)
        for name, peer in s.live():
            expected = single.state_of(peer.stage)
            found = peer.core.compute.state.copy()
            assert found.keys() == expected.keys()
            wrong = [part for part, value in found.items() if not torch.equal(value, expected[part])]
            assert not wrong, f"{wrong} of {name} in {run}\n{s.story()}"
        share = run.M // run.islands.count
        for event in (event for event in s.seen(StepDone) if event.losses):
            starts = range(0, len(losses[event.t]), share if run.islands.count > 1 else run.M)
            parts = [losses[event.t][at : at + len(event.losses)] for at in starts]
            assert list(event.losses) in parts
        assert {(event.version, event.loss) for event in s.seen(Evaluated)} <= set(evaluations.items())
