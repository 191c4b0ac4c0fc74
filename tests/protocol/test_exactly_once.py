"""I1: a step is applied exactly when every microbatch is in its sum, once. Whatever happens meanwhile.

The rules that the live peers use (`Ledger`, `decide`, `check_plan`, `WorkList`), and a world without
tensors: a gradient sum is a Counter of microbatch numbers, a network is a bag of messages that arrive
late, twice or never. What a peer would hold in the end must be one of each.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from swarm.ids import Microbatch
from swarm.protocol import rounds
from swarm.protocol.ledger import Bitmap, Claim, Ledger, everything, members_of
from swarm.protocol.rounds import (
    Decision,
    FetchResult,
    Lacking,
    Plan,
    Prepared,
    Retractions,
    StepReport,
)
from swarm.protocol.worklist import WorkList

M = 4
ALL = everything(M)
ONE_OF_EACH = Counter(range(M))


@dataclass
class Member:
    """One peer of a stage, with a Counter for a gradient sum."""

    name: str
    ledger: Ledger = field(default_factory=lambda: Ledger(0, M))
    sum: Counter[int] = field(default_factory=Counter)
    held: tuple[str, Counter[int]] | None = None
    failed_round: str = ""

    def finish(self, m: int) -> None:
        """The backward of `m` is done here: add it, if that is allowed now."""
        if self.ledger.may_add(m):
            self.sum[m] += 1
            self.ledger.record(m)
        self.ledger.release(m)

    def report(self) -> StepReport:
        held = None if self.held is None else Prepared(self.held[0], 1.0, "")
        return StepReport(
            t=0, done=Bitmap(self.ledger.done),
            in_progress=Bitmap(self.ledger.in_progress & ~self.ledger.done),
            frozen_for=self.ledger.frozen_for or "", prepared=held, failed_round=self.failed_round,
        )  # fmt: skip


class Stage:
    """The members of one stage, what they sent each other, and who holds what."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.sent: dict[str, dict[str, Counter[int]]] = {}
        """Round -> member -> its contribution."""
        self.plan: Plan | None = None
        """The last that a coordinator published."""
        self.plans: dict[str, Plan] = {}

    def decide(self, reports: dict[str, StepReport]) -> Decision:
        decision = rounds.decide("run", 0, 0, M, 10, reports, self.plan, {})
        if isinstance(decision, Plan):
            self.plan = decision
            self.plans[decision.round] = decision
        return decision

    def obey(self, member: Member, decision: Decision) -> None:
        """What a peer does with a directive, however old."""
        ledger = member.ledger
        if isinstance(decision, FetchResult):
            self.adopt(member, decision)
        elif member.held is not None:
            return
        elif isinstance(decision, Plan) and member.name in decision.members:
            plan = decision
            why = rounds.check_plan(
                plan, run="run", stage=0, t=0, microbatches=M, numel=10, me=member.name, done=ledger.done
            )
            if why is not None:
                member.failed_round = plan.round
            else:
                ledger.freeze(plan.round)
                self.sent.setdefault(plan.round, {})[member.name] = Counter(member.sum)
        elif ledger.frozen_for is not None:
            ledger.thaw()
        elif isinstance(decision, Retractions):
            for m in list(members_of(decision.by.get(member.name, 0) & ledger.done)):
                member.sum[m] -= 1
                ledger.remove(m)

    def adopt(self, member: Member, decision: FetchResult) -> None:
        for name in decision.sources:
            source = self.members.get(name)
            if source is not None and source.held is not None and source.held[0] == decision.round:
                member.held = source.held
                member.ledger.freeze(decision.round)

    def complete(self, member: Member) -> None:
        """Every contribution arrived: `member` holds the result of the round that it is in."""
        name = member.ledger.frozen_for
        if name is None or member.held is not None or name not in self.plans:
            return
        sent = self.sent[name]
        if all(who in sent for who in self.plans[name].members):
            total: Counter[int] = Counter()
            for who in self.plans[name].members:
                total.update(sent[who])
            member.held = (name, +total)

    def settle(self) -> list[Counter[int]]:
        """From here on nothing fails: what the members hold in the end."""
        for member in self.members.values():
            for m in members_of(member.ledger.in_progress):
                member.finish(m)
        for _ in range(12):
            decision = self.decide({m.name: m.report() for m in self.members.values()})
            for member in self.members.values():
                self.obey(member, decision)
            if isinstance(decision, Lacking):
                for m in members_of(decision.lacking):
                    member = min(self.members.values(), key=lambda one: one.name)
                    if member.ledger.claim(m) is Claim.NEW:
                        member.finish(m)
            for member in self.members.values():
                self.complete(member)
        held = [member.held for member in self.members.values()]
        assert all(h is not None for h in held), "the stage did not come to an end"
        return [h[1] for h in held if h is not None]


class AnyInterleaving(RuleBasedStateMachine):
    """One step of one stage. Reports and directives may be of any age; anything may die between any two
    rules."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage()
        self.reports: dict[str, list[StepReport]] = {}
        self.directives: list[Decision] = []

    @initialize(names=st.lists(st.sampled_from("abcde"), min_size=1, max_size=3, unique=True))
    def found(self, names: list[str]) -> None:
        for name in names:
            self.join(name)

    @rule(name=st.sampled_from("abcdefgh"))
    def join(self, name: str) -> None:
        if name not in self.stage.members and len(self.stage.members) < 4:
            self.stage.members[name] = Member(name)
            self.reports[name] = [self.stage.members[name].report()]

    @precondition(lambda self: len(self.stage.members) > 1)
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        del self.stage.members[self.somebody(data).name]

    @rule(data=st.data(), m=st.integers(0, M - 1))
    def ask(self, data: st.DataObject, m: int) -> None:
        """A request, or its retry, or its duplicate."""
        self.somebody(data).ledger.claim(m)

    @rule(data=st.data(), lost=st.booleans())
    def finish(self, data: st.DataObject, lost: bool) -> None:
        """A computation ends; `lost`: the next stage never answered it."""
        member = self.somebody(data)
        if member.ledger.in_progress:
            m = data.draw(st.sampled_from(list(members_of(member.ledger.in_progress))))
            if lost:
                member.ledger.release(m)
            else:
                member.finish(m)

    @rule(data=st.data(), m=st.integers(0, M - 1))
    def compute(self, data: st.DataObject, m: int) -> None:
        member = self.somebody(data)
        if member.ledger.claim(m) is Claim.NEW:
            member.finish(m)

    @rule(data=st.data())
    def break_a_backward(self, data: st.DataObject) -> None:
        member = self.somebody(data)
        if member.ledger.frozen_for is None:
            member.sum.clear()
            member.ledger.clear()

    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        member = self.somebody(data)
        self.reports[member.name].append(member.report())

    @rule()
    def decide_on_fresh_reports(self) -> None:
        self.directives.append(self.stage.decide({m.name: m.report() for m in self.stage.members.values()}))

    @rule(data=st.data())
    def decide_on_old_reports(self, data: st.DataObject) -> None:
        """By a coordinator that has heard of some, of dead ones too, and not lately."""
        names = data.draw(st.lists(st.sampled_from(sorted(self.reports)), min_size=1, unique=True))
        self.directives.append(
            self.stage.decide({n: data.draw(st.sampled_from(self.reports[n])) for n in names})
        )

    @rule()
    def a_coordinator_dies(self) -> None:
        """Its successor knows nothing of the plans."""
        self.stage.plan = None

    @precondition(lambda self: self.directives)
    @rule(data=st.data(), fresh=st.booleans())
    def obey(self, data: st.DataObject, fresh: bool) -> None:
        directive = self.directives[-1] if fresh else data.draw(st.sampled_from(self.directives))
        self.stage.obey(self.somebody(data), directive)

    @precondition(lambda self: self.directives)
    @rule()
    def all_obey(self) -> None:
        for member in self.stage.members.values():
            self.stage.obey(member, self.directives[-1])

    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        self.stage.complete(self.somebody(data))

    @rule(data=st.data())
    def fail_a_round(self, data: st.DataObject) -> None:
        member = self.somebody(data)
        if member.held is None and member.ledger.frozen_for is not None:
            member.failed_round = member.ledger.frozen_for

    @invariant()
    def every_sum_is_its_ledger(self) -> None:
        for member in self.stage.members.values():
            assert +member.sum == Counter(members_of(member.ledger.done))

    @invariant()
    def whoever_holds_a_result_holds_one_of_each(self) -> None:
        for member in self.stage.members.values():
            assert member.held is None or member.held[1] == ONE_OF_EACH

    def teardown(self) -> None:
        if self.stage.members:
            assert all(held == ONE_OF_EACH for held in self.stage.settle())

    def somebody(self, data: st.DataObject) -> Member:
        return self.stage.members[data.draw(st.sampled_from(sorted(self.stage.members)))]


TestAnyInterleaving = AnyInterleaving.TestCase
TestAnyInterleaving.settings = settings(max_examples=30, stateful_step_count=40)


# --- trainers, stages and a lossy world ---------------------------------------------------------------------


class World:
    """One step of S stages with trainers that walk their lists, driven by a seeded dice."""

    def __init__(self, seed: int, *, stages: int = 3, replicas: int = 2, trainers: int = 2) -> None:
        self.dice = random.Random(seed)
        self.stages = [Stage() for _ in range(stages)]
        for number, stage in enumerate(self.stages):
            for replica in range(replicas):
                stage.members[f"s{number}p{replica}"] = Member(f"s{number}p{replica}")
        orders = [self.dice.sample(range(M), M) for _ in range(trainers)]
        self.lists = [WorkList(lambda t, order=order: order) for order in orders]
        self.replays = 0
        self.undone = 0
        self.now = 0.0

    def work(self, todo: WorkList, trouble: float) -> None:
        """One microbatch through the stages; its answer may be lost on any of the ways back."""
        item = todo.next(0, now=self.now)
        if item is None:
            return
        self.replays += item.replay
        if self._call(0, item.microbatch.m, item.deepest, trouble):
            todo.finished(item.microbatch)
        else:
            todo.failed(item.microbatch)

    def _call(self, number: int, m: int, deepest: int, trouble: float) -> bool:
        """As a caller of that stage: whether an answer came back."""
        stage = self.stages[number]
        for _ in range(3):
            member = self.dice.choice(list(stage.members.values()))
            claim = member.ledger.claim(m)
            answered = claim is Claim.DONE
            if claim is Claim.NEW or deepest > number:
                answered = number + 1 == len(self.stages) or self._call(number + 1, m, deepest, trouble)
            if claim is Claim.NEW:
                if answered and member.name in stage.members:
                    member.finish(m)
                else:
                    member.ledger.release(m)
            if self.dice.random() < trouble and len(stage.members) > 1 and self.dice.random() < 0.3:
                stage.members.pop(member.name, None)  # killed, with all that it has
                continue
            if answered and self.dice.random() >= trouble:
                return True
        return False

    def coordinate(self, trouble: float) -> bool:
        """Reports, directives and reduces; true once every stage is ready."""
        lacking = []
        ready = True
        for number, stage in enumerate(self.stages):
            decision = stage.decide({m.name: m.report() for m in stage.members.values()})
            lacking.append(decision.unclaimed if isinstance(decision, Lacking) else 0)
            ready &= isinstance(decision, FetchResult) and decision.ready
            if isinstance(decision, Retractions):
                self.undone += sum(by.bit_count() for by in decision.by.values())
            for member in stage.members.values():
                if self.dice.random() >= trouble:
                    stage.obey(member, decision)
            for member in list(stage.members.values()):
                chance = self.dice.random()
                if chance < trouble / 3 and len(stage.members) > 1:
                    del stage.members[member.name]
                elif chance < trouble and member.held is None and member.ledger.frozen_for:
                    member.failed_round = member.ledger.frozen_for
                else:
                    stage.complete(member)
            if self.dice.random() < trouble / 2:
                stage.members[name] = Member(name := f"s{number}j{self.now}")
        for todo in self.lists:
            if self.dice.random() >= trouble:
                todo.lacking(0, lacking, now=self.now)
        return ready

    def run(self, *, troubled_rounds: int, trouble: float) -> list[Counter[int]]:
        for number in range(troubled_rounds + 60):
            self.now = number * 0.25
            for todo in self.lists:
                for _ in range(3):
                    self.work(todo, trouble if number < troubled_rounds else 0.0)
            if self.coordinate(trouble if number < troubled_rounds else 0.0):
                return [m.held[1] for stage in self.stages for m in stage.members.values() if m.held]
        raise AssertionError("the step did not come to an end")


@given(st.integers(0, 2**32), st.floats(0.0, 0.7))
@settings(max_examples=60)
def test_a_step_ends_with_one_of_each_whoever_dies_and_whatever_is_lost(seed: int, trouble: float) -> None:
    held = World(seed).run(troubled_rounds=15, trouble=trouble)
    assert held and all(one == ONE_OF_EACH for one in held)


def test_without_trouble_one_trainer_repeats_nothing() -> None:
    world = World(1, trainers=1)
    assert all(one == ONE_OF_EACH for one in world.run(troubled_rounds=0, trouble=0.0))
    assert (world.replays, world.undone) == (0, 0)


def test_the_world_really_is_troubled() -> None:
    """Replays and undos happen; otherwise the test above would prove little."""
    worlds = [World(seed) for seed in range(20)]
    for world in worlds:
        world.run(troubled_rounds=15, trouble=0.5)
    assert sum(world.replays for world in worlds) > 20
    assert sum(world.undone for world in worlds) > 5


# --- every rule is needed -----------------------------------------------------------------------------------


def ends_wrong() -> bool:
    """Whether a few troubled steps give anything but one of each, or an assertion."""
    for seed in range(60):
        try:
            held = World(seed).run(troubled_rounds=15, trouble=0.5)
        except AssertionError:
            return True
        if any(one != ONE_OF_EACH for one in held):
            return True
    return False


def always_new(self: Ledger, m: int) -> Claim:
    self.in_progress |= 1 << m
    return Claim.NEW


def unchecked(self: Ledger, m: int) -> None:
    self.done |= 1 << m


def blind_decide(*args: object) -> Decision:
    """`decide` without its look for duplicates."""
    reports: dict[str, StepReport] = args[5]  # type: ignore[assignment]
    seen, single = 0, dict[str, StepReport]()
    for peer, report in sorted(reports.items()):
        single[peer] = replace(report, done=Bitmap(report.done & ~seen), failed_round="")
        seen |= report.done
    decision = real_decide(*args[:5], single, *args[6:])  # type: ignore[arg-type]
    if isinstance(decision, Plan):
        plan = decision
        ledgers = tuple(reports[peer].done for peer in plan.members)
        name = rounds.round_id("run", 0, 0, plan.number, plan.members, ledgers, plan.parts)
        return Plan(name, plan.number, plan.members, ledgers, plan.parts)
    return decision


real_decide = rounds.decide


def break_ledger(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "claim", always_new)
    patch.setattr(Ledger, "may_add", lambda self, m: self.frozen_for is None)
    patch.setattr(Ledger, "record", unchecked)


def break_rounds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rounds, "decide", blind_decide)
    patch.setattr(rounds, "check_plan", lambda plan, **_: None)


@pytest.mark.parametrize("broken", [break_ledger, break_rounds])
def test_a_rule_that_is_left_out_shows_as_a_wrong_count(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not ends_wrong()
    broken(monkeypatch)
    assert ends_wrong()


def test_without_the_look_for_duplicates_alone_members_refuse_and_nothing_is_averaged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`check_plan` is the second lock on the same door."""
    monkeypatch.setattr(rounds, "decide", blind_decide)
    stage = Stage()
    for name in "ab":
        stage.members[name] = Member(name)
        stage.members[name].ledger.claim(0)
        stage.members[name].finish(0)
    with pytest.raises(AssertionError, match="the stage did not come to an end"):
        stage.settle()
    assert all(member.held is None for member in stage.members.values())


def test_a_microbatch_is_a_name() -> None:
    assert str(Microbatch(3, 7)) == "(3, 7)"
    assert Microbatch(3, 7) == (3, 7)
