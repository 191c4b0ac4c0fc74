"""The peers of one stage in the order of their turns, for `swarm.policy.router`. No choice looks at them all.

Each peer has a virtual clock, which advances by what it is expected to work whenever it is chosen. It is in
one of three places: in the queue, *late* (it would hold the step up) or *resting* (it failed). Entries of
heaps are not removed when a peer moves or changes, but known as old by their stamp when they come to the top.
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
from swarm.policy.bans import Bans

REMEMBERED = 5
"""Answers that count, by their median: three to follow a change of speed, while one that took long once (a
stopped process, a busy disk) is not held against a peer for hundreds of microbatches."""
GUESS_S = 0.1
"""Assumed of the very first peer, before anything is known."""
MUCH_SLOWER = 3.0
"""So many times slower than the fastest: it gets no microbatch that the step would end up waiting for.
Without this rule one peer that is 20 times slower made the steps of three others take 1.4 to 2.1 times as
long (8 to 128 microbatches a step, simulated); with it 1.0 to 1.05."""
SHORT_S = 0.05
"""A step may wait so long for anybody. What is this short is mostly the noise of a busy machine."""
TRY_AGAIN = 20.0
"""A peer that is kept out gets one microbatch in so many of its response times: it may have become faster. It
can hold up the run for a twentieth of the time by that."""

LOOKED_AT = 8
"""Turns among which the nearest is taken."""

_Entry: TypeAlias = "tuple[float, PeerId, int]"
"""What it is ordered by, whom it speaks of, and its stamp."""


@dataclass(slots=True)
class Candidate:
    """What is known of one peer."""

    peer: PeerId
    clock_s: float
    """Virtual time: the sum of what it was expected to work for everything it was given."""
    stamp: int = 0
    queued: bool = False
    answers: int = 0
    chosen_at: float = float("-inf")
    response_s: float = GUESS_S
    """Usual time from the call to the answer."""
    work_s: float = GUESS_S
    """Usual time of its device: as fast as that it can go on."""
    last_responses_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=REMEMBERED))
    last_works_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=REMEMBERED))

    @property
    def measured(self) -> bool:
        return bool(self.last_responses_s)

    def note(self, response_s: float, work_s: float) -> None:
        """Remember an answer. The first pays for warming up; kept, it would starve a newcomer for long."""
        if self.answers == 1:
            self.last_responses_s.clear()
            self.last_works_s.clear()
        self.last_responses_s.append(response_s)
        self.last_works_s.append(work_s)
        self.answers += 1
        self.response_s, self.work_s = median_high(self.last_responses_s), median_high(self.last_works_s)


class Turns:
    """Whose turn it is in one stage. Every call takes O(log n) but `set_peers`, which is for changes."""

    def __init__(self) -> None:
        self.known: dict[PeerId, Candidate] = {}
        self._stamps = itertools.count(1)
        self._by_turn: list[_Entry] = []
        """Of those that have answered: clock and work."""
        self._new: list[_Entry] = []
        """Of the others: the clock alone, since what they are expected to work changes for all at once."""
        self._by_clock: list[_Entry] = []
        self._responses_s: list[float] = []
        """Of all that are queued and have answered, ascending."""
        self._works_s: list[float] = []
        self._late: list[_Entry] = []
        """By response time."""
        self._tried_at: list[_Entry] = []
        """The same by when they get another try."""
        self._resting: set[PeerId] = set()
        self._bans_seen = -1
        self._look_again_at = float("inf")
        self._floor_s = 0.0
        """Who comes, or comes back, starts here: soon, but not with a backlog."""

    def set_peers(self, peers: Iterable[PeerId]) -> None:
        """Those that serve the stage now."""
        wanted = set(peers)
        for gone in self.known.keys() - wanted:
            self._take_out(self.known.pop(gone))
            self._resting.discard(gone)
        floor_s = self._floor()
        for new in sorted(wanted - self.known.keys()):
            self.known[new] = Candidate(new, floor_s)
            self._queue(self.known[new])

    def answered(self, peer: PeerId, response_s: float, work_s: float) -> None:
        """`peer` answered."""
        candidate = self.known.get(peer)
        if candidate is None:
            return
        queued = candidate.queued
        self._take_out(candidate)
        candidate.note(response_s, work_s)
        if queued or peer not in self._resting:
            self._queue(candidate)  # a late one, too: it may be fast now

    def next(
        self,
        bans: Bans,
        *,
        now: float,
        exclude: Collection[PeerId],
        horizon_s: float,
        way_s: Callable[[PeerId], float] | None = None,
    ) -> tuple[Candidate, float] | None:
        """Who is chosen, and what it is expected to work; None if nobody can be asked.

        `way_s`: what lies between. Of those whose turn is near, the one is taken to whom turn and way
        together are least. Whoever is passed over falls behind in its clock until that makes up for its way:
        all keep their share, and get it from where they are near. (Clocks are prices: Bertsekas' auction.)
        """
        self._wake_rested(bans, now)
        allowed_s, passed, best = 0.0, list[Candidate](), (math.inf, "")
        looked, chosen = 0, None
        while looked < (1 if way_s is None else LOOKED_AT):
            fastest_s = self._responses_s[0] if self._responses_s else GUESS_S
            limit_s = max(horizon_s, MUCH_SLOWER * fastest_s, SHORT_S, allowed_s)
            self._wake_late(limit_s, now)
            candidate = self._first()
            if candidate is None:
                if chosen is not None or not self._late_left():
                    break
                # Everybody else is away: the step has to wait for somebody.
                allowed_s = max(allowed_s, MUCH_SLOWER * self._late[0][0])
            elif candidate.peer in exclude:
                passed.append(candidate)
                self._drop_first(candidate)
            elif bans.resting(candidate.peer, now=now):
                self._rest(candidate, bans, now)
            elif not _in_time(candidate, limit_s, now):
                self._keep_out(candidate)
            else:
                looked += 1
                turn_s = candidate.clock_s + self._expected_s(candidate)
                rank = turn_s + (way_s(candidate.peer) if way_s is not None else 0.0), candidate.peer
                if chosen is None or rank < best:
                    best, chosen = rank, candidate
                passed.append(candidate)
                self._drop_first(candidate)
        for candidate in passed:
            self._push_turn(candidate)
        if chosen is None:
            return None
        work_s = self._expected_s(chosen)
        self._floor_s = self._floor()
        self._take_out(chosen)
        chosen.clock_s += work_s
        chosen.chosen_at = now
        self._queue(chosen)
        return chosen, work_s

    def _guess_s(self) -> float:
        """A newcomer is expected to be as fast as the median of its stage."""
        return self._works_s[len(self._works_s) // 2] if self._works_s else GUESS_S

    def _expected_s(self, candidate: Candidate) -> float:
        return candidate.work_s if candidate.measured else self._guess_s()

    def _floor(self) -> float:
        """The clock that is furthest behind in the queue."""
        self._clean(self._by_clock)
        return max(self._floor_s, self._by_clock[0][0]) if self._by_clock else self._floor_s

    # -- moving between the places ------------------------------------------------------------------

    def _queue(self, candidate: Candidate) -> None:
        candidate.queued, candidate.stamp = True, next(self._stamps)
        # One that rested, or was kept out, for long must not be handed its whole backlog in one burst.
        candidate.clock_s = max(candidate.clock_s, self._floor_s)
        heapq.heappush(self._by_clock, (candidate.clock_s, candidate.peer, candidate.stamp))
        self._push_turn(candidate)
        if candidate.measured:
            insort(self._responses_s, candidate.response_s)
            insort(self._works_s, candidate.work_s)

    def _push_turn(self, candidate: Candidate) -> None:
        entry = (candidate.clock_s, candidate.peer, candidate.stamp)
        if candidate.measured:
            heapq.heappush(self._by_turn, (entry[0] + candidate.work_s, *entry[1:]))
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
        again = candidate.chosen_at + TRY_AGAIN * candidate.response_s
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

    def _rest(self, candidate: Candidate, bans: Bans, now: float) -> None:
        self._take_out(candidate)
        self._resting.add(candidate.peer)
        self._look_again(bans, now)

    def _wake_rested(self, bans: Bans, now: float) -> None:
        if not self._resting or (bans.changes == self._bans_seen and now < self._look_again_at):
            return
        for peer in sorted(self._resting):
            if not bans.resting(peer, now=now):
                self._resting.remove(peer)
                self._queue(self.known[peer])
        self._look_again(bans, now)

    def _look_again(self, bans: Bans, now: float) -> None:
        self._bans_seen = bans.changes
        ends = [bans.ends(peer) for peer in self._resting]
        self._look_again_at = min((at for at in ends if at > now), default=float("inf"))

    # -- the heaps ----------------------------------------------------------------------------------

    def _first(self) -> Candidate | None:
        """Of the queue: the least clock with what it will work; of equal ones the smallest id."""
        self._clean(self._by_turn)
        self._clean(self._new)
        tops = [entry[:2] for entry in self._by_turn[:1]]
        tops += [(entry[0] + self._guess_s(), entry[1]) for entry in self._new[:1]]
        return self.known[min(tops)[1]] if tops else None

    def _drop_first(self, candidate: Candidate) -> None:
        heapq.heappop(self._by_turn if candidate.measured else self._new)

    def _clean(self, heap: list[_Entry]) -> None:
        """Let the top be one that still holds."""
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
    return response_s <= limit_s or now - candidate.chosen_at >= TRY_AGAIN * response_s
