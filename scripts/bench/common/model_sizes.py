"""How large a decoder is, without building it."""

from __future__ import annotations

from swarm.manifest import ModelSpec
from swarm.manifest.tables import CODES_BEFORE


def parameter_count(model: ModelSpec, *, sequence_length: int = 0) -> int:
    """Number of weights of the built-in decoder, by hand: it is to be that of its layout.

    Learned positions add one vector per place, hence `sequence_length`.
    """
    hidden, vectors = model.hidden, 2 if model.norm == "layernorm" else 1
    of_heads = hidden // model.heads * model.key_heads
    attention = 2 * hidden * (hidden + of_heads) + model.qk_norm * 2 * vectors * (hidden // model.heads)
    feed_forward = (3 if model.mlp == "swiglu" else 2) * hidden * model.ffn_hidden
    block = attention + feed_forward + 2 * vectors * hidden
    places = sequence_length * hidden if model.positions == "learned" else 0
    tables = (1 if model.head == "tied" else 2) * model.vocab_size * hidden
    codes = (model.vocab_size + (1 + CODES_BEFORE) * hidden) * model.code_width
    narrow = 2 * hidden * model.bottleneck + codes
    cuts = (model.stages - 1) * narrow if model.bottleneck else 0
    return tables + places + model.layers * block + vectors * hidden + cuts
