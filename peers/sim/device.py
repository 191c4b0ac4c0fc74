"""A device of a simulated peer: one job at a time, each of which takes a while of virtual time.

What a job changes is changed at one moment of its time; what waits for it hears of it at its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from peers.ports import Books, Rank
from peers.sim.dice import Dice
from peers.stage.device import STOPPED, MeanLength
from swarm.errors import Leaving

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Job:
    number: int
    rank: Rank
    work: Callable[[], Any]
    result: asyncio.Future[Any]
    tell: Callable[[], None] | None = None
    """Gives its result to the task that waits for it."""
    worked: bool = False
    lasts_s: float = 0.0


class SimDevice:
    """Fulfils `peers.ports.StageDevice` without a thread."""

    def __init__(self, dice: Dice, job_s: float, *, spread: float = 0.5) -> None:
        """`job_s`: of a forward or backward, give or take `spread` of it; other jobs take a third of that."""
        self._dice, self.job_s, self._spread = dice, job_s, spread
        self._waiting: list[tuple[int, int, int, _Job]] = []
        self._order = itertools.count()
        self._job: _Job | None = None
        self._started = self._stopped = False
        self.workers, self.books = 1, Books()
        self.busy_s = self.longest_s = 0.0
        self.failure: Exception | None = None
        self.abandoned = False
        self.hangs = False
        """The running job, or the next one, never ends."""
        self.dies = False
        """Each job fails from now on."""
        self._length = MeanLength()

    @property
    def running(self) -> int | None:
        return None if self._job is None else self._job.number

    def start(self) -> None:
        self._started = True
        self._next()

    def stop(self) -> None:
        self._started, self._stopped = False, True
        for *_, job in self._waiting:
            if not job.result.done():
                job.result.set_exception(Leaving(STOPPED))
        self._waiting.clear()
        if self._job is not None and not self.abandoned:
            self._work(self._job)

    def mean_queue(self) -> float:
        return self._length.ask(self._queued)

    def elapsed_s(self) -> float:
        return 0.0 if self._job is None else self._job.lasts_s

    async def run(self, rank: Rank, t: int, job: Callable[..., T], *args: Any) -> T:
        if self._stopped:
            raise Leaving(STOPPED)
        made = _Job(next(self._order), rank, lambda: job(*args), asyncio.get_running_loop().create_future())
        self._length.count(self._queued)
        heapq.heappush(self._waiting, (rank, t, made.number, made))
        self._next()
        return await made.result

    @property
    def _queued(self) -> int:
        return len(self._waiting) + (self._job is not None)

    def _next(self) -> None:
        if self._job is not None or not self._started or not self._waiting:
            return
        self._length.count(self._queued)
        rank, *_, job = heapq.heappop(self._waiting)
        if job.result.cancelled():
            self._next()
            return
        self._job = job
        job.lasts_s = self.job_s * self._dice.between(1 - self._spread, 1 + self._spread)
        if rank != Rank.COMPUTE:
            job.lasts_s /= 3
        works_after_s = job.lasts_s * self._dice.number()
        loop = asyncio.get_running_loop()
        loop.call_later(works_after_s, self._work, job)
        loop.call_later(job.lasts_s, self._end, job)

    def _work(self, job: _Job) -> None:
        if self.hangs or job.worked or job.result.cancelled():
            return
        job.worked = True
        try:
            if self.dies:
                raise torch.AcceleratorError("the device died")
            with self.books if job.rank == Rank.STEP else contextlib.nullcontext():
                job.tell = partial(job.result.set_result, job.work())
        except Exception as error:  # noqa: BLE001  the task that awaits the job gets it
            job.tell = partial(job.result.set_exception, error)
            if isinstance(error, torch.AcceleratorError):
                self.failure = error

    def _end(self, job: _Job) -> None:
        if self.hangs:
            return
        self._length.count(self._queued)
        self._job = None
        self.busy_s += job.lasts_s
        self.longest_s = max(self.longest_s, job.lasts_s)
        if job.tell is not None and not job.result.done():
            job.tell()
        self._next()
