"""Which checkpoint a keeper downloads next, and how far the run is by its estimate. Pure."""

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
    """The (stage, version) to download now; None: nothing that is offered is of use.

    First what is missing of the newest version that can be completed for all stages, because a run resumes
    from that; then the newest of single stages, whose counterparts may follow. Versions older than the newest
    complete one here are useless. `have` and `offered` have the same stages.
    """
    stored = newest_common(have)
    floor = -1 if stored is None else stored
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
    """The version that every stage has reached by its own records; None: no stage has a peer that says
    anything.

    Stages step together, so no checkpoint can be newer. A peer that lies about its step raises only the
    number of its own stage, and the smallest counts. `claims`: per stage, the versions that its own peers say
    they saved, which may be newer than their records.
    """
    newest = {stage: max(versions) for stage, versions in claims.items() if versions}
    for record in records:
        if record.state == "serving" and record.stage in claims:
            newest[record.stage] = max(record.version, newest.get(record.stage, 0))
    return min(newest.values(), default=None)
