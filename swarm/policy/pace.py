"""How slow a body may come, or be read. Pure: times and bytes are given by the caller."""

from __future__ import annotations

LEAST_BYTES_PER_S = 64_000.0
"""A line of half a megabit per second; what moves less holds others up."""
TIMES_SLOWER = 10.0
"""Than a line was measured: it is shared, and measurements scatter."""
GRACE_S = 5.0
"""To begin: to wait for its turn on a line that carries other things."""


def is_too_slow(came_bytes: float, after_s: float) -> bool:
    """Whether too little has come of a body that was accepted `after_s` ago."""
    return came_bytes < LEAST_BYTES_PER_S * (after_s - GRACE_S)


def most_s(size_bytes: float, *, line_bps: float = 0.0) -> float:
    """How long so many bytes may take over a line of that measured speed, in bits per second; 0: unknown."""
    return GRACE_S + size_bytes / max(LEAST_BYTES_PER_S, line_bps / 8 / TIMES_SLOWER)
