"""More nodes than a routing table holds: a peer that reads a key asks the nodes that were given it."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from peers.net.dht_protocol import DhtNode, Question, Store
from peers.net.directory import NetDirectory
from peers.net.lookup import Scale
from tests.net.directory.memory_dht import MemoryDht, MemoryNode, record

pytestmark = pytest.mark.virtual_time


async def joined(dht: MemoryDht, count: int, stages: int, scale: Scale) -> list[MemoryNode]:
    """So many peers, spread over the stages by their numbers, that watch as stage peers do."""
    first = await dht.add(0, scale=scale)
    nodes = [first, *[await dht.add(number, join=first, scale=scale) for number in range(1, count)]]
    for number, node in enumerate(nodes):
        stage = number % stages
        node.directory.reader.stages = stages
        node.directory.watch({near for near in (stage - 1, stage, stage + 1) if 0 <= near < stages})
        await node.directory.announce(record(node, stage))
    return nodes


def counts(directory: NetDirectory) -> Counter[int]:
    return Counter(record.stage for record in directory.peers())


@pytest.mark.slow
async def test_all_peers_find_their_stages_at_the_nodes_near_their_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DhtNode, "bucket_size", 4)
    monkeypatch.setattr(DhtNode, "bucket_depth", 1)
    async with MemoryDht() as dht:
        nodes = await joined(dht, 20, 4, Scale(full=3))  # 5 peers are spread over the keys of two levels
        await asyncio.sleep(25.0)  # what was stored before all were there has expired
        for node in nodes:
            assert counts(node.directory) == dict.fromkeys(range(4), 5)
            assert node.directory._level == 1
            assert node.directory.lag_s < 20.0
        tables = [node.node.table for node in nodes]
        known = [len(table.get_nearest_neighbors(table.node_id, 99)) for table in tables]
        assert min(known) < len(nodes) - 5, "routing tables alone would not do"
        # Steady work: questions are few, and what comes is what was renewed.
        dht.calls.clear()
        dht.bytes.clear()
        await asyncio.sleep(20.0)
        each = {method: count / len(nodes) for method, count in dht.calls.items()}
        assert each[Question] <= 10 * 1.25 * (8 + 2)
        renewed = len(nodes) * 20 / 5
        assert dht.bytes[Question] / len(nodes) < renewed * 2 * 300
        # One dies, and one moves: its old stage hears that it left, and its new one that it came.
        dead, moved = nodes[0], nodes[1]
        await dht.kill(dead)
        await moved.directory.announce(record(moved, 3))
        await asyncio.sleep(5.0)
        for node in nodes[2:]:
            seen = node.directory.find(moved.peer_id)
            assert seen is not None and (seen.stage, seen.state) in ((3, "serving"), (1, "left"))
        await asyncio.sleep(22.0)
        for node in nodes[2:]:
            assert counts(node.directory) == {0: 4, 1: 4, 2: 5, 3: 6}


async def test_a_record_stays_though_the_run_turns_out_to_be_larger_than_its_peer_knew() -> None:
    """It was to live 20 s, and its peer, now in a run of thousands, renewed it after 100 s."""
    async with MemoryDht() as dht:
        nodes = await joined(dht, 12, 1, Scale(usual=0.5))
        await asyncio.sleep(10.0)
        for _ in range(60):
            await asyncio.sleep(1.0)
            assert [counts(node.directory)[0] for node in nodes] == [12] * 12


@pytest.mark.slow
async def test_in_a_run_of_thousands_records_live_longer_and_what_is_far_is_read_in_turn() -> None:
    """Sixteen nodes that take themselves for four thousand: all times are twenty times as long."""
    scale = Scale(usual=0.5)
    async with MemoryDht() as dht:
        nodes = await joined(dht, 16, 8, scale)
        await asyncio.sleep(200.0)
        stretches = {node.directory.reader.stretch for node in nodes}
        assert stretches == {20.0}
        for node in nodes:
            assert counts(node.directory) == dict.fromkeys(range(8), 2)
        dht.calls.clear()
        await asyncio.sleep(80.0)
        stored = dht.calls[Store] / len(nodes)
        assert stored <= 5, "renewals are rare"
        newcomer = await dht.add(99, join=nodes[5], scale=scale)
        await newcomer.directory.announce(record(newcomer, 5))
        await asyncio.sleep(15.0)
        for number, node in enumerate(nodes):
            if number % 8 in (4, 5, 6):
                assert node.directory.find(newcomer.peer_id) is not None, "its replicas see it soon"
