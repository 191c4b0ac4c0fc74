"""Where this peer is, and how wide its lines are, from what the transport has seen: for its record."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from peers.ports import Transport
from swarm.errors import SwarmError
from swarm.ids import PeerId
from swarm.plan.places import Place, located, measured, read_place
from swarm.records import PeerRecord
from swarm.wire.messages import ProbeLine, pack

ASKED = 8
"""Peers that a newcomer measures its way to."""
ASK_S = 2.0


class Whereabouts:
    """A place that moves a little with every look at the lines."""

    def __init__(self, me: PeerId, transport: Transport, place: Place | None = None) -> None:
        self._me, self._transport = me, transport
        self.place = place or Place()
        self.widest_bps = self.in_flight_bytes = 0.0

    def look(self, find: Callable[[PeerId], PeerRecord | None]) -> None:
        """Take in what is known of the lines by now. `find`: the record of a peer, `Directory.find`."""
        lines = self._transport.lines
        for peer, line in lines.items():
            if peer == self._me or not line.rtt_s or (record := find(peer)) is None:
                continue
            theirs = read_place(record.place)
            # Of two that are nowhere yet somebody has to be the first who is somewhere.
            if theirs is not None or self.place == Place():
                self.place = measured(self.place, theirs or Place(), line.rtt_s, me=self._me, peer=peer)
        known = [line for line in lines.values() if line.bandwidth_bps]
        self.widest_bps = max((line.bandwidth_bps for line in known), default=0.0)
        self.in_flight_bytes = max((line.bandwidth_bps * line.rtt_s / 8 for line in known), default=0.0)


async def measure_place(
    me: PeerId, run_id: str, transport: Transport, records: Sequence[PeerRecord], rng: random.Random
) -> Place | None:
    """The place of a newcomer, from round trips to a few peers whose place is known; None without any."""
    known = [record for record in records if read_place(record.place) is not None and record.peer != me]
    asked = rng.sample(known, min(ASKED, len(known)))

    async def ask(peer: PeerId) -> None:
        for _ in range(2):  # the first one has the dialling in it
            try:
                await transport.call(peer, "line", pack(ProbeLine(run=run_id)), deadline_s=ASK_S)
            except SwarmError:
                return

    await asyncio.gather(*(ask(record.peer) for record in asked))
    around: list[tuple[PeerId, Place, float]] = []
    for record in asked:
        line, theirs = transport.lines.get(record.peer), read_place(record.place)
        if line is not None and line.rtt_s and theirs is not None:
            around.append((record.peer, theirs, line.rtt_s))
    return located(me, around) if around else None
