"""Virtual time of the throughput simulation, and its chance."""

from __future__ import annotations

from swarm.sim.clock import MAX_AT_ONCE, Clock
from swarm.sim.dice import Dice


def test_events_come_in_their_order_and_those_of_one_time_as_they_were_made() -> None:
    clock, seen = Clock(), list[str]()
    for delay_s, name in ((2.0, "late"), (1.0, "first"), (1.0, "second")):
        clock.after(delay_s, seen.append, name)
    assert clock.run(until=lambda: len(seen) == 3, limit_s=5.0)
    assert seen == ["first", "second", "late"] and clock.now == 2.0


def test_time_stops_at_its_limit() -> None:
    clock = Clock()
    clock.after(9.0, lambda _: None)
    assert not clock.run(until=lambda: False, limit_s=5.0) and clock.now == 0.0


def test_what_calls_itself_for_ever_at_one_instant_is_ended() -> None:
    clock, seen = Clock(), list[float]()

    def again(delay_s: float) -> None:
        seen.append(delay_s)
        clock.after(delay_s, again, delay_s)

    clock.after(0.0, again, 0.0)
    assert not clock.run(until=lambda: False, limit_s=5.0) and clock.now == 0.0
    assert len(seen) == MAX_AT_ONCE


def test_the_dice_are_the_same_everywhere() -> None:
    """Against the reference implementation's first numbers, from its own state."""
    dice = Dice(0)
    dice._state = 1234567
    drawn = [int(dice.number() * 2**53) for _ in range(3)]
    assert drawn == [n >> 11 for n in (6457827717110365317, 3203168211198807973, 9817491932198370423)]
