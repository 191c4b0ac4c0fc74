"""Throughput of a run of islands: each is simulated by itself, since between meetings none knows of another.

The slowest island says when all meet. A meeting is a formula, as the reduces are: `swarm.plan.islands`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from peers.sim.throughput.engine import simulate
from peers.sim.throughput.report import Settings, ThroughputReport
from swarm.plan.islands import Islands, meeting_bytes, meeting_s, members_of_islands, part_of
from swarm.plan.network import Job, Network

STEPS = 16
"""Simulated of each island; the others are taken to last as long."""


@dataclass(frozen=True, slots=True)
class IslandsReport:
    """The outcome of some steps of each island; what is said of a step has its part of a meeting in it."""

    islands: list[ThroughputReport]
    job: Job
    """Of one island."""
    local_steps: int
    meeting_s: float
    meeting_bytes: float
    """Sent in a meeting."""

    @property
    def inner_s(self) -> list[float]:
        """Per island, seconds of a step; inf: it took none."""
        return [each.end_s / each.version if each.version else np.inf for each in self.islands]

    @property
    def step_s(self) -> float:
        """Seconds of a step of all of them."""
        return max(self.inner_s) + self.meeting_s / self.local_steps

    @property
    def utilisation(self) -> list[float]:
        """Per stage: the share of their time that its devices on all islands compute."""
        busy_S, devices_S = np.zeros(self.job.stages), np.zeros(self.job.stages)
        for each in self.islands:
            busy_S += np.array(each.busy_s) / max(each.version, 1)
            devices_S += np.array(each.there_s) / each.end_s
        return (busy_S / devices_S / self.step_s).tolist()

    def sent_bytes(self, what: str) -> float:
        """In a step, of all islands: `boundary_bytes` or `reduce_bytes`."""
        return sum(getattr(each, what) / max(each.version, 1) for each in self.islands)


def simulate_islands(
    network: Network,
    job: Job,
    islands: Islands,
    cell_of: Sequence[int] | np.ndarray,
    *,
    end_s: float,
    settings: Settings | None = None,
    seed: int = 0,
) -> IslandsReport:
    """The first steps of each island, for at most `end_s`. `job`: of one; `cell_of`: of every device.

    Raises:
        SetupError: as `simulate`.
    """
    cell_N = np.asarray(cell_of, dtype=np.int64)
    reports = [
        simulate(
            part_of(network, members), job, (cell_N[members] % job.stages).tolist(), end_s=end_s, steps=STEPS,
            settings=settings, seed=seed,
        )
        for members in members_of_islands(cell_N, job.stages, islands.count)
    ]  # fmt: skip
    return IslandsReport(
        reports, job, islands.local_steps, meeting_s(network, job, islands, cell_N),
        meeting_bytes(job, islands, cell_N),
    )  # fmt: skip
