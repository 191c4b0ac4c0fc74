"""Peers on loopback with the real p2pd: joining, calling, dying, hanging, leaving."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from peers.net.dht_protocol import RPC_S, DhtNode, Ping, Pong
from peers.net.direct.paths import DirectOptions
from peers.net.identity import Identity
from peers.net.node import MAX_UNANSWERED, Node, direct_options
from peers.net.p2pd import Daemon, DaemonOptions
from peers.net.p2pd_control import ControlError, Endpoint, _one_listens
from peers.net.timings import NetTimings
from peers.ports import Answer, Request
from swarm.errors import PeerGone, PeerSilent, Refused, SetupError, Unreachable
from swarm.records import PeerRecord
from swarm.wire.version import PROTOCOL_VERSION
from tests.net.relay import direct_links, open_links
from tests.stopping import stop

pytestmark = pytest.mark.net

RUN = "f" * 32
MIB = 1 << 20


async def until(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "never came true"
        await asyncio.sleep(0.02)


def record(node: Node, **changes: Any) -> PeerRecord:
    fields = {"peer": node.peer_id, "run": RUN, "stage": 0, "state": "serving", "version": 0}
    return PeerRecord(**(fields | {"addresses": node.addresses} | changes))


@pytest_asyncio.fixture
async def stack() -> AsyncIterator[contextlib.AsyncExitStack]:
    """Ends nodes in reverse order, then looks for leftovers."""
    async with contextlib.AsyncExitStack() as stack:
        yield stack
    await asyncio.sleep(0)
    left = [task for task in asyncio.all_tasks() if "peers/net" in repr(task) or "hivemind" in repr(task)]
    assert not left
    assert not [
        child for child in psutil.Process().children(recursive=True) if child.name() in ("p2pd", "sh")
    ]


QUICK = NetTimings(refresh_s=0.1)
MORTAL = replace(QUICK, revivals=0)


async def start(stack: contextlib.AsyncExitStack, *join: Node, **options: Any) -> Node:
    """A peer that works with stages 0 to 3 of a run of which no node has the manifest."""
    options = {"run_id": RUN, "timings": QUICK, "join": [node.addresses[0] for node in join]} | options
    node = await stack.enter_async_context(Node(**options))
    node.directory.watch([0, 1, 2, 3])
    if node._timings is MORTAL:
        node._owner = None  # its death does not interrupt the test
    return node


async def echo(request: Request) -> Answer:
    return Answer(request.peer.encode(), await request.accept())


# -- life --------------------------------------------------------------------------------------------------


@pytest.mark.both_loops
async def test_peers_find_and_call_each_other_and_see_one_leave(stack: contextlib.AsyncExitStack) -> None:
    first = await start(stack, run_id=None)
    nodes = await asyncio.gather(*(start(stack, first) for _ in range(3)))
    for node in nodes:
        node.transport.serve("echo", echo, max_body_bytes=8 * MIB)
        await node.directory.announce(record(node))
    ids = sorted(node.peer_id for node in nodes)
    await until(lambda: all([r.peer for r in node.directory.peers()] == ids for node in nodes))

    body = os.urandom(5 * MIB)
    answer = await nodes[0].transport.call(nodes[1].peer_id, "echo", b"", [body], max_answer_bytes=8 * MIB)
    assert answer.header.decode() == nodes[0].peer_id
    assert bytes(answer.body[0]) == body
    assert len(await nodes[0].control.connections()) >= 2

    await nodes[2].directory.announce(record(nodes[2], stage=2, version=9))
    await until(lambda: any(r.stage == 2 and r.version == 9 for r in nodes[0].directory.peers()))
    await nodes[2].directory.withdraw()
    await until(lambda: any(r.state == "left" for r in nodes[0].directory.peers()))
    assert not nodes[0].directory.storage.check.rejected


async def test_a_node_is_spawned_ahead_and_closes_twice(stack: contextlib.AsyncExitStack) -> None:
    daemon = Daemon.spawn(DaemonOptions(announce=("127.0.0.1:1234",)))
    async with Node(daemon=daemon) as node:
        assert node.addresses == (f"/ip4/127.0.0.1/tcp/1234/p2p/{daemon.peer_id}",)
        assert node.daemon.alive
        assert daemon.directory.is_dir()
    await node.close()
    assert not node.daemon.alive
    assert not daemon.directory.exists()


def test_a_peer_that_others_cannot_dial_takes_no_direct_connections() -> None:
    assert direct_options(DaemonOptions(host="::1", direct_port=7)) == DirectOptions(host="::1", port=7)
    assert direct_options(DaemonOptions(host="0.0.0.0", reachable=False)) == DirectOptions(host=None)
    assert direct_options(DaemonOptions(direct=False)) is None
    assert direct_options(DaemonOptions(memory=False)) == DirectOptions(host="127.0.0.1", memory=False)


async def directly(caller: Node, callee: Node, calls: int) -> list[bytes]:
    """What so many calls with a megabyte are answered, one after the other."""
    body = [os.urandom(MIB)]
    answers = [
        await caller.transport.call(callee.peer_id, "echo", b"", body, max_answer_bytes=MIB)
        for _ in range(calls)
    ]
    assert all(bytes(answer.body[0]) == body[0] for answer in answers)
    return [answer.header for answer in answers]


async def test_peers_that_can_dial_one_another_leave_p2pd_and_those_that_cannot_lose_no_call(
    stack: contextlib.AsyncExitStack,
) -> None:
    callee = await start(stack)
    callee.transport.serve("echo", echo, max_body_bytes=MIB)
    elsewhere = DaemonOptions(memory=False)
    caller, blocked, plain = [
        await start(stack, callee, options=options)
        for options in (elsewhere, elsewhere, DaemonOptions(direct=False))
    ]
    await directly(caller, callee, 2)
    await until(lambda: direct_links(caller.transport) == (1, 0) and open_links(callee.transport) == (0, 1))
    paths = callee.transport._dialer.direct
    with socket.create_server(("127.0.0.1", 0)) as mute:
        paths.port, port = mute.getsockname()[1], paths.port  # as behind a router that swallows what comes
        for other in (blocked, plain):
            answers = await directly(other, callee, 12)
            assert answers == [other.peer_id.encode()] * 12
            assert direct_links(other.transport) == (0, 0)
        await until(lambda: not blocked.transport._tasks._tasks)
        granted = {one.peer for one in paths._granted.values()}
        assert granted == {blocked.peer_id}, "it was granted, and did not come"
        paths.port = port
    before = open_links(callee.transport)
    os.kill(caller.daemon.pid, signal.SIGSTOP)  # p2pd has no part in it
    assert await directly(caller, callee, 3) == [caller.peer_id.encode()] * 3
    os.kill(caller.daemon.pid, signal.SIGCONT)
    assert open_links(callee.transport) == before


# -- what goes wrong ---------------------------------------------------------------------------------------


async def test_a_peer_that_is_killed_is_gone_at_once(stack: contextlib.AsyncExitStack) -> None:
    first = await start(stack)
    other = await start(stack, first, timings=MORTAL)
    entered = asyncio.Event()

    async def never(request: Request) -> Answer:
        entered.set()
        await asyncio.get_running_loop().create_future()
        return Answer(b"")

    other.transport.serve("never", never)
    first.transport.addresses.learn(other.peer_id, other.addresses)
    call = asyncio.ensure_future(first.transport.call(other.peer_id, "never", b""))
    await entered.wait()
    before = time.monotonic()
    os.kill(other.daemon.pid, signal.SIGKILL)
    with pytest.raises(PeerGone, match="the connection broke"):
        await call
    assert time.monotonic() - before < 3.0  # silence would be noticed after 3.5
    with pytest.raises(PeerGone, match="cannot be reached"):
        await first.transport.call(other.peer_id, "never", b"")
    await until(lambda: not other.daemon.alive)
    with pytest.raises(PeerGone, match="cannot be reached: our own p2pd ended"):
        await other.transport.call(first.peer_id, "x", b"")
    with pytest.raises(ControlError, match="p2pd cannot be reached"):
        await other.control.connections()


@pytest.mark.both_loops
async def test_a_p2pd_that_died_is_replaced_and_its_peer_is_found_as_before(
    stack: contextlib.AsyncExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    first = await start(stack)
    other = await start(stack, first)
    other.transport.serve("echo", echo)
    await other.directory.announce(record(other))
    await until(lambda: len(first.directory.peers()) == 1)
    await first.transport.call(other.peer_id, "echo", b"")
    addresses, dead = other.addresses, other.daemon.pid
    ((address,), pasted) = addresses, rf"/ip4/127\.0\.0\.1/tcp/\d+/p2p/{other.peer_id}"
    assert re.fullmatch(pasted, address)
    os.kill(dead, signal.SIGKILL)
    await until(lambda: "p2pd was started again" in caplog.text)
    assert other.daemon.pid != dead
    assert other.addresses == addresses
    assert (await first.transport.call(other.peer_id, "echo", b"")).header.decode() == first.peer_id
    await other.directory.announce(record(other, stage=3))
    await until(lambda: [r.stage for r in first.directory.peers()] == [3])


async def test_our_own_lack_of_file_descriptors_is_not_laid_on_p2pd() -> None:
    words = r"this process has no free file descriptors \(3 are allowed\): raise the limit \(ulimit -n\)"
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.raises(SetupError) as end:
        async with Node(timings=NetTimings(revivals=2)) as node:
            assert node.daemon.pid is not None
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            try:
                with pytest.raises(ControlError, match=f"^{words}$"):
                    await node.control.identify()
                for _ in range(2 * MAX_UNANSWERED):
                    await node._probe_once()
                assert node.daemon.alive, "p2pd is not killed for what we are short of"
                os.kill(node.daemon.pid, signal.SIGKILL)
                await asyncio.sleep(30.0)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert re.fullmatch(
        "p2pd, which connects this process to the others, could not be started again: "
        f"{words}\\. Mend that, and start this program again",
        end.value.text,
    )


async def test_a_task_in_a_node_whose_p2pd_cannot_be_replaced_leaves_it_with_the_reason(
    stack: contextlib.AsyncExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> Path:
        raise SetupError("hivemind was removed")

    with pytest.raises(SetupError) as caught:
        async with Node(run_id=RUN, timings=NetTimings(revivals=3)) as node:
            monkeypatch.setattr("peers.net.p2pd.p2pd_path", refuse)
            os.kill(node.daemon.pid, signal.SIGKILL)
            await asyncio.get_running_loop().create_future()
    assert caught.value.text.startswith("p2pd, which connects this process to the others, could not be")
    assert "started again: hivemind was removed. See that nothing kills it" in caught.value.text
    assert caplog.text.count("an attempt to start p2pd again failed") == 3
    await asyncio.sleep(0)  # not cancelled any more


async def test_a_p2pd_that_dies_again_while_it_is_replaced_is_replaced_again(
    stack: contextlib.AsyncExitStack,
) -> None:
    first = await start(stack)
    other = await start(stack, first)
    other.transport.serve("echo", echo)
    other.transport.addresses.learn(first.peer_id, first.addresses)
    addresses, killed = other.addresses, set[int]()
    for _ in range(3):
        await until(
            lambda: other.daemon.pid is not None and other.daemon.alive and other.daemon.pid not in killed
        )
        killed.add(other.daemon.pid)
        os.kill(other.daemon.pid, signal.SIGKILL)
    await other.directory.announce(record(other))  # while nothing can be said to anybody
    await other.directory.refresh()
    call = asyncio.ensure_future(other.transport.call(first.peer_id, "x", b""))
    await until(
        lambda: other.daemon.alive and other.directory.storage.online and other.daemon.pid not in killed
    )
    with pytest.raises(Refused, match="no such method"):
        await call
    assert other.addresses == addresses
    await until(lambda: [r.peer for r in first.directory.peers()] == [other.peer_id])
    assert (await first.transport.call(other.peer_id, "echo", b"")).header.decode() == first.peer_id


async def test_a_peer_whose_p2pd_hangs_is_silent_until_it_is_killed_and_replaced(
    stack: contextlib.AsyncExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    first = await start(stack, timings=replace(QUICK, silence_s=1.5))
    other = await start(stack, first, timings=replace(QUICK, probe_every_s=0.05, control_s=2.0))
    other.transport.serve("echo", echo, max_body_bytes=64 * MIB)
    first.transport.addresses.learn(other.peer_id, other.addresses)
    await other.directory.announce(record(other))
    await first.transport.call(other.peer_id, "echo", b"")
    hung = other.daemon.pid
    stop(hung)
    calls = [first.transport.call(other.peer_id, "echo", b"", [bytes(size)]) for size in (0, 64 * MIB)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [PeerSilent, PeerSilent]
    await asyncio.wait_for(first.directory.refresh(), 10)
    await until(
        lambda: other.daemon.alive and other.directory.storage.online and other.daemon.pid != hung, 60.0
    )
    assert f"p2pd (pid {hung}) does not answer any more: it is killed" in caplog.text
    await until(lambda: [r.peer for r in first.directory.peers()] == [other.peer_id])


def take(squatter: socket.socket, port: int) -> None:
    """Listen on the port of a process that ends now, before this one can start another."""
    for _ in range(500):
        with contextlib.suppress(OSError):
            squatter.bind(("127.0.0.1", port))
            squatter.listen()
            return
        time.sleep(0.01)
    raise AssertionError(f"port {port} is in use still")


async def test_a_p2pd_whose_port_was_taken_comes_back_on_another_and_is_found_there(
    stack: contextlib.AsyncExitStack,
) -> None:
    first = await start(stack)
    other = await start(stack, first)
    other.transport.serve("echo", echo)
    await other.directory.announce(record(other))
    await until(lambda: len(first.directory.peers()) == 1)
    before, dead = other.addresses, other.daemon.pid
    port = int(before[0].split("/tcp/")[1].split("/")[0])
    with contextlib.closing(socket.socket()) as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        os.kill(dead, signal.SIGKILL)
        take(squatter, port)
        await until(
            lambda: other.daemon.alive and other.directory.storage.online and other.daemon.pid != dead
        )
        assert other.addresses != before
        await until(lambda: [r.addresses for r in first.directory.peers()] == [other.addresses])
        assert (await first.transport.call(other.peer_id, "echo", b"")).header.decode() == first.peer_id
        moved, dead = other.addresses, other.daemon.pid
        os.kill(dead, signal.SIGKILL)
        await until(
            lambda: other.daemon.alive and other.directory.storage.online and other.daemon.pid != dead
        )
        assert other.addresses == moved, "once more on the port that it had"
        await other.directory.announce(record(other, version=7, addresses=before))  # the record names these
        await until(lambda: [r.version for r in first.directory.peers()] == [7])
        assert [r.addresses for r in first.directory.peers()] == [moved]


async def test_a_port_that_a_user_chose_is_kept_and_any_other_is_left_when_it_is_taken(
    stack: contextlib.AsyncExitStack,
) -> None:
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = DaemonOptions(port=port, any_port=True)  # as of a peer at home that was given no port
    node = await start(stack, options=options)
    dead = node.daemon
    assert dead is not None
    dead.close_now()
    with contextlib.closing(socket.socket()) as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        squatter.bind(("127.0.0.1", port))
        squatter.listen()
        other = await node._spawn_again(dead)
        assert f"/ip4/127.0.0.1/tcp/{port}" not in other.addresses
        other.close_now()
        dead.options = DaemonOptions(port=port)
        with pytest.raises(SetupError, match=f"^port {port} is already in use"):
            await node._spawn_again(dead)


async def test_calls_go_on_when_p2pd_is_back_although_no_relay_is(
    stack: contextlib.AsyncExitStack,
) -> None:
    first = await start(stack)
    first.transport.serve("echo", echo)
    other = await start(stack, first, timings=replace(QUICK, revival_relay_s=0.2))
    other.daemon.options = DaemonOptions(reachable=False, relays=first.addresses)  # it relays for nobody
    other.transport.addresses.learn(first.peer_id, first.addresses)
    dead = other.daemon.pid
    os.kill(dead, signal.SIGKILL)
    await until(lambda: other.daemon.alive and other.directory.storage.online and other.daemon.pid != dead)
    assert (await other.transport.call(first.peer_id, "echo", b"")).header.decode() == other.peer_id
    assert not other.addresses


# -- entry points come and go ------------------------------------------------------------------------------


async def test_that_no_peer_to_join_at_can_be_reached_is_said_in_time(
    stack: contextlib.AsyncExitStack,
) -> None:
    nobody = Identity.generate().peer_id
    before = time.monotonic()
    with pytest.raises(Unreachable) as caught:
        await start(stack, join=[f"/ip4/127.0.0.1/tcp/1/p2p/{nobody}", f"/ip4/192.0.2.1/tcp/9/p2p/{nobody}"])
    assert time.monotonic() - before < 12
    assert caught.value.text.startswith("none of the peers to join at can be reached. Check that one of them")
    assert f"/ip4/127.0.0.1/tcp/1, /ip4/192.0.2.1/tcp/9/p2p/{nobody}: " in caught.value.text


async def test_a_host_that_has_no_address_is_named_in_words(
    stack: contextlib.AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unknown(place: Endpoint, _: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    first, identity = await start(stack), Identity.generate()
    monkeypatch.setattr("peers.net.p2pd_control._connect", unknown)
    first.transport.addresses.learn(identity.peer_id, ["/dns/nowhere.invalid/tcp/31337"])
    with pytest.raises(PeerGone, match=r"nowhere\.invalid:31337: .*Name or service not known"):
        await first.transport.call(identity.peer_id, "x", b"")


async def test_a_port_that_is_knocked_at_leaves_no_file_open_whenever_that_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listening:
        place = Endpoint("ip4", "127.0.0.1", listening.getsockname()[1])
        for moments in range(50):
            knocking = asyncio.ensure_future(_one_listens([place], 5.0, set()))
            for _ in range(moments):
                await asyncio.sleep(0)
            knocking.cancel()
            await asyncio.wait({knocking})
        await _one_listens([place], 5.0, set())
        await until(lambda: len(psutil.Process().net_connections("tcp4")) == 1)  # that which listens


async def test_a_peer_that_comes_back_is_reached_at_once_however_often_it_was_dialled(
    stack: contextlib.AsyncExitStack,
) -> None:
    """libp2p alone would refuse to dial for 9 s after the third failure, and longer after each other one."""
    first, identity = await start(stack), Identity.generate()
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    first.transport.addresses.learn(identity.peer_id, [f"/ip4/127.0.0.1/tcp/{port}"])
    since = time.monotonic()
    while time.monotonic() - since < 7.0:
        with pytest.raises(PeerGone, match=f"cannot be reached: 127.0.0.1:{port}: Connection refused"):
            await first.transport.call(identity.peer_id, "x", b"")
        await asyncio.sleep(0.3)
    daemon = Daemon.spawn(DaemonOptions(port=port), identity=identity)
    await daemon.ready()
    back = await start(stack, daemon=daemon)
    back.transport.serve("echo", echo)
    assert (await first.transport.call(identity.peer_id, "echo", b"")).header.decode() == first.peer_id


async def test_a_busy_peer_can_be_joined_at(
    stack: contextlib.AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first answer takes longer than any other may take."""
    answer = DhtNode.pong

    async def late(self: DhtNode, ping: Ping, asker: str) -> Any:
        await asyncio.sleep(RPC_S + 0.5 if ping.joining else 0.0)
        return await answer(self, ping, asker)

    monkeypatch.setattr(DhtNode, "pong", late)
    first = await start(stack)
    assert (await start(stack, first)).directory.storage.online


async def test_what_cannot_be_joined_is_said(
    stack: contextlib.AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await start(stack)
    transport, _ = first.addresses[0].split("/p2p/")
    with pytest.raises(Unreachable, match="none of the peers to join at can be reached"):
        await start(stack, join=[f"{transport}/p2p/{Identity.generate().peer_id}"])
    with pytest.raises(SetupError, match="is not the address of a peer: it ends in /p2p/"):
        await start(stack, join=[transport])

    no_dht = Daemon.spawn(DaemonOptions())
    await no_dht.ready()
    with pytest.raises(Unreachable, match="can be reached, but do not answer as peers of a swarm"):
        await start(stack, join=[f"{no_dht.addresses[0]}/p2p/{no_dht.peer_id}"])
    no_dht.close_now()

    async def of_later(self: DhtNode, ping: Ping, asker: str) -> Pong:
        return Pong(time.time(), True, PROTOCOL_VERSION + 1)

    monkeypatch.setattr(DhtNode, "pong", of_later)
    with pytest.raises(SetupError) as refusal:
        await start(stack, join=[first.addresses[0]])
    assert refusal.value.text == (
        f"this program speaks version {PROTOCOL_VERSION} of the swarm's protocol, the swarm that it joins "
        f"version {PROTOCOL_VERSION + 1}: update the older program"
    )


# -- what it costs -----------------------------------------------------------------------------------------


def run_python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout.strip()


def test_the_network_needs_neither_torch_nor_the_rest_of_hivemind() -> None:
    program = (
        "import sys, peers.net.node, peers.net.directory, peers.net.transport;"
        "print(sorted({'torch', 'grpc', 'pydantic', 'hivemind.moe', 'hivemind.optim'} & set(sys.modules)))"
    )
    assert run_python(program) == "[]"


def test_a_program_that_has_all_of_hivemind_runs_a_node_too() -> None:
    program = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "import hivemind, asyncio\n"
        "from peers.net.node import Node\n"
        "async def main():\n"
        "    async with Node() as first, Node(join=first.addresses, run_id='r') as other:\n"
        "        print(len(await other.directory.refresh()), other.directory.storage.neighbours)\n"
        "asyncio.run(main())\n"
    )
    assert run_python(program) == "0 1"
