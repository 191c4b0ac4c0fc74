"""Names of peers, stages, microbatches and runs. Plain types, which sort, hash and travel as they are."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import NamedTuple, TypeAlias

PeerId: TypeAlias = str
"""libp2p peer id, base58 (an Ed25519 key: the id *is* the public key)."""

PEER_ID = re.compile(r"12D3KooW[1-9A-HJ-NP-Za-km-z]{44}")
"""How one is written: 38 bytes that start with 00 24 08 01 12 20, an identity multihash, in base58."""

SIGNATURE_BYTES = 64
"""Of a signature by such a key."""

Stage: TypeAlias = int
"""Index of a stage, 0 … S-1."""

RUN_NAME = r"[A-Za-z0-9][A-Za-z0-9 ._+-]{0,62}"
"""How the name of a run is written."""

FINGERPRINT_LETTERS = 20
"""Of 5 bits: another key with the same 100 bits cannot be found."""
_GROUP = 5


def fingerprint_of(owner: PeerId) -> str:
    """100 bits of the SHA-256 of an owner's id, which is the public key: `k3f7a-2xq4m-7dhzp-c5wta`."""
    return _grouped(base64.b32encode(hashlib.sha256(owner.encode()).digest()).decode().lower())


def _grouped(letters: str) -> str:
    starts = range(0, FINGERPRINT_LETTERS, _GROUP)
    return "-".join(letters[start : start + _GROUP] for start in starts)


class RunName(NamedTuple):
    """A run by its name and its owner's fingerprint, `NAME@FINGERPRINT`."""

    name: str
    fingerprint: str

    def __str__(self) -> str:
        return f"{self.name}@{self.fingerprint}"

    @classmethod
    def parse(cls, text: str) -> RunName | None:
        """Case and hyphens of the fingerprint do not matter; None if it is no such name."""
        name, _, letters = text.rpartition("@")
        letters = letters.replace("-", "").lower()
        known = re.fullmatch(f"[a-z2-7]{{{FINGERPRINT_LETTERS}}}", letters)
        return cls(name, _grouped(letters)) if known and re.fullmatch(RUN_NAME, name) else None


class Microbatch(NamedTuple):
    """Microbatch `m` of step `t`: its samples are a pure function of the manifest."""

    t: int
    m: int

    def __str__(self) -> str:
        return f"({self.t}, {self.m})"


class Generation(NamedTuple):
    """The number of rollbacks of a run, and what the last one claims; see `swarm.protocol.rollback`.

    Ordered: of two that are true, the greater one is valid.
    """

    number: int = 0
    start: int = 0
    """The version that was restored, and at which the generation starts."""
    lost_stage: Stage = 0
    """The stage that had lost all of its replicas, ..."""
    lost_version: int = 0
    """... and the version at which the run then was."""


class Position(NamedTuple):
    """How far a peer, a stage or the run is. Ordered: of two, the greater one is where all are going."""

    generation: Generation = Generation()
    version: int = 0
