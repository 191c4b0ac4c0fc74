"""Who coordinates, who is obeyed, and what is remembered of what others say."""

from __future__ import annotations

import msgspec
import pytest

from peers.sim.network import SimSigner
from swarm.errors import NotNow
from swarm.ids import Generation
from swarm.manifest import audit_run
from swarm.policy.backoff import Backoff
from swarm.protocol.coordinator import Agreed
from swarm.protocol.messages import (
    LOSSES_KEPT,
    MAX_STEPS,
    Directive,
    ReplicaReport,
    StageSummary,
    StepDirective,
)
from swarm.protocol.protocol import GONE_AFTER_S, LED_S, StepProtocol
from swarm.protocol.replica import Local
from swarm.protocol.rounds import Commit, Plan
from swarm.records import PeerRecord
from tests.protocol.world import make

RUN = audit_run(stages=2, steps=8, microbatches_per_step=4)
NOW = 100.0


def record(peer: str, stage: int, since: float) -> PeerRecord:
    return PeerRecord(peer=peer, run=RUN.id, stage=stage, state="serving", version=0, since=since)


def protocol_of(
    peer: str, *, joined: bool = True, others: tuple[PeerRecord, ...] = (), since_s: float = 2.0
) -> StepProtocol:
    """Of a replica of stage 1, which came then; `first` serves stage 0."""
    local = Local(generation=Generation(), version=0, steps={}, commits={}, joined=joined)
    protocol = StepProtocol(RUN, 1, peer, 8, local, Backoff(), SimSigner(peer), since_s=since_s)
    protocol.observe(local, {0: [record("first", 0, 1.0)], 1: list(others)}, now=NOW)
    return protocol


def directive(coordinator: str, *, number: int = 1) -> Directive:
    return Directive(run=RUN.id, stage=1, coordinator=coordinator, number=number, version=0)


def members_said(protocol: StepProtocol, *, now: float = NOW) -> int:
    protocol.speak(now=now)
    bodies = [message.body for message in protocol.ready(now=now).messages]
    return [body.members for body in bodies if isinstance(body, StageSummary)][-1]


def test_a_replica_that_says_goodbye_is_a_member_no_more() -> None:
    protocol = protocol_of("b", others=(record("c", 1, 3.0),))
    report = ReplicaReport(run=RUN.id, stage=1, generation=Generation(), version=0)
    protocol.report("c", report, [], now=NOW)
    assert members_said(protocol) == 2
    with pytest.raises(NotNow, match="goodbye"):
        protocol.report("c", msgspec.structs.replace(report, say_leaving=True), [], now=NOW)
    assert members_said(protocol) == 1


def test_a_replica_that_is_silent_is_a_member_no_more() -> None:
    protocol = protocol_of("b", others=(record("c", 1, 3.0),))
    report = ReplicaReport(run=RUN.id, stage=1, generation=Generation(), version=0)
    protocol.report("c", report, [], now=NOW)
    late = NOW + 2 * GONE_AFTER_S
    assert members_said(protocol, now=late) == 1


def test_who_does_not_coordinate_forgets_silent_replicas_as_well() -> None:
    """Each that ever reported to it was kept with its ledgers and losses, up to 1 MB, while others led."""
    protocol = protocol_of("b", others=(record("a", 1, 1.0),))
    report = ReplicaReport(run=RUN.id, stage=1, generation=Generation(), version=0)
    for number in range(9):
        with pytest.raises(NotNow, match="another peer coordinates this stage"):
            protocol.report(f"stranger {number}", report, [], now=NOW)
    for now, members in ((NOW, 9), (NOW + 2 * GONE_AFTER_S, 0)):
        assert not protocol.speak(now=now)
        assert len(protocol._coordinator.members) == members


def test_of_a_silent_replica_an_old_report_is_not_answered() -> None:
    """It was said before others that have come, and ran out with them."""
    protocol = protocol_of("b", others=(record("c", 1, 3.0),))
    report = ReplicaReport(run=RUN.id, stage=1, generation=Generation(), version=0, number=2)
    protocol.report("c", report, [], now=NOW)
    late = NOW + 2 * GONE_AFTER_S
    with pytest.raises(NotNow, match="an old report of a replica that has said nothing since"):
        protocol.report("c", msgspec.structs.replace(report, number=1), [], now=late)


def test_a_replica_that_was_started_again_is_heard_at_once() -> None:
    """Its numbers began anew: what it said was taken for older than what it had said before."""
    others = (record("b", 1, 1.0), record("c", 1, 2.0))
    coordinator = protocol_of("b", others=others)
    for life, since_s in enumerate((2.0, NOW - 1.0)):
        replica = protocol_of("c", others=others, since_s=since_s)
        for _ in range(5 - life):
            replica.speak(now=NOW)
            (message,) = replica.ready(now=NOW).messages
            assert isinstance(message.body, ReplicaReport) and message.to == "b"
            report = msgspec.structs.replace(message.body, bandwidth_bps=float(life))
            coordinator.report("c", report, [], now=NOW)
        assert coordinator._coordinator.members["c"].report == report


def test_a_replica_that_is_far_ahead_of_all_others_is_not_believed() -> None:
    protocol = protocol_of("b", others=(record("c", 1, 3.0),))
    report = ReplicaReport(run=RUN.id, stage=1, generation=Generation(), version=5)
    with pytest.raises(NotNow, match="says that it is at version 5; the run is at 0"):
        protocol.report("c", report, [], now=NOW)


def test_a_newcomer_does_not_coordinate_even_alone() -> None:
    assert protocol_of("b").coordinates(1, now=NOW)
    assert protocol_of("b", joined=False).coordinator(1, now=NOW) is None


def test_a_directive_of_another_than_the_coordinator_is_passed_over() -> None:
    protocol = protocol_of("b", others=(record("a", 1, 1.0), record("c", 1, 3.0)))
    protocol.hear_directive("c", directive("c"), now=NOW)
    protocol.hear_directive("c", directive("a"), now=NOW)
    assert protocol.directive is None
    protocol.hear_directive("a", directive("a"), now=NOW)
    assert protocol.directive == directive("a")


def test_a_directive_that_was_overtaken_is_passed_over() -> None:
    protocol = protocol_of("b", others=(record("a", 1, 1.0),))
    for number in (2, 1):
        protocol.directive_came(directive("a", number=number), now=NOW)
    assert protocol.directive == directive("a", number=2)


def test_what_a_coordinator_says_of_rounds_takes_no_room_but_for_few_of_the_open_steps() -> None:
    """A directive of 1 MB names 16,000 rounds, and those of steps to come were kept until these are over."""
    protocol = protocol_of("b", others=(record("a", 1, 1.0),))
    plans = [Plan(f"{number}", number, (), (), ()) for number in range(8)]
    far = tuple(StepDirective(t=t, plan=plan) for t in (0, 1, 2, 7) for plan in plans)
    for number, steps in enumerate((far, far[::-1], far[3:])):
        said = msgspec.structs.replace(directive("a", number=number), steps=steps)
        protocol.directive_came(said, now=NOW)
    rounds = protocol._coordinator._rounds
    assert set(rounds) <= {0, 1} and sum(map(len, rounds.values())) <= 3 * MAX_STEPS


def test_a_coordinator_that_was_started_again_with_its_clock_put_back_is_followed_soon() -> None:
    """Its numbers begin with the time: for ever they were lower than those of its last life."""
    protocol = protocol_of("b", others=(record("a", 1, 1.0),))
    before, after = 2 * 10**15, 10**15
    for number, at_s, followed in ((before, 0.0, before), (after, 3.0, before), (after, 4.0, after)):
        protocol.directive_came(directive("a", number=number), now=NOW + at_s)
        assert protocol.directive == directive("a", number=followed)


def test_how_long_a_step_has_lasted_counts_from_where_it_begins_again_after_a_rollback() -> None:
    """Else a round of it was said to take as long as all that was lost, and who keeps the others waiting may
    do so for three times as long.
    """
    protocol = protocol_of("b")
    blame = protocol._coordinator.blame
    blame.planned(0, now=NOW)
    again = Local(generation=Generation(1, 0), version=0, steps={}, commits={})
    protocol.observe(again, {0: [record("first", 0, 1.0)]}, now=NOW + 3600.0)
    blame.planned(0, now=NOW + 3600.0)
    assert blame._planned_s == {0: NOW + 3600.0}


def test_a_commit_of_a_step_that_the_stage_has_not_reached_is_not_remembered() -> None:
    protocol = protocol_of("b", others=(record("a", 1, 1.0),))
    said = msgspec.structs.replace(directive("a"), commits=(Commit(0, 1.0), Commit(1, 1.0)))
    protocol.directive_came(said, now=NOW)
    assert protocol._agreed.commits == {0: Commit(0, 1.0)}


def test_commits_of_steps_long_over_are_not_remembered() -> None:
    """While the run stood still, who had kept them could tell all that there ever were."""
    agreed = Agreed(Generation())
    for t in reversed(range(20)):
        agreed.learn([Commit(t, 1.0)])
    assert sorted(agreed.commits) == [15, 16, 17, 18, 19]


def test_a_stage_whose_result_is_gone_learns_from_a_commit_that_the_run_is_past_it() -> None:
    """Who had the result of the last step left, and the rest waited three minutes (seed 9810168)."""
    protocol = protocol_of("b")
    protocol.speak(now=NOW)
    assert protocol.stuck_s(now=NOW) == 0.0
    protocol._agreed.learn([Commit(0, 1.0)])
    protocol.speak(now=NOW)
    assert protocol.stuck_s(now=NOW + 5.0) == 5.0


def test_of_two_replicas_that_report_to_each_other_the_first_one_coordinates() -> None:
    """After late steps each may have another rest: neither coordinated for a minute, and then another one."""
    report = ReplicaReport(run=RUN.id, stage=1, generation=Generation(), version=0)
    first = protocol_of("b", others=(record("c", 1, 3.0),))
    second = protocol_of("c", others=(record("b", 1, 1.0),))
    for now in range(int(NOW - 60.0), int(NOW)):
        first._rotation.waits(now=now)
    assert (first.coordinator(1, now=NOW), second.coordinator(1, now=NOW)) == ("c", "b")
    first.report("c", report, [], now=NOW)
    with pytest.raises(NotNow):
        second.report("b", report, [], now=NOW)
    assert (first.coordinator(1, now=NOW), second.coordinator(1, now=NOW)) == ("b", "b")
    assert first.coordinator(1, now=NOW + 2.0) == "c", "another turn has begun, and it reports no more"


def test_a_replica_does_not_follow_two_coordinators_in_turn() -> None:
    """It reported to both, and each answer undid what the other had begun: hundreds of times a second."""
    protocol = protocol_of("b", others=(record("a", 1, 1.0), record("c", 1, 1.5)))
    for coordinator, now, followed in (
        ("c", NOW, "c"), ("a", NOW, "a"), ("c", NOW + 1.0, "a"),
        ("c", NOW + LED_S, "c"), ("a", NOW + 2.0, "a"),
    ):  # fmt: skip
        protocol.directive_came(directive(coordinator), now=now)
        assert protocol.directive is not None and protocol.directive.coordinator == followed


def test_while_steps_are_late_the_coordinator_that_the_others_follow_may_push() -> None:
    """The one that this replica sees answers with what that one decided. What it did not push was a second
    late in each of the next 20 steps, of which commits were.
    """
    protocol = protocol_of("b", others=(record("a", 1, 1.0), record("c", 1, 3.0)))
    protocol.directive_came(directive("c"), now=NOW)
    protocol.hear_directive("c", directive("c", number=2), now=NOW)
    assert protocol.directive == directive("c")
    protocol._rotation._usual.answered(1.0)
    for second in range(11, -1, -1):
        protocol._rotation.waits(now=NOW - second)
    assert protocol._rotation.late and protocol.coordinator(1, now=NOW) == "a"
    protocol.hear_directive("c", directive("c", number=2), now=NOW)
    assert protocol.directive == directive("c", number=2)
    protocol.hear_directive("d", directive("d", number=2), now=NOW)
    protocol.hear_directive("a", directive("a"), now=NOW)
    protocol.hear_directive("c", directive("c", number=3), now=NOW)
    assert protocol.directive == directive("a")


def test_what_is_known_of_steps_that_are_over_does_not_grow_with_the_run() -> None:
    """The run coordinator kept each commit, a replica the name of each round, the last stage each loss."""
    world = make(stages=2, microbatches=1, steps=100)
    for name, stage in (("ann", 0), ("bob", 0), ("cid", 1), ("dan", 1)):
        world.add(name, stage).protocol._coordinator.losses |= dict.fromkeys(range(-LOSSES_KEPT, 0), 1.0)
    for _ in range(10):
        for name in ("ann", "cid"):
            world.compute(name, [0])
        world.run_for(1.0)
    for replica in world.live():
        protocol = replica.protocol
        assert replica.position.version >= 9
        assert len(protocol._agreed.commits) <= 5 and len(protocol._coordinator._rounds) <= 2
        assert len(protocol._coordinator.losses) <= LOSSES_KEPT + 2
