"""What owners and peers sign of taking part: charters, tokens, certificates, revocations.

A token holds a secret key, and the owner's signature over its public half. Its user signs the own peer id
with that key: the *certificate*. Each signature covers a word that says what kind of statement it is, and the
run. Opening is for strangers' bytes: bounded, and refused with a reason.
"""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec

from peers.net.identity import SIGNATURE_BYTES, Identity, Signature, peer_id_of, verify
from peers.options import NO_TOKEN, TOKEN_START
from swarm import charter as rules
from swarm.charter import MAX_CHARTER_BYTES, Charter, Credential, Role, Token
from swarm.errors import Refused, SetupError, decoded
from swarm.ids import PeerId, RunName, fingerprint_of

MAX_SEALED_BYTES = MAX_CHARTER_BYTES + SIGNATURE_BYTES + 32
MAX_CREDENTIAL_BYTES = 256
MAX_TOKEN_BYTES = 300
STAMPS_AT_ONCE = 1 << 18
"""Are tried in a quarter of a second of a core: a loop that ends waits for its threads."""

_Key: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Seconds: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
_Uses: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1000)]


class _SignedCharter(msgspec.Struct, frozen=True, array_like=True, tag="charter", forbid_unknown_fields=True):
    charter: Annotated[bytes, msgspec.Meta(max_length=MAX_CHARTER_BYTES)]
    signature: Signature


class _SignedRevocation(
    msgspec.Struct, frozen=True, array_like=True, tag="revoked", forbid_unknown_fields=True
):
    run: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    signature: Signature


class Revocation(msgspec.Struct, frozen=True):
    """A peer says of its own key that it is to be trusted no more in a run."""

    run: str
    peer: PeerId


class _Certificate(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    role: Role
    expires: _Seconds
    uses: _Uses
    key: _Key
    by_owner: Signature
    by_key: Signature
    """Over the peer's id."""


class _Credential(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    certificate: _Certificate | None = None
    stamp: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] = 0


class _TokenText(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    run: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    role: Role
    expires: _Seconds
    uses: _Uses
    seed: _Key
    by_owner: Signature


_encode = msgspec.msgpack.Encoder().encode
_statement_decoder: msgspec.msgpack.Decoder[_SignedCharter | _SignedRevocation] = msgspec.msgpack.Decoder(
    _SignedCharter | _SignedRevocation
)
_credential_decoder = msgspec.msgpack.Decoder(_Credential)
_token_decoder = msgspec.msgpack.Decoder(_TokenText)


# --- charters and revocations -------------------------------------------------------------------------------


def charter_key(name: RunName) -> str:
    """The charter of a run lies here, under its owner's id."""
    return f"{name}.charter"


def revocations_key(run_id: str) -> str:
    """Revocations lie here, each under the id of the key that it revokes."""
    return f"{run_id}.revoked"


def _charter_to_sign(charter: bytes) -> bytes:
    return _encode(("swarm charter 1", charter))


def _revocation_to_sign(run_id: str, peer: PeerId) -> bytes:
    return _encode(("swarm revocation 1", run_id, peer))


def seal_charter(charter: Charter, owner: Identity) -> bytes:
    """The signed charter. Raises SetupError: it is too large, or not what others would take."""
    data = rules.encode(charter)
    try:
        rules.decode(data)
    except Refused as refusal:
        raise SetupError(f"{refusal.text}: name fewer peers, or lift bans (swarm unban)") from None
    return _encode(_SignedCharter(data, owner.sign(_charter_to_sign(data))))


def seal_revocation(run_id: str, identity: Identity) -> bytes:
    return _encode(_SignedRevocation(run_id, identity.sign(_revocation_to_sign(run_id, identity.peer_id))))


def open_statement(data: bytes, signer: PeerId) -> Charter | Revocation:
    """What `signer` signed, and stored under its id. Raises Refused: malformed, or signed by another."""
    signed = decoded(data, _statement_decoder.decode, "charter", MAX_SEALED_BYTES)
    if isinstance(signed, _SignedRevocation):
        if not verify(signer, _revocation_to_sign(signed.run, signer), signed.signature):
            raise Refused("a revocation that is not signed by the key that it revokes")
        return Revocation(signed.run, signer)
    if not verify(signer, _charter_to_sign(signed.charter), signed.signature):
        raise Refused("a charter that is not signed by its owner")
    return rules.decode(signed.charter)


def read_charter(path: Path) -> tuple[Charter, PeerId, bytes]:
    """A charter in a file, its owner, and the signed bytes.

    Raises:
        Refused: it is none.
        OSError: it cannot be read.
    """
    owner, _, sealed = path.read_bytes().partition(b"\n")
    found = open_statement(sealed, signer := owner.decode(errors="replace"))
    if not isinstance(found, Charter):
        raise Refused("it is a revocation")
    return found, signer, sealed


def write_charter(path: Path, owner: PeerId, sealed: bytes) -> None:
    """The id of the owner, a line's end, and the signed bytes: all or nothing, since several programs may
    write it at once, or the power fail. Raises OSError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft.write_bytes(owner.encode() + b"\n" + sealed)
    with draft.open("rb+") as file:
        os.fsync(file.fileno())
    draft.replace(path)


def key_of(statement: Charter | Revocation, signer: PeerId) -> str:
    """Where in the DHT it belongs."""
    if isinstance(statement, Revocation):
        return revocations_key(statement.run)
    return charter_key(RunName(statement.name, fingerprint_of(signer)))


# --- tokens and certificates --------------------------------------------------------------------------------


def _token_to_sign(run_id: str, role: str, expires: int, uses: int, key: bytes) -> bytes:
    return _encode(("swarm token 1", run_id, role, expires, uses, key))


def _certificate_to_sign(run_id: str, peer: PeerId) -> bytes:
    return _encode(("swarm certificate 1", run_id, peer))


def make_token(
    run_id: str, owner: Identity, role: Role, *, expires: int, uses: int = 1, seed: bytes | None = None
) -> str:
    """A token, which its receiver keeps to himself. `expires`: Unix seconds; `uses`: identities at a time."""
    seed = seed or os.urandom(32)
    key = Identity(seed).public_key
    by_owner = owner.sign(_token_to_sign(run_id, role, expires, uses, key))
    packed = _encode(_TokenText(bytes.fromhex(run_id), role, expires, uses, seed, by_owner))
    return TOKEN_START + base64.urlsafe_b64encode(packed).decode().rstrip("=")


def certify(token: str, run_id: str, peer: PeerId) -> tuple[Role, _Certificate]:
    """Bind a token to a peer: its role, and the certificate. Raises SetupError: it is none for this run."""
    letters = token.strip().removeprefix(TOKEN_START)
    try:
        if not token.strip().startswith(TOKEN_START):
            raise ValueError
        packed = base64.urlsafe_b64decode(letters + "=" * (-len(letters) % 4))
        found = decoded(packed, _token_decoder.decode, "token", MAX_TOKEN_BYTES)
    except (ValueError, Refused):
        raise SetupError(f"--token is {NO_TOKEN}") from None
    if found.run != bytes.fromhex(run_id):
        raise SetupError(
            f"--token is for the run {found.run.hex()}, and this is {run_id}: ask the owner for another one"
        )
    identity = Identity(found.seed)
    by_key = identity.sign(_certificate_to_sign(run_id, peer))
    terms = found.role, found.expires, found.uses
    return found.role, _Certificate(*terms, identity.public_key, found.by_owner, by_key)


def seal_credential(certificate: Any = None, stamp: int = 0) -> bytes:
    """What a peer shows; nothing for one that needs nothing."""
    return _encode(_Credential(certificate, stamp)) if certificate is not None or stamp else b""


def open_credential(data: bytes, run_id: str, owner: PeerId, peer: PeerId) -> Credential:
    """What `peer` brought to a run of `owner`. Whether it is enough, and still holds, is another question.

    Raises:
        Refused: oversized, malformed, or not signed as it must be.
    """
    if not data:
        return rules.NOTHING
    found = decoded(data, _credential_decoder.decode, "credential", MAX_CREDENTIAL_BYTES)
    token, made = None, found.certificate
    if made is not None:
        to_sign = _token_to_sign(run_id, made.role, made.expires, made.uses, made.key)
        if not verify(owner, to_sign, made.by_owner):
            raise Refused("a token that the owner of this run did not make for it")
        if not verify(peer_id_of(made.key), _certificate_to_sign(run_id, peer), made.by_key):
            raise Refused("a token that was bound to another peer")
        token = Token(peer_id_of(made.key), made.role, float(made.expires), made.uses)
    return Credential(token, stamp_bits(run_id, peer, found.stamp))


# --- stamps -------------------------------------------------------------------------------------------------


def _stamped(run_id: str, peer: PeerId) -> Any:
    return hashlib.sha256(_encode(("swarm stamp 1", run_id, peer)))


def stamp_bits(run_id: str, peer: PeerId, stamp: int) -> int:
    """How much work a stamp took: to find one of n bits, 2^n hashes on average."""
    hashed = _stamped(run_id, peer)
    hashed.update(stamp.to_bytes(8, "big"))
    return 256 - int.from_bytes(hashed.digest(), "big").bit_length()


def find_stamp(run_id: str, peer: PeerId, bits: int, first: int = 0) -> int | None:
    """The first stamp of so many bits, of the `STAMPS_AT_ONCE` from that one on; None: it is none of them."""
    start, limit = _stamped(run_id, peer), 1 << (256 - bits)
    for stamp in range(first, first + STAMPS_AT_ONCE):
        hashed = start.copy()
        hashed.update(stamp.to_bytes(8, "big"))
        if int.from_bytes(hashed.digest(), "big") < limit:
            return stamp
    return None
