"""What a microbatch keeps between its forward and its backward, and what it takes to compute one.

    python scripts/bench/speed/recompute.py               # three minutes of a core

A middle stage of a decoder as wide as GPT-2 medium: as it is, with `--recompute-layers`, and with
`--recompute`. `kept_mb` is what a peer measures before it says how many microbatches it admits; `admitted`
are those for which 8 GB beside the weights are enough (half of it is for microbatches). `cpu_s` is of a
forward and a backward, on one core: the ways are measured in turns, and each has the median of its rounds.
The gradients of all three are compared, bit by bit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch

from peers.owner.memory_limit import MAX_INFLIGHT, needs_of
from scripts.bench.common.harness import report
from swarm.ids import Microbatch
from swarm.manifest import PRESETS, BatchSpec, DataSpec, ModelSpec, demo_run
from swarm.model.gpt import layer_split
from swarm.model.stage import StageCompute
from swarm.model.stage_io import stage_inputs
from swarm.wire.codec import Encoded, encode

STAGE, FREE = 1, 8_000_000_000
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "--recompute-layers": {"recompute_layers": True},
    "--recompute": {"recompute": True},
}
COLUMNS = ("dtype", "way", "layers", "kept_mb", "admitted", "cpu_s")


def measure(dtype: Any, length: int, rounds: int) -> list[dict[str, Any]]:
    """One row a way."""
    run = replace(
        demo_run(),
        dtype=dtype,
        model=ModelSpec(**{**PRESETS["gpt2-medium"], "layers": 12, "vocab_size": 256}, stages=3),
        data=DataSpec(source="tales", sequence_length=length, tokens=1_000_000),
        batch=BatchSpec(microbatch_size=1, microbatches_per_step=1024),
    )
    stages = {way: StageCompute(run, STAGE, **options) for way, options in WAYS.items()}
    arrives, answer = (given(run, stage) for stage in (STAGE, STAGE + 1))
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    found: dict[str, dict[str, torch.Tensor]] = {}
    for _ in range(rounds):
        for way, compute in stages.items():
            began = time.thread_time()
            forward = compute.forward(Microbatch(0, 0), arrives)
            gradients = compute.gradients(forward, answer[:1], weights=True)
            took[way].append(time.thread_time() - began)
            found[way] = gradients.terms
    first = found["as it is"]
    assert all(torch.equal(terms[name], first[name]) for terms in found.values() for name in first)
    rows: list[dict[str, Any]] = []
    for way, compute in stages.items():
        kept = compute.saved_bytes()
        needs = needs_of(run, STAGE, microbatch=kept)
        rows.append(
            {
                "dtype": dtype,
                "way": way,
                "layers": len(layer_split(run)[STAGE]),
                "kept_mb": round(kept / 1e6, 1),
                "admitted": needs.inflight(FREE, None, host_free=FREE * MAX_INFLIGHT),
                "cpu_s": round(statistics.median(took[way]), 2),
            }
        )
    return rows


def given(run: Any, stage: int) -> list[Encoded]:
    """What enters a stage, made up."""
    generator = torch.Generator().manual_seed(1)
    codec = run.codec.forward_at(stage - 1)
    return [
        encode(torch.randn(one.shape, generator=generator).to(getattr(torch, one.dtype)), codec)
        if one.graded
        else encode(torch.zeros(one.shape, dtype=getattr(torch, one.dtype)), "none")
        for one in stage_inputs(run, stage)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows = [
        row for dtype in ("float32", "bfloat16") for row in measure(dtype, options.length, options.rounds)
    ]
    report(rows, COLUMNS, "what a microbatch keeps")


if __name__ == "__main__":
    main()
