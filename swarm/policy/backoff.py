"""Which peers are not called for a while: they failed, or cost the run too much. Pure: times are given."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from swarm.ids import PeerId

FIRST_BACKOFF_S = 1.0
"""Long enough to redial a broken connection, short enough not to miss a healthy peer."""
MAX_BACKOFF_S = 30.0

STEPS = 20
BUDGET_S = 20.0
"""What is under way when it is used up, what has to be done again, and the time until all others have noticed
it as well come on top: 30 s in all."""
TIMES_USUAL = 3.0
FIRST_REST_S = 60.0
"""After as long again it would be back while others still hold the same steps up, and cost those twice."""
BUDGET_ROUNDS = 2
MAX_REST_S = 3600.0
AGAIN_S = 1.0
"""Of a peer that has used its budget up, so much more within the 20 steps is the next time."""
MAX_PEERS = 4096
"""Identities cost nothing: of more, the one that was charged, or failed, longest ago is forgotten."""


@dataclass(slots=True)
class _Account:
    charges: deque[tuple[int, float, int]] = field(default_factory=lambda: deque[tuple[int, float, int]]())
    """Step, seconds, aborted rounds: one of each step, however often it is charged."""
    counted_until_s: float = float("-inf")
    rests_until_s: float = float("-inf")
    rest_s: float = 0.0
    since_rest_s: float = 0.0
    """Charged since the last rest began."""


_NO_ACCOUNT = _Account()


class Backoff:
    """Exponential backoff per peer: 1 s after the first failure, doubled each time, until the peer answers.
    And what each cost the run lately: which are left out for that.

    With `probed`, a prober (`peers.liveness_probe`) pings silent peers. A silent peer then stays in backoff
    until a ping is answered: no longer, and no shorter either, because work sent to a hung peer costs the
    time to notice. Peers that answered nonsense wait out their time in any case.

    Within 20 steps one costs at most 30 seconds, or three times what a call usually takes, and
    `BUDGET_ROUNDS` aborted rounds, by what this peer saw itself: docs/design.md, *What one peer may cost*.
    """

    def __init__(
        self, *, first_s: float = FIRST_BACKOFF_S, longest_s: float = MAX_BACKOFF_S, probed: bool = False
    ) -> None:
        self._first_s, self._longest_s, self._probed = first_s, longest_s, probed
        self._until: dict[PeerId, float] = {}
        self._last_s: dict[PeerId, float] = {}
        self._silent: set[PeerId] = set()
        self.changes = 0
        """Counts the beginnings and ends of backoffs and rests, except those that end by time."""
        self._accounts: dict[PeerId, _Account] = {}
        self.budget_s = BUDGET_S
        """More where calls usually take long: no peer could answer one within it."""
        self.unclear_rounds = 0
        """Of the step: rounds that failed, and it could not be seen why."""

    def failed(self, peer: PeerId, *, now: float, silent: bool = False) -> float:
        """Put `peer` into backoff and return for how many seconds. `silent`: it did not answer or was not
        reached.

        Failures during a backoff are the same event seen by other calls and add nothing.
        """
        if now < self._until.get(peer, now):
            return self._until[peer] - now
        if self._probed and silent:
            self._silent.add(peer)
        backoff_s = min(self._longest_s, 2 * self._last_s.get(peer, self._first_s / 2))
        self.changes += 1
        self._last_s.pop(peer, None)
        self._last_s[peer], self._until[peer] = backoff_s, now + backoff_s
        if len(self._last_s) > MAX_PEERS:
            self.answered(next(iter(self._last_s)))
        return backoff_s

    def answered(self, peer: PeerId) -> None:
        """End the backoff of `peer`: its next failure starts with a short one."""
        if peer in self._until or peer in self._silent:
            self.changes += 1
        self._last_s.pop(peer, None)
        self._until.pop(peer, None)
        self._silent.discard(peer)

    def heard(self, peer: PeerId) -> None:
        """A silent peer answered a ping. After its first failure this ends its backoff at once."""
        if peer in self._silent:
            self.changes += 1
            self._silent.remove(peer)
            if self._last_s.get(peer, 0.0) <= self._first_s:
                self._until.pop(peer, None)

    def doubled(self, peer: PeerId) -> float:
        """How many times as long as the first its last backoff was; 1 if it had none."""
        return max(1.0, self._last_s.get(peer, 0.0) / self._first_s)

    def is_failing(self, peer: PeerId) -> bool:
        """Whether `peer` has failed, and not answered since."""
        return peer in self._last_s

    def silent(self) -> list[PeerId]:
        return sorted(self._silent)

    def forget(self, peer: PeerId) -> None:
        """Stop pinging `peer`: it is no longer announced."""
        self.changes += 1
        self._silent.discard(peer)

    def aborted(self, peer: PeerId, *, t: int, since_s: float, now: float) -> None:
        """Charge `peer` with a round that it aborted, and with those that failed for an unseen cause."""
        self.charge(peer, t=t, since_s=since_s, now=now, rounds=1 + self.unclear_rounds)

    def calls_take(self, usual_s: float) -> None:
        """Note how long a call usually takes: a peer may cost `TIMES_USUAL` as much."""
        self.budget_s = max(BUDGET_S, TIMES_USUAL * usual_s)

    def within_budget_s(self, peer: PeerId, limit_s: float, *, t: int) -> float:
        """`limit_s` for a call in step `t`, or less: what `peer` may still cost, if that is anything."""
        left_s = self.left_s(peer, t=t)
        return min(limit_s, left_s) if left_s >= AGAIN_S else limit_s

    def relent(self, peers: Collection[PeerId], *, now: float) -> bool:
        """Ask again the one of `peers` whose rest ends first, if there is no other; returns whether."""
        if not peers or not all(self.rests(peer, now=now) for peer in peers):
            return False
        self._accounts[min(sorted(peers), key=self.rests_until_s)].rests_until_s = float("-inf")
        self.changes += 1
        return True

    def in_backoff(self, peer: PeerId, *, now: float) -> bool:
        """Whether `peer` should not be called now."""
        return peer in self._silent or now < max(self._until.get(peer, now), self.rests_until_s(peer))

    def is_away(self, peer: PeerId, *, now: float) -> bool:
        """Whether `peer` could not be reached just now. One that only rests may be there for others."""
        return peer in self._silent or now < self._until.get(peer, now)

    def ends(self, peer: PeerId) -> float:
        """When the backoff of `peer` ends (at the earliest, if it is silent); without one, -inf."""
        return max(self._until.get(peer, float("-inf")), self.rests_until_s(peer))

    # -- what a peer cost the run ----------------------------------------------------------------

    def charge(
        self, peer: PeerId, *, t: int, since_s: float, now: float, rounds: int = 0, most_s: float = math.inf,
        longest_s: float = MAX_REST_S,
    ) -> bool:  # fmt: skip
        """Charge `peer` with the time from `since_s` to `now`, in step `t`; returns whether it is left out.
        `most_s`: a smaller budget, a rest for which alone is as the first one. No rest is over `longest_s`.

        A second is charged once, however many calls waited through it.
        """
        account = self._accounts[peer] = self._accounts.pop(peer, None) or _Account()
        if len(self._accounts) > MAX_PEERS:
            del self._accounts[next(iter(self._accounts))]
        if now - account.rests_until_s > account.rest_s:
            account.rest_s = 0.0  # it behaved for as long as it rested
        seconds = max(0.0, now - max(since_s, account.counted_until_s))
        account.counted_until_s = now if seconds else account.counted_until_s
        last = account.charges.pop() if account.charges and account.charges[-1][0] == t else (t, 0.0, 0)
        account.charges.append((t, last[1] + seconds, last[2] + rounds))
        # After a rollback the steps begin again: what was lost in those that were undone counts on.
        while account.charges and not t - STEPS < account.charges[0][0] <= t:
            account.charges.popleft()
        lost_s = sum(charge[1] for charge in account.charges)
        account.since_rest_s += seconds
        anew = account.since_rest_s >= AGAIN_S or rounds > 0
        used_up = lost_s >= self.budget_s or sum(charge[2] for charge in account.charges) >= BUDGET_ROUNDS
        if (used_up or lost_s >= most_s) and anew and now >= account.rests_until_s:
            account.since_rest_s = 0.0
            account.rest_s = min(longest_s, max(FIRST_REST_S, 2 * account.rest_s if used_up else 0.0))
            account.rests_until_s = now + account.rest_s
            self.changes += 1
        return now < account.rests_until_s

    def cost_s(self, peer: PeerId, *, t: int) -> float:
        """Seconds that `peer` has cost in the last `STEPS` before step `t` is over."""
        charges = self._accounts.get(peer, _NO_ACCOUNT).charges
        return sum(lost_s for step, lost_s, _ in charges if step > t - STEPS)

    def left_s(self, peer: PeerId, *, t: int) -> float:
        """Seconds that `peer` may still cost until step `t` is over."""
        return max(0.0, self.budget_s - self.cost_s(peer, t=t))

    def settled_s(self, peer: PeerId, *, t: int) -> float:
        """Close the account of `peer`; returns the seconds in it, at most its budget, for another to pay."""
        lost_s = min(self.budget_s, self.cost_s(peer, t=t))
        self._accounts.pop(peer, None)
        return lost_s

    def was_charged(self, peer: PeerId, *, t: int, before_s: float = math.inf) -> bool:
        """Whether `peer` was charged in the last `STEPS` before step `t` is over, be it with no time: others
        may have lost more by it. `before_s`: with no time after that.
        """
        account = self._accounts.get(peer, _NO_ACCOUNT)
        return account.counted_until_s <= before_s and any(at[0] > t - STEPS for at in account.charges)

    def rests_until_s(self, peer: PeerId) -> float:
        """Until when `peer` is left out; minus infinity if it never was."""
        return self._accounts.get(peer, _NO_ACCOUNT).rests_until_s

    def rests(self, peer: PeerId, *, now: float) -> bool:
        """Whether `peer` is left out since it cost the run too much."""
        return now < self.rests_until_s(peer)

    def is_tried(self, peer: PeerId, *, now: float) -> bool:
        """Whether `peer` rests, or has come back for less than that lasted: nothing shall depend on it."""
        account = self._accounts.get(peer, _NO_ACCOUNT)
        return now < account.rests_until_s + account.rest_s
