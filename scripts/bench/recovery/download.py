"""How fast the state of a stage comes from one, two and three peers at once.

    python scripts/bench/recovery/download.py                     # 24 MB, sources of 40 Mbit/s; half a minute
    python scripts/bench/recovery/download.py --mb 100 --source-mbit 100 --sources 1 2 4
    python scripts/bench/recovery/download.py --kill              # one source is killed half-way

Real processes and p2pd, each in a host of its own of the network lab (`netlab.py`: Linux, root), 20 ms apart.
`least_s` is what the sources' uplinks alone would take.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch

from peers.net.node import Node
from peers.net.p2pd import DaemonOptions
from peers.storage.checkpoint_store import CheckpointStore
from peers.transfer.client import download, state_of
from peers.transfer.server import StateLeases
from scripts.bench.common.arguments import parser_of
from scripts.bench.common.harness import machine, report
from scripts.bench.common.netlab import Lab, Link
from swarm.manifest import audit_run

RUN = audit_run(stages=1)
COLUMNS = ("sources", "state_mb", "seconds", "mbit_per_s", "least_s", "gave_mb", "killed")


def one_version(size: int) -> CheckpointStore:
    """Version 1 of a state of so many bytes, the same in every process."""
    numbers = torch.randn(size // 8, generator=torch.Generator().manual_seed(1))
    store = CheckpointStore(RUN, 0, None)
    store.pin(1, {"weights": numbers, "momentum": numbers + 1})
    return store


async def give(ip: str, size: int) -> None:
    """A source: says where it is, and serves until standard input ends."""
    async with Node(options=DaemonOptions(host=ip)) as node:
        StateLeases(RUN, node.transport, {0: one_version(size)})
        print(json.dumps([node.peer_id, list(node.addresses)]), flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def take(ip: str, size: int, sources: list[tuple[str, list[str]]]) -> None:
    """The joiner: says when half is here, and at the end how long it took."""
    state = one_version(size).load(1)
    half = False

    def progress(done: int, total: int, count: int) -> None:
        nonlocal half
        if not half and done > total / 2:
            half = True
            print("half", flush=True)

    async with Node(options=DaemonOptions(host=ip)) as node:
        for peer, addresses in sources:
            node.transport.addresses.learn(peer, addresses)
        began = time.monotonic()
        wanted = replace(state_of(RUN, 0, 1), like=state)
        found = await download(node.transport, wanted, [peer for peer, _ in sources], progress=progress)
        took_s = time.monotonic() - began
        assert all(torch.equal(found.tensors[name], state[name]) for name in state)
        lines = node.transport.lines
        gave = [lines[peer].received_bytes if peer in lines else 0 for peer, _ in sources]
        print(json.dumps({"seconds": took_s, "gave": gave}), flush=True)


def measure(count: int, size: int, source_mbit: float, joiner_mbit: float, kill: bool) -> dict[str, Any]:
    """One download from `count` sources."""
    hosts = ["joiner", *(f"source{i}" for i in range(count))]
    programs: list[subprocess.Popen[str]] = []

    def start(lab: Lab, host: str, *words: str) -> subprocess.Popen[str]:
        with lab.inside(host):
            command = [sys.executable, str(Path(__file__).resolve()), "--ip", lab.ip(host), *words]
            program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        programs.append(program)
        return program

    def said(program: subprocess.Popen[str]) -> str:
        assert program.stdout is not None
        line = program.stdout.readline()
        if not line:
            raise SystemExit("a process of the benchmark ended too early")
        return line

    with Lab(hosts, link=Link(delay_s=0.02), bandwidth_bps=source_mbit * 1e6) as lab:
        lab.set_bandwidth("joiner", joiner_mbit * 1e6)
        try:
            givers = [start(lab, host, "--give", str(size)) for host in hosts[1:]]
            where = [said(giver) for giver in givers]
            joiner = start(lab, "joiner", "--take", str(size), "--at", *where)
            said(joiner)
            if kill:
                givers[0].send_signal(signal.SIGKILL)
            result = json.loads(said(joiner))
        finally:
            for program in programs:
                if program.stdin is not None:
                    program.stdin.close()
            for program in programs:
                try:
                    program.wait(20)
                except subprocess.TimeoutExpired:
                    program.kill()
                    program.wait()
    return {
        "sources": count, "state_mb": size / 1e6, "seconds": round(result["seconds"], 2),
        "mbit_per_s": round(8 * size / result["seconds"] / 1e6, 1),
        "least_s": round(8 * size / (count * source_mbit * 1e6), 2),
        "gave_mb": " ".join(f"{n / 1e6:.1f}" for n in result["gave"]), "killed": int(kill),
    }  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--mb", type=float, default=24.0, help="size of the state")
    parser.add_argument("--sources", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--source-mbit", type=float, default=40.0, help="line of each source")
    parser.add_argument("--joiner-mbit", type=float, default=400.0)
    parser.add_argument("--kill", action="store_true", help="kill one source half-way (with two or more)")
    for name in ("--ip", "--give", "--take"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--at", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.give:
        asyncio.run(give(options.ip, int(options.give)))
        return
    if options.take:
        asyncio.run(take(options.ip, int(options.take), [json.loads(line) for line in options.at]))
        return
    size = int(options.mb * 1e6) // 8 * 8
    rows = [
        measure(n, size, options.source_mbit, options.joiner_mbit, options.kill and n > 1)
        for n in options.sources
    ]
    print(f"{machine()}; {time.strftime('%Y-%m-%d')}; download.py {' '.join(sys.argv[1:])}")
    report(rows, COLUMNS, "the state of a stage from several peers at once")


if __name__ == "__main__":
    main()
