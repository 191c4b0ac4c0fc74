"""What no honest replica or coordinator says, and what is forgotten of those who say nothing any more."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from msgspec.structs import replace

from peers.sim.network import SimSigner
from swarm.errors import Leaving, NotNow, Refused
from swarm.ids import Generation
from swarm.manifest import audit_run
from swarm.policy.backoff import Backoff
from swarm.protocol.coordinator import Agreed, RunCoordinator, StageCoordinator, Summarized
from swarm.protocol.coordinator import Member as Reported
from swarm.protocol.ledger import Bitmap
from swarm.protocol.messages import (
    MAX_LEFT_OUT,
    MAX_STEPS,
    Directive,
    ReplicaReport,
    RunStatus,
    StageSummary,
    StepDirective,
    check_report,
    check_summary,
)
from swarm.protocol.protocol import GONE_AFTER_S, StepProtocol
from swarm.protocol.replica import Local
from swarm.protocol.rounds import (
    MAX_NAME,
    MAX_SOURCES,
    Commit,
    FetchResult,
    Plan,
    Prepared,
    StepReport,
    StepSummary,
)
from swarm.records import PeerRecord
from swarm.wire.messages import hear, pack

RUN = audit_run(stages=2, steps=8, microbatches_per_step=4)
NAN = float("nan")
BEYOND = Bitmap(1 << RUN.M)
NOW = 100.0


def report(**changes: Any) -> ReplicaReport:
    return ReplicaReport(**{"run": RUN.id, "stage": 0, "version": 0, **changes})


def summary(**changes: Any) -> StageSummary:
    return StageSummary(**{"run": RUN.id, "stage": 1, "version": 0, "members": 1, **changes})


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"version": 9}, "of version 9 of a run of 8 steps"),
    ({"version": -1}, "of version -1 of a run of 8 steps"),
    ({"version": 1, "generation": Generation(1, 2)}, "in a generation that starts at version 2"),
    ({"generation": Generation(-1, 0)}, "an impossible generation"),
    ({"generation": Generation(1, 9)}, "an impossible generation"),
    ({"commits": (Commit(8, 1.0),)}, "a commit for step 8 of a run of 8 steps"),
    ({"commits": (Commit(-1, 1.0),)}, "a commit for step -1 of a run of 8 steps"),
    ({"commits": (Commit(0, NAN),)}, "an impossible squared norm, nan"),
]


@pytest.mark.parametrize(("changes", "text"), WRONG)
def test_what_cannot_be_true_of_a_replica_or_a_stage_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(Refused, match=text):
        check_report(report(**changes), RUN)
    with pytest.raises(Refused, match=text):
        check_summary(summary(**changes), RUN)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        ({"done": BEYOND}, "a microbatch beyond 3"),
        ({"in_progress": BEYOND}, "a microbatch beyond 3"),
        ({"prepared": Prepared("r", NAN, "")}, "an impossible squared norm, nan"),
        ({"prepared": Prepared("r", -1.0, "")}, "an impossible squared norm, -1.0"),
        ({"t": 8}, r"\[8\] are not open steps"),
    ],
)
def test_what_cannot_be_true_of_a_replicas_step_is_refused(step: dict[str, Any], text: str) -> None:
    with pytest.raises(Refused, match=text):
        check_report(report(steps=(StepReport(**{"t": 0, **step}),)), RUN)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        ({"unclaimed": BEYOND}, "a microbatch beyond 3"),
        ({"sqnorm": NAN}, "an impossible squared norm, nan"),
        ({"t": -1}, r"\[-1\] are not open steps"),
    ],
)
def test_what_cannot_be_true_of_a_stages_step_is_refused(step: dict[str, Any], text: str) -> None:
    said = StepSummary(**{"t": 0, "ready": False, "sqnorm": 0.0, **step})
    with pytest.raises(Refused, match=text):
        check_summary(summary(steps=(said,)), RUN)


def test_no_more_steps_are_reported_than_can_be_open() -> None:
    steps = tuple(StepReport(t=t) for t in range(MAX_STEPS + 1))
    check_report(report(steps=steps[:-1]), RUN)
    with pytest.raises(Refused, match="are not open steps"):
        check_report(report(steps=steps), RUN)


def test_no_name_of_a_round_or_digest_is_longer_than_an_honest_one() -> None:
    """They are passed on to all replicas, in one message."""
    for names in range(2):
        name = "r" * (MAX_NAME + names)
        steps: list[dict[str, Any]] = [
            {"prepared": Prepared(*at)} for at in ((name, 1.0, ""), ("r", 1.0, name))
        ]
        steps += [{key: name} for key in ("frozen_for", "failed_round", "gave_all")]
        reports = [report(steps=(StepReport(**{"t": 0, **step}),)) for step in steps]
        plan = StepDirective(t=0, plan=Plan(name, 0, (), (), ()))
        told = Directive(run=RUN.id, stage=1, coordinator="a", version=0, steps=(plan,))
        for message in (*reports, report(digest=name), report(kind=name), told):
            with pytest.raises(Refused) if names else nullcontext():
                assert hear(pack(message), (), type(message)) == message


def test_no_message_names_more_commits_and_sources_than_an_honest_one() -> None:
    """Each source of a directive is asked where it is, each commit is checked: a body of 1 MB had 20,000."""
    commits = tuple(Commit(t, 1.0) for t in range(MAX_STEPS + 1))
    sources = ("p",) * (MAX_SOURCES + 1)
    fetch = StepDirective(t=0, fetch=FetchResult("r", sources, False, 1.0))
    told = Directive(run=RUN.id, stage=1, coordinator="a", version=0)
    named = {
        "commits": commits,
        "sources": sources,
        "left_out": sources[: MAX_LEFT_OUT + 1],
        "steps": (fetch,),
    }
    for name, value in named.items():
        with pytest.raises(Refused):
            hear(pack(replace(told, **{name: value})), (), Directive)
    for message in (report(commits=commits), summary(commits=commits), RunStatus(commits=commits)):
        with pytest.raises(Refused):
            hear(pack(message), (), type(message))


def protocol(*, joined: bool = True, leaving: bool = False) -> StepProtocol:
    """Of `me`, the first of stage 0, which so coordinates the run."""
    local = Local(generation=Generation(), version=0, steps={}, commits={}, joined=joined, leaving=leaving)
    this = StepProtocol(RUN, 0, "me", 8, local, Backoff(), SimSigner("me"), since_s=1.0)
    there = [PeerRecord(peer="other", run=RUN.id, stage=1, state="serving", version=0, since=2.0)]
    this.observe(local, {0: (), 1: there}, now=NOW)
    return this


def test_a_stage_that_is_silent_is_no_part_of_what_the_run_is_said_to_be() -> None:
    this, late = protocol(), NOW + 2 * GONE_AFTER_S
    this.speak(now=NOW)
    assert this.summary("other", summary(), now=NOW).held_by_all == 0
    this.speak(now=late)
    assert this.run_status.held_by_all == -1
    assert this.summary("other", summary(), now=late).held_by_all == 0


def test_who_has_not_joined_or_leaves_takes_no_reports() -> None:
    protocol().may_report(report())
    with pytest.raises(NotNow, match="has not joined yet"):
        protocol(joined=False).may_report(report())
    with pytest.raises(Leaving, match="let another coordinate the stage"):
        protocol(leaving=True).may_report(report())


def coordinator(*reports: tuple[str, str, str]) -> StageCoordinator:
    """Of replicas at version 1: name, digest, kind of device."""
    this = StageCoordinator(RUN, 0, "a", 8, Agreed(Generation()), Backoff())
    for name, digest, kind in reports:
        this.members[name] = Reported(report(version=1, digest=digest, kind=kind), [], NOW)
    return this


def directed(this: StageCoordinator, peer: str) -> tuple[str, tuple[str, ...]]:
    this.decide(now=NOW)
    told = this.directive_for(peer, commits={}, behind_s=0.0, run_status=RunStatus())
    return told.digest, told.sources


def test_a_state_is_fetched_from_those_who_have_what_most_have() -> None:
    this = coordinator(("a", "x", "cpu"), ("b", "y", "cpu"), ("c", "y", "cpu"))
    assert directed(this, "a") == directed(this, "b") == ("y", ("b", "c"))


def test_devices_of_another_kind_are_not_compared_but_where_the_run_realigns() -> None:
    this = coordinator(("a", "x", "gpu"), ("b", "y", "cpu"), ("c", "y", "cpu"))
    assert directed(this, "a") == ("x", ("a",)) and directed(this, "b") == ("y", ("b", "c"))


@pytest.mark.parametrize(
    ("versions", "taken", "version"),
    [((4, 5, 4), (), 4), ((4, 5, 4), (4,), 5), ((4, 5, 5), (), 5), ((4, 9), (), 9)],
)
def test_one_stage_of_three_says_not_alone_that_the_run_is_further(
    versions: tuple[int, ...], taken: tuple[int, ...], version: int
) -> None:
    """Its coordinator lies, and the others went back to a checkpoint, since their stages seemed lost."""
    agreed = Agreed(Generation())
    agreed.commits.update({t: Commit(t, 1.0) for t in taken})
    this = RunCoordinator(RUN, "me", agreed)
    for stage, at in enumerate(versions):
        this.stages[stage] = Summarized(summary(stage=stage, version=at), "p", NOW)
    local = Local(generation=Generation(), version=4, steps={}, commits={})
    assert this.decide({}, local).version == version


def test_losses_of_steps_that_are_far_off_take_no_place() -> None:
    """A stranger told them while nobody had voice, and the losses of the next 1,000 steps were dropped."""
    this, losses = RunCoordinator(RUN, "me", Agreed(Generation())), {0: 1.0}
    local = Local(generation=Generation(), version=1, steps={}, commits={})
    told = tuple(StepSummary(t=t, loss=2.0) for t in (1, RUN.steps - 1))
    for stage in range(RUN.S):
        this.stages[stage] = Summarized(summary(stage=stage, version=1, steps=told), "p", NOW)
    assert this.decide(losses, local).losses == ((0, 1.0), (1, 2.0))


def test_a_step_is_committed_when_all_stages_have_taken_the_one_before() -> None:
    agreed = Agreed(Generation())
    this = RunCoordinator(RUN, "me", agreed)
    local = Local(generation=Generation(), version=0, steps={}, commits={})

    def ready(stage: int, version: int, *steps: int) -> None:
        told = tuple(StepSummary(t=t, ready=True, sqnorm=1.0) for t in steps)
        this.stages[stage] = Summarized(summary(stage=stage, version=version, steps=told), "p", NOW)

    ready(0, 1, 1)
    ready(1, 0, 0, 1)
    agreed.commits[0] = Commit(0, 2.0)
    this.decide({}, local)
    assert set(agreed.commits) == {0}
    ready(1, 1, 1)
    this.decide({}, local)
    assert agreed.commits[1] == Commit(1, 2.0)
