"""A peer that is needed elsewhere goes there after a step, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace

import pytest

from peers.events import Moved, Serving
from peers.stage import moving
from swarm.manifest import audit_run
from swarm.policy.rebalance import Move, Moves
from swarm.records import PeerRecord
from swarm.wire.messages import AskStatus, PeerStatus
from tests.peers.loops import Swarm, swarm

pytestmark = pytest.mark.virtual_time


@pytest.fixture
def one_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """From stage 0 to stage 1, if stage 0 has three. The real rule is tested in tests/policy."""

    def rule(records: Iterable[PeerRecord], **_: object) -> Moves:
        there = sorted(r.peer for r in records if r.stage == 0 and r.state == "serving")
        if len(there) < 3:
            return Moves((), "all is well")
        return Moves((Move(there[-1], 0, 1, "stage 1 is slow"),), "stage 1 is slow")

    monkeypatch.setattr(moving, "rebalance", rule)


async def three_and_one(built: Swarm) -> None:
    """Stage 0 has three peers, and stage 1 has one; all may move."""
    for name, stage in (("a", 0), ("b", 0), ("c", 0), ("d", 1)):
        built.add_peer(name, stage, movable=True)
    await built.until_serving()


@pytest.mark.asyncio
async def test_a_peer_moves_in_the_midst_of_training_and_each_counts_once(one_goes: None) -> None:
    run = replace(audit_run(stages=2, steps=400, microbatches_per_step=8), rebalance_every_s=1)
    async with swarm(run, replicas=0) as built:
        await three_and_one(built)
        built.add_trainer("trainer")
        await built.until(lambda: [e.stage for e in built.seen(Serving) if e.peer == "c"] == [0, 1])
        (moved,) = built.seen(Moved)
        assert (moved.stage, moved.to_stage, moved.why) == (0, 1, "stage 1 is slow")
        version = built.peers["c"].core.version
        await built.until_version(min(version + 3, run.steps))
        status = await built.add_stranger().ask("a", "status", AskStatus(run=run.id), PeerStatus)
        assert status.rebalance in ("all is well", "stage 1 is slow")
        for name, _ in built.live():
            version, counts = await built.counted(name)
            assert counts == [version] * run.M
        for _, peer in built.live():
            assert (peer.core.ledger_counts.missing, peer.core.ledger_counts.duplicated) == (0, 0)


@pytest.mark.asyncio
async def test_a_peer_whose_stage_was_chosen_stays(one_goes: None) -> None:
    run = replace(audit_run(stages=2, steps=9, microbatches_per_step=4), rebalance_every_s=1)
    async with swarm(run, replicas=0) as built:
        for name, stage in (("a", 0), ("b", 0), ("c", 0), ("d", 1)):
            built.add_peer(name, stage)
        await built.until_serving()
        await built.until(lambda: built.peers["c"].moving.decided)
        built.add_trainer("trainer")
        await built.until_finished()
        assert not built.seen(Moved)
        built.assert_each_counted_once()


@pytest.mark.asyncio
async def test_the_last_member_stays_though_records_speak_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replicas died a moment ago; their records did not (I6)."""
    asked: list[int] = []

    def rule(records: Iterable[PeerRecord], **_: object) -> Moves:
        asked.append(sum(r.stage == 0 and r.state == "serving" for r in records))
        return Moves((Move("c", 0, 1, "stage 1 is slow"),), "stage 1 is slow")

    run = replace(audit_run(stages=2, steps=9, microbatches_per_step=4), rebalance_every_s=1)
    async with swarm(run, replicas=0) as built:
        await three_and_one(built)
        built.kill("a")
        built.kill("b")
        monkeypatch.setattr(moving, "rebalance", rule)
        stays = "stage 1 is slow; it stays: too few replicas of stage 0 answer"
        await built.until(lambda: built.peers["c"].moving.decided == stays)
        assert asked[-1] == 3
        built.add_trainer("trainer")
        await built.until_finished()
        assert not built.seen(Moved)
        built.assert_each_counted_once()


@pytest.mark.asyncio
async def test_who_goes_too_is_no_replica_to_rely_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are sent off, and the one who was to stay died a moment ago: both stay (I6)."""

    def rule(records: Iterable[PeerRecord], **_: object) -> Moves:
        return Moves(tuple(Move(name, 0, 1, "stage 1 is slow") for name in "bc"), "stage 1 is slow")

    run = replace(audit_run(stages=2, steps=9, microbatches_per_step=4), rebalance_every_s=1)
    async with swarm(run, replicas=0) as built:
        await three_and_one(built)
        built.kill("a")
        monkeypatch.setattr(moving, "rebalance", rule)
        stays = "stage 1 is slow; it stays: too few replicas of stage 0 answer"
        for name in "bc":
            await built.until(lambda name=name: built.peers[name].moving.decided == stays)
        assert not built.seen(Moved)


@pytest.mark.asyncio
async def test_of_two_that_would_leave_each_other_behind_neither_goes() -> None:
    """Each believes that it is the one to go, and asks the other at the same moment (I6)."""
    run = audit_run(stages=2, steps=9, microbatches_per_step=4)
    async with swarm(run, replicas=0) as built:
        await three_and_one(built)
        built.kill("a")
        for name in "bc":
            built.peers[name].moving.going = True
        for name in "bc":
            peer = built.peers[name]
            assert not await peer.core.keep_stage()
        built.peers["c"].moving.going = False
        assert await built.peers["b"].core.keep_stage()


@pytest.mark.asyncio
async def test_a_peer_stays_whose_replicas_die_while_it_waits_for_the_step(one_goes: None) -> None:
    async with swarm(audit_run(stages=2, steps=3, microbatches_per_step=2)) as built:
        await built.until_serving()
        mover = built.peers["s1p0"]
        moving = asyncio.create_task(mover.moving.move(0, why="a test", going=set()))
        await built.until(lambda: built.seen(Moved))
        built.kill("s1p1")
        await moving
        assert mover.moving_to is None and not mover.moving.going
        status = await built.add_stranger().ask("s1p0", "status", AskStatus(run=built.run.id), PeerStatus)
        assert status.rebalance == "a test; it stays: too few replicas of stage 1 answer"
