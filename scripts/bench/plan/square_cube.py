"""How much of its time a device computes, by the size of its layers and the round trip to its neighbours.

    python scripts/bench/plan/square_cube.py                # simulated; half a minute, one core
    python scripts/bench/plan/square_cube.py --codec none --stages 2 --peak-tflops 15.7      # as in the paper

SWARM's square-cube law (Ryabinin et al. 2023, section 4.1): compute grows with the square of a layer's width,
what crosses to the next stage with the width, so larger layers leave a device idle less. Layers as there:
`base` d_model 768, `xxlarge` 4096, `GPT-3` 12288, feed-forward 4 × as wide, float16, sequences of 512 tokens;
a stage is one layer, except `base`, of which a stage holds 3. Lines of 500 Mb/s per device and direction.

Assumed of a device: a V100 at 125 Tflop/s, of which it reaches 16 % at width 768, 36 % at 4096 and 40 % at
12288, and one sequence at a time (a microbatch is one sequence; GPT-3's is what fits). The paper's 82 % for
GPT-3 at a round trip of 0 is what computing first and sending then gives with float16 on one boundary and
40 % of the 15.7 Tflop/s that a V100 has in float32: so that is taken for its conditions.

The simulation: 3 stages of 2 peers, a learned window, the live router, steps of 256 microbatches without an
all-reduce; their ends, where the pipeline fills and drains, are in. `bound` is what the middle stage's lines
allow: each microbatch comes down and goes up twice, once forward and once back; with `--stages 2` once.
`transfer` is one of those, and `in_turn` what would be if nothing were sent while a device computes.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np

from peers.sim.throughput.engine import simulate
from peers.sim.throughput.world import Settings
from scripts.bench.common.arguments import parser_of
from scripts.bench.common.harness import machine, report
from scripts.bench.common.step_time import mean_step_s
from swarm.plan.network import BACKWARD_FORWARDS, Device, Network, StepWork

TOKENS = 512
LINE_BPS = 500e6
ROUND_TRIPS_MS = (0, 10, 50, 100, 200)
REPLICAS = 2
LAYERS = {
    # name: (width, layers of a stage, share of the peak)
    "base": (768, 3, 0.16),
    "xxlarge": (4096, 1, 0.36),
    "GPT-3": (12288, 1, 0.40),
}
BYTES_A_NUMBER = {"none": 2.0, "blockwise8": 1.0 + 4 / 256}
COLUMNS = (
    "layer", "width", "codec", "round_trip_ms", "forward_ms", "transfer_ms", "utilisation", "bound",
    "in_turn",
)  # fmt: skip


def forward_flops(width: int, layers: int) -> float:
    """Of one microbatch: 12 width² multiply-adds a token and layer, and attention over half the sequence."""
    return 2.0 * TOKENS * layers * (12 * width**2 + width * TOKENS)


def measure(name: str, codec: str, round_trip_ms: float, options: argparse.Namespace) -> dict[str, Any]:
    width, layers, share = LAYERS[name]
    stages, speed = options.stages, 1e12 * options.peak_tflops * share
    boundary_bytes = TOKENS * width * BYTES_A_NUMBER[codec]
    devices = tuple(
        Device(f"v100-{i}", 0, speed, upload_bps=LINE_BPS, download_bps=LINE_BPS)
        for i in range(stages * REPLICAS)
    )
    network = Network(devices, ("here",), np.array([[round_trip_ms / 2e3]]), np.array([[float("inf")]]))
    flops = forward_flops(width, layers)
    job = StepWork(
        stages=stages, microbatches=options.microbatches, forward_flops=(flops,) * stages,
        forward_bytes=(boundary_bytes,) * (stages - 1), backward_bytes=(boundary_bytes,) * (stages - 1),
        gradient_bytes=(0.0,) * stages, state_bytes=(0.0,) * stages, activation_bytes=(0.0,) * stages,
    )  # fmt: skip
    forward_s, transfer_s = flops / devices[0].flops_per_s, 8 * boundary_bytes / LINE_BPS
    both_s = (1 + BACKWARD_FORWARDS) * forward_s
    lines_s = transfer_s * (1 if stages == 2 else 2)
    bound = min(1.0, both_s / max(both_s, lines_s))
    step_s = options.microbatches / REPLICAS * max(both_s, lines_s)
    settings = Settings(rebalance_every_s=0.0, window=options.window)
    found = simulate(
        network, job, [i // REPLICAS for i in range(len(devices))], end_s=1e9, steps=options.steps,
        settings=settings,
    )  # fmt: skip
    busy_s = options.microbatches / REPLICAS * both_s
    return {
        "layer": name,
        "width": width,
        "codec": codec,
        "round_trip_ms": round_trip_ms,
        "forward_ms": round(1e3 * forward_s, 2),
        "transfer_ms": round(1e3 * transfer_s, 2),
        "utilisation": round(busy_s / mean_step_s(found, skip=options.steps // 2), 4),
        "bound": round(bound, 4),
        "in_turn": round(both_s / (both_s + lines_s), 4),
        "step_s": round(mean_step_s(found, skip=options.steps // 2), 3),
        "least_step_s": round(step_s, 3),
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--codec", nargs="+", default=list(BYTES_A_NUMBER), choices=list(BYTES_A_NUMBER))
    parser.add_argument("--stages", type=int, default=3, help="2: a line carries one boundary (default: 3)")
    parser.add_argument("--peak-tflops", type=float, default=125.0, help="of a device (default: 125)")
    parser.add_argument("--microbatches", type=int, default=256, help="of a step (default: 256)")
    parser.add_argument("--steps", type=int, default=12, help="of which the second half counts (default: 12)")
    parser.add_argument("--window", type=int, help="fixed (default: learned)")
    parser.add_argument("--quick", action="store_true", help="round trips of 0 and 100 ms only")
    options = parser.parse_args(arguments)
    options.round_trips = (0, 100) if options.quick else ROUND_TRIPS_MS
    return options


def main() -> None:
    options = parse()
    rows = [
        measure(name, codec, round_trip_ms, options)
        for codec in options.codec
        for name in LAYERS
        for round_trip_ms in options.round_trips
    ]
    print(f"{machine()}; {time.strftime('%Y-%m-%d')}; square_cube.py {' '.join(sys.argv[1:])}")
    report(rows, COLUMNS, "share of its time that a device computes")


if __name__ == "__main__":
    main()
