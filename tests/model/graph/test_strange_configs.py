"""Configs of transformers that a stranger wrote: what they may make this machine do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from swarm.errors import SetupError
from swarm.manifest import LoraSpec
from swarm.model.graph.lazy_tensors import LazyTensors, seeded
from swarm.model.graph.lora import adapt, is_adapter, merge
from swarm.model.graph.model_source import MAX_LABELS, MAX_NUMBER, from_hf

transformers = pytest.importorskip("transformers", reason="the extra [hf] is not installed")
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": 8}


def test_no_config_has_another_config_fetched() -> None:
    """That one would come unpinned, and none of our rules would have looked at it."""
    detr = {"model_type": "detr", "architectures": ["DetrForObjectDetection"], "use_timm_backbone": False}
    with pytest.raises(SetupError, match=r"^backbone in the model's config asks for something to be fetched"):
        from_hf({**detr, "backbone": "a/b"}, rows=1, length=4)


def test_a_base_of_rotary_positions_may_be_any_number() -> None:
    assert from_hf({**GPT2, "rope_theta": 10**11}, rows=1, length=4).module


def test_no_key_of_a_config_stands_for_another() -> None:
    """`x` would name a kernel: code that transformers fetches and runs where its package `kernels` is."""
    hidden = {"attribute_map": {"x": "_attn_implementation"}, "x": "a/b"}
    with pytest.raises(SetupError, match=r"^attribute_map in the model's config asks for something"):
        from_hf({**GPT2, **hidden}, rows=1, length=4)


@pytest.mark.parametrize(
    ("key", "value", "most"),
    [
        ("num_labels", 1 << 30, MAX_LABELS),
        ("n_layer", 1 << 40, MAX_NUMBER),
        ("depths", [2, 1 << 40], MAX_NUMBER),
    ],
)
def test_no_number_in_a_config_fills_the_memory(key: str, value: Any, most: int) -> None:
    with pytest.raises(SetupError, match=f"^{key} in the model's config is .*: at most {most} are taken"):
        from_hf({**GPT2, "model_type": "x", "sub": {key: value}}, rows=1, length=4)


def test_no_model_of_very_many_layers_is_built() -> None:
    lazy = LazyTensors(0, most=100)
    too_many = "makes no model of this config: its code makes tensors by more than 100 calls"
    with seeded(0), lazy.noted(), pytest.raises(SetupError, match=too_many):
        from_hf({**GPT2, "n_layer": 50}, rows=1, length=4)


@pytest.mark.parametrize("beside", ["alone", "layer", "embedding", "same layer"])
def test_an_adapter_is_merged_into_no_weight_that_other_parts_have_too(beside: str) -> None:
    """What two layers had trained was added to the matrix of both, without a word."""
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    parts = {"same layer": one, "embedding": nn.Embedding(4, 4)}
    shared: nn.Module = parts.get(beside, other)
    if beside in ("layer", "embedding"):
        shared.weight = one.weight
    model = nn.Sequential(one, nn.ReLU(), shared)
    spec = LoraSpec(rank=1, targets=("0",))
    adapt(model, spec, seed=0)
    nn.init.ones_(one.lora_B.weight)  # type: ignore[union-attr, arg-type]
    if beside in ("layer", "embedding"):
        with pytest.raises(SetupError, match=r"^0 shares its weight, .*: take --adapter$"):
            merge(model, spec)
        return
    given = torch.randn(3, 4)
    before = model(given)
    merge(model, spec)
    assert not is_adapter(" ".join(dict(model.named_parameters())))
    torch.testing.assert_close(model(given), before)


@pytest.mark.parametrize(("layers", "rank"), [(1, 1 << 10), (40, 1 << 9)])
def test_no_matrices_beside_layers_fill_the_memory(layers: int, rank: int) -> None:
    """They are made before a peer can know whether its stage fits: of rank 65536 they took 5 GB a layer."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1 << 15, 1 << 16) for _ in range(layers)))
    targets = tuple(map(str, range(layers)))
    with pytest.raises(SetupError, match=rf"^lora\.rank = {rank}: its matrices have up to .* are allowed"):
        adapt(model, LoraSpec(rank=rank, targets=targets), seed=0)
