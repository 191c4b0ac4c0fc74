"""Names of things. Plain types, so that they sort, hash and travel as they are."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

PeerId: TypeAlias = str
"""libp2p peer id, base58 (an Ed25519 key: the id *is* the public key)."""

Stage: TypeAlias = int
"""Index of a stage, 0 … S-1."""


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
