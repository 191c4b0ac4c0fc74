"""No single peer's word makes a run take a step (attack 4)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import pytest

from peers.sim.network import SimSigner
from swarm.errors import Refused
from swarm.ids import Generation, PeerId, Stage
from swarm.protocol.ledger import Ledger
from swarm.protocol.messages import Directive
from swarm.protocol.proofs import CommitCheck, signed_report
from swarm.protocol.replica import ApplyStep, AskAbsent, Local, report_of
from swarm.protocol.rounds import Commit, Prepared, Proof, StepReport
from tests.protocol.test_by_voice import NOW, RUN, TRAINER, protocol_of, record, report, tell
from tests.protocol.world import Step

GENERATION = Generation()
THERE = {0: {"zoe": 40}, 1: {"ann": 40, "bob": 40}}
NOT_SIGNED = "did not sign its result of step 0 of stage"


def proof(
    peer: PeerId, stage: Stage, *, norm: float = 1.0, t: int = 0, round: str = "r", by: str = "",
    generation: Generation = GENERATION, steps: int = 0,
) -> Proof:  # fmt: skip
    voucher = record(peer, steps=steps).voucher if steps else None
    said = report(0, StepReport(t=t, prepared=Prepared(round, norm, "d")))
    said = msgspec.structs.replace(said, stage=stage, generation=generation)
    (step,) = signed_report(said, SimSigner(by or peer), voucher).steps
    assert step.prepared is not None
    return Proof(peer, step.prepared)


def commit(*stages: Sequence[Proof], total: float | None = None) -> Commit:
    norms = sum(proofs[0].prepared.sqnorm for proofs in stages if proofs)
    return Commit(0, norms if total is None else total, tuple(map(tuple, stages)))


def lacking(
    said: Commit, *, there: Mapping[Stage, Mapping[PeerId, int]] = THERE, mine: Prepared | None = None
) -> list[PeerId]:
    return CommitCheck(RUN, 1, SimSigner("ann")).lacking(said, GENERATION, there, mine)


ZOE, ANN, BOB = proof("zoe", 0), proof("ann", 1), proof("bob", 1)


def test_the_word_of_two_peers_of_each_stage_proves_a_commit_or_of_the_only_one() -> None:
    assert lacking(commit([ZOE], [ANN, BOB])) == []
    assert lacking(commit([ZOE], [ANN])) == ["bob"]
    assert lacking(commit([ZOE], [ANN]), there={0: {"zoe": 40}, 1: {"ann": 40}}) == []


def test_where_none_has_voice_two_of_all_are_heard() -> None:
    assert lacking(commit([ZOE], [ANN]), there={0: {}, 1: {"ann": 0, "cid": 0}}) == ["cid"]


def test_a_peer_of_which_the_directory_says_nothing_is_heard_by_its_voucher() -> None:
    new = proof("new", 1, steps=30)
    assert lacking(commit([ZOE], [ANN, new])) == []


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
        (commit([ZOE], [ANN, BOB], total=math.inf), "has the norm inf; its proofs add up to 2.0"),
        (commit([ZOE], [ANN, BOB], total=1e30), r"has the norm 1e\+30; its proofs add up to 2.0"),
    ],
)  # fmt: skip
def test_what_proves_nothing_is_refused(said: Commit, why: str) -> None:
    with pytest.raises(Refused, match=why):
        lacking(said)


def test_two_peers_with_voice_do_not_change_the_norm_of_a_stage_that_knows_better() -> None:
    said = commit([ZOE], [proof("ann", 1, norm=1e30), proof("bob", 1, norm=1e30)])
    assert lacking(said) == []
    with pytest.raises(Refused, match=r"stage 1 has the squared norm 1e\+30; this replica's result has 1.0"):
        lacking(said, mine=Prepared("r", 1.0, "d"))
    assert lacking(commit([ZOE], [ANN, BOB]), mine=Prepared("r", 1.0 + 1e-9, "d")) == []


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
    this.excuse(0, excused)
    this.hear_directive("ann", directive, now=NOW)
    return list(this.ready(now=NOW).actions)


def test_a_replica_takes_a_step_that_is_proven() -> None:
    directive, step = told(ANN, BOB)
    assert actions_of(directive, step) == [ApplyStep(directive.commits[0])]


def test_a_replica_asks_those_whose_word_is_lacking_and_does_without_them_if_they_are_away() -> None:
    directive, step = told(ANN)
    assert actions_of(directive, step) == [AskAbsent(0, ("bob", "cid"))]
    assert actions_of(directive, step, excused=["bob"]) == [AskAbsent(0, ("cid",))]
    assert actions_of(directive, step, excused=["bob", "cid"]) == [ApplyStep(directive.commits[0])]


@pytest.mark.parametrize("norm", [math.inf, 1e30])
def test_no_peer_ends_or_shrinks_a_step_by_its_word_alone(norm: float) -> None:
    directive, step = told(proof("ann", 1, norm=norm))
    assert actions_of(directive, step, excused=["cid"]) == []
    directive, step = told(ANN, BOB)
    forged = msgspec.structs.replace(directive, commits=(Commit(0, norm, directive.commits[0].proofs),))
    assert actions_of(forged, step) == []


def test_a_coordinator_refuses_a_result_that_its_sender_did_not_sign() -> None:
    this = protocol_of("ann", record("ann", steps=60), record("bob", steps=40))
    held = report(0, StepReport(t=0, prepared=Prepared("r", 1.0, "d")))
    with pytest.raises(Refused, match="peer bob did not sign its result of step 0 of stage 1"):
        this.report("bob", held, [], now=NOW)
    tell(this, "bob", held)


def test_a_run_that_names_no_trainers_signs_nothing() -> None:
    assert CommitCheck(RUN, 1, SimSigner("ann")).needed
    from tests.protocol.test_coordinating import RUN as CLOSED

    assert not CommitCheck(CLOSED, 1, SimSigner("ann")).needed


def test_a_report_leaves_out_the_commits_that_its_coordinator_knows() -> None:
    local = Local(generation=GENERATION, version=3, steps={}, commits={t: Commit(t, 1.0) for t in range(3)})
    assert [c.t for c in report_of(RUN.id, 1, local).commits] == [0, 1, 2]
    assert [c.t for c in report_of(RUN.id, 1, local, since=2).commits] == [2]
    assert TRAINER in RUN.admission.trainers
