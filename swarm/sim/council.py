"""Reports up, briefs down: what `peers/council.py` does, over the simulated network.

The decisions are the real ones of `swarm.policy.rounds`; this is the shell around them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from swarm.errors import Leaving, NotNow, PeerFault, Refused, SwarmError
from swarm.ids import Era, PeerId, Stage, Standing
from swarm.policy import rounds
from swarm.policy.bans import Bans
from swarm.policy.eras import is_alone_ahead
from swarm.policy.rounds import Adopt, Decision, Go, Lacking, MemberStep, Plan, Reduce, StageStep, Undo
from swarm.sim.check import ELEMENTS
from swarm.sim.clock import Future, Task
from swarm.sim.terms import RUN, Brief, Report, RunBrief, StepBrief, Summary, Watched

if TYPE_CHECKING:
    from swarm.sim.peer import StagePeer

REFRESH_S = 1.0
GONE_AFTER_S = 3.5
GATHER_S = 0.1
CALL_S = 3.0
GOES_KEPT = 3

M = TypeVar("M")


class News:
    """Calls `speak` when there is something to report: at once if a step waits for it, else gathered."""

    def __init__(self, peer: StagePeer, speak: Callable[[], None]) -> None:
        self._peer, self._speak = peer, speak
        self._due = self._gathering = False
        self._last = float("-inf")

    def some(self) -> None:
        """Progress: may wait for more of it."""
        if not self._gathering:
            self._gathering = True
            wait_s = max(0.0, self._last + GATHER_S - self._peer.clock.now)
            self._peer.clock.after(wait_s, self._peer, self._gathered)

    def urgent(self) -> None:
        """A step waits for this."""
        if not self._due:
            self._due = True
            self._peer.clock.soon(self._peer, self._now)

    def _gathered(self, _: None) -> None:
        if self._gathering:
            self._now(None)

    def _quiet(self, last: float) -> None:
        if last == self._last:
            self._now(None)

    def _now(self, _: None) -> None:
        clock = self._peer.clock
        self._due = self._gathering = False
        self._last = clock.now
        clock.after(REFRESH_S, self._peer, self._quiet, self._last)
        self._speak()


ABSENT = ("leaving", "left", "paused")
"""Who says so coordinates nothing."""


class Courier(Generic[M]):
    """At most one message in flight to each peer; what is posted meanwhile replaces what waits."""

    def __init__(self, peer: StagePeer, send: Callable[[PeerId, M], Awaitable[None]]) -> None:
        self._peer, self._send = peer, send
        self._waiting: dict[PeerId, M] = {}
        self._running: dict[PeerId, Task[None]] = {}

    def post(self, to: PeerId, message: M) -> None:
        self._waiting[to] = message
        if to not in self._running:
            task = self._peer.spawn(self._deliver(to))
            if not task.done:
                self._running[to] = task

    async def _deliver(self, to: PeerId) -> None:
        while to in self._waiting:
            await self._send(to, self._waiting.pop(to))
        self._running.pop(to, None)

    def close(self) -> None:
        self._waiting.clear()
        for task in self._running.values():
            task.cancel()
        self._running.clear()


class Council:
    """A peer's voice in its stage and, in stage 0, in the run."""

    def __init__(self, peer: StagePeer, bans: Bans, *, obey: Callable[[Brief], None]) -> None:
        self._peer, self._bans, self._obey = peer, bans, obey
        self._terms, self._stage, self._me = peer.terms, peer.stage, peer.name
        self._clock = peer.clock
        self._members: dict[PeerId, tuple[Report, float]] = {}
        self._present: dict[PeerId, Report] | None = None
        """Those of them that are in the present era; None: to be found again."""
        self._version = 0
        """The newest of them."""
        self._said: tuple[object, tuple[Go, ...]] = (None, ())
        """The last goes, and what they were found from."""
        self._plans: dict[int, Plan] = {}
        self._decisions: dict[int, Decision] = {}
        self._told: dict[PeerId, Brief] = {}
        self._number = 0
        self._summaries: dict[Stage, tuple[Summary, PeerId, float]] = {}
        self._goes: dict[int, Go] = {}
        self._era = Era()
        self._behind_since: float | None = None
        self._witnessed = Standing()
        self._asking: Task[None] | None = None
        self._silent = False
        self.whole_run = RunBrief()
        self._revision = 0
        self._revised: Future[None] = peer.future()
        self.brief: Brief | None = None
        self._reports: Courier[Report] = Courier(peer, self._send_report)
        self._briefs: Courier[Brief] = Courier(peer, self._send_brief)
        self._summary_out: Courier[Summary] = Courier(peer, self._send_summary)
        self._run_briefs: Courier[RunBrief] = Courier(peer, self._send_run_brief)
        peer.handlers.update(
            report=self._serve_report,
            brief=self._serve_brief,
            summary=self._serve_summary,
            run=self._serve_run,
            watch=self._serve_watch,
        )

    # -- who leads --------------------------------------------------------------------------------

    def coordinator(self, stage: Stage) -> PeerId | None:
        """The live serving peer of `stage` that came first, as far as this peer can see."""
        now, directory = self._clock.now, self._peer.directory
        serving = directory.serving(stage)
        if stage == self._stage:
            serving = self._mates(serving)
        return rounds.eldest(
            {p: directory.since_s(p) for p in serving if p == self._me or not self._bans.resting(p, now=now)}
        )

    def _mates(self, serving: list[PeerId]) -> list[PeerId]:
        """Who could coordinate this peer's own stage: as announced, and as heard from."""
        now, me, peer = self._clock.now, self._me, self._peer
        found = [p for p in serving if p != me]
        for name, (_, seen) in self._members.items():
            heard = now - seen < GONE_AFTER_S and peer.directory.state(name) not in ABSENT
            if heard and name != me and name not in serving:
                found.append(name)
        if peer.joined and not (self._peer.leaving and found):
            found.append(me)
        return found

    def close(self) -> None:
        for courier in (self._reports, self._briefs, self._summary_out, self._run_briefs):
            courier.close()

    def lost(self, peer: PeerId) -> None:
        """The connection to `peer` broke: do not wait for its silence."""
        self._told.pop(peer, None)
        if self._members.pop(peer, None) is not None:
            self._present = None
            self._peer.news.urgent()

    def _says(self, peer: PeerId, report: Report) -> None:
        self._members[peer] = (report, self._clock.now)
        self._present = None

    async def farewell(self) -> None:
        """Tell who coordinates that this peer is gone."""
        self._silent = True
        self._reports.close()
        chief = self.coordinator(self._stage)
        if chief is not None and chief != self._me:
            report = Report(self._peer.era, self._peer.version, "", farewell=True)
            try:
                await self._peer.call(chief, "report", report, CALL_S)
            except SwarmError:
                return

    def speak(self) -> None:
        if self._silent or not self._peer.joined:
            return
        self._enter(self._peer.era)
        chief = self.coordinator(self._stage)
        if chief is None:
            return
        report = self._report()
        if chief == self._me:
            self._says(self._me, report)
            self._lead()
        else:
            if self._members.pop(self._me, None) is not None:
                self._present = None
            self._reports.post(chief, report)

    # -- a member's voice -------------------------------------------------------------------------

    def _report(self) -> Report:
        peer = self._peer
        steps: list[tuple[int, MemberStep]] = []
        for t in sorted(peer.steps):
            step = peer.steps[t]
            ledger = step.ledger
            done, doing, fixed = ledger.done, ledger.doing, ledger.fixed
            if step.handing:  # on its way to a mate: it counts nowhere until it is there
                done, doing, fixed = 0, doing | done, 0
            member = MemberStep(
                peer=self._me,
                done=done,
                doing=doing & ~done,
                fixed=fixed,
                frozen_for=ledger.frozen_for or "",
                held=step.held,
                failed_round=step.failed_round,
                bandwidth_bps=peer.bandwidth_bps,
            )
            steps.append((t, member))
        return Report(peer.era, peer.version, peer.digest, tuple(steps), newest_goes(peer.goes))

    async def _send_report(self, chief: PeerId, report: Report) -> None:
        try:
            brief: Brief = await self._peer.call(chief, "report", report, CALL_S)
        except PeerFault:
            self._peer.prober.failed(chief)
            self._peer.news.urgent()
            return
        except (Refused, Leaving):
            self._bans.failed(chief, now=self._clock.now)
            self._peer.news.some()
            return
        except SwarmError:
            return
        self._bans.answered(chief)
        self._hear(brief)

    def _hear(self, brief: Brief) -> None:
        last = self.brief
        if last is not None and last.coordinator == brief.coordinator and brief.number < last.number:
            return
        self.brief = brief
        self._enter(brief.era)
        if brief.coordinator != self._me:
            self._behind_since = self._clock.now - brief.behind_s if brief.behind_s > 0 else None
        if self._stage == 0 and brief.coordinator != self._me:
            self._set_whole_run(brief.whole_run)
        self._obey(brief)

    def _serve_brief(self, caller: PeerId, brief: Brief) -> None:
        if caller == brief.coordinator == self.coordinator(self._stage):
            self._hear(brief)

    # -- a coordinator's --------------------------------------------------------------------------

    def _serve_report(self, caller: PeerId, report: Report) -> Brief:
        if not self._peer.joined:
            raise NotNow("this peer has not joined yet")
        if self._peer.leaving:
            raise Leaving("this peer is leaving: let another coordinate the stage")
        if report.farewell:
            self.lost(caller)
            raise NotNow("goodbye")
        known = max(self._peer.standing, self.run_standing, self._witnessed)
        if self._terms.stages > 1 and is_alone_ahead(Standing(report.era, report.version), known):
            if self._asking is None or self._asking.done:
                self._asking = self._peer.spawn(self._ask_witnesses())
            raise NotNow(f"the run is at {known}", retry_after_s=REFRESH_S)
        self._bans.answered(caller)
        self._says(caller, report)
        self._enter(report.era)
        if self.coordinator(self._stage) != self._me:
            if self.brief is None:
                raise NotNow("another peer coordinates this stage")
            return self.brief
        return self._numbered(self._brief_for(caller, self._lead()))

    async def _ask_witnesses(self) -> None:
        others = [
            e.peer
            for e in self._peer.directory.entries()
            if e.state == "serving" and e.stage != self._stage
        ]
        for status in (await self._peer.ask_status(others)).values():
            self._witnessed = max(self._witnessed, status.standing)

    def _lead(self) -> Brief:
        """Decide for the stage, tell the members whose brief changed, and tell the conductor."""
        now = self._clock.now
        for peer in [p for p, (_, seen) in self._members.items() if now - seen > GONE_AFTER_S]:
            self.lost(peer)
        self._says(self._me, self._report())
        for report, _ in self._members.values():
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
        common = self._brief()
        for peer in list(self._members):
            self._tell(peer, self._brief_for(peer, common))
        return common

    def _look_behind(self, now: float) -> None:
        newest = self._newest_version()
        behind = self.whole_run.era == self._era and self.whole_run.version > newest
        held = any(view.held for view in self._member_steps(newest))
        followed = held and newest in self._known_goes()
        if (behind and not followed) or not self._those_present():
            self._behind_since = self._behind_since or now
        else:
            self._behind_since = None

    @property
    def run_standing(self) -> Standing:
        return Standing(self.whole_run.era, self.whole_run.version)

    @property
    def behind_s(self) -> float:
        """For how long this stage, which this peer coordinates, has been unable to follow the run."""
        return self._stuck_s() if self.coordinator(self._stage) == self._me else 0.0

    def _stuck_s(self) -> float:
        return 0.0 if self._behind_since is None else self._clock.now - self._behind_since

    def _tell(self, peer: PeerId, brief: Brief) -> None:
        if peer == self._me:
            self._hear(self._numbered(brief))
        elif brief != self._told.get(peer):
            self._told[peer] = brief
            self._briefs.post(peer, self._numbered(brief))

    def _numbered(self, brief: Brief) -> Brief:
        self._number += 1
        return brief._replace(number=self._number)

    def _those_present(self) -> dict[PeerId, Report]:
        """Of the members that are in the present era."""
        if self._present is None:
            self._present = {p: report for p, (report, _) in self._members.items() if report.era == self._era}
            versions = [report.version for report in self._present.values()]
            self._version = max(versions, default=self._era.start)
        return self._present

    def _newest_version(self) -> int:
        self._those_present()
        return self._version

    def _member_steps(self, t: int) -> list[MemberStep]:
        return [
            step for report in self._those_present().values() for number, step in report.steps if number == t
        ]

    def _decide(self) -> None:
        self._decisions = {}
        newest = self._newest_version()
        for t in range(newest, min(newest + self._terms.ahead, self._terms.steps - 1) + 1):
            views = self._member_steps(t)
            if not views:
                continue
            decision = rounds.decide(
                RUN, self._stage, t, self._terms.microbatches, ELEMENTS, views, self._plans.get(t)
            )
            self._decisions[t] = decision
            if isinstance(decision, Reduce):
                self._plans[t] = decision.plan
        for t in [t for t in self._plans if t < newest]:
            del self._plans[t]

    def _brief_for(self, peer: PeerId, common: Brief) -> Brief:
        """What is told to `peer`: the same as to all, but for what it is to undo."""
        undo = {t: d.by.get(peer, 0) for t, d in self._decisions.items() if isinstance(d, Undo)}
        if not undo:
            return common
        steps = tuple(s._replace(undo=undo[s.t]) if s.t in undo else s for s in common.steps)
        return common._replace(steps=steps)

    def _brief(self) -> Brief:
        newest = self._newest_version()
        at_newest = {p: r for p, r in self._those_present().items() if r.version == newest}
        digests = {p: r.digest for p, r in at_newest.items() if r.digest}
        digest = rounds.digest_majority(digests) if len(digests) == len(at_newest) and digests else ""
        sources = sorted(p for p, r in at_newest.items() if not digest or r.digest == digest)
        steps: list[StepBrief] = []
        for t, decision in self._decisions.items():
            if isinstance(decision, Reduce):
                steps.append(StepBrief(t, plan=decision.plan))
            elif isinstance(decision, Adopt):
                steps.append(StepBrief(t, adopt=(decision.round, decision.sources)))
            else:
                steps.append(StepBrief(t))
        return Brief(
            coordinator=self._me,
            number=0,
            era=self._era,
            version=newest,
            sources=tuple(sources),
            digest=digest,
            steps=tuple(steps),
            goes=self._last_goes(),
            whole_run=self.whole_run if self._stage == 0 else RunBrief(),
            behind_s=int(self._stuck_s()),
        )

    async def _send_brief(self, member: PeerId, brief: Brief) -> None:
        try:
            await self._peer.call(member, "brief", brief, CALL_S)
        except PeerFault:
            self.lost(member)
        except SwarmError:
            pass

    # -- towards the conductor --------------------------------------------------------------------

    def _summary(self) -> Summary:
        version = self._newest_version()
        steps: list[tuple[int, StageStep]] = []
        for t, decision in self._decisions.items():
            lacking = unclaimed = 0
            if isinstance(decision, Lacking):
                lacking, unclaimed = decision.lacking, decision.unclaimed
            ready = isinstance(decision, Adopt) and decision.ready
            norm = decision.sqnorm if isinstance(decision, Adopt) else 0.0
            steps.append((t, StageStep(self._stage, version, lacking, unclaimed, ready, norm)))
        return Summary(self._stage, self._era, version, tuple(steps), self._last_goes())

    async def _send_summary(self, chief: PeerId, summary: Summary) -> None:
        try:
            whole_run: RunBrief = await self._peer.call(chief, "summary", summary, CALL_S)
        except PeerFault:
            self._peer.prober.failed(chief)
            self._peer.news.urgent()
            return
        except SwarmError:
            return
        self._bans.answered(chief)
        self._hear_run(whole_run)

    def _serve_run(self, caller: PeerId, whole_run: RunBrief) -> None:
        if caller == whole_run.conductor == self.coordinator(0):
            self._hear_run(whole_run)

    def _hear_run(self, whole_run: RunBrief) -> None:
        known = self._last_goes()
        self._enter(whole_run.era)
        self._learn_goes(whole_run.goes, whole_run.era)
        self._set_whole_run(whole_run)
        if self._last_goes() != known and self.coordinator(self._stage) == self._me:
            self._peer.news.urgent()

    # -- the conductor's --------------------------------------------------------------------------

    def _serve_summary(self, caller: PeerId, summary: Summary) -> RunBrief:
        if self.coordinator(0) == self._me:
            self._summaries[summary.stage] = (summary, caller, self._clock.now)
            self._enter(summary.era)
            self._conduct()
        return self.whole_run

    def _conduct(self) -> None:
        """The picture of the whole run, from the stages' summaries; and the go, once all are ready."""
        now, terms = self._clock.now, self._terms
        for stage in [s for s, (_, _, seen) in self._summaries.items() if now - seen > GONE_AFTER_S]:
            del self._summaries[stage]
        summaries = {s: said for s, (said, _, _) in self._summaries.items() if said.era == self._era}
        if not summaries:
            return
        version = max(s.version for s in summaries.values())
        for summary in summaries.values():
            self._learn_goes(summary.goes, summary.era)
        oldest = min(s.version for s in summaries.values())
        lacking: list[tuple[int, tuple[int, ...]]] = []
        for t in sorted({oldest, *range(version, version + terms.ahead + 1)}):
            if t >= terms.steps:
                continue
            views = {s: _stage_step(summary, t) for s, summary in summaries.items()}
            known = {s: view for s, view in views.items() if view is not None}
            if t == oldest:
                go = rounds.conduct(t, terms.stages, known, self._goes)
                if go is not None:
                    self._goes[t] = go
            if t >= version:
                by_stage = (known[s].unclaimed if s in known else 0 for s in range(terms.stages))
                lacking.append((t, tuple(by_stage)))
        whole_run = RunBrief(self._era, version, tuple(lacking), self._last_goes(), self._me)
        if whole_run == self.whole_run:
            return
        news = whole_run.goes != self.whole_run.goes
        self._set_whole_run(whole_run)
        for stage, (_, peer, _) in self._summaries.items():
            if stage != self._stage:
                self._run_briefs.post(peer, whole_run)
        if news:
            self._peer.news.urgent()

    async def _send_run_brief(self, peer: PeerId, whole_run: RunBrief) -> None:
        try:
            await self._peer.call(peer, "run", whole_run, CALL_S)
        except SwarmError:
            return

    def _enter(self, era: Era) -> None:
        """Nothing of an earlier era is decided any more."""
        if era > self._era:
            self._era = era
            self._present = None
            self._goes.clear()
            self._plans.clear()
            self._decisions.clear()
            self._peer.news.urgent()

    def _learn_goes(self, goes: tuple[Go, ...], era: Era) -> None:
        if era != self._era or all(go.t in self._goes for go in goes):
            return
        newest = self._newest_version() if self._those_present() else 0
        for go in goes:
            if go.t not in self._goes and go.t <= max(newest, self._peer.version):
                self._goes[go.t] = go
                for t in [t for t in self._goes if t < go.t - 4]:
                    del self._goes[t]

    def _known_goes(self) -> dict[int, Go]:
        return {**(self._peer.goes if self._peer.era == self._era else {}), **self._goes}

    def _last_goes(self) -> tuple[Go, ...]:
        """Asked for all the time, and seldom another: a go never changes within its era."""
        known_from = (self._era, self._peer.era, tuple(self._goes), tuple(self._peer.goes))
        if known_from != self._said[0]:
            self._said = (known_from, newest_goes(self._known_goes()))
        return self._said[1]

    # -- for trainers -----------------------------------------------------------------------------

    def _set_whole_run(self, whole_run: RunBrief) -> None:
        if whole_run != self.whole_run:
            self.whole_run = whole_run
            self._revision += 1
            revised, self._revised = self._revised, self._peer.future()
            revised.resolve(None)

    async def _serve_watch(self, caller: PeerId, seen: int) -> Watched:
        if seen == self._revision:
            await self._peer.within(self._revised, REFRESH_S)
        far = self.run_standing
        if self._peer.joined:
            far = max(far, self._peer.standing)
        return Watched(self._revision, far.era, far.version, self.whole_run)


def newest_goes(goes: dict[int, Go]) -> tuple[Go, ...]:
    """Ascending."""
    return tuple(goes[t] for t in sorted(goes)[-GOES_KEPT:])


def _stage_step(summary: Summary, t: int) -> StageStep | None:
    """A stage that is past step `t` lacks nothing of it, and the go is known from it."""
    for number, step in summary.steps:
        if number == t:
            return step
    if summary.version > t:
        return StageStep(summary.stage, summary.version, 0, 0, False, 0.0)
    return None
