"""Trainers: the microbatches that they start, on which routes, and which they run again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from peers.sim.throughput.pipeline import Pipeline
from peers.sim.throughput.steps import Steps
from peers.sim.throughput.world import Flight, Gone, Peer, Trainer, World
from swarm.ids import Stage
from swarm.policy.router import NoPeerForStage
from swarm.policy.window import Window
from swarm.protocol.worklist import Work, WorkList
from swarm.sim.dice import Dice

RETRY_S = 0.05
"""From a failed call to the next try."""


class Trainers:
    """All trainers of a run, with the live `Router`, `Window` and `WorkList`."""

    def __init__(self, world: World, steps: Steps, pipeline: Pipeline) -> None:
        self._world, self._steps, self._pipeline = world, steps, pipeline
        self._loop, self._settings, self._job = world.loop, world.settings, world.job
        count, window = self._settings.trainers, self._settings.window
        self._work = WorkList(self._order, self._job.microbatches)
        self._trainers = [
            Trainer(
                device=i * len(world.network) // count,
                window=Window(
                    start=window or 2 * self._job.stages, largest=window or 1024, fixed=bool(window)
                ),
            )
            for i in range(count)
        ]
        self._journeys: set[asyncio.Task[None]] = set()
        self._reporting: asyncio.Task[None] | None = None
        self._wakeup: asyncio.TimerHandle | None = None
        self._stepped_s = 0.0
        steps.on_step = self._stepped

    @property
    def replayed(self) -> int:
        """Microbatches that were run again."""
        return self._work.replayed

    # -- starts -----------------------------------------------------------------------------------

    def start_all(self) -> None:
        """Start as many microbatches as the windows hold."""
        for trainer in self._trainers:
            self._start(trainer)

    def _start(self, trainer: Trainer) -> None:
        now_s, newest = self._loop.now_s, self._world.version + self._settings.delayed_updates
        while self._world.empty_since_s is None and trainer.running < trainer.window.size:
            work = self._work.next(newest, now=now_s)
            if work is None:
                self._wake_when_due()
                return
            if not self._launch(trainer, work):
                return

    def _wake_when_due(self) -> None:
        due_s = self._work.next_wakeup(now=self._loop.now_s)
        if self._wakeup is not None:
            self._wakeup.cancel()
            self._wakeup = None
        if due_s is not None:
            self._wakeup = self._loop.call_at(max(due_s, self._loop.now_s + 0.001), self.start_all)

    def _launch(self, trainer: Trainer, work: Work) -> bool:
        """Send a microbatch on its way; False if some stage cannot be reached."""
        t, m = work.microbatch
        hops = self._route(trainer, t, m)
        if not hops:
            self._work.failed(work.microbatch)
            return False
        trainer.running += 1
        self._world.in_flight[t] = self._world.in_flight.get(t, 0) | 1 << m
        journey = self._loop.create_task(self._journey(Flight(trainer, work, hops)))
        self._journeys.add(journey)
        journey.add_done_callback(partial(self._ended, trainer))
        return True

    def _ended(self, trainer: Trainer, journey: asyncio.Task[None]) -> None:
        self._journeys.discard(journey)
        if not journey.cancelled():
            journey.result()  # a bug is told
        trainer.running -= 1
        self._start(trainer)

    def _route(self, trainer: Trainer, t: int, m: int) -> list[Peer]:
        """A peer of each stage: one that holds the microbatch, or the router's; none if a stage has none."""
        horizon_s = trainer.pace.horizon_s(
            self._work.unstarted(t) + (self._job.microbatches if self._settings.delayed_updates else 0)
        )
        hops: list[Peer] = []
        for stage, there in enumerate(self._world.stages):
            if self._steps.has(t, stage, m):
                hops.append(self._holder(t, m, stage))
                continue
            latency_s = None
            if self._settings.routers_learn == "latency" and hops:
                latency_s = partial(trainer.link_latency.expected_s, hops[-1].name)
            try:
                route = trainer.router.route(
                    stage, now=self._loop.now_s, horizon_s=horizon_s, latency_s=latency_s
                )
            except NoPeerForStage:
                return []
            hops.append(there[route.peer])
        return hops

    def _holder(self, t: int, m: int, stage: Stage) -> Peer:
        there = self._world.serving(stage)
        # If its stage is prepared, all replicas hold the result, and the tensors were passed on.
        return next((peer for peer in there if peer.done(t) >> m & 1), there[0])

    def _order(self, t: int) -> Sequence[int]:
        return Dice(self._world.seed * 1_000_003 + t).shuffled(range(self._job.microbatches))

    # -- the way of a microbatch --------------------------------------------------------------------

    async def _journey(self, flight: Flight) -> None:
        trainer, first = flight.trainer, flight.hops[0]
        latency_s = self._world.lines.latency_s(trainer.device, first.device)
        try:
            # The first requests of a step were sent ahead, and wait where they are needed.
            if latency_s and self._loop.now_s > self._stepped_s:
                await asyncio.sleep(latency_s)
            await self._pipeline.visit(flight, 0)
            self._land(flight)
            if latency_s:
                await asyncio.sleep(latency_s)
        except (Gone, NoPeerForStage):
            self._land(flight)
            self._work.failed(flight.microbatch)
            await asyncio.sleep(RETRY_S)
            self.report_soon()
        else:
            self._answered(flight)

    def _land(self, flight: Flight) -> None:
        if flight.t in self._world.in_flight:
            self._world.in_flight[flight.t] &= ~(1 << flight.m)

    def _answered(self, flight: Flight) -> None:
        trainer, now_s, report = flight.trainer, self._loop.now_s, self._world.report
        self._work.finished(flight.microbatch, now=now_s)
        trainer.window.answered(now=now_s)
        trainer.pace.answered(now=now_s)
        trainer.shared += flight.t == self._world.version
        for (here, there), latency_s in zip(pairwise(flight.hops), flight.latency_s, strict=False):
            if latency_s > 0.0:
                trainer.link_latency.took(here.name, there.name, latency_s)
        learns = self._settings.routers_learn
        for hop, own_s in zip(flight.hops, flight.own_s, strict=True):
            if own_s > 0.0:
                trainer.router.answered(
                    hop.stage, hop.name, own_s if learns == "response" else sum(hop.job_s)
                )
        number = int(now_s / self._settings.bin_s)
        report.answered += [0] * (number + 1 - len(report.answered))
        report.answered[number] += 1

    # -- the run ----------------------------------------------------------------------------------

    def report_soon(self) -> None:
        """Have reports tell what is lacking, until nothing is."""
        if self._reporting is None or self._reporting.done():
            self._reporting = self._loop.create_task(self._report())

    async def _report(self) -> None:
        again = True
        while again:
            await asyncio.sleep(self._settings.report_s)
            for t in self._steps.damaged:
                in_flight = self._world.in_flight.get(t, 0)
                lacking = [bitmap & ~in_flight for bitmap in self._steps.lacking(t)]
                self._work.lacking(t, lacking, now=self._loop.now_s)
            self.start_all()
            again = bool(self._steps.damaged)

    def set_peers(self, stage: Stage) -> None:
        """Tell all trainers the peers that serve a stage now."""
        names = list(self._world.stages[stage])
        room = sum(peer.room for peer in self._world.stages[0].values())
        for trainer in self._trainers:
            trainer.router.set_peers(stage, names)
            if self._settings.window is None and room:
                trainer.window.set_largest(room)

    def _stepped(self, t: int) -> None:
        self._world.in_flight.pop(t, None)
        self._work.stepped(self._world.version)
        for trainer in self._trainers:
            trainer.window.paused()
            trainer.pace.stepped(trainer.shared / self._job.microbatches)
            trainer.shared = 0
        self._stepped_s = self._loop.now_s
        self.start_all()

    def went_back(self, version: int) -> None:
        """Give up all that is in flight, and forget later steps: the run goes on from `version`."""
        for journey in self._journeys:
            journey.cancel()
        self._world.in_flight.clear()
        self._work.went_back(version)
