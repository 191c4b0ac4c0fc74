"""Which replicas hold their stage up, as its coordinator sees it. Pure: times are given by the caller.

A replica is charged (`swarm.policy.backoff`) by what the coordinator saw itself, or for what it says of
itself, never on the word of another: docs/design.md, *What one peer may cost*.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping
from functools import partial
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from swarm.ids import Generation, PeerId
from swarm.policy.backoff import AGAIN_S, BUDGET_ROUNDS, BUDGET_S, Backoff
from swarm.policy.timeouts import MIN_S, AdaptiveTimeout
from swarm.protocol.ledger import everything, union_of
from swarm.protocol.messages import Directive
from swarm.protocol.rounds import NOTHING, FetchResult, Plan, StepReport, failed_at, is_current

ALL_OWNERS = ""
"""Stands for rounds in which several own a part. If one of those fails and it cannot be seen why, the
coordinator reduces everything itself for a while: then it sees which replica sends nothing."""
UNCLEAR = "?"
"""Before a replica's name: what it is charged with once it is seen to hold up a round."""
LEADING = "!"
"""The same: so much of that as it coordinated."""
SEEN = "+"
"""The same: so much of what it was charged with as it was seen to do."""
AT_ONCE = "??"
"""The same: so much of what it was charged with as was unclear."""
TIMES_SEEN = 8.0
"""So many times as much is charged at once although it is unclear. The rest once it is seen again."""
UNSEEN_S = 8.0
"""Rounds have waited so long for whom cannot be seen: in the next step the coordinator reduces all."""
KEPT_WAITING_S = 10.0
"""By then an honest coordinator that was kept waiting before its turn reduces all itself."""
PREPARED_S = 1.5
"""In 20 steps 30 s: so much later than the others a replica may have the result each time."""
TIMES_ROUND = 3.0
"""A replica that has to fetch the result moves no more bytes than the round did."""
REPEATED_S = 10.0
"""Two rounds that somebody holds up take so long."""
COMPUTED_S = 60.0
"""For a microbatch, before the first one of the run is done."""
HELD_UP_S = 0.25
"""A round may wait so long for few of its members: in 20 steps 5 s, and the budget is 25."""
TIMES_OF_TWO = 4.0
"""One of two may take so many times as long as the rest of its step: `swarm.policy.spares` keeps it then."""


class _Wait(msgspec.Struct):
    since_s: float
    state: Hashable


class Waits(msgspec.Struct):
    """The waits of one kind. What is usual follows from those that ended by themselves."""

    usual: AdaptiveTimeout
    _open: dict[tuple[int, PeerId], _Wait] = {}

    def note(self, t: int, states: Mapping[PeerId, Hashable], *, now: float) -> None:
        """In step `t` the stage waits for exactly these replicas. A state that changes is progress."""
        for (step, peer), wait in list(self._open.items()):
            if step == t and (peer not in states or states[peer] != wait.state):
                del self._open[step, peer]
                self.usual.answered(now - wait.since_s)
        for peer, state in states.items():
            self._open.setdefault((t, peer), _Wait(now, state))

    def forget(self, newest: int) -> None:
        """Steps before `newest` are over."""
        for old in [(t, peer) for t, peer in self._open if t < newest]:
            del self._open[old]

    def late(self, t: int, *, now: float, least_s: float = 0.0) -> dict[PeerId, float]:
        """The replicas that step `t` has waited for longer than usual, and than `least_s`; since when."""
        limit_s = max(least_s, self.usual.limit_s)
        return {
            peer: wait.since_s
            for (step, peer), wait in self._open.items()
            if step == t and now - wait.since_s > limit_s
        }


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
    """The members that a round waits for."""

    peers: frozenset[PeerId] = frozenset()
    of: int = 1
    """So many might be."""
    seen: bool = False
    """It is seen that they hold it up. Else another may keep from them what they need."""


class RoundWaits:
    """How long a round waited for few of its members, as `me` saw it.

    All charge those, or all owners if it cannot be seen why, since each coordinates in its turn. The round of
    one that is to be left out ends at its coordinator, or if it coordinates itself at the others. A step may
    wait as long again as it takes without that: what makes it longer by less may be worth it
    (`swarm.policy.spares`).
    """

    def __init__(
        self, me: PeerId, t: int, backoff: Backoff, *, opened_s: float, voice: Collection[PeerId],
        held_s: dict[PeerId, float],
    ) -> None:  # fmt: skip
        """`opened_s`: when the step began, if it had waited for none. `voice`: the replicas that have it.
        `held_s`: how long rounds of the step have waited for those for which that was too long."""
        self.opened_s = opened_s
        """Of the next round of the step."""
        self._me, self._t, self._backoff, self._opened_s, self._voice = me, t, backoff, opened_s, voice
        self._held_s, self._before_s = held_s, dict(held_s)
        self._waited_s, self._seen_s = defaultdict[PeerId, float](float), defaultdict[PeerId, float](float)
        """In this round, for each; and so much of that as each was seen to hold it up."""
        self._unclear_s = 0.0
        """Since an honest coordinator that was kept waiting would have reduced all itself."""

    def wait(self, awaited: Awaited, waited_s: float, *, coordinator: PeerId, now: float) -> list[PeerId]:
        """Note that the round waited so long for them until now; returns those that are left out for that."""
        left_out: list[PeerId] = []
        cost_s = partial(self._backoff.cost_s, t=self._t)
        self.opened_s += waited_s if awaited.peers else 0.0
        for peer in sorted(self._blamed(awaited, coordinator)):
            late_s = self._late_s(peer, waited_s, now, pair=awaited.of == 2)
            self._seen_s[peer] += waited_s if awaited.seen else 0.0
            if late_s <= 0:
                continue
            unclear, leading, seen, at_once = (of + peer for of in (UNCLEAR, LEADING, SEEN, AT_ONCE))
            new_s, seen_s = min(waited_s, late_s), min(self._seen_s[peer], late_s)
            was_unclear = self._backoff.was_charged(unclear, t=self._t)
            pays = (cost_s(peer) < TIMES_SEEN * cost_s(seen) and not was_unclear) or peer == ALL_OWNERS
            if led := not awaited.seen and self._me != coordinator == peer:
                self._backoff.charge(leading, t=self._t, since_s=now - new_s, now=now)
            if not awaited.seen and not pays:
                most_s = self._backoff.budget_s - cost_s(at_once)
                rests = self._backoff.charge(unclear, t=self._t, since_s=now - new_s, now=now, most_s=most_s)
                if led:
                    self._unclear_s += waited_s if rests else 0.0
                    if self._unclear_s >= 2 * AGAIN_S and cost_s(leading) >= KEPT_WAITING_S:
                        self._backoff.charge(peer, t=self._t, since_s=now, now=now, rounds=BUDGET_ROUNDS)
                        left_out.append(peer)
                continue
            if was_unclear:
                if seen_s < AGAIN_S:
                    continue  # a moment shows nothing
                new_s = seen_s + self._backoff.settled_s(unclear, t=self._t)
            account, lasted_s = seen if awaited.seen else at_once, seen_s if was_unclear else new_s
            self._backoff.charge(account, t=self._t, since_s=now - lasted_s, now=now)
            rests = self._backoff.charge(peer, t=self._t, since_s=now - new_s, now=now)
            if rests and coordinator in (self._me, peer):
                left_out.append(peer)
        return left_out

    def _blamed(self, awaited: Awaited, coordinator: PeerId) -> frozenset[PeerId]:
        """Of those that a round waits for, the ones that this replica may charge."""
        peers, of, seen = awaited
        pair = of == 2
        if self._me in peers or (of > 1 and not 2 * len(peers) < of + pair):
            return frozenset()  # it holds itself up, or its own line does
        third = set(self._voice) - {coordinator, self._me} if self._voice else not pair
        if coordinator != self._me and not third:
            peers -= {coordinator}
        return peers if seen or not peers else peers | {ALL_OWNERS}

    def _late_s(self, peer: PeerId, waited_s: float, now: float, *, pair: bool) -> float:
        """By how much longer than they may the rounds of the step have waited for a peer."""
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
        self._undoing: dict[tuple[int, Generation], dict[PeerId, _Ledger]] = {}
        self._judged: dict[str, int] = {}
        """Rounds of which it is known whose fault they were, and their step."""
        self._told: dict[tuple[int, bool], tuple[object, set[str | int], float]] = {}
        """By step, whether to retract: which coordinator tells it, of which sums; each time; since when."""

    def forget(self, newest: int) -> None:
        """Steps before `newest` are over."""
        for known in (self._planned_s, self._round_s, self._began_s):
            for t in [t for t in known if t < newest]:
                del known[t]
        self._undoing = {at: of for at, of in self._undoing.items() if at[0] >= newest}
        self._judged = {name: t for name, t in self._judged.items() if t >= newest}
        for waits in (self._computing, self._preparing):
            waits.forget(newest)

    def left_out(self, peer: PeerId, *, now: float) -> bool:
        """Whether `peer` cost the stage too much lately."""
        return peer != self._me and self._backoff.rests(peer, now=now)

    def computing(
        self, t: int, reports: Mapping[PeerId, StepReport], *, now: float
    ) -> dict[PeerId, StepReport]:
        """The reports, without claims on microbatches that should be done by now.

        Only where the stage waits for nothing but such claims: before that they cost nothing.
        """
        claimed = union_of(report.in_progress for report in reports.values())
        lacking = everything(self._microbatches(t)) & ~union_of(report.done for report in reports.values())
        waits = {
            peer: report.done
            for peer, report in reports.items()
            if peer != self._me and report.in_progress & lacking
        }
        self._computing.note(t, waits if lacking and not lacking & ~claimed else {}, now=now)
        own = reports.get(self._me, StepReport(t=t))
        if own.in_progress and not own.done:
            self._began_s.setdefault(t, now)
        elif (began_s := self._began_s.pop(t, None)) is not None and own.done:  # else it was undone
            self._first.answered(now - began_s)
        late = self._computing.late(t, now=now, least_s=self._first.limit_s)
        for peer, since_s in late.items():
            self._backoff.charge(peer, t=t, since_s=since_s, now=now)
        return {
            peer: replace(report, in_progress=NOTHING) if peer in late else report
            for peer, report in reports.items()
        }

    def undoing(
        self, at: tuple[int, Generation], by: Mapping[PeerId, int], reports: Mapping[PeerId, StepReport], *,
        now: float,
    ) -> None:  # fmt: skip
        """Replicas are told to retract what others have, too: `by`, if any are. One that claims other things
        for a moment is waited for all the same, and one that others retract for has to keep what it has. One
        that takes something back untold had the stage wait in vain since it said that: no round of it ended.
        A sum may be lost, so that is some seconds each time."""
        usual, told = self._computing.usual, union_of(by.values())
        limit_s = usual.limit_s if usual.known else min(BUDGET_S, usual.limit_s)
        waits = self._undoing.setdefault(at, {})
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
            self._backoff.charge(peer, t=t, since_s=since_s, now=now)

    def told(
        self, directive: Directive, returned: Mapping[int, int], voice: Collection[PeerId], *, now: float
    ) -> bool:
        """Another coordinator tells this replica what to do. Returns whether it is left out for that.

        One that holds nothing up sees who does, and begins no third round with that one. And what it has this
        replica retract others have: it is not computed here again, and a third time.

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
        """Charge a coordinator that has this replica do the same with the same sums a third time, long after
        the first. `sums`: None: with its own; `time`: tells one time from another.
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
        """Which replicas may own a part in the next plan, if words count. `plan`: the last one."""
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
        """A round failed at some replicas, and none of them is gone or says something else."""
        mine = plan.parts[plan.members.index(self._me)] if self._me in plan.members else 0
        if mine != sum(plan.parts):
            self._backoff.unclear_rounds += 1
            self._backoff.charge(ALL_OWNERS, t=t, since_s=now, now=now, rounds=BUDGET_ROUNDS)
        elif self._me not in failed:  # they had to do with this replica only, and it goes on
            for peer in failed:
                self._backoff.aborted(peer, t=t, since_s=now, now=now)
