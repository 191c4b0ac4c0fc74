"""Roles as child processes of this one: started, heard, ended. For the demo, tests and benchmarks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence

from peers.events import Event, parse_event
from peers.waiting import within

STOP_S = 5.0
"""How long a child gets to leave before it is killed."""
LAST_LINES = 20


class Child:
    """One role in a process of its own. It dies with this process, whatever happens to it."""

    def __init__(self, process: asyncio.subprocess.Process, hear: Callable[[Child, Event], None]) -> None:
        self._process, self._hear = process, hear
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        """What it printed last that was no event: tracebacks and the like."""
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def spawn(
        cls,
        arguments: Sequence[str],
        hear: Callable[[Child, Event], None],
        *,
        stdin: bytes = b"",
        environment: dict[str, str] | None = None,
    ) -> Child:
        """Start `swarm ARGUMENTS`; `hear` is called with each of its events."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "peers", *arguments, "--log-format", "json",
            "--die-with-parent", str(os.getpid()),
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            limit=1 << 20,
            # A terminal's Ctrl-C is for the parent, which then ends its children in order.
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
        child = cls(process, hear)
        if stdin and process.stdin is not None:
            process.stdin.write(stdin)
            await process.stdin.drain()
            process.stdin.close()
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._process.returncode

    def kill(self) -> None:
        """SIGKILL."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def wait(self) -> int:
        """Its exit code, once it has ended and everything that it said was heard."""
        await self._process.wait()
        await self._reader
        return self._process.returncode or 0

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL if it takes too long."""
        self._signal(signal.SIGTERM)
        try:
            await within(self._process.wait(), STOP_S)
        except asyncio.TimeoutError:
            self.kill()
            await self._process.wait()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            text = line.decode(errors="replace").rstrip()
            event = parse_event(text)
            if event is None:
                self.last_lines.append(text)
            else:
                self._hear(self, event)


async def stop_all(children: Sequence[Child]) -> None:
    """End all of them, together; none is left, also if this is cancelled."""
    try:
        await asyncio.gather(*(child.stop() for child in children), return_exceptions=True)
    finally:
        for child in children:
            child.kill()
