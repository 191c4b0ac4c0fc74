"""What all parts of a simulation share, and the parts themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm.ids import PeerId, Stage
from swarm.plan.network import Job, Network
from swarm.sim.actors import Peer
from swarm.sim.clock import Clock
from swarm.sim.dice import Dice
from swarm.sim.lines import Lines
from swarm.sim.report import Settings, ThroughputReport

if TYPE_CHECKING:
    from swarm.sim.members import Members
    from swarm.sim.pipeline import Pipeline
    from swarm.sim.placing import Placing
    from swarm.sim.repair import Repair
    from swarm.sim.steps import Steps
    from swarm.sim.trainers import Trainers

NOBODY: Stage = -1
"""In a layout: this device is not used (yet)."""


class World:
    """One run. Its parts call one another: something happens to one, and others hear of it."""

    members: Members
    placing: Placing
    trainers: Trainers
    pipeline: Pipeline
    repair: Repair
    steps: Steps

    def __init__(self, network: Network, job: Job, settings: Settings, seed: int) -> None:
        self.network, self.job, self.settings, self.seed = network, job, settings, seed
        self.clock, self.lines, self.dice = Clock(), Lines(network), Dice(seed)
        self.report = ThroughputReport(
            job.microbatches, job.stages, busy_s=[0.0] * job.stages, there_s=[0.0] * job.stages,
            bin_s=settings.bin_s,
        )  # fmt: skip
        self.version = self.generation = 0
        self.peers: dict[PeerId, Peer] = {}
        """Who is up: joining, serving, draining."""
        self.stages: list[dict[PeerId, Peer]] = [{} for _ in range(job.stages)]
        """Who serves."""
        self.empty_since_s: float | None = 0.0
        """Since when some stage has nobody."""


class Part:
    """Of a world: with what it uses all the time at hand."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._network, self._job, self._settings = world.network, world.job, world.settings
        self._clock, self._lines, self._report = world.clock, world.lines, world.report
