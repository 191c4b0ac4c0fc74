"""Going back: what a run does when a stage has lost all of its members (invariant I5). Pure.

Every state of a run is a function of its manifest, so going back to an earlier one is always safe and costs
only time. What peers must agree on is *where to go on*: an era says that. Whoever brings a lost stage back
starts one; all stages then go back to its `start`, a version that each of them can get from somewhere, and
go on from there. The greater era holds, so two peers that start one at once settle it without asking.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from swarm.errors import Refused
from swarm.ids import Era, Stage, Standing
from swarm.policy.keeping import newest_common
from swarm.run import Run

MOST_ERAS = 1_000_000
FAR_BACK_S = 60.0


def newest_start(stages: int, saved: Mapping[Stage, Iterable[int]], *, most: int) -> int:
    """The newest version up to `most` that every stage can get. 0, which follows from the seed, always is."""
    reachable = {stage: [v for v in saved.get(stage, ()) if v <= most] for stage in range(stages)}
    return newest_common(reachable) or 0


class Join(Enum):
    """What a newcomer does."""

    DOWNLOAD = "download"
    """A mate has what the run needs."""
    SERVE = "serve"
    """With the weights that it has: a brief brings the rest, if anything happened meanwhile."""
    LOST = "lost"
    """Nobody of its stage is where the run is: the stage has to be brought back."""


def join_by(mine: Standing, mates: Collection[Standing], run: Standing) -> Join:
    """`mates` serve the stage, `run` is the furthest of all peers; each has answered just now.

    A checkpoint newer than a run that goes on is of no use; a run that has not begun follows us.
    """
    if mates and (max(mates) > mine or Standing() < run < mine):
        return Join.DOWNLOAD
    return Join.SERVE if mates or run <= mine else Join.LOST


def is_one_step(mine: Standing, goal: Standing) -> bool:
    """Whether the gradient of one step brings a peer to `goal`; else it needs the whole state."""
    return goal.era == mine.era and goal.version == mine.version + 1


def may_leave(mine: Standing, staying: Collection[Standing]) -> bool:
    """Whether the stage keeps what this member has: two that leave after a step would take it with them."""
    return not staying or max(staying) >= mine


def is_alone_ahead(theirs: Standing, known: Standing) -> bool:
    """Whether nobody else is where this member says to be: stages step together."""
    return theirs.era == known.era and theirs.version > known.version + 1


class WayBack(NamedTuple):
    """How a run goes on whose stage was lost."""

    goal: Standing
    """Of a new era, unless it is where the run is."""
    wait_s: float
    """Not before that: those who have a newer checkpoint may come back."""


def way_back(
    stage: Stage,
    stages: int,
    run: Standing,
    saved: Mapping[Stage, Iterable[int]],
    *,
    waited_s: float,
    checkpoint_every: int,
    steps: int,
    from_keeper: bool = False,
) -> WayBack:
    """For a peer of `stage`, which the run, at `run`, has lost. `saved`: what is to be had, by stage.

    If a checkpoint of just that version is to be had, the run goes on; else a new era starts at the newest
    version that all stages can get. That may be a later one: after a long way back there may be a newer
    checkpoint than the run has come to again. With a keeper's answer nothing newer is waited for.
    """
    if run.version in saved.get(stage, ()):
        return WayBack(run, 0.0)
    start = newest_start(stages, saved, most=steps)
    wait_s = 0.0 if from_keeper else worth_waiting_s(start, run.version, checkpoint_every) - waited_s
    return WayBack(Standing(run.era.next(start), start), max(0.0, wait_s))


def worth_waiting_s(start: int, run_version: int, checkpoint_every: int) -> float:
    """How long a newer checkpoint is waited for before a run at `run_version` goes back to `start`.

    Going back by more than two checkpoints means that those who had newer ones are away: a keeper that
    restarts is back within a minute, and a minute is little against what would be computed again.
    """
    if not checkpoint_every or run_version - start <= 2 * checkpoint_every:
        return 0.0
    return FAR_BACK_S


def check_standing(era: Era, version: int, run: Run, *, what: str) -> None:
    """Refuse what no peer of the run can be at."""
    if not (0 <= era.number <= MOST_ERAS and 0 <= era.start <= run.steps):
        raise Refused(f"an impossible era: {era.number} of at most {MOST_ERAS}, from version {era.start}")
    if not 0 <= version <= run.steps:
        raise Refused(f"{what} of version {version} of a run of {run.steps} steps")
    if version < era.start:
        raise Refused(f"{what} of version {version} in an era that starts at version {era.start}")
