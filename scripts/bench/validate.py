"""The throughput simulation against real swarms: tokens per second of both, in the same configurations.

    python scripts/bench/validate.py               # as root, five minutes
    python scripts/bench/validate.py --only 2 3

Real processes (bootstrap, peers, a trainer), each on a host of its own with the stated line up and down and
the stated delay to all others (`netlab.py`). Devices are made slow, so that two cores can play many: each
forward, each backward, and the forward, loss and backward of the last stage together, takes `--job`
seconds on the device thread (SWARM_JOB_S); what it really computes takes a few milliseconds of that. So
routing, queues, transfers, all-reduces and the ends of steps are compared, and the arithmetic is not. The
simulation gets the same times, bytes and lines (less the headers of TCP/IP), the same window, and no other
number: nothing was fitted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from harness import machine, report

from peers.events import StepDone
from peers.programs.descriptions import job_of
from peers.sim.throughput.engine import simulate
from peers.sim.throughput.report import Settings
from scripts.bench.chaos import ChaosSwarm
from scripts.bench.netlab import Lab, Link, why_not
from swarm.manifest import Run, demo_run
from swarm.plan.network import Device, Network

COLUMNS = (
    "stages", "replicas", "mbit", "delay_ms", "window", "real_per_s", "simulated_per_s", "ratio", "within_15",
)  # fmt: skip
WITHIN = 0.15
PAYLOAD = 1448 / 1500
"""Of a packet, what is not headers: IPv4, TCP and its timestamps."""


@dataclass(frozen=True)
class Case:
    """One swarm."""

    stages: int
    replicas: int
    mbit: float
    """Of each host, up and down."""
    delay_s: float
    """One way."""
    window: int


CASES = (
    Case(2, 1, 100.0, 0.005, 6),
    Case(2, 2, 100.0, 0.005, 12),
    Case(3, 2, 20.0, 0.02, 16),
    Case(2, 3, 8.0, 0.005, 16),
    Case(4, 1, 50.0, 0.05, 16),
)


def validation_run(stages: int) -> Run:
    """A small GPT with boundary tensors of 64 kB: 64 ms at 8 Mbit/s."""
    base = demo_run(stages=stages, steps=1_000_000, codec="blockwise8", seed=3)
    return replace(
        base,
        name="validation",
        checkpoint_every=0,
        rebalance_every_s=0,
        model=replace(base.model, layers=4, hidden=128, heads=2, ffn_hidden=128),
        data=replace(base.data, sequence_length=128),
        batch=replace(base.batch, microbatch_size=4, microbatches_per_step=48),
    )


def real(case: Case, run: Run, *, job_s: float, steps: int) -> float:
    """Tokens per second of a swarm of processes, the median over steps."""
    hosts = [f"h{i}" for i in range(case.stages * case.replicas + 2)]
    lab = Lab(hosts, link=Link(delay_s=case.delay_s), bandwidth_bps=case.mbit * 1e6, queue_s=2.0)
    os.environ["SWARM_JOB_S"] = str(job_s)
    try:
        with lab, tempfile.TemporaryDirectory() as folder, ChaosSwarm(Path(folder), run, lab=lab) as swarm:
            swarm.bootstrap()
            swarm.peers(case.replicas)
            trainer = swarm.trainer("--window", str(case.window))
            swarm.until_version(steps + 2)
            times = {event.t: event.at for event in trainer.heard(StepDone)}
    finally:
        del os.environ["SWARM_JOB_S"]
    took_s = [b - a for a, b in pairwise(times[t] for t in sorted(times) if t >= 1)]
    return run.tokens_per_step / statistics.median(took_s)


def simulated(case: Case, run: Run, *, job_s: float, steps: int) -> float:
    """Tokens per second of the simulation of the same."""
    job = job_of(run)
    # Its backward is two forwards: together they are as long as the two jobs of a middle stage, or the
    # single one of the last.
    last = case.stages - 1
    flops = tuple((job_s if stage == last else 2 * job_s) / 3 for stage in range(case.stages))
    job = replace(job, forward_flops=flops)
    count = case.stages * case.replicas
    line_bps = PAYLOAD * case.mbit * 1e6
    devices = tuple(Device(f"d{i}", 0, 1.0, upload_bps=line_bps, download_bps=line_bps) for i in range(count))
    network = Network(devices, ("lab",), np.array([[case.delay_s]]), np.array([[np.inf]]))
    settings = Settings(window=case.window, rebalance_every_s=0.0, max_inflight=8)
    layout = [i // case.replicas for i in range(count)]
    found = simulate(network, job, layout, end_s=1e9, steps=steps + 2, settings=settings)
    return run.tokens_per_step / found.step_s(skip=2)


def row(case: Case, *, job_s: float, steps: int) -> dict[str, Any]:
    run = validation_run(case.stages)
    measured = real(case, run, job_s=job_s, steps=steps)
    expected = simulated(case, run, job_s=job_s, steps=steps)
    ratio = expected / measured
    return {
        "stages": case.stages, "replicas": case.replicas, "mbit": case.mbit, "delay_ms": 1e3 * case.delay_s,
        "window": case.window, "real_per_s": round(measured, 1), "simulated_per_s": round(expected, 1),
        "ratio": round(ratio, 3), "within_15": abs(ratio - 1) <= WITHIN,
    }  # fmt: skip


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    text, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=text, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--job", type=float, default=0.05, help="seconds of a job (default: 0.05)")
    parser.add_argument("--steps", type=int, default=6, help="measured, after two (default: 6)")
    parser.add_argument("--only", type=int, nargs="+", choices=range(len(CASES)), help="cases, from 0")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    if why_not():
        print(f"no lines to shape: a network lab {why_not()}", file=sys.stderr)
        return 1
    rows = []
    for number in options.only or range(len(CASES)):
        rows.append(row(CASES[number], job_s=options.job, steps=options.steps))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    report(rows, COLUMNS, f"{machine()}\nreal swarms and their simulation, tokens per second")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # everything is ended by then
        sys.exit("stopped")
