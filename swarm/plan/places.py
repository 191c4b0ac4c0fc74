"""Where a peer is on the internet: a place whose distance to others' places is the round trip to them.

Vivaldi (Dabek, Cox, Kaashoek and Morris, SIGCOMM 2004): every round trip is a spring between two places, and
each peer moves its own a little at a time, by less the more certain it is of it (section 4: adaptive
timestep). A place is a point of the plane and a height, the way from a home to the core of the net, which
every round trip has at both ends (section 5.4). Peers publish theirs, so everybody can tell how far any two
are from one another, though each has measured a few lines only, and all who read the same records tell the
same.

Pure: the round trips are given. Strangers write places: one that cannot be is none.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from swarm.ids import PeerId

MOVES = 0.25
"""Of the spring's length in one measurement, at most: the paper's c_c."""
LEARNS = 0.25
"""Weight of one measurement in the error: the paper's c_e."""
UNSURE = 1.0
"""Relative error of who knows nothing."""
LEAST_HEIGHT_S = 1e-5
MOST_S = 60.0
"""Farther is made up."""


@dataclass(frozen=True, slots=True)
class Place:
    """In seconds of round trip."""

    x_s: float = 0.0
    y_s: float = 0.0
    height_s: float = LEAST_HEIGHT_S
    error: float = UNSURE
    """Relative, of round trips told from this place; `UNSURE`: it has measured nothing."""

    def numbers(self) -> tuple[int, ...]:
        """As a record has them: three times in microseconds, and the error in thousandths."""
        times_us = (round(1e6 * value) for value in (self.x_s, self.y_s, self.height_s))
        return (*times_us, round(1e3 * self.error))


def read_place(numbers: Sequence[int]) -> Place | None:
    """A place as a stranger published it; None if there is none, or it cannot be."""
    if len(numbers) != 4 or not all(abs(value) <= 1e6 * MOST_S for value in numbers):
        return None
    x_us, y_us, height_us, thousandths = numbers
    if height_us < 0 or not 0 <= thousandths <= 1000 * UNSURE:
        return None
    return Place(1e-6 * x_us, 1e-6 * y_us, max(1e-6 * height_us, LEAST_HEIGHT_S), 1e-3 * thousandths)


def apart_s(a: Place, b: Place) -> float:
    """The round trip between two places."""
    return math.hypot(a.x_s - b.x_s, a.y_s - b.y_s) + (a.height_s + b.height_s)


def measured(mine: Place, theirs: Place, rtt_s: float, *, me: PeerId, peer: PeerId) -> Place:
    """My place after a round trip to somebody at theirs (section 4.4, with heights).

    `me`, `peer`: two at one place part in a direction drawn from their names.
    """
    if not 0 < rtt_s <= MOST_S:
        return mine
    told_s = apart_s(mine, theirs)
    wrong = abs(told_s - rtt_s) / rtt_s
    weight = mine.error / max(mine.error + theirs.error, 1e-9)
    error = min(UNSURE, wrong * LEARNS * weight + mine.error * (1 - LEARNS * weight))
    step_s = MOVES * weight * (rtt_s - told_s)
    dx_s, dy_s = mine.x_s - theirs.x_s, mine.y_s - theirs.y_s
    flat_s = math.hypot(dx_s, dy_s)
    height_s = mine.height_s + theirs.height_s
    flat, high = flat_s / told_s, height_s / told_s
    if flat_s < 1e-9:
        angle = (
            2 * math.pi * int.from_bytes(hashlib.sha256(f"{me} {peer}".encode()).digest()[:4], "big") / 2**32
        )
        dx_s, dy_s, flat_s, flat = math.cos(angle), math.sin(angle), 1.0, 1.0
    return replace(
        mine,
        x_s=mine.x_s + step_s * flat * dx_s / flat_s,
        y_s=mine.y_s + step_s * flat * dy_s / flat_s,
        height_s=max(LEAST_HEIGHT_S, mine.height_s + step_s * high),
        error=error,
    )


def settled(rtt_s: Callable[[int, int], float], count: int, order: Iterable[tuple[int, int]]) -> list[Place]:
    """The places of `count` peers after the measurements in `order`: (who measures, to whom)."""
    found = [Place()] * count
    for i, j in order:
        if i != j:
            found[i] = measured(found[i], found[j], rtt_s(i, j), me=str(i), peer=str(j))
    return found


def located(me: PeerId, around: Sequence[tuple[PeerId, Place, float]], rounds: int = 40) -> Place:
    """My place from round trips to a few others: (who, where they are, seconds), each measured once.

    For a newcomer, which cannot wait until enough has passed between it and others.
    """
    mine = Place()
    for _ in range(rounds):
        for peer, theirs, rtt_s in around:
            mine = measured(mine, theirs, rtt_s, me=me, peer=peer)
    return mine
