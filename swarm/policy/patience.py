"""How long to wait for the answer of a peer that shows signs of life. Pure.

Heartbeats tell a hung machine from a slow one, but a process whose device is stuck still sends them. So a
call has a limit too, far beyond what honest work takes: what is twenty times slower is used less, not
declared dead, also when several microbatches wait for one another there.
"""

from __future__ import annotations

LEAST_S = 60.0
"""Covers a step that has yet to open, a stage that has yet to be joined, a download on the same line."""
UNKNOWN_S = 600.0
"""Before the first answer nothing is known of the model's or the devices' speed."""
TIMES_USUAL = 60.0
"""A peer that is 20 times slower than the others, and was given more than its share before that was known."""
EMA_WEIGHT = 0.1


class Patience:
    """Learns what is usual from the answers that came."""

    def __init__(self) -> None:
        self._usual_s: float | None = None

    def answered(self, took_s: float) -> None:
        """A call took so long, everything behind it included."""
        old = self._usual_s
        self._usual_s = took_s if old is None else old + EMA_WEIGHT * (took_s - old)

    @property
    def limit_s(self) -> float:
        """Give a call up after this."""
        return UNKNOWN_S if self._usual_s is None else max(LEAST_S, TIMES_USUAL * self._usual_s)
