"""Trained weights that a run starts from: safetensors in a folder, or in a repository of Hugging Face.

Of a file only its header is read, and the bytes of the tensors that are asked for.
"""

from __future__ import annotations

import contextlib
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
import torch

from peers.storage.safetensors_file import DTYPES
from swarm.errors import SetupError
from swarm.manifest import Run
from swarm.model.layout import can_start, start_from

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
"""As `save_pretrained` names them: which file has which tensor, and a model in one file."""
MAX_HEADER_BYTES = 100_000_000
"""The library's own limit."""
HUB = "https://huggingface.co"
FETCH_S = 60.0
"""For an answer, and between two of its parts."""
ATTEMPTS = 3

Read: TypeAlias = Callable[[str, int, int | None], bytearray]
"""File, first byte, number of bytes (None: all) -> the bytes. Raises OSError or SetupError."""
_DTYPE = {name: dtype for dtype, name in DTYPES.items()}


class _Tensor(msgspec.Struct, frozen=True):
    """A tensor, as the header of its file describes it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class _Place(NamedTuple):
    file: str
    start: int
    tensor: _Tensor


class StartWeights:
    """The tensors there, by name."""

    def __init__(self, where: str, files: Sequence[str], read: Read) -> None:
        """`where`: for errors.

        Raises:
            SetupError: a file cannot be read, or is none of safetensors.
        """
        self._where, self._read = where, read
        self._places: dict[str, _Place] = {}
        for file in files:
            begin = 8 + int.from_bytes(self._bytes(file, 0, 8), "little")
            if not 8 < begin <= MAX_HEADER_BYTES:
                raise SetupError(f"{file} in {where} is no safetensors file")
            header = bytes(self._bytes(file, 8, begin - 8))
            try:
                told = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
                told.pop("__metadata__", None)
                for name, raw in told.items():
                    self._places[name] = _Place(file, begin, msgspec.json.decode(raw, type=_Tensor))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
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
        found = torch.frombuffer(self._bytes(file, begin + start, end - start), dtype=dtype).view(shape)
        if not bool(torch.isfinite(found).all()):
            raise SetupError(f"{name} in {self._where} is not finite")
        return found

    def _bytes(self, file: str, first: int, size: int) -> bytearray:
        try:
            found = self._read(file, first, size)
        except OSError as error:
            raise _unreadable(file, self._where, error) from None
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
        where, read = str(folder), _of_disk(folder if folder.is_dir() else folder.parent)
        if not folder.is_dir():
            return StartWeights(where, [folder.name], read)
    elif weights == "folder":
        return None
    else:
        where, read = weights, _of_hub(*weights.removeprefix("hf:").rsplit("@", 1))
    try:
        index = read(INDEX, 0, None)
    except FileNotFoundError:
        return StartWeights(where, [SINGLE], read)
    except OSError as error:
        raise _unreadable(INDEX, where, error) from None
    try:
        files = sorted(set(msgspec.json.decode(index, type=_Index).weight_map.values()))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SetupError(f"{INDEX} in {where} is damaged: {str(error)[:100]}") from None
    if wrong := [file for file in files if file != Path(file).name]:
        raise SetupError(f"{INDEX} in {where} names {wrong[0]!r}, which is no file there")
    return StartWeights(where, files, read)


def offer_start(run: Run, folder: Path | None) -> None:
    """Have this process start from the weights that the manifest names, if it can read them.

    Raises:
        SetupError: as `open_start`.
    """
    if (folder is not None or not can_start(run)) and (found := open_start(run, folder)) is not None:
        start_from(run, found)


def _unreadable(file: str, where: str, error: OSError) -> SetupError:
    why = error.strerror or error
    hint = "save the model with transformers' save_pretrained"
    return SetupError(f"{file} in {where} cannot be read: {why}; {hint}, which writes safetensors")


def _of_disk(folder: Path) -> Read:
    def read(file: str, first: int, size: int | None) -> bytearray:
        with (folder / file).open("rb") as opened:
            opened.seek(first)
            return bytearray(opened.read(-1 if size is None else size))

    return read


def _of_hub(repository: str, revision: str) -> Read:
    """Reads by ranges, as HF_ENDPOINT and HF_TOKEN say, which transformers knows too."""
    base = f"{os.environ.get('HF_ENDPOINT') or HUB}/{repository}/resolve/{revision}"

    def read(file: str, first: int, size: int | None) -> bytearray:
        request = urllib.request.Request(f"{base}/{file}")
        if size is not None:
            request.add_header("Range", f"bytes={first}-{first + size - 1}")
        if token := os.environ.get("HF_TOKEN"):
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        for left in reversed(range(ATTEMPTS)):
            with contextlib.suppress(*((OSError,) if left else ())):
                try:
                    with urllib.request.urlopen(request, timeout=FETCH_S) as answer:
                        if size is not None and answer.status != 206:
                            raise OSError(5, f"{base} gives no parts of files")
                        return bytearray(answer.read(MAX_HEADER_BYTES if size is None else size))
                except urllib.error.HTTPError as error:
                    if error.code in (404, 401, 403):
                        raise FileNotFoundError(2, f"HTTP {error.code} of {base}") from None
                    raise OSError(5, f"HTTP {error.code} of {base}") from None
        raise AssertionError

    return read
