"""What the parts of a stage peer share: weights and sums, open steps, and news of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from peers.clock import now_s
from peers.events import Event
from peers.ports import Device, Rank
from peers.stage.device import DeviceThreads
from peers.stage.open_step import OpenStep
from peers.waiting import happens
from swarm.errors import Leaving, NotReady, Stale, SwarmError
from swarm.ids import Generation, PeerId, Position, Stage
from swarm.manifest import Run
from swarm.model.stage import StageCompute
from swarm.protocol.coordinator import realigns
from swarm.protocol.ledger import Ledger
from swarm.protocol.replica import COMMITS_KEPT
from swarm.protocol.rounds import Commit, Prepared
from swarm.records import PeerRecord
from swarm.wire.messages import Audit


@dataclass(slots=True)
class Applied:
    """The last step that was taken, kept for members that missed it."""

    commit: Commit
    reduced: torch.Tensor
    held: Prepared
    shared: Mapping[Stage, torch.Tensor]


class ReportTrigger:
    """Says when there is something to report: at once if a step waits for it, else gathered."""

    def __init__(self) -> None:
        self._any, self._urgent = asyncio.Event(), asyncio.Event()
        self._last = float("-inf")

    def some(self) -> None:
        """Progress: may wait for more of it."""
        self._any.set()

    def urgent(self) -> None:
        """A step waits for this."""
        self._any.set()
        self._urgent.set()

    async def wait(self, *, quiet_s: float, gather_s: float) -> None:
        """Return when it is time to report: at the latest after `quiet_s`."""
        await happens(self._any, quiet_s)
        if not self._urgent.is_set():
            await happens(self._urgent, self._last + gather_s - now_s())
        self._any.clear()
        self._urgent.clear()
        self._last = now_s()


class StageCore:
    """One stage of one run on one device. Its coroutines run in one event loop."""

    def __init__(
        self,
        run: Run,
        stage: Stage,
        me: PeerId,
        compute: StageCompute,
        emit: Callable[[Event], None],
        *,
        device: Device | None = None,
    ) -> None:
        """`device`: a thread of its own if there is none."""
        self.run, self.stage, self.me, self.compute, self.emit = run, stage, me, compute, emit
        self.kind = ""
        """What a made-up microbatch gives here: devices of one kind compute the same bits."""
        self.device: Device = device or DeviceThreads(f"device of stage {stage}")
        self.generation = Generation()
        self.steps: dict[int, OpenStep] = {}
        self.commits: dict[int, Commit] = {}
        """Of the last steps that were taken, by step."""
        self.applied: Applied | None = None
        self._digest = (-1, "")
        self.audit = Audit()
        self.undone = 0
        self.computed = 0
        self.report_trigger = ReportTrigger()
        self._moved = asyncio.Event()
        self._hashing: asyncio.Task[None] | None = None
        self.joined = False
        """Serving: the weights are the stage's."""
        self.leaving = False
        """Nothing more is admitted, and another member coordinates, if there is one."""

    @property
    def version(self) -> int:
        """Newest weight version held."""
        return self.compute.version

    @property
    def position(self) -> Position:
        """How far this peer is."""
        return Position(self.generation, self.version)

    @property
    def digest(self) -> str:
        """Of the weights of `version`; empty while it is being computed."""
        version, digest = self._digest
        return digest if version == self.version else ""

    @property
    def is_last(self) -> bool:
        return self.stage == self.run.S - 1

    @property
    def finished(self) -> bool:
        """All steps of the run are taken."""
        return self.version >= self.run.steps

    def newest_step(self) -> int:
        """The newest step that weights of this version may work on (delayed updates run one ahead)."""
        return min(self.version + (1 if self.run.delayed_updates else 0), self.run.steps - 1)

    def close(self) -> None:
        """Nothing may change a sum any more; the device thread ends after its running job."""
        for step in self.steps.values():
            step.close()
        if self._hashing is not None:
            self._hashing.cancel()
        self.device.stop()

    def free(self) -> None:
        """After `close`: nothing of what was computed is needed any more."""
        self.steps.clear()
        self.applied = None
        self.compute.free()

    def remember(self, commit: Commit | None) -> None:
        """The go of the step before the state that was loaded: replicas may still wait for it."""
        if commit is not None:
            self.commits[commit.t] = commit

    async def open_steps(self) -> None:
        """Close the steps that are over and open those that this version may work on."""
        for t in [t for t in self.steps if t < self.version]:
            self.steps.pop(t).close()
        for t in range(self.version, self.newest_step() + 1):
            if t not in self.steps:
                await self.device.run(Rank.STEP, t, self.compute.sums.begin, t)
                self.steps[t] = OpenStep(t, Ledger(t, self.run.M, self.device.books.check))
        self.report_trigger.urgent()
        self._move()

    def drop_sum(self, step: OpenStep) -> None:
        """In a job of rank STEP: forget all of a step's sum and its ledger; it starts again from nothing."""
        step.drop()
        if not step.over:
            self.compute.sums.drop(step.t)
            self.compute.sums.begin(step.t)

    def replicas(self, records: Iterable[PeerRecord]) -> list[PeerRecord]:
        """The records of the other replicas of this stage."""
        return [r for r in records if r.stage == self.stage and r.state == "serving" and r.peer != self.me]

    def leave(self) -> None:
        """End all waits for a step: none opens any more."""
        self.leaving = True
        self._move()

    def _move(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def step(self, t: int, *, wait_s: float) -> OpenStep:
        """The open step `t`; waits for it a while, since peers do not step at the same instant.

        Raises:
            Stale: it is over.
            NotReady: it did not open in time.
            Leaving: nor will it.
        """
        until = now_s() + wait_s
        while True:
            if t < self.version:
                raise self.closed(t)
            if self.joined and t in self.steps:
                return self.steps[t]
            if self.leaving:
                raise Leaving("this peer is leaving")
            left = until - now_s()
            if left <= 0:
                raise NotReady(
                    f"step {t} is not open; stage {self.stage} is at version {self.version}",
                    version=self.version,
                )
            await happens(self._moved, left)

    def closed(self, t: int) -> SwarmError:
        """Why a closed step `t` takes nothing more: it was taken, or its sum was dropped here."""
        if t < self.version:
            text = f"step {t} is over; stage {self.stage} is at version {self.version}"
            return Stale(text, version=self.version)
        return NotReady(f"the sum of step {t} was dropped here and starts again", version=self.version)

    async def apply(self, commit: Commit) -> None:
        """Take step `commit.t` with the gradient that is held."""
        step = self.steps.get(commit.t)
        if step is None or step.prepared is None or step.over or commit.t != self.version:
            return
        reduced, whole, audited = step.reduced, step.whole, step.audited
        assert reduced is not None and whole is not None
        # From here on nothing may enter the step; its graphs see weights that are about to change.
        step.close(taken=True)
        await step.stopped()

        await self.device.run(Rank.STEP, commit.t, self.compute.apply, commit.t, whole, commit.total_sqnorm)
        self.applied = Applied(commit, reduced, step.prepared, step.shared)
        self.commits = {t: known for t, known in self.commits.items() if t > commit.t - COMMITS_KEPT}
        self.commits[commit.t] = commit
        if audited is not None:
            self.audit = Audit(
                steps=self.audit.steps + 1,
                missing=self.audit.missing + audited.missing,
                duplicated=self.audit.duplicated + audited.duplicated,
                undone=self.undone,
            )
        await self.open_steps()
        self._hashing = asyncio.get_running_loop().create_task(self.refresh_digest())

    async def refresh_digest(self) -> None:
        """Hash the weights when the device has nothing better to do, and tell the coordinator."""
        version = self.version
        digest = await self.device.run(Rank.IDLE, version, self._digest_of, version)
        if digest is not None:
            self._digest = (version, digest)
            self.report_trigger.urgent()

    def _digest_of(self, version: int) -> str | None:
        if self.compute.version != version:
            return None
        return self.compute.state.digest(canonical=realigns(self.run, version))

    async def load(self, position: Position, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the state by one of another member or a checkpoint; whatever was summed here is dropped."""
        version = position.version
        closed = list(self.steps.values())
        for step in closed:
            step.close()
        self.steps.clear()
        for step in closed:
            await step.stopped()
        await self.device.run(Rank.STEP, version, self.compute.load_state, version, tensors)
        self.applied, self.commits, self.generation = None, {}, position.generation
        await self.open_steps()
        await self.refresh_digest()

    def enter(self, generation: Generation) -> None:
        """A later generation that starts at the version that is held: nothing is lost, and nobody goes on
        alone."""
        assert generation > self.generation and generation.start == self.version
        self.generation, self.commits = generation, {}
        self.report_trigger.urgent()
