"""Coming to where the stage is: by one gradient, by its whole state, or from a checkpoint.

one step behind           the reduced gradient of that step, from a mate that applied it
further behind, joining   the state, from mates
nobody of the stage has   a checkpoint: own disk, a mate's, a keeper's; version 0 follows from the seed
  what the run needs      (`bring_back`: starts a new era if the run must go back for it, I5)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from peers import events
from peers.core import StageCore
from peers.device_thread import Rank
from peers.disk.shelf import Shelf
from peers.download import Partial, download_state, shown
from peers.ports import Directory, Transport
from peers.saved import ask_saved, is_keeper
from peers.sharing import Sharing
from peers.sync import fetch_gradient
from swarm.errors import PeerFault, SwarmError, short
from swarm.ids import Era, PeerId, Stage, Standing
from swarm.model.layout import empty_state, initial_state
from swarm.policy.bans import Bans
from swarm.policy.eras import is_one_step, newest_start, way_back
from swarm.wire.messages import Brief

SHARED_S = 20.0
"""Other stages may have gone on by more than a step, and no longer hold what they found in this one."""


class CatchUp:
    """Brings the core of a stage peer up to date."""

    def __init__(
        self,
        core: StageCore,
        transport: Transport,
        directory: Directory,
        shelf: Shelf,
        bans: Bans,
        sharing: Sharing,
        emit: Callable[[events.Event], None],
    ) -> None:
        self._core, self._transport, self._directory = core, transport, directory
        self._shelf, self._bans, self._emit = shelf, bans, emit
        self._sharing = sharing
        self._run, self._stage = core.run, core.stage
        self._waiting = False
        self._partial = Partial()
        self._useless: set[int] = set()
        """Saved versions that somebody promised and nobody gave."""

    async def to(self, brief: Brief) -> bool:
        """Where the coordinator says that the stage is. False if nobody could give it."""
        core = self._core
        sources = [p for p in brief.sources if p != core.me]
        goal = Standing(brief.era, brief.version)
        if is_one_step(core.standing, goal) and core.version in core.steps:
            for source in sources:
                if await self._one_step(source):
                    return True
        if sources and await self.download(sources):
            return True
        return goal.era > core.era and goal.version == goal.era.start and await self.enter(goal.era)

    async def join(self, mates: Mapping[PeerId, Standing]) -> bool:
        """To where the mates are, perhaps only a step further. False if nobody gave what is lacking."""
        core = self._core
        if is_one_step(core.standing, max(mates.values())) and core.version in core.steps:
            for mate, standing in mates.items():
                if standing > core.standing and await self._one_step(mate):
                    return True
        return await self.download(list(mates))

    async def _one_step(self, source: PeerId) -> bool:
        core = self._core
        step = core.steps[core.version]
        try:
            reduced, held, go = await fetch_gradient(core, self._transport, source, step.t, "")
            if go is None:
                return False
            await core.device.run(Rank.STEP, step.t, step.ledger.freeze, held.round)
            step.audited = None
            await asyncio.wait_for(self._sharing.hold(step, reduced, held), SHARED_S)
        except (SwarmError, asyncio.TimeoutError):
            return False
        await core.apply(go)
        if core.version <= go.t:
            return False
        text = f"stage {self._stage}: step {go.t} taken with the gradient of peer {short(source)}"
        self._emit(events.Note(text=text))
        return True

    async def download(self, sources: Sequence[PeerId], *, version: int = -1, era: Era | None = None) -> bool:
        """Take the state from `sources`, all at once: the newest, or a saved version. False if none gave it.

        `era`: the one that a saved version is taken for; a mate's newest state says its own.
        """
        core, began = self._core, time.monotonic()

        def fault(fault: PeerFault) -> None:
            self._bans.failed(fault.peer, now=time.monotonic())
            self._emit(events.PeerLost(peer=fault.peer, stage=self._stage, why=fault.text))

        usable = [source for source in sources if not self._bans.resting(source, now=began)]
        try:
            found = await download_state(
                self._run, self._stage, empty_state(self._run, self._stage), self._transport, usable,
                version=version, partial=self._partial,
                progress=shown(self._stage, version, self._emit), on_fault=fault,
            )  # fmt: skip
            await core.load(Standing(era or found.opened.era, found.opened.version), found.tensors)
        except SwarmError as error:
            self._emit(events.Note(text=error.text))
            return False
        if era is None:
            core.remember(found.opened.last_go)
        source = found.sources[0] if found.sources else ""
        self._emit(
            events.StateFetched(
                stage=self._stage, version=found.opened.version, source=source, sources=len(found.sources),
                bytes=sum(t.nbytes for t in found.tensors.values()), seconds=time.monotonic() - began,
            )
        )  # fmt: skip
        return True

    # -- when the whole stage was lost ------------------------------------------------------------

    async def enter(self, era: Era) -> bool:
        """Go back to the start of an era. False if its version is not to be had."""
        core = self._core
        if core.version == era.start:
            core.enter(era)
        elif not await self._get(Standing(era, era.start)):
            return False
        self._emit(events.RolledBack(stage=self._stage, step=era.start))
        return True

    async def bring_back(self, run: Standing, *, waited_s: float) -> bool:
        """Give the run a state of this stage that it can go on from.

        The run is at `run`, and no member of this stage holds that. False if it has to wait, or nobody gave
        what he promised.
        """
        have, from_keeper = await self._to_be_had()
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
        self._waiting = False
        return await (self._get(run) if goal == run else self.enter(goal.era))

    async def resume(self) -> bool | None:
        """Start a run that nobody serves from the newest version that all stages can get somewhere.

        True: done. False: some stage has nothing yet that fits. None: nothing is saved anywhere.
        """
        core = self._core
        have, _ = await self._to_be_had()
        if not any(have.values()):
            return None
        newest = newest_start(self._run.S, have, most=self._run.steps)
        return newest > core.version and await self._get(Standing(core.era, newest))

    async def _to_be_had(self) -> tuple[dict[Stage, set[int]], bool]:
        """The saved versions of each stage that are here, or that somebody offers; whether a keeper does."""
        records = await self._directory.survey()
        keepers = {record.peer for record in records if is_keeper(record)}
        saved = await ask_saved(self._run, self._transport, records)
        from_keeper = any(not keepers.isdisjoint(who) for had in saved.values() for who in had.values())
        have = {stage: set(versions) for stage, versions in saved.items()}
        have[self._stage] |= set(await asyncio.to_thread(self._shelf.versions))
        have[self._stage] -= self._useless
        return have, from_keeper

    async def _get(self, goal: Standing) -> bool:
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
        if sources and await self.download(sources, version=version, era=goal.era):
            return True
        self._useless.add(version)
        return False
