"""A peer is banned in the middle of a step, whatever it has and does then: each microbatch counts once, and
the run goes on. Others hear of it one after the other, and a liar goes on as if it had not been banned.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from itertools import product

import pytest
import torch

from peers.sim.loop import WORLD
from swarm.manifest import audit_run
from tests.peers.loops import Swarm, swarm
from tests.peers.sybils import TRAINER, admitting, give_voice
from tests.seeds import cases

pytestmark = pytest.mark.virtual_time

RUN = admitting(audit_run(stages=2, steps=8, microbatches_per_step=8))
PEERS = tuple(f"s{stage}p{replica}" for stage in range(2) for replica in range(3))
NEWCOMERS = ("new0", "new1")
HEARS_S = 30.0
"""Until when all have heard of a ban."""
JOB_S = 0.2
"""A step takes seconds: some hear of a ban several steps after others."""
LIMIT_S = 400.0


@pytest.fixture(autouse=True)
def usual() -> None:
    torch.set_num_threads(1)


class Bans:
    """Bans that each peer hears of at its own time."""

    def __init__(self, s: Swarm, dice: random.Random, within_s: float, *, obeys: bool) -> None:
        """`obeys`: the programs of those that are banned end when they hear of it."""
        self._s, self._dice, self._within_s, self._obeys = s, dice, within_s, obeys
        self.banned: list[str] = []

    def ban(self, name: str) -> None:
        if name in self.banned:
            return
        self.banned.append(name)
        for other in list(self._s.network.peers):
            later_s = self._dice.uniform(0.0, self._within_s)
            self._s.network.loop.call_later(later_s, self._heard, name, other, context=WORLD)

    def _heard(self, name: str, other: str) -> None:
        if other != name:
            self._s.network.ban(name, other)
        elif self._obeys and not self._s.network.is_dead(name):
            self._s.kill(name)

    def honest(self) -> list[str]:
        return [name for name, _ in self._s.live() if name not in self.banned]

    async def until_finished(self) -> None:
        s = self._s

        def done() -> bool:
            names = self.honest()
            return all(s.peers[name].core.version >= s.run.steps for name in names)

        await s.until(done, limit_s=LIMIT_S)
        names, matrix = self.honest(), s.count_matrix()
        assert {s.peers[name].stage for name in names} == set(range(s.run.S))
        wrong = {name: matrix[name].tolist() for name in names if not (matrix[name] == s.run.steps).all()}
        assert not wrong, f"{wrong}\n{s.story()}"


def hear_of_ends(s: Swarm) -> None:
    """Peers hear of connections that end, as in earnest."""
    for name, peer in s.peers.items():
        s.network.peers[name].transport.on_gone = peer.peer_gone


def add_newcomers(s: Swarm, stage: int) -> None:
    for name in NEWCOMERS:
        s.add_peer(name, stage)


async def begun(s: Swarm) -> None:
    give_voice(s, *PEERS)
    hear_of_ends(s)
    await s.until_serving()
    s.add_trainer(TRAINER)
    await s.until_version(2)


POINTS = ("forward", "backward", "frozen", "reduce", "prepared", "took")
HOW = [*product((True, False), (0.0, HEARS_S))]
"""Whether programs that are banned end when they hear of it, and within which time all have."""
WHO = [
    (point, *how, (p + h) % 2 == 1, (p + h // 2) % 2)
    for (p, point), (h, how) in product(enumerate(POINTS), enumerate(HOW))
]
"""Each point with each of these ways, and at each point both who leads and who does not with both seeds."""


def is_quick(point: str, obeys: bool, within_s: float, leads: bool, seed: int) -> bool:
    """A coordinator that goes on."""
    return (point, obeys, within_s) == ("frozen", False, HEARS_S)


@pytest.mark.parametrize(
    ("point", "obeys", "within_s", "leads", "seed"),
    cases(WHO, name="{0}-{1}-{2}-{3}-{4}", quick=is_quick),
)
async def test_who_is_banned_at_any_point_of_a_step_takes_nothing_along(
    point: str, obeys: bool, within_s: float, leads: bool, seed: int
) -> None:
    """`leads`: it coordinates its stage. With three replicas each owns a part of the sum."""
    async with swarm(RUN, replicas=3, seed=seed, job_s=JOB_S) as s:
        await begun(s)
        bans = Bans(s, random.Random(seed), within_s, obeys=obeys)

        def is_meant(name: str) -> bool:
            peer = s.peers[name]
            return (name == peer.coordination.coordinator(peer.stage)) == leads

        s.at_point(point, bans.ban, nth=1 + seed, when=is_meant)
        await bans.until_finished()
        assert len(bans.banned) == 1


@pytest.mark.parametrize(
    ("obeys", "within_s", "stage", "come_later"),
    cases(
        [(*how, stage, (h + stage) % 2 == 0) for (h, how), stage in product(enumerate(HOW), (0, 1))],
        name="{0}-{1}-{2}-{3}",
        quick=lambda *case: False,
    ),
)
async def test_all_with_voice_of_a_stage_are_banned_and_newcomers_go_on(
    stage: int, obeys: bool, within_s: float, come_later: bool
) -> None:
    """The word of each of those counts alike. Where none was there the run begins again, without a keeper."""
    steps = 24 if come_later else RUN.steps  # more than those take that have not heard of the bans yet
    async with swarm(replace(RUN, steps=steps), replicas=3, job_s=JOB_S) as s:
        if not come_later:
            add_newcomers(s, stage)
        await begun(s)
        bans = Bans(s, random.Random(1), within_s, obeys=obeys)
        for name in s.of_stage(stage):
            if name in PEERS:
                bans.ban(name)
        if come_later:
            await asyncio.sleep(within_s)
            add_newcomers(s, stage)
            for name, newcomer in product(bans.banned, NEWCOMERS):
                s.network.ban(name, newcomer)
            hear_of_ends(s)
        await bans.until_finished()
        assert len(bans.banned) == 3
