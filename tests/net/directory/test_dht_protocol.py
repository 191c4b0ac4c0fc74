"""What a node keeps for others, and what it answers: bounded; a peer that speaks for itself goes first."""

from __future__ import annotations

import asyncio
import functools
import time
import tracemalloc
from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.clock import unix_s
from peers.net import dht_protocol, signed_records
from peers.net.charter.signed import charter_key, seal_charter
from peers.net.dht_protocol import (
    CALL_COST,
    FIND_COST,
    KNOWN_BYTES_COST,
    LOOKED_THROUGH_AT_ONCE,
    AskedKey,
    DhtNode,
    Entry,
    Find,
    FoundEntries,
    KeptEntry,
    Ping,
    Pong,
    Question,
    RecordCheck,
    Store,
    answer,
    ask,
    key_bytes,
    node_id_of,
    read_request,
)
from peers.net.identity import Identity
from peers.net.lookup import StageKey
from peers.net.p2pd_control import ControlError
from peers.waiting import TaskKeeper
from swarm.charter import make as make_charter
from swarm.errors import Refused
from swarm.ids import RunName, fingerprint_of
from swarm.records import PeerRecord
from swarm.wire.version import PROTOCOL_VERSION
from tests.example import example_run
from tests.net.directory.memory_dht import MemoryDht

RUN = "f" * 32
KEY, OTHER_KEY, SALT = b"k" * 20, b"o" * 20, b"saltsalt"
STAGE_0 = signed_records.peers_key(RUN, StageKey(0, 0, 0))


@functools.lru_cache(maxsize=1)
def soon() -> float:
    return time.time() + 300.0


@functools.lru_cache(maxsize=4096)
def entry(number: int, stage: int = 0, later_s: float = 0.0) -> Entry:
    me = Identity(number.to_bytes(32, "big"))
    record = PeerRecord(peer=me.peer_id, run=RUN, stage=stage, state="serving", version=0)
    return Entry(me.peer_id, signed_records.seal_record(record, soon() + later_s, me), soon() + later_s)


def asked(
    keys: Mapping[bytes, Mapping[str, float]], held: Mapping[bytes, list[Entry]], most_bytes: int = 10**6
) -> list[FoundEntries]:
    return answer(ask(keys, most_bytes, SALT), lambda key: held.get(key, []))


# -- questions and answers ---------------------------------------------------------------------------------


def test_only_what_is_not_known_is_told() -> None:
    old, renewed, new = Entry("a", b"A", 1.0), Entry("b", b"B", 2.0), Entry("c", b"C", 3.0)
    known = {"a": 1.0, "b": 1.5, "gone": 9.0}
    (found,) = asked({KEY: known}, {KEY: [old, renewed, new]})
    assert found == FoundEntries((new, renewed), 0)
    assert asked({KEY: {}, OTHER_KEY: {}}, {OTHER_KEY: [new]}) == [
        FoundEntries((), 0),
        FoundEntries((new,), 0),
    ]


def test_what_is_older_than_what_is_known_is_not_told_again() -> None:
    """A node that missed a renewal would tell of the version before it, each time."""
    stale = Entry("a", b"A", 100.0)
    later = 100.0 + 2 * dht_protocol.VERSION_S
    assert asked({KEY: {"a": later}}, {KEY: [stale]}) == [FoundEntries((), 0)]
    renewed = Entry("a", b"B", later)
    assert asked({KEY: {"a": 100.0}}, {KEY: [renewed]}) == [FoundEntries((renewed,), 0)]
    wrapped = 2.0**32 * dht_protocol.VERSION_S
    assert asked({KEY: {"a": wrapped - 5.0}}, {KEY: [Entry("a", b"C", wrapped + 5.0)]})[0].entries


def test_first_is_told_what_is_not_known_at_all_then_what_was_told_longest_ago() -> None:
    held = [Entry(name, name.encode(), 100.0) for name in ("just told", "long ago", "never", "never too")]
    (found,) = asked({KEY: {"just told": 99.0, "long ago": 80.0}}, {KEY: held})
    assert [one.subkey for one in found.entries] == ["never", "never too", "long ago", "just told"]


def test_an_answer_takes_no_more_than_it_may_shared_by_the_keys() -> None:
    held = {
        key: [Entry(f"{key[:1].decode()}{n}", bytes(920), 1.0) for n in range(50)] for key in (KEY, OTHER_KEY)
    }
    first, second = asked({KEY: {}, OTHER_KEY: {}}, held, most_bytes=20_000)
    assert len(first.entries) == len(second.entries) == 10
    assert first.left == second.left == 40
    one, all_else = asked(
        {KEY: dict.fromkeys((e.subkey for e in held[KEY]), 1.0), OTHER_KEY: {}}, held, 20_000
    )
    assert one == FoundEntries((), 0) and len(all_else.entries) == 20, "what one does not need the other gets"
    assert asked({KEY: {}}, held, most_bytes=999) == [FoundEntries((), 50)]
    assert [len(found.entries) for found in asked({KEY: {}, OTHER_KEY: {}}, held, most_bytes=1000)] == [1, 0]


def test_asking_again_and_again_brings_everything() -> None:
    held = {KEY: [Entry(f"p{n}", bytes(300), float(n + 1)) for n in range(100)]}
    known: dict[str, float] = {}
    for _ in range(40):
        (found,) = asked({KEY: known}, held, most_bytes=2000)
        known |= {told.subkey: told.expires for told in found.entries}
        assert found.left == 100 - len(known)
    assert len(known) == 100


@given(st.binary(max_size=200))
def test_a_strangers_question_is_refused_or_bounded(data: bytes) -> None:
    try:
        question = read_request(data)
    except Refused as refusal:
        assert refusal.text.startswith("a malformed question")
    else:
        assert isinstance(question, Ping | Store) or len(question.keys) <= dht_protocol.MAX_KEYS_PER_CALL


@pytest.mark.parametrize(
    "request_",
    [
        ask({bytes([n]) * 20: {} for n in range(65)}, 1, SALT),
        ask({b"short": {}}, 1, SALT),
        Question(1, SALT, [AskedKey(KEY, b"half")]),
        Find([KEY] * 65),
        Find([bytes(10**6)]),
        Store([(KEY, Entry("a", b"A", 1.0))] * 65),
        Store([(b"short", Entry("a", b"A", 1.0))]),
        *(Store([(KEY, Entry(subkey, b"A", 1.0))]) for subkey in (5, None, b"a")),  # type: ignore[arg-type]
    ],
)
async def test_a_question_beyond_its_bounds_is_refused(request_: dht_protocol.Request) -> None:
    with pytest.raises(Refused, match="a malformed question"):
        await node().answer(msgspec.msgpack.encode(request_), peer_id(1))


# -- keeping -----------------------------------------------------------------------------------------------


def node(check: RecordCheck | None = None) -> DhtNode:
    """A node that is asked by calling it."""
    return DhtNode(peer_id(0), check or RecordCheck(), TaskKeeper())


def peer_id(number: int) -> str:
    return Identity(number.to_bytes(32, "big")).peer_id


async def store(at: DhtNode, *entries: Entry, sender: int, key: str = STAGE_0) -> list[bool]:
    request = Store([(key_bytes(key), one) for one in entries])
    return msgspec.msgpack.decode(await at.answer(msgspec.msgpack.encode(request), peer_id(sender)))


def kept(at: DhtNode, key: str = STAGE_0) -> list[str]:
    return [one.subkey for one in at.entries(key_bytes(key))]


async def test_of_a_flood_through_one_node_no_record_keeps_out_a_peer_that_speaks_for_itself() -> None:
    at = node()
    at.max_subkeys = 10
    assert await store(at, *(entry(n) for n in range(100, 115)), sender=99) == [True] * 10 + [False] * 5
    assert await store(at, entry(1), sender=99) == [False], "one more that another peer brings"
    assert await store(at, entry(1), sender=1) == [True]
    assert len(kept(at)) == 10 and kept(at)[0] == entry(1).subkey, "told first"
    assert await store(at, entry(1, 0, 5.0), sender=99) == [True], "what is there is renewed by any peer"
    assert kept(at)[0] == entry(1).subkey
    first = kept(at)[-1]  # another one handed it on before its peer came
    came_later = next(number for number in range(100, 115) if entry(number).subkey == first)
    assert await store(at, entry(came_later, 0, 5.0), sender=came_later) == [True]
    for number in range(2, 10):
        assert await store(at, entry(number), sender=number) == [True]
    assert await store(at, entry(10), sender=10) == [False], "all places are taken by such peers"
    assert set(kept(at)) == {first, *(entry(n).subkey for n in range(1, 10))}


async def test_of_one_identity_a_few_records_are_kept_and_the_next_one_finds_room() -> None:
    """Records of as many stages as there are keys, from their peer itself, took all places of a node."""
    at = node()
    at.max_entries = 20 * dht_protocol.MAX_OF_ONE
    for number in range(10):
        for stage in range(2 * dht_protocol.MAX_OF_ONE):
            key = signed_records.peers_key(RUN, StageKey(stage, 0, 0))
            stored = await store(at, entry(number, stage), sender=number, key=key)
            assert stored == [stage < dht_protocol.MAX_OF_ONE]
    assert await store(at, entry(99), sender=99) == [True]


async def test_old_charters_of_an_owner_keep_out_none_of_its_records() -> None:
    """Whoever kept what it signed of other runs stored that, and the owner's own peer was in no directory."""
    at, owner = node(), Identity((1).to_bytes(32, "big"))
    for number in range(dht_protocol.MAX_SIGNED_BY_ONE + 1):
        old = make_charter(name=f"run {number}", run="0" * 32, sequence=1, expires=int(soon()))
        key = charter_key(RunName(old.name, fingerprint_of(owner.peer_id)))
        stored = await store(at, Entry(owner.peer_id, seal_charter(old, owner), soon()), sender=9, key=key)
        assert stored == [number < dht_protocol.MAX_SIGNED_BY_ONE]
    assert await store(at, entry(1), sender=1) == [True]


@pytest.mark.virtual_time
async def test_one_who_offers_too_much_is_not_listened_to_and_others_are() -> None:
    async with MemoryDht() as dht:
        at = (await dht.add(0)).node
        forged = [entry(n)._replace(value=b"forged %d" % n) for n in range(64)]
        own = [of_now(99)._replace(value=b"forged")] * len(forged)
        most = len(forged) + len(own)
        assert most == dht_protocol.STORED_AT_ONCE
        for offered in (forged, own):
            await store(at, *offered, sender=99)
        assert sum(at.check.rejected.values()) == most
        for offered in (forged, own):
            assert await store(at, *offered, sender=99) == [False] * len(offered)
        assert sum(at.check.rejected.values()) == most, "nothing of it was looked at"
        assert await store(at, of_now(1), sender=1) == [True]
        await asyncio.sleep(1.0)
        assert await store(at, of_now(2), sender=99) == [True]


def of_now(number: int) -> Entry:
    """A record by the clock of the loop."""
    me, expires = Identity(number.to_bytes(32, "big")), unix_s() + 100.0
    said = PeerRecord(peer=me.peer_id, run=RUN, stage=0, state="serving", version=0)
    return Entry(me.peer_id, signed_records.seal_record(said, expires, me), expires)


@pytest.mark.virtual_time
async def test_what_has_expired_is_not_told() -> None:
    async with MemoryDht() as dht:
        at = (await dht.add(0)).node
        for subkey, life_s in (("soon", 5.0), ("later", 10.0)):
            at.keep(key_bytes(STAGE_0), Entry(subkey, b"", unix_s() + life_s), first_hand=False)
        await asyncio.sleep(6.0)
        assert kept(at) == ["later"]


async def test_a_full_node_forgets_all_at_once_in_a_moment() -> None:
    """One stranger stores what ends in one second; a count that was made anew for each took 1.7 s."""
    at = node()
    at.check.open = lambda key, entry: ""  # type: ignore[method-assign]
    for number in range(at.max_entries):
        entry = Entry(f"peer {number}", b"", unix_s() + 300.0)
        at.keep(bytes([number // at.max_subkeys]), entry, first_hand=True)
    began = time.process_time()
    for number in range(at.max_entries):
        at._drop(bytes([number // at.max_subkeys]), f"peer {number}")
    assert time.process_time() - began < 0.5
    assert (at._entries, at._of.total(), at._kept) == (0, 0, {})


async def test_a_full_node_looks_for_no_room_that_cannot_be() -> None:
    """It looked through all that it has, 3.4 ms for each value that newcomers stored: a crowd stopped it."""
    at = node()
    at.check.open = lambda key, entry: ""  # type: ignore[method-assign]
    for number in range(at.max_entries):
        entry = Entry(f"peer {number}", b"", unix_s() + 300.0)
        at.keep(b"%d" % (number % dht_protocol.MAX_KEYS), entry, first_hand=True)
    began = time.process_time()
    for number in range(1000):
        new = f"new {number}"
        assert not at._store(new, b"another key", Entry(new, b"", unix_s() + 300.0))
    assert time.process_time() - began < 0.5


def of_any(at: DhtNode) -> None:
    """Have a node take values that are no records."""
    at.check.open = lambda key, entry: ""  # type: ignore[method-assign]


@pytest.mark.virtual_time
async def test_what_is_over_makes_room_in_a_full_node() -> None:
    async with MemoryDht() as dht:
        at = (await dht.add(0)).node
        of_any(at)
        at.max_entries = 2
        for subkey in ("a", "b"):
            assert at.keep(KEY, Entry(subkey, b"", unix_s() + 5.0), first_hand=True)
        assert not at._store("c", OTHER_KEY, Entry("d", b"", unix_s() + 50.0))
        await asyncio.sleep(6.0)
        assert at._store("c", OTHER_KEY, Entry("d", b"", unix_s() + 50.0))
        assert (at._entries, list(at._kept)) == (1, [OTHER_KEY])


async def test_what_is_over_already_is_not_kept() -> None:
    at = node()
    of_any(at)
    assert not at._store("a", KEY, Entry("a", b"", unix_s() - 1.0))
    assert not at._kept


async def test_keys_are_bounded_and_so_are_those_who_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys are looked through once a second, and of each who offered something it is known how much."""
    monkeypatch.setattr(dht_protocol, "MAX_KEYS", 3)
    monkeypatch.setattr(dht_protocol, "MAX_OFFERERS", 3)
    at = node()
    of_any(at)
    stored = [at._store(f"p{n}", bytes([n]), Entry(f"p{n}", b"", unix_s() + 50.0)) for n in range(5)]
    assert stored == [True] * 3 + [False] * 2, "all are first-hand: none makes way"
    assert at._store("p9", bytes([0]), Entry("p9", b"", unix_s() + 50.0)), "under a key that is there"
    assert [peer for peer, _ in at._offers] == ["p3", "p4", "p9"]


async def test_what_one_hands_on_leaves_most_keys_to_others() -> None:
    """One that made up runs had all keys of a node within a minute: no manifest found a place there."""
    at = node()
    of_any(at)

    def hands_on(sender: str, first: int, count: int) -> int:
        some = [(number.to_bytes(2, "big"), f"peer {number}") for number in range(first, first + count)]
        stored = 0
        for key, subkey in some:
            at._offers.clear()  # as if it took its time
            stored += at._store(sender, key, Entry(subkey, b"", unix_s() + 50.0))
        return stored

    assert hands_on("liar", 0, 3000) == 820 == at._given["liar"]
    assert hands_on("other", 3000, 700) == 656
    at.drop_those(lambda kept: kept.entry.subkey > "peer 3")
    assert hands_on("liar", 4000, 10) == 10, "what is over counts no more"
    assert at._store("peer 1", (1).to_bytes(2, "big"), Entry("peer 1", b"", unix_s() + 60.0))
    assert sum(at._given.values()) == sum(map(len, at._second_hand.values())) == at._entries - 1


@pytest.mark.virtual_time
async def test_of_the_nodes_that_ever_answered_a_bounded_number_is_known() -> None:
    """All that a full part of the table had no place for were kept for ever, and asked for charters."""
    async with MemoryDht() as dht:
        storage = (await dht.add(0)).directory.storage
        table = storage.node.table
        for number in range(4_000):
            storage.node._met(f"peer {number}")
        stayed, all_ = sorted({len(storage.some(10_000)) for _ in range(20)})
        assert 100 < stayed < all_ == len(table.uid_to_peer_id) < 5 * stayed + table.bucket_size
        asked = {peer for _ in range(20) for peer in storage.some(stayed)}
        assert {"peer 0", "peer 3999"} < asked, "those that stay, and those that came last"


async def test_nothing_is_known_of_nodes_that_were_pinged_and_are_gone() -> None:
    """Of each that gave its place in a full part of the table to another one a name was kept for ever."""
    at = node()
    at.control = Control("")  # type: ignore

    async def call_peer(peer: str, data: bytes) -> bytes:
        raise ControlError("cannot be reached")

    at.control.call_peer = call_peer  # type: ignore
    for number in range(300):
        at._pinged_at = -1e9  # as a second later
        at._met(f"peer {number}")
        await asyncio.sleep(0)
    await at._tasks.ended()
    assert len(at.table.uid_to_peer_id) < 300, "some were pinged"
    assert not any(bucket.nodes_requested_for_ping for bucket in at.table.buckets)


async def test_what_a_node_reads_of_a_flooded_key_takes_no_more_room_than_what_it_is_given() -> None:
    at = node()
    of_any(at)
    at.max_subkeys = 2
    for number in range(5):
        at.keep_read(KEY, Entry(f"p{number}", b"", unix_s() + 50.0))
    assert (at._entries, len(at._kept[KEY])) == (2, 2)


async def test_a_node_that_is_full_makes_room_in_its_largest_key() -> None:
    at, other = node(), signed_records.peers_key(RUN, StageKey(1, 0, 0))
    at.max_entries = 10
    assert all([(await store(at, entry(n), sender=n + 1)) == [True] for n in range(100, 110)])
    assert await store(at, entry(1, 1), sender=99, key=other) == [False]
    assert await store(at, entry(1, 1), sender=1, key=other) == [True]
    assert (len(kept(at)), kept(at, other)) == (9, [entry(1, 1).subkey])


async def test_a_record_that_is_refused_drives_none_out() -> None:
    at = node()
    at.max_subkeys = 2
    assert all(await store(at, entry(100), entry(101), sender=99))
    assert await store(at, entry(1)._replace(value=b"forged"), sender=1) == [False]
    assert await store(at, entry(1, 1), sender=1) == [False], "of another stage"
    assert set(kept(at)) == {entry(100).subkey, entry(101).subkey}


async def test_a_strangers_records_are_not_stored() -> None:
    check = RecordCheck()
    at = node(check)
    me, victim = Identity((1).to_bytes(32, "big")), Identity((2).to_bytes(32, "big"))
    own = PeerRecord(peer=me.peer_id, run=RUN, stage=0, state="serving", version=0)
    about_victim = PeerRecord(peer=victim.peer_id, run=RUN, stage=0, state="serving", version=0)
    packed = signed_records._pack(about_victim, 0)
    forged = msgspec.msgpack.encode([packed, soon(), me.sign(b"not what it should be"), PROTOCOL_VERSION])
    good = signed_records.seal_record(own, soon(), me)
    other_run = signed_records.peers_key("e" * 32, StageKey(0, 0, 0))
    wrong: list[tuple[str, str, str, bytes, float]] = [
        ("a record with a wrong signature", STAGE_0, victim.peer_id, forged, soon()),
        ("a record with a wrong signature", STAGE_0, victim.peer_id, good, soon()),
        ("stored for another time", STAGE_0, me.peer_id, good, soon() + 30),
        ("a value that wants to live too long", STAGE_0, me.peer_id, good, soon() + 1e6),
        ("a value under a key where it does not belong", other_run, me.peer_id, good, soon()),
        ("a malformed manifest", "anything", "x", b"what is this", soon()),
        ("a value that is too large", STAGE_0, me.peer_id, bytes(100_000), soon()),
        ("a malformed record", STAGE_0, me.peer_id, b"\x91" * 900, soon()),
    ]
    for number, (reason, key, subkey, value, expires) in enumerate(wrong, start=1):
        assert await store(at, Entry(subkey, value, expires), sender=1, key=key) == [False], reason
        assert sum(check.rejected.values()) == number and any(reason in text for text in check.rejected)
    assert not at._kept
    # His own record, about himself, is as good as any. An older one does not replace it.
    assert await store(at, Entry(me.peer_id, good, soon()), sender=1) == [True]
    renewed = msgspec.structs.replace(own, version=7)
    older = signed_records.seal_record(renewed, soon() - 5, me)
    assert await store(at, Entry(me.peer_id, older, soon() - 5), sender=1) == [False]
    (kept_now,) = at.entries(key_bytes(STAGE_0))
    assert kept_now.value == good


async def test_a_manifest_that_expires_never_or_not_at_a_number_is_not_kept() -> None:
    """A NaN is not later than the latest time, and no time is later than a NaN: it stayed for ever."""
    at = node()
    run = example_run()
    _, value = signed_records.seal_manifest(run, None)
    key = signed_records.manifest_key(run.id)
    for never in (float("nan"), float("inf")):
        assert await store(at, Entry("", value, never), sender=1, key=key) == [False]
    assert at.check.rejected == {"a value that wants to live too long": 2}
    assert await store(at, Entry("", value, soon()), sender=1, key=key) == [True]


# -- believing ---------------------------------------------------------------------------------------------


class Control:
    """A p2pd at which every node says the same."""

    def __init__(self, said: object) -> None:
        self.said = msgspec.msgpack.encode(said)

    async def call_peer(self, peer: str, data: bytes) -> bytes:
        return self.said


@pytest.mark.parametrize(
    ("said", "believed"),
    [
        ([FoundEntries((Entry("a", bytes(50), 1.0),), 0)], True),
        ([FoundEntries((Entry("a", bytes(100_000), 1.0),), 0)], False),
        ([FoundEntries((), 0), FoundEntries((), 0)], False),
        ([["nonsense"]], False),
    ],
)
async def test_an_answer_that_cannot_be_ends_nothing_and_costs_little(said: object, believed: bool) -> None:
    at = node()
    at.control = Control(said)  # type: ignore
    assert (await at.read(peer_id(1), {bytes(20): {}}, 1000) is not None) == believed


@pytest.mark.parametrize(("said", "known"), [(Pong(1.0, False, 1), True), ("no pong", False)])
async def test_who_asks_is_known_as_a_node_once_it_has_answered(said: object, known: bool) -> None:
    """Hundreds of strangers that only ask would stand between the nodes and their keys."""
    at = node()
    at.control = Control(said)  # type: ignore
    await at.answer(msgspec.msgpack.encode(Find([KEY])), peer_id(1))
    while at._tasks._tasks:
        await asyncio.sleep(0)
    assert at.table.peer_id_to_uid == ({peer_id(1): node_id_of(peer_id(1))} if known else {})


@pytest.mark.virtual_time
async def test_no_more_of_those_who_ask_are_pinged_than_may_be() -> None:
    at, asked = node(), list[str]()

    async def call_peer(peer: str, data: bytes) -> bytes:
        asked.append(peer)
        return b""

    at.control = Control("")  # type: ignore
    at.control.call_peer = call_peer  # type: ignore
    for number in range(1, 2 * int(dht_protocol.PINGED_AT_ONCE)):
        await at.answer(msgspec.msgpack.encode(Find([KEY])), peer_id(number))
    await asyncio.sleep(1.0)
    assert len(asked) == dht_protocol.PINGED_AT_ONCE


@pytest.mark.virtual_time
@pytest.mark.parametrize("what", ["questions", "finds", "bytes"])
async def test_one_that_asks_without_end_takes_no_more_time_than_others_are_given(what: str) -> None:
    """24 questions a second for all that a node has, 2 kB each, stopped it."""
    at, keys = node(), [bytes([number]) * 20 for number in range(64)]
    for key in keys:
        held = [Entry(f"{key.hex()} {number}", b"", soon()) for number in range(256)]
        at._kept[key] = {one.subkey: KeptEntry(one, True) for one in held}
    at._met = at._strangers.take_if_there = lambda *_, **__: False  # type: ignore
    every = ask({key: {} for key in keys}, 0, SALT)
    asked, cost = {
        "questions": (every, 64 * 256),
        "finds": (Find(keys), 64 * FIND_COST),
        "bytes": (Question(0, SALT, [AskedKey(KEY, bytes(8 * 2048))]), 8 * 2048 * KNOWN_BYTES_COST),
    }[what]
    cost, data, answered = cost + CALL_COST, msgspec.msgpack.encode(asked), 0
    with pytest.raises(Refused, match="other peers ask as well"):
        while answered * cost < 1.2 * LOOKED_THROUGH_AT_ONCE:
            await at.answer(data, peer_id(1))
            answered += 1
    assert answered * cost > 0.8 * LOOKED_THROUGH_AT_ONCE
    assert await at.answer(data, peer_id(2))
    await asyncio.sleep(2.0)
    assert await at.answer(data, peer_id(1)), "what an honest peer asks in that time"


@pytest.mark.virtual_time
async def test_one_that_asks_without_end_is_told_no_more_than_half_a_megabyte_a_second() -> None:
    """Of 64 values of 8 kB each question of 2 kB had 512 kB told: a GB at once, then 140 MB a second, over a
    line that carries a hundredth of it, or into p2pd's memory, if it was not read."""
    at, keys = node(), [bytes([number]) * 20 for number in range(64)]
    for key in keys:
        at._kept[key] = {"a": KeptEntry(Entry("a", bytes(8000), unix_s() + 300.0))}
    at._strangers.take_if_there = lambda *_, **__: False  # type: ignore
    question, told = msgspec.msgpack.encode(ask({key: {} for key in keys}, 1 << 20, SALT)), 0
    with pytest.raises(Refused, match="other peers ask as well"):
        while told < 64e6:
            told += len(await at.answer(question, peer_id(1)))
    assert 4e6 < told < 6e6
    assert len(await at.answer(question, peer_id(2))) > 500_000
    await asyncio.sleep(2.0)
    assert len(await at.answer(question, peer_id(1))) > 500_000


def test_of_large_values_that_were_offered_few_are_held_in_memory() -> None:
    """What became of 8,192 was remembered, with all of it: 136 MB, for as long as the peer ran."""
    check = RecordCheck()
    tracemalloc.start()
    try:
        for number in range(500):
            assert check.open(KEY, Entry("", number.to_bytes(4, "big") + bytes(16_000), soon())) is None
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 4e6


async def test_identities_that_are_made_nearer_and_nearer_do_not_keep_a_search_going() -> None:
    at, asked = node(), list[str]()
    key = dht_protocol.DHTID.from_bytes(KEY)
    crowd = sorted(map(peer_id, range(1, 201)), key=lambda peer: node_id_of(peer) ^ key, reverse=True)

    async def call_peer(peer: str, data: bytes) -> bytes:
        asked.append(peer)
        return msgspec.msgpack.encode([crowd[crowd.index(peer) :][:2]])

    at.control = Control("")  # type: ignore
    at.control.call_peer = call_peer  # type: ignore
    at.table.add_or_update_node(node_id_of(crowd[0]), crowd[0])
    found = await at.search([key])
    assert len(asked) == dht_protocol.SEARCH_ROUNDS and found[key][0] == crowd[dht_protocol.SEARCH_ROUNDS]


async def test_one_peer_is_no_more_nodes_than_one_however_its_name_is_written() -> None:
    """p2pd's reading of an id forgives blanks at its end: ids of other keys have room for six of them."""
    at, asked = node(), list[str]()
    liar, told = "Qm" + "a" * 44, peer_id(1)

    async def call_peer(peer: str, data: bytes) -> bytes:
        asked.append(peer)
        names = [liar + f"{number:06b}".replace("0", " ").replace("1", "\t") for number in range(18)]
        return msgspec.msgpack.encode([[told, *names]])

    at.control = Control("")  # type: ignore
    at.control.call_peer = call_peer  # type: ignore
    at.table.add_or_update_node(node_id_of(liar), liar)
    found = await at.search([dht_protocol.DHTID.from_bytes(KEY)])
    assert sorted(asked) == sorted([liar, told]) == sorted(at.table.peer_id_to_uid)
    assert [sorted(near) for near in found.values()] == [sorted([liar, told])]
