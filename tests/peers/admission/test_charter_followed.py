"""A charter on its way: found in the DHT, followed by all peers, and never replaced by an older one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from peers.clock import now_s, unix_s
from peers.net._hivemind import DHTID
from peers.net.charter import signed
from peers.net.dht_protocol import REPLICAS, Entry, key_bytes, nearest
from peers.net.identity import Identity
from peers.net.signed_records import record_keys, seal_record
from swarm import charter as rules
from swarm.charter import AdmissionRule, Ban, Charter
from swarm.errors import SetupError
from swarm.ids import RunName, fingerprint_of
from swarm.manifest import Run, audit_run
from swarm.records import PeerRecord
from tests.net.directory.memory_dht import MemoryDht, MemoryNode, record

pytestmark = pytest.mark.virtual_time

OWNER, THIEF = Identity(b"o" * 32), Identity(b"t" * 32)
FOLLOWED_S = 30.0
"""Within which all go by a new charter."""
COUNT = 8
"""Peers among which liars stand."""


def run_of(owner: str = OWNER.peer_id, **admission: Any) -> Run:
    run = audit_run(stages=2, steps=3)
    run = replace(run, data=replace(run.data, sha256="0" * 64))
    return replace(run, admission=replace(run.admission, owner=owner, **admission))


RUN = run_of()
NAME = RunName(RUN.name, fingerprint_of(OWNER.peer_id))


def charter(sequence: int = 1, **changes: Any) -> Charter:
    fields = {"name": RUN.name, "run": RUN.id, "sequence": sequence, "expires": int(unix_s()) + 86_400}
    return rules.make(**(fields | changes))


async def swarm(dht: MemoryDht, count: int, *, run: Run = RUN, **options: Any) -> list[MemoryNode]:
    """Peers of the run, the first of which has published its manifest; not yet a charter."""
    first = await dht.add(1, run_id=run.id, **options)
    first.directory._identity = OWNER  # the bootstrap's key is the owner's
    await first.directory.publish_manifest(run)
    first.directory._identity = first.identity
    others = [await dht.add(n, run_id=run.id, join=first, **options) for n in range(2, count + 1)]
    for other in others:
        await other.directory.fetch_manifest(run.id)
    return [first, *others]


async def within(limit_s: float, condition: Callable[[], object]) -> float:
    """How long it took to be true, in virtual seconds."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while not condition():
        assert loop.time() < began + limit_s, f"not within {limit_s} s"
        await asyncio.sleep(0.25)
    return loop.time() - began


def sequences(nodes: Sequence[MemoryNode]) -> list[int]:
    """Of the charters that they go by; 0: none."""
    found = [node.directory.door.terms for node in nodes]
    return [0 if terms is None else terms.charter.sequence for terms in found]


def mine(node: MemoryNode, **changes: Any) -> Any:
    return record(node, **({"run": RUN.id} | changes))


async def offer(node: MemoryNode, one: Charter, owner: Identity, *, name: RunName = NAME) -> int:
    """Put a charter on the nodes near its key, as anybody may; how many took it."""
    entry = Entry(owner.peer_id, signed.seal_charter(one, owner), unix_s() + 300)
    return await node.directory.storage.store(signed.charter_key(name), entry) - 1


async def test_a_newcomer_finds_a_run_by_its_name_and_believes_no_other_owner() -> None:
    async with MemoryDht() as dht:
        nodes = await swarm(dht, 4)
        await nodes[0].directory.charters.publish(charter(), OWNER)
        newcomer = await dht.add(9, run_id=None, join=nodes[1])
        assert await newcomer.directory.find_run(NAME) == RUN.id
        assert newcomer.directory.run_id == newcomer.directory.reader.run_id == RUN.id
        await newcomer.directory.fetch_manifest(RUN.id)
        assert sequences([newcomer]) == [1]
        taken = newcomer.directory.charters.adopt(charter(9), THIEF.peer_id, b"")
        assert not taken
        other = RunName(RUN.name, fingerprint_of(THIEF.peer_id))
        with pytest.raises(SetupError, match=f"no peer here knows a run {other}: check the name and the"):
            await newcomer.directory.find_run(other, timeout_s=2.0)


async def test_whoever_knows_only_the_id_follows_the_charter_of_the_manifests_owner() -> None:
    async with MemoryDht() as dht:
        nodes = await swarm(dht, 5)
        assert sequences(nodes) == [0] * 5
        await nodes[0].directory.charters.publish(charter(), OWNER)
        took = await within(FOLLOWED_S, lambda: sequences(nodes) == [1] * 5)
        newcomer = await dht.add(9, run_id=RUN.id, join=nodes[1])
        await newcomer.directory.fetch_manifest(RUN.id)
        assert sequences([newcomer]) == [1], "at once"
        print(f"\nfollowed after {took:.1f} s")


async def test_a_ban_is_followed_by_all_within_thirty_seconds_and_its_record_goes() -> None:
    async with MemoryDht() as dht:
        nodes = await swarm(dht, 12)
        await nodes[0].directory.charters.publish(charter(), OWNER)
        for node in nodes[1:]:
            await node.directory.announce(mine(node))
        banned, others = nodes[5], [*nodes[:5], *nodes[6:]]
        await within(60, lambda: all(node.directory.find(banned.peer_id) for node in others))
        new = charter(2, bans=(Ban(banned.peer_id, "x"),))
        await nodes[3].directory.charters.publish(new, OWNER)  # anywhere
        took = await within(FOLLOWED_S, lambda: sequences(nodes) == [2] * 12)
        print(f"\na ban is followed by 12 peers after {took:.1f} s")
        assert not any(node.directory.find(banned.peer_id) for node in others)
        held = [entry for node in others for keys in node.node._kept.values() for entry in keys]
        assert banned.peer_id not in held
        await asyncio.sleep(40)  # it goes on announcing itself
        assert not any(node.directory.find(banned.peer_id) for node in others)
        assert any("banned" in why for node in others for why in node.directory.storage.check.rejected)
        await nodes[0].directory.charters.publish(charter(3), OWNER)
        await within(60, lambda: all(node.directory.find(banned.peer_id) for node in others))


async def test_a_ban_is_followed_though_all_nodes_near_its_key_are_a_liars(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a node stands follows from its id, and ids are made in milliseconds: a few dozen stood nearest to
    the charter, took the ban, and told nobody."""
    keys = [key_bytes(key) for key in (signed.charter_key(NAME), signed.revocations_key(RUN.id))]
    ids = {n: Identity(n.to_bytes(32, "big")).peer_id for n in range(1000, 2000)}
    near = {peer for key in keys for peer in nearest(DHTID.from_bytes(key), ids.values(), 2 * REPLICAS)}
    async with MemoryDht() as dht:
        nodes = await swarm(dht, COUNT)
        await nodes[0].directory.charters.publish(charter(), OWNER)
        await within(FOLLOWED_S, lambda: sequences(nodes) == [1] * COUNT)
        for number in (n for n, peer in ids.items() if peer in near):
            liar = await dht.add(number, run_id=RUN.id, join=nodes[number % COUNT])
            monkeypatch.setattr(liar.node, "_store", lambda *_: True)
            monkeypatch.setattr(liar.node, "entries", lambda key: [])
        await asyncio.sleep(60)  # searches find them
        owner = await dht.add(99, run_id=RUN.id, join=nodes[3])
        await owner.directory.fetch_manifest(RUN.id)
        place = owner.directory.storage.place(signed.charter_key(NAME))
        await owner.directory.storage.search([place])
        assert {*owner.directory.storage.nearest(place, REPLICAS)} < near
        assert await owner.directory.charters.publish(charter(2, bans=(Ban(min(near), "x"),)), OWNER) > 1
        await dht.kill(owner)  # the command has ended
        took = await within(240.0, lambda: sequences(nodes) == [2] * COUNT)
        print(f"\na ban is followed by {COUNT} peers after {took:.1f} s")
        newest = charter(3)  # one peer has it from before
        nodes[5].directory.charters.adopt(newest, OWNER.peer_id, signed.seal_charter(newest, OWNER))
        await within(240.0, lambda: sequences(nodes) == [3] * COUNT)


async def test_peers_see_one_another_though_all_nodes_near_their_stage_are_a_liars(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten identities that took all records of a stage, and told nobody, stood the run still."""
    async with MemoryDht() as dht:
        nodes = await swarm(dht, COUNT)
        for node in nodes:
            await node.directory.announce(mine(node))
        ids = {n: Identity(n.to_bytes(32, "big")).peer_id for n in range(1000, 2000)}
        key = DHTID.from_bytes(key_bytes(record_keys(mine(nodes[0]), 0)[0]))
        near = nearest(key, ids.values(), 2 * REPLICAS)
        for number in (n for n, peer in ids.items() if peer in near):
            liar = await dht.add(number, run_id=RUN.id, join=nodes[number % COUNT])
            monkeypatch.setattr(liar.node, "_store", lambda *_: True)
            monkeypatch.setattr(liar.node, "entries", lambda key: [])
        await asyncio.sleep(60)
        for _ in range(4):
            await asyncio.sleep(15)
            seen = [sum(bool(one.directory.find(other.peer_id)) for other in nodes) for one in nodes]
            assert sum(seen) > 0.95 * COUNT**2
        late = await dht.add(99, run_id=RUN.id, join=nodes[3])
        await late.directory.fetch_manifest(RUN.id)
        await within(20.0, lambda: all(late.directory.find(node.peer_id) for node in nodes))


async def test_what_is_read_is_held_for_others_while_there_is_room() -> None:
    async with MemoryDht() as dht:
        at = (await swarm(dht, 1))[0].node
        at.max_subkeys, key, end = 3, bytes(20), unix_s() + 100.0
        at.check.open = lambda key, entry: ""  # type: ignore[method-assign]
        for number in range(5):
            at.keep_read(key, Entry(f"peer {number}", b"", end))
        assert len(at.entries(key)) == 3


async def test_an_older_charter_is_not_taken_however_long_it_would_live() -> None:
    async with MemoryDht() as dht:
        nodes = await swarm(dht, 5)
        await nodes[0].directory.charters.publish(charter(3), OWNER)
        await within(FOLLOWED_S, lambda: sequences(nodes) == [3] * 5)
        stranger = await dht.add(9, run_id=None, join=nodes[0])
        await asyncio.sleep(1)
        assert await offer(stranger, charter(2), OWNER) == 0
        assert await offer(stranger, charter(4), OWNER) == 5
        await within(FOLLOWED_S, lambda: sequences(nodes) == [4] * 5)


async def test_a_charter_of_somebody_else_or_expired_or_misplaced_is_not_kept() -> None:
    async with MemoryDht() as dht:
        nodes = await swarm(dht, 3)
        assert await offer(nodes[0], charter(7), THIEF) == 0
        assert await offer(nodes[0], charter(7), OWNER, name=RunName("other", NAME.fingerprint)) == 0
        assert await offer(nodes[0], charter(7, expires=int(unix_s()) - 1), OWNER) == 0
        assert await offer(nodes[0], charter(7, expires=int(unix_s()) + 40 * 86_400), OWNER) == 0
        rejected = nodes[1].directory.storage.check.rejected
        assert "a value under a key where it does not belong" in rejected
        assert any("has expired" in why for why in rejected)
        assert any("more than 30 days" in why for why in rejected)
        assert sequences(nodes) == [0] * 3


async def test_a_peer_remembers_the_highest_charter_over_a_restart(tmp_path: Path) -> None:
    """All that know the new one are gone, and what it finds is an older one that still holds."""
    async with MemoryDht() as dht:
        nodes = await swarm(dht, 2)
        await offer(nodes[0], charter(1), OWNER)
        old = await dht.add(7, run_id=RUN.id, join=nodes[0], charters=tmp_path)
        await old.directory.fetch_manifest(RUN.id)
        assert sequences([old]) == [1]
        old.directory.charters.adopt(charter(5), OWNER.peer_id, signed.seal_charter(charter(5), OWNER))
        await dht.kill(old)
        again = await dht.add(8, run_id=None, join=nodes[1], charters=tmp_path)
        await again.directory.find_run(NAME)
        assert sequences([again]) == [5]


async def test_a_lower_charter_does_not_replace_a_higher_one_on_the_disk(tmp_path: Path) -> None:
    async with MemoryDht() as dht:
        nodes = [await dht.add(n, run_id=RUN.id, charters=tmp_path) for n in (1, 2)]
        for node in nodes:
            node.directory.charters.follow(NAME)
        high, low = (node.directory.charters for node in nodes)
        high.adopt(charter(5), OWNER.peer_id, signed.seal_charter(charter(5), OWNER))
        low.adopt(charter(2), OWNER.peer_id, signed.seal_charter(charter(2), OWNER))
        third = await dht.add(3, run_id=RUN.id, charters=tmp_path)
        third.directory.charters.follow(NAME)
        assert third.directory.charters.charter is not None
        assert third.directory.charters.charter.sequence == 5
        (path,) = tmp_path.iterdir()
        path.write_bytes(b"\xff damaged")
        fourth = await dht.add(4, run_id=RUN.id, charters=tmp_path)
        fourth.directory.charters.follow(NAME)
        assert fourth.directory.charters.charter is None


async def test_a_charter_that_expired_lets_nobody_in_and_the_next_one_does() -> None:
    async with MemoryDht() as dht:
        nodes = await swarm(dht, 3)
        await nodes[0].directory.charters.publish(charter(1, expires=int(unix_s()) + 100), OWNER)
        await within(FOLLOWED_S, lambda: sequences(nodes) == [1] * 3)
        door = nodes[1].directory.door
        assert door.refusal(nodes[2].peer_id, "part", True) == ""
        await asyncio.sleep(100)
        assert "has expired" in door.refusal(nodes[2].peer_id, "part", True)
        newcomer = await dht.add(9, run_id=None, join=nodes[1])
        with pytest.raises(SetupError, match="no peer here knows a run"):
            await newcomer.directory.find_run(NAME, timeout_s=2.0)
        await nodes[0].directory.charters.publish(charter(2), OWNER)
        await within(FOLLOWED_S, lambda: sequences(nodes) == [2] * 3)
        assert door.refusal(nodes[2].peer_id, "part", True) == ""


async def test_a_charter_that_is_about_to_expire_is_said_once_a_day(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with MemoryDht() as dht:
        (only,) = await swarm(dht, 1)
        charters = only.directory.charters
        await charters.publish(charter(1, expires=int(unix_s()) + 4 * 86_400), OWNER)
        await asyncio.sleep(5)
        assert "expires in" not in caplog.text
        await charters.publish(charter(2, expires=int(unix_s()) + 2 * 86_400), OWNER)
        await asyncio.sleep(30)
        assert caplog.text.count("expires in 48 h: then nobody is admitted until its owner has") == 1
        await charters.publish(charter(3, expires=int(unix_s()) + 30 * 60), OWNER)
        charters._warn(now_s() + 86_400)
        assert caplog.text.count("expires in") == 2
        assert "expires in 30 min: then" in caplog.text
        await charters.publish(charter(4, expires=int(unix_s()) + 31 * 86_400), OWNER)
        charters._warn(now_s() + 2 * 86_400)
        assert "holds for more than 30 days, so a clock is wrong (NTP): then nobody is adm" in caplog.text


async def test_a_name_whose_run_is_of_another_owner_is_not_joined() -> None:
    """The owner of a name cannot lead peers into a run that is not his."""
    theirs = run_of(owner="")
    async with MemoryDht() as dht:
        first = await dht.add(1, run_id=theirs.id)
        await first.directory.publish_manifest(theirs)
        lying = charter(1, name=theirs.name, run=theirs.id)
        await first.directory.storage.store(
            signed.charter_key(NAME),
            Entry(OWNER.peer_id, signed.seal_charter(lying, OWNER), unix_s() + 300),
        )
        newcomer = await dht.add(2, run_id=None, join=first)
        assert await newcomer.directory.find_run(NAME) == theirs.id
        text = "names a run whose manifest is 'counting' of no owner: do not join it"
        with pytest.raises(SetupError, match=f"the charter of {NAME} {text}"):
            await newcomer.directory.fetch_manifest(theirs.id)


async def test_a_charter_that_names_another_run_does_not_move_a_run_that_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with MemoryDht() as dht:
        nodes = await swarm(dht, 3)
        await nodes[0].directory.charters.publish(charter(1), OWNER)
        await within(FOLLOWED_S, lambda: sequences(nodes) == [1] * 3)
        await offer(nodes[0], charter(2, run="ab" * 16), OWNER)
        await asyncio.sleep(FOLLOWED_S)
        assert sequences(nodes) == [1] * 3
        assert "names another run now" in caplog.text


async def test_a_key_revokes_itself_without_the_owner() -> None:
    async with MemoryDht() as dht:
        nodes = await swarm(dht, 6)
        await nodes[0].directory.charters.publish(charter(1), OWNER)
        await within(FOLLOWED_S, lambda: sequences(nodes) == [1] * 6)
        stolen = nodes[4]
        await stolen.directory.announce(mine(stolen))
        await within(60, lambda: nodes[1].directory.find(stolen.peer_id))
        sealed = signed.seal_revocation(RUN.id, stolen.identity)
        assert await nodes[2].directory.charters.revoke(RUN.id, stolen.peer_id, sealed) > 1
        others = [node for node in nodes if node is not stolen]
        await within(FOLLOWED_S, lambda: all(stolen.peer_id in n.directory.charters.revoked for n in others))
        assert not any(node.directory.find(stolen.peer_id) for node in others)
        assert "revoked by itself" in nodes[1].directory.door.refusal(stolen.peer_id, "status", True)
        forged = Entry(nodes[3].peer_id, sealed, unix_s() + 300)
        key = signed.revocations_key(RUN.id)
        assert await nodes[2].directory.storage.store(key, forged) == 1, "nobody but us"


async def test_a_newcomer_hears_of_a_stolen_key_though_all_nodes_are_gone_that_were_told() -> None:
    async with MemoryDht() as dht:
        nodes = await swarm(dht, 3)
        await nodes[0].directory.charters.publish(charter(), OWNER)
        stolen = THIEF.peer_id
        await nodes[0].directory.charters.revoke(RUN.id, stolen, signed.seal_revocation(RUN.id, THIEF))
        last = await dht.add(8, run_id=RUN.id, join=nodes[0])
        await last.directory.fetch_manifest(RUN.id)
        await within(FOLLOWED_S, lambda: stolen in last.directory.charters.revoked)
        for node in nodes:
            await dht.kill(node)
        newcomer = await dht.add(9, run_id=RUN.id, join=last)
        await newcomer.directory.fetch_manifest(RUN.id)
        await within(FOLLOWED_S, lambda: stolen in newcomer.directory.charters.revoked)


@pytest.fixture
def room_for_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three keys that revoked themselves are kept, no more."""
    monkeypatch.setattr("peers.net.charter.keeper.MAX_REVOKED", 3)


@pytest.mark.usefixtures("room_for_three")
async def test_strangers_that_revoke_themselves_do_not_crowd_out_a_peer_of_the_run() -> None:
    async with MemoryDht() as dht:
        nodes = await swarm(dht, 3)
        await nodes[0].directory.charters.publish(charter(1, founders=(THIEF.peer_id,)), OWNER)
        await within(FOLLOWED_S, lambda: sequences(nodes) == [1] * 3)
        await nodes[2].directory.announce(mine(nodes[2]))
        charters = nodes[1].directory.charters
        await within(20, lambda: nodes[1].directory.find(nodes[2].peer_id))
        for n in range(100, 105):
            stranger = Identity(n.to_bytes(32, "big")).peer_id
            charters._revoke(signed.Revocation(RUN.id, stranger), 0.0)
        assert len(charters.revoked) == 3
        for known in (nodes[2].peer_id, THIEF.peer_id):
            charters._revoke(signed.Revocation(RUN.id, known), 0.0)
            charters._revoke(signed.Revocation("ab" * 16, known), 0.0)
        assert len(charters.revoked) == 3
        assert {nodes[2].peer_id, THIEF.peer_id} < charters.revoked


@pytest.mark.usefixtures("room_for_three")
async def test_no_crowd_that_revokes_itself_has_a_stolen_key_forgotten() -> None:
    """Of a trainer whom the manifest names, say: identities with records of their own are free."""
    named, invited, late = (Identity(bytes([n]) * 32).peer_id for n in (201, 202, 203))
    crowd = [Identity(n.to_bytes(32, "big")).peer_id for n in range(100, 110)]
    async with MemoryDht() as dht:
        nodes = await swarm(dht, 2, run=run_of(trainers=(named, late)))
        run = nodes[0].directory.charters.run
        assert run is not None
        await nodes[0].directory.charters.publish(charter(1, run=run.id), OWNER)
        await within(FOLLOWED_S, lambda: sequences(nodes) == [1] * 2)
        charters = nodes[1].directory.charters
        there = {invited, *crowd}
        charters._is_there = lambda peer: peer in there
        for peer in (named, invited, *crowd):
            charters._revoke(signed.Revocation(run.id, peer), 0.0)
            there.discard(peer)  # nobody believes its record any more
            charters._revoke(signed.Revocation(run.id, peer), 1.0)
        assert {named, invited} < charters.revoked and len(charters.revoked) == 3
        charters._revoke(signed.Revocation(run.id, late), 0.0)
        assert {named, late} < charters.revoked and len(charters.revoked) == 3


async def test_a_crowd_that_revokes_itself_costs_one_look_at_all_that_is_known() -> None:
    """Each record that is here is judged again: 300 keys stopped each peer of 1000 for 3.5 s."""
    async with MemoryDht() as dht:
        nodes = await swarm(dht, 2)
        await nodes[0].directory.charters.publish(charter(1), OWNER)
        await within(FOLLOWED_S, lambda: sequences(nodes) == [1] * 2)
        directory, looked = nodes[1].directory, list[int]()
        directory.door.on_change.append(lambda: looked.append(1))
        keys = [Identity(n.to_bytes(32, "big")) for n in range(100, 150)]
        key = directory.storage.place(signed.revocations_key(RUN.id)).key
        crowd = [Entry(k.peer_id, signed.seal_revocation(RUN.id, k), unix_s() + 300) for k in keys]
        directory.charters._take(key, crowd)
        assert len(directory.charters.revoked) == len(crowd) and len(looked) == 1
        assert "revoked by itself" in directory.door.refusal(keys[-1].peer_id, "status", True)
        directory.charters._take(key, crowd)
        assert len(looked) == 1


async def test_only_the_invited_are_seen_in_a_run_for_the_invited() -> None:
    async with MemoryDht() as dht:
        nodes = await swarm(dht, 4)
        closed = charter(1, peers=AdmissionRule("token"))
        await nodes[0].directory.charters.publish(closed, OWNER)
        await within(FOLLOWED_S, lambda: sequences(nodes) == [1] * 4)
        token = signed.make_token(RUN.id, OWNER, "peer", expires=int(unix_s()) + 1000)
        invited, stranger = nodes[2], nodes[3]
        certificate = signed.certify(token, RUN.id, invited.peer_id)[1]
        invited.directory.door.credential = signed.seal_credential(certificate)
        for node in (invited, stranger):
            await node.directory.announce(mine(node))
        await within(20, lambda: nodes[1].directory.find(invited.peer_id))
        await asyncio.sleep(20)
        assert nodes[1].directory.find(stranger.peer_id) is None
        assert nodes[1].directory.door.refusal(invited.peer_id, "part", True) == ""


async def test_a_record_that_is_over_uses_no_token_whoever_shows_it_again() -> None:
    """Who came back with another key and the same token was shut out by anybody who had kept his first
    record, for as long as that one liked."""
    token = signed.make_token(RUN.id, OWNER, "peer", expires=int(unix_s()) + 86_400)

    def shown(key: Identity, ends: float) -> Entry:
        credential = signed.seal_credential(signed.certify(token, RUN.id, key.peer_id)[1])
        said = PeerRecord(peer=key.peer_id, run=RUN.id, stage=0, state="serving", version=0)
        return Entry(key.peer_id, seal_record(said, ends, key, credential=credential), ends)

    async with MemoryDht() as dht:
        (at,) = await swarm(dht, 1)
        closed = charter(1, peers=AdmissionRule("token"))
        assert at.directory.charters.adopt(closed, OWNER.peer_id, signed.seal_charter(closed, OWNER))
        first, again, place = Identity(b"1" * 32), Identity(b"2" * 32), key_bytes(f"{RUN.id}.peers.0.0.0")
        assert at.node._store(again.peer_id, place, shown(again, unix_s() + 20.0))
        assert not at.node._store(THIEF.peer_id, place, shown(first, unix_s() - 3600.0))
        assert at.node._store(again.peer_id, place, shown(again, unix_s() + 25.0))
        assert at.directory.door.shown(first.peer_id) == b""


@pytest.mark.slow
async def test_following_a_large_charter_costs_little_while_nothing_changes() -> None:
    many = tuple(sorted(Identity(n.to_bytes(32, "big")).peer_id for n in range(250)))
    async with MemoryDht() as dht:
        nodes = await swarm(dht, 6)
        large = charter(1, founders=many)
        size = len(rules.encode(large))
        assert size > 13_000
        await nodes[0].directory.charters.publish(large, OWNER)
        await within(FOLLOWED_S, lambda: sequences(nodes) == [1] * 6)
        await asyncio.sleep(60)
        before = dht.bytes["rpc_read"]
        await asyncio.sleep(240)
        charters_read = (dht.bytes["rpc_read"] - before) / size
        polled = 6 * 240 / 8 * 2
        print(f"\n{charters_read:.0f} charters' bytes in {polled:.0f} questions")
        assert charters_read < polled / 3


async def test_a_run_without_an_owner_follows_nothing() -> None:
    bare = run_of(owner="")
    async with MemoryDht() as dht:
        first = await dht.add(1, run_id=bare.id)
        await first.directory.publish_manifest(bare)
        second = await dht.add(2, run_id=bare.id, join=first)
        await second.directory.fetch_manifest(bare.id)
        await asyncio.sleep(60)
        for node in (first, second):
            assert node.directory.charters.name is None
            assert node.directory.door.terms is None
