"""What enters each stage, as metas: known from the manifest alone (and, of a custom model, its graph).

So nothing unexpected is ever received. Without torch, unless the model is a custom one: trainers read this.
"""

from __future__ import annotations

from typing import NamedTuple

from swarm.data import token_dtype
from swarm.ids import Stage
from swarm.manifest import Run
from swarm.model.custom import custom_inputs
from swarm.wire.tensor_meta import TensorMeta, buffer_sizes


class StageInput(NamedTuple):
    """A tensor that a stage is sent, and what its numbers may be."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """On the wire, before its codec."""
    graded: bool
    """A gradient comes back for it; what has none travels as it is."""
    below: int = 0
    """Whole numbers: each is less than this; 0: no bound is known."""
    least: int = 0
    """Whole numbers with `below`: none is less than this."""


def stage_inputs(run: Run, stage: Stage) -> tuple[StageInput, ...]:
    """What enters `stage`, in order.

    The decoder: tokens [B, T+1], into all stages but the first after hidden [B, T, H], or what a bottleneck
    leaves of it. The audit model: one number instead of hidden. A custom model: its inputs into stage 0, then
    what its cut has.
    """
    if run.brings_model:
        return custom_inputs(run, stage)
    rows, length, vocab = run.batch.microbatch_size, run.data.sequence_length, run.model.vocab_size
    tokens = StageInput("tokens", (rows, length + 1), token_dtype(vocab), False, vocab)
    if stage == 0:
        return (tokens,)
    model = run.built_in
    shape = (1, 1, 1) if model.kind == "counting" else (rows, length, model.bottleneck or model.hidden)
    return (StageInput("hidden", shape, run.dtype, True), tokens)


def input_metas(run: Run, stage: Stage, codec: str = "") -> tuple[TensorMeta, ...]:
    """The metas of what a stage is sent; `codec`: for values with a gradient, else the manifest's."""
    prescribed = codec or (run.codec.forward_at(stage - 1) if stage else "none")
    return tuple(
        TensorMeta(stage_input.shape, stage_input.dtype, prescribed if stage_input.graded else "none")
        for stage_input in stage_inputs(run, stage)
    )


def gradient_metas(run: Run, boundary: int, codec: str = "") -> tuple[TensorMeta, ...]:
    """Metas of the answer to what goes over `boundary`: its gradients. `codec`: as of `input_metas`."""
    sent = input_metas(run, boundary + 1, codec)
    return tuple(
        TensorMeta(meta.shape, meta.dtype, run.codec.backward_at(boundary, meta.codec))
        for stage_input, meta in zip(stage_inputs(run, boundary + 1), sent, strict=True)
        if stage_input.graded
    )


def boundary_bytes(run: Run, boundary: int, codec: str) -> tuple[int, int]:
    """(forward, backward) bytes of a microbatch's values with a gradient over a boundary, with `codec`."""
    sent = input_metas(run, boundary + 1, codec)
    graded = [meta for meta, what in zip(sent, stage_inputs(run, boundary + 1), strict=True) if what.graded]
    return body_bytes(graded), body_bytes(gradient_metas(run, boundary, codec))


def body_bytes(metas: tuple[TensorMeta, ...] | list[TensorMeta]) -> int:
    return sum(buffer_sizes(metas))
