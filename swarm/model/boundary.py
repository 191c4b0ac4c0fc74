"""What enters and leaves a stage: bytes of other peers, checked (I7), to tensors on the device, and back."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import torch

from swarm.errors import Refused
from swarm.ids import Microbatch, Stage
from swarm.manifest import Run
from swarm.model.same_bits import aligned
from swarm.model.stage_function import StageFunction
from swarm.model.stage_io import StageInput
from swarm.wire.codec import Encoded, decode, places_of, start_encode, to_device
from swarm.wire.tensor_meta import TensorMeta


class Entered(NamedTuple):
    """The inputs of a microbatch as a stage computes with them, one by one."""

    values: list[torch.Tensor | None]
    """On the device; None where nothing here reads it."""
    passing: list[torch.Tensor]
    """On the host, the values without a gradient: for a stage that only passes them on."""


class Computed(NamedTuple):
    """One microbatch through one stage, as autograd knows it."""

    leaves: list[torch.Tensor]
    """The inputs that have a gradient, as they came."""
    outputs: list[torch.Tensor]
    """Those that have a gradient, in the dtypes of the boundary; of the last stage the loss."""
    others: dict[int, torch.Tensor]
    """Output -> the tensor, of what was computed here and has no gradient."""
    statistics: dict[str, torch.Tensor]
    """Buffer of a batch norm -> this microbatch's statistic for it."""


class Boundary:
    """Both sides of a stage, as `StageFunction` names them: what comes is decoded, what goes is encoded."""

    def __init__(self, run: Run, stage: Stage, function: StageFunction, device: torch.device) -> None:
        self._run, self._stage, self._function, self._device = run, stage, function, device
        self.answers = any(what.graded for what in function.takes)
        """Whether the stage before expects gradients."""
        self._nudges: tuple[float, int] | None = None

    def nudged(self, above: float, seed: int) -> Boundary:
        """One by which all numbers that have a gradient, and gradients, come in as rounded otherwise; or, if
        `above` is not 0, all that are larger, with a gradient or without, as others that are smaller.
        """
        other = copy(self)
        other._nudges = above, seed
        return other

    def enter(self, inputs: Sequence[Encoded]) -> Entered:
        """The inputs as the stage function takes them.

        Raises:
            Refused: they are not what the run prescribes. Values that only pass are checked too: a wrong one
                should be refused where it enters.
        """
        takes = self._function.takes
        if len(inputs) != len(takes):
            raise Refused(f"{len(inputs)} tensors for stage {self._stage}; expected {len(takes)}")
        return self._placed([self._decode(what, came) for what, came in zip(takes, inputs, strict=True)])

    def made_up(self, *, zeros: bool) -> Entered:
        """A microbatch of zeros, or of numbers that are the same everywhere."""
        generator = torch.Generator().manual_seed(1)
        taken: list[torch.Tensor] = []
        for what in self._function.takes:
            dtype = dtype_of(what)
            if what.below and not zeros:
                made = torch.randint(what.least, what.below, what.shape, generator=generator)
            elif dtype.is_floating_point and not zeros:  # exact in every dtype, and spread like hidden states
                made = torch.randint(-128, 128, what.shape, generator=generator) / 64
            else:
                made = torch.zeros(what.shape)
            taken.append(made.to(self._device if what.graded else "cpu", dtype))
        return self._placed(taken)

    def encode_outputs(self, mb: Microbatch, entered: Entered, computed: Computed) -> list[Encoded]:
        """The inputs of the next stage. Raises Refused: an output is not finite; a mask may be infinite."""
        name = f"the output of stage {self._stage} for {mb}"
        codec, function = self._run.codec.forward_at(self._stage), self._function
        graded = iter(computed.outputs)
        pending = []
        for number, what in enumerate(function.gives):
            if what.graded:
                pending.append(start_encode(next(graded), codec, name=name))
                continue
            passes = number in function.passes
            other = entered.passing[function.passes[number]] if passes else computed.others[number]
            pending.append(start_encode(other.to(dtype_of(what)), "none", name=name, infinite=True))
        return [finish() for finish in pending]

    def decode_gradients(self, gradients: Sequence[Encoded]) -> list[torch.Tensor]:
        """The gradients of the outputs that have one, from the next stage.

        Raises:
            Refused: they are not what the run prescribes.
        """
        codec = self._run.codec
        due = [what for what in self._function.gives if what.graded]
        if len(gradients) != len(due):
            raise Refused(f"{len(gradients)} gradients for stage {self._stage}; expected {len(due)}")
        answers = codec.backward_at(self._stage, codec.forward_at(self._stage))
        pairs = zip(due, gradients, strict=True)
        return [self._tensor(what, came, answers, "the gradient") for what, came in pairs]

    def encode_gradients(
        self, mb: Microbatch, leaves: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None],
        inputs: Sequence[Encoded],
    ) -> tuple[Encoded, ...]:  # fmt: skip
        """The gradients of the inputs that have one, `inputs` being all that came, for the stage before.

        Raises:
            Refused: one is not finite.
        """
        name = f"the gradient of stage {self._stage} for {mb}"
        graded = [came for what, came in zip(self._function.takes, inputs, strict=True) if what.graded]
        pending = [
            start_encode(
                torch.zeros_like(leaf) if gradient is None else gradient,
                self._run.codec.backward_at(self._stage - 1, came.meta.codec),
                name=name,
                places=places_of(came),
            )
            for leaf, gradient, came in zip(leaves, gradients, graded, strict=True)
        ]
        return tuple(finish() for finish in pending)

    def _decode(self, what: StageInput, came: Encoded) -> torch.Tensor:
        """On the device, if it has a gradient, else on the host."""
        codec = self._run.codec.forward_at(self._stage - 1) if what.graded else "none"
        tensor = self._tensor(what, came, codec, what.name)
        if what.below and tensor.numel():
            low, high = (int(end) for end in tensor.to(torch.int64).aminmax())
            if high >= what.below:
                raise Refused(f"{what.name} hold {high}; the vocabulary has {what.below}")
            if low < what.least:
                raise Refused(f"{what.name} hold {low}; they are {what.least} or more")
        return tensor

    def _tensor(self, what: StageInput, came: Encoded, codec: str, name: str) -> torch.Tensor:
        expected = TensorMeta(tuple(what.shape), what.dtype, codec)
        device = self._device if what.graded else "cpu"
        mask = self._stage > 0 and not what.graded  # perhaps
        tensor = aligned(decode(*came, device=device, expected=expected, name=name, infinite=mask))
        nudges = self._nudges if tensor.is_floating_point() else None
        return self._nudge(tensor, *nudges) if nudges and (what.graded or nudges[0]) else tensor

    def _nudge(self, tensor: torch.Tensor, above: float, seed: int) -> torch.Tensor:
        """Each number two units of its last place more or less, by chance, but the same everywhere; or, if it
        is larger than `above`, which is not 0, from a quarter to three quarters of it.
        """
        dice = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed)).to(tensor)
        if above:
            return torch.where(tensor.abs() > above, tensor * (0.25 + dice / 2), tensor)
        unit = max(torch.finfo(dtype).eps for dtype in (tensor.dtype, getattr(torch, self._run.dtype)))
        return tensor * (1 + 2 * unit * (2 * dice.round() - 1))

    def _placed(self, taken: list[torch.Tensor]) -> Entered:
        function, device = self._function, self._device
        values = [
            None if dtype is None else value if what.graded else to_device(value.to(dtype), device)
            for what, dtype, value in zip(function.takes, function.dtypes, taken, strict=True)
        ]
        return Entered(values, taken)


def dtype_of(what: StageInput) -> torch.dtype:
    """The dtype of a tensor on the wire, before its codec."""
    return getattr(torch, what.dtype)
