"""Faults on order, for tests: what becomes of the n-th answer to a method.

The simulated network asks `next_for(method)` once for each call that it carries, and does what it says.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

Kind = Literal["drop", "delay", "corrupt"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One ordered fault. `delay_s` only means something for `delay`."""

    kind: Kind
    delay_s: float = 0.0


class Faults:
    """Orders by method and number of the call. `nth` counts from the order: 1 is the next call."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = defaultdict(int)
        self._orders: dict[tuple[str, int], Fault] = {}

    def drop_answer(self, method: str, nth: int = 1) -> None:
        """The handler runs, its work counts, and its answer is lost."""
        self._orders[method, self._seen[method] + nth] = Fault("drop")

    def delay_answer(self, method: str, delay_s: float, nth: int = 1) -> None:
        """The answer leaves `delay_s` seconds late; heartbeats go on."""
        self._orders[method, self._seen[method] + nth] = Fault("delay", delay_s)

    def corrupt_answer(self, method: str, nth: int = 1) -> None:
        """The bytes of the answer break the protocol."""
        self._orders[method, self._seen[method] + nth] = Fault("corrupt")

    def next_for(self, method: str) -> Fault | None:
        """Count one call of `method` and say what is to become of its answer."""
        self._seen[method] += 1
        return self._orders.pop((method, self._seen[method]), None)
