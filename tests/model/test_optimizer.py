"""The flat optimizers against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swarm.errors import SetupError
from swarm.manifest import OptimizerSpec
from swarm.model.optimizer import FlatOptimizer

CPU = torch.device("cpu")
NUMEL, DECAYED = 200_000, 150_001


def gradient(t: int, dtype: torch.dtype) -> torch.Tensor:
    g = torch.randn(NUMEL, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
    g[t::7] = 0.0
    return (g * 0.1).to(dtype)


def torch_optimizer(spec: OptimizerSpec, weights: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if spec.name == "sgd":
        return torch.optim.SGD(weights, lr=spec.lr, momentum=spec.momentum, foreach=False)
    groups: list[dict[str, Any]] = [
        {"params": weights[:1], "weight_decay": spec.weight_decay},
        {"params": weights[1:], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(spec.beta1, spec.beta2), eps=spec.eps, lr=spec.lr, foreach=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "spec",
    [
        OptimizerSpec(name="adamw", lr=1e-2, weight_decay=0.1),
        OptimizerSpec(name="adamw", lr=1e-3, beta1=0.8, beta2=0.999, eps=1e-6, weight_decay=0.0),
        OptimizerSpec(name="sgd", lr=0.1, weight_decay=0.0),
        OptimizerSpec(name="sgd", lr=0.1, weight_decay=0.0, momentum=0.9),
    ],
    ids=["adamw", "adamw, other numbers", "sgd", "momentum"],
)
def test_ten_steps_equal_those_of_torch(spec: OptimizerSpec, dtype: torch.dtype) -> None:
    start = torch.randn(NUMEL, generator=torch.Generator().manual_seed(99)).to(dtype)
    theirs = [torch.nn.Parameter(part.clone()) for part in (start[:DECAYED], start[DECAYED:])]
    reference = torch_optimizer(spec, theirs)
    ours = FlatOptimizer(spec, NUMEL, DECAYED, dtype, CPU)
    flat = start.clone()
    for t in range(10):
        lr = spec.lr * (1.0 - t / 20)
        g = gradient(t, dtype)
        for group in reference.param_groups:
            group["lr"] = lr
        theirs[0].grad, theirs[1].grad = g[:DECAYED].clone(), g[DECAYED:].clone()
        reference.step()
        ours.step(t, lr, flat, flat, g * 8, 1 / 8)  # a power of 2: the same numbers in every bit
        assert torch.equal(flat, torch.cat([p.detach() for p in theirs])), f"step {t}"


def test_sgd_decays_apart_from_the_gradient_and_only_what_is_to_decay() -> None:
    spec = OptimizerSpec(name="sgd", lr=0.5, weight_decay=0.1)
    flat = torch.ones(10)
    FlatOptimizer(spec, 10, 4, torch.float32, CPU).step(0, 0.5, flat, flat, torch.zeros(10), 1.0)
    assert torch.allclose(flat[:4], torch.full((4,), 0.95)) and bool((flat[4:] == 1).all())


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_old_weights_and_the_gradient_are_only_read(name: Any) -> None:
    spec = OptimizerSpec(name=name, lr=0.1)
    old, g = torch.randn(100), torch.randn(100)
    copies = old.clone(), g.clone()
    inplace, new = old.clone(), torch.full((100,), 7.0)
    FlatOptimizer(spec, 100, 60, torch.float32, CPU).step(0, 0.1, old, new, g, 0.5)
    FlatOptimizer(spec, 100, 60, torch.float32, CPU).step(0, 0.1, inplace, inplace, g, 0.5)
    assert torch.equal(old, copies[0]) and torch.equal(g, copies[1])
    assert torch.equal(new, inplace) and not torch.equal(new, old)


def test_only_the_moments_that_are_needed_are_kept() -> None:
    def names(**fields: Any) -> set[str]:
        return set(FlatOptimizer(OptimizerSpec(lr=1.0, **fields), 8, 4, torch.float32, CPU).vectors)

    assert names(name="adamw") == {"exp_avg", "exp_avg_sq"}
    assert names(name="sgd") == set()
    assert names(name="sgd", momentum=0.5) == {"momentum"}


def test_the_8_bit_optimizer_needs_cuda_and_says_what_to_do() -> None:
    spec = OptimizerSpec(name="adamw8bit", lr=1.0)
    with pytest.raises(
        SetupError, match='"adamw8bit" needs a CUDA device, and this peer computes on cpu: join'
    ):
        FlatOptimizer(spec, 8, 4, torch.float32, CPU)
