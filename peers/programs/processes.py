"""Roles as child processes of this one: started, heard, ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from peers.waiting import within

STOP_S = 5.0
"""How long a child gets to leave before it is killed."""
MAX_LINE = 1 << 20


class Child:
    """One role in a process of its own. It dies with this process, whatever happens to it."""

    def __init__(self, process: asyncio.subprocess.Process, hear: Callable[[Child, str], None]) -> None:
        self._process, self._hear = process, hear
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def spawn(
        cls, arguments: Sequence[str], hear: Callable[[Child, str], None], *, stdin: bytes = b"",
        stderr: int | None = None, environment: Mapping[str, str] | None = None,
    ) -> Child:  # fmt: skip
        """Start `swarm ARGUMENTS`; `hear` is called with each line of its output."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "peers", *arguments, "--die-with-parent", str(os.getpid()),
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr,
            limit=MAX_LINE,
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

    def signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # `send_signal` may take the exit code of one that has just died: asyncio says 255 then.
                os.kill(self.pid, number)

    async def wait(self) -> int:
        """Its exit code, once it has ended and everything that it said was heard."""
        await self._process.wait()
        await self._reader
        return self._process.returncode or 0

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL if it takes too long."""
        self.signal(signal.SIGTERM)
        try:
            await within(self._process.wait(), STOP_S)
        except asyncio.TimeoutError:
            self.signal(signal.SIGKILL)
            await self._process.wait()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # longer than `MAX_LINE`: what is left of it is read as the next one
                continue
            if not line:
                return
            self._hear(self, line.decode(errors="replace").rstrip("\n"))


async def stop_all(children: Sequence[Child]) -> None:
    """End all of them, together; none is left, also if this is cancelled."""
    try:
        await asyncio.gather(*(child.stop() for child in children), return_exceptions=True)
    finally:
        for child in children:
            child.signal(signal.SIGKILL)
