"""What must hold at every moment, computed from the weights themselves and not from the ledgers.

The audit model's weights say how often each microbatch was counted; its loss says with which version of the
weights each stage computed it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from swarm.manifest import NO_ISLAND, Run
from swarm.model.stage import StageCompute

INVARIANTS = {
    "I1": "each microbatch once in every step that was taken",
    "I2": "equal versions have equal weights, bit for bit",
    "I3": "a loss was computed with the version that was asked for",
    "I4": "weights at the end are the same whatever failed",
    "I5": "a stage takes a step only if all stages have its whole gradient",
    "disk": "what a disk gives back is what was saved (I1, I2)",
    "shared": "each microbatch once in what another stage found of a tied weight (I1)",
}


class Violation(AssertionError):
    """An invariant does not hold."""


class Invariants:
    """Looks at every weight that appears anywhere. Counts what it looked at."""

    def __init__(self, run: Run, *, tied: bool = False) -> None:
        """`tied`: the first and the last stage hold the same weights: there each microbatch counts twice."""
        self._run = run
        self._first_with = [0 if tied and stage == run.S - 1 else stage for stage in range(run.S)]
        """The first stage that holds the same weights."""
        self._counts = [2 if tied and stage in (0, run.S - 1) else 1 for stage in range(run.S)]
        self.looked: Counter[str] = Counter()
        self._bits: dict[tuple[int, int, int], tuple[str, bytes]] = {}
        """(island, stage, version) -> the peer that had it first, and its bytes. After a meeting all islands
        are alike."""
        self._prepared: set[tuple[int, int]] = set()
        """(cell, step) of each gradient that a replica had."""

    def holds(self, peer: str, compute: StageCompute) -> None:
        """`peer` has new weights: it took a step, or a whole state from somewhere."""
        self.looked["I1"] += 1
        self.looked["I2"] += 1
        weights = torch.cat(list(compute.state.named_weights().values()))
        self._are_due(peer, compute.run.number, compute.stage, compute.version, weights)

    def saved(self, disk: str, stage: int, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """`disk` has a checkpoint that fits its digest."""
        self.looked["disk"] += 1
        self._are_due(disk, NO_ISLAND, stage, version, tensors["weights"])

    def _are_due(self, peer: str, island: int, stage: int, version: int, weights: torch.Tensor) -> None:
        counts = (weights * -self._run.M).tolist()
        due = [self._counts[stage] * count for count in self._counted(island, version)]
        if any(abs(count - right) > 1e-6 for count, right in zip(counts, due, strict=True)):
            found = [round(count, 3) for count in counts]
            raise Violation(
                f"I1: stage {stage}, peer {peer}: version {version} counts its microbatches {found} times"
                + (f", not {due} times" if due != [version] * self._run.M else "")
            )
        bits = weights.numpy().tobytes()
        key = NO_ISLAND if self._run.is_common(version) else island, self._first_with[stage], version
        first, known = self._bits.setdefault(key, (peer, bits))
        if known != bits:
            raise Violation(f"I2: stage {stage}, version {version}: {peer} has other bits than {first}")

    def _counted(self, island: int, version: int) -> list[float]:
        """How often the weights of a version have counted each microbatch: since the last meeting an island
        counts only its own, each as often as there are islands.
        """
        run, count = self._run, self._run.islands.count
        if count == 1:
            sizes = [run.microbatches(t) for t in range(version)]
            return [sum(run.M / size for size in sizes if m < size) for m in range(run.M)]
        since = version % (run.islands.local_steps + 1)
        met, share = run.islands.trained(version - since), run.M // count
        return [met + count * since * (m // share == island) for m in range(run.M)]

    def prepared(self, cell: int, t: int) -> None:
        """A replica of a cell has the whole gradient of step `t`."""
        self._prepared.add((cell, t))

    def takes(self, peer: str, cell: int, t: int) -> None:
        """`peer` takes step `t`: no other stage of its island may need weights of before it any more."""
        self.looked["I5"] += 1
        first, stage = cell - cell % self._run.S, cell % self._run.S
        stages = range(self._run.S)
        lacking = [other for other in stages if (first + other, t) not in self._prepared]
        if lacking:
            raise Violation(
                f"I5: stage {stage}, peer {peer} takes step {t}, which stage {lacking[0]} has not"
            )

    def part(self, peer: str, island: int, stage: int, other: int, part: torch.Tensor) -> None:
        """`peer` of `stage` adds up what `other` found of the weights that both hold."""
        self.looked["shared"] += 1
        share = self._run.M // self._run.islands.count
        due = [float(island in (NO_ISLAND, m // share)) for m in range(self._run.M)]
        if part.tolist() != due:
            found = part.tolist()
            raise Violation(
                f"I1: stage {stage}, peer {peer}: of what stage {other} adds to the tied weights each "
                f"microbatch counts {found} times"
            )

    def loss(self, trainer: str, t: int, loss: float) -> None:
        """The mean loss of step `t`, as `trainer` was told."""
        self.looked["I3"] += 1
        run = self._run
        # Each island has counted its own.
        counted = self._counted(0, run.weight_version(t))[: run.microbatches(t) // run.islands.count]
        due = -sum(self._counts) * sum(counted) / len(counted) / run.M
        if abs(loss - due) > 1e-6:
            raise Violation(f"I3: trainer {trainer}: step {t} has the loss {loss}; its weights give {due}")

    def at_the_end(self, peer: str, compute: StageCompute) -> None:
        """Every fault is over: what a peer ends with."""
        self.looked["I4"] += 1
        if compute.version != self._run.steps:
            raise Violation(f"I4: stage {compute.stage}, peer {peer} ends at version {compute.version}")
        self.holds(peer, compute)
