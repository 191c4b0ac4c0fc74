"""Processes of a loop in virtual time, which may stop, go on and die.

Each callback belongs to the process in whose context it was made. A process that is stopped (SIGSTOP)
keeps its callbacks until it goes on; one that is dead (SIGKILL) never runs another instruction, not even a
`finally`.
The wall clock that `peers.clock` tells is that of the process that asks, which may be wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import sys
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peers.sim.loop import Handle, VirtualLoop


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
        self.held: list[Handle] = []
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)

    def start(self, loop: VirtualLoop, main: Coroutine[Any, Any, None]) -> None:
        """Run `main` as this process."""
        self.main = self.spawn(loop, main)

    def spawn(self, loop: VirtualLoop, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
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
            asyncio.tasks._unregister_task(task)
            with contextlib.suppress(BaseException):
                # In this context: what a `finally` still begins ends here as well.
                self.context.copy().run(task.get_coro().close)  # type: ignore[union-attr]
        sys.unraisablehook = hook

    def stop(self) -> None:
        """Nothing of it runs until `go_on`."""
        self.stopped = self.halted = True

    def go_on(self, loop: VirtualLoop) -> None:
        """Run what came due meanwhile."""
        if self.alive and self.stopped:
            self.stopped = self.halted = False
            held, self.held = self.held, []
            loop.again(held)


PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


WORLD = contextvars.Context()
"""What no process does."""
