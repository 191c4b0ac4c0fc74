"""Hundreds of real `NetDirectory`s in one event loop: hivemind's DHT and our protocol, without p2pd between.

Time is virtual, so that a loaded machine changes nothing: waiting costs none, and what passes in a minute is
known in seconds.

    with virtual_time() as loop: loop.run_until_complete(...)

    async with MemoryDht() as dht:
        first = await dht.add(0, run_id=RUN)
        other = await dht.add(1, run_id=RUN, join=first)
        dht.dead.add(first.peer_id)
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import hivemind.dht.protocol as protocol_module
import hivemind.utils.timed_storage as timed_storage

from peers.net import dht_protocol
from peers.net._hivemind import P2PContext, PeerID
from peers.net.directory import NetDirectory
from peers.net.identity import Identity
from peers.net.p2pd_control import ControlError
from peers.sim.loop import VirtualLoop
from swarm.ids import PeerId

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


@contextlib.contextmanager
def virtual_time() -> Iterator[MachinesLoop]:
    """A loop whose clock is that of the directory, of its protocol and of hivemind's storage as well."""
    loop = MachinesLoop()
    with contextlib.ExitStack() as patches:
        for module in (timed_storage, protocol_module, dht_protocol):
            patches.enter_context(patch.object(module, "get_dht_time", loop.unix_s))
        try:
            yield loop
        finally:
            loop.close()


class MemoryP2P:
    """What hivemind's DHT needs of a p2pd, which is also what joining needs of its control."""

    def __init__(self, dht: MemoryDht, peer_id: PeerId) -> None:
        self._dht = dht
        self.peer_id = PeerID.from_base58(peer_id)
        self.handlers: dict[str, Callable[..., Any]] = {}

    async def add_protobuf_handler(self, name: str, handler: Callable[..., Any], *_: Any, **__: Any) -> None:
        self.handlers[name] = handler

    async def call_protobuf_handler(self, peer: PeerID, name: str, question: Any, kind: type) -> Any:
        """A call, counted by its method at both ends."""
        other = self._dht.nodes.get(str(peer))
        if other is None or str(peer) in self._dht.dead:
            raise ControlError("cannot be reached")
        await asyncio.sleep(0)
        context = P2PContext(handle_name=name, local_id=peer, remote_id=self.peer_id)
        mine = _wrong_clock.set(other.clock)
        try:
            answer = await other.p2p.handlers[name](question, context)
        finally:
            _wrong_clock.reset(mine)
        method = name.rpartition(".")[2]
        self._dht.calls[method] += 1
        self._dht.bytes[method] += question.ByteSize() + answer.ByteSize()
        return answer

    async def connect(self, peer: PeerId, addresses: Sequence[str], limit_s: float) -> None:
        """As `DaemonControl.connect`."""
        if peer not in self._dht.nodes or peer in self._dht.dead:
            raise ControlError("cannot be reached")


@dataclass(frozen=True)
class MemoryNode:
    """One node of it."""

    identity: Identity
    p2p: MemoryP2P
    directory: NetDirectory
    clock: Clock

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id


class MemoryDht:
    """The nodes, and what passed between them."""

    def __init__(self) -> None:
        self.nodes: dict[PeerId, MemoryNode] = {}
        self.dead: set[PeerId] = set()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    async def add(
        self, number: int, *, run_id: str, join: MemoryNode | Sequence[MemoryNode] = (), ahead_s: float = 0.0,
        **options: Any,
    ) -> MemoryNode:  # fmt: skip
        """A node of its own number, joined at others, on a machine whose clock is that far ahead."""
        identity = Identity(number.to_bytes(32, "big"))
        p2p = MemoryP2P(self, identity.peer_id)
        joined = [join] if isinstance(join, MemoryNode) else join
        addresses = [f"/ip4/127.0.0.1/tcp/1/p2p/{other.peer_id}" for other in joined]
        control: Any = p2p
        directory = NetDirectory(control, control, identity, run_id, join=addresses, **options)
        node = self.nodes[identity.peer_id] = MemoryNode(identity, p2p, directory, Clock(ahead_s))
        mine = _wrong_clock.set(node.clock)
        try:
            await directory.start()
        finally:
            _wrong_clock.reset(mine)
        return node

    async def __aenter__(self) -> MemoryDht:
        return self

    async def __aexit__(self, *_: object) -> None:
        for node in self.nodes.values():
            await node.directory.close()
