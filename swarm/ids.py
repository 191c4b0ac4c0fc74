"""Names of things. Plain types, so that they sort, hash and travel as they are."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

PeerId: TypeAlias = str
"""libp2p peer id, base58 (an Ed25519 key: the id *is* the public key)."""

Stage: TypeAlias = int
"""Index of a stage, 0 … S-1."""


class Microbatch(NamedTuple):
    """Microbatch `m` of step `t`: what it holds is a pure function of the manifest."""

    t: int
    m: int

    def __str__(self) -> str:
        return f"({self.t}, {self.m})"


class Era(NamedTuple):
    """How often a run went back, and to which version the last time; see `swarm.policy.eras`.

    Ordered: the greater one holds.
    """

    number: int = 0
    start: int = 0

    def next(self, start: int) -> Era:
        """The era that goes back to `start`."""
        return Era(self.number + 1, start)


class Standing(NamedTuple):
    """How far a peer, a stage or the run is. Ordered: of two, the greater one is where all are going."""

    era: Era = Era()
    version: int = 0
