"""A peer's identity: an Ed25519 key in the file format that p2pd reads. The peer id *is* the public key.

File: libp2p's protobuf `PrivateKey{type = Ed25519, data = seed + public key}`, 68 bytes.
Peer id: base58 of an identity multihash of protobuf `PublicKey{type = Ed25519, data = public key}`.
"""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarm.errors import SetupError
from swarm.ids import PeerId

_PRIVATE_PREFIX = bytes([0x08, 0x01, 0x12, 0x40])
"""Field 1 (type) = 1 (Ed25519); field 2 (data), 64 bytes follow."""
_PUBLIC_PREFIX = bytes([0x08, 0x01, 0x12, 0x20])
_MULTIHASH_PREFIX = bytes([0x00, 0x24])
"""Hash function 0 = the 36 bytes themselves."""
_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_DIGITS = {letter: value for value, letter in enumerate(_ALPHABET)}
SIGNATURE_BYTES = 64
PEER_ID_LETTERS = 52


def _base58(data: bytes) -> str:
    number, letters = int.from_bytes(data, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        letters = _ALPHABET[digit] + letters
    zeros = len(data) - len(data.lstrip(b"\0"))
    return "1" * zeros + letters


def _unbase58(text: str, length: int) -> bytes | None:
    number = 0
    for letter in text:
        if letter not in _DIGITS:
            return None
        number = number * 58 + _DIGITS[letter]
    if number.bit_length() > length * 8:
        return None
    data = number.to_bytes(length, "big")
    return data if _base58(data) == text else None


def peer_id_of(public_key: bytes) -> PeerId:
    """The peer id of a raw 32-byte Ed25519 public key."""
    return _base58(_MULTIHASH_PREFIX + _PUBLIC_PREFIX + public_key)


def public_key_of(peer_id: PeerId) -> bytes | None:
    """The raw 32-byte public key that a peer id is, or None if it is not an Ed25519 peer id."""
    if len(peer_id) != PEER_ID_LETTERS:
        return None
    prefix = _MULTIHASH_PREFIX + _PUBLIC_PREFIX
    data = _unbase58(peer_id, len(prefix) + 32)
    return data[len(prefix) :] if data is not None and data.startswith(prefix) else None


def verify(peer_id: PeerId, data: bytes, signature: bytes) -> bool:
    """Whether the peer signed the data. Never raises on a stranger's bytes."""
    key = public_key_of(peer_id)
    if key is None or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


class Identity:
    """A peer's key pair."""

    def __init__(self, seed: bytes) -> None:
        """`seed`: 32 secret bytes."""
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self._seed = seed
        self._public = self._key.public_key().public_bytes_raw()
        self.peer_id: PeerId = peer_id_of(self._public)

    @classmethod
    def generate(cls) -> Identity:
        return cls(os.urandom(32))

    def sign(self, data: bytes) -> bytes:
        """64 bytes; deterministic."""
        return self._key.sign(data)

    def to_file_bytes(self) -> bytes:
        return _PRIVATE_PREFIX + self._seed + self._public

    @classmethod
    def from_file_bytes(cls, data: bytes) -> Identity:
        """Raises ValueError if this is not an Ed25519 key in libp2p's form."""
        if len(data) != 68 or not data.startswith(_PRIVATE_PREFIX):
            raise ValueError("not an Ed25519 key in libp2p's form")
        identity = cls(data[4:36])
        if identity._public != data[36:]:
            raise ValueError("its public half does not belong to its private half")
        return identity

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """The key in `path`; if there is no such file, a new key is written there (mode 600).

        Raises:
            SetupError: the file cannot be read or written, or is not a key.
        """
        if path.exists():
            return cls._load(path)
        identity, draft = cls.generate(), path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(identity.to_file_bytes())
            try:
                os.link(draft, path)  # appears whole or not at all, and never replaces a key
            finally:
                draft.unlink()
        except FileExistsError:
            return cls._load(path)
        except OSError as error:
            raise SetupError(
                f"cannot write the identity file {path}: {error.strerror}. Choose a writable folder."
            ) from None
        return identity

    @classmethod
    def _load(cls, path: Path) -> Identity:
        try:
            with path.open("rb") as file:
                return cls.from_file_bytes(file.read(4096))
        except OSError as error:
            raise SetupError(f"cannot read the identity file {path}: {error.strerror}") from None
        except ValueError as error:
            raise SetupError(
                f"{path} is not an identity file: {error}. Move it away to get a new identity, "
                "or name another file."
            ) from None
