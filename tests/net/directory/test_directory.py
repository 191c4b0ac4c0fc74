"""Records and manifests among real directories in virtual time: found, renewed, lost and found again."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from peers.clock import now_s, unix_s
from peers.net import dht_protocol
from peers.net.bandwidth import Allowance
from peers.net.charter.signed import charter_key, seal_charter
from peers.net.dht_protocol import (
    AskedKey,
    Entry,
    Ping,
    Pong,
    Question,
    Store,
    key_bytes,
)
from peers.net.identity import Identity
from peers.net.lookup import Scale, shards_at
from peers.net.signed_records import (
    _pack,
    manifest_key,
    open_record,
    peers_key,
    record_keys,
    seal_record,
)
from peers.net.timings import NetTimings
from peers.sim.loop import BEGAN_UNIX_S
from swarm.charter import make as make_charter
from swarm.errors import Refused, SetupError
from swarm.ids import RunName, fingerprint_of
from swarm.manifest import id_of
from swarm.records import PeerRecord
from swarm.wire.version import PROTOCOL_VERSION
from tests.example import example_run
from tests.net.directory.memory_dht import RUN, MemoryDht, MemoryNode, record

pytestmark = pytest.mark.virtual_time

RARELY = NetTimings(refresh_s=60.0)
OWNED = dataclasses.replace(
    example_run(), admission=dataclasses.replace(example_run().admission, owner=Identity(bytes(32)).peer_id)
)
STAGES, EACH = 8, 300
LEVEL = Scale().level_for(EACH)


@pytest_asyncio.fixture
async def dht() -> AsyncIterator[MemoryDht]:
    async with MemoryDht() as dht:
        yield dht


async def watching(dht: MemoryDht, number: int, *join: MemoryNode, **options: object) -> MemoryNode:
    """A peer of a run of which no node has the manifest."""
    node = await dht.add(number, join=join, **options)
    node.directory.watch({0, 1, 2, 3})
    return node


async def run_of(dht: MemoryDht, count: int) -> tuple[MemoryNode, list[MemoryNode]]:
    """A bootstrap, and so many peers joined at it that know each other."""
    bootstrap = await dht.add(0, run_id=None)
    nodes = [await watching(dht, number, bootstrap) for number in range(1, count + 1)]
    for node in nodes:
        await node.directory.announce(record(node))
    await asyncio.sleep(5.0)
    assert all(seen(node) == ids(*nodes) for node in nodes)
    return bootstrap, nodes


def seen(node: MemoryNode) -> list[str]:
    return [record.peer for record in node.directory.peers()]


def ids(*nodes: MemoryNode) -> list[str]:
    return sorted(node.peer_id for node in nodes)


# -- records -----------------------------------------------------------------------------------------------


async def test_the_records_are_the_same_object_until_one_changes_or_runs_out(dht: MemoryDht) -> None:
    first = await watching(dht, 0)
    second = await watching(dht, 1, first)
    await first.directory.announce(record(first))
    await second.directory.refresh()
    peers = second.directory.peers()
    assert seen(second) == [first.peer_id] and second.directory.peers() is peers
    await second.directory.announce(record(second))
    both = second.directory.peers()
    assert both is not peers and seen(second) == ids(first, second)
    assert second.directory.peers() is both
    await second.directory.withdraw()
    assert seen(second) == [first.peer_id]
    await dht.kill(first)
    await asyncio.sleep(21.0)
    assert second.directory.peers() == []


async def test_a_moved_peer_and_one_that_left_are_seen(dht: MemoryDht) -> None:
    _, (one, two, three) = await run_of(dht, 3)
    await three.directory.announce(record(three, 2, 9))
    await asyncio.sleep(5.0)
    assert one.directory.find(three.peer_id) == record(three, 2, 9)
    await three.directory.withdraw()
    await asyncio.sleep(5.0)
    assert two.directory.find(three.peer_id).state == "left"
    assert not one.directory.storage.check.rejected


async def test_a_fresh_nodes_first_reading_finds_all_that_live_though_holders_are_dead(
    dht: MemoryDht,
) -> None:
    bootstrap, nodes = await run_of(dht, 5)
    for node in nodes[2:]:
        await dht.kill(node)
    for number in range(10, 13):
        began, fresh = now_s(), await watching(dht, number, bootstrap)
        found = {record.peer for record in await fresh.directory.refresh()}
        assert found >= {node.peer_id for node in nodes[:2]}
        assert now_s() - began < 5.0


async def test_a_fresh_nodes_first_reading_does_not_depend_on_one_holder_that_missed_a_record(
    dht: MemoryDht,
) -> None:
    first, (other,) = await run_of(dht, 1)
    for number in range(10, 18):  # each asks in an order of its own
        first.node._kept.clear()  # as if it had been away when it was stored
        fresh = await watching(dht, number, other, timings=RARELY)
        await asyncio.sleep(0.1)
        assert fresh.directory.storage.neighbours == number - 10 + 2
        fresh.forget_records()
        fresh.directory.reader.refreshed = False
        assert [record.peer for record in await fresh.directory.refresh()] == [other.peer_id]


async def test_a_hung_holder_does_not_delay_a_refresh(dht: MemoryDht) -> None:
    first = await dht.add(0, run_id=None)
    watcher = await watching(dht, 1, first, timings=RARELY)
    holder = await watching(dht, 2, first)
    await holder.directory.announce(record(holder))
    await watcher.directory.refresh()
    dht.hung.add(holder.peer_id)
    for _ in range(4):
        await asyncio.sleep(0.1)
        watcher.forget_records()
        began = now_s()
        assert [record.peer for record in await watcher.directory.refresh()] == [holder.peer_id]
        assert now_s() - began < 3.0


# -- entry points come and go ------------------------------------------------------------------------------


async def test_a_bootstrap_that_returns_is_greeted_and_newcomers_find_the_run_through_it(
    dht: MemoryDht,
) -> None:
    bootstrap, nodes = await run_of(dht, 3)
    await dht.kill(bootstrap)
    for node in nodes:
        assert len(await node.directory.refresh()) == 3
    # A newcomer at any live peer; of its addresses to join at, one is dead.
    late = await watching(dht, 10, bootstrap, nodes[1])
    assert [record.peer for record in await late.directory.refresh()] == ids(*nodes)
    back = await watching(dht, 0)
    await asyncio.sleep(12.0)
    assert seen(back) == ids(*nodes)
    newcomer = await watching(dht, 11, back)
    assert [record.peer for record in await newcomer.directory.refresh()] == ids(*nodes)


async def test_two_halves_that_forgot_each_other_become_one_network_again(dht: MemoryDht) -> None:
    """As after a long cut, with the bootstrap dead, at which all of them joined."""
    bootstrap, nodes = await run_of(dht, 4)
    await dht.kill(bootstrap)
    for half, others in ((nodes[:2], nodes[2:]), (nodes[2:], nodes[:2])):
        for node in half:
            node.forget_nodes(*others)
            node.forget_records()
            node.node._kept.clear()
    await asyncio.sleep(12.0)
    assert all(seen(node) == ids(*nodes) for node in nodes)
    for node in nodes:
        known = set(node.node.table.peer_id_to_uid)
        assert known >= set(ids(*nodes)) - {node.peer_id}


async def test_a_node_that_lost_all_that_it_could_join_at_finds_those_it_met(dht: MemoryDht) -> None:
    bootstrap, (one, two) = await run_of(dht, 2)
    await dht.kill(bootstrap)
    # As after a long cut: the record is over, and the routing table is empty.
    two.forget_nodes()
    two.forget_records()
    await asyncio.sleep(12.0)
    assert seen(two) == ids(one, two)


async def test_a_swarm_that_lost_its_node_finds_it_again(dht: MemoryDht) -> None:
    _, (other,) = await run_of(dht, 1)
    other.forget_nodes()
    assert other.directory.storage.neighbours == 0
    await asyncio.sleep(6.0)
    assert other.directory.storage.neighbours == 1


# -- manifests ---------------------------------------------------------------------------------------------


async def test_a_manifest_is_found_by_its_id_and_kept_as_long_as_one_that_fetched_it_is_there(
    dht: MemoryDht,
) -> None:
    run = example_run()
    bootstrap = await dht.add(0)
    publisher = await dht.add(1, join=bootstrap)
    await publisher.directory.publish_manifest(run)
    joiners = [await dht.add(number, join=bootstrap) for number in (2, 3)]
    for joiner in joiners:
        assert await joiner.directory.fetch_manifest(run.id) == run
    for node in (bootstrap, publisher, joiners[0]):
        await dht.kill(node)
    await asyncio.sleep(700.0)  # the life of what the publisher stored has passed twice
    newcomer = await dht.add(4, join=joiners[1])
    assert await newcomer.directory.fetch_manifest(run.id) == run
    with pytest.raises(SetupError, match="no peer here knows a run 0123: check the id"):
        await newcomer.directory.fetch_manifest("0123")


async def test_who_has_just_fetched_a_manifest_is_asked_for_it(dht: MemoryDht) -> None:
    """It would give it to others within 100 s, and whom it had it from may be gone by then."""
    run = example_run()
    first = await dht.add(0)
    await first.directory.publish_manifest(run)
    second = await dht.add(1, join=first)
    await second.directory.fetch_manifest(run.id)
    second.directory._manifests.stored_at = now_s()
    await dht.kill(first)
    third = await dht.add(2, join=second)
    assert await third.directory.fetch_manifest(run.id, timeout_s=1.0) == run


def unsigned(text: str) -> tuple[str, Entry]:
    """A manifest as it would lie in the DHT, signed by nobody, with its key."""
    value = msgspec.msgpack.encode([zlib.compress(text.encode()), b""])
    return manifest_key(id_of(text)), Entry("", value, unix_s() + 60.0)


async def test_a_node_parses_no_manifest_that_it_keeps_for_others(dht: MemoryDht) -> None:
    """A stranger's 49 bytes took a second of its loop, and one call may bring 64 of them."""
    node, stranger = await dht.add(0), await dht.add(1)
    texts = ["a." * 7_900 + f"a{number} = 1" for number in range(8)]
    began = time.process_time()
    for key, entry in map(unsigned, texts):
        assert await stranger.node.store(node.peer_id, [(key_bytes(key), entry)]) == [True]
    assert time.process_time() - began < 1.0, "0.9 s each"


@pytest.mark.parametrize("text", ["steps = 'many'", OWNED.to_toml()])
async def test_no_manifest_is_fetched_that_is_none_or_that_its_owner_did_not_sign(
    dht: MemoryDht, text: str
) -> None:
    node = await dht.add(0)
    joiner = await dht.add(1, join=node)
    await node.directory.storage.store(*unsigned(text))
    with pytest.raises(SetupError, match="no peer here knows a run"):
        await joiner.directory.fetch_manifest(id_of(text), timeout_s=1.0)


async def test_a_run_says_by_its_manifest_how_many_stages_there_are_to_read(dht: MemoryDht) -> None:
    run = example_run()
    first = await dht.add(0, run_id=run.id)
    await first.directory.publish_manifest(run)
    last = record(first, run.S - 1, run=run.id)
    await first.directory.announce(last)
    reader = await dht.add(1, run_id=run.id, join=first)
    assert list(await reader.directory.refresh()) == [last], "though no caller asked it for the manifest"


# -- strangers ---------------------------------------------------------------------------------------------


def hold(stranger: MemoryNode, peer: str, value: bytes, expires: float) -> None:
    """It checks nothing of what it keeps for others itself."""
    (key,) = [peers_key(RUN, shard) for shard in shards_at(0, 0)]
    stranger.node.keep(key_bytes(key), Entry(peer, value, expires), first_hand=False)


async def test_what_a_strangers_node_answers_is_verified(dht: MemoryDht) -> None:
    victim = await watching(dht, 0)
    stranger = await watching(dht, 1, victim)
    await asyncio.sleep(1.0)
    me, soon = stranger.identity, unix_s() + 20.0
    about_victim = record(victim, state="left")
    forged = msgspec.msgpack.encode([_pack(about_victim, 0), soon, me.sign(b""), PROTOCOL_VERSION])
    hold(stranger, victim.peer_id, forged, soon)
    # An infinite expiration would make hivemind's own search stop at him.
    hold(stranger, "x" * 52, b"no record", float("inf"))
    assert list(await victim.directory.refresh()) == []
    assert "a record with a wrong signature" in victim.directory.storage.check.rejected
    stranger.node._kept.clear()
    hold(stranger, me.peer_id, seal_record(record(stranger), soon, me), soon)
    await asyncio.sleep(0.1)
    assert [record.peer for record in await victim.directory.refresh()] == [me.peer_id]


async def test_a_flood_of_made_up_peers_hides_no_peer_that_speaks_for_itself(dht: MemoryDht) -> None:
    first = await dht.add(0, run_id=None)
    first.node.max_subkeys = 100
    flooding = await dht.add(1, join=first, run_id=None)
    (key,) = [peers_key(RUN, shard) for shard in shards_at(3, 0)]
    expires, stored = unix_s() + 500.0, 0
    for number in range(150):
        me = Identity((10**6 + number).to_bytes(32, "big"))
        made_up = PeerRecord(peer=me.peer_id, run=RUN, stage=3, state="serving", version=0)
        entry = Entry(me.peer_id, seal_record(made_up, expires, me), expires)
        answer = await flooding.node.store(first.peer_id, [(key_bytes(key), entry)])
        stored += bool(answer and answer[0])
    assert stored == 100, "the key is full"
    honest, reader = await watching(dht, 2, first), await watching(dht, 3, first)
    mine = record(honest, 3, 7)
    await honest.directory.announce(mine)
    await asyncio.sleep(5.0)
    assert reader.directory.find(honest.peer_id) == mine
    told = first.node.entries(key_bytes(key))
    assert told[0].subkey == honest.peer_id and len(told) == 100


# -- thousands of records ----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def crowd() -> dict[str, dict[str, Entry]]:
    """Real records of made-up peers: key -> peer -> entry."""
    found: dict[str, dict[str, Entry]] = {}
    expires = BEGAN_UNIX_S + 500.0
    for number in range(STAGES * EACH):
        me = Identity((10**4 + number).to_bytes(32, "big"))
        made_up = PeerRecord(
            peer=me.peer_id, run=RUN, stage=number % STAGES, state="serving", version=7,
            addresses=(f"/ip4/203.0.113.7/tcp/31337/p2p/{me.peer_id}",),
        )  # fmt: skip
        value = seal_record(made_up, expires, me, level=LEVEL)
        for key in record_keys(made_up, LEVEL):
            found.setdefault(key, {})[me.peer_id] = Entry(me.peer_id, value, expires)
    return found


async def crowded(dht: MemoryDht) -> MemoryNode:
    """A node with which the crowd has stored its records."""
    node = await dht.add(0, run_id=None)
    for key, entries in crowd().items():
        for entry in entries.values():
            node.node.keep(key_bytes(key), entry, first_hand=False)
    return node


async def reading(dht: MemoryDht, number: int, join: MemoryNode, *stages: int) -> MemoryNode:
    """A peer that works with these stages, and reads nothing unless it is told to."""
    node = await dht.add(number, join=join, timings=RARELY)
    node.directory.reader.stages = STAGES
    node.directory.watch(stages)
    return node


def per_stage(node: MemoryNode) -> Counter[int]:
    return Counter(record.stage for record in node.directory.peers())


@pytest.mark.slow
async def test_a_peer_reads_the_stages_that_it_works_with_and_the_rest_slowly(dht: MemoryDht) -> None:
    directory = (peer := await reading(dht, 1, await crowded(dht), 2, 3, 4)).directory
    directory.reader.far = Allowance(20e3, 20e3)
    await directory.refresh()
    assert LEVEL == 1, "a stage lies under several keys"
    assert [len(directory.at(stage)) for stage in (2, 3, 4)] == [EACH] * 3
    assert sum(per_stage(peer).values()) == 3 * EACH

    # The others come in within their allowance: so much a second, and what was saved up.
    began = now_s()
    while now_s() - began < 2.0:
        await directory.reader.read_some()
        await asyncio.sleep(0.1)
    far = sum(per_stage(peer).values()) - 3 * EACH
    size = len(next(iter(next(iter(crowd().values())).values())).value)
    assert 0 < far * size <= 20e3 * (now_s() - began + 1)
    assert directory.lag_s > 2.0

    # What is known is not read again: a refresh of three stages costs their fingerprints.
    before = directory.reader.read_bytes
    await directory.refresh()
    assert directory.reader.read_bytes - before <= 3 * EACH * 8 + 10_000

    # With a larger allowance the picture is whole, and says so.
    directory.reader.far = Allowance(1e7, 1e7)
    for _ in range(20):
        await directory.reader.read_some()
        await asyncio.sleep(0.1)
    assert sum(per_stage(peer).values()) == STAGES * EACH
    assert directory.lag_s < 60.0

    directory.reader.near = directory.reader.far = Allowance(0.0, 0.0)
    before = directory.reader.read_bytes
    await directory.reader.read_some()
    assert directory.reader.read_bytes == before, "nothing is asked for that may not be answered"


async def test_all_is_read_at_once_and_held_for_others(dht: MemoryDht) -> None:
    """hivemind sends whole keys in one call, which hangs beyond 4 MiB."""
    first = await crowded(dht)
    node = await reading(dht, 1, first, 0)
    records = await node.directory.lookup_all()
    assert Counter(record.stage for record in records) == dict.fromkeys(range(STAGES), EACH)
    assert records[0].addresses == (f"/ip4/203.0.113.7/tcp/31337/p2p/{records[0].peer}",)
    held = sum(len(node.node.entries(key)) for key in node.node._kept)
    assert held == STAGES * EACH
    assert not node.directory.storage.check.rejected


async def test_a_newcomer_to_a_large_stage_is_seen_at_once_and_one_that_moves_away_too(
    dht: MemoryDht,
) -> None:
    first = await crowded(dht)
    replica, newcomer = await reading(dht, 1, first, 2, 3, 4), await reading(dht, 2, first, 2, 3, 4)
    for node in (replica, newcomer):
        await node.directory.refresh()
    mine = record(newcomer, 3, 7)
    await newcomer.directory.announce(mine)
    assert newcomer.directory._level == LEVEL, "spread as its replicas are"
    await asyncio.sleep(0.1)
    await replica.directory.refresh()
    assert replica.directory.find(newcomer.peer_id) == mine and mine in replica.directory.at(3)
    moved = msgspec.structs.replace(mine, stage=0)
    await newcomer.directory.announce(moved)
    await asyncio.sleep(0.1)
    await replica.directory.refresh()
    # It does not read stage 0; but the newcomer is not of stage 3 any more.
    assert [r.state for r in replica.directory.at(3) if r.peer == newcomer.peer_id] == ["left"]
    home = key_bytes(record_keys(mine, LEVEL)[0])
    (told,) = [entry for entry in first.node.entries(home) if entry.subkey == newcomer.peer_id]
    assert open_record(told.value, told.subkey, told.expires).record.state == "left", "told where it was"
    await replica.directory.refresh({0})
    assert replica.directory.find(newcomer.peer_id) == moved


async def filled(dht: MemoryDht, keys: int) -> tuple[MemoryNode, MemoryNode]:
    """A node, and a stranger that had it keep a record of each of so many runs."""
    node = await dht.add(0)
    stranger = await dht.add(1, join=node)
    for number in range(keys):
        identity, expires = Identity((1_000 + number).to_bytes(32, "big")), unix_s() + 500.0
        made_up = PeerRecord(peer=identity.peer_id, run=f"{number:032x}", stage=0, state="serving", version=0)
        entry = Entry(made_up.peer, seal_record(made_up, expires, identity), expires)
        key = key_bytes(record_keys(made_up, 0)[0])
        assert await stranger.node.store(node.peer_id, [(key, entry)]) == [True]
    return node, stranger


async def test_no_question_asks_for_a_key_twice(dht: MemoryDht) -> None:
    """64 times all records of a stage are 500 kB, for 1.6 kB and 10 ms of the loop of a node of 100."""
    node, stranger = await dht.add(0), await dht.add(1)
    asked = AskedKey(bytes(20), b"")
    with pytest.raises(Refused, match="a key stands there twice"):
        await node.node.answer(msgspec.msgpack.encode(Question(0, bytes(8), [asked] * 2)), stranger.peer_id)


async def test_who_wants_to_be_called_back_and_does_not_answer_is_called_once_at_a_time(
    dht: MemoryDht,
) -> None:
    """Each such call waited for 3 s in one of the 512 places for all of them: others found the node too busy,
    and forgot it."""
    node, stranger, other = await dht.add(0), await dht.add(1), await dht.add(2)
    dht.hung.add(stranger.peer_id)
    joining = msgspec.msgpack.encode(Ping(joining=True))
    asked = {asyncio.ensure_future(node.node.answer(joining, stranger.peer_id)) for _ in range(600)}
    done, waiting = await asyncio.wait(asked, timeout=0.1)
    assert len(waiting) == 1
    assert not any(msgspec.msgpack.decode(one.result(), type=Pong).reaches for one in done)
    answered = await node.node.answer(joining, other.peer_id)
    assert msgspec.msgpack.decode(answered, type=Pong).reaches
    waiting.pop().cancel()  # as by the one that asked
    await asyncio.sleep(0)
    dht.hung.clear()
    answered = await node.node.answer(joining, stranger.peer_id)
    assert msgspec.msgpack.decode(answered, type=Pong).reaches, "it is called again"


async def test_a_crowd_that_joins_and_does_not_answer_keeps_no_newcomer_out(dht: MemoryDht) -> None:
    first = await dht.add(0)
    first.node._reaching |= {f"peer {number}" for number in range(dht_protocol.MAX_REACHING)}
    await dht.add(1, join=first)


async def test_who_hands_on_without_end_keeps_no_charter_out_that_another_one_brings(dht: MemoryDht) -> None:
    """What all may hand on was one's: whom an owner was about to ban had no node take the new charter."""
    node, stranger, other = await dht.add(0), await dht.add(1), await dht.add(2)
    owner = Identity(b"o" * 32)
    charter = make_charter(name="run", run="0" * 32, sequence=5, expires=int(unix_s()) + 86_400)
    key = key_bytes(charter_key(RunName(charter.name, fingerprint_of(owner.peer_id))))
    junk = msgspec.msgpack.encode(Store([(bytes(20), Entry("x", b"", unix_s() + 100.0))] * 64))
    for _ in range(100):
        await node.node.answer(junk, stranger.peer_id)
    entry = Entry(owner.peer_id, seal_charter(charter, owner), unix_s() + 300.0)
    assert await other.node.store(node.peer_id, [(key, entry)]) == [True]


async def test_what_a_node_keeps_is_judged_again_without_a_look_at_its_signatures(dht: MemoryDht) -> None:
    """Of more than 8,192 records each was verified once more, 2 s, whenever a key revoked itself."""
    node, _ = await filled(dht, 20)
    banned, _ = next(iter(node.node._of))
    dht_protocol._opened.cache_clear()
    node.node.check.why_not = lambda announced: "banned" * (announced.record.peer == banned)
    node.node.recheck()
    assert dht_protocol._opened.cache_info().misses == 0
    there = {peer for peer, _ in +node.node._of}
    assert len(there) == 19 and banned not in there
