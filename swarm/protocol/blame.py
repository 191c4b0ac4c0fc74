"""Which replicas keep their stage waiting, and are left out for that. Pure: times are given by the caller.

A replica is charged (`swarm.policy.backoff`) with time that this replica saw it cost, or for what it says of
itself, never on the word of another: docs/design.md, *What one peer may cost*.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Set
from functools import partial
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from swarm.ids import Generation, PeerId
from swarm.policy.backoff import AGAIN_S, BUDGET_ROUNDS, BUDGET_S, Backoff
from swarm.policy.timeouts import MIN_S, AdaptiveTimeout
from swarm.protocol.ledger import everything, forget_before, union_of
from swarm.protocol.messages import Directive
from swarm.protocol.rounds import NOTHING, FetchResult, Plan, StepReport, failed_at, is_current

ALL_OWNERS = ""
"""An account of all owners of a round that fails, or waits, and it cannot be seen why. Then the coordinator
reduces everything itself for a while: that shows which replica sends nothing."""

# Accounts of one replica in `Backoff`: its name with one of these in front; the name alone leaves it out.
SUSPECTED = "?"
"""Waits that it may have caused, or another: it pays for them as soon as it is seen to cause one."""
SUSPECTED_LEADING = "!"
"""Of those, the ones while it coordinated."""
SEEN = "+"
"""What it paid for that it was seen to cause."""
SEEN_MOST_S = 9.0
"""So much of that leaves it out: a coordinator's first turn lasts 12.5 s, and the next has to see it anew."""
SEEN_OF_TWO_S = 5.0
"""The same of two: the next turn, of 25 s, is its own, and of the first one most is not charged."""
UNSEEN = "-"
"""What it paid for that it may have caused, since it had been seen to cause other waits."""
TIMES_SEEN = 6.0
"""A replica that was seen to cause waits pays for at most so many times as much, before it is seen again."""
UNSEEN_S = 8.0
"""Once rounds have waited so long for an unseen cause, the coordinator reduces the next step alone."""
KEPT_WAITING_S = 10.0
"""An honest coordinator reduces everything itself before its rounds have waited for others so long."""
PREPARED_S = 1.5
"""A replica may have the result so much later than the others in each step: 30 s in 20 steps."""
TIMES_ROUND = 3.0
"""A replica that has to fetch the result moves no more bytes than the round did."""
REPEATED_S = 10.0
"""Two rounds that a replica holds up take so long."""
COMPUTED_S = 60.0
"""For a microbatch, before the first one of the run is done."""
HELD_UP_S = 0.25
"""A round may wait so long for few of its members, which costs nothing: 5 s in 20 steps."""
TIMES_OF_TWO = 4.0
"""One of two may take so many times as long as the rest of its step: `swarm.policy.spares` keeps it then."""


class Waits(msgspec.Struct):
    """The waits of one kind. What is usual follows from those that ended by themselves."""

    usual: AdaptiveTimeout
    _open: dict[tuple[int, PeerId], tuple[float, Hashable]] = {}
    """Since when, and in which state."""

    def note(self, t: int, states: Mapping[PeerId, Hashable], *, now: float) -> None:
        """In step `t` the stage waits for exactly these replicas. A state that changes is progress."""
        for (step, peer), (since_s, state) in list(self._open.items()):
            if step == t and (peer not in states or states[peer] != state):
                del self._open[step, peer]
                self.usual.answered(now - since_s)
        for peer, state in states.items():
            self._open.setdefault((t, peer), (now, state))

    def forget(self, newest: int) -> None:
        """Steps before `newest` are over."""
        self._open = {at: wait for at, wait in self._open.items() if at[0] >= newest}

    def late(self, t: int, *, now: float, least_s: float = 0.0) -> dict[PeerId, float]:
        """The replicas that step `t` has waited for longer than usual, and than `least_s`; since when."""
        limit_s = max(least_s, self.usual.limit_s)
        of_step = {peer: since_s for (step, peer), (since_s, _) in self._open.items() if step == t}
        return {peer: since_s for peer, since_s in of_step.items() if now - since_s > limit_s}


class _Ledger(msgspec.Struct):
    """What a replica said of its sum of a step."""

    since_s: float
    done: int = 0
    told_s: float = math.inf
    """When it was told last to retract something."""
    waited_s: float = 0.0
    """How long that took so far."""
    asked: int = 0
    """What it was told to retract, and has."""
    kept: int = 0
    """What others were told to retract: it has to keep that."""


class Awaited(NamedTuple):
    """The members that a round waits for now."""

    peers: frozenset[PeerId] = frozenset()
    of: int = 1
    """How many members it could be waiting for."""
    seen: bool = False
    """Whether it is certain that they cause the wait. If not, another may keep from them what they need."""


class RoundWaits:
    """How long a round waits for few of its members, as the replica `me` sees it, and what they pay for it.

    All rounds of a step may wait for as long as the rest of the step takes: a slow line may be worth that
    (`swarm.policy.spares`). What is longer is charged, by each replica for itself, since each coordinates in
    its turn. If the cause of a wait is not certain, the one waited for is suspected, and all owners pay.

    A round without the replica that is to be left out can only be begun by the coordinator, so the others end
    the present one only if that replica is the coordinator itself.
    """

    def __init__(
        self, me: PeerId, t: int, backoff: Backoff, *, opened_s: float, voice: Collection[PeerId],
        held_s: dict[PeerId, float],
    ) -> None:  # fmt: skip
        """`opened_s`: when the step would have begun if its rounds so far had not waited. `voice`: the
        replicas whose word counts, where a run names peers. `held_s`: how long rounds of the step have waited
        for those for which that was too long; added to.
        """
        self.opened_s = opened_s
        """The same for the next round of the step."""
        self._me, self._t, self._backoff, self._opened_s, self._voice = me, t, backoff, opened_s, voice
        self._held_s, self._before_s = held_s, dict(held_s)
        self._waited_s, self._seen_s = defaultdict[PeerId, float](float), defaultdict[PeerId, float](float)
        """How long this round has waited for each; and how long it was certain that it was the cause."""
        self._kept_waiting_s = 0.0
        """For the coordinator, after an honest one would have begun to reduce everything itself."""

    def wait(self, awaited: Awaited, waited_s: float, *, coordinator: PeerId, now: float) -> list[PeerId]:
        """Note that the round waited so long for those until now; returns which of them it is to end for."""
        ended_for: list[PeerId] = []
        self.opened_s += waited_s if awaited.peers else 0.0
        pair = awaited.of == 2
        for peer in sorted(self._blamed(awaited, coordinator)):
            late_s = self._late_s(peer, waited_s, now, pair=pair)
            self._seen_s[peer] += waited_s if awaited.seen else 0.0
            if late_s <= 0:
                continue
            new_s = min(waited_s, late_s)
            if awaited.seen:
                rests = self._charge_seen(peer, new_s, late_s, now, SEEN_OF_TWO_S if pair else SEEN_MOST_S)
            else:
                rests = self._charge_unseen(
                    peer, new_s, waited_s, leads=self._me != coordinator == peer, now=now
                )
            # Of two with voice one goes on under the other, and leaves it out in its own turn.
            third = not self._voice or set(self._voice) - {coordinator, self._me}
            if rests and (coordinator == self._me or (coordinator == peer and third)):
                ended_for.append(peer)
        return ended_for

    def _charge_seen(self, peer: PeerId, new_s: float, late_s: float, now: float, most_s: float) -> bool:
        """Charge a replica that certainly caused `new_s` of waiting, and for what it was suspected of before.
        Returns whether it is left out: it is once it was seen for `most_s`.
        """
        suspected, seen_s = SUSPECTED + peer, new_s
        if self._backoff.was_charged(suspected, t=self._t):
            seen_s = min(self._seen_s[peer], late_s)
            if seen_s < AGAIN_S:  # it pays for what may be another's fault: a moment is not enough for that
                return False
            new_s = seen_s + self._backoff.settled_s(suspected, t=self._t)
        self._backoff.charge(SEEN + peer, t=self._t, since_s=now - seen_s, now=now)
        most_s = 0.0 if self._backoff.cost_s(SEEN + peer, t=self._t) >= most_s else math.inf
        return self._backoff.charge(peer, t=self._t, since_s=now - new_s, now=now, most_s=most_s)

    def _charge_unseen(self, peer: PeerId, new_s: float, waited_s: float, *, leads: bool, now: float) -> bool:
        """Charge a replica, or all owners, for `new_s` of waiting that it may have caused. Returns whether it
        is left out. `leads`: it coordinates this replica.

        One that was seen to cause waits pays at once. Any other is suspected; if it coordinates, and has its
        stage wait when an honest one would reduce everything itself, it is followed no longer.
        """
        cost_s, since_s = partial(self._backoff.cost_s, t=self._t), now - new_s
        suspected, leading, unseen = SUSPECTED + peer, SUSPECTED_LEADING + peer, UNSEEN + peer
        owes = self._backoff.was_charged(suspected, t=self._t)
        was_seen = cost_s(peer) < TIMES_SEEN * cost_s(SEEN + peer) and not owes
        if leads:
            self._backoff.charge(leading, t=self._t, since_s=since_s, now=now)
        if was_seen or peer == ALL_OWNERS:
            self._backoff.charge(unseen, t=self._t, since_s=since_s, now=now)
            return self._backoff.charge(peer, t=self._t, since_s=since_s, now=now)
        most_s = self._backoff.budget_s - cost_s(unseen)
        used_up = self._backoff.charge(suspected, t=self._t, since_s=since_s, now=now, most_s=most_s)
        self._kept_waiting_s += waited_s if leads and used_up else 0.0
        if self._kept_waiting_s < 2 * AGAIN_S or not leads or cost_s(leading) < KEPT_WAITING_S:
            return False
        return self._backoff.charge(peer, t=self._t, since_s=now, now=now, rounds=BUDGET_ROUNDS)

    def _blamed(self, awaited: Awaited, coordinator: PeerId) -> frozenset[PeerId]:
        """Which of those that a round waits for this replica may charge."""
        peers, of, seen = awaited
        pair = of == 2
        if self._me in peers or (of > 1 and not 2 * len(peers) < of + pair):
            return frozenset()  # this replica, or its own line, is the cause
        if pair and coordinator != self._me and not self._voice:
            peers -= {coordinator}  # there is no other to follow
        return peers if seen or not peers else peers | {ALL_OWNERS}

    def _late_s(self, peer: PeerId, waited_s: float, now: float, *, pair: bool) -> float:
        """How much longer the rounds of the step have waited for a replica than they may."""
        self._waited_s[peer] += waited_s
        rest_s = now - self._opened_s - self._waited_s[peer]
        held_s = self._before_s.get(peer, 0.0) + self._waited_s[peer]
        late_s = held_s - max(HELD_UP_S, (TIMES_OF_TWO if pair else 1.0) * rest_s)
        if late_s > 0:
            self._held_s[peer] = held_s
        return late_s


class Blame:
    """The waits of a stage that `me` coordinates."""

    def __init__(self, me: PeerId, microbatches: Callable[[int], int], backoff: Backoff) -> None:
        """`microbatches`: of a step."""
        self._me, self._microbatches, self._backoff = me, microbatches, backoff
        self._computing = Waits(AdaptiveTimeout())
        self._preparing = Waits(AdaptiveTimeout(min_s=PREPARED_S))
        self._computing.usual.expected_s = COMPUTED_S / 3
        self._first = AdaptiveTimeout(times_typical=TIMES_ROUND)
        """From the first own claim of a step to its end: that long a microbatch is behind this stage."""
        self._began_s: dict[int, float] = {}
        self._planned_s: dict[int, float] = {}
        self._round_s: dict[int, float] = {}
        """How long the first complete round of a step took."""
        self._retracting: dict[tuple[int, Generation], dict[PeerId, _Ledger]] = {}
        self._judged: dict[str, int] = {}
        """Rounds of which it is known whose fault they were, and their step."""
        self._told: dict[tuple[int, bool], tuple[object, set[str | int], float]] = {}
        """By step, whether to retract: which coordinator tells it, of which sums; each time; since when."""

    def forget(self, newest: int) -> None:
        """Steps before `newest` are over."""
        forget_before(newest, self._planned_s, self._round_s, self._began_s)
        self._retracting = {at: of for at, of in self._retracting.items() if at[0] >= newest}
        self._judged = {name: t for name, t in self._judged.items() if t >= newest}
        for waits in (self._computing, self._preparing):
            waits.forget(newest)

    def left_out(self, t: int, peers: Set[PeerId], others: Set[PeerId], *, now: float) -> set[PeerId]:
        """Those of `peers` that cost the stage too much lately. If that is all `others`, and several, whose
        words are needed, the one that cost least in steps up to `t` takes part, until it has cost more."""
        out = {p for p in peers if p != self._me and self._backoff.rests(p, now=now)}
        if len(others) > 1 and others <= out:
            out.remove(min(others, key=lambda p: (self._backoff.cost_s(p, t=t), p)))
        return out

    def computing(
        self, t: int, reports: Mapping[PeerId, StepReport], *, now: float
    ) -> dict[PeerId, StepReport]:
        """The reports, without claims on microbatches that should be done by now.

        Only where the stage waits for nothing but such claims: before that they cost nothing.
        """
        claimed = union_of(report.in_progress for report in reports.values())
        lacking = everything(self._microbatches(t)) & ~union_of(report.done for report in reports.values())
        others = {peer: report for peer, report in reports.items() if peer != self._me}
        waits = {peer: report.done for peer, report in others.items() if report.in_progress & lacking}
        self._computing.note(t, waits if lacking and not lacking & ~claimed else {}, now=now)
        own = reports.get(self._me, StepReport(t=t))
        if own.in_progress and not own.done:
            self._began_s.setdefault(t, now)
        elif (began_s := self._began_s.pop(t, None)) is not None and own.done:  # else it was undone
            self._first.answered(now - began_s)
        late = self._computing.late(t, now=now, least_s=self._first.limit_s)
        for peer, since_s in late.items():
            self._backoff.charge(peer, t=t, since_s=since_s, now=now)
        return {**reports, **{peer: replace(reports[peer], in_progress=NOTHING) for peer in late}}

    def retracting(
        self, at: tuple[int, Generation], by: Mapping[PeerId, int], reports: Mapping[PeerId, StepReport], *,
        now: float,
    ) -> None:  # fmt: skip
        """Charge replicas that keep the stage from agreeing on which sum has which microbatch.

        Those are: one that is told to retract something and takes longer than usual, also if it claims other
        things meanwhile; one that retracts what others retract since it has it; and one that retracts what
        it was not told to. Since it said that it had that, no round could end; but its sum may have been
        lost, so it pays for a few seconds each time. `by`: what each replica is told to retract now.
        """
        usual, told = self._computing.usual, union_of(by.values())
        limit_s = usual.limit_s if usual.known else min(BUDGET_S, usual.limit_s)
        waits = self._retracting.setdefault(at, {})
        for peer, report in reports.items():
            said, own = waits.setdefault(peer, _Ledger(now)), by.get(peer, 0)
            lost, taken_back = bool(said.kept & ~report.done), said.done & ~report.done & ~said.asked
            if own:
                said.waited_s += min(max(0.0, now - said.told_s), limit_s)
                said.told_s = now
            if peer != self._me and (lost or (own and said.waited_s > limit_s)):
                self._backoff.charge(peer, t=at[0], since_s=now - said.waited_s, now=now, rounds=lost)
            if peer != self._me and taken_back:
                self._backoff.charge(peer, t=at[0], since_s=max(said.since_s, now - MIN_S), now=now)
            said.since_s = said.since_s if report.done == said.done else now
            said.done, said.asked = report.done, (said.asked | own) & report.done
            said.kept = (said.kept | told) & report.done & ~own

    def planned(self, t: int, *, now: float) -> None:
        """A round is published, or still goes on."""
        self._planned_s.setdefault(t, now)

    def prepared(
        self, t: int, fetch: FetchResult, plan: Plan | None, reports: Mapping[PeerId, StepReport], *,
        now: float,
    ) -> None:  # fmt: skip
        """A result is there. If this replica has it, the others can have it of this one. `plan`: the last
        one; if it is of another round, that ends for all that fetch the result, and not by their fault.
        """
        if plan is not None and plan.round != fetch.round:
            self._judged[plan.round] = t
        if self._me not in fetch.sources:
            return
        self._round_s.setdefault(t, now - self._planned_s.get(t, now))
        self._preparing.note(t, dict.fromkeys(reports.keys() - set(fetch.sources)), now=now)
        late = self._preparing.late(t, now=now, least_s=TIMES_ROUND * self._round_s[t])
        for peer, since_s in late.items():
            seen = len(fetch.sources) > 1 and now - since_s > SEEN_MOST_S  # of two the other's word is needed
            most_s = 0.0 if seen else math.inf
            self._backoff.charge(peer, t=t, since_s=since_s, now=now, most_s=most_s)

    def told(
        self, directive: Directive, returned: Mapping[int, int], voice: Collection[PeerId], *, now: float
    ) -> bool:
        """Note what another coordinator tells this replica to do; returns whether it is left out for that.

        An honest coordinator sees which replica holds a round up, and begins no third one with the same. And
        what it has this replica retract others count: this replica does not compute the same three times.

        Args:
            returned: by step, how many microbatches were added that had been retracted before.
            voice: the replicas that have it.
        """
        by, left_out = directive.coordinator, set(directive.left_out)
        others, again = set(voice) - {by}, False
        if others == {self._me}:
            return False  # one of two needs the other's word, and might as well be wrong about it
        for step in directive.steps:
            if step.plan is not None:
                again |= self._again(step.t, by, (step.plan.members, step.plan.ledgers), step.plan.round, now)
            elif step.retract:
                # One that leaves this replica out has it retract all that it adds meanwhile.
                times = returned.get(step.t, 0) if self._me not in left_out else 0
                again |= self._again(step.t, by, None, times, now)
        if self._me in others and others <= left_out and not self._backoff.rests(by, now=now):
            # They go on without it.
            self._backoff.charge(by, t=directive.version, since_s=now, now=now, rounds=BUDGET_ROUNDS)
        return again

    def _again(self, t: int, by: PeerId, sums: Hashable, time: str | int, now: float) -> bool:
        """Charge a coordinator that tells this replica the same, for the same sums, a third time, long after
        the first. `sums`: of the round, or None for the replica's own; `time`: tells repetitions apart.
        """
        at = t, sums is None
        of, times, since_s = self._told.get(at, (None, set[str | int](), now))
        if of != (by, sums):
            of, times, since_s = (by, sums), set(), now
        again = time not in times and len(times) >= BUDGET_ROUNDS and now - since_s >= REPEATED_S
        if again:
            self._backoff.charge(by, t=t, since_s=now, now=now, rounds=BUDGET_ROUNDS)
        times.add(time)
        self._told = {one: known for one, known in self._told.items() if one[0] >= t - 1}
        self._told[at] = of, times, since_s
        return again

    def owners(
        self, t: int, plan: Plan | None, reports: Mapping[PeerId, StepReport], *, now: float
    ) -> list[PeerId]:
        """The replicas that may own a part of the next plan, if they have voice. `plan`: the last one."""
        failed = failed_at(plan, reports) if plan is not None else []
        if plan is not None and failed and plan.round not in self._judged:
            self._judged[plan.round] = t
            if is_current(plan, reports):
                self._judge(t, plan, failed, now)
        if plan is None and self._backoff.cost_s(ALL_OWNERS, t=t) >= UNSEEN_S:
            self._backoff.charge(ALL_OWNERS, t=t, since_s=now, now=now, most_s=UNSEEN_S)
        if self._backoff.rests(ALL_OWNERS, now=now):
            return [self._me]
        tried = {peer for peer in reports if peer != self._me and self._backoff.is_tried(peer, now=now)}
        able = [peer for peer, report in reports.items() if report.done and peer not in tried]
        return able if self._me in able or len(able) > 1 else [self._me]

    def _judge(self, t: int, plan: Plan, failed: list[PeerId], now: float) -> None:
        """Charge for a round that `failed` at some, though all members are there with the same ledgers."""
        mine = plan.parts[plan.members.index(self._me)] if self._me in plan.members else 0
        if mine != sum(plan.parts):
            self._backoff.unclear_rounds += 1
            self._backoff.charge(ALL_OWNERS, t=t, since_s=now, now=now, rounds=BUDGET_ROUNDS)
        elif self._me not in failed:  # they had to do with this replica only, and it goes on
            for peer in failed:
                self._backoff.aborted(peer, t=t, since_s=now, now=now)
