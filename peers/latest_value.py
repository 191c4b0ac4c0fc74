"""Keeps others informed of a state: the newest message goes out, older ones are skipped."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from swarm.ids import PeerId

M = TypeVar("M")


class LatestValueSender(Generic[M]):
    """At most one message in flight to each peer; what is posted meanwhile replaces what waits."""

    def __init__(self, send: Callable[[PeerId, M], Awaitable[None]]) -> None:
        self._send = send
        self._waiting: dict[PeerId, M] = {}
        self._running: dict[PeerId, asyncio.Task[None]] = {}

    def post(self, peer: PeerId, message: M) -> None:
        """Send `message` to `peer` as soon as the one before it is answered."""
        self._waiting[peer] = message
        if peer not in self._running:
            task = asyncio.get_running_loop().create_task(self._deliver(peer))
            self._running[peer] = task

    async def _deliver(self, peer: PeerId) -> None:
        try:
            while peer in self._waiting:
                await self._send(peer, self._waiting.pop(peer))
        finally:  # not in a callback of the task: what is posted before that ran would wait for the next post
            self._running.pop(peer, None)

    async def close(self) -> None:
        """Stop sending."""
        self._waiting.clear()
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
