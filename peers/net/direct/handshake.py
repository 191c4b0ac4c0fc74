"""How two peers agree on the keys of a direct connection, over a stream of p2pd. Without IO.

    caller ──AskDirect: an X25519 key, and where to knock, signed──▶ callee
           ◀──GrantDirect: another, and where to connect, signed──
           ──TCP: the ticket, then sealed records──▶

The ticket is a part of the derived secret, so only the caller can show it. Why so: docs/design.md, *On the
wire*.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated

import msgspec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from peers.net.direct.records import KEY_BYTES
from peers.net.identity import Identity, Signature
from swarm.errors import Refused
from swarm.ids import PeerId

TICKET_BYTES = 16

Key = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Host = Annotated[str, msgspec.Meta(max_length=45)]
"""An IP address; or nothing."""
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class AskDirect(msgspec.Struct, frozen=True, kw_only=True):
    """May we connect to you directly?"""

    key: Key
    host: Host = ""
    """From where, as others see it: knock there if you cannot be dialled, to make a hole in your router."""
    port: Port = 0
    signature: Signature


class GrantDirect(msgspec.Struct, frozen=True, kw_only=True):
    """You may, at this port."""

    key: Key
    host: Host = ""
    """Through the hole that we make in the router there; empty: of the host at which you reach us."""
    port: Port
    """0: only from the same machine (`peers.net.direct.memory`)."""
    signature: Signature


@dataclass(frozen=True, slots=True)
class SharedSecret:
    """What only the two ends know."""

    ticket: bytes
    to_callee: bytes
    """The key of what the caller sends."""
    to_caller: bytes


def _asked(caller: PeerId, callee: PeerId, key: bytes, place: tuple[str, int]) -> bytes:
    return msgspec.msgpack.encode(("swarm direct ask 2", caller, callee, key, place))


def _granted(caller: PeerId, callee: PeerId, asked: bytes, key: bytes, place: tuple[str, int]) -> bytes:
    return msgspec.msgpack.encode(("swarm direct grant 2", caller, callee, asked, key, place))


def _agree(secret: X25519PrivateKey, other: bytes, transcript: bytes) -> SharedSecret:
    try:
        shared = secret.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:  # of a key that leaves no secret
        raise Refused("a key for a direct connection that is none") from None
    made = HKDF(SHA256(), TICKET_BYTES + 2 * KEY_BYTES, hashlib.sha256(transcript).digest(), b"keys")
    keys = made.derive(shared)
    return SharedSecret(keys[:TICKET_BYTES], keys[TICKET_BYTES:-KEY_BYTES], keys[-KEY_BYTES:])


class Asking:
    """The caller's side, for one connection."""

    def __init__(self, signer: Identity, callee: PeerId) -> None:
        self._signer, self._callee, self._secret = signer, callee, X25519PrivateKey.generate()
        self._key = self._secret.public_key().public_bytes_raw()

    def ask(self, host: str = "", port: int = 0) -> AskDirect:
        said = _asked(self._signer.peer_id, self._callee, self._key, (host, port))
        return AskDirect(key=self._key, host=host, port=port, signature=self._signer.sign(said))

    def agree(self, grant: GrantDirect) -> SharedSecret:
        """The keys, from the answer. Raises Refused: another peer signed it, or for another question."""
        place = grant.host, grant.port
        transcript = _granted(self._signer.peer_id, self._callee, self._key, grant.key, place)
        if not Identity.verify(self._callee, transcript, grant.signature):
            raise Refused("a grant of a direct connection with a wrong signature")
        return _agree(self._secret, grant.key, transcript)


def grant(
    signer: Identity, caller: PeerId, ask: AskDirect, port: int, host: str = ""
) -> tuple[GrantDirect, SharedSecret]:
    """The callee's side: the answer, and the keys. Raises Refused: another peer signed the question."""
    asked = _asked(caller, signer.peer_id, ask.key, (ask.host, ask.port))
    if not Identity.verify(caller, asked, ask.signature):
        raise Refused("a question for a direct connection with a wrong signature")
    secret = X25519PrivateKey.generate()
    key = secret.public_key().public_bytes_raw()
    transcript = _granted(caller, signer.peer_id, ask.key, key, (host, port))
    agreed = _agree(secret, ask.key, transcript)
    return GrantDirect(key=key, host=host, port=port, signature=signer.sign(transcript)), agreed
