"""`SingleProcess` for a model that does not fit into one machine: one stage at a time is in memory.

Of a step all microbatches pass stage 0, then all pass stage 1, and so to the last and back; each stage
computes its forward again in its backward. What passes boundaries, the sums of the stages, and the states of
those that are not being computed lie elsewhere, such as in a folder. The results are those of
`SingleProcess`, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import torch

from swarm.ids import Microbatch, Stage
from swarm.manifest import Run
from swarm.model.layout import empty_state, stage_layout
from swarm.model.reductions import WEIGHTS, weights_digest
from swarm.model.reference import Passed, SingleProcess, add_up
from swarm.model.same_bits import aligned, use_threads_of

Scratch: TypeAlias = MutableMapping[str, dict[str, torch.Tensor]]
"""Tensors that are not needed now. What is read is not written to."""

_SUM = "sum"
_FOR_GRADIENTS = ("weights", "weights_previous", "statistics", "dropped_bits")
"""Of a stage's state, what its forward and backward take."""


class ByStage:
    """All stages of a run in turn."""

    def __init__(
        self,
        run: Run,
        batch: Callable[[list[int]], Any],
        device: str,
        version: int,
        state: Callable[[Stage], Mapping[str, torch.Tensor]],
        scratch: Scratch,
    ) -> None:
        """`batch`: as `SingleProcess` has it; `state`: of each stage at that version, asked for once.

        Raises:
            SetupError: as `SingleProcess`.
        """
        self.run, self.version, self.device, self._batch, self._scratch = run, version, device, batch, scratch
        for stage in range(run.S):
            empty, given = empty_state(run, stage), state(stage)
            scratch[f"state {stage}"] = {name: given[name].to(one.dtype) for name, one in empty.items()}
        self._layouts = [stage_layout(run, stage) for stage in range(run.S)]
        self._shared: dict[str, torch.Tensor] = {}

    def compute(self, done: Callable[[int], None]) -> float:
        """The microbatches of the next step. Returns the sum of the gradients' squares, as
        `SingleProcess.totals`. `done`: told of each microbatch that has passed a stage both ways.
        """
        stages, all_m = range(self.run.S), range(self.run.microbatches(self.version))
        for stage in stages[:-1]:
            self._forward(stage, all_m)
        for stage in reversed(stages):
            self._backward(stage, all_m, done)
        self._shared, squares = add_up(self._layouts, self.sum_of)
        return squares

    def sum_of(self, stage: Stage) -> torch.Tensor:
        """What a stage alone found in the step that was computed: flat, not divided by M."""
        return self._scratch[f"{_SUM} {stage}"][_SUM]

    @torch.no_grad()
    def take(self, squares: float) -> None:
        """Take the step that was computed."""
        for stage, layout in enumerate(self._layouts):
            single = self._load(stage)
            totals = {**layout.terms_of(self.sum_of(stage)), **self._shared}
            here = {name: totals[name].to(self.device) for name in layout.terms}
            single.take(here, squares)
            self._scratch[f"state {stage}"] = {name: v.cpu() for name, v in single.state_of(stage).items()}
        self.version += 1

    def state_of(self, stage: Stage) -> dict[str, torch.Tensor]:
        """The newest state of a stage, as `StageState.copy` has it."""
        return self._scratch[f"state {stage}"]

    def weights_digest(self, stage: Stage, *, on_device: bool) -> str:
        """What replicas say of the weights of that; `on_device`: as they compute it on a GPU."""
        state = self.state_of(stage)
        weights = {name: state[name].to(self.device) for name in WEIGHTS if name in state}
        return weights_digest(weights, on_device=on_device)

    def _load(self, stage: Stage, *vectors: str) -> SingleProcess:
        """A stage with these vectors of its state; none: with all."""
        single = SingleProcess(self.run, self._batch, self.device, only=stage)
        state = self.state_of(stage)
        single.load(self.version, [{name: state[name] for name in state if not vectors or name in vectors}])
        return single

    def _forward(self, stage: Stage, all_m: Sequence[int]) -> None:
        single = self._load(stage, *_FOR_GRADIENTS)
        for m in all_m:
            passed = self._pass(single, stage, m, grad=False)
            self._put(f"inputs {stage + 1} {m}", passed.arriving)
            self._put(f"places {stage + 1} {m}", passed.places)

    def _backward(self, stage: Stage, all_m: Sequence[int], done: Callable[[int], None]) -> None:
        single = self._load(stage, *_FOR_GRADIENTS)
        for m in all_m:
            passed = self._pass(single, stage, m, grad=True)
            if stage == self.run.S - 1:
                gradients = [torch.ones_like(passed.outputs[0])]
            else:
                gradients = self._get(f"gradients {stage} {m}", len(passed.outputs))
            places = self._get(f"places {stage} {m}", len(passed.leaves)) if stage else []
            mb = Microbatch(self.version, m)
            back = single.stages[stage].backward(passed, gradients, places, mb)
            for used in (f"gradients {stage} {m}", f"places {stage} {m}", f"inputs {stage} {m}"):
                self._scratch.pop(used, None)
            if stage:
                self._put(f"gradients {stage - 1} {m}", back)
            done(1)
        self._scratch[f"{_SUM} {stage}"] = {_SUM: single.stages[stage].totals().cpu()}

    def _pass(self, single: SingleProcess, stage: Stage, m: int, *, grad: bool) -> Passed:
        use_threads_of(self.run)
        mb = Microbatch(self.version, m)
        arriving = self._get(f"inputs {stage} {m}") if stage else single.samples(mb)
        return single.stages[stage].forward(arriving, mb, grad=grad)

    def _put(self, name: str, tensors: Sequence[torch.Tensor | None]) -> None:
        self._scratch[name] = {str(i): one.detach().cpu() for i, one in enumerate(tensors) if one is not None}

    def _get(self, name: str, count: int | None = None) -> list[Any]:
        """`count`: how many there are, where some may be None."""
        found = self._scratch[name]
        order = map(str, range(len(found) if count is None else count))
        return [aligned(found[i]).to(self.device) if i in found else None for i in order]
