"""A trainer that is the only one left who knows how far the run was. Found by seed 12 of the simulation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from peers.events import Note, RolledBack, StepDone
from peers.trainer.samples import samples_of
from swarm.errors import NotNow
from swarm.manifest import audit_run
from tests.peers.loops import Zeros, swarm

pytestmark = pytest.mark.virtual_time


async def test_all_peers_die_and_others_begin_again_while_the_trainer_lives() -> None:
    """Nothing tells the newcomers of a later generation: the trainer has to see that the run is where they
    are."""
    run = audit_run(stages=2, steps=6, microbatches_per_step=4)
    async with swarm(run, stages=2, replicas=1) as built:
        await built.until_serving()
        built.add_trainer("trainer")
        await built.until_version(2)
        await built.until(lambda: len(built.seen(StepDone)) >= 2)  # the trainer knows of it
        for name, _ in built.live():
            built.kill(name)
        for stage in range(run.S):
            built.add_peer(f"late{stage}", stage)
        await built.until_finished()
        built.assert_each_counted_once()
        assert [event.stage for event in built.seen(RolledBack)] == [-1]


class Away(Zeros):
    """Data whose server does not answer every other time."""

    asked = 0

    def batch(self, offsets: list[int]) -> np.ndarray:
        self.asked += 1
        if self.asked % 2:
            raise NotNow("a shard of the data cannot be had now", retry_after_s=5.0)
        return super().batch(offsets)


async def test_a_trainer_whose_data_cannot_be_had_now_tries_again() -> None:
    run = audit_run(stages=2, steps=2, microbatches_per_step=4)
    async with swarm(run, stages=2, replicas=1) as built:
        await built.until_serving()
        built.add_trainer("trainer", batches=(data := Away(run)))
        await built.until_finished()
        built.assert_each_counted_once()
        assert data.asked >= 16


class Slow(Zeros):
    """At a server that lets each wait, and says nothing in the end."""

    is_back = False

    def has(self, offsets: list[int]) -> bool:
        return self.is_back

    def batch(self, offsets: list[int]) -> np.ndarray:
        if not self.has(offsets):
            raise NotNow("a shard of the data cannot be had now", retry_after_s=5.0)
        return super().batch(offsets)


async def test_no_peer_is_charged_with_the_time_in_which_data_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def waited(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if getattr(function, "func", None) is samples_of:
            await asyncio.sleep(20.0)
            return function(*args)
        return await to_thread(function, *args, **named)

    run, to_thread = audit_run(stages=2, steps=2, microbatches_per_step=4), asyncio.to_thread
    async with swarm(run, stages=2, replicas=1) as built:
        await built.until_serving()
        monkeypatch.setattr(asyncio, "to_thread", waited)
        trainer = built.add_trainer("trainer", batches=(data := Slow(run)))
        await asyncio.sleep(50.0)
        data.is_back = True
        await built.until_finished()
        built.assert_each_counted_once()
        backoff = trainer._router.backoff
        assert [backoff.cost_s(peer, t=1) for peer in built.peers] == [0.0, 0.0]


class Unkept(Zeros):
    """Far away, and the disk of the cache is full."""

    in_thread = False

    def has(self, offsets: list[int]) -> bool:
        return False

    def batch(self, offsets: list[int]) -> np.ndarray:
        assert self.in_thread, "it is fetched once more, which may take long"
        return super().batch(offsets)


async def test_what_a_full_cache_disk_does_not_keep_is_fetched_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = audit_run(stages=2, steps=2, microbatches_per_step=4)
    data, to_thread = Unkept(run), asyncio.to_thread

    async def noted(function: Callable[..., Any], *args: Any) -> Any:
        def job() -> Any:
            data.in_thread = True
            try:
                return function(*args)
            finally:
                data.in_thread = False

        return await to_thread(job)

    async with swarm(run, stages=2, replicas=1) as built:
        await built.until_serving()
        monkeypatch.setattr(asyncio, "to_thread", noted)
        built.add_trainer("trainer", batches=data)
        await built.until_finished()
        built.assert_each_counted_once()


async def test_peers_that_wait_for_a_trainer_say_so_and_how_one_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("peers.start_line.program", lambda: ".venv/bin/swarm")
    run = audit_run(stages=2, steps=6, microbatches_per_step=4)
    async with swarm(run, stages=2, replicas=1) as built:
        await built.until_serving()
        built.add_peer("third", 1, addresses=("/ip4/192.0.2.7/tcp/1/p2p/third",))
        await asyncio.sleep(20.0)
        said = [event.words() for event in built.seen(Note) if "waits for a trainer" in event.words()]
        assert len(said) == 3
        line = said.pop().partition("\n    ")[2]
        assert line == f".venv/bin/swarm train --run {run.id} --join /ip4/192.0.2.7/tcp/1/p2p/third"
        built.add_trainer("trainer")
        built.add_peer("fourth", 1)
        await asyncio.sleep(20.0)
        assert sum("waits for a trainer" in event.words() for event in built.seen(Note)) == 3


async def test_without_stage_0_no_peer_claims_that_there_is_no_trainer() -> None:
    run = audit_run(stages=2, steps=6, microbatches_per_step=4)
    async with swarm(run, stages=2, replicas=1) as built:
        await built.until_serving()
        built.kill_and_forget("s0p0")
        await asyncio.sleep(40.0)
        assert not [event for event in built.seen(Note) if "waits for a trainer" in event.words()]
        built.add_peer("again", 0)
        await asyncio.sleep(40.0)
        assert [event for event in built.seen(Note) if "waits for a trainer" in event.words()]
