"""Chance of the simulations."""

from __future__ import annotations

from peers.sim.dice import Dice


def test_the_dice_are_the_same_everywhere() -> None:
    """Against the reference implementation's first numbers, from its own state."""
    dice = Dice(0)
    dice._state = 1234567
    drawn = [int(dice.number() * 2**53) for _ in range(3)]
    assert drawn == [n >> 11 for n in (6457827717110365317, 3203168211198807973, 9817491932198370423)]
