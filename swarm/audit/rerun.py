"""Steps of a run computed again from a state, and compared with what peers signed of them.

Devices of one kind find the same bits. For others a referee computes in float64, and what is compared is how
large the gradients were, and at the end where the weights went.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from swarm.audit.answers import digest
from swarm.ids import Microbatch, PeerId, Stage
from swarm.manifest import Run
from swarm.model.reductions import vectors_digest
from swarm.model.reference import SingleProcess
from swarm.model.stage import StageCompute
from swarm.model.stage_io import input_metas
from swarm.protocol.coordinator import realigns
from swarm.wire.buffers import Buffer
from swarm.wire.codec import split
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
    """Of a run with islands the cell."""
    took: TookStep
    by: tuple[PeerId, ...]


def referee_of(run: Run) -> Run:
    """The run as the referee computes it. What a custom model does in another dtype is not known."""
    codec, optimizer = replace(run.codec, reduce="none"), replace(run.optimizer, moments="float32")
    return run if run.brings_model else replace(run, dtype="float64", codec=codec, optimizer=optimizer)


def rerun_step(
    again: SingleProcess,
    said: Sequence[Said],
    stages: Collection[Stage],
    *,
    exact: bool,
    done: Callable[[int], None],
) -> tuple[list[tuple[str, Said]], bool]:
    """Do the next step. Returns what differs, such as `sum`, and what was signed instead; and whether all
    does that was signed at one of `stages`: nothing after that is computed.

    `exact`: compare bits, on a device of the kind that the peers have. `done`: as `compute` has it.
    """
    found: list[tuple[str, Said]] = []

    def ends(what: str, wrong: Iterable[Said]) -> bool:
        found.extend((what, one) for one in wrong)
        false = [one for _, one in found]
        true = {one.stage for one in said if one not in false}
        return any(one.stage in stages and one.stage not in true for one in false)

    of_all = range(again.run.cells)
    squares = again.compute(done)
    sums = [vectors_digest([again.sum_of(s)], on_device=False) for s in of_all if exact]
    what = "sum" if squares else "change"
    if ends(what, (one for one in said if exact and one.took.sum != sums[one.stage])):
        return found, True
    near, S = 0.0 if exact else NEAR_NORM, again.run.S
    norms = [(one, one.took.total_sqnorm, one.stage // S) for one in said if squares]
    true = [one for one in norms if math.isclose(one[1], squares[one[2]], rel_tol=near)]
    if ends("norm", (one[0] for one in norms if one not in true)):
        return found, True
    # Hosts add a norm in different orders: peers took the step with the one that they, or most, said.
    for _, norm, number in sorted(true, key=lambda one: (one[0].stage in stages, len(one[0].by))):
        squares[number] = norm
    again.take(squares)
    whole = realigns(again.run, again.version)
    weights = [again.digest(stage, whole=whole) for stage in of_all if exact]
    return found, ends("weights", (s for s in said if exact and s.took.weights not in ("", weights[s.stage])))


def answers_of(
    run: Run,
    version: int,
    state: Callable[[Stage], Mapping[str, torch.Tensor]],
    mb: Microbatch,
    body: Sequence[Buffer],
    device: str,
) -> list[Answered]:
    """What the peers of each stage sign of a microbatch if none of them lies, on devices of this kind.

    `state`: of the version that it is computed with; `body`: what stage 0 is sent. One stage at a time is in
    memory.
    """

    def load(number: Stage) -> StageCompute:
        stage = StageCompute(run, number, device)
        stage.load_state(version, state(number))
        return stage

    wires = [split(input_metas(run, 0), body)]
    for number in range(run.S - 1):
        wires.append(load(number).forward(mb, wires[-1], grad=False).outputs)
    last = load(run.S - 1).loss_gradients(mb, wires[-1], weights=False)
    grads = [list(last.answer)]
    for number in reversed(range(run.S - 1)):
        stage = load(number)
        forward = stage.forward(mb, wires[number], grad=False)
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
    if said.is_half:
        return False
    if said.output_grads != true.output_grads:
        return None
    return said.input_grads != true.input_grads or (is_last and said.loss != true.loss)


def is_same_state(
    computed: Mapping[str, torch.Tensor],
    start: Mapping[str, torch.Tensor],
    saved: Mapping[str, torch.Tensor],
    near: float | None,
) -> bool:
    """Whether a state that was saved is the `computed` one, to the bit; or `near`: whether its weights
    went since `start` to where the computed ones did, up to that part of the distance.
    """
    mine = {name: vector.cpu() for name, vector in computed.items()}
    if near is None:
        return mine.keys() == saved.keys() and all(torch.equal(mine[n], saved[n]) for n in mine)
    before, after = start["weights"].double(), saved["weights"].double()
    apart = torch.linalg.vector_norm(after - mine["weights"].double()).item()
    return apart <= near * torch.linalg.vector_norm(after - before).item()
