"""A run computed with one stage in memory at a time is the one that is computed with all of them there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarm.manifest import IslandsSpec, Run
from swarm.model.reference import Scratch, SingleProcess
from tests.model.chain import Chain, batch_of, tiny_run
from tests.model.graph.test_custom_exact import CASES as CUSTOM
from tests.model.graph.test_custom_exact import CustomModel, cut_of, run_of, samples
from tests.model.test_meeting import CASES as ISLANDS
from tests.model.test_meeting import islands, meet
from tests.model.test_reference_resumes import CASES
from tests.seeds import some


def compare(run: Run, batch: Callable[[list[int]], Any]) -> None:
    scratch: Scratch = {}
    single = SingleProcess(run, batch)
    again = SingleProcess(run, batch, scratch=scratch)
    for t in range(run.steps):
        done: list[int] = []
        squares = single.compute()
        assert again.compute(done.append) == squares
        assert sum(done) == run.S * run.microbatches(t)
        assert all(torch.equal(again.sum_of(stage), single.sum_of(stage)) for stage in range(run.S))
        single.take(squares)
        again.take(squares)
        for stage in range(run.S):
            ours, theirs = again.state_of(stage), single.state_of(stage)
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(value, theirs[name]) for name, value in ours.items()), (t, stage)
    kinds = {name.split()[0] for name in scratch}
    assert kinds == {"state", "sum"}, "what passed the boundaries is not kept"


TERMS: dict[str, dict[str, Any]] = {
    **CASES,
    "top-k": {"codec": {"forward": "topk:0.25+bf16", "backward": "bf16"}},
    "float64, warm-up": {"dtype": "float64", "batch": {"warmup_steps": 2, "warmup_microbatches": 2}},
}


@pytest.mark.parametrize(
    "case",
    some(list(TERMS), quick=("rounded16", "muon, groups")),
)
def test_one_stage_at_a_time_finds_the_same_bits(case: str) -> None:
    codec = {"forward": "blockwise8", "backward": "blockwise8"}
    run = tiny_run(**{"dtype": "float32", "steps": 3, "codec": codec, **TERMS[case]})
    compare(run, batch_of(run))


@pytest.mark.parametrize("case", some(["tied, delayed", "batch norm"], quick=["tied, delayed"]))
def test_of_a_custom_model_too_with_tied_weights_and_statistics(case: str) -> None:
    name, changes = CUSTOM[case]
    run = run_of(name, cut_of(name, 3), **changes)
    compare(run, lambda offsets: samples(run, offsets))


def compare_islands(run: Run, batch: Callable[[list[int]], Any], chains: list[Chain]) -> None:
    again = SingleProcess(run, batch, scratch={})
    cells = [stage.state for chain in chains for stage in chain.stages]
    for t in range(run.steps):
        squares = again.compute()
        assert len(squares) == (0 if run.meets_at(t) else run.islands.count)
        if run.meets_at(t):
            told = [state.difference() for state in cells]
            assert all(torch.equal(again.sum_of(cell), change) for cell, change in enumerate(told))
            meet(chains, t)
        else:
            for chain in chains:
                chain.step(t)
        again.take(squares)
        for cell, state in enumerate(cells):
            ours, theirs = again.state_of(cell), state.copy()
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(value, theirs[name]) for name, value in ours.items()), (t, cell)
            assert all(again.digest(cell, whole=w) == state.digest(whole=w) for w in (True, False))


@pytest.mark.parametrize("case", some(list(ISLANDS), quick=["rounded sums"]))
def test_islands_bring_the_same_to_a_meeting_and_leave_it_with_the_same(case: str) -> None:
    terms, spec = ISLANDS[case]
    run = islands(tiny_run(**{**terms, "dtype": "float32"}), **spec)
    compare_islands(run, batch_of(run), [Chain(run.island(number)) for number in range(run.islands.count)])


@pytest.mark.slow
def test_islands_bring_statistics_too() -> None:
    name, changes = CUSTOM["batch norm"]
    base = run_of(name, cut_of(name, 2), **changes)
    run = replace(base, steps=3, islands=IslandsSpec(count=2, local_steps=2))
    chains: list[Chain] = [CustomModel(run.island(number)) for number in range(2)]
    compare_islands(run, lambda offsets: samples(run, offsets), chains)
