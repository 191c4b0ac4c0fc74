"""What strangers say counts for nothing once a peer of their stage has voice (attacks 1, 2, 6)."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import msgspec
import pytest

from peers.sim.network import SimSigner
from swarm.errors import NotNow
from swarm.ids import Generation, PeerId, Position, Stage
from swarm.manifest import AdmissionSpec, IslandsSpec, audit_run
from swarm.policy.backoff import BUDGET_ROUNDS, Backoff
from swarm.protocol.coordinator import ANSWERED_S, Agreed, Member, StageCoordinator
from swarm.protocol.ledger import Bitmap, Ledger
from swarm.protocol.messages import Directive, ReplicaReport, RunStatus, StageSummary, StepDirective
from swarm.protocol.proofs import signed_report
from swarm.protocol.protocol import LOST_S, REFRESH_S, StepProtocol
from swarm.protocol.replica import ApplyStep, AskAbsent, BeginAgain, CatchUp, Local, RestoreStage
from swarm.protocol.rounds import (
    Commit,
    FetchResult,
    Lacking,
    Plan,
    Prepared,
    Proof,
    StepReport,
    StepSummary,
    decide,
    digest_majority,
    elect,
)
from swarm.protocol.voice import Worked, vouch
from swarm.records import PeerRecord
from tests.protocol.world import Step

TRAINER = "12D3KooW" + "t" * 44
RUN = replace(
    audit_run(stages=2, steps=80, microbatches_per_step=4), admission=AdmissionSpec(trainers=(TRAINER,))
)
NOW, ALL = 100.0, 0b1111
VOICE = {"ann": 40, "bob": 40}


def record(peer: PeerId, stage: Stage = 1, *, since: float = 1.0, steps: int = 0) -> PeerRecord:
    voucher = vouch(SimSigner(TRAINER), RUN.id, Worked(peer, steps, 0, steps)) if steps else None
    return PeerRecord(
        peer=peer, run=RUN.id, stage=stage, state="serving", version=0, since=since, voucher=voucher
    )


def protocol_of(me: PeerId, *records: PeerRecord, stage: Stage = 1) -> StepProtocol:
    local = Local(generation=Generation(), version=0, steps={}, commits={})
    signer = SimSigner(me)
    this = StepProtocol(RUN, stage, me, 8, local, Backoff(), signer, since_s=2.0)
    by_stage = {s: [r for r in records if r.stage == s] for s in range(RUN.S)}
    this.observe(local, by_stage, now=NOW)
    return this


def report(version: int = 0, *steps: StepReport, digest: str = "") -> ReplicaReport:
    return ReplicaReport(run=RUN.id, stage=1, version=version, steps=steps, digest=digest)


def tell(this: StepProtocol, peer: PeerId, said: ReplicaReport) -> Directive:
    """What `peer` does by its report, once the run coordinator has heard what the stage makes of it."""
    signed = signed_report(said, SimSigner(peer), None)
    this.report(peer, signed, [], now=NOW)
    this._coordinator.summary_heard(this._coordinator.summary({}))
    return this.report(peer, signed, [], now=NOW)


def decided(voice: dict[PeerId, int], /, current: object = None, **reports: StepReport) -> object:
    return decide(RUN.id, 1, 0, RUN.M, 100, reports, current, {"liar": 1e15}, voice)  # type: ignore[arg-type]


def step(done: int = 0, *, held: str = "", in_progress: int = 0) -> StepReport:
    prepared = Prepared(held, 1.0, "") if held else None
    return StepReport(t=0, done=Bitmap(done), in_progress=Bitmap(in_progress), prepared=prepared)


# --- who coordinates ---


def test_one_that_does_not_coordinate_tells_no_other_to_retract_what_it_is_to_retract() -> None:
    """Both would, and what neither has then is run again."""
    this = protocol_of("ann", record("zoe", steps=90), record("ann", steps=60), record("bob", steps=40))
    told = StepDirective(t=0, retract=Bitmap(0b11)), StepDirective(t=1, plan=Plan("r", 0, (), (), ()))
    zoe = Directive(run=RUN.id, stage=1, coordinator="zoe", version=0, steps=told)
    this.directive_came(zoe, now=NOW)
    assert this.directive == zoe
    answer = tell(this, "bob", report())
    assert answer.coordinator == "zoe" and answer.steps == told[1:]


def test_a_stranger_that_says_it_came_first_coordinates_nothing() -> None:
    liar = record("liar", since=1e-300)
    this = protocol_of("ann", record("ann", steps=40), liar)
    assert this.coordinator(1, now=NOW) == "ann"
    this.hear_directive("liar", Directive(run=RUN.id, stage=1, coordinator="liar", version=0), now=NOW)
    assert this.directive is None


def test_the_one_with_most_steps_coordinates_and_few_more_steps_are_not_more() -> None:
    since_s = {"ann": 3.0, "bob": 2.0, "cid": 1.0}
    assert elect(since_s, {"ann": 39, "bob": 79, "cid": 59}) == ["bob", "cid", "ann"]
    assert elect(since_s, {"ann": 21, "bob": 39}) == ["ann", "bob"], "both have one score of steps"
    assert elect(since_s, {}) == ["cid", "bob", "ann"]


def test_strangers_go_on_alone_when_all_with_voice_are_gone() -> None:
    this = protocol_of("cid", record("cid", since=2.0), record("dan", since=1.0))
    assert this.coordinator(1, now=NOW) == "dan"


def test_where_nobody_has_voice_the_first_one_coordinates_each_step_but_three() -> None:
    """In turn a crowd of identities would coordinate most."""
    records = [record("cid", since=2.0), record("dan", since=1.0)]
    this = protocol_of("cid", *records)
    for version in range(200):
        local = Local(generation=Generation(), version=version, steps={}, commits={}, joined=True)
        this.observe(local, {1: records}, now=NOW)
        assert this.coordinator(1, now=NOW) == ("cid" if 1 <= version <= 3 else "dan")


def test_those_that_are_done_without_again_and_again_are_asked_at_once() -> None:
    this = protocol_of("ann", record("bob", steps=90), record("ann", steps=60))

    def asks(t: int, *, now: float) -> bool:
        this.belief.lacking = {t: ("bob",)}
        return AskAbsent(t, ("bob",)) in this.ready(now=now).actions

    for t in (0, 1):
        assert asks(t, now=NOW + t) and not asks(t, now=NOW + t + 0.5)
        this.belief.excuse(t, ["bob"], set(), set())
    assert asks(2, now=NOW + 1.5)


def test_one_that_catches_up_does_not_take_that_for_how_long_steps_take() -> None:
    """It passed over one coordinator after the other, where steps take 20 s."""
    records = [record(name, steps=40) for name in ("ann", "bob", "cid")]
    this, now = protocol_of("ann", *records), NOW
    for version in range(1, 31):
        catches_up = 10 <= version < 20
        others = [msgspec.structs.replace(one, version=25 if catches_up else version) for one in records]
        for _ in range(1 if catches_up else 20):
            now += 0.1 if catches_up else 1.0
            this._rotation.waits(now=now)
        for at in (version - 1, version):  # it hears of the others' step before it has taken its own
            local = Local(generation=Generation(), version=at, steps={}, commits={}, joined=True)
            this.observe(local, {1: others}, now=now)
    assert not this._rotation.late


@pytest.mark.parametrize(
    ("past", "after_s", "stuck_s", "goes"),
    [
        (("zoe", "bob"), 6.0, 0, True),
        (("zoe", "bob"), 6.0, 9, True),
        (("zoe", "bob"), 5.5, 0, False),
        (("zoe",), 6.0, 0, False),
        (("bob",), 6.0, 0, False),
    ],
)
def test_who_is_told_nothing_goes_where_most_others_are(
    past: tuple[PeerId, ...], after_s: float, stuck_s: int, goes: bool
) -> None:
    """Its coordinator refused its reports, and its alone: it stayed behind for minutes."""
    records = [record("zoe", 0, steps=90), *(record(name, steps=40) for name in ("ann", "bob", "cid"))]
    this = protocol_of("ann", *records)
    local = Local(generation=Generation(), version=1, steps={}, commits={})
    for now in (NOW, NOW + after_s):
        there = [msgspec.structs.replace(r, version=1 + (now > NOW and r.peer in past)) for r in records]
        this.observe(local, {s: [r for r in there if r.stage == s] for s in (0, 1)}, now=now)
        coordinator = this.coordinator(1, now=now)
        assert coordinator is not None and coordinator != "ann"
        told = Directive(run=RUN.id, stage=1, coordinator=coordinator, version=1, behind_s=stuck_s)
        this.directive_came(told, now=now)
    actions = this.ready(now=NOW + after_s).actions
    assert [one.directive.version for one in actions if isinstance(one, CatchUp)] == [2] * goes


def test_those_with_voice_coordinate_in_turn() -> None:
    records = [record(name, steps=40) for name in ("ann", "bob", "cid")]
    this, seen = protocol_of("ann", *records), set[PeerId | None]()
    for version in range(0, 900, 60):
        local = Local(generation=Generation(), version=version, steps={}, commits={}, joined=True)
        this.observe(local, {1: records}, now=NOW)
        seen.add(this.coordinator(1, now=NOW))
    assert seen == {"ann", "bob", "cid"}


def test_a_stranger_does_not_speak_for_a_stage_nor_over_its_coordinator() -> None:
    this = protocol_of(
        "zoe", record("zoe", 0, steps=40), record("ann", steps=60), record("bob", steps=20), record("liar"),
        stage=0,
    )  # fmt: skip
    summary = StageSummary(run=RUN.id, stage=1, version=0, members=1)
    with pytest.raises(NotNow, match="liar does not coordinate stage 1"):
        this.summary("liar", summary, now=NOW)
    speakers = list[PeerId]()
    for sender, now in (("ann", NOW), ("bob", NOW + 1.0), ("bob", NOW + 2.0)):
        this.summary(sender, summary, now=now)
        speakers.append(this._run_coordinator.stages[1].coordinator)
    assert speakers == ["ann", "ann", "bob"], "when ann is silent pictures may differ"


def ready(*peers: PeerId, stage: Stage = 1) -> StageSummary:
    """It has the result of step 0, as these say."""
    proofs, holds = list[Proof](), msgspec.structs.replace(report(0, step(held="r")), stage=stage)
    for peer in peers:
        said = signed_report(holds, SimSigner(peer), None).steps[0].prepared
        assert said is not None
        proofs.append(Proof(peer, said))
    view = StepSummary(t=0, ready=True, sqnorm=1.0, proofs=tuple(proofs))
    return StageSummary(run=RUN.id, stage=stage, version=0, members=1, steps=(view,))


def run_coordinator(*, late_s: float = 0.0) -> StepProtocol:
    """Zoe's, who coordinates stage 0; the step has lasted so long. Ann, bob and cid have voice in stage 1."""
    of_1 = (record("ann", steps=60), record("bob", steps=40), record("cid", steps=20))
    this = protocol_of("zoe", record("zoe", 0, steps=60), *of_1, stage=0)
    this._rotation._usual.answered(1.0)
    for second in range(int(late_s)):
        this._rotation.waits(now=NOW - late_s + second)
    return this


def test_who_proves_that_its_stage_is_ready_speaks_for_it_whoever_else_does() -> None:
    """Who lies that its stage lacks something, or whose turn is over, had the step stand still."""
    nothing = StageSummary(run=RUN.id, stage=1, version=0, members=1)
    for late_s in (0.0, 60.0):
        this = run_coordinator(late_s=late_s)
        this.summary("ann", nothing, now=NOW)
        this.summary("cid", ready("bob", "cid"), now=NOW)
        this.summary("ann", nothing, now=NOW)
        assert this._run_coordinator.stages[1].coordinator == "cid"
        this.summary("ann", ready("cid", "liar"), now=NOW)
        assert this._run_coordinator.stages[1].coordinator == "cid", "only one with voice says that"
        forged, other = ready("ann").steps[0], ready("cid").steps[0].proofs[0].prepared
        forged = msgspec.structs.replace(forged, proofs=(*forged.proofs, Proof("bob", other)))
        this.summary("ann", msgspec.structs.replace(nothing, steps=(forged,)), now=NOW)
        assert this._run_coordinator.stages[1].coordinator == "cid", "bob did not say that"
        this.summary("ann", nothing, now=NOW + 2.0)
        assert this._run_coordinator.stages[1].coordinator == "ann", "cid is silent"


def test_what_proves_a_step_that_is_taken_gives_nobody_the_word() -> None:
    this = run_coordinator()
    this.observe(Local(generation=Generation(), version=1, steps={}, commits={}), this._peers, now=NOW)
    nothing = StageSummary(run=RUN.id, stage=1, version=1, members=1)
    assert this.coordinator(1, now=NOW) == "cid"
    for sender, said in (("ann", ready("bob", "ann")), ("cid", nothing), ("ann", ready("bob", "ann"))):
        this.summary(sender, said, now=NOW)
    assert this._run_coordinator.stages[1].coordinator == "cid"


def test_while_steps_are_late_the_last_one_with_voice_speaks_for_its_stage() -> None:
    """Where this peer sees another turn than they do, what the stage lacked was run again by nobody."""
    nothing = StageSummary(run=RUN.id, stage=1, version=0, members=1)
    for late_s, speaks in ((0.0, "ann"), (20.0, "bob")):
        this = run_coordinator(late_s=late_s)
        for sender in ("ann", "bob"):
            this.summary(sender, nothing, now=NOW)
        assert this._run_coordinator.stages[1].coordinator == speaks


def test_of_a_late_step_those_hear_that_may_coordinate_the_run() -> None:
    """Each of stage 0 that takes itself for that finds the commit, which is proven."""
    voices = {"zoe": 90, "yan": 60, "wes": 40, "liar": 0}
    for late_s, told in ((0, {"zoe"}), (40, {"zoe", "yan", "wes"}), (70, {"zoe", "yan", "wes"})):
        run = [record(name, 0, steps=steps) for name, steps in voices.items()]
        this = protocol_of("ann", record("ann", steps=60), *run)
        for second in range(late_s):
            this._rotation.waits(now=NOW - late_s + second)
        this.speak(now=NOW)
        said = [to for to, body, _ in this.ready(now=NOW).messages if isinstance(body, StageSummary)]
        assert sorted(said) == sorted(told)


@pytest.mark.parametrize(("steps", "away", "first"), [(0, 0, "bob"), (40, 0, "ann"), (0, 1, "ann")])
def test_one_that_rests_coordinates_in_its_turn_where_there_is_no_other(
    steps: int, away: bool, first: PeerId
) -> None:
    """Its word is needed all the same. There is no turn for one that cannot be reached."""
    others = [record("bob", steps=90), record("cid", steps=steps), record("zoe", 0, steps=40)]
    this = protocol_of("ann", record("ann", steps=60), *others)
    this._backoff.charge("bob", t=0, since_s=NOW, now=NOW, rounds=BUDGET_ROUNDS)
    if away:
        this._backoff.failed("bob", now=NOW, silent=True)
    assert this.coordinator(1, now=NOW) == first


@pytest.mark.parametrize("vouched", [1, 0], ids=["by voice", "where nobody has voice"])
@pytest.mark.parametrize(
    ("further", "at", "by", "stays"),
    [
        ("zoe yan bob", 0, 3, True), ("zoe yan bob", 0, 1, False), ("zoe yan bob", RUN.steps - 1, 1, True),
        ("bob", 0, 3, False), ("zoe yan", 0, 3, False),
    ],
)  # fmt: skip
def test_time_in_which_most_others_took_the_step_does_not_count_for_turns(
    further: str, at: int, by: int, stays: bool, vouched: int
) -> None:
    """Seeds of a simulation: cut off from the others, which went on, it came to another turn, and stood by
    itself for a minute. One alone says that in vain, else it kept its turn by it; and those of other
    stages do not count alone: its own may hold a step back. Those that are one step further have perhaps
    only just taken it, and counted its time as well."""
    voices = {"zoe": (0, 90), "yan": (0, 60), "bob": (1, 90), "ann": (1, 60), "cid": (1, 40)}

    def seen(version: int) -> dict[Stage, list[PeerRecord]]:
        there = {
            name: record(name, stage, steps=vouched * steps, since=1.0 - steps / 100)
            for name, (stage, steps) in voices.items()
        }
        for name in further.split():
            there[name] = msgspec.structs.replace(there[name], version=version)
        return {stage: [r for r in there.values() if r.stage == stage] for stage in range(RUN.S)}

    this = protocol_of("ann", *seen(0)[0], *seen(0)[1])
    for second in range(60):
        local = this._local._replace(version=at)
        this.observe(local, seen(at + by if second > 45 else at), now=NOW - 60.0 + second)
        this.speak(now=NOW - 60.0 + second)
    assert (this.coordinator(1, now=NOW) == "bob") is stays


@pytest.mark.parametrize("unreached", ["bob", "zoe", "cid"])
def test_turns_pass_whomever_one_reaches(unreached: PeerId) -> None:
    """Who took a coordinator that answers it nothing for one that it cannot reach counted no time, stood by
    another turn than the others, and heard of each step 10 s late.
    """
    run = [record("zoe", 0, steps=90), record("yan", 0, steps=60)]
    of_1 = [record("bob", steps=90), record("ann", steps=60), record("cid", steps=40)]
    this = protocol_of("ann", *run, *of_1)
    for second in range(20):
        now = NOW - 20.0 + second
        this._backoff.failed(unreached, now=now, silent=True)
        this.speak(now=now)
    this._backoff.answered(unreached)
    assert this.coordinator(1, now=NOW) == "ann"


@pytest.mark.parametrize(("speed", "idle_s", "late_s"), [(0.0, 60.0, 10), (4.0, 0.0, 10), (0.25, 60.0, 48)])
def test_a_first_step_is_late_after_three_times_what_peers_measured(
    speed: float, idle_s: float, late_s: int
) -> None:
    """It was late after half a minute, of which who came first had waited for the others. Here each replica
    does two microbatches, and the fastest of each stage is believed.
    """
    began_s, step = NOW + idle_s, Step(0, Ledger(0, RUN.M))
    local = Local(generation=Generation(), version=0, steps={0: step}, commits={})
    speeds = {"zoe": (0, speed), "yan": (0, speed / 9), "bob": (1, speed), "ann": (1, 0.0)}
    there = [msgspec.structs.replace(record(p, stage), speed=of) for p, (stage, of) in speeds.items()]
    this, since_s = protocol_of("ann", *there), 0.0
    for second in range(120):
        now = NOW + second
        if now >= began_s:
            step.ledger.claim(0)
        this.observe(local, {s: [r for r in there if r.stage == s] for s in range(RUN.S)}, now=now)
        this.speak(now=now)
        if now >= began_s and not this._rotation.late:
            since_s = now - began_s
    assert since_s == late_s


def test_a_first_step_counts_from_when_another_that_reports_has_something_of_it() -> None:
    """Of two one had its first microbatch 50 s after the other, and counted from then: both coordinated, each
    by itself, until a later step was late, after ten times 25 s.
    """
    this = protocol_of("bob", record("bob", steps=90), record("ann", steps=40), record("zoe", 0, steps=90))
    own = Step(0, Ledger(0, RUN.M))
    local = Local(generation=Generation(), version=0, steps={0: own}, commits={})
    has_one = signed_report(report(0, step(in_progress=0b1)), SimSigner("ann"), None)
    for second in range(55):
        if second == 50:
            own.ledger.claim(0)
        this.observe(local, this._peers, now=NOW + second)
        with contextlib.suppress(NotNow):  # while it is ann's turn
            this.report("ann", has_one, [], now=NOW + second)
        this.speak(now=NOW + second)
    assert this._rotation.late


def test_one_that_has_just_rested_coordinates_only_where_another_needs_it() -> None:
    """It was back in its turn at once, for another 25 s. But of two both coordinated then, and the run stood
    still for half a minute.
    """
    for others, first in (([record("cid", steps=40)], "ann"), ([], "bob")):
        this = protocol_of("ann", record("ann", steps=60), record("bob", steps=90), *others)
        this._backoff.charge("bob", t=0, since_s=NOW - 70.0, now=NOW - 70.0, rounds=BUDGET_ROUNDS)
        assert this.coordinator(1, now=NOW) == first
        assert this.coordinator(1, now=NOW + 60.0) == "bob"


def test_one_that_slept_into_its_turn_and_reports_is_not_waited_for() -> None:
    """By the version at which it fell asleep it is another's turn: each left it to the other, for 10 s."""
    this = protocol_of("ann", record("ann", steps=60), record("bob", steps=40))
    this.observe(this._local._replace(version=64), this._peers, now=NOW)
    assert this.coordinator(1, now=NOW) == "bob"
    asleep, firsts = signed_report(report(0), SimSigner("bob"), None), list[PeerId | None]()
    for second in range(6):
        with contextlib.suppress(NotNow):
            this.report("bob", asleep, [], now=NOW + second)
        firsts.append(this.coordinator(1, now=NOW + second))
    assert firsts == ["bob"] * 3 + ["ann"] * 3


@pytest.mark.parametrize("waits_for_a_trainer", [False, True])
def test_who_has_the_turn_in_a_late_step_has_less_time_for_its_answers_to_the_stage_before(
    waits_for_a_trainer: bool,
) -> None:
    """Bob, which has the first turn, and nobody else: not dan, who has more voice and only joins. In a run
    without a trainer yet nobody.
    """
    of_1 = [record(name, steps=steps) for name, steps in (("bob", 90), ("ann", 60), ("cid", 40))]
    of_1.append(msgspec.structs.replace(record("dan", steps=120), state="joining"))
    this, since = protocol_of("zoe", record("zoe", 0, steps=90), *of_1, stage=0), dict[PeerId, int]()
    this._rotation._usual.answered(1.0)
    this._moved_s = -math.inf if waits_for_a_trainer else NOW
    for second in range(60):
        this.speak(now=NOW + second)
        for peer in ("bob", "ann", "cid", "dan"):
            if this._backoff.was_charged(peer, t=this._local.version):
                since.setdefault(peer, second)
                assert not this._backoff.in_backoff(peer, now=NOW + second)
    assert since == ({} if waits_for_a_trainer else {"bob": 11, "ann": 37})


def rests_for_ann() -> StepProtocol:
    """Ann's, of whose stage bob has the turn, after dan's. The step is late."""
    of_1 = [
        record(name, steps=steps) for name, steps in (("dan", 120), ("bob", 90), ("ann", 60), ("cid", 40))
    ]
    this = protocol_of("ann", record("zoe", 0, steps=90), *of_1)
    this._rotation._usual.answered(1.0)
    for second in range(15):
        this.speak(now=NOW - 15.0 + second)
    this._backoff.charge("bob", t=0, since_s=NOW, now=NOW, rounds=BUDGET_ROUNDS)
    return this


def test_a_coordinator_that_nobody_follows_goes_on_under_the_one_that_the_others_see() -> None:
    """Bob rests for ann alone: she was a step behind in each step, and had work that nobody counted."""
    this, firsts = rests_for_ann(), list[PeerId | None]()
    for second in range(9):
        this.speak(now=NOW + second)
        firsts.append(this.coordinator(1, now=NOW + second))
    assert firsts[:2] == ["ann", "ann"] and firsts[5:] == ["bob"] * 4
    this = rests_for_ann()
    for second in range(9):
        this.report("cid", signed_report(report(0), SimSigner("cid"), None), [], now=NOW + second)
        this.speak(now=NOW + second)
    assert this.coordinator(1, now=NOW + 9.0) == "ann", "cid follows her"


def test_one_that_holds_rounds_up_coordinates_no_more_where_it_was_borne() -> None:
    this = rests_for_ann()
    for second in range(9):
        this.speak(now=NOW + second)
    assert this.coordinator(1, now=NOW + 9.0) == "bob"
    for number, now in enumerate((NOW + 10.0, NOW + 15.0, NOW + 20.0)):
        plan = Plan(f"{number}", number, ("ann", "bob"), (Bitmap(0b0011), Bitmap(0b1100)), (50, 50))
        told = Directive(
            run=RUN.id, stage=1, coordinator="bob", number=number, version=0,
            steps=(StepDirective(t=0, plan=plan),),
        )  # fmt: skip
        this.directive_came(told, now=now)
    assert this.coordinator(1, now=NOW + 20.0) == "ann"


@pytest.mark.parametrize(
    ("left_out", "goes_on"), [("ann cid", True), ("ann", False), ("cid", False), ("ann bob", False)]
)
def test_those_that_a_coordinator_leaves_out_all_together_go_on_without_it(
    left_out: str, goes_on: bool
) -> None:
    """One that withheld its nonce had its stage stand still until its turn was over, 71 s later."""
    this = protocol_of("ann", record("bob", steps=90), record("ann", steps=60), record("cid", steps=40))
    told = Directive(
        run=RUN.id, stage=1, coordinator="bob", number=1, version=0, left_out=tuple(left_out.split())
    )
    this.directive_came(told, now=NOW)
    assert (this.coordinator(1, now=NOW) == "ann") is goes_on


@pytest.mark.parametrize(
    ("others", "left_out", "goes_on"),
    [("bob cid", "", True), ("bob cid", "ann", False), ("bob", "", False)],
    ids=["one of three", "that it leaves out", "one of two"],
)
def test_who_is_to_retract_what_is_computed_again_goes_on_without_its_coordinator(
    others: str, left_out: str, goes_on: bool
) -> None:
    """Bob has most voice. All of its turn went by so, and then two rounds to which it gave no part."""
    voice = {"bob": 90, "cid": 40}
    there = [record(peer, steps=voice[peer]) for peer in others.split()]
    this, mine = protocol_of("ann", record("ann", steps=60), *there), Step(0, Ledger(0, RUN.M))
    this.observe(this._local._replace(steps={0: mine}), this._peers, now=NOW)
    for number in range(5):
        mine.ledger.record(0)
        told = Directive(
            run=RUN.id, stage=1, coordinator="bob", number=number, version=0,
            left_out=tuple(left_out.split()), steps=(StepDirective(t=0, retract=Bitmap(1)),),
        )  # fmt: skip
        this.directive_came(told, now=NOW + 4.0 * number)
        mine.ledger.remove(0)
    assert this._backoff.rests("bob", now=NOW + 20.0) is goes_on
    assert this.coordinator(1, now=NOW + 18.0) == ("ann" if goes_on else "bob")
    assert this.coordinator(1, now=NOW + 20.0) == "bob", "the others go on under it: none reports"


def test_one_of_two_that_the_other_leaves_out_goes_on_under_it() -> None:
    this = protocol_of("ann", record("bob", steps=90), record("ann", steps=60))
    told = Directive(run=RUN.id, stage=1, coordinator="bob", number=1, version=0, left_out=("ann",))
    this.directive_came(told, now=NOW)
    assert not this._backoff.rests("bob", now=NOW)


def test_turns_pass_while_one_rests_that_has_one() -> None:
    """Others are coordinated by it meanwhile: who did not count that time saw other turns for minutes."""
    run = [record("zoe", 0, steps=90), record("yan", 0, steps=60)]
    of_1 = [record("bob", steps=90), record("ann", steps=60), record("cid", steps=40)]
    this = protocol_of("ann", *run, *of_1)
    this._backoff.charge("bob", t=0, since_s=NOW - 70.0, now=NOW - 70.0, rounds=BUDGET_ROUNDS)
    for second in range(40):
        this.speak(now=NOW - 40.0 + second)
    assert this.coordinator(1, now=NOW) == "cid"


def test_a_replica_of_stage_0_that_does_not_coordinate_finds_a_commit_and_tells_it() -> None:
    of_0 = [record(name, 0, steps=steps) for name, steps in (("zoe", 60), ("yan", 40), ("wil", 40))]
    this = protocol_of("yan", *of_0, *(record(name, steps=60) for name in ("ann", "bob")), stage=0)
    assert not this.summary("zoe", ready("zoe", "wil", stage=0), now=NOW).commits
    status = this.summary("ann", ready("ann", "bob"), now=NOW)
    assert [commit.t for commit in status.commits] == [0]
    assert this.run_status.run_coordinator != "yan"


def test_a_stage_tells_the_run_coordinator_no_commit_again_that_it_has_but_the_last() -> None:
    """Of 256 stages each has 560 kB of proofs, and three of them went there each second, from each stage."""
    others = record("zoe", 0, steps=90), record("bob", steps=40)
    this, taken = protocol_of("ann", record("ann", steps=60), *others), {t: Commit(t, 1.0) for t in range(3)}
    there = {s: [r for r in (record("ann", steps=60), *others) if r.stage == s] for s in range(RUN.S)}
    this.observe(Local(generation=Generation(), version=3, steps={}, commits=taken), there, now=NOW)

    def told(*known: int, by: str = "zoe", number: int = 0) -> list[int]:
        commits = tuple(taken[t] for t in known)
        this.run_status = RunStatus(
            run=RUN.id, generation=Generation(number), version=3, commits=commits, run_coordinator=by
        )
        this.speak(now=NOW)
        bodies = [message.body for message in this.ready(now=NOW).messages if message.to == "zoe"]
        (summary,) = [body for body in bodies if isinstance(body, StageSummary)]
        return [commit.t for commit in summary.commits]

    assert told(0, 1, 2) == [2]
    assert told(1, 2) == [0, 2], "it went back, or did not believe it"
    assert told() == told(0, 1, 2, by="yan") == [0, 1, 2], "another that coordinates the run has said nothing"
    assert told(0, 1, 2, number=1) == [0, 1, 2]


def test_a_commit_is_found_by_who_serves_now_and_believed_by_who_served_when_there_was_a_result() -> None:
    """Else one stage took a step that the other, to which a peer with voice had come, did not believe."""
    of_0, dan, ann = (
        [record("zoe", 0, steps=60), record("yan", 0, steps=40)],
        record("dan"),
        record("ann", steps=60),
    )
    this, mine = protocol_of("yan", *of_0, dan, stage=0), Step(0, Ledger(0, RUN.M))
    mine.promise("r", now=NOW)
    mine.exchange("r")
    mine.prepare(Prepared("r", 1.0, ""))
    local = Local(generation=Generation(), version=0, steps={0: mine}, commits={})
    for of_1 in ([dan], [dan, ann]):
        this.observe(local, {0: of_0, 1: of_1}, now=NOW)
    there, there_too = ready("zoe", "yan", stage=0), ready("dan")
    this.summary("zoe", there, now=NOW)
    assert not this.summary("ann", there_too, now=NOW).commits
    commit = Commit(0, 2.0, tuple(said.steps[0].proofs for said in (there, there_too)))
    told = RunStatus(run=RUN.id, version=0, commits=(commit,), run_coordinator="zoe")
    this.run_status_came("zoe", told, now=NOW)
    assert this._agreed.commits == {0: commit}


def test_one_that_does_not_coordinate_the_run_tells_commits_and_nothing_else() -> None:
    zoe = msgspec.structs.replace(record("zoe", 0, steps=60), version=9)
    run = (zoe, record("yan", 0, steps=40), record("liar", 0))
    lie = RunStatus(run=RUN.id, version=9, run_coordinator="yan")
    this = protocol_of("ann", record("ann", steps=60), *run)
    this.run_status_came("yan", lie, now=NOW)
    assert this.run_status.version != 9
    this.hear_run_status("yan", lie, now=NOW)
    assert this.run_status.version != 9
    this.run_status_came("zoe", lie, now=NOW)
    assert this.run_status.version == 9


def test_who_has_voice_and_only_joins_its_stage_keeps_no_stranger_from_speaking_for_it() -> None:
    """A run of strangers stood still while a peer that had worked before got the weights (seed 700144)."""
    joins = msgspec.structs.replace(record("ann", steps=60), state="joining")
    summary = StageSummary(run=RUN.id, stage=1, version=0, members=1)
    this = protocol_of("zoe", record("zoe", 0, steps=40), joins, record("dan"), stage=0)
    this.summary("dan", summary, now=NOW)
    this = protocol_of(
        "zoe", record("zoe", 0, steps=40), joins, record("bob", steps=20), record("dan"), stage=0
    )
    with pytest.raises(NotNow, match="dan does not coordinate stage 1"):
        this.summary("dan", summary, now=NOW)


def test_a_replica_tells_its_commits_until_its_coordinator_has_its_version() -> None:
    """The coordinator may believe one only once it has asked around: told once, it was lost (seed 900336)."""
    others = (record("ann", steps=20), record("bob", steps=60))
    this, commit = protocol_of("bob", *others), Commit(0, 1.0)
    local = Local(generation=Generation(), version=1, steps={}, commits={0: commit})
    this.observe(local, {1: others}, now=NOW)
    for sources, told in ((("bob",), (commit,)), (("ann", "bob"), ())):
        this.directive_came(
            Directive(run=RUN.id, stage=1, coordinator="ann", version=1, sources=sources), now=NOW
        )
        this.speak(now=NOW)
        bodies = [body for _, body, _ in this.ready(now=NOW).messages if isinstance(body, ReplicaReport)]
        assert bodies[-1].commits == told


@pytest.mark.parametrize("caught_up", [False, True])
def test_a_state_that_only_strangers_have_is_waited_for_and_then_done_without(caught_up: bool) -> None:
    """Else a stage that no other bears out what they have was behind, and not, by turns (seed 520, with
    directives that answer reports not pushed as well)."""
    this = protocol_of("ann", record("ann", steps=60), record("dan"))
    this.trained = Position(version=1)
    local, asked, restored = Local(generation=Generation(), version=0, steps={}, commits={}), [], []
    for after_s in range(30):
        now = NOW + after_s
        if caught_up and after_s >= 10:
            local = Local(generation=Generation(), version=1, steps={}, commits={})
        this.observe(local, this._peers, now=now)
        this.report("dan", signed_report(report(1), SimSigner("dan"), None), [], now=now)
        this.speak(now=now)
        for action in this.ready(now=now).actions:
            asked += [after_s] * isinstance(action, CatchUp)
            restored += [after_s] * isinstance(action, RestoreStage)
    assert asked[0] < LOST_S + 2.0
    assert bool(restored) is not caught_up
    assert caught_up or restored[0] > 2 * LOST_S


# --- what counts ---


def test_a_stranger_owns_no_part_whatever_its_line() -> None:
    decision = decided(VOICE, ann=step(0b0011), bob=step(0b1100), liar=step())
    assert isinstance(decision, Plan)
    assert dict(zip(decision.members, decision.parts, strict=True)) == {
        "ann": 50,
        "bob": 50,
        "liar": 0,
    }


def test_when_one_reduces_everything_it_is_not_a_stranger() -> None:
    reports = {"aaa": step(), "ann": step(0b0011), "bob": step(0b1100)}
    for owner, parts in (("ann", (0, 100, 0)), ("aaa", (0, 50, 50))):
        decision = decide(RUN.id, 1, 0, RUN.M, 100, reports, None, {}, VOICE, owners=[owner])
        assert isinstance(decision, Plan) and decision.parts == parts


def test_a_stage_does_not_wait_for_a_stranger_to_take_the_result() -> None:
    decision = decided(VOICE, ann=step(0b0011, held="r"), bob=step(0b1100, held="r"), liar=step())
    assert decision == FetchResult("r", ("ann", "bob"), ready=True, sqnorm=1.0)
    decision = decided({}, ann=step(0b0011, held="r"), bob=step(0b1100, held="r"), liar=step())
    assert decision == FetchResult("r", ("ann", "bob"), ready=False, sqnorm=1.0)


def test_the_result_of_strangers_is_no_result() -> None:
    strangers = {f"liar{i}": step(held="made-up") for i in range(9)}
    assert isinstance(decided(VOICE, ann=step(0b0011), bob=step(0b1100), **strangers), Plan)
    assert isinstance(decided(VOICE, ann=step(0b0001), bob=step(0b1100), **strangers), Lacking)
    both = decided(VOICE, ann=step(0b0011, held="r"), bob=step(0b1100), **strangers)
    assert both == FetchResult("r", ("ann",), ready=False, sqnorm=1.0)


def test_digests_count_by_voice() -> None:
    digests = {"ann": "x", "bob": "y", "liar1": "z", "liar2": "z", "liar3": "z"}
    assert digest_majority(digests, {"ann": 40, "bob": 41}) == "y"
    assert digest_majority(digests) == "z"


def led(*reports: tuple[PeerId, ReplicaReport]) -> Directive:
    """What ann, who coordinates, tells bob."""
    this = protocol_of("ann", record("ann", steps=60), record("bob", steps=40), record("liar"))
    for peer, said in reports:
        tell(this, peer, said)
    return tell(this, "bob", report(digest="true"))


def test_a_stranger_moves_no_stage_to_another_version_or_other_weights() -> None:
    told = led(("liar", report(1, digest="false")))
    assert (told.version, told.sources) == (0, ("ann", "bob"))


def test_a_stranger_with_a_result_that_none_confirms_begins_again() -> None:
    this = protocol_of("ann", record("ann", steps=60), record("bob", steps=40), record("dan"))
    tell(this, "bob", report(0, step(0b1100)))
    told = tell(this, "dan", report(0, step(0b0011, held="r")))
    assert told.steps[0].begin_again and told.steps[0].plan is None


def test_a_stranger_that_ended_the_running_round_first_keeps_its_result() -> None:
    this = protocol_of("ann", record("ann", steps=60), record("bob", steps=40), record("dan"))
    tell(this, "bob", report(0, step(0b1100)))
    told = tell(this, "dan", report(0, step(0b0011)))
    assert told.steps[0].plan is not None
    told = tell(this, "dan", report(0, step(0b0011, held=told.steps[0].plan.round)))
    assert told.steps[0].plan is not None and not told.steps[0].begin_again


def test_a_stranger_that_alone_ended_a_round_which_failed_for_the_others_begins_again() -> None:
    this = protocol_of("ann", record("ann", steps=60), record("bob", steps=40), record("dan"))
    tell(this, "bob", report(0, step(0b1100)))
    plan = tell(this, "dan", report(0, step(0b0011))).steps[0].plan
    assert plan is not None
    failed = msgspec.structs.replace(step(0b1100), failed_round=plan.round)
    tell(this, "bob", report(0, failed))
    told = tell(this, "dan", report(0, step(0b0011, held=plan.round)))
    assert told.steps[0].begin_again


def test_a_plan_of_strangers_alone_gives_way_to_one_with_a_member_that_is_heard() -> None:
    alone = decided({}, dan=step(ALL))
    assert isinstance(alone, Plan) and alone.members == ("dan",)
    after = decided(VOICE, alone, dan=step(ALL, held=alone.round), ann=step())
    assert isinstance(after, Plan) and after.members == ("ann", "dan")


def test_a_result_of_one_with_voice_is_none_while_another_has_microbatches_that_it_may_lack() -> None:
    """Attack 5 by a peer that has worked for it."""
    this = protocol_of("ann", record("ann", steps=60), record("bob", steps=40), record("cid", steps=40))
    assert tell(this, "cid", report(0, step(0b0011, held="made-up"))).steps[0].fetch is not None
    tell(this, "bob", report(0, step(in_progress=0b1000)))
    told = tell(this, "cid", report(0, step(0b0011, held="made-up")))
    assert told.steps[0].begin_again and told.steps[0].fetch is None


@pytest.mark.parametrize(("islands", "made_up"), [(None, True), (IslandsSpec(count=2, local_steps=2), False)])
def test_a_result_of_a_meeting_is_none_that_others_take(islands: IslandsSpec | None, made_up: bool) -> None:
    """Each finds by itself what it has changed, and when it comes to it (seed 902257)."""
    run = replace(RUN, steps=81, islands=islands).island(0) if islands is not None else RUN
    this = StageCoordinator(run, 1, "ann", 8, Agreed(Generation()), Backoff())
    this.voice = VOICE
    held = StepReport(t=2, prepared=Prepared("r", 1.0, "", b"signed"))
    for peer, said in (("ann", held), ("bob", StepReport(t=2))):
        this.members[peer] = Member(report(2, said), [], NOW)
    this.decide(now=NOW)
    this.summary_heard(this.summary({}))
    told = this.directive_for("ann", commits={}, behind_s=0.0, run_status=RunStatus()).steps[0]
    assert told.begin_again is made_up


def test_a_round_without_one_that_is_left_out_gives_a_result_whatever_that_one_has() -> None:
    """A tarpit that said it has microbatches made two others begin each step again, for ever."""
    this = protocol_of("ann", record("ann", steps=60), record("bob", steps=40), record("cid", steps=40))
    this._backoff.charge("cid", t=0, since_s=NOW, now=NOW, rounds=BUDGET_ROUNDS)
    tell(this, "cid", report(0, step(0b0100, in_progress=0b1000)))
    plan = tell(this, "bob", report(0, step(ALL))).steps[0].plan
    assert plan is not None and plan.members == ("bob",)
    told = tell(this, "bob", report(0, step(ALL, held=plan.round))).steps[0]
    assert told.fetch is not None and not told.begin_again
    assert tell(this, "bob", report(0, step(ALL, held="made-up"))).steps[0].begin_again


def test_a_result_that_is_not_believed_is_not_made_again_by_the_same_plan() -> None:
    """A newcomer had no part in it, and the only member began its step again and again (seed 9501405)."""
    this = protocol_of("ann", record("ann"), record("bob", since=3.0))
    tell(this, "bob", report(0, step(ALL)))
    plan = tell(this, "bob", report(0, step(ALL))).steps[0].plan
    assert plan is not None and plan.members == ("bob",)
    came = StepReport(t=0)
    assert tell(this, "cid", report(0, came)).steps[0].plan == plan, "it has added nothing"
    assert tell(this, "bob", report(0, step(ALL, held=plan.round))).steps[0].begin_again
    again = tell(this, "bob", report(0, step(ALL))).steps[0].plan
    assert again is not None and again.members == ("bob", "cid")


def commit_of(norm: float, *, by: PeerId = "ann") -> tuple[object, ...]:
    """What zoe, who coordinates the run, commits when both stages say that they are prepared."""
    records = [record("zoe", 0, steps=40), record("ann", steps=60)]
    this = protocol_of("zoe", *records, stage=0)
    mine = opened(0, RUN.M)
    local = Local(generation=Generation(), version=0, steps={0: mine}, commits={})
    this.observe(local, {s: [r for r in records if r.stage == s] for s in (0, 1)}, now=NOW)
    this.speak(now=NOW)
    said = signed_report(report(0, step(held="r")), SimSigner(by), None).steps[0].prepared
    assert said is not None
    view = StepSummary(t=0, ready=True, sqnorm=norm, proofs=(Proof("ann", said),))
    summary = StageSummary(run=RUN.id, stage=1, version=0, members=1, steps=(view,))
    return this.summary("ann", summary, now=NOW).commits


def opened(t: int, microbatches: int) -> Step:
    """A step whose result this replica holds."""
    prepared = Step(t, Ledger(t, microbatches))
    prepared.promise("r", now=NOW)
    prepared.exchange("r")
    prepared.complete()
    prepared.prepare(Prepared("r", 1.0, ""))
    return prepared


@pytest.mark.parametrize(("held", "proven_by"), [("r", ["ann", "bob"]), ("s", ["ann"])])
def test_one_that_is_left_out_gives_its_word_on_the_result_all_the_same(
    held: str, proven_by: list[PeerId]
) -> None:
    """Others see no reason to do without it: the commit waited until its rest was over (seed 901048)."""
    others = (record("ann", steps=60), record("bob", steps=40))
    this = protocol_of("ann", *others)
    local = Local(generation=Generation(), version=0, steps={0: opened(0, RUN.M)}, commits={})
    this.observe(local, {1: others}, now=NOW)
    this._backoff.charge("bob", t=0, since_s=NOW, now=NOW, rounds=BUDGET_ROUNDS)
    tell(this, "bob", report(0, step(held=held)))
    this.speak(now=NOW)
    told = this._coordinator.summary({})
    assert [proof.peer for proof in told.steps[0].proofs] == proven_by


def test_a_result_is_given_up_once_the_run_coordinator_knows_that_the_stage_is_not_ready() -> None:
    """It had heard before that the stage was, and committed the step: the run began anew (seed 9500258)."""
    others = record("bob", steps=40), record("dan"), record("zoe", stage=0)
    this = protocol_of("ann", record("ann", steps=60), *others)
    alone = signed_report(report(0, step(0b0011, held="r")), SimSigner("dan"), None)
    status = RunStatus(run=RUN.id, run_coordinator="zoe")

    def begins_again() -> bool:
        return this.report("dan", alone, [], now=NOW).steps[0].begin_again

    def speaks_at_once() -> bool:
        return this.ready(now=NOW).wake_at <= NOW

    this.report("bob", signed_report(report(0, step(0b1100)), SimSigner("bob"), None), [], now=NOW)
    this.speak(now=NOW)
    assert not begins_again()
    told = [message.body for message in this.ready(now=NOW).messages if message.to == "zoe"][-1]
    assert isinstance(told, StageSummary)
    this.run_status_came("zoe", status, now=NOW)
    assert not begins_again() and not speaks_at_once(), "that answers nothing"
    this.run_status_came("zoe", status, now=NOW, told=told)
    assert speaks_at_once() and begins_again()
    this.run_status_came("zoe", status, now=NOW, told=told)
    assert not speaks_at_once(), "all has been said"
    this.report("bob", signed_report(report(0, step(0b1100, held="r")), SimSigner("bob"), None), [], now=NOW)
    assert not this._coordinator.unready, "it was ready since"


def test_no_result_is_given_up_by_which_one_of_stage_0_has_perhaps_committed_whatever_another_says() -> None:
    """One that lied, and knew of no commit, said that the stage is not ready: the run went back 20 steps."""
    others = record("bob", steps=40), record("dan"), record("yan", 0, steps=40), record("zoe", 0, steps=40)
    this = protocol_of("ann", record("ann", steps=60), *others)
    alone = signed_report(report(0, step(0b0011, held="r")), SimSigner("dan"), None)
    this._coordinator.tells(ready("dan"), {"zoe"}, now=NOW)
    this.report("bob", signed_report(report(0, step(0b1100)), SimSigner("bob"), None), [], now=NOW)

    def begins_again(lacking: set[int], *, says: PeerId) -> bool:
        """Once that one of stage 0 has answered a summary, with a commit that is lacking words, or none."""
        this.report("dan", alone, [], now=NOW)
        told = this._coordinator.summary({}, number=5)
        this._coordinator.summary_heard(told, says, lacking)
        return this.report("dan", alone, [], now=NOW).steps[0].begin_again

    assert not begins_again(set(), says="yan"), "zoe has not answered"
    assert not begins_again({0}, says="zoe") and not begins_again(set(), says="yan"), "zoe has committed it"
    assert begins_again(set(), says="zoe")


def test_a_report_or_summary_that_comes_late_takes_nothing_back() -> None:
    """What it says was given up: a step was committed with a result that was gone, and the run went back."""
    this = protocol_of("ann", record("ann", steps=60), record("bob", steps=40))
    for number, held in ((2, ""), (1, "r"), (2, "r"), (3, "")):
        said = msgspec.structs.replace(report(0, step(0b0011, held=held)), number=number)
        this.report("bob", signed_report(said, SimSigner("bob"), None), [], now=NOW)
        prepared = this._coordinator.members["bob"].report.steps[0].prepared
        assert (prepared is not None) == (held == "r" and number > 1)
    zoe, there = run_coordinator(), ready("ann", "bob")
    gone = msgspec.structs.replace(there, steps=(StepSummary(t=0),), number=2)
    for summary, kept in ((gone, gone), (there, gone), (msgspec.structs.replace(there, number=3), None)):
        zoe.summary("ann", summary, now=NOW)
        assert zoe._run_coordinator.stages[1].summary == (kept or summary)


def test_each_message_has_a_greater_number_than_the_one_before() -> None:
    this = protocol_of("ann", record("ann", steps=60), record("zoe", 0, steps=60), record("bob", steps=90))
    numbers: list[int] = []
    for coordinates in (False, True):
        if coordinates:
            this.observe(this._local, {0: this._peers[0], 1: this._peers[1][:1]}, now=NOW)
        for _ in range(2):
            this.speak(now=NOW)
            said = [m.body for m in this.ready(now=NOW).messages]
            numbers += [one.number for one in said if isinstance(one, (ReplicaReport, StageSummary))]
    assert len(numbers) == 4 and numbers == sorted(set(numbers))


def test_a_stage_whose_step_others_have_taken_asks_them_for_its_commit() -> None:
    """The run coordinator had come since, did not believe it, and told nobody: seed 630 stood still."""
    past = [
        msgspec.structs.replace(record(peer, stage, steps=steps), version=1)
        for peer, stage, steps in (("zoe", 0, 0), ("cid", 1, 40), ("dan", 1, 40))
    ]
    records = record("ann", steps=60), record("yan", 0, steps=40), *past
    this = protocol_of("ann", *records)
    by_stage = {s: [r for r in records if r.stage == s] for s in (0, 1)}
    held = Step(0, Ledger(0, RUN.M))

    def asked(version: int, step: Step, now: float) -> set[PeerId]:
        at = Local(generation=Generation(), version=version, steps={version: step}, commits={})
        this.observe(at, by_stage, now=now)
        this.speak(now=now)
        return {m.to for m in this.ready(now=now).messages if isinstance(m.body, StageSummary)}

    assert asked(0, held, NOW) == {"yan"}, "there is no result yet"
    held.promise("r", now=NOW)
    held.prepare(Prepared("r", 1.0, "d"))
    others = [asked(0, held, NOW + seconds) - {"yan"} for seconds in range(3)]
    assert others == [{"cid"}, {"dan"}, {"cid"}] or others == [{"dan"}, {"cid"}, {"dan"}], "those with voice"
    this.observe(this._local._replace(version=1, steps={}), by_stage, now=NOW + 3)
    assert asked(0, held, NOW + 4) == {"yan"}, "it has not been late for long"
    assert asked(0, held, NOW + 10) != {"yan"}


def test_an_answer_of_another_than_stage_0_says_nothing_of_what_the_run_coordinator_knows() -> None:
    this = protocol_of("ann", record("ann", steps=60), record("bob"), record("dan"), record("zoe", stage=0))
    alone = signed_report(report(0, step(0b0011)), SimSigner("dan"), None)
    this.report("dan", alone, [], now=NOW)
    told = this._coordinator.summary({})
    for peer, unready in (("bob", set[int]()), ("zoe", {0})):
        this.run_status_came(peer, RunStatus(run=RUN.id, run_coordinator="zoe"), now=NOW, told=told)
        assert this._coordinator.unready == unready


@pytest.mark.parametrize("ends", ["generation", "coordinator"])
def test_what_the_run_coordinator_knows_of_a_stage_ends_with_what_it_was_told_in(ends: str) -> None:
    records = record("ann", steps=60), record("dan"), record("zoe", stage=0)
    this = protocol_of("ann", *records)
    this.report("dan", signed_report(report(0, step(0b0011)), SimSigner("dan"), None), [], now=NOW)
    told = this._coordinator.summary({})
    status = RunStatus(run=RUN.id, run_coordinator="zoe")
    this.run_status_came("zoe", status, now=NOW, told=told)
    assert this._coordinator.unready == {0}
    if ends == "generation":
        this._enter(Generation(1, 0, 0, 0), NOW)
    else:
        this.observe(this._local, {0: records[2:], 1: (*records[:2], record("eve", steps=100))}, now=NOW)
        this.speak(now=NOW)
    this.run_status_came("zoe", status, now=NOW, told=told)
    assert not this._coordinator.unready


def test_what_the_run_coordinator_knew_before_a_result_was_found_has_none_given_up() -> None:
    """The other coordinator of the stage had told it since, and the step was committed: the run went back."""
    this = protocol_of("ann", record("ann", steps=60), record("bob", steps=40), record("dan"))

    def dan(held: str) -> bool:
        """Whether dan begins again by what it says."""
        said = signed_report(report(0, step(0b0011, held=held)), SimSigner("dan"), None)
        return this.report("dan", said, [], now=NOW).steps[0].begin_again

    this.report("bob", signed_report(report(0, step(0b1100)), SimSigner("bob"), None), [], now=NOW)
    dan("")
    before = this._coordinator.summary({})
    this._coordinator.summary_heard(before)
    assert not dan("r")
    this._coordinator.summary_heard(before)
    assert not dan("r"), "the answer was on its way"
    this._coordinator.summary_heard(this._coordinator.summary({}))
    assert dan("r")


def test_one_that_is_left_out_gives_up_what_is_run_again() -> None:
    """While it had that, no result without it was believed: for a minute (seed 903331)."""
    this = protocol_of("ann", record("ann", steps=60), record("bob", steps=40))
    assert not tell(this, "bob", report(0, step(0b0011))).steps[0].retract
    this._backoff.charge("bob", t=0, since_s=NOW, now=NOW, rounds=BUDGET_ROUNDS)
    tell(this, "bob", report(0, step(0b0011)))
    local = Local(generation=Generation(), version=0, steps={0: Step(0, Ledger(0, RUN.M))}, commits={})
    this.observe(local, {1: (record("ann", steps=60), record("bob", steps=40))}, now=NOW)
    assert tell(this, "bob", report(0, step(0b0011))).steps[0].retract == 0b0011


@pytest.mark.parametrize(
    ("round_name", "retracts"), [("another", True), ("its own", False)], ids=["took no part", "gave all"]
)
def test_one_that_is_left_out_gives_up_what_a_result_has_without_it(round_name: str, retracts: bool) -> None:
    """Of two one found a result before the other one reported, and both waited for a turn of 25 s."""
    others = (record("ann", steps=60), record("bob", steps=40))
    this = protocol_of("ann", *others)
    local = Local(generation=Generation(), version=0, steps={0: opened(0, RUN.M)}, commits={})
    this.observe(local, {1: others}, now=NOW)
    this._backoff.charge("bob", t=0, since_s=NOW, now=NOW, rounds=BUDGET_ROUNDS)
    held = "r" if round_name == "its own" else "s"
    told = tell(this, "bob", report(0, msgspec.structs.replace(step(0b0011), frozen_for=held, gave_all=held)))
    assert told.steps[0].retract == (0b0011 if retracts else 0)
    assert (told.steps[0].fetch is None) == retracts


def test_what_one_alone_has_that_is_left_out_is_lacking() -> None:
    """Nobody ran it again, and it was told to give up nothing, while another coordinated."""
    this = protocol_of("ann", record("ann", steps=60), record("bob", steps=40))
    this._backoff.charge("bob", t=0, since_s=NOW, now=NOW, rounds=BUDGET_ROUNDS)
    assert tell(this, "bob", report(0, step(ALL))).steps[0].retract == ALL
    assert this._coordinator.summary({}).steps[0].unclaimed == ALL


def test_one_that_cost_too_much_is_left_out_though_it_does_not_report() -> None:
    """It took itself for the coordinator, and callers asked it for each microbatch that was run again."""
    this = protocol_of("ann", record("ann", steps=60), record("bob", steps=40), record("liar"))
    for peer in ("bob", "liar"):
        this._backoff.charge(peer, t=0, since_s=NOW, now=NOW, rounds=BUDGET_ROUNDS)
    this.speak(now=NOW)
    assert this.directive is not None and this.directive.left_out == ("bob",)


def test_a_result_is_proven_anew_where_another_took_its_step_by_what_is_not_believed() -> None:
    """Both stages had it, and nobody said so: to its coordinator the stage was past it (seed 902339)."""
    others = (record("ann", steps=60), record("bob", steps=40), record("cid", steps=40))
    this = protocol_of("ann", *others)
    local = Local(generation=Generation(), version=0, steps={0: opened(0, RUN.M)}, commits={})
    this.observe(local, {1: others}, now=NOW)
    for peer in ("bob", "cid"):
        tell(this, peer, report(1))
    this.speak(now=NOW)
    told = this._coordinator.summary({})
    assert told.version == 1 and [(step.t, step.ready) for step in told.steps] == [(0, True)]
    this._agreed.commits[0] = Commit(0, 1.0)
    this.speak(now=NOW)
    assert not this._coordinator.summary({}).steps, "it follows"


def test_a_step_that_some_of_each_stage_have_taken_is_committed_anew() -> None:
    stage_0 = (record("zoe", 0, steps=60), record("yan", 0, steps=40))
    records = {0: stage_0, 1: (record("ann", steps=60),)}
    this = protocol_of("zoe", *stage_0, *records[1], stage=0)
    this.observe(
        Local(generation=Generation(), version=0, steps={0: opened(0, RUN.M)}, commits={}), records, now=NOW
    )
    tell(this, "yan", msgspec.structs.replace(report(1), stage=0))
    this.belief.excuse(0, {"yan"}, set(), set())
    this.speak(now=NOW)
    said = signed_report(report(0, step(held="r")), SimSigner("ann"), None).steps[0].prepared
    assert said is not None
    view = StepSummary(t=0, ready=True, sqnorm=1.0, proofs=(Proof("ann", said),))
    summary = StageSummary(run=RUN.id, stage=1, version=1, members=1, steps=(view,))
    assert [commit.t for commit in this.summary("ann", summary, now=NOW).commits] == [0]


def test_a_stage_tells_also_the_run_coordinator_of_whom_it_was_told() -> None:
    """After late steps peers may differ for a while on who that is. Strangers are told nothing."""
    for named, told in (("yan", {"yan", "zoe"}), ("liar", {"zoe"}), ("", {"zoe"})):
        run = [record("zoe", 0, steps=60), record("yan", 0, steps=40), record("liar", 0)]
        this = protocol_of("ann", record("ann", steps=60), *run)
        this.run_status_came("zoe", RunStatus(run=RUN.id, run_coordinator=named), now=NOW)
        this.speak(now=NOW)
        assert {to for to, body, _ in this.ready(now=NOW).messages if isinstance(body, StageSummary)} == told


@pytest.mark.parametrize(("named", "told"), [("yan", {"yan", "zoe"}), ("gone", {"zoe"})])
def test_where_nobody_has_voice_it_tells_any_run_coordinator_that_is_there(
    named: PeerId, told: set[PeerId]
) -> None:
    """Its commits were heard of by nobody: the stage went back as if it were lost, again and again."""
    run = [record("zoe", 0, since=1.0), record("yan", 0, since=2.0)]
    this = protocol_of("ann", record("ann", steps=60), *run)
    this.run_status_came("zoe", RunStatus(run=RUN.id, run_coordinator=named), now=NOW)
    this.speak(now=NOW)
    assert {to for to, body, _ in this.ready(now=NOW).messages if isinstance(body, StageSummary)} == told


def test_a_coordinator_that_was_named_and_is_not_reached_is_left_alone_for_a_while() -> None:
    """Else each call that fails is the reason for the next one, at once."""
    run = [record("zoe", 0, steps=60), record("yan", 0, steps=40)]
    this = protocol_of("ann", record("ann", steps=60), *run)
    this.run_status_came("zoe", RunStatus(run=RUN.id, run_coordinator="yan"), now=NOW)
    this.unreachable("yan", silent=False, now=NOW)
    this.speak(now=NOW)
    assert {to for to, body, _ in this.ready(now=NOW).messages if isinstance(body, StageSummary)} == {"zoe"}


@pytest.mark.parametrize("rounds", [0, BUDGET_ROUNDS], ids=["usual", "that it has rest"])
def test_a_replica_reports_also_to_the_coordinator_of_whom_it_was_told(rounds: int) -> None:
    others = [record("bob", steps=60), record("cid", steps=40)]
    this = protocol_of("ann", record("ann", steps=20), *others)
    this._backoff.charge("cid", t=0, since_s=NOW, now=NOW, rounds=rounds)
    this.directive_came(Directive(run=RUN.id, stage=1, coordinator="cid", version=0), now=NOW)
    this.speak(now=NOW)
    reports = [to for to, body, _ in this.ready(now=NOW).messages if isinstance(body, ReplicaReport)]
    assert reports == ["bob", "cid"]


def test_rounds_of_which_it_was_not_seen_who_had_them_fail_count_until_a_step_is_taken() -> None:
    this = protocol_of("ann", record("ann", steps=60), record("bob", steps=40))
    this._backoff.unclear_rounds = 1
    this.observe(this._local, this._peers, now=NOW)
    assert this._backoff.unclear_rounds == 1
    this.observe(this._local._replace(version=1), this._peers, now=NOW)
    assert this._backoff.unclear_rounds == 0


def test_a_coordinator_that_cannot_be_reached_is_not_told_again_at_once() -> None:
    """All of its stage were banned, and who calls one hears of it at once: a replica did nothing else."""
    this = protocol_of("ann", record("ann", steps=20), record("bob", steps=60))
    for again, wakes_s in ((0, NOW), (1, NOW + REFRESH_S)):
        this.speak(now=NOW)
        this.unreachable("bob", silent=False, now=NOW)
        assert this.ready(now=NOW).wake_at == wakes_s, again


def test_the_run_coordinator_commits_what_is_proven_and_nothing_else() -> None:
    assert len(commit_of(1.0)) == 1
    assert commit_of(1e30) == ()
    assert commit_of(1.0, by="liar") == ()


def test_a_stage_of_newcomers_with_voice_hears_from_a_trainer_that_the_run_is_further() -> None:
    this = protocol_of("ann", record("ann", steps=60), record("dan"))
    this.speak(now=NOW)
    assert this.stuck_s(now=NOW) == 0.0
    this.trained = Position(Generation(), 1)
    this.speak(now=NOW)
    assert this.stuck_s(now=NOW + 5.0) == 5.0
    this.trained = Position(Generation(3), 1)
    this.speak(now=NOW)
    assert this.stuck_s(now=NOW + 5.0) == 0.0, "of another generation it says nothing"


def test_a_stranger_with_a_result_that_doubles_what_one_with_voice_has_begins_again() -> None:
    """It cannot retract what is in a result, and was told so for ever (seed 500760)."""
    this = protocol_of("ann", record("ann", steps=60), record("bob", steps=40), record("dan"))
    tell(this, "bob", report(0, step(0b10)))
    told = tell(this, "dan", report(0, step(ALL, held="r")))
    assert told.steps[0].begin_again and not told.steps[0].retract


def test_replicas_that_each_found_a_result_alone_begin_the_step_again_together() -> None:
    """Both are left out: neither result has what the other computed (seeds 1074, 1428)."""
    this = protocol_of("ann", record("ann", steps=60), record("bob", steps=40), record("cid", steps=40))
    tell(this, "bob", report(0, step(ALL, held="r")))
    assert tell(this, "cid", report(0, step(ALL, held="s"))).steps[0].begin_again
    assert tell(this, "bob", report(0, step(ALL, held="r"))).steps[0].begin_again


@pytest.mark.parametrize("silent", ["bob", "yan"])
def test_a_result_of_which_there_may_be_a_commit_is_not_given_up(silent: PeerId) -> None:
    """bob, or yan of the other stage, had left, or was there since a moment ago, as the run coordinator saw,
    and ann saw it otherwise: she asked for its word on the commit, which bears her own, and meanwhile began
    the step again, which nobody confirmed. Her stage was lost, and the run went back."""
    records = [record("ann", steps=60), record("bob", steps=40), record("zoe", 0, steps=40)]
    records += [record("yan", 0, steps=40)] if silent == "yan" else []
    this = protocol_of("ann", *records)
    held = Local(generation=Generation(), version=0, steps={0: opened(0, RUN.M)}, commits={})
    this.observe(held, {s: [r for r in records if r.stage == s] for s in (0, 1)}, now=NOW)

    def does(*commits: Commit) -> list[object]:
        """What ann does once zoe has heard of her stage, and answered that."""
        this.speak(now=NOW)
        told = [m.body for m in this.ready(now=NOW).messages if isinstance(m.body, StageSummary)][-1]
        status = RunStatus(run=RUN.id, run_coordinator="zoe", commits=commits)
        this.run_status_came("zoe", status, now=NOW, told=told)
        asks = this.ready(now=NOW).actions
        this.speak(now=NOW)
        acts = this.ready(now=NOW).actions
        return [action for action in (*asks, *acts) if not isinstance(action, AskAbsent)]

    assert not does(), "the stage is ready, as ann alone says"
    proofs = tuple(ready(peer, stage=s).steps[0].proofs for s, peer in enumerate(("zoe", "ann")))
    commit = Commit(0, 2.0, proofs=proofs)
    this.report("bob", signed_report(report(0, step()), SimSigner("bob"), None), [], now=NOW)
    directive = Directive(
        run=RUN.id, stage=1, coordinator="bob", version=0, steps=(StepDirective(t=0, begin_again=True),),
        commits=(commit,),
    )  # fmt: skip
    if silent == "yan":
        assert not does(commit), "yan is asked"
        this.directive_came(directive, now=NOW, seen="bob")
        assert all(isinstance(action, AskAbsent) for action in this.ready(now=NOW).actions)
        this.belief.excuse(0, {"yan"}, set(), set())
    this.directive_came(directive, now=NOW, seen="bob")
    assert ApplyStep(commit) in this.ready(now=NOW).actions and does(commit) == [ApplyStep(commit)]


class TwoThatCommit:
    """ann, alone with a result, and of stage 0 zoe and yan, who both look for commits. bob has nothing."""

    def __init__(self) -> None:
        self.records = [record("ann", steps=60), record("bob", steps=40)]
        self.records += [record("zoe", 0, steps=60), record("yan", 0, steps=40)]
        self.this = protocol_of("ann", *self.records)
        self.held = Local(generation=Generation(), version=0, steps={0: opened(0, RUN.M)}, commits={})
        proofs = tuple(ready(peer, stage=s).steps[0].proofs for s, peer in enumerate(("zoe", "ann")))
        self.commit = Commit(0, 2.0, proofs=proofs)

    def tells(self, *, to: PeerId = "zoe", now: float = NOW) -> dict[PeerId, StageSummary]:
        """What ann says of her stage, and to whom. `to`: who coordinates the run, as she was told."""
        self.this.run_status = RunStatus(run=RUN.id, run_coordinator=to)
        by_stage = {s: [r for r in self.records if r.stage == s] for s in (0, 1)}
        self.this.observe(self.held, by_stage, now=now)
        self.this.speak(now=now)
        said = self.this.ready(now=now).messages
        return {m.to: m.body for m in said if isinstance(m.body, StageSummary)}

    def bob_comes(self) -> None:
        self.this.report("bob", signed_report(report(0, step()), SimSigner("bob"), None), [], now=NOW)
        self.this.ready(now=NOW)

    def begins_again(self, peer: PeerId, summary: StageSummary, *commits: Commit, now: float = NOW) -> bool:
        """Whether ann begins the step again once a peer has answered that."""
        status = RunStatus(run=RUN.id, run_coordinator="zoe", commits=commits)
        self.this.run_status_came(peer, status, now=now, told=summary)
        acts = [*self.this.ready(now=now).actions]
        self.this.speak(now=now)
        acts += self.this.ready(now=now).actions
        return any(isinstance(action, BeginAgain) for action in acts)


@pytest.mark.parametrize("yan", ["has committed", "has not", "is gone"])
def test_a_result_is_not_given_up_before_all_that_heard_of_it_say_that_there_is_no_commit(yan: str) -> None:
    """Two of stage 0 find commits. One found it by the first word of a stage, the other answered its second:
    the replica began again 2 ms before the commit came, and its stage was lost."""
    s = TwoThatCommit()
    first = s.tells(to="yan")
    assert set(first) == {"zoe", "yan"} and first["zoe"].steps[0].ready
    s.bob_comes()
    second = s.tells()
    assert set(second) == {"zoe", "yan"} and not second["zoe"].steps[0].ready, "yan may have committed it"
    assert not s.begins_again("zoe", second["zoe"]), "yan has not answered"
    match yan:
        case "has committed":
            assert not s.begins_again("yan", second["yan"], s.commit)
        case "has not":
            assert s.begins_again("yan", second["yan"])
        case "is gone":
            later = s.tells(now=NOW + ANSWERED_S)
            assert set(later) == {"zoe"} and s.begins_again("zoe", later["zoe"], now=NOW + ANSWERED_S)


def test_a_result_is_not_given_up_by_the_answer_that_brings_a_commit_which_lacks_words() -> None:
    s = TwoThatCommit()
    assert set(s.tells()) == {"zoe"}
    s.bob_comes()
    assert not s.begins_again("zoe", s.tells()["zoe"], s.commit), "yan is asked"
    assert s.begins_again("zoe", s.tells()["zoe"])


def test_the_answer_to_an_older_word_says_nothing_of_a_later_one() -> None:
    s = TwoThatCommit()
    s.bob_comes()
    older = s.tells()
    assert not older["zoe"].steps[0].ready
    s.this.lost("bob")
    assert s.tells()["zoe"].steps[0].ready
    answer = RunStatus(run=RUN.id, run_coordinator="zoe")
    s.this.run_status_came("zoe", answer, now=NOW, told=older["zoe"])
    s.bob_comes()
    newer = s.tells(to="yan")
    assert not s.begins_again("yan", newer["yan"]), "zoe was told that the step is ready"
    assert s.begins_again("zoe", newer["zoe"])


def test_who_told_that_a_step_is_ready_does_not_begin_it_again_on_the_word_of_the_next_coordinator() -> None:
    s = TwoThatCommit()
    assert s.tells()["zoe"].steps[0].ready
    again = Directive(
        run=RUN.id, stage=1, coordinator="bob", version=0, steps=(StepDirective(t=0, begin_again=True),)
    )
    late = ANSWERED_S + 1.0
    for later_s, commits, begins in ((1.0, (), False), (ANSWERED_S, (s.commit,), False), (late, (), True)):
        said, now = msgspec.structs.replace(again, number=int(later_s), commits=commits), NOW + later_s
        s.this.directive_came(said, now=now, seen="bob")
        acts = s.this.ready(now=now).actions
        assert any(isinstance(action, BeginAgain) for action in acts) is begins


def test_a_commit_that_lacked_words_is_looked_at_again_though_another_coordinates_by_then() -> None:
    """yan was dead, and was asked; meanwhile bob came, whom nobody told of the commit. The stage was lost."""
    s = TwoThatCommit()
    told = s.tells()["zoe"]
    status = RunStatus(run=RUN.id, run_coordinator="zoe", commits=(s.commit,))
    s.this.run_status_came("zoe", status, now=NOW, told=told)
    late = NOW + ANSWERED_S + 1.0
    again = Directive(
        run=RUN.id, stage=1, coordinator="bob", version=0, steps=(StepDirective(t=0, begin_again=True),)
    )
    s.this.directive_came(again, now=late, seen="bob")
    assert s.this.ready(now=late).actions == [AskAbsent(0, ("yan",))]
    s.this.belief.excuse(0, {"yan"}, set(), set())
    s.this.directive_came(again, now=late, seen="bob")
    assert s.this.ready(now=late).actions == [ApplyStep(s.commit)]


def test_what_a_liar_told_of_the_run_is_not_all_looked_at_with_each_directive() -> None:
    """4,000 false commits took 33 ms each time, though each signature is checked once."""
    s, looked = TwoThatCommit(), list[Commit]()
    false = [msgspec.structs.replace(s.commit, total_sqnorm=float(number)) for number in range(100)]
    s.tells()
    s.this.run_status_came("zoe", RunStatus(run=RUN.id, run_coordinator="zoe", commits=tuple(false)), now=NOW)
    s.this.belief.commit = lambda commit, *_, **__: bool(looked.append(commit))
    s.this.directive_came(Directive(run=RUN.id, stage=1, coordinator="bob", version=0), now=NOW, seen="bob")
    assert looked == false[-len(looked) :] and 0 < len(looked) <= 3


def test_that_another_result_of_its_stage_is_ready_keeps_nobody_from_giving_its_own_up() -> None:
    """Two with voice held the sum of two rounds. One told the other's as ready, again and again, and so kept
    its own, by which nothing could be proven: the run stood still for 83 s."""
    for made, begins in (("s", True), ("r", False)):
        s = TwoThatCommit()
        assert s.tells()["zoe"].steps[0].ready
        late = NOW + ANSWERED_S + 1.0
        said = signed_report(report(0, step(held=made)), SimSigner("cid"), None).steps[0].prepared
        assert said is not None
        view = StepSummary(t=0, ready=True, sqnorm=1.0, proofs=(Proof("cid", said),))
        other = StageSummary(run=RUN.id, stage=1, version=0, members=3, number=9, steps=(view,))
        s.this._coordinator.tells(other, {"zoe"}, now=late)
        again = Directive(
            run=RUN.id, stage=1, coordinator="bob", version=0, steps=(StepDirective(t=0, begin_again=True),)
        )
        s.this.directive_came(again, now=late, seen="bob")
        assert any(isinstance(action, BeginAgain) for action in s.this.ready(now=late).actions) is begins


def test_a_commit_of_before_a_rollback_is_looked_at_no_more() -> None:
    """It says nothing of the step that is done again; all the same a word on it was asked for each second,
    and no result of that step was given up meanwhile.
    """
    s = TwoThatCommit()
    told = s.tells()["zoe"]
    status = RunStatus(run=RUN.id, run_coordinator="zoe", commits=(s.commit,))
    s.this.run_status_came("zoe", status, now=NOW, told=told)
    s.this.ready(now=NOW)
    late, anew = NOW + ANSWERED_S + 1.0, Generation(1)
    by_stage = {stage: [r for r in s.records if r.stage == stage] for stage in (0, 1)}
    s.this.observe(s.held._replace(generation=anew), by_stage, now=late)
    again = (StepDirective(t=0, begin_again=True),)
    s.this.directive_came(
        Directive(run=RUN.id, stage=1, coordinator="bob", generation=anew, version=0, steps=again),
        now=late, seen="bob",
    )  # fmt: skip
    acts = s.this.ready(now=late).actions
    assert [type(action) for action in acts] == [BeginAgain]


def test_strangers_pass_nobody_over_who_alone_has_voice() -> None:
    """They followed one another for a minute, and all that they computed was run again."""
    this = protocol_of("cid", record("bob", steps=40), record("cid"), record("dan"))
    this._backoff.charge("bob", t=0, since_s=NOW, now=NOW, rounds=BUDGET_ROUNDS)
    assert this.coordinator(1, now=NOW) == "bob"
    this._backoff.failed("bob", now=NOW)
    assert this.coordinator(1, now=NOW) != "bob", "it is away"
