"""How much memory a process needs at most, by role and size of the model.

    python scripts/bench/speed/memory.py                      # all: a quarter of an hour of a core, 8 GB free
    python scripts/bench/speed/memory.py --size 125M --role serve

Models are Llama's, given as configs of transformers (`hf`), or the built-in decoder in the same form (`gpt`).
Each row is a process of its own, and its `peak_mb` the most that it had resident, libraries included.

    trace   what every process of a run does first: trainers, keepers and bootstraps do no more
    pin     `swarm bootstrap`: the weights of all stages are drawn, one after the other, and hashed
    serve   a stage peer: its weights are drawn, and three steps of one microbatch of 128 tokens are taken,
            with the reduce of a replica that is alone; the last result is kept for replicas that missed it

`state_mb` is what a peer reckons for its stage: weights, optimizer, sum, and one vector of gradients. The
goal is 1.3 times that and 600 MB; for tracing 2,000 MB. "7B, 2 layers" has the widths of 7B: its last stage
is a layer and the head, which is 0.4 of one stage of eight of 7B.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.bench.common.harness import report
from swarm.manifest import BatchSpec, CustomModelSpec, DataSpec, ModelSpec, OptimizerSpec, Run, demo_run

SIZES = {  # layers, hidden, feed-forward, heads, stages
    "125M": (12, 768, 2048, 12, 8),
    "1.3B": (24, 2048, 5504, 16, 8),
    "7B": (32, 4096, 11008, 32, 8),
    "7B, 2 layers": (2, 4096, 11008, 32, 2),
}
VOCABULARY = 32_000
STAGE = 1
MB = 1e6
JOBS = (
    *(("hf", size, "trace", "float32") for size in ("125M", "1.3B", "7B")),
    *(("hf", size, "pin", "float32") for size in ("125M", "1.3B")),
    *(("hf", size, "serve", "float32") for size in ("125M", "1.3B", "7B, 2 layers")),
    *(("gpt", size, "serve", "float32") for size in ("125M", "1.3B")),
    *((kind, "1.3B", "serve", "bfloat16") for kind in ("hf", "gpt")),
)
COLUMNS = (
    "model",
    "size",
    "role",
    "moments",
    "weights_m",
    "state_mb",
    "bytes_a_weight",
    "peak_mb",
    "goal_mb",
    "took_s",
)


def run_of(kind: str, size: str, moments: Any) -> Run:
    layers, hidden, inside, heads, stages = SIZES[size]
    config = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": inside, "vocab_size": VOCABULARY,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads,
        "max_position_embeddings": 2048, "tie_word_embeddings": False,
    }  # fmt: skip
    model: Any = CustomModelSpec(kind="hf", config=json.dumps(config), stages=stages, vocab_size=VOCABULARY)
    if kind == "gpt":
        model = ModelSpec(
            layers=layers, hidden=hidden, heads=heads, ffn_hidden=inside, vocab_size=VOCABULARY, mlp="swiglu",
            stages=stages,
        )  # fmt: skip
    return replace(
        demo_run(steps=20),
        model=model,
        data=DataSpec(source="tales", sequence_length=128),
        batch=BatchSpec(microbatch_size=1, microbatches_per_step=1),
        optimizer=OptimizerSpec(lr=1e-4, moments=moments),
    )


def serve(run: Run) -> dict[str, Any]:
    """Three steps of a stage, and what it needs by its own reckoning."""
    import torch

    from peers.owner.memory_limit import needs_of
    from peers.stage.all_reduce import AllReduce
    from swarm.ids import Microbatch, Stage
    from swarm.model.stage import StageCompute
    from swarm.model.stage_io import stage_inputs
    from swarm.protocol.rounds import Plan
    from swarm.wire.codec import Encoded, encode

    def zeros(stage: Stage) -> list[Encoded]:
        codec = run.codec.forward_at(stage - 1)
        return [
            encode(torch.zeros(one.shape, dtype=getattr(torch, one.dtype)), codec if one.graded else "none")
            for one in stage_inputs(run, stage)
        ]

    class Alone:
        def serve(self, *_: Any, **__: Any) -> None: ...

    stage = min(STAGE, run.S - 1)
    compute, last = StageCompute(run, stage), stage == run.S - 1
    sums, applied = compute.sums, None
    transport: Any = Alone()
    unchecked: Any = SimpleNamespace(open=lambda *_: None)
    reducer = AllReduce(run.id, "me", transport, sums.dtype, unchecked, sums.answer)
    for t in range(3):
        mb = Microbatch(t, 0)
        sums.begin(t)
        if last:
            compute.add(compute.loss_gradients(mb, zeros(stage), weights=True))
        else:
            forward = compute.forward(mb, zeros(stage))
            back = [
                one
                for one, what in zip(zeros(stage + 1), stage_inputs(run, stage + 1), strict=True)
                if what.graded
            ]
            compute.add(compute.gradients(forward, back, weights=True))
        plan = Plan("round", 1, ("me",), (b"\1",), (compute.numel,))  # type: ignore[arg-type]
        reduced, prepared = asyncio.run(reducer.run(plan, t, sums.of(t), sums.value_of_answer()))
        compute.apply(t, reduced, prepared.sqnorm)
        applied = reduced
    assert applied is not None
    state = needs_of(run, stage).fixed
    return {
        "weights_m": compute.layout.numel / 1e6,
        "state_mb": state / MB,
        "bytes_a_weight": state / compute.layout.numel,
        "goal_mb": (1.3 * state + 600e6) / MB,
    }


def measure(kind: str, size: str, role: str, moments: str) -> dict[str, Any]:
    """One row, of this process."""
    from swarm.model.graph.custom_model import custom_model, pin_model

    run, began = run_of(kind, size, moments), time.perf_counter()
    row: dict[str, Any] = {"model": kind, "size": size, "role": role, "moments": moments}
    if role == "serve":
        row |= serve(run)
    else:
        model = custom_model(run)
        row |= {
            "weights_m": sum(one.numel() for one in model.traced.parameters.values()) / 1e6,
            "goal_mb": 2000.0,
        }
        if role == "pin":
            pin_model(run)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MB
    return row | {"peak_mb": round(peak, 1), "took_s": round(time.perf_counter() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, help="of this size only")
    parser.add_argument("--role", choices=("trace", "pin", "serve"), help="of this role only")
    parser.add_argument(
        "--one", nargs=4, metavar=("MODEL", "SIZE", "ROLE", "MOMENTS"), help="this one, in this process"
    )
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one)))
        return
    rows = []
    for job in JOBS:
        if options.size in (None, job[1]) and options.role in (None, job[2]):
            command = [sys.executable, __file__, "--one", *job]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            row = json.loads(done.stdout.splitlines()[-1])
            row = {
                name: round(value, 1) if isinstance(value, float) else value for name, value in row.items()
            }
            if row["peak_mb"] > row.get("goal_mb", row["peak_mb"]):
                row["missed"] = True
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    report(rows, COLUMNS, "memory by role")


if __name__ == "__main__":
    main()
