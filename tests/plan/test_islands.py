"""Division of devices into islands, and what their meetings take, against numbers made by hand."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from swarm.errors import SetupError
from swarm.plan.islands import (
    IslandLayout,
    meeting_bytes,
    meeting_s,
    predict_islands,
    propose,
    search_islands,
)
from swarm.plan.network import Device, Network, StepWork
from swarm.plan.overlapped import IDLE
from swarm.plan.search import search_overlapped

DIFFERENCE_BYTES = 1e6


def job(*, microbatches: int = 8, gradient_bytes: float = 4e6) -> StepWork:
    """Two stages that take a teraflop each."""
    return StepWork(
        stages=2, microbatches=microbatches, forward_flops=(1e12, 1e12), forward_bytes=(1e5,),
        backward_bytes=(1e5,), gradient_bytes=(gradient_bytes,) * 2, state_bytes=(1e9,) * 2,
        activation_bytes=(0.0,) * 2,
    )  # fmt: skip


def islands(count: int = 2, local_steps: int = 10) -> IslandLayout:
    return IslandLayout(
        count=count, local_steps=local_steps,
        difference_bytes=(DIFFERENCE_BYTES,) * 2, sum_bytes=(4 * DIFFERENCE_BYTES,) * 2,
    )  # fmt: skip


def cities(each: int, *, count: int = 2, between_bps: float = 1e6, **device: float) -> Network:
    """So many devices in each city, one after the other in turn; 1 Gbit/s inside."""
    line_RR = np.full((count, count), between_bps)
    np.fill_diagonal(line_RR, 1e9)
    devices = tuple(Device(f"d{i}", i % count, 10e12, **device) for i in range(each * count))
    latency_RR = np.full((count, count), 0.1)
    np.fill_diagonal(latency_RR, 0.0)
    return Network(devices, tuple(f"c{i}" for i in range(count)), latency_RR, line_RR)


def searched(network: Network, job: StepWork, islands: IslandLayout) -> np.ndarray:
    return search_islands(network, job, islands, seed=0).cell_of


@pytest.mark.parametrize("count", [2, 4])
def test_near_devices_are_on_one_island(count: int) -> None:
    """As many cities as islands, or half as many."""
    network = cities(4, count=2)
    cell_of = searched(network, job(), islands(count, local_steps=1000))
    for island in range(count):
        regions = {network.devices[i].region for i in np.flatnonzero(cell_of // 2 == island)}
        assert len(regions) == 1
    assert set(cell_of) - {IDLE} == set(range(2 * count))


def test_slow_devices_are_dealt_out_to_all_islands() -> None:
    """Every second device of a city takes ten times as long: an island of those would hold up the others."""
    network = cities(8, count=1)
    slow = tuple(replace(one, flops_per_s=1e12) if i < 4 else one for i, one in enumerate(network.devices))
    cell_of = searched(replace(network, devices=slow), job(), islands(4))
    for island in range(4):
        assert any(i >= 4 for i in np.flatnonzero(cell_of // 2 == island))


def test_devices_whose_lines_hold_an_island_up_are_idle_and_heavy_stages_have_what_suits_them() -> None:
    """Half of the lines are narrow, and the one fast device has such a one; only stage 1 has much to compute,
    and it is the last: it sends half of what a stage in the middle does.
    """
    ups = [20e6, 100e6, 30e6, 100e6, 30e6, 100e6]
    devices = tuple(
        Device(f"p{i}", 0, 40e12 if i == 0 else 8e12, upload_bps=up, download_bps=1e9)
        for i, up in enumerate(ups)
    )
    home = Network(devices, ("home",), np.array([[0.02]]), np.array([[np.inf]]))
    three = replace(
        job(microbatches=32), stages=3, forward_flops=(1e10, 1e10, 4e12), forward_bytes=(2e6,) * 2,
        backward_bytes=(2e6,) * 2, gradient_bytes=(1e9,) * 3, state_bytes=(1e9,) * 3,
        activation_bytes=(0.0,) * 3,
    )  # fmt: skip
    plan = search_overlapped(home, three, seed=0)
    assert plan.stage_of[0] == 2 and sorted(plan.stage_of[[1, 3, 5]]) == [IDLE, 0, 1]
    assert set(plan.stage_of[[2, 4]]) == {IDLE}


def test_large_memories_are_dealt_out_where_near_devices_cannot_hold_an_island() -> None:
    network = cities(2, memory_bytes=0.5e9)
    large = tuple(replace(d, memory_bytes=2e9) if d.region == 0 else d for d in network.devices)
    with pytest.raises(SetupError, match="island 0: too few devices have the memory for stage 0"):
        searched(replace(network, devices=large), job(), islands())
    small_first = replace(job(), state_bytes=(0.1e9, 1e9))
    cell_of = searched(replace(network, devices=large), small_first, islands())
    assert sorted(cell_of) == [0, 1, 2, 3]
    assert all(large[i].memory_bytes == 2e9 for i in np.flatnonzero(cell_of % 2 == 1))


def test_a_meeting_takes_as_long_as_the_slowest_upload_or_line() -> None:
    network, four = cities(4, between_bps=1e9), islands(4)
    cell_N = np.array([0, 2, 4, 6, 1, 3, 5, 7])
    assert meeting_s(network, job(), four, cell_N) == pytest.approx(0.1 + 8e6 / 1e9)
    uploads = tuple(replace(d, upload_bps=2e6 if i == 3 else 8e6) for i, d in enumerate(network.devices))
    slow = replace(network, devices=uploads)
    assert meeting_s(slow, job(), four, cell_N) == pytest.approx(0.1 + 3 * 8e6 / 2e6)
    assert meeting_bytes(job(), four, cell_N) == 8 * 3 * DIFFERENCE_BYTES
    # Two devices of a cell share what it sends, and each gets all of it.
    two = np.array([0, 0, 1, 2, 3, IDLE, IDLE, IDLE])
    assert meeting_s(slow, job(), islands(2), two) == pytest.approx(0.1 + 2 * 8e6 / 2e6)
    assert meeting_bytes(job(), islands(2), two) == 5 * DIFFERENCE_BYTES
    downloads = tuple(replace(d, download_bps=1e6) for d in network.devices)
    assert meeting_s(replace(network, devices=downloads), job(), four, cell_N) == pytest.approx(0.1 + 24.0)


@pytest.mark.parametrize("count", [6, 60])
def test_a_meeting_of_many_islands_takes_no_longer_than_that_of_six(count: int) -> None:
    """Each device gets a part of what all others have changed, and the sums of the other parts."""
    network = cities(2 * count, count=1, upload_bps=1e6)
    cell_N = np.arange(2 * count)
    got = 5 * DIFFERENCE_BYTES * (count - 1) / count
    assert meeting_s(network, job(), islands(count), cell_N) == pytest.approx(8 * got / 1e6)
    assert meeting_bytes(job(), islands(count), cell_N) == pytest.approx(2 * count * got)


def test_a_step_has_its_part_of_a_meeting_and_waits_for_the_slowest_island() -> None:
    network = cities(2, between_bps=1e9)
    slow = replace(network, devices=(*network.devices[:3], replace(network.devices[3], flops_per_s=1e12)))
    plan = predict_islands(slow, job(), islands(), [0, 2, 1, 3])
    assert plan.slowest == 1
    assert plan.inner.total_s > 8 * 3 * 1.0
    assert plan.step_s == pytest.approx(plan.inner.total_s + plan.meeting_s / 10)


def test_devices_that_are_missing_are_counted_and_the_first_empty_cell_is_named() -> None:
    text = (
        "5 devices cannot serve 8 cells (4 islands of 2 stages): 3 missing, so no peer serves cell 5 (island "
        "2, stage 1) and those after it. Bring more, or lower islands.count"
    )
    network = cities(5, count=1)
    with pytest.raises(SetupError, match=re.escape(text)):
        searched(network, job(), islands(4))


def test_so_many_islands_are_proposed_as_make_a_step_shortest() -> None:
    """Uploads that take 64 s for a reduce, and 1 s for all activations of a step."""
    network = cities(8, count=1, upload_bps=1e6)
    found = propose(network, lambda n: job(microbatches=8 // n), islands(), [2, 4], seed=0)
    assert found is not None
    best, plan = found
    assert best.count == 4 and plan.local_steps == best.local_steps
    # The fewest steps between meetings of which these take a tenth.
    fewer = best.local_steps // 2
    assert plan.meeting_s <= 0.1 * best.local_steps * plan.inner.total_s
    assert fewer < 8 or plan.meeting_s > 0.1 * fewer * plan.inner.total_s
    assert propose(cities(1, count=1), lambda n: job(), islands(), [2], seed=0) is None


def test_the_division_is_a_function_of_the_seed() -> None:
    network = cities(6, upload_bps=5e6)
    first, second = (searched(network, job(), islands(3)).tolist() for _ in range(2))
    assert first == second
