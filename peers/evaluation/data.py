"""The data of an evaluation, opened and pinned as those of the training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from peers.storage.dataset import Dataset
from peers.storage.samples import Samples, open_data
from swarm.errors import SetupError
from swarm.evaluation import check_enough, eval_data, eval_offsets, microbatches
from swarm.manifest import Run


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
