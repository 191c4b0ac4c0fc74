#!/usr/bin/env python
"""Tokens a second of runs with and without islands, as planned and then simulated.

    scripts/bench/plan/islands_speed.py                       # twenty minutes of CPU time, one core
    scripts/bench/plan/islands_speed.py --only "home 1.3B"    # six of them
    scripts/bench/plan/islands_speed.py --only "home 8B" --stages 16
    scripts/bench/plan/islands_speed.py --only "home 8B" --microbatches 1920
    scripts/bench/plan/islands_speed.py --only "home 1.3B" --trace trace.csv --hours 4

`dtfm`: the 64 devices of 40 Tflop/s in eight cities of `worldwide.py`. `home`: 1,000 peers with 20 to 100
Mbit/s up and five times that down, 5 to 40 Tflop/s, 40 ms apart, by a seed. 1.3B: 24 layers of width 2048 in
8 stages; 8B: llama3-8b in 8 stages, at home in 31. Sequences of 2048 tokens, one a microbatch, hadamard4
between stages, blockwise8 for what islands have changed.

Without islands the layout is `swarm plan`'s; `1 rounded8` sends sums in a quarter of the bytes. With islands
it is the best `count` for so many steps between two meetings. Both are simulated by the live policies
(`peers/sim/throughput`); each island by itself, meetings as a formula. Memory limits nothing here.

With `--trace` the same share of the devices is up as of those of the trace, over its first hours; who comes
goes where it is needed, on its island, and loads its stage first.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np

from peers.islands.planning import islands_of
from peers.programs.descriptions import job_of
from peers.sim.throughput.engine import IslandsReport, simulate, simulate_islands
from peers.sim.throughput.members import Trace, read_trace
from peers.sim.throughput.world import Settings
from scripts.bench.common.arguments import parser_of
from scripts.bench.common.harness import machine, report
from scripts.bench.common.step_time import mean_step_s
from scripts.bench.plan.worldwide import DTFM, read_network
from swarm.manifest import (
    PRESETS,
    BatchSpec,
    CodecSpec,
    DataSpec,
    IslandsSpec,
    ModelSpec,
    OptimizerSpec,
    Run,
)
from swarm.plan.islands import IslandsPlan, search_islands
from swarm.plan.network import Device, Network, StepWork
from swarm.plan.search import search_overlapped

COLUMNS = (
    "devices", "model", "stages", "islands", "local_steps", "planned_s", "step_s", "tokens_per_s", "times",
    "computing", "boundary_gb", "reduce_gb", "meeting_gb", "deaths",
)  # fmt: skip
STEPS, LEARNED = 8, 4
"""Of a run without islands; from which step on they count."""
LOCAL_STEPS = (32, 128, 512)
SETTINGS = Settings(rebalance_every_s=0.0)


def home(peers: int, seed: int) -> Network:
    """Peers behind home lines."""
    rng = np.random.default_rng(seed)
    up_bps = rng.uniform(20e6, 100e6, peers)
    flops = np.exp(rng.uniform(math.log(5e12), math.log(40e12), peers))
    devices = tuple(
        Device(f"p{i}", 0, float(flops[i]), upload_bps=float(up), download_bps=5 * float(up))
        for i, up in enumerate(up_bps)
    )
    return Network(devices, ("home",), np.array([[0.04]]), np.array([[np.inf]]))


def run_of(model: str, stages: int, microbatches: int, reduce: str = "none") -> Run:
    """Without islands."""
    sizes = PRESETS["llama3-8b"] if model == "8B" else {**PRESETS["1B"], "layers": 24}
    return Run(
        name=model, seed=1, steps=513, model=ModelSpec(stages=stages, **sizes),
        data=DataSpec(source="tales", sequence_length=2048),
        batch=BatchSpec(microbatch_size=1, microbatches_per_step=microbatches),
        optimizer=OptimizerSpec(lr=1e-3),
        codec=CodecSpec(forward="hadamard4", backward="hadamard4", reduce=reduce),
    )  # fmt: skip


@dataclass(frozen=True)
class Churn:
    """Who is up."""

    trace: Trace | None = None
    end_s: float = 1e9

    @property
    def settings(self) -> Settings:
        return SETTINGS if self.trace is None else Settings()

    @staticmethod
    def of(options: argparse.Namespace, devices: int) -> Churn:
        """As many of the devices as the trace has of its own."""
        if options.trace is None:
            return Churn()
        trace, end_s = read_trace(options.trace.read_text()), 3600.0 * options.hours
        counts = tuple(count * devices // max(trace.counts) for count in trace.counts)
        return Churn(trace._replace(counts=counts, regions=()), min(end_s, trace.end_s))


def without(network: Network, run: Run, job: StepWork, budget_s: float, churn: Churn) -> dict[str, Any]:
    """One row: no islands."""
    began_s = time.process_time()
    plan = search_overlapped(
        network, job, seed=0, budget_s=budget_s, spent_s=lambda: time.process_time() - began_s
    )
    found = simulate(
        network, job, plan.stage_of.tolist(), end_s=churn.end_s, steps=None if churn.trace else STEPS,
        settings=churn.settings, trace=churn.trace,
    )  # fmt: skip
    each_gb = 1e-9 / max(1, found.version)
    return {
        "islands": 1 if run.codec.reduce == "none" else f"1 {run.codec.reduce}",
        "local_steps": None,
        "planned_s": plan.step.total_s,
        "step_s": found.end_s / max(1, found.version) if churn.trace else mean_step_s(found, skip=LEARNED),
        "computing": sum(found.busy_s) / sum(found.there_s),
        "boundary_gb": found.boundary_bytes * each_gb,
        "reduce_gb": found.reduce_bytes * each_gb,
        "meeting_gb": 0.0,
        "deaths": found.deaths,
    }


def within(network: Network, run: Run, churn: Churn, only: list[int]) -> list[dict[str, Any]]:
    """A row for each of `LOCAL_STEPS`, of the count that is best for it."""
    counts = [n for n in range(2, run.M + 1) if run.M % n == 0 and n * run.S <= len(network)]
    counts = [n for n in counts if n in (only or counts)]
    some = replace(run, islands=IslandsSpec(count=counts[0], local_steps=512, codec="blockwise8"))
    one, plans = job_of(some.island(0)), dict[int, IslandsPlan]()
    for count in counts:
        islands, its_job = replace(islands_of(some), count=count), replace(one, microbatches=run.M // count)
        plans[count] = search_islands(network, its_job, islands, seed=0)
        print(count, plans[count].inner.total_s, plans[count].meeting_s, file=sys.stderr, flush=True)
    rows, known = list[dict[str, Any]](), dict[int, IslandsReport]()
    for steps in LOCAL_STEPS:
        count = min(plans, key=lambda n: plans[n].inner.total_s + plans[n].meeting_s / steps)
        plan, islands = plans[count], replace(islands_of(some), count=count, local_steps=steps)
        its_job = replace(one, microbatches=run.M // count)
        if churn.trace is not None or count not in known:
            known[count] = simulate_islands(
                network, its_job, islands, plan.cell_of, end_s=churn.end_s, settings=churn.settings,
                trace=churn.trace,
            )  # fmt: skip
        found = replace(known[count], local_steps=steps)
        rows.append(
            {
                "islands": count,
                "local_steps": steps,
                "planned_s": plan.inner.total_s + plan.meeting_s / steps,
                "step_s": found.step_s,
                "computing": float(np.mean(found.utilisation)),
                "boundary_gb": found.sent_bytes("boundary_bytes") / 1e9,
                "reduce_gb": found.sent_bytes("reduce_bytes") / 1e9,
                "meeting_gb": found.meeting_bytes / steps / 1e9,
                "deaths": sum(each.deaths for each in found.islands),
            }
        )
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name has this in it")
    parser.add_argument("--network", type=Path, default=DTFM, help="(default: dtfm.json)")
    parser.add_argument("--seed", type=int, default=0, help="of the peers at home (default: 0)")
    parser.add_argument("--stages", type=int, help="(default: as above)")
    parser.add_argument("--microbatches", type=int, help="of a step (default: 512; at home 1000, 8B 992)")
    parser.add_argument("--counts", type=int, nargs="+", default=[], help="islands (default: what divides)")
    parser.add_argument("--budget", type=float, default=20.0, help="CPU seconds of a search (default: 20)")
    parser.add_argument("--trace", type=Path, help="how many devices are up, as spot traces tell it")
    parser.add_argument("--hours", type=float, default=4.0, help="of the trace (default: 4)")
    options = parser.parse_args()
    cases = {
        "dtfm 1.3B": lambda: (read_network(options.network, 4), 8, 512),
        "dtfm 8B": lambda: (read_network(options.network, 4), 8, 512),
        "home 1.3B": lambda: (home(1000, options.seed), 8, 1000),
        "home 8B": lambda: (home(1000, options.seed), 31, 992),
    }
    rows = list[dict[str, Any]]()
    for name, made in cases.items():
        if options.only not in name:
            continue
        (devices, model), (network, stages, microbatches) = name.split(), made()
        stages, microbatches = options.stages or stages, options.microbatches or microbatches
        run, churn = run_of(model, stages, microbatches), Churn.of(options, len(network))
        found = list[dict[str, Any]]()
        for reduce in ("none", "rounded8"):
            rounded = run_of(model, stages, microbatches, reduce)
            found.append(without(network, rounded, job_of(rounded), options.budget, churn))
        found += within(network, run, churn, options.counts)
        for row in found:
            row |= {
                "devices": devices,
                "model": model,
                "stages": stages,
                "times": found[0]["step_s"] / row["step_s"],
            }
            row["tokens_per_s"] = round(run.tokens_per_step / row["step_s"])
            print(row, file=sys.stderr, flush=True)
        rows += found
    print(f"{machine()}; {time.strftime('%Y-%m-%d')}; islands_speed.py {' '.join(sys.argv[1:])}")
    report(rows, COLUMNS, "a step with and without islands, simulated")


if __name__ == "__main__":
    main()
