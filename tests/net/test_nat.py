"""Who can dial this machine, asked of real p2pds on loopback; and what is made of the answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import SimpleNamespace

import pytest
import pytest_asyncio

from peers.net import nat
from peers.net.identity import Identity, is_public, is_relay, with_peer_id, without_peer_id
from peers.net.nat import (
    AskReach,
    DialBack,
    Reachability,
    Reached,
    _ask,
    conclude,
    find_reach,
    in_words,
    relaying,
    settled,
    those_that_take_us,
)
from peers.net.node import Node
from peers.net.p2pd import Daemon, DaemonOptions
from peers.net.p2pd_control import ControlError, _raw_addresses
from peers.net.timings import NetTimings
from peers.ports import Answer, Request
from swarm.errors import Busy, Refused, SetupError, Unreachable
from swarm.wire.messages import pack, unpack
from tests.net.relay import Relay
from tests.net.test_transport import relay

__all__ = ["relay"]

A, B = Identity(b"a" * 32).peer_id, Identity(b"b" * 32).peer_id
RELAY = f"/ip4/44.1.2.3/tcp/4001/p2p/{A}"
JOIN = ("/ip4/44.1.2.3/tcp/4001/p2p/" + A,)


# -- addresses ---------------------------------------------------------------------------------------------


def test_a_relayed_address_keeps_its_relay_and_gets_its_peer() -> None:
    direct, relayed = "/ip4/44.1.2.3/tcp/4001", f"{RELAY}/p2p-circuit"
    for address in (direct, relayed):
        whole = f"{address}/p2p/{B}"
        assert with_peer_id([address, whole], B) == (whole, whole)
        assert without_peer_id(whole) == without_peer_id(address) == address


def test_a_relayed_address_is_written_as_go_reads_it() -> None:
    """hivemind's own bytes of it are refused: "length greater than remaining number of bytes in buffer"."""
    (raw,) = _raw_addresses([f"{RELAY}/p2p-circuit/p2p/{B}"])
    ip4, tcp, p2p, circuit = bytes([4, 44, 1, 2, 3]), bytes([6, 0x0F, 0xA1]), b"\xa5\x03\x26", b"\xa2\x02"
    assert raw.startswith(ip4 + tcp + p2p) and raw.endswith(circuit)
    assert len(raw) == len(ip4 + tcp + p2p) + 38 + len(circuit)
    strange = [f"/ip4/44.1.2.3/tcp/4001/p2p/{A}x/p2p-circuit", "/p2p-circuit", "/p2p/x/p2p-circuit", "/ip4/1"]
    assert _raw_addresses(strange) == []


@pytest.mark.parametrize(
    ("address", "relay", "public"),
    [
        (RELAY, True, True),
        (f"/ip6/2a00:1450::1/tcp/1/p2p/{A}", True, True),
        (f"/ip4/192.168.1.2/tcp/4001/p2p/{A}", True, False),
        (f"/ip4/127.0.0.1/tcp/4001/p2p/{A}", True, False),
        (f"/ip4/44.1.2.3/tcp/0/p2p/{A}", False, False),
        (f"/ip4/44.1.2.3/tcp/{'9' * 5000}/p2p/{A}", False, False),
        (f"/ip4/44.1.2.3/tcp/4001/p2p/{A[:-1]}", False, False),
        (f"/ip6/44.1.2.3/tcp/4001/p2p/{A}", False, False),
        (f"{RELAY}/p2p-circuit/p2p/{B}", False, False),
        (f"/dns4/example.org/tcp/4001/p2p/{A}", False, False),
        ("/ip4/44.1.2.3/tcp/4001", False, False),
        (f"{RELAY},-x", False, False),
        (f"/ip6/2600::1%a,b\x1b[2J/tcp/1/p2p/{A}", False, False),
        (f"/ip6/fe80::1%eth0/tcp/1/p2p/{A}", False, False),
    ],
)
def test_what_may_be_told_to_p2pd_as_a_relay(address: str, relay: bool, public: bool) -> None:
    assert (is_relay(address), is_public(address)) == (relay, public)


# -- conclusions -------------------------------------------------------------------------------------------


def answer(host: str = "44.9.9.9", port: int = 5000, *, reached: bool = False, **more: object) -> Reached:
    return Reached(host=host, port=port, reached=reached, **more)


def concluded(answers: Sequence[Reached], refusals: Sequence[str] = (), **more: object) -> Reachability:
    return conclude(answers, refusals, JOIN, **({"port": 31337, "asked_from": 5000} | more))


def test_one_that_got_through_is_enough_and_no_peer_to_ask_is_unknown() -> None:
    found = concluded([answer(why="closed"), answer(reached=True)])
    assert (found.kind, found.host, found.port) == ("open", "44.9.9.9", 31337)
    found = concluded([answer(why="no connection")])
    assert (found.kind, found.why, found.relays) == ("closed", "no connection", JOIN)
    assert concluded([], ["too busy"]) == Reachability(
        kind="unknown", port=31337, relays=JOIN, why="too busy"
    )
    assert conclude([], [], [], port=1, asked_from=2).why == "there is no peer to ask"


def test_one_liar_among_several_has_no_strangers_address_announced() -> None:
    liar = answer("44.6.6.6", reached=True)
    found = concluded([liar, answer(why="closed"), answer(reached=True)])
    assert (found.kind, found.host) == ("open", "44.9.9.9")
    found = concluded([liar, answer(why="closed"), answer(why="closed")])
    assert (found.kind, found.host, found.why) == ("closed", "44.9.9.9", "closed")
    found = concluded([liar, answer(reached=True)])
    assert (found.kind, found.why) == ("closed", "it is seen at 44.6.6.6 and at 44.9.9.9, by as many")


def test_a_neighbour_in_the_local_network_does_not_speak_for_the_world() -> None:
    neighbour = answer("192.168.1.7", reached=True)
    assert concluded([neighbour, answer()]).kind == "closed"
    assert concluded([neighbour]).kind == "open"


@pytest.mark.parametrize(
    ("ports", "punchable"), [([5000], True), ([6000], None), ([6000, 6000], True), ([5000, 6000], False)]
)
def test_a_router_that_shows_all_the_same_port_can_be_knocked_at(
    ports: list[int], punchable: bool | None
) -> None:
    found = concluded([answer(port=port) for port in ports])
    assert found.punchable is punchable
    assert found.keeps_ports is (set(ports) == {5000}), "others see the port that is sent from"
    words = {True: "directly where a hole", None: "perhaps directly", False: "through a relay only"}
    assert words[punchable] in in_words(found)
    assert "forward TCP port 31337 of your router to this machine and give --announce 44.9.9.9:31337" in (
        in_words(found)
    )


def test_relays_are_those_to_join_at_and_those_told_of_if_p2pd_can_read_them() -> None:
    told = tuple(f"/ip4/44.0.0.{i}/tcp/1/p2p/{A}" for i in range(9))
    home = f"/ip4/192.168.1.2/tcp/1/p2p/{A}"
    found = conclude(
        [answer(relays=("rubbish", home, *told))], [], (f"{RELAY}/p2p-circuit/p2p/{B}",), port=1, asked_from=2
    )
    assert found.relays == (RELAY, *told)


def test_who_tells_of_many_relays_does_not_crowd_out_those_that_others_tell_of() -> None:
    many = tuple(f"/ip4/44.6.6.{i}/tcp/1/p2p/{A}" for i in range(8))
    found = concluded([answer(relays=many), answer(relays=(f"/ip4/44.0.0.1/tcp/1/p2p/{B}",))])
    assert found.relays == (*JOIN, many[0], f"/ip4/44.0.0.1/tcp/1/p2p/{B}", *many[1:])


# -- dialling back -----------------------------------------------------------------------------------------


class Dials:
    """What a `DialBack` uses of p2pd's control: the asker is named after its host, and no peer answers."""

    def __init__(self) -> None:
        self.under_way: list[str] = []
        self.answer = asyncio.Event()

    async def connections(self, *of: str) -> dict[str, list[str]]:
        hosts = ("44.6.6.6", "44.1.1.1", "44.2.2.2", "172.17.0.1", "127.0.0.1", "10.0.0.1")
        return {f"peer at {host}": [f"/ip4/{host}/tcp/5"] for host in hosts}

    async def connect(self, peer: str, addresses: Sequence[str], timeout_s: float) -> None:
        self.under_way += addresses
        await self.answer.wait()
        self.under_way.remove(addresses[0])
        raise ControlError("no connection within 3 s")


def dial_back(
    dials: Dials, *own: str, most: int = 100, peer: str = B, port: int = 9
) -> Callable[[str], Awaitable[Answer]]:
    """Asks from a host."""
    server = DialBack(dials, list, lambda: False, lambda: own)  # type: ignore[arg-type,return-value]
    server.most_per_host = most
    header = pack(AskReach(peer=peer, port=port))
    return lambda host: server.serve(SimpleNamespace(header=header, peer=f"peer at {host}"))  # type: ignore[arg-type]


async def test_one_host_takes_one_place_of_those_that_dial_back() -> None:
    dials = Dials()
    ask = dial_back(dials)
    asked = [asyncio.ensure_future(ask(host)) for host in ("44.6.6.6",) * 20 + ("44.1.1.1", "44.2.2.2")]
    for _ in range(20):
        await asyncio.sleep(0)
    assert dials.under_way == [f"/ip4/{host}/tcp/9" for host in ("44.6.6.6", "44.1.1.1", "44.2.2.2")]
    dials.answer.set()
    answers = [unpack((await answered).header, Reached) for answered in asked]
    assert {found.why for found in answers} == {"no connection within 3 s"} and not dials.under_way


async def test_a_question_that_cannot_be_and_one_too_many_are_refused() -> None:
    dials = Dials()
    dials.answer.set()
    for peer, port in (("x" * 300, 4001), (B, -1), (B, 70000)):
        with pytest.raises(Refused, match="cannot be dialled"):
            await dial_back(dials, peer=peer, port=port)("44.1.1.1")
    ask = dial_back(dials, most=2)
    for host in ("44.1.1.1", "44.1.1.1", "44.2.2.2"):
        await ask(host)
    with pytest.raises(Busy, match=r"^2 questions came from peer at 44\.1\.1\.1 within a minute$"):
        await ask("44.1.1.1")


async def test_a_peer_of_the_internet_dials_back_into_no_local_network() -> None:
    dials = Dials()
    dials.answer.set()
    for host in ("172.17.0.1", "127.0.0.1", "10.0.0.1"):
        with pytest.raises(Refused, match=f"^I see you at {host}, which is no address of the internet"):
            await dial_back(dials, f"/ip4/10.0.0.9/tcp/1/p2p/{A}", RELAY)(host)
        await dial_back(dials, f"/ip4/10.0.0.9/tcp/1/p2p/{A}")(host)
    await dial_back(dials, RELAY)("44.1.1.1")


# -- trials ------------------------------------------------------------------------------------------------


async def test_a_relay_that_cannot_be_tried_ends_no_trial_of_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def trial(options: DaemonOptions, relays: Sequence[str], reserve_s: float) -> bool:
        if relays == [RELAY]:
            raise OSError(24, "Too many open files")
        for _ in range(5):
            await asyncio.sleep(0)
        return relays == ["takes us"]

    monkeypatch.setattr(nat, "some_relay_takes_us", trial)
    assert await those_that_take_us(DaemonOptions(), [RELAY, "takes us", "does not"], 1.0) == ("takes us",)
    assert f"whether {RELAY} relays for us could not be tried: OSError(24, " in caplog.text


async def test_trials_of_relays_that_are_cancelled_leave_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way: list[str] = []

    async def trial(options: DaemonOptions, relays: Sequence[str], reserve_s: float) -> bool:
        under_way.extend(relays)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            under_way.remove(relays[0])
        return True

    monkeypatch.setattr(nat, "some_relay_takes_us", trial)
    trying = asyncio.ensure_future(those_that_take_us(DaemonOptions(), ["one", "other"], 1.0))
    while len(under_way) < 2:
        await asyncio.sleep(0)
    trying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await trying
    assert not under_way


# -- what strangers say ------------------------------------------------------------------------------------


async def asked(relay: Relay, *said: Reached | Refused) -> list[Reached | str]:
    """What is made of the words of a peer that is asked; without any, it knows no such question."""
    asker, stranger, left = await relay.add(), await relay.add(), list(said)

    async def talk(request: Request) -> Answer:
        words = left.pop(0)
        if isinstance(words, Refused):
            raise words
        return Answer(pack(words))

    if said:
        stranger.serve("reach", talk)
    return [await _ask(asker, stranger.peer_id, b"") for _ in said or [None]]


async def test_a_peer_that_knows_no_such_question_tells_nothing(relay: Relay) -> None:
    (why,) = await asked(relay)
    assert isinstance(why, str) and "no such method: 'reach'" in why
    found = concluded([], [why])
    assert found.kind == "unknown" and "no such method: 'reach'" in found.why
    assert in_words(found).startswith("not known whether others can dial this machine: ")


async def test_what_p2pd_could_not_read_is_announced_on_no_peers_word(relay: Relay) -> None:
    (why,) = await asked(relay, answer("2600::1%a,b\x1b[2J", reached=True))
    assert isinstance(why, str) and why.endswith(" saw us at no address")


async def test_words_of_a_stranger_are_cut_and_steer_no_terminal(relay: Relay) -> None:
    long, refusal = await asked(relay, answer(why="\x1b[2J" + "x" * 999), Refused("\x1b[2Jgo away"))
    assert isinstance(long, Reached) and long.why == "?[2J" + "x" * 295 + "…"
    assert refusal == "?[2Jgo away"


# -- with p2pd ---------------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def public() -> AsyncIterator[Node]:
    async with Node(options=DaemonOptions(reachable=True, be_relay=True)) as node:
        yield node


async def ask(asker: Node, node: Node, peer: str, port: int) -> Reached:
    """As a stranger would."""
    got = await asker.transport.call(node.peer_id, "reach", pack(AskReach(peer=peer, port=port)))
    return unpack(got.header, Reached)


def port_of(node: Node) -> int:
    return int(node.addresses[0].split("/")[4])


@pytest.mark.net
async def test_a_dial_back_goes_to_the_peer_that_is_meant_on_the_host_that_asks(public: Node) -> None:
    async with Node() as neighbour, Node(join=public.addresses) as asker:
        told = await ask(asker, public, B, port_of(neighbour))  # another peer behind the same address
        assert not told.reached and told.host == "127.0.0.1"
        assert (await ask(asker, public, neighbour.peer_id, port_of(neighbour))).reached
        with pytest.raises(Refused, match="that peer is connected to me already: ask for one that is not"):
            await ask(asker, public, asker.peer_id, port_of(asker))
        port = port_of(neighbour)
        await neighbour.close()
        told = await ask(asker, public, B, port)
        assert not told.reached and told.why == f"127.0.0.1:{port}: Connection refused"
        await check_vouching(asker, public)


async def check_vouching(asker: Node, public: Node) -> None:
    """An address that lives vouches for no other of its peer."""
    dead = f"/ip4/127.0.0.1/tcp/1/p2p/{public.peer_id}"
    for told in ([dead, *public.addresses], [*public.addresses, dead], [*public.addresses] * 2):
        assert await relaying(asker.transport, asker.control, told) == public.addresses
    assert await relaying(asker.transport, asker.control, [dead]) == ()  # although it is connected


@pytest.mark.net
async def test_what_is_settled_before_p2pd_is_started(public: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    local, anywhere = DaemonOptions(), DaemonOptions(host="0.0.0.0", be_relay=True)
    assert await settled(local, public.addresses, "auto") == (local, "")
    for options, join, wish in (
        (anywhere, public.addresses, "public"),
        (anywhere, (), "auto"),
        (DaemonOptions(host="0.0.0.0", announce=("44.1.2.3:5",)), public.addresses, "auto"),
    ):
        chosen, words = await settled(options, join, wish)
        assert chosen.reachable is True and not words
    chosen, words = await settled(anywhere, public.addresses, "auto")
    daemon = Daemon.spawn(DaemonOptions(port=chosen.port))  # which is free again
    await daemon.ready()
    daemon.close_now()
    assert chosen.announce == (f"127.0.0.1:{chosen.port}",) and chosen.port and chosen.reachable
    assert words == f"others can dial this machine at 127.0.0.1:{chosen.port}"
    found = await find_reach(DaemonOptions(), public.addresses)
    assert (found.kind, found.host, found.relays) == ("open", "127.0.0.1", public.addresses)
    assert found.punchable  # the question left from the port where its p2pd listens
    chosen, words = await settled(anywhere, public.addresses, "relay")
    assert chosen.reachable is False and chosen.relays == public.addresses and not chosen.be_relay

    async def closed(options: DaemonOptions, join: Sequence[str], *, hidden: bool) -> Reachability:
        return Reachability(kind="closed", host="44.1.2.3", port=7, why="no connection within 3 s")

    monkeypatch.setattr(nat, "find_reach", closed)
    with pytest.raises(SetupError) as refused:
        await settled(anywhere, public.addresses, "auto")
    assert refused.value.text == (
        "nobody can dial this machine (no connection within 3 s), and no peer is known that could relay for "
        "it: forward TCP port 7 of your router to this machine and give --announce 44.1.2.3:7, or join at "
        "the address of one that can be dialled"
    )
    chosen, _ = await settled(anywhere, public.addresses, "auto", needed=False)
    assert chosen.reachable is False and not chosen.relays

    left = [
        Reachability(kind="unknown", port=7, why="no answer within 10 s"),
        await closed(anywhere, (), hidden=False),
    ]

    async def busy(options: DaemonOptions, join: Sequence[str], *, hidden: bool) -> Reachability:
        return left.pop(0)

    monkeypatch.setattr(nat, "find_reach", busy)
    chosen, words = await settled(anywhere, public.addresses, "auto", needed=False)
    assert chosen.reachable is False and words.startswith("nobody can dial this machine")

    async def down(options: DaemonOptions, join: Sequence[str], *, hidden: bool) -> Reachability:
        return Reachability(kind="unknown", port=7, why="connection refused")

    monkeypatch.setattr(nat, "find_reach", down)
    with pytest.raises(Unreachable, match=r"dial this machine \(connection refused\), and no peer is known"):
        await settled(anywhere, public.addresses, "relay")  # a fleet starts this peer again


@pytest.mark.net
async def test_where_no_peer_relays_a_hidden_peer_says_so(public: Node) -> None:
    timings = NetTimings(relay_s=0.5, reserve_s=0.5)
    options = DaemonOptions(host="0.0.0.0", reachable=False, relays=public.addresses)
    with pytest.raises(SetupError) as refused:
        async with Node(options=options, join=public.addresses, timings=timings):
            pass
    assert refused.value.text.startswith(
        f"nobody can dial this machine, and none of these peers relays for it: {public.addresses[0]}. "
        "Forward its port and say so with --announce"
    )
