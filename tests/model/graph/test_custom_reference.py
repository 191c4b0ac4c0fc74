"""A custom model, trained stage by stage in one process, is the same model trained by plain torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from swarm.data import sample_offsets
from swarm.manifest import BatchSpec, OptimizerSpec, Run
from swarm.model.graph.custom_model import build
from swarm.model.reference import SingleProcess
from tests.model.graph.parity import whole
from tests.model.graph.test_custom_exact import run_of, samples
from tests.model.graph.test_custom_stage import cuts
from tests.seeds import some


class Plain:
    """A training loop as anybody writes it."""

    def __init__(self, run: Run) -> None:
        spec = run.optimizer
        self.run, self.model = run, build(run).module.train()
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        others = [p for p in self.model.parameters() if p.dim() < 2]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": spec.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        if spec.name == "adamw":
            betas = (spec.beta1, spec.beta2)
            self.optimizer: Any = torch.optim.AdamW(groups, lr=spec.lr, betas=betas, eps=spec.eps)
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=spec.lr, momentum=spec.momentum)

    def step(self, t: int) -> list[float]:
        run, losses, buffers = self.run, [], dict(self.model.named_buffers())
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        means = {name: torch.zeros_like(buffer) for name, buffer in buffers.items()}
        for m in range(run.M):
            for name, buffer in buffers.items():
                buffer.copy_(before[name])
            inputs = map(torch.as_tensor, samples(run, sample_offsets(run, t, m)))
            loss = self.model(*(x.double() if x.is_floating_point() else x for x in inputs))
            (loss / run.M).backward()
            losses.append(loss.item())
            for name, buffer in buffers.items():
                means[name] += buffer
        for name, buffer in buffers.items():
            # Of updates from the same old values the mean is the update with the mean.
            buffer.copy_(means[name] / run.M)
        if run.optimizer.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), run.optimizer.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses


def far(run: Run) -> float:
    """The largest difference of any loss, weight or statistic after all steps, relative to its tensor."""
    single, plain = SingleProcess(run, lambda offsets: samples(run, offsets)), Plain(run)
    worst = 0.0
    for t in range(run.steps):
        ours, theirs = single.step(t), plain.step(t)
        worst = max(worst, *(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)))
    expected = plain.model.state_dict()
    assert not math.isnan(worst)
    found = single.named_weights()
    told = {n for n in expected if n.rpartition(".")[2] in ("running_mean", "running_var")}
    assert {n for n, _ in plain.model.named_parameters()} | told == found.keys()
    for n, weights in found.items():
        worst = max(worst, ((weights - expected[n]).abs().max() / expected[n].abs().max()).item())
    return worst


@pytest.mark.parametrize(
    ("name", "optimizer"),
    some(
        [
            ("gpt2", {"lr": 1e-3, "clip_norm": 0.5}),
            ("llama", {"name": "sgd", "lr": 1e-3, "momentum": 0.9, "weight_decay": 0.0, "clip_norm": 0.0}),
            ("resnet", {"lr": 1e-3, "clip_norm": 0.5}),
        ],
        quick=[("gpt2", {"lr": 1e-3, "clip_norm": 0.5})],
    ),
)
def test_a_model_in_pieces_is_trained_as_by_plain_torch(name: str, optimizer: dict[str, Any]) -> None:
    """float64: tied weights, clipping, and batch norm by the rule of the step; 1e-9 relative."""
    (assignment,) = cuts(whole(name).traced.graph, 1, seed=1)
    run = run_of(
        name, assignment, dtype="float64", optimizer=OptimizerSpec(schedule="constant", **optimizer),
        batch=BatchSpec(microbatch_size=3, microbatches_per_step=3),
    )  # fmt: skip
    assert far(run) < 1e-9
