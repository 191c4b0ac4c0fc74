"""Disks of simulated machines: real folders, which may be full or cut the file that is being written.

The shipped code writes them. What a real disk would let slip into a timeline, names of temporary folders and
the space that is free, is made up here, so that a seed replays exactly.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO
from unittest.mock import patch

import msgspec

from peers.sim.loop import PROCESS, Killed
from peers.storage import atomic_file
from peers.system import private_folder

MEMORY = Path("/dev/shm")
SIZE_BYTES = 1 << 40
"""Of each disk."""


class Tear(msgspec.Struct, frozen=True):
    """What becomes of a file: its process dies while it is written."""

    kept: float
    """The share of its bytes that reach the disk."""
    renamed: bool
    """Its name does as well."""
    kill: Callable[[], None]


class Disk(msgspec.Struct, eq=False):
    """One disk, of one machine or shared by several."""

    folder: Path
    full: bool = False
    tear: Tear | None = None
    """Of the next file."""


class Disks:
    """All disks of a world, which vanish with it."""

    def __init__(self) -> None:
        where = MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        with _signals_held():
            self.root, lock = private_folder(where, "swarm-sim-")
            # A program may be stopped when it has made a world, and before it plays that.
            self._vanish = weakref.finalize(self, _vanish, self.root, lock)
        self.all: list[Disk] = []
        self._of: dict[str, Disk] = {}
        """By the name of a process."""
        self._commit = atomic_file.commit

    def add(self) -> Disk:
        disk = Disk(self.root / f"disk{len(self.all)}")
        self.all.append(disk)
        return disk

    def mount(self, process: str, disk: Disk) -> None:
        """What the process writes goes there."""
        self._of[process] = disk

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Have the shipped code write to these disks."""
        usage = patch.object(shutil, "disk_usage", self._usage)
        try:
            with patch.object(atomic_file, "commit", self._write), usage:
                yield
        finally:
            with _signals_held():
                self._vanish()

    def _usage(self, path: Path) -> SimpleNamespace:
        full = any(disk.full and path.is_relative_to(disk.folder) for disk in self.all)
        return SimpleNamespace(free=0 if full else SIZE_BYTES)

    def _write(self, file: BinaryIO, temporary: Path, final: Path) -> None:
        """In place of `atomic_file.commit`: the file is written, and gets its name now."""
        process = PROCESS.get()
        disk = self._of[process.name] if process else Disk(final)
        if disk.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        tear, disk.tear = disk.tear, None
        if tear is None:
            self._commit(file, temporary, final)
            return
        os.truncate(temporary, int(tear.kept * os.fstat(file.fileno()).st_size))
        if tear.renamed:
            self._commit(file, temporary, final)
        else:
            os.link(temporary, f"{temporary}-torn")  # a dead process removes nothing
        tear.kill()
        raise Killed


@contextmanager
def _signals_held() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait for the end of the block. A mask would hold them from one thread only."""
    came, numbers = list[int](), (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.signal(number, lambda number, _: came.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)


def _vanish(root: Path, lock: int) -> None:
    shutil.rmtree(root)
    os.close(lock)
