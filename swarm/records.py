"""What a peer says about itself in the DHT. Small, versioned; readers ignore unknown fields."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from swarm.ids import SIGNATURE_BYTES, PeerId, Stage

MAX_RECORD_BYTES = 1000
"""hivemind's DHT slows down with larger values (and breaks with many of 12 kB under one key)."""

State = Literal["choosing", "joining", "serving", "leaving", "left", "keeping", "paused", "feeding"]
"""`feeding`: a trainer, which gives blocks of the data to others; those that give none are in no record.
`paused`: its owner needs the device. The peer keeps its stage and its state, and takes part in nothing."""

NO_STAGE: Stage = -1
"""Of a keeper (always `keeping`), a trainer (`feeding`), and a newcomer that is `choosing` a stage."""


class Voucher(msgspec.Struct, frozen=True, array_like=True):
    """A trainer's signed word for the peer that shows it; see `swarm.protocol.voice`."""

    trainer: PeerId
    steps: int
    """In which the peer answered microbatches."""
    t: int
    """The last of them."""
    signature: Annotated[bytes, msgspec.Meta(max_length=SIGNATURE_BYTES)]
    before: int = 0
    """Steps that the voucher before it said."""


class PeerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One peer's announcement of itself, which it signs (I8)."""

    peer: PeerId
    run: str
    stage: Stage
    state: State
    version: int
    """Version of the weights that it serves."""
    speed: float = 0.0
    """Microbatches per second of its device, measured; 0 = not measured yet."""
    load: float = 0.0
    """Microbatches that waited for its device or were on it, on average since its last record."""
    movable: bool = True
    """False: its owner chose its stage."""
    state_bytes: int = 0
    """Size of weights and optimizer: what a peer that moves to its stage has to download."""
    bandwidth_bps: float = 0.0
    """Measured upload, bits per second; 0 = not measured."""
    max_inflight: int = 1
    device: str = "cpu"
    addresses: tuple[str, ...] = ()
    """libp2p multiaddresses to dial it at."""
    since: float = 0.0
    """Unix time at which it joined, by its own clock; 0 = not said. Without voice the first coordinates."""
    spare: bool = False
    """It is paused because a step takes longer with it; see `swarm.policy.spares`."""
    voucher: Voucher | None = None
    """That it has worked for the run."""
    machine: str = ""
    """Equal for peers that hand over in memory to one another; empty: it does not to any."""

    @property
    def address(self) -> str:
        """One that other machines can dial, if there is any."""
        return min(self.addresses, key=lambda a: a.startswith(("/ip4/127.", "/ip6/::1/")), default="")
