"""A stage peer: serve, accumulate, average, step.

    joins        takes the state of its stage from a mate, or starts at version 0
    serves       microbatches (`peers.work`) and those who missed something (`peers.state_server`)
    reports      its ledger (`peers.council`), and does what the briefs say: `_obey`
    leaves       finishes what is in flight, withdraws

Knows ports only: the same class runs over libp2p and in memory.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from peers import events
from peers.asking import ask_status
from peers.catchup import CatchUp
from peers.choose import planning_job
from peers.core import StageCore
from peers.council import Council
from peers.device_thread import Rank
from peers.disk import checkpoint
from peers.disk.saver import Saver
from peers.disk.shelf import Shelf
from peers.downstream import NextStage
from peers.faultpoints import fault_point
from peers.handover import HandOver
from peers.lines import LineProber
from peers.ports import Answer, Directory, Line, Request, Transport
from peers.probe import Prober
from peers.reduce import AllReduce, RoundVoid
from peers.roll import Roll
from peers.saved import is_keeper
from peers.sharing import Sharing
from peers.state_server import Snapshot, StateServer
from peers.steps import OpenStep, audit
from peers.sync import fetch_gradient
from peers.waiting import happens, unless
from peers.whereabouts import Whereabouts
from peers.work import WorkDesk
from swarm.errors import DeviceHangs, PeerFault, Refused, SetupError, SwarmError
from swarm.ids import Microbatch, PeerId, Stage, Standing
from swarm.model.stage import StageCompute, SumLost
from swarm.plan.advice import Advice
from swarm.plan.network import Job
from swarm.plan.places import Place
from swarm.policy.bans import Bans
from swarm.policy.eras import Join, join_by, may_leave
from swarm.policy.ledger import from_bytes, members_of
from swarm.policy.rebalance import Moves, Stay, is_due, rebalance
from swarm.policy.rounds import Go, Plan, check_plan, finishes_until_s
from swarm.policy.router import Router
from swarm.records import NO_STAGE, PeerRecord
from swarm.run import Run
from swarm.wire.messages import (
    AskStatus,
    Brief,
    LinkStatus,
    PeerStatus,
    PlanWire,
    StepBrief,
    check_run,
    pack,
    unpack,
)

ANNOUNCE_S = 5.0
"""A record lives a few times longer than this in the DHT."""
RETRY_JOIN_S = 0.5
LOST_S = 6.0
"""A stage without anybody who has its weights is taken for lost after this: mates may be cut off shortly."""
LOOK_S = 1.0
BOUNDARY_S = 10.0
"""A peer that moves goes without a step boundary after this: perhaps the run waits for its coming."""
HUNG_S = 600.0
HUNG_TIMES = 20.0
"""A job of the device that takes so many times the longest one before it, and `HUNG_S`, will never end."""
OWNER_S, OWNER_TIMES, OWNER_MOST_S = 30.0, 2.0, 90.0
"""The same once the peer leaves or pauses, and the most of it: what waits then is the owner."""
MOST_WORDS = 400
MOST_ASKED = 16
"""Peers that a joiner asks how far they are, its mates first."""
MOST_LINKS_TOLD = 64
"""In one status: 6 kB."""


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Where this peer saves its stage, and how many steps are kept there."""

    folder: Path
    keep: int = 2


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """What a peer decides for itself."""

    max_inflight: int = 4
    device_name: str = "cpu"
    addresses: tuple[str, ...] = ()
    checkpoints: Checkpoints | None = None
    movable: bool = False
    """It may be sent to another stage that needs it more."""
    leave_within_s: float = 25.0
    """Finishing and handing over may take this long; a cloud's notice is 30 s."""
    pause_within_s: float = 5.0
    """The same before a pause: the owner waits for the device."""
    joined_at: float = field(default_factory=time.time)
    place: Place | None = None
    """Where it is on the internet, if that was measured already."""


def longest_job_s(before_s: float, *, owner_waits: bool) -> float:
    """How long a job of a device may take whose longest one took `before_s`."""
    if owner_waits:
        return min(OWNER_MOST_S, max(OWNER_S, OWNER_TIMES * before_s))
    return max(HUNG_S, HUNG_TIMES * before_s)


class StagePeer:
    """Serves `stage` of `run` until told to leave or to pause."""

    def __init__(
        self,
        run: Run,
        stage: Stage,
        compute: StageCompute,
        transport: Transport,
        directory: Directory,
        settings: StageSettings,
        emit: Callable[[events.Event], None],
        *,
        kept: Snapshot | None = None,
    ) -> None:
        """`kept`: of the pause that it comes back from."""
        self._run, self.stage, self._settings, self._emit = run, stage, settings, emit
        self._transport, self._directory = transport, directory
        self.core = StageCore(run, stage, transport.peer_id, compute, emit)
        self.router = Router(Bans(probed=True))
        self._lines = LineProber(run.id, transport, directory, random.Random())
        self._whereabouts = Whereabouts(transport.peer_id, transport, settings.place)
        self._job: Job | None = None
        self._prober = Prober(run.id, transport, directory, self.router.bans)
        next_stage = None
        if stage < run.S - 1:
            next_stage = NextStage(stage + 1, transport, directory, self.router, on_fault=self._fault)
        roll = Roll(directory)
        self.desk = WorkDesk(self.core, transport, roll, next_stage, max_inflight=settings.max_inflight)
        self.all_reduce = AllReduce(
            run.id, transport.peer_id, transport, run.codec.reduce, compute.sum_dtype, compute.settle,
            compute.sqnorm,
        )
        checkpoints = settings.checkpoints
        self.shelf = Shelf(run, stage, None if checkpoints is None else checkpoints.folder)
        self._saver = (
            Saver(checkpoints.folder, run, stage, keep=checkpoints.keep, emit=emit) if checkpoints else None
        )
        self.council = Council(
            self.core, transport, directory, roll, self.router.bans,
            obey=self._obey, bandwidth=lambda: self.all_reduce.bandwidth_bps,
            since_s=settings.joined_at,
        )  # fmt: skip
        self._sharing = Sharing(self.core, transport, directory, self.router.bans)
        self._catchup = CatchUp(
            self.core, transport, directory, self.shelf, self.router.bans, self._sharing, emit
        )
        self._handover = HandOver(self.core, transport, directory, roll, self._undo)
        self._states = StateServer(self.core, transport, self.shelf)
        transport.serve("status", self._serve_status)
        self._leaving = asyncio.Event()
        self._owner_waits = False
        """It leaves or pauses by its owner's wish. Who moves has as much time as who serves."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._catching_up = False
        self._state = "joining"
        self._going = False
        """It is about to move: nobody may rely on its staying."""
        self._failure: SetupError | None = None
        self._stepped = asyncio.Event()
        self._lost_at: Standing | None = None
        """Where the run was when this stage was last said to be lost."""
        self._decided = ""
        self.moving_to: Stage | None = None
        """The stage that this device serves next, once `run` has returned."""
        self.paused = False
        """`run` returned, or is about to, for a pause: the place is kept."""
        self.has_joined = False
        """It has, or had, the weights of its stage."""
        self.kept = kept
        """The state for the time after a pause, in host memory; None while the device has it."""
        self.alone = False
        """When it paused, nobody else served its stage: the run stands still."""
        self._first_version = 0
        self._rehearsed_s = self._rehearsals_s = 0.0
        """What a microbatch took before there was any; all of the device's time that went into that."""

    # -- life -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Join, serve, and return after `leave`.

        Cancelled, it waits for no job of the device.

        Raises:
            DeviceHangs: what it leaves behind is lost to this process.
        """
        self.core.device.start()
        watch = asyncio.create_task(self._watch_device())
        loops: list[asyncio.Task[object]] = []
        try:
            await self._announce()
            self._spawn(self._rehearse())
            leaving = asyncio.create_task(self._leaving.wait())
            loops = [asyncio.create_task(self._join()), leaving]
            await asyncio.wait([*loops, watch], return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                watch.result()
            if not loops[0].done():
                return  # a download may take hours, and what it waits for may never come
            loops.pop(0).result()
            self._state = "serving"
            await self._announce()
            self._emit(
                events.Serving(
                    peer=self.core.me, stage=self.stage, version=self.core.version,
                    device=self._settings.device_name, max_inflight=self.desk.max_inflight,
                )
            )  # fmt: skip
            often = [
                self.council.run(), self._prober.run(), self._lines.run(), self._announce_often(),
                self._bring_back_often(),
            ]  # fmt: skip
            if self._run.rebalance_every_s:
                often.append(self._rebalance_often())
            loops += [asyncio.create_task(loop) for loop in often]
            done, _ = await asyncio.wait([*loops, watch], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a bug in a loop ends the peer, with its traceback
            self._state = "leaving"
            await self._announce()
            if self._failure is not None:
                raise self._failure
            await unless(watch, self._leave_well())
        except asyncio.CancelledError:
            self.core.device.abandoned = True
            raise
        finally:
            await self._end(watch, loops)

    async def _end(self, watch: asyncio.Task[None], loops: Sequence[asyncio.Task[object]]) -> None:
        """Stop all that is under way, then the device.

        Raises:
            DeviceHangs: it hung before, or does now.
        """
        device = self.core.device
        joined, self.core.joined = self.core.joined, False
        self._state = "left"  # a brief that still comes must not start what nobody would end
        for task in [*loops, *self._tasks]:
            task.cancel()
        self.desk.stop()
        try:
            await self.council.close()
            await asyncio.gather(*loops, *self._tasks, return_exceptions=True)
            if watch.done():
                watch.result()  # perhaps nobody heard it yet
            if not device.abandoned:
                await unless(watch, self._end_device(keep=joined))
        except asyncio.CancelledError:
            device.abandoned = True
            raise
        finally:
            watch.cancel()
            if device.abandoned or not self.paused:
                await self._directory.withdraw()
            self.core.close()
            if not device.abandoned and (self.paused or self.moving_to is not None):
                self.core.free()

    async def _leave_well(self) -> None:
        """What was promised to others is done, or handed to them."""
        within_s = self._settings.pause_within_s if self.paused else self._settings.leave_within_s
        until = time.monotonic() + within_s
        await asyncio.gather(self.desk.drain(limit_s=within_s / 2), self._look_for_a_mate())
        await self._handover.give_all(limit_s=until - time.monotonic())
        await self._leave_the_version(until)
        await self.council.farewell()
        self._emit(
            events.Contributed(
                microbatches=self.core.computed, steps=max(0, self.core.version - self._first_version)
            )
        )
        stays = self.paused or self.moving_to is not None  # the process does, and its thread
        if self._saver is not None and not stays:
            await self._saver.close(until - time.monotonic())

    async def _end_device(self, *, keep: bool) -> None:
        """Wait for the running job, so that `close` need not; before a pause the state is kept."""
        if self.paused and keep and self.moving_to is None:
            self.kept = await self._states.snapshot()
        else:
            await self.core.device.run(Rank.STEP, 0, lambda: None)

    async def _leave_the_version(self, until: float) -> None:
        """Wait until a mate that stays has our weights: two that leave after a step would take them along."""
        while time.monotonic() < until:
            told = await self._ask_status(self.core.mates(self._directory.at(self.stage)))
            stay = [status.standing for status in told.values() if status.state == "serving"]
            if may_leave(self.core.standing, stay):
                return
            await asyncio.sleep(RETRY_JOIN_S)

    def leave(self) -> None:
        """Finish what is in flight, then end `run`. It goes before a pause that is under way."""
        self.paused, self._owner_waits = False, True
        self._stop()

    def pause(self) -> None:
        """As `leave`, but sooner, and the place and the state are kept. Nothing once it leaves or pauses."""
        self._owner_waits = True
        if not self._leaving.is_set():
            self.paused = True
            self._stop()

    def _stop(self) -> None:
        self.core.leave()
        self._leaving.set()

    async def _look_for_a_mate(self) -> None:
        """Whether the run goes on while this peer pauses (I6): its owner comes first, but it is said."""
        self.alone = self.paused and not await self._has_a_mate(going=set())
        if self.alone:
            self._emit(
                events.Trouble(
                    text=f"nobody else serves stage {self.stage}: the run stands still until this peer "
                    f"resumes, or another takes its state of version {self.core.version}, which it gives out"
                )
            )

    async def _announce(self) -> None:
        core, speed, where = self.core, self._speed(), self._whereabouts
        where.look(self._directory.find)
        record = PeerRecord(
            peer=core.me, run=self._run.id, stage=self.stage, state=self._state, version=core.version,  # type: ignore[arg-type]
            speed=speed, load=core.device.mean_queue(), state_bytes=core.compute.state_bytes,
            bandwidth_bps=self.all_reduce.bandwidth_bps, movable=self._settings.movable,
            max_inflight=self.desk.max_inflight, device=self._settings.device_name,
            addresses=self._settings.addresses, since=self._settings.joined_at,
            place=where.place.numbers() if where.place != Place() else (),
            widest_bps=where.widest_bps, in_flight_bytes=where.in_flight_bytes,
        )  # fmt: skip
        await self._directory.announce(record)

    def _speed(self) -> float:
        """Microbatches per second of the device when it is busy; 0 before anything is known."""
        core = self.core
        busy_s = core.device.busy_s - self._rehearsals_s
        if core.computed and busy_s > 0:
            return core.computed / busy_s
        return 1.0 / self._rehearsed_s if self._rehearsed_s > 0 else 0.0

    async def _rehearse(self) -> None:
        """Find out how fast the device is on this stage, for those who plan, before there is work.

        A backward takes as long as two forwards.
        """

        def twice() -> tuple[float, float]:
            began = time.perf_counter()
            self.core.compute.rehearse()
            warm = time.perf_counter()  # the first one pays for warming up
            self.core.compute.rehearse()
            ended = time.perf_counter()
            return 3 * (ended - warm), ended - began

        self._rehearsed_s, self._rehearsals_s = await self.core.device.run(Rank.IDLE, 0, twice)

    async def _announce_often(self) -> None:
        while True:
            await asyncio.sleep(ANNOUNCE_S)
            await self._announce()

    def _fault(self, fault: PeerFault) -> None:
        self._emit(events.PeerLost(peer=fault.peer, stage=self.stage + 1, why=fault.text))

    def peer_gone(self, peer: PeerId) -> None:
        """The transport noticed that the connection to `peer` broke."""
        self.council.lost(peer)
        self._states.desk.gone(peer)

    # -- joining ----------------------------------------------------------------------------------

    async def _join(self) -> None:
        """Get the weights of the stage: from mates, from a checkpoint, or version 0 from the seed."""
        core = self.core
        lost_since: float | None = None
        if self.kept is not None:
            await core.load(Standing(self.kept.era, self.kept.version), self.kept.tensors)
            core.remember(self.kept.last_go)
        records = await self._directory.survey()
        if await self._resume(records):
            records = await self._directory.refresh()
        while True:
            others = [r for r in records if r.peer != core.me and r.state in ("serving", "joining")]
            told = {peer: status.standing for peer, status in (await self._ask_status(others)).items()}
            mates = [
                r.peer for r in others if r.stage == self.stage and r.state == "serving" and r.peer in told
            ]
            run = max(told.values(), default=Standing())
            by = join_by(core.standing, [told[mate] for mate in mates], run)
            if by is Join.SERVE:
                break
            if by is Join.DOWNLOAD and await self._catchup.join({mate: told[mate] for mate in mates}):
                break
            if by is Join.LOST:
                if lost_since is None:
                    lost_since = time.monotonic()
                    self._emit(events.StageLost(stage=self.stage, version=run.version))
                waited_s = time.monotonic() - lost_since
                if waited_s > LOST_S and await self._catchup.bring_back(run, waited_s=waited_s):
                    break
            await asyncio.sleep(RETRY_JOIN_S)
            records = await self._directory.refresh()
        await core.open_steps()
        self._first_version = core.version
        self.kept = None
        self.has_joined = core.joined = True
        await core.refresh_digest()
        await core.open_steps()

    async def _ask_status(self, records: Sequence[PeerRecord]) -> dict[PeerId, PeerStatus]:
        """What those peers say of themselves; of very many, the mates and the furthest."""
        asked = sorted(records, key=lambda r: (r.stage != self.stage, -r.version, r.peer))[:MOST_ASKED]
        return await ask_status(self._run, self._transport, [record.peer for record in asked])

    async def _resume(self, records: Sequence[PeerRecord]) -> bool:
        """Start from a checkpoint of our folder; or, where nobody serves the run, from what others saved.

        Whether that took a while: `records` are old then.
        """
        saved = self._settings.checkpoints
        if saved is not None:
            step = await asyncio.to_thread(checkpoint.newest_common_step, saved.folder, self._run)
            if step is not None and step > self.core.version:
                tensors, _ = await asyncio.to_thread(
                    checkpoint.load, saved.folder, self._run, self.stage, step
                )
                await self.core.load(Standing(self.core.era, step), tensors)
                self._say_resumed()
                return True
        mine = await asyncio.to_thread(self.shelf.versions)
        until = time.monotonic() + LOST_S
        while time.monotonic() < until:  # those of other stages come a moment later, with their disks
            if not mine and not any(map(is_keeper, records)):
                return False
            serving = [r for r in records if r.state == "serving" and r.peer != self.core.me]
            if await self._ask_status(serving):
                return True
            resumed = await self._catchup.resume()
            if resumed:
                self._say_resumed()
            if resumed or resumed is None:
                return True
            await asyncio.sleep(RETRY_JOIN_S)
            records = await self._directory.survey()
        return True

    def _say_resumed(self) -> None:
        text = f"stage {self.stage} resumes from the checkpoint of version {self.core.version}"
        self._emit(events.Note(text=text))

    # -- obeying ----------------------------------------------------------------------------------

    def _obey(self, brief: Brief) -> None:
        """Do what a brief says that is not done or under way. Idempotent: briefs repeat."""
        core = self.core
        if self._catching_up or self._state == "left":
            return
        same_era = brief.era == core.era
        go = next((go for go in brief.goes if go.t == core.version), None)
        if same_era and go is not None:
            step = core.steps.get(core.version)
            if step is not None and step.held is not None and not step.over:
                self._catching_up = True
                self._spawn(self._take_step(Go(go.t, go.total_sqnorm)))
                return
        theirs = Standing(brief.era, brief.version)
        differs = brief.digest and core.digest and brief.digest != core.digest
        if theirs > core.standing or (theirs == core.standing and differs):
            self._catching_up = True
            self._spawn(self._catch_up(brief))
            return
        for wanted in brief.steps if same_era else ():
            step = core.steps.get(wanted.t)
            if step is not None and not step.over:
                self._obey_step(step, wanted)

    def _obey_step(self, step: OpenStep, wanted: StepBrief) -> None:
        if step.handing:
            return
        if wanted.adopt is not None:
            if step.held is None or step.held.round != wanted.adopt.round:
                sources = [p for p in wanted.adopt.sources if p != self.core.me]
                if sources and not self._finishes_itself(step, wanted.adopt.round):
                    self._start(step, "fetch", self._fetch(step, wanted.adopt.round, sources))
        elif wanted.plan is not None and self.core.me in wanted.plan.members:
            if step.held is None and wanted.plan.round not in (step.failed_round, step.reducing):
                step.stop("reduce")
                step.reducing = wanted.plan.round
                step.reduce_began_s, step.adopt_told_s = time.monotonic(), 0.0
                self._start(step, "reduce", self._reduce(step, wanted.plan))
        elif step.held is None:
            if step.reducing:
                step.stop("reduce")
                step.reducing = ""
            if step.ledger.frozen_for is not None:
                self._start(step, "thaw", self._thaw(step))
            elif wanted.undo and any(wanted.undo):
                self._start(step, "undo", self._undo_told(step, wanted.undo))

    def _finishes_itself(self, step: OpenStep, round_name: str) -> bool:
        """A mate holds the result, but our own reduce of that round is about to end as well."""
        running = step.work.get("reduce")
        if step.reducing != round_name or running is None or running.done():
            return False
        if step.completing:
            return True  # all that is missing are other stages' parts, which no mate's sum has
        now = time.monotonic()
        step.adopt_told_s = step.adopt_told_s or now
        return now < finishes_until_s(step.reduce_began_s, step.adopt_told_s)

    def _start(self, step: OpenStep, kind: str, work: Awaitable[None]) -> None:
        """Run `work` unless the same kind of work already runs for this step."""
        running = step.work.get(kind)
        if running is not None and not running.done():
            work.close()  # type: ignore[attr-defined]
            return
        step.work[kind] = self._spawn(work)

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            assert error is not None
            if isinstance(error, SetupError):
                self._failure = error  # the run diverged: nothing that this peer does can help
                self._leaving.set()
            elif isinstance(error, torch.AcceleratorError):
                # Nothing works on that device any more in this process.
                self._failure = SetupError(f"the device of stage {self.stage} failed: {str(error)[:300]}")
                self._leaving.set()
            elif isinstance(error, SwarmError):
                self._emit(events.Note(text=f"stage {self.stage}: {error.text}"))
            else:
                asyncio.get_running_loop().call_exception_handler(
                    {"message": "a stage peer's task failed", "exception": error, "task": task}
                )
        self.core.news.urgent()

    # -- averaging --------------------------------------------------------------------------------

    async def _reduce(self, step: OpenStep, wire: PlanWire) -> None:
        """Freeze the sum for this round, reduce it with the others, hold the result."""
        core, m = self.core, self._run.M
        try:
            ledgers = tuple(from_bytes(ledger, m) for ledger in wire.ledgers)
        except ValueError as error:
            raise Refused(f"a plan with an impossible ledger: {error}") from None
        plan = Plan(wire.round, wire.number, wire.members, ledgers, wire.parts)

        def freeze() -> tuple[str | None, torch.Tensor | None]:
            if step.over or step.handing:
                return "the step is over" if step.over else "it leaves, and hands over its sum", None
            why = check_plan(
                plan, run=self._run.id, stage=self.stage, t=step.t, microbatches=m,
                numel=core.compute.numel, me=core.me, done=step.ledger.done,
            )  # fmt: skip
            if why is not None:
                return why, None
            step.ledger.freeze(plan.round)
            total = core.compute.sum(step.t)
            return None, total.cpu() if total.is_cuda else total

        try:
            why, total = await core.device.run(Rank.STEP, step.t, freeze)
            if total is None:
                raise RoundVoid(f"this peer does not take part: {why}")
            reduced, held = await self.all_reduce.run(plan, step.t, total)
            if not step.over and step.held is None and step.ledger.frozen_for == plan.round:
                step.audited = audit(plan, m, 0)
                await self._sharing.hold(step, reduced, held)
                fault_point("prepared")
        except RoundVoid as void:
            step.failed_round = plan.round
            self._emit(events.RoundVoid(stage=self.stage, t=step.t, why=void.text))
        except Exception:
            # No memory, perhaps. Said, or the coordinator would wait for this round for ever.
            step.failed_round = plan.round
            raise

    async def _thaw(self, step: OpenStep) -> None:
        """Open the sum again, once nobody can be handed a mixture of before and after."""
        await step.stopped()
        await self.core.device.run(Rank.STEP, step.t, step.ledger.thaw)

    async def _fetch(self, step: OpenStep, round_name: str, sources: list[PeerId]) -> None:
        """Take the reduced gradient from a mate that holds it."""
        for source in sources:
            try:
                reduced, held, _ = await fetch_gradient(
                    self.core, self._transport, source, step.t, round_name
                )
            except PeerFault as fault:
                self.router.failed(source, now=time.monotonic())
                self._emit(events.PeerLost(peer=source, stage=self.stage, why=fault.text))
            except SwarmError:
                continue
            else:
                if not step.over:
                    step.stop("reduce")
                    await self.core.device.run(Rank.STEP, step.t, step.ledger.freeze, held.round)
                    await self._sharing.hold(step, reduced, held)
                return

    async def _undo_told(self, step: OpenStep, bitmap: bytes) -> None:
        try:
            twice = from_bytes(bitmap, self._run.M)
        except ValueError as error:
            raise Refused(f"an impossible undo: {error}") from None
        await self._undo(step, twice)

    async def _undo(self, step: OpenStep, twice: int) -> None:
        """Take duplicates out of our sum: run their backward again and subtract."""
        core = self.core

        def subtract() -> int:
            count = 0
            if step.over or step.ledger.frozen_for is not None:
                return 0
            if twice & step.ledger.fixed:
                # It came with the sum of a member that left, and cannot be told apart any more.
                core.drop_sum(step)
                return 0
            for m in members_of(twice & step.ledger.done):
                kept = step.kept[m]
                try:
                    core.compute.subtract(Microbatch(step.t, m), kept.inputs, kept.grads_out)
                except SumLost:
                    step.drop()
                    raise
                step.ledger.remove(m)
                del step.kept[m]
                count += 1
            return count

        count = await core.device.run(Rank.STEP, step.t, subtract)
        if count:
            core.undone += count
            self._emit(events.Undone(stage=self.stage, t=step.t, count=count))

    # -- stepping ---------------------------------------------------------------------------------

    async def _take_step(self, go: Go) -> None:
        try:
            step = self.core.steps.get(go.t)
            mine = step.ledger.done.bit_count() if step is not None else 0
            audited = step.audited if step is not None else None
            await self.core.apply(go)
            self._stepped.set()
            self._emit(
                events.Stepped(
                    stage=self.stage, t=go.t, microbatches=mine,
                    missing=None if audited is None else audited.missing,
                    duplicated=None if audited is None else audited.duplicated,
                )
            )  # fmt: skip
            await self._save()
            if self.core.finished:
                text = f"all {self._run.steps} steps are taken; giving out the weights until Ctrl-C"
                self._emit(events.Note(text=text))
        finally:
            self._catching_up = False

    async def _save(self) -> None:
        """Copy the state, and have it written beside the training; or kept in memory, for keepers."""
        every, version = self._run.checkpoint_every, self.core.version
        if not (version == self._run.steps or (every and version % every == 0)):
            return
        pinned = not self.shelf.on_disk and any(map(is_keeper, self._directory.at(NO_STAGE)))
        if self._saver is None and not pinned:
            return
        tensors = await self.core.device.run(Rank.STEP, version, self.core.compute.state)
        if self._saver is not None:
            self._saver.save(version, tensors)
        if pinned:
            self.shelf.pin(version, tensors)

    async def _catch_up(self, brief: Brief) -> None:
        """We missed steps, or the run went back."""
        try:
            if await self._catchup.to(brief):
                return
            if self.council.behind_s > LOST_S:
                await self._bring_back()
            else:
                await asyncio.sleep(RETRY_JOIN_S)
        finally:
            self._catching_up = False

    async def _bring_back_often(self) -> None:
        """When nobody of the stage has what the run needs, and this peer speaks for it: see to that."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self.council.behind_s > LOST_S and not self._catching_up:
                self._catching_up = True
                try:
                    await self._bring_back()
                finally:
                    self._catching_up = False

    async def _watch_device(self) -> None:
        """End this peer if its device hangs: it still says that it lives, so that its mates wait for it.

        Raises:
            DeviceHangs: a job will never end, or not soon enough for who wants to leave or pause.
        """
        device = self.core.device
        seen, looks = None, 0
        while True:
            await asyncio.sleep(LOOK_S)
            # Looks are counted, not seconds: in those that this process was stopped the job was, too.
            now = (device.running, self._owner_waits)
            seen, looks = now, looks + 1 if now == seen else 0
            job, waits = now
            if job is None or looks * LOOK_S <= longest_job_s(device.longest_s, owner_waits=waits):
                continue
            device.abandoned = True
            ends = "This peer ends, so that others do its work"
            if self.paused:
                ends = (
                    "It cannot pause: this process ends, and its memory is free. The state of its stage is "
                    "given up; others have it, or a checkpoint"
                )
            raise DeviceHangs(
                f"the device has worked on one job for {looks * LOOK_S:.0f} s, on the longest one before "
                f"for {device.longest_s:.1f} s. {ends}. Look after the device (nvidia-smi, dmesg), then "
                "start it again"
            )

    async def _rebalance_often(self) -> None:
        """Decide who moves, as everybody does from the same records; go if it is this peer."""
        period_s = self._run.rebalance_every_s
        while not self._leaving.is_set():
            now_s = time.time()
            middle_s = (now_s // period_s + 0.5) * period_s
            await asyncio.sleep(middle_s - now_s + (period_s if middle_s <= now_s else 0))
            await self._directory.refresh()
            lag_s = self._directory.lag_s
            if not is_due(period_s=period_s, lag_s=lag_s, now_s=time.time()):
                self._decided = f"not in this period: what others do is seen here after {lag_s:.0f} s"
                continue
            records = list(self._directory.peers())
            decision = await asyncio.to_thread(self._decide_moves, records, time.time())
            self._decided = decision.why
            moves = decision.moves if isinstance(decision, Moves) else ()
            move = next((move for move in moves if move.peer == self.core.me), None)
            if move is not None and self._settings.movable:
                self._going = True  # said before asking: of two that ask each other at once neither goes
                if not await self._has_a_mate(going={other.peer for other in moves}):
                    self._going = False
                    self._decided = f"{move.why}; it stays: no mate in stage {self.stage} answers"
                    continue
                self._emit(events.Moved(stage=self.stage, to_stage=move.to_stage, why=move.why))
                await self._move(move.to_stage)

    def _decide_moves(self, records: Sequence[PeerRecord], now_s: float) -> Moves | Stay:
        """In any thread: the planner's predictions take a while in a large run."""
        self._job = self._job or planning_job(self._run)
        return rebalance(
            records, stages=self._run.S, period_s=self._run.rebalance_every_s, now_s=now_s,
            step_s=Advice(records, self._job).step_s,
        )  # fmt: skip

    async def _has_a_mate(self, *, going: set[PeerId]) -> bool:
        """Whether somebody who stays has the weights of our stage (I6). Records outlive who they speak of."""
        core = self.core
        mates = core.mates(self._directory.at(self.stage))
        told = await self._ask_status([mate for mate in mates if mate.peer not in going])
        return any(
            mate.state == "serving" and mate.era == core.era and mate.version >= core.version - 1
            for mate in told.values()
        )

    async def _move(self, to_stage: Stage) -> None:
        """Leave for another stage after the next step: until then our sum is part of this one's."""
        self._stepped.clear()
        await happens(self._stepped, BOUNDARY_S)
        if not self._leaving.is_set():
            self.moving_to = to_stage
            self._stop()

    async def _bring_back(self) -> None:
        run = self.council.run_standing
        if run != self._lost_at:
            self._lost_at = run
            self._emit(events.StageLost(stage=self.stage, version=run.version))
        await self._catchup.bring_back(run, waited_s=self.council.behind_s)

    # -- status -----------------------------------------------------------------------------------

    async def _serve_status(self, request: Request) -> Answer:
        asked = unpack(request.header, AskStatus)
        core = self.core
        check_run(asked.run, self._run.id)
        step = core.steps.get(core.version)
        losses = self.council.whole_run.losses
        sent, received = self._transport.sent_bytes, self._transport.received_bytes
        lines, unknown = self._transport.lines, Line()
        traffic = [
            LinkStatus(
                peer=peer, bytes_in=received.get(peer, 0), bytes_out=sent.get(peer, 0),
                rtt_s=lines.get(peer, unknown).rtt_s, bandwidth_bps=lines.get(peer, unknown).bandwidth_bps,
            )
            for peer in {*sent, *received}
        ]  # fmt: skip
        links = tuple(sorted(traffic, key=lambda link: (-link.bytes_in - link.bytes_out, link.peer)))
        status = PeerStatus(
            peer=core.me, stage=self.stage, era=core.era, version=core.version,
            state="leaving" if self._going else self._state,
            device=self._settings.device_name, done=step.ledger.done.bit_count() if step else 0,
            inflight=self.desk.inflight, max_inflight=self.desk.max_inflight,
            speed=self._speed(), computed=core.computed,
            coordinator=self.council.coordinator(self.stage) or "", audit=core.audit,
            since=self._settings.joined_at, loss=losses[-1][1] if losses else None,
            loss_step=losses[-1][0] if losses else -1,
            bytes_in=sum(received.values()), bytes_out=sum(sent.values()), links=links[:MOST_LINKS_TOLD],
            rebalance=self._decided[:MOST_WORDS],
            busy_s=core.device.busy_s, taken=self.desk.taken, answered=self.desk.answered,
            digest=core.digest, kind=core.kind, trainers=self.council.trainers,
        )  # fmt: skip
        return Answer(pack(status))
