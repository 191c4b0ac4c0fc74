"""What goes wrong, and when: a schedule of faults drawn from a seed."""

from __future__ import annotations

from typing import NamedTuple

from swarm.sim.dice import Dice

POINTS = ("forward", "backward", "frozen", "reduce", "prepared", "took", "joining", "handing")
"""Moments in the life of a stage peer at which a fault hurts most: `peers.fault_points`."""

KINDS = (
    ("kill", 8),
    ("cut power", 7),
    ("kill at", 6),
    ("stop", 5),
    ("cut", 6),
    ("cut one way", 2),
    ("cut off", 2),
    ("leave", 5),
    ("join", 6),
    ("lose sum", 4),
    ("kill trainer", 5),
    ("storm", 4),
    ("lose stage", 3),
    ("pause", 7),
    ("move", 4),
    ("wrong clock", 2),
    ("device hangs", 1),
    ("device dies", 1),
)
"""(kind, weight):

kill             a peer that has a replica dies; its connections break
cut power        the same, but nobody is told
kill at          the same, at one of `POINTS`
stop             SIGSTOP, and SIGCONT some seconds later
cut              some of all are cut off from the rest, and come back some seconds later
cut one way      what some of all send does not reach the rest, for some seconds
cut off          some of all reach nobody of the directory, for some seconds
leave            a peer drains, hands its sum over, and goes
join             a newcomer downloads the state of a stage and serves
lose sum         a backward breaks half-way and takes the peer's sum with it
kill trainer     and another one comes later
storm            for a second half of all messages are lost, doubled or late
lose stage       all peers of a stage die at once; others come from a checkpoint, or from nothing
pause            the owner of a peer wants its device for a while, whoever else there is
move             a peer that has a replica goes to another stage
wrong clock      the wall clock of a peer jumps by up to an hour, and perhaps back
device hangs     a job never ends; the peer still says that it lives, until it is stopped by hand
device dies      each job fails
"""

_BAG = tuple(kind for kind, weight in KINDS for _ in range(weight))


class Fault(NamedTuple):
    """`kind` at time `at_s`; `lasts_s` for those that end; `who` picks among those that it can hit."""

    at_s: float
    kind: str
    who: float
    lasts_s: float
    point: str = ""
    number: int = 0
    """`kill at`: which time that a peer comes to the point."""

    def words(self) -> str:
        """For a timeline."""
        at = f" {self.point!r}, time {self.number}" if self.kind == "kill at" else ""
        return f"{self.at_s:.3f} s: {self.kind}{at} (who {self.who:.3f}, lasts {self.lasts_s:.2f} s)"


def schedule(dice: Dice, *, most: int, within_s: float) -> list[Fault]:
    """Up to `most` faults, by time."""
    count = dice.below(most + 1)
    faults = [
        Fault(
            at_s=dice.between(0.0, within_s),
            kind=dice.pick(_BAG),
            who=dice.number(),
            lasts_s=dice.between(0.2, 1.0) if dice.chance(0.4) else dice.between(1.0, 7.0),
            point=dice.pick(POINTS),
            number=1 + dice.below(4),
        )
        for _ in range(count)
    ]
    return sorted(faults)
