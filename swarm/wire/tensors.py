"""What each stage takes and gives, as metas: known from the manifest alone.

So nothing unexpected is ever received."""

from __future__ import annotations

import msgspec

from swarm.data import token_dtype
from swarm.ids import Stage
from swarm.run import Run
from swarm.wire.meta import TensorMeta, encoded_sizes


def boundary_shape(run: Run) -> tuple[int, ...]:
    """Shape of what crosses a boundary for one microbatch: [B, T, H], or one number for the audit model."""
    if run.model.kind == "counting":
        return (1, 1, 1)
    return (run.batch.microbatch_size, run.data.sequence_length, run.model.hidden)


def hidden_meta(run: Run, boundary: int) -> TensorMeta:
    """What stage `boundary` sends to the next, as the manifest has it: in the run's dtype."""
    return TensorMeta(boundary_shape(run), run.dtype, run.codec.forward_at(boundary))


def gradient_meta(run: Run, boundary: int, hidden: TensorMeta) -> TensorMeta:
    """What comes back for `hidden`, which was sent over `boundary`."""
    return msgspec.structs.replace(hidden, codec=run.codec.backward_at(boundary, hidden.codec))


def input_metas(run: Run, stage: Stage) -> tuple[TensorMeta, ...]:
    """What a stage takes: tokens [B, T+1], or hidden [B, T, H] and labels [B, T]."""
    rows, length = run.batch.microbatch_size, run.data.sequence_length
    tokens = token_dtype(run.model.vocab_size)
    if stage == 0:
        return (TensorMeta((rows, length + 1), tokens, "none"),)
    return (hidden_meta(run, stage - 1), TensorMeta((rows, length), tokens, "none"))


def allowed_inputs(run: Run, stage: Stage) -> tuple[tuple[TensorMeta, ...], ...]:
    """All that a stage may be sent: what the manifest has first, then with the codecs of `codec.adaptive`."""
    taken = input_metas(run, stage)
    if stage == 0:
        return (taken,)
    return tuple(
        (msgspec.structs.replace(taken[0], codec=codec), *taken[1:])
        for codec in run.codec.allowed_at(stage - 1)
    )


def allowed_gradients(run: Run, boundary: int) -> tuple[TensorMeta, ...]:
    """All that may come back over `boundary`, each once: one, unless there is `codec.adaptive`."""
    answers = [gradient_meta(run, boundary, sent[0]) for sent in allowed_inputs(run, boundary + 1)]
    return tuple(dict.fromkeys(answers))


def crossing_bytes(run: Run, boundary: int, codec: str) -> tuple[float, float]:
    """(forward, backward) bytes of a microbatch over a boundary without labels, if `codec` goes forward."""
    hidden = msgspec.structs.replace(hidden_meta(run, boundary), codec=codec)
    gradient = gradient_meta(run, boundary, hidden)
    return float(sum(encoded_sizes(hidden))), float(sum(encoded_sizes(gradient)))
