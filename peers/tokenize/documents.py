"""The documents of a file: plain text is one, JSON Lines and Parquet have one in each row."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from swarm.errors import SetupError

ROWS_AT_ONCE = 1024
EXTRA = "install it with: pip install 'swarm-train[data]'"


def has_rows(path: Path) -> bool:
    """Whether a file has a document in each row; else it is one."""
    return kind(path) in (".jsonl", ".parquet")


def kind(path: Path) -> str:
    """The ending that says how a file is read, apart from how it is packed."""
    endings = [ending.lower() for ending in path.suffixes]
    while endings and endings[-1] in (".zst", ".gz"):
        endings.pop()
    return {".ndjson": ".jsonl"}.get(endings[-1], endings[-1]) if endings else ""


def opened(path: Path) -> IO[bytes]:
    """What a file holds, unpacked.

    Raises:
        SetupError: what unpacks it is not installed.
        OSError: it cannot be read.
    """
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path))
    if path.suffix != ".zst":
        return path.open("rb")
    try:
        import zstandard  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise SetupError(f"{path} is packed by zstd, and zstandard is not installed: {EXTRA}") from None
    stream = zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True)
    return io.BufferedReader(_Unpacked(stream), 1 << 20)


def texts(path: Path, field: str) -> Iterator[str]:
    """The documents of a file that `has_rows`.

    Raises:
        SetupError: a row has no such field, or is none; says which.
        OSError: it cannot be read.
    """
    if kind(path) == ".parquet":
        yield from _of_parquet(path, field)
        return
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise SetupError(f"line {number} of {path} is not JSON: {error}") from None
                found = row.get(field) if isinstance(row, dict) else None
                if not isinstance(found, str):
                    keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
                    raise SetupError(
                        f"line {number} of {path} has no text in {field!r}, but {keys[:200]}: name it with "
                        "--field"
                    )
                yield found


class _Unpacked(io.RawIOBase):
    """What zstandard unpacks: it has no lines, and errors of its own."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def close(self) -> None:
        self._file.close()
        super().close()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            some = self._file.read(len(buffer))
        except Exception as error:  # zstandard has its own
            raise OSError(f"it cannot be unpacked: {error}") from error
        buffer[: len(some)] = some
        return len(some)


def _of_parquet(path: Path, field: str) -> Iterator[str]:
    try:
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise SetupError(f"{path} is Parquet, and pyarrow is not installed: {EXTRA}") from None
    try:
        file: Any = pyarrow.parquet.ParquetFile(path)
    except ValueError as error:
        raise SetupError(f"{path} is not Parquet: {error}") from None
    names = file.schema_arrow.names
    if field not in names:
        raise SetupError(f"{path} has no column {field!r}, but {', '.join(names)}: name it with --field")
    for batch in file.iter_batches(ROWS_AT_ONCE, columns=[field]):
        for found in batch.column(0).to_pylist():
            if isinstance(found, str):
                yield found
