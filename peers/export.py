"""`swarm export`: the stages of a checkpoint become one model file, or a folder for transformers.

Needs no network and no other peer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from peers.disk import model_file
from peers.disk.model_file import ModelConfig
from peers.progress import Bar
from peers.weights import (
    WeightsOptions,
    find_run,
    find_weights,
    load_weights,
    model_shapes,
    read_stage,
    stages_bytes,
    with_step,
)
from swarm.errors import SetupError
from swarm.ids import Stage
from swarm.model.layout import stage_layout
from swarm.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions(WeightsOptions):
    """Which weights, and where to: one of `out` and `hf`."""

    out: Path | None = None
    """A `.safetensors` file; its JSON is written beside it. Of checkpoints only."""
    hf: Path | None = None
    """A folder for `from_pretrained`."""
    tokenizer: Path | None = None
    """Its JSON, to go into `hf`."""


def run_export(options: ExportOptions) -> None:
    """Write the model and say what it is."""
    if options.hf is not None:
        run_export_hf(options, options.hf)
        return
    if options.out is None or options.checkpoint_dir is None:
        raise SetupError("a model file is made of checkpoints: give --checkpoint-dir and --out")
    if options.tokenizer is not None:
        raise SetupError("a model file holds no tokenizer: leave --tokenizer out, or export with --hf")
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


def run_export_hf(options: ExportOptions, folder: Path) -> None:
    """Write the folder and say how it is loaded."""
    from peers import pretrained

    run = find_weights(options)
    pretrained.check(folder, run)  # before the weights are read
    model = load_weights(options)
    auto = pretrained.write(folder, run, model.step, model.by_name, options.tokenizer)
    parameters = sum(tensor.numel() for tensor in model.by_name.values())
    print(f"wrote {folder}: run {run.name} {run.id}, step {model.step}, {parameters / 1e6:,.1f} M parameters")
    print(f'try it: transformers.{auto}.from_pretrained("{folder}")')


def export(folder: Path, run: Run, step: int | None, out: Path) -> ModelConfig:
    """Merge the stages' weights into `out`, one stage in memory at a time.

    Raises:
        SetupError: no complete step, a damaged one, or no room. What `out` was before is intact.
    """
    shapes = model_shapes(run)
    # A weight that several stages share is taken from the first.
    stage_of = {name: stage for stage in reversed(range(run.S)) for name in stage_layout(run, stage).terms}

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
