"""`swarm eval`: how well trained weights know a text. Needs no network and no other peer."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from peers.disk.dataset import Dataset, Tokenizer, open_dataset
from peers.progress import Bar
from peers.weights import Weights, WeightsOptions, load_weights
from swarm.model.evaluate import Evaluator
from swarm.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions(WeightsOptions):
    """Which weights, and on which text."""

    tokenizer: Path | None = None
    data: tuple[Path, ...] = ()
    """Any text; empty: the text that the run trains on."""
    samples: int = 64
    device: str = "cpu"
    json: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What `swarm eval` found."""

    run: str
    step: int
    loss: float
    """Mean, in nats a token."""
    perplexity: float
    bits_per_byte: float
    """Comparable between tokenizers."""
    samples: int
    tokens: int
    bytes: int
    """Of the text behind those tokens; where a token is a part of a character, its replacement's."""
    seconds: float


def run_eval(options: EvalOptions) -> None:
    """Evaluate and print."""
    from peers.device import choose_device

    device = choose_device(options.device)
    model = load_weights(options)
    text = open_text(model.run, options.data, options.tokenizer)
    found = evaluate(model, text, options.samples, device)
    if options.json:
        print(msgspec.json.encode(found).decode())  # what is not finite becomes null
        return
    run = model.run
    where = "the text of its training" if not options.data else ", ".join(path.name for path in options.data)
    print(
        f"loss {found.loss:.4f}, perplexity {found.perplexity:.4g}, {found.bits_per_byte:.4f} bits per byte\n"
        f"run {run.name} {run.id}, step {found.step}; "
        f"{found.samples} samples of {run.data.sequence_length} tokens from {where}"
    )


def open_text(run: Run, files: tuple[Path, ...], tokenizer: Path | None) -> Dataset:
    """The run's own text, or any other in the run's tokens.

    Raises:
        SetupError: it cannot be read, is too short, or is not what the run pins.
    """
    if not files:
        return open_dataset(run, files, tokenizer)
    other = replace(run, data=replace(run.data, source="files", sha256="", tokens=0))
    return open_dataset(other, files, tokenizer)


def spread(tokens: int, window: int, samples: int) -> list[int]:
    """Where `samples` windows of `window` tokens start: evenly over the text, the first at its start.

    Fewer where the text has not so many different ones.
    """
    starts = tokens - window + 1
    count = min(samples, starts)
    return [i * starts // count for i in range(count)]


def evaluate(model: Weights, text: Dataset, samples: int, device: str = "cpu") -> Evaluation:
    """The mean loss over samples spread evenly over the text.

    Raises:
        SetupError: the weights are not of a language model, or do not fit the run.
    """
    began, run = time.monotonic(), model.run
    evaluator = Evaluator(run, model.by_name, device)
    window = run.data.sequence_length + 1
    offsets = spread(text.tokens, window, samples)
    total, size_bytes = 0.0, 0
    with Bar("evaluating", len(offsets), unit="samples") as bar:
        for rows in _batches(text, offsets, run.batch.microbatch_size):
            total += evaluator.loss(rows) * len(rows)
            size_bytes += sum(_bytes_of(text.tokenizer, row[1:]) for row in rows)
            bar(len(rows))
    loss, tokens = total / len(offsets), len(offsets) * run.data.sequence_length
    return Evaluation(
        run=run.id,
        step=model.step,
        loss=loss,
        perplexity=math.exp(loss) if loss < 700 else math.inf,
        bits_per_byte=loss * tokens / math.log(2) / size_bytes if size_bytes else math.inf,
        samples=len(offsets),
        tokens=tokens,
        bytes=size_bytes,
        seconds=time.monotonic() - began,
    )


def _batches(text: Dataset, offsets: list[int], size: int) -> Iterator[np.ndarray]:
    for start in range(0, len(offsets), size):
        yield text.batch(offsets[start : start + size])


def _bytes_of(tokenizer: Tokenizer, labels: np.ndarray) -> int:
    """Of the text that tokens stand for."""
    if tokenizer.key == "bytes":
        return len(labels)
    return len(tokenizer.decode(labels.tolist()).encode("utf-8", "replace"))
