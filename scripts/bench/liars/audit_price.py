"""What it costs to check strangers: a run that names its trainer, beside the same one that does not.

    python scripts/bench/liars/audit_price.py                     # about 15 minutes
    python scripts/bench/liars/audit_price.py --stages 2x2 --hidden 512 --rounds 5

A run that names its trainers is audited: answers and requests are signed, answers and sums computed again,
sums checked as they are added. Both swarms, of real processes on this machine, live all the time and take
steps in turn, so that a drifting machine hits both alike; ratios are medians of neighbouring pairs.

`speed` is tokens/s of the audited ÷ of the plain; `cpu` is CPU-s per token of the plain ÷ of the audited.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from peers.net.identity import Identity
from scripts.bench.common.arguments import parser_of
from scripts.bench.common.harness import Segment, Swarm, bench_run, report
from swarm.manifest import AdmissionSpec, Run

COLUMNS = ("stages", "replicas", "hidden", "microbatches", "pairs", "speed", "cpu", "audited_tokens_per_s",
           "foreign_cores")  # fmt: skip


def used_s(segment: Segment) -> float:
    """CPU seconds of a segment."""
    return segment.clocks.ours


async def measure(run: Run, *, replicas: int, steps: int, rounds: int, warm: int) -> dict[str, Any]:
    """`rounds` pairs of segments, after `warm` steps of each swarm that are not counted."""
    identity = Identity.generate()
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "trainer.key"
        identity.save(key)
        audited = replace(run, name="audited", admission=AdmissionSpec(trainers=(identity.peer_id,)))
        pairs: list[tuple[Segment, Segment]] = []
        async with contextlib.AsyncExitStack() as stack:
            plain = await stack.enter_async_context(Swarm(run, replicas=replicas))
            checked = await stack.enter_async_context(Swarm(audited, replicas=replicas, identity=key))
            for swarm in (plain, checked):
                await swarm.train(warm)
            for number in range(rounds):
                order = (plain, checked) if number % 2 == 0 else (checked, plain)
                done = {swarm: await swarm.train(steps) for swarm in order}
                pairs.append((done[plain], done[checked]))
    tokens = steps * run.tokens_per_step
    return {
        "stages": run.S,
        "replicas": replicas,
        "hidden": run.built_in.hidden,
        "microbatches": run.M,
        "pairs": len(pairs),
        "speed": round(statistics.median(a.seconds / b.seconds for a, b in pairs), 4),
        "cpu": round(statistics.median(used_s(a) / used_s(b) for a, b in pairs), 4),
        "audited_tokens_per_s": round(statistics.median(tokens / b.seconds for _, b in pairs), 1),
        "foreign_cores": round(statistics.mean(s.clocks.foreign_cores for pair in pairs for s in pair), 3),
        "speeds": [round(a.seconds / b.seconds, 4) for a, b in pairs],
        "cpus": [round(used_s(a) / used_s(b), 4) for a, b in pairs],
    }


async def bench(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for shape in options.stages:
        stages, _, replicas = shape.partition("x")
        run = bench_run(stages=int(stages), hidden=options.hidden, microbatches=options.microbatches)
        times = {"steps": options.steps, "rounds": options.rounds, "warm": options.warm}
        row = await measure(run, replicas=int(replicas or 1), **times)
        rows.append(row)
        print(f"{shape}: speed {row['speeds']}, cpu {row['cpus']}", file=sys.stderr, flush=True)
    return rows


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--stages", nargs="+", default=["2", "2x2"], metavar="S[xR]")
    parser.add_argument("--hidden", type=int, default=512, help="(default: 512)")
    parser.add_argument("--microbatches", type=int, default=32, help="of a step (default: 32)")
    parser.add_argument("--steps", type=int, default=1, help="of one measurement (default: 1)")
    parser.add_argument("--warm", type=int, default=2, help="steps before, not counted (default: 2)")
    parser.add_argument("--rounds", type=int, default=7, help="pairs (default: 7)")
    return parser.parse_args(arguments)


def main() -> None:
    rows = asyncio.run(bench(parse()))
    report(rows, COLUMNS, "audited beside plain")


if __name__ == "__main__":
    main()
