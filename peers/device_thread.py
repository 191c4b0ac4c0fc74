"""One thread owns the device; whoever needs it queues here."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
_Job: TypeAlias = "tuple[int, int, int, Callable[[], None] | None]"
"""Rank, step, order of arrival, and what to do; None ends the thread."""


class Rank(IntEnum):
    """What goes first. Backwards free memory, so they go before forwards; digests can wait."""

    STEP = 0
    BACKWARD = 1
    FORWARD = 2
    IDLE = 3


class DeviceThread:
    """Runs jobs one at a time, by rank, then by step, then in order of arrival.

    All changes of weights, sums and ledgers happen here, so each job sees them at rest.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.PriorityQueue[_Job] = queue.PriorityQueue()
        self._order = itertools.count()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = False
        self.busy_s = 0.0
        """Seconds of work done."""
        self.longest_s = 0.0
        """Of all jobs that ended."""
        self.running: int | None = None
        """Number of the running job."""
        self.abandoned = False
        """Nobody waits for the running job: it will never end, or all is to end at once."""
        self._queued = 0
        self._queued_s = 0.0
        self._looked_at = self._changed_at = time.monotonic()
        self._lock = threading.Lock()

    def start(self) -> None:
        self._started = True
        self._thread.start()

    def stop(self) -> None:
        """Finish the running job unless it is abandoned, drop the others."""
        if self._started:
            self._jobs.put((-1, 0, 0, None))
            self._thread.join(0.0 if self.abandoned else None)

    def mean_queue(self) -> float:
        """Jobs that waited or ran, on average since this was last asked."""
        with self._lock:
            self._count(0)
            now, since = self._changed_at, self._looked_at
            queued_s, self._queued_s, self._looked_at = self._queued_s, 0.0, now
        return queued_s / (now - since) if now > since else float(self._queued)

    def _count(self, change: int) -> None:
        now = time.monotonic()
        self._queued_s += self._queued * (now - self._changed_at)
        self._queued, self._changed_at = self._queued + change, now

    async def run(self, rank: Rank, t: int, job: Callable[..., T], *args: Any) -> T:
        """The result of `job(*args)`, computed on the device thread."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def deliver(value: T | None, error: BaseException | None) -> None:
            if result.done():
                return
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(value)  # type: ignore[arg-type]

        def work() -> None:
            value, error = None, None
            if not result.cancelled():
                try:
                    value = job(*args)
                except Exception as raised:  # noqa: BLE001  whoever awaits the job gets it
                    error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(deliver, value, error)

        with self._lock:
            self._count(1)
        self._jobs.put((rank, t, next(self._order), work))
        return await result

    def _run(self) -> None:
        while True:
            *_, number, work = self._jobs.get()
            if work is None:
                return
            began = time.perf_counter()
            self.running = number
            work()
            self.running = None
            took_s = time.perf_counter() - began
            self.busy_s += took_s
            self.longest_s = max(self.longest_s, took_s)
            with self._lock:
                self._count(-1)
