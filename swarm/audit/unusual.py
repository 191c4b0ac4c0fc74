"""What is further off than it was for a while: answers with such a loss or gradient are computed again first.

How far apart honest values are depends on the model, and on how fast it learns: so no threshold would do.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

from swarm.ids import PeerId

SEEN = 1024
"""Deviations that the next are compared with: an honest one is strange once in so many."""
MARGIN = 1.25
MOST = 2.0
"""Times what was usual, as which an honest deviation is remembered at most: lies come after it, too."""
COMPARED = 64
"""With so many the next one is compared."""
FEWEST = 16
LEAST_LOSS = 0.1
"""Of the larger one."""
TINY = 1e-30
LEAST_LENGTH = math.log(10.0)
"""Of the logarithm. Gradients of some samples are several times as long as those of others."""

Honest: TypeAlias = Callable[[], None]
"""To be called when what looked strange was computed again, and fits."""


class Record:
    """Whether a deviation is larger than all that were seen lately, and were not strange, or honest."""

    def __init__(self, least: float) -> None:
        self._least = least
        self._seen: deque[float] = deque(maxlen=SEEN)

    def beyond(self, deviations: Mapping[PeerId, float]) -> dict[PeerId, tuple[float, Honest]]:
        """By how many times, where it is: those of one step. What is not known to be honest hides no lie."""
        limit = max(self._least, MARGIN * max(self._seen, default=0.0))
        self._seen.extend(far for far in deviations.values() if far <= limit)
        strange = {peer: far for peer, far in deviations.items() if far > limit}
        most = MOST * limit
        return {
            peer: (far / limit, partial(self._seen.append, min(far, most))) for peer, far in strange.items()
        }


class Unusual:
    """Numbers of one kind, as one caller gets them: is one further from the last than any was?"""

    def __init__(self, least: float, *, relative: bool = False) -> None:
        """`relative`: to the larger one of a number and what is usual."""
        self._last: deque[float] = deque(maxlen=COMPARED)
        self._relative = relative
        self._above, self._below = Record(least), Record(least)
        """Apart: that a model learns fast must not hide a lie, which mostly is a loss too high."""

    def strange(self, value: float) -> Honest | None:
        """Look at a number, which is one of the last from now on; None: it is not strange."""
        if not math.isfinite(value):
            return lambda: None
        usual = value if len(self._last) < FEWEST else statistics.median(self._last)
        far = (value - usual) / (max(abs(value), abs(usual), TINY) if self._relative else 1.0)
        self._last.append(value)
        strange = self._above.beyond({"": far}) | self._below.beyond({"": -far})
        return strange[""][1] if strange else None
