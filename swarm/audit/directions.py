"""Whether what a caller adds turns around with the peer that answers: a gradient with another sign.

Neither its loss nor its length tells that of an answer, and the sum of the peer that gave it is true. But
what the caller makes of it points away from what it makes of the others' answers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from functools import partial

import torch

from swarm.audit.screen import Screen
from swarm.audit.unusual import Honest
from swarm.ids import PeerId

SAMPLE = 1 << 12
"""Elements of the gradients of a microbatch that are looked at."""


def sample_of(terms: Collection[torch.Tensor]) -> torch.Tensor:
    """Some elements of gradients of weights, the same ones each time; each tensor counts alike.

    1-D, float32, in host memory. In a job of the device.
    """
    each = max(1, SAMPLE // max(1, len(terms)))
    found = [term.reshape(-1)[:: max(1, term.numel() // each)].float() for term in terms]
    return torch.cat([part / part.norm().clamp_min(1e-30) for part in found]).cpu()


class Directions:
    """The peers of one stage, as one caller sees what follows from their answers, step by step."""

    def __init__(self) -> None:
        self._screen = Screen(least_length=math.inf)
        self._t = -1
        self._sums: dict[PeerId, torch.Tensor] = {}
        self._counts = Counter[PeerId]()
        self._suspect: PeerId | None = None

    def strange(self, t: int, peer: PeerId, sample: torch.Tensor | None) -> Honest | None:
        """Look at a microbatch of step `t` that `peer` answered. Not None: in the last step it was unlike the
        others; this answer is to be computed again. `sample`: None where those of weights were not wanted.
        """
        if sample is None:
            return None
        if t > self._t:
            self._suspect = self._screen.strangest(self._sums, self._counts)
            self._t, self._sums, self._counts = t, {}, Counter()
        if t == self._t:
            self._sums[peer] = self._sums[peer] + sample if peer in self._sums else sample
            self._counts[peer] += 1
        return partial(self._judged, peer) if peer == self._suspect else None

    def _judged(self, peer: PeerId) -> None:
        self._suspect = None
        self._screen.honest(peer)
