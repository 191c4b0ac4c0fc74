"""How the replicas of a run agree on steps, without IO: what comes in, and what is to be done about it.

Every replica runs a `StepProtocol`. It reports its ledgers to the coordinator of its stage; if it is that
coordinator itself, it also decides for the stage; if its stage is stage 0, for the run as well. Its caller
passes in the time, the state of this replica and of the directory (`observe`, before anything else), and what
others say; and then sends and does what `ready` returns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple

from msgspec.structs import replace

from swarm.errors import Leaving, NotNow, Refused, short
from swarm.ids import Generation, PeerId, Position, Stage
from swarm.manifest import Run
from swarm.policy.backoff import Backoff
from swarm.policy.rotation import Rotation
from swarm.policy.timeouts import expected_s
from swarm.protocol import replica
from swarm.protocol.coordinator import Agreed, Member, RunCoordinator, StageCoordinator, Summarized, is_untold
from swarm.protocol.ledger import members_of
from swarm.protocol.messages import (
    MAX_STEPS,
    Directive,
    ReplicaReport,
    RunStatus,
    StageSummary,
    StepDirective,
    check_report,
    check_summary,
)
from swarm.protocol.proofs import Belief, check_signed_report, signed_report
from swarm.protocol.replica import Local
from swarm.protocol.rollback import check_generation, is_alone_ahead, is_disproved, is_followed
from swarm.protocol.rounds import Commit, elect
from swarm.protocol.statements import Signer
from swarm.protocol.sums import are_checked
from swarm.protocol.voice import heard, weight
from swarm.records import PeerRecord

# Peers of a run need not agree on these: other numbers cost time only.
REFRESH_S = 1.0
"""Everything is told again this often, so that a lost message costs at most this."""
GONE_AFTER_S = 3.5
"""A replica that was silent this long is left out: three missed reports, as with a call's heartbeats."""
CHECK_S = 1.0
"""How often a stage that cannot follow the run is checked."""
LOST_S = 6.0
"""A stage without a replica that has its weights is lost after this: they may be cut off shortly, and
peers of other stages, with their disks, may come as late."""
MAX_BEHIND_S = 3600
UNBORNE_S = 25.0
"""By then the turn of one that lies is over: after 10 s a step is late, and its coordinators have 12.5 s."""
UNFOLLOWED_S = 3.0
"""Others hear within a second or two on whose turn it is."""
LATELY = 1.5
"""What is told again each `REFRESH_S` was told within so many of them, if it still is."""
LED_S = 1.5
"""After the last directive of the coordinator that a replica sees, it follows no other for so long."""
MAX_TOLD = 4
"""Replicas of stage 0 that hear of a stage while steps are late."""
MAX_MISSED_GENERATIONS = 100
"""That a peer may have missed: a lie must not use all numbers up."""


def is_gone(seen_s: float, *, now: float) -> bool:
    """Whether a replica that last spoke at `seen_s` is left out."""
    return now - seen_s > GONE_AFTER_S


class Message(NamedTuple):
    """A message to send; a newer one of the same kind to the same peer replaces it."""

    to: PeerId
    body: ReplicaReport | Directive | StageSummary | RunStatus
    losses: Sequence[Sequence[float]] = ()
    """With a report of the last stage: the losses of the microbatches that it counts, step by step."""


class Ready(NamedTuple):
    """What is to be done now."""

    messages: Sequence[Message]
    actions: Sequence[replica.Action]
    wake_at: float
    """When `speak` is due, if nothing happens before."""


class StepProtocol:
    """One replica's part in the coordination of steps, also as coordinator of its stage or of the run."""

    def __init__(
        self, run: Run, stage: Stage, me: PeerId, numel: int, local: Local, backoff: Backoff,
        signer: Signer, *, since_s: float,
    ) -> None:  # fmt: skip
        """`numel`: elements of the flat gradient; `since_s`: when this replica joined, by its clock."""
        self._run, self._stage, self._me, self._since_s = run, stage, me, since_s
        self._local, self._backoff = local, backoff
        self._peers: Mapping[Stage, Sequence[PeerRecord]] = {}
        self._signer = signer
        self.belief = Belief(run, stage, signer)
        self._rotation = Rotation()
        self._agreed = Agreed(local.generation)
        self._coordinator = StageCoordinator(run, stage, me, numel, self._agreed, backoff)
        self._run_coordinator = RunCoordinator(run, me, self._agreed)
        self._told: dict[PeerId, Directive] = {}
        self._numbers = count(1 + int(1e6 * since_s))  # more than it said before it was started again
        self._behind_since: float | None = None
        self.witnessed = local.position
        """The furthest position that a replica of another stage reported."""
        self.trained = Position()
        """The furthest position that a trainer named in the manifest knows the run to have come to: a stage
        whose replicas with voice are all new may not know it."""
        self._moved_s = self._went_s = self._asked_s = self._entered_s = self._doubted_s = -math.inf
        """When this replica last took a step or loaded a state, went where the others are, asked a lost
        stage, entered a generation, or asked for words."""
        self.directive: Directive | None = None
        """The last directive that was followed."""
        self.run_status = RunStatus(run=run.id)
        self._messages: list[Message] = []
        self._actions: list[replica.Action] = []
        self._spoke_s = self._led_s = self._checked_s = -math.inf
        self._followed_s = math.inf
        """When another with voice reported last to this one, this one to another that did not rest for it,
        one that holds rounds up was passed over, a step became late, or another turn began."""
        self._soon = self._goes_by_strangers = False

    # -- what the caller sees ---------------------------------------------------------------------

    def observe(self, local: Local, peers: Mapping[Stage, Sequence[PeerRecord]], *, now: float) -> None:
        """Take in this replica's state, and what the directory says of its stage and of stage 0."""
        if (local.version, local.generation) != (self._local.version, self._local.generation):
            self._moved_s, self._backoff.unclear_rounds = now, 0
            self._coordinator.forget(local.version - 1)
            if self._goes_by_strangers and local.version >= self._coordinator.run_version:
                self._behind_since = None  # it has what they had
            ahead = next((n for n in range(3) if not self.belief.is_passed(local.version + n - 1)), 3)
            self._rotation.stepped(now=now, steps=local.version - self._local.version, ahead=ahead)
        self._local, self._peers = local, peers
        if self.belief.needs_proof:
            self._rotation.at(local.version)
            if self._moved_s == -math.inf and local.joined:
                each_has = self._run.M / max(1, min(map(len, peers.values()), default=1))
                reports = (m.report for m in self._coordinator.members.values())  # one may begin first
                begun = local.begun or any(s.done or s.in_progress for told in reports for s in told.steps)
                self._rotation.expects(each_has * expected_s(peers.values(), max), begun=begun, now=now)
        self.belief.observe(peers, local.version)  # by that of the run one could have all vouchers run out
        if self.belief.needs_proof:
            # A commit that was believed before this replica had a result is compared with that.
            for t in self.belief.holds(t for t, step in local.steps.items() if step.prepared is not None):
                self._agreed.commits.pop(t, None)
        voice = self.belief.voice(self._stage)
        # Before a stage is restored, strangers are asked as well: perhaps one of them has its state.
        self._coordinator.voice = {} if self.stuck_s(now=now) > LOST_S else voice
        self._goes_by_strangers = bool(voice) and self._coordinator.goes_by_strangers(local.version)
        restore_s = LOST_S + (CHECK_S if voice else 0.0) + (LOST_S if self._goes_by_strangers else 0.0)
        if local.generation > self._agreed.generation:
            self._enter(local.generation, now)
        if local.busy:
            self._checked_s = now
        elif now - self._checked_s >= CHECK_S and local.joined:
            looked_into = self._me in self._coordinator.members  # what the last one said of it
            leads = self._behind_since is not None and self.coordinates(self._stage, now=now)
            if leads and looked_into and self.stuck_s(now=now) > restore_s:
                self._checked_s = now
                self._actions.append(replica.RestoreStage())
            elif self.belief.needs_proof and not leads and now - max(self._moved_s, self._went_s) >= LOST_S:
                self._checked_s = now
                if self.belief.is_passed(local.version):  # its coordinator tells this replica alone nothing
                    self._went_s = now  # between two tries it may hear that the run went back
                    goal = Directive(
                        run=self._run.id, stage=self._stage, coordinator=self._me,
                        generation=local.generation, version=local.version + 1,
                    )  # fmt: skip
                    self._actions.append(replica.CatchUp(goal))

    def ready(self, *, now: float) -> Ready:
        """What is to be done about all that came in; each message and action is returned once."""
        due = now - self._doubted_s >= REFRESH_S
        if self.belief.lacking and (due or self.belief.goes_without_again()):
            self._doubted_s = now
            self._actions += [replica.AskAbsent(t, peers) for t, peers in self.belief.lacking.items()]
        self.belief.lacking.clear()
        wake_at = now if self._soon else self._spoke_s + REFRESH_S
        ready = Ready(self._messages, self._actions, wake_at)
        self._messages, self._actions, self._soon = [], [], False
        return ready

    def coordinator(self, stage: Stage, *, now: float) -> PeerId | None:
        """The live serving peer of `stage` that coordinates it, as far as this peer can see."""
        records, members = self._peers.get(stage, ()), self._coordinator.members
        serving = {r.peer for r in records if r.state == "serving"}
        lately: set[PeerId] = set()
        if stage == self._stage:
            if members:
                since = self._local.version if now - self._moved_s < UNFOLLOWED_S else 0  # that behind slept
                told = {p: m for p, m in members.items() if m.report.version >= since}
                lately = {p for p, m in told.items() if now - m.seen_s <= LATELY * REFRESH_S}
                serving |= {p for p, m in members.items() if not is_gone(m.seen_s, now=now)}
                serving -= {r.peer for r in records if r.state in ("leaving", "left", "paused")}
            serving.discard(self._me)
            if self._local.joined and not (self._local.leaving and serving):
                serving.add(self._me)
        if serving <= {self._me}:
            return next(iter(serving), None)
        there = [p for p in serving if p == self._me or not self._backoff.in_backoff(p, now=now)]
        voice = self.belief.voice(stage)
        # Others with voice see another one, which rests for this one: none has reported in this turn.
        unfollowed = stage == self._stage and now - self._followed_s > UNFOLLOWED_S
        alone = unfollowed or set(heard(serving, voice)).isdisjoint({*there} - {self._me})
        if self.belief.needs_proof and alone:
            # What it finds another has to confirm: it goes on under one that rests, too, whose turn ends.
            there = [p for p in serving if p == self._me or not self._backoff.is_away(p, now=now)]
        since_s = {r.peer: r.since or math.inf for r in records} | {self._me: self._since_s}
        ranked = elect({peer: since_s.get(peer, math.inf) for peer in serving}, voice)
        in_turn = [peer for peer in self._rotation.in_turn(ranked, voice=voice) if peer in there]
        if not alone and len(in_turn) > (2 if self.belief.needs_proof else 1):  # of two one needs the other
            in_turn.sort(key=lambda peer: peer != self._me and self._backoff.is_tried(peer, now=now))
        first = next(iter(in_turn or elect({p: since_s.get(p, math.inf) for p in there}, voice)), None)
        if first in lately and self._me in ranked:
            # It reports, so it does not coordinate: after late steps two may leave that to each other.
            first = min(first, self._me, key=[*ranked, first].index)
        return first

    def coordinates(self, stage: Stage, *, now: float) -> bool:
        return self.coordinator(stage, now=now) == self._me

    # -- speaking ---------------------------------------------------------------------------------

    def speak(self, *, now: float) -> bool:
        """Report, or decide: on every change, and when `ready` said. Returns whether this peer leads."""
        self._spoke_s = now
        coordinator = self.coordinator(self._stage, now=now)
        if not self._local.joined and not self._local.steps:
            return coordinator == self._me
        there = {p: m for p, m in self._coordinator.members.items() if not is_gone(m.seen_s, now=now)}
        if self.belief.needs_proof and self._local.version < self._run.steps:

            def first(stage: Stage, turn: int | None = None) -> list[PeerId]:
                serving = [record for record in self._peers.get(stage, ()) if record.state == "serving"]
                return self._by_turn(stage, serving, turn)[:1]

            # Those that have only just taken this step counted its time as well.
            passed = partial(self.belief.is_passed, min(self._local.version + 1, self._run.steps - 1))
            leads = coordinator == self._me
            held_up = self._rotation.waits(now=now, leads=leads, passed=passed)
            if held_up is not None:
                self._followed_s = now
                # No peer holds up a run that waits for its first microbatch.
                begun = self._moved_s > -math.inf or self._local.begun
                for peer in first(self._stage + 1, held_up) * begun:  # it has less time to answer in now
                    self._backoff.charge(peer, t=self._local.version, since_s=now, now=now)
                coordinator = self.coordinator(self._stage, now=now)
        if coordinator == self._me:
            self._lead(now)
        elif coordinator is not None:
            if not self._backoff.rests(coordinator, now=now):
                self._followed_s = now
            self._coordinator.members, self._told = {p: m for p, m in there.items() if p != self._me}, {}
            self._coordinator.forget_answers()
            last, since = self.directive, 0
            if last and (last.coordinator, last.generation) == (coordinator, self._local.generation):
                since = last.version if coordinator in last.sources else 0  # it knows the commits before
            to = self._to_tell(self._stage, coordinator, last.coordinator if last else "", 0, now)
            report = self._report(since=since)
            self._messages += [Message(peer, *report) for peer in sorted(to)]
        return coordinator == self._me

    def _to_tell(self, stage: Stage, seen: PeerId | None, told: PeerId, more: int, now: float) -> set[PeerId]:
        """The peers to tell what a coordinator of `stage` should know: the one that this peer sees, that it
        was told of, and so many whose turn is next. After late steps, in runs that name peers, they differ.
        """
        records = self._peers.get(stage, ()) if self.belief.needs_proof else ()
        there = self._by_turn(stage, records)
        able = {peer for peer in there if not self._backoff.is_away(peer, now=now)}
        others = {told, *there[:more]} & able
        return {peer for peer in {seen, *others} if peer and peer != self._me}

    def _by_turn(self, stage: Stage, records: Sequence[PeerRecord], turn: int | None = None) -> list[PeerId]:
        """Those of a stage that may coordinate it, from the one whose turn that is, or was."""
        voice = self.belief.voice(stage)
        since_s = {record.peer: record.since or math.inf for record in records}
        return self._rotation.in_turn(elect(since_s, voice), turn, voice=voice)

    def _report(self, *, since: int = 0) -> tuple[ReplicaReport, list[list[float]]]:
        """This replica's report, and the losses that go with it."""
        report = replica.report_of(self._run.id, self._stage, self._local, since=since)
        report = replace(report, number=next(self._numbers))
        known = self._local.steps if self._stage == self._run.S - 1 else {}
        losses = [[known[s.t].loss_of(m) for m in members_of(s.done)] for s in report.steps if known]
        if self.belief.needs_proof:
            own = next((r for r in self._peers.get(self._stage, ()) if r.peer == self._me), None)
            report = signed_report(report, self._signer, own.voucher if own else None)
        return report, losses

    def lost(self, peer: PeerId) -> None:
        """Stop waiting for that peer: it is gone."""
        self._told.pop(peer, None)
        self._soon |= self._coordinator.members.pop(peer, None) is not None

    def unreachable(self, peer: PeerId, *, silent: bool, now: float) -> None:
        """Note that a coordinator did not answer, or refused: another is chosen, now, during its backoff."""
        self._soon |= not self._backoff.in_backoff(peer, now=now)  # else it is told again each millisecond
        self._backoff.failed(peer, now=now, silent=silent)

    # -- a replica --------------------------------------------------------------------------------

    def hear_directive(self, sender: PeerId, directive: Directive, *, now: float) -> None:
        """Follow a directive that was pushed, if it is from this replica's coordinator; else ignore it.

        Raises:
            Refused: it is for another stage or run.
        """
        if directive.run != self._run.id or directive.stage != self._stage:
            said = f"a directive for stage {directive.stage} of run {directive.run[:40]!r}"
            raise Refused(f"{said}; this is stage {self._stage}")
        # After late steps it may see another one than the others follow, whose word is in its answers.
        seen, last = self.coordinator(self._stage, now=now), self.directive
        told = last.coordinator if last and self._rotation.late else None
        if sender == directive.coordinator and sender in (seen, told):
            self.directive_came(directive, now=now, seen=seen)

    def directive_came(self, directive: Directive, *, now: float, seen: PeerId | None = None) -> None:
        """Follow a directive of this replica's coordinator: the answer to its report, or its own decision.

        `seen`: the coordinator, if the caller has just found it.
        """
        last = self.directive
        overtaken = last and last.coordinator == directive.coordinator and directive.is_overtaken_by(last)
        if overtaken and not is_gone(self._led_s, now=now):  # else it began anew, with its clock put back
            return
        seen = seen or self.coordinator(self._stage, now=now)
        if directive.coordinator == seen:
            self._led_s = now
        elif last is not None and last.coordinator == seen and now - self._led_s < LED_S:
            return  # under two in turn nothing is begun that does not end at once
        if not self._follows(directive.generation, now):
            return
        self._learn(directive.commits, directive.generation)
        status = self.run_status  # what it was told when it coordinated perhaps lacks no words any more
        newest = status.commits[-replica.COMMITS_KEPT :]
        self._learn([c for c in newest if c.t >= self._local.version], status.generation)
        # Of others than the open ones a coordinator could have this replica remember any number of rounds.
        told = [step for step in directive.steps[:MAX_STEPS] if step.t - self._local.version in (0, 1)]
        steps = tuple(step for step in told if self._may_follow(step, directive.generation, now))
        self.directive = directive = replace(directive, steps=steps)
        for step in directive.steps:
            if step.plan is not None:
                self._coordinator.heard(step.t, step.plan)
        if directive.coordinator != self._me:
            returned = {t: step.ledger.returned for t, step in self._local.steps.items()}
            if self._coordinator.blame.told(directive, returned, self.belief.voice(self._stage), now=now):
                self._followed_s = now
            began = now - min(max(0, directive.behind_s), MAX_BEHIND_S)
            self._behind_since = began if directive.behind_s > 0 else None
            if self._stage == 0 and self._follows(directive.run_status.generation, now):
                self.run_status = self._borne_out(directive.run_status, now)
        known = self._agreed.known(self._local)
        self._actions += replica.follow(self._me, self._local, directive, known, now=now)

    # -- the stage's coordinator ------------------------------------------------------------------

    def may_report(self, report: ReplicaReport) -> list[int]:
        """Check a report, before its sender is looked up. Returns how many losses come with it, step by step.

        Raises:
            Refused: it is for another stage or run, or no honest replica sends that.
            NotNow, Leaving: this replica does not coordinate now.
        """
        if report.run != self._run.id or report.stage != self._stage:
            said = f"a report for stage {report.stage} of run {report.run[:40]!r}"
            raise Refused(f"{said}; this is stage {self._stage}")
        if not self._local.joined:
            raise NotNow("this peer has not joined yet")
        if self._local.leaving:
            raise Leaving("this peer is leaving: let another coordinate the stage")
        check_report(report, self._run)
        return [step.done.bit_count() for step in report.steps] if self._stage == self._run.S - 1 else []

    def report(
        self, sender: PeerId, report: ReplicaReport, losses: list[list[float]], *, now: float
    ) -> Directive:
        """Take in a report that was checked; return what its sender does now.

        Raises:
            NotNow: it cannot be true as far as is known, or is old, or another peer coordinates.
        """
        if report.say_leaving:
            self.lost(sender)
            raise NotNow("goodbye")
        if self.belief.needs_proof:
            check_signed_report(report, sender, self._signer)
        self._check_ahead(sender, report)
        self._backoff.answered(sender)
        known = self._coordinator.members.get(sender)
        if not report.is_overtaken_by(known.report if known else None):
            self._coordinator.members[sender] = Member(report, losses, now)
        self._follows(report.generation, now)
        if not self.coordinates(self._stage, now=now):
            if self.directive is None:
                raise NotNow("another peer coordinates this stage")
            # What this replica is to take out is for no other.
            steps = tuple(step for step in self.directive.steps if step.plan or step.fetch)
            return replace(self.directive, steps=steps)
        self._lead(now)
        if sender not in self._coordinator.members:
            raise NotNow("an old report of a replica that has said nothing since")
        return replace(self._directive_for(sender, now), number=next(self._numbers))

    def _check_ahead(self, sender: PeerId, report: ReplicaReport) -> None:
        """Refuse a replica that is two versions ahead of the rest: stages step together, unless this peer
        slept.

        Peers of the other stages are asked, and the replica, which repeats itself, is believed a second
        later.
        """
        known = max(self._local.position, self.run_status.position, self.witnessed)
        if self._run.S > 1 and is_alone_ahead(report.position, known):
            self._actions.append(replica.AskWitnesses())
            said = f"peer {short(sender)} says that it is at version {report.version}"
            raise NotNow(f"{said}; the run is at {known.version}", retry_after_s=REFRESH_S)

    def _lead(self, now: float) -> None:
        """Decide for the stage; tell the replicas whose directive changed, and the run coordinator."""
        stage = self._coordinator
        for peer in [p for p, member in stage.members.items() if is_gone(member.seen_s, now=now)]:
            self.lost(peer)
        if heard(stage.members, stage.voice) not in ([], [self._me]):
            self._followed_s = now
        stage.members[self._me] = Member(*self._report(), now)
        known = (self.run_status.position, self.trained)
        there = [at.version for at in known if at.generation == self._agreed.generation]
        stage.run_version = max([*there, *(t + 1 for t in self._agreed.commits)], default=0)
        # Where two strangers are the only stage, no other peer says how far the run is.
        of_two = self._run.S == 1 and not self.belief.voice(0) and len(self._peers.get(0, ())) == 2
        for member in list(stage.members.values()):
            has = member.report.version if of_two else 0
            self._learn(member.report.commits, member.report.generation, has=has)
        stage.decide(now=now)
        newest, commits = stage.newest, self._agreed.known(self._local)
        # A prepared replica waits for its commit: if the run is past it and no replica was told, it is lost.
        follows = stage.holds(newest) and newest in commits
        if (stage.run_version > newest and not follows) or not stage.present():
            self._behind_since = self._behind_since or now
        elif not (self.belief.voice(self._stage) and stage.goes_by_strangers(self._local.version)):
            self._behind_since = None
        coordinator = self._me if self._stage == 0 else self.coordinator(0, now=now)
        late = self.belief.needs_proof and now - self._moved_s >= LOST_S
        # Proofs of many stages are long. Those of the last step go again: new results are compared with them.
        status, is_usual = self.run_status, self.belief.needs_proof and not (late or self._rotation.late)
        if is_usual and (status.run_coordinator, status.generation) == (coordinator, self._agreed.generation):
            had = {commit.t for commit in status.commits if commit.t < status.version - 1}
            commits = {c.t: c for c in replica.newest_commits(commits) if c.t not in had}
        summary = stage.summary(commits, number=next(self._numbers))
        if coordinator == self._me:
            self._run_coordinator.stages[self._stage] = Summarized(summary, self._me, now)
            self._update_run_status(now)
            stage.summary_heard(summary)
        told, more = self.run_status.run_coordinator, MAX_TOLD if self._rotation.late else 0
        knows = self.belief.past(newest, number=int(now)) if late and stage.holds(newest) else set[PeerId]()
        to_tell = self._to_tell(0, coordinator, told, more, now) | knows
        for peer in sorted(stage.tells(summary, to_tell, now=now)):
            self._messages.append(Message(peer, summary))
        for peer in stage.members:
            directive = self._directive_for(peer, now)
            if peer == self._me:
                self.directive_came(replace(directive, number=next(self._numbers)), now=now, seen=peer)
            elif is_untold(directive, self._told.get(peer)):
                self._told[peer] = directive
                self._messages.append(Message(peer, replace(directive, number=next(self._numbers))))

    def _directive_for(self, peer: PeerId, now: float) -> Directive:
        known, since_s, status = self._agreed.known(self._local), self.stuck_s(now=now), self.run_status
        return self._coordinator.directive_for(peer, commits=known, behind_s=since_s, run_status=status)

    def stuck_s(self, *, now: float) -> float:
        """For how long this stage has been unable to follow the run."""
        return 0.0 if self._behind_since is None else now - self._behind_since

    # -- the run ----------------------------------------------------------------------------------

    def summary(self, sender: PeerId, summary: StageSummary, *, now: float) -> RunStatus:
        """Take in the summary of a stage's coordinator; return how the run is.

        Where commits are proven all replicas of stage 0 find them. Where replicas have voice one speaks for
        its stage: one that proves that it is ready; else the coordinator that this peer sees; or another, if
        that one is silent or steps are late, since replicas see different peers.

        Raises:
            Refused: no honest coordinator sends that.
            NotNow: the sender does not coordinate the stage.
        """
        if self._stage == 0 and (self.belief.needs_proof or self.coordinates(0, now=now)):
            check_summary(summary, self._run)
            stage, lately_s = summary.stage, now - LATELY * REFRESH_S
            voice, rival = self.belief.voice(stage), self._run_coordinator.stages.get(stage)
            serving = (r.peer for r in self._peers.get(stage, ()) if r.state == "serving")
            if voice and sender not in heard({sender, *serving}, voice):
                raise NotNow(f"peer {short(sender)} does not coordinate stage {stage}")
            before, said, seen = -1, -1, False
            if voice and rival and rival.coordinator != sender and rival.seen_s > lately_s:
                before, said = (self.belief.ready(s, self._local.version) for s in (rival.summary, summary))
                seen = rival.coordinator == self.coordinator(stage, now=now) and not self._rotation.late
            last = rival.summary if rival and rival.coordinator == sender else None
            if not summary.is_overtaken_by(last) and (before, seen) <= (said, False):
                self._run_coordinator.stages[stage] = Summarized(summary, sender, now)
            self._follows(summary.generation, now)
            self._update_run_status(now)
        return replace(self.run_status, commits=replica.newest_commits(self._agreed.known(self._local)))

    def _update_run_status(self, now: float) -> None:
        run = self._run_coordinator
        run.stages = {s: said for s, said in run.stages.items() if not is_gone(said.seen_s, now=now)}
        present = run.present()
        if not present:
            return
        for summary in present.values():
            self._learn(summary.commits, summary.generation)
        losses = self._coordinator.losses
        told = {t: loss for t, loss in self.run_status.losses if t < self._local.version}
        losses.update(told | losses)  # of steps in which another coordinated the run
        believes = partial(self.believes, generation=self._agreed.generation, is_told=False)
        # A step that strangers took just before those with voice came is one that these do not believe.
        is_new = self._rotation.late and self._moved_s == -math.inf
        by_one = self.belief.borne_out() if is_new else 0
        status = self._borne_out(run.decide(losses, self._local, believes, by_one), now)
        if status == self.run_status or not self.coordinates(0, now=now):
            return
        if status.commits != self.run_status.commits:
            self._soon = True
        self.run_status = status
        for stage, said in run.stages.items():
            if stage != self._stage:
                self._messages.append(Message(said.coordinator, status))

    def hear_run_status(self, sender: PeerId, status: RunStatus, *, now: float) -> None:
        """Take in a status of the run that was pushed, by a peer that may coordinate it; else ignore it.

        Raises:
            Refused: it is of another run.
        """
        if status.run != self._run.id:
            raise Refused(f"the status of run {status.run[:40]!r}; this peer serves {self._run.id}")
        able = (self.coordinator(0, now=now), *self.belief.voice(0))
        if sender in able and sender == status.run_coordinator:
            self.run_status_came(sender, status, now=now)

    def run_status_came(
        self, sender: PeerId, status: RunStatus, *, now: float, told: StageSummary | None = None
    ) -> None:
        """Take in the run coordinator's status of the run; of others only commits that are proven.

        `told`: the summary that it answers.
        """
        known = self._agreed.known(self._local)
        finds = self.belief.needs_proof and any(r.peer == sender for r in self._peers.get(0, ()))
        self._learn(status.commits, status.generation)
        if told is not None and (finds or sender == status.run_coordinator):
            self._soon |= self._coordinator.summary_heard(told, sender, self.belief.lacking)
        leads = sender in (self.coordinator(0, now=now), self.run_status.run_coordinator)
        if leads and self._follows(status.generation, now):
            self.run_status = self._borne_out(status, now)
        if self._agreed.known(self._local) != known and self.coordinates(self._stage, now=now):
            self._soon = True

    def _borne_out(self, status: RunStatus, now: float) -> RunStatus:
        """A status of the run, which is no further than a commit or its peers bear out: stages would take
        themselves for lost, and trainers believe no peer of stage 0. A replica that stood still for long
        believes it all the same: the others may have gone on without most of those with voice.
        """
        said, mine = status.version, self._local.version
        stands = UNBORNE_S <= now - self._moved_s < math.inf
        if said <= mine or stands or not self.belief.needs_proof or said - 1 in self._agreed.commits:
            return status
        least = max(mine, status.generation.start)  # where one begins no peer has to be yet
        return replace(status, version=min(said, max(least, self.belief.borne_out())))

    # -- generations ------------------------------------------------------------------------------

    def _follows(self, generation: Generation, now: float) -> bool:
        """Whether to follow a peer in that generation. One that differs from this replica's is looked into.

        A later one is a claim that a stage is lost: while this replica takes steps, it is not. After this
        replica has entered its own, the others get time to do so as well.
        """
        try:
            check_generation(generation, self._run)
        except Refused:
            return False  # a stage that does not exist cannot say that it is not lost
        mine = self._agreed.generation
        later = generation > mine
        due = now - self._moved_s >= LOST_S if later else now - self._entered_s >= 2 * LOST_S
        due = due and generation != mine and now - self._asked_s >= REFRESH_S
        if due and generation.number <= mine.number + MAX_MISSED_GENERATIONS:
            self._asked_s = now
            self._actions.append(replica.AskLostStage(max(generation, mine)))
        return not later

    def lost_stage_told(
        self, claimed: Generation, told: Mapping[PeerId, tuple[Stage, Position]], voice: Mapping[PeerId, int],
        *, now: float,
    ) -> None:  # fmt: skip
        """Enter a generation, or leave it, by where the replicas are of the stage that it calls lost, and
        some of others. They count by voice; what this replica has itself disproves without it.
        """
        mine, local = self._agreed.generation, self._local
        if local.busy:
            return
        told = {**told, self._me: (self._stage, local.position)}
        counted = {peer: told[peer] for peer in heard(told, voice)}
        all_at = [(at, weight(peer, voice)) for peer, (_, at) in counted.items()]
        counted[self._me] = told[self._me]
        of_stage = [at for stage, at in counted.values() if stage == claimed.lost_stage]
        known = max(local.version, self.run_status.version)
        before = max((at.generation for at, _ in all_at if at.generation < claimed), default=None)
        if claimed > mine:
            if is_followed(claimed, all_at) or not is_disproved(claimed, of_stage, run_version=known):
                self._enter(claimed, now)
        elif claimed == mine and before is not None and not is_followed(claimed, all_at):
            self._enter(before, now)
            if local.generation > before:
                self._actions.append(replica.Retreat(before))

    def _enter(self, generation: Generation, now: float) -> None:
        """Decide in another generation: an earlier one's commits would let one stage run ahead."""
        self._agreed.generation = generation
        self._agreed.commits.clear()
        self._coordinator.forget_answers()
        self._coordinator.blame.forget(self._run.steps)  # its steps begin when they are taken again
        self._entered_s, self._soon = now, True

    def _learn(self, commits: Sequence[Commit], generation: Generation, *, has: int = 0) -> None:
        """Remember commits that are proven. One for which this stage has no weights is false, or it is behind
        and will be told again: kept, that would hide every true one. No words are asked for on it. `has`: the
        version of a replica that is believed to have the weights.
        """
        agreed, mine = self._agreed, self._local.version
        new = [c for c in commits if generation == agreed.generation and c.t not in agreed.commits]
        if new:
            newest = max(mine, has, self._coordinator.newest_version() if self._coordinator.present() else 0)
            near = (c for c in new if min(mine, newest - replica.COMMITS_KEPT) <= c.t <= newest)
            agreed.learn([commit for commit in near if self.believes(commit, generation)])

    def believes(self, commit: Commit, generation: Generation, *, is_told: bool = True) -> bool:
        """Whether a commit is proven, as far as this replica can see; if not, it asks for what is lacking."""
        if not self.belief.needs_proof or self._agreed.known(self._local).get(commit.t) == commit:
            return True
        step = self._local.steps.get(commit.t)
        mine = step.prepared if step else None
        return self.belief.commit(commit, generation, mine, is_told=is_told)

    def _may_follow(self, step: StepDirective, generation: Generation, now: float) -> bool:
        """Whether a coordinator may ask for that: a result that it alone knows of may be made up.

        Of a round to which this replica gave all it finds out by itself whether a result is true. Where sums
        are not checked, one word is enough of a round that it has heard of: else one that failed here alone
        would be made again, with all of its microbatches.
        """
        mine = self._local.steps.get(step.t)
        if step.begin_again:  # others may have taken it, by a commit of that result
            held = mine.prepared.round if mine is not None and mine.prepared is not None else ""
            told = self._coordinator.may_have_committed(step.t, held, now=now)
            return not told and step.t not in self.belief.lacking
        if step.fetch is None or not self.belief.needs_proof or self._run.meets_at(step.t):
            return True  # at a meeting nothing is taken from those that have the result
        if are_checked(self._run):
            gave_all = mine is not None and mine.gave_all == step.fetch.round
        else:
            gave_all = self._coordinator.knows(step.t, step.fetch.round)
        return gave_all or self.belief.result(step.fetch, generation, step.t)
