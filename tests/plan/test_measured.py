"""From what peers have measured to a network: regions are found, missing pairs estimated, lies ignored."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from swarm.errors import SetupError
from swarm.plan.measured_network import DEFAULT_BPS, NEAR_S, Machine, Pair, estimate
from swarm.plan.network import Network

CITIES = 4
RTT_S = [
    [0.002, 0.030, 0.090, 0.150],
    [0.030, 0.004, 0.070, 0.130],
    [0.090, 0.070, 0.001, 0.200],
    [0.150, 0.130, 0.200, 0.003],
]
BPS = [
    [1e9, 4e8, 1e8, 5e7],
    [4e8, 1e9, 2e8, 6e7],
    [1e8, 2e8, 1e9, 3e7],
    [5e7, 6e7, 3e7, 1e9],
]


def between(net: Network, i: int, j: int) -> tuple[float, float]:
    """(latency in s, bandwidth in bit/s) from one device to another."""
    latency_NN, bandwidth_NN = net.pairs()
    return float(latency_NN[i, j]), float(bandwidth_NN[i, j])


def machines(count: int) -> list[Machine]:
    return [Machine(name=f"p{i:03}", flops_per_s=1e12) for i in range(count)]


def world(count: int, each: int, seed: int) -> list[Pair]:
    """Machine i is in city i % 4 and measures `each` others, with noise that only makes lines look worse."""
    dice = random.Random(seed)
    pairs = []
    for i in range(count):
        for j in dice.sample([j for j in range(count) if j != i], each):
            a, b = i % CITIES, j % CITIES
            rtt_s, bps = RTT_S[a][b] * dice.uniform(1.0, 1.2), BPS[a][b] * dice.uniform(0.8, 1.0)
            pairs.append(Pair(at=f"p{i:03}", to=f"p{j:03}", rtt_s=rtt_s, bandwidth_bps=bps))
    return pairs


@pytest.mark.parametrize("seed", range(5))
def test_cities_are_found_and_pairs_that_nobody_measured_are_estimated(seed: int) -> None:
    count = 48
    found = estimate(machines(count), world(count, 8, seed))
    net = found.network
    assert CITIES <= len(net.regions) <= CITIES + 2, "who measured nobody near is a region alone"
    assert found.pairs == count * (count - 1) // 2 > 2 * found.measured
    off, wrong = [], 0
    for i in range(count):
        for j in range(i):
            latency_s, bps = between(net, i, j)
            off.append(abs(latency_s - RTT_S[i % CITIES][j % CITIES] / 2))
            wrong += not 0.75 * BPS[i % CITIES][j % CITIES] <= bps <= BPS[i % CITIES][j % CITIES]
    assert sorted(off)[int(0.95 * len(off))] < 0.02 and wrong < 0.1 * found.pairs


def test_two_far_cities_that_never_measured_one_another_are_as_far_as_the_way_around() -> None:
    pairs = [
        Pair(at="p000", to="p001", rtt_s=0.1, bandwidth_bps=1e8),
        Pair(at="p001", to="p002", rtt_s=0.06, bandwidth_bps=3e7),
    ]
    net = estimate(machines(3), pairs).network
    assert between(net, 0, 2) == (pytest.approx(0.08), 3e7)
    assert between(net, 0, 1) == (pytest.approx(0.05), 1e8)


def test_a_measured_line_is_not_replaced_by_a_shorter_way_around() -> None:
    pairs = [
        Pair(at="p000", to="p001", rtt_s=0.02, bandwidth_bps=1e9),
        Pair(at="p001", to="p002", rtt_s=0.02, bandwidth_bps=1e9),
        Pair(at="p000", to="p002", rtt_s=0.30, bandwidth_bps=1e6),
    ]
    assert between(estimate(machines(3), pairs).network, 0, 2) == (pytest.approx(0.15), 1e6)


def test_one_peer_between_two_cities_does_not_make_them_one() -> None:
    west, east = ["p000", "p001", "p002"], ["p003", "p004", "p005"]
    pairs = [Pair(at=a, to=b, rtt_s=0.002) for city in (west, east) for a in city for b in city if a < b]
    pairs += [Pair(at=a, to=b, rtt_s=0.08) for a in west for b in east]
    pairs += [Pair(at="p006", to=other, rtt_s=0.009) for other in (*west, *east)]
    net = estimate(machines(7), pairs).network
    assert between(net, 0, 1)[0] < NEAR_S and between(net, 0, 3)[0] == pytest.approx(0.04)


def test_of_two_that_disagree_the_better_line_is_taken_and_order_does_not_matter() -> None:
    pairs = [
        Pair(at="p000", to="p001", rtt_s=0.5, bandwidth_bps=1e7),
        Pair(at="p001", to="p000", rtt_s=0.1, bandwidth_bps=1e6),
    ]
    for said in (pairs, pairs[::-1]):
        assert between(estimate(machines(2), said).network, 0, 1) == (pytest.approx(0.05), 1e7)


LIES = [math.nan, math.inf, -1.0, 1e30, 0.0, 1e-300, 5e-324]


@pytest.mark.parametrize("lie", LIES)
def test_numbers_that_cannot_be_are_not_measured(lie: float) -> None:
    honest = [*machines(2), Machine(name="liar", flops_per_s=lie if lie != 1e30 else 0.0, upload_bps=lie)]
    pairs = [
        Pair(at="liar", to="p000", rtt_s=lie, bandwidth_bps=lie),
        Pair(at="liar", to="liar", rtt_s=0.1),
        Pair(at="liar", to="nobody", rtt_s=0.1),
        Pair(at="p000", to="p001", rtt_s=0.04, bandwidth_bps=1e8),
    ]
    found = estimate(honest, pairs)
    assert found.measured == 1
    liar = found.network.devices[2]
    assert (liar.flops_per_s, liar.upload_bps) == (1e12, math.inf)
    assert between(found.network, 0, 2) == (pytest.approx(0.02), 1e8)


def test_where_nothing_is_measured_the_usual_is_assumed() -> None:
    net = estimate(machines(3), []).network
    assert between(net, 0, 1) == (NEAR_S / 2, DEFAULT_BPS)


def test_a_machine_that_has_not_measured_its_speed_is_like_the_others_and_someone_must_have() -> None:
    three = [Machine(name="a", flops_per_s=1e9), Machine(name="b", flops_per_s=5e9), Machine(name="c")]
    assert [d.flops_per_s for d in estimate(three, []).network.devices] == [1e9, 5e9, 3e9]
    with pytest.raises(SetupError) as error:
        estimate([Machine(name="a"), Machine(name="b")], [])
    assert error.value.text == "none of 2 peers has measured its speed yet: ask again in a minute"


def test_whatever_is_measured_the_matrices_are_whole_and_symmetric() -> None:
    def check(count: int, said: Sequence[Pair]) -> None:
        net = estimate(machines(count), said).network
        for matrix in (net.latency_s, net.bandwidth_bps):
            assert np.isfinite(matrix).all() and (matrix > 0).all() and (matrix == matrix.T).all()

    dice = random.Random(5)
    for _ in range(60):
        count = dice.randint(1, 12)
        names = [f"p{i:03}" for i in range(count)]
        check(
            count,
            [
                Pair(
                    at=dice.choice(names), to=dice.choice(names), rtt_s=dice.choice([0.0, 0.001, 0.02, 0.3]),
                    bandwidth_bps=dice.choice([0.0, 1e6, 1e9]),
                )
                for _ in range(dice.randint(0, 30))
            ],
        )  # fmt: skip
