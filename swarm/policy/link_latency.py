"""Link latency between peers of neighbouring stages, as callers measured it. Pure."""

from __future__ import annotations

from collections import deque
from statistics import median_high

from swarm.ids import PeerId

REMEMBERED = 5
MAX_PAIRS = 100_000
"""300 peers of a stage times 300 of the next. The oldest are forgotten."""
FORGOTTEN = 1 / 256
"""The least latency of a link grows by so much with each measurement: a link that became longer is known to
be after some hundreds, one that is crowded for a while is not taken for longer."""


class LinkLatency:
    """Round-trip seconds on the links between peers of neighbouring stages."""

    def __init__(self) -> None:
        self._took_s: dict[tuple[PeerId, PeerId], deque[float]] = {}
        self._least_s: dict[tuple[PeerId, PeerId], float] = {}

    def took(self, here: PeerId, there: PeerId, latency_s: float) -> None:
        """Record the latency of one microbatch and its gradient."""
        times_s = self._took_s.get((here, there))
        if times_s is None:
            times_s = self._took_s[here, there] = deque(maxlen=REMEMBERED)
            if len(self._took_s) > MAX_PAIRS:
                oldest = next(iter(self._took_s))
                del self._took_s[oldest], self._least_s[oldest]
        times_s.append(latency_s)
        least_s = self._least_s.get((here, there), latency_s)
        self._least_s[here, there] = min(latency_s, least_s * (1.0 + FORGOTTEN))

    def expected_s(self, here: PeerId, there: PeerId) -> float:
        """The median; 0 before the first measurement, so that every link is tried."""
        times_s = self._took_s.get((here, there))
        return median_high(times_s) if times_s else 0.0

    def least_s(self, here: PeerId, there: PeerId) -> float:
        """Without other transfers in its way; 0 before the first measurement."""
        return self._least_s.get((here, there), 0.0)
