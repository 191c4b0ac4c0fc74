"""The state of a stream without a socket: any split of the bytes, any order of what both ends do."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from peers.net.bandwidth import BandwidthEstimator
from peers.net.connection_state import (
    Answered,
    BodyEnded,
    Called,
    ClientState,
    ConnectionState,
    Incoming,
    Opened,
    ServerState,
)
from peers.net.timings import NetTimings
from peers.ports import Answer
from swarm.errors import BadAnswer, PeerGone, PeerSilent, SwarmError
from swarm.wire import frames

OPENING = b"\x02ok"
BODIES = st.lists(st.sampled_from([0, 1, 700, frames.CHUNK_BYTES + 1, frames.WINDOW_BYTES + 5]), max_size=3)
SPLITS = st.lists(st.sampled_from([1, 2, 15, 16, 17, 1000, 300_000]), min_size=1, max_size=6)


def feed(state: ConnectionState, data: bytes, now: float) -> None:
    """As a socket does, as far as the state gives it room."""
    rest = memoryview(data)
    while rest and not state.over:
        view = state.buffer()
        count = min(view.nbytes, rest.nbytes)
        view[:count] = rest[:count]
        state.received(count, now=now)
        rest = rest[count:]
        if state.events and isinstance(state.events[0], Opened):
            state.events.popleft()
            state.introduce(state.peer or "caller", BandwidthEstimator(), now=now)


def sent(state: ConnectionState, now: float) -> bytes:
    said = b""
    while frame := state.next_frame(now=now):
        said += b"".join(bytes(part) for part in frame)
    return said


@dataclass
class Pair:
    """Two ends, and the bytes between them."""

    timings: NetTimings = field(default_factory=NetTimings)
    now: float = 0.0
    to_server: bytes = OPENING
    to_client: bytes = OPENING
    answers: dict[int, Answer | SwarmError] = field(default_factory=dict)
    called: list[Incoming] = field(default_factory=list)
    whole: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.client = ClientState(self.timings, now=0.0)
        self.server = ServerState(self.timings, now=0.0)
        self.client.peer = "server"
        self.carry(len(OPENING))

    def carry(self, most: int) -> None:
        """Bring so many bytes to each end."""
        self.to_server += sent(self.client, self.now)
        self.to_client += sent(self.server, self.now)
        feed(self.server, self.to_server[:most], self.now)
        feed(self.client, self.to_client[:most], self.now)
        self.to_server, self.to_client = self.to_server[most:], self.to_client[most:]
        while self.server.events:
            event = self.server.events.popleft()
            if isinstance(event, Called):
                self.called.append(event.call)
            elif isinstance(event, BodyEnded) and event.error is None:
                self.whole.add(event.call.number)
        while self.client.events:
            event = self.client.events.popleft()
            assert isinstance(event, Answered) and event.call not in self.answers, "one answer each"
            self.answers[event.call] = event.answer

    def call(self, sizes: list[int]) -> int:
        body = [memoryview(bytearray(bytes([number + 1]) * size)) for number, size in enumerate(sizes)]
        return self.client.call("echo", b"head", body, 1 << 30, now=self.now)

    def accept(self, call: Incoming) -> None:
        if not self.server.accept(call, now=self.now).left:
            self.whole.add(call.number)

    def echo(self, call: Incoming) -> None:
        assert call.sink is not None
        self.server.answer(call, call.header.header, call.sink.buffers)

    def settle(self) -> None:
        """Let everything arrive, and answer everything."""
        for _ in range(200):
            self.carry(1 << 20)
            for call in list(self.called):
                if call.refusal is not None or call.number not in self.server._working:
                    self.called.remove(call)
                elif call.sink is None:
                    self.accept(call)
                elif call.number in self.whole:
                    self.called.remove(call)
                    self.echo(call)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_each_call_gets_its_own_answer_once_whatever_the_order(data: st.DataObject) -> None:
    pair, made, aborted = Pair(), {}, set[int]()
    for _ in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["call", "carry", "carry", "accept", "echo", "abort", "tick"])):
            case "call":
                sizes = data.draw(BODIES)
                made[pair.call(sizes)] = sizes
            case "carry":
                pair.carry(data.draw(st.sampled_from([1, 16, 40, 1000, 300_000, 1 << 21])))
            case "accept" if pair.called:
                call = data.draw(st.sampled_from(pair.called))
                if call.sink is None and call.refusal is None and call.number in pair.server._working:
                    pair.accept(call)
            case "echo" if ready := [call for call in pair.called if call.number in pair.whole]:
                call = data.draw(st.sampled_from(ready))
                pair.called.remove(call)
                pair.echo(call)
            case "abort" if left := sorted(set(made) - set(pair.answers) - aborted):
                aborted.add(data.draw(st.sampled_from(left)))
                pair.client.abort(max(aborted))
                aborted.add(max(aborted))
            case "tick":
                pair.now += 0.25
                pair.client.tick(now=pair.now)
                pair.server.tick(now=pair.now)
            case _:
                pass
    pair.settle()
    assert not pair.client.over and not pair.server.over
    for call, sizes in made.items():
        if call in aborted and call not in pair.answers:
            continue
        answer = pair.answers[call]
        assert isinstance(answer, Answer), answer
        assert answer.header == b"head"
        expected = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
        assert [bytes(part) for part in answer.body] == expected
    assert pair.client.pending == 0 and not pair.server._working and not pair.server._receiving


@settings(max_examples=40, deadline=None)
@given(splits=SPLITS)
def test_any_split_of_the_bytes_says_the_same(splits: list[int]) -> None:
    said = OPENING + frames.pack_call(1, "a", b"one", [5, 0]) + frames.pack_prefix(frames.Kind.BODY, 1, 0, 2)
    said += b"he" + frames.pack_call(2, "b", b"", []) + frames.pack_prefix(frames.Kind.BODY, 1, 0, 3) + b"llo"
    said += frames.pack_call(3, "c", b"x" * 60_000, [9]) + frames.pack_prefix(frames.Kind.ABORT, 3)
    state, rest, turn, heard = ServerState(NetTimings(), now=0.0), said, 0, []
    while rest:
        size = splits[turn % len(splits)]
        feed(state, rest[:size], 0.0)
        rest, turn = rest[size:], turn + 1
        while state.events:
            heard.append(state.events.popleft())
    names = [(type(event).__name__, event.call.header.method) for event in heard]
    assert names == [("Called", "a"), ("Called", "b"), ("Called", "c"), ("BodyEnded", "c")]
    assert bytes(state.accept(heard[0].call, now=0.0).buffers[0]) == b"hello"
    assert not state.over


@settings(max_examples=200, deadline=None)
@given(junk=st.binary(max_size=200), kind=st.sampled_from([ClientState, ServerState]))
def test_any_bytes_are_frames_or_end_the_stream(junk: bytes, kind: type[ConnectionState]) -> None:
    state = kind(NetTimings(), now=0.0)
    state.peer = "peer"
    feed(state, OPENING + junk, 0.0)
    if len(junk) >= frames.PREFIX_BYTES and junk[:2] != b"\x53\x57":
        assert isinstance(state.lost_because, BadAnswer)
        assert "not a frame" in state.lost_because.text


def test_silence_is_noticed_at_both_ends_but_not_our_own_sleep() -> None:
    pair = Pair(NetTimings(silence_s=1.0))
    pair.call([2 * frames.WINDOW_BYTES])
    pair.carry(1000)
    pair.accept(pair.called[0])
    pair.called[0].awaited = True
    for state in (pair.client, pair.server):
        state.tick(now=60.0)  # the process slept: bytes may be waiting to be read
        assert not state.over
    for tick in range(1, 8):
        for state in (pair.client, pair.server):
            state.tick(now=60.0 + 0.25 * tick)
    assert isinstance(pair.client.lost_because, PeerSilent)
    assert isinstance(pair.server.lost_because, PeerSilent)
    assert "no sign of life for" in pair.client.lost_because.text
    assert "its body stopped coming" in pair.server.lost_because.text


def test_heartbeats_come_every_second_while_a_handler_works() -> None:
    pair = Pair()
    pair.call([])
    pair.carry(1000)
    for _ in range(40):
        pair.now += 0.25
        pair.server.tick(now=pair.now)
        pair.client.tick(now=pair.now)
        pair.carry(1000)
    assert not pair.client.over and pair.client.pending == 1
    assert pair.client.estimator.received_bytes == 10 * 20


def test_what_waits_gets_the_fault_each_for_itself() -> None:
    pair = Pair()
    calls = [pair.call([]), pair.call([10])]
    pair.client.fail(PeerGone("server", "the connection broke"))
    pair.carry(1)
    faults = [pair.answers[call] for call in calls]
    assert [str(fault) for fault in faults] == ["peer server: the connection broke"] * 2
    assert faults[0] is not faults[1]
    with pytest.raises(PeerGone, match="gave the call up"):
        other = Pair()
        call = other.call([3])
        other.carry(16)
        other.carry(1000)
        other.client.abort(call)
        other.carry(1000)
        other.server.accept(other.called[0], now=0.0)
