"""How many peers that have never answered may be tried. Pure: times are given by the caller.

Identities cost nothing: a hundred that take work and never answer would each cost a run what one may. So of
the unknown one is tried, two more once it answers, and so on, as long as they answer: the number of the known
doubles with each microbatch. After one that does not answer none is tried for a while, twice as long each
time.
"""

from __future__ import annotations

FIRST_PAUSE_S = 30.0
MAX_PAUSE_S = 600.0


class Trials:
    """Of one stage, by one caller."""

    def __init__(self) -> None:
        self._room, self._pause_s = 1, FIRST_PAUSE_S
        self._since_s = float("-inf")
        self._unanswered = 0

    def may(self, *, now: float) -> bool:
        """Whether one more may be tried."""
        if self._unanswered and now - self._since_s >= self._pause_s:
            self._room, self._unanswered = 1, 0
            self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s)
        return self._unanswered < self._room

    def began(self, *, now: float) -> None:
        """Note a trial."""
        if not self._unanswered:
            self._since_s = now
        self._unanswered += 1

    def answered(self) -> None:
        """Note that one was answered for the first time."""
        self._unanswered = max(0, self._unanswered - 1)
        self._room, self._pause_s = self._room + 1, FIRST_PAUSE_S
