"""An event loop in virtual time: it moves its clock instead of waiting.

    run_virtual(main())     # its result; raises Deadlock if nothing can happen any more

The same program does the same things in the same order each time it is run, if it asks `peers.clock` for the
time, draws chance from seeded generators and iterates over no set of strings (or PYTHONHASHSEED is set). What
asyncio itself leaves to addresses, the order of tasks and futures in sets, follows their numbers here.

Nothing of the outside takes part: no sockets, and no threads. What the protocol gives to worker threads
(`asyncio.to_thread`) runs on the loop, between two events, and takes `thread_s` of virtual time.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Callable, Coroutine, Generator, Mapping
from concurrent.futures import Executor
from itertools import count
from typing import Any, TypeVar

from peers.clock import VirtualTime

T = TypeVar("T")

BEGAN_UNIX_S = 1.7e9
"""Unix time at which virtual time begins."""
MAX_SHOWN_TASKS = 20


class Deadlock(Exception):
    """Nothing is scheduled and nothing can wake any task. The text says where tasks wait."""


class VirtualLoop(VirtualTime, asyncio.SelectorEventLoop):
    """One world's loop. `thread_s`: virtual time that work of a worker thread takes."""

    def __init__(self, *, thread_s: float = 0.0) -> None:
        self._selector_of_nothing = _Clockwork(self)
        super().__init__(self._selector_of_nothing)
        self._now_s = 0.0
        self._thread_s = thread_s
        self._owner = threading.get_ident()
        self._numbers = count()
        self.set_task_factory(self._task)

    # -- time -------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._now_s

    def unix_s(self) -> float:
        return BEGAN_UNIX_S + self._now_s

    def advance(self, wait_s: float | None) -> None:
        """Called when no callback is ready: go to the next timer, which is due in `wait_s`."""
        if wait_s is None:
            raise Deadlock(self._waiting_tasks())
        self._now_s += max(0.0, wait_s)

    def _waiting_tasks(self) -> str:
        tasks = sorted(asyncio.all_tasks(self), key=hash)
        lines = [f"at {self._now_s:.3f} s nothing is scheduled, and {len(tasks)} tasks wait for ever:"]
        for task in tasks[:MAX_SHOWN_TASKS]:
            frames = task.get_stack(limit=1)
            where = f"{frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else "?"
            lines.append(f"  {task.get_name()} in {task.get_coro().__qualname__} at {where}")  # type: ignore[union-attr]
        return "\n".join(lines)

    # -- order ------------------------------------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self, number=next(self._numbers))

    @staticmethod
    def _task(
        loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, T] | Generator[Any, None, T], **kwargs: Any
    ) -> asyncio.Task[T]:
        assert isinstance(loop, VirtualLoop)
        return _Task(coro, loop=loop, number=next(loop._numbers), **kwargs)

    # -- threads ----------------------------------------------------------------------------------

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run `func(*args)` on the loop, after `thread_s`."""
        assert executor is None, "worker threads have no place in virtual time"
        result: asyncio.Future[T] = self.create_future()

        def work() -> None:
            if result.cancelled():
                return
            try:
                value = func(*args)
            except Exception as error:  # noqa: BLE001  whoever awaits it gets it
                result.set_exception(error)
            else:
                result.set_result(value)

        self.call_later(self._thread_s, work)
        return result

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        """As `call_soon`. Another thread may not: when it came would differ from run to run."""
        if threading.get_ident() != self._owner:
            raise AssertionError(f"a thread took part in virtual time, with {callback}")
        return self.call_soon(callback, *args, context=context)


class _Numbered:
    """Hashes by number instead of by address, so that sets are iterated over in the same order each time."""

    def __init__(self, *args: Any, number: int, **kwargs: Any) -> None:
        self._number = number
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


class _Future(_Numbered, asyncio.Future):  # type: ignore[type-arg]
    pass


class _Task(_Numbered, asyncio.Task):  # type: ignore[type-arg]
    pass


class _Clockwork(selectors.BaseSelector):
    """Watches no files: where a loop would wait for them, it moves the clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._keys: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        if self._keys:  # the first one is the loop's own, by which other threads would wake it
            raise AssertionError("virtual time has no sockets")
        key = self._keys[number] = selectors.SelectorKey(fileobj, number, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj if isinstance(fileobj, int) else fileobj.fileno())

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout != 0:
            self._loop.advance(timeout)
        return []


def run_virtual(main: Coroutine[Any, Any, T], *, thread_s: float = 0.0) -> T:
    """The result of `main`, run in a loop of its own from virtual time 0.

    Raises:
        Deadlock: `main` is not done, and nothing can happen any more.
    """
    loop = VirtualLoop(thread_s=thread_s)
    try:
        return loop.run_until_complete(main)
    finally:
        _close(loop)


def _close(loop: VirtualLoop) -> None:
    """Cancel what is left and close the loop; what ends badly is of no interest any more."""
    left = sorted(asyncio.all_tasks(loop), key=hash)
    for task in left:
        task.cancel()
    try:
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
