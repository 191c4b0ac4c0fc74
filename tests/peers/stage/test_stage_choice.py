from __future__ import annotations

import asyncio

import pytest

from peers.programs.stage_choice import choose_stage, unserved
from swarm.manifest import Run, audit_run, demo_run
from swarm.records import PeerRecord, State
from tests.peers.network import CalmNetwork

pytestmark = pytest.mark.virtual_time

RUN = audit_run(stages=3)


async def chosen(network: CalmNetwork, names: list[str], run: Run = RUN) -> dict[str, int]:
    async def one(name: str) -> int:
        peer = network.join(name)
        return await choose_stage(name, run, peer.directory, (), "")

    return dict(zip(names, await asyncio.gather(*(one(name) for name in names)), strict=True))


async def test_those_who_start_together_do_not_all_take_the_same_stage() -> None:
    network = CalmNetwork()
    stages = await chosen(network, [f"new{i}" for i in range(6)])
    assert sorted(stages.values()) == [0, 0, 1, 1, 2, 2]
    # Who comes after them sees where they go, though they do not serve yet.
    records = {r.peer: r for r in network.peers["new0"].directory.peers()}
    assert {name: records[name].stage for name in stages} == stages
    assert {record.state for record in records.values()} == {"joining"}
    await network.close()


async def test_cards_that_start_beside_strangers_come_next_to_one_another() -> None:
    """Ids in turn, of two machines: each of all computes that."""
    network, run = CalmNetwork(), audit_run(stages=4)

    async def one(name: str, machine: str) -> int:
        return await choose_stage(name, run, network.join(name).directory, [], machine)

    machines = ["first", "second"] * 2
    assert await asyncio.gather(*(one(f"new{i}", at) for i, at in enumerate(machines))) == [0, 2, 1, 3]
    assert await one("far", "") == 0, "it hands over to nobody in memory"
    assert await one("more", "second") == 1, "next to stage 2"
    await network.close()


async def test_who_comes_where_a_stage_is_empty_takes_it() -> None:
    network = CalmNetwork()
    for stage in (0, 2):
        there = network.join(f"old{stage}")
        await there.directory.announce(
            PeerRecord(peer=f"old{stage}", run=RUN.id, stage=stage, state="serving", version=1, speed=1.0)
        )
    assert await chosen(network, ["new"], demo_run(stages=3)) == {"new": 1}
    await network.close()


def test_a_stage_is_unserved_until_a_peer_is_on_its_way_to_it() -> None:
    def record(stage: int, state: State) -> PeerRecord:
        return PeerRecord(peer=f"{stage} {state}", run=RUN.id, stage=stage, state=state, version=0)

    assert unserved([], RUN) == [0, 1, 2]
    assert unserved([record(0, "joining"), record(1, "leaving")], RUN, [2]) == [1]
    assert unserved([record(0, "serving"), record(1, "paused"), record(2, "joining")], RUN) == []
