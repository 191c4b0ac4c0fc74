"""Trained weights from this machine's disk: a model file, or the checkpoints of all stages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from peers.options import WeightsOptions
from peers.progress import Bar
from peers.storage import checkpoint, model_file
from peers.storage.safetensors_file import Damaged, Progress, unheard
from peers.storage.start_weights import offer_start
from swarm.errors import SetupError, printable, stages_named
from swarm.ids import Stage
from swarm.manifest import Run, check_id
from swarm.model.gpt import weights_dtype
from swarm.model.layout import empty_state, stage_layout

T = TypeVar("T")

PARTS = ("weights", "statistics")
"""Of a stage's state: what the model is."""


class Weights(NamedTuple):
    """A model that was read."""

    run: Run
    step: int
    by_name: dict[str, torch.Tensor]


def say(text: str) -> None:
    """A word aside, for people."""
    print(printable(text), file=sys.stderr)


def find_weights(options: WeightsOptions) -> Run:
    """Of which run the weights are; the command line has either a model or a folder of checkpoints.

    Raises:
        SetupError: the options do not say it, or contradict one another.
    """
    if options.model is not None:
        if options.run is not None or options.step is not None:
            raise SetupError("--run and --step choose among checkpoints: leave them out with --model")
        return model_file.read_config(options.model)[1]
    assert options.checkpoint_dir is not None
    return find_run(options.checkpoint_dir, options.run)


def load_weights(options: WeightsOptions) -> Weights:
    """The weights of all stages, and batch norms' statistics, on the CPU.

    Raises:
        SetupError: they are missing, damaged or not all there; says what to do.
    """
    run = find_weights(options)
    offer_start(run, options.start)
    if options.model is not None:
        with Bar(f"reading {options.model.name}", options.model.stat().st_size) as bar:
            config, run, weights = model_file.read(options.model, model_shapes, progress=bar)
        return Weights(run=run, step=config.step, by_name=weights)
    assert options.checkpoint_dir is not None
    folder = options.checkpoint_dir

    def read(step: int) -> Weights:
        found: dict[str, torch.Tensor] = {}
        with Bar(f"reading step {step}", stages_bytes(folder, run, step)) as bar:
            for stage in range(run.S):
                found.update(read_stage(folder, run, stage, step, progress=bar))
        return Weights(run=run, step=step, by_name=found)

    return with_step(folder, run, options.step, read)


def model_shapes(run: Run) -> dict[str, torch.Tensor]:
    """All weights and statistics of a run by full name, stage by stage, as tensors without memory."""
    return {
        name: torch.empty(span.shape, dtype=weights_dtype(run), device="meta")
        for stage in range(run.S)
        for name, span in stage_layout(run, stage).terms.items()
    }


# --- checkpoints


def find_run(folder: Path, run_id: str | None) -> Run:
    """The run whose checkpoints are in `folder`.

    Raises:
        SetupError: none is, or several are and `run_id` does not say which.
    """
    if run_id is not None and "@" in run_id:
        raise SetupError(f"{run_id} is found in the network: of the runs in {folder} give the id (32 digits)")
    found = checkpoint.runs_in(folder)
    if not found:
        raise SetupError(
            f"no checkpoints in {folder}: give the --checkpoint-dir of a peer, the --dir of a keeper, or "
            "the folder checkpoints in that of swarm up"
        )
    if run_id is None and len(found) > 1:
        raise SetupError(f"{folder} has checkpoints of several runs, say which: --run {' or '.join(found)}")
    if run_id not in (None, *found):
        raise SetupError(f"{folder} has no checkpoints of run {run_id}, only of {' and '.join(found)}")
    run_id = run_id or found[0]
    return check_id(checkpoint.load_manifest(folder, run_id), run_id)


def with_step(folder: Path, run: Run, step: int | None, use: Callable[[int], T]) -> T:
    """`use(step)`; where none is given, of the newest that all stages have and that is whole.

    `use` raises Damaged for a step that is damaged; the next older one is then taken, and the user told.

    Raises:
        SetupError: there is none, or the step that was asked for is damaged or not complete.
    """
    by_stage = [checkpoint.found_steps(folder, run, stage) for stage in range(run.S)]
    complete = sorted(set.intersection(*map(set, by_stage)), reverse=True)
    if step is not None:
        if step not in complete:
            lacking = stages_named([stage for stage in range(run.S) if step not in by_stage[stage]])
            there = " ".join(map(str, complete)) or "none"
            raise SetupError(
                f"step {step} is not complete in {folder}: it lacks {lacking} (complete steps: {there})"
            )
        complete = [step]
    first: Damaged | None = None
    for candidate in complete:
        try:
            return use(candidate)
        except Damaged as damaged:
            first = first or damaged
            if step is None:
                say(f"step {candidate} cannot be used: {damaged.text}")
    if first is not None:
        raise first
    there = "; ".join(
        f"stage {stage}: {' '.join(map(str, steps)) or 'none'}" for stage, steps in enumerate(by_stage)
    )
    raise SetupError(
        f"{folder} has no step that all {run.S} stages of run {run.id} were saved at ({there}): "
        "give the folder of a swarm keeper, or collect those of one peer of each stage in one place"
    )


def stages_bytes(folder: Path, run: Run, step: int) -> int:
    """Of all stages' files together. Raises Damaged: an index is."""
    return sum(checkpoint.Checkpoint(folder, run, stage, step).size_bytes for stage in range(run.S))


def read_stage(
    folder: Path, run: Run, stage: Stage, step: int, *, progress: Progress = unheard
) -> Mapping[str, torch.Tensor]:
    """The weights and statistics of one stage by full name; its optimizer is verified and not held.

    Raises:
        Damaged: the file is, or it is not of this stage.
    """
    tensors = checkpoint.Checkpoint(folder, run, stage, step).load(only=PARTS, progress=progress)
    here = f"the checkpoint of stage {stage}, step {step} in {folder} holds"
    if "weights" not in tensors:
        raise Damaged(f"{here} no weights")
    expected = empty_state(run, stage)
    nothing = expected["weights"][:0]
    for name in PARTS:
        found, due = tensors.get(name, nothing), expected.get(name, nothing)
        if found.shape != due.shape or found.dtype != due.dtype:
            told = f"{name} of {list(found.shape)} numbers of {found.dtype}"
            raise Damaged(f"{here} {told}; stage {stage} has {list(due.shape)} of {due.dtype}")
    return stage_layout(run, stage).views(tensors["weights"], tensors.get("statistics"))
