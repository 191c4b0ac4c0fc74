"""Initial weights that are drawn when they are asked for: those that the code means, and no others."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from swarm.manifest import BatchSpec, CustomModelSpec, DataSpec, demo_run
from swarm.model.graph.custom_model import custom_model, drawn
from swarm.model.graph.lazy_tensors import LARGE_BYTES, LazyTensors, seeded
from swarm.model.same_bits import threads_as_before

MILLION = 1_000_000


class Various(nn.Module):
    """Begins in all the ways that code has for it."""

    def __init__(self) -> None:
        super().__init__()
        self.square, self.table = nn.Linear(40, 40), nn.Embedding(50, 8, padding_idx=3)
        nn.init.orthogonal_(self.square.weight)
        nn.init.trunc_normal_(self.table.weight, std=0.02, b=0.03)
        with torch.no_grad():
            self.table.weight[3].zero_()
        self.twin = copy.deepcopy(self.square)
        self.norm, self.batch_norm = nn.LayerNorm(7), nn.BatchNorm1d(4)
        self.zeros = nn.Parameter(torch.zeros(LARGE_BYTES))
        self.drawn_later = nn.Parameter(torch.zeros(5))
        nn.init.normal_(self.drawn_later)
        self.scaled = nn.Parameter(torch.randn(6, 5) * 1000 + 7)
        self.narrow = nn.Parameter(torch.rand(2, 3).double().T.to(torch.float32).contiguous())
        self.attention, self.recurrent = nn.MultiheadAttention(16, 2), nn.LSTM(4, 5)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(5, 5))
        own = torch.Generator().manual_seed(5)
        self.of_its_own = nn.Parameter(torch.randn(3, generator=own) + torch.rand(3, generator=own))
        self.register_buffer("mask", torch.tril(torch.ones(600, 600)).bool())
        self.register_buffer("order", torch.randperm(9))
        self.read = [float(torch.rand(1)), torch.rand(3).tolist(), torch.rand(2).numpy().tolist()]
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        chosen = torch.rand(20)
        self.chosen = nn.Parameter(chosen[chosen > 0.5])
        chosen.fill_(2.0)
        self.list = [torch.randn(4)]


def made(seed: int = 1) -> tuple[Various, LazyTensors]:
    lazy = LazyTensors(seed)
    with seeded(seed), lazy.noted():
        return Various(), lazy


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def test_numbers_are_those_that_the_code_asks_for() -> None:
    module, lazy = made()
    found = {name: lazy.value(tensor) for name, tensor in tensors(module).items()}
    weight = found["square.weight"]
    torch.testing.assert_close(weight @ weight.T, torch.eye(40), rtol=0, atol=1e-5)
    table = found["table.weight"]
    assert not table[3].any() and table[4].any() and 0.015 < table.std() < 0.02 and table.max() <= 0.03
    assert torch.equal(found["twin.weight"], weight), "a copy is a copy"
    assert torch.equal(found["norm.weight"], torch.ones(7)) and not found["zeros"].any()
    assert found["drawn_later"].count_nonzero() == 5
    assert found["scaled"].std() > 500 and abs(found["scaled"].mean() - 7) < 1000
    assert found["narrow"].shape == (3, 2) and found["narrow"].is_contiguous()
    expected = torch.Generator().manual_seed(5)
    first = torch.randn(3, generator=expected)
    assert torch.equal(found["of_its_own"], first + torch.rand(3, generator=expected))
    assert torch.equal(found["mask"], torch.tril(torch.ones(600, 600)).bool())
    assert sorted(found["order"].tolist()) == [*range(9)]
    assert 0 < module.read[0] < 1 and all(0 < x < 1 for one in module.read[1:] for x in one)
    assert module.rates == [0.0, 0.5, 1.0]
    assert 0 < len(found["chosen"]) < 20 and found["chosen"].min() > 0.5, (
        "not what the code did with it later"
    )


def test_they_do_not_depend_on_what_else_is_asked_for_nor_when() -> None:
    first, of_first = made()
    second, of_second = made()
    for name in reversed(tensors(second)):
        of_second.value(tensors(second)[name])
    for name, tensor in tensors(first).items():
        assert torch.equal(of_first.value(tensor), of_second.value(tensors(second)[name])), name
    of_second.fill_all(second.modules())
    for name, tensor in tensors(second).items():
        assert torch.equal(of_first.value(tensors(first)[name]), tensor), name
        assert of_second.value(tensor).data_ptr() == tensor.data_ptr()
    assert torch.equal(second.list[0], of_first.value(first.list[0]))
    assert first.read == second.read
    other, of_other = made(seed=2)
    assert not torch.equal(of_other.value(other.scaled), second.scaled)


def test_they_do_not_depend_on_the_threads_of_who_asks() -> None:
    lazy, found = LazyTensors(1), list[torch.Tensor]()
    with lazy.noted():
        square = nn.init.orthogonal_(torch.empty(64, 64))
    with threads_as_before():
        for threads in (1, 2):  # of torch 2.13 these find other bits
            torch.set_num_threads(threads)
            found.append(lazy.value(square))
            assert torch.get_num_threads() == threads
    assert torch.equal(*found)


def test_torch_s_generator_goes_on_as_before() -> None:
    before = torch.get_rng_state()
    module, lazy = made()
    lazy.value(module.scaled)
    assert torch.equal(torch.get_rng_state(), before)


def test_all_draws_of_a_model_are_different() -> None:
    lazy = LazyTensors(0)
    with seeded(0), lazy.noted():
        layers = [nn.Linear(8, 8) for _ in range(200)]
    assert len({lazy.value(layer.weight).numpy().tobytes() for layer in layers}) == 200


def test_what_the_code_writes_by_itself_counts_from_then_on() -> None:
    lazy = LazyTensors(0)
    with seeded(0), lazy.noted():
        weight = torch.randn(3)
        before = weight.clone()
        lazy.fill(weight)
        weight.mul_(2.0)
        own = torch.zeros(4)
        own[1:] = weight
        weight.fill_(5.0)
    found = lazy.value(own)
    assert torch.equal(found, torch.cat([torch.zeros(1), 2 * lazy.value(before)]))
    assert torch.equal(lazy.value(weight), torch.full((3,), 5.0))


@pytest.mark.slow
def test_a_model_takes_no_memory_but_that_of_what_is_asked_for() -> None:
    """800 MB of weights: tracing makes none of them, and a stage one of its own after the other."""
    pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the system does not say how much memory was used at most")
    sizes = {"hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 4, "vocab_size": 4096}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 64}
    config: dict[str, Any] = {"model_type": "llama", **sizes, **heads}
    run = replace(
        demo_run(steps=20),
        model=CustomModelSpec(kind="hf", config=json.dumps(config), stages=4, vocab_size=4096),
        data=DataSpec(source="tales", sequence_length=8),
        batch=BatchSpec(microbatch_size=1, microbatches_per_step=2),
    )
    small = replace(run, model=replace(run.model, config=json.dumps({**config, "hidden_size": 64})))
    custom_model(small)  # what torch needs for itself
    begun = most_bytes()
    model = custom_model(run)
    assert sum(one.nbytes for one in model.traced.parameters.values()) > 700 * MILLION
    assert most_bytes() - begun < 60 * MILLION
    held = max(value.nbytes for _, value in drawn(run, 1))
    assert most_bytes() - begun < 120 * MILLION + 2 * held  # in a fork more than in a new process


def most_bytes() -> int:
    """Resident memory of this process at most, since this was asked last."""
    status = Path("/proc/self/status").read_text().splitlines()
    Path("/proc/self/clear_refs").write_text("5")
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024
