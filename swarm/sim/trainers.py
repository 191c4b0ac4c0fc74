"""Trainers: what they start and on which route, what they hear of it, and what they run again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from swarm.ids import PeerId, Stage
from swarm.policy.router import NoPeerForStage, Router
from swarm.policy.window import Window
from swarm.protocol.worklist import Work, WorkList
from swarm.sim.actors import Flight, Peer, Trainer
from swarm.sim.dice import Dice
from swarm.sim.world import Part, World

RETRY_S = 0.05
"""After a call failed its trainer waits so long."""


class Trainers(Part):
    """With the live `Router`, `Window` and `WorkList`."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        settings, window = world.settings, world.settings.window
        self._todo = WorkList(self._order, world.job.microbatches)
        self._trainers = [
            Trainer(
                (i * len(world.network)) // settings.trainers,
                Router(),
                Window(start=window or 2 * world.job.stages, largest=window or 1024, fixed=bool(window)),
            )
            for i in range(settings.trainers)
        ]
        self._under_way: dict[int, int] = {}
        """Step -> microbatches in flight."""
        self._news_due = False
        self._wakeup_s = math.inf
        self._went_at_s = 0.0

    @property
    def replayed(self) -> int:
        """Microbatches that were run again."""
        return self._todo.replayed

    def start_all(self) -> None:
        """Start what may be started."""
        for trainer in self._trainers:
            self._start(trainer)

    def _start(self, trainer: Trainer) -> None:
        """As many microbatches as the window holds."""
        if self._world.empty_since_s is not None:
            return
        now_s = self._clock.now
        newest = self._world.version + self._settings.delayed_updates
        while trainer.running < trainer.window.size:
            item = self._todo.next(newest, now=now_s)
            if item is None:
                due_s = self._todo.next_wakeup(now=now_s)
                if due_s is not None and not now_s < self._wakeup_s <= due_s:
                    self._wakeup_s = max(due_s, now_s + 0.001)
                    self._clock.after(self._wakeup_s - now_s, self.wake, None)
                return
            if not self._launch(trainer, item):
                return

    def wake(self, _: None) -> None:
        """It is time to look for work again."""
        self._wakeup_s = math.inf
        self.start_all()

    def _launch(self, trainer: Trainer, item: Work) -> bool:
        """Send a microbatch on its way; False if some stage cannot be reached."""
        now_s, t, m = self._clock.now, item.microbatch.t, item.microbatch.m
        covered = self._world.steps.cover(t)
        horizon_s = trainer.pace.horizon_s(
            self._todo.unstarted(t) + (self._job.microbatches if self._settings.delayed_updates else 0)
        )
        hops: list[Peer] = []
        held = [bool(bitmap >> m & 1) for bitmap in covered]
        try:
            for stage, there in enumerate(self._world.stages):
                if held[stage]:
                    hops.append(self._holder(t, m, stage))
                else:
                    latency_s = None
                    if self._settings.routers_learn == "ways" and hops:
                        latency_s = partial(trainer.ways.expected_s, hops[-1].name)
                    route = trainer.router.route(stage, now=now_s, horizon_s=horizon_s, latency_s=latency_s)
                    hops.append(there.get(route.peer) or self._dead(route.peer, stage))
        except NoPeerForStage:
            self._todo.failed(item.microbatch)
            return False
        flight = Flight(trainer, item.microbatch, hops, self._world.generation)
        if all(held):
            self._todo.finished(item.microbatch, now=now_s)
            return True
        if any(held):
            # Who has the microbatch gives what it kept: the input from below, the gradient from above.
            flight.recorded = held
            lacking = [stage for stage, has in enumerate(held) if not has]
            flight.first, flight.last = max(0, lacking[0] - 1), min(flight.last, lacking[-1] + 1)
        trainer.running += 1
        self._under_way[t] = self._under_way.get(t, 0) | 1 << m
        for stage in range(flight.first, flight.last + 1):
            hops[stage].flights[flight] = None
        flight.pos = flight.first
        # The first requests of a step were sent ahead, and wait where they are needed.
        latency_s = 0.0
        if flight.first == 0 and now_s > self._went_at_s:
            latency_s = self._lines.latency_s(trainer.device, hops[0].device)
        first = hops[flight.first]
        self._clock.after(latency_s, self._world.pipeline.arrive, (flight, flight.first, first))
        return True

    def _dead(self, name: PeerId, stage: Stage) -> Peer:
        """A peer of which its death, or that it goes, is not known yet: whoever calls it will find out."""
        gone = Peer(0, name, stage, (0.0, 0.0), 1, self._clock.now)
        gone.alive = False
        self._clock.after(self._settings.detect_s, self._world.members.missed, gone)
        return gone

    def _holder(self, t: int, m: int, stage: Stage) -> Peer:
        for peer in self._world.peers.values():
            if peer.stage == stage and t in peer.ledgers and peer.ledgers[t].done >> m & 1:
                return peer
        # Its stage is prepared: all members hold the result, and the tensors were passed on.
        return next(iter(self._world.stages[stage].values()))

    def answered(self, flight: Flight) -> None:
        """The trainer has the loss."""
        trainer, now_s = flight.trainer, self._clock.now
        trainer.running -= 1
        if flight.generation != self._world.generation:
            self._start(trainer)
            return
        self._todo.finished(flight.microbatch, now=now_s)
        trainer.window.answered(now=now_s)
        trainer.pace.answered(now=now_s)
        trainer.shared += flight.t == self._world.version
        computing = self._settings.routers_learn != "response"
        for here, there, latency_s in zip(flight.hops, flight.hops[1:], flight.latency_s, strict=False):
            if latency_s > 0.0:
                trainer.ways.took(here.name, there.name, latency_s)
        for stage in range(flight.first, flight.last + 1):
            own_s, hop = flight.own_s[stage], flight.hops[stage]
            if own_s > 0.0:
                trainer.router.answered(stage, hop.name, sum(hop.job_s) if computing else own_s)
        self._count_answer(now_s)
        self._start(trainer)

    def _count_answer(self, now_s: float) -> None:
        number, answered = int(now_s / self._report.bin_s), self._report.answered
        while len(answered) <= number:
            answered.append(0)
        answered[number] += 1

    def cancel(self, flight: Flight) -> None:
        """Its call failed: it is to be started again."""
        if not flight.alive:
            return
        flight.alive = False
        self.land(flight)
        for stage in range(flight.first, flight.last + 1):
            peer = flight.hops[stage]
            if flight in peer.flights:
                self._world.pipeline.leave_peer(flight, peer)
                if flight.t in peer.ledgers and not flight.recorded[stage]:
                    peer.ledgers[flight.t].release(flight.m)
        self._todo.failed(flight.microbatch)
        self._clock.after(RETRY_S, self._failed, flight.trainer)

    def _failed(self, trainer: Trainer) -> None:
        trainer.running -= 1
        self.news_soon()
        self._start(trainer)

    def land(self, flight: Flight) -> None:
        """It is under way no more."""
        if flight.t in self._under_way:
            self._under_way[flight.t] &= ~(1 << flight.m)

    def news_soon(self) -> None:
        """Somebody reports what is lacking."""
        if not self._news_due:
            self._news_due = True
            self._clock.after(self._settings.report_s, self._news, None)

    def _news(self, _: None) -> None:
        """Reports tell trainers what is lacking, until nothing is."""
        self._news_due = False
        for t in self._world.steps.hurt:
            in_progress = self._under_way.get(t, 0)
            lacking = [bitmap & ~in_progress for bitmap in self._world.steps.lacking(t)]
            self._todo.lacking(t, lacking, now=self._clock.now)
        self.start_all()
        if self._world.steps.hurt:
            self.news_soon()

    def tell(self, stage: Stage) -> None:
        """Who serves a stage has changed, and they know."""
        names = list(self._world.stages[stage])
        room = sum(peer.room for peer in self._world.stages[0].values())
        for trainer in self._trainers:
            trainer.router.set_peers(stage, names)
            if self._settings.window is None and room:
                trainer.window.set_largest(room)

    def stepped(self, t: int) -> None:
        """Step `t` was taken."""
        self._under_way.pop(t, None)
        self._todo.stepped(self._world.version)
        for trainer in self._trainers:
            trainer.window.paused()
            trainer.pace.stepped(trainer.shared / self._job.microbatches)
            trainer.shared = 0
        self._went_at_s = self._clock.now

    def went_back(self, version: int) -> None:
        """The run goes on from there."""
        self._todo.went_back(version)

    def _order(self, t: int) -> Sequence[int]:
        return Dice(self._world.seed * 1_000_003 + t).shuffled(range(self._job.microbatches))
