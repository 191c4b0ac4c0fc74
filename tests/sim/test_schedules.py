"""Ten thousand swarms, each with its own faults, end with each microbatch once; and the simulation can fail.

The second half breaks the rules that the live peers use, one by one, and wants the simulation to notice.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from swarm.policy import rounds
from swarm.policy.ledger import Claim, Ledger
from swarm.policy.rounds import Decision, Go, MemberStep, Plan, Reduce, StageStep
from swarm.sim import __main__ as program
from swarm.sim import peer
from swarm.sim.__main__ import main, with_progress
from swarm.sim.faults import KINDS
from swarm.sim.paused import Snapshot
from swarm.sim.world import Outcome, run_schedule

SCHEDULES = 10_000


def traced(seed: int) -> tuple[Outcome, str]:
    lines: list[str] = []
    return run_schedule(seed, lines.append), "\n".join(lines)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_schedules_of_faults_change_no_weight() -> None:
    """As anybody can run them, half in each of two processes."""
    command = [sys.executable, "-m", "swarm.sim", "--schedules", str(SCHEDULES // 2), "--first"]
    halves = [
        subprocess.Popen([*command, str(first)], stdout=subprocess.PIPE, text=True)
        for first in (0, SCHEDULES // 2)
    ]
    told = [half.communicate()[0] for half in halves]
    assert [half.returncode for half in halves] == [0, 0], "\n".join(told)
    rows = [json.loads(text.splitlines()[-1])["rows"][0] for text in told]
    faults, checked = (
        sum((Counter(row[key]) for row in rows), Counter[str]()) for key in ("faults", "checked")
    )
    undone, replayed, eras = (sum(row[key] for row in rows) for key in ("undone", "replayed", "eras"))
    # A calm world would prove little.
    assert all(faults[kind] > SCHEDULES / 50 for kind, _ in KINDS), faults
    assert undone > SCHEDULES / 40 and replayed > SCHEDULES / 2 and eras > SCHEDULES / 200
    assert all(checked[name] > 2 * SCHEDULES for name in ("I1", "I2", "I3", "I4"))


def test_some_schedules_for_those_in_a_hurry() -> None:
    for outcome in with_progress(range(20_000, 20_150), io.StringIO()):
        assert not outcome.violation, f"seed {outcome.seed}: {outcome.violation}"


def test_a_seed_replays_exactly() -> None:
    first, trace = traced(17)
    again, same = traced(17)
    assert trace == same and first == again and len(trace.splitlines()) > 20


def test_a_seed_replays_exactly_in_another_process() -> None:
    """Python salts the order of sets of texts in each process: nothing may depend on it."""
    command = [sys.executable, "-m", "swarm.sim", "--seed", "23", "--trace"]
    told = [
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": salt}, capture_output=True, text=True, check=True
        ).stdout
        for salt in ("1", "2")
    ]
    assert told[0] == told[1] and "serves stage 0" in told[0]


# --- the command --------------------------------------------------------------------------------------------


def test_the_summary_ends_with_a_line_of_json() -> None:
    out = io.StringIO()
    assert main(["--schedules", "20"], out) == 0
    row = json.loads(out.getvalue().splitlines()[-1])["rows"][0]
    assert row["schedules"] == 20 and row["violations"] == [] and row["checked"]["I1"] > 20
    assert "each microbatch once in every step that was taken" in out.getvalue()


def test_a_violation_is_told_with_the_command_that_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "conduct", hasty_conduct)
    out = io.StringIO()
    assert main(["--schedules", "5"], out) == 1
    assert "I2: stage" in out.getvalue() and "again: python -m swarm.sim --seed" in out.getvalue()


def test_ctrl_c_tells_what_was_done_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(seed: int) -> Outcome:
        if seed == 3:
            raise KeyboardInterrupt
        return run_schedule(seed)

    monkeypatch.setattr(program, "run_schedule", interrupted)
    out = io.StringIO()
    assert main(["--schedules", "9"], out) == 130
    assert capsys.readouterr().err == "stopped after 3 of 9 schedules\n"
    assert out.getvalue().startswith("3 schedules, ")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--trace"], "--trace needs --seed"),
        (["--schedules", "0"], "--schedules 0: at least 1"),
    ],
)
def test_wrong_usage_is_explained(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and error in capsys.readouterr().err


# --- every rule is needed -----------------------------------------------------------------------------------


def always_new(self: Ledger, m: int) -> Claim:
    self.doing |= 1 << m
    return Claim.NEW


def unchecked(self: Ledger, m: int) -> None:
    self.done |= 1 << m


def hasty_conduct(
    t: int, stages: int, summaries: Mapping[int, StageStep], last_go: Mapping[int, Go]
) -> Go | None:
    """Goes as soon as one stage is prepared."""
    if t not in last_go and any(s.ready for s in summaries.values()):
        return Go(t, sum(s.sqnorm for s in summaries.values()))
    return last_go.get(t)


real_decide = rounds.decide


def blind_decide(
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
        current = replace(current, ledgers=tuple(kept[p] for p in current.members))
    decision = real_decide(run, stage, t, microbatches, numel, single, current)
    if not isinstance(decision, Reduce):
        return decision
    plan = decision.plan
    ledgers = tuple(done[p] for p in plan.members)
    name = rounds.round_id(run, stage, t, plan.number, plan.members, ledgers)
    return Reduce(replace(plan, round=name, ledgers=ledgers))


def no_check(plan: Plan, **_: object) -> None:
    return None


def count_without_claims(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "claim", always_new)
    patch.setattr(Ledger, "may_add", lambda self, m: self.frozen_for is None)
    patch.setattr(Ledger, "record", unchecked)


def add_to_a_frozen_sum(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "may_add", lambda self, m: not self.done >> m & 1)
    patch.setattr(Ledger, "record", unchecked)


def trust_every_plan(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rounds, "check_plan", no_check)


def overlook_duplicates(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rounds, "decide", blind_decide)
    patch.setattr(rounds, "check_plan", no_check)


def go_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rounds, "conduct", hasty_conduct)


def take_part_of_a_reduce(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(peer, "whole", lambda this: True)


def forget_what_is_shared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(peer, "complete", lambda own, part: own)


def never_thaw(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "thaw", lambda self: None)


def stay_when_a_stage_is_lost(patch: pytest.MonkeyPatch) -> None:
    async def nothing(self: object, run: object, waited_s: float) -> bool:
        return False

    patch.setattr(peer.StagePeer, "_bring_back", nothing)


def come_back_with_a_stale_state(patch: pytest.MonkeyPatch) -> None:
    """As if it were what the stage has now."""

    async def come_back(self: peer.StagePeer, kept: Snapshot) -> None:
        told = await self.ask_status(self.directory.serving(self.stage))
        newest = max([kept.standing, *(status.standing for status in told.values())])
        self.era, self.weights = newest.era, kept.weights._replace(version=newest.version)

    patch.setattr(peer.StagePeer, "_come_back", come_back)


def come_back_with_the_sum_that_was_handed_over(patch: pytest.MonkeyPatch) -> None:
    sums: dict[tuple[object, str], dict[int, int]] = {}
    pause, come_back = peer.StagePeer.pause, peer.StagePeer._come_back

    def keeping(self: peer.StagePeer, then: Callable[[Snapshot | None], None]) -> None:
        sums[self.network, self.name] = dict(self.sums)
        pause(self, then)

    async def adding(self: peer.StagePeer, kept: Snapshot) -> None:
        await come_back(self, kept)
        for t in self.sums:
            self.sums[t] += sums[self.network, self.name].get(t, 0)

    patch.setattr(peer.StagePeer, "pause", keeping)
    patch.setattr(peer.StagePeer, "_come_back", adding)


@pytest.mark.parametrize(
    ("mutation", "invariant", "first", "seeds"),
    [
        (count_without_claims, "I1", 0, 200),
        (add_to_a_frozen_sum, "I", 2390, 1000),
        (trust_every_plan, "I", 400, 1500),
        (overlook_duplicates, "I1", 0, 200),
        (go_early, "I2", 0, 20),
        (take_part_of_a_reduce, "I", 0, 50),
        (forget_what_is_shared, "I1", 0, 20),
        (never_thaw, "liveness", 0, 300),
        (stay_when_a_stage_is_lost, "liveness", 0, 600),
        (come_back_with_a_stale_state, "I", 0, 300),
        (come_back_with_the_sum_that_was_handed_over, "I1", 0, 100),
    ],
)
@pytest.mark.timeout(300)
def test_a_rule_that_is_broken_is_noticed(
    mutation: Callable[[pytest.MonkeyPatch], None],
    invariant: str,
    first: int,
    seeds: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rare ones start shortly before a seed that is known to notice: from 0 on it takes some hundred."""
    mutation(monkeypatch)
    for outcome in with_progress(range(first, first + seeds), io.StringIO()):
        if outcome.violation.startswith(invariant):
            return
    pytest.fail(f"{seeds} schedules did not notice it")
