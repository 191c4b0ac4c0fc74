"""What the stages of a swarm compute for a microbatch, part by part, beside one process with the whole model.

    python scripts/bench/speed/parts.py                           # 2 stages, hidden 512; a minute
    python scripts/bench/speed/parts.py --stages 4 --rounds 20

One thread of one process computes a microbatch with the whole model, then with all stages one after another,
in turn: CPU time of that thread, which other programs disturb less than they do tokens/s; medians. Nothing
travels: what event loops and p2pd take besides is what `efficiency.py` calls `python_cores` and `p2pd_cores`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from peers.system import tune_malloc
from scripts.bench.common.arguments import parser_of
from scripts.bench.common.harness import bench_run, machine, report
from swarm.ids import Microbatch
from swarm.manifest import Run

COLUMNS = ("part", "one_process_ms", "stages_ms", "more_percent", "ns_a_weight")
MB = Microbatch(0, 0)
CODEC = "codec and checks"


class Spent:
    """CPU milliseconds of this thread by name of a part, of one microbatch and in all of them."""

    def __init__(self) -> None:
        self._now: defaultdict[str, float] = defaultdict(float)
        self._all: defaultdict[str, list[float]] = defaultdict(list)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **named)
            finally:
                self._now[part] += 1e3 * (time.thread_time() - began)

        return timed

    def next(self, *, counts: bool) -> None:
        """A microbatch is over. `counts`: it was not for warming up."""
        for part, ms in self._now.items() if counts else ():
            self._all[part].append(ms)
        self._now.clear()

    def medians(self) -> dict[str, float]:
        return {part: statistics.median(each) for part, each in self._all.items()}


def one_process(run: Run, tokens: Any, spent: Spent) -> Callable[[], None]:
    """A microbatch with the whole model; its gradients are added in `.grad`."""
    from swarm.model.gpt import initial_value, replace_parameters, stage_skeleton, weights_dtype

    model = stage_skeleton(run, 0)
    replace_parameters(model, lambda name, old: initial_value(run, name, old.shape).to(weights_dtype(run)))

    def once() -> None:
        loss = spent.timed("forward", model)(tokens[:, :-1], tokens[:, 1:], mb=MB)
        spent.timed("backward", loss.backward)()

    return once


def all_stages(run: Run, tokens: Any, spent: Spent) -> Callable[[], None]:
    """A microbatch through all stages and back, as their peers compute it."""
    import torch

    from swarm.model import stage as stage_module
    from swarm.model.stage import Forward, StageCompute
    from swarm.model.stage_io import stage_inputs
    from swarm.wire.codec import encode

    stages = [StageCompute(run, number) for number in range(run.S)]
    stage_module.largest_norm = spent.timed("norms of gradients", stage_module.largest_norm)
    for stage in stages:
        stage.sums.begin(0)
        boundary = stage._boundary
        for owner, name, part in (
            (stage, "_compute", "forward"), (stage, "_autograd", "backward"), (stage, "add", "exact sums"),
            (boundary, "enter", CODEC), (boundary, "encode_outputs", CODEC),
            (boundary, "decode_gradients", CODEC), (boundary, "encode_gradients", CODEC),
        ):  # fmt: skip
            setattr(owner, name, spent.timed(part, getattr(owner, name)))
    first = encode(tokens.to(getattr(torch, stage_inputs(run, 0)[0].dtype)), "none")

    def once() -> None:
        inputs, kept = [first], list[Forward]()
        for stage in stages[:-1]:
            kept.append(stage.forward(MB, inputs))
            inputs = kept[-1].outputs
        found = stages[-1].loss_gradients(MB, inputs, weights=True)
        stages[-1].add(found)
        for stage, forward in zip(stages[-2::-1], reversed(kept), strict=True):
            found = stage.gradients(forward, found.answer, weights=True)
            stage.add(found)

    return once


def measure(run: Run, rounds: int) -> list[dict[str, Any]]:
    import torch

    torch.set_num_threads(1)
    whole = replace(run, model=replace(run.model, stages=1))
    size = (run.batch.microbatch_size, run.data.sequence_length + 1)
    tokens = torch.randint(0, run.built_in.vocab_size, size, generator=torch.Generator().manual_seed(1))
    alone, cut = Spent(), Spent()
    first, second = one_process(whole, tokens, alone), all_stages(run, tokens, cut)
    for number in range(-2, rounds):
        for once, spent in ((first, alone), (second, cut)):
            spent.timed("all", once)()
            spent.next(counts=number >= 0)
    from swarm.model.layout import stage_layout

    weights = sum(stage_layout(run, number).numel for number in range(run.S))
    before, after = alone.medians(), cut.medians()
    return [
        {
            "part": part,
            "one_process_ms": round(before.get(part, 0.0), 1),
            "stages_ms": round(ms, 1),
            "more_percent": round(100.0 * (ms - before.get(part, 0.0)) / before["all"], 1),
            "ns_a_weight": round(1e6 * ms / weights, 2),
        }
        for part, ms in after.items()
    ]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--stages", type=int, default=2, help="(default: 2)")
    parser.add_argument("--hidden", type=int, default=512, help="(default: 512)")
    parser.add_argument("--codec", default="blockwise8", help="none, bf16 or blockwise8 (default)")
    parser.add_argument("--rounds", type=int, default=12, help="microbatches of each kind (default: 12)")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    tune_malloc()
    run = bench_run(
        stages=options.stages, hidden=options.hidden, layers=max(4, options.stages), codec=options.codec
    )
    rows = measure(run, options.rounds)
    print(f"{machine()}; {time.strftime('%Y-%m-%d')}; parts.py {' '.join(sys.argv[1:])}")
    report(rows, COLUMNS, "CPU time of a microbatch, of one thread")


if __name__ == "__main__":
    main()
