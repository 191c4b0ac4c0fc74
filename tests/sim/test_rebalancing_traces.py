"""Throughput under rules of rebalancing: what the table of `scripts/bench/recovery/rebalance.py` rests on."""

from __future__ import annotations

from pathlib import Path

import pytest

from peers.sim.throughput.members import Trace, read_trace
from scripts.bench.recovery.rebalance import HALF, SLOW, SMALL, made
from scripts.bench.recovery.stage_speeds import Outcome, Rule, ours, papers, run_trace
from tests.seeds import some

TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"
SHORT = Trace((0.0, 600.0, 1500.0, 2400.0, 3300.0), (16, 9, 14, 3, 12), 4200.0)
"""Half vanishes, some come, nearly all vanish, many come."""


def outcome(trace: Trace, rule: Rule | None, seed: int = 0, **fields: float) -> Outcome:
    return run_trace(trace, rule, **{"stages": 4, "period_s": 60.0, "seed": seed, **fields})


def test_nobody_dies_nobody_moves_and_all_that_is_possible_is_done() -> None:
    steady = Trace((0.0,), (16,), 7200.0)
    for rule in (None, ours, papers(eager=False)):
        found = outcome(steady, rule)
        assert found.overall.share == 1.0 and found.moves == 0 and found.served_s == 7200.0


def test_no_rule_beats_the_best_assignment_and_one_seed_gives_one_outcome() -> None:
    for seed in range(20):
        for rule in (None, ours, papers(eager=True)):
            found = outcome(SHORT, rule, seed)
            assert found == outcome(SHORT, rule, seed)
            for span in (found.overall, found.first_hour, found.last_hour):
                assert 0 <= span.done <= span.best


def test_while_there_are_fewer_peers_than_stages_nothing_is_counted() -> None:
    assert outcome(SHORT, ours).served_s == 4200.0 - 900.0
    assert outcome(Trace((0.0,), (3,), 900.0), ours).overall.share == 1.0


def test_by_hand_what_a_lost_stage_costs() -> None:
    """Two stages of two; in one of the seeds both of one stage die, and the other one stands still."""
    trace = Trace((0.0, 100.0), (4, 2), 200.0)
    found = {outcome(trace, None, seed, stages=2).overall.done for seed in range(20)}
    assert found == {100.0 * 2 + 100.0 * 1, 100.0 * 2}


def test_a_mover_serves_nobody_while_it_downloads() -> None:
    trace = Trace((0.0, 300.0), (4, 2), 900.0)
    seed = next(s for s in range(20) if outcome(trace, None, s, stages=2).standstill_s == 600.0)
    quick, slow = (outcome(trace, ours, seed, stages=2, load_s=load_s) for load_s in (0.0, 45.0))
    assert (quick.moves, quick.rescues) == (slow.moves, slow.rescues) == (1, 1)
    # For the period, and then for the download.
    assert slow.standstill_s == pytest.approx(quick.standstill_s + 45.0)
    assert 0.0 <= quick.standstill_s <= 60.0


def test_joiners_that_do_not_see_each_other_are_spread_by_chance_and_then_levelled() -> None:
    trace = Trace((0.0,), (16,), 7200.0)
    left = [run_trace(trace, None, stages=4, period_s=60.0, seed=s, blind=True) for s in range(10)]
    mended = [run_trace(trace, ours, stages=4, period_s=60.0, seed=s, blind=True) for s in range(10)]
    assert sum(one.overall.share for one in left) < 6.5
    assert all(one.overall.share > 0.97 and one.last_hour.share == 1.0 for one in mended)


def test_the_papers_rule_as_it_is_written_never_comes_to_rest() -> None:
    """17 peers on 4 stages: one stage has one more, whoever it is."""
    odd = Trace((0.0,), (17,), 3600.0)
    assert outcome(odd, papers(eager=True)).moves == 60
    assert outcome(odd, papers(eager=False)).moves == outcome(odd, ours).moves == 0


def test_our_rule_levels_faster_and_downloads_no_more() -> None:
    seeds = range(40)
    ours_, theirs = ([outcome(SHORT, rule, s) for s in seeds] for rule in (ours, papers(eager=False)))
    assert sum(o.overall.done for o in ours_) >= sum(o.overall.done for o in theirs)
    assert sum(o.moves for o in ours_) <= sum(o.moves for o in theirs)


@pytest.mark.parametrize("blind", [False, True], ids=["in turn", "blind"])
def test_on_every_spot_trace_a_period_of_60_s_reaches_what_the_paper_has(blind: bool) -> None:
    """97.6 % (SWARM, section 4.4), with no more state downloaded than by the paper's rule."""
    files = [*TRACES.glob("*.json"), *TRACES.glob("*.csv")]
    if not files:
        pytest.skip("no spot traces in ../shared/data/traces")
    for path in files:
        trace = read_trace(path.read_text(), path.name)
        mine, theirs = [], []
        for seed in range(1 if path.suffix == ".json" else 30):
            kept = {"stages": 4, "period_s": 60.0, "seed": seed, "blind": blind}
            mine.append(run_trace(trace, ours, **kept))
            theirs.append(run_trace(trace, papers(eager=False), **kept))
        assert min(one.overall.share for one in mine) >= 0.976, path.name
        assert sum(one.moves for one in mine) <= sum(one.moves for one in theirs), path.name


@pytest.mark.parametrize(
    ("kind", "fields"),
    some(
        [(SMALL, {"blind": True}), (SLOW, {"load_s": 120.0}), (HALF, {})], quick=[(SLOW, {"load_s": 120.0})]
    ),
    ids=str,
)
def test_on_hard_traces_of_any_seed_98_percent_are_reached_with_fewer_downloads(
    kind: str, fields: dict[str, float]
) -> None:
    mine, theirs = (
        [outcome(made(kind, seed), rule, seed, **fields) for seed in range(10)]
        for rule in (ours, papers(eager=False))
    )
    assert min(one.overall.share for one in mine) >= 0.98
    assert sum(one.moves for one in mine) < sum(one.moves for one in theirs)


def test_a_newcomer_counts_from_when_it_has_its_first_state() -> None:
    """Four come at once and download for 45 s: nobody could have served before."""
    found = outcome(Trace((0.0,), (4,), 900.0), None, load_s=45.0)
    assert found.overall.share == 1.0 and found.served_s == 900.0 - 45.0 and found.standstill_s == 0.0
