"""Which peers coordinate while steps are late. Pure: times are given by the caller.

From outside nobody can tell a coordinator that holds a step up from one that others hold up. So each peer
charges all of them with late steps, and has others take turns: docs/design.md, *What one peer may cost*.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from swarm.ids import PeerId
from swarm.policy.backoff import STEPS, LostTime
from swarm.policy.timeouts import AdaptiveTimeout

LATE_S = 10.0
"""A step that is not late costs its coordinators nothing: it takes twice what one silent peer costs it."""
FIRST_LATE_S = 30.0
"""The same, before this peer has taken a step."""
FIRST_SHARE = 0.3
"""So much of the first step that was in time counts as usual: it may have waited for peers, or a cut."""
MAX_DOUBLED = 6
"""In its next turn each has twice the time, up to so often: where a step takes longer than
usual whoever coordinates, such as on machines that are busy, one turn is long enough in the end (as the views
of Castro and Liskov's PBFT, 1999)."""
SLEPT_S = 5.0
"""This peer itself was away for so long: it has not seen who held what up."""


class Rotation:
    """What the coordinators of a run cost it, as one peer sees it: those that cost too much rest."""

    def __init__(self) -> None:
        self._usual, self._lost = AdaptiveTimeout(min_s=LATE_S), LostTime()
        self._usual.expected_s = FIRST_LATE_S / 3
        self._stepped_s = self._seen_s = -math.inf
        self._since_s: dict[PeerId, float] = {}
        """Since when each of those that coordinate this step has done so."""
        self._overspent = Counter[PeerId]()
        """How often each has coordinated late steps, and cost too much."""
        self._in_time = 0
        """Steps in a row that were not late."""

    def stepped(self, *, now: float, alone: bool = True) -> None:
        """This peer has taken a step, or got its weights otherwise. `alone`: that was one step further; else
        it says nothing of how long steps take.
        """
        took_s, limit_s = now - self._stepped_s, self._usual.limit_s
        self._in_time = self._in_time + 1 if took_s <= limit_s else 0
        if self._in_time >= STEPS:
            self._overspent.clear()
        for peer in self._since_s if took_s > limit_s else ():
            self._overspent[peer] = 0  # the late step was taken under these
        if alone and took_s <= limit_s:
            self._usual.answered(took_s if self._usual.known else FIRST_SHARE * took_s)
        elif alone and took_s < math.inf:
            self._usual.gave_up(limit_s)
        self._stepped_s = now
        self._since_s = dict.fromkeys(self._since_s, now)

    def charge(self, coordinators: Iterable[PeerId], *, t: int, now: float) -> None:
        """Charge those that coordinate now, if step `t` is late. Called every second or so."""
        slept, self._seen_s = now - self._seen_s > SLEPT_S, now
        if slept:
            self._stepped_s, self._since_s = now, {}
        limit_s = self._usual.limit_s
        # One that was not reached before is charged from now on: after a cut all would rest, here and there.
        self._since_s = {peer: self._since_s.get(peer, now) for peer in coordinators}
        if now - self._stepped_s <= limit_s:
            return
        for peer, since_s in self._since_s.items():
            if now - since_s > limit_s * 2 ** min(self._overspent[peer], MAX_DOUBLED):
                rested = now < self._lost.rests_until_s(peer)
                if self._lost.charge(peer, t=t, since_s=since_s, now=now) and not rested:
                    self._overspent[peer] += 1

    def awake(self, peers: Sequence[PeerId], *, now: float) -> list[PeerId]:
        """Those of `peers` that may coordinate; if all rest, the one whose rest ends first.

        Of those that rested none, while others have had fewer turns, until `STEPS` steps in a row were in
        time: one that holds a step up would be back before the next one has found out who does, and left it
        out; or in the step after it.
        """
        rests_until_s = self._lost.rests_until_s
        awake = [peer for peer in peers if now >= rests_until_s(peer)]
        if self._overspent and awake:
            fewest = min(self._overspent[peer] for peer in awake)
            awake = [peer for peer in awake if self._overspent[peer] == fewest]
        return awake or sorted(peers, key=lambda peer: (rests_until_s(peer), peer))[:1]
