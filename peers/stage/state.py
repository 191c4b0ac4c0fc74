"""What the parts of a stage peer share: its state, which is weights, sums and open steps; and the others."""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

import torch

from peers.audit.trail import OwnTrail
from peers.clock import now_s
from peers.events import Emit, Undone
from peers.ports import Directory, Rank, StageDevice, Transport
from peers.stage.open_step import OpenStep
from peers.status_query import ask_status
from peers.voices import Membership, Voices
from peers.waiting import TaskKeeper, happens, pulse
from swarm.errors import Leaving, NotReady, PeerFault, SetupError, Stale, SwarmError
from swarm.ids import Generation, Microbatch, PeerId, Position, Stage
from swarm.manifest import Run
from swarm.model.gradient_sum import SumLost
from swarm.model.stage import StageCompute
from swarm.policy.backoff import Backoff
from swarm.protocol.coordinator import realigns
from swarm.protocol.ledger import Ledger, members_of
from swarm.protocol.replica import COMMITS_KEPT
from swarm.protocol.rounds import Commit
from swarm.protocol.voice import LastContributions, heard
from swarm.records import PeerRecord
from swarm.wire.messages import LedgerCounts, PeerStatus

AUDITS_S = 1.0
"""How long a step is not taken while an answer of it is computed again."""

Life: TypeAlias = Literal["joining", "serving", "leaving", "left"]
TIMES_KEPT = 512
"""Of steps: a peer looks at them every few seconds."""
MAX_ASKED, MAX_REPLICAS_ASKED = 16, 12
"""Peers that are asked for their status at once, and how many of them are replicas of this stage."""


class ReportTrigger:
    """Says when to report: at once if a step waits for it, else gathered."""

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
        self, run: Run, stage: Stage, compute: StageCompute, transport: Transport, directory: Directory,
        backoff: Backoff, emit: Emit, *, device: StageDevice,
    ) -> None:  # fmt: skip
        self.run, self.stage, self.compute, self.emit = run, stage, compute, emit
        self.me: PeerId = transport.peer_id
        self.transport, self.directory, self.backoff = transport, directory, backoff
        self.membership = Membership(directory)
        self.voices = Voices(run, transport.signer, directory, lambda: self.version)
        self.kind = ""
        """What a made-up microbatch gives here: devices of one kind compute the same bits."""
        self.device = device
        self.convicted: set[PeerId] = set()
        """Peers of whose work nothing enters a sum any more."""
        self.generation = Generation()
        self.steps: dict[int, OpenStep] = {}
        self.commits: dict[int, Commit] = {}
        """Of the last steps that were taken, by step."""
        self.applied: OpenStep | None = None
        """The last step that was taken, kept for replicas that missed it."""
        self.met: OpenStep | None = None
        """The last meeting that this replica was at, kept for islands that come to it later."""
        self._digest = (-1, "")
        self.trail = OwnTrail()
        self.contributed = LastContributions()
        self.ledger_counts = LedgerCounts()
        self.undone = 0
        self.computed = 0
        self.report_trigger = ReportTrigger()
        self._moved = asyncio.Event()
        self._hashing: asyncio.Task[None] | None = None
        self._loading = asyncio.Lock()
        self.joined = False
        """Serving: the weights are the stage's."""
        self.leaving = False
        """Nothing more is admitted, and another replica coordinates, if there is one."""
        self.life: Life = "joining"
        self.changing = False
        """A task takes a step or changes the whole state; no other does meanwhile."""
        self.audits = TaskKeeper(lambda error: None)
        """Jobs that compute answers of others again, with the weights that are there now."""
        self.taken_at: deque[tuple[int, float]] = deque(maxlen=TIMES_KEPT)
        """Of the last steps the versions that they made, and when."""
        self.opened: Callable[[OpenStep], None] = lambda step: None
        """Told of each step that opens."""
        self.stepped = asyncio.Event()
        """Set after each step that is taken."""

    def voice(self) -> Mapping[PeerId, int]:
        """How much the word of each replica counts."""
        return self.voices.of(self.stage)

    # -- which others to ask ----------------------------------------------------------------------

    def others_to_ask(self, stage: Stage, directory: Directory, voices: Voices) -> list[PeerId]:
        """Other peers of a stage, with voice if any has it, for each asking peer in another order."""
        now, me = now_s(), self.me
        found = [r.peer for r in directory.at(stage) if r.state in ("serving", "leaving") and r.peer != me]
        awake = [peer for peer in found if not self.backoff.in_backoff(peer, now=now)]
        return sorted(heard(awake, voices.of(stage)), key=lambda peer: zlib.crc32(f"{me} {peer}".encode()))

    def replicas(self) -> list[PeerRecord]:
        """The records of the others that serve this stage. They outlive their peers: what counts is asked."""
        return [r for r in self.directory.at(self.stage) if r.state == "serving" and r.peer != self.me]

    async def ask(self, records: Sequence[PeerRecord]) -> dict[PeerId, PeerStatus]:
        """What those peers say of themselves; of very many, the replicas and the furthest, voices first."""
        voice = self.voices.of_all()
        order = sorted(records, key=lambda r: (r.peer not in voice, -r.version, r.peer))
        asked = [r.peer for r in order if r.stage == self.stage][:MAX_REPLICAS_ASKED]
        asked += [r.peer for r in order if r.stage != self.stage]
        return await ask_status(self.run, self.transport, asked[:MAX_ASKED])

    async def keep_stage(self, *, going: Collection[PeerId] = (), least: int = 1) -> bool:
        """Whether at `least` so many replicas that stay have the weights of this stage (I6), by the word of
        those with voice, where any has it, this peer included. `going`: those that leave too.
        """
        voice, staying = self.voice(), [one for one in self.replicas() if one.peer not in going]
        told = await self.ask([one for one in staying if one.peer in voice or not voice])
        serving = [s for s in told.values() if (s.state, s.generation) == ("serving", self.generation)]
        return sum(status.version >= self.version - 1 for status in serving) >= least

    def failed(self, fault: PeerFault) -> None:
        """Leave a peer alone for a while."""
        self.backoff.failed(fault.peer, now=now_s(), silent=fault.silent)

    @property
    def version(self) -> int:
        """Newest weight version held."""
        return self.compute.version

    @property
    def position(self) -> Position:
        return Position(self.generation, self.version)

    @property
    def busy(self) -> bool:
        """Whether no directive is followed now: one that joins downloads as well, into the same memory."""
        return self.changing or not self.joined

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
        """Close all steps: nothing changes a sum any more. The device ends after its running job."""
        for step in self.steps.values():
            step.close()
        if self._hashing is not None:
            self._hashing.cancel()
        self.device.stop()

    def free(self) -> None:
        """After `close`: free all memory of the device."""
        self.steps.clear()
        self.applied = None
        self.opened = lambda step: None
        self.compute.free()

    def remember(self, commit: Commit | None) -> None:
        """Keep the commit of the step before the state that was loaded: replicas may still wait for it."""
        if commit is not None:
            self.commits[commit.t] = commit

    async def open_steps(self, before: Iterable[OpenStep] = ()) -> None:
        """Close the steps that are over, open those that this version may work on. `before`: were open."""
        for t in [t for t in self.steps if t < self.version]:
            self.steps.pop(t).close()
        for t in range(self.version, self.newest_step() + 1):
            if t not in self.steps:
                ledger = Ledger(t, self.run.microbatches(t), self.device.books.check)
                step = self.steps[t] = OpenStep(t, ledger)  # before its sum: no other task opens it meanwhile
                step.answers_for(next((one for one in before if one.t == t), step))
                await self._overwrite(t, self.compute.sums.begin, t)
                self.opened(step)
        self.report_trigger.urgent()
        pulse(self._moved)

    async def begin_again(self, step: OpenStep) -> None:
        """Drop a step's result and sum, and open it anew. Only while nothing else opens steps: `changing`."""
        del self.steps[step.t]
        step.close()
        await step.stopped()
        await self.device.run(Rank.STEP, step.t, self.compute.sums.drop, step.t)
        await self.open_steps([step])

    async def retract(self, step: OpenStep, microbatches: int, *, later: bool = False) -> None:
        """Take microbatches out of the sum: run their backward again and subtract. `later`: they are false;
        out of a frozen sum once it is open again, and with all of it if that breaks.
        """

        def subtract() -> int:
            if step.over or step.ledger.frozen_for is not None:
                step.false |= microbatches if later else 0
                return 0
            present = [*members_of(microbatches & step.ledger.done)]
            for m in present:
                kept = step.kept[m]
                try:
                    self.compute.subtract(Microbatch(step.t, m), kept.inputs, kept.grads_out)
                except Exception as error:
                    if later or isinstance(error, SumLost):  # it would not be told again to take that out
                        self.compute.sums.of(step.t).zero_()
                        step.drop()
                    raise
                step.ledger.remove(m)
                step.put_by(step.kept.pop(m))
            return len(present)

        if count := await self.device.run(Rank.STEP, step.t, subtract):
            self.undone += count
            self.emit(Undone(stage=self.stage, t=step.t, count=count))

    async def forget_work_of(self, peer: PeerId) -> None:
        """Take out of the open sums what a peer, which lied, sent inputs or computed gradients for."""
        steps = [*self.steps.values()]
        for step in steps:
            step.doubted = True
        false = [(step, await self.device.run(Rank.STEP, step.t, step.work_of, peer)) for step in steps]
        await asyncio.gather(*(self.retract(step, m, later=True) for step, m in false if m))

    def leave(self) -> None:
        """End all waits for a step: none opens any more."""
        self.leaving = True
        pulse(self._moved)

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
            if (left := until - now_s()) <= 0:
                text = f"step {t} is not open; stage {self.stage} is at version {self.version}"
                raise NotReady(text, version=self.version)
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
        assert step.whole is not None
        # From here on nothing may enter the step; its graphs see weights that are about to change.
        step.close(taken=True)
        await step.stopped()
        await self.audits.ended(AUDITS_S)
        self.met = step if self.run.meets_at(commit.t) else self.met  # a pause may end this task
        await self._overwrite(commit.t, self.compute.apply, commit.t, step.whole, commit.total_sqnorm)
        self.taken_at.append((self.version, now_s()))
        self.trail.took(commit.t, step.prepared.digest, commit.total_sqnorm)
        self.applied = step
        step.keep_result(commit)
        self.commits = {t: known for t, known in self.commits.items() if t > commit.t - COMMITS_KEPT}
        self.commits[commit.t] = commit
        if step.counts is not None:
            self.ledger_counts = LedgerCounts(
                steps=self.ledger_counts.steps + 1, missing=self.ledger_counts.missing + step.counts.missing,
                duplicated=self.ledger_counts.duplicated + step.counts.duplicated, undone=self.undone,
            )  # fmt: skip
        await self.open_steps()
        self._hashing = asyncio.get_running_loop().create_task(self.refresh_digest())

    async def _overwrite(self, t: int, job: Callable[..., None], *args: object) -> None:
        """Have the device change the weights in place, or begin a sum. Raises SetupError: that broke. What is
        left is of no version, or nothing is added to it: no peer gets it, no pause keeps it, this peer ends.
        """
        try:
            await self.device.run(Rank.STEP, t, job, *args)
        except Exception as error:
            if isinstance(error, SwarmError) or not self.joined:
                raise  # nothing was changed, or no other has it yet
            self.joined, self.device.failure = False, error
            raise SetupError(f"the weights of stage {self.stage} are lost here: {error}") from error

    async def refresh_digest(self) -> None:
        """Hash the weights when the device has nothing better to do, and tell the coordinator."""
        version = self.version
        if (digest := await self.device.run(Rank.IDLE, version, self._digest_of, version)) is not None:
            self._digest = (version, digest)
            self.trail.weighs(version, digest)
            self.report_trigger.urgent()

    def _digest_of(self, version: int) -> str | None:
        if self.compute.version != version:
            return None
        return self.compute.state.digest(whole=realigns(self.run, version))

    async def load(self, position: Position, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the state by a replica's or a checkpoint's; all sums here are dropped.

        One at a time: what one has opened is not to lose its sum by the other.
        """
        async with self._loading:
            version, closed = position.version, list(self.steps.values())
            for step in closed:
                step.close()
            self.steps.clear()
            for step in closed:
                await step.stopped()
            try:
                await self._overwrite(version, self.compute.load_state, version, tensors)
            except SwarmError:
                if self.joined:  # it stays where it was, and begins its steps again
                    await self.device.run(Rank.STEP, version, self.compute.sums.free)
                    await self.open_steps(closed)
                raise
            self.applied, self.commits, self.generation = None, {}, position.generation
            self.trail.begin(version)
            self.taken_at.clear()
            await self.open_steps(closed)
            await self.refresh_digest()

    def enter(self, generation: Generation) -> None:
        """Be in another generation; the version that is held is the same state in each."""
        self.generation, self.commits = generation, {}
        self.report_trigger.urgent()
