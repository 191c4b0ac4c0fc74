"""Links between peers of neighbouring stages: what callers measured of them, and what is under way. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from swarm.ids import PeerId

MAX_PAIRS = 100_000
"""300 peers of a stage times 300 of the next. The oldest are forgotten."""
DEFAULT_S = 0.1
"""Of a link that was never measured, for each microbatch that is under way on it already."""
LEAST_S = 1e-6
"""What any link is busy with a microbatch: in one process nothing is sent."""
FORGOTTEN = 1 / 256
"""The latency of a link grows by so much with each measurement: a link that became longer is known to be
after some hundreds, one that is crowded for a while is not taken for longer."""


class LinkLatency:
    """Round-trip seconds on the links between peers of neighbouring stages."""

    def __init__(self) -> None:
        self._least_s: dict[tuple[PeerId, PeerId], float] = {}
        self._rtt_s: dict[tuple[PeerId, PeerId], float] = {}
        self._sides: dict[tuple[PeerId, str], tuple[int, float]] = {}
        """Of the links to a peer, and of those from it: how many are known, and what all carry a second."""
        self._in_flight = Counter[tuple[PeerId, PeerId]]()

    def took(self, here: PeerId, there: PeerId, latency_s: float, rtt_s: float = 0.0) -> None:
        """Record the latency of one microbatch and its gradient; and of a small message, if it is known."""
        link = here, there
        least_s = self._least_s.get(link)
        if least_s is None and len(self._least_s) >= MAX_PAIRS:
            oldest = next(iter(self._least_s))
            self._count(oldest, -1)
            del self._least_s[oldest]
            self._rtt_s.pop(oldest, None)
        self._count(link, -1)
        if 0.0 < rtt_s < math.inf:
            self._rtt_s[link] = rtt_s
        known_s = latency_s if least_s is None else least_s * (1.0 + FORGOTTEN)
        self._least_s[link] = min(latency_s, known_s)
        self._count(link, 1)

    def _count(self, link: tuple[PeerId, PeerId], by: int) -> None:
        """Add a link to what is known of its ends, or take it out."""
        if (rtt_s := self._rtt_s.get(link)) is not None:
            # What its bytes take each way: both are about as many, and it carries both at once.
            busy_s = max(LEAST_S, (self._least_s[link] - rtt_s) / 2)
            for side in ((link[1], "before"), (link[0], "after")):
                links, per_s = self._sides.pop(side, (0, 0.0))
                if links + by:
                    self._sides[side] = links + by, per_s + by / busy_s

    def least_s(self, here: PeerId, there: PeerId) -> float:
        """Without other transfers in the way; 0 before the first measurement."""
        return self._least_s.get((here, there), 0.0)

    def busy_s(self, peer: PeerId, before: int, after: int) -> float:
        """How long the links of a peer are busy with one of its microbatches, in seconds; 0: unknown.

        Args:
            before: number of peers of the stage before its own, whose links share its microbatches.
            after: that of the next one. The busier side counts.
        """
        sides = [(self._sides.get((peer, "before")), before), (self._sides.get((peer, "after")), after)]
        return max(
            (side[0] / side[1] / peers for side, peers in sides if side and side[0] and peers), default=0.0
        )

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
