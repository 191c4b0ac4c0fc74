"""Trainers: the microbatches that they start, on which routes, and which they run again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from swarm.ids import PeerId, Stage
from swarm.policy.router import NoPeerForStage
from swarm.policy.window import Window
from swarm.protocol.worklist import Work, WorkList
from swarm.sim.dice import Dice
from swarm.sim.pipeline import Pipeline
from swarm.sim.steps import Steps
from swarm.sim.world import Flight, Peer, Trainer, World

RETRY_S = 0.05
"""From a failed call to the next try."""


class Trainers:
    """All trainers of a run, with the live `Router`, `Window` and `WorkList`."""

    def __init__(self, world: World, steps: Steps, pipeline: Pipeline) -> None:
        self._world, self._steps, self._pipeline = world, steps, pipeline
        self._clock, self._settings, self._job = world.clock, world.settings, world.job
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
        self.on_unreachable: Callable[[Peer], None]
        """Called when a peer was routed to that is gone, `detect_s` later."""
        self._report_is_due = False
        self._wakeup_s = math.inf
        self._stepped_s = 0.0
        steps.on_step, pipeline.on_answer, pipeline.on_failure = self._stepped, self._answered, self._failed

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
        if self._world.empty_since_s is not None:
            return
        now_s = self._clock.now
        newest = self._world.version + self._settings.delayed_updates
        while trainer.running < trainer.window.size:
            item = self._work.next(newest, now=now_s)
            if item is None:
                due_s = self._work.next_wakeup(now=now_s)
                if due_s is not None and not now_s < self._wakeup_s <= due_s:
                    self._wakeup_s = max(due_s, now_s + 0.001)
                    self._clock.after(self._wakeup_s - now_s, self.wake, None)
                return
            if not self._launch(trainer, item):
                return

    def wake(self, _: None) -> None:
        """Look for work again, at the time that the work list gave."""
        self._wakeup_s = math.inf
        self.start_all()

    def _launch(self, trainer: Trainer, item: Work) -> bool:
        """Send a microbatch on its way; False if some stage cannot be reached."""
        now_s, (t, m), world = self._clock.now, item.microbatch, self._world
        held = [bool(bitmap >> m & 1) for bitmap in self._steps.cover(t)]
        hops = self._route(trainer, t, m, held)
        if hops is None:
            self._work.failed(item.microbatch)
            return False
        if all(held):
            self._work.finished(item.microbatch, now=now_s)
            return True
        flight = Flight(trainer, item.microbatch, hops, world.generation)
        if any(held):
            # A peer that has it gives what it kept: the input from below, the gradient from above.
            flight.recorded = held
            lacking = [stage for stage, has in enumerate(held) if not has]
            flight.first, flight.last = max(0, lacking[0] - 1), min(flight.last, lacking[-1] + 1)
        trainer.running += 1
        world.in_flight[t] = world.in_flight.get(t, 0) | 1 << m
        for stage in range(flight.first, flight.last + 1):
            hops[stage].flights[flight] = None
        flight.position = flight.first
        # The first requests of a step were sent ahead, and wait where they are needed.
        latency_s = 0.0
        if flight.first == 0 and now_s > self._stepped_s:
            latency_s = world.lines.latency_s(trainer.device, hops[0].device)
        self._clock.after(latency_s, self._pipeline.arrive, (flight, flight.first, hops[flight.first]))
        return True

    def _route(self, trainer: Trainer, t: int, m: int, held: Sequence[bool]) -> list[Peer] | None:
        """A peer of each stage: those that hold the microbatch, or the router's; None if a stage has none."""
        horizon_s = trainer.pace.horizon_s(
            self._work.unstarted(t) + (self._job.microbatches if self._settings.delayed_updates else 0)
        )
        hops: list[Peer] = []
        for stage, there in enumerate(self._world.stages):
            if held[stage]:
                hops.append(self._holder(t, m, stage))
                continue
            latency_s = None
            if self._settings.routers_learn == "latency" and hops:
                latency_s = partial(trainer.link_latency.expected_s, hops[-1].name)
            try:
                route = trainer.router.route(
                    stage, now=self._clock.now, horizon_s=horizon_s, latency_s=latency_s
                )
            except NoPeerForStage:
                return None
            hops.append(there.get(route.peer) or self._gone(route.peer, stage))
        return hops

    def _gone(self, name: PeerId, stage: Stage) -> Peer:
        """A stand-in for a peer that is gone, which its callers have yet to find out."""
        gone = Peer(0, name, stage, (0.0, 0.0), 1, self._clock.now, self._clock.now, alive=False)
        self._clock.after(self._settings.detect_s, self.on_unreachable, gone)
        return gone

    def _holder(self, t: int, m: int, stage: Stage) -> Peer:
        for peer in self._world.peers.values():
            if peer.stage == stage and t in peer.ledgers and peer.ledgers[t].done >> m & 1:
                return peer
        # Its stage is prepared: all replicas hold the result, and the tensors were passed on.
        return next(iter(self._world.stages[stage].values()))

    def _order(self, t: int) -> Sequence[int]:
        return Dice(self._world.seed * 1_000_003 + t).shuffled(range(self._job.microbatches))

    # -- ends -------------------------------------------------------------------------------------

    def _answered(self, flight: Flight) -> None:
        trainer, now_s, answered = flight.trainer, self._clock.now, self._world.report.answered
        trainer.running -= 1
        if flight.generation == self._world.generation:
            self._work.finished(flight.microbatch, now=now_s)
            trainer.window.answered(now=now_s)
            trainer.pace.answered(now=now_s)
            trainer.shared += flight.t == self._world.version
            self._learn(flight)
            number = int(now_s / self._settings.bin_s)
            answered += [0] * (number + 1 - len(answered))
            answered[number] += 1
        self._start(trainer)

    def _learn(self, flight: Flight) -> None:
        trainer = flight.trainer
        for here, there, latency_s in zip(flight.hops, flight.hops[1:], flight.latency_s, strict=False):
            if latency_s > 0.0:
                trainer.link_latency.took(here.name, there.name, latency_s)
        for stage in range(flight.first, flight.last + 1):
            own_s, hop = flight.own_s[stage], flight.hops[stage]
            if own_s > 0.0:
                took_s = own_s if self._settings.routers_learn == "response" else sum(hop.job_s)
                trainer.router.answered(stage, hop.name, took_s)

    def _failed(self, flight: Flight) -> None:
        self._work.failed(flight.microbatch)
        self._clock.after(RETRY_S, self._retry, flight.trainer)

    def _retry(self, trainer: Trainer) -> None:
        trainer.running -= 1
        self.report_soon()
        self._start(trainer)

    def report_soon(self) -> None:
        """Have a report tell what is lacking, in `report_s`."""
        if not self._report_is_due:
            self._report_is_due = True
            self._clock.after(self._settings.report_s, self._read_report, None)

    def _read_report(self, _: None) -> None:
        """Add what reports say is lacking to the work; again until nothing is."""
        self._report_is_due = False
        for t in self._steps.damaged:
            in_flight = self._world.in_flight.get(t, 0)
            lacking = [bitmap & ~in_flight for bitmap in self._steps.lacking(t)]
            self._work.lacking(t, lacking, now=self._clock.now)
        self.start_all()
        if self._steps.damaged:
            self.report_soon()

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
        self._stepped_s = self._clock.now
        self.start_all()

    def went_back(self, version: int) -> None:
        """Forget the work of later steps: the run goes on from `version`."""
        self._work.went_back(version)
