"""Reads the records of a run into a table: what is near often, the rest in turn.

Each refresh asks a few random nodes of those near the keys, one question per node for all of its keys, and
gets what is new (`dht_protocol`). What is read when, and how much: docs/design.md, *The directory*.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice

from peers.clock import now_s, unix_s
from peers.net.bandwidth import Allowance
from peers.net.dht_protocol import (
    MAX_ANSWER_BYTES,
    MAX_KEYS_PER_CALL,
    MAX_SUBKEYS,
    REPLICAS,
    Entry,
    record_ids,
)
from peers.net.dht_storage import SEARCH_WAIT_S, DhtStorage, Place
from peers.net.lookup import Scale, nodes_to_ask
from peers.net.signed_records import Announced, peers_key
from peers.record_table import RecordTable
from swarm.ids import PeerId, Stage
from swarm.records import NO_STAGE

FAR_SEARCH_EVERY_S = 1800.0
FIRST_ANSWERS = 2
"""For each key, in the first refresh: a node that was away has missed what was stored meanwhile."""
ANYWHERE = 2
"""Nodes that are asked in each refresh wherever they are: those near a key may all be one stranger's."""
NEAR_QUESTIONS = 6
FAR_QUESTIONS = 2
"""Nodes asked in one refresh: a question costs 1 ms of CPU over all processes."""
NEAR_BYTES_PER_S = 64e3
FAR_BYTES_PER_S = 16e3
"""Read in the background. 10 000 peers are 2.5 MB: three minutes."""
_MIN_ANSWER_BYTES = 4096
_SAVED_S = 10.0
"""Allowances are saved up for so long."""
SLOW_S = 0.5
"""Others are asked too when an answer takes longer. On an idle core it takes 2 ms, around the world 0.3 s."""
REFRESH_LIMIT_S = 5.0
_FAR_SEARCH_WAIT_S = 10.0
_ALL_NEAR = 20
"""With no more nodes in reach searching takes a moment; among more it takes a few questions for each key."""
_NEAR_STRETCH = 0.2
"""Of the other times' stretch: a newcomer is seen after 2 s in a run of 500, after 10 s in one of 10 000."""


async def ask_around(
    holders: Mapping[bytes, Sequence[PeerId]], spare: Mapping[bytes, Sequence[PeerId]],
    ask: Callable[[PeerId, Sequence[bytes]], asyncio.Task[bool]], rng: random.Random, *, answers: int,
    limit_s: float,
) -> None:  # fmt: skip
    """Have so many nodes answer for each key, of those that hold it.

    The keys of a node that fails, or is late, are asked of others; a late answer counts. What still comes
    after the limit is not waited for.

    Args:
        spare: further away, so they may hold nothing: asked for a key that no holder answers in time.
        ask: asks a node for some keys; whether it answered.
    """
    left = {key: list(dict.fromkeys(nodes)) for key, nodes in holders.items()}
    more = {key: [node for node in spare.get(key, ()) if node not in nodes] for key, nodes in left.items()}
    answered = Counter[bytes]()
    asking: dict[asyncio.Task[bool], tuple[Sequence[bytes], float]] = {}
    end = now_s() + limit_s
    while True:
        in_time = Counter(key for keys, since in asking.values() for key in keys if now_s() < since + SLOW_S)
        for key in left:
            if not (left[key] or answered[key] or in_time[key]):
                left[key] = more.pop(key, [])
        lacking = [key for key in left if answered[key] < answers]
        due = {key: left[key] for key in lacking if left[key] and answered[key] + in_time[key] < answers}
        for node, keys in nodes_to_ask(due, rng).items():
            for key in keys:
                left[key].remove(node)
            for start in range(0, len(keys), MAX_KEYS_PER_CALL):
                some = keys[start : start + MAX_KEYS_PER_CALL]
                asking[ask(node, some)] = (some, now_s())
        if due:
            continue
        asked = {key for keys, _ in asking.values() for key in keys}
        if now_s() >= end or asked.isdisjoint(lacking):
            return
        done, _ = await asyncio.wait(asking, timeout=SLOW_S, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            keys, _ = asking.pop(task)
            if not task.cancelled() and task.result():
                answered.update(keys)


class RecordReader:
    """What is known of one run, and what is read next."""

    def __init__(
        self, storage: DhtStorage, table: RecordTable, run_id: str | None, rng: random.Random,
        refresh_s: float, scale: Scale,
    ) -> None:  # fmt: skip
        self.run_id, self.scale = run_id, scale
        self.stages = 0
        """Of the run, once its manifest is known."""
        self.read_bytes = 0
        """That questions and their answers took so far."""
        self.refreshed = False
        """The near stages were read once."""
        self.near = Allowance(NEAR_BYTES_PER_S, NEAR_BYTES_PER_S * _SAVED_S)
        self.far = Allowance(FAR_BYTES_PER_S, FAR_BYTES_PER_S * _SAVED_S)
        self._storage, self._table = storage, table
        self._random, self._refresh_s = rng, refresh_s
        self._watched: frozenset[Stage] | None = None

    @property
    def knows_stages(self) -> bool:
        return bool(self.stages) or self._watched is not None

    def watch(self, stages: Collection[Stage] | None) -> None:
        self._watched = None if stages is None else frozenset(stages)

    def all_stages(self) -> list[Stage]:
        return [NO_STAGE, *sorted({*range(self.stages), *(self._watched or ())})]

    def near_stages(self) -> list[Stage]:
        """Keepers are few, and all peers ask whether there are any."""
        return self.all_stages() if self._watched is None else [NO_STAGE, *sorted(self._watched)]

    def places_of(self, stages: Iterable[Stage]) -> list[Place]:
        """Where records of these stages may lie, as far as we know; those read longest ago first."""
        if self.run_id is None:
            return []
        places = [
            self._storage.place(peers_key(self.run_id, shard))
            for stage in stages
            for shard in self.scale.shards_to_read(stage, self._table.levels(stage))
        ]
        return sorted(places, key=lambda place: place.read_at)

    @property
    def stretch(self) -> float:
        return self.scale.stretch(len(self._table))

    @property
    def lag_s(self) -> float:
        places = self.places_of(self.all_stages())
        return now_s() - min((place.read_at for place in places), default=-math.inf)

    async def read_all(self, stages: Collection[Stage], limit_s: float) -> None:
        """Read everything of some stages now. How far a stage is spread turns out while it is read."""
        began = now_s()
        while self._storage.online and now_s() < began + limit_s:
            places = [place for place in self.places_of(stages) if place.read_at < began]
            if not places:
                break
            if not self._storage.neighbours or any(place.is_new for place in places):
                wait_s = SEARCH_WAIT_S if self._storage.neighbours <= _ALL_NEAR else _FAR_SEARCH_WAIT_S
                await self._storage.search(places, wait_s=wait_s)
            near = {place.key: self._storage.nearest(place, REPLICAS) for place in places}
            if not await self._read(places, near, None, MAX_ANSWER_BYTES, limit_s=limit_s):
                break  # no node answers
        self.refreshed = self.refreshed or bool(self._storage.neighbours)

    async def read_some(self) -> None:
        """What is due in this refresh: of the stages that we work with, then of the others."""
        near_stages = self.near_stages()
        near = self.places_of(near_stages)
        far = self.places_of(stage for stage in self.all_stages() if stage not in near_stages)
        if not self.refreshed:
            await self.read_all(near_stages, REFRESH_LIMIT_S)
            return
        due_s = self._refresh_s * (self.stretch - 1.0) * _NEAR_STRETCH
        near = [place for place in near if now_s() - place.read_at >= due_s]
        most = max(_MIN_ANSWER_BYTES, int(self.near.left(now=now_s())) // 2)
        anywhere = self._storage.some(ANYWHERE) if near else ()
        await asyncio.gather(
            self._read_in_turn(near, NEAR_QUESTIONS, self.near, search_every_s=math.inf),
            self._read_in_turn(far, FAR_QUESTIONS, self.far, search_every_s=FAR_SEARCH_EVERY_S),
            *(self._ask(peer, near[:MAX_KEYS_PER_CALL], self.near, most) for peer in anywhere),
        )

    async def _read_in_turn(
        self, places: Sequence[Place], questions: int, allowance: Allowance, *, search_every_s: float
    ) -> None:
        """Read of some keys as much as so many questions and an allowance give; the rest comes next."""
        now = now_s()
        old = [place for place in places if now - place.searched_at > search_every_s or place.is_new]
        if old:
            await self._storage.search(old[:MAX_KEYS_PER_CALL])
        holders = {place.key: self._storage.nearest(place, REPLICAS) for place in places if not place.is_new}
        asked = nodes_to_ask(holders, self._random, most=questions)
        most_bytes = int(allowance.left(now=now)) // max(1, len(asked))
        if most_bytes < _MIN_ANSWER_BYTES:
            return
        first = {key: [peer] for peer, keys in asked.items() for key in keys}
        due = [place for place in places if place.key in first or not holders.get(place.key, True)]
        await self._read(due, first, allowance, most_bytes, limit_s=REFRESH_LIMIT_S)

    async def _read(
        self, places: Sequence[Place], holders: Mapping[bytes, Sequence[PeerId]],
        allowance: Allowance | None, most_bytes: int, *, limit_s: float,
    ) -> bool:  # fmt: skip
        """Ask for what is new under some keys; whether that was answered for any of them.

        Args:
            holders: the nodes that are asked for a key unless they fail.
            allowance: what answers are taken from.
            most_bytes: of one answer.
        """
        by_key = {place.key: place for place in places}
        began = now_s()
        for place in places:
            self._take(place.key, self._storage.node.entries(place.key))
        spare = {place.key: self._storage.nearest(place, 2 * REPLICAS) for place in places}
        for key, near in spare.items():
            if not near:
                by_key[key].read_at = began  # we are alone

        def ask(peer: PeerId, keys: Sequence[bytes]) -> asyncio.Task[bool]:
            question = self._ask(peer, [by_key[key] for key in keys], allowance, most_bytes)
            return self._storage.tasks.create_task(question)

        answers = 1 if self.refreshed else FIRST_ANSWERS
        holders = {key: holders.get(key, ()) for key in by_key}
        await ask_around(holders, spare, ask, self._random, answers=answers, limit_s=limit_s)
        return any(place.read_at >= began for place in places)

    async def _ask(
        self, peer: PeerId, places: Sequence[Place], allowance: Allowance | None, most_bytes: int
    ) -> bool:
        """Take in what is new at one node under some keys; whether it answered."""
        now, under = unix_s(), self._table.under
        known = {one.key: dict(islice(under(one.key, now=now).items(), MAX_SUBKEYS)) for one in places}
        answered = await self._storage.node.read(peer, known, most_bytes)
        if answered is None:
            for place in places:
                if peer in place.near:
                    # Look again. In its place would come one that is near many keys of those that we know:
                    # it is asked first, and has none of this one.
                    place.near, place.searched_at = [one for one in place.near if one != peer], -math.inf
            return False
        found, size = answered
        self.read_bytes += size
        if allowance is not None:
            allowance.take(size, now=now_s())
        for place in places:
            one = found[place.key]
            took = self._take(place.key, one.entries)
            # Else there is more, and it is read next; unless the node only says so.
            if not one.left or (one.entries and not took):
                place.read_at = now_s()
        return True

    def _take(self, key: bytes, entries: Iterable[Entry]) -> bool:
        """Into the table: verified, ours, unexpired, newer than what we have; whether there was any such."""
        now, took = unix_s(), False
        known = self._table.under(key, now=now)
        for entry in entries:
            if entry.expires <= max(now, known.get(entry.subkey, 0.0)):
                continue
            opened = self._storage.check.open(key, entry)
            if not isinstance(opened, Announced) or opened.record.run != self.run_id:
                continue
            if self._table.put(opened, record_ids(opened)):
                took = True
                self._storage.node.keep_read(key, entry)  # others may ask here
                if opened.record.addresses and opened.record.state != "left":
                    self._storage.addresses.learn(opened.record.peer, opened.record.addresses)
        return took
