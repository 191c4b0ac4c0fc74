"""The device of virtual time: ranks, durations, hanging and dying, as `peers.ports.StageDevice` says."""

from __future__ import annotations

import asyncio

import pytest
import torch

from peers.clock import now_s
from peers.ports import Rank
from peers.sim.device import SimDevice
from peers.sim.dice import Dice
from peers.sim.loop import Deadlock, run_virtual
from peers.stage.device import DeviceThreads
from swarm.errors import Leaving


async def order_of_jobs(device: SimDevice | DeviceThreads) -> list[str]:
    """In which order jobs that were all there at the start ran."""
    ran: list[str] = []
    asked = [(Rank.IDLE, 0), (Rank.COMPUTE, 1), (Rank.COMPUTE, 0), (Rank.STEP, 9)]
    jobs = [
        asyncio.create_task(device.run(rank, t, ran.append, f"{rank.name} {t}.{again}"))
        for rank, t in asked
        for again in range(2)
    ]
    given_up = asyncio.create_task(device.run(Rank.STEP, 0, ran.append, "given up"))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.sleep(0)
    device.start()
    await asyncio.gather(*jobs)
    device.stop()
    return ran


def test_jobs_run_in_the_order_of_the_real_device() -> None:
    async def virtual() -> list[str]:
        return await order_of_jobs(SimDevice(Dice(1), 1.0))

    ran = run_virtual(virtual())
    assert ran == asyncio.run(order_of_jobs(DeviceThreads("a device")))
    work = [f"COMPUTE {t}.{again}" for t in range(2) for again in range(2)]
    assert ran == ["STEP 9.0", "STEP 9.1", *work, "IDLE 0.0", "IDLE 0.1"]


def test_a_job_takes_virtual_time_and_knows_how_long() -> None:
    async def main() -> None:
        device = SimDevice(Dice(3), 10.0)
        device.start()
        began = now_s()
        took_s = await device.run(Rank.COMPUTE, 0, device.elapsed_s)
        assert 5.0 <= took_s <= 15.0
        assert now_s() - began == device.busy_s == device.longest_s == took_s
        assert device.mean_queue() == pytest.approx(1.0)

    run_virtual(main())


def test_an_error_of_a_job_reaches_its_caller_and_the_next_job_runs() -> None:
    async def main() -> None:
        device = SimDevice(Dice(3), 1.0)
        device.start()
        with pytest.raises(KeyError):
            await device.run(Rank.STEP, 0, {}.pop, "absent")
        assert await device.run(Rank.STEP, 0, int) == 0
        device.dies = True
        with pytest.raises(torch.AcceleratorError):
            await device.run(Rank.STEP, 0, int)

    run_virtual(main())


def test_a_job_of_a_device_that_hangs_never_ends() -> None:
    async def main() -> None:
        device = SimDevice(Dice(3), 1.0)
        device.start()
        device.hangs = True
        await device.run(Rank.STEP, 0, int)

    with pytest.raises(Deadlock):
        run_virtual(main())


@pytest.mark.parametrize("abandoned", [False, True])
def test_a_stop_finishes_the_running_job_unless_it_is_abandoned(abandoned: bool) -> None:
    async def main() -> list[str]:
        device, ran = SimDevice(Dice(3), 1.0), []
        device.start()
        jobs = [asyncio.create_task(device.run(Rank.STEP, t, ran.append, str(t))) for t in range(2)]
        await asyncio.sleep(0)
        device.abandoned = abandoned
        device.stop()
        soon = list(ran)
        await asyncio.sleep(5.0)
        assert "1" not in ran
        with pytest.raises(Leaving, match="it leaves, pauses or moves"):
            await jobs[1]
        with pytest.raises(Leaving, match="it leaves, pauses or moves"):
            await device.run(Rank.STEP, 2, str)
        return soon

    assert run_virtual(main()) == ([] if abandoned else ["0"])
