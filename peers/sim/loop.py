"""An event loop in virtual time: it moves its clock instead of waiting.

    run_virtual(main())     # its result; raises Deadlock if nothing can happen any more

    with VirtualLoop().running() as loop:
        process = Process("a")
        process.start(loop, main())
        loop.run(until=lambda: process.ended, limit_s=60.0)

The same program does the same things in the same order each time it is run, if it asks `peers.clock` for the
time, draws chance from seeded generators and iterates over no set of strings (or PYTHONHASHSEED is set). What
asyncio itself leaves to addresses, the order of tasks and futures in sets, follows their numbers here.

Nothing of the outside takes part: no sockets, and no threads. What the protocol gives to worker threads
(`asyncio.to_thread`) runs on the loop, at one instant a little later.

Each callback belongs to the process in whose context it was made. A process that is stopped (SIGSTOP) keeps
its callbacks until it goes on; one that is dead (SIGKILL) never runs another instruction, not even a
`finally`. The wall clock that `peers.clock` tells is that of the process that asks, which may be wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import itertools
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from concurrent.futures import Executor
from typing import Any, TypeAlias, TypeVar

import torch

from peers.clock import VirtualTime

T = TypeVar("T")

BEGAN_UNIX_S = 1.7e9
"""Unix time at which virtual time begins."""
MAX_AT_ONCE = 100_000
"""Callbacks at one instant. A schedule has a few thousand; more is something that calls itself for ever."""
MAX_SHOWN_TASKS = 20
AT_ONCE = contextvars.Context()
"""Of callbacks that `call_soon` runs itself: nothing else can tell when."""


class Deadlock(Exception):
    """Nothing is scheduled and nothing can wake any task. The text says where tasks wait."""


class Killed(BaseException):
    """Ends a process between two of its instructions."""


class Process:
    """What can be stopped and killed as a whole. All that its main coroutine begins belongs to it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive, self.stopped = True, False
        self.halted = False
        """Dead or stopped: one look for each callback."""
        self.clock_error_s = 0.0
        """Its wall clock is so much fast."""
        self.slow_s = 0.0
        """Its worker threads take up to so much longer."""
        self.main: asyncio.Task[None] | None = None
        self.held: list[_Due] = []
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)

    def start(self, loop: VirtualLoop, main: Coroutine[Any, Any, None]) -> None:
        self.main = self.spawn(loop, main)

    def spawn(self, loop: VirtualLoop, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Another coroutine of this process."""
        loop.processes[self] = None
        return self.context.copy().run(loop.create_task, work)

    def kill(self) -> None:
        """Nothing of it runs any more."""
        self.alive, self.halted = False, True
        self.held.clear()

    def end(self) -> None:
        """The world ends: let go of everything that runs here. What a `finally` waits for never comes."""
        self.kill()
        self.main = None
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        while self.tasks:
            task, _ = self.tasks.popitem()
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            asyncio.tasks._unregister_task(task)
            with contextlib.suppress(BaseException):
                # In this context: what a `finally` still begins ends here as well.
                self.context.copy().run(task.get_coro().close)
        sys.unraisablehook = hook

    def stop(self) -> None:
        """Nothing of it runs until `go_on`."""
        self.stopped = self.halted = True

    def go_on(self, loop: VirtualLoop) -> None:
        """Run what came due meanwhile."""
        if self.alive and self.stopped:
            self.stopped = self.halted = False
            loop._due.extend(self.held)
            self.held = []


PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)

WORLD = contextvars.Context()
"""What no process does."""


_Due: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], contextvars.Context]


class _Timer:
    """As asyncio's handles, which ask the loop at each step whether it is being debugged."""

    __slots__ = ("args", "callback", "cancelled", "context")

    def __init__(self, callback: Callable[..., Any], args: Any, context: contextvars.Context | None) -> None:
        self.callback, self.args, self.cancelled = callback, args, False
        self.context = contextvars.copy_context() if context is None else context

    def cancel(self) -> None:
        self.callback, self.args, self.cancelled = bool, (), True

    def run(self) -> None:
        self.callback(*self.args)


class _Numbered:
    """Hashes by number instead of by address, so that sets are iterated over in the same order each time."""

    number: int

    def __hash__(self) -> int:
        return self.number


class _Future(_Numbered, asyncio.Future):  # type: ignore[type-arg]
    pass


class _Task(_Numbered, asyncio.Task):  # type: ignore[type-arg]
    pass


class VirtualLoop(VirtualTime, asyncio.BaseEventLoop):
    """Runs callbacks in the order in which they come due, each in the process in whose context it was made.

    `thread_s`: how long a job of a worker thread takes, asked for each.
    """

    def __init__(self, thread_s: Callable[[], float] = float) -> None:
        super().__init__()
        self._thread_s = thread_s
        self._due: deque[_Due] = deque()
        self._timers: list[tuple[float, int, _Timer]] = []
        self._order = itertools.count()
        self._tasks, self._futures = itertools.count(1), itertools.count(1 << 30)
        self._owner = threading.get_ident()
        self.now_s = 0.0
        self.callbacks = self._callbacks_before = 0
        self.bugs: list[str] = []
        """What no handler expected, in words."""
        self.processes: dict[Process, None] = {}
        """All that have begun something."""

    # -- running ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self) -> Iterator[VirtualLoop]:
        """Be the running loop. It is closed at the end, and all its processes end, whatever was raised: else
        their coroutines would be thrown away somewhere else, and wait there for a loop.
        """
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            yield self
        finally:
            for process in list(self.processes):
                process.end()
            asyncio._set_running_loop(before)
            self.close()

    def run(self, until: Callable[[], bool], *, limit_s: float) -> bool:
        """Run until `until` is true at an instant's end; False if not by `limit_s`, or time stands still."""
        while not until():
            if not self._run_due(limit_s):
                return False
        return True

    def _run_once(self) -> None:
        """What `run_until_complete` repeats."""
        while not self._stopping:  # type: ignore[attr-defined]
            if not self._run_due(math.inf):
                raise Deadlock(self._waiting_tasks())

    def _run_due(self, limit_s: float) -> bool:
        """Run what is due now, or else at the next timer; False if that comes after `limit_s`, or never."""
        due, timers = self._due, self._timers
        while not due:
            if not timers or timers[0][0] > limit_s:
                return False
            due_s, _, timer = heapq.heappop(timers)
            if not timer.cancelled:
                if due_s > self.now_s:
                    self.now_s, self._callbacks_before = due_s, self.callbacks
                due.append((timer.run, (), timer.context))  # it may be cancelled while its process is stopped
        while due and not self._stopping:  # type: ignore[attr-defined]
            if self.callbacks - self._callbacks_before > MAX_AT_ONCE:
                self.bugs.append(f"time stands still at {self.now_s:.3f} s")
                return False
            for _ in range(len(due)):
                callback, args, context = due.popleft()
                process = context.get(PROCESS)
                if process is not None and process.halted:
                    if process.alive:
                        process.held.append((callback, args, context))
                    continue
                self.callbacks += 1
                try:
                    context.run(callback, *args)
                except (Killed, Exception) as error:  # noqa: BLE001  a bug is told
                    self.bug("a callback failed", error)
        return True

    def bug(self, what: str, error: BaseException) -> None:
        """Note what no handler expected. A dead device is one of the faults."""
        if not isinstance(error, (Killed, torch.AcceleratorError)):
            self.bugs.append(f"{what}: {type(error).__name__}: {error}")

    def _waiting_tasks(self) -> str:
        tasks = sorted(asyncio.all_tasks(self), key=hash)
        lines = [f"at {self.now_s:.3f} s nothing is scheduled, and {len(tasks)} tasks wait for ever:"]
        for task in tasks[:MAX_SHOWN_TASKS]:
            frames = task.get_stack(limit=1)
            where = f"{frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else "?"
            lines.append(f"  {task.get_name()} in {task.get_coro().__qualname__} at {where}")  # type: ignore[union-attr]
        return "\n".join([*self.bugs, *lines])

    # -- what asyncio asks for --------------------------------------------------------------------

    get_debug = staticmethod(bool)  # False: each task and future asks

    def time(self) -> float:
        return self.now_s

    def unix_s(self) -> float:
        """By the clock of the process that asks."""
        process = PROCESS.get()
        return BEGAN_UNIX_S + self.now_s + (0.0 if process is None else process.clock_error_s)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> Any:
        if context is AT_ONCE:
            return callback(*args)
        return self._due.append((callback, args, contextvars.copy_context() if context is None else context))

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        """As `call_soon`. Another thread may not: when it came would differ from run to run."""
        if threading.get_ident() != self._owner:
            raise AssertionError(f"a thread took part in virtual time, with {callback}")
        return self.call_soon(callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> Any:
        heapq.heappush(self._timers, (when, next(self._order), timer := _Timer(callback, args, context)))
        return timer

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> Any:
        when = self.now_s + delay if delay > 0.0 else self.now_s
        # As `call_at`, of which few are made.
        heapq.heappush(self._timers, (when, next(self._order), timer := _Timer(callback, args, context)))
        return timer

    def create_future(self) -> asyncio.Future[Any]:
        future = _Future(loop=self)
        future.number = next(self._futures)
        return future

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T] | Generator[Any, None, T], **kwargs: Any
    ) -> asyncio.Task[T]:
        kwargs["name"] = kwargs.get("name") or ""  # asyncio's own counts all tasks of the process
        task = _Task.__new__(_Task)
        task.number = next(self._tasks)  # asyncio looks at it while it makes the task
        task.__init__(coro, loop=self, **kwargs)
        process = PROCESS.get()
        if process is not None:
            process.tasks[task] = None
            task.add_done_callback(process.tasks.pop, context=AT_ONCE)
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run `func(*args)` on the loop, after `thread_s()`."""
        assert executor is None, "worker threads have no place in virtual time"
        result: asyncio.Future[T] = self.create_future()

        def work() -> None:
            if result.cancelled():
                return
            try:
                value = func(*args)
            except Exception as error:  # noqa: BLE001  the task that awaits it gets it
                result.set_exception(error)
            else:
                result.set_result(value)

        self.call_later(self._thread_s(), work)
        return result

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        message, error = context.get("message", ""), context.get("exception")
        if self.get_exception_handler() is not None:
            super().call_exception_handler(context)
        elif error is not None:
            self.bug(message, error)
        elif "was destroyed but it is pending" not in message:
            self.bugs.append(message)

    def close(self) -> None:
        self._due.clear()
        self._timers.clear()
        super().close()

    def __del__(self) -> None:
        """Nothing of the outside is held: a loop that was never run need not be closed."""


def run_virtual(main: Coroutine[Any, Any, T], *, thread_s: Callable[[], float] = float) -> T:
    """The result of `main`, run in a loop of its own from virtual time 0; what it leaves is cancelled.

    Raises:
        Deadlock: `main` is not done, and nothing can happen any more.
    """
    loop = VirtualLoop(thread_s)
    try:
        return loop.run_until_complete(main)
    finally:
        left = sorted(asyncio.all_tasks(loop), key=hash)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
        loop.close()
