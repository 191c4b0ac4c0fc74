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
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import torch

from peers.storage import atomic_file, safetensors_file
from peers.storage.safetensors_file import Damaged, Progress, TensorInfo, unheard
from swarm.errors import SetupError
from swarm.ids import Stage
from swarm.manifest import Run

MAX_INDEX_BYTES = 1 << 20
"""A stage has a handful of flat tensors: their index is under 2 kB. The rest is room for `meta`."""

MAX_WRITES = 5
"""Replicas that share a folder on a full disk remove it under one another when their saves fail."""

KEEP = 3
"""Steps kept per stage. Two would do if all stages saved at the same instant; the third is for a laggard."""


Tell: TypeAlias = Callable[[str], None]


def unheard_of(text: str) -> None:
    """For callers that treat a damaged checkpoint as none."""


class _Index(safetensors_file.Described, frozen=True, kw_only=True, forbid_unknown_fields=True):
    stage: int
    tensors: dict[str, TensorInfo]
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
    together: Collection[Stage] | None = None,
    option: str = "--checkpoint-dir",
) -> Path:
    """Write the checkpoint of `stage` at weight version `step`; older ones beyond `keep` are removed.

    The newest step that every stage has in `folder` is never removed, however many newer ones there are; nor
    is the one just written, which may be an old one that completes a step.

    Args:
        tensors: any shapes; the dtypes of safetensors.
        meta: JSON values.
        together: the stages that are kept in this folder; None: all of the run.
        option: what the user chose `folder` with, for errors.

    Returns:
        The path of the index.

    Raises:
        SetupError: it could not be written; earlier checkpoints are as they were, nothing is left behind.
    """
    root = Path(folder) / run.id
    where = root / _step_name(step)
    for attempt in range(MAX_WRITES):
        try:
            path = _write(where, run, stage, step, tensors, meta)
            break
        except OSError as error:
            if isinstance(error, FileNotFoundError) and attempt + 1 < MAX_WRITES:
                continue
            raise atomic_file.trouble(
                f"cannot save the checkpoint of stage {stage}, step {step}",
                Path(folder),
                error,
                f"choose another {option}. Earlier checkpoints are intact",
            ) from None
    _prune(root, run, stage, step, keep, range(run.S) if together is None else together)
    return path


def _write(
    where: Path, run: Run, stage: Stage, step: int, tensors: dict[str, torch.Tensor], meta: dict[str, Any]
) -> Path:
    """The tensors' file, then the index that makes it a checkpoint. A failed write leaves nothing behind."""
    written: Path | None = None
    try:
        where.mkdir(parents=True, exist_ok=True)
        manifest = where.parent / "run.toml"
        if not manifest.exists():
            atomic_file.write_whole(manifest, run.to_toml().encode())
        with atomic_file.replacing(where) as (file, temporary):
            origin = {"run": run.id, "stage": str(stage), "step": str(step)}
            in_order = dict(sorted(tensors.items()))  # the same bytes from every replica
            digest, size = safetensors_file.write(file, in_order, tensors.__getitem__, origin)
            written = where / _tensors_name(stage, digest)
            atomic_file.commit(file, temporary, written)
        index = _Index(
            format=safetensors_file.FORMAT,
            run=run.id,
            stage=stage,
            step=step,
            bytes=size,
            sha256=digest,
            tensors={name: safetensors_file.info(tensor) for name, tensor in tensors.items()},
            meta=meta,
        )
        path = where / _index_name(stage)
        safetensors_file.write_json(path, index)
    except OSError:
        _tidy(where, run, stage, step, written)
        raise
    return path


def newest_common_step(folder: str | Path, run: Run, *, tell: Tell = unheard_of) -> int | None:
    """The newest step of which the files of all stages are there and whole; None if there is none.

    Reads the files to verify their digests, newest step first, and stops at the first whole one.

    Args:
        tell: told of each newer step that is passed over: which file, and what is wrong with it.
    """
    root = Path(folder) / run.id
    stages = range(run.S)
    for step in sorted(_steps_of(root, stages), reverse=True):
        if all(_is_whole(root, run, stage, step, tell) for stage in stages):
            return step
    return None


def saved_steps(folder: str | Path, run: Run, stage: Stage, *, tell: Tell = unheard_of) -> list[int]:
    """The steps of which `stage` has a whole checkpoint here, newest first: for peers that keep one stage.

    Each file is read once to verify it, and again only when it changed. `tell`: told of each damaged one.
    """
    root = Path(folder) / run.id
    steps = sorted(_steps_of(root, [stage]), reverse=True)
    return [step for step in steps if _is_whole(root, run, stage, step, tell)]


def other_runs(folder: str | Path, run: Run) -> list[str]:
    """Ids of the other runs that have checkpoints in `folder`, sorted."""
    with contextlib.suppress(OSError):
        found = [path.name for path in Path(folder).iterdir() if (path / "run.toml").is_file()]
        return sorted(name for name in found if name != run.id)
    return []


def found_steps(folder: str | Path, run: Run, stage: Stage) -> list[int]:
    """The steps of which `stage` has an index here, newest first. Nothing is read: `check` or `load` does."""
    return sorted(_steps_of(Path(folder) / run.id, [stage]), reverse=True)


def check(folder: str | Path, run: Run, stage: Stage, step: int) -> None:
    """Read a checkpoint through, unless it was before and is unchanged.

    Raises:
        SetupError: missing, of another run, or damaged. Says which file, and what to do.
    """
    where = Path(folder) / run.id / _step_name(step)
    index = _read_index(where, run, stage, step)
    _verify_once(where / _tensors_name(stage, index.sha256), index)


def load(
    folder: str | Path,
    run: Run,
    stage: Stage,
    step: int,
    *,
    only: Collection[str] | None = None,
    progress: Progress = unheard,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors (on the CPU) and the `meta` that were saved.

    Args:
        only: names of tensors; the others are verified and not held. None: all.
        progress: told the size of each part of the file that was verified.

    Raises:
        SetupError: missing, of another run, damaged, or not finite. Says which file, and what to do.
    """
    where = Path(folder) / run.id / _step_name(step)
    index = _read_index(where, run, stage, step)
    path = where / _tensors_name(stage, index.sha256)
    _verify(path, index.sha256, index.bytes, progress)

    def wanted(found: Mapping[str, TensorInfo]) -> list[str]:
        if found != index.tensors:
            raise Damaged("its tensors are not those that its index lists")
        return [name for name in found if only is None or name in only]

    try:
        tensors = safetensors_file.read(path, wanted)
    except Damaged as damaged:
        raise _damaged(path, str(damaged)) from None
    return tensors, index.meta


def size_bytes(folder: str | Path, run: Run, stage: Stage, step: int) -> int:
    """How long the file of the tensors is, by its index.

    Raises:
        SetupError: there is no index, or it is damaged.
    """
    return _read_index(Path(folder) / run.id / _step_name(step), run, stage, step).bytes


def load_manifest(folder: str | Path, run_id: str) -> str:
    """The text of the manifest that was saved with the checkpoints; check it with
    `swarm.manifest.check_id`."""
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


def _tidy(where: Path, run: Run, stage: Stage, step: int, written: Path | None) -> None:
    """After a failed save: remove the tensors that no index names, and folders that we made for nothing."""
    if written is not None and not _is_whole(where.parent, run, stage, step):
        with contextlib.suppress(OSError):
            written.unlink()
    for empty in (where, where.parent):  # rmdir refuses a folder with anything in it
        with contextlib.suppress(OSError):
            empty.rmdir()


def _prune(root: Path, run: Run, stage: Stage, written: int, keep: int, together: Collection[Stage]) -> None:
    """Remove what this stage no longer needs. Failing to is no reason to stop training.

    What is damaged at first sight counts for nothing: it neither stands for a step nor makes one go.
    """
    mine = sorted(_steps_of(root, [stage]), reverse=True)
    whole = [step for step in mine if _seems_whole(root, run, stage, step)]
    shared = sorted(_steps_of(root, together), reverse=True)
    common = next((step for step in shared if all(_seems_whole(root, run, s, step) for s in together)), None)
    kept = whole[: max(1, keep)]
    for step in mine:
        if step in (common, written) or not kept or step >= kept[-1]:
            continue
        where = root / _step_name(step)
        # The index first: without it the rest is no checkpoint, so a kill in between leaves no half of one.
        doomed = [where / _index_name(stage)]
        with contextlib.suppress(OSError):  # replicas that save to the same folder prune it too
            doomed += where.glob(f"stage-{stage}-*.safetensors")
        for path in doomed:
            with contextlib.suppress(OSError):
                path.unlink()
        with contextlib.suppress(OSError):
            where.rmdir()


# --- reading


def _read_index(where: Path, run: Run, stage: Stage, step: int) -> _Index:
    path = where / _index_name(stage)
    try:
        index = safetensors_file.read_json(path, _Index, MAX_INDEX_BYTES)
    except FileNotFoundError:
        raise SetupError(
            f"there is no checkpoint of stage {stage}, step {step} of run {run.id} in {where}"
        ) from None
    except Damaged as damaged:
        raise _damaged(path, str(damaged)) from None
    if index.run != run.id:
        raise SetupError(
            f"{path} is of run {index.run[:80]}, not of run {run.id}: choose another --checkpoint-dir"
        )
    if (index.stage, index.step) != (stage, step):
        raise _damaged(path, f"it speaks of stage {index.stage}, step {index.step}")
    if not re.fullmatch(r"[0-9a-f]{64}", index.sha256):
        raise _damaged(path, "its digest is not 64 hex digits")
    return index


def _verify(path: Path, sha256: str, expected_bytes: int, progress: Progress = unheard) -> None:
    """The tensors' file has the size and the digest of its index."""
    try:
        safetensors_file.verify(path, sha256, expected_bytes, progress)
    except Damaged as damaged:
        raise _damaged(path, str(damaged)) from None
    except OSError as error:
        raise SetupError(f"cannot read {path}: {error.strerror or error}. {_AGAIN}") from None


def _verify_once(path: Path, index: _Index) -> None:
    """`_verify`, unless this very file was found whole before: a keeper is asked often."""
    try:
        now = path.stat()
    except OSError as error:
        raise SetupError(f"cannot read {path}: {error.strerror or error}. {_AGAIN}") from None
    _verified(path, now.st_ino, now.st_size, now.st_mtime_ns, index.sha256, index.bytes)


@lru_cache(maxsize=4096)  # what raises is not remembered
def _verified(path: Path, inode: int, size: int, mtime_ns: int, sha256: str, expected_bytes: int) -> None:
    _verify(path, sha256, expected_bytes)


def _is_whole(root: Path, run: Run, stage: Stage, step: int, tell: Tell = unheard_of) -> bool:
    where = root / _step_name(step)
    try:
        index = _read_index(where, run, stage, step)
        _verify_once(where / _tensors_name(stage, index.sha256), index)
    except SetupError as error:
        tell(error.text)
        return False
    return True


def _seems_whole(root: Path, run: Run, stage: Stage, step: int) -> bool:
    """As `_is_whole` without reading the tensors: a good index, and a file of its length."""
    where = root / _step_name(step)
    try:
        index = _read_index(where, run, stage, step)
        return (where / _tensors_name(stage, index.sha256)).stat().st_size == index.bytes
    except (SetupError, OSError):
        return False


_AGAIN = "Remove that step's folder to resume from an older one"


def _damaged(path: Path, why: str) -> SetupError:
    return SetupError(f"the checkpoint file {path} is damaged: {why}. {_AGAIN}")
