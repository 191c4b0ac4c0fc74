"""The processes of a simulated swarm, each as its faults see it, and the stage that they compute."""

from __future__ import annotations

import msgspec
import numpy as np

from peers.islands.trainers import IslandTrainers
from peers.owner.commands import Owner
from peers.sim.device import SimDevice
from peers.sim.directory import SimDirectory
from peers.sim.disks import Disk
from peers.sim.loop import Process
from peers.sim.network import SimTransport
from peers.sim.setting import tree_of_zeros
from peers.stage.server import StagePeer
from swarm.data import prove_samples, token_dtype
from swarm.ids import PeerId, Stage
from swarm.manifest import Run
from swarm.model.gradient_sum import Gradients, SumLost
from swarm.model.stage import StageCompute


class Zeros:
    """Data for the audit model, whose result does not depend on it."""

    def __init__(self, run: Run) -> None:
        shape = (run.batch.microbatch_size, run.data.sequence_length + 1)
        self._batch = np.zeros(shape, dtype=token_dtype(run.model.vocab_size))

    def batch(self, offsets: list[int]) -> np.ndarray:
        return self._batch

    def prove(self, run: Run, offsets: list[int]) -> bytes:
        return prove_samples(run, tree_of_zeros(run.data.tokens), offsets)


class AuditCompute(StageCompute):
    """A stage of the audit model, whose additions may be told to break.

    `tied`: the weights of the first stage are those of the last one as well, and each adds to both.
    """

    breaks = 0

    def __init__(self, run: Run, stage: Stage, *, tied: bool = False) -> None:
        super().__init__(run, stage)
        ends = {0, run.S - 1}
        if tied and stage in ends and len(ends) == 2:
            (other,) = ends - {stage}
            self.shared.names = {other: tuple(self.layout.terms)}

    def rehearse(self) -> str:
        """All devices here are of one kind."""
        return f"{self.stage:032x}"

    def add(self, found: Gradients) -> None:
        t = found.mb.t
        if self.breaks:
            self.sums.of(t).zero_()
            self.breaks -= 1
            raise SumLost(f"the sum of step {t} is lost", t=t)
        super().add(found)


class Member(msgspec.Struct, eq=False):
    """One process."""

    process: Process

    @property
    def name(self) -> PeerId:
        return self.process.name

    @property
    def alive(self) -> bool:
        return self.process.alive and self.process.main is not None and not self.process.main.done()


class Serving(msgspec.Struct, eq=False):
    """What serves a stage, until it pauses or moves."""

    peer: StagePeer
    compute: AuditCompute
    device: SimDevice


class PeerMember(Member, eq=False):
    """One that serves a stage, or pauses."""

    transport: SimTransport
    directory: SimDirectory
    owner: Owner
    job_s: float
    stage: Stage
    serving: Serving | None = None
    """None: it pauses."""
    disk: Disk | None = None
    told_to_leave: bool = False

    @property
    def served(self) -> Serving:
        """That of a peer which serves."""
        assert self.serving is not None
        return self.serving

    @property
    def stays(self) -> bool:
        """It serves, and means to."""
        serving = self.serving
        if not self.alive or serving is None or not serving.peer.core.joined:
            return False
        going = self.told_to_leave or serving.peer.core.leaving or serving.peer.moving.going
        return not (going or serving.device.hangs or serving.device.dies)


class TrainerMember(Member, eq=False):
    trainer: IslandTrainers


class KeeperMember(Member, eq=False):
    disk: Disk
