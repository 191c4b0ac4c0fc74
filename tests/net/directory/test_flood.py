"""A flooded directory stays readable: honest records are seen soon among those of hundreds of strangers."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from peers.clock import now_s, unix_s
from peers.net import signed_records
from peers.net.dht_protocol import DhtNode, Entry, Store, key_bytes
from peers.net.identity import Identity
from peers.net.lookup import StageKey
from swarm.records import PeerRecord
from tests.net.directory.memory_dht import RUN, MemoryDht, record

pytestmark = [pytest.mark.virtual_time, pytest.mark.slow, pytest.mark.timeout(300)]

IDENTITIES = 200
NODES = 6
SEEN_S = 10.0


class Flood:
    """Strangers that each renew their own record every second, at every node, and offer others besides."""

    def __init__(self, dht: MemoryDht, identities: int, stages: int) -> None:
        self.dht, self.stages, self.offered = dht, stages, 0
        self.liars = [Identity((10_000 + number).to_bytes(32, "big")) for number in range(identities)]

    def _request(self, liar: Identity, stage: int) -> bytes:
        expires = unix_s() + 20.0
        said = PeerRecord(peer=liar.peer_id, run=RUN, stage=stage, state="serving", version=0)
        entry = Entry(liar.peer_id, signed_records.seal_record(said, expires, liar), expires)
        key = key_bytes(signed_records.peers_key(RUN, StageKey(stage, 0, 0)))
        return msgspec.msgpack.encode(Store([(key, entry)]))

    async def run(self) -> None:
        """For ever; every second at another stage, and all at stage 0."""
        second = 0
        while True:
            for liar in self.liars:
                for stage in {0, second % self.stages}:
                    request = self._request(liar, stage)
                    for node in list(self.dht.nodes.values()):
                        await node.node.answer(request, liar.peer_id)
                        self.offered += 1
            second += 1
            await asyncio.sleep(1.0)


async def test_an_honest_record_is_seen_within_10_s_among_those_of_hundreds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 20 records of each do not fit, 8 do: as 16,384 and a thousand.
    monkeypatch.setattr(DhtNode, "max_entries", 10 * IDENTITIES)
    async with MemoryDht() as dht:
        first = await dht.add(0)
        nodes = [first, *[await dht.add(number, join=first) for number in range(1, NODES)]]
        for node in nodes:
            node.directory.watch({0})
            await node.directory.announce(record(node))
        flood = Flood(dht, IDENTITIES, stages=20)
        flooding = asyncio.get_running_loop().create_task(flood.run())
        try:
            await asyncio.sleep(12.0)
            newcomer = await dht.add(NODES, join=first)
            newcomer.directory.watch({0})
            began = now_s()
            await newcomer.directory.announce(record(newcomer))

            def sees(peer: str) -> int:
                return sum(node.directory.find(peer) is not None for node in nodes)

            while sees(newcomer.peer_id) < NODES:
                assert now_s() - began < SEEN_S, f"{sees(newcomer.peer_id)} of {NODES} see it"
                await asyncio.sleep(0.25)
            seen_after_s = now_s() - began
            for _ in range(25):
                await asyncio.sleep(1.0)
                for node in [*nodes, newcomer]:
                    assert sees(node.peer_id) == NODES, "a record that was seen stays"
            assert all(other.directory.find(nodes[0].peer_id) for other in [*nodes, newcomer])
            print(f"{flood.offered} records offered; seen after {seen_after_s:.2f} s")
        finally:
            flooding.cancel()
