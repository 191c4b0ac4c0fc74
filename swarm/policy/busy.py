"""Whether the owner's other programs want the device (`--pause-when-busy`). Pure.

Desktops always have a little of a GPU, so what others hold counts from the least that was seen. Hysteresis in
both directions: a pause begins when another program wants much of the device for a few seconds, and ends when
none has wanted more than half of that for a minute. So a page that scrolls pauses nothing, and a game that
loads its next level is not taken for ended.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What the processes of others have of a device."""

    held_bytes: int
    share: float
    """Of the time in which the device computed, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether to pause, and why (for logs and the status)."""

    pause: bool
    why: str


class BusyGate:
    """Looks at the use of a device, again and again, and says when to pause."""

    def __init__(
        self,
        *,
        most_bytes: int = 512 << 20,
        most_share: float = 0.25,
        busy_after_s: float = 3.0,
        free_after_s: float = 60.0,
    ) -> None:
        """More than `most_bytes` beyond the usual, or `most_share` of the time, is wanting the device."""
        self._most_bytes, self._most_share = most_bytes, most_share
        self._busy_after_s, self._free_after_s = busy_after_s, free_after_s
        self._usual_bytes: int | None = None
        self._since: float | None = None
        """From when on what is seen speaks against the present verdict."""
        self._paused = False

    def look(self, use: Use, *, now: float) -> Verdict:
        """`now`: monotonic seconds."""
        usual = use.held_bytes if self._usual_bytes is None else self._usual_bytes
        self._usual_bytes = min(use.held_bytes, usual)
        more_bytes = use.held_bytes - self._usual_bytes
        half = 0.5 if self._paused else 1.0
        wanted = more_bytes > half * self._most_bytes or use.share > half * self._most_share
        if wanted == self._paused:
            self._since = None
        else:
            self._since = now if self._since is None else self._since
            if now - self._since >= (self._free_after_s if self._paused else self._busy_after_s):
                self._paused, self._since = not self._paused, None
        why = f"other programs have {more_bytes >> 20} MiB more than usual, and {use.share:.0%} of the time"
        return Verdict(pause=self._paused, why=why)
