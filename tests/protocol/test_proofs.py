"""No single peer's word makes a run take a step (attack 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from peers.sim.network import SimSigner
from swarm.errors import Refused
from swarm.ids import Generation, PeerId, Position, Stage
from swarm.manifest import Run, audit_run
from swarm.policy.backoff import Backoff
from swarm.protocol.ledger import Ledger
from swarm.protocol.messages import Directive, RunStatus, StageSummary, StepDirective
from swarm.protocol.proofs import Belief, proves, signed_report
from swarm.protocol.protocol import UNBORNE_S, StepProtocol
from swarm.protocol.replica import ApplyStep, AskAbsent, Fetch, Local, RestoreStage, follow, report_of
from swarm.protocol.rounds import Commit, FetchResult, Prepared, Proof, StepReport
from swarm.protocol.voice import Worked, vouch
from swarm.records import PeerRecord
from tests.protocol.test_by_voice import NOW, RUN, TRAINER, protocol_of, record, report, tell
from tests.protocol.world import Step

GENERATION = Generation()
THERE = [record("zoe", 0, steps=40), record("ann", steps=40), record("bob", steps=40)]
CHECKED = replace(RUN, dtype="float32")
"""Sums are checked."""
NOT_SIGNED = "did not sign its result of step 0 of stage"


def proof(
    peer: PeerId, stage: Stage, *, norm: float = 1.0, t: int = 0, round: str = "r", by: str = "",
    generation: Generation = GENERATION, steps: int = 0, digest: str = "d",
) -> Proof:  # fmt: skip
    voucher = record(peer, steps=steps).voucher if steps else None
    said = report(0, StepReport(t=t, prepared=Prepared(round, norm, digest)))
    said = msgspec.structs.replace(said, stage=stage, generation=generation)
    (step,) = signed_report(said, SimSigner(by or peer), voucher).steps
    assert step.prepared is not None
    return Proof(peer, step.prepared)


def commit(*stages: Sequence[Proof], total: float | None = None) -> Commit:
    norms = sum(proofs[0].prepared.sqnorm for proofs in stages if proofs)
    return Commit(0, norms if total is None else total, tuple(map(tuple, stages)))


def belief(*records: PeerRecord) -> Belief:
    this = Belief(RUN, 1, SimSigner("ann"))
    this.observe({s: [r for r in records if r.stage == s] for s in (0, 1)}, 0)
    return this


def lacking(said: Commit, *records: PeerRecord, mine: Prepared | None = None) -> tuple[PeerId, ...] | None:
    """Whose word a commit lacks; None: it is false."""
    this = belief(*(records or THERE))
    believed = this.commit(said, GENERATION, mine)
    return this.lacking.get(0) if this.lacking else () if believed else None


ZOE, ANN, BOB = proof("zoe", 0), proof("ann", 1), proof("bob", 1)


def test_the_word_of_two_peers_of_each_stage_proves_a_commit_or_of_the_only_one() -> None:
    assert lacking(commit([ZOE], [ANN, BOB])) == ()
    assert lacking(commit([ZOE], [BOB])) == (), "ann is this replica"
    assert lacking(commit([ZOE], [BOB]), *THERE, record("dan", steps=40)) == ("dan",)
    assert lacking(commit([ZOE], [ANN]), *THERE[:2]) == ()
    assert lacking(commit([ZOE], [ANN]), *THERE[:2], record("cid")) == (), "cid has no voice"


def test_one_with_voice_that_leaves_needs_no_more_words_than_one_that_serves() -> None:
    """It waits for the step that its sum is in; no proof has words of strangers. All stood still for 25 s."""
    strangers, leaving = [record("cid"), record("eve")], msgspec.structs.replace(THERE[2], state="leaving")
    assert lacking(commit([ZOE], [BOB]), THERE[0], THERE[2], *strangers) == ()
    assert lacking(commit([ZOE], [BOB]), THERE[0], leaving, *strangers) == ()
    assert lacking(commit([ZOE], [BOB]), THERE[0], leaving, *strangers, record("dan", steps=40)) == ("dan",)
    assert lacking(commit([ZOE], [proof("cid", 1)]), THERE[0], leaving, *strangers) == ("eve",)


def test_those_that_two_steps_were_done_without_are_asked_at_once_in_the_next() -> None:
    """While one of two rested each step took a second, since they were asked once in that time."""
    this = belief(*THERE, record("dan", steps=40))

    def asks_at_once(t: int) -> bool:
        this.lacking = {t: ("dan",)}
        return this.goes_without_again()

    for t in (4, 5):
        assert not asks_at_once(t), "one that was a moment behind is not done without at once"
        this.excuse(t, ["dan"], set(), set())
    assert asks_at_once(6)
    this.excuse(6, [], set(), {"dan"})
    assert not asks_at_once(6), "it was asked, and has something of this step"
    assert not asks_at_once(7)


def test_one_takes_no_step_alone_while_two_others_could_take_part_in_it() -> None:
    """A coordinator that had all others retract what they had took the step, and kept the weights."""
    away = [record("dan", steps=40), record("eve", steps=40)]
    this, alone = belief(*THERE, *away), commit([ZOE], [BOB])
    this.excuse(0, ["dan", "eve"], {"dan"}, set())
    assert this.commit(alone, GENERATION, None), "one that says it has nothing holds no step up"
    this.excuse(0, ["dan", "eve"], {"dan", "eve"}, set())
    assert not this.commit(alone, GENERATION, None) and this.lacking[0] == ("dan", "eve")
    this.excuse(0, ["eve"], set(), {"dan"})
    assert not this.commit(alone, GENERATION, None) and this.lacking[0] == ("dan",)
    this.excuse(0, ["dan", "eve"], set(), set())
    assert this.commit(alone, GENERATION, None)
    for asked in ("dan", "eve"):  # an earlier result had the word of one of them
        this.excuse(0, [asked], {asked}, set())
    assert not this.commit(alone, GENERATION, None), "it stands without the word of either"


STRANGER, YAN = [record("zoe"), *THERE[1:]], record("yan", 0, steps=40)
"""Stage 0 without voice; and a peer with voice that comes to it."""


@pytest.mark.parametrize(
    ("serving", "believed"),
    [
        ({0: False, 1: False}, True),
        ({0: False, 1: True}, False),
        ({0: True, 1: False}, False),
        ({0: False}, False),
    ],
    ids=["came later", "was there", "was there in the step before", "there is no result here"],
)
def test_who_came_to_a_stage_once_there_was_a_result_holds_its_step_up_no_more(
    serving: dict[int, bool], believed: bool
) -> None:
    """The run stood still for ever, or went back: nothing that was done without yan was proven."""
    this = belief(*STRANGER)
    for t, yan in serving.items():
        this.observe({0: [STRANGER[0], *[YAN] * yan], 1: THERE[1:]}, t)
        this.holds([t])
    this.observe({0: [STRANGER[0], YAN], 1: THERE[1:]}, 1)
    said = Commit(1, 2.0, ((proof("zoe", 0, t=1),), (proof("ann", 1, t=1), proof("bob", 1, t=1))))
    assert this.commit(said, GENERATION, None) == believed
    assert not this.commit(said, GENERATION, said.proofs[1][0].prepared, is_told=False)
    this.holds([])
    assert not this.commit(said, GENERATION, None), "begun again: there is no result any more"


def test_one_with_voice_that_perhaps_serves_by_now_is_asked_before_strangers_prove_a_step() -> None:
    """Its record lags: others had seen it, and did not believe the step, which some had taken (seed 630)."""
    mine = ANN.prepared
    strangers = commit([proof("zoe", 0)], [ANN, BOB])
    known = commit([proof("yan", 0), proof("zoe", 0)], [ANN, BOB])
    for state, asked in (("joining", True), ("paused", True), ("leaving", False), ("left", False)):
        this = belief(record("zoe", 0), *THERE[1:], msgspec.structs.replace(YAN, state=state))
        assert this.commit(strangers, GENERATION, mine) and not this.lacking, "some may have taken it"
        assert this.commit(known, GENERATION, mine, is_told=False) and not this.lacking
        assert this.commit(strangers, GENERATION, mine, is_told=False) != asked
        assert this.lacking == ({0: ("yan",)} if asked else {})
        this.excuse(0, ["yan"], set(), set())
        assert this.commit(strangers, GENERATION, mine, is_told=False)
    this = belief(record("zoe", 0), record("eve"), msgspec.structs.replace(THERE[1], state="joining"))
    own = commit([proof("zoe", 0)], [proof("eve", 1)])
    assert this.commit(own, GENERATION, None, is_told=False), "ann is this replica"


def test_no_replica_finds_a_commit_with_a_word_of_its_own_that_it_has_taken_back() -> None:
    """It had begun again for one with voice that came, and yet told another stage: the run went back."""
    said = commit([ZOE], [ANN, BOB])
    for mine, found in ((ANN.prepared, True), (Prepared("s", 1.0, "d"), False), (None, False)):
        assert belief(*THERE).commit(said, GENERATION, mine, is_told=False) == found
        assert belief(*THERE).commit(said, GENERATION, mine), "others have perhaps taken it"
    assert belief(*THERE).commit(commit([ZOE], [BOB]), GENERATION, None, is_told=False), "not its word"


def test_one_with_voice_that_came_late_and_finds_the_same_believes_the_strangers_of_its_stage() -> None:
    """It waited for the word of one with voice: its own."""
    strangers, there = commit([ZOE], [proof("eve", 1)]), [*THERE[:2], record("eve")]
    mine = Prepared("s", 1.0, "d")
    assert not belief(*there).commit(strangers, GENERATION, mine, is_told=False), "no other believes it yet"
    assert lacking(strangers, *there, mine=mine) == ()
    assert lacking(strangers, *there, mine=Prepared("s", 1.0, "e")) is None
    assert lacking(strangers, *there) is None
    assert lacking(strangers, *there, THERE[2], mine=mine) == ("bob",)


def test_a_stranger_believes_a_commit_by_its_own_word_though_it_saw_one_with_voice_that_had_left() -> None:
    """The others had seen that, and took the step; it began again, and the run went back by ten steps."""
    this = Belief(RUN, 1, SimSigner("cid"))
    this.observe({0: THERE[:1], 1: [THERE[1], record("cid")]}, 0)
    this.holds([0])
    own = proof("cid", 1)
    assert this.commit(commit([ZOE], [own]), GENERATION, own.prepared)
    assert not this.commit(commit([ZOE], [own]), GENERATION, own.prepared, is_told=False), "none took it yet"
    assert not this.commit(commit([ZOE], [own]), GENERATION, None), "it has begun again"
    assert not this.commit(commit([ZOE], [proof("eve", 1)]), GENERATION, own.prepared), "not its word"


def test_where_none_has_voice_two_of_all_are_heard() -> None:
    assert lacking(commit([ZOE], [BOB]), record("bob"), record("cid")) == ("cid",)


def test_a_peer_of_which_the_directory_says_nothing_is_heard_by_its_voucher() -> None:
    new = proof("new", 1, steps=30)
    assert lacking(commit([ZOE], [ANN, new])) == ()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (Commit(0, 1.0), "the commit of step 0 has proofs of 0 stages"),
        (commit([ZOE], []), "0 proofs of stage 1 in the commit of step 0"),
        (commit([ZOE], [ANN, ANN]), "2 proofs of stage 1 in the commit of step 0"),
        (commit([ZOE], [ANN, proof("bob", 1, by="liar")]), "peer bob " + NOT_SIGNED + " 1"),
        (commit([ZOE], [ANN, proof("bob", 0)]), "peer bob " + NOT_SIGNED + " 1"),
        (commit([ZOE], [ANN, proof("bob", 1, t=1)]), "peer bob " + NOT_SIGNED + " 1"),
        (commit([ZOE], [ANN, proof("bob", 1, generation=Generation(1))]), "peer bob " + NOT_SIGNED + " 1"),
        (commit([ZOE], [proof("liar", 1), proof("liar2", 1)]), "no peer with voice proves the norm"),
        (commit([ZOE], [ANN, proof("bob", 1, norm=1e30)]), "the proofs of stage 1 .* are not of one result"),
        (commit([ZOE], [ANN, proof("bob", 1, round="s")]), "the proofs of stage 1 .* are not of one result"),
        (commit([ZOE], [ANN, proof("bob", 1, digest="e")]), "the proofs of stage 1 .* are not of one result"),
        (commit([proof("bob", 0)], [ANN, BOB]), "has proofs of one peer twice"),
        (commit([ZOE], [ANN, BOB], total=math.inf), "has the norm inf; its proofs add up to 2.0"),
        (commit([ZOE], [ANN, BOB], total=1e30), r"has the norm 1e\+30; its proofs add up to 2.0"),
    ],
)
def test_what_proves_nothing_is_refused(said: Commit, why: str) -> None:
    assert lacking(said) is None
    with pytest.raises(Refused, match=why):
        this = belief(*THERE)
        this.check_commit(said, GENERATION, None)
        for stage, proofs in enumerate(said.proofs):
            this._silent(proofs, stage, 0)  # type: ignore


def test_two_peers_with_voice_do_not_change_the_norm_of_a_stage_that_knows_better() -> None:
    said = commit([ZOE], [proof("ann", 1, norm=1e30), proof("bob", 1, norm=1e30)])
    assert lacking(said) == ()
    mine = Prepared("r", 1.0, "d")
    assert lacking(said, mine=mine) is None
    with pytest.raises(Refused, match=r"stage 1 has the squared norm 1e\+30; this replica's result has 1.0"):
        belief(*THERE).check_commit(said, GENERATION, mine)
    assert lacking(commit([ZOE], [ANN, BOB]), mine=Prepared("r", math.nextafter(1.0, 2.0), "d")) is None


# --- a replica ---


def told(*proofs: Proof, norm: float = 1.0) -> tuple[Directive, Step]:
    step = Step(0, Ledger(0, RUN.M))
    step.promise("r", now=NOW)
    step.exchange("r")
    step.complete()
    step.prepare(Prepared("r", norm, "d"))
    said = commit([ZOE], proofs)
    directive = Directive(run=RUN.id, stage=1, coordinator="ann", number=1, version=0, commits=(said,))
    return directive, step


def actions_of(directive: Directive, step: Step, *, excused: Sequence[PeerId] = ()) -> list[object]:
    """What bob does about a directive of ann."""
    records = [
        record("zoe", 0, steps=40),
        record("ann", steps=60),
        record("bob", steps=40),
        record("cid", steps=40),
    ]
    this = protocol_of("bob", *records)
    local = Local(generation=GENERATION, version=0, steps={0: step}, commits={})
    this.observe(local, {s: [r for r in records if r.stage == s] for s in (0, 1)}, now=NOW)
    this.belief.excuse(0, excused, set(), set())
    this.hear_directive("ann", directive, now=NOW)
    return list(this.ready(now=NOW).actions)


def test_a_replica_takes_a_step_that_is_proven() -> None:
    directive, step = told(ANN, BOB)
    assert actions_of(directive, step) == [ApplyStep(directive.commits[0])]


def test_a_replica_asks_those_whose_word_is_lacking_and_does_without_them_if_they_are_away() -> None:
    directive, step = told(ANN)
    assert actions_of(directive, step) == [AskAbsent(0, ("cid",))]
    assert actions_of(directive, step, excused=["cid"]) == [ApplyStep(directive.commits[0])]


@pytest.mark.parametrize("t", [1, 40])
def test_no_words_are_asked_for_on_a_commit_of_a_step_that_is_far_off(t: int) -> None:
    """While nobody has voice an identity in each stage signs one, and each peer asked all others about it."""
    crowd = [record("zoe", 0), record("yan", 0), *(record(name) for name in ("ann", "bob", "cid"))]
    this = protocol_of("bob", *crowd)
    for coordinator in (False, True):
        this.belief.lacking.clear()
        made_up = Commit(t, 2.0, ((proof("yan", 0, t=t),), (proof("cid", 1, t=t),)))
        if coordinator:
            said = msgspec.structs.replace(report(), commits=(made_up,))
            tell(this, "cid", said)
        else:
            directive, _ = told(ANN, BOB)
            this.hear_directive("ann", msgspec.structs.replace(directive, commits=(made_up,)), now=NOW)
        assert not [act for act in this.ready(now=NOW).actions if isinstance(act, AskAbsent)]


@pytest.mark.parametrize(
    ("signer", "others", "version"),
    [("bob", 1, 8), ("liz", 1, 0), ("bob", 2, 0)],
    ids=["two", "false", "three"],
)
def test_who_is_back_in_the_only_stage_learns_from_the_other_one_how_far_the_run_is(
    signer: PeerId, others: int, version: int
) -> None:
    """It coordinated by its older record, and took a trainer's word only: 12 s later, or never after the
    last step. Of three a liar would have the others excused, as they are not that far.
    """
    run = replace(audit_run(stages=1, steps=80, microbatches_per_step=4), admission=RUN.admission)
    local = Local(generation=GENERATION, version=0, steps={}, commits={})
    there = [msgspec.structs.replace(record(p, 0, since=2.0), run=run.id) for p in ("ann", "bob", "cid")]
    this = StepProtocol(run, 0, "ann", 8, local, Backoff(), SimSigner("ann"), since_s=1.0)
    this.observe(local, {0: there[: 1 + others]}, now=NOW)
    step = report(7, StepReport(t=7, prepared=Prepared("r", 1.0, "d")))
    step = signed_report(msgspec.structs.replace(step, run=run.id, stage=0), SimSigner(signer), None)
    prepared = step.steps[0].prepared
    assert prepared is not None
    led_there = Commit(7, 1.0, ((Proof("bob", prepared),),))
    said = msgspec.structs.replace(report(8), run=run.id, stage=0, commits=(led_there,))
    this.belief.excuse(7, ["cid"], set(), set())
    assert this.report("bob", said, [], now=NOW).version == version


@pytest.mark.parametrize("norm", [math.inf, 1e30])
def test_no_peer_ends_or_shrinks_a_step_by_its_word_alone(norm: float) -> None:
    directive, step = told(proof("ann", 1, norm=norm))
    assert actions_of(directive, step, excused=["cid"]) == []
    directive, step = told(ANN, BOB)
    forged = msgspec.structs.replace(directive, commits=(Commit(0, norm, directive.commits[0].proofs),))
    assert actions_of(forged, step) == []


def test_who_coordinates_the_run_takes_nobodys_voice_by_saying_that_it_is_far_ahead() -> None:
    """All vouchers had run out by then, and the word of any two made-up names proved a commit."""
    records = [record("zoe", 0, steps=40), *(record(name, steps=40) for name in ("ann", "bob", "cid"))]
    this, by_stage = protocol_of("bob", *records), {s: [r for r in records if r.stage == s] for s in (0, 1)}
    _, step = told(ANN)
    local = Local(generation=GENERATION, version=0, steps={0: step}, commits={})
    made_up = commit([proof("x", 0, norm=1e30), proof("y", 0, norm=1e30)], [proof("v", 1), proof("w", 1)])
    status = RunStatus(run=RUN.id, version=1000, commits=(made_up,), run_coordinator="zoe")
    for _ in range(2):
        this.hear_run_status("zoe", status, now=NOW)
        this.observe(local, by_stage, now=NOW)
        assert this.run_status.commits == status.commits
        assert set(this.belief.voice(1)) == {"ann", "bob", "cid"}
        assert not this.believes(made_up, GENERATION) and not this._agreed.commits


@pytest.mark.parametrize(("there", "borne_out"), [((0, 0), 0), ((0, 7), 7), ((0, 60), 60)])
def test_the_run_is_no_further_than_most_of_a_stage_bear_out(there: tuple[int, int], borne_out: int) -> None:
    """One that coordinated it said it was, stages took themselves for lost, and it went back to its start."""
    records = [msgspec.structs.replace(record("zoe", 0, steps=60), version=60)]
    for peer, version in zip("xy", there, strict=True):
        records.append(msgspec.structs.replace(record(peer, 0, steps=40), version=version))
    records += [record("ann", steps=40), record("bob", steps=40)]
    this, replica = protocol_of("bob", *records), protocol_of("x", *records, stage=0)
    this._moved_s = replica._moved_s = NOW  # they have just taken a step
    status, late = RunStatus(run=RUN.id, version=60, run_coordinator="zoe"), NOW + UNBORNE_S
    for now, version in ((NOW, borne_out), (late, 60)):
        this.hear_run_status("zoe", status, now=now)
        assert this.run_status.run_coordinator == "zoe" and this.run_status.version == version
    told = RunStatus(run=RUN.id, version=60, generation=Generation(1, 60, 1, 60), run_coordinator="zoe")
    for status, version in (
        (msgspec.structs.replace(told, generation=GENERATION), borne_out),
        (told, borne_out),
    ):
        said = Directive(run=RUN.id, stage=0, coordinator="zoe", version=0, run_status=status)
        replica.directive_came(said, now=NOW)
        assert (replica.run_status.version, replica.run_status.generation) == (version, GENERATION)


@pytest.mark.parametrize("borne_out", [False, True])
def test_of_two_stages_one_that_coordinates_says_not_alone_that_the_run_is_further(borne_out: bool) -> None:
    """Of two it is half of the stages: who coordinated the run took its own stage for lost."""
    version = 60 if borne_out else 0
    first = [record("ann", 0, steps=60), record("bob", 0, steps=40)]
    second = [record("zoe", steps=60), record("x", steps=40), record("y", steps=40)]
    second = [msgspec.structs.replace(one, version=version) for one in second]
    this = protocol_of("ann", *first, *second, stage=0)
    this._moved_s = NOW  # it has just taken a step
    local = Local(generation=GENERATION, version=0, steps={}, commits={})
    for seconds in range(10):
        this.observe(local, {0: first, 1: second}, now=NOW + seconds)
        said = StageSummary(run=RUN.id, stage=1, version=60, members=3, number=seconds)
        assert this.summary("zoe", said, now=NOW + seconds).version == version
        this.speak(now=NOW + seconds)
    assert (RestoreStage() in this.ready(now=NOW + 9).actions) == borne_out
    assert (this.stuck_s(now=NOW + 9) > 0) == borne_out


@pytest.mark.parametrize("moved", [False, True])
def test_one_stage_alone_says_how_far_the_run_is_to_those_that_came_just_then(moved: bool) -> None:
    """Strangers of two of three stages took a step as the first with voice came, which believe none of
    them; the third had voice, and could not go back.
    """
    run = replace(audit_run(stages=3, steps=80, microbatches_per_step=4), admission=RUN.admission)
    local = Local(generation=GENERATION, version=0, steps={}, commits={})
    there = dict[Stage, list[PeerRecord]]()
    for stage, peer in enumerate(("ann", "bob", "cid")):
        voucher = vouch(SimSigner(TRAINER), run.id, Worked(peer, 40, 0, 40))
        new = msgspec.structs.replace(record(peer, stage), run=run.id, voucher=voucher, version=stage // 2)
        there[stage] = [new]
    this = StepProtocol(run, 0, "ann", 8, local, Backoff(), SimSigner("ann"), since_s=2.0)
    for seconds in range(60):
        this.observe(local, there, now=NOW + seconds)
        if moved:
            this._moved_s = NOW
        for stage, peer in ((1, "bob"), (2, "cid")):
            said = StageSummary(run=run.id, stage=stage, version=stage // 2, members=1, number=seconds)
            this.summary(peer, said, now=NOW + seconds)
        this.speak(now=NOW + seconds)
        if seconds < 10:
            assert this.run_status.version == 0
    assert this.run_status.version == (0 if moved else 1)
    assert (RestoreStage() in this.ready(now=NOW + 60).actions) != moved


@pytest.mark.parametrize("proven", [False, True])
def test_a_proven_commit_bears_out_that_the_run_is_a_step_further(proven: bool) -> None:
    """Records say it some seconds later."""
    records = [record("zoe", 0, steps=60), *(record(name, steps=40) for name in ("ann", "bob", "cid"))]
    this, said = protocol_of("bob", *records), [proof("ann", 1), *[proof("cid", 1)] * proven]
    this._moved_s = NOW
    status = RunStatus(
        run=RUN.id, version=1, commits=(commit([proof("zoe", 0)], said),), run_coordinator="zoe"
    )
    this.hear_run_status("zoe", status, now=NOW)
    assert this.run_status.version == (1 if proven else 0)


def test_no_run_is_before_the_start_of_the_generation_that_it_is_in() -> None:
    """While none had that version yet, all said of the run what trainers refuse as impossible."""
    records = [record("zoe", 0, steps=60), record("ann", steps=40), record("bob", steps=40)]
    this, later = protocol_of("bob", *records), Generation(1, 5, 1, 9)
    this._enter(later, NOW)
    this._moved_s = NOW
    for version, borne_out in ((5, 5), (6, 5)):
        status = RunStatus(run=RUN.id, generation=later, version=version, run_coordinator="zoe")
        this.hear_run_status("zoe", status, now=NOW)
        assert this.run_status.position == Position(later, borne_out)


def test_a_stage_is_not_lost_on_the_word_of_the_one_that_coordinated_it_last() -> None:
    """It said that the stage is behind for an hour, and the next one had the run go back at once."""
    records = [record("zoe", 0, steps=40), record("ann", steps=60), record("bob", steps=40)]
    this, by_stage = protocol_of("bob", *records), {0: records[:1], 1: records[2:]}
    said = Directive(run=RUN.id, stage=1, coordinator="ann", version=0, behind_s=3600)
    this.hear_directive("ann", said, now=NOW)
    local, later = Local(generation=GENERATION, version=0, steps={}, commits={}), NOW + 5.0
    assert this.stuck_s(now=NOW) == 3600.0
    for _ in range(2):
        this.observe(local, by_stage, now=later)
        assert this.coordinates(1, now=later) and RestoreStage() not in this.ready(now=later).actions
        this.speak(now=later)
        assert this.stuck_s(now=later) == 0.0


@pytest.mark.parametrize("is_told", [False, True])
def test_the_first_voucher_of_one_of_two_that_prove_a_commit_is_nobodys_voice_yet(is_told: bool) -> None:
    """Its word alone counted, that of a third was lacking for ever, and each step took minutes."""
    new = vouch(SimSigner(TRAINER), RUN.id, Worked("bob", 40, 0))
    bob, held = record("bob"), proof("bob", 1, steps=40)
    bob = msgspec.structs.replace(bob, voucher=new)
    held = Proof("bob", msgspec.structs.replace(held.prepared, voucher=new))
    this = belief(record("zoe", 0), record("ann"), bob, record("cid"), record("dan"))
    assert not this.voice(1)
    assert this.commit(commit([proof("zoe", 0)], [held, proof("cid", 1)]), GENERATION, None, is_told=is_told)
    assert not this.lacking


def test_who_had_nothing_of_a_step_is_asked_again_once_there_is_a_result() -> None:
    """At its beginning all have nothing, and a commit was believed on the word of one that made it up."""
    for norm, acts in ((1.0, [AskAbsent(0, ("cid",))]), (1e30, [])):
        records = [record("zoe", 0, steps=40), *(record(name, steps=40) for name in ("ann", "bob", "cid"))]
        this, (directive, step) = protocol_of("bob", *records), told(proof("ann", 1, norm=norm))
        local = Local(generation=GENERATION, version=0, steps={0: Step(0, Ledger(0, RUN.M))}, commits={})
        this.belief.excuse(0, ["cid"], set(), set())
        for at, acted in ((local, []), (local._replace(steps={0: step}), acts)):
            this.observe(at, {s: [r for r in records if r.stage == s] for s in (0, 1)}, now=NOW)
            this.hear_directive("ann", directive, now=NOW)
            assert list(this.ready(now=NOW).actions) == acted


def test_a_coordinator_refuses_a_result_that_its_sender_did_not_sign() -> None:
    this = protocol_of("ann", record("ann", steps=60), record("bob", steps=40))
    held = report(0, StepReport(t=0, prepared=Prepared("r", 1.0, "d")))
    with pytest.raises(Refused, match="peer bob did not sign its result of step 0 of stage 1"):
        this.report("bob", held, [], now=NOW)
    tell(this, "bob", held)


def test_a_run_that_names_no_trainers_signs_nothing() -> None:
    assert belief().needs_proof
    from tests.protocol.test_coordinating import RUN as CLOSED

    assert not Belief(CLOSED, 1, SimSigner("ann")).needs_proof


def test_a_report_leaves_out_the_commits_that_its_coordinator_knows() -> None:
    local = Local(generation=GENERATION, version=3, steps={}, commits={t: Commit(t, 1.0) for t in range(3)})
    assert [c.t for c in report_of(RUN.id, 1, local).commits] == [0, 1, 2]
    assert [c.t for c in report_of(RUN.id, 1, local, since=2).commits] == [2]
    assert TRAINER in RUN.admission.trainers


# --- a result that others found ---


def fetches(
    *proofs: Proof,
    round: str = "r",
    gave_all: str = "",
    run: Run = CHECKED,
    excused: Sequence[PeerId] = (),
    bobs: int = 40,
    cids: int = 40,
) -> bool:
    """Whether bob fetches a result that ann tells of."""
    records = [record("ann", steps=60), record("bob", steps=bobs), record("cid", steps=cids)]
    this = protocol_of("bob", *records)
    this._run = run
    step = Step(0, Ledger(0, RUN.M))
    step.give_all(gave_all)
    this.belief.excuse(0, excused, set(), set())
    local = Local(generation=GENERATION, version=0, steps={0: step}, commits={})
    this.observe(local, {1: records}, now=NOW)
    fetch = FetchResult(round, ("ann",), ready=False, sqnorm=1.0, proofs=proofs)
    this.directive_came(ann_says(StepDirective(t=0, fetch=fetch)), now=NOW)
    return any(isinstance(action, Fetch) for action in this.ready(now=NOW).actions)


def ann_says(step: StepDirective) -> Directive:
    return Directive(run=RUN.id, stage=1, coordinator="ann", number=1, version=0, steps=(step,))


def test_a_result_of_a_round_that_never_was_is_not_fetched_on_one_word() -> None:
    assert not fetches()
    assert not fetches(ANN)
    assert not fetches(ANN, proof("liar", 1))
    assert not fetches(ANN, proof("cid", 1, by="ann"))
    assert not fetches(proof("ann", 1, round="s"), proof("cid", 1, round="s"))
    assert fetches(ANN, proof("cid", 1))


def test_a_result_is_fetched_on_the_word_of_one_only_where_no_other_has_voice() -> None:
    """Else one with voice chose the gradient of its stage: at the beginning of a step all others have nothing
    of it.
    """
    assert not fetches(ANN, excused=["bob", "cid"])
    assert not fetches(ANN, bobs=0)
    assert not fetches(ANN, cids=0)
    assert fetches(ANN, bobs=0, cids=0)


def test_of_a_round_to_which_a_replica_gave_all_it_finishes_the_result_of_one() -> None:
    assert fetches(ANN, gave_all="r")
    assert not fetches(ANN, gave_all="s")
    assert not fetches(ANN, gave_all="r", run=RUN), "of a run whose sums are not checked"


def test_a_result_is_fetched_from_those_that_say_the_same_of_it_and_is_that() -> None:
    assert not fetches(ANN, proof("cid", 1, digest="e"))
    fetch = FetchResult("r", ("ann", "cid"), ready=False, sqnorm=1.0, proofs=(ANN, proof("cid", 1)))
    local = Local(GENERATION, 0, {0: Step(0, Ledger(0, RUN.M))}, {})
    directive = ann_says(StepDirective(t=0, fetch=fetch))
    assert follow("bob", local, directive, {}, now=NOW) == [Fetch(0, "r", ("ann", "cid"), digest="d")]


def test_a_gradient_is_taken_with_the_commit_that_is_about_it() -> None:
    said = commit([ZOE], [ANN, BOB])
    assert proves(said, 1, Prepared("r", 1.0, "d")) and not proves(said, 1, Prepared("r", 1.0, "e"))
    assert proves(Commit(0, 2.0), 1, Prepared("r", 1.0, "e"))
