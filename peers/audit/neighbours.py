"""What a stage peer notices of its neighbours while it computes: what looks strange is computed again by
others, and some by chance (`peers.audit.asking`).

Besides answers that is what was sent on to it: its sum counts that, whatever the sender says to its caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from peers.audit.asking import AuditCaller
from peers.ports import Directory, Transport
from peers.stage.open_step import KeptMicrobatch
from swarm.audit.screen import Directions, sample_of
from swarm.audit.unusual import LEAST_LENGTH, LEAST_LOSS, TINY, Honest, Unusual
from swarm.errors import PeerFault
from swarm.ids import Microbatch, PeerId, Stage
from swarm.manifest import Run
from swarm.model.gradient_sum import Gradients
from swarm.protocol.statements import Toss
from swarm.wire.codec import Encoded
from swarm.wire.messages import Work, WorkDone
from swarm.wire.receipts import Link

SENT_ON_SHARE = 0.0075
"""Of what was sent on: that takes a third of the work, and what counts in one's own sum is answered, too."""
STRANGERS_SHARE = 0.1
"""The same of peers without voice where others of their stage have it: such a one loses only a name."""


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


class Neighbours(AuditCaller):
    """The peers that feed one of a stage, and those that answer it."""

    def __init__(
        self, run: Run, stage: Stage, transport: Transport, directory: Directory,
        on_fault: Callable[[Stage, PeerFault, bool], None],
    ) -> None:  # fmt: skip
        super().__init__(run, transport, directory, on_fault)
        self._stage, self._sent_on = stage, Unusual(LEAST_LOSS, relative=True)
        self._lengths, self._fed, self._answered = Unusual(LEAST_LENGTH), Directions(), Directions()

    def used(self, mb: Microbatch, peer: PeerId, done: WorkDone, seen: Seen) -> None:
        """Note what followed from an answer of `peer`."""
        turned = self._answered.strange(mb.t, peer, seen.sample)
        strange = self._lengths.strange(math.log(seen.length + TINY))
        if turned or strange:
            self._ask_again(self._stage + 1, mb, done, turned or strange)

    def fed(self, peer: PeerId, work: Work, kept: KeptMicrobatch, seen: Seen) -> None:
        """Note what followed from what `peer` sent on; at stage 0 that is the data, which proves itself."""
        if work.fed is None:
            return
        turned = self._fed.strange(work.t, peer, seen.sample)
        strange = self._sent_on.strange(kept.answer.loss)
        mb, stage = Microbatch(work.t, work.m), self._stage - 1
        came_by = (peer, *(link.peer for link in work.through))
        voices = [self._voices.of(stage - n) for n in range(len(came_by))]
        strangers = any(voice and one not in voice for one, voice in zip(came_by, voices, strict=True))
        share = STRANGERS_SHARE if strangers else SENT_ON_SHARE
        if turned or strange or self._falls(share, Toss("sent on", stage, mb.t, f"{mb.m} {peer}")):
            link, me = Link(peer, work.fed), self._transport.peer_id
            self.half(stage, mb, link, me, work.through, kept.inputs, turned or strange)

    def half(
        self, stage: Stage, mb: Microbatch, link: Link, to: PeerId, through: tuple[Link, ...],
        tensors: Sequence[Encoded], honest: Honest | None = None,
    ) -> None:  # fmt: skip
        """Have the `tensors` that a peer of a stage sent on `to` another computed again. `through`: the
        chain behind that.
        """
        said = link.half.statement(stage, mb, 0.0, to)
        self._ask(link.peer, said, link.half.signature, honest, tensors, through)
