"""The index of a data set: in which shards its tokens are, where each can be had, and what they must be.

A JSON file, usually named index.json. The tokens of all shards, one behind the other as little-endian
integers of one type, are one array. A manifest pins the root of its Merkle tree (`swarm.merkle`), whose upper
nodes are in a file beside the index. So an index may come from anywhere: what does not fit the manifest is
found when it is used. Addresses are no part of what is pinned; more may be added later.
"""

from __future__ import annotations

import logging
import os
import weakref
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from peers.storage import CACHE_ENV, atomic_file, fetch
from swarm.errors import MALFORMED, SetupError
from swarm.merkle import NODE_BYTES, tree_bytes

NAME, TREE = "index.json", "index.tree"
MAX_BYTES = 1 << 26
MAX_ADDRESSES = 1 << 19
"""Of all shards: to read them takes some seconds."""
MAX_TOKENS = 1 << 48
"""More no manifest can pin."""
TREE_SHARE = 8
"""That part of the cache a tree may have, for 16 TB of tokens in each GiB of the cache."""
ITEM_BYTES = {"uint8": 1, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8}
"""Types of tokens in files."""
Narrow = Literal["uint8", "uint16", "uint32"]


class Shard(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tokens that lie one behind the other in one file."""

    at: Annotated[tuple[Annotated[str, msgspec.Meta(max_length=2048)], ...], msgspec.Meta(max_length=16)]
    """Where it can be had: addresses, or paths relative to the index. The first that answers is taken."""
    tokens: int
    dtype: str = ""
    """Of the file, if it is another than that of the array."""
    skip: int = 0
    """Bytes of the file before the first token."""


class Source(msgspec.Struct, frozen=True, omit_defaults=True):
    """One part of a mixture."""

    name: str
    shards: tuple[Shard, ...]
    weight: int = 1
    """How many of each `sum of all weights` samples are from it."""

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)


class Index(msgspec.Struct, frozen=True):
    swarm_index: Literal[2]
    dtype: Narrow
    root: Annotated[str, msgspec.Meta(pattern=rf"\A[0-9a-f]{{{2 * NODE_BYTES}}}\Z")]
    """Of the Merkle tree over all tokens."""
    tokenizer: str
    """SHA-256 of the tokenizer's JSON file; empty: unknown, or one token for each byte."""
    sources: tuple[Source, ...]
    tree: str = TREE
    """Where the upper nodes are, as a shard's address; see `TreeFile`."""
    eos: int | None = None
    """The token at the end of each document; None: unknown, or there is none."""

    @property
    def shards(self) -> tuple[Shard, ...]:
        return tuple(shard for source in self.sources for shard in source.shards)

    @property
    def tokens(self) -> int:
        return sum(source.tokens for source in self.sources)

    @property
    def size(self) -> int:
        """Bytes of the array."""
        return self.tokens * ITEM_BYTES[self.dtype]


def index_among(files: tuple[str | Path, ...] | list[str | Path]) -> str | None:
    """Where the index is, if what was given is one: its address, its path, or the folder that has it.

    Raises:
        SetupError: something else was given besides.
    """
    found = [str(file) for file in files if Path(str(file)).name == NAME or fetch.is_far(str(file))]
    found += [str(Path(file) / NAME) for file in files if (Path(file) / NAME).is_file()]
    if found and len(files) > 1:
        raise SetupError(
            f"--data: {found[0]} is an index: give it alone (swarm tokenize makes one of several)"
        )
    return found[0] if found else None


def open_index(address: str) -> Index:
    """The index at an address, with the addresses of its shards resolved.

    Raises:
        SetupError: it cannot be had, or is none.
    """
    with atomic_file.as_setup_error(f"cannot read the index {address}"):
        text = fetch.read(address, most=MAX_BYTES)
    try:
        index = msgspec.json.decode(text, type=Index)
        if (addresses := sum(len(shard.at) for shard in index.shards)) > MAX_ADDRESSES:
            raise ValueError(f"its shards have {addresses} addresses, and at most {MAX_ADDRESSES} may be")
        sources = tuple(resolved(address, source) for source in index.sources)
        tree = fetch.beside(address, index.tree)
        if index.tokens > MAX_TOKENS:
            raise ValueError(f"it has {index.tokens} tokens, and a run at most {MAX_TOKENS}")
    except MALFORMED as error:
        why = str(error)[:200]
        raise SetupError(f"{address} is not an index of data: {why}; swarm tokenize makes one") from None
    return msgspec.structs.replace(index, sources=sources, tree=tree)


def resolved(address: str, source: Source) -> Source:
    """A source of the index at this address, with the addresses of its shards.

    Raises:
        ValueError: there cannot be such shards.
    """
    shards = []
    for shard in source.shards:
        can_be = shard.tokens >= 1 and 0 <= shard.skip <= MAX_TOKENS and shard.dtype in ("", *ITEM_BYTES)
        if not (shard.at and can_be):
            raise ValueError(f"a shard of {source.name!r} is {shard}")
        at = tuple(fetch.beside(address, one) for one in shard.at)
        shards.append(msgspec.structs.replace(shard, at=at))
    return msgspec.structs.replace(source, shards=tuple(shards))


_AT_ONCE = 1 << 23
"""Bytes that are fetched at once: a server without ranges sends all before them again."""

log = logging.getLogger(__name__)


class TreeFile:
    """The upper nodes of an index's tree, 64 bytes for each block of 4 MiB. For use by several threads.

        index.tree            level by level, from the blocks up
        CACHE/trees/ROOT      a copy of that of another machine

    A few nodes are read where they are needed and compared with the root then, so that an index of any size
    is opened at once and in as little memory.
    """

    def __init__(self, index: Index, cache: Path, most_bytes: int, named_by: str) -> None:
        """`cache`: the folder for what comes from other machines, which may have `most_bytes`; `named_by`: as
        of `peers.storage.shards.Shards`.

        Raises:
            SetupError: the file cannot be had or kept, or is not as long as that of this index.
        """
        self._address, self._length, self._named_by = index.tree, tree_bytes(index.size), named_by
        if fetch.is_far(index.tree) and self._length > most_bytes // TREE_SHARE:
            raise SetupError(
                f"{index.tree} has {self._length} bytes, over an eighth of a cache of {most_bytes} bytes: "
                f"take an index of fewer than {index.tokens} tokens, or allow more with --cache-size"
            )
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
        atomic_file.unlink(self._copy)
        self._open()

    def damaged(self) -> SetupError:
        """The error for nodes that are not what the root says."""
        return SetupError(f"{self._address} is damaged: remove it, and make the index again or copy it again")

    def _open(self) -> None:
        far = fetch.is_far(self._address)
        if far and not self._copy.exists():
            self._fetch()
        with self._reading():
            self._file = (self._copy if far else Path(self._address)).open("rb")
        weakref.finalize(self, self._file.close)
        if os.fstat(self._file.fileno()).st_size != self._length:
            raise self.damaged()

    def _fetch(self) -> None:
        folder, remedy = self._copy.parent, f"set {CACHE_ENV} to another folder"
        with atomic_file.as_setup_error("cannot keep the index", remedy, folder=folder):
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_file.writing(self._copy) as file:
                for start in range(0, self._length, _AT_ONCE):
                    end = min(self._length, start + _AT_ONCE)
                    with self._reading():
                        nodes = fetch.read(self._address, start, end, named_by=self._named_by)
                    if len(nodes) < end - start:
                        raise self.damaged()
                    atomic_file.write_all(file, nodes)

    def _reading(self) -> AbstractContextManager[None]:
        return atomic_file.as_setup_error(f"cannot read {self._address}")
