"""The directory of a simulated swarm: every peer has a picture of its own, which lags and may be cut off.

What a peer announces is in the DHT a moment later. Others see it when their picture is refreshed in the
background, each after another lag, or when they ask. A process that is cut off from the DHT neither announces
nor learns; its announcement goes through once it is back. Records of the dead are seen until they run out.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Sequence

import msgspec

from peers.record_table import Announced, RecordTable
from peers.sim.dice import Dice
from peers.sim.loop import Process, VirtualLoop
from swarm.ids import PeerId, Stage
from swarm.records import PeerRecord, Voucher

LIFE_S = 20.0
"""As a record in the DHT: a few times longer than between two announcements."""
RENEW_S = 6.0
LAG_S = (0.05, 1.5)
"""Until a picture in the background has what was announced."""
ASK_S = (0.005, 0.1)
"""How long it takes to ask, or to tell, the DHT."""


class Dht(msgspec.Struct, dict=True):
    """What was announced, and which peers are cut off from it."""

    loop: VirtualLoop
    dice: Dice
    lag_s: tuple[float, float] = LAG_S
    ask_s: tuple[float, float] = ASK_S
    entries: dict[PeerId, Announced] = {}
    pictures: list[SimDirectory] = []
    cut_off: set[PeerId] = set()
    """Processes that reach no node of the DHT."""

    def put(self, record: PeerRecord, life_s: float = LIFE_S) -> None:
        """Keep a record, and let each picture have it after its own lag."""
        now = self.loop.now_s
        ends_s = now + life_s
        if (before := self.entries.get(record.peer)) is not None:  # of two the one that ends later is newer
            ends_s = max(ends_s, math.nextafter(before.expires, math.inf))
        entry = self.entries[record.peer] = Announced(record, 0, ends_s)
        for picture in self.pictures:
            if picture.process.alive:
                own = picture.process.name == record.peer
                picture.will_bring(now if own else now + self.dice.between(*self.lag_s), entry)

    def forget(self, peer: PeerId) -> None:
        """A record runs out at once, for all others."""
        self.entries.pop(peer, None)
        for picture in self.pictures:
            if picture.process.name != peer:
                picture.forget(peer)


class SimDirectory:
    """Fulfils `peers.ports.Directory` for one process."""

    def __init__(self, dht: Dht, process: Process, voucher: Voucher | None = None) -> None:
        """`voucher`: what the peer got in a life before this one."""
        self._dht, self.process, self._voucher = dht, process, voucher
        self._due: list[tuple[float, Announced]] = []
        """What the background will bring, and when."""
        self._due_s = math.inf
        """Nothing before that."""
        self._table = RecordTable("")
        self.watched: frozenset[Stage] | None = None
        self._asked_s = -math.inf
        self._renewal: asyncio.TimerHandle | None = None
        dht.pictures.append(self)

    def watch(self, stages: Collection[Stage] | None) -> None:
        self.watched = None if stages is None else frozenset(stages)

    def peers(self) -> Sequence[PeerRecord]:
        return self._table.all(now=self._catch_up())

    def at(self, stage: Stage) -> Sequence[PeerRecord]:
        return self._table.at(stage, now=self._catch_up())

    def find(self, peer: PeerId) -> PeerRecord | None:
        return self._table.find(peer, now=self._catch_up())

    @property
    def lag_s(self) -> float:
        return self._dht.loop.now_s - self._asked_s

    async def refresh(self, stages: Collection[Stage] | None = None) -> Sequence[PeerRecord]:
        await asyncio.sleep(self._dht.dice.between(*self._dht.ask_s))
        if self.process.name not in self._dht.cut_off:
            self._asked_s = self._dht.loop.now_s
            for entry in self._dht.entries.values():
                self._learn(entry)
        return self.peers()

    async def lookup_all(self) -> Sequence[PeerRecord]:
        return await self.refresh()

    async def announce(self, record: PeerRecord) -> None:
        record = msgspec.structs.replace(record, voucher=record.voucher or self._voucher)
        await asyncio.sleep(self._dht.dice.between(*self._dht.ask_s))
        if self._renewal is not None:
            self._renewal.cancel()
        self._renew(record)

    def _renew(self, record: PeerRecord) -> None:
        """Keep the newest record alive as long as its process runs, as `peers.net.directory` does."""
        if self.process.name not in self._dht.cut_off:
            self._dht.put(record)
        context = self.process.context
        self._renewal = self._dht.loop.call_later(RENEW_S, self._renew, record, context=context)

    async def withdraw(self) -> None:
        entry = self._dht.entries.get(self.process.name)
        if entry is not None:
            await self.announce(msgspec.structs.replace(entry.record, state="left"))

    def will_bring(self, at_s: float, entry: Announced) -> None:
        self._due.append((at_s, entry))
        self._due_s = min(self._due_s, at_s)

    def forget(self, peer: PeerId) -> None:
        """A record ran out, or was never seen."""
        self._due = [(at_s, entry) for at_s, entry in self._due if entry.record.peer != peer]
        self._table.drop(lambda known: known.record.peer == peer)

    def _catch_up(self) -> float:
        """Take in what is due by now, and say when that is."""
        now = self._dht.loop.now_s
        if now >= self._due_s and self.process.name not in self._dht.cut_off:
            came = [entry for at_s, entry in self._due if at_s <= now]
            self._due = [(at_s, entry) for at_s, entry in self._due if at_s > now]
            self._due_s = min((at_s for at_s, _ in self._due), default=math.inf)
            for entry in came:
                self._learn(entry)
            self._asked_s = now if came else self._asked_s
        return now

    def _learn(self, entry: Announced) -> None:
        if entry.expires > self._dht.loop.now_s:
            self._table.put(entry, [b"any"])
