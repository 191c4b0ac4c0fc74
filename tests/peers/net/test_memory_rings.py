"""Rings in memory, without a process at the other end: which are taken, and what that one can do to us."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import tempfile

import pytest

from peers.net.connection import ClientConnection
from peers.net.direct import memory
from peers.net.direct.memory import _SAYS, MAX_WRITE_BYTES, RING_BYTES, TOLD_BYTES, MemoryStream
from peers.net.direct.paths import OPENING
from swarm.errors import BadAnswer, PeerSilent, Refused
from swarm.wire import frames
from swarm.wire.frames import Kind

pytestmark = pytest.mark.skipif(not memory.AVAILABLE, reason="Linux only")


def test_a_machine_is_told_from_others_and_not_known_again_in_another_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = memory.machine_of("run")
    assert here == memory.machine_of("run") and len(here) == 16
    assert memory.machine_of("other run") != here
    monkeypatch.setattr(os, "geteuid", lambda: -1)
    assert memory.machine_of("run") != here, "processes of another user take no memory of ours"


GROW, SHRINK = fcntl.F_SEAL_GROW, fcntl.F_SEAL_SHRINK


@pytest.mark.parametrize(
    ("size", "seals"),
    [
        (2 * RING_BYTES, 0),
        (2 * RING_BYTES, GROW),
        (2 * RING_BYTES, SHRINK),
        (RING_BYTES, GROW | SHRINK),
        (2 * RING_BYTES, GROW | SHRINK | fcntl.F_SEAL_WRITE),
    ],
)
def test_memory_that_could_become_smaller_or_cannot_be_written_is_refused(size: int, seals: int) -> None:
    fd = os.memfd_create("of-a-stranger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        with pytest.raises(Refused, match="shared memory that"):
            memory.map_rings(fd)
    finally:
        os.close(fd)


def test_a_file_is_no_shared_memory() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(2 * RING_BYTES)
        with pytest.raises(Refused, match="shared memory that is none"):
            memory.map_rings(file.fileno())


def test_rings_cannot_be_made_smaller_and_are_shared() -> None:
    fd = memory.make_rings()
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        here, there = memory.map_rings(fd), memory.map_rings(fd)
        here[0][:3], there[1][-3:] = b"abc", b"xyz"
        assert (bytes(there[0][:3]), bytes(here[1][-3:])) == (b"abc", b"xyz")
    finally:
        os.close(fd)


def test_only_a_process_of_the_same_user_is_one_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = socket.socketpair()
    assert all(map(memory.of_this_user, ends))
    here = os.geteuid()
    monkeypatch.setattr(memory.os, "geteuid", lambda: here + 1)
    assert not any(map(memory.of_this_user, ends))
    for end in ends:
        end.close()


class Socket(asyncio.Transport):
    """What a stream in memory does to its socket."""

    def __init__(self) -> None:
        super().__init__()
        self.said = list[tuple[int, int]]()
        self.did = list[str]()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.said.append(_SAYS.unpack(data))

    def pause_reading(self) -> None:
        self.did.append("pause")

    def resume_reading(self) -> None:
        self.did.append("resume")

    def abort(self) -> None:
        self.did.append("abort")


class Shared:
    """Our end that calls, and the other one by hand."""

    def __init__(self) -> None:
        self.out, self.into = memoryview(bytearray(RING_BYTES)), memoryview(bytearray(RING_BYTES))
        self.link, self.socket = ClientConnection("peer", b""), Socket()
        self.stream = MemoryStream(self.link, self.out, self.into, OPENING)
        self.stream.connection_made(self.socket)
        self._at = 0

    def writes(self, data: bytes) -> None:
        """Into the ring, which is then told."""
        first = min(len(data), RING_BYTES - self._at)
        self.into[self._at : self._at + first] = data[:first]
        self.into[: len(data) - first] = data[first:]
        self._at = (self._at + len(data)) % RING_BYTES
        self.says(len(data), 0)

    def says(self, wrote: int, freed: int) -> None:
        packed = _SAYS.pack(wrote, freed)
        self.says_at_once(packed[:3])
        self.says_at_once(packed[3:])

    def says_at_once(self, packed: bytes) -> None:
        self.stream.get_buffer(-1)[: len(packed)] = packed
        self.stream.buffer_updated(len(packed))


@pytest.mark.virtual_time
@pytest.mark.parametrize("said", [(0, 0), (RING_BYTES + 1, 0), (0, 1), (5, 17), (2**32 - 1, 2**32 - 1)])
async def test_what_cannot_be_ends_the_connection(said: tuple[int, int]) -> None:
    shared = Shared()
    shared.says(*said)
    assert shared.socket.did == ["abort"]
    assert isinstance(shared.link.lost_because, BadAnswer)
    assert "which cannot be" in shared.link.lost_because.text


@pytest.mark.virtual_time
async def test_more_than_was_said_to_be_read_cannot_be_written() -> None:
    shared = Shared()
    shared.writes(frames.pack_prefix(Kind.ALIVE, 0) * 2)
    assert not shared.link.over
    shared.says(RING_BYTES - 31, 0)
    assert isinstance(shared.link.lost_because, BadAnswer)


@pytest.mark.virtual_time
async def test_what_is_said_at_once_is_no_more_than_a_ring_holds() -> None:
    """Else we held 64 rings of a stranger that is slowed down: nothing looks at them for a while."""
    shared = Shared()
    held = list[int]()
    shared.link.data_received = lambda data: held.append(len(data))  # type: ignore[method-assign]
    shared.says_at_once(_SAYS.pack(TOLD_BYTES, 0) * 64)
    assert isinstance(shared.link.lost_because, BadAnswer)
    assert sum(held) == RING_BYTES


@pytest.mark.virtual_time
async def test_what_is_changed_after_it_was_read_changes_nothing() -> None:
    shared = Shared()
    call = asyncio.ensure_future(shared.link.call("x", b"", (), 1 << 20))
    await asyncio.sleep(0)
    result = frames.pack_result(1, b"head", (1000,))
    body = frames.pack_prefix(Kind.BODY, 1, 0, 1000) + b"a" * 1000
    for part in (result[:20], result[20:], body[:10], body[10:500], body[500:]):
        shared.writes(part)
        shared.into[:] = b"\xff" * RING_BYTES
    answer = await call
    assert (answer.header, [bytes(part) for part in answer.body]) == (b"head", [b"a" * 1000])


@pytest.mark.virtual_time
async def test_a_full_ring_is_not_written_to_until_the_other_end_has_read() -> None:
    shared = Shared()
    body = os.urandom(4 * RING_BYTES)
    call = asyncio.ensure_future(shared.link.call("x", b"", [memoryview(body)], 0))
    await asyncio.sleep(0)
    shared.writes(frames.pack_prefix(Kind.ACCEPT, 1))
    came, got = 0, bytearray()
    for _ in range(100):
        wrote = sum(said[0] for said in shared.socket.said)
        assert 0 < wrote <= RING_BYTES
        assert RING_BYTES - wrote < MAX_WRITE_BYTES or came + wrote > len(body)
        shared.socket.said.clear()
        for at in range(came, came + wrote):
            if at % RING_BYTES == 0 or at == came:
                end = min(came + wrote, at - at % RING_BYTES + RING_BYTES)
                got += shared.out[at % RING_BYTES : at % RING_BYTES + end - at]
        came += wrote
        if came > len(body):
            break
        shared.says(0, wrote)
    assert not shared.link.over
    bodies, offset = bytearray(), 0
    while offset < len(got):
        prefix = frames.unpack_prefix(got, offset)
        offset += frames.PREFIX_BYTES + prefix.header_bytes
        bodies += got[offset : offset + prefix.body_bytes]
        offset += prefix.body_bytes
    assert bodies == body
    call.cancel()


@pytest.mark.virtual_time
async def test_it_is_said_what_was_read_before_the_other_end_must_wait() -> None:
    shared = Shared()
    call = asyncio.ensure_future(shared.link.call("x", b"", (), 1 << 30))
    await asyncio.sleep(0)
    shared.socket.said.clear()
    size = frames.CHUNK_BYTES
    shared.writes(frames.pack_result(1, b"", (64 * size,)))
    for _ in range(64):
        shared.writes(frames.pack_prefix(Kind.BODY, 1, 0, size) + bytes(size))
    assert len((await call).body[0]) == 64 * size
    assert all(wrote == 0 and TOLD_BYTES <= freed <= 2 * size for wrote, freed in shared.socket.said)
    assert sum(freed for _, freed in shared.socket.said) >= 64 * size


@pytest.mark.virtual_time
async def test_an_end_that_says_much_and_never_reads_its_socket_is_given_up() -> None:
    shared = Shared()
    shared.link.data_received = lambda data: None  # type: ignore[method-assign]
    shared.stream.pause_writing()
    shared.stream._unheard = memory.MAX_UNHEARD - 99  # pyright: ignore[reportPrivateUsage]
    for _ in range(99):
        shared.says_at_once(_SAYS.pack(TOLD_BYTES, 0))
    shared.stream.resume_writing()
    shared.says_at_once(_SAYS.pack(TOLD_BYTES, 0))
    await asyncio.sleep(0.01)
    assert not shared.link.over, "an end that is merely late"
    shared.stream.pause_writing()
    shared.stream._unheard = memory.MAX_UNHEARD - 99  # pyright: ignore[reportPrivateUsage]
    for _ in range(100):
        shared.says_at_once(_SAYS.pack(TOLD_BYTES, 0))
    await asyncio.sleep(0.01)
    assert isinstance(shared.link.lost_because, PeerSilent)
    assert shared.socket.did == ["abort"]


@pytest.mark.virtual_time
async def test_frames_of_which_a_ring_is_full_are_not_too_much_to_say() -> None:
    shared = Shared()
    shared.stream.pause_writing()
    frame = frames.pack_prefix(Kind.ALIVE, 0)
    while not shared.stream._full:
        shared.stream.write(frame)
    await asyncio.sleep(0.01)
    assert not shared.link.over
    assert len(shared.socket.said) == (RING_BYTES - MAX_WRITE_BYTES) // len(frame) + 1
