"""What the codecs of `codec.reduce` that round save, and cost: bytes of a reduce, CPU, the loss beside none.

    python scripts/bench/loss/rounded_sums.py --model demo llama-10M --text tinyshakespeare.txt
    python scripts/bench/loss/rounded_sums.py --model demo --text tinyshakespeare.txt --seed 1 --steps 10

The demo's model or a preset, in one stage and one process (`SingleProcess`), which arrives at what every
swarm with that manifest arrives at. A seed draws weights, samples and what is rounded; both codecs of a seed
see the same samples. `up` is what one of two replicas sends for each number of its sum, that of the first
half of a step's microbatches, `down` the answer for all of them; on average over the steps after the first,
which has columns of its own. `loss` is the mean of the last `--last` steps, `above_none` the mean difference
over seeds, with its least and its largest.

CPU: nanoseconds of one core for each number, by `process_time`, the least of five.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.bench.common.arguments import parser_of
from scripts.bench.common.harness import machine, report
from swarm.codecs import ROUNDED
from swarm.manifest import PRESETS, BatchSpec, DataSpec, ModelSpec, OptimizerSpec, Run, demo_run

COLUMNS = (
    *("model", "reduce", "weights", "first_up", "first_down", "up", "down"),
    *("loss", "above_none", "from", "to", "add_ns", "pack_ns", "unpack_ns"),
)
REDUCES = ("none", "rounded16", "rounded8")


class Trained(NamedTuple):
    """What one run came to."""

    numel: int
    up: list[float]
    """Bytes a number, by step."""
    down: list[float]
    losses: list[float]
    """By step."""


def run_of(model: str, reduce: str, text: Path, *, seed: int, steps: int, microbatches: int) -> Run:
    """The run of that model in one stage, not pinned; each microbatch has 4 × 128 tokens."""
    base = demo_run(stages=1, steps=steps, seed=seed)
    shape = base.built_in if model == "demo" else ModelSpec(**PRESETS[model], stages=1)
    return replace(
        base,
        model=replace(shape, stages=1),
        data=DataSpec(source="files", sequence_length=128),
        batch=BatchSpec(microbatch_size=4, microbatches_per_step=microbatches),
        optimizer=OptimizerSpec(lr=1e-3, warmup_steps=min(10, steps - 1), schedule="cosine"),
        codec=replace(base.codec, reduce=reduce),
    )


def train(run: Run, text: Path, *, rounded: bool) -> Trained:
    """Do all steps."""
    import torch

    from peers.storage.dataset import open_dataset
    from swarm.model.reference import SingleProcess
    from swarm.wire import whole_numbers

    data = open_dataset(run, [text])
    single = SingleProcess(data.pinned(run), data.batch)
    stage = single.stages[0]
    found = Trained(stage.layout.sum_numel, [], [], [])

    def bytes_each() -> float:
        sums = stage._sums  # type: ignore
        flat = torch.zeros(found.numel, dtype=torch.int64)
        for name, (start, end, _) in stage.layout.terms.items():
            flat[start:end] = sums[name]
        return sum(len(memoryview(buffer)) for buffer in whole_numbers.pack(flat)) / found.numel

    m = 0  # microbatches of this step

    def passed(more: int) -> None:
        nonlocal m
        m += more
        if m == run.M // 2:
            found.up.append(bytes_each())
        if m == run.M:
            found.down.append(bytes_each() if rounded else 4.0)

    for _ in range(run.steps):
        m = 0
        squares = single.compute(passed)
        found.losses.append(statistics.fmean(single._losses))  # type: ignore
        single.take(squares)
    return found


def cpu_ns(numel: int, kept_bits: int) -> dict[str, float]:
    """Of one core for each number: to add a gradient to a sum, to pack the sum, and to unpack it."""
    import torch

    from swarm.model.fixed_point import Rounded, add_exact, blocks_of, dropped_after
    from swarm.wire import whole_numbers

    term = torch.randn(numel, generator=torch.Generator().manual_seed(1)) * 1e-4
    total = torch.zeros(numel, dtype=torch.int64)
    dropped = dropped_after(8 * term, torch.zeros(blocks_of(numel), dtype=torch.uint8), kept_bits)
    how = Rounded(dropped, 12345) if kept_bits else None
    add = least_ns(lambda: add_exact(total, term, how), numel)
    packed = whole_numbers.pack(total)
    return {
        "add_ns": add,
        "pack_ns": least_ns(lambda: whole_numbers.pack(total), numel),
        "unpack_ns": least_ns(lambda: whole_numbers.unpack(packed, numel), numel),
    }


def least_ns(job: Callable[[], object], numel: int) -> float:
    """CPU time of a job for each of so many numbers."""
    took: list[float] = []
    for _ in range(5):
        began = time.process_time()
        job()
        took.append(time.process_time() - began)
    return round(1e9 * min(took) / numel, 2)


def row_of(model: str, reduce: str, by_seed: dict[int, Trained], plain: dict[int, Trained], last: int) -> Any:
    """The figures of one model and codec over all seeds."""

    def end(trained: Trained) -> float:
        return statistics.fmean(trained.losses[-last:])

    def mean(values: Sequence[float]) -> float:
        return round(statistics.fmean(values), 2)

    above = [end(trained) - end(plain[seed]) for seed, trained in by_seed.items() if seed in plain]
    each = list(by_seed.values())
    return {
        "model": model,
        "reduce": reduce,
        "weights": each[0].numel,
        "first_up": mean([one.up[0] for one in each]),
        "first_down": mean([one.down[0] for one in each]),
        "up": mean([x for one in each for x in one.up[1:]]),
        "down": mean([x for one in each for x in one.down[1:]]),
        "loss": round(statistics.fmean(map(end, each)), 4),
        "above_none": round(statistics.fmean(above), 4) if above else None,
        "from": round(min(above), 4) if above else None,
        "to": round(max(above), 4) if above else None,
        "losses": {str(seed): round(end(trained), 4) for seed, trained in by_seed.items()},
        **cpu_ns(1 << 20, ROUNDED.get(reduce, 0)),
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", nargs="+", default=["demo"], help="demo, or a preset (default: demo)")
    parser.add_argument("--text", type=Path, required=True, help="to train on")
    parser.add_argument("--seed", nargs="+", type=int, default=[1, 2, 3], help="(default: 1 2 3)")
    parser.add_argument("--steps", type=int, default=40, help="(default: 40)")
    parser.add_argument("--microbatches", type=int, default=4, help="of a step (default: 4)")
    parser.add_argument("--last", type=int, default=5, help="steps whose mean is the loss (default: 5)")
    options = parser.parse_args(arguments)
    if not 0 < options.last < options.steps or options.microbatches < 2:
        parser.error("--last must be less than --steps, and --microbatches at least 2")
    return options


def main() -> None:
    options = parse()
    import torch

    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for model in options.model:
        found: dict[str, dict[int, Trained]] = {reduce: {} for reduce in REDUCES}
        for seed in options.seed:
            for reduce in REDUCES:
                sizes = {"seed": seed, "steps": options.steps, "microbatches": options.microbatches}
                run = run_of(model, reduce, options.text, **sizes)
                trained = found[reduce][seed] = train(run, options.text, rounded=reduce != "none")
                print(
                    f"{model}, seed {seed}, {reduce}: {trained.losses[-1]:.4f}", file=sys.stderr, flush=True
                )
        rows += [row_of(model, reduce, found[reduce], found["none"], options.last) for reduce in REDUCES]
    said = {"steps": options.steps, "microbatches": options.microbatches, "last": options.last}
    report(
        rows, COLUMNS, f"{machine()}\nbytes and CPU-ns a number, loss after equal steps; {json.dumps(said)}"
    )


if __name__ == "__main__":
    main()
