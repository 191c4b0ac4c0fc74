"""Getting to the stage's position: by one gradient, by its whole state, or from a checkpoint.

one step behind           the reduced gradient of that step, from a replica that applied it
further behind, joining   the state, from replicas
no replica has what       a checkpoint: own disk, a replica's, a keeper's; version 0 follows from the seed
  the run needs           (`restore`: starts a new generation if the run must go back for it, I5)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from operator import attrgetter

from peers import events
from peers.clock import now_s
from peers.islands.directory import Islands
from peers.stage.coordination import StepCoordination
from peers.stage.state import StageCore
from peers.stage.tied_weights import TiedWeights
from peers.status_query import all_have, ask_status
from peers.storage.checkpoint_store import CheckpointStore
from peers.transfer.catalog import Found, ask_saved, is_keeper
from peers.transfer.client import MAX_SOURCES, Partial, download, shown, state_of
from peers.transfer.gradient import fetch_gradient
from swarm.errors import PeerFault, SwarmError, short
from swarm.ids import Generation, PeerId, Position, Stage
from swarm.model.layout import initial_state
from swarm.protocol.messages import Directive
from swarm.protocol.proofs import proves
from swarm.protocol.rollback import ReplicaState, bearers, is_one_step, newest_start, plan_rollback
from swarm.protocol.voice import FOUNDERS_VOICE, heard
from swarm.records import PeerRecord
from swarm.wire.trails import Word

USELESS_S = 15.0
"""For so long a saved version that could not be downloaded is done without: perhaps the network was to blame,
and an island that is behind the others has no other one to go on from."""
MAX_ASKED = 8
"""Peers that are asked whether they know a trainer."""
SAY_EVERY_S = 15.0
"""How often the time is said that is left before the run goes far back."""
SHARED_S = 20.0
"""Other stages may have gone on by more than a step, and no longer hold what they found in this one."""


class Recovery:
    """Bring the state of a stage peer up to date."""

    def __init__(
        self, core: StageCore, coordination: StepCoordination, islands: Islands, store: CheckpointStore,
        tied_weights: TiedWeights,
    ) -> None:  # fmt: skip
        """`islands`: what is saved on any of them will do."""
        self._core, self._transport, self._directory = core, core.transport, core.directory
        self._coordination, self._islands, self._store = coordination, islands, store
        self._tied_weights, self._emit = tied_weights, core.emit
        self._run, self._stage = core.run, core.stage
        self.reached: Callable[[], Awaitable[None]]
        """To be set. Called when this peer has a newer version from a replica, as after a step of its own."""
        self._said_at = float("-inf")
        """When it was last said what `restore` waits for."""
        self._partial = Partial()
        self._useless_until: dict[int, float] = {}
        """Saved versions that were offered and could not be downloaded."""

    async def to(self, directive: Directive) -> bool:
        """Go to the stage's position in a directive. False if no peer could give it."""
        core, goal = self._core, directive.position
        replicas = [source for source in directive.sources if source != core.me]
        begins = goal.generation > core.generation and goal.version == goal.generation.start
        if self._run.admission.named:
            if begins:  # each by itself: what one alone gives it may have made up
                return await self.enter(goal.generation)
            replicas = await self._borne_out(directive, replicas)
        followed = await self.follow(dict.fromkeys(replicas, goal))
        return followed or (begins and await self.enter(goal.generation))

    async def _borne_out(self, directive: Directive, sources: Sequence[PeerId]) -> list[PeerId]:
        """The replicas that have what a directive says, if it is to be followed: `bearers`."""
        core, goal, digest, voice = self._core, directive.position, directive.digest, self._core.voice()
        serving = [r.peer for r in self._directory.at(self._stage) if r.state == "serving"]
        others = sorted({*sources, *serving} - {core.me})
        taken = directive.commits if goal.generation == core.generation else ()
        proven = any(c.t == goal.version - 1 and self._coordination.believes(c) for c in taken)
        told = await ask_status(self._run, self._transport, heard(others, voice))
        there = sorted((said for said in told.values() if said.position >= goal), key=attrgetter("position"))
        if there and core.position < goal != there[0].position and there[0].generation == goal.generation:
            goal, digest, proven = there[0].position, there[0].digest, False  # since then they went on
        if core.position < goal and voice and await self._others_have(goal):
            proven = True
            if not any(peer in voice and said.position >= goal for peer, said in told.items()):
                voice, told = {}, await ask_status(self._run, self._transport, others)
        found = bearers(
            goal, digest, ReplicaState(core.position, core.digest, core.kind),
            {peer: ReplicaState(said.position, said.digest, said.kind) for peer, said in told.items()}, voice,
            me=core.me, is_proven=proven,
        )  # fmt: skip
        if not found and directive.coordinator != core.me:
            text = f"stage {self._stage}: its coordinator {short(directive.coordinator)} wants version"
            self._emit(events.Note(text=f"{text} {goal.version} of it taken; others do not bear that out"))
        return found

    async def _others_have(self, goal: Position) -> bool:
        """Whether all other stages say that they have come so far. They may have taken what proves it while
        no peer with voice served this stage; once one does, that proves nothing any more.
        """
        others, core = set(range(self._run.S)) - {self._stage}, self._core
        stages = [core.voices.counted(stage) for stage in sorted(others)]
        return bool(stages) and await all_have(self._run, self._transport, stages, goal)

    async def follow(self, replicas: Mapping[PeerId, Position]) -> bool:
        """Go to the newest position of those whose word counts, or a step further; False: none gave it."""
        core = self._core
        if not replicas:
            return False
        counted = {replica: replicas[replica] for replica in heard(replicas, core.voice())}
        ahead = [replica for replica, position in counted.items() if position > core.position]
        is_near = is_one_step(core.position, max(counted.values())) and core.version in core.steps
        if not (is_near and await self._one_step(ahead)) and not await self.download(list(replicas)):
            return False
        await self.reached()
        return True

    async def _one_step(self, sources: Sequence[PeerId]) -> bool:
        core, believes = self._core, self._coordination.believes
        step = core.steps[core.version]
        try:
            reduced, held, commit, source = await fetch_gradient(core, sources, step.t, "")
            if commit is None or not (believes(commit) and proves(commit, self._stage, held)):
                return False
            step.counts = None
            await self._tied_weights.hold_fetched(step, reduced, held, limit_s=SHARED_S)
        except (SwarmError, asyncio.TimeoutError):
            return False
        await core.apply(commit)
        if core.version <= commit.t:
            return False
        text = f"stage {self._stage}: step {commit.t} taken with the gradient of peer {short(source)}"
        self._emit(events.Note(text=text))
        return True

    async def download(
        self, sources: Sequence[PeerId], *, version: int = -1, generation: Generation | None = None,
        signed: Sequence[Word] = (),
    ) -> bool:  # fmt: skip
        """Take the state from `sources`, all at once: the newest, or a saved version. False if none gave it.

        `generation`: the one that a saved version is taken for; a replica's newest state says its own.
        `signed`: what peers signed of that version.
        """
        core, began = self._core, now_s()

        def fault(fault: PeerFault) -> None:
            core.backoff.failed(fault.peer, now=now_s())
            self._emit(events.PeerLost(peer=fault.peer, stage=self._stage, why=fault.why))

        # Of a stage that is lost the keepers of founders say what its state was.
        founders = dict.fromkeys(self._run.admission.founders, FOUNDERS_VOICE)
        core.backoff.relent(sources, now=began)  # else the run would go back for a stage that is there
        usable = [source for source in sources if not core.backoff.in_backoff(source, now=began)]
        common = version >= 0 and self._run.is_common(version)
        voice = self._islands.voice((self._stage,)) if common else core.voice()
        wanted = state_of(self._run.whole if common else self._run, self._stage, version, signed)
        try:
            found = await download(
                self._transport, wanted, usable, voice={**founders, **voice},
                partial=self._partial, progress=shown(self._stage, version, self._emit), on_fault=fault,
            )  # fmt: skip
            await core.load(
                Position(generation or found.opened.generation, found.opened.version), found.tensors
            )
        except SwarmError as error:
            self._emit(events.Note(text=error.text))
            return False
        loaded = found.opened.version
        if self._run.meets_at(loaded - 1):  # any island may need it
            self._store.pin(loaded, found.tensors)
        commit = found.opened.last_commit
        if generation is None and commit is not None and self._coordination.believes(commit):
            core.remember(commit)
        source, size = next(iter(found.sources), ""), sum(t.nbytes for t in found.tensors.values())
        self._emit(events.StateFetched(
            stage=self._stage, version=loaded, source=source, sources=len(found.sources), bytes=size,
            seconds=now_s() - began,
        ))  # fmt: skip
        return True

    # -- when the whole stage was lost ------------------------------------------------------------

    async def enter(self, generation: Generation) -> bool:
        """Go back to the start of a generation. False if no peer gives its version."""
        core = self._core
        if core.version == generation.start:
            core.enter(generation)
        elif not await self._get(Position(generation, generation.start)):
            return False
        self._emit(events.RolledBack(stage=self._stage, step=generation.start))
        return True

    async def rejoin(self, run: Position) -> bool:
        """Go to where replicas are that have come as far as the run; False if there is none.

        They may have another coordinator, to which this one does not report.
        """
        core, at, voice = self._core, self._core.generation, self._core.voice()
        told = await core.ask([r for r in core.replicas() if not voice or r.peer in voice])
        there = {peer: said for peer, said in told.items() if said.generation == at and said.position >= run}
        for one in sorted(there, key=lambda peer: (-voice.get(peer, 0), peer)):  # some may lie
            directive = Directive(
                run=core.run.id, stage=core.stage, coordinator=one, sources=tuple(there), generation=at,
                version=there[one].version, digest=there[one].digest,
            )  # fmt: skip
            if await self.to(directive):
                break
        return bool(there)

    async def restore(self, run: Position, *, waited_s: float) -> bool:
        """Give the run a state of this stage that it can go on from.

        The run is at `run`, and no replica of this stage holds that. False if it has to wait, or no peer gave
        what it had offered.
        """
        have, from_keeper, _ = await self._available()
        goal, wait_s = plan_rollback(
            self._stage, self._run.S, run, have, waited_s=waited_s, from_keeper=from_keeper,
            checkpoint_every=self._run.checkpoint_every, steps=self._run.steps,
        )  # fmt: skip
        if wait_s > 0:
            start = goal.version
            text = (
                f"stage {self._stage} waits for a checkpoint newer than version {start}, on a disk or "
                f"at a keeper; the run, at version {run.version}, goes back to {start} in {wait_s:.0f} s"
            )
            self._say_again(text, SAY_EVERY_S)
            return False
        if goal != run and run.version >= self._run.steps and not await self.is_trained():
            text = (
                f"the run is complete, but no peer gives version {run.version} of stage {self._stage}: "
                f"going back to {goal.version} waits for a trainer, and the other stages keep theirs"
            )
            self._say_again(text, float("inf"))
            return False
        self._said_at = float("-inf")
        return await (self._get(run) if goal == run else self.enter(goal.generation))

    def _say_again(self, text: str, every_s: float) -> None:
        """Say what is waited for, the first time and then every so often."""
        if self._said_at == float("-inf") or now_s() - self._said_at >= every_s:
            self._said_at = now_s()
            self._emit(events.Trouble(text=text))

    async def is_trained(self) -> bool:
        """Whether a trainer would run again what a rollback undoes."""
        if self._coordination.trainers:
            return True
        voice = self._core.voices.of(0)
        there = [r.peer for r in self._directory.at(0) if r.state in ("serving", "joining")]
        first = sorted(there, key=lambda peer: peer not in voice)[:MAX_ASKED]
        told = await ask_status(self._run, self._transport, first)
        return any(told[peer].trainers for peer in heard(told, voice))

    async def resume(self) -> bool | None:
        """Start a run that no peer serves from the newest version that all stages can get somewhere.

        True: done. False: some stage has nothing yet that fits, or all that there was may be with a keeper
        that does not answer yet. None: nothing is saved anywhere.
        """
        core = self._core
        have, _, keeper_absent = await self._available()
        if not any(have.values()):
            return False if keeper_absent else None
        newest = newest_start(self._run.S, have, most=self._run.steps)
        return newest > core.version and await self._get(Position(core.generation, newest))

    async def _available(self) -> tuple[dict[Stage, set[int]], bool, bool]:
        """The saved versions of each stage; whether a keeper offers any, and whether one is silent."""
        records = await self._directory.lookup_all()
        keepers = {record.peer for record in records if is_keeper(record)}
        faults: list[PeerFault] = []
        sources = (await self._ask_saved(records, faults.append)).sources
        from_keeper = any(not keepers.isdisjoint(peers) for had in sources.values() for peers in had.values())
        have = {stage: set(versions) for stage, versions in sources.items()}
        have[self._stage] |= set(await asyncio.to_thread(self._store.versions))
        have[self._stage] -= {version for version, end in self._useless_until.items() if now_s() < end}
        return have, from_keeper, not keepers.isdisjoint(fault.peer for fault in faults)

    async def _ask_saved(
        self, records: Sequence[PeerRecord], on_fault: Callable[[PeerFault], None] = lambda fault: None
    ) -> Found:
        """What is saved where: with this island's peers, of `records`; of others what all have in common."""
        run, transport, voice = self._run, self._transport, self._core.voices.of_all()
        found = await ask_saved(run, transport, records, voice=voice, on_fault=on_fault)
        if self._islands.others:
            others, voice = await self._islands.others_records(), self._islands.voice()
            theirs = await ask_saved(run.whole, transport, others, voice=voice, on_fault=on_fault)
            if not theirs.sources[self._stage]:  # what none with voice has would be lost for good
                theirs = await ask_saved(run.whole, transport, others, on_fault=on_fault)
            for stage, had in theirs.sources.items():
                for saved, peers in had.items():
                    if run.is_common(saved):
                        found.sources[stage].setdefault(saved, []).extend(peers)
                        if words := theirs.signed[stage].get(saved):
                            found.signed[stage].setdefault(saved, words)
        return found

    async def _get(self, goal: Position) -> bool:
        """Load a saved version: from here, from others, or, if it is version 0, from the seed."""
        core, version = self._core, goal.version
        if version == 0:
            await core.load(goal, await asyncio.to_thread(initial_state, self._run, self._stage))
            return True
        if version in await asyncio.to_thread(self._store.versions):
            try:
                await core.load(goal, await asyncio.to_thread(self._store.load, version))
                return True
            except SwarmError as error:  # others may have an undamaged one
                self._emit(events.Trouble(text=error.text))
        saved = await self._ask_saved(await self._directory.lookup_all())
        sources = saved.sources[self._stage].get(version, [])
        signed = saved.signed[self._stage].get(version, [])
        some = MAX_SOURCES if signed else max(1, len(sources))  # of all at once those with voice come first
        for at in range(0, len(sources), some):
            if await self.download(
                sources[at : at + some], version=version, generation=goal.generation, signed=signed
            ):
                return True
        self._useless_until[version] = now_s() + USELESS_S
        return False
