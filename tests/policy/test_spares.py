"""Which peers stand by because a step takes longer with them: by the prediction that the planner makes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from swarm.plan.network import Device, Network, StepWork
from swarm.plan.overlapped import IDLE, Overlap
from swarm.policy.spares import GAIN, Exchange, judge
from swarm.records import PeerRecord

EXCHANGE = Exchange(stages=1, microbatches=64, gradient_share=0.5)
STATE_BYTES = 2 * 10**9
"""Of which a gigabyte is exchanged."""
MBIT = 1e6


def peer(name: str, **fields: Any) -> PeerRecord:
    given = {"state": "serving", "version": 5, "speed": 10.0, "state_bytes": STATE_BYTES, **fields}
    return PeerRecord(peer=name, run="run", **{"stage": 0, "bandwidth_bps": 10_000 * MBIT, **given})


def spare(name: str, **fields: Any) -> PeerRecord:
    return peer(name, state="paused", spare=True, **fields)


FAST = [peer(f"fast{i}") for i in range(4)]


@pytest.mark.parametrize("mbit", [10, 20, 40, 100])
def test_a_home_line_among_data_centres_makes_a_step_longer_and_stands_by(mbit: int) -> None:
    """64 microbatches at 40 a second, and 2 × 3/4 GB at 10 Gbit/s: 2.8 s."""
    home = peer("home", speed=5.0, bandwidth_bps=mbit * MBIT)
    found = judge(home, [*FAST, home], EXCHANGE)
    assert found is not None and found.spare
    assert found.without_s == pytest.approx(64 / 40 + 1.2)
    assert found.with_s == pytest.approx(64 / 45 + 2 * 0.8 * 8e3 / mbit)
    assert all(judge(fast, [*FAST, home], EXCHANGE) is None for fast in FAST)


def test_it_is_told_from_which_upload_on_it_would_take_part() -> None:
    home = peer("home", speed=5.0, bandwidth_bps=40 * MBIT)
    found = judge(home, [*FAST, home], EXCHANGE)
    assert found is not None and 5000 * MBIT < found.upload_bps < 10_000 * MBIT
    for share, stays in ((1.01, True), (0.5, False)):
        same = spare("home", speed=5.0, bandwidth_bps=share * found.upload_bps)
        comes = judge(same, [*FAST, same], EXCHANGE)
        assert (comes is not None and not comes.spare) == stays


def test_who_computes_more_than_its_line_costs_takes_part() -> None:
    home = peer("home", speed=400.0, bandwidth_bps=20_000 * MBIT)
    assert judge(home, [peer("slow", speed=1.0), home], EXCHANGE) is None


def test_nobody_is_sent_off_for_less_than_a_quarter() -> None:
    home = peer("home", speed=5.0, bandwidth_bps=8000 * MBIT)
    records = [*FAST, home]
    assert judge(home, records, EXCHANGE) is None


def test_equal_peers_do_not_stand_by_for_a_little_and_hardly_ever_leave_one_alone() -> None:
    """Of four that exchange for 1.2 s, one alone would be 1.75 times as fast."""
    assert all(
        judge(fast, FAST, Exchange(stages=1, microbatches=8, gradient_share=0.5)) is None for fast in FAST
    )
    few = [judge(fast, FAST, Exchange(stages=1, microbatches=1, gradient_share=0.5)) for fast in FAST]
    assert sum(found is None for found in few) == 1


def test_two_that_are_equally_slow_stand_by_together() -> None:
    homes = [peer(f"home{i}", bandwidth_bps=40 * MBIT) for i in range(2)]
    assert all(
        found is not None and found.spare for found in (judge(h, [*FAST, *homes], EXCHANGE) for h in homes)
    )
    two = Exchange(stages=2, microbatches=64, gradient_share=0.5)
    apart = [peer("a", stage=1), *FAST, homes[0], peer("home1", stage=1, bandwidth_bps=40 * MBIT)]
    assert all(
        found is not None and found.spare for found in (judge(h, apart, two) for h in (apart[-1], apart[-2]))
    )


def test_of_a_stage_that_has_only_slow_lines_one_stays() -> None:
    homes = [peer(f"home{i}", bandwidth_bps=mbit * MBIT) for i, mbit in enumerate((50, 40, 40, 30))]
    staying = [home.peer for home in homes if judge(home, homes, EXCHANGE) is None]
    assert staying == ["home0"]


def test_with_delayed_updates_an_exchange_costs_what_the_computation_does_not_hide() -> None:
    delayed = Exchange(stages=1, microbatches=64, gradient_share=0.5, delayed_updates=True)
    slow = [peer(f"p{i}", speed=0.1, bandwidth_bps=100 * MBIT) for i in range(4)]
    assert judge(slow[0], slow, delayed) is None, "160 s to compute, 120 s to exchange"
    assert all(record is None for record in (judge(r, slow, EXCHANGE) for r in slow[:1]))


def test_a_spare_comes_in_where_nobody_serves_any_more() -> None:
    home, other = (spare(name, bandwidth_bps=40 * MBIT) for name in ("home", "other"))
    found = judge(home, [home, other], EXCHANGE)
    assert found is not None and not found.spare
    assert judge(home, [home, other, FAST[0]], EXCHANGE) is None


def test_a_spare_comes_in_when_the_fast_ones_have_become_too_few() -> None:
    home = spare("home", speed=20.0, bandwidth_bps=1000 * MBIT)
    assert judge(home, [*FAST, home], EXCHANGE) is None
    left = [peer("fast0", speed=1.0)]
    found = judge(home, [*left, home], EXCHANGE)
    assert found is not None and not found.spare


@pytest.mark.parametrize("upload", [0.0, -1.0, math.inf, math.nan])
def test_who_has_not_measured_its_upload_is_not_judged(upload: float) -> None:
    home = peer("home", bandwidth_bps=upload)
    assert judge(home, [*FAST, home], EXCHANGE) is None


@given(
    st.lists(st.tuples(st.floats(), st.floats(), st.integers(0, 2**63)), min_size=1, max_size=8),
    st.booleans(),
)
@example([(1.7e308, 1e10, STATE_BYTES)] * 5, False)
def test_whatever_strangers_say_a_peer_is_judged(
    said: list[tuple[float, float, int]], delayed_updates: bool
) -> None:
    """It ends by an error in that: five that said they were as fast as can be ended all peers of a run."""
    home = peer("home", bandwidth_bps=MBIT)
    crowd = [
        peer(f"x{i}", speed=speed, bandwidth_bps=bps, state_bytes=size)
        for i, (speed, bps, size) in enumerate(said)
    ]
    exchange = EXCHANGE._replace(delayed_updates=delayed_updates)
    found = judge(home, [FAST[0], home, *crowd], exchange)
    assert found is None or not math.isnan(found.with_s + found.without_s + found.upload_bps)


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.floats(0.1, 100.0), st.floats(1.0, 1e5), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    st.booleans(),
)
def test_of_each_stage_somebody_stays_and_what_was_decided_is_not_undone(
    drawn: list[tuple[int, float, float, bool]], delayed: bool
) -> None:
    run = Exchange(stages=2, microbatches=64, gradient_share=0.5, delayed_updates=delayed)
    there = [peer("a", stage=0), peer("b", stage=1)]
    for number, (stage, speed, mbit, stands_by) in enumerate(drawn):
        make = spare if stands_by else peer
        there.append(make(f"p{number}", stage=stage, speed=speed, bandwidth_bps=mbit * MBIT))
    after = list[PeerRecord]()
    for record in there:
        found = judge(record, there, run)
        told = record.spare if found is None else found.spare
        fields = {"stage": record.stage, "speed": record.speed, "bandwidth_bps": record.bandwidth_bps}
        after.append((spare if told else peer)(record.peer, **fields))
        if found is not None and found.spare:
            assert found.with_s > found.without_s
    assert {record.stage for record in after if not record.spare} == {0, 1}
    for before, record in zip(there, after, strict=True):
        if before.spare != record.spare:
            again = judge(record, after, run)
            assert again is None or again.spare == record.spare, "back and forth"


@pytest.mark.parametrize("mbit", [40, 100, 1000])
def test_the_planner_predicts_the_same(mbit: int) -> None:
    """Lines without latency, boundaries without bytes: what is left is devices and uploads."""
    uploads = [10_000 * MBIT] * 4 + [mbit * MBIT]
    devices = tuple(Device(f"d{i}", 0, 30.0, upload_bps=bps) for i, bps in enumerate(uploads))
    net = Network(devices, ("here",), np.zeros((1, 1)), np.array([[math.inf]]))
    job = StepWork(
        stages=1, microbatches=6400, forward_flops=(1.0,), forward_bytes=(), backward_bytes=(),
        gradient_bytes=(1e9,), state_bytes=(0.0,), activation_bytes=(0.0,),
    )  # fmt: skip
    run = Exchange(stages=1, microbatches=6400, gradient_share=0.5)
    home = peer("home", bandwidth_bps=mbit * MBIT)
    found = judge(home, [*FAST, home], run)
    with_s, without_s = (Overlap(net, job).predict(layout).total_s for layout in ([0] * 5, [0] * 4 + [IDLE]))
    if with_s < GAIN * without_s:
        assert found is None
    else:
        assert found is not None
        assert (found.with_s, found.without_s) == pytest.approx((with_s, without_s), rel=0.02)
