"""The threads that compute for a stage: who runs beside whom, and who may change what."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from peers.audit.convictions import Referee
from peers.ports import Rank
from peers.stage.device import DeviceThreads
from swarm.errors import Leaving
from swarm.ids import Microbatch
from swarm.model.stage_function import Output, StageFunction
from swarm.protocol.ledger import Ledger
from tests.audit.test_answers import SIGNER, evidence_of, run_of


@asynccontextmanager
async def threads(workers: int) -> AsyncIterator[DeviceThreads]:
    device = DeviceThreads("a device", workers)
    device.start()
    try:
        yield device
    finally:
        device.stop()


async def test_as_many_microbatches_as_there_are_workers_are_computed_at_once() -> None:
    async with threads(3) as device:
        all_there = threading.Barrier(3)
        ranks = (Rank.COMPUTE, Rank.COMPUTE, Rank.IDLE)
        await asyncio.gather(*(device.run(rank, 0, all_there.wait, 30.0) for rank in ranks))
        device.stop()
        assert device.running is None and device.longest_s > 0


def gradient(weight: torch.Tensor, x: torch.Tensor, halfway: Callable[[], object]) -> torch.Tensor:
    """Of a weight that is read twice, in bfloat16."""

    def compute(*_: object) -> Output:
        hidden = functional.linear(x, weight)
        halfway()
        return Output((functional.linear(hidden.tanh(), weight).float().square().mean(),), {})

    function = StageFunction(
        takes=(), gives=(), dtypes=(), module=torch.nn.Module, compute=compute, halves=True
    )
    (loss,) = function.apply(torch.nn.Module(), [], Microbatch(0, 0), torch.device("cpu"))[1].values
    return torch.autograd.grad(loss, weight)[0]


async def test_a_weight_that_is_read_twice_is_rounded_once_whoever_else_computes() -> None:
    weight, x = torch.nn.Parameter(torch.randn(64, 64)), torch.randn(32, 64)
    async with threads(2) as device:
        alone = await device.run(Rank.COMPUTE, 0, gradient, weight, x, int)
        is_halfway, may_go_on = threading.Event(), threading.Event()
        one = asyncio.create_task(
            device.run(Rank.COMPUTE, 0, gradient, weight, x, lambda: (is_halfway.set(), may_go_on.wait(30.0)))
        )
        await asyncio.to_thread(is_halfway.wait, 30.0)
        other = await device.run(Rank.COMPUTE, 0, gradient, weight, x, int)
        may_go_on.set()
        assert torch.equal(await one, alone) and torch.equal(other, alone)
        # And nothing is left of it once weights change.
        await device.run(Rank.STEP, 0, weight.data.mul_, 2.0)
        stepped = await device.run(Rank.COMPUTE, 1, gradient, weight, x, int)
    assert torch.equal(stepped, gradient(torch.nn.Parameter(weight.detach().clone()), x, int))


async def test_what_changes_weights_runs_alone_and_first() -> None:
    async with threads(3) as device:
        began, may_end, ran = threading.Event(), threading.Event(), list[str]()

        def first() -> None:
            began.set()
            may_end.wait(30.0)
            ran.append("forward")

        def alone() -> None:
            assert device.running is not None
            ran.append("step")

        jobs = [asyncio.create_task(device.run(Rank.COMPUTE, 0, first))]
        await asyncio.to_thread(began.wait, 30.0)
        jobs.append(asyncio.create_task(device.run(Rank.COMPUTE, 5, lambda: None)))
        await jobs[-1]  # beside the first
        jobs.append(asyncio.create_task(device.run(Rank.STEP, 1, alone)))
        await asyncio.sleep(0)
        jobs.append(asyncio.create_task(device.run(Rank.COMPUTE, 0, ran.append, "backward")))
        await asyncio.sleep(0)
        assert device.mean_queue() >= 0 and not ran
        may_end.set()
        await asyncio.gather(*jobs)
        assert ran == ["forward", "step", "backward"]


async def test_a_ledger_changes_only_in_a_job_that_holds_the_books() -> None:
    async with threads(2) as device:
        ledger = Ledger(0, 8, device.books.check)

        def counted(m: int) -> None:
            with device.books:
                ledger.record(m)

        await device.run(Rank.STEP, 0, ledger.record, 0)
        await device.run(Rank.COMPUTE, 0, counted, 1)
        for change in (
            lambda: ledger.record(2), lambda: ledger.remove(0),
            lambda: ledger.freeze("round"), ledger.thaw, ledger.clear,
        ):  # fmt: skip
            with pytest.raises(AssertionError, match="a ledger changes outside of a job that holds"):
                await device.run(Rank.COMPUTE, 0, change)
            with pytest.raises(AssertionError, match="outside of a job that holds the books"):
                change()
        assert ledger.done == 0b11
        ledger.claim(3)  # what is being computed is the loop's
        ledger.release(3)


async def test_a_lock_that_another_thread_holds_is_not_ones_own() -> None:
    async with threads(2) as device:
        with device.books, pytest.raises(AssertionError, match="holds the books"):
            await asyncio.to_thread(device.books.check)


async def test_what_a_stopped_device_will_not_do_is_said_at_once() -> None:
    """Its caller's caller sees signs of life, and would wait for minutes."""
    async with threads(1) as device:
        began, may_end = threading.Event(), threading.Event()

        def first() -> str:
            began.set()
            may_end.wait(30.0)
            return "done"

        running = asyncio.create_task(device.run(Rank.COMPUTE, 0, first))
        await asyncio.to_thread(began.wait, 30.0)
        waiting = asyncio.create_task(device.run(Rank.COMPUTE, 0, str))
        await asyncio.sleep(0)
        may_end.set()
        device.stop()
        assert await running == "done"
        with pytest.raises(Leaving, match="it leaves, pauses or moves"):
            await waiting
        with pytest.raises(Leaving, match="it leaves, pauses or moves"):
            await device.run(Rank.STEP, 0, str)


def parts(
    weight: torch.Tensor, x: torch.Tensor, lock: threading.Lock | None, before: int = 0
) -> torch.Tensor:  # fmt: skip
    """The gradient of a weight that is read twice as it is and once in bfloat16, by a thread that has called
    so many operators before."""

    def compute(*_: object) -> Output:
        whole = (1.7 * weight).sin().sum() + (0.3 * weight).exp().sum()
        return Output((whole + functional.linear(x, weight).float().square().sum(),), {})

    for _ in range(before):
        _ = weight * 1.0
    function = StageFunction(
        takes=(), gives=(), dtypes=(), module=torch.nn.Module, compute=compute, halves=True, alone=True,
        lock=lock,
    )  # fmt: skip
    (loss,) = function.apply(torch.nn.Module(), [], Microbatch(0, 0), torch.device("cpu"))[1].values
    return torch.autograd.grad(loss, weight)[0]


async def test_three_parts_of_a_gradient_are_added_up_in_one_order_whichever_thread_does_it() -> None:
    weight, x, lock = torch.nn.Parameter(torch.randn(50, 16)), torch.randn(40, 16), threading.Lock()
    async with threads(2) as device:
        alone = await device.run(Rank.COMPUTE, 0, parts, weight, x, lock)
        has_rounded, may_end = threading.Event(), threading.Event()
        one = asyncio.create_task(
            device.run(
                Rank.COMPUTE, 0, lambda: (parts(weight, x, lock), has_rounded.set(), may_end.wait(30.0))[0]
            )
        )
        await asyncio.to_thread(has_rounded.wait, 30.0)
        other = await device.run(Rank.COMPUTE, 0, parts, weight, x, lock, 5000)
        may_end.set()
        assert torch.equal(await one, alone) and torch.equal(other, alone)


async def test_a_referee_beside_the_device_forgets_nothing_that_it_has_rounded() -> None:
    run = run_of()
    compute, evidence, body = evidence_of(run, 0)
    referee: Any = Referee(run, SimpleNamespace(signer=SIGNER))  # type: ignore
    weight, x, judged = torch.nn.Parameter(torch.randn(64, 64)), torch.randn(32, 64), list[bool]()

    def judge() -> None:
        state = compute.state.copy(), evidence, body
        thread = threading.Thread(target=lambda: judged.append(referee._proves(0, *state)))
        thread.start()
        thread.join()

    async with threads(2) as device:
        alone = await device.run(Rank.COMPUTE, 0, gradient, weight, x, int)
        beside = await device.run(Rank.COMPUTE, 0, gradient, weight, x, judge)
    assert torch.equal(alone, beside) and judged == [False]


async def test_who_judges_a_table_that_is_read_three_times_forgets_nothing_of_the_device() -> None:
    """Threads that compute one after the other forget what they have rounded; a referee is none of them."""
    weight, x = torch.nn.Parameter(torch.randn(64, 64)), torch.randn(32, 64)

    def judge() -> None:
        torch.autocast_increment_nesting()  # as `Referee` does
        parts(torch.nn.Parameter(torch.randn(50, 64)), x, None)
        torch.autocast_decrement_nesting()

    def beside() -> None:
        thread = threading.Thread(target=judge)
        thread.start()
        thread.join()

    async with threads(2) as device:
        alone = await device.run(Rank.COMPUTE, 0, gradient, weight, x, int)
        assert torch.equal(alone, await device.run(Rank.COMPUTE, 0, gradient, weight, x, beside))
