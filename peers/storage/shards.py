"""Files of tokens as one array: written, read across their ends, and made into an index."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from peers.progress import Bar
from peers.storage import atomic_file, fetch
from peers.storage.index import ITEM_BYTES, NAME, TREE, Index, Narrow, Shard, Source, resolved
from peers.storage.tokenizer import vocabulary_too_small
from swarm.errors import SetupError
from swarm.merkle import BLOCK_BYTES, block_count, block_levels, grow


class ShardSlice(NamedTuple):
    """Some tokens of one shard."""

    shard: Shard
    first: int
    end: int


class Shards:
    """Shards, one behind the other as bytes of one type."""

    def __init__(self, shards: Sequence[Shard], dtype: Narrow, named_by: str = "") -> None:
        """`named_by`: where the index is, if it is not of this machine."""
        self._shards, self._dtype, self._named_by = shards, dtype, named_by
        self._ends = list(itertools.accumulate(shard.tokens for shard in shards))
        self._item = ITEM_BYTES[dtype]
        self.size = self._ends[-1] * self._item if shards else 0
        """Bytes of all."""

    def parts(self, start: int, end: int) -> list[ShardSlice]:
        """What the bytes from a place up to another one are made of; both are between tokens."""
        first, last, found = start // self._item, end // self._item, []
        number = bisect_right(self._ends, first)
        while first < last:
            shard = self._shards[number]
            begins, stop = self._ends[number] - shard.tokens, min(last, self._ends[number])
            found.append(ShardSlice(shard, first - begins, stop - begins))
            first, number = stop, number + 1
        return found

    def of_block(self, block: int) -> list[ShardSlice]:
        return self.parts(block * BLOCK_BYTES, min(self.size, (block + 1) * BLOCK_BYTES))

    def read(self, part: ShardSlice, address: str) -> bytes | bytearray:
        """The tokens of a part. Raises OSError: they are not at this address."""
        dtype = part.shard.dtype or self._dtype
        item, skip = ITEM_BYTES[dtype], part.shard.skip
        first, end = skip + part.first * item, skip + part.end * item
        raw = fetch.read(address, first, end, named_by=self._named_by)
        if len(raw) != (part.end - part.first) * item:
            raise FileNotFoundError(f"it ends before its token {part.end}")
        if dtype == self._dtype:
            return raw
        tokens = np.frombuffer(raw, np.dtype(dtype).newbyteorder("<"))
        if tokens.min() < 0 or tokens.max() > np.iinfo(self._dtype).max:
            raise FileNotFoundError(
                f"it has tokens from {tokens.min()} to {tokens.max()}, which are not {self._dtype}"
            )
        return tokens.astype(np.dtype(self._dtype).newbyteorder("<")).tobytes()

    def node(self, block: int) -> bytes:
        """The Merkle node of a block, all of which is on this machine. Raises SetupError: it is not."""
        found = []
        for part in self.of_block(block):
            with atomic_file.as_setup_error(f"cannot read the shards: {part.shard.at[0]}"):
                found.append(self.read(part, part.shard.at[0]))
        return block_levels(b"".join(found))[-1]


def write_shard(path: Path, tokens: Iterable[np.ndarray], dtype: Narrow, vocab_size: int) -> int:
    """Write tokens to a file; how many there are.

    Raises:
        SetupError: the vocabulary has not all of them.
        OSError: they cannot be written.
    """
    narrow, count = np.dtype(dtype).newbyteorder("<"), 0
    with atomic_file.writing(path) as file:
        for some in tokens:
            if len(some) and (largest := int(some.max())) >= vocab_size:
                raise vocabulary_too_small(vocab_size, largest)
            atomic_file.write_all(file, some.astype(narrow).view(np.uint8).data)
            count += len(some)
    return count


def make_index(
    folder: Path, sources: Sequence[Source], dtype: Narrow, tokenizer: str = "", *, eos: int | None = None,
    jobs: int = 1,
) -> Index:  # fmt: skip
    """Put the index of shards on this machine into a folder: all of them are read.

    Args:
        sources: paths of their shards are relative to the folder.
        tokenizer: SHA-256 of its file.
        jobs: processes that read.

    Raises:
        SetupError: there are no tokens, or a file cannot be read.
        OSError: the folder cannot be written.
    """
    near = [resolved(str(folder / NAME), source) for source in sources]
    shards = Shards([shard for source in near for shard in source.shards], dtype)
    if not shards.size:
        raise SetupError("the data have no tokens: give more text")
    count = block_count(shards.size)
    with (
        Bar("making the tree of the tokens", count, unit="blocks") as bar,
        atomic_file.replacing(folder) as (file, temporary),
    ):
        with temporary.open("r+b") as nodes:
            for node in in_parallel(shards.node, range(count), jobs):
                nodes.write(node)
                bar(1)
            root = grow(nodes, shards.size).hex()
        atomic_file.commit(file, temporary, folder / TREE)
    index = Index(2, dtype, root, tokenizer, tuple(sources), eos=eos)
    atomic_file.write_whole(folder / NAME, msgspec.json.encode(index))
    return index


def in_parallel(function: Callable[[Any], Any], items: Sequence[Any], jobs: int) -> Iterable[Any]:
    """`map`, in processes if there are several jobs. Raises SetupError: one of them was killed."""
    if min(jobs, len(items)) <= 1:
        yield from map(function, items)
        return
    try:
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            yield from pool.map(function, items, chunksize=1 + len(items) // (64 * jobs))
    except BrokenExecutor:
        raise SetupError("a process was killed, as for want of memory: take fewer --jobs") from None
