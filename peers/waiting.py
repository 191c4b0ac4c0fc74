"""Waits with a limit, and keepers of tasks. Not asyncio.wait_for: before Python 3.12 it can swallow a
cancellation that comes in the same tick as the result, and a loop that was cancelled would run for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from peers.clock import is_virtual
from swarm.errors import SwarmError

T = TypeVar("T")
I = TypeVar("I")  # noqa: E741


async def within(awaitable: Awaitable[T], limit_s: float) -> T:
    """The result of `awaitable`, which is cancelled if it takes longer.

    Raises:
        asyncio.TimeoutError: it did.
    """
    task = asyncio.ensure_future(awaitable)
    try:
        done, _ = await asyncio.wait({task}, timeout=max(0.0, limit_s))
    except BaseException:
        task.cancel()
        raise
    if done:
        return task.result()
    task.cancel()
    await asyncio.wait({task})
    raise asyncio.TimeoutError


async def happens(event: asyncio.Event, limit_s: float) -> bool:
    """Whether `event` is set, waiting for it at most `limit_s`."""
    if not event.is_set() and limit_s > 0:
        # As `Event.wait` does it. With a task for that, these were a quarter of all callbacks of a peer.
        loop, waiters = asyncio.get_running_loop(), event._waiters
        waiter: asyncio.Future[bool] = loop.create_future()
        waiters.append(waiter)
        timer = loop.call_later(limit_s, _end, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            waiters.remove(waiter)
    return event.is_set()


def pulse(event: asyncio.Event) -> None:
    """Wake all that wait for `event`, which stays unset."""
    event.set()
    event.clear()


def fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """End a future with an error, unless it has ended. Perhaps no task waits for it, or will."""
    if not future.done():
        future.set_exception(error)
        future.exception()  # seen


def _end(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(True)


async def unless(watch: asyncio.Future[Any], awaitable: Awaitable[T]) -> T:
    """The result of `awaitable`, which is cancelled if `watch` ends first: with its error."""
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            watch.result()
        return await task
    finally:
        let_go(task)


def let_go(*tasks: asyncio.Future[Any]) -> list[asyncio.Future[Any]]:
    """Cancel tasks, whatever became of them, and wait for none. Returns those that still run."""
    running = [task for task in tasks if not (task.done() and (task.cancelled() or [task.exception()]))]
    for task in running:
        task.cancel()
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # it was looked at
    return running


async def for_each(items: Iterable[I], work: Callable[[I], Awaitable[T]], most: int) -> list[T]:
    """What `work` gives for each of them, done for so many at a time. The first error ends all of it."""
    room = asyncio.Semaphore(most)

    async def one(item: I) -> T:
        async with room:
            return await work(item)

    tasks = [asyncio.ensure_future(one(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await end_tasks(tasks)


async def until_one_ends(*work: Coroutine[Any, Any, object]) -> None:
    """Do all of these at a time, until one ends: the others are cancelled, and its error is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await end_tasks(tasks)


async def end_tasks(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel all of them, and return when none runs any more, whatever became of it."""
    if running := let_go(*tasks):
        await asyncio.gather(*running, return_exceptions=True)


class TaskKeeper:
    """Holds background tasks until they end or it closes: the loop alone may collect one while it runs."""

    def __init__(self, on_end: Callable[[BaseException | None], None] | None = None) -> None:
        """`on_end`: told the error of each that ends, or None; by default the loop is told of bugs."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_end = on_end or _tell_bug

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
        self._on_end(None if task.cancelled() else task.exception())  # seen: few of them are awaited

    def cancel(self) -> None:
        """Tell all of them to stop."""
        for task in self._tasks:
            task.cancel()

    async def ended(self, limit_s: float | None = None) -> None:
        """Return when none of those that run now does any more, or after so long."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=limit_s)

    async def close(self) -> None:
        """Cancel the tasks, and those that they start meanwhile, until none is left."""
        while self._tasks:
            await end_tasks(self._tasks)
            await asyncio.sleep(0)  # those that had just ended are forgotten


def _tell_bug(error: BaseException | None) -> None:
    if error is not None and not isinstance(error, SwarmError | OSError | asyncio.TimeoutError):
        report_bug("bug in a task", error)


def report_bug(what: str, error: BaseException) -> None:
    """Have the loop say what no handler expected."""
    asyncio.get_running_loop().call_exception_handler({"message": what, "exception": error})


async def in_daemon_thread(work: Callable[[], T], *, name: str) -> T:
    """The result of `work()`, run in a thread of its own.

    Unlike those of `asyncio.to_thread`, the thread keeps no process alive: a disk may hang for ever.
    """
    if is_virtual():
        return await asyncio.get_running_loop().run_in_executor(None, work)
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # a caller that is cancelled does not cancel it

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001  the caller gets it
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(result)


K = TypeVar("K")
"""Which peer it goes to, and as what."""
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
        if (running := self._running.get(key)) is None or running.done():  # perhaps it was never begun
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
