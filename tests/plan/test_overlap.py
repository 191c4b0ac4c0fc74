"""The overlapped objective: against an event simulation, by its words, and searched within memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.sim.throughput.engine import simulate
from peers.sim.throughput.world import Settings
from scripts.bench.common.step_time import mean_step_s
from scripts.bench.plan.worldwide import job_of, random_case, read_network
from swarm.codecs import PACKED, SLOW_BPS
from swarm.errors import SetupError
from swarm.manifest import CodecSpec
from swarm.plan.network import Device, Network, StepWork
from swarm.plan.overlapped import IDLE, Overlap
from swarm.plan.search import (
    balanced,
    clustered_layouts,
    cut_row,
    fenced_row,
    one_a_stage,
    repaired,
    search_overlapped,
)
from tests.seeds import seeds

DTFM = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "networks" / "dtfm.json"


def ticks() -> Callable[[], float]:
    spent = itertools.count()
    return lambda: float(next(spent))


def job(
    stages: int = 4, *, microbatches: int = 64, bytes_each: float = 1e6, gradient: float = 1e7
) -> StepWork:
    return StepWork(
        stages=stages,
        microbatches=microbatches,
        forward_flops=(1e10,) * stages,
        forward_bytes=(bytes_each,) * (stages - 1),
        backward_bytes=(bytes_each,) * (stages - 1),
        gradient_bytes=(gradient,) * stages,
        state_bytes=(1e9,) * stages,
        activation_bytes=(1e7,) * stages,
    )


def network(
    count: int = 8, *, regions: int = 1, flops: float = 1e12, inside_bps: float = 1e10,
    across_bps: float = 1e9, across_s: float = 0.02, **fields: float,
) -> Network:  # fmt: skip
    devices = tuple(Device(f"d{i}", i * regions // count, flops, **fields) for i in range(count))
    same = np.eye(regions, dtype=bool)
    return Network(
        devices,
        tuple(f"r{i}" for i in range(regions)),
        np.where(same, 0.001, across_s),
        np.where(same, inside_bps, across_bps),
    )


BF16 = CodecSpec.symmetric("bf16")


def even(count: int, stages: int) -> np.ndarray:
    return np.arange(count) * stages // count


# --- against the simulation that runs the live policies -------------------------------------------------


def simulated_s(net: Network, work: StepWork, of_N: np.ndarray) -> float:
    """Seconds of a step, once windows and routers have learnt."""
    settings = Settings(rebalance_every_s=0.0)
    return mean_step_s(simulate(net, work, of_N.tolist(), end_s=1e9, steps=7, settings=settings), skip=3)


def test_one_device_a_stage_and_one_microbatch_is_a_walk_there_and_back() -> None:
    net, work = network(2, regions=2), job(2, microbatches=1, gradient=0.0)
    expected = 2 * 3 * 1e10 / 1e12 + 2 * (0.02 + 8e6 / 1e9) + 2 * 0.02
    assert Overlap(net, work).predict([0, 1]).total_s == pytest.approx(expected)
    assert simulated_s(net, work, np.arange(2)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("net", "work", "limit"),
    [
        (network(16), job(), "stage 3's compute"),
        (network(16, upload_bps=2e8), job(), "the uplink of d8"),
        (network(16, download_bps=2e8), job(), "the downlink of d8"),
        (
            network(16, upload_bps=8e7),
            job().packing(BF16),
            "the uplink of d8",
        ),
        (network(16, regions=4, across_bps=3e7), job(microbatches=256), "the line d0 - d4"),
        (network(16, regions=4, across_bps=3e7), job(microbatches=256).packing(BF16), "the line d0 - d4"),
        (network(16), job(gradient=4e10), "the all-reduce of stage 0"),
        (network(16, inside_bps=9e7), job(gradient=1e9).packing(BF16), "the all-reduce of stage 0"),
        (network(16, regions=4, across_s=2.0), job(), "the way of one microbatch through all stages"),
        (network(4, regions=4, across_s=0.2, memory_bytes=1.06e9), job(), "the memory of d0"),
    ],
    ids=[
        "compute",
        "uplink",
        "downlink",
        "packed uplink",
        "line",
        "packed line",
        "all-reduce",
        "packed all-reduce",
        "way",
        "memory",
    ],
)
@pytest.mark.slow
def test_what_limits_a_step_is_named_and_agrees_with_the_simulation(
    net: Network, work: StepWork, limit: str
) -> None:
    of = even(len(net), work.stages)
    said = Overlap(net, work).predict(of)
    assert said.limit.startswith(limit)
    assert said.total_s == pytest.approx(said.first_s + said.busy_s + said.tail_s)
    assert said.total_s == pytest.approx(simulated_s(net, work, of), rel=0.10)


@pytest.mark.parametrize(
    "slow", [{name: SLOW_BPS} for name in ("upload_bps", "download_bps", "inside_bps")],
    ids=["up", "down", "line"],
)  # fmt: skip
def test_a_line_of_two_hundred_megabits_carries_packed_bodies_and_a_faster_one_does_not(
    slow: dict[str, float],
) -> None:
    plain, of = job(), even(16, 4)
    packing = plain.packing(BF16)
    assert packing.packed is not None and packing.packed.forward_bytes == (PACKED["bf16"] * 1e6,) * 3
    fast = {name: 1.01 * bps for name, bps in slow.items()}
    for net, same in ((network(16, **slow), packing.packed), (network(16, **fast), plain)):
        assert Overlap(net, packing).predict(of) == Overlap(net, same).predict(of)
        assert simulated_s(net, packing, of) == simulated_s(net, same, of)


def test_a_slow_line_in_front_holds_a_step_up_less_than_one_behind_and_is_put_there() -> None:
    """A stage in front begins first and ends last."""
    up_bps, work = np.linspace(5e7, 1e8, 12), job(12, microbatches=32, gradient=0.0)
    plain = network(12)
    net = replace(
        plain,
        devices=tuple(replace(d, upload_bps=float(up)) for d, up in zip(plain.devices, up_bps, strict=True)),
    )
    overlap, front = Overlap(net, work), np.arange(12)
    back = np.r_[0, 10:0:-1, 11]  # the ends send half as much
    said_s = [overlap.predict(of).total_s for of in (front, back)]
    took_s = [simulated_s(net, work, of) for of in (front, back)]
    assert took_s[0] < 0.9 * took_s[1]
    assert said_s == pytest.approx(took_s, rel=0.10)
    assert overlap.predict(one_a_stage(overlap)).total_s <= said_s[0]


@pytest.mark.parametrize("seed", seeds(12, quick=1))
def test_on_random_networks_the_prediction_agrees_with_the_simulation(seed: int) -> None:
    """Few microbatches, so chance says more than in `scripts/bench/plan/worldwide.py --predictions`."""
    net, work = random_case(seed, most=96)
    of = even(len(net), work.stages)
    if seed % 2:
        of = np.random.default_rng(1).permutation(of)
    said = Overlap(net, work).predict(of).total_s
    assert said == pytest.approx(simulated_s(net, work, of), rel=0.15)


@pytest.mark.skipif(not DTFM.exists(), reason="no ../shared/data/networks/dtfm.json")
@pytest.mark.parametrize("case", range(6))
def test_on_dt_fms_cases_the_prediction_agrees_with_the_simulation(case: int) -> None:
    """Layouts by index and by chance, in turn; DT-FM's model of 1.3 B weights in 8 stages, on 64 V100s."""
    net, work, of = read_network(DTFM, case), job_of(128), even(64, 8)
    if case % 2:
        of = np.random.default_rng(1).permutation(of)
    said = Overlap(net, work).predict(of).total_s
    assert said == pytest.approx(simulated_s(net, work, of), rel=0.10)


# --- what must hold whatever the numbers are ----------------------------------------------------------------


@given(st.integers(0, 10_000))
@settings(max_examples=30)
def test_the_prediction_does_not_know_what_devices_are_called(seed: int) -> None:
    rng = np.random.default_rng(seed)
    plain = network(12, regions=3)
    devices = [replace(d, flops_per_s=float(rng.uniform(0.5, 2) * 1e12)) for d in plain.devices]
    of = np.concatenate([np.arange(3), rng.integers(0, 3, 9)])
    # The run coordinator, from whom the barrier is counted, is the first of stage 0: one region, one
    # distance.
    latency = np.full((3, 3), 0.01)
    order = rng.permutation(12)
    one, two = (
        Network(tuple(d), plain.regions, latency, plain.bandwidth_bps)
        for d in (devices, [devices[i] for i in order])
    )
    said, again = Overlap(one, job(3)).predict(of), Overlap(two, job(3)).predict(of[order])
    assert again.total_s == pytest.approx(said.total_s, rel=1e-9)


@given(st.integers(0, 10_000))
@settings(max_examples=20)
def test_what_is_found_of_many_divisions_at_once_or_after_another_is_what_is_found_of_each(seed: int) -> None:
    """Stages have 1 to 8 devices, so what fills them up must have no part in anything."""
    rng = np.random.default_rng(seed)
    net, work = network(10, regions=2, upload_bps=float(rng.choice([2e8, math.inf]))), job(3)
    overlap, of, divisions = Overlap(net, work), np.arange(10) % 3, list[np.ndarray]()
    for _ in range(10):
        i = int(rng.integers(3, 10))
        of[i] = int(rng.integers(-1, 3))
        divisions.append(of.copy())
    together_s = overlap.weigh_s(np.array(divisions))
    known, alone_s = None, list[tuple[np.ndarray, np.ndarray]]()
    for of in divisions:
        *found_s, known = overlap.weigh_s(of[None], known)
        alone_s.append((found_s[0], found_s[1]))
        assert known.share == pytest.approx(
            overlap.weigh_s(of[None])[2].share, rel=1e-12
        )  # none is left over
    assert together_s[0] == pytest.approx([overlap.predict(of).total_s for of in divisions], rel=1e-12)
    assert together_s[1] == pytest.approx([float(slope_s[0]) for _, slope_s in alone_s], rel=1e-12)


def test_faster_lines_and_devices_are_never_slower() -> None:
    of = even(16, 4)
    slow = Overlap(network(16, regions=2), job()).predict(of).total_s
    assert Overlap(network(16, regions=2, flops=2e12), job()).predict(of).total_s < slow
    assert Overlap(network(16, regions=2, across_bps=2e9), job()).predict(of).total_s < slow


# --- the search ---------------------------------------------------------------------------------------------


def test_the_search_is_never_worse_than_its_starts_and_repeats_itself() -> None:
    net, work = network(18, regions=3, across_bps=5e7), job()
    for budget in (0, 50):
        one, two = (search_overlapped(net, work, seed=1, budget_s=budget, spent_s=ticks()) for _ in range(2))
        assert one.step.total_s <= min(one.starts.values())
        assert one.stage_of.tolist() == two.stage_of.tolist()
        assert set(one.stage_of.tolist()) - {IDLE} == {0, 1, 2, 3}


def test_a_search_that_has_no_time_left_begins_no_clusters() -> None:
    """Of 1,024 devices they took ten times as long as --budget says."""
    net, work = network(16, regions=4, across_bps=5e7), job()
    late = search_overlapped(net, work, seed=1, budget_s=5.0, spent_s=lambda: 6.0)
    assert [name for name in late.starts if "clusters" in name] == []
    assert late.step.total_s == min(late.starts.values())
    assert len(search_overlapped(net, work, seed=1).starts) > len(late.starts) > 5


@pytest.mark.parametrize("seed", range(5))
def test_clusters_come_to_stages_where_a_step_is_about_as_short_as_can_be(seed: int) -> None:
    """Five far regions of two devices: all orders can be tried out."""
    rng, (a, b) = np.random.default_rng(seed), np.triu_indices(5, 1)
    latency_s, bandwidth_bps = np.full((5, 5), 0.001), np.full((5, 5), 1e10)
    latency_s[a, b] = latency_s[b, a] = rng.uniform(0.01, 0.2, len(a))
    bandwidth_bps[a, b] = bandwidth_bps[b, a] = rng.uniform(1e7, 1e9, len(a))
    net = Network(network(10, regions=5).devices, tuple("vwxyz"), latency_s, bandwidth_bps)
    overlap = Overlap(net, job(5))

    found = dict(clustered_layouts(overlap, np.random.default_rng(0)))
    assert set(found) == {"clusters 5 × 1", "clusters 1 × 2"}
    orders = np.array([np.repeat(order, 2) for order in itertools.permutations(range(5))])
    assert overlap.weigh_s(found["clusters 1 × 2"][None])[1][0] <= 1.02 * overlap.weigh_s(orders)[1].min()
    for of_N in found.values():
        assert np.bincount(of_N).tolist() == [2] * 5


def test_the_search_finds_the_best_division_of_a_few_devices() -> None:
    net = network(6, regions=2, across_bps=1e8)
    net = Network(
        tuple(replace(d, flops_per_s=(1 + i) * 3e11) for i, d in enumerate(net.devices)),
        net.regions, net.latency_s, net.bandwidth_bps,
    )  # fmt: skip
    work = job(2, gradient=3e8)
    overlap = Overlap(net, work)
    least = min(
        overlap.predict(of).total_s for of in itertools.product((IDLE, 0, 1), repeat=6) if {0, 1} <= set(of)
    )
    found = search_overlapped(net, work, seed=0, budget_s=600, spent_s=ticks())
    assert found.step.total_s == pytest.approx(least)


def test_a_stage_of_twice_the_work_gets_twice_the_devices() -> None:
    work = replace(job(2, microbatches=256, bytes_each=1e3, gradient=1e3), forward_flops=(2e10, 1e10))
    found = search_overlapped(network(12), work, seed=0, budget_s=300, spent_s=ticks())
    assert np.bincount(found.stage_of).tolist() == [8, 4]


def test_a_device_that_holds_the_others_up_stays_idle() -> None:
    net = network(5)
    slow = replace(net.devices[4], upload_bps=1e5)
    net = Network((*net.devices[:4], slow), net.regions, net.latency_s, net.bandwidth_bps)
    found = search_overlapped(net, job(2, gradient=1e8), seed=0, budget_s=200, spent_s=ticks())
    assert found.stage_of[4] == IDLE


def test_nobody_is_given_a_stage_that_it_cannot_hold() -> None:
    net = network(8)
    small = tuple(replace(d, memory_bytes=1.5e9) for d in net.devices[:5])
    net = Network((*small, *net.devices[5:]), net.regions, net.latency_s, net.bandwidth_bps)
    work = replace(job(3), state_bytes=(1e9, 3e9, 1e9))
    found = search_overlapped(net, work, seed=0, budget_s=100, spent_s=ticks())
    assert set(np.flatnonzero(found.stage_of == 1)) <= {5, 6, 7}
    with pytest.raises(SetupError, match="device 'd0' cannot hold stage 1 in its memory"):
        Overlap(net, work).weigh_s(np.array([[0, 0, 2, 0, 2, 1, 1, 1], [1, 0, 2, 0, 2, 1, 1, 1]]))


@pytest.mark.parametrize("budget", [0, 40])
def test_every_stage_of_a_plan_that_survives_a_region_has_devices_in_two(budget: int) -> None:
    net, work = network(12, regions=3, across_bps=5e7), job(3)
    plain = search_overlapped(net, work, seed=0, budget_s=budget, spent_s=ticks())
    safe = search_overlapped(net, work, seed=0, budget_s=budget, spent_s=ticks(), survive=True)
    regions = [set(net.region_of[safe.stage_of == stage].tolist()) for stage in range(3)]
    assert all(len(there) >= 2 for there in regions)
    assert any(len(set(net.region_of[plain.stage_of == stage].tolist())) == 1 for stage in range(3))
    with pytest.raises(SetupError, match="no plan was found that survives the loss of any one region"):
        search_overlapped(network(6), job(3), seed=0, budget_s=0, spent_s=ticks(), survive=True)


def test_a_repair_leaves_alone_what_is_possible() -> None:
    overlap = Overlap(network(6), job(3))
    of = np.array([0, 1, 2, 2, 1, 0])
    assert repaired(overlap, of).tolist() == of.tolist()
    assert sorted(set(repaired(overlap, np.zeros(6, dtype=np.int64)).tolist())) == [0, 1, 2]


def test_by_speed_each_device_goes_to_the_slowest_stage_that_it_can_hold() -> None:
    """The fast ones are small: they cannot hold stage 1, and the one without memory can hold nothing."""
    devices = [(8.0, 1.5e9), (4.0, 1.5e9), (2.0, 4e9), (1.0, 4e9), (9.0, 0.5e9)]
    net = replace(
        network(5),
        devices=tuple(Device(f"d{i}", 0, f, memory_bytes=m) for i, (f, m) in enumerate(devices)),
    )
    work = replace(job(3), state_bytes=(1e9, 3e9, 1e9))
    assert balanced(Overlap(net, work)).tolist() == [0, 2, 1, 1, IDLE]


@pytest.mark.parametrize(
    ("net", "work", "words"),
    [
        (network(2001), job(1), "2001 devices in 1 stages are too many for a plan, which looks at every"),
        (network(3), job(4), "3 devices cannot serve 4 stages: each stage needs at least one"),
        (
            network(8, memory_bytes=1e9),
            job(),
            "no device can hold stage 0: it needs 1.02 GB, and the largest, 'd0'",
        ),
    ],
)
def test_a_job_that_cannot_be_placed_is_refused(net: Network, work: StepWork, words: str) -> None:
    with pytest.raises(SetupError) as caught:
        search_overlapped(net, work, seed=0, budget_s=0, spent_s=ticks())
    assert words in caught.value.text


def test_too_few_large_devices_are_said_to_be_too_few() -> None:
    net = network(4, memory_bytes=1.5e9)
    large = replace(net.devices[0], memory_bytes=math.inf)
    net = Network((large, *net.devices[1:]), net.regions, net.latency_s, net.bandwidth_bps)
    with pytest.raises(SetupError, match="too few devices have the memory for stage"):
        search_overlapped(
            net, replace(job(3), state_bytes=(3e9, 3e9, 1e9)), seed=0, budget_s=0, spent_s=ticks()
        )


def test_a_stage_without_a_device_is_refused() -> None:
    with pytest.raises(SetupError, match="stage 1 has no device"):
        Overlap(network(4), job(2)).predict([0, 0, 0, IDLE])


# --- the fence ----------------------------------------------------------------------------------------------


def test_the_fence_keeps_consecutive_stages_near_one_another() -> None:
    # Three continents of two cities each, whose devices are named in turns.
    near, far = np.full((6, 6), 1e7), np.full((6, 6), 0.1)
    for a in range(0, 6, 2):
        near[a : a + 2, a : a + 2] = 1e9
    devices = tuple(Device(f"d{i}", i % 6, 1e12) for i in range(24))
    net = Network(devices, tuple("abcdef"), far, near)
    of = cut_row(net, job(6), fenced_row(net))
    assert np.bincount(of).tolist() == [4] * 6
    continents = [{int(net.devices[i].region) // 2 for i in np.flatnonzero(of == s)} for s in range(6)]
    assert all(len(there) == 1 for there in continents)
    assert sum(a != b for a, b in itertools.pairwise(continents)) == 2
    assert sorted(fenced_row(net).tolist()) == list(range(24))


@given(st.lists(st.floats(0.1, 10), min_size=5, max_size=12), st.integers(1, 5))
def test_a_cut_row_leaves_no_stage_empty(speeds: list[float], stages: int) -> None:
    devices = tuple(Device(f"d{i}", 0, speed * 1e12) for i, speed in enumerate(speeds))
    net = Network(devices, ("r",), np.zeros((1, 1)), np.full((1, 1), 1e9))
    row = np.arange(len(speeds))
    of = cut_row(net, job(stages), row)
    assert sorted(set(of.tolist())) == list(range(stages))
    assert (np.diff(of) >= 0).all()
