"""What each peer cost the run lately, and which are left out for it. Pure: times are given by the caller.

A peer may be slow, die, or answer nothing: within 20 steps it costs at most 30 seconds and `BUDGET_ROUNDS`
aborted rounds, by what this peer saw itself. Then it is left out for twice as long, and for twice as long
each time after that, whatever it answers meanwhile. Being left out costs time, never a weight.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from swarm.ids import PeerId

STEPS = 20
BUDGET_S = 25.0
"""What is under way when it is used up, and what has to be done again, comes on top: 30 s in all."""
FIRST_REST_S = 60.0
"""After as long again it would be back while others still hold the same steps up, and cost those twice."""
BUDGET_ROUNDS = 2
MAX_REST_S = 3600.0
AGAIN_S = 1.0
"""Of a peer that has used its budget up, so much more within the 20 steps is the next time."""
MAX_PEERS = 4096
"""Identities cost nothing: of more, the one that was charged longest ago is forgotten."""


@dataclass(slots=True)
class _Account:
    charges: deque[tuple[int, float, int]] = field(default_factory=lambda: deque[tuple[int, float, int]]())
    """Step, seconds, aborted rounds."""
    counted_until_s: float = float("-inf")
    rests_until_s: float = float("-inf")
    rest_s: float = 0.0
    since_rest_s: float = 0.0
    """Charged since the last rest began."""


class LostTime:
    """An account for each peer."""

    def __init__(self) -> None:
        self._accounts: dict[PeerId, _Account] = {}

    def charge(self, peer: PeerId, *, t: int, since_s: float, now: float, rounds: int = 0) -> bool:
        """Charge `peer` with the time from `since_s` to `now`, in step `t`; returns whether it is left out.

        A second is charged once, however many calls waited through it.
        """
        account = self._accounts[peer] = self._accounts.pop(peer, None) or _Account()
        if len(self._accounts) > MAX_PEERS:
            del self._accounts[next(iter(self._accounts))]
        if now - account.rests_until_s > account.rest_s:
            account.rest_s = 0.0  # it behaved for as long as it rested
        seconds = max(0.0, now - max(since_s, account.counted_until_s))
        account.counted_until_s = max(now, account.counted_until_s)
        account.charges.append((t, seconds, rounds))
        # After a rollback the steps begin again: what was lost in those that were undone counts on.
        while account.charges and not t - STEPS < account.charges[0][0] <= t:
            account.charges.popleft()
        lost_s = sum(charge[1] for charge in account.charges)
        aborted = sum(charge[2] for charge in account.charges)
        account.since_rest_s += seconds
        anew = account.since_rest_s >= AGAIN_S or rounds > 0
        if (lost_s >= BUDGET_S or aborted >= BUDGET_ROUNDS) and anew and now >= account.rests_until_s:
            account.since_rest_s = 0.0
            account.rest_s = min(MAX_REST_S, max(FIRST_REST_S, 2 * account.rest_s))
            account.rests_until_s = now + account.rest_s
        return now < account.rests_until_s

    def left_s(self, peer: PeerId, *, t: int) -> float:
        """Seconds that `peer` may still cost until step `t` is over."""
        account = self._accounts.get(peer)
        charges = account.charges if account is not None else ()
        return max(0.0, BUDGET_S - sum(lost_s for step, lost_s, _ in charges if step > t - STEPS))

    def rests_until_s(self, peer: PeerId) -> float:
        """Until when `peer` is left out; minus infinity if it never was."""
        account = self._accounts.get(peer)
        return account.rests_until_s if account is not None else float("-inf")

    def forgive(self, peer: PeerId) -> None:
        """End the rest of `peer`: there is no other."""
        if peer in self._accounts:
            self._accounts[peer].rests_until_s = float("-inf")
