"""Adaptive timeout for calls to a peer that shows signs of life. Pure.

Heartbeats tell a hung machine from a slow one, but a process whose device is stuck still sends them, and so
does one that never means to answer. So a call has a limit, which follows from what is usual; and a body that
comes, or is read, a least pace.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from statistics import median_high, median_low

from swarm.ids import PeerId, Stage
from swarm.policy.router import Router
from swarm.records import PeerRecord

MIN_S = 5.0
"""For each stage that a call passes: a peer that gives up one of the next stage is not itself given up."""
TIMES_TYPICAL = 10.0
"""A peer that is slower by this is slow, not stuck."""
TIMES_EXPECTED = 3.0
"""The same before the first answer, when all that is known is what peers measured before there was work."""
REMEMBERED = 32


class AdaptiveTimeout:
    """Learns the typical duration of a call from its answers."""

    def __init__(self, *, min_s: float = MIN_S, times_typical: float = TIMES_TYPICAL) -> None:
        self._min_s, self._times_typical = min_s, times_typical
        self._lasted_s: deque[float] = deque(maxlen=REMEMBERED)
        self.known = False
        """Whether there was an answer."""
        self._doubled = 1.0
        self.expected_s = 0.0
        """What a call should take by what peers say of their speed; 0: unknown."""

    def answered(self, took_s: float) -> None:
        """Record the duration of a call, everything behind it included."""
        self.known = True
        self._lasted_s.append(took_s)

    def gave_up(self, after_s: float) -> None:
        """Record that a call was given up. If most are, all peers have become slow: the limit doubles."""
        if self.known:
            self._lasted_s.append(2 * after_s / self._times_typical)
        else:
            self._doubled *= 2

    @property
    def limit_s(self) -> float:
        """Seconds after which a call is given up."""
        if not self.known:
            return self._doubled * max(self._min_s, TIMES_EXPECTED * self.expected_s)
        return max(self._min_s, self._times_typical * self.typical_s)

    @property
    def typical_s(self) -> float:
        """Seconds that a call usually takes; 0: unknown."""
        return median_low(self._lasted_s) if self._lasted_s else 0.0


def expected_s(
    stages: Iterable[Sequence[PeerRecord]], told: Callable[[list[float]], float] = median_high
) -> float:
    """Seconds of a microbatch through some stages, by what most peers say of their speed; 0: unknown.

    A stage of which nothing is known counts as the others. `told`: of the speeds at a stage the one that is
    believed, if not that of most.
    """
    took_s, unknown = list[float](), 0
    for records in stages:
        speeds = [r.speed for r in records if r.state == "serving" and 0.0 < r.speed < math.inf]
        took_s += [1.0 / told(speeds)] if speeds else []
        unknown += not speeds
    return sum(took_s) * (1.0 + unknown / len(took_s)) if took_s else 0.0


TRIAL_S = 3.0
"""An unknown peer has so long, and three times what is usual: it may hold a call until its step opens."""
USUAL_HOLD_S = 1.5
"""A peer whose step is about to open may hold a request so long before it says that it is not."""
ALL_TRIALS_S = 8.0
"""All callers together may lose so much by one that was charged lately: each learns for itself."""
LATE_S = 0.75
"""What one may be late in each of 20 steps, and not be overtaken, is below 30 s together."""
LATER_S = 0.25
"""For each stage that a call passes."""


class CallLimits:
    """How long a call to a peer of `stage`, and to all behind it in a run of `stages`, may take."""

    def __init__(self, router: Router, stage: Stage, stages: int) -> None:
        self._backoff, self._router, self._stage = router.backoff, router, stage
        self._passes = stages - stage
        self._usual = AdaptiveTimeout(min_s=MIN_S * self._passes)
        self._answered_s = float("-inf")
        """When a call was answered last."""
        self._calls = Counter[PeerId]()
        self.callers = 1
        """Those that call this stage, as far as is known."""

    @contextmanager
    def call(
        self, peer: PeerId, serving: Iterable[Sequence[PeerRecord]], *, t: int, begun: bool = False
    ) -> Generator[float]:
        """The time to make a call to `peer` in, with its `limit_s`. `begun`: it has, and needs less."""
        self._calls[peer] += 1
        try:
            limit_s, trial_s = self.limit_s(peer, serving, t=t), TRIAL_S + 3 * self._usual.typical_s
            yield min(limit_s, max(limit_s / 2, trial_s)) if begun and self._usual.known else limit_s
        finally:
            self._calls[peer] -= 1
            self._calls += Counter()  # forgets those that have none

    def limit_s(self, peer: PeerId, serving: Iterable[Sequence[PeerRecord]], *, t: int) -> float:
        """How long `peer` may take: what is usual, and no more than it may still cost the run.

        One that has never answered, or not since it failed, or cost anything in the last steps, has less,
        since a microbatch without an answer holds up its step: twice as long each time, so that one that
        wakes slowly is known in the end, and three times what it took itself. One that was charged has the
        less time the more callers there are, since each learns for itself.
        `serving`: records of the stages that it passes.
        Until one has answered, the calls that are under way to it are done one by one. What it may cost then
        follows from the fastest of each stage: strangers that say that they are slow would make it more.
        """
        there, before = list(serving), max(1, self._calls[peer])
        self._usual.expected_s = before * expected_s(there)
        limit_s = self._usual.limit_s
        self._backoff.calls_take(self._usual.typical_s or before * expected_s(there, max))
        charged = self._backoff.was_charged(peer, t=t)
        suspected = charged or not self._router.knows(self._stage, peer)
        if self._usual.known and suspected:
            least_s = max(USUAL_HOLD_S, min(TRIAL_S, ALL_TRIALS_S / self.callers)) if charged else TRIAL_S
            trial_s = least_s + 3 * max((self._usual.typical_s, *self._router.times_s(self._stage, peer)))
            limit_s = min(limit_s, self._backoff.doubled(peer) * trial_s)
        return self._backoff.within_budget_s(peer, limit_s, t=t)

    def late_after_s(self, peer: PeerId, *, t: int) -> float:
        """After how long another peer of the stage is asked as well; infinity: none is.

        More for each stage that a call passes, and by what the next one needs for that: a peer that another
        one keeps waiting must not itself be overtaken. A slow machine is compared with itself, within bounds:
        else one would be waited for longer and longer. One that has never answered may be warming up.
        """
        known = self._router.knows(self._stage, peer) or self._backoff.was_charged(peer, t=t)
        least_s = min(self._router.times_s(self._stage, peer), default=0.0)
        usual_s = max(self._usual.typical_s, min(least_s, TIMES_EXPECTED * self._usual.typical_s))
        after_s = LATE_S + self._passes * LATER_S + (2 + self._passes / 2) * usual_s
        return after_s if known and self._usual.known and self._router.count(self._stage) > 1 else math.inf

    def is_soon(self, took_s: float) -> bool:
        """Whether a call took no longer than is usual, about."""
        return took_s <= LATE_S + 3 * self._usual.typical_s

    def answered(self, took_s: float, *, now: float) -> None:
        """A call was answered, everything behind it included."""
        self._usual.answered(took_s)
        self._answered_s = now

    def put_off(self, peer: PeerId, *, t: int, since_s: float, now: float) -> None:
        """A peer said that it cannot now: that takes no time, and longer than usual it is lost."""
        if now - since_s > USUAL_HOLD_S:
            self._backoff.charge(peer, t=t, since_s=since_s, now=now)

    def overtaken(self, peer: PeerId, *, t: int, since_s: float, now: float) -> bool:
        """Another peer answered sooner than this one, which was asked first. Returns whether that, or another
        thing that it was charged with, is not the first one lately: a machine may stop for some seconds.
        """
        again = self._backoff.was_charged(peer, t=t, before_s=since_s)
        self._backoff.charge(peer, t=t, since_s=since_s, now=now)
        return again

    def lost(self, peer: PeerId, *, t: int, since_s: float, now: float) -> None:
        """A call failed: all of its time is lost. If others were answered meanwhile, not all have become
        slow: the limit stays, or a few that hang would have it grow for all, to minutes.
        """
        self._backoff.charge(peer, t=t, since_s=since_s, now=now)
        if now - since_s >= self._usual.limit_s and self._answered_s <= since_s:
            self._usual.gave_up(now - since_s)


LEAST_BYTES_PER_S = 64_000.0
"""A line of half a megabit per second; what moves less holds others up."""
TIMES_SLOWER = 10.0
"""Than a line was measured: it is shared, and measurements scatter."""
GRACE_S = 5.0
"""To begin: to wait for its turn on a line that carries other things."""


def is_too_slow(came_bytes: float, after_s: float) -> bool:
    """Whether too little has come of a body that was accepted `after_s` ago."""
    return came_bytes < LEAST_BYTES_PER_S * (after_s - GRACE_S)


def most_s(size_bytes: float, *, line_bps: float = 0.0) -> float:
    """How long so many bytes may take over a line of that measured speed, in bits per second; 0: unknown."""
    return GRACE_S + size_bytes / max(LEAST_BYTES_PER_S, line_bps / 8 / TIMES_SLOWER)
