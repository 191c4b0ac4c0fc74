"""The state of a simulated run: devices that compute one job at a time, microbatches in flight, trainers."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from peers.sim.lines import SharedLines
from peers.sim.loop import VirtualLoop
from peers.sim.throughput.report import Settings, ThroughputReport
from peers.stage.device import MeanLength
from swarm.ids import Microbatch, PeerId, Stage
from swarm.plan.network import Job, Network
from swarm.policy.link_latency import LinkLatency
from swarm.policy.router import Pace, Router
from swarm.policy.window import Window
from swarm.protocol.ledger import Ledger
from swarm.protocol.worklist import Work
from swarm.sim.dice import Dice


class Gone(Exception):
    """A peer is dead or moves away, and its callers have noticed."""


class Peer:
    """A device in one stage, from its arrival there to its end or its move to another stage.

    It does one job at a time, backwards first: they end something, and free memory.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        device: int,
        name: PeerId,
        stage: Stage,
        job_s: tuple[float, float],
        room: int,
        *,
        blocking: bool = False,
    ) -> None:
        """`job_s`: forward and backward of a microbatch. `room`: microbatches in its memory; more wait."""
        self._loop, self._blocking = loop, blocking
        self.device, self.name, self.stage, self.job_s, self.room = device, name, stage, job_s, room
        self.since_s = self.served_from_s = loop.now_s
        self.alive, self.serving = True, False
        self.ended_s = 0.0
        """When it died."""
        self.draining_to: Stage | None = None
        """It gets no new microbatch, and moves to that stage when it has finished those that it has."""
        self.flights = 0
        """Microbatches that it has, and that are not yet in its sum."""
        self.ledgers: dict[int, Ledger] = {}
        self.busy_s = 0.0
        self.computed = 0
        self.sends_until_s = 0.0
        """When all that it sent has arrived."""
        self._held = 0
        self._running: asyncio.Future[None] | None = None
        self._backwards = deque[tuple[asyncio.Future[None], float]]()
        self._forwards = deque[tuple[asyncio.Future[None], float]]()
        self._waiting = deque[asyncio.Future[None]]()
        self._length = MeanLength()

    def ledger(self, t: int, microbatches: int) -> Ledger:
        """Its ledger of step `t`."""
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
        busy = self._running is not None
        return len(self._backwards) + len(self._forwards) + len(self._waiting) + busy

    async def take_room(self) -> None:
        """Wait until another microbatch fits into the memory."""
        if self._held < self.room:
            self._held += 1
            return
        self._length.count(self._queued)
        place = self._loop.create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():
                self.give_room()  # it had got it
            raise

    def give_room(self) -> None:
        """A microbatch left the memory."""
        while self._waiting:
            self._length.count(self._queued)
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                return
        self._held -= 1

    def compute(self, lasts_s: float, *, back: bool = False) -> asyncio.Future[None]:
        """Have the device work so long for a microbatch; done when it has."""
        self._length.count(self._queued)
        done = self._loop.create_future()
        (self._backwards if back else self._forwards).append((done, lasts_s))
        if self._running is None:
            self._next()
        return done

    def _next(self) -> None:
        if self._blocking and self._loop.now_s < self.sends_until_s:
            self._loop.call_at(self.sends_until_s, self._next)
            return
        if self._running is not None:
            self._length.count(self._queued)
            self._running = None
        while queue := self._backwards or self._forwards:
            done, lasts_s = queue.popleft()
            if not done.done():
                self._running = done
                self._loop.call_later(lasts_s, self._worked, done, lasts_s)
                return

    def _worked(self, done: asyncio.Future[None], lasts_s: float) -> None:
        if not self.alive:
            return
        self.busy_s += lasts_s
        if not done.done():
            done.set_result(None)
        if self._blocking:
            self._loop.call_soon(self._next)  # when it has sent what it computed
        else:
            self._next()

    def fail_all(self) -> None:
        """Let its callers know that it is gone."""
        jobs = [done for done, _ in (*self._backwards, *self._forwards)]
        for future in (*jobs, *self._waiting, self._running):
            if future is not None and not future.done():
                future.set_exception(Gone())


class Flight:
    """A microbatch in flight: forward through a peer of each stage, and back."""

    __slots__ = ("deepest", "hops", "latency_s", "m", "microbatch", "own_s", "t", "trainer")

    def __init__(self, trainer: Trainer, work: Work, hops: list[Peer]) -> None:
        self.trainer, self.hops, self.deepest = trainer, hops, work.deepest
        self.microbatch: Microbatch = work.microbatch
        self.t, self.m = work.microbatch
        self.latency_s = [0.0] * len(hops)
        """Per stage, on the link to the next one and back."""
        self.own_s = [0.0] * len(hops)
        """Per stage, its time there without the stages behind it."""


@dataclass(slots=True, eq=False)
class Trainer:
    """A trainer with the live policies. All share the work list, as if claims were known to all at once."""

    device: int
    """The device that it is next to."""
    window: Window
    router: Router = field(default_factory=Router)
    link_latency: LinkLatency = field(default_factory=LinkLatency)
    pace: Pace = field(default_factory=Pace)
    running: int = 0
    shared: int = 0
    """Microbatches of the open step that it ran."""


class World:
    """The state of one run that all parts of the simulation share."""

    def __init__(self, loop: VirtualLoop, network: Network, job: Job, settings: Settings, seed: int) -> None:
        self.network, self.job, self.settings, self.seed = network, job, settings, seed
        self.loop, self.lines, self.dice = loop, SharedLines(network), Dice(seed)
        self.report = ThroughputReport(
            job.microbatches, job.stages, busy_s=[0.0] * job.stages, there_s=[0.0] * job.stages,
            bin_s=settings.bin_s,
        )  # fmt: skip
        self.version = 0
        self.peers: dict[PeerId, Peer] = {}
        """Those that join, serve or drain."""
        self.stages: list[dict[PeerId, Peer]] = [{} for _ in range(job.stages)]
        """Those that are known to serve: with the dead ones of whom nobody has heard yet."""
        self.empty_since_s: float | None = 0.0
        """Since when some stage has no peer."""
        self.in_flight: dict[int, int] = {}
        """Step -> microbatches in flight, as bits."""

    def serving(self, stage: Stage) -> list[Peer]:
        """The living peers of a stage."""
        return [peer for peer in self.stages[stage].values() if peer.serving]
