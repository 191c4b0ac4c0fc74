"""Processes die at each fault point of the steps and meetings of islands, one by one and by whole groups."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import product

import pytest
import torch

from peers.sim.loop import WORLD
from swarm.ids import Generation
from tests.peers.islands.test_islands import assert_counted, counting, names_of, train
from tests.peers.loops import Swarm, When, swarm
from tests.seeds import cases

pytestmark = pytest.mark.virtual_time

STEP = ("forward", "backward", "frozen", "reduce", "prepared", "took")
MEETING = ("meeting", "encoded", "given", "gathered", "prepared", "took", "kept")
FIRST_MEETING = 2
"""Its step; the second one ends the run."""

Group = Callable[[Swarm, str], list[str]]
"""Whom a fault takes with the peer that came to the point."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def cell_of(name: str) -> int:
    """Of a peer named `s<cell>p<replica>`."""
    return int(name[1 : name.index("p")])


def one(_: Swarm, name: str) -> list[str]:
    return [name]


def cell(s: Swarm, name: str) -> list[str]:
    return [peer for peer in s.peers if cell_of(peer) == cell_of(name)]


def island(s: Swarm, name: str) -> list[str]:
    return names_of(s, cell_of(name) // s.run.S)


def stage(s: Swarm, name: str) -> list[str]:
    return [peer for peer in s.peers if cell_of(peer) % s.run.S == cell_of(name) % s.run.S]


def everybody(s: Swarm, _: str) -> list[str]:
    return list(s.peers)


def during(s: Swarm, what: str, point: str) -> When:
    """Whether a peer that comes to a point is at the first meeting, or in the step after it."""
    version = FIRST_MEETING + (what == "step") + (point in ("took", "kept"))
    return lambda name: s.peers[name].core.version == version


GROUPS = (one, cell, island, stage, everybody)


def dies(s: Swarm, group: Group, point: str, when: When, nth: int) -> list[str]:
    """Who will have died, once it has happened. Where a whole cell dies a newcomer takes its place."""
    dead: list[str] = []

    def act(name: str) -> None:
        dead.extend(peer for peer in group(s, name) if not s.network.is_dead(peer))
        for peer in dead:
            s.kill(peer)
        for lost in sorted({cell_of(peer) for peer in dead}):
            if not any(cell_of(peer) == lost for peer, _ in s.live()):
                s.network.loop.call_later(1.0, s.add_peer, f"s{lost}pnew", lost, context=WORLD)

    s.at_point(point, act, nth=nth, when=when)
    return dead


EVERY = [
    *(
        ("step", point, group, 2)
        for (p, point), (g, group) in product(enumerate(STEP), enumerate((one, cell, island, stage)))
        if (p + g) % 2
    ),
    *(
        ("meeting", point, group, (1, 4)[(p + g) % 2])
        for (p, point), (g, group) in product(enumerate(MEETING), enumerate(GROUPS))
    ),
]
"""Each point of a step with two groups, and of a meeting with each: the first that comes there, and the
fourth, take turns."""


def is_quick(what: str, point: str, group: Group, nth: int) -> bool:
    """In a step the death of a cell, at a meeting of one peer and of an island."""
    return (what, point, group) in (
        ("step", "frozen", cell),
        ("meeting", "meeting", one),
        ("meeting", "prepared", island),
    )


@pytest.mark.parametrize(
    ("what", "point", "group", "nth"),
    cases(EVERY, name="{2} of {0} at {1} {3}", quick=is_quick),
)
async def test_whoever_dies_at_whatever_point_of_islands_each_microbatch_counts_once(
    what: str, point: str, group: Group, nth: int
) -> None:
    """An island none of whose peers dies begins nothing again."""
    async with swarm(counting()) as s:
        await s.until_serving()
        dead = dies(s, group, point, during(s, what, point), nth)
        train(s)
        await s.until_finished(limit_s=200.0)
        assert dead, f"nobody passed the point {point!r}"
        assert_counted(s)
        for name, peer in s.live():
            if group is one or not set(island(s, name)) & set(dead):
                assert peer.core.generation == Generation()


@pytest.mark.slow
async def test_islands_that_are_cut_off_for_ten_meetings_miss_none() -> None:
    """They take no step until they reach one another again, for as long as ten meetings and the steps between
    them take otherwise.
    """
    run = counting(steps=18)
    window = run.islands.local_steps + 1
    async with swarm(run) as s:
        await s.until_serving()
        train(s)
        await s.until_version(window)
        began_s = s.network.loop.now_s
        await s.until_version(2 * window)
        usual_s = s.network.loop.now_s - began_s
        s.network.cut(names_of(s, 0), names_of(s, 1))
        await asyncio.sleep(10.0 * usual_s)
        at = {peer.core.version for _, peer in s.live()}
        assert at == {3 * window - 1}  # all are at the next meeting, and wait there
        s.network.heal()
        await s.until_finished(limit_s=120.0)
        assert_counted(s)


@pytest.mark.slow
async def test_islands_that_are_cut_off_at_each_of_ten_meetings_miss_none() -> None:
    """Each time as one of them comes there, now from all of the other and now from half."""
    async with swarm(counting(steps=30)) as s:
        await s.until_serving()
        cuts = list[list[str]]()

        def cut(_: str) -> None:
            there = names_of(s, 1)[:: 1 + len(cuts) % 2]
            cuts.append(there)
            number = s.network.cut(names_of(s, 0), there)
            s.network.loop.call_later(1.0 + len(cuts), s.network.heal, number, context=WORLD)

        for t in range(2, 30, 3):
            s.at_point("meeting", cut, when=lambda name, t=t: s.peers[name].core.version == t)
        train(s)
        await s.until_finished(limit_s=400.0)
        assert len(cuts) == 10
        assert_counted(s)
