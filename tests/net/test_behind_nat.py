"""Peers at home in a lab with userspace NATs: real p2pds, each in its own network."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import pytest

from peers.net.nat import settled
from peers.net.node import Node
from peers.net.p2pd import DaemonOptions
from peers.net.timings import DEFAULT_TIMINGS, NetTimings
from peers.ports import Answer, Request
from scripts.bench.common.netlab import Lab, Link, Nat, why_not
from swarm.errors import PeerFault, SetupError
from swarm.records import PeerRecord
from tests.net.relay import direct_links

pytestmark = [
    pytest.mark.net,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=f"a network lab {why_not()}"),
]

T = TypeVar("T")
RUN = "f" * 32
LIMIT_S = 60.0
"""For anything to happen."""


class Hosts:
    """An event loop in each host of a lab: what runs there dials from there."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self._loops: dict[str, asyncio.AbstractEventLoop] = {}
        self._threads: list[threading.Thread] = []
        self._nodes: list[tuple[str, Node]] = []
        for host in lab.hosts:
            loop = self._loops[host] = asyncio.new_event_loop()
            thread = threading.Thread(target=self._live, args=(host, loop), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _live(self, host: str, loop: asyncio.AbstractEventLoop) -> None:
        with self.lab.inside(host):
            loop.run_forever()
        loop.close()

    def at(self, host: str, what: Coroutine[Any, Any, T]) -> T:
        """Run it there."""
        return asyncio.run_coroutine_threadsafe(what, self._loops[host]).result(LIMIT_S)

    def server(self, host: str, *join: Node, **options: Any) -> Node:
        """A public peer that relays."""
        ip = self.lab.ip(host)
        return self.node(host, DaemonOptions(host=ip, reachable=True, **({"be_relay": True} | options)), join)

    def options(self, host: str, *join: Node) -> DaemonOptions:
        """What a peer finds out of how it can be reached."""
        addresses = [node.addresses[0] for node in join]
        return self.at(host, settled(DaemonOptions(host=self.lab.inner_ip(host)), addresses, "auto"))[0]

    def home(self, host: str, *join: Node, timings: NetTimings = DEFAULT_TIMINGS) -> Node:
        """A peer that finds out how it can be reached; it answers `echo`."""
        node = self.node(host, self.options(host, *join), join, timings)
        node.transport.serve("echo", echo)
        return node

    def node(
        self, host: str, options: DaemonOptions, join: Sequence[Node], timings: NetTimings = DEFAULT_TIMINGS
    ) -> Node:
        async def enter() -> Node:
            addresses = [node.addresses[0] for node in join]
            return await Node(options=options, run_id=RUN, join=addresses, timings=timings).__aenter__()

        node = self.at(host, enter())
        self._nodes.append((host, node))
        return node

    def close(self) -> None:
        """End everything, also when a node's end fails; what hangs is left to the end of the process."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._stop)
            for host, node in self._nodes:  # the last one ends first
                stack.callback(lambda host=host, node=node: self.at(host, node.close()))

    def _stop(self) -> None:
        for loop in self._loops.values():
            loop.call_soon_threadsafe(loop.stop)
        for thread in self._threads:
            thread.join(LIMIT_S)


@contextlib.contextmanager
def a_lab(servers: int, homes: int) -> Iterator[Hosts]:
    names = [f"home {i}" for i in range(homes)]
    nats = {name: Nat() for name in names}
    with Lab([f"server {i}" for i in range(servers)] + names, nats=nats, link=Link(delay_s=0.01)) as lab:
        hosts = Hosts(lab)
        try:
            yield hosts
        finally:
            hosts.close()


class Ends:
    """A lab of two hosts, and a node in it."""

    hosts = ("one", "other")

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.ended = error, False

    def inside(self, host: str) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    async def close(self) -> None:
        self.ended = True
        if self.error is not None:
            raise self.error


def test_a_node_whose_end_fails_keeps_no_other_and_no_thread_alive() -> None:
    hosts, nodes = Hosts(Ends()), [Ends(), Ends(OSError("p2pd is stuck"))]  # type: ignore[arg-type]
    hosts._nodes = list(zip(Ends.hosts, nodes, strict=True))  # type: ignore[assignment]
    with pytest.raises(OSError, match="p2pd is stuck"):
        hosts.close()
    assert all(node.ended for node in nodes)
    assert not any(thread.is_alive() for thread in hosts._threads)
    assert all(thread.daemon for thread in hosts._threads)


async def echo(request: Request) -> Answer:
    return Answer(request.header)


async def take(request: Request) -> Answer:
    await request.accept()
    return Answer(b"")


async def until(condition: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    async def wait() -> None:
        while not await condition():
            await asyncio.sleep(0.1)

    await asyncio.wait_for(wait(), LIMIT_S)


def test_a_hole_is_punched_although_p2pd_met_the_others_before_it_could() -> None:
    """One of four relays is far: until it answers, no observed address is believed, nor any hole punched."""
    with a_lab(servers=4, homes=2) as hosts:
        servers = [hosts.server("server 0")]
        servers += [hosts.server(f"server {i}", servers[0]) for i in (1, 2, 3)]
        callee = hosts.home("home 0", *servers)
        hosts.lab.set_link("home 1", "server 3", Link(delay_s=0.25))
        caller = hosts.home("home 1", *servers)
        assert len(caller.daemon.options.relays) == 4

        async def call() -> None:
            caller.transport.addresses.learn(callee.peer_id, callee.addresses)
            await caller.transport.call(callee.peer_id, "echo", b"")
            await until(lambda: caller.control.is_direct(callee.peer_id))

        hosts.at("home 1", call())


def test_a_pair_for_which_libp2p_punches_no_hole_knocks_at_both_routers_at_once() -> None:
    """One public peer: libp2p needs four that observe, so the pair would stay on the relay for good."""
    with a_lab(servers=1, homes=2) as hosts:
        server = hosts.server("server 0")
        callee, caller = hosts.home("home 0", server), hosts.home("home 1", server)
        assert callee.daemon.options.outside == hosts.lab.ip("home 0")
        callee.transport.serve("take", take, max_body_bytes=1 << 20)

        async def call() -> None:
            caller.transport.addresses.learn(callee.peer_id, callee.addresses)
            await caller.transport.call(callee.peer_id, "take", b"", [bytes(300_000)])
            assert direct_links(caller.transport) == (1, 0)
            assert not await caller.control.is_direct(callee.peer_id)

        hosts.at("home 1", call())


def test_a_peer_that_loses_its_relay_takes_another_and_is_called_again() -> None:
    timings = NetTimings(probe_every_s=0.2, relayless_s=1.0)
    with a_lab(servers=2, homes=2) as hosts:
        first = hosts.server("server 0")
        other = hosts.server("server 1", first)
        callee = hosts.home("home 0", first, timings=timings)
        asker = hosts.home("home 1", first, other, timings=timings)
        assert callee.addresses and all(first.peer_id in address for address in callee.addresses)

        async def meet() -> None:
            callee.directory.watch([0])
            await callee.directory.announce(record(callee))

        async def call() -> bool:
            with contextlib.suppress(PeerFault):
                asker.transport.addresses.learn(callee.peer_id, callee.addresses)
                answer = await asker.transport.call(callee.peer_id, "echo", b"hello", deadline_s=5.0)
                return answer.header == b"hello"
            return False

        async def relayed_by(relay: Node) -> bool:
            return bool(callee.addresses) and all(relay.peer_id in address for address in callee.addresses)

        hosts.at("home 0", meet())
        hosts.at("server 1", announced(other))
        hosts.at("home 1", until(call))
        hosts.at("home 0", until(lambda: met(callee, other)))
        hosts.at("server 0", first.close())
        hosts.at("home 0", until(lambda: relayed_by(other)))
        hosts.at("home 1", until(call))


def test_a_relay_takes_no_more_guests_than_it_has_places_for() -> None:
    with a_lab(servers=1, homes=2) as hosts:
        relay = hosts.server("server 0", relay_guests=1)
        guest = hosts.home("home 0", relay)
        assert guest.addresses and all(relay.peer_id in address for address in guest.addresses), (
            guest.addresses
        )
        with pytest.raises(SetupError) as refused:
            other = hosts.home("home 1", relay, timings=NetTimings(relay_s=2.0, reserve_s=2.0))
            pytest.fail(f"{other.addresses} besides {guest.addresses}")
        assert refused.value.text.startswith("nobody can dial this machine, and none of these peers relays")


def test_a_relay_that_lets_no_peer_in_keeps_none_from_the_others() -> None:
    """It says that it relays, and then is dead to p2pd, which takes a place nowhere for three minutes."""
    with a_lab(servers=2, homes=1) as hosts:
        honest, liar = hosts.server("server 0"), hosts.server("server 1")
        options = hosts.options("home 0", honest, liar)
        assert len(options.relays) == 2
        hosts.lab.cut("home 0", "server 1")
        home = hosts.node("home 0", options, [honest], NetTimings(relay_s=4.0, reserve_s=4.0))
        assert home.addresses and all(honest.peer_id in address for address in home.addresses)
        assert home.daemon.options.relays == honest.addresses


async def met(node: Node, other: Node) -> bool:
    return any(other.peer_id in address for address in node.directory.storage.met_addresses())


async def announced(node: Node) -> None:
    await node.directory.announce(record(node))


def record(node: Node) -> PeerRecord:
    return PeerRecord(
        peer=node.peer_id, run=RUN, stage=0, state="serving", version=0, addresses=node.addresses
    )
