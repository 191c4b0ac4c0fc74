"""Tasks that belong to something, and end with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from peers.waiting import end_tasks
from swarm.errors import SwarmError

logger = logging.getLogger(__name__)


class TaskKeeper:
    """Holds background tasks until they end or it closes: the loop alone may collect one while it runs."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        """How many of them run."""
        return len(self._tasks)

    def create_task(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()  # seen: few of them are awaited
        if error is not None and not isinstance(error, SwarmError | OSError | asyncio.TimeoutError):
            logger.error("bug in a background task", exc_info=error)

    async def close(self) -> None:
        """Cancel the tasks, and those that they start meanwhile, until none is left."""
        while self._tasks:
            await end_tasks(self._tasks)
