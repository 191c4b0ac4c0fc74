"""How much of a machine a swarm on it uses: its tokens/s ÷ those of the best way to do without a swarm.

    python scripts/bench/speed/efficiency.py                      # the published table; about 20 minutes
    python scripts/bench/speed/efficiency.py --quick              # hidden 256, one step each; a minute
    python scripts/bench/speed/efficiency.py --stages 4 --hidden 512 --steps 3

Without a swarm is the better of two: one process with all cores as threads; one process per core with a
thread each, independent of one another (their speeds are added). Both are plain torch with its fused
optimizer; model, dtype, microbatches a step and allocator settings are the swarm's. They alternate with the
swarm in one run, and medians are compared, since machines drift. A swarm's time is from idle to idle: filling
and draining the pipeline are in it.

Swarm peers are real processes with their own libp2p daemons and one compute thread each.

A synchronous step of M microbatches through S stages takes M + S - 1 times what one takes, so that with a
device for each stage no swarm could exceed `bound` = M / (M + S - 1); with `--delayed` a step fills the
pipeline while the one before drains it, and the bound is 1. `of_bound` is `efficiency` ÷ `bound`.

`efficiency` compares speeds; `cpu_efficiency` compares CPU seconds per token, which other load on the machine
disturbs less, and which leaves idling out. `foreign_cores` says how much of such load there was.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from peers.system import die_with_parent, tune_malloc, usable_cores
from scripts.bench.common.arguments import parser_of
from scripts.bench.common.harness import Clocks, Segment, Swarm, bench_run, machine, machine_busy_s, report
from swarm.manifest import Run, parse_run

COLUMNS = (
    "stages", "replicas", "hidden", "dtype", "codec", "delayed", "efficiency", "bound", "of_bound",
    "swarm_tokens_per_s", "baseline_tokens_per_s", "baseline_kind", "cpu_efficiency", "device_busy",
    "codec_share", "p2pd_share", "foreign_cores",
)  # fmt: skip


# --- without a swarm ---


def baseline_worker(manifest: str, threads: int, device: str) -> None:
    """One process that computes the whole model: `N` on stdin → N steps, then one JSON line."""
    die_with_parent(os.getppid())
    tune_malloc()
    import torch

    torch.set_num_threads(threads)
    from peers.storage.dataset import open_dataset
    from swarm.data import sample_offsets
    from swarm.ids import Microbatch
    from swarm.model.gpt import initial_value, replace_parameters, stage_skeleton, weights_dtype

    run = parse_run(manifest)
    data = open_dataset(run)
    model, dtype = stage_skeleton(run, 0), weights_dtype(run)
    replace_parameters(model, lambda name, empty: initial_value(run, name, empty.shape).to(device, dtype))
    model.to(device)
    parameters, spec = list(model.parameters()), run.optimizer
    if spec.name == "adamw":
        betas = (spec.beta1, spec.beta2)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            parameters, lr=spec.lr, betas=betas, eps=spec.eps, weight_decay=spec.weight_decay, fused=True
        )
    else:
        optimizer = torch.optim.SGD(parameters, lr=spec.lr, momentum=spec.momentum, fused=True)

    def step(microbatches: int) -> None:
        for m in range(microbatches):
            tokens = torch.from_numpy(data.batch(sample_offsets(run, 0, m))).to(device).long()
            with torch.autocast(device, torch.bfloat16, enabled=run.dtype == "bfloat16"):
                loss = model(tokens[:, :-1], tokens[:, 1:], mb=Microbatch(0, m))
            loss.backward()
            loss.item()
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.div_(run.M)
        torch.nn.utils.clip_grad_norm_(parameters, spec.clip_norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    step(2)
    print("{}", flush=True)
    for line in sys.stdin:
        steps = int(line)
        began, cpu = time.monotonic(), time.process_time()
        for _ in range(steps):
            step(run.M)
        took = time.monotonic() - began
        spent = {"tokens_per_s": steps * run.tokens_per_step / took, "cpu_s": time.process_time() - cpu}
        print(json.dumps(spent), flush=True)


class Baseline:
    """Processes that each compute the whole model; they wait between measurements."""

    def __init__(self, run: Run, *, processes: int, threads: int, device: str) -> None:
        self.kind = f"{processes} × {threads} thread" + ("s" if threads > 1 else "")
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--baseline-worker", str(threads), "--device", device],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for _ in range(processes)
        ]  # fmt: skip
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(run.to_toml()) + "\n")
            process.stdin.flush()
        self._answers()
        self.tokens_per_s: list[float] = []
        self.cpu_s_per_token: list[float] = []
        self.foreign_cores: list[float] = []

    def _answers(self) -> list[dict[str, float]]:
        answers: list[dict[str, float]] = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"a baseline process ended with {process.wait()}")
            answers.append(json.loads(line))
        return answers

    def measure(self, run: Run, steps: int) -> None:
        """Run `steps` steps in each process at the same time."""
        began, busy = time.monotonic(), machine_busy_s()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        answers = self._answers()
        cpu = sum(answer["cpu_s"] for answer in answers)
        self.tokens_per_s.append(sum(answer["tokens_per_s"] for answer in answers))
        self.cpu_s_per_token.append(cpu / (len(answers) * steps * run.tokens_per_step))
        self.foreign_cores.append(max(0.0, machine_busy_s() - busy - cpu) / (time.monotonic() - began))

    def median(self) -> float:
        """Tokens per second."""
        return statistics.median(self.tokens_per_s) if self.tokens_per_s else 0.0

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def codec_s(run: Run) -> float:
    """Seconds that both ends of one boundary spend on encoding and decoding, for one microbatch."""
    import torch

    from swarm.model.stage_io import stage_inputs
    from swarm.wire.codec import decode, encode

    torch.set_num_threads(1)
    x = torch.randn(stage_inputs(run, 1)[0].shape).to(getattr(torch, run.dtype))
    both = 0.0
    sent = run.codec.forward_at(0)
    for codec in (sent, run.codec.backward_at(0, sent)):
        times: list[float] = []
        for _ in range(15):
            began = time.perf_counter()
            decode(*encode(x, codec))
            times.append(time.perf_counter() - began)
        both += statistics.median(times)
    return both


# --- one row ---


async def measure(
    run: Run, *, replicas: int, warm_up: int, steps: int, rounds: int, window: int | None, device: str
) -> dict[str, Any]:
    """Baselines and a swarm of `run`, in turn, `rounds` times. On a GPU one process is the baseline."""
    whole = replace(run, model=replace(run.model, stages=1))
    cores = usable_cores() if device == "cpu" else 1
    async with Swarm(run, replicas=replicas, window=window, device=device) as swarm:
        whole = swarm.data.pinned(whole)
        baselines = [await asyncio.to_thread(Baseline, whole, processes=1, threads=cores, device=device)]
        if cores > 1:
            baselines.append(
                await asyncio.to_thread(Baseline, whole, processes=cores, threads=1, device=device)
            )
        try:
            await swarm.train(warm_up)
            segments: list[Segment] = []
            for number in range(rounds + 1):
                best = max(baselines, key=lambda baseline: baseline.median())
                for baseline in baselines if number == 0 else [best]:
                    await asyncio.to_thread(baseline.measure, run, max(1, steps // 2))
                if number < rounds:
                    segments.append(await swarm.train(steps))
        finally:
            for baseline in baselines:
                baseline.close()
    best = max(baselines, key=lambda baseline: baseline.median())
    return row(run, replicas, segments, baselines, best)


def row(
    run: Run, replicas: int, segments: list[Segment], baselines: list[Baseline], best: Baseline
) -> dict[str, Any]:
    """What the segments amount to."""
    tokens = [segment.steps * run.tokens_per_step for segment in segments]
    speed = statistics.median(n / segment.seconds for n, segment in zip(tokens, segments, strict=True))
    cpu = statistics.median(segment.clocks.ours / n for n, segment in zip(tokens, segments, strict=True))
    against = best.median()
    wall = sum(segment.seconds for segment in segments)
    done = sum(segment.steps for segment in segments) * run.M
    encoded_s = codec_s(run) * (run.S - 1) * done

    def mean(values: dict[str, list[float]]) -> dict[str, float]:
        return {name: round(sum(each) / wall, 4) for name, each in values.items()}

    def gather(pick: Any) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for segment in segments:
            for name, seconds in pick(segment).items():
                found.setdefault(name, []).append(seconds)
        return found

    def clocks(segment: Segment) -> Clocks:
        return segment.clocks

    bound = 1.0 if run.delayed_updates else run.M / (run.M + run.S - 1)
    all_cpu = sum(segment.clocks.ours for segment in segments)
    busy = mean(gather(lambda segment: segment.busy_s))
    p2pd = mean(gather(lambda segment: clocks(segment).p2pd))
    return {
        "stages": run.S,
        "replicas": replicas,
        "hidden": run.built_in.hidden,
        "layers": run.built_in.layers,
        "dtype": run.dtype,
        "codec": run.codec.forward_at(0),
        "microbatches": run.M,
        "sequence_length": run.data.sequence_length,
        "microbatch_size": run.batch.microbatch_size,
        "optimizer": run.optimizer.name,
        "exact_sums": run.adds_exactly,
        "delayed": run.delayed_updates,
        "efficiency": round(speed / against, 4),
        "bound": round(bound, 4),
        "of_bound": round(speed / against / bound, 4),
        "swarm_tokens_per_s": round(speed, 1),
        "baseline_tokens_per_s": round(against, 1),
        "baseline_kind": best.kind,
        # Threads of one process spin while they wait for each other: the one-thread baseline tells the work.
        "cpu_efficiency": round(statistics.median(baselines[-1].cpu_s_per_token) / cpu, 4),
        "device_busy": round(statistics.mean(busy.values()), 4),
        "device_busy_by_peer": busy,
        "codec_share": round(encoded_s / all_cpu, 4),
        "p2pd_share": round(sum(sum(s.clocks.p2pd.values()) for s in segments) / all_cpu, 4),
        "p2pd_cores": p2pd,
        "python_cores": mean(gather(lambda segment: clocks(segment).python)),
        "foreign_cores": round(statistics.mean(s.clocks.foreign_cores for s in segments), 3),
        "foreign_cores_baseline": round(statistics.mean(best.foreign_cores), 3),
        "all_swarm_tokens_per_s": [round(n / s.seconds, 1) for n, s in zip(tokens, segments, strict=True)],
        "all_baseline_tokens_per_s": {b.kind: [round(x, 1) for x in b.tokens_per_s] for b in baselines},
    }


async def bench(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for hidden in options.hidden:
        for dtype in options.dtype:
            for shape in options.stages:
                stages, _, replicas = shape.partition("x")
                run = bench_run(
                    stages=int(stages), hidden=hidden, layers=max(options.layers, int(stages)), dtype=dtype,
                    codec=options.codec, optimizer=options.optimizer, microbatches=options.microbatches,
                    microbatch_size=options.microbatch_size, sequence_length=options.sequence_length,
                )  # fmt: skip
                run = replace(run, exact_sums=not options.float_sums, delayed_updates=options.delayed)
                rows.append(
                    await measure(
                        run, replicas=int(replicas or 1), warm_up=options.warm_up, steps=options.steps,
                        rounds=options.rounds, window=options.window, device=options.device,
                    )
                )  # fmt: skip
                found = rows[-1]
                print(
                    f"{stages} × {replicas or 1}, hidden {hidden}, {dtype}: {found['efficiency']:.3f} "
                    f"({found['swarm_tokens_per_s']:.0f} / {found['baseline_tokens_per_s']:.0f} tokens/s)",
                    file=sys.stderr,
                )
    return rows


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--stages", nargs="+", default=["2", "4"], metavar="S[xR]",
        help="stages, and replicas of each if not 1: 2 4 2x2 (default: 2 4)",
    )  # fmt: skip
    parser.add_argument(
        "--hidden", nargs="+", type=int, default=[256, 512, 1024], help="(default: 256 512 1024)"
    )
    parser.add_argument("--dtype", nargs="+", default=["float32"], help="float32 bfloat16 (default: float32)")
    parser.add_argument("--codec", default="blockwise8", help="none, bf16 or blockwise8 (default)")
    parser.add_argument("--optimizer", default="adamw", help="adamw (default) or sgd")
    parser.add_argument(
        "--float-sums", action="store_true", help="manifests with exact_sums = false: sums of floats"
    )
    parser.add_argument("--delayed", action="store_true", help="manifests with delayed_updates = true")
    parser.add_argument("--layers", type=int, default=4, help="of the whole model (default: 4)")
    parser.add_argument("--microbatches", type=int, default=32, help="of a step (default: 32)")
    parser.add_argument("--microbatch-size", type=int, default=4, help="samples (default: 4)")
    parser.add_argument("--sequence-length", type=int, default=256, help="tokens of a sample (default: 256)")
    parser.add_argument("--steps", type=int, default=2, help="of one measurement (default: 2)")
    parser.add_argument(
        "--warm-up", type=int, default=1,
        help="steps that are not counted: the first connects and allocates; a trainer passes p2pd until it "
        "has moved a MiB, which takes some 1,000 microbatches (default: 1)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each kind (default: 3)")
    parser.add_argument("--window", type=int, help="the trainer's window (default: it finds one)")
    parser.add_argument("--device", default="cpu", help="cuda: all peers share that GPU (default: cpu)")
    parser.add_argument("--quick", action="store_true", help="hidden 256, one step, one round")
    parser.add_argument("--baseline-worker", type=int, metavar="THREADS", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.quick:
        options.hidden, options.steps, options.rounds = [256], 1, 1
    return options


def main() -> None:
    options = parse()
    if options.baseline_worker:
        baseline_worker(json.loads(sys.stdin.readline()), options.baseline_worker, options.device)
        return
    import uvloop

    rows = uvloop.run(bench(options))
    print(f"{machine()}; {time.strftime('%Y-%m-%d')}; efficiency.py {' '.join(sys.argv[1:])}")
    report(rows, COLUMNS, "tokens/s of a swarm ÷ tokens/s without one, on the same cores")


if __name__ == "__main__":
    main()
