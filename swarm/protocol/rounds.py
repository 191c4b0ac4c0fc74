"""Which replicas average, and when a step is taken. Pure functions over plain data.

There are three roles, and none of them holds anything that cannot be asked for again:

- a *replica* serves one stage and knows its own ledger and sum;
- the *coordinator* of a stage (its live replica that joined first: `eldest`) reads its replicas' reports and
publishes what the stage should do: `decide`;
- the *run coordinator* (the coordinator of stage 0) reads the stages' summaries: `decide_commit`.

What travels is state, not commands: reports up, directives down, each complete and idempotent. A lost, late
or doubled message therefore changes nothing but time. Safety does not rest on there being one coordinator: a
result is complete only if its group's ledgers hold each microbatch once, which every replica checks for
itself (`check_plan`), so any complete result of a step is *the* result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from swarm.ids import PeerId, Stage
from swarm.protocol.ledger import Bitmap, everything, members_of

STAR_AFTER = 3
"""Aborted rounds of one step after which the coordinator reduces everything itself: two replicas may be
unable to reach each other while both reach it."""


FINISHES_LEAST_S = 1.0

ALIKE = 2.0
"""Uploads within this factor of the median count as equal. On three equal lines of 8 Mbit/s steps took 15 %
longer while each replica's part followed its measurement."""


class Prepared(msgspec.Struct, frozen=True):
    """A replica holds the complete reduced gradient of a step, not yet applied."""

    round: str
    sqnorm: float
    """Squared 2-norm of the stage's summed gradient."""
    digest: str


class Commit(msgspec.Struct, frozen=True):
    """All stages are prepared: apply step `t` with this squared norm over all stages."""

    t: int
    total_sqnorm: float


class Plan(msgspec.Struct, frozen=True):
    """One all-reduce: its replicas, their ledgers, and the part that each of them owns."""

    round: str
    number: int
    members: tuple[PeerId, ...]
    """Sorted."""
    ledgers: tuple[Bitmap, ...]
    parts: tuple[int, ...]
    """Elements of the flat gradient that each replica owns, in order; they sum to its length."""


@dataclass(frozen=True, slots=True)
class MemberStep:
    """What one replica reports of one step."""

    peer: PeerId
    done: int = 0
    in_progress: int = 0
    frozen_for: str = ""
    held: Prepared | None = None
    failed_round: str = ""
    """The last round that failed at this replica."""
    bandwidth_bps: float = 0.0
    """Measured upload, bits per second; 0 = not measured."""
    inherited: int = 0
    """The part of `done` that this replica cannot retract."""


class FetchResult(msgspec.Struct, frozen=True):
    """`round` is complete at `sources`: every other replica fetches it from one of them."""

    round: str
    sources: tuple[PeerId, ...]
    ready: bool
    """Every replica holds it: the stage is prepared."""
    sqnorm: float


@dataclass(frozen=True, slots=True)
class Lacking:
    """Microbatches that are in no replica's sum; `unclaimed` of them are not being computed either."""

    lacking: int
    unclaimed: int


@dataclass(frozen=True, slots=True)
class Undo:
    """Microbatches counted twice, by the replica that subtracts them."""

    by: Mapping[PeerId, int]


@dataclass(frozen=True, slots=True)
class Reduce:
    """Every microbatch counts once: average."""

    plan: Plan


Decision = FetchResult | Lacking | Undo | Reduce


def eldest(since_s: Mapping[PeerId, float]) -> PeerId | None:
    """The coordinator: the peer that joined first, by its own clock; of two at once, the smallest id.

    A newcomer thus takes nothing over while older peers live: it would know of no plan, and a running reduce
    would start again. A wrong clock costs just that.
    """
    return min(since_s, key=lambda peer: (since_s[peer], peer), default=None)


def round_id(
    run: str, stage: Stage, t: int, number: int, members: Sequence[PeerId], ledgers: Sequence[int]
) -> str:
    """The name of an all-reduce group: a hash of everything that its replicas must agree on."""
    who = (f"{peer}:{ledger:x}" for peer, ledger in zip(members, ledgers, strict=True))
    text = "|".join([run, str(stage), str(t), str(number), *who])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def decide(
    run: str,
    stage: Stage,
    t: int,
    microbatches: int,
    numel: int,
    members: Sequence[MemberStep],
    current: Plan | None,
) -> Decision:
    """What a stage should do about step `t`, from its live replicas' reports.

    `current` is the plan published last, kept as long as it still fits the reports.
    """
    members = sorted(members, key=lambda member: member.peer)
    holders = [m for m in members if m.held is not None]
    if holders:
        return _adopt(members, holders)
    union = twice = in_progress = 0
    for member in members:
        twice |= union & member.done
        union |= member.done
        in_progress |= member.in_progress
    if union != everything(microbatches):
        lacking = everything(microbatches) & ~union
        return Lacking(lacking, lacking & ~in_progress)
    if twice:
        return _undo(members, twice)
    if current is not None and _still_fits(current, members):
        return Reduce(current)
    number = 0 if current is None else current.number + 1
    ids, ledgers = tuple(m.peer for m in members), tuple(Bitmap(m.done) for m in members)
    parts = _share_out(numel, members, star=number >= STAR_AFTER)
    return Reduce(Plan(round_id(run, stage, t, number, ids, ledgers), number, ids, ledgers, parts))


def _adopt(members: Sequence[MemberStep], holders: Sequence[MemberStep]) -> FetchResult:
    votes: dict[str, list[MemberStep]] = {}
    for member in holders:
        assert member.held is not None
        votes.setdefault(member.held.round, []).append(member)
    chosen = min(votes, key=lambda name: (-len(votes[name]), name))
    held = votes[chosen][0].held
    assert held is not None
    return FetchResult(
        round=chosen,
        sources=tuple(m.peer for m in votes[chosen]),
        ready=len(votes[chosen]) == len(members),
        sqnorm=held.sqnorm,
    )


def _undo(members: Sequence[MemberStep], twice: int) -> Undo:
    """The directive to retract duplicates: a replica that cannot subtract keeps its own, else the smallest id
    does.

    Of two that cannot, the second is told all the same: it drops its whole sum.
    """
    keeps = dict.fromkeys((member.peer for member in members), 0)
    left = twice
    for only_fixed in (True, False):
        for member in members:
            could = member.done & member.inherited if only_fixed else member.done
            keeps[member.peer] |= could & left
            left &= ~could
    by = {m.peer: m.done & twice & ~keeps[m.peer] for m in members}
    return Undo({peer: again for peer, again in by.items() if again})


def _still_fits(plan: Plan, members: Sequence[MemberStep]) -> bool:
    """Whether a plan still fits. A replica that came since and has added nothing fetches the result later."""
    reported = {m.peer: m for m in members}
    planned = [reported.pop(peer, None) for peer in plan.members]
    return (
        all(m is not None and m.done == ledger for m, ledger in zip(planned, plan.ledgers, strict=True))
        and not any(m.done for m in reported.values())
        and not any(m.failed_round == plan.round for m in members)
    )


def _share_out(numel: int, members: Sequence[MemberStep], *, star: bool) -> tuple[int, ...]:
    """Elements owned by each replica, in proportion to its upload; if unmeasured or near the median, by the
    median.

    Measurements contain other replicas' delays; parts made unequal by such noise are slower than equal ones.
    """
    if star:
        return (numel, *(0 for _ in members[1:]))
    measured = sorted(m.bandwidth_bps for m in members if m.bandwidth_bps > 0)
    usual = measured[len(measured) // 2] if measured else 1.0
    alike = usual / ALIKE, usual * ALIKE
    weights = [
        m.bandwidth_bps if m.bandwidth_bps and not alike[0] <= m.bandwidth_bps <= alike[1] else usual
        for m in members
    ]
    total, edges, running = sum(weights), [0], 0.0
    for weight in weights:
        running += weight
        edges.append(round(numel * running / total))
    edges[-1] = numel
    return tuple(b - a for a, b in pairwise(edges))


def check_plan(
    plan: Plan, *, run: str, stage: Stage, t: int, microbatches: int, numel: int, me: PeerId, done: int
) -> str | None:
    """Why a replica must not join this round, or None. Makes trust in the coordinator unnecessary."""
    if len(plan.members) != len(plan.ledgers) or len(plan.members) != len(plan.parts):
        return "members, ledgers and parts differ in number"
    if list(plan.members) != sorted(set(plan.members)):
        return "the members are not sorted and distinct"
    if plan.round != round_id(run, stage, t, plan.number, plan.members, plan.ledgers):
        return "the group id is not the hash of run, stage, step, round, members and ledgers"
    if any(size < 0 for size in plan.parts) or sum(plan.parts) != numel:
        return f"the parts hold {sum(plan.parts)} of {numel} elements"
    if me not in plan.members:
        return "this peer is not a member"
    if plan.ledgers[plan.members.index(me)] != done:
        return "this peer's ledger is not the one that the plan names"
    union = 0
    for ledger in plan.ledgers:
        if ledger > everything(microbatches):
            return f"a ledger names a microbatch beyond {microbatches - 1}"
        if union & ledger:
            return f"microbatch {next(members_of(union & ledger))} is in two ledgers"
        union |= ledger
    if union != everything(microbatches):
        return f"microbatch {next(members_of(everything(microbatches) & ~union))} is in no ledger"
    return None


def finishes_until_s(began_s: float, told_s: float) -> float:
    """Until when a replica goes on with its own reduce though another offers the result.

    On equal lines all end within moments of each other: fetching the whole vector from the first one that
    ended costs more than the rest of the reduce (measured: 2 s a step at 8 Mbit/s). `began_s`: start of its
    reduce; `told_s`: when it heard of the result. A reduce that a dead replica broke has ended, and waits for
    nothing.
    """
    return told_s + max(FINISHES_LEAST_S, told_s - began_s)


@dataclass(frozen=True, slots=True)
class StageStep:
    """A stage coordinator's summary of one step."""

    stage: Stage
    version: int
    """Newest weight version of any replica."""
    lacking: int
    unclaimed: int
    """Microbatches that no live replica has or computes (none once the stage is reducing)."""
    ready: bool
    sqnorm: float


def decide_commit(
    t: int, stages: int, summaries: Mapping[Stage, StageStep], last_go: Mapping[int, Commit]
) -> Commit | None:
    """The commit of step `t`, once every stage is prepared; the squared norms are added in stage order.

    A stage that has taken the step already (on an earlier run coordinator's word) knows the commit: that one
    is used.
    """
    if t in last_go:
        return last_go[t]
    if len(summaries) < stages or not all(s.ready for s in summaries.values()):
        return None
    return Commit(t, sum(summaries[stage].sqnorm for stage in range(stages)))


def digest_majority(digests: Mapping[PeerId, str]) -> str:
    """The digest that most replicas report; a tie goes to the smallest id."""
    counts: dict[str, list[PeerId]] = {}
    for peer, digest in digests.items():
        counts.setdefault(digest, []).append(peer)
    return min(counts, key=lambda d: (-len(counts[d]), min(counts[d])))
