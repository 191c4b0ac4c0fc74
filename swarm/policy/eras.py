"""Going back: what a run does when a stage has lost all of its members (invariant I5). Pure.

Every state of a run is a function of its manifest, so going back to an earlier one is always safe and costs
only time. What peers must agree on is *where to go on*: an era says that. Whoever brings a lost stage back
starts one; all stages then go back to its `start`, a version that each of them can get from somewhere, and
go on from there. The greater era holds, so two peers that start one at once settle it without asking.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from swarm.ids import Stage


def newest_common(stages: int, saved: Mapping[Stage, Iterable[int]], *, most: int) -> int:
    """The newest version up to `most` that every stage can get. 0, which follows from the seed, always is."""
    common = {v for v in saved.get(0, ()) if v <= most}
    for stage in range(1, stages):
        common &= set(saved.get(stage, ()))
    return max(common, default=0)
