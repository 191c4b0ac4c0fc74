"""Hand-over in memory between processes: who gets it, what opens it, and what a killed one leaves behind.

That calls are the same on this path as on the others is in test_transport.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from peers.net.direct import memory
from peers.net.direct import paths as direct_paths
from peers.net.direct.paths import OPENING, SEALED_OPENING_BYTES, DirectOptions
from peers.net.direct.records import Opener
from peers.net.identity import Identity
from peers.net.node import Node
from peers.net.transport import NetTransport
from swarm.errors import PeerGone
from tests.net.relay import Relay, direct_links, memory_links, open_links
from tests.net.test_direct import added, breaks, calls, hello_of, keys_of
from tests.net.test_transport import MIB, QUICK, echo, relay, until
from tests.sealed import put

__all__ = ["relay"]

pytestmark = pytest.mark.skipif(not memory.AVAILABLE, reason="Linux only")

NEAR = DirectOptions(after_bytes=0, host=None)
CALLER = Identity.generate()


async def connected(relay: Relay) -> tuple[NetTransport, NetTransport]:
    """(caller, callee), in memory."""
    caller, callee = await added(relay, direct=NEAR)
    await calls(caller, callee)
    await until(lambda: memory_links(caller) == (1, 0) and open_links(callee) == (0, 1))
    return caller, callee


# -- who gets it ---------------------------------------------------------------------------------------------


async def test_processes_of_one_machine_need_no_port_and_no_host(relay: Relay) -> None:
    """As of two behind one router, which reach one another through a relay."""
    caller, callee = await added(relay, direct=NEAR)
    relay.hidden.add(callee.peer_id)
    await calls(caller, callee)
    await until(lambda: (memory_links(caller), memory_links(callee)) == ((1, 0), (0, 1)))
    before = caller.lines[callee.peer_id].memory_bytes
    await calls(caller, callee)
    for line in (caller.lines[callee.peer_id], callee.lines[caller.peer_id]):
        assert line.memory_bytes >= before + 6 * 70_000, "each call had a body both ways"


async def test_another_user_gets_none_either_way(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    caller, callee = await added(relay, direct=replace(NEAR, host="127.0.0.1"))
    here = os.geteuid()
    monkeypatch.setattr(memory.os, "geteuid", lambda: here + 1)
    assert memory.connect(callee.peer_id) is None
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(memory.address_of(callee.peer_id))
        stranger.setblocking(False)
        assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(stranger, 1), 5) == b""
    await calls(caller, callee)
    await until(lambda: direct_links(caller) == (1, 0))
    assert memory_links(caller) == (0, 0), "by TCP then"


async def test_a_name_that_is_taken_keeps_a_peer_from_nothing_else(relay: Relay) -> None:
    identity = Identity.generate()
    taken = memory.listener_of(identity.peer_id)
    assert taken is not None
    with taken:
        assert memory.listener_of(identity.peer_id) is None
    freed = memory.listener_of(identity.peer_id)
    assert freed is not None
    freed.close()


async def test_one_more_takes_the_place_of_the_first_that_shows_nothing(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strangers on the port, who can be anywhere, take no place of theirs, and the other way round."""
    monkeypatch.setattr(direct_paths, "MAX_KNOCKS", 3)
    direct = replace(NEAR, host="127.0.0.1")
    caller, callee = await added(relay, direct=direct, timings=replace(QUICK, knock_s=30.0))
    paths, loop = callee._dialer.direct, asyncio.get_running_loop()
    _, far = await asyncio.open_connection("127.0.0.1", paths.port)
    with contextlib.ExitStack() as stack:
        near = [stack.enter_context(memory.connect(callee.peer_id)) for _ in range(4)]
        assert await asyncio.wait_for(loop.sock_recv(near[0], 1), 5) == b"", "it is let go at once"
        await until(lambda: sorted(paths.knocks.values()) == [False, True, True, True])
        await calls(caller, callee)
        await until(lambda: memory_links(caller) == (1, 0))
    far.close()
    await until(lambda: not paths.knocks)


async def test_what_stays_on_the_machine_is_not_of_the_owners_upload(relay: Relay) -> None:
    caller, callee = await connected(relay)
    caller.limit_upload(1e6)
    began = asyncio.get_running_loop().time()
    await caller.call(callee.peer_id, "echo", b"", [bytes(4 * MIB)], max_answer_bytes=4 * MIB)
    assert asyncio.get_running_loop().time() - began < 10.0, "33 s at that limit"
    assert caller.lines[callee.peer_id].bandwidth_bps > 1e6, "which is none of this line either"


async def test_when_it_breaks_the_next_calls_pass_p2pd(relay: Relay) -> None:
    caller, callee = await connected(relay)
    await breaks(relay, caller, callee)
    await until(lambda: not caller._dialer.direct.streams and not callee._dialer.direct.streams)


# -- what opens it -----------------------------------------------------------------


@pytest_asyncio.fixture
async def callee(relay: Relay) -> AsyncIterator[NetTransport]:
    yield await relay.add(direct=NEAR, timings=replace(QUICK, knock_s=0.3))


async def says(callee: NetTransport, hello: bytes) -> bytes:
    """What the callee answers to a hello, until it closes, or says no more."""
    with contextlib.closing(memory.connect(callee.peer_id)) as near:
        near.sendall(hello)
        receiving = asyncio.get_running_loop().sock_recv(near, 100)
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(receiving, 5)
        return b""


async def test_a_ticket_opens_one_and_a_wrong_one_none(callee: NetTransport) -> None:
    keys, port = await keys_of(callee, CALLER)
    assert port == 0, "only from this machine"
    assert await says(callee, bytes(16) + hello_of(keys)[16:]) == b""
    assert await says(callee, keys.ticket + bytes(SEALED_OPENING_BYTES)) == b""
    assert await says(callee, hello_of(keys)[:-1]) == b"", "a part of it"
    assert put(Opener(keys.to_caller), await says(callee, hello_of(keys))) == OPENING
    assert await says(callee, hello_of(keys)) == b"", "said twice"


async def test_a_process_that_says_nothing_is_let_go(callee: NetTransport) -> None:
    with contextlib.closing(memory.connect(callee.peer_id)) as near:
        assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(near, 1), 5) == b""
    await until(lambda: not callee._dialer.direct.knocks)


# -- processes -----------------------------------------------------------------------------------------------

CHILD = """
import asyncio, os, signal, sys
from peers.net.node import Node
from peers.ports import Answer

async def die(request):
    taking = asyncio.ensure_future(request.accept())
    while request.passed_bytes < 8 << 20:
        await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGKILL)

async def take(request):
    await request.accept()
    return Answer(b"")

async def main():
    async with Node() as node:
        node.transport.serve("take", take, max_body_bytes=1 << 30)
        node.transport.serve("die", die, max_body_bytes=1 << 30)
        print(node.addresses[0], flush=True)
        await asyncio.get_running_loop().create_future()

asyncio.run(main())
"""


@pytest.mark.net
async def test_a_process_that_is_killed_in_mid_body_is_noticed_at_once_and_leaves_nothing() -> None:
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", CHILD, stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None
    try:
        address = (await asyncio.wait_for(child.stdout.readline(), 60)).decode().strip()
        peer = address.rpartition("/")[2]
        async with Node(join=[address]) as node:
            transport = node.transport
            transport.addresses.learn(peer, [address])
            while memory_links(transport) != (1, 0):
                await transport.call(peer, "take", b"", [bytes(MIB)])
            assert f"@swarm/{peer}" in Path("/proc/net/unix").read_text()
            before = transport.lines[peer].memory_bytes
            with pytest.raises(PeerGone, match="the connection broke"):
                await asyncio.wait_for(transport.call(peer, "die", b"", [bytes(256 * MIB)]), 60)
            assert await asyncio.wait_for(child.wait(), 60) == -9
            assert 8 * MIB <= transport.lines[peer].memory_bytes - before < 256 * MIB
            await until(lambda: not transport._dialer.direct.streams)
        assert f"@swarm/{peer}" not in Path("/proc/net/unix").read_text()
        assert f"@swarm/{node.peer_id}" not in Path("/proc/net/unix").read_text()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def test_large_bodies_both_ways_at_once_do_not_wait_for_one_another(relay: Relay) -> None:
    caller, callee = await connected(relay)
    callee.serve("echo", echo, max_body_bytes=64 * MIB)
    bodies = [os.urandom(9 * MIB + n) for n in range(3)]
    answers = await asyncio.gather(
        *(caller.call(callee.peer_id, "echo", b"", [body], max_answer_bytes=len(body)) for body in bodies)
    )
    assert [bytes(answer.body[0]) for answer in answers] == bodies
