"""Router: picks the peer that gets the next microbatch of a stage. Stochastic wiring (SWARM, section 3.2).

Interleaved weighted round-robin: the peer whose virtual clock (`swarm.policy.fair_queue`) is furthest behind
is next. Pure: no clock, sockets or threads. Times are monotonic seconds given by the caller.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence

from swarm.ids import PeerId, Stage
from swarm.policy.backoff import Backoff
from swarm.policy.fair_queue import Candidate, FairQueue, Teller

PACE_OF = 64
"""Answers in the measured pace."""
PACE_FROM = 16
"""With fewer answers the pace is unknown."""
FIRST_PAUSE_S, MAX_PAUSE_S = 30.0, 600.0
"""How long no unknown peer is tried after one that did not answer: at first, and at most."""


class NoPeerForStage(Exception):
    """No peer of the stage can be asked before `retry_at` (infinity: none is known at all)."""

    def __init__(self, stage: Stage, retry_at: float) -> None:
        known = "all of them are in backoff" if retry_at != float("inf") else "none is announced"
        super().__init__(f"no peer for stage {stage}: {known}")
        self.stage, self.retry_at = stage, retry_at


class Trials:
    """How many peers of a stage that have never answered one caller may be tried.

    Identities cost nothing: a hundred that take work and never answer would each cost a run what one may. So
    of the unknown one is tried, two more once it answers, and so on, as long as they answer: the number of
    the known doubles with each microbatch; after half a minute it is one again. After one that does not
    answer none is tried for a while, twice as long each time.
    """

    def __init__(self) -> None:
        self._room, self._pause_s = 1, FIRST_PAUSE_S
        self._since_s = float("-inf")
        self._open = Counter[PeerId]()
        """Microbatches at peers that have not answered any."""

    def may(self, *, now: float) -> bool:
        """Whether an unknown peer may get a microbatch."""
        if now - self._since_s >= self._pause_s:
            if self._open:
                self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s)
            self._room = 1
            self._open.clear()
        return self._open.total() < self._room

    def began(self, peer: PeerId, *, now: float) -> None:
        """Note that `peer`, which is unknown, was given a microbatch."""
        if not self._open:
            self._since_s = now
        self._open[peer] += 1

    def answered(self, peer: PeerId) -> None:
        """Note that `peer` answered for the first time. What else it was given is not waited for here."""
        del self._open[peer]
        self._room, self._pause_s = self._room + 1, FIRST_PAUSE_S

    def lapsed(self, peer: PeerId, *, now: float) -> None:
        """Note that `peer`, which was known, did not answer: it is not tried again at once."""
        self._room, self._since_s = 1, now
        self._open[peer] += 1

    def refused(self, peer: PeerId) -> None:
        """Note that `peer` said no, or is gone: that takes little time, so others may be tried instead."""
        del self._open[peer]


class Router:
    """Weighted round-robin over the peers of each stage."""

    def __init__(self, backoff: Backoff | None = None, *, caller: PeerId = "") -> None:
        """`caller`: whose router this is, so that not all prefer the same among equals."""
        self._caller = caller
        self.backoff = backoff if backoff is not None else Backoff()
        self._stages: dict[Stage, FairQueue] = {}
        self._trials = defaultdict[Stage, Trials](Trials)

    def set_peers(self, stage: Stage, peers: Iterable[PeerId]) -> None:
        """Replace the peers that serve `stage`. Measurements of those that stay are kept.

        A newcomer starts at the smallest clock of the others, so that it is tried soon but not flooded with
        everything that they ever got.
        """
        self._stages.setdefault(stage, FairQueue(self._caller)).set_peers(peers)

    def peers(self, stage: Stage) -> list[PeerId]:
        """All peers known at `stage`, in backoff or not."""
        return sorted(self._queue_of(stage).known)

    def count(self, stage: Stage) -> int:
        """The number of these; 0 before the first stage, and behind the last."""
        return len(self._queue_of(stage).known)

    def knows(self, stage: Stage, peer: PeerId) -> bool:
        """Whether `peer` has answered here."""
        return (candidate := self._queue_of(stage).known.get(peer)) is not None and candidate.measured

    def times_s(self, stage: Stage, peer: PeerId) -> Sequence[float]:
        """How long `peer` took lately; nothing: unknown."""
        candidate = self._queue_of(stage).known.get(peer)
        return candidate.last_times_s if candidate is not None else ()

    def answering(self, stage: Stage) -> list[PeerId]:
        """The peers of `stage` that have answered here; all, if none has."""
        there = self.peers(stage)
        return [peer for peer in there if self.knows(stage, peer)] or there

    def answered(
        self, stage: Stage, peer: PeerId, work_s: float, took_s: float = 0.0, *, by: Teller = (),
        own_s: float = 0.0, now: float = 0.0, share: float = 1.0,
    ) -> None:  # fmt: skip
        """Record an answer of `peer`, for which its device worked so long, and all stages together `took_s`;
        `by` to `share`: see `FairQueue.answered`.

        Waits do not count, unless they are very long: a peer that has a queue would get less than it can do.
        """
        self.backoff.answered(peer)
        if not self.knows(stage, peer):
            self._trials[stage].answered(peer)
        self._queue_of(stage).answered(peer, work_s, took_s, by, own_s, now, share)

    def failed(self, peer: PeerId, *, now: float, silent: bool = False) -> None:
        """Put `peer` into backoff: it missed its answer (`silent`) or broke the protocol."""
        self.backoff.failed(peer, now=now, silent=silent)
        if silent:
            for stage, queue in self._stages.items():
                if self.knows(stage, peer):
                    queue.forget(peer)
                    self._trials[stage].lapsed(peer, now=now)
        else:
            for trials in self._trials.values():
                trials.refused(peer)

    def passed_by(self, stage: Stage, peer: PeerId, took_s: float) -> None:
        """Note that another peer of `stage` answered what was meant for this one, `took_s` after the start.

        If that was soon, nothing was waited for: its caller did not know it yet, or it said no.
        """
        if self._queue_of(stage).is_soon(took_s):
            self._trials[stage].refused(peer)

    def route(
        self, stage: Stage, *, now: float, exclude: Collection[PeerId] = (), horizon_s: float = float("inf"),
        latency_s: Callable[[PeerId], float] | None = None, known: bool = False,
    ) -> Candidate:  # fmt: skip
        """Pick the peer whose virtual clock is furthest behind. O(log n).

        `horizon_s`: how long the step still has other work. A much slower peer that would need longer is left
        out, because all would wait for it. `latency_s`: seconds on the link to a peer, with what is under way
        on it; cheap ones are preferred, and none gets less than its share. `known`: one that has answered, if
        there is any.

        Raises:
            NoPeerForStage: all are gone, excluded or in backoff; carries `retry_at`.
        """
        queue = self._queue_of(stage)

        def choose(*, new: bool) -> Candidate | None:
            return queue.next(
                self.backoff, now=now, exclude=exclude, horizon_s=horizon_s, latency_s=latency_s, new=new
            )

        trials = self._trials[stage]
        found = choose(new=False) if known or not trials.may(now=now) else None
        found = found or choose(new=True)
        if found is None and self.backoff.relent(queue.known, now=now):
            found = choose(new=True)
        if found is None:
            waits = [self.backoff.ends(p) for p in queue.known]
            raise NoPeerForStage(stage, max(now, min(waits)) if waits else float("inf"))
        if not found.measured:
            trials.began(found.peer, now=now)
        return found

    def _queue_of(self, stage: Stage) -> FairQueue:
        return self._stages.get(stage) or FairQueue()


class Pace:
    """Pace of a trainer's answers, from which follows how long the rest of a step takes (`horizon_s`).

    Taken from the median time between two answers. The waits at the ends of steps, which a slow peer may
    cause, are few among them and do not count.
    """

    def __init__(self) -> None:
        self._gaps_s: deque[float] = deque(maxlen=PACE_OF)
        self._answered_at: float | None = None
        self.share = 1.0
        """Of the microbatches of the last step."""

    def answered(self, *, now: float) -> None:
        if self._answered_at is not None:
            self._gaps_s.append(now - self._answered_at)
        self._answered_at = now

    def stepped(self, share: float) -> None:
        """Record the share of the last step's microbatches that this trainer ran."""
        if share > 0:
            self.share = min(1.0, share)

    def horizon_s(self, left: int) -> float:
        """Expected seconds for `left` microbatches that no trainer has started."""
        if len(self._gaps_s) < PACE_FROM:
            return float("inf")
        return sorted(self._gaps_s)[len(self._gaps_s) // 2] * self.share * left
