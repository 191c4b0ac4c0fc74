"""The threads that compute for a stage, on a CPU or a GPU, and the queue of their jobs."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch

from peers.clock import now_s
from peers.ports import Books, Rank, StageDevice
from swarm.errors import DeviceHangs, Leaving, SetupError
from swarm.ids import Stage

CHECK_EVERY_S = 1.0
HUNG_TIMES = 20.0
"""A job of the device that takes so many times the longest one before it, and `hung_s`, will never end."""
OWNER_S, OWNER_TIMES, OWNER_MAX_S = 30.0, 2.0, 90.0
"""The same once the peer leaves or pauses, and the most of it: what waits then is the owner."""

STOPPED = "the device of this peer is stopped: it leaves, pauses or moves"

T = TypeVar("T")
_Job: TypeAlias = "tuple[int, int, int, Callable[[bool], None]]"
"""Rank, step, order of arrival, and what to do: work, or say that it will not be done."""


class MeanLength:
    """The length of a queue, on average over the time since this was last asked."""

    def __init__(self) -> None:
        self._sum_s = 0.0
        self._asked_at = self._changed_at = now_s()

    def count(self, length: int) -> None:
        """The queue was that long until now. To be called before it changes."""
        now = now_s()
        self._sum_s += length * (now - self._changed_at)
        self._changed_at = now

    def ask(self, length: int) -> float:
        self.count(length)
        now, since, sum_s = self._changed_at, self._asked_at, self._sum_s
        self._sum_s, self._asked_at = 0.0, now
        return sum_s / (now - since) if now > since else float(length)


class DeviceThreads:
    """Fulfils `peers.ports.StageDevice` with `workers` threads."""

    def __init__(self, name: str, workers: int = 1) -> None:
        self.workers, self.books = workers, Books()
        self._waiting: list[_Job] = []
        self._order = itertools.count()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}, {number}", daemon=True)
            for number in range(workers)
        ]
        self._started = self._ending = self._alone = False
        self._jobs: set[int] = set()
        """Those that run, by order of arrival."""
        self.busy_s = self.longest_s = 0.0
        self.failure: Exception | None = None
        self.abandoned = False
        self._began = threading.local()
        self._length = MeanLength()
        self._change = threading.Condition()
        """Of what waits, what runs, and what is counted."""

    @property
    def running(self) -> int | None:
        with self._change:
            return min(self._jobs, default=None)

    def start(self) -> None:
        self._started = True
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        with self._change:
            self._ending = True
            left, self._waiting = self._waiting, []
            self._change.notify_all()
        for thread in self._threads if self._started else ():
            thread.join(0.0 if self.abandoned else None)
        for *_, work in left:
            work(False)

    def mean_queue(self) -> float:
        with self._change:
            return self._length.ask(self._queued)

    def elapsed_s(self) -> float:
        return time.perf_counter() - self._began.at

    @property
    def _queued(self) -> int:
        return len(self._waiting) + len(self._jobs)

    async def run(self, rank: Rank, t: int, job: Callable[..., T], *args: Any) -> T:
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def work(runs: bool) -> None:
            tell: Callable[[], None] = partial(result.set_exception, Leaving(STOPPED))
            if runs and not result.cancelled():
                try:
                    tell = partial(result.set_result, job(*args))
                except Exception as error:  # noqa: BLE001  the caller that awaits the job gets it
                    tell = partial(result.set_exception, error)
                    if isinstance(error, torch.AcceleratorError):
                        self.failure = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits any more
                loop.call_soon_threadsafe(lambda: result.done() or tell())

        with self._change:
            if self._ending:
                raise Leaving(STOPPED)
            self._length.count(self._queued)
            heapq.heappush(self._waiting, (rank, t, next(self._order), work))
            self._change.notify_all()
        return await result

    def _next(self) -> _Job | None:
        """The job to do now. One of rank `STEP` waits for those that run, and all others wait for it."""
        with self._change:
            while not self._ending:
                alone = bool(self._waiting) and self._waiting[0][0] == Rank.STEP
                if self._waiting and not self._alone and not (alone and self._jobs):
                    job = heapq.heappop(self._waiting)
                    self._jobs.add(job[2])
                    self._alone = alone
                    return job
                self._change.wait()
        return None

    def _end(self, number: int, took_s: float) -> None:
        with self._change:
            self._length.count(self._queued)
            self._jobs.discard(number)
            if not self._jobs:
                torch.clear_autocast_cache()
            self._alone = False
            self.busy_s += took_s / self.workers
            self.longest_s = max(self.longest_s, took_s)
            self._change.notify_all()

    def _work(self) -> None:
        # Else torch forgets what autocast rounded, of all threads, once one ends: a weight that another reads
        # twice would be rounded twice, and its gradients added up in float32 and not in bfloat16.
        if self.workers > 1:
            torch.autocast_increment_nesting()
        while (job := self._next()) is not None:
            rank, _, number, work = job
            self._began.at = time.perf_counter()
            with self.books if rank == Rank.STEP else contextlib.nullcontext():
                work(True)
            self._end(number, self.elapsed_s())


def longest_job_s(before_s: float, hung_s: float, *, owner_waits: bool) -> float:
    """How long a job of a device may take whose longest one took `before_s`."""
    if owner_waits:
        return min(OWNER_MAX_S, max(OWNER_S, OWNER_TIMES * before_s))
    return max(hung_s, HUNG_TIMES * before_s)


async def watch_device(
    device: StageDevice, stage: Stage, hung_s: float, ends: Callable[[], tuple[bool, bool]]
) -> None:
    """End a stage peer whose device hangs or fails: it still says that it lives, so its replicas wait.

    `hung_s`: as in `StageSettings`. `ends`: whether its owner waits for the end of the peer, and whether the
    end is a pause.

    Raises:
        DeviceHangs: a job will never end, or not soon enough for the owner.
        SetupError: the device failed for good.
    """
    seen, count = None, 0
    while True:
        await asyncio.sleep(CHECK_EVERY_S)
        if device.failure is not None:
            # Nothing works on it any more in this process. Others do this peer's work.
            raise SetupError(f"the device of stage {stage} failed: {str(device.failure)[:300]}")
        # Rounds are counted, not seconds: while this process was stopped the job was, too.
        job = device.running
        owner_waits, pauses = ends()
        now = (job, owner_waits)
        seen, count = now, count + 1 if now == seen else 0
        limit_s = longest_job_s(device.longest_s, hung_s, owner_waits=owner_waits)
        if job is None or count * CHECK_EVERY_S <= limit_s:
            continue
        device.abandoned = True
        what_ends = "This peer ends, so that others do its work"
        if pauses:
            what_ends = "It cannot pause: this process ends, and its memory is free. The state of its stage "
            what_ends += "is given up; others have it, or a checkpoint"
        raise DeviceHangs(
            f"the device has worked on one job for {count * CHECK_EVERY_S:.0f} s, on the longest one before "
            f"for {device.longest_s:.1f} s. {what_ends}. Look after the device (nvidia-smi, dmesg), then "
            "start it again"
        )
