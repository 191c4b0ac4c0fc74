"""The lines of a described network, shared, for the classes that ship."""

from __future__ import annotations

import math

from peers.sim.dice import Dice
from peers.sim.lines import Lines, Sent, SharedLines
from swarm.ids import PeerId
from swarm.plan.network import Network
from swarm.wire.frames import AHEAD_BYTES, WINDOW_BYTES


class HostLines(Lines):
    def __init__(self, network: Network, packed_part: float = 1.0) -> None:
        """`packed_part`: of each body, what slow lines carry."""
        super().__init__(least_s=0.0, most_s=0.0, bytes_per_s=math.inf)
        self._shared, self._packed_part = SharedLines(network), packed_part
        self.device_of: dict[PeerId, int] = {}
        """Where processes are."""

    def round_trip_s(self, here: PeerId, there: PeerId) -> float:
        return 2 * self._shared.latency_s(self.device_of[here], self.device_of[there])

    def lasts_s(self, sent: Sent, dice: Dice) -> float:
        i, j = self.device_of[sent.source], self.device_of[sent.destination]
        sent_s = sent.now_s if sent.since_s is None else sent.since_s
        if sent.since_s is not None and sent.size_bytes > WINDOW_BYTES + AHEAD_BYTES:
            sent_s = sent.now_s + self._shared.latency_s(j, i)  # its caller waits until it is accepted
        packed_bytes = self._packed_part * sent.size_bytes
        return max(0.0, self._shared.send(i, j, sent.size_bytes, sent_s, packed_bytes) - sent.now_s)
