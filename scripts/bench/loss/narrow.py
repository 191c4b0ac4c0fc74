"""What narrow boundaries cost the training: held-out loss after equal tokens, with equally many weights.

    narrow.py --text train.txt --held-out held-out.txt --out narrow.json    # 20 minutes of one core
    narrow.py --out narrow.json --slice-s 0                                 # the table of what is done so far

A decoder 256 wide on four stages of a layer each, in bfloat16 and in one process (`SingleProcess`), which
arrives at what every swarm with that manifest arrives at. A way is a codec at all boundaries, forward and
back, or `d/N+CODEC`: a bottleneck of so many channels (`model.bottleneck`), which cross in that codec; with
`@3` its own weights have three times the learning rate of the others. What a bottleneck adds in weights is
taken from the feed-forward parts. A seed draws weights and samples, so all ways of a seed see the same ones:
`above_none` is the mean over seeds of the difference to the loss without a codec, `from` and `to` its least
and its largest; `spread_of_none` is how far seeds are apart without one; `times_smaller` is than float32.

Each run that is finished is kept in `--out`, and not done again. The loss is that of held-out windows, with
codecs as in training.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np

from scripts.bench.common.arguments import parser_of
from scripts.bench.common.harness import machine, report
from scripts.bench.common.model_sizes import parameter_count
from scripts.bench.loss.codecs_loss import COLUMNS, codec_spec, crossing, rows_of
from swarm.manifest import BatchSpec, DataSpec, ModelSpec, OptimizerSpec, Run

WIDTH, LAYERS, LENGTH = 256, 4, 128
WAYS = (
    *("none", "blockwise8", "hadamard4", "topk:0.05+blockwise8"),
    *("d/8+blockwise8", "d/17+blockwise8", "d/32+blockwise8", "d/128+blockwise8"),
    *("d/17+blockwise8@3", "d/32+blockwise8@3"),
)


def with_bottleneck(model: ModelSpec, channels: int) -> ModelSpec:
    """The decoder with a bottleneck, and as many weights as before: the feed-forward parts are narrower."""
    narrow = replace(model, bottleneck=channels)
    more = parameter_count(narrow) - parameter_count(model)
    return replace(narrow, ffn_hidden=model.ffn_hidden - round(more / (2 * model.hidden * model.layers)))


def way_run(way: str, *, seed: int, steps: int, rows: int, tokens: int) -> Run:
    """The run of one way: `none`, a codec, `d/N+CODEC`, or `d/N+CODEC@MULTIPLE`."""
    way, _, multiple = way.partition("@")
    divisor, _, codec = way.removeprefix("d/").partition("+") if way.startswith("d/") else ("", "", way)
    faster = tuple(f"{part}.* lr={multiple}" for part in ("narrow", "widen")) if multiple else ()
    model = ModelSpec(
        layers=LAYERS, hidden=WIDTH, heads=4, ffn_hidden=4 * WIDTH, vocab_size=256, stages=LAYERS
    )
    if divisor:
        model = with_bottleneck(model, WIDTH // int(divisor))
    return Run(
        name="narrow", seed=seed, steps=steps, dtype="bfloat16", model=model,
        data=DataSpec(source="files", tokens=tokens, sequence_length=LENGTH),
        batch=BatchSpec(microbatch_size=rows, microbatches_per_step=1),
        optimizer=OptimizerSpec(lr=2e-3, warmup_steps=steps // 10, schedule="cosine", groups=faster),
        codec=codec_spec(codec),
    )  # fmt: skip


def trained_loss(run: Run, text: np.ndarray, held_out: np.ndarray, windows: int) -> float:
    """The loss of evenly spread windows of held-out text, after all steps."""
    from swarm.model.evaluate import loss_of
    from swarm.model.reference import SingleProcess

    def rows(tokens: np.ndarray, starts: Sequence[int]) -> np.ndarray:
        return np.stack([tokens[start : start + LENGTH + 1] for start in starts])

    single = SingleProcess(run, lambda starts: rows(text, starts))
    for t in range(run.steps):
        single.step(t)
    starts = np.linspace(0, len(held_out) - LENGTH - 1, windows).astype(int).tolist()
    loss = loss_of(run, single.named_weights())
    return statistics.fmean(loss(rows(held_out, starts[at : at + 32])) for at in range(0, windows, 32))


def table(done: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each way, of the finished runs."""
    losses: dict[str, dict[int, float]] = {}
    for one in done:
        losses.setdefault(one["way"], {})[one["seed"]] = one["loss"]
    rows = rows_of(losses, {one["way"]: one["times_smaller"] for one in done})
    weights = {one["way"]: one["weights"] for one in done}
    return [{**row, "weights": weights[row["codec"]], "seeds": len(row["losses"])} for row in rows]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--text", type=Path, help="what is trained on, a token a byte")
    parser.add_argument("--held-out", type=Path, help="what is evaluated on")
    parser.add_argument("--out", type=Path, required=True, help="finished runs, as JSON")
    parser.add_argument("--way", nargs="+", default=list(WAYS), help=f"(default: {' '.join(WAYS)})")
    parser.add_argument("--seed", nargs="+", type=int, default=[1, 2, 3], help="(default: 1 2 3)")
    parser.add_argument("--steps", type=int, default=300, help="(default: 300)")
    parser.add_argument("--rows", type=int, default=8, help="windows of 128 tokens in a step (default: 8)")
    parser.add_argument("--windows", type=int, default=256, help="of held-out text (default: 256)")
    parser.add_argument("--slice-s", type=float, default=1e9, help="begin no run after so many seconds")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    import torch

    torch.set_num_threads(1)
    began = time.monotonic()
    done: list[dict[str, Any]] = json.loads(options.out.read_text()) if options.out.exists() else []
    for seed in options.seed:
        for way in options.way:
            if any((one["way"], one["seed"]) == (way, seed) for one in done):
                continue
            if time.monotonic() - began >= options.slice_s:
                break
            text, held_out = (np.fromfile(path, dtype=np.uint8) for path in (options.text, options.held_out))
            sizes = {"seed": seed, "steps": options.steps, "rows": options.rows, "tokens": len(text)}
            run, cpu_s = way_run(way, **sizes), time.process_time()
            loss = trained_loss(run, text, held_out, options.windows)
            smaller = crossing(replace(way_run("none", **sizes), dtype="float32")) / crossing(run)
            weights = parameter_count(run.built_in)
            done.append(
                {"way": way, "seed": seed, "loss": round(loss, 5), "times_smaller": round(smaller, 2),
                 "weights": weights, "cpu_s": round(time.process_time() - cpu_s, 1)}
            )  # fmt: skip
            options.out.write_text(json.dumps(done, indent=1) + "\n")
            print(json.dumps(done[-1]), file=sys.stderr, flush=True)
    none = [one["loss"] for one in done if one["way"] == "none"]
    spread = f"; spread_of_none {max(none) - min(none):.4f}" if none else ""
    said = {"steps": options.steps, "tokens": options.steps * options.rows * LENGTH}
    columns = (*COLUMNS, "weights", "seeds")
    report(table(done), columns, f"{machine()}\nheld-out loss, by way; {json.dumps(said)}{spread}")


if __name__ == "__main__":
    main()
