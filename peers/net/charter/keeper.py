"""Follows the charter of a run: found in the DHT, looked at again and again, kept there and on the disk.

Each peer goes by the charter of the highest rank that it ever saw, also before it was started again
(`cache`): docs/design.md, *The charter*.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

from peers.clock import now_s, unix_s
from peers.net.charter.doorkeeper import Doorkeeper
from peers.net.charter.signed import (
    Revocation,
    charter_key,
    read_charter,
    revocations_key,
    seal_charter,
    write_charter,
)
from peers.net.dht_protocol import MAX_SUBKEYS, REPLICAS, VERSION_S, Entry
from peers.net.dht_storage import DhtStorage, Place
from peers.net.identity import Identity
from swarm.charter import MAX_LEFT_S, ROLES, AdmissionTerms, Applicant, Charter, is_named, why_not_held
from swarm.errors import Refused, SetupError, lasting
from swarm.ids import PeerId, RunName, fingerprint_of
from swarm.manifest import Run

logger = logging.getLogger(__name__)

POLL_EVERY_S = 8.0
"""With two nodes asked each time, a ban is known everywhere within 30 s though some of them keep it back."""
POLLED_NODES = 2
"""Near its key, and half as many anywhere."""
DAY_S = 86_400.0
WARNED_S = 3 * DAY_S
MOST_BYTES = 65_536
"""Of an answer: the largest charter and, in any order, three hundred revocations."""
REVOCATION_LIFE_S = 600.0
MAX_REVOKED = 1024
_SEARCH_EVERY_S = 120.0
_ASKED_ALL = 0.125
"""Of the questions: that part is for all that there is, whatever we know of it."""


class CharterKeeper:
    """The charter of one run. Follows nothing until it is told of a name."""

    def __init__(
        self, storage: DhtStorage, door: Doorkeeper, rng: random.Random, life_s: float, cache: Path | None,
        is_there: Callable[[PeerId], bool],
    ) -> None:  # fmt: skip
        """`cache`: a folder for the highest charters seen; None: they are forgotten at the end. `is_there`:
        whether a peer has a record."""
        self.charter: Charter | None = None
        """The highest that was seen, expired or not."""
        self.owner: PeerId = ""
        self.name: RunName | None = None
        self.run: Run | None = None
        self.sealed = b""
        """The charter as its owner signed it."""
        self._storage, self._door, self._random, self._life_s = storage, door, rng, life_s
        self._cache, self._is_there = cache, is_there
        self._revoked: dict[PeerId, tuple[float, int]] = {}
        """Keys that revoked themselves: until when the DHT keeps that (Unix time), and their `_rank` then."""
        self.stored_at = self._polled_at = self._warned_at = -math.inf
        self._polling: asyncio.Task[None] | None = None

    # -- whose charter ----------------------------------------------------------------------------

    def follow(self, name: RunName) -> None:
        """Look for the charter of this name from now on, and believe no other owner's."""
        if self.name != name:
            self.name, self.charter = name, None
            if (remembered := self._remembered()) is not None:
                self.adopt(*remembered)

    def follow_manifest(self, run: Run) -> None:
        """Go by the charter of the manifest's owner. Raises SetupError: our name is another's."""
        owner = run.admission.owner
        if self.name is None and owner:
            self.follow(RunName(run.name, fingerprint_of(owner)))
        if self.name is None:
            return
        if not owner or self.name != RunName(run.name, fingerprint_of(owner)):
            raise SetupError(
                f"the charter of {self.name} names a run whose manifest is {run.name!r} of "
                f"{owner or 'no owner'}: do not join it"
            )
        self.run = run
        self._tell()

    async def find(self, name: RunName, *, timeout_s: float, expired: bool = False) -> Charter:
        """The charter of a name, which holds or may have expired. Raises SetupError: no node has one."""
        self.follow(name)
        deadline, why = now_s() + timeout_s, ""
        while True:
            await self.ask()
            if (found := self.charter) is not None:
                why = "" if expired else why_not_held(found, now=unix_s())
                if not why:
                    return found
            if now_s() >= deadline:
                nobody = f"no peer here knows a run {name}: check the name and the fingerprint, and that a "
                raise SetupError(why or f"{nobody}peer of that run is up")
            await self._storage.search([self._place()])
            await asyncio.sleep(0.3)

    # -- again and again --------------------------------------------------------------------------

    def poll(self) -> None:
        """Ask again if it is time, in the background, and keep what we have in the DHT."""
        if self.name is None or not self._storage.online:
            return
        now = now_s()
        self._warn(now)
        if now - self._polled_at >= POLL_EVERY_S and (self._polling is None or self._polling.done()):
            self._polled_at = now
            self._polling = self._storage.tasks.create_task(self.ask(POLLED_NODES))
        if self.charter is not None and now - self.stored_at >= self._life_s / 3:
            self.stored_at = now
            self._storage.tasks.create_task(self._store())

    def _warn(self, now: float) -> None:
        """Say once a day that the charter is about to expire, has expired, or is dated too far ahead."""
        left_s = self.charter.expires - unix_s() if self.charter is not None else WARNED_S
        if not WARNED_S <= left_s <= MAX_LEFT_S and now - self._warned_at >= DAY_S:
            self._warned_at = now
            how = f"expires in {lasting(left_s)}" if left_s > 0 else "has expired"
            how = "holds for more than 30 days, so a clock is wrong (NTP)" if left_s > MAX_LEFT_S else how
            text = "the charter of %s %s: then nobody is admitted until its owner has signed another one"
            logger.warning(text, self.name, how)

    def _place(self) -> Place:
        assert self.name is not None
        return self._storage.place(charter_key(self.name))

    async def ask(self, most: int = 2 * REPLICAS) -> None:
        """Take in what some of the nodes near the keys have; by default all that may have it are asked."""
        storage = self._storage
        if self.name is None or not storage.online:
            return
        places = [self._place()]
        if self.charter is not None:
            places.append(storage.place(revocations_key(self.charter.run)))
        old = [place for place in places if now_s() - place.searched_at > _SEARCH_EVERY_S]
        if old:
            await storage.search(old)
        for place in places:
            self._take(place.key, storage.node.entries(place.key))
        near = {peer for place in places for peer in storage.nearest(place, max(REPLICAS, most))}
        revoked = {peer: until for peer, (until, _) in islice(self._revoked.items(), MAX_SUBKEYS)}
        # A charter may be 16 kB, and has seldom changed.
        asks_all = self.charter is None or self._random.random() < _ASKED_ALL
        known = [{} if asks_all else {self.owner: self._kept_until()}, revoked]
        keys = {place.key: one for place, one in zip(places, known, strict=False)}
        asked = {*self._random.sample(sorted(near), min(most, len(near))), *storage.some(most // 2)}
        for answered in await asyncio.gather(*(storage.node.read(peer, keys, MOST_BYTES) for peer in asked)):
            for key, found in (answered[0] if answered is not None else {}).items():
                self._take(key, found.entries)

    def _kept_until(self) -> float:
        """When the DHT may forget our charter: the same for all that store it meanwhile, and later than that
        of the charter before, or it would be news each time, or none."""
        assert self.charter is not None
        period_s = self._life_s / 3
        later_s = self.charter.sequence % 512 * 2 * VERSION_S
        return (unix_s() // period_s + 3) * period_s + later_s

    def _take(self, key: bytes, entries: Iterable[Entry]) -> None:
        before = self.revoked
        for entry in entries:
            opened = self._storage.check.open(key, entry)
            if isinstance(opened, Charter):
                self.adopt(opened, entry.subkey, entry.value)
            elif isinstance(opened, Revocation) and self.charter is not None:
                self._revoke(opened, entry.expires)
                self._storage.node.keep_read(key, entry)  # newcomers may ask here
        if self.revoked != before:
            self._tell()

    def _revoke(self, revocation: Revocation, expires: float) -> None:
        assert self.charter is not None
        if revocation.run != self.charter.run:
            return
        peer, rank = revocation.peer, self._rank(revocation.peer)
        if peer not in self._revoked and len(self._revoked) >= MAX_REVOKED:
            # Any peer can make keys that revoke themselves: those that no peer uses give way.
            least = min(self._revoked, key=lambda one: self._revoked[one][1])
            if self._revoked[least][1] >= rank:
                return
            del self._revoked[least]
        self._revoked[peer] = expires, max(rank, self._revoked.get(peer, (0.0, 0))[1])

    def _rank(self, peer: PeerId) -> int:
        """2: the owner named it; 1: it is there, which costs it nothing where all are admitted."""
        return 2 if self.names(peer) else int(self._is_there(peer))

    def names(self, peer: PeerId) -> bool:
        """Whether the owner named a peer as anything, in the charter or the manifest."""
        terms = self._door.terms
        return terms is not None and any(is_named(terms, Applicant(peer, role)) for role in ROLES)

    @property
    def revoked(self) -> frozenset[PeerId]:
        """Keys that were seen to revoke themselves."""
        return frozenset(self._revoked)

    def adopt(self, charter: Charter, owner: PeerId, sealed: bytes) -> bool:
        """Go by a charter from now on, if it is of the name that we follow and the highest that we know.

        `sealed` was opened: `owner` signed it.
        """
        if self.name is None or RunName(charter.name, fingerprint_of(owner)) != self.name:
            return False
        if self.charter is not None and charter.rank <= self.charter.rank:
            return False
        if self.run is not None and charter.run != self.run.id:
            logger.warning("the owner's charter names another run now (%s): that is ignored", charter.run)
            return False
        if self.charter is not None:
            logger.info("charter %s, sequence %d: it holds from now on", self.name, charter.sequence)
        self.charter, self.owner, self.sealed = charter, owner, sealed
        self.stored_at = -math.inf
        self._save()
        self._tell()
        return True

    def _tell(self) -> None:
        """Let the doorkeeper go by what we know."""
        if self.charter is not None:
            terms = AdmissionTerms(self.charter, self.owner, revoked=self.revoked)
            if (run := self.run) is not None:
                named = run.admission
                terms = terms._replace(stages=run.S, trainers=named.trainers, founders=named.founders)
            self._door.set(terms)

    # -- kept -------------------------------------------------------------------------------------

    async def publish(self, charter: Charter, owner: Identity) -> int:
        """Sign a charter, go by it, and store it; how many nodes took it. Raises SetupError."""
        return await self.offer(charter, owner.peer_id, seal_charter(charter, owner))

    async def offer(self, charter: Charter, owner: PeerId, sealed: bytes) -> int:
        """Go by a charter that was opened unless a higher one is known, and store the highest."""
        self.follow(RunName(charter.name, fingerprint_of(owner)))
        self.adopt(charter, owner, sealed)
        return await self._store(REPLICAS)

    async def revoke(self, run_id: str, peer: PeerId, sealed: bytes) -> int:
        """Store a revocation; how many nodes took it."""
        entry = Entry(peer, sealed, unix_s() + REVOCATION_LIFE_S)
        return await self._storage.store(revocations_key(run_id), entry, REPLICAS)

    async def _store(self, besides: int = 0) -> int:
        assert self.name is not None
        # Not all peers at the same moment.
        self.stored_at = now_s() - self._life_s / 6 * self._random.random()
        entry = Entry(self.owner, self.sealed, self._kept_until())
        return await self._storage.store(charter_key(self.name), entry, besides)

    def _path(self) -> Path | None:
        return None if self._cache is None or self.name is None else self._cache / str(self.name)

    def _remembered(self) -> tuple[Charter, PeerId, bytes] | None:
        """What was seen before we were started."""
        with contextlib.suppress(OSError, Refused):
            return None if (path := self._path()) is None else read_charter(path)
        return None

    def _save(self) -> None:
        """Several peers of a machine share the folder: the highest charter stays."""
        path, remembered = self._path(), self._remembered()
        if path is None or self.charter is None or (remembered and remembered[0].rank >= self.charter.rank):
            return
        try:
            write_charter(path, self.owner, self.sealed)
        except OSError as error:
            logger.warning("the charter cannot be remembered in %s: %s", path.parent, error.strerror)
