"""Evidence of a lie: a statement signed by the liar, and the data that it names. Any peer can verify it.

The data travel as the body of the message, one buffer for each contribution. Nothing in it is taken on the
word of the peer that sends it.
"""

from __future__ import annotations

import msgspec

from swarm.ids import PeerId
from swarm.protocol.statements import Signature
from swarm.protocol.sums import Digest, Projected, Reduced

MAX_EVIDENCE_BYTES = 1 << 26
"""Larger evidence is not passed on: each replica of the stage finds the same by itself."""


class WrongSum(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An owner's result of a chunk is not the sum of the contributions that it names.

    Body: the chunk of each member that contributed, in their order.
    """

    accused: PeerId
    statement: Reduced
    signature: Signature
    index: int
    """Of the chunk in the owner's part."""
    lists: tuple[bytes, ...]
    """Of each contribution: the digests of its chunks."""


class FalseContribution(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An owner names a contribution that the member did not sign. No body."""

    accused: PeerId
    statement: Reduced
    signature: Signature
    place: int
    """Among the contributions."""


class WrongProduct(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A member's product is not that of the chunk that it contributed. Body: that chunk."""

    accused: PeerId
    statement: Projected
    signature: Signature
    place: int
    """Of the part, among the owners."""
    index: int
    """Of the chunk in that part."""
    digests: bytes
    """Of the chunks of this contribution."""


Evidence = WrongSum | FalseContribution | WrongProduct


class ShowEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Evidence, passed on."""

    run: str
    evidence: Evidence


class Reveal(msgspec.Struct, frozen=True, kw_only=True):
    """A nonce, from a member that has all results of a round; answered with `Projecting`."""

    run: str
    round: str
    nonce: bytes


class Projecting(msgspec.Struct, frozen=True, kw_only=True):
    """A member's products."""

    contributions: tuple[Digest, ...]
    nonces: tuple[bytes, ...]
    sums: tuple[bytes, ...]
    signature: Signature


class ShowChunk(msgspec.Struct, frozen=True, kw_only=True):
    """The question for a member's contribution to chunk `index` of the part at `place`."""

    run: str
    round: str
    place: int
    index: int


class ShownChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Body: the chunk; nothing if the member contributes nothing."""

    digests: bytes
    """Of all chunks of this contribution."""
