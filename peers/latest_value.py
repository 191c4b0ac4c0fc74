"""Keeps others informed of a state: the newest message goes out, older ones are skipped."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from peers.waiting import end_tasks

K = TypeVar("K")
"""Whom it goes to, and as what."""
M = TypeVar("M")


class LatestValueSender(Generic[K, M]):
    """At most one message in flight under each key; what is posted meanwhile replaces what waits."""

    def __init__(self, send: Callable[[K, M], Awaitable[None]]) -> None:
        self._send = send
        self._waiting: dict[K, M] = {}
        self._running: dict[K, asyncio.Task[None]] = {}

    def post(self, key: K, message: M) -> None:
        """Send `message` as soon as the one before it under that key is answered."""
        self._waiting[key] = message
        if key not in self._running:
            self._running[key] = asyncio.get_running_loop().create_task(self._deliver(key))

    async def _deliver(self, key: K) -> None:
        try:
            while key in self._waiting:
                await self._send(key, self._waiting.pop(key))
        finally:  # not in a callback of the task: what is posted before that ran would wait for the next post
            self._running.pop(key, None)

    async def close(self, which: Callable[[K], bool] = lambda key: True) -> None:
        """Stop sending what has one of these keys."""
        self._waiting = {key: message for key, message in self._waiting.items() if not which(key)}
        tasks = [task for key, task in self._running.items() if which(key)]
        await end_tasks(tasks)
