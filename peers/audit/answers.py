"""A replica computes answers of others of its stage again, from what those keep.

What the audited peer keeps has to be what it signed. If that is wrong, it is evidence for each replica with
the weights of the step. The others see it in a later step: a liar goes on lying, or does no harm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from peers.audit.convictions import Convictions
from peers.audit.kept import KeptWork, Shown
from peers.ports import Answer, Buffer, Rank, Request
from peers.stage.state import StageCore
from swarm.audit import is_audited
from swarm.audit.answers import digest, make, proves_answer
from swarm.errors import Busy, NotReady, PeerFault, Refused, short
from swarm.ids import Microbatch, PeerId
from swarm.protocol.statements import is_signed
from swarm.wire.evidence import AuditAnswer, Audited, WrongAnswer
from swarm.wire.messages import pack, unpack
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

    def __init__(self, core: StageCore, convictions: Convictions, kept: KeptWork) -> None:
        self._core, self._convictions, self._kept = core, convictions, kept
        self._running = 0
        self.audited = 0
        """Answers that were computed again."""
        convictions.judge = self.judge
        core.transport.serve("audit", self._serve_audit)

    # -- the judge ----------------------------------------------------------------------------------

    async def _serve_audit(self, request: Request) -> Answer:
        core = self._core
        ask = unpack(request.header, AuditAnswer, core.run.id)
        said = ask.statement
        if not is_audited(core.run) or said.stage != core.stage or ask.peer == core.me:
            raise Refused(f"this peer does not audit {short(ask.peer)} at stage {said.stage}")
        caller, trainers = request.peer, core.run.admission.trainers
        if not (self._kept.counts(caller, core.stage - 1) if core.stage else caller in trainers):
            raise Refused(f"peer {short(caller)} has no voice among those that this stage answers")
        if not is_signed(core.transport.signer, ask.peer, core.run.id, said, ask.signature):
            raise Refused(f"peer {short(ask.peer)} did not sign that answer")
        if said.t not in core.steps:
            raise NotReady(f"step {said.t} is not open here", version=core.version)
        if self._running >= AT_ONCE:
            raise Busy("this peer audits as much as it can")
        self._running += 1
        try:
            return Answer(pack(Audited(fits=await self._audit(ask))))
        finally:
            self._running -= 1

    async def _audit(self, ask: AuditAnswer) -> bool:
        core, said, mb = self._core, ask.statement, Microbatch(ask.statement.t, ask.statement.m)
        try:
            came = await self._kept.of(ask.peer, mb, made=False)
            inputs, output_grads = came.forth, came.back
            if (digest(inputs), digest(output_grads)) != (said.inputs, said.output_grads):
                return False
            made = await self._compute(mb.t, lambda: make(core.compute, mb, inputs, output_grads))
            self.audited += 1
            if made.is_of(said):
                return True
            made_there = await self._kept.of(ask.peer, mb, made=True)
        except PeerFault:
            return False
        evidence, body = evidence_of(ask.peer, said, ask.signature, came, made_there)
        if not await self.judge(evidence, body):
            return True
        self._convictions.convict(evidence)
        self._convictions.pass_on(evidence, body)
        return False

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
        audits = self._core.audits
        running = asyncio.ensure_future(self._core.device.run(Rank.COMPUTE, t, job))
        audits.add(running)
        running.add_done_callback(self._computed)
        return await asyncio.shield(running)

    def _computed(self, job: asyncio.Future[Any]) -> None:
        self._core.audits.discard(job)
        if not job.cancelled():
            job.exception()  # whoever waited for it may be gone
