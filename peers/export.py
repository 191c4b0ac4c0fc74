"""`swarm export`: the stages of a checkpoint become one model file. Needs no network and no other peer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from peers.disk import model_file
from peers.disk.model_file import ModelConfig
from peers.progress import Bar
from peers.weights import find_run, model_shapes, read_stage, stages_bytes, with_step
from swarm.errors import SetupError
from swarm.ids import Stage
from swarm.model.layout import stage_layout
from swarm.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Which checkpoint, and where to."""

    checkpoint_dir: Path
    """Holds the checkpoints of every stage."""
    out: Path
    """A `.safetensors` file; its JSON is written beside it."""
    run: str | None = None
    """Run id; None: the only one in the folder."""
    step: int | None = None
    """None: the newest that all stages have."""


def run_export(options: ExportOptions) -> None:
    """Write the model and say what it is."""
    if options.out.suffix != model_file.SUFFIX:
        raise SetupError(f"--out {options.out} must end in {model_file.SUFFIX}")
    run = find_run(options.checkpoint_dir, options.run)
    config = export(options.checkpoint_dir, run, options.step, options.out)
    where = model_file.config_path(options.out).name
    print(f"wrote {options.out} ({config.bytes / 1e6:.1f} MB) and {where}")
    print(f"run {run.name} {run.id}, step {config.step}, {config.parameters / 1e6:,.1f} M parameters")
    if run.model.kind == "gpt":
        words = "" if run.data.tokenizer == "bytes" else " --tokenizer tokenizer.json"
        print(f"try it: swarm generate --model {options.out}{words} 'The '")


def export(folder: Path, run: Run, step: int | None, out: Path) -> ModelConfig:
    """Merge the stages' weights into `out`, one stage in memory at a time.

    Raises:
        SetupError: no complete step, a damaged one, or no room. What `out` was before is intact.
    """
    shapes = model_shapes(run)
    stage_of = {name: stage for stage in range(run.S) for name in stage_layout(run, stage).spans}

    def merge(step: int) -> ModelConfig:
        held: tuple[Stage, Mapping[str, torch.Tensor]] = (-1, {})

        def value(name: str) -> torch.Tensor:
            nonlocal held
            if stage_of[name] != held[0]:
                held = (-1, {})  # not two stages at once
                held = (stage_of[name], read_stage(folder, run, stage_of[name], step, progress=bar))
            return held[1][name]

        written = sum(tensor.numel() * tensor.element_size() for tensor in shapes.values())
        with Bar(f"exporting step {step}", stages_bytes(folder, run, step) + written) as bar:
            return model_file.write(out, run, step, shapes, value, progress=bar)

    return with_step(folder, run, step, merge)
