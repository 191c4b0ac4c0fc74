"""`swarm manifest`: an example to edit, or the canonical text of a manifest."""

from __future__ import annotations

import sys
from pathlib import Path

from peers.programs.tool_options import ManifestOptions
from swarm.manifest import CustomModelSpec, ModelSpec, load_run

EXAMPLE = Path(__file__).with_name("example.toml").read_text(encoding="utf-8")


def run_manifest(options: ManifestOptions) -> None:
    """Print the example, or the canonical text of a manifest and, on standard error, what it comes to."""
    if options.manifest is None:
        print(EXAMPLE, end="")
        return
    run = load_run(options.manifest)
    print(run.to_toml(), end="")
    if isinstance(run.model, CustomModelSpec):
        words = run.model.source or "a model of transformers"
        open_ends = [] if run.model.pinned else ["the model"]
    else:
        millions = parameter_count(run.model, sequence_length=run.data.sequence_length) / 1e6
        words, open_ends = f"{millions:,.1f} M parameters", []
    if not run.data.sha256:
        open_ends.append("the data")
    each = "samples" if run.data.source == "code" else "tokens"
    more = f"; the id changes when swarm bootstrap pins {' and '.join(open_ends)}" if open_ends else ""
    print(f"run {run.id}: {words}, {run.tokens_per_step:,} {each} a step{more}", file=sys.stderr)


def parameter_count(model: ModelSpec, *, sequence_length: int = 0) -> int:
    """Number of weights of the whole model.

    Learned positions add one vector per place, hence `sequence_length`. The audit model's size depends on M
    and is not told here: it counts 0.
    """
    if model.kind == "counting":
        return 0
    hidden, vectors = model.hidden, 2 if model.norm == "layernorm" else 1
    of_heads = hidden // model.heads * model.key_heads
    attention = 2 * hidden * (hidden + of_heads) + model.qk_norm * 2 * vectors * (hidden // model.heads)
    feed_forward = (3 if model.mlp == "swiglu" else 2) * hidden * model.ffn_hidden
    block = attention + feed_forward + 2 * vectors * hidden
    places = sequence_length * hidden if model.positions == "learned" else 0
    tables = (1 if model.head == "tied" else 2) * model.vocab_size * hidden
    narrow = 2 * hidden * model.bottleneck + (model.vocab_size + hidden) * model.code_width
    cuts = (model.stages - 1) * narrow if model.bottleneck else 0
    return tables + places + model.layers * block + vectors * hidden + cuts
