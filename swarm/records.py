"""What a peer says about itself in the DHT. Small, versioned; readers ignore unknown fields."""

from __future__ import annotations

from typing import Literal

import msgspec

from swarm.ids import PeerId, Stage

MAX_RECORD_BYTES = 1000
"""hivemind's DHT slows down with larger values (and breaks with many of 12 kB under one key)."""

State = Literal["joining", "serving", "leaving", "left"]


class PeerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One peer's announcement. Signed by the peer it speaks of (I8)."""

    peer: PeerId
    run: str
    stage: Stage
    state: State
    version: int
    """Weight version it serves."""
    speed: float = 0.0
    """Microbatches per second of its device, measured; 0 = not measured yet."""
    max_inflight: int = 1
    device: str = "cpu"
    addresses: tuple[str, ...] = ()
    """libp2p multiaddresses to dial it at."""
    since: float = 0.0
    """Unix time at which it joined."""
