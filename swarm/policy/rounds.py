"""Who averages with whom, and when a step is taken. Pure functions over plain data.

Three roles, each played by whoever is there, none holding anything that cannot be asked for again:

- a *member* serves one stage and knows its own ledger and sum;
- the *coordinator* of a stage (its live member that came first: `eldest`) looks at its members' reports
  and publishes what the stage should do: `decide`;
- the *conductor* (the coordinator of stage 0) looks at the stages' summaries: `conduct`.

What travels is state, not commands: reports up, briefs down, each the whole truth and idempotent. A
lost, late or doubled message therefore changes nothing but time. Safety does not rest on there being
one coordinator: a result is complete only if its group's ledgers hold each microbatch once, which
every member checks for itself (`check_plan`), so any complete result of a step is *the* result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from swarm.ids import PeerId, Stage
from swarm.policy.ledger import everything, members_of

STAR_AFTER = 3
"""After so many void rounds of one step the coordinator reduces everything itself: two members may be
unable to reach each other while both reach it."""


FINISHES_LEAST_S = 1.0

ALIKE = 2.0
"""Uploads within so many times the median count as equal. On three equal lines of 8 Mbit/s steps took 15 %
longer while each member had its part by what it measured."""


@dataclass(frozen=True, slots=True)
class Held:
    """A member holds the complete reduced gradient of a step, not yet applied."""

    round: str
    sqnorm: float
    """Squared 2-norm of the stage's summed gradient."""
    digest: str


@dataclass(frozen=True, slots=True)
class Go:
    """All stages are prepared: apply step `t` with this squared norm over all stages."""

    t: int
    total_sqnorm: float


@dataclass(frozen=True, slots=True)
class Plan:
    """One all-reduce: who takes part, with which ledgers, and who owns which part."""

    round: str
    number: int
    members: tuple[PeerId, ...]
    """Sorted."""
    ledgers: tuple[int, ...]
    parts: tuple[int, ...]
    """Elements of the flat gradient that each member owns, in order; they sum to the whole."""


@dataclass(frozen=True, slots=True)
class MemberStep:
    """What one member says about one step."""

    peer: PeerId
    done: int = 0
    doing: int = 0
    frozen_for: str = ""
    held: Held | None = None
    failed_round: str = ""
    """The last round that failed at this member."""
    bandwidth_bps: float = 0.0
    """Measured upload, bits per second; 0 = not measured."""
    fixed: int = 0
    """Of `done`, what this member cannot undo."""


@dataclass(frozen=True, slots=True)
class Adopt:
    """`round` is complete at `sources`: everyone else fetches it from one of them."""

    round: str
    sources: tuple[PeerId, ...]
    ready: bool
    """Every member holds it: the stage is prepared."""
    sqnorm: float


@dataclass(frozen=True, slots=True)
class Lacking:
    """These microbatches are in nobody's sum; `unclaimed` of them nobody is computing either."""

    lacking: int
    unclaimed: int


@dataclass(frozen=True, slots=True)
class Undo:
    """Microbatches counted twice: who subtracts which."""

    by: Mapping[PeerId, int]


@dataclass(frozen=True, slots=True)
class Reduce:
    """Every microbatch counts once: average."""

    plan: Plan


Decision = Adopt | Lacking | Undo | Reduce


def eldest(since_s: Mapping[PeerId, float]) -> PeerId | None:
    """Who coordinates: the peer that came first, by its own clock; of two at once, the smallest id.

    So a newcomer takes nothing over while those who were there live: it would know of no plan, and a
    reduce that runs would start again. A clock that is wrong costs just that.
    """
    return min(since_s, key=lambda peer: (since_s[peer], peer), default=None)


def round_id(
    run: str, stage: Stage, t: int, number: int, members: Sequence[PeerId], ledgers: Sequence[int]
) -> str:
    """The name of an all-reduce group: a hash of everything that its members must agree on."""
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
    """What a stage should do about step `t`, from its live members' reports.

    `current` is the plan published last, kept as long as it still fits the reports.
    """
    members = sorted(members, key=lambda member: member.peer)
    holders = [m for m in members if m.held is not None]
    if holders:
        return _adopt(members, holders)
    union = twice = doing = 0
    for member in members:
        twice |= union & member.done
        union |= member.done
        doing |= member.doing
    if union != everything(microbatches):
        lacking = everything(microbatches) & ~union
        return Lacking(lacking, lacking & ~doing)
    if twice:
        return _undo(members, twice)
    if current is not None and _still_fits(current, members):
        return Reduce(current)
    number = 0 if current is None else current.number + 1
    ids, ledgers = tuple(m.peer for m in members), tuple(m.done for m in members)
    parts = _share_out(numel, members, star=number >= STAR_AFTER)
    return Reduce(Plan(round_id(run, stage, t, number, ids, ledgers), number, ids, ledgers, parts))


def _adopt(members: Sequence[MemberStep], holders: Sequence[MemberStep]) -> Adopt:
    votes: dict[str, list[MemberStep]] = {}
    for member in holders:
        assert member.held is not None
        votes.setdefault(member.held.round, []).append(member)
    chosen = min(votes, key=lambda name: (-len(votes[name]), name))
    held = votes[chosen][0].held
    assert held is not None
    return Adopt(
        round=chosen,
        sources=tuple(m.peer for m in votes[chosen]),
        ready=len(votes[chosen]) == len(members),
        sqnorm=held.sqnorm,
    )


def _undo(members: Sequence[MemberStep], twice: int) -> Undo:
    """Who cannot undo a duplicate keeps it, else the member with the smallest id; the others take it out.

    Of two that cannot, the second is told all the same: it drops its whole sum.
    """
    keeps = dict.fromkeys((member.peer for member in members), 0)
    left = twice
    for only_fixed in (True, False):
        for member in members:
            could = member.done & member.fixed if only_fixed else member.done
            keeps[member.peer] |= could & left
            left &= ~could
    by = {m.peer: m.done & twice & ~keeps[m.peer] for m in members}
    return Undo({peer: again for peer, again in by.items() if again})


def _still_fits(plan: Plan, members: Sequence[MemberStep]) -> bool:
    """Whoever came since and has added nothing changes nothing: it takes the result when it is there."""
    reported = {m.peer: m for m in members}
    planned = [reported.pop(peer, None) for peer in plan.members]
    return (
        all(m is not None and m.done == ledger for m, ledger in zip(planned, plan.ledgers, strict=True))
        and not any(m.done for m in reported.values())
        and not any(m.failed_round == plan.round for m in members)
    )


def _share_out(numel: int, members: Sequence[MemberStep], *, star: bool) -> tuple[int, ...]:
    """Elements owned by each member, in proportion to its upload; unmeasured or near the median, the median.

    What a member measures has others' delays in it; parts unequal by such noise are slower than equal ones.
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
    """Why a member must not join this round, or None. Nobody needs to trust a coordinator."""
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
        if union & ledger:
            return f"microbatch {next(members_of(union & ledger))} is in two ledgers"
        union |= ledger
    if union != everything(microbatches):
        return f"microbatch {next(members_of(everything(microbatches) & ~union))} is in no ledger"
    return None


def finishes_until_s(began_s: float, told_s: float) -> float:
    """Until when a member goes on with its own reduce, though a mate holds the result and would give it.

    On equal lines all end within moments of each other: taking the whole vector from the first one that ended
    costs more than the rest of the reduce (measured: 2 s a step at 8 Mbit/s). `began_s`: of its reduce;
    `told_s`: when it heard of the mate. A reduce that a dead member broke has ended, and waits for nothing.
    """
    return told_s + max(FINISHES_LEAST_S, told_s - began_s)


@dataclass(frozen=True, slots=True)
class StageStep:
    """A stage coordinator's summary of one step."""

    stage: Stage
    version: int
    """Newest weight version of any member."""
    lacking: int
    unclaimed: int
    """Microbatches that no live member has or computes (none once the stage is reducing)."""
    ready: bool
    sqnorm: float


def conduct(
    t: int, stages: int, summaries: Mapping[Stage, StageStep], last_go: Mapping[int, Go]
) -> Go | None:
    """The go for step `t`, once every stage is prepared; the squared norms are added in stage order.

    A stage that stepped already (it heard an earlier conductor) knows the go: then that one holds.
    """
    if t in last_go:
        return last_go[t]
    if len(summaries) < stages or not all(s.ready for s in summaries.values()):
        return None
    return Go(t, sum(summaries[stage].sqnorm for stage in range(stages)))


def digest_majority(digests: Mapping[PeerId, str]) -> str:
    """The weights that most members hold; a tie goes to the smallest id."""
    counts: dict[str, list[PeerId]] = {}
    for peer, digest in digests.items():
        counts.setdefault(digest, []).append(peer)
    return min(counts, key=lambda d: (-len(counts[d]), min(counts[d])))
