"""What a caller checks of an answer: its sender signed it, and answers what it was sent."""

from __future__ import annotations

from collections.abc import Sequence

from peers.ports import Buffer
from swarm.audit import is_audited
from swarm.errors import BadAnswer
from swarm.ids import Microbatch, PeerId, Stage
from swarm.manifest import Run
from swarm.protocol.statements import Signer
from swarm.wire.messages import WorkDone
from swarm.wire.receipts import is_receipt, tensors_digest


def check_answer(
    signer: Signer, run: Run, peer: PeerId, stage: Stage, mb: Microbatch, sent: bytes, done: WorkDone,
    body: Sequence[Buffer],
) -> None:  # fmt: skip
    """Check that an answer is as the peer of a stage signed it; and, where answers are audited, that it
    answers what was `sent`, by its digest: of other inputs its caller could have nothing computed again.

    Raises:
        BadAnswer: it is not. In a run that names no trainers nothing is signed.
    """
    if not run.admission.trainers:
        return
    hop = done.hops[0] if done.hops else None
    if hop is None or hop.receipt is None or (hop.peer, hop.stage) != (peer, stage):
        raise BadAnswer(peer, "answered without a receipt of its own")
    if hop.receipt.input_grads != tensors_digest(done.tensors, body):
        raise BadAnswer(peer, "answered another gradient than its receipt names")
    if not is_receipt(signer, peer, run.id, stage, mb, done.loss, hop.receipt):
        raise BadAnswer(peer, "answered with a receipt that it did not sign")
    if hop.receipt.inputs != sent and is_audited(run):
        raise BadAnswer(peer, "answered something else than it was sent")
