"""Keeping what is sent within a limit (`--max-upload`). No clock: times are given.

All links of a peer draw on one pacer. Bodies wait for their turn, first come, first served; a turn is short,
so that each body keeps moving and no receiver takes its sender for dead. Frames without a body (control
messages, heartbeats) go at once, and the bodies after them wait for what they took, but bodies keep half of
the line: who makes us answer without end, such as a stranger that asks for our status, cannot stop them.
"""

from __future__ import annotations

SHARE = 0.95
"""Of the limit, for our bytes: those of TCP, IP and libp2p's encryption come on top, 3 to 4 % of packets."""
TURN_S = 0.05
"""Of the line's time that one turn takes. 70 links that send at once all send within the silence limit."""
MIN_TURN_BYTES = 1024
CATCH_UP_S = 0.1
"""Of an idle past that may be used: timers are late by milliseconds."""
URGENT_SHARE = 0.5
"""Of the line, for frames that do not wait; what they take beyond it is not taken from bodies."""
URGENT_S = 2.0
"""How far ahead they may take their share."""


class RateLimiter:
    """Gives out turns."""

    def __init__(self, limit_bps: float) -> None:
        self.limit_bps = limit_bps
        self._bytes_per_s = SHARE * limit_bps / 8
        self.turn_bytes = max(MIN_TURN_BYTES, int(TURN_S * self._bytes_per_s))
        self._free_at = self._urgent_at = float("-inf")

    def take(self, nbytes: int, *, now: float) -> float:
        """Reserve the line for `nbytes`; how long they have to wait for their turn, in seconds."""
        self._free_at = max(self._free_at, now - CATCH_UP_S)
        wait_s = self._free_at - now
        self._free_at += nbytes / self._bytes_per_s
        return max(0.0, wait_s)

    def took(self, nbytes: int, *, now: float) -> None:
        """Frames of `nbytes` that did not wait: bodies wait for them, within the share of such frames."""
        self._urgent_at = max(self._urgent_at, now)
        share_s = max(0.0, now + URGENT_S - self._urgent_at) * URGENT_SHARE
        taken_s = min(nbytes / self._bytes_per_s, share_s)
        self._urgent_at += taken_s / URGENT_SHARE
        self._free_at = max(self._free_at, now - CATCH_UP_S) + taken_s
