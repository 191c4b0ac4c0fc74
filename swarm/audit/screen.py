"""Whose contribution, or answers, look unlike the others: these are computed again first, and not accused.

A contribution is compared with those of the others together: by its direction, on average over some steps,
and by its length. Of an answer neither loss nor length tells that its gradient has another sign, and the sum
of the peer that gave it is true. But what the caller makes of it points away from what it makes of the
others' answers.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Mapping
from functools import partial

import torch

from swarm.audit.answers import norm
from swarm.audit.unusual import Honest, Record
from swarm.ids import PeerId

SAMPLE = 1 << 12
"""Elements of each chunk, or of a microbatch's gradients, that are looked at: tells the direction to 0.02."""
REMEMBERS = 0.6
"""Part of the direction that is known from earlier steps."""
LEAST_ANGLE = 0.3
"""Of a cosine. A flipped sign is off by twice as much as the honest ones agree."""
LEAST_LENGTH = 1.0
"""In powers of two."""


class Screen:
    """How strange each member of a stage's rounds looks, as one of them sees it."""

    def __init__(self, *, least_length: float = LEAST_LENGTH) -> None:
        self._directions: dict[PeerId, float] = {}
        """Cosine with the sum of the others, on average."""
        self._angles, self._lengths = Record(LEAST_ANGLE), Record(least_length)
        self._strange: dict[PeerId, list[tuple[float, Honest]]] = {}

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
            lengths[peer] = math.log2(max(norm(mine) / counts[peer], 1e-30))
            cosine = (mine @ rest).item() / max(norm(mine) * norm(rest), 1e-30)
            before = self._directions.get(peer, cosine)
            directions[peer] = REMEMBERS * before + (1.0 - REMEMBERS) * cosine
        self._directions |= directions  # of one that is not in each step, too
        usual, length = statistics.median(directions.values()), statistics.median(lengths.values())
        turned = self._angles.beyond({peer: usual - directions[peer] for peer in sums})
        longer = self._lengths.beyond({peer: abs(lengths[peer] - length) for peer in sums})
        strange = {p: [kind[p] for kind in (turned, longer) if p in kind] for p in {*turned, *longer}}
        self._strange = {p: before for p, before in self._strange.items() if p in sums} | strange
        return max(sorted(strange), key=lambda peer: max(times for times, _ in strange[peer]), default=None)

    def honest(self, peer: PeerId) -> None:
        """Take what looked strange of `peer` for usual: it was computed again, and fits."""
        for _, remember in self._strange.pop(peer, ()):
            remember()


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
