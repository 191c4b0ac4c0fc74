"""What delayed updates cost the training: the loss on held-out text after as many tokens as without them.

    python scripts/bench/loss/delayed_loss.py --data train.txt --held-out held-out.txt --json loss.json

The runs of `islands_loss.py` without islands, each with `delayed_updates` and without: the same
samples in the same steps. With them step t is computed with the weights of t - 1, so that a swarm averages
step t - 1 while it computes step t. `above` is the mean over seeds of what they cost, `from` and `to` its
least and its largest; `seeds` is how far the loss of the runs without them differs from seed to seed.

Each finished run is added to the JSON file, and none that is in it is done again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.bench.common.arguments import parser_of
from scripts.bench.common.harness import machine, report
from scripts.bench.loss.islands_loss import held_out_loss, run_of

COLUMNS = ("steps", "lr", "loss", "delayed", "above", "from", "to", "seeds")


def row(steps: int, lr: float, losses: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The row of a length; `losses`: by "plain" or "delayed", then by seed."""
    plain, delayed = losses["plain"], losses["delayed"]
    above = [delayed[seed] - plain[seed] for seed in plain if seed in delayed]
    return {
        "steps": steps,
        "lr": lr,
        "loss": round(statistics.fmean(plain.values()), 4),
        "delayed": round(statistics.fmean(delayed.values()), 4),
        "above": round(statistics.fmean(above), 4),
        "from": round(min(above), 4),
        "to": round(max(above), 4),
        "seeds": round(max(plain.values()) - min(plain.values()), 4),
    }


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--data", required=True, help="the text that is trained on")
    parser.add_argument("--held-out", required=True, help="the text that the loss is of")
    parser.add_argument("--seed", nargs="+", type=int, default=[1, 2, 3], help="(default: 1 2 3)")
    parser.add_argument(
        "--steps", nargs="+", type=int, default=[128, 512, 1536], help="(default: 128 512 1536)"
    )
    parser.add_argument("--lr", nargs="+", type=float, default=[3e-3], help="(default: 3e-3)")
    parser.add_argument("--hidden", type=int, default=64, help="(default: 64)")
    parser.add_argument("--samples", type=int, default=256, help="of held-out text (default: 256)")
    parser.add_argument("--json", type=Path, help="what is done already is read here, and added to")
    return parser.parse_args()


def main() -> None:
    options = parse()
    import torch

    torch.set_num_threads(1)
    known: dict[str, dict[str, dict[str, float]]] = {}
    if options.json and options.json.exists():
        known = json.loads(options.json.read_text())
    rows = []
    for steps in options.steps:
        for lr in options.lr:
            losses = known.setdefault(f"{steps} {lr:g}", {"plain": {}, "delayed": {}})
            one = argparse.Namespace(**{**vars(options), "steps": steps, "lr": lr})
            for seed in options.seed:
                for case, done in losses.items():
                    if str(seed) not in done:
                        run = replace(run_of("1", seed, one), delayed_updates=case == "delayed")
                        done[str(seed)] = held_out_loss(run, one)
                        print(f"{steps} steps, seed {seed}, {case}: {done[str(seed)]:.4f}", file=sys.stderr)
                    if options.json:
                        options.json.write_text(json.dumps(known, indent=1) + "\n")
            rows.append(row(steps, lr, losses))
    report(rows, COLUMNS, f"{machine()}\nloss after equal tokens; {options.hidden} wide")


if __name__ == "__main__":
    main()
