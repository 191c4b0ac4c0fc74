"""Hand-over in memory between two processes of one machine and one user: a direct connection without TCP.

    caller ──AF_UNIX: the ticket, a sealed record, and a memfd with a ring for each direction──▶ callee
           ◀──a sealed record──
           ◀──8 bytes at a time: so much I wrote into my ring, so much I have read of yours──▶

Nothing that one end counts by lies where the other can change it, and bytes are copied out before anything
looks at them. More: docs/design.md, *On the wire*. Linux only.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import mmap
import os
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from peers.net.connection import Connection
from peers.net.direct.records import SMALL_BYTES
from peers.net.direct.stream import Stream
from swarm.errors import BadAnswer, PeerSilent, Refused
from swarm.ids import PeerId
from swarm.wire import frames
from swarm.wire.buffers import Buffer

AVAILABLE = sys.platform == "linux" and hasattr(os, "memfd_create")
RING_BYTES = 1 << 20
"""Of each direction: what the other end can have us hold. Four chunks, so that one is written while others
are read."""
TOLD_BYTES = frames.CHUNK_BYTES
"""So much is read before the other end is told that there is room again."""
MAX_WRITE_BYTES = frames.CHUNK_BYTES + frames.PREFIX_BYTES
"""The largest frame. While there is room for less, the end writes nothing."""
MAX_UNHEARD = 2 * RING_BYTES // frames.PREFIX_BYTES
"""Messages that may wait for the socket: twice as many as say that a ring is full of the smallest frames."""
_SAYS = struct.Struct("=II")
_SAID_AT_ONCE = 64 * _SAYS.size
_CREDENTIALS = struct.Struct("=iII")
Rings: TypeAlias = tuple[memoryview, memoryview]
"""To the callee, and to the caller."""


def address_of(peer: PeerId) -> bytes:
    """Where a peer listens for processes of this machine (and network namespace)."""
    return b"\0swarm/" + peer.encode()


def machine_of(run: str) -> str:
    """Equal for all processes that can connect to one another, another one in each run; empty: none can."""
    if not AVAILABLE:
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    network = Path("/proc/self/ns/net").stat().st_ino
    return hashlib.blake2b(f"{run} {boot} {network} {os.geteuid()}".encode(), digest_size=8).hexdigest()


def listener_of(peer: PeerId) -> socket.socket | None:
    """Where other processes connect; None: it cannot be had, and all goes on without."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(address_of(peer))
        listener.listen()
    except OSError:
        listener.close()
        return None
    listener.setblocking(False)
    return listener


def connect(peer: PeerId) -> socket.socket | None:
    """A connection to a peer of this machine and user; None: it is elsewhere, or takes none."""
    near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    near.setblocking(False)
    try:
        near.connect(address_of(peer))
        if of_this_user(near):
            return near
    except OSError:
        pass
    near.close()
    return None


def of_this_user(near: socket.socket) -> bool:
    """Whether the process at the other end runs for the user that we run for, as the kernel says."""
    told = near.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(told)[1] == os.geteuid()


def send(near: socket.socket, hello: bytes) -> Rings:
    """Say hello, with rings, which are returned. Raises OSError, Refused."""
    fd = make_rings()
    try:
        if socket.send_fds(near, [hello], [fd]) != len(hello):
            raise OSError("the hello was not taken whole")
        return map_rings(fd)
    finally:
        os.close(fd)


async def receive(came: socket.socket, nbytes: int) -> tuple[bytes, Rings]:
    """A hello of so many bytes, and the rings that came with it. Raises OSError, Refused."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(came, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(came)
    hello, fds, _, _ = socket.recv_fds(came, nbytes, 1, socket.MSG_CMSG_CLOEXEC)
    try:
        if len(hello) != nbytes or not fds:
            raise Refused("no hello with shared memory")
        return hello, map_rings(fds[0])
    finally:
        for fd in fds:
            os.close(fd)


def make_rings() -> int:
    """A memfd with both rings, all of it reserved, which cannot become smaller. Raises OSError."""
    fd = os.memfd_create("swarm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 2 * RING_BYTES)
        os.posix_fallocate(fd, 0, 2 * RING_BYTES)  # no memory left: an error here, not SIGBUS later
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_rings(fd: int) -> Rings:
    """The rings of a memfd.

    Raises:
        Refused: it could become smaller, at which a read of it would end this process; or it is none.
    """
    wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & wanted != wanted or os.fstat(fd).st_size != 2 * RING_BYTES:
            raise Refused("shared memory that is not sealed, or of another size")
        both = memoryview(mmap.mmap(fd, 2 * RING_BYTES))
    except (OSError, ValueError) as error:
        raise Refused(f"shared memory that is none: {error}") from None
    return both[:RING_BYTES], both[RING_BYTES:]


class MemoryStream(Stream):
    """Puts what its end writes into one ring, and gives it what comes in the other."""

    def __init__(
        self, end: Connection, out: memoryview, into: memoryview, opening: bytes, hello: bytes = b""
    ) -> None:
        super().__init__(end, opening, hello)
        self._out, self._into = out, into
        self._wrote = self._read = 0
        """Bytes so far, of all."""
        self._free = RING_BYTES
        """Of our ring, as far as the other end has said."""
        self._owed = 0
        """Bytes that we have read and not said so."""
        self._full = False
        self._unheard = 0
        """Messages since the socket took no more, and one; 0: it takes them."""
        self._said, self._here = memoryview(bytearray(_SAID_AT_ONCE)), 0

    # -- as a protocol of the socket ------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._said[self._here :]

    def buffer_updated(self, nbytes: int) -> None:
        self._here += nbytes
        whole = self._here - self._here % _SAYS.size
        room = RING_BYTES - self._owed  # all of these were said before what we say to them is heard
        for wrote, freed in _SAYS.iter_unpack(bytes(self._said[:whole])):
            room -= wrote
            if not self.end.over:
                self._hear(wrote, freed, room)
        self._said[: self._here - whole] = self._said[whole : self._here]
        self._here -= whole

    def _hear(self, wrote: int, freed: int, room: int) -> None:
        if not (wrote or freed) or room < 0 or freed > RING_BYTES - self._free:
            text = f"said {wrote} bytes written and {freed} read of a ring in memory, which cannot be"
            self.end.fail(BadAnswer(self.end.peer, text))
            return
        if freed:
            self._free += freed
            self.end.data_received(b"")
            if self._full and self._free >= MAX_WRITE_BYTES:
                self._full = False
                self.end.resume_writing()
        if wrote:
            data = self._copied(wrote)
            self._owed += wrote
            if self._owed >= TOLD_BYTES:
                self._say(0)
            self.end.data_received(data)
        if max(wrote, freed) < SMALL_BYTES:
            self._small_came()

    def _copied(self, size: int) -> bytes:
        """The next bytes that came. A copy: the other end can still change what lies in the ring."""
        at = self._read % RING_BYTES
        self._read += size
        if at + size <= RING_BYTES:
            return bytes(self._into[at : at + size])
        return bytes(self._into[at:]) + bytes(self._into[: at + size - RING_BYTES])

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._out = self._into = memoryview(b"")

    def pause_writing(self) -> None:
        self._unheard = 1

    def resume_writing(self) -> None:
        self._unheard = 0

    # -- as the transport of its end ------------------------------------------------------------

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """The ring is the buffer."""

    def writelines(self, list_of_data: Sequence[Buffer]) -> None:
        """All of these: there is room, or the end had been told to pause."""
        wrote = sum(map(self._put, list_of_data))
        self._free -= wrote
        if wrote:
            self._say(wrote)
        if self._free < MAX_WRITE_BYTES and not self._full:
            self._full = True
            self.end.pause_writing()

    def _put(self, data: Buffer) -> int:
        view = memoryview(data)
        at, size = self._wrote % RING_BYTES, view.nbytes
        first = min(size, RING_BYTES - at)
        self._out[at : at + first] = view[:first]
        self._out[: size - first] = view[first:]
        self._wrote += size
        return size

    def _say(self, wrote: int) -> None:
        self._below.write(_SAYS.pack(wrote, self._owed))
        self._owed = 0
        self._unheard += self._unheard > 0
        if self._unheard > MAX_UNHEARD:
            fault = PeerSilent(self.end.peer, "does not read its socket")
            asyncio.get_running_loop().call_soon(self.end.fail, fault)
