from __future__ import annotations

import math
import random
from statistics import median

import pytest

from swarm.plan.places import UNSURE, Place, apart_s, located, measured, read_place, settled


def swarm(count: int, seed: int) -> tuple[list[Place], list[Place]]:
    """(where peers are, where they believe to be), some behind slow lines of their own."""
    rng = random.Random(seed)
    true = [
        Place(rng.uniform(0, 0.2), rng.uniform(0, 0.1), rng.choice([0.001, 0.002, 0.02]), 0.0)
        for _ in range(count)
    ]
    order = [(i, rng.randrange(count)) for _ in range(200) for i in range(count)]
    return true, settled(lambda i, j: apart_s(true[i], true[j]), count, order)


@pytest.mark.parametrize("seed", range(3))
def test_places_tell_round_trips_that_nobody_measured(seed: int) -> None:
    true, told = swarm(40, seed)
    wrong = [
        abs(apart_s(told[i], told[j]) / apart_s(true[i], true[j]) - 1) for i in range(40) for j in range(i)
    ]
    assert median(wrong) < 0.1
    assert all(place.error < 0.7 for place in told)


def test_a_newcomer_knows_its_place_from_a_few_round_trips() -> None:
    true, told = swarm(40, 7)
    around = [(str(j), told[j], apart_s(true[0], true[j])) for j in range(1, 9)]
    mine = located("new", around)
    wrong = [abs(apart_s(mine, told[j]) / apart_s(true[0], true[j]) - 1) for j in range(9, 40)]
    assert median(wrong) < 0.25 and mine.error < UNSURE


def test_two_at_one_place_part_each_in_a_direction_of_its_own() -> None:
    a = measured(Place(), Place(), 0.1, me="a", peer="b")
    b = measured(Place(), Place(), 0.1, me="b", peer="a")
    assert a == measured(Place(), Place(), 0.1, me="a", peer="b")
    assert (a.x_s, a.y_s) != (b.x_s, b.y_s) and 0.01 < apart_s(a, b) <= 0.1


@pytest.mark.parametrize("rtt_s", [0.0, -1.0, 61.0, math.nan, math.inf])
def test_a_round_trip_that_cannot_be_moves_nobody(rtt_s: float) -> None:
    assert measured(Place(), Place(0.1), rtt_s, me="a", peer="b") == Place()


@pytest.mark.parametrize(
    "numbers", [(), (1, 2, 3), (61_000_000, 0, 0, 10), (0, -1 << 70, 0, 10), (0, 0, -1, 10), (0, 0, 0, 1001)]
)
def test_a_place_that_cannot_be_is_none(numbers: tuple[int, ...]) -> None:
    assert read_place(numbers) is None


def test_a_place_goes_through_a_record() -> None:
    place = Place(0.0123456789, -0.02, 0.003, 0.25)
    read = read_place(place.numbers())
    assert read is not None and apart_s(read, place) == pytest.approx(2 * 0.003, abs=1e-5)
