"""Going back: what a run does when a stage has lost all of its members (invariant I5). Pure.

Every state of a run is a function of its manifest, so going back to an earlier one is always safe and costs
only time. What peers must agree on is *where to go on*: an era says that. Whoever brings a lost stage back
starts one; all stages then go back to its `start`, a version that each of them can get from somewhere, and
go on from there. The greater era holds, so two peers that start one at once settle it without asking.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from swarm.errors import Refused
from swarm.ids import Era, Stage
from swarm.policy.keeping import newest_common
from swarm.run import Run

MOST_ERAS = 1_000_000
FAR_BACK_S = 60.0


def newest_start(stages: int, saved: Mapping[Stage, Iterable[int]], *, most: int) -> int:
    """The newest version up to `most` that every stage can get. 0, which follows from the seed, always is."""
    reachable = {stage: [v for v in saved.get(stage, ()) if v <= most] for stage in range(stages)}
    return newest_common(reachable) or 0


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
