"""`SingleProcess` for a model that does not fit into one machine: one stage at a time is in memory.

Of a step all microbatches pass stage 0, then all pass stage 1, and so to the last and back; each stage
computes its forward again in its backward. What is not being computed lies elsewhere, such as in a folder.
The results are those of `SingleProcess`, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import torch

from swarm.ids import Microbatch, Stage
from swarm.manifest import Run
from swarm.model.layout import empty_state, stage_layout
from swarm.model.meeting import difference
from swarm.model.reductions import state_digest
from swarm.model.reference import Passed, PlainStage, add_up, meet, samples_of
from swarm.model.same_bits import aligned, use_threads_of

Scratch: TypeAlias = MutableMapping[str, dict[str, torch.Tensor]]
"""Tensors that are not needed now. What is read is not written to."""

_SUM = "sum"
_FOR_GRADIENTS = ("weights", "weights_previous", "statistics", "dropped_bits")
"""Of a stage's state, what its forward and backward take."""


class ByStage:
    """All cells of a run in turn: its stages, or those of all islands."""

    def __init__(
        self,
        run: Run,
        batch: Callable[[list[int]], Any],
        device: str,
        version: int,
        state: Callable[[Stage], Mapping[str, torch.Tensor]],
        scratch: Scratch,
    ) -> None:
        """`batch`: as `SingleProcess` has it; `state`: of each stage at that version, which all islands have
        in common; asked for once.

        Raises:
            SetupError: as `PlainStage`, once something is computed.
        """
        self.run, self.version, self._batch, self._scratch = run, version, batch, scratch
        self.device = torch.device(device)
        for stage in range(run.S):
            empty, given = empty_state(run, stage), state(stage)
            begun = {name: given[name].to(one.dtype) for name, one in empty.items()}
            scratch.update({f"state {cell}": begun for cell in range(stage, run.cells, run.S)})
        self._layouts = [stage_layout(run, stage) for stage in range(run.S)]
        self._shared: list[dict[str, torch.Tensor]] = []

    def compute(self, done: Callable[[int], None]) -> list[float]:
        """The microbatches of the next step, or what islands bring to a meeting. Returns of each island the
        sum of the gradients' squares, as `SingleProcess.totals`; of a meeting nothing. `done`: told of each
        microbatch that has passed a stage both ways.
        """
        if self.run.meets_at(self.version):
            for cell in range(self.run.cells):
                layout = self._layouts[cell % self.run.S]
                self._scratch[f"{_SUM} {cell}"] = {_SUM: difference(self.run, layout, self.state_of(cell))}
            return []
        found: list[tuple[dict[str, torch.Tensor], float]] = []
        for island in map(self.run.island, range(self.run.islands.count)):
            cells = range(island.cell(0), island.cell(island.S))
            all_m = range(island.microbatches(self.version))
            for cell in cells[:-1]:
                self._forward(cell, all_m)
            for cell in reversed(cells):
                self._backward(cell, all_m, done)
            found.append(add_up(self._layouts, lambda stage, cells=cells: self.sum_of(cells[stage])))
        self._shared = [shared for shared, _ in found]
        return [squares for _, squares in found]

    def sum_of(self, cell: Stage) -> torch.Tensor:
        """What a cell alone found in the step that was computed: flat, not divided by M; or at a meeting what
        its island has changed of the stage, as that travels.
        """
        return self._scratch[f"{_SUM} {cell}"][_SUM]

    @torch.no_grad()
    def take(self, squares: Sequence[float]) -> None:
        """Take the step that was computed. `squares`: as `compute` has them."""
        for stage, layout in enumerate(self._layouts):
            islands = {cell: self._load(cell) for cell in range(stage, self.run.cells, self.run.S)}
            if not squares:
                meet([*islands.values()])
            for number, (cell, plain) in enumerate(islands.items()):
                if squares:
                    totals = {**layout.terms_of(self.sum_of(cell)), **self._shared[number]}
                    here = {name: totals[name].to(self.device) for name in layout.terms}
                    plain.take(self.version, here, squares[number])
                self._scratch[f"state {cell}"] = {name: vector.cpu() for name, vector in plain.state.items()}
        self.version += 1

    def state_of(self, cell: Stage) -> dict[str, torch.Tensor]:
        """The newest state of a cell, as `StageState.copy` has it."""
        return self._scratch[f"state {cell}"]

    def digest(self, cell: Stage, *, whole: bool) -> str:
        """What replicas say of that, as `state_digest` has it."""
        state = self.state_of(cell)
        return state_digest(state if whole else {n: v.to(self.device) for n, v in state.items()}, whole=whole)

    def _load(self, cell: Stage, *vectors: str) -> PlainStage:
        """A cell with these vectors of its state; none: with all."""
        number, stage = divmod(cell, self.run.S)
        state = self.state_of(cell)
        needed = {name: state[name] for name in state if not vectors or name in vectors}
        return PlainStage(self.run.island(number), stage, self.device, needed)

    def _forward(self, cell: Stage, all_m: Sequence[int]) -> None:
        plain = self._load(cell, *_FOR_GRADIENTS)
        for m in all_m:
            passed = self._pass(plain, cell, m, grad=False)
            self._put(f"inputs {cell + 1} {m}", passed.arriving)
            self._put(f"places {cell + 1} {m}", passed.places)

    def _backward(self, cell: Stage, all_m: Sequence[int], done: Callable[[int], None]) -> None:
        plain, stage = self._load(cell, *_FOR_GRADIENTS), cell % self.run.S
        for m in all_m:
            passed = self._pass(plain, cell, m, grad=True)
            if stage == self.run.S - 1:
                gradients = [torch.ones_like(passed.outputs[0])]
            else:
                gradients = self._get(f"gradients {cell} {m}", len(passed.outputs))
            places = self._get(f"places {cell} {m}", len(passed.leaves)) if stage else []
            mb = Microbatch(self.version, m)
            back = plain.backward(passed, gradients, places, mb)
            for used in (f"gradients {cell} {m}", f"places {cell} {m}", f"inputs {cell} {m}"):
                self._scratch.pop(used, None)
            if stage:
                self._put(f"gradients {cell - 1} {m}", back)
            done(1)
        self._scratch[f"{_SUM} {cell}"] = {_SUM: plain.totals().cpu()}

    def _pass(self, plain: PlainStage, cell: Stage, m: int, *, grad: bool) -> Passed:
        use_threads_of(self.run)
        mb, (number, stage) = Microbatch(self.version, m), divmod(cell, self.run.S)
        if stage:
            arriving = self._get(f"inputs {cell} {m}")
        else:
            arriving = samples_of(self.run.island(number), self._batch, mb, self.device)
        return plain.forward(arriving, mb, grad=grad)

    def _put(self, name: str, tensors: Sequence[torch.Tensor | None]) -> None:
        self._scratch[name] = {str(i): one.detach().cpu() for i, one in enumerate(tensors) if one is not None}

    def _get(self, name: str, count: int | None = None) -> list[Any]:
        """`count`: how many there are, where some may be None."""
        found = self._scratch[name]
        order = map(str, range(len(found) if count is None else count))
        return [aligned(found[i]).to(self.device) if i in found else None for i in order]
