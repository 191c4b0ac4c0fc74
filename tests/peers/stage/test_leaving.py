"""Who leaves stays until the steps that its sums are part of are taken: nothing is run again for it."""

from __future__ import annotations

import asyncio

import pytest

from peers.clock import now_s
from peers.events import AddedUp, Note, StageLost, Stepped, Trouble
from swarm.manifest import Run, audit_run
from tests.peers.loops import Swarm, swarm

pytestmark = pytest.mark.virtual_time


def a_run(**more: int) -> Run:
    return audit_run(**{"stages": 3, "steps": 2, "microbatches_per_step": 24, **more})


async def half_a_step(built: Swarm, *, of: str, at_least: int = 2) -> None:
    """Stop training when a peer has some microbatches of step 0, and not all are done."""
    peer = built.peers[of]
    replicas = [replica for name, replica in built.live() if replica.stage == peer.stage and name != of]
    room, peer.microbatches.max_inflight = peer.microbatches.max_inflight, 0

    def turn(*_: str) -> None:
        """Its replicas had some; now it gets all. With two in flight, all but two of them were answered."""
        peer.microbatches.max_inflight = room
        for replica in replicas:
            replica.microbatches.max_inflight = 0
        built.on_call("work", lambda *_: trainer.leave(), to=of, nth=at_least + 2)

    for replica in replicas:
        built.on_call("work", turn, to=replica.core.me, nth=2)
    trainer = built.add_trainer("first", window=2)
    await built.tasks["first"]
    built.orders.clear()  # of several replicas one turned; another must not do it in what follows
    for replica in replicas:
        replica.microbatches.max_inflight = room
    await built.until(lambda: not any(peer.microbatches.inflight for _, peer in built.live()))


async def leaves(built: Swarm, name: str) -> None:
    built.peers[name].leave()
    await built.tasks[name]


@pytest.mark.asyncio
@pytest.mark.parametrize("stage", [0, 2])
async def test_who_leaves_stays_until_the_step_that_its_sum_is_part_of_is_taken(stage: int) -> None:
    async with swarm(a_run(microbatches_per_step=12)) as built:
        await built.until_serving()
        name = f"s{stage}p0"  # also the coordinator of its stage
        await half_a_step(built, of=name)
        built.peers[name].leave()
        await asyncio.sleep(2.0)
        assert not built.tasks[name].done()
        built.add_trainer("second")
        await built.tasks[name]
        await built.until_finished()
        built.assert_each_counted_once()
        assert built.replayed == 0
        taken = [e.microbatches for e in built.seen(Stepped) if (e.stage, e.t) == (stage, 0)]
        # It may hear that the others have taken the step, and leave before it takes it itself.
        assert 0 < max(taken) < built.run.M and (len(taken) == 1 or sum(taken) == built.run.M)


@pytest.mark.asyncio
async def test_what_a_round_counted_is_told_before_its_result_can_be_taken() -> None:
    """Who takes it knows no ledgers, and the members may die before they take the step."""
    async with swarm(a_run(), replicas=1) as built:

        def dies(name: str, point: str) -> bool:
            if point == "prepared":
                built.kill(name)
            return point == "prepared"

        built.points.append(dies)
        await built.until_serving()
        built.add_trainer("trainer")
        await built.until(lambda: not built.points)
        assert not built.seen(Stepped)
        told = built.seen(AddedUp)[0]
        assert (told.t, told.missing, told.duplicated) == (0, 0, 0)


@pytest.mark.asyncio
async def test_that_nobody_answers_it_once_is_perhaps_its_own_line() -> None:
    """As when all processes of a machine get SIGTERM, its p2pd as well."""
    async with swarm(a_run(microbatches_per_step=12)) as built:
        await built.until_serving()
        await half_a_step(built, of="s1p0")
        built.network.corrupt_answer("s1p1", "status")
        built.peers["s1p0"].leave()
        await asyncio.sleep(2.0)
        assert not built.tasks["s1p0"].done()
        built.add_trainer("second")
        await built.until_finished()
        built.assert_each_counted_once()
        assert built.replayed == 0


@pytest.mark.asyncio
async def test_what_it_cannot_wait_for_is_run_again() -> None:
    async with swarm(a_run()) as built:
        await built.until_serving()
        await half_a_step(built, of="s1p0")
        lost = built.done("s1p0").bit_count()
        began_s = now_s()
        await leaves(built, "s1p0")
        limit_s = built.peers["s1p0"]._settings.leave_within_s  # type: ignore
        assert limit_s <= now_s() - began_s < limit_s + 1.0
        assert f"run again by others: {lost} microbatches of step 0" in [e.text for e in built.seen(Note)]
        built.add_trainer("second")
        await built.until_finished()
        built.assert_each_counted_once()


@pytest.mark.asyncio
async def test_peers_that_leave_together_do_not_wait_for_what_none_of_them_will_end() -> None:
    async with swarm(a_run()) as built:
        await built.until_serving()
        await half_a_step(built, of="s1p0")
        began_s = now_s()
        for _, peer in built.live():
            peer.leave()
        await asyncio.gather(*(task for name, task in built.tasks.items() if name != "first"))
        assert now_s() - began_s < 5.0


@pytest.mark.asyncio
@pytest.mark.parametrize("replicas", [1, 2])
async def test_the_last_of_a_stage_says_what_is_lost_when_it_leaves(replicas: int) -> None:
    """Its owner read "Thank you", and found the next day that the run had gone back to its start."""
    async with swarm(a_run(steps=9), replicas=replicas) as built:
        await built.until_serving()
        built.add_trainer("trainer")
        await built.until_version(2)
        await leaves(built, "s1p0")
        words = "no other peer serves stage 1: what was done since the last checkpoint is lost"
        assert (words in [event.text for event in built.seen(Trouble)]) == (replicas == 1)


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
async def test_peers_that_leave_and_come_in_the_midst_of_training_lose_nothing(seed: int) -> None:
    run = a_run(stages=2, steps=20, microbatches_per_step=8)
    async with swarm(run) as built:
        await built.until_serving()
        built.add_trainer("trainer", window=4)
        for turn in range(3):
            await built.until_next_step()
            await built.until_serving()  # the one of the turn before: who leaves needs a replica
            await asyncio.sleep(0.003 * ((seed * 7 + turn * 3) % 10))
            stage = (seed + turn) % 2
            name = built.of_stage(stage)[seed % 2]
            built.add_peer(f"late{turn}", stage)
            await leaves(built, name)
        await built.until_finished()
        built.assert_each_counted_once()


@pytest.mark.asyncio
@pytest.mark.slow
async def test_two_that_leave_in_one_moment_do_not_take_the_newest_version_along() -> None:
    """The only replica that stays missed steps: it gets them before they are gone."""
    run = a_run(steps=6)
    async with swarm(run, replicas=0) as built:
        for name, stage in (("a", 0), ("b", 0), ("c", 0), ("d", 1), ("e", 2)):
            built.add_peer(name, stage)
        await built.until_serving()
        built.add_trainer("trainer")
        await built.until_version(2)
        built.network.stop("c")
        await built.tasks["trainer"]
        await built.until(lambda: all(built.peers[name].core.version == run.steps for name in "abde"))
        slow = built.peers["c"]
        assert slow.core.version < run.steps
        slow.core.changing = True  # as when a download takes its time
        built.network.go_on("c")
        for name in "ab":
            built.peers[name].leave()
        gone = {built.tasks["a"], built.tasks["b"]}
        assert not (await asyncio.wait(gone, timeout=1.0))[0]
        slow.core.changing = False
        await asyncio.gather(*gone)
        assert slow.core.version == run.steps
        assert not built.seen(StageLost)


@pytest.mark.asyncio
async def test_the_last_of_a_stage_leaves_once_a_newcomer_has_its_state() -> None:
    """It left at once, and the newcomer took no state of one that leaves: the run went back."""
    run = a_run(steps=6)
    async with swarm(run, replicas=1) as built:
        await built.until_serving()
        built.add_trainer("trainer")
        await built.until_version(2)
        built.add_peer("new", 1)
        await built.until(lambda: "new" in built.network.records)
        assert built.network.records["new"].state == "joining"
        built.network.stop("new")
        built.peers["s1p0"].leave()
        await asyncio.sleep(2.0)
        built.network.go_on("new")
        await built.tasks["trainer"]
        assert built.tasks["s1p0"].done() and not built.seen(StageLost)
        assert built.peers["new"].core.version == run.steps
