"""Which replicas average, and when a step is taken. Pure functions over plain data.

A *replica* knows its own ledger and sum; the *coordinator* of a stage (`elect`ed) reads its replicas'
reports: `decide`; the *run coordinator* (that of stage 0) reads the stages' summaries: `decide_commit`. What
travels is state, not commands, each message complete and idempotent. Safety does not rest on there being one
coordinator: every replica checks for itself that a plan's ledgers hold each microbatch once (`check_plan`),
so any complete result of a step is *the* result. More: docs/design.md, *The path of a step*.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Annotated, TypeAlias

import msgspec
from msgspec.structs import replace

from swarm.floats import total_of
from swarm.ids import PeerId, Stage
from swarm.protocol.ledger import Bitmap, everything, members_of, union_of
from swarm.protocol.statements import Signature
from swarm.protocol.voice import RANK_STEPS, heard, weight
from swarm.records import Voucher

NOTHING = Bitmap(0)
NO_VOICE: Mapping[PeerId, int] = {}
"""All words count alike."""

MAX_NAME = 64
"""Characters of a round's name or a digest: they are passed on to all replicas, in one message."""
Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
MAX_SOURCES = 64
"""Replicas that are named as the source of something."""
Sources: TypeAlias = Annotated[tuple[PeerId, ...], msgspec.Meta(max_length=MAX_SOURCES)]
PROOFS = 2
"""Replicas whose word a stage's norm needs, if there are as many."""

MAX_MEMBERS = 256
"""A larger round has no member that only listens: one header tells what at most 344 members signed."""

FINISHES_LEAST_S = 1.0
"""A replica goes on with its own reduce for at least so long: `finishes_until_s`."""
MAX_UPLOAD_BPS = 1e15
"""One that says more has made it up: of some such no sum is a number."""
ALIKE = 2.0
"""Uploads within this factor of the median count as equal. On three equal lines of 8 Mbit/s steps took 15 %
longer while each replica's part followed its measurement."""

Content: TypeAlias = tuple[str, float, str]
"""Round, squared norm and digest of a result: what replicas compare."""


class Prepared(msgspec.Struct, frozen=True):
    """A replica holds the complete reduced gradient of a step, not yet applied."""

    round: Name
    sqnorm: float
    """Squared 2-norm of the stage's summed gradient."""
    digest: Name
    signature: Signature = b""
    """Of the replica that holds it; see `swarm.protocol.proofs`."""
    voucher: Voucher | None = None
    """What gives that replica voice."""

    @property
    def content(self) -> Content:
        """The same of all replicas that hold this result."""
        return self.round, self.sqnorm, self.digest


class Proof(msgspec.Struct, frozen=True, array_like=True):
    """A replica's signed result."""

    peer: PeerId
    prepared: Prepared


class Commit(msgspec.Struct, frozen=True):
    """All stages are prepared: apply step `t` with this squared norm over all stages."""

    t: int
    total_sqnorm: float
    proofs: tuple[tuple[Proof, ...], ...] = ()
    """By stage, in runs whose replicas sign."""


class Plan(msgspec.Struct, frozen=True):
    """One all-reduce: its replicas, their ledgers, and the part that each of them owns."""

    round: Name
    number: int
    members: tuple[PeerId, ...]
    """Sorted."""
    ledgers: tuple[Bitmap, ...]
    parts: tuple[int, ...]
    """Elements of the flat gradient that each replica owns, in order; they sum to its length."""


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's ledger of one step."""

    t: int
    done: Bitmap = NOTHING
    in_progress: Bitmap = NOTHING
    frozen_for: Name = ""
    prepared: Prepared | None = None
    """The result that it holds."""
    failed_round: Name = ""
    """The last round that failed at this replica."""
    gave_all: Name = ""
    """The last round to which it gave all that others need to have the result."""


class FetchResult(msgspec.Struct, frozen=True):
    """`round` is complete at `sources`: every other replica fetches it from one of them."""

    round: Name
    sources: Sources
    ready: bool
    """Every replica holds it: the stage is prepared."""
    sqnorm: float
    proofs: tuple[Proof, ...] = ()


class Lacking(msgspec.Struct, frozen=True):
    """Microbatches that are in no replica's sum; `unclaimed` of them are not being computed either."""

    lacking: int
    unclaimed: int


class Retractions(msgspec.Struct, frozen=True):
    """Microbatches counted twice, by the replica that subtracts them."""

    by: Mapping[PeerId, int]


Decision = FetchResult | Lacking | Retractions | Plan
"""A plan: every microbatch counts once, so average."""


def elect(since_s: Mapping[PeerId, float], voice: Mapping[PeerId, int]) -> list[PeerId]:
    """The peers that may coordinate, first those with most voice, in whole `RANK_STEPS`, and smallest id.

    Where none has voice, the peer that joined first, by its own clock: a newcomer thus takes nothing over
    while older peers live. It would know of no plan, and a running reduce would start again. A wrong clock
    costs just that.
    """
    rank = {p: -(voice[p] // RANK_STEPS) if voice.get(p) else since_s[p] for p in heard(since_s, voice)}
    return sorted(rank, key=lambda peer: (rank[peer], peer))


def named_by_most(told: Mapping[PeerId, Collection[PeerId]], *, least: int = 2) -> set[PeerId]:
    """The peers that most of the others name, and `least` of those that said what they know: `told`."""
    named = set[PeerId]()
    for peer in {name for names in told.values() for name in names}:
        others = [teller for teller in told if teller != peer]
        by = [teller for teller in others if peer in told[teller]]
        if 2 * len(by) > len(others) and len(by) >= least:
            named.add(peer)
    return named


def round_id(
    run: str, stage: Stage, t: int, number: int, members: Sequence[PeerId], ledgers: Sequence[int],
    parts: Sequence[int],
) -> str:  # fmt: skip
    """The name of an all-reduce group: a hash of everything that its replicas must agree on.

    The parts are in it: a new coordinator may know other bandwidths.
    """
    of_each = (f"{p}:{ledger:x}:{part}" for p, ledger, part in zip(members, ledgers, parts, strict=True))
    text = "|".join([run, str(stage), str(t), str(number), *of_each])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def decide(
    run: str, stage: Stage, t: int, microbatches: int, numel: int, reports: Mapping[PeerId, StepReport],
    current: Plan | None, bandwidths_bps: Mapping[PeerId, float], voice: Mapping[PeerId, int] = NO_VOICE, *,
    owners: Collection[PeerId] | None = None,
) -> Decision:  # fmt: skip
    """What a stage should do about step `t`, from its live replicas' reports.

    `current` is the plan published last, kept as long as it still fits the reports. `bandwidths_bps`: the
    replicas' uploads, as far as they are measured. `voice`: whose word counts that it has the result; a
    replica without voice is not waited for, and owns no part. `owners`: those that own parts of a new plan,
    if one of them is heard.
    """
    reports = dict(sorted(reports.items()))
    held = held_by_word(reports, voice)
    if held:
        return _fetch(held, heard(reports, voice), voice)
    union = twice = in_progress = 0
    for report in reports.values():
        twice |= union & report.done
        union |= report.done
        in_progress |= report.in_progress
    if union != everything(microbatches):
        lacking = everything(microbatches) & ~union
        return Lacking(lacking, lacking & ~in_progress)
    if twice:
        return _retract(reports, twice, voice)
    # That a plan is complete a member has to say that counts.
    told = current is not None and not set(current.members).isdisjoint(heard(reports, voice))
    if current is not None and told and is_current(current, reports) and not failed_at(current, reports):
        return current
    number = 0 if current is None else current.number + 1
    speaking, few = set(heard(reports, voice)), len(reports) <= MAX_MEMBERS
    ids = tuple(peer for peer, report in reports.items() if few or report.done or peer in speaking)
    ledgers = tuple(reports[peer].done for peer in ids)
    uploads_bps = [bandwidths_bps.get(peer, 0.0) for peer in ids]
    owning = speaking.intersection(speaking if owners is None else owners) or speaking
    parts = _share_out(numel, uploads_bps, [peer in owning for peer in ids])
    return Plan(round_id(run, stage, t, number, ids, ledgers, parts), number, ids, ledgers, parts)


def held_by_word(reports: Mapping[PeerId, StepReport], voice: Mapping[PeerId, int]) -> dict[PeerId, Prepared]:
    """The results that replicas hold, as far as a replica that is heard holds the same."""
    held = {peer: report.prepared for peer, report in reports.items() if report.prepared is not None}
    known = {held[peer].content for peer in heard(reports, voice) if peer in held}
    return {peer: prepared for peer, prepared in held.items() if prepared.content in known}


def _fetch(
    held: Mapping[PeerId, Prepared], waited_for: Sequence[PeerId], voice: Mapping[PeerId, int]
) -> FetchResult:
    votes: dict[Content, list[PeerId]] = {}
    for peer in heard(held, voice):
        votes.setdefault(held[peer].content, []).append(peer)
    chosen = min(votes, key=lambda what: (-sum(weight(peer, voice) for peer in votes[what]), what))
    sources = votes[chosen]
    return FetchResult(
        round=chosen[0], sources=tuple(sources), ready=set(waited_for) <= set(sources),
        sqnorm=held[sources[0]].sqnorm,
        proofs=tuple(Proof(peer, held[peer]) for peer in sources if held[peer].signature)[:PROOFS],
    )  # fmt: skip


def proven_by(
    fetch: FetchResult, others: Mapping[PeerId, StepReport], voice: Mapping[PeerId, int]
) -> FetchResult:
    """A result with the words of replicas that are left out, too: the run waits for those that have it."""
    held = {peer: step.prepared for peer, step in sorted(others.items()) if step.prepared is not None}
    said = {proof.prepared.content for proof in fetch.proofs}
    same = {p: h for p, h in held.items() if h.content in said}
    proofs = (Proof(peer, same[peer]) for peer in heard(same, voice) if same[peer].signature)
    return replace(fetch, proofs=(*fetch.proofs, *proofs)[:PROOFS])


def doubled_without_voice(
    reports: Mapping[PeerId, StepReport], voice: Mapping[PeerId, int]
) -> dict[PeerId, int]:
    """What replicas without voice have of the microbatches that are in the sums of those with voice.

    Until it has retracted that, such a replica is not counted: it may never do so.
    """
    counted = union_of(report.done for peer, report in reports.items() if voice.get(peer))
    found = {peer: report.done & counted for peer, report in reports.items() if not voice.get(peer)}
    return {peer: doubled for peer, doubled in found.items() if doubled}


def _retract(reports: Mapping[PeerId, StepReport], twice: int, voice: Mapping[PeerId, int]) -> Retractions:
    """The directive to retract duplicates: the replica with the most voice, in whole `RANK_STEPS`, keeps its
    own; of several, the one with the smallest id.
    """
    left, again = twice, dict[PeerId, int]()
    for peer in sorted(reports, key=lambda peer: (-(voice.get(peer, 0) // RANK_STEPS), peer)):
        doubled = reports[peer].done & twice
        again[peer] = doubled & ~left
        left &= ~doubled
    return Retractions({peer: bits for peer, bits in again.items() if bits})


def is_current(plan: Plan, reports: Mapping[PeerId, StepReport]) -> bool:
    """Whether a plan's replicas and ledgers are still those of the stage. A replica that came since and has
    added nothing fetches the result later.
    """
    ledgers = dict(zip(plan.members, plan.ledgers, strict=True))
    return ledgers.keys() <= reports.keys() and all(
        report.done == ledgers.get(peer, 0) for peer, report in reports.items()
    )


def failed_at(plan: Plan, reports: Mapping[PeerId, StepReport]) -> list[PeerId]:
    """The replicas at which a round failed, as they say."""
    return [peer for peer, report in reports.items() if report.failed_round == plan.round]


def _share_out(numel: int, uploads_bps: Sequence[float], owns: Sequence[bool]) -> tuple[int, ...]:
    """Elements owned by each replica, in proportion to its upload; if unmeasured or near the median, by the
    median. A replica that `owns` says no of has none.

    Measurements contain other replicas' delays; parts made unequal by such noise are slower than equal ones.
    """
    uploads_bps = [min(bps, MAX_UPLOAD_BPS) for bps in uploads_bps]
    measured = sorted(bps for bps, owner in zip(uploads_bps, owns, strict=True) if owner and bps > 0)
    usual = measured[len(measured) // 2] if measured else 1.0
    alike = usual / ALIKE, usual * ALIKE
    weights = [bps if bps > 0 and not alike[0] <= bps <= alike[1] else usual for bps in uploads_bps]
    weights = [share if owner else 0.0 for share, owner in zip(weights, owns, strict=True)]
    total = sum(weights)
    edges = [0, *(round(numel * before / total) for before in accumulate(weights))]
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
    if plan.round != round_id(run, stage, t, plan.number, plan.members, plan.ledgers, plan.parts):
        return "the group id is not the hash of run, stage, step, round, members, ledgers and parts"
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


class StepSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A stage coordinator's summary of one step."""

    t: int
    unclaimed: Bitmap = NOTHING
    """Microbatches that no live replica has or computes (none once the stage is reducing)."""
    ready: bool = False
    sqnorm: float = 0.0
    proofs: tuple[Proof, ...] = ()
    loss: float | None = None
    """Last stage, once covered: the mean over the M microbatches, added in their order."""


def decide_commit(
    t: int, stages: int, summaries: Mapping[Stage, StepSummary], known: Mapping[int, Commit]
) -> Commit | None:
    """The commit of step `t`, once every stage is prepared.

    A stage that has taken the step already (on an earlier run coordinator's word) knows the commit: that one
    is used.
    """
    if t in known:
        return known[t]
    if len(summaries) < stages or not all(s.ready for s in summaries.values()):
        return None
    by_stage = [summaries[stage] for stage in range(stages)]
    proofs = tuple(summary.proofs for summary in by_stage) if by_stage[0].proofs else ()
    return Commit(t, total_of(summary.sqnorm for summary in by_stage), proofs)


def digest_majority(digests: Mapping[PeerId, str], voice: Mapping[PeerId, int] = NO_VOICE) -> str:
    """The digest that has the most voice among replicas; a tie goes to the smallest id."""
    said: dict[str, list[PeerId]] = {}
    for peer in heard(digests, voice):
        said.setdefault(digests[peer], []).append(peer)
    return min(said, key=lambda digest: (-sum(weight(p, voice) for p in said[digest]), min(said[digest])))
