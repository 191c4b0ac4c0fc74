"""Giving out the states of stages, as they are now and as they were saved, and the gradients of single steps.

    state   OpenState → Opened + hashes      a lease of one version: `peers.transfer.leases`
    saved   AskSaved  → Saved
    held    OpenHeld  → Opened + hashes      the gradient of one step

`StateLeases` serves the first two, and needs no training: a keeper serves its checkpoint stores by it, which
may change at any time and are read in worker threads. A stage peer's `StateServer` serves one store and live
weights, plus `held`, and what stages start with, where the manifest names weights and this peer has them. For
a place, peers that have worked for the run, or that its owner named or invited, need not wait behind others.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import islice
from typing import TypeAlias

import torch

from peers.clock import now_s
from peers.fault_points import fault_point
from peers.ports import Answer, Rank, Request, Transport
from peers.stage.state import StageCore
from peers.storage.checkpoint_store import CheckpointStore
from peers.transfer.catalog import MAX_SIGNED, MAX_VERSIONS
from peers.transfer.leases import NO_PLACE, Lease, Leases, Snapshot
from peers.voices import Voices
from peers.waiting import happens
from swarm.errors import NotReady, Refused, SetupError
from swarm.ids import PeerId, Stage
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
WAITED_FOR_S = 3.0
"""A place is kept free for so long for a peer that comes first and found none: it asks again after 1 s."""
COPY_TIMES = 3.0
"""So many times as long as a copy took, its reader has no other one made: others have their turn."""
SAID_S = 0.5
"""So long an answer to `saved` is given again: for 32 stages a keeper reads 200 files, in 12 ms."""
HELD_STEPS = 2
"""Of so many steps that were taken, results are read to their end: the last one is held here anyway."""
Start: TypeAlias = Callable[[Stage], Mapping[str, torch.Tensor]]
"""Stage -> the tensors that it starts with; called in worker threads. Raises SetupError: not here."""


class StateLeases(Leases):
    """Serves `state` and `saved` from checkpoint stores, and what it opens."""

    def __init__(
        self, run: Run, transport: Transport, stores: Mapping[Stage, CheckpointStore], *,
        voices: Voices | None = None, most_saved: int = 0, start: Start | None = None,
    ) -> None:  # fmt: skip
        """`most_saved`: maps of saved versions at once, which stay while their files do: gigabytes are hashed
        for each. 0: few, and only while they are read. `start`: what a stage starts with."""
        super().__init__(run, transport)
        self._stores, self._most_saved, self._start = stores, most_saved, start
        self._transport, self._voices = transport, voices
        self._first: dict[bool, dict[PeerId, float]] = {False: {}, True: {}}
        """Until when others wait for those that come first: with states, and with what stages start with."""
        self._there: dict[Stage, list[int]] = {}
        """Versions in the stores, when that was last looked at."""
        self._opening, self._starting, self._saying = asyncio.Lock(), asyncio.Lock(), asyncio.Lock()
        self._said: dict[str, tuple[float, Answer]] = {}
        """What was answered to `saved` last, and when; by the id that was asked for."""
        transport.serve("state", self._serve_state)
        transport.serve("saved", self._serve_saved)

    async def _serve_state(self, request: Request) -> Answer:
        wanted = unpack(request.header, OpenState)
        common = wanted.version == START or (wanted.version >= 0 and self._run.is_common(wanted.version))
        check_run(wanted.run, *self._runs[: None if common else 1])
        self.require_no_rest(reader := request.peer)
        first, waits_s, starts = self._comes_first(reader), 0.0, wanted.version == START
        if first:
            self._first[starts][reader] = math.inf
        try:  # one at a time: two that want the same version at the same moment get the same copy
            async with self._starting if starts else self._opening:
                self.require_no_rest(reader)
                waiting = {peer: until for peer, until in self._first[starts].items() if now_s() < until}
                self._first[starts] = waiting
                if waiting and not first:
                    text = "peers that have worked for the run, or were invited, wait for a place"
                    raise NotReady(text, version=-1, retry_after_s=1.0)
                return await self._open(reader, wanted)
        except NotReady as refusal:
            waits_s = WAITED_FOR_S * (refusal.text == NO_PLACE)
            raise
        finally:
            if first:
                self._first[starts][reader] = now_s() + waits_s

    def _comes_first(self, peer: PeerId) -> bool:
        return self._transport.invited(peer) or (self._voices is not None and self._voices.has(peer))

    async def _open(self, reader: PeerId, wanted: OpenState) -> Answer:
        for other in self._of_stage(wanted.stage):
            other.left_by(reader)  # with another version it has done
        lend, began = self._lend_start if wanted.version == START else self._lend, now_s()
        try:
            return self.read_by(reader, await lend(wanted.stage, wanted.version))
        finally:  # where all stay open nothing is copied, and each is hashed once
            took_s = 0.0 if self._most_saved else now_s() - began
            why = "a state was copied for this peer a moment ago"
            self._rests[reader] = now_s() + COPY_TIMES * took_s, why

    def _of_stage(self, stage: Stage) -> list[Lease]:
        return [lease for lease in self.of("live", "saved") if lease.what == stage]

    async def _lend_start(self, stage: Stage, version: int) -> Lease:
        if known := [lease for lease in self.of("start") if lease.what == stage]:
            return known[0]
        if self._start is None or not 0 <= stage < self._run.S:
            raise Refused(f"this peer has no weights that stage {stage} of the run starts from")
        self.make_room("start", MAX_LEASES, version=-1)
        try:
            tensors = await asyncio.to_thread(self._start, stage)
        except SetupError as error:
            raise Refused(error.text) from None
        return await self.add("start", stage, Snapshot(version=0, tensors=tensors))

    async def _lend(self, stage: Stage, version: int) -> Lease:
        """A copy of that version (negative: the newest), shared with its present readers."""
        if stage not in self._stores:
            raise Refused(f"this peer keeps no checkpoints of stage {stage}")
        if version < 0:
            version = max(await self.versions(stage), default=-1)
            if version < 0:
                text = f"no version of stage {stage} is saved here yet"
                raise NotReady(text, version=-1, retry_after_s=1.0)
        return await self._lend_saved(stage, version)

    async def _lend_saved(self, stage: Stage, version: int, *, newest: int = -1) -> Lease:
        """`newest`: of the versions that this peer has besides those that are saved."""
        if known := [lease for lease in self._of_stage(stage) if lease.opened.version == version]:
            return known[0]
        there = await self.versions(stage)
        if version not in there:
            saved = ", ".join(map(str, there)) or "none"
            text = f"version {version} of stage {stage} is not here; saved are: {saved}"
            newest = max([*there, newest])
            if version > newest:
                raise NotReady(text, version=newest, retry_after_s=1.0)
            raise Refused(text)
        if len(self.of("saved")) >= self._most_saved:
            self.make_room("saved", self._most_saved or MAX_LEASES, version=version)
        try:
            tensors = await asyncio.to_thread(self._stores[stage].load, version)
        except SetupError as error:
            raise Refused(f"version {version} of stage {stage} cannot be given: {error.text}") from None
        return await self.add("saved", stage, Snapshot(version=version, tensors=tensors))

    async def versions(self, stage: Stage) -> list[int]:
        """Ascending. What was opened of others ends when it was read."""
        store = self._stores.get(stage)
        there = sorted(await asyncio.to_thread(store.versions)) if store is not None else []
        self._there[stage] = there
        return there

    def _is_old(self, lease: Lease) -> bool:
        kept = [(stage, version) for stage, there in self._there.items() for version in there]
        stays = self._most_saved and lease.pool == "saved" and (lease.what, lease.opened.version) in kept
        return super()._is_old(lease) and not stays

    async def _offered(self) -> dict[Stage, set[int]]:
        return {stage: set(await self.versions(stage)) for stage in self._stores}

    async def _serve_saved(self, request: Request) -> Answer:
        asked = unpack(request.header, AskSaved, *self._runs).run
        async with self._saying:
            said_at, answer = self._said.get(asked, (-math.inf, Answer(b"")))
            if now_s() - said_at >= SAID_S:
                found = await self._offered()
                if asked != self._run.id:  # it is another island that asks
                    found = {stage: set(filter(self._run.is_common, had)) for stage, had in found.items()}
                answer = Answer(*say(await asyncio.to_thread(self._saved, found)))
                self._said[asked] = now_s(), answer
        return answer

    def _saved(self, found: Mapping[Stage, Collection[int]]) -> Saved:
        stages: list[SavedStage] = []
        for stage in sorted(found):
            versions, store = sorted(found[stage])[-MAX_VERSIONS:], self._stores.get(stage)
            words = (word for v in reversed(versions) for word in (store.signed(v) if store else ()))
            few = tuple(islice(words, MAX_SIGNED // self._run.S))
            stages += [SavedStage(stage=stage, versions=tuple(versions), signed=few)] if versions else []
        return Saved(stages=tuple(stages))


class StateServer(StateLeases):
    """What a stage peer gives out: its state, checkpoints, and gradients of steps that members missed."""

    def __init__(self, core: StageCore, store: CheckpointStore) -> None:
        start = partial(start_tensors, core.run) if core.run.start.weights else None
        voices = Voices(core.run, core.transport.signer, core.directory)  # however long ago one worked
        super().__init__(core.run, core.transport, {core.stage: store}, voices=voices, start=start)
        self._core = core
        core.transport.serve("held", self._serve_held)

    async def _lend(self, stage: Stage, version: int) -> Lease:
        core, newest = self._core, version < 0
        if stage != core.stage:
            raise Refused(f"this peer serves stage {core.stage}, not {stage}")
        if not core.joined:
            if newest:
                raise NotReady("this peer is joining itself", version=-1, retry_after_s=1.0)
            return await self._lend_saved(stage, version)
        live = core.version
        if not newest and version != live:
            return await self._lend_saved(stage, version, newest=live)
        for lease in self._of_stage(stage):
            # The newest says where the run goes on; one that was saved, or made before that, does not.
            if lease.opened.version == live and (not newest or lease.opened.generation == core.generation):
                return lease
        self.make_room("live", MAX_LEASES, version=live)
        snapshot = await self.snapshot()
        if newest or snapshot.version == version:
            return await self.add("live", stage, snapshot)
        return await self._lend_saved(stage, version, newest=live)

    async def _offered(self) -> dict[Stage, set[int]]:
        found, core = await super()._offered(), self._core
        if core.joined and core.finished:  # as good as saved, since nothing changes it any more
            found.setdefault(core.stage, set()).add(core.version)
        return found

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

    def _is_old(self, lease: Lease) -> bool:
        t, met = lease.opened.version, self._core.met
        held = t >= self._core.version - HELD_STEPS or (met is not None and met.t == t)
        return super()._is_old(lease) or (lease.pool == "held" and not held)

    async def _serve_held(self, request: Request) -> Answer:
        """Open a step's result: this stage's sum, or a part that this stage shares with another."""
        wanted = unpack(request.header, OpenHeld, self._core.run.id)
        core, other = self._core, wanted.shared_with
        kept = (one for one in (core.applied, core.met) if one is not None and one.t == wanted.t)
        step = core.steps.get(wanted.t) or next(kept, None)
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
            held = step.prepared.round if step.prepared is not None else ""
            vector = step.reduced if wanted.round in ("", held) else None
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
            fault_point("given")
        else:
            part = vector if other < 0 else core.compute.shared.part(vector, other)
        content = Snapshot(
            version=wanted.t, tensors={"gradient": part}, generation=core.generation,
            last_commit=commit, prepared=prepared,
        )  # fmt: skip
        # What is not looked at above makes no other lease, whatever number it is.
        of, index = -1 if other >= 0 else wanted.shared_of, wanted.part if meets else -1
        what = (max(-1, min(other, 0) if meets else other), max(-1, of), max(-1, index), prepared, commit)
        return await self.lend(request.peer, "held", what, content, vector)
