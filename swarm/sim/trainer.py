"""A trainer without data: what `peers/trainer.py` does, with the real work list, router and window."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swarm.errors import Busy, NotNow, PeerFault, Refused, Stale, SwarmError
from swarm.ids import Era, Microbatch, PeerId, Standing
from swarm.policy.bans import Bans
from swarm.policy.patience import Patience
from swarm.policy.router import NoPeerForStage, Router
from swarm.policy.window import Window
from swarm.policy.worklist import Work as Item
from swarm.policy.worklist import WorkList
from swarm.sim.clock import Clock, Future, Task
from swarm.sim.network import Network, Node
from swarm.sim.probe import Prober
from swarm.sim.terms import Directory, Terms, Watched, Work, WorkDone

WATCH_S = 3.0
IDLE_S = 0.25
STALE_S = 0.1
BACK_AFTER_S = 6.0
"""The run is taken to be where it is said to be, if that has been earlier than we knew for so long: who held
the later version is dead."""


class Trainer(Node):
    """Runs microbatches until the run is finished."""

    def __init__(
        self,
        clock: Clock,
        name: PeerId,
        terms: Terms,
        network: Network,
        directory: Directory,
        order: Callable[[int], Sequence[int]],
        *,
        window: int | None,
    ) -> None:
        super().__init__(clock, name)
        self._terms, self._network, self._directory = terms, network, directory
        self._router = Router(Bans(probed=True))
        self._prober = Prober(self, network, directory, self._router.bans)
        self._patience = Patience()
        self._todo = WorkList(order, terms.microbatches)
        self._window = Window(start=window or 2 * terms.stages, largest=window or 64, fixed=bool(window))
        self._era = Era()
        self.version = 0
        self._seen = -1
        """Revision of the directory."""
        self._told = False
        self._behind_since: float | None = None
        self._full = False
        self._running: dict[Task[None], int] = {}
        self._changed: Future[None] = self.future()
        self._attempts: dict[Microbatch, int] = {}
        network.add(self)

    @property
    def replayed(self) -> int:
        return self._todo.replayed

    def start(self) -> None:
        self.spawn(self._work())
        self.spawn(self._watch())

    def _change(self) -> None:
        changed, self._changed = self._changed, self.future()
        changed.resolve(None)

    async def _work(self) -> None:
        while self.version < self._terms.steps:
            self._start_work()
            now = self.clock.now
            due = None if self._full else self._todo.next_wakeup(now=now)
            wait_s = IDLE_S if due is None else min(IDLE_S, max(0.01, due - now))
            await self.within(self._changed, wait_s)

    def _refresh_peers(self) -> None:
        latest = self._directory.latest()
        if latest == self._seen:
            return
        self._seen = latest
        for stage in range(self._terms.stages):
            self._router.set_peers(stage, self._directory.serving(stage))

    def _start_work(self) -> None:
        self._refresh_peers()
        if not self._told:
            return
        newest_open = min(self.version + self._terms.ahead, self._terms.steps - 1)
        newest = min(newest_open + 1, self._terms.steps - 1)
        while True:
            item = None
            self._full = sum(t <= newest_open for t in self._running.values()) >= self._window.size
            if not self._full:
                item = self._todo.next(newest_open, now=self.clock.now)
            if item is None and len(self._running) < self._window.size:
                item = self._todo.next(newest, now=self.clock.now)
            if item is None:
                return
            task = self.spawn(self._microbatch(item))
            if not task.done:
                self._running[task] = item.microbatch.t
                task.then(self._ended)

    def _ended(self, task: Task[None]) -> None:
        self._running.pop(task, None)
        self._change()

    async def _microbatch(self, item: Item) -> None:
        """One microbatch through one random pipeline."""
        mb, clock = item.microbatch, self.clock
        began = clock.now
        try:
            route = self._route()
            work = Work(mb.t, mb.m, self._attempts.get(mb, 0), item.deepest, tuple(route[1:]))
            done: WorkDone = await self._network.call(self, route[0], "work", work, self._patience.limit_s)
        except NoPeerForStage as nobody:
            self._todo.failed(mb)
            await self.sleep(min(0.5, max(0.05, nobody.retry_at - clock.now)))
        except PeerFault as fault:
            self._prober.failed(fault.peer)
            self._attempts[mb] = self._attempts.get(mb, 0) + 1
            self._todo.failed(mb)
        except NotNow as later:
            if isinstance(later, Busy):
                self._window.refused()
            await self.sleep(later.retry_after_s)
            self._todo.failed(mb)
        except Stale:
            await self.sleep(STALE_S)
            self._todo.failed(mb)
        except Refused:
            await self.sleep(0.2)
            self._todo.failed(mb)
        else:
            self._todo.finished(mb, now=clock.now)
            self._window.answered(now=clock.now)
            self._patience.answered(clock.now - began)
            for hop in done.hops:
                self._router.answered(hop.stage, hop.peer, hop.own_s)

    def _route(self) -> list[PeerId]:
        route = [self._router.route(0, now=self.clock.now).peer]
        for stage in range(1, self._terms.stages):
            try:
                route.append(self._router.route(stage, now=self.clock.now).peer)
            except NoPeerForStage:
                break
        return route

    # -- the run ----------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Follow the conductor's picture of the run, through any peer of stage 0."""
        seen = -1
        last: PeerId | None = None
        while self.version < self._terms.steps:
            now, bans = self.clock.now, self._router.bans
            peers = [p for p in self._router.peers(0) if not bans.resting(p, now=now)]
            if not peers:
                self._refresh_peers()
                await self.sleep(0.1)
                continue
            peer = last if last in peers else peers[0]
            if peer != last:
                seen, last = -1, peer
            try:
                watched: Watched = await self._network.call(self, peer, "watch", seen, WATCH_S)
                seen = watched.revision
                self._learn(watched)
            except PeerFault as fault:
                self._prober.failed(fault.peer)
                last = None
            except SwarmError:
                last = None
                await self.sleep(IDLE_S)
            await self.sleep(0.02)

    def _learn(self, watched: Watched) -> None:
        brief, now = watched.brief, self.clock.now
        if Standing(watched.era, watched.version) >= Standing(self._era, self.version):
            self._behind_since = None
        elif self._behind_since is None:
            self._behind_since = now
        believed = self._behind_since is not None and now - self._behind_since > BACK_AFTER_S
        if watched.era < self._era and not believed:
            return
        if watched.era > self._era or believed:
            self._go_back(watched.era, watched.version)
        if not self._told:
            self.version = watched.version
            self._todo.stepped(watched.version)
        if watched.version > self.version:
            self.version = watched.version
            self._todo.stepped(watched.version)
            self._window.paused()
            for mb in [mb for mb in self._attempts if mb.t < self.version]:
                del self._attempts[mb]
        self._told = True
        self._change()
        if brief.era == self._era:
            for t, by_stage in brief.lacking:
                if t >= self.version:
                    self._todo.lacking(t, by_stage, now=now)

    def _go_back(self, era: Era, version: int) -> None:
        self._era, self._behind_since = era, None
        if self._told and version < self.version:
            self.version = version
            self._todo.went_back(version)
            self._attempts.clear()
            self._window.paused()
