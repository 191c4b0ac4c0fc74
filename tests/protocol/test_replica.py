"""What a replica does about a directive, and what it says of a step."""

from __future__ import annotations

from swarm.ids import Generation
from swarm.protocol.ledger import Bitmap, Ledger
from swarm.protocol.messages import Directive, StepDirective
from swarm.protocol.replica import (
    Action,
    ApplyStep,
    BeginAllReduce,
    CatchUp,
    Fetch,
    Local,
    Retract,
    Unfreeze,
    follow,
)
from swarm.protocol.rounds import FINISHES_LEAST_S, Commit, FetchResult, Plan, Prepared
from swarm.protocol.step import ReplicaStep

PLAN = Plan("r", 0, ("bob", "me"), (Bitmap(1), Bitmap(2)), (1, 1))
RESULT = StepDirective(t=0, fetch=FetchResult("r", ("bob", "me"), False, 1.0))


def local(step: ReplicaStep) -> Local:
    return Local(generation=Generation(), version=0, steps={0: step}, commits={})


def opened() -> ReplicaStep:
    return ReplicaStep(0, Ledger(0, 2))


def prepared() -> ReplicaStep:
    step = opened()
    step.promise("r", now=0.0)
    step.prepare(Prepared("r", 1.0, ""))
    step.end_round("r", failed=False)
    return step


def told(step: ReplicaStep, *steps: StepDirective, now: float = 0.0, **changes: object) -> list[Action]:
    directive = Directive(run="run", stage=0, coordinator="bob", version=0, steps=steps, **changes)  # type: ignore[arg-type]
    return follow("me", local(step), directive, {c.t: c for c in directive.commits}, now=now)


def test_each_order_is_an_action_of_its_own() -> None:
    step = opened()
    assert told(step) == []
    assert told(step, StepDirective(t=0, plan=PLAN)) == [BeginAllReduce(0, PLAN)]
    assert told(step, StepDirective(t=0, retract=Bitmap(1))) == [Retract(0, 1)]
    assert told(step, RESULT) == [Fetch(0, "r", ("bob",))]
    assert told(prepared(), commits=(Commit(0, 1.0),)) == [ApplyStep(Commit(0, 1.0))]


def test_a_commit_of_a_step_that_is_not_prepared_takes_nothing() -> None:
    assert told(opened(), commits=(Commit(0, 1.0),)) == []
    assert told(prepared(), commits=(Commit(1, 1.0),)) == []
    assert told(prepared(), commits=(Commit(0, 1.0),), generation=Generation(1, 0)) != [
        ApplyStep(Commit(0, 1.0))
    ]


def test_a_round_that_failed_here_or_runs_here_is_not_begun_again() -> None:
    step = opened()
    step.start_round("r", now=0.0)
    assert told(step, StepDirective(t=0, plan=PLAN)) == []
    step.end_round("r", failed=True)
    assert told(step, StepDirective(t=0, plan=PLAN)) == []
    assert told(step, StepDirective(t=0)) == [Unfreeze(0)], "without a plan the sum opens again"


def test_a_prepared_step_is_neither_reduced_again_nor_opened() -> None:
    step = prepared()
    for order in (
        StepDirective(t=0, plan=PLAN),
        StepDirective(t=0),
        StepDirective(t=0, retract=Bitmap(1)),
        RESULT,
    ):
        assert told(step, order) == []
    other = StepDirective(t=0, fetch=FetchResult("s", ("bob",), False, 1.0))
    assert told(step, other) == [Fetch(0, "s", ("bob",))], "the stage chose another round's result"


def test_a_reduce_that_is_about_to_end_is_waited_for_and_no_longer() -> None:
    step = opened()
    step.start_round("r", now=10.0)
    step.exchange("r")
    assert told(step, RESULT, now=10.5) == []
    assert told(step, RESULT, now=10.5 + FINISHES_LEAST_S - 0.1) == []
    assert told(step, RESULT, now=10.5 + FINISHES_LEAST_S) == [Fetch(0, "r", ("bob",))]


def test_what_a_step_completes_itself_no_replica_has() -> None:
    step = opened()
    step.start_round("r", now=0.0)
    step.exchange("r")
    step.complete()
    assert told(step, RESULT, now=1000.0) == []


def test_a_busy_replica_follows_nothing_and_one_that_is_behind_catches_up() -> None:
    step = prepared()
    directive, commits = Directive(run="run", stage=0, coordinator="bob", version=0), {0: Commit(0, 1.0)}
    assert follow("me", local(step)._replace(busy=True), directive, commits, now=0.0) == []
    assert follow("me", local(step), directive, commits, now=0.0) == [ApplyStep(commits[0])]
    ahead = Directive(run="run", stage=0, coordinator="bob", version=1)
    assert follow("me", local(opened()), ahead, {}, now=0.0) == [CatchUp(ahead)]
    other = Directive(run="run", stage=0, coordinator="bob", version=0, digest="x")
    assert follow("me", local(opened())._replace(digest="y"), other, {}, now=0.0) == [CatchUp(other)]
    assert follow("me", local(opened())._replace(digest="x"), other, {}, now=0.0) == []
