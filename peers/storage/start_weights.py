"""Trained weights that a run starts from: safetensors in a folder, or in a repository of Hugging Face.

Of a file only its header is read, and the bytes of the tensors that are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import torch

from peers.storage import fetch
from peers.storage.atomic_file import as_setup_error
from peers.storage.safetensors_file import DTYPES, TensorInfo
from swarm.errors import MALFORMED, SetupError
from swarm.manifest import Run
from swarm.model.layout import can_start, start_from

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
"""As `save_pretrained` names them: which file has which tensor, and a model in one file."""
MAX_HEADER_BYTES = 100_000_000
"""Of all files together, the library's own limit for one: an owner names whatever he put on a hub."""
LEAST_FILE_BYTES = 1 << 14
"""That each file counts."""
ATTEMPTS = 3
_REMEDY = "; save the model with transformers' save_pretrained, which writes safetensors"

_DTYPE = {name: dtype for dtype, name in DTYPES.items()}

_Offset = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]


class _Tensor(TensorInfo, frozen=True, forbid_unknown_fields=False):
    """A tensor, as the header of its file describes it."""

    data_offsets: tuple[_Offset, _Offset]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class _Place(NamedTuple):
    file: str
    start: int
    tensor: _Tensor


class StartWeights:
    """The tensors there, by name."""

    def __init__(self, where: str, at: str, files: Sequence[str]) -> None:
        """`where`: for errors; `at`: a folder or an address.

        Raises:
            SetupError: a file cannot be read, or is none of safetensors.
        """
        self._where, self._at = where, at
        self._places: dict[str, _Place] = {}
        left = MAX_HEADER_BYTES
        for file in files:
            begin = 8 + int.from_bytes(self._bytes(file, 0, 8), "little")
            if not 8 < begin <= left:
                raise SetupError(f"{file} in {where} is no safetensors file")
            left -= max(begin, LEAST_FILE_BYTES)
            header = bytes(self._bytes(file, 8, begin - 8))
            try:
                listed = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
                listed.pop("__metadata__", None)
                for name, raw in listed.items():
                    self._places[name] = _Place(file, begin, msgspec.json.decode(raw, type=_Tensor))
            except MALFORMED as error:
                raise SetupError(f"{file} in {where} is no safetensors file: {str(error)[:100]}") from None

    def __call__(self, names: Sequence[str], shape: torch.Size) -> torch.Tensor:
        """The tensor that is called by one of `names`; the part before the first dot may be missing there.

        Raises:
            SetupError: it is not there, or is not what the model takes.
        """
        known = (*names, *(name.partition(".")[2] for name in names))
        name = next((name for name in known if name in self._places), "")
        if not name:
            there = ", ".join(sorted(self._places)[:5])
            raise SetupError(
                f"{self._where} has no tensor {names[0]}, which the model of the run has: it has {there}"
                f"{' …' if len(self._places) > 5 else ''} ({len(self._places)} in all). Take the folder of "
                "a model with the config that the manifest has"
            )
        file, begin, tensor = self._places[name]
        dtype = _DTYPE.get(tensor.dtype)
        if tensor.shape != tuple(shape):
            raise SetupError(
                f"{name} in {self._where} has shape {list(tensor.shape)}, in the model of the run "
                f"{list(shape)}: take the config of that model for the manifest"
            )
        if dtype is None or not dtype.is_floating_point:
            raise SetupError(f"{name} in {self._where} is {tensor.dtype}: weights are floating point numbers")
        start, end = tensor.data_offsets
        if end - start != shape.numel() * dtype.itemsize:
            raise SetupError(f"{file} in {self._where} is damaged: {name} has {end - start} bytes")
        if not shape.numel():
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._bytes(file, begin + start, end - start), dtype=dtype).view(shape)

    def _bytes(self, file: str, first: int, size: int) -> bytearray:
        with as_setup_error(f"{file} in {self._where} cannot be read", _REMEDY):
            found = _read(self._at, file, first, first + size)
        if len(found) != size:
            raise SetupError(f"{file} in {self._where} is damaged: it ends too early")
        return found


def open_start(run: Run, folder: Path | None) -> StartWeights | None:
    """The weights that a run starts from; None: from none, or from a folder that was not given.

    Raises:
        SetupError: they cannot be read; or a folder is given for a run that starts from none.
    """
    weights = run.start.weights
    if not weights:
        if folder is not None:
            raise SetupError(
                f'--start {folder}: the manifest of run {run.name!r} has no [start] with weights = "folder"'
            )
        return None
    if folder is not None:
        where = at = str(folder)
        if not folder.is_dir():
            return StartWeights(where, str(folder.parent), [folder.name])
    elif weights == "folder":
        return None
    else:
        where, at = weights, f"hf://{weights.removeprefix('hf:')}"
    with as_setup_error(f"{INDEX} in {where} cannot be read", _REMEDY):
        try:
            index = _read(at, INDEX)
        except FileNotFoundError:
            return StartWeights(where, at, [SINGLE])
    try:
        files = sorted(set(msgspec.json.decode(index, type=_Index).weight_map.values()))
    except MALFORMED as error:
        raise SetupError(f"{INDEX} in {where} is damaged: {str(error)[:100]}") from None
    if wrong := [file for file in files if file != Path(file).name]:
        raise SetupError(f"{INDEX} in {where} names {wrong[0]!r}, which is no file there")
    return StartWeights(where, at, files)


def offer_start(run: Run, folder: Path | None) -> None:
    """Have this process start from the weights that the manifest names, if it can read them.

    Raises:
        SetupError: as `open_start`.
    """
    if (folder is not None or not can_start(run)) and (found := open_start(run, folder)) is not None:
        start_from(run, found)


def _read(at: str, file: str, first: int = 0, end: int | None = None) -> bytearray:
    """Raises OSError: it cannot be had, as `peers.storage.fetch.read` says."""
    for left in reversed(range(ATTEMPTS)):
        try:
            return fetch.read(f"{at}/{file}", first, end, most=MAX_HEADER_BYTES)
        except OSError as error:
            if not left or not fetch.may_come(at, error):
                raise
    raise AssertionError
