"""What a node knows of its run: the records by stage, until their time is up. Pure; times are Unix seconds.

Looking up one stage costs nothing while nothing of it changes, however large the run is.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

import msgspec

from swarm.ids import PeerId, Stage
from swarm.records import PeerRecord

MAX_KNOWN = 65_536
"""About 60 MB. Strangers' records beyond these are not taken."""


class Announced(msgspec.Struct, frozen=True):
    """A record that was opened."""

    record: PeerRecord
    level: int
    """How far its peer thinks that its stage is spread."""
    expires: float
    """Unix time."""
    credential: bytes = b""
    """What its peer brought to be admitted; see `peers.net.charter.signed`."""


class RecordTable:
    """The newest record of each peer, ours included."""

    def __init__(self, me: PeerId, most_known: int = MAX_KNOWN) -> None:
        self._me, self._most_known = me, most_known
        self._known: dict[PeerId, Announced] = {}
        self._stages: dict[Stage, dict[PeerId, Announced]] = defaultdict(dict)
        self._under: dict[bytes, dict[PeerId, float]] = defaultdict(dict)
        self._ends: list[tuple[float, PeerId, bytes]] = []
        """When to look whether a record has expired, and a key under which it lies: once for each of them."""
        self._listed: dict[Stage, list[PeerRecord]] = {}
        self._all: list[PeerRecord] | None = None

    def __len__(self) -> int:
        """How many others are known."""
        return len(self._known) - (self._me in self._known)

    def put(self, announced: Announced, keys: Sequence[bytes]) -> bool:
        """Take in a record that lies under some keys; whether it is new."""
        peer, ends = announced.record.peer, announced.expires
        old = self._known.get(peer)
        if old is None and len(self) >= self._most_known:
            return False
        for key in keys:
            if peer not in self._under[key]:
                heapq.heappush(self._ends, (ends, peer, key))
            self._under[key][peer] = max(ends, self._under[key].get(peer, 0.0))
        if peer == self._me or (old is not None and old.expires >= ends):
            return False
        self._replace(peer, announced)
        return True

    def drop(self, refused: Callable[[Announced], object]) -> None:
        """Forget the records of others that are refused."""
        for peer, known in list(self._known.items()):
            if peer != self._me and refused(known):
                self._replace(peer, None)

    def hasten(self, latest: float, until: float) -> None:
        """Have what expires later than `latest` expire at another time: what is right is later than that."""
        for key, held in self._under.items():
            self._under[key] = {peer: ends if ends <= latest else until for peer, ends in held.items()}
        self._ends = [(ends, peer, key) for key, held in self._under.items() for peer, ends in held.items()]
        heapq.heapify(self._ends)
        for peer, known in list(self._known.items()):
            if peer != self._me and known.expires > latest:
                self._replace(peer, msgspec.structs.replace(known, expires=until))

    def set_own(self, record: PeerRecord | None) -> None:
        """What we announce; it never expires here."""
        self._replace(self._me, None if record is None else Announced(record, 0, math.inf))

    def _replace(self, peer: PeerId, new: Announced | None) -> None:
        old = self._known.pop(peer, None)
        if old is not None:
            del self._stages[old.record.stage][peer]
        if new is not None:
            self._known[peer] = self._stages[new.record.stage][peer] = new
        if old is None or new is None or old.record != new.record:
            for changed in (old, new):
                if changed is not None:
                    self._listed.pop(changed.record.stage, None)
                    self._all = None

    def under(self, key: bytes, *, now: float) -> Mapping[PeerId, float]:
        """The peers whose records lie under a key, as far as we know, and until when."""
        self._expire(now)
        return self._under.get(key, {})

    def find(self, peer: PeerId, *, now: float) -> PeerRecord | None:
        self._expire(now)
        known = self._known.get(peer)
        return known.record if known is not None else None

    def at(self, stage: Stage, *, now: float) -> Sequence[PeerRecord]:
        """The records of a stage, sorted by peer; the same object as long as none of them changes."""
        self._expire(now)
        if stage not in self._listed:
            known = self._stages.get(stage, {})
            self._listed[stage] = [known[peer].record for peer in sorted(known)]
        return self._listed[stage]

    def all(self, *, now: float) -> Sequence[PeerRecord]:
        """The records of all stages, sorted by peer; the same object as long as none of them changes."""
        self._expire(now)
        if self._all is None:
            self._all = [self._known[peer].record for peer in sorted(self._known)]
        return self._all

    def levels(self, stage: Stage) -> Mapping[int, int]:
        """How many other peers of a stage are on each level."""
        return Counter(one.level for peer, one in self._stages.get(stage, {}).items() if peer != self._me)

    def _expire(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            _, peer, key = heapq.heappop(self._ends)
            if (ends := self._under[key].pop(peer)) > now:  # it was renewed
                self._under[key][peer] = ends
                heapq.heappush(self._ends, (ends, peer, key))
            elif not self._under[key]:
                del self._under[key]
            known = self._known.get(peer)
            if known is not None and known.expires <= now:
                self._replace(peer, None)
