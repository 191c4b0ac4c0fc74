"""What grows while a swarm trains for thousands of steps, and its peers come and go.

    python scripts/bench/recovery/soak.py                            # 10,000 steps: half an hour on two cores
    python scripts/bench/recovery/soak.py --steps 500 --every 100    # two minutes

Two stages of two peers train a model of 131,000 weights, as fast as they can. After each `--every` steps one
peer is killed, and one of a new identity takes its place: of each stage the first peer is there from the
beginning to the end. A row has what a step took, `cpu_ms` of all processes, and of the process that holds
most of those that are there all the time, its p2pd included, what it holds: `peer_*` of these peers,
`trainer_*` of this process. Exit code 1 if they hold more than `--most-mb` for each 1,000 steps behind the
first quarter, in which caches fill, or more files.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import psutil

from scripts.bench.common.arguments import parser_of
from scripts.bench.common.harness import Role, Swarm, bench_run, machine, memory_of, p2pd_of, report

COLUMNS = (
    "step", "peers_ever", "step_ms", "cpu_ms", "peer_mb", "peer_files", "peer_p2pd_mb", "trainer_mb",
    "trainer_files", "foreign_cores",
)  # fmt: skip
MB = 1 << 20
FILES = 8
"""So many connections may just be there that were not before."""


def held(pids: list[int]) -> tuple[float, int, float]:
    """The most that one of these processes holds: its memory and files, and the memory of its p2pd (MB)."""
    daemons = [daemon for daemon in map(p2pd_of, pids) if daemon is not None]
    files = [psutil.Process(pid).num_fds() for pid in pids] + [daemon.num_fds() for daemon in daemons]
    most = max(memory_of(pid)[0] for pid in pids), max(memory_of(daemon.pid)[0] for daemon in daemons)
    return most[0] / MB, max(files), most[1] / MB


async def replace(swarm: Swarm, role: Role) -> None:
    """Kill a peer, and wait until another one serves in its place."""
    assert role.stage is not None
    role.child.signal(signal.SIGKILL)
    while role.child.returncode is None:
        await asyncio.sleep(0.05)
    swarm.roles.remove(role)
    peer = await swarm.add_peer(role.stage)
    await swarm.until(lambda: peer.serving_at is not None, "a peer does not serve")


async def measure(steps: int, every: int) -> list[dict[str, Any]]:
    run = bench_run(
        stages=2, hidden=64, layers=2, microbatches=4, microbatch_size=2, sequence_length=32, steps=steps
    )
    rows: list[dict[str, Any]] = []
    async with Swarm(run, replicas=2, one_by_one=True) as swarm:
        oldest = [next(role for role in swarm.peers if role.stage == stage) for stage in range(run.S)]
        while swarm.version < steps:
            segment = await swarm.train(min(every, steps - swarm.version))
            peer_mb, peer_files, peer_p2pd_mb = held([role.child.pid for role in oldest])
            trainer_mb, trainer_files, _ = held([psutil.Process().pid])
            row = (
                swarm.version, len(swarm.peers) + len(rows), 1e3 * segment.seconds / segment.steps,
                1e3 * segment.clocks.ours / segment.steps, peer_mb, peer_files, peer_p2pd_mb, trainer_mb,
                trainer_files, segment.clocks.foreign_cores,
            )  # fmt: skip
            rows.append(dict(zip(COLUMNS, row, strict=True)))
            print(f"step {swarm.version} of {steps}: {peer_mb:.0f} and {trainer_mb:.0f} MB", file=sys.stderr)
            if swarm.version < steps:
                young = [role for role in swarm.peers if role not in oldest]
                await replace(swarm, young[0])
    return rows


def grown(rows: list[dict[str, Any]], most_mb: float) -> list[str]:
    """What grew more than it may between the first quarter and the end."""
    first, last = rows[len(rows) // 4], rows[-1]
    thousands = max(1.0, (last["step"] - first["step"]) / 1000)
    more = {name: last[name] - first[name] for name in COLUMNS[4:-1]}
    limits = {name: most_mb * thousands if name.endswith("mb") else FILES for name in more}
    return [f"{name}: {more[name]:+.1f}" for name in more if more[name] > limits[name]]


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=250, help="steps between two deaths, and of a row")
    parser.add_argument("--most-mb", type=float, default=2.0, help="that a process may grow in 1,000 steps")
    given = parser.parse_args()
    print(machine(), file=sys.stderr)
    began = time.monotonic()
    rows = asyncio.run(measure(given.steps, given.every))
    report(rows, COLUMNS, f"{given.steps} steps in {(time.monotonic() - began) / 60:.0f} minutes")
    if wrong := grown(rows, given.most_mb):
        print(f"it grows: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
