"""What a seed says of a swarm before anything fails."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from peers.sim.network import Lines
from swarm.ids import PeerId
from swarm.manifest import Run, audit_run
from swarm.sim.dice import Dice


def dice_of(seed: int, purpose: str) -> Dice:
    """Chance for one purpose: what is drawn for it changes nothing of the others."""
    return Dice(int.from_bytes(hashlib.sha256(f"{seed} {purpose}".encode()).digest()[:8], "big"))


DISKS = (*("none",) * 7, "own", "own", "shared")


@dataclass(frozen=True)
class Setting:
    """A run, its first members, and the lines between them."""

    seed: int
    run: Run
    tied: bool
    """The first stage's weights are the last one's as well."""
    lines: Lines
    """In calm weather."""
    window: int | None
    """Of the trainers: microbatches under way."""
    names: list[PeerId]
    """Of peers, in the order in which they come."""
    first_peers: list[int]
    """By stage."""
    first_trainers: int
    disks: str
    """Peers have: "none", one each ("own"), or one for all ("shared")."""
    only_last: bool
    """They save the run's last version only, and start from nothing, as without --checkpoint-dir."""
    keeper: bool
    dice: Dice
    """For those that come later."""

    @property
    def has(self) -> set[str]:
        """What kinds of faults may need."""
        disks = {"disks"} if self.keeper or self.disks != "none" else set[str]()
        return {"peers"} | disks | ({"keeper"} if self.keeper else set[str]())


def setting_of(seed: int) -> Setting:
    """The swarm of a seed."""
    dice = dice_of(seed, "the world")
    run = replace(
        audit_run(
            stages=dice.pick((1, 2, 2, 2, 2, 3)),
            steps=dice.pick((2, 2, 2, 2, 2, 3)),
            microbatches_per_step=dice.pick((2, 2, 3)),
        ),
        delayed_updates=dice.chance(0.3),
        checkpoint_every=dice.pick((0, 1, 1, 2)),
    )
    bad = dice.pick((0.0, 0.0, 0.01, 0.04))
    storage = dice_of(seed, "storage")
    return Setting(
        seed=seed,
        run=run,
        lines=Lines(most_s=dice.pick((0.01, 0.03, 0.06)), lost=bad, doubled=2 * bad, late=bad),
        tied=run.S > 1 and dice_of(seed, "tied weights").chance(1 / 3),
        window=dice.pick((None, 1, 2, 4)),
        names=dice.shuffled([f"p{i:02}" for i in range(60)]),
        first_peers=[dice.pick((1, 2, 2, 2, 3)) for _ in range(run.S)],
        first_trainers=dice.pick((1, 1, 2)),
        disks=storage.pick(DISKS),
        only_last=storage.chance(0.2),
        keeper=storage.chance(0.15),
        dice=dice,
    )
