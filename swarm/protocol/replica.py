"""What one replica reports of itself, and what it does about a directive. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from swarm.ids import Generation, PeerId, Position
from swarm.protocol.ledger import Bitmap
from swarm.protocol.messages import Directive, ReplicaReport, StepDirective
from swarm.protocol.rounds import Commit, Plan, StepReport, finishes_until_s
from swarm.protocol.step import ReplicaStep, StepState

COMMITS_KEPT = 3
"""With delayed updates a replica may be two steps behind the run, and hold both gradients."""


class Local(NamedTuple):
    """This replica as it is now. Its steps are those that are not over."""

    generation: Generation
    version: int
    steps: Mapping[int, ReplicaStep]
    commits: Mapping[int, Commit]
    """Its last commits, by step."""
    digest: str = ""
    kind: str = ""
    bandwidth_bps: float = 0.0
    joined: bool = True
    leaving: bool = False
    busy: bool = False
    """It takes a step or changes its whole state: no directive is followed meanwhile."""

    @property
    def position(self) -> Position:
        return Position(self.generation, self.version)

    @property
    def begun(self) -> bool:
        """Whether this replica has anything of an open step."""
        return any(step.begun for step in self.steps.values())


# -- actions ------------------------------------------------------------------------------------------


class BeginAllReduce(msgspec.Struct, frozen=True):
    """Freeze the sum of step `t` for a round, and reduce it with the others."""

    t: int
    plan: Plan


class Fetch(msgspec.Struct, frozen=True):
    """Take the result of a round from a replica that holds it."""

    t: int
    round: str
    sources: tuple[PeerId, ...]
    digest: str = ""
    """Of what they signed that they hold; empty: they signed nothing."""


class Retract(msgspec.Struct, frozen=True):
    """Subtract microbatches from the sum of step `t`: another replica counts them."""

    t: int
    microbatches: int


class BeginAgain(msgspec.Struct, frozen=True):
    """Drop the result and the sum of step `t`."""

    t: int


class Unfreeze(msgspec.Struct, frozen=True):
    """Give up the round of step `t`, and open the sum again."""

    t: int


class ApplyStep(msgspec.Struct, frozen=True):
    """Take a step with the gradient that is prepared."""

    commit: Commit


class CatchUp(msgspec.Struct, frozen=True):
    """Go to the stage's position, as the coordinator gives it: steps were missed, or the run rolled back."""

    directive: Directive


class RestoreStage(msgspec.Struct, frozen=True):
    """Find a state that the run can go on from: no replica of the stage has it."""


class AskLostStage(msgspec.Struct, frozen=True):
    """Ask the replicas of the stage that a generation calls lost where they are."""

    generation: Generation


class Retreat(msgspec.Struct, frozen=True):
    """Go back to a generation, keeping the version: the one since was started in error, or by a liar."""

    generation: Generation


class AskAbsent(msgspec.Struct, frozen=True):
    """Ask peers whether they are there, and have anything of step `t`: their word on it is lacking."""

    t: int
    peers: tuple[PeerId, ...]


class AskWitnesses(msgspec.Struct, frozen=True):
    """Ask the other stages how far the run is: a replica says that it is far ahead."""


StateChange = ApplyStep | BeginAgain | CatchUp | RestoreStage
"""One of them at a time."""
Ask = AskWitnesses | AskLostStage | AskAbsent
Action = StateChange | BeginAllReduce | Fetch | Retract | Unfreeze | Retreat | Ask


# -- the report ---------------------------------------------------------------------------------------


def newest_commits(commits: Mapping[int, Commit], *, since: int = 0) -> tuple[Commit, ...]:
    """The newest commits, ascending; of steps from `since` on."""
    return tuple([commits[t] for t in sorted(commits)[-COMMITS_KEPT:] if t >= since]) if commits else ()


def report_of(run: str, stage: int, local: Local, *, since: int = 0) -> ReplicaReport:
    """What a replica reports of itself. `since`: the version at which its coordinator has the stage."""
    steps = [
        StepReport(
            t=step.t, done=Bitmap(step.ledger.done),
            in_progress=Bitmap(step.ledger.promised & ~step.ledger.done),
            frozen_for=step.ledger.frozen_for or "", prepared=step.prepared, failed_round=step.failed_round,
            gave_all=step.gave_all,
        )
        for _, step in sorted(local.steps.items())
    ]  # fmt: skip
    return ReplicaReport(
        run=run, stage=stage, generation=local.generation, version=local.version, digest=local.digest,
        kind=local.kind, steps=tuple(steps), commits=newest_commits(local.commits, since=since),
        bandwidth_bps=local.bandwidth_bps,
    )  # fmt: skip


# -- the directive ------------------------------------------------------------------------------------


def follow(
    me: PeerId, local: Local, directive: Directive, commits: Mapping[int, Commit], *, now: float
) -> list[Action]:
    """What a directive asks for and is not done yet. Directives repeat: what is in progress is asked for
    again. `commits`: those that are believed.
    """
    if local.busy:
        return []
    same_generation = directive.generation == local.generation
    commit = commits.get(local.version)
    if same_generation and commit is not None:
        step = local.steps.get(local.version)
        if step is not None and step.state is StepState.PREPARED:
            return [ApplyStep(commit)]
    theirs = directive.position
    differs = directive.digest and local.digest and directive.digest != local.digest
    if theirs > local.position or (theirs == local.position and differs):
        return [CatchUp(directive)]
    actions: list[Action] = []
    for wanted in directive.steps if same_generation else ():
        step = local.steps.get(wanted.t)
        if step is not None and not step.over:
            action = _follow_step(me, step, wanted, now)
            if action is not None:
                actions.append(action)
    return actions


def _follow_step(me: PeerId, step: ReplicaStep, wanted: StepDirective, now: float) -> Action | None:
    if wanted.begin_again:
        return BeginAgain(step.t) if step.prepared is not None else None
    if wanted.fetch is not None:
        if step.prepared is None or step.prepared.round != wanted.fetch.round:
            sources = tuple(peer for peer in wanted.fetch.sources if peer != me)
            if sources and not _finishes_itself(step, wanted.fetch.round, now):
                digest = wanted.fetch.proofs[0].prepared.digest if wanted.fetch.proofs else ""
                return Fetch(step.t, wanted.fetch.round, sources, digest)
    elif step.prepared is not None:
        return None
    elif wanted.plan is not None and me in wanted.plan.members:
        if wanted.plan.round not in (step.failed_round, step.round and step.round.name):
            return BeginAllReduce(step.t, wanted.plan)
    elif step.state is not StepState.OPEN:
        return Unfreeze(step.t)
    elif wanted.retract:
        return Retract(step.t, wanted.retract)
    return None


def _finishes_itself(step: ReplicaStep, round_name: str, now: float) -> bool:
    """Whether to finish this replica's own reduce, which is about to end, though another has the result."""
    if step.round is None or step.round.name != round_name:
        return False
    if step.state is StepState.COMPLETING:
        return True  # all that is missing are other stages' parts, which no replica's sum has
    step.round.told_s = step.round.told_s or now
    return now < finishes_until_s(step.round.began_s, step.round.told_s)
