"""Islands of a run: near devices on one, so that between meetings nothing crosses the slow lines.

How they are divided: docs/design.md, *Planning*. A step costs what the slowest island takes, and its part of
a meeting: DT-FM's two costs, with the exchange amortised over the steps between two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from swarm.errors import SetupError
from swarm.manifest import parts_summed
from swarm.plan.network import BACKWARD_FORWARDS, Network, StepWork, carried_s
from swarm.plan.overlapped import IDLE, Overlap, StepTime
from swarm.plan.search import fenced_row, search_overlapped

LOCAL_STEPS = (8, 16, 32, 64, 128, 256, 512)
"""What is proposed: the fewest steps between two meetings of which these take a small part."""
MEETING_PART = 0.1
"""That part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandLayout:
    """How many there are, and when and with how much they meet."""

    count: int
    local_steps: int
    """Between two meetings."""
    difference_bytes: tuple[float, ...]
    """Per stage: what an island has changed, as it travels."""
    sum_bytes: tuple[float, ...]
    """Per stage: the sum of what all have changed."""
    packed_part: float = 1.0
    """Of both: what slow lines carry."""

    @property
    def from_each_bytes(self) -> tuple[float, ...]:
        """Per stage: what a device gets from each other island in a meeting."""
        parts = parts_summed(self.count)
        if parts == 1:
            return self.difference_bytes
        return tuple(sum(both) / parts for both in zip(self.difference_bytes, self.sum_bytes, strict=True))


class IslandsPlan(NamedTuple):
    """A division of devices into islands and stages."""

    cell_of: np.ndarray
    """[N] of every device, or `IDLE`: stage s of island k is cell k * S + s."""
    inner: StepTime
    """A step of the slowest island."""
    slowest: int
    meeting_s: float
    local_steps: int

    @property
    def step_s(self) -> float:
        """Seconds of a step, with its part of a meeting."""
        return self.inner.total_s + self.meeting_s / self.local_steps


def check_cells(network: Network, job: StepWork, islands: IslandLayout) -> None:
    """Raises SetupError: there are fewer devices than cells."""
    cells, there = islands.count * job.stages, len(network)
    if there < cells:
        island, stage = divmod(there, job.stages)
        raise SetupError(
            f"{there} devices cannot serve {cells} cells ({islands.count} islands of {job.stages} stages): "
            f"{cells - there} missing, so no peer serves cell {there} (island {island}, stage {stage})"
            f"{' and those after it' if cells - there > 1 else ''}. Bring more, or lower islands.count"
        )


def search_islands(
    network: Network, job: StepWork, islands: IslandLayout, *, seed: int, budget_s: float = 0.0,
    spent_s: Callable[[], float] = lambda: 0.0,
) -> IslandsPlan:  # fmt: skip
    """The better of two divisions into islands, the devices of each in the stages where the search puts them.

    `job`: that of an island.

    Raises:
        SetupError: fewer devices than cells; the memory of no devices holds an island.
    """
    check_cells(network, job, islands)
    found, failed = list[IslandsPlan](), list[SetupError]()
    for number, island_of in enumerate(_divisions(network, job, islands.count), start=1):
        cell_of = np.full(len(network), IDLE)
        end_s = budget_s * number / 2
        try:
            for island in range(islands.count):
                members = np.flatnonzero(island_of == island)
                until_s = spent_s() + (end_s - spent_s()) / (islands.count - island)
                plan = search_overlapped(
                    part_of(network, members), job, seed=seed, budget_s=until_s, spent_s=spent_s
                )
                used = plan.stage_of != IDLE
                cell_of[members[used]] = island * job.stages + plan.stage_of[used]
        except SetupError as error:
            failed.append(SetupError(f"island {island}: {error.text}"))  # type: ignore
            continue
        found.append(predict_islands(network, job, islands, cell_of))
    if not found:
        raise failed[-1]
    return min(found, key=lambda plan: plan.step_s)


def predict_islands(
    network: Network, job: StepWork, islands: IslandLayout, cell_of: Sequence[int] | np.ndarray
) -> IslandsPlan:
    """The steps of a division into cells.

    Raises:
        SetupError: a cell without a device, or a device that cannot hold its stage.
    """
    cell_N = np.asarray(cell_of, dtype=np.int64)
    steps = [
        Overlap(part_of(network, members), job).predict(cell_N[members] % job.stages)
        for members in members_of_islands(cell_N, job.stages, islands.count)
    ]
    slowest = max(range(islands.count), key=lambda island: steps[island].total_s)
    lasts_s = meeting_s(network, job, islands, cell_N)
    return IslandsPlan(cell_N, steps[slowest], slowest, lasts_s, islands.local_steps)


def members_of_islands(cell_N: np.ndarray, stages: int, count: int) -> list[np.ndarray]:
    return [np.flatnonzero((cell_N != IDLE) & (cell_N // stages == island)) for island in range(count)]


def part_of(network: Network, members: np.ndarray) -> Network:
    return replace(network, devices=tuple(network.devices[i] for i in members))


def meeting_s(network: Network, job: StepWork, islands: IslandLayout, cell_N: np.ndarray) -> float:
    """Seconds of a meeting: each device gets from every other island what it has changed of its stage; or,
    where each adds up a part, that part of it and the sum of its own.

    The devices of a cell share what they send. All stages meet at once, and no device is in two.
    """
    longest_s = 0.0
    for stage, size_bytes in enumerate(islands.from_each_bytes):
        members = np.flatnonzero((cell_N != IDLE) & (cell_N % job.stages == stage))
        island_n = cell_N[members] // job.stages
        of_island = np.bincount(island_n, minlength=islands.count)[island_n]
        latency_nn, bandwidth_nn = network.between(members, members)
        line_nn, up_n, down_n = (
            carried_s((8.0 * size_bytes, 8.0 * size_bytes * islands.packed_part), 1.0 / bps)
            for bps in (bandwidth_nn, network.upload_bps[members], network.download_bps[members])
        )
        line_nn /= of_island[:, None]
        up_n *= (len(members) - of_island) / of_island
        down_n *= islands.count - 1
        arrival_nn = latency_nn + np.maximum(np.maximum(line_nn, up_n[:, None]), down_n)
        elsewhere_nn = island_n[:, None] != island_n
        longest_s = max(longest_s, float(np.where(elsewhere_nn, arrival_nn, 0.0).max(initial=0.0)))
    return longest_s


def meeting_bytes(job: StepWork, islands: IslandLayout, cell_N: np.ndarray) -> float:
    """What all devices send in a meeting."""
    used = cell_N[cell_N != IDLE] % job.stages
    members_S = np.bincount(used, minlength=job.stages)
    return float((islands.count - 1) * members_S @ np.array(islands.from_each_bytes))


def propose(
    network: Network, job_of_islands: Callable[[int], StepWork], islands: IslandLayout, counts: Sequence[int],
    *, seed: int,
) -> tuple[IslandLayout, IslandsPlan] | None:  # fmt: skip
    """The fastest of so many islands each, that meet as seldom as they must; None: none can be.

    `job_of_islands`: the job of one of so many; `islands`: what is said of them, for any count.
    """
    found = list[tuple[IslandLayout, IslandsPlan]]()
    for count in counts:
        one = replace(islands, count=count, local_steps=LOCAL_STEPS[0])
        try:
            plan = search_islands(network, job_of_islands(count), one, seed=seed)
        except SetupError:
            continue
        enough = plan.meeting_s / (MEETING_PART * plan.inner.total_s)
        steps = next((steps for steps in LOCAL_STEPS if steps >= enough), LOCAL_STEPS[-1])
        found.append((replace(one, local_steps=steps), plan._replace(local_steps=steps)))
    return min(found, key=lambda each: each[1].step_s, default=None)


def _divisions(network: Network, job: StepWork, count: int) -> Iterator[np.ndarray]:
    """[N] islands of the devices: near ones together; and alike ones to each, which
    helps where the memories of near ones are too small.
    """
    flops = (1 + BACKWARD_FORWARDS) * max(np.mean(job.forward_flops), 1e-12)
    out_bits = 8.0 * np.mean([job.bytes_out(stage) for stage in range(job.stages)])
    rate_N = 1.0 / (flops / network.flops_per_s + out_bits / network.upload_bps)
    region_N, row = network.region_of, fenced_row(network)
    # The row is cut into parts that are equally fast, of at least as many devices as there are stages.
    total, ends = np.cumsum(rate_N[row]), [0]
    middle = total - rate_N[row] / 2
    for island in range(1, count):
        end = int(np.searchsorted(middle, total[-1] * island / count))
        ends.append(min(max(end, ends[-1] + job.stages), len(row) - (count - island) * job.stages))
    near_N = np.empty(len(row), dtype=np.int64)
    near_N[row] = np.searchsorted(ends, np.arange(len(row)), side="right") - 1
    for region in np.unique(region_N):
        here = np.flatnonzero(region_N == region)
        near_N[here[np.argsort(rate_N[here], kind="stable")]] = _dealt(np.bincount(near_N[here]))
    yield near_N
    order = np.lexsort((rate_N, network.memory_bytes))
    dealt_N = np.empty(len(row), dtype=np.int64)
    dealt_N[order] = _dealt(np.bincount(np.arange(len(row)) % count))
    yield dealt_N


def _dealt(sizes: np.ndarray) -> list[int]:
    """Islands with so many places each, to and fro: what is in a row is dealt out to all of them alike."""
    left, found, forth = sizes.copy(), list[int](), True
    while left.any():
        turn = [int(island) for island in np.flatnonzero(left)]
        found += turn if forth else turn[::-1]
        left[turn] -= 1
        forth = not forth
    return found
