"""The flat optimizers against torch's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarm.manifest import OptimizerSpec
from swarm.model.optimizer import (
    FlatOptimizer,
    ParameterGroup,
    muon_update,
    parts_of,
    to_bfloat16,
    vector_layout,
)

CPU = torch.device("cpu")
NUMEL, DECAYED = 200_000, 150_001


def flat_optimizer(spec: OptimizerSpec, numel: int, decayed: int, dtype: torch.dtype) -> FlatOptimizer:
    """Of two weights, the first of which decays."""
    spans = {
        "a": (0, decayed, torch.Size([1, decayed])),
        "b": (decayed, numel, torch.Size([numel - decayed])),
    }
    return optimizer_of(spec, numel, parts_of(spec, spans), dtype)


def optimizer_of(
    spec: OptimizerSpec,
    numel: int,
    parts: Sequence[ParameterGroup],
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> FlatOptimizer:
    """Before its first step."""
    lengths = vector_layout(spec, numel, dtype)
    vectors = {name: torch.zeros(length, dtype=kind) for name, (length, kind) in lengths.items()}
    return FlatOptimizer(spec, parts, vectors, CPU, seed)


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
    ours = flat_optimizer(spec, NUMEL, DECAYED, dtype)
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
    flat_optimizer(spec, 10, 4, torch.float32).step(0, 0.5, flat, flat, torch.zeros(10), 1.0)
    assert torch.allclose(flat[:4], torch.full((4,), 0.95)) and bool((flat[4:] == 1).all())


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_old_weights_and_the_gradient_are_only_read(name: Any) -> None:
    spec = OptimizerSpec(name=name, lr=0.1)
    old, g = torch.randn(100), torch.randn(100)
    copies = old.clone(), g.clone()
    inplace, new = old.clone(), torch.full((100,), 7.0)
    flat_optimizer(spec, 100, 60, torch.float32).step(0, 0.1, old, new, g, 0.5)
    flat_optimizer(spec, 100, 60, torch.float32).step(0, 0.1, inplace, inplace, g, 0.5)
    assert torch.equal(old, copies[0]) and torch.equal(g, copies[1])
    assert torch.equal(new, inplace) and not torch.equal(new, old)


def test_only_the_moments_that_are_needed_are_kept() -> None:
    def names(**fields: Any) -> set[str]:
        return set(flat_optimizer(OptimizerSpec(lr=1.0, **fields), 8, 4, torch.float32).vectors)

    assert names(name="adamw") == {"exp_avg", "exp_avg_sq"}
    assert names(name="sgd") == set()
    assert names(name="sgd", momentum=0.5) == {"momentum"}


# --- moments in two bytes


def test_a_number_is_rounded_to_a_neighbour_and_on_average_to_itself() -> None:
    for value in (1.0 + 1 / 512, -3.1e-5, 0.0, 1.0, 7e-39):
        found = to_bfloat16(torch.full((200_000,), value), seed=7, start=0).double()
        number = torch.tensor(value).double().item()
        spacing = max(abs(number), 1.2e-38) / 128
        assert (found - number).abs().max() < spacing
        assert abs(found.mean().item() - number) < spacing / 100
    numbers = gradient(0, torch.float32)
    at_once = to_bfloat16(numbers, 3, 0)
    in_parts = torch.cat([to_bfloat16(part, 3, 70_000 * n) for n, part in enumerate(numbers.split(70_000))])
    assert torch.equal(at_once, in_parts) and not torch.equal(at_once, to_bfloat16(numbers, 4, 0))


def test_moments_in_bfloat16_follow_those_in_float32_however_slowly_they_change() -> None:
    """To the nearest, a mean of squares with beta2 = 0.9999 would stay as it is for ever."""
    spec = OptimizerSpec(lr=1e-3, beta2=0.9999, weight_decay=0.0)
    weights, squares = [], []
    for moments in ("float32", "bfloat16"):
        ours = flat_optimizer(replace(spec, moments=moments), 4000, 4000, torch.float32)
        flat = torch.zeros(4000)
        ours.vectors["exp_avg_sq"].fill_(1.0)
        for t in range(300):
            ours.step(t, spec.lr, flat, flat, torch.full((4000,), 0.01), 1.0)
        weights.append(flat)
        squares.append(ours.vectors["exp_avg_sq"].double().mean().item())
    assert squares[0] == pytest.approx(0.9999**300, rel=1e-3)
    assert squares[1] == pytest.approx(squares[0], rel=1e-3)
    torch.testing.assert_close(weights[1].mean(), weights[0].mean(), rtol=2e-3, atol=0)


def test_a_weight_is_rounded_alike_whatever_lies_beside_it() -> None:
    spec = OptimizerSpec(lr=1e-2, moments="bfloat16")
    grad, found = gradient(1, torch.float32)[:96], []
    for start in (0, 32):
        spans = {"x": (0, 32, torch.Size([4, 8])), "y": (start, start + 96, torch.Size([12, 8]))}
        spans = dict(list(spans.items())[start == 0 :])
        ours = optimizer_of(spec, start + 96, parts_of(spec, spans), seed=5)
        flat = torch.ones(start + 96)
        for t in range(3):
            ours.step(t, 0.01, flat, flat, torch.cat([torch.ones(start), grad]), 1.0)
        found.append((flat[start:], ours.vectors["exp_avg"][start:], ours.vectors["exp_avg_sq"][start:]))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert all(vector.dtype == torch.bfloat16 for vector in found[0][1:])


# --- groups and Muon


def test_weights_are_stepped_by_the_first_group_that_names_them() -> None:
    spec = OptimizerSpec(
        name="sgd",
        lr=1.0,
        weight_decay=0.25,
        groups=("a.* lr=0.5", "*.bias lr=2 weight_decay=0.5", "a* lr=9"),
    )
    spans = {
        "a.weight": (0, 4, torch.Size([2, 2])), "b.weight": (16, 20, torch.Size([2, 2])),
        "a.bias": (32, 34, torch.Size([2])), "b.bias": (48, 50, torch.Size([2])),
    }  # fmt: skip
    parts = parts_of(spec, spans)
    assert [(p.start, p.end, p.terms.lr, p.terms.decay) for p in parts] == [
        (0, 4, 0.5, 0.25), (4, 20, 1.0, 0.25), (20, 34, 0.5, 0.0), (34, 50, 2.0, 0.5),
    ]  # fmt: skip
    flat = torch.ones(50)
    optimizer_of(spec, 50, parts).step(0, 0.1, flat, flat, torch.ones(50), 1.0)
    for (start, end, _), lr, decay in zip(
        spans.values(), (0.05, 0.1, 0.05, 0.2), (0.25, 0.25, 0, 0.5), strict=True
    ):
        assert torch.allclose(flat[start:end], torch.tensor(1 - lr * decay - lr))


def test_without_groups_the_vector_is_in_two_parts_as_ever() -> None:
    spans = {
        name: (i * 16, i * 16 + 4, torch.Size([2, 2] if i < 2 else [4])) for i, name in enumerate("abcd")
    }
    parts = parts_of(OptimizerSpec(lr=1.0, weight_decay=0.1), spans)
    assert [(p.start, p.end, p.terms.decay) for p in parts] == [(0, 20, 0.1), (20, 52, 0.0)]


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6), (1, 5)])
def test_muon_gives_the_mean_gradient_with_all_singular_values_near_one(shape: tuple[int, int]) -> None:
    chance = torch.Generator().manual_seed(1)
    grad, mean = (torch.randn(shape, generator=chance, dtype=torch.float64) for _ in range(2))
    before = mean.clone()
    update = muon_update(mean, grad) / (0.2 * max(shape) ** 0.5)
    assert torch.allclose(mean, 0.95 * before + 0.05 * grad)
    ahead = 0.05 * grad + 0.95 * mean
    u, _, vt = torch.linalg.svd(ahead, full_matrices=False)
    inner = u.T @ update @ vt.T
    values = torch.linalg.svdvals(update)
    assert 0.3 < values.min() <= values.max() < 1.3
    assert torch.allclose(inner, torch.diag(inner.diagonal()), atol=1e-6)


def test_muon_steps_as_torch_s_own_which_rounds_to_bfloat16() -> None:
    spec = OptimizerSpec(name="muon", lr=0.02, weight_decay=0.1, muon=("*",))
    shape = torch.Size([24, 40])
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    flat, theirs = start.flatten().clone(), torch.nn.Parameter(start.clone())
    ours = optimizer_of(spec, flat.numel(), parts_of(spec, {"w": (0, flat.numel(), shape)}))
    reference = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for t in range(5):
        theirs.grad = torch.randn(shape, generator=torch.Generator().manual_seed(t + 1))
        ours.step(t, 0.02, flat, flat, theirs.grad.flatten() * 4, 0.25)
        reference.step()
    moved = (theirs.detach() - start).norm()
    assert (flat.view(shape) - theirs.detach()).norm() < 0.02 * moved
    assert bool((ours.vectors["exp_avg_sq"] == 0).all())
