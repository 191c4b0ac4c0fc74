"""Observations on disk, a line of JSON each, to be played again: the same pictures come of them.

The first line is `{"manifest": …, "format": 1}`, the terms of the run; every other one an `Observation`. A
full file becomes `FILE.1`, in the place of an older one, and a new file begins with the peers of that moment:
either can be played.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from peers.storage.atomic_file import as_setup_error
from swarm.errors import MALFORMED, Refused, SetupError
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
            SetupError: it is not, or it cannot be written.
        """
        self._path, self._most_bytes = path, most_bytes
        self._head = msgspec.json.encode(_Head(run.to_toml()))
        self._records: dict[PeerId, PeerRecord] = {}
        """The records of now: a file begins with them."""
        self._refused: dict[str, int] | None = None
        self._voice: dict[PeerId, int] | None = None
        there = path.is_file() and path.stat().st_size > 0
        if there and (known := read(path)[0]).id != run.id:
            raise SetupError(
                f"{path} holds the history of run {known.id}, not of {run.id}: record to another file"
            )
        self._open()
        self._write(b"" if there else self._head)  # ends a last line that was not written to its end

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
        self._file.close()
        self._open(old=self._path.with_name(f"{self._path.name}.1"))
        self._write(self._head)
        there = Observation(
            at=at, records=tuple(self._records.values()), refused=self._refused, voice=self._voice
        )
        self._write(msgspec.json.encode(there))

    def _open(self, *, old: Path | None = None) -> None:
        with as_setup_error(f"cannot record to {self._path}"):
            if old is not None:
                self._path.replace(old)
            self._file = self._path.open("ab")

    def _write(self, line: bytes) -> None:
        try:
            with as_setup_error(f"cannot record to {self._path}"):
                self._file.write(line + b"\n")
                self._file.flush()
        except SetupError:
            self.__exit__()
            raise

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # what could not be written was said
            self._file.close()


def read(path: Path) -> tuple[Run, Iterator[Observation]]:
    """The run of a history, and its observations in their order, read as they are asked for.

    All that it says can be shown: a stranger may have written it. Lines without an observation are left out.

    Raises:
        SetupError: it cannot be read, is no history, or another version's.
    """
    with as_setup_error(f"cannot read {path}"), path.open("rb") as file:
        first = file.readline(MAX_LINE_BYTES)
    try:
        head = msgspec.json.decode(first, type=_Head)
    except MALFORMED:
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
        there, begins = set[PeerId](), False
        with path.open("rb") as file:
            file.readline(MAX_LINE_BYTES)
            for line in iter(lambda: file.readline(MAX_LINE_BYTES), b""):
                try:
                    one = validation.tidy_observation(msgspec.json.decode(line, type=Observation), run)
                except (*MALFORMED, Refused):
                    begins = True  # empty, or torn: a recorder began again, with all that were there then
                    continue
                seen = {record.peer for record in one.records}
                if begins and seen:
                    begins, gone = False, (*one.gone, *sorted(there - seen))
                    one = msgspec.structs.replace(one, gone=gone)
                there = (there | seen).difference(one.gone)
                yield one

    return run, observations()
