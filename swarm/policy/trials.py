"""How many peers that have never answered may be tried. Pure: times are given by the caller.

Identities cost nothing: a hundred that take work and never answer would each cost a run what one may. So of
the unknown one is tried, two more once it answers, and so on, as long as they answer: the number of the known
doubles with each microbatch; after half a minute it is one again. After one that does not answer none is
tried for a while, twice as long each time.
"""

from __future__ import annotations

from collections import Counter

from swarm.ids import PeerId

FIRST_PAUSE_S = 30.0
MAX_PAUSE_S = 600.0


class Trials:
    """Of one stage, by one caller."""

    def __init__(self) -> None:
        self._room, self._pause_s = 1, FIRST_PAUSE_S
        self._since_s = float("-inf")
        self._open = Counter[PeerId]()
        """Microbatches at peers that have not answered any."""

    def may(self, *, now: float) -> bool:
        """Whether an unknown peer may get a microbatch."""
        if now - self._since_s >= self._pause_s:
            if self._open:
                self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s)
            self._room = 1
            self._open.clear()
        return self._open.total() < self._room

    def began(self, peer: PeerId, *, now: float) -> None:
        """Note that `peer`, which is unknown, was given a microbatch."""
        if not self._open:
            self._since_s = now
        self._open[peer] += 1

    def answered(self, peer: PeerId) -> None:
        """Note that `peer` answered for the first time. What else it was given is not waited for here."""
        del self._open[peer]
        self._room, self._pause_s = self._room + 1, FIRST_PAUSE_S

    def refused(self, peer: PeerId) -> None:
        """Note that `peer` said no, or is gone: that takes little time, so others may be tried instead."""
        del self._open[peer]
