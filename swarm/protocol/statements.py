"""Statements that a peer signs, so that they can be passed on and shown to others.

The signature covers the run, the kind of the statement and all of its fields, stage and step among them: a
statement can be used for nothing else. The form is the MessagePack of `("swarm statement 1", run, kind,
fields)`; Ed25519 over it (RFC 8032), whose public key is the peer id.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Protocol

import msgspec

from swarm.ids import SIGNATURE_BYTES, PeerId, Stage

_TOSSES = 1 << 256

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
    return len(signature) == SIGNATURE_BYTES and signer.verify(peer, signable(run, statement), signature)


class Toss(Statement, frozen=True, array_like=True):
    """What is decided by chance."""

    purpose: str
    stage: Stage
    t: int
    what: str


class Coin:
    """The number of one toss, uniform. It follows from a signature (Ed25519's are functions of key and text)
    that is never shown: no other peer can foresee it, and the same peer has it again when all is played
    again. 0.1 ms.
    """

    def __init__(self, signer: Signer, run: str, toss: Toss) -> None:
        self._number = int.from_bytes(hashlib.sha256(sign(signer, run, toss)).digest(), "big")

    def falls(self, share: float) -> bool:
        """Whether this is one of a share of all tosses."""
        return self._number < share * _TOSSES

    def below(self, count: int) -> int:
        """A whole number, at least 0; any is as likely, also among those for which `falls` holds."""
        return int.from_bytes(hashlib.sha256(self._number.to_bytes(32, "big")).digest(), "big") % count
