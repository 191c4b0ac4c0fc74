"""What enters each stage, as metas: known from the manifest alone (and, of a brought model, its graph).

So nothing unexpected is ever received. Without torch, unless the model is a brought one: trainers read this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from swarm.data import token_dtype
from swarm.ids import Stage
from swarm.run import Run
from swarm.wire.meta import TensorMeta, encoded_sizes

if TYPE_CHECKING:
    from swarm.model.opgraph import Value


class Crossing(NamedTuple):
    """One tensor that enters a stage."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """On the wire, before its codec."""
    graded: bool
    """A gradient comes back for it; what has none travels as it is."""
    below: int = 0
    """Whole numbers: each is less; 0: nothing is known of them."""
    least: int = 0
    """Whole numbers with `below`: none is less."""


def crossings(run: Run, stage: Stage) -> tuple[Crossing, ...]:
    """What enters `stage`, in order.

    The decoder: tokens [B, T+1] into stage 0, hidden [B, T, H] and labels [B, T] into the others. The audit
    model: one number instead of hidden. A brought model: its inputs into stage 0, then what its cut has.
    """
    if run.brings_model:
        return _brought(run, stage)
    rows, length, vocab = run.batch.microbatch_size, run.data.sequence_length, run.model.vocab_size
    narrow = token_dtype(vocab)
    if stage == 0:
        return (Crossing("tokens", (rows, length + 1), narrow, False, vocab),)
    shape = (1, 1, 1) if run.model.kind == "counting" else (rows, length, run.built_in.hidden)
    labels = Crossing("labels", (rows, length), narrow, False, vocab)
    return (Crossing("hidden", shape, run.dtype, True), labels)


def _brought(run: Run, stage: Stage) -> tuple[Crossing, ...]:
    from swarm.model.brought import Bounds, brought, wire_dtype  # torch, and the model itself

    model = brought(run)
    entering = {taken.name for taken in model.inputs}

    def crossing(value: Value) -> Crossing:
        flags = Bounds(0, 2 if value.dtype == "bool" else 0)
        least, below = model.bounds.get(value.name, flags)
        dtype = wire_dtype(run, value, entering=value.name in entering)
        return Crossing(value.name, value.shape, dtype, value.differentiable, below, least)

    return tuple(map(crossing, model.plans[stage].inputs))


def input_metas(run: Run, stage: Stage, codec: str = "") -> tuple[TensorMeta, ...]:
    """What a stage is sent; `codec`: of what has a gradient, else the manifest's."""
    prescribed = codec or (run.codec.forward_at(stage - 1) if stage else "none")
    return tuple(
        TensorMeta(crossing.shape, crossing.dtype, prescribed if crossing.graded else "none")
        for crossing in crossings(run, stage)
    )


def gradient_metas(run: Run, boundary: int, sent: tuple[TensorMeta, ...]) -> tuple[TensorMeta, ...]:
    """What comes back for what was `sent` over `boundary`: the gradient of each tensor that has one."""
    return tuple(
        TensorMeta(meta.shape, meta.dtype, run.codec.backward_at(boundary, meta.codec))
        for crossing, meta in zip(crossings(run, boundary + 1), sent, strict=True)
        if crossing.graded
    )


def allowed_inputs(run: Run, stage: Stage) -> tuple[tuple[TensorMeta, ...], ...]:
    """All that a stage may be sent: what the manifest has first, then with the codecs of `codec.adaptive`."""
    codecs = run.codec.allowed_at(stage - 1) if stage else ("none",)
    return tuple(dict.fromkeys(input_metas(run, stage, codec) for codec in codecs))


def allowed_gradients(run: Run, boundary: int) -> tuple[tuple[TensorMeta, ...], ...]:
    """All that may come back over `boundary`, each once: one, unless there is `codec.adaptive`."""
    return tuple(
        dict.fromkeys(gradient_metas(run, boundary, sent) for sent in allowed_inputs(run, boundary + 1))
    )


def crossing_bytes(run: Run, boundary: int, codec: str) -> tuple[int, int]:
    """(forward, backward) bytes of what has a gradient, of a microbatch over a boundary, as `codec`."""
    sent = input_metas(run, boundary + 1, codec)
    graded = [meta for meta, what in zip(sent, crossings(run, boundary + 1), strict=True) if what.graded]
    back = gradient_metas(run, boundary, sent)
    return body_bytes(graded), body_bytes(back)


def body_bytes(metas: tuple[TensorMeta, ...] | list[TensorMeta]) -> int:
    """Of tensors on the wire."""
    return sum(sum(encoded_sizes(meta)) for meta in metas)
