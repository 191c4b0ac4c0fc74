"""Adaptive timeout for calls to a peer that shows signs of life. Pure.

Heartbeats tell a hung machine from a slow one, but a process whose device is stuck still sends them. So a
call has a limit too, far beyond what honest work takes: a peer that is twenty times slower is used less, not
declared dead, also when several microbatches wait for one another there.
"""

from __future__ import annotations

MIN_S = 60.0
"""Covers a step that has yet to open, a stage that has yet to be joined, a download on the same link."""
UNKNOWN_S = 600.0
"""Before the first answer the speed of model and devices is unknown."""
TIMES_TYPICAL = 60.0
"""Covers a peer that is 20 times slower than the others and got more than its share before that was known."""
EMA_WEIGHT = 0.1


class AdaptiveTimeout:
    """Learns the typical duration of a call from its answers."""

    def __init__(self) -> None:
        self._typical_s: float | None = None

    def answered(self, took_s: float) -> None:
        """Record the duration of a call, everything behind it included."""
        old = self._typical_s
        self._typical_s = took_s if old is None else old + EMA_WEIGHT * (took_s - old)

    @property
    def limit_s(self) -> float:
        """Seconds after which a call is given up."""
        return UNKNOWN_S if self._typical_s is None else max(MIN_S, TIMES_TYPICAL * self._typical_s)
