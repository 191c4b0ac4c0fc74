"""Models and samples that `swarm.Run` wrote to a folder: a module's text, and its tensors beside it.

    NAME/__init__.py            operators, one a line; `build()` and `samples()` for the manifest to name
    NAME/model.safetensors      weights, buffers and constants by full name
    NAME/samples.safetensors    an array for each input of the model

Only those that have data need the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from torch import nn

from swarm.errors import SetupError
from swarm.model.graph.stage_module import holder_of

TEXT, TENSORS, SAMPLES = "__init__.py", "model.safetensors", "samples.safetensors"


class WrittenModule(nn.Module):
    """A module whose `forward` was written by tracing another: its tensors have the names they had there."""

    TRAINED: tuple[str, ...] = ()
    """Full names of parameters."""
    FROZEN: tuple[str, ...] = ()
    """Of parameters that get no gradient."""
    BUFFERS: tuple[str, ...] = ()

    def __init__(self, text: str) -> None:
        """`text`: its path, with the tensors beside it. Raises SetupError: they are gone, or damaged."""
        super().__init__()
        path = Path(text).with_name(TENSORS)
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise SetupError(f"{path} cannot be read: {error}; copy the owner's whole folder") from None
        for name in (*self.TRAINED, *self.FROZEN):
            owner, leaf = holder_of(self, name)
            owner.register_parameter(leaf, nn.Parameter(tensors[name], requires_grad=name in self.TRAINED))
        for name in self.BUFFERS:
            owner, leaf = holder_of(self, name)
            owner.register_buffer(leaf, tensors[name])


class Columns(Sequence[tuple[np.ndarray, ...]]):
    """Samples of which each input's arrays lie one behind the other."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self._arrays[0])

    def __getitem__(self, index: Any) -> Any:
        return tuple(array[index] for array in self._arrays)


def read_samples(text: str) -> Columns:
    """The samples beside a text. Raises SetupError: they are not there, or damaged."""
    path = Path(text).with_name(SAMPLES)
    try:
        with safe_open(path, "np") as file:
            return Columns([file.get_tensor(str(number)) for number in range(len(file.keys()))])
    except (OSError, SafetensorError) as error:
        raise SetupError(
            f"{path} cannot be read: {error}; copy it from the owner: trainers have the samples"
        ) from None


def write(
    folder: Path, text: str, tensors: dict[str, torch.Tensor] | None, arrays: Sequence[np.ndarray] | None
) -> None:
    """Write all of it into a new folder. Raises OSError, SafetensorError: it cannot be written."""
    folder.mkdir(parents=True)
    if tensors is not None:
        save_file(tensors, folder / TENSORS)
    if arrays is not None:
        save_arrays({str(number): array for number, array in enumerate(arrays)}, folder / SAMPLES)
    (folder / TEXT).write_text(text, encoding="utf-8")
