"""Virtual time: waiting costs none, the same program does the same, and nothing of the outside takes part."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time

import pytest

from peers.clock import now_s, unix_s
from peers.sim.loop import BEGAN_UNIX_S, Deadlock, VirtualLoop, run_virtual
from peers.waiting import happens


def test_waiting_moves_the_clock_and_takes_no_time() -> None:
    async def main() -> tuple[float, float]:
        await asyncio.sleep(3600.0)
        assert not await happens(asyncio.Event(), 0.25)
        return now_s(), unix_s()

    began = time.monotonic()
    assert run_virtual(main()) == (3600.25, BEGAN_UNIX_S + 3600.25)
    assert time.monotonic() - began < 30


def test_outside_of_it_the_clock_is_the_systems() -> None:
    async def main() -> None:
        assert abs(now_s() - time.monotonic()) < 30 and abs(unix_s() - time.time()) < 30

    asyncio.run(main())
    assert abs(now_s() - time.monotonic()) < 30, "without a loop, as on a device thread"


def test_a_program_that_nothing_can_wake_ends_and_says_where_it_waits() -> None:
    async def waits_for_nobody() -> None:
        await asyncio.get_running_loop().create_future()

    async def main() -> None:
        await asyncio.sleep(2.0)
        await asyncio.gather(waits_for_nobody(), asyncio.sleep(5.0))

    with pytest.raises(Deadlock, match=r"at 7\.000 s nothing is scheduled(.|\n)*waits_for_nobody at .*\.py"):
        run_virtual(main())


def test_worker_threads_run_on_the_loop_and_take_virtual_time() -> None:
    async def main() -> tuple[int, float]:
        with pytest.raises(KeyError):
            await asyncio.to_thread({}.pop, "absent")
        return await asyncio.to_thread(threading.get_ident), now_s()

    assert run_virtual(main(), thread_s=lambda: 0.5) == (threading.get_ident(), 1.0)


def test_a_real_thread_is_refused() -> None:
    refused: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def meddle() -> None:
            try:
                loop.call_soon_threadsafe(print)
            except AssertionError as error:
                refused.append(str(error))

        thread = threading.Thread(target=meddle)
        thread.start()
        thread.join()

    run_virtual(main())
    assert refused and "a thread took part" in refused[0]


def test_sockets_are_refused() -> None:
    here, there = socket.socketpair()

    async def main() -> None:
        asyncio.get_running_loop().add_reader(here, print)

    with here, there, pytest.raises(NotImplementedError):
        run_virtual(main())


def order_of_tasks_in_sets(made: list[asyncio.Future[None]]) -> list[int]:
    """How sets of many tasks and futures, `made` and ended by chance, are iterated over."""
    seen: list[int] = []

    async def main() -> None:
        rng = random.Random(1)
        loop = asyncio.get_running_loop()
        waiting: set[asyncio.Future[None]] = set()
        for number in range(200):
            task = asyncio.create_task(asyncio.sleep(rng.random()), name=str(number))
            future = loop.create_future()
            loop.call_later(rng.random(), future.set_result, None)
            waiting |= {task, future}
            made.extend((task, future))
            if rng.random() < 0.3:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                seen.extend(map(hash, [*done, *waiting]))
        assert isinstance(loop, VirtualLoop)

    run_virtual(main())
    return seen


def test_sets_of_tasks_have_the_same_order_wherever_they_lie_in_memory() -> None:
    made: list[asyncio.Future[None]] = []  # as long as these are there, others lie elsewhere
    first = order_of_tasks_in_sets(made)
    assert order_of_tasks_in_sets(made) == first and len(set(first)) > 300


@pytest.mark.virtual_time
async def test_a_wait_with_a_limit_ends_by_the_event_the_limit_or_a_cancellation_and_leaves_nothing() -> None:
    event, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.call_later(1.0, event.set)
    assert not await happens(event, 0.5) and loop.time() == 0.5
    assert await happens(event, 60.0) and loop.time() == 1.0
    assert await happens(event, 0.0)
    event.clear()
    assert not await happens(event, -1.0)
    waiting = asyncio.ensure_future(happens(event, 60.0))
    await asyncio.sleep(0.1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    event.set()  # with no one left who waits
    assert await happens(event, 1.0) and loop.time() == pytest.approx(1.1)
