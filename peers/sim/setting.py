"""What a seed says of a swarm before anything fails."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache

from peers.islands.directory import split_cell
from peers.sim.dice import Dice
from peers.sim.lines import Lines
from peers.sim.network import SimSigner
from swarm.ids import PeerId, Stage
from swarm.manifest import AdmissionSpec, IslandsSpec, Run, audit_run
from swarm.merkle import Tree
from swarm.protocol.voice import Worked, vouch
from swarm.records import Voucher


def dice_of(seed: int, purpose: str) -> Dice:
    """Chance for one purpose: what is drawn for it changes nothing of the others."""
    return Dice(int.from_bytes(hashlib.sha256(f"{seed} {purpose}".encode()).digest()[:8], "big"))


@lru_cache(maxsize=8)
def tree_of_zeros(size: int) -> Tree:
    """Over `size` bytes, each of them zero: the tokens that simulated trainers have."""
    return Tree.over(lambda start, end: bytes(end - start), size)


CROWDS, UNLEVEL, STORED = 0.03, 0.02, 0.12
"""Shares of all seeds."""
CHECKED = 0.6
"""Share of those in which sums are exact, and so are checked."""
ROUNDED = 0.5
"""Share of those that round gradients, where updates are not delayed."""
BYTES_PER_S = (1e6, 1e6, 1e6, 3e4, 1e4)
"""Of a line. The slowest one carries a report or a directive in 20 to 60 ms."""
ADMITTING = 0.25
"""Share of the seeds whose manifest names the trainers, and the root of the data."""
ISLANDS = 1 / 3
"""Share of the seeds whose run has several islands, of those with neither a crowd nor movable peers."""
WARMING = 0.25
"""Share of the seeds with a batch warm-up, where it can be."""
TRAINERS = tuple("12D3KooW" + letter * 44 for letter in "ABCDEFGHJKLMNPQRSTUVWXYZ")
"""Their names then: of the form of peer ids."""


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
    dice: Dice
    """For those that come later."""
    disks: str = "none"
    """Peers have: "none", one each ("own"), or one for all ("shared")."""
    only_last: bool = False
    """They save the run's last version only, and start from nothing, as without --checkpoint-dir."""
    keeper: bool = False
    job_s: tuple[float, ...] = (0.005, 0.01, 0.04)
    """What a forward or backward may take, by peer."""
    faults_within_s: float = 3.0
    """Without faults a run takes about so long."""
    movable: bool = False
    """Peers go where the rebalancer sends them."""
    crowd: bool = False
    """Vectors travel in chunks of one element, and replicas leave together."""
    parts: bool = False
    """Each island adds up a part for all, however few they are."""
    with_voucher: float = 0.6
    """Share of the peers that come with a voucher, where the manifest names the trainers."""

    def voucher_of(self, peer: PeerId, stage: Stage) -> Voucher | None:
        """What a peer of a stage, or cell, brings along in a run that names its trainers."""
        trainers, dice = self.run.admission.trainers, dice_of(self.seed, f"voucher of {peer}")
        if not trainers or not dice.chance(self.with_voucher):
            return None
        steps = dice.pick((20, 50, 100))
        run, _ = split_cell(self.run, stage)
        return vouch(SimSigner(trainers[0]), run.id, Worked(peer, steps, 0, steps))

    @property
    def has(self) -> set[str]:
        """What kinds of faults may need."""
        disks = self.keeper or self.disks != "none"
        islands = self.run.islands.count > 1
        there = {
            "peers": True, "disks": disks, "keeper": self.keeper, "crowd": self.crowd, "islands": islands,
        }  # fmt: skip
        return {name for name, has in there.items() if has}


def setting_of(seed: int, *, admitting: float = ADMITTING) -> Setting:
    """The swarm of a seed: of four kinds."""
    dice, kind = dice_of(seed, "kind"), dice_of(seed, "kinds").number()
    setting = usual(seed, admitting)
    if kind < CROWDS + UNLEVEL and setting.run.S > 1:
        return _warming(_crowded(setting, dice) if kind < CROWDS else _unlevel(setting, dice))
    setting = _stored(setting, dice) if kind < CROWDS + UNLEVEL + STORED else setting
    islands = dice_of(seed, "islands")
    return _of_islands(setting, islands) if islands.chance(ISLANDS) else _warming(setting)


def usual(seed: int, admitting: float = ADMITTING) -> Setting:
    """No disks, fast devices, a few steps."""
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
    if dice_of(seed, "admission").chance(admitting):
        root = tree_of_zeros(run.data.tokens).root.hex()
        run = replace(run, admission=AdmissionSpec(trainers=TRAINERS), data=replace(run.data, root=root))
        if dice_of(seed, "checked sums").chance(CHECKED):
            # Means of two or four whole numbers are exact in float32, too.
            run = replace(_longer(run, steps=run.steps, microbatches=2 * (run.M - 1)), dtype="float32")
            if not run.delayed_updates and dice_of(seed, "rounded sums").chance(ROUNDED):
                run = replace(run, codec=replace(run.codec, reduce="rounded16"))
    bad = dice.pick((0.0, 0.0, 0.01, 0.04))
    return Setting(
        seed=seed,
        run=run,
        lines=Lines(
            most_s=dice.pick((0.01, 0.03, 0.06)),
            bytes_per_s=dice_of(seed, "bandwidth").pick(BYTES_PER_S),
            lost=bad,
            doubled=2 * bad,
            late=bad,
        ),
        tied=run.S > 1 and dice_of(seed, "tied weights").chance(1 / 3),
        window=dice.pick((None, 1, 2, 4)),
        names=dice.shuffled([f"p{i:02}" for i in range(60)]),
        first_peers=[dice.pick((1, 2, 2, 2, 3)) for _ in range(run.S)],
        first_trainers=dice.pick((1, 1, 2)),
        dice=dice,
    )


def _stored(setting: Setting, dice: Dice) -> Setting:
    """Peers save checkpoints, or a keeper does."""
    disks = dice.pick(("none", "own", "own", "shared"))
    run = replace(setting.run, steps=4, checkpoint_every=dice.pick((1, 1, 2)))
    return replace(
        setting, run=run, disks=disks, only_last=dice.chance(0.15), job_s=(0.1, 0.2, 0.3),
        keeper=disks == "none" or dice.chance(0.3), faults_within_s=8.0,
    )  # fmt: skip


def _crowded(setting: Setting, dice: Dice) -> Setting:
    """A full stage 0, slow devices, bad lines: duplicates, and peers that leave while they have sums."""
    run = _longer(setting.run, steps=3, microbatches=8)
    return replace(
        setting, run=run, crowd=True, window=dice.pick((2, 4)),
        lines=Lines(most_s=0.05, lost=0.01, doubled=0.1, late=0.05),
        first_peers=[dice.pick((4, 5)), *[1] * (run.S - 1)], first_trainers=dice.pick((2, 3)),
        job_s=(0.05, 0.1, 0.3), faults_within_s=8.0,
    )  # fmt: skip


def _unlevel(setting: Setting, dice: Dice) -> Setting:
    """One stage has too many peers, and the rebalancer decides often."""
    run = replace(_longer(setting.run, steps=5, microbatches=4), rebalance_every_s=dice.pick((1, 2)))
    return replace(
        setting, run=run, window=None, job_s=(0.1, 0.15, 0.2), faults_within_s=6.0, movable=True,
        first_peers=dice.shuffled([dice.pick((4, 5)), *[1] * (run.S - 1)]),
    )  # fmt: skip


def _warming(setting: Setting) -> Setting:
    """Perhaps the first steps have fewer microbatches."""
    run, dice = setting.run, dice_of(setting.seed, "batch warm-up")
    if setting.tied or not dice.chance(WARMING):
        return setting
    first = 1 + int(dice.number() * (run.M - 1))
    batch = replace(run.batch, warmup_steps=run.steps, warmup_microbatches=first)
    return replace(setting, run=replace(run, batch=batch))


def _of_islands(setting: Setting, dice: Dice) -> Setting:
    """Two or three islands that meet once or twice: all weights then count all islands' microbatches."""
    count, local_steps = dice.pick((2, 2, 2, 3)), dice.pick((1, 1, 2))
    window = local_steps + 1
    run = _longer(setting.run, steps=dice.pick((1, 2, 2)) * window, microbatches=count * dice.pick((1, 2)))
    run = replace(
        run,
        delayed_updates=False,
        codec=replace(run.codec, reduce="none"),
        checkpoint_every=window * bool(run.checkpoint_every),
        islands=IslandsSpec(count=count, local_steps=local_steps, outer_lr=1.0, outer_momentum=0.0),
    )
    return replace(
        setting, run=run, first_peers=[dice.pick((1, 2, 2)) for _ in range(run.cells)], first_trainers=1,
        parts=not dice.chance(0.7),
    )  # fmt: skip


def _longer(run: Run, *, steps: int, microbatches: int) -> Run:
    return replace(run, steps=steps, batch=replace(run.batch, microbatches_per_step=microbatches))
