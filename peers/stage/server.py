"""A stage peer: serve, accumulate, average, step.

    joins        takes the state of its stage from replicas or a checkpoint, or version 0: `.joining`
    serves       microbatches (`.microbatches`) and states (`peers.transfer.server`)
    reports      its ledger (`.coordination`), and does what the protocol says (`.actions`)
    moves        to a stage that needs it more: `.moving`
    leaves       finishes what is in flight, waits for the steps that its sums are part of, withdraws

Knows ports only: the same class runs over libp2p and in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from peers import events
from peers.audit.answers import AnswerAudits
from peers.audit.contributions import ContributionAudits
from peers.audit.convictions import Convictions
from peers.audit.kept import KeptWork, serve_kept
from peers.audit.neighbours import Neighbours
from peers.audit.sums import SumAudits
from peers.clock import now_s
from peers.evaluation.serving import EvaluationServer
from peers.fault_points import fault_point
from peers.islands.directory import Islands, own_directory, telling_cells
from peers.islands.meeting import IslandMeeting
from peers.liveness_probe import Prober
from peers.ports import Directory, Rank, StageDevice, Transport
from peers.stage.actions import Actions
from peers.stage.all_reduce import AllReduce
from peers.stage.coordination import StepCoordination
from peers.stage.device import DeviceThreads, watch_device
from peers.stage.joining import join
from peers.stage.microbatches import MicrobatchServer
from peers.stage.moving import Moving
from peers.stage.next_stage import NextStage
from peers.stage.open_step import OpenStep
from peers.stage.recovery import Recovery
from peers.stage.settings import StageSettings
from peers.stage.state import StageCore
from peers.stage.status import StageStatus
from peers.stage.tied_weights import TiedWeights
from peers.start_line import start_line
from peers.storage.checkpoint_store import CheckpointStore
from peers.transfer.leases import Snapshot
from peers.transfer.server import StateServer
from peers.transfer.spare import Spare, words_of
from peers.waiting import unless
from swarm.audit import is_audited
from swarm.errors import PeerFault, SetupError, short
from swarm.ids import PeerId, Stage
from swarm.manifest import Run
from swarm.model.stage import StageCompute
from swarm.policy.backoff import Backoff
from swarm.policy.router import Router
from swarm.policy.spares import SpareDecision
from swarm.protocol.messages import MAX_LEFT_OUT
from swarm.protocol.rollback import may_leave
from swarm.protocol.voice import heard

RETRY_S = 0.5
NO_TRAINER_S = 15.0
"""A trainer needs less to start and to find the peers."""


class StagePeer:
    """Serves `stage` of `run` until told to leave or to pause."""

    moving_to: Stage | None = None
    """The stage that this device serves next, once `run` has returned."""
    spare: Spare | None = None
    """Why it ended, if it stands by."""
    paused = False
    """`run` returned, or is about to, for a pause: the place is kept."""
    alone = False
    """When it paused, no other peer served its stage: the run stands still."""
    has_joined = False
    """It has, or had, the weights of its stage."""
    _first_version = 0
    _owner_waits = False
    """It leaves or pauses on its owner's command; one that moves has as much time as one that serves."""
    _failure: SetupError | None = None

    def __init__(
        self, run: Run, stage: Stage, compute: StageCompute, transport: Transport, directory: Directory,
        settings: StageSettings, emit: events.Emit, *, kept: Snapshot | None = None,
        device: StageDevice | None = None,
    ) -> None:  # fmt: skip
        """`kept`: of the pause that it comes back from. `device`: by default threads of its own."""
        emit = telling_cells(run, emit)
        self._run, self.stage, self._settings, self._emit = run, stage, settings, emit
        self._leaving = asyncio.Event()
        self.kept = kept
        """The state for the time after a pause, in host memory; None while the device has it."""
        # The other peers, without those that were shown to lie.
        self.convictions = Convictions(run, stage, transport, own_directory(run, directory), emit)
        everywhere = self.convictions.trusted(directory)
        islands = Islands(run, transport.signer, everywhere, lambda: core.version)
        self._directory = directory = own_directory(run, everywhere)
        # This stage, and what it computes of microbatches.
        device = device or DeviceThreads(f"device of stage {stage}", settings.workers)
        backoff = Backoff(probed=True)
        self.core = core = StageCore(run, stage, compute, transport, directory, backoff, emit, device=device)
        core.convicted = self.convictions.convicted
        self._prober = Prober(run.id, transport, directory, backoff)
        next_stage = self._next_stage = None if core.is_last else self._calls_to(stage + 1)
        judges = run.S > 1 and is_audited(run)
        neighbours = Neighbours(run, stage, transport, directory, self._answered_wrongly) if judges else None
        self._neighbours = neighbours
        self.microbatches = MicrobatchServer(
            core, next_stage, neighbours, max_inflight=settings.max_inflight, left_out=self._left_out,
            upload_bps=settings.upload_bps,
        )  # fmt: skip
        self.evaluations = EvaluationServer(core)
        # Audits of what replicas answered, contributed and added up.
        serve_kept(core)
        kept_work = KeptWork(run, stage, transport, directory, lambda: core.version)
        self.answer_audits = AnswerAudits(core, self.convictions, kept_work, neighbours)
        sums = SumAudits(run, stage, transport, self.convictions)
        self.contribution_audits = ContributionAudits(core, self.convictions, kept_work, sums)
        # Steps: the sums, the states, and what the protocol asks for.
        all_reduce = self.all_reduce = AllReduce(
            run.id, core.me, transport, compute.sums.dtype, sums, compute.sums.answer, compute.shared.sqnorm
        )  # fmt: skip
        self.store = CheckpointStore(
            run, stage, settings.resumed_from, tell=lambda it: emit(events.Trouble(text=f"passed over: {it}"))
        )
        for version, tensors in kept.versions if kept else ():
            if run.is_saved(version):
                self.store.pin(version, tensors)  # all stages saved it: perhaps the run goes back to it
        self.coordination = StepCoordination(
            core, all_reduce, since_s=settings.joined_at, word_overdue=self.convictions.ask_about
        )
        self.convictions.last_added = lambda peer: core.contributed.last(peer, version=core.version)
        meeting = IslandMeeting(core, islands)
        tied_weights = TiedWeights(core, meeting)
        recovery = self._recovery = Recovery(core, self.coordination, islands, self.store, tied_weights)
        self.actions = Actions(
            core, self.coordination, all_reduce, tied_weights, meeting, recovery, self.store,
            settings.checkpoints, failed=self._fail,
        )  # fmt: skip
        self._states = StateServer(core, self.store)
        core.trail.serve(run, stage, transport, lambda: core.kind)
        self.moving = Moving(
            core, everywhere, movable=settings.movable, go=self._move,
            stand_by=self._stand_by, record=lambda: self.status.record(),
        )  # fmt: skip
        self.status = StageStatus(
            core, settings, self.coordination, self.microbatches, all_reduce, self.moving, self.evaluations
        )
        self.convictions.on_conviction = self._do_without

    def _calls_to(self, stage: Stage) -> NextStage:
        core, run = self.core, self._run
        return NextStage(
            run.id, stage, core.transport, core.directory, Router(core.backoff, caller=core.me), stages=run.S,
            on_fault=lambda fault: self._emit(events.PeerLost.at_work(fault, stage, run.S)),
            trusted=self.convictions.while_trusted, heard=lambda peers: heard(peers, core.voices.of(stage)),
        )  # fmt: skip

    async def run(self) -> None:
        """Join, serve, and return after `leave`.

        Cancelled, it waits for no job of the device.

        Raises:
            SetupError: the run diverged, or the device failed.
            DeviceHangs: what it leaves behind is lost to this process.
        """
        core = self.core
        core.device.start()
        hung_s, ends = self._settings.hung_s, lambda: (self._owner_waits, self.paused)
        watch = asyncio.create_task(watch_device(core.device, self.stage, hung_s, ends))
        loops: list[asyncio.Task[object]] = []
        try:
            await self.status.announce()
            self.actions.tasks.create_task(self.status.rehearse())
            leaving = asyncio.create_task(self._leaving.wait())
            loops = [asyncio.create_task(self._join()), leaving, asyncio.create_task(self._prober.run())]
            await asyncio.wait([*loops, watch], return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                watch.result()
            if not loops[0].done():
                return  # a download may take hours, and what it waits for may never come
            loops.pop(0).result()
            if self._run.rebalance_every_s and await self.moving.stand_by_if_slow():
                return
            core.life = "serving"
            await self.status.announce()
            self._emit(
                events.Serving(
                    peer=core.me, stage=self.stage, version=core.version,
                    device=self._settings.device_name, max_inflight=self.microbatches.max_inflight,
                )
            )  # fmt: skip
            self.actions.tasks.create_task(self._tell_of_no_trainer())
            often = [self.coordination.run(), self.status.run()]
            if self._run.rebalance_every_s:
                often.append(self.moving.run())
            loops += [asyncio.create_task(loop) for loop in often]
            done, _ = await asyncio.wait([*loops, watch], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a bug in a loop ends the peer, with its traceback
            core.life = "leaving"
            await self.status.announce()
            if self._failure is not None:
                raise self._failure
            await unless(watch, self._leave_well())
        except asyncio.CancelledError:
            core.device.abandoned = True
            raise
        finally:
            await self._end(watch, loops)

    async def _join(self) -> None:
        core = self.core
        await join(core, self._recovery, self.store, self._settings.resumed_from, self.kept)
        await core.refresh_digest()
        self._first_version, self.kept = core.version, None
        self.has_joined = core.joined = True
        if self._run.admission.named:
            self.actions.tasks.create_task(self.convictions.keep_asking())
        await core.open_steps()  # they are: waiting calls are told. From now on others may change it

    async def _tell_of_no_trainer(self) -> None:
        """Say so once, if no trainer has come some time after this peer, and after stage 0, which knows."""
        await asyncio.sleep(NO_TRAINER_S)
        while self.core.stage and not any(r.state == "serving" for r in self._directory.at(0)):
            await asyncio.sleep(NO_TRAINER_S)
        waits = not self.core.computed and self.core.version < self._run.steps
        if waits and not await self._recovery.is_trained():
            text = "the run waits for a trainer: none has come yet"
            for address in self._settings.addresses[:1]:
                text += f". Start one, here or elsewhere:\n    {start_line('train', self._run.id, address)}"
            self._emit(events.Note(text=text))

    # -- the end ------------------------------------------------------------------------------------

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

    def _stand_by(self, verdict: SpareDecision) -> None:
        if not self._leaving.is_set():
            record = msgspec.structs.replace(self.status.record(), state="paused", spare=True)
            self.spare = Spare(self._run, record, words_of(verdict))
            self.paused = True
            self._stop()

    def _move(self, to_stage: Stage) -> None:
        if not self._leaving.is_set():
            self.moving_to = to_stage
            self._stop()

    def _stop(self) -> None:
        self.core.leave()
        self._leaving.set()

    def _fail(self, error: SetupError) -> None:
        self._failure = error
        self._leaving.set()

    async def _leave_well(self) -> None:
        """Finish what was promised to others."""
        core = self.core
        within_s = self._settings.pause_within_s if self.paused else self._settings.leave_within_s
        until = now_s() + within_s
        await asyncio.gather(self.microbatches.drain(limit_s=within_s / 2), self._check_replicas())
        await self._leave_to_others(until)
        fault_point("leaving")
        await self.coordination.say_leaving()
        for step in self._unfinished():
            lost = events.count(step.ledger.done.bit_count(), "microbatch")
            self._emit(events.Note(text=f"run again by others: {lost} of step {step.t}"))
        if not (core.replicas() or self._returns) and 0 < core.version < self._run.steps:
            text = f"no other peer serves stage {self.stage}: what was done since the last checkpoint is lost"
            self._emit(events.Trouble(text=text))
        steps = max(0, core.version - self._first_version)
        self._emit(events.Contributed(microbatches=core.computed, steps=steps))
        if not self._returns:
            await self.actions.finish_saving(limit_s=until - now_s())

    async def _check_replicas(self) -> None:
        """Find out whether the run goes on during a pause (I6): the owner comes first, but it is said."""
        self.alone = self.paused and not await self.core.keep_stage()
        if self.alone:
            text = (
                f"no other peer serves stage {self.stage}: the run stands still until this peer "
                f"resumes, or another takes its state of version {self.core.version}, which it gives out"
            )
            self._emit(events.Trouble(text=text))

    async def _leave_to_others(self, until: float) -> None:
        """Wait until a replica that stays has these weights: two that leave would take them along.

        One that leaves the run waits for the steps that its sums are part of, too, and the last one for a
        newcomer. What a pause or a move would wait for is run again: the owner of a machine comes first.
        """
        silent = False
        while now_s() < until:
            told = await self.core.ask(asked := self.core.replicas())
            stay = [status.position for status in told.values() if status.state == "serving"]
            waits = bool(stay) and not self._returns and bool(self._unfinished())
            waits |= not stay and any(r.state == "joining" for r in self.core.directory.at(self.core.stage))
            silent = bool(asked) and not told and not silent  # a shutdown ends p2pd too; another is started
            if not waits and not silent and may_leave(self.core.position, stay):
                return
            await asyncio.sleep(RETRY_S)

    def _unfinished(self) -> list[OpenStep]:
        """The steps that have this peer's microbatches and were not taken yet."""
        return [step for step in self.core.steps.values() if not step.over and step.ledger.done]

    @property
    def _returns(self) -> bool:
        """Whether the process goes on when `run` has returned: after a pause, or at another stage."""
        return self.paused or self.moving_to is not None

    async def _end(self, watch: asyncio.Task[None], loops: Sequence[asyncio.Task[object]]) -> None:
        """Stop all that is under way, then the device. Raises DeviceHangs: it hung before, or does now."""
        core, device = self.core, self.core.device
        joined, core.joined = core.joined, False
        core.life = "left"  # a directive that still comes must not start what nothing would end
        for task in loops:
            task.cancel()
        self.actions.tasks.cancel()
        self.microbatches.stop()
        try:
            await self.coordination.close()
            await self.convictions.close()
            await self.contribution_audits.close()
            if self._neighbours is not None:
                await self._neighbours.close()
            await asyncio.gather(*loops, self.actions.tasks.ended(), return_exceptions=True)
            if watch.done():
                watch.result()  # perhaps no caller heard it yet
            if not device.abandoned:
                await unless(watch, self._end_device(keep=joined))
        except asyncio.CancelledError:
            device.abandoned = True
            raise
        finally:
            watch.cancel()
            if device.abandoned or not self.paused:
                await self._directory.withdraw()
            core.close()
            if not device.abandoned and self._returns:
                core.free()

    async def _end_device(self, *, keep: bool) -> None:
        """Wait for the running job, so that `close` need not; before a pause the state is kept."""
        if self.paused and keep and self.moving_to is None:
            now = await self._states.snapshot()
            others = {version: of for version, of in self.store.pinned.items() if version != now.version}
            self.kept = now._replace(pinned=others)
        else:
            await self.core.device.run(Rank.STEP, 0, lambda: None)

    # -- what others notice -------------------------------------------------------------------------

    def _left_out(self) -> Sequence[PeerId]:
        """Replicas whose microbatches this stage runs again: they cost too much, or were shown to lie."""
        return sorted({*self.coordination.left_out, *self.convictions.convicted})[:MAX_LEFT_OUT]

    def peer_gone(self, peer: PeerId) -> None:
        """Note that the transport lost its connection to `peer`."""
        self.coordination.lost(peer)
        self._states.gone(peer)

    def _do_without(self, liar: PeerId) -> None:
        self.peer_gone(liar)
        self.actions.tasks.create_task(self.core.forget_work_of(liar))

    def _answered_wrongly(self, stage: Stage, fault: PeerFault, two_say_so: bool) -> None:
        core, now = self.core, now_s()
        if two_say_so:
            core.backoff.charge(fault.peer, t=core.version, since_s=now, now=now, rounds=1)
        if stage > self.stage:
            assert self._next_stage is not None
            self._next_stage.fault(fault)
        elif core.backoff.rests(fault.peer, now=now):  # it sent that on to this peer
            self._emit(events.Trouble(text=f"peer {short(fault.peer)} is refused for a while: {fault.why}"))
        self.actions.tasks.create_task(self.core.forget_work_of(fault.peer))
