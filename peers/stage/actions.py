"""Does what the protocol asks of a stage peer: each action in a task of its own, none twice at a time.

    BeginAllReduce   freeze the sum, reduce it with the others, hold the result
    Fetch            take the result from a replica that holds it
    Retract          subtract duplicates from the sum
    Unfreeze         give a round up, and open the sum again
    BeginAgain, ApplyStep, CatchUp, RestoreStage   change the whole state; one of these at a time
    Retreat          leave a generation that was started in error

Everything here runs on the event loop; sums and ledgers change in jobs of the `peers.ports.StageDevice`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import torch

from peers import events
from peers.clock import now_s
from peers.fault_points import fault_point
from peers.islands.meeting import IslandMeeting
from peers.ports import Rank
from peers.stage.all_reduce import AllReduce, RoundAborted, holds
from peers.stage.coordination import StepCoordination
from peers.stage.open_step import OpenStep, count_ledgers
from peers.stage.recovery import Recovery
from peers.stage.settings import Checkpoints
from peers.stage.state import StageCore
from peers.stage.tied_weights import TiedWeights
from peers.storage.checkpoint_store import CheckpointStore, CheckpointWriter
from peers.transfer.catalog import is_keeper
from peers.transfer.client import DownloadFailed
from peers.transfer.gradient import fetch_gradient
from peers.waiting import TaskKeeper, report_bug
from swarm.errors import PeerFault, PeerSilent, Refused, SetupError, SwarmError
from swarm.ids import PeerId, Position
from swarm.protocol import replica
from swarm.protocol.blame import Awaited, RoundWaits
from swarm.protocol.ledger import check_bitmap
from swarm.protocol.messages import Directive
from swarm.protocol.protocol import LOST_S
from swarm.protocol.rollback import FAR_BACK_S
from swarm.protocol.rounds import Commit, Plan, Prepared, check_plan
from swarm.protocol.sums import are_checked
from swarm.records import NO_STAGE
from swarm.wire.codec import to_host

RETRY_S = 0.5
"""Pause when no peer gave what this one lacks."""


class Actions:
    """Carries out the actions of `coordination`.

    Args:
        failed: told of an error that ends this peer, such as a run that diverged.
    """

    def __init__(
        self, core: StageCore, coordination: StepCoordination, all_reduce: AllReduce,
        tied_weights: TiedWeights, meeting: IslandMeeting, recovery: Recovery, store: CheckpointStore,
        checkpoints: Checkpoints | None, *, failed: Callable[[SetupError], None],
    ) -> None:  # fmt: skip
        self._core, self._coordination, self._all_reduce = core, coordination, all_reduce
        self._tied_weights, self._meeting, self._recovery = tied_weights, meeting, recovery
        self._store, self._checkpoints, self._failed = store, checkpoints, failed
        self._writer = None
        if checkpoints is not None:
            self._writer = CheckpointWriter(
                checkpoints.folder, core.run, core.stage, keep=checkpoints.keep, emit=core.emit
            )
        self.tasks = TaskKeeper(self._ended)
        self._lost_at: Position | None = None
        """The run's position when this stage was last said to be lost."""
        coordination.act = self.act
        meeting.overdue = self._go_past_meeting
        recovery.reached = self._reached
        core.opened = self._opened

    # -- tasks --------------------------------------------------------------------------------------

    def act(self, action: replica.Action) -> None:
        """Do what the protocol asks, unless it is under way. Actions repeat."""
        if isinstance(action, replica.StateChange):
            if not self._core.changing:
                self._core.changing = True
                self.tasks.create_task(self._change_state(action))
            return
        if isinstance(action, replica.Retreat):
            text = f"generation {self._core.generation.number} was started in error, and is left"
            self._core.emit(events.Note(text=f"stage {self._core.stage}: {text}"))
            self._core.enter(action.generation)
            return
        assert not isinstance(action, replica.Ask)  # done by `coordination`
        step = self._core.steps[action.t]
        match action:
            case replica.BeginAllReduce(plan=plan):
                step.stop("reduce")
                if step.ending:
                    return  # it may be of the same round, whose end would be taken for the end of this one
                step.start_round(plan.round, now=now_s())
                self._start(step, "reduce", lambda: self._reduce(step, plan))
            case replica.Fetch():
                self._start(step, "fetch", lambda: self._fetch(step, action))
            case replica.Unfreeze():
                step.stop("reduce")
                step.stop("fetch")
                step.give_up_round()
                self._start(step, "thaw", lambda: self._thaw(step))
            case replica.Retract(microbatches=twice):
                self._start(step, "retract", lambda: self._retract(step, twice))

    def _start(self, step: OpenStep, kind: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `work` unless the same kind of work already runs for this step."""
        running = step.work.get(kind)
        if running is None or running.done():
            step.work[kind] = self.tasks.create_task(work())

    def _ended(self, error: BaseException | None) -> None:
        match error:
            case SetupError():
                self._failed(error)  # the run diverged: nothing that this peer does can help
            case None | torch.AcceleratorError():
                pass  # a broken device ends this peer: `peers.stage.device.watch_device`
            case SwarmError():
                self._core.emit(events.Note(text=f"stage {self._core.stage}: {error.text}"))
            case _:
                report_bug("a stage peer's task failed", error)
        self._core.report_trigger.urgent()

    def _opened(self, step: OpenStep) -> None:
        if self._core.run.meets_at(step.t):
            self._start(step, "meeting", lambda: self._meeting.prepare(step))

    def _go_past_meeting(self) -> None:
        """Take what a meeting left that the others are past: this island was lost, and began too early."""

        async def go() -> None:
            try:
                if await self._recovery.resume():
                    text = f"version {self._core.version}, where the other islands are, is taken from them"
                    self._core.emit(events.Note(text=f"stage {self._core.stage}: {text}"))
            finally:
                self._core.changing = False

        if self._core.joined and not self._core.changing:
            self._core.changing = True
            self.tasks.create_task(go())

    # -- a step's sum -------------------------------------------------------------------------------

    async def _reduce(self, step: OpenStep, plan: Plan) -> None:
        """Freeze the sum for this round, reduce it with the others, hold the result."""
        core, m, began = self._core, self._core.run.microbatches(step.t), now_s()
        voice = core.voice() or (plan.members if core.run.admission.named else ())
        waits = RoundWaits(
            core.me, step.t, core.backoff, opened_s=step.opened_s, voice=voice, held_s=step.held_s
        )

        def wait(awaited: Awaited, waited_s: float) -> list[PeerId]:
            directive = self._coordination.directive
            coordinator = directive.coordinator if directive is not None else ""
            return waits.wait(awaited, waited_s, coordinator=coordinator, now=now_s())

        def freeze() -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]] | str:
            if step.over:
                return "the step is over"
            why = check_plan(
                plan, run=core.run.id, stage=core.stage, t=step.t, microbatches=m,
                numel=core.compute.numel, me=core.me, done=step.ledger.done,
            )  # fmt: skip
            if why is not None:
                return why
            step.ledger.freeze(plan.round)
            total, alone = core.compute.sums.of(step.t), plan.members == (core.me,)
            return total if alone else to_host(total), core.compute.sums.value_of_answer()

        try:
            frozen = await core.device.run(Rank.STEP, step.t, freeze)
            if isinstance(frozen, str):
                step.refuse_round(plan.round)
                raise RoundAborted(f"this peer does not take part: {frozen}")
            fault_point("frozen")
            step.exchange(plan.round)
            if core.run.meets_at(step.t):
                reduced, held = await self._changed(step, plan.round)
            else:
                gave_all = functools.partial(step.give_all, plan.round)
                reduced, held = await self._all_reduce.run(plan, step.t, *frozen, gave_all, wait)
            if not step.over and step.prepared is None and step.ledger.frozen_for == plan.round:
                step.counts = counts = count_ledgers(plan, m)
                found = {"missing": counts.missing, "duplicated": counts.duplicated}
                core.emit(events.AddedUp(stage=core.stage, t=step.t, **found))
                core.contributed.added_up(dict(zip(plan.members, plan.ledgers, strict=True)), step.t)
                await self._tied_weights.hold(step, reduced, held)
                fault_point("prepared")
        except RoundAborted as aborted:
            for peer in aborted.by:
                core.backoff.aborted(peer, t=step.t, since_s=began, now=now_s())
            step.end_round(plan.round, failed=True)
            core.emit(events.RoundAborted(stage=core.stage, t=step.t, why=aborted.text))
        except Exception:
            # No memory, perhaps. Said, or the coordinator would wait for this round for ever.
            step.end_round(plan.round, failed=True)
            raise
        finally:
            step.opened_s = waits.opened_s
            step.end_round(plan.round, failed=False)

    async def _changed(self, step: OpenStep, round_name: str) -> tuple[torch.Tensor, Prepared]:
        """At a meeting what this island has changed, as the result of a round."""
        changed = await self._meeting.difference(step)
        return changed, await asyncio.to_thread(holds, round_name, changed, lambda _: 0.0)

    async def _thaw(self, step: OpenStep) -> None:
        """Open the sum again, once no replica can receive a mixture of before and after."""

        def thaw() -> None:
            if step.may_thaw:
                step.ledger.thaw()

        await step.stopped()
        await self._core.device.run(Rank.STEP, step.t, thaw)
        step.open_again()
        if false := step.false:
            step.false = 0
            await self._core.retract(step, false, later=True)

    async def _fetch(self, step: OpenStep, wanted: replica.Fetch) -> None:
        """Take the result of a round from the replicas that hold it."""
        core, began = self._core, now_s()

        def failed(fault: PeerFault, *, costs: bool = False) -> None:
            if fault.silent or costs:  # it says that it has the result: as good as a round that failed
                core.backoff.charge(fault.peer, t=step.t, since_s=began, now=now_s(), rounds=1)
            else:
                core.backoff.failed(fault.peer, now=now_s())
            core.emit(events.PeerLost(peer=fault.peer, stage=core.stage, why=fault.why))

        if core.run.meets_at(step.t):  # replicas have changed the same
            reduced, held = await self._changed(step, wanted.round)
        elif are_checked(core.run) and step.gave_all == wanted.round:
            value = await core.device.run(Rank.STEP, step.t, core.compute.sums.value_of_answer)
            try:
                reduced, held = await self._all_reduce.finish(wanted.round, wanted.sources, value)
            except SwarmError as error:
                if not isinstance(error, PeerSilent):
                    step.give_all("")  # from now on a result is taken on the word of two
                    step.stop("reduce")
                    step.end_round(wanted.round, failed=True)
                if isinstance(error, PeerFault):
                    failed(error, costs=True)
                return
        else:
            try:
                reduced, held, *_ = await fetch_gradient(
                    core, wanted.sources, step.t, wanted.round, digest=wanted.digest, on_fault=failed
                )
            except DownloadFailed:
                return  # told again as long as it is lacking
        step.stop("reduce")
        await step.stopped()  # else its end would be taken for the end of this round
        if not step.over:
            await self._tied_weights.hold_fetched(step, reduced, held)

    async def _retract(self, step: OpenStep, microbatches: int) -> None:
        try:
            check_bitmap(microbatches, self._core.run.microbatches(step.t))
        except Refused as refused:
            raise Refused(f"an impossible undo: {refused.text}") from None
        step.takes_out(microbatches & step.ledger.done, now=now_s())
        await self._core.retract(step, microbatches)

    # -- the weights --------------------------------------------------------------------------------

    async def _change_state(self, action: replica.StateChange) -> None:
        try:
            match action:
                case replica.BeginAgain(t=t):
                    await self._core.begin_again(self._core.steps[t])
                case replica.ApplyStep(commit=commit):
                    await self._apply_step(commit)
                case replica.CatchUp(directive=directive):
                    await self._catch_up(directive)
                case replica.RestoreStage():
                    await self._restore()
        finally:
            self._core.changing = False

    async def _apply_step(self, commit: Commit) -> None:
        core = self._core
        step = core.steps[commit.t]
        mine = step.ledger.done.bit_count()
        await self._tied_weights.renew(step, commit)
        await core.apply(commit)
        fault_point("took")
        core.stepped.set()
        core.emit(events.Stepped(stage=core.stage, t=commit.t, microbatches=mine))
        await self._reached()

    async def _reached(self) -> None:
        """Have a new version saved; say so if it is the last."""
        core = self._core
        await self._save()
        if core.finished:
            also = "is saved nowhere: export it before the last peer of the stage leaves"
            if self._checkpoints is not None:
                also = f"goes to {self._checkpoints.folder} too"
            text = f"the run is complete: all {core.run.steps} steps are taken. This peer gives out version "
            core.emit(events.Note(text=f"{text}{core.version} of stage {core.stage} until Ctrl-C; it {also}"))

    async def _catch_up(self, directive: Directive) -> None:
        """Go to the stage's position: steps were missed, or the run rolled back."""
        if await self._recovery.to(directive):
            return
        if self._coordination.behind_s > LOST_S:
            await self._restore()
        else:
            await asyncio.sleep(RETRY_S)

    async def _restore(self) -> None:
        run, behind_s = self._coordination.run_status.position, self._coordination.behind_s
        if behind_s < FAR_BACK_S and await self._recovery.rejoin(run):
            return
        if run != self._lost_at:
            self._lost_at = run
            self._core.emit(events.StageLost(stage=self._core.stage, version=run.version))
        await self._recovery.restore(run, waited_s=behind_s)

    # -- checkpoints --------------------------------------------------------------------------------

    async def _save(self) -> None:
        """Copy the state, and have it written beside the training; or kept in memory, for keepers."""
        core = self._core
        run, version = core.run, core.version
        if not (core.finished or run.is_saved(version)):
            return
        keepers = any(map(is_keeper, core.directory.at(NO_STAGE)))
        keepers = keepers or any(record.spare for record in core.directory.peers())
        # The last version is given out as it is.
        pinned = keepers and not core.finished and not self._store.on_disk
        pinned = pinned or run.meets_at(version - 1)  # any island may need it
        writer = self._writer if core.finished or self._store.on_disk else None
        if writer is None and not pinned:
            return
        tensors = await core.device.run(Rank.STEP, version, core.compute.state.copy)
        if writer is not None:
            writer.save(version, tensors)
        if pinned:
            self._store.pin(version, tensors)
            fault_point("kept")

    async def finish_saving(self, *, limit_s: float) -> None:
        """Wait until what is being written is on the disk."""
        if self._writer is not None:
            await self._writer.close(limit_s)
