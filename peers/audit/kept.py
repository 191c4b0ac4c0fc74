"""What a replica keeps of a microbatch until the next step is taken. It shows that to those that audit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from peers.incoming import Given
from peers.ports import Answer, Directory, Request, Transport
from peers.stage.state import StageCore
from peers.voices import Membership, Voices
from peers.vouching.receipts import was_fed
from peers.vouching.tickets import check_ticket
from swarm.audit.answers import digest, split_tensors
from swarm.digest import Digest
from swarm.errors import BadAnswer, NotNow, Refused, Stale
from swarm.ids import Microbatch, PeerId, Stage
from swarm.manifest import Run
from swarm.model.stage_io import body_bytes, gradient_metas, input_metas
from swarm.wire.codec import Encoded
from swarm.wire.evidence import AskKept, KeptTensors
from swarm.wire.messages import as_bad_answer, pack, unpack, unpack_answer
from swarm.wire.receipts import is_receipt

KEPT_S = 10.0
"""Limit for what another replica shows of a microbatch."""
MAX_GIVEN = 8
"""Microbatches that one peer reads at once: the audit of a sum takes four, and two answers besides."""
MAX_GIVEN_TO_STRANGERS = 64
"""That all without voice read at once, however many they are. At first no peer has voice: some audit then."""


class Shown(NamedTuple):
    told: KeptTensors
    forth: list[Encoded]
    """The inputs, or the outputs."""
    back: list[Encoded]
    """The gradients of the outputs, or of the inputs."""


class KeptWork:
    """What the replicas of a stage keep, as one that audits them asks for it.

    Args:
        version: where the run is, as far as is known.
    """

    def __init__(
        self, run: Run, stage: Stage, transport: Transport, directory: Directory, version: Callable[[], int]
    ) -> None:
        self._run, self._stage, self._transport = run, stage, transport
        self._directory = directory
        self._membership = Membership(directory)
        self.voices = Voices(run, transport.signer, directory, version)
        most = body_bytes(input_metas(run, stage))
        if stage < run.S - 1:
            most += body_bytes(input_metas(run, stage + 1)) + body_bytes(gradient_metas(run, stage))
        self._most_bytes = 2 * most

    async def of(self, peer: PeerId, mb: Microbatch, *, made: bool, inputs: Digest = b"") -> Shown:
        """What `peer` keeps of a microbatch: what came in, or what it made of that. `inputs`: their digest,
        where others may have come, too; what counts may be of those.

        Raises:
            SwarmError: it shows nothing, or what cannot be that.
        """
        ask = AskKept(run=self._run.id, t=mb.t, m=mb.m, made=made, inputs=inputs)
        answer = await self._transport.call(
            peer, "kept", pack(ask), max_answer_bytes=self._most_bytes, deadline_s=KEPT_S
        )
        told = unpack_answer(peer, answer.header, KeptTensors)
        with as_bad_answer(peer):
            split = split_tensors((told.forth, told.back), answer.body)
        if split is None:
            raise BadAnswer(peer, "keeps buffers that do not fit their tensors")
        return Shown(told, split[0], split[1])

    def signed_by(self, peer: PeerId, mb: Microbatch, shown: Shown) -> list[tuple[PeerId, Stage]]:
        """The neighbours that signed what came in at `peer`, which cannot choose that later, to suit its sum.
        What it was sent at stage 0 a trainer's ticket names instead.

        Raises:
            Refused: no peer signed it.
        """
        run, stage, told, signer = self._run, self._stage, shown.told, self._transport.signer
        work = told.work
        if work is None or (work.t, work.m) != mb:
            raise Refused(f"no peer asked for {mb}")
        check_ticket(signer, run, work)
        if not was_fed(signer, run, stage, peer, told.caller, work, digest(shown.forth)):
            raise Refused(f"no peer sent these inputs of {mb}")
        feeder = [(told.caller, stage - 1)] if stage else []
        return [*feeder, *self.answered_by(mb, shown)]

    def answered_by(self, mb: Microbatch, shown: Shown) -> list[tuple[PeerId, Stage]]:
        """The one that signed the gradients; at the last stage there is none.

        Raises:
            Refused: no peer signed them.
        """
        run, stage, told, signer = self._run, self._stage, shown.told, self._transport.signer
        hop, is_last, back = told.next, stage == run.S - 1, digest(shown.back)
        if is_last and not shown.back:
            return []
        receipt = None if hop is None else hop.receipt
        if hop is None or receipt is None or receipt.input_grads != back or is_last:
            raise Refused(f"no peer answered this gradient of {mb}")
        if not is_receipt(signer, hop.peer, run.id, stage + 1, mb, told.loss, receipt):
            raise Refused(f"the gradient of {mb} is not signed by the peer that answered it")
        return [(hop.peer, stage + 1)]

    async def is_known(self, peer: PeerId, stage: Stage) -> bool:
        """Whether a peer of a stage is announced: it may have moved since. Other names cost nothing."""
        with contextlib.suppress(NotNow):
            await self._membership.require(peer, stage)
        return self._directory.find(peer) is not None


def serve_kept(core: StageCore) -> None:
    """Answer `kept`: to replicas; to peers of the next stage, which judge what others made of that, what was
    sent on; and each microbatch once to each auditor.
    """
    shown: dict[int, set[tuple[PeerId, int, bool]]] = {}
    """To auditors, by step."""
    given, given_to_strangers = Given(MAX_GIVEN), Given(MAX_GIVEN, MAX_GIVEN_TO_STRANGERS)

    async def answer(request: Request) -> Answer:
        ask = unpack(request.header, AskKept, core.run.id)
        audits, once = core.run.admission.may_audit(request.peer), (request.peer, ask.m, ask.made)
        is_fed = ask.made and core.voices.counts(request.peer, core.stage + 1)
        if not audits and not is_fed:
            await core.membership.require(request.peer, core.stage)
        elif core.membership.has(request.peer, core.stage):
            audits = False  # it is a replica besides
        elif once in shown.get(ask.t, ()):
            raise Refused(f"microbatch ({ask.t}, {ask.m}) was shown to this peer before")
        step = core.steps.get(ask.t)
        if step is None and core.applied is not None and core.applied.t == ask.t:
            step = core.applied
        kept = None if step is None else step.shown(ask.m, ask.inputs)
        if kept is None:
            raise Stale(f"microbatch ({ask.t}, {ask.m}) is not kept here", version=core.version)
        made = (kept.outputs, () if is_fed else kept.grads_in)
        forth, back = made if ask.made else (kept.inputs, kept.grads_out)
        body = [buffer for one in (*forth, *back) for buffer in one.buffers]
        for place in [place for place, part in enumerate(body) if memoryview(part).nbytes][:1]:
            array = np.frombuffer(body[place], np.uint8)
            is_known = audits or core.voices.has(request.peer)
            (given if is_known else given_to_strangers).hold(request.peer, array)
            body[place] = array.data  # as long as that is held the array is
        if audits:
            for old in [t for t in shown if t < core.version - 1]:
                del shown[old]
            shown.setdefault(ask.t, set()).add(once)
        caller, work = kept.asked or ("", None)
        told = KeptTensors(
            forth=tuple(one.meta for one in forth), back=tuple(one.meta for one in back),
            caller=caller, work=work, next=next(iter(kept.answer.hops[1:]), None), loss=kept.answer.loss,
        )  # fmt: skip
        return Answer(pack(told), body)

    core.transport.serve("kept", answer)
