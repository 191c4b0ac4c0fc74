"""How long processes take to be of use, and what memory they hold.

    python scripts/bench/speed/startup.py                   # 1 bootstrap, 2 stages, 1 trainer; half a minute
    python scripts/bench/speed/startup.py --rounds 5 --hidden 512

Processes start one after the other, each on an otherwise idle core. `announced_s`: from the spawn to the
moment that a bootstrap or a trainer is reachable, and that a peer holds its weights and says in the DHT that
it serves. `first_step_s`: from the spawn of the trainer, when all peers serve, to the first step taken (8
microbatches; with hidden 256 about a second of it is compute).

Memory is of the role and its p2pd, resident (`rss`) and proportional (`pss`: pages that processes share are
counted in parts), after that step. `own` is what a peer and its p2pd need before the first microbatch,
without weights, gradient sum and optimizer state: the interpreter, torch, the network. What a peer holds
beyond that after the step are microbatches in flight, or what the allocator keeps of them for the next
ones.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.bench.common.arguments import parser_of
from scripts.bench.common.harness import Role, Swarm, bench_run, machine, memory_of, p2pd_of, report
from swarm.manifest import Run

COLUMNS = (
    "role", "announced_s", "first_step_s", "python_rss_mb", "python_pss_mb", "p2pd_rss_mb", "p2pd_pss_mb",
    "model_mb", "own_mb",
)  # fmt: skip
MB = 1e6


def model_bytes(run: Run, stage: int) -> int:
    """What a CPU peer holds for its stage whatever it runs in, as arithmetic says; without activations."""
    from swarm.model.stage import StageCompute

    compute = StageCompute(run, stage)
    weights = compute.numel * 4
    moments = 2 * weights if run.optimizer.name == "adamw" else 0
    total = compute.numel * (8 if run.adds_exactly else 4)
    return weights + moments + total


async def measure(run: Run) -> list[dict[str, Any]]:
    """A row for each process of one swarm."""
    async with Swarm(run, one_by_one=True) as swarm:
        trainer = await swarm.add_trainer()
        await swarm.until(lambda: trainer.stepped_at is not None, "the first step is not taken")
        rows = [memory_row(role, run) for role in swarm.roles]
    for row, role in zip(rows, swarm.roles, strict=True):
        announced_at = role.started_at if role.stage is None else role.serving_at
        assert announced_at is not None
        row["announced_s"] = round(announced_at - role.spawned_at, 3)
        if role.stepped_at is not None:
            row["first_step_s"] = round(role.stepped_at - role.spawned_at, 3)
    return rows


def memory_row(role: Role, run: Run) -> dict[str, Any]:
    rss, pss = memory_of(role.child.pid)
    row: dict[str, Any] = {
        "role": role.name,
        "python_rss_mb": round(rss / MB, 1),
        "python_pss_mb": round(pss / MB, 1),
    }
    process = p2pd_of(role.child.pid)
    p2pd_rss = 0
    if process is not None:
        p2pd_rss, p2pd_pss = memory_of(process.pid)
        row |= {"p2pd_rss_mb": round(p2pd_rss / MB, 1), "p2pd_pss_mb": round(p2pd_pss / MB, 1)}
    if role.stage is not None:
        model = model_bytes(run, role.stage)
        own = role.served_bytes + p2pd_rss - model
        row |= {"model_mb": round(model / MB, 1), "own_mb": round(own / MB, 1)}
    return row


def middle(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each number of one role's rows."""
    merged = dict(rows[0])
    for key, value in merged.items():
        if isinstance(value, float):
            merged[key] = round(statistics.median(row[key] for row in rows), 3)
    return merged


async def bench(options: argparse.Namespace) -> list[dict[str, Any]]:
    run = bench_run(stages=2, hidden=options.hidden, layers=options.layers, microbatches=8)
    by_role: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.rounds):
        for row in await measure(run):
            by_role.setdefault(row["role"], []).append(row)
    return [middle(rows) for rows in by_role.values()]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--hidden", type=int, default=256, help="of the model (default: 256)")
    parser.add_argument("--layers", type=int, default=2, help="of the whole model (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="swarms to start; medians count (default: 3)")
    parser.add_argument("--quick", action="store_true", help="one round")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds = 1
    return options


def main() -> None:
    options = parse()
    import uvloop

    rows = uvloop.run(bench(options))
    print(f"{machine()}; {time.strftime('%Y-%m-%d')}; startup.py {' '.join(sys.argv[1:])}")
    report(rows, COLUMNS, "from spawn to use, and memory")


if __name__ == "__main__":
    main()
