"""What a node knows of its run: the records by stage, until their time is up. Pure; times are Unix seconds.

Looking up one stage costs nothing while nothing of it changes, however large the run is.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from peers.net.signed_records import Announced
from swarm.ids import PeerId, Stage
from swarm.records import PeerRecord

MAX_KNOWN = 65_536
"""About 60 MB. Strangers' records beyond these are not taken."""


class Table:
    """The newest record of each peer, ours included."""

    def __init__(self, me: PeerId, most_known: int = MAX_KNOWN) -> None:
        self._me, self._most_known = me, most_known
        self._known: dict[PeerId, Announced] = {}
        self._stages: dict[Stage, dict[PeerId, Announced]] = defaultdict(dict)
        self._levels: dict[Stage, Counter[int]] = defaultdict(Counter)
        self._under: dict[bytes, dict[PeerId, float]] = defaultdict(dict)
        self._ends: list[tuple[float, PeerId, bytes]] = []
        """By expiration: a record, and a key under which it lies."""
        self._own: PeerRecord | None = None
        self._listed: dict[Stage, list[PeerRecord]] = {}
        self._all: list[PeerRecord] | None = None

    def __len__(self) -> int:
        return len(self._known)

    def put(self, announced: Announced, keys: Sequence[bytes]) -> bool:
        """Take in a record that lies under some keys; whether it is new."""
        peer, ends = announced.record.peer, announced.expires
        old = self._known.get(peer)
        if old is None and len(self._known) >= self._most_known:
            return False
        for key in keys:
            if ends > self._under[key].get(peer, 0.0):
                self._under[key][peer] = ends
                heapq.heappush(self._ends, (ends, peer, key))
        if peer == self._me or (old is not None and old.expires >= ends):
            return False
        if old is not None:
            self._drop(old)
        self._known[peer] = self._stages[announced.record.stage][peer] = announced
        self._levels[announced.record.stage][announced.level] += 1
        if old is None or old.record != announced.record:
            for stage in {announced.record.stage, old.record.stage if old else announced.record.stage}:
                self._listed.pop(stage, None)
            self._all = None
        return True

    def _drop(self, old: Announced) -> None:
        stage, peer = old.record.stage, old.record.peer
        del self._known[peer], self._stages[stage][peer]
        self._levels[stage][old.level] -= 1

    def set_own(self, record: PeerRecord | None) -> None:
        """What we announce; it never expires here."""
        if record != self._own:
            for changed in (self._own, record):
                if changed is not None:
                    self._listed.pop(changed.stage, None)
            self._all = None
        self._own = record

    def under(self, key: bytes, *, now: float) -> Mapping[PeerId, float]:
        """The peers whose records lie under a key, as far as we know, and until when."""
        self._expire(now)
        return self._under.get(key, {})

    def find(self, peer: PeerId, *, now: float) -> PeerRecord | None:
        self._expire(now)
        if peer == self._me:
            return self._own
        known = self._known.get(peer)
        return known.record if known is not None else None

    def at(self, stage: Stage, *, now: float) -> Sequence[PeerRecord]:
        """The records of a stage, sorted by peer; the same object as long as none of them changes."""
        self._expire(now)
        if stage not in self._listed:
            found = {peer: known.record for peer, known in self._stages.get(stage, {}).items()}
            if self._own is not None and self._own.stage == stage:
                found[self._me] = self._own
            self._listed[stage] = [found[peer] for peer in sorted(found)]
        return self._listed[stage]

    def all(self, *, now: float) -> Sequence[PeerRecord]:
        """The records of all stages, sorted by peer; the same object as long as none of them changes."""
        self._expire(now)
        if self._all is None:
            found = {peer: known.record for peer, known in self._known.items()}
            if self._own is not None:
                found[self._me] = self._own
            self._all = [found[peer] for peer in sorted(found)]
        return self._all

    def levels(self, stage: Stage) -> Mapping[int, int]:
        """How many peers of a stage are on each level."""
        return self._levels[stage]

    def _expire(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            ends, peer, key = heapq.heappop(self._ends)
            if self._under.get(key, {}).get(peer) == ends:
                del self._under[key][peer]
                if not self._under[key]:
                    del self._under[key]
            known = self._known.get(peer)
            if known is not None and known.expires <= now:
                self._drop(known)
                self._listed.pop(known.record.stage, None)
                self._all = None
