"""Tokens that other programs made, read as they are: nanoGPT and llm.c, Megatron, datatrove."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from peers.storage.index import ITEM_BYTES, Shard
from swarm.errors import SetupError

LLM_C = 20240520
LLM_C_HEADER_BYTES = 1024
MEGATRON = b"MMIDIDX\0\0"
MEGATRON_TYPES = {1: "uint8", 4: "int32", 5: "int64", 8: "uint16"}


def shard_of(path: Path) -> Shard | None:
    """What a file of tokens holds; None: it is text.

    Raises:
        SetupError: it is not what its name says.
        OSError: it cannot be read.
    """
    if path.suffix == ".idx":
        return _of_megatron(path.with_suffix(".bin"))
    if path.suffix == ".ds":
        return _of_datatrove(path)
    if path.suffix != ".bin":
        return None
    if path.with_suffix(".idx").exists():
        return _of_megatron(path)
    with path.open("rb") as file:
        head = file.read(4)
    skip = LLM_C_HEADER_BYTES if head == struct.pack("<I", LLM_C) else 0
    return _shard(path, "uint16", skip)


def _shard(path: Path, dtype: str, skip: int = 0, tokens: int | None = None) -> Shard:
    """Raises SetupError: its size is none of so many tokens."""
    size, item = path.stat().st_size - skip, ITEM_BYTES[dtype]
    if size <= 0 or size % item or (tokens is not None and size != tokens * item):
        many = "whole tokens" if tokens is None else f"{tokens} tokens"
        raise SetupError(
            f"{path} has {size} bytes, which are not {many} of {dtype}: it is damaged, or something else"
        )
    return Shard((str(path.resolve()),), size // item, dtype, skip)


def _of_megatron(path: Path) -> Shard:
    index = path.with_suffix(".idx")
    with index.open("rb") as file:
        magic, version, code, sequences, _ = struct.unpack("<9sQBQQ", file.read(34).ljust(34, b"\0"))
        lengths = np.fromfile(file, "<i4", min(sequences, index.stat().st_size))
    is_whole = len(lengths) == sequences and not (lengths < 0).any()
    if (magic, version) != (MEGATRON, 1) or code not in MEGATRON_TYPES or not is_whole:
        raise SetupError(f"{index} is not an index of Megatron, or not of tokens: leave it out")
    return _shard(path, MEGATRON_TYPES[code], 0, int(lengths.sum(dtype=np.int64)))


def _of_datatrove(path: Path) -> Shard:
    """Its index has the end of each document; the width of a token follows from the last."""
    index = Path(f"{path}.index")
    with index.open("rb") as file:
        file.seek(max(0, index.stat().st_size - 8))
        tokens = int.from_bytes(file.read(8), "little")
    wide = path.stat().st_size == 4 * tokens
    return _shard(path, "uint32" if wide else "uint16", 0, tokens)
