"""What islands cost the training: the loss on held-out text after as many tokens as without them.

    python scripts/bench/loss/islands_loss.py --data train.txt --held-out held-out.txt --json loss.json
    python scripts/bench/loss/islands_loss.py --data train.txt --held-out held-out.txt --case 4/32 4/32/bf16

A small decoder in one process (`SingleProcess`), which arrives at what every swarm with that manifest
arrives at. A case is COUNT/LOCAL_STEPS, then what differs from the defaults: a codec, `lr=0.5`,
`momentum=0.8`, `warmup=8`; `1` is a run without islands. All cases of a seed see the same samples in the
same steps.

Each finished run is added to the JSON file, and none that is in it is done again. `above` is the mean over
seeds of the difference to `1`, `from` and `to` its least and its largest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.bench.common.arguments import parser_of
from scripts.bench.common.harness import machine, report
from swarm.manifest import BatchSpec, CodecSpec, DataSpec, IslandsSpec, ModelSpec, OptimizerSpec, Run

COLUMNS = ("case", "loss", "above", "from", "to")
CASES = (
    "1", "2/8", "2/32", "2/128", "4/8", "4/32", "4/128", "8/8", "8/32", "8/128", "4/32/bf16",
    "4/32/blockwise8",
)  # fmt: skip


def islands_of(case: str) -> IslandsSpec:
    """What a case says."""
    sizes, words = case.split("/")[:2], case.split("/")[2:]
    if sizes == ["1"]:
        return IslandsSpec()
    spec = IslandsSpec(count=int(sizes[0]), local_steps=int(sizes[1]))
    for word in words:
        name, _, value = word.partition("=")
        if name == "warmup":
            spec = replace(spec, warmup_steps=int(value))
        elif value:
            spec = replace(spec, **{f"outer_{name}": float(value)})
        else:
            spec = replace(spec, codec=word)
    return spec


def run_of(case: str, seed: int, options: argparse.Namespace) -> Run:
    """The run of a case, not pinned: `--steps` steps that train, and the meetings."""
    spec, hidden = islands_of(case), options.hidden
    meetings = options.steps // spec.local_steps if spec.count > 1 else 0
    return Run(
        name="islands",
        seed=seed,
        steps=options.steps + meetings,
        model=ModelSpec(
            layers=4, hidden=hidden, heads=4, ffn_hidden=4 * hidden, vocab_size=256, head="tied", stages=1
        ),
        data=DataSpec(source="files", sequence_length=64),
        batch=BatchSpec(microbatch_size=2, microbatches_per_step=8),
        optimizer=OptimizerSpec(
            lr=options.lr, beta2=0.99, warmup_steps=min(32, options.steps // 4), schedule="cosine"
        ),
        codec=CodecSpec(),
        islands=spec,
    )


def held_out_loss(run: Run, options: argparse.Namespace) -> float:
    """Train in this process; the mean loss of the last weights on windows spread over the held-out text."""
    import numpy as np

    from peers.storage.dataset import open_dataset
    from swarm.model.evaluate import loss_of
    from swarm.model.reference import SingleProcess

    data = open_dataset(run, [options.data])
    run = data.pinned(run)
    single = SingleProcess(run, data.batch, options.device)
    for t in range(run.steps):
        single.step(t)
    text = np.frombuffer(Path(options.held_out).read_bytes(), dtype=np.uint8)
    length = run.data.sequence_length + 1
    starts = np.linspace(0, len(text) - length, options.samples).astype(int)
    rows = np.stack([text[start : start + length] for start in starts])
    loss = loss_of(run, single.named_weights(), options.device)
    return statistics.fmean(loss(part) for part in np.array_split(rows, max(1, len(rows) // 16)))


def rows_of(losses: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """A row for each case, of its losses by seed."""
    plain, rows = losses.get("1", {}), list[dict[str, Any]]()
    for case, by_seed in losses.items():
        above = [loss - plain[seed] for seed, loss in by_seed.items() if seed in plain]
        rows.append(
            {
                "case": case,
                "loss": round(statistics.fmean(by_seed.values()), 4),
                "above": round(statistics.fmean(above), 4) if above else None,
                "from": round(min(above), 4) if above else None,
                "to": round(max(above), 4) if above else None,
                "losses": {seed: round(loss, 4) for seed, loss in by_seed.items()},
            }
        )
    return rows


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--data", required=True, help="the text that is trained on")
    parser.add_argument("--held-out", required=True, help="the text that the loss is of")
    parser.add_argument("--case", nargs="+", default=list(CASES), help=f"(default: {' '.join(CASES)})")
    parser.add_argument("--seed", nargs="+", type=int, default=[1, 2, 3], help="(default: 1 2 3)")
    parser.add_argument("--steps", type=int, default=512, help="that train (default: 512)")
    parser.add_argument("--hidden", type=int, default=64, help="(default: 64)")
    parser.add_argument("--lr", type=float, default=3e-3, help="of the islands' steps (default: 3e-3)")
    parser.add_argument("--samples", type=int, default=256, help="of held-out text (default: 256)")
    parser.add_argument("--device", default="cpu", help="(default: cpu)")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument("--json", type=Path, help="what is done already is read here, and added to")
    return parser.parse_args()


def main() -> None:
    options, began = parse(), time.monotonic()
    import torch

    torch.set_num_threads(1)
    sizes = {"steps": options.steps, "hidden": options.hidden, "lr": options.lr}
    known: dict[str, Any] = {}
    if options.json and options.json.exists():
        known = json.loads(options.json.read_text())
        if known["sizes"] != sizes:
            raise SystemExit(f"{options.json} is of {known['sizes']}, not of {sizes}")
    losses: dict[str, dict[str, float]] = known.get("losses", {})
    for seed in options.seed:
        for case in options.case:
            done = losses.setdefault(case, {})
            if str(seed) in done or time.monotonic() - began > options.limit_s:
                continue
            done[str(seed)] = held_out_loss(run_of(case, seed, options), options)
            print(f"seed {seed}, {case}: {done[str(seed)]:.4f}", file=sys.stderr, flush=True)
            if options.json:
                options.json.write_text(json.dumps({"sizes": sizes, "losses": losses}, indent=1) + "\n")
    losses = {case: losses[case] for case in options.case if losses[case]}
    report(rows_of(losses), COLUMNS, f"{machine()}\nloss after equal tokens; {json.dumps(sizes)}")


if __name__ == "__main__":
    main()
