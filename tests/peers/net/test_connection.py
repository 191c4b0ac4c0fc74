"""The two ends of a stream without a socket, in virtual time: any split of the bytes, any order of what
both ends do."""

from __future__ import annotations

import asyncio
import math
import random
import zlib
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from peers.clock import now_s
from peers.net.bandwidth import (
    CALL_BYTES,
    CONTROL_BYTES_AT_ONCE,
    CONTROL_BYTES_PER_S,
    EARLY_BYTES,
    EARLY_BYTES_OF_ALL,
    FRAME_BYTES,
    OBSERVED_EVERY_S,
    OWN_AT_ONCE,
    OWN_PER_S,
    UNPACKED_BYTES,
    UNPACKED_OF_ALL_PER_S,
    UNREAD_BYTES_OF_ALL,
    Traffic,
)
from peers.net.connection import (
    LATE_S,
    MAX_WAITING,
    SMOOTH,
    ClientConnection,
    Connection,
    ServedCall,
    ServerConnection,
)
from peers.net.identity import Identity
from peers.net.p2pd_control import DaemonControl
from peers.net.timings import NetTimings
from peers.net.transport import NetTransport
from peers.ports import Answer, Request
from peers.sim.loop import run_virtual
from swarm.errors import BadAnswer, PeerGone, PeerSilent
from swarm.wire import frames
from swarm.wire.frames import Kind, Prefix

OPENING = b"\x02ok"
BODIES = st.lists(st.sampled_from([0, 1, 700, frames.CHUNK_BYTES + 1, frames.WINDOW_BYTES + 5]), max_size=3)
SPLITS = st.lists(st.sampled_from([1, 2, 15, 16, 17, 1000, 300_000]), min_size=1, max_size=6)


class Wire(asyncio.Transport):
    """What one end says, until a test brings it to the other."""

    def __init__(self, end: Connection) -> None:
        super().__init__()
        self.end, self.said = end, b""
        end.connection_made(self)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """It is never full."""

    def write(self, data: Any) -> None:
        self.said += bytes(data)

    def write_eof(self) -> None:
        """Nothing follows."""

    def pause_reading(self) -> None:
        """What comes nevertheless waits at the end."""

    def resume_reading(self) -> None:
        """It may come again."""

    def abort(self) -> None:
        asyncio.get_running_loop().call_soon(self.end.connection_lost, None)


def feed(end: Connection, data: bytes) -> None:
    """As a socket does, which reads the next bytes into the same buffer."""
    if not end.over:
        buffer = bytearray(data)
        end.data_received(memoryview(buffer))
        buffer[:] = b"\xff" * len(buffer)


def serving(called: list[ServedCall], timings: NetTimings | None = None) -> ServerConnection:
    """An end that is called, and does nothing about it."""
    return ServerConnection(
        lambda link, message: ("caller", Traffic(most_peers=1).of("caller")),
        lambda link, call: called.append(call),
        timings or NetTimings(),
    )


class Pair:
    """Two ends, and the bytes between them."""

    def __init__(self, timings: NetTimings | None = None) -> None:
        self.called: list[ServedCall] = []
        self.accepted: dict[ServedCall, asyncio.Task[list[memoryview]]] = {}
        self.client = ClientConnection("server", OPENING, timings or NetTimings())
        self.server = serving(self.called, timings)
        self.to_server, self.to_client = Wire(self.client), Wire(self.server)
        self.to_client.said = OPENING + self.to_client.said
        self.carry(len(OPENING))

    def carry(self, most: int) -> None:
        """Bring so many bytes to each end."""
        for wire, end in ((self.to_server, self.server), (self.to_client, self.client)):
            data, wire.said = wire.said[:most], wire.said[most:]
            feed(end, data)

    def call(self, sizes: list[int]) -> asyncio.Task[Answer]:
        body = [memoryview(bytearray(bytes([number + 1]) * size)) for number, size in enumerate(sizes)]
        return asyncio.ensure_future(self.client.call("echo", b"head", body, 1 << 30))

    def accept(self, call: ServedCall) -> None:
        self.accepted[call] = asyncio.ensure_future(call.accept())

    def echo(self, call: ServedCall) -> None:
        self.called.remove(call)
        self.server.answer(call, call.header, self.accepted[call].result())

    def whole(self) -> list[ServedCall]:
        """Calls whose body is there."""
        done = {call for call, body in self.accepted.items() if body.done() and body.exception() is None}
        return [call for call in self.called if call in done]

    async def settle(self) -> None:
        """Let everything arrive, and answer everything."""
        for _ in range(200):
            self.carry(1 << 20)
            await asyncio.sleep(0)
            for call in self.called:
                if call not in self.accepted:
                    self.accept(call)
            for call in self.whole():
                self.echo(call)


async def any_order(data: st.DataObject) -> None:
    pair, made = Pair(), dict[asyncio.Task[Answer], list[int]]()
    for _ in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["call", "carry", "carry", "accept", "echo", "abort", "tick"])):
            case "call":
                sizes = data.draw(BODIES)
                made[pair.call(sizes)] = sizes
            case "carry":
                pair.carry(data.draw(st.sampled_from([1, 16, 40, 1000, 300_000, 1 << 21])))
            case "accept" if left := [call for call in pair.called if call not in pair.accepted]:
                pair.accept(data.draw(st.sampled_from(left)))
            case "echo" if ready := pair.whole():
                pair.echo(data.draw(st.sampled_from(ready)))
            case "abort" if going := [call for call in made if not call.done()]:
                data.draw(st.sampled_from(going)).cancel()
            case "tick":
                await asyncio.sleep(0.25)
            case _:
                pass
        await asyncio.sleep(0)
    await pair.settle()
    assert not pair.client.over and not pair.server.over
    for call, sizes in made.items():
        if call.cancelled():
            continue
        assert call.result().header == b"head"
        expected = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
        assert [bytes(part) for part in call.result().body] == expected
    assert pair.client.pending == 0 and not pair.server._calls
    for body in pair.accepted.values():
        assert body.done() and (body.exception() is None or isinstance(body.exception(), PeerGone))


@settings(max_examples=settings.default.max_examples * 3 // 5, deadline=None)
@given(data=st.data())
def test_each_call_gets_its_own_answer_once_whatever_the_order(data: st.DataObject) -> None:
    run_virtual(any_order(data))


@pytest.mark.virtual_time
async def test_a_body_of_some_megabytes_does_not_wait_to_be_accepted() -> None:
    pair, whole = Pair(), frames.WINDOW_BYTES + frames.AHEAD_BYTES

    async def come() -> list[int]:
        """Bytes of each call's body that are here."""
        await asyncio.sleep(0)
        pair.carry(1 << 30)
        return [call.incoming.total - call.incoming.left for call in pair.called if call.incoming]

    made = [pair.call([whole])]
    assert await come() == [whole]
    made += [pair.call([whole])]
    assert await come() == [whole, frames.WINDOW_BYTES]  # what goes ahead is of all of them
    pair.accept(pair.called[0])
    await come()
    made += [pair.call([whole]), pair.call([whole])]
    assert await come() == [whole, frames.WINDOW_BYTES, whole, frames.WINDOW_BYTES]
    made[2].cancel()
    await come()
    made += [pair.call([whole])]
    assert (await come())[-1] == whole
    for call in made:
        call.cancel()
    await asyncio.sleep(0)
    assert pair.client._ahead == frames.AHEAD_BYTES


def quantized(size: int) -> bytes:
    """Bytes as frequent as those of normal numbers in 8 bits."""
    rng = random.Random(1)
    return bytes(min(255, max(0, round(rng.gauss(128, 20)))) for _ in range(size))


BOMB = (packer := zlib.compressobj(9, wbits=-15)).compress(bytes(200_000)) + packer.flush()
NORMAL, NOISE = quantized(300_000), random.Random(2).randbytes(300_000)


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("limit_bps", "body", "least", "most"),
    [
        (20e6, NORMAL, 0.7, 0.82),
        (20e6, bytes(1_000_000), 0.125, 0.15),
        (20e6, NOISE, 1.0, 1.001),
        (200e6, NORMAL, 0.7, 0.82),
        (220e6, NORMAL, 1.0, 1.001),
        (math.inf, NORMAL, 1.0, 1.001),
    ],
)
async def test_over_a_slow_line_a_body_goes_in_fewer_bytes_and_sooner(
    limit_bps: float, body: bytes, least: float, most: float
) -> None:
    pair, loop = Pair(), asyncio.get_running_loop()
    for end in (pair.client, pair.server):
        end.line.limiter.keep_to(limit_bps)
    began, both_ways = loop.time(), 2 * len(body)
    call = asyncio.ensure_future(pair.client.call("echo", b"head", [memoryview(body)], 1 << 30))
    while not call.done():
        await pair.settle()
        await asyncio.sleep(0.001)
    assert bytes((await call).body[0]) == body
    sent = pair.client.line.sent_bytes + pair.server.line.sent_bytes
    assert least <= sent / both_ways < most
    assert loop.time() - began <= 1.1 * most * 8 * both_ways / limit_bps + 0.1, "a turn is 0.05 s"


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("packed", "text"),
    [
        (BOMB, f"PACKED with {len(BOMB)} bytes for a part of {8 * len(BOMB) + 1}, or of several"),
        (frames.pack_part(memoryview(NOISE[:500])), "bytes for a part of 500, or of several"),
        (b"\xff\xff", "PACKED with a malformed part"),
        (frames.pack_part(memoryview(bytes(2000))), "a body with 1000 bytes more than announced"),
    ],
)
async def test_a_packed_part_that_is_none_ends_the_stream(packed: bytes, text: str) -> None:
    called: list[ServedCall] = []
    server = serving(called)
    Wire(server)
    feed(server, OPENING + frames.pack_call(1, "m", b"", [1000]))
    feed(server, frames.pack_prefix(frames.Kind.PACKED, 1, len(packed)) + packed)
    assert server.lost_because is not None and text in server.lost_because.text


@pytest.mark.virtual_time
async def test_what_a_caller_may_have_unpacked_in_a_second_is_bounded() -> None:
    called: list[ServedCall] = []
    server, size = serving(called), 8192
    Wire(server)
    packed = frames.pack_part(memoryview(bytes(size)))
    feed(server, OPENING + frames.pack_call(1, "m", b"", [10_000 * size]))
    accepted = asyncio.ensure_future(called[0].accept())
    await asyncio.sleep(0)
    costs = 2 * FRAME_BYTES + size / UNPACKED_BYTES
    at_once, a_second = CONTROL_BYTES_AT_ONCE / costs, CONTROL_BYTES_PER_S / costs
    feed(server, 10_000 * (frames.pack_prefix(frames.Kind.PACKED, 1, len(packed)) + packed))
    await asyncio.sleep(0.05)
    assert 0.95 * at_once < called[0].passed_bytes / size <= at_once + 0.06 * a_second
    await asyncio.sleep(4.0)
    assert called[0].passed_bytes / size <= at_once + 4.1 * a_second
    accepted.cancel()


def test_what_a_crowd_may_have_unpacked_in_a_second_is_bounded_and_each_has_as_much() -> None:
    traffic, part = Traffic(most_peers=100), Prefix(Kind.BODY, 1, (1 << 16) // UNPACKED_BYTES, 1 << 16)
    lines, rests, unpacked = [traffic.of(f"caller {n}") for n in range(21)], [0.0] * 21, [0] * 21
    lines[20].wants(frames.CHUNK_BYTES + 1, now=0.0)
    for now in (millisecond / 1000 for millisecond in range(10_000)):
        for n, line in enumerate(lines):
            if rests[n] <= now:
                rests[n] = now + line.pays(part, now=now)
                unpacked[n] += part.body_bytes
    *crowd, wanted = unpacked
    assert sum(crowd) < UNPACKED_BYTES * (CONTROL_BYTES_AT_ONCE + 10.1 * UNPACKED_OF_ALL_PER_S)
    assert max(crowd) < 1.2 * min(crowd)
    assert wanted > 60e6 * 10, "of which a handler took a body lately has as much as before"


def test_what_a_crowd_may_call_in_a_second_is_bounded_and_who_works_is_slowed_down_by_none() -> None:
    """Twenty with forged tickets, each within its limits, took a whole core."""
    traffic, call = Traffic(most_peers=100), Prefix(Kind.CALL, 1, 1 << 14, 0)
    lines, rests, calls = [traffic.of(f"caller {n}") for n in range(21)], [0.0] * 21, [0] * 21
    lines[20].wants(1, now=0.0)
    for now in (millisecond / 1000 for millisecond in range(10_000)):
        for n, line in enumerate(lines):
            if rests[n] <= now:
                rests[n] = now + line.pays(call, now=now)
                calls[n] += 1
    *crowd, works = calls
    most = CONTROL_BYTES_AT_ONCE + 10.1 * UNPACKED_OF_ALL_PER_S + 20 * (OWN_AT_ONCE + 10.1 * OWN_PER_S)
    most /= CALL_BYTES + call.header_bytes / 8
    assert sum(crowd) < most and max(crowd) < 1.2 * min(crowd)
    assert works > 9.9 * CONTROL_BYTES_PER_S / call.header_bytes


@pytest.mark.parametrize(
    ("said", "a_second"),
    [(Prefix(Kind.RESULT, 1, 300, 0), 100), (Prefix(Kind.CALL, 1, 300, 0), 2)],
    ids=["answers to a trainer", "summaries"],
)
def test_a_crowd_slows_down_none_that_works_without_bodies(said: Prefix, a_second: int) -> None:
    """200 names, with their longest headers, had each of its frames wait for 3.5 s: it was taken for dead."""
    traffic, call = Traffic(most_peers=1000), Prefix(Kind.CALL, 1, 1 << 16, 0)
    works, *crowd = [traffic.of(f"peer {n}") for n in range(201)]
    rests = [0.0] * 600
    for tick in range(1000):
        now = tick / 100
        for n, until in enumerate(rests):
            if until <= now:
                rests[n] = now + crowd[n // 3].pays(call, now=now)
        if tick % (100 // a_second) == 0:
            assert not works.pays(said, now=now)
    assert max(rests) > now + 3.0


@pytest.mark.virtual_time
async def test_of_one_that_waits_for_a_crowd_it_is_not_said_that_it_sends_too_much(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transport, now = NetTransport(DaemonControl(Path("none")), Identity.generate()), now_s()
    for peer, count in (("newcomer", 0), ("flood", 2000)):
        link = transport._make_callee(peer)
        link.peer, link.line = peer, transport.lines.of(peer)
        for _ in range(count):
            link.line.pays(Prefix(Kind.CALL, 1, 0, 0), now=now)
        link.on_rest(link)
    said = [record.message.partition("slowed down: ")[2] for record in caplog.records]
    assert said[0] == "all that do no work say more than they may together"
    assert said[1] == "it sends more than 200 calls, or 1 MB of headers, a second"


@pytest.mark.virtual_time
async def test_of_what_one_says_at_once_little_is_looked_at_before_others_have_their_turn() -> None:
    """Twenty that said all that each may, 16,000 signs of life, kept all others waiting for 3 s."""
    transport, called = NetTransport(DaemonControl(Path("none")), Identity.generate()), list[str]()

    async def serve(request: Request) -> Answer:
        called.append(request.peer)
        return Answer(b"")

    transport.serve("status", serve)
    for peer, count in (("crowd", 200), ("other", 1)):
        link = transport._make_callee(peer)
        Wire(link)
        feed(link, b"\0" + b"".join(frames.pack_call(n + 1, "status", b"", []) for n in range(count)))
    await asyncio.sleep(1.0)
    assert len(called) == 201 and called.index("other") <= 32


@pytest.mark.virtual_time
async def test_only_whose_large_bodies_are_taken_or_asked_for_is_wanted() -> None:
    pair, size = Pair(), frames.CHUNK_BYTES
    for size, wanted in ((frames.CHUNK_BYTES, False), (frames.CHUNK_BYTES + 1, True)):
        call = pair.call([size])
        await asyncio.sleep(0)
        pair.carry(1 << 20)
        served = pair.called[-1]
        assert pair.server.line.wanted_at == -math.inf, "nobody has taken it yet"
        pair.accept(served)
        await asyncio.sleep(0)
        assert (pair.server.line.wanted_at > -math.inf) == wanted
        pair.server.answer(served, b"", [memoryview(bytes(size))])
        pair.carry(1 << 20)
        assert (pair.client.line.wanted_at > -math.inf) == wanted
        call.cancel()


@pytest.mark.virtual_time
async def test_a_body_of_many_small_buffers_is_read_as_fast_as_if_it_were_not_packed() -> None:
    """Each cost as much as a whole chunk: of 4 kB, 0.9 MB were read a second."""
    called: list[ServedCall] = []
    server, size, count = serving(called), 4096, 5000
    Wire(server)
    packed = frames.pack_part(memoryview(NORMAL[:size]))
    feed(server, OPENING + frames.pack_call(1, "m", b"", [count * size]))
    accepted = asyncio.ensure_future(called[0].accept())
    await asyncio.sleep(0)
    feed(server, count * (frames.pack_prefix(frames.Kind.PACKED, 1, len(packed)) + packed))
    await accepted
    assert asyncio.get_running_loop().time() < 0.1, "20 MB: a line of 100 Mbit/s takes 1.3 s"


@pytest.mark.virtual_time
async def test_what_passes_of_a_call_is_its_body_and_then_its_answer() -> None:
    pair, passed = Pair(), list[int]()
    call = pair.call([1000])
    await asyncio.sleep(0)
    pair.carry(1 << 20)
    (served,) = pair.called
    passed.append(served.passed_bytes)
    pair.accept(served)
    await asyncio.sleep(0)
    passed.append(served.passed_bytes)
    pair.server.pause_writing()
    pair.server.answer(served, b"", [memoryview(bytes(5000))])
    passed.append(served.passed_bytes)
    pair.server.resume_writing()
    passed.append(served.passed_bytes)
    assert passed == [1000, 1000, 1000, 6000]
    assert served.outgoing is not None
    assert not served.incoming and not served.outgoing.buffers, "a round keeps its requests"
    pair.carry(1 << 20)
    await call


async def any_split(splits: list[int]) -> None:
    said = OPENING + frames.pack_call(1, "a", b"one", [5, 0]) + frames.pack_prefix(frames.Kind.BODY, 1, 0, 2)
    said += b"he" + frames.pack_call(2, "b", b"", []) + frames.pack_prefix(frames.Kind.BODY, 1, 0, 3) + b"llo"
    said += frames.pack_call(3, "c", b"x" * 60_000, [9]) + frames.pack_prefix(frames.Kind.ABORT, 3)
    packed = frames.pack_part(memoryview(b"ab" * 2000))
    said += frames.pack_call(4, "d", b"", [1, 4000]) + frames.pack_prefix(frames.Kind.BODY, 4, 0, 1) + b"z"
    said += frames.pack_prefix(frames.Kind.PACKED, 4, len(packed)) + packed
    called: list[ServedCall] = []
    server, rest, turn = serving(called), said, 0
    Wire(server)
    while rest:
        size = splits[turn % len(splits)]
        feed(server, rest[:size])
        rest, turn = rest[size:], turn + 1
    assert [call.method for call in called] == ["a", "b", "c", "d"]
    assert [bytes(part) for part in await called[0].accept()] == [b"hello", b""]
    assert [bytes(part) for part in await called[3].accept()] == [b"z", b"ab" * 2000]
    with pytest.raises(PeerGone, match="gave the call up"):
        await called[2].accept()
    assert not server.over


@settings(max_examples=settings.default.max_examples * 2 // 5, deadline=None)
@given(splits=SPLITS)
def test_any_split_of_the_bytes_says_the_same(splits: list[int]) -> None:
    run_virtual(any_split(splits))


async def any_bytes(junk: bytes, client: bool) -> None:
    end = ClientConnection("peer", b"", NetTimings()) if client else serving([])
    Wire(end)
    feed(end, OPENING + junk)
    if len(junk) >= frames.PREFIX_BYTES and junk[:2] != b"\x53\x57":
        assert isinstance(end.lost_because, BadAnswer)
        assert "not a frame" in end.lost_because.text


@settings(max_examples=2 * settings.default.max_examples, deadline=None)
@given(junk=st.binary(max_size=200), client=st.booleans())
def test_any_bytes_are_frames_or_end_the_stream(junk: bytes, client: bool) -> None:
    run_virtual(any_bytes(junk, client))


@pytest.mark.virtual_time
async def test_silence_is_noticed_at_both_ends_but_not_our_own_sleep() -> None:
    pair = Pair(NetTimings(silence_s=1.0))
    call = pair.call([2 * frames.WINDOW_BYTES])
    await asyncio.sleep(0)
    pair.carry(1000)
    pair.accept(pair.called[0])
    await asyncio.sleep(0)
    for end in (pair.client, pair.server):
        end._tick_at -= 60.0  # the process slept: bytes may be waiting to be read
        end.last_byte_at -= 60.0
    await asyncio.sleep(0.3)
    assert not pair.client.over and not pair.server.over
    with pytest.raises(PeerSilent, match="no sign of life for"):
        await call
    with pytest.raises(PeerSilent, match="its body stopped coming"):
        await pair.accepted[pair.called[0]]


@pytest.mark.virtual_time
async def test_after_our_own_sleep_silence_is_noticed_as_soon_as_before() -> None:
    """What waited was read first: it moved the last sign of life as far ahead as the process had slept."""
    pair = Pair(NetTimings(silence_s=1.0, send_stall_s=1.0))
    asked, took = pair.call([]), pair.call([])
    await asyncio.sleep(0)
    pair.carry(1000)
    pair.server.answer(pair.called[0], b"", [memoryview(bytes(10))])
    for end in (pair.client, pair.server):
        end._tick_at -= 3600.0
    pair.carry(8)
    pair.server.pause_writing()
    await asyncio.sleep(2.5)
    assert pair.server.lost_because is not None and "took no bytes" in pair.server.lost_because.text
    for call in (asked, took):
        assert call.done() and "no sign of life for" in str(call.exception())


@pytest.mark.virtual_time
async def test_how_long_p2pd_and_the_line_keep_a_body_is_found_out() -> None:
    pair = Pair()
    pair.call([300_000])
    await asyncio.sleep(0)
    gauges = pair.client.line.limiter.gauges
    assert gauges == {pair.client.waits}
    pair.carry(1 << 20)
    pair.carry(1 << 20)
    await asyncio.sleep(OBSERVED_EVERY_S)
    told, waited_s = pair.client.waits()
    assert (told, waited_s) == (pair.client.outbox.sent_bytes // SMOOTH, 0.0), "answered at once"
    pair.call([300_000])
    await asyncio.sleep(2.0)
    assert pair.client.waits()[1] == pytest.approx(2.0 - LATE_S), "not answered yet"
    pair.carry(1 << 20)
    pair.carry(1 << 20)
    await asyncio.sleep(10.0)
    assert pair.client.waits()[1] == pytest.approx(2.0 - LATE_S), "after so long"
    pair.client.fail(PeerGone("server", "the end of the test"))
    assert not gauges


@pytest.mark.virtual_time
@pytest.mark.parametrize("kind", ["direct", "in_memory"])
async def test_where_the_kernel_tells_or_nothing_waits_nobody_is_asked(kind: str) -> None:
    pair = Pair()
    setattr(pair.client, kind, True)
    pair.client.direct = True
    pair.call([300_000])
    await asyncio.sleep(0)
    assert not pair.client.line.limiter.gauges


@pytest.mark.virtual_time
async def test_who_says_that_it_was_asked_and_was_not_breaks_the_protocol() -> None:
    pair = Pair()
    feed(pair.client, frames.pack_prefix(frames.Kind.PONG, 0))
    assert isinstance(pair.client.lost_because, BadAnswer)


@pytest.mark.virtual_time
async def test_heartbeats_come_every_second_while_a_handler_works() -> None:
    pair = Pair()
    call = pair.call([])
    await asyncio.sleep(0)
    for _ in range(41):
        pair.carry(1000)
        await asyncio.sleep(0.25)
    assert not pair.client.over and not call.done()
    assert pair.client.line.received_bytes == 10 * frames.PREFIX_BYTES


@pytest.mark.virtual_time
async def test_what_waits_gets_the_fault_each_for_itself() -> None:
    pair = Pair()
    calls = [pair.call([]), pair.call([10])]
    await asyncio.sleep(0)
    pair.client.fail(PeerGone("server", "the connection broke"))
    faults = await asyncio.gather(*calls, return_exceptions=True)
    assert [str(fault) for fault in faults] == ["peer server: the connection broke"] * 2
    assert faults[0] is not faults[1]


@pytest.mark.virtual_time
async def test_a_caller_that_reads_slowly_cannot_have_us_keep_answers_without_end() -> None:
    """It reads a little every few seconds, so that it is never given up for taking no bytes."""
    server = ServerConnection(
        lambda link, message: ("caller", Traffic(most_peers=1).of("caller")),
        lambda link, call: link.answer(call, bytes(1000), []),
    )
    Wire(server)
    feed(server, OPENING)
    server.pause_writing()
    for number in range(1, MAX_WAITING + 1):
        feed(server, frames.pack_call(number, "manifest", b"", []))
        if number % 900 == 0:
            await asyncio.sleep(5.0)
            server._paused_since = asyncio.get_running_loop().time()
    await asyncio.sleep(0.1)
    assert not server.over and len(server.outbox.frames) == MAX_WAITING
    feed(server, frames.pack_call(MAX_WAITING + 1, "manifest", b"", []))
    await asyncio.sleep(0.1)
    assert isinstance(server.lost_because, PeerSilent) and server.outbox.empty


@pytest.mark.virtual_time
@pytest.mark.parametrize("called", [False, True])
async def test_neither_end_reads_more_frames_than_the_other_one_may_say(called: bool) -> None:
    pair, most = Pair(), CONTROL_BYTES_AT_ONCE / FRAME_BYTES
    end, wire = (pair.client, pair.to_server) if called else (pair.server, pair.to_client)
    wire.said = b""
    feed(end, frames.pack_prefix(frames.Kind.PING, 0) * int(2 * most))

    def answered() -> int:
        return len(wire.said) // frames.PREFIX_BYTES

    assert answered() <= most + 1, "a MB of signs of life costs 0.3 s of its time"
    await asyncio.sleep(1.0)
    assert 0 < answered() - most < 1.1 * CONTROL_BYTES_PER_S / FRAME_BYTES
    assert not end.over


@pytest.mark.virtual_time
async def test_of_streams_that_take_all_places_a_silent_strangers_makes_room_for_who_comes() -> None:
    """683 identities with three streams each shut all others out, for as long as they liked."""
    transport, gone = NetTransport(DaemonControl(Path("none")), Identity.generate()), list[str]()
    transport._most_links, transport.on_gone = 12, gone.append
    transport.invited = lambda peer: peer == "invited"

    def opens(peer: str) -> ServerConnection:
        link = transport._make_callee(peer)
        Wire(link)
        feed(link, b"\0")
        return link

    friend, works, speaks = opens("invited"), opens("works"), opens("speaks")
    work = asyncio.Event()

    async def serve(request: object) -> Answer:
        await work.wait()
        return Answer(b"")

    transport.serve("work", serve)
    feed(works, frames.pack_call(1, "work", b"", ()))
    await asyncio.sleep(5.0)
    crowd = [opens(f"stranger {number}") for number in range(9)]
    for number in range(9, 60):
        await asyncio.sleep(0.1)
        feed(speaks, frames.pack_prefix(Kind.PING, 0))
        crowd.append(opens(f"stranger {number}"))
        assert not crowd[-1].over, "the one that comes has a place"
    await asyncio.sleep(0.1)
    assert not (friend.over or works.over or speaks.over)
    assert len(transport._incoming) <= 12
    assert not gone, "whose stream made room may live"
    friend.fail(PeerGone("invited", "it ended"))
    await asyncio.sleep(0.1)
    assert gone == ["invited"]
    work.set()
    await transport._tasks.close()


@pytest.mark.virtual_time
async def test_a_crowd_that_breaks_the_protocol_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of each identity a line a minute was written, and identities cost nothing: a GB a day."""
    transport = NetTransport(DaemonControl(Path("none")), Identity.generate())
    for number in range(100):
        link = transport._make_callee(f"stranger {number}")
        Wire(link)
        feed(link, b"\0" + bytes(frames.PREFIX_BYTES))
        await asyncio.sleep(0.01)
    assert caplog.text.count("closed a stream that broke the protocol") == 10


@pytest.mark.virtual_time
async def test_streams_that_one_opens_in_one_moment_are_no_more_than_one_by_one() -> None:
    """Only the first of them was ended, again and again, until it had ended: the others stayed."""
    transport, gone = NetTransport(DaemonControl(Path("none")), Identity.generate()), list[str]()
    transport._most_links, transport.on_gone = 6, gone.append

    def opens(peer: str) -> ServerConnection:
        link = transport._make_callee(peer)
        Wire(link)
        feed(link, b"\0")
        return link

    others = [opens("calm"), opens("still")]
    crowd = [opens("hasty") for _ in range(50)]
    assert [link.over for link in crowd] == [True] * 47 + [False] * 3
    await asyncio.sleep(0.1)
    assert set(transport._incoming) == {*others, *crowd[-3:]} and not gone


class Narrow(Wire):
    """It takes so many bytes a second, and asks to pause while it has any left."""

    def __init__(self, end: Connection, bytes_per_s: float) -> None:
        self.bytes_per_s, self.taken, self.left, self.free_at = bytes_per_s, 0, 0, 0.0
        super().__init__(end)

    def write(self, data: Any) -> None:
        loop, size = asyncio.get_running_loop(), len(data)
        self.left += size
        if self.end._paused_since is None:
            self.end.pause_writing()
        if self.bytes_per_s:
            self.free_at = max(loop.time(), self.free_at) + size / self.bytes_per_s
            loop.call_at(self.free_at, self.takes, size)

    def takes(self, size: int) -> None:
        self.taken, self.left = self.taken + size, self.left - size
        if not (self.left or self.end.over):
            self.end.resume_writing()


class Source:
    """A peer that gives chunks of 1 MiB to anybody, over streams that a test narrows."""

    def __init__(self) -> None:
        self.transport = NetTransport(DaemonControl(Path("none")), Identity.generate())
        self.chunk, self.number = memoryview(bytes(1 << 20)), 0
        self.transport.serve("chunk", self.serve)

    async def serve(self, request: object) -> Answer:
        return Answer(b"", [self.chunk])

    def opens(self, peer: str, bytes_per_s: float) -> tuple[ServerConnection, Narrow]:
        link = self.transport._make_callee(peer)
        wire = Narrow(link, bytes_per_s)
        feed(link, b"\0")
        return link, wire

    async def ask(self, link: ServerConnection) -> int | None:
        """The number of a call whose chunk is on its way; None: there is no room for it."""
        number = self.number = self.number + 1
        feed(link, frames.pack_call(number, "chunk", b"", ()))
        for _ in range(3):
            await asyncio.sleep(0)
        return number if (call := link._calls.get(number)) is not None and call.unread_bytes else None

    async def read(self, peer: str, bytes_per_s: float, lasts_s: float) -> int:
        """How many MiB one gets that asks for six chunks at a time, as downloads do."""
        link, wire = self.opens(peer, bytes_per_s)

        async def work() -> None:
            while True:
                if (number := await self.ask(link)) is not None:
                    while number in link._calls:
                        await asyncio.sleep(0.1)
                else:
                    await asyncio.sleep(1.0)

        workers = [asyncio.ensure_future(work()) for _ in range(6)]
        await asyncio.sleep(lasts_s)
        assert not link.over
        for worker in workers:
            worker.cancel()
        link.fail(PeerGone(peer, "it has all"))
        return wire.taken >> 20

    async def stare(self, peer: str, held_s: float) -> None:
        """Have as much held as there is room for, read nothing, and do the same again."""
        while True:
            link, _ = self.opens(peer, 0.0)
            for _ in range(64):
                if link.over or await self.ask(link) is None:
                    break
            await asyncio.sleep(held_s)
            link.fail(PeerGone(peer, "it opens another one"))

    @property
    def unread_bytes(self) -> int:
        return self.transport.lines.unread_bytes


@pytest.mark.virtual_time
@pytest.mark.parametrize("held_s", [1.5, 4.0, 60.0])
async def test_a_crowd_that_reads_nothing_fills_no_memory_and_keeps_no_others_out(held_s: float) -> None:
    """Each might have 64 MiB held for it, however many they were."""
    source, most = Source(), 0
    slow = asyncio.ensure_future(source.read("slow", 80_000.0, 17.0))
    await asyncio.sleep(1.0)
    crowd = [asyncio.ensure_future(source.stare(f"stranger {n}", held_s)) for n in range(600)]
    for _ in range(60):
        await asyncio.sleep(0.1)
        most = max(most, source.unread_bytes)
    assert 0.9 * UNREAD_BYTES_OF_ALL < most <= UNREAD_BYTES_OF_ALL
    newcomer = await source.read("newcomer", 1_250_000.0, 10.0)
    assert (newcomer >= 9, await slow) == (True, 1), "as many MiB as their lines carry, about"
    for one in crowd:
        one.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)


@pytest.mark.virtual_time
async def test_one_that_reads_nothing_has_a_ninth_of_all_room() -> None:
    """It could ask for 256 chunks on each of three streams, and take none: 768 MiB for each identity."""
    source, found = Source(), list[int | None]()
    for _ in range(2):
        link, _ = source.opens("stranger", 0.0)
        found += [await source.ask(link) for _ in range(64)]
    assert None not in found[:57] and not any(found[57:]) and source.unread_bytes == 57 << 20
    assert await source.ask(source.opens("other", 0.0)[0])


@pytest.mark.virtual_time
async def test_a_hundred_readers_are_given_what_their_lines_carry_however_slow_these_are() -> None:
    """All of them together want more than may be held at once."""
    source, rates = Source(), [80_000.0 * 1.03**n for n in range(100)]
    reading = [asyncio.ensure_future(source.read(str(n), rate, 15.0)) for n, rate in enumerate(rates)]
    await asyncio.sleep(1.0)
    assert source.unread_bytes > 0.8 * UNREAD_BYTES_OF_ALL
    for rate, got in zip(rates, await asyncio.gather(*reading), strict=True):
        assert got == int(15.0 * rate * 0.9999) >> 20
    assert source.unread_bytes == 0


@pytest.mark.virtual_time
@pytest.mark.parametrize(("bytes_per_s", "rests"), [(1_250_000.0, False), (0.0, True)])
async def test_only_who_takes_nothing_of_what_it_gives_up_has_to_wait(
    bytes_per_s: float, rests: bool
) -> None:
    """At its end a download gives up what another source was faster with."""
    source = Source()
    crowd = [source.opens(f"stranger {n}", 0.0)[0] for n in range(300)]
    for link in crowd:
        await source.ask(link)
    link, _ = source.opens("newcomer", bytes_per_s)
    numbers = [await source.ask(link) for _ in range(6)]
    await asyncio.sleep(2.0)
    assert numbers[-1] in link._calls
    feed(link, frames.pack_prefix(Kind.ABORT, numbers[-1] or 0))
    assert (await source.ask(link) is None) == rests


@pytest.mark.virtual_time
async def test_who_reads_slowly_has_not_to_wait_where_our_p2pd_ended() -> None:
    source = Source()
    for number in range(300):
        await source.ask(source.opens(f"stranger {number}", 0.0)[0])
    link, _ = source.opens("slow", 0.0)
    await source.ask(link)
    await asyncio.sleep(2.0)
    source.transport.daemon_died(for_good=False)
    source.transport._dialer.resume()
    assert link.over
    for number in range(300):
        await source.ask(source.opens(f"more {number}", 0.0)[0])
    assert await source.ask(source.opens("slow", 0.0)[0]) is not None


@pytest.mark.virtual_time
async def test_for_a_call_that_was_given_up_no_stream_makes_way() -> None:
    source, works = Source(), asyncio.Event()
    crowd = [source.opens(f"stranger {n}", 0.0)[0] for n in range(UNREAD_BYTES_OF_ALL >> 20)]
    for link in crowd:
        assert await source.ask(link)
    await asyncio.sleep(6.0)

    async def serve(request: object) -> Answer:
        await works.wait()
        return Answer(b"", [source.chunk])

    source.transport.serve("chunk", serve)
    for gives_up in (True, False):
        link, _ = source.opens("newcomer", 0.0)
        await source.ask(link)
        if gives_up:
            feed(link, frames.pack_prefix(Kind.ABORT, source.number))
        works.set()
        await asyncio.sleep(0.1)
        works.clear()
        assert any(one.over for one in crowd) is not gives_up


@pytest.mark.virtual_time
async def test_who_takes_nothing_has_few_large_headers_held() -> None:
    """A keeper says in 48 kB what is saved: eight identities had 900 MB of that wait for them."""
    transport, told = NetTransport(DaemonControl(Path("none")), Identity.generate()), Answer(bytes(48_000))

    async def serve(request: object) -> Answer:
        return told

    transport.serve("saved", serve)
    transport.serve("work", serve)
    for method, takes, most in (("saved", False, 400_000), ("saved", True, 0), ("work", False, 10_000_000)):
        link = transport._make_callee(method)
        wire = Wire(link)
        feed(link, b"\0")
        if not takes:
            link.pause_writing()
        feed(link, b"".join(frames.pack_call(number, method, b"", ()) for number in range(1, 201)))
        await asyncio.sleep(0.1)
        assert sum(map(len, link.outbox.frames)) <= most
        assert not takes or len(wire.said) > 200 * 48_000, "who takes them has them all"
        link.resume_writing()
        assert link.outbox.empty and not link.over


@pytest.mark.virtual_time
async def test_calls_that_wait_here_hold_few_long_headers() -> None:
    """Each identity had 16 MiB of them held, for as long as its calls waited."""
    source, go_on = Source(), asyncio.Event()

    async def waits(request: object) -> Answer:
        await go_on.wait()
        return Answer(b"")

    source.transport.serve("state", waits)
    link, _ = source.opens("stranger", 1_000_000.0)
    feed(link, b"".join(frames.pack_call(n, "state", bytes(60_000), ()) for n in range(1, 257)))
    await asyncio.sleep(20.0)
    assert sum(len(call.header) for call in link._calls.values()) == 60_000 * (EARLY_BYTES // 60_000)
    other, _ = source.opens("another", 1_000_000.0)
    feed(other, frames.pack_call(1, "state", bytes(60_000), ()))
    assert other.busy
    go_on.set()
    await asyncio.sleep(1.0)
    assert not link.busy and not other.busy and source.transport.lines.held_bytes == 0


@pytest.mark.virtual_time
async def test_a_call_is_answered_where_a_crowd_has_all_room_for_bodies_and_headers() -> None:
    """Two hundred whose calls waited had those of all others refused."""
    source, heard = Source(), list[object]()

    async def answers(request: object) -> Answer:
        heard.append(request)
        return Answer(b"")

    source.transport.serve("report", answers)
    source.transport.lines.of("crowd").holds(EARLY_BYTES_OF_ALL)
    link, _ = source.opens("replica", 1_000_000.0)
    feed(link, frames.pack_call(1, "report", bytes(300), ()))
    await asyncio.sleep(1.0)
    assert heard and not link.busy
