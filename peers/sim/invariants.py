"""What must hold at every moment, computed from the weights themselves and not from the ledgers.

The audit model's weights say how often each microbatch was counted; its loss says with which version of the
weights each stage computed it. All that a version is made of is compared with what one process arrives at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache

import numpy as np
import torch

from swarm.ids import Generation, Stage
from swarm.manifest import NO_ISLAND, Run
from swarm.model.reference import SingleProcess
from swarm.model.stage import StageCompute

INVARIANTS = {
    "I1": "each microbatch once in every step that was taken",
    "I2": "each version is that of one process, bit for bit, whatever failed (I2, I4)",
    "I3": "a loss was computed with the version that was asked for",
    "I5": "a stage takes a step only if all stages have its whole gradient",
    "disk": "what a disk gives back is what was saved (I1, I2)",
    "shared": "each microbatch once in what another stage found of a tied weight (I1)",
}

ROUNDED = 0.1
"""How far a count may be from a whole number: `rounded8` keeps six bits of the largest sum of a block."""


class Violation(AssertionError):
    """An invariant does not hold."""


@cache
def due_of(
    run: Run, *, tied: bool
) -> tuple[dict[tuple[int, int, int], dict[str, torch.Tensor]], list[tuple[float, ...]]]:
    """What one process arrives at: (island, stage, version) -> as `StageState.copy`, and by step the losses
    of its microbatches. `tied`: the first and the last stage add to each other's sums.
    """
    kind = _Tied if tied else SingleProcess
    whole = kind(run, lambda offsets: np.zeros((len(offsets), run.data.sequence_length + 1)))
    states, losses = {}, []
    for version in range(run.steps + 1):
        for cell in range(run.cells):
            number, stage = divmod(cell, run.S)
            state = {name: vector.clone() for name, vector in whole.state_of(cell).items()}
            states[NO_ISLAND if run.cells == run.S else number, stage, version] = state
            if run.is_common(version):
                states[NO_ISLAND, stage, version] = state
        if version < run.steps:
            losses.append(tuple(whole.step(version)))
    return states, losses


class _Tied(SingleProcess):
    def sum_of(self, cell: Stage) -> torch.Tensor:
        own, stage, last = super().sum_of(cell), cell % self.run.S, self.run.S - 1
        return own + super().sum_of(cell + last - 2 * stage) if stage in (0, last) else own


class Invariants:
    """Looks at every weight that appears anywhere. Counts what it looked at."""

    def __init__(self, run: Run, *, tied: bool = False) -> None:
        """`tied`: the first and the last stage hold the same weights: there each microbatch counts twice."""
        self._run = run
        self._states, self._losses = due_of(run, tied=tied)
        self.looked: Counter[str] = Counter()
        self.prepared: set[tuple[int, int, Generation]] = set()
        """(cell, step, generation) of each whole gradient that a replica had."""

    def holds(self, peer: str, compute: StageCompute) -> None:
        """`peer` has new weights: it took a step, or a whole state from somewhere."""
        self.looked["I1"] += 1
        self.looked["I2"] += 1
        at = compute.run.number, compute.stage, compute.version
        self._are_due(peer, at, compute.state.copy())

    def saved(self, disk: str, stage: int, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """`disk` has a checkpoint that fits its digest."""
        self.looked["disk"] += 1
        self._are_due(disk, (NO_ISLAND, stage, version), tensors)

    def _are_due(self, peer: str, at: tuple[int, int, int], state: Mapping[str, torch.Tensor]) -> None:
        due, (_, stage, version) = self._states.get(at, {}), at
        others = sorted(name for name in state.keys() | due if _bits(state, name) != _bits(due, name))
        if not others:
            return
        found, right = ((of["weights"] * -self._run.M) for of in (state, due or state))
        if torch.allclose(found, right, rtol=0.0, atol=1e-6):
            raise Violation(f"I2: stage {stage}, peer {peer}: version {version} has other bits in {others}")
        counts = [round(count, 3) for count in found.tolist()]
        raise Violation(
            f"I1: stage {stage}, peer {peer}: version {version} counts its microbatches {counts} times, not "
            f"{right.tolist()} times"
        )

    def takes(self, peer: str, cell: int, t: int, generation: Generation) -> None:
        """`peer` takes step `t`: no other stage of its island may need weights of before it any more."""
        self.looked["I5"] += 1
        first = cell - cell % self._run.S
        for stage in range(self._run.S):
            if (first + stage, t, generation) not in self.prepared:
                raise Violation(f"I5: {peer} takes step {t} in cell {cell}, which stage {stage} has not")

    def part(self, peer: str, island: int, stage: int, other: int, part: torch.Tensor) -> None:
        """`peer` of `stage` adds up what `other` found of the weights that both hold."""
        self.looked["shared"] += 1
        share = self._run.M // self._run.islands.count
        due = [float(island in (NO_ISLAND, m // share)) for m in range(self._run.M)]
        found = part.tolist()
        if len(found) != len(due) or max(abs(a - b) for a, b in zip(found, due, strict=True)) > ROUNDED:
            raise Violation(
                f"I1: stage {stage}, peer {peer}: of what stage {other} adds to the tied weights each "
                f"microbatch counts {found} times"
            )

    def loss(self, trainer: str, t: int, loss: float, losses: tuple[float, ...] = ()) -> None:
        """The mean loss of step `t`, and those of its microbatches if it knows all, as `trainer` was told."""
        self.looked["I3"] += 1
        due = self._losses[t]
        if abs(loss - sum(due) / len(due)) > 1e-6 or losses not in ((), due):
            raise Violation(f"I3: {trainer}: step {t} has the loss {losses or loss}; its weights give {due}")


def _bits(state: Mapping[str, torch.Tensor], name: str) -> bytes:
    return state[name].numpy().tobytes() if name in state else b"none"
