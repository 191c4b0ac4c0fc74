"""The in-memory network answers as the real one does, also when peers fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from peers.ports import Answer, Request
from swarm.errors import BadAnswer, Busy, NotReady, PeerGone, PeerSilent, Refused
from swarm.records import PeerRecord
from tests.peers.memory_net import MemoryNetwork

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def network() -> AsyncIterator[MemoryNetwork]:
    network = MemoryNetwork(silence_s=0.02)
    for peer in "ab":
        network.add(peer)
    network.peers["b"].transport.serve("echo", echo, max_body_bytes=100)
    yield network
    await network.close()


async def echo(request: Request) -> Answer:
    return Answer(request.header, await request.accept())


async def test_a_call_brings_header_and_body_there_and_back(network: MemoryNetwork) -> None:
    answer = await network.peers["a"].transport.call(
        "b", "echo", b"h", [b"12", bytearray(3)], max_answer_bytes=5
    )
    assert answer.header == b"h" and [bytes(part) for part in answer.body] == [b"12", b"\0\0\0"]


async def test_what_a_handler_raises_is_what_the_caller_gets(network: MemoryNetwork) -> None:
    async def busy(request: Request) -> Answer:
        raise Busy("no room")

    async def not_ready(request: Request) -> Answer:
        raise NotReady("at 3", version=3)

    async def bug(request: Request) -> Answer:
        raise ZeroDivisionError("oops")

    a, b = network.peers["a"].transport, network.peers["b"].transport
    for handler in (busy, not_ready, bug):
        b.serve(handler.__name__, handler)
    with pytest.raises(Busy, match="no room"):
        await a.call("b", "busy", b"")
    with pytest.raises(NotReady) as caught:
        await a.call("b", "not_ready", b"")
    assert caught.value.version == 3
    with pytest.raises(Refused, match="internal error: ZeroDivisionError: oops"):
        await a.call("b", "bug", b"")
    with pytest.raises(Refused, match="no such method: 'nothing'"):
        await a.call("b", "nothing", b"")
    with pytest.raises(Refused, match="a body of 101 bytes; 'echo' takes 100"):
        await a.call("b", "echo", b"", [bytes(101)])
    with pytest.raises(BadAnswer, match="an answer of 9 bytes; at most 8 fit"):
        await a.call("b", "echo", b"", [bytes(9)], max_answer_bytes=8)


async def test_callers_of_a_failed_peer_hear_of_it_at_once_and_its_handlers_stop(
    network: MemoryNetwork,
) -> None:
    started, finished = asyncio.Event(), []

    async def slow(request: Request) -> Answer:
        started.set()
        await asyncio.sleep(60)
        finished.append(1)
        return Answer(b"")

    network.peers["b"].transport.serve("slow", slow)
    call = asyncio.ensure_future(network.peers["a"].transport.call("b", "slow", b""))
    await started.wait()
    network.fail("b")
    with pytest.raises(PeerGone, match="the connection broke"):
        await call
    with pytest.raises(PeerGone, match="cannot be reached"):
        await network.peers["a"].transport.call("b", "slow", b"")
    assert not finished


async def test_a_hung_peer_is_silent_until_it_resumes(network: MemoryNetwork) -> None:
    network.hang("b")
    with pytest.raises(PeerSilent, match="no sign of life"):
        await network.peers["a"].transport.call("b", "echo", b"")
    network.resume("b")
    assert (await network.peers["a"].transport.call("b", "echo", b"x")).header == b"x"


async def test_only_the_nth_answer_is_dropped_and_its_work_was_done(network: MemoryNetwork) -> None:
    network.drop_answer("b", "echo", nth=2)
    a, b = network.peers["a"].transport, network.peers["b"].transport
    await a.call("b", "echo", b"1")
    with pytest.raises(PeerSilent):
        await a.call("b", "echo", b"2")
    await a.call("b", "echo", b"3")
    assert b.calls["echo"] == 3
    network.corrupt_answer("b", "echo")
    with pytest.raises(BadAnswer, match="breaks the protocol"):
        await a.call("b", "echo", b"4")
    network.delay_answer("b", "echo", 0.01)
    assert (await a.call("b", "echo", b"5")).header == b"5"


async def test_a_cut_link_silences_both_directions_until_healed(network: MemoryNetwork) -> None:
    network.partition({"a"}, {"b"})
    with pytest.raises(PeerSilent):
        await network.peers["a"].transport.call("b", "echo", b"")
    network.heal()
    await network.peers["a"].transport.call("b", "echo", b"")


async def test_a_cancelled_call_leaves_its_handler_working(network: MemoryNetwork) -> None:
    started, commit, finished = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow(request: Request) -> Answer:
        started.set()
        await commit.wait()
        finished.set()
        return Answer(b"")

    network.peers["b"].transport.serve("slow", slow)
    call = asyncio.ensure_future(network.peers["a"].transport.call("b", "slow", b""))
    await started.wait()
    call.cancel()
    commit.set()
    await asyncio.wait_for(finished.wait(), 1)
    with pytest.raises(PeerSilent, match=r"no answer to 'slow' within 0\.01 s"):
        commit.clear()
        await network.peers["a"].transport.call("b", "slow", b"", deadline_s=0.01)


async def test_records_are_seen_until_they_say_left_and_those_of_the_dead_expire() -> None:
    network = MemoryNetwork(record_ttl_s=0.0)
    a, b = network.add("a").directory, network.add("b").directory
    record = PeerRecord(peer="a", run="r", stage=0, state="serving", version=0)
    await a.announce(record)
    assert list(b.peers()) == [record]
    await a.withdraw()
    assert [seen.state for seen in await b.refresh()] == ["left"]
    network.fail("a")
    assert b.peers() == []
