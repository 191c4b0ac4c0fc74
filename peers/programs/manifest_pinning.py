"""Binding a written manifest to its data and model, before it is published."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.errors import SetupError
from swarm.installed import ENTRY_POINTS, check_allowed, import_file, is_file_name
from swarm.manifest import CustomModelSpec, Run

if TYPE_CHECKING:
    from peers.storage.dataset import Dataset
    from peers.storage.samples import Samples


MAX_TOLD = 20
"""Names of weights, in an error."""


def pinned(
    run: Run, files: Sequence[str | Path] = (), tokenizer: Path | None = None, start: Path | None = None,
    eval_files: Sequence[str | Path] = (),
) -> Run:  # fmt: skip
    """`run` with what is open filled in, as it is on this machine.

    Args:
        files: what it is trained on, as `peers.storage.samples.open_data` takes it with the tokenizer; and
            `eval_files` what it is evaluated on, if it is.
        start: the folder of the weights that it starts from, if its manifest names none of a hub.

    Raises:
        SetupError: the data cannot be read, or are not what is pinned; the model cannot be built, is not what
            is pinned, or does not take these data; or the weights cannot be read, or are not of that model.
    """
    from peers.storage.samples import open_data, open_eval, pinned_eval

    data = open_data(run, files, tokenizer)
    run = pinned_eval(data.pinned(run), open_eval(run, eval_files, tokenizer))
    if isinstance(run.model, CustomModelSpec):
        run = _with_model(run, data)
    if run.start.weights or start is not None:
        run = _with_start(run, start)
    _check_names(run)
    return run


def _check_names(run: Run) -> None:
    """Raises SetupError: the optimizer names weights that the model does not train; says which it does."""
    patterns = run.optimizer.patterns
    if not any(patterns.values()):
        return
    from swarm.model.layout import stage_layout

    spans = {name: span for stage in range(run.S) for name, span in stage_layout(run, stage).spans.items()}
    for key, names in patterns.items():
        dims = 2 if key == "muon" else 0
        there = [name for name, span in spans.items() if len(span.shape) == dims or not dims]
        for pattern in names:
            if not fnmatch.filter(there, pattern):
                kind = "weight of two dimensions" if dims else "weight"
                more = " …" if len(there) > MAX_TOLD else ""
                raise SetupError(
                    f"optimizer.{key}: {pattern!r} matches no {kind} that is trained; there are "
                    f"{', '.join(there[:MAX_TOLD])}{more}"
                )


def _with_model(run: Run, data: Dataset | Samples) -> Run:
    from peers.storage.samples import Samples
    from swarm.data import sample_offsets
    from swarm.model.custom import custom_model, model_inputs, pin_model

    if not (isinstance(run.model, CustomModelSpec) and run.model.pinned):
        run = pin_model(run)
    if isinstance(data, Samples):
        model_inputs(run, data.batch(sample_offsets(run, 0, 0)))
        for taken, (value, sample) in zip(custom_model(run).inputs, data.largest, strict=True):
            if value >= taken.below > 0:
                raise SetupError(
                    f"sample {sample} of {run.data.code} has {value} for the model's input {taken.name}, "
                    f"which takes 0 to {taken.below - 1}: the model looks it up in something of that size"
                )
    return run


def _with_start(run: Run, folder: Path | None) -> Run:
    from peers.storage.start_weights import open_start
    from swarm.model.layout import start_digest, start_from, start_tensors

    read = open_start(run, folder)
    if read is None:
        raise SetupError('start.weights = "folder" in the run\'s manifest: give the folder with --start')
    start_from(run, read)
    starts = (start_tensors(run, stage) for stage in range(run.S))
    digests = tuple(start_digest(start, start.__getitem__) for start in starts)
    run = replace(run, start=replace(run.start, digests=digests))
    start_from(run, read)
    return run


def check_code(run: Run, allow_code: Sequence[str]) -> None:
    """Import the files that the user was handed for this run.

    Raises:
        SetupError: a manifest names code that neither the user nor its package lets it name; or a file is not
            the one that it means, or fails.
    """
    files = {Path(word).stem: Path(word) for word in allow_code if is_file_name(word)}
    declared = [entry.value for entry in entry_points(group=ENTRY_POINTS)] if run.code else []
    check_allowed(run.code, (*allow_code, *files, *declared))
    model = run.model
    source, version = (model.source, model.version) if isinstance(model, CustomModelSpec) else ("", "")
    for spec in run.code:
        name = spec.partition(":")[0]
        if name in files:
            import_file(files[name], version if spec == source else "")
