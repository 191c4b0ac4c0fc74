"""Who holds a stage up is left out, and nobody else."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from swarm.ids import Generation, PeerId
from swarm.policy.backoff import BUDGET_ROUNDS, BUDGET_S, FIRST_REST_S, Backoff
from swarm.policy.timeouts import MIN_S, AdaptiveTimeout
from swarm.protocol.blame import (
    ALL_OWNERS,
    COMPUTED_S,
    HELD_UP_S,
    PREPARED_S,
    SEEN,
    SEEN_OF_TWO_S,
    SUSPECTED,
    SUSPECTED_LEADING,
    UNSEEN_S,
    Awaited,
    Blame,
    RoundWaits,
    Waits,
)
from swarm.protocol.ledger import Bitmap
from swarm.protocol.messages import Directive, StepDirective
from swarm.protocol.rounds import (
    FetchResult,
    Plan,
    Prepared,
    Retractions,
    StepReport,
    decide,
    named_by_most,
)

ALL = 0b1111


def step(done: int = 0, *, computes: int = 0, failed: str = "", held: str = "") -> StepReport:
    return StepReport(
        t=0, done=Bitmap(done), in_progress=Bitmap(computes), failed_round=failed,
        prepared=Prepared(held, 1.0, "") if held else None,
    )  # fmt: skip


def blame() -> tuple[Blame, Backoff]:
    backoff = Backoff()
    return Blame("ann", lambda _: 4, backoff), backoff


def plan_of(**reports: StepReport) -> Plan:
    decision = decide("5a", 1, 0, 4, 90, reports, None, {})
    assert isinstance(decision, Plan)
    return decision


# --- waits ---


def test_what_is_usual_follows_from_waits_that_ended() -> None:
    waits = Waits(AdaptiveTimeout(min_s=1.0))
    for t in range(5):
        waits.note(t, {"bob": 0}, now=10.0 * t)
        waits.note(t, {}, now=10.0 * t + 2.0)
    waits.note(5, {"bob": 0}, now=50.0)
    assert waits.late(5, now=69.0) == {}
    assert waits.late(5, now=70.1) == {"bob": 50.0}
    assert waits.late(5, now=70.1, least_s=30.0) == {}


def test_progress_begins_a_wait_anew() -> None:
    waits = Waits(AdaptiveTimeout(min_s=1.0))
    waits.note(0, {"bob": 0b01}, now=0.0)
    waits.note(0, {"bob": 0b11}, now=0.9)
    assert waits.late(0, now=1.5) == {}


def test_the_waits_of_two_steps_do_not_end_each_other() -> None:
    """With delayed updates two steps are open."""
    waits = Waits(AdaptiveTimeout(min_s=1.0))
    for now in (0.0, 0.5, 1.5):
        waits.note(0, {"bob": 0}, now=now)
        waits.note(1, {}, now=now)
    assert waits.late(0, now=1.5) == {"bob": 0.0}
    waits.forget(1)
    assert waits.late(0, now=1.5) == {}


# --- claims ---


def test_a_claim_that_takes_too_long_is_run_again_and_charged() -> None:
    this, backoff = blame()
    reports = {"ann": step(0b0111), "bob": step(computes=0b1000)}
    assert this.computing(0, reports, now=0.0) == reports
    assert this.computing(0, reports, now=COMPUTED_S - 1.0) == reports
    told = this.computing(0, reports, now=COMPUTED_S + 1.0)
    assert told["bob"].in_progress == 0 and told["ann"] == reports["ann"]
    assert this.left_out(0, {"ann", "bob"}, set(), now=COMPUTED_S + 1.0) == {"bob"}
    assert backoff.rests("bob", now=COMPUTED_S + 1.0)


def test_a_claim_takes_as_long_as_what_is_behind_the_stage() -> None:
    """Eight stages of a second each: most waits of a step are short, and the first is not."""
    backoff, even, all_16 = Backoff(), 0x5555, 0xFFFF
    this = Blame("ann", lambda _: 16, backoff)
    for t in range(3):
        for quarters in range(49):
            done = all_16 & ~(all_16 << max(0, quarters - 32))
            reports = {
                "ann": step(done & even, computes=even & ~done),
                "bob": step(done & ~even, computes=all_16 & ~even & ~done),
            }
            assert this.computing(t, reports, now=100.0 * t + quarters / 4) == reports
    reports = {"ann": step(even), "bob": step(computes=all_16 & ~even)}
    assert this.computing(3, reports, now=300.0) == reports
    assert not backoff.was_charged("bob", t=3)
    assert this.computing(3, reports, now=330.0) != reports and backoff.was_charged("bob", t=3)


def test_a_claim_that_was_undone_and_made_again_counts_from_then() -> None:
    """Else who has a caller's claims end has the stage wait long for its own."""
    this, _ = blame()
    for t in range(3):
        for now, own in ((0.0, step(computes=1)), (1.0, step()), (100.0, step(computes=1)), (101.0, step(1))):
            this.computing(t, {"ann": own, "bob": step(0b1110)}, now=1000.0 * t + now)
    for now in (3000.0, 3001.0 + COMPUTED_S):
        this.computing(3, {"ann": step(0b1110), "bob": step(computes=1)}, now=now)
    assert this.left_out(0, {"bob"}, set(), now=3001.0 + COMPUTED_S)


def test_a_claim_costs_nothing_while_the_stage_waits_for_other_microbatches() -> None:
    this, _ = blame()
    reports = {"ann": step(0b0011), "bob": step(computes=0b1000)}
    for now in (0.0, 200.0, 400.0):
        assert this.computing(0, reports, now=now) == reports
    assert not this.left_out(0, {"bob"}, set(), now=400.0)


# --- duplicates ---


def undo(this: Blame, reports: dict[PeerId, StepReport], now: float, *, generation: int = 0) -> None:
    decision = decide("5a", 1, 0, 4, 90, reports, None, {})
    at = (0, Generation(generation))
    this.retracting(at, decision.by if isinstance(decision, Retractions) else {}, reports, now=now)


def test_one_that_does_not_retract_is_left_out_though_it_claims_other_things_meanwhile() -> None:
    this, _ = blame()
    this.computing(0, {"ann": step(), "bob": step(computes=ALL)}, now=0.0)
    this.computing(0, {"ann": step(), "bob": step(ALL)}, now=0.5)  # microbatches take half a second
    for tenths in range(190):
        claim = ALL if tenths // 10 % 2 else 0b0101 if tenths % 2 else 0
        undo(this, {"ann": step(ALL), "bob": step(claim)}, tenths / 10)
        assert not this.left_out(0, {"bob"}, set(), now=tenths / 10)
    for tenths in range(190, 270):
        undo(this, {"ann": step(ALL), "bob": step(ALL)}, tenths / 10)
    assert this.left_out(0, {"ann", "bob"}, set(), now=27.0) == {"bob"}


def test_one_that_others_retract_for_keeps_what_it_has() -> None:
    this, _ = blame()
    both, one, none = ({"aaa": step(its), "ann": step(mine)} for its, mine in ((ALL, ALL), (ALL, 0), (0, 0)))
    undo(this, both, 0.0)
    undo(this, none, 1.0, generation=1)  # what a rollback takes is no fault of its own
    for now in (2.0, 12.0):
        assert not this.left_out(0, {"aaa"}, set(), now=now)
        undo(this, both, now, generation=1)
        undo(this, one, now + 1.0, generation=1)
        undo(this, none, now + 2.0, generation=1)
    assert this.left_out(0, {"aaa"}, set(), now=15.0) and not this.left_out(0, {"ann"}, set(), now=15.0)


def test_one_that_takes_back_what_it_said_untold_is_charged_with_the_time_since() -> None:
    """With each claim the stage looked complete, or lacked what nobody was told: 13 s, and then 20 more."""
    this, _ = blame()
    for tenths in range(202):
        assert tenths > 199 or not this.left_out(0, {"bob"}, set(), now=tenths / 10)
        undo(this, {"ann": step(0b0011), "bob": step(0b0011 if tenths % 2 else 0b1100)}, tenths / 10)
    assert this.left_out(0, {"bob"}, set(), now=20.2)


def test_one_that_loses_its_sum_or_retracts_what_it_was_told_to_is_charged_with_little() -> None:
    this, backoff = blame()
    for now, claim in ((0.0, 0b1100), (100.0, 0), (101.0, ALL), (102.0, 0)):
        undo(this, {"ann": step(0b0011 if now < 101 else ALL), "bob": step(claim)}, now)
    assert backoff.within_budget_s("bob", 99.0, t=0) == BUDGET_S - MIN_S


# --- the result ---


@pytest.mark.parametrize(("holders", "most_s"), [(("ann",), 21.0), (("ann", "cid"), 10.1)])
def test_a_replica_that_never_has_the_result_is_left_out(holders: tuple[PeerId, ...], most_s: float) -> None:
    """Also where it had just coordinated for its turn, and sooner where two others have the result."""
    this, _ = blame()
    fetch = FetchResult(round="r", sources=holders, ready=False, sqnorm=1.0)
    reports = {**dict.fromkeys(holders, step(ALL, held="r")), "bob": step()}
    this.planned(0, now=0.0)
    this.prepared(0, fetch, None, reports, now=1.0)
    this.prepared(0, fetch, None, reports, now=1.0 + 3.0)
    assert not this.left_out(0, {"bob"}, set(), now=4.0), "it may have to fetch all that the round moved"
    tenths = 40
    while not this.left_out(0, {"bob"}, set(), now=tenths / 10):
        tenths += 1
        this.prepared(0, fetch, None, reports, now=tenths / 10)
    assert tenths / 10 == most_s


def test_one_that_has_the_result_late_in_some_steps_costs_what_any_may() -> None:
    this, backoff = blame()
    for t in range(3):
        fetch, began_s = FetchResult(round=f"{t}", sources=("ann", "cid"), ready=False, sqnorm=1.0), 9.0 * t
        this.planned(t, now=began_s)
        for tenths in range(62):
            reports = {"ann": step(ALL, held=f"{t}"), "bob": step()}
            this.prepared(t, fetch, None, reports, now=began_s + tenths / 10)
    assert backoff.cost_s("bob", t=2) == pytest.approx(3 * 6.1) and not this.left_out(
        2, {"bob"}, set(), now=25.0
    )


def test_nobody_is_charged_for_a_result_that_the_coordinator_itself_lacks() -> None:
    this, _ = blame()
    fetch = FetchResult(round="r", sources=("bob",), ready=False, sqnorm=1.0)
    for now in range(100):
        this.prepared(0, fetch, None, {"bob": step(ALL, held="r"), "cid": step()}, now=float(now))
    assert not this.left_out(0, {"cid"}, set(), now=100.0)
    assert PREPARED_S < 100.0


# --- rounds that fail ---


def failed(plan: Plan, *peers: PeerId) -> dict[PeerId, StepReport]:
    ledgers = dict(zip(plan.members, plan.ledgers, strict=True))
    return {peer: step(done, failed=plan.round if peer in peers else "") for peer, done in ledgers.items()}


def test_after_a_round_that_failed_for_no_reason_to_be_seen_the_coordinator_owns_all() -> None:
    this, _ = blame()
    plan = plan_of(ann=step(0b0011), bob=step(0b0100), cid=step(0b1000))
    assert this.owners(0, plan, failed(plan), now=0.0) == ["ann", "bob", "cid"]
    assert this.owners(0, plan, failed(plan, "bob"), now=1.0) == ["ann"]
    assert not this.left_out(0, {*plan.members}, set(), now=1.0)


def test_one_that_fails_with_the_coordinator_alone_is_charged_by_its_own_word() -> None:
    this, _ = blame()
    reports = {"ann": step(0b0011), "bob": step(0b0100), "cid": step(0b1000)}
    for number in range(2):
        decision = decide("5a", 1, 0, 4, 90, reports, None, {"ann": float(number)}, owners=["ann"])
        assert isinstance(decision, Plan) and decision.parts == (90, 0, 0)
        plan = Plan(f"{number}", number, decision.members, decision.ledgers, decision.parts)
        this.owners(0, plan, failed(plan, "bob"), now=float(number))
    assert this.left_out(0, {"bob"}, set(), now=2.0) and not this.left_out(0, {"cid"}, set(), now=2.0)


def test_a_round_that_ends_since_another_has_a_result_is_nobodys_fault() -> None:
    """The coordinator fetched that, too, and the others lacked its answers: honest ones rested for it."""
    this, _ = blame()
    plan = plan_of(ann=step(0b0011), bob=step(0b1100))
    alone = Plan(plan.round, 1, plan.members, plan.ledgers, (90, 0))
    for number, of in enumerate(("r", "s")):
        fetch = FetchResult(round=of, sources=("cid",), ready=False, sqnorm=1.0)
        broken = replace(alone, round=f"{number}")
        this.prepared(0, fetch, broken, {}, now=0.0)
        this.owners(0, broken, failed(broken, "bob"), now=1.0)
    assert not this.left_out(0, {"bob"}, set(), now=1.0)


def test_one_that_is_seen_after_a_round_that_failed_for_no_reason_had_both_fail() -> None:
    this, backoff = blame()
    plan = plan_of(ann=step(0b0011), bob=step(0b0100), cid=step(0b1000))
    backoff.aborted("cid", t=0, since_s=0.0, now=0.0)
    this.owners(0, plan, failed(plan, "bob"), now=1.0)
    backoff.aborted("bob", t=0, since_s=2.0, now=2.0)
    assert this.left_out(0, {"bob"}, set(), now=2.0) and not this.left_out(0, {"cid"}, set(), now=2.0)


def test_a_round_that_a_death_broke_is_nobodys_fault() -> None:
    this, _ = blame()
    plan = plan_of(ann=step(0b0011), bob=step(0b0100), cid=step(0b1000))
    gone = {peer: report for peer, report in failed(plan, "bob").items() if peer != "cid"}
    assert this.owners(0, plan, gone, now=1.0) == ["ann", "bob"]


def test_one_without_microbatches_or_that_just_rested_owns_no_part() -> None:
    """Whether an owner or another held a round up nobody saw; the others saw nothing else of them."""
    this, backoff = blame()
    reports = {"ann": step(0b0011), "bob": step(0b1100), "cid": step()}
    assert this.owners(0, None, reports, now=0.0) == ["ann", "bob"]
    backoff.charge("bob", t=0, since_s=0.0, now=0.0, rounds=BUDGET_ROUNDS)
    assert this.owners(0, None, reports, now=FIRST_REST_S + 1.0) == ["ann"]
    assert this.owners(0, None, reports, now=2 * FIRST_REST_S) == ["ann", "bob"]
    reports = {"ann": step(), "bob": step(), "cid": step(ALL)}
    assert this.owners(0, None, reports, now=0.0) == ["ann"], "none owns all but who sees what is lacking"


def directive_of(step: StepDirective, by: PeerId) -> Directive:
    return Directive(run="", stage=0, coordinator=by, version=0, steps=(step,))


def test_a_coordinator_that_begins_a_third_round_with_the_same_sums_is_left_out() -> None:
    """A tarpit that owned all had the others wait for its answers until its turn was over."""
    this, backoff = blame()
    plan, other = plan_of(ann=step(0b0011), bob=step(0b1100)), plan_of(ann=step(0b0111), bob=step(0b1000))

    def began(number: int, of: Plan = plan, by: PeerId = "bob", now: float = 0.0) -> bool:
        plan = Plan(f"{number}", number, of.members, of.ledgers, of.parts)
        return this.told(directive_of(StepDirective(t=0, plan=plan), by), {}, (), now=now)

    assert not any(began(number, now=number) for number in range(9)), "lines break, and are there again"
    assert not began(9, other, now=20.0) and not began(10, now=21.0), "the sums changed"
    assert not began(11, by="cid", now=40.0), "another coordinates"
    for number, now in ((12, 50.0), (13, 55.0), (13, 60.0)):
        assert not began(number, now=now) and not backoff.rests("bob", now=now)
    assert began(14, now=60.0) and backoff.rests("bob", now=60.0)


def test_a_coordinator_that_has_one_retract_what_no_other_has_is_left_out() -> None:
    this, backoff = blame()

    def retracted(returned: int, *, by: PeerId = "bob", now: float) -> bool:
        told = directive_of(StepDirective(t=0, retract=Bitmap(1)), by)
        return this.told(told, {0: returned}, (), now=now)

    assert not any(retracted(0, now=float(now)) for now in range(30)), "it is said until it is done"
    assert not any(retracted(1, now=float(now)) for now in range(30, 60)), "a replica died that had it"
    assert not retracted(2, by="cid", now=61.0), "another coordinates"
    for returned, now in ((2, 70.0), (3, 72.0), (4, 79.9)):
        assert not retracted(returned, now=now) and not backoff.rests("bob", now=now)
    assert retracted(5, now=80.0) and backoff.rests("bob", now=80.0)


# --- by the word of others ---


def test_who_is_named_by_most_of_the_others_and_two_at_least_is_left_out() -> None:
    assert named_by_most({"ann": ("liar",), "bob": ("liar",), "liar": ()}) == {"liar"}
    assert named_by_most({"ann": ("liar",), "liar": ("ann",)}) == set(), "one names the other"
    assert named_by_most({"ann": ("dan",), "bob": ("dan",), "cid": (), "eve": ()}) == set()
    assert named_by_most({"liar": ("ann", "bob"), "ann": (), "bob": ()}) == set()


# --- rounds that wait for few ---


def waits_of(me: str = "ann", *, voice: str = "") -> tuple[RoundWaits, Backoff]:
    """Of a step that began a second before 100."""
    backoff = Backoff()
    return RoundWaits(me, 7, backoff, opened_s=99.0, voice=voice.split(), held_s={}), backoff


def awaited(*peers: str, of: int = 4, seen: bool = True) -> Awaited:
    return Awaited(frozenset(peers), of, seen)


def test_a_round_waits_for_one_as_long_as_its_step_takes_otherwise_and_then_it_is_charged() -> None:
    waits, backoff = waits_of()
    assert not waits.wait(awaited("bob"), 1.0, coordinator="ann", now=101.0)
    assert not backoff.was_charged("bob", t=7), "the step took a second before"
    assert not waits.wait(awaited("bob"), 8.0, coordinator="ann", now=109.0)
    assert backoff.left_s("bob", t=7) == BUDGET_S - 8.0
    assert waits.wait(awaited("bob"), 1.0, coordinator="ann", now=110.0) == ["bob"], "it was seen for 9 s"
    assert backoff.rests("bob", now=110.0)


def test_of_a_moment_nobody_is_charged() -> None:
    backoff = Backoff()
    waits = RoundWaits("ann", 7, backoff, opened_s=100.0, voice=(), held_s={})
    waits.wait(awaited("bob"), HELD_UP_S, coordinator="ann", now=100.0 + HELD_UP_S)
    assert not backoff.was_charged("bob", t=7)


def test_nobody_is_charged_where_most_are_waited_for_or_the_waiting_one_is() -> None:
    waits, backoff = waits_of()
    for peers in (("bob", "cid"), ("ann",), ("ann", "bob")):
        assert not waits.wait(awaited(*peers), 50.0, coordinator="ann", now=150.0)
        assert not any(backoff.was_charged(peer, t=7) for peer in peers)
    waits.wait(awaited("bob", "cid", of=5), 50.0, coordinator="ann", now=150.0)
    assert backoff.was_charged("bob", t=7) and backoff.was_charged("cid", t=7)


def test_one_of_two_may_take_four_times_as_long() -> None:
    waits, backoff = waits_of()
    waits.wait(awaited("bob", of=2), 4.0, coordinator="ann", now=104.0)
    assert not backoff.was_charged("bob", t=7)
    waits.wait(awaited("bob", of=2), 1.0, coordinator="ann", now=105.0)
    assert backoff.left_s("bob", t=7) == BUDGET_S - 1.0


def test_one_of_two_is_left_out_once_it_was_seen_for_less() -> None:
    """It had a turn of its own, of 25 s, before it had been seen for as long as one of many."""
    waits, backoff = waits_of()
    assert not waits.wait(awaited("bob", of=2), 4.0 + SEEN_OF_TWO_S - 0.5, coordinator="ann", now=108.5)
    assert not backoff.rests("bob", now=108.5)
    assert waits.wait(awaited("bob", of=2), 0.5, coordinator="ann", now=109.0) == ["bob"]


def test_others_charge_members_and_the_coordinator_and_end_its_round_where_a_third_has_voice() -> None:
    waits, backoff = waits_of("bob", voice="ann bob cid")
    assert not waits.wait(awaited("dan"), 50.0, coordinator="ann", now=150.0), "the round is not bob's to end"
    assert backoff.rests("dan", now=150.0)
    waits, backoff = waits_of("bob", voice="ann bob cid")
    assert waits.wait(awaited("ann"), 50.0, coordinator="ann", now=150.0) == ["ann"]
    for voice, of in (("ann bob", 4), ("", 2)):
        waits, backoff = waits_of("bob", voice=voice)
        assert not waits.wait(awaited("ann", of=of), 50.0, coordinator="ann", now=150.0)
        assert backoff.rests("ann", now=150.0) == bool(voice), "its round goes on, up to the turn of bob"


def test_where_it_is_not_seen_who_holds_a_round_up_one_reduces_all_and_who_still_does_pays_for_both() -> None:
    waits, backoff = waits_of()
    assert waits.wait(awaited("bob", seen=False), 27.0, coordinator="ann", now=127.0) == [ALL_OWNERS]
    assert backoff.rests(ALL_OWNERS, now=127.0) and not backoff.was_charged("bob", t=7)
    waits = RoundWaits("ann", 7, backoff, opened_s=127.0, voice=(), held_s={})
    assert not waits.wait(awaited("bob"), 0.5, coordinator="ann", now=127.5)
    assert not backoff.was_charged("bob", t=7), "a moment shows nothing"
    assert waits.wait(awaited("bob"), 1.0, coordinator="ann", now=128.5) == ["bob"]


def test_what_was_unclear_before_it_coordinates_says_nothing_of_a_coordinator() -> None:
    waits, backoff = waits_of("bob", voice="ann bob cid")
    waits.wait(awaited("ann", seen=False), 30.0, coordinator="cid", now=130.0)
    assert not waits.wait(awaited("ann", seen=False), 4.0, coordinator="ann", now=134.0)
    assert not backoff.was_charged("ann", t=7), "it may have been kept waiting, and reduces all from now on"
    waits = RoundWaits("bob", 7, backoff, opened_s=134.0, voice=("ann", "bob", "cid"), held_s={})
    assert waits.wait(awaited("ann"), 3.0, coordinator="ann", now=137.0) == ["ann"], "that is seen"


def test_one_that_was_seen_to_hold_rounds_up_pays_at_once_for_six_times_as_much_that_is_unclear() -> None:
    """It cost as much again in its own turn, when others own parts and may have kept it waiting."""
    waits, backoff = waits_of("bob", voice="ann bob cid")
    waits.wait(awaited("cid"), 1.75, coordinator="bob", now=100.75)
    assert backoff.left_s("cid", t=7) == BUDGET_S - 1.5
    waits = RoundWaits("bob", 8, backoff, opened_s=200.0, voice=("ann", "bob", "cid"), held_s={})
    for second in range(1, 20):
        now = 200.0 + second
        assert not waits.wait(awaited("cid", seen=False), 1.0, coordinator="cid", now=now)
    assert backoff.left_s("cid", t=8) == pytest.approx(BUDGET_S - 6 * 1.5, abs=1.0)
    assert backoff.left_s(SUSPECTED + "cid", t=8) == pytest.approx(BUDGET_S - 18.75 + 7.5, abs=1.0)
    waits, backoff = waits_of("bob", voice="ann bob cid")
    waits.wait(awaited("cid", seen=False), 5.0, coordinator="ann", now=105.0)
    assert not backoff.was_charged("cid", t=7), "it was not seen"


@pytest.mark.parametrize("seen_s", [0.0, 0.5, 1.0, 2.0, 2.4, 2.5, 12.0, 24.0])
def test_one_that_holds_rounds_up_as_long_as_it_may_in_each_way_is_left_out_within_30_seconds(
    seen_s: float,
) -> None:
    """One that was seen for 2.4 s cost 50 s: what was charged at once did not count as what was unclear."""
    waits, lasted_s, left_out = *waits_of(voice="ann bob cid")[:1], 0.0, False
    while not left_out and lasted_s < 60.0:
        seen, lasted_s = lasted_s < seen_s, lasted_s + 0.25
        left_out = waits.wait(awaited("bob", seen=seen), 0.25, coordinator="bob", now=100.0 + lasted_s) != []
    assert lasted_s <= 31.0, "one more for the second that the step takes besides"


def test_what_was_unclear_between_two_moments_that_were_seen_was_not_seen() -> None:
    """An owner that kept results from it had many times that time charged to it as well."""
    waits, backoff = waits_of()
    waits.wait(awaited("bob"), 3.0, coordinator="ann", now=103.0)
    waits.wait(awaited("bob", seen=False), 4.0, coordinator="ann", now=107.0)
    waits.wait(awaited("bob"), 0.25, coordinator="ann", now=107.25)
    assert backoff.cost_s(SEEN + "bob", t=7) == 2.25 and backoff.cost_s("bob", t=7) == 6.25


def test_time_that_is_unclear_is_charged_somewhere_whatever_was_seen_and_unclear_before() -> None:
    """Who was timed so held rounds up for 160 s in 18 steps, in its own turn, and nobody was charged."""
    backoff, voice = Backoff(), ("ann", "bob", "cid")
    for account in ("bob", SEEN + "bob", SUSPECTED + "bob"):
        backoff.charge(account, t=7, since_s=99.0, now=100.0)
    waits = RoundWaits("ann", 8, backoff, opened_s=200.0, voice=voice, held_s={})
    waits.wait(awaited("bob", seen=False), 4.0, coordinator="bob", now=204.0)
    left_s = [backoff.left_s(account + "bob", t=8) for account in ("", SUSPECTED, SUSPECTED_LEADING)]
    assert left_s == [BUDGET_S - cost_s for cost_s in (1.0, 4.75, 3.75)]


def test_what_was_unclear_in_the_same_round_is_not_paid_for_since_a_moment_of_it_was_seen() -> None:
    """Another may have kept from it what it needs, and it computes what it says next."""
    waits, backoff = waits_of()
    waits.wait(awaited("bob", seen=False), 5.0, coordinator="ann", now=105.0)
    assert not waits.wait(awaited("bob"), 0.5, coordinator="ann", now=105.5)
    assert not backoff.was_charged("bob", t=7)
    waits.wait(awaited("bob"), 0.5, coordinator="ann", now=106.0)
    assert backoff.left_s("bob", t=7) == BUDGET_S - 1.0 - 4.0


def test_rounds_of_a_step_wait_once_as_long_as_the_step_takes_and_again_only_where_that_was_enough() -> None:
    """Who was left out by one after the other was waited for anew by each."""
    held_s, backoff = dict[str, float](), Backoff()

    def waits(opened_s: float) -> RoundWaits:
        return RoundWaits("ann", 7, backoff, opened_s=opened_s, voice=(), held_s=held_s)

    first = waits(99.0)
    first.wait(awaited("bob"), 3.0, coordinator="ann", now=103.0)
    first.wait(awaited("cid"), 0.5, coordinator="ann", now=103.5)
    assert set(held_s) == {"bob"}
    second = waits(first.opened_s)
    second.wait(awaited("bob"), 1.0, coordinator="ann", now=104.5)
    assert backoff.left_s("bob", t=7) == BUDGET_S - 2.0 - 1.0
    second.wait(awaited("cid"), 1.0, coordinator="ann", now=105.5)
    assert not backoff.was_charged("cid", t=7)


def test_rounds_that_waited_for_it_is_not_seen_whom_have_the_next_step_reduced_by_one() -> None:
    """A coordinator shared the parts for 25 s of that: each in its turn."""
    backoff = Backoff()
    blame = Blame("ann", lambda t: 4, backoff)
    reports = {peer: StepReport(t=8, done=Bitmap(1)) for peer in ("ann", "bob", "cid")}
    waits = RoundWaits("ann", 7, backoff, opened_s=99.0, voice=(), held_s={})
    waits.wait(awaited("bob", seen=False), UNSEEN_S, coordinator="cid", now=100.0 + UNSEEN_S)
    assert blame.owners(8, None, reports, now=110.0) == ["ann", "bob", "cid"]
    waits.wait(awaited("bob", seen=False), 1.5, coordinator="cid", now=101.5 + UNSEEN_S)
    plan = Plan("aa", 0, tuple(reports), (1, 1, 1), (1, 1, 1))
    assert blame.owners(8, plan, reports, now=110.0) == ["ann", "bob", "cid"], "a round that goes on does so"
    assert blame.owners(8, None, reports, now=110.0) == ["ann"]
    assert blame.owners(8, None, reports, now=171.0) == ["ann", "bob", "cid"], "it was for a while"


def test_a_coordinator_that_owns_all_is_waited_for_as_any_other() -> None:
    waits, backoff = waits_of("bob", voice="ann bob cid")
    assert not waits.wait(awaited("ann", of=1, seen=False), 20.0, coordinator="ann", now=120.0)
    assert waits.wait(awaited("ann", of=1, seen=False), 2.0, coordinator="ann", now=122.0) == ["ann"]
    assert backoff.rests("ann", now=122.0)


def test_the_next_round_of_a_step_may_wait_no_longer_for_what_the_last_one_waited() -> None:
    waits, _ = waits_of()
    waits.wait(awaited("bob"), 20.0, coordinator="ann", now=120.0)
    assert waits.opened_s == 119.0
    waits.wait(awaited(), 5.0, coordinator="ann", now=125.0)
    assert waits.opened_s == 119.0


def test_a_coordinator_that_is_waited_for_when_it_would_have_reduced_all_itself_is_followed_no_more() -> None:
    waits, backoff = waits_of("bob", voice="ann bob cid")
    assert not waits.wait(awaited("ann", seen=False), 20.0, coordinator="ann", now=120.0)
    assert not waits.wait(awaited("ann", seen=False), 1.5, coordinator="ann", now=121.5)
    assert not backoff.was_charged("ann", t=7), "another may have kept it waiting until now"
    assert waits.wait(awaited("ann", seen=False), 2.0, coordinator="ann", now=123.5) == ["ann"]
    assert backoff.rests("ann", now=123.5)


def test_of_all_others_whose_words_are_needed_the_one_that_cost_least_takes_part() -> None:
    """A liar that sent two its parts of no sum had each of them charge the other: 200 s for a step."""
    this, backoff = blame()
    for peer, lost_s in (("bob", 6.0), ("cid", 5.0)):
        backoff.charge(peer, t=0, since_s=0.0, now=lost_s, rounds=BUDGET_ROUNDS)
    three, both = {"ann", "bob", "cid"}, {"bob", "cid"}
    assert this.left_out(0, three, both, now=7.0) == {"bob"}
    assert this.left_out(0, three, {"bob"}, now=7.0) == both, "of two the other one computes alone"
    assert this.left_out(0, three, {*both, "dan"}, now=7.0) == both, "dan is there"
    backoff.charge("cid", t=0, since_s=7.0, now=12.0, rounds=1)
    assert this.left_out(0, three, both, now=12.0) == {"cid"}, "it costs more by now"
