"""What codecs between stages cost the training: the loss after as many steps as without any.

    python scripts/bench/loss/codecs_loss.py                   # the published table; half an hour on one core
    python scripts/bench/loss/codecs_loss.py --codec none topk:0.05+blockwise8,none --seed 1 --steps 30

The demo's model, cut into three stages, in one process (`SingleProcess`), which arrives at what every swarm
with that manifest arrives at. A codec is for all boundaries, forward and back, or one for each with commas
between: `topk:0.05+blockwise8,none` is what AdaTopK plans where only the line to stage 1 is slow. A seed
draws weights and samples, so that all codecs of a seed see the same ones: `above_none` is the mean over
seeds of the difference to the loss without a codec, `from` and `to` its least and its largest.

The loss is the mean of the last `--last` steps, codecs included. Samples are drawn anew in each step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.bench.common.arguments import parser_of
from scripts.bench.common.harness import machine, report
from swarm.codecs import KNOWN, parse_codec
from swarm.errors import SetupError
from swarm.manifest import CodecSpec, Run, demo_run

COLUMNS = ("codec", "times_smaller", "loss", "above_none", "from", "to")
CODECS = (
    "none", "bf16", "blockwise8", "topk:0.25+blockwise8", "topk:0.1+blockwise8", "topk:0.05+blockwise8",
    "topk:0.01+blockwise8", "topk:0.05+blockwise8,none", "topk:0.01+blockwise8,none",
)  # fmt: skip


def codec_spec(names: str) -> CodecSpec:
    """`[codec]` of a manifest: one name for all boundaries, or one for each with commas between.

    Gradients come back as the values of what was sent.

    Raises:
        SetupError: there is no such codec.
    """
    known = [parse_codec(name) for name in names.split(",")]
    if None in known:
        raise SetupError(f"{names!r} names no codec: it must be one of {KNOWN}, or several with commas")
    forward = tuple(names.split(","))
    backward = tuple(codec.values for codec in known if codec is not None)
    if len(forward) == 1:
        return CodecSpec(forward=forward[0], backward=backward[0])
    return CodecSpec(forward=forward, backward=backward)


def codec_run(names: str, *, seed: int, steps: int, microbatches: int) -> Run:
    """The demo's run with that codec, not pinned."""
    base = demo_run(stages=3, steps=steps, seed=seed)
    batch = replace(base.batch, microbatches_per_step=microbatches)
    return replace(base, batch=batch, codec=codec_spec(names))


def crossing(run: Run) -> float:
    """Bytes of one microbatch over all boundaries, both ways."""
    from swarm.model.stage_io import boundary_bytes

    return sum(sum(boundary_bytes(run, b, run.codec.forward_at(b))) for b in range(run.S - 1))


def final_loss(run: Run, last: int) -> float:
    """Train in this process; the mean loss of the last steps."""
    from peers.storage.dataset import open_dataset
    from swarm.model.reference import SingleProcess

    data = open_dataset(run)
    single = SingleProcess(data.pinned(run), data.batch)
    losses = [statistics.fmean(single.step(t)) for t in range(run.steps)]
    return statistics.fmean(losses[-last:])


def rows_of(losses: dict[str, dict[int, float]], smaller: dict[str, float]) -> list[dict[str, Any]]:
    """A row for each codec, of its final loss by seed. Without `none` among them there is no difference."""
    plain = losses.get("none", {})
    rows: list[dict[str, Any]] = []
    for codec, by_seed in losses.items():
        above = [loss - plain[seed] for seed, loss in by_seed.items() if seed in plain]
        rows.append(
            {
                "codec": codec,
                "times_smaller": round(smaller[codec], 2),
                "loss": round(statistics.fmean(by_seed.values()), 4),
                "above_none": round(statistics.fmean(above), 4) if above else None,
                "from": round(min(above), 4) if above else None,
                "to": round(max(above), 4) if above else None,
                "losses": {str(seed): round(loss, 4) for seed, loss in by_seed.items()},
            }
        )
    return rows


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--codec", nargs="+", default=list(CODECS), help=f"(default: {' '.join(CODECS)})")
    parser.add_argument("--seed", nargs="+", type=int, default=[1, 2, 3], help="(default: 1 2 3)")
    parser.add_argument("--steps", type=int, default=60, help="(default: 60)")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step (default: 8)")
    parser.add_argument("--last", type=int, default=5, help="steps whose mean is the loss (default: 5)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")
    options = parser.parse_args(arguments)
    if not 0 < options.last <= options.steps:
        parser.error(f"--last {options.last}: it must be from 1 to --steps ({options.steps})")
    for codec in options.codec:
        try:
            codec_run(codec, seed=1, steps=options.steps, microbatches=options.microbatches)
        except SetupError as error:
            parser.error(error.text)
    return options


def main() -> None:
    options = parse()
    import torch

    torch.set_num_threads(options.threads)
    losses: dict[str, dict[int, float]] = {codec: {} for codec in options.codec}
    smaller: dict[str, float] = {}
    for seed in options.seed:
        sizes = {"seed": seed, "steps": options.steps, "microbatches": options.microbatches}
        for codec in options.codec:
            run = codec_run(codec, **sizes)
            smaller[codec] = crossing(codec_run("none", **sizes)) / crossing(run)
            losses[codec][seed] = final_loss(run, options.last)
            print(f"seed {seed}, {codec}: {losses[codec][seed]:.4f}", file=sys.stderr, flush=True)
    rows = rows_of(losses, smaller)
    said = {"steps": options.steps, "microbatches": options.microbatches, "last": options.last}
    report(rows, COLUMNS, f"{machine()}\nloss after equal steps, by codec; {json.dumps(said)}")


if __name__ == "__main__":
    main()
