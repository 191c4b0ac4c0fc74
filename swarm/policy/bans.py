"""Who rests after a failure, and how long. Pure: times are monotonic seconds given by the caller."""

from __future__ import annotations

from swarm.ids import PeerId

FIRST_BAN_S = 1.0
"""Long enough for a broken connection to be dialled afresh, short enough not to miss a peer that is well."""
LONGEST_BAN_S = 30.0


class Bans:
    """Peers that failed rest: 1 s, then twice as long each time, until they answer again.

    With `probed`, somebody asks those that fell silent whether they are back (`peers.probe`). Then they rest
    until they are heard: not longer, and not shorter either, since whoever is given work while it hangs costs
    the time to notice. One that answers nonsense, or questions but no work, rests for its time all the same.
    """

    def __init__(
        self, *, first_s: float = FIRST_BAN_S, longest_s: float = LONGEST_BAN_S, probed: bool = False
    ) -> None:
        self._first_s, self._longest_s, self._probed = first_s, longest_s, probed
        self._until: dict[PeerId, float] = {}
        self._last_s: dict[PeerId, float] = {}
        self._silent: set[PeerId] = set()
        self.changes = 0
        """Goes up whenever somebody's rest begins or ends, but for those that end by time."""

    def failed(self, peer: PeerId, *, now: float, silent: bool = False) -> float:
        """Let `peer` rest; returns for how many seconds. `silent`: it gave no answer, or was not reached.

        Failures while it rests already are the same event seen by other calls: they add nothing.
        """
        if self._probed and silent and not now < self.ends(peer):
            self._silent.add(peer)
            self.changes += 1
        if now < self.ends(peer):
            return self._until[peer] - now
        ban_s = min(self._longest_s, 2 * self._last_s.get(peer, self._first_s / 2))
        self.changes += 1
        self._last_s[peer] = ban_s
        self._until[peer] = now + ban_s
        return ban_s

    def answered(self, peer: PeerId) -> None:
        """It works: the next failure starts with a short rest again."""
        if peer in self._until or peer in self._silent:
            self.changes += 1
        self._last_s.pop(peer, None)
        self._until.pop(peer, None)
        self._silent.discard(peer)

    def heard(self, peer: PeerId) -> None:
        """One that was silent gave a sign of life. After its first failure it rests no more."""
        if peer in self._silent:
            self.changes += 1
            self._silent.remove(peer)
            if self._last_s.get(peer, 0.0) <= self._first_s:
                self._until.pop(peer, None)

    def silent(self) -> list[PeerId]:
        """Those to be asked whether they are back."""
        return sorted(self._silent)

    def forget(self, peer: PeerId) -> None:
        """It is not announced any more: nobody needs to ask."""
        self.changes += 1
        self._silent.discard(peer)

    def resting(self, peer: PeerId, *, now: float) -> bool:
        """Whether `peer` should not be called now."""
        return peer in self._silent or now < self.ends(peer)

    def ends(self, peer: PeerId) -> float:
        """When its rest ends, at the earliest if it is silent; minus infinity if it is not banned."""
        return self._until.get(peer, float("-inf"))
