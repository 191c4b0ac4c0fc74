"""What simulated peers know of where they are and of their lines, after they have measured one another for
a while."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from swarm.plan.network import Network
from swarm.plan.places import settled
from swarm.sim.dice import Dice

ROUNDS = 60
"""Measurements by each peer: of some minutes, in life."""
NOISE = 0.1
LEAST_RTT_S = 1e-4


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """As a peer's record has it."""

    place: tuple[int, ...]
    widest_bps: float
    in_flight_bytes: float


def whereabouts(network: Network, seed: int) -> list[Whereabouts]:
    """Of every device, from round trips that are up to a tenth too long, and the lines' true bandwidths."""
    dice, count, region_of = Dice(seed), len(network), network.region_of()
    rtt_RR = np.maximum(LEAST_RTT_S, 2.0 * network.latency_s)

    def rtt_s(i: int, j: int) -> float:
        return float(rtt_RR[region_of[i], region_of[j]]) * dice.between(1.0, 1.0 + NOISE)

    order = ((i, dice.below(count)) for _ in range(ROUNDS) for i in range(count))
    there = np.unique(region_of)
    lines_RR = np.where(np.isfinite(network.bandwidth_bps), network.bandwidth_bps, 0.0)[:, there]
    widest_R = lines_RR.max(axis=1)
    flight_R = (lines_RR * rtt_RR[:, there]).max(axis=1) / 8
    return [
        Whereabouts(place.numbers(), float(widest_R[region]), float(flight_R[region]))
        for place, region in zip(settled(rtt_s, count, order), region_of, strict=True)
    ]
