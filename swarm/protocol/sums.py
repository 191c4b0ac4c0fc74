"""What the members of a round sign of their sums, so that an owner that adds wrongly can be shown to others.

    Contributed   member → owner of a part: the digests of its contribution, and the seal of its nonce
    Reduced       owner → all members: the digests of the results, and the contributions that they are of
    Projected     member → all members: the product of its sum with coefficients that follow from all nonces

Each lie in a statement shows in that statement and the data that it names; none needs a second statement, so
a member that repeats a round, or computes anew, can say something else than before and is no liar. Why this
suffices: docs/decisions/audits.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from swarm.digest import DIGEST_BYTES, Digest, digest_of
from swarm.ids import PeerId, Stage
from swarm.manifest import Run
from swarm.protocol.statements import Signature, Statement

NONCE_BYTES = 16
SUM_BYTES = 8
"""Of one product, modulo 2^64."""

Nonce = Annotated[bytes, msgspec.Meta(max_length=NONCE_BYTES)]


class Contributed(Statement, frozen=True, array_like=True):
    """What the signer contributes to the part of `owner`."""

    stage: Stage
    t: int
    round: str
    owner: PeerId
    chunks: Digest
    """Of the digests of the chunks, in order; of nothing if its ledger is empty."""
    seal: Digest
    """Of its nonce."""


class Contribution(msgspec.Struct, frozen=True, array_like=True):
    """What travels of a `Contributed`: the rest is known to all members."""

    member: PeerId
    chunks: Digest
    seal: Digest
    signature: Signature


class Reduced(Statement, frozen=True, array_like=True):
    """What the signer made of the contributions to its part."""

    stage: Stage
    t: int
    round: str
    contributions: tuple[Contribution, ...]
    """Of all members, in their order."""
    chunks: bytes
    """The digests of the reduced chunks, in order."""


class Projected(Statement, frozen=True, array_like=True):
    """The products of the signer's contributions with the coefficients of the round."""

    stage: Stage
    t: int
    round: str
    nonces: tuple[Nonce, ...]
    """Of all members, in their order."""
    contributions: tuple[Digest, ...]
    """`Contributed.chunks`, owner by owner."""
    sums: tuple[bytes, ...]
    """Owner by owner, the products of the chunks, little-endian, modulo 2^64; of an empty ledger none."""


def are_checked(run: Run) -> bool:
    """Whether sums of a run are checked as they are added: a waste between peers that trust each other."""
    return bool(run.adds_exactly and run.admission.trainers)


def seed_of(nonces: Iterable[bytes]) -> bytes:
    """What the coefficients of a round follow from: not known while a nonce is sealed."""
    return digest_of(*nonces)


def contributed(stage: Stage, t: int, round_name: str, owner: PeerId, said: Contribution) -> Contributed:
    """The statement that a contribution to the part of `owner` is signed as."""
    return Contributed(stage, t, round_name, owner, said.chunks, said.seal)


def nth_digest(digests: bytes, index: int) -> bytes:
    """One of several digests; empty if there are not so many."""
    return digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES] if index >= 0 else b""


def nth_sum(sums: bytes, index: int) -> int | None:
    """One of several products, modulo 2^64; None if there are not so many."""
    found = sums[index * SUM_BYTES : (index + 1) * SUM_BYTES] if index >= 0 else b""
    return int.from_bytes(found, "little") if len(found) == SUM_BYTES else None


class PartProof(msgspec.Struct, frozen=True, array_like=True):
    """What comes with each chunk of a contribution."""

    chunks: bytes
    """The digests of all chunks of this contribution, in order."""
    seal: Digest
    signature: Signature
    """Of `Contributed`."""


class ReducedProof(msgspec.Struct, frozen=True, array_like=True):
    """What comes with the last chunk that an owner reduces."""

    contributions: tuple[Contribution, ...]
    chunks: bytes
    signature: Signature
    """Of `Reduced`."""
