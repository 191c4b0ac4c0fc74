"""Tickets: a trainer's word for a microbatch, without which no stage computes it; and the checks of answers.

In a run whose manifest names trainers; what they prove, and what not: docs/design.md, *Work that is counted*.
"""

from __future__ import annotations

from collections.abc import Sequence

from peers.ports import Buffer
from swarm.audit import is_audited
from swarm.data import check_samples
from swarm.errors import BadAnswer, Refused
from swarm.ids import Microbatch, PeerId, Stage
from swarm.manifest import Run
from swarm.model.stage_io import input_metas
from swarm.protocol.statements import Signer, is_signed, sign
from swarm.wire.messages import MAX_RECEIPTS, Hop, Ticket, Work, WorkDone
from swarm.wire.receipts import Asked, is_receipt, tensors_digest


def ticket_for(signer: Signer, run: Run, mb: Microbatch, body: Sequence[Buffer], to: PeerId) -> Ticket:
    """The signer's ticket for a microbatch. `body`: as a peer of stage 0, `to`, is sent it."""
    inputs = tensors_digest(input_metas(run, 0), body)
    signature = sign(signer, run.id, Asked(*mb, inputs, to))
    return Ticket(trainer=signer.peer_id, inputs=inputs, to=to, signature=signature)


def check_ticket(signer: Signer, run: Run, work: Work) -> None:
    """Check that a trainer that the manifest names asked for a microbatch. Raises Refused: none did."""
    if not run.admission.trainers:
        return
    ticket = work.ticket
    if ticket is not None and ticket.trainer in run.admission.trainers:
        asked = Asked(work.t, work.m, ticket.inputs, ticket.to)
        if is_signed(signer, ticket.trainer, run.id, asked, ticket.signature):
            return
    raise Refused(
        f"run {run.name!r} computes no microbatch without a ticket of a trainer that it names: send the one "
        "that came with it"
    )


def check_inputs(run: Run, stage: Stage, work: Work, body: Sequence[Buffer]) -> None:
    """Check that what came is what the ticket names, all of it at stage 0, the tokens at the others; and that
    it is of the run's data, if the manifest has their root.

    Raises:
        Refused: it is something else.
    """
    if stage == 0 and run.data.root:
        *body, proof = body
        check_samples(run, work.t, work.m, memoryview(body[0]).cast("B"), memoryview(proof))
    ticket = work.ticket
    if ticket is None or not run.admission.trainers or (stage > 0 and run.brings_model):
        return
    named = len(input_metas(run, 0))  # of what enters a later stage the last one, the tokens
    if tensors_digest(work.tensors[-named:], body[-named:]) != ticket.inputs:
        raise Refused(f"what came for ({work.t}, {work.m}) is not what its ticket names")


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


def hops_shown(
    signer: Signer, run: Run, mb: Microbatch, done: WorkDone, asked: Sequence[PeerId]
) -> list[Hop]:  # fmt: skip
    """What peers took that answered a microbatch, from the first stage on. The peer that passes an answer on
    may name others: of each that is not one of those `asked`, its receipt has to show that it answered.
    """
    shown = list[Hop]()
    for stage, hop in enumerate(done.hops[: run.S]):
        bare = not run.admission.trainers or stage > MAX_RECEIPTS  # there are none so far behind
        said = (hop.peer, run.id, stage, mb, done.loss)
        signed = bare or hop.peer in asked[stage : stage + 1]
        signed = signed or (hop.receipt is not None and is_receipt(signer, *said, hop.receipt))
        if not signed or hop.stage != stage:
            break
        shown.append(hop)
    return shown
