"""Giving out the states of stages: as they are now, and as they were saved.

    state   OpenState   → StateOpened + the SHA-256 of each chunk      a *lease* of one version
    chunk   FetchChunk  → VectorChunk + elements
    close   CloseState  → Ack                                          so that the next one need not wait
    saved   AskSaved    → Saved
    held    FetchVector → VectorChunk + elements                       the gradient of one step (members only)

`StateLeases` serves the first four, and needs no training: a keeper serves its checkpoint stores by it,

    StateLeases(run.id, transport, {stage: CheckpointStore(run, stage, folder) for stage in range(run.S)})

and a stage peer's `StateServer` one store and live weights, plus `held`. Stores are read in worker threads;
they may change at any time, and be added to the mapping.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from peers.clock import now_s
from peers.ports import Answer, Rank, Request, Transport
from peers.stage.all_reduce import CHUNK_ELEMENTS as VECTOR_ELEMENTS
from peers.stage.all_reduce import checksum
from peers.stage.state import StageCore
from peers.waiting import happens
from swarm.errors import NotReady, Refused, SetupError, SwarmError
from swarm.ids import Generation, PeerId, Stage
from swarm.protocol.rounds import Commit, Prepared
from swarm.wire.codec import dtype_name, encode
from swarm.wire.messages import (
    Ack,
    AskSaved,
    CloseState,
    FetchChunk,
    FetchVector,
    OpenState,
    Saved,
    SavedStage,
    StateOpened,
    StateTensor,
    VectorChunk,
    check_run,
    pack,
    unpack,
)

CHUNK_ELEMENTS = 1 << 18
"""Of a state: 1 MB of float32 with a hash of its own. Small enough that even 20 MB come evenly from several
sources; the hashes of 10 GB take 320 kB. A gradient comes from one source, in chunks of `VECTOR_ELEMENTS`."""
HASH_BYTES = 32
"""SHA-256."""
SHARED_WAIT_S = 2.0
"""How long a stage that shares weights waits here for this stage's sum, before it asks another peer."""
LEASE_S = 60.0
"""A copy that no peer read for this long is dropped; sooner if another one is wanted and no live peer seems
to read it."""
QUIET_S = 10.0
"""A reader that asked for nothing for this long is taken for dead while others wait ..."""
SLOW_TIMES = 3.0
"""... unless it was always slow: then this many times the longest pause that it made."""
MAX_LEASES = 2
"""Copies of live weights in host memory at once, each with its optimizer; and as many of saved versions."""
NO_RESULT = Prepared("", 0.0, "")
MAX_VERSIONS_TOLD = 64
"""Of each stage, the newest ones."""


class SavedStates(Protocol):
    """The saved versions of one stage. Both methods may block: they are called in worker threads."""

    def versions(self) -> Sequence[int]: ...

    def load(self, version: int) -> Mapping[str, torch.Tensor]:
        """Host tensors that are not written to.

        Raises:
            SetupError: it is not there, or damaged.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A whole state of one version. Its tensors are not written to."""

    version: int
    tensors: Mapping[str, torch.Tensor]
    generation: Generation = field(default=Generation())
    last_commit: Commit | None = None


@dataclass(slots=True)
class _Reader:
    read_at: float
    longest_pause_s: float = 0.0

    def reads(self, now: float) -> None:
        self.longest_pause_s = max(self.longest_pause_s, now - self.read_at)
        self.read_at = now

    def alive(self, now: float) -> bool:
        silent_s = min(LEASE_S, max(QUIET_S, SLOW_TIMES * self.longest_pause_s))
        return now - self.read_at <= silent_s


@dataclass(slots=True)
class _Lease:
    stage: Stage
    saved: bool
    opened: StateOpened
    tensors: Mapping[str, torch.Tensor]
    """Flat."""
    hashes: bytes
    read_at: float
    readers: dict[PeerId, _Reader] = field(default_factory=dict)

    def wanted(self, now: float) -> bool:
        """Whether a reader that seems alive has not read it to its end."""
        return any(reader.alive(now) for reader in self.readers.values())


class StateLeases:
    """Serves `state`, `chunk`, `close` and `saved`."""

    def __init__(
        self,
        run: str,
        transport: Transport,
        stores: Mapping[Stage, SavedStates],
        *,
        live: StateServer | None = None,
        most_saved: int | None = None,
    ) -> None:
        """`most_saved`: copies of saved versions in memory at once; by default `MAX_LEASES`."""
        self._run, self._stores, self._live, self._most_saved = run, stores, live, most_saved
        self._leases: dict[str, _Lease] = {}
        self._opening = asyncio.Lock()
        self._sweeper: asyncio.TimerHandle | None = None
        transport.serve("state", self._serve_open)
        transport.serve("chunk", self._serve_chunk)
        transport.serve("close", self._serve_close)
        transport.serve("saved", self._serve_saved)

    def gone(self, peer: PeerId) -> None:
        """The connection to `peer` broke: it reads no more."""
        for lease in self._leases.values():
            lease.readers.pop(peer, None)

    # -- opening ----------------------------------------------------------------------------------

    async def _serve_open(self, request: Request) -> Answer:
        wanted = unpack(request.header, OpenState)
        check_run(wanted.run, self._run)
        # One at a time: two that want the same version at the same moment get the same copy.
        async with self._opening:
            for other in self._leases.values():
                if other.stage == wanted.stage:  # a peer that opens another version has done with this one
                    other.readers.pop(request.peer, None)
            lease = await self._lease(wanted.stage, wanted.version)
            lease.read_at = now_s()
            lease.readers[request.peer] = _Reader(lease.read_at)
        return Answer(pack(lease.opened), [lease.hashes] if lease.hashes else ())

    async def _lease(self, stage: Stage, version: int) -> _Lease:
        """A copy of that version (negative: the newest), shared with its present readers."""
        live: int | None = None
        try:
            live = self._live.version(stage) if self._live is not None else None
        except SwarmError:
            if version < 0 or stage not in self._stores:
                raise
        if self._live is None and stage not in self._stores:
            raise Refused(f"this peer keeps no checkpoints of stage {stage}")
        if version < 0 and live is None:  # a keeper: the newest that was saved
            version = max(await self._versions(stage), default=-1)
            if version < 0:
                raise NotReady(
                    f"no version of stage {stage} is saved here yet", version=-1, retry_after_s=1.0
                )
        wanted = live if version < 0 else version
        generation = None if version >= 0 or self._live is None else self._live.generation
        for lease in self._leases.values():
            # The newest says where the run goes on; one that was saved, or made before that, does not.
            if (lease.stage, lease.opened.version) == (stage, wanted) and generation in (
                None,
                lease.opened.generation,
            ):
                return lease
        if live is not None and wanted == live:
            assert self._live is not None
            self._make_room(saved=False, version=live)
            snapshot = await self._live.snapshot()
            if version < 0 or snapshot.version == version:
                return await self._add(stage, snapshot, saved=False)
        return await self._add(stage, await self._load(stage, version, live), saved=True)

    async def _load(self, stage: Stage, version: int, live: int | None) -> Snapshot:
        store = self._stores.get(stage)
        there = await self._versions(stage)
        if store is None or version not in there:
            saved = ", ".join(map(str, there)) or "none"
            text = f"version {version} of stage {stage} is not here; saved are: {saved}"
            newest = max([*there, -1 if live is None else live])
            if version > newest:
                raise NotReady(text, version=newest, retry_after_s=1.0)
            raise Refused(text)
        self._make_room(saved=True, version=version)
        try:
            return Snapshot(version=version, tensors=await asyncio.to_thread(store.load, version))
        except SetupError as error:
            raise Refused(f"version {version} of stage {stage} cannot be given: {error.text}") from None

    async def _versions(self, stage: Stage) -> Sequence[int]:
        """Ascending."""
        store = self._stores.get(stage)
        return sorted(await asyncio.to_thread(store.versions)) if store is not None else []

    def _make_room(self, *, saved: bool, version: int) -> None:
        """Make room for one more copy: those without a live reader go."""
        now, most = now_s(), MAX_LEASES
        if saved and self._most_saved is not None:
            most = self._most_saved
        mine = {k: lease for k, lease in self._leases.items() if lease.saved == saved}
        for unread in [k for k, lease in mine.items() if not lease.wanted(now)]:
            del self._leases[unread], mine[unread]
        if len(mine) >= most:
            raise NotReady("others are downloading from this peer", version=version, retry_after_s=1.0)

    async def _add(self, stage: Stage, snapshot: Snapshot, *, saved: bool) -> _Lease:
        tensors = {name: tensor.reshape(-1) for name, tensor in snapshot.tensors.items()}
        described, hashes = await asyncio.to_thread(describe, tensors)
        digest = next((t.sha256[:32] for t in described if t.name == "weights"), "")
        opened = StateOpened(
            lease=secrets.token_hex(8),
            version=snapshot.version,
            generation=snapshot.generation,
            weights_digest=digest,
            last_commit=snapshot.last_commit,
            tensors=described,
        )
        lease = _Lease(stage, saved, opened, tensors, hashes, now_s())
        self._leases[opened.lease] = lease
        self._sweep_later()
        return lease

    def _sweep_later(self) -> None:
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(LEASE_S / 2, self._sweep)

    def _sweep(self) -> None:
        """Drop copies that are not read: gigabytes must not wait for the next request."""
        self._sweeper = None
        now = now_s()
        for old in [k for k, lease in self._leases.items() if now - lease.read_at > LEASE_S]:
            del self._leases[old]
        if self._leases:
            self._sweep_later()

    # -- reading ----------------------------------------------------------------------------------

    async def _serve_chunk(self, request: Request) -> Answer:
        wanted = unpack(request.header, FetchChunk)
        check_run(wanted.run, self._run)
        lease = self._leases.get(wanted.lease)
        if lease is None or wanted.name not in lease.tensors:
            raise Refused(f"no such download: {wanted.lease[:20]!r}, {wanted.name[:40]!r}; open one again")
        now = now_s()
        lease.read_at = now
        lease.readers.setdefault(request.peer, _Reader(now)).reads(now)
        vector = lease.tensors[wanted.name]
        _check_range(wanted.start, wanted.numel, vector.numel(), CHUNK_ELEMENTS)
        return _chunk(vector[wanted.start : wanted.start + wanted.numel], vector.numel())

    async def _serve_close(self, request: Request) -> Answer:
        """The caller has all that it wants of a lease; the copy stays a while for others."""
        wanted = unpack(request.header, CloseState)
        check_run(wanted.run, self._run)
        lease = self._leases.get(wanted.lease)
        if lease is not None:
            lease.readers.pop(request.peer, None)
        return Answer(pack(Ack()))

    async def _serve_saved(self, request: Request) -> Answer:
        check_run(unpack(request.header, AskSaved).run, self._run)
        found = {stage: set(await self._versions(stage)) for stage in self._stores}
        if self._live is not None and (last := self._live.last) is not None:
            found.setdefault(self._live.stage, set()).add(last)
        stages = [
            SavedStage(stage=stage, versions=tuple(sorted(found[stage])[-MAX_VERSIONS_TOLD:]))
            for stage in sorted(found)
            if found[stage]
        ]
        return Answer(pack(Saved(stages=tuple(stages))))


class StateServer:
    """What a stage peer gives out: to joiners its state and its checkpoints, to members that missed a step
    the gradient of that."""

    def __init__(self, core: StageCore, transport: Transport, store: SavedStates | None = None) -> None:
        self._core = core
        stores = {} if store is None else {core.stage: store}
        self.leases = StateLeases(core.run.id, transport, stores, live=self)
        transport.serve("held", self._serve_vector)

    def version(self, stage: Stage) -> int:
        """The version that `snapshot` would give now.

        Raises:
            Refused: this peer serves another stage.
            NotReady: it has no weights yet.
        """
        core = self._core
        if stage != core.stage:
            raise Refused(f"this peer serves stage {core.stage}, not {stage}")
        if not core.joined:
            raise NotReady("this peer is joining itself", version=-1, retry_after_s=1.0)
        return core.version

    @property
    def stage(self) -> Stage:
        return self._core.stage

    @property
    def generation(self) -> Generation:
        return self._core.generation

    @property
    def last(self) -> int | None:
        """The run's last version, once it is here: as good as saved, since nothing changes it any more."""
        core = self._core
        return core.version if core.joined and core.finished else None

    async def snapshot(self) -> Snapshot:
        """Between two jobs of the device: all of one version."""
        return await self._core.device.run(Rank.STEP, self._core.version, self._copy)

    def _copy(self) -> Snapshot:
        core = self._core
        version = core.compute.version
        return Snapshot(
            version=version, tensors=core.compute.state.copy(), generation=core.generation,
            last_commit=core.commits.get(version - 1),
        )  # fmt: skip

    async def _serve_vector(self, request: Request) -> Answer:
        """A chunk of a step's result: this stage's sum, or a part that this stage shares with another."""
        wanted = unpack(request.header, FetchVector)
        check_run(wanted.run, self._core.run.id)
        core, other = self._core, wanted.shared_with
        step = core.steps.get(wanted.t)
        if step is None and core.applied is not None and core.applied.t == wanted.t:
            step = core.applied
        held, total_sqnorm = NO_RESULT, -1.0
        vector = None
        if step is not None and other >= 0:
            if step.reduced is None:  # held back while it is being averaged
                await happens(step.reduced_there, SHARED_WAIT_S)
            vector = step.reduced
        elif step is not None and wanted.shared_of >= 0:  # for a replica that reaches no peer of that stage
            vector = step.shared.get(wanted.shared_of)
        elif (
            step is not None
            and step.prepared is not None
            and (step.commit is not None or wanted.round in ("", step.prepared.round))
        ):
            vector, held = step.reduced, step.prepared
            total_sqnorm = -1.0 if step.commit is None else step.commit.total_sqnorm
        if vector is None:
            raise NotReady(f"no such sum of step {wanted.t} is held here", version=core.version)
        numel = vector.numel() if other < 0 else core.compute.shared.numel(other)
        _check_range(wanted.start, wanted.numel, numel, VECTOR_ELEMENTS)
        end = wanted.start + wanted.numel
        if other < 0:
            part = vector[wanted.start : end]
        else:
            part = core.compute.shared.part(vector, other, wanted.start, end)
        return _chunk(part, numel, held, total_sqnorm)


def chunks_of(numel: int) -> list[tuple[int, int]]:
    """(first element, elements) of each chunk of a flat tensor."""
    return [(start, min(CHUNK_ELEMENTS, numel - start)) for start in range(0, numel, CHUNK_ELEMENTS)]


def _chunk(part: torch.Tensor, numel: int, held: Prepared = NO_RESULT, total_sqnorm: float = -1.0) -> Answer:
    """Elements of a vector of `numel`; with a step's whole result, its description and its commit's norm."""
    meta, body = encode(part, "none")
    chunk = VectorChunk(
        crc=checksum(body), total_numel=numel, tensors=(meta,), round=held.round,
        sqnorm=held.sqnorm, digest=held.digest, total_sqnorm=total_sqnorm,
    )  # fmt: skip
    return Answer(pack(chunk), body)


def _check_range(start: int, numel: int, total: int, most: int) -> None:
    """Raises: Refused."""
    if not (start >= 0 and 0 < numel <= most and start + numel <= total):
        raise Refused(
            f"elements {start} … {start + numel} are not a chunk of {total}; at most {most} at once"
        )


def describe(tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[StateTensor, ...], bytes]:
    """What is said of flat host tensors, and the SHA-256 of each chunk of each, in that order."""
    described: list[StateTensor] = []
    hashes = bytearray()
    for name, tensor in tensors.items():
        whole = hashlib.sha256()
        for start, numel in chunks_of(tensor.numel()):
            data = raw(tensor[start : start + numel])
            whole.update(data)
            hashes += hashlib.sha256(data).digest()
        described.append(
            StateTensor(
                name=name, numel=tensor.numel(), dtype=dtype_name(tensor.dtype), sha256=whole.hexdigest()
            )
        )
    return tuple(described), bytes(hashes)


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a host tensor of any dtype."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
