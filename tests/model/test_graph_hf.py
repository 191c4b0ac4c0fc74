"""Models of Hugging Face's transformers, as they are shipped: traced, cut, and computed as by one process."""

from __future__ import annotations

import pytest
import torch

from swarm.model.graph.trace import trace
from tests.model.parity import check_parity, compute

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


def test_masks_and_rotary_tables_are_computed_where_they_are_needed() -> None:
    tokens = torch.randint(3, 41, (3, 10))
    traced = trace(llama().train(), kwargs={"input_ids": tokens, "labels": tokens})
    cheap = {op.target for op in traced.graph.operators if op.cheap}
    assert {"aten.cos.default", "aten.sin.default", "aten.arange.default"} <= cheap
