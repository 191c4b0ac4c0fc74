"""Tensors that peers give to one another, in chunks with a hash each: all that is too large for one message.

Each thing is opened by a question of its own (`state`, `held`), whose answer is a *lease* of it and
the digest of each chunk. From there on all are read in the same way, by `peers.transfer.client`:

    chunk   FetchChunk → Ack + the chunk's bytes; those of an exact sum packed (`swarm.wire.whole_numbers`)
    close   CloseLease → Ack                       so that the next one need not wait
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch

from peers.clock import now_s
from peers.ports import Answer, Request, Transport
from swarm.errors import NotReady, Refused
from swarm.ids import Generation, PeerId
from swarm.manifest import Run
from swarm.policy.timeouts import is_too_slow
from swarm.protocol.rounds import Commit, Prepared
from swarm.wire import whole_numbers
from swarm.wire.codec import bytes_of, chunk_digest, dtype_name
from swarm.wire.messages import Ack, CloseLease, FetchChunk, Opened, TensorForm, pack, say, unpack

CHUNK_BYTES = 1 << 20
"""Small enough that even 20 MB come evenly from several sources; the hashes of 10 GB take 320 kB."""
LEASE_S = 60.0
"""A lease that no peer read for so long is dropped; sooner if another is wanted and no live peer reads it."""
QUIET_S = 10.0
"""A reader that asked for nothing for this long is taken for dead while others wait ..."""
SLOW_TIMES = 3.0
"""... unless it was always slow: then this many times the longest pause that it made."""
REST_S = 30.0
"""A reader that lost its place because it was slow gets no other for so long."""
NO_PLACE = "others are downloading from this peer"
MAX_READERS = 4096
"""That are known of a lease, which a keeper has for as long as its file; a forgotten one counts as new."""


class Snapshot(NamedTuple):
    """Tensors of one version, in host memory, that are not written to."""

    version: int
    tensors: Mapping[str, torch.Tensor]
    generation: Generation = Generation()
    last_commit: Commit | None = None
    prepared: Prepared | None = None
    """Of a reduced gradient."""
    pinned: Mapping[int, Mapping[str, torch.Tensor]] = {}
    """Other versions that the peer keeps, of one that pauses."""

    @property
    def versions(self) -> list[tuple[int, Mapping[str, torch.Tensor]]]:
        """All of them with their tensors, this one last."""
        return [*self.pinned.items(), (self.version, self.tensors)]


class _Reader(msgspec.Struct):
    opened_at: float
    read_at: float
    longest_pause_s: float = 0.0
    chunks: int = 0
    """A bit for each that it asked for: one that is read again is no progress."""
    read_bytes: int = 0
    done: bool = False
    """It said so, or went away. If it reads on nevertheless it is as slow as it was."""

    def reads(self, index: int, size_bytes: int, now: float) -> None:
        self.longest_pause_s = max(self.longest_pause_s, now - self.read_at)
        self.read_bytes += size_bytes * (not self.chunks >> index & 1)
        self.read_at, self.chunks, self.done = now, self.chunks | 1 << index, False

    def alive(self, now: float) -> bool:
        silent_s = min(LEASE_S, max(QUIET_S, SLOW_TIMES * self.longest_pause_s))
        return not self.done and now - self.read_at <= silent_s and not self.too_slow(now)

    def too_slow(self, now: float) -> bool:
        """It reads less than the slowest line carries: while others wait, it makes way."""
        return is_too_slow(self.read_bytes, now - self.opened_at - QUIET_S / 2)


class Lease(msgspec.Struct, eq=False):
    pool: str
    """Leases of one pool share a limit."""
    what: Hashable
    """What it is of, within its pool."""
    opened: Opened
    chunks: Sequence[torch.Tensor]
    hashes: bytes
    lent: torch.Tensor | None
    """What is held here anyway, and given out by this lease. None: it is a copy, made for its readers."""
    read_at: float
    readers: dict[PeerId, _Reader] = {}

    def wanted(self, now: float) -> bool:
        """Whether a reader that seems alive has not read it to its end."""
        return any(reader.alive(now) for reader in self.readers.values())

    def reader(self, peer: PeerId, now: float) -> _Reader:
        """What is known of a reader, from now on; the one that read longest ago may be forgotten for it."""
        found = self.readers[peer] = self.readers.pop(peer, None) or _Reader(now, now)
        if len(self.readers) > MAX_READERS:
            del self.readers[next(iter(self.readers))]
        return found

    def left_by(self, peer: PeerId) -> None:
        """`peer` reads it no more."""
        if peer in self.readers:
            self.readers[peer].done = True


class Leases:
    """What this peer has opened to others. Serves `chunk` and `close`."""

    def __init__(self, run: Run, transport: Transport) -> None:
        self._run, self._runs = run, (run.id, run.whole.id)
        self._leases: dict[str, Lease] = {}
        self._rests: dict[PeerId, tuple[float, str]] = {}
        """Readers that get no other place: until when, and why."""
        self._lending, self._packing = asyncio.Lock(), asyncio.Lock()
        self._sweeper: asyncio.TimerHandle | None = None
        transport.serve("chunk", self._serve_chunk)
        transport.serve("close", self._serve_close)

    def gone(self, peer: PeerId) -> None:
        """The connection to `peer` broke: it reads no more."""
        for lease in self._leases.values():
            lease.left_by(peer)

    def of(self, *pools: str) -> list[Lease]:
        """The open leases of some pools."""
        return [lease for lease in self._leases.values() if lease.pool in pools]

    def require_no_rest(self, peer: PeerId) -> None:
        """Return if `peer` may have a place. Raises NotReady: it had one a moment ago."""
        now = now_s()
        self._rests = {other: rest for other, rest in self._rests.items() if now < rest[0]}
        if peer in self._rests:
            raise NotReady(f"{self._rests[peer][1]}: try again later", version=-1, retry_after_s=1.0)

    def make_room(self, pool: str, most: int, *, version: int) -> None:
        """Make room for one more copy: those without a live reader go.

        Raises:
            NotReady: as many as there may be are being read. `version`: this peer's.
        """
        now, why = now_s(), "this download was slower than any line, and others waited"
        for unread in [lease for lease in self.of(pool) if not lease.wanted(now)]:
            del self._leases[unread.opened.lease]
            slow = [peer for peer, one in unread.readers.items() if not one.done and one.too_slow(now)]
            self._rests |= dict.fromkeys(slow, (now + REST_S, why))
        if len(self.of(pool)) >= most:
            raise NotReady(NO_PLACE, version=version, retry_after_s=1.0)

    async def add(
        self, pool: str, what: Hashable, content: Snapshot, lent: torch.Tensor | None = None
    ) -> Lease:
        """A new lease of `content`, whose chunks are hashed for it."""
        self._drop_old()
        tensors = flat(content.tensors)
        chunks = chunks_of(tensors)
        hashes = await asyncio.to_thread(lambda: b"".join(map(chunk_digest, chunks)))
        opened = Opened(
            lease=secrets.token_hex(8), version=content.version, generation=content.generation,
            last_commit=content.last_commit, prepared=content.prepared, tensors=forms_of(tensors),
        )  # fmt: skip
        if say(opened)[1]:  # what proves it of so many stages fits into no header: readers do without it
            opened = msgspec.structs.replace(opened, last_commit=None)
        lease = self._leases[opened.lease] = Lease(pool, what, opened, chunks, hashes, lent, now_s())
        self._sweep_later()
        return lease

    def read_by(self, reader: PeerId, lease: Lease) -> Answer:
        """The answer to a peer that has asked for what `lease` is of."""
        lease.read_at = now = now_s()
        known = lease.reader(reader, now)
        known.read_at, known.done = now, False
        return Answer(pack(lease.opened), [lease.hashes] if lease.hashes else ())

    async def lend(
        self, reader: PeerId, pool: str, what: Hashable, content: Snapshot, lent: torch.Tensor
    ) -> Answer:
        """Open `content`, which is made of `lent`, until it was read: one lease for all that read it."""
        async with self._lending:
            known = (lease for lease in self.of(pool) if lease.lent is lent and lease.what == what)
            lease = next(known, None) or await self.add(pool, what, content, lent)
        return self.read_by(reader, lease)

    def _sweep_later(self) -> None:
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(LEASE_S / 2, self._sweep)

    def _sweep(self) -> None:
        """Drop what is not read: gigabytes must not wait for the next request."""
        self._sweeper = None
        self._drop_old()
        if self._leases:
            self._sweep_later()

    def _drop_old(self) -> None:
        self._leases = {name: lease for name, lease in self._leases.items() if not self._is_old(lease)}

    def _is_old(self, lease: Lease) -> bool:
        return now_s() - lease.read_at > LEASE_S

    async def _serve_chunk(self, request: Request) -> Answer:
        wanted = unpack(request.header, FetchChunk, *self._runs)
        lease = self._leases.get(wanted.lease)
        if lease is None:
            raise Refused(f"no such download: {wanted.lease[:20]!r}; open one again")
        if not 0 <= wanted.index < len(lease.chunks):
            raise Refused(f"there is no chunk {wanted.index} of {len(lease.chunks)}")
        lease.read_at = now = now_s()
        chunk = lease.chunks[wanted.index]
        lease.reader(request.peer, now).reads(wanted.index, chunk.nbytes, now)
        if chunk.dtype != torch.int64:
            return Answer(pack(Ack()), [bytes(bytes_of(chunk))])  # a slow reader keeps no more
        async with self._packing:  # 2 ms each, and one may ask for 200 in a second
            return Answer(pack(Ack()), await asyncio.to_thread(whole_numbers.pack, chunk))

    async def _serve_close(self, request: Request) -> Answer:
        """The caller has all that it wants of a lease. A copy stays a while for others."""
        lease = self._leases.get(unpack(request.header, CloseLease, *self._runs).lease)
        if lease is not None:
            lease.left_by(request.peer)
        return Answer(pack(Ack()))


def flat(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as vectors, by name: in this order their chunks are counted."""
    return {name: tensors[name].reshape(-1) for name in sorted(tensors)}


def chunks_of(vectors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    there = [vector for vector in vectors.values() if vector.numel()]
    return [chunk for vector in there for chunk in vector.split(CHUNK_BYTES // vector.element_size())]


def forms_of(vectors: Mapping[str, torch.Tensor]) -> tuple[TensorForm, ...]:
    """What two peers must agree on before they count chunks."""
    return tuple(
        TensorForm(name=name, numel=vector.numel(), dtype=dtype_name(vector.dtype))
        for name, vector in vectors.items()
    )
