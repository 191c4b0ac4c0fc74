"""Models of Hugging Face's transformers, as they are shipped: traced, cut, and computed as by one process."""

from __future__ import annotations

import pytest
import torch

from swarm.ids import Microbatch
from swarm.model.graph.model_source import from_hf
from swarm.model.graph.trace import trace
from tests.model.graph.parity import check_parity, compute, cut, gradients, random_cuts
from tests.seeds import some

transformers = pytest.importorskip("transformers", reason="the extra [hf] is not installed")
SMALL = {"bos_token_id": 1, "eos_token_id": 2, "use_cache": False}


def gpt2() -> torch.nn.Module:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=24, n_head=3, vocab_size=41, n_positions=16,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **SMALL,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama() -> torch.nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=24, intermediate_size=48, num_attention_heads=6,
        num_key_value_heads=2, vocab_size=41, max_position_embeddings=16, **SMALL,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.slow
@pytest.mark.parametrize("build", [gpt2, llama])
def test_every_gradient_is_that_of_one_process(build) -> None:
    torch.manual_seed(0)
    model = build().double().train()
    tokens = torch.randint(3, 41, (3, 10))
    inputs = {"input_ids": tokens, "labels": tokens.clone()}
    traced = trace(model, kwargs=inputs)
    assert traced.graph.inputs == ("input_ids", "labels")
    check_parity(compute(model, traced, inputs), 7)
    if build is gpt2:
        assert traced.graph.tied == (("transformer.wte.weight", "lm_head.weight"),)


@pytest.mark.slow
def test_masks_and_rotary_tables_are_computed_where_they_are_needed() -> None:
    tokens = torch.randint(3, 41, (3, 10))
    traced = trace(llama().train(), kwargs={"input_ids": tokens, "labels": tokens})
    cheap = {op.target for op in traced.graph.operators if op.cheap}
    assert {"aten.cos.default", "aten.sin.default", "aten.arange.default"} <= cheap


IMAGES = {"image_size": 32, "num_labels": 5}
RANDOM = {
    "beit": (
        {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}
        | {"architectures": ["BeitForImageClassification"], "patch_size": 8, "drop_path_rate": 0.3, **IMAGES},
        "aten.rand.default",
    ),
    "swin": (
        {"architectures": ["SwinForImageClassification"], "embed_dim": 12, "depths": [1, 2], **IMAGES}
        | {"num_heads": [2, 4], "window_size": 4, "patch_size": 4, "drop_path_rate": 0.3},
        "aten.rand.default",
    ),
    "mobilenet_v2": (
        {"architectures": ["MobileNetV2ForImageClassification"], "depth_multiplier": 0.25, **IMAGES}
        | {"classifier_dropout_prob": 0.5},
        "aten.dropout_.default",
    ),
}
"""Models that draw random numbers, small but else as they come: config, and the operator that draws."""


@pytest.mark.parametrize("kind", some(list(RANDOM), quick=["beit"]))
def test_what_drops_paths_or_drops_in_place_is_the_same_in_every_cut(kind: str) -> None:
    config, operator = RANDOM[kind]
    torch.manual_seed(0)
    model = from_hf({"model_type": kind, **config}, rows=3, length=1)
    model.module.double()
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1)).double()
    inputs = {"pixel_values": images, "labels": torch.tensor([0, 4, 2])}
    traced = trace(model.module.train(), kwargs=inputs)
    assert operator in {op.target for op in traced.graph.operators}
    alone = cut(traced, [0] * len(traced.graph.operators), seed=0)
    mb = Microbatch(2, 1)
    one = gradients(alone, inputs, mb)
    for assignment in random_cuts(traced.graph, 3, seed=1):
        got = gradients(cut(traced, assignment, seed=0), inputs, mb)
        torch.testing.assert_close(got.loss, one.loss, rtol=1e-12, atol=0)
        for name, expected in one.parameters.items():
            error = (got.parameters[name] - expected).abs().max().item()
            assert error <= 1e-12 * max(1.0, expected.abs().max().item()), name
    assert gradients(alone, inputs, Microbatch(2, 2)).loss != one.loss


TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
NAMED = {
    "a classifier of texts": (
        {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "vocab_size": 41, **TOWER},
        ("input_ids int 12", "attention_mask bool 12", "labels int"),
    ),
    "a model of speech": (
        {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "d_model": 16}
        | {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "vocab_size": 41}
        | {"decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_mel_bins": 8}
        | {"max_source_positions": 16, "max_target_positions": 32, "decoder_start_token_id": 1, **SMALL}
        | {"pad_token_id": 0},
        ("input_features float 8x32", "labels int 10"),
    ),
    "a model of pictures and words": (
        {"model_type": "clip", "architectures": ["CLIPModel"], "projection_dim": 8}
        | {"text_config": {**TOWER, "vocab_size": 41, "max_position_embeddings": 16, "eos_token_id": 2}}
        | {"vision_config": {**TOWER, "image_size": 32, "patch_size": 8}},
        ("input_ids int 12", "pixel_values float 3x32x32", "return_loss true"),
    ),
}
"""Models whose inputs nobody can guess."""


@pytest.mark.parametrize("kind", some(list(NAMED), quick=["a model of pictures and words"]))
def test_a_model_whose_inputs_the_manifest_names_is_computed_as_by_one_process(kind: str) -> None:
    config, inputs = NAMED[kind]
    config = {**config, "dropout": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    model = from_hf(config, rows=3, length=1, inputs=inputs)
    model.module.double()
    chance = torch.Generator().manual_seed(1)
    sample = {
        name: torch.randn(value.shape, generator=chance).double()
        if value.is_floating_point()
        else torch.ones_like(value)
        if value.dtype == torch.bool
        else torch.randint(0, 2, value.shape, generator=chance)
        for name, value in model.kwargs.items()
        if isinstance(value, torch.Tensor)
    }
    constants = {name: value for name, value in model.kwargs.items() if value is True}
    traced = trace(model.module.train(), kwargs={**sample, **constants})
    assert traced.graph.inputs == tuple(sample)
    model.module.zero_grad()
    loss = model.module(**sample, **constants).loss
    loss.backward()
    for assignment in random_cuts(traced.graph, 3, seed=1):
        got = gradients(cut(traced, assignment, seed=0), sample, Microbatch(0, 0))
        torch.testing.assert_close(got.loss, loss.detach(), rtol=1e-12, atol=1e-12)
        for name, parameter in model.module.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(got.parameters[name], parameter.grad, rtol=1e-9, atol=1e-12)
