"""`swarm manifest`: an example to edit, or the canonical text of a manifest."""

from __future__ import annotations

import sys
from pathlib import Path

from peers.programs.tool_options import ManifestOptions
from swarm.manifest import CustomModelSpec, load_run

EXAMPLE = Path(__file__).with_name("example.toml").read_text(encoding="utf-8")


def run_manifest(options: ManifestOptions) -> None:
    """Print the example, or the canonical text of a manifest and, on standard error, what it comes to."""
    if options.manifest is None:
        print(EXAMPLE, end="")
        return
    run = load_run("/dev/stdin" if options.manifest == Path("-") else options.manifest)
    print(run.to_toml(), end="")
    if isinstance(run.model, CustomModelSpec):
        words = run.model.source or "a model of transformers"
        open_ends = [] if run.model.pinned else ["the model"]
    else:
        from peers.storage.weights import model_shapes

        parameters = sum(tensor.numel() for tensor in model_shapes(run).values())
        words, open_ends = f"{parameters / 1e6:,.1f} M parameters", []
    if not run.data.sha256:
        open_ends.append("the data")
    each = "samples" if run.data.source == "code" else "tokens"
    more = f"; the id changes when swarm bootstrap pins {' and '.join(open_ends)}" if open_ends else ""
    print(f"run {run.id}: {words}, {run.tokens_per_step:,} {each} a step{more}", file=sys.stderr)
