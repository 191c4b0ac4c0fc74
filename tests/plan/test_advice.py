from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest

from swarm.plan.advice import Advice, Newcomer, choose_stages
from swarm.plan.network import Job
from swarm.plan.places import Place
from swarm.policy.rebalance import Stay, rebalance
from swarm.records import PeerRecord

FRANKFURT, SYDNEY = Place(0.0, 0.0, 0.001, 0.05), Place(0.28, 0.0, 0.001, 0.05)


def job(stages: int, *, boundary_bytes: float = 1e6) -> Job:
    each = (1e6,) * stages
    return Job(
        stages=stages, microbatches=16, forward_flops=(1e9,) * stages,
        forward_bytes=(boundary_bytes,) * (stages - 1), backward_bytes=(boundary_bytes,) * (stages - 1),
        gradient_bytes=each, state_bytes=each, activation_bytes=each,
    )  # fmt: skip


def record(
    peer: str, stage: int, place: Place | None = None, speed: float = 1.0, **more: float
) -> PeerRecord:
    numbers = () if place is None else place.numbers()
    return PeerRecord(
        peer=peer, run="r", stage=stage, state="serving", version=0, speed=speed, place=numbers, **more
    )


def test_those_who_come_in_one_instant_spread_and_all_tell_the_same() -> None:
    coming = [Newcomer(f"n{i}") for i in range(9)]
    chosen = choose_stages([], job(3), coming)
    assert Counter(chosen.values()) == {0: 3, 1: 3, 2: 3}
    assert choose_stages([], job(3), coming[::-1]) == chosen


def test_an_empty_stage_comes_first_then_the_one_with_the_least_speed() -> None:
    there = [record("a", 0), record("b", 2), record("c", 2, speed=5.0)]
    chosen = choose_stages(there, job(3), [Newcomer("x"), Newcomer("y"), Newcomer("z")])
    assert chosen["x"] == 1 and {chosen["y"], chosen["z"]} == {0, 1}


def test_of_stages_that_are_alike_the_planner_chooses() -> None:
    there = [
        record("a", 0, FRANKFURT),
        record("b", 1, SYDNEY),
        record("c", 2, SYDNEY),
        record("d", 2, SYDNEY),
    ]
    here = Newcomer("n", SYDNEY)
    advice = Advice(there, job(3), [here])
    steps = {stage: advice.step_s({"n": stage}) for stage in (0, 1)}  # stage 2 has two already
    assert choose_stages(there, job(3), [here]) == {"n": min(steps, key=steps.__getitem__)}
    assert steps[0] != steps[1]


def test_a_far_line_carries_what_is_under_way_over_its_round_trip() -> None:
    def step_s(place: Place) -> float:
        there = [
            record("a", 0, FRANKFURT, 1e3, widest_bps=1e9, in_flight_bytes=1e6),
            record("b", 1, place, 1e3, widest_bps=1e9, in_flight_bytes=1e6),
        ]
        return Advice(there, job(2, boundary_bytes=3e6)).step_s({})

    # 1 MB each 282 ms are 28 Mbit/s: 16 microbatches of 24 Mbit take 13 s, and 0.4 s at 1 Gbit/s.
    assert step_s(SYDNEY) > 13.0
    assert step_s(replace(FRANKFURT, x_s=0.001)) < 2.0


def test_without_anybody_in_a_stage_no_step_ends() -> None:
    advice = Advice([record("a", 0), record("b", 1)], job(2))
    assert advice.step_s({}) < math.inf
    assert advice.step_s({"b": 0}) == math.inf
    assert Advice([], job(2)).step_s({}) == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 1e300])
def test_numbers_that_cannot_be_count_as_not_measured(bad: float) -> None:
    told = record("liar", 1, speed=bad, bandwidth_bps=bad, widest_bps=bad, in_flight_bytes=bad)
    advice = Advice([record("a", 0), record("b", 1), told], job(2))
    assert 0 < advice.step_s({}) < math.inf
    assert advice.speeds({})[1] <= 1.0 + 32.0


def test_while_nobody_moves_nothing_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.plan.advice.Overlap", None)  # to make one would fail
    level = [record(peer, stage) for stage in (0, 1) for peer in (f"a{stage}", f"b{stage}")]
    advice = Advice(level, job(2))
    told = rebalance(level, stages=2, period_s=60.0, now_s=6e5, step_s=advice.step_s)
    assert isinstance(told, Stay)
    with pytest.raises(TypeError):
        advice.step_s({})


def test_of_more_peers_than_can_be_planned_for_the_speeds_alone_decide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swarm.plan.advice.MOST_PLANNED", 3)
    there = [record("a", 0), record("b", 1), record("c", 1), record("d", 0, speed=5.0)]
    assert Advice(there, job(2)).step_s({}) == math.inf
    assert choose_stages(there, job(2), [Newcomer("n")]) == {"n": 1}
