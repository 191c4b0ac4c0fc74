"""What a stranger has a peer do to find out whether it can be dialled, or to dial it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peers.clock import now_s
from peers.net._hivemind import p2pd_pb2
from peers.net.dht_storage import DhtStorage
from peers.net.identity import AddressBook, Identity, to_multiaddr
from peers.net.nat import MAX_PER_HOST, AskReach, DialBack, Reached, conclude
from peers.net.node import Node
from peers.net.p2pd import Daemon, DaemonOptions
from peers.net.p2pd_control import ControlError, DaemonControl, NobodyListens, _delimited
from swarm.errors import Busy
from swarm.wire.messages import pack, unpack

pytestmark = pytest.mark.virtual_time


class Connected:
    """What a `DialBack` uses of p2pd's control: all are connected from one host, and none is dialled."""

    asked = 0

    async def connections(self, *of: str) -> dict[str, list[str]]:
        self.asked += 1
        return {name: ["/ip4/44.1.1.1/tcp/5"] for name in ("liar", "other")}


@pytest.mark.parametrize(
    ("askers", "most"), [(("liar",), MAX_PER_HOST), (("liar", "other"), 2 * MAX_PER_HOST)]
)
async def test_who_asks_without_end_has_p2pd_asked_so_often_and_no_more(
    askers: tuple[str, ...], most: int
) -> None:
    control = Connected()
    server = DialBack(control, list, lambda: False, lambda: ["/ip4/44.2.2.2/tcp/1"])  # type: ignore[arg-type]
    question = pack(AskReach(peer=Identity(bytes(32)).peer_id, port=0))
    for _ in range(10 * MAX_PER_HOST):
        for peer in askers:
            with contextlib.suppress(Busy):
                await server.serve(SimpleNamespace(header=question, peer=peer))  # type: ignore[arg-type]
    assert control.asked == most


async def test_who_asks_only_where_it_is_seen_is_told_of_no_relays() -> None:
    """Each open peer asks again and again, and to look for relays among 64 peers takes 20 ms."""

    def relays() -> list[str]:
        raise AssertionError("looked for")

    server = DialBack(Connected(), relays, lambda: True, list)  # type: ignore[arg-type]
    question = pack(AskReach(peer=Identity(bytes(32)).peer_id, port=0))
    answer = await server.serve(SimpleNamespace(header=question, peer="other"))  # type: ignore[arg-type]
    assert unpack(answer.header, Reached).relay


def test_no_port_that_a_stranger_tells_ends_a_newcomer() -> None:
    """Python reads no number of 5,000 digits, and says so by an error."""
    relay, peer = "/ip4/44.1.1.1/tcp/", Identity(bytes(32)).peer_id
    told = tuple(f"{relay}{port}/p2p/{peer}" for port in ("9" * 5000, "65536", "4001"))
    answer = Reached(host="44.2.2.2", port=1, reached=False, relays=told)
    assert conclude([answer], [], [], port=1, asked_from=1).relays == told[-1:]


@pytest.mark.parametrize(
    ("hosts", "most_asked", "at_once"),
    [
        ([f"2a00:1:2:3::{i}" for i in range(1, 41)], 20, 1),
        ([f"2a00:1:2:{i}::1" for i in range(1, 41)], 40, 4),
        ([f"44.1.1.{i}" for i in range(1, 41)], 40, 4),
    ],
    ids=["one line of IPv6", "many lines of IPv6", "IPv4"],
)
async def test_all_addresses_of_one_line_count_as_one_host(
    hosts: list[str], most_asked: int, at_once: int
) -> None:
    """One of a /64 has 2^64 addresses: each had 100 questions a minute, and four took all dials."""
    dialled, busy = set[str](), 0

    class Elsewhere(Connected):
        async def connections(self, *of: str) -> dict[str, list[str]]:
            return {host: [f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/5"] for host in hosts}

        async def connect(self, peer: str, addresses: list[str], timeout_s: float) -> None:
            dialled.update(addresses)
            await asyncio.sleep(timeout_s)
            raise ControlError("no connection within 3 s")

    server = DialBack(Elsewhere(), list, lambda: False, list)  # type: ignore[arg-type]
    server.most_per_host = most_asked
    question = pack(AskReach(peer=Identity(bytes(32)).peer_id, port=7))
    asked = [
        asyncio.ensure_future(server.serve(SimpleNamespace(header=question, peer=host)))  # type: ignore[arg-type]
        for host in hosts
    ]
    await asyncio.sleep(1.0)
    assert len(dialled) == at_once
    for one in await asyncio.gather(*asked, return_exceptions=True):
        busy += isinstance(one, Busy)
    assert len(hosts) - busy == most_asked


class Asked(DaemonControl):
    """It is connected to nobody, and p2pd is asked for nothing but to connect."""

    def __init__(self) -> None:
        super().__init__(Path("none"))
        self.connected = list[str]()

    async def connections(self, *of: str) -> dict[str, list[str]]:
        return {}

    async def _ask(self, kind: str, timeout_s: float | None = None, **fields: Any) -> None:
        self.connected.append(kind)


async def test_names_in_records_of_strangers_take_two_threads_at_most() -> None:
    """16 names that no server answers took all that there are, for half a minute each time."""
    control, loop, looked_up = Asked(), asyncio.get_running_loop(), list[str]()

    async def getaddrinfo(host: str, *_: object, **__: object) -> None:
        looked_up.append(host)
        await asyncio.sleep(30.0)
        raise OSError("no server answers")

    loop.getaddrinfo = getaddrinfo  # type: ignore[assignment, method-assign]
    peer = Identity(bytes(32)).peer_id

    async def dialled(*names: str) -> None:
        with contextlib.suppress(ControlError):
            await control.connect(peer, [f"/dns4/{name}/tcp/1" for name in names], 4.0)

    await dialled(*map(str, range(16)))
    assert (looked_up, control.connected) == ([], ["CONNECT"]), "p2pd has no threads to lose"
    for round_ in range(5):
        await dialled(f"a{round_}")
    assert (looked_up, len(control.connected)) == (["a0", "a1"], 4)
    await asyncio.sleep(30.0)
    await dialled("b")
    assert looked_up[2:] == ["b"], "those before are over"


@pytest.mark.parametrize(("failures", "joins"), [(1, True), (2, False)])
async def test_who_joins_dials_again_where_a_handshake_failed_once(failures: int, joins: bool) -> None:
    """One of eight peers that joined over 100 ms ended with "noise: message is too short"."""
    control, peer, left = Asked(), Identity(bytes(32)).peer_id, failures
    storage = DhtStorage(control, "me", [], AddressBook(), random.Random(1))

    async def connect(*_: object) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise ControlError("failed to negotiate security protocol: noise: message is too short")

    async def ping(*_: object, **__: object) -> bool:
        return True

    control.connect, storage.node.ping = connect, ping  # type: ignore[method-assign]
    meeting = [storage._meet(peer, [], joining=joining) for joining in (True, False)]
    assert (await asyncio.gather(meeting[0], return_exceptions=True) == [True]) is joins
    left = 1
    with pytest.raises(ControlError):  # whom it greets it greets again
        await meeting[1]


async def test_where_nobody_listens_who_joins_says_so_at_once() -> None:
    control, began = Asked(), now_s()
    storage = DhtStorage(control, "me", [], AddressBook(), random.Random(1))

    async def connect(*_: object) -> None:
        raise NobodyListens("127.0.0.1:1: Connection refused")

    control.connect = connect  # type: ignore[method-assign]
    with pytest.raises(NobodyListens):
        await storage._meet("p", [], joining=True)
    assert now_s() == began


async def test_a_name_that_is_announced_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was twice in 5 s, by the loop itself, which stood still where no server answered."""
    looked_up = list[str]()

    def getaddrinfo(host: str, *_: object) -> list[tuple[object, ...]]:
        looked_up.append(host)
        return [(0, 0, 0, "", ("192.0.2.7", 0))]

    monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)
    options = DaemonOptions(announce=("home.example:31337",))
    node = Node(daemon=(daemon := Daemon(options, Identity(bytes(32)), None)))
    node.daemon = daemon
    with contextlib.ExitStack() as after:
        after.callback(daemon.close_now)
        for _ in range(3):
            assert node.addresses == (f"/ip4/192.0.2.7/tcp/31337/p2p/{daemon.peer_id}",)
        assert "-announceAddrs=/ip4/192.0.2.7/tcp/31337" in daemon._flags()
    assert looked_up == ["home.example"]


@pytest.mark.parametrize(
    ("leads_to", "announced"),
    [
        (["2600::7"], "/ip6/2600::7/tcp/1"),
        (["2600::7", "192.0.2.7"], "/ip4/192.0.2.7/tcp/1"),
        (["192.0.2.7"], "/ip4/192.0.2.7/tcp/1"),
    ],
)
def test_a_name_with_an_address_of_ipv6_only_is_announced(
    monkeypatch: pytest.MonkeyPatch, leads_to: list[str], announced: str
) -> None:
    """It was said to have no name server entry."""

    def getaddrinfo(host: str, port: None, family: int, kind: int) -> list[tuple[Any, ...]]:
        kinds = {":": socket.AF_INET6, ".": socket.AF_INET}
        found = [(kinds[":" if ":" in ip else "."], kind, 0, "", (ip, 0)) for ip in leads_to]
        if not (asked := [one for one in found if family in (0, one[0])]):
            raise socket.gaierror(-5, "No address associated with hostname")
        return asked

    monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)
    assert to_multiaddr("home.example:1") == announced


async def test_a_p2pd_that_hangs_as_it_is_asked_for_calls_is_not_waited_for_without_end() -> None:
    """It was, where one hung right after its start: it was never probed again, and its peer not reached."""
    control = DaemonControl(Path("none"))
    control._writer = SimpleNamespace(is_closing=lambda: False, write=lambda data: None)  # type: ignore[assignment]

    async def handler(data: bytes, peer: str) -> bytes:
        return b""

    with pytest.raises(ControlError, match=r"^no answer within 5 s$"):
        await asyncio.wait_for(control.serve_calls(handler), 60.0)


async def test_of_many_calls_that_one_makes_at_once_none_keeps_others_out() -> None:
    """All that had come were read before any was worked on, and from the 513th on they were too many."""
    control, reader, said = DaemonControl(Path("none")), asyncio.StreamReader(), list[Any]()
    control._writer = SimpleNamespace(  # type: ignore[assignment]
        is_closing=lambda: False, write=said.append, transport=SimpleNamespace(abort=lambda: None)
    )

    async def handler(data: bytes, peer: str) -> bytes:
        return b"pong"

    control._handler = handler
    for number in range(1000):
        asked = p2pd_pb2.CallUnaryRequest(peer=b"1", proto="swarm.dht", data=b"ping")
        call = p2pd_pb2.PersistentConnectionResponse(callId=number.to_bytes(16, "big"), requestHandling=asked)
        reader.feed_data(_delimited(call))
    reader.feed_eof()
    with pytest.raises(ControlError, match="closed the connection"):
        await control._read_calls(reader)
    await asyncio.sleep(1.0)
    assert len(said) == 1000 and not [answer for answer in said if b"too busy" in answer]
