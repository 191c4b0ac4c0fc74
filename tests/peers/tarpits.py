"""Peers whose bodies trickle."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from peers.ports import Answer
from peers.sim.lines import Lines
from swarm.ids import PeerId
from tests.peers.loops import Swarm


class TrickleLines(Lines):
    """Bodies of some peers come at a byte a second."""

    def __init__(self, of: Lines, slow: Collection[PeerId]) -> None:
        super().__init__(of.least_s, of.most_s, of.bytes_per_s)
        self._slow = slow

    def lasts_s(self, source: PeerId, destination: PeerId, size_bytes: int, **when: Any) -> float:
        body_bytes = size_bytes if source in self._slow and when["since_s"] is not None else 0
        return super().lasts_s(source, destination, size_bytes, **when) + body_bytes


def trickle(s: Swarm, slow: Collection[PeerId]) -> None:
    """Each body that they send comes at a byte a second: of calls, and of answers."""
    network = s.network
    network.lines = network.calm = TrickleLines(network.calm, slow)
    answer = network._answer

    def later(call: Any, outcome: Any) -> None:
        size = sum(memoryview(b).nbytes for b in outcome.body) if isinstance(outcome, Answer) else 0
        if call.callee.peer_id in slow and size:
            network.loop.call_later(float(size), answer, call, outcome)
        else:
            answer(call, outcome)

    network._answer = later  # type: ignore[method-assign]
