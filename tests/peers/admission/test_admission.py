"""Who may call and who is called, at the transport: before any handler, and on streams that are open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from peers.net.charter import signed
from peers.net.identity import Identity
from peers.net.node import Node
from peers.net.p2pd import DaemonOptions
from peers.net.transport import NetTransport
from peers.ports import Answer, Request
from swarm import charter as rules
from swarm.charter import AdmissionRule, AdmissionTerms, Ban
from swarm.errors import NotAdmitted, PeerGone, Refused
from tests.net.relay import Relay, open_links

RUN, OWNER = "ab" * 16, Identity(b"o" * 32)


@pytest_asyncio.fixture
async def relay(tmp_path: Path) -> AsyncIterator[Relay]:
    relay = Relay(tmp_path)
    yield relay
    await relay.close()


class Guarded:
    """A transport and its doorkeeper."""

    def __init__(self, transport: NetTransport) -> None:
        self.transport, self.door = transport, transport.door
        self.handled: list[str] = []
        for method in ("part", "status", "work"):
            transport.serve(method, self._handle, max_body_bytes=100)

    async def _handle(self, request: Request) -> Answer:
        self.handled.append(request.peer)
        return Answer(b"done")

    @property
    def peer(self) -> str:
        return self.transport.peer_id

    async def call(self, other: Guarded, method: str = "part") -> bytes:
        return bytes((await self.transport.call(other.peer, method, b"")).header)


def terms(**changes: Any) -> AdmissionTerms:
    fields = {"name": "demo", "run": RUN, "sequence": 1, "expires": int(2e9)}
    return AdmissionTerms(rules.make(**(fields | changes)), OWNER.peer_id, stages=2)


@pytest.fixture(autouse=True)
def _before_it_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peers.net.charter.doorkeeper.unix_s", lambda: 2e9 - 1000)


@pytest_asyncio.fixture
async def pair(relay: Relay) -> tuple[Guarded, Guarded]:
    """(caller, callee)"""
    return Guarded(await relay.add()), Guarded(await relay.add())


async def test_a_banned_caller_reaches_no_handler(pair: tuple[Guarded, Guarded]) -> None:
    caller, callee = pair
    assert await caller.call(callee) == b"done"
    callee.door.set(terms(bans=(Ban(caller.peer, "x"),)))
    for _ in range(2):
        with pytest.raises(PeerGone):
            await caller.call(callee, "status")
    assert callee.handled == [caller.peer]


async def test_a_ban_closes_streams_that_are_open(relay: Relay, pair: tuple[Guarded, Guarded]) -> None:
    caller, callee = pair
    asked, gate = asyncio.Event(), asyncio.Event()

    async def wait(request: Request) -> Answer:
        asked.set()
        await gate.wait()
        return Answer(b"")

    callee.transport.serve("status", wait)
    waiting = asyncio.ensure_future(caller.call(callee, "status"))
    await asked.wait()
    callee.door.set(terms(bans=(Ban(caller.peer, "x"),)))
    with pytest.raises(PeerGone, match="broke"):
        await waiting
    assert open_links(callee.transport) == (0, 0)
    gate.set()
    while (callee.peer, caller.peer) not in relay.disconnects:
        await asyncio.sleep(0)


async def test_a_banned_callee_is_not_called(relay: Relay, pair: tuple[Guarded, Guarded]) -> None:
    caller, callee = pair
    caller.door.set(terms(bans=(Ban(callee.peer, "wrong gradients"),)))
    with pytest.raises(PeerGone, match="not admitted: the owner of the run banned it: wrong gradients"):
        await caller.call(callee, "status")
    assert relay.dials == []


async def test_who_is_not_admitted_may_read_and_nothing_else(pair: tuple[Guarded, Guarded]) -> None:
    caller, callee = pair
    callee.door.set(terms(peers=AdmissionRule("list")))
    assert await caller.call(callee, "status") == b"done"
    for method, text in (
        ("part", "not admitted as a peer: "),
        ("work", "not admitted as a peer: .*; as a tr"),
    ):
        with pytest.raises(NotAdmitted, match=text):
            await caller.call(callee, method)
    assert callee.handled == [caller.peer]


async def test_a_peer_that_is_not_admitted_is_not_called_for_work(
    relay: Relay, pair: tuple[Guarded, Guarded]
) -> None:
    caller, callee = pair
    caller.door.set(terms(peers=AdmissionRule("list", (caller.peer,))))
    with pytest.raises(PeerGone, match="not admitted as a peer: the run's charter names its peers"):
        await caller.call(callee, "work")
    assert relay.dials == []


async def test_a_caller_shows_its_token_before_its_first_call(relay: Relay) -> None:
    """So a trainer, which has no record, is admitted too; also by a callee that did not know of it."""
    caller, callee = Guarded(await relay.add()), Guarded(await relay.add())
    closed = terms(peers=AdmissionRule("token"), trainers=AdmissionRule("token"))
    callee.door.set(closed)
    callee.door.stage = 0
    with pytest.raises(Refused, match="not admitted as a trainer: the run admits trainers that were invited"):
        await caller.call(callee, "work")
    token = signed.make_token(RUN, OWNER, "trainer", expires=int(2e9))
    certificate = signed.certify(token, RUN, caller.peer)[1]
    other = Guarded(await relay.add())
    other.door.set(closed)
    other.door.stage = 0
    caller.door.credential = signed.seal_credential(certificate)
    assert await caller.call(other, "work") == b"done"
    with pytest.raises(Refused, match="its token is for a trainer"):
        await caller.call(other, "part")


class NoDaemon:
    """Stands for p2pd and what it is asked, and for the directory."""

    def __init__(self, folder: Path) -> None:
        self.identity, self.options = Identity.generate(), DaemonOptions(direct=False)
        self.control_path, self.streams_path = folder / "control", folder / "streams"
        self.peer_id = self.identity.peer_id

    async def ready(self) -> None: ...

    async def identify(self) -> tuple[str, tuple[str, ...]]:
        return self.peer_id, ("/ip4/127.0.0.1/tcp/4001",)

    async def serve_streams(self, protocol: str) -> None: ...

    async def attach(self) -> None: ...

    async def detach(self) -> None: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def disconnect(self, peer: str) -> None: ...

    def expect_end(self) -> None: ...

    def close_now(self) -> None: ...


async def test_the_transport_of_a_node_asks_its_doorkeeper_who_may_call_and_who_was_invited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon: Any = NoDaemon(tmp_path)
    monkeypatch.setattr("peers.net.node.DaemonControl", lambda *_: daemon)
    monkeypatch.setattr("peers.net.node.NetDirectory", lambda *_, **__: daemon)
    node, friend, stranger = Node(daemon=daemon, run_id=RUN), *(Identity.generate().peer_id for _ in "ab")
    async with node:
        assert not node.transport.invited(friend) and not node.transport.refusal(stranger, "part", True)
        node.door.set(terms(peers=AdmissionRule("list", (friend,))))
        assert node.transport.invited(friend) and not node.transport.invited(stranger)
        assert "not admitted" in node.transport.refusal(stranger, "part", True)


async def test_a_callee_that_knows_no_credentials_is_called_all_the_same(relay: Relay) -> None:
    caller, callee = await relay.add(), await relay.add()

    async def answer(request: Request) -> Answer:
        return Answer(b"done")

    callee.serve("part", answer)
    caller.door.credential = b"x" * 1000
    assert (await caller.call(callee.peer_id, "part", b"")).header == b"done"
