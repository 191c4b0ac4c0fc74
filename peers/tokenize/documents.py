"""Documents of files. Plain text is one; JSON Lines, Parquet and Arrow have one in each row, as data sets of
Hugging Face do. Or tokens that other programs made: nanoGPT and llm.c, Megatron, datatrove."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import resource
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar, cast

import numpy as np

from peers.storage.atomic_file import CHUNK_BYTES
from peers.storage.index import ITEM_BYTES, Shard
from swarm.errors import MALFORMED, SetupError
from swarm.installed import first_line

T = TypeVar("T")

ROWS_AT_ONCE = 1024
MAX_LINE_BYTES = 1 << 28
LONG_LINE_BYTES = 1 << 24
MAX_UNPACKED_BYTES = 1 << 32
"""Memory to read so many rows, or a long line: of a kilobyte a table is made that unpacks to 64 GB, and of a
byte of JSON 25."""


def has_rows(path: Path) -> bool:
    """Whether a file has a document in each row; else it is one."""
    return kind(path) in (".jsonl", ".parquet", ".arrow")


def kind(path: Path) -> str:
    """The ending that says how a file is read, apart from how it is packed."""
    endings = [ending.lower() for ending in path.suffixes]
    while endings and endings[-1] in (".zst", ".gz"):
        endings.pop()
    return {".ndjson": ".jsonl"}.get(endings[-1], endings[-1]) if endings else ""


def opened(path: Path) -> IO[bytes]:
    """What a file holds, unpacked. Raises SetupError: what unpacks it is not installed."""
    if path.suffix.lower() == ".gz":
        return cast(IO[bytes], gzip.open(path))
    if path.suffix.lower() != ".zst":
        return path.open("rb")
    return io.BufferedReader(_arrow(path).input_stream(str(path), compression="zstd"), CHUNK_BYTES)


def chunks(path: Path) -> Iterator[bytes]:
    """What a file that is one document holds. Raises SetupError: it is no text, or cannot be read whole."""
    with _said(path), opened(path) as file:
        if b"\0" in (first := file.read(4096)):  # bytes could be trained on, whatever they are of
            raise SetupError(f"{path} is not text: it has null bytes. Convert it (UTF-16: by iconv)")
        yield first
        yield from iter(partial(file.read, CHUNK_BYTES), b"")


def texts(path: Path, field: str, *, most_bytes: int = MAX_LINE_BYTES) -> Iterator[str]:
    """The documents of a file that `has_rows`.

    Raises:
        SetupError: it cannot be read to its end; a row has no such field, or is none; says which.
    """
    with _said(path):
        if kind(path) != ".jsonl":
            yield from _of_table(path, field)
            return
        with opened(path) as file:
            for number, line in enumerate(iter(partial(file.readline, most_bytes), b""), 1):
                where = f"line {number} of {path}"
                if len(line) == most_bytes:
                    raise SetupError(f"{where} is longer than {most_bytes >> 20} MiB: is it JSON Lines?")
                if line.strip():
                    made = (_of_line(each, field, where) for each in (line,))
                    yield from made if len(line) < LONG_LINE_BYTES else bounded(made)


@contextmanager
def _said(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, ValueError, zlib.error) as error:  # pyarrow's own are ValueErrors
        raise SetupError(f"{path} cannot be read to its end: {error}; fetch or make it again") from None


def _of_line(line: bytes, field: str, where: str) -> str:
    try:
        row = json.loads(line)
    except MALFORMED as error:
        raise SetupError(f"{where} is not JSON: {error}") from None
    found = row.get(field) if isinstance(row, dict) else None
    if not isinstance(found, str):
        keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise _no_text(where, field, keys[:200] if found is None else f"{type(found).__name__} in it")
    return found.encode("utf-8", "replace").decode()  # half of a character is none


def _of_table(path: Path, field: str) -> Iterator[str]:
    arrow = _arrow(path)
    if kind(path) == ".parquet":
        file = arrow.parquet.ParquetFile(path)
        names, batches = file.schema_arrow.names, partial(file.iter_batches, ROWS_AT_ONCE, columns=[field])
    else:  # as the library `datasets` keeps them
        file = arrow.ipc.open_stream(arrow.memory_map(str(path)))
        names, batches = file.schema.names, partial(iter, file)
    if field not in names:
        raise _no_text(str(path), field, ", ".join(names)[:200])
    yield from chain.from_iterable(bounded(of_column(batch, field, str(path)) for batch in batches()))


def of_column(table: Any, field: str, where: str) -> list[str]:
    """The documents of some rows. Raises SetupError: there is no such column, or no text in it."""
    if field not in table.schema.names:
        raise _no_text(where, field, ", ".join(table.schema.names)[:200])
    found = [text for text in table.column(field).to_pylist() if text is not None]
    if not all(isinstance(text, str) for text in found):
        raise _no_text(where, field, f"{table.column(field).type} in it")
    return found


def bounded(rows: Iterable[T]) -> Iterator[T]:
    """Some rows after the other, each read in MAX_UNPACKED_BYTES, where the system counts what a process has.
    Raises ValueError: these are not enough."""
    each = iter(rows)
    while True:
        before = soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if sys.platform == "linux":
            here = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[5])
            most = min(n for n in (soft, hard, here + MAX_UNPACKED_BYTES) if n != resource.RLIM_INFINITY)
            resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
        try:
            some = next(each)
        except StopIteration:
            return
        except MemoryError:
            raise ValueError(f"a few of its rows unpack to over {MAX_UNPACKED_BYTES >> 30} GiB") from None
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)
        yield some


def _arrow(path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise SetupError(f"{path} needs pyarrow: pip install 'swarm-train[data]'") from None
    return pyarrow


def _no_text(where: str, field: str, there: str) -> SetupError:
    return SetupError(f"{where} has no text in {field!r}, but {there}: give the right one with --field")


_NAME = re.compile(r"hf:([^@:]+)(?:@([^:]+))?(?::([^:]*))?(?::([^:]+))?")


class HubPart(NamedTuple):
    """One file of a data set of Hugging Face, read as it comes by the library `datasets`, in any process."""

    where: str
    name: str
    made_of: tuple[str, int, int]
    """What all files are made of; which it is, of how many."""
    rows: Any
    """A `datasets.IterableDataset` of all files."""

    def texts(self, field: str) -> Iterator[str]:
        """Its documents. Raises SetupError: it cannot be read to its end; a row has no text in this field."""
        try:
            _, number, count = self.made_of
            tables = self.rows.shard(count, number).with_format("arrow").iter(ROWS_AT_ONCE)
            yield from chain.from_iterable(bounded(of_column(table, field, self.where) for table in tables))
        except SetupError:
            raise
        except Exception as error:  # what reads the format raises its own
            raise SetupError(f"{self.where} cannot be read to its end: {first_line(error)}") from error


def hub_parts(text: str, field: str) -> tuple[HubPart, ...]:
    """The files of `hf:OWNER/NAME[@REVISION][:CONFIG][:SPLIT]` as of now; a folder may be the name.

    Raises:
        SetupError: it cannot be had, has no such configuration or split; or `datasets` is not installed.
    """
    found = _NAME.fullmatch(text)
    if found is None:
        raise SetupError(f"{text} is no hf:OWNER/NAME[@REVISION][:CONFIG][:SPLIT]")
    name, revision, config, split = found.groups()
    try:
        import datasets
    except ImportError:
        raise SetupError(f"{text} needs datasets: pip install 'swarm-train[data]'") from None
    try:
        builder = datasets.load_dataset_builder(name, config or None, revision=revision)
        rows = builder.as_streaming_dataset(split or "train")
        if field in (rows.features or ()) and hasattr(builder.config, "columns"):
            builder.config.columns = [field]  # of Parquet the others are not fetched
            rows = builder.as_streaming_dataset(split or "train")
    except Exception as error:
        raise SetupError(f"{text} cannot be had: {first_line(error)}") from error
    count, files = rows.num_shards, builder.config.data_files[split or "train"]
    made_of = hashlib.sha256(
        repr([list(files), files.origin_metadata, builder.config.name]).encode()
    ).hexdigest()
    base = name.rpartition("/")[2]
    return tuple(HubPart(f"part {n} of {text}", base, (made_of, n, count), rows) for n in range(count))


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
    if (ending := kind(path)) not in (".bin", ".idx", ".ds"):
        return None
    if path.suffix.lower() != ending:
        raise SetupError(f"{path} has tokens, which are read as they are: unpack it")
    if ending == ".idx":
        return _of_megatron(path.with_suffix(".bin"))
    if ending == ".ds":
        return _of_datatrove(path)
    if path.with_suffix(".idx").exists():
        return _of_megatron(path)
    with path.open("rb") as file:
        head = file.read(4)
    return _shard(path, "uint16", LLM_C_HEADER_BYTES if head == struct.pack("<I", LLM_C) else 0)


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
