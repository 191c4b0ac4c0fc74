"""The state of a simulated run: devices, the sums of each stage; and what is assumed and reported of it."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable

import msgspec

from peers.sim.lines import SharedLines
from peers.sim.loop import VirtualLoop
from peers.stage.device import MeanLength
from swarm.ids import Microbatch, PeerId, Stage
from swarm.plan.network import Network, StepWork
from swarm.plan.overlapped import StepTime
from swarm.policy.rebalance import Move
from swarm.protocol.ledger import Ledger, everything

RETRY_S = 0.05
"""From a failed call, or one that a full peer refused, to the next try."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Assumptions about the run and the live system. Defaults are those of the code, or measured."""

    window: int | None = None
    """Microbatches that the trainer keeps in flight; None: it learns how many (`swarm/policy/window.py`)."""
    delayed_updates: bool = False
    rebalance_every_s: float = 60.0
    """0: no peer moves."""
    checkpoint_every: int = 10
    """Steps; where a run goes back to when a stage has lost all its members."""
    detect_s: float = 0.1
    """Until a death is known: connections of a killed process break at once, silence takes 3.5 s."""
    step_s: float = 0.0
    """Seconds at the end of a step besides the all-reduce and the latencies: optimizer, digest."""
    max_inflight: float = math.inf
    """Microbatches that a peer takes at most; fewer if its memory holds fewer."""
    bin_s: float = 60.0
    """The width of a bin of `ThroughputReport.answered`."""


class ThroughputReport(msgspec.Struct):
    """The outcome of a simulated run until `end_s`."""

    microbatches: int
    """M, of a step."""
    stages: int
    end_s: float = 0.0
    version: int = 0
    """Steps that count: those of a run that went back are in only once."""
    step_ends_s: list[float] = []
    """When each version was taken, the last time."""
    bin_s: float = 60.0
    answered: list[int] = []
    """Microbatches answered to trainers, by bin of time."""
    busy_s: list[float] = []
    """Per stage, seconds that devices computed."""
    there_s: list[float] = []
    """Per stage, seconds that devices served it."""
    moves: list[tuple[float, Move]] = []
    """When the rule sent a peer elsewhere, and where."""
    joins: int = 0
    deaths: int = 0
    idle: int = 0
    """Joiners that no stage fits into."""
    replayed: int = 0
    """Microbatches that a trainer ran again because what held them was gone."""
    recomputed: int = 0
    """Microbatches of a stage, computed for nothing: lost with a peer, or by a run that went back."""
    computed: int = 0
    """Microbatches of a stage, all in all: those that count, those of open steps, and `recomputed`."""
    open: int = 0
    """Of `computed`, in sums of steps that were not taken yet."""
    generations: int = 0
    """How often the run went back to a checkpoint."""
    boundary_bytes: float = 0.0
    reduce_bytes: float = 0.0
    download_bytes: float = 0.0
    waited_s: float = 0.0
    """Seconds in which some stage had no peer."""
    empty_s: list[float] = []
    """Per stage, seconds in which it had none."""
    predicted: StepTime | None = None
    """Of a step, if that was asked for."""
    events: int = 0

    @property
    def per_s(self) -> float:
        """Microbatches a second that count, over all of the time."""
        return self.version * self.microbatches / self.end_s if self.end_s else 0.0

    @property
    def utilisation(self) -> list[float]:
        """Per stage: the share of their time that its devices computed."""
        return [b / t if t else 0.0 for b, t in zip(self.busy_s, self.there_s, strict=True)]


class Gone(Exception):
    """A peer is dead or moves away, and its callers have noticed."""


class Peer:
    """A device in one stage, from its arrival there to its end or its move to another stage.

    It does one job at a time, in order of step and arrival.
    """

    def __init__(
        self, loop: VirtualLoop, device: int, name: PeerId, stage: Stage, job_s: tuple[float, float],
        upload_s: float, room: int,
    ) -> None:  # fmt: skip
        """
        Args:
            job_s: forward and backward of a microbatch.
            upload_s: what it sends of one.
            room: microbatches in its memory; more wait.
        """
        self._loop = loop
        self.device, self.name, self.stage, self.job_s, self.room = device, name, stage, job_s, room
        self.work_s = max(sum(job_s), upload_s)
        """As `Hop.work_s`."""
        self.since_s = self.served_from_s = loop.now_s
        self.alive, self.serving, self.spare = True, False, False
        self.ended_s = 0.0
        self.draining_to: Stage | None = None
        """It gets no new microbatch, and moves to that stage when it has finished those that it has."""
        self.flights = 0
        """Microbatches that it has, and that are not yet in its sum."""
        self.ledgers: dict[int, Ledger] = {}
        self.busy_s = 0.0
        self.computed = self._held = 0
        self._running: asyncio.Future[None] | None = None
        self._order = itertools.count()
        self._jobs: list[tuple[int, int, asyncio.Future[None], float]] = []
        """(step, number, done, seconds) of those that wait."""
        self._length = MeanLength()
        self._freed = asyncio.Event()

    def ledger(self, t: int, microbatches: int) -> Ledger:
        if t not in self.ledgers:
            self.ledgers[t] = Ledger(t, microbatches)
        return self.ledgers[t]

    def done(self, t: int) -> int:
        """The microbatches of step `t` in its sum."""
        return self.ledgers[t].done if t in self.ledgers else 0

    def mean_load(self) -> float:
        """Microbatches that waited or were computed, on average since this was last asked."""
        return self._length.ask(self._queued)

    @property
    def _queued(self) -> int:
        return len(self._jobs) + (self._running is not None)

    async def take_room(self, trip_s: float) -> None:
        """Have a caller, a round trip of so many seconds away, ask until another microbatch fits in."""
        began_s, every_s = self._loop.now_s, trip_s + RETRY_S
        while self._held >= self.room:
            await self._freed.wait()
            waited_s = self._loop.now_s - began_s
            await asyncio.sleep(math.ceil(waited_s / every_s) * every_s - waited_s)
            if not self.alive:
                raise Gone
        self._held += 1

    def give_room(self) -> None:
        """A microbatch left the memory."""
        self._held -= 1
        self._freed.set()  # whose turn it is to ask does
        self._freed.clear()

    def compute(self, t: int, lasts_s: float) -> asyncio.Future[None]:
        """Have the device work so long for a microbatch of step `t`; done when it has."""
        self._length.count(self._queued)
        done = self._loop.create_future()
        heapq.heappush(self._jobs, (t, next(self._order), done, lasts_s))
        if self._running is None:
            self._next()
        return done

    def _next(self) -> None:
        self._length.count(self._queued)
        self._running = None
        while self._jobs:
            *_, done, lasts_s = heapq.heappop(self._jobs)
            if not done.done():
                self._running = done
                self._loop.call_later(lasts_s, self._worked, done, lasts_s)
                return

    def _worked(self, done: asyncio.Future[None], lasts_s: float) -> None:
        if self.alive:
            self.busy_s += lasts_s
            if not done.done():
                done.set_result(None)
            self._next()

    def fail_all(self) -> None:
        """Let its callers know that it is gone."""
        self._freed.set()
        for future in (*(done for _, _, done, _ in self._jobs), self._running):
            if future is not None and not future.done():
                future.set_exception(Gone())


class World:
    """One run: its peers, its version, and the microbatches in the sums of its open steps."""

    def __init__(
        self, loop: VirtualLoop, network: Network, job: StepWork, settings: Settings, seed: int
    ) -> None:
        self.network, self.job, self.settings, self.seed = network, job, settings, seed
        self.packed = job.packed or job
        self.loop, self.lines = loop, SharedLines(network)
        self.report = ThroughputReport(
            job.microbatches, job.stages, busy_s=[0.0] * job.stages, there_s=[0.0] * job.stages,
            empty_s=[0.0] * job.stages, bin_s=settings.bin_s,
        )  # fmt: skip
        self.version = 0
        self.peers: dict[PeerId, Peer] = {}
        """Those that join, serve or drain."""
        self.stages: list[dict[PeerId, Peer]] = [{} for _ in range(job.stages)]
        """Those that are known to serve: with dead ones that are not known to be dead yet."""
        self.empty: dict[Stage, float] = dict.fromkeys(range(job.stages), 0.0)
        """Stages without a peer, and since when. While there is one, the run stands still."""
        self._still_since_s = 0.0
        self.covered: dict[int, list[int]] = {}
        """Step -> per stage, the microbatches that are in some sum."""
        self.damaged: set[int] = set()
        """Open steps of which some sum was lost."""
        self.on_step: Callable[[], None]
        """Called when a step was taken."""
        self.stepped = asyncio.Event()
        self.on_released: Callable[[Peer], None]
        """Called when a draining peer has one microbatch less."""
        self._every = everything(job.microbatches)
        self._reducing: dict[Stage, asyncio.TimerHandle] = {}
        self._prepared: set[Stage] = set()
        self._committing: asyncio.TimerHandle | None = None

    def serving(self, stage: Stage) -> list[Peer]:
        return [peer for peer in self.stages[stage].values() if peer.serving]

    def emptied(self, stage: Stage) -> None:
        """Note that the last peer of a stage is gone."""
        if not self.empty:
            self._still_since_s = self.loop.now_s
        self.empty.setdefault(stage, self.loop.now_s)

    def filled(self, stage: Stage) -> None:
        """Note that a stage has a peer, or that the run ends."""
        if stage in self.empty:
            self.report.empty_s[stage] += self.loop.now_s - self.empty.pop(stage)
            if not self.empty:
                self.report.waited_s += self.loop.now_s - self._still_since_s

    # -- sums -------------------------------------------------------------------------------------

    @property
    def open(self) -> int:
        """Microbatches in sums of steps that were not taken yet, counted by stage."""
        return sum(bitmap.bit_count() for covered in self.covered.values() for bitmap in covered)

    def has(self, t: int, stage: Stage, m: int) -> bool:
        """Whether a microbatch is in some sum of the stage, or its step is over."""
        if t < self.version:
            return True
        return bool(self.covered.setdefault(t, [0] * self.job.stages)[stage] >> m & 1)

    def record(self, peer: Peer, t: int, m: int) -> None:
        """Add a microbatch to the sum of a peer; with the last one of a stage begins its reduce."""
        stage, covered = peer.stage, self.covered[t]
        self.report.computed += 1
        peer.ledgers[t].record(m)
        assert not covered[stage] >> m & 1, f"{Microbatch(t, m)} counts twice in stage {stage}"
        covered[stage] |= 1 << m
        self.reduce_if_complete(stage)

    def lacking(self, t: int) -> list[int]:
        """Per stage, the microbatches that are in no sum."""
        return [self._every & ~bitmap for bitmap in self.covered[t]]

    # -- the end of a step ------------------------------------------------------------------------

    def reduce_if_complete(self, stage: Stage) -> None:
        """Begin a round if all microbatches of the open step are in the stage's sums."""
        t = self.version
        if t not in self.covered or self.covered[t][stage] != self._every:
            return
        if stage in self._reducing or stage in self._prepared:
            return
        union, there = 0, [p for p in self.peers.values() if p.stage == stage and p.serving]
        for peer in there:
            assert not union & peer.done(t), f"a microbatch of step {t} counts twice in stage {stage}"
            union |= peer.done(t)
        assert union == self._every, f"step {t} lacks a microbatch in stage {stage}"
        size_bytes = self.job.gradient_bytes[stage]
        self.report.reduce_bytes += 2 * (len(there) - 1) * size_bytes
        reduce_s = self.lines.reduce_s(
            [peer.device for peer in there], size_bytes, self.packed.gradient_bytes[stage]
        )
        self._reducing[stage] = self.loop.call_later(reduce_s, self._reduced, stage)

    def _reduced(self, stage: Stage) -> None:
        del self._reducing[stage]
        self._prepared.add(stage)
        if len(self._prepared) == self.job.stages and not self.empty:
            # Stage coordinators report to the run coordinator and get its directive.
            heads = [min(self.serving(s), key=lambda p: p.name).device for s in range(self.job.stages)]
            trip_s = 2 * max(self.lines.latency_s(heads[0], head) for head in heads)
            self._committing = self.loop.call_later(trip_s + self.settings.step_s, self._commit)

    def _commit(self) -> None:
        t, self._committing = self.version, None
        self.version += 1
        self.report.step_ends_s.append(self.loop.now_s)
        self._prepared.clear()
        self.covered.pop(t, None)
        self.damaged.discard(t)
        for peer in self.peers.values():
            peer.ledgers.pop(t, None)
        for stage in range(self.job.stages):
            self.reduce_if_complete(stage)
        self.stepped.set()
        self.on_step()

    # -- lost sums --------------------------------------------------------------------------------

    def lose(self, peer: Peer) -> None:
        """Remove the sums of a peer that died or left."""
        stage, t = peer.stage, self.version
        if stage in self._prepared and not self.serving(stage):
            # Only peers that are gone had the result, with the parts of those that died before.
            self._prepared.discard(stage)
            if self._committing is not None:
                self._committing.cancel()
            covered = self.covered[t]
            self.report.recomputed += (covered[stage] & ~peer.done(t)).bit_count()
            covered[stage] &= peer.done(t)
        for step, ledger in peer.ledgers.items():
            # In a prepared stage all replicas hold the complete result: nothing is lost with one of them.
            if ledger.done and not (step == t and stage in self._prepared):
                self.covered[step][stage] &= ~ledger.done
                self.damaged.add(step)
                self.report.recomputed += ledger.done.bit_count()
        if stage in self._reducing:
            self._reducing.pop(stage).cancel()
            self.reduce_if_complete(stage)

    def drop(self) -> None:
        """Forget all open steps: the run goes back to a checkpoint."""
        self.report.recomputed += self.open
        for peer in self.peers.values():
            peer.ledgers.clear()
        for due in (*self._reducing.values(), self._committing):
            if due is not None:
                due.cancel()
        for kept in (self.covered, self.damaged, self._reducing, self._prepared):
            kept.clear()
