"""Rules that are broken in the classes that ship are noticed by the simulation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace as replaced
from itertools import chain, islice
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from peers.audit.answers import AnswerAudits
from peers.sim.__main__ import played
from peers.sim.faults import Fault
from peers.sim.lines import Lines
from peers.sim.setting import setting_of, usual
from peers.sim.world import World
from peers.stage import actions, coordination
from peers.stage.recovery import Recovery
from peers.trainer.trainer import Trainer
from swarm.audit.answers import Made
from swarm.errors import PeerSilent, SetupError
from swarm.model.gradient_sum import SharedWeights
from swarm.model.state import StageState
from swarm.protocol import rounds
from swarm.protocol.ledger import Bitmap, Claim, Ledger
from swarm.protocol.rounds import Commit, Decision, Plan, StepReport, StepSummary

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
    patch.setattr(rounds, "decide", _blind_decide)
    patch.setattr(actions, "check_plan", lambda plan, **_: None)


real_decide = rounds.decide


def _blind_decide(
    run: str,
    stage: int,
    t: int,
    microbatches: int,
    numel: int,
    reports: dict[str, StepReport],
    current: Plan | None,
    uploads_bps: dict[str, float],
    voice: dict[str, int],
    *,
    owners: Collection[str] | None = None,
) -> Decision:
    """`decide` without its look for duplicates."""
    done = {peer: report.done for peer, report in reports.items()}
    seen, single = 0, dict[str, StepReport]()
    for peer, report in sorted(reports.items()):
        single[peer] = replace(report, done=Bitmap(report.done & ~seen))
        seen |= report.done
    if current is not None and current.ledgers == tuple(done.get(p) for p in current.members):
        current = _with_ledgers(current, tuple(single[p].done for p in current.members))
    decision = real_decide(
        run, stage, t, microbatches, numel, single, current, uploads_bps, voice, owners=owners
    )
    if not isinstance(decision, Plan):
        return decision
    plan = decision
    ledgers = tuple(done[p] for p in plan.members)
    name = rounds.round_id(run, stage, t, plan.number, plan.members, ledgers, plan.parts)
    return _with_ledgers(plan, ledgers, name)


def _with_ledgers(plan: Plan, ledgers: tuple[Bitmap, ...], name: str | None = None) -> Plan:
    return replace(plan, ledgers=ledgers, round=plan.round if name is None else name)


def never_thaw(patch: Patch) -> None:
    patch.setattr(Ledger, "thaw", lambda self: None)


def stay_when_a_stage_is_lost(patch: Patch) -> None:
    async def nothing(self: Recovery, run: object, *, waited_s: float) -> bool:
        return False

    patch.setattr(Recovery, "restore", nothing)


def forget_a_farewell(patch: Patch) -> None:
    """Count a member that left for ever. Most runs go on all the same: it is left out for what it costs."""
    patch.setattr("swarm.protocol.protocol.is_gone", lambda seen_s, *, now: False)
    patch.setattr(coordination.StepCoordination, "lost", lambda self, peer: None)


def keep_a_tied_gradient(patch: Patch) -> None:
    """Step with what the own stage found of a tied weight."""
    patch.setattr(SharedWeights, "complete", lambda self, reduced, shared: reduced)


def commit_early(patch: Patch) -> None:
    """As soon as one stage is prepared."""

    def commit(
        t: int, stages: int, summaries: Mapping[int, StepSummary], last_go: Mapping[int, Commit]
    ) -> Commit | None:
        ready = len(summaries) == stages and any(summary.ready for summary in summaries.values())
        return last_go.get(t) or (Commit(t, 0.0) if ready else None)

    patch.setattr(rounds, "decide_commit", commit)


def keep_the_weights_before(patch: Patch) -> None:
    """Load a version without those that the next step is computed with, where updates are delayed."""
    load = StageState.load

    def without(self: StageState, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        kept = {name: vector.clone() for name, vector in self._vectors(version).items()}
        load(self, version, {**tensors, **{n: v for n, v in kept.items() if n == "weights_previous"}})

    patch.setattr(StageState, "load", without)


def end_for_a_silent_peer(patch: Patch) -> None:
    """End a trainer for what one peer does. Another one that comes later trains all the same."""
    call = Trainer._call

    async def given_up(self: Trainer, *args: Any) -> Any:
        try:
            return await call(self, *args)
        except PeerSilent as silent:
            raise SetupError(silent.text) from None

    patch.setattr(Trainer, "_call", given_up)


def convict_who_answered_truly(patch: Patch) -> None:
    async def wrong(*_: object) -> bool:
        return True

    patch.setattr(Made, "is_of", lambda self, said: False)
    patch.setattr(AnswerAudits, "judge", wrong)


def never_end_after_leaving(patch: Patch) -> None:
    async def for_ever(self: actions.Actions, *, limit_s: float) -> None:
        await asyncio.Event().wait()

    patch.setattr(actions.Actions, "finish_saving", for_ever)


@pytest.mark.parametrize(
    ("mutation", "invariant", "seeds", "known"),
    [
        (count_without_claims, "I1", 100, 1),
        (overlook_duplicates, "I1", 100, 1),
        (keep_a_tied_gradient, "I1", 60, 2),
        (commit_early, "I5", 20, 8),
        (keep_the_weights_before, "I2", 60, 25),
        (end_for_a_silent_peer, "end", 20, 0),
        (convict_who_answered_truly, "honesty", 100, 1),
    ],
)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rule_that_is_broken_is_noticed(
    mutation: Callable[[Patch], None], invariant: str, seeds: int, known: int, monkeypatch: Patch
) -> None:
    """`known`: the seed that noticed it last, which is played first."""
    mutation(monkeypatch)
    notice([known, *range(seeds)], invariant)


@pytest.mark.parametrize(
    ("mutation", "fault"),
    [
        (never_thaw, Fault(0.0, "kill at", 0.3, 0.0, "frozen", 1)),
        (stay_when_a_stage_is_lost, Fault(0.0, "lose stage at", 0.3, 1.0, number=1)),
        (forget_a_farewell, Fault(2.9, "lose stage", 0.9, 6.0)),
        (never_end_after_leaving, Fault(0.5, "leave", 0.3, 1.0)),
    ],
)
@pytest.mark.slow
def test_a_rule_without_which_runs_stand_still_is_noticed(
    mutation: Callable[[Patch], None], fault: Fault, monkeypatch: Patch
) -> None:
    """By pairs of replicas on good lines, every third of which stands still after that one fault."""

    def ends(seed: int) -> bool:
        setting = usual(seed)
        setting = replaced(setting, lines=Lines(), first_peers=[2] * setting.run.S)
        return not World(seed, schedule=[fault], setting=setting, end_within_s=25.0).play().violation

    mutation(monkeypatch)
    still = next(seed for seed in range(20) if not ends(seed))
    monkeypatch.undo()
    assert ends(still)


def add_to_a_frozen_sum(patch: Patch) -> None:
    patch.setattr(Ledger, "may_add", lambda self, m: not self.done >> m & 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_is_added_to_a_frozen_sum_is_noticed_by_crowds(monkeypatch: Patch) -> None:
    """Duplicates have to come while sums are frozen: on slow lines that lose calls, one crowd in sixty."""
    add_to_a_frozen_sum(monkeypatch)
    lines = Lines(most_s=0.05, bytes_per_s=3e3, lost=0.08, doubled=0.5, late=0.5)
    crowds = (setting for setting in map(setting_of, chain([557], range(10_000))) if setting.crowd)
    changed = (replaced(crowd, lines=lines, job_s=(0.01, 0.05, 0.4)) for crowd in islice(crowds, 300))
    worlds = (World(setting.seed, setting=setting) for setting in changed)
    assert any(world.play().violation.startswith("I1") for world in worlds)


def notice(seeds: Iterable[int], invariant: str) -> None:
    """Fail if no schedule of `seeds` is violated in that way."""
    for outcome, _ in played(seeds, jobs=1):
        if outcome.violation.startswith(invariant) and outcome.violation:
            print(f"noticed by seed {outcome.seed}: {outcome.violation}")
            return
    pytest.fail("no schedule noticed it")
