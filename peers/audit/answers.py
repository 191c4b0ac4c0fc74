"""A replica computes answers of others of its stage again, from what those keep.

What the audited peer keeps has to be what it signed. If that is wrong, it is evidence for each replica with
the weights of the step. The others see it in a later step: a liar goes on lying, or does no harm.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from peers.audit.convictions import Convictions
from peers.audit.kept import KeptWork, Shown
from peers.audit.neighbours import Neighbours
from peers.incoming import Places
from peers.ports import Answer, Buffer, Rank, Request
from peers.stage.state import StageCore
from swarm.audit import is_audited
from swarm.audit.answers import digest, make, proves_answer, split_tensors
from swarm.errors import BadAnswer, NotNow, NotReady, PeerFault, Refused, Stale, SwarmError, short
from swarm.ids import Microbatch, PeerId
from swarm.model.stage_io import body_bytes, input_metas
from swarm.protocol.statements import is_signed
from swarm.wire.codec import Encoded
from swarm.wire.evidence import AuditAnswer, Audited, KeptTensors, WrongAnswer
from swarm.wire.messages import as_bad_answer, pack, unpack
from swarm.wire.receipts import Answered

T = TypeVar("T")

AT_ONCE = 2
"""Audits that a replica computes at once; more are refused."""


def evidence_of(
    peer: PeerId, said: Answered, signature: bytes, came: Shown, made: Shown
) -> tuple[WrongAnswer, list[Buffer]]:
    """What a peer shows of a microbatch, as evidence against its answer; and the body of that."""
    groups = (came.forth, came.back, made.forth, made.back)
    metas = [tuple(one.meta for one in group) for group in groups]
    evidence = WrongAnswer(
        accused=peer, statement=said, signature=signature,
        inputs=metas[0], output_grads=metas[1], outputs=metas[2], input_grads=metas[3],
    )  # fmt: skip
    return evidence, [buffer for group in groups for one in group for buffer in one.buffers]


class AnswerAudits:
    """This replica's part in the audits of its stage."""

    def __init__(
        self, core: StageCore, convictions: Convictions, kept: KeptWork, neighbours: Neighbours | None
    ) -> None:
        self._core, self._convictions, self._kept, self._neighbours = core, convictions, kept, neighbours
        self._places = Places(AT_ONCE, each=AT_ONCE)
        self.audited = 0
        """Answers that were computed again."""
        convictions.judge = self.judge
        most = body_bytes(input_metas(core.run, core.stage + 1)) if not core.is_last else 0
        core.transport.serve("audit", self._serve_audit, max_body_bytes=most)

    # -- the judge ----------------------------------------------------------------------------------

    async def _serve_audit(self, request: Request) -> Answer:
        core = self._core
        ask = unpack(request.header, AuditAnswer, core.run.id)
        said = ask.statement
        if not is_audited(core.run) or said.stage != core.stage or ask.peer == core.me:
            raise Refused(f"this peer does not audit {short(ask.peer)} at stage {said.stage}")
        caller, trainers = request.peer, core.run.admission.trainers
        asks_at = core.stage + (1 if said.is_half else -1)
        if not (caller in trainers if asks_at < 0 else self._kept.voices.counts(caller, asks_at)):
            raise Refused(f"peer {short(caller)} has no voice among those that got it")
        if not is_signed(core.transport.signer, ask.peer, core.run.id, said, ask.signature):
            raise Refused(f"peer {short(ask.peer)} did not sign that answer")
        if said.t not in core.steps:
            raise NotReady(f"step {said.t} is not open here", version=core.version)
        with self._places.one_for(caller):
            return Answer(pack(await self._audit(ask, await self._places.receive(request))))

    async def _audit(self, ask: AuditAnswer, sent: Sequence[Buffer]) -> Audited:
        core, said, mb = self._core, ask.statement, Microbatch(ask.statement.t, ask.statement.m)
        try:
            came = await (self._what_was_sent(ask, sent) if said.is_half else self._what_came(ask))
            back = None if said.is_half else came.back
            if said.is_half and not sent:
                self._audit_stranger(ask, came)
            made = await self._compute(said.t, lambda: make(core.compute, mb, came.forth, back))
            self.audited += 1
            if made.is_of(said):
                return Audited(fits=True)
            if said.is_half and not sent:
                return Audited(fits=False, asks=True)
            there = await self._what_it_made(ask, came, sent)
        except PeerFault:
            return Audited(fits=False, asks=said.is_half and not core.stage and not sent)
        evidence, body = evidence_of(ask.peer, said, ask.signature, came, there)
        if not await self.judge(evidence, body):
            return Audited(fits=True)
        self._convictions.convict(evidence)
        self._convictions.pass_on(evidence, body)
        return Audited(fits=False)

    async def _what_was_sent(self, ask: AuditAnswer, sent: Sequence[Buffer]) -> Shown:
        """What half an answer was made of, as its peer or the one before shows; the caller saw it signed."""
        try:
            return await self._shown(ask, made=False)
        except PeerFault:
            before = await self._before(ask, sent)
            if digest(before) != ask.statement.inputs:
                raise
            return Shown(KeptTensors(forth=(), back=()), before, [])

    async def _before(self, ask: AuditAnswer, sent: Sequence[Buffer]) -> list[Encoded]:
        """What the peer before sent on to the audited one, as that shows it; at stage 0 the tokens, which are
        in what each stage is `sent`. Nothing: it is not to be had.
        """
        run, said, link = self._core.run, ask.statement, next(iter(ask.through), None)
        if not self._core.stage:
            tensors = split_tensors([ask.sent], sent)
            return tensors[0][-len(input_metas(run, 0)) :] if tensors else []
        with contextlib.suppress(SwarmError):
            if link is not None:
                mb, made_of = Microbatch(said.t, said.m), link.half.inputs
                return (await self._kept.of(link.peer, mb, made=True, inputs=made_of)).forth
        return []

    def _audit_stranger(self, ask: AuditAnswer, came: Shown) -> None:
        """Have what the audited peer was sent computed again as well, if one of the two has no voice: only
        accomplices may have that.
        """
        stage, mb = self._core.stage - 1, Microbatch(ask.statement.t, ask.statement.m)
        is_known = self._kept.voices.counts(ask.peer, stage + 1)
        for link in ask.through[:1]:
            if self._neighbours and not (is_known and self._kept.voices.counts(link.peer, stage)):
                self._neighbours.half(stage, mb, link, ask.peer, ask.through[1:], came.forth)

    async def _what_came(self, ask: AuditAnswer) -> Shown:
        """What an answer was made of, as its peer shows it, and its neighbours signed it."""
        said, mb = ask.statement, Microbatch(ask.statement.t, ask.statement.m)
        came = await self._shown(ask, made=False)
        with as_bad_answer(ask.peer):
            neighbour = self._kept.answered_by(mb, came)
        answer = came.told.next
        if answer and answer.receipt and answer.receipt.inputs != said.outputs:
            raise BadAnswer(ask.peer, "shows gradients of something else than it sent on")
        for peer, stage in neighbour:  # a stranger may be the audited peer itself
            if self._kept.voices.counts(peer, stage) or peer in self._convictions.convicted:
                continue
            if not await self._kept.is_known(peer, stage):
                raise BadAnswer(ask.peer, f"peer {short(peer)}, which it names, is not announced")
        return came

    async def _what_it_made(self, ask: AuditAnswer, came: Shown, sent: Sequence[Buffer]) -> Shown:
        """What a peer made of that; half an answer is shown by the peer that got it."""
        said = ask.statement
        if not said.is_half:
            return await self._shown(ask, made=True)
        tensors = split_tensors([ask.sent], sent)
        if tensors is None or digest(tensors[0]) != said.outputs:
            raise Refused(f"that is not what peer {short(ask.peer)} sent on")
        return Shown(came.told, tensors[0], [])

    async def _shown(self, ask: AuditAnswer, *, made: bool) -> Shown:
        """What a peer keeps of what it signed. It cannot be past a step that its stage has not taken, nor
        ever be busy.

        Raises:
            PeerFault: it shows nothing, or something else.
            SwarmError: the step is over.
        """
        said = ask.statement
        mb = Microbatch(said.t, said.m)
        try:
            shown = await self._kept.of(ask.peer, mb, made=made, inputs=said.inputs)
            shown = shown._replace(back=[]) if said.is_half else shown
            signed = (said.outputs, said.input_grads) if made else (said.inputs, said.output_grads)
            if (digest(shown.forth), b"" if said.is_half else digest(shown.back)) != signed:
                raise BadAnswer(ask.peer, "shows something else than it signed")
            return shown
        except (NotNow, Stale, Refused) as why:
            if self._core.version > said.t:
                raise
            raise BadAnswer(ask.peer, why.text) from None

    async def judge(self, evidence: WrongAnswer, body: Sequence[Buffer]) -> bool:
        """Whether an answer is wrong.

        Raises:
            NotReady, Stale: this replica does not have the weights of its step.
        """
        compute, signer = self._core.compute, self._core.transport.signer
        return await self._compute(
            evidence.statement.t, lambda: proves_answer(compute, signer, evidence, body)
        )

    async def _compute(self, t: int, job: Callable[[], T]) -> T:
        """Run a job of the device; the step is not taken meanwhile."""
        core = self._core
        return await asyncio.shield(core.audits.create_task(core.device.run(Rank.COMPUTE, t, job)))
