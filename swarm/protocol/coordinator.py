"""What the coordinators of a stage and of the run know and decide. Pure: times are given by the caller.

Nothing here is kept on disk or handed over: a peer that takes over is told everything again within a second.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Set
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from swarm.floats import mean_of
from swarm.ids import Generation, PeerId, Stage
from swarm.manifest import Run
from swarm.policy.backoff import Backoff
from swarm.protocol import rounds
from swarm.protocol.blame import Blame
from swarm.protocol.ledger import Bitmap, forget_before, members_of
from swarm.protocol.messages import (
    LOSSES_KEPT,
    MAX_LEFT_OUT,
    Directive,
    ReplicaReport,
    RunStatus,
    StageSummary,
    StepDirective,
    StepLacking,
)
from swarm.protocol.replica import Local, newest_commits
from swarm.protocol.rounds import MAX_SOURCES, Commit, Plan, Prepared
from swarm.protocol.sums import are_checked
from swarm.protocol.voice import heard, weight

REALIGN_STEPS = 100
"""Steps between realignments, where there are no checkpoints: all kinds of device have equal bits after."""
MAX_TOLD = 16
"""Summaries whose answers may be on their way."""
ALONE_S = 20.0
"""How long a round may go on for the others after a replica without voice has its result."""
ANSWERED_S = 3.5
"""A peer of stage 0 that was told that a step is ready says by then whether it committed it, or is gone."""

_Reports: TypeAlias = Mapping[PeerId, rounds.StepReport]


def realigns(run: Run, version: int) -> bool:
    """Whether replicas on all kinds of device compare, and take, the same bits at `version`."""
    return version % (run.checkpoint_every or REALIGN_STEPS) == 0


class Agreed:
    """The commits and the generation that this peer has heard of."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        """The latest that was heard of: decisions concern nothing older."""
        self.commits: dict[int, Commit] = {}
        """Of this generation: in another one they say nothing."""

    def learn(self, commits: Iterable[Commit]) -> None:
        """Remember commits of the present generation, for which this stage has the weights."""
        self.commits |= {commit.t: commit for commit in commits}
        forget_before(max(self.commits, default=0) - 4, self.commits)

    def known(self, local: Local) -> dict[int, Commit]:
        """The commits of the present generation: heard of, or taken by this replica."""
        return {**(local.commits if local.generation == self.generation else {}), **self.commits}


class Member(msgspec.Struct, frozen=True):
    """A replica that reported."""

    report: ReplicaReport
    losses: list[list[float]]
    seen_s: float


class StageCoordinator:
    """Decisions on what the replicas of a stage do, from their reports."""

    def __init__(
        self, run: Run, stage: Stage, me: PeerId, numel: int, agreed: Agreed, backoff: Backoff
    ) -> None:
        self.blame = Blame(me, run.microbatches, backoff)
        self._run, self._stage, self._me, self._numel, self._agreed = run, stage, me, numel, agreed
        self.members: dict[PeerId, Member] = {}
        self.voice: Mapping[PeerId, int] = {}
        """Of the replicas, as far as the directory knows them."""
        self.newest = 0
        """The newest version of the stage, as of the last decisions."""
        self._at_newest: dict[PeerId, ReplicaReport] = {}
        self.run_version = 0
        """Where the run is in the present generation, as the other stages and trainers say."""
        self.losses: dict[int, float] = {}
        """Last stage: the mean loss of each of the last steps."""
        self._plans: dict[int, Plan] = {}
        self._rounds: dict[int, set[str]] = {}
        """Names of all rounds of a step that this peer has heard of, as a coordinator or a replica."""
        self._decisions: dict[int, rounds.Decision] = {}
        self._alone_since: dict[int, dict[tuple[PeerId, str], float]] = {}
        """By step: since when a replica alone has had the result of a round."""
        self._left_out: dict[int, set[PeerId]] = {}
        """Replicas that a decision leaves out, since their result of the step may be made up."""
        self._doubled: dict[int, dict[PeerId, int]] = {}
        """What replicas are to retract; those that rest, or have no voice, do not count before they have."""
        self._resting = set[PeerId]()
        self.unready = set[int]()
        """Steps that the stage is not ready for, as the run coordinator knows. Of others it may have heard
        that it is, and commit them, with results that this peer does not believe."""
        self._told = deque[StageSummary](maxlen=MAX_TOLD)
        """What was said of the stage since one of them was found."""
        self._told_ready: dict[int, dict[tuple[PeerId, str], tuple[float, int]]] = {}
        """By step: the peers of stage 0 that were told which round made it ready; when, and by which summary.
        Each may have committed it until it has answered a later one, that it is not."""

    def present(self) -> dict[PeerId, ReplicaReport]:
        """The reports of the present generation. The other replicas have to roll back first."""
        at, members = self._agreed.generation, self.members.items()
        return {peer: member.report for peer, member in members if member.report.generation == at}

    def newest_version(self) -> int:
        """The newest version of the stage. A generation that no replica has entered begins at its start.

        Where commits are proven one replica does not say alone that the stage is further: the run is, the
        commit that led there is known here, or most have taken it.
        """
        present = self.present()
        versions = {peer: present[peer].version for peer in heard(present, self.voice)}
        if self._run.admission.named and self._me in present:
            total, mine = sum(weight(peer, self.voice) for peer in versions), present[self._me].version
            versions = {
                peer: version
                for peer, version in versions.items()
                if version <= max(mine, self.run_version)
                or version - 1 in self._agreed.commits
                or 2 * sum(weight(p, self.voice) for p, v in versions.items() if v >= version) > total
            } | {self._me: mine}
        return max(versions.values(), default=self._agreed.generation.start)

    def goes_by_strangers(self, version: int) -> bool:
        """Whether only strangers have what this replica lacks, by their word; stages may not bear it out."""
        return not self.voice and version < self.run_version <= self.newest

    def holds(self, t: int) -> bool:
        """Whether a replica is prepared for step `t`."""
        return bool(rounds.held_by_word(self._believable(t, self._reported(t)), self.voice))

    def decide(self, *, now: float) -> None:
        """Decide on each open step, from the reports that are here."""
        before = self._all_left_out()
        self._decisions, self._left_out, self._doubled = {}, {}, {}
        others = (
            {*heard(self.members, self.voice)} - {self._me} if self._run.admission.named else set[PeerId]()
        )
        newest = self.newest = self.newest_version()
        self._resting = self.blame.left_out(newest, {*self.members, *self.voice}, others, now=now)
        there = {p: report for p, report in self.present().items() if report.version == newest}
        self._at_newest = {p: there[p] for p in heard(there, self.voice)}
        until = min(newest + (2 if self._run.delayed_updates else 1), self._run.steps)
        for t in range(newest - self._holds_back(newest - 1), until):
            self._decide_step(t, now)
        if not self._all_left_out() <= before:
            self.forget_answers()  # another coordinator may have told their results since
        self.forget(newest)

    def forget(self, newest: int) -> None:
        """Steps before `newest` are over, also where others coordinate; their losses are told for a while."""
        self.blame.forget(newest)
        forget_before(newest, self._plans, self._rounds, self._alone_since, self._told_ready)
        forget_before(newest - LOSSES_KEPT, self.losses)

    def _all_left_out(self) -> set[tuple[int, PeerId]]:
        return {(t, peer) for t, peers in self._left_out.items() for peer in peers}

    def _decide_step(self, t: int, now: float) -> None:
        reports = self._reported(t)
        believable = self._believable(t, reports)
        self._left_out[t] = reports.keys() - believable.keys()
        # Those that cost too much do not count.
        steps = {p: step for p, step in believable.items() if p not in self._resting}
        self._forget_plan(t, reports)
        # What those hold that are left out is run again: while they do, no result without it is believed.
        rest = {p: step.done for p, step in believable.items() if step.done and p in self._resting}
        self._doubled[t] = rounds.doubled_without_voice(steps, self.voice) | rest
        steps = {peer: step for peer, step in steps.items() if peer not in self._doubled[t]}
        if not reports:  # if those alone have something that do not count, all is lacking
            return
        blame, plan = self.blame, self._plans.get(t)
        uploads_bps = {peer: member.report.bandwidth_bps for peer, member in self.members.items()}
        decision = rounds.decide(
            self._run.id, self._stage, t, self._run.microbatches(t), self._numel,
            blame.computing(t, steps, now=now), plan, uploads_bps, self.voice,
            owners=blame.owners(t, plan, steps, now=now),
        )  # fmt: skip
        if isinstance(decision, rounds.FetchResult):
            others = {p: step for p, step in believable.items() if p not in steps}
            decision = rounds.proven_by(decision, others, self.voice)
            # Of a result that has nothing of theirs no word of two is enough: what they hold holds it up.
            self._doubled[t] = {
                p: bits for p, bits in rest.items()
                if not others[p].prepared and decision.round not in (others[p].frozen_for, others[p].gave_all)
            }  # fmt: skip
        self._decisions[t] = decision
        by = decision.by if isinstance(decision, rounds.Retractions) else {}
        self._doubled[t] |= by
        blame.retracting((t, self._agreed.generation), by, steps, now=now)
        self._left_out[t] |= self._alone_with_a_result(t, decision, reports)
        if isinstance(decision, rounds.Plan):
            self._plans[t] = decision
            self.heard(t, decision)
            blame.planned(t, now=now)
        elif isinstance(decision, rounds.FetchResult):
            blame.prepared(t, decision, plan, steps, now=now)
            if decision.ready:
                self.unready.discard(t)
        else:
            return
        self._note_loss(t, steps)

    def _holds_back(self, t: int) -> bool:
        """Whether this peer has the result of a step that others took by a commit it does not believe."""
        mine = self.members[self._me].report
        held = any(step.t == t and step.prepared is not None for step in mine.steps)
        return held and mine.version == t and t not in self._agreed.commits

    def heard(self, t: int, plan: Plan) -> None:
        """Remember the name of a round: a result of it may be true."""
        self._rounds.setdefault(t, set()).add(plan.round)

    def knows(self, t: int, round_name: str) -> bool:
        """Whether this peer has heard of a round before there was a result."""
        return round_name in self._rounds.get(t, ())

    def _forget_plan(self, t: int, reports: _Reports) -> None:
        """Plan anew if the result of the plan is not believed: those that came since have no part in it, and
        it would be made again, and again not be believed.
        """
        plan = self._plans.get(t)
        held = [reports[peer].prepared for peer in self._left_out[t]]
        if plan is not None and plan.round in [one.round for one in held if one is not None]:
            del self._plans[t]

    def _believable(self, t: int, reports: _Reports) -> _Reports:
        """The reports on step `t`, by replica; without those of a result that may be made up."""
        return {peer: step for peer, step in reports.items() if not self._may_be_made_up(peer, t, reports)}

    def _reported(self, t: int) -> dict[PeerId, rounds.StepReport]:
        return {p: step for p, report in self.present().items() for step in report.steps if step.t == t}

    def _may_be_made_up(self, peer: PeerId, t: int, reports: _Reports) -> bool:
        """Whether a replica alone has the result of a round that no other took part in, or this peer heard
        of. An honest one loses little: it takes part in another round.

        Where results are signed, another that is heard has to hold the same, or to have given all to its
        round, or still to do so: no other takes it on one word, since it may be made up, or lack something.
        """
        prepared = reports[peer].prepared
        if prepared is None:
            return False
        speaking = heard(reports, self.voice)
        others = {other: reports[other] for other in speaking if other != peer}
        if self._run.meets_at(t):
            return False  # nothing is taken from it: each replica finds by itself what it has changed
        if prepared.signature:
            plan = self._plans.get(t)
            members = plan.members if plan is not None and plan.round == prepared.round else ()
            if members or peer == self._me:
                others = {other: step for other, step in others.items() if other not in self._resting}
            checked = are_checked(self._run)
            confirmed = (_may_confirm(prepared, s, other in members, checked) for other, s in others.items())
            return peer in speaking and bool(others) and not any(confirmed)
        if any(
            prepared.round in (step.frozen_for, step.failed_round, step.prepared and step.prepared.round)
            for step in others.values()
        ):
            return False
        return peer != self._me and not self.knows(t, prepared.round)

    def _alone_with_a_result(self, t: int, decision: rounds.Decision, steps: _Reports) -> set[PeerId]:
        """The replicas without voice whose result no other confirms, and whose round is over: its sums are
        in another one, or open again; or it has lasted for `ALONE_S` since.
        """
        before = self._alone_since.pop(t, {})
        if isinstance(decision, rounds.FetchResult):
            return set()  # they are told to fetch that
        running = decision.round if isinstance(decision, rounds.Plan) else ""
        confirmed, now = rounds.held_by_word(steps, self.voice), self.members[self._me].seen_s
        held = {peer: step.prepared for peer, step in steps.items() if peer not in confirmed}
        alone = {peer: prepared.round for peer, prepared in held.items() if prepared is not None}
        since = self._alone_since[t] = {at: before.get(at, now) for at in alone.items()}
        return {peer for peer, name in alone.items() if name != running or now - since[peer, name] > ALONE_S}

    def _note_loss(self, t: int, steps: Iterable[PeerId]) -> None:
        """Note the mean loss of a step whose microbatches are all there, with those that count. What is no
        number counts as nothing: one that lies says it before the others say what they found.
        """
        if self._stage != self._run.S - 1 or t in self.losses:
            return
        by_m: dict[int, float] = {}
        for member in map(self.members.__getitem__, steps):
            for step, row in zip(member.report.steps, member.losses, strict=False):
                if step.t == t:
                    of = zip(members_of(step.done), row, strict=False)
                    by_m.update((m, loss) for m, loss in of if math.isfinite(loss))
        if by_m and len(by_m) == self._run.microbatches(t):
            self.losses[t] = mean_of([*by_m.values()])

    def directive_for(
        self, peer: PeerId, *, commits: Mapping[int, Commit], behind_s: float, run_status: RunStatus
    ) -> Directive:
        """What `peer` is to do now."""
        at_newest = self._at_newest
        # Kinds of device differ in the last bits; at realignments the stage takes the majority's bits.
        kind = self.members[peer].report.kind
        alike = {p: r for p, r in at_newest.items() if r.kind == kind or realigns(self._run, self.newest)}
        digests = {p: r.digest for p, r in alike.items() if r.digest}
        digest = rounds.digest_majority(digests, self.voice) if len(digests) == len(alike) and digests else ""
        sources = sorted(p for p, r in (alike or at_newest).items() if not digest or r.digest == digest)
        return Directive(
            run=self._run.id, stage=self._stage, coordinator=self._me, generation=self._agreed.generation,
            version=self.newest, behind_s=int(behind_s), sources=tuple(sources[:MAX_SOURCES]), digest=digest,
            left_out=tuple(sorted(self._resting))[:MAX_LEFT_OUT],
            steps=tuple(self._step_directive(t, decision, peer) for t, decision in self._decisions.items()),
            commits=newest_commits(commits, since=self.members[peer].report.version),
            # Only trainers need it, and ask stage 0; for other stages it would be a message per microbatch.
            run_status=replace(run_status, commits=()) if self._stage == 0 else RunStatus(run=self._run.id),
        )  # fmt: skip

    def _step_directive(self, t: int, decision: rounds.Decision, peer: PeerId) -> StepDirective:
        if peer in self._left_out[t]:
            told = self.may_have_committed(t, now=self.members[self._me].seen_s)
            found = isinstance(decision, rounds.FetchResult)
            return StepDirective(t=t, begin_again=found or (t in self.unready and not told))
        if doubled := self._doubled[t].get(peer):
            return StepDirective(t=t, retract=Bitmap(doubled))
        match decision:
            case rounds.Plan():
                return StepDirective(t=t, plan=decision)
            case rounds.FetchResult():
                return StepDirective(t=t, fetch=replace(decision, sources=decision.sources[:MAX_SOURCES]))
        return StepDirective(t=t)

    def tells(self, summary: StageSummary, peers: Set[PeerId], *, now: float) -> Set[PeerId]:
        """Peers of stage 0 that get a summary: `peers`, and those that may have committed what is unready."""
        for step in summary.steps:
            if step.ready:
                made = step.proofs[0].prepared.round if step.proofs else ""
                told = {(peer, made): (now, summary.number) for peer in peers}
                self._told_ready.setdefault(step.t, {}).update(told)
            else:
                peers |= self.may_have_committed(step.t, now=now)
        return peers

    def may_have_committed(self, t: int, held: str = "", *, now: float) -> set[PeerId]:
        """The peers of stage 0 that were told that a step is ready, and were silent since. `held`: by the
        result of that round; empty: of any.
        """
        told = self._told_ready.get(t, {}).items()
        return {p for (p, made), (at, _) in told if now - at < ANSWERED_S and len({made, held, ""}) < 3}

    def summary_heard(self, summary: StageSummary, by: PeerId = "", lacking: Container[int] = ()) -> bool:
        """Note that a peer of stage 0 has it. Returns whether a replica is to begin again by that: not with a
        step that is `lacking` words on its commit, by which that peer, and others, have perhaps taken it.
        """
        if not any(told is summary for told in self._told):
            return False
        unready = {step.t for step in summary.steps if not step.ready and step.t not in lacking}
        for t in unready & self._told_ready.keys():
            told = self._told_ready[t].items()
            self._told_ready[t] = {to: it for to, it in told if to[0] != by or it[1] >= summary.number}
        before, self.unready = self.unready, unready
        return any(self._left_out.get(t) for t in self.unready - before)

    def forget_answers(self) -> None:
        """Forget what the run coordinator knows: another of the stage may have told it something else."""
        self.unready.clear()
        self._told.clear()

    def summary(self, commits: Mapping[int, Commit], *, number: int = 0) -> StageSummary:
        """What the run coordinator needs to know of the stage."""
        steps = []
        for t, decision in self._decisions.items():
            step = rounds.StepSummary(t=t, loss=self.losses.get(t))
            if isinstance(decision, rounds.Lacking):
                step = replace(step, unclaimed=Bitmap(decision.unclaimed))
            elif isinstance(decision, rounds.FetchResult):
                step = replace(step, ready=decision.ready, sqnorm=decision.sqnorm, proofs=decision.proofs)
            steps.append(step)
        summary = StageSummary(
            run=self._run.id, stage=self._stage, generation=self._agreed.generation, number=number,
            version=self.newest, members=len(self.members), steps=tuple(steps),
            commits=newest_commits(commits),
        )  # fmt: skip
        self._told.append(summary)
        return summary


def _may_confirm(prepared: Prepared, step: rounds.StepReport, is_member: bool, checked: bool) -> bool:
    """Whether another replica has the same result, or may find it: where sums are checked, not if its round
    failed there before it had given all.
    """
    if step.prepared is not None:
        return step.prepared.content == prepared.content
    takes_part = is_member or step.frozen_for == prepared.round
    if not checked:
        return takes_part or step.failed_round == prepared.round
    return step.gave_all == prepared.round or (takes_part and step.failed_round != prepared.round)


def is_untold(directive: Directive, told: Directive | None) -> bool:
    """Whether a replica has to be told a directive. Commits that it has taken by now are no news."""
    if told is None or not set(directive.commits) <= set(told.commits):
        return True
    return directive != replace(told, commits=directive.commits)


class Summarized(msgspec.Struct, frozen=True):
    """A stage whose coordinator has sent a summary."""

    summary: StageSummary
    coordinator: PeerId
    seen_s: float


class RunCoordinator:
    """The state of the whole run, by the stages' summaries; and the commits, once all are prepared."""

    def __init__(self, run: Run, me: PeerId, agreed: Agreed) -> None:
        self._run, self._me, self._agreed = run, me, agreed
        self.stages: dict[Stage, Summarized] = {}

    def present(self) -> dict[Stage, StageSummary]:
        """The summaries of the stages that are in the present generation."""
        at, stages = self._agreed.generation, self.stages.items()
        return {stage: said.summary for stage, said in stages if said.summary.generation == at}

    def decide(
        self, losses: dict[int, float], local: Local, believes: Callable[[Commit], bool] = lambda _: True,
        by_one: int = 0,
    ) -> RunStatus:  # fmt: skip
        """What all stages and trainers are told; notes new commits and losses. A stage must be present.

        `believes`: whether what the stages say proves a commit. `by_one`: the version of one stage that is
        believed though no other has come so far.

        What a silent stage lacks is left out: it could not be run again now.
        """
        summaries = self.present()
        versions = [summary.version for summary in summaries.values()]
        # If one said alone that the run is further, the others would take their stages for lost.
        borne_out = (
            version
            for version in versions
            if version <= max(local.version, by_one)
            or version - 1 in self._agreed.commits
            or 2 * sum(other >= version for other in versions) >= len(versions)
        )
        version, oldest = max(borne_out), min(versions)
        last, ahead = summaries.get(self._run.S - 1), 1 if self._run.delayed_updates else 0
        for step in last.steps if last is not None else ():
            if step.loss is not None and step.t <= version + ahead:  # else true ones would go for those
                losses.setdefault(step.t, step.loss)
        while len(losses) > LOSSES_KEPT:
            del losses[min(losses)]
        lacking: list[StepLacking] = []
        due = min([oldest, *(step.t for summary in summaries.values() for step in summary.steps)])
        for t in sorted({due, oldest, *range(version, version + ahead + 1)}):
            if t >= self._run.steps:
                continue
            known = {s: view for s, said in summaries.items() if (view := _summary_of(said, t)) is not None}
            if t in (due, oldest):  # steps are taken in their order
                commit = rounds.decide_commit(t, self._run.S, known, self._agreed.commits)
                if commit is not None and believes(commit):
                    self._agreed.learn([commit])
            if t >= version:
                silent = rounds.StepSummary(t=t)
                by_stage = [known.get(stage, silent).unclaimed for stage in range(self._run.S)]
                lacking.append(StepLacking(t=t, by_stage=tuple(by_stage)))
        return RunStatus(
            run=self._run.id, generation=self._agreed.generation, version=version,
            held_by_all=oldest if len(summaries) == self._run.S else -1, lacking=tuple(lacking),
            commits=newest_commits(self._agreed.known(local)), losses=tuple(sorted(losses.items())),
            run_coordinator=self._me,
        )  # fmt: skip


def _summary_of(summary: StageSummary, t: int) -> rounds.StepSummary | None:
    """A stage's summary of step `t`. A stage past that step lacks nothing of it, and its commit is known."""
    past = rounds.StepSummary(t=t) if summary.version > t else None
    return next((step for step in summary.steps if step.t == t), past)
