"""Can others dial this machine? A peer of the run tries, and says.

    asker ──AskReach──▶ peer of the run          the asker is a p2pd with an identity of its own
      ▲                    │ dials back, to the host that the question came from and to no other
      └─────answer─────────┤
    target ◀───────────────┘                     a second one, on the port that is to be reached

Two p2pds, because one that is connected is not dialled again. Whether libp2p could punch a hole is told by
the ports at which several peers see the asker: a router that keeps them can be knocked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress, zip_longest
from typing import Literal
from weakref import WeakValueDictionary

import msgspec

from peers.net.identity import (
    CIRCUIT,
    Endpoint,
    IpAddress,
    by_peer,
    endpoint_of,
    is_loopback,
    is_public,
    is_relay,
    plain_ip,
    public_key_of,
    tcp_endpoints,
    to_multiaddr,
)
from peers.net.p2pd import MAX_RELAYS, Daemon, DaemonOptions
from peers.net.p2pd_control import ControlError, DaemonControl
from peers.net.timings import DEFAULT_TIMINGS
from peers.net.transport import NetTransport
from peers.options import Reach
from peers.ports import Answer, Request
from peers.system import everywhere
from peers.waiting import within
from swarm.errors import Busy, Refused, SetupError, SwarmError, Unreachable, clean, short
from swarm.ids import PeerId
from swarm.wire.messages import pack, unpack, unpack_answer

logger = logging.getLogger(__name__)

METHOD = "reach"
DIAL_BACK_S = 3.0
"""A round trip around the world takes 0.3 s, and a handshake three of them."""
ASK_S = 10.0
MAX_ASKED = 4
"""Peers that are asked. One would do; several tell more of the router."""
MAX_AT_ONCE = 4
MAX_TOLD = 8
"""Possible relays."""
WHY_CHARS = 300
"""Of what a stranger says that is shown."""
MAX_PER_HOST = 100
"""Questions of one peer, or host, that are answered in a minute: a machine with 8 devices starts 8 peers."""


class AskReach(msgspec.Struct, frozen=True, kw_only=True):
    """Dial `peer` at `port` of the host that this comes from; no peer if the port is 0."""

    peer: PeerId
    port: int


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    """That the question came from, as an IP address."""
    port: int
    """Likewise."""
    reached: bool
    why: str = ""
    """Not."""
    relays: tuple[str, ...] = ()
    """Multiaddrs of peers that others can dial, ending in `/p2p/<id>`."""
    relay: bool = False
    """The answering peer relays for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reachability:
    """What the peers that were asked say together."""

    kind: Literal["open", "closed", "unknown"]
    """Others can dial us; they cannot; none could tell."""
    host: str = ""
    """Where they see us."""
    port: int = 0
    """Where we listened."""
    punchable: bool | None = None
    """Whether our router shows the same port to all, so that libp2p can punch holes; None: not known."""
    keeps_ports: bool = False
    """It shows that from which we send."""
    relays: tuple[str, ...] = ()
    """Relays for us, unless we are open."""
    why: str = ""
    """Not open."""


class DialBack:
    """Answers `reach`. Cannot be made to dial any host but that of the asker's own connection."""

    def __init__(
        self, control: DaemonControl, relays: Callable[[], Iterable[str]], is_relay: Callable[[], bool],
        own: Callable[[], Iterable[str]],
    ) -> None:  # fmt: skip
        """`relays`: addresses of peers that may relay; `is_relay`: whether we do; `own`: our addresses."""
        self._control, self._relays, self._is_relay, self._own = control, relays, is_relay, own
        self.most_per_host = MAX_PER_HOST
        self._room = asyncio.Semaphore(MAX_AT_ONCE)
        self._at_host: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._asked: Counter[str] = Counter()
        self._minute = 0

    async def serve(self, request: Request) -> Answer:
        """A handler of the transport."""
        ask = unpack(request.header, AskReach)
        if public_key_of(ask.peer) is None or not 0 <= ask.port < 65536:
            raise Refused(f"peer {ask.peer[:80]!r} at port {ask.port} cannot be dialled")
        self._count(request.peer)  # p2pd tells of all its connections, 2 ms for 100 of them
        _, host, port = await self._seen_at(request.peer)
        self._count(line_of(host))
        why = await self._dial_back(ask, host) if ask.port else "no peer was to be dialled"
        # To look for these takes 20 ms, and a peer that asks only where it is seen asks again and again.
        relays = tuple(dict.fromkeys(filter(is_public, self._relays() if ask.port else ())))[:MAX_TOLD]
        found = Reached(host=host, port=port, reached=not why, why=why, relays=relays, relay=self._is_relay())
        return Answer(pack(found))

    async def _dial_back(self, ask: AskReach, host: str) -> str:
        """Why it cannot be reached; nothing if it can."""
        if not ipaddress.ip_address(host).is_global and any(map(is_public, self._own())):
            # A router or docker's proxy may stand there for the asker, and its ports are not to be probed.
            raise Refused(f"I see you at {host}, which is no address of the internet: that tells nothing")
        # One at a time for each host: ports that swallow packets take 3 s each, and would take all the room.
        alone = self._at_host.setdefault(line_of(host), asyncio.Lock())
        async with alone, self._room:
            if ask.peer in await self._control.connections(ask.peer):
                raise Refused("that peer is connected to me already: ask for one that is not")
            kind = "ip6" if ":" in host else "ip4"
            try:
                await self._control.connect(ask.peer, [f"/{kind}/{host}/tcp/{ask.port}"], DIAL_BACK_S)
            except ControlError as error:
                return error.text[:300] or "it cannot be dialled"
            return ""

    async def _seen_at(self, peer: PeerId) -> Endpoint:
        try:
            ends = (await self._control.connections(peer))[peer]
            endpoints = list(filter(None, map(endpoint_of, ends)))
        except ControlError as error:
            raise Busy(f"p2pd does not answer: {error.text}") from None
        if not endpoints:
            raise Refused("you come through a relay: ask a peer that you are connected to directly")
        return endpoints[0]

    def _count(self, asker: str) -> None:
        minute = int(time.monotonic() // 60)
        if minute != self._minute:
            self._minute = minute
            self._asked.clear()
        self._asked[asker] += 1
        if self._asked[asker] > self.most_per_host:
            raise Busy(f"{self.most_per_host} questions came from {asker} within a minute")


def line_of(host: str) -> str:
    """What counts as one host, by its IP address: of IPv6 all of a /64, which costs no more than one."""
    ip = ipaddress.ip_address(host)
    return host if ip.version == 4 or ip.ipv4_mapped else str(ipaddress.ip_network((ip, 64), strict=False))


async def find_reach(options: DaemonOptions, join: Sequence[str], *, hidden: bool = False) -> Reachability:
    """Ask peers that we want to join at to dial back to where we are going to listen. Takes 1 to 15 s.

    `hidden`: relays are needed even if we can be dialled.

    Raises:
        SetupError: p2pd cannot listen there, or an address to join at is none.
    """
    direct = dict([(peer, ends) for peer, ends in by_peer(join).items() if tcp_endpoints(ends)][:MAX_ASKED])
    async with contextlib.AsyncExitStack() as stack:
        asker = await _listening(stack, DaemonOptions(host=options.host))
        target = await _listening(stack, DaemonOptions(host=options.host, port=options.port))
        control = DaemonControl(asker.control_path)
        transport = NetTransport(control, asker.identity)
        stack.push_async_callback(transport.close)
        await transport.start()
        question = pack(AskReach(peer=target.peer_id, port=_port(target)))
        for peer, ends in direct.items():
            transport.addresses.learn(peer, ends)
        asked = await asyncio.gather(*(_ask(transport, peer, question) for peer in direct))
        answers = [answer for answer in asked if isinstance(answer, Reached)]
        refusals = [answer for answer in asked if isinstance(answer, str)]
        # Those that see us at an address of the kind that we listen on (IPv4 or IPv6), if any does.
        version = int(target.addresses[0][3])
        alike = [answer for answer in answers if ipaddress.ip_address(answer.host).version == version]
        found = conclude(alike or answers, refusals, join, port=_port(target), asked_from=_port(asker))
        if found.kind == "open" and not hidden:
            return found
        return replace(found, relays=await relaying(transport, control, found.relays))


async def seen_at(transport: NetTransport, join: Iterable[str], before: str) -> str:
    """Where most of some peers see us, of hosts like the one before; that one if they do not agree."""
    question = pack(AskReach(peer=transport.peer_id, port=0))
    peers = [peer for peer in by_peer(join) if peer != transport.peer_id][:MAX_ASKED]
    answers = await asyncio.gather(*(_ask(transport, peer, question) for peer in peers))
    hosts = [before, *(one.host for one in answers if isinstance(one, Reached))]
    kinds = [(ip.version, ip.is_global) for ip in map(ipaddress.ip_address, hosts)]
    seen = [host for host, kind in zip(hosts[1:], kinds[1:], strict=True) if kind == kinds[0]]
    return next((host for host in seen if 2 * seen.count(host) > len(seen)), before)


async def looked_up(options: DaemonOptions) -> tuple[str, ...]:
    """What is to be announced now that names may lead elsewhere; as before if none can be asked."""
    names = partial(tuple[str, ...], map(to_multiaddr, options.named, options.announce))
    with contextlib.suppress(SetupError, asyncio.TimeoutError):
        return await within(asyncio.to_thread(names), ASK_S)
    return options.announce


async def relaying(
    transport: NetTransport, control: DaemonControl, addresses: Iterable[str]
) -> tuple[str, ...]:
    """Where peers answer now that they relay for others: one address of each, at most `MAX_RELAYS`.

    Of a peer's addresses that one, which leads to it: p2pd is to be told of none that is dead.
    """
    question = pack(AskReach(peer=transport.peer_id, port=0))
    places = by_peer(filter(is_relay, addresses))

    async def ask(peer: PeerId) -> str:
        transport.addresses.learn(peer, places[peer])
        answer = await _ask(transport, peer, question)
        if not isinstance(answer, Reached) or not answer.relay:
            return ""
        try:
            ends = set(map(_dialled, (await control.connections(peer))[peer]))
        except ControlError:
            return ""
        return next((f"{at}/p2p/{peer}" for at in places[peer] if _dialled(at) in ends), "")

    return tuple(filter(None, await asyncio.gather(*map(ask, places))))[:MAX_RELAYS]


def _dialled(address: str) -> tuple[IpAddress | None, int] | None:
    """The IP address, however it is written, and the port."""
    endpoint = endpoint_of(address)
    return (endpoint.ip, endpoint.port) if endpoint is not None else None


async def _listening(stack: contextlib.AsyncExitStack, options: DaemonOptions) -> Daemon:
    daemon = Daemon.spawn(options)
    stack.callback(daemon.close_now)
    await daemon.ready()
    return daemon


def _port(daemon: Daemon) -> int:
    return tcp_endpoints(daemon.addresses)[0].port


async def _ask(transport: NetTransport, peer: PeerId, question: bytes) -> Reached | str:
    """The answer, or why there is none."""
    try:
        answer = await transport.call(peer, METHOD, question, deadline_s=ASK_S)
        found = unpack_answer(peer, answer.header, Reached)
        host = str(plain_ip(found.host))
    except SwarmError as error:
        return clean(error.text, WHY_CHARS)
    except ValueError:
        return f"peer {short(peer)} saw us at no address"
    return msgspec.structs.replace(
        found, host=host, why=clean(found.why, WHY_CHARS), relays=found.relays[:MAX_TOLD]
    )


def conclude(
    answers: Sequence[Reached], refusals: Sequence[str], join: Sequence[str], *, port: int, asked_from: int
) -> Reachability:
    """What to believe. `join`: addresses to join at; `asked_from`: the port that the questions left from."""
    # In turns, so that none of them takes the places of what the others tell.
    told_of = [relay for turn in zip_longest(*(a.relays for a in answers)) for relay in turn if relay]
    named = filter(is_relay, (address.partition(CIRCUIT)[0] for address in join))
    relays = tuple(dict.fromkeys([*named, *filter(is_public, told_of)]))[: MAX_ASKED * MAX_TOLD]
    # An answer from our local network says nothing about the world, if there is any other.
    told = [a for a in answers if ipaddress.ip_address(a.host).is_global] or list(answers)
    if not told:
        why = "; ".join(refusals)[:500] or "there is no peer to ask"
        return Reachability(kind="unknown", port=port, relays=relays, why=why)
    # A single answer shows that a router keeps ports, or nothing.
    several = len(told) > 1
    punchable = len({a.port for a in told}) == 1 if several else told[0].port == asked_from or None
    # Newcomers dial what we announce: one liar among many is not to send them all to another host.
    keeps = {answer.port for answer in told} == {asked_from}
    hosts = Counter(answer.host for answer in told).most_common(2)
    host = hosts[0][0]
    if len(hosts) > 1 and hosts[0][1] == hosts[1][1]:
        why = f"it is seen at {host} and at {hosts[1][0]}, by as many"
    elif any(answer.reached for answer in told if answer.host == host):
        return Reachability(kind="open", host=host, port=port, punchable=punchable, relays=relays)
    else:
        why = next(answer.why for answer in told if answer.host == host)
    return Reachability(
        kind="closed", host=host, port=port, punchable=punchable, keeps_ports=keeps, relays=relays, why=why
    )


def listening_host(given: str, join: Sequence[str], announce: Sequence[str] = ()) -> str:
    """Where to listen if the user does not say: for other machines, unless all that are known are here."""
    if given or (not announce and all(map(is_loopback, join))):
        return given or "127.0.0.1"
    kinds = {one[1:].partition("/")[0] for one in (map(to_multiaddr, announce) if announce else join)}
    if kinds <= {"ip6", "dns6"}:  # no peer is to be sent where nothing listens
        return "::"
    return "0.0.0.0" if announce or kinds <= {"ip4", "dns4"} else everywhere()


async def settled(
    options: DaemonOptions, join: Sequence[str], reach: Reach, *, needed: bool = True
) -> tuple[DaemonOptions, str]:
    """How to start p2pd, from what the user says and what the peers to join at find; and words for the user.

    A peer that listens on this machine only, or has no peer to ask, is left as it is; but the first one, at
    which others join, is taken to be reachable. `needed`: others call us; a trainer only calls.

    Raises:
        SetupError: we cannot be dialled, it is needed, and no peer is known that could relay.
    """
    if is_loopback(options.host):
        return options, ""
    if reach == "public" or options.announce or not join:
        return replace(options, reachable=True), ""
    found = await find_reach(options, join, hidden=reach == "relay")
    if found.kind == "unknown":  # a peer that is busy for a moment must not have us announce a dead address
        found = await find_reach(options, join, hidden=reach == "relay")
    words = in_words(found)
    if reach == "auto" and found.kind == "unknown":
        return options, words
    if reach == "auto" and found.kind == "open":
        announce = (_host_port(found.host, found.port),)
        return replace(options, port=found.port, announce=announce, reachable=True, seen_at=found.host), words
    if not found.relays and needed:
        raise (Unreachable if found.kind == "unknown" else SetupError)(
            f"nobody can dial this machine ({found.why or 'as --reach relay says'}), and no peer is known "
            f"that could relay for it: {what_to_do(found)}, or join at the address of one that can be dialled"
        )
    return replace(  # no peer is told of the port
        options, port=found.port, any_port=not options.port, reachable=False, relays=found.relays,
        be_relay=False, outside=found.host if found.keeps_ports else "",
    ), words  # fmt: skip


async def some_relay_takes_us(
    options: DaemonOptions, relays: Sequence[str], reserve_s: float = DEFAULT_TIMINGS.reserve_s
) -> bool:
    """Whether one of the relays lets others reach us, tried with a p2pd of its own for so long."""
    async with contextlib.AsyncExitStack() as stack:
        daemon = await _listening(stack, replace(options, reachable=False, relays=tuple(relays)))
        control = DaemonControl(daemon.control_path)
        end = time.monotonic() + reserve_s
        while time.monotonic() < end:
            _, addresses = await control.identify()
            if any(CIRCUIT in address for address in addresses):
                return True
            await asyncio.sleep(0.1)
    return False


async def those_that_take_us(
    options: DaemonOptions, relays: Sequence[str], reserve_s: float
) -> tuple[str, ...]:
    """The relays that let others reach us, each tried alone: p2pd waits at all for one that does not.

    One that cannot be tried counts as one that does not. When this ends, all trials and their p2pds have.
    """
    alone = replace(options, port=0)
    trials = [some_relay_takes_us(alone, [relay], reserve_s) for relay in relays]
    took = await asyncio.gather(*trials, return_exceptions=True)
    for relay, outcome in zip(relays, took, strict=True):
        if isinstance(outcome, BaseException):
            logger.warning("whether %s relays for us could not be tried: %r", relay, outcome)
    return tuple(compress(relays, (outcome is True for outcome in took)))


def in_words(found: Reachability) -> str:
    """What a user should know, and can do."""
    if found.kind == "open":
        return f"others can dial this machine at {_host_port(found.host, found.port)}"
    if found.kind == "unknown":
        return f"not known whether others can dial this machine: {found.why}"
    how = {
        True: "through a relay, and directly where a hole can be punched into its router",
        False: "through a relay only: its router shows each of them another port",
        None: "through a relay, and perhaps directly where a hole can be punched into its router",
    }[found.punchable]
    return f"nobody can dial this machine; others reach it {how}. To be dialled, {what_to_do(found)}"


def what_to_do(found: Reachability) -> str:
    """Advice on how to become a peer that others can dial."""
    where = _host_port(found.host or "YOUR_ADDRESS", found.port)
    return f"forward TCP port {found.port} of your router to this machine and give --announce {where}"


def _host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
