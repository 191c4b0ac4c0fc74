"""A network to plan for from peers' measurements: pairs that were not measured are estimated.

Each peer knows the lines to a few others. Peers that are near to one another lie in the same place on the
internet, so the rest is taken two-level: what lies between two peers is what lies between their regions.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from swarm.errors import SetupError
from swarm.plan.network import Device, Network

NEAR_S = 0.01
"""Round trip inside a region: light goes a thousand kilometres and back in a fiber meanwhile."""
DEFAULT_BPS = 100e6
"""Assumed where no peer has measured any bandwidth."""
MAX_RTT_S = 60.0
MAX_BPS = 1e12
"""Numbers beyond these were not measured but made up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A peer as it describes itself."""

    name: str
    flops_per_s: float = 0.0
    """0 = not measured yet."""
    memory_bytes: float = math.inf
    upload_bps: float = 0.0
    """To all others together; 0 = not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One peer's measurements of its line to another."""

    at: str
    to: str
    rtt_s: float = 0.0
    """0 = not measured."""
    bandwidth_bps: float = 0.0
    """Bits per second that came to `at`; 0 = not measured."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A network, and how much of it is measured."""

    network: Network
    measured: int
    """Pairs whose round trip was measured."""
    pairs: int
    """All that there are."""


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
    regions = max(region_of) + 1
    latency_RR = _filled([(pair, rtt / 2) for pair, rtt in rtt_s.items()], region_of, regions)
    bandwidth_RR = _widest(list(bandwidth_bps.items()), region_of, regions)
    usual = median(speeds)
    devices = tuple(
        Device(
            name=m.name,
            region=region_of[i],
            flops_per_s=m.flops_per_s if _real(m.flops_per_s, math.inf) else usual,
            memory_bytes=m.memory_bytes,
            upload_bps=m.upload_bps if _real(m.upload_bps, MAX_BPS) else math.inf,
        )
        for i, m in enumerate(machines)
    )
    # For people: the real names are not known.
    labels = tuple(f"near {names[region_of.index(region)]}" for region in range(regions))
    network = Network(devices, labels, latency_RR, bandwidth_RR)
    return Estimate(network, len(rtt_s), len(names) * (len(names) - 1) // 2)


def _real(value: float, most: float) -> bool:
    return math.isfinite(value) and 0.0 < value <= most


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
    one peer between two cities does not make them one. Who has measured nobody near is a region alone.
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


def _by_region(
    values: Iterable[tuple[tuple[int, int], float]], region_of: Sequence[int]
) -> dict[tuple[int, int], float]:
    """The median of each two regions, the smaller number first."""
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for (a, b), value in values:
        found[min(region_of[a], region_of[b]), max(region_of[a], region_of[b])].append(value)
    return {key: median(each) for key, each in found.items()}


def _filled(
    values: Iterable[tuple[tuple[int, int], float]], region_of: Sequence[int], regions: int
) -> np.ndarray:
    """[R, R] latencies: measured, else the shortest path around, else the median of all."""
    known = _by_region(values, region_of)
    line_RR = np.full((regions, regions), math.inf)
    for (a, b), value in known.items():
        line_RR[a, b] = line_RR[b, a] = value
    np.fill_diagonal(line_RR, 0.0)
    for via in range(regions):
        line_RR = np.minimum(line_RR, line_RR[:, via, None] + line_RR[None, via, :])
    for (a, b), value in known.items():  # a measured line is not replaced by a path around
        line_RR[a, b] = line_RR[b, a] = value
    apart = [value for (a, b), value in known.items() if a != b]
    line_RR[np.isinf(line_RR)] = median(apart) if apart else NEAR_S / 2
    inside = [value for (a, b), value in known.items() if a == b]
    for region in range(regions):
        line_RR[region, region] = known.get((region, region), median(inside) if inside else NEAR_S / 2)
    return line_RR


def _widest(
    values: Sequence[tuple[tuple[int, int], float]], region_of: Sequence[int], regions: int
) -> np.ndarray:
    """[R, R] bandwidths: measured, else that of the widest path around, else the median of all."""
    known = _by_region(values, region_of)
    usual = median(known.values()) if known else DEFAULT_BPS
    line_RR = np.zeros((regions, regions))
    for (a, b), value in known.items():
        line_RR[a, b] = line_RR[b, a] = value
    inside = {region: line_RR[region, region] for region in range(regions)}
    np.fill_diagonal(line_RR, math.inf)
    for via in range(regions):
        line_RR = np.maximum(line_RR, np.minimum(line_RR[:, via, None], line_RR[None, via, :]))
    for (a, b), value in known.items():
        line_RR[a, b] = line_RR[b, a] = value
    for region, value in inside.items():  # neighbours have at least what each has to places far away
        line_RR[region, region] = value or max([usual, *np.delete(line_RR[region], region)])
    line_RR[line_RR == 0.0] = usual
    return line_RR
