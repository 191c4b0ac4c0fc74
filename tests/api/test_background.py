"""A loop in a thread of its own: results, errors, interrupts; from inside of a running loop too."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from peers.api.background import Background, all_as_in_peers
from swarm.manifest import demo_run
from swarm.model.same_bits import use_threads_of


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


async def flushes() -> bool:
    return sys.float_info.min / 2 == 0


def test_a_peer_keeps_small_numbers_that_its_program_takes_for_none() -> None:
    """A new thread does so as the one that starts it: each of them rounded otherwise than other peers."""
    torch.set_flush_denormal(True)
    try:
        background = Background()
        assert not background.call(flushes()) and asyncio.run(flushes())
        background.close()
    finally:
        torch.set_flush_denormal(False)


WAITING = ("background.py", "contextlib.py", "queue.py", "_base.py", "threading.py")
"""Files of Python code that waits for results, here and in the standard library."""


class InterruptedAt(Background):
    """An interrupt comes at the n-th line of Python that waits for a result, wherever that is."""

    def __init__(self, line: int) -> None:
        super().__init__()
        self.left, self.waits = line, False

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        future = super().start(work)
        self.waits = True
        return future

    def line(self, frame: FrameType, event: str, arg: object) -> Any:
        # In a finaliser, which runs wherever it pleases, it would be lost, as any exception is.
        self.left -= self.waits and Path(frame.f_code.co_filename).name in WAITING
        if not self.left:
            sys.settrace(None)
            raise KeyboardInterrupt
        return self.line


def test_an_interrupt_wherever_it_comes_leaves_the_loop_alive() -> None:
    """Else no process is ended, and Ctrl-C hangs."""
    before, lines, over = sys.gettrace(), 0, False
    while not over:
        lines += 1
        background = InterruptedAt(lines)
        sys.settrace(background.line)
        try:
            over = background.call(double(1)) == 2
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert Background.start(background, double(4)).result(timeout=60) == 8, f"interrupted at line {lines}"
        background.close()
    assert lines > 10


def test_threads_that_start_after_the_last_peer_has_ended_have_as_many_as_the_program() -> None:
    """The second peer's thread began with the number that the first had set, and left it for good."""

    def threads_of_a_new_thread() -> int:
        with ThreadPoolExecutor(1) as new:
            return new.submit(torch.get_num_threads).result()

    kept = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with ThreadPoolExecutor(1) as computes, ThreadPoolExecutor(1) as joins:
            first, second = all_as_in_peers(), all_as_in_peers()
            first.__enter__()
            computes.submit(torch.set_num_threads, 1).result()
            joins.submit(second.__enter__).result()
            first.__exit__(None, None, None)
            assert torch.get_num_threads() == 3
            computes.submit(torch.set_num_threads, 1).result()
            joins.submit(second.__exit__, None, None, None).result()
            assert (threads_of_a_new_thread(), torch.get_num_threads()) == (3, 3)
    finally:
        torch.set_num_threads(kept)


def test_what_torch_was_told_comes_back_when_the_last_has_ended_that_computes_as_a_peer() -> None:
    """Of two peers in one program the first that leaves took what the other one computes with."""
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with sdpa_kernel(SDPBackend.MATH), contextlib.ExitStack() as one, contextlib.ExitStack() as other:
            one.enter_context(all_as_in_peers())
            other.enter_context(all_as_in_peers())
            for left in (one, other):
                assert torch.get_default_dtype() == torch.float32 and torch.backends.cuda.flash_sdp_enabled()
                left.close()
            assert torch.get_default_dtype() == torch.float64
            assert not torch.backends.cuda.flash_sdp_enabled()
    finally:
        torch.set_default_dtype(kept)


def test_what_a_run_of_several_threads_tells_torch_is_told_back() -> None:
    """That of uninitialized memory was not: a program that looks for errors with it found none any more."""
    mode = torch.get_deterministic_debug_mode()
    threads, room = torch.get_num_threads(), cast(Any, torch.utils.deterministic)
    run = demo_run(steps=1)
    with all_as_in_peers():
        use_threads_of(replace(run, batch=replace(run.batch, microbatch_threads=2)))
        assert not room.fill_uninitialized_memory and torch.get_deterministic_debug_mode() != mode
    assert room.fill_uninitialized_memory and torch.get_deterministic_debug_mode() == mode
    assert torch.get_num_threads() == threads
