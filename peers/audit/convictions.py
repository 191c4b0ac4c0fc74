"""Peers that were shown to lie. They are left out of all that this peer does, and others hear why."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from peers import events
from peers.ports import Answer, Buffer, Directory, Request, Transport
from swarm.audit.evidence import is_signed_by_accused, proves
from swarm.errors import Refused, SwarmError, short
from swarm.ids import PeerId, Stage
from swarm.manifest import Run
from swarm.records import PeerRecord
from swarm.wire.evidence import MAX_EVIDENCE_BYTES, Evidence, ShowEvidence
from swarm.wire.messages import Ack, check_run, pack, unpack

PASS_ON_S = 30.0
"""Limit for one call with evidence."""
MAX_TOLD = 64
"""Peers that are told: of this stage and its neighbours."""


class Convictions:
    """The peers that this one saw evidence against, for the rest of its life.

    Set `on_conviction` before evidence may come.
    """

    def __init__(
        self, run: Run, transport: Transport, directory: Directory, emit: Callable[[events.Event], None]
    ) -> None:
        self._run, self._transport, self._directory, self._emit = run, transport, directory, emit
        self.convicted: set[PeerId] = set()
        self.on_conviction: Callable[[PeerId], None] = lambda peer: None
        self._tasks: set[asyncio.Task[None]] = set()
        transport.serve("evidence", self._serve_evidence, max_body_bytes=MAX_EVIDENCE_BYTES)

    def convict(self, evidence: Evidence) -> bool:
        """Leave a peer out from now on; whether it was not yet."""
        accused = evidence.accused
        if accused in self.convicted:
            return False
        self.convicted.add(accused)
        why = f"is left out: its signed {_word(evidence)} of step {evidence.statement.t} is false"
        self._emit(events.Trouble(text=f"peer {short(accused)} {why}"))
        self.on_conviction(accused)
        return True

    def pass_on(self, evidence: Evidence, body: Sequence[Buffer], also: Collection[PeerId] = ()) -> None:
        """Tell the peers of this stage and its neighbours, and `also` others."""
        if sum(memoryview(b).nbytes for b in body) > MAX_EVIDENCE_BYTES:
            return
        stage = evidence.statement.stage
        near = {r.peer for around in (stage - 1, stage, stage + 1) for r in self._directory.at(around)}
        told = sorted(near | set(also) - {self._transport.peer_id, evidence.accused})[:MAX_TOLD]
        header = pack(ShowEvidence(run=self._run.id, evidence=evidence))
        for peer in told:
            if peer != self._transport.peer_id:
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
        if not await asyncio.to_thread(proves, signer, self._run, evidence, body):
            raise Refused(f"this does not show that peer {short(evidence.accused)} lied")
        self.convict(evidence)
        return Answer(pack(Ack()))


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
