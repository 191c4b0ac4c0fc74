"""Checkpoints: per stage and step, a safetensors file and a JSON index that vouches for it.

    FOLDER/RUN-ID/run.toml                       the manifest: with it the folder alone resumes the run
    FOLDER/RUN-ID/step-000000040/stage-2.json    the index: size, SHA-256 and tensors of the file below
    FOLDER/RUN-ID/step-000000040/stage-2-DIGEST.safetensors

The index is renamed into place after the tensors are on the disk, so a checkpoint exists exactly when its
index does. The tensors' file has its digest in its name: two members of a stage that save the same step at
the same time write the same file, or two files, but never a mixture.

A checkpoint may come from a stranger: sizes, names, shapes and digest are checked before a tensor is
believed, and nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from peers.disk import atomic
from swarm.errors import SetupError
from swarm.ids import Stage
from swarm.run import Run

MAX_INDEX_BYTES = 1 << 20
"""A stage has a handful of flat tensors: their index is under 2 kB. The rest is room for `meta`."""

KEEP = 3
"""Steps kept per stage. Two would do if all stages saved at the same instant; the third is for a laggard."""

# Names of the safetensors format.
_DTYPES: dict[torch.dtype, str] = {
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


class _Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]


class _Index(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: int
    run: str
    stage: int
    step: int
    bytes: int
    sha256: str
    tensors: dict[str, _Tensor]
    meta: dict[str, Any]


def save(
    folder: str | Path,
    run: Run,
    stage: Stage,
    step: int,
    tensors: dict[str, torch.Tensor],
    meta: dict[str, Any],
    *,
    keep: int = KEEP,
) -> Path:
    """Write the checkpoint of `stage` at weight version `step`; older ones beyond `keep` are removed.

    The newest step that every stage has in `folder` is never removed, however many newer ones there are.

    Args:
        tensors: any shapes; the dtypes of safetensors.
        meta: JSON values.

    Returns:
        The path of the index.

    Raises:
        SetupError: it could not be written; earlier checkpoints are as they were, nothing is left behind.
    """
    root = Path(folder) / run.id
    where = root / _step_name(step)
    written: Path | None = None
    try:
        where.mkdir(parents=True, exist_ok=True)
        manifest = root / "run.toml"
        if not manifest.exists():
            atomic.write_whole(manifest, run.to_toml().encode())
        with atomic.replacing(where) as (file, temporary):
            digest, size = _write_tensors(file, tensors, run, stage, step)
            written = where / _tensors_name(stage, digest)
            atomic.commit(file, temporary, written)
        index = _Index(
            format=1,
            run=run.id,
            stage=stage,
            step=step,
            bytes=size,
            sha256=digest,
            tensors={name: _described(tensor) for name, tensor in tensors.items()},
            meta=meta,
        )
        path = where / _index_name(stage)
        atomic.write_whole(path, json.dumps(msgspec.to_builtins(index), indent=1, allow_nan=False).encode())
    except OSError as error:
        _tidy(where, run, stage, step, written)
        raise atomic.trouble(
            f"cannot save the checkpoint of stage {stage}, step {step}",
            Path(folder),
            error,
            "choose another --checkpoint-dir. Earlier checkpoints are intact",
        ) from None
    _prune(root, run, stage, keep)
    return path


def newest_common_step(folder: str | Path, run: Run) -> int | None:
    """The newest step of which the files of all stages are there and whole; None if there is none.

    Reads the files to verify their digests, newest step first, and stops at the first whole one.
    """
    root = Path(folder) / run.id
    stages = range(run.S)
    for step in sorted(_steps_of(root, stages), reverse=True):
        if all(_is_whole(root, run, stage, step) for stage in stages):
            return step
    return None


def saved_steps(folder: str | Path, run: Run, stage: Stage) -> list[int]:
    """The steps of which `stage` has a whole checkpoint here, newest first: for who keeps one stage only."""
    root = Path(folder) / run.id
    steps = sorted(_steps_of(root, [stage]), reverse=True)
    return [step for step in steps if _is_whole(root, run, stage, step)]


def load(
    folder: str | Path, run: Run, stage: Stage, step: int
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors (on the CPU) and the `meta` that were saved.

    Raises:
        SetupError: missing, of another run, damaged, or not finite. Says which file, and what to do.
    """
    where = Path(folder) / run.id / _step_name(step)
    index = _read_index(where, run, stage, step)
    path = where / _tensors_name(stage, index.sha256)
    _verify(path, index)
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise _damaged(path, f"not a safetensors file: {str(error)[:200]}") from None
    known = all(tensor.dtype in _DTYPES for tensor in tensors.values())
    if not known or {name: _described(tensor) for name, tensor in tensors.items()} != index.tensors:
        raise _damaged(path, "its tensors are not those that its index lists")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise _damaged(path, f"{name} is not finite")
    return tensors, index.meta


def load_manifest(folder: str | Path, run_id: str) -> str:
    """The text of the manifest that was saved with the checkpoints; check it with `swarm.run.check_id`."""
    path = Path(folder) / run_id / "run.toml"
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"cannot read the manifest of run {run_id} from {path}: {error}") from None


# --- names


def _step_name(step: int) -> str:
    return f"step-{step:09d}"


def _index_name(stage: Stage) -> str:
    return f"stage-{stage}.json"


def _tensors_name(stage: Stage, digest: str) -> str:
    return f"stage-{stage}-{digest[:16]}.safetensors"


def _steps_of(root: Path, stages: Iterable[Stage]) -> list[int]:
    """Steps that have an index of each of `stages`, whole or not."""
    steps: list[int] = []
    with contextlib.suppress(OSError):
        for path in root.iterdir():
            match = re.fullmatch(r"step-(\d{9,12})", path.name)
            if match and all((path / _index_name(stage)).exists() for stage in stages):
                steps.append(int(match[1]))
    return steps


# --- writing


def _write_tensors(
    file: Any, tensors: dict[str, torch.Tensor], run: Run, stage: Stage, step: int
) -> tuple[str, int]:
    """Write a safetensors file; returns its SHA-256 and size.

    Ours and not the library's, because that one needs a second pass for the digest, and reports a full disk
    in words of its own. The format: 8 bytes of length, that much JSON, then the buffers without gaps, those
    of large elements first so that all are aligned.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"run": run.id, "stage": str(stage), "step": str(step)}}
    at = 0
    for name in order:
        described, size = _described(tensors[name]), tensors[name].numel() * tensors[name].element_size()
        header[name] = {
            "dtype": described.dtype,
            "shape": list(described.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest, written = hashlib.sha256(), 0
    for piece in (len(text).to_bytes(8, "little"), text, *(_raw(tensors[name]) for name in order)):
        for start in range(0, len(piece), atomic.CHUNK_BYTES):
            part = piece[start : start + atomic.CHUNK_BYTES]
            digest.update(part)
            atomic.write_all(file, part)
        written += len(piece)
    return digest.hexdigest(), written


def _raw(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _described(tensor: torch.Tensor) -> _Tensor:
    return _Tensor(dtype=_DTYPES[tensor.dtype], shape=tuple(tensor.shape))


def _tidy(where: Path, run: Run, stage: Stage, step: int, written: Path | None) -> None:
    """After a failed save: remove the tensors that no index names, and folders that we made for nothing."""
    if written is not None and not _is_whole(where.parent, run, stage, step):
        with contextlib.suppress(OSError):
            written.unlink()
    for empty in (where, where.parent):  # rmdir refuses a folder with anything in it
        with contextlib.suppress(OSError):
            empty.rmdir()


def _prune(root: Path, run: Run, stage: Stage, keep: int) -> None:
    """Remove what this stage no longer needs. Failing to is no reason to stop training."""
    mine = sorted(_steps_of(root, [stage]), reverse=True)
    common = max(_steps_of(root, range(run.S)), default=None)
    for step in mine[max(1, keep) :]:
        if step == common:
            continue
        where = root / _step_name(step)
        # The index first: without it the rest is no checkpoint, so a kill in between leaves no half of one.
        for path in (where / _index_name(stage), *where.glob(f"stage-{stage}-*.safetensors")):
            with contextlib.suppress(OSError):
                path.unlink()
        with contextlib.suppress(OSError):
            where.rmdir()


# --- reading


def _read_index(where: Path, run: Run, stage: Stage, step: int) -> _Index:
    path = where / _index_name(stage)
    try:
        with path.open("rb") as file:
            text = file.read(MAX_INDEX_BYTES + 1)
    except FileNotFoundError:
        raise SetupError(
            f"there is no checkpoint of stage {stage}, step {step} of run {run.id} in {where}"
        ) from None
    except OSError as error:
        raise SetupError(f"cannot read {path}: {error.strerror or error}") from None
    if len(text) > MAX_INDEX_BYTES:
        raise _damaged(path, f"longer than {MAX_INDEX_BYTES} bytes")
    try:
        index = msgspec.json.decode(text, type=_Index)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(path, str(error)[:200]) from None
    if index.format != 1:
        raise SetupError(f"{path} has format {index.format}; this version reads format 1: update it")
    if index.run != run.id:
        raise SetupError(
            f"{path} is of run {index.run[:80]}, not of run {run.id}: choose another --checkpoint-dir"
        )
    if (index.stage, index.step) != (stage, step):
        raise _damaged(path, f"it speaks of stage {index.stage}, step {index.step}")
    if not re.fullmatch(r"[0-9a-f]{64}", index.sha256):
        raise _damaged(path, "its digest is not 64 hex digits")
    return index


def _verify(path: Path, index: _Index) -> None:
    """The tensors' file has the size and the digest of its index."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size != index.bytes:
                raise _damaged(path, f"{size} bytes long, not {index.bytes}")
            while chunk := file.read(atomic.CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise SetupError(f"cannot read {path}: {error.strerror or error}. {_AGAIN}") from None
    if digest.hexdigest() != index.sha256:
        raise _damaged(path, "its bytes are not those that were saved (SHA-256 differs)")


def _is_whole(root: Path, run: Run, stage: Stage, step: int) -> bool:
    where = root / _step_name(step)
    try:
        index = _read_index(where, run, stage, step)
        _verify(where / _tensors_name(stage, index.sha256), index)
    except SetupError:
        return False
    return True


_AGAIN = "Remove that step's folder to resume from an older one"


def _damaged(path: Path, why: str) -> SetupError:
    return SetupError(f"the checkpoint file {path} is damaged: {why}. {_AGAIN}")
