"""How long it takes from one peer to another, as callers say. Pure."""

from __future__ import annotations

from collections import deque
from statistics import median_high

from swarm.ids import PeerId

REMEMBERED = 5
MOST = 100_000
"""Pairs: 300 peers of a stage and as many of the next one. The oldest are forgotten."""


class Ways:
    """Seconds on the lines between peers of neighbouring stages, there and back."""

    def __init__(self) -> None:
        self._took_s: dict[tuple[PeerId, PeerId], deque[float]] = {}

    def took(self, here: PeerId, there: PeerId, way_s: float) -> None:
        """A microbatch went this way, and its gradient came back."""
        times_s = self._took_s.get((here, there))
        if times_s is None:
            times_s = self._took_s[here, there] = deque(maxlen=REMEMBERED)
            if len(self._took_s) > MOST:
                del self._took_s[next(iter(self._took_s))]
        times_s.append(way_s)

    def expected_s(self, here: PeerId, there: PeerId) -> float:
        """Their median; 0 before the first, so that every way is tried."""
        times_s = self._took_s.get((here, there))
        return median_high(times_s) if times_s else 0.0
