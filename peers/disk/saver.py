"""Checkpoints written beside the training: a slow or full disk delays no step.

    tensors = await device.run(...)      # a copy of the state, taken between two jobs of the device
    saver.save(version, tensors)         # returns at once; hashing and writing are a thread's work

One checkpoint is written at a time. While it is, the newest other one waits, and takes the place of one that
waited before it: so at most two copies of the state are in memory, however slow the disk is.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from peers import events
from peers.disk import checkpoint
from peers.waiting import happens
from swarm.errors import SetupError
from swarm.ids import Stage
from swarm.run import Run

CLOSE_S = 20.0
"""For what is being written when its peer leaves: a cloud gives 30 s from the notice to the end."""


class Saver:
    """Saves versions of one stage in one folder. Its methods are for the event loop's thread."""

    def __init__(
        self, folder: Path, run: Run, stage: Stage, *, keep: int, emit: Callable[[events.Event], None]
    ) -> None:
        """`emit` hears of each version that was saved, could not be, or was skipped."""
        self._folder, self._run, self._stage, self._keep, self._emit = folder, run, stage, keep, emit
        self._lock = threading.Lock()
        self._waiting: tuple[int, dict[str, torch.Tensor]] | None = None
        self._writing = False
        self._idle = asyncio.Event()
        self._idle.set()

    def save(self, version: int, tensors: dict[str, torch.Tensor]) -> None:
        """Have `tensors` written as soon as the disk is free. They must not change any more."""
        with self._lock:
            skipped, self._waiting = self._waiting, (version, tensors)
            busy, self._writing = self._writing, True
        if skipped is not None:
            text = f"no checkpoint of version {skipped[0]}: the disk is slow, and version {version} is newer"
            self._emit(events.Note(text=text))
        if not busy:
            self._idle.clear()
            # Not of the pool that `asyncio.run` waits for: a disk that hangs must not keep a process alive.
            name = f"checkpoints of stage {self._stage}"
            loop = asyncio.get_running_loop()
            threading.Thread(target=self._write_waiting, args=(loop,), name=name, daemon=True).start()

    async def close(self, limit_s: float = CLOSE_S) -> bool:
        """Wait for what is being written and what waits; False if that took longer than `limit_s`.

        What is left unwritten leaves a temporary file at most, never half a checkpoint.
        """
        return await happens(self._idle, limit_s)

    # -- in the thread ----------------------------------------------------------------------------

    def _write_waiting(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while (wanted := self._next()) is not None:
                event = self._write(*wanted)
                del wanted  # a copy of the state: not to be held while the next one is
                _tell(loop, self._emit, event)
        except BaseException:
            with self._lock:
                self._writing = False
            raise
        finally:
            _tell(loop, self._rest)

    def _next(self) -> tuple[int, dict[str, torch.Tensor]] | None:
        """What to write now; None: nothing, and this thread ends."""
        with self._lock:
            wanted, self._waiting = self._waiting, None
            self._writing = wanted is not None
            return wanted

    def _write(self, version: int, tensors: dict[str, torch.Tensor]) -> events.Event:
        try:
            checkpoint.save(self._folder, self._run, self._stage, version, tensors, {}, keep=self._keep)
        except SetupError as error:
            return events.Trouble(text=f"no checkpoint of version {version}: {error.text}")
        return events.Checkpointed(stage=self._stage, step=version, path=str(self._folder))

    # -- in the loop ------------------------------------------------------------------------------

    def _rest(self) -> None:
        if not self._writing:  # else it was given more since
            self._idle.set()


def _tell(loop: asyncio.AbstractEventLoop, what: Callable[..., None], *words: object) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
        loop.call_soon_threadsafe(what, *words)
