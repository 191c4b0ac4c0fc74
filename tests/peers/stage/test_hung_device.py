"""A device that hangs while its peer still talks: replicas would wait for it for ever. Or one that breaks
while weights change: what it leaves is of no version."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from peers.clock import now_s
from peers.events import StateFetched
from peers.owner.control_socket import DONE_S
from peers.ports import Rank
from peers.sim.device import SimDevice
from peers.stage import device as stage
from peers.stage.settings import StageSettings
from swarm.errors import DeviceHangs, Refused, SetupError
from swarm.ids import Generation, Position
from swarm.manifest import audit_run
from swarm.model.stage import StageCompute
from tests.peers.alone import Alone
from tests.peers.loops import Swarm, swarm
from tests.seeds import some

pytestmark = pytest.mark.virtual_time


async def ends(s: Swarm, name: str, serving: asyncio.Task[None]) -> None:
    """As its process does: with the error, and all its connections break."""
    with pytest.raises(SetupError, match=r"the device has worked on one job for .* then start it again"):
        await serving
    s.network.kill(name)


def device_of(s: Swarm, name: str) -> SimDevice:
    device = s.peers[name].core.device
    assert isinstance(device, SimDevice)
    return device


def hang(device: SimDevice) -> asyncio.Future[None]:
    """A job that will never answer."""
    device.hangs = True
    return asyncio.ensure_future(device.run(Rank.STEP, 0, lambda: None))


@pytest.mark.parametrize("name", some(["s0p0", "s1p1"], quick=["s1p1"]))
async def test_a_peer_whose_device_hangs_ends_and_others_do_its_work(name: str) -> None:
    async with swarm(audit_run(stages=2, steps=6, microbatches_per_step=8), replicas=0) as s:
        for each in ("s0p0", "s0p1", "s1p0", "s1p1"):
            s.add_peer(each, int(each[1]), hung_s=20.0)  # ten minutes of a swarm are many events
        await s.until_serving()
        hanging: list[asyncio.Future[None]] = []
        device = device_of(s, name)
        s.tasks[name] = asyncio.create_task(ends(s, name, s.tasks[name]))
        s.on_call("work", lambda *_: hanging.append(hang(device)), to=name)
        s.add_trainer("trainer")
        await s.until_finished(limit_s=2000.0)
        s.assert_each_counted_once()
        assert s.tasks[name].done() and name not in dict(s.live())
        assert hanging[0].cancel()


@pytest.mark.slow
async def test_long_jobs_are_no_hung_device() -> None:
    """As long as each ends: looks count from the start of a job."""
    async with swarm(audit_run(stages=1, steps=1)) as s:
        await s.until_serving()
        device = device_of(s, "s0p0")
        device.job_s = 390.0
        began = now_s()
        for _ in range(4):
            await device.run(Rank.COMPUTE, 0, lambda: None)
        assert device.longest_s < StageSettings().hung_s < now_s() - began
        assert not s.tasks["s0p0"].done()


@pytest.mark.parametrize("where", some(["a microbatch", "the copy of its state"], quick=["a microbatch"]))
async def test_a_pause_ends_a_peer_whose_device_hangs_and_its_owner_hears_why(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with swarm(audit_run(stages=2, steps=8, microbatches_per_step=8)) as s:
        s.add_trainer("trainer")
        await s.until_version(1)
        name = "s1p0"
        device = device_of(s, name)
        peer, owner, serving = s.peers[name], s.owners[name], s.tasks.pop(name)
        if where == "a microbatch":
            job = hang(device)
        else:
            copy = lambda: setattr(device, "hangs", True)  # noqa: E731
            monkeypatch.setattr(peer.core.compute.state, "copy", copy)
        s.tasks[name] = asyncio.create_task(asyncio.sleep(600.0))  # s.peers[name] counts as live until then
        owner.pause("by hand", "swarm pause")
        with pytest.raises(DeviceHangs, match="It cannot pause: this process ends, and its memory is free"):
            await serving
        assert device.running is not None and owner.paused and owner.doing == "leaving"
        assert "The state of its stage is given up; others have it, or a checkpoint" in owner.words
        assert s.network.records[name].state == "left"
        s.network.kill(name)
        await s.until_finished()
        s.assert_each_counted_once()
        if where == "a microbatch":
            job.cancel()


async def test_a_pause_of_a_peer_whose_device_hangs_while_it_joins_ends_it_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with swarm(audit_run(stages=1, steps=8, microbatches_per_step=8)) as s:
        s.add_trainer("trainer")
        await s.until_version(1)
        peer = s.add_peer("late", 0)
        device = device_of(s, "late")

        def load_state(*_: object) -> None:
            device.hangs = True

        monkeypatch.setattr(peer.core.compute, "load_state", load_state)
        await s.until(lambda: device.hangs)
        s.owners["late"].pause("by hand", "swarm pause")
        with pytest.raises(DeviceHangs, match="It cannot pause"):
            await s.tasks.pop("late")
        del s.peers["late"]
        await s.until_finished()
        s.assert_each_counted_once()


async def test_who_leaves_waits_for_no_device_that_hangs() -> None:
    async with swarm(audit_run(stages=1, steps=1)) as s:
        await s.until_serving()
        job = hang(device_of(s, "s0p0"))
        s.owners["s0p0"].leave()
        with pytest.raises(DeviceHangs, match="This peer ends, so that others do its work"):
            await s.tasks.pop("s0p0")
        job.cancel()
        del s.peers["s0p0"]


@pytest.mark.parametrize("when", ["leaving", "left"])
async def test_who_is_to_end_at_once_waits_for_no_job(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C. A join of the device's thread would stop the loop, and all further signals."""
    async with swarm(audit_run(stages=1, steps=1)) as s:
        await s.until_serving()
        peer, serving = s.peers["s0p0"], s.tasks.pop("s0p0")
        if when == "leaving":
            monkeypatch.setattr(peer, "_leave_well", asyncio.Event().wait)
        job = hang(device_of(s, "s0p0"))
        await s.until(lambda: peer.core.device.running is not None)
        s.tasks["s0p0"] = asyncio.create_task(asyncio.sleep(600.0))  # s.peers[name] counts as live until then
        s.owners["s0p0"].leave()
        await s.until(lambda: peer.core.life == when)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        assert peer.core.device.running is not None, "the job has not ended"
        job.cancel()


async def test_a_device_that_hangs_while_others_say_goodbye_is_told_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing waits for the device just then; a pause would seem to have worked."""
    async with swarm(audit_run(stages=1, steps=1)) as s:
        await s.until_serving()
        peer, device = s.peers["s0p0"], device_of(s, "s0p0")
        close = peer.coordination.close
        jobs: list[asyncio.Future[None]] = []

        async def slowly() -> None:
            jobs.append(hang(device))
            await s.until(lambda: device.abandoned)
            await close()

        monkeypatch.setattr(peer.coordination, "close", slowly)
        owner, serving = s.owners["s0p0"], s.tasks.pop("s0p0")
        s.tasks["s0p0"] = asyncio.create_task(asyncio.sleep(600.0))  # s.peers[name] counts as live until then
        owner.pause("by hand", "swarm pause")
        await s.until(lambda: serving.done() or owner.doing == "paused")
        with pytest.raises(DeviceHangs, match="It cannot pause"):
            serving.result()
        jobs[0].cancel()


@pytest.mark.slow
async def test_who_moves_has_time_until_its_owner_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async with swarm(audit_run(stages=2, steps=1)) as s:
        await s.until_serving()
        jobs: list[asyncio.Future[None]] = []
        for name in ("s1p0", "s1p1"):
            peer = s.peers[name]
            monkeypatch.setattr(peer, "_leave_well", asyncio.Event().wait)
            jobs.append(hang(device_of(s, name)))
            await peer.moving.move(0, why="a test", going=set())
        s.owners["s1p1"].pause("by hand", "swarm pause")
        with pytest.raises(DeviceHangs, match="on one job for 31 s"):
            await s.tasks.pop("s1p1")
        with pytest.raises(DeviceHangs, match="on one job for 601 s"):
            await s.tasks.pop("s1p0")
        for job in jobs:
            job.cancel()
        del s.peers["s1p0"], s.peers["s1p1"]


async def test_what_the_longest_job_took_is_known_after_a_pause_as_well() -> None:
    async with swarm(audit_run(stages=1, steps=1)) as s:
        await s.until_serving()
        first, owner = s.peers["s0p0"], s.owners["s0p0"]
        first.core.device.longest_s = 40.0
        owner.pause("by hand", "swarm pause")
        await s.until(lambda: owner.doing == "paused")
        owner.resume()
        await s.until(lambda: s.peers.get("s0p0", first) is not first)
        assert s.peers["s0p0"].core.device.longest_s >= 40.0


def test_the_owner_waits_for_a_slow_job_but_not_for_long() -> None:
    assert stage.longest_job_s(1.0, 600.0, owner_waits=False) == 600.0
    assert stage.longest_job_s(100.0, 600.0, owner_waits=False) == 2000.0
    assert stage.longest_job_s(1.0, 600.0, owner_waits=True) == 30.0
    assert stage.longest_job_s(40.0, 600.0, owner_waits=True) == 80.0
    assert stage.longest_job_s(100.0, 600.0, owner_waits=True) == 90.0 < DONE_S


# --- what breaks part-way ---


def out_of_memory(compute: StageCompute, method: str, then: Callable[[], object]) -> None:
    """From now on `method` changes the weights, breaks, and leaves the version as it was."""
    part = compute.state._optimizer if method == "step" else compute.state  # type: ignore
    change = getattr(part, method)

    def broken(*args: Any, **more: Any) -> None:
        version = compute.version
        change(*args, **more)
        compute.state.version = version
        then()
        raise torch.OutOfMemoryError("CUDA out of memory")

    setattr(part, method, broken)


async def test_nobody_gets_what_a_step_that_broke_part_way_has_left() -> None:
    """A newcomer, or this peer after a pause, would go on from it, and count microbatches once more."""
    async with swarm(audit_run(stages=2, steps=3, microbatches_per_step=8), replicas=1) as s:
        s.add_trainer("trainer")
        await s.until_version(1)
        peer, task = s.peers.pop("s1p0"), s.tasks.pop("s1p0")
        out_of_memory(peer.core.compute, "step", lambda: s.add_peer("late", 1))
        await s.until(task.done, limit_s=30.0)
        with pytest.raises(SetupError, match="the weights of stage 1 are lost here: CUDA out of memory"):
            await task
        assert not s.seen(StateFetched) and not peer.core.joined


async def test_nor_what_a_download_that_broke_part_way_has_left() -> None:
    async with swarm(audit_run(stages=1, steps=3, microbatches_per_step=8)) as s:
        await s.until_serving()
        peer, task = s.peers.pop("s0p0"), s.tasks.pop("s0p0")
        out_of_memory(peer.core.compute, "load", lambda: s.add_peer("late", 0))
        with suppress(torch.OutOfMemoryError):
            await peer._recovery.download(["s0p1"])  # type: ignore
        await s.until(task.done, limit_s=30.0)
        with pytest.raises(SetupError, match="the device of stage 0 failed: CUDA out of memory"):
            await task
        assert "s0p0" not in {event.source for event in s.seen(StateFetched)}


async def test_who_cannot_load_a_state_begins_its_steps_again() -> None:
    """Else the last of a stage, which was given something else, would never take another step."""
    alone = await Alone(audit_run(stages=1, steps=4, microbatches_per_step=4)).opened()
    alone.core.compute.sums.of(0)[1] = 3.0
    state = alone.core.compute.state.copy()
    state["weights"][0] = math.nan
    with pytest.raises(Refused, match="not finite"):
        await alone.core.load(Position(Generation(), 1), state)
    assert alone.core.version == 0 and not alone.core.steps[0].over
    assert alone.sum() == [0.0] * 4, "its ledger is empty, too"
