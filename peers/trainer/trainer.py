"""A trainer: choose a microbatch and its route, call, take the loss, go on.

It moves tokens and losses only and holds no weights: it may run on a laptop behind a slow line. Any
number of them may run at once, and each may die at any time; the ledgers keep the count.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from peers import events
from peers.audit.asking import AuditCaller
from peers.audit.verdicts import Verdicts
from peers.clock import now_s, unix_s
from peers.evaluation.asking import Evaluations
from peers.fault_points import fault_point
from peers.islands.directory import own_directory
from peers.liveness_probe import Prober
from peers.ports import Answer, Directory, Transport
from peers.stage_calls import MAX_PAUSE_S, StageCalls
from peers.trainer.run_watch import RunWatch
from peers.trainer.samples import Batches, entering, fetched, samples_of
from peers.voices import Voices
from peers.vouching.giver import VoucherGiver
from peers.vouching.tickets import check_answer, hops_shown
from peers.waiting import end_tasks, happens, report_bug
from swarm.data import sample_offsets, trainer_order
from swarm.errors import Busy, NotNow, PeerFault, Refused, SetupError, Stale, SwarmError, count, lasting
from swarm.floats import mean_of
from swarm.ids import Microbatch, PeerId, Stage
from swarm.manifest import Run
from swarm.model.stage_io import input_metas
from swarm.policy.backoff import Backoff
from swarm.policy.link_latency import LinkLatency
from swarm.policy.router import NoPeerForStage, Pace, Router
from swarm.policy.window import Window, moving_share
from swarm.protocol.voice import heard
from swarm.protocol.worklist import WorkItem, WorkList
from swarm.records import PeerRecord
from swarm.wire.buffers import Buffer
from swarm.wire.messages import MAX_HOPS, Work, WorkDone

SLOW_S = 30.0
"""A step that takes so long is told of, and again after as long."""
SLEPT_S, AWAKE_S = 10.0, 20.0
"""A program that stood still for so long finds all records too old; so much later it has found new ones."""
IDLE_S = 0.25
"""The loop looks again at least this often."""
STALE_S = 0.1
"""How long to wait for the run's status after a peer said that a step is over."""


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """What a trainer decides for itself."""

    window: int | None = None
    """Microbatches in flight; None: found while running."""
    steps: int | None = None
    """Stop when the run has taken this many steps; None: all of the manifest's."""


def nothing_to_do(run: Run, version: int, last_step: int) -> str:
    """Why a trainer ends that has run nothing."""
    if last_step >= run.steps:
        return f"the run has taken all of its {run.steps} steps"
    return (
        f"the run has taken {version} steps, so --steps {last_step} is reached: it counts the run's steps "
        "from its beginning, not this trainer's"
    )


class Trainer:
    """Runs microbatches until the run is finished, or `leave` is called."""

    _startable = -1
    """The newest step that a microbatch could be started of, were one due."""
    _ran = _leaving = False
    """Some microbatch of this trainer was answered; it is to end."""
    _failure: SwarmError | None = None
    _looked_s, _woke_s = math.inf, -math.inf
    """When it last looked at the records, in Unix seconds, which go on while a machine sleeps; and when that
    had last been long ago."""

    def __init__(
        self, run: Run, batches: Batches, transport: Transport, directory: Directory,
        settings: TrainerSettings, emit: Callable[[events.Event], None], *, held_out: Batches | None = None,
    ) -> None:  # fmt: skip
        """`held_out`: what the run is evaluated on, if it is and this trainer has it."""
        self._run, self._batches, self._emit = run, batches, emit
        directory = own_directory(run, directory)
        self.verdicts = Verdicts(run, transport, directory, emit)
        transport.serve("evidence", self.verdicts.hear)
        directory = self.verdicts.trusted(directory)
        self._transport, self._directory, self._settings = transport, directory, settings
        me = transport.peer_id
        self._router = Router(Backoff(probed=True), caller=me)
        self._prober = Prober(run.id, transport, directory, self._router.backoff)
        self._vouchers = VoucherGiver(run, transport, directory, self.verdicts.ask)
        self._last_step = min(settings.steps or run.steps, run.steps)
        self._voices = Voices(run, transport.signer, directory, lambda: self._watch.version)
        self._audits = AuditCaller(run, transport, directory, self._answered_wrongly)
        self._first = StageCalls(
            run.id, 0, transport, directory, self._router, run.S,
            on_fault=lambda fault: emit(events.PeerLost.at_work(fault, 0, run.S)),
            trusted=self.verdicts.while_trusted, heard=lambda peers: heard(peers, self._voices.of(0)),
            opened_s=lambda t: self._watch.step_began_s if t <= self._watch.version else math.inf,
        )  # fmt: skip
        self._seen: dict[Stage, Sequence[PeerRecord]] = {}
        self._latency = LinkLatency()
        self._pace = Pace()
        self._todo = WorkList(lambda t: trainer_order(run.id, t, me, run.microbatches(t)))
        self._changed = asyncio.Event()
        self._watch = RunWatch(
            run, self._last_step, transport, directory, self._router, self.verdicts, self._voices,
            self._todo, self._changed, self._took_steps, self._went_back,
        )  # fmt: skip
        self._window = Window(
            start=settings.window or 2 * run.S, largest=settings.window or 1024, fixed=bool(settings.window)
        )
        self._rooms: dict[Stage, int] = {}
        """Microbatches that the peers of each stage take at once."""
        self._served: set[int] = set()
        """Stages that some peer serves; said once when none does any more."""
        self._running: dict[asyncio.Task[None], int] = {}
        """In flight, with the step that each belongs to."""
        self._attempts = Counter[Microbatch]()
        self._refusals: dict[Microbatch | None, dict[PeerId, Refused]] = {}
        """The peers that refuse a microbatch; None: this trainer, by the charter that they know."""
        self._not_ready: dict[Microbatch, set[PeerId]] = {}
        """The peers that have just said so, as if left out: others are asked then, be they much slower."""
        self._past: dict[PeerId, int] = {}
        """Peers of stage 0 that say that a step is over, and the newest such step."""
        self.may_end: Callable[[], bool] = lambda: True
        """Whether this trainer is needed no more once its own steps are taken."""
        self.losses: dict[Microbatch, float] = {}
        """Of the microbatches of open steps that this trainer got an answer for."""
        self._slow_told = now_s()
        self._evaluations = Evaluations(
            run, None if held_out is None else lambda offsets: fetched(
                held_out, offsets, lambda: entering(run, held_out.batch(offsets))
            ), transport, self._voices.counted, self._route_of_counted,
            lambda fault: self._router.failed(fault.peer, now=now_s(), silent=fault.silent), emit,
            self._pace.horizon_s,
        )  # fmt: skip

    @property
    def replayed(self) -> int:
        """Microbatches run again because a peer died with them."""
        return self._todo.replayed

    @property
    def step_losses(self) -> dict[int, float]:
        """Mean losses of the last steps, over exactly their M microbatches, from the last stage's ledgers."""
        return self._watch.step_losses

    @property
    def is_done(self) -> bool:
        """Whether each stage has all steps that this trainer is for."""
        return self._watch.held_by_all >= self._last_step

    @property
    def _newest_open(self) -> int:
        return min(self._watch.version + (1 if self._run.delayed_updates else 0), self._last_step - 1)

    @property
    def _in_flight(self) -> int:
        """Microbatches of open steps."""
        newest = self._newest_open  # looked up once: a window has hundreds
        return sum(t <= newest for t in self._running.values())

    async def run(self) -> None:
        """Train.

        Raises:
            SetupError: the run cannot go on, with the reason (not admitted, diverged, samples that change).
        """
        watching = asyncio.create_task(self._watch.run())
        probing = asyncio.create_task(self._prober.run())
        try:
            while not (self._leaving or (self.is_done and self.may_end())):
                if self._failure is not None:
                    raise self._failure
                self._evaluations.check()
                for task in (watching, probing):
                    if task.done():
                        task.result()
                self._start_work()
                await self._wait_for_change()
            if not self._leaving and self._last_step == self._run.steps:
                await self._evaluations.last(self._router.peers(0))
            if self._watch.told and not self._ran and not self._leaving:
                self._emit(events.Note(text=nothing_to_do(self._run, self._watch.version, self._last_step)))
        finally:
            await end_tasks((watching, probing, *self._running))
            await self._evaluations.close()
            await self._vouchers.close()
            await self._audits.close()
            await self.verdicts.close()

    def leave(self) -> None:
        """Start nothing more and end `run`. What is in flight counts all the same, at the peers."""
        self._leaving = True
        self._evaluations.stop()
        self._changed.set()

    async def _wait_for_change(self) -> None:
        now = now_s()
        due = self._todo.next_wakeup(self._startable, now=now)
        await happens(self._changed, IDLE_S if due is None else min(IDLE_S, max(0.01, due - now)))
        self._changed.clear()

    # -- microbatches -----------------------------------------------------------------------------

    def _start_work(self) -> None:
        """Fill the window: the open steps first, then the one that is about to open.

        Requests for the latter wait at their peers without holding anything. They fill up the window,
        but never keep work of an open step out of it: that step is what they wait for.
        """
        self._refresh_peers()
        if not self._watch.told:
            return  # a trainer that joins late would offer steps that are long over
        # A step that is evaluated begins once that is done: its weights are gone with it.
        self._evaluations.stop(before=self._watch.version)
        due = self._evaluations.first_due(self._watch.version)
        if due <= self._newest_open:
            self._evaluations.begin(int(due), self._router.peers(0))
        opened = int(min(self._newest_open, due - 1))
        newest = int(min(self._newest_open + 1, self._last_step - 1, due - 1))
        again: Counter[int] = Counter()
        while True:
            # With a full window whatever becomes due has to wait for an answer, which wakes us.
            self._startable = newest if len(self._running) < self._window.size else -1
            item = None
            if self._in_flight < self._window.size:
                self._startable = max(self._startable, opened)
                item = self._todo.next(opened, now=now_s())
            if item is None and len(self._running) < self._window.size:
                item = self._todo.next(newest, now=now_s())
            if item is None:
                break
            again[item.microbatch.t] += item.replay and len(self._served) == self._run.S
            task = asyncio.get_running_loop().create_task(self._microbatch(item))
            self._running[task] = item.microbatch.t
            task.add_done_callback(self._ended)
        for t, times in again.items():
            if times:
                self._emit(events.Replayed(t=t, count=times))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            report_bug("a trainer's microbatch failed", error)
        self._changed.set()

    async def _microbatch(self, item: WorkItem) -> None:
        """Run one microbatch through one route."""
        mb, peer, answered = item.microbatch, "", False

        async def another(than: PeerId) -> tuple[list[PeerId], WorkDone, float]:
            self._attempts[mb] += 1
            asked = {than}
            while True:  # as long as that one is late
                try:
                    route = self._route(mb, known=True, without=asked)
                    asked.add(route[0])
                    return await self._call(route, item, samples)
                except NoPeerForStage:
                    asked = {than}
                    await asyncio.sleep(IDLE_S)
                except (PeerFault, NotNow, Stale):
                    pass

        lacking = self._not_ready.pop(mb, set())
        try:
            if item.deepest == 0:  # it was answered, and does not count: the answering peers may be told
                lacking |= self._first.answered_by(mb)
                await self._first.holders(mb, lacking=True)
            found = self._route(mb, lacking=lacking)
            offsets = sample_offsets(self._run, *mb)
            made = partial(samples_of, self._run, self._batches, offsets)
            samples = await fetched(self._batches, offsets, made)
            peer = found[0]
            ran, done, took_s = await self._first.unless_late(
                peer, mb.t, self._call(found, item, samples), partial(another, peer)
            )
        except NoPeerForStage as none:
            await asyncio.sleep(min(0.5, max(0.05, none.retry_at - now_s())))
        except PeerFault:
            self._attempts[mb] += 1
        except NotNow as later:
            pause_s = min(MAX_PAUSE_S, later.retry_after_s)
            if isinstance(later, Busy):
                self._window.refused()
            elif peer:
                lacking.add(peer)
                known, backoff = {*self._router.answering(0)} - lacking, self._router.backoff
                if not all(backoff.in_backoff(other, now=now_s()) for other in known):
                    self._not_ready[mb], pause_s = lacking, 0.0  # another is asked at once
            await asyncio.sleep(pause_s)
        except Stale:
            # One peer's word that the step is over is no proof: the run coordinator's picture will show it.
            self._past[peer] = max(mb.t, self._past.get(peer, 0))
            await asyncio.sleep(STALE_S)
        except Refused as refused:
            await self._refused(mb, peer, refused)
        except SetupError as wrong:
            self._failure = wrong  # the samples of this trainer cannot be sent: another try changes nothing
        else:
            answered = True
            self._answered(mb, ran, done, took_s)
        finally:
            if not answered:
                self._todo.failed(mb)

    def _answered(self, mb: Microbatch, route: Sequence[PeerId], done: WorkDone, took_s: float) -> None:
        t, now, self._ran = mb.t, now_s(), True
        if t >= self._watch.version:  # else it is not asked for any more
            self.losses[mb] = done.loss
        self._todo.finished(mb)
        self._pace.answered(now=now)
        if t == self._watch.version and now - max(self._watch.step_began_s, self._slow_told) >= SLOW_S:
            self._slow_told, count, after_s = now, self._run.microbatches(t), now - self._watch.step_began_s
            self._emit(events.Working(t=t, done=self._todo.ran(t), count=count, after_s=after_s))
        self._learn_speeds(mb, route, done, took_s)
        self._refusals.pop(mb, None)

    async def _refused(self, mb: Microbatch, peer: PeerId, refused: Refused) -> None:
        """Note that a peer refuses a microbatch; once enough do, this trainer ends, or says why it cannot."""
        self._router.failed(peer, now=now_s())
        # The charter that holds ends this program by itself, whichever the others know.
        refusals = self._refusals.setdefault(None if refused.by_charter else mb, {})
        refusals[peer] = refused
        if await self._first.refusing(refusals) and refusals:  # else it was said meanwhile
            failure = SetupError(f"microbatch {mb} is refused again and again: {refused.text}")
            if refused.by_charter:
                refusals.clear()
                self._emit(events.Trouble(text=failure.text))
            else:
                self._failure = failure
        await asyncio.sleep(0.2)

    def _learn_speeds(self, mb: Microbatch, route: Sequence[PeerId], done: WorkDone, took_s: float) -> None:
        """Learn from what each stage and each link took of a microbatch."""
        known = [peer if self._router.knows(stage, peer) else "" for stage, peer in enumerate(route)]
        hops = hops_shown(self._transport.signer, self._run, mb, done, known)
        open_s = now_s() - self._watch.step_began_s if mb.t >= self._watch.version else took_s
        parts, answered = [(hop.own_s, hop.device_s) for hop in hops], {hop.peer for hop in hops}
        for hop in hops:
            if 0 <= hop.own_s <= took_s:  # its upload took no longer either, whatever is said of that
                record = self._directory.find(hop.peer)
                own_s = 1.0 / record.speed if record is not None and record.speed > 0.0 else 0.0
                beside = (self._router.count(hop.stage + side) for side in (-1, 1))
                links_s = self._latency.busy_s(hop.peer, *beside)
                by = (hops[0].peer, hops[hop.stage - 1].peer) if hop.stage else ()
                self._router.answered(
                    hop.stage, hop.peer, max(min(hop.work_s, took_s), links_s), min(took_s, open_s),
                    by=by, own_s=max(own_s, links_s), now=now_s(), share=self._pace.share,
                )  # fmt: skip
        for stage, peer in enumerate(route):
            if peer not in answered:
                self._router.passed_by(stage, peer, min(took_s, open_s))
        for here, there in pairwise(hops):
            if 0 < there.latency_s <= took_s:
                self._latency.took(here.peer, there.peer, there.latency_s, there.rtt_s)
                parts.append((there.latency_s, self._latency.least_s(here.peer, there.peer)))
        here_s = took_s - sum(part_s for part_s, _ in parts)
        if hops and here_s > 0.0 and min(parts)[0] >= 0.0:
            # The first stage may have waited for the step to open: that is no queue.
            link = self._transport.peer_id, hops[0].peer
            self._latency.took(*link, here_s)
            parts.append((self._latency.least_s(*link),) * 2)
            self._window.answered(in_flight=self._in_flight, moving=moving_share(parts))

    def _route_of_counted(self, used: Collection[PeerId]) -> list[PeerId]:
        """One peer of each stage whose word counts; none of the `used` ones where there are others."""
        self._refresh_peers()  # after the last step nothing else looks which peers have come and gone
        without = set[PeerId]()
        for stage in range(self._run.S):
            counted = set(self._voices.counted(stage))
            without.update(set(self._router.peers(stage)) - (counted.difference(used) or counted))
        return self._route(Microbatch(self._watch.version, 0), known=True, without=without)

    def _route(
        self, mb: Microbatch, *, known: bool = False, without: Collection[PeerId] = (),
        lacking: Collection[PeerId] = (),
    ) -> list[PeerId]:  # fmt: skip
        """One peer of each stage; stages behind the first may be empty for now, their callers wait.

        At most one of them has never answered; none if `known`, or once the microbatch had to be sent again.
        `lacking`: those of the first that answered it, while that lacks it, or are not ready.
        """
        ahead = self._run.microbatches(mb.t + 1) if self._run.delayed_updates else 0
        horizon_s = self._pace.horizon_s(self._todo.unstarted(mb.t) + ahead)
        route: list[PeerId] = []
        known = known or mb in self._attempts
        past = {peer for peer, t in self._past.items() if t >= mb.t}
        if past.issuperset(self._router.peers(0)):
            self._past.clear()
        else:
            without = past.union(without)
        without = {*without, *self._first.rather_not(lacking, but=without)}
        for stage in range(self._run.S):
            latency_s = partial(self._latency.price_s, route[-1]) if route else None
            try:
                found = self._router.route(
                    stage, now=now_s(), exclude=without, horizon_s=horizon_s, latency_s=latency_s, known=known
                )
            except NoPeerForStage:
                if not route:
                    raise
                break
            known = known or not self._router.knows(stage, found.peer)
            route.append(found.peer)
        return route

    async def _call(
        self, route: list[PeerId], item: WorkItem, samples: tuple[list[Buffer], list[Buffer]]
    ) -> tuple[list[PeerId], WorkDone, float]:
        """Send a microbatch; also by which route, and how long it took."""
        peer, mb, (body, proof) = route[0], item.microbatch, samples
        ticket = self._vouchers.ticket(mb, body, peer)
        work = Work(
            run=self._run.id, t=mb.t, m=mb.m, version=self._run.weight_version(mb.t),
            attempt=self._attempts[mb], deepest=item.deepest,
            route=tuple(route[1 : 1 + MAX_HOPS]), tensors=input_metas(self._run, 0), ticket=ticket,
        )  # fmt: skip

        def check(peer: PeerId, done: WorkDone, answer: Answer) -> None:
            if ticket is not None:
                said = mb, ticket.inputs, done
                check_answer(self._transport.signer, self._run, peer, 0, *said, answer.body)
                self._vouchers.answered(*said)
                self._audits.answered(0, mb, done)

        fault_point("trainer")
        self._latency.began(route)
        try:
            done, _, took_s = await self._first.ask(peer, work, [*body, *proof], check)
        finally:
            self._latency.ended(route)
        return route, done, took_s

    def _answered_wrongly(self, stage: Stage, fault: PeerFault, two_say_so: bool) -> None:
        self.verdicts.ask_soon()
        self._first.fault(fault)

    # -- the run ----------------------------------------------------------------------------------

    def _refresh_peers(self) -> None:
        stood_s, self._looked_s = unix_s() - self._looked_s, unix_s()
        if stood_s > SLEPT_S:
            self._woke_s = now_s()
            why = "(its machine slept, had too much to do, or set its clock): it looks for its peers anew"
            self._emit(events.Trouble(text=f"this program stood still for {lasting(stood_s)} {why}"))
        for stage in range(self._run.S):
            records = self._directory.at(stage)
            if records is not self._seen.get(stage):
                self._seen[stage] = records
                self._vouchers.saw(records)
                self._set_peers(stage, [record for record in records if record.state == "serving"])

    def _set_peers(self, stage: Stage, serving: Sequence[PeerRecord]) -> None:
        self._router.set_peers(stage, [record.peer for record in serving])
        if serving:
            self._served.add(stage)
        elif stage in self._served and now_s() - self._woke_s < AWAKE_S:
            self._seen.pop(stage, None)  # it is looked at again
        elif stage in self._served and not any(r.state == "leaving" for r in self._directory.at(stage)):
            self._served.discard(stage)  # a peer that leaves may be about to pause
            paused = sum(record.state == "paused" for record in self._directory.at(stage))
            waits = f"stage {stage} has only {count(paused, 'paused peer')}: the run waits until one resumes"
            lost = events.StageLost(stage=stage, version=self._watch.version)
            self._emit(events.Trouble(text=waits) if paused else lost)
        if serving and not self._settings.window:
            self._rooms[stage] = sum(record.max_inflight for record in serving)
            self._window.set_largest(min(self._rooms.values()))

    # -- what follows from where the run is ---------------------------------------------------------

    def _took_steps(self, steps: range, took_s: float) -> None:
        """Say so, and forget what belongs to them."""
        if steps:
            self._tell_steps(steps, took_s)
            self._vouchers.stepped(steps.start, steps.stop)
            self._pace.stepped(self._todo.ran(steps[-1]) / max(1, self._run.microbatches(steps[-1])))
        self._todo.stepped(steps.stop)
        self._attempts = Counter({mb: tried for mb, tried in self._attempts.items() if mb.t >= steps.stop})
        self._not_ready = {mb: by for mb, by in self._not_ready.items() if mb.t >= steps.stop}
        self._past = {peer: t for peer, t in self._past.items() if t >= steps.stop}
        self._refusals = {mb: by for mb, by in self._refusals.items() if mb is None or mb.t >= steps.stop}
        self._changed.set()

    def _went_back(self, steps: range) -> None:
        """Say so, and run them again."""
        self._past.clear()
        if steps:
            self._emit(events.RolledBack(stage=-1, step=steps.start))
            self._todo.went_back(steps.start)
            self._attempts.clear()

    def _tell_steps(self, steps: range, took_s: float) -> None:
        run = self._run
        tokens = sum(map(run.microbatches, steps)) * run.tokens_per_step / run.M
        counts = tuple(len(self._router.peers(stage)) for stage in range(run.S))
        for t in steps:
            meets = run.meets_at(t)
            found = [self.losses.pop(Microbatch(t, m), None) for m in range(run.microbatches(t))]
            own = [loss for loss in found if loss is not None]
            losses = tuple(own) if len(own) == len(found) else ()
            loss = self.step_losses.get(t, mean_of(losses) if losses else None)
            self._emit(
                events.StepDone(
                    t=t, steps=self._last_step, loss=loss, peers=counts, losses=losses,
                    tokens_per_s=0.0 if meets else tokens / max(1e-6, took_s), meeting=meets,
                )
            )  # fmt: skip
