"""Which checkpoint a keeper downloads next, and how far it believes that the run is. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from swarm.ids import Stage
from swarm.records import PeerRecord


def newest_common(versions: Mapping[Stage, Collection[int]]) -> int | None:
    """The newest version that every stage of `versions` has."""
    each = [frozenset(some) for some in versions.values()]
    common = each[0].intersection(*each[1:]) if each else frozenset[int]()
    return max(common, default=None)


def next_download(
    have: Mapping[Stage, Collection[int]], offered: Mapping[Stage, Collection[int]]
) -> tuple[Stage, int] | None:
    """The (stage, version) to fetch now; None: nothing that is offered is of use.

    First what is missing of the newest version that all stages can be had at, since that is what a run goes
    on from; then the newest of single stages, of which the others may come. What is older than what all
    stages have here is of no use any more. The same stages are in `have` and `offered`.
    """
    held = newest_common(have)
    floor = -1 if held is None else held
    reachable = newest_common({stage: {*have[stage], *offered[stage]} for stage in have})
    if reachable is not None and reachable > floor:
        return min((stage for stage in have if reachable not in have[stage]), default=-1), reachable
    ahead = [
        (max(have[stage], default=-1), stage, max(offered[stage]))
        for stage in have
        if offered[stage] and max(offered[stage]) > max(floor, *have[stage], -1)
    ]
    if not ahead:
        return None
    _, stage, version = min(ahead)
    return stage, version


def reached(records: Iterable[PeerRecord], claims: Mapping[Stage, Collection[int]]) -> int | None:
    """The version that every stage says it has come to; None: no stage has a peer that says anything.

    Stages step together, so no checkpoint can be newer. A peer that lies about its step moves only the
    number of its own stage up, and the smallest counts. `claims`: per stage, the versions that its own peers
    say they saved, which may be newer than their records.
    """
    newest = {stage: max(versions) for stage, versions in claims.items() if versions}
    for record in records:
        if record.state == "serving" and record.stage in claims:
            newest[record.stage] = max(record.version, newest.get(record.stage, 0))
    return min(newest.values(), default=None)
