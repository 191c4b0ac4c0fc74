"""What trained weights become, and know of a text: `swarm export`, `swarm eval` and `swarm generate`.

The stages of a checkpoint become one model file, or a folder for transformers. Needs no network, unless the
checkpoint is fetched from the peers of a run first.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shlex
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import torch

from peers.clock import now_s
from peers.device import choose_device
from peers.events import Emit, Event, Note
from peers.ports import Directory, Transport
from peers.programs.manifest_pinning import check_code
from peers.programs.tool_options import EvalOptions, ExportOptions, GenerateOptions, ModelOptions
from peers.progress import Bar
from peers.start_line import program
from peers.storage import RESULTS_ENV, atomic_file, model_file, results_folder, weights
from peers.storage.dataset import Dataset
from peers.storage.model_file import ModelConfig
from peers.storage.samples import Samples, open_data
from peers.storage.tokenizer import Tokenizer, open_tokenizer
from peers.storage.weights import Weights, find_weights, load_weights, say
from peers.system import usable_cores
from swarm.errors import SetupError, printable
from swarm.evaluation import mean_loss, spread
from swarm.ids import Stage
from swarm.manifest import Run
from swarm.model.evaluate import generate, loss_of
from swarm.model.layout import stage_layout
from swarm.policy.keeping import newest_common

Options = TypeVar("Options", bound=ModelOptions)
COLLECT_S = 15.0


def run_export(options: ExportOptions) -> None:
    """Write the model and say what it is."""
    out, folder = options.out, options.hf or options.adapter
    if out is not None:  # before a model is fetched
        if out.suffix != model_file.SUFFIX:
            raise SetupError(f"--out {out} must end in {model_file.SUFFIX}")
        if options.model is not None:
            raise SetupError("a model file is made of checkpoints: give --checkpoint-dir and --out")
        if options.tokenizer is not None:
            raise SetupError("a model file holds no tokenizer: leave --tokenizer out, or export with --hf")
    with fetched(options) as (found, run):
        if folder is not None:
            export_folder(found, run, folder)
            return
        assert out is not None and found.checkpoint_dir is not None, "as the command line asks for"
        config = export(found.checkpoint_dir, run, found.step, out)
    print(f"wrote {out} ({config.bytes / 1e6:.1f} MB) and {model_file.config_path(out).name}")
    print(f"run {run.name} {run.id}, step {config.step}, {config.parameters / 1e6:,.1f} M parameters")
    if run.model.kind == "gpt":
        words = "" if run.data.tokenizer == "bytes" else " --tokenizer tokenizer.json"
        print(f"try it: {program()} generate --model {shlex.quote(str(out))}{words} 'The '")


class NoRoom(SetupError):
    """The disk is full."""


async def collect(
    run: Run, transport: Transport, directory: Directory, folder: Path, emit: Emit, *,
    limit_s: float = COLLECT_S,
) -> int:  # fmt: skip
    """Fetch the newest version that is available for all stages into `folder`, and return it.

    Tries again for `limit_s`: a directory that was opened a moment ago may know half of the peers.

    Raises:
        SetupError: no peer gives it; says of which stage.
        NoRoom: the folder has too little.
    """
    from peers.transfer.keeper import POLL_S, CheckpointKeeper, KeepingSettings

    chosen_by = RESULTS_ENV if results_folder() in (folder, folder.parent) else "TMPDIR"
    settings = KeepingSettings(folder=folder, remedy=f"set {chosen_by} to another folder")

    def hear(event: Event) -> None:
        if not keeper.full:  # that is an error here
            emit(event)

    keeper = CheckpointKeeper(run, transport, directory, settings, hear)
    until, said = now_s() + limit_s, False
    while True:
        await directory.lookup_all()
        await keeper.fetch()
        if keeper.full:
            raise NoRoom(keeper.full)
        newest = newest_common(keeper.offers)
        if newest is not None and newest == keeper.version:
            return newest
        there = "; ".join(
            f"stage {stage}: {' '.join(map(str, versions)) or 'none'}"
            for stage, versions in keeper.offers.items()
        )
        words = f"no version of all stages could be fetched (on offer: {there})"
        if now_s() >= until:
            raise SetupError(
                f"{words}. Before its end a run offers what a keeper or peers with a --checkpoint-dir save "
                "every checkpoint_every steps: start one"
            )
        if not said:
            emit(Note(text=f"{words}: asked again for {limit_s:.0f} s"))
        said = True
        await asyncio.sleep(POLL_S)


@contextlib.contextmanager
def fetched(options: Options) -> Iterator[tuple[Options, Run]]:
    """These options, and the run that the weights are of, whose code was imported. Where they name a peer of
    it, its newest version is on this machine for as long as the block runs.

    Raises:
        SetupError: no peer answers, or none can give a version of some stage; says which. The options do not
            say which weights, or the code is another's.
    """
    if not options.join:
        run = find_weights(options)
        check_code(run, options.allow_code)
        yield options, run
        return
    if options.run is None:
        raise SetupError("--join needs --run: both are in the file of a bootstrap's --join-file, @FILE")
    if options.step is not None:
        raise SetupError(
            "--step chooses among checkpoints of --checkpoint-dir: with --join leave it out, and the newest "
            "version that all stages have is fetched"
        )
    from peers.net.node import Node
    from peers.programs.roles import manifest

    called, results = options.run, results_folder()
    if results is not None:
        results.mkdir(parents=True, exist_ok=True)

    async def fetch(folder: Path) -> tuple[Run, int]:
        async with Node(join=options.join, run_id=called) as node:
            run = await manifest(node, options.allow_code)
            if results is not None:
                _take_over(results / run.id, folder / run.id)
            network = node.transport, node.directory
            return run, await collect(run, *network, folder, lambda event: say(event.words()))

    with tempfile.TemporaryDirectory(prefix="swarm-", dir=results) as name:
        run, step = asyncio.run(fetch(Path(name)))
        yield replace(options, join=(), checkpoint_dir=Path(name), run=run.id, step=step), run


def _take_over(saved: Path, folder: Path) -> None:
    """Have what a peer of this machine saved in a folder of its own, too: it need not come again."""
    unfinished = shutil.ignore_patterns(f"{atomic_file.TEMPORARY}*")
    with contextlib.suppress(OSError):
        shutil.copytree(saved, folder, copy_function=os.link, ignore=unfinished)


def export_folder(options: ExportOptions, run: Run, folder: Path) -> None:
    """Write the folder for transformers or peft, and say how it is loaded."""
    from peers.programs import pretrained

    (pretrained.check if options.hf else pretrained.check_adapter)(folder, run)  # before weights are read
    model = weights.load_weights(options)
    if options.hf:
        auto = pretrained.write(folder, run, model.step, model.by_name, options.tokenizer)
        parameters = sum(tensor.numel() for tensor in model.by_name.values())
        what, call = f"{parameters / 1e6:,.1f} M parameters", f"transformers.{auto}.from_pretrained("
    else:
        pretrained.write_adapter(folder, run, model.step, model.by_name)
        what, call = f"rank {run.lora.rank}", "peft.PeftModel.from_pretrained(MODEL, "
    print(f"wrote {folder}: run {run.name} {run.id}, step {model.step}, {what}")
    print(f'try it: {call}"{folder}")')


def export(folder: Path, run: Run, step: int | None, out: Path) -> ModelConfig:
    """Merge the stages' weights into `out`, one stage in memory at a time. Raises SetupError: no complete
    step, a damaged one, or no room. What `out` was before is intact."""
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


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """What `swarm eval` found."""

    run: str
    step: int
    loss: float
    """Mean, in nats a token; or whatever the model's loss is."""
    perplexity: float | None = None
    """Of text, as the next: None where code makes the samples."""
    bits_per_byte: float | None = None
    """Comparable between tokenizers."""
    samples: int
    tokens: int | None = None
    bytes: int | None = None
    """Of the text behind those tokens; where a token is a part of a character, its replacement's."""
    seconds: float


def run_generate(options: GenerateOptions) -> None:
    """Print the prompt and its continuation."""
    device = choose_device(options.device)
    model = _model(options)
    tokenizer = open_tokenizer(model.run, options.tokenizer)
    prompt = tokenizer.encode(options.prompt)
    how = options.tokens, options.temperature, options.seed, device
    with Bar("generating", options.tokens, unit="tokens") as bar:
        more = generate(model.run, model.by_name, prompt, *how, progress=bar)
    print(options.prompt + printable(tokenizer.decode(more)))  # those that trained it chose what it says


def _model(options: ModelOptions) -> Weights:
    with fetched(options) as (found, _):
        return load_weights(found)


def run_eval(options: EvalOptions) -> None:
    device = choose_device(options.device)
    model = _model(options)
    text = open_text(model.run, options.data, options.tokenizer)
    threads = (options.threads or usable_cores()) if device == "cpu" else 1
    found = evaluate(model, text, options.samples, device, threads=threads)
    if options.json:
        print(msgspec.json.encode(found).decode())  # what is not finite becomes null
        return
    where = ", ".join(str(path).rpartition("/")[2] for path in options.data) or "its training's data"
    run, words, size = model.run, "", ""
    if run.data.source != "code":
        words = f", perplexity {found.perplexity:.4g}, {found.bits_per_byte:.4f} bits per byte"
        size = f" of {run.data.sequence_length} tokens"
    print(
        f"loss {found.loss:.4f}{words}\n"
        f"run {run.name} {run.id}, step {found.step}; {found.samples} samples{size} from {where}"
    )


def open_text(run: Run, files: tuple[Path | str, ...], tokenizer: Path | None) -> Dataset | Samples:
    """The run's own text, or any other in the run's tokens; of a run whose samples code makes, samples.
    Raises SetupError: it cannot be read, is too short, or is not what the run pins."""
    if not files:
        return open_data(run, files, tokenizer)
    if run.data.source == "code":
        code, *more = files
        if more:
            raise SetupError("samples are made by one function: give one package.module:function with --data")
        return open_data(replace(run, data=replace(run.data, code=str(code), sha256="", tokens=0)))
    other = replace(run, data=replace(run.data, source="files", sha256="", tokens=0, root="", mixture=""))
    return open_data(other, files, tokenizer)


def evaluate(
    model: Weights, text: Dataset | Samples, samples: int, device: str = "cpu", *, threads: int = 1
) -> Evaluation:
    """The mean loss over samples spread evenly over the text; a function of them, however many the `threads`.

    Raises:
        SetupError: the weights are not of a model with a loss, or do not fit the run.
    """
    began, run = time.monotonic(), model.run
    loss_of_rows, made = loss_of(run, model.by_name, device), isinstance(text, Samples)
    there = len(text) if isinstance(text, Samples) else text.tokens
    offsets = spread(there, 1 if made else run.data.sequence_length + 1, samples)
    size_bytes, batch = 0, run.batch.microbatch_size
    losses = list[float]()
    batches = [offsets[start : start + batch] for start in range(0, len(offsets), batch)]
    reading = threading.Lock()

    def loss_and_bytes(some: list[int]) -> tuple[float, int]:
        with reading:  # samples may be made by a user's code
            rows = text.batch(some)
        return loss_of_rows(rows), 0 if made else sum(_bytes_of(text.tokenizer, row[1:]) for row in rows)

    at_once = max(1, threads // run.batch.microbatch_threads)
    with Bar("evaluating", len(offsets), unit="samples") as bar, ThreadPoolExecutor(at_once) as pool:
        for some, (loss, read) in zip(batches, pool.map(loss_and_bytes, batches), strict=True):
            losses.append(loss)
            size_bytes += read
            bar(len(some))
    loss, of_text = mean_loss(losses, [len(some) for some in batches]), {}
    if not made:
        tokens = len(offsets) * run.data.sequence_length
        of_text = {
            "perplexity": math.exp(loss) if loss < 700 else loss * math.inf,
            "bits_per_byte": loss * tokens / math.log(2) / size_bytes if size_bytes else math.inf,
            "tokens": tokens,
            "bytes": size_bytes,
        }
    told = {**of_text, "samples": len(offsets), "seconds": time.monotonic() - began}
    return Evaluation(run=run.id, step=model.step, loss=loss, **told)  # type: ignore


def _bytes_of(tokenizer: Tokenizer, labels: np.ndarray) -> int:
    """Of the text that tokens stand for."""
    if tokenizer.key == "bytes":
        return len(labels)
    return len(tokenizer.decode(labels.tolist()).encode("utf-8", "replace"))
