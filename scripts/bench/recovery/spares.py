"""Step time of four data-centre GPUs, alone and with one GPU behind a home line.

    python scripts/bench/recovery/spares.py          # half a minute, one core

The throughput simulation: 128 microbatches a step, 4.9 s of computation in four stages of a GPU each, or in
one of four; 2.4 GB of a stage to exchange; 10 Gbit/s in the data centre. The home's GPU is a quarter as fast,
its download five times its upload. `with_s`: the second half of 12 steps, after it was found out that a step
takes longer with it; `always_s`: as if it never stood by; `planned_s`: what the planner predicts with it.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np

from peers.sim.throughput.engine import simulate
from peers.sim.throughput.world import Settings, ThroughputReport
from scripts.bench.common.harness import machine, report
from scripts.bench.common.step_time import mean_step_s
from swarm.plan.network import BACKWARD_FORWARDS, Device, Network, StepWork
from swarm.plan.overlapped import Overlap

COLUMNS = ("stages", "upload_mbit", "alone_s", "with_s", "always_s", "planned_s", "times")
GPUS, MICROBATCHES, STEPS = 4, 128, 12
COMPUTE_S = 4.9
GRADIENT_BYTES = 2.4e9
FLOPS_PER_S = 150e12
UPLOADS_MBIT = (1000, 100, 40, 20, 10)


def job_of(stages: int) -> StepWork:
    flops = COMPUTE_S * FLOPS_PER_S * GPUS / stages / MICROBATCHES / (1 + BACKWARD_FORWARDS)
    boundary, each = (8e6,) * (stages - 1), (GRADIENT_BYTES,) * stages
    return StepWork(
        stages=stages, microbatches=MICROBATCHES, forward_flops=(flops,) * stages, forward_bytes=boundary,
        backward_bytes=boundary, gradient_bytes=each, state_bytes=each, activation_bytes=(0.0,) * stages,
    )  # fmt: skip


def network_of(*homes: Device) -> Network:
    gpus = [Device(f"gpu{i}", 0, FLOPS_PER_S, upload_bps=1e10, download_bps=1e10) for i in range(GPUS)]
    return Network((*gpus, *homes), ("here",), np.array([[0.01]]), np.array([[math.inf]]))


def row(stages: int, mbit: int) -> dict[str, Any]:
    job, layout = job_of(stages), [i % stages for i in range(GPUS)]
    home = Device("home", 0, FLOPS_PER_S / 4, upload_bps=mbit * 1e6, download_bps=5e6 * mbit)

    def run(network: Network, layout: list[int], every_s: float) -> ThroughputReport:
        return simulate(
            network, job, layout, end_s=1e6, steps=STEPS, settings=Settings(rebalance_every_s=every_s)
        )

    alone, joined, always = (
        run(network_of(), layout, 60.0),
        run(network_of(home), [*layout, 0], 60.0),
        run(network_of(home), [*layout, 0], 0.0),
    )
    half = STEPS // 2
    return {
        "stages": stages,
        "upload_mbit": mbit,
        "alone_s": round(mean_step_s(alone, skip=half), 2),
        "with_s": round(mean_step_s(joined, skip=half), 2),
        "always_s": round(mean_step_s(always, skip=half), 1),
        "planned_s": round(Overlap(network_of(home), job).predict([*layout, 0]).total_s, 1),
        "times": round(mean_step_s(joined, skip=half) / mean_step_s(alone, skip=half), 3),
    }


def main() -> None:
    rows = [row(stages, mbit) for stages in (4, 1) for mbit in UPLOADS_MBIT]
    print(f"{machine()}; {time.strftime('%Y-%m-%d')}; spares.py")
    report(rows, COLUMNS, "seconds of a step, with and without a home among data centres")


if __name__ == "__main__":
    main()
