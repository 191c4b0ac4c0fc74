"""Who averages with whom, and when a step is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as remade

from swarm.protocol.ledger import Bitmap, everything, members_of
from swarm.protocol.rounds import (
    FINISHES_LEAST_S,
    MAX_MEMBERS,
    NO_VOICE,
    Commit,
    Decision,
    FetchResult,
    Lacking,
    Plan,
    Prepared,
    Retractions,
    StepReport,
    StepSummary,
    check_plan,
    decide,
    decide_commit,
    digest_majority,
    doubled_without_voice,
    elect,
    finishes_until_s,
    round_id,
)

RUN, STAGE, T, M, NUMEL = "run", 1, 7, 6, 1000
ALL = everything(M)


@dataclass(frozen=True)
class MemberStep:
    """A replica with its report, and its upload as far as it is measured."""

    peer: str
    done: int = 0
    in_progress: int = 0
    frozen_for: str = ""
    held: Prepared | None = None
    failed_round: str = ""
    bandwidth_bps: float = 0.0

    @property
    def report(self) -> StepReport:
        return StepReport(
            t=T, done=Bitmap(self.done), in_progress=Bitmap(self.in_progress), frozen_for=self.frozen_for,
            prepared=self.held, failed_round=self.failed_round,
        )  # fmt: skip


def decided(
    *members: MemberStep,
    current: Plan | None = None,
    numel: int = NUMEL,
    voice: Mapping[str, int] = NO_VOICE,
) -> Decision:
    reports = {member.peer: member.report for member in members}
    uploads_bps = {member.peer: member.bandwidth_bps for member in members}
    return decide(RUN, STAGE, T, M, numel, reports, current, uploads_bps, voice)


def planned(*members: MemberStep, current: Plan | None = None) -> Plan:
    decision = decided(*members, current=current)
    assert isinstance(decision, Plan)
    return decision


def refusal(plan: Plan, me: str, done: int, **changes: object) -> str | None:
    where = {"run": RUN, "stage": STAGE, "t": T, "microbatches": M, "numel": NUMEL, **changes}
    return check_plan(plan, me=me, done=done, **where)  # type: ignore[arg-type]


def resealed(plan: Plan) -> Plan:
    """`plan` as a liar would send it: with the id that fits its contents."""
    return remade(plan, round=round_id(RUN, STAGE, T, plan.number, plan.members, plan.ledgers, plan.parts))


A, B, C = MemberStep("a", 0b000011), MemberStep("b", 0b001100), MemberStep("c", 0b110000)


# --- decide -------------------------------------------------------------------------------------------------


def test_a_member_goes_on_with_its_reduce_for_as_long_again_as_it_took_until_a_replica_had_ended() -> None:
    assert finishes_until_s(began_s=10.0, told_s=14.0) == 18.0
    assert finishes_until_s(began_s=10.0, told_s=10.1) == 11.1  # a directive comes once a second
    assert finishes_until_s(0.0, 0.0) == FINISHES_LEAST_S


def test_what_is_in_nobodys_sum_is_lacking_and_what_nobody_computes_is_unclaimed() -> None:
    assert decided(A, replace(B, in_progress=0b010000)) == Lacking(lacking=0b110000, unclaimed=0b100000)


def test_a_stage_of_empty_members_lacks_everything() -> None:
    assert decided(MemberStep("a"), MemberStep("b")) == Lacking(ALL, ALL)


def test_a_microbatch_in_two_sums_is_undone_before_anything_is_averaged() -> None:
    assert decided(A, replace(B, done=0b001110), C) == Retractions({"b": 0b000010})


def test_of_three_that_have_it_the_smallest_id_keeps_it() -> None:
    assert decided(replace(C, done=ALL), replace(A, done=0b1), replace(B, done=0b11)) == Retractions(
        {"b": 0b1, "c": 0b11}
    )


def test_the_one_with_more_voice_keeps_it_whatever_its_id() -> None:
    later = replace(B, done=0b001110)
    assert decided(A, later, C, voice={"a": 20, "b": 100, "c": 100}) == Retractions({"a": 0b000010})
    assert decided(A, later, C, voice={"a": 20, "b": 30, "c": 30}) == Retractions({"b": 0b000010}), (
        "about as much"
    )


def test_a_crowd_of_strangers_that_have_nothing_is_in_no_round() -> None:
    """What all members signed did not fit into the answer of an owner any more, so that no round ended."""
    few, crowd = ({f"x{n:03}": StepReport(t=T) for n in range(count)} for count in (9, 400))
    own = {"a": StepReport(t=T, done=Bitmap(ALL & ~1)), "x000": StepReport(t=T, done=Bitmap(1))}

    def members(reports: Mapping[str, StepReport], voice: Mapping[str, int]) -> tuple[str, ...]:
        plan = decide(RUN, STAGE, T, M, NUMEL, reports, None, {}, voice)
        assert isinstance(plan, Plan)
        assert all(
            check_plan(plan, run=RUN, stage=STAGE, t=T, microbatches=M, numel=NUMEL, me=me, done=done) is None
            for me, done in zip(plan.members, plan.ledgers, strict=True)
        )
        return plan.members

    assert members({**crowd, **own}, {"a": 30, "x399": 30}) == ("a", "x000", "x399")
    assert len(members({**few, **own}, {"a": 30})) == 10 < MAX_MEMBERS


def test_what_a_replica_without_voice_has_too_is_known() -> None:
    reports = {member.peer: member.report for member in (A, replace(B, done=0b001110), replace(C, done=0b1))}
    assert doubled_without_voice(reports, {}) == {}
    assert doubled_without_voice(reports, {"a": 20}) == {"b": 0b10, "c": 0b1}
    assert doubled_without_voice(reports, {"b": 20, "c": 20}) == {"a": 0b11}


def test_what_is_lacking_is_settled_before_what_is_there_twice() -> None:
    assert isinstance(decided(A, A), Lacking)


def test_when_each_counts_once_the_members_average() -> None:
    plan = planned(B, C, A)
    assert plan.members == ("a", "b", "c")
    assert plan.ledgers == (A.done, B.done, C.done)
    assert plan.number == 0
    assert plan.round == round_id(RUN, STAGE, T, 0, plan.members, plan.ledgers, plan.parts)


def test_the_order_of_the_reports_does_not_matter() -> None:
    assert planned(A, B, C) == planned(C, A, B)


def test_a_plan_is_kept_as_long_as_it_fits() -> None:
    plan = planned(A, B, C)
    again = planned(replace(A, frozen_for=plan.round), B, C, current=plan)
    assert again is plan


def test_a_newcomer_that_has_added_nothing_does_not_void_a_plan() -> None:
    plan = planned(A, B, C)
    assert planned(MemberStep("0"), A, B, C, current=plan) is plan
    assert planned(A, B, C, MemberStep("d"), current=plan) is plan


def test_a_newcomer_is_in_the_plan_that_follows() -> None:
    plan = planned(A, B, C)
    after = planned(A, replace(B, failed_round=plan.round), C, MemberStep("d"), current=plan)
    assert after.members == ("a", "b", "c", "d")


def test_a_newcomer_that_has_added_something_is_settled_before_the_plan_goes_on() -> None:
    plan = planned(A, B, C)
    assert decided(A, B, C, MemberStep("d", 0b1), current=plan) == Retractions({"d": 0b1})


def test_a_plan_is_replaced_when_its_members_hold_other_microbatches() -> None:
    plan = planned(A, B, C)
    after = planned(replace(A, done=B.done), replace(B, done=A.done), C, current=plan)
    assert (after.number, after.ledgers) == (1, (B.done, A.done, C.done))


def test_a_member_that_came_back_empty_voids_its_plan() -> None:
    plan = planned(A, MemberStep("b"), replace(C, done=ALL & ~A.done))
    assert planned(A, MemberStep("b"), replace(C, done=ALL & ~A.done), current=plan) is plan
    assert isinstance(decided(A, B, MemberStep("c"), current=planned(A, B, C)), Lacking)


def test_nobody_steps_before_the_newcomer_holds_the_result_too() -> None:
    held = Prepared("round", 1.0, "digest")
    adopt = decided(replace(A, held=held), replace(B, held=held), MemberStep("c"))
    assert isinstance(adopt, FetchResult) and not adopt.ready


def test_who_came_first_coordinates_and_of_two_at_once_the_smallest_id() -> None:
    assert elect({"a": 3.0, "b": 2.0, "c": 2.0, "d": float("inf")}, {}) == ["b", "c", "a", "d"]
    assert not elect({}, {})


def test_a_plan_that_failed_at_a_member_is_followed_by_one_with_the_next_number() -> None:
    plan = planned(A, B, C)
    after = planned(A, replace(B, failed_round=plan.round), C, current=plan)
    assert (after.number, after.members) == (1, plan.members)
    assert after.round != plan.round


def test_an_old_failure_does_not_void_a_new_plan() -> None:
    plan = planned(A, B, C)
    after = planned(A, replace(B, failed_round=plan.round), C, current=plan)
    assert planned(A, replace(B, failed_round=plan.round), C, current=after) is after


def test_a_plan_with_a_member_that_died_is_replaced() -> None:
    plan = planned(A, B, MemberStep("c"), replace(C, peer="d"))
    after = planned(A, B, replace(C, peer="d"), current=plan)
    assert after.members == ("a", "b", "d")
    assert after.number == 1


def test_a_member_with_an_empty_sum_takes_part() -> None:
    assert planned(A, B, C, MemberStep("d")).ledgers == (A.done, B.done, C.done, 0)


def test_one_member_may_own_all_parts_of_a_new_plan_and_none_does_that_is_not_there() -> None:
    reports = {member.peer: member.report for member in (A, B, C)}
    for owner, parts in (("b", (0, NUMEL, 0)), ("z", (333, 334, 333))):
        decision = decide(RUN, STAGE, T, M, NUMEL, reports, None, {}, owners=[owner])
        assert isinstance(decision, Plan) and decision.parts == parts


def test_parts_are_sized_by_their_owners_upload() -> None:
    plan = planned(replace(A, bandwidth_bps=3e6), replace(B, bandwidth_bps=1e6), C)
    assert plan.parts == (429, 142, 429), "c is not measured and counts as the median of the others"
    assert planned(A, B, C).parts == (333, 334, 333)


@given(st.tuples(*[st.floats(0.0, allow_infinity=False)] * 3))
@example((1e8, 1e8, 1.7e308))
@example((1e8, 1.7e308, 1.7e308))
def test_of_whatever_uploads_are_told_all_is_shared_out(uploads_bps: tuple[float, ...]) -> None:
    members = zip((A, B, C), uploads_bps, strict=True)
    parts = planned(*(replace(member, bandwidth_bps=bps) for member, bps in members)).parts
    assert sum(parts) == NUMEL and min(parts) >= 0


def test_uploads_that_differ_by_the_noise_of_measuring_make_equal_parts() -> None:
    plan = planned(*(replace(m, bandwidth_bps=bps) for m, bps in ((A, 2e6), (B, 1.1e6), (C, 3.9e6))))
    assert plan.parts == planned(A, B, C).parts


def test_a_member_with_the_result_makes_the_others_adopt_it() -> None:
    held = Prepared("round", 2.5, "digest")
    assert decided(A, replace(B, held=held), C) == FetchResult("round", ("b",), ready=False, sqnorm=2.5)
    assert decided(*(replace(m, held=held) for m in (A, B, C))) == FetchResult(
        "round", ("a", "b", "c"), ready=True, sqnorm=2.5
    )


def test_of_two_results_the_one_that_more_members_hold_is_adopted_and_a_tie_goes_by_name() -> None:
    one, two = Prepared("one", 1.0, ""), Prepared("two", 2.0, "")
    assert decided(replace(A, held=one), replace(B, held=two), replace(C, held=two)) == FetchResult(
        "two", ("b", "c"), ready=False, sqnorm=2.0
    )
    assert decided(replace(A, held=two), replace(B, held=one)) == FetchResult("one", ("b",), False, 1.0)


def test_a_result_is_adopted_even_if_a_member_that_was_not_in_its_group_lacks_everything() -> None:
    assert isinstance(decided(replace(A, held=Prepared("r", 1.0, "")), MemberStep("z")), FetchResult)


reports = st.lists(
    st.tuples(st.integers(0, ALL), st.integers(0, ALL), st.one_of(st.just(0.0), st.floats(1.0, 1e10))),
    min_size=1,
    max_size=6,
).map(
    lambda rows: [
        MemberStep(f"p{i}", done=done, in_progress=in_progress & ~done, bandwidth_bps=bps)
        for i, (done, in_progress, bps) in enumerate(rows)
    ]
)


@st.composite
def exact_covers(draw: st.DrawFn) -> list[MemberStep]:
    """Members whose ledgers hold each microbatch once."""
    names = draw(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=5, unique=True))
    owners = draw(st.lists(st.sampled_from(names), min_size=M, max_size=M))
    speeds = draw(st.lists(st.one_of(st.just(0.0), st.floats(1.0, 1e12)), min_size=5, max_size=5))
    return [
        MemberStep(n, done=sum(1 << m for m in range(M) if owners[m] == n), bandwidth_bps=bps)
        for n, bps in zip(names, speeds, strict=False)
    ]


@given(reports)
def test_every_microbatch_is_lacking_or_undone_to_one_or_averaged_once(members: list[MemberStep]) -> None:
    decision = decided(*members)
    union = 0
    for member in members:
        union |= member.done
    if isinstance(decision, Lacking):
        assert decision.lacking == ALL & ~union != 0
        assert decision.unclaimed & ~decision.lacking == 0
    elif isinstance(decision, Retractions):
        left = [m.done & ~decision.by.get(m.peer, 0) for m in members]
        assert all(by & ~m.done == 0 for m in members for by in [decision.by.get(m.peer, 0)])
        counts = [sum(ledger >> m & 1 for ledger in left) for m in range(M)]
        assert counts == [1] * M, "no last copy is removed and none is left twice"
        after = [replace(m, done=ledger) for m, ledger in zip(members, left, strict=True)]
        assert isinstance(decided(*after), Plan)
    else:
        assert isinstance(decision, Plan)
        assert sum(m.done.bit_count() for m in members) == M


@given(exact_covers(), st.integers(0, 5), st.integers(0, 10_000))
@settings(max_examples=40)
def test_parts_are_whole_and_every_member_agrees_to_an_honest_plan(
    members: list[MemberStep], number: int, numel: int
) -> None:
    current = Plan("old", number, (), (), ())
    decision = decided(*members, current=current, numel=numel)
    assert isinstance(decision, Plan)
    plan = decision
    assert plan.number == number + 1
    assert len(plan.parts) == len(members)
    assert sum(plan.parts) == numel
    assert min(plan.parts) >= 0
    for member in members:
        assert refusal(plan, member.peer, member.done, numel=numel) is None


# --- check_plan ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda p: remade(p, parts=p.parts[:-1]),
            "members, ledgers and parts differ in number",
        ),
        (
            lambda p: remade(p, ledgers=(*p.ledgers, 0)),
            "members, ledgers and parts differ in number",
        ),
        (
            lambda p: remade(p, members=("a", "c", "b")),
            "the members are not sorted and distinct",
        ),
        (
            lambda p: remade(p, members=("a", "a", "b")),
            "the members are not sorted and distinct",
        ),
        (
            lambda p: remade(p, round="f" * 32),
            "the group id is not the hash of run, stage, step, round, members, ledgers and parts",
        ),
        (lambda p: resealed(remade(p, parts=(1, 1, 1))), "the parts hold 3 of 1000 elements"),
        (
            lambda p: resealed(remade(p, parts=(1200, -100, -100))),
            "the parts hold 1000 of 1000 elements",
        ),
        (
            lambda p: resealed(remade(p, members=("b", "c", "d"))),
            "this peer is not a member",
        ),
        (
            lambda p: resealed(remade(p, ledgers=(p.ledgers[1], p.ledgers[0], p.ledgers[2]))),
            "this peer's ledger is not the one that the plan names",
        ),
        (
            lambda p: resealed(remade(p, ledgers=(A.done, B.done | 0b10, C.done))),
            "microbatch 1 is in two ledgers",
        ),
        (
            lambda p: resealed(remade(p, ledgers=(A.done, B.done, 0b010000))),
            "microbatch 5 is in no ledger",
        ),
    ],
)
def test_a_member_does_not_join_a_plan_that_is_not_right(change: Callable[[Plan], Plan], why: str) -> None:
    assert refusal(change(planned(A, B, C)), "a", A.done) == why


@given(exact_covers(), st.data())
@settings(max_examples=40)
def test_every_change_of_a_plan_makes_some_member_refuse_it(
    members: list[MemberStep], data: st.DataObject
) -> None:
    plan = planned(*members)
    at = data.draw(st.integers(0, len(members) - 1))
    kind = data.draw(st.sampled_from(["round", "number", "member", "ledger", "more parts", "where"]))
    where: dict[str, object] = {}
    if kind == "round":
        plan = remade(plan, round=data.draw(st.text(max_size=40).filter(lambda text: text != plan.round)))
    elif kind == "number":
        plan = remade(plan, number=plan.number + data.draw(st.integers(1, 5)))
    elif kind == "member":
        changed = [*plan.members]
        changed[at] = data.draw(st.text(max_size=3).filter(lambda name: name not in plan.members))
        plan = remade(plan, members=tuple(changed))
    elif kind == "ledger":
        flipped: list[int] = [*plan.ledgers]
        flipped[at] ^= data.draw(st.integers(1, ALL))
        plan = resealed(remade(plan, ledgers=tuple(flipped)))
    elif kind == "more parts":
        parts = [*plan.parts]
        parts[at] += data.draw(st.integers(-NUMEL, NUMEL).filter(bool))
        plan = remade(plan, parts=tuple(parts))
    else:
        where = data.draw(
            st.sampled_from([{"run": "other"}, {"stage": STAGE + 1}, {"t": T + 1}, {"numel": NUMEL + 1}])
        )
    assert any(refusal(plan, m.peer, m.done, **where) is not None for m in members)


@given(st.lists(st.integers(0, ALL), min_size=1, max_size=4))
def test_no_plan_whose_ledgers_do_not_hold_each_microbatch_once_is_ever_joined(ledgers: list[int]) -> None:
    counts = [sum(ledger >> m & 1 for ledger in ledgers) for m in range(M)]
    assume(counts != [1] * M)
    names = tuple(f"p{i}" for i in range(len(ledgers)))
    plan = resealed(Plan("", 0, names, tuple(ledgers), (NUMEL, *[0] * (len(ledgers) - 1))))
    assert all(refusal(plan, name, done) is not None for name, done in zip(names, ledgers, strict=True))


# --- conduct, digest_majority -------------------------------------------------------------------------------


def summary(*, ready: bool = True, sqnorm: float = 1.0) -> StepSummary:
    return StepSummary(t=7, ready=ready, sqnorm=sqnorm)


def test_the_step_is_taken_when_all_stages_are_ready() -> None:
    summaries = {s: summary(sqnorm=10.0**-s) for s in (2, 0, 1)}
    assert decide_commit(7, 3, summaries, {}) == Commit(7, 1.0 + 0.1 + 0.01)


def test_the_norms_are_rounded_once_so_that_every_run_coordinator_gets_the_same_bits() -> None:
    norms = [1e16, 1.0, -1e16, 3.0]
    some = {s: summary(sqnorm=norm) for s, norm in enumerate(norms)}
    other = dict(reversed(some.items()))
    assert decide_commit(7, 4, some, {}) == decide_commit(7, 4, other, {}) == Commit(7, 4.0)


def test_the_step_is_not_taken_while_a_stage_has_not_spoken_or_is_not_ready() -> None:
    assert decide_commit(7, 2, {0: summary()}, {}) is None
    assert decide_commit(7, 2, {0: summary(), 1: summary(ready=False)}, {}) is None


def test_the_commit_of_an_earlier_run_coordinator_holds() -> None:
    earlier = Commit(7, 42.0)
    assert decide_commit(7, 2, {}, {7: earlier}) is earlier
    assert decide_commit(7, 1, {0: summary()}, {6: Commit(6, 1.0)}) == Commit(7, 1.0)


def test_most_members_decide_which_weights_are_right_and_a_tie_goes_to_the_smallest_id() -> None:
    assert digest_majority({"a": "x", "b": "y", "c": "y"}) == "y"
    assert digest_majority({"b": "x", "a": "y"}) == "y"
    assert digest_majority({"a": "x"}) == "x"


@given(exact_covers())
@settings(max_examples=40)
def test_the_name_of_a_group_tells_all_its_terms_apart(members: list[MemberStep]) -> None:
    plan = planned(*members)
    terms = (RUN, STAGE, T, plan.number, plan.members, plan.ledgers, plan.parts)
    others = tuple(f"{p}x" for p in plan.members)
    ledgers, parts = tuple(b ^ 1 for b in plan.ledgers), tuple(p + 1 for p in plan.parts)
    for i, other in enumerate(["other", 2, 8, 9, others, ledgers, parts]):
        changed = [*terms]
        changed[i] = other
        assert round_id(*changed) != plan.round  # type: ignore[arg-type]
    assert list(members_of(ALL)) == sorted(m for b in plan.ledgers for m in members_of(b))
