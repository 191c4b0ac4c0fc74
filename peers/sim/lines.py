"""Arrival times of transfers over lines that are shared.

A transfer waits its turn at three places: the sender's upload, the line between the two devices, and the
receiver's download. Each serves in the order of the requests, at its own speed, and a transfer flows through
all three at once: alone it takes its bytes by the slowest of them, plus the latency once. Shared lines get no
more through than they can carry.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from swarm.plan.network import Network


class SharedLines:
    """All lines of a network, and until when each is taken. Devices are named by their index."""

    def __init__(self, network: Network) -> None:
        self._latency_s: list[list[float]] = network.latency_s.tolist()
        self._line_s: list[list[float]] = _per_byte(network.bandwidth_bps.tolist())
        self._region = [device.region for device in network.devices]
        (self._up_s,) = _per_byte([[device.upload_bps for device in network.devices]])
        (self._down_s,) = _per_byte([[device.download_bps for device in network.devices]])
        self._up_free_s = [0.0] * len(network)
        self._down_free_s = [0.0] * len(network)
        self._line_free_s: dict[tuple[int, int], float] = {}

    def latency_s(self, i: int, j: int) -> float:
        """The latency one way."""
        return self._latency_s[self._region[i]][self._region[j]] if i != j else 0.0

    def down_s(self, i: int, size_bytes: float) -> float:
        """Seconds of a download that nothing else limits."""
        return self._down_s[i] * size_bytes

    def send(self, i: int, j: int, size_bytes: float, now_s: float) -> float:
        """The time at which the last byte arrives, if it is sent now."""
        if i == j:
            return now_s
        a, b = self._region[i], self._region[j]
        start_s = end_s = now_s
        up_s = self._up_s[i]
        if up_s:
            start_s = max(start_s, self._up_free_s[i])
            self._up_free_s[i] = end_s = start_s + size_bytes * up_s
        line_s = self._line_s[a][b]
        if line_s:
            start_s = max(start_s, self._line_free_s.get((i, j), 0.0))
            self._line_free_s[i, j] = free_s = start_s + size_bytes * line_s
            end_s = max(end_s, free_s)
        down_s = self._down_s[j]
        if down_s:
            start_s = max(start_s, self._down_free_s[j])
            self._down_free_s[j] = free_s = start_s + size_bytes * down_s
            end_s = max(end_s, free_s)
        return end_s + self._latency_s[a][b]

    def reduce_s(self, members: Sequence[int], size_bytes: float) -> float:
        """Seconds of an all-reduce in two phases, scatter and gather, as in `peers/stage/all_reduce.py`.

        Of n members each owns an n-th. In each phase every member sends n - 1 parts and receives as many, all
        at once; the slowest upload, download or line between two and the longest latency set the time.
        """
        n = len(members)
        if n < 2:
            return 0.0
        part_bytes = size_bytes / n
        here: dict[int, int] = {}
        for member in members:
            region = self._region[member]
            here[region] = here.get(region, 0) + 1
        slowest_s = max(max(self._up_s[i], self._down_s[i]) for i in members) * (n - 1)
        latency_s = 0.0
        for a in here:
            for b in here:
                if a != b or here[a] > 1:
                    slowest_s = max(slowest_s, self._line_s[a][b])
                    latency_s = max(latency_s, self._latency_s[a][b])
        return 2 * (part_bytes * slowest_s + latency_s)


def _per_byte(bps: list[list[float]]) -> list[list[float]]:
    """Seconds for a byte; 0 where there is no limit."""
    return [[8.0 / one if math.isfinite(one) else 0.0 for one in row] for row in bps]
