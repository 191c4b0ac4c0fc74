"""The number of microbatches that a trainer keeps in flight: twice what its swarm works on at once.

What a swarm can work on at once is its rate times the least time that a microbatch takes, its bandwidth-delay
product. By Little's law that is what was in flight, times the share of its time in which a microbatch moved
on. With an empty queue that share is 1, so the window doubles in each round trip, as TCP's slow start; it
rests where half of the time is spent waiting, and shrinks where more is. No clock, so the pauses between
steps do not matter, and nothing is forgotten at their ends. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

GAIN = 2.0
"""Times the product. What is beyond it waits, so that no device is idle while routes are uneven."""
SPARE = 2.0
"""Besides. Of several trainers each adds as many, so that their windows become alike."""


def moving_share(parts: Iterable[tuple[float, float]]) -> float:
    """The share of its time in which a microbatch did not wait; 0: unknown.

    Args:
        parts: seconds in each stage and on each link, as they were, and without others before it.
    """
    took_s = least_s = 0.0
    for part_s, part_least_s in parts:
        took_s, least_s = took_s + part_s, least_s + part_least_s
    return least_s / took_s if took_s > 0.0 else 0.0


class Window:
    """The size of a trainer's window, learned from the waits of its microbatches."""

    def __init__(self, *, start: int, largest: int, fixed: bool = False) -> None:
        self._largest = max(1, largest)
        self._size = float(max(1, min(start, largest)))
        self._fixed = fixed

    @property
    def size(self) -> int:
        """Microbatches in flight at most."""
        return int(self._size)

    def set_largest(self, largest: int) -> None:
        """Set the limit: more in flight than the swarm can hold is of no use."""
        self._largest = max(1, largest)
        self._size = min(self._size, self._largest)

    def answered(self, *, in_flight: int, moving: float) -> None:
        """Learn from a microbatch that came back.

        Args:
            in_flight: the trainer's microbatches of open steps, this one included.
            moving: share of its time in which it was computed or under way, and did not wait.
        """
        if self._fixed or not 0.0 < moving <= 1.0:
            return
        wanted = GAIN * in_flight * moving + SPARE
        if in_flight < self.size and wanted < self._size:
            return  # there was less to do than the window holds
        self._move(max(-1.0, min(1.0, (wanted - self._size) / self._size)))

    def refused(self) -> None:
        """Shrink the window: all peers were busy, so more is in flight than the swarm can hold."""
        if not self._fixed:
            self._move(-1.0)

    def _move(self, by: float) -> None:
        self._size = max(1.0, min(self._size + by, float(self._largest)))
