"""DT-FM's objective: against brute force, whatever the devices are called, and searched well."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.bench.plan.additive_grid import KNOWN, LOOKED_AT, Grid, Segments, twins
from scripts.bench.plan.additive_objective import (
    MAX_EXACT_STAGES,
    AdditiveTerms,
    additive_cost,
    additive_terms,
    bottleneck_matchings,
    costs_in_order_s,
    shortest_open_path,
)
from scripts.bench.plan.additive_search import (
    anneal,
    clustered_grid,
    drawn,
    megatron_grid,
    random_grid,
    search_additive,
)
from scripts.bench.plan.additive_stages import FASTEST, Divisions
from swarm.errors import SetupError
from swarm.plan.network import Device, Network
from swarm.plan.search import even_clusters, shapes
from tests.seeds import some


def prices(size: int, rng: np.random.Generator, *, kinds: int = 0) -> np.ndarray:
    """[N, N] symmetric with zeros on the diagonal; with `kinds`, of devices that are alike within a kind."""
    many = kinds or size
    half = np.exp(rng.standard_normal((many, many)))
    of = rng.integers(0, many, size) if kinds else np.arange(size)
    full = (half + half.T)[np.ix_(of, of)]
    np.fill_diagonal(full, 0.0)
    return full


def terms(stages: int, replicas: int, seed: int, *, kinds: int = 0) -> AdditiveTerms:
    rng = np.random.default_rng(seed)
    size = stages * replicas
    of = np.random.default_rng(seed + 1).integers(0, kinds, size) if kinds else np.arange(size)
    full = prices(kinds or size, rng) + (1.0 if kinds else 0.0)
    exchange, transfer = full[np.ix_(of, of)], 1.7 * full[np.ix_(of, of)] + 0.1
    for price in (exchange, transfer):
        np.fill_diagonal(price, 0.0)
    return AdditiveTerms(stages, exchange, transfer)


def ticks(step_s: float = 1.0) -> Callable[[], float]:
    """A clock that goes on by the same at each look: the same search on any machine."""
    spent = itertools.count()
    return lambda: next(spent) * step_s


def by_the_formula(of: AdditiveTerms, grid: np.ndarray) -> float:
    """The cost as the formulas say, by trying every matching and every order."""
    stages = len(grid)
    exchange = max(sum(of.exchange_s[i, j] for j in row if j != i) for row in grid for i in row)

    def boundary(a: int, b: int) -> float:
        return min(
            max(float(of.transfer_s[i, j]) for i, j in zip(grid[a], other, strict=True))
            for other in itertools.permutations(grid[b])
        )

    way = min(
        sum(boundary(a, b) for a, b in itertools.pairwise(order))
        for order in itertools.permutations(range(stages))
    )
    return float(exchange + 2 * way)


def all_divisions(devices: tuple[int, ...], replicas: int) -> Iterator[list[tuple[int, ...]]]:
    if not devices:
        yield []
        return
    first, rest = devices[0], devices[1:]
    for mates in itertools.combinations(rest, replicas - 1):
        left = tuple(device for device in rest if device not in mates)
        for others in all_divisions(left, replicas):
            yield [(first, *mates), *others]


@pytest.mark.parametrize(("stages", "replicas"), [(1, 4), (2, 3), (3, 3), (4, 2), (4, 1)])
def test_the_cost_is_that_of_the_formulas(stages: int, replicas: int) -> None:
    for seed in range(5):
        of = terms(stages, replicas, seed)
        grid = random_grid(stages * replicas, stages, np.random.default_rng(seed))
        found = additive_cost(of, grid)
        assert found.total_s == pytest.approx(by_the_formula(of, grid), rel=1e-12)
        assert costs_in_order_s(of, found.grid[None])[0] == pytest.approx(found.total_s, rel=1e-12)


def test_the_prices_of_a_network_are_those_of_dt_fm() -> None:
    devices = tuple(Device(f"d{i}", i // 2, 1e12) for i in range(4))
    network = Network(
        devices, ("a", "b"), np.array([[0.0, 0.1], [0.1, 0.005]]), np.array([[1e9, 2e9], [2e9, 4e9]])
    )
    found = additive_terms(network, stages=2, gradient_bytes=0.65e9, activation_bytes=0.47e9)
    assert found.exchange_s[0, 1] == pytest.approx(2 * (0 + 0.65 * 8 / (1 * 2)))
    assert found.exchange_s[0, 2] == pytest.approx(2 * (0.1 + 0.65 * 8 / (2 * 2)))
    assert found.transfer_s[2, 3] == pytest.approx(0.005 + 0.47 * 8 / 4)
    assert found.exchange_s[1, 1] == found.transfer_s[3, 3] == 0.0


@given(st.integers(0, 10_000))
@settings(max_examples=30)
def test_the_cost_does_not_know_what_devices_are_called(seed: int) -> None:
    rng = np.random.default_rng(seed)
    of, name = terms(3, 4, seed), rng.permutation(12)
    renamed = AdditiveTerms(3, of.exchange_s[np.ix_(name, name)], of.transfer_s[np.ix_(name, name)])
    grid = random_grid(12, 3, rng)
    again = np.argsort(name)[grid]
    rng.shuffle(again)  # nor in which order stages and members are listed
    again = rng.permuted(again, axis=1)
    assert additive_cost(renamed, again).total_s == pytest.approx(additive_cost(of, grid).total_s, rel=1e-12)


@given(st.integers(1, 6), st.integers(0, 10_000), st.booleans())
def test_the_matching_has_the_smallest_largest_price(size: int, seed: int, ties: bool) -> None:
    prices = np.exp(3 * np.random.default_rng(seed).standard_normal((2, size, size)))
    prices = np.ceil(prices) if ties else prices
    for price, value, columns in zip(prices, *bottleneck_matchings(prices), strict=True):
        assert sorted(columns.tolist()) == list(range(size))
        assert value == price[np.arange(size), columns].max()
        assert value == min(
            max(price[i, j] for i, j in enumerate(other)) for other in itertools.permutations(range(size))
        )


def test_a_path_of_many_nodes_is_as_short_as_on_a_line() -> None:
    rng = np.random.default_rng(3)
    at = rng.permutation(MAX_EXACT_STAGES + 20).astype(float)
    total, order = shortest_open_path(np.abs(at[:, None] - at[None]))
    assert total == len(at) - 1
    assert sorted(order) == list(range(len(at)))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 10_000), st.booleans())
@settings(max_examples=60)
def test_the_changes_are_those_that_swaps_make(stages: int, replicas: int, seed: int, alike: bool) -> None:
    of = terms(stages, replicas, seed, kinds=3 if alike else 0)
    rng = np.random.default_rng(seed)
    size = stages * replicas
    grid = Grid(of, random_grid(size, stages, rng))
    for _ in range(4 if size > 1 else 0):
        i, j = sorted(rng.choice(size, 2, replace=False).tolist())
        change, before = float(grid.changes_s()[i, j]), grid.smooth_s()
        grid.swap(i, j)
        if change == np.inf:  # twins
            change = 0.0
        assert grid.smooth_s() - before == pytest.approx(change, abs=2e-3 * (1 + before))
    fresh = Grid(of, grid.grid)
    assert grid.cost_s() == pytest.approx(fresh.cost_s(), rel=1e-5)
    assert grid.smooth_s() == pytest.approx(fresh.smooth_s(), rel=1e-5)
    assert np.allclose(grid.changes_s(), fresh.changes_s(), atol=1e-3, rtol=1e-3)


@given(st.integers(4, 9), st.integers(1, 4), st.integers(0, 10_000), st.integers(1, 3))
@settings(max_examples=20)
def test_the_changes_are_those_that_exchanged_segments_make(
    stages: int, replicas: int, seed: int, squarings: int
) -> None:
    of, rng = terms(stages, replicas, seed), np.random.default_rng(seed)
    segments = Segments(stages, replicas, rng)
    grid = Grid(of, random_grid(stages * replicas, stages, rng), segments)
    grid.sharpen(squarings)
    chunk = int(rng.integers(KNOWN // LOOKED_AT))
    changes_m, before, start = grid.segment_changes_s(chunk), grid.smooth_s(), grid.grid
    for number in rng.choice(LOOKED_AT, 5, replace=False):
        pairs = segments.swaps(chunk * LOOKED_AT + int(number))
        assert len(pairs) >= 2 and len({position for pair in pairs for position in pair}) == 2 * len(pairs)
        grid.swap_all(pairs)
        assert grid.smooth_s() - before == pytest.approx(float(changes_m[number]), abs=2e-3 * (1 + before))
        grid.swap_all(pairs[::-1])
        assert (grid.grid == start).all()


def smooth_s(of: AdditiveTerms, stages_SD: np.ndarray, squarings: int) -> float:
    """What `Divisions.changes_s` are changes of."""
    power, unit_s = 2.0**squarings, max(of.exchange_s.max(), of.transfer_s.max())
    exchange_S = [float((of.exchange_s[np.ix_(row, row)] / unit_s).sum(axis=1).max()) for row in stages_SD]
    total = sum(slowest**power for slowest in exchange_S) ** (1 / power)
    for a, b in itertools.pairwise(stages_SD):
        near = np.maximum(of.transfer_s[np.ix_(a, b)] / unit_s, FASTEST) ** -power
        both = (1.0 / near.sum(axis=0)).sum() + (1.0 / near.sum(axis=1)).sum()
        total += 2.0 * (both / 2.0) ** (1 / power)
    return total * unit_s


@given(st.integers(2, 5), st.integers(1, 4), st.integers(0, 10_000), st.integers(1, 4))
@settings(max_examples=40)
def test_the_changes_of_sets_are_those_that_swaps_make(
    stages: int, replicas: int, seed: int, squarings: int
) -> None:
    of, rng = terms(stages, replicas, seed), np.random.default_rng(seed)
    size, count = stages * replicas, 5
    divisions = Divisions(of, np.array([random_grid(size, stages, rng) for _ in range(count)]))
    divisions.sharpen(squarings)
    for _ in range(3):
        divisions.step(np.full(count, 0.3), rng)
    pair_2R = np.array([sorted(rng.choice(stages, 2, replace=False)) for _ in range(count)]).T
    changes_DDR, _ = divisions.changes_s(pair_2R)
    for r, before in enumerate(divisions.stages):
        assert sorted(before.ravel().tolist()) == list(range(size))
        for i, j in itertools.product(range(replicas), repeat=2):
            after, (a, b) = before.copy(), pair_2R[:, r]
            after[a, i], after[b, j] = before[b, j], before[a, i]
            change = smooth_s(of, after, squarings) - smooth_s(of, before, squarings)
            assert changes_DDR[i, j, r] == pytest.approx(change, abs=1e-3)


def test_a_cold_step_makes_no_division_dearer() -> None:
    of, rng = terms(4, 4, 3), np.random.default_rng(3)
    divisions = Divisions(of, np.array([random_grid(16, 4, rng) for _ in range(6)]))
    costs = [[smooth_s(of, stages, 1) for stages in divisions.stages]]
    for _ in range(60):
        divisions.step(np.full(6, 1e-4), rng)
        costs.append([smooth_s(of, stages, 1) for stages in divisions.stages])
    assert (np.diff(costs, axis=0) < 5e-3).all()
    assert (np.array(costs[-1]) < np.array(costs[0])).all()


def test_a_grid_is_never_said_to_cost_less_than_it_does() -> None:
    for seed in range(20):
        of = terms(4, 3, seed)
        grid = Grid(of, random_grid(12, 4, np.random.default_rng(seed)))
        assert grid.cost_s() >= additive_cost(of, grid.grid).total_s * (1 - 1e-6)


def test_twins_cost_the_same_with_everybody() -> None:
    kind = twins(terms(4, 4, 5, kinds=3))
    expected = np.random.default_rng(6).integers(0, 3, 16)
    assert (kind[:, None] == kind).tolist() == (expected[:, None] == expected).tolist()


def test_clusters_have_one_size_and_hold_near_devices() -> None:
    at = np.random.default_rng(0).permutation(np.repeat([0.0, 10.0, 20.0], 4))
    found = even_clusters(np.abs(at[:, None] - at[None]), 4)
    assert sorted(found.ravel().tolist()) == list(range(12))
    assert all(len(set(at[cluster])) == 1 for cluster in found)


def test_every_start_is_a_grid_of_all_devices() -> None:
    of = terms(4, 6, 1)
    for shape in shapes(4, 6):
        for bands in (False, True):
            clusters = even_clusters(of.transfer_s, shape[0] * shape[1])
            grid = clustered_grid(of, shape, clusters, np.random.default_rng(0), bands=bands)
            assert grid.shape == (4, 6)
            assert sorted(grid.ravel().tolist()) == list(range(24))


def test_a_pair_that_is_kept_does_not_change_places() -> None:
    rng = np.random.default_rng(0)
    grid = Grid(terms(4, 4, 0), megatron_grid(16, 4))
    (best,) = drawn(grid, 0.0, None, rng)
    (other,) = drawn(grid, 0.0, None, rng, [best])
    changes = grid.changes_s()
    assert other != best and changes[best] < changes[other]


def test_a_descent_never_makes_a_grid_worse() -> None:
    for seed in range(5):
        of = terms(4, 4, seed)
        grid = Grid(of, megatron_grid(16, 4))
        before = grid.cost_s()
        anneal(grid, steps=50, heat_s=0.0, rng=np.random.default_rng(0))
        assert grid.cost_s() <= before


@pytest.mark.parametrize(
    ("stages", "replicas", "rel"),
    some(
        [(2, 4, 1e-9), (4, 2, 0.02), (3, 3, 1e-9), (8, 1, 1e-9), (1, 8, 1e-9)],
        quick=[(2, 4, 1e-9)],
    ),
)
def test_the_search_finds_the_optimum_of_what_can_be_tried_out(
    stages: int, replicas: int, rel: float
) -> None:
    for seed in range(1 if stages < 4 else 2):
        of = terms(stages, replicas, seed)
        least = min(
            additive_cost(of, np.array(division)).total_s
            for division in all_divisions(tuple(range(stages * replicas)), replicas)
        )
        found = search_additive(of, seed=seed, budget_s=3000, spent_s=ticks())
        assert found.cost.total_s == pytest.approx(least, rel=rel)


@pytest.mark.parametrize("budget_s", [0, 60, 200])
def test_the_search_is_never_worse_than_its_starts(budget_s: int) -> None:
    for seed in range(3):
        of = terms(4, 4, seed)
        found = search_additive(of, seed=seed, budget_s=budget_s, spent_s=ticks())
        assert found.cost.total_s <= found.start_s
        for shape in ((4, 1), (1, 4)):
            clusters = even_clusters(of.transfer_s, 4)
            start = clustered_grid(of, shape, clusters, np.random.default_rng(seed))
            if shape == (4, 1):  # the first one, so chance has drawn nothing yet
                assert found.start_s <= additive_cost(of, start).total_s
        again = additive_cost(of, found.cost.grid)
        assert again.total_s == pytest.approx(found.cost.total_s, rel=1e-12)


@pytest.mark.slow
def test_the_same_seed_and_clock_give_the_same_layout() -> None:
    of = terms(4, 4, 7)
    one, two = (search_additive(of, seed=3, budget_s=300, spent_s=ticks()) for _ in range(2))
    assert one.cost.grid.tolist() == two.cost.grid.tolist()
    assert one.turns == two.turns > 0


@pytest.mark.slow
def test_more_time_is_never_worse() -> None:
    of = terms(4, 6, 2)
    costs = [
        search_additive(of, seed=1, budget_s=budget, spent_s=ticks()).cost.total_s
        for budget in (0, 200, 1000)
    ]
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize(
    ("stages", "size", "words"),
    [
        (4, 3, "3 devices cannot serve 4 stages"),
        (3, 4, "4 devices do not divide into 3 stages of equal size"),
        (0, 4, "4 devices cannot serve 0 stages"),
    ],
)
def test_a_number_of_devices_that_cannot_be_is_refused(stages: int, size: int, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        AdditiveTerms(stages, np.zeros((size, size)), np.zeros((size, size)))


def test_prices_that_are_not_of_all_pairs_are_refused() -> None:
    with pytest.raises(SetupError, match=r"prices of \[2, 2\] and \[3, 3\] pairs"):
        AdditiveTerms(1, np.zeros((2, 2)), np.zeros((3, 3)))
