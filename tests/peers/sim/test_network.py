"""The simulated network answers as the real one does, also when peers fail, and as a test ordered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from peers.ports import Answer, Request
from peers.sim.directory import LIFE_S
from swarm.errors import BadAnswer, Busy, NotReady, PeerSilent, Refused
from swarm.records import PeerRecord
from tests.peers.network import CalmNetwork

pytestmark = pytest.mark.virtual_time


@pytest_asyncio.fixture
async def network() -> AsyncIterator[CalmNetwork]:
    network = CalmNetwork(silence_s=0.02)
    for peer in "ab":
        network.join(peer)
    network.peers["b"].transport.serve("echo", echo, max_body_bytes=100)
    yield network
    await network.close()


async def echo(request: Request) -> Answer:
    return Answer(request.header, await request.accept())


async def test_a_call_brings_header_and_body_there_and_back(network: CalmNetwork) -> None:
    answer = await network.peers["a"].transport.call(
        "b", "echo", b"h", [b"12", bytearray(3)], max_answer_bytes=5
    )
    assert answer.header == b"h" and [bytes(part) for part in answer.body] == [b"12", b"\0\0\0"]


async def test_what_a_handler_raises_is_what_the_caller_gets(network: CalmNetwork) -> None:
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


async def test_only_the_nth_answer_is_dropped_and_its_work_was_done(network: CalmNetwork) -> None:
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


async def test_a_cut_between_two_leaves_the_lines_to_others(network: CalmNetwork) -> None:
    network.join("c")
    number = network.cut({"a"}, {"b"})
    with pytest.raises(PeerSilent):
        await network.peers["a"].transport.call("b", "echo", b"")
    await network.peers["c"].transport.call("b", "echo", b"")
    network.heal(number)
    await network.peers["a"].transport.call("b", "echo", b"")


async def test_a_cancelled_call_leaves_its_handler_working(network: CalmNetwork) -> None:
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


async def test_records_are_seen_until_they_say_left_and_those_of_the_dead_expire(
    network: CalmNetwork,
) -> None:
    a, b = (network.peers[name].directory for name in "ab")
    record = PeerRecord(peer="a", run="r", stage=0, state="serving", version=0)
    await a.announce(record)
    assert list(b.peers()) == [record]
    await asyncio.sleep(3 * LIFE_S)
    assert list(b.peers()) == [record], "renewed"
    await a.withdraw()
    assert [seen.state for seen in await b.refresh()] == ["left"]
    network.kill("a")
    assert len(b.peers()) == 1
    await asyncio.sleep(LIFE_S)
    assert b.peers() == []
    assert network.join("a").directory.peers() == [], "a new process, which has announced nothing"
