"""Peers on loopback with the real p2pd: joining, calling, dying, leaving; and strangers in the DHT."""

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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
import pytest_asyncio

from peers.net import dht_protocol as holder
from peers.net import directory as directory_module
from peers.net import nat as reach_module
from peers.net import node as node_module
from peers.net import p2pd_control as control_module
from peers.net import sharding as shards
from peers.net import signed_records as envelopes
from peers.net._hivemind import DHTID, DHTNode, PeerID
from peers.net.connection_state import LinkTimings
from peers.net.identity import Identity
from peers.net.node import LONGEST_PAUSE_S, STABLE_S, Deaths, Node, own_address
from peers.net.p2pd import Daemon, DaemonOptions
from peers.net.p2pd_control import AttachedP2P, ControlError
from peers.net.record_table import Table
from peers.ports import Answer, Request
from swarm.errors import OtherVersion, PeerGone, PeerSilent, Refused, SetupError
from swarm.manifest import example_run
from swarm.records import PeerRecord
from swarm.wire.version import PROTOCOL_VERSION
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


async def start(stack: contextlib.AsyncExitStack, *join: Node, **options: Any) -> Node:
    options = {"run_id": RUN, "refresh_s": 0.1, "join": [node.addresses[0] for node in join]} | options
    return watching(await stack.enter_async_context(Node(**options)))


def watching(node: Node) -> Node:
    """As a peer of stage 0, in a run of which nobody published the manifest."""
    node.directory.watch([0, 1, 2, 3])
    return node


def forget(node: Node) -> None:
    """It knows no record but its own."""
    directory = node.directory
    directory._table = directory.reader._table = Table(node.peer_id)
    directory._set_own(directory._own)


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
    assert await nodes[0].peer_count() >= 2

    await nodes[2].directory.announce(record(nodes[2], stage=2, version=9))
    await until(lambda: any(r.stage == 2 and r.version == 9 for r in nodes[0].directory.peers()))
    await nodes[2].directory.withdraw()
    await until(lambda: any(r.state == "left" for r in nodes[0].directory.peers()))
    assert not nodes[0].directory.check.rejected


async def test_a_manifest_is_found_by_its_id_and_kept_by_who_fetched_it(
    stack: contextlib.AsyncExitStack,
) -> None:
    text = example_run().to_toml()
    first = await start(stack)
    publisher = await start(stack, first)
    run_id = await publisher.directory.publish_manifest(text)
    assert run_id == example_run().id
    await publisher.close()
    joiner = await start(stack, first)
    assert await joiner.directory.fetch_manifest(run_id) == text
    assert joiner.directory._manifest is not None
    with pytest.raises(SetupError, match="nobody here knows a run 0123: check the id"):
        await joiner.directory.fetch_manifest("0123", timeout_s=0.1)


async def test_the_record_of_a_dead_peer_runs_out(stack: contextlib.AsyncExitStack) -> None:
    first = await start(stack, run_id=None)
    watcher, dying = await start(stack, first), await start(stack, first, revivals=0, on_death=list)
    dying.directory._life_s = 5.0
    await dying.directory.announce(record(dying))
    await until(lambda: len(watcher.directory.peers()) == 1)
    os.kill(dying.p2pd_pid, signal.SIGKILL)
    await until(lambda: len(watcher.directory.peers()) == 0)


async def test_a_node_is_spawned_ahead_and_closes_twice(stack: contextlib.AsyncExitStack) -> None:
    daemon = Daemon.spawn(DaemonOptions(announce=("127.0.0.1:1234",)))
    async with Node(daemon=daemon) as node:
        assert node.addresses == (f"/ip4/127.0.0.1/tcp/1234/p2p/{daemon.peer_id}",)
        assert node.alive
        assert node.socket_dir.is_dir()
    await node.close()
    assert not node.alive
    assert not node.socket_dir.exists()


async def test_an_idle_node_has_listening_addresses_that_can_be_pasted(
    stack: contextlib.AsyncExitStack,
) -> None:
    node = await start(stack)
    (address,) = node.addresses
    assert address.startswith("/ip4/127.0.0.1/tcp/")
    assert address.endswith(f"/p2p/{node.peer_id}")
    assert await node.current_addresses() == (address,)


# -- what goes wrong ---------------------------------------------------------------------------------------


async def test_a_peer_that_is_killed_is_gone_at_once(stack: contextlib.AsyncExitStack) -> None:
    first = await start(stack)
    deaths: list[int] = []
    other = await start(stack, first, revivals=0, on_death=lambda: deaths.append(1))
    entered = asyncio.Event()

    async def never(request: Request) -> Answer:
        entered.set()
        await asyncio.get_running_loop().create_future()
        return Answer(b"")

    other.transport.serve("never", never)
    first.transport.learn(other.peer_id, other.addresses)
    call = asyncio.ensure_future(first.transport.call(other.peer_id, "never", b""))
    await entered.wait()
    before = time.monotonic()
    os.kill(other.p2pd_pid, signal.SIGKILL)
    with pytest.raises(PeerGone, match="the connection broke"):
        await call
    assert time.monotonic() - before < 3.0  # silence would be noticed after 3.5
    with pytest.raises(PeerGone, match="cannot be reached"):
        await first.transport.call(other.peer_id, "never", b"")
    await until(lambda: deaths == [1])
    with pytest.raises(PeerGone, match="cannot be reached: our own p2pd ended"):
        await other.transport.call(first.peer_id, "x", b"")
    with pytest.raises(ControlError, match="p2pd cannot be reached"):
        await other.peer_count()


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
    addresses, dead = other.addresses, other.p2pd_pid
    os.kill(dead, signal.SIGKILL)
    await until(lambda: "p2pd was started again" in caplog.text)
    assert other.p2pd_pid != dead
    assert other.addresses == addresses
    assert (await first.transport.call(other.peer_id, "echo", b"")).header.decode() == first.peer_id
    await other.directory.announce(record(other, stage=3))
    await until(lambda: [r.stage for r in first.directory.peers()] == [3])
    assert (await other.transport.call(other.peer_id, "echo", b"")).header.decode() == other.peer_id


async def test_our_own_lack_of_file_descriptors_is_not_laid_on_p2pd() -> None:
    words = r"this process has no free file descriptors \(3 are allowed\): raise the limit \(ulimit -n\)"
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.raises(SetupError) as end:
        async with Node(revivals=2) as node:
            assert node.p2pd_pid is not None
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            try:
                with pytest.raises(ControlError, match=f"^{words}$"):
                    await node.control.identify()
                for _ in range(2 * node_module.MAX_UNANSWERED):
                    await node._probe_once()
                assert node.alive, "p2pd is not killed for what we are short of"
                os.kill(node.p2pd_pid, signal.SIGKILL)
                await asyncio.sleep(30.0)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert re.fullmatch(
        "p2pd, which connects this process to the others, could not be started again: "
        f"{words}\\. Mend that, and start this program again",
        end.value.text,
    )


async def test_a_p2pd_that_cannot_be_replaced_is_reported(
    stack: contextlib.AsyncExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deaths: list[int] = []
    node = await start(stack, on_death=lambda: deaths.append(1), revivals=3)

    def refuse() -> Path:
        raise SetupError("hivemind was removed")

    monkeypatch.setattr("peers.net.p2pd.p2pd_path", refuse)
    os.kill(node.p2pd_pid, signal.SIGKILL)
    await until(lambda: deaths == [1])
    assert "p2pd could not be started again: hivemind was removed" in caplog.text
    with pytest.raises(PeerGone, match="cannot be reached: our own p2pd ended"):
        await node.transport.call(Identity.generate().peer_id, "x", b"")


async def test_who_entered_a_node_whose_p2pd_cannot_be_replaced_leaves_it_with_the_reason(
    stack: contextlib.AsyncExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> Path:
        raise SetupError("hivemind was removed")

    with pytest.raises(SetupError) as caught:
        async with Node(run_id=RUN, revivals=3) as node:
            monkeypatch.setattr("peers.net.p2pd.p2pd_path", refuse)
            os.kill(node.p2pd_pid, signal.SIGKILL)
            await asyncio.get_running_loop().create_future()
    assert caught.value.text.startswith("p2pd, which connects this process to the others, could not be")
    assert "started again: hivemind was removed. See that nothing kills it" in caught.value.text
    assert caplog.text.count("an attempt to start p2pd again failed") == 3
    await asyncio.sleep(0)  # not cancelled any more


def test_p2pd_is_started_again_with_growing_pauses_until_it_died_too_often_in_a_row() -> None:
    deaths, now, pauses = Deaths(6), 100.0, []
    while (pause_s := deaths.pause_s(now=now)) is not None:
        pauses.append(pause_s)
        now += pause_s
        deaths.started(now=now)
        now += 0.5
    assert pauses == [0.0, 0.25, 0.5, 1.0, 2.0, 4.0]
    deaths, now = Deaths(2), 0.0
    for _ in range(20):  # once in a while, for ever
        assert deaths.pause_s(now=now) == 0.0
        deaths.started(now=now)
        now += STABLE_S + 0.1
    deaths = Deaths(100)
    deaths.started(now=0.0)
    assert max(deaths.pause_s(now=0.0) or 0.0 for _ in range(100)) == LONGEST_PAUSE_S


async def test_a_p2pd_that_dies_again_while_it_is_replaced_is_replaced_again(
    stack: contextlib.AsyncExitStack,
) -> None:
    first = await start(stack)
    other = await start(stack, first)
    other.transport.serve("echo", echo)
    other.transport.learn(first.peer_id, first.addresses)
    addresses, killed = other.addresses, set[int]()
    for _ in range(3):
        await until(lambda: other.p2pd_pid is not None and other.alive and other.p2pd_pid not in killed)
        killed.add(other.p2pd_pid)
        os.kill(other.p2pd_pid, signal.SIGKILL)
    await other.directory.announce(record(other))  # while nothing can be said to anybody
    await other.directory.refresh()
    call = asyncio.ensure_future(other.transport.call(first.peer_id, "x", b""))
    await until(lambda: other.alive and other.directory.online and other.p2pd_pid not in killed)
    with pytest.raises(Refused, match="no such method"):
        await call
    assert other.addresses == addresses
    await until(lambda: [r.peer for r in first.directory.peers()] == [other.peer_id])
    assert (await first.transport.call(other.peer_id, "echo", b"")).header.decode() == first.peer_id


async def test_a_p2pd_that_hangs_is_killed_and_replaced(
    stack: contextlib.AsyncExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_module, "PROBE_EVERY_S", 0.05)
    first = await start(stack)
    other = await start(stack, first)
    monkeypatch.setattr(control_module, "CONTROL_TIMEOUT_S", 1.0)
    await other.directory.announce(record(other))
    hung = other.p2pd_pid
    stop(hung)
    await until(lambda: other.alive and other.directory.online and other.p2pd_pid != hung)
    assert f"p2pd (pid {hung}) does not answer any more: it is killed" in caplog.text
    await until(lambda: [r.peer for r in first.directory.peers()] == [other.peer_id])


async def test_a_p2pd_whose_port_was_taken_comes_back_on_another_and_is_found_there(
    stack: contextlib.AsyncExitStack,
) -> None:
    first = await start(stack)
    other = await start(stack, first)
    other.transport.serve("echo", echo)
    await other.directory.announce(record(other))
    await until(lambda: len(first.directory.peers()) == 1)
    before, dead = other.addresses, other.p2pd_pid
    port = int(before[0].split("/tcp/")[1].split("/")[0])
    with contextlib.closing(socket.socket()) as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        os.kill(dead, signal.SIGKILL)
        await until(lambda: not psutil.pid_exists(dead))
        squatter.bind(("127.0.0.1", port))
        squatter.listen()
        await until(lambda: other.alive and other.directory.online and other.p2pd_pid != dead)
        assert other.addresses != before
        await until(lambda: [r.addresses for r in first.directory.peers()] == [other.addresses])
        assert (await first.transport.call(other.peer_id, "echo", b"")).header.decode() == first.peer_id
        moved, dead = other.addresses, other.p2pd_pid
        os.kill(dead, signal.SIGKILL)
        await until(lambda: other.alive and other.directory.online and other.p2pd_pid != dead)
        assert other.addresses == moved, "once more on the port that it had"
        await other.directory.announce(
            record(other, version=7, addresses=before)
        )  # who announces knows these
        await until(lambda: [r.version for r in first.directory.peers()] == [7])
        assert [r.addresses for r in first.directory.peers()] == [moved]


async def test_a_port_that_a_user_wished_is_kept_and_any_other_is_left_when_it_is_taken(
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


# -- at home, behind a relay -------------------------------------------------------------------------------

RELAYS = tuple(f"/ip4/44.0.0.{i}/tcp/1/p2p/{Identity(bytes([i]) * 32).peer_id}" for i in range(1, 5))
RELAYED = f"{RELAYS[0]}/p2p-circuit"


class Told:
    """A p2pd, and its control: what it answers is set by the test."""

    pid, peer_id, alive = 1, Identity(b"a" * 32).peer_id, True

    def __init__(self, *relays: str) -> None:
        self.options = DaemonOptions(relays=relays)
        self.listening: tuple[str, ...] = ()
        self.met: list[str] = []
        self.looks = self.kills = 0

    async def identify(self) -> tuple[str, tuple[str, ...]]:
        self.looks += 1
        return self.peer_id, self.listening

    async def connected(self) -> set[str]:
        return {relay.rpartition("/")[2] for relay in self.met}

    async def relayed(self) -> list[str]:
        return []

    def kill(self) -> None:
        self.kills += 1


def at_home(told: Told) -> Node:
    node = Node(daemon=told)  # type: ignore[arg-type]
    node.control, node.transport = told, told  # type: ignore[assignment]
    node.directory = SimpleNamespace(move=lambda addresses: None)  # type: ignore[assignment]
    return node


async def test_who_looks_after_p2pd_goes_on_when_files_are_short_or_a_look_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_module, "PROBE_EVERY_S", 0.0)
    monkeypatch.setattr(node_module, "RELAYLESS_S", -1.0)
    failures = [ValueError("a bug"), OSError(24, "Too many open files")]
    told = Told(RELAYS[0])

    async def relaying(transport: object, control: object, addresses: object) -> tuple[str, ...]:
        if len(failures) == 2:
            raise failures.pop(0)
        return RELAYS[1:]

    async def those_that_take_us(options: object, relays: tuple[str, ...]) -> tuple[str, ...]:
        if failures:
            raise failures.pop(0)
        return relays

    monkeypatch.setattr(reach_module, "relaying", relaying)
    monkeypatch.setattr(reach_module, "those_that_take_us", those_that_take_us)
    probing = asyncio.ensure_future(at_home(told)._probe())
    await until(lambda: told.kills > 0 or probing.done())
    assert not probing.done() and told.options.relays == RELAYS[1:]
    probing.cancel()
    assert "a look at p2pd failed" in caplog.text
    assert "no other relays could be tried: [Errno 24] Too many open files" in caplog.text


async def test_a_p2pd_that_a_relay_took_again_while_others_were_tried_lives_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = Told(RELAYS[0])

    async def relaying(transport: object, control: object, addresses: object) -> tuple[str, ...]:
        return RELAYS[1:]

    async def those_that_take_us(options: object, relays: tuple[str, ...]) -> tuple[str, ...]:
        told.listening = (RELAYED,)
        return relays

    monkeypatch.setattr(reach_module, "relaying", relaying)
    monkeypatch.setattr(reach_module, "those_that_take_us", those_that_take_us)
    node = at_home(told)
    await node._take_other_relays(told)  # type: ignore[arg-type]
    assert told.kills == 0 and told.options.relays == RELAYS[:1]
    assert node.addresses == (f"{RELAYED}/p2p/{told.peer_id}",)


async def test_a_public_peer_that_is_gone_is_not_waited_for_when_a_relay_has_us(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_module, "OBSERVERS_S", 0.0)
    told = Told(*RELAYS)
    told.listening, told.met = (RELAYED,), list(RELAYS[1:])
    node = at_home(told)
    await asyncio.wait_for(node._look_around(3600.0), 15.0)
    assert node.addresses == (f"{RELAYED}/p2p/{told.peer_id}",)


async def test_public_peers_that_are_slow_are_waited_for_so_that_holes_can_be_punched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_module, "OBSERVERS_S", 3600.0)
    monkeypatch.setattr(node_module, "NOTICE_S", 0.0)
    told = Told(*RELAYS)
    told.listening, told.met = (RELAYED,), list(RELAYS[1:])
    looking = asyncio.ensure_future(at_home(told)._look_around(3600.0))
    await until(lambda: told.looks >= 4 or looking.done())
    assert not looking.done()
    told.met = list(RELAYS)
    await asyncio.wait_for(looking, 15.0)


async def test_calls_go_on_when_p2pd_is_back_although_no_relay_is(
    stack: contextlib.AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "RELAY_S", 3600.0)
    monkeypatch.setattr(node_module, "REVIVAL_RELAY_S", 0.2)
    first = await start(stack)
    first.transport.serve("echo", echo)
    other = await start(stack, first)
    assert other.daemon is not None
    other.daemon.options = DaemonOptions(reachable=False, relays=first.addresses)  # it relays for nobody
    other.transport.learn(first.peer_id, first.addresses)
    dead = other.p2pd_pid
    os.kill(dead, signal.SIGKILL)
    await until(lambda: other.alive and other.directory.online and other.p2pd_pid != dead)
    assert (await other.transport.call(first.peer_id, "echo", b"")).header.decode() == other.peer_id
    assert not other.addresses


# -- entry points come and go ------------------------------------------------------------------------------


async def test_a_fresh_nodes_first_look_finds_all_that_live_though_holders_are_dead(
    stack: contextlib.AsyncExitStack,
) -> None:
    first = await start(stack, run_id=None)
    nodes = await asyncio.gather(*(start(stack, first, revivals=0, on_death=list) for _ in range(5)))
    for node in nodes:
        await node.directory.announce(record(node))
    living, dead = nodes[:2], nodes[2:]
    await until(lambda: all(len(node.directory.peers()) == 5 for node in nodes))
    for node in dead:
        os.kill(node.p2pd_pid, signal.SIGKILL)
    for _ in range(3):
        async with Node(run_id=RUN, join=[first.addresses[0]]) as fresh:
            before = time.monotonic()
            seen = {r.peer for r in await watching(fresh).directory.refresh()}
            assert seen >= {node.peer_id for node in living}
            assert time.monotonic() - before < 5.0


async def test_a_fresh_nodes_first_look_does_not_depend_on_one_holder_that_missed_a_record(
    stack: contextlib.AsyncExitStack,
) -> None:
    first = await start(stack, run_id=None)
    other = await start(stack, first)
    await other.directory.announce(record(other))
    for _ in range(8):  # each asks in an order of its own
        first.directory.storage.node.protocol.storage.clear()  # as if it had been away when it was stored
        daemon = Daemon.spawn(DaemonOptions())
        async with Node(run_id=RUN, join=[other.addresses[0]], daemon=daemon, refresh_s=60.0) as fresh:
            watching(fresh)
            await until(lambda node=fresh: node.directory.neighbours == 2)
            forget(fresh)
            fresh.directory.reader.refreshed = False
            assert [r.peer for r in await fresh.directory.refresh()] == [other.peer_id]


async def test_a_stopped_holder_does_not_delay_a_refresh(stack: contextlib.AsyncExitStack) -> None:
    first = await start(stack, run_id=None)
    watcher = await start(stack, first, refresh_s=60.0)
    holder = await start(stack, first)
    await holder.directory.announce(record(holder))
    await until(lambda: watcher.directory.neighbours == 2)
    await watcher.directory.refresh()
    stop(holder.p2pd_pid)
    for _ in range(4):
        forget(watcher)
        before = time.monotonic()
        assert [r.peer for r in await watcher.directory.refresh()] == [holder.peer_id]
        assert time.monotonic() - before < 3.0
    os.kill(holder.p2pd_pid, signal.SIGCONT)


async def test_a_bootstrap_that_returns_is_greeted_and_newcomers_find_the_run_through_it(
    stack: contextlib.AsyncExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_module, "GREET_EVERY_S", 0.3)
    key = tmp_path / "identity"
    bootstrap = await start(stack, run_id=None, identity_path=key)
    (address,) = bootstrap.addresses
    port = int(address.split("/tcp/")[1].split("/")[0])
    nodes = await asyncio.gather(*(start(stack, bootstrap) for _ in range(3)))
    for node in nodes:
        await node.directory.announce(record(node))
    ids = sorted(node.peer_id for node in nodes)
    await until(lambda: all(len(node.directory.peers()) == 3 for node in nodes))
    await bootstrap.close()
    for node in nodes:
        assert len(await node.directory.refresh()) == 3
    # A newcomer at any live peer; of its addresses to join at, one is dead.
    late = await start(stack, join=[address, nodes[1].addresses[0]])
    assert sorted(r.peer for r in await late.directory.refresh()) == ids
    back = await start(stack, identity_path=key, options=DaemonOptions(port=port))
    assert back.addresses == (address,)
    await until(lambda: sorted(r.peer for r in back.directory.peers()) == ids, 30.0)
    newcomer = await start(stack, join=[address])
    assert sorted(r.peer for r in await newcomer.directory.refresh()) == ids


async def test_two_halves_that_forgot_each_other_become_one_network_again(
    stack: contextlib.AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a long cut, with the bootstrap dead, at which all of them joined."""
    monkeypatch.setattr(directory_module, "GREET_EVERY_S", 0.2)
    bootstrap = await start(stack, run_id=None)
    nodes = [await start(stack, bootstrap) for _ in range(4)]
    for node in nodes:
        await node.directory.announce(record(node))
    await until(lambda: all(len(node.directory.peers()) == 4 for node in nodes))
    await bootstrap.close()
    halves = [nodes[:2], nodes[2:]]
    for half, others in (halves, halves[::-1]):
        gone = {node.peer_id for node in others}
        for node in half:
            table = node.directory.storage.node.protocol.routing_table
            for uid in [uid for uid, peer in table.uid_to_peer_id.items() if str(peer) in gone]:
                del table[uid]
            forget(node)
            node.directory.storage.node.protocol.storage.clear()
    ids = {node.peer_id for node in nodes}
    await until(lambda: all({r.peer for r in node.directory.peers()} == ids for node in nodes))
    for node in nodes:
        known = {str(peer) for peer in node.directory.storage.node.protocol.routing_table.peer_id_to_uid}
        assert known >= ids - {node.peer_id}


async def test_a_manifest_outlives_its_publisher_as_long_as_anybody_who_fetched_it_is_there(
    stack: contextlib.AsyncExitStack,
) -> None:
    text, life_s = example_run().to_toml(), 1.5
    bootstrap = await start(stack, manifest_life_s=life_s)
    run_id = await bootstrap.directory.publish_manifest(text)
    peers = [await start(stack, bootstrap, manifest_life_s=life_s) for _ in range(2)]
    for peer in peers:
        assert await peer.directory.fetch_manifest(run_id) == text
    await bootstrap.close()
    await peers[0].close()
    await asyncio.sleep(2 * life_s)  # the life of what the bootstrap stored has passed twice
    newcomer = await start(stack, peers[1])
    assert await newcomer.directory.fetch_manifest(run_id, timeout_s=5.0) == text


async def test_a_node_that_lost_everybody_it_could_join_at_finds_those_it_met(
    stack: contextlib.AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_module, "GREET_EVERY_S", 0.3)
    bootstrap = await start(stack, run_id=None)
    one, two = [await start(stack, bootstrap) for _ in range(2)]
    for node in (one, two):
        await node.directory.announce(record(node))
    await until(lambda: all(len(node.directory.peers()) == 2 for node in (one, two)))
    await bootstrap.close()
    dead = two.p2pd_pid
    os.kill(dead, signal.SIGKILL)
    # As after a long cut: the record is over, and the routing table is empty.
    await until(lambda: two.alive and two.directory.online and two.p2pd_pid != dead)
    table = two.directory.storage.node.protocol.routing_table
    for uid in list(table.uid_to_peer_id):
        del table[uid]
    forget(two)
    await until(lambda: [r.peer for r in two.directory.peers()] == sorted([one.peer_id, two.peer_id]))


async def test_a_peer_whose_p2pd_is_stopped_is_silent(stack: contextlib.AsyncExitStack) -> None:
    first = await start(stack, timings=LinkTimings(silence_s=1.5))
    other = await start(stack, first)
    other.transport.serve("echo", echo, max_body_bytes=64 * MIB)
    first.transport.learn(other.peer_id, other.addresses)
    await first.transport.call(other.peer_id, "echo", b"")
    stop(other.p2pd_pid)
    before = time.monotonic()
    calls = [first.transport.call(other.peer_id, "echo", b"", [bytes(size)]) for size in (0, 64 * MIB)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [PeerSilent, PeerSilent]
    assert time.monotonic() - before < 3.0
    await asyncio.wait_for(first.directory.refresh(), 10)


async def test_nobody_to_join_at_is_said_in_time(stack: contextlib.AsyncExitStack) -> None:
    nobody = Identity.generate().peer_id
    before = time.monotonic()
    with pytest.raises(SetupError) as caught:
        await start(stack, join=[f"/ip4/127.0.0.1/tcp/1/p2p/{nobody}", f"/ip4/192.0.2.1/tcp/9/p2p/{nobody}"])
    assert time.monotonic() - before < 12
    assert caught.value.text.startswith("none of the peers to join at can be reached. Check that one of them")
    assert f"/ip4/127.0.0.1/tcp/1, /ip4/192.0.2.1/tcp/9/p2p/{nobody}: " in caught.value.text


async def test_a_peer_that_comes_back_is_reached_at_once_however_often_it_was_dialled(
    stack: contextlib.AsyncExitStack,
) -> None:
    """libp2p alone would refuse to dial for 9 s after the third failure, and longer after each other one."""
    first, identity = await start(stack), Identity.generate()
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    first.transport.learn(identity.peer_id, [f"/ip4/127.0.0.1/tcp/{port}"])
    since = time.monotonic()
    while time.monotonic() - since < 12.0:
        with pytest.raises(PeerGone, match=f"cannot be reached: 127.0.0.1:{port}: Connection refused"):
            await first.transport.call(identity.peer_id, "x", b"")
        await asyncio.sleep(0.3)
    daemon = Daemon.spawn(DaemonOptions(port=port), identity=identity)
    await daemon.ready()
    back = await start(stack, daemon=daemon)
    back.transport.serve("echo", echo)
    assert (await first.transport.call(identity.peer_id, "echo", b"")).header.decode() == first.peer_id


def test_only_addresses_that_can_be_dialled_directly_are_tried_before_p2pd_dials_them() -> None:
    peer = Identity.generate().peer_id
    direct = [f"/ip4/192.0.2.7/tcp/31337/p2p/{peer}", "/ip6/::1/tcp/5", "/dns4/example.org/tcp/80"]
    assert control_module.tcp_places(direct) == [("192.0.2.7", 31337), ("::1", 5), ("example.org", 80)]
    relayed = f"/ip4/192.0.2.7/tcp/1/p2p/{peer}/p2p-circuit/p2p/{peer}"
    for other in (relayed, "/ip4/192.0.2.7/udp/1/quic", "nonsense", "/ip4/192.0.2.7/tcp/x"):
        assert control_module.tcp_places([*direct, other]) == []


async def test_an_address_with_another_peers_id_is_not_joined(stack: contextlib.AsyncExitStack) -> None:
    first = await start(stack)
    transport, _ = first.addresses[0].split("/p2p/")
    with pytest.raises(SetupError, match="none of the peers to join at can be reached"):
        await start(stack, join=[f"{transport}/p2p/{Identity.generate().peer_id}"])
    with pytest.raises(SetupError, match="is not the address of a peer: it should end in /p2p/"):
        await start(stack, join=[transport])


async def test_a_peer_that_speaks_no_dht_is_not_joined(stack: contextlib.AsyncExitStack) -> None:
    daemon = Daemon.spawn(DaemonOptions())
    await daemon.ready()
    with pytest.raises(SetupError, match="can be reached, but do not answer as peers of a swarm"):
        await start(stack, join=[f"{daemon.addresses[0]}/p2p/{daemon.peer_id}"])
    daemon.close_now()


async def test_a_swarm_of_another_version_is_not_joined(stack: contextlib.AsyncExitStack) -> None:
    async def of_later(request: Request) -> Answer:
        raise OtherVersion("update", version=7)

    first = await start(stack)
    first.transport.serve(node_module.VERSION_METHOD, of_later)
    with pytest.raises(SetupError) as refusal:
        await start(stack, join=[first.addresses[0]])
    assert refusal.value.text == (
        f"this program speaks version {PROTOCOL_VERSION} of the swarm's protocol, the swarm that it joins "
        "version 7: update the older program"
    )


# -- strangers in the DHT ----------------------------------------------------------------------------------


class Stranger:
    """A DHT node that stores what it likes and checks nothing."""

    def __init__(self, daemon: Daemon, p2p: AttachedP2P, node: DHTNode) -> None:
        self.daemon, self.p2p, self.node, self.identity = daemon, p2p, node, daemon.identity

    @classmethod
    async def join(cls, node: Node) -> Stranger:
        daemon = Daemon.spawn(DaemonOptions())
        await daemon.ready()
        p2p = await AttachedP2P.attach(daemon.control_path, daemon.directory / "client.sock")
        peer = node.peer_id
        await node.control.connect(daemon.peer_id, daemon.addresses, 5)
        dht = await DHTNode.create(
            p2p=p2p, node_id=DHTID.generate(source=daemon.peer_id),  # elsewhere nobody would know it
            initial_peers=[f"/p2p/{peer}"], bootstrap_timeout=2.0,
        )  # fmt: skip
        return cls(daemon, p2p, dht)

    async def store(self, victim: Node, key: str, subkey: object, value: bytes, expires: float) -> bool:
        answer = await self.node.protocol.call_store(
            PeerID.from_base58(victim.peer_id),
            [DHTID.generate(source=key)],
            [value],
            expires,
            subkeys=[subkey],
        )
        return bool(answer and answer[0])

    def hold(self, key: str, subkey: object, value: bytes, expires: float) -> None:
        self.node.protocol.storage.store(DHTID.generate(source=key), value, expires, subkey=subkey)

    async def leave(self) -> None:
        self.daemon.expect_end()
        await self.p2p.close()
        self.daemon.close_now()
        left = [task for task in asyncio.all_tasks() if "hivemind/dht" in repr(task)]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def home(peer: str, run: str = RUN, stage: int = 0) -> str:
    return envelopes.peers_key(run, shards.homes(peer, stage, 0)[0])


async def test_the_records_are_the_same_object_until_one_changes_or_runs_out(
    stack: contextlib.AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await start(stack)
    second = await start(stack, first)
    await first.directory.announce(record(first))
    await second.directory.refresh()
    seen = second.directory.peers()
    assert [r.peer for r in seen] == [first.peer_id] and second.directory.peers() is seen
    await second.directory.announce(record(second))
    both = second.directory.peers()
    assert both is not seen and {r.peer for r in both} == {first.peer_id, second.peer_id}
    assert second.directory.peers() is both
    await second.directory.withdraw()
    assert [r.peer for r in second.directory.peers()] == [first.peer_id]
    later = time.time() + 3600.0
    monkeypatch.setattr("peers.net.directory.unix_s", lambda: later)
    assert second.directory.peers() == []


async def test_a_strangers_records_are_not_stored(stack: contextlib.AsyncExitStack) -> None:
    victim = await start(stack)
    stranger = await Stranger.join(victim)
    me, soon = stranger.identity, time.time() + 20.0
    own = PeerRecord(peer=me.peer_id, run=RUN, stage=0, state="serving", version=0)
    about_victim = record(victim)
    forged = msgspec.msgpack.encode(
        [envelopes._pack(about_victim, 0), soon, me.sign(b"not what it should be"), PROTOCOL_VERSION]
    )
    good = envelopes.seal_record(own, soon, me)
    wrong: list[tuple[str, str, object, bytes, float]] = [
        ("a record with a wrong signature", home(victim.peer_id), victim.peer_id, forged, soon),
        ("a record with a wrong signature", home(victim.peer_id), victim.peer_id, good, soon),
        ("stored for another time", home(me.peer_id), me.peer_id, good, soon + 30),
        ("a value that wants to live too long", home(me.peer_id), me.peer_id, good, soon + 1e6),
        ("a value under a key where it does not belong", home(me.peer_id, "e" * 32), me.peer_id, good, soon),
        ("a malformed manifest", "anything", "x", b"what is this", soon),
        ("a value that is too large", home(me.peer_id), me.peer_id, bytes(100_000), soon),
        ("a malformed record", home(me.peer_id), me.peer_id, b"\x91" * 900, soon),
        ("a subkey that is not a text", home(me.peer_id), 5, good, soon),
        ("a subkey that is not a text", home(me.peer_id), None, good, soon),
    ]
    rejected = victim.directory.check.rejected
    for reason, key, subkey, value, expires in wrong:
        before = sum(count for text, count in rejected.items() if reason in text)
        assert not await stranger.store(victim, key, subkey, value, expires), reason
        assert sum(count for text, count in rejected.items() if reason in text) > before, (reason, rejected)
    assert len(victim.directory.storage.node.protocol.storage) == 0
    # His own record, about himself, is as good as anybody's.
    assert await stranger.store(victim, home(me.peer_id), me.peer_id, good, soon)
    assert [r.peer for r in await victim.directory.refresh()] == [me.peer_id]
    # An older one does not replace it.
    older = envelopes.seal_record(msgspec.structs.replace(own, version=7), soon - 5, me)
    assert not await stranger.store(victim, home(me.peer_id), me.peer_id, older, soon - 5)
    assert [r.version for r in await victim.directory.refresh()] == [0]
    await stranger.leave()


async def test_a_stranger_cannot_fill_a_nodes_memory(
    stack: contextlib.AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder, "MAX_ENTRIES", 20)
    victim = await start(stack)
    stranger = await Stranger.join(victim)
    soon, stored = time.time() + 20.0, 0
    for number in range(30):
        someone = Identity(number.to_bytes(32, "big"))
        own = PeerRecord(peer=someone.peer_id, run=RUN, stage=0, state="serving", version=0)
        sealed = envelopes.seal_record(own, soon, someone)
        stored += await stranger.store(victim, home(someone.peer_id), someone.peer_id, sealed, soon)
    assert stored == 20
    many = await stranger.node.protocol.call_store(
        PeerID.from_base58(victim.peer_id), [DHTID.generate(source="k")] * 100, [b"v"] * 100, soon
    )
    assert many is not None
    assert not any(many)
    await stranger.leave()


async def test_what_a_strangers_node_answers_is_verified(stack: contextlib.AsyncExitStack) -> None:
    victim = await start(stack)
    stranger = await Stranger.join(victim)
    me, soon = stranger.identity, time.time() + 20.0
    about_victim = msgspec.structs.replace(record(victim), state="left")
    forged = msgspec.msgpack.encode([envelopes._pack(about_victim, 0), soon, me.sign(b""), PROTOCOL_VERSION])
    own = PeerRecord(peer=me.peer_id, run=RUN, stage=0, state="serving", version=0)
    await until(lambda: victim.directory.neighbours == 1)
    # What he holds himself; an infinite expiration would make hivemind's own search stop at him.
    stranger.hold(home(victim.peer_id), victim.peer_id, forged, soon)
    stranger.hold(home("x" * 52), "x" * 52, b"no envelope", float("inf"))
    assert list(await victim.directory.refresh()) == []
    reasons = " ".join(victim.directory.check.rejected)
    assert "a wrong signature" in reasons
    stranger.node.protocol.storage.clear()
    stranger.hold(home(me.peer_id), me.peer_id, envelopes.seal_record(own, soon, me), soon)
    assert [r.peer for r in await victim.directory.refresh()] == [me.peer_id]
    await stranger.leave()


async def test_a_swarm_that_lost_its_node_finds_it_again(stack: contextlib.AsyncExitStack) -> None:
    first = await start(stack, run_id=None)
    other = await start(stack, first)
    table = other.directory.storage.node.protocol.routing_table
    for uid in list(table.uid_to_peer_id):
        del table[uid]
    assert other.directory.neighbours == 0
    await until(lambda: other.directory.neighbours == 1)


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


def test_it_works_as_well_when_all_of_hivemind_was_imported_before() -> None:
    program = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "import hivemind, asyncio\n"
        "from peers.net.node import Node\n"
        "async def main():\n"
        "    async with Node() as first, Node(join=first.addresses, run_id='r') as other:\n"
        "        print(len(await other.directory.refresh()), other.directory.neighbours)\n"
        "asyncio.run(main())\n"
    )
    assert run_python(program) == "0 1"


def test_the_own_address_is_an_address() -> None:
    assert len(own_address().split(".")) == 4
