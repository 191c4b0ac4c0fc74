"""Which peer serves which stage, from the DHT. Fulfils `peers.ports.Directory`.

A record's way: `announce` signs it (`signed_records`), `dht_storage` puts it on the nodes near its keys,
which check it (`dht_protocol`), and each peer that works with its stage asks them for it (`record_reader`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import msgspec

from peers.clock import now_s, unix_s
from peers.net.charter.doorkeeper import Doorkeeper
from peers.net.charter.keeper import CharterKeeper
from peers.net.dht_protocol import MAX_ANSWER_BYTES, REPLICAS, RPC_S, VERSION_S, Entry, latest_expiry
from peers.net.dht_storage import BOOTSTRAP_S, SEARCH_WAIT_S, DhtStorage, Place
from peers.net.identity import AddressBook, Identity
from peers.net.lookup import DEFAULT_SCALE, Scale
from peers.net.p2pd_control import ControlError, DaemonControl
from peers.net.record_reader import REFRESH_LIMIT_S, RecordReader
from peers.net.signed_records import (
    MAX_LIFE_S,
    manifest_key,
    open_manifest,
    record_keys,
    seal_manifest,
    seal_record,
)
from peers.net.timings import DEFAULT_TIMINGS, NetTimings
from peers.record_table import RecordTable
from swarm.errors import Refused, SetupError
from swarm.ids import PeerId, RunName, Stage
from swarm.manifest import Run, check_id
from swarm.records import PeerRecord

logger = logging.getLogger(__name__)

CLOCK_JUMP_S = 2.0
"""A daemon that corrects the clock moves it by less between two rounds."""
_READ_ALL_LIMIT_S = 60.0


class NetDirectory:
    """The records of one run, and this peer's own. Without a run it only serves others (bootstrap)."""

    def __init__(
        self, control: DaemonControl, identity: Identity, run_id: str | None, *, join: Sequence[str] = (),
        addresses: AddressBook | None = None, timings: NetTimings = DEFAULT_TIMINGS,
        scale: Scale = DEFAULT_SCALE, door: Doorkeeper | None = None, charters: Path | None = None,
    ) -> None:  # fmt: skip
        """`join`: multiaddrs of peers to join at, each ending in `/p2p/<id>`. `addresses` learns others'.

        `door` says whose records are believed; `charters` is a folder for those that were seen.
        """
        self.run_id = run_id
        self.door = door or Doorkeeper()
        self._identity = identity
        self._timings = timings
        self._random = random.Random(identity.peer_id)
        self._table = RecordTable(identity.peer_id)
        self.storage = DhtStorage(control, identity.peer_id, join, addresses or AddressBook(), self._random)
        self.storage.check.why_not = self.door.why_not_record
        self.door.on_change.append(self._recheck)
        self._manifests = ManifestKeeper(self.storage, self._random, timings.manifest_life_s)
        self.charters = CharterKeeper(
            self.storage, self.door, self._random, timings.manifest_life_s, charters,
            lambda peer: self.find(peer) is not None,
        )  # fmt: skip
        self.reader = RecordReader(self.storage, self._table, run_id, self._random, timings.refresh_s, scale)
        self._moved_to: tuple[str, ...] = ()
        self._own: PeerRecord | None = None
        self._own_expires = -math.inf
        """Unix time."""
        self._level = 0
        """How far we spread our own record."""
        # Monotonic, as everything but what others are told: the machine's clock may be set at any time.
        self._stored_at = -math.inf
        self._stored_stretch = 1.0
        """Of the record that is out there: it is renewed before it ends, whatever was learnt since."""
        self._clock_offset_s = 0.0

    # -- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Join the DHT and begin to refresh. Raises SetupError: that cannot be; says what to check."""
        await self.storage.begin()
        await self.storage.meet_first()
        self._clock_offset_s = unix_s() - now_s()
        self.storage.tasks.create_task(self._run())

    async def daemon_is_back(self) -> None:
        """A new p2pd took the place of the one that died: greet those that we knew, and announce what we
        announced. Raises ControlError: the new p2pd fails too.
        """
        await self.close()
        self.reader.refreshed = False
        await self.storage.begin()
        # Ours are the first dials: theirs failed meanwhile, and libp2p waits before it tries again.
        if greeted := self.storage.greet():
            await asyncio.wait(greeted, timeout=BOOTSTRAP_S)
        self.storage.tasks.create_task(self._run())

    def move(self, addresses: tuple[str, ...]) -> None:
        """Announce ourselves at these from now on."""
        self._moved_to, self._stored_at = addresses, -math.inf

    async def close(self) -> None:
        """End all tasks. The record stays in the DHT until it expires: `withdraw` first."""
        await self.storage.close()

    async def _run(self) -> None:
        """Refresh, renew, search, until cancelled."""
        while True:
            try:
                await self._round()
            except (ControlError, OSError) as error:
                logger.debug("the DHT cannot be reached: %s", error)
            except Exception:  # the next round may do better; without any, no record of ours is renewed
                logger.exception("a refresh of the directory failed")
            # Not all peers at the same moment, though all may have started at once.
            await asyncio.sleep(self._timings.refresh_s * self._random.uniform(0.8, 1.2))

    async def _round(self) -> None:
        if not self.storage.online:
            return
        self._watch_clock()
        now = now_s()
        if now - self.storage.greeted_at >= self._timings.greet_every_s or not self.storage.neighbours:
            self.storage.greet()
        search_every_s = self._timings.search_every_s * self.reader.stretch
        if now - self.storage.searched_at >= search_every_s or not self.storage.neighbours:
            await self.storage.search(self.reader.places_of(self.reader.near_stages()))
        renew_s = self._timings.renew_s * self._stored_stretch
        if self._own is not None and now - self._stored_at >= renew_s:
            await self._store_own()
        await self._manifests.renew()
        self.charters.poll()
        if self.run_id is not None:
            await self.reader.read_some()

    def _watch_clock(self) -> None:
        """Say that the machine slept, or its clock jumped, and announce ourselves again at once, and all that
        we store: that was refused, or has expired. No other node took it, nor takes it from ours."""
        offset_s = unix_s() - now_s()
        jump_s, self._clock_offset_s = offset_s - self._clock_offset_s, offset_s
        if abs(jump_s) > CLOCK_JUMP_S:
            text = "this machine slept, or its clock jumped by %+.0f s. While that is wrong, other peers "
            logger.warning(text + "refuse our record: set it (NTP)", jump_s)
            latest, soon = latest_expiry(now := unix_s()), now + self._timings.life_s
            self.storage.node.drop_those(lambda kept: kept.entry.expires > latest)
            self._table.hasten(latest, soon)  # and not at once: each says anew that it is there
            self._stored_at = self._manifests.stored_at = self.charters.stored_at = -math.inf

    def watch(self, stages: Collection[Stage] | None) -> None:
        self.reader.watch(stages)

    @property
    def lag_s(self) -> float:
        return self.reader.lag_s

    def peers(self) -> Sequence[PeerRecord]:
        return self._table.all(now=unix_s())

    def at(self, stage: Stage) -> Sequence[PeerRecord]:
        return self._table.at(stage, now=unix_s())

    def find(self, peer: PeerId) -> PeerRecord | None:
        return self._table.find(peer, now=unix_s())

    async def refresh(self, stages: Collection[Stage] | None = None) -> Sequence[PeerRecord]:
        if stages is None:
            await self._find_stages()
        await self.reader.read_all(self.reader.near_stages() if stages is None else stages, REFRESH_LIMIT_S)
        return self.peers()

    async def lookup_all(self) -> Sequence[PeerRecord]:
        await self._find_stages()
        await self.reader.read_all(self.reader.all_stages(), _READ_ALL_LIMIT_S)
        return self.peers()

    async def announce(self, record: PeerRecord) -> None:
        """Publish our record and renew it until it is replaced.

        A change of run, stage or state is stored before this returns; one of only version, speed and the
        like goes out with the next renewal, at most `renew_s` later.

        Raises:
            ValueError: the record is not about us, or larger than `MAX_RECORD_BYTES`.
        """
        seal_record(record, 0.0, self._identity)  # a wrong record fails here
        before = self._own
        if before is not None and (before.run, before.stage) != (record.run, record.stage):
            await self.withdraw()  # it lies under other keys
            before = None
        self._set_own(record)
        if before is None or before.state != record.state:
            await self._store_own()

    async def withdraw(self) -> None:
        """Replace our record by one that says `left`, and renew it no more."""
        if self._own is None:
            return
        self._set_own(msgspec.structs.replace(self._own, state="left"))
        await self._store_own()
        self._set_own(None)
        self._level = 0

    def _set_own(self, record: PeerRecord | None) -> None:
        self._own = record
        self._table.set_own(record if record is not None and record.run == self.run_id else None)

    async def _store_own(self) -> None:
        assert self._own is not None
        if not self.storage.online:
            self._stored_at = -math.inf  # as soon as we are back
            return
        self._stored_at, now = now_s(), unix_s()
        if self._own_expires > latest_expiry(now):  # the clock was far ahead
            self._own_expires = -math.inf
        # Later than any earlier one, also when the clock was set back a little: the DHT keeps the latest.
        self._stored_stretch = self.reader.stretch
        life_s = min(self._timings.life_s * self._stored_stretch, MAX_LIFE_S)
        self._own_expires = max(now + life_s, self._own_expires + 2 * VERSION_S)
        record = self._own
        if self._moved_to:
            record = msgspec.structs.replace(record, addresses=self._moved_to)
        replicas = sum(self._table.levels(record.stage).values()) if record.run == self.run_id else 0
        self._level = self.reader.scale.level_for(1 + replicas, self._level)
        value = seal_record(
            record, self._own_expires, self._identity, level=self._level, credential=self.door.credential
        )
        entry = Entry(record.peer, value, self._own_expires)
        keys = record_keys(record, self._level)
        took = await asyncio.gather(*(self.storage.store(key, entry) for key in keys))
        if took[0] == 1 and (self.storage.join or self.storage.addresses.latest(1)):
            self._stored_at = -math.inf  # no other node has it: again in the next round

    async def publish_manifest(self, run: Run) -> None:
        """Publish a run's manifest, and keep it published. Raises SetupError: its owner is another one."""
        await self._manifests.publish(run.id, *seal_manifest(run, self._identity))
        await self._learn(run)

    async def find_run(self, name: RunName, *, timeout_s: float = 10.0) -> str:
        """The id of the run that the charter of this name is about; this directory is of that run from now
        on.

        Raises:
            SetupError: no node that can be reached has that charter.
        """
        charter = await self.charters.find(name, timeout_s=timeout_s)
        self.run_id = self.reader.run_id = charter.run
        return charter.run

    def _recheck(self) -> None:
        """What was admitted may not be any more."""
        self._table.drop(self.door.why_not_record)
        self.storage.node.recheck()

    async def fetch_manifest(self, run_id: str, *, timeout_s: float = 10.0) -> Run:
        """The run of this id: the hash of its manifest, whose owner, if it names one, signed it.

        From then on we help to keep it published.

        Raises:
            SetupError: no node that can be reached has it, or the charter that we follow is not its owner's.
        """
        run = await self._manifests.fetch(run_id, timeout_s)
        await self._learn(run)
        return run

    async def _find_stages(self) -> None:
        """Learn how many stages the run has, if its manifest was not asked for yet."""
        if self.run_id is not None and not self.reader.knows_stages:
            with contextlib.suppress(SetupError):
                await self.fetch_manifest(self.run_id, timeout_s=SEARCH_WAIT_S)

    async def _learn(self, run: Run) -> None:
        """From the run's manifest: its stages, and whose charter holds."""
        if run.id == self.run_id:
            self.reader.stages = run.cells
            self.charters.follow_manifest(run)
            if self.charters.charter is None:
                await self.charters.ask()


class ManifestKeeper:
    """A run's manifest in the DHT: published by its owner, kept there by all that fetched it."""

    def __init__(self, storage: DhtStorage, rng: random.Random, life_s: float) -> None:
        self.kept: tuple[str, PeerId, bytes] | None = None
        """Run, owner, and the signed text."""
        self.stored_at = -math.inf
        self._storage, self._random, self._life_s = storage, rng, life_s

    async def publish(self, run_id: str, owner: PeerId, value: bytes) -> None:
        self.kept = (run_id, owner, value)
        await self._store()

    async def renew(self) -> None:
        """Store it again if a third of its life is over."""
        if self.kept is not None and now_s() - self.stored_at >= self._life_s / 3:
            await self._store()

    async def _store(self) -> None:
        assert self.kept is not None
        run_id, owner, value = self.kept
        self.stored_at = now_s() if self._storage.online else -math.inf
        await self._storage.store(manifest_key(run_id), Entry(owner, value, unix_s() + self._life_s))

    async def fetch(self, run_id: str, timeout_s: float) -> Run:
        """The run. Raises SetupError if no node has it."""
        place = self._storage.place(manifest_key(run_id))
        deadline = now_s() + timeout_s
        while True:
            run = await self._ask_nodes(run_id, place, min(RPC_S, timeout_s))
            if run is not None:
                return run
            if now_s() >= deadline:
                refused = ", ".join(sorted(self._storage.check.rejected)[:3])
                text = f"no peer here knows a run {run_id}: check the id, and that a peer of that run is up"
                raise SetupError(text + (f" (refused from others: {refused})" if refused else ""))
            if self._storage.online:
                await self._storage.search([place])
            await asyncio.sleep(0.3)

    async def _ask_nodes(self, run_id: str, place: Place, limit_s: float) -> Run | None:
        """The run, from the first node near its key that has it."""
        storage = self._storage
        if not storage.online:
            return None
        if run := self._take(run_id, place.key, storage.node.entries(place.key)):
            return run
        near = storage.nearest(place, 2 * REPLICAS)
        asking = [storage.node.read(peer, {place.key: {}}, MAX_ANSWER_BYTES) for peer in near]
        with contextlib.suppress(asyncio.TimeoutError):
            for answer in asyncio.as_completed(asking, timeout=limit_s):
                answered = await answer
                found = answered[0][place.key].entries if answered is not None else ()
                if run := self._take(run_id, place.key, found):
                    return run
        return None

    def _take(self, run_id: str, key: bytes, entries: Iterable[Entry]) -> Run | None:
        """The run, if its manifest is among the entries; we keep it published from now on."""
        for entry in entries:
            if self._storage.check.open(key, entry) != "":
                continue
            with contextlib.suppress(Refused, SetupError):
                _, text = open_manifest(entry.value, entry.subkey)
                run = check_id(text, run_id)
                if run.admission.owner == entry.subkey:
                    self.kept = (run_id, entry.subkey, entry.value)
                    self._storage.node.keep_read(key, entry)  # others may ask here before it is renewed
                    # Not all peers at the same moment.
                    self.stored_at = now_s() - self._life_s / 3 * self._random.random()
                    return run
        return None
