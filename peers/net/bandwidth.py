"""What the line to a peer can do, from what passes over it anyway. No clock: durations are given."""

from __future__ import annotations

from collections import deque

from peers.ports import PROBE_BYTES, NetworkPath

SMALL_BYTES = 4096
"""A call with no more tells the round trip: its own time on the line is 3 ms at 10 Mbit/s."""
MAX_BPS = 1e12
"""Faster than any line: the body lay in a buffer when it was looked at."""
_ROUND_TRIPS = 32
"""Their least counts: whatever is above it is the work of the other end, or a queue."""
_BODIES = 15
"""Their median counts: one that lay in a buffer looks too fast, one that shared the line too slow."""


class BandwidthEstimator:
    """Looks at one line."""

    __slots__ = ("_rates_bps", "_round_trips_s", "brought_bytes")

    def __init__(self) -> None:
        self.brought_bytes = 0
        """All that came: calls of the peer and its answers to ours share the line."""
        self._round_trips_s: deque[float] = deque(maxlen=_ROUND_TRIPS)
        self._rates_bps: deque[float] = deque(maxlen=_BODIES)

    def answered(self, took_s: float, sent_bytes: int) -> None:
        """The first sign of the other end, so long after a call of so many bytes."""
        if sent_bytes <= SMALL_BYTES and took_s > 0:
            self._round_trips_s.append(took_s)

    def received(self, size_bytes: int, all_bytes: int, took_s: float) -> None:
        """A body of `size_bytes` is complete, so long after the header that announced it; the line brought
        `all_bytes` meanwhile."""
        if size_bytes >= PROBE_BYTES:
            self._rates_bps.append(min(MAX_BPS, 8 * all_bytes / took_s) if took_s > 0 else MAX_BPS)

    @property
    def line(self) -> NetworkPath:
        """As far as it is known."""
        rates_bps = sorted(self._rates_bps)
        return NetworkPath(
            rtt_s=min(self._round_trips_s, default=0.0),
            bandwidth_bps=rates_bps[len(rates_bps) // 2] if rates_bps else 0.0,
        )
