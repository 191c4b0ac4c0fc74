"""Of many islands each adds up a part of what all have changed, and gives out the sum."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from peers.ports import Answer
from peers.transfer.leases import Snapshot
from swarm.errors import Refused
from swarm.manifest import IslandsSpec
from swarm.model.layout import MET_WEIGHTS, stage_layout
from swarm.model.meeting import added_up, difference_bytes, part_of, told_of
from swarm.model.stage import StageCompute
from swarm.wire.codec import round_trip
from swarm.wire.messages import Opened, OpenHeld
from tests.model.chain import batch_of, tiny_run
from tests.peers.islands.test_islands import (
    Text,
    assert_bits,
    assert_counted,
    counting,
    names_of,
    train,
    trained_alone,
)
from tests.peers.islands.test_meetings import GROUPS, Group, cell, dies, during
from tests.peers.loops import Swarm, swarm
from tests.seeds import cases, some

pytestmark = pytest.mark.virtual_time


@pytest.fixture(autouse=True)
def each_adds_up_a_part(summed_by_parts: None) -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("codec", some(["none", "blockwise8", "hadamard4"], quick=["blockwise8"]))
async def test_sums_of_parts_have_the_bits_of_a_single_process(codec: str) -> None:
    base = tiny_run(dtype="float32", model={"stages": 1})
    run = replace(base, steps=6, islands=IslandsSpec(count=4, local_steps=2, codec=codec))
    async with swarm(run, replicas=1, batches=Text(batch_of(run))) as s:
        train(s)
        await s.until_finished(limit_s=60.0)
        assert_bits(s, trained_alone(run))


SUM = ("gathered", "summed", "took")
DIES = [
    (group, point, (1, 3)[(g + p) % 2])
    for (g, group), (p, point) in product(enumerate(GROUPS), enumerate(SUM))
]
"""Each group at each point; the first that comes there, and the third, take turns."""


def is_quick(group: Group, point: str, nth: int) -> bool:
    return (group, point, nth) == (cell, "summed", 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "point", "nth"),
    cases(DIES, name="{0}-{1}-{2}", quick=is_quick),
)
async def test_whoever_dies_with_a_sum_each_microbatch_counts_once(
    group: Group, point: str, nth: int
) -> None:
    async with swarm(counting()) as s:
        await s.until_serving()
        dead = dies(s, group, point, during(s, "meeting", point), nth)
        train(s)
        await s.until_finished(limit_s=200.0)
        assert dead
        assert_counted(s)


async def test_a_sum_is_had_from_any_island_and_after_its_next_step() -> None:
    async with swarm(counting()) as s:
        await s.until_serving()
        train(s, steps=4)
        await s.until_version(4)
        stranger = s.add_stranger()
        for wanted in ({"shared_with": 1, "part": 0}, {"shared_of": 2}, {"shared_of": 3}):
            question = OpenHeld(run=s.run.island(0).id, t=2, **wanted)
            opened = await stranger.ask("s1p0", "held", question, Opened)
            assert opened.version == 2
        question = OpenHeld(run=s.run.island(0).id, t=2, shared_with=1, part=2)
        with pytest.raises(Refused, match="no part 2 of 2"):
            await stranger.ask("s1p0", "held", question, Opened)


async def test_what_another_island_has_changed_is_had_from_no_third() -> None:
    """Two of four do not reach one another: the others have only what was changed of their own parts."""
    async with swarm(counting(count=4), replicas=1) as s:
        await s.until_serving()
        s.network.cut(names_of(s, 0), names_of(s, 1))
        train(s)
        await s.until_version(2)
        await asyncio.sleep(5.0)
        assert all(peer.core.version == 2 for _, peer in s.live())
        s.network.heal()
        await s.until_finished(limit_s=60.0)
        assert_counted(s)


async def test_a_sum_is_given_out_as_soon_as_it_is_there() -> None:
    async with swarm(counting(steps=11, microbatches=8, local_steps=10)) as s:
        await s.until_serving()
        train(s)
        await s.until_version(10)
        began_s = s.network.loop.now_s
        await s.until_version(11)
        assert s.network.loop.now_s - began_s < 0.2


@pytest.mark.parametrize("number", some([math.inf, math.nan], quick=[math.inf]))
async def test_a_sum_that_is_no_number_is_had_from_another_replica(number: float) -> None:
    async with swarm(counting()) as s:
        await s.until_serving()
        say_of_sums(s, "s2p0", number)
        train(s)
        await s.until_finished(limit_s=200.0)
        assert_counted(s)


def say_of_sums(s: Swarm, name: str, number: float) -> None:
    """This peer gives out such a sum of its island's part."""
    leases = s.peers[name]._states
    honest = leases.lend

    async def lend(reader: str, pool: str, what: Any, content: Snapshot, lent: torch.Tensor) -> Answer:
        if what[1] >= s.run.islands.count:
            told = torch.full_like(lent.view(torch.float64), number).view(torch.uint8)
            content = content._replace(tensors={"gradient": told})
        return await honest(reader, pool, what, content, lent)

    leases.lend = lend  # type: ignore[method-assign]


@pytest.mark.parametrize("codec", ["none", "blockwise8", "hadamard4"])
@pytest.mark.parametrize("count", [2, 3, 64])
def test_parts_have_each_number_once_and_none_of_a_block_alone(codec: str, count: int) -> None:
    """What all have changed, summed part by part, is what it is as a whole; some parts may be empty."""
    base = tiny_run(dtype="float32", model={"head": "tied"})
    batch = replace(base.batch, microbatches_per_step=192)
    spec = IslandsSpec(count=count, local_steps=1, codec=codec)
    run = replace(base, batch=batch, steps=2, islands=spec)
    layout = stage_layout(run, 0)
    draw = torch.Generator().manual_seed(count)
    changed = {
        name: torch.randn(end - start, generator=draw) for name, (start, end, _) in layout.terms.items()
    }
    state = StageCompute(run.island(0), 0).state
    whole = torch.zeros(layout.sum_numel)
    for name, (start, end, _) in layout.terms.items():
        whole[start:end] = changed[name]
    met = state._besides[MET_WEIGHTS]
    met.copy_(state.weights(0)).add_(whole)
    told = state.difference()
    parts = [part_of(run, layout, told, part) for part in range(count)]
    assert sum(part.numel() for part in parts) == told.numel() == difference_bytes(run, layout)
    found = torch.zeros(layout.sum_numel)
    for number, part in enumerate(parts):
        one = told_of(run, layout, added_up(run, layout, [part, part], number), number)
        added_up(run, layout, [one], number, are_sums=True, total=found)
    assert torch.equal(found, added_up(run, layout, [told, told]))
    for name, (start, end, _) in layout.terms.items():
        assert torch.equal(found[start:end], 2 * round_trip((met - state.weights(0))[start:end], codec)), name
