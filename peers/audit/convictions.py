"""Peers that were shown to lie. They are left out of all that this peer does, and others hear why."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

import torch
from msgspec.structs import replace

from peers import events
from peers.audit.verdicts import MAX_TOLD, Verdicts
from peers.device import host_memory
from peers.incoming import Places
from peers.ports import Answer, Buffer, Directory, Request, Transport
from peers.transfer.client import download, state_of
from peers.waiting import for_each
from swarm.audit.answers import proves_answer
from swarm.audit.evidence import proves
from swarm.errors import NotReady, PeerSilent, Refused, Stale, SwarmError, short
from swarm.ids import PeerId, Stage
from swarm.manifest import Run
from swarm.model.stage import StageCompute
from swarm.protocol.statements import sign
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
BODIES_AT_ONCE = 2
"""That this peer shows: if all shared its line none would come in time."""
MAX_BODIES = 4
"""Evidence with its data that is looked at at once: 256 MiB, one of each peer."""
SUSPECTS_STEPS = 20


class Convictions(Verdicts):
    """The peers that this one saw evidence against, too.

    Set `on_conviction` before evidence may come.
    """

    def __init__(
        self, run: Run, stage: Stage, transport: Transport, directory: Directory, emit: events.Emit
    ) -> None:
        super().__init__(run, transport, directory, emit)
        self._stage = stage
        self._referee = Referee(run, transport)
        self._passed_on, self._places = Counter[PeerId](), Places(MAX_BODIES, each=1)
        self.barred: set[PeerId] = set()
        """Of those, the ones that all can convict at any time: this peer is in no round with them."""
        self.suspect: Callable[[PeerId], None] = lambda peer: None
        """Told of a replica whose contribution another one found wrong."""
        self._shown: dict[PeerId, Evidence] = {}
        """What convicted each; of very many, the first and those with voice."""
        self._suspected_by: dict[PeerId, int] = {}
        """The step in which each replica said so last."""
        self.last_added: Callable[[PeerId], int | None] = lambda peer: None
        """The last step that a replica of this stage contributed to."""
        self.judge: Callable[[WrongAnswer, Sequence[Buffer]], Awaitable[bool]]
        """Whether an answer is wrong: of a peer that has the weights. To be set, as `on_conviction`."""
        transport.serve("evidence", self._serve_evidence, max_body_bytes=MAX_EVIDENCE_BYTES)
        transport.serve("convicted", self._serve_convicted)

    def convict(self, evidence: Evidence) -> bool:
        """Leave a peer out from now on; whether it was not yet."""
        accused = evidence.accused
        if accused in self.convicted:
            return False
        # Not strangers, which own no part: others of this stage may not have heard of their lies.
        counts, at_any_time = self._voices.counts, not isinstance(evidence, WrongAnswer | WrongContribution)
        if at_any_time and counts(accused, self._stage):
            self.barred.add(accused)
        if len(self._shown) < MAX_TOLD or accused in self._voices.of_all():
            self._shown[accused] = evidence
        what = type(evidence.statement).__name__.lower()
        self.leave_out(accused, f"its signed {what} of step {evidence.statement.t} is false")
        return True

    def found(self, evidence: Evidence, body: Sequence[Buffer]) -> None:
        """Leave a peer out, and have others hear of it, if that is news."""
        if self.convict(evidence):
            self.pass_on(evidence, body)

    def pass_on(self, evidence: Evidence, body: Sequence[Buffer], *, to_all: bool = True) -> None:
        """Show it to the other replicas of this stage. `to_all`: other stages are told of it and ask them,
        first those around this one, and stage 0, which coordinates the run; and trainers. Some times of each
        liar: of a stage of two, others judge by themselves, and the step may be over by then.
        """
        self._passed_on[evidence.accused] += to_all
        if self._passed_on[evidence.accused] > MAX_TRIES:
            return
        header, long = say(ShowEvidence(run=self._run.id, evidence=evidence))
        if long and isinstance(evidence, WrongSum):  # of so many that they ask those that found it
            header, body = pack(ShowEvidence(run=self._run.id, evidence=replace(evidence, lists=()))), []
        body = body if sum(memoryview(b).nbytes for b in body) <= MAX_EVIDENCE_BYTES else []
        near = {self._stage - 1, self._stage + 1, 0} - {self._stage}
        others = (near, set(range(self._run.S)) - near - {self._stage}) if to_all else ()
        here = [peer for peer in self._at({self._stage}) if peer != self._transport.peer_id]
        told = [peer for stages in others for peer in self._at(stages)]
        told += self._run.admission.trainers if to_all else ()
        room = asyncio.Semaphore(BODIES_AT_ONCE if body else MAX_TOLD)

        def call(peer: PeerId, shown: Sequence[Buffer] = ()) -> Awaitable[Answer]:
            return self._transport.call(peer, "evidence", header, shown, deadline_s=PASS_ON_S)

        async def show(peer: PeerId) -> None:
            with contextlib.suppress(SwarmError):
                with contextlib.suppress(PeerSilent):
                    async with room:
                        await call(peer, body)
                        return
                await call(peer)  # a line may be too slow: it asks its stage then

        async def tell(peer: PeerId) -> None:
            with contextlib.suppress(SwarmError):
                answer = await call(peer)
                if body and unpack_answer(peer, answer.header, Heard).asks:
                    self._tasks.create_task(show(peer))

        self._tasks.create_task(for_each(here[: MAX_TOLD**2], show, MAX_TOLD))
        self._tasks.create_task(for_each(told[: MAX_TOLD**2], tell, MAX_TOLD))

    def _at(self, stages: Collection[Stage]) -> list[PeerId]:
        return self._in_order({record.peer for stage in stages for record in self._directory.at(stage)})

    async def _serve_evidence(self, request: Request) -> Answer:
        _, evidence = self._evidence_in(request)
        if evidence.accused in self.convicted:
            return Answer(pack(Heard()))
        if self._directory.find(evidence.accused) is None:
            raise Refused(f"no peer here knows {short(evidence.accused)}")
        teller, between = request.peer, self._is_between_two(request.peer, evidence)
        if teller == evidence.accused:  # it may show to one what it hides from the others
            raise Refused("no peer is heard against itself")
        if not request.body_sizes and not isinstance(evidence, FalseContribution):
            asks = Answer(pack(Heard(asks=True)))
            return asks if between else await self._hear(teller, evidence, [], between)
        if not self._voices.counts(teller, evidence.statement.stage):
            raise Refused("a replica of that stage has to show it")
        with self._places.one_for(teller):
            return await self._hear(teller, evidence, await self._places.receive(request), between)

    async def _hear(
        self, teller: PeerId, evidence: Evidence, body: Sequence[Buffer], between: bool
    ) -> Answer:
        if isinstance(evidence, WrongContribution) and evidence.statement.stage == self._stage:
            self._tasks.create_task(self._follow(teller, evidence))
            self._note_suspect(teller, evidence)
            return Answer(pack(Heard()))
        if not body and not isinstance(evidence, FalseContribution):
            shows = await self.stage_says(teller, evidence)
        elif isinstance(evidence, WrongAnswer) and between:
            liar = await self._referee.liar(evidence, body, teller)
            if liar == teller:
                self.leave_out(teller, f"it says that {short(evidence.accused)} lied, which answered truly")
            shows = liar == evidence.accused
        elif isinstance(evidence, WrongAnswer):
            try:
                shows = await self.judge(evidence, body)
            except (NotReady, Stale):  # of a step that is over: this peer would go on with it alone
                shows = await self.stage_says(teller, evidence)
        else:
            shows = await asyncio.to_thread(proves, self._transport.signer, self._run, evidence, body)
        if not shows:
            raise Refused(f"this does not show that peer {short(evidence.accused)} lied")
        self.convict(evidence)
        return Answer(pack(Heard()))

    def _note_suspect(self, teller: PeerId, evidence: WrongContribution) -> None:
        """It costs this peer an audit, so an auditor or a replica may say it once in a while."""
        t = self.last_added(self._transport.peer_id) or 0  # of what was signed any may be shown, long after
        may = self._voices.counts(teller, self._stage) or self._run.admission.may_audit(teller)
        if not may or t - self._suspected_by.get(teller, -SUSPECTS_STEPS) < SUSPECTS_STEPS:
            raise Refused(f"peer {short(teller)} may name a suspect once in {SUSPECTS_STEPS} steps")
        self._suspected_by[teller] = t
        self.suspect(evidence.accused)

    async def _follow(self, teller: PeerId, evidence: WrongContribution) -> None:
        """Leave a peer out that most of this stage has: it is in no round now where this one could look."""
        with contextlib.suppress(Refused):
            if await self.stage_says(teller, evidence):
                self.convict(evidence)

    def _is_between_two(self, teller: PeerId, evidence: Evidence) -> bool:
        """Whether one of two replicas, the only ones of their stage whose word counts, accuses the other one
        of a sum, or a neighbouring stage's of an answer: that this peer can judge by itself.
        """
        accused, stage = evidence.accused, evidence.statement.stage
        counted = self._voices.counted(stage)
        judges = isinstance(evidence, WrongSum | WrongProduct)
        if isinstance(evidence, WrongAnswer):
            judges = abs(stage - self._stage) == 1 and self._referee.may_judge(accused)
        return judges and {*counted, accused} == {teller, accused}

    async def _serve_convicted(self, request: Request) -> Answer:
        ask = unpack(request.header, AskConvicted, self._run.id)
        evidence = self._shown.get(ask.peer) if ask.show else None
        signature = b"" if evidence is None else sign(self._transport.signer, self._run.id, judged(evidence))
        others = tuple(self._in_order(self.convicted)[:MAX_TOLD])
        yes, added = ask.peer in self.convicted, self.last_added(ask.peer)
        told = Convicted(yes=yes, others=others, evidence=evidence, signature=signature, added=added)
        return Answer(*say(told))


MAX_TRIES = 3
"""Answers of one peer that are judged here: each costs a download of its stage."""
COPIES = 3
"""Of a state with its optimizer, that have to fit into free memory: what comes, the stage, its work."""
SURE = 0.5
"""An answer is right by far that is no further off than this part of what a wrong one is at least."""


class Referee:
    """What a peer does about disputes of a neighbouring stage, where of two replicas one lies.

    Only replicas have the weights to judge with, and others believe what most of a stage says. Where the word
    of two counts, there is no such majority. So each peer of the stages around takes the weights, which both
    have to give alike, computes the answer on its CPU, and believes what it finds.
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
        torch.autocast_increment_nesting()  # or what `DeviceThreads` have rounded is forgotten with ours
        try:
            compute = StageCompute(self._run, evidence.statement.stage)
            compute.load_state(version, tensors)
            given = compute, self._transport.signer, evidence, body
            if proves_answer(*given):
                return True
            return None if proves_answer(*given, share=SURE) else False
        except SwarmError:
            return None
        finally:
            torch.autocast_decrement_nesting()
