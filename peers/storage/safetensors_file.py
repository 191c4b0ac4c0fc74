"""Safetensors files: written in one pass with their digest, read with nothing believed.

Written by ourselves and not by the library, because that one needs a second pass for the digest, holds all
tensors at once, and reports a full disk in words of its own. The format: 8 bytes of length, that much JSON,
then the buffers without gaps, those of large elements first so that all are aligned.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from peers.storage import atomic_file
from swarm.errors import SetupError
from swarm.wire.codec import bytes_of

# Names of the safetensors format.
DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.bool: "BOOL",
}

Progress = Callable[[int], None]
"""Told how many bytes were written or verified since the last time."""


def unheard(size: int) -> None:
    """Progress that is not shown."""


class Damaged(Exception):
    """A file that is not what it should be; the text says why, without the name of the file."""


class Described(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands in the JSON that describes such a file."""

    format: int
    run: str
    """The run's id."""
    step: int
    """Steps that were taken: the version of the weights."""
    sha256: str
    """Of the safetensors file."""
    bytes: int


FORMAT = 1
T = TypeVar("T", bound=Described)


class TensorInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor as the headers of such files, and our indexes, describe it."""

    dtype: str
    shape: tuple[int, ...]


def info(tensor: torch.Tensor) -> TensorInfo:
    """Of a tensor on any device, the meta device included."""
    return TensorInfo(dtype=DTYPES[tensor.dtype], shape=tuple(tensor.shape))


def write(
    file: Any,
    shapes: Mapping[str, torch.Tensor],
    value: Callable[[str], torch.Tensor],
    metadata: Mapping[str, str],
    *,
    progress: Progress = unheard,
) -> tuple[str, int]:
    """Write a safetensors file; returns its SHA-256 and size.

    Args:
        shapes: name -> a tensor of that shape and dtype, which may be one of the meta device.
        value: name -> the tensor itself; asked for one after the other, in the order of `shapes` among those
            whose elements are equally large.

    Raises:
        OSError: it could not be written.
    """
    order = sorted(shapes, key=lambda name: -shapes[name].element_size())
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name in order:
        described, size = info(shapes[name]), shapes[name].numel() * shapes[name].element_size()
        header[name] = {
            "dtype": described.dtype,
            "shape": list(described.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest, written = hashlib.sha256(), 0

    def blocks() -> Iterable[bytes | memoryview]:
        yield len(text).to_bytes(8, "little")
        yield text
        for name in order:
            tensor = value(name)
            assert info(tensor) == info(shapes[name])
            yield bytes_of(tensor)

    for block in blocks():
        for start in range(0, len(block), atomic_file.CHUNK_BYTES):
            part = block[start : start + atomic_file.CHUNK_BYTES]
            digest.update(part)
            atomic_file.write_all(file, part)
            progress(len(part))
        written += len(block)
    return digest.hexdigest(), written


def write_json(path: Path, value: msgspec.Struct) -> None:
    """Write the JSON that describes such a file, whole or not at all.

    Raises:
        OSError: it could not be written.
    """
    text = json.dumps(msgspec.to_builtins(value), indent=1, allow_nan=False)
    atomic_file.write_whole(path, text.encode())


def read_json(path: Path, kind: type[T], max_bytes: int) -> T:
    """The JSON that describes such a file.

    Raises:
        Damaged: it is too long, or no `kind`.
        SetupError: it cannot be read, or has another format than this version.
        FileNotFoundError: it is not there.
    """
    try:
        with path.open("rb") as file:
            text = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise SetupError(f"cannot read {path}: {error.strerror or error}") from None
    if len(text) > max_bytes:
        raise Damaged(f"longer than {max_bytes} bytes")
    try:
        value = msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(str(error)[:200]) from None
    if value.format != FORMAT:
        raise SetupError(f"{path} has format {value.format}; this version reads format {FORMAT}: update it")
    return value


def verify(path: Path, sha256: str, expected_bytes: int, progress: Progress = unheard) -> None:
    """The file has that size and digest.

    Raises:
        Damaged: it has not.
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = path.stat().st_size
        if size != expected_bytes:
            raise Damaged(f"{size} bytes long, not {expected_bytes}")
        while chunk := file.read(atomic_file.CHUNK_BYTES):
            digest.update(chunk)
            progress(len(chunk))
    if digest.hexdigest() != sha256:
        raise Damaged("its bytes are not those that were saved (SHA-256 differs)")


def read(path: Path, wanted: Callable[[Mapping[str, TensorInfo]], Iterable[str]]) -> dict[str, torch.Tensor]:
    """The tensors that `wanted` names, given all that the file holds; on the CPU, and finite.

    Raises:
        Damaged: not a safetensors file, or a number is not finite; or `wanted` raised it.
    """
    try:
        with safe_open(path, "pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it is no dict
            found = {
                name: TensorInfo(part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()
            }
            if strange := {described.dtype for described in found.values()} - set(DTYPES.values()):
                raise Damaged(f"it holds tensors of {sorted(strange)}")
            tensors = {name: file.get_tensor(name) for name in wanted(found)}
    except (SafetensorError, OSError) as error:
        raise Damaged(f"not a safetensors file: {str(error)[:200]}") from None
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise Damaged(f"{name} is not finite")
    return tensors
