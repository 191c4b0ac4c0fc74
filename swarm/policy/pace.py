"""How slow a body may come, or be read. Pure: times and bytes are given by the caller."""

from __future__ import annotations

LEAST_BYTES_PER_S = 64_000.0
"""A line of half a megabit per second; what moves less holds others up."""
SHARE = 1 / 3
"""Of a line's measured speed, where that is less: it is shared, and measurements scatter."""
GRACE_S = 5.0
"""To begin: to wait for its turn on a line that carries other things."""


def least_bytes_per_s(line_bps: float) -> float:
    """What has to come each second over a line of that measured speed, in bits per second; 0: unknown."""
    return min(LEAST_BYTES_PER_S, SHARE * line_bps / 8) if line_bps > 0 else LEAST_BYTES_PER_S


def is_too_slow(came_bytes: float, after_s: float, *, line_bps: float = 0.0) -> bool:
    """Whether too little has come of a body that was accepted `after_s` ago."""
    return came_bytes < least_bytes_per_s(line_bps) * (after_s - GRACE_S)


def most_s(size_bytes: float) -> float:
    """How long so many bytes may take at the least pace, if nothing is known of the line."""
    return GRACE_S + size_bytes / LEAST_BYTES_PER_S
