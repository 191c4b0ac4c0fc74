"""Fair queue over the peers of one stage, for `swarm.policy.router`. A choice looks at few of them.

Each peer has a virtual clock that advances by its expected work whenever it is chosen. A peer is in one of
three places: in the queue, *late* (it would hold the step up) or *in backoff* (it failed).
"""

from __future__ import annotations

import hashlib
import heapq
import math
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median_high
from typing import Any, Literal, TypeAlias

from swarm.ids import PeerId
from swarm.policy.backoff import Backoff

REMEMBERED = 5
"""Answers in the median: three follow a change of speed, while a single slow one (a stopped process, a busy
disk) is not held against a peer for hundreds of microbatches."""
TOLD = 3 * REMEMBERED
"""Answers in all, by whichever peers told of them."""
DEFAULT_WORK_S = 0.1
"""Assumed of the first peer, before anything is measured."""
MUCH_SLOWER = 3.0
"""A peer this many times slower than the fastest gets no microbatch that the step would end up waiting for.
Without this rule one peer that is 20 times slower made the steps of three others take 1.4 to 2.1 times as
long (8 to 128 microbatches a step, simulated); with it 1.0 to 1.05."""
NEGLIGIBLE_S = 0.05
"""A step may wait this long for any peer: shorter differences are mostly the noise of a busy machine."""
RETRY_PERIODS = 20.0
"""A late peer gets one microbatch per this many of its work times, because it may have become faster. So
it can hold up the run for a twentieth of the time."""
MUCH_LATER_S = 1.0
"""Added to three times what microbatches take by way of the fastest peer of a stage. What they take longer by
way of another counts as its work. In 20 steps what is left takes less than the 30 s that one may cost."""
Teller: TypeAlias = tuple[PeerId, ...]
"""The peers by which an answer came: what they say of it is counted as one word."""
BELIEVED = 2.0
"""A peer may say that it is so much faster than it has shown to be while microbatches waited there, and may
have them wait for so much longer than the others of its stage do."""
FORGOTTEN = 1 / 32
"""With each answer what a peer has shown counts less by so much: it is given more, and shows again."""
LONGER = 1 / 1000
"""By so much of the time that goes by the least grows that microbatches took by way of a peer, as that of all
others. Each step begins with some that do not wait."""
COMPARED = 8
"""Candidates among which the nearest is picked."""


@dataclass(slots=True)
class Candidate:
    """Scheduling state of one peer."""

    peer: PeerId
    tie: bytes
    """Decides between equals; another one at each caller, or all would send to the same peers at once."""
    clock_s: float
    """Virtual time: the sum of the expected work of everything it was given."""
    place: Literal["queue", "late", "backoff"] = "queue"
    answers: int = 0
    chosen_at: float = float("-inf")
    work_s: float = DEFAULT_WORK_S
    """Median time of its device, without waits: those of a busy hour differ by where in a queue one was."""
    last_works_s: deque[tuple[Teller, float]] = field(default_factory=lambda: deque(maxlen=TOLD))
    last_times_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=REMEMBERED))
    least_s: float = float("inf")
    """The shortest of `last_times_s`, all stages included: in one of them no other stage was late."""
    quickest_s: float = float("inf")
    """The shortest of all that it took, which grows a little with time: `LONGER`."""
    wait_s: float = float("inf")
    """How much longer its microbatches take now; infinity: not known yet."""
    answered_at: float = float("-inf")
    last_gaps_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=REMEMBERED))
    """Between its answers, while microbatches waited for it and not for others; 0: none did."""
    shown_s: float = 0.0
    """What its device took in truth, by these."""

    @property
    def measured(self) -> bool:
        return bool(self.last_works_s)

    def note(self, work_s: float, by: Teller, own_s: float) -> None:
        """Remember an answer; not the first, which pays for warming up and would starve a newcomer.

        One of several that tell may lie: each counts once, and so does what the peer says itself.
        """
        if self.answers == 1:
            self.last_works_s.clear()
        self.last_works_s.append((by, work_s))
        self.answers += 1
        told = defaultdict[Teller, list[float]](list)
        for teller, took_s in self.last_works_s:
            told[teller].append(took_s)
        each_s = [median_high(works_s[-REMEMBERED:]) for works_s in told.values()]
        self.work_s = median_high(each_s + [own_s] * (own_s > 0.0 and len(each_s) > 1))

    def waited(self, others_s: float, gap_s: float, share: float) -> None:
        """Note how long the last microbatches waited, `gap_s` after the answer before; those of others did
        for `others_s`.

        What a device takes is its peer's word, and so is what a route takes behind it. How long all of it
        took, and when it ended, its caller knows: one that says that it needs no time draws all work of its
        stage, which then waits for it and for no other, and ends as fast as it can in truth.
        """
        self.quickest_s = min(self.least_s, self.quickest_s + LONGER * gap_s)
        self.wait_s = median_high(self.last_times_s) - self.quickest_s
        if others_s < math.inf:
            wait_s = min(self.wait_s, self.last_times_s[-1] - self.quickest_s)
            self.last_gaps_s.append(max(0.0, min(share * gap_s, wait_s - BELIEVED * others_s)))
            mean_s = (math.fsum(self.last_gaps_s) - max(self.last_gaps_s)) / (REMEMBERED - 1)
            self.shown_s = max(mean_s, self.shown_s * (1.0 - FORGOTTEN))
        if self.shown_s > BELIEVED * self.work_s:
            self.work_s = self.shown_s

    def in_time(self, limit_s: float, now: float) -> bool:
        """Whether it does not hold the step up, or is to be tried again all the same."""
        if len(self.last_works_s) < REMEMBERED:
            return True  # it may still be warming up: kept out now, it would stay cold
        return self.work_s <= limit_s or now - self.chosen_at >= RETRY_PERIODS * self.work_s


class FairQueue:
    """Weighted fair queue of one stage's peers."""

    def __init__(self, caller: PeerId = "") -> None:
        self._caller = caller
        self.known: dict[PeerId, Candidate] = {}
        # Of the peers in the queue, each ascending:
        self._by_finish: list[tuple[float, bytes, PeerId]] = []
        """Measured ones by virtual finish time (clock plus work)."""
        self._new: list[tuple[float, bytes, PeerId]] = []
        """Unmeasured ones by clock alone: their expected work changes for all of them at once."""
        self._clocks_s: list[float] = []
        self._works_s: list[float] = []
        """Of measured ones."""
        self._waits_s: list[float] = []
        """Of the peers for which it is known."""
        self._late: set[PeerId] = set()
        self._changes_seen = -1
        self._backoff_ends_at = float("inf")
        """When the next one ends that ends by time."""
        self._floor_s = 0.0
        """Clock of new and returning peers: they are chosen soon, but not with a backlog."""

    def set_peers(self, peers: Iterable[PeerId]) -> None:
        wanted = set(peers)
        for gone in self.known.keys() - wanted:
            self._put(self.known[gone], "late")
            self._late.discard(gone)
            del self.known[gone]
        floor_s = self._floor()
        for new in sorted(wanted - self.known.keys()):
            tie = hashlib.sha256(f"{self._caller} {new}".encode()).digest()
            self.known[new] = Candidate(new, tie, floor_s, "late")
            self._put(self.known[new], "queue")
            self._changes_seen = -1  # it may be in backoff

    def answered(
        self, peer: PeerId, work_s: float, took_s: float = 0.0, by: Teller = (), own_s: float = 0.0,
        now: float = 0.0, share: float = 1.0,
    ) -> None:  # fmt: skip
        """Record an answer of `peer`; `took_s`: with all stages. `by`: the others that its `work_s` came
        through; `own_s`: what it says usually; 0: nothing. `share`: of what its stage does, by this caller.
        """
        if (candidate := self.known.get(peer)) is None:
            return
        place = candidate.place
        self._put(candidate, "backoff")
        candidate.note(work_s, by, own_s)
        candidate.last_times_s.append(took_s)
        gap_s, candidate.answered_at = now - candidate.answered_at, now
        if took_s and len(candidate.last_times_s) == REMEMBERED:
            candidate.least_s = min(candidate.last_times_s)
            fastest_s = min(one.least_s for one in self.known.values())
            late_s = candidate.least_s - MUCH_SLOWER * fastest_s - MUCH_LATER_S
            candidate.work_s = max(candidate.work_s, late_s)
            waits_s = self._waits_s or [0.0] * bool(self._works_s)  # of others; if they get nothing, none
            candidate.waited(waits_s[len(waits_s) // 2] if waits_s else math.inf, gap_s, share)
        if place != "backoff":
            self._put(candidate, "queue")  # a late one, too: it may be fast now

    def forget(self, peer: PeerId) -> None:
        """Take a peer for one that has never answered: it is tried again by one microbatch."""
        if (candidate := self.known.get(peer)) is not None:
            place = candidate.place
            self._put(candidate, "backoff")
            new = Candidate(peer, candidate.tie, candidate.clock_s, "backoff", chosen_at=candidate.chosen_at)
            self.known[peer] = new
            self._put(new, place)

    def is_soon(self, took_s: float) -> bool:
        """Whether a microbatch came back about as fast as those that were fastest."""
        times_s = (min(one.last_times_s, default=math.inf) for one in self.known.values())
        return took_s <= MUCH_SLOWER * min(times_s, default=math.inf) + MUCH_LATER_S

    def next(
        self, backoff: Backoff, *, now: float, exclude: Collection[PeerId], horizon_s: float,
        latency_s: Callable[[PeerId], float] | None = None, new: bool = True,
    ) -> Candidate | None:  # fmt: skip
        """Choose a peer; None if none can be asked.

        `new`: one that has not answered yet may be chosen.

        Among the next eight candidates, pick the smallest virtual finish time plus price of the link
        (`latency_s`). The clock of a skipped peer falls behind until that makes up for the price: all keep
        their share, and get it from where they are near. (Clocks are prices: Bertsekas' auction.)
        """
        self._follow(backoff, now)
        fastest_s = self._works_s[0] if self._works_s else DEFAULT_WORK_S
        limit_s = max(horizon_s, MUCH_SLOWER * fastest_s, NEGLIGIBLE_S)
        while (chosen := self._nearest(limit_s, now, exclude, latency_s, new)) is None:
            if not self._late:
                return None
            # All others are away: the step has to wait for a late peer.
            limit_s = max(limit_s, MUCH_SLOWER * min(self.known[peer].work_s for peer in self._late))
        work_s = chosen.work_s if chosen.measured else self._default_work_s()
        self._floor_s = self._floor()
        self._put(chosen, "backoff")
        chosen.clock_s += work_s
        chosen.chosen_at = now
        self._put(chosen, "queue")
        return chosen

    def _nearest(
        self, limit_s: float, now: float, exclude: Collection[PeerId],
        latency_s: Callable[[PeerId], float] | None, new: bool,
    ) -> Candidate | None:  # fmt: skip
        """The best of the next candidates that answer in time; those that do not are late from now on."""
        for peer in sorted(self._late):
            if self.known[peer].in_time(limit_s, now):
                self._put(self.known[peer], "queue")
        found: list[tuple[float, bytes, PeerId]] = []
        late: list[Candidate] = []
        for finish_s, tie, peer in self._in_turn() if new else self._by_finish:
            if peer in exclude:
                continue
            if not self.known[peer].in_time(limit_s, now):
                late.append(self.known[peer])
                continue
            found.append((finish_s + (latency_s(peer) if latency_s is not None else 0.0), tie, peer))
            if latency_s is None or len(found) == COMPARED:
                break
        for candidate in late:
            self._put(candidate, "late")
        return self.known[min(found)[2]] if found else None

    def _in_turn(self) -> Iterator[tuple[float, bytes, PeerId]]:
        """(virtual finish time, tie, peer) of those in the queue."""
        default_s = self._default_work_s()
        new = ((clock_s + default_s, tie, peer) for clock_s, tie, peer in self._new)
        return heapq.merge(self._by_finish, new)

    def _default_work_s(self) -> float:
        """The expected work of a newcomer: the median of its stage."""
        return self._works_s[len(self._works_s) // 2] if self._works_s else DEFAULT_WORK_S

    def _floor(self) -> float:
        return max(self._floor_s, self._clocks_s[0]) if self._clocks_s else self._floor_s

    def _follow(self, backoff: Backoff, now: float) -> None:
        """Put peers into backoff and back, if that may have changed."""
        if backoff.changes == self._changes_seen and now < self._backoff_ends_at:
            return
        self._changes_seen, self._backoff_ends_at = backoff.changes, float("inf")
        for peer, candidate in sorted(self.known.items()):
            if backoff.in_backoff(peer, now=now):
                self._put(candidate, "backoff")
                ends_at = backoff.ends(peer)
                self._backoff_ends_at = min(self._backoff_ends_at, ends_at if ends_at > now else float("inf"))
            elif candidate.place == "backoff":
                self._put(candidate, "queue")

    def _put(self, candidate: Candidate, place: Literal["queue", "late", "backoff"]) -> None:
        """Move a peer from where it is. What the queue is sorted by changes only while it is not there."""
        if candidate.place == "queue":
            for entries, entry in self._entries(candidate):
                del entries[bisect_left(entries, entry)]
        self._late.discard(candidate.peer)
        candidate.place = place
        if place == "late":
            self._late.add(candidate.peer)
        elif place == "queue":
            # A peer that was late or in backoff for long must not get its whole backlog in one burst.
            candidate.clock_s = max(candidate.clock_s, self._floor_s)
            for entries, entry in self._entries(candidate):
                insort(entries, entry)

    def _entries(self, candidate: Candidate) -> Iterator[tuple[list[Any], Any]]:
        """The sorted lists that have something of a peer in the queue, and what."""
        yield self._clocks_s, candidate.clock_s
        if candidate.wait_s < math.inf:
            yield self._waits_s, candidate.wait_s
        if candidate.measured:
            yield self._by_finish, (candidate.clock_s + candidate.work_s, candidate.tie, candidate.peer)
            yield self._works_s, candidate.work_s
        else:
            yield self._new, (candidate.clock_s, candidate.tie, candidate.peer)
