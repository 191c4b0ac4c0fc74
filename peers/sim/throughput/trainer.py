"""The trainer: the microbatches that it starts, their way through the stages and back, and which run again.

A microbatch is a coroutine, and each stage a call of it, as in `peers/stage/next_stage.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from peers.sim.dice import Dice
from peers.sim.throughput.world import RETRY_S, Gone, Peer, World
from swarm.ids import Stage
from swarm.policy.link_latency import LinkLatency
from swarm.policy.router import NoPeerForStage, Pace, Router
from swarm.policy.window import Window, moving_share
from swarm.protocol.ledger import Claim
from swarm.protocol.worklist import WorkItem, WorkList

REPORT_S = 0.1
"""Between reports of what is lacking."""


class Flight:
    """A microbatch in flight: forward through a peer of each stage, and back."""

    def __init__(self, work: WorkItem, hops: list[Peer], began_s: float) -> None:
        self.hops, self.deepest, self.began_s = hops, work.deepest, began_s
        self.route = [hop.name for hop in hops]
        """As it was chosen."""
        self.microbatch = work.microbatch
        self.t, self.m = work.microbatch
        self.latency_s = [0.0] * len(hops)
        """Per stage, on the link to the next one and back."""
        self.own_s = [0.0] * len(hops)
        """Per stage, its time there without the stages behind it."""


class Trainer:
    """With the live `Router`, `Window` and `WorkList`; next to the first device."""

    def __init__(self, world: World) -> None:
        self._world, self._loop, self._settings, self._job = world, world.loop, world.settings, world.job
        self._jobs, window = (self._job, self._job.packed or self._job), self._settings.window
        self.work = WorkList(self._order)
        self._router, self._links, self._pace = Router(caller="t0"), LinkLatency(), Pace()
        self._window = Window(
            start=window or 2 * self._job.stages, largest=window or 1024, fixed=bool(window)
        )
        self._shared = 0
        """Microbatches of the open step that it ran."""
        self._flying: set[Flight] = set()
        """Those that have not come back."""
        self._journeys: set[asyncio.Task[None]] = set()
        """The same, and those that have, until the trainer has noticed."""
        self._reporting: asyncio.Task[None] | None = None
        self._wakeup: asyncio.TimerHandle | None = None
        self._stepped_s = 0.0
        world.on_step = self._stepped

    # -- starts -----------------------------------------------------------------------------------

    def start_all(self) -> None:
        """Start as many microbatches as the window holds."""
        now_s, newest = self._loop.now_s, self._world.version + self._settings.delayed_updates
        while not self._world.empty and len(self._journeys) < self._window.size:
            work = self.work.next(newest, now=now_s)
            if work is None:
                self._wake_when_due(newest)
                return
            if not self._launch(work):
                return

    def _wake_when_due(self, newest: int) -> None:
        due_s = self.work.next_wakeup(newest, now=self._loop.now_s)
        if self._wakeup is not None:
            self._wakeup.cancel()
            self._wakeup = None
        if due_s is not None:
            self._wakeup = self._loop.call_at(max(due_s, self._loop.now_s + 0.001), self.start_all)

    def _launch(self, work: WorkItem) -> bool:
        """Send a microbatch on its way; False if some stage cannot be reached."""
        t, m = work.microbatch
        hops = self._route(t, m)
        if not hops:
            self.work.failed(work.microbatch)
            return False
        flight = Flight(work, hops, self._loop.now_s)
        self._flying.add(flight)
        self._links.began(flight.route)
        journey = self._loop.create_task(self._journey(flight))
        self._journeys.add(journey)
        journey.add_done_callback(self._ended)
        return True

    def _ended(self, journey: asyncio.Task[None]) -> None:
        self._journeys.discard(journey)
        if not journey.cancelled():
            journey.result()  # a bug is told
        self.start_all()

    def _route(self, t: int, m: int) -> list[Peer]:
        """A peer of each stage: one that holds the microbatch, or the router's; none if a stage has none."""
        horizon_s = self._pace.horizon_s(
            self.work.unstarted(t) + (self._job.microbatches if self._settings.delayed_updates else 0)
        )
        hops: list[Peer] = []
        for stage, there in enumerate(self._world.stages):
            if self._world.has(t, stage, m):
                hops.append(self._holder(t, m, stage))
                continue
            latency_s = None
            if hops:
                latency_s = partial(self._links.price_s, hops[-1].name)
            try:
                route = self._router.route(
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

    # -- the way of a microbatch ------------------------------------------------------------------

    async def _journey(self, flight: Flight) -> None:
        latency_s = self._world.lines.latency_s(0, flight.hops[0].device)
        try:
            # The first requests of a step were sent ahead, and wait where they are needed.
            if latency_s and self._loop.now_s > self._stepped_s:
                await asyncio.sleep(latency_s)
            await self._visit(flight, 0)
            self._flying.discard(flight)
            if latency_s:
                await asyncio.sleep(latency_s)
        except (Gone, NoPeerForStage):
            self._flying.discard(flight)
            self.work.failed(flight.microbatch)
            await asyncio.sleep(RETRY_S)
            self.report_soon()
        else:
            self._answered(flight)
        finally:
            self._links.ended(flight.route)

    async def _visit(self, flight: Flight, stage: Stage) -> None:
        """Take a microbatch, whose activations have arrived, through `stage` and those behind it, and back.

        Raises:
            Gone: the peer is, and its caller has noticed.
            NoPeerForStage: nor has a stage behind it another peer.
        """
        peer, t, m = flight.hops[stage], flight.t, flight.m
        if not peer.serving:
            await self._notice(peer)
        known = self._world.has(t, stage, m)
        if known and stage >= flight.deepest:
            return  # it kept its answer
        ledger = peer.ledger(t, self._job.microbatches)
        if not known:
            claim = ledger.claim(m)
            assert claim is Claim.NEW, f"{flight.microbatch} came to {peer.name} twice"
        peer.flights += 1
        try:
            await self._compute(flight, stage, count=not known)
        finally:
            ledger.release(m)
            peer.flights -= 1
            if peer.draining_to is not None:
                self._world.on_released(peer)

    async def _compute(self, flight: Flight, stage: Stage, *, count: bool) -> None:
        """Compute a microbatch; without `count` forward only, to feed the stages behind again."""
        peer, loop, last = flight.hops[stage], self._loop, stage == self._job.stages - 1
        began_s, behind_s = loop.now_s, 0.0
        forward_s, backward_s = peer.job_s
        caller = flight.hops[stage - 1].device if stage else 0
        await peer.take_room(2 * self._world.lines.latency_s(caller, peer.device))
        try:
            await peer.compute(flight.t, forward_s + backward_s if last else forward_s)
            if not last:
                left_s = loop.now_s
                await self._behind(flight, stage)
                behind_s = loop.now_s - left_s
                if not peer.alive:
                    await self._notice(peer)
                if count:
                    await peer.compute(flight.t, backward_s)
            if count:
                peer.computed += 1
                self._world.record(peer, flight.t, flight.m)
                flight.own_s[stage] = loop.now_s - began_s - behind_s
        finally:
            peer.give_room()

    async def _behind(self, flight: Flight, stage: Stage) -> None:
        """Have the stages behind do their part, until the gradient has come back from them."""
        here, gone = flight.hops[stage], set[str]()
        while True:
            there = flight.hops[stage + 1]
            took_s = await self._send(here, there, *(each.forward_bytes[stage] for each in self._jobs))
            try:
                await self._visit(flight, stage + 1)
            except Gone:
                if not here.alive:
                    raise
                gone.add(there.name)
                route = self._router.route(stage + 1, now=self._loop.now_s, exclude=gone)
                flight.hops[stage + 1] = self._world.stages[stage + 1][route.peer]
                continue
            took_s += await self._send(there, here, *(each.backward_bytes[stage] for each in self._jobs))
            flight.latency_s[stage] = took_s
            return

    async def _send(self, here: Peer, there: Peer, size_bytes: float, packed_bytes: float) -> float:
        """Send tensors; returns the seconds that it took."""
        now_s = self._loop.now_s
        lines = self._world.lines
        took_s = lines.send(here.device, there.device, size_bytes, now_s, packed_bytes) - now_s
        self._world.report.boundary_bytes += size_bytes
        if took_s:
            await asyncio.sleep(took_s)
        return took_s

    async def _notice(self, peer: Peer) -> None:
        """Raise `Gone`, for a dead peer when that can be known."""
        if not peer.alive:
            await asyncio.sleep(max(0.0, peer.ended_s + self._settings.detect_s - self._loop.now_s))
        raise Gone

    def _answered(self, flight: Flight) -> None:
        now_s, report = self._loop.now_s, self._world.report
        self.work.finished(flight.microbatch)
        self._pace.answered(now=now_s)
        self._shared += flight.t == self._world.version
        for (here, there), latency_s in zip(pairwise(flight.hops), flight.latency_s, strict=False):
            if latency_s > 0.0:
                trip_s = 2 * self._world.lines.latency_s(here.device, there.device)
                self._links.took(here.name, there.name, latency_s, trip_s)
        if all(own_s > 0.0 for own_s in flight.own_s):
            self._window.answered(in_flight=len(self._journeys), moving=self._moving_share(flight))
        open_s = self._stepped_s if flight.t >= self._world.version else 0.0
        took_s = now_s - max(flight.began_s, open_s)
        for hop, own_s in zip(flight.hops, flight.own_s, strict=True):
            if own_s > 0.0:
                beside = (self._router.count(hop.stage + by) for by in (-1, 1))
                work_s = max(hop.work_s, self._links.busy_s(hop.name, *beside))
                share = self._pace.share
                self._router.answered(hop.stage, hop.name, work_s, took_s, now=now_s, share=share)
        number = int(now_s / self._settings.bin_s)
        report.answered += [0] * (number + 1 - len(report.answered))
        report.answered[number] += 1

    def _moving_share(self, flight: Flight) -> float:
        here_s = self._world.lines.latency_s(0, flight.hops[0].device)
        stages = [(own_s, sum(hop.job_s)) for hop, own_s in zip(flight.hops, flight.own_s, strict=True)]
        links = [
            (latency_s, self._links.least_s(here.name, there.name))
            for (here, there), latency_s in zip(pairwise(flight.hops), flight.latency_s, strict=False)
        ]
        return moving_share([*stages, *links, (2 * here_s, 2 * here_s)])

    # -- the run ----------------------------------------------------------------------------------

    def report_soon(self) -> None:
        """Have reports tell what is lacking, until nothing is."""
        if self._reporting is None or self._reporting.done():
            self._reporting = self._loop.create_task(self._report())

    async def _report(self) -> None:
        again = True
        while again:
            await asyncio.sleep(REPORT_S)
            for t in self._world.damaged:
                in_flight = sum(1 << flight.m for flight in self._flying if flight.t == t)
                lacking = [bitmap & ~in_flight for bitmap in self._world.lacking(t)]
                self.work.lacking(t, lacking, now=self._loop.now_s)
            self.start_all()
            again = bool(self._world.damaged)

    def set_peers(self, stage: Stage) -> None:
        """Note the peers that serve a stage now."""
        self._router.set_peers(stage, list(self._world.stages[stage]))
        if self._settings.window is None:
            rooms = [sum(peer.room for peer in there.values()) for there in self._world.stages]
            self._window.set_largest(min(filter(None, rooms), default=1))

    def _stepped(self) -> None:
        self.work.stepped(self._world.version)
        self._pace.stepped(self._shared / self._job.microbatches)
        self._shared = 0
        self._stepped_s = self._loop.now_s
        self.start_all()

    def went_back(self, version: int) -> None:
        """Give up all that is in flight, and forget later steps: the run goes on from `version`."""
        for journey in self._journeys:
            journey.cancel()
        self._flying.clear()
        self.work.went_back(version)
