"""Which contribution, or which loss, looks unlike the others: it is computed again first. That is no
accusation.

A contribution is compared with those of the others together: by its direction, on average over some steps,
and by its length. A loss is compared with the last ones. How far apart honest ones are depends on the model,
on the part of it that is looked at, and on how fast it learns; so strange is what is further off than any was
for a while.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping

import torch

from swarm.ids import PeerId

SAMPLE = 1 << 12
"""Elements of each chunk that are looked at: the direction is known to 0.02."""
REMEMBERS = 0.8
"""Part of the direction that is known from earlier steps."""
SEEN = 1024
"""Deviations, of all members, that the next are compared with: an honest one is strange once in so many."""
MARGIN = 1.25
MOST = 2.0
"""Times what was usual, as which a deviation is remembered at most: one lie must not hide the next."""
LEAST_ANGLE = 0.3
"""Of a cosine. A flipped sign is off by twice as much as the honest ones agree."""
LEAST_LENGTH = 1.0
"""In powers of two."""
LOSSES = 64
"""That the next one is compared with."""
FEWEST_LOSSES = 16
LEAST_LOSS = 0.1
"""Of the larger one."""


class _Record:
    """Whether a deviation is larger than all that were seen lately."""

    def __init__(self, least: float) -> None:
        self._least = least
        self._seen: deque[float] = deque(maxlen=SEEN)

    def beyond(self, deviations: Mapping[PeerId, float]) -> dict[PeerId, float]:
        """By how many times, where it is: those of one step."""
        limit = max(self._least, MARGIN * max(self._seen, default=0.0))
        self._seen.extend(min(far, MOST * limit) for far in deviations.values())
        return {peer: far / limit for peer, far in deviations.items() if far > limit}


class Screen:
    """How strange each member of a stage's rounds looks, as one of them sees it."""

    def __init__(self) -> None:
        self._directions: dict[PeerId, float] = {}
        """Cosine with the sum of the others, on average."""
        self._angles, self._lengths = _Record(LEAST_ANGLE), _Record(LEAST_LENGTH)

    def strangest(
        self, samples: Mapping[PeerId, torch.Tensor], counts: Mapping[PeerId, int]
    ) -> PeerId | None:
        """The member to audit now, if one looks strange.

        `samples`: some elements (1-D, any dtype) of the sum of each member that contributes, the same ones;
        `counts`: how many microbatches are in each.
        """
        if len(samples) < 2:
            return None
        sums = {peer: sample.double() for peer, sample in samples.items()}
        total = torch.stack(list(sums.values())).sum(0)
        lengths: dict[PeerId, float] = {}
        directions: dict[PeerId, float] = {}
        for peer, mine in sums.items():
            rest = total - mine
            lengths[peer] = math.log2(max(_norm(mine) / counts[peer], 1e-30))
            cosine = (mine @ rest).item() / max(_norm(mine) * _norm(rest), 1e-30)
            before = self._directions.get(peer, cosine)
            directions[peer] = REMEMBERS * before + (1.0 - REMEMBERS) * cosine
        self._directions = directions
        usual, length = statistics.median(directions.values()), statistics.median(lengths.values())
        turned = self._angles.beyond({peer: usual - directions[peer] for peer in sums})
        longer = self._lengths.beyond({peer: abs(lengths[peer] - length) for peer in sums})
        strange = {peer: max(turned.get(peer, 0.0), longer.get(peer, 0.0)) for peer in {*turned, *longer}}
        return max(sorted(strange), key=strange.__getitem__, default=None)


class LossScreen:
    """The losses of microbatches, as one caller sees them."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=LOSSES)
        self._above, self._below = _Record(LEAST_LOSS), _Record(LEAST_LOSS)
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


def _norm(values: torch.Tensor) -> float:
    return torch.linalg.vector_norm(values).item()
