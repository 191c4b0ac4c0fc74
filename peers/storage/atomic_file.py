"""Files that are either whole or not there.

A file is written under a temporary name in the folder where it will be, locked while it grows, flushed to
the disk and renamed. A process that is killed half-way leaves only the temporary file, which has no lock any
more: the next writer in that folder removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError

from swarm.errors import SetupError

TEMPORARY = ".writing-"
"""How the names of temporary files start."""

ABANDONED_AFTER_S = 60.0
"""A writer takes its lock microseconds after it makes the file; a minute also covers a suspended one."""

CHUNK_BYTES = 1 << 20
"""One read or write: large enough that Python costs nothing, small enough to stay in the cache."""


def unlink(*paths: Path) -> None:
    """Remove files, where that can be: others may have, and what cannot be removed does no harm."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """A new file in `folder`, open for reading and writing, and its temporary path.

    Rename it with `commit` inside the block. On leaving the block without, for any reason, it is removed.
    """
    sweep(folder)
    handle, name = tempfile.mkstemp(prefix=TEMPORARY, dir=folder)
    path = Path(name)
    try:
        with os.fdopen(handle, "w+b", buffering=0) as file:
            # A filesystem without locks only loses the sweeping of its leftovers.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file, path
    finally:
        unlink(path)


@contextlib.contextmanager
def new_folder(parent: Path) -> Iterator[Path]:
    """A folder in `parent`, removed unless it is renamed; beside a file that lives as long as the writer."""
    with replacing(parent) as (_, lock):
        folder = lock.with_suffix(".folder")
        try:
            folder.mkdir(mode=0o700)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def commit(file: BinaryIO, temporary: Path, final: Path) -> None:
    """Flush `file` to the disk and give it its final name, replacing what had it."""
    os.fsync(file.fileno())
    temporary.chmod(0o644)  # mkstemp makes it private; what we write is public anyway
    temporary.replace(final)
    sync_folder(final.parent)


@contextlib.contextmanager
def writing(final: Path) -> Iterator[BinaryIO]:
    """A file to write to, which gets its final name when the block ends without an error."""
    with replacing(final.parent) as (file, temporary):
        yield file
        commit(file, temporary, final)


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut, where the filesystem can."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # network filesystems refuse this; the rename is still atomic
            os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(final: Path, data: bytes) -> None:
    with writing(final) as file:
        write_all(file, data)


def write_all(file: BinaryIO, data: bytes | bytearray | memoryview) -> None:
    """Write all of `data` to an unbuffered file, which may take it in pieces."""
    left = memoryview(data)
    while len(left):
        left = left[file.write(left[:CHUNK_BYTES]) :]


def sweep(folder: Path) -> None:
    """Remove temporary files and folders whose writers are gone."""
    with contextlib.suppress(OSError):  # others may remove the folder meanwhile
        for path in sorted(folder.glob(TEMPORARY + "*")):
            with contextlib.suppress(OSError), path.open("rb") as file:
                if time.time() - os.fstat(file.fileno()).st_mtime > ABANDONED_AFTER_S:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its writer lives
                    path.unlink()
            if path.suffix == ".folder" and not path.with_suffix("").exists():
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def as_setup_error(what: str, then: str = "", *, folder: Path | None = None) -> Iterator[None]:
    """Turn an OSError of the block, or what safetensors raises in its place, into a SetupError, which says
    what cannot be done, why, and what to do `then`; where the block writes to a `folder`, as `trouble` does.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        if folder is not None:
            raise trouble(what, folder, _of_system(error), then) from None
        raise SetupError(f"{what}: {_of_system(error).strerror or error}{then}") from None


def _of_system(error: OSError | SafetensorError) -> OSError:
    """The error of the system, of which safetensors has the number in its text."""
    if isinstance(error, OSError):
        return error
    number = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error))


def trouble(what: str, folder: Path, error: OSError, remedy: str) -> SetupError:
    """The error for a write that failed: what, where, why, and what to do about it.

    Args:
        what: what could not be done, such as "cannot write the checkpoint".
        remedy: how to choose another folder, such as "set SWARM_CACHE to another folder".
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = ""
        with contextlib.suppress(OSError):
            free = f" ({shutil.disk_usage(folder).free / 2**20:.0f} MiB are free)"
        return SetupError(f"{what} in {folder}: the disk is full{free}. Make room or {remedy}")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return SetupError(f"{what} in {folder}: it is not writable ({error.strerror}). Allow it or {remedy}")
    return SetupError(f"{what} in {folder}: {error.strerror or error}. Repair that or {remedy}")
