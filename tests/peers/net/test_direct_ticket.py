"""What opens a direct connection, without a socket: a granted ticket, with the key, once and in time."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

import pytest

from peers.net.connection import ServerConnection
from peers.net.direct.handshake import Asking, GrantDirect, SharedSecret
from peers.net.direct.paths import HELLO_BYTES, OPENING, DirectOptions, DirectPaths
from peers.net.direct.records import Opener, Sealer
from peers.net.identity import Identity
from peers.net.timings import NetTimings
from swarm.errors import Refused
from swarm.ids import PeerId
from swarm.wire.messages import pack, unpack
from tests.sealed import put

pytestmark = pytest.mark.virtual_time

CALLER, CALLEE = Identity.generate(), Identity.generate()


class Tcp(asyncio.Transport):
    """A connection that is admitted, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.said = b""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """It is never full."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.said += bytes(data)


@dataclass
class Question:
    """Fulfils `peers.ports.Request`, as far as a grant needs it."""

    peer: PeerId
    header: bytes


class Callee:
    """A peer that grants, and what it was called by."""

    def __init__(self) -> None:
        self.met: list[PeerId] = []
        self.paths = DirectPaths(CALLEE, DirectOptions(), NetTimings(grant_s=5.0), self._receive)
        self.paths.port = 4000

    def _receive(self, peer: PeerId) -> ServerConnection:
        self.met.append(peer)
        return ServerConnection(lambda link, _: (peer, link.line), lambda link, call: None)

    async def grant(self) -> SharedSecret:
        asking = Asking(CALLER, CALLEE.peer_id)
        answer = await self.paths.grant(Question(CALLER.peer_id, pack(asking.ask())))
        return asking.agree(unpack(answer.header, GrantDirect))

    def knock(self, hello: bytes) -> bytes:
        """What is said to a connection that begins with this; nothing: it is not admitted."""
        assert len(hello) == HELLO_BYTES
        tcp = Tcp()
        with contextlib.suppress(Refused):
            self.paths.admit(hello, near=False).connection_made(tcp)
            assert tcp.said
        return tcp.said


def hello_of(keys: SharedSecret) -> bytes:
    return keys.ticket + bytes(Sealer(keys.to_callee).seal([OPENING]))


async def test_a_ticket_opens_one_connection_of_the_peer_that_asked() -> None:
    callee = Callee()
    keys = await callee.grant()
    assert put(Opener(keys.to_caller), callee.knock(hello_of(keys))) == OPENING
    assert callee.met == [CALLER.peer_id]
    assert callee.knock(hello_of(keys)) == b"", "a session that was recorded"
    await callee.grant()
    assert callee.knock(hello_of(keys)) == b""


async def test_a_ticket_that_was_seen_on_the_line_is_of_no_use_without_the_key() -> None:
    callee = Callee()
    keys = await callee.grant()
    for wrong in (bytes(32), keys.to_caller):
        assert callee.knock(keys.ticket + bytes(Sealer(wrong).seal([OPENING]))) == b""
    assert callee.knock(bytes(16) + hello_of(keys)[16:]) == b"", "no ticket of ours"
    assert callee.knock(keys.ticket + b"\0\0\0\x13" + bytes(17)) == b"", "a record that goes on"
    assert callee.knock(hello_of(keys)), "the caller can still use it"


async def test_a_peer_knocks_at_addresses_of_the_internet_only_and_for_each_caller_at_one() -> None:
    callee = Callee()
    callee.paths.port, callee.paths.options = 0, DirectOptions(host=None, outside="44.0.0.1", memory=False)
    places = list[tuple[str, int]]()

    async def knock(_: object, place: tuple[str, int]) -> None:
        places.append(place)
        await asyncio.get_running_loop().create_future()

    callee.paths._knock = knock  # type: ignore[method-assign]

    async def ask(host: str, port: int) -> None:
        asking = Asking(CALLER, CALLEE.peer_id)
        await callee.paths.grant(Question(CALLER.peer_id, pack(asking.ask(host, port))))
        await asyncio.sleep(0.01)

    for host in ("10.0.0.1", "127.0.0.1", "fe80::1", "example.org"):
        with pytest.raises(Refused, match=f"{host} is no address of the internet"):
            await ask(host, 80)
    for port in range(3):
        await ask("44.0.0.2", port)
    assert places == [("44.0.0.2", port) for port in range(3)]
    await asyncio.sleep(0.1)
    assert len(callee.paths._tasks._tasks) == len(callee.paths._knocking) == 1, "the last one"
    await callee.paths.close()


async def test_a_ticket_is_good_for_a_while() -> None:
    callee = Callee()
    keys = await callee.grant()
    await asyncio.sleep(5.1)
    assert callee.knock(hello_of(keys)) == b""
    keys = await callee.grant()
    await asyncio.sleep(4.9)
    assert callee.knock(hello_of(keys))
