"""Hundreds of real `NetDirectory`s in one event loop: our nodes of the DHT, without p2pd between.

Time is virtual, so that a loaded machine changes nothing: waiting costs none, and what passes in a minute is
known in seconds.

    pytestmark = pytest.mark.virtual_time

    async with MemoryDht() as dht:
        first = await dht.add(0)
        other = await dht.add(1, join=first)
        await dht.kill(first)
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from peers.net.dht_protocol import DhtNode, read_request
from peers.net.directory import NetDirectory
from peers.net.identity import Identity
from peers.net.p2pd_control import CallHandler, ControlError
from peers.record_table import RecordTable
from peers.sim.loop import VirtualLoop
from swarm.ids import PeerId, Stage
from swarm.records import PeerRecord

RUN = "f" * 32

_wrong_clock: contextvars.ContextVar[Clock | None] = contextvars.ContextVar("wrong_clock", default=None)
"""Of the node that is at work."""


@dataclass
class Clock:
    """How far the clock of one machine is ahead of the others'."""

    ahead_s: float = 0.0


class MachinesLoop(VirtualLoop):
    """Virtual time on machines whose clocks differ."""

    def unix_s(self) -> float:
        wrong = _wrong_clock.get()
        return super().unix_s() + (wrong.ahead_s if wrong is not None else 0.0)


class MemoryControl:
    """What a node of the DHT needs of its p2pd."""

    def __init__(self, dht: MemoryDht, peer_id: PeerId) -> None:
        self._dht = dht
        self._peer_id = peer_id
        self.handler: CallHandler | None = None

    async def serve_calls(self, handler: CallHandler) -> None:
        """As `DaemonControl.serve_calls`."""
        self.handler = handler

    async def call_peer(self, peer: PeerId, data: bytes) -> bytes:
        """A call, counted by what it asks at both ends."""
        other = self._dht.nodes.get(peer)
        if other is None or peer in self._dht.dead:
            raise ControlError("cannot be reached")
        await asyncio.sleep(0)
        if peer in self._dht.hung:
            await asyncio.get_running_loop().create_future()
        mine = _wrong_clock.set(other.clock)
        try:
            assert other.control.handler is not None
            answer = await other.control.handler(data, self._peer_id)
        finally:
            _wrong_clock.reset(mine)
        kind = type(read_request(data))
        self._dht.calls[kind] += 1
        self._dht.bytes[kind] += len(data) + len(answer)
        return answer

    async def connect(self, peer: PeerId, addresses: Sequence[str], limit_s: float) -> None:
        """As `DaemonControl.connect`."""
        if peer not in self._dht.nodes or peer in self._dht.dead:
            raise ControlError("cannot be reached")


@dataclass(frozen=True)
class MemoryNode:
    """One node of it."""

    identity: Identity
    control: MemoryControl
    directory: NetDirectory
    clock: Clock

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    @property
    def node(self) -> DhtNode:
        """What it keeps for others."""
        return self.directory.storage.node

    def forget_nodes(self, *others: MemoryNode) -> None:
        """As after a long cut; all nodes, if none is named."""
        gone, table = {other.peer_id for other in others}, self.node.table
        for uid in [uid for uid, peer in table.uid_to_peer_id.items() if peer in gone or not gone]:
            del table[uid]

    def forget_records(self) -> None:
        """It knows no record but its own."""
        directory = self.directory
        directory._table = directory.reader._table = RecordTable(self.peer_id)
        directory._set_own(directory._own)


class MemoryDht:
    """The nodes, and what passed between them."""

    def __init__(self) -> None:
        self.nodes: dict[PeerId, MemoryNode] = {}
        self.dead: set[PeerId] = set()
        self.hung: set[PeerId] = set()
        """They never answer."""
        self.calls: Counter[type] = Counter()
        self.bytes: Counter[type] = Counter()

    async def add(
        self, number: int, *, run_id: str | None = RUN, join: MemoryNode | Sequence[MemoryNode] = (),
        ahead_s: float = 0.0, **options: Any,
    ) -> MemoryNode:  # fmt: skip
        """A node of its own number, joined at others, on a machine whose clock is that far ahead.

        One that was killed may come back.
        """
        identity = Identity(number.to_bytes(32, "big"))
        control: Any = MemoryControl(self, identity.peer_id)
        joined = [join] if isinstance(join, MemoryNode) else join
        addresses = [f"/ip4/127.0.0.1/tcp/1/p2p/{other.peer_id}" for other in joined]
        self.dead.discard(identity.peer_id)
        directory = NetDirectory(control, identity, run_id, join=addresses, **options)
        node = self.nodes[identity.peer_id] = MemoryNode(identity, control, directory, Clock(ahead_s))
        mine = _wrong_clock.set(node.clock)
        try:
            await directory.start()
        finally:
            _wrong_clock.reset(mine)
        return node

    async def kill(self, node: MemoryNode) -> None:
        """From one moment to the next it is not there any more."""
        self.dead.add(node.peer_id)
        await node.directory.close()

    async def __aenter__(self) -> MemoryDht:
        return self

    async def __aexit__(self, *_: object) -> None:
        for node in self.nodes.values():
            await node.directory.close()


def record(node: MemoryNode, stage: Stage = 0, version: int = 0, **changes: Any) -> PeerRecord:
    """What a node may announce."""
    fields = {"peer": node.peer_id, "run": RUN, "stage": stage, "state": "serving", "version": version}
    return PeerRecord(**(fields | changes))
