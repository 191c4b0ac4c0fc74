"""Islands that meet every few steps: whole swarms in memory, with faults, against a single process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from peers.events import Note
from peers.islands.trainers import IslandTrainers
from peers.trainer import TrainerSettings
from swarm.manifest import IslandsSpec, Run, audit_run
from swarm.model.reference import SingleProcess
from tests.model.chain import batch_of, tiny_run
from tests.peers.loops import Swarm, swarm

pytestmark = pytest.mark.virtual_time

STEPS = 6  # two meetings, two steps before each


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def counting(*, stages: int = 2, **spec: Any) -> Run:
    """Whose weights say how often each microbatch of each island was counted, if all go all the way."""
    given = {"count": 2, "local_steps": 2, "outer_lr": 1.0, "outer_momentum": 0.0, **spec}
    run = audit_run(stages=stages, steps=STEPS, microbatches_per_step=8)
    return replace(run, islands=IslandsSpec(**given))


class Text:
    """The bytes that the single process reads too."""

    def __init__(self, batch: Callable[[list[int]], np.ndarray]) -> None:
        self.batch = batch


def train(s: Swarm) -> None:
    """A trainer for each island."""
    for number in range(s.run.islands.count):
        s.add_trainer(f"trainer {number}", island=number)


def assert_counted(s: Swarm) -> None:
    for name, peer in s.live():
        weights = peer.core.compute.state.named_weights().popitem()[1]
        assert (-weights * s.run.M).tolist() == [s.run.trained(STEPS)] * s.run.M, (name, s.story())


async def test_each_microbatch_of_each_island_counts_once() -> None:
    async with swarm(counting()) as s:
        await s.until_serving()
        train(s)
        await s.until_finished(limit_s=60.0)
        assert_counted(s)
        assert (s.undone, s.replayed, s.voids()) == (0, 0, [])


async def test_islands_of_real_weights_equal_a_single_process_to_rounding() -> None:
    run = replace(tiny_run(), steps=STEPS, islands=IslandsSpec(count=2, local_steps=2))
    single = SingleProcess(run, batch_of(run))
    for t in range(run.steps):
        single.step(t)
    reference = single.named_weights()
    async with swarm(run, batches=Text(batch_of(run))) as s:
        train(s)
        await s.until_finished(limit_s=60.0)
        for _, peer in s.live():
            for name, weight in peer.core.compute.state.named_weights().items():
                far = (weight - reference[name]).norm() / reference[name].norm()
                assert far < 1e-9, f"{name} is {far:.2e} away"


# --- faults -------------------------------------------------------------------------------------------------


def names_of(s: Swarm, island: int) -> list[str]:
    cells = range(island * s.run.S, (island + 1) * s.run.S)
    return [name for name in s.peers if name.startswith(tuple(f"s{cell}p" for cell in cells))]


@pytest.mark.parametrize("method", ["work", "part", "report", "held", "chunk", "summary"])
@pytest.mark.parametrize("nth", [1, 3])
async def test_a_replica_that_dies_changes_no_weight(method: str, nth: int) -> None:
    async with swarm(counting()) as s:
        await s.until_serving()
        s.on_call(method, lambda caller, callee: s.kill(callee), nth=nth)
        train(s)
        await s.until_finished(limit_s=120.0)
        assert_counted(s)


@pytest.mark.parametrize("version", [0, 1, 2, 3, 4, 5])
async def test_a_cell_that_is_lost_is_had_from_another_island(version: int) -> None:
    """Both replicas of a stage of an island die: the newcomer starts from the last meeting."""
    async with swarm(counting()) as s:
        await s.until_serving()
        train(s)
        await s.until(lambda: all(p.core.version >= version for n, p in s.live() if n.startswith("s3")))
        s.kill("s3p0")
        s.kill("s3p1")
        s.add_peer("newcomer", 3)
        await s.until_finished(limit_s=200.0)
        assert_counted(s)
        assert len(s.live()) == 7


async def test_an_island_that_is_lost_whole_is_made_again_from_the_others() -> None:
    async with swarm(counting()) as s:
        await s.until_serving()
        train(s)
        await s.until(lambda: all(p.core.version >= 4 for n, p in s.live() if n in names_of(s, 1)))
        for name in names_of(s, 1):
            s.kill(name)
        s.add_peer("new 0", 2)
        s.add_peer("new 1", 3)
        await s.until_finished(limit_s=200.0)
        assert_counted(s)


async def test_islands_that_are_cut_off_from_one_another_wait_for_each_other() -> None:
    async with swarm(counting()) as s:
        await s.until_serving()
        here, there = names_of(s, 0), names_of(s, 1)
        s.network.cut(here, there)
        train(s)
        await s.until(lambda: all(p.core.version == 2 for _, p in s.live()), limit_s=60.0)
        await asyncio.sleep(60.0)
        assert all(p.core.version == 2 for _, p in s.live())
        s.network.heal()
        await s.until_finished(limit_s=120.0)
        assert_counted(s)


async def test_an_island_that_begins_anew_takes_what_the_others_left_behind() -> None:
    """It is at a meeting of which the others, that are done, hold nothing any more."""
    async with swarm(counting()) as s:
        train(s)
        await s.until_finished(limit_s=60.0)
        kept = names_of(s, 0)
        for name in names_of(s, 1):
            s.kill(name)
        s.network.cut(kept)
        s.add_peer("new 0", 2)
        s.add_peer("new 1", 3)
        s.add_trainer("again", island=1)
        await s.until(lambda: all(s.peers[name].core.version == 2 for name in ("new 0", "new 1")))
        s.network.heal()
        await s.until_finished(limit_s=60.0)
        assert_counted(s)
        assert any("where the other islands are" in note.text for note in s.seen(Note))


async def test_a_trainer_stays_with_an_island_that_is_done_until_all_are() -> None:
    """The power fails between the end of one and of the other: the one that was done is trained again."""
    async with swarm(counting()) as s:
        await s.until_serving()
        end = s.network.join("trainer")
        trainers = IslandTrainers(
            s.run, s.batches, end.transport, end.directory, TrainerSettings(window=6), s.events.append
        )
        s.start(end, trainers.run())
        first, second = trainers.trainers
        last = names_of(s, 1)
        await s.until(lambda: all(s.peers[name].core.version == 5 for name in last))
        s.network.cut(last, ["trainer"])
        await s.until(lambda: first.is_done)
        assert not second.is_done
        for name in list(s.peers):
            s.kill(name)
        s.network.heal()
        for cell in range(4):
            s.add_peer(f"new {cell}", cell)
        await s.until_finished(limit_s=200.0)
        assert_counted(s)
        await s.until(lambda: s.tasks["trainer"].done(), limit_s=30.0)
