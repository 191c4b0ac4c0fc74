"""What the replicas of a stage and the coordinators of a run tell each other: state, not events. And checks
of it, which refuse what no honest one sends.

ReplicaReport   replica → its stage coordinator, which answers with a Directive
Directive       stage coordinator → replica
StageSummary    stage coordinator → run coordinator, which answers with a RunStatus
RunStatus       run coordinator → stage coordinator
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

from swarm.errors import Refused
from swarm.ids import Generation, PeerId, Position, Stage
from swarm.manifest import Run
from swarm.protocol.ledger import Bitmap, check_bitmap
from swarm.protocol.rollback import check_position
from swarm.protocol.rounds import NOTHING, Commit, FetchResult, Name, Plan, Sources, StepReport, StepSummary

LOSSES_KEPT = 64
"""Of the last steps. More is refused, since each coordinator keeps what the one before it said."""
MAX_LEFT_OUT = 8
"""Replicas that are said to be left out; there is no need to say it of all."""
MAX_STEPS = 4
"""Steps in one report: the open one, one more with delayed updates, and those about to close."""
Commits: TypeAlias = Annotated[tuple[Commit, ...], msgspec.Meta(max_length=MAX_STEPS)]


class Positioned(msgspec.Struct, frozen=True, kw_only=True):
    """A message that says how far its sender, stage or run is."""

    generation: Generation = Generation()
    version: int

    @property
    def position(self) -> Position:
        return Position(self.generation, self.version)


class Numbered(Positioned, frozen=True, kw_only=True):
    """A message that the next one of its sender replaces."""

    number: int = 0
    """Rises with each message of its sender."""

    def is_overtaken_by(self, last: Numbered | None) -> bool:
        """Whether this message was late on its way: `last`, the last of the same sender, if any, is newer."""
        return last is not None and self.number < last.number


class ReplicaReport(Numbered, frozen=True, kw_only=True):
    """All that a coordinator needs to know of a replica. State, not events.

    The last stage adds a body: per step, the float64 losses of the microbatches in `done`, ascending.
    """

    run: str
    stage: Stage
    digest: Name = ""
    """Digest of the weights of `version`; empty while it is being computed."""
    kind: Name = ""
    """Kind of device: digests of different kinds are compared only where the run realigns."""
    steps: tuple[StepReport, ...] = ()
    commits: Commits = ()
    """The last that this replica took: the next coordinator says the same."""
    say_leaving: bool = False
    """The last report: this replica must not be counted on any more."""
    bandwidth_bps: float = 0.0


class StepDirective(msgspec.Struct, frozen=True, kw_only=True):
    """What the stage does about step `t`. At most one of the others is set."""

    t: int
    plan: Plan | None = None
    fetch: FetchResult | None = None
    retract: Bitmap = NOTHING
    """Microbatches that this replica subtracts."""
    begin_again: bool = False
    """Drop the result and the sum: no other replica knows of their round."""


class StepLacking(msgspec.Struct, frozen=True, kw_only=True):
    """For trainers: per stage, the microbatches of step `t` that no replica has or computes."""

    t: int
    by_stage: tuple[Bitmap, ...]


class RunStatus(Positioned, frozen=True, kw_only=True):
    """The run coordinator's picture of the run."""

    run: str = ""
    version: int = 0
    held_by_all: int = -1
    """The version that every stage has reached; -1: some stage has been silent lately."""
    lacking: tuple[StepLacking, ...] = ()
    commits: Commits = ()
    """The newest, ascending. More than one: with delayed updates a stage may have to take two steps."""
    losses: Annotated[tuple[tuple[int, float], ...], msgspec.Meta(max_length=LOSSES_KEPT)] = ()
    """Mean loss of each of the last steps, each over exactly M microbatches."""
    run_coordinator: PeerId = ""


class Directive(Numbered, frozen=True, kw_only=True):
    """What a coordinator tells a replica of its stage."""

    run: str
    stage: Stage
    coordinator: PeerId
    sources: Sources = ()
    """Replicas at `version`, the newest in the stage, from which those behind it catch up. Empty: none has
    it yet, and each gets it where it can."""
    behind_s: int = 0
    """For how long the stage has been unable to follow the run; the next coordinator goes on counting."""
    digest: Name = ""
    """What most replicas of `version` hold; empty while unknown."""
    left_out: Annotated[tuple[PeerId, ...], msgspec.Meta(max_length=MAX_LEFT_OUT)] = ()
    """Replicas that take part in nothing for now: they cost the stage too much."""
    steps: tuple[StepDirective, ...] = ()
    commits: Commits = ()
    run_status: RunStatus = RunStatus()


class StageSummary(Numbered, frozen=True, kw_only=True):
    """A stage's state, from its coordinator to the run coordinator."""

    run: str
    stage: Stage
    members: int
    steps: tuple[StepSummary, ...] = ()
    commits: Commits = ()


def check_report(report: ReplicaReport, run: Run) -> None:
    """Refuse a report that no honest replica sends. Raises Refused: the text names what is impossible."""
    check_position(report.generation, report.version, run, what="a report")
    if not 0.0 <= report.bandwidth_bps < math.inf:
        raise Refused(f"an impossible bandwidth, {report.bandwidth_bps} bit/s")
    _check_steps([step.t for step in report.steps], run)
    _check_commits(report.commits, run)
    for step in report.steps:
        check_bitmap(step.done | step.in_progress, run.microbatches(step.t))
        if step.prepared is not None:
            _check_sqnorm(step.prepared.sqnorm)


def check_summary(summary: StageSummary, run: Run) -> None:
    """Refuse a summary that no honest stage coordinator sends. Raises as `check_report`."""
    check_position(summary.generation, summary.version, run, what="a summary")
    _check_steps([step.t for step in summary.steps], run)
    _check_commits(summary.commits, run)
    for step in summary.steps:
        check_bitmap(step.unclaimed, run.microbatches(step.t))
        _check_sqnorm(step.sqnorm)


def _check_steps(steps: Sequence[int], run: Run) -> None:
    in_order = list(steps) == sorted(set(steps))
    if len(steps) > MAX_STEPS or not in_order or not all(0 <= t < run.steps for t in steps):
        raise Refused(f"{list(steps)[:8]} are not open steps of a run of {run.steps}")


def _check_commits(commits: Sequence[Commit], run: Run) -> None:
    for commit in commits:
        if not 0 <= commit.t < run.steps:
            raise Refused(f"a commit for step {commit.t} of a run of {run.steps} steps")
        _check_sqnorm(commit.total_sqnorm)


def _check_sqnorm(sqnorm: float) -> None:
    """Refuse a norm that no sum has. Infinity is allowed: the run diverged, and taking the step says so."""
    if not sqnorm >= 0.0:
        raise Refused(f"an impossible squared norm, {sqnorm}")
