"""One peer without a network: a test answers its calls, and looks at its parts from inside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from peers.events import Event
from peers.ports import Answer, Buffer, NetworkPath
from peers.sim.device import SimDevice
from peers.sim.dice import Dice
from peers.sim.network import SimSigner
from peers.stage.server import StagePeer
from peers.stage.settings import StageSettings
from swarm.errors import PeerGone
from swarm.ids import PeerId, Stage
from swarm.manifest import Run
from swarm.model.stage import StageCompute
from swarm.records import PeerRecord
from swarm.wire.messages import pack

JOB_S = 0.02
Said = Callable[[PeerId, bytes], msgspec.Struct]
"""What a peer answers to a header; it may raise."""


class Line:
    """Fulfils `peers.ports.Transport`: a method without an answer in `answers` reaches nobody."""

    def __init__(self, peer_id: PeerId = "me") -> None:
        self.peer_id = peer_id
        self.signer = SimSigner(peer_id)
        self.answers: dict[str, Said] = {}
        self.calls: Counter[str] = Counter()
        self.handlers: dict[str, Any] = {}
        self.lines: dict[PeerId, NetworkPath] = {}

    def serve(self, method: str, handler: Any, *, max_body_bytes: int = 0) -> None:
        self.handlers[method] = handler

    async def call(
        self, peer: PeerId, method: str, header: bytes, body: Sequence[Buffer] = (), **_: Any
    ) -> Answer:
        self.calls[method] += 1
        if method not in self.answers:
            raise PeerGone(peer, "cannot be reached")
        return Answer(pack(self.answers[method](peer, header)))


class Records:
    """Fulfils `peers.ports.Directory`: what a test puts into `known`."""

    lag_s = 0.0

    def __init__(self) -> None:
        self.known: list[PeerRecord] = []
        self.own: list[PeerRecord] = []

    def watch(self, stages: Collection[Stage] | None) -> None:
        """All is seen."""

    def peers(self) -> Sequence[PeerRecord]:
        return self.known

    def at(self, stage: Stage) -> Sequence[PeerRecord]:
        return [record for record in self.known if record.stage == stage]

    def find(self, peer: PeerId) -> PeerRecord | None:
        return next((record for record in self.known if record.peer == peer), None)

    async def refresh(self, stages: Collection[Stage] | None = None) -> Sequence[PeerRecord]:
        return self.known

    async def lookup_all(self) -> Sequence[PeerRecord]:
        return self.known

    async def announce(self, record: PeerRecord) -> None:
        self.own.append(record)

    async def withdraw(self) -> None:
        self.own.append(msgspec.structs.replace(self.own[-1], state="left"))


class Alone:
    """A stage peer that has joined with version 0, and nobody around it."""

    def __init__(self, run: Run, stage: Stage = 0, compute: StageCompute | None = None) -> None:
        self.run, self.line, self.records = run, Line(), Records()
        self.events: list[Event] = []
        self.peer = StagePeer(
            run, stage, compute or StageCompute(run, stage), self.line, self.records,  # type: ignore[arg-type]
            StageSettings(max_inflight=8), self.events.append, device=SimDevice(Dice(1), JOB_S),
        )  # fmt: skip
        self.core = self.peer.core

    async def opened(self) -> Alone:
        """With its first step open."""
        self.core.device.start()
        self.core.joined = True
        await self.core.open_steps()
        return self

    def sum(self, t: int = 0) -> list[float]:
        """A step's sum as it is now."""
        return self.core.compute.sums.of(t).tolist()
