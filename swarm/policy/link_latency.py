"""Links between peers of neighbouring stages: what callers measured of them, and what is under way. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from swarm.ids import PeerId

MAX_PAIRS = 100_000
"""300 peers of a stage times 300 of the next. The oldest are forgotten."""
DEFAULT_S = 0.1
"""Of a link that was never measured, for each microbatch that is under way on it already."""
FORGOTTEN = 1 / 256
"""The latency of a link grows by so much with each measurement: a link that became longer is known to be
after some hundreds, one that is crowded for a while is not taken for longer."""


class LinkLatency:
    """Round-trip seconds on the links between peers of neighbouring stages."""

    def __init__(self) -> None:
        self._least_s: dict[tuple[PeerId, PeerId], float] = {}
        self._in_flight = Counter[tuple[PeerId, PeerId]]()

    def took(self, here: PeerId, there: PeerId, latency_s: float) -> None:
        """Record the latency of one microbatch and its gradient."""
        least_s = self._least_s.get((here, there))
        if least_s is None and len(self._least_s) >= MAX_PAIRS:
            del self._least_s[next(iter(self._least_s))]
        known_s = latency_s if least_s is None else least_s * (1.0 + FORGOTTEN)
        self._least_s[here, there] = min(latency_s, known_s)

    def least_s(self, here: PeerId, there: PeerId) -> float:
        """Without other transfers in the way; 0 before the first measurement."""
        return self._least_s.get((here, there), 0.0)

    def price_s(self, here: PeerId, there: PeerId) -> float:
        """What one more microbatch would take, as if all that are under way were on the link now.

        0 for a link that was never measured nor chosen, so that every link is tried.
        """
        in_flight, least_s = self._in_flight[here, there], self._least_s.get((here, there))
        return DEFAULT_S * in_flight if least_s is None else least_s * (1 + in_flight)

    def began(self, route: Sequence[PeerId]) -> None:
        """Note that a microbatch takes this route."""
        self._in_flight.update(pairwise(route))

    def ended(self, route: Sequence[PeerId]) -> None:
        """Note that it does not any more."""
        for link in pairwise(route):
            self._in_flight[link] -= 1
            if not self._in_flight[link]:
                del self._in_flight[link]
