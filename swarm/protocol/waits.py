"""Which replicas a stage waits for, and which of them are slower than usual. Pure: times are given."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from swarm.ids import PeerId
from swarm.policy.timeouts import AdaptiveTimeout


@dataclass(slots=True)
class _Wait:
    since_s: float
    state: Hashable


@dataclass(slots=True)
class Waits:
    """The waits of one kind. What is usual follows from those that ended by themselves."""

    usual: AdaptiveTimeout
    _open: dict[tuple[int, PeerId], _Wait] = field(default_factory=lambda: dict[tuple[int, PeerId], _Wait]())

    def note(self, t: int, states: Mapping[PeerId, Hashable], *, now: float) -> None:
        """In step `t` the stage waits for exactly these replicas. A state that changes is progress."""
        for (step, peer), wait in list(self._open.items()):
            if step == t and (peer not in states or states[peer] != wait.state):
                del self._open[step, peer]
                self.usual.answered(now - wait.since_s)
        for peer, state in states.items():
            self._open.setdefault((t, peer), _Wait(now, state))

    def forget(self, newest: int) -> None:
        """Steps before `newest` are over."""
        for old in [(t, peer) for t, peer in self._open if t < newest]:
            del self._open[old]

    def late(self, t: int, *, now: float, least_s: float = 0.0) -> dict[PeerId, float]:
        """The replicas that step `t` has waited for longer than usual, and than `least_s`; since when."""
        limit_s = max(least_s, self.usual.limit_s)
        return {
            peer: wait.since_s
            for (step, peer), wait in self._open.items()
            if step == t and now - wait.since_s > limit_s
        }
