"""Calls over sockets: what peers.ports promises, under faults and strangers. A relay plays p2pd."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import tracemalloc
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from peers.net.bandwidth import Line, Traffic
from peers.net.connection import ServedCall, ServerConnection
from peers.net.direct.paths import DirectOptions
from peers.net.identity import MAX_ADDRESSED
from peers.net.timings import NetTimings
from peers.net.transport import MAX_LINKS_PER_PEER, NetTransport
from peers.ports import Answer, NetworkPath, Request
from swarm.errors import (
    BadAnswer,
    Busy,
    Leaving,
    NotReady,
    OtherVersion,
    PeerGone,
    PeerSilent,
    Refused,
    Stale,
)
from swarm.wire import frames
from swarm.wire.frames import Kind, pack_prefix
from tests.net.relay import RawCallee, RawCaller, Relay, direct_links, memory_links, open_links

MIB = 1 << 20


@pytest_asyncio.fixture
async def relay(tmp_path: Path) -> AsyncIterator[Relay]:
    relay = Relay(tmp_path)
    yield relay
    await relay.close()
    await asyncio.sleep(0)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not [task for task in left if "fixture" not in repr(task)], left


OPTIONS = {
    "p2pd": {},
    "direct": {"direct": DirectOptions(after_bytes=0, memory=False)},
    "memory": {"direct": DirectOptions(after_bytes=0, host=None)},
}


@pytest_asyncio.fixture(params=OPTIONS)
async def pair(request: pytest.FixtureRequest, relay: Relay) -> tuple[NetTransport, NetTransport]:
    """(caller, callee), on each path; the callee echoes."""
    options = OPTIONS[request.param]
    caller, callee = await relay.add(**options), await relay.add(**options)
    callee.serve("echo", echo, max_body_bytes=256 * MIB)
    if options:
        await caller.call(callee.peer_id, "echo", b"")
        await until(lambda: (direct_links(caller), open_links(callee)) == ((1, 0), (0, 1)))
    assert memory_links(caller) == ((1, 0) if request.param == "memory" else (0, 0))
    return caller, callee


QUICK = NetTimings(tick_s=0.0125, alive_every_s=0.05, send_stall_s=0.5)
"""Heartbeats and limits twenty times as fast."""
IMPATIENT = replace(QUICK, silence_s=0.2)


async def echo(request: Request) -> Answer:
    return Answer(request.header, await request.accept())


async def take_all(request: Request) -> Answer:
    await request.accept()
    return Answer(b"")


class Gate:
    """A handler that waits to be let go."""

    def __init__(self) -> None:
        self.entered, self.commit, self.done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def __call__(self, request: Request) -> Answer:
        self.entered.set()
        await self.commit.wait()
        self.done.set()
        return Answer(b"done")


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "never came true"
        await asyncio.sleep(0.005)


# -- what is promised --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes", [[], [0], [1], [0, 5, 0], [frames.CHUNK_BYTES] * 2, [3 * MIB, 1, 700_001], [7] * 500]
)
async def test_header_and_buffers_arrive_as_they_were_sent(
    pair: tuple[NetTransport, NetTransport], sizes: list[int]
) -> None:
    caller, callee = pair
    body = [os.urandom(size) for size in sizes]
    answer = await caller.call(callee.peer_id, "echo", b"head", body, max_answer_bytes=sum(sizes))
    assert answer.header == b"head"
    assert [bytes(part) for part in answer.body] == body


async def test_what_a_line_can_do_is_seen_from_what_passes(
    relay: Relay, pair: tuple[NetTransport, NetTransport]
) -> None:
    """A busy machine makes it look slower, never faster."""
    caller, callee = pair
    if callee.peer_id in caller.lines:
        caller.lines.of(callee.peer_id)._round_trips_s.clear()  # of before it took so long
    relay.latency_s = 0.02
    for _ in range(3):
        await caller.call(callee.peer_id, "echo", b"small")
    assert 0.0399 <= caller.lines[callee.peer_id].rtt_s < 1.0
    assert caller.lines[callee.peer_id].bandwidth_bps == 0.0, "nothing large has passed"
    relay.latency_s, relay.bandwidth_bps = 0.0, 8e6
    for _ in range(3):
        await caller.call(callee.peer_id, "echo", b"", [bytes(200_000)], max_answer_bytes=200_000)
    # What lies in the sockets' buffers comes at once.
    for line in (caller.lines[callee.peer_id], callee.lines[caller.peer_id]):
        assert 0.0 < line.bandwidth_bps < 1.3 * 8e6
    assert 0.0399 <= caller.lines[callee.peer_id].rtt_s < 1.0, "a large call tells nothing of it"


async def test_buffers_may_be_of_any_shape_and_come_out_writable(
    pair: tuple[NetTransport, NetTransport],
) -> None:
    caller, callee = pair
    shaped = memoryview(bytearray(range(24))).cast("B", (4, 6))
    answer = await caller.call(callee.peer_id, "echo", b"", [shaped, bytearray(2)], max_answer_bytes=26)
    (first, second) = answer.body
    assert bytes(first) == bytes(range(24))
    second[0] = 7  # type: ignore[index]


async def test_many_calls_share_one_stream_and_do_not_mix(pair: tuple[NetTransport, NetTransport]) -> None:
    caller, callee = pair
    bodies = [os.urandom(1000 + 9000 * n) for n in range(60)]
    answers = await asyncio.gather(
        *(caller.call(callee.peer_id, "echo", b"%d" % n, [body], max_answer_bytes=MIB)
          for n, body in enumerate(bodies))
    )  # fmt: skip
    assert [answer.header for answer in answers] == [b"%d" % n for n in range(60)]
    assert [bytes(answer.body[0]) for answer in answers] == bodies
    assert open_links(caller) == (1, 0)
    assert open_links(callee) == (0, 1)


async def test_the_handler_sees_who_calls_and_the_sizes_before_it_accepts(
    pair: tuple[NetTransport, NetTransport],
) -> None:
    caller, callee = pair

    async def look(request: Request) -> Answer:
        return Answer(f"{request.peer} {list(request.body_sizes)}".encode())

    callee.serve("look", look, max_body_bytes=100 * MIB)
    answer = await caller.call(callee.peer_id, "look", b"", [bytes(50 * MIB), b"abc"])
    assert answer.header.decode() == f"{caller.peer_id} [{50 * MIB}, 3]"


async def test_a_refusal_stops_the_body_early(pair: tuple[NetTransport, NetTransport]) -> None:
    caller, callee = pair

    async def full(request: Request) -> Answer:
        raise Busy("no room", retry_after_s=0.5)

    callee.serve("full", full, max_body_bytes=100 * MIB)
    with pytest.raises(Busy, match="no room") as caught:
        await caller.call(callee.peer_id, "full", b"", [bytes(50 * MIB)])
    assert caught.value.retry_after_s == 0.5
    assert caller.lines[callee.peer_id].sent_bytes <= frames.WINDOW_BYTES + frames.AHEAD_BYTES + 1000
    assert (await caller.call(callee.peer_id, "echo", b"next")).header == b"next"


async def test_errors_come_back_as_they_were_raised(
    pair: tuple[NetTransport, NetTransport], caplog: pytest.LogCaptureFixture
) -> None:
    caller, callee = pair
    raised: list[Exception] = [
        NotReady("at 3", version=3), Stale("at 5", version=5), Refused("wrong run"), ZeroDivisionError("oops")
    ]  # fmt: skip

    async def fail(request: Request) -> Answer:
        raise raised[int(request.header)]

    callee.serve("fail", fail)
    with pytest.raises(NotReady) as not_ready:
        await caller.call(callee.peer_id, "fail", b"0")
    assert not_ready.value.version == 3
    with pytest.raises(Stale) as stale:
        await caller.call(callee.peer_id, "fail", b"1")
    assert stale.value.version == 5
    with pytest.raises(Refused, match="wrong run"):
        await caller.call(callee.peer_id, "fail", b"2")
    for _ in range(3):
        with pytest.raises(Refused, match="internal error: ZeroDivisionError: oops"):
            await caller.call(callee.peer_id, "fail", b"3")
    logged = [record for record in caplog.records if record.exc_info]
    assert len(logged) == 1, "who has a handler fail again and again fills no disk with pages"
    assert logged[0].message.startswith("the handler of 'fail' failed for peer ")


async def test_the_limits_of_a_method_are_kept_for_it(pair: tuple[NetTransport, NetTransport]) -> None:
    caller, callee = pair
    callee.serve("small", echo, max_body_bytes=10)
    with pytest.raises(Refused, match="no such method: 'nothing'"):
        await caller.call(callee.peer_id, "nothing", b"", [bytes(5 * MIB)])
    with pytest.raises(Refused, match="a body of 11 bytes; 'small' takes 10"):
        await caller.call(callee.peer_id, "small", b"", [bytes(11)])
    with pytest.raises(BadAnswer, match="an answer of 9 bytes; at most 8 fit"):
        await caller.call(callee.peer_id, "echo", b"", [bytes(9)], max_answer_bytes=8)
    assert (await caller.call(callee.peer_id, "echo", b"still there")).header == b"still there"


async def test_of_endless_identities_the_addresses_are_forgotten(relay: Relay) -> None:
    transport = await relay.add()
    for number in range(MAX_ADDRESSED):
        transport.addresses.learn(f"peer {number}", ["/ip4/1.2.3.4/tcp/5"])
    for peer in ("peer 0", "one more"):
        transport.addresses.learn(peer, ["/ip4/1.2.3.4/tcp/6"])
    known = transport.addresses.latest(MAX_ADDRESSED + 1)
    assert len(known) == MAX_ADDRESSED and known[:3] == ["one more", "peer 0", f"peer {MAX_ADDRESSED - 1}"]
    assert not transport.addresses.of("peer 1") and transport.addresses.of("peer 0") == (
        "/ip4/1.2.3.4/tcp/6",
    )


async def test_small_calls_pass_a_large_body(pair: tuple[NetTransport, NetTransport]) -> None:
    caller, callee = pair
    large = asyncio.ensure_future(
        caller.call(callee.peer_id, "echo", b"", [bytes(64 * MIB)], max_answer_bytes=64 * MIB)
    )
    await until(lambda: caller.lines.get(callee.peer_id, NetworkPath()).sent_bytes > 4 * MIB)
    for _ in range(5):
        await caller.call(callee.peer_id, "echo", b"quick")
    assert not large.done()
    assert (await large).body[0].nbytes == 64 * MIB  # type: ignore[union-attr]


async def test_bodies_alike_come_one_after_the_other_and_small_ones_first(
    relay: Relay, pair: tuple[NetTransport, NetTransport]
) -> None:
    caller, callee = pair
    relay.bandwidth_bps = 8e7
    came: dict[bytes, int] = {}

    async def take(request: Request) -> Answer:
        await request.accept()
        came[request.header] = callee.lines[caller.peer_id].received_bytes
        return Answer(b"")

    callee.serve("take", take, max_body_bytes=4 * MIB)
    sizes = {b"first": 2 * MIB} | {b"%d" % n: MIB // 2 for n in range(6)} | {b"small": 100_000}
    calls = (caller.call(callee.peer_id, "take", name, [bytes(size)]) for name, size in sizes.items())
    await asyncio.gather(*calls)
    assert list(came) == [b"small", b"0", b"1", b"2", b"3", b"4", b"5", b"first"]
    assert came[b"0"] < sum(sizes.values()) / 2, "others had to wait for it"


async def test_all_that_a_peer_sends_tells_of_its_line(
    relay: Relay, pair: tuple[NetTransport, NetTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its calls and its answers to ours share the line: a body that waits for both is no slow line."""
    caller, callee = pair
    told: list[int] = []
    monkeypatch.setattr(Line, "received", lambda _, size, brought, took_s: told.append(brought))
    relay.bandwidth_bps = 8e7
    body = [os.urandom(MIB // 2)]
    callee.serve("take", take_all, max_body_bytes=MIB)
    await asyncio.gather(*(caller.call(callee.peer_id, "take", b"", body) for _ in range(6)))
    assert max(told) > 4 * MIB / 2
    told.clear()
    caller.serve("echo", echo, max_body_bytes=MIB)
    await asyncio.gather(
        *(caller.call(callee.peer_id, "take", b"", body) for _ in range(6)),
        *(callee.call(caller.peer_id, "echo", b"", body, max_answer_bytes=MIB) for _ in range(6)),
    )
    # Of a direct connection more lies in the kernel when the first header comes.
    assert max(told) > (7 * MIB / 2 if direct_links(caller) == (0, 0) else 2 * MIB)


async def test_a_large_body_lets_no_endless_stream_of_small_ones_pass(
    relay: Relay, pair: tuple[NetTransport, NetTransport]
) -> None:
    caller, callee = pair
    relay.bandwidth_bps = 8e7
    order: list[bytes] = []

    async def take(request: Request) -> Answer:
        await request.accept()
        order.append(request.header)
        return Answer(b"")

    async def stream() -> None:
        while b"large" not in order and len(order) < 400:
            await caller.call(callee.peer_id, "take", b"small", [bytes(MIB // 4)])

    callee.serve("take", take, max_body_bytes=MIB)
    small = [asyncio.ensure_future(stream()) for _ in range(6)]
    await until(lambda: len(order) > 6)
    before = len(order)
    await caller.call(callee.peer_id, "take", b"large", [bytes(MIB)])
    assert order.index(b"large") - before < 24, "4 as large as it, those on their way, and some more"
    await asyncio.gather(*small)


# -- cancelled, late, lost ---------------------------------------------------------------------------------


async def test_a_cancelled_call_drops_the_answer_but_not_the_work(
    pair: tuple[NetTransport, NetTransport],
) -> None:
    caller, callee = pair
    gate = Gate()
    callee.serve("gate", gate)
    call = asyncio.ensure_future(caller.call(callee.peer_id, "gate", b""))
    await gate.entered.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    gate.commit.set()
    await asyncio.wait_for(gate.done.wait(), 5)
    assert (await caller.call(callee.peer_id, "echo", b"on")).header == b"on"


async def test_a_call_given_up_while_its_body_is_awaited_ends_the_wait(
    relay: Relay, pair: tuple[NetTransport, NetTransport]
) -> None:
    caller, callee = pair
    errors: list[str] = []
    accepting = asyncio.Event()

    async def take(request: Request) -> Answer:
        accepting.set()
        try:
            await request.accept()
        except PeerGone as error:
            errors.append(error.text)
            raise
        return Answer(b"")

    callee.serve("take", take, max_body_bytes=256 * MIB)
    call = asyncio.ensure_future(caller.call(callee.peer_id, "take", b"", [bytes(128 * MIB)]))
    await accepting.wait()
    call.cancel()
    await until(lambda: bool(errors))
    assert "gave the call up" in errors[0]
    assert (await caller.call(callee.peer_id, "echo", b"on")).header == b"on"


async def test_a_deadline_ends_a_call_that_is_worked_on(pair: tuple[NetTransport, NetTransport]) -> None:
    caller, callee = pair
    gate = Gate()
    callee.serve("gate", gate)
    callee.serve("echo", echo)
    await caller.call(callee.peer_id, "echo", b"")  # the dial is not in the deadline
    with pytest.raises(PeerSilent, match=r"no answer to 'gate' within 0\.3 s"):
        await caller.call(callee.peer_id, "gate", b"", deadline_s=0.3)
    gate.commit.set()
    await gate.done.wait()


async def test_slow_work_is_kept_alive_by_heartbeats(relay: Relay) -> None:
    caller, callee = await relay.add(timings=IMPATIENT), await relay.add(timings=QUICK)

    async def slow(request: Request) -> Answer:
        await asyncio.sleep(0.8)
        return Answer(b"done")

    callee.serve("slow", slow)
    assert (await caller.call(callee.peer_id, "slow", b"")).header == b"done"


async def test_a_stopped_peer_is_silent_for_all_its_callers(relay: Relay) -> None:
    caller, callee = await relay.add(timings=IMPATIENT), await relay.add(timings=QUICK)
    gate = Gate()
    callee.serve("gate", gate)
    calls = [asyncio.ensure_future(caller.call(callee.peer_id, "gate", b"")) for _ in range(3)]
    await gate.entered.wait()
    relay.freeze(callee.peer_id)
    for call in calls:
        with pytest.raises(PeerSilent, match=r"no sign of life for 0\.\d s"):
            await call
    assert open_links(caller) == (0, 0)
    await until(lambda: relay.disconnects == [(caller.peer_id, callee.peer_id)])
    gate.commit.set()


async def test_sending_to_a_stopped_peer_ends_too(relay: Relay) -> None:
    caller, callee = await relay.add(timings=IMPATIENT), await relay.add(timings=QUICK)
    callee.serve("echo", echo, max_body_bytes=256 * MIB)
    await caller.call(callee.peer_id, "echo", b"")
    relay.freeze(callee.peer_id)
    with pytest.raises(PeerSilent, match="no sign of life"):
        await caller.call(callee.peer_id, "echo", b"", [bytes(64 * MIB)])


async def test_a_stopped_caller_does_not_hold_a_handler_that_waits_for_its_body(relay: Relay) -> None:
    caller, callee = await relay.add(timings=QUICK), await relay.add(timings=IMPATIENT)
    seen: list[BaseException] = []

    async def take(request: Request) -> Answer:
        relay.freeze(caller.peer_id)
        try:
            await request.accept()
        except (PeerSilent, PeerGone) as error:
            seen.append(error)
            raise
        return Answer(b"")

    callee.serve("take", take, max_body_bytes=256 * MIB)
    call = asyncio.ensure_future(caller.call(callee.peer_id, "take", b"", [bytes(64 * MIB)]))
    await until(lambda: bool(seen))
    assert isinstance(seen[0], PeerSilent)
    assert "its body stopped coming" in seen[0].text
    call.cancel()


async def test_an_answer_that_nobody_takes_does_not_stay(relay: Relay) -> None:
    caller, callee = await relay.add(timings=QUICK), await relay.add(timings=QUICK)

    async def large(request: Request) -> Answer:
        relay.freeze(caller.peer_id)
        return Answer(b"", [bytes(64 * MIB)])

    callee.serve("large", large)
    call = asyncio.ensure_future(caller.call(callee.peer_id, "large", b"", max_answer_bytes=64 * MIB))
    await until(lambda: open_links(callee) == (0, 1))
    await until(lambda: open_links(callee) == (0, 0))
    call.cancel()


async def test_a_broken_stream_fails_its_calls_at_once_and_the_next_one_dials(
    relay: Relay, pair: tuple[NetTransport, NetTransport]
) -> None:
    caller, callee = pair
    gate = Gate()
    callee.serve("gate", gate)
    call = asyncio.ensure_future(caller.call(callee.peer_id, "gate", b""))
    await gate.entered.wait()
    relay.sever(callee.peer_id)
    with pytest.raises(PeerGone, match="the connection broke"):
        await call
    gate.commit.set()
    assert (await caller.call(callee.peer_id, "echo", b"again")).header == b"again"
    assert gate.done.is_set()


async def test_a_peer_that_cannot_be_reached_is_gone(relay: Relay) -> None:
    caller = await relay.add()
    with pytest.raises(PeerGone, match="cannot be reached: all dials failed"):
        await caller.call("12D3KooWNobody", "echo", b"")


async def test_a_peer_that_does_not_answer_the_dial_is_gone(relay: Relay) -> None:
    caller = await relay.add(timings=NetTimings(dial_s=0.1))
    callee = await relay.add()

    async def nothing(caller: str, callee: str, far: socket.socket) -> None:
        with far:
            await asyncio.get_running_loop().create_future()

    relay.carry = nothing  # type: ignore[method-assign]
    with pytest.raises(PeerGone, match=r"cannot be reached: no connection within 0\.1 s"):
        await caller.call(callee.peer_id, "echo", b"")


async def test_closing_delivers_what_was_answered_and_fails_the_rest(
    pair: tuple[NetTransport, NetTransport],
) -> None:
    caller, callee = pair
    gate = Gate()
    callee.serve("gate", gate)
    waiting = asyncio.ensure_future(caller.call(callee.peer_id, "gate", b""))
    await gate.entered.wait()
    answered = asyncio.Event()

    async def bye(request: Request) -> Answer:
        answered.set()
        return Answer(b"bye", [bytes(3 * MIB)])

    callee.serve("bye", bye)
    last = asyncio.ensure_future(caller.call(callee.peer_id, "bye", b"", max_answer_bytes=3 * MIB))
    await answered.wait()
    await callee.close()
    assert (await last).header == b"bye"
    with pytest.raises(PeerGone):
        await waiting
    with pytest.raises(PeerGone, match="we are closing"):
        await callee.call(caller.peer_id, "echo", b"")


async def test_when_our_own_p2pd_dies_calls_say_so(pair: tuple[NetTransport, NetTransport]) -> None:
    caller, callee = pair
    await caller.call(callee.peer_id, "echo", b"")
    caller.daemon_died(for_good=True)
    with pytest.raises(PeerGone, match="cannot be reached: our own p2pd ended"):
        await caller.call(callee.peer_id, "echo", b"")


async def test_while_our_own_p2pd_is_being_replaced_calls_wait_and_blame_nobody(
    relay: Relay,
) -> None:
    caller, callee = await relay.add(timings=NetTimings(revival_s=0.05)), await relay.add()
    callee.serve("echo", echo)
    await caller.call(callee.peer_id, "echo", b"")
    caller.daemon_died(for_good=False)
    call = asyncio.ensure_future(caller.call(callee.peer_id, "echo", b"still here"))
    await asyncio.sleep(0)
    await caller.daemon_is_back()
    assert (await call).header == b"still here"
    caller.daemon_died(for_good=False)
    with pytest.raises(PeerGone, match="cannot be reached: our own p2pd ended"):
        await caller.call(callee.peer_id, "echo", b"")


async def test_calls_leave_the_relay_when_a_direct_path_is_found_and_those_under_way_end_on_it(
    relay: Relay,
) -> None:
    caller, callee = await relay.add(timings=NetTimings(punched_after_s=(0.01,) * 500)), await relay.add()
    gone: list[str] = []
    callee.on_gone = gone.append
    go_on = asyncio.Event()

    async def wait(request: Request) -> Answer:
        await go_on.wait()
        return Answer(b"done")

    async def echo(request: Request) -> Answer:
        return Answer(request.header)

    callee.serve("wait", wait)
    callee.serve("echo", echo)
    caller.addresses.learn(callee.peer_id, [f"/ip4/44.1.2.3/tcp/1/p2p/{caller.peer_id}/p2p-circuit"])
    long_one = asyncio.create_task(caller.call(callee.peer_id, "wait", b""))
    assert (await caller.call(callee.peer_id, "echo", b"relayed")).header == b"relayed"
    assert relay.dials == [callee.peer_id]
    relay.direct.add(callee.peer_id)
    await until(lambda: relay.dials == [callee.peer_id] * 2 and open_links(callee) == (0, 2))
    assert (await caller.call(callee.peer_id, "echo", b"direct")).header == b"direct"
    go_on.set()
    assert (await long_one).header == b"done"
    await until(lambda: open_links(callee) == (0, 1))
    assert (await caller.call(callee.peer_id, "echo", b"still")).header == b"still"
    assert relay.dials == [callee.peer_id] * 2 and not gone


async def test_a_link_that_calls_have_opened_anew_is_not_lost_to_the_direct_one(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller, callee = await relay.add(timings=NetTimings(punched_after_s=(0.01,) * 500)), await relay.add()
    callee.serve("echo", lambda request: asyncio.sleep(0, Answer(request.header)))
    caller.addresses.learn(callee.peer_id, [f"/ip4/44.1.2.3/tcp/1/p2p/{caller.peer_id}/p2p-circuit"])
    await caller.call(callee.peer_id, "echo", b"relayed")
    opening, go_on, open_stream = asyncio.Event(), asyncio.Event(), caller._dialer.control.open_stream

    async def slow_once(*args: Any) -> Any:
        if not opening.is_set():
            opening.set()
            await go_on.wait()
        return await open_stream(*args)

    monkeypatch.setattr(caller._dialer.control, "open_stream", slow_once)
    relay.direct.add(callee.peer_id)
    await opening.wait()
    relay.sever(callee.peer_id)
    await until(lambda: open_links(caller) == (0, 0))
    await caller.call(callee.peer_id, "echo", b"again")
    kept = caller._dialer.links[callee.peer_id]
    go_on.set()
    await until(lambda: relay.dials == [callee.peer_id] * 3 and not caller._tasks._tasks)
    assert caller._dialer.links == {callee.peer_id: kept}
    await until(lambda: open_links(callee) == (0, 1))
    assert (await caller.call(callee.peer_id, "echo", b"still")).header == b"still"


async def test_a_peer_that_is_called_directly_is_dialled_once(relay: Relay) -> None:
    caller, callee = await relay.add(timings=NetTimings(punched_after_s=(0.0,) * 5)), await relay.add()
    callee.serve("echo", lambda request: asyncio.sleep(0, Answer(request.header)))
    relay.direct.add(callee.peer_id)
    caller.addresses.learn(callee.peer_id, [f"/ip4/44.1.2.3/tcp/1/p2p/{caller.peer_id}/p2p-circuit"])
    for _ in range(20):
        await caller.call(callee.peer_id, "echo", b"")
    assert relay.dials == [callee.peer_id]


async def test_a_long_pause_of_our_own_is_not_taken_for_the_peers_silence(relay: Relay) -> None:
    caller, callee = await relay.add(timings=IMPATIENT), await relay.add(timings=QUICK)
    gate = Gate()
    callee.serve("gate", gate)
    call = asyncio.ensure_future(caller.call(callee.peer_id, "gate", b""))
    await gate.entered.wait()
    deadline = asyncio.get_running_loop().time() + 0.6
    while asyncio.get_running_loop().time() < deadline:  # the loop is busy: no await
        pass
    gate.commit.set()
    assert (await call).header == b"done"


# -- strangers who call ------------------------------------------------------------------------------------


def call_frame(call: int, method: str = "echo", header: bytes = b"", sizes: tuple[int, ...] = ()) -> bytes:
    return frames.pack_call(call, method, header, sizes)


def body_frame(call: int, data: bytes) -> bytes:
    return pack_prefix(Kind.BODY, call, 0, len(data)) + data


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not a frame"),
        (pack_prefix(Kind.CALL, 1, 1 << 31), "CALL with a header of 2147483648 bytes"),
        (pack_prefix(Kind.CALL, 1, 4) + b"\xff\xff\xff\xff", "CALL with a malformed header"),
        (pack_prefix(Kind.CALL, 1, 60_000) + b"\x91" * 60_000, "CALL with a malformed header"),
        (pack_prefix(Kind.BODY, 1, 0, 1 << 30), "BODY with 1073741824 bytes"),
        (call_frame(2) + call_frame(2), "CALL 2 after call 2"),
        (body_frame(9, b"x"), "BODY for call 9, which was never made"),
        (pack_prefix(Kind.ABORT, 9), "ABORT of call 9, which was never made"),
        (pack_prefix(Kind.ACCEPT, 1), "ACCEPT, which only a callee may send"),
        (pack_prefix(Kind.ALIVE, 0), "ALIVE, which only a callee may send"),
        (
            call_frame(1, "gate", sizes=(3,)) + body_frame(1, b"four"),
            "a body with 1 bytes more than announced",
        ),
        (
            call_frame(1, "gate", sizes=(9 * MIB,)) + 21 * body_frame(1, bytes(frames.CHUNK_BYTES)),
            "5505024 bytes of a body before it was accepted",
        ),
    ],
)
async def test_a_caller_that_breaks_the_protocol_is_cut_off_by_name_and_others_are_not(
    relay: Relay,
    pair: tuple[NetTransport, NetTransport],
    caplog: pytest.LogCaptureFixture,
    sent: bytes,
    reason: str,
) -> None:
    caller, callee = pair
    gate = Gate()
    callee.serve("gate", gate, max_body_bytes=16 * MIB)
    good = asyncio.ensure_future(caller.call(callee.peer_id, "gate", b""))
    await gate.entered.wait()
    stranger = await RawCaller.open(relay.paths[callee.peer_id])
    with caplog.at_level(logging.WARNING):
        stranger.writer.write(sent)
        await asyncio.wait_for(stranger.closed(), 5)
        await until(lambda: reason in caplog.text)
        again = await RawCaller.open(relay.paths[callee.peer_id], stranger.peer)
        again.writer.write(sent)
        await asyncio.wait_for(again.closed(), 5)
    assert caplog.text.count("closed a stream that broke the protocol") == 1
    gate.commit.set()
    assert (await good).header == b"done"
    await stranger.close()
    await again.close()


async def test_a_body_in_single_bytes_costs_what_it_holds(
    relay: Relay, pair: tuple[NetTransport, NetTransport]
) -> None:
    _, callee = pair
    gate = Gate()
    callee.serve("gate", gate, max_body_bytes=16 * MIB)
    stranger = await RawCaller.open(relay.paths[callee.peer_id])
    stranger.writer.write(call_frame(1, "gate", sizes=(MIB,)))
    await gate.entered.wait()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    chunk = body_frame(1, b"x") * 5_000
    for _ in range(2):
        stranger.writer.write(chunk)
        await stranger.writer.drain()
    await until(lambda: callee.lines.get(stranger.peer, NetworkPath()).received_bytes >= 2 * len(chunk))
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert held < MIB // 2
    gate.commit.set()
    await stranger.close()


async def test_bodies_that_wait_to_be_accepted_are_bounded_together(
    relay: Relay, pair: tuple[NetTransport, NetTransport]
) -> None:
    _, callee = pair
    commit = asyncio.Event()
    outcomes: list[str] = []

    async def late(request: Request) -> Answer:
        await commit.wait()
        try:
            await request.accept()
        except Busy as error:
            outcomes.append(error.text)
            raise
        outcomes.append("accepted")
        return Answer(b"")

    callee.serve("late", late, max_body_bytes=MIB)
    stranger = await RawCaller.open(relay.paths[callee.peer_id])
    for call in range(1, 13):
        stranger.writer.write(call_frame(call, "late", sizes=(MIB,)))
        stranger.writer.write(4 * body_frame(call, bytes(frames.CHUNK_BYTES)))
    await until(lambda: callee.lines.get(stranger.peer, NetworkPath()).received_bytes > 12 * MIB)
    commit.set()
    await until(lambda: len(outcomes) == 12)
    assert outcomes.count("accepted") == 8
    assert outcomes.count("too many bodies of yours are waiting to be accepted") == 4
    await stranger.close()


async def test_a_thousand_unanswered_calls_are_refused_beyond_a_bound(
    relay: Relay, pair: tuple[NetTransport, NetTransport]
) -> None:
    _, callee = pair
    gate = Gate()
    callee.serve("gate", gate)
    stranger = await RawCaller.open(relay.paths[callee.peer_id])
    for call in range(1, 1001):
        stranger.writer.write(call_frame(call, "gate"))
    refusals = [await stranger.frame() for _ in range(1000 - frames.MAX_PENDING)]
    assert {prefix.kind for prefix, _ in refusals} == {Kind.ERROR}
    fields = frames.unpack_error(refusals[0][1])
    assert fields["code"] == "busy"
    assert fields["text"] == f"{frames.MAX_PENDING} calls of yours are pending already"
    # A new stream does not give new room.
    other = await RawCaller.open(relay.paths[callee.peer_id], stranger.peer)
    other.writer.write(call_frame(1, "gate"))
    _, header = await other.frame()
    assert frames.unpack_error(header)["text"] == f"{frames.MAX_PENDING} calls of yours are being worked on"
    gate.commit.set()
    await stranger.close()
    await other.close()


async def test_a_body_that_never_comes_is_given_up(relay: Relay) -> None:
    callee = await relay.add(timings=IMPATIENT)
    errors: list[str] = []

    async def take(request: Request) -> Answer:
        try:
            await request.accept()
        except PeerSilent as error:
            errors.append(error.text)
            raise
        return Answer(b"")

    callee.serve("take", take, max_body_bytes=MIB)
    stranger = await RawCaller.open(relay.paths[callee.peer_id])
    stranger.writer.write(call_frame(1, "take", sizes=(MIB,)))
    await asyncio.wait_for(stranger.closed(), 5)
    assert "its body stopped coming" in errors[0]
    await stranger.close()


async def test_a_caller_gets_few_streams_and_the_newest_ones(
    relay: Relay, pair: tuple[NetTransport, NetTransport]
) -> None:
    _, callee = pair
    first = await RawCaller.open(relay.paths[callee.peer_id])
    others = [
        await RawCaller.open(relay.paths[callee.peer_id], first.peer) for _ in range(MAX_LINKS_PER_PEER)
    ]
    await asyncio.wait_for(first.closed(), 5)
    others[-1].writer.write(call_frame(1, header=b"hi"))
    prefix, _ = await others[-1].frame()
    assert prefix.kind is Kind.RESULT
    for stranger in [first, *others]:
        await stranger.close()


async def test_a_stream_cut_in_the_middle_of_a_frame_leaves_nothing(
    relay: Relay, pair: tuple[NetTransport, NetTransport]
) -> None:
    _, callee = pair
    links = open_links(callee)
    whole = call_frame(1, sizes=(100,)) + body_frame(1, bytes(100))
    for cut in range(0, len(whole), 7):
        stranger = await RawCaller.open(relay.paths[callee.peer_id])
        stranger.writer.write(whole[:cut])
        await stranger.close()
    await until(lambda: open_links(callee) == links)
    await until(lambda: not callee._tasks._tasks)


async def test_any_bytes_end_in_an_orderly_close(
    relay: Relay, pair: tuple[NetTransport, NetTransport]
) -> None:
    _, callee = pair
    links = open_links(callee)
    for seed in range(30):
        stranger = await RawCaller.open(relay.paths[callee.peer_id])
        noise = bytearray(call_frame(1, sizes=(50,)) + body_frame(1, bytes(50)) + call_frame(2))
        noise[(seed * 7) % len(noise)] ^= 1 << seed % 8
        stranger.writer.write(bytes(noise) + os.urandom(64))
        await asyncio.wait_for(stranger.closed(), 5)
        await stranger.close()
    await until(lambda: open_links(callee) == links)


async def test_a_caller_of_another_version_is_told_so_in_its_own(relay: Relay) -> None:
    callee = await relay.add()
    for version, code in ((200, "other-version"), (0, "refused")):
        stranger = await RawCaller.open(relay.paths[callee.peer_id])
        frame = bytearray(call_frame(7))
        frame[3] = version
        stranger.writer.write(bytes(frame) + call_frame(8))
        prefix = await stranger.reader.readexactly(frames.PREFIX_BYTES)
        assert prefix[3] == version
        told = bytearray(prefix)
        told[3] = frames.PROTOCOL_VERSION
        header = frames.unpack_prefix(told)
        assert (header.kind, header.call) == (Kind.ERROR, 7)
        error = frames.unpack_error(await stranger.reader.readexactly(header.header_bytes))
        assert (error["code"], error["text"]) == (
            code,
            f"the peer that was called speaks version {frames.PROTOCOL_VERSION} of the swarm's protocol, "
            f"its caller version {version}: update the older program",
        )
        assert await stranger.reader.read() == b"", "and nothing else is heard"
        await stranger.close()


async def test_a_callee_of_another_version_is_named(relay: Relay) -> None:
    async def later(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        text = {"code": "other-version", "text": "too old", "version": 2}
        writer.write(frames.pack_error(1, text))
        await asyncio.get_running_loop().create_future()

    caller = await relay.add()
    peer = await RawCallee(later).listen(relay)
    with pytest.raises(OtherVersion, match="too old") as refusal:
        await caller.call(peer, "echo", b"")
    assert refusal.value.version == 2


# -- strangers who are called ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"\0" * 16, "not a frame"),
        (pack_prefix(Kind.RESULT, 1, 1 << 30), "RESULT with a header of 1073741824 bytes"),
        (pack_prefix(Kind.RESULT, 1, 1) + b"\xc0", "RESULT with a malformed header"),
        (pack_prefix(Kind.ERROR, 1, 1) + b"\xc0", "ERROR with a malformed header"),
        (pack_prefix(Kind.RESULT, 5, 1) + b"\xc0", "RESULT for call 5, which was never made"),
        (pack_prefix(Kind.BODY, 1, 0, 3) + b"abc", "BODY before its RESULT"),
        (pack_prefix(Kind.BODY, 7, 0, 3) + b"abc", "BODY for call 7, which was never made"),
        (pack_prefix(Kind.ALIVE, 0, 4), "ALIVE with a header of 4 bytes"),
        (call_frame(1), "CALL, which only a caller may send"),
        (frames.pack_result(1, b"", [10]) + frames.pack_result(1, b"", []), "a second answer to one call"),
        (frames.pack_result(1, b"", [2]) + body_frame(1, b"abc"), "a body with 1 bytes more than announced"),
        (frames.pack_result(1, b"", [1 << 39]), "an answer of 549755813888 bytes; at most 100 fit"),
        (frames.pack_error(1, {"code": "evil", "text": "x"}), "answered with an unknown error: 'evil'"),
        (frames.pack_error(1, {"code": "stale", "text": "x", "version": "1"}), "impossible numbers"),
        (
            pack_prefix(Kind.ERROR, 1, 8) + msgspec.msgpack.encode({"a": [[]]})[:8].ljust(8),
            "malformed header",
        ),
    ],
)
async def test_a_callee_that_answers_nonsense_is_named(relay: Relay, answer: bytes, reason: str) -> None:
    async def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(answer)
        await asyncio.get_running_loop().create_future()

    caller, stranger = await relay.add(), RawCallee(nonsense)
    peer = await stranger.listen(relay)
    with pytest.raises((BadAnswer, PeerSilent), match=reason) as caught:
        await caller.call(peer, "x", b"", max_answer_bytes=100, deadline_s=5)
    assert caught.value.peer == peer


async def test_an_answer_cut_short_is_no_answer(relay: Relay) -> None:
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(frames.pack_result(1, b"", [100]) + body_frame(1, bytes(50)))
        await writer.drain()

    caller, stranger = await relay.add(), RawCallee(half)
    peer = await stranger.listen(relay)
    with pytest.raises(PeerGone, match="the connection broke"):
        await caller.call(peer, "x", b"", max_answer_bytes=100)


async def test_answers_to_calls_given_up_are_skipped(relay: Relay) -> None:
    commit = asyncio.Event()

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        await commit.wait()
        writer.write(
            pack_prefix(Kind.ACCEPT, 1) + frames.pack_result(1, b"", [50]) + body_frame(1, bytes(50))
        )
        writer.write(frames.pack_result(2, b"second", []))
        await asyncio.get_running_loop().create_future()

    caller, stranger = await relay.add(), RawCallee(late)
    peer = await stranger.listen(relay)
    with pytest.raises(PeerSilent):
        await caller.call(peer, "x", b"", max_answer_bytes=100, deadline_s=0.5)
    second = asyncio.ensure_future(caller.call(peer, "x", b""))
    await asyncio.sleep(0)
    commit.set()
    assert (await second).header == b"second"


# --- closing ------------------------------------------------------------------------------------------------


class Ended(asyncio.Transport):
    """Writes to it fail after the end of the file, as uvloop's do."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = 0

    def write(self, data: object) -> None:
        if self.ended:
            raise RuntimeError("Cannot call write() after write_eof()")

    def write_eof(self) -> None:
        self.ended += 1

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def is_closing(self) -> bool:
        return False


async def test_what_is_said_after_the_end_is_dropped_without_a_traceback() -> None:
    """A call that comes while its callee closes is refused, on a stream that is half closed already."""

    def refuse(link: ServerConnection, served: ServedCall) -> None:
        raise Leaving("it closes")

    link = ServerConnection(lambda link, message: ("caller", Traffic(most_peers=1).of("caller")), refuse)
    transport = Ended()
    link.connection_made(transport)
    link.data_received(b"\x01x")
    link.finish()
    link.finish()
    link.data_received(frames.pack_call(1, "work", b"", []))
    assert transport.ended == 1
