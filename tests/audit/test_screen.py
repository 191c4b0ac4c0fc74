"""Whom the screens choose: the one that is unlike the others, and honest ones seldom."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
import torch

from swarm.audit.screen import Directions, Screen, sample_of
from swarm.audit.unusual import LEAST_LENGTH, LEAST_LOSS, TINY, Unusual

MEMBERS = ("a", "b", "c", "d")
COUNTS = dict.fromkeys(MEMBERS, 8)


def gradients(dice: torch.Generator, *, signal: float) -> dict[str, torch.Tensor]:
    """Sums of eight microbatches of each member, whose means agree as far as `signal`."""
    true = torch.randn(4096, generator=dice)
    return {
        member: 8 * (signal * true + (1 - signal) * torch.randn(4096, generator=dice)) for member in MEMBERS
    }


def chosen(
    change: dict[str, float], *, signal: float, begins: int = 0, honest: bool = False
) -> list[str | None]:
    """Whom the screen chooses, step by step. From a step on some members change what they add. `honest`:
    audits find that it is what they computed.
    """
    screen, dice = Screen(), torch.Generator().manual_seed(1)
    found = []
    for step in range(60):
        sums = gradients(dice, signal=signal)
        for member, factor in change.items() if step >= begins else ():
            sums[member] = sums[member] * factor
        found.append(screen.strangest(sums, COUNTS))
        if honest and found[-1]:
            screen.honest(found[-1])
    return found


@pytest.mark.parametrize("signal", [0.0, 0.2, 0.5, 0.9])
def test_honest_members_look_alike(signal: float) -> None:
    assert not any(chosen({}, signal=signal))


@pytest.mark.parametrize("factor", [-1.0, 0.0, 100.0, 0.01, 10.0])
def test_a_member_that_adds_something_else_is_chosen_at_once(factor: float) -> None:
    assert chosen({"b": factor}, signal=0.5)[0] == "b"


@pytest.mark.parametrize("factor", [-1.0, 0.0, 100.0])
def test_one_that_begins_to_is_chosen_within_some_steps(factor: float) -> None:
    found = chosen({"b": factor}, signal=0.5, begins=40)
    assert not any(found[:40])
    assert "b" in found[40:46]


def test_a_sign_that_flips_is_seen_in_its_first_step() -> None:
    """A step later each replica has taken it twice, since it is audited before it is left out."""
    assert chosen({"b": -1.0}, signal=0.5, begins=40).index("b") == 40


def test_among_noise_only_the_length_tells() -> None:
    assert not any(chosen({"b": -1.0}, signal=0.02))
    assert chosen({"b": 10.0}, signal=0.02)[0] == "b"


def test_one_that_always_looks_strange_is_chosen_until_it_was_computed_again() -> None:
    """Its data are another's. It has to look stranger still; once is remembered as little more than usual."""
    assert [who for who in chosen({"b": 6.0}, signal=0.5, honest=True) if who] == ["b"] * 2
    assert chosen({"b": 6.0}, signal=0.5) == ["b"] * 60


def test_alone_or_with_nothing_nobody_is_strange() -> None:
    assert Screen().strangest({"a": torch.ones(4)}, {"a": 1}) is None
    assert Screen().strangest({}, {}) is None
    assert Screen().strangest({"a": torch.zeros(4), "b": torch.zeros(4)}, {"a": 1, "b": 3}) is None


def losses() -> Unusual:
    return Unusual(LEAST_LOSS, relative=True)


def strange_ones(given: Iterable[float], screen: Unusual | None = None) -> list[int]:
    screen = screen or losses()
    found = []
    for number, loss in enumerate(given):
        if honest := screen.strange(loss):
            honest()
            found.append(number)
    return found


def noisy(losses: Iterable[float], *, deviation: float = 0.05) -> list[float]:
    dice = torch.Generator().manual_seed(1)
    return [loss + deviation * torch.randn(1, generator=dice).item() for loss in losses]


def test_a_loss_far_from_the_last_ones_is_strange() -> None:
    screen = losses()
    assert len(strange_ones(noisy(3.0 - 0.002 * n for n in range(500)), screen)) <= 8
    assert screen.strange(11.0) and screen.strange(0.0)
    assert not screen.strange(2.0)


def test_losses_of_a_model_that_learns_fast_are_seldom_strange() -> None:
    """Each of eight steps has losses far below those of the step before."""
    falling = noisy((5.5 - 0.4 * (n // 32) for n in range(8 * 32)), deviation=0.01)
    screen = losses()
    assert len(strange_ones(falling, screen)) <= 8
    assert screen.strange(falling[-1] * 1.2)


def test_a_lie_does_not_hide_the_next_ones() -> None:
    screen = losses()
    assert not strange_ones(noisy([3.0] * 100, deviation=1e-3), screen)
    assert all(map(screen.strange, [float("inf"), float("nan"), 1e30, 4.0]))


def test_constant_losses_and_few() -> None:
    assert not strange_ones([1.0, 99.0, -5.0])
    assert strange_ones([*[2.0] * 64, 2.1, 2.5, 0.0]) == [65, 66]
    assert not strange_ones([0.0] * 64)


def test_a_gradient_far_longer_or_shorter_than_the_last_ones_is_strange() -> None:
    lengths = [math.exp(one) for one in noisy([-5.0] * 500, deviation=0.4)]
    screen = Unusual(LEAST_LENGTH)
    assert sum(map(bool, map(screen.strange, map(math.log, lengths)))) <= 4
    strange = [screen.strange(math.log(TINY + lengths[0] * times)) for times in (1.1, *[100.0] * 20, 0.0)]
    assert [bool(one) for one in strange] == [False, *[True] * 21], "one lie hides no other"
    assert screen.strange(math.log(TINY + math.inf))


def test_what_was_computed_again_and_fits_is_usual_from_then_on() -> None:
    screen = Unusual(LEAST_LENGTH)
    assert not any(screen.strange(math.log(TINY + 1.0)) for _ in range(64))
    honest = screen.strange(math.log(TINY + 100.0))
    assert honest and screen.strange(math.log(TINY + 100.0))
    honest()
    assert not screen.strange(math.log(TINY + 100.0)) and screen.strange(math.log(TINY + 1e-2))


def turned(signs: dict[str, int], *, begins: int) -> list[int]:
    """The steps in which an answer of a peer is computed again; one microbatch of each in a step, of which
    what the caller adds agrees a little. From a step on some peers answer with other signs.
    """
    dice = torch.Generator().manual_seed(1)
    true, screen, found = torch.randn(4096, generator=dice), Directions(), list[int]()
    for step in range(60):
        for member in MEMBERS:
            gradient = true + 1.5 * torch.randn(4096, generator=dice)
            sign = signs.get(member, 1) if step >= begins else 1
            if screen.strange(step, member, sample_of([sign * gradient[:64], 1e-6 * sign * gradient])):
                assert member in signs
                found.append(step)
    return found


def test_a_peer_whose_answers_turn_what_is_added_is_seen_after_two_steps() -> None:
    assert turned({"b": -1}, begins=40) == list(range(42, 60))
    assert not turned({"b": 1}, begins=40)


def test_a_peer_that_answers_not_in_each_step_is_known_all_the_same() -> None:
    screen, ones = Screen(), torch.ones(8)
    flipped = {"a": ones, "b": ones, "c": -0.2 * ones}
    assert screen.strangest(flipped, dict.fromkeys(flipped, 1)) == "c"
    assert screen.strangest({"a": ones, "b": ones}, {"a": 1, "b": 1}) is None
    assert screen.strangest({"a": ones, "b": ones, "c": ones}, dict.fromkeys(flipped, 1)) == "c"
