"""How many microbatches a trainer keeps in flight."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from swarm.policy.window import Window


def run_epochs(
    window: Window, rate_of: Callable[[int], float], epochs: int, *, start: float = 0.0
) -> list[int]:
    """Answer at `rate_of(size)` microbatches per second; the size at the start and after each epoch."""
    now, sizes = start, [window.size]
    window.answered(now=now)
    for _ in range(epochs):
        for _ in range(3 * sizes[-1]):
            now += 1.0 / rate_of(sizes[-1])
            window.answered(now=now)
        sizes.append(window.size)
    return sizes


def test_it_starts_between_one_and_the_largest() -> None:
    assert Window(start=0, largest=8).size == 1
    assert Window(start=99, largest=8).size == 8
    assert Window(start=3, largest=0).size == 1


def test_it_grows_while_that_raises_throughput() -> None:
    sizes = run_epochs(Window(start=2, largest=64), lambda size: 10.0 * size, 6)
    assert sizes == sorted(sizes)
    assert sizes[-1] > 6


def test_it_never_grows_beyond_the_largest() -> None:
    assert max(run_epochs(Window(start=2, largest=5), lambda size: 10.0 * size, 10)) == 5


def test_it_stops_soon_after_throughput_stops_rising() -> None:
    sizes = run_epochs(Window(start=2, largest=1000), lambda size: 10.0 * min(size, 8), 30)
    assert 6 <= sizes[-1] <= 12


def test_it_takes_the_last_notch_back_when_that_did_not_pay() -> None:
    sizes = run_epochs(Window(start=8, largest=1000), lambda size: 10.0, 3)
    assert sizes[:3] == [8, 10, 8]


def settled(rate_of: Callable[[int], float], *, epochs: int = 3) -> Window:
    window = Window(start=8, largest=1000)
    run_epochs(window, rate_of, epochs)
    window.paused()
    return window


def test_it_explores_again_when_throughput_falls() -> None:
    window = settled(lambda size: 100.0)
    assert window.size == 8
    assert run_epochs(window, lambda size: 1.0 * size, 6, start=1e6)[-1] > 12


def test_one_slow_epoch_is_noise() -> None:
    window = settled(lambda size: 100.0)
    assert run_epochs(window, lambda size: 50.0, 1, start=1e6)[-1] == 8
    window.paused()
    assert run_epochs(window, lambda size: 100.0, 3, start=2e6)[-1] == 8


def test_it_stays_where_it_settled_if_everything_gets_slower_for_good() -> None:
    window = settled(lambda size: 100.0)
    sizes = run_epochs(window, lambda size: 50.0, 8, start=1e6)
    assert sizes[-1] == 8
    assert min(sizes) == 8


def test_at_the_largest_size_there_is_no_notch_to_take_back() -> None:
    assert set(run_epochs(Window(start=8, largest=8), lambda size: 100.0, 12)) == {8}


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_make_it_collapse(seed: int) -> None:
    rng = random.Random(seed)
    sizes = run_epochs(Window(start=6, largest=32), lambda size: min(size, 12) * rng.uniform(4, 16), 200)
    assert min(sizes[50:]) >= 6


def test_a_refusal_makes_it_smaller_by_one_but_never_nothing() -> None:
    window = Window(start=3, largest=8)
    sizes = []
    for _ in range(4):
        window.refused()
        sizes.append(window.size)
    assert sizes == [2, 1, 1, 1]


def test_a_smaller_swarm_makes_it_smaller_at_once() -> None:
    window = Window(start=8, largest=8)
    window.set_largest(3)
    assert window.size == 3
    window.set_largest(0)
    assert window.size == 1


def test_a_fixed_window_stays_as_it_is() -> None:
    window = Window(start=4, largest=4, fixed=True)
    for now in range(100):
        window.answered(now=float(now))
    window.refused()
    assert window.size == 4


def test_a_pause_is_not_measured() -> None:
    window = Window(start=1, largest=8)
    for now in (0.0, 0.1, 0.2):
        window.answered(now=now)
    window.paused()
    window.answered(now=1000.0)
    window.answered(now=1000.1)
    window.answered(now=1000.2)
    assert window.size == 1, "three answers after the pause, of which the first only starts the clock"
    window.answered(now=1000.3)
    assert window.size == 2


@pytest.mark.parametrize("now", [0.0, -1.0])
def test_answers_at_one_instant_do_not_divide_by_nothing(now: float) -> None:
    window = Window(start=1, largest=8)
    window.answered(now=0.0)
    for _ in range(10):
        window.answered(now=now)
    assert window.size == 1
