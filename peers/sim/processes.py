"""An asyncio loop in virtual time that runs many processes, which may stop, go on and die.

Nothing waits: when no callback is due, the clock jumps to the next timer. Each callback belongs to the
process in whose context it was made. A process that is stopped (SIGSTOP) keeps its callbacks until it goes
on; one that is dead (SIGKILL) never runs another instruction, not even a `finally`.

    loop = ProcessLoop(Dice(seed))
    with loop.running():
        process = Process("a")
        process.start(loop, main())
        loop.run(until=lambda: process.ended)

`peers.clock` asks the loop. The wall clock is that of the process that asks, which may be wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import itertools
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import torch

from peers.clock import VirtualTime
from swarm.sim.dice import Dice

BEGAN_S = 1.7e9
"""Unix time at which virtual time begins."""
THREAD_S = (0.0002, 0.003)
"""How long a job of a worker thread takes."""


MAX_AT_ONCE = 100_000
"""Callbacks at one instant. A schedule has a few thousand; more is something that calls itself for ever."""


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
        self.main: asyncio.Task[None] | None = None
        self.held: list[Handle] = []
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)

    def start(self, loop: ProcessLoop, main: Coroutine[Any, Any, None]) -> None:
        """Run `main` as this process."""
        self.main = self.spawn(loop, main)

    def spawn(self, loop: ProcessLoop, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Another coroutine of this process."""
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
            with contextlib.suppress(BaseException):
                task.get_coro().close()  # type: ignore[union-attr]
        sys.unraisablehook = hook

    def stop(self) -> None:
        """Nothing of it runs until `go_on`."""
        self.stopped = self.halted = True

    def go_on(self, loop: ProcessLoop) -> None:
        """Run what came due meanwhile."""
        if self.alive and self.stopped:
            self.stopped = self.halted = False
            held, self.held = self.held, []
            loop.again(held)


PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class Handle:
    """A callback that is due, or will be."""

    __slots__ = ("args", "callback", "cancelled_", "context", "due_s")

    def __init__(
        self, callback: Callable[..., Any], args: tuple[Any, ...], context: contextvars.Context, due_s: float
    ) -> None:
        self.callback, self.args, self.context, self.due_s = callback, args, context, due_s
        self.cancelled_ = False

    def cancel(self) -> None:
        self.cancelled_ = True

    def cancelled(self) -> bool:
        return self.cancelled_

    def when(self) -> float:
        return self.due_s


class _Task(asyncio.Task[Any]):
    """A task whose place in a set is the same in every process that replays it."""

    def __init__(self, coro: Any, *, number: int, loop: ProcessLoop) -> None:
        self.number = number  # asyncio looks at it while it makes the task
        super().__init__(coro, loop=loop, name="")

    def __hash__(self) -> int:
        return self.number


class ProcessLoop(VirtualTime, asyncio.AbstractEventLoop):
    """Runs callbacks in the order in which they come due."""

    def __init__(self, dice: Dice) -> None:
        self._dice = dice
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._order = itertools.count()
        self._numbers = itertools.count(1)
        self.now_s = 0.0
        self.callbacks = 0
        self.bugs: list[str] = []
        """What no handler expected, in words."""

    # -- running ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Be the running loop."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            yield
        finally:
            asyncio._set_running_loop(before)

    def run(self, until: Callable[[], bool], *, limit_s: float) -> bool:
        """Run until a callback made `until` true; False if not before `limit_s`, or time stands still."""
        ready, timers = self._ready, self._timers
        began = self.callbacks
        while not until():
            while not ready:
                if not timers or timers[0][0] > limit_s:
                    return False
                due_s, _, handle = heapq.heappop(timers)
                if not handle.cancelled_:
                    if due_s > self.now_s:
                        self.now_s, began = due_s, self.callbacks
                    ready.append(handle)
            if self.callbacks - began > MAX_AT_ONCE:
                self.bugs.append(f"time stands still at {self.now_s:.3f} s")
                return False
            for _ in range(len(ready)):
                handle = ready.popleft()
                if handle.cancelled_:
                    continue
                process = handle.context.get(PROCESS)
                if process is not None and process.halted:
                    if process.alive:
                        process.held.append(handle)
                    continue
                self.callbacks += 1
                try:
                    handle.context.run(handle.callback, *handle.args)
                except Killed:
                    pass
                except Exception as error:  # noqa: BLE001  a bug, which is told
                    self.bug("a callback failed", error)
        return True

    def bug(self, what: str, error: BaseException) -> None:
        """Note what no handler expected. A dead device is one of the faults."""
        if not isinstance(error, (Killed, torch.AcceleratorError)):
            self.bugs.append(f"{what}: {type(error).__name__}: {error}")

    def again(self, handles: list[Handle]) -> None:
        """Run what was held."""
        self._ready.extend(handles)

    # -- what asyncio needs -----------------------------------------------------------------------

    def time(self) -> float:
        return self.now_s

    def unix_s(self) -> float:
        """By the clock of the process that asks."""
        process = PROCESS.get()
        return BEGAN_S + self.now_s + (0.0 if process is None else process.clock_error_s)

    def call_soon(
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> Any:
        handle = Handle(callback, args, _own(context), self.now_s)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Any:
        handle = Handle(callback, args, _own(context), when)
        heapq.heappush(self._timers, (when, next(self._order), handle))
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Any:
        return self.call_at(self.now_s + max(0.0, delay), callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **_: Any) -> asyncio.Task[Any]:
        task = _Task(coro, number=next(self._numbers), loop=self)
        process = PROCESS.get()
        if process is not None:
            process.tasks[task] = None
            task.add_done_callback(process.tasks.pop, context=WORLD)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """A worker thread's job: done at one instant, a little later."""
        result = self.create_future()

        def work() -> None:
            if result.cancelled():
                return
            try:
                result.set_result(func(*args))
            except Exception as error:  # noqa: BLE001  whoever awaits it gets it
                result.set_exception(error)

        self.call_later(self._dice.between(*THREAD_S), work)
        return result

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        message, error = context.get("message", ""), context.get("exception")
        if error is not None:
            self.bug(message, error)
        elif "was destroyed but it is pending" not in message:
            self.bugs.append(message)


def _own(context: contextvars.Context | None) -> contextvars.Context:
    return contextvars.copy_context() if context is None else context


WORLD = contextvars.Context()
"""What no process does."""
