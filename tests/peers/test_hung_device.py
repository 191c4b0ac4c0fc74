"""A device that hangs while its peer still talks: mates would wait for it for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from peers import stage
from peers.device_thread import Rank
from peers.owner_socket import DONE_S
from swarm.errors import DeviceHangs, SetupError
from swarm.run import counting_run
from tests.peers.loops import Swarm, quick, swarm

pytestmark = pytest.mark.usefixtures("quick")
assert quick  # a fixture


async def ends(s: Swarm, name: str, serving: asyncio.Task[None]) -> None:
    """As its process does: with the error, and all its connections break."""
    with pytest.raises(SetupError, match=r"the device has worked on one job for .* then start it again"):
        await serving
    s.network.fail(name)


@pytest.mark.parametrize("name", ["s0p0", "s1p1"])
async def test_a_peer_whose_device_hangs_ends_and_others_do_its_work(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "HUNG_S", 4.0)  # a busy machine may take a second for a first job
    async with swarm(counting_run(stages=2, steps=6, microbatches_per_step=8)) as s:
        await s.until_serving()
        hanging: list[asyncio.Future[bool]] = []
        go = threading.Event()
        job = s.peers[name].core.device.run(Rank.STEP, 0, go.wait, 60.0)
        s.tasks[name] = asyncio.create_task(ends(s, name, s.tasks[name]))
        s.on_call("work", lambda *_: hanging.append(asyncio.ensure_future(job)), to=name)
        s.add_trainer("trainer")
        await s.until_finished()
        s.assert_each_counted_once()
        assert s.tasks[name].done() and name not in dict(s.live())
        go.set()
        assert hanging[0].cancel()


async def test_long_jobs_are_no_hung_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as each ends: looks count from the start of a job."""
    monkeypatch.setattr(stage, "HUNG_S", 1.0)
    async with swarm(counting_run(stages=1, steps=1)) as s:
        await s.until_serving()
        device = s.peers["s0p0"].core.device
        for _ in range(4):
            await device.run(Rank.STEP, 0, threading.Event().wait, 0.5)
        assert not s.tasks["s0p0"].done()


class Hang:
    """What a device does that will never answer; `go` lets its thread end with the test."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = threading.Event()

    def __call__(self, *_: object) -> None:
        self.begun.set()
        self.go.wait(60.0)


@pytest.fixture
def hang() -> Iterator[Hang]:
    hang = Hang()
    yield hang
    hang.go.set()


@pytest.mark.parametrize("where", ["a microbatch", "the copy of its state"])
async def test_a_pause_ends_a_peer_whose_device_hangs_and_its_owner_hears_why(
    where: str, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "OWNER_S", 0.5)
    async with swarm(counting_run(stages=2, steps=8, microbatches_per_step=8)) as s:
        s.add_trainer("trainer")
        await s.until_version(1)
        name = "s1p0"
        peer, owner, serving = s.peers[name], s.owners[name], s.tasks.pop(name)
        if where == "a microbatch":
            job = asyncio.ensure_future(peer.core.device.run(Rank.STEP, 0, hang))
            await s.until(hang.begun.is_set)
        else:
            monkeypatch.setattr(peer.core.compute, "state", hang)
        s.tasks[name] = asyncio.create_task(asyncio.sleep(60.0))  # s.peers[name] counts as live until then
        owner.pause("by hand", "swarm pause")
        with pytest.raises(DeviceHangs, match="It cannot pause: this process ends, and its memory is free"):
            await serving
        assert hang.begun.is_set() and owner.paused and owner.doing == "leaving"
        assert "The state of its stage is given up; others have it, or a checkpoint" in owner.words
        assert s.network.records[name].state == "left"
        s.network.fail(name)
        await s.until_finished()
        s.assert_each_counted_once()
        if where == "a microbatch":
            job.cancel()


async def test_a_pause_of_a_peer_whose_device_hangs_while_it_joins_ends_it_too(
    hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "OWNER_S", 0.5)
    async with swarm(counting_run(stages=1, steps=8, microbatches_per_step=8)) as s:
        s.add_trainer("trainer")
        await s.until_version(1)
        peer = s.add_peer("late", 0)
        monkeypatch.setattr(peer.core.compute, "load_state", hang)
        await s.until(hang.begun.is_set)
        s.owners["late"].pause("by hand", "swarm pause")
        with pytest.raises(DeviceHangs, match="It cannot pause"):
            await s.tasks.pop("late")
        del s.peers["late"]
        await s.until_finished()
        s.assert_each_counted_once()


async def test_who_leaves_waits_for_no_device_that_hangs(hang: Hang, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "OWNER_S", 0.5)
    async with swarm(counting_run(stages=1, steps=1)) as s:
        await s.until_serving()
        job = asyncio.ensure_future(s.peers["s0p0"].core.device.run(Rank.STEP, 0, hang))
        await s.until(hang.begun.is_set)
        s.owners["s0p0"].leave()
        with pytest.raises(DeviceHangs, match="This peer ends, so that others do its work"):
            await s.tasks.pop("s0p0")
        job.cancel()
        del s.peers["s0p0"]


@pytest.mark.parametrize("when", ["leaving", "left"])
async def test_who_is_to_end_at_once_waits_for_no_job(
    when: str, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C. A join of the device's thread would stop the loop, and all further signals."""
    async with swarm(counting_run(stages=1, steps=1)) as s:
        await s.until_serving()
        peer, serving = s.peers["s0p0"], s.tasks.pop("s0p0")
        if when == "leaving":
            monkeypatch.setattr(peer, "_leave_well", asyncio.Event().wait)
        job = asyncio.ensure_future(peer.core.device.run(Rank.STEP, 0, hang))
        await s.until(hang.begun.is_set)
        s.tasks["s0p0"] = asyncio.create_task(asyncio.sleep(60.0))  # s.peers[name] counts as live until then
        s.owners["s0p0"].leave()
        await s.until(lambda: peer._state == when)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        assert peer.core.device.running is not None, "the job has not ended"
        job.cancel()


async def test_a_device_that_hangs_while_others_say_goodbye_is_told_as_well(
    hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for the device just then; a pause would seem to have worked."""
    monkeypatch.setattr(stage, "OWNER_S", 0.5)
    async with swarm(counting_run(stages=1, steps=1)) as s:
        await s.until_serving()
        peer = s.peers["s0p0"]
        device, close = peer.core.device, peer.council.close
        jobs: list[asyncio.Future[None]] = []

        async def slowly() -> None:
            jobs.append(asyncio.ensure_future(device.run(Rank.STEP, 0, hang)))
            await s.until(lambda: device.abandoned)
            await close()

        monkeypatch.setattr(peer.council, "close", slowly)
        owner, serving = s.owners["s0p0"], s.tasks.pop("s0p0")
        s.tasks["s0p0"] = asyncio.create_task(asyncio.sleep(60.0))  # s.peers[name] counts as live until then
        owner.pause("by hand", "swarm pause")
        await s.until(lambda: serving.done() or owner.doing == "paused")
        with pytest.raises(DeviceHangs, match="It cannot pause"):
            serving.result()
        jobs[0].cancel()


async def test_who_moves_has_time_until_its_owner_waits(hang: Hang, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"LOOK_S": 0.1, "BOUNDARY_S": 0.0, "OWNER_S": 0.3, "OWNER_TIMES": 0.0, "HUNG_S": 2.0}
    for name, limit in {**limits, "HUNG_TIMES": 0.0}.items():
        monkeypatch.setattr(stage, name, limit)
    async with swarm(counting_run(stages=2, steps=1)) as s:
        await s.until_serving()
        jobs: list[asyncio.Future[None]] = []
        for name in ("s1p0", "s1p1"):
            peer = s.peers[name]
            monkeypatch.setattr(peer, "_leave_well", asyncio.Event().wait)
            jobs.append(asyncio.ensure_future(peer.core.device.run(Rank.STEP, 0, hang)))
            await peer._move(0)
        s.owners["s1p1"].pause("by hand", "swarm pause")
        with pytest.raises(DeviceHangs, match="on one job for 2 s"):
            await s.tasks.pop("s1p0")
        with pytest.raises(DeviceHangs, match="on one job for 0 s"):
            await s.tasks.pop("s1p1")
        for job in jobs:
            job.cancel()
        del s.peers["s1p0"], s.peers["s1p1"]


async def test_what_the_longest_job_took_is_known_after_a_pause_as_well() -> None:
    async with swarm(counting_run(stages=1, steps=1)) as s:
        await s.until_serving()
        first, owner = s.peers["s0p0"], s.owners["s0p0"]
        first.core.device.longest_s = 40.0
        owner.pause("by hand", "swarm pause")
        await s.until(lambda: owner.doing == "paused")
        owner.resume()
        await s.until(lambda: s.peers.get("s0p0", first) is not first)
        assert s.peers["s0p0"].core.device.longest_s >= 40.0


def test_the_owner_waits_for_a_slow_job_but_not_for_long() -> None:
    assert stage.longest_job_s(1.0, owner_waits=False) == stage.HUNG_S
    assert stage.longest_job_s(100.0, owner_waits=False) == 2000.0
    assert stage.longest_job_s(1.0, owner_waits=True) == 30.0
    assert stage.longest_job_s(40.0, owner_waits=True) == 80.0
    assert stage.longest_job_s(100.0, owner_waits=True) == 90.0 < DONE_S
