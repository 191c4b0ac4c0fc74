"""A batch warm-up: the first steps have fewer microbatches, and each still counts once."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from peers.events import StepDone
from swarm.ids import Microbatch
from swarm.manifest import Run, audit_run
from swarm.model.reference import SingleProcess
from tests.model.chain import batch_of, tiny_run, weights_of
from tests.peers.islands.test_islands import Text
from tests.peers.loops import Swarm, swarm

pytestmark = pytest.mark.virtual_time

SIZES = [1, 2, 3, 5, 6, 8, 8]
"""Microbatches of each step."""


def warming(run: Run) -> Run:
    batch = replace(run.batch, microbatches_per_step=8, warmup_steps=5, warmup_microbatches=1)
    return replace(run, batch=batch, steps=len(SIZES))


def assert_counted(s: Swarm) -> None:
    due = [sum(s.run.M / size for size in SIZES if m < size) for m in range(s.run.M)]
    for name, peer in s.live():
        weights = weights_of(peer.core.compute).popitem()[1]
        assert (-weights * s.run.M).tolist() == pytest.approx(due, rel=1e-12), (name, s.story())


async def test_each_microbatch_of_a_smaller_step_counts_once_though_replicas_die() -> None:
    run = warming(audit_run(stages=2, steps=1, microbatches_per_step=8))
    assert [run.microbatches(t) for t in range(run.steps)] == SIZES
    for method, nth in [("", 1), ("work", 4), ("part", 2), ("held", 3)]:
        async with swarm(run) as s:
            await s.until_serving()
            if method:
                s.on_call(method, lambda caller, callee, s=s: s.kill(callee), nth=nth)
            s.add_trainer("trainer")
            await s.until_finished(limit_s=200.0)
            assert_counted(s)
            if not method:
                assert sum(peer.core.computed for peer in s.peers.values()) == run.S * sum(SIZES)
                await s.until(lambda s=s: len(s.seen(StepDone)) == len(SIZES))
                counted = [len(event.losses) for event in s.seen(StepDone)]
                assert counted == SIZES


@pytest.mark.slow
async def test_weights_of_a_run_that_warms_up_are_those_of_a_single_process() -> None:
    run = warming(tiny_run())
    single = SingleProcess(run, batch_of(run))
    assert [len(single.step(t)) for t in range(run.steps)] == SIZES
    reference = single.named_weights()
    async with swarm(run, batches=Text(batch_of(run))) as s:
        s.add_trainer("trainer")
        await s.until_finished(limit_s=60.0)
        for _, peer in s.live():
            for name, weight in weights_of(peer.core.compute).items():
                assert torch.linalg.vector_norm(weight - reference[name]) < 1e-9 * reference[name].norm()


async def test_what_a_smaller_step_does_not_have_is_refused() -> None:
    run = warming(audit_run(stages=1, steps=1, microbatches_per_step=8))
    async with swarm(run, replicas=1) as s:
        await s.until_serving()
        (peer,) = s.peers.values()
        with pytest.raises(Exception, match=r"no microbatch \(1, 2\) in a run of 7 steps"):
            peer.core.compute._held_version(Microbatch(1, 2))


def test_steps_grow_evenly_and_what_came_before_is_known_at_any_step() -> None:
    batch = warming(tiny_run()).batch
    before = list(itertools.accumulate(map(batch.microbatches, range(40)), initial=0))
    assert [batch.microbatches_before(t) for t in range(41)] == before
    long = replace(batch, microbatches_per_step=8192, warmup_steps=100_000, warmup_microbatches=3)
    assert long.microbatches_before(200_000) == long.microbatches_before(100_000) + 100_000 * 8192
