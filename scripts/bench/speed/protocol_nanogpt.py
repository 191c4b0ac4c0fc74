"""Seconds a step at the conditions of a public yardstick: Protocol NanoGPT (Pluralis Research, 2026).

    python scripts/bench/speed/protocol_nanogpt.py            # simulated; minutes of one core
    python scripts/bench/speed/protocol_nanogpt.py --real     # processes, with lines between them; as root

Its task: 203.8 M weights (8 layers, 1,024 wide, a vocabulary of 50,304), a layer on each of eight stages, 512
sequences of 1,024 tokens a step; between neighbours 200 Mbit/s and 50 ms. It says 100.5 s a step with dense
bfloat16 (0.54 s without the lines), and 19.9 s with its subspace model of 160 coordinates a token. There a
stage has one line in, which activations and gradients share, the latency of a message occupies that line, and
the schedule is fixed (one forward, one backward).

Here the same model (gelu, no biases, rotary on all channels) goes through the simulation of a swarm: one
device a stage, with a line of 200 Mbit/s in each direction that all of its transfers share, the live router
and window, and no all-reduce. Devices are as fast as makes a step without lines take 0.54 s; the last stage,
with the head, needs nearly all of that. `bound_s` is what the busiest line needs for its bytes, packed.
Latency is one way, and passes beside other messages, as on real lines.

With `--real` beside it are a bootstrap, eight peers and a trainer, each a process on a host of its own with
such a line (`netlab.py`). Their devices are played: they send real boundary tensors, take the time of the
device above, and compute nothing; a stage has 4 M weights, since nothing of them travels. `cores` is what all
processes used of the two cores, the lines' included. One process plays all lines, and carries no 2.8 Gbit/s:
so all runs `--slower` times as slowly, lines, latencies and devices, and what it takes is divided by that.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np

from peers.events import StepDone
from peers.programs.descriptions import job_of
from peers.sim.throughput.engine import simulate
from peers.sim.throughput.world import Settings
from scripts.bench.common.arguments import parser_of
from scripts.bench.common.harness import machine, machine_busy_s, report
from scripts.bench.common.model_sizes import parameter_count
from scripts.bench.common.netlab import Lab, Link, why_not
from scripts.bench.common.step_time import mean_step_s
from scripts.bench.loss.codecs_loss import codec_spec
from scripts.bench.loss.narrow import with_bottleneck
from swarm.codecs import packed_part
from swarm.manifest import BatchSpec, DataSpec, ModelSpec, OptimizerSpec, Run
from swarm.plan.network import BACKWARD_FORWARDS, Device, Network
from tests.process.forkserver import ForkServer
from tests.process.swarm_processes import Processes, Swarm

STAGES, SEQUENCES, LENGTH = 8, 512, 1024
LINE_BPS = 200e6
WITHOUT_LINES_S = 0.538
PUBLISHED_S = {"dense bfloat16": 100.475, "160 coordinates a token": 19.889}
WAYS = (
    # (codec, bottleneck, microbatches of a step)
    ("none", 0, 64), ("blockwise8", 0, 64), ("hadamard4", 0, 64), ("hadamard4", 0, 128),
    ("topk:0.05+blockwise8", 0, 64),
    ("blockwise8", 128, 64), ("blockwise8", 64, 64), ("blockwise8", 32, 64), ("hadamard4", 64, 64),
)  # fmt: skip
REAL = (
    ("blockwise8", 0, 64), ("hadamard4", 0, 64), ("blockwise8", 128, 64), ("blockwise8", 64, 64),
    ("hadamard4", 0, 128), ("hadamard4", 0, 256),
)  # fmt: skip
"""Those that are tried with processes."""
QUEUE_S = 0.5
"""What a line's router holds."""
FIRST_STEP_S = 300.0
"""A stage computes its microbatch in it."""
COLUMNS = (
    "codec", "channels", "microbatches", "latency_ms", "bytes_a_token", "step_s", "bound_s", "utilisation",
)  # fmt: skip


def yardstick(codec: str, bottleneck: int, microbatches: int) -> Run:
    """The run of one way."""
    model = ModelSpec(
        layers=STAGES, hidden=1024, heads=8, ffn_hidden=4096, vocab_size=50_304, stages=STAGES, qk_norm=True
    )
    return Run(
        name="Protocol NanoGPT", seed=1, steps=3000, dtype="bfloat16",
        model=with_bottleneck(model, bottleneck) if bottleneck else model,
        data=DataSpec(source="files", tokens=1 << 30, sequence_length=LENGTH),
        batch=BatchSpec(microbatch_size=SEQUENCES // microbatches, microbatches_per_step=microbatches),
        optimizer=OptimizerSpec(lr=1e-3), codec=codec_spec(codec),
    )  # fmt: skip


@cache
def device_speed() -> float:
    """Operations a second with which the dense model takes its time without lines: the first stages fill and
    drain once, and the last one works all the time.
    """
    run = yardstick("none", 0, 64)
    *first, last = job_of(run).forward_flops
    return (run.M * last + sum(first)) * (1 + BACKWARD_FORWARDS) / WITHOUT_LINES_S


def measure(run: Run, codec: str, latency_s: float, steps: int) -> dict[str, Any]:
    job, speed = replace(job_of(run), gradient_bytes=(0.0,) * STAGES), device_speed()
    busiest = max(job.forward_flops) * (1 + BACKWARD_FORWARDS)
    devices = tuple(
        Device(f"h100-{stage}", 0, speed, upload_bps=LINE_BPS, download_bps=LINE_BPS)
        for stage in range(STAGES)
    )
    network = Network(devices, ("here",), np.array([[latency_s]]), np.array([[float("inf")]]))
    found = simulate(
        network, job, list(range(STAGES)), end_s=1e9, steps=steps, settings=Settings(rebalance_every_s=0.0)
    )
    both_bytes = job.forward_bytes[0] + job.backward_bytes[0]
    step_s = mean_step_s(found, skip=steps // 2)
    return {
        "microbatches": run.M,
        "latency_ms": 1e3 * latency_s,
        "bytes_a_token": round(both_bytes * run.M / (SEQUENCES * LENGTH), 1),
        "step_s": round(step_s, 2),
        "bound_s": round(8 * run.M * both_bytes * packed_part(codec) / LINE_BPS, 2),
        "utilisation": round(run.M * busiest / speed / step_s, 4),
        "weights": parameter_count(run.built_in),
    }


def real(
    codec: str, bottleneck: int, microbatches: int, latency_s: float, steps: int, slower: float
) -> dict[str, Any]:
    """The same with processes: seconds of a step, the median of the second half of them."""
    run = yardstick(codec, bottleneck, microbatches)
    seconds = slower * (1 + BACKWARD_FORWARDS) / device_speed()
    busy_s = [seconds * flops for flops in job_of(run).forward_flops]
    played = replace(
        run,
        data=DataSpec(source="tales", sequence_length=LENGTH),
        model=replace(run.built_in, ffn_hidden=128, vocab_size=256),
        checkpoint_every=0,
        rebalance_every_s=0,
    )
    lab = Lab(
        [f"h{i}" for i in range(STAGES + 2)],
        link=Link(delay_s=slower * latency_s), bandwidth_bps=LINE_BPS / slower, queue_s=slower * QUEUE_S,
    )  # fmt: skip
    with lab, tempfile.TemporaryDirectory() as folder, Swarm(Path(folder), played, lab=lab) as swarm:
        swarm.bootstrap()
        for stage in range(STAGES):
            last = stage == STAGES - 1
            swarm.job_s = busy_s[stage] / (1 if last else 2)  # the last has one job, the others two
            swarm.peer(stage, "--max-inflight", str(microbatches))
        swarm.all_serve()
        swarm.job_s = 0.0
        trainer = swarm.trainer("--steps", str(steps))
        swarm.until(lambda: trainer.heard(StepDone), "the first step", FIRST_STEP_S)
        began, used = time.monotonic(), machine_busy_s()
        swarm.until(lambda: len(trainer.heard(StepDone)) == steps, "the steps", steps * FIRST_STEP_S)
        cores = (machine_busy_s() - used) / (time.monotonic() - began)
        ends_s = [event.at for event in trainer.heard(StepDone)]
        swarm.ends(trainer)
    took_s = [(b - a) / slower for a, b in pairwise(ends_s)]
    print(f"{codec}, {bottleneck or 1024} channels: {took_s} s", file=sys.stderr, flush=True)
    return {"real_step_s": round(statistics.median(took_s[steps // 2 - 1 :]), 2), "cores": round(cores, 2)}


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of both, one way in at least 25 ms."""
    Processes.fork_server = ForkServer(["scripts.bench.common.played_peers"])
    rows = []
    try:
        for number in options.ways:
            codec, channels, microbatches = REAL[number]
            found = measure(yardstick(codec, channels, microbatches), codec, 0.025, options.steps)
            row = real(codec, channels, microbatches, 0.025, options.steps, options.slower)
            ratio = round(found["step_s"] / row["real_step_s"], 3)
            print(row, file=sys.stderr, flush=True)
            rows.append({"codec": codec, "channels": channels or 1024, **found, **row, "ratio": ratio})
    finally:
        Processes.fork_server.close()
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=8, help="of which the second half counts (default: 8)")
    parser.add_argument("--real", action="store_true", help="processes, beside the simulation")
    parser.add_argument(
        "--ways", type=int, nargs="+", choices=range(len(REAL)), default=[*range(len(REAL))],
        help="of --real: codecs, from 0 (default: all)",
    )  # fmt: skip
    parser.add_argument("--slower", type=float, default=1.0, help="of --real (default: 1)")
    options = parser.parse_args()
    if options.real:
        if why_not():
            sys.exit(f"no lines to shape: a network lab {why_not()}")
        print(f"{machine()}; {time.strftime('%Y-%m-%d')}; published, s a step: {PUBLISHED_S}")
        report(compare(options), (*COLUMNS, "real_step_s", "ratio", "cores"), "seconds of a step")
        return
    rows = [
        {"codec": codec, "channels": bottleneck or 1024, **measure(run, codec, latency_s, options.steps)}
        for codec, bottleneck, microbatches in WAYS
        for run in [yardstick(codec, bottleneck, microbatches)]
        for latency_s in (0.025, 0.05)
    ]
    print(f"{machine()}; {time.strftime('%Y-%m-%d')}; published, s a step: {PUBLISHED_S}")
    report(rows, COLUMNS, "seconds of a step")


if __name__ == "__main__":
    main()
