"""What `swarm verify` has in memory at most, and how long it takes, with and without `--scratch`.

    python scripts/bench/speed/verify_memory.py           # ten minutes of a core, 3 GB of memory and of disk
    python scripts/bench/speed/verify_memory.py --before DIR      # also with the checkout in DIR

A decoder of some 80 million weights on 4 stages: two steps are computed and signed, and the checkpoint of the
last is saved; then `swarm verify` computes them again in a process of its own, of which the most that was
resident is measured (files that are mapped count while they are). `bytes_a_weight` is that without what a
process has that verifies a model of a few weights.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch

from peers.net.identity import Identity
from peers.storage.checkpoint import Checkpoint
from peers.storage.samples import open_data
from peers.storage.transcript import Took, TranscriptWriter, path_of
from scripts.bench.common.harness import report
from swarm.manifest import BatchSpec, DataSpec, ModelSpec, Run, demo_run
from swarm.model.layout import stage_layout
from swarm.model.reductions import state_digest, vectors_digest
from swarm.model.reference import SingleProcess
from swarm.model.stage import StageCompute
from swarm.protocol.statements import sign
from swarm.wire.trails import Signed, TookStep, TookSteps, pack_rows

STEPS, ROOT = 2, Path(__file__).resolve().parents[3]


def run_of(hidden: int, layers: int, stages: int) -> Run:
    base = demo_run()
    return replace(
        base,
        optimizer=replace(base.optimizer, warmup_steps=0),
        dtype="float32",
        steps=STEPS,
        model=ModelSpec(
            hidden=hidden, layers=layers, heads=8, ffn_hidden=4 * hidden, vocab_size=256, stages=stages
        ),
        data=DataSpec(source="tales", sequence_length=128, tokens=1_000_000),
        batch=BatchSpec(microbatch_size=2, microbatches_per_step=4),
    )


def train(run: Run, folder: Path) -> None:
    """Write what the peers of an honest run leave behind: a transcript, and the last checkpoint."""
    again = SingleProcess(run, open_data(run, (), None).batch)
    rows: list[list[TookStep]] = [[] for _ in range(run.S)]
    for _ in range(STEPS):
        squares = again.compute()
        sums = [vectors_digest([again.sum_of(stage)], on_device=False) for stage in range(run.S)]
        again.take(squares)
        for stage in range(run.S):
            rows[stage].append(TookStep(sums[stage], squares[0], state_digest(again.state_of(stage))))
    entries: list[Took] = []
    for stage in range(run.S):
        Checkpoint(folder, run, stage, STEPS).save(again.state_of(stage))
        kind, peer = StageCompute(run, stage).rehearse(), Identity.generate()
        took = TookSteps(stage, 0, kind, pack_rows(rows[stage]))
        entries.append(Took(took, (Signed(peer.peer_id, sign(peer, run.id, took)),)))
    TranscriptWriter(folder, run).append(entries)


def verify(run: Run, folder: Path, tree: Path, *words: str) -> tuple[float, float]:
    """(the most that was resident in MB, seconds)."""
    command = [
        "/usr/bin/env", f"PYTHONPATH={tree}", "OMP_NUM_THREADS=1", sys.executable, "-c", MEASURED,
        "verify", "--transcript", str(path_of(folder, run)), "--from", "0", "--to", str(STEPS), *words,
    ]  # fmt: skip
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tree)
    found = re.search(r"most resident: (\d+) kB", done.stderr)
    if "to the last bit" not in done.stdout or not found:
        sys.exit(f"not verified: {done.stdout}{done.stderr[-2000:]}")
    return int(found[1]) / 1e3, time.monotonic() - began


MEASURED = """
import sys
from peers import cli
code = cli.main(sys.argv[1:])
for line in open("/proc/self/status"):
    if line.startswith("VmHWM:"):  # `ru_maxrss` would be at least that of the process that it was forked from
        print("most resident:", line.split()[1], "kB", file=sys.stderr)
sys.exit(code)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout to measure as well")
    parser.add_argument("--dir", type=Path, default=None, help="where to write (default: a temporary folder)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        small, large = Path(name, "small"), Path(name, "large")
        few, run = run_of(32, 4, 4), run_of(640, 16, 4)
        train(few, small)
        train(run, large)
        weights = [stage_layout(run, stage).numel for stage in range(run.S)]
        ways = {"in memory": (ROOT, []), "--scratch": (ROOT, ["--scratch", str(Path(name, "scratch"))])}
        if options.before:
            ways = {"before": (options.before, []), **ways}
        for way, (tree, words) in ways.items():
            base, _ = verify(few, small, tree, *words)
            peak, took = verify(run, large, tree, *words)
            rows.append(
                {
                    "way": way, "stages": run.S, "weights_m": round(sum(weights) / 1e6, 1),
                    "largest_m": round(max(weights) / 1e6, 1), "peak_mb": round(peak),
                    "bytes_a_weight": round((peak - base) * 1e6 / sum(weights), 1), "took_s": round(took),
                }
            )  # fmt: skip
            print(rows[-1], flush=True)
    report(rows, list(rows[0]), "What swarm verify has in memory at most")


if __name__ == "__main__":
    os.nice(5)
    main()
