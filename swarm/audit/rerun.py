"""Steps of a run computed again from a state, and compared with what peers signed of them.

Devices of one kind find the same bits. For others a referee computes in float64, and what is compared is how
large the gradients were, and at the end where the weights went.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from swarm.audit.answers import digest, split_tensors
from swarm.ids import Microbatch, PeerId, Stage
from swarm.manifest import Run
from swarm.model.reductions import WEIGHTS, vectors_digest, weights_digest
from swarm.model.reference import SingleProcess
from swarm.model.stage import Forward, StageCompute
from swarm.model.stage_io import allowed_inputs
from swarm.protocol.coordinator import realigns
from swarm.protocol.proofs import ALIKE
from swarm.wire.buffers import Buffer
from swarm.wire.receipts import Answered
from swarm.wire.trails import TookStep

NEAR_NORM = 0.02
"""Relative distance of a step's norm. Seen between float32 and the referee: 6e-4 in 30 steps."""
NEAR = {"float32": 0.1, "float64": 0.1, "bfloat16": 0.4}
"""Relative distance of how far the weights of a stage moved, by the dtype that a run computes in. Seen: 6e-3
in 30 steps of float32 with blockwise8; 0.13 in one of bfloat16, since Adam divides small gradients by their
size."""


class Said(NamedTuple):
    """What peers signed of one step at one stage."""

    stage: Stage
    took: TookStep
    by: tuple[PeerId, ...]


def referee_of(run: Run) -> Run:
    """The run as the referee computes it. What a custom model does in another dtype is not known."""
    codec = replace(run.codec, reduce="none") if run.rounds_sums else run.codec
    return run if run.brings_model else replace(run, dtype="float64", codec=codec)


def rerun_step(
    single: SingleProcess, said: Sequence[Said], *, exact: bool, done: Callable[[int], None]
) -> tuple[str, list[Said]]:
    """Do the next step. Returns what differs first, such as `sum`, and what was signed otherwise.

    `exact`: compare bits, on a device of the kind that the peers have. `done`: told of each microbatch.
    """
    for m in range(single.run.microbatches(single.version)):
        single.loss(Microbatch(single.version, m))
        done(1)
    totals, squares = single.totals()
    sums = [vectors_digest([flat], on_device=False) for flat in single.sums] if exact else []
    if wrong := [one for one in said if exact and one.took.sum != sums[one.stage]]:
        return "sum", wrong
    near = ALIKE if exact else NEAR_NORM
    if wrong := [one for one in said if not math.isclose(one.took.total_sqnorm, squares, rel_tol=near)]:
        return "norm", wrong
    # Hosts add a norm in different orders: peers took the step with the one that they said.
    single.take(totals, said[0].took.total_sqnorm if said else squares)
    on_device = not realigns(single.run, single.version)
    return "weights", [
        one
        for one in said
        if exact
        and one.took.weights
        not in ("", weights_digest(single.state_of(one.stage, *WEIGHTS), on_device=on_device))
    ]


def answers_of(
    run: Run,
    version: int,
    states: Sequence[Mapping[str, torch.Tensor]],
    mb: Microbatch,
    body: Sequence[Buffer],
    device: str,
) -> list[Answered]:
    """What the peers of each stage sign of a microbatch if none of them lies, on devices of this kind.

    `states`: of the version that it is computed with; `body`: what stage 0 is sent.
    """
    stages = [StageCompute(run, stage, device) for stage in range(run.S)]
    for stage, state in zip(stages, states, strict=True):
        stage.load_state(version, state)
    split = split_tensors([allowed_inputs(run, 0)[0]], body)
    assert split is not None  # samples of this run
    wires, forwards = split, list[Forward]()
    for stage in stages[:-1]:
        forwards.append(stage.forward(mb, wires[-1]))
        wires.append(forwards[-1].outputs)
    last = stages[-1].loss_gradients(mb, wires[-1], weights=False)
    grads = [list(last.answer)]
    for stage, forward in zip(stages[-2::-1], forwards[::-1], strict=True):
        grads.insert(0, list(stage.gradients(forward, grads[0], weights=False).answer))
    forth, back = [*map(digest, wires), digest([])], [*map(digest, grads), digest([])]
    return [
        Answered(stage, *mb, forth[stage], forth[stage + 1], back[stage + 1], back[stage], last.loss)
        for stage in range(run.S)
    ]


def is_false(said: Answered, true: Answered, *, is_last: bool) -> bool | None:
    """Whether a peer lied in an answer. None: another one did before, and sent it something false."""
    if said.inputs != true.inputs:
        return None
    if said.outputs != true.outputs:
        return True
    if said.output_grads != true.output_grads:
        return None
    return said.input_grads != true.input_grads or (is_last and said.loss != true.loss)


def is_same_state(
    single: SingleProcess,
    stage: Stage,
    start: Mapping[str, torch.Tensor],
    saved: Mapping[str, torch.Tensor],
    near: float | None,
) -> bool:
    """Whether a state that was saved is the one that was computed, to the bit; or `near`: whether its weights
    went since `start` to where the computed ones did, up to that part of the distance.
    """
    mine = {name: vector.cpu() for name, vector in single.state_of(stage).items()}
    if near is None:
        return mine.keys() == saved.keys() and all(torch.equal(mine[n], saved[n]) for n in mine)
    before, after = start["weights"].double(), saved["weights"].double()
    apart = torch.linalg.vector_norm(after - mine["weights"].double()).item()
    return apart <= near * torch.linalg.vector_norm(after - before).item()
