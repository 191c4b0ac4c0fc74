"""Small runs, a text of random bytes, and all stages of a run chained by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch

from swarm.data import sample_offsets
from swarm.ids import Microbatch
from swarm.manifest import Run, demo_run
from swarm.model.gpt import initial_value, replace_parameters, stage_skeleton, weights_dtype
from swarm.model.reference import SingleProcess, samples_of
from swarm.model.same_bits import use_threads_of
from swarm.model.stage import Forward, StageCompute
from swarm.wire.codec import Encoded, encode

Answer: TypeAlias = tuple[Encoded, ...]
"""The gradients that a stage answers with."""

TEXT = np.random.default_rng(7).integers(0, 256, 5000).astype(np.uint8)


def build_stage(run: Run, stage: int) -> torch.nn.Module:
    """The module of a stage of a built-in model, with its weights of version 0."""
    module, dtype = stage_skeleton(run, stage), weights_dtype(run)
    replace_parameters(module, lambda name, empty: initial_value(run, name, empty.shape).to(dtype))
    return module


def tiny_run(**changes: Any) -> Run:
    """4 layers of width 32 on 3 stages, float64, codec none, 3 steps of 4 microbatches.

    Keys of the tables `model`, `batch`, `optimizer` and `codec` are given as dicts.
    """
    base = demo_run(stages=3, steps=3, codec="none")
    tables: dict[str, dict[str, Any]] = {
        "model": {"hidden": 32, "heads": 4, "ffn_hidden": 48, "layers": 4},
        "batch": {"microbatch_size": 2, "microbatches_per_step": 4},
        "optimizer": {"lr": 1e-2, "warmup_steps": 0},
        "codec": {},
        "data": {"tokens": len(TEXT), "sequence_length": 16},
    }
    for name, table in tables.items():
        table.update(changes.pop(name, {}))
    specs = {name: replace(getattr(base, name), **table) for name, table in tables.items()}
    return replace(base, **{"dtype": "float64", **changes}, **specs)


def batch_of(run: Run, text: np.ndarray = TEXT) -> Callable[[list[int]], np.ndarray]:
    T = run.data.sequence_length
    return lambda offsets: np.stack([text[start : start + T + 1] for start in offsets])


def tokens_of(run: Run, mb: Microbatch, text: np.ndarray = TEXT) -> Encoded:
    return encode(torch.from_numpy(batch_of(run, text)(sample_offsets(run, *mb))), "none")


def loss_of_single(single: SingleProcess, mb: Microbatch) -> float:
    """The loss of a microbatch with the newest weights of the first island, without its gradient."""
    use_threads_of(single.run)
    arriving = samples_of(single.run.island(0), single._batch, mb, single.device)
    for stage in range(single.run.S):
        passed = single.stages[stage].forward(arriving, mb, grad=False)
        arriving = passed.arriving
    return passed.outputs[0].item()


def backward(stage: StageCompute, fwd: Forward, grads: Sequence[Encoded], *, add: bool) -> Answer:
    """As a peer does it: the weights' gradients enter the sum if the answer is good."""
    found = stage.gradients(fwd, grads, weights=add)
    if add:
        stage.add(found)
    return found.answer


def loss_backward(
    stage: StageCompute, mb: Microbatch, inputs: Sequence[Encoded], *, add: bool
) -> tuple[float, Answer]:
    """Likewise, of the last stage: (mean loss, gradients of the inputs)."""
    found = stage.loss_gradients(mb, inputs, weights=add)
    if add:
        stage.add(found)
    return found.loss, found.answer


class Chain:
    """One `StageCompute` a stage, called as peers would call them."""

    def __init__(self, run: Run, device: str = "cpu", *, text: np.ndarray = TEXT, **options: Any) -> None:
        self.run, self.text = run, text
        self.stages = [StageCompute(run, stage, device, **options) for stage in range(run.S)]

    def begin(self, t: int) -> None:
        for stage in self.stages:
            stage.sums.begin(t)

    def forward(self, mb: Microbatch) -> tuple[list[Forward], list[Encoded]]:
        """Up to the last stage: (what each stage before it keeps, the inputs of the last)."""
        kept: list[Forward] = []
        wire = [tokens_of(self.run, mb, self.text)]
        for stage in self.stages[:-1]:
            kept.append(stage.forward(mb, wire))
            wire = kept[-1].outputs
        return kept, wire

    def backward(self, kept: list[Forward], answer: Answer, *, add: bool = True) -> list[Answer]:
        """From the last stage's answer back to the first: the gradients of the outputs of its callers."""
        grads: list[Answer] = []
        for stage, fwd in zip(self.stages[-2::-1], kept[::-1], strict=True):
            assert answer
            grads.append(answer)
            answer = backward(stage, fwd, answer, add=add)
        return grads[::-1]

    def microbatch(self, mb: Microbatch, *, add: bool = True) -> float:
        kept, wire = self.forward(mb)
        loss, answer = loss_backward(self.stages[-1], mb, wire, add=add)
        self.backward(kept, answer, add=add)
        return loss

    def apply(self, t: int) -> None:
        settled = [stage.sums.value(stage.sums.of(t)) for stage in self.stages]
        self.apply_settled(t, settled)

    def apply_settled(self, t: int, reduced: list[torch.Tensor]) -> None:
        """Take step `t` with the value of each stage's sum, and what the others found of shared weights."""

        def whole(stage: StageCompute) -> torch.Tensor:
            told = {
                other: self.stages[other].shared.part(reduced[other], stage.stage)
                for other in stage.shared.names
            }
            return stage.shared.complete(reduced[stage.stage], told)

        totals = [whole(stage) for stage in self.stages]
        squares = sum(stage.shared.sqnorm(total) for stage, total in zip(self.stages, totals, strict=True))
        for stage, total in zip(self.stages, totals, strict=True):
            stage.apply(t, total, squares)

    def step(self, t: int) -> list[float]:
        self.begin(t)
        losses = [self.microbatch(Microbatch(t, m)) for m in range(self.run.M)]
        self.apply(t)
        return losses

    def named_weights(self) -> dict[str, torch.Tensor]:
        return {name: w for stage in self.stages for name, w in weights_of(stage).items()}


def weights_of(stage: StageCompute) -> dict[str, torch.Tensor]:
    """The newest weights of a stage and its batch norms' statistics by full name, copied to the CPU."""
    state = stage.state.copy()
    return stage.layout.views(state["weights"], state.get("statistics"))


def farthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference between two sets of weights."""
    assert a.keys() == b.keys()
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)
