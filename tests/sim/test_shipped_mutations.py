"""Rules that are broken in the classes that ship are noticed by the simulation.

A hundred schedules do not notice these three yet: adding to a frozen sum, dropping a ledger without its sum,
keeping a sum that was handed over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from peers.sim.__main__ import played
from peers.stage import coordination, server
from peers.stage.recovery import Recovery
from swarm.model.stage import StageCompute
from swarm.protocol import coordinator, rounds
from swarm.protocol.ledger import Claim, Ledger
from swarm.protocol.rounds import Commit, Decision, MemberStep, Plan, Reduce, StageStep

Patch = pytest.MonkeyPatch


def count_without_claims(patch: Patch) -> None:
    def always_new(self: Ledger, m: int) -> Claim:
        self.in_progress |= 1 << m
        return Claim.NEW

    patch.setattr(Ledger, "claim", always_new)
    patch.setattr(Ledger, "may_add", lambda self, m: self.frozen_for is None)
    patch.setattr(Ledger, "record", _unchecked)


def _unchecked(self: Ledger, m: int) -> None:
    self.done |= 1 << m


def overlook_duplicates(patch: Patch) -> None:
    patch.setattr(coordinator, "decide", _blind_decide)
    patch.setattr(server, "check_plan", lambda plan, **_: None)


real_decide = rounds.decide


def _blind_decide(
    run: str,
    stage: int,
    t: int,
    microbatches: int,
    numel: int,
    members: list[MemberStep],
    current: Plan | None,
) -> Decision:
    """`decide` without its look for duplicates."""
    members = sorted(members, key=lambda member: member.peer)
    done = {m.peer: m.done for m in members}
    seen, single = 0, list[MemberStep]()
    for m in members:
        single.append(replace(m, done=m.done & ~seen))
        seen |= m.done
    if current is not None and current.ledgers == tuple(done.get(p) for p in current.members):
        kept = {m.peer: m.done for m in single}
        current = _with_ledgers(current, tuple(kept[p] for p in current.members))
    decision = real_decide(run, stage, t, microbatches, numel, single, current)
    if not isinstance(decision, Reduce):
        return decision
    plan = decision.plan
    ledgers = tuple(done[p] for p in plan.members)
    name = rounds.round_id(run, stage, t, plan.number, plan.members, ledgers)
    return Reduce(_with_ledgers(plan, ledgers, name))


def _with_ledgers(plan: Plan, ledgers: tuple[int, ...], name: str | None = None) -> Plan:
    import msgspec

    return msgspec.structs.replace(plan, ledgers=ledgers, round=plan.round if name is None else name)


def never_thaw(patch: Patch) -> None:
    patch.setattr(Ledger, "thaw", lambda self: None)


def stay_when_a_stage_is_lost(patch: Patch) -> None:
    async def nothing(self: Recovery, run: object, *, waited_s: float) -> bool:
        return False

    patch.setattr(Recovery, "restore", nothing)


def forget_a_farewell(patch: Patch) -> None:
    """Count a member that left for ever."""
    patch.setattr(coordination, "GONE_AFTER_S", 1e9)
    patch.setattr(coordination.StepCoordination, "lost", lambda self, peer: None)


def keep_a_tied_gradient(patch: Patch) -> None:
    """Step with what the own stage found of a tied weight."""
    patch.setattr(StageCompute, "complete", lambda self, reduced, shared: reduced)


def commit_early(patch: Patch) -> None:
    """As soon as one stage is prepared."""

    def commit(
        t: int, stages: int, summaries: Mapping[int, StageStep], last_go: Mapping[int, Commit]
    ) -> Commit | None:
        ready = len(summaries) == stages and any(summary.ready for summary in summaries.values())
        return last_go.get(t) or (Commit(t, 0.0) if ready else None)

    patch.setattr(coordinator, "decide_commit", commit)


@pytest.mark.parametrize(
    ("mutation", "invariant", "seeds"),
    [
        (count_without_claims, "I1", 100),
        (overlook_duplicates, "I1", 100),
        (never_thaw, "liveness", 100),
        (stay_when_a_stage_is_lost, "liveness", 60),
        (forget_a_farewell, "liveness", 60),
        (keep_a_tied_gradient, "I1", 60),
        (commit_early, "I5", 20),
    ],
)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rule_that_is_broken_is_noticed(
    mutation: Callable[[Patch], None], invariant: str, seeds: int, monkeypatch: Patch
) -> None:
    mutation(monkeypatch)
    for outcome, _ in played(range(seeds), jobs=1):
        if outcome.violation.startswith(invariant) and outcome.violation:
            print(f"noticed by seed {outcome.seed}: {outcome.violation}")
            return
    pytest.fail(f"{seeds} schedules did not notice it")
