"""Who comes to a run that is under way: what it tells and asks, and that it can leave at any moment."""

from __future__ import annotations

import asyncio

import pytest

from peers.events import Serving, StageLost, StepDone
from peers.sim.directory import SimDirectory
from peers.waiting import within
from swarm.errors import BadAnswer
from swarm.ids import Generation
from swarm.manifest import audit_run
from swarm.protocol.messages import RunStatus
from swarm.wire.messages import Watched
from tests.peers.loops import Swarm, swarm

pytestmark = pytest.mark.virtual_time


async def without_stage_1(s: Swarm) -> None:
    """The run takes two steps; then the only peer of stage 1 dies."""
    s.add_trainer("early")
    await s.until_version(2)
    s.kill("early")
    s.kill("s1p0")


def lost(s: Swarm) -> bool:
    return bool(s.seen(StageLost))


async def test_a_trainer_that_comes_late_tells_only_of_steps_since() -> None:
    async with swarm(audit_run(stages=2, steps=5), stages=2, replicas=1) as s:
        early = s.add_trainer("early")
        await s.until_version(2)
        early.leave()
        await s.tasks["early"]
        first = min(peer.core.version for peer in s.peers.values())
        told = len(s.events)
        s.add_trainer("late")
        await s.until_version(5)
        await s.tasks["late"]
        steps = [event.t for event in s.events[told:] if isinstance(event, StepDone)]
        assert steps in (list(range(first, 5)), list(range(first + 1, 5)))


async def test_a_peer_alone_in_its_stage_does_not_begin_anew_what_others_are_past() -> None:
    async with swarm(audit_run(stages=2, steps=9), stages=2, replicas=1) as s:
        await without_stage_1(s)
        # Records are renewed every few seconds: by them the run would still be at version 0.
        assert {record.version for record in s.network.records.values()} == {0}
        told = len(s.events)
        s.add_peer("newcomer", 1)
        await s.until(lambda: lost(s))
        assert not [event for event in s.events[told:] if isinstance(event, Serving)]


async def test_a_peer_that_waits_for_a_state_that_nobody_has_can_leave() -> None:
    async with swarm(audit_run(stages=2, steps=9), stages=2, replicas=1) as s:
        await without_stage_1(s)
        newcomer = s.add_peer("newcomer", 1)
        await s.until(lambda: lost(s))
        newcomer.leave()
        await within(s.tasks["newcomer"], 30.0)
        record = s.network.records.get("newcomer")
        assert record is None or record.state == "left"


async def test_a_peer_that_is_told_to_leave_before_it_started_does_so() -> None:
    async with swarm(audit_run(stages=1, steps=9), stages=1, replicas=1) as s:
        task, peer = s.tasks["s0p0"], s.peers["s0p0"]
        peer.leave()
        await within(asyncio.shield(task), 30.0)
        assert not [event for event in s.events if isinstance(event, Serving)]


async def test_peers_that_are_all_told_to_leave_do_not_wait_for_one_another() -> None:
    async with swarm(audit_run(stages=3, steps=10_000), stages=3, replicas=2) as s:
        s.add_trainer("trainer", window=8)
        await s.until_version(2)
        for peer in s.peers.values():
            peer.leave()
        for name in s.peers:
            await within(s.tasks[name], 30.0)


async def test_news_that_cannot_be_are_not_believed() -> None:
    async with swarm(audit_run(stages=1, steps=5), stages=1, replicas=1) as s:
        trainer = s.add_trainer("trainer")
        for generation, version, text in (
            (Generation(), 6, "a status of version 6 of a run of 5 steps"),
            (Generation(1, 3), 2, "of version 2 in a generation that starts at version 3"),
            (Generation(1 << 40, 0), 2, "an impossible generation"),
            (Generation(-1, 0), 2, "an impossible generation"),
        ):
            with pytest.raises(BadAnswer, match=text):
                trainer._watch.learn(
                    "liar", Watched(revision=1, generation=generation, version=version, status=RunStatus())
                )
        await s.until_finished()
        s.assert_each_counted_once()


async def test_a_peer_that_callers_know_later_than_their_trainer_gets_work_as_soon_as_they_do() -> None:
    """To its trainer it seems to be one that never answers, which are tried again after half a minute."""
    async with swarm(audit_run(stages=2, steps=1000), stages=2, replicas=2) as s:
        await s.until_serving()
        callers = [s.network.peers[name].directory for name in s.of_stage(0)]
        for one in callers:
            one.at = lambda stage, one=one: SimDirectory.at(one, stage)[: 2 - stage]  # type: ignore[method-assign]
        trainer = s.add_trainer("trainer")
        await s.until_version(3)
        assert trainer._router.knows(1, "s1p0") and not trainer._router.knows(1, "s1p1")
        for one in callers:
            del one.at
        await s.until(lambda: trainer._router.knows(1, "s1p1"), limit_s=10.0)
