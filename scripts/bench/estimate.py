#!/usr/bin/env python
"""The workload estimator against the clock, and cuts against equal layers and equal operations.

    scripts/bench/estimate.py               # five models, cut into 2, 4 and 8 stages: times and peak memory
    scripts/bench/estimate.py --models gpt2 --rounds 3

The device is calibrated in the same run: a round of its calls, a round of all stages, and so on; medians. One
thread, and CPU seconds, so that other programs do not count. Memory is what torch's allocator gives out from
the beginning of the forward to the end of the backward, without the stage's inputs, which are there before.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded
os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from equal_cuts import equal_flops, equal_layers
from harness import machine, report
from torch import nn
from torch.profiler import ProfilerActivity, profile

from peers.device import tune_malloc
from peers.programs.calibrate import Calibration, clock_s
from swarm.errors import SetupError
from swarm.ids import Microbatch
from swarm.model.graph.stage_module import StageModule, cut
from swarm.model.graph.trace import Traced, trace
from swarm.model.layout import Holding
from swarm.partitioner.cost import DeviceModel, fit
from swarm.partitioner.search import Link, Place, Split, SplitTerms, judge, split
from swarm.partitioner.segments import WireTerms
from tests.model.zoo import EncoderDecoder, Gpt2, Llama, ResNet, UNet

STAGES = (2, 4, 8)
MB = Microbatch(0, 0)
WIRE = WireTerms(forward_bytes=1.02, backward_bytes=1.02)
"""blockwise8's bytes of a number."""
LINKS = tuple(Link(bandwidth_bps=mbps * 1e6, latency_s=0.01) for mbps in (math.inf, 1000, 100, 10))
"""Between stages, for the cuts that are compared."""
WIDE = SplitTerms(holding=Holding(inflight=1), wire=WIRE, microbatches=32)


def tokens(rows: int, length: int, vocab: int) -> torch.Tensor:
    return torch.randint(1, vocab, (rows, length))


def resnet() -> tuple[nn.Module, Sequence[torch.Tensor]]:
    return ResNet((3, 4, 23, 3), width=32, classes=100), (
        torch.randn(4, 3, 128, 128),
        tokens(4, 1, 100)[:, 0],
    )


def gpt2() -> tuple[nn.Module, Sequence[torch.Tensor]]:
    model = Gpt2(vocab=8000, context=256, hidden=384, layers=8, heads=6, dropout=0.0)
    return model, (tokens(4, 256, 8000), tokens(4, 256, 8000))


def llama() -> tuple[nn.Module, Sequence[torch.Tensor]]:
    model = Llama(vocab=4000, hidden=384, layers=8, heads=8, groups=2)
    return model, (tokens(4, 256, 4000), torch.zeros((4, 256), dtype=torch.bool), tokens(4, 256, 4000))


def unet() -> tuple[nn.Module, Sequence[torch.Tensor]]:
    return UNet(width=32, depth=4), (torch.randn(4, 1, 96, 96),)


def encoder_decoder() -> tuple[nn.Module, Sequence[torch.Tensor]]:
    model = EncoderDecoder(vocab=4000, hidden=256, encoders=4, decoders=4, heads=8)
    return model, (tokens(4, 160, 4000), tokens(4, 128, 4000), tokens(4, 128, 4000))


MODELS: dict[str, Callable[[], tuple[nn.Module, Sequence[torch.Tensor]]]] = {
    "resnet101": resnet,
    "gpt2": gpt2,
    "llama": llama,
    "unet": unet,
    "encoder_decoder": encoder_decoder,
}


@dataclass
class Stage:
    """One stage of one model, to be run by itself."""

    model: str
    stages: int
    number: int
    piece: StageModule
    inputs: list[torch.Tensor]
    times: list[tuple[float, float]] = field(default_factory=list)

    def run(self) -> tuple[float, float]:
        """Seconds of (forward, backward)."""
        leaves = self.leaves()
        began = clock_s("cpu")
        output = self.piece(*leaves, mb=MB)
        between = clock_s("cpu")
        roots = [out for out in output.values if out.requires_grad]
        gradients = [torch.ones_like(out) for out in roots]
        again = clock_s("cpu")
        torch.autograd.backward(roots, gradients)
        ended = clock_s("cpu")
        self.piece.zero_grad()
        return between - began, ended - again

    def leaves(self) -> list[torch.Tensor]:
        return [
            tensor.detach().requires_grad_(value.differentiable)
            for value, tensor in zip(self.piece.plan.inputs, self.inputs, strict=True)
        ]

    def peak_bytes(self) -> int:
        """What the allocator has given out at most."""
        leaves = self.leaves()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            output = self.piece(*leaves, mb=MB)
            roots = [out for out in output.values if out.requires_grad]
            torch.autograd.backward(roots, [torch.ones_like(out) for out in roots])
        self.piece.zero_grad()
        results: Any = profiled.profiler
        events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
        held = most = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            held += event.nbytes()
            most = max(most, held)
        return most


def stages_of(model: str, traced: Traced, sample: Sequence[torch.Tensor], found: Split) -> list[Stage]:
    """The stages of a cut, each with what came out of the one before."""
    pieces = cut(traced, found.assignment, seed=0)
    passing = dict(zip(traced.graph.inputs, sample, strict=True))
    stages = []
    for number, piece in enumerate(pieces):
        inputs = [passing[value.name] for value in piece.plan.inputs]
        stages.append(Stage(model, len(pieces), number, piece, inputs))
        with torch.no_grad():
            output = piece(*inputs, mb=MB)
        passing = {v.name: out.contiguous() for v, out in zip(piece.plan.outputs, output.values, strict=True)}
    return stages


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's, of numbers that all differ."""

    def ranks(numbers: Sequence[float]) -> list[int]:
        order = sorted(range(len(numbers)), key=lambda n: numbers[n])
        return [place for _, place in sorted(zip(order, range(len(order)), strict=True))]

    n = len(a)
    return 1 - 6 * sum((x - y) ** 2 for x, y in zip(ranks(a), ranks(b), strict=True)) / (n * (n * n - 1))


def estimates(
    names: Sequence[str], rounds: int
) -> tuple[list[dict[str, Any]], DeviceModel, dict[str, Traced]]:
    """Predicted and measured, a row a stage and one for all."""
    began = time.process_time()
    calibration = Calibration()
    calibration.round()
    took_s = time.process_time() - began
    first = fit(calibration.samples())
    traces: dict[str, Traced] = {}
    stages: list[Stage] = []
    cuts: dict[tuple[str, int], Split] = {}
    for name in names:
        torch.manual_seed(0)
        model, sample = MODELS[name]()
        traces[name] = traced = trace(model.train(), sample)
        for count in STAGES:
            found = split(traced.graph, [Place(device=first)] * count)
            cuts[name, count] = found
            stages += stages_of(name, traced, sample, found)
    for stage in stages:
        stage.run()
    for number in range(rounds):
        calibration.round()
        for stage in stages:
            stage.times.append(stage.run())
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    device = fit(calibration.samples())
    rows = []
    empty = Holding(weight_copies=0, sum_bytes=0.0, moment_bytes=0.0)
    for stage in stages:
        graph, assignment = traces[stage.model].graph, cuts[stage.model, stage.stages].assignment
        judged = judge(graph, assignment, [Place(device=device)] * stage.stages)
        alone = judge(
            graph, assignment, [Place(device=device)] * stage.stages, terms=SplitTerms(holding=empty)
        )
        forward_s, backward_s = (statistics.median(times) for times in zip(*stage.times, strict=True))
        inputs = sum(value.nbytes for value in stage.piece.plan.inputs)
        rows.append(
            {
                "name": f"{stage.model} {stage.number + 1}/{stage.stages}",
                "predicted_s": judged.compute_s[stage.number],
                "measured_s": forward_s + backward_s,
                "forward_s": forward_s,
                "backward_s": backward_s,
                "predicted_bytes": alone.memory_bytes[stage.number] - inputs,
                "measured_bytes": stage.peak_bytes(),
                "state_bytes": judged.memory_bytes[stage.number] - alone.memory_bytes[stage.number],
            }
        )
    rows.append(summary("all stages", rows, took_s))
    return rows, device, traces


def summary(name: str, rows: Sequence[dict[str, Any]], calibration_s: float) -> dict[str, Any]:
    def error(row: dict[str, Any], what: str, more: float = 0.0) -> float:
        return abs((row[f"predicted_{what}"] + more) / (row[f"measured_{what}"] + more) - 1)

    bytes_alone = [error(row, "bytes") for row in rows]
    whole = [error(row, "bytes", row["state_bytes"]) for row in rows]
    return {
        "name": name,
        "mean_error": statistics.mean(error(row, "s") for row in rows),
        "worst_error": max(error(row, "s") for row in rows),
        "spearman": rank_correlation([r["predicted_s"] for r in rows], [r["measured_s"] for r in rows]),
        "bytes_mean_error": statistics.mean(bytes_alone),
        "bytes_worst_error": max(bytes_alone),
        "bytes_within_15": sum(error <= 0.15 for error in bytes_alone) / len(rows),
        "with_state_worst_error": max(whole),
        "with_state_within_15": sum(error <= 0.15 for error in whole) / len(rows),
        "calibration_round_s": calibration_s,
    }


def comparisons(device: DeviceModel, traces: dict[str, Traced]) -> list[dict[str, Any]]:
    """The period of our cut against those of the two baselines, by model, stages and link."""
    rows = []
    for name, traced in traces.items():
        for count in STAGES:
            for link in LINKS:
                places, links = [Place(device=device)] * count, [link] * (count - 1)
                began = time.process_time()
                ours = split(traced.graph, places, links, WIDE)
                row: dict[str, Any] = {
                    "name": f"{name} in {count}, {link.bandwidth_bps / 1e6:g} Mbit/s",
                    "period_s": ours.period_s,
                    "limit": ours.limit,
                    "cpu_s": time.process_time() - began,
                }
                for what, cut_by in (("layers", equal_layers), ("flops", equal_flops)):
                    try:
                        cut = judge(traced.graph, cut_by(traced.graph, len(places)), places, links, WIDE)
                        row[what] = cut.period_s / ours.period_s
                    except SetupError as error:
                        row[what] = error.text
                rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-cuts", action="store_true", help="only the estimator")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tune_malloc()
    rows, device, traces = estimates(options.models, options.rounds)
    if not options.no_cuts:
        rows += comparisons(device, traces)
    columns = [
        "name",
        "predicted_s",
        "measured_s",
        "predicted_bytes",
        "measured_bytes",
        "mean_error",
        "spearman",
    ]
    columns += ["bytes_mean_error", "bytes_within_15", "period_s", "layers", "flops", "limit", "cpu_s"]
    print(machine())
    report(
        rows, columns, "stages: predicted and measured; cuts: their period, and other cuts' periods over it"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
