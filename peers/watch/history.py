"""Observations on disk, a line of JSON each, to be played again: the same pictures come of them.

The first line is `{"manifest": …, "format": 1}`, the terms of the run; every other one an `Observation`. A
full file becomes `FILE.1`, in the place of an older one, and a new file begins with the peers of that moment:
either can be played.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from swarm.errors import Refused, SetupError
from swarm.ids import PeerId
from swarm.manifest import Run, parse_run
from swarm.monitoring import validation
from swarm.monitoring.health import Observation
from swarm.records import PeerRecord

MAX_LINE_BYTES = 64 << 20
"""An observation of 10 000 peers with 64 links each."""
MAX_BYTES = 1 << 30
"""Of a file: three days of six peers (3.6 kB/s, measured), ten hours of 500 (30 kB/s, reckoned)."""


FORMAT = 1
"""Of what this version writes, and the only one that it reads."""


class _Head(msgspec.Struct):
    manifest: str
    format: int = FORMAT


class Recorder:
    """Appends observations to a file. Use with `with`."""

    def __init__(self, path: Path, run: Run, *, most_bytes: int = MAX_BYTES) -> None:
        """A file that is there already is continued, if it is of the same run. `most_bytes`: of one file.

        Raises:
            SetupError: it is not, it cannot be written, or another program writes it.
        """
        self._path, self._most_bytes = path, most_bytes
        self._head = msgspec.json.encode(_Head(run.to_toml()))
        self._records: dict[PeerId, PeerRecord] = {}
        """The records of now: a file begins with them."""
        self._refused: dict[str, int] | None = None
        self._voice: dict[PeerId, int] | None = None
        try:
            if path.exists() and path.stat().st_size:
                known, _ = read(path)
                if known.id != run.id:
                    raise SetupError(
                        f"{path} holds the history of run {known.id}, not of {run.id}: record to another file"
                    )
            self._file = _mine(path)
            if path.stat().st_size:
                _mend(path)
            if not path.stat().st_size:
                self._write(self._head)
        except OSError as error:
            raise SetupError(f"cannot record to {path}: {error.strerror or error}") from None

    def __call__(self, observation: Observation) -> None:
        """Write it, unless nothing was new.

        Raises:
            SetupError: it cannot be written, such as to a full disk.
        """
        if observation != Observation(at=observation.at):
            line = msgspec.json.encode(observation)
            if self._file.tell() + len(line) > self._most_bytes:
                self._begin_anew(observation.at)
            self._write(line)
        self._records.update((record.peer, record) for record in observation.records)
        for peer in observation.gone:
            self._records.pop(peer, None)
        self._refused = observation.refused if observation.refused is not None else self._refused
        self._voice = observation.voice if observation.voice is not None else self._voice

    def _begin_anew(self, at: float) -> None:
        try:
            self._file.close()
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
            self._file = _mine(self._path)
        except OSError as error:
            raise SetupError(f"cannot record to {self._path}: {error.strerror or error}") from None
        self._write(self._head)
        there = Observation(
            at=at, records=tuple(self._records.values()), refused=self._refused, voice=self._voice
        )
        self._write(msgspec.json.encode(there))

    def _write(self, line: bytes) -> None:
        try:
            self._file.write(line + b"\n")
            self._file.flush()
        except OSError as error:
            self.__exit__()
            raise SetupError(f"cannot record to {self._path}: {error.strerror or error}") from None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # what could not be written was said
            self._file.close()


def _mine(path: Path) -> BinaryIO:
    """The file to append to, locked while it is open: two writers would tear each other's lines."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise SetupError(
            f"{path} is being recorded to by another dashboard: record to another file, or stop that one"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.ENOLCK):  # some network disks have no locks
            file.close()
            raise
    return file


def _mend(path: Path) -> None:
    """Cut off a last line that was not written to its end."""
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        while size and file.seek(size - 1) is not None and file.read(1) != b"\n":
            size -= 1
        file.truncate(size)


def read(path: Path) -> tuple[Run, Iterator[Observation]]:
    """The run of a history, and its observations in their order, read as they are asked for.

    All that it says can be shown: a stranger may have written it.

    Raises:
        SetupError: it cannot be read, is no history, or another version's; while iterating, too, with the
            line's number. A last line that was not written to its end is left out.
    """
    try:
        with path.open("rb") as file:
            first = file.readline(MAX_LINE_BYTES)
    except OSError as error:
        raise SetupError(f"cannot read {path}: {error.strerror or error}") from None
    try:
        head = msgspec.json.decode(first, type=_Head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise SetupError(
            f"{path} is no history that --record wrote: its first line holds no manifest"
        ) from None
    if head.format != FORMAT:
        raise SetupError(
            f"{path} was recorded by another version of swarm, in format {head.format}; this one plays "
            f"format {FORMAT}: play it with the version that recorded it"
        )
    try:
        run = parse_run(head.manifest)
    except SetupError as error:
        raise SetupError(
            f"{path} cannot be played, perhaps since another version of swarm recorded it: {error.text}"
        ) from None

    def observations() -> Iterator[Observation]:
        with path.open("rb") as file:
            file.readline(MAX_LINE_BYTES)
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), start=2):
                if not line.endswith(b"\n"):
                    if len(line) < MAX_LINE_BYTES:
                        return
                    most = f"{MAX_LINE_BYTES >> 20} MiB"
                    raise SetupError(f"{path}, line {number} is no observation: it is longer than {most}")
                try:
                    observation = validation.tidy_observation(
                        msgspec.json.decode(line, type=Observation), run
                    )
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, Refused) as error:
                    raise SetupError(f"{path}, line {number} is no observation: {error}") from None
                yield observation

    return run, observations()
