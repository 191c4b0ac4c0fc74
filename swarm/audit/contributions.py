"""Whether a replica contributed what its microbatches add up to: all of them are computed again, and added.
What it sent on is compared, too: that no sum of its own shows.

Devices of one kind give the same sum, to the last bit; of others the relative distance of a chunk is
compared, as of answers (`swarm.audit.answers`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt
import torch

from swarm.audit.answers import FAR, NOISE, UNSURE, Made, is_false, norm
from swarm.audit.projection import LARGEST, MODULUS, product
from swarm.ids import Microbatch
from swarm.model.fixed_point import SCALE
from swarm.model.stage import StageCompute
from swarm.wire.codec import Encoded


class Recount:
    """A replica's sum of step `t`, made again. Its methods are jobs of the device.

    Args:
        compute: a snapshot with the weights of the step, `StageCompute.snapshot`.
        chunk: (first element, elements): what is compared.
    """

    def __init__(self, compute: StageCompute, t: int, chunk: tuple[int, int]) -> None:
        self._compute, self._t = compute, t
        self._chunk = slice(chunk[0], chunk[0] + chunk[1])
        self._terms_norm = self._moved_norm = 0.0
        """Of what was added to the chunk, and of what another rounding would change of that."""

    def add(
        self, m: int, inputs: Sequence[Encoded], output_grads: Sequence[Encoded],
        lock: AbstractContextManager[object],
    ) -> list[Encoded]:  # fmt: skip
        """Compute a microbatch and add it; what its stage sends on. `lock`: held while the sum changes, where
        several compute. Raises as `StageCompute.forward`, `gradients` and `add`.
        """
        compute, mb = self._compute, Microbatch(self._t, m)
        if compute.stage == compute.run.S - 1:
            outputs, found = list[Encoded](), compute.loss_gradients(mb, inputs, weights=True)
        else:
            fwd = compute.forward(mb, inputs)
            outputs, found = fwd.outputs, compute.gradients(fwd, output_grads, weights=True)
        moves = compute.nudged().gradients_of(mb, inputs, output_grads)
        moves.terms = {name: term - found.terms[name] for name, term in moves.terms.items()}
        with lock:
            before = self._part().clone()
            compute.add(found)
            after = self._part().clone()
            self._terms_norm += norm(after - before)
            compute.add(moves)
            self._moved_norm += norm(self._part() - after)
            moves.terms = {name: -term for name, term in moves.terms.items()}
            compute.add(moves)
        return outputs

    def sent_other(
        self, m: int, outputs: Sequence[Encoded], sent: Sequence[Encoded], inputs: Sequence[Encoded]
    ) -> bool:
        """Whether what a replica sent on is false: `outputs` are what `add` found. Raises as `is_false`."""
        given, far = (Microbatch(self._t, m), inputs, None), FAR[self._compute.run.dtype]
        return is_false(self._compute, given, Made(outputs, []), Made(sent, []), far)

    def total(self) -> torch.Tensor:
        """The sum: int64, 1-D, in host memory."""
        return self._compute.sums.of(self._t).cpu()

    def is_far(self, contributed: torch.Tensor) -> bool:
        """Whether the chunk that a replica contributed (int64, 1-D, host) is another than this one's.

        Where microbatches cancel each other, their own rounding may be all that is left: not that.
        """
        ours = self._part().cpu()
        if contributed.shape != ours.shape:
            return True
        least = max(norm(ours), norm(contributed), NOISE * self._terms_norm)
        return norm(ours.double() - contributed.double()) > self._far(least)

    def is_off(self, projected: int, r: npt.NDArray[np.int16]) -> bool:
        """The same of what a replica signed of that chunk: its product with the coefficients `r`.

        The product of a difference is as long as that, times a normal number: a flipped sign is missed once
        in a hundred times.
        """
        ours = self._part().cpu()
        apart = (projected - product(ours, r) + MODULUS // 2) % MODULUS - MODULUS // 2
        least = max(norm(ours), NOISE * self._terms_norm)
        return abs(apart) > self._far(least) * LARGEST / math.sqrt(3)

    def is_result(self, reduced: torch.Tensor) -> bool:
        """Whether a step was taken with this sum: `reduced` is the result, 1-D, in host memory. Where that
        chunk is all of it.
        """
        ours = self._compute.sums.value(self._part()).cpu()
        least = max(norm(ours), norm(reduced), NOISE * self._terms_norm / SCALE)
        return norm(ours.double() - reduced.double()) <= self._far(SCALE * least) / SCALE

    def _far(self, least: float) -> float:
        return FAR[self._compute.run.dtype] * least + UNSURE * self._moved_norm

    def _part(self) -> torch.Tensor:
        return self._compute.sums.of(self._t)[self._chunk]
