"""The number of microbatches that a trainer keeps in flight: it grows while that raises throughput.

Hill climbing on measured throughput. An epoch is three windows' worth of answers; after each, the window
moves one notch in the direction that last helped, and turns round when it did not. Pure.
"""

from __future__ import annotations

GAIN = 1.03
"""A larger window must bring at least 3 % more microbatches per second: below that is noise."""
NOTCH = 1.25


class Window:
    """The size of a trainer's window, learned from the times of its answers."""

    def __init__(self, *, start: int, largest: int, fixed: bool = False) -> None:
        self.size = max(1, min(start, largest))
        self._largest = max(1, largest)
        self._fixed = fixed
        self._growing = True
        self._before = self.size
        """The size before the last notch up."""
        self._falls = 0
        self._best_rate = 0.0
        self._answers = 0
        self._began: float | None = None

    def set_largest(self, largest: int) -> None:
        """Set the limit: more in flight than the swarm can hold is of no use."""
        self._largest = max(1, largest)
        self.size = min(self.size, self._largest)

    def answered(self, *, now: float) -> None:
        """Count a microbatch that came back at `now` (monotonic seconds)."""
        if self._fixed:
            return
        if self._began is None:
            self._began = now
            return
        self._answers += 1
        if self._answers < 3 * self.size or now <= self._began:
            return
        self._end_epoch(self._answers / (now - self._began))
        self._answers, self._began = 0, now

    def paused(self) -> None:
        """Restart the epoch: a step ended or no peer could take work, so it measured waiting, not the
        window.
        """
        self._answers, self._began = 0, None

    def refused(self) -> None:
        """Shrink the window: all peers were busy, so more is in flight than the swarm can hold."""
        if not self._fixed:
            self.size = max(1, self.size - 1)
            self._growing = False
            self.paused()

    def _end_epoch(self, rate: float) -> None:
        if self._growing and rate < self._best_rate * GAIN:
            self._growing = False  # the last notch did not pay: take it back
            self.size = min(self._before, self._largest)
        elif self._growing:
            self._notch_up(rate)
        elif rate < self._best_rate / GAIN:
            self._falls += 1
            if self._falls == 2:  # conditions changed, one slow epoch is noise: explore again from here
                self._growing = True
                self._notch_up(rate)
        else:
            self._falls = 0
            self._best_rate = max(rate, 0.99 * self._best_rate)

    def _notch_up(self, rate: float) -> None:
        self._best_rate, self._before, self._falls = rate, self.size, 0
        self.size = min(self._largest, max(self.size + 1, round(self.size * NOTCH)))
