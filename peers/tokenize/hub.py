"""Data sets of Hugging Face by their names, read as they come by the library `datasets`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from peers.tokenize.documents import ROWS_AT_ONCE, of_column
from swarm.errors import SetupError
from swarm.installed import first_line

_NAME = re.compile(r"hf:([^@:]+)(?:@([^:]+))?(?::([^:]*))?(?::([^:]+))?")


@dataclass(frozen=True)
class Part:
    """One file of a data set; what a process is given."""

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
            for table in self.rows.shard(count, number).with_format("arrow").iter(ROWS_AT_ONCE):
                yield from of_column(table, field, self.where)
        except SetupError:
            raise
        except Exception as error:  # what reads the format raises its own
            raise SetupError(f"{self.where} cannot be read to its end: {first_line(error)}") from error


def parts(text: str, field: str) -> tuple[Part, ...]:
    """The files of `hf:OWNER/NAME[@REVISION][:CONFIG][:SPLIT]` as of now; a folder may be the name.

    Raises:
        SetupError: it cannot be had, has no such configuration or split; or `datasets` is not installed.
    """
    found = _NAME.fullmatch(text)
    if found is None:
        raise SetupError(f"{text} is no hf:OWNER/NAME[@REVISION][:CONFIG][:SPLIT]")
    name, revision, config, split = found.groups()
    try:
        import datasets  # pyright: ignore[reportMissingImports]
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
    return tuple(Part(f"part {n} of {text}", base, (made_of, n, count), rows) for n in range(count))
