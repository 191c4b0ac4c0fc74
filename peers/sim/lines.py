"""How long messages are on their way: over lines that are only bad, or over those of a described network.

What `SharedLines` describe is shared: a message waits its turn at three places, the sender's upload, the line
between the two, and the receiver's download. Each serves in the order of the requests, at its own speed, and
a message flows through all three at once: alone it takes its bytes by the slowest of them, plus the latency
once. A small message goes in between the parts of large ones, so it takes its share of a line, but waits for
none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from peers.sim.dice import Dice
from swarm.codecs import SLOW_BPS
from swarm.ids import PeerId
from swarm.plan.network import Network, all_reduce_s, carried_s

SMALL_BYTES = 4096
"""A header; a report of a run of thousands of microbatches."""


class Sent(NamedTuple):
    source: PeerId
    destination: PeerId
    size_bytes: int
    now_s: float
    since_s: float | None = None
    """It is the body of a call that was made then and is accepted now."""


@dataclass(slots=True)
class Lines:
    """How bad the lines are. Probabilities are for each message."""

    least_s: float = 0.001
    most_s: float = 0.03
    bytes_per_s: float = 1e6
    lost: float = 0.0
    doubled: float = 0.0
    late: float = 0.0
    late_s: float = 2.0

    def lasts_s(self, sent: Sent, dice: Dice) -> float:
        """How long a message is on its way, once."""
        return dice.between(self.least_s, self.most_s) + sent.size_bytes / self.bytes_per_s

    def round_trip_s(self, here: PeerId, there: PeerId) -> float:
        """What a peer measures of a small call; 0: nothing, since each takes another time."""
        return 0.0


class SharedLines:
    """All lines of a network, and until when each is taken. Devices are named by their index."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._latency_s: list[list[float]] = network.latency_s.tolist()
        self._line_s: list[list[float]] = _per_byte(network.bandwidth_bps.tolist())
        self._region: list[int] = network.region_of.tolist()
        self._up_s, self._down_s = _per_byte([network.upload_bps.tolist(), network.download_bps.tolist()])
        self._up_free_s, self._down_free_s, self._line_free_s = (dict[Any, float]() for _ in range(3))
        """Until when each is taken."""

    def latency_s(self, i: int, j: int) -> float:
        """The latency one way."""
        return self._latency_s[self._region[i]][self._region[j]] if i != j else 0.0

    def down_s(self, i: int, size_bytes: float) -> float:
        """Seconds of a download that nothing else limits."""
        return self._down_s[i] * size_bytes

    def send(
        self, i: int, j: int, size_bytes: float, now_s: float, packed_bytes: float | None = None
    ) -> float:
        """The time at which the last byte arrives, if it is sent now. Slow lines carry `packed_bytes`."""
        packed_bytes = size_bytes if packed_bytes is None else packed_bytes
        if i == j:
            return now_s
        a, b = self._region[i], self._region[j]
        start_s = end_s = now_s
        for free_s, which, byte_s in (
            (self._up_free_s, i, self._up_s[i]),
            (self._line_free_s, (i, j), self._line_s[a][b]),
            (self._down_free_s, j, self._down_s[j]),
        ):
            if byte_s:
                turn_s = free_s.get(which, 0.0)
                lasts_s = byte_s * (packed_bytes if byte_s * SLOW_BPS >= 8.0 else size_bytes)
                if size_bytes > SMALL_BYTES:
                    start_s = turn_s = max(start_s, turn_s)
                free_s[which] = turn_s + lasts_s
                end_s = max(end_s, start_s + lasts_s)
        return end_s + self._latency_s[a][b]

    def reduce_s(self, members: Sequence[int], size_bytes: float, packed_bytes: float) -> float:
        """Seconds of the all-reduce of these devices, with nothing else on the lines."""
        these, network = np.array(members), self._network
        parts_bits = 8.0 * size_bytes / len(members), 8.0 * packed_bytes / len(members)
        latency_nn, bandwidth_nn = network.between(these, these)
        part_s, up_s, down_s = (
            carried_s(parts_bits, 1.0 / bps)
            for bps in (bandwidth_nn, network.upload_bps[these], network.download_bps[these])
        )
        others = len(these) - 1
        return float(all_reduce_s(latency_nn, part_s, others * up_s, others * down_s, these >= 0))


def _per_byte(bps: list[list[float]]) -> list[list[float]]:
    """Seconds for a byte; 0 where there is no limit."""
    return [[8.0 / one if math.isfinite(one) else 0.0 for one in row] for row in bps]
