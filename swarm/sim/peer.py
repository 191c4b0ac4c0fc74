"""A stage peer with numbers instead of tensors: what `peers/{core,work,reduce,stage,catchup}.py` do.

Ledgers, rounds, routes and bans are the real ones; a device is a queue with a duration, and the sum of a step
is a count of one-hot gradients (`swarm.sim.check`).
"""

from __future__ import annotations

import contextlib
import heapq
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from swarm.errors import (
    Busy,
    Leaving,
    NotNow,
    NotReady,
    PeerFault,
    Refused,
    Stale,
    SwarmError,
)
from swarm.ids import Era, PeerId, Stage, Standing
from swarm.policy import eras, rounds
from swarm.policy.bans import Bans
from swarm.policy.eras import Join
from swarm.policy.ledger import Claim, Ledger, members_of
from swarm.policy.patience import Patience
from swarm.policy.rounds import Go, Held, Plan, finishes_until_s
from swarm.policy.router import NoPeerForStage, Router
from swarm.sim.check import ELEMENTS, SHARED, Checks, Weights, applied, complete, initial, one_hot, sqnorm
from swarm.sim.clock import Clock, Future, Task
from swarm.sim.council import GOES_KEPT, Council, News
from swarm.sim.dice import Dice
from swarm.sim.network import Network, Node
from swarm.sim.paused import Snapshot
from swarm.sim.probe import Prober
from swarm.sim.terms import (
    Brief,
    Directory,
    Entry,
    Hop,
    Part,
    Shelf,
    Status,
    StepBrief,
    Terms,
    Vector,
    Work,
    WorkDone,
)

OPEN_WAIT_S = 10.0
LOCATE_S = 1.0
MOST_REFUSALS = 2
START_WAIT_S = 5.0
SHARED_RETRY_S = 0.1
SHARED_S = 20.0
NOT_READY_RETRIES = 20
PART_S = 300.0
SEND_S = 0.05
STATE_S = 30.0
ASK_S = 3.0
RETRY_JOIN_S = 0.5
LOST_S = 6.0
LOOK_S = 1.0
HAND_LOOK_S = 0.05
HAND_CALL_S = 20.0
HAND_PAUSE_S = 1.5
LEAVE_WITHIN_S = 20.0
PAUSE_WITHIN_S = 5.0


class Rank(IntEnum):
    """What goes first on a device."""

    STEP = 0
    BACKWARD = 1
    FORWARD = 2
    IDLE = 3


@dataclass(slots=True)
class Kept:
    """What answers a repeated request, and undoes a duplicate."""

    versions: tuple[int, ...]
    """Of the activation that came in."""
    answer: WorkDone


@dataclass(slots=True)
class OpenStep:
    """Step `t` at one peer, from its first microbatch to its `go`."""

    t: int
    ledger: Ledger
    jobs: dict[int, Future[Kept]] = field(default_factory=dict)
    kept: dict[int, Kept] = field(default_factory=dict)
    handing: bool = False
    reduced: tuple[int, ...] | None = None
    whole: tuple[int, ...] = ()
    """With what another stage found of a weight that both hold."""
    held: Held | None = None
    reducing: str = ""
    reduce_began_s: float = 0.0
    adopt_told_s: float = 0.0
    failed_round: str = ""
    work: dict[str, Task[None]] = field(default_factory=dict)
    ending: list[Task[None]] = field(default_factory=list)
    over: bool = False

    def drop(self) -> None:
        """The sum is lost or given away: its ledger goes with it."""
        self.ledger.clear()
        self.kept.clear()

    def stop(self, kind: str) -> None:
        task = self.work.pop(kind, None)
        if task is not None and not task.done:
            task.cancel()
            self.ending.append(task)

    async def stopped(self) -> None:
        while self.ending:
            with contextlib.suppress(SwarmError):
                await self.ending.pop()

    def close(self) -> None:
        self.over = True
        for kind in list(self.work):
            self.stop(kind)


@dataclass(slots=True)
class _Round:
    plan: Plan
    t: int
    reduced: list[int]
    """Memory that was never written holds anything, here our own sum."""
    missing: set[int]
    """Elements that have not come."""
    contributions: dict[PeerId, int | None]
    result: Future[int]
    """Of the part that this member owns."""


def whole(this: _Round) -> bool:
    """Every element came: only then there is a result."""
    return not this.missing


class StagePeer(Node):
    """Serves one stage."""

    def __init__(
        self,
        clock: Clock,
        name: PeerId,
        stage: Stage,
        terms: Terms,
        network: Network,
        directory: Directory,
        checks: Checks,
        shelf: Shelf,
        dice: Dice,
        say: Callable[[str], None] | None,
        *,
        compute_s: float,
        max_inflight: int,
        kept: Snapshot | None = None,
    ) -> None:
        """`kept`: of the pause that it comes back from."""
        super().__init__(clock, name)
        self.stage, self.terms, self._checks, self._shelf = stage, terms, checks, shelf
        self.network, self.directory, self._dice = network, directory, dice
        self._trace = say
        self._compute_s, self._max_inflight = compute_s, max_inflight
        self.era = Era()
        self.weights = initial(stage)
        self._hashed = -1
        """Version of the weights whose digest is known."""
        self.sums: dict[int, int] = {}
        self.steps: dict[int, OpenStep] = {}
        self.goes: dict[int, Go] = {}
        """Of the last steps that were taken, by step."""
        self._applied: tuple[Go, tuple[int, ...], Held] | None = None
        self.joined = False
        self.leaving = False
        self.gone = False
        self._kept = kept
        self._then: Callable[[Snapshot | None], None] | None = None
        """Pausing: what follows."""
        self.bandwidth_bps = dice.pick((0.0, 1e6, 1e7))
        self.since_s = clock.now + dice.pick((0.0, 0.0, 0.0, 0.0, -3600.0))
        """By its own clock, which may be an hour late."""
        self.at_point: Callable[[StagePeer, str], None] | None = None
        """Told of each of the moments at which a fault hurts most; see `swarm.sim.faults`."""
        self.undone = 0
        self.breaks = 0
        """So many of the next backwards break and take the sum with them."""
        self._inflight = 0
        self._running_jobs = 0
        self._jobs: list[tuple[int, int, int, float, Callable[[], Any], Future[Any]]] = []
        self._jobs_made = 0
        self._device_busy = False
        self._moved: Future[None] = self.future()
        self._rounds: dict[str, _Round] = {}
        self._started: Future[None] = self.future()
        self._catching_up = False
        self._aside: dict[PeerId, tuple[int, int]] = {}
        self.router = Router(Bans(probed=True))
        self.prober = Prober(self, network, directory, self.router.bans)
        self._patience = Patience()
        self._seen = -1
        """Revision of the directory that the router knows."""
        self.news = News(self, lambda: self.council.speak())
        self.council = Council(self, self.router.bans, obey=self._obey)
        self.on_gone = self.council.lost
        self.handlers.update(
            work=self._serve_work,
            locate=self._serve_locate,
            part=self._serve_part,
            held=self._serve_vector,
            shared=self._serve_shared,
            state=self._serve_state,
            chunk=lambda caller, question: None,
            status=lambda caller, question: Status(self.standing, stays=not self.leaving),
            saved=lambda caller, question: None,
            offer=self._serve_offer,
            take=self._serve_take,
        )

    def call(self, to: PeerId, method: str, question: Any, deadline_s: float) -> Future[Any]:
        return self.network.call(self, to, method, question, deadline_s)

    def _point(self, name: str) -> None:
        if self.at_point is not None:
            self.at_point(self, name)

    def say(self, text: Callable[[], str]) -> None:
        if self._trace is not None:
            self._trace(f"{self.name}: {text()}")

    # -- where it is ------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self.weights.version

    @property
    def standing(self) -> Standing:
        return Standing(self.era, self.weights.version)

    @property
    def digest(self) -> str:
        return self.weights.digest if self._hashed == self.weights.version else ""

    @property
    def is_last(self) -> bool:
        return self.stage == self.terms.stages - 1

    def _newest_step(self) -> int:
        return min(self.version + self.terms.ahead, self.terms.steps - 1)

    # -- life -------------------------------------------------------------------------------------

    @property
    def pausing(self) -> bool:
        return self.alive and self._then is not None

    def start(self) -> None:
        if self.name in self.network.nodes:
            self.network.replace(self)
        else:
            self.network.add(self)
        self._announce("joining")
        self.spawn(self._live())

    def _announce(self, state: str) -> None:
        self.directory.announce(Entry(self.name, self.stage, state, self.since_s))

    async def _live(self) -> None:
        await self._join()
        if self.leaving:
            return
        self._announce("serving")
        self.news.urgent()
        while True:
            await self.sleep(LOOK_S)
            if self.council.behind_s > LOST_S and not self._catching_up:
                self._catching_up = True
                try:
                    await self._bring_back(self.council.run_standing, self.council.behind_s)
                finally:
                    self._catching_up = False

    def leave(self) -> None:
        """Finish what is in flight, hand over, withdraw."""
        if not self.leaving:
            self.leaving = True
            self._move()
            self.say(lambda: "leaves")
            self.spawn(self._leave(LEAVE_WITHIN_S))

    def pause(self, then: Callable[[Snapshot | None], None]) -> None:
        """As `leave`, but the place and the state are kept; the owner does not wait for long."""
        if not self.leaving:
            self.leaving, self._then = True, then
            self._move()
            self.say(lambda: "pauses")
            self.spawn(self._leave(PAUSE_WITHIN_S))

    async def _leave(self, within_s: float) -> None:
        if self.joined:
            self._announce("leaving")
            until = self.clock.now + within_s
            while self._running_jobs and self.clock.now < until - within_s / 2:
                await self.sleep(0.1)
            await self._give_all(until)
            await self._leave_the_version(until)
            await self.council.farewell()
        joined, self.joined = self.joined, False
        self.gone = True
        for step in self.steps.values():
            step.close()
        self.council.close()
        if self._then is not None:
            if joined:
                self._kept = await self.on_device(Rank.STEP, self.version, 0.02, self._keep)
            self.say(lambda: "is paused")
            self._then(self._kept)
            return
        self._announce("left")
        self.network.kill(self.name, quietly=False)
        self.say(lambda: "has left")

    def _keep(self) -> Snapshot:
        return Snapshot(self.standing, self.weights, self.goes.get(self.version - 1))

    async def _come_back(self, kept: Snapshot) -> None:
        """To where it was before the pause; then it joins as anybody does."""
        await self._load(kept.standing, kept.weights)
        if kept.last_go is not None:
            self.goes[kept.last_go.t] = kept.last_go

    async def _leave_the_version(self, until: float) -> None:
        while self.clock.now < until:
            mates = [p for p in self.directory.serving(self.stage) if p != self.name]
            told = await self.ask_status(mates)
            if eras.may_leave(self.standing, [status.standing for status in told.values() if status.stays]):
                return
            await self.sleep(RETRY_JOIN_S)

    async def _join(self) -> None:
        lost_since: float | None = None
        if self._kept is not None:
            await self._come_back(self._kept)
        await self._resume()
        while not self.leaving:
            others = [
                e
                for e in self.directory.entries()
                if e.peer != self.name and e.state in ("serving", "joining")
            ]
            statuses = await self.ask_status([e.peer for e in others])
            told = {peer: status.standing for peer, status in statuses.items()}
            mates = [
                e.peer for e in others if (e.stage, e.state) == (self.stage, "serving") and e.peer in told
            ]
            run = max(told.values(), default=Standing())
            by = eras.join_by(self.standing, [told[mate] for mate in mates], run)
            if by is Join.SERVE:
                break
            if by is Join.DOWNLOAD and await self._catch_up_with({mate: told[mate] for mate in mates}):
                break
            if by is Join.LOST:
                lost_since = lost_since or self.clock.now
                waited_s = self.clock.now - lost_since
                if waited_s > LOST_S and await self._bring_back(run, waited_s):
                    break
            await self.sleep(RETRY_JOIN_S)
        self._open_steps()
        self._kept, self.joined = None, True
        self._hashed = self.version
        self._open_steps()
        self.say(lambda: f"serves stage {self.stage} from {self.standing}")

    async def _resume(self) -> None:
        """Where nobody serves the run: start from what is saved of all stages."""
        until = self.clock.now + LOST_S
        while self.clock.now < until and not self.leaving:
            if not any(self._saved().values()):
                return
            serving = [
                e.peer for e in self.directory.entries() if e.state == "serving" and e.peer != self.name
            ]
            if await self.ask_status(serving):
                return
            newest = eras.newest_start(self.terms.stages, self._saved(), most=self.terms.steps)
            if newest > self.version and await self._get(Standing(self.era, newest)):
                return
            await self.sleep(RETRY_JOIN_S)

    def _saved(self) -> dict[Stage, set[int]]:
        return {stage: set(self._shelf.of(stage)) for stage in range(self.terms.stages)}

    async def ask_status(self, peers: Sequence[PeerId]) -> dict[PeerId, Status]:
        asked = [(peer, self.call(peer, "status", None, ASK_S)) for peer in peers]
        told: dict[PeerId, Status] = {}
        for peer, answer in asked:
            try:
                told[peer] = await answer
            except SwarmError:
                continue
        return told

    # -- the device -------------------------------------------------------------------------------

    def on_device(self, rank: Rank, t: int, seconds: float, job: Callable[[], Any]) -> Future[Any]:
        """Await it: what `job` returns. One job after the other, by rank, then by step, then as they came."""
        done: Future[Any] = Future(self.clock, self)
        self._jobs_made += 1
        heapq.heappush(self._jobs, (rank, t, self._jobs_made, seconds, job, done))
        if not self._device_busy:
            self._next_job()
        return done

    def _next_job(self) -> None:
        while self._jobs:
            _, _, _, seconds, job, done = heapq.heappop(self._jobs)
            if not done.abandoned:
                self._device_busy = True
                self.clock.after(seconds, self, self._run_job, (job, done))
                return
        self._device_busy = False

    def _run_job(self, todo: tuple[Callable[[], Any], Future[Any]]) -> None:
        job, done = todo
        try:
            done.resolve(job())
        except SwarmError as error:
            done.fail(error)
        self._next_job()

    # -- steps ------------------------------------------------------------------------------------

    def _open_steps(self) -> None:
        for t in [t for t in self.steps if t < self.version]:
            self.steps.pop(t).close()
        for t in range(self.version, self._newest_step() + 1):
            if t not in self.steps:
                self.sums.setdefault(t, 0)
                self.steps[t] = OpenStep(t, Ledger(t, self.terms.microbatches))
        self.news.urgent()
        self._move()

    def _move(self) -> None:
        moved, self._moved = self._moved, self.future()
        moved.resolve(None)

    async def _step(self, t: int, wait_s: float) -> OpenStep:
        until = self.clock.now + wait_s
        while True:
            if t < self.version:
                raise self._closed(t)
            if self.joined and t in self.steps:
                return self.steps[t]
            if self.leaving:
                raise Leaving("this peer is leaving")
            left_s = until - self.clock.now
            if left_s <= 0:
                raise NotReady(f"step {t} is not open", version=self.version)
            await self.within(self._moved, left_s)

    def _closed(self, t: int) -> SwarmError:
        if t < self.version:
            return Stale(f"step {t} is over", version=self.version)
        return NotReady(f"the sum of step {t} was dropped here and starts again", version=self.version)

    async def _apply(self, go: Go) -> None:
        step = self.steps.get(go.t)
        if step is None or step.held is None or step.reduced is None or go.t != self.version:
            return
        reduced, held, whole = step.reduced, step.held, step.whole
        step.close()
        await step.stopped()

        def apply() -> None:
            if go.t != self.version:
                raise Stale("another state was loaded", version=self.version)
            self.weights = applied(self.weights, whole, go.total_sqnorm)
            for t in [t for t in self.sums if t <= go.t]:
                del self.sums[t]

        await self.on_device(Rank.STEP, go.t, self._compute_s, apply)
        self.say(lambda: f"took step {go.t}, version {self.version}")
        self._point("took")
        self._checks.taken(self.stage, self.name, self.weights)
        self._applied = (go, reduced, held)
        self.goes = {t: known for t, known in self.goes.items() if t > go.t - GOES_KEPT}
        self.goes[go.t] = go
        self._open_steps()
        self.spawn(self._hash())

    async def _hash(self) -> None:
        version = self.version
        await self.on_device(Rank.IDLE, version, 0.001, lambda: None)
        self._hashed = version
        self.news.urgent()

    async def _load(self, standing: Standing, weights: Weights) -> None:
        closed = list(self.steps.values())
        for step in closed:
            step.close()
        self.steps.clear()
        for step in closed:
            await step.stopped()

        def load() -> None:
            self.weights = weights
            self.sums.clear()

        await self.on_device(Rank.STEP, standing.version, 0.02, load)
        self._checks.loaded(self.stage, self.name, weights, standing.version)
        self._applied, self.goes, self.era = None, {}, standing.era
        self.say(lambda: f"loaded {standing}")
        self._open_steps()
        await self._hash()

    def _enter_here(self, era: Era) -> None:
        self.era, self.goes = era, {}
        self.news.urgent()

    # -- microbatches -----------------------------------------------------------------------------

    def _serve_locate(self, caller: PeerId, question: tuple[int, int]) -> bool:
        t, m = question
        step = self.steps.get(t)
        return step is not None and bool((step.ledger.done | step.ledger.doing) >> m & 1)

    async def _serve_work(self, caller: PeerId, work: Work) -> WorkDone:
        if self.leaving:
            raise Leaving("this peer is leaving")
        step = await self._step(work.t, OPEN_WAIT_S if work.t <= self._newest_step() + 1 else 0.0)
        claim = step.ledger.claim(work.m)
        if claim is Claim.NEW:
            kept = await self._take(step, work)
        elif claim is Claim.DOING:
            kept = await step.jobs[work.m]
        elif (found := step.kept.get(work.m)) is None:
            job = step.jobs.get(work.m)  # a member that left handed it over: not added again
            kept = await (self._take(step, work) if job is None else job)
        else:
            kept = found
            if work.deepest > self.stage:
                await self._pass_on(step, work, kept)
        return kept.answer

    def _take(self, step: OpenStep, work: Work) -> Future[Kept]:
        job: Future[Kept] = self.future()
        step.jobs[work.m] = job
        self.news.some()
        if self._inflight >= self._max_inflight:
            self._end(step, work.m, admitted=False)
            job.fail(Busy("no more fit"))
            return job
        self._inflight += 1
        self._running_jobs += 1
        self.spawn(self._compute(step, work, job))
        return job

    async def _compute(self, step: OpenStep, work: Work, job: Future[Kept]) -> None:
        try:
            job.resolve(await (self._last(step, work) if self.is_last else self._middle(step, work)))
        except PeerFault as error:  # towards our caller, who can do nothing about it
            job.fail(NotReady(error.text, version=-1))
        except SwarmError as error:
            job.fail(error)
        finally:
            self._running_jobs -= 1
            self._end(step, work.m, admitted=True)

    def _end(self, step: OpenStep, m: int, *, admitted: bool) -> None:
        self._inflight -= admitted
        step.ledger.release(m)
        step.jobs.pop(m, None)
        if step.ledger.doing:
            self.news.some()
        else:
            self.news.urgent()

    async def _last(self, step: OpenStep, work: Work) -> Kept:
        began = self.clock.now

        def loss_backward() -> Kept:
            return self._backward(step, work, self._version_for(work.t), None, began)

        return await self.on_device(Rank.FORWARD, work.t, 2 * self._compute_s, loss_backward)

    async def _middle(self, step: OpenStep, work: Work) -> Kept:
        began = self.clock.now

        def forward() -> int:
            self._alive(step)
            return self._version_for(work.t)

        used = await self.on_device(Rank.FORWARD, work.t, self._compute_s, forward)
        onward = work._replace(route=work.route[1:], versions=(*work.versions, used))
        left_at = self.clock.now
        done = await self._call_next(step, onward)
        asked_at = began + self.clock.now - left_at

        def backward() -> Kept:
            return self._backward(step, work, used, done, asked_at)

        return await self.on_device(Rank.BACKWARD, work.t, self._compute_s, backward)

    def _version_for(self, t: int) -> int:
        """The weights that are here for step `t`; two versions live with delayed updates."""
        wanted = self.terms.weight_version(t)
        if wanted > self.version:
            raise NotReady(f"step {t} needs weights {wanted}", version=self.version)
        if wanted < self.version - self.terms.ahead:
            raise Stale(f"step {t} needs weights {wanted}", version=self.version)
        return wanted

    def _alive(self, step: OpenStep) -> None:
        if step.over:
            raise self._closed(step.t)

    def _backward(self, step: OpenStep, work: Work, used: int, done: WorkDone | None, began: float) -> Kept:
        """On the device: the gradient into the sum, and `m` into the ledger."""
        self._alive(step)
        behind: tuple[int, ...] = () if done is None else done.versions
        hops: tuple[Hop, ...] = () if done is None else done.hops
        versions = (used, *behind)
        wanted = self.terms.weight_version(work.t)
        self._checks.answered(self.name, work.t, work.m, (*work.versions, *versions), wanted)
        add = step.ledger.may_add(work.m)
        if add and self.breaks:
            self.breaks -= 1
            self.sums[work.t] = 0
            step.drop()
            self.say(lambda: f"a backward broke: the sum of step {work.t} is lost")
            raise NotReady("the sum was lost and starts again", version=self.version)
        own_s = max(0.0, self.clock.now - began)
        kept = Kept(work.versions, WorkDone(versions, (Hop(self.stage, self.name, own_s), *hops)))
        if add:
            self.sums[work.t] += one_hot(work.m)
            step.kept[work.m] = kept
            step.ledger.record(work.m)
            self.say(lambda: f"has {work.t, work.m}")
            self._point("backward")
        return kept

    def _pointless(self, step: OpenStep) -> SwarmError | None:
        if step.over:
            return self._closed(step.t)
        if self.leaving:
            bans, now = self.router.bans, self.clock.now
            if all(bans.resting(p, now=now) for p in self.router.peers(self.stage + 1)):
                return Leaving("leaving, and nobody of the next stage answers", retry_after_s=0.0)
        return None

    async def _pass_on(self, step: OpenStep, work: Work, kept: Kept) -> None:
        """A stage behind this one lost a microbatch that this one has: feed it again."""
        if work.m in step.jobs:
            await step.jobs[work.m]
            return
        job: Future[Kept] = self.future()
        step.jobs[work.m] = job

        def forward() -> int:
            self._alive(step)
            return self._version_for(work.t)

        try:
            used = await self.on_device(Rank.FORWARD, work.t, self._compute_s, forward)
            onward = work._replace(route=work.route[1:], versions=(*kept.versions, used))
            await self._call_next(step, onward)
            job.resolve(kept)
        except PeerFault as error:
            job.fail(NotReady(error.text, version=-1))
            raise NotReady(error.text, version=-1) from None
        except SwarmError as error:
            job.fail(error)
            raise
        finally:
            if step.jobs.get(work.m) is job:
                del step.jobs[work.m]

    # -- the next stage ---------------------------------------------------------------------------

    async def _call_next(self, step: OpenStep, work: Work) -> WorkDone:
        stage, router = self.stage + 1, self.router
        refusals: set[PeerId] = set()
        busy: set[PeerId] = set()
        while (reason := self._pointless(step)) is None:
            latest = self.directory.latest()
            if latest != self._seen:
                self._seen = latest
                router.set_peers(stage, self.directory.serving(stage))
            try:
                holder = await self._locate(work) if work.attempt > 0 or work.deepest >= 0 else None
                peer = holder if holder and holder not in refusals else self._choose(work, refusals | busy)
            except NoPeerForStage as nobody:
                busy.clear()
                await self.sleep(min(1.0, max(0.05, nobody.retry_at - self.clock.now)))
                continue
            began = self.clock.now
            try:
                done: WorkDone = await self.call(peer, "work", work, self._patience.limit_s)
            except PeerFault as fault:
                self.prober.failed(fault.peer)
                work = work._replace(attempt=work.attempt + 1)
            except NotNow as later:
                busy.add(peer)
                if not isinstance(later, Busy) or len(busy) >= len(router.peers(stage)):
                    await self.sleep(later.retry_after_s)
                    busy.clear()
            except Refused as refused:
                refusals.add(peer)
                if len(refusals) >= MOST_REFUSALS or len(router.peers(stage)) <= len(refusals):
                    raise Refused(f"stage {stage} refuses: {refused.text}") from None
            else:
                took_s = self.clock.now - began
                self._patience.answered(took_s)
                own_s = next((hop.own_s for hop in done.hops if hop.peer == peer), took_s)
                router.answered(stage, peer, own_s)
                return done
        raise reason

    def _choose(self, work: Work, exclude: set[PeerId]) -> PeerId:
        stage, now = self.stage + 1, self.clock.now
        suggested = work.route[0] if work.route and work.attempt == 0 else None
        known = suggested in self.router.peers(stage) and suggested not in exclude
        if suggested is not None and known and not self.router.bans.resting(suggested, now=now):
            return suggested
        return self.router.route(stage, now=now, exclude=exclude).peer

    async def _locate(self, work: Work) -> PeerId | None:
        now = self.clock.now
        peers = [p for p in self.router.peers(self.stage + 1) if not self.router.bans.resting(p, now=now)]
        asked = [(peer, self.call(peer, "locate", (work.t, work.m), LOCATE_S)) for peer in peers]
        found = None
        for peer, answer in asked:
            try:
                has = await answer
            except SwarmError:
                continue
            if has and found is None:
                found = peer
        return found

    # -- obeying ----------------------------------------------------------------------------------

    def _obey(self, brief: Brief) -> None:
        if self._catching_up or self.gone:
            return
        same_era = brief.era == self.era
        go = next((go for go in brief.goes if go.t == self.version), None)
        if same_era and go is not None:
            step = self.steps.get(self.version)
            if step is not None and step.held is not None and not step.over:
                self._catching_up = True
                self.spawn(self._take_step(go))
                return
        theirs = Standing(brief.era, brief.version)
        differs = brief.digest and self.digest and brief.digest != self.digest
        if theirs > self.standing or (theirs == self.standing and differs):
            self._catching_up = True
            self.spawn(self._catch_up(brief))
            return
        for wanted in brief.steps if same_era else ():
            step = self.steps.get(wanted.t)
            if step is not None and not step.over:
                self._obey_step(step, wanted)

    def _obey_step(self, step: OpenStep, wanted: StepBrief) -> None:
        if step.handing:
            return
        if wanted.adopt is not None:
            name, holders = wanted.adopt
            if step.held is None or step.held.round != name:
                sources = [p for p in holders if p != self.name]
                if sources and not self._finishes_itself(step, name):
                    self._begin(step, "fetch", self._fetch(step, name, sources))
        elif wanted.plan is not None and self.name in wanted.plan.members:
            if step.held is None and wanted.plan.round not in (step.failed_round, step.reducing):
                step.stop("reduce")
                step.reducing = wanted.plan.round
                step.reduce_began_s, step.adopt_told_s = self.clock.now, 0.0
                self._begin(step, "reduce", self._reduce(step, wanted.plan))
        elif step.held is None:
            if step.reducing:
                step.stop("reduce")
                step.reducing = ""
            if step.ledger.frozen_for is not None:
                self._begin(step, "thaw", self._thaw(step))
            elif wanted.undo:
                self._begin(step, "undo", self._undo(step, wanted.undo))

    def _finishes_itself(self, step: OpenStep, name: str) -> bool:
        running = step.work.get("reduce")
        if step.reducing != name or running is None or running.done:
            return False
        step.adopt_told_s = step.adopt_told_s or self.clock.now
        return self.clock.now < finishes_until_s(step.reduce_began_s, step.adopt_told_s)

    def _begin(self, step: OpenStep, kind: str, work: Coroutine[Any, None, None]) -> None:
        running = step.work.get(kind)
        if running is not None and not running.done:
            work.close()
            return
        task = self.spawn(work)
        step.work[kind] = task
        task.then(lambda _: self.news.urgent())

    async def _thaw(self, step: OpenStep) -> None:
        await step.stopped()
        await self.on_device(Rank.STEP, step.t, 0.0, step.ledger.thaw)

    async def _undo(self, step: OpenStep, twice: int) -> None:
        def subtract() -> None:
            if step.over or step.ledger.frozen_for is not None:
                return
            if twice & step.ledger.fixed:
                step.drop()
                self.sums[step.t] = 0
                return
            for m in members_of(twice & step.ledger.done):
                self.sums[step.t] -= one_hot(m)
                step.ledger.remove(m)
                del step.kept[m]
                self.undone += 1
                self.say(lambda m=m: f"undid {step.t, m}")

        await self.on_device(Rank.STEP, step.t, self._compute_s, subtract)

    # -- averaging --------------------------------------------------------------------------------

    async def _reduce(self, step: OpenStep, plan: Plan) -> None:
        def freeze() -> str | None:
            if step.over or step.handing:
                return "the step is over, or given away"
            why = rounds.check_plan(
                plan,
                run="sim",
                stage=self.stage,
                t=step.t,
                microbatches=self.terms.microbatches,
                numel=ELEMENTS,
                me=self.name,
                done=step.ledger.done,
            )
            if why is None:
                step.ledger.freeze(plan.round)
                self._point("frozen")
            return why

        why = await self.on_device(Rank.STEP, step.t, 0.0, freeze)
        reduced = None
        if why is None:
            reduced = await self._all_reduce(plan, step.t)
            why = "a member failed"
        if reduced is None:
            step.failed_round = plan.round
            self.say(lambda: f"round {plan.round[:6]} of step {step.t} is void: {why}")
            return
        if not step.over and step.held is None and step.ledger.frozen_for == plan.round:
            if not await self._complete(step, plan.round, reduced):
                return
            self.say(lambda: f"holds step {step.t} by round {plan.round[:6]}")
            self._point("prepared")

    async def _complete(
        self, step: OpenStep, name: str, reduced: tuple[int, ...], *, limit_s: float = math.inf
    ) -> bool:
        """Hold the stage's sum, once what another stage found of a shared weight is here; or False."""
        step.reduced = reduced
        other, part = self.terms.shares_with(self.stage), None
        until = self.clock.now + limit_s
        while other is not None and part is None:
            if step.over or self.clock.now >= until:
                return False
            for peer in self.directory.serving(other):
                try:
                    part = await self.call(peer, "shared", step.t, STATE_S)
                    break
                except SwarmError:
                    continue
            else:
                await self.sleep(SHARED_RETRY_S)
        if step.over:
            return False
        step.whole = complete(reduced, part)
        step.held = Held(name, sqnorm(self.terms, self.stage, step.whole), f"{hash(reduced):x}")
        return True

    def _serve_shared(self, caller: PeerId, t: int) -> int:
        """Of this stage's own sum the element that another stage shares."""
        step = self.steps.get(t)
        if step is not None and step.reduced is not None:
            return step.reduced[SHARED]
        if self._applied is not None and self._applied[0].t == t:
            return self._applied[1][SHARED]
        raise NotReady(f"the gradient of step {t} is not added up here", version=self.version)

    async def _all_reduce(self, plan: Plan, t: int) -> tuple[int, ...] | None:
        """The sums of all members added up, all of it or nothing. None: the round is void."""
        if plan.members == (self.name,):
            await self.sleep(0.001)
            return (self.sums.get(t, 0),) * ELEMENTS
        reduced = [self.sums.get(t, 0)] * ELEMENTS
        this = _Round(plan, t, reduced, set(range(ELEMENTS)), {}, self.future())
        self._rounds[plan.round] = this
        started, self._started = self._started, self.future()
        started.resolve(None)
        all_came: Future[None] = self.future()
        tasks: list[Task[None]] = []
        start = 0
        try:
            for owner, size in zip(plan.members, plan.parts, strict=True):
                if owner == self.name:
                    self._contribute(this, self.name, self._own(this))
                    tasks.append(self.spawn(self._own_part(this, start, size, all_came)))
                elif size:
                    tasks.append(self.spawn(self._exchange(this, owner, start, size, all_came)))
                start += size
            with contextlib.suppress(SwarmError):
                await all_came
        finally:
            for task in tasks:
                task.cancel()
            self._rounds.pop(plan.round, None)
            this.result.fail(NotReady("void: the round ended", version=t))
        return tuple(this.reduced) if whole(this) else None

    def _own(self, this: _Round) -> int | None:
        """What this member adds: nothing, if its ledger is empty."""
        if not dict(zip(this.plan.members, this.plan.ledgers, strict=True)).get(self.name):
            return None
        return self.sums.get(this.t, 0)

    def _contribute(self, this: _Round, member: PeerId, total: int | None) -> None:
        this.contributions[member] = total
        if len(this.contributions) == len(this.plan.members) and not this.result.done:
            # Our own sum is added where it lies: only its being frozen keeps it as it was.
            this.contributions[self.name] = self._own(this)
            this.result.resolve(sum(c for c in this.contributions.values() if c is not None))

    async def _own_part(self, this: _Round, start: int, size: int, all_came: Future[None]) -> None:
        if size:
            self._part_came(this, start, size, await this.result, all_came)
        elif whole(this):
            all_came.resolve(None)

    async def _exchange(
        self, this: _Round, owner: PeerId, start: int, size: int, all_came: Future[None]
    ) -> None:
        for _ in range(NOT_READY_RETRIES):
            try:
                await self.sleep(self._dice.between(0.0, SEND_S))  # one chunk after the other
                part = Part(this.plan.round, start, self._own(this))
                total = await self.call(owner, "part", part, PART_S)
            except NotReady as later:
                if "void" in later.text:
                    all_came.fail(later)
                    return
                await self.sleep(later.retry_after_s)
            except SwarmError as error:
                all_came.fail(error)
                return
            else:
                self._point("part")
                self._part_came(this, start, size, total, all_came)
                return
        all_came.fail(NotReady("never ready", version=this.t))

    @staticmethod
    def _part_came(this: _Round, start: int, size: int, total: int, all_came: Future[None]) -> None:
        for element in range(start, start + size):
            this.reduced[element] = total
            this.missing.discard(element)
        if whole(this):
            all_came.resolve(None)

    async def _serve_part(self, caller: PeerId, part: Part) -> int:
        until = self.clock.now + START_WAIT_S
        while part.round not in self._rounds:
            left_s = until - self.clock.now
            if left_s <= 0:
                raise NotReady("this round is not open here", version=-1)
            await self.within(self._started, left_s)
        this = self._rounds[part.round]
        if caller not in this.plan.members:
            raise Refused("not a member of this round")
        if not this.result.done:
            self._contribute(this, caller, part.total)
        return await this.result

    # -- adopting, stepping, catching up ----------------------------------------------------------

    def _serve_vector(self, caller: PeerId, question: tuple[int, str]) -> Vector:
        t, name = question
        step = self.steps.get(t)
        if step is not None and step.held is not None and step.reduced and name in ("", step.held.round):
            return Vector(step.reduced, step.held, None)
        if self._applied is not None and self._applied[0].t == t:
            go, reduced, held = self._applied
            return Vector(reduced, held, go)
        raise NotReady(f"no reduced gradient of step {t} is held here", version=self.version)

    async def _fetch(self, step: OpenStep, name: str, sources: Sequence[PeerId]) -> None:
        for source in sources:
            try:
                found: Vector = await self.call(source, "held", (step.t, name), STATE_S)
            except PeerFault:
                self.prober.failed(source)
            except SwarmError:
                continue
            else:
                if not step.over:
                    step.stop("reduce")
                    await self._hold(step, found)
                return

    async def _hold(self, step: OpenStep, found: Vector, *, limit_s: float = math.inf) -> None:
        """A mate's result is the result."""

        def freeze() -> None:
            step.ledger.freeze(found.held.round)

        await self.on_device(Rank.STEP, step.t, 0.0, freeze)
        if await self._complete(step, found.held.round, found.reduced, limit_s=limit_s):
            self.say(lambda: f"adopted step {step.t}")

    async def _take_step(self, go: Go) -> None:
        try:
            await self._apply(go)
            every = self.terms.checkpoint_every
            if every and self.version % every == 0:
                saved = self.weights
                await self.sleep(self._dice.between(0.01, 0.5))
                self._shelf.saved[self.stage][saved.version] = saved
        finally:
            self._catching_up = False

    async def _catch_up(self, brief: Brief) -> None:
        try:
            if await self._catch_up_to(brief):
                return
            if self.council.behind_s > LOST_S:
                await self._bring_back(self.council.run_standing, self.council.behind_s)
            else:
                await self.sleep(RETRY_JOIN_S)
        finally:
            self._catching_up = False

    async def _catch_up_to(self, brief: Brief) -> bool:
        sources = [p for p in brief.sources if p != self.name]
        goal = Standing(brief.era, brief.version)
        if eras.is_one_step(self.standing, goal) and self.version in self.steps:
            for source in sources:
                if await self._one_step(source):
                    return True
        if sources and await self._download(sources):
            return True
        return goal.era > self.era and goal.version == goal.era.start and await self._enter(goal.era)

    async def _catch_up_with(self, mates: dict[PeerId, Standing]) -> bool:
        if eras.is_one_step(self.standing, max(mates.values())) and self.version in self.steps:
            for mate, standing in mates.items():
                if standing > self.standing and await self._one_step(mate):
                    return True
        return await self._download(list(mates))

    async def _one_step(self, source: PeerId) -> bool:
        step = self.steps[self.version]
        try:
            found: Vector = await self.call(source, "held", (step.t, ""), STATE_S)
        except SwarmError:
            return False
        if found.go is None:
            return False
        await self._hold(step, found, limit_s=SHARED_S)
        if step.held is None:
            return False
        await self._apply(found.go)
        return True

    def _serve_state(self, caller: PeerId, question: None) -> Future[tuple[Era, Weights, Go | None]]:
        if not self.joined:
            raise NotReady("this peer is joining itself", version=-1, retry_after_s=1.0)

        def snapshot() -> tuple[Era, Weights, Go | None]:
            return self.era, self.weights, self.goes.get(self.version - 1)

        return self.on_device(Rank.STEP, self.version, 0.005, snapshot)

    async def _download(self, sources: Sequence[PeerId]) -> bool:
        for source in sources:
            if self.router.bans.resting(source, now=self.clock.now):
                continue
            try:
                era, weights, go = await self.call(source, "state", None, STATE_S)
                self._point("joining")
                await self.call(source, "chunk", None, STATE_S)
                await self._load(Standing(era, weights.version), weights)
            except PeerFault:
                self.prober.failed(source)
            except SwarmError:
                continue
            else:
                if go is not None:
                    self.goes[go.t] = go
                return True
        return False

    # -- when the whole stage was lost ------------------------------------------------------------

    async def _enter(self, era: Era) -> bool:
        """Go back to the start of an era."""
        if self.version == era.start:
            self._enter_here(era)
            return True
        return await self._get(Standing(era, era.start))

    async def _bring_back(self, run: Standing, waited_s: float) -> bool:
        """Give the run a state of this stage that it can go on from."""
        await self.sleep(self._dice.between(0.05, 1.0))  # asking everybody what they have
        have = self._saved()
        self.say(lambda: f"brings stage {self.stage} back for {run}; saved are {have}")
        goal, wait_s = eras.way_back(
            self.stage, self.terms.stages, run, have, waited_s=waited_s,
            checkpoint_every=self.terms.checkpoint_every, steps=self.terms.steps,
        )  # fmt: skip
        if wait_s > 0:
            return False
        return await (self._get(run) if goal == run else self._enter(goal.era))

    async def _get(self, goal: Standing) -> bool:
        await self.sleep(self._dice.between(0.05, 0.5))
        found = self._shelf.of(self.stage).get(goal.version)
        if found is None and goal.version == 0:
            found = initial(self.stage)
        if found is None:
            return False
        await self._load(goal, found)
        return True

    # -- handing over -----------------------------------------------------------------------------

    async def _give_all(self, until: float) -> None:
        for t in sorted(self.steps):
            step = self.steps.get(t)
            if step is not None:
                await self._give_step(step, until)

    async def _give_step(self, step: OpenStep, until: float) -> None:
        dead: set[PeerId] = set()
        while self.clock.now < until and not step.over and step.ledger.done:
            mates = [p for p in self.directory.serving(self.stage) if p != self.name and p not in dead]
            if not mates:
                return
            if step.held is not None or step.reducing or step.ledger.frozen_for is not None:
                await self.sleep(HAND_LOOK_S)
                continue
            step.handing = True
            self.news.urgent()
            try:
                await self._give(step, mates[0])
                return
            except PeerFault:
                dead.add(mates[0])
                continue
            except SwarmError:
                pass  # its step is being averaged, or it is leaving as well
            finally:
                step.handing = False
                self.news.urgent()
            await self.sleep(HAND_PAUSE_S)

    async def _give(self, step: OpenStep, mate: PeerId) -> None:
        done = step.ledger.done
        overlap: int = await self.call(mate, "offer", (self.era, step.t, done), HAND_CALL_S)
        if overlap:
            await self._undo(step, overlap & done)

        def freeze() -> tuple[int, int]:
            if step.over or step.ledger.frozen_for is not None:
                raise NotNow("the step is being averaged")
            step.ledger.freeze("handing over")
            self._point("handing")
            return self.sums[step.t], step.ledger.done

        total, done = await self.on_device(Rank.STEP, step.t, 0.0, freeze)
        try:
            with contextlib.suppress(PeerFault):  # it may have it: it counts there, else it is run again
                await self.call(mate, "take", (self.era, step.t, done, total), HAND_CALL_S)
        except SwarmError:
            await self.on_device(Rank.STEP, step.t, 0.0, step.ledger.thaw)
            raise

        def drop() -> None:
            step.drop()
            if not step.over:
                self.sums[step.t] = 0

        await self.on_device(Rank.STEP, step.t, 0.0, drop)
        self.say(lambda: f"handed {done:b} of step {step.t} to {mate}")

    def _step_for(self, t: int) -> OpenStep:
        step = self.steps.get(t)
        if step is None or not self.joined:
            raise NotNow(f"step {t} is not open here")
        return step

    def _serve_offer(self, caller: PeerId, offer: tuple[Era, int, int]) -> int:
        era, t, done = offer
        step = self._step_for(t)
        if era != self.era:
            raise NotNow("this peer is in another era")
        if step.held is not None or step.ledger.frozen_for is not None or step.handing:
            raise NotNow("the step is being averaged here")
        return done & step.ledger.done

    async def _serve_take(self, caller: PeerId, take: tuple[Era, int, int, int]) -> None:
        era, t, done, total = take
        step = self._step_for(t)
        if era != self.era:
            raise NotNow("this peer is in another era")

        def add() -> None:
            if step.over or step.held is not None or step.ledger.frozen_for is not None or step.handing:
                raise NotNow("the step is being averaged here")
            if step.ledger.done & done:
                raise NotNow("some of it was computed here meanwhile")
            self.sums[t] += total
            step.ledger.take_over(done)

        await self.on_device(Rank.STEP, t, 0.001, add)
        self.news.urgent()
