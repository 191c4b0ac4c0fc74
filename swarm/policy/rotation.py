"""Which peers coordinate: each in its turn. Pure: times are given by the caller.

No replica can tell a coordinator that holds a step up from one that others hold up. So replicas of a stage
take turns: by the number of the step, since only under others it shows how long steps need not take, and by
how long late steps have lasted, which all see alike: docs/design.md, *What one peer may cost*.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from swarm.ids import PeerId
from swarm.policy.backoff import STEPS
from swarm.policy.timeouts import TIMES_EXPECTED, AdaptiveTimeout

TURN_STEPS = 64
"""Steps of a turn; of the first turns fewer, since nothing is known yet."""
COMPARED = 3
"""Turns: so many in a row are never all one replica's, while steps are in time (`_drawn`)."""
LEAST_STEPS = 3
"""A turn of fewer is counted with the next one."""
LATE_S = 10.0
"""A step that is not late costs its coordinators nothing: it takes twice what one silent peer costs it. Of
the last `STEPS` those that are slow are late together: else each may take as long."""
SLOW_S = 1.0
"""In 20 steps so much of each is less than the 30 s that one may cost."""
TIMES_SLOW = 3.0
KNOWN_STEPS = 5
"""With fewer steps it is not known how long they usually take."""
FIRST_LATE_S = 30.0
"""A step is late after so long for a peer that came to a run that goes on, and has taken none yet."""
TURN_S = 25.0
"""A coordinator has so long for late steps before another gets its turn."""
FIRST_TURN_S = TURN_S / 2
"""Its coordinator may hold two rounds up besides, 5 s each. Later turns are longer: there is time to see
which replica does that, and to do its work again."""
FIRST_SHARE = 0.3
"""So much of the first step that tells how long steps take counts as usual: it may have waited for a cut."""
MAX_DOUBLED = 6
"""In its next turn each has twice the time, up to so often: where a step takes long under any coordinator, as
on busy machines, one is long enough in the end (as the views of Castro and Liskov's PBFT, 1999)."""
SLEPT_S = 5.0
"""This peer itself was away for so long: it has not seen which peer held what up."""
TOGETHER_S = 0.5
"""A turn that was over for one, whereupon the step ended, was over for all: they count up to the end of the
step and so much longer, since they began to at moments that are so near."""


def turn_of(version: int) -> int:
    """In which turn the step is taken that leads on from a version, if none is late."""
    return min(version.bit_length(), TURN_STEPS.bit_length() - 1) + version // TURN_STEPS


@lru_cache(maxsize=256)
def _drawn(peers: tuple[PeerId, ...], turn: int) -> list[PeerId]:
    """The order in which peers may coordinate in a turn: in both turns of a pair it begins with another one.
    Drawn, so that of those that come and go only the coordinator itself is missed.
    """
    pair, second = divmod(turn, 2)
    order = list(peers)
    if pair:
        order.sort(key=lambda peer: hashlib.sha256(f"{pair}|{peer}".encode()).digest())
    return order[::-1] if second else order


class Rotation:
    """Whose turn it is to coordinate, as one peer sees it."""

    def __init__(self) -> None:
        self._by_steps = 0
        """The turn by the number of the step; the last one before late steps used a turn up."""
        first = AdaptiveTimeout(min_s=LATE_S)
        first.expected_s = FIRST_LATE_S / TIMES_EXPECTED
        self._lasted, self._usual = deque([first], maxlen=COMPARED), first
        """How long steps took in each of the last turns; and in the one in which they took least."""
        self._noted, self._noted_steps = (0, 0), 0
        """The last of these turns, and how many steps it had."""
        self._stepped_s = self._seen_s = self._counted_s = -math.inf
        self._used = self._used_before = 0.0
        """How many turns of the first length late steps have used up; the same at the last step."""
        self._taken_back = False
        """Since the last step."""
        self._ahead = 3
        """As of the last step: `stepped`. 3: the next tells nothing. The first may have waited for peers."""
        self._begun = False
        self._slow_s = deque[float](maxlen=STEPS)
        """How long the slow ones of the last steps took; 0 for each of the others."""

    @property
    def late(self) -> bool:
        """Whether a step is late, or one was since the last `STEPS` in time: turns may differ."""
        return self._used > 0.0

    def expects(self, first_s: float, *, begun: bool, now: float) -> None:
        """The first step of a run should take so long. Once this peer has something of it (`begun`), what was
        before counts no more: peers come one by one, and each has waited for another time.
        """
        self._lasted[0].expected_s = first_s
        if begun and not self._begun:
            self._begun, self._used, self._stepped_s, self._counted_s = True, 0.0, now, now

    def at(self, version: int) -> None:
        """This peer is at a version, which says whose turn it is unless late steps have used a turn up."""
        if self._used < 1.0:  # others may have seen less, or nothing, of a step that was late for this peer
            self._by_steps = turn_of(version)

    def stepped(self, *, now: float, steps: int = 1, ahead: int = 0) -> None:
        """This peer has taken a step, caught up by several, or got weights of no later step. `ahead`: most of
        the others had not yet taken it (0), had (1), are one further (2), or more (3).

        A step of which it was told later than of the one before, or less late, says not how long steps take.
        Several together do, if the others were at most one further before.
        """
        took_s, limit_s = now - self._stepped_s, self._usual.limit_s
        self._new_turn()
        if steps > 1:
            self._used = self._used_before  # what was late was so for this peer only
        alone = steps == 1 and ahead < 2
        saw = alone and now - self._seen_s <= SLEPT_S
        if saw and self._is_late(took_s):
            self._count(now)
            self._used = max(self._used, float(int(self._used + TOGETHER_S / self._turn_s)))
        self._slow_s.append(took_s if saw and took_s > self._slow_at_s else 0.0)
        if len(self._slow_s) == STEPS and sum(self._slow_s) <= limit_s:
            self._used = 0.0
        tells = self._ahead < 3 if steps > 1 else alone and ahead == self._ahead
        each_s, self._ahead = took_s / max(1, steps - 1), ahead
        if tells and each_s <= limit_s:
            self._noted_steps += 1
            self._lasted[-1].answered(each_s if self._lasted[-1].known else FIRST_SHARE * each_s)
        elif alone and limit_s < took_s < math.inf:
            self._noted_steps += 1
            self._lasted[-1].gave_up(limit_s)
        *before, _ = self._lasted
        known = before if before and self._noted_steps < LEAST_STEPS else self._lasted
        self._usual = min(known, key=lambda turn: (turn.limit_s, turn.typical_s))
        self._stepped_s = self._counted_s = now
        self._used_before, self._taken_back = self._used, False

    def waits(
        self, *, now: float, leads: bool = False, passed: Callable[[], bool] = lambda: False
    ) -> int | None:
        """Count the time of a step that is late, each second or so. `leads`: the turn is this peer's own.
        `passed`: whether others have taken that step, so that it was late for this peer only. Returns the
        turn in which the step became late just now, or after which another one began.
        """
        limit_s, turn = self._usual.limit_s, int(self._used)
        was_late = self.late and not self._seen_s - self._stepped_s <= limit_s < now - self._stepped_s
        if now - self._seen_s > SLEPT_S:
            self._ahead = 3 if self._seen_s > -math.inf else self._ahead  # it has not seen the whole step
            self._stepped_s = self._counted_s = now
        self._seen_s = now
        if not self._is_late(now - self._stepped_s):
            return None
        if passed() and not (leads and self._taken_back):  # in its own turn they do not follow it
            self._used, self._stepped_s, self._taken_back = self._used_before, now, True
        else:
            self._count(now)
        self._counted_s = now
        return None if was_late and int(self._used) == turn else turn

    def _new_turn(self) -> None:
        """Begin to note how long steps take in another turn, if it is one."""
        turn = self._by_steps, int(self._used_before)
        if turn != self._noted and self._noted_steps >= LEAST_STEPS:
            self._lasted.append(AdaptiveTimeout(min_s=LATE_S))
            self._lasted[-1].known = True
            self._noted_steps = 0
        self._noted = turn

    @property
    def _slow_at_s(self) -> float:
        """A step that takes longer counts, if others did so too."""
        known = len(self._slow_s) >= KNOWN_STEPS
        return max(SLOW_S, TIMES_SLOW * self._usual.typical_s) if known else self._usual.limit_s

    def _is_late(self, took_s: float) -> bool:
        """Whether a step is late that takes so long: by itself, or together with other slow ones."""
        return took_s > self._slow_at_s and (self.late or sum(self._slow_s) + took_s > self._usual.limit_s)

    @property
    def _turn_s(self) -> float:
        return max(TURN_S if self._used >= 1.0 else FIRST_TURN_S, self._usual.limit_s)

    def _count(self, now: float) -> None:
        """Count the time up to now; first what was slow before, too, but of the next turn what is late."""
        if self._counted_s == self._stepped_s:
            before_s = 0.0 if self.late else sum(self._slow_s)
            late_s = max(self._slow_at_s, 0.0 if self.late else self._usual.limit_s - before_s)
            self._counted_s += min(late_s, now - self._stepped_s)
            before_s += self._counted_s - self._stepped_s
            self._used = min(int(self._used) + 1.0, self._used + before_s / self._turn_s)
        self._used += (now - self._counted_s) / self._turn_s

    def in_turn(
        self, peers: Sequence[PeerId], turn: int | None = None, *, voice: Mapping[PeerId, int] | None = None
    ) -> list[PeerId]:
        """`peers`, from whose turn that is, or was: each has one turn, then each two in a row, and so on.

        `voice`: of strangers, of which there may be any number, the first one begins, and for a run's first
        steps but one the second: so it is seen how long they need not take. None: all have it.
        """
        strangers = voice is not None and not any(map(voice.get, peers))
        peers = _drawn(tuple(peers), 0 if strangers else self._by_steps)
        if strangers and 0 < self._by_steps < COMPARED:
            peers = [*peers[1:], *peers[:1]]
        turn, doubled = int(self._used) if turn is None else turn, 0
        while peers and doubled < MAX_DOUBLED and turn >= len(peers) << doubled:
            turn, doubled = turn - (len(peers) << doubled), doubled + 1
        first = (turn >> doubled) % max(1, len(peers))
        return [*peers[first:], *peers[:first]]
