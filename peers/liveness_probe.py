"""Asking silent peers whether they are back, so that no real work is risked to find out."""

from __future__ import annotations

import asyncio

from peers.clock import now_s
from peers.ports import Directory, Transport
from peers.waiting import end_tasks
from swarm.errors import PeerFault, SwarmError
from swarm.ids import PeerId
from swarm.policy.backoff import Backoff
from swarm.wire.messages import Locate, pack

PROBE_EVERY_S, LATER_EVERY_S = 0.5, 16.0
"""At first, and later: twice as long after each time. Identities without a process are silent for ever."""
PROBE_S = 3.0
"""For an answer that needs no work; as long as a report may take."""
MAX_PROBED = 32
"""At a time."""


class Prober:
    """Ends the rest of silent peers as soon as they answer anything."""

    def __init__(self, run: str, transport: Transport, directory: Directory, backoff: Backoff) -> None:
        self._transport, self._directory, self._backoff = transport, directory, backoff
        self._question = pack(Locate(run=run, t=0, m=0))
        self._asking: dict[PeerId, asyncio.Task[None]] = {}
        self._due: dict[PeerId, tuple[float, float]] = {}
        """When each is asked, and how long after that again."""

    async def run(self) -> None:
        """Ask, until cancelled."""
        try:
            while True:
                await asyncio.sleep(PROBE_EVERY_S)
                self._ask_all()
        finally:
            await end_tasks(self._asking.values())

    def _ask_all(self) -> None:
        now, silent = now_s(), self._backoff.silent()
        self._due = {peer: self._due.get(peer, (now, PROBE_EVERY_S)) for peer in silent}
        for peer in silent:
            due, again_s = self._due[peer]
            record = self._directory.find(peer)
            if record is None or record.state == "left":
                self._backoff.forget(peer)
            elif due <= now and peer not in self._asking and len(self._asking) < MAX_PROBED:
                self._due[peer] = now + again_s, min(LATER_EVERY_S, 2 * again_s)
                self._asking[peer] = asyncio.get_running_loop().create_task(self._ask(peer))

    async def _ask(self, peer: PeerId) -> None:
        try:
            await self._transport.call(peer, "locate", self._question, deadline_s=PROBE_S)
        except PeerFault:
            return  # still silent
        except SwarmError:
            pass  # a refusal is as good as an answer
        finally:
            del self._asking[peer]
        self._backoff.heard(peer)
