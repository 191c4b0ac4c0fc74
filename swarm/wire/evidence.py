"""Evidence of a lie: a statement signed by the liar, and the data that it names. Any peer can verify it.

The data travel as the body of the message, one buffer for each contribution. Nothing in it is taken on the
word of the peer that sends it.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from swarm.digest import Digest, digest_of
from swarm.ids import PeerId
from swarm.protocol.rounds import Plan
from swarm.protocol.statements import Signature, Signer, Statement, is_signed
from swarm.protocol.sums import Nonce, Projected, Reduced
from swarm.wire.messages import Hop, RunMessage, Work
from swarm.wire.receipts import Answered, Link
from swarm.wire.tensor_meta import TensorMeta

MAX_EVIDENCE_BYTES = 1 << 26
"""Larger evidence is not passed on: each replica of the stage finds the same by itself."""
MAX_SHOWN_BYTES = 1 << 18
"""Of evidence without its body."""

S = TypeVar("S", bound=Statement)


class Lie(msgspec.Struct, Generic[S], frozen=True, kw_only=True):
    """A statement that the accused has signed, and that does not hold."""

    accused: PeerId
    statement: S
    signature: Signature

    def is_signed(self, signer: Signer, run: str) -> bool:
        """By the accused: else most of any stage convict the peers of all others."""
        return is_signed(signer, self.accused, run, self.statement, self.signature)


class WrongSum(Lie[Reduced], frozen=True, kw_only=True, tag=True):
    """An owner's result of a chunk is not the sum of the contributions that it names.

    Body: the chunk of each member that contributed, in their order.
    """

    index: int
    """Of the chunk in the owner's part."""
    lists: tuple[bytes, ...]
    """Of each contribution: the digests of its chunks."""


class FalseContribution(Lie[Reduced], frozen=True, kw_only=True, tag=True):
    """An owner names a contribution that the member did not sign. No body."""

    place: int
    """Among the contributions."""


class WrongProduct(Lie[Projected], frozen=True, kw_only=True, tag=True):
    """A member's product is not that of the chunk that it contributed. Body: that chunk."""

    place: int
    """Of the part, among the owners."""
    index: int
    """Of the chunk in that part."""
    digests: bytes
    """Of the chunks of this contribution."""


class WrongAnswer(Lie[Answered], frozen=True, kw_only=True, tag=True):
    """What a peer sent on, or answered, is far from what its stage computes. It takes the weights to see it.

    Body: the buffers of all these tensors, one after the other.
    """

    inputs: tuple[TensorMeta, ...]
    output_grads: tuple[TensorMeta, ...]
    outputs: tuple[TensorMeta, ...]
    input_grads: tuple[TensorMeta, ...]

    @property
    def tensors(self) -> tuple[tuple[TensorMeta, ...], ...]:
        """In the order of the body."""
        return self.inputs, self.output_grads, self.outputs, self.input_grads


class WrongContribution(Lie[Projected], frozen=True, kw_only=True, tag=True):
    """What a member contributed to a step is not what its microbatches add up to, or it does not show those.

    No body: replicas with the weights compute a later contribution of it themselves, and others ask them.
    """


Evidence = WrongSum | FalseContribution | WrongProduct | WrongAnswer | WrongContribution


class Judged(Statement, frozen=True, array_like=True):
    """That evidence against a peer shows its lie, as the signer found by its own means."""

    accused: PeerId
    evidence: Digest


def judged(evidence: Evidence) -> Judged:
    """What is signed of evidence."""
    return Judged(evidence.accused, digest_of(msgspec.msgpack.encode(evidence)))


class ShowEvidence(RunMessage, frozen=True, kw_only=True):
    evidence: Evidence


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """Evidence came. `asks`: for its body, to judge by itself."""

    asks: bool = False


class AuditAnswer(RunMessage, frozen=True, kw_only=True):
    """A request to compute an answer of `peer` again, from what it keeps; or half of one, which it sent on.

    Body, if that was asked for: the tensors that it sent on.
    """

    peer: PeerId
    statement: Answered
    signature: Signature
    sent: tuple[TensorMeta, ...] = ()
    through: tuple[Link, ...] = ()
    """Of what was sent on: the chain behind that at `peer`, as it came with it."""


class Audited(msgspec.Struct, frozen=True, kw_only=True):
    fits: bool
    """Or it could not be computed now."""
    asks: bool = False
    """What was sent on has other bits: for those tensors."""


class AskKept(RunMessage, frozen=True, kw_only=True):
    """The question for what a peer keeps of a microbatch: what came in, or what it made of that."""

    t: int
    m: int
    made: bool
    inputs: Digest = b""
    """What went into the microbatch, whether that counts or not; empty: what counts."""


class KeptTensors(msgspec.Struct, frozen=True, kw_only=True):
    """Body: the buffers of both."""

    forth: tuple[TensorMeta, ...]
    """The inputs, or the outputs."""
    back: tuple[TensorMeta, ...]
    """The gradients of the outputs, or of the inputs."""
    caller: PeerId = ""
    """The peer that sent the inputs, with `work`."""
    work: Work | None = None
    next: Hop | None = None
    """What the next stage answered, with `loss`, signed."""
    loss: float = 0.0


class AskConvicted(RunMessage, frozen=True, kw_only=True):
    """The question whether a peer saw evidence against another. `show`: and which."""

    peer: PeerId
    show: bool = False


class Convicted(msgspec.Struct, frozen=True, kw_only=True):
    yes: bool
    others: tuple[PeerId, ...] = ()
    """The peers against which it saw evidence; of very many, some."""
    evidence: Evidence | None = None
    signature: Signature = b""
    """Of `Judged`."""
    added: int | None = None
    """The last step of the signer's stage to which that peer contributed; None: not known."""


class Reveal(RunMessage, frozen=True, kw_only=True):
    """The nonces that a member knows which has all results of a round; answered with `Revealed`."""

    round: str
    nonces: tuple[Nonce, ...]
    """Of all members, in their order; empty: unknown."""
    lacking: tuple[PeerId, ...] = ()
    """Members whose products it still lacks."""


class Projecting(msgspec.Struct, frozen=True, kw_only=True):
    contributions: tuple[Digest, ...]
    nonces: tuple[bytes, ...]
    sums: tuple[bytes, ...]
    signature: Signature


class Revealed(msgspec.Struct, frozen=True, kw_only=True):
    """What a member knows of a round so far."""

    nonces: tuple[Nonce, ...]
    said: dict[PeerId, Projecting] = {}
    """Its products, and those of the lacking members: as far as they are known here."""


class AskProducts(RunMessage, frozen=True, kw_only=True):
    """An auditor's question for what a member signed in the last round of step `t`, to another member."""

    t: int
    member: PeerId


class Products(msgspec.Struct, frozen=True, kw_only=True):
    plan: Plan
    said: Projecting


class ShowChunk(RunMessage, frozen=True, kw_only=True):
    """The question for a member's contribution to chunk `index` of the part at `place`."""

    round: str
    place: int
    index: int


class ShownChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Body: the chunk; nothing if the member contributes nothing."""

    digests: bytes
    """Of all chunks of this contribution."""
