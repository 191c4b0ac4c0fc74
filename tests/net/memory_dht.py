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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import hivemind.dht.protocol as protocol_module
import hivemind.utils.timed_storage as timed_storage

from peers.net import directory as directory_module
from peers.net import holder as holder_module
from peers.net._hivemind import P2PContext, PeerID
from peers.net.control import ControlError
from peers.net.directory import NetDirectory
from peers.net.identity import Identity
from swarm.ids import PeerId

BEGAN_S = 1.7e9
"""Unix time at which virtual time begins."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Instead of waiting it moves its clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        select = self._selector.select  # type: ignore[attr-defined]

        def hurried(timeout_s: float | None = None) -> Any:
            self.now_s += timeout_s or 0.0
            return select(0)

        self._selector.select = hurried  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now_s


@contextlib.contextmanager
def virtual_time() -> Iterator[VirtualLoop]:
    """A loop whose clock is that of the directory, of its protocol and of hivemind's storage as well."""
    loop = VirtualLoop()
    clock = SimpleNamespace(monotonic=lambda: loop.now_s, time=lambda: BEGAN_S + loop.now_s)
    with contextlib.ExitStack() as patches:
        for module in (directory_module, holder_module):
            patches.enter_context(patch.object(module, "time", clock))
        for module in (timed_storage, protocol_module):
            patches.enter_context(patch.object(module, "get_dht_time", clock.time))
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
        answer = await other.p2p.handlers[name](question, context)
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
        self, number: int, *, run_id: str, join: MemoryNode | None = None, **options: Any
    ) -> MemoryNode:
        """A node of its own number, joined at another one."""
        identity = Identity(number.to_bytes(32, "big"))
        p2p = MemoryP2P(self, identity.peer_id)
        addresses = [f"/ip4/127.0.0.1/tcp/1/p2p/{join.peer_id}"] if join is not None else []
        control: Any = p2p
        directory = NetDirectory(control, control, identity, run_id, join=addresses, **options)
        node = self.nodes[identity.peer_id] = MemoryNode(identity, p2p, directory)
        await directory.start()
        return node

    async def __aenter__(self) -> MemoryDht:
        return self

    async def __aexit__(self, *_: object) -> None:
        for node in self.nodes.values():
            await node.directory.close()
