"""Peers that were shown to lie. They are left out of all that this peer does, and others hear why."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Protocol

from peers import events
from peers.ports import Answer, Buffer, Directory, Request, Transport
from peers.voices import Voices
from swarm.audit.evidence import is_signed_by_accused, proves
from swarm.errors import Refused, SwarmError, short
from swarm.ids import PeerId, Stage
from swarm.manifest import Run
from swarm.protocol.voice import heard
from swarm.records import PeerRecord
from swarm.wire.evidence import (
    MAX_EVIDENCE_BYTES,
    AskConvicted,
    Convicted,
    Evidence,
    FalseContribution,
    ShowEvidence,
    WrongAnswer,
    WrongContribution,
)
from swarm.wire.messages import Ack, check_run, pack, unpack, unpack_answer

PASS_ON_S = 30.0
"""Limit for one call with evidence."""
MAX_TOLD = 64
"""Peers that are told, or asked: of a stage, and of others."""
SUSPECTS_STEPS = 20
ASK_S = 3.0
ASKED_TIMES = 5
ASK_AGAIN_S = 1.0
"""Between two questions whether a stage has convicted one of its peers."""


class Convictions:
    """The peers that this one saw evidence against, for the rest of its life.

    Set `on_conviction` before evidence may come.
    """

    def __init__(
        self,
        run: Run,
        stage: Stage,
        transport: Transport,
        directory: Directory,
        emit: Callable[[events.Event], None],
    ) -> None:
        self._run, self._stage, self._emit = run, stage, emit
        self._transport, self._directory = transport, directory
        self._voices = Voices(run, transport.signer, directory)
        self._asking: set[PeerId] = set()
        self.convicted: set[PeerId] = set()
        """They are left out of what this peer does."""
        self.barred: set[PeerId] = set()
        """Of those, the ones that all can convict at any time: this peer is in no round with them."""
        self.on_conviction: Callable[[PeerId], None] = lambda peer: None
        self.suspect: Callable[[PeerId], None] = lambda peer: None
        """Told of a replica whose contribution another one found wrong."""
        self._suspected_by: dict[PeerId, int] = {}
        """The last step of which each replica said so."""
        self.judge: Callable[[WrongAnswer, Sequence[Buffer]], Awaitable[bool]] = _no_judge
        """Whether an answer is wrong: of a peer that has the weights."""
        self._tasks: set[asyncio.Task[None]] = set()
        transport.serve("evidence", self._serve_evidence, max_body_bytes=MAX_EVIDENCE_BYTES)
        transport.serve("convicted", self._serve_convicted)

    def convict(self, evidence: Evidence) -> bool:
        """Leave a peer out from now on; whether it was not yet."""
        accused = evidence.accused
        if accused in self.convicted:
            return False
        self.convicted.add(accused)
        if not isinstance(evidence, WrongAnswer | WrongContribution):
            self.barred.add(accused)
        why = f"is left out: its signed {_word(evidence)} of step {evidence.statement.t} is false"
        self._emit(events.Trouble(text=f"peer {short(accused)} {why}"))
        self.on_conviction(accused)
        return True

    def pass_on(self, evidence: Evidence, body: Sequence[Buffer]) -> None:
        """Show it to the other replicas of this stage. The other stages are told of it, and ask them: those
        around this one, and stage 0, which coordinates the run; of stage 0 all are.
        """
        header = pack(ShowEvidence(run=self._run.id, evidence=evidence))
        stages = {self._stage - 1, self._stage + 1, 0} if self._stage else set(range(self._run.S))
        others = {r.peer for stage in stages - {self._stage} for r in self._directory.at(stage)}
        self.tell_replicas(evidence, body)
        for peer in sorted(others)[:MAX_TOLD]:
            self._spawn(self._tell(peer, header, []))

    def tell_replicas(self, evidence: Evidence, body: Sequence[Buffer]) -> None:
        """Show it to the other replicas of this stage."""
        header = pack(ShowEvidence(run=self._run.id, evidence=evidence))
        replicas = {r.peer for r in self._directory.at(self._stage)} - {self._transport.peer_id}
        if sum(memoryview(b).nbytes for b in body) > MAX_EVIDENCE_BYTES:
            body = []
        for peer in sorted(replicas)[:MAX_TOLD]:
            self._spawn(self._tell(peer, header, body))

    def _spawn(self, work: object) -> None:
        task = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(self, peer: PeerId, header: bytes, body: Sequence[Buffer]) -> None:
        with contextlib.suppress(SwarmError):
            await self._transport.call(peer, "evidence", header, body, deadline_s=PASS_ON_S)

    async def close(self) -> None:
        """Stop telling others."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve_evidence(self, request: Request) -> Answer:
        shown = unpack(request.header, ShowEvidence)
        check_run(shown.run, self._run.id)
        evidence, signer = shown.evidence, self._transport.signer
        if evidence.accused in self.convicted:
            return Answer(pack(Ack()))
        if not is_signed_by_accused(signer, self._run, evidence):
            raise Refused(f"peer {short(evidence.accused)} did not sign what it is accused of")
        body = await request.accept() if request.body_sizes else []
        if isinstance(evidence, WrongContribution) and evidence.statement.stage == self._stage:
            self._note_suspect(request.peer, evidence)
            return Answer(pack(Ack()))
        if not body and not isinstance(evidence, FalseContribution):
            shows = await self._stage_says(request.peer, evidence)
        elif isinstance(evidence, WrongAnswer):
            shows = await self.judge(evidence, body)
        else:
            shows = await asyncio.to_thread(proves, signer, self._run, evidence, body)
        if not shows:
            raise Refused(f"this does not show that peer {short(evidence.accused)} lied")
        self.convict(evidence)
        return Answer(pack(Ack()))

    def _note_suspect(self, teller: PeerId, evidence: WrongContribution) -> None:
        """It costs this peer an audit, so a replica with voice may say it, once in a while."""
        said, voice = evidence.statement, self._voices.of(self._stage)
        last = self._suspected_by.get(teller, -SUSPECTS_STEPS)
        if (voice and teller not in voice) or said.t - last < SUSPECTS_STEPS:
            raise Refused(f"peer {short(teller)} may name a suspect once in {SUSPECTS_STEPS} steps")
        self._suspected_by = {teller: said.t, **self._suspected_by}
        self._suspected_by[teller] = said.t
        self.suspect(evidence.accused)

    # -- peers of other stages, which have no weights to judge with ----------------------------------

    async def _stage_says(self, teller: PeerId, evidence: Evidence) -> bool:
        """Whether most of a stage, by voice, has convicted one of its peers, itself counted among the others.

        It may take them a moment: they compute.
        """
        accused, stage = evidence.accused, evidence.statement.stage
        record = self._directory.find(teller)
        if record is None or record.stage != stage or accused in self._asking:
            raise Refused("a replica of that stage has to say it, once")
        self._asking.add(accused)
        try:
            for _ in range(ASKED_TIMES):
                if await self._most_have_convicted(stage, accused):
                    return True
                await asyncio.sleep(ASK_AGAIN_S)
            return False
        finally:
            self._asking.discard(accused)

    async def _most_have_convicted(self, stage: Stage, accused: PeerId) -> bool:
        there = [r.peer for r in self._directory.at(stage) if r.state in ("serving", "leaving")][:MAX_TOLD]
        voice = self._voices.of(stage)
        asked = [peer for peer in heard(there, voice) if peer not in (accused, self._transport.peer_id)]
        said = await asyncio.gather(*(self._has_convicted(peer, accused) for peer in asked))
        weight = {peer: voice.get(peer, 0) if voice else 1 for peer in there}
        agree = sum(weight[peer] for peer, yes in zip(asked, said, strict=True) if yes)
        return 2 * agree > sum(weight.values())

    async def _has_convicted(self, peer: PeerId, accused: PeerId) -> bool:
        ask = AskConvicted(run=self._run.id, peer=accused)
        try:
            answer = await self._transport.call(peer, "convicted", pack(ask), deadline_s=ASK_S)
            return unpack_answer(peer, answer.header, Convicted).yes
        except SwarmError:
            return False

    async def _serve_convicted(self, request: Request) -> Answer:
        ask = unpack(request.header, AskConvicted)
        check_run(ask.run, self._run.id)
        return Answer(pack(Convicted(yes=ask.peer in self.convicted)))


async def _no_judge(evidence: WrongAnswer, body: Sequence[Buffer]) -> bool:
    return False


def _word(evidence: Evidence) -> str:
    return type(evidence.statement).__name__.lower()


class _Records(Protocol):
    def __call__(self) -> Sequence[PeerRecord]: ...


class TrustedDirectory:
    """A directory without the peers that were shown to lie. Fulfils `peers.ports.Directory`."""

    def __init__(self, directory: Directory, convicted: Collection[PeerId]) -> None:
        self._directory, self._convicted = directory, convicted
        self._shown: dict[Stage | None, tuple[Sequence[PeerRecord], int, Sequence[PeerRecord]]] = {}

    def _without(self, key: Stage | None, records: Sequence[PeerRecord]) -> Sequence[PeerRecord]:
        """The same object as long as nothing has changed."""
        if not self._convicted:
            return records
        known = self._shown.get(key)
        if known is None or known[0] is not records or known[1] != len(self._convicted):
            left = [record for record in records if record.peer not in self._convicted]
            known = self._shown[key] = (records, len(self._convicted), left)
        return known[2]

    def watch(self, stages: Collection[Stage] | None) -> None:
        self._directory.watch(stages)

    def peers(self) -> Sequence[PeerRecord]:
        return self._without(None, self._directory.peers())

    def at(self, stage: Stage) -> Sequence[PeerRecord]:
        return self._without(stage, self._directory.at(stage))

    def find(self, peer: PeerId) -> PeerRecord | None:
        return None if peer in self._convicted else self._directory.find(peer)

    @property
    def lag_s(self) -> float:
        return self._directory.lag_s

    async def refresh(self, stages: Collection[Stage] | None = None) -> Sequence[PeerRecord]:
        found = await self._directory.refresh(stages)
        return [record for record in found if record.peer not in self._convicted]

    async def lookup_all(self) -> Sequence[PeerRecord]:
        found = await self._directory.lookup_all()
        return [record for record in found if record.peer not in self._convicted]

    async def announce(self, record: PeerRecord) -> None:
        await self._directory.announce(record)

    async def withdraw(self) -> None:
        await self._directory.withdraw()
