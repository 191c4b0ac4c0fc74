"""Serving microbatches: forward, the next stage, backward, each once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

import msgspec
import torch

from peers.audit.neighbours import Neighbours, Seen, seen_in
from peers.clock import now_s
from peers.fault_points import fault_point, job_point
from peers.incoming import Incoming
from peers.ports import Answer, Rank, Request
from peers.stage.next_stage import NextStage, WorkCall
from peers.stage.open_step import Job, KeptMicrobatch, OpenStep
from peers.stage.state import StageCore
from peers.voices import REFRESH_S
from peers.vouching.receipts import Receipts, signed_inputs
from peers.vouching.tickets import check_answer, check_inputs, check_ticket
from peers.waiting import TaskKeeper, fail
from swarm.audit import is_audited
from swarm.codecs import SLOW_BPS, packed_part
from swarm.data import most_proof_bytes, proof_bytes
from swarm.errors import BadAnswer, Busy, Leaving, NotReady, PeerFault, Refused, SwarmError, short
from swarm.ids import Microbatch, PeerId, Stage
from swarm.manifest import Run
from swarm.model.gradient_sum import Gradients, SumLost
from swarm.model.stage import Forward
from swarm.model.stage_io import body_bytes, boundary_bytes, gradient_metas, input_metas
from swarm.protocol.ledger import Claim
from swarm.protocol.worklist import LOST_AFTER_S
from swarm.wire.codec import Encoded, split
from swarm.wire.messages import Hop, Locate, Located, Work, WorkDone, pack, unpack
from swarm.wire.receipts import Receipt
from swarm.wire.tensor_meta import TensorMeta, buffer_sizes

OPEN_WAIT_S = 2.5
"""How long a request waits for its step to open; its caller sees heartbeats meanwhile."""
MAX_BAD_GRADIENTS = 3
MAX_ATTEMPTS = 1 << 30
MAX_PEER_ID = 100
"""Characters. A peer id has 52."""
MAX_AGAIN = 16
"""Microbatches that are fed again at once, or as many as may be in flight: after a death all of a peer's."""
MAX_WAITING = 256
"""Requests that wait for a step to open. They hold a header and no tensors."""


class MicrobatchServer:
    """Answers `work` and `locate`.

    Args:
        next_stage: None at the last stage.
        neighbours: has some of what they send and answer computed again; None: nothing.
        max_inflight: microbatches that are taken at once.
        left_out: replicas of this stage that take part in nothing for now.
        upload_bps: bits a second, as its owner limits it; 0: no limit.
    """

    def __init__(
        self, core: StageCore, next_stage: NextStage | None, neighbours: Neighbours | None, *,
        max_inflight: int, left_out: Callable[[], Sequence[PeerId]], upload_bps: float,
    ) -> None:  # fmt: skip
        self._upload_s = _upload_s(core.run, core.stage, upload_bps) if upload_bps else 0.0
        self._neighbours, self._is_audited = neighbours, is_audited(core.run)
        self._core, self._transport, self._next, self._left_out = core, core.transport, next_stage, left_out
        self.max_inflight = max_inflight
        self._receipts = Receipts(core.run, core.stage, core.transport.signer, core.voices.counts)
        self._incoming = Incoming()
        self._takes = input_metas(core.run, core.stage)
        self._gradients = gradient_metas(core.run, core.stage) if next_stage is not None else ()
        self.inflight = 0
        self.taken = 0
        """Microbatches whose tensors were received."""
        self.answered = 0
        self._waiting = self._passed_on = 0
        self._jobs = TaskKeeper()
        self._proven = core.stage == 0 and bool(core.run.data.root)
        most = body_bytes(self._takes) + (most_proof_bytes(core.run) if self._proven else 0)
        core.transport.serve("work", self._serve_work, max_body_bytes=most)
        core.transport.serve("locate", self._serve_locate)

    async def drain(self, *, limit_s: float) -> None:
        """Finish what is in flight, if that does not take too long. Nothing more is admitted meanwhile."""
        await self._jobs.ended(limit_s)

    def stop(self) -> None:
        """Drop what is in flight."""
        self._jobs.cancel()

    # -- answering --------------------------------------------------------------------------------

    async def _serve_locate(self, request: Request) -> Answer:
        where = unpack(request.header, Locate)
        step = self._core.steps.get(where.t) if where.run == self._core.run.id else None
        held = 0 if step is None else step.ledger.done | step.ledger.promised
        has = where.m >= 0 and bool(held >> where.m & 1)
        left_out = tuple(self._left_out())
        if self._core.me in left_out:  # by a coordinator that may leave out all others: its word alone
            has, left_out = False, ()
        return Answer(pack(Located(has=has, left_out=left_out)))

    async def _serve_work(self, request: Request) -> Answer:
        """One microbatch: claimed, computed or remembered, answered."""
        work = unpack(request.header, Work, self._core.run.id)
        self._check(work, request)
        if self._core.stage > 0:
            await self._core.membership.require(request.peer, self._core.stage - 1)
        if not self._receipts.is_followed(self._core.stage, request.peer, work):
            await self._core.membership.refresh(range(self._core.stage))
            if not self._receipts.is_followed(self._core.stage, request.peer, work):
                text = f"peer {short(request.peer)} does not show how ({work.t}, {work.m}) came to it"
                raise NotReady(text, version=self._core.version, retry_after_s=REFRESH_S)
        step = await self._open(work.t)
        claim, kept = await self._claim(step, work.m)
        if claim is Claim.NEW:
            kept = await self._take(step, work, request)
        else:
            known = step.kept.get(work.m) if kept is None else None
            kept = kept or known
            if kept is None:
                raise self._core.closed(step.t)  # what is kept goes when the step is taken
            if self._is_fed_otherwise(work, kept):
                kept = await self._feed_again(step, work, request)
            elif (
                known is not None
                and work.deepest > self._core.stage
                and now_s() - known.since_s >= LOST_AFTER_S  # sooner no trainer says that it is lacking
            ):
                await self._pass_on(step, request.peer, work, known)
        self.answered += 1
        return Answer(pack(kept.answer), [buffer for grad in kept.grads_in for buffer in grad.buffers])

    def _check(self, work: Work, request: Request) -> None:
        """Refuse what does not belong here, before any of its tensors is received.

        A request names no generation, and needs none: one that was sent before the run rolled back counts as
        any other. A refusal would only make trainers that have not heard of the rollback give up.
        """
        core = self._core
        trainers = core.run.admission.trainers
        if core.stage == 0 and trainers and request.peer not in trainers:
            raise Refused(f"run {core.run.name!r} does not admit {request.peer} as a trainer")
        if not (0 <= work.t < core.run.steps and 0 <= work.m < core.run.microbatches(work.t)):
            raise Refused(f"no microbatch ({work.t}, {work.m}) in {core.run.steps} steps of {core.run.M}")
        if not -1 <= work.deepest < core.run.S:
            raise Refused(f"there is no stage {work.deepest} of {core.run.S} to feed again")
        if not 0 <= work.attempt <= MAX_ATTEMPTS:
            raise Refused(f"attempt {work.attempt} of a microbatch; at most {MAX_ATTEMPTS} are counted")
        version = core.run.weight_version(work.t)
        if work.version != version:
            raise Refused(f"step {work.t} is computed with weights {version}, not {work.version}")
        if work.tensors != self._takes:
            offered = _shown(work.tensors)
            raise Refused(f"stage {core.stage} takes {_shown(self._takes)}; offered were {offered}")
        proof = [proof_bytes(core.run, work.t, work.m)] if self._proven else []
        if list(request.body_sizes) != buffer_sizes(work.tensors) + proof:
            sizes = list(request.body_sizes)[:8]
            raise Refused(f"the announced buffers, {sizes} bytes, do not fit the tensors")
        if self._core.leaving:
            raise Leaving("this peer is leaving")
        check_ticket(self._transport.signer, core.run, work)
        self._receipts.check(request.peer, work)
        if core.stage > 0 and core.backoff.rests(request.peer, now=now_s()):
            text = "this peer takes nothing of its caller for a while: what that sent on was judged false"
            raise NotReady(text, version=core.version, retry_after_s=0.5)
        if core.me in self._left_out():
            text = "this peer's stage leaves it out for a while: it held the others up"
            raise NotReady(text, version=core.version, retry_after_s=0.5)

    async def _open(self, t: int) -> OpenStep:
        """The step, once it is open, if that is soon. Requests that wait hold no memory."""
        core = self._core
        if t not in core.steps and self._waiting >= MAX_WAITING:
            raise NotReady(f"many already wait for step {t}", version=core.version, retry_after_s=0.5)
        self._waiting += 1
        try:
            return await core.step(t, wait_s=OPEN_WAIT_S if t <= core.newest_step() + 1 else 0.0)
        finally:
            self._waiting -= 1

    async def _claim(self, step: OpenStep, m: int) -> tuple[Claim, KeptMicrobatch | None]:
        """Claim a microbatch; what another request for it came to, if one was under way. If that one's body
        did not come, it is this one's turn: its caller would take this peer for the slow one.
        """
        while (claim := step.ledger.claim(m)) is Claim.DOING:
            self._incoming.others_wait()
            job = step.jobs[m]
            try:
                return claim, await asyncio.shield(job.done)
            except NotReady:
                if job.has_body:
                    raise
            except Refused:
                pass  # the first caller's inputs were: a stranger could have those of others refused
        return claim, None

    def _is_fed_otherwise(self, work: Work, kept: KeptMicrobatch) -> bool:
        """Whether the inputs of a microbatch are not those that it is kept with, which may have come from a
        liar; what other devices compute differs as well. Or it has a liar's work, which does not count.
        """
        fed_otherwise = self._is_audited and kept.inputs_digest not in (b"", signed_inputs(work))
        return fed_otherwise or not self._core.convicted.isdisjoint(kept.by)

    async def _feed_again(self, step: OpenStep, work: Work, request: Request) -> KeptMicrobatch:
        """Answer to other inputs. What came first stays in the sum: a caller that answered truly, and feeds
        something else afterwards, must not have that counted.
        """
        while True:
            known = step.shown(work.m, signed_inputs(work))
            if known and known.answer.hops and self._core.convicted.isdisjoint(known.by):
                return known
            if (job := step.jobs.get(work.m)) is None:
                return await self._take(step, work, request)
            await asyncio.wait([job.done])

    # -- computing --------------------------------------------------------------------------------

    async def _take(self, step: OpenStep, work: Work, request: Request) -> KeptMicrobatch:
        """Compute a microbatch. It goes on when its caller dies: the next caller gets the answer."""
        job = Job(done=asyncio.get_running_loop().create_future())
        step.jobs[work.m] = job
        self._core.report_trigger.some()
        self.inflight += 1
        try:
            if self.inflight > self.max_inflight:
                self._incoming.others_wait()
                raise Busy(f"{self.inflight - 1} microbatches are in flight; no more fit")
            body = await self._incoming.receive(request, lambda: self._is_late(step, work.m))
            step.ledger.late &= ~(1 << work.m)
            check_inputs(self._core.run, self._core.stage, work, body)
            inputs = split(work.tensors, body)
            self.taken += 1
            job.has_body = True
        except BaseException as error:
            self._end(step, work.m, job)
            self._fail(job, error)
            raise
        self._jobs.create_task(self._compute(step, request.peer, work, inputs, job))
        return await asyncio.shield(job.done)

    def _is_late(self, step: OpenStep, m: int) -> None:
        """The body of a microbatch comes too slowly: no other is to wait for it."""
        step.ledger.late |= 1 << m
        self._core.report_trigger.some()

    async def _compute(
        self, step: OpenStep, caller: PeerId, work: Work, inputs: list[Encoded], job: Job
    ) -> None:
        try:
            compute = self._last if self._core.is_last else self._middle
            kept = await compute(step, caller, work, inputs)
        except (SwarmError, asyncio.CancelledError) as error:
            self._fail(job, error)
        except torch.AcceleratorError:
            self._fail(job, Leaving("the device of this peer failed"))  # it ends within a second
        except Exception as error:
            self._fail(job, error)
            raise
        else:
            self._core.computed += 1
            job.done.set_result(kept)
        finally:
            self._end(step, work.m, job)

    def _end(self, step: OpenStep, m: int, job: Job) -> None:
        self.inflight -= 1
        if step.jobs.get(m) is job:  # else it was retracted and claimed anew meanwhile
            del step.jobs[m]
            step.ledger.release(m)
        if step.ledger.in_progress:
            self._core.report_trigger.some()
        else:
            self._core.report_trigger.urgent()  # idle: perhaps the step is complete

    @staticmethod
    def _fail(job: Job, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            error = NotReady("the microbatch was given up here", version=-1)
        if isinstance(error, PeerFault):  # the caller can do nothing about it
            error = NotReady(error.text, version=-1)
        fail(job.done, error)

    async def _last(
        self, step: OpenStep, caller: PeerId, work: Work, inputs: list[Encoded]
    ) -> KeptMicrobatch:
        began = now_s()

        def compute() -> tuple[KeptMicrobatch, Seen | None]:
            mb = self._alive(step, work)
            fault_point("backward")
            named = self._receipts.came(work, inputs)
            found = self._core.compute.loss_gradients(mb, inputs, weights=step.may_add(work.m, now=now_s()))
            receipt = self._receipts.give(mb, named, found.answer, found.loss)
            answer = _done(found.loss, found.answer, self._hop(began, receipt))
            asked = (caller, work) if self._is_audited else None
            return self._count(step, found, KeptMicrobatch(inputs, (), answer, found.answer, (), asked))

        kept, seen = await self._core.device.run(Rank.COMPUTE, work.t, compute)
        if self._neighbours and seen:
            self._neighbours.fed(caller, work, kept, seen)
        return kept

    async def _middle(
        self, step: OpenStep, caller: PeerId, work: Work, inputs: list[Encoded]
    ) -> KeptMicrobatch:
        core = self._core
        began, through = now_s(), self._receipts.through(caller, work)

        def forward() -> tuple[Forward, bytes, Work, bytes, float]:
            """Also the digests of what came and of what is sent on, and how long it took."""
            mb = self._alive(step, work)
            came = self._receipts.came(work, inputs)
            fwd = core.compute.forward(mb, inputs)
            onward, sent = self._receipts.feed(work, came, fwd.outputs, through)
            if self._is_audited and (work.m, came) not in step.sent_on:
                sent_on = KeptMicrobatch(inputs, (), _done(0.0, ()), (), fwd.outputs, (caller, work))
                step.send_on(work.m, came, sent_on)
            return fwd, came, onward, sent, self._took_s()

        fwd, came, onward, sent, forward_s = await core.device.run(Rank.COMPUTE, work.t, forward)
        fault_point("forward")
        behind_s, refused = 0.0, dict[PeerId, Refused]()
        while True:
            left_at = now_s()
            peer, done, grads = await self._call_next(step, onward, fwd, sent, refused)
            behind_s += now_s() - left_at

            def backward(
                done: WorkDone = done, grads: Sequence[Encoded] = grads, behind_s: float = behind_s
            ) -> tuple[KeptMicrobatch, Seen | None]:
                mb = self._alive(step, work)
                assert mb == fwd.mb
                fault_point("backward")
                found = core.compute.gradients(fwd, grads, weights=step.may_add(work.m, now=now_s()))
                receipt = self._receipts.give(mb, came, found.answer, done.loss, sent, done)
                hop = self._hop(began, receipt, forward_s=forward_s, behind_s=behind_s)
                answer = _done(done.loss, found.answer, hop, *done.hops)
                kept = KeptMicrobatch(inputs, grads, answer, found.answer)
                if self._is_audited:
                    kept.outputs, kept.asked = fwd.outputs, (caller, work)
                return self._count(step, found, kept)

            try:
                kept, seen = await core.device.run(Rank.COMPUTE, work.t, backward)
            except Refused as none:
                # Nothing was added. Of inputs that a caller chose perhaps no gradient can be used.
                refused[peer] = none
                if onward.attempt - work.attempt >= MAX_BAD_GRADIENTS:
                    raise  # several peers cannot all be at fault: the run diverges
                onward = msgspec.structs.replace(onward, attempt=onward.attempt + 1)
                continue
            assert self._next is not None
            for liar, why in refused.items():  # to the same it was answered what can be
                self._next.fault(BadAnswer(liar, why.text))
            if self._neighbours and seen:
                self._neighbours.used(fwd.mb, peer, done, seen)
                self._neighbours.fed(caller, work, kept, seen)
            return kept

    async def _call_next(
        self, step: OpenStep, work: Work, fwd: Forward, sent: bytes, in_vain: Collection[PeerId] = ()
    ) -> tuple[PeerId, WorkDone, list[Encoded]]:
        """`sent`: the digest of what is sent; `in_vain`: peers whose answers could not be used."""
        assert self._next is not None

        def check(peer: PeerId, done: WorkDone, answer: Answer) -> None:
            if done.tensors != self._gradients:
                due = _shown(self._gradients)
                raise BadAnswer(peer, f"answered {_shown(done.tensors)} where {due} was due")
            if [memoryview(b).nbytes for b in answer.body] != buffer_sizes(done.tensors):
                raise BadAnswer(peer, "answered buffers that do not fit their tensor")
            hops = self._core.run.S - self._core.stage - 1
            if len(done.hops) > hops or any(len(hop.peer) > MAX_PEER_ID for hop in done.hops):
                raise BadAnswer(peer, f"answered with more than one hop for each of {hops} stages")
            signer, said = self._transport.signer, (fwd.mb, sent, done, answer.body)
            check_answer(signer, self._core.run, peer, self._core.stage + 1, *said)
            if self._neighbours:
                self._neighbours.answered(self._core.stage + 1, fwd.mb, done)

        body = [buffer for output in fwd.outputs for buffer in output.buffers]
        how = WorkCall(
            body=body, max_answer_bytes=body_bytes(self._gradients), check=check,
            closed=lambda: self._pointless(step, work), addressed=self._receipts.addressed,
        )  # fmt: skip
        peer, done, answer = await self._next.call(work, how, in_vain=in_vain)
        return peer, done, split(done.tensors, answer.body)

    def _pointless(self, step: OpenStep, onward: Work) -> SwarmError | None:
        """Why a microbatch need not go on: its step is over, its senders are gone, or this peer leaves."""
        if step.over:
            return self._core.closed(step.t)
        if not self._receipts.is_followed(self._core.stage + 1, self._core.me, onward):
            text = f"the peers that ({onward.t}, {onward.m}) came through are gone"
            return NotReady(text, version=self._core.version)
        if self._core.leaving and self._next is not None and self._next.is_deserted():
            # All of a swarm that are stopped together would else wait for one another.
            return Leaving("this peer is leaving, and no peer of the next stage answers", retry_after_s=0.0)
        return None

    async def _pass_on(self, step: OpenStep, caller: PeerId, work: Work, kept: KeptMicrobatch) -> None:
        """Feed a microbatch again to the later stages: one of them lost it, and this one has it."""
        core = self._core
        if work.m in step.jobs:
            await asyncio.shield(step.jobs[work.m].done)
            return
        if self._passed_on >= max(MAX_AGAIN, self.max_inflight):
            raise Busy(f"{self._passed_on} microbatches are fed again; no more fit")
        job = step.jobs[work.m] = Job(done=asyncio.get_running_loop().create_future())
        through = self._receipts.through(caller, work)
        self._passed_on += 1
        try:

            def again() -> tuple[Forward, Work, bytes]:
                fwd = core.compute.forward(self._alive(step, work), kept.inputs, grad=False)
                return fwd, *self._receipts.feed(work, kept.inputs_digest, fwd.outputs, through)

            fwd, onward, sent = await core.device.run(Rank.COMPUTE, work.t, again)
            await self._call_next(step, onward, fwd, sent)
            kept.since_s = now_s()
            job.done.set_result(kept)
        except BaseException as error:
            self._fail(job, error)
            raise
        finally:
            self._passed_on -= 1
            if step.jobs.get(work.m) is job:  # it may have been retracted and claimed anew meanwhile
                del step.jobs[work.m]

    # -- counting (in jobs of the device) ---------------------------------------------------------

    def _alive(self, step: OpenStep, work: Work) -> Microbatch:
        if step.over:
            raise self._core.closed(step.t)
        return Microbatch(work.t, work.m)

    def _count(
        self, step: OpenStep, found: Gradients, kept: KeptMicrobatch
    ) -> tuple[KeptMicrobatch, Seen | None]:
        """Add a microbatch to the sum and the ledger, if it may count; if that breaks, both are lost. Returns
        also what its neighbours are judged by.
        """
        m, seen = found.mb.m, seen_in(found) if self._neighbours else None
        true = self._core.convicted.isdisjoint(kept.by)  # some were shown to lie while this was under way
        with self._core.device.books:
            if true and found.terms_wanted and step.may_add(m, now=now_s()):
                try:
                    self._core.compute.add(found)
                except SumLost:
                    step.drop()
                    text = f"the sum of step {step.t} was lost and starts again"
                    raise NotReady(text, version=self._core.version) from None
                step.kept[m] = kept
                step.ledger.record(m)
            else:
                step.put_by(kept)
        return kept, seen

    def _took_s(self) -> float:
        """How long the running job, a forward or backward that is done, took."""
        job_point(self._core.device.elapsed_s())
        return self._core.device.elapsed_s()

    def _hop(
        self, began: float, receipt: Receipt | None, *, forward_s: float = 0.0, behind_s: float = 0.0
    ) -> Hop:
        """What this peer spent on a microbatch, at the end of the last job of it."""
        core, compute_s = self._core, forward_s + self._took_s()
        return Hop(
            stage=core.stage, peer=core.me, own_s=max(0.0, now_s() - began - behind_s), compute_s=compute_s,
            upload_s=self._upload_s, receipt=receipt,
        )  # fmt: skip


def _upload_s(run: Run, stage: Stage, bps: float) -> float:
    """How long a peer's upload is busy with a microbatch, with the manifest's codecs."""
    sent = 0.0
    for boundary, direction in ((stage, 0), (stage - 1, 1)):
        if 0 <= boundary < run.S - 1:
            codec = run.codec.forward_at(boundary)
            part = packed_part(codec) if bps <= SLOW_BPS else 1.0
            sent += part * boundary_bytes(run, boundary, codec)[direction]
    return 8.0 * sent / bps


def _done(loss: float, grads_in: Sequence[Encoded], *hops: Hop) -> WorkDone:
    return WorkDone(loss=loss, tensors=tuple(grad.meta for grad in grads_in), hops=hops)


def _shown(metas: Sequence[TensorMeta]) -> str:
    return ", ".join(meta.words for meta in metas[:4]) or "nothing"
