"""How long a step of a simulated run takes, once its windows and routers have learned."""

from __future__ import annotations

from peers.sim.throughput.world import ThroughputReport
from swarm.errors import SetupError


def mean_step_s(report: ThroughputReport, *, skip: int = 2) -> float:
    """Seconds of a step, on average without the first few.

    Raises:
        SetupError: fewer steps than that were taken.
    """
    ends_s = report.step_ends_s
    if len(ends_s) < skip + 2:
        took = f"only {len(ends_s)} steps were taken in {report.end_s:.0f} s"
        raise SetupError(f"{took}: simulate for longer")
    return (ends_s[-1] - ends_s[skip]) / (len(ends_s) - 1 - skip)
