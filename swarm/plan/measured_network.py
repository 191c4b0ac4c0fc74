"""A network to plan for from peers' measurements: pairs that were not measured are estimated.

Each peer knows the lines to a few others. Peers that are near to one another lie in the same place on the
internet, so the rest is taken two-level: what lies between two peers is what lies between their regions.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from swarm.errors import SetupError, count
from swarm.plan.network import Device, Network

NEAR_S = 0.01
"""Round trip inside a region: light goes a thousand kilometres and back in a fiber meanwhile."""
DEFAULT_BPS = 100e6
"""Assumed where no peer has measured any bandwidth."""
MAX_RTT_S = 60.0
MAX_BPS = 1e12
LEAST = 1e-9
"""Numbers beyond these were not measured but made up, and a search cannot reckon with all of them."""


class Machine(NamedTuple):
    """A peer as it describes itself."""

    name: str
    flops_per_s: float = 0.0
    """0 = not measured yet."""
    upload_bps: float = 0.0
    """To all others together; 0 = not measured."""


class Pair(NamedTuple):
    """One peer's measurements of its line to another."""

    at: str
    to: str
    rtt_s: float = 0.0
    """0 = not measured."""
    bandwidth_bps: float = 0.0
    """Bits per second that came to `at`; 0 = not measured."""


class Estimate(NamedTuple):
    """A network, and how much of it is measured."""

    network: Network
    measured: int
    """Pairs whose round trip was measured."""
    pairs: int
    """All that there are."""

    @property
    def words(self) -> str:
        return f"{self.measured} of {count(self.pairs, 'pair')} of peers measured, the others estimated"


def estimate(machines: Sequence[Machine], pairs: Iterable[Pair]) -> Estimate:
    """A network of these machines, in their order.

    A machine that did not measure its speed is taken for the median of the others. Of two that say different
    things of the line between them, the smaller round trip and the larger bandwidth are taken: a busy line
    looks slower than it is, never faster. Numbers that cannot be are taken as not measured.

    Raises:
        SetupError: no machine has measured its speed.
    """
    names = [machine.name for machine in machines]
    speeds = [m.flops_per_s for m in machines if _real(m.flops_per_s, math.inf)]
    if not speeds:
        raise SetupError(f"none of {len(machines)} peers has measured its speed yet: ask again in a minute")
    index = {name: i for i, name in enumerate(names)}
    rtt_s, bandwidth_bps = _merged(index, pairs)
    region_of = _regions(len(names), rtt_s)
    latency_s = {pair: rtt / 2 for pair, rtt in rtt_s.items()}
    latency_RR = _lines(latency_s, region_of, join=np.add, free=0.0, default=NEAR_S / 2)
    slowness = {pair: -bps for pair, bps in bandwidth_bps.items()}
    bandwidth_RR = -_lines(slowness, region_of, join=np.maximum, free=-math.inf, default=-DEFAULT_BPS)
    usual = median(speeds)
    devices = tuple(
        Device(
            name=m.name,
            region=region_of[i],
            flops_per_s=m.flops_per_s if _real(m.flops_per_s, math.inf) else usual,
            upload_bps=m.upload_bps if _real(m.upload_bps, MAX_BPS) else math.inf,
        )
        for i, m in enumerate(machines)
    )
    # For people: the real names are not known.
    labels = tuple(f"near {names[region_of.index(region)]}" for region in range(max(region_of) + 1))
    network = Network(devices, labels, latency_RR, bandwidth_RR)
    return Estimate(network, len(rtt_s), len(names) * (len(names) - 1) // 2)


def _real(value: float, most: float) -> bool:
    return math.isfinite(value) and LEAST <= value <= most


def _merged(
    index: Mapping[str, int], pairs: Iterable[Pair]
) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    """Round trips and bandwidths by pair, the smaller index first."""
    rtt_s: dict[tuple[int, int], float] = {}
    bandwidth_bps: dict[tuple[int, int], float] = {}
    for pair in pairs:
        a, b = index.get(pair.at), index.get(pair.to)
        if a is None or b is None or a == b:
            continue
        key = (min(a, b), max(a, b))
        if _real(pair.rtt_s, MAX_RTT_S):
            rtt_s[key] = min(pair.rtt_s, rtt_s.get(key, math.inf))
        if _real(pair.bandwidth_bps, MAX_BPS):
            bandwidth_bps[key] = max(pair.bandwidth_bps, bandwidth_bps.get(key, 0.0))
    return rtt_s, bandwidth_bps


def _regions(count: int, rtt_s: Mapping[tuple[int, int], float]) -> list[int]:
    """The region of each machine.

    Nearest pairs are joined first, and two groups only if what is known between them is near in the median:
    one peer between two cities does not make them one. A peer that measured none near it is a region alone.
    """
    group = list(range(count))
    members: dict[int, list[int]] = {i: [i] for i in range(count)}
    known: dict[int, dict[int, float]] = defaultdict(dict)
    for (a, b), rtt in rtt_s.items():
        known[a][b] = known[b][a] = rtt
    for (a, b), rtt in sorted(rtt_s.items(), key=lambda item: (item[1], item[0])):
        if rtt > NEAR_S or group[a] == group[b]:
            continue
        ours, theirs = sorted((group[a], group[b]))
        between = [known[i][j] for i in members[ours] for j in members[theirs] if j in known[i]]
        if median(between) <= NEAR_S:
            for i in members.pop(theirs):
                group[i] = ours
                members[ours].append(i)
    order = {number: region for region, number in enumerate(dict.fromkeys(group))}
    return [order[number] for number in group]


def _lines(
    measured: Mapping[tuple[int, int], float], region_of: Sequence[int], *,
    join: Callable[[np.ndarray, np.ndarray], np.ndarray], free: float, default: float,
) -> np.ndarray:  # fmt: skip
    """[R, R] what lies between regions: measured (the median), else the best path around, else the usual.

    Args:
        measured: by pair of machines; less is better.
        join: what two lines are, one after the other.
        free: what there is between a machine and itself.
        default: where nothing is measured.
    """
    of_regions: dict[tuple[int, int], list[float]] = defaultdict(list)
    for (i, j), value in measured.items():
        a, b = region_of[i], region_of[j]
        of_regions[min(a, b), max(a, b)].append(value)
    known = {pair: median(each) for pair, each in of_regions.items()}
    apart = [value for (a, b), value in known.items() if a != b]
    usual = median(apart) if apart else default
    regions = max(region_of) + 1
    own_RR = np.full((regions, regions), math.inf)
    for (a, b), value in known.items():
        own_RR[a, b] = own_RR[b, a] = value
    line_RR = own_RR.copy()
    np.fill_diagonal(line_RR, free)
    for via in range(regions):
        line_RR = np.minimum(line_RR, join(line_RR[:, via, None], line_RR[None, via, :]))
    # A measured line is not replaced by a path around.
    line_RR = np.where(np.isinf(own_RR), np.where(np.isposinf(line_RR), usual, line_RR), own_RR)
    for region in range(regions):  # neighbours have at least what each has to places far away
        if (region, region) not in known:
            line_RR[region, region] = min([default, usual, *np.delete(line_RR[region], region)])
    return line_RR
