"""What a caller may make a peer do and hold: one beyond its limit waits, others do not notice."""

from __future__ import annotations

import asyncio
import time

import pytest

from peers.net import bandwidth
from peers.net.bandwidth import (
    CALLS_AT_ONCE,
    CALLS_PER_S,
    EARLY_BYTES,
    EARLY_BYTES_OF_ALL,
    FRAME_BYTES,
    Allowance,
    Traffic,
)
from peers.net.connection import ServedCall, ServerConnection
from swarm.errors import Busy
from swarm.wire import frames
from swarm.wire.frames import Kind, Prefix

CALL = Prefix(Kind.CALL, 1, 100, 0)
MIB = 1 << 20


def test_an_allowance_is_so_much_at_once_and_then_so_much_a_second() -> None:
    allowance = Allowance(per_s=10.0, at_once=5.0)
    assert [allowance.take(1.0, now=1.0) for _ in range(5)] == [0.0] * 5
    assert allowance.take(1.0, now=1.0) == pytest.approx(0.1)
    assert allowance.take(1.0, now=1.3) == 0.0
    assert allowance.take(5.0, now=100.0) == 0.0, "it never grows beyond what may be taken at once"
    assert allowance.take(1.0, now=100.0) == pytest.approx(0.1)


def test_an_allowance_that_is_overdrawn_has_to_be_made_up_for() -> None:
    allowance = Allowance(per_s=100.0, at_once=300.0)
    assert allowance.left(now=1000.0) == 300.0
    allowance.take(250.0, now=1000.0)
    assert allowance.left(now=1001.0) == 150.0
    allowance.take(450.0, now=1001.0)
    assert allowance.left(now=1002.0) == -200.0
    assert not allowance.take_if_there(1.0, now=1003.0)
    assert allowance.take_if_there(50.0, now=1004.5)


def test_a_trainer_with_512_microbatches_in_flight_never_waits() -> None:
    """256 calls at once, then one for each answer of a device that takes 5 ms; headers of 2 kB."""
    trainer = Traffic(most_peers=1).of("trainer")
    work = Prefix(Kind.CALL, 1, 2000, 0)
    waits = [trainer.pays(work, now=0.0) for _ in range(frames.MAX_PENDING)]
    waits += [trainer.pays(work, now=0.005 * answer) for answer in range(2000)]
    assert max(waits) == 0.0


def test_a_replica_of_64_never_waits() -> None:
    coordinator = Traffic(most_peers=1).of("coordinator")
    directive = Prefix(Kind.CALL, 1, 46_000 // 56, 0)
    assert not any(coordinator.pays(directive, now=at / 56) for at in range(56 * 60))


def test_more_calls_than_allowed_wait_until_they_are() -> None:
    caller = Traffic(most_peers=1).of("caller")
    assert not any(caller.pays(CALL, now=0.0) for _ in range(int(CALLS_AT_ONCE)))
    assert caller.pays(CALL, now=0.0) == pytest.approx(1 / CALLS_PER_S)


def test_bodies_in_single_bytes_and_large_headers_wait_too() -> None:
    for frame in (Prefix(Kind.BODY, 1, 0, 1), Prefix(Kind.ABORT, 1, 0, 0), Prefix(Kind.CALL, 1, 70_000, 0)):
        caller, sent = Traffic(most_peers=1).of("caller"), 0
        while not caller.pays(frame, now=0.0):
            sent += FRAME_BYTES + frame.header_bytes
        assert sent <= bandwidth.CONTROL_BYTES_AT_ONCE


def test_a_caller_that_comes_again_has_no_new_allowance() -> None:
    known = Traffic(most_peers=2)
    caller = known.of("a")
    assert known.of("a") is caller
    for peer in ("b", "a", "c"):
        known.of(peer)
    assert known.of("a") is caller, "the one that came longest ago was forgotten"


def fill(caller: bandwidth.Line) -> int:
    """Hold as much as the caller may, in pieces of 64 KiB."""
    while caller.may_hold(65536):
        caller.holds(65536)
    return caller.held_bytes


def test_one_caller_makes_us_hold_8_mib_and_all_together_half_a_gigabyte() -> None:
    known = Traffic(most_peers=5000)
    assert fill(known.of("first")) == EARLY_BYTES
    held = [fill(known.of(f"liar {number}")) for number in range(3000)]
    assert known.held_bytes <= EARLY_BYTES_OF_ALL
    assert min(held[:16]) >= 7 * MIB
    assert held[62] > 0, "64 identities do not take the room of the next one"


def test_what_is_given_back_can_be_held_again() -> None:
    known = Traffic(most_peers=2)
    caller = known.of("a")
    caller.holds(fill(caller) * -1)
    assert (caller.held_bytes, known.held_bytes) == (0, 0)
    assert fill(caller) == EARLY_BYTES


# -- on a stream -------------------------------------------------------------------------------------------


class Line(asyncio.Transport):
    """The transport below a stream: what it reads waits while it is told to."""

    def __init__(self, link: ServerConnection) -> None:
        super().__init__()
        self.link, self.waiting, self.paused = link, bytearray(b"\x01x"), False
        link.connection_made(self)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def write(self, data: object) -> None: ...

    def abort(self) -> None: ...

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False
        asyncio.get_running_loop().call_soon(self.read)

    def read(self) -> None:
        while self.waiting and not self.paused:
            data = bytes(self.waiting[:1000])
            del self.waiting[:1000]
            self.link.data_received(data)


def called_by(known: Traffic, name: str) -> tuple[Line, list[ServedCall]]:
    called: list[ServedCall] = []

    def take(link: ServerConnection, call: ServedCall) -> None:
        called.append(call)
        link.answer(call, b"", [])

    link = ServerConnection(lambda *_: (name, known.of(name)), take)
    return Line(link), called


async def test_a_caller_over_its_limit_is_read_no_faster_and_another_one_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bandwidth, "CALLS_AT_ONCE", 20.0)
    known = Traffic(most_peers=10)
    (flood, flooded), (calm, heard) = called_by(known, "flood"), called_by(known, "calm")
    slowed: list[str] = []
    flood.link.on_rest = lambda link: slowed.append(link.peer)
    flood.waiting += b"".join(frames.pack_call(n, "m", b"", []) for n in range(1, 101))
    began = time.monotonic()
    flood.read()
    assert len(flooded) <= 22 and flood.paused and slowed == ["flood"]
    calm.waiting += frames.pack_call(1, "m", b"", [])
    calm.read()
    assert len(heard) == 1
    while len(flooded) < 100:
        assert not flood.link.over, "it is slowed down, and not cut off"
        await asyncio.sleep(0.01)
    assert time.monotonic() - began >= 0.9 * 80 / CALLS_PER_S
    assert not calm.paused


async def test_a_body_beyond_the_room_of_all_is_refused_and_the_room_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bandwidth, "EARLY_BYTES_OF_ALL", 16 * 65536)
    known, called = Traffic(most_peers=10), list[ServedCall]()
    link = ServerConnection(lambda *_: ("caller", known.of("caller")), lambda _, call: called.append(call))
    line = Line(link)
    for number in range(1, 4):
        line.waiting += frames.pack_call(number, "m", b"", [65536])
        line.waiting += frames.pack_prefix(Kind.BODY, number, 0, 65536) + bytes(65536)
    line.read()
    assert known.held_bytes == 65536
    with pytest.raises(Busy, match="too many bodies of yours are waiting to be accepted"):
        await called[1].accept()
    assert len((await called[0].accept())[0]) == 65536
    assert known.held_bytes == 0
    line.waiting += frames.pack_call(4, "m", b"", [9]) + frames.pack_prefix(Kind.BODY, 4, 0, 3) + b"abc"
    line.read()
    assert known.held_bytes > 0
    link.connection_lost(None)
    assert known.held_bytes == 0
