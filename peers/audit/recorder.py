"""Writes the transcript of a run: asks replicas of each stage for their signed trails, every 128 steps.

Two replicas that say the same are enough, those with the most voice. What another says differently is written
beside it: `swarm verify` finds out which is true. And of each peer that a stage convicts: by which evidence.
Knows ports only.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from peers import events
from peers.audit.trail import KEPT
from peers.ports import Directory, Transport
from peers.status_query import ask_all, ask_convicted
from peers.storage.transcript import CharterSeen, Conviction, Entry, Took, TranscriptWriter
from peers.transfer.catalog import SIGNERS
from peers.voices import Voices
from swarm.errors import BadAnswer, SetupError
from swarm.ids import PeerId, Stage
from swarm.manifest import Run
from swarm.policy.keeping import reached
from swarm.protocol.coordinator import realigns
from swarm.protocol.statements import is_signed
from swarm.protocol.voice import heard, weight
from swarm.records import PeerRecord
from swarm.wire.evidence import Convicted, Evidence, judged
from swarm.wire.messages import AskTrail, Trail
from swarm.wire.trails import MAX_STEPS, Signed, TookSteps, Word

EVERY_S = 10.0
"""Replicas remember 512 steps: of runs faster than 20 ms a step some are missed."""
ASK_S = 4.0
MAX_ASKED = 4
"""Replicas of one stage: one may be a step behind, and one may lie."""
MAX_CONVICTED = 256
"""Peers whose evidence is in a transcript, judged by two; and by one."""
AT_A_TIME = 4
TRIES = 3
"""Other replicas may compute yet: until then one that judged is not enough."""
LATE_STEPS = 2
"""Replicas may be so far behind the first of them."""


class TranscriptRecorder:
    """Keeps the transcript up to date with what an island signs, or a run without islands.

    Args:
        file: of the whole run.
        charter: the owner's id, and the charter as it is signed; empty if there is none.
    """

    def __init__(
        self, run: Run, transport: Transport, directory: Directory, file: TranscriptWriter,
        emit: events.Emit, charter: Callable[[], tuple[PeerId, bytes]],
    ) -> None:  # fmt: skip
        self._run, self._transport, self._directory, self._emit = run, transport, directory, emit
        self._voices, self._charter = Voices(run, transport.signer, directory), charter
        self._file = file
        self._said = ""
        self._turn = 0
        """Which replica of each stage is asked which peers it convicted."""
        self._tried = Counter[PeerId]()
        self._dice = random.Random(transport.peer_id)

    async def run(self) -> None:
        """Record what is due, until cancelled."""
        while True:
            await self.record()
            await asyncio.sleep(EVERY_S)

    async def record(self, *, all_of_it: bool = False) -> None:
        """Write what is due: full trails, and the last one of the run; or `all_of_it`."""
        while await self._record(all_of_it):
            pass  # there may be more of a fast run

    async def _record(self, all_of_it: bool) -> bool:
        """Ask each stage once, and write what it says; whether there was anything of its steps."""
        try:
            await asyncio.to_thread(self._file.append)
            there = {stage: self._heard(stage) for stage in range(self._run.S)}
            newest = reached({stage: {r.peer: r.version for r in of} for stage, of in there.items()}, {}) or 0
            each = await asyncio.gather(*(self._stage(*of, newest, all_of_it) for of in there.items()))
            found: list[Entry] = [took for several in each for took in several]
            self._turn += 1
            told = await asyncio.gather(*(self._convicted(stage) for stage in range(self._run.S)))
            found += [conviction for several in told for conviction in several]
            owner, sealed = self._charter()
            if sealed != self._file.charter:
                found.insert(0, CharterSeen(owner, sealed))
            await asyncio.to_thread(self._file.append, found)
            return any(each)
        except SetupError as error:
            if error.text != self._said:
                self._said = error.text
                self._emit(events.Trouble(text=error.text))
            return False

    async def _stage(
        self, stage: Stage, asked: Sequence[PeerRecord], newest: int, all_of_it: bool
    ) -> list[Took]:
        """What is due of one stage. `newest`: where all are: one that says that it is further would else be
        asked alone, and what the others sign of these steps never be written.
        """
        since, steps = self._file.ends.get(self._run.cell(stage), 0), self._run.steps
        voice, versions = self._voices.of(stage), sorted(record.version for record in asked) or [0]
        most = versions[(len(versions) - 1) // 2]
        if most - since > KEPT:  # they forgot what comes next: without a gap nothing would ever follow
            since = most - MAX_STEPS - LATE_STEPS
        due = newest >= min(since + MAX_STEPS + LATE_STEPS, steps)
        if since >= min(newest, steps) or not (due or all_of_it):
            return []
        until = min(since + MAX_STEPS, steps)
        least = since + 1 if all_of_it else until
        told = await self._ask(asked[:MAX_ASKED], stage, since, least, until)
        found = chosen(told, lambda peer: weight(peer, voice))
        return [replace(took, island=max(0, self._run.number)) for took in found]

    async def signed(self, stage: Stage, version: int) -> list[Word]:
        """What replicas with voice sign of a checkpoint: while they have no time to give it, too."""
        if not (self._run.admission.named and realigns(self._run, version)):
            return []
        voice = self._voices.of(stage)
        asked = [record for record in self._heard(stage) if record.peer in voice][:MAX_ASKED]
        return await self._ask(asked, stage, version - 1, version, version)

    def _heard(self, stage: Stage) -> list[PeerRecord]:
        """The replicas whose word counts, that with the most voice first."""
        voice = self._voices.of(stage)
        there = {r.peer: r for r in self._directory.at(stage) if r.state in ("serving", "leaving")}
        found = [there[peer] for peer in heard(there, voice)]
        return sorted(found, key=lambda record: (-weight(record.peer, voice), -record.version, record.peer))

    async def _ask(
        self, records: Sequence[PeerRecord], stage: Stage, since: int, least: int, until: int
    ) -> list[Word]:
        """What replicas sign of these steps, of each that reaches to `least`, and can be."""
        run, transport = self._run.id, self._transport

        def check(peer: PeerId, trail: Trail) -> None:
            took = trail.steps
            if took.stage != stage or not since <= took.start < took.end or not least <= took.end <= until:
                raise BadAnswer(peer, "told of other steps")
            if not is_signed(transport.signer, peer, run, took, trail.signature):
                raise BadAnswer(peer, "did not sign its steps")

        question, by = AskTrail(run=run, since=since, until=until), {r.peer: r.voucher for r in records}
        told = await ask_all(transport, by, "trail", question, Trail, deadline_s=ASK_S, check=check)
        return [(trail.steps, Signed(peer, trail.signature, by[peer])) for peer, trail in told.items()]

    # -- evidence -----------------------------------------------------------------------------------

    async def _convicted(self, stage: Stage) -> list[Conviction]:
        """What convicted peers of a stage and is not in the transcript yet: as soon as two replicas judge it;
        or after a while one did, until there are two.
        """
        asked, found, written = self._heard(stage)[:MAX_ASKED], list[Conviction](), self._file.convicted
        if not asked:
            return []
        run, transport = self._run, self._transport
        told = await ask_convicted(run, transport, [asked[self._turn % len(asked)].peer], "")
        wanted = [n for one in told.values() for n in one.others if written.get(n, 0) < SIGNERS]
        for accused in self._dice.sample(wanted, min(AT_A_TIME, len(wanted))):
            others = [one.peer for one in asked if one.peer != accused]
            told = await ask_convicted(run, transport, others, accused, show=True)
            judgements = (self._judgement(one, told.get(one.peer), stage, accused) for one in asked)
            judges = [one for one in judgements if one is not None][:SIGNERS]
            by: dict[Evidence, list[Signed]] = {}
            for evidence, signed in judges:
                by.setdefault(evidence, []).append(signed)
            self._tried[accused] += bool(judges)
            both = len(judges) == SIGNERS
            enough = both or (bool(judges) and self._tried[accused] >= TRIES and accused not in written)
            if enough and sum((n >= SIGNERS) == both for n in written.values()) < MAX_CONVICTED:
                island = max(0, self._run.number)
                found += [Conviction(evidence, tuple(signed), island) for evidence, signed in by.items()]
        return found

    def _judgement(
        self, record: PeerRecord, told: Convicted | None, stage: Stage, accused: PeerId
    ) -> tuple[Evidence, Signed] | None:
        """What convicted a peer of a stage, by the word of a replica; None if that is not signed by both."""
        run, signer = self._run, self._transport.signer
        if told is None or (evidence := told.evidence) is None:
            return None
        if (evidence.accused, evidence.statement.stage) != (accused, stage):
            return None
        by_both = evidence.is_signed(signer, run.id) and is_signed(
            signer, record.peer, run.id, judged(evidence), told.signature
        )
        return (evidence, Signed(record.peer, told.signature, record.voucher)) if by_both else None


def chosen(told: Sequence[Word], weight_of: Callable[[PeerId], int]) -> list[Took]:
    """What is written of what replicas said: of those that begin first, the account with the most weight,
    then the longest; and one of the same kind of device that contradicts it: one of the two is false.
    """
    start = min((took.start for took, _ in told), default=0)
    accounts: dict[TookSteps, list[Signed]] = {}
    for took, by in told:
        if took.start == start:
            accounts.setdefault(took, []).append(by)

    def rank(took: TookSteps) -> tuple[int, int, bytes]:
        return -sum(weight_of(by.peer) for by in accounts[took]), -took.end, took.rows

    ranked = sorted(accounts, key=rank)
    others = [
        took for took in ranked if took.kind == ranked[0].kind and not ranked[0].rows.startswith(took.rows)
    ]
    return [Took(took, tuple(accounts[took][:SIGNERS])) for took in ranked[:1] + others[:1]]
