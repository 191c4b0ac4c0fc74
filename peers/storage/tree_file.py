"""The upper nodes of an index's Merkle tree: a file beside it, of 64 bytes for each block of 4 MiB.

    index.tree            level by level, from the blocks up
    CACHE/trees/ROOT      a copy of that of another machine

A few nodes are read where they are needed and compared with the root then, so that an index of any size is
opened at once and in as little memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from contextlib import AbstractContextManager
from pathlib import Path

from peers.storage import CACHE_ENV, atomic_file, fetch
from peers.storage.index import Index
from swarm.errors import SetupError
from swarm.merkle import tree_bytes

_AT_ONCE = 1 << 23
"""Bytes that are fetched at once: a server without ranges sends all before them again."""

log = logging.getLogger(__name__)


class TreeFile:
    """The upper nodes of one index. For use by several threads."""

    def __init__(self, index: Index, cache: Path) -> None:
        """`cache`: the folder for what comes from other machines.

        Raises:
            SetupError: the file cannot be had or kept, or is not as long as that of this index.
        """
        self._address, self._length = index.tree, tree_bytes(index.size)
        self._copy = cache / "trees" / index.root
        self._open()

    def read(self, start: int, end: int) -> bytes:
        """The nodes from a place up to another one; any bytes, and fewer, if the file is damaged."""
        return os.pread(self._file.fileno(), end - start, start)

    def renew(self) -> None:
        """Fetch it again, as it is damaged. Raises SetupError as `__init__`; or it is of this machine."""
        if not fetch.is_far(self._address):
            raise self.damaged()
        log.warning("%s is damaged: fetching it again", self._copy)
        with contextlib.suppress(OSError):
            self._copy.unlink()
        self._open()

    def damaged(self) -> SetupError:
        """The error for nodes that are not what the root says."""
        return SetupError(f"{self._address} is damaged: remove it, and make the index again or copy it again")

    def _open(self) -> None:
        far = fetch.is_far(self._address)
        if far and not self._copy.exists():
            self._fetch()
        with self._told():
            self._file = (self._copy if far else Path(self._address)).open("rb")
        weakref.finalize(self, self._file.close)
        if os.fstat(self._file.fileno()).st_size != self._length:
            raise self.damaged()

    def _fetch(self) -> None:
        folder, remedy = self._copy.parent, f"set {CACHE_ENV} to another folder"
        with atomic_file.told("cannot keep the index", remedy, folder=folder):
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_file.writing(self._copy) as file:
                for at in range(0, self._length, _AT_ONCE):
                    atomic_file.write_all(file, self._nodes(at))

    def _nodes(self, start: int) -> bytearray:
        end = min(self._length, start + _AT_ONCE)
        with self._told():
            nodes = fetch.read(self._address, start, end)
        if len(nodes) < end - start:
            raise self.damaged()
        return nodes

    def _told(self) -> AbstractContextManager[None]:
        return atomic_file.told(f"cannot read {self._address}")
