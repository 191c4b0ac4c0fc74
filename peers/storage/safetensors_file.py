"""Safetensors files: written in one pass with their digest, read with nothing believed.

Written by ourselves and not by the library, because that one needs a second pass for the digest, holds all
tensors at once, and reports a full disk in words of its own. The format: 8 bytes of length, that much JSON,
then the buffers without gaps, those of large elements first so that all are aligned.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from peers.storage import atomic_file
from swarm.errors import MALFORMED, SetupError
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


def unheard(what: object) -> None:
    """Progress, or a word, that is not shown."""


class Damaged(SetupError):
    """A file that cannot be used; the text says which, why, and what to do."""


class FileKind(NamedTuple):
    """A kind of such files, for errors."""

    name: str
    remedy: str

    def damaged(self, path: Path, why: str) -> Damaged:
        return Damaged(f"the {self.name} file {path} is damaged: {why}. {self.remedy}")

    def unreadable(self, path: Path, error: OSError) -> Damaged:
        return Damaged(f"cannot read {path}: {error.strerror or error}. {self.remedy}")


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
    file: Any, shapes: Mapping[str, torch.Tensor], value: Callable[[str], torch.Tensor],
    metadata: Mapping[str, str], *, progress: Progress = unheard,
) -> tuple[str, int]:  # fmt: skip
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
        end = at + shapes[name].nbytes
        header[name] = msgspec.to_builtins(info(shapes[name])) | {"data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()

    def append(block: bytes | memoryview) -> None:
        for start in range(0, len(block), atomic_file.CHUNK_BYTES):
            part = block[start : start + atomic_file.CHUNK_BYTES]
            digest.update(part)
            atomic_file.write_all(file, part)
            progress(len(part))

    append(len(text).to_bytes(8, "little") + text)
    for name in order:
        tensor = value(name)
        assert info(tensor) == info(shapes[name])
        append(bytes_of(tensor))
    return digest.hexdigest(), 8 + len(text) + at


def to_json(value: msgspec.Struct) -> bytes:
    """The JSON that describes such a file."""
    return json.dumps(msgspec.to_builtins(value), indent=1, allow_nan=False).encode()


def read_json(kind: FileKind, path: Path, form: type[T], max_bytes: int) -> T:
    """The JSON that describes such a file.

    Raises:
        Damaged: it cannot be read, is too long, no `form`, or of another format than this version's.
        FileNotFoundError: it is not there.
    """
    try:
        with path.open("rb") as file:
            text = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise kind.unreadable(path, error) from None
    if len(text) > max_bytes:
        raise kind.damaged(path, f"longer than {max_bytes} bytes")
    try:
        value = msgspec.json.decode(text, type=form)
    except MALFORMED as error:
        raise kind.damaged(path, str(error)[:200]) from None
    if value.format != FORMAT:
        raise Damaged(f"{path} has format {value.format}; this version reads format {FORMAT}: update it")
    return value


def verify(kind: FileKind, path: Path, sha256: str, bytes: int, progress: Progress = unheard) -> None:
    """Check that the file has the digest and the size that were told of it.

    Raises:
        Damaged: it has not, or cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size != bytes:
                raise kind.damaged(path, f"{size} bytes long, not {bytes}")
            while chunk := file.read(atomic_file.CHUNK_BYTES):
                digest.update(chunk)
                progress(len(chunk))
    except OSError as error:
        raise kind.unreadable(path, error) from None
    if digest.hexdigest() != sha256:
        raise kind.damaged(path, "its bytes are not those that were saved (SHA-256 differs)")


def read(
    kind: FileKind, path: Path, told: Described, expected: tuple[str, Mapping[str, TensorInfo]], *,
    only: Collection[str] | None = None, progress: Progress = unheard,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """The tensors of a file, verified; on the CPU, and finite.

    Args:
        expected: all tensors that it must hold, and what says so.
        only: names of those that are returned; None: all.

    Raises:
        Damaged: it is not what was told or expected, or a number is not finite.
    """
    verify(kind, path, told.sha256, told.bytes, progress)
    by, infos = expected
    try:
        with safe_open(path, "pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it is no dict
            found = {
                name: TensorInfo(part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()
            }
            if strange := {described.dtype for described in found.values()} - set(DTYPES.values()):
                raise kind.damaged(path, f"it holds tensors of {sorted(strange)}")
            if found != infos:
                names = sorted(name for name in {*found, *infos} if found.get(name) != infos.get(name))
                raise kind.damaged(path, f"its tensors are not those {by}: {', '.join(names[:5])[:200]}")
            tensors = {name: file.get_tensor(name) for name in found if only is None or name in only}
    except (SafetensorError, OSError) as error:
        raise kind.damaged(path, f"not a safetensors file: {str(error)[:200]}") from None
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise kind.damaged(path, f"{name} is not finite")
    return tensors
