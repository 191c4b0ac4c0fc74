"""A stage's part in an evaluation: it computes forward, and asks the next stage. No ledger or sum sees it."""

from __future__ import annotations

import msgspec

from peers.incoming import Places
from peers.ports import Answer, Rank, Request
from peers.stage.microbatches import OPEN_WAIT_S
from peers.stage.state import StageCore
from swarm.errors import Leaving, NotReady, PeerFault, Refused, short
from swarm.evaluation import is_due, microbatches, version_of
from swarm.model.stage_io import body_bytes, input_metas
from swarm.wire.codec import Encoded, split
from swarm.wire.messages import Ack, EvalDone, Evaluate, Evaluated, pack, unpack, unpack_answer
from swarm.wire.tensor_meta import buffer_sizes

MAX_AT_ONCE, MAX_EACH = 32, 16
"""Evaluations in flight, and of one caller: each holds its inputs, and some wait for others."""
CALL_S = 30.0


class EvaluationServer:
    """Answers `eval`, and at stage 0 `evaluated`."""

    def __init__(self, core: StageCore) -> None:
        self._core, self._transport = core, core.transport
        self._places = Places(MAX_AT_ONCE, each=MAX_EACH, times=0.0)
        self.newest: tuple[int, float] | None = None
        """Version and loss, as a trainer told."""
        if not core.run.eval.every:
            return
        self._takes = input_metas(core.run, core.stage)
        self._transport.serve("eval", self._serve, max_body_bytes=body_bytes(self._takes))
        if core.stage == 0:
            self._transport.serve("evaluated", self._hear)

    async def _hear(self, request: Request) -> Answer:
        run = self._core.run
        told = unpack(request.header, Evaluated, run.id)
        self._require_trainer(request)
        if not 0 <= told.version <= run.steps:
            raise Refused(f"no evaluation of version {told.version}")
        if self.newest is None or told.version >= self.newest[0]:
            self.newest = told.version, told.loss
        return Answer(pack(Ack()))

    async def _serve(self, request: Request) -> Answer:
        core = self._core
        wanted = unpack(request.header, Evaluate, core.run.id)
        self._check(wanted, request)
        if core.stage > 0:
            await core.membership.require(request.peer, core.stage - 1)
            if not core.voices.counts(request.peer, core.stage - 1):
                raise Refused(f"peer {short(request.peer)} has no voice at stage {core.stage - 1}")
        with self._places.one_for(request.peer):
            if wanted.t < core.run.steps:
                await core.step(wanted.t, wait_s=OPEN_WAIT_S)
            inputs = split(wanted.tensors, await self._places.receive(request))
            version = version_of(core.run, wanted.t)
            made = await core.device.run(Rank.COMPUTE, wanted.t, core.compute.evaluate, version, inputs)
            loss = await self._next(wanted, made) if isinstance(made, list) else made
        return Answer(pack(EvalDone(loss=loss)))

    def _check(self, wanted: Evaluate, request: Request) -> None:
        core, run = self._core, self._core.run
        if core.stage == 0:
            self._require_trainer(request)
        if not (is_due(run, wanted.t) and 0 <= wanted.e < microbatches(run)):
            raise Refused(f"no microbatch {wanted.e} of an evaluation before step {wanted.t}")
        if wanted.tensors != self._takes or list(request.body_sizes) != buffer_sizes(wanted.tensors):
            raise Refused(f"stage {core.stage} takes other tensors to evaluate")
        if core.leaving:
            raise Leaving("this peer is leaving")
        if not core.joined:
            raise NotReady("this peer is joining", version=-1)

    def _require_trainer(self, request: Request) -> None:
        trainers = self._core.run.admission.trainers
        if trainers and request.peer not in trainers:
            raise Refused(f"run {self._core.run.name!r} does not admit {request.peer} as a trainer")

    async def _next(self, wanted: Evaluate, outputs: list[Encoded]) -> float:
        """The loss, by the next stage. Which of its peers is tried again is the trainer's choice."""
        if not wanted.route:
            raise NotReady(f"no peer of stage {self._core.stage + 1} was named", version=self._core.version)
        peer, *rest = wanted.route
        tensors = tuple(output.meta for output in outputs)
        header = pack(msgspec.structs.replace(wanted, route=tuple(rest), tensors=tensors))
        body = [buffer for output in outputs for buffer in output.buffers]
        try:
            answer = await self._transport.call(peer, "eval", header, body, deadline_s=CALL_S)
            return unpack_answer(peer, answer.header, EvalDone).loss
        except PeerFault as fault:  # the caller can do nothing about it
            raise NotReady(fault.text, version=self._core.version) from None
