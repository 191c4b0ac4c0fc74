"""Detector of other programs that want the device (`--pause-when-busy`). Pure.

Desktops always use a little of a GPU, so the memory of other programs counts above the smallest amount seen.
Hysteresis in both directions: a pause begins when another program uses much of the device for a few seconds,
and ends when none has used more than half of that for a minute. A scrolling page pauses nothing, and a game
that loads its next level does not count as ended.
"""

from __future__ import annotations

from typing import NamedTuple

MORE_BYTES, SHARE = 512 << 20, 0.25
"""More than the least that was seen, or more than this of the time, counts as contention."""


class Use(NamedTuple):
    """Use of a device by other programs."""

    held_bytes: int
    share: float
    """Share of the time in which the device computed for them, 0 to 1."""


class ContentionDetector:
    """Decides from repeated observations of a device when to pause."""

    def __init__(self, *, contended_after_s: float = 3.0, free_after_s: float = 60.0) -> None:
        self._contended_after_s, self._free_after_s = contended_after_s, free_after_s
        self._baseline_bytes: int | None = None
        self._since: float | None = None
        """Since when the observations have contradicted the present verdict."""
        self._paused = False

    def observe(self, use: Use, *, now: float) -> tuple[bool, str]:
        """Add an observation made at `now` (monotonic seconds); return whether to pause, and why."""
        baseline = use.held_bytes if self._baseline_bytes is None else self._baseline_bytes
        self._baseline_bytes = min(use.held_bytes, baseline)
        more_bytes = use.held_bytes - self._baseline_bytes
        half = 0.5 if self._paused else 1.0
        wanted = more_bytes > half * MORE_BYTES or use.share > half * SHARE
        if wanted == self._paused:
            self._since = None
        else:
            self._since = now if self._since is None else self._since
            if now - self._since >= (self._free_after_s if self._paused else self._contended_after_s):
                self._paused, self._since = not self._paused, None
        why = f"other programs have {more_bytes >> 20} MiB more than usual, and {use.share:.0%} of the time"
        return self._paused, why
