"""A stage peer: serve, accumulate, average, step.

    joins        takes the state of its stage from a replica, or starts at version 0
    serves       microbatches (`.microbatches`) and those who missed something (`peers.transfer.server`)
    reports      its ledger (`.coordination`), and does what the protocol says: `_act`
    leaves       finishes what is in flight, withdraws

Knows ports only: the same class runs over libp2p and in memory.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from peers import events
from peers.clock import now_s, unix_s
from peers.fault_points import fault_point
from peers.liveness_probe import Prober
from peers.ports import Answer, Device, Directory, NetworkPath, Rank, Request, Transport
from peers.stage.all_reduce import AllReduce as Reducer
from peers.stage.all_reduce import RoundAborted
from peers.stage.coordination import StepCoordination
from peers.stage.device import DeviceThreads
from peers.stage.handoff import Handoff
from peers.stage.membership import Membership
from peers.stage.microbatches import MicrobatchServer
from peers.stage.next_stage import NextStage
from peers.stage.open_step import OpenStep, audit
from peers.stage.path_probe import PathProber
from peers.stage.recovery import Recovery
from peers.stage.state import StageCore
from peers.stage.tied_weights import TiedWeights
from peers.status_query import ask_status
from peers.storage import checkpoint
from peers.storage.checkpoint_store import CheckpointStore
from peers.storage.writer import CheckpointWriter
from peers.transfer.catalog import is_keeper
from peers.transfer.gradient import fetch_gradient
from peers.transfer.server import Snapshot, StateServer
from peers.waiting import happens, unless
from swarm.errors import DeviceHangs, PeerFault, Refused, SetupError, SwarmError
from swarm.ids import Microbatch, PeerId, Position, Stage
from swarm.manifest import Run
from swarm.model.gradient_sum import SumLost
from swarm.model.stage import StageCompute
from swarm.policy.backoff import Backoff
from swarm.policy.rebalance import Moves, Stay, is_due, rebalance
from swarm.policy.router import Router
from swarm.protocol.ledger import check_bitmap, members_of
from swarm.protocol.messages import Directive
from swarm.protocol.replica import (
    Action,
    AllReduce,
    ApplyStep,
    AskWitnesses,
    CatchUp,
    Fetch,
    RestoreStage,
    Unfreeze,
)
from swarm.protocol.rollback import Join, join_by, may_leave
from swarm.protocol.rounds import Commit, Plan, check_plan
from swarm.protocol.step import StepState
from swarm.records import NO_STAGE, PeerRecord
from swarm.wire.messages import (
    AskStatus,
    LinkStatus,
    PeerStatus,
    check_run,
    pack,
    unpack,
)

WARMING_S = 1.0
"""The first microbatch of a device pays for warming up; of one that takes longer than this that is little."""
ANNOUNCE_S = 5.0
"""A record lives a few times longer than this in the DHT."""
RETRY_JOIN_S = 0.5
LOST_S = 6.0
"""A stage without anybody who has its weights is taken for lost after this: replicas may be cut off
shortly."""
LOOK_S = 1.0
BOUNDARY_S = 10.0
"""A peer that moves goes without a step boundary after this: perhaps the run waits for its coming."""
HUNG_TIMES = 20.0
"""A job of the device that takes so many times the longest one before it, and `hung_s`, will never end."""
OWNER_S, OWNER_TIMES, OWNER_MOST_S = 30.0, 2.0, 90.0
"""The same once the peer leaves or pauses, and the most of it: what waits then is the owner."""
MAX_WORDS = 400
MAX_ASKED = 16
"""Peers that a joiner asks how far they are, its replicas first."""
MAX_LINKS_TOLD = 64
"""In one status: 6 kB."""


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Where this peer saves its stage, and how many steps are kept there."""

    folder: Path
    keep: int = 2
    only_last: bool = False
    """Save the run's last version only, and resume from nothing: where the owner named no folder."""


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """What a peer decides for itself."""

    max_inflight: int = 4
    workers: int = 1
    """Microbatches that are computed at once."""
    device_name: str = "cpu"
    addresses: tuple[str, ...] = ()
    checkpoints: Checkpoints | None = None
    movable: bool = False
    """It may be sent to another stage that needs it more."""
    leave_within_s: float = 25.0
    """Finishing and handing over may take this long; a cloud's notice is 30 s."""
    pause_within_s: float = 5.0
    """The same before a pause: the owner waits for the device."""
    hung_s: float = 600.0
    """A job of the device that takes less is never given up."""
    joined_at: float = field(default_factory=unix_s)

    @property
    def resumed_from(self) -> Path | None:
        """The folder whose checkpoints this peer starts from, goes back to and gives out."""
        saved = self.checkpoints
        return None if saved is None or saved.only_last else saved.folder


def longest_job_s(before_s: float, hung_s: float, *, owner_waits: bool) -> float:
    """How long a job of a device may take whose longest one took `before_s`."""
    if owner_waits:
        return min(OWNER_MOST_S, max(OWNER_S, OWNER_TIMES * before_s))
    return max(hung_s, HUNG_TIMES * before_s)


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
        device: Device | None = None,
    ) -> None:
        """`kept`: of the pause that it comes back from. `device`: by default threads of its own."""
        self._run, self.stage, self._settings, self._emit = run, stage, settings, emit
        self._transport, self._directory = transport, directory
        self._recovering = False
        """It takes a step or changes its whole state: no directive is followed meanwhile."""
        self._state = "joining"
        self.core = StageCore(
            run,
            stage,
            transport.peer_id,
            compute,
            emit,
            device=device or DeviceThreads(f"device of stage {stage}", settings.workers),
        )
        self.router = Router(Backoff(probed=True))
        self._lines = PathProber(run.id, transport, directory, random.Random(transport.peer_id))
        self._prober = Prober(run.id, transport, directory, self.router.backoff)
        next_stage = None
        if stage < run.S - 1:
            next_stage = NextStage(stage + 1, transport, directory, self.router, on_fault=self._fault)
        membership = Membership(directory)
        self.desk = MicrobatchServer(
            self.core, transport, membership, next_stage, max_inflight=settings.max_inflight
        )
        self.all_reduce = Reducer(
            run.id,
            transport.peer_id,
            transport,
            run.codec.reduce,
            compute.sums.dtype,
            compute.sums.value,
            compute.shared.sqnorm,
        )
        checkpoints = settings.checkpoints
        self.store = CheckpointStore(run, stage, settings.resumed_from, tell=self._say_damaged)
        self._writer = (
            CheckpointWriter(checkpoints.folder, run, stage, keep=checkpoints.keep, emit=emit)
            if checkpoints
            else None
        )
        self.coordination = StepCoordination(
            self.core, transport, directory, membership, self.router.backoff,
            act=self._act, busy=lambda: self._recovering or self._state == "left",
            bandwidth=lambda: self.all_reduce.bandwidth_bps, look_s=LOOK_S, lost_s=LOST_S,
            since_s=settings.joined_at,
        )  # fmt: skip
        self._tied_weights = TiedWeights(self.core, transport, directory, self.router.backoff)
        self._recovery = Recovery(
            self.core,
            transport,
            directory,
            self.store,
            self.router.backoff,
            self._tied_weights,
            emit,
            lambda: self.coordination.trainers,
        )
        self._handoff = Handoff(self.core, transport, directory, membership, self._undo)
        self._states = StateServer(self.core, transport, self.store)
        transport.serve("status", self._serve_status)
        self._leaving = asyncio.Event()
        self._owner_waits = False
        """It leaves or pauses by its owner's wish. Who moves has as much time as who serves."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.going = False
        """It is about to move: no replica may rely on its staying."""
        self._failure: SetupError | None = None
        self._stepped = asyncio.Event()
        self._lost_at: Position | None = None
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
                self.coordination.run(), self._prober.run(), self._lines.run(), self._announce_often(),
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
        self._state = "left"  # a directive that still comes must not start what nobody would end
        for task in [*loops, *self._tasks]:
            task.cancel()
        self.desk.stop()
        try:
            await self.coordination.close()
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
        until = now_s() + within_s
        await asyncio.gather(self.desk.drain(limit_s=within_s / 2), self._look_for_a_mate())
        await self._handoff.give_all(limit_s=until - now_s())
        await self._leave_the_version(until)
        await self.coordination.say_leaving()
        self._emit(
            events.Contributed(
                microbatches=self.core.computed, steps=max(0, self.core.version - self._first_version)
            )
        )
        stays = self.paused or self.moving_to is not None  # the process does, and its thread
        if self._writer is not None and not stays:
            await self._writer.close(until - now_s())

    async def _end_device(self, *, keep: bool) -> None:
        """Wait for the running job, so that `close` need not; before a pause the state is kept."""
        if self.paused and keep and self.moving_to is None:
            self.kept = await self._states.snapshot()
        else:
            await self.core.device.run(Rank.STEP, 0, lambda: None)

    async def _leave_the_version(self, until: float) -> None:
        """Wait until a replica that stays has our weights: two that leave after a step would take them
        along."""
        while now_s() < until:
            told = await self._ask_status(self.core.replicas(self._directory.at(self.stage)))
            stay = [status.position for status in told.values() if status.state == "serving"]
            if may_leave(self.core.position, stay):
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
        core, speed = self.core, self._speed()
        record = PeerRecord(
            peer=core.me, run=self._run.id, stage=self.stage, state=self._state, version=core.version,  # type: ignore[arg-type]
            speed=speed, load=core.device.mean_queue(), state_bytes=core.compute.state.nbytes,
            bandwidth_bps=self.all_reduce.bandwidth_bps, movable=self._settings.movable,
            max_inflight=self.desk.max_inflight, device=self._settings.device_name,
            addresses=self._settings.addresses, since=self._settings.joined_at,
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
        """Find out of which kind the device is, and how fast on this stage, before there is work."""
        core, device = self.core, self.core.device

        def once() -> tuple[str, float]:
            return core.compute.rehearse(), device.elapsed_s()

        # Before all other jobs: kinds are compared by what the weights of version 0 give.
        core.kind, took_s = await device.run(Rank.STEP, -1, once)
        all_s = took_s
        if took_s < WARMING_S:
            _, took_s = await device.run(Rank.IDLE, 0, once)
            all_s += took_s
        self._rehearsed_s, self._rehearsals_s = took_s / device.workers, all_s / device.workers

    async def _announce_often(self) -> None:
        while True:
            await asyncio.sleep(ANNOUNCE_S)
            await self._announce()

    def _fault(self, fault: PeerFault) -> None:
        self._emit(events.PeerLost(peer=fault.peer, stage=self.stage + 1, why=fault.text))

    def peer_gone(self, peer: PeerId) -> None:
        """The transport noticed that the connection to `peer` broke."""
        self.coordination.lost(peer)
        self._states.desk.gone(peer)

    # -- joining ----------------------------------------------------------------------------------

    async def _join(self) -> None:
        """Get the weights of the stage: from replicas, from a checkpoint, or version 0 from the seed."""
        core = self.core
        lost_since: float | None = None
        if self.kept is not None:
            await core.load(Position(self.kept.generation, self.kept.version), self.kept.tensors)
            core.remember(self.kept.last_go)
        records = await self._directory.survey()
        if await self._resume(records):
            records = await self._directory.refresh()
        while True:
            others = [r for r in records if r.peer != core.me and r.state in ("serving", "joining")]
            told = {peer: status.position for peer, status in (await self._ask_status(others)).items()}
            replicas = [
                r.peer for r in others if r.stage == self.stage and r.state == "serving" and r.peer in told
            ]
            run = max(told.values(), default=Position())
            by = join_by(core.position, [told[replica] for replica in replicas], run)
            if by is Join.SERVE:
                break
            if by is Join.DOWNLOAD and await self._recovery.join(
                {replica: told[replica] for replica in replicas}
            ):
                break
            if by is Join.LOST:
                if lost_since is None:
                    lost_since = now_s()
                    self._emit(events.StageLost(stage=self.stage, version=run.version))
                waited_s = now_s() - lost_since
                if waited_s > LOST_S and await self._recovery.restore(run, waited_s=waited_s):
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
        """What those peers say of themselves; of very many, the replicas and the furthest."""
        asked = sorted(records, key=lambda r: (r.stage != self.stage, -r.version, r.peer))[:MAX_ASKED]
        return await ask_status(self._run, self._transport, [record.peer for record in asked])

    async def _resume(self, records: Sequence[PeerRecord]) -> bool:
        """Start from a checkpoint of this peer's folder; or, if no peer serves the run, of others'.

        Whether that took a while: `records` are old then.
        """
        folder, step = self._settings.resumed_from, None
        if folder is not None:
            step = await asyncio.to_thread(
                checkpoint.newest_common_step, folder, self._run, tell=self.store.damaged
            )
            if step is not None and step > self.core.version:
                tensors, _ = await asyncio.to_thread(checkpoint.load, folder, self._run, self.stage, step)
                await self.core.load(Position(self.core.generation, step), tensors)
                self._say_resumed()
                return True
        mine = await asyncio.to_thread(self.store.versions)
        others: list[str] = []
        if folder is not None and step is None and not mine:
            others = await asyncio.to_thread(checkpoint.other_runs, folder, self._run)
        if others:
            text = (
                f"{folder} has no checkpoint of run {self._run.id} that could be used, only of "
                f"run {', '.join(others[:3])}: stage {self.stage} starts without one"
            )
            self._emit(events.Trouble(text=text))
        until = now_s() + LOST_S
        while now_s() < until:  # those of other stages come a moment later, with their disks
            if not mine and not any(map(is_keeper, records)):
                return False
            serving = [r for r in records if r.state == "serving" and r.peer != self.core.me]
            if await self._ask_status(serving):
                return True
            resumed = await self._recovery.resume()
            if resumed:
                self._say_resumed()
            if resumed or resumed is None:
                return True
            await asyncio.sleep(RETRY_JOIN_S)
            records = await self._directory.survey()
        return True

    def _say_damaged(self, text: str) -> None:
        self._emit(events.Trouble(text=f"passed over: {text}"))

    def _say_resumed(self) -> None:
        text = f"stage {self.stage} resumes from the checkpoint of version {self.core.version}"
        self._emit(events.Note(text=text))

    # -- obeying ----------------------------------------------------------------------------------

    def _act(self, action: Action) -> None:
        """Do what the protocol wants, unless it is under way. Actions repeat."""
        if isinstance(action, (ApplyStep, CatchUp, RestoreStage)):
            if not self._recovering:
                self._recovering = True
                self._spawn(self._change_state(action))
            return
        assert not isinstance(action, AskWitnesses)
        step = self.core.steps[action.t]
        if isinstance(action, AllReduce):
            step.stop("reduce")
            step.start_round(action.plan.round, now=now_s())
            self._start(step, "reduce", self._reduce(step, action.plan))
        elif isinstance(action, Fetch):
            self._start(step, "fetch", self._fetch(step, action.round, action.sources))
        elif isinstance(action, Unfreeze):
            step.stop("reduce")
            step.stop("fetch")
            step.give_up_round()
            self._start(step, "thaw", self._thaw(step))
        else:
            self._start(step, "undo", self._undo_as_told(step, action.microbatches))

    async def _change_state(self, action: ApplyStep | CatchUp | RestoreStage) -> None:
        try:
            if isinstance(action, ApplyStep):
                await self._apply_step(action.commit)
            elif isinstance(action, CatchUp):
                await self._catch_up(action.directive)
            else:
                await self._restore()
        finally:
            self._recovering = False

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
                pass  # `_watch_device` ends this peer
            elif isinstance(error, SwarmError):
                self._emit(events.Note(text=f"stage {self.stage}: {error.text}"))
            else:
                asyncio.get_running_loop().call_exception_handler(
                    {"message": "a stage peer's task failed", "exception": error, "task": task}
                )
        self.core.report_trigger.urgent()

    # -- averaging --------------------------------------------------------------------------------

    async def _reduce(self, step: OpenStep, plan: Plan) -> None:
        """Freeze the sum for this round, reduce it with the others, hold the result."""
        core, m = self.core, self._run.M

        def freeze() -> tuple[str | None, torch.Tensor | None]:
            if step.over or step.state is StepState.HANDING:
                return "the step is over" if step.over else "it leaves, and hands over its sum", None
            why = check_plan(
                plan, run=self._run.id, stage=self.stage, t=step.t, microbatches=m,
                numel=core.compute.numel, me=core.me, done=step.ledger.done,
            )  # fmt: skip
            if why is not None:
                return why, None
            step.ledger.freeze(plan.round)
            total = core.compute.sums.of(step.t)
            return None, total.cpu() if total.is_cuda else total

        try:
            why, total = await core.device.run(Rank.STEP, step.t, freeze)
            if total is None:
                step.refuse_round(plan.round)
                raise RoundAborted(f"this peer does not take part: {why}")
            fault_point("frozen")
            step.exchange(plan.round)
            reduced, held = await self.all_reduce.run(plan, step.t, total)
            if not step.over and step.prepared is None and step.ledger.frozen_for == plan.round:
                step.audited = audit(plan, m, 0)
                await self._tied_weights.hold(step, reduced, held)
                fault_point("prepared")
        except RoundAborted as void:
            step.end_round(plan.round, failed=True)
            self._emit(events.RoundAborted(stage=self.stage, t=step.t, why=void.text))
        except Exception:
            # No memory, perhaps. Said, or the coordinator would wait for this round for ever.
            step.end_round(plan.round, failed=True)
            raise
        finally:
            step.end_round(plan.round, failed=False)

    async def _thaw(self, step: OpenStep) -> None:
        """Open the sum again, once no replica can receive a mixture of before and after."""

        def thaw() -> None:
            if step.may_thaw:
                step.ledger.thaw()

        await step.stopped()
        await self.core.device.run(Rank.STEP, step.t, thaw)
        step.open_again()

    async def _fetch(self, step: OpenStep, round_name: str, sources: Sequence[PeerId]) -> None:
        """Take the reduced gradient from a replica that holds it."""
        for source in sources:
            try:
                reduced, held, _ = await fetch_gradient(
                    self.core, self._transport, source, step.t, round_name
                )
            except PeerFault as fault:
                self.router.failed(source, now=now_s())
                self._emit(events.PeerLost(peer=source, stage=self.stage, why=fault.text))
            except SwarmError:
                continue
            else:
                if not step.over:
                    step.stop("reduce")
                    step.promise(held.round, now=now_s())
                    try:
                        await self.core.device.run(Rank.STEP, step.t, step.ledger.freeze, held.round)
                        await self._tied_weights.hold(step, reduced, held)
                    finally:
                        step.end_round(held.round, failed=False)
                return

    async def _undo_as_told(self, step: OpenStep, twice: int) -> None:
        try:
            check_bitmap(twice, self._run.M)
        except Refused as refused:
            raise Refused(f"an impossible undo: {refused.text}") from None
        await self._undo(step, twice)

    async def _undo(self, step: OpenStep, twice: int) -> None:
        """Take duplicates out of our sum: run their backward again and subtract."""
        core = self.core

        def subtract() -> int:
            count = 0
            if step.over or step.ledger.frozen_for is not None:
                return 0
            if twice & step.ledger.inherited:
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

    async def _apply_step(self, commit: Commit) -> None:
        step = self.core.steps.get(commit.t)
        mine = step.ledger.done.bit_count() if step is not None else 0
        audited = step.audited if step is not None else None
        await self.core.apply(commit)
        fault_point("took")
        self._stepped.set()
        self._emit(
            events.Stepped(
                stage=self.stage, t=commit.t, microbatches=mine,
                missing=None if audited is None else audited.missing,
                duplicated=None if audited is None else audited.duplicated,
            )
        )  # fmt: skip
        await self._save()
        if self.core.finished:
            self._emit(events.Note(text=self._complete()))

    def _complete(self) -> str:
        saved = self._settings.checkpoints
        also = "is saved nowhere: export it before the last peer of the stage leaves"
        if saved is not None:
            also = f"goes to {saved.folder} too"
        return (
            f"the run is complete: all {self._run.steps} steps are taken. This peer gives out version "
            f"{self.core.version} of stage {self.stage} until Ctrl-C; it {also}"
        )

    async def _save(self) -> None:
        """Copy the state, and have it written beside the training; or kept in memory, for keepers."""
        every, version = self._run.checkpoint_every, self.core.version
        if not (version == self._run.steps or (every and version % every == 0)):
            return
        last = version == self._run.steps  # which is given out as it is
        keepers = any(map(is_keeper, self._directory.at(NO_STAGE)))
        pinned = keepers and not last and not self.store.on_disk
        saved = self._writer is not None and (last or self.store.on_disk)
        if not saved and not pinned:
            return
        tensors = await self.core.device.run(Rank.STEP, version, self.core.compute.state.copy)
        if saved and self._writer is not None:
            self._writer.save(version, tensors)
        if pinned:
            self.store.pin(version, tensors)

    async def _catch_up(self, directive: Directive) -> None:
        """We missed steps, or the run went back."""
        if await self._recovery.to(directive):
            return
        if self.coordination.behind_s > LOST_S:
            await self._restore()
        else:
            await asyncio.sleep(RETRY_JOIN_S)

    async def _watch_device(self) -> None:
        """End this peer if its device hangs or fails: it still says that it lives, so its replicas wait.

        Raises:
            DeviceHangs: a job will never end, or not soon enough for who wants to leave or pause.
            SetupError: the device failed for good.
        """
        device = self.core.device
        seen, looks = None, 0
        while True:
            await asyncio.sleep(LOOK_S)
            if device.failure is not None:
                # Nothing works on it any more in this process. Others do this peer's work.
                text = f"the device of stage {self.stage} failed: {str(device.failure)[:300]}"
                raise SetupError(text)
            # Looks are counted, not seconds: in those that this process was stopped the job was, too.
            now = (device.running, self._owner_waits)
            seen, looks = now, looks + 1 if now == seen else 0
            job, waits = now
            limit_s = longest_job_s(device.longest_s, self._settings.hung_s, owner_waits=waits)
            if job is None or looks * LOOK_S <= limit_s:
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
        """Decide which peers move, as all do from the same records; go if it is this one."""
        period_s = self._run.rebalance_every_s
        while not self._leaving.is_set():
            now = unix_s()
            middle_s = (now // period_s + 0.5) * period_s
            await asyncio.sleep(middle_s - now + (period_s if middle_s <= now else 0))
            await self._directory.refresh()
            lag_s = self._directory.lag_s
            if not is_due(period_s=period_s, lag_s=lag_s, now_s=unix_s()):
                self._decided = f"not in this period: what others do is seen here after {lag_s:.0f} s"
                continue
            records = list(self._directory.peers())
            decision = await asyncio.to_thread(self._decide_moves, records, unix_s())
            self._decided = decision.why
            moves = decision.moves if isinstance(decision, Moves) else ()
            move = next((move for move in moves if move.peer == self.core.me), None)
            if move is not None and self._settings.movable:
                await self.move(move.to_stage, why=move.why, going={other.peer for other in moves})

    def _decide_moves(self, records: Sequence[PeerRecord], now_s: float) -> Moves | Stay:
        """In any thread: it takes a while in a large run."""
        period_s = self._run.rebalance_every_s
        return rebalance(records, stages=self._run.S, period_s=period_s, now_s=now_s)

    async def _has_a_mate(self, *, going: set[PeerId]) -> bool:
        """Whether a replica that stays has the weights of this stage (I6). Records outlive their peers."""
        core = self.core
        replicas = core.replicas(self._directory.at(self.stage))
        told = await self._ask_status([replica for replica in replicas if replica.peer not in going])
        return any(
            replica.state == "serving"
            and replica.generation == core.generation
            and replica.version >= core.version - 1
            for replica in told.values()
        )

    async def move(self, to_stage: Stage, *, why: str, going: set[PeerId]) -> None:
        """Leave for another stage after the next step: until then our sum is part of this one's.

        It stays if no replica keeps this stage (I6), now or after that step. `going`: others that leave it.
        """
        self.going = True  # said before asking: of two that ask each other at once neither goes
        moves = await self._has_a_mate(going=going)
        if moves:
            self._emit(events.Moved(stage=self.stage, to_stage=to_stage, why=why))
            self._stepped.clear()
            await happens(self._stepped, BOUNDARY_S)
            moves = await self._has_a_mate(going=going)  # it may have died meanwhile
        if not moves:
            self.going = False
            self._decided = f"{why}; it stays: no replica in stage {self.stage} answers"
        elif not self._leaving.is_set():
            self.moving_to = to_stage
            self._stop()

    async def _restore(self) -> None:
        run = self.coordination.run_position
        if run != self._lost_at:
            self._lost_at = run
            self._emit(events.StageLost(stage=self.stage, version=run.version))
        await self._recovery.restore(run, waited_s=self.coordination.behind_s)

    # -- status -----------------------------------------------------------------------------------

    async def _serve_status(self, request: Request) -> Answer:
        asked = unpack(request.header, AskStatus)
        core = self.core
        check_run(asked.run, self._run.id)
        step = core.steps.get(core.version)
        losses = self.coordination.run_status.losses
        sent, received = self._transport.sent_bytes, self._transport.received_bytes
        lines, unknown = self._transport.lines, NetworkPath()
        traffic = [
            LinkStatus(
                peer=peer, bytes_in=received.get(peer, 0), bytes_out=sent.get(peer, 0),
                rtt_s=lines.get(peer, unknown).rtt_s, bandwidth_bps=lines.get(peer, unknown).bandwidth_bps,
            )
            for peer in {*sent, *received}
        ]  # fmt: skip
        links = tuple(sorted(traffic, key=lambda link: (-link.bytes_in - link.bytes_out, link.peer)))
        status = PeerStatus(
            peer=core.me, stage=self.stage, generation=core.generation, version=core.version,
            state="leaving" if self.going else self._state,
            device=self._settings.device_name, done=step.ledger.done.bit_count() if step else 0,
            inflight=self.desk.inflight, max_inflight=self.desk.max_inflight,
            speed=self._speed(), computed=core.computed,
            coordinator=self.coordination.coordinator(self.stage) or "", audit=core.audit,
            since=self._settings.joined_at, loss=losses[-1][1] if losses else None,
            loss_step=losses[-1][0] if losses else -1,
            bytes_in=sum(received.values()), bytes_out=sum(sent.values()), links=links[:MAX_LINKS_TOLD],
            rebalance=self._decided[:MAX_WORDS],
            busy_s=core.device.busy_s, taken=self.desk.taken, answered=self.desk.answered,
            digest=core.digest, kind=core.kind, trainers=self.coordination.trainers,
        )  # fmt: skip
        return Answer(pack(status))
