"""A stage that is played: real sizes of all that it sends, and nothing computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from swarm.ids import Microbatch
from swarm.model.gradient_sum import Gradients
from swarm.model.stage import Forward, StageCompute
from swarm.wire.codec import Encoded


class Unhurried(StageCompute):
    """Computes one microbatch, and gives what came of it for all others: real sizes, in no time."""

    _outputs: list[Encoded] | None = None
    _one: Gradients | None = None

    def forward(self, mb: Microbatch, inputs: Sequence[Encoded], *, grad: bool = True) -> Forward:
        if self._outputs is None:
            self._outputs = super().forward(mb, inputs, grad=False).outputs
        return Forward(mb, self.state.loads, inputs, self._outputs)

    def gradients(self, fwd: Forward, grads_out: Sequence[Encoded], *, weights: bool) -> Gradients:
        if self._one is None:
            forward = super().forward(fwd.mb, fwd.inputs)
            self._one = super().gradients(forward, grads_out, weights=True)
        return self._found(fwd.mb, weights)

    def loss_gradients(self, mb: Microbatch, inputs: Sequence[Encoded], *, weights: bool) -> Gradients:
        if self._one is None:
            self._one = super().loss_gradients(mb, inputs, weights=True)
        return self._found(mb, weights)

    def add(self, found: Gradients) -> None:
        """Add the same numbers at other places for each microbatch: a sum of different ones takes 5.4 bytes a
        weight on the lines, as that of real gradients does (5.5), and a sum of equal ones 5.8."""
        terms = {
            name: term.reshape(-1).roll(found.mb.m).reshape(term.shape) for name, term in found.terms.items()
        }
        super().add(replace(found, terms=terms))

    def _found(self, mb: Microbatch, weights: bool) -> Gradients:
        assert self._one is not None
        terms = self._one.terms if weights else {}
        return replace(self._one, mb=mb, loads=self.state.loads, terms=terms, terms_wanted=weights)
