"""The throughput simulation against real swarms: tokens per second of both, in the same configurations.

    python scripts/bench/plan/validate.py               # as root, five minutes
    python scripts/bench/plan/validate.py --only 2 3
    python scripts/bench/plan/validate.py --slower 4    # for machines with few cores
    python scripts/bench/plan/validate.py --virtual     # without real swarms, half a minute
    python scripts/bench/plan/validate.py --virtual --reduce rounded16

Between the two are the classes that ship in virtual time (`shipped_per_s`): all of the protocol, its calls
over the lines that the simulation has too, and devices that take their time and compute nothing.

Real processes (bootstrap, peers, a trainer), each on a host of its own with the stated line up and down and
the stated delay to all others (`netlab.py`). Devices are made slow, so that two cores can play many: each
forward, each backward, and the forward, loss and backward of the last stage together, takes `--job`
seconds on the device thread (SWARM_JOB_S), more than what it really computes. So routing, queues, transfers,
all-reduces and the ends of steps are compared, and the arithmetic is not, as long as the machine has cores
for all: `cores` is the share of their time that anything used meanwhile, whatever it was. A microbatch costs
70 to 120 ms of a core, all of its stages, calls and packets together, so that two cores that play six peers
are too few while microbatches are computed, where jobs take 50 ms.
`--slower` has jobs and lines and their delays so many times slower, and all as long as that. The simulations
get the same times, bytes and lines (less the headers of TCP/IP), the same window, and no other
number: nothing was fitted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
import psutil

from peers.events import Event, StepDone
from peers.programs.descriptions import job_of
from peers.sim.device import SimDevice
from peers.sim.dice import Dice
from peers.sim.directory import Dht, SimDirectory
from peers.sim.loop import Process, VirtualLoop
from peers.sim.network import Network as CallNetwork
from peers.sim.swarm import Zeros
from peers.sim.throughput.engine import simulate
from peers.sim.throughput.world import Settings
from peers.stage.server import StagePeer
from peers.stage.settings import StageSettings
from peers.trainer import Trainer, TrainerSettings
from scripts.bench.common.arguments import parser_of
from scripts.bench.common.harness import machine, machine_busy_s, report
from scripts.bench.common.host_lines import HostLines
from scripts.bench.common.netlab import Lab, Link, why_not
from scripts.bench.common.step_time import mean_step_s
from scripts.bench.common.unhurried import Unhurried
from scripts.bench.recovery.chaos import ChaosSwarm
from swarm.codecs import packed_part
from swarm.manifest import Run, demo_run
from swarm.plan.network import Device, Network
from swarm.records import NO_STAGE

COLUMNS = (
    "stages", "replicas", "mbit", "delay_ms", "window", "reduce", "job_s", "real_per_s", "shipped_per_s",
    "simulated_per_s", "shipped_ratio", "ratio", "within_15", "cores",
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
    window: int | None
    """None: it learns."""
    max_inflight: int = 8
    """Microbatches at a peer; as the real ones of `scripts/bench/recovery/chaos.py`."""


CASES = (
    Case(2, 1, 100.0, 0.005, 6),
    Case(2, 2, 100.0, 0.005, 12),
    Case(3, 2, 20.0, 0.02, 16),
    Case(2, 3, 8.0, 0.005, 16),
    Case(4, 1, 50.0, 0.05, 16),
)


def validation_run(stages: int, reduce: str = "none") -> Run:
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
        codec=replace(base.codec, reduce=reduce),
    )


def real(case: Case, run: Run, *, job_s: float, steps: int) -> tuple[float, float]:
    """Tokens per second of a swarm of processes, the median over steps, and the share of all cores in use."""
    hosts = [f"h{i}" for i in range(case.stages * case.replicas + 2)]
    lab = Lab(hosts, link=Link(delay_s=case.delay_s), bandwidth_bps=case.mbit * 1e6, queue_s=2.0)
    os.environ["SWARM_JOB_S"] = str(job_s)
    try:
        with lab, tempfile.TemporaryDirectory() as folder, ChaosSwarm(Path(folder), run, lab=lab) as swarm:
            swarm.bootstrap()
            swarm.peers(case.replicas)
            trainer = swarm.trainer("--window", str(case.window))
            swarm.until_version(2)
            began_s, used_s = time.monotonic(), machine_busy_s()
            swarm.until_version(steps + 2)
            cores = (machine_busy_s() - used_s) / (time.monotonic() - began_s) / psutil.cpu_count()
            times = {event.t: event.at for event in trainer.heard(StepDone)}
    finally:
        del os.environ["SWARM_JOB_S"]
    took_s = [b - a for a, b in pairwise(times[t] for t in sorted(times) if t >= 1)]
    return run.tokens_per_step / statistics.median(took_s), cores


class Tokens(Zeros):
    """Any tokens, the same in all microbatches: of zeros most gradients are zeros, which take no bytes."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        dice = np.random.default_rng(0)
        self._batch = dice.integers(0, run.model.vocab_size, self._batch.shape).astype(self._batch.dtype)


def shipped(case: Case, run: Run, *, job_s: float, steps: int) -> float:
    """Tokens per second of the classes that ship, in virtual time, the median over steps."""
    run = replace(run, data=replace(run.data, tokens=1_000_000))
    lines, ends_s = HostLines(hosts_of(case), packed_part(run.codec.forward_at(0))), list[float]()
    loop = VirtualLoop(lambda: 0.001)
    network, dht = CallNetwork(loop, Dice(1), lines), Dht(loop, Dice(2))

    def hear(event: Event) -> None:
        if isinstance(event, StepDone):
            ends_s.append(loop.now_s)

    def begin(host: int) -> None:
        process, stage = Process(f"h{host}"), host // case.replicas
        lines.device_of[process.name] = host
        transport, directory = network.add(process), SimDirectory(dht, process)

        async def serve() -> None:
            peer = StagePeer(
                run, stage, Unhurried(run, stage), transport, directory,
                StageSettings(max_inflight=case.max_inflight, joined_at=loop.unix_s()), hear,
                device=SimDevice(Dice(host), job_s, spread=0.0),
            )  # fmt: skip
            transport.on_gone = peer.peer_gone
            await peer.run()

        trainer = Trainer(run, Tokens(run), transport, directory, TrainerSettings(window=case.window), hear)
        process.start(loop, trainer.run() if stage == case.stages else serve())

    with loop.running():
        for host in range(case.stages * case.replicas + 1):
            begin(host)
        taken = loop.run(lambda: len(ends_s) >= steps + 2 or bool(loop.bugs), limit_s=1e5)
        assert taken and not loop.bugs, f"{len(ends_s)} steps; {loop.bugs}"
    return run.tokens_per_step / statistics.median(b - a for a, b in pairwise(ends_s[1:]))


def hosts_of(case: Case) -> Network:
    """A host for each peer, and for a trainer."""
    line_bps = PAYLOAD * case.mbit * 1e6
    hosts = [
        Device(f"h{i}", 0, 1.0, upload_bps=line_bps, download_bps=line_bps)
        for i in range(case.stages * case.replicas + 1)
    ]
    return Network(tuple(hosts), ("lab",), np.array([[case.delay_s]]), np.array([[np.inf]]))


STEP_JOBS = 4
"""Of a device between two steps: it freezes a sum, takes the step, begins a sum, hashes weights. In virtual
time each takes a third of `job_s` (`SimDevice`), in life nearly nothing."""


def simulated(case: Case, run: Run, *, job_s: float, steps: int, virtual: bool = False) -> float:
    """Tokens per second of the simulation of the same; `virtual`: of `shipped`."""
    job = job_of(run)
    # Its backward is two forwards: together they are as long as the two jobs of a middle stage, or the
    # single one of the last.
    last = case.stages - 1
    flops = tuple((job_s if stage == last else 2 * job_s) / 3 for stage in range(case.stages))
    job = replace(job, forward_flops=flops)
    settings = Settings(
        window=case.window, rebalance_every_s=0.0, max_inflight=case.max_inflight,
        step_s=STEP_JOBS * job_s / 3 if virtual else 0.0,
    )  # fmt: skip
    # Trainers are next to the first devices.
    layout = [NO_STAGE, *(i // case.replicas for i in range(case.stages * case.replicas))]
    found = simulate(hosts_of(case), job, layout, end_s=1e9, steps=steps + 2, settings=settings)
    return run.tokens_per_step / mean_step_s(found, skip=2)


def row(case: Case, reduce: str, *, job_s: float, steps: int, virtual: bool) -> dict[str, Any]:
    """`virtual`: the simulation ÷ the shipped classes; else both ÷ a real swarm."""
    run = validation_run(case.stages, reduce)
    middle = shipped(case, run, job_s=job_s, steps=steps)
    measured, cores = (middle, None) if virtual else real(case, run, job_s=job_s, steps=steps)
    expected = simulated(case, run, job_s=job_s, steps=steps, virtual=virtual)
    ratio = expected / measured
    return {
        "stages": case.stages, "replicas": case.replicas, "mbit": case.mbit, "delay_ms": 1e3 * case.delay_s,
        "window": case.window, "reduce": reduce, "job_s": job_s,
        "real_per_s": None if virtual else round(measured, 1),
        "shipped_per_s": round(middle, 1), "simulated_per_s": round(expected, 1),
        "shipped_ratio": round(middle / measured, 3), "ratio": round(ratio, 3),
        "within_15": abs(ratio - 1) <= WITHIN, "cores": None if cores is None else round(cores, 2),
    }  # fmt: skip


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--job", type=float, default=0.05, help="seconds of a job (default: 0.05)")
    parser.add_argument("--slower", type=float, default=1.0, help="jobs, lines and delays (default: 1)")
    parser.add_argument("--steps", type=int, default=6, help="measured, after two (default: 6)")
    parser.add_argument("--reduce", default="none", help="or rounded16, rounded8 (default: none)")
    parser.add_argument("--virtual", action="store_true", help="no real swarms")
    parser.add_argument("--only", type=int, nargs="+", choices=range(len(CASES)), help="cases, from 0")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    if not options.virtual and why_not():
        print(f"no lines to shape: a network lab {why_not()}", file=sys.stderr)
        return 1
    rows = []
    slower, limits = options.slower, {"job_s": options.slower * options.job, "steps": options.steps}
    for number in options.only or range(len(CASES)):
        case = CASES[number]
        case = replace(case, mbit=case.mbit / slower, delay_s=slower * case.delay_s)
        rows.append(row(case, options.reduce, **limits, virtual=options.virtual))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    report(rows, COLUMNS, f"{machine()}\nreal swarms and their simulation, tokens per second")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # everything is ended by then
        sys.exit("stopped")
