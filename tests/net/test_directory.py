"""A few real nodes and thousands of records: who works with a stage knows it, the rest is read in turn."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import Counter
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from peers.net import dht_protocol as holder
from peers.net import sharding as shards
from peers.net import signed_records as envelopes
from peers.net._hivemind import DHTID, PeerID
from peers.net.dht_protocol import Entry, RecordProtocol
from peers.net.identity import Identity
from peers.net.lookup import Allowance
from peers.net.node import Node
from swarm.manifest import example_run
from swarm.records import PeerRecord

pytestmark = pytest.mark.net

RUN = "f" * 32
STAGES, EACH = 8, 300
LEVEL = shards.level_for(EACH)


@functools.lru_cache(maxsize=1)
def crowd() -> dict[str, dict[str, Entry]]:
    """Real records of made-up peers: key -> peer -> entry."""
    found: dict[str, dict[str, Entry]] = {}
    expires = time.time() + 500.0
    for number in range(STAGES * EACH):
        me = Identity(number.to_bytes(32, "big"))
        record = PeerRecord(
            peer=me.peer_id, run=RUN, stage=number % STAGES, state="serving", version=7,
            addresses=(f"/ip4/203.0.113.7/tcp/31337/p2p/{me.peer_id}",),
        )  # fmt: skip
        value = envelopes.seal_record(record, expires, me, level=LEVEL)
        for key in envelopes.record_keys(record, LEVEL):
            found.setdefault(key, {})[me.peer_id] = Entry(me.peer_id, value, expires)
    return found


def give(node: Node) -> None:
    """As if the crowd had stored its records there."""
    storage = node.directory.storage.node.protocol.storage  # type: ignore[union-attr]
    for key, entries in crowd().items():
        for entry in entries.values():
            storage.store(DHTID.generate(source=key), entry.value, entry.expires, subkey=entry.subkey)


@pytest_asyncio.fixture
async def stack() -> AsyncIterator[contextlib.AsyncExitStack]:
    async with contextlib.AsyncExitStack() as stack:
        yield stack


async def start(
    stack: contextlib.AsyncExitStack, *join: Node, run_id: str | None = RUN, refresh_s: float = 0.1
) -> Node:
    addresses = [node.addresses[0] for node in join]
    return await stack.enter_async_context(Node(run_id=run_id, join=addresses, refresh_s=refresh_s))


def per_stage(node: Node) -> Counter[int]:
    return Counter(record.stage for record in node.directory.peers())


async def until(condition: object, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "never came true"
        await asyncio.sleep(0.02)


async def test_a_peer_reads_the_stages_that_it_works_with_and_the_rest_slowly(
    stack: contextlib.AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One of a thousand nodes is near few keys; one of two would be given all of them to keep.
    monkeypatch.setattr(RecordProtocol, "_hand_on", lambda *_: None)
    first = await start(stack, run_id=None)
    give(first)
    peer = await start(stack, first, refresh_s=60.0)
    directory = peer.directory
    directory.reader.stages = STAGES
    directory.reader.far = Allowance(20e3, 20e3)
    directory.watch({2, 3, 4})
    await directory.refresh()
    assert LEVEL == 1, "a stage lies under several keys"
    assert [len(directory.at(stage)) for stage in (2, 3, 4)] == [EACH] * 3
    assert sum(per_stage(peer).values()) == 3 * EACH

    # The others come in within their allowance: so much a second, and what was saved up.
    began = time.monotonic()
    while time.monotonic() - began < 2.0:
        await directory.reader.read_some()
    far = sum(per_stage(peer).values()) - 3 * EACH
    size = len(next(iter(next(iter(crowd().values())).values())).value)
    assert 0 < far * size <= 20e3 * (time.monotonic() - began + 1)
    assert directory.lag_s > 2.0

    # What is known is not read again: a refresh of three stages costs their fingerprints.
    before = directory.reader.read_bytes
    await directory.refresh()
    assert directory.reader.read_bytes - before <= 3 * EACH * 8 + 10_000

    # With a larger allowance the picture is whole, and says so.
    directory.reader.far = Allowance(1e7, 1e7)
    for _ in range(20):
        await directory.reader.read_some()
    assert sum(per_stage(peer).values()) == STAGES * EACH
    assert directory.lag_s < 60.0

    directory.reader.near = directory.reader.far = Allowance(0.0, 0.0)
    before = directory.reader.read_bytes
    await directory.reader.read_some()
    assert directory.reader.read_bytes == before, "nothing is asked for that may not be answered"


async def test_a_flood_of_made_up_peers_hides_nobody_who_speaks_for_itself(
    stack: contextlib.AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder, "MAX_SUBKEYS", 100)
    first = await start(stack, run_id=None)
    flooding = await start(stack, first, run_id=None)
    peer_id = PeerID.from_base58(first.peer_id)
    (key,) = [envelopes.peers_key(RUN, shard) for shard in shards.shards_at(3, 0)]
    stored = 0
    for number in range(150):
        me = Identity((10**6 + number).to_bytes(32, "big"))
        record = PeerRecord(peer=me.peer_id, run=RUN, stage=3, state="serving", version=0)
        expires = time.time() + 500.0
        answer = await flooding.directory.storage.node.protocol.call_store(  # type: ignore[union-attr]
            peer_id, [DHTID.generate(source=key)], [envelopes.seal_record(record, expires, me)], expires,
            subkeys=[me.peer_id],
        )  # fmt: skip
        stored += bool(answer and answer[0])
    assert stored == 100, "the key is full"
    honest, looking = await start(stack, first), await start(stack, first)
    for node in (honest, looking):
        node.directory.watch({3})
    mine = PeerRecord(peer=honest.peer_id, run=RUN, stage=3, state="serving", version=7)
    await honest.directory.announce(mine)
    await until(lambda: looking.directory.find(honest.peer_id) == mine)
    told = first.directory.storage.node.protocol.entries(DHTID.generate(source=key))  # type: ignore[union-attr]
    assert told[0].subkey == honest.peer_id and len(told) == 100


async def test_a_survey_reads_everything_at_once(stack: contextlib.AsyncExitStack) -> None:
    first = await start(stack, run_id=None)
    give(first)
    looking = await start(stack, first)
    looking.directory.reader.stages = STAGES
    looking.directory.watch({0})
    records = await looking.directory.lookup_all()
    assert Counter(record.stage for record in records) == dict.fromkeys(range(STAGES), EACH)
    assert records[0].addresses == (f"/ip4/203.0.113.7/tcp/31337/p2p/{records[0].peer}",)


async def test_a_newcomer_to_a_large_stage_is_seen_at_once_and_one_that_moves_away_too(
    stack: contextlib.AsyncExitStack,
) -> None:
    first = await start(stack, run_id=None)
    give(first)
    replica, newcomer = await start(stack, first), await start(stack, first)
    for node in (replica, newcomer):
        node.directory.reader.stages = STAGES
        node.directory.watch({2, 3, 4})
        await node.directory.refresh()
    mine = PeerRecord(peer=newcomer.peer_id, run=RUN, stage=3, state="serving", version=7)
    await newcomer.directory.announce(mine)
    assert newcomer.directory._level == LEVEL, "spread as its replicas are"
    await until(lambda: replica.directory.find(newcomer.peer_id) == mine)
    assert mine in replica.directory.at(3)
    moved = msgspec.structs.replace(mine, stage=0)
    await newcomer.directory.announce(moved)
    # Nobody here reads stage 0 often; but it is not of stage 3 any more.
    await until(
        lambda: not [r for r in replica.directory.at(3) if r.peer == newcomer.peer_id and r.state != "left"]
    )
    home = DHTID.generate(source=envelopes.record_keys(mine, LEVEL)[0])
    (told,) = [e for e in first.directory.storage.node.protocol.entries(home) if e.subkey == newcomer.peer_id]  # type: ignore[union-attr]
    assert envelopes.open_record(told.value, told.subkey, told.expires).record.state == "left", (
        "told where it was"
    )
    await replica.directory.refresh({0})
    assert replica.directory.find(newcomer.peer_id) == moved


async def test_a_node_that_joins_is_given_what_it_should_hold_in_pieces(
    stack: contextlib.AsyncExitStack,
) -> None:
    """hivemind sends whole keys in one call, which hangs beyond 4 MiB."""
    first = await start(stack, run_id=None)
    give(first)
    second = await start(stack, first, run_id=None)
    held = second.directory.storage.node.protocol  # type: ignore[union-attr]
    whole = sum(map(len, crowd().values()))
    await until(lambda: sum(len(held.entries(key)) for key in list(held.storage.data)) == whole)  # type: ignore[attr-defined]
    assert not second.directory.check.rejected


async def test_a_run_says_by_its_manifest_how_many_stages_there_are_to_read(
    stack: contextlib.AsyncExitStack,
) -> None:
    run = example_run()
    first = await start(stack, run_id=run.id)
    await first.directory.publish_manifest(run.to_toml())
    last = PeerRecord(peer=first.peer_id, run=run.id, stage=run.S - 1, state="serving", version=0)
    await first.directory.announce(last)
    looking = await start(stack, first, run_id=run.id)
    assert list(await looking.directory.refresh()) == [last], "though nobody asked it for the manifest"
