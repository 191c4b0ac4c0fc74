"""Coming to where the stage is: by one gradient, by its whole state, or from a checkpoint.

one step behind           the reduced gradient of that step, from a replica that applied it
further behind, joining   the state, from replicas
nobody of the stage has   a checkpoint: own disk, a replica's, a keeper's; version 0 follows from the seed
  what the run needs      (`restore`: starts a new generation if the run must go back for it, I5)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from peers import events
from peers.clock import now_s
from peers.ports import Directory, Rank, Transport
from peers.stage.state import StageCore
from peers.stage.tied_weights import TiedWeights
from peers.status_query import ask_status
from peers.storage.checkpoint_store import CheckpointStore
from peers.transfer.catalog import ask_saved, is_keeper
from peers.transfer.client import Partial, download_state, shown
from peers.transfer.gradient import fetch_gradient
from swarm.errors import PeerFault, SwarmError, short
from swarm.ids import Generation, PeerId, Position, Stage
from swarm.model.layout import empty_state, initial_state
from swarm.policy.backoff import Backoff
from swarm.protocol.messages import Directive
from swarm.protocol.rollback import is_one_step, newest_start, way_back

MAX_ASKED = 8
"""Peers that are asked whether they know a trainer."""
SHARED_S = 20.0
"""Other stages may have gone on by more than a step, and no longer hold what they found in this one."""


class Recovery:
    """Bring the state of a stage peer up to date."""

    def __init__(
        self,
        core: StageCore,
        transport: Transport,
        directory: Directory,
        store: CheckpointStore,
        backoff: Backoff,
        sharing: TiedWeights,
        emit: Callable[[events.Event], None],
        trainers: Callable[[], Sequence[PeerId]],
    ) -> None:
        """`trainers`: those that this peer knows of itself."""
        self._trainers = trainers
        self._core, self._transport, self._directory = core, transport, directory
        self._shelf, self._backoff, self._emit = store, backoff, emit
        self._tied_weights = sharing
        self._run, self._stage = core.run, core.stage
        self._waiting = False
        self._partial = Partial()
        self._useless: set[int] = set()
        """Saved versions that were offered and could not be downloaded."""

    async def to(self, directive: Directive) -> bool:
        """Go to the stage's position in a directive. False if no peer could give it."""
        core = self._core
        sources = [p for p in directive.sources if p != core.me]
        goal = Position(directive.generation, directive.version)
        if is_one_step(core.position, goal) and core.version in core.steps:
            for source in sources:
                if await self._one_step(source):
                    return True
        if sources and await self.download(sources):
            return True
        return (
            goal.generation > core.generation
            and goal.version == goal.generation.start
            and await self.enter(goal.generation)
        )

    async def join(self, replicas: Mapping[PeerId, Position]) -> bool:
        """Go to the replicas' position, perhaps only a step further. False if no peer gave what is
        lacking.
        """
        core = self._core
        if is_one_step(core.position, max(replicas.values())) and core.version in core.steps:
            for replica, position in replicas.items():
                if position > core.position and await self._one_step(replica):
                    return True
        return await self.download(list(replicas))

    async def _one_step(self, source: PeerId) -> bool:
        core = self._core
        step = core.steps[core.version]
        try:
            reduced, held, commit = await fetch_gradient(core, self._transport, source, step.t, "")
            if commit is None:
                return False
            step.promise(held.round, now=now_s())
            try:
                await core.device.run(Rank.STEP, step.t, step.ledger.freeze, held.round)
                step.audited = None
                await asyncio.wait_for(self._tied_weights.hold(step, reduced, held), SHARED_S)
            finally:
                step.end_round(held.round, failed=False)
        except (SwarmError, asyncio.TimeoutError):
            return False
        await core.apply(commit)
        if core.version <= commit.t:
            return False
        text = f"stage {self._stage}: step {commit.t} taken with the gradient of peer {short(source)}"
        self._emit(events.Note(text=text))
        return True

    async def download(
        self, sources: Sequence[PeerId], *, version: int = -1, generation: Generation | None = None
    ) -> bool:
        """Take the state from `sources`, all at once: the newest, or a saved version. False if none gave it.

        `generation`: the one that a saved version is taken for; a replica's newest state says its own.
        """
        core, began = self._core, now_s()

        def fault(fault: PeerFault) -> None:
            self._backoff.failed(fault.peer, now=now_s())
            self._emit(events.PeerLost(peer=fault.peer, stage=self._stage, why=fault.text))

        usable = [source for source in sources if not self._backoff.in_backoff(source, now=began)]
        try:
            found = await download_state(
                self._run, self._stage, empty_state(self._run, self._stage), self._transport, usable,
                version=version, partial=self._partial,
                progress=shown(self._stage, version, self._emit), on_fault=fault,
            )  # fmt: skip
            await core.load(
                Position(generation or found.opened.generation, found.opened.version), found.tensors
            )
        except SwarmError as error:
            self._emit(events.Note(text=error.text))
            return False
        if generation is None:
            core.remember(found.opened.last_go)
        source = found.sources[0] if found.sources else ""
        self._emit(
            events.StateFetched(
                stage=self._stage, version=found.opened.version, source=source, sources=len(found.sources),
                bytes=sum(t.nbytes for t in found.tensors.values()), seconds=now_s() - began,
            )
        )  # fmt: skip
        return True

    # -- when the whole stage was lost ------------------------------------------------------------

    async def enter(self, generation: Generation) -> bool:
        """Go back to the start of a generation. False if its version cannot be had."""
        core = self._core
        if core.version == generation.start:
            core.enter(generation)
        elif not await self._get(Position(generation, generation.start)):
            return False
        self._emit(events.RolledBack(stage=self._stage, step=generation.start))
        return True

    async def restore(self, run: Position, *, waited_s: float) -> bool:
        """Give the run a state of this stage that it can go on from.

        The run is at `run`, and no member of this stage holds that. False if it has to wait, or nobody gave
        what he promised.
        """
        have, from_keeper, _ = await self._to_be_had()
        goal, wait_s = way_back(
            self._stage, self._run.S, run, have, waited_s=waited_s, from_keeper=from_keeper,
            checkpoint_every=self._run.checkpoint_every, steps=self._run.steps,
        )  # fmt: skip
        if wait_s > 0:
            if not self._waiting:
                self._waiting = True
                start = goal.version
                text = (
                    f"stage {self._stage} waits for a checkpoint newer than version {start}, on a disk or "
                    f"at a keeper; the run, at version {run.version}, goes back to {start} in {wait_s:.0f} s"
                )
                self._emit(events.Trouble(text=text))
            return False
        if goal != run and run.version >= self._run.steps and not await self._is_trained():
            if not self._waiting:
                self._waiting = True
                text = (
                    f"the run is complete, but no peer gives version {run.version} of stage {self._stage}: "
                    f"going back to {goal.version} waits for a trainer, and the other stages keep theirs"
                )
                self._emit(events.Trouble(text=text))
            return False
        self._waiting = False
        return await (self._get(run) if goal == run else self.enter(goal.generation))

    async def _is_trained(self) -> bool:
        """Whether a trainer would run again what going back takes off."""
        if self._trainers():
            return True
        first = [r.peer for r in self._directory.at(0) if r.state in ("serving", "joining")]
        told = await ask_status(self._run, self._transport, first[:MAX_ASKED])
        return any(status.trainers for status in told.values())

    async def resume(self) -> bool | None:
        """Start a run that no peer serves from the newest version that all stages can get somewhere.

        True: done. False: some stage has nothing yet that fits, or all that there was may be with a keeper
        that does not answer yet. None: nothing is saved anywhere.
        """
        core = self._core
        have, _, keeper_absent = await self._to_be_had()
        if not any(have.values()):
            return False if keeper_absent else None
        newest = newest_start(self._run.S, have, most=self._run.steps)
        return newest > core.version and await self._get(Position(core.generation, newest))

    async def _to_be_had(self) -> tuple[dict[Stage, set[int]], bool, bool]:
        """The saved versions of each stage, here or offered; whether a keeper offers any, and whether one is
        silent.
        """
        records = await self._directory.survey()
        keepers = {record.peer for record in records if is_keeper(record)}
        faults: list[PeerFault] = []
        saved = await ask_saved(self._run, self._transport, records, on_fault=faults.append)
        from_keeper = any(not keepers.isdisjoint(who) for had in saved.values() for who in had.values())
        have = {stage: set(versions) for stage, versions in saved.items()}
        have[self._stage] |= set(await asyncio.to_thread(self._shelf.versions))
        have[self._stage] -= self._useless
        return have, from_keeper, not keepers.isdisjoint(fault.peer for fault in faults)

    async def _get(self, goal: Position) -> bool:
        """Load a saved version: from here, from others, or, if it is version 0, from the seed."""
        core, version = self._core, goal.version
        if version == 0:
            await core.load(goal, await asyncio.to_thread(initial_state, self._run, self._stage))
            return True
        if version in await asyncio.to_thread(self._shelf.versions):
            try:
                await core.load(goal, await asyncio.to_thread(self._shelf.load, version))
                return True
            except SwarmError as error:  # others may have a whole one
                self._emit(events.Trouble(text=error.text))
        saved = await ask_saved(self._run, self._transport, await self._directory.survey())
        sources = saved[self._stage].get(version, [])
        if sources and await self.download(sources, version=version, generation=goal.generation):
            return True
        self._useless.add(version)
        return False
