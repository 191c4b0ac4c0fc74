"""What a stage peer notices of its neighbours while it computes: what looks strange is computed again by
others, and some by chance (`peers.audit.asking`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from peers.audit.asking import AuditCaller
from peers.stage.open_step import KeptMicrobatch
from swarm.audit.directions import Directions, sample_of
from swarm.ids import Microbatch, PeerId, Stage
from swarm.model.gradient_sum import Gradients
from swarm.wire.messages import Work, WorkDone


class Seen(NamedTuple):
    """Of a microbatch that was computed."""

    length: float
    """The norm of the gradient that the next stage answered."""
    sample: torch.Tensor | None
    """Some elements of the gradients of weights, as `sample_of` has them; None: they were not asked for."""


def seen_in(found: Gradients) -> Seen:
    """In a job of the device."""
    length = math.hypot(*map(float, found.arrived))
    return Seen(length, sample_of(found.terms.values()) if found.terms else None)


class Neighbours:
    """The peers that feed one of `stage`, and those that answer it."""

    def __init__(self, callers: AuditCaller, stage: Stage) -> None:
        self._callers, self._stage = callers, stage
        self._fed, self._answered = Directions(), Directions()

    def answered(self, mb: Microbatch, done: WorkDone) -> None:
        """Note an answer of the next stage, whose receipt was checked."""
        self._callers.answered(self._stage + 1, mb, done)

    def used(self, mb: Microbatch, peer: PeerId, done: WorkDone, seen: Seen) -> None:
        """Note what followed from an answer of `peer`."""
        turned = self._answered.strange(mb.t, peer, seen.sample)
        self._callers.decoded(self._stage + 1, mb, done, seen.length, turned)

    def fed(self, caller: PeerId, work: Work, kept: KeptMicrobatch, seen: Seen) -> None:
        """Note what followed from what `caller` sent on; at stage 0 that is the data, which proves itself."""
        if work.fed is None:
            return
        turned = self._fed.strange(work.t, caller, seen.sample)
        self._callers.sent_on(self._stage - 1, caller, work, kept.inputs, kept.answer.loss, turned)
