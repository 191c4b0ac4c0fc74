"""Runs and machines that are only described: a step's work from the manifest, the network from a file."""

from __future__ import annotations

from pathlib import Path

from swarm.errors import SetupError
from swarm.manifest import Run
from swarm.plan.network import Job, Network, read_devices

ACTIVATIONS_OF_A_BLOCK = 16
"""Numbers of the width of the model that autograd keeps of a block, per token: inputs of its products,
attention's queries, keys and values, and what the feed-forward part has inside, about."""


def job_of(run: Run) -> Job:
    """The work of one step of a run, from its manifest alone.

    Raises:
        SetupError: the audit model does no arithmetic that could be reckoned.
    """
    from swarm.model.gpt import layer_flops, layer_split
    from swarm.model.layout import empty_state, reduce_bytes
    from swarm.model.stage_io import body_bytes, gradient_metas, input_metas
    from swarm.wire.tensor_meta import ITEM_BYTES

    if run.model.kind != "gpt":
        why = "its work is not reckoned yet" if run.brings_model else "it computes nothing"
        raise SetupError(f'model.kind = "{run.model.kind}": {why}; take a run of kind "gpt"')
    tokens = run.batch.microbatch_size * run.data.sequence_length
    block, head = layer_flops(run.built_in, run.data.sequence_length)
    layers = [len(layers) for layers in layer_split(run)]
    stages = range(run.S)
    kept = ACTIVATIONS_OF_A_BLOCK * run.built_in.hidden * tokens * ITEM_BYTES[run.dtype]
    return Job(
        stages=run.S,
        microbatches=run.M,
        forward_flops=tuple(2.0 * tokens * (layers[s] * block + head * (s == run.S - 1)) for s in stages),
        forward_bytes=tuple(body_bytes(input_metas(run, s)) for s in stages[1:]),
        backward_bytes=tuple(
            body_bytes(gradient_metas(run, boundary, input_metas(run, boundary + 1)))
            for boundary in stages[:-1]
        ),
        gradient_bytes=tuple(reduce_bytes(run, s) for s in stages),
        state_bytes=tuple(
            float(sum(t.numel() * t.element_size() for t in empty_state(run, s).values())) for s in stages
        ),
        activation_bytes=tuple(float(kept * layers[s]) for s in stages),
    )


def load_devices(path: Path) -> Network:
    """The network of a `devices.toml`.

    Raises:
        SetupError: it cannot be read, or says what cannot be; the text names the file.
    """
    text = read_text(path)
    try:
        return read_devices(text)
    except SetupError as error:
        raise SetupError(f"{path}: {error.text}") from None


def read_text(path: Path) -> str:
    """All of a file that a user gave.

    Raises:
        SetupError: there is none, or it is no text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise SetupError(f"{path} cannot be read: {reason}") from None


def shown_bytes(size: float) -> str:
    """`512 B`, `1.5 kB`, ... for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"
