"""A device that hangs while its peer still talks: mates would wait for it for ever."""

from __future__ import annotations

import asyncio
import threading

import pytest

from peers import stage
from peers.device_thread import Rank
from swarm.errors import SetupError
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
    monkeypatch.setattr(stage, "HUNG_S", 1.0)
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
