"""Who rests after a failure, and how long. Pure: times are monotonic seconds given by the caller."""

from __future__ import annotations

from swarm.ids import PeerId

FIRST_BAN_S = 1.0
"""Long enough for a broken connection to be dialled afresh, short enough not to miss a peer that is well."""
LONGEST_BAN_S = 30.0


class Bans:
    """Peers that failed rest: 1 s, then twice as long each time, until they answer again."""

    def __init__(self, *, first_s: float = FIRST_BAN_S, longest_s: float = LONGEST_BAN_S) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._until: dict[PeerId, float] = {}
        self._last_s: dict[PeerId, float] = {}

    def failed(self, peer: PeerId, *, now: float) -> float:
        """Let `peer` rest; returns for how many seconds.

        Failures while it rests already are the same event seen by other calls: they add nothing.
        """
        if self.resting(peer, now=now):
            return self._until[peer] - now
        ban_s = min(self._longest_s, 2 * self._last_s.get(peer, self._first_s / 2))
        self._last_s[peer] = ban_s
        self._until[peer] = now + ban_s
        return ban_s

    def answered(self, peer: PeerId) -> None:
        """It works: the next failure starts with a short rest again."""
        self._last_s.pop(peer, None)
        self._until.pop(peer, None)

    def resting(self, peer: PeerId, *, now: float) -> bool:
        """Whether `peer` should not be called now."""
        return now < self._until.get(peer, float("-inf"))

    def ends(self, peer: PeerId) -> float:
        """When its rest ends; minus infinity if it is not banned."""
        return self._until.get(peer, float("-inf"))
