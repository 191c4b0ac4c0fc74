"""A recipe trained by one process to its end, with its evaluations: what its curve is and what a step costs.

    scripts/tales.py DIR
    scripts/bench/loss/recipe.py RECIPE.toml --folder DIR --data train.txt --eval-data held-out.txt
    scripts/bench/loss/recipe.py RECIPE.toml --folder DIR --data train.txt --eval-data held-out.txt --show

It can be ended at any time, and goes on from its last checkpoint. DIR/steps.jsonl gets a line for each step
and each evaluation; DIR/checkpoints is what `swarm export --checkpoint-dir` reads. `--show` prints the
evaluations in the last line, for `tables.py --store recipes`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from peers.api.run import Run
from peers.storage.checkpoint import Checkpoint, newest_common_step
from peers.storage.samples import open_eval
from swarm.evaluation import eval_offsets, is_due, mean_loss, microbatches
from swarm.model.evaluate import loss_of
from swarm.model.reference import SingleProcess

LINES = "steps.jsonl"


def train(run: Run, folder: Path, every: int, until: int) -> None:
    """Take the steps that are left before `until`, and evaluate there; a checkpoint each `every`."""
    terms, saved = run.terms, folder / "checkpoints"
    held_out = open_eval(terms, run.eval_data, run.tokenizer)
    start = newest_common_step(saved, terms)
    begun = [] if start is None else [Checkpoint(saved, terms, s, start).load() for s in range(terms.S)]
    state = begun.__getitem__ if begun else None
    single = SingleProcess(terms, run.open_data().batch, version=start or 0, state=state)
    with (folder / LINES).open("a") as lines:

        def tell(**told: Any) -> None:
            lines.write(json.dumps(told) + "\n")
            lines.flush()
            print(told, flush=True)

        while True:
            t = single.version
            if t and t % every == 0 and t != start:
                for stage in range(terms.S):
                    Checkpoint(saved, terms, stage, t).save(single.state_of(stage))
            if held_out is not None and (t == until or (is_due(terms, t) and t != start)):
                loss = loss_of(terms, single.named_weights())
                losses = [loss(held_out.batch(eval_offsets(terms, e))) for e in range(microbatches(terms))]
                tell(step=t, eval_loss=mean_loss(losses, [terms.batch.microbatch_size] * len(losses)))
            if t >= min(until, terms.steps):
                return
            wall, cpu = time.monotonic(), time.process_time()
            losses = single.step(t)
            wall, cpu = time.monotonic() - wall, time.process_time() - cpu
            if losses:  # else islands have met
                tell(step=t, loss=statistics.fmean(losses), wall_s=round(wall, 3), cpu_s=round(cpu, 3))


def read(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run; of a step that was taken twice the last one."""
    found: dict[tuple[bool, int], dict[str, Any]] = {}
    for line in (folder / LINES).read_text().splitlines():
        told = json.loads(line)
        found["eval_loss" in told, told["step"]] = told
    return list(found.values())


def rows(told: Sequence[dict[str, Any]], tokens_per_step: int) -> list[dict[str, Any]]:
    """One for each evaluation, with what the steps since the one before were."""
    taken = [one for one in told if "loss" in one]
    made, before = [], 0
    for one in sorted((one for one in told if "eval_loss" in one), key=lambda one: one["step"]):
        since = [step for step in taken if before <= step["step"] < one["step"]]
        made.append(
            {
                "step": one["step"],
                "tokens": one["step"] * tokens_per_step,
                "eval_loss": round(one["eval_loss"], 4),
                "loss": round(statistics.fmean(step["loss"] for step in since[-20:]), 4) if since else None,
                "cpu_s": round(statistics.median(step["cpu_s"] for step in since), 2) if since else None,
            }
        )
        before = one["step"]
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--data", type=Path, nargs="*", default=[])
    parser.add_argument("--eval-data", type=Path, nargs="*", default=[])
    parser.add_argument("--every", type=int, default=25, help="steps between checkpoints (default: 25)")
    parser.add_argument("--until", type=int, default=1 << 62, help="take no step from here on, and evaluate")
    parser.add_argument("--show", action="store_true", help="print what the folder has")
    options = parser.parse_args()
    run = Run.from_toml(options.recipe, files=options.data, eval_data=options.eval_data)
    options.folder.mkdir(parents=True, exist_ok=True)
    if not options.show:
        train(run, options.folder, options.every, options.until)
    print(json.dumps(rows(read(options.folder), run.terms.tokens_per_step)))


if __name__ == "__main__":
    main()
