"""What stages say of their peers that lied: others have no weights to judge with."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Coroutine
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from peers import events
from peers.islands.directory import DirectoryView
from peers.ports import Answer, Directory, Request, Transport
from peers.status_query import MAX_VOICES, ask_convicted
from peers.voices import Voices
from peers.waiting import TaskKeeper, fail, for_each, unless
from swarm.errors import PeerGone, Refused, short
from swarm.ids import PeerId, Stage
from swarm.manifest import Run
from swarm.protocol.voice import heard
from swarm.records import NO_STAGE
from swarm.wire.evidence import Evidence, Heard, ShowEvidence, WrongContribution
from swarm.wire.messages import pack, unpack

T = TypeVar("T")

ASKED_TIMES, AT_ONCE = 5, 16
ASK_AGAIN_S = 1.0
"""Until the second question whether a stage has convicted one of its peers; then twice as long each time."""
ASK_EVERY_S = 60.0
"""What came by a liar that one peer still trusts counts nowhere else: so long the run may stand still."""
MAX_TOLD = 64
"""Peers that are told, or asked, at once."""


class Verdicts:
    """The peers that were shown to lie, as far as this one knows, for the rest of its life."""

    def __init__(self, run: Run, transport: Transport, directory: Directory, emit: events.Emit) -> None:
        self._run, self._emit, self._transport, self._directory = run, emit, transport, directory
        self.of_runs = {run.id: self}  # of all islands, in a process that is the trainer of them
        self._voices = Voices(run, transport.signer, directory)
        self._dice = random.Random(transport.peer_id)
        self.convicted: set[PeerId] = set()
        """They are left out of what this peer does."""
        self._named: set[PeerId] = set()
        """Whose contribution an auditor of the owner found false."""
        self._asking: set[PeerId] = set()
        self._left_out: WeakValueDictionary[PeerId, asyncio.Future[None]] = WeakValueDictionary()
        """Ends the calls to a peer when it is, as long as there are any."""
        self.on_conviction: Callable[[PeerId], None] = lambda peer: None
        self._tasks = TaskKeeper()

    def trusted(self, directory: Directory) -> Directory:
        """A directory without them."""
        convicted = self.convicted  # a view that is kept longer holds nothing else of a server that ended
        return DirectoryView(
            directory, lambda record: None if record.peer in convicted else record, lambda: len(convicted)
        )

    def leave_out(self, accused: PeerId, why: str) -> None:
        """Do without a peer from now on."""
        if accused in self.convicted:
            return
        self.convicted.add(accused)
        self._emit(events.Trouble(text=f"peer {short(accused)} is left out: {why}"))
        if accused in self._left_out:
            fail(self._left_out[accused], PeerGone(accused, "it is left out"))
        self.on_conviction(accused)

    async def while_trusted(self, peer: PeerId, call: Coroutine[Any, Any, T]) -> T:
        """What a call to a peer gives, as long as that is not left out: others do without what it computes.

        Raises:
            PeerGone: it was shown to lie meanwhile.
        """
        left_out = self._left_out.setdefault(peer, asyncio.get_running_loop().create_future())
        if peer in self.convicted:
            fail(left_out, PeerGone(peer, "it is left out"))
        return await unless(left_out, call)

    def ask_soon(self, about: PeerId = "") -> None:
        """`ask`, or only `about` one peer, in the background."""
        self._tasks.create_task(self.ask_about(about) if about else self.ask())

    async def ask(self) -> None:
        """Leave out the peers that their stages have convicted; peers of stage 0 hear of all of these."""
        there = self._voices.counted(0)
        asked = self._dice.sample(there, min(MAX_VOICES, len(there)))
        told = await ask_convicted(self._run, self._transport, asked, "")
        names = {name for one in told.values() for name in one.others[:MAX_TOLD]} - self.convicted
        by = {accused: [peer for peer, one in told.items() if accused in one.others] for accused in names}
        await for_each(sorted(names), lambda accused: self.ask_about(accused, by[accused]), AT_ONCE)

    async def keep_asking(self) -> None:
        """`ask`, from now on: each lie is told once, perhaps while this peer slept, or before it came."""
        while True:
            await self.ask()
            await asyncio.sleep(ASK_EVERY_S)

    async def ask_about(self, accused: PeerId, tellers: Collection[PeerId] = ()) -> None:
        """Leave a peer out if its stage has convicted it, or that at which it signed what `tellers` show."""
        if (record := self._directory.find(accused)) is None:
            return
        stages = {record.stage}
        told = await ask_convicted(self._run, self._transport, tellers, accused, show=True)
        for lie in (one.evidence for one in told.values()):
            if lie and lie.accused == accused and lie.is_signed(self._transport.signer, self._run.id):
                stages.add(lie.statement.stage)
        for stage in sorted(stages.intersection(range(self._run.S))):
            if await self.most_have_convicted(stage, accused):
                self.leave_out(accused, "its stage has convicted it")

    async def most_have_convicted(self, stage: Stage, accused: PeerId) -> bool:
        """Whether most of a stage, by voice, and two of it have; or one that is trusted: a founder, where no
        third has voice, and of two the one that an auditor agrees with. If neither of two is trusted, most of
        the stages around them have to, which judge by themselves. The accused may be of another stage by now.
        """
        there, voice = [*dict.fromkeys([*self._there(stage), accused])], self._voices.of(stage)
        founders = set(self._run.admission.founders) if len(voice) <= 2 else set[PeerId]()
        around = [near for near in (stage - 1, stage + 1) if 0 <= near < self._run.S]
        two = len(there) == 2
        trusted = founders.union(there if two and accused in self._named else ())
        if two and around and trusted.isdisjoint(there):
            there = [peer for near in around for peer in self._there(near)]
            voice = self._voices.of_all(around)
        me = self._transport.peer_id
        weight = {peer: voice.get(peer, 0) if voice else 1 for peer in there if peer != me}
        judges = [peer for peer in heard(there, voice) if peer != accused]
        said = await ask_convicted(self._run, self._transport, judges, accused)
        agree = {peer for peer, one in said.items() if one.yes}
        if accused not in founders and agree & trusted:
            return True
        several = len(agree) > 1 or len(judges) == 1
        return several and 2 * sum(weight[peer] for peer in agree) > sum(weight.values())

    async def stage_says(self, teller: PeerId, evidence: Evidence) -> bool:
        """Whether most of a stage, by voice, has convicted one of its peers, itself counted among the others;
        or its founder has, where no third has voice. It may take them a moment: they compute.

        Raises:
            Refused: `teller` is no replica of that stage, or it is asked already.
        """
        accused, stage = evidence.accused, evidence.statement.stage
        audits = isinstance(evidence, WrongContribution) and self._run.admission.may_audit(teller)
        if audits:
            self._named.add(accused)
        if not (audits or self._voices.counts(teller, stage)) or accused in self._asking:
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

    async def hear(self, request: Request) -> Answer:
        """Be told which peers their stages convict: by those, as a trainer is shown no evidence."""
        own, evidence = self._evidence_in(request)
        if evidence.accused not in own.convicted and await own.stage_says(request.peer, evidence):
            own.leave_out(evidence.accused, "its stage has convicted it")
        return Answer(pack(Heard()))

    def _evidence_in(self, request: Request) -> tuple[Verdicts, Evidence]:
        shown = unpack(request.header, ShowEvidence, *self.of_runs)
        own, evidence = self.of_runs[shown.run], shown.evidence
        is_stage = evidence.statement.stage in range(NO_STAGE, self._run.S)  # each is remembered
        if not is_stage or not evidence.is_signed(self._transport.signer, shown.run):
            raise Refused(f"peer {short(evidence.accused)} did not sign what it is accused of")
        return own, evidence

    def _there(self, stage: Stage) -> list[PeerId]:
        there = [r.peer for r in self._directory.at(stage) if r.state in ("serving", "leaving")]
        return heard(there, self._voices.of(stage))[:MAX_TOLD]

    def _in_order(self, peers: Collection[PeerId]) -> list[PeerId]:
        """Those with voice first: others cost nothing to make."""
        voice = self._voices.of_all()
        return sorted(peers, key=lambda peer: (peer not in voice, peer))

    async def close(self) -> None:
        await self._tasks.close()
