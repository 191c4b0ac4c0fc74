"""An event loop in a thread of its own, so that a notebook, whose own loop runs already, can wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

INTERRUPTED_S = 0.5
"""An interrupt is noticed within this time."""


class Background:
    """The loop; what runs in it is not held up by what the caller computes.

    The thread lives as long as this: the kernel ends child processes with the thread that started them.
    """

    def __init__(self) -> None:
        here: Future[None] = Future()

        async def main() -> None:
            self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
            here.set_result(None)
            await self._ending.wait()

        self._thread = threading.Thread(target=lambda: asyncio.run(main()), name="swarm", daemon=True)
        self._thread.start()
        here.result()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result; if the caller is interrupted, the work is cancelled.

        An interrupt comes between any two lines of Python, also where those of a `Future` have just taken its
        lock: it would be held for ever, and the loop stand still. So the result comes by a queue in C.
        """
        told: SimpleQueue[Future[T]] = SimpleQueue()

        async def run() -> None:
            found: Future[T] = Future()
            try:
                found.set_result(await work)
            except BaseException as error:
                found.set_exception(error)
                raise
            finally:
                told.put(found)

        future = self.start(run())
        try:
            while True:
                # An interrupt that comes just before a wait in C does not end that: so each is short.
                with contextlib.suppress(Empty):
                    found = told.get(timeout=INTERRUPTED_S)
                    break
            return found.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what still runs, and end the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join()
