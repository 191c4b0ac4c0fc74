"""The tokens of an index as verified bytes; those of other machines are kept in a cache of bounded size.

    CACHE/blocks/12/1234…    a block of 4 MiB, by the node that the index has of it

A file gets its name when all of it was compared with the index, and nothing is hashed again at a start; parts
of 4 KiB are compared once more when they are used. More: docs/design.md, *Work that is counted*.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, TypeAlias

import msgspec

from peers.storage import CACHE_ENV, atomic_file, fetch
from peers.storage.index import Index, TreeFile
from peers.storage.shards import Shards, ShardSlice
from peers.system import shortage
from swarm.errors import NotNow, SetupError, SwarmError
from swarm.merkle import (
    BLOCK_BYTES,
    NODE_BYTES,
    PART_BYTES,
    Tree,
    block_count,
    block_levels,
    level_bytes,
    part_node,
)

DEFAULT_BYTES = 32 << 30
KEPT = 0.9
"""Of what the cache may have, after the oldest were removed."""
REST_S = 300.0
"""An address that failed is asked after the others for so long."""
RETRY_S = 5.0
"""Between two tries, where no server answers."""
MAX_TRIES = 64
"""Combinations of addresses for a block that lies across several shards."""
DIGEST_BYTES = 32
Others: TypeAlias = "Callable[[Blocks, int], tuple[bytes, list[bytes]]]"
"""The block with this number and its levels, as right as the index says, from other peers. For threads.
Raises SwarmError: none gives it, with the words for a person; NotNow: one may a little later."""
Fetched: TypeAlias = "tuple[bytes, list[bytes], bool]"
"""The tokens of a block, the nodes inside it, and whether all of it came from this machine."""

log = logging.getLogger(__name__)


class _Search(msgspec.Struct):
    """What was found for one block."""

    had: dict[tuple[ShardSlice, str], bytes | bytearray] = {}
    why: dict[str, str] = {}
    """Of addresses that cannot be used."""
    may_come: bool = False
    """A server does not answer now, or a peer is busy."""
    others: str = ""
    """What came of asking the run's peers."""

    def nowhere(self) -> SetupError | NotNow:
        """The error for a block that no address has right."""
        told = "; ".join(f"{address} {reason}" for address, reason in self.why.items()) + self.others
        if self.may_come:
            return NotNow(f"a shard of the data cannot be had now: {told}", retry_after_s=RETRY_S)
        return SetupError(
            f"a shard of the data is nowhere: {told}. Repair one, add an address to the index, or remove "
            "what is kept of it in the cache"
        )


class Blocks:
    """All tokens of an index, one behind the other. For use by several threads."""

    def __init__(self, index: Index, folder: Path, most_bytes: int, named_by: str) -> None:
        """`folder`: the cache, which may be shared with other processes; `named_by`: as of `Shards`.

        Raises:
            SetupError: the tree of the index cannot be had, or does not have its root.
        """
        self._folder, self._most, self._allowed = folder / "blocks", most_bytes, most_bytes
        self._shards = Shards(index.shards, index.dtype, named_by)
        self._upper = TreeFile(index, folder, most_bytes, named_by)
        self.tree = Tree(index.size, bytes.fromhex(index.root), self._upper.read, self._inside, self.read)
        self.node = lru_cache(maxsize=1024)(self._checked_node)
        """Block -> its Merkle node. Raises SetupError: the tree of the index is damaged."""
        self.node(0)
        self.others: Others | None = None
        """The peers that are asked for what no address has."""
        self._inside_again = lru_cache(maxsize=32)(self._levels)
        self._locks = [threading.Lock() for _ in range(64)]
        self._resting: dict[str, float] = {}
        self._written: float = most_bytes  # until the folder was seen
        self._is_full = False

    def read(self, start: int, end: int) -> bytes:
        """The bytes from a place up to another one.

        Raises:
            SetupError: they cannot be had, or are wrong wherever they are; says where.
            NotNow: a server does not answer, which may come back.
        """
        found = []
        while start < end:
            number = start // BLOCK_BYTES
            stop = min(end, (number + 1) * BLOCK_BYTES)
            found.append(self._of_block(number, start - number * BLOCK_BYTES, stop - number * BLOCK_BYTES))
            start = stop
        return b"".join(found)

    def has(self, start: int, end: int) -> bool:
        """Whether they are on this machine already."""
        return all(self._path(block).exists() for block in self._over(start, end))

    def bring(self, start: int, end: int) -> None:
        """Fetch what of these bytes is not here. Raises SetupError as `read` does."""
        for block in self._over(start, end):
            self._open(block).close()

    @staticmethod
    def _over(start: int, end: int) -> Iterable[int]:
        return range(start // BLOCK_BYTES, block_count(end))

    # -- one block ----------------------------------------------------------------------------------

    def _path(self, block: int) -> Path:
        name = self.node(block).hex()
        return self._folder / name[:2] / name

    def _checked_node(self, block: int) -> bytes:
        with contextlib.suppress(ValueError):
            return self.tree.block(block)
        self._upper.renew()
        with contextlib.suppress(ValueError):
            return self.tree.block(block)
        raise self._upper.damaged()

    def size_of(self, block: int) -> int:
        """Bytes of a block; 0: there is none with this number."""
        if not 0 <= block < block_count(self._shards.size):
            return 0
        return min(BLOCK_BYTES, self._shards.size - block * BLOCK_BYTES)

    def _of_block(self, block: int, start: int, end: int) -> bytes:
        first, last = start // PART_BYTES, -(-end // PART_BYTES)
        for _ in range(2):
            try:
                nodes = self._inside(block)[0]
                with self._open(block) as file:
                    data = self._data(
                        file, block, first * PART_BYTES, min(self.size_of(block), last * PART_BYTES)
                    )
                parts = (data[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES))
                if b"".join(map(part_node, parts)) == nodes[first * NODE_BYTES : last * NODE_BYTES]:
                    return data[start - first * PART_BYTES : end - first * PART_BYTES]
            except OSError as error:
                if short := shortage(error):
                    raise SetupError(short) from None
            log.warning("%s is damaged, or the file that it is of: fetching it again", self._path(block))
            self._forget(block)
        raise SetupError(f"what is kept in {self._folder} is damaged again and again: set {CACHE_ENV}")

    def _forget(self, block: int) -> None:
        self._inside_again.cache_clear()
        atomic_file.unlink(self._path(block))

    def _inside(self, block: int) -> list[bytes]:
        try:
            return self._inside_again(block)
        except OSError as error:
            if not shortage(error):
                self._forget(block)
            return self._inside_again(block)

    def _levels(self, block: int) -> list[bytes]:
        """Raises OSError: they are damaged."""
        lengths = level_bytes(self.size_of(block))
        with self._open(block) as file:
            digest, nodes = file.read(DIGEST_BYTES), file.read(sum(lengths))
        if hashlib.sha256(nodes).digest() != digest:
            raise OSError("nodes are damaged")
        ends = itertools.accumulate(lengths)
        return [nodes[end - length : end] for length, end in zip(lengths, ends, strict=True)]

    def _data(self, file: BinaryIO, block: int, start: int, end: int) -> bytes:
        """Raises OSError: it is not in the block's file, nor in others of this machine."""
        size = self.size_of(block)
        before = DIGEST_BYTES + sum(level_bytes(size))
        if file.seek(0, os.SEEK_END) == before + size:
            file.seek(before + start)
            return file.read(end - start)
        return self._near(block, start, end)

    def _near(self, block: int, start: int, end: int) -> bytes:
        at = block * BLOCK_BYTES
        parts = self._shards.parts(at + start, at + end)
        near = [(part, [a for a in part.shard.at if not fetch.is_far(a)]) for part in parts]
        return b"".join(self._shards.read(part, (there or [""])[0]) for part, there in near)

    def held(self, block: int) -> bytes | None:
        """All of a block, if it is on this machine and right. Nothing is fetched for it."""
        with contextlib.suppress(OSError):
            path, size = self._path(block), self.size_of(block)
            try:
                with path.open("rb") as file:
                    data = self._data(file, block, 0, size)
            except OSError:
                data = self._near(block, 0, size)
            if data and block_levels(data)[-1] == self.node(block):
                return data
        return None

    def _open(self, block: int) -> BinaryIO:
        """The file of a block, fetched if it is not here."""
        path = self._path(block)
        with contextlib.suppress(OSError):
            file = path.open("rb")
            os.utime(path)  # the oldest are removed first
            return file
        with self._locks[block % len(self._locks)]:
            with contextlib.suppress(OSError):
                return path.open("rb")
            return self._keep(path, *self._fetched(block))

    # -- from where it is ---------------------------------------------------------------------------

    def _fetched(self, block: int) -> Fetched:
        """A block from its addresses, or else from peers of the run; from them first if all addresses of one
        of its shards failed lately. Raises as `read`.
        """
        parts, search = self._shards.of_block(block), _Search()
        sources = [self._of_addresses, self._of_others]
        if any(all(map(self._rests, part.shard.at)) for part in parts):
            sources.reverse()
        for source in sources:
            if (found := source(block, parts, search)) is not None:
                return found
        raise search.nowhere()

    def _of_others(self, block: int, _: list[ShardSlice], search: _Search) -> Fetched | None:
        if self.others is None:
            return None
        try:
            return *self.others(self, block), False
        except SwarmError as error:
            search.may_come |= isinstance(error, NotNow)
            search.others = f"; {error.text}"
            return None

    def _of_addresses(self, block: int, parts: list[ShardSlice], search: _Search) -> Fetched | None:
        node = self.node(block)
        orders = [sorted(part.shard.at, key=self._rests) for part in parts]
        for picks in itertools.islice(_picks([len(order) for order in orders]), MAX_TRIES):
            addresses = []
            for part, order, pick in zip(parts, orders, picks, strict=True):
                address = self._having(part, order[pick:] + order[:pick], search)
                if address is None:
                    return None
                addresses.append(address)
            data = b"".join(search.had[part, address] for part, address in zip(parts, addresses, strict=True))
            levels = block_levels(data)
            if levels[-1] == node:
                right = {part: search.had[part, one] for part, one in zip(parts, addresses, strict=True)}
                wrong = {address for (part, address), had in search.had.items() if had != right[part]}
                self._are_wrong(wrong, search)
                return data, levels, not any(map(fetch.is_far, addresses))
        tried = {address for _, address in search.had}
        if len(parts) == 1:
            self._are_wrong(tried, search)
        search.why |= dict.fromkeys(
            sorted(tried - search.why.keys()), "is not what the index says, or one beside it is not"
        )
        return None

    def _rests(self, address: str) -> bool:
        return time.monotonic() < self._resting.get(address, -REST_S) + REST_S

    def _having(self, part: ShardSlice, addresses: list[str], search: _Search) -> str | None:
        """The first address that has a part, which `search` has then; None: none has."""
        for address in addresses:
            try:
                if (part, address) not in search.had and address not in search.why:
                    search.had[part, address] = self._shards.read(part, address)
            except OSError as error:
                self._failed(address, f"cannot be had: {error.strerror or error}", search)
                search.may_come |= fetch.may_come(address, error)
            if (part, address) in search.had:
                return address
        return None

    def _are_wrong(self, addresses: set[str], search: _Search) -> None:
        for address in sorted(addresses):
            self._failed(address, "is not what the index says: it is corrupt, or of another data set", search)

    def _failed(self, address: str, reason: str, search: _Search) -> None:
        if address not in self._resting:
            log.warning("the data at %s: it %s; another address is taken, if there is one", address, reason)
        self._resting[address] = time.monotonic()
        search.why[address] = reason

    # -- the cache ----------------------------------------------------------------------------------

    def _keep(self, path: Path, data: bytes, levels: list[bytes], is_near: bool) -> BinaryIO:
        """What is verified, as the file that it is from now on; or in memory, if the disk is full."""
        nodes = b"".join(levels)
        content = hashlib.sha256(nodes).digest() + nodes + (b"" if is_near else data)
        for _ in range(2):
            try:
                self._make_room(len(content))
                path.parent.mkdir(parents=True, exist_ok=True)
                atomic_file.write_whole(path, content)
                # If there was no room, there is again: as much as is free may be kept.
                self._most = max(self._most, min(self._allowed, shutil.disk_usage(path).free))
                return path.open("rb")
            except OSError as error:
                remedy = f"set {CACHE_ENV} to another folder"
                trouble = atomic_file.trouble("cannot keep data", self._folder, error, remedy)
                self._most = int(KEPT * sum(size for _, size, _ in self._there()))
                self._written = self._most  # some of the oldest go, and it is tried once more
        if not self._is_full:
            self._is_full = True
            log.warning("%s. Until then they are fetched again each time", trouble.text)
        return io.BytesIO(content if not is_near else content + data)

    def _make_room(self, size: int) -> None:
        """Remove the blocks that were not used for longest, if there are too many."""
        self._written += size
        if self._written <= self._most:
            return
        found = self._there()
        self._written = sum(length for _, length, _ in found) + size
        if self._written <= self._most:
            return
        for _, length, path in sorted(found):
            if self._written <= KEPT * self._most:
                break
            atomic_file.unlink(path)
            self._written -= length

    def _there(self) -> list[tuple[float, int, Path]]:
        """When each block was used last, its bytes, and where it is."""
        found = []
        for path in self._folder.glob("??/*"):
            with contextlib.suppress(OSError):
                state = path.stat()
                found.append((state.st_mtime, state.st_size, path))
        return found


def _picks(counts: list[int]) -> Iterator[tuple[int, ...]]:
    """Which address to take of each of several shards: the first of all; the second of all, and so on, as one
    server may have all of them wrong; then others for one shard at a time; then all that is left.
    """
    for pick in range(max(counts)):
        yield tuple(min(pick, count - 1) for count in counts)
    for number, count in enumerate(counts):
        for pick in range(1, count):
            yield tuple(pick if one == number else 0 for one in range(len(counts)))
    yield from itertools.product(*map(range, counts))
