"""Checks of reports and summaries: no honest replica or coordinator sends what these refuse."""

from __future__ import annotations

import math
from collections.abc import Sequence

from swarm.errors import Refused
from swarm.manifest import Run
from swarm.protocol.ledger import check_bitmap
from swarm.protocol.messages import ReplicaReport, StageSummary
from swarm.protocol.rollback import check_position
from swarm.protocol.rounds import Commit

MAX_STEPS = 4
"""Steps in one report: the open one, one more with delayed updates, and those about to close."""
MAX_NAME = 64
"""Characters of a round's name or a digest: they are passed on to all replicas, in one message."""


def check_report(report: ReplicaReport, run: Run) -> None:
    """Refuse a report that no honest replica sends.

    Raises:
        Refused: the text names what is impossible.
    """
    check_position(report.generation, report.version, run, what="a report")
    if not 0.0 <= report.bandwidth_bps < math.inf:
        raise Refused(f"an impossible bandwidth, {report.bandwidth_bps} bit/s")
    _check_steps([step.t for step in report.steps], run)
    _check_commits(report.commits, run)
    _check_names(report.digest, report.kind)
    for step in report.steps:
        _check_names(step.frozen_for, step.failed_round)
        for ledger in (step.done, step.in_progress, step.inherited):
            check_bitmap(ledger, run.microbatches(step.t))
        if step.prepared is not None:
            _check_names(step.prepared.round, step.prepared.digest)
            _check_sqnorm(step.prepared.sqnorm)


def check_summary(summary: StageSummary, run: Run) -> None:
    """Refuse a summary that no honest stage coordinator sends.

    Raises:
        Refused: the text names what is impossible.
    """
    check_position(summary.generation, summary.version, run, what="a summary")
    _check_steps([step.t for step in summary.steps], run)
    _check_commits(summary.commits, run)
    for step in summary.steps:
        check_bitmap(step.unclaimed, run.microbatches(step.t))
        _check_sqnorm(step.sqnorm)


def _check_steps(steps: Sequence[int], run: Run) -> None:
    if (
        len(steps) > MAX_STEPS
        or list(steps) != sorted(set(steps))
        or not all(0 <= t < run.steps for t in steps)
    ):
        raise Refused(f"{list(steps)[:8]} are not open steps of a run of {run.steps}")


def _check_commits(commits: Sequence[Commit], run: Run) -> None:
    if len(commits) > MAX_STEPS:
        raise Refused(f"{len(commits)} commits at once; at most {MAX_STEPS}")
    for commit in commits:
        if not 0 <= commit.t < run.steps:
            raise Refused(f"a commit for step {commit.t} of a run of {run.steps} steps")
        _check_sqnorm(commit.total_sqnorm)


def _check_sqnorm(sqnorm: float) -> None:
    """Refuse a norm that no sum has. Infinity is allowed: the run diverged, and taking the step says so."""
    if not sqnorm >= 0.0:
        raise Refused(f"an impossible squared norm, {sqnorm}")


def _check_names(*names: str) -> None:
    for name in names:
        if len(name) > MAX_NAME:
            raise Refused(f"a name of {len(name)} characters; at most {MAX_NAME}: {name[:20]!r}…")
