"""What a node does about its p2pd and its relays, without any: how often it is started again, and where."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from peers.net import nat
from peers.net.identity import Identity, with_peer_id
from peers.net.node import LONGEST_PAUSE_S, STABLE_S, Deaths, Node
from peers.net.p2pd import Daemon, DaemonOptions
from peers.net.timings import DEFAULT_TIMINGS, NetTimings
from peers.ports import Answer
from swarm.errors import PeerGone, SetupError
from swarm.wire.messages import pack

pytestmark = pytest.mark.virtual_time


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.02)


async def test_p2pd_is_started_again_with_growing_pauses_until_it_died_too_often_in_a_row() -> None:
    deaths, now, pauses = Deaths(6), 100.0, []
    while (pause_s := deaths.pause_s(now=now)) is not None:
        pauses.append(pause_s)
        now += pause_s + 0.5
    assert pauses == [0.0, 0.25, 0.5, 1.0, 2.0, 4.0]
    deaths, now = Deaths(2), 0.0
    for _ in range(20):  # once in a while, for ever
        assert deaths.pause_s(now=now) == 0.0
        now += STABLE_S + 0.1
    deaths = Deaths(100)
    assert max(deaths.pause_s(now=0.0) or 0.0 for _ in range(100)) == LONGEST_PAUSE_S


@pytest.mark.parametrize(
    ("number", "advice"), [(errno.ENOENT, "nothing kills it (memory"), (errno.EMFILE, "Mend that")]
)
async def test_a_p2pd_that_ends_once_it_listened_is_said_with_what_to_do(
    number: int, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory is short it says that it listens, and dies: only a missing file was said."""
    told = Told()

    async def gone(path: str) -> Any:
        raise OSError(number, os.strerror(number))

    async def ready() -> None: ...

    monkeypatch.setattr(asyncio, "open_unix_connection", gone)
    told.ready, told.close_now, told.control_path = ready, lambda: None, tmp_path  # type: ignore
    with pytest.raises(SetupError, match="p2pd fails right after its start") as caught:
        await Node(daemon=told).__aenter__()  # type: ignore[arg-type]
    assert advice in caught.value.text


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
        self.kills = 0

    async def identify(self) -> tuple[str, tuple[str, ...]]:
        return self.peer_id, self.listening

    async def connections(self, *of: str) -> dict[str, list[str]]:
        return {relay.rpartition("/")[2]: [relay] for relay in self.met}

    def kill(self) -> None:
        self.kills += 1


def at_home(told: Told, timings: NetTimings = DEFAULT_TIMINGS) -> Node:
    node = Node(daemon=told, timings=timings)  # type: ignore[arg-type]
    node.daemon, node.control, node.transport = told, told, told  # type: ignore[assignment]
    reader = SimpleNamespace(stretch=1.0)
    node.directory = SimpleNamespace(move=lambda addresses: None, reader=reader)  # type: ignore[assignment]
    return node


async def test_probing_p2pd_goes_on_when_files_are_short_or_a_probe_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [ValueError("a bug"), OSError(24, "Too many open files")]
    told = Told(RELAYS[0])

    async def relaying(transport: object, control: object, addresses: object) -> tuple[str, ...]:
        if len(failures) == 2:
            raise failures.pop(0)
        return RELAYS[1:]

    async def those_that_take_us(
        options: object, relays: tuple[str, ...], reserve_s: float
    ) -> tuple[str, ...]:
        if failures:
            raise failures.pop(0)
        return relays

    monkeypatch.setattr(nat, "relaying", relaying)
    monkeypatch.setattr(nat, "those_that_take_us", those_that_take_us)
    probing = asyncio.ensure_future(at_home(told)._probe())
    await until(lambda: told.kills > 0 or probing.done())
    assert not probing.done() and told.options.relays == RELAYS[1:]
    probing.cancel()
    assert "a probe of p2pd failed" in caplog.text
    assert "no other relays could be tried: [Errno 24] Too many open files" in caplog.text


async def test_a_p2pd_that_a_relay_took_again_while_others_were_tried_lives_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = Told(RELAYS[0])

    async def relaying(transport: object, control: object, addresses: object) -> tuple[str, ...]:
        return RELAYS[1:]

    async def those_that_take_us(
        options: object, relays: tuple[str, ...], reserve_s: float
    ) -> tuple[str, ...]:
        told.listening = (RELAYED,)
        return relays

    monkeypatch.setattr(nat, "relaying", relaying)
    monkeypatch.setattr(nat, "those_that_take_us", those_that_take_us)
    node = at_home(told)
    await node._take_other_relays(told)  # type: ignore[arg-type]
    assert told.kills == 0 and told.options.relays == RELAYS[:1]
    assert node.addresses == (f"{RELAYED}/p2p/{told.peer_id}",)


async def test_a_public_peer_that_is_gone_is_not_waited_for_when_a_relay_has_us() -> None:
    told = Told(*RELAYS)
    told.listening, told.met = (RELAYED,), list(RELAYS[1:])
    node = at_home(told)
    await asyncio.wait_for(node._await_addresses(3600.0), DEFAULT_TIMINGS.observers_s + 1.0)
    assert node.addresses == (f"{RELAYED}/p2p/{told.peer_id}",)


async def test_public_peers_that_are_slow_are_waited_for_so_that_holes_can_be_punched() -> None:
    told = Told(*RELAYS)
    told.listening, told.met = (RELAYED,), list(RELAYS[1:])
    waiting = asyncio.ensure_future(at_home(told)._await_addresses(3600.0))
    await asyncio.sleep(DEFAULT_TIMINGS.observers_s - 0.5)
    assert not waiting.done()
    told.met = list(RELAYS)
    await asyncio.sleep(DEFAULT_TIMINGS.notice_s)
    assert not waiting.done(), "they tell it within two round trips more"
    await asyncio.wait_for(waiting, 15.0)


async def test_free_identities_do_not_crowd_out_the_relays_that_a_user_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = [Identity(bytes([i]) * 32).peer_id for i in range(20)]
    strangers = [f"/ip4/44.6.6.{i}/tcp/{port}/p2p/{p}" for i, p in enumerate(free) for port in (1, 2)]
    home = f"/ip4/10.0.0.1/tcp/1/p2p/{Identity(b'b' * 32).peer_id}"
    named = f"/ip4/44.1.1.1/tcp/1/p2p/{Identity(b'c' * 32).peer_id}"
    told = Told(RELAYS[3])
    node = at_home(told)
    node._join, node._started = (named, home), ["directory"]
    node.directory.storage = SimpleNamespace(met_addresses=lambda: [home, *strangers])  # type: ignore[assignment]
    assert node._relays() == [named, *strangers[::2]]

    asked: list[str] = []

    async def relaying(transport: object, control: object, addresses: list[str]) -> tuple[str, ...]:
        asked.extend(addresses)
        return ()

    monkeypatch.setattr(nat, "relaying", relaying)
    await node._take_other_relays(told)  # type: ignore[arg-type]
    assert asked == [RELAYS[3], named, home, *strangers[:26:2]]


# -- at another address --------------------------------------------------------------------------------------

OPEN = DaemonOptions(port=7, announce=("44.1.1.1:7",), seen_at="44.1.1.1", reachable=True)


def seen_at(*hosts: str) -> Node:
    """An open peer that those to join at see at these hosts; one that sees it nowhere does not answer."""
    told = Told()
    told.options, node = OPEN, at_home(told)
    node._join = RELAYS[: len(hosts)]
    sees = {relay.rpartition("/")[2]: host for relay, host in zip(RELAYS, hosts, strict=False)}

    async def call(peer: str, *_: object, **__: object) -> Answer:
        if not sees[peer]:
            raise PeerGone(peer, "cannot be reached")
        return Answer(pack(nat.Reached(host=sees[peer], port=1, reached=False)))

    node.transport = SimpleNamespace(call=call, peer_id=told.peer_id)  # type: ignore[assignment]
    return node


@pytest.mark.parametrize(
    ("hosts", "kills"),
    [
        (("44.1.1.1",), 0),
        (("44.2.2.2",), 1),
        (("44.2.2.2", "", "44.2.2.2", "44.1.1.1"), 1),
        (("44.2.2.2", "44.1.1.1"), 0),
        (("44.2.2.2", "44.3.3.3"), 0),
        (("",), 0),
        (("192.168.1.7", "2a00::1"), 0),
    ],
    ids=[
        "as it was", "elsewhere", "most", "one of two liars", "no two agree", "nobody", "other ways to it",
    ],
)  # fmt: skip
async def test_an_open_peer_that_is_seen_elsewhere_asks_anew_how_it_is_reached(
    hosts: tuple[str, ...], kills: int
) -> None:
    """Its provider gave it another address: it announced the one of its start for ever."""
    node = seen_at(*hosts)
    for _ in range(20):
        await node._probe_once()
        await asyncio.sleep(5.0)
    assert node.daemon.kills == kills, "and not again for ten minutes"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("leads_to", "kills"),
    [
        (["44.1.1.1"], 0), (["44.3.3.3", "44.1.1.1"], 0), (["44.3.3.3", "2a00::1"], 1), (["2a00::1"], 1),
        ([], 0), (None, 0),
    ],
    ids=["as it was", "several", "elsewhere", "IPv6 now", "nowhere", "no name server"],
)  # fmt: skip
async def test_a_name_that_is_announced_is_followed(
    monkeypatch: pytest.MonkeyPatch, leads_to: list[str] | None, kills: int
) -> None:
    """One of a DynDNS service was looked up at the start and never again."""
    node, asked = seen_at(), 0
    named = DaemonOptions(announce=("home.example:7", "/dns4/a.example/tcp/8"), reachable=True)

    def getaddrinfo(host: str, *_: object) -> list[tuple[Any, ...]]:
        nonlocal asked
        asked += 1
        found = ["44.1.1.1"] if asked == 1 else leads_to
        if not found:
            raise socket.gaierror(-5 if found is None else -2, "no answer")
        kinds = [socket.AF_INET6 if ":" in ip else socket.AF_INET for ip in found]
        return [(kind, 0, 0, "", (ip, 0)) for kind, ip in zip(kinds, found, strict=True)]

    monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)
    node.daemon.options = named
    for _ in range(2):  # as at its start, and the next one
        daemon = Daemon(node.daemon.options, Identity(b"a" * 32), None)
        daemon._release()
        node.daemon.options = daemon.options
    assert asked == 1 and node.daemon.options.announce[0] == "/ip4/44.1.1.1/tcp/7"
    for _ in range(20):
        await node._probe_once()
        await asyncio.sleep(5.0)
    assert node.daemon.kills == kills and asked == 3  # type: ignore[attr-defined]
    at, other = node.daemon.options.announce
    assert at == with_slashes(leads_to[0] if leads_to and kills else "44.1.1.1")
    assert other == "/dns4/a.example/tcp/8", "whoever dials that looks it up"


def with_slashes(ip: str) -> str:
    return f"/ip{6 if ':' in ip else 4}/{ip}/tcp/7"


async def test_in_a_large_run_each_open_peer_asks_less_often_where_it_is_seen() -> None:
    """The bootstrap of 10,000 would answer 167 questions a second."""
    node, asked = seen_at("44.1.1.1"), 0
    call, node.directory.reader = node.transport.call, SimpleNamespace(stretch=20.0)  # type: ignore[assignment]

    async def counted(*args: Any, **how: Any) -> Answer:
        nonlocal asked
        asked += 1
        return await call(*args, **how)

    node.transport.call = counted  # type: ignore[method-assign]
    for _ in range(3600 // 5):
        await node._probe_once()
        await asyncio.sleep(5.0)
    assert asked == 3


@pytest.mark.parametrize(
    ("kind", "relays"), [("open", RELAYS), ("closed", RELAYS), ("closed", ()), ("unknown", RELAYS)]
)
async def test_what_is_found_at_another_address_is_announced(
    monkeypatch: pytest.MonkeyPatch, kind: Literal["open", "closed", "unknown"], relays: tuple[str, ...]
) -> None:
    """Of one that nobody can dial, and for which none relays, that it had: it may be carried home again."""
    asked, moved, node = list[DaemonOptions](), list[object](), seen_at("44.2.2.2")

    async def find_reach(options: DaemonOptions, join: object, *, hidden: bool) -> nat.Reachability:
        asked.append(options)
        return nat.Reachability(kind=kind, host="44.2.2.2", port=7, relays=relays)

    async def nothing(*_: object) -> None:
        """Of what p2pd is asked."""

    async def spawn_again(dead: Told) -> Told:
        return dead

    monkeypatch.setattr(nat, "find_reach", find_reach)
    monkeypatch.setattr(nat, "is_loopback", lambda host: False)
    told = node.daemon
    told.close_now = lambda: None  # type: ignore[method-assign]
    node.control = SimpleNamespace(identify=told.identify, detach=nothing, attach=nothing)  # type: ignore
    node.transport.daemon_is_back = node._run_on = nothing  # type: ignore[method-assign, assignment]
    node.directory = SimpleNamespace(move=moved.append, daemon_is_back=nothing)  # type: ignore[assignment]
    node._spawn_again = spawn_again  # type: ignore[method-assign, assignment]
    await node._probe_once()
    for _ in range(2):
        await node._replace_daemon()
    relayed = relays if kind == "closed" else ()
    announced = "44.2.2.2" if kind == "open" else "" if relayed else "44.1.1.1"
    assert told.options.seen_at == announced and {options.announce for options in asked} == {()}
    assert told.options.relays == relayed
    where = [with_peer_id([f"{announced}:7"], told.peer_id)] if announced else [()]
    assert moved == 2 * where
