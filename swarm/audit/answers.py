"""Whether an answer is what its stage computes: the microbatch is computed again, and not added.

Devices of one kind give the same bytes; others differ by their rounding. Of what differs, the relative
distance of each tensor is compared: that of honest devices of all kinds is far below `FAR`, a flipped sign is
at 2, a zero at 1. Top-k codecs are not audited: another rounding can choose other places.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from swarm.audit import is_audited
from swarm.ids import Microbatch
from swarm.model.stage import StageCompute
from swarm.protocol.statements import Signer
from swarm.wire.buffers import Buffer
from swarm.wire.codec import Encoded, decode, split
from swarm.wire.evidence import WrongAnswer
from swarm.wire.receipts import Answered, tensors_digest
from swarm.wire.tensor_meta import TensorMeta, buffer_sizes

FAR = {"float32": 0.02, "float64": 0.02, "bfloat16": 0.2}
"""Relative distance, by the dtype that a run computes in. Seen between honest devices: 4e-7 in float32, 2e-4
with blockwise8."""

NOISE = 1e-3
"""What is smaller than that part of what it was made of may be nothing but its rounding."""

UNSURE = 3.0
"""Devices of two kinds may be apart by so many times what a result moves if all that comes in is rounded
otherwise. Where a difference of nearly equal numbers is divided by its own size, as layer norms do, inputs
can be chosen so that honest devices are 0.13 apart in float32; then it moves by 0.25."""


class Made(NamedTuple):
    """What a stage makes of a microbatch."""

    outputs: list[Encoded]
    """Nothing at the last stage."""
    input_grads: list[Encoded]
    """Nothing at stage 0."""
    loss: float | None = None
    """At the last stage."""

    def is_of(self, said: Answered) -> bool:
        """Whether these are the bytes that a peer signed."""
        if said.is_half:
            return digest(self.outputs) == said.outputs
        same = (digest(self.outputs), digest(self.input_grads)) == (said.outputs, said.input_grads)
        return same and self.loss in (None, said.loss)


def make(
    compute: StageCompute, mb: Microbatch, inputs: Sequence[Encoded], output_grads: Sequence[Encoded] | None
) -> Made:
    """Compute a microbatch, without gradients only what is sent on; no sum changes. In a job of the device.

    Raises:
        As `StageCompute.forward`.
    """
    if output_grads is None:
        return Made(compute.forward(mb, inputs, grad=False).outputs, [])
    if compute.stage == compute.run.S - 1:
        found = compute.loss_gradients(mb, inputs, weights=False)
        return Made([], list(found.answer), found.loss)
    fwd = compute.forward(mb, inputs)
    return Made(fwd.outputs, list(compute.gradients(fwd, output_grads, weights=False).answer))


def is_far(
    made: Sequence[Encoded], said: Sequence[Encoded], of: Sequence[Encoded], far: float,
    passes: Collection[int] = (),
) -> bool:  # fmt: skip
    """Whether tensors that a peer signed are `far` from those that were computed again, `of` given ones.

    A tensor that is nothing but rounding errors of what was given is not: it is compared with that. Those at
    the places `passes` are inputs, unchanged: no device gives other bytes.
    """
    if [one.meta for one in made] != [one.meta for one in said]:
        return True
    if any(digest([made[place]]) != digest([said[place]]) for place in passes):
        return True
    return distance(made, said, of) > far


def distance(made: Sequence[Encoded], said: Sequence[Encoded], of: Sequence[Encoded]) -> float:
    """The largest relative distance of two tensors that were made `of` given ones."""
    least = NOISE * max((_size(_values(one)) for one in of), default=0.0)
    return max((_distance(a, b, least) for a, b in zip(made, said, strict=True)), default=0.0)


def _distance(one: Encoded, other: Encoded, least: float) -> float:
    a, b = _values(one), _values(other)
    apart = torch.where(a == b, 0.0, a - b)  # equal infinities
    return norm(apart) / max(_size(a), _size(b), least, 1e-30)


def _size(values: torch.Tensor) -> float:
    """The norm of the finite ones: a mask may be infinite, and no other number is small beside that."""
    return norm(torch.where(values.isinf(), 0.0, values))


def _values(one: Encoded) -> torch.Tensor:
    """As float64; nothing of whole numbers."""
    found = decode(one.meta, one.buffers, name="a tensor of an answer", infinite=True)
    return found.to(torch.float64) if found.is_floating_point() else torch.zeros(1, dtype=torch.float64)


def norm(values: torch.Tensor) -> float:
    """The 2-norm, in float64."""
    return torch.linalg.vector_norm(values.double()).item()


def proves_answer(
    compute: StageCompute, signer: Signer, evidence: WrongAnswer, body: Sequence[Buffer], *,
    share: float = 1.0,
) -> bool:  # fmt: skip
    """Whether the accused's answer is wrong. In a job of the device, which must have the step's weights.

    `share`: of the distance from which on it is.

    Raises:
        As `StageCompute.forward`.
    """
    said, run = evidence.statement, compute.run
    if not is_audited(run) or said.stage != compute.stage or not evidence.is_signed(signer, run.id):
        return False
    split = split_tensors(evidence.tensors, body)
    if split is None:
        return False
    inputs, output_grads, outputs, input_grads = split
    signed = (said.inputs, said.output_grads, said.outputs, said.input_grads)
    nothing = b"" if said.is_half else digest([])
    if tuple(digest(tensors) if tensors else nothing for tensors in split) != signed:
        return False
    given = Microbatch(said.t, said.m), inputs, None if said.is_half else output_grads
    made, far = make(compute, *given), share * FAR[run.dtype]

    def is_wrong(far: float) -> bool:
        if made.loss is not None and abs(made.loss - said.loss) > far * max(1.0, abs(made.loss)):
            return True
        forth = is_far(made.outputs, outputs, inputs, far, compute.passes)
        return forth or is_far(made.input_grads, input_grads, output_grads, far)

    if not is_wrong(far):
        return False
    nudged = make(compute.nudged(), *given)
    moved = distance(made.outputs, nudged.outputs, inputs)
    moved = max(moved, distance(made.input_grads, nudged.input_grads, output_grads))
    if made.loss is not None and nudged.loss is not None:
        moved = max(moved, abs(made.loss - nudged.loss) / max(1.0, abs(made.loss)))
    return is_wrong(far + UNSURE * moved)


def split_tensors(
    metas: Sequence[Sequence[TensorMeta]], body: Sequence[Buffer]
) -> list[list[Encoded]] | None:
    """The buffers of a body by their tensors; None if there are not as many, or not as long."""
    all_of_them = [meta for group in metas for meta in group]
    if [memoryview(buffer).nbytes for buffer in body] != buffer_sizes(all_of_them):
        return None
    tensors = iter(split(all_of_them, body))
    return [list(itertools.islice(tensors, len(group))) for group in metas]


def digest(tensors: Sequence[Encoded]) -> bytes:
    """The name of tensors in a receipt."""
    return tensors_digest([one.meta for one in tensors], [b for one in tensors for b in one.buffers])
