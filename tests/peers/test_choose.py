from __future__ import annotations

import asyncio
import random

import pytest

from peers import choose
from peers.choose import choose_stage, planning_job
from peers.lines import LineProber
from peers.ports import Line
from peers.whereabouts import Whereabouts, measure_place
from swarm.plan.places import UNSURE, Place, apart_s
from swarm.records import PeerRecord
from swarm.run import Run, counting_run, demo_run
from tests.peers.memory_net import MemoryNetwork

RUN = counting_run(stages=3)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "OTHERS_S", 0.3)


async def chosen(network: MemoryNetwork, names: list[str], run: Run = RUN) -> dict[str, int]:
    async def one(name: str) -> int:
        peer = network.add(name)
        stage, _ = await choose_stage(name, run, peer.transport, peer.directory, ())
        return stage

    return dict(zip(names, await asyncio.gather(*(one(name) for name in names)), strict=True))


async def test_those_who_start_together_do_not_all_take_the_same_stage(soon: None) -> None:
    network = MemoryNetwork()
    stages = await chosen(network, [f"new{i}" for i in range(6)])
    assert sorted(stages.values()) == [0, 0, 1, 1, 2, 2]
    # Who comes after them sees where they go, though they do not serve yet.
    records = {r.peer: r for r in network.records_seen_by("new0")}
    assert {name: records[name].stage for name in stages} == stages
    assert {record.state for record in records.values()} == {"joining"}
    await network.close()


async def test_who_comes_where_a_stage_is_empty_takes_it(soon: None) -> None:
    network = MemoryNetwork()
    for stage in (0, 2):
        there = network.add(f"old{stage}")
        await there.directory.announce(
            PeerRecord(peer=f"old{stage}", run=RUN.id, stage=stage, state="serving", version=1, speed=1.0)
        )
    assert await chosen(network, ["new"], demo_run(stages=3)) == {"new": 1}
    await network.close()


async def test_a_newcomer_measures_where_it_is_from_peers_that_know_their_place() -> None:
    network = MemoryNetwork()
    records = []
    for i in range(10):
        old = network.add(f"old{i}")
        LineProber(RUN.id, old.transport, old.directory, random.Random(i))
        place = Place(0.01 * i, 0.0, 0.001, 0.1).numbers() if i < 6 else (0, 0, 0, 5000)
        records.append(
            PeerRecord(peer=f"old{i}", run=RUN.id, stage=0, state="serving", version=0, place=place)
        )
    new = network.add("new")
    new.transport.lines.update({f"old{i}": Line(rtt_s=0.02 + 0.01 * i) for i in range(10)})
    place = await measure_place("new", RUN.id, new.transport, records, random.Random(0))
    assert place is not None and place.error < UNSURE
    assert sum(network.peers[f"old{i}"].transport.calls["line"] for i in range(6)) == 12
    assert not any(network.peers[f"old{i}"].transport.calls["line"] for i in range(6, 10))
    assert await measure_place("new", RUN.id, new.transport, [], random.Random(0)) is None
    await network.close()


async def test_the_first_two_peers_of_a_run_find_places_as_far_apart_as_they_are() -> None:
    network = MemoryNetwork()
    sides = {name: network.add(name).transport for name in "ab"}
    for name, other in ("ab", "ba"):
        sides[name].lines[other] = Line(rtt_s=0.05, bandwidth_bps=8e6)
    where = {name: Whereabouts(name, side) for name, side in sides.items()}
    for _ in range(60):  # each sees what the other has published
        told = {
            name: record_of(name, here.place if here.place != Place() else None)
            for name, here in where.items()
        }
        for here in where.values():
            here.look(told.get)
    assert apart_s(where["a"].place, where["b"].place) == pytest.approx(0.05, rel=0.1)
    assert where["a"].place.error < 0.5 * UNSURE
    assert (where["a"].widest_bps, where["a"].in_flight_bytes) == (8e6, 50e3)
    await network.close()


async def test_who_has_a_line_but_no_record_any_more_moves_nobody_and_its_line_counts() -> None:
    network = MemoryNetwork()
    side = network.add("a").transport
    side.lines.update(b=Line(rtt_s=0.05, bandwidth_bps=8e6), a=Line(rtt_s=0.01), c=Line())
    here, asked = Whereabouts("a", side), list[str]()

    def find(peer: str) -> PeerRecord | None:
        asked.append(peer)
        return None

    here.look(find)
    assert asked == ["b"] and here.place == Place() and here.widest_bps == 8e6
    await network.close()


def test_the_audit_model_is_planned_for_as_if_all_stages_did_the_same() -> None:
    job = planning_job(RUN)
    assert set(job.forward_flops) == {1.0} and job.stages == RUN.S
    assert planning_job(demo_run(stages=2)).forward_flops[0] > 1e6


def record_of(peer: str, place: Place | None) -> PeerRecord:
    numbers = () if place is None else place.numbers()
    return PeerRecord(peer=peer, run=RUN.id, stage=0, state="serving", version=0, place=numbers)
