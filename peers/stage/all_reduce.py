"""The all-reduce between the replicas of a stage: all of it or nothing.

A butterfly: each replica owns a part of the flat gradient, and the *answer* to a contribution is the reduced
part: a replica has either every part or no result. The owner adds contributions in the order of the replicas'
ids, so all end with identical bits. No replica's own sum changes: an aborted round costs only its time.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate

import torch

from peers.audit.sum_check import SumCheck
from peers.audit.sums import SumAudits, Withheld
from peers.clock import now_s
from peers.fault_points import fault_point
from peers.ports import Answer, Buffer, Request, Transport
from peers.waiting import fail, for_each, happens, pulse, unless
from swarm.errors import Busy, NotReady, PeerFault, Refused, SwarmError, short
from swarm.ids import PeerId
from swarm.model.reductions import sqnorm, vectors_digest
from swarm.policy.timeouts import AdaptiveTimeout, is_too_slow, most_s
from swarm.protocol.blame import ALL_OWNERS, Awaited
from swarm.protocol.rounds import Plan, Prepared
from swarm.wire.chunks import chunk_may_have, chunk_meta, most_chunk_bytes, pack_chunk, unpack_chunk
from swarm.wire.codec import TensorMeta, host_empty
from swarm.wire.messages import Part, PartDone, as_bad_answer, pack, unpack, unpack_answer

CHUNK_ELEMENTS = 1 << 20
"""Elements per call, at most: 8 MB of a sum."""
CHUNKS_OF_A_PART = 8
"""So that sending, adding and answering overlap: the first chunks are answered while the last are sent."""
SMALL_CHUNK_ELEMENTS = 1 << 14
"""Less is not worth a call. What fits into one frame (`frames.CHUNK_BYTES`) is sent in its turn, whole."""
CHUNKS_IN_FLIGHT = 6
"""Per owner: less than a link holds before it is accepted, or a replica that opens late takes no report."""
START_WAIT_S = 5.0
"""A contribution may arrive before its owner has heard of the round."""
TIMES_USUAL = 3.0
"""Owners of other parts that answer nothing for so much longer than a round usually takes, or than this
replica's part of this round took, are given up. Its own part tells what the line carries now."""
NEARLY = 0.8
"""Of a limit: of replicas that give up together, one is the first."""
WATCH_S = 0.25
REPORTS_BYTES_S = 8192
"""Less than this goes to other replicas besides a round."""
SURE_S = 1.0
"""An upload is told once it was measured for so long: first exchanges of a small model are mostly waits."""
NOT_READY_RETRIES = 20


class RoundAborted(SwarmError):
    """This round will not complete; nothing was changed. The text says why.

    `by`: the replicas that sent nothing to this one, as it saw itself. An owner that does not answer may wait
    for another that gave it nothing: neither is to blame for that.
    """

    code = "void"

    def __init__(self, text: str, by: Sequence[PeerId] = ()) -> None:
        super().__init__(text)
        self.by = tuple(by)


@dataclass(slots=True)
class _Chunk:
    """A chunk that this replica owns: contributions come in, one result goes out."""

    numel: int
    index: int
    """In this replica's part."""
    contributions: dict[PeerId, torch.Tensor | None] = field(default_factory=dict)
    result: asyncio.Future[tuple[PartDone, Sequence[Buffer]]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


@dataclass(slots=True)
class _Round:
    plan: Plan
    t: int
    total: torch.Tensor
    """This replica's own flat sum, in host memory; read only."""
    reduced: torch.Tensor
    chunks: dict[int, _Chunk]
    check: SumCheck | None
    """None in a run whose sums are not checked."""
    began_s: float = field(default_factory=now_s)
    moved_s: float = field(default_factory=now_s)
    """When a chunk of this replica was reduced last, or the round began."""
    answered_s: float = 0.0
    """When an owner of another part answered last."""
    came_s: dict[PeerId, float] = field(default_factory=dict)
    """When the first contribution of each other replica was announced."""
    requests: dict[tuple[PeerId, int], tuple[Request, float]] = field(default_factory=dict)
    """Contributions that were announced, and when: by replica, and the chunk's start."""
    before_bytes: dict[PeerId, int] = field(default_factory=dict)
    """What had passed between each replica and this one when a chunk of this one was reduced last."""
    passed: dict[PeerId, tuple[int, float]] = field(default_factory=dict)
    """The same when it was looked at, and when it was more than before."""
    sent_bytes: int = 0
    """To the owners of the other parts, and answered."""
    owing: set[PeerId] = field(default_factory=set)
    """The owners of other parts that have not answered all of it."""

    def contributes(self, member: PeerId) -> bool:
        """Whether there is something in a member's sum."""
        return bool(self.plan.ledgers[self.plan.members.index(member)])

    def moved(self) -> None:
        """A chunk of this replica is reduced."""
        self.moved_s = now_s()
        self.before_bytes = {member: self._passed_bytes(member) for member in self.plan.members}
        self.passed.clear()

    def stalled_by(self, limit_s: float) -> list[PeerId]:
        """The replicas with which too little has passed for so long, and without which nothing goes on here.

        A replica sends its chunks in their order, and waits for answers: only those that lack in the first
        open chunk hold up the others, unless they wait for answers of this one.
        """
        first = self.first_open
        if first is None or now_s() - self.moved_s < limit_s:
            return []
        there = self.chunks[first].contributions
        return [m for m in self.plan.members if m not in there and self._stalls(m, first, limit_s)]

    def _stalls(self, member: PeerId, start: int, limit_s: float) -> bool:
        """Whether nothing has passed for so long, or less than over a slow line that all replicas share."""
        now, bytes_now, before = now_s(), self._passed_bytes(member), self.before_bytes.get(member, 0)
        _, announced_s = self.requests.get((member, start), (None, self.moved_s))
        since_s = max(self.moved_s, announced_s)
        seen_bytes, seen_s = self.passed.get(member, (before, since_s))
        self.passed[member] = bytes_now, (now if bytes_now > seen_bytes else seen_s)
        idle_s = now - max(since_s, self.passed[member][1])
        return idle_s >= limit_s or is_too_slow(len(self.plan.members) * (bytes_now - before), now - since_s)

    def _passed_bytes(self, member: PeerId) -> int:
        return sum(
            request.passed_bytes for (peer, _), (request, _) in self.requests.items() if peer == member
        )

    @property
    def owners(self) -> frozenset[PeerId]:
        """The members that own a part."""
        return frozenset(m for m, part in zip(self.plan.members, self.plan.parts, strict=True) if part > 0)

    @property
    def first_open(self) -> int | None:
        """The start of the first chunk of this replica that is not reduced."""
        return next((start for start, chunk in self.chunks.items() if not chunk.result.done()), None)

    def awaited(self, *, sends: bool = False) -> Awaited:
        """The members that this round waits for now. `sends`: what another lacks may be on its way."""
        members, first, check = self.plan.members, self.first_open, self.check
        if first is not None:
            there = self.chunks[first].contributions
            return Awaited(frozenset(m for m in members if m not in there), len(members), seen=True)
        if self.owing or check is None:
            return Awaited(frozenset(self.owing), len(self.owners))
        unknown = frozenset(member for member in members if member not in check.nonces)
        # If several own parts some lack perhaps results of others; one of two those of this replica alone.
        alone = len(self.owners) == 1 and (bool(self.chunks) or unknown == self.owners)
        seen = alone or (len(members) == 2 and not sends)
        return Awaited(unknown or frozenset(check.lacking()), len(members), seen or not unknown)

    @property
    def deadline_s(self) -> float:
        """For an answer of an owner: all that it may have to take and give, at a third of the least pace."""
        moved_bytes = 6 * len(self.plan.members) * self.total.numel() * self.total.element_size()
        return START_WAIT_S + most_s(moved_bytes)


class AllReduce:
    """This peer's side of the all-reduces of its stage."""

    def __init__(
        self, run: str, me: PeerId, transport: Transport, sum_dtype: torch.dtype,
        audits: SumAudits, answer: Callable[[torch.Tensor], torch.Tensor],
        sqnorm: Callable[[torch.Tensor], float] = sqnorm,
    ) -> None:  # fmt: skip
        """`sum_dtype`: of the replicas' sums; `audits` checks results before they count; `answer` gives what
        replicas are told of a part of their total, and `sqnorm` the squared norm of a result, as the stage
        reports it.
        """
        self._audits = audits
        self._run, self._me, self._transport = run, me, transport
        self._sum_dtype, self._answer, self._sqnorm = sum_dtype, answer, sqnorm
        self._dtype = answer(torch.zeros(1, dtype=sum_dtype)).dtype
        self._rounds: dict[str, _Round] = {}
        self._started = asyncio.Event()
        self._first = AdaptiveTimeout()
        """How long after the beginning of a round the last replica begins to send."""
        self._whole = AdaptiveTimeout(times_typical=TIMES_USUAL)
        """How long rounds take in which several own a part."""
        self.bandwidth_bps = self.measured_s = 0.0
        """Measured upload to other replicas, with the time in which it waited for them; and for how long."""
        self.last_bps = 0.0
        """The same of the last round, whole or not: it may be this replica for which it was given up. Until
        it sent last: what it waits for then is another's."""
        transport.serve("part", self._serve_part, max_body_bytes=CHUNK_ELEMENTS * 8 + CHUNK_ELEMENTS // 8)

    async def run(
        self, plan: Plan, t: int, total: torch.Tensor,
        value: Callable[[torch.Tensor], torch.Tensor] = lambda answers: answers,
        gave_all: Callable[[], None] = lambda: None,
        wait: Callable[[Awaited, float], Collection[PeerId]] = lambda awaited, waited_s: (),
    ) -> tuple[torch.Tensor, Prepared]:  # fmt: skip
        """Reduce `total` (flat, in host memory unless this replica is alone) with the replicas of `plan`.

        Args:
            gave_all: where sums are checked, called before others can have the result by this replica.
            wait: told which members the round waits for, and how long; says which are waited for no longer.

        Returns:
            The `value` of the answers for the sum over all of them, in a fresh tensor, and its description.

        Raises:
            RoundAborted: a replica failed. `total` is as it was.
        """
        if plan.members == (self._me,):
            try:
                return await self._held(plan.round, lambda: value(self._alone(total)))
            except SwarmError as error:
                raise RoundAborted(error.text) from None
        this = self._open(plan, t, total)
        work: list[asyncio.Task[None]] = []
        try:
            work += await self._begin(this)
            began = now_s()
            own_results = (asyncio.shield(chunk.result) for chunk in this.chunks.values())
            exchange, watch = asyncio.gather(*work, *own_results), asyncio.create_task(self._watch(this))
            waiting = asyncio.create_task(self._wait(this, wait))
            work += [watch, waiting]
            await unless(waiting, unless(watch, exchange))
            self._learn(this, now_s() - began)
            if this.check is not None:
                limit_s = max(self._first.limit_s, TIMES_USUAL * (now_s() - this.began_s))
                await unless(waiting, self._audits.verify(this.check, this.reduced, limit_s, gave_all))
        except RoundAborted:
            raise
        except SwarmError as error:  # whatever a replica answered
            raise RoundAborted(error.text, self._blamed_for(error, this)) from None
        finally:
            for task in work:
                task.cancel()
            self._close(this)
        return await self._held(plan.round, lambda: value(this.reduced))

    def _open(self, plan: Plan, t: int, total: torch.Tensor) -> _Round:
        """A round to which others may contribute from now on. Raises RoundAborted: a member has lied."""
        parts = parts_of(plan)
        try:
            check = self._audits.open(plan, t, parts, total)
        except Refused as refused:
            raise RoundAborted(refused.text) from None
        own = enumerate(parts[plan.members.index(self._me)])
        chunks = {start: _Chunk(numel, index) for index, (start, numel) in own}
        reduced = torch.empty(total.numel(), dtype=self._dtype)
        this = self._rounds[plan.round] = _Round(plan, t, total, reduced, chunks, check)
        pulse(self._started)
        return this

    async def _begin(self, this: _Round) -> list[asyncio.Task[None]]:
        """Contribute to this replica's own chunks, and start the exchanges with the other owners."""
        if this.check is not None:
            await asyncio.to_thread(this.check.commit)
        for start, chunk in this.chunks.items():
            own = this.total[start : start + chunk.numel] if this.contributes(self._me) else None
            self._contribute(this, start, self._me, own)
            await asyncio.sleep(0)  # gigabytes must not keep heartbeats waiting
        parts = zip(this.plan.members, parts_of(this.plan), strict=True)
        others = {owner: part for owner, part in parts if part and owner != self._me}
        this.owing.update(others)
        return [asyncio.create_task(self._exchange(this, owner, part)) for owner, part in others.items()]

    def _blamed_for(self, error: SwarmError, this: _Round) -> Sequence[PeerId]:
        """The replicas for which a round failed: as the error says, or else those that gave too little."""
        owns_all = this.owners == {self._me}  # so each member had all that it needs
        match error:
            case Withheld(nonces=nonces, products=products):
                return products + nonces * owns_all
            case PeerFault() if owns_all:
                return [error.peer]
            case _:  # another that waited for the same replica may have been quicker to say so
                return this.stalled_by(NEARLY * self._first.limit_s)

    def _close(self, this: _Round) -> None:
        self._rounds.pop(this.plan.round, None)
        text = f"round {this.plan.round[:8]} is void: the round ended"
        for chunk in this.chunks.values():
            fail(chunk.result, NotReady(text, version=this.t))
        if this.check is not None:
            self._audits.close(this.check)

    async def finish(
        self, round_name: str, sources: Sequence[PeerId], value: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, Prepared]:
        """The result of a round that failed here after this replica had given all, as `run` returns it.

        Raises:
            SwarmError: see `SumAudits.finish`.
        """
        answers = await self._audits.finish(round_name, sources)
        return await self._held(round_name, lambda: value(answers))

    async def _held(self, name: str, reduce: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Prepared]:
        reduced = await asyncio.to_thread(reduce)
        return reduced, await asyncio.to_thread(holds, name, reduced, self._sqnorm)

    def _sent_bytes(self, plan: Plan) -> int:
        lines = self._transport.lines
        return sum(lines[member].sent_bytes for member in plan.members if member in lines)

    def _alone(self, total: torch.Tensor) -> torch.Tensor:
        """The result of a reduce by this replica alone, bit for bit as among several. In any thread."""
        reduced = host_empty((total.numel(),), self._dtype, total.device)
        for start, numel in chunks_of(0, total.numel()):
            part = self._answer(total[start : start + numel])
            if not part.abs().max() < math.inf:
                raise Refused("a reduced gradient is not finite")
            reduced[start : start + numel] = part
        return reduced

    def _contribute(self, this: _Round, start: int, member: PeerId, part: torch.Tensor | None) -> None:
        """Take one replica's contribution; with the last one, the chunk is reduced."""
        chunk = this.chunks[start]
        chunk.contributions[member] = part
        if len(chunk.contributions) < len(this.plan.members) or chunk.result.done():
            return
        total = torch.zeros(chunk.numel, dtype=self._sum_dtype)
        for name in this.plan.members:
            contribution = chunk.contributions[name]
            if contribution is not None:
                total += contribution
        if this.check is not None and self._audits.consider is not None:
            this.check.sample(chunk.contributions)
        chunk.contributions.clear()
        try:
            result = self._answer(total)
            meta, buffers = pack_chunk(result, name="a reduced gradient")
        except Refused as refused:
            fail(chunk.result, refused)
            return
        reduced = this.reduced[start : start + total.numel()]
        reduced.copy_(result)
        crc = 0 if this.check else checksum(buffers)
        proof = this.check.made(chunk.index, reduced) if this.check else None
        this.moved()
        chunk.result.set_result((PartDone(crc=crc, tensors=(meta,), proof=proof), buffers))

    async def _watch(self, this: _Round) -> None:
        """Wait until a replica holds the round up.

        Raises:
            RoundAborted: one does; or other owners take much longer than usual, and it cannot be seen why.
        """
        while this.first_open is not None:
            limit_s = self._first.limit_s
            by = this.stalled_by(limit_s)
            if by:
                if len(by) == len(this.plan.members) - 1:
                    self._first.gave_up(limit_s)  # perhaps it is this replica that is early
                text = f"too little came from {', '.join(map(short, by))} for {limit_s:.1f} s"
                raise RoundAborted(text, by)
            await asyncio.sleep(max(WATCH_S, this.moved_s + limit_s - now_s()))
        usual_s = self._whole.limit_s if self._whole.known and len(this.owners) > 1 else this.deadline_s
        limit_s = max(usual_s, TIMES_USUAL * (this.moved_s - this.began_s))
        while (left_s := max(this.moved_s, this.answered_s) + limit_s - now_s()) > 0:
            await asyncio.sleep(left_s)
        self._whole.gave_up(limit_s)
        raise RoundAborted(f"the owners of other parts did not answer within {limit_s:.1f} s")

    async def _wait(self, this: _Round, wait: Callable[[Awaited, float], Collection[PeerId]]) -> None:
        """Tell of all time in which the round waits for few.

        Raises:
            RoundAborted: it has waited for long enough.
        """
        began_bytes = sent_bytes = self._sent_bytes(this.plan)
        self.last_bps, sent_s = 0.0, this.began_s
        since_s, before = now_s(), this.awaited()
        while True:
            await asyncio.sleep(WATCH_S)
            more_bytes = self._sent_bytes(this.plan) - sent_bytes
            if sends := more_bytes > REPORTS_BYTES_S * (now_s() - sent_s):
                sent_bytes, sent_s = sent_bytes + more_bytes, now_s()
                lasted_s = sent_s - this.began_s
                self.last_bps = 8 * (sent_bytes - began_bytes) / lasted_s * (lasted_s >= SURE_S)
            awaited = this.awaited(sends=sends)
            still = awaited._replace(peers=awaited.peers & before.peers)
            # Of the time in which this program itself stood still nothing is known.
            if by := wait(still, min(now_s() - since_s, 2 * WATCH_S)):
                text = f"steps have waited too long for {', '.join(map(short, sorted(still.peers)))}"
                raise RoundAborted(text, [peer for peer in by if peer != ALL_OWNERS])
            since_s, before = now_s(), awaited

    def _learn(self, this: _Round, exchange_s: float) -> None:
        """Learn from a round that is complete."""
        if this.sent_bytes >= 1 << 16 and exchange_s > 0:
            rate, self.measured_s = 8 * this.sent_bytes / exchange_s, self.measured_s + exchange_s
            self.bandwidth_bps = rate if not self.bandwidth_bps else 0.8 * self.bandwidth_bps + 0.2 * rate
        if this.came_s:
            self._first.answered(max(0.0, max(this.came_s.values()) - this.began_s))
        if len(this.owners) > 1:
            self._whole.answered(now_s() - this.began_s)

    async def _exchange(self, this: _Round, owner: PeerId, chunks: Sequence[tuple[int, int]]) -> None:
        """Send this replica's contribution to each chunk that `owner` owns, and take the reduced chunk."""
        check, place = this.check, this.plan.members.index(owner)

        async def exchange(chunk: tuple[int, int]) -> None:
            start, numel = chunk
            tensors: tuple[TensorMeta, ...] = ()
            body: Sequence[Buffer] = ()
            if this.contributes(self._me):
                meta, body = await asyncio.to_thread(
                    pack_chunk, this.total[start : start + numel], name="a gradient sum"
                )
                tensors = (meta,)
            part = Part(
                run=self._run, t=this.t, round=this.plan.round, start=start, numel=numel,
                crc=0 if check else checksum(body), tensors=tensors,
                proof=check.proof(place) if check else None,
            )  # fmt: skip
            answer = await self._call_until_ready(owner, part, body, this.deadline_s)
            done = unpack_answer(owner, answer.header, PartDone)
            with as_bad_answer(owner):
                this.reduced[start : start + numel] = read_part(
                    done.tensors, None if check else done.crc, answer.body, numel, self._dtype
                )
            if check is not None:
                check.came(place, done.proof)
            this.sent_bytes += sum(memoryview(b).nbytes for b in body)
            this.answered_s = now_s()

        await for_each(chunks, exchange, CHUNKS_IN_FLIGHT)
        this.owing.discard(owner)

    async def _call_until_ready(
        self, owner: PeerId, part: Part, body: Sequence[Buffer], limit_s: float
    ) -> Answer:
        most = most_chunk_bytes(part.numel, self._dtype)
        for attempt in range(NOT_READY_RETRIES):
            fault_point("reduce")
            try:
                return await self._transport.call(
                    owner, "part", pack(part), body, max_answer_bytes=most, deadline_s=limit_s
                )
            except (NotReady, Busy) as not_now:  # busy: as much of this replica waits to be accepted as may
                if attempt == NOT_READY_RETRIES - 1 or "void" in not_now.text:
                    raise
                await asyncio.sleep(not_now.retry_after_s)
        raise AssertionError("unreachable")

    async def _serve_part(self, request: Request) -> Answer:
        part = unpack(request.header, Part, self._run)
        this = await self._round(part.round)
        if request.peer not in this.plan.members:
            raise Refused(f"{request.peer} is not a member of round {part.round[:8]}")
        chunk = this.chunks.get(part.start)
        if chunk is None or part.numel != chunk.numel or part.t != this.t:
            raise Refused(f"elements from {part.start} of step {part.t} are not a chunk that this peer owns")
        if this.contributes(request.peer) != bool(part.tensors) or len(part.tensors) > 1:
            text = "something was expected exactly if it is not empty"
            raise Refused(f"the contribution does not fit the ledger: {text}")
        if part.tensors and not chunk_may_have(request.body_sizes, part.numel, self._sum_dtype):
            raise Refused("the announced buffers do not fit the tensor")
        this.came_s.setdefault(request.peer, now_s())
        this.requests[request.peer, part.start] = request, now_s()
        body = await request.accept()
        contribution = None
        if part.tensors:
            crc = None if this.check else part.crc
            contribution = await asyncio.to_thread(
                read_part, part.tensors, crc, body, part.numel, self._sum_dtype
            )
        if this.check is not None:
            this.check.take(request.peer, chunk.index, part.proof, contribution)
        fault_point("reduce")
        self._contribute(this, part.start, request.peer, contribution)
        done, buffers = await asyncio.shield(chunk.result)
        return Answer(pack(done), buffers)

    async def _round(self, name: str) -> _Round:
        """The round `name`, which may start here a little later than at its other replicas."""
        until = now_s() + START_WAIT_S
        while name not in self._rounds:
            left_s = until - now_s()
            if left_s <= 0:
                raise NotReady(f"round {name[:8]!r} is not open here", version=-1)
            await happens(self._started, left_s)
        return self._rounds[name]


def chunks_of(start: int, end: int) -> list[tuple[int, int]]:
    """(first element, elements) of the chunks of a part: a function of the part, which all replicas know."""
    size = min(CHUNK_ELEMENTS, max(SMALL_CHUNK_ELEMENTS, -(-(end - start) // CHUNKS_OF_A_PART)))
    return [(first, min(size, end - first)) for first in range(start, end, size)]


def parts_of(plan: Plan) -> list[list[tuple[int, int]]]:
    """The chunks of each replica's part."""
    ends = accumulate(plan.parts)
    return [chunks_of(end - size, end) for size, end in zip(plan.parts, ends, strict=True)]


def read_part(
    metas: Sequence[TensorMeta], crc: int | None, body: Sequence[Buffer], numel: int, dtype: torch.dtype
) -> torch.Tensor:
    """A flat chunk; `crc` None: its bytes are checked by their digest. Raises Refused: it does not fit."""
    if len(metas) != 1:
        raise Refused(f"{len(metas)} tensors where one chunk was expected")
    if crc is not None and checksum(body) != crc:
        raise Refused("the checksum of a chunk does not fit its bytes")
    if metas[0] != (expected := chunk_meta(numel, dtype)):
        raise Refused(f"a chunk is {metas[0].words}; expected {expected.words}")
    return unpack_chunk(body, numel, dtype)


def holds(round_name: str, reduced: torch.Tensor, sqnorm: Callable[[torch.Tensor], float]) -> Prepared:
    """The description of a reduced gradient. Reads all of it twice: seconds, for gigabytes."""
    return Prepared(round_name, sqnorm(reduced), vectors_digest([reduced], on_device=False))


def checksum(buffers: Sequence[Buffer]) -> int:
    """CRC-32 over all buffers."""
    return reduce(lambda crc, buffer: zlib.crc32(buffer, crc), buffers, 0)
