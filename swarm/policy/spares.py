"""Which peers make the run slower, and stand by as spares. Pure: a prediction from public records.

Why, and by which rule: docs/design.md, *Spares*. The prediction is the planner's (`swarm.plan.overlapped`),
as far as records say what it needs: devices and uploads, no lines of pairs.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from statistics import median_low
from typing import NamedTuple

from swarm.ids import PeerId
from swarm.policy.rebalance import MAX_BPS, MAX_SPEED, MAX_TIMES_MEDIAN, MIN_BPS, MIN_SPEED, between
from swarm.records import PeerRecord

GAIN = 1.25
"""A step may be so many times as long as the shortest: each peer that stands by is one less that may die."""
SOLE_GAIN = 2.0
"""The same, again, where a stage would be left to a single peer."""


class Exchange(NamedTuple):
    """The part of a run's terms that decides how long its exchanges take."""

    stages: int
    microbatches: int
    gradient_share: float
    """Bytes that a replica exchanges, for each byte of its state: the sums, and the answers to them."""
    delayed_updates: bool = False
    """The exchange of a step overlaps with the computation of the next."""


class _Replica(NamedTuple):
    peer: PeerId
    speed: float
    upload_bps: float
    serving: bool


class _Stage:
    """The replicas of a stage, in the order in which it would keep them."""

    def __init__(self, replicas: Iterable[_Replica], gradient_bytes: float) -> None:
        self.gradient_bytes = gradient_bytes
        self.replicas = sorted(replicas, key=lambda r: (-r.upload_bps, -r.speed, r.peer))
        self.speeds = list(accumulate(replica.speed for replica in self.replicas))
        """Of so many, from one on."""
        self.exchange_s = [
            exchange_s(gradient_bytes, count, replica.upload_bps)
            for count, replica in enumerate(self.replicas, start=1)
        ]
        """With so many; never less with more."""


def exchange_s(gradient_bytes: float, count: int, upload_bps: float) -> float:
    """Seconds in which `count` replicas exchange a gradient, if the slowest has this upload."""
    return 2.0 * (count - 1) / count * 8.0 * gradient_bytes / upload_bps


class SpareDecision(NamedTuple):
    """Whether a peer is to be a spare, and why; what a step takes with it, and without."""

    spare: bool
    with_s: float
    without_s: float
    upload_bps: float = 0.0
    """The upload from which on it would not be one; 0: unknown."""
    stay: tuple[PeerId, ...] = ()
    """Those of its stage that take part."""


def judge(me: PeerRecord, records: Iterable[PeerRecord], exchange: Exchange) -> SpareDecision | None:
    """Whether `me` is to be a spare; None: nothing changes, or too little is known.

    Every peer that serves or is a spare asks this with the same records, and each goes by its own answer. All
    that slow a run down are weighed together: one of two equally slow ones alone would change nothing.
    """
    latest = {record.peer: record for record in records if record.state == "serving" or record.spare}
    latest[me.peer] = me
    pool = [r for r in latest.values() if 0 <= r.stage < exchange.stages]
    if not me.spare and not (0.0 < me.bandwidth_bps < math.inf):
        return None
    others = [r for r in pool if r.stage == me.stage and r.peer != me.peer and not r.spare]
    if not others:
        return SpareDecision(False, math.inf, math.inf) if me.spare else None
    if {record.stage for record in pool} != set(range(exchange.stages)):
        return None
    sizes = [r.state_bytes for r in pool if r.state_bytes > 0]
    speeds = [speed for r in pool if (speed := between(r.speed, MIN_SPEED, MAX_SPEED))]
    if not sizes or not speeds:
        return None
    stages = [_stage_of(pool, number, speeds, sizes, exchange) for number in range(exchange.stages)]
    now_s, (best_s, counts) = _now_s(stages, exchange), _chosen(stages, exchange)
    kept = [replica.peer for replica in stages[me.stage].replicas[: counts[me.stage]]]
    if me.peer in kept:
        return SpareDecision(False, best_s, now_s) if me.spare and best_s <= now_s else None
    if me.spare or now_s <= best_s:
        return None
    return SpareDecision(True, now_s, best_s, _enough_bps(stages, counts, me, best_s, exchange), tuple(kept))


def _stage_of(
    pool: Collection[PeerRecord], number: int, speeds: Sequence[float], sizes: Sequence[int], run: Exchange
) -> _Stage:
    typical = median_low(speeds)
    here = [record for record in pool if record.stage == number]
    size_bytes = median_low([r.state_bytes for r in here if r.state_bytes > 0] or sizes)
    replicas = [
        _Replica(
            record.peer,
            min(between(record.speed, MIN_SPEED, MAX_SPEED) or typical, MAX_TIMES_MEDIAN * typical),
            between(record.bandwidth_bps, MIN_BPS, MAX_BPS) or math.inf,
            not record.spare,
        )
        for record in here
    ]
    return _Stage(replicas, run.gradient_share * size_bytes)


def _now_s(stages: Sequence[_Stage], run: Exchange) -> float:
    """Of those that serve."""
    compute_s = reduce_s = 0.0
    for stage in stages:
        there = [replica for replica in stage.replicas if replica.serving]
        if not there:
            return math.inf
        compute_s = max(compute_s, run.microbatches / math.fsum(replica.speed for replica in there))
        reduce_s = max(reduce_s, exchange_s(stage.gradient_bytes, len(there), there[-1].upload_bps))
    return _whole_s(compute_s, reduce_s, run)


def _whole_s(compute_s: float, reduce_s: float, run: Exchange) -> float:
    return max(compute_s, reduce_s) if run.delayed_updates else compute_s + reduce_s


def _chosen(stages: Sequence[_Stage], run: Exchange) -> tuple[float, list[int]]:
    """How long a step should take, and how many replicas of each stage take part in it.

    No stage has to exchange sooner than the one that takes longest, so each keeps all that are done by then.
    Of all such divisions the one with the most replicas is taken that is nearly as good as the best.
    """
    found: list[tuple[float, float, list[int]]] = []
    for limit_s in sorted({each_s for stage in stages for each_s in stage.exchange_s}):
        counts = [bisect_right(stage.exchange_s, limit_s) for stage in stages]
        compute_s = max(
            run.microbatches / stage.speeds[n - 1] for stage, n in zip(stages, counts, strict=True)
        )
        total_s = _whole_s(compute_s, limit_s, run)
        sole = any(n == 1 < len(stage.replicas) for stage, n in zip(stages, counts, strict=True))
        found.append((total_s * (SOLE_GAIN if sole else 1.0), total_s, counts))
    best = min(weighed_s for weighed_s, _, _ in found)
    return next((total_s, n) for weighed_s, total_s, n in reversed(found) if weighed_s <= GAIN * best)


def _enough_bps(
    stages: Sequence[_Stage], counts: Sequence[int], me: PeerRecord, best_s: float, run: Exchange
) -> float:
    """The upload with which one more replica makes the best step no longer."""
    stage, count = stages[me.stage], counts[me.stage]
    mine = next(replica for replica in stage.replicas if replica.peer == me.peer)
    computes_s = [
        run.microbatches / (one.speeds[n - 1] + (mine.speed if one is stage else 0.0))
        for one, n in zip(stages, counts, strict=True)
    ]
    left_s = best_s if run.delayed_updates else best_s - max(computes_s)
    return exchange_s(stage.gradient_bytes, count + 1, 1.0) / left_s if left_s > 0.0 else 0.0
