"""The owner takes the device back, and gives it again: each microbatch counts once, nothing twice."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from contextlib import suppress
from dataclasses import replace
from itertools import product

import pytest
import torch
from msgspec import structs

from peers.clock import now_s
from peers.events import Note, Paused, RolledBack, StageLost, StateFetched, Stepped, Trouble
from peers.stage.pause import ABSENT
from peers.status_query import ask_status
from swarm.errors import Leaving, SetupError
from swarm.manifest import IslandsSpec, audit_run
from swarm.model.stage import StageCompute
from swarm.wire.messages import AskSaved, Saved, unpack
from tests.peers import loops
from tests.peers.loops import Swarm, swarm
from tests.seeds import cases, seeds, some

pytestmark = pytest.mark.virtual_time


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


async def pause(s: Swarm, name: str) -> Paused:
    """Pause a peer and wait until its device is free."""
    before = len(s.seen(Paused))
    s.owners[name].pause("by hand", "swarm pause")
    await s.until(lambda: s.owners[name].doing == "paused")
    return s.seen(Paused)[before]


async def resume(s: Swarm, name: str) -> None:
    s.owners[name].resume()
    await s.until(lambda: name in s.peers and s.peers[name].core.joined)


# --- the place ----------------------------------------------------------------------------------------------


async def test_a_paused_peer_gets_no_work_and_keeps_its_place() -> None:
    run = audit_run(stages=2, steps=14, microbatches_per_step=8)
    async with swarm(run) as s:
        await s.until_serving()
        s.add_trainer("trainer")
        await s.until_version(2)

        async def up_s() -> float:
            transport, record = s.network.peers["s0p0"].transport, s.network.records["s1p0"]
            return now_s() - (await ask_status(run, transport, [record.peer]))[record.peer].up_s

        began = await up_s()
        said = await pause(s, "s1p0")
        assert (said.stage, said.alone) == (1, False)
        assert await up_s() == pytest.approx(began, abs=1.0), "its program runs on"
        record = s.network.records["s1p0"]
        assert (record.state, record.stage, record.version) == ("paused", 1, said.version)
        await s.until_next_step()
        calls = s.network.peers["s1p0"].transport.calls["work"]
        for _ in range(3):
            await s.until_next_step()
        assert s.network.peers["s1p0"].transport.calls["work"] == calls
        transport = s.network.peers["s0p0"].transport
        status = (await ask_status(run, transport, [record.peer]))[record.peer]
        assert (status.state, status.stage, status.version) == ("paused", 1, said.version)
        assert not status.rebalance, "a pause is no decision about moves"
        await resume(s, "s1p0")
        assert await up_s() == pytest.approx(began, abs=1.0)
        await s.until_finished()
        s.assert_each_counted_once()


async def test_of_islands_the_owner_hears_which_stage_of_which() -> None:
    run = audit_run(stages=2, steps=4, microbatches_per_step=8)
    run = replace(run, islands=IslandsSpec(count=2, local_steps=3))
    async with swarm(run) as s:
        owner, place = s.owners["s3p0"], "stage 1 of island 1 (cell 3)"
        await s.until(lambda: owner.words == f"serves {place}, or is about to")
        owner.pause("by hand", "swarm pause")
        await s.until(lambda: owner.doing == "paused")
        assert owner.words.startswith(f"paused at {place}, swarm pause; the device is free")


async def test_what_was_saved_before_a_pause_is_given_out_meanwhile() -> None:
    """A keeper has perhaps only begun to fetch it, and of another stage there is nothing newer."""
    run = audit_run(stages=1, steps=40, microbatches_per_step=8)
    async with swarm(run, replicas=1) as s:
        s.add_trainer("trainer")
        await s.until_version(2)
        peer = s.peers["s0p0"]
        peer.store.pin(2, peer.core.compute.state.copy())
        await s.until_version(4)
        said = await pause(s, "s0p0")
        answer = await s.add_stranger().send("s0p0", "saved", AskSaved(run=run.id))
        assert unpack(answer.header, Saved).stages[0].versions == (2, said.version)


async def test_what_the_last_meeting_left_outlives_a_pause() -> None:
    """Nobody else may have it: an island that is lost begins there."""
    run = audit_run(stages=1, steps=40, microbatches_per_step=8)
    run = replace(run, islands=IslandsSpec(count=2, local_steps=3))
    async with swarm(run) as s:
        for island in range(2):
            s.add_trainer(f"trainer {island}", island=island)
        stranger = s.add_stranger()

        async def versions() -> tuple[int, ...]:
            answer = await stranger.send("s0p0", "saved", AskSaved(run=run.island(0).id))
            (saved,) = unpack(answer.header, Saved).stages
            return saved.versions

        await s.until(lambda: s.peers["s0p0"].core.version == 5)
        said = await pause(s, "s0p0")
        assert said.version in (5, 6, 7) and await versions() == (4, said.version)
        await resume(s, "s0p0")
        assert 4 in await versions()


async def test_who_calls_a_paused_peer_hears_that_it_is_paused() -> None:
    async with swarm(stages=1) as s:
        await s.until_serving()
        await pause(s, "s0p0")
        stranger = s.add_stranger()
        for method in ABSENT:
            with pytest.raises(Leaving, match="paused: its owner wants the device"):
                await stranger.send("s0p0", method, b"", [bytes(10)])


async def test_the_device_is_free_and_nothing_of_the_server_is_left() -> None:
    run = audit_run(stages=2, steps=1000, microbatches_per_step=8)
    async with swarm(run) as s:
        s.add_trainer("trainer")
        await s.until_version(2)
        peer = s.peers["s1p0"]
        compute = peer.core.compute
        tensors = [*compute.state.copy().values()]
        device = [
            weakref.ref(tensor.untyped_storage())
            for tensor in (*compute.state._weights, *compute.state._low, *compute.sums._sums.values())
        ]
        device += [weakref.ref(vector) for vector in compute.state._besides.values()]
        device += [weakref.ref(module) for module in compute._modules]
        served = weakref.ref(peer)
        assert len(device) >= 3 and tensors
        del peer, compute, tensors
        await pause(s, "s1p0")
        assert not [found for found in device if found() is not None]
        await s.until(lambda: gc.collect() >= 0 and served() is None)
        await resume(s, "s1p0")
        await s.until_next_step()


# --- coming back --------------------------------------------------------------------------------------------


async def test_with_the_weights_that_the_run_still_has_nothing_is_downloaded() -> None:
    run = audit_run(stages=2, steps=6, microbatches_per_step=8)
    async with swarm(run) as s:
        trainer = s.add_trainer("trainer")
        await s.until_version(2)
        trainer.leave()
        await s.until(lambda: s.tasks["trainer"].done())
        said = await pause(s, "s1p0")
        await resume(s, "s1p0")
        assert s.peers["s1p0"].core.version >= said.version
        s.add_trainer("another")
        await s.until_finished()
        s.assert_each_counted_once()
        assert not s.seen(StateFetched)


@pytest.mark.parametrize("delayed", [False, True])
async def test_a_step_later_the_gradient_of_that_step_is_enough(delayed: bool) -> None:
    run = replace(audit_run(stages=2, steps=1, microbatches_per_step=8), delayed_updates=delayed)
    async with swarm(run) as s:
        await s.until_serving()
        await pause(s, "s1p0")
        s.add_trainer("trainer")
        await s.until_finished()
        await resume(s, "s1p0")
        await s.until_finished()
        s.assert_each_counted_once()
        assert not s.seen(StateFetched)
        assert any("taken with the gradient" in event.words() for event in s.seen(Note))
        complete = [event for event in s.seen(Note) if "the run is complete" in event.words()]
        assert len(complete) == len(s.peers)  # the one that took the step with another's gradient says it too


@pytest.mark.slow
async def test_after_many_steps_the_state_is_downloaded() -> None:
    run = audit_run(stages=2, steps=12, microbatches_per_step=8)
    async with swarm(run) as s:
        s.add_trainer("trainer")
        await s.until_version(1)
        said = await pause(s, "s1p0")
        await s.until(lambda: any(event.t >= said.version + 3 for event in s.seen(Stepped)))
        await resume(s, "s1p0")
        await s.until_finished()
        s.assert_each_counted_once()
        assert [event.stage for event in s.seen(StateFetched)] == [1]


async def test_a_pause_waits_for_no_step_and_what_is_in_the_sum_is_run_again() -> None:
    run = audit_run(stages=1, steps=2, microbatches_per_step=64)
    async with swarm(run, silence_s=2.0) as s:
        await s.until_serving()
        s.add_trainer("trainer")
        await s.until(lambda: s.done("s0p0").bit_count() > 4)
        await pause(s, "s0p0")
        assert not s.seen(Stepped)
        assert any(note.text.startswith("run again by others: ") for note in s.seen(Note))
        await resume(s, "s0p0")
        await s.until_finished()
        s.assert_each_counted_once()


# --- the last one of its stage ------------------------------------------------------------------------------


async def test_the_last_of_a_stage_pauses_too_says_so_and_nothing_is_lost() -> None:
    run = audit_run(stages=2, steps=10, microbatches_per_step=8)
    async with swarm(run, replicas=1) as s:
        s.add_trainer("trainer")
        await s.until_version(3)
        said = await pause(s, "s1p0")
        assert said.alone and "the run stands still" in said.words()
        await s.until(lambda: len(s.seen(Trouble)) == 2)
        peers, trainers = s.seen(Trouble)
        assert "no other peer serves stage 1: the run stands still until this peer resumes" in peers.text
        assert trainers.text == "stage 1 has only 1 paused peer: the run waits until one resumes"
        assert s.peers["s0p0"].core.version <= said.version + 1
        await resume(s, "s1p0")
        await s.until_finished()
        s.assert_each_counted_once()
        assert not s.seen(StateFetched) and not s.seen(RolledBack)


async def test_a_stage_whose_last_peer_is_about_to_pause_is_not_called_lost() -> None:
    async with swarm(stages=2, replicas=1) as s:
        trainer = s.add_trainer("trainer")
        await s.until_version(1)
        for state in ("leaving", "paused"):
            s.network.announce(structs.replace(s.network.records["s1p0"], state=state))
            trainer._refresh_peers()
        assert [one.text.partition(":")[0] for one in s.seen(Trouble)] == ["stage 1 has only 1 paused peer"]
        assert not s.seen(StageLost)


async def test_who_comes_to_a_stage_that_is_paused_takes_the_state_from_the_paused_peer() -> None:
    run = audit_run(stages=2, steps=6, microbatches_per_step=8)
    async with swarm(run, replicas=1) as s:
        s.add_trainer("trainer")
        await s.until_version(3)
        said = await pause(s, "s1p0")
        s.add_peer("s1p1", 1)
        await s.until(lambda: s.peers["s1p1"].core.joined, limit_s=30.0)
        assert s.peers["s1p1"].core.version >= said.version >= 3
        await resume(s, "s1p0")
        await s.until_finished()
        s.assert_each_counted_once()
        assert not s.seen(RolledBack)


# --- at any moment ------------------------------------------------------------------------------------------


async def test_pausing_twice_is_pausing_once_and_reasons_add_up() -> None:
    async with swarm() as s:
        await s.until_serving()
        owner = s.owners["s1p0"]
        owner.pause("by hand", "swarm pause")
        owner.pause("by hand", "swarm pause")
        await s.until(lambda: owner.doing == "paused")
        owner.pause("busy", "another process computes")
        assert owner.why == "swarm pause; another process computes"
        owner.resume("busy")
        await asyncio.sleep(0)
        assert owner.doing == "paused" and len(s.seen(Paused)) == 1
        await resume(s, "s1p0")
        assert owner.doing == "serving"
        s.add_trainer("trainer")
        await s.until_finished()
        s.assert_each_counted_once()


async def test_who_resumes_while_it_pauses_comes_back_at_once() -> None:
    run = audit_run(stages=2, steps=6, microbatches_per_step=8)
    async with swarm(run) as s:
        s.add_trainer("trainer")
        await s.until_version(2)
        first = s.peers["s1p0"]
        s.owners["s1p0"].pause("by hand", "swarm pause")
        assert s.owners["s1p0"].doing == "pausing"
        s.owners["s1p0"].resume()
        await s.until(lambda: s.peers["s1p0"] is not first and s.peers["s1p0"].core.joined)
        await s.until_finished()
        s.assert_each_counted_once()
        assert not s.seen(Paused)


async def test_a_peer_pauses_while_it_joins_and_joins_afterwards() -> None:
    run = audit_run(stages=2, steps=5, microbatches_per_step=8)
    async with swarm(run) as s:
        s.add_trainer("trainer")
        await s.until_version(2)
        s.on_call("chunk", lambda *_: s.owners["late"].pause("by hand", "swarm pause"), by="late")
        s.add_peer("late", 1)
        await s.until(lambda: s.owners["late"].doing == "paused")
        assert s.seen(Paused)[0].version == -1
        assert "had not joined yet" in s.seen(Paused)[0].words()
        await resume(s, "late")
        await s.until_finished()
        s.assert_each_counted_once()


async def test_a_peer_pauses_before_it_has_done_anything() -> None:
    async with swarm() as s:
        s.owners["s1p0"].pause("by hand", "swarm pause")
        await s.until(lambda: s.owners["s1p0"].doing == "paused")
        s.add_trainer("trainer")
        await s.until_next_step()
        await resume(s, "s1p0")
        await s.until_finished()
        s.assert_each_counted_once()


@pytest.mark.parametrize(
    ("method", "nth"),
    some(
        [
            *((method, 1) for method in ("chunk", "status")),
            *((method, nth) for method in ("work", "part", "directive", "report") for nth in (1, 3)),
        ],
        quick=[
            *(("status", 1), ("part", 3), ("report", 3)),
        ],
    ),
)
async def test_a_pause_may_come_in_any_conversation(method: str, nth: int) -> None:
    run = audit_run(stages=2, steps=4, microbatches_per_step=8)
    async with swarm(run) as s:
        await s.until_serving()
        s.add_trainer("trainer")
        name = "s1p1"
        s.on_call(method, lambda *_: s.owners[name].pause("by hand", "swarm pause"), to=name, nth=nth)
        s.on_call(method, lambda *_: s.owners["s0p1"].pause("by hand", "swarm pause"), by="s0p1", nth=nth)
        for _ in range(3):
            await s.until_next_step()
        for owner in s.owners.values():
            owner.resume()
        await s.until_finished()
        s.assert_each_counted_once()


async def test_a_peer_that_is_moving_ends_up_where_it_went_or_where_it_was() -> None:
    run = audit_run(stages=2, steps=1000, microbatches_per_step=8)
    async with swarm(run, replicas=3) as s:
        s.add_trainer("trainer")
        await s.until_version(1)
        moving = asyncio.create_task(s.peers["s1p0"].moving.move(0, why="a test", going=set()))
        await asyncio.sleep(0)
        await pause(s, "s1p0")
        assert s.network.records["s1p0"].stage == 1, "the pause came before the move: the place is kept"
        moving.cancel()
        await resume(s, "s1p0")
        first = s.peers["s1p0"]
        await first.moving.move(0, why="a test", going=set())
        s.owners["s1p0"].pause("by hand", "swarm pause")
        await s.until(lambda: s.owners["s1p0"].doing == "paused")
        assert s.network.records["s1p0"].stage == 0, "it had gone already"
        await resume(s, "s1p0")
        assert s.peers["s1p0"].stage == 0
        await s.until_next_step()
        version, counts = await s.counted("s1p0")
        assert counts == [version] * run.M


def does_not_fit(*_: object, **__: object) -> StageCompute:
    raise SetupError("stage 1 does not fit on cuda:0 now")


def out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("served", "where"),
    cases(
        [*product((True, False), ("build", "load"))],
        name="served {0}-{1}",
        quick=lambda served, where: served and where == "load",
    ),
)
async def test_a_device_that_is_full_at_the_end_of_a_pause_keeps_the_state(
    monkeypatch: pytest.MonkeyPatch, where: str, served: bool
) -> None:
    run = audit_run(stages=2, steps=10, microbatches_per_step=8)
    async with swarm(run) as s:
        trainer = s.add_trainer("trainer")
        await s.until_version(2)
        name = "s1p0"
        if served:
            version = (await pause(s, name)).version
        else:
            name, version = "late", -1
            s.on_call("chunk", lambda *_: s.owners[name].pause("by hand", "swarm pause"), by=name)
            s.add_peer(name, 1)
            await s.until(lambda: s.owners[name].doing == "paused")
        trainer.leave()
        await s.until(lambda: s.tasks["trainer"].done())
        with monkeypatch.context() as patched:
            if where == "build":
                patched.setattr(loops, "StageCompute", does_not_fit)
            else:
                patched.setattr(StageCompute, "load_state", out_of_memory)
            s.owners[name].resume()
            await s.until(lambda: len(s.seen(Paused)) == 2)
        assert s.seen(Paused)[1].version == version and s.owners[name].why == "the device has no room"
        assert s.network.records[name].state == "paused"
        (trouble,) = (event.text for event in s.seen(Trouble) if "cannot resume" in event.text)
        assert trouble.startswith("this peer cannot resume: stage 1 does not fit on c")
        assert trouble.endswith(". It stays paused: swarm resume tries again")
        await resume(s, name)
        s.add_trainer("another")
        await s.until_finished()
        s.assert_each_counted_once()
        assert served == (not s.seen(StateFetched))


async def test_what_is_not_a_resume_ends_where_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    run = audit_run(stages=2, steps=10, microbatches_per_step=8)
    async with swarm(run) as s:
        s.add_trainer("trainer")
        await s.until_version(2)
        monkeypatch.setattr(StageCompute, "load_state", out_of_memory)
        s.add_peer("late", 1)
        await s.until(lambda: s.tasks["late"].done())
        assert isinstance(s.tasks["late"].exception(), torch.OutOfMemoryError)
        assert not s.owners["late"].paused
        with suppress(torch.OutOfMemoryError):
            await s.tasks.pop("late")


# --- leaving, dying -----------------------------------------------------------------------------------------


async def test_a_paused_peer_leaves_when_it_is_told_to() -> None:
    async with swarm() as s:
        await s.until_serving()
        await pause(s, "s1p0")
        s.owners["s1p0"].leave()
        await s.until(lambda: s.tasks["s1p0"].done())
        assert s.network.records["s1p0"].state == "left"
        assert (s.owners["s1p0"].doing, s.owners["s1p0"].paused) == ("leaving", False)


async def test_a_peer_that_is_pausing_leaves_when_it_is_told_to() -> None:
    async with swarm() as s:
        s.add_trainer("trainer")
        await s.until_version(1)
        s.owners["s1p0"].pause("by hand", "swarm pause")
        s.owners["s1p0"].leave()
        await s.until(lambda: s.tasks["s1p0"].done())
        assert s.network.records["s1p0"].state == "left" and not s.seen(Paused)
        await s.until_finished()
        s.assert_each_counted_once()


async def test_who_leaves_cannot_be_paused_any_more() -> None:
    async with swarm() as s:
        await s.until_serving()
        s.owners["s1p0"].leave()
        s.owners["s1p0"].pause("by hand", "swarm pause")
        await s.until(lambda: s.tasks["s1p0"].done())
        assert s.network.records["s1p0"].state == "left" and not s.seen(Paused)


@pytest.mark.parametrize("while_", some(["pausing", "paused"], quick=["paused"]))
async def test_a_peer_that_dies_in_its_pause_is_missed_by_nobody(while_: str) -> None:
    run = audit_run(stages=2, steps=8, microbatches_per_step=8)
    async with swarm(run) as s:
        s.add_trainer("trainer")
        await s.until_version(1)
        s.owners["s1p0"].pause("by hand", "swarm pause")
        await s.until(lambda: s.owners["s1p0"].doing == while_)
        s.kill("s1p0")
        await s.until_finished()
        s.assert_each_counted_once()


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(2, quick=1))
async def test_pauses_and_deaths_at_random_moments_leave_each_counted_once(seed: int) -> None:
    rng = random.Random(seed)
    run = replace(audit_run(stages=2, steps=12, microbatches_per_step=16), delayed_updates=seed % 3 == 2)
    async with swarm(run, replicas=3) as s:
        s.add_trainer("one", window=4)
        s.add_trainer("two", window=4)
        names = sorted(s.owners)
        for turn in range(10):
            name = rng.choice(names)
            owner = s.owners[name]
            if owner.paused:
                owner.resume()
            elif turn == 5 and len(s.of_stage(int(name[1]))) > 2:
                s.kill(name)
                names.remove(name)
            else:
                owner.pause("by hand", "swarm pause")
            await s.until(lambda: True)
            await asyncio.sleep(rng.uniform(0.0, 0.08))
        assert s.seen(Paused)
        for name in names:
            s.owners[name].resume()
        await s.until(lambda: all(name in s.peers for name in names))
        await s.until_finished()
        s.assert_each_counted_once()
