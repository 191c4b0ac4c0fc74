"""Whether an answer is what its stage computes: the microbatch is computed again, and not added.

Devices of one kind give the same bytes; others differ by their rounding. Of what differs, the relative
distance of each tensor is compared: that of honest devices of all kinds is far below `FAR`, a flipped sign is
at 2, a zero at 1. Top-k codecs are not audited: another rounding can choose other places.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from swarm.audit import is_audited
from swarm.errors import Refused
from swarm.ids import Microbatch
from swarm.model.stage import StageCompute
from swarm.protocol.statements import Signer
from swarm.wire.buffers import Buffer
from swarm.wire.codec import Encoded, decode, split
from swarm.wire.evidence import WrongAnswer
from swarm.wire.receipts import Answered, tensors_digest
from swarm.wire.tensor_meta import TensorMeta, buffer_sizes

FAR = {"float32": 0.02, "float64": 0.02, "bfloat16": 0.2}
"""Relative distance, by dtype of the run. Seen between honest devices: float32 4e-7, blockwise8 2e-4."""

NOISE = 1e-3
"""What is smaller than that part of what it was made of may be nothing but its rounding."""

LARGE = 1 / NOISE
"""Larger numbers that come in, such as a mask of -1e9, count only where they change what is made."""

UNSURE = 3.0
"""Devices of two kinds may be apart by so many times what a result moves if all that comes in is rounded
otherwise. Where a difference of nearly equal numbers is divided by its own size, as layer norms do, inputs
can be chosen so that honest devices are 0.13 apart in float32; then it moves by 0.25."""


class Made(NamedTuple):
    """What a stage makes of a microbatch."""

    outputs: Sequence[Encoded]
    """Nothing at the last stage."""
    input_grads: Sequence[Encoded]
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
    Raises as `StageCompute.forward`.
    """
    if output_grads is None:
        return Made(compute.forward(mb, inputs, grad=False).outputs, [])
    if compute.stage == compute.run.S - 1:
        found = compute.loss_gradients(mb, inputs, weights=False)
        return Made([], found.answer, found.loss)
    fwd = compute.forward(mb, inputs)
    return Made(fwd.outputs, compute.gradients(fwd, output_grads, weights=False).answer)


def is_false(
    compute: StageCompute, given: tuple[Microbatch, Sequence[Encoded], Sequence[Encoded] | None],
    made: Made, said: Made, far: float,
) -> bool:  # fmt: skip
    """Whether what a peer signed is `far` from what was `made` of what was `given`, which is as `make` takes
    it, and further than another rounding may bring it. Raises as `make`.
    """

    def unrounded(answer: Made) -> object:
        metas = [[one.meta for one in part] for part in (answer.outputs, answer.input_grads)]
        return metas, [digest([one]) for place, one in enumerate(answer.outputs) if place in compute.passes]

    if unrounded(made) != unrounded(said):
        return True
    (mb, inputs, back), others = given, list[list[Encoded]]()
    if made.outputs and any((_values(one).abs() > LARGE).any() for one in inputs):
        with suppress(Refused, IndexError):  # where they make it impossible, they have a part in all
            others = [compute.nudged(LARGE, n).forward(mb, inputs, grad=False).outputs for n in range(4)]

    def apart(one: Made) -> float:
        forth = distance(made.outputs, one.outputs, inputs, others)
        found = max(forth, distance(made.input_grads, one.input_grads, back or ()))
        if made.loss is None or one.loss is None:
            return found
        return max(found, abs(made.loss - one.loss) / max(1.0, abs(made.loss)))

    off = apart(said)
    return off > far and off > far + UNSURE * apart(make(compute.nudged(), *given))


def distance(
    made: Sequence[Encoded], said: Sequence[Encoded], of: Sequence[Encoded],
    others: Sequence[Sequence[Encoded]] = (),
) -> float:  # fmt: skip
    """The largest relative distance of two tensors, of the same form, that were made `of` given ones.

    A tensor that is nothing but rounding errors of those is not far: it is compared with them. `others`: what
    is made, each time, if the LARGE numbers that were given are others. If most of a tensor is the same then,
    that has no rounding of theirs in it; less, or once, may be so by chance.
    """
    given, ours, theirs = ([_values(one) for one in tensors] for tensors in (of, made, said))
    least = NOISE * max(map(_size, given), default=0.0)
    apart = [_distance(a, b, least) for a, b in zip(ours, theirs, strict=True)]
    least = NOISE * max((norm(one[one.abs() <= LARGE]) for one in given), default=0.0)
    for place, (a, b) in enumerate(zip(ours, theirs, strict=True) if others else ()):
        changed = [_values(one[place]) for one in others]
        same = (torch.stack(changed) == a).all(0)
        if 2 * same.sum() > max(64, same.numel()) and _size(a[same]) > 0.7 * max(map(_size, (a, *changed))):
            apart.append(_distance(a, torch.where(same, b, a), least))
    return max(apart, default=0.0)


def _distance(a: torch.Tensor, b: torch.Tensor, least: float) -> float:
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

    `share`: of the distance from which on it is. Raises as `StageCompute.forward`.
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
    answer = Made(outputs, input_grads, said.loss)
    return is_false(compute, given, make(compute, *given), answer, share * FAR[run.dtype])


def split_tensors(
    metas: Sequence[Sequence[TensorMeta]], body: Sequence[Buffer]
) -> list[list[Encoded]] | None:
    """The buffers of a body by their tensors; None if there are not as many, or not as long."""
    all_of_them = [meta for group in metas for meta in group]
    if [memoryview(buffer).nbytes for buffer in body] != buffer_sizes(all_of_them):
        return None
    tensors = iter(split(all_of_them, body))
    return [[next(tensors) for _ in group] for group in metas]


def digest(tensors: Sequence[Encoded]) -> bytes:
    """The name of tensors in a receipt."""
    return tensors_digest([one.meta for one in tensors], [b for one in tensors for b in one.buffers])
