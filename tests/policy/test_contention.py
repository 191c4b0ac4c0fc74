"""When other programs want the device."""

from __future__ import annotations

import itertools
import random

from swarm.policy.contention import ContentionDetector, Use

MIB = 1 << 20


def pauses(gate: ContentionDetector, looks: list[tuple[float, int, float]]) -> list[bool]:
    """(time, MiB of others, share of time) -> what the gate says at each."""
    return [gate.observe(Use(held_bytes=mib * MIB, share=share), now=now)[0] for now, mib, share in looks]


def test_a_program_that_stays_pauses_and_ends_the_pause_a_minute_after_it_is_gone() -> None:
    looks = [(0.0, 300, 0.0), (1.0, 3000, 0.0), (3.9, 3000, 0.0), (4.0, 3000, 0.0), (9.0, 300, 0.0)]
    assert pauses(ContentionDetector(), [*looks, (68.9, 300, 0.0), (69.0, 300, 0.0)]) == [
        False, False, False, True, True, True, False,
    ]  # fmt: skip


def test_computing_is_wanting_the_device_too() -> None:
    assert pauses(ContentionDetector(), [(0, 0, 0.0), (1, 0, 0.9), (4, 0, 0.9)]) == [False, False, True]


def test_what_comes_and_goes_pauses_nothing_and_a_short_rest_ends_no_pause() -> None:
    assert not any(pauses(ContentionDetector(), [(t, 3000 * (t % 3 > 0), 0.0) for t in range(60)]))
    looks = [(t, 3000, 0.0) for t in range(1, 6)] + [(t, 3000 * (t % 50 == 0), 0.0) for t in range(6, 300)]
    assert all(pauses(ContentionDetector(), [(0, 0, 0.0), *looks])[5:])


def test_what_a_desktop_always_has_is_no_reason_even_if_we_came_while_it_had_more() -> None:
    gate = ContentionDetector()
    assert not any(pauses(gate, [(t, 900, 0.02) for t in range(20)]))
    assert not any(pauses(gate, [(20 + t, 200, 0.02) for t in range(5)]))
    assert pauses(gate, [(30, 900, 0.0), (34, 900, 0.0)]) == [False, True]


def test_between_the_two_limits_nothing_changes() -> None:
    between = [(t, 0, 0.2) for t in range(2, 200)]
    assert not any(pauses(ContentionDetector(), [(0, 0, 0.0), *between]))
    assert all(pauses(ContentionDetector(), [(-9, 0, 0.0), (-4, 0, 0.9), (0, 0, 0.9), *between])[2:])


def test_it_never_changes_its_mind_twice_within_its_waits() -> None:
    rng = random.Random(1)
    gate, changes, last = ContentionDetector(), [], False
    for t in range(5000):
        use = Use(held_bytes=rng.choice([0, 0, 0, 4000]) * MIB, share=rng.random() ** 4)
        pauses, why = gate.observe(use, now=float(t))
        assert "MiB more than usual" in why
        if pauses != last:
            changes.append(t)
            last = pauses
    assert all(after - before >= 3 for before, after in itertools.pairwise(changes))
