"""A swarm of the classes that ship: its processes on one loop, what they say, and what must hold of them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from peers import events
from peers.islands.directory import split_cell
from peers.islands.trainers import IslandTrainers
from peers.owner.commands import Owner
from peers.sim.device import SimDevice
from peers.sim.directory import Dht, SimDirectory
from peers.sim.disks import Disk, Disks
from peers.sim.invariants import Invariants, Violation
from peers.sim.loop import PROCESS, WORLD, Process, VirtualLoop
from peers.sim.network import Network, SimTransport
from peers.sim.setting import Setting, dice_of, tree_of_zeros
from peers.stage.pause import PausedPeer, PeerLife
from peers.stage.server import StagePeer
from peers.stage.settings import Checkpoints, StageSettings
from peers.trainer import TrainerSettings
from peers.transfer.keeper import CheckpointKeeper, KeepingSettings
from peers.transfer.leases import Snapshot
from swarm.data import prove_samples, token_dtype
from swarm.errors import SwarmError
from swarm.ids import PeerId, Stage
from swarm.manifest import Run
from swarm.model.gradient_sum import Gradients, SumLost
from swarm.model.stage import StageCompute

M = TypeVar("M")

THREAD_S = (0.0002, 0.003)
"""How long a job of a worker thread takes."""


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
            raise SumLost(f"the sum of step {t} is lost")
        super().add(found)


class Member(msgspec.Struct, eq=False):
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


class Swarm:
    """Makes members, ends them, and finds those that a fault can hit."""

    def __init__(self, setting: Setting, trace: Callable[[str], None] | None) -> None:
        self.setting, self.run, self.dice, self._trace = setting, setting.run, setting.dice, trace
        self._digest = hashlib.sha256()
        self._threads = dice_of(setting.seed, "threads")
        self.loop = VirtualLoop(self._thread_s)
        self.network = Network(self.loop, dice_of(setting.seed, "the network"), setting.lines, trace=self.say)
        self.dht = Dht(self.loop, dice_of(setting.seed, "the directory"))
        self.checks = Invariants(self.run, tied=setting.tied)
        self.peers: list[PeerMember] = []
        self.trainers: list[TrainerMember] = []
        self.keepers: list[KeeperMember] = []
        self.disks = Disks()
        if setting.disks == "shared":
            self.disks.add()
        self.violation = ""
        self.injected: Counter[str] = Counter()
        """Faults that happened."""
        self.undone = 0
        self.points: dict[str, list[tuple[int, Callable[[Process], None]]]] = {}
        """What happens to the process that is the so-many-th to pass each, from now on."""

    def _thread_s(self) -> float:
        process = PROCESS.get()
        slow_s = process.slow_s * self._threads.number() if process and process.slow_s else 0.0
        return self._threads.between(*THREAD_S) + slow_s

    # -- the timeline -----------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """One line of the timeline, with folders named as they are in each replay."""
        line = f"{self.loop.now_s:9.3f}  {text}".replace(str(self.disks.root), "")
        self._digest.update(line.encode())
        if self._trace is not None:
            self._trace(line)

    @property
    def digest(self) -> str:
        """Of the timeline so far."""
        return self._digest.hexdigest()[:16]

    def check(self, invariant: Callable[..., None], *args: object) -> None:
        """Note the first violation of an invariant."""
        try:
            invariant(*args)
        except Violation as violation:
            self.violation = self.violation or str(violation)

    def convicts(self, accused: PeerId, why: str) -> None:
        """All are honest here: none of them may be taken for a liar."""
        self.violation = self.violation or f"honesty: {accused} is left out: {why}"

    def _heard(self, member: Member, event: events.Event) -> None:
        self.say(f"{member.name}: {event.words()}")
        if isinstance(event, events.StepDone) and event.loss is not None:
            self.check(self.checks.loss, member.name, event.t, event.loss, event.losses)
        if isinstance(event, events.Undone):
            self.undone += event.count

    # -- peers ------------------------------------------------------------------------------------

    def add_peer(self, stage: Stage, disk: Disk | None = None) -> PeerMember:
        """A new process that serves `stage` (of several islands the cell), on the disk of one before it or as
        the setting says.
        """
        process = Process(self.setting.names[len(self.peers)])
        if self.setting.disks != "none":
            disk = disk or (self.disks.all[0] if self.setting.disks == "shared" else self.disks.add())
            self.disks.mount(process.name, disk)
        member = PeerMember(
            process, self.network.add(process),
            SimDirectory(self.dht, process, self.setting.voucher_of(process.name, stage)), Owner(),
            job_s=self.dice.pick(self.setting.job_s), stage=stage, disk=disk,
        )  # fmt: skip
        settings = StageSettings(
            max_inflight=self.dice.pick((1, 2, 4)), joined_at=self.loop.unix_s() + self.dice.between(0, 0.01),
            movable=self.setting.movable,
            checkpoints=Checkpoints(folder=disk.folder, only_last=self.setting.only_last) if disk else None,
        )  # fmt: skip
        self.peers.append(member)
        process.start(self.loop, self._serve(member, settings))
        return member

    async def _serve(self, member: PeerMember, settings: StageSettings) -> None:
        emit = partial(self._heard, member)

        async def build(stage: Stage, kept: Snapshot | None) -> StagePeer:
            run, in_island = split_cell(self.run, stage)
            compute = AuditCompute(run, in_island, tied=self.setting.tied)
            device = SimDevice(self.network.dice, member.job_s)
            peer = StagePeer(
                run, in_island, compute, member.transport, member.directory, settings, emit, kept=kept,
                device=device,
            )  # fmt: skip
            member.serving, member.stage = Serving(peer, compute, device), stage
            member.transport.on_gone = peer.peer_gone
            self._watch_weights(member, compute)
            return peer

        def hold(stage: Stage, kept: Snapshot | None) -> PausedPeer:
            member.serving, member.transport.on_gone = None, None
            return PausedPeer(
                *split_cell(self.run, stage), kept, member.transport, member.directory, settings, member.owner
            )

        names = self.run.place
        life = PeerLife(member.stage, member.owner, build, hold, place=names, device="cpu", emit=emit)
        await self._live(member, life.run())

    def _watch_weights(self, member: PeerMember, compute: AuditCompute) -> None:
        """Look at the weights whenever they change."""

        apply, load_state, complete = compute.apply, compute.load_state, compute.shared.complete
        holds = partial(self.check, self.checks.holds, member.name, compute)

        def applied(t: int, *args: Any) -> None:
            self._note_prepared()
            self.check(self.checks.takes, member.name, member.stage, t, member.served.peer.core.generation)
            apply(t, *args)
            holds()

        def loaded(*args: Any) -> None:
            load_state(*args)
            holds()

        compute.apply, compute.load_state = applied, loaded  # type: ignore[method-assign]

        def completed(reduced: torch.Tensor, shared: Mapping[Stage, torch.Tensor]) -> torch.Tensor:
            for other, part in {compute.stage: reduced, **shared}.items():
                self.check(self.checks.part, member.name, compute.run.number, compute.stage, other, part)
            return complete(reduced, shared)

        compute.shared.complete = completed  # type: ignore[method-assign]

    # -- trainers ---------------------------------------------------------------------------------

    def add_trainer(self) -> TrainerMember:
        named, number = self.run.admission.trainers, len(self.trainers)
        process = Process(named[number] if named else f"t{number}")
        trainer = IslandTrainers(
            self.run, Zeros(self.run), self.network.add(process), SimDirectory(self.dht, process),
            TrainerSettings(window=self.setting.window), lambda event: self._heard(member, event),
        )  # fmt: skip
        member = TrainerMember(process, trainer)
        self.trainers.append(member)
        process.start(self.loop, self._train(member))
        return member

    async def _train(self, member: TrainerMember) -> None:
        await self._live(member, member.trainer.run())
        self.say(f"{member.name} goes home")

    # -- keepers ----------------------------------------------------------------------------------

    def add_keeper(self, disk: Disk | None = None) -> KeeperMember:
        """A new process that keeps checkpoints, on the disk of one before it or on its own."""
        process = Process(f"k{len(self.keepers)}")
        transport = self.network.add(process)
        member = KeeperMember(process, disk or self.disks.add())
        self.disks.mount(process.name, member.disk)
        keeper = CheckpointKeeper(
            self.run, transport, SimDirectory(self.dht, process),
            KeepingSettings(folder=member.disk.folder, joined_at=self.loop.unix_s()),
            partial(self._heard, member),
        )  # fmt: skip
        transport.on_gone = keeper.leases.gone
        self.keepers.append(member)
        process.start(self.loop, self._live(member, keeper.run()))
        return member

    async def _live(self, member: Member, life: Awaitable[None]) -> None:
        """A life that ends with an error of ours is told as a user is told of it: only a dead device may."""
        try:
            await life
        except (SwarmError, torch.AcceleratorError) as error:
            self.say(f"{member.name} ends: {error}")
            if not (isinstance(member, PeerMember) and member.serving and member.serving.device.dies):
                self.violation = self.violation or f"end: {member.name}: {error}"
        self.network.kill(member.name, quietly=False)  # a process that ends takes its connections along

    # -- those that a fault can hit ---------------------------------------------------------------

    def members(self) -> list[Member]:
        """All processes that ever were."""
        return [*self.peers, *self.trainers, *self.keepers]

    def pick(self, members: Sequence[M], which: float) -> M | None:
        """One of them; None if there is none."""
        return members[int(which * len(members))] if members else None

    def living(self) -> list[PeerMember]:
        """Peers that serve or pause."""
        return [m for m in self.peers if m.alive]

    def staying(self) -> Counter[Stage]:
        """The number of peers that serve each stage, and mean to."""
        return Counter(m.stage for m in self.peers if m.stays)

    def safe(self) -> list[PeerMember]:
        """Peers whose stage keeps a replica without them."""
        there = self.staying()
        return [m for m in self.living() if m.serving and there[m.stage] > m.stays]

    def kill(self, member: Member, *, quietly: bool = False) -> None:
        """End a process; `quietly`: no other process is told."""
        told = ", and no other is told" if quietly else ""
        of = f" of stage {member.stage}" if isinstance(member, PeerMember) else ""
        self.say(f"*** {member.name}{of} dies{told}")
        self.network.kill(member.name, quietly=quietly)

    def restart(self, member: PeerMember | KeeperMember, after_s: float) -> None:
        """Kill a process that comes back, under another name, with what is on its disk."""
        self.kill(member)
        if isinstance(member, PeerMember):
            self.loop.call_later(after_s, self.add_peer, member.stage, member.disk, context=WORLD)
        else:
            self.loop.call_later(after_s, self.add_keeper, member.disk, context=WORLD)

    # -- fault points -----------------------------------------------------------------------------

    def at_point(self, point: str, time: int, happens: Callable[[Process], None]) -> None:
        """Have something happen to the process that is the `time`-th to pass a point from now on."""
        self.points.setdefault(point, []).append((time, happens))

    def pass_point(self, point: str) -> None:
        """A process passes a fault point: it may die there, between two instructions."""
        waiting, process = self.points.get(point), PROCESS.get()
        if point == "prepared":
            self._note_prepared()
        if not waiting or process is None:
            return
        (time, happens), *rest = waiting
        if time > 1:
            self.points[point] = [(time - 1, happens), *rest]
        else:
            self.points[point] = rest
            happens(process)

    def _note_prepared(self) -> None:
        cores = [(m.stage, m.serving.peer.core) for m in self.peers if m.serving]  # those of the dead as well
        for cell, core in cores:
            held = [t for t, step in core.steps.items() if step.prepared]
            self.checks.prepared.update((cell, t, core.generation) for t in held)
