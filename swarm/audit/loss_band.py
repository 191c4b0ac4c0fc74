"""Which answer's loss is unlike the last ones: it is computed again. That is no accusation."""

from __future__ import annotations

import statistics
from collections import deque

BAND = 64
"""Losses that the usual ones follow from."""
FEWEST = 16
DEVIATIONS = 8.0
"""Median absolute deviations: of normal numbers one in ten million is so far off."""
LEAST_DEVIATION = 1e-3
"""Of the median."""


class LossBand:
    """The usual losses of microbatches, as one caller sees them."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=BAND)

    def is_outside(self, loss: float) -> bool:
        """Whether a loss is far from the last ones, which it is one of from now on."""
        outside = False
        if len(self._losses) >= FEWEST:
            usual = statistics.median(self._losses)
            deviation = statistics.median(abs(one - usual) for one in self._losses)
            outside = abs(loss - usual) > DEVIATIONS * max(deviation, LEAST_DEVIATION * abs(usual))
        self._losses.append(loss)
        return outside
