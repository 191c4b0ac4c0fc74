"""Statements that a peer signs, so that they can be passed on and shown to others.

The signature covers the run, the kind of the statement and all of its fields, stage and step among them: a
statement can be used for nothing else. The form is the MessagePack of `("swarm statement 1", run, kind,
fields)`; Ed25519 over it (RFC 8032), whose public key is the peer id.
"""

from __future__ import annotations

from typing import Annotated, Protocol

import msgspec

from swarm.ids import PeerId

SIGNATURE_BYTES = 64

Signature = Annotated[bytes, msgspec.Meta(max_length=SIGNATURE_BYTES)]
"""Empty: not signed."""


class Signer(Protocol):
    """A peer's key, and the check of others' signatures."""

    @property
    def peer_id(self) -> PeerId: ...

    def sign(self, data: bytes) -> bytes:
        """64 bytes; the same for the same data."""
        ...

    def verify(self, peer: PeerId, data: bytes, signature: bytes) -> bool:
        """Whether `peer` signed `data`. Never raises on a stranger's bytes."""
        ...


class Statement(msgspec.Struct, frozen=True, array_like=True):
    """What is signed: subclasses name their fields."""


def signable(run: str, statement: Statement) -> bytes:
    """The bytes that a signature of a statement covers."""
    kind = type(statement).__name__
    return msgspec.msgpack.encode(("swarm statement 1", run, kind, statement))


def sign(signer: Signer, run: str, statement: Statement) -> bytes:
    """A signature of a statement: 64 bytes."""
    return signer.sign(signable(run, statement))


def is_signed(signer: Signer, peer: PeerId, run: str, statement: Statement, signature: bytes) -> bool:
    """Whether `peer` signed a statement."""
    return len(signature) == SIGNATURE_BYTES and signer.verify(peer, signable(run, statement), signature)
