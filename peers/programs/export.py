"""`swarm export`: the stages of a checkpoint become one model file, or a folder for transformers.

Needs no network, unless the checkpoint is fetched from the peers of a run first.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from peers.programs.manifest_pinning import import_handed
from peers.programs.tool_options import ExportOptions, ModelOptions
from peers.progress import Bar
from peers.storage import model_file, results_folder, weights
from peers.storage.model_file import ModelConfig
from peers.storage.weights import say
from swarm.errors import SetupError
from swarm.ids import Stage
from swarm.manifest import Run
from swarm.model.layout import stage_layout

Options = TypeVar("Options", bound=ModelOptions)


def run_export(options: ExportOptions) -> None:
    """Write the model and say what it is."""
    if options.out is not None and options.out.suffix != model_file.SUFFIX:  # before a model is fetched
        raise SetupError(f"--out {options.out} must end in {model_file.SUFFIX}")
    options = fetched(options)
    if options.hf is not None:
        run_export_hf(options, options.hf)
        return
    if options.adapter is not None:
        run_export_adapter(options, options.adapter)
        return
    if options.out is None or options.checkpoint_dir is None:
        raise SetupError("a model file is made of checkpoints: give --checkpoint-dir and --out")
    if options.tokenizer is not None:
        raise SetupError("a model file holds no tokenizer: leave --tokenizer out, or export with --hf")
    run = weights.find_run(options.checkpoint_dir, options.run)
    import_handed(run, options.allow_code)
    config = export(options.checkpoint_dir, run, options.step, options.out)
    where = model_file.config_path(options.out).name
    print(f"wrote {options.out} ({config.bytes / 1e6:.1f} MB) and {where}")
    print(f"run {run.name} {run.id}, step {config.step}, {config.parameters / 1e6:,.1f} M parameters")
    if run.model.kind == "gpt":
        words = "" if run.data.tokenizer == "bytes" else " --tokenizer tokenizer.json"
        print(f"try it: swarm generate --model {options.out}{words} 'The '")


def fetched(options: Options) -> Options:
    """These options; where they name a peer of a run, its newest version is on this machine then.

    Raises:
        SetupError: no peer answers, or none can give a version of some stage; says which.
    """
    if not options.join:
        return options
    if options.run is None:
        raise SetupError("--join needs --run: both are in the file of a bootstrap's --join-file, @FILE")
    from peers.net.node import Node
    from peers.programs.roles import manifest
    from peers.transfer.keeper import collect

    called, folder = options.run, results_folder() or Path(tempfile.mkdtemp(prefix="swarm-"))

    async def fetch() -> tuple[str, int]:
        async with Node(join=options.join, run_id=called) as node:
            run = await manifest(node, options.allow_code)
            network = node.transport, node.directory
            return run.id, await collect(run, *network, folder, lambda event: say(event.words()))

    run_id, step = asyncio.run(fetch())
    return replace(options, join=(), checkpoint_dir=folder, run=run_id, step=step)


def run_export_hf(options: ExportOptions, folder: Path) -> None:
    """Write the folder and say how it is loaded."""
    from peers.programs import pretrained

    run = weights.find_weights(options)
    import_handed(run, options.allow_code)
    pretrained.check(folder, run)  # before the weights are read
    model = weights.load_weights(options)
    auto = pretrained.write(folder, run, model.step, model.by_name, options.tokenizer)
    parameters = sum(tensor.numel() for tensor in model.by_name.values())
    print(f"wrote {folder}: run {run.name} {run.id}, step {model.step}, {parameters / 1e6:,.1f} M parameters")
    print(f'try it: transformers.{auto}.from_pretrained("{folder}")')


def run_export_adapter(options: ExportOptions, folder: Path) -> None:
    """Write the folder and say how it is loaded."""
    from peers.programs import pretrained

    run = weights.find_weights(options)
    pretrained.check_adapter(folder, run)
    model = weights.load_weights(options)
    pretrained.write_adapter(folder, run, model.step, model.by_name)
    print(f"wrote {folder}: run {run.name} {run.id}, step {model.step}, rank {run.lora.rank}")
    print(f'try it: peft.PeftModel.from_pretrained(MODEL, "{folder}")')


def export(folder: Path, run: Run, step: int | None, out: Path) -> ModelConfig:
    """Merge the stages' weights into `out`, one stage in memory at a time.

    Raises:
        SetupError: no complete step, a damaged one, or no room. What `out` was before is intact.
    """
    shapes = weights.model_shapes(run)
    # A weight that several stages share is taken from the first.
    stage_of = {name: stage for stage in reversed(range(run.S)) for name in stage_layout(run, stage).terms}

    def merge(step: int) -> ModelConfig:
        held: tuple[Stage, Mapping[str, torch.Tensor]] = (-1, {})

        def value(name: str) -> torch.Tensor:
            nonlocal held
            if stage_of[name] != held[0]:
                held = (-1, {})  # not two stages at once
                held = (stage_of[name], weights.read_stage(folder, run, stage_of[name], step, progress=bar))
            return held[1][name]

        written = sum(tensor.numel() * tensor.element_size() for tensor in shapes.values())
        with Bar(f"exporting step {step}", weights.stages_bytes(folder, run, step) + written) as bar:
            return model_file.write(out, run, step, shapes, value, progress=bar)

    return weights.with_step(folder, run, step, merge)
