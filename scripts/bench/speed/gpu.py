"""How much of a GPU a stage peer uses: its forward + backward ÷ those of the bare module, by window.

    python scripts/bench/speed/gpu.py [--rounds 3] [--microbatches 16]

A middle stage of GPT-2-XL sized layers, and one of GPT-3 sized ones, in bfloat16 with blockwise8 at both
ends, computes microbatches on `--workers` threads as a peer's does: tensors come and go as bytes in host
memory, `window` of them are in flight, backwards go before forwards. The bare module has its inputs on the
device and does nothing else but autocast; `sync` is against it with the same algorithms, which give the same
bits each time, and `price` is what those cost the bare module. Each call waits for its result, as the stage's
loop does.

Prints a table, and a JSON object on the last line; without a CUDA device it says so and has no rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from swarm.ids import Microbatch
from swarm.manifest import BatchSpec, CodecSpec, DataSpec, ModelSpec, OptimizerSpec, Run
from swarm.model.gpt import replace_parameters, stage_skeleton
from swarm.model.reductions import sqnorm
from swarm.model.stage import Forward, StageCompute
from swarm.wire.codec import encode

MB = Microbatch(0, 0)


@dataclass(frozen=True)
class Size:
    """One shape of a stage."""

    name: str
    hidden: int
    heads: int
    layers: int
    """In the measured stage."""
    sequence_length: int
    microbatch_size: int

    @property
    def tokens(self) -> int:
        return self.sequence_length * self.microbatch_size


SIZES = (
    # A quarter of GPT-2-XL, and one of GPT-3's 96 layers (its weights and sum take 14.5 GB in float32).
    Size("gpt2-xl, 12 layers", 1600, 25, 12, 1024, 4),
    Size("gpt3, 1 layer", 12288, 96, 1, 2048, 1),
)
WINDOWS = (1, 2, 4)


def run_of(size: Size) -> Run:
    """Three stages with `size.layers` each; the tiny vocabulary keeps the head from unbalancing the cut."""
    return Run(
        name="bench",
        seed=1,
        steps=100,
        dtype="bfloat16",
        model=ModelSpec(
            layers=3 * size.layers,
            hidden=size.hidden,
            heads=size.heads,
            ffn_hidden=4 * size.hidden,
            vocab_size=256,
            norm="layernorm",
            positions="learned",
            stages=3,
        ),
        data=DataSpec(source="tales", tokens=1 << 20, sequence_length=size.sequence_length),
        batch=BatchSpec(microbatch_size=size.microbatch_size, microbatches_per_step=16),
        optimizer=OptimizerSpec(lr=1e-4),
        codec=CodecSpec(forward="blockwise8", backward="blockwise8"),
    )


def bare(run: Run, device: torch.device) -> Callable[[int], None]:
    """The stage's module alone: `count` forwards and backwards, gradients added up in `.grad`."""
    module = stage_skeleton(run, 1)
    replace_parameters(module, lambda _, p: torch.empty(p.shape, device=device).normal_(0.0, 0.02))
    module.to(device)
    shape = (run.batch.microbatch_size, run.data.sequence_length, run.built_in.hidden)
    hidden = torch.randn(shape, device=device, dtype=torch.bfloat16)
    grad = torch.randn(shape, device=device, dtype=torch.bfloat16) * 1e-4

    def compute(count: int) -> None:
        for _ in range(count):
            x = hidden.detach().requires_grad_(True)
            with torch.autocast(device.type, torch.bfloat16):
                y = module(x)
            y.to(torch.bfloat16).backward(grad)

    return compute


class Peer:
    """A `StageCompute` behind a device thread."""

    def __init__(self, run: Run, device: str) -> None:
        self.compute = StageCompute(run, 1, device)
        self.compute.sums.begin(0)
        B, T, H = run.batch.microbatch_size, run.data.sequence_length, run.built_in.hidden
        hidden = torch.randn((B, T, H)).to(torch.bfloat16)
        self.inputs = [
            encode(hidden, "blockwise8"),
            encode(torch.zeros((B, T + 1), dtype=torch.uint8), "none"),
        ]
        self.grads = [encode(torch.randn((B, T, H)).mul_(1e-4).to(torch.bfloat16), "blockwise8")]

    def microbatches(self, count: int, window: int, workers: int) -> None:
        """Do `count` microbatches, `window` in flight, backwards first."""
        jobs: queue.PriorityQueue[tuple[int, int, Forward | None]] = queue.PriorityQueue()
        order, books = itertools.count(), threading.Lock()
        for _ in range(min(window, count)):
            jobs.put((1, next(order), None))
        started, done = min(window, count), 0

        def work() -> None:
            nonlocal started, done
            while True:
                rank, _, fwd = jobs.get()
                if rank > 1:
                    return
                if fwd is None:
                    jobs.put((0, next(order), self.compute.forward(MB, self.inputs)))
                    continue
                found = self.compute.gradients(fwd, self.grads, weights=True)
                with books:
                    self.compute.add(found)
                    done += 1
                    if started < count:
                        started += 1
                        jobs.put((1, next(order), None))
                    for _ in range(workers if done == count else 0):
                        jobs.put((2, next(order), None))

        threads = [threading.Thread(target=work) for _ in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def step_s(self) -> float:
        """Seconds of one optimizer step."""
        total = self.compute.sums.value(self.compute.sums.of(0))
        norm = sqnorm(total)
        torch.cuda.synchronize()
        began = time.perf_counter()
        self.compute.apply(0, total, norm)
        torch.cuda.synchronize()
        return time.perf_counter() - began


def seconds(work: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(size: Size, rounds: int, count: int, workers: list[int]) -> list[dict[str, Any]]:
    run, device = run_of(size), "cuda"
    module, peer = bare(run, torch.device(device)), Peer(run, device)
    module(2)
    peer.microbatches(4, 2, 2)
    bare_s: list[float] = []
    free_s: list[float] = []
    cases = [(threads, window) for threads in workers for window in WINDOWS if window >= threads]
    taken: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    for _ in range(rounds):  # interleaved, so that a drift of the clock rate hits all alike
        bare_s.append(seconds(lambda: module(count)))
        torch.use_deterministic_algorithms(False)
        free_s.append(seconds(lambda: module(count)))
        torch.use_deterministic_algorithms(True)
        for threads, window in cases:
            taken[threads, window].append(seconds(partial(peer.microbatches, count, window, threads)))
    saved = peer.compute.saved_bytes()
    step_s = peer.step_s()
    base, free = statistics.median(bare_s), statistics.median(free_s)
    return [
        {
            "size": size.name,
            "window": window,
            "workers": threads,
            "price": round(base / free, 4),
            "bare_tokens_per_s": round(count * size.tokens / base),
            "sync_tokens_per_s": round(count * size.tokens / statistics.median(taken[threads, window])),
            "sync_ratio": round(base / statistics.median(taken[threads, window]), 4),
            "saved_mb": round(saved / 1e6),
            "step_s": round(step_s, 4),
        }
        for threads, window in cases
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="paired repetitions; medians are reported")
    parser.add_argument("--microbatches", type=int, default=16, help="per measurement")
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2], help="threads that compute at once")
    parser.add_argument("--sizes", nargs="+", default=[size.name.split(",")[0] for size in SIZES])
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured")
    else:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
        print("stage                workers  window  bare tok/s   sync  price  MB/mb  step s")
        for size in SIZES:
            if size.name.split(",")[0] not in options.sizes:
                continue
            try:
                found = measure(size, options.rounds, options.microbatches, options.workers)
            except torch.cuda.OutOfMemoryError as error:
                print(f"{size.name:<20} does not fit: {str(error).splitlines()[0][:80]}")
                continue
            rows += found
            for row in found:
                print(
                    f"{row['size']:<20} {row['workers']:>7} {row['window']:>7} "
                    f"{row['bare_tokens_per_s']:>11} {row['sync_ratio']:>6.3f} {row['price']:>6.3f} "
                    f"{row['saved_mb']:>6} {row['step_s']:>7.3f}"
                )
            torch.cuda.empty_cache()
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
