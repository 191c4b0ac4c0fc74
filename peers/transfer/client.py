"""Downloading large things, such as the state of a stage, from several peers at once.

Each source is asked to open a lease (`peers.transfer.leases`); it answers with the digest of every chunk.
Which of them are believed, and what becomes of those that stall or die: docs/design.md, *Joining*. A single
source that lies with hashes that fit its lie cannot be found out here. What a wrong state could do is bounded
further on: replicas compare the digests of their weights at every step.
"""

from __future__ import annotations

import asyncio
from asyncio import FIRST_COMPLETED
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
import torch

from peers.clock import now_s
from peers.events import Downloading, Emit
from peers.fault_points import fault_point
from peers.ports import Answer, NetworkPath, Transport
from peers.transfer.leases import chunks_of, flat, forms_of
from peers.waiting import TaskKeeper, end_tasks, for_each, happens, pulse
from swarm.digest import DIGEST_BYTES
from swarm.errors import BadAnswer, Busy, NotNow, NotReady, PeerFault, Refused, SwarmError, short
from swarm.ids import Generation, PeerId, Position, Stage
from swarm.manifest import Run
from swarm.model.layout import empty_state
from swarm.model.reductions import state_digest
from swarm.policy.timeouts import most_s
from swarm.protocol.rollback import check_generation
from swarm.protocol.rounds import NO_VOICE, Commit
from swarm.protocol.voice import heard, weight
from swarm.wire.chunks import most_chunk_bytes, unpack_chunk
from swarm.wire.codec import chunk_digest
from swarm.wire.messages import (
    Ack,
    CloseLease,
    FetchChunk,
    Opened,
    OpenHeld,
    OpenState,
    as_bad_answer,
    pack,
    unpack_answer,
)
from swarm.wire.trails import Word, weights_of

MAX_SOURCES = 8
"""Each makes a copy of its state for this download."""
IN_FLIGHT = 6
"""Chunks asked of one source at once: 6 MB fill 500 Mbit/s over 100 ms."""
COPIED_S = 120.0
"""For a source to copy its state: between two jobs of its device, or from its disk, one reader at a time. A
dead or hung source is noticed much earlier, by its silence."""
HELD_BACK_S = 5.0
"""More than a source holds a question back for what it shares with another stage or island."""
HASHED_BYTES_PER_S = 50e6
"""What a source hashes, however old its processor."""
GATHER_S = 5.0
"""Once a source is open, others have this long to open too; later ones join in on the way."""
VOICED_S = 60.0
"""How long sources without voice are not believed while one with voice lives and gives nothing to us."""
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
FIRST_SHARE = 1 / 16
"""Of the time that a source may take, for one of which nothing is known: of a crowd each can take all."""
SHOW_S = 2.0
"""Between two words about a download."""

Progress: TypeAlias = Callable[[int, int, int], None]
"""(bytes that are here, bytes in all, sources now)."""
_closing = TaskKeeper()
Question: TypeAlias = OpenState | OpenHeld
"""What opens a lease."""


def shown(stage: Stage, version: int, emit: Emit) -> Progress:
    """Says every `SHOW_S` how far a download is, and its end if it took that long."""
    shown_at = began = now_s()

    def progress(done: int, total: int, peers: int) -> None:
        nonlocal shown_at
        if now_s() - shown_at > SHOW_S or (done == total and shown_at > began):
            shown_at = now_s()
            emit(Downloading(stage=stage, version=version, done_bytes=done, total_bytes=total, sources=peers))

    return progress


class DownloadFailed(SwarmError):
    """No source gives all of it. What came is in the `Partial`."""

    code = "download"

    def __init__(self, what: str, reasons: Mapping[PeerId, str]) -> None:
        self.reasons = dict(reasons)
        why = "; ".join(reasons.values()) or "no peer serves it"
        super().__init__(f"could not download {what}: {why}")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is downloaded, and how it is told from something else."""

    name: str
    """As errors call it."""
    question: Question
    """That opens it."""
    like: Mapping[str, torch.Tensor]
    """Names, shapes and dtypes; the numbers are not looked at."""
    can_be: Callable[[PeerId, Opened], None] = lambda source, opened: None
    """Raises BadAnswer for an offer that cannot be."""
    fits: Callable[[Opened, Mapping[str, torch.Tensor]], str | None] = lambda opened, tensors: None
    """What is wrong with all of it together, though each chunk fits its hash. Called in a thread."""
    gather_s: float = GATHER_S
    """How long the first source that is open waits for others, which may say something else."""
    share: Callable[[PeerId], float] = lambda source: 1.0
    """Of the time that a source may take to open it, what it gets."""


@dataclass(frozen=True, kw_only=True)
class Download:
    """All that was wanted, each byte of it checked."""

    opened: Opened
    tensors: dict[str, torch.Tensor]
    sources: tuple[PeerId, ...]
    """Those that gave it, the one that gave most first."""
    agreed: frozenset[PeerId] = frozenset()
    """Those that offered just this, and were believed."""
    voiced: bool = False
    """One of these has voice."""


class Partial:
    """What is here of some tensors. Given to the next download of them, it saves what still fits.

    Chunks are known by their hashes, so it does not matter which source gave them, or of which version they
    were.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._have: dict[int, bytes] = {}
        self.chunks: list[torch.Tensor] = []
        """Where each goes."""

    def fit(self, like: Mapping[str, torch.Tensor]) -> None:
        """Be about tensors of this form: of another one, nothing can be used."""
        if forms_of(self._tensors) != forms_of(vectors := flat(like)):
            self._have.clear()
            self._tensors = {name: torch.empty_like(t, device="cpu") for name, t in vectors.items()}
            self.chunks = chunks_of(self._tensors)

    def has(self, index: int, digest: bytes) -> bool:
        return self._have.get(index) == digest

    def keep(self, index: int, digest: bytes, chunk: torch.Tensor) -> None:
        self.chunks[index].copy_(chunk)
        self._have[index] = digest

    def of(self, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors themselves, in the shapes and the order of `like`."""
        return {name: self._tensors[name].reshape(t.shape) for name, t in like.items()}

    def give_away(self) -> None:
        """Nothing is here any more: the tensors are another's."""
        self._tensors, self._have, self.chunks = {}, {}, []


@dataclass(frozen=True, kw_only=True)
class Offer:
    """The lease that one source opened."""

    source: PeerId
    opened: Opened
    hashes: tuple[bytes, ...]
    """Digest of each chunk."""

    @property
    def content(self) -> tuple[object, ...]:
        """Equal for two sources exactly if they offer the same version with the same bytes."""
        return self.opened.version, self.opened.prepared, self.hashes


def believed(offers: Sequence[Offer], voice: Mapping[PeerId, int]) -> list[Offer]:
    """The group of equal offers with the most voice; else the newest, then that of the smallest peer."""
    counted = set(heard((offer.source for offer in offers), voice))
    groups: dict[tuple[object, ...], list[Offer]] = {}
    for offer in sorted(offers, key=lambda offer: offer.source):
        groups.setdefault(offer.content, []).append(offer)

    def worth(group: list[Offer]) -> tuple[int, Position]:
        said = [offer for offer in group if offer.source in counted]
        newest = max((offer.opened.position for offer in said), default=Position())
        return sum(weight(offer.source, voice) for offer in said), newest

    return max(groups.values(), key=worth)


def agreed(group: Sequence[Offer], voice: Mapping[PeerId, int]) -> Opened:
    """What a group says of its state, where that is no matter of hashes: the generation and the last commit.

    What has the most voice; of several the earlier generation, since a later one is soon told by a directive.
    """
    counted = set(heard((offer.source for offer in group), voice))
    generations, commits = Counter[Generation](), Counter[Commit]()
    for offer in group:
        if offer.source in counted:
            generations[offer.opened.generation] += weight(offer.source, voice)
            if offer.opened.last_commit is not None:
                commits[offer.opened.last_commit] += weight(offer.source, voice)
    return msgspec.structs.replace(
        group[0].opened,
        generation=min(generations, key=lambda generation: (-generations[generation], generation)),
        last_commit=max(commits, key=lambda commit: commits[commit], default=None),
    )


def state_of(run: Run, stage: Stage, version: int = -1, signed: Sequence[Word] = ()) -> Wanted:
    """The state of `stage` at a version; negative: the newest. `signed`: what peers signed of it."""
    digest = weights_of(signed[0]) if signed else ""

    def fits(opened: Opened, tensors: Mapping[str, torch.Tensor]) -> str | None:
        if not digest or state_digest(tensors) == digest:
            return None
        return f"gives another version {version} of stage {stage} than those with voice signed"

    def can_be(source: PeerId, opened: Opened) -> None:
        if not 0 <= opened.version <= run.steps:
            raise BadAnswer(source, f"offers version {opened.version} of a run of {run.steps} steps")
        try:
            check_generation(opened.generation, run)
        except Refused:
            impossible = f"an impossible generation: {opened.generation}"
            raise BadAnswer(source, f"offers version {opened.version} of {impossible}") from None

    return Wanted(
        name=f"stage {stage}", question=OpenState(run=run.id, stage=stage, version=version),
        like=empty_state(run, stage), can_be=can_be, fits=fits,
    )  # fmt: skip


async def download(
    transport: Transport, wanted: Wanted, sources: Sequence[PeerId], *,
    voice: Mapping[PeerId, int] = NO_VOICE, partial: Partial | None = None,
    progress: Progress = lambda done, total, sources: None,
    on_fault: Callable[[PeerFault], None] = lambda fault: None,
) -> Download:  # fmt: skip
    """What is wanted, checked chunk by chunk.

    Args:
        sources: the first `MAX_SOURCES` are asked, those with voice before others.
        voice: how much the word of each counts; empty: all count alike.
        partial: keeps what came when this fails, and is told what came before.
        on_fault: hears of each source that misbehaved or died; it is not asked again.

    Raises:
        DownloadFailed: with each source's reason; `partial` holds what came.
    """
    others = [p for p in dict.fromkeys(sources) if p != transport.peer_id]
    asked = sorted(others, key=lambda peer: peer not in voice)[:MAX_SOURCES]
    downloading = _Downloading(transport, wanted, voice, partial or Partial(), progress, on_fault)
    return await downloading.from_(asked)


@dataclass(eq=False, slots=True)
class _Downloading:
    """One call of `download`."""

    transport: Transport
    wanted: Wanted
    voice: Mapping[PeerId, int]
    partial: Partial
    progress: Progress
    on_fault: Callable[[PeerFault], None]
    reasons: dict[PeerId, str] = field(default_factory=dict)
    """Why a source gives nothing, or did not at first."""
    useless: set[PeerId] = field(default_factory=set)
    leases: dict[PeerId, str] = field(default_factory=dict)
    given_bytes: Counter[PeerId] = field(default_factory=Counter)

    async def from_(self, sources: Sequence[PeerId]) -> Download:
        self.partial.fit(self.wanted.like)
        until = now_s() + VOICED_S
        while True:  # each time round, a group of sources has become useless
            usable = [p for p in sources if p not in self.useless]
            offers = await self._open_all(usable)
            if not offers:
                raise DownloadFailed(self.wanted.name, self.reasons)
            if now_s() < until and self._has_voice(usable) and not self._has_voice(o.source for o in offers):
                self._close(list(self.leases))
                await asyncio.sleep(RECRUIT_S)
                continue
            group = believed(offers, self.voice)
            members = {offer.source for offer in group}
            self._close([p for p in self.leases if p not in members])
            others = [p for p in sources if p not in members | self.useless]
            if not await self._pull(group, others):
                continue
            opened, tensors = agreed(group, self.voice), self.partial.of(self.wanted.like)
            wrong = await asyncio.to_thread(self.wanted.fits, opened, tensors)
            if wrong is None:
                self._close(list(self.leases))
                self.partial.give_away()
                return Download(
                    opened=opened, tensors=tensors, agreed=frozenset(members),
                    voiced=self._has_voice(members),
                    sources=tuple(peer for peer, _ in self.given_bytes.most_common()),
                )  # fmt: skip
            for offer in group:  # each chunk is what its digest says, and need not come again
                self._failed(offer.source, BadAnswer(offer.source, wrong))

    def _has_voice(self, sources: Iterable[PeerId]) -> bool:
        """Whether one of them has voice that has not become useless."""
        return any(source in self.voice and source not in self.useless for source in sources)

    def _failed(self, source: PeerId, error: SwarmError) -> None:
        """Note why a source gives nothing. It is asked again only if it might a little later."""
        self.leases.pop(source, None)
        if not isinstance(error, NotNow):
            self.useless.add(source)
        if isinstance(error, PeerFault):
            self.reasons[source] = error.text
            self.on_fault(error)
        else:
            self.reasons[source] = f"peer {short(source)}: {error.text}"

    # -- opening ----------------------------------------------------------------------------------

    async def _open_all(self, sources: Sequence[PeerId]) -> list[Offer]:
        offers: list[Offer] = []
        opening = {asyncio.create_task(self._open(p, self.wanted.question)): p for p in sources}
        until: float | None = None
        pending = set(opening)
        try:
            while pending and (until is None or now_s() < until):
                left_s = None if until is None else until - now_s()
                done, pending = await asyncio.wait(pending, timeout=left_s, return_when=FIRST_COMPLETED)
                for task in done:
                    try:
                        offers.append(task.result())
                    except SwarmError as error:
                        self._failed(opening[task], error)
                waits = self._has_voice(opening[task] for task in pending)
                if offers and until is None and (self._has_voice(o.source for o in offers) or not waits):
                    until = now_s() + self.wanted.gather_s
        finally:
            await end_tasks(pending)
        return offers

    async def _open(self, source: PeerId, question: Question) -> Offer:
        most = len(self.partial.chunks) * DIGEST_BYTES
        hashed_s = sum(chunk.nbytes for chunk in self.partial.chunks) / HASHED_BYTES_PER_S
        of_state = isinstance(question, OpenState)
        shared = isinstance(question, OpenHeld) and max(question.shared_with, question.shared_of) >= 0
        waits_s = COPIED_S if of_state else HELD_BACK_S * shared
        answer = await self.transport.call(
            source, "state" if of_state else "held", pack(question), max_answer_bytes=most,
            deadline_s=self.wanted.share(source) * (self.most_s(source, most) + hashed_s + waits_s),
        )  # fmt: skip
        offer = self._read_offer(source, answer, question)
        self.leases[source] = offer.opened.lease
        return offer

    def _read_offer(self, source: PeerId, answer: Answer, question: Question) -> Offer:
        """Raises: BadAnswer."""
        opened = unpack_answer(source, answer.header, Opened)
        if opened.tensors != forms_of(flat(self.wanted.like)):
            names = [t.name[:40] for t in opened.tensors][:8]
            raise BadAnswer(source, f"offers something that is not {self.wanted.name}: {names}")
        if isinstance(question, OpenState) and question.version >= 0 and opened.version != question.version:
            raise BadAnswer(source, f"offers version {opened.version} instead of {question.version}")
        self.wanted.can_be(source, opened)
        body, expected = b"".join(answer.body), len(self.partial.chunks) * DIGEST_BYTES
        if len(body) != expected:
            raise BadAnswer(source, f"{len(body)} bytes of chunks' hashes; expected {expected}")
        hashes = tuple(body[at : at + DIGEST_BYTES] for at in range(0, expected, DIGEST_BYTES))
        return Offer(source=source, opened=opened, hashes=hashes)

    def most_s(self, source: PeerId, size_bytes: int) -> float:
        """How long a source may take for so many bytes."""
        return most_s(size_bytes, line_bps=self.transport.lines.get(source, NetworkPath()).bandwidth_bps)

    def _close(self, sources: Sequence[PeerId]) -> None:
        """End leases, so that the next reader need not wait. A courtesy that nothing waits for."""

        async def close(source: PeerId, lease: str) -> None:
            header = pack(CloseLease(run=self.wanted.question.run, lease=lease))
            await self.transport.call(source, "close", header, deadline_s=CLOSE_S)

        for source in sources:
            _closing.create_task(close(source, self.leases.pop(source)))

    # -- pulling ----------------------------------------------------------------------------------

    async def _pull(self, group: Sequence[Offer], others: Sequence[PeerId]) -> bool:
        """Read what is missing from the whole group; False if all of it failed before the end."""
        model = group[0]
        pull = _Pull(self, model.hashes)
        pull.tell()
        readers = {asyncio.create_task(pull.read(o.source, o.opened.lease)): o.source for o in group}
        recruits = {asyncio.create_task(self._recruit(pull, model, p)): p for p in others}
        work: dict[asyncio.Task[object], PeerId] = {**readers, **recruits}
        complete = asyncio.create_task(pull.complete.wait())
        pending: set[asyncio.Task[object]] = {complete, *work}
        try:
            while not pull.complete.is_set() and (pull.active or pending & readers.keys()):
                done, pending = await asyncio.wait(pending, return_when=FIRST_COMPLETED)
                for task in done - {complete}:
                    error = task.exception()
                    if isinstance(error, SwarmError):
                        self.useless.add(work[task])
                        self._failed(work[task], error)
                    elif error is not None:
                        raise error
        finally:
            await end_tasks(pending)
        return pull.complete.is_set()

    async def _recruit(self, pull: _Pull, model: Offer, source: PeerId) -> None:
        """Ask a source of another version, or a late one, for the version that is being downloaded."""
        question = self.wanted.question
        if isinstance(question, OpenState):
            question = msgspec.structs.replace(question, version=model.opened.version)
        for _ in range(RECRUIT_TRIES):
            try:
                offer = await self._open(source, question)
            except NotReady as not_ready:
                await asyncio.sleep(max(RECRUIT_S, not_ready.retry_after_s))
                continue
            except PeerFault:
                raise
            except SwarmError:
                return  # it is past that version: of use only for another one
            if offer.content != model.content:
                self._close([source])
                return
            await pull.read(source, offer.opened.lease)
            return


class _Pull:
    """The chunks that are missing, and which source is asked for which."""

    def __init__(self, of: _Downloading, hashes: Sequence[bytes]) -> None:
        self._of, self._hashes, self._partial = of, hashes, of.partial
        self._queue = deque(index for index, digest in enumerate(hashes) if not of.partial.has(index, digest))
        self._missing = set(self._queue)
        self._flying: dict[int, dict[PeerId, float]] = {}
        """The sources that were asked for it, and since when."""
        self._slowest_s: dict[PeerId, float] = {}
        """The longest that a source took for a chunk."""
        self._changed = asyncio.Event()
        self.active: set[PeerId] = set()
        self.complete = asyncio.Event()
        if not self._missing:
            self.complete.set()
        self._total_bytes = sum(chunk.nbytes for chunk in of.partial.chunks)
        self._chunk_bytes = max((chunk.nbytes for chunk in of.partial.chunks), default=0)
        self._here_bytes = self._total_bytes - sum(of.partial.chunks[index].nbytes for index in self._missing)

    def tell(self) -> None:
        self._of.progress(self._here_bytes, self._total_bytes, len(self.active))

    async def read(self, source: PeerId, lease: str) -> None:
        """Fetch chunks from one source until none is missing.

        Raises:
            SwarmError: it does not give them; those that it had are in the queue again.
        """
        self.active.add(source)
        at_once = min(IN_FLIGHT, len(self._missing))
        try:
            await for_each(range(at_once), lambda turn: self._work(source, lease, turn), IN_FLIGHT)
        finally:
            self.active.discard(source)

    async def _work(self, source: PeerId, lease: str, turn: int) -> None:
        for _ in range(turn):
            await asyncio.sleep(0)  # the first source must not take all chunks before the second has one
        while (index := await self._next(source)) is not None:
            began = now_s()
            self._flying.setdefault(index, {})[source] = began
            try:
                await self._fetch(source, lease, index)
            finally:
                flying = self._flying[index]
                flying.pop(source, None)
                if not flying:
                    del self._flying[index]
                    if index in self._missing:
                        self._queue.appendleft(index)
                pulse(self._changed)
            self._slowest_s[source] = max(self._slowest_s.get(source, 0.0), now_s() - began)

    async def _next(self, source: PeerId) -> int | None:
        """The chunk that `source` is to give; None: nothing is missing any more."""
        while self._missing:
            if self._queue:
                return self._queue.popleft()
            wait_s, flying = AGAIN_S, self._flying.items()
            slow = [(min(by.values()), i) for i, by in flying if i in self._missing and source not in by]
            if slow:
                since, index = min(slow)
                allowed_s = max(AGAIN_S, AGAIN_AFTER * self._slowest_s.get(source, 0.0))
                wait_s = since + allowed_s - now_s()
                if wait_s <= 0:
                    return index
            await happens(self._changed, wait_s)
        return None

    async def _fetch(self, source: PeerId, lease: str, index: int) -> None:
        answer = await self._ask(source, lease, index)
        fault_point("joining")
        unpack_answer(source, answer.header, Ack)
        room = self._partial.chunks[index]
        with as_bad_answer(source):
            chunk = unpack_chunk(answer.body, room.numel(), room.dtype)
        if await asyncio.to_thread(chunk_digest, chunk) != self._hashes[index]:
            raise BadAnswer(source, f"chunk {index} of {self._of.wanted.name} does not fit its digest")
        if index not in self._missing:
            return  # another source was faster
        self._partial.keep(index, self._hashes[index], chunk)
        self._missing.discard(index)
        self._here_bytes += room.nbytes
        self._of.given_bytes[source] += room.nbytes
        self.tell()
        if not self._missing:
            self.complete.set()

    async def _ask(self, source: PeerId, lease: str, index: int) -> Answer:
        header = pack(FetchChunk(run=self._of.wanted.question.run, lease=lease, index=index))
        chunk = self._partial.chunks[index]
        most = most_chunk_bytes(chunk.numel(), chunk.dtype)
        # All that is in flight may share one line.
        shared_bytes = len(self.active) * IN_FLIGHT * self._chunk_bytes
        limit_s = self._of.most_s(source, min(self._total_bytes - self._here_bytes, shared_bytes))
        for attempt in range(BUSY_TRIES):
            try:
                call = self._of.transport.call
                return await call(source, "chunk", header, max_answer_bytes=most, deadline_s=limit_s)
            except Busy as busy:
                if attempt == BUSY_TRIES - 1:
                    raise
                await asyncio.sleep(min(RECRUIT_S, busy.retry_after_s))
        raise AssertionError("unreachable")
