#!/usr/bin/env python
"""What stages take, reckoned from their operators, against the clock and the allocator; and cuts.

    scripts/bench/plan/estimate.py            # five models, cut into 2, 4 and 8 stages: times and peak memory
    scripts/bench/plan/estimate.py --models gpt2 --rounds 3

The operators are timed in the same run, one by one (`swarm graph --calibrate`). One thread, and CPU seconds,
so that other programs do not count. Memory is what torch's allocator gives out from the beginning of the
forward to the end of the backward, without the stage's inputs, which are there before; it is foretold by a
run of the stage with tensors that have no memory.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded
os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from peers.programs.graph import timed_s
from peers.system import tune_malloc
from scripts.bench.common.harness import machine, report
from scripts.bench.plan.equal_cuts import equal_layers, equal_shares
from swarm.errors import SetupError
from swarm.ids import Microbatch
from swarm.model.graph.cost import operations, reckoned_s
from swarm.model.graph.partition import find_cut, plan_stages
from swarm.model.graph.stage_module import StageModule
from swarm.model.graph.trace import Traced, trace
from tests.model.graph.zoo import EncoderDecoder, Gpt2, Llama, ResNet, UNet

STAGES = (2, 4, 8)
MB = Microbatch(0, 0)


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
    times: list[float] = field(default_factory=list)

    def run(self) -> float:
        """Seconds of forward and backward."""
        leaves = self.leaves()
        began = time.thread_time()
        output = self.piece(*leaves, mb=MB)
        between = time.thread_time()
        roots = [out for out in output.values if out.requires_grad]
        gradients = [torch.ones_like(out) for out in roots]
        again = time.thread_time()
        torch.autograd.backward(roots, gradients)
        ended = time.thread_time()
        self.piece.zero_grad()
        return between - began + ended - again

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

    def foretold_bytes(self) -> int:
        """The same of tensors without memory."""
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            weights: dict[str, torch.Tensor] = {
                name: fake.from_tensor(tensor)
                for name, tensor in (*self.piece.named_parameters(), *self.piece.named_buffers())
            }
            leaves = [
                fake.from_tensor(tensor).requires_grad_(leaf.requires_grad)
                for leaf, tensor in zip(self.leaves(), self.inputs, strict=True)
            ]
            with Alive() as alive:
                output = torch.func.functional_call(self.piece, weights, tuple(leaves), {"mb": MB})
                roots = [out for out in output.values if out.requires_grad]
                torch.autograd.backward(roots, [torch.ones_like(out) for out in roots])
        return alive.most


class Alive(TorchDispatchMode):
    """Bytes of the tensors that are made inside, as long as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage()._cdata for leaf in _tensors((args, kwargs))}
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in given | self._seen:
                self._seen.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return out

    def _gone(self, place: int, nbytes: int) -> None:
        self._seen.discard(place)
        self.now -= nbytes


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def stages_of(
    model: str, traced: Traced, sample: Sequence[torch.Tensor], assignment: Sequence[int]
) -> list[Stage]:
    """The stages of a cut, each with what came out of the one before."""
    pieces = [StageModule(traced, plan, seed=0) for plan in plan_stages(traced.graph, assignment)]
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


def estimates(names: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Foretold and measured, a row a stage and one for all."""
    stages: list[Stage] = []
    timed: dict[str, list[float]] = {}
    for name in names:
        torch.manual_seed(0)
        model, sample = MODELS[name]()
        traced = trace(model.train(), sample)
        timed[name] = timed_s(traced)
        reckoned = reckoned_s(traced)
        for count in STAGES:
            stages += stages_of(name, traced, sample, find_cut(traced.graph, reckoned, count))
    for stage in stages:
        stage.run()
    for number in range(rounds):
        for stage in stages:
            stage.times.append(stage.run())
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    rows = [
        {
            "name": f"{stage.model} {stage.number + 1}/{stage.stages}",
            "predicted_s": sum(timed[stage.model][index] for index in stage.piece.plan.operators),
            "measured_s": statistics.median(stage.times),
            "predicted_bytes": stage.foretold_bytes(),
            "measured_bytes": stage.peak_bytes(),
        }
        for stage in stages
    ]
    return [*rows, summary("all stages", rows)]


def summary(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    errors, of_bytes = (
        [abs(row[f"predicted_{what}"] / row[f"measured_{what}"] - 1) for row in rows]
        for what in ("s", "bytes")
    )
    return {
        "name": name,
        "mean_error": statistics.mean(errors),
        "worst_error": max(errors),
        "spearman": rank_correlation([r["predicted_s"] for r in rows], [r["measured_s"] for r in rows]),
        "bytes_mean_error": statistics.mean(of_bytes),
        "bytes_worst_error": max(of_bytes),
        "bytes_within_15": sum(error <= 0.15 for error in of_bytes) / len(rows),
    }


def comparisons(names: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each model and number of stages."""
    rows = []
    for name in names:
        torch.manual_seed(0)
        model, sample = MODELS[name]()
        traced = trace(model.train(), sample)
        flops = operations(traced)
        rows += [compared(f"{name} in {count}", traced, flops, count) for count in STAGES]
    return rows


def compared(name: str, traced: Traced, flops: Sequence[float], count: int) -> dict[str, Any]:
    """The slowest stage and the widest boundary of our cut, and those of two others as multiples of them."""
    began = time.process_time()
    seconds = reckoned_s(traced)
    ours = find_cut(traced.graph, seconds, count)
    took_s = time.process_time() - began

    def judged(assignment: Sequence[int]) -> tuple[float, int]:
        plans = plan_stages(traced.graph, assignment)
        slowest_s = max(sum(seconds[index] for index in plan.operators) for plan in plans)
        return slowest_s, max(plan.bytes_out for plan in plans[:-1])

    def against(cut_by: Callable[[], Sequence[int]]) -> str:
        try:
            other_s, other_bytes = judged(cut_by())
        except SetupError as error:
            return error.text
        return f"{other_s / slowest_s:.2f}, {other_bytes / nbytes:.2f}"

    slowest_s, nbytes = judged(ours)
    return {
        "name": name,
        "slowest": slowest_s * count / sum(seconds),
        "boundary_bytes": nbytes,
        "layers": against(lambda: equal_layers(traced.graph, count)),
        "flops": against(lambda: equal_shares(flops, count)),
        "cpu_s": took_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only-cuts", action="store_true", help="nothing is timed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tune_malloc()
    rows = [] if options.only_cuts else estimates(options.models, options.rounds)
    rows += comparisons(options.models)
    columns = [
        "name",
        "predicted_s",
        "measured_s",
        "predicted_bytes",
        "measured_bytes",
        "mean_error",
        "spearman",
    ]
    columns += [
        "bytes_mean_error",
        "bytes_within_15",
        "slowest",
        "boundary_bytes",
        "layers",
        "flops",
        "cpu_s",
    ]
    print(machine())
    report(
        rows,
        columns,
        "stages: foretold and measured; cuts: slowest ÷ mean stage, widest boundary, other cuts' over both",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
