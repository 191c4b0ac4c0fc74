"""What must hold at every moment, computed from the weights themselves and not from the ledgers.

A gradient is a one-hot count: the sum of step `t` is a number with eight bits for each microbatch, in which
the one of `m` says how often it was added. Weights are the list of what was applied, for each of a few
elements. So "each microbatch once" can be read off the weights.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from swarm.ids import PeerId, Stage
from swarm.sim.terms import Terms

ELEMENTS = 6
"""Numbers in the flat gradient of a stage: a few parts for each member of a reduce."""
SHARED = 2
"""The one that a tied weight is, on both of its stages."""
COUNT_BITS = 8


class Violation(AssertionError):
    """An invariant does not hold."""


class Weights(NamedTuple):
    """What a stage has learned: version by version, each element's counts, and the norm that it was told."""

    version: int
    mark: int
    """A hash of the rest, of whole numbers only: Python salts the hashes of texts."""
    steps: tuple[tuple[tuple[int, ...], float], ...] = ()

    @property
    def digest(self) -> str:
        return f"{self.mark & 0xFFFFFFFFFFFFFFFF:x}"


def one_hot(m: int) -> int:
    """The gradient of microbatch `m`."""
    return 1 << COUNT_BITS * m


def counts(total: int, microbatches: int) -> list[int]:
    """How often each microbatch is in a sum."""
    return [total >> COUNT_BITS * m & 255 for m in range(microbatches)]


def sqnorm(terms: Terms, stage: Stage, whole: tuple[int, ...]) -> float:
    """Of a stage's gradient: differs between stages, and is exact. What two hold counts at the first."""
    other = terms.shares_with(stage)
    own = whole if other is None or stage < other else whole[:SHARED] + whole[SHARED + 1 :]
    return float((stage + 1) * (sum(own) % 9973))


def complete(own: tuple[int, ...], part: int | None) -> tuple[int, ...]:
    """A stage's sum with what the other stage found of the weight that both hold."""
    return own if part is None else (*own[:SHARED], own[SHARED] + part, *own[SHARED + 1 :])


def initial(stage: Stage) -> Weights:
    """Version 0 follows from the seed."""
    return Weights(0, stage)


def applied(weights: Weights, reduced: tuple[int, ...], total_sqnorm: float) -> Weights:
    """The next version."""
    mark = hash((weights.mark, reduced, total_sqnorm))
    return Weights(weights.version + 1, mark, (*weights.steps, (reduced, total_sqnorm)))


@dataclass
class Checks:
    """Looks at every weight that appears anywhere. Counts what it looked at."""

    terms: Terms

    def __post_init__(self) -> None:
        self.looked: Counter[str] = Counter()
        each = sum(one_hot(m) for m in range(self.terms.microbatches))
        self.one_of_each = [
            complete((each,) * ELEMENTS, None if self.terms.shares_with(stage) is None else each)
            for stage in range(self.terms.stages)
        ]
        """Stage -> what it takes in a step."""
        self.total = sum(sqnorm(self.terms, stage, whole) for stage, whole in enumerate(self.one_of_each))

    def taken(self, stage: Stage, peer: PeerId, weights: Weights) -> None:
        """`peer` took a step: its weights are new."""
        self.looked["I1"] += 1
        self.looked["I2"] += 1
        reduced, total = weights.steps[-1]
        if reduced != self.one_of_each[stage]:
            found = [counts(element, self.terms.microbatches) for element in reduced]
            raise Violation(
                f"I1: stage {stage}, peer {peer}: step {weights.version - 1} was taken with {found} "
                f"of microbatches 0 … {self.terms.microbatches - 1}, element by element"
            )
        if total != self.total:
            raise Violation(
                f"I2: stage {stage}, peer {peer}: step {weights.version - 1} was taken with the norm "
                f"{total}; the manifest gives {self.total}"
            )

    def loaded(self, stage: Stage, peer: PeerId, weights: Weights, expected: int) -> None:
        """`peer` took a whole state from somewhere."""
        self.looked["I2"] += 1
        right = len(weights.steps) == weights.version == expected
        if not right or any(step != (self.one_of_each[stage], self.total) for step in weights.steps):
            raise Violation(
                f"I2: stage {stage}, peer {peer} took a state for version {expected} that is {weights}"
            )

    def answered(self, peer: PeerId, t: int, m: int, versions: tuple[int, ...], wanted: int) -> None:
        """A microbatch was computed by stages that held these versions."""
        self.looked["I3"] += 1
        if any(version != wanted for version in versions):
            raise Violation(
                f"I3: peer {peer}: microbatch ({t}, {m}) was computed with versions {versions}, not {wanted}"
            )

    def at_the_end(self, stage: Stage, peer: PeerId, weights: Weights) -> None:
        """Every fault is over: what a peer ends with, all of it."""
        self.looked["I4"] += 1
        if weights.steps != ((self.one_of_each[stage], self.total),) * self.terms.steps:
            raise Violation(f"I4: stage {stage}, peer {peer} ends with {weights}")
