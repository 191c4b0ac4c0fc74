"""Who gets the next microbatch of a stage: stochastic wiring (SWARM, section 3.2).

Interleaved weighted round-robin: each peer carries a virtual clock that advances by its expected
work whenever it is chosen, and the peer whose clock is furthest behind is next. Over time each peer
gets work in proportion to its speed, interleaved rather than in bursts.

Pure: no clock, sockets or threads. Times are monotonic seconds given by the caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from swarm.ids import PeerId, Stage
from swarm.policy.bans import Bans
from swarm.policy.turns import Turns

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
    """Work of its device."""
    why: str


class Router:
    """Weighted round-robin over the peers of each stage."""

    def __init__(self, bans: Bans | None = None) -> None:
        self.bans = bans if bans is not None else Bans()
        self._stages: dict[Stage, Turns] = {}

    def set_peers(self, stage: Stage, peers: Iterable[PeerId]) -> None:
        """The peers that serve `stage` now. What is known of those that stay is kept.

        A newcomer starts at the furthest-behind clock of the others, so that it is tried soon, but
        is not flooded with everything that they ever got.
        """
        self._stages.setdefault(stage, Turns()).set_peers(peers)

    def peers(self, stage: Stage) -> list[PeerId]:
        """Everybody known at `stage`, resting or not."""
        return sorted(self._turns(stage).known)

    def answered(self, stage: Stage, peer: PeerId, took_s: float, work_s: float | None = None) -> None:
        """`peer` answered.

        `took_s` is its own response time, without the stages behind it; for `work_s` of it its device worked.
        A peer gets work by the latter: the former has waits in it, so that whoever happens to have a queue
        would get less than it can do, and the others get the queue.
        """
        self.bans.answered(peer)
        self._turns(stage).answered(peer, took_s, took_s if work_s is None else work_s)

    def failed(self, peer: PeerId, *, now: float, silent: bool = False) -> None:
        """`peer` missed its answer (`silent`) or broke the protocol: it rests."""
        self.bans.failed(peer, now=now, silent=silent)

    def route(
        self,
        stage: Stage,
        *,
        now: float,
        exclude: Collection[PeerId] = (),
        horizon_s: float = float("inf"),
        way_s: Callable[[PeerId], float] | None = None,
    ) -> Route:
        """Pick the peer whose virtual clock is furthest behind; ties go to the smallest id.

        `horizon_s`: until then the step has other work. A peer that would need longer, and is much slower
        than another, is left out: all would wait for it. `way_s`: seconds on the line to a peer; near ones
        are preferred, and none gets less than its share. O(log n).

        Raises:
            NoPeerForStage: all are gone, excluded or resting; carries `retry_at`.
        """
        turns = self._turns(stage)
        found = turns.next(self.bans, now=now, exclude=exclude, horizon_s=horizon_s, way_s=way_s)
        if found is None:
            waits = [self.bans.ends(p) for p in turns.known]
            raise NoPeerForStage(stage, max(now, min(waits)) if waits else float("inf"))
        chosen, expected_s = found
        why = "first try"
        if chosen.measured:
            why = f"{expected_s * 1e3:.0f} ms expected, its turn of {len(turns.known)}"
        return Route(peer=chosen.peer, expected_s=expected_s, why=why)

    def _turns(self, stage: Stage) -> Turns:
        return self._stages.get(stage) or Turns()


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
