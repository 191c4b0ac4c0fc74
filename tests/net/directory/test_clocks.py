"""Machines whose clocks are wrong, or jump, in virtual time: what others depend on goes on or says so."""

from __future__ import annotations

import asyncio
import logging

import pytest

from peers.net.dht_protocol import Pong
from peers.net.dht_storage import what_is_wrong
from peers.net.identity import Identity
from swarm.errors import SetupError
from swarm.wire.version import PROTOCOL_VERSION
from tests.example import example_run
from tests.net.directory.memory_dht import MemoryDht, MemoryNode, record
from tests.peers.admission import test_charter_followed as followed
from tests.seeds import some

pytestmark = pytest.mark.virtual_time

HOUR_S = 3600.0


def seen(node: MemoryNode, other: MemoryNode) -> int | None:
    """The version that a node believes another to have."""
    found = node.directory.find(other.peer_id)
    return found.version if found is not None else None


@pytest.mark.parametrize("jump_s", some([10.0, 300.0, HOUR_S, -HOUR_S], quick=[300.0, -HOUR_S]))
async def test_a_peer_whose_clock_jumps_and_returns_is_seen_again_and_says_so(
    jump_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with MemoryDht() as dht:
        first = await dht.add(0)
        peer = await dht.add(1, join=first)
        for node in (first, peer):
            node.directory.watch({0})
        await peer.directory.announce(record(peer, version=1))
        await first.directory.announce(record(first, version=1))
        await asyncio.sleep(30.0)
        assert seen(first, peer) == seen(peer, first) == 1
        peer.clock.ahead_s = jump_s
        await asyncio.sleep(60.0)
        peer.clock.ahead_s = 0.0
        await peer.directory.announce(record(peer, version=2))
        await first.directory.announce(record(first, version=2))
        await asyncio.sleep(12.0)
        assert seen(first, peer) == seen(peer, first) == 2
        # And it goes on: its record is renewed as before.
        await asyncio.sleep(120.0)
        newcomer = await dht.add(2, join=first)
        newcomer.directory.watch({0})
        await asyncio.sleep(5.0)
        assert seen(newcomer, peer) == seen(first, peer) == 2
    said = [line for line in caplog.messages if "clock jumped" in line]
    assert len(said) == 2 and f"jumped by {jump_s:+.0f} s" in said[0] and "set it (NTP)" in said[0]
    assert "this machine slept, or" in said[0], "monotonic time stands still while a laptop sleeps"


async def test_peers_whose_clocks_were_ahead_alike_see_what_each_says_since() -> None:
    """As of a swarm on one machine: what each knew of the others lasted for an hour, nothing was later."""
    async with MemoryDht() as dht:
        first = await dht.add(0)
        peers = [first, await dht.add(1, join=first), await dht.add(2, join=first)]
        for number, peer in enumerate(peers):
            peer.clock.ahead_s = HOUR_S
            peer.directory.watch({0})
            await peer.directory.announce(record(peer, version=number))
        await asyncio.sleep(60.0)
        assert [seen(first, peer) for peer in peers] == [0, 1, 2]
        await dht.kill(peers.pop())
        for number, peer in enumerate(peers):
            peer.clock.ahead_s = 0.0
            await peer.directory.announce(record(peer, version=10 + number))
        for _ in range(30):  # nor is one taken for gone meanwhile
            await asyncio.sleep(1.0)
            assert seen(first, peers[1]) is not None and seen(peers[1], first) is not None
        gone = Identity((2).to_bytes(32, "big")).peer_id
        assert [seen(peers[1], first), seen(first, peers[1])] == [10, 11]
        assert first.directory.find(gone) is peers[1].directory.find(gone) is None


@pytest.mark.parametrize("away", [False, True])
async def test_a_bootstrap_whose_clock_was_ahead_gives_newcomers_its_manifest(away: bool) -> None:
    """It held what it had stored for an hour more than others take it, and nothing that was right meanwhile;
    for good where its p2pd was away as the clock was set."""
    async with MemoryDht() as dht:
        run, first = example_run(), await dht.add(0)
        await first.directory.publish_manifest(run)
        first.clock.ahead_s = HOUR_S
        await asyncio.sleep(60.0)
        first.directory.storage.online = not away
        first.clock.ahead_s = 0.0
        await asyncio.sleep(20.0)
        if away:
            await first.directory.daemon_is_back()
        newcomer = await dht.add(1, join=first)
        assert await newcomer.directory.fetch_manifest(run.id) == run


async def test_a_bootstrap_whose_clock_was_ahead_gives_newcomers_its_charter() -> None:
    async with MemoryDht() as dht:
        (first,) = await followed.swarm(dht, 1)
        await first.directory.charters.publish(followed.charter(), followed.OWNER)
        first.clock.ahead_s = HOUR_S
        await asyncio.sleep(360.0)
        first.clock.ahead_s = 0.0
        await asyncio.sleep(20.0)
        newcomer = await dht.add(9, run_id=None, join=first)
        assert await newcomer.directory.find_run(followed.NAME, timeout_s=1.0) == followed.RUN.id


async def join_eight(wrong: int, ahead_s: float) -> None:
    """Join at eight peers, some of which have a wrong clock."""
    async with MemoryDht() as dht:
        eight = [await dht.add(number, ahead_s=ahead_s if number < wrong else 0.0) for number in range(8)]
        newcomer = await dht.add(9, join=eight)
        assert newcomer.directory.storage.neighbours >= 8 - wrong


@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S])
async def test_three_wrong_clocks_of_eight_do_not_keep_a_newcomer_out(ahead_s: float) -> None:
    await join_eight(3, ahead_s)


@pytest.mark.parametrize(("ahead_s", "words"), [(HOUR_S, "3600 s behind"), (-90.0, "90 s ahead of")])
async def test_a_peer_whose_clock_differs_from_most_is_refused_with_the_seconds(
    ahead_s: float, words: str
) -> None:
    with pytest.raises(SetupError) as refusal:
        await join_eight(5, ahead_s)
    assert f"this machine's clock is {words} that of 5 of the 8 peers to join at" in refusal.value.text
    assert "set it, or theirs (NTP)" in refusal.value.text


async def test_a_newcomer_that_none_can_reach_back_does_not_join() -> None:
    reached, cut_off = (0.0, Pong(0.0, True, PROTOCOL_VERSION)), (0.0, Pong(0.0, False, PROTOCOL_VERSION))
    assert "cannot reach this one back" in what_is_wrong([cut_off, cut_off])
    assert what_is_wrong([cut_off, reached]) == ""


@pytest.mark.parametrize(("for_s", "joins"), [(5.0, True), (60.0, False)])
async def test_a_newcomer_that_none_reaches_back_for_some_seconds_joins(for_s: float, joins: bool) -> None:
    async with MemoryDht() as dht:
        first, newcomer = await dht.add(0), Identity((1).to_bytes(32, "big")).peer_id
        dht.hung.add(newcomer)
        asyncio.get_running_loop().call_later(for_s, dht.hung.clear)
        if joins:
            assert (await dht.add(1, join=first)).directory.storage.neighbours == 1
        else:
            with pytest.raises(SetupError, match="cannot reach this one back"):
                await dht.add(1, join=first)


async def test_a_newcomer_of_another_version_than_most_does_not_join() -> None:
    ours, other = (0.0, Pong(0.0, True, PROTOCOL_VERSION)), (0.0, Pong(0.0, True, 99))
    assert "the swarm that it joins version 99: update the older program" in what_is_wrong(
        [ours, other, other]
    )
    assert what_is_wrong([ours, other]) == ""
