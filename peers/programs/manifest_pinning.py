"""`swarm manifest`, and binding a written manifest to its data and model before it is published."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from swarm.manifest import EXAMPLE, CustomModelSpec, Run, load_run, parameter_count

if TYPE_CHECKING:
    from peers.programs.tool_options import ManifestOptions
    from peers.storage.dataset import Dataset
    from peers.storage.samples import Samples


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


def pinned(run: Run, data: Dataset | Samples) -> Run:
    """`run` with what is open filled in, as it is on this machine.

    Raises:
        SetupError: the model cannot be built, is not what is pinned, or does not take these data.
    """
    run = data.pinned(run)
    if not isinstance(run.model, CustomModelSpec):
        return run
    from peers.storage.samples import Samples
    from swarm.data import sample_offsets
    from swarm.model.custom import model_inputs, pin_model

    if not run.model.pinned:
        run = pin_model(run)
    if isinstance(data, Samples):
        model_inputs(run, data.batch(sample_offsets(run, 0, 0)))
    return run
