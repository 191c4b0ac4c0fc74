"""What the planner says of a live run: where a newcomer goes, and how long a step would take otherwise.

From the public records alone, so that all who read the same records are told the same: how fast a peer's
device is, how fast it uploads, its place (`places.py`), from which the ways between any two follow, and
what its lines carry: near ones as much as the widest, far ones no more than can be under way at once, over
the round trip. What no record says counts as the usual: a speed as the median, a way as a short one, a line
as no limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import numpy as np

from swarm.ids import PeerId, Stage
from swarm.plan.network import BACKWARD_FORWARDS, Device, Job, Network
from swarm.plan.overlap import Overlap
from swarm.plan.places import Place, apart_s, read_place
from swarm.records import PeerRecord

NEAR_S = 0.02
"""Round trip to the first of a region within which others belong to it."""
USUAL_LATENCY_S = 0.005
LEAST_FLOPS_PER_S = 1.0
MOST_TIMES_MEDIAN = 32.0
"""Nobody is believed to be faster than so many times the median, as when peers move by their speeds."""
ALIKE = 1.1
"""Speeds of stages that differ by less are the same: measurements are no better."""
MOST_PLANNED = 1000
"""Peers; of more the speeds alone decide. A picture of n peers, all far apart, takes n² numbers."""
LEAST_BPS, MOST_BPS = 1e4, 1e12


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A peer that has no stage yet. Its lines count as those of its region, its device as a usual one."""

    peer: PeerId
    place: Place | None = None


class Advice:
    """A picture of the run, and what the overlapped objective says of changes to it."""

    def __init__(self, records: Iterable[PeerRecord], job: Job, newcomers: Sequence[Newcomer] = ()) -> None:
        """`records`: of those that serve a stage or are on their way to one; the newest of each peer."""
        there = {
            record.peer: record
            for record in records
            if record.state in ("joining", "serving") and 0 <= record.stage < job.stages
        }
        self._job = job
        self._records = [there[peer] for peer in sorted(there)]
        self._coming = coming = [one for one in newcomers if one.peer not in there]
        self._at = {peer: i for i, peer in enumerate([*sorted(there), *(one.peer for one in coming)])}
        self._flops_per_s = _flops_per_s(self._records, len(coming), job)
        self._stage_of = np.array([r.stage for r in self._records] + [-1] * len(coming), dtype=np.int64)

    @cached_property
    def _overlap(self) -> Overlap | None:
        """Made when it is first asked for: of R regions it takes R² numbers, and mostly nobody moves."""
        if not self._job.stages <= len(self._at) <= MOST_PLANNED:
            return None
        places = [read_place(record.place) for record in self._records] + [one.place for one in self._coming]
        return Overlap(_network(self._records, places, list(self._at), self._flops_per_s), self._job)

    def step_s(self, changes: Mapping[PeerId, Stage]) -> float:
        """Predicted seconds of a step if these peers served those stages; infinite with an empty stage, and
        in runs of more peers than can be planned for.

        A little of what does not limit the step is in it (`Overlap.soft_s`), or many changes would seem
        alike.
        """
        of_N = self._stage_of.copy()
        for peer, stage in changes.items():
            of_N[self._at[peer]] = stage
        if len(np.unique(of_N[of_N >= 0])) < self._job.stages or self._overlap is None:
            return math.inf
        return self._overlap.soft_s(of_N)

    def speeds(self, changes: Mapping[PeerId, Stage]) -> list[float]:
        """Microbatches per second of each stage's devices together, their lines left aside; 0: nobody is
        there."""
        speeds = [0.0] * self._job.stages
        for peer, i in self._at.items():
            stage = changes.get(peer, int(self._stage_of[i]))
            if stage >= 0:
                speeds[stage] += self._flops_per_s[i] / _flops(self._job, stage)
        return speeds


def _flops_per_s(records: Sequence[PeerRecord], newcomers: int, job: Job) -> list[float]:
    """What devices do on a stage's arithmetic; who has not measured it, and newcomers, as much as usual."""
    told = [record.speed * _flops(job, record.stage) for record in records] + [0.0] * newcomers
    known = [speed for speed in told if 0 < speed < math.inf]
    usual = median(known) if known else _flops(job, 0)
    return [
        max(LEAST_FLOPS_PER_S, min(speed, MOST_TIMES_MEDIAN * usual)) if 0 < speed < math.inf else usual
        for speed in told
    ]


def _network(
    records: Sequence[PeerRecord],
    places: Sequence[Place | None],
    names: Sequence[PeerId],
    flops_per_s: Sequence[float],
) -> Network:
    region_of, homes = _regions(places)
    latency_RR = np.array(
        [[USUAL_LATENCY_S if a is None or b is None else apart_s(a, b) / 2 for b in homes] for a in homes]
    )
    uploads = [record.bandwidth_bps for record in records]
    uploads += [0.0] * (len(names) - len(records))
    devices = tuple(
        Device(
            name=name,
            region=region,
            flops_per_s=flops,
            upload_bps=min(max(upload, LEAST_BPS), MOST_BPS) if upload > 0 else math.inf,
        )
        for name, region, flops, upload in zip(names, region_of, flops_per_s, uploads, strict=True)
    )
    labels = tuple(str(number) for number in range(len(homes)))
    return Network(devices, labels, latency_RR, _bandwidth_bps(records, region_of, latency_RR))


def _bandwidth_bps(
    records: Sequence[PeerRecord], region_of: Sequence[int], latency_RR: np.ndarray
) -> np.ndarray:
    """[R, R] of lines between regions: by the medians of those who measured any there, else of all."""

    def of_regions(told: Sequence[float], least: float, most: float) -> np.ndarray:
        sane = [min(max(value, least), most) if 0 < value < math.inf else 0.0 for value in told]
        everywhere = median([value for value in sane if value] or [math.inf])
        by_region: list[list[float]] = [[] for _ in latency_RR]
        for region, value in zip(region_of, sane, strict=False):
            if value:
                by_region[region].append(value)
        return np.array([median(values) if values else everywhere for values in by_region])

    widest_R = of_regions([record.widest_bps for record in records], LEAST_BPS, MOST_BPS)
    flight_R = of_regions([record.in_flight_bytes for record in records], 1e3, 1e12)
    carried_RR = 8 * np.sqrt(flight_R[:, None] * flight_R) / np.maximum(2 * latency_RR, 1e-4)
    return np.minimum(np.minimum(widest_R[:, None], widest_R), carried_RR)


def _flops(job: Job, stage: Stage) -> float:
    return max(1.0, (1 + BACKWARD_FORWARDS) * job.forward_flops[stage])


def _regions(places: Sequence[Place | None]) -> tuple[list[int], list[Place | None]]:
    """The region of each, and where regions are: that of the first who was near nobody before."""
    region_of: list[int] = []
    homes: list[Place | None] = []
    for place in places:
        for region, home in enumerate(homes):
            if place is None or home is None:
                if place is home:
                    region_of.append(region)
                    break
            elif apart_s(place, home) <= NEAR_S:
                region_of.append(region)
                break
        else:
            region_of.append(len(homes))
            homes.append(place)
    return region_of, homes


def choose_stages(
    records: Iterable[PeerRecord], job: Job, newcomers: Sequence[Newcomer]
) -> dict[PeerId, Stage]:
    """A stage for each newcomer, as if they came one after the other in the order of their ids.

    So those who come in one instant spread over the stages, and each can tell for itself where all go. Each
    goes to a stage that has the least speed for its work (or nobody), and of those about as slow to the one
    with which the planner predicts the shortest step. The prediction alone would leave stages unlevel, since
    it knows no queues: in the event simulation that was worse than chance (docs/decisions.md).
    """
    advice = Advice(records, job, newcomers)
    chosen: dict[PeerId, Stage] = {}
    for one in sorted(newcomers, key=lambda one: one.peer):
        speeds = advice.speeds(chosen)
        needy = [stage for stage, speed in enumerate(speeds) if speed <= ALIKE * min(speeds)]
        steps = {stage: advice.step_s({**chosen, one.peer: stage}) for stage in needy}
        chosen[one.peer] = min(needy, key=lambda stage: (steps[stage], speeds[stage], stage))
    return chosen
