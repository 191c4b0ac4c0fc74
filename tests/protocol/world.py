"""A run without an event loop: real `StepProtocol`s, and replicas whose gradient sums are Counters.

Messages arrive at once and in order, unless a script loses them. What happens is written down in sentences.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from peers.sim.network import SimSigner
from swarm.errors import NotNow, Refused
from swarm.ids import PeerId, Position, Stage
from swarm.manifest import Run, audit_run
from swarm.policy.backoff import Backoff
from swarm.protocol.ledger import Claim, Ledger, members_of
from swarm.protocol.messages import Directive, ReplicaReport, RunStatus, StageSummary
from swarm.protocol.protocol import Message, StepProtocol
from swarm.protocol.replica import (
    Action,
    ApplyStep,
    AskAbsent,
    AskLostStage,
    AskWitnesses,
    BeginAgain,
    BeginAllReduce,
    CatchUp,
    Fetch,
    Local,
    RestoreStage,
    Retract,
    Retreat,
    Unfreeze,
)
from swarm.protocol.rollback import plan_rollback
from swarm.protocol.rounds import Commit, Prepared, check_plan
from swarm.protocol.step import ReplicaStep, StepState
from swarm.records import PeerRecord

NUMEL = 8
NOWHERE = Position()


class Step(ReplicaStep):
    """A step whose sum counts microbatches."""

    def __init__(self, t: int, ledger: Ledger) -> None:
        super().__init__(t, ledger)
        self.sum: Counter[int] = Counter()
        self.result: Counter[int] | None = None
        self.waits_for = ""
        """The round whose result waits for other stages' parts."""

    def loss_of(self, m: int) -> float:
        return float(m)


@dataclass
class Replica:
    """A peer: what it holds, and its protocol."""

    name: PeerId
    stage: Stage
    since_s: float
    position: Position = NOWHERE
    steps: dict[int, Step] = field(default_factory=dict)
    commits: dict[int, Commit] = field(default_factory=dict)
    weights: Counter[int] = field(default_factory=Counter)
    """How often each microbatch index counted."""
    applied: dict[int, Counter[int]] = field(default_factory=dict)
    digest: str = ""
    kind: str = "cpu"
    joined: bool = True
    leaving: bool = False
    dead: bool = False
    protocol: StepProtocol = field(init=False)

    def sums(self, t: int) -> bool:
        """Whether it has microbatches of a step."""
        return t in self.steps and bool(self.steps[t].ledger.done or self.steps[t].ledger.in_progress)

    def local(self) -> Local:
        return Local(
            generation=self.position.generation, version=self.position.version, steps=self.steps,
            commits=self.commits, digest=self.digest, kind=self.kind, joined=self.joined,
            leaving=self.leaving,
        )  # fmt: skip


class World:
    """Replicas of one run. `said` is the transcript."""

    def __init__(self, run: Run, *, tied: bool = False) -> None:
        self.run, self.tied = run, tied
        self.now = 100.0
        self.replicas: dict[PeerId, Replica] = {}
        self.records: dict[PeerId, PeerRecord] = {}
        self.saved: dict[Stage, dict[int, Counter[int]]] = {s: {} for s in range(run.S)}
        self.said: list[str] = []
        self.slow = False
        """Reduces end when they are told to."""
        self.cuts: set[frozenset[PeerId]] = set()
        self.doomed: set[PeerId] = set()
        """They die when they have taken their next step, before others hear of it."""
        self.remembered: Directive | None = None
        self.losing: list[str] = []
        """Kinds of messages of which the next is lost."""
        self._mail: deque[tuple[PeerId, Message]] = deque()
        self._due: dict[PeerId, float] = {}
        self._sent: dict[str, dict[PeerId, Counter[int]]] = {}
        """Round -> member -> its contribution."""
        self._rounds: dict[str, tuple[PeerId, ...]] = {}
        self._numbers: dict[str, int] = {}
        self._last: dict[tuple[PeerId, str, PeerId], str] = {}

    # -- the script -------------------------------------------------------------------------------

    def add(self, name: PeerId, stage: Stage, *, joined: bool = True) -> Replica:
        replica = Replica(name, stage, self.now + len(self.replicas), joined=joined)
        replica.protocol = StepProtocol(
            self.run, stage, name, NUMEL, replica.local(), Backoff(),
            SimSigner(name), since_s=replica.since_s,
        )  # fmt: skip
        self.replicas[name] = replica
        self.announce(replica, "serving" if joined else "joining")
        self.open_steps(replica)
        return replica

    def announce(self, replica: Replica, state: str) -> None:
        self.records[replica.name] = PeerRecord(
            peer=replica.name, run=self.run.id, stage=replica.stage, state=state,  # type: ignore[arg-type]
            version=replica.position.version, since=replica.since_s,
        )  # fmt: skip

    def compute(self, name: PeerId, microbatches: Iterable[int], t: int | None = None) -> None:
        """The backwards of these microbatches end at a replica."""
        replica = self.replicas[name]
        step = replica.steps.get(replica.position.version if t is None else t)
        for m in microbatches:
            if step is not None and step.ledger.claim(m) is Claim.NEW:
                if step.ledger.may_add(m):
                    step.ledger.record(m)
                    step.sum[m] += 1
                step.ledger.release(m)
        self.changed(name)

    def kill(self, name: PeerId) -> None:
        self.replicas[name].dead = True
        for round_name, members in self._rounds.items():
            if name in members:
                self._abort(round_name)

    def leave(self, name: PeerId) -> None:
        """It says that it leaves, and is gone."""
        replica = self.replicas[name]
        replica.leaving = True
        self.announce(replica, "leaving")
        coordinator = replica.protocol.coordinator(replica.stage, now=self.now)
        if coordinator not in (None, name):
            report = ReplicaReport(
                run=self.run.id, stage=replica.stage, generation=replica.position.generation,
                version=replica.position.version, say_leaving=True,
            )  # fmt: skip
            self._deliver(name, Message(coordinator, report))  # type: ignore[arg-type]
        replica.dead = True
        self.announce(replica, "left")

    def changed(self, name: PeerId) -> None:
        self._due[name] = self.now

    def live(self) -> list[Replica]:
        return [replica for replica in self.replicas.values() if not replica.dead]

    def run_for(self, seconds: float) -> None:
        """Let time pass. Messages take none."""
        end = self.now + seconds
        while True:
            self._settle()
            due = min((self._due.get(r.name, self.now) for r in self.live()), default=end)
            if due > end:
                break
            self.now = max(self.now, due)
            for replica in self.live():
                if self._due.get(replica.name, self.now) <= self.now:
                    self._see(replica)
                    replica.protocol.speak(now=self.now)
                    self._drain(replica)
        self.now = end

    def finish_reduces(self) -> None:
        """Every round whose members are all there ends."""
        for name, members in list(self._rounds.items()):
            sent = self._sent.get(name, {})
            if all(member in sent and not self.replicas[member].dead for member in members):
                total: Counter[int] = Counter()
                for member in members:
                    total.update(sent[member])
                del self._rounds[name]
                for member in members:
                    step = self._step_in(member, name)
                    if step is not None:
                        self._hold(self.replicas[member], step, total, name)

    def hear(self, replica: Replica, directive: Directive) -> None:
        """A directive of its coordinator comes, however old."""
        self._see(replica)
        replica.protocol.hear_directive(directive.coordinator, directive, now=self.now)
        self._drain(replica)
        self._settle()

    def coordinates(self, replica: Replica, stage: Stage) -> bool:
        """Whether a replica believes that it coordinates a stage."""
        self._see(replica)
        return replica.stage == stage and replica.protocol.coordinates(stage, now=self.now)

    # -- inside -----------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        self.said.append(text)

    def _see(self, replica: Replica) -> None:
        by_stage: dict[Stage, list[PeerRecord]] = {}
        for record in sorted(self.records.values(), key=lambda record: record.peer):
            by_stage.setdefault(record.stage, []).append(record)
        replica.protocol.observe(replica.local(), by_stage, now=self.now)

    def _drain(self, replica: Replica) -> None:
        ready = replica.protocol.ready(now=self.now)
        for message in ready.messages:
            self._mail.append((replica.name, message))
        for action in ready.actions:
            self._act(replica, action)
        self._due[replica.name] = min(ready.wake_at, self._due.get(replica.name, ready.wake_at))
        if ready.wake_at > self.now >= self._due[replica.name]:
            self._due[replica.name] = ready.wake_at

    def _settle(self) -> None:
        for _ in range(10_000):
            if not self._mail:
                if not self.slow:
                    self.finish_reduces()
                if not self._complete_tied():
                    return
                continue
            sender, message = self._mail.popleft()
            if not self.replicas[sender].dead:
                self._deliver(sender, message)
        raise AssertionError("messages go round and round")

    def _reaches(self, one: PeerId, other: PeerId) -> bool:
        there = self.replicas.get(other)
        return there is not None and not there.dead and frozenset((one, other)) not in self.cuts

    def _deliver(self, sender: PeerId, message: Message) -> None:
        kind = type(message.body).__name__
        self._tell(sender, message)
        giver = self.replicas[sender]
        lost = kind in self.losing
        if lost:
            self.losing.remove(kind)
            self.say(f"  … which is lost: {kind} of {sender} to {message.to}")
            return
        if not self._reaches(sender, message.to):
            self._see(giver)
            if isinstance(message.body, Directive):
                giver.protocol.lost(message.to)
            elif not isinstance(message.body, RunStatus):
                giver.protocol.unreachable(message.to, silent=True, now=self.now)
            self._drain(giver)
            return
        taker = self.replicas[message.to]
        self._see(taker)
        answer: Directive | RunStatus | None = None
        try:
            if isinstance(message.body, ReplicaReport):
                taker.protocol.may_report(message.body)
                losses = [list(row) for row in message.losses]
                answer = taker.protocol.report(sender, message.body, losses, now=self.now)
            elif isinstance(message.body, Directive):
                taker.protocol.hear_directive(sender, message.body, now=self.now)
            elif isinstance(message.body, StageSummary):
                answer = taker.protocol.summary(sender, message.body, now=self.now)
            else:
                taker.protocol.hear_run_status(sender, message.body, now=self.now)
        except (NotNow, Refused) as refusal:
            if not (isinstance(message.body, ReplicaReport) and message.body.say_leaving):
                self._once(taker.name, "refusal", sender, f"{taker.name} answers {sender}: {refusal.text}")
            if not isinstance(refusal, NotNow) or refusal.code == "leaving":
                giver.protocol.unreachable(message.to, silent=False, now=self.now)
        self._drain(taker)
        if answer is not None and not giver.dead and not taker.dead:
            self._see(giver)
            if isinstance(answer, Directive):
                giver.protocol.directive_came(answer, now=self.now)
            else:
                giver.protocol.run_status_came(message.to, answer, now=self.now, told=message.body)
            self._drain(giver)

    # -- what actions do --------------------------------------------------------------------------

    def _act(self, replica: Replica, action: Action) -> None:
        name = replica.name
        if isinstance(action, AskWitnesses):
            self.say(f"{name} asks the other stages how far the run is")
            for other in self.live():
                if other.stage != replica.stage:
                    replica.protocol.witnessed = max(replica.protocol.witnessed, other.position)
        elif isinstance(action, AskAbsent):
            able = {p for p in action.peers if self._reaches(name, p) and self.replicas[p].sums(action.t)}
            replica.protocol.belief.excuse(action.t, set(action.peers) - able, set(), set())
        elif isinstance(action, AskLostStage):
            lost = action.generation.lost_stage
            there = [r for r in self.live() if r.joined and self._reaches(name, r.name) and r is not replica]
            where = ", ".join(f"{r.name} {_at(r.position)}" for r in there) or "none answers"
            self._once(name, "asks", "", f"{name} asks whether stage {lost} was lost: {where}")
            told = {r.name: (r.stage, r.position) for r in there}
            replica.protocol.lost_stage_told(action.generation, told, {}, now=self.now)
            self._drain(replica)
        elif isinstance(action, Retreat):
            replica.position, replica.commits = Position(action.generation, replica.position.version), {}
            self.say(f"{name} leaves the generation: {_at(replica.position)}")
            self.changed(name)
        elif isinstance(action, RestoreStage):
            self._restore(replica)
        elif isinstance(action, CatchUp):
            self._catch_up(replica, action.directive)
        elif isinstance(action, ApplyStep):
            self._apply(replica, action.commit)
        else:
            step = replica.steps[action.t]
            if isinstance(action, BeginAgain):
                replica.steps.pop(action.t).abort()
                self.open_steps(replica)
                self.say(f"{name} drops its result and its sum of step {action.t}")
            elif isinstance(action, BeginAllReduce):
                self._reduce(replica, step, action)
            elif isinstance(action, Fetch):
                self._fetch(replica, step, action)
            elif isinstance(action, Unfreeze):
                step.give_up_round()
                step.ledger.thaw()
                step.open_again()
                self.say(f"{name} opens the sum of step {step.t} again")
            else:
                self._retract(replica, step, action)
            self.changed(name)

    def _reduce(self, replica: Replica, step: Step, action: BeginAllReduce) -> None:
        plan = action.plan
        step.start_round(plan.round, now=self.now)
        why = check_plan(
            plan, run=self.run.id, stage=replica.stage, t=step.t, microbatches=self.run.M, numel=NUMEL,
            me=replica.name, done=step.ledger.done,
        )  # fmt: skip
        if why is not None:
            step.refuse_round(plan.round)
            self.say(f"{replica.name} refuses {self._round(plan.round)}: {why}")
            return
        step.ledger.freeze(plan.round)
        step.exchange(plan.round)
        self._rounds[plan.round] = plan.members
        self._sent.setdefault(plan.round, {})[replica.name] = Counter(step.sum)
        self.say(
            f"{replica.name} reduces step {step.t} with {_set(step.ledger.done)} in {self._round(plan.round)}"
        )
        if any(self.replicas[member].dead for member in plan.members):
            self._abort(plan.round)

    def _abort(self, name: str) -> None:
        for replica in self.live():
            step = self._step_in(replica.name, name)
            if step is not None:
                step.end_round(name, failed=True)
                self.say(f"{replica.name} aborts {self._round(name)}")
                self.changed(replica.name)

    def _step_in(self, member: PeerId, name: str) -> Step | None:
        for step in self.replicas[member].steps.values():
            if step.round is not None and step.round.name == name and not step.over:
                return step
        return None

    def _fetch(self, replica: Replica, step: Step, action: Fetch) -> None:
        for source in action.sources:
            there = self.replicas[source].steps.get(step.t)
            if there is not None and there.prepared is not None and self._reaches(replica.name, source):
                assert there.result is not None
                step.promise(action.round, now=self.now)
                step.ledger.freeze(action.round)
                self.say(f"{replica.name} takes the result of {self._round(action.round)} from {source}")
                self._hold(replica, step, there.result, action.round)
                return

    def _hold(self, replica: Replica, step: Step, total: Counter[int], name: str) -> None:
        if step.state is StepState.PREPARED:
            return
        step.result = +total
        step.complete()
        if not self.tied:
            self._prepare(replica, step, name)
        else:
            step.waits_for = name
            self.say(f"{replica.name} has its stage's sum of step {step.t} and waits for the other stages'")

    def _prepare(self, replica: Replica, step: Step, name: str) -> None:
        step.prepare(Prepared(name, 1.0 + replica.stage, ""))
        step.end_round(name, failed=False)
        self.say(f"{replica.name} is prepared for step {step.t}")
        self.changed(replica.name)

    def _complete_tied(self) -> bool:
        """Whether a step became whole."""
        moved = False
        for replica in self.live() if self.tied else ():
            for step in replica.steps.values():
                if step.state is StepState.COMPLETING and all(
                    any(r.stage == s and self._has_sum(r, step.t) for r in self.live())
                    for s in range(self.run.S)
                ):
                    self._prepare(replica, step, step.waits_for)
                    moved = True
        return moved

    def _has_sum(self, replica: Replica, t: int) -> bool:
        step = replica.steps.get(t)
        return t in replica.applied or (step is not None and step.result is not None)

    def _retract(self, replica: Replica, step: Step, action: Retract) -> None:
        twice = action.microbatches & step.ledger.done
        for m in list(members_of(twice)):
            step.sum[m] -= 1
            step.ledger.remove(m)
        if twice:
            self.say(f"{replica.name} takes {_set(twice)} out of step {step.t}")

    def _apply(self, replica: Replica, commit: Commit) -> None:
        step = replica.steps[commit.t]
        assert step.result is not None
        step.take()
        replica.weights.update(step.result)
        replica.applied[commit.t] = step.result
        replica.commits[commit.t] = commit
        self._move(replica, Position(replica.position.generation, commit.t + 1))
        self.say(f"{replica.name} takes step {commit.t} with {_counted(step.result)}")
        if replica.name in self.doomed:
            self.kill(replica.name)
            self.say(f"{replica.name} dies")

    def _catch_up(self, replica: Replica, directive: Directive) -> None:
        goal = Position(directive.generation, directive.version)
        for source in directive.sources:
            there = self.replicas[source]
            if source != replica.name and self._reaches(replica.name, source):
                replica.weights, replica.commits = Counter(there.weights), dict(there.commits)
                replica.applied, replica.digest = dict(there.applied), there.digest
                self._abandon(replica)
                self._move(replica, there.position)
                self.say(f"{replica.name} takes the state of {source}: {_at(there.position)}")
                return
        if goal.generation > replica.position.generation and goal.version == goal.generation.start:
            self._go_back(replica, goal)
        else:
            self._once(replica.name, "behind", "", f"{replica.name} finds no source of {_at(goal)}")

    def _go_back(self, replica: Replica, goal: Position) -> None:
        if replica.position.version != goal.version:
            if goal.version not in (0, *self.saved[replica.stage]):
                return
            replica.weights = Counter(self.saved[replica.stage].get(goal.version, Counter()))
            self._abandon(replica)
        replica.commits = {}
        self._move(replica, goal)
        self.say(f"{replica.name} goes to {_at(goal)}")

    def _restore(self, replica: Replica) -> None:
        run = replica.protocol.run_status.position
        goal, wait_s = plan_rollback(
            replica.stage, self.run.S, run, self.saved, waited_s=replica.protocol.stuck_s(now=self.now),
            checkpoint_every=self.run.checkpoint_every, steps=self.run.steps,
        )  # fmt: skip
        if wait_s > 0:
            self.say(f"{replica.name} waits {wait_s:.0f} s for a newer checkpoint")
            return
        self.say(f"{replica.name} restores stage {replica.stage}")
        self._go_back(replica, goal)

    def _abandon(self, replica: Replica) -> None:
        for step in replica.steps.values():
            step.abort()
        replica.steps.clear()

    def _move(self, replica: Replica, position: Position) -> None:
        replica.position = position
        if self.run.checkpoint_every and position.version % self.run.checkpoint_every == 0:
            self.saved[replica.stage].setdefault(position.version, Counter(replica.weights))
        self.open_steps(replica)
        self.changed(replica.name)

    def open_steps(self, replica: Replica) -> None:
        version = replica.position.version
        for t in [t for t in replica.steps if t < version]:
            replica.steps.pop(t).abort()
        for t in range(version, min(version + (2 if self.run.delayed_updates else 1), self.run.steps)):
            if t not in replica.steps:
                replica.steps[t] = Step(t, Ledger(t, self.run.M))

    # -- sentences --------------------------------------------------------------------------------

    def _round(self, name: str) -> str:
        return f"round {self._numbers.setdefault(name, len(self._numbers) + 1)}"

    def _once(self, sender: PeerId, kind: str, to: PeerId, text: str) -> None:
        """Say what differs from what was said last."""
        if self._last.get((sender, kind, to)) != text:
            self._last[sender, kind, to] = text
            self.say(text)

    def _tell(self, sender: PeerId, message: Message) -> None:
        body = message.body
        if isinstance(body, ReplicaReport):
            what = "says that it leaves" if body.say_leaving else f"reports {_report(body)}"
        elif isinstance(body, Directive):
            what = f"directs: {self._directive(body)}"
        elif isinstance(body, StageSummary):
            what = f"sums up stage {body.stage}: {_summary(body)}"
        else:
            commits = ", ".join(f"commit {commit.t}" for commit in body.commits)
            what = f"tells of the run: version {body.version}" + (f", {commits}" if commits else "")
        self._once(sender, type(body).__name__, message.to, f"{sender} → {message.to} {what}")

    def _directive(self, directive: Directive) -> str:
        words = [f"version {directive.version}"]
        if directive.generation.number:
            words.insert(0, f"generation {directive.generation.number}")
        for step in directive.steps:
            if step.plan is not None:
                words.append(f"reduce step {step.t} in {self._round(step.plan.round)}")
            elif step.fetch is not None:
                words.append(
                    f"{self._round(step.fetch.round)} of step {step.t} is at {', '.join(step.fetch.sources)}"
                )
            elif step.retract:
                words.append(f"take {_set(step.retract)} out of step {step.t}")
        return "; ".join(words + [f"commit {commit.t}" for commit in directive.commits])

    # -- what must hold ---------------------------------------------------------------------------

    def check(self) -> None:
        """Every weight counts every microbatch once for each step; every sum is its ledger."""
        for replica in self.live():
            for m in range(self.run.M):
                assert replica.weights[m] == replica.position.version, (replica.name, replica.weights)
            for step in replica.steps.values():
                assert +step.sum == Counter(members_of(step.ledger.done)), replica.name
                assert step.result is None or step.result == Counter(range(self.run.M)), replica.name


def _set(bitmap: int) -> str:
    return "{" + ", ".join(map(str, members_of(bitmap))) + "}"


def _counted(counts: Counter[int]) -> str:
    return "each microbatch once" if set(counts.values()) == {1} else f"{dict(counts)}"


def _at(position: Position) -> str:
    generation = f"generation {position.generation.number}, " if position.generation.number else ""
    return f"{generation}version {position.version}"


def _report(report: ReplicaReport) -> str:
    words = [_at(report.position)]
    for step in report.steps:
        state = "prepared" if step.prepared is not None else "frozen" if step.frozen_for else _set(step.done)
        words.append(f"step {step.t} {state}")
    return ", ".join(words)


def _summary(summary: StageSummary) -> str:
    words = [_at(summary.position)]
    for step in summary.steps:
        state = "ready" if step.ready else f"lacks {_set(step.unclaimed)}" if step.unclaimed else "claimed"
        words.append(f"step {step.t} {state}")
    return ", ".join(words)


def make(
    *, stages: int, microbatches: int, steps: int, every: int = 0, delayed: bool = False, tied: bool = False
) -> World:
    """A world without replicas."""
    run = audit_run(stages=stages, steps=steps, microbatches_per_step=microbatches)
    return World(replace(run, checkpoint_every=every, delayed_updates=delayed), tied=tied)
