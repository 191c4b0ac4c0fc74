"""A loop in a thread of its own: results, errors, interrupts; from inside of a running loop too."""

from __future__ import annotations

import asyncio
import threading

import pytest

from peers.api.background import Background


async def double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


async def test_it_answers_where_a_loop_runs_already() -> None:
    background = Background()
    assert background.call(double(4)) == 8
    background.close()
    background.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "swarm"]


def test_errors_come_out_and_what_still_runs_is_cancelled_at_the_end() -> None:
    background, ended = Background(), []

    async def fails() -> None:
        raise ZeroDivisionError

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    with pytest.raises(ZeroDivisionError):
        background.call(fails())
    background.start(waits())
    background.call(double(1))
    background.close()
    assert ended == [True]
