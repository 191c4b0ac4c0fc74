"""Direct connections over sockets: when they are used, what opens them, what strangers on the port can do.

That calls are the same on both paths is in test_transport.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from peers.clock import now_s
from peers.net.connection import ClientConnection, ServedCall, ServerConnection
from peers.net.direct import paths as direct_paths
from peers.net.direct.handshake import AskDirect, Asking, GrantDirect, SharedSecret, _asked, _granted, grant
from peers.net.direct.paths import HELLO_BYTES, METHOD, OPENING, DirectOptions, DirectPaths
from peers.net.direct.records import Opener, Sealer
from peers.net.direct.stream import SMALL_AT_ONCE, SMALL_PER_S, SealedStream
from peers.net.identity import Identity
from peers.net.timings import NetTimings
from peers.net.transport import NetTransport
from peers.ports import Answer, Request
from swarm.errors import Busy, PeerGone, Refused, SetupError
from swarm.wire import frames
from swarm.wire.messages import pack, unpack
from tests.net.relay import FakeSocket, Relay, direct_links, open_links
from tests.net.test_transport import QUICK, echo, relay, until
from tests.peers.extremes import Extremes
from tests.sealed import put

__all__ = ["relay"]

AT_ONCE = DirectOptions(after_bytes=0, memory=False)
CALLER = Identity.generate()


async def added(relay: Relay, **options: object) -> tuple[NetTransport, NetTransport]:
    """(caller, callee), both of which would connect directly."""
    options = {"direct": AT_ONCE, "timings": QUICK} | options
    caller, callee = await relay.add(**options), await relay.add(**options)
    callee.serve("echo", echo, max_body_bytes=1 << 24)
    return caller, callee


async def calls(caller: NetTransport, callee: NetTransport, count: int = 3) -> None:
    for number in range(count):
        answer = await caller.call(
            callee.peer_id, "echo", b"%d" % number, [bytes(70_000)], max_answer_bytes=70_000
        )
        assert answer.header == b"%d" % number


async def breaks(relay: Relay, caller: NetTransport, callee: NetTransport) -> None:
    """The connection breaks during a call, which fails; the next ones pass p2pd."""
    entered = asyncio.Event()

    async def never(request: Request) -> Answer:
        entered.set()
        await asyncio.get_running_loop().create_future()
        return Answer(b"")

    callee.serve("never", never)
    under_way = asyncio.ensure_future(caller.call(callee.peer_id, "never", b""))
    await entered.wait()
    relay.sever(callee.peer_id)
    with pytest.raises(PeerGone, match="the connection broke"):
        await under_way
    await calls(caller, callee)
    assert direct_links(caller) == (0, 0)


# -- when it is used -----------------------------------------------------------------------------------------


async def test_a_pair_that_moves_a_megabyte_connects_directly_and_keeps_one_stream(relay: Relay) -> None:
    caller, callee = await added(relay, direct=DirectOptions(after_bytes=1 << 20, memory=False))
    await calls(caller, callee)
    assert direct_links(caller) == (0, 0), "it moved less"
    await calls(caller, callee, 6)
    await until(lambda: direct_links(caller) == (1, 0) and open_links(callee) == (0, 1))
    assert direct_links(callee) == (0, 1)
    assert (open_links(caller), relay.dials) == ((1, 0), [callee.peer_id])
    assert callee.peer_id in caller.lines, "both paths count on one line"


async def test_the_first_large_body_waits_for_the_direct_path(relay: Relay) -> None:
    """On p2pd's, nothing would pass it: neither the question for another path, nor a heartbeat."""
    caller, callee = await added(relay, direct=DirectOptions(memory=False))
    direct = list[bool]()

    async def take(request: Request) -> Answer:
        assert isinstance(request, ServedCall)
        direct.append(request.link.direct)
        await request.accept()
        return Answer(b"")

    callee.serve("take", take, max_body_bytes=1 << 20)
    for size in (1000, 300_000, 1000):
        await caller.call(callee.peer_id, "take", b"", [bytes(size)])
    assert direct == [False, True, True]


async def test_a_call_that_is_under_way_ends_on_the_stream_on_which_it_began(relay: Relay) -> None:
    caller, callee = await added(relay)
    entered, leave = asyncio.Event(), asyncio.Event()

    async def wait(request: Request) -> Answer:
        entered.set()
        await leave.wait()
        return Answer(b"done")

    callee.serve("wait", wait)
    waiting = asyncio.ensure_future(caller.call(callee.peer_id, "wait", b""))
    await entered.wait()
    await until(lambda: direct_links(caller) == (1, 0))
    await calls(caller, callee)
    assert open_links(callee) == (0, 2)
    leave.set()
    assert (await waiting).header == b"done"
    await until(lambda: open_links(callee) == (0, 1))


async def test_a_peer_that_is_reached_through_a_relay_is_not_even_asked(relay: Relay) -> None:
    caller, callee = await added(relay)
    relay.hidden.add(callee.peer_id)
    await calls(caller, callee)
    await until(lambda: not caller._tasks._tasks)
    assert (caller.peer_id, callee.peer_id) not in relay.ports and not callee._dialer.direct._granted
    assert direct_links(caller) == (0, 0)


# -- peers that nobody can dial ------------------------------------------------------------------------------

AT_HOME = DirectOptions(host=None, after_bytes=0, outside="44.0.0.1", memory=False)
Place = tuple[str, int]


class Routers:
    """Bring together two sockets that knock at one another's place, once there are holes."""

    def __init__(self, *homes: NetTransport) -> None:
        self.holes = True
        self.came: list[Place] = []
        for home in homes:
            home._dialer.direct._knock = self._knock

    async def _knock(self, tcp: socket.socket, place: Place) -> None:
        loop = asyncio.get_running_loop()
        self.came.append(place)
        if not self.holes:
            await loop.create_future()
        if tcp.getsockname()[1] in (port for _, port in self.came):  # the other end is here already
            await loop.sock_connect(tcp, ("127.0.0.1", place[1]))
        else:
            tcp.listen()
            came, _ = await loop.sock_accept(tcp)
            with came:
                os.dup2(came.fileno(), tcp.fileno())


async def at_home(relay: Relay, **options: object) -> tuple[NetTransport, NetTransport, Routers]:
    caller, callee = await added(relay, **({"direct": AT_HOME} | options))
    relay.hidden |= {caller.peer_id, callee.peer_id}
    return caller, callee, Routers(caller, callee)


async def test_two_that_nobody_can_dial_knock_at_one_anothers_routers(relay: Relay) -> None:
    caller, callee, routers = await at_home(relay)
    await calls(caller, callee)
    await until(lambda: direct_links(caller) == (1, 0) and open_links(callee) == (0, 1))
    assert direct_links(callee) == (0, 1) and not callee._dialer.direct._knocking
    assert {host for host, _ in routers.came} == {"44.0.0.1"} and len({port for _, port in routers.came}) == 2
    await calls(caller, callee)


async def test_where_no_hole_opens_calls_pass_the_relay_until_one_does(relay: Relay) -> None:
    caller, callee, routers = await at_home(relay, timings=replace(QUICK, direct_s=0.1))
    routers.holes = False
    await calls(caller, callee)
    await until(lambda: not caller._tasks._tasks and not callee._dialer.direct._knocking)
    assert direct_links(caller) == (0, 0) and len(routers.came) == 2
    routers.holes = True
    caller._dialer._no_direct.answered(callee.peer_id)  # the pause is over
    await calls(caller, callee, 1)
    await until(lambda: direct_links(caller) == (1, 0))


async def test_a_peer_knocks_at_no_local_network_and_for_each_caller_at_one_place(relay: Relay) -> None:
    caller, callee, routers = await at_home(relay)
    routers.holes = False
    paths = callee._dialer.direct

    async def ask(host: str) -> None:
        await paths.grant(OneRequest(CALLER.peer_id, pack(Asking(CALLER, callee.peer_id).ask(host, 80))))

    for host in ("10.0.0.1", "127.0.0.1", "fe80::1%eth0", "example.org"):
        with pytest.raises(Refused, match="is no address of the internet"):
            await ask(host)
        with pytest.raises(Refused, match="is no address of the internet"):
            await caller._dialer.direct.dial(GrantingLink(callee.signer, caller.peer_id, host), [])
    assert not paths._knocking
    for _ in range(5):
        await ask("44.0.0.2")
    await until(lambda: len(paths._tasks._tasks) == 1)
    assert len(paths._knocking) == 1


async def test_a_router_that_refuses_before_it_has_a_hole_is_knocked_at_again(callee: NetTransport) -> None:
    with socket.socket() as own, socket.socket() as other:
        own.setblocking(False)
        other.bind(("127.0.0.1", 0))
        knocking = asyncio.ensure_future(callee._dialer.direct._knock(own, other.getsockname()))
        await asyncio.sleep(0)
        other.listen()
        await knocking
        assert own.getpeername() == other.getsockname()


@pytest.mark.parametrize("how", ["refused", "mute", "not-wanted", "not-known"])
async def test_where_it_cannot_be_had_no_call_is_lost_and_none_waits(relay: Relay, how: str) -> None:
    timings = replace(QUICK, direct_s=0.3)
    caller, callee = await added(relay, timings=timings)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        match how:
            case "refused":  # nothing listens there
                await callee._dialer.direct._tasks.close()
            case "mute":  # a stranger's program does
                callee._dialer.direct.port = mute.getsockname()[1]
            case "not-wanted":
                callee._dialer.direct.port = 0
            case _:
                del callee._methods[METHOD]
        began = asyncio.get_running_loop().time()
        for _ in range(20):
            await calls(caller, callee, 1)
        assert asyncio.get_running_loop().time() - began < 5.0
        await until(lambda: not caller._tasks._tasks)
        assert (direct_links(caller), open_links(caller)) == ((0, 0), (1, 0))
        assert not caller._dialer.direct.streams
        asked = callee._dialer.direct._granted.copy()
        await calls(caller, callee)
        assert callee._dialer.direct._granted == asked, "not tried again for a while"


async def test_a_path_that_cannot_be_had_is_tried_again_later_each_time_and_at_most_so_late(
    relay: Relay,
) -> None:
    timings = replace(QUICK, direct_again_s=60.0, direct_again_most_s=200.0)
    caller, callee = await added(relay, timings=timings)
    callee._dialer.direct.port = 0
    paths, pauses_s = caller._dialer._no_direct, list[float]()
    for _ in range(4):
        await calls(caller, callee, 1)
        await until(lambda: not caller._tasks._tasks)
        assert paths.in_backoff(callee.peer_id, now=now_s())
        pauses_s.append(paths._last_s[callee.peer_id])
        paths._until.clear()  # so much time passes
    assert pauses_s == [60.0, 120.0, 200.0, 200.0]
    callee._dialer.direct.port = callee._dialer.direct._listeners[0].getsockname()[1]
    await calls(caller, callee, 1)
    await until(lambda: direct_links(caller) == (1, 0))
    assert not paths.is_failing(callee.peer_id), "what came about may break, and is soon tried again"


async def test_when_it_breaks_calls_fail_as_on_p2pd_and_the_next_ones_pass_p2pd(relay: Relay) -> None:
    caller, callee = await added(relay)
    await calls(caller, callee)
    await until(lambda: direct_links(caller) == (1, 0) and open_links(callee) == (0, 1))
    await breaks(relay, caller, callee)
    assert relay.dials == [callee.peer_id] * 2
    await until(lambda: not caller._dialer.direct.streams and not callee._dialer.direct.streams)


async def test_a_changed_byte_ends_the_connection_and_blames_nobody(relay: Relay) -> None:
    caller, callee = await added(relay)
    await calls(caller, callee)
    await until(lambda: direct_links(caller) == (1, 0))
    relay.flips = True
    with pytest.raises(PeerGone, match=r"the connection broke|the direct connection was disturbed: record"):
        await caller.call(callee.peer_id, "echo", b"over it")
    relay.flips = False
    await calls(caller, callee)
    assert direct_links(caller) == (0, 0)


async def test_a_banned_peer_gets_none_and_loses_the_one_that_it_has(relay: Relay) -> None:
    caller, callee = await added(relay)
    await calls(caller, callee)
    await until(lambda: direct_links(caller) == (1, 0) and open_links(callee) == (0, 1))
    callee.refusal = lambda peer, method, incoming: "banned" if peer == caller.peer_id else ""
    callee.drop_refused()
    await until(lambda: open_links(callee) == (0, 0))
    hello, port = await asked(callee, caller.signer)
    assert await says(port, hello) == b"", "a grant from before is no way in"


# -- what opens it, and what does not ------------------------------------------------------------------------


async def keys_of(callee: NetTransport, signer: Identity) -> tuple[SharedSecret, int]:
    """As the peer of the signer asks for it over p2pd."""
    asking = Asking(signer, callee.peer_id)
    request = OneRequest(signer.peer_id, pack(asking.ask()))
    given = unpack((await callee._dialer.direct.grant(request)).header, GrantDirect)
    return asking.agree(given), given.port


class GrantingLink(ClientConnection):
    """At its other end a peer grants a direct connection at whatever host."""

    def __init__(self, signer: Identity, caller: str, host: str) -> None:
        super().__init__(signer.peer_id, b"")
        self._given = signer, caller, host

    async def call(self, method: str, header: bytes, *_: object) -> Answer:
        signer, caller, host = self._given
        return Answer(pack(grant(signer, caller, unpack(header, AskDirect), 80, host)[0]))


class OneRequest:
    """Fulfils `peers.ports.Request`, as far as a grant needs it."""

    def __init__(self, peer: str, header: bytes) -> None:
        self.peer, self.header = peer, header


def hello_of(keys: SharedSecret) -> bytes:
    return keys.ticket + bytes(Sealer(keys.to_callee).seal([OPENING]))


async def asked(callee: NetTransport, signer: Identity) -> tuple[bytes, int]:
    keys, port = await keys_of(callee, signer)
    return hello_of(keys), port


async def says(port: int, data: bytes) -> bytes:
    """What the port answers, until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(reader.read(100), 5)
        return b""
    finally:
        writer.transport.abort()


@pytest_asyncio.fixture
async def callee(relay: Relay) -> AsyncIterator[NetTransport]:
    callee = await relay.add(direct=AT_ONCE, timings=replace(QUICK, knock_s=0.3))
    callee.serve("echo", echo)
    yield callee


async def test_a_hello_opens_one_connection_and_a_recorded_one_none(callee: NetTransport) -> None:
    keys, port = await keys_of(callee, CALLER)
    assert len(hello_of(keys)) == HELLO_BYTES
    assert put(Opener(keys.to_caller), await says(port, hello_of(keys))) == OPENING
    assert await says(port, hello_of(keys)) == b"", "said twice"
    await asked(callee, CALLER)
    assert await says(port, hello_of(keys)) == b"", "of an earlier session"


async def test_a_question_in_anothers_name_gets_no_grant(callee: NetTransport) -> None:
    ask = Asking(Identity.generate(), callee.peer_id).ask()
    with pytest.raises(Refused, match="a question for a direct connection with a wrong signature"):
        await callee._dialer.direct.grant(OneRequest(CALLER.peer_id, pack(ask)))
    with pytest.raises(Refused, match="malformed AskDirect"):
        await callee._dialer.direct.grant(OneRequest(CALLER.peer_id, b"junk"))
    assert not callee._dialer.direct._granted


NO_SECRETS = [bytes(32), b"\1" + bytes(31), b"\xff" * 32, (2**255 - 19).to_bytes(32, "little")]
"""Keys of X25519 that leave none, or are written otherwise than usual."""


async def test_questions_of_any_values_open_nothing_and_keep_no_honest_caller_out(
    callee: NetTransport,
) -> None:
    """Also those with a right signature: of the caller itself, for a key that leaves no secret."""
    paths, dice = callee._dialer.direct, random.Random(7)
    extremes = Extremes(dice, "", (CALLER.peer_id, callee.peer_id))
    keys, port = await keys_of(callee, Identity.generate())
    for number in range(300):
        honest = Asking(CALLER, callee.peer_id).ask()
        message = extremes.of(AskDirect, honest if number % 2 else None)
        if number % 5 == 0:
            key = dice.choice(NO_SECRETS)
            message = AskDirect(
                key=key, signature=CALLER.sign(_asked(CALLER.peer_id, callee.peer_id, key, ("", 0)))
            )
        if message != honest:
            with contextlib.suppress(Refused):
                await paths.grant(OneRequest(CALLER.peer_id, pack(message)))
    assert len(paths._granted) <= 2, "one of each caller"
    assert put(Opener(keys.to_caller), await says(port, hello_of(keys))) == OPENING


async def test_grants_of_any_values_lose_no_call(relay: Relay) -> None:
    """A callee that answers anything: what it is called for passes p2pd."""
    caller, callee = await added(relay, timings=replace(QUICK, direct_s=0.3, direct_again_s=0.0))
    dice = random.Random(7)
    extremes = Extremes(dice, "", (caller.peer_id, callee.peer_id))
    asked = list[bytes]()

    async def made_up(request: Request) -> Answer:
        asked.append(request.header)
        ask = unpack(request.header, AskDirect)
        granted = {"port": dice.choice((0, 1, 65535)), "key": dice.choice(NO_SECRETS)}
        said = _granted(caller.peer_id, callee.peer_id, ask.key, granted["key"], ("", granted["port"]))
        honest = GrantDirect(**granted, signature=callee.signer.sign(said))
        return Answer(pack(honest if len(asked) % 3 == 0 else extremes.of(GrantDirect, honest)))

    callee.serve(METHOD, made_up)
    for tries in range(1, 31):
        await calls(caller, callee, 1)
        await until(lambda tries=tries: len(asked) >= tries and not caller._tasks._tasks)
    assert direct_links(caller) == (0, 0)
    assert not caller._dialer.direct.streams


async def test_grants_are_bounded(callee: NetTransport) -> None:
    paths = callee._dialer.direct
    for _ in range(direct_paths.MAX_STREAMS):
        peer = Identity.generate()
        await paths.grant(OneRequest(peer.peer_id, pack(Asking(peer, callee.peer_id).ask())))
        for ticket, granted in paths._granted.items():  # on a slow machine none of them expires
            paths._granted[ticket] = replace(granted, until=granted.until + 60)
    with pytest.raises(Busy, match="256 direct connections are open"):
        await paths.grant(OneRequest(CALLER.peer_id, pack(Asking(CALLER, callee.peer_id).ask())))


async def test_strangers_hold_few_bytes_for_a_short_time_and_keep_nobody_out(callee: NetTransport) -> None:
    paths = callee._dialer.direct
    strangers = [
        await asyncio.open_connection("127.0.0.1", paths.port) for _ in range(direct_paths.MAX_KNOCKS + 20)
    ]
    for _, writer in strangers:
        writer.write(b"G")
    await until(lambda: len(paths.knocks) == direct_paths.MAX_KNOCKS)
    for _ in range(10):
        with socket.create_connection(("127.0.0.1", paths.port)) as hasty:  # resets at once
            hasty.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    keys, port = await keys_of(callee, CALLER)
    assert put(Opener(keys.to_caller), await says(port, hello_of(keys))) == OPENING
    await until(lambda: not paths.knocks)
    for reader, writer in strangers:
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.transport.abort()
    assert await says(port, b"GET / HTTP/1.1\r\nHost: of somebody else\r\n\r\n") == b""


def feed(stream: SealedStream, data: bytes) -> None:
    """As a loop does."""
    rest = memoryview(data)
    while rest:
        room = stream.get_buffer(-1)
        size = min(len(room), len(rest))
        room[:size] = rest[:size]
        stream.buffer_updated(size)
        rest = rest[size:]


@pytest.mark.virtual_time
async def test_many_small_records_are_read_no_faster_than_frames() -> None:
    link = ClientConnection("peer", b"")
    stream, tcp, sealer = (
        SealedStream(link, Sealer(bytes(32)), Opener(bytes(32))),
        FakeSocket(),
        Sealer(bytes(32)),
    )
    stream.connection_made(tcp)
    feed(stream, bytes(sealer.seal([OPENING])))
    body = frames.pack_prefix(frames.Kind.ALIVE, 0)
    for number in range(int(SMALL_AT_ONCE) // 2):
        feed(stream, b"".join(sealer.seal([half]) for half in (body[:7], body[7:])))
        assert not tcp.did or number >= SMALL_AT_ONCE // 2 - 1
    assert tcp.did == ["pause"]
    await asyncio.sleep(2 / SMALL_PER_S)
    assert tcp.did == ["pause", "resume"]
    link.rest(1.1)
    feed(stream, b"".join(sealer.seal([body]) for _ in range(2)))
    await asyncio.sleep(1.0)
    assert tcp.did[2:] == ["pause"] * 2, "the longer rest is not over"
    await asyncio.sleep(0.2)
    assert tcp.did[-1] == "resume"
    assert not link.over


@pytest.mark.virtual_time
async def test_a_part_of_a_record_is_a_sign_of_life() -> None:
    link = ClientConnection("peer", b"", NetTimings(silence_s=1.0))
    stream, sealer = SealedStream(link, Sealer(bytes(32)), Opener(bytes(32))), Sealer(bytes(32))
    stream.connection_made(FakeSocket())
    feed(stream, bytes(sealer.seal([OPENING])))
    call = asyncio.ensure_future(link.call("x", b"", (), 0))
    slow = bytes(sealer.seal([frames.pack_result(1, bytes(2000), ())]))
    for start in range(0, len(slow), 200):
        await asyncio.sleep(0.9)
        feed(stream, slow[start : start + 200])
    assert (await call).header == bytes(2000)


@pytest.mark.virtual_time
async def test_a_connection_that_comes_about_after_it_was_given_up_is_closed() -> None:
    link, tcp = ClientConnection("peer", OPENING), FakeSocket()
    link.fail(PeerGone("peer", "we are closing"))
    SealedStream(link, Sealer(bytes(32)), Opener(bytes(32)), bytes(16)).connection_made(tcp)
    assert tcp.did == ["abort"]


async def test_a_port_that_is_taken_is_named(relay: Relay) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            SetupError, match=rf"port {port} for direct .* 127\.0\.0\.1 \(Address already in use"
        ):
            await relay.add(direct=DirectOptions(port=port))
    paths = DirectPaths(CALLER, DirectOptions(host="192.0.2.1"), NetTimings(), no_end)
    with pytest.raises(SetupError, match=r"port 0 for direct connections cannot be had on 192\.0\.2\.1"):
        paths.listen()


def no_end(peer: str) -> ServerConnection:
    raise AssertionError(peer)


async def test_a_peer_that_only_dials_takes_none(relay: Relay) -> None:
    caller = await relay.add(direct=AT_ONCE, timings=QUICK)
    callee = await relay.add(direct=DirectOptions(host=None, after_bytes=0, memory=False), timings=QUICK)
    for transport in (caller, callee):
        transport.serve("echo", echo, max_body_bytes=1 << 24)
    await calls(caller, callee)
    await until(lambda: not caller._tasks._tasks)
    assert direct_links(caller) == (0, 0)
    await calls(callee, caller)
    await until(lambda: direct_links(callee)[0] == 1)
    with pytest.raises(Refused, match="no direct connections are taken here"):
        await keys_of(callee, CALLER)
