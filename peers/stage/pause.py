"""A peer whose owner wants the device: it keeps its place in the run, and the state of its stage.

Before a pause the `StagePeer` leaves; then a `PausedPeer` says so in the directory and gives the state out.
Afterwards a new `StagePeer` starts from the state in host memory: docs/design.md, *Pausing*.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass

import torch
from msgspec.structs import replace

from peers.clock import now_s, unix_s
from peers.device import release_cached
from peers.events import Emit, Paused, Trouble
from peers.islands.directory import own_directory
from peers.owner.commands import NO_ROOM, Owner
from peers.ports import Answer, Directory, Request, Transport
from peers.stage.open_step import OpenStep
from peers.stage.server import StagePeer
from peers.stage.settings import StageSettings
from peers.stage.status import ANNOUNCE_S
from peers.status_query import TrafficStatus
from peers.storage.checkpoint_store import CheckpointStore
from peers.transfer.leases import Snapshot
from peers.transfer.server import StateLeases
from peers.transfer.spare import SPARE, Spare
from peers.voices import Voices
from peers.waiting import end_tasks, happens
from swarm.errors import DeviceHangs, Leaving, SetupError
from swarm.ids import Generation, Stage
from swarm.manifest import Run
from swarm.records import PeerRecord
from swarm.wire.messages import AskStatus, PeerStatus, pack, unpack

ABSENT = (
    *("work", "locate", "report", "directive", "summary", "run"),
    *("watch", "part", "held", "voucher"),
    *("reveal", "show", "products", "evidence", "convicted", "audit", "kept"),
)
"""What a paused peer takes no part in."""
KEEP_UP_S = 5.0
"""Between two looks for a newer saved version."""
_ANY_BYTES = 1 << 62
"""Bodies are refused unread; a limit of their size would only give another reason."""


class PausedPeer:
    """Holds the place of a peer at `stage`, with the state that it comes back with."""

    def __init__(
        self, run: Run, stage: Stage, kept: Snapshot | None, transport: Transport, directory: Directory,
        settings: StageSettings, owner: Owner,
    ) -> None:  # fmt: skip
        self._run, self._stage, self._settings = run, stage, settings
        self._transport, self._owner, self._traffic = transport, owner, TrafficStatus(transport)
        self._directory = own_directory(run, directory)
        self._since = unix_s()
        self._store = CheckpointStore(run, stage, settings.resumed_from)
        self._keep(kept)

    def _keep(self, kept: Snapshot | None) -> None:
        self.kept = kept
        self._store.pinned = dict(kept.versions) if kept else {}

    async def begin(self, spare: Spare | None, emit: Emit) -> None:
        """Take the place of the `StagePeer` that served here: from now on no caller needs it.

        `spare`: it is paused because a step takes longer with it, not (or not only) by its owner.
        """
        self.spare, self._emit = spare, emit
        for method in ABSENT:
            self._transport.serve(method, self._refuse, max_body_bytes=_ANY_BYTES)
        self._transport.serve("status", self._serve_status)
        voices = Voices(self._run, self._transport.signer, self._directory)
        StateLeases(self._run, self._transport, {self._stage: self._store}, voices=voices)
        await self._announce()

    async def until_resumed(self) -> None:
        """Return when the owner no longer needs the device, and a spare is needed; or the owner leaves."""
        keeping = asyncio.create_task(self._keep_up())
        try:
            while self._owner.paused:
                await happens(self._owner.changed, ANNOUNCE_S)
                await self._announce()
                if keeping.done():
                    keeping.result()  # a bug is told
                if self.spare is not None and await self.spare.is_needed(self._directory):
                    self._owner.resume(SPARE)
        finally:
            await end_tasks([keeping])
        if self._owner.left:
            await self._directory.withdraw()

    async def _keep_up(self) -> None:
        """Hold the newest saved version, while this is a spare."""
        while self.spare is not None:
            newer = await self.spare.newest(self.kept, self._transport, self._directory, self._emit)
            if newer is not None:
                self._keep(newer)
            await asyncio.sleep(KEEP_UP_S)

    async def _announce(self) -> None:
        settings = self._settings
        record = PeerRecord(
            peer=self._transport.peer_id, run=self._run.id, stage=self._stage, state="paused",
            version=self.kept.version if self.kept else 0, movable=settings.movable,
            max_inflight=settings.max_inflight, device=settings.device_name, addresses=settings.addresses,
            since=self._since, voucher=settings.voucher.value, machine=settings.machine,
        )  # fmt: skip
        if self.spare is not None:  # others judge by what it measured whether it is needed
            was = self.spare.record
            record = replace(record, spare=True, speed=was.speed, bandwidth_bps=was.bandwidth_bps)
            record = replace(record, state_bytes=was.state_bytes)
        await self._directory.announce(record)

    async def _refuse(self, request: Request) -> Answer:
        why = "its owner wants the device" if self.spare is None else "a step takes longer with it"
        raise Leaving(f"this peer is paused: {why}")

    async def _serve_status(self, request: Request) -> Answer:
        run = self._run
        asked = unpack(request.header, AskStatus, run.id, run.whole.id).run
        stage = self._stage if asked == run.id else run.cell(self._stage)
        traffic = self._traffic.now()
        status = PeerStatus(
            peer=self._transport.peer_id, stage=stage, state="paused", since=self._since,
            up_s=now_s() - self._settings.started_at,
            generation=self.kept.generation if self.kept else Generation(),
            version=self.kept.version if self.kept else 0, device=self._settings.device_name,
            bytes_in=traffic.bytes_in, bytes_out=traffic.bytes_out,
            rebalance=f"paused: {self.spare.why}" if self.spare is not None else "",
        )  # fmt: skip
        return Answer(pack(status))


@dataclass(eq=False)
class PeerLife:
    """A peer on one device: it serves `stage`, then those that it moves to, with the pauses of its owner."""

    stage: Stage
    owner: Owner
    build: Callable[[Stage, Snapshot | None], Awaitable[StagePeer]]
    """Makes what serves a stage, from the state of before a pause if there is one."""
    hold: Callable[[Stage, Snapshot | None], PausedPeer]
    """Makes what keeps its place meanwhile."""
    _: KW_ONLY
    place: Callable[[Stage], str]
    """Names a stage."""
    device: str
    emit: Emit
    _kept: Snapshot | None = None
    _spare: Spare | None = None
    _alone: bool = False
    _resumes: bool = False
    """It had this stage before a pause: if the device has no room for it now, it stays paused."""
    _longest_s: float = 0.0
    """Of the device's jobs in all its stages: a slow one that resumes is not taken for hung."""
    _upload_bps: float = 0.0
    """As its reduces measured it: a peer that resumes or moves asks again whether it is slow."""
    _met: OpenStep | None = None
    """The stage's last meeting: other islands may still need what this one has changed."""

    async def run(self) -> None:
        """Return when the owner had it leave.

        Raises:
            DeviceHangs: also instead of a pause. The owner is told.
        """
        while not self.owner.left:
            if self.owner.paused:
                await self._pause()
            elif not await self._serve():
                return

    async def _pause(self) -> None:
        """Keep the place until the owner has it resume or leave."""
        self._resumes = True
        holder = self.hold(self.stage, self._kept)
        await holder.begin(self._spare, self.emit)
        gc.collect()  # tensors that only a circle of references holds are on the device all the same
        release_cached(self.device)
        kept = self._kept or Snapshot(version=-1, tensors={})
        paused = Paused(
            stage=self.stage, version=kept.version, why=self.owner.why, alone=self._alone,
            host_bytes=sum(tensor.nbytes for tensor in kept.tensors.values()),
        )  # fmt: skip
        self.emit(paused)
        self.owner.does("paused", paused.words().replace(f"stage {self.stage}", self.place(self.stage)))
        await holder.until_resumed()
        self._kept, self._spare = holder.kept, None

    async def _serve(self) -> bool:
        """Serve the stage until the peer pauses, moves or leaves; whether it goes on after that."""
        self.owner.does("serving", f"serves {self.place(self.stage)}, or is about to")
        try:
            peer = await self.build(self.stage, self._kept)
        except SetupError as error:
            if not self._resumes:
                raise
            self._stay_paused(error.text)
            return True
        self._kept = None
        try:
            await self._run(peer)
        except torch.OutOfMemoryError as error:
            if not self._resumes or peer.has_joined:
                raise
            self._kept = peer.kept
            self._stay_paused(f"stage {self.stage} does not fit on {self.device} now: {error}")
            return True
        if peer.moving_to is not None:
            self.stage, self._resumes, self._met = peer.moving_to, False, None
            return True
        if peer.paused:
            self._kept, self._alone, self._spare, self._resumes = peer.kept, peer.alone, peer.spare, True
            if peer.spare is not None:
                self.owner.pause(SPARE, peer.spare.why)
        return peer.paused

    async def _run(self, peer: StagePeer) -> None:
        device, reduces = peer.core.device, peer.all_reduce
        device.longest_s, reduces.bandwidth_bps = self._longest_s, self._upload_bps
        peer.core.met = self._met
        self.owner.serves(peer)
        try:
            await peer.run()
        except DeviceHangs as error:
            self.owner.does("leaving", error.text)
            raise
        finally:
            self.owner.serves(None)
            self._longest_s, self._upload_bps = device.longest_s, reduces.bandwidth_bps
            self._met = peer.core.met

    def _stay_paused(self, why: str) -> None:
        # Another program has the memory now. What this peer has done so far is not lost for that.
        self.emit(Trouble(text=f"this peer cannot resume: {why}. It stays paused: swarm resume tries again"))
        self.owner.pause(NO_ROOM, "the device has no room")
