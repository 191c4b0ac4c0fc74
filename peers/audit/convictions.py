"""Peers that were shown to lie. They are left out of all that this peer does, and others hear why."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence

import torch

from peers import events
from peers.audit.verdicts import MAX_TOLD, Verdicts
from peers.device import host_memory
from peers.ports import Answer, Buffer, Directory, Request, Transport
from peers.transfer.client import download, state_of
from swarm.audit.answers import proves_answer
from swarm.audit.evidence import is_signed_by_accused, proves
from swarm.errors import Refused, SwarmError, short
from swarm.ids import PeerId, Stage
from swarm.manifest import Run
from swarm.model.stage import StageCompute
from swarm.protocol.statements import sign
from swarm.protocol.voice import heard
from swarm.wire.evidence import (
    MAX_EVIDENCE_BYTES,
    AskConvicted,
    Convicted,
    Evidence,
    FalseContribution,
    Heard,
    ShowEvidence,
    WrongAnswer,
    WrongContribution,
    WrongProduct,
    WrongSum,
    judged,
)
from swarm.wire.messages import pack, say, unpack, unpack_answer

PASS_ON_S = 30.0
"""Limit for one call with evidence."""
SUSPECTS_STEPS = 20
ASKED_TIMES = 5
ASK_AGAIN_S = 1.0
"""Until the second question whether a stage has convicted one of its peers; then twice as long each time."""


class Convictions(Verdicts):
    """The peers that this one saw evidence against, too.

    Set `on_conviction` before evidence may come.
    """

    def __init__(
        self, run: Run, stage: Stage, transport: Transport, directory: Directory, emit: events.Emit
    ) -> None:
        super().__init__(run, transport, directory, emit)
        self._stage = stage
        self._asking: set[PeerId] = set()
        self._referee = Referee(run, transport)
        self._passed_on = Counter[PeerId]()
        self.barred: set[PeerId] = set()
        """Of those, the ones that all can convict at any time: this peer is in no round with them."""
        self.suspect: Callable[[PeerId], None] = lambda peer: None
        """Told of a replica whose contribution another one found wrong."""
        self._shown: dict[PeerId, Evidence] = {}
        """What convicted each; of very many, the first and those with voice."""
        self._suspected_by: dict[PeerId, int] = {}
        """The last step of which each replica said so."""
        self.judge: Callable[[WrongAnswer, Sequence[Buffer]], Awaitable[bool]]
        """Whether an answer is wrong: of a peer that has the weights. To be set, as `on_conviction`."""
        transport.serve("evidence", self._serve_evidence, max_body_bytes=MAX_EVIDENCE_BYTES)
        transport.serve("convicted", self._serve_convicted)

    def convict(self, evidence: Evidence) -> bool:
        """Leave a peer out from now on; whether it was not yet."""
        accused = evidence.accused
        if accused in self.convicted:
            return False
        if not isinstance(evidence, WrongAnswer | WrongContribution):
            self.barred.add(accused)
        if len(self._shown) < MAX_TOLD or accused in self._voices.of_all():
            self._shown[accused] = evidence
        what = type(evidence.statement).__name__.lower()
        self.leave_out(accused, f"its signed {what} of step {evidence.statement.t} is false")
        return True

    def pass_on(self, evidence: Evidence, body: Sequence[Buffer]) -> None:
        """Show it to the other replicas of this stage. The other stages are told of it, and ask them: of very
        many peers some, and first those around this one, and stage 0, which coordinates the run. Some times
        of each liar: of a stage of two, others judge by themselves, and the step may be over by then.
        """
        self._passed_on[evidence.accused] += 1
        if self._passed_on[evidence.accused] > MAX_TRIES:
            return
        near = {self._stage - 1, self._stage + 1, 0}
        told = list[PeerId]()
        for stages in near - {self._stage}, set(range(self._run.S)) - near - {self._stage}:
            told += self._some({r.peer for stage in stages for r in self._directory.at(stage)})
        self.tell_replicas(evidence, body, also=told)

    def tell_replicas(
        self, evidence: Evidence, body: Sequence[Buffer], *, also: Sequence[PeerId] = ()
    ) -> None:
        """Show it to the other replicas of this stage. `also`: told of it, without the body."""
        header = pack(ShowEvidence(run=self._run.id, evidence=evidence))
        replicas = {r.peer for r in self._directory.at(self._stage)} - {self._transport.peer_id}
        if sum(memoryview(b).nbytes for b in body) > MAX_EVIDENCE_BYTES:
            body = []
        for peer in self._some(replicas):
            self._tasks.create_task(self._tell(peer, header, body))
        for peer in also:
            self._tasks.create_task(self._tell(peer, header, [], if_asked=body))

    async def _tell(
        self, peer: PeerId, header: bytes, body: Sequence[Buffer], *, if_asked: Sequence[Buffer] = ()
    ) -> None:
        with contextlib.suppress(SwarmError):
            answer = await self._transport.call(peer, "evidence", header, body, deadline_s=PASS_ON_S)
            if if_asked and unpack_answer(peer, answer.header, Heard).asks:
                await self._transport.call(peer, "evidence", header, if_asked, deadline_s=PASS_ON_S)

    async def _serve_evidence(self, request: Request) -> Answer:
        shown = unpack(request.header, ShowEvidence, self._run.id)
        evidence, signer = shown.evidence, self._transport.signer
        if evidence.accused in self.convicted:
            return Answer(pack(Heard()))
        if not is_signed_by_accused(signer, self._run, evidence):
            raise Refused(f"peer {short(evidence.accused)} did not sign what it is accused of")
        if self._directory.find(evidence.accused) is None:
            raise Refused(f"nobody knows peer {short(evidence.accused)}")
        between = self._is_between_two(request.peer, evidence)
        if between and not request.body_sizes:
            return Answer(pack(Heard(asks=True)))
        body = await request.accept() if request.body_sizes else []
        if isinstance(evidence, WrongContribution) and evidence.statement.stage == self._stage:
            self._note_suspect(request.peer, evidence)
            return Answer(pack(Heard()))
        if not body and not isinstance(evidence, FalseContribution):
            shows = await self._stage_says(request.peer, evidence)
        elif isinstance(evidence, WrongAnswer) and between:
            liar = await self._referee.liar(evidence, body, request.peer)
            if liar == request.peer:
                why = f"it says that peer {short(evidence.accused)} lied, which answered truly"
                self.leave_out(request.peer, why)
            shows = liar == evidence.accused
        elif isinstance(evidence, WrongAnswer):
            shows = await self.judge(evidence, body)
        else:
            shows = await asyncio.to_thread(proves, signer, self._run, evidence, body)
        if not shows:
            raise Refused(f"this does not show that peer {short(evidence.accused)} lied")
        self.convict(evidence)
        return Answer(pack(Heard()))

    def _note_suspect(self, teller: PeerId, evidence: WrongContribution) -> None:
        """It costs this peer an audit, so an auditor or a replica may say it once in a while."""
        said = evidence.statement
        may = self._speaks_for(self._stage, teller) or self._run.admission.may_audit(teller)
        if not may or said.t - self._suspected_by.get(teller, -SUSPECTS_STEPS) < SUSPECTS_STEPS:
            raise Refused(f"peer {short(teller)} may name a suspect once in {SUSPECTS_STEPS} steps")
        self._suspected_by[teller] = said.t
        self.suspect(evidence.accused)

    def _speaks_for(self, stage: Stage, teller: PeerId) -> bool:
        """Whether it is a replica of a stage, with voice if any has it."""
        return teller in (self._voices.of(stage) or [record.peer for record in self._directory.at(stage)])

    # -- peers of other stages, which have no weights to judge with ----------------------------------

    def _is_between_two(self, teller: PeerId, evidence: Evidence) -> bool:
        """Whether one of two replicas, the only ones of their stage whose word counts, accuses the other one
        of a sum, or a neighbouring stage's of an answer: that this peer can judge by itself.
        """
        accused, stage = evidence.accused, evidence.statement.stage
        there = [r.peer for r in self._directory.at(stage) if r.state == "serving"]
        counted = heard(there, self._voices.of(stage))
        judges = isinstance(evidence, WrongSum | WrongProduct)
        if isinstance(evidence, WrongAnswer):
            judges = abs(stage - self._stage) == 1 and self._referee.may_judge(accused)
        return judges and {*counted, accused} == {teller, accused}

    async def _stage_says(self, teller: PeerId, evidence: Evidence) -> bool:
        """Whether most of a stage, by voice, has convicted one of its peers, itself counted among the others;
        or its founder has, where no third has voice. It may take them a moment: they compute.
        """
        accused, stage = evidence.accused, evidence.statement.stage
        if not self._speaks_for(stage, teller) or accused in self._asking:
            raise Refused("a replica of that stage has to say it, once")
        self._asking.add(accused)
        try:
            for tried in range(ASKED_TIMES):
                await asyncio.sleep(ASK_AGAIN_S * 2 ** (tried - 1) if tried else 0.0)
                if await self.most_have_convicted(stage, accused):
                    return True
            return False
        finally:
            self._asking.discard(accused)

    async def _serve_convicted(self, request: Request) -> Answer:
        ask = unpack(request.header, AskConvicted, self._run.id)
        evidence = self._shown.get(ask.peer) if ask.show else None
        signature = b"" if evidence is None else sign(self._transport.signer, self._run.id, judged(evidence))
        others = tuple(self._some(self.convicted))
        yes = ask.peer in self.convicted
        return Answer(*say(Convicted(yes=yes, others=others, evidence=evidence, signature=signature)))


MAX_TRIES = 3
"""Answers of one peer that are judged here: each costs a download of its stage."""

COPIES = 3
"""Of a state with its optimizer, that have to fit into free memory: what comes, the stage, its work."""
SURE = 0.5
"""An answer is right by far that is no further off than this part of what a wrong one is at least."""


class Referee:
    """What a peer does about disputes of a neighbouring stage, where of two replicas one lies.

    Only replicas have the weights to judge with, and others believe what most of a stage says. Where the word
    of two counts, that is nobody. So each peer of the stages around takes the weights, which both have to
    give alike, computes the answer on its CPU, and believes what it finds.
    """

    def __init__(self, run: Run, transport: Transport) -> None:
        self._run, self._transport = run, transport
        self._tried = Counter[PeerId]()
        self._lock = asyncio.Lock()

    def may_judge(self, accused: PeerId) -> bool:
        """Whether another answer of that peer is judged here, and none is just now."""
        return self._tried[accused] < MAX_TRIES and not self._lock.locked()

    async def liar(self, evidence: WrongAnswer, body: Sequence[Buffer], accuser: PeerId) -> PeerId | None:
        """The accused, if its answer is wrong by the weights of both; the accuser, if it is right by far."""
        replicas, said = [evidence.accused, accuser], evidence.statement
        state = state_of(self._run, said.stage)
        if COPIES * sum(tensor.nbytes for tensor in state.like.values()) > host_memory()[0]:
            return None
        async with self._lock:
            self._tried[evidence.accused] += 1
            try:
                found = await download(self._transport, state, replicas, voice=dict.fromkeys(replicas, 1))
            except SwarmError:
                return None
            version = found.opened.version
            if not found.agreed.issuperset(replicas) or version != self._run.weight_version(said.t):
                return None
            wrong = await asyncio.to_thread(self._proves, version, found.tensors, evidence, body)
            return evidence.accused if wrong else None if wrong is None else accuser

    def _proves(
        self, version: int, tensors: Mapping[str, torch.Tensor], evidence: WrongAnswer, body: Sequence[Buffer]
    ) -> bool | None:
        """Whether it is wrong. None: nearly, and another kind of device may say otherwise."""
        signer = self._transport.signer
        try:
            compute = StageCompute(self._run, evidence.statement.stage)
            compute.load_state(version, tensors)
            if proves_answer(compute, signer, evidence, body):
                return True
            return None if proves_answer(compute, signer, evidence, body, share=SURE) else False
        except SwarmError:
            return None
