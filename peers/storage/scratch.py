"""Tensors that are not needed now, in a folder that is removed afterwards."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, MutableMapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from swarm.errors import SetupError


class ScratchFolder(MutableMapping[str, dict[str, torch.Tensor]]):
    """Sets of tensors by name, each a file. What is read is mapped: it is in memory where it is looked at."""

    def __init__(self, folder: Path) -> None:
        """`folder`: nothing else writes there."""
        self._folder = folder

    def __setitem__(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Raises SetupError: it cannot be written."""
        path = self._path(name)
        try:
            save_file({key: one.contiguous() for key, one in tensors.items()}, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)  # what was read of the one before stays as it was
        except (OSError, SafetensorError) as error:
            raise SetupError(
                f"cannot write to --scratch {self._folder.parent}: {error}: choose another"
            ) from None

    def __getitem__(self, name: str) -> dict[str, torch.Tensor]:
        if not self._path(name).exists():
            raise KeyError(name)
        return load_file(self._path(name))

    def __delitem__(self, name: str) -> None:
        try:
            self._path(name).unlink()
        except FileNotFoundError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return (path.stem for path in self._folder.glob("*.tensors"))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.tensors"


@contextlib.contextmanager
def open_scratch(folder: Path | None) -> Iterator[MutableMapping[str, dict[str, torch.Tensor]]]:
    """A place for tensors under `folder`, or without one in memory.

    Raises:
        SetupError: nothing can be written there.
    """
    if folder is None:
        yield {}
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        place = tempfile.TemporaryDirectory(prefix="scratch-", dir=folder)
    except OSError as error:
        raise SetupError(f"cannot write to --scratch {folder}: {error}: choose another") from None
    with place as name:
        yield ScratchFolder(Path(name))
