"""Downloading the state of a stage from several peers at once.

Each source is asked to open a lease; it answers with the version and the SHA-256 of every chunk. Sources that
say the same of every chunk form a group, and the largest group is believed. Its members are then read all at
once: each has a few requests in flight and takes the next missing chunk, so fast ones give more. A chunk is
kept only if it fits its hash, so nothing that one source says can spoil what another one gave; a source that
sends anything else is not asked again. A source that dies gives its chunks back to the others, and what is
here is kept even when all of them die (`Partial`).

What this proves: the state is one that the believed group agrees on. A single source that lies with hashes
that fit its lie cannot be found out here; with three sources or more the majority decides. What a wrong state
could do is bounded further on: members compare the digests of their weights at every step.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
import torch

from peers.clock import now_s
from peers.events import Downloading, Emit
from peers.fault_points import fault_point
from peers.ports import Answer, Transport
from peers.stage.all_reduce import read_part
from peers.transfer.server import HASH_BYTES, chunks_of, raw
from peers.waiting import happens
from swarm.errors import BadAnswer, Busy, NotNow, NotReady, PeerFault, SwarmError, short
from swarm.ids import PeerId, Stage
from swarm.manifest import Run
from swarm.wire.codec import dtype_name
from swarm.wire.messages import (
    CloseState,
    FetchChunk,
    OpenState,
    StateOpened,
    VectorChunk,
    pack,
    unpack_answer,
)

MAX_SOURCES = 8
"""Each makes a copy of its state for this download."""
IN_FLIGHT = 6
"""Chunks asked of one source at once: 6 MB of float32 fill 500 Mbit/s over 100 ms."""
OPEN_S = 120.0
"""To copy and hash gigabytes. A dead or hung source is noticed much earlier, by its silence."""
GATHER_S = 5.0
"""Once a source is open, others have this long to open too; later ones join in on the way."""
CHUNK_S = 120.0
"""Limit for one chunk: `IN_FLIGHT` of 2 MB share a line that may have 1 Mbit/s."""
AGAIN_AFTER = 2.0
"""When nothing is left to ask for, a source that is done fetches what another one has had in flight for this
many times as long as itself ever took for a chunk, ..."""
AGAIN_S = 1.5
"""... and at least so long: the last chunks of ordinary sources should not be fetched twice."""
RECRUIT_S = 1.0
RECRUIT_TRIES = 10
"""How often one that was at another version, or not ready, is asked for the version being downloaded."""
CLOSE_S = 1.0
BUSY_TRIES = 20
SHOW_S = 2.0
"""Between two words about a download."""

Progress: TypeAlias = Callable[[int, int, int], None]
"""(bytes that are here, bytes in all, sources now)."""


def shown(stage: Stage, version: int, emit: Emit) -> Progress:
    """Says every `SHOW_S` how far a download is, and its end if it took that long."""
    shown_at = began = now_s()

    def progress(done_bytes: int, total_bytes: int, sources: int) -> None:
        nonlocal shown_at
        if now_s() - shown_at > SHOW_S or (done_bytes == total_bytes and shown_at > began):
            shown_at = now_s()
            emit(
                Downloading(
                    stage=stage, version=version, done_bytes=done_bytes, total_bytes=total_bytes,
                    sources=sources,
                )
            )  # fmt: skip

    return progress


class DownloadFailed(SwarmError):
    """No source gives the whole state. What came is in the `Partial`."""

    code = "download"

    def __init__(self, stage: Stage, reasons: Mapping[PeerId, str]) -> None:
        self.reasons = dict(reasons)
        why = "; ".join(reasons.values()) or "no peer serves it"
        super().__init__(f"could not download stage {stage}: {why}")


@dataclass(frozen=True, kw_only=True)
class Download:
    """A whole state, each byte of it checked."""

    opened: StateOpened
    tensors: dict[str, torch.Tensor]
    sources: tuple[PeerId, ...]
    """Those that gave it, the one that gave most first."""
    received_bytes: int
    """Without what was here already."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    name: str
    start: int
    numel: int
    sha256: bytes


class Partial:
    """What is here of a state. Given to the next download of that stage, it saves what still fits.

    Chunks are known by their hashes, so it does not matter which source gave them, or of which version they
    were.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._have: dict[tuple[str, int], bytes] = {}

    def fit(self, like: Mapping[str, torch.Tensor]) -> None:
        """Be about states of this form: of another one, nothing can be used."""
        if {n: (t.numel(), t.dtype) for n, t in self._tensors.items()} != _form(like):
            self._have.clear()
            self._tensors = {
                name: torch.empty(t.numel(), dtype=t.dtype, device="cpu") for name, t in like.items()
            }

    def has(self, chunk: _Chunk) -> bool:
        return self._have.get((chunk.name, chunk.start)) == chunk.sha256

    def part(self, chunk: _Chunk) -> torch.Tensor:
        """Where the chunk goes. What was there is void until `keep`."""
        self._have.pop((chunk.name, chunk.start), None)
        return self._tensors[chunk.name][chunk.start : chunk.start + chunk.numel]

    def keep(self, chunk: _Chunk) -> None:
        self._have[chunk.name, chunk.start] = chunk.sha256

    def forget(self, chunks: Iterable[_Chunk]) -> None:
        for chunk in chunks:
            self._have.pop((chunk.name, chunk.start), None)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._tensors

    def take(self, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Hand the tensors out; nothing of them is here any more."""
        taken = {name: self._tensors[name].reshape(t.shape) for name, t in like.items()}
        self._tensors, self._have = {}, {}
        return taken


@dataclass(frozen=True, kw_only=True)
class Offer:
    """The lease that one source opened."""

    source: PeerId
    opened: StateOpened
    hashes: Mapping[str, bytes]
    """Of each tensor: its chunks' SHA-256, one after another."""

    @property
    def content(self) -> tuple[object, ...]:
        """Equal for two sources exactly if they offer the same version with the same bytes."""
        whole = {tensor.name: tensor.sha256 for tensor in self.opened.tensors}
        return (
            self.opened.version,
            tuple((name, whole[name], self.hashes[name]) for name in sorted(self.hashes)),
        )


def believed(offers: Sequence[Offer]) -> list[Offer]:
    """The largest group of equal offers; of equally large ones the newest, then that of the smallest peer."""
    groups: dict[tuple[object, ...], list[Offer]] = {}
    for offer in sorted(offers, key=lambda offer: offer.source):
        groups.setdefault(offer.content, []).append(offer)
    return max(groups.values(), key=lambda group: (len(group), max(offer.opened.position for offer in group)))


def agreed(group: Sequence[Offer]) -> StateOpened:
    """What a group says of its state, where that is no matter of hashes: the generation and the last go.

    What most say; if as many say something else, the earlier generation, since a later one is soon told by a
    directive.
    """
    generations = Counter(offer.opened.generation for offer in group)
    commits = Counter(offer.opened.last_commit for offer in group if offer.opened.last_commit is not None)
    return msgspec.structs.replace(
        group[0].opened,
        generation=min(generations, key=lambda generation: (-generations[generation], generation)),
        last_commit=max(commits, key=lambda commit: commits[commit], default=None),
    )


async def download_state(
    run: Run,
    stage: Stage,
    like: Mapping[str, torch.Tensor],
    transport: Transport,
    sources: Sequence[PeerId],
    *,
    version: int = -1,
    partial: Partial | None = None,
    progress: Progress = lambda done, total, sources: None,
    on_fault: Callable[[PeerFault], None] = lambda fault: None,
) -> Download:
    """Weights and optimizer of one version of `stage`, checked chunk by chunk.

    Args:
        like: a state of that stage, for names, sizes and dtypes; its numbers are not looked at.
        sources: the first `MAX_SOURCES` are asked.
        version: of a checkpoint; negative: the newest.
        partial: keeps what came when this fails, and is told what came before.
        on_fault: hears of each source that misbehaved or died; it is not asked again.

    Raises:
        DownloadFailed: with each source's reason; `partial` holds what came.
    """
    asked = [p for p in dict.fromkeys(sources) if p != transport.peer_id][:MAX_SOURCES]
    this = _Downloading(run, stage, like, transport, version, partial or Partial(), progress, on_fault)
    return await this.from_(asked)


@dataclass(eq=False, slots=True)
class _Downloading:
    """One call of `download_state`."""

    run: Run
    stage: Stage
    like: Mapping[str, torch.Tensor]
    transport: Transport
    version: int
    partial: Partial
    progress: Progress
    on_fault: Callable[[PeerFault], None]
    reasons: dict[PeerId, str] = field(default_factory=dict)
    """Why a source gives nothing, or did not at first."""
    useless: set[PeerId] = field(default_factory=set)
    leases: dict[PeerId, str] = field(default_factory=dict)
    given_bytes: Counter[PeerId] = field(default_factory=Counter)

    async def from_(self, sources: Sequence[PeerId]) -> Download:
        self.partial.fit(self.like)
        while True:  # each time round, a group of sources has become useless
            offers = await self._open_all([p for p in sources if p not in self.useless])
            if not offers:
                raise DownloadFailed(self.stage, self.reasons)
            group = believed(offers)
            members = {offer.source for offer in group}
            await self._close([p for p in self.leases if p not in members])
            others = [p for p in sources if p not in members | self.useless]
            if await self._pull(group, others):
                await self._close(list(self.leases))
                return Download(
                    opened=agreed(group), tensors=self.partial.take(self.like),
                    sources=tuple(peer for peer, _ in self.given_bytes.most_common()),
                    received_bytes=sum(self.given_bytes.values()),
                )  # fmt: skip

    def _failed(self, source: PeerId, error: SwarmError) -> None:
        if isinstance(error, PeerFault):
            self.reasons[source] = error.text
            self.on_fault(error)
        else:
            self.reasons[source] = f"peer {short(source)}: {error.text}"

    # -- opening ----------------------------------------------------------------------------------

    async def _open_all(self, sources: Sequence[PeerId]) -> list[Offer]:
        offers: list[Offer] = []
        opening = {asyncio.create_task(self._open(source, self.version)): source for source in sources}
        until = float("inf")
        pending = set(opening)
        try:
            while pending and now_s() < until:
                limit_s = None if not offers else until - now_s()
                done, pending = await asyncio.wait(
                    pending, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    try:
                        offers.append(task.result())
                    except SwarmError as error:
                        self._failed(opening[task], error)
                        if not isinstance(error, NotNow):
                            self.useless.add(opening[task])
                if offers and until == float("inf"):
                    until = now_s() + GATHER_S
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        return offers

    async def _open(self, source: PeerId, version: int) -> Offer:
        chunks = sum(len(chunks_of(tensor.numel())) for tensor in self.like.values())
        question = pack(OpenState(run=self.run.id, stage=self.stage, version=version))
        answer = await self.transport.call(
            source, "state", question, max_answer_bytes=chunks * HASH_BYTES, deadline_s=OPEN_S
        )
        offer = self._read_offer(source, answer, version)
        self.leases[source] = offer.opened.lease
        return offer

    def _read_offer(self, source: PeerId, answer: Answer, version: int) -> Offer:
        """Raises: BadAnswer."""
        opened = unpack_answer(source, answer.header, StateOpened)
        offered = [(t.name, t.numel, t.dtype) for t in opened.tensors]
        expected = [(name, t.numel(), dtype_name(t.dtype)) for name, t in self.like.items()]
        if sorted(offered) != sorted(expected):
            names = [t.name[:40] for t in opened.tensors][:8]
            raise BadAnswer(source, f"offers a state that is not stage {self.stage}'s: {names}")
        if version >= 0 and opened.version != version:
            raise BadAnswer(source, f"offers version {opened.version} instead of {version}")
        if not 0 <= opened.version <= self.run.steps:
            raise BadAnswer(source, f"offers version {opened.version} of a run of {self.run.steps} steps")
        if opened.generation.number < 0 or not 0 <= opened.generation.start <= self.run.steps:
            raise BadAnswer(
                source, f"offers version {opened.version} of an impossible generation: {opened.generation}"
            )
        body = b"".join(answer.body)
        hashes: dict[str, bytes] = {}
        at = 0
        for tensor in opened.tensors:
            end = at + len(chunks_of(tensor.numel)) * HASH_BYTES
            hashes[tensor.name], at = body[at:end], end
            if tensor.name == "weights" and tensor.sha256[:32] != opened.weights_digest:
                raise BadAnswer(source, "the weights do not fit their digest")
        if at != len(body):
            raise BadAnswer(source, f"{len(body)} bytes of chunks' hashes; expected {at}")
        return Offer(source=source, opened=opened, hashes=hashes)

    async def _close(self, sources: Sequence[PeerId]) -> None:
        """End leases, so that the next reader need not wait. A courtesy: failures do not matter."""

        async def close(source: PeerId) -> None:
            header = pack(CloseState(run=self.run.id, lease=self.leases.pop(source)))
            with contextlib.suppress(SwarmError):
                await self.transport.call(source, "close", header, deadline_s=CLOSE_S)

        await asyncio.gather(*(close(source) for source in sources))

    # -- pulling ----------------------------------------------------------------------------------

    async def _pull(self, group: Sequence[Offer], others: Sequence[PeerId]) -> bool:
        """Read what is missing from the whole group; False if all of it failed before the end."""
        model = group[0]
        chunks = [
            _Chunk(name, start, numel, model.hashes[name][i * HASH_BYTES : (i + 1) * HASH_BYTES])
            for name, tensor in self.like.items()
            for i, (start, numel) in enumerate(chunks_of(tensor.numel()))
        ]
        pull = _Pull(self, chunks)
        pull.tell()
        readers = {asyncio.create_task(pull.read(o.source, o.opened.lease)): o.source for o in group}
        recruits = {asyncio.create_task(self._recruit(pull, model, p)): p for p in others}
        work: dict[asyncio.Task[object], PeerId] = {**readers, **recruits}
        complete = asyncio.create_task(pull.complete.wait())
        pending: set[asyncio.Task[object]] = {complete, *work}
        try:
            while not pull.complete.is_set() and (pull.active or pending & readers.keys()):
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {complete}:
                    error = task.exception()
                    if isinstance(error, SwarmError):
                        self.leases.pop(work[task], None)
                        self.useless.add(work[task])
                        self._failed(work[task], error)
                    elif error is not None:
                        raise error
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        return pull.complete.is_set() and await self._verify(group, chunks)

    async def _recruit(self, pull: _Pull, model: Offer, source: PeerId) -> None:
        """Ask a source of another version, or a late one, for the version that is being downloaded."""
        for _ in range(RECRUIT_TRIES):
            try:
                offer = await self._open(source, model.opened.version)
            except NotReady as not_ready:
                await asyncio.sleep(max(RECRUIT_S, not_ready.retry_after_s))
                continue
            except PeerFault:
                raise
            except SwarmError:
                return  # it is past that version: of use only for another one
            if offer.content != model.content:
                await self._close([source])
                return
            await pull.read(source, offer.opened.lease)
            return

    async def _verify(self, group: Sequence[Offer], chunks: Sequence[_Chunk]) -> bool:
        """Whether each tensor fits the SHA-256 of its whole: if not, the group's own words do not fit."""
        for described in group[0].opened.tensors:
            found = await asyncio.to_thread(hashlib.sha256, raw(self.partial.tensors[described.name]))
            if found.hexdigest() != described.sha256:
                self.partial.forget(chunks)
                for offer in group:
                    self.useless.add(offer.source)
                    text = f"{described.name} does not fit its SHA-256"
                    self._failed(offer.source, BadAnswer(offer.source, text))
                return False
        return True


class _Pull:
    """The chunks that are missing, and which source is asked for which."""

    def __init__(self, of: _Downloading, chunks: Sequence[_Chunk]) -> None:
        self._of = of
        missing = [chunk for chunk in chunks if not of.partial.has(chunk)]
        self._queue = deque(missing)
        self._missing = set(missing)
        self._flying: dict[_Chunk, dict[PeerId, float]] = {}
        """The sources that were asked for it, and since when."""
        self._slowest_s: dict[PeerId, float] = {}
        """The longest that a source took for a chunk."""
        self._changed = asyncio.Event()
        self.active: set[PeerId] = set()
        self.complete = asyncio.Event()
        if not missing:
            self.complete.set()
        self._total_bytes = sum(map(self._nbytes, chunks))
        self._here_bytes = self._total_bytes - sum(map(self._nbytes, missing))

    def _nbytes(self, chunk: _Chunk) -> int:
        return chunk.numel * self._of.like[chunk.name].element_size()

    def tell(self) -> None:
        self._of.progress(self._here_bytes, self._total_bytes, len(self.active))

    async def read(self, source: PeerId, lease: str) -> None:
        """Fetch chunks from one source until none is missing.

        Raises:
            SwarmError: it does not give them; those that it had are in the queue again.
        """
        self.active.add(source)
        workers = [asyncio.create_task(self._work(source, lease, turn)) for turn in range(IN_FLIGHT)]
        try:
            await asyncio.gather(*workers)
        finally:
            self.active.discard(source)
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, source: PeerId, lease: str, turn: int) -> None:
        for _ in range(turn):
            await asyncio.sleep(0)  # the first source must not take all chunks before the second has one
        while (chunk := await self._next(source)) is not None:
            began = now_s()
            self._flying.setdefault(chunk, {})[source] = began
            try:
                await self._fetch(source, lease, chunk)
            finally:
                flying = self._flying[chunk]
                flying.pop(source, None)
                if not flying:
                    del self._flying[chunk]
                    if chunk in self._missing:
                        self._queue.appendleft(chunk)
                self._wake()
            self._slowest_s[source] = max(self._slowest_s.get(source, 0.0), now_s() - began)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _next(self, source: PeerId) -> _Chunk | None:
        """What `source` is to fetch; None: nothing is missing any more."""
        while self._missing:
            if self._queue:
                return self._queue.popleft()
            wait_s = CHUNK_S
            slow = [
                (min(by.values()), chunk)
                for chunk, by in self._flying.items()
                if chunk in self._missing and source not in by
            ]
            if slow:
                since, chunk = min(slow, key=lambda item: item[0])
                allowed_s = max(AGAIN_S, AGAIN_AFTER * self._slowest_s.get(source, 0.0))
                wait_s = since + allowed_s - now_s()
                if wait_s <= 0:
                    return chunk
            await happens(self._changed, wait_s)
        return None

    async def _fetch(self, source: PeerId, lease: str, chunk: _Chunk) -> None:
        answer = await self._ask(source, lease, chunk)
        fault_point("joining")
        told = unpack_answer(source, answer.header, VectorChunk)
        dtype = self._of.like[chunk.name].dtype
        part = read_part(source, told.tensors, told.crc, answer.body, chunk.numel, "none", dtype)
        if (await asyncio.to_thread(hashlib.sha256, raw(part))).digest() != chunk.sha256:
            text = f"elements from {chunk.start} of {chunk.name} do not fit their SHA-256"
            raise BadAnswer(source, text)
        if chunk not in self._missing:
            return  # another source was faster
        self._of.partial.part(chunk).copy_(part)
        self._of.partial.keep(chunk)
        self._missing.discard(chunk)
        self._here_bytes += self._nbytes(chunk)
        self._of.given_bytes[source] += self._nbytes(chunk)
        self.tell()
        if not self._missing:
            self.complete.set()

    async def _ask(self, source: PeerId, lease: str, chunk: _Chunk) -> Answer:
        wanted = FetchChunk(
            run=self._of.run.id, lease=lease, name=chunk.name, start=chunk.start, numel=chunk.numel
        )
        for attempt in range(BUSY_TRIES):
            try:
                return await self._of.transport.call(
                    source, "chunk", pack(wanted), max_answer_bytes=self._nbytes(chunk), deadline_s=CHUNK_S
                )
            except Busy as busy:
                if attempt == BUSY_TRIES - 1:
                    raise
                await asyncio.sleep(busy.retry_after_s)
        raise AssertionError("unreachable")


def _form(like: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, torch.dtype]]:
    return {name: (tensor.numel(), tensor.dtype) for name, tensor in like.items()}
