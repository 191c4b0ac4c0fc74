"""The transcript of a run: what its peers signed of the steps that they took, in one file that only grows.

    swarm transcript 1\\n
    length (4 bytes), CRC-32 (4 bytes), MessagePack of an entry      again and again

The first entry is the manifest, so the file and the data are enough to compute the run again. An entry that
was cut off by a crash is the last one: it is not read, and the next writer removes it.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias

import msgspec

from peers.storage import atomic_file
from peers.storage.atomic_file import as_setup_error
from swarm.errors import MALFORMED, SetupError
from swarm.ids import PeerId, Stage
from swarm.manifest import Run, check_id
from swarm.wire.evidence import Evidence
from swarm.wire.trails import Signed, TookSteps

MAGIC = b"swarm transcript 1\n"
MAX_ENTRY_BYTES = 1 << 20
"""A manifest with a model's config has some 10 kB, 128 steps 5 kB."""
_HEAD = struct.Struct("<II")


class Terms(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Whose transcript it is."""

    run: str
    manifest: str


class Took(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A trail, with all that signed the same."""

    steps: TookSteps
    by: tuple[Signed, ...]
    island: int = 0
    """Under whose id it was signed; of a run without islands the only one."""


class Conviction(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Evidence against a peer, without the data that it names, and replicas of its stage that judged it."""

    evidence: Evidence
    by: tuple[Signed, ...]
    """Signatures of `judged`."""
    island: int = 0


class CharterSeen(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A charter of the run, signed by its owner, which held from then on."""

    owner: PeerId
    sealed: bytes


Entry: TypeAlias = "Terms | Took | Conviction | CharterSeen"
_decode = msgspec.msgpack.Decoder(Terms | Took | Conviction | CharterSeen).decode


class Transcript(NamedTuple):
    """A file that was read."""

    run: Run
    entries: list[Entry]
    rest_bytes: int
    """Behind the last entry that could be read."""


def path_of(folder: Path, run: Run) -> Path:
    """Where a keeper of checkpoints in `folder` writes it."""
    return folder / run.whole.id / "transcript"


def packed(entry: Entry) -> bytes:
    data = msgspec.msgpack.encode(entry)
    return _HEAD.pack(len(data), zlib.crc32(data)) + data


def read(path: Path) -> Transcript:
    """All entries of a file, up to the first that is not what was written.

    Raises:
        SetupError: it cannot be read, is no transcript, or contradicts itself.
    """
    with as_setup_error(f"the transcript {path} cannot be read"), path.open("rb") as file:
        found = list(_entries(file, 0))
        rest = os.fstat(file.fileno()).st_size - (found[-1][1] if found else 0)
    if not found or not isinstance(terms := found[0][0], Terms):
        raise SetupError(f"{path} is not a transcript: a keeper writes one beside its checkpoints")
    return Transcript(check_id(terms.manifest, terms.run), [entry for entry, _ in found], rest)


def _entries(file: BinaryIO, start: int) -> Iterator[tuple[Entry, int]]:
    """The whole entries from a place in the file on, and where each ends."""
    file.seek(start)
    if not start and file.read(len(MAGIC)) != MAGIC:
        return
    end = start or len(MAGIC)
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        size, crc = _HEAD.unpack(head)
        data = file.read(size) if size <= MAX_ENTRY_BYTES else b""
        if len(data) != size or zlib.crc32(data) != crc:
            return
        try:
            entry = _decode(data)
        except MALFORMED:
            return
        end += _HEAD.size + size
        yield entry, end


def _goes_on(file: BinaryIO, start: int) -> bool:
    """Whether an entry follows the one that begins there: if that cannot be read, it was not cut off."""
    file.seek(start)
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return False
    size, _ = _HEAD.unpack(head)
    return next(_entries(file, start + _HEAD.size + size), None) is not None


class TranscriptWriter:
    """Appends to a transcript, which several keepers of one folder may write. Any thread may call it."""

    def __init__(self, folder: Path, run: Run) -> None:
        self._folder, self._run, self._path, self._lock = folder, run, path_of(folder, run), threading.Lock()
        self._begin = MAGIC + packed(Terms(run.id, run.to_toml()))
        self.ends: dict[Stage, int] = {}
        """The version up to which the steps of each stage are in it; of a run with islands, of each cell."""
        self.charter = b""
        self.convicted: dict[PeerId, int] = {}
        """The peers against which there is evidence in it, and how many replicas judged that."""
        self._size = 0

    def append(self, entries: Sequence[Entry] = ()) -> None:
        """Take in what others wrote since the last time, and add entries. What a failure cuts off is removed
        the next time.

        Raises:
            SetupError: the file is damaged or of another run, or it cannot be written.
        """
        failing = as_setup_error("cannot write the transcript", "choose another --dir", folder=self._folder)
        with failing, self._lock:
            if not entries and not self._path.exists():
                return
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", 0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                there = file.read(len(self._begin))
                if there != self._begin and self._begin.startswith(there.rstrip(b"\0")):  # new, or cut off
                    file.seek(0)
                    atomic_file.write_all(file, self._begin)
                self._read_on(file)
                if entries:
                    atomic_file.write_all(file, b"".join(map(packed, entries)))
                    os.fsync(file.fileno())
                    self._read_on(file)

    def _read_on(self, file: BinaryIO) -> None:
        """Note what is new, and remove a last entry that was cut off."""
        there = os.fstat(file.fileno()).st_size
        if there < self._size:  # it was moved away, and this is a new one
            self._size, self.ends, self.charter, self.convicted = 0, {}, b"", {}
        for entry, end in _entries(file, self._size):
            self._size = end
            match entry:
                case Took(steps=steps, island=island):
                    cell = island * self._run.S + steps.stage
                    self.ends[cell] = max(steps.end, self.ends.get(cell, 0))
                case Conviction(evidence=evidence, by=by):
                    self.convicted[evidence.accused] = self.convicted.get(evidence.accused, 0) + len(by)
                case CharterSeen(sealed=sealed):
                    self.charter = sealed
                case Terms(run=run) if run != self._run.id:
                    self._size = 0
                    break
        long = there - self._size > _HEAD.size + MAX_ENTRY_BYTES
        if not self._size or long or _goes_on(file, self._size):
            text = f"{self._path} is damaged, or of another run: move it away, and a new one is begun"
            raise SetupError(text)
        file.truncate(self._size)
        file.seek(self._size)
