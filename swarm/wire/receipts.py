"""Receipts: what a peer answered, signed by it, so that its work can be counted, checked and shown to others.

A receipt names the bytes that came and went by their digests, descriptions of the tensors included: what
entered the stage, what it sent on, and the gradients of both. What makes a chain of those of a microbatch,
and what breaks one honestly: docs/design.md, *Work that is counted*.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from swarm.digest import Digest, digest_of
from swarm.ids import Microbatch, PeerId, Stage
from swarm.protocol.statements import Signature, Signer, Statement, is_signed, sign
from swarm.wire.buffers import Buffer
from swarm.wire.tensor_meta import TensorMeta


class Answered(Statement, frozen=True, array_like=True):
    """That the signer computed a microbatch at a stage, from which bytes to which.

    Its first half goes on with what it sends on (`is_half`): there is no answer to that yet.
    """

    stage: Stage
    t: int
    m: int
    inputs: Digest
    outputs: Digest
    """What it sent to the next stage; of nothing at the last one."""
    output_grads: Digest
    """What the next stage answered."""
    input_grads: Digest
    """What it answers; of nothing at stage 0."""
    loss: float
    to: PeerId = ""
    """Of a half: the peer that it is sent to. Another one has nothing of it."""

    @property
    def is_half(self) -> bool:
        """Whether it says nothing of gradients and loss."""
        return not self.input_grads


class Asked(Statement, frozen=True, array_like=True):
    """That the signer, a trainer, has a microbatch computed from these inputs of stage 0."""

    t: int
    m: int
    inputs: Digest
    to: PeerId
    """The peer of stage 0 that it asks."""


class Receipt(msgspec.Struct, frozen=True, array_like=True):
    """What travels of an `Answered`: the rest is known to all that read it. Under 210 bytes."""

    inputs: Digest
    outputs: Digest
    output_grads: Digest
    input_grads: Digest
    signature: Signature

    def statement(self, stage: Stage, mb: Microbatch, loss: float, to: PeerId = "") -> Answered:
        return Answered(stage, *mb, self.inputs, self.outputs, self.output_grads, self.input_grads, loss, to)


class Link(msgspec.Struct, frozen=True, array_like=True):
    """A peer that a microbatch came through, with its half of a receipt."""

    peer: PeerId
    half: Receipt


def tensors_digest(metas: Sequence[TensorMeta], buffers: Sequence[Buffer]) -> bytes:
    """The name of tensors as they travel: the same bytes of another shape or codec are other tensors."""
    return digest_of(msgspec.msgpack.encode(list(metas)), *buffers)


def give_receipt(signer: Signer, run: str, answered: Answered) -> Receipt:
    a = answered
    return Receipt(a.inputs, a.outputs, a.output_grads, a.input_grads, sign(signer, run, answered))


def is_receipt(
    signer: Signer, peer: PeerId, run: str, stage: Stage, mb: Microbatch, loss: float, receipt: Receipt
) -> bool:
    """Whether `peer` signed it for this microbatch at this stage, with this loss; a half is none."""
    said = receipt.statement(stage, mb, loss)
    return not said.is_half and is_signed(signer, peer, run, said, receipt.signature)


def is_sent_on(
    signer: Signer, peer: PeerId, run: str, stage: Stage, mb: Microbatch, outputs: Digest, half: Receipt,
    to: PeerId,
) -> bool:  # fmt: skip
    """Whether `peer` signed that it computed these outputs of a stage, and sent them `to` another."""
    said = half.statement(stage, mb, 0.0, to)
    return said.is_half and half.outputs == outputs and is_signed(signer, peer, run, said, half.signature)
