"""How peers agree on steps: reports go up, briefs come down. The decisions are `swarm.policy.rounds`.

Every peer runs a Council. It reports its ledger to the coordinator of its stage; if it is that
coordinator itself, it also decides for the stage; if its stage is stage 0, it is the conductor of
the run as well. Nothing here is kept on disk or handed over: whoever takes over is told everything
again within a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import struct
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from peers.asking import ask_status
from peers.core import GOES_KEPT, StageCore
from peers.courier import Courier
from peers.ports import Answer, Directory, Request, Transport
from peers.roll import Roll
from peers.waiting import happens
from swarm.errors import Leaving, NotNow, PeerFault, Refused, SwarmError, short
from swarm.ids import Era, PeerId, Stage, Standing
from swarm.policy.bans import Bans
from swarm.policy.eras import check_standing, is_alone_ahead
from swarm.policy.ledger import everything, from_bytes, members_of, read_bitmap, to_bytes
from swarm.policy.rounds import (
    Adopt,
    Decision,
    Go,
    Held,
    Lacking,
    MemberStep,
    Plan,
    Reduce,
    StageStep,
    Undo,
    conduct,
    decide,
    digest_majority,
    eldest,
)
from swarm.run import Run
from swarm.wire.messages import (
    Ack,
    AdoptWire,
    Brief,
    GoWire,
    HeldWire,
    PlanWire,
    Report,
    RunBrief,
    StepBrief,
    StepLacking,
    StepReport,
    StepSummary,
    Summary,
    Watch,
    Watched,
    check_run,
    pack,
    unpack,
    unpack_answer,
)

REFRESH_S = 1.0
"""Everything is told again this often, so a lost message costs at most this."""
GONE_AFTER_S = 3.5
"""A member that was silent this long is left out: three missed reports, as with the heartbeats of a call."""
GATHER_S = 0.1
"""News of progress that come within this time travel in one report; what a step waits for goes at once."""
CALL_S = 3.0
"""Limit for one report or brief."""
LOSSES_KEPT = 64
MOST_WITNESSES = 8
MOST_BEHIND_S = 3600
WATCHED_S = 5.0
"""A trainer asks about once a second, somebody else after an answer that was lost."""
MOST_WATCHERS = 16
MOST_STEPS = 4
"""Steps in one report: the one that is open, one more with delayed updates, and those about to close."""


class Council:
    """This peer's voice in its stage and, in stage 0, in the run.

    Args:
        obey: called with each brief; it makes the peer do what the brief says.
    """

    def __init__(
        self,
        core: StageCore,
        transport: Transport,
        directory: Directory,
        roll: Roll,
        bans: Bans,
        *,
        obey: Callable[[Brief], None],
        bandwidth: Callable[[], float],
        since_s: float,
    ) -> None:
        self._core, self._transport, self._directory, self._bans = core, transport, directory, bans
        self._roll = roll
        self._obey, self._bandwidth = obey, bandwidth
        self._run, self._stage, self._me, self._since_s = core.run, core.stage, core.me, since_s
        self._members: dict[PeerId, tuple[Report, list[list[float]], float]] = {}
        self._plans: dict[int, Plan] = {}
        self._decisions: dict[int, Decision] = {}
        self._told: dict[PeerId, Brief] = {}
        self._number = 0
        self._summaries: dict[Stage, tuple[Summary, PeerId, float]] = {}
        self._goes: dict[int, Go] = {}
        self._era = core.era
        """The latest that was heard of: only what belongs to it is decided upon."""
        self._behind_since: float | None = None
        self._witnessed = core.standing
        """How far a member of another stage said to be."""
        self._asking: asyncio.Task[None] | None = None
        self._losses: dict[int, float] = {}
        self.whole_run = RunBrief(run=core.run.id)
        self._revision = 0
        self._revised = asyncio.Event()
        self._watchers: dict[PeerId, float] = {}
        """When each trainer last asked, the latest last."""
        self._silent = False
        self.brief: Brief | None = None
        """The last brief that this peer obeyed."""
        self._reports = Courier(self._send_report)
        self._briefs = Courier(self._send_brief)
        self._summary_out = Courier(self._send_summary)
        self._run_briefs = Courier(self._send_run_brief)
        losses_bytes = 16 * self._run.M
        transport.serve("report", self._serve_report, max_body_bytes=losses_bytes)
        transport.serve("brief", self._serve_brief)
        transport.serve("summary", self._serve_summary)
        transport.serve("run", self._serve_run)
        transport.serve("watch", self._serve_watch)

    # -- who leads --------------------------------------------------------------------------------

    def coordinator(self, stage: Stage) -> PeerId | None:
        """The live serving peer of `stage` that came first, as far as this peer can see."""
        now = time.monotonic()
        records = self._roll.at(stage)
        since_s = {r.peer: r.since or math.inf for r in records} | {self._me: self._since_s}
        serving = {r.peer for r in records if r.state == "serving"}
        if stage == self._stage:
            serving |= {p for p, (_, _, seen) in self._members.items() if now - seen < GONE_AFTER_S}
            serving -= {r.peer for r in records if r.state in ("leaving", "left", "paused")}
            serving.discard(self._me)
            if self._core.joined and not (self._core.leaving and serving):
                serving.add(self._me)
        there = [p for p in serving if p == self._me or not self._bans.resting(p, now=now)]
        return eldest({peer: since_s.get(peer, math.inf) for peer in there})

    # -- the loop ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Report on every change, and every second."""
        while True:
            await self._core.news.wait(quiet_s=REFRESH_S, gather_s=GATHER_S)
            self._speak()

    async def close(self) -> None:
        """Stop talking."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        for courier in (self._reports, self._briefs, self._summary_out, self._run_briefs):
            await courier.close()

    def lost(self, peer: PeerId) -> None:
        """The connection to `peer` broke: do not wait for its silence."""
        self._told.pop(peer, None)
        if self._members.pop(peer, None) is not None:
            self._core.news.urgent()

    async def farewell(self) -> None:
        """Tell who coordinates that this peer is gone, so that nobody waits for its silence."""
        self._silent = True
        await self._reports.close()  # a report that comes after it would count us in again
        chief = self.coordinator(self._stage)
        if chief is not None and chief != self._me:
            report = Report(
                run=self._run.id, stage=self._stage, era=self._core.era, version=self._core.version,
                farewell=True,
            )  # fmt: skip
            with contextlib.suppress(SwarmError):
                await self._transport.call(chief, "report", pack(report), deadline_s=CALL_S)

    def _speak(self) -> None:
        if self._silent or (not self._core.joined and not self._core.steps):
            return
        self._enter(self._core.era)
        chief = self.coordinator(self._stage)
        if chief is None:
            return
        self._directory.watch(self._stages_watched(leads=chief == self._me))
        report, losses = self._report()
        if chief == self._me:
            self._members[self._me] = (report, losses, time.monotonic())
            self._lead()
        else:
            self._members.pop(self._me, None)
            self._reports.post(chief, (report, losses))

    def _stages_watched(self, *, leads: bool) -> set[Stage]:
        """Of those who call us, our mates, whom we call; and of the conductor, whom coordinators call."""
        around = {stage for stage in range(self._stage - 1, self._stage + 2) if 0 <= stage < self._run.S}
        around |= self._core.compute.shares.keys()
        return around | {0} if leads else around

    # -- a member's voice -------------------------------------------------------------------------

    def _report(self) -> tuple[Report, list[list[float]]]:
        core, m = self._core, self._run.M
        steps, losses = [], []
        for t in sorted(core.steps):
            step = core.steps[t]
            done, doing, fixed = step.ledger.done, step.ledger.doing, step.ledger.fixed
            if step.handing:  # on its way to a mate: in no sum, but not to be run again
                done, doing, fixed = 0, done | doing, 0
            held = step.held
            steps.append(
                StepReport(
                    t=t,
                    done=to_bytes(done, m),
                    doing=to_bytes(doing & ~done, m),
                    fixed=to_bytes(fixed, m) if fixed else b"",
                    frozen_for=step.ledger.frozen_for or "",
                    held=None
                    if held is None
                    else HeldWire(round=held.round, sqnorm=held.sqnorm, digest=held.digest),
                    failed_round=step.failed_round,
                )
            )
            if core.is_last:
                losses.append([step.loss_of(i) for i in members_of(done)])
        report = Report(
            run=self._run.id,
            stage=self._stage,
            era=core.era,
            version=core.version,
            digest=core.digest,
            kind=core.kind,
            steps=tuple(steps),
            goes=_go_wires(core.goes),
            bandwidth_bps=self._bandwidth(),
        )
        return report, losses

    async def _send_report(self, chief: PeerId, message: tuple[Report, list[list[float]]]) -> None:
        report, losses = message
        body = [struct.pack(f"<{len(row)}d", *row) for row in losses]
        try:
            answer = await self._transport.call(chief, "report", pack(report), body, deadline_s=CALL_S)
            brief = unpack_answer(chief, answer.header, Brief)
        except PeerFault as fault:
            self._bans.failed(chief, now=time.monotonic(), silent=fault.silent)
            self._core.news.urgent()
            return
        except (Refused, Leaving):
            # It will not hear us, whoever is wrong: let the next one coordinate us meanwhile.
            self._bans.failed(chief, now=time.monotonic())
            self._core.news.some()
            return
        except SwarmError:
            return
        self._bans.answered(chief)
        self._hear(brief)

    def _hear(self, brief: Brief) -> None:
        last = self.brief
        if last is not None and last.coordinator == brief.coordinator and brief.number < last.number:
            return  # overtaken by a newer one
        self.brief = brief
        self._enter(brief.era)
        if brief.coordinator != self._me:
            began = time.monotonic() - min(max(0, brief.behind_s), MOST_BEHIND_S)
            self._behind_since = began if brief.behind_s > 0 else None
        if self._stage == 0 and brief.coordinator != self._me:
            self._set_whole_run(brief.whole_run)
        self._obey(brief)

    async def _serve_brief(self, request: Request) -> Answer:
        brief = unpack(request.header, Brief)
        if brief.run != self._run.id or brief.stage != self._stage:
            raise Refused(
                f"a brief for stage {brief.stage} of run {brief.run[:40]!r}; this is stage {self._stage}"
            )
        if request.peer == brief.coordinator == self.coordinator(self._stage):
            self._hear(brief)
        return Answer(pack(Ack()))

    # -- a coordinator's --------------------------------------------------------------------------

    async def _serve_report(self, request: Request) -> Answer:
        report = unpack(request.header, Report)
        if report.run != self._run.id or report.stage != self._stage:
            raise Refused(
                f"a report for stage {report.stage} of run {report.run[:40]!r}; this is stage {self._stage}"
            )
        if not self._core.joined:
            raise NotNow("this peer has not joined yet")
        if self._core.leaving:
            raise Leaving("this peer is leaving: let another coordinate the stage")
        await self._roll.require(request.peer, self._stage)
        check_report(report, self._run)
        if report.farewell:
            self.lost(request.peer)
            raise NotNow("goodbye")
        rows = []
        if self._core.is_last:
            rows = [8 * int.from_bytes(step.done, "little").bit_count() for step in report.steps]
        if list(request.body_sizes) != rows:
            given = list(request.body_sizes)[:8]
            raise Refused(f"losses of {given} bytes do not fit the ledgers: {rows[:8]} were due")
        body = await request.accept()
        losses = [list(struct.unpack(f"<{len(row) // 8}d", row)) for row in body]
        self._check_ahead(request.peer, report)
        self._bans.answered(request.peer)
        self._members[request.peer] = (report, losses, time.monotonic())
        self._enter(report.era)
        if self.coordinator(self._stage) != self._me:
            if self.brief is None:
                raise NotNow("another peer coordinates this stage")
            return Answer(pack(self.brief))
        self._lead()
        return Answer(pack(self._numbered(self._brief_for(request.peer))))

    def _check_ahead(self, peer: PeerId, report: Report) -> None:
        """Stages step together: nobody is two versions ahead of the rest, unless this peer slept.

        Peers of the other stages know, and the member, which repeats itself, is believed a second later.
        """
        known = max(self._core.standing, self.run_standing, self._witnessed)
        if self._run.S > 1 and is_alone_ahead(Standing(report.era, report.version), known):
            if self._asking is None or self._asking.done():
                self._asking = asyncio.get_running_loop().create_task(self._ask_witnesses())
            raise NotNow(
                f"peer {short(peer)} says that it is at version {report.version}; the run is at "
                f"{known.version}",
                retry_after_s=REFRESH_S,
            )

    async def _ask_witnesses(self) -> None:
        """How far the other stages are, from members: those who coordinate them may have slept as well."""
        others = [r for r in self._directory.peers() if r.state == "serving" and r.stage != self._stage]
        furthest = sorted(others, key=lambda r: (-r.version, r.peer))[:MOST_WITNESSES]
        told = await ask_status(self._run, self._transport, [record.peer for record in furthest])
        for status in told.values():
            self._witnessed = max(self._witnessed, status.standing)

    def _lead(self) -> None:
        """Decide for the stage, tell the members whose brief changed, and tell the conductor."""
        now = time.monotonic()
        for peer in [p for p, (_, _, seen) in self._members.items() if now - seen > GONE_AFTER_S]:
            self.lost(peer)
        own_report, own_losses = self._report()
        self._members[self._me] = (own_report, own_losses, now)
        for report, _, _ in self._members.values():
            self._learn_goes(report.goes, report.era)
        self._decide()
        self._look_behind(now)
        chief = self.coordinator(0)
        summary = self._summary()
        if chief == self._me:
            self._summaries[self._stage] = (summary, self._me, now)
            self._conduct()
        elif chief is not None:
            self._summary_out.post(chief, summary)
        for peer in self._members:
            self._tell(peer)

    def _look_behind(self, now: float) -> None:
        """Whether the run has gone on without this stage: nobody here has what the others have taken."""
        newest = self._newest_version()
        behind = self.whole_run.era == self._era and self.whole_run.version > newest
        held = any(view.held for view in self._member_steps(newest))
        # Who holds a step waits for its go. The run is past it: if nobody here was told, nobody remembers it.
        followed = held and newest in self._known_goes()
        if (behind and not followed) or not self._present():
            self._behind_since = self._behind_since or now
        else:
            self._behind_since = None

    @property
    def run_standing(self) -> Standing:
        """How far the run is, as far as the conductor told."""
        return Standing(self.whole_run.era, self.whole_run.version)

    @property
    def behind_s(self) -> float:
        """For how long this stage, which this peer coordinates, has been unable to follow the run."""
        return self._stuck_s() if self.coordinator(self._stage) == self._me else 0.0

    def _stuck_s(self) -> float:
        return 0.0 if self._behind_since is None else time.monotonic() - self._behind_since

    def _tell(self, peer: PeerId) -> None:
        """Send `peer` its brief if it differs from the last one."""
        brief = self._brief_for(peer)
        if peer == self._me:
            self._hear(self._numbered(brief))
        elif brief != self._told.get(peer):
            self._told[peer] = brief
            self._briefs.post(peer, self._numbered(brief))

    def _numbered(self, brief: Brief) -> Brief:
        self._number += 1
        return msgspec.structs.replace(brief, number=self._number)

    def _present(self) -> dict[PeerId, Report]:
        """Of the members that are in the present era. The others have to go back first."""
        return {p: report for p, (report, _, _) in self._members.items() if report.era == self._era}

    def _newest_version(self) -> int:
        """Of the stage. An era that nobody of it has entered yet begins at its start."""
        return max((report.version for report in self._present().values()), default=self._era.start)

    def _open(self) -> list[int]:
        ahead = 1 if self._run.delayed_updates else 0
        newest = self._newest_version()
        return [t for t in range(newest, newest + ahead + 1) if t < self._run.steps]

    def _member_steps(self, t: int) -> list[MemberStep]:
        views = []
        for peer, report in self._present().items():
            for step in report.steps:
                if step.t == t:
                    held = step.held
                    views.append(
                        MemberStep(
                            peer=peer,
                            done=from_bytes(step.done, self._run.M),
                            doing=from_bytes(step.doing, self._run.M),
                            fixed=from_bytes(step.fixed, self._run.M) if step.fixed else 0,
                            frozen_for=step.frozen_for,
                            held=None if held is None else Held(held.round, held.sqnorm, held.digest),
                            failed_round=step.failed_round,
                            bandwidth_bps=max(0.0, report.bandwidth_bps),
                        )
                    )
        return views

    def _decide(self) -> None:
        self._decisions = {}
        for t in self._open():
            views = self._member_steps(t)
            if not views:
                continue
            decision = decide(
                self._run.id, self._stage, t, self._run.M, self._core.compute.numel, views, self._plans.get(t)
            )
            self._decisions[t] = decision
            if isinstance(decision, Reduce):
                self._plans[t] = decision.plan
                self._note_loss(t)
            elif isinstance(decision, Adopt):
                self._note_loss(t)
        for t in [t for t in self._plans if t < self._newest_version()]:
            del self._plans[t]

    def _note_loss(self, t: int) -> None:
        """Last stage: the mean loss of step `t` from its members' ledgers, added in order of `m`."""
        if not self._core.is_last or t in self._losses:
            return
        by_m: dict[int, float] = {}
        for report, losses, _ in self._members.values():
            for step, row in zip(report.steps, losses, strict=False):
                if step.t == t:
                    by_m.update(zip(members_of(from_bytes(step.done, self._run.M)), row, strict=False))
        if len(by_m) == self._run.M:
            self._losses[t] = sum(by_m[m] for m in range(self._run.M)) / self._run.M

    def _brief_for(self, peer: PeerId) -> Brief:
        newest = self._newest_version()
        at_newest = {p: r for p, r in self._present().items() if r.version == newest}
        # Different kinds of device differ in last bits; every so often the stage takes the majority's bits.
        kind = self._members[peer][0].kind
        alike = {p: r for p, r in at_newest.items() if r.kind == kind or self._core.realigns(newest)}
        digests = {p: r.digest for p, r in alike.items() if r.digest}
        digest = digest_majority(digests) if len(digests) == len(alike) and digests else ""
        sources = sorted(p for p, r in (alike or at_newest).items() if not digest or r.digest == digest)
        steps = []
        for t, decision in self._decisions.items():
            if isinstance(decision, Reduce):
                plan = decision.plan
                wire = PlanWire(
                    round=plan.round,
                    number=plan.number,
                    members=plan.members,
                    ledgers=tuple(to_bytes(ledger, self._run.M) for ledger in plan.ledgers),
                    parts=plan.parts,
                )
                steps.append(StepBrief(t=t, plan=wire))
            elif isinstance(decision, Adopt):
                steps.append(StepBrief(t=t, adopt=AdoptWire(round=decision.round, sources=decision.sources)))
            elif isinstance(decision, Undo):
                steps.append(StepBrief(t=t, undo=to_bytes(decision.by.get(peer, 0), self._run.M)))
            else:
                steps.append(StepBrief(t=t))
        return Brief(
            run=self._run.id,
            stage=self._stage,
            coordinator=self._me,
            era=self._era,
            version=newest,
            behind_s=int(self._stuck_s()),
            sources=tuple(sources[:64]),
            digest=digest,
            steps=tuple(steps),
            goes=_go_wires(self._known_goes()),
            # Trainers ask peers of stage 0; to the others it would be noise at every microbatch.
            whole_run=self.whole_run if self._stage == 0 else RunBrief(run=self._run.id),
        )

    async def _send_brief(self, member: PeerId, brief: Brief) -> None:
        try:
            await self._transport.call(member, "brief", pack(brief), deadline_s=CALL_S)
        except PeerFault:
            self.lost(member)
        except SwarmError:
            pass

    # -- towards the conductor --------------------------------------------------------------------

    def _summary(self) -> Summary:
        steps = []
        full = everything(self._run.M)
        for t, decision in self._decisions.items():
            lacking = unclaimed = 0
            if isinstance(decision, Lacking):
                lacking, unclaimed = decision.lacking, decision.unclaimed
            ready = isinstance(decision, Adopt) and decision.ready
            steps.append(
                StepSummary(
                    t=t,
                    lacking=to_bytes(lacking & full, self._run.M),
                    unclaimed=to_bytes(unclaimed & full, self._run.M),
                    ready=ready,
                    sqnorm=decision.sqnorm if isinstance(decision, Adopt) else 0.0,
                    loss=self._losses.get(t),
                )
            )
        return Summary(
            run=self._run.id,
            stage=self._stage,
            era=self._era,
            version=self._newest_version(),
            members=len(self._members),
            steps=tuple(steps),
            goes=_go_wires(self._known_goes()),
        )

    async def _send_summary(self, chief: PeerId, summary: Summary) -> None:
        try:
            answer = await self._transport.call(chief, "summary", pack(summary), deadline_s=CALL_S)
            whole_run = unpack_answer(chief, answer.header, RunBrief)
        except PeerFault as fault:
            self._bans.failed(chief, now=time.monotonic(), silent=fault.silent)
            self._core.news.urgent()
            return
        except SwarmError:
            return
        self._bans.answered(chief)
        self._hear_run(whole_run)

    async def _serve_run(self, request: Request) -> Answer:
        whole_run = unpack(request.header, RunBrief)
        if whole_run.run != self._run.id:
            raise Refused(f"news of run {whole_run.run[:40]!r}; this peer serves {self._run.id}")
        if request.peer == whole_run.conductor == self.coordinator(0):
            self._hear_run(whole_run)
        return Answer(pack(Ack()))

    def _hear_run(self, whole_run: RunBrief) -> None:
        known = self._known_goes()
        self._enter(whole_run.era)
        self._learn_goes(whole_run.goes, whole_run.era)
        if whole_run != self.whole_run:
            self._set_whole_run(whole_run)
        if self._known_goes() != known and self.coordinator(self._stage) == self._me:
            self._core.news.urgent()

    # -- the conductor's --------------------------------------------------------------------------

    async def _serve_summary(self, request: Request) -> Answer:
        summary = unpack(request.header, Summary)
        if summary.run != self._run.id or not 0 <= summary.stage < self._run.S:
            raise Refused(f"a summary of stage {summary.stage} of run {summary.run[:40]!r}")
        if self.coordinator(0) == self._me:
            await self._roll.require(request.peer, summary.stage)
            check_summary(summary, self._run)
            self._summaries[summary.stage] = (summary, request.peer, time.monotonic())
            self._enter(summary.era)
            self._conduct()
        return Answer(pack(self.whole_run))

    def _conduct(self) -> None:
        """The picture of the whole run, from the stages' summaries; and the go, once all are ready."""
        now = time.monotonic()
        for stage in [s for s, (_, _, seen) in self._summaries.items() if now - seen > GONE_AFTER_S]:
            del self._summaries[stage]
        summaries = {s: said for s, (said, _, _) in self._summaries.items() if said.era == self._era}
        if not summaries:
            return
        version = max(s.version for s in summaries.values())
        for summary in summaries.values():
            self._learn_goes(summary.goes, summary.era)
            for step in summary.steps:
                if step.loss is not None:
                    self._losses.setdefault(step.t, step.loss)
        ahead = 1 if self._run.delayed_updates else 0
        oldest = min(s.version for s in summaries.values())
        lacking = []
        for t in sorted({oldest, *range(version, version + ahead + 1)}):
            if t >= self._run.steps:
                continue
            views = {s: _stage_step(summary, t) for s, summary in summaries.items()}
            known = {s: view for s, view in views.items() if view is not None}
            if t == oldest:  # steps are taken in their order
                go = conduct(t, self._run.S, known, self._goes)
                if go is not None:
                    self._goes[t] = go
            if t >= version:
                lacking.append(self._lacking(t, known))
        while len(self._losses) > LOSSES_KEPT:
            del self._losses[min(self._losses)]
        whole_run = RunBrief(
            run=self._run.id,
            era=self._era,
            version=version,
            lacking=tuple(lacking),
            goes=_go_wires(self._known_goes()),
            losses=tuple(sorted(self._losses.items())),
            conductor=self._me,
        )
        if whole_run == self.whole_run:
            return
        news = whole_run.goes != self.whole_run.goes
        self._set_whole_run(whole_run)
        for stage, (_, peer, _) in self._summaries.items():
            if stage != self._stage:
                self._run_briefs.post(peer, whole_run)
        if news:
            self._core.news.urgent()

    def _lacking(self, t: int, known: dict[Stage, StageStep]) -> StepLacking:
        """Nothing is said of a stage that has not spoken: nobody could run its microbatches again now."""
        by_stage = [known[s].unclaimed if s in known else 0 for s in range(self._run.S)]
        return StepLacking(t=t, by_stage=tuple(to_bytes(bitmap, self._run.M) for bitmap in by_stage))

    async def _send_run_brief(self, peer: PeerId, whole_run: RunBrief) -> None:
        with contextlib.suppress(SwarmError):  # it asks again with its next summary
            await self._transport.call(peer, "run", pack(whole_run), deadline_s=CALL_S)

    def _enter(self, era: Era) -> None:
        """Nothing of an earlier era is decided any more: its goes would let one stage run ahead."""
        if era > self._era:
            self._era = era
            self._goes.clear()
            self._plans.clear()
            self._decisions.clear()
            self._core.news.urgent()

    def _learn_goes(self, goes: Sequence[GoWire], era: Era) -> None:
        if era != self._era:
            return
        # A go is for a step that all stages have the weights for. One that ours has not is a lie, or we are
        # behind, and it is told again. Kept, it would hide all true ones that come after, for good.
        newest = max((report.version for report in self._present().values()), default=0)
        for go in goes:
            if go.t not in self._goes and go.t <= max(newest, self._core.version):
                self._goes[go.t] = Go(go.t, go.total_sqnorm)
                for t in [t for t in self._goes if t < go.t - 4]:
                    del self._goes[t]

    def _known_goes(self) -> dict[int, Go]:
        return {**(self._core.goes if self._core.era == self._era else {}), **self._goes}

    # -- for trainers -----------------------------------------------------------------------------

    def _set_whole_run(self, whole_run: RunBrief) -> None:
        if whole_run != self.whole_run:
            self.whole_run = whole_run
            self._revise()

    def _revise(self) -> None:
        self._revision += 1
        revised, self._revised = self._revised, asyncio.Event()
        revised.set()

    @property
    def trainers(self) -> tuple[PeerId, ...]:
        """Who watches the run by us; by id."""
        since = time.monotonic() - WATCHED_S
        return tuple(sorted(peer for peer, at in self._watchers.items() if at > since))

    async def _serve_watch(self, request: Request) -> Answer:
        watch = unpack(request.header, Watch)
        check_run(watch.run, self._run.id)
        self._watchers.pop(request.peer, None)
        self._watchers[request.peer] = time.monotonic()
        if len(self._watchers) > MOST_WATCHERS:
            del self._watchers[next(iter(self._watchers))]
        if watch.seen == self._revision and watch.seen >= 0:
            await happens(self._revised, REFRESH_S)
        far = self.run_standing
        if self._core.joined:
            far = max(far, self._core.standing)
        watched = Watched(revision=self._revision, era=far.era, version=far.version, brief=self.whole_run)
        return Answer(pack(watched))


def check_report(report: Report, run: Run) -> None:
    """Refuse what no member can honestly say: it would break the coordinator's arithmetic."""
    check_standing(report.era, report.version, run, what="a report")
    if not 0.0 <= report.bandwidth_bps < math.inf:
        raise Refused(f"an impossible bandwidth, {report.bandwidth_bps} bit/s")
    _check_steps([step.t for step in report.steps], run)
    _check_goes(report.goes, run)
    for step in report.steps:
        for ledger in (step.done, step.doing, *((step.fixed,) if step.fixed else ())):
            read_bitmap(ledger, run.M)
        if step.held is not None:
            _check_sqnorm(step.held.sqnorm)


def check_summary(summary: Summary, run: Run) -> None:
    """Refuse what no coordinator can honestly say: it would break the conductor's arithmetic."""
    check_standing(summary.era, summary.version, run, what="a summary")
    _check_steps([step.t for step in summary.steps], run)
    _check_goes(summary.goes, run)
    for step in summary.steps:
        for bitmap in (step.lacking, step.unclaimed):
            read_bitmap(bitmap, run.M)
        _check_sqnorm(step.sqnorm)


def _check_steps(steps: Sequence[int], run: Run) -> None:
    if (
        len(steps) > MOST_STEPS
        or list(steps) != sorted(set(steps))
        or not all(0 <= t < run.steps for t in steps)
    ):
        raise Refused(f"{list(steps)[:8]} are not open steps of a run of {run.steps}")


def _check_goes(goes: Sequence[GoWire], run: Run) -> None:
    if len(goes) > MOST_STEPS:
        raise Refused(f"{len(goes)} goes at once; at most {MOST_STEPS}")
    for go in goes:
        if not 0 <= go.t < run.steps:
            raise Refused(f"a go for step {go.t} of a run of {run.steps} steps")
        _check_sqnorm(go.total_sqnorm)


def _check_sqnorm(sqnorm: float) -> None:
    """Infinity is honest: the run diverged, and taking the step says so."""
    if not sqnorm >= 0.0:
        raise Refused(f"an impossible squared norm, {sqnorm}")


def _go_wires(goes: Mapping[int, Go]) -> tuple[GoWire, ...]:
    """The newest, ascending."""
    return tuple(GoWire(t=t, total_sqnorm=goes[t].total_sqnorm) for t in sorted(goes)[-GOES_KEPT:])


def _stage_step(summary: Summary, t: int) -> StageStep | None:
    """A stage that is past step `t` lacks nothing of it, and the go is known from it."""
    for step in summary.steps:
        if step.t == t:
            unclaimed = int.from_bytes(step.unclaimed, "little")
            lacking = int.from_bytes(step.lacking, "little")
            return StageStep(summary.stage, summary.version, lacking, unclaimed, step.ready, step.sqnorm)
    if summary.version > t:
        return StageStep(summary.stage, summary.version, 0, 0, False, 0.0)
    return None
