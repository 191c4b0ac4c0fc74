"""Islands that meet: `StageCompute` of each island against `SingleProcess`, which trains all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from swarm import tales
from swarm.errors import Refused, SetupError
from swarm.ids import Microbatch
from swarm.manifest import IslandsSpec, Run, audit_run, parse_run
from swarm.model.layout import empty_state, initial_state
from swarm.model.meeting import added_up, difference_bytes, part_of, unlike
from swarm.model.reference import SingleProcess
from tests.model.chain import Chain, batch_of, farthest, tiny_run
from tests.seeds import some

STEPS = 6  # two meetings, two steps before each


def islands(run: Run, **spec: Any) -> Run:
    given = {"count": 2, "local_steps": 2, **spec}
    batch = replace(run.batch, microbatches_per_step=4)
    return replace(run, steps=STEPS, batch=batch, islands=IslandsSpec(**given))


def meet(chains: list[Chain], t: int) -> None:
    """What a meeting does, with each island's bytes as they travel."""
    told = [[stage.state.difference() for stage in chain.stages] for chain in chains]
    for chain in chains:
        for stage in chain.stages:
            bytes_of_all = [of_island[stage.stage] for of_island in told]
            stage.sums.begin(t)
            stage.apply(t, added_up(chain.run, stage.layout, bytes_of_all), 0.0)


def trained(run: Run, steps: int = STEPS) -> tuple[list[Chain], list[list[float]]]:
    chains = [Chain(run.island(number)) for number in range(run.islands.count)]
    losses: list[list[float]] = []
    for t in range(steps):
        if run.meets_at(t):
            meet(chains, t)
            losses.append([])
        else:
            losses.append([loss for chain in chains for loss in chain.step(t)])
    return chains, losses


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as it comes": ({}, {}),
    "one stage": ({"model": {"stages": 1}}, {}),
    "four islands": ({}, {"count": 4}),
    "no outer momentum": ({}, {"outer_momentum": 0.0}),
    "a rate that rises": ({}, {"warmup_steps": 3}),
    "dropout": ({"model": {"dropout": 0.2}}, {}),
    "tied weights": ({"model": {"head": "tied"}, "dtype": "float32"}, {"codec": "blockwise8"}),
    "coded": ({"dtype": "float32"}, {"codec": "blockwise8"}),
    "bf16": ({"dtype": "float32"}, {"codec": "bf16"}),
    "muon": ({"optimizer": {"name": "muon", "muon": ("layers.*",)}}, {}),
    "rounded sums": ({"codec": {"reduce": "rounded16"}, "dtype": "float32"}, {}),
    "bfloat16 moments": ({"optimizer": {"moments": "bfloat16"}, "dtype": "float32"}, {}),
    "sgd": ({"optimizer": {"name": "sgd", "momentum": 0.9}}, {}),
}


QUICK = ("coded", "muon")


@pytest.mark.parametrize("case", some(list(CASES), quick=QUICK))
def test_islands_are_those_of_a_single_process(case: str) -> None:
    terms, spec = CASES[case]
    run = islands(tiny_run(**terms), **spec)
    chains, ours = trained(run)
    single = SingleProcess(run, batch_of(run))
    theirs = [single.step(t) for t in range(run.steps)]
    exact = run.dtype == "float32"
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == (other if exact else pytest.approx(other, abs=1e-12))
    for chain in chains:  # all are where the last meeting brought them
        assert farthest(chain.named_weights(), single.named_weights()) <= (0.0 if exact else 1e-12)


def test_islands_train_on_different_samples_and_part_between_meetings() -> None:
    run = islands(tiny_run())
    chains, losses = trained(run, 2)
    assert losses[0][:2] != losses[0][2:]
    first, second = (chain.named_weights() for chain in chains)
    assert farthest(first, second) > 1e-5
    meet(chains, 2)
    assert farthest(chains[0].named_weights(), chains[1].named_weights()) == 0.0


def test_each_microbatch_of_each_island_counts_once() -> None:
    """One-hot gradients: after a meeting that goes all the way, each weight says how often it was counted."""
    run = islands(audit_run(stages=2, steps=STEPS), outer_lr=1.0, outer_momentum=0.0)
    chains, _ = trained(run)
    for chain in chains:
        for weights in chain.named_weights().values():
            assert (weights * -run.M).tolist() == [run.islands.trained(STEPS)] * run.M


def test_a_state_that_is_loaded_goes_on_as_the_one_it_was() -> None:
    run = islands(tiny_run())
    chains, _ = trained(run, 4)
    others = [Chain(chain.run) for chain in chains]
    for chain, other in zip(chains, others, strict=True):
        for stage, copied in zip(chain.stages, other.stages, strict=True):
            state = stage.state.copy()
            assert {name: t.shape for name, t in state.items()} == {
                name: t.shape for name, t in empty_state(run, stage.stage).items()
            }
            copied.load_state(4, state)
    for of_all in (chains, others):
        for chain in of_all:
            chain.step(4)
        meet(of_all, 5)
    for chain, other in zip(chains, others, strict=True):
        assert farthest(chain.named_weights(), other.named_weights()) == 0.0


def test_after_a_meeting_a_stage_is_the_same_on_every_island() -> None:
    run = islands(tiny_run())
    chains, _ = trained(run)
    for one, other in zip(chains[0].stages, chains[1].stages, strict=True):
        mine, theirs = one.state.copy(), other.state.copy()
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_version_0_has_been_at_a_meeting() -> None:
    run = islands(tiny_run())
    first = Chain(run.island(0)).stages[0].state.copy()
    assert {name: t.tolist() for name, t in first.items()} == {
        name: t.tolist() for name, t in initial_state(run, 0).items()
    }


def test_differences_of_another_length_are_refused() -> None:
    run = islands(tiny_run()).island(0)
    stage = Chain(run).stages[0]
    told = stage.state.difference()
    assert told.numel() == difference_bytes(run, stage.layout)
    with pytest.raises(Refused, match="island 1 has changed has"):
        added_up(run, stage.layout, [told, told[:-1]])


@pytest.mark.parametrize(
    ("changes", "spec", "text"),
    [
        ({}, {"count": 3}, r"islands\.count = 3 .* a divisor of batch\.microbatches_per_step \(4\)"),
        ({"delayed_updates": True}, {}, "1 when delayed_updates is true"),
        ({}, {"local_steps": 6}, r"islands\.local_steps = 6 .* must be below steps \(6\)"),
        ({}, {"local_steps": 3}, r"steps = 6 .* a multiple of islands\.local_steps \+ 1 \(4\)"),
        ({"checkpoint_every": 2}, {}, r"checkpoint_every = 2 .* a multiple of islands\.local_steps \+ 1"),
        ({}, {"outer_momentum": 1.0}, r"outer_momentum = 1\.0 .* below 1"),
        ({}, {"codec": "topk:0.1"}, "what a top-k leaves out would never arrive"),
    ],
)
def test_terms_that_do_not_go_with_islands(changes: dict[str, Any], spec: dict[str, Any], text: str) -> None:
    with pytest.raises(SetupError, match=text):
        islands(tiny_run(**changes), **spec)


def test_values_of_islands_without_islands_are_refused() -> None:
    with pytest.raises(SetupError, match=r"islands\.count = 1 .* at least 2 when there are other values"):
        IslandsSpec(outer_lr=0.5)


def test_the_text_of_a_run_has_its_islands_only_if_there_are_some() -> None:
    run = tiny_run()
    assert "islands" not in run.to_toml() and run.island(0) is run and run.cells == run.S
    several = islands(run)
    assert parse_run(several.to_toml()) == several and several.id != run.id
    island = several.island(1)
    assert (island.id, island.M, island.cells) == (f"{several.id}.1", 2, 2 * run.S)
    assert island.named(Microbatch(3, 1)) == Microbatch(2, 3)


# --- what another island has changed, beside what the own one has


@pytest.mark.slow
def test_of_honest_islands_none_is_unlike_however_few_tokens_they_see() -> None:
    """Four steps of 64 tokens between meetings: parts of what two have changed have cosines down to -0.42."""
    text = np.frombuffer(tales.text(), np.uint8)
    data = {"tokens": len(text), "sequence_length": 32}
    run = tiny_run(dtype="float32", data=data, optimizer={"lr": 5e-3}, batch={"microbatches_per_step": 8})
    run = replace(run, steps=30, islands=IslandsSpec(count=8, local_steps=4))
    chains, turned = [Chain(run.island(number), text=text) for number in range(8)], 0
    for t in range(run.steps):
        if not run.meets_at(t):
            for one in chains:
                one.step(t)
            continue
        for stage in range(run.S):
            layout = chains[0].stages[stage].layout
            told = [one.stages[stage].state.difference() for one in chains]
            wholes = [added_up(run, layout, [one]) for one in told]
            for part in range(8):
                parts = [added_up(run, layout, [part_of(run, layout, one, part)], part) for one in told]
                assert not any(unlike(own, other) for own in wholes for other in parts)
                assert not any(unlike(own, sum(parts, torch.zeros(1)) / 8) for own in parts)
                turned += any(unlike(own, other) is not None for own in parts for other in parts)
        meet(chains, t)
    assert turned, "parts are compared with the whole since parts are not alike"
