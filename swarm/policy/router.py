"""Who gets the next microbatch of a stage: stochastic wiring (SWARM, section 3.2).

Interleaved weighted round-robin: each peer carries a virtual clock that advances by its expected
response time whenever it is chosen, and the peer whose clock is furthest behind is next. Over time
each peer gets work in proportion to its speed, interleaved rather than in bursts.

Pure: no clock, sockets or threads. Times are monotonic seconds given by the caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from swarm.ids import PeerId, Stage
from swarm.policy.bans import Bans

REMEMBERED = 5
"""Response times that count, by their median: three answers to follow a change of speed, while one that took
long once (a stopped process, a busy disk) is not held against a peer for hundreds of microbatches."""
GUESS_S = 0.1
"""Assumed response time of the very first peer, before anything is known."""
MUCH_SLOWER = 3.0
"""So many times slower than the fastest: it gets no microbatch that the step would end up waiting for.
Without this rule one peer that is 20 times slower made the steps of three others take 1.4 to 2.1 times as
long (8 to 128 microbatches a step, simulated); with it 1.0 to 1.05."""
SHORT_S = 0.05
"""A step may wait so long for anybody. What is this short is mostly the noise of a busy machine."""
TRY_AGAIN = 20.0
"""A peer that is kept out gets one microbatch in so many of its response times: it may have become faster. It
can hold up the run for a twentieth of the time by that."""


PACE_OF = 64
"""Answers from which the pace is taken."""
PACE_FROM = 16
"""Before so many answers nothing is known of the pace."""


class NoPeerForStage(Exception):
    """Nobody can be asked now; somebody may at `retry_at` (infinity: nobody is known at all)."""

    def __init__(self, stage: Stage, retry_at: float) -> None:
        known = "all of them are resting" if retry_at != float("inf") else "none is announced"
        super().__init__(f"no peer for stage {stage}: {known}")
        self.stage, self.retry_at = stage, retry_at


@dataclass(frozen=True, slots=True)
class Route:
    """Where one microbatch goes next, and why (for logs and dashboard)."""

    peer: PeerId
    expected_s: float
    why: str


@dataclass(slots=True)
class _Candidate:
    clock_s: float
    """Virtual time: the sum of expected response times of everything it was given."""
    times_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=REMEMBERED))
    """Of its last answers."""
    answers: int = 0
    chosen_at: float = float("-inf")

    @property
    def usual_s(self) -> float | None:
        """None before the first answer."""
        return sorted(self.times_s)[len(self.times_s) // 2] if self.times_s else None


class Router:
    """Weighted round-robin over the peers of each stage."""

    def __init__(self, bans: Bans | None = None) -> None:
        self.bans = bans if bans is not None else Bans()
        self._stages: dict[Stage, dict[PeerId, _Candidate]] = {}

    def set_peers(self, stage: Stage, peers: Iterable[PeerId]) -> None:
        """The peers that serve `stage` now. What is known of those that stay is kept.

        A newcomer starts at the furthest-behind clock of the others, so that it is tried soon, but
        is not flooded with everything that they ever got.
        """
        known = self._stages.setdefault(stage, {})
        wanted = set(peers)
        for gone in known.keys() - wanted:
            del known[gone]
        start = min((c.clock_s for c in known.values()), default=0.0)
        for new in sorted(wanted - known.keys()):
            known[new] = _Candidate(clock_s=start)

    def peers(self, stage: Stage) -> list[PeerId]:
        """Everybody known at `stage`, resting or not."""
        return sorted(self._stages.get(stage, {}))

    def answered(self, stage: Stage, peer: PeerId, took_s: float) -> None:
        """`peer` answered; `took_s` is its own response time, without the stages behind it."""
        self.bans.answered(peer)
        candidate = self._stages.get(stage, {}).get(peer)
        if candidate is not None:
            # The first answer pays for warming up; kept, it would starve a newcomer for long.
            if candidate.answers == 1:
                candidate.times_s.clear()
            candidate.times_s.append(took_s)
            candidate.answers += 1

    def failed(self, peer: PeerId, *, now: float, silent: bool = False) -> None:
        """`peer` missed its answer (`silent`) or broke the protocol: it rests."""
        self.bans.failed(peer, now=now, silent=silent)

    def route(
        self, stage: Stage, *, now: float, exclude: Collection[PeerId] = (), horizon_s: float = float("inf")
    ) -> Route:
        """Pick the peer whose virtual clock is furthest behind; ties go to the smallest id.

        `horizon_s`: until then the step has other work. A peer that would need longer, and is much slower
        than another, is left out: all would wait for it.

        Raises:
            NoPeerForStage: all are gone, excluded or resting; carries `retry_at`.
        """
        known = self._stages.get(stage, {})
        usable = [p for p in sorted(known) if p not in exclude and not self.bans.resting(p, now=now)]
        if not usable:
            waits = [self.bans.ends(p) for p in known]
            raise NoPeerForStage(stage, max(now, min(waits)) if waits else float("inf"))
        guess = self._guess_s(known)
        fastest = min(self._expected_s(known[p], guess) for p in usable)
        limit_s = max(horizon_s, MUCH_SLOWER * fastest, SHORT_S)
        usable = [p for p in usable if self._in_time(known[p], guess, limit_s, now)]
        peer = min(usable, key=lambda p: (known[p].clock_s + self._expected_s(known[p], guess), p))
        chosen = known[peer]
        expected_s = self._expected_s(chosen, guess)
        why = "first try"
        if chosen.times_s:
            why = f"{expected_s * 1e3:.0f} ms expected, its turn of {len(usable)}"
        # A peer that rested or was excluded for long must not be handed its whole backlog in one burst.
        behind = min(known[p].clock_s for p in usable)
        for candidate in known.values():
            candidate.clock_s = max(candidate.clock_s, behind)
        chosen.clock_s += expected_s
        chosen.chosen_at = now
        return Route(peer=peer, expected_s=expected_s, why=why)

    def _in_time(self, candidate: _Candidate, guess: float, limit_s: float, now: float) -> bool:
        expected_s = self._expected_s(candidate, guess)
        if len(candidate.times_s) < REMEMBERED:
            return True  # it may still be warming up: kept out now, it would stay cold
        return expected_s <= limit_s or now - candidate.chosen_at >= TRY_AGAIN * expected_s

    @staticmethod
    def _expected_s(candidate: _Candidate, guess: float) -> float:
        usual_s = candidate.usual_s
        return guess if usual_s is None else usual_s

    @staticmethod
    def _guess_s(known: dict[PeerId, _Candidate]) -> float:
        """A newcomer is expected to be as fast as the median of its stage."""
        times = sorted(usual_s for c in known.values() if (usual_s := c.usual_s) is not None)
        return times[len(times) // 2] if times else GUESS_S


class Pace:
    """How long what is left of a step will keep a trainer busy: `horizon_s` of `Router.route`.

    From the usual time between two answers. The waits at the ends of steps, of which a slow peer may be the
    cause, are few among them and do not count.
    """

    def __init__(self) -> None:
        self._gaps_s: deque[float] = deque(maxlen=PACE_OF)
        self._answered_at: float | None = None
        self._share = 1.0

    def answered(self, *, now: float) -> None:
        """A microbatch was answered."""
        if self._answered_at is not None:
            self._gaps_s.append(now - self._answered_at)
        self._answered_at = now

    def stepped(self, share: float) -> None:
        """A step is over, of which this trainer ran such a share; others ran the rest."""
        if share > 0:
            self._share = min(1.0, share)

    def horizon_s(self, left: int) -> float:
        """For so many microbatches that nobody has started."""
        if len(self._gaps_s) < PACE_FROM:
            return float("inf")
        return sorted(self._gaps_s)[len(self._gaps_s) // 2] * self._share * left
