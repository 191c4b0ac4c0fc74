"""Giving out the states of stages, as they are now and as they were saved, and the gradients of single steps.

    state   OpenState → Opened + hashes      a lease of one version: `peers.transfer.leases`
    saved   AskSaved  → Saved
    held    OpenHeld  → Opened + hashes      the gradient of one step

`StateLeases` serves the first two, and needs no training: a keeper serves its checkpoint stores by it,

    StateLeases(run, transport, {stage: CheckpointStore(run, stage, folder) for stage in range(run.S)})

and a stage peer's `StateServer` one store and live weights, plus `held`, and what stages start with, where
the manifest names weights and this peer has them. Stores are read in worker threads;
they may change at any time, and be added to the mapping.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch

from peers.fault_points import fault_point
from peers.ports import Answer, Rank, Request, Transport
from peers.stage.state import StageCore
from peers.storage.checkpoint_store import CheckpointStore
from peers.transfer.leases import Lease, Leases, Snapshot
from peers.waiting import happens
from swarm.errors import NotReady, Refused, SetupError, SwarmError
from swarm.ids import Generation, Stage
from swarm.manifest import Run
from swarm.model.layout import start_tensors
from swarm.model.meeting import part_of
from swarm.wire.messages import (
    START,
    AskSaved,
    OpenHeld,
    OpenState,
    Saved,
    SavedStage,
    check_run,
    say,
    unpack,
)

SHARED_WAIT_S = 2.0
"""How long a stage that shares weights waits here for this stage's sum, before it asks another peer."""
MAX_LEASES = 2
"""Copies of live weights in host memory at once, each with its optimizer; and as many of saved versions."""
MAX_VERSIONS_TOLD = 64
"""Of each stage, the newest ones."""


Start: TypeAlias = Callable[[Stage], Mapping[str, torch.Tensor]]
"""Stage -> the tensors that it starts with; called in worker threads. Raises SetupError: not here."""


class StateLeases(Leases):
    """Serves `state` and `saved`, and what it opens."""

    def __init__(
        self,
        run: Run,
        transport: Transport,
        stores: Mapping[Stage, CheckpointStore],
        *,
        live: StateServer | None = None,
        most_saved: int = MAX_LEASES,
        start: Start | None = None,
    ) -> None:
        """`most_saved`: copies of saved versions in memory at once. `start`: what a stage starts with."""
        super().__init__(run, transport)
        self._stores, self._live, self._most_saved, self._start = stores, live, most_saved, start
        self._opening = asyncio.Lock()
        transport.serve("state", self._serve_state)
        transport.serve("saved", self._serve_saved)

    async def _serve_state(self, request: Request) -> Answer:
        wanted = unpack(request.header, OpenState)
        common = wanted.version == START or (wanted.version >= 0 and self._run.is_common(wanted.version))
        check_run(wanted.run, *self._runs[: None if common else 1])
        # One at a time: two that want the same version at the same moment get the same copy.
        async with self._opening:
            self.require_no_rest(request.peer, version=-1)
            for other in self._of_stage(wanted.stage):
                other.readers.pop(request.peer, None)  # with another version it has done
            return self.read_by(request.peer, await self._lease(wanted.stage, wanted.version))

    def _of_stage(self, stage: Stage) -> list[Lease]:
        return [lease for lease in self.of("live", "saved") if lease.what == stage]

    async def _lease(self, stage: Stage, version: int) -> Lease:
        """A copy of that version (negative: the newest), shared with its present readers."""
        if version == START:
            return await self._lease_start(stage)
        live: int | None = None
        try:
            live = self._live.version(stage) if self._live is not None else None
        except SwarmError:
            if version < 0 or stage not in self._stores:
                raise
        if self._live is None and stage not in self._stores:
            raise Refused(f"this peer keeps no checkpoints of stage {stage}")
        if version < 0 and live is None:  # a keeper: the newest that was saved
            version = max(await self._versions(stage), default=-1)
            if version < 0:
                raise NotReady(
                    f"no version of stage {stage} is saved here yet", version=-1, retry_after_s=1.0
                )
        wanted = live if version < 0 else version
        generation = None if version >= 0 or self._live is None else self._live.generation
        for lease in self._of_stage(stage):
            # The newest says where the run goes on; one that was saved, or made before that, does not.
            if lease.opened.version == wanted and generation in (None, lease.opened.generation):
                return lease
        if live is not None and wanted == live:
            assert self._live is not None
            self.make_room("live", MAX_LEASES, version=live)
            snapshot = await self._live.snapshot()
            if version < 0 or snapshot.version == version:
                return await self.add("live", stage, snapshot)
        return await self.add("saved", stage, await self._load(stage, version, live))

    async def _lease_start(self, stage: Stage) -> Lease:
        for lease in self.of("start"):
            if lease.what == stage:
                return lease
        if self._start is None:
            raise Refused("this peer has no weights that the run starts from")
        self.make_room("start", MAX_LEASES, version=-1)
        try:
            tensors = await asyncio.to_thread(self._start, stage)
        except SetupError as error:
            raise Refused(error.text) from None
        return await self.add("start", stage, Snapshot(version=0, tensors=tensors))

    async def _load(self, stage: Stage, version: int, live: int | None) -> Snapshot:
        there = await self._versions(stage)
        if version not in there:
            saved = ", ".join(map(str, there)) or "none"
            text = f"version {version} of stage {stage} is not here; saved are: {saved}"
            newest = max([*there, -1 if live is None else live])
            if version > newest:
                raise NotReady(text, version=newest, retry_after_s=1.0)
            raise Refused(text)
        self.make_room("saved", self._most_saved, version=version)
        try:
            tensors = await asyncio.to_thread(self._stores[stage].load, version)
        except SetupError as error:
            raise Refused(f"version {version} of stage {stage} cannot be given: {error.text}") from None
        return Snapshot(version=version, tensors=tensors)

    async def _versions(self, stage: Stage) -> Sequence[int]:
        """Ascending."""
        store = self._stores.get(stage)
        return sorted(await asyncio.to_thread(store.versions)) if store is not None else []

    async def _serve_saved(self, request: Request) -> Answer:
        asked = unpack(request.header, AskSaved, *self._runs).run
        found = {stage: set(await self._versions(stage)) for stage in self._stores}
        if self._live is not None and (last := self._live.last) is not None:
            found.setdefault(self._live.stage, set()).add(last)
        if asked != self._run.id:  # it is another island that asks
            found = {stage: {v for v in had if self._run.is_common(v)} for stage, had in found.items()}
        stages = [
            SavedStage(stage=stage, versions=tuple(sorted(found[stage])[-MAX_VERSIONS_TOLD:]))
            for stage in sorted(found)
            if found[stage]
        ]
        return Answer(*say(Saved(stages=tuple(stages))))


class StateServer:
    """What a stage peer gives out: to joiners its state and its checkpoints, to members that missed a step
    the gradient of that."""

    def __init__(self, core: StageCore, store: CheckpointStore | None = None) -> None:
        self._core, transport = core, core.transport
        stores = {} if store is None else {core.stage: store}
        start = partial(start_tensors, core.run) if core.run.start.weights else None
        self.leases = StateLeases(core.run, transport, stores, live=self, start=start)
        transport.serve("held", self._serve_held)

    def version(self, stage: Stage) -> int:
        """The version that `snapshot` would give now.

        Raises:
            Refused: this peer serves another stage.
            NotReady: it has no weights yet.
        """
        core = self._core
        if stage != core.stage:
            raise Refused(f"this peer serves stage {core.stage}, not {stage}")
        if not core.joined:
            raise NotReady("this peer is joining itself", version=-1, retry_after_s=1.0)
        return core.version

    @property
    def stage(self) -> Stage:
        return self._core.stage

    @property
    def generation(self) -> Generation:
        return self._core.generation

    @property
    def last(self) -> int | None:
        """The run's last version, once it is here: as good as saved, since nothing changes it any more."""
        core = self._core
        return core.version if core.joined and core.finished else None

    async def snapshot(self) -> Snapshot:
        """Between two jobs of the device: all of one version."""
        return await self._core.device.run(Rank.STEP, self._core.version, self._copy)

    def _copy(self) -> Snapshot:
        core = self._core
        version = core.compute.version
        return Snapshot(
            version=version, tensors=core.compute.state.copy(), generation=core.generation,
            last_commit=core.commits.get(version - 1),
        )  # fmt: skip

    async def _serve_held(self, request: Request) -> Answer:
        """Open a step's result: this stage's sum, or a part that this stage shares with another."""
        wanted = unpack(request.header, OpenHeld, self._core.run.id)
        core, other = self._core, wanted.shared_with
        step = core.steps.get(wanted.t)
        for kept in (core.applied, core.met):
            if step is None and kept is not None and kept.t == wanted.t:
                step = kept
        meets = core.run.meets_at(wanted.t)
        asks_sum = meets and wanted.shared_of == core.run.islands.count + core.run.number
        if step is None and meets and (other >= 0 or asks_sum):  # another island is there first
            step = await core.step(wanted.t, wait_s=SHARED_WAIT_S)
        vector, prepared, commit = None, None, None
        if step is not None and other >= 0:
            if not meets:
                core.compute.shared.numel(other)  # before it waits for what is none of that stage's
            if step.reduced is None:  # held back while it is being averaged
                await happens(step.reduced_there, SHARED_WAIT_S)
            vector = step.reduced
        elif step is not None and wanted.shared_of >= 0:  # for a replica that reaches no peer of that stage
            if asks_sum:
                await happens(step.added_up, SHARED_WAIT_S)
            vector = step.shared.get(wanted.shared_of)
        elif (
            step is not None
            and step.prepared is not None
            and (step.commit is not None or wanted.round in ("", step.prepared.round))
        ):
            vector, prepared, commit = step.reduced, step.prepared, step.commit
        if vector is None:
            raise NotReady(f"no such sum of step {wanted.t} is held here", version=core.version)
        if meets:
            part = vector if wanted.part < 0 else part_of(core.run, core.compute.layout, vector, wanted.part)
        else:
            part = vector if other < 0 else core.compute.shared.part(vector, other)
        if meets:
            fault_point("given")
        content = Snapshot(
            version=wanted.t, tensors={"gradient": part}, generation=core.generation,
            last_commit=commit, prepared=prepared,
        )  # fmt: skip
        what = (wanted.shared_with, wanted.shared_of, wanted.part, prepared, commit)
        return await self.leases.lend(request.peer, "held", what, content, vector)
