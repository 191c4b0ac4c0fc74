# pyright: reportAttributeAccessIssue=false
# (protobuf's generated modules carry no types)
"""Who serves what, from hivemind's DHT. Fulfils `peers.ports.Directory`.

Kademlia finds the nodes near a key; from there on we read and write ourselves, because `DHTNode.get` stops at
the first node that claims an infinite expiration (a stranger could hide everybody), and because a whole
search for each of 16 keys every two seconds would cost more than the training's own calls. So each refresh
asks a few random nodes that together are near all keys, one question per node for all of its keys, and the
answers add up in a table whose entries leave when they expire. The keys of a node that does not answer are
asked of others. A search runs every 30 s.

Nobody is needed for long: who joined knows the addresses of those it met, and those to join at are greeted
again whenever they were lost, so that a bootstrap that returns finds the run, and two halves become one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from peers.net import envelopes
from peers.net._hivemind import (
    DHTID,
    DHTNode,
    DHTProtocol,
    DHTRecord,
    P2PContext,
    PeerID,
    RecordValidatorBase,
    TaskKeeper,
    dht_pb2,
    use_protocol,
)
from peers.net.control import AttachedP2P, ControlError, DaemonControl
from peers.net.daemon import split_peer_id
from peers.net.identity import Identity
from peers.net.survey import Survey
from peers.waiting import happens
from swarm.errors import Refused, SetupError
from swarm.ids import PeerId
from swarm.records import PeerRecord

logger = logging.getLogger(__name__)

REFRESH_S = 2.0
RENEW_S = 5.0
LIFE_S = 20.0
"""A dead peer's record is gone after this; four renewals may be lost before a living one's is."""
MANIFEST_LIFE_S = 300.0
MANIFEST_RENEW_S = 100.0
SEARCH_EVERY_S = 30.0
GREET_EVERY_S = 5.0
"""How often those to join at are dialled while we have lost them."""
JOIN_S = 8.0
REPLICAS = 5
FIRST_ANSWERS = 2
"""For each key, in the first refresh: a node that was away has missed what was stored meanwhile."""
_RPC_S = 3.0
_SLOW_S = 0.5
"""Others are asked too when an answer takes longer. On an idle core it takes 2 ms, around the world 0.3 s."""
_REFRESH_LIMIT_S = 5.0
_SEARCH_WAIT_S = 1.0
"""A search among dead nodes takes long; our own record must be renewed meanwhile."""
_JOIN_GRACE_S = 0.5
"""How long to wait for the other addresses to join at once one of them is reached."""
_MOST_MET = 64
"""Peers whose addresses are kept after their records ran out, to find the swarm again when all were lost."""
_MOST_REJOINED = 20
_MET_GREETED = 2
"""Of those met and lost, so many are dialled at a time; most of them are dead."""
_CLOCK_MARGIN_S = 60.0
_MAX_KEYS_PER_STORE = 64
_MAX_SUBKEYS = 1024
"""Under one key: 0.7 MB in one answer, of the 4 MiB at which hivemind's unary calls hang."""
_MAX_KEYS = 4096
_MAX_ENTRIES = 16384
"""That a node stores for others: about 15 MB."""
_MAX_ANSWER_BYTES = 1 << 20
_MAX_RECORD_GUESS = 700


@functools.lru_cache(maxsize=8192)
def _checked(key: bytes, subkey: bytes, value: bytes, expires: float) -> str:
    """'' if the DHT may hold this, else the reason why not. Cached: a record is seen many times."""
    try:
        owner = msgspec.msgpack.decode(subkey, type=str)
    except msgspec.DecodeError:
        return "a subkey that is not a text"
    try:
        if len(owner) == 52 and len(value) <= envelopes.MAX_ENVELOPE_BYTES:
            with contextlib.suppress(Refused):
                if _id(envelopes.manifest_key(envelopes.open_manifest(value, owner)[0])) == key:
                    return ""
            record = envelopes.open_record(value, owner, expires)
            home = envelopes.peers_key(record.run, envelopes.shard_of(record.peer))
        else:
            home = envelopes.manifest_key(envelopes.open_manifest(value, owner)[0])
    except Refused as refusal:
        return refusal.text
    return "" if _id(home) == key else "a value under a key where it does not belong"


@functools.lru_cache(maxsize=4096)
def _id(key: str) -> bytes:
    return DHTID.generate(source=key).to_bytes()


class RecordCheck(RecordValidatorBase):
    """What our node stores, and believes when it reads: see `envelopes`. Counts what it refuses."""

    def __init__(self) -> None:
        self.rejected: Counter[str] = Counter()

    def validate(self, record: DHTRecord) -> bool:
        if record.expiration_time > time.time() + envelopes.MAX_LIFE_S + _CLOCK_MARGIN_S:
            reason = "a value that wants to live too long"
        elif len(record.value) > envelopes.MAX_PACKED_MANIFEST_BYTES or len(record.subkey) > 100:
            reason = "a value that is too large"
        else:
            reason = _checked(record.key, record.subkey, record.value, record.expiration_time)
        if reason:
            if reason in self.rejected or len(self.rejected) < 100:
                self.rejected[reason] += 1
            logger.debug("refused a DHT record: %s", reason)
        return not reason


class _BoundedProtocol(DHTProtocol):
    """hivemind's DHT protocol, which stores whatever anybody sends, with limits."""

    _entries = 0
    _counted_at = 0.0

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        count = len(request.keys)
        aligned = count == len(request.values) == len(request.expiration_time) == len(request.in_cache)
        if (
            not aligned
            or count != len(request.subkeys)
            or count > _MAX_KEYS_PER_STORE
            or not all(self._room(key) for key in request.keys)
        ):
            return dht_pb2.StoreResponse(
                store_ok=[False] * min(count, _MAX_KEYS_PER_STORE), peer=self.node_info
            )
        self._entries += count
        return await super().rpc_store(request, context)

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        del request.keys[_MAX_KEYS_PER_STORE:]
        return await super().rpc_find(request, context)

    def _room(self, key: bytes) -> bool:
        now = time.monotonic()
        if now - self._counted_at > 1.0:
            self._counted_at = now
            self._entries = sum(
                len(getattr(item.value, "data", ())) or 1
                for storage in (self.storage, self.cache)
                for item in list(storage.data.values())
            )
        if self._entries >= _MAX_ENTRIES or len(key) != DHTID.HASH_NBYTES:
            return False
        held = self.storage.data.get(DHTID.from_bytes(key))
        return held is None or len(getattr(held.value, "data", ())) < _MAX_SUBKEYS


use_protocol(_BoundedProtocol)


@dataclass(slots=True)
class _Known:
    """A verified record and the Unix time at which it ends."""

    record: PeerRecord
    expires: float


class NetDirectory:
    """The records of one run, and this peer's own. Without a run it only serves others (bootstrap)."""

    def __init__(
        self,
        p2p: AttachedP2P,
        control: DaemonControl,
        identity: Identity,
        run_id: str | None,
        *,
        join: Sequence[str] = (),
        learn: Callable[[PeerId, Iterable[str]], None] | None = None,
        refresh_s: float = REFRESH_S,
        renew_s: float = RENEW_S,
        life_s: float = LIFE_S,
        manifest_life_s: float = MANIFEST_LIFE_S,
        manifest_renew_s: float = MANIFEST_RENEW_S,
    ) -> None:
        """`join`: multiaddrs of peers to join at, each ending in `/p2p/<id>`. `learn` is told addresses."""
        self.run_id = run_id
        self.check = RecordCheck()
        self._p2p, self._control, self._identity = p2p, control, identity
        self._join = [split_peer_id(address) for address in join]
        self._learn = learn
        self._refresh_s, self._renew_s, self._life_s = refresh_s, renew_s, life_s
        self._manifest_life_s, self._manifest_renew_s = manifest_life_s, manifest_renew_s
        self._node: DHTNode | None = None
        self._online = False
        """Our p2pd runs, and the node above is on it."""
        self._keeper = TaskKeeper()
        self._known: dict[PeerId, _Known] = {}
        self._listed: list[PeerRecord] | None = None
        """What `peers` says until something changes, or `_listed_until`."""
        self._listed_until = 0.0
        self._met: dict[PeerId, tuple[str, ...]] = {}
        """Addresses of those whose records we saw, the latest last."""
        self._moved_to: tuple[str, ...] = ()
        self._refreshed = False
        self._own: PeerRecord | None = None
        self._own_expires = 0.0
        self._stored_at = 0.0
        self._changed = asyncio.Event()
        self._manifest: tuple[str, PeerId, bytes] | None = None
        self._manifest_stored_at = 0.0
        self._searched_at = self._greeted_at = 0.0
        self._searching: asyncio.Task[None] | None = None
        self._greeting: asyncio.Task[None] | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._random = random.Random(identity.peer_id)

    # -- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Join the DHT and begin to refresh.

        Raises:
            SetupError: no address to join at could be reached; the text says what to check.
        """
        with self._keeper.keeping():
            reached = await self._connect(self._join)
            if self._join and not reached:
                raise SetupError(self._unreachable)
            await self._begin(reached)

    async def _begin(self, reached: Sequence[PeerId]) -> None:
        """A DHT node on our p2pd, joined at `reached`, and the loop that keeps it."""
        try:
            node = await DHTNode.create(
                p2p=self._p2p,
                # The same place after a restart: else others would know us under two.
                node_id=DHTID.generate(source=self._identity.peer_id),
                initial_peers=[f"/p2p/{peer}" for peer in reached] or None,
                bucket_size=10,
                num_replicas=REPLICAS,
                wait_timeout=_RPC_S,
                bootstrap_timeout=1.0,
                cache_nearest=0,
                cache_locally=False,
                cache_on_store=False,
                cache_size=_MAX_KEYS,
                # A node that was dead or cut off is tried again in every search: it may be back.
                backoff_rate=1.0,
                record_validator=self.check,
            )
        except RuntimeError:
            raise SetupError(
                "the peers to join at can be reached, but do not answer as peers of a swarm: "
                f"{', '.join(reached)}. Do they run the same version?"
            ) from None
        except ValueError as error:
            raise SetupError(f"cannot join: {error}") from None
        except Exception as error:
            # hivemind's ValidationError, which it derives from Exception
            if type(error).__name__ != "ValidationError":
                raise
            raise SetupError(_explain_validation(str(error))) from None
        node.protocol.storage.maxsize = _MAX_KEYS
        if self._node is not None:  # what others gave us to keep outlives our p2pd
            for key_id, item in list(self._node.protocol.storage.items()):
                for subkey, entry in list(getattr(item.value, "data", {}).items()):
                    node.protocol.storage.store(key_id, entry.value, entry.expiration_time, subkey=subkey)
        self._node, self._online = node, True
        self._loop_task = asyncio.get_running_loop().create_task(self._run())

    def daemon_died(self) -> None:
        """Our p2pd ended. Until another one runs we say what we knew, and remember what to announce."""
        self._online = False

    async def daemon_is_back(
        self, p2p: AttachedP2P, control: DaemonControl, moved_to: tuple[str, ...] = ()
    ) -> None:
        """A new p2pd took the place of the one that died: join again, and announce what we announced.

        With nobody in reach we go on alone, and look for them. `moved_to`: our addresses, if they changed.

        Raises:
            SetupError: as `start`, except that nobody has to be reached.
            ControlError: the new p2pd fails too.
        """
        await self.close()
        self._p2p, self._control, self._moved_to = p2p, control, moved_to
        self._stored_at = self._searched_at = self._greeted_at = self._manifest_stored_at = 0.0
        self._refreshed = False
        latest = list(self._met)[-_MOST_REJOINED:]
        with self._keeper.keeping():
            await self._begin(await self._connect(self._join + self._met_addresses(latest)))

    def _met_addresses(self, peers: Iterable[PeerId]) -> list[tuple[str, PeerId]]:
        """As `_join` has them."""
        return [(address.split("/p2p/")[0], peer) for peer in peers for address in self._met[peer]]

    async def _connect(self, places: Sequence[tuple[str, PeerId]]) -> list[PeerId]:
        """Dial addresses; the ids of those that answer, in time or soon after the first one."""
        grouped: dict[PeerId, list[str]] = defaultdict(list)
        for address, peer in places:
            grouped[peer].append(address)
        grouped.pop(self._identity.peer_id, None)
        self._unreachable = ""
        if not grouped:
            return []
        dials = {
            self._keeper.create_task(self._control.connect(peer, addresses, JOIN_S)): peer
            for peer, addresses in grouped.items()
        }
        left: set[asyncio.Task[None]] = set(dials)
        reached: list[PeerId] = []
        reasons: list[str] = []
        while left:
            done, left = await asyncio.wait(
                left, timeout=_JOIN_GRACE_S if reached else None, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                break  # the others are dialled on; who answers late is found by searching
            for dial in done:
                peer, error = dials[dial], dial.exception()
                if error is None:
                    reached.append(peer)
                elif isinstance(error, ControlError):
                    reasons.append(f"{', '.join(grouped[peer])}/p2p/{peer}: {error.text}")
                else:
                    raise error
        self._unreachable = (
            "none of the peers to join at can be reached. Check that one of them is running, that its "
            "address, port and peer id are those it printed, and that no firewall is between: "
            + "; ".join(reasons)
        )
        return sorted(reached)

    async def close(self) -> None:
        """End all tasks. The record stays in the DHT until it expires: `withdraw` first."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._loop_task
            self._loop_task = None
        if self._node is not None:
            self._node.is_alive = False
        self._online = False
        await self._keeper.close()

    async def _run(self) -> None:
        """Refresh, renew, search, until cancelled."""
        with self._keeper.keeping():
            while True:
                try:
                    await self._round()
                except (ControlError, OSError) as error:
                    logger.debug("the DHT cannot be reached: %s", error)
                except Exception:  # strangers' answers pass through hivemind here: they must not end it
                    logger.exception("a refresh of the directory failed")
                # Not all peers at the same moment, though all may have started at once.
                await happens(self._changed, self._refresh_s * self._random.uniform(0.8, 1.2))
                self._changed.clear()

    async def _round(self) -> None:
        if not self._online:
            return
        now = time.time()
        if not 0 <= now - self._greeted_at < GREET_EVERY_S or not self._neighbours_known():
            self._greeted_at = now
            self._greet()
        if not 0 <= now - self._searched_at < SEARCH_EVERY_S or not self._neighbours_known():
            await self._search()
        if self._own is not None and (self._stored_at == 0.0 or now - self._stored_at >= self._renew_s):
            await self._store_own()
        if self._manifest is not None and now - self._manifest_stored_at >= self._manifest_renew_s:
            await self._store_manifest()
        if self.run_id is not None:
            await self._refresh()

    # -- finding nodes --------------------------------------------------------------------------

    def _keys(self) -> list[str]:
        if self.run_id is None:
            return []
        return [envelopes.peers_key(self.run_id, shard) for shard in range(envelopes.SHARDS)]

    @property
    def online(self) -> bool:
        """Whether our p2pd runs, with our DHT node on it."""
        return self._online

    def _neighbours_known(self) -> bool:
        return self._node is not None and bool(self._node.protocol.routing_table.uid_to_peer_id)

    @property
    def neighbours(self) -> int:
        """How many nodes of the DHT we know."""
        return len(self._node.protocol.routing_table.uid_to_peer_id) if self._node is not None else 0

    async def _search(self) -> None:
        """Look for the nodes near our own id and our keys. Waits a moment only; the search goes on."""
        assert self._node is not None
        if self._searching is None or self._searching.done():
            self._searched_at = time.time()
            queries = [self._node.node_id, *(DHTID.generate(source=key) for key in self._keys())]
            self._searching = self._kept(
                self._node.find_nearest_nodes(queries, k_nearest=REPLICAS, beam_size=REPLICAS)
            )
        await asyncio.wait([self._searching], timeout=_SEARCH_WAIT_S)

    def _greet(self) -> None:
        """Dial, in the background, those to join at that we lost, and some of those we met and lost.

        After a cut each half of the swarm has forgotten the other: somebody has to try. If all are lost,
        everybody is tried.
        """
        if self._greeting is not None and not self._greeting.done():
            return
        assert self._node is not None
        known = {str(peer) for peer in self._node.protocol.routing_table.peer_id_to_uid}
        met = [peer for peer in self._met if peer not in known]
        if known:
            met = self._random.sample(met, min(len(met), _MET_GREETED))
        lost: dict[PeerId, list[str]] = defaultdict(list)
        for address, peer in self._join + self._met_addresses(met):
            if peer not in known and peer != self._identity.peer_id:
                lost[peer].append(address)
        if lost:
            self._greeting = self._kept(
                asyncio.gather(*(self._greet_one(peer, addresses) for peer, addresses in lost.items()))
            )

    async def _greet_one(self, peer: PeerId, addresses: Sequence[str]) -> None:
        assert self._node is not None
        with contextlib.suppress(ControlError):
            await self._control.connect(peer, addresses, JOIN_S)
            await self._node.protocol.call_ping(PeerID.from_base58(peer))

    def _kept(self, work: Awaitable[Any]) -> asyncio.Task[None]:
        """Run `work` in the background, until it ends or we close."""

        async def run() -> None:
            try:
                await work
            except (ControlError, OSError) as error:
                logger.debug("the DHT cannot be reached: %s", error)
            except Exception:  # strangers' answers pass through hivemind here
                # One that is cancelled may trip over hivemind's own assertions.
                logger.log(
                    logging.ERROR if self._online else logging.DEBUG,
                    "a search of the directory failed",
                    exc_info=True,
                )

        return self._keeper.create_task(run())

    def _nearest(self, key: str, count: int) -> list[PeerID]:
        """Nodes near the key, nearest first, from the routing table; without us."""
        assert self._node is not None
        table = self._node.protocol.routing_table
        near = table.get_nearest_neighbors(DHTID.generate(source=key), count, exclude=self._node.node_id)
        return list(dict.fromkeys(peer for _, peer in near))  # a stranger may claim several places

    # -- reading --------------------------------------------------------------------------------

    def peers(self) -> Sequence[PeerRecord]:
        now = time.time()
        if self._listed is not None and now < self._listed_until:
            return self._listed
        for peer in [peer for peer, known in self._known.items() if known.expires <= now]:
            del self._known[peer]
        records = {peer: known.record for peer, known in self._known.items()}
        if self._own is not None and self._own.run == self.run_id:
            records[self._own.peer] = self._own
        self._listed = [records[peer] for peer in sorted(records)]
        self._listed_until = min((known.expires for known in self._known.values()), default=math.inf)
        return self._listed

    async def refresh(self) -> Sequence[PeerRecord]:
        if self._online:
            with self._keeper.keeping():
                if not self._searched_at or not self._neighbours_known():
                    await self._search()
                await self._refresh()
        return self.peers()

    async def _refresh(self) -> None:
        holders: dict[DHTID, list[PeerID]] = {}
        spare: dict[DHTID, list[PeerID]] = {}
        for key in self._keys():
            key_id = DHTID.generate(source=key)
            near = self._nearest(key, 2 * REPLICAS)
            holders[key_id], spare[key_id] = near[:REPLICAS], near[REPLICAS:]
            self._take(key_id.to_bytes(), self._stored_here(key_id))
        survey = Survey(holders, spare, self._random, answers=1 if self._refreshed else FIRST_ANSWERS)
        # No answer may come near the size that hangs hivemind's unary calls.
        per_key = _MAX_RECORD_GUESS * (1 + len(self._known) // envelopes.SHARDS)
        batch = max(1, min(envelopes.SHARDS, _MAX_ANSWER_BYTES // per_key))
        clock = asyncio.get_running_loop().time
        end = clock() + _REFRESH_LIMIT_S
        asking: dict[asyncio.Task[bool], tuple[PeerID, list[DHTID], float]] = {}
        while self._online:
            for peer, keys in survey.ask().items():
                for start in range(0, len(keys), batch):
                    some = keys[start : start + batch]
                    asking[self._keeper.create_task(self._ask(peer, some))] = (peer, some, clock())
            if survey.over or clock() >= end:
                break  # what still comes goes into the table
            done, _ = await asyncio.wait(asking, timeout=_SLOW_S, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                peer, keys, _ = asking.pop(task)
                answered = not task.cancelled() and task.result()
                (survey.answered if answered else survey.failed)(peer, keys)
            for peer, keys, since in asking.values():
                if clock() - since >= _SLOW_S:
                    survey.late(peer, keys)
        self._refreshed = self._refreshed or self._neighbours_known()

    async def _ask(self, peer: PeerID, keys: Sequence[DHTID]) -> bool:
        """Take in what one node has under some keys; whether it answered."""
        found = await self._find(peer, keys)
        for key_id, entries in (found or {}).items():
            self._take(key_id.to_bytes(), entries)
        return found is not None

    async def _find(
        self, peer: PeerID, keys: Sequence[DHTID]
    ) -> dict[DHTID, dict[object, tuple[bytes, float]]] | None:
        """Ask one node for the entries under some keys. What it answers went through `RecordCheck`.

        None if it did not answer.
        """
        assert self._node is not None
        answer = await self._node.protocol.call_find(peer, keys)
        if answer is None:
            return None
        found: dict[DHTID, dict[object, tuple[bytes, float]]] = {}
        for key_id, (item, _) in answer.items():
            data = getattr(item.value, "data", None) if item is not None else None
            if isinstance(data, dict):
                found[key_id] = {
                    subkey: (entry.value, entry.expiration_time) for subkey, entry in data.items()
                }
        return found

    def _stored_here(self, key_id: DHTID) -> dict[object, tuple[bytes, float]]:
        assert self._node is not None
        item = self._node.protocol.storage.get(key_id)
        data = getattr(item.value, "data", {}) if item is not None else {}
        return {subkey: (entry.value, entry.expiration_time) for subkey, entry in data.items()}

    def _take(self, key: bytes, entries: dict[object, tuple[bytes, float]]) -> None:
        """Into the table: verified (again), ours, unexpired, newer than what we have."""
        now = time.time()
        for subkey, (value, expires) in entries.items():
            if not isinstance(subkey, str) or expires <= now or subkey == self._identity.peer_id:
                continue
            known = self._known.get(subkey)
            if known is not None and known.expires >= expires:
                continue
            if not isinstance(value, bytes) or not self.check.validate(
                DHTRecord(key, msgspec.msgpack.encode(subkey), value, expires)
            ):
                continue
            try:
                record = envelopes.open_record(value, subkey, expires)
            except Refused:
                continue
            if record.run == self.run_id:
                self._known[subkey] = _Known(record, expires)
                self._listed = None
                self._meet(record)
                if self._learn is not None and record.addresses:
                    self._learn(subkey, record.addresses)

    def _meet(self, record: PeerRecord) -> None:
        self._met.pop(record.peer, None)
        if record.addresses and record.state != "left":
            self._met[record.peer] = record.addresses
        while len(self._met) > _MOST_MET:
            del self._met[next(iter(self._met))]

    # -- writing --------------------------------------------------------------------------------

    async def announce(self, record: PeerRecord) -> None:
        """Publish our record and renew it until it is replaced.

        A change of run, stage or state is stored before this returns; one of only version, speed and the
        like goes out with the next renewal, at most `renew_s` later.

        Raises:
            ValueError: the record is not about us, or larger than `MAX_RECORD_BYTES`.
        """
        before, self._own, self._listed = self._own, record, None
        envelopes.seal_record(record, time.time(), self._identity)  # a wrong record fails here
        if before is None or (before.run, before.stage, before.state) != (
            record.run,
            record.stage,
            record.state,
        ):
            with self._keeper.keeping():
                await self._store_own()

    async def withdraw(self) -> None:
        """Replace our record by one that says `left`, and renew it no more."""
        if self._own is None:
            return
        record = msgspec.structs.replace(self._own, state="left")
        with self._keeper.keeping():
            self._own, self._listed = record, None
            await self._store_own()
        self._own = self._listed = None

    async def _store_own(self) -> None:
        assert self._own is not None
        if not self._online:
            self._stored_at = 0.0  # as soon as we are back
            return
        self._stored_at = time.time()
        # Later than any earlier one, also when the clock was set back: the DHT keeps the latest.
        self._own_expires = max(self._stored_at + self._life_s, self._own_expires + 0.001)
        record = self._own
        if self._moved_to:
            record = msgspec.structs.replace(record, addresses=self._moved_to)
        value = envelopes.seal_record(record, self._own_expires, self._identity)
        key = envelopes.peers_key(record.run, envelopes.shard_of(record.peer))
        if await self._store(key, record.peer, value, self._own_expires) == 1 and (self._join or self._met):
            self._stored_at = 0.0  # nobody but us has it: again in the next round

    async def _store(self, key: str, subkey: str, value: bytes, expires: float) -> int:
        """Put a value on the nodes nearest to the key; how many took it."""
        assert self._node is not None
        key_id = DHTID.generate(source=key)
        self._node.protocol.storage.store(key_id, value, expires, subkey=subkey)
        if not self._online:
            return 0
        answers = await asyncio.gather(
            *(
                self._node.protocol.call_store(peer, [key_id], [value], expires, subkeys=[subkey])
                for peer in self._nearest(key, REPLICAS)
            )
        )
        return 1 + sum(bool(answer and answer[0]) for answer in answers)

    # -- manifests ------------------------------------------------------------------------------

    async def publish_manifest(self, text: str) -> str:
        """Publish a run's canonical text, and keep it published; returns the run's id.

        Raises:
            SetupError: not canonical, or the manifest names an owner who is not us.
        """
        owner, value = envelopes.seal_manifest(text, self._identity)
        run_id = envelopes.run_id_of(text)
        self._manifest = (run_id, owner, value)
        with self._keeper.keeping():
            if self._online and not self._neighbours_known():
                await self._search()
            await self._store_manifest()
        return run_id

    async def _store_manifest(self) -> None:
        assert self._manifest is not None
        run_id, owner, value = self._manifest
        self._manifest_stored_at = time.time() if self._online else 0.0
        await self._store(envelopes.manifest_key(run_id), owner, value, time.time() + self._manifest_life_s)

    async def fetch_manifest(self, run_id: str, *, timeout_s: float = 10.0) -> str:
        """The text of a run's manifest: its hash is the id, and its owner, if it names one, signed it.

        From then on we help to keep it published.

        Raises:
            SetupError: nobody has it.
        """
        key = envelopes.manifest_key(run_id)
        deadline = time.monotonic() + timeout_s
        with self._keeper.keeping():
            while True:
                text = await self._look_for_manifest(run_id, key, min(_RPC_S, timeout_s))
                if text is not None:
                    return text
                if time.monotonic() >= deadline:
                    refused = ", ".join(sorted(self.check.rejected)[:3])
                    raise SetupError(
                        f"nobody here knows a run {run_id}: check the id, and that a peer of that run is up"
                        + (f" (refused from others: {refused})" if refused else "")
                    )
                if self._node is not None and self._online:
                    nearer = self._node.find_nearest_nodes([DHTID.generate(source=key)], k_nearest=REPLICAS)
                    await asyncio.wait([self._kept(nearer)], timeout=_SEARCH_WAIT_S)
                await asyncio.sleep(0.3)

    async def _look_for_manifest(self, run_id: str, key: str, limit_s: float) -> str | None:
        """The manifest, from the first node near its key that has it."""
        if not self._online:
            return None
        key_id = DHTID.generate(source=key)
        text = self._take_manifest(run_id, self._stored_here(key_id))
        asking = {
            self._keeper.create_task(self._find(peer, [key_id])) for peer in self._nearest(key, 2 * REPLICAS)
        }
        end = time.monotonic() + limit_s
        while text is None and asking and time.monotonic() < end:
            done, asking = await asyncio.wait(
                asking, timeout=end - time.monotonic(), return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                found = None if task.cancelled() else task.result()
                text = text or self._take_manifest(run_id, (found or {}).get(key_id, {}))
        return text

    def _take_manifest(self, run_id: str, entries: dict[object, tuple[bytes, float]]) -> str | None:
        """The text of the run's manifest, if it is among the entries; we keep it published from now on."""
        for owner, (value, _) in entries.items():
            with contextlib.suppress(Refused):
                found, text = envelopes.open_manifest(value, str(owner))
                if found == run_id:
                    self._manifest = (run_id, str(owner), value)
                    # Not all peers at the same moment.
                    self._manifest_stored_at = time.time() - self._manifest_renew_s * self._random.random()
                    return text
        return None


def _explain_validation(text: str) -> str:
    if "time must be" in text:
        return f"this machine's clock is wrong, or that of the peer to join at is ({text}): set it (NTP)"
    return f"cannot join: {text}"
