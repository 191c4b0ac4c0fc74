"""`swarm generate`: a model from checkpoints continues a text. Needs no network and no other peer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from peers.disk.checkpoint import load, load_manifest, newest_common_step
from peers.disk.dataset import open_tokenizer
from swarm.errors import SetupError
from swarm.model.generate import generate
from swarm.model.stage import StageCompute
from swarm.run import OptimizerSpec, Run, check_id


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """What to continue, and with which weights."""

    checkpoint_dir: Path
    """Holds the checkpoints of every stage."""
    run: str | None = None
    """Run id; None: the only one in the folder."""
    tokenizer: Path | None = None
    prompt: str = "The "
    tokens: int = 200
    temperature: float = 0.8
    seed: int = 0


def find_run(folder: Path, run_id: str | None) -> Run:
    """The run whose checkpoints are in `folder`.

    Raises:
        SetupError: none is, or several are and `run_id` does not say which.
    """
    if run_id is None:
        found = sorted(path.parent.name for path in folder.glob("*/run.toml"))
        if not found:
            raise SetupError(f"no checkpoints in {folder}: give the --checkpoint-dir of a peer")
        if len(found) > 1:
            raise SetupError(
                f"{folder} has checkpoints of several runs, say which: --run {' or '.join(found)}"
            )
        run_id = found[0]
    return check_id(load_manifest(folder, run_id), run_id)


def weights_by_name(run: Run, vectors: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters by full name from each stage's flat `weights` vector.

    Raises:
        Refused: a vector does not fit its stage.
    """
    # Only the weights are wanted: without an optimizer's vectors beside them, any device will do.
    plain = replace(run, optimizer=OptimizerSpec(name="sgd", lr=1.0), delayed_updates=False)
    found: dict[str, torch.Tensor] = {}
    for stage in range(run.S):
        compute = StageCompute(plain, stage)
        compute.load_state(0, {"weights": vectors[stage]})
        found.update(compute.named_weights())
    return found


def newest_weights(folder: Path, run: Run) -> tuple[int, dict[str, torch.Tensor]]:
    """(step, weights by name) of the newest step that all stages have in `folder`.

    Raises:
        SetupError: there is none; says which stages are there.
    """
    step = newest_common_step(folder, run)
    if step is None:
        raise SetupError(
            f"{folder} has no step that all {run.S} stages of run {run.id} were saved at: "
            "collect the checkpoint folders of one peer of each stage in one place"
        )
    return step, weights_by_name(run, {s: load(folder, run, s, step)[0]["weights"] for s in range(run.S)})


def run_generate(options: GenerateOptions) -> None:
    """Print the prompt and its continuation."""
    run = find_run(options.checkpoint_dir, options.run)
    tokenizer = open_tokenizer(run, options.tokenizer)
    _, weights = newest_weights(options.checkpoint_dir, run)
    prompt = tokenizer.encode(options.prompt)
    more = generate(run, weights, prompt, options.tokens, options.temperature, options.seed)
    print(options.prompt + tokenizer.decode(more))
