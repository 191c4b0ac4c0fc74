"""Whether a replica gives up the weights that it has on the word of its stage's coordinator. Pure.

A coordinator names a position, a digest and sources. One that lies would replace the weights of all others
with those that it made up. So what it says has to be borne out by the other replicas whose word counts, each
asked by this one, and this one counts as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from swarm.ids import PeerId, Position
from swarm.protocol.voice import heard, weight


class ReplicaState(NamedTuple):
    """Where a replica is, as it says itself."""

    position: Position
    digest: str = ""
    """Of its weights; empty while it is being computed."""
    kind: str = ""
    """Of device: those of other kinds differ in the last bits."""


def bearers(
    goal: Position,
    digest: str,
    mine: ReplicaState,
    told: Mapping[PeerId, ReplicaState],
    voice: Mapping[PeerId, int],
    *,
    me: PeerId,
    is_proven: bool,
) -> list[PeerId]:
    """The replicas from which to take what a directive says; none: it is not to be followed.

    Args:
        digest: as the directive says; empty: it says none.
        told: what the others say that answered.
        is_proven: the commit that leads to the goal is.

    A replica at the goal already gives its weights up if at least half, itself included, have others. One
    that is behind goes on if at least half of those that are at the goal have the same, and the step before
    is proven or at least half of the stage has taken it. Where two others answer, one alone moves nobody
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
