"""What is further off than it was for a while, and which loss is: its answer is computed again first.

How far apart honest values are depends on the model, and on how fast it learns: so no threshold would do.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping

from swarm.ids import PeerId

SEEN = 1024
"""Deviations that the next are compared with: an honest one is strange once in so many."""
MARGIN = 1.25
MOST = 2.0
"""Times what was usual, as which a deviation is remembered at most: one lie must not hide the next."""
LOSSES = 64
"""That the next one is compared with."""
FEWEST_LOSSES = 16
LEAST_LOSS = 0.1
"""Of the larger one."""


class Record:
    """Whether a deviation is larger than all that were seen lately."""

    def __init__(self, least: float) -> None:
        self._least = least
        self._seen: deque[float] = deque(maxlen=SEEN)

    def beyond(self, deviations: Mapping[PeerId, float]) -> dict[PeerId, float]:
        """By how many times, where it is: those of one step."""
        limit = max(self._least, MARGIN * max(self._seen, default=0.0))
        self._seen.extend(min(far, MOST * limit) for far in deviations.values())
        return {peer: far / limit for peer, far in deviations.items() if far > limit}


class LossScreen:
    """The losses of microbatches, as one caller sees them."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=LOSSES)
        self._above, self._below = Record(LEAST_LOSS), Record(LEAST_LOSS)
        """Apart: that a model learns fast must not hide a lie, which mostly is a loss too high."""

    def is_strange(self, loss: float) -> bool:
        """Whether a loss is further from the last ones, which it is one of from now on, than any was."""
        if not math.isfinite(loss):
            return True
        few = len(self._losses) < FEWEST_LOSSES
        usual = loss if few else statistics.median(self._losses)
        far = (loss - usual) / max(abs(loss), abs(usual), 1e-30)
        self._losses.append(loss)
        return bool(self._above.beyond({"": far})) | bool(self._below.beyond({"": -far}))
