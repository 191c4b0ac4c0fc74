"""Cuts: exact on chains, nearly so on other graphs; little is sent, and no stage is much slower for it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.bench.plan.equal_cuts import equal_layers, equal_shares
from swarm.errors import SetupError
from swarm.model.graph.cost import operations, reckoned_s
from swarm.model.graph.ir import OpGraph
from swarm.model.graph.partition import WORTH, find_cut, plan_stages, recomputed
from tests.model.graph.graphs import Draft, random_graph, seconds_of
from tests.model.graph.parity import whole
from tests.seeds import some

ENOUGH = 1 + WORTH + 1e-6


def judged(graph: OpGraph, seconds: Sequence[float], assignment: Sequence[int]) -> tuple[float, int]:
    """(seconds of the slowest stage, bytes over the widest boundary, there and back) of what would run.

    Without what every stage computes for itself, which the search holds for little.
    """
    free, plans = recomputed(graph), plan_stages(graph, assignment)
    slowest_s = max(sum(seconds[i] for i in plan.operators if i not in free) for plan in plans)
    sent = [sum(value.nbytes * (1 + value.differentiable) for value in plan.outputs) for plan in plans[:-1]]
    return slowest_s, max(sent, default=0)


def all_cuts(graph: OpGraph, stages: int) -> Iterator[list[int]]:
    """Every assignment in which values flow forward and each stage has weights."""
    maker = {output: op.index for op in graph.operators for output in op.outputs}
    sources = [[maker[name] for name in op.inputs if name in maker] for op in graph.operators]
    trained = [op.index for op in graph.operators if op.parameters]
    for assignment in itertools.product(range(stages), repeat=len(graph.operators)):
        forward = all(assignment[s] <= assignment[i] for i, those in enumerate(sources) for s in those)
        ends = assignment[maker[graph.loss]] == stages - 1
        if forward and ends and len({assignment[index] for index in trained}) == stages:
            yield list(assignment)


def best_of_all(graph: OpGraph, stages: int) -> tuple[float, int]:
    """(the widest boundary of the best cut, its slowest stage): as the search is to choose."""
    seconds = seconds_of(graph)
    found = [judged(graph, seconds, cut) for cut in all_cuts(graph, stages)]
    enough_s = min(found)[0] * ENOUGH
    nbytes, slowest_s = min((nbytes, slowest_s) for slowest_s, nbytes in found if slowest_s <= enough_s)
    return slowest_s, nbytes


def row(*operators: tuple[int, int]) -> OpGraph:
    """A chain; of each operator (numbers that it makes, of its weight)."""
    draft = Draft(x=1)
    for number, (numel, weight) in enumerate(operators):
        draft.op(f"v{number}", [f"v{number - 1}" if number else "x"], numel, weight=weight)
    return draft.graph(f"v{len(operators) - 1}")


@pytest.mark.parametrize("seed", range(12))
def test_the_cut_of_a_chain_is_the_best_there_is(seed: int) -> None:
    dice = random.Random(seed)
    graph, stages = random_graph(dice, 8, chain=True), dice.choice([2, 3])
    found = find_cut(graph, seconds_of(graph), stages)
    assert judged(graph, seconds_of(graph), found) == best_of_all(graph, stages)


def test_cuts_of_other_graphs_are_the_best_or_nearly() -> None:
    worse = []
    for seed in range(10, 30):
        dice = random.Random(seed)
        graph, stages = random_graph(dice, 6, chain=False), dice.choice([2, 3])
        slowest_s, nbytes = judged(graph, seconds_of(graph), find_cut(graph, seconds_of(graph), stages))
        best_s, least = best_of_all(graph, stages)
        assert slowest_s <= best_s * ENOUGH
        worse += [seed] * (nbytes > least)
    assert len(worse) <= 1, worse


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), chain=st.booleans(), stages=st.integers(1, 4))
def test_what_a_cut_may_cost_more_is_bounded(seed: int, chain: bool, stages: int) -> None:
    graph = random_graph(random.Random(seed), 14, chain=chain)
    seconds = seconds_of(graph)
    slowest_s, _ = judged(graph, seconds, find_cut(graph, seconds, stages))
    by_seconds = equal_shares(seconds, stages)
    if set(by_seconds) == set(range(stages)):
        assert slowest_s <= judged(graph, seconds, by_seconds)[0] * ENOUGH


def test_a_cut_lies_where_little_crosses_if_no_stage_is_much_slower_by_it() -> None:
    graph = row((10, 1), (1, 1), (10, 1), (10, 1), (10, 1), (2, 1))
    assert find_cut(graph, [10.0, 10, 10, 10, 10, 10], 2) == (0, 0, 0, 1, 1, 1), "a fifth, not a third"
    assert find_cut(graph, [10.0, 12, 10, 8, 10, 10], 2) == (0, 0, 1, 1, 1, 1)


def test_of_equal_boundaries_the_fastest_slowest_stage_is_taken() -> None:
    assert find_cut(row(*[(4, 1)] * 8), [1.0] * 8, 4) == (0, 0, 1, 1, 2, 2, 3, 3)


def test_cheap_operators_are_computed_where_they_are_needed() -> None:
    draft = Draft(x=2).op("mask", [], 7, cheap=True).op("a", ["x", "mask"], 3, weight=1)
    graph = draft.op("b", ["a", "mask"], 1, weight=1).graph("b")
    assert find_cut(graph, seconds_of(graph), 2) == (0, 0, 1)
    assert [value.name for value in plan_stages(graph, (0, 0, 1))[0].outputs] == ["a"]


@pytest.mark.parametrize("form", [{"dtype": "complex64"}, {"dtype": "int16"}, {"shape": (1,) * 9}])
def test_no_cut_is_chosen_that_what_crosses_cannot_pass(form: dict[str, Any]) -> None:
    """It was chosen, and refused then with the words to choose another."""
    graph = row((8, 1), (1, 1), (8, 1), (8, 1))
    assert find_cut(graph, [10.0, 10, 10, 10], 2) == (0, 0, 1, 1)
    barred = replace(graph, values={**graph.values, "v1": replace(graph.values["v1"], **form)})
    assert find_cut(barred, [10.0, 10, 10, 10], 2) in [(0, 1, 1, 1), (0, 0, 0, 1)]
    assert find_cut(barred, [10.0, 10, 10, 10], 4) == (0, 1, 2, 3), "none is left: _check_cut says why"


def test_weights_that_two_stages_would_read_are_kept_on_one() -> None:
    """Two cuts that are equally fast and send as much: the one that holds the shared weight once is taken."""
    draft = (
        Draft(x=1)
        .op("a", ["x"], 4, weight=8)
        .op("b", ["a"], 4, weight=1)
        .op("c", ["b"], 4, shares="b.weight")
    )
    graph = draft.op("d", ["c"], 4, weight=1).op("e", ["d"], 4, weight=1).graph("e")
    # (0, 0, 1, 1, 1) is as fast.
    assert find_cut(graph, [1.0, 1.0, 0.5, 1.0, 1.0], 2) == (0, 0, 0, 1, 1)


def test_a_model_of_too_few_weights_is_refused() -> None:
    graph = Draft(x=1).op("a", ["x"], 4, weight=1, module="layers.0").op("b", ["a"], 4, weight=1).graph("b")
    with pytest.raises(SetupError, match=r"2 operators with weights: too few for 3 stages.* fewer stages"):
        find_cut(graph, [1.0, 1.0], 3)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", some(["resnet", "gpt2", "unet", "llama"], quick=["unet"]))
def test_real_models_are_cut_better_than_by_layers_or_by_operations(name: str, stages: int) -> None:
    traced = whole(name).traced
    graph, seconds = traced.graph, reckoned_s(traced)
    slowest_s, nbytes = judged(graph, seconds, find_cut(graph, seconds, stages))
    for other in (equal_layers(graph, stages), equal_shares(operations(traced), stages)):
        other_s, other_bytes = judged(graph, seconds, other)
        assert slowest_s <= other_s * ENOUGH
        assert nbytes <= other_bytes or other_s > slowest_s
