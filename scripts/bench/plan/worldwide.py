"""Step time of DT-FM's worldwide case: 64 V100-like devices in 8 cities, by layout.

    python scripts/bench/plan/worldwide.py                 # four minutes, one core
    python scripts/bench/plan/worldwide.py --network my.json --case 3
    python scripts/bench/plan/worldwide.py --predictions --microbatches 256 --steps 8 --budget 1  # 2 minutes

Case 4 of `../shared/data/networks/dtfm.json` (Yuan et al., NeurIPS 2022). The coarse simulation
(`peers/sim/throughput`) runs steps of a GPT of 1.3 B: 8 stages of 3 layers of width 2048, sequences of 2048
tokens, a sequence a microbatch, 512 of them a step, float16 between stages (8.4 MB), 0.65 GB of gradients a
stage, devices that reach 40 Tflop/s.

Layouts: `overlapped` and `additive` are the planner's (for a runtime that hides transfers behind compute, and
for DT-FM's own objective), `index order` is Megatron's (the first eight devices serve stage 0: here a city
each), `random` the mean of some seeds. Windows and routers learn as they ship; `delayed`: with delayed
updates. `least_s` and `most_s`: with other names, `third_step_s`: how far the windows are by then.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np

from peers.sim.throughput.engine import simulate
from peers.sim.throughput.world import Settings, ThroughputReport
from scripts.bench.common.arguments import parser_of
from scripts.bench.common.harness import machine, report
from scripts.bench.common.step_time import mean_step_s
from scripts.bench.plan.additive_objective import additive_terms
from scripts.bench.plan.additive_search import megatron_grid, random_grid, search_additive
from scripts.bench.plan.plan import network_of
from swarm.errors import SetupError
from swarm.plan.network import Device, Network, StepWork
from swarm.plan.overlapped import Overlap
from swarm.plan.search import search_overlapped

DTFM = Path(__file__).resolve().parents[4] / "shared" / "data" / "networks" / "dtfm.json"
STAGES, LAYERS, WIDTH, TOKENS = 8, 3, 2048, 2048
FLOPS_PER_S = 40e12
GRADIENT_BYTES = 0.65e9
COLUMNS = (
    "layout", "delayed", "predicted_s", "step_s", "least_s", "most_s", "third_step_s", "utilisation",
    "boundary_gb", "seeds",
)  # fmt: skip
RENAMED = 3
"""Orders of the devices, of which the fastest and the slowest are shown: routes must not hang on names."""


def job_of(microbatches: int) -> StepWork:
    flops = 2.0 * TOKENS * LAYERS * (12 * WIDTH**2 + WIDTH * TOKENS)
    boundary_bytes = 2.0 * TOKENS * WIDTH
    return StepWork(
        stages=STAGES, microbatches=microbatches, forward_flops=(flops,) * STAGES,
        forward_bytes=(boundary_bytes,) * (STAGES - 1), backward_bytes=(boundary_bytes,) * (STAGES - 1),
        gradient_bytes=(GRADIENT_BYTES,) * STAGES, state_bytes=(0.0,) * STAGES,
        activation_bytes=(0.0,) * STAGES,
    )  # fmt: skip


def read_network(path: Path, case: int) -> Network:
    """The case's lines with devices of the assumed speed.

    Raises:
        SetupError: no such file or case, or it says what cannot be.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        found = next(one for one in data["cases"] if one["id"] == case)
    except (OSError, ValueError, KeyError, StopIteration) as error:
        raise SetupError(f"{path}: no case {case} to be read: {error}") from None
    lines = network_of(found, data)
    devices = tuple(Device(d.name, d.region, FLOPS_PER_S) for d in lines.devices)
    return Network(devices, lines.regions, lines.latency_s, lines.bandwidth_bps)


def random_case(seed: int, most: int = 256) -> tuple[Network, StepWork]:
    """Cities on a square; devices of one speed or 20 times apart, every third time with uploads; at most
    `most` microbatches."""
    rng = np.random.default_rng([seed, 5])
    count, stages, cities = int(rng.integers(12, 49)), int(rng.integers(3, 9)), int(rng.integers(2, 7))
    at = rng.uniform(0, 1, (cities, 2))
    distance = np.sqrt(((at[:, None] - at[None]) ** 2).sum(-1))
    base_bps = rng.uniform(0.2, 2) * 1e9
    region = np.concatenate([np.arange(cities), rng.integers(cities, size=count - cities)])
    flops = 1e12 * (np.exp(rng.uniform(np.log(5), np.log(100), count)) if seed % 2 else np.full(count, 40.0))
    up_bps = np.exp(rng.uniform(np.log(5e7), np.log(1e9), count)) if seed % 3 == 0 else np.full(count, np.inf)
    devices = tuple(
        Device(f"d{i}", int(region[i]), float(flops[i]), upload_bps=float(up_bps[i])) for i in range(count)
    )
    each_bytes, each_flops = (
        float(np.exp(rng.uniform(*np.log(ends)))) for ends in ((1e6, 1e7), (2e11, 4e12))
    )
    job = StepWork(
        stages=stages, microbatches=int(rng.integers(64, most + 1)), forward_flops=(each_flops,) * stages,
        forward_bytes=(each_bytes,) * (stages - 1), backward_bytes=(each_bytes,) * (stages - 1),
        gradient_bytes=(float(rng.uniform(0.05, 0.6)) * 1e9,) * stages, state_bytes=(0.0,) * stages,
        activation_bytes=(0.0,) * stages,
    )  # fmt: skip
    lines = 0.002 + 0.12 * distance, base_bps / (1 + 6 * distance)
    return Network(devices, tuple(f"city{i}" for i in range(cities)), *lines), job


def predictions(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each network and layout: DT-FM's cases and twelve random networks."""
    cases = [(f"case {n}", read_network(options.network, n), job_of(options.microbatches)) for n in range(6)]
    cases += [(f"random {seed}", *random_case(seed)) for seed in range(12)]
    rows: list[dict[str, Any]] = []
    for name, network, job in cases:
        began_s, overlap = time.process_time(), Overlap(network, job)
        planned = search_overlapped(
            network, job, seed=0, budget_s=options.budget, spent_s=lambda b=began_s: time.process_time() - b
        )
        by_index = np.arange(len(network)) * job.stages // len(network)
        of_name = {
            "planned": planned.stage_of,
            "index order": by_index,
            "random": np.random.default_rng(1).permutation(by_index),
        }
        for layout, of_N in of_name.items():
            said = overlap.predict(of_N)
            settings = Settings(rebalance_every_s=0.0)
            ran = simulate(network, job, of_N.tolist(), end_s=1e9, steps=options.steps, settings=settings)
            step_s = mean_step_s(ran, skip=options.steps // 2)
            rows.append(
                {
                    "network": name, "layout": layout, "predicted_s": round(said.total_s, 2),
                    "step_s": round(step_s, 2), "ratio": round(said.total_s / step_s, 3), "limit": said.limit,
                }
            )  # fmt: skip
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def stages_of(grid_SD: np.ndarray) -> list[int]:
    """The stage of each device of a grid."""
    layout = [0] * grid_SD.size
    for stage, row_D in enumerate(grid_SD):
        for device in row_D:
            layout[int(device)] = stage
    return layout


def layouts(network: Network, job: StepWork, options: argparse.Namespace) -> dict[str, list[list[int]]]:
    """By name, the layouts to be averaged over."""
    began_s = time.process_time()
    overlapped = search_overlapped(
        network, job, seed=0, budget_s=options.budget, spent_s=lambda: time.process_time() - began_s
    )
    began_s = time.process_time()
    terms = additive_terms(
        network, stages=STAGES, gradient_bytes=GRADIENT_BYTES, activation_bytes=0.47124922275543213e9
    )
    additive = search_additive(
        terms, seed=0, budget_s=options.budget, spent_s=lambda: time.process_time() - began_s
    )
    rngs = [np.random.default_rng(seed) for seed in range(options.seeds)]
    return {
        "overlapped": [[int(stage) for stage in overlapped.stage_of]],
        "additive": [stages_of(np.asarray(additive.cost.grid))],
        "index order": [stages_of(megatron_grid(len(network), STAGES))],
        "random": [stages_of(random_grid(len(network), STAGES, rng)) for rng in rngs],
    }


def renamed(network: Network, layout: Sequence[int], seed: int) -> tuple[Network, list[int]]:
    """The same devices in the same stages, in another order: so each has another name."""
    order_N = np.random.default_rng(seed).permutation(len(network))
    devices = tuple(network.devices[i] for i in order_N)
    return replace(network, devices=devices), [layout[i] for i in order_N]


def row(
    name: str, network: Network, job: StepWork, found: Sequence[list[int]], *, steps: int, delayed: bool
) -> dict[str, Any]:
    settings = Settings(rebalance_every_s=0.0, delayed_updates=delayed)

    def run(network: Network, layout: Sequence[int]) -> ThroughputReport:
        return simulate(network, job, layout, end_s=1e9, steps=steps, settings=settings)

    reports = [run(network, layout) for layout in found]
    others = [run(*renamed(network, layout, seed)) for layout in found for seed in range(RENAMED)]
    predicted = [Overlap(network, job).predict(layout).total_s for layout in found]
    skip = steps // 2
    return {
        "layout": name,
        "delayed": delayed,
        "predicted_s": None if delayed else round(float(np.mean(predicted)), 2),
        "step_s": round(float(np.mean([mean_step_s(r, skip=skip) for r in reports])), 2),
        "least_s": round(min(mean_step_s(r, skip=skip) for r in others), 2),
        "most_s": round(max(mean_step_s(r, skip=skip) for r in others), 2),
        "third_step_s": round(float(np.mean([r.step_ends_s[2] - r.step_ends_s[1] for r in reports])), 2),
        "utilisation": round(float(np.mean([sum(r.busy_s) / sum(r.there_s) for r in reports])), 4),
        "boundary_gb": round(float(np.mean([r.boundary_bytes / r.version for r in reports])) / 1e9, 2),
        "seeds": len(found),
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--network", type=Path, default=DTFM, help="(default: dtfm.json)")
    parser.add_argument("--case", type=int, default=4, help="(default: 4)")
    parser.add_argument("--microbatches", type=int, default=512, help="of a step (default: 512)")
    parser.add_argument("--steps", type=int, default=16, help="of which the second half counts (default: 16)")
    parser.add_argument("--seeds", type=int, default=3, help="of random layouts (default: 3)")
    parser.add_argument("--budget", type=float, default=10.0, help="CPU seconds of a search (default: 10)")
    parser.add_argument(
        "--predictions", action="store_true", help="all cases and 12 random networks, predicted and simulated"
    )
    parser.add_argument("--quick", action="store_true", help="128 microbatches, one seed, 1 s of search")
    options = parser.parse_args(arguments)
    if options.quick:
        options.microbatches, options.seeds, options.budget = 128, 1, 1.0
    return options


def main() -> None:
    options = parse()
    if options.predictions:
        print(machine())
        columns = ("network", "layout", "predicted_s", "step_s", "ratio", "limit")
        report(predictions(options), columns, "seconds of a step, predicted and simulated")
        return
    try:
        network, job = read_network(options.network, options.case), job_of(options.microbatches)
    except SetupError as error:
        sys.exit(f"error: {error}")
    rows = [
        row(name, network, job, found, steps=options.steps, delayed=delayed)
        for name, found in layouts(network, job, options).items()
        for delayed in (False, True)
    ]
    print(f"{machine()}; {time.strftime('%Y-%m-%d')}; worldwide.py {' '.join(sys.argv[1:])}")
    report(rows, COLUMNS, "seconds of a step, by where the devices are put")


if __name__ == "__main__":
    main()
