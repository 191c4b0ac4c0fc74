"""Virtual time: a heap of events.

    clock = Clock()
    clock.after(1.0, print, "a second later")
    clock.run(until=lambda: False, limit_s=60.0)

Events of one time come in the order in which they were made.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

MAX_AT_ONCE = 50_000
"""Events at one instant. A whole run has a few; more is something that calls itself for ever."""


class Clock:
    """A queue of events by time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        """Done so far."""
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._made = 0

    def after(self, delay_s: float, what: Callable[[Any], None], argument: Any = None) -> None:
        """Call `what(argument)` then."""
        self._made += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._made, what, argument))

    def run(self, *, until: Callable[[], bool], limit_s: float) -> bool:
        """Let time pass until `until()` holds; False if not before `limit_s`, or time stands still."""
        heap, began = self._heap, self.events
        while self.events - began < MAX_AT_ONCE:
            if until():
                return True
            if not heap or heap[0][0] > limit_s:
                return False
            at, _, what, argument = heapq.heappop(heap)
            if at > self.now:
                self.now, began = at, self.events
            self.events += 1
            what(argument)
        return False
