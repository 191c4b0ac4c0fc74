"""Whether honest peers on other kinds of devices are ever taken for liars.

    python scripts/bench/liars/honest_audits.py                 10,368 answers and 1,296 contributions
    python scripts/bench/liars/honest_audits.py --microbatches 20

Kinds are the processor's instruction sets (ATEN_CPU_CAPABILITY), threads that share a microbatch, with and
without oneDNN, recomputed forwards, and a GPU where there is one. Each computes microbatches of a small
decoder, forward and backward, in each dtype and codec, at version 0 and after some steps, with its own
neighbours; each other one audits them from the bytes that came in. Told: the most that an honest tensor was
off, and how many were taken for lies. The last line is an object of rows for `tables.py --store other`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pickle
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from peers.system import usable_cores
from swarm.audit.answers import FAR, distance, make
from swarm.audit.contributions import Recount
from swarm.ids import Microbatch
from swarm.manifest import Run
from swarm.model.stage import StageCompute
from swarm.wire.codec import Encoded
from tests.model.chain import Chain, tiny_run

KINDS = {
    "AVX-512": {"ATEN_CPU_CAPABILITY": "avx512"},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "no vectors": {"ATEN_CPU_CAPABILITY": "default"},
    "2 threads": {"THREADS": "2"},
    "without oneDNN": {"PLAIN": "1"},
    "recomputed": {"RECOMPUTE": "1"},
    **({"CUDA": {"DEVICE": "cuda"}} if torch.cuda.is_available() else {}),
}
DTYPES = ("float32", "bfloat16")
CODECS = ("none", "bf16", "blockwise8")
STEPS = 3
"""Taken before the second half of the microbatches."""


def run_of(dtype: str, codec: str, threads: int) -> Run:
    run = tiny_run(
        dtype=dtype, codec={"forward": codec, "backward": codec}, steps=STEPS + 2,
        model={"hidden": 64, "ffn_hidden": 128}, batch={"microbatches_per_step": 1000},
    )  # fmt: skip
    return replace(run, batch=replace(run.batch, microbatch_threads=threads))


def packed(tensors: Any) -> list[Encoded]:
    return [Encoded(one.meta, [bytes(memoryview(b).cast("B")) for b in one.buffers]) for one in tensors]


def chain_of(dtype: str, codec: str) -> Chain:
    """With the weights of version 0. Steps are taken with the same gradients by each kind: see `advance`."""
    run = run_of(dtype, codec, int(os.environ.get("THREADS", "1")))
    return Chain(run, os.environ.get("DEVICE", "cpu"), recompute="RECOMPUTE" in os.environ)


def advance(chain: Chain) -> None:
    """Weights as of later steps, the same bits on each kind: from made-up gradients."""
    for t in range(STEPS):
        chain.begin(t)
        dice = torch.Generator().manual_seed(t)
        chain.apply_settled(
            t,
            [torch.randn(s.numel, generator=dice, dtype=torch.float32).to(s.device) for s in chain.stages],
        )


def compute(microbatches: int) -> list[Any]:
    """What a peer of this kind keeps of each microbatch at each stage, and its sums."""
    kept = []
    for dtype, codec in itertools.product(DTYPES, CODECS):
        chain = chain_of(dtype, codec)
        for t in (0, STEPS):
            if t:
                advance(chain)
            chain.begin(t)
            for m in range(microbatches):
                forwards, last = chain.forward(Microbatch(t, m))
                found = chain.stages[-1].loss_gradients(Microbatch(t, m), last, weights=True)
                chain.stages[-1].add(found)
                grads = chain.backward(forwards, found.answer)
                for stage, fwd in enumerate(forwards):
                    back = grads[stage - 1] if stage else ()
                    kept.append(
                        (
                            dtype,
                            codec,
                            t,
                            m,
                            stage,
                            *map(packed, (fwd.inputs, grads[stage], fwd.outputs, back)),
                        )
                    )
                kept.append((dtype, codec, t, m, len(forwards), packed(last), [], [], packed(found.answer)))
            for stage in chain.stages:
                kept.append((dtype, codec, t, None, stage.stage, stage.sums.of(t).cpu().clone()))
                stage.sums.drop(t)
    return kept


def audit(kept: list[Any]) -> dict[str, Any]:
    """Compute what another kind kept."""
    told: dict[str, Any] = {"answers": 0, "contributions": 0, "same": 0, "lies": 0, "worst": {}}
    groups: dict[tuple[str, str, int], list[Any]] = {}
    for one in kept:
        groups.setdefault(one[:3], []).append(one)
    chains: dict[tuple[str, str], Chain] = {}
    for (dtype, codec, t), ones in groups.items():
        chain = chains.get((dtype, codec)) or chains.setdefault((dtype, codec), chain_of(dtype, codec))
        if t:
            advance(chain)
        chunk = {stage.stage: (0, min(4096, stage.numel)) for stage in chain.stages}
        recounts = {s.stage: Recount(s.snapshot(t), t, chunk[s.stage]) for s in chain.stages}
        for _, _, _, m, stage, *tensors in ones:
            if m is None:
                told["contributions"] += 1
                part = tensors[0][: chunk[stage][1]]
                told["same"] += torch.equal(recounts[stage].total(), tensors[0])
                told["lies"] += recounts[stage].is_far(part)
                continue
            inputs, grads, outputs, back = tensors
            told["answers"] += 1
            compute_: StageCompute = chain.stages[stage]
            made = make(compute_, Microbatch(t, m), inputs, grads)
            for ours, theirs, of in ((made.outputs, outputs, inputs), (made.input_grads, back, grads)):
                far, name = distance(ours, theirs, of), f"{dtype} {codec}"
                told["lies"] += far > FAR[dtype]
                told["worst"][name] = max(told["worst"].get(name, 0.0), far)
            recounts[stage].add(m, inputs, grads, nullcontext())
    return told


def child(arguments: list[str], kind: dict[str, str]) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": kind.get("THREADS", "1"), **kind}
    done = subprocess.run(
        [sys.executable, __file__, *arguments], env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--microbatches", type=int, default=8, help="of each kind, dtype and codec, twice")
    parser.add_argument("--keep", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--audit", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("THREADS", "1")))
    if "PLAIN" in os.environ:
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    if options.keep:
        options.keep.write_bytes(pickle.dumps(compute(options.microbatches)))
        return 0
    if options.audit:
        print(json.dumps(audit(pickle.loads(options.audit.read_bytes()))))  # noqa: S301  its own file
        return 0
    rows, lies = [], 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(usable_cores()) as pool:
        files = {name: Path(folder) / f"{number}" for number, name in enumerate(KINDS)}
        count = str(options.microbatches)
        keep = [
            pool.submit(child, ["--keep", str(files[of]), "--microbatches", count], KINDS[of]) for of in KINDS
        ]
        for kept in keep:
            kept.result()
        audits = {
            name: [pool.submit(child, ["--audit", str(files[of])], kind) for of in KINDS]
            for name, kind in KINDS.items()
        }
        for name in KINDS:
            told = [json.loads(audited.result()) for audited in audits[name]]
            worst: dict[str, float] = {}
            for one in told:
                for what, far in one["worst"].items():
                    worst[what] = max(worst.get(what, 0.0), far)
            rows.append({
                "auditor": name,
                "answers": sum(one["answers"] for one in told),
                "contributions": sum(one["contributions"] for one in told),
                "same": sum(one["same"] for one in told),
                "lies": sum(one["lies"] for one in told),
                **{what: f"{far:.1e}" for what, far in worst.items()},
            })  # fmt: skip
            lies += int(rows[-1]["lies"])
            print(json.dumps(rows[-1]), flush=True)
    print(json.dumps({"rows": rows}))
    return int(lies > 0)


if __name__ == "__main__":
    sys.exit(main())
