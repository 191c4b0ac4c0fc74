"""Measuring the lines to a few idle peers, for the planner. Lines in use are known anyway."""

from __future__ import annotations

import asyncio
import random

from peers.clock import now_s
from peers.ports import PROBE_BYTES, Answer, Directory, Request, Transport
from swarm.errors import Refused, SwarmError
from swarm.ids import PeerId
from swarm.wire.messages import Ack, ProbeLine, pack, unpack

PROBE_EVERY_S = 60.0
"""One line each time: 128 KiB a minute."""
FEW = 16
"""Lines that one peer measures; with those of the others, ten to every region are known soon."""
PROBE_WITHIN_S = 30.0
"""Slower than 35 kbit/s is not worth knowing."""
AGAIN_S = 600.0


class PathProber:
    """Calls a peer with next to nothing, then with a body that comes back, while the transport measures.

    It answers the probes of others as well: no more bytes than the caller sends.
    """

    def __init__(self, run: str, transport: Transport, directory: Directory, rng: random.Random) -> None:
        self._run, self._transport, self._directory, self._rng = run, transport, directory, rng
        self._probed_at: dict[PeerId, float] = {}
        transport.serve("line", self._serve_line, max_body_bytes=PROBE_BYTES)

    async def run(self) -> None:
        """Probe now and then, until cancelled."""
        while True:
            # Peers that start together do not probe together.
            await asyncio.sleep(self._rng.uniform(0.5, 1.5) * PROBE_EVERY_S)
            peer = self.choose(now=now_s())
            if peer is not None:
                await self.probe(peer)

    def choose(self, *, now: float) -> PeerId | None:
        """A peer whose line is not known; else the one that was probed longest ago, if that is long."""
        serving = [
            r.peer
            for r in self._directory.peers()
            if r.state == "serving" and r.peer != self._transport.peer_id
        ]
        for gone in self._probed_at.keys() - set(serving):
            del self._probed_at[gone]
        lines = self._transport.lines
        known = {peer for peer, line in lines.items() if line.rtt_s and line.bandwidth_bps}
        unknown = [peer for peer in serving if peer not in known and peer not in self._probed_at]
        if unknown and len(self._probed_at) < FEW:
            return self._rng.choice(unknown)
        oldest = min(self._probed_at, key=self._probed_at.__getitem__, default=None)
        if oldest is not None and now - self._probed_at[oldest] >= AGAIN_S:
            return oldest
        return None

    async def probe(self, peer: PeerId) -> None:
        """Let the transport measure both directions of the line to `peer`; a silent peer has no line."""
        self._probed_at[peer] = now_s()
        question = pack(ProbeLine(run=self._run))
        body = self._rng.randbytes(PROBE_BYTES)  # zeros might be packed on the way
        try:
            await self._transport.call(peer, "line", question, deadline_s=PROBE_WITHIN_S)
            await self._transport.call(
                peer, "line", question, [body], max_answer_bytes=PROBE_BYTES, deadline_s=PROBE_WITHIN_S
            )
        except SwarmError:
            return

    async def _serve_line(self, request: Request) -> Answer:
        unpack(request.header, ProbeLine, self._run)
        if len(request.body_sizes) > 1:
            raise Refused(f"a probe of {len(request.body_sizes)} parts; one is sent back")
        return Answer(pack(Ack()), await request.accept())
