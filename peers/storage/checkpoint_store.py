"""The saved versions of one stage that this peer can give out, or go back to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from peers.storage import checkpoint
from swarm.errors import SetupError
from swarm.ids import Stage
from swarm.manifest import Run


class CheckpointStore:
    """Checkpoints on this peer's disk, if it has a folder, and the one that it keeps in memory.

    Called from worker threads: reading gigabytes takes seconds.
    """

    def __init__(
        self, run: Run, stage: Stage, folder: Path | None, *, tell: checkpoint.Tell = checkpoint.unheard_of
    ) -> None:
        """`tell`: told once, from the worker thread, of each damaged file that is passed over."""
        self._run, self._stage, self._folder, self._tell = run, stage, folder, tell
        self._told: set[str] = set()
        self._pinned: tuple[int, Mapping[str, torch.Tensor]] | None = None

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
        """Keep this version in memory instead of the one before: a whole copy of weights and optimizer."""
        self._pinned = version, tensors

    def versions(self) -> list[int]:
        """Ascending. Those on the disk were read and fit their digests."""
        found: set[int] = set()
        if self._folder is not None:
            found.update(checkpoint.saved_steps(self._folder, self._run, self._stage, tell=self.damaged))
        if self._pinned is not None:
            found.add(self._pinned[0])
        return sorted(found)

    def load(self, version: int) -> Mapping[str, torch.Tensor]:
        """The tensors of one version; not to be written to.

        Raises:
            SetupError: it is not here, or damaged.
        """
        if self._pinned is not None and self._pinned[0] == version:
            return self._pinned[1]
        if self._folder is None:
            raise SetupError(f"version {version} of stage {self._stage} is not here")
        return checkpoint.Checkpoint(self._folder, self._run, self._stage, version).load()
