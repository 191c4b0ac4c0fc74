"""Samples that code makes (images, pairs, whatever a model takes), beside the text of
`peers.storage.dataset`.

The function that the manifest names returns a sequence. It is gone through once when it is opened: all
samples have the same form, their integers fit the vocabulary, and their digest is what the manifest pins.
Each is compared again when it is used: a microbatch that is tried again has to be the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from peers.progress import Bar
from peers.storage.blocks import DEFAULT_BYTES
from peers.storage.dataset import Dataset, open_dataset
from peers.storage.tokenizer import Tokenizer
from swarm.errors import SetupError
from swarm.evaluation import check_enough, eval_data, eval_offsets, microbatches
from swarm.installed import call, first_line
from swarm.manifest import Run, pin

_DIGEST_BYTES = 16


class Samples:
    def __init__(self, run: Run, sequence: Sequence[Any]) -> None:
        """`sequence[i]`: a tuple of arrays, one for each input of the model, without the batch's dimension.

        Raises:
            SetupError: they are not of one form, or not what they may be; names the sample.
        """
        self._where, self._sequence = run.data.code, sequence
        self._forms: list[tuple[tuple[int, ...], np.dtype[Any]]] = []
        self.tokenizer = Tokenizer()
        """For generic code: there is no text."""
        self._digests = bytearray()
        """Of each sample, one behind the other."""
        self.largest: list[tuple[int, int]] = []
        """Of each array that holds integers (the largest, a sample that has it)."""
        digest = hashlib.sha256()
        with Bar(f"looking through {self._where}", len(self), unit="samples") as bar:
            for index in range(len(self)):
                arrays = self._sample(index)
                self.largest = self.largest or [(-1, 0)] * len(arrays)
                self._check_vocabulary(index, arrays, run.model.vocab_size)
                digest.update(_told_apart_by(arrays))
                self._digests += _digest(arrays)
                bar(1)
        self.sha256 = digest.hexdigest()
        """Of all numbers, in order, with their forms."""

    def _check_vocabulary(self, index: int, arrays: Sequence[np.ndarray], vocab_size: int) -> None:
        for number, array in enumerate(arrays):
            if array.dtype.kind in "iu" and array.size:
                low, high = int(array.min()), int(array.max())
                if low < 0 or high >= vocab_size:
                    hint = "; leave out labels of -100 by a mask, an input of its own" if low == -100 else ""
                    raise SetupError(
                        f"sample {index} of {self._where} holds {low if low < 0 else high}: integers "
                        f"must be 0 to {vocab_size - 1} (model.vocab_size){hint}"
                    )
                self.largest[number] = max(self.largest[number], (high, index))

    def __len__(self) -> int:
        return len(self._sequence)

    def batch(self, offsets: Sequence[int]) -> list[np.ndarray]:
        """The samples of these numbers: an array for each input of the model, [B, ...].

        Raises:
            SetupError: one is not what it was when they were opened; names the sample.
        """
        return [np.stack(arrays) for arrays in zip(*map(self._same, offsets), strict=True)]

    def pinned(self, run: Run) -> Run:
        """`run` bound to these samples: the run to publish."""
        return pin(run, self.sha256, len(self))

    def _same(self, index: int) -> list[np.ndarray]:
        arrays = self._sample(index)
        if _digest(arrays) != self._digests[index * _DIGEST_BYTES : (index + 1) * _DIGEST_BYTES]:
            raise SetupError(
                f"sample {index} of {self._where} holds other numbers than when it was opened: samples have "
                "to be the same each time. What is random in one must follow from its number: use a "
                "generator that the number seeds"
            )
        return arrays

    def _sample(self, index: int) -> list[np.ndarray]:
        """One sample, little-endian. Raises SetupError: it is not like the first."""
        here = f"sample {index} of {self._where}"
        try:
            parts = self._sequence[index]
        except Exception as error:
            raise SetupError(f"{here} cannot be had: {first_line(error)}") from error
        if not isinstance(parts, (tuple, list)) or not parts:
            raise SetupError(
                f"{here} is a {type(parts).__name__}: it must be a tuple, an array for each input"
            )
        arrays: list[np.ndarray] = []
        for part in parts:
            array = np.asarray(part)
            if array.dtype.kind not in "biuf":
                raise SetupError(f"{here} holds {array.dtype}: integers, booleans and floats can be sent")
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise SetupError(f"{here} holds numbers that are not finite")
            arrays.append(array.astype(array.dtype.newbyteorder("<"), order="C", copy=False))
        forms = [(array.shape, array.dtype) for array in arrays]
        self._forms = self._forms or forms
        if forms != self._forms:
            raise SetupError(f"{here} is {_told(forms)}, the first one {_told(self._forms)}: make them alike")
        return arrays


def open_samples(run: Run) -> Samples:
    """The samples of a run whose data.source is "code".

    Raises:
        SetupError: the function is not installed here, fails, or does not make what the manifest pins.
    """
    data = run.data
    made = call(data.code, "data")
    if not hasattr(made, "__len__") or not hasattr(made, "__getitem__"):
        raise SetupError(f"{data.code} returned a {type(made).__name__}: it must be a sequence of samples")
    if not len(made):
        raise SetupError(f"{data.code} returned no samples")
    samples = Samples(run, made)
    if data.sha256 and (data.sha256, data.tokens) != (samples.sha256, len(samples)):
        raise SetupError(
            f"these are not the data of the run: {data.code} makes {len(samples)} samples with SHA-256 "
            f"{samples.sha256} here, but the manifest pins {data.tokens} with {data.sha256}: install the "
            "version of its package that the run's owner has"
        )
    return samples


def open_data(
    run: Run, files: Sequence[str | Path] | None = None, tokenizer: str | Path | None = None,
    cache_bytes: int = DEFAULT_BYTES,
) -> Dataset | Samples:  # fmt: skip
    """What a run trains on; all else as `peers.storage.dataset.open_dataset` takes them.

    Raises:
        SetupError: as `open_dataset` and `open_samples`; or files are given where code makes samples.
    """
    if run.data.source != "code":
        return open_dataset(run, files, tokenizer, cache_bytes=cache_bytes)
    for given in (*(files or ()), *([tokenizer] if tokenizer else [])):
        raise SetupError(f"the samples of the run are made by {run.data.code}: leave {given} out")
    return open_samples(run)


# --- of an evaluation ---


def open_eval(
    run: Run, files: Sequence[str | Path], tokenizer: str | Path | None
) -> Dataset | Samples | None:
    """What a run is evaluated on; None: nothing.

    Raises:
        SetupError: it is not given, cannot be read, or is not what the manifest pins.
    """
    if not run.eval.every:
        if files:
            raise SetupError(f"--eval-data {files[0]}: the manifest of run {run.name!r} has no table [eval]")
        return None
    if run.eval.data == "files" and not files:
        raise SetupError("the manifest has a table [eval]: give the text to evaluate on with --eval-data")
    return open_data(eval_data(run), files, tokenizer if run.eval.data == "files" else None)


def fetch_eval(run: Run, data: Dataset | Samples | None) -> None:
    """Have all tokens of an evaluation here before a step waits for them. Raises SetupError, NotNow."""
    if isinstance(data, Dataset):
        for e in range(microbatches(run)):
            data.bring(eval_offsets(run, e))


def pinned_eval(run: Run, data: Dataset | Samples | None) -> Run:
    """`run` bound to the data of its evaluation. Raises SetupError: they have too few samples."""
    if data is None:
        return run
    found = data.pinned(eval_data(run)).data
    run = replace(run, eval=replace(run.eval, sha256=found.sha256, tokens=found.tokens))
    check_enough(run)
    return run


def _told_apart_by(arrays: Sequence[np.ndarray]) -> bytes:
    """All of a sample: its forms and numbers."""
    return b"".join(f"{array.dtype.str} {array.shape}\n".encode() + array.tobytes() for array in arrays)


def _digest(arrays: Sequence[np.ndarray]) -> bytes:
    return hashlib.blake2b(_told_apart_by(arrays), digest_size=_DIGEST_BYTES).digest()


def _told(forms: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in forms)
