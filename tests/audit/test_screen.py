"""Whom the screens choose: the one that is unlike the others, and honest ones seldom."""

from __future__ import annotations

import pytest
import torch

from swarm.audit.loss_band import LossBand
from swarm.audit.screen import Screen

MEMBERS = ("a", "b", "c", "d")
COUNTS = dict.fromkeys(MEMBERS, 8)


def gradients(dice: torch.Generator, *, signal: float) -> dict[str, torch.Tensor]:
    """Sums of eight microbatches of each member, whose means agree as far as `signal`."""
    true = torch.randn(4096, generator=dice)
    return {
        member: 8 * (signal * true + (1 - signal) * torch.randn(4096, generator=dice)) for member in MEMBERS
    }


def chosen(change: dict[str, float], *, signal: float, begins: int = 0) -> list[str | None]:
    """Whom the screen chooses, step by step. From a step on some members change what they add."""
    screen, dice = Screen(), torch.Generator().manual_seed(1)
    found = []
    for step in range(60):
        sums = gradients(dice, signal=signal)
        for member, factor in change.items() if step >= begins else ():
            sums[member] = sums[member] * factor
        found.append(screen.strangest(sums, COUNTS))
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


def test_among_noise_only_the_length_tells() -> None:
    assert not any(chosen({"b": -1.0}, signal=0.02))
    assert chosen({"b": 10.0}, signal=0.02)[0] == "b"


def test_one_that_always_looks_strange_is_chosen_once() -> None:
    """Its data are another's. It has to look stranger still."""
    assert [who for who in chosen({"b": 6.0}, signal=0.5) if who] == ["b"]


def test_alone_or_with_nothing_nobody_is_strange() -> None:
    assert Screen().strangest({"a": torch.ones(4)}, {"a": 1}) is None
    assert Screen().strangest({}, {}) is None
    assert Screen().strangest({"a": torch.zeros(4), "b": torch.zeros(4)}, {"a": 1, "b": 3}) is None


def test_a_loss_far_from_the_last_ones_is_outside() -> None:
    dice = torch.Generator().manual_seed(1)
    band = LossBand()
    losses = [3.0 + 0.2 * torch.randn(1, generator=dice).item() - 0.002 * step for step in range(500)]
    assert not any(band.is_outside(loss) for loss in losses)
    assert band.is_outside(11.0) and band.is_outside(0.0)
    assert not band.is_outside(2.0)


def test_constant_losses_have_a_band_too_and_few_have_none() -> None:
    band = LossBand()
    assert not any(band.is_outside(loss) for loss in (1.0, 99.0, -5.0))
    band = LossBand()
    assert not any(band.is_outside(2.0) for _ in range(64))
    assert not band.is_outside(2.001)
    assert band.is_outside(2.5)
