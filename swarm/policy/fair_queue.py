"""Fair queue over the peers of one stage, for `swarm.policy.router`. No choice scans all peers.

Each peer has a virtual clock that advances by its expected work whenever it is chosen. A peer is in one of
three places: in the queue, *late* (it would hold the step up) or *in backoff* (it failed). Entries stay in
the heaps when a peer moves or changes; a stamp marks them as outdated when they reach the top.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from statistics import median_high
from typing import TypeAlias

from swarm.ids import PeerId
from swarm.policy.backoff import Backoff

REMEMBERED = 5
"""Answers in the median: three follow a change of speed, while a single slow one (a stopped process, a busy
disk) is not held against a peer for hundreds of microbatches."""
DEFAULT_RESPONSE_S = 0.1
"""Assumed of the first peer, before anything is measured."""
MUCH_SLOWER = 3.0
"""A peer this many times slower than the fastest gets no microbatch that the step would end up waiting for.
Without this rule one peer that is 20 times slower made the steps of three others take 1.4 to 2.1 times as
long (8 to 128 microbatches a step, simulated); with it 1.0 to 1.05."""
NEGLIGIBLE_S = 0.05
"""A step may wait this long for any peer: shorter differences are mostly the noise of a busy machine."""
RETRY_PERIODS = 20.0
"""A late peer gets one microbatch per this many of its response times, because it may have become faster. So
it can hold up the run for a twentieth of the time."""

COMPARED = 8
"""Candidates among which the nearest is picked."""

_Entry: TypeAlias = "tuple[float, PeerId, int]"
"""Sort key, peer, stamp."""


@dataclass(slots=True)
class Candidate:
    """Scheduling state of one peer."""

    peer: PeerId
    clock_s: float
    """Virtual time: the sum of the expected work of everything it was given."""
    stamp: int = 0
    queued: bool = False
    answers: int = 0
    chosen_at: float = float("-inf")
    response_s: float = DEFAULT_RESPONSE_S
    """Median time from the call to the answer."""
    work_s: float = DEFAULT_RESPONSE_S
    """Median time of its device, which bounds its throughput."""
    last_responses_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=REMEMBERED))
    last_works_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=REMEMBERED))

    @property
    def measured(self) -> bool:
        return bool(self.last_responses_s)

    def note(self, response_s: float, work_s: float) -> None:
        """Remember an answer. The first pays for warming up and is dropped: kept, it would starve a
        newcomer.
        """
        if self.answers == 1:
            self.last_responses_s.clear()
            self.last_works_s.clear()
        self.last_responses_s.append(response_s)
        self.last_works_s.append(work_s)
        self.answers += 1
        self.response_s, self.work_s = median_high(self.last_responses_s), median_high(self.last_works_s)


class FairQueue:
    """Weighted fair queue of one stage's peers. All calls take O(log n), except `set_peers`."""

    def __init__(self) -> None:
        self.known: dict[PeerId, Candidate] = {}
        self._stamps = itertools.count(1)
        self._by_finish: list[_Entry] = []
        """Measured peers by virtual finish time (clock plus work)."""
        self._new: list[_Entry] = []
        """Unmeasured peers by clock alone: their expected work changes for all of them at once."""
        self._by_clock: list[_Entry] = []
        self._responses_s: list[float] = []
        """Response times of all measured peers in the queue, ascending."""
        self._works_s: list[float] = []
        self._late: list[_Entry] = []
        """Late peers by response time."""
        self._tried_at: list[_Entry] = []
        """Late peers by the time of their next try."""
        self._in_backoff: set[PeerId] = set()
        self._changes_seen = -1
        self._check_again_at = float("inf")
        self._floor_s = 0.0
        """Clock of new and returning peers: they are chosen soon, but not with a backlog."""

    def set_peers(self, peers: Iterable[PeerId]) -> None:
        """Replace the set of serving peers."""
        wanted = set(peers)
        for gone in self.known.keys() - wanted:
            self._take_out(self.known.pop(gone))
            self._in_backoff.discard(gone)
        floor_s = self._floor()
        for new in sorted(wanted - self.known.keys()):
            self.known[new] = Candidate(new, floor_s)
            self._queue(self.known[new])

    def answered(self, peer: PeerId, response_s: float, work_s: float) -> None:
        """Record an answer of `peer`."""
        candidate = self.known.get(peer)
        if candidate is None:
            return
        queued = candidate.queued
        self._take_out(candidate)
        candidate.note(response_s, work_s)
        if queued or peer not in self._in_backoff:
            self._queue(candidate)  # a late one, too: it may be fast now

    def next(
        self,
        backoff: Backoff,
        *,
        now: float,
        exclude: Collection[PeerId],
        horizon_s: float,
        latency_s: Callable[[PeerId], float] | None = None,
    ) -> tuple[Candidate, float] | None:
        """Choose a peer and return it with its expected work in seconds; None if no peer can be asked.

        Among the next eight candidates, pick the smallest virtual finish time plus link latency
        (`latency_s`). The clock of a skipped peer falls behind until that makes up for its latency: all keep
        their share, and get it from where they are near. (Clocks are prices: Bertsekas' auction.)
        """
        self._wake_recovered(backoff, now)
        allowed_s, passed, best = 0.0, list[Candidate](), (math.inf, "")
        compared, chosen = 0, None
        while compared < (1 if latency_s is None else COMPARED):
            fastest_s = self._responses_s[0] if self._responses_s else DEFAULT_RESPONSE_S
            limit_s = max(horizon_s, MUCH_SLOWER * fastest_s, NEGLIGIBLE_S, allowed_s)
            self._wake_late(limit_s, now)
            candidate = self._first()
            if candidate is None:
                if chosen is not None or not self._late_left():
                    break
                # All others are away: the step has to wait for a late peer.
                allowed_s = max(allowed_s, MUCH_SLOWER * self._late[0][0])
            elif candidate.peer in exclude:
                passed.append(candidate)
                self._drop_first(candidate)
            elif backoff.in_backoff(candidate.peer, now=now):
                self._put_in_backoff(candidate, backoff, now)
            elif not _in_time(candidate, limit_s, now):
                self._keep_out(candidate)
            else:
                compared += 1
                finish_s = candidate.clock_s + self._expected_s(candidate)
                rank = (
                    finish_s + (latency_s(candidate.peer) if latency_s is not None else 0.0),
                    candidate.peer,
                )
                if chosen is None or rank < best:
                    best, chosen = rank, candidate
                passed.append(candidate)
                self._drop_first(candidate)
        for candidate in passed:
            self._push_finish(candidate)
        if chosen is None:
            return None
        work_s = self._expected_s(chosen)
        self._floor_s = self._floor()
        self._take_out(chosen)
        chosen.clock_s += work_s
        chosen.chosen_at = now
        self._queue(chosen)
        return chosen, work_s

    def _default_work_s(self) -> float:
        """The expected work of a newcomer: the median of its stage."""
        return self._works_s[len(self._works_s) // 2] if self._works_s else DEFAULT_RESPONSE_S

    def _expected_s(self, candidate: Candidate) -> float:
        return candidate.work_s if candidate.measured else self._default_work_s()

    def _floor(self) -> float:
        """The smallest clock in the queue."""
        self._clean(self._by_clock)
        return max(self._floor_s, self._by_clock[0][0]) if self._by_clock else self._floor_s

    # -- moving between the places ------------------------------------------------------------------

    def _queue(self, candidate: Candidate) -> None:
        candidate.queued, candidate.stamp = True, next(self._stamps)
        # A peer that was late or in backoff for long must not get its whole backlog in one burst.
        candidate.clock_s = max(candidate.clock_s, self._floor_s)
        heapq.heappush(self._by_clock, (candidate.clock_s, candidate.peer, candidate.stamp))
        self._push_finish(candidate)
        if candidate.measured:
            insort(self._responses_s, candidate.response_s)
            insort(self._works_s, candidate.work_s)

    def _push_finish(self, candidate: Candidate) -> None:
        entry = (candidate.clock_s, candidate.peer, candidate.stamp)
        if candidate.measured:
            heapq.heappush(self._by_finish, (entry[0] + candidate.work_s, *entry[1:]))
        else:
            heapq.heappush(self._new, entry)

    def _take_out(self, candidate: Candidate) -> None:
        candidate.stamp = next(self._stamps)
        if candidate.queued and candidate.measured:
            del self._responses_s[bisect_left(self._responses_s, candidate.response_s)]
            del self._works_s[bisect_left(self._works_s, candidate.work_s)]
        candidate.queued = False

    def _keep_out(self, candidate: Candidate) -> None:
        self._take_out(candidate)
        again = candidate.chosen_at + RETRY_PERIODS * candidate.response_s
        heapq.heappush(self._late, (candidate.response_s, candidate.peer, candidate.stamp))
        heapq.heappush(self._tried_at, (again, candidate.peer, candidate.stamp))

    def _wake_late(self, limit_s: float, now: float) -> None:
        for heap, until in ((self._late, limit_s), (self._tried_at, now)):
            self._clean(heap)
            while heap and heap[0][0] <= until:
                self._queue(self.known[heap[0][1]])
                self._clean(heap)

    def _late_left(self) -> bool:
        self._clean(self._late)
        return bool(self._late)

    def _put_in_backoff(self, candidate: Candidate, backoff: Backoff, now: float) -> None:
        self._take_out(candidate)
        self._in_backoff.add(candidate.peer)
        self._check_again(backoff, now)

    def _wake_recovered(self, backoff: Backoff, now: float) -> None:
        if not self._in_backoff or (backoff.changes == self._changes_seen and now < self._check_again_at):
            return
        for peer in sorted(self._in_backoff):
            if not backoff.in_backoff(peer, now=now):
                self._in_backoff.remove(peer)
                self._queue(self.known[peer])
        self._check_again(backoff, now)

    def _check_again(self, backoff: Backoff, now: float) -> None:
        self._changes_seen = backoff.changes
        ends = [backoff.ends(peer) for peer in self._in_backoff]
        self._check_again_at = min((at for at in ends if at > now), default=float("inf"))

    # -- the heaps ----------------------------------------------------------------------------------

    def _first(self) -> Candidate | None:
        """The peer with the smallest virtual finish time; ties go to the smallest id."""
        self._clean(self._by_finish)
        self._clean(self._new)
        tops = [entry[:2] for entry in self._by_finish[:1]]
        tops += [(entry[0] + self._default_work_s(), entry[1]) for entry in self._new[:1]]
        return self.known[min(tops)[1]] if tops else None

    def _drop_first(self, candidate: Candidate) -> None:
        heapq.heappop(self._by_finish if candidate.measured else self._new)

    def _clean(self, heap: list[_Entry]) -> None:
        """Drop outdated entries from the top of `heap`."""
        while heap:
            _, peer, stamp = heap[0]
            candidate = self.known.get(peer)
            if candidate is not None and candidate.stamp == stamp:
                return
            heapq.heappop(heap)


def _in_time(candidate: Candidate, limit_s: float, now: float) -> bool:
    if len(candidate.last_responses_s) < REMEMBERED:
        return True  # it may still be warming up: kept out now, it would stay cold
    response_s = candidate.response_s
    return response_s <= limit_s or now - candidate.chosen_at >= RETRY_PERIODS * response_s
