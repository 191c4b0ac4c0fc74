"""Chance from a seed: the same numbers in every process, on every machine, in every version of Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_MASK = (1 << 64) - 1


class Dice:
    """SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""

    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        self._state = (seed * 0x9E3779B97F4A7C15 + 0x1234567) & _MASK

    def number(self) -> float:
        """Uniform in [0, 1)."""
        self._state = z = (self._state + 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((z ^ (z >> 31)) >> 11) * 1.1102230246251565e-16

    def chance(self, probability: float) -> bool:
        """True so often."""
        return self.number() < probability

    def between(self, low: float, high: float) -> float:
        """Uniform in [low, high)."""
        return low + (high - low) * self.number()

    def below(self, count: int) -> int:
        """A whole number in 0 … count - 1."""
        return int(self.number() * count)

    def pick(self, things: Sequence[T]) -> T:
        """One of them."""
        return things[self.below(len(things))]

    def shuffled(self, things: Sequence[T]) -> list[T]:
        """All of them in another order."""
        mixed = list(things)
        for i in range(len(mixed) - 1, 0, -1):
            j = self.below(i + 1)
            mixed[i], mixed[j] = mixed[j], mixed[i]
        return mixed
