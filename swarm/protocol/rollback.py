"""Rollback: what a run does when a stage has lost all of its replicas (invariant I5). Pure.

What peers must agree on is *where to go on*, which a generation says: docs/design.md, *Generations*. The
greater one wins, so two peers that each start one agree without a message. A generation is a claim: that a
stage had no replica left where the run was. Each peer checks it with that stage before it follows
(`is_disproved`); after a partition the larger half decides (`is_followed`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from swarm.errors import Refused
from swarm.ids import Generation, PeerId, Position, Stage
from swarm.manifest import Run
from swarm.policy.keeping import newest_common
from swarm.protocol.voice import heard, weight

MAX_GENERATIONS = 1_000_000
FAR_BACK_S = 60.0


def newest_start(stages: int, saved: Mapping[Stage, Iterable[int]], *, most: int) -> int:
    """The newest version up to `most` that every stage can get, as it can version 0: from the seed."""
    reachable = {stage: [v for v in saved.get(stage, ()) if v <= most] for stage in range(stages)}
    return newest_common(reachable) or 0


class Join(Enum):
    """What a newcomer does."""

    DOWNLOAD = "download"
    """A replica has what the run needs."""
    SERVE = "serve"
    """With the weights that it has: a directive brings the rest, if the run has moved meanwhile."""
    LOST = "lost"
    """No replica of its stage is where the run is: the stage has to be restored."""


def join_by(mine: Position, replicas: Collection[Position], run: Position) -> Join:
    """How a newcomer at `mine` joins. `replicas` serve the stage, `run` is the furthest of all peers; each
    has answered just now.

    A checkpoint newer than a run that goes on is of no use; a run that has not begun follows it.
    """
    if replicas and (max(replicas) > mine or Position() < run < mine):
        return Join.DOWNLOAD
    return Join.SERVE if replicas or run <= mine else Join.LOST


def is_one_step(mine: Position, goal: Position) -> bool:
    """Whether the gradient of one step takes a peer to `goal`; else it needs the whole state."""
    return goal.generation == mine.generation and goal.version == mine.version + 1


def may_leave(mine: Position, staying: Collection[Position]) -> bool:
    """Whether the stage keeps this replica's state: two that leave right after a step would take it along."""
    return not staying or max(staying) >= mine


def is_alone_ahead(theirs: Position, known: Position) -> bool:
    """Whether no other peer is where this replica claims to be: stages step together."""
    return theirs.generation == known.generation and theirs.version > known.version + 1


def is_disproved(claimed: Generation, of_stage: Iterable[Position], *, run_version: int) -> bool:
    """Whether a replica of the stage that a generation calls lost is, in an earlier one, where the run was:
    by the claim or, since that may be a lie, at `run_version`, as far as the reader knows.
    """
    where = min(claimed.lost_version, run_version)
    return any(at.generation < claimed and at.version >= where for at in of_stage)


def is_followed(claimed: Generation, replicas: Collection[tuple[Position, int]]) -> bool:
    """Whether at least half of the replicas are in a generation, or a later one, and not just one of several.

    `replicas`: where each is, and how much its word counts.
    """
    follow = [weight for at, weight in replicas if at.generation >= claimed]
    return len(follow) >= min(2, len(replicas)) and 2 * sum(follow) >= sum(w for _, w in replicas)


def furthest(replicas: Collection[tuple[Position, int]]) -> Position:
    """Where the run is, as those say that serve it: one of several says alone neither that it is in a later
    generation nor that it is further than all others. `replicas`: as for `is_followed`.
    """
    there = sorted(at for at, _ in replicas if is_followed(at.generation, replicas))
    if len(there) > 1 and is_alone_ahead(there[-1], there[-2]):
        there.pop()
    return max(there, default=Position())


class ReplicaState(NamedTuple):
    """Where a replica is, as it says itself."""

    position: Position
    digest: str = ""
    """Of its weights; empty while it is being computed."""
    kind: str = ""
    """Of device: those of other kinds differ in the last bits."""


def bearers(
    goal: Position, digest: str, mine: ReplicaState, told: Mapping[PeerId, ReplicaState],
    voice: Mapping[PeerId, int], *, me: PeerId, is_proven: bool,
) -> list[PeerId]:  # fmt: skip
    """The replicas from which to take what a directive says; none: it is not to be followed. A coordinator
    that lies would replace the weights of all others with those that it made up. So what it says has to be
    borne out by those whose word counts, each asked by this one, and this one counts as well.

    Args:
        digest: as the directive says; empty: it says none.
        told: what the others say that answered.
        is_proven: the commit that leads to the goal is.

    A replica at the goal already gives its weights up if at least half, itself included, have others. One
    that is behind goes on if at least half of those that are at the goal have the same, and the step before
    is proven or at least half of the stage has taken it. Where two others answer, one alone moves no replica
    without a proof, however much voice it has.
    """
    counted = {peer: told[peer] for peer in heard(told, voice)}
    there = {peer: one for peer, one in counted.items() if one.position == goal}
    agree = [peer for peer, one in there.items() if digest in ("", one.digest)]
    differ = [
        peer for peer, one in there.items() if peer not in agree and one.digest and one.kind == mine.kind
    ]
    behind = [peer for peer, one in counted.items() if one.position < goal]
    support = sum(weight(peer, voice) for peer in agree)
    against = sum(weight(peer, voice) for peer in differ)
    own = weight(me, voice) if me in voice or not voice else 0
    several = len(agree) > 1 or len(counted) == 1
    if goal == mine.position:
        return agree if several and support >= against + own else []
    if support < against:
        return []
    waiting = own + sum(weight(peer, voice) for peer in behind)
    return agree if is_proven or (several and support >= waiting) else []


def plan_rollback(
    stage: Stage, stages: int, run: Position, saved: Mapping[Stage, Iterable[int]], *, waited_s: float,
    checkpoint_every: int, steps: int, from_keeper: bool = False,
) -> tuple[Position, float]:  # fmt: skip
    """Where the run, at `run`, goes on after `stage` was lost, as one of its peers plans; and for how many
    seconds to wait first, as peers with a newer checkpoint may come back. `saved`: versions on offer, by
    stage.

    With a checkpoint of just that version the run goes on; else a new generation starts at the newest version
    that all stages can get. That may be a later one: after a long rollback there may be a checkpoint newer
    than what the run has reached again. With a keeper's answer nothing newer is waited for.
    """
    if run.version in saved.get(stage, ()):
        return run, 0.0
    start = newest_start(stages, saved, most=steps)
    wait_s = 0.0 if from_keeper else worth_waiting_s(start, run.version, checkpoint_every) - waited_s
    generation = Generation(run.generation.number + 1, start, stage, run.version)
    return Position(generation, start), max(0.0, wait_s)


def worth_waiting_s(start: int, run_version: int, checkpoint_every: int) -> float:
    """Seconds to wait for a newer checkpoint before a run at `run_version` goes back to `start`.

    Going back by more than two checkpoints means that the peers with newer ones are away: a keeper that
    restarts is back within a minute, and a minute is little against what would be computed again.
    """
    if not checkpoint_every or run_version - start <= 2 * checkpoint_every:
        return 0.0
    return FAR_BACK_S


def check_generation(generation: Generation, run: Run) -> None:
    """Refuse a generation that no peer of the run can be in."""
    if not (0 <= generation.number <= MAX_GENERATIONS and 0 <= generation.start <= run.steps):
        said = f"{generation.number} of at most {MAX_GENERATIONS}, from version {generation.start}"
        raise Refused(f"an impossible generation: {said}")
    if not (0 <= generation.lost_stage < run.S and 0 <= generation.lost_version <= run.steps):
        said = f"stage {generation.lost_stage} of {run.S} was lost at version {generation.lost_version}"
        raise Refused(f"an impossible generation: {said}")


def check_position(generation: Generation, version: int, run: Run, *, what: str) -> None:
    """Refuse a position that no peer of the run can have."""
    check_generation(generation, run)
    if not 0 <= version <= run.steps:
        raise Refused(f"{what} of version {version} of a run of {run.steps} steps")
    if version < generation.start:
        raise Refused(
            f"{what} of version {version} in a generation that starts at version {generation.start}"
        )
