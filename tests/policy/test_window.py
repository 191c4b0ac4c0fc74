"""How many microbatches a trainer keeps in flight."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.policy.window import Window, moving_share


class Pipe:
    """What windows send to: it works on `rate` microbatches a second in turn, and each takes `least_s`."""

    def __init__(self, *windows: Window, rate: float, least_s: float) -> None:
        self.windows, self.rate, self.least_s = windows, rate, least_s
        self._now_s = self._free_s = 0.0
        self._sent = [deque[tuple[float, float]]() for _ in windows]
        """(answered, started) of those in flight, by window."""

    @property
    def product(self) -> float:
        return self.rate * self.least_s

    def answer(self, count: int, *, left: int = 1 << 60) -> None:
        """Until so many are answered, of `left` that there are; then what is in flight ends unseen."""
        for _ in range(count):
            for window, sent in zip(self.windows, self._sent, strict=True):
                while len(sent) < window.size and left > 0:
                    self._free_s = max(self._now_s, self._free_s) + 1.0 / self.rate
                    sent.append((self._free_s + self.least_s - 1.0 / self.rate, self._now_s))
                    left -= 1
            window, sent = min(
                (pair for pair in zip(self.windows, self._sent, strict=True) if pair[1]),
                key=lambda pair: pair[1][0],
            )
            self._now_s, started_s = sent[0]
            moving = moving_share([(self._now_s - started_s, self.least_s)])
            window.answered(in_flight=len(sent), moving=moving)
            sent.popleft()

    def step(self, microbatches: int) -> None:
        """All microbatches of a step, and nothing is in flight afterwards."""
        self.answer(microbatches, left=microbatches)


def test_it_starts_between_one_and_the_largest() -> None:
    assert Window(start=0, largest=8).size == 1
    assert Window(start=99, largest=8).size == 8
    assert Window(start=3, largest=0).size == 1


@given(start=st.integers(1, 512), rate=st.floats(0.5, 1000.0), product=st.floats(1.0, 200.0))
@settings(max_examples=25)
def test_it_rests_above_the_product_of_rate_and_delay_and_below_three_times_that(
    start: int, rate: float, product: float
) -> None:
    window = Window(start=start, largest=4096)
    pipe = Pipe(window, rate=rate, least_s=product / rate)
    pipe.answer(3000)
    assert product <= window.size <= 3 * product + 3


@pytest.mark.parametrize("microbatches", [16, 64, 512])
def test_it_learns_within_two_steps_whatever_a_step_has(microbatches: int) -> None:
    window = Window(start=6, largest=4096)
    pipe = Pipe(window, rate=400.0, least_s=0.6)
    pipe.step(microbatches)
    pipe.step(microbatches)
    assert window.size >= 0.9 * min(microbatches, pipe.product)


def test_what_was_learned_in_one_step_is_kept_in_the_next() -> None:
    window = Window(start=6, largest=4096)
    pipe = Pipe(window, rate=400.0, least_s=0.6)
    sizes = []
    for _ in range(8):
        pipe.step(512)
        sizes.append(window.size)
    assert sizes == sorted(sizes)


def test_a_trainer_with_little_to_do_keeps_its_window() -> None:
    window = Window(start=64, largest=4096)
    pipe = Pipe(window, rate=100.0, least_s=0.02)
    for _ in range(5):
        pipe.step(8)
    assert window.size == 64


def test_it_finds_its_way_down_when_the_swarm_shrinks() -> None:
    window = Window(start=6, largest=4096)
    pipe = Pipe(window, rate=400.0, least_s=0.5)
    pipe.answer(4000)
    assert window.size >= 200
    pipe.rate = 40.0
    pipe.answer(2000)
    assert 20 <= window.size <= 63


def test_it_never_grows_beyond_the_largest() -> None:
    window = Window(start=2, largest=5)
    Pipe(window, rate=100.0, least_s=1.0).answer(100)
    assert window.size == 5


def test_a_trainer_that_comes_late_gets_a_window_like_the_other() -> None:
    windows = [Window(start=2, largest=4096), Window(start=120, largest=4096)]
    Pipe(*windows, rate=40.0, least_s=0.5).answer(20_000)
    small, large = sorted(window.size for window in windows)
    assert large <= 2 * small


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
    window = Window(start=4, largest=8, fixed=True)
    window.answered(in_flight=4, moving=1.0)
    window.refused()
    assert window.size == 4


@pytest.mark.parametrize("moving", [0.0, -1.0, 1.5, float("nan"), float("inf")])
def test_a_share_that_cannot_be_teaches_nothing(moving: float) -> None:
    window = Window(start=4, largest=8)
    window.answered(in_flight=4, moving=moving)
    assert window.size == 4


def test_the_share_that_moves_is_what_it_takes_at_least_of_what_it_took() -> None:
    assert moving_share([(1.0, 0.25), (3.0, 0.75)]) == 0.25
    assert moving_share([]) == 0.0
