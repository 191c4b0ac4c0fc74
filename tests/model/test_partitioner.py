"""Cuts: exact on chains, nearly so on other graphs, never worse than equal layers and equal operations."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.bench.equal_cuts import equal_flops, equal_layers
from swarm.errors import SetupError
from swarm.model.graph.ir import OpGraph
from swarm.model.graph.partition import plan_stages
from swarm.model.graph.trace import trace
from swarm.model.layout import Holding
from swarm.partitioner.search import Link, Place, SplitTerms, judge, split
from swarm.partitioner.segments import WireTerms
from tests.model import zoo
from tests.model.graphs import Draft, device, random_graph

SLOW = Link(bandwidth_bps=8.0)
"""A byte a second."""


def all_cuts(graph: OpGraph, stages: int) -> Iterator[list[int]]:
    """Every assignment in which values flow forward and each stage has weights."""
    maker = {output: op.index for op in graph.operators for output in op.outputs}
    sources = [[maker[name] for name in op.inputs if name in maker] for op in graph.operators]
    trained = [op.index for op in graph.operators if op.parameters]
    for assignment in itertools.product(range(stages), repeat=len(graph.operators)):
        forward = all(assignment[s] <= assignment[i] for i, those in enumerate(sources) for s in those)
        if forward and len({assignment[index] for index in trained}) == stages:
            yield list(assignment)


def best_of_all(graph: OpGraph, places: Sequence[Place], links: Sequence[Link]) -> tuple[float, float]:
    return min(
        (found.period_s, found.latency_s)
        for found in (judge(graph, cut, places, links) for cut in all_cuts(graph, len(places)))
    )


def drawn(seed: int, operators: int, *, chain: bool) -> tuple[OpGraph, list[Place], list[Link]]:
    """A random graph, devices of two speeds and lines of any."""
    dice = random.Random(seed)
    graph = random_graph(dice, operators, chain=chain)
    places = [Place(device=device(dice.choice([1.0, 2.0]))) for _ in range(dice.choice([2, 3]))]
    links = [
        Link(bandwidth_bps=8 * dice.choice([2.0, 20.0, 200.0, 1e9]), latency_s=dice.random())
        for _ in places[1:]
    ]
    return graph, places, links


def test_what_a_cut_costs_by_hand() -> None:
    graph = (
        Draft(x=2).op("a", ["x"], 10, weight=1).op("b", ["a"], 6, weight=1).op("c", ["b", "a"], 1).graph("c")
    )
    link = Link(bandwidth_bps=8 * 40.0, latency_s=0.5)
    found = judge(graph, (0, 1, 1), [Place(device=device()), Place(device=device(2.0))], [link])
    # a: 10 numbers; b and c read a again: 10 each at twice the speed. a crosses, 40 bytes, there and back.
    assert found.compute_s == (10.0, 10.0)
    assert found.forward_bytes == (40.0,) and found.backward_bytes == (40.0,)
    assert found.transfer_s == (1.0,)  # both directions at once
    assert found.period_s == 10.0 and found.limit == "stage 0"
    assert found.latency_s == pytest.approx(20.0 + 1.0 + 1.0 + 2 * 0.5)


def test_what_skips_a_stage_is_carried_over_each_boundary() -> None:
    draft = Draft(x=2, y=3).op("a", ["x"], 5, weight=1).op("b", ["a"], 4, weight=1)
    graph = draft.op("c", ["b", "a", "y"], 1, weight=1).graph("c")
    found = judge(graph, (0, 1, 2), [Place(device=device())] * 3)
    # The integers y come in at stage 0 and go to the last one; no gradient comes back for them.
    assert found.forward_bytes == (4 * 5 + 8 * 3, 4 * 4 + 4 * 5 + 8 * 3)
    assert found.backward_bytes == (4 * 5, 4 * 4 + 4 * 5)


def test_the_codec_counts_for_what_has_a_gradient_only() -> None:
    graph = Draft(x=2, y=3).op("a", ["x"], 5, weight=1).op("b", ["a", "y"], 1, weight=1).graph("b")
    terms = SplitTerms(wire=WireTerms(forward_bytes=1.0, backward_bytes=2.0))
    found = judge(graph, (0, 1), [Place(device=device())] * 2, terms=terms)
    assert found.forward_bytes == (5 + 24,) and found.backward_bytes == (10,)


def test_cheap_operators_are_computed_where_they_are_needed() -> None:
    draft = Draft(x=2).op("mask", [], 7, cheap=True).op("a", ["x", "mask"], 3, weight=1)
    graph = draft.op("b", ["a", "mask"], 1, weight=1).graph("b")
    places = [Place(device=device())] * 2
    found = judge(graph, (0, 0, 1), places)
    assert found.forward_bytes == (12.0,)
    assert found.compute_s == (7.0 + 7.0, 7.0 + 7.0)  # the mask, and what reads it, on both
    assert split(graph, places).assignment == (0, 0, 1)


def test_a_mask_that_follows_from_a_smaller_input_is_not_sent() -> None:
    draft = Draft(x=2).op("mask", ["x"], 50).op("a", ["x", "mask"], 3, weight=1)
    graph = draft.op("b", ["a", "mask"], 1, weight=1).graph("b")
    assert judge(graph, (0, 0, 1), [Place(device=device())] * 2).forward_bytes == (3 * 4 + 2 * 8,)


def test_weights_that_two_stages_read_are_kept_on_few() -> None:
    """Two cuts of the same period: the one that holds the shared weight once is taken."""
    draft = (
        Draft(x=1)
        .op("a", ["x"], 4, weight=8)
        .op("b", ["a"], 4, weight=1)
        .op("c", ["b"], 4, shares="b.weight")
    )
    graph = draft.op("d", ["c"], 4, weight=1).op("e", ["d"], 4, weight=1).graph("e")
    found = split(graph, [Place(device=device())] * 2, [Link(bandwidth_bps=1e6)])
    assert found.assignment == (0, 0, 0, 1, 1)  # (0, 0, 1, 1, 1) has the same period
    apart = judge(graph, (0, 0, 1, 1, 1), [Place(device=device())] * 2, [Link(bandwidth_bps=1e6)])
    together = judge(graph, (0, 0, 0, 1, 1), [Place(device=device())] * 2, [Link(bandwidth_bps=1e6)])
    assert apart.latency_s - together.latency_s == pytest.approx(16 * 4 / 1e6)


@pytest.mark.parametrize("seed", range(12))
def test_the_cut_of_a_chain_is_the_best_there_is(seed: int) -> None:
    graph, places, links = drawn(seed, 8, chain=True)
    found = split(graph, places, links)
    assert (found.period_s, found.latency_s) == pytest.approx(best_of_all(graph, places, links), rel=1e-9)


def test_cuts_of_other_graphs_are_the_best_or_nearly() -> None:
    ratios = []
    for seed in range(12):
        graph, places, links = drawn(seed, 6, chain=False)
        ratios.append(split(graph, places, links).period_s / best_of_all(graph, places, links)[0])
    assert min(ratios) >= 1 - 1e-9 and max(ratios) <= 1.1, ratios
    assert sum(ratio <= 1 + 1e-9 for ratio in ratios) >= 11, ratios


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), chain=st.booleans())
def test_a_split_costs_what_it_says_and_baselines_are_never_better(seed: int, chain: bool) -> None:
    graph, places, links = drawn(seed, 14, chain=chain)
    found = split(graph, places, links)
    again = judge(graph, found.assignment, places, links)
    assert again == found
    baseline = judge(graph, equal_flops(graph, len(places)), places, links)
    assert found.period_s <= baseline.period_s * (1 + 1e-9)
    assert found.period_s == pytest.approx(max(*found.compute_s, *found.transfer_s))


def test_a_slow_line_is_cut_at_where_little_crosses() -> None:
    draft = Draft(x=1).op("a", ["x"], 10, weight=1).op("b", ["a"], 1, weight=1).op("c", ["b"], 10, weight=1)
    graph = draft.op("d", ["c"], 10, weight=1).op("e", ["d"], 10, weight=1).graph("e")
    places = [Place(device=device())] * 2
    assert split(graph, places).assignment == (0, 0, 1, 1, 1)
    assert split(graph, places, [SLOW]).assignment == (0, 0, 1, 1, 1)
    assert split(graph, places, [Link(bandwidth_bps=1e9)]).limit == "stage 1"
    crowded = judge(graph, (0, 0, 0, 1, 1), places, [SLOW])
    assert crowded.limit == "the line between stages 0 and 1" and crowded.period_s == 40.0


def test_a_faster_device_gets_more() -> None:
    draft = Draft(x=1)
    for number in range(8):
        draft.op(f"v{number}", [f"v{number - 1}" if number else "x"], 4, weight=1)
    found = split(draft.graph("v7"), [Place(device=device(3.0)), Place(device=device(1.0))])
    assert found.assignment.count(0) == 6


def test_memory_moves_the_cut_and_the_error_names_stage_operator_and_device() -> None:
    holding = Holding(sum_bytes=8.0, moment_bytes=8.0, inflight=2)
    draft = Draft(x=1)
    for number, weight in enumerate((1, 1, 1, 1000)):
        draft.op(f"v{number}", [f"v{number - 1}" if number else "x"], 4, weight=weight)
    graph = draft.graph("v3")
    terms = SplitTerms(holding=holding)

    def places(*limits: float) -> list[Place]:
        return [Place(device=device(), memory_bytes=limit) for limit in limits]

    free = split(graph, places(1e9, 1e9), terms=terms)
    assert free.memory_bytes[1] > 20_000
    one = judge(graph, free.assignment, places(1e9, 1e9), terms=SplitTerms(holding=Holding(moment_bytes=0.0)))
    assert one.memory_bytes[1] < free.memory_bytes[1] - 8 * 1000
    # The weights of v3 and their state are 20 bytes a number, and its gradient another four.
    tight = split(graph, places(1e9, free.memory_bytes[1] - 1), terms=terms)
    assert tight.assignment.count(1) < free.assignment.count(1)
    with pytest.raises(SetupError) as error:
        split(graph, places(1e9, 20_000), terms=terms)
    text = error.value.text
    assert text.startswith("a stage that no device can hold: even in the best cut for memory stage 1 (")
    assert "the operator v3) needs 2.4e-05 GB, and its device has 2e-05 GB. Cut the model into more" in text


def test_what_cannot_be_cut_is_said() -> None:
    graph = Draft(x=1).op("a", ["x"], 4, weight=1, module="layers.0").op("b", ["a"], 4, weight=1).graph("b")
    places = [Place(device=device())] * 3
    with pytest.raises(SetupError, match=r"2 operators have weights, too few for 3 stages: .* fewer stages"):
        split(graph, places)
    with pytest.raises(SetupError, match="1 layers cannot be cut into 2 stages of whole layers"):
        equal_layers(graph, 2)
    with pytest.raises(
        SetupError, match="operator b of stage 0 reads what a makes on stage 1: values flow to"
    ):
        judge(graph, (1, 0), places[:2])
    with pytest.raises(SetupError, match="operator b is on stage 2 of 2"):
        judge(graph, (0, 2), places[:2])
    with pytest.raises(SetupError, match="1 stages are given for 2 operators"):
        judge(graph, (0,), places[:2])
    with pytest.raises(SetupError, match="2 stages need 1 links between them, and 2 are given"):
        split(graph, places[:2], [SLOW] * 2)
    for memory_bytes in (0.0, -1.0, float("nan")):
        with pytest.raises(SetupError, match=r"a device with (0|-1|nan) bytes of memory holds nothing"):
            split(graph, [Place(device=places[0].device, memory_bytes=memory_bytes), places[1]])
    with pytest.raises(SetupError, match=r"a link of 0 bit/s and 0 s: the bandwidth must be above 0"):
        split(graph, places[:2], [Link(bandwidth_bps=0.0)])


MODELS = {
    "resnet": zoo.resnet,
    "gpt2": zoo.gpt2,
    "unet": zoo.unet,
    "llama": zoo.llama,
}


@cache
def traced(name: str) -> OpGraph:
    model, sample = MODELS[name]()
    return trace(model, sample).graph


@pytest.mark.parametrize("bandwidth_bps", [1e12, 1e5])
@pytest.mark.parametrize("name", MODELS)
def test_real_models_are_cut_better_than_by_layers_or_by_operations(name: str, bandwidth_bps: float) -> None:
    stages = 4
    graph, places = traced(name), [Place(device=device(1e9))] * stages
    links = [Link(bandwidth_bps=bandwidth_bps)] * (stages - 1)
    found = split(graph, places, links)
    for baseline in (equal_layers, equal_flops):
        cut = judge(graph, baseline(graph, stages), places, links)
        assert found.period_s <= cut.period_s * (1 + 1e-9), baseline.__name__
    # What the runtime sends is what was reckoned with.
    sent = [plan.bytes_out for plan in plan_stages(graph, found.assignment)[:-1]]
    assert list(found.forward_bytes) == sent
