"""Connections in memory, without a process at the other end: which are taken, and what it can do."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from peers.net.connection import ClientConnection
from peers.net.direct import memory
from peers.net.direct.paths import OPENING
from peers.net.direct.stream import SMALL_AT_ONCE, PlainStream
from swarm.wire import frames
from swarm.wire.frames import Kind
from tests.net.relay import FakeSocket

pytestmark = pytest.mark.skipif(not memory.AVAILABLE, reason="Linux only")


def test_a_machine_is_told_from_others_and_not_known_again_in_another_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = memory.machine_of("run")
    assert here == memory.machine_of("run") and len(here) == 16
    assert memory.machine_of("other run") != here
    monkeypatch.setattr(os, "geteuid", lambda: -1)
    assert memory.machine_of("run") != here, "processes of another user take no memory of ours"


def test_only_a_process_of_the_same_user_is_one_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = socket.socketpair()
    assert all(map(memory.of_this_user, ends))
    here = os.geteuid()
    monkeypatch.setattr(memory.os, "geteuid", lambda: here + 1)
    assert not any(map(memory.of_this_user, ends))
    for end in ends:
        end.close()


class Near:
    """Our end that calls, and the other one by hand."""

    def __init__(self) -> None:
        self.link, self.socket = ClientConnection("peer", b""), FakeSocket()
        self.stream = PlainStream(self.link, OPENING)
        self.stream.connection_made(self.socket)

    def says(self, data: bytes) -> None:
        self.stream.get_buffer(-1)[: len(data)] = data
        self.stream.buffer_updated(len(data))


@pytest.mark.virtual_time
async def test_what_is_read_over_what_came_before_changes_nothing() -> None:
    near = Near()
    call = asyncio.ensure_future(near.link.call("x", b"", (), 1 << 20))
    await asyncio.sleep(0)
    result = frames.pack_result(1, b"head", (1000,))
    body = frames.pack_prefix(Kind.BODY, 1, 0, 1000) + b"a" * 1000
    for part in (result[:20], result[20:], body[:10], body[10:500], body[500:]):
        near.says(part)
        near.stream.get_buffer(-1)[:2000] = b"\xff" * 2000
    answer = await call
    assert (answer.header, [bytes(part) for part in answer.body]) == (b"head", [b"a" * 1000])


@pytest.mark.virtual_time
async def test_one_that_says_a_byte_at_a_time_is_heard_more_slowly() -> None:
    near = Near()
    alive = frames.pack_prefix(Kind.ALIVE, 0)
    for n in range(int(SMALL_AT_ONCE) + 1):
        near.says(alive[n % len(alive) :][:1])
    assert near.socket.did == ["pause"]
    near = Near()
    near.link.data_received = lambda data: None  # type: ignore[method-assign]
    for _ in range(int(SMALL_AT_ONCE) + 1):
        near.says(bytes(frames.CHUNK_BYTES))
    assert near.socket.did == [], "chunks are no small reads"


@pytest.mark.virtual_time
async def test_nothing_is_heard_after_the_end() -> None:
    near = Near()
    near.says(b"\xff" * 100)
    assert near.link.over and near.socket.did == ["abort"]
    near.link.data_received = lambda data: pytest.fail("it was heard")  # type: ignore[method-assign]
    near.says(bytes(100))
