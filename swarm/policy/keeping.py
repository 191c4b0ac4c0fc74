"""Which checkpoint a keeper downloads next, and how far the run is by its estimate. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from swarm.ids import PeerId, Stage
from swarm.protocol.voice import heard


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
    return min(ahead)[1:] if ahead else None


def reached(said: Mapping[Stage, Mapping[PeerId, int]], voice: Mapping[PeerId, int]) -> int | None:
    """The version that every stage has reached by the word of its own peers; None: no peer says anything.

    Stages step together, so no checkpoint can be newer. A peer that lies raises only the number of its own
    stage, and the smallest counts; if peers of a stage have `voice`, only they say where it is. `said`: the
    newest version that each peer says it has, or has saved.
    """
    newest = [max(of[peer] for peer in heard(of, voice)) for of in said.values() if of]
    return min(newest, default=None)


def borne_out(
    offered: Mapping[int, list[PeerId]],
    founders: Collection[PeerId],
    voice: Mapping[PeerId, int],
    signed: Collection[int] = (),
) -> dict[int, list[PeerId]]:
    """The saved versions of one stage that may be gone back to, of those that these peers offer.

    What peers with voice `signed`, what one with voice offers, and what most of those without it do: of these
    founders, if there are any or a version is signed. A stranger offers a state that it made up as a version
    that no other peer has.
    """
    without = frozenset[PeerId]().union(*offered.values()) - voice.keys()
    told = set(heard(without, dict.fromkeys(founders, 1)))
    if signed:
        told.intersection_update(founders)
    return {
        version: peers
        for version, peers in offered.items()
        if version in signed
        or not voice.keys().isdisjoint(peers)
        or 2 * len(told.intersection(peers)) > len(told)
    }


def worth_fetching(
    offered: Mapping[int, Sequence[PeerId]], voice: Mapping[PeerId, int], *, have_voiced: bool
) -> dict[int, Sequence[PeerId]]:
    """The versions of one stage that a keeper may fetch: none takes the place of one believed by more voice.

    Args:
        offered: the peers that offer each version.
        voice: of the stage. If its peers have voice, one of them has to offer a version.
        have_voiced: a version that one with voice gave is here.
    """
    if voice:
        return {version: peers for version, peers in offered.items() if not voice.keys().isdisjoint(peers)}
    return {} if have_voiced else dict(offered)
