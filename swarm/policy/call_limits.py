"""How long a call to a peer, and to all behind it, may take. Pure: times are given by the caller."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from swarm.ids import PeerId, Stage
from swarm.policy.router import Router
from swarm.policy.timeouts import AdaptiveTimeout, expected_s
from swarm.records import PeerRecord

TRIAL_S = 3.0
"""An unknown peer has so long, and three times what is usual: it may hold a call until its step opens."""


class CallLimits:
    """Of one caller with the peers of `stage`, of `stages` in the run."""

    def __init__(self, router: Router, stage: Stage, stages: int) -> None:
        self._backoff, self._router, self._stage = router.backoff, router, stage
        self._usual = AdaptiveTimeout(stages - stage)
        self._answered_s = float("-inf")
        """When a call was answered last."""

    def limit_s(self, peer: PeerId, serving: Iterable[Sequence[PeerRecord]], *, t: int) -> float:
        """How long `peer` may take: what is usual, and no more than it may still cost the run.

        One that has never answered has less, since a microbatch that nobody answers holds up its step: twice
        as long each time, so that one that wakes slowly is known in the end. `serving`: the records of the
        stages that the call passes.
        """
        self._usual.expected_s = expected_s(serving)
        limit_s = self._usual.limit_s
        if self._usual.known and not self._router.knows(self._stage, peer):
            limit_s = min(limit_s, self._backoff.doubled(peer) * (TRIAL_S + 3 * self._usual.typical_s))
        return self._backoff.within_budget_s(peer, limit_s, t=t)

    def answered(self, took_s: float, *, now: float) -> None:
        """A call was answered, everything behind it included."""
        self._usual.answered(took_s)
        self._answered_s = now

    def lost(self, peer: PeerId, *, t: int, since_s: float, now: float) -> None:
        """A call failed: all of its time is lost. If others were answered meanwhile, not all have become
        slow: the limit stays, or a few that hang would have it grow for all, to minutes.
        """
        self._backoff.charge(peer, t=t, since_s=since_s, now=now)
        if now - since_s >= self._usual.limit_s and self._answered_s <= since_s:
            self._usual.gave_up(now - since_s)
