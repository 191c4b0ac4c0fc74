"""Checkpoints: per stage and step, a safetensors file and a JSON index that vouches for it.

    FOLDER/RUN-ID/run.toml                       the manifest: with it the folder alone resumes the run
    FOLDER/RUN-ID/step-000000040/stage-2.json    the index: size, SHA-256 and tensors of the file below
    FOLDER/RUN-ID/step-000000040/stage-2-DIGEST.safetensors

The index is renamed into place last, so a checkpoint exists exactly when its index does. With the digest in
its name two members of a stage that save at the same time write the same file, or two files, but never a
mixture. One may come from a stranger: sizes, names, shapes and digest are checked before a tensor is
believed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import torch

from peers.storage import atomic_file, safetensors_file
from peers.storage.safetensors_file import Damaged, Progress, TensorInfo, unheard
from swarm.errors import SetupError
from swarm.ids import Stage
from swarm.manifest import Run
from swarm.wire.trails import Word

MAX_INDEX_BYTES = 1 << 20
"""A stage has a handful of flat tensors: their index is under 2 kB."""

MAX_WRITES = 5
"""Replicas that share a folder on a full disk remove it under one another when their saves fail."""

KEEP = 3
"""Steps kept per stage. Two would do if all stages saved at the same instant; the third is for a laggard."""

Tell: TypeAlias = Callable[[str], None]
_KIND = safetensors_file.FileKind("checkpoint", "Remove that step's folder to resume from an older one")

_VOICED = "voiced"
"""In the index: false if no peer with voice said that it is the state of its version."""


class _Index(safetensors_file.Described, frozen=True, kw_only=True, forbid_unknown_fields=True):
    stage: int
    tensors: dict[str, TensorInfo]
    meta: dict[str, Any] = msgspec.field(default_factory=dict)
    """Others may put there what they like; only `_VOICED` is read."""
    signed: tuple[Word, ...] = ()
    """What peers signed of the step that left this state."""


class Checkpoint:
    """What is saved of one stage at one step, if anything is. `folder`: of all runs."""

    def __init__(self, folder: str | Path, run: Run, stage: Stage, step: int) -> None:
        self._all, self._run, self._stage, self._step = Path(folder), run, stage, step
        self._root = self._all / run.whole.id
        self._folder = self._root / f"step-{step:09d}"
        self.path = self._folder / f"stage-{stage}.json"
        """Of the index."""

    def _tensors_path(self, digest: str) -> Path:
        return self._folder / f"stage-{self._stage}-{digest[:16]}.safetensors"

    def _index(self) -> _Index:
        """Raises: Damaged."""
        path, run = self.path, self._run
        try:
            index = safetensors_file.read_json(_KIND, path, _Index, MAX_INDEX_BYTES)
        except FileNotFoundError:
            raise Damaged(
                f"there is no checkpoint of stage {self._stage}, step {self._step} of run {run.whole.id} "
                f"in {self._folder}"
            ) from None
        if index.run != run.whole.id:
            raise Damaged(
                f"{path} is of run {index.run[:80]}, not of run {run.whole.id}: choose another folder"
            )
        if (index.stage, index.step) != (self._stage, self._step):
            raise _KIND.damaged(path, f"it speaks of stage {index.stage}, step {index.step}")
        if not re.fullmatch(r"[0-9a-f]{64}", index.sha256):
            raise _KIND.damaged(path, "its digest is not 64 hex digits")
        return index

    def is_whole(self, tell: Tell = unheard) -> bool:
        """Whether it is there, of this run and undamaged; `tell`: why not. It is read, unless this very file
        was found whole before: a keeper is asked often.
        """
        try:
            index = self._index()
            path = self._tensors_path(index.sha256)
            try:
                now = path.stat()
            except OSError as error:
                raise _KIND.unreadable(path, error) from None
            _verified(path, now.st_ino, now.st_size, now.st_mtime_ns, index.sha256, index.bytes)
        except Damaged as damaged:
            tell(damaged.text)
            return False
        return True

    def _seems_whole(self) -> bool:
        """As `is_whole` without reading the tensors: a good index, and a file of its length."""
        with contextlib.suppress(Damaged, OSError):
            index = self._index()
            return self._tensors_path(index.sha256).stat().st_size == index.bytes
        return False

    @property
    def voiced(self) -> bool:
        """Whether it is this peer's own work, or a peer with voice gave it; see `swarm.protocol.voice`."""
        with contextlib.suppress(Damaged):
            return self._index().meta.get(_VOICED) is not False
        return False

    @property
    def signed(self) -> tuple[Word, ...]:
        """What peers signed of the step that left this state, as it was saved with it."""
        with contextlib.suppress(Damaged):
            return self._index().signed
        return ()

    @property
    def size_bytes(self) -> int:
        """How long the file of the tensors is, by its index.

        Raises:
            Damaged: there is no index, or it is damaged.
        """
        return self._index().bytes

    def load(
        self, *, only: Collection[str] | None = None, progress: Progress = unheard
    ) -> dict[str, torch.Tensor]:
        """The tensors that were saved, on the CPU.

        Args:
            only: names of tensors; the others are verified and not held. None: all.
            progress: told the size of each part of the file that was verified.

        Raises:
            Damaged: missing, of another run, damaged, or not finite. Says which file, and what to do.
        """
        index = self._index()
        expected, path = ("that its index lists", index.tensors), self._tensors_path(index.sha256)
        return safetensors_file.read(_KIND, path, index, expected, only=only, progress=progress)

    def save(
        self, tensors: dict[str, torch.Tensor], *, keep: int = KEEP,
        together: Collection[Stage] | None = None, voiced: bool = True, signed: Sequence[Word] = (),
    ) -> None:  # fmt: skip
        """Write it; older ones of the stage beyond `keep` are removed, and before them those without voice.

        The newest step that every stage has in the folder is never removed, however many newer ones there
        are; nor is this one, which may be an old one that completes a step.

        Args:
            tensors: any shapes; the dtypes of safetensors.
            together: the stages that are kept in this folder; None: all of the run.
            voiced: it is this peer's own work, or a peer with voice gave or signed it.

        Raises:
            SetupError: it could not be written; earlier checkpoints are as they were, nothing is left behind.
        """
        what = f"cannot save the checkpoint of stage {self._stage}, step {self._step}"
        then = "choose another folder. Earlier checkpoints are intact"
        with atomic_file.as_setup_error(what, then, folder=self._all):
            for attempt in range(MAX_WRITES):
                try:
                    self._write(tensors, meta={} if voiced else {_VOICED: False}, signed=tuple(signed))
                    break
                except (FileNotFoundError, FileExistsError):  # gone while it was made, or looked at
                    if attempt + 1 == MAX_WRITES:
                        raise
        self._prune(keep, range(self._run.S) if together is None else together)

    def _write(self, tensors: dict[str, torch.Tensor], **also: Any) -> None:
        """The tensors' file, then the index that makes it a checkpoint. A failed write leaves nothing."""
        where, run, written = self._folder, self._run, None
        try:
            where.mkdir(parents=True, exist_ok=True)
            manifest = self._root / "run.toml"
            if not manifest.exists():
                atomic_file.write_whole(manifest, run.whole.to_toml().encode())
            with atomic_file.replacing(where) as (file, temporary):
                origin = {"run": run.whole.id, "stage": str(self._stage), "step": str(self._step)}
                in_order = dict(sorted(tensors.items()))  # the same bytes from every replica
                digest, size = safetensors_file.write(file, in_order, tensors.__getitem__, origin)
                written = self._tensors_path(digest)
                atomic_file.commit(file, temporary, written)
            index = _Index(
                format=safetensors_file.FORMAT, run=run.whole.id, stage=self._stage, step=self._step,
                bytes=size, sha256=digest,
                tensors={name: safetensors_file.info(tensor) for name, tensor in tensors.items()}, **also,
            )  # fmt: skip
            atomic_file.write_whole(self.path, safetensors_file.to_json(index))
        except OSError:
            if written is not None and not self.is_whole():
                atomic_file.unlink(written)
            for empty in (where, self._root):  # rmdir refuses a folder with anything in it
                with contextlib.suppress(OSError):
                    empty.rmdir()
            raise

    def _prune(self, keep: int, together: Collection[Stage]) -> None:
        """Remove what this stage no longer needs. Failing to is no reason to stop training.

        What is damaged at first sight counts for nothing: it neither stands for a step nor makes one go. Nor
        does a version without voice, as soon as there is one with it.
        """
        mine = _saved(self._all, self._run, [self._stage])
        whole = [step for step, (one,) in mine.items() if one._seems_whole()]
        voiced = [step for step in whole if mine[step][0].voiced]
        shared = _saved(self._all, self._run, together)
        common = [step for step, all_ in shared.items() if all(one._seems_whole() for one in all_)]
        believed = [step for step in common if all(one.voiced for one in shared[step])]
        kept = {self._step, *(believed or common)[:1]}
        ranked = (voiced or whole)[: max(1, keep)]
        for step, (one,) in mine.items():
            displaced = bool(voiced) and step in whole and step not in voiced
            if step not in kept and ranked and (step < ranked[-1] or displaced):
                one._remove()

    def _remove(self) -> None:
        """The index first: without it the rest is no checkpoint, so a kill in between leaves no half."""
        atomic_file.unlink(self.path)
        with contextlib.suppress(OSError):  # replicas that save to the same folder prune it too
            atomic_file.unlink(*self._folder.glob(f"stage-{self._stage}-*.safetensors"))
            self._folder.rmdir()


@lru_cache(maxsize=4096)  # what raises is not remembered
def _verified(path: Path, inode: int, size: int, mtime_ns: int, sha256: str, expected_bytes: int) -> None:
    safetensors_file.verify(_KIND, path, sha256, expected_bytes)


def newest_common_step(folder: str | Path, run: Run, *, tell: Tell = unheard) -> int | None:
    """The newest step of which the files of all stages are there and whole; None if there is none.

    Reads the files to verify their digests, newest step first, and stops at the first whole one.

    Args:
        tell: told of each newer step that is passed over: which file, and what is wrong with it.
    """
    steps = _saved(folder, run, range(run.S)).items()
    return next((step for step, saved in steps if all(one.is_whole(tell) for one in saved)), None)


def saved_steps(folder: str | Path, run: Run, stage: Stage, *, tell: Tell = unheard) -> list[int]:
    """The steps of which `stage` has a whole checkpoint here, newest first: for peers that keep one stage.

    Each file is read once to verify it, and again only when it changed. `tell`: told of each damaged one.
    """
    return [step for step, (one,) in _saved(folder, run, [stage]).items() if one.is_whole(tell)]


def found_steps(folder: str | Path, run: Run, stage: Stage) -> list[int]:
    """The steps of which `stage` has an index here, newest first. Nothing is read."""
    return list(_saved(folder, run, [stage]))


def runs_in(folder: str | Path) -> list[str]:
    """Ids of the runs that have checkpoints in `folder`, sorted. Those that `swarm init` made have names."""
    return sorted(path.parent.name for path in Path(folder).glob("[0-9a-f]" * 32 + "/run.toml"))


def other_runs(folder: str | Path, run: Run) -> list[str]:
    """Ids of the other runs that have checkpoints in `folder`, sorted."""
    return [name for name in runs_in(folder) if name != run.whole.id]


def load_manifest(folder: str | Path, run_id: str) -> str:
    """The text of the manifest saved with the checkpoints; check it with `swarm.manifest.check_id`."""
    path = Path(folder) / run_id / "run.toml"
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"cannot read the manifest of run {run_id} from {path}: {error}") from None


def _saved(folder: str | Path, run: Run, stages: Collection[Stage]) -> dict[int, list[Checkpoint]]:
    """The steps that have an index of each of `stages`, whole or not; newest first."""
    found: dict[int, list[Checkpoint]] = {}
    with contextlib.suppress(OSError):
        for path in (Path(folder) / run.whole.id).iterdir():
            if match := re.fullmatch(r"step-(\d{9,12})", path.name):
                step = int(match[1])
                saved = [Checkpoint(folder, run, stage, step) for stage in stages]
                if all(one.path.exists() for one in saved):
                    found[step] = saved
    return dict(sorted(found.items(), reverse=True))
