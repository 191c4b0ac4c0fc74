"""The saved versions of one stage that this peer can give out, or go back to, and how new ones are written.

    tensors = await device.run(...)      # a copy of the state, taken between two jobs of the device
    writer.save(version, tensors)        # returns at once; hashing and writing are a thread's work

At most two copies of the state are in memory: docs/design.md, *Checkpoints and keepers*.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from peers import events
from peers.storage import checkpoint
from peers.storage.safetensors_file import unheard
from peers.waiting import happens, in_daemon_thread
from swarm.errors import SetupError
from swarm.ids import Stage
from swarm.manifest import Run
from swarm.wire.trails import Word

AGAIN_S = 60.0
"""Until the last version is tried again, if it could not be saved."""
CLOSE_S = 20.0
"""For what is being written when its peer leaves: a cloud gives 30 s from the notice to the end."""


class CheckpointStore:
    """Checkpoints on this peer's disk, if it has a folder, and those that it keeps in memory.

    Called from worker threads: reading gigabytes takes seconds.
    """

    def __init__(
        self, run: Run, stage: Stage, folder: Path | None, *, tell: checkpoint.Tell = unheard
    ) -> None:
        """`tell`: told once, from the worker thread, of each damaged file that is passed over."""
        self._run, self._stage, self._folder, self._tell = run, stage, folder, tell
        self._told: set[str] = set()
        self.pinned: dict[int, Mapping[str, torch.Tensor]] = {}
        """What it keeps in memory, by version."""

    @property
    def on_disk(self) -> bool:
        """Whether checkpoints go to a folder; else the newest is to be pinned."""
        return self._folder is not None

    def damaged(self, text: str) -> None:
        """Say once what is wrong with a file."""
        if text not in self._told:
            self._told.add(text)
            self._tell(text)

    def pin(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep this version in memory instead of those before: a whole copy of weights and optimizer.

        What islands have in common stays beside what they have not, since one that is lost begins there.
        """
        common = () if self._run.is_common(version) else filter(self._run.is_common, self.pinned)
        self.pinned = {old: self.pinned[old] for old in common} | {version: tensors}

    def versions(self) -> list[int]:
        """Ascending. Those on the disk were read and fit their digests."""
        found = set(self.pinned)
        if self._folder is not None:
            found.update(checkpoint.saved_steps(self._folder, self._run, self._stage, tell=self.damaged))
        return sorted(found)

    def signed(self, version: int) -> tuple[Word, ...]:
        folder = self._folder
        return checkpoint.Checkpoint(folder, self._run, self._stage, version).signed if folder else ()

    def load(self, version: int) -> Mapping[str, torch.Tensor]:
        """The tensors of one version; not to be written to. Raises SetupError: it is not here, or damaged."""
        if version in self.pinned:
            return self.pinned[version]
        if self._folder is None:
            raise SetupError(f"version {version} of stage {self._stage} is not here")
        return checkpoint.Checkpoint(self._folder, self._run, self._stage, version).load()


class CheckpointWriter:
    """Saves versions of one stage in one folder. Its methods are for the event loop's thread."""

    def __init__(self, folder: Path, run: Run, stage: Stage, *, keep: int, emit: events.Emit) -> None:
        """`emit` hears of each version that was saved, could not be, or was skipped."""
        self._folder, self._run, self._stage, self._keep, self._emit = folder, run, stage, keep, emit
        self._waiting: tuple[int, dict[str, torch.Tensor]] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._closing, self.again_s = asyncio.Event(), AGAIN_S

    def save(self, version: int, tensors: dict[str, torch.Tensor]) -> None:
        """Have `tensors` written as soon as the disk is free. They must not change any more."""
        skipped, self._waiting = self._waiting, (version, tensors)
        if skipped is not None:
            text = f"no checkpoint of version {skipped[0]}: the disk is slow, and version {version} is newer"
            self._emit(events.Note(text=text))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write_waiting())

    async def close(self, limit_s: float = CLOSE_S) -> bool:
        """Wait for what is being written and what waits; False if that took longer than `limit_s`.

        What is left unwritten leaves a temporary file at most, never half a checkpoint.
        """
        self._closing.set()
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=max(0.0, limit_s))
        return self._writing is None or self._writing.done()

    async def _write_waiting(self) -> None:
        while self._waiting is not None:
            version, tensors = self._waiting
            self._waiting = None
            name = f"checkpoints of stage {self._stage}"
            event = await in_daemon_thread(partial(self._write, version, tensors), name=name)
            self._emit(event)
            failed, is_last = isinstance(event, events.Trouble), version == self._run.steps
            if failed and is_last and not self._closing.is_set():
                # The end of the run may be on no other disk. Once more when this peer leaves.
                await happens(self._closing, self.again_s)
                self._waiting = self._waiting or (version, tensors)
            del tensors  # a copy of the state: not to be held while the next one is

    def _write(self, version: int, tensors: dict[str, torch.Tensor]) -> events.Event:
        """In a thread."""
        try:
            checkpoint.Checkpoint(self._folder, self._run, self._stage, version).save(
                tensors, keep=self._keep
            )
        except SetupError as error:
            return events.Trouble(text=f"no checkpoint of version {version}: {error.text}")
        return events.Checkpointed(stage=self._stage, step=version, path=str(self._folder))
