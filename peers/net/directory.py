# pyright: reportAttributeAccessIssue=false
# (hivemind's node does not know that its protocol is ours)
"""Who serves what, from hivemind's DHT. Fulfils `peers.ports.Directory`.

Kademlia finds the nodes near a key; from there on we read and write ourselves, because `DHTNode.get` stops at
the first node that claims an infinite expiration (a stranger could hide everybody), and because its answers
hold all records each time. So each refresh asks a few random nodes, one question per node for all of its
keys, and gets what is new (`holder.py`); the answers add up in a table whose entries leave when they expire.
The keys of a node that does not answer are asked of others.

Each stage has keys of its own (`shards.py`). Those of the stages that this peer works with are read first,
every refresh; the others take turns, within an allowance of bytes, as do all if there are many (`survey.py`).

Nobody is needed for long: who joined knows the addresses of those it met, and those to join at are greeted
again whenever they were lost, so that a bootstrap that returns finds the run, and two halves become one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from peers.net import envelopes
from peers.net._hivemind import DHTID, DHTNode, PeerID, TaskKeeper, use_protocol
from peers.net.control import AttachedP2P, ControlError, DaemonControl
from peers.net.daemon import CIRCUIT, split_peer_id, without_peer_id
from peers.net.envelopes import Announced
from peers.net.holder import (
    MAX_ANSWER_BYTES,
    MAX_KEYS,
    MAX_KEYS_PER_CALL,
    MAX_SUBKEYS,
    VERSION_S,
    Entry,
    HolderProtocol,
    RecordCheck,
    record_ids,
)
from peers.net.identity import Identity
from peers.net.shards import level_for, shards_to_read
from peers.net.survey import Allowance, Survey, stretch, whom_to_ask
from peers.net.table import Table
from peers.waiting import happens
from swarm.errors import Refused, SetupError
from swarm.ids import PeerId, Stage
from swarm.records import NO_STAGE, PeerRecord
from swarm.run import parse_run

logger = logging.getLogger(__name__)

REFRESH_S = 2.0
RENEW_S = 5.0
LIFE_S = 20.0
"""A dead peer's record is gone after this; four renewals may be lost before a living one's is. Both are
stretched in a large run."""
MANIFEST_LIFE_S = 300.0
MANIFEST_RENEW_S = 100.0
SEARCH_EVERY_S = 30.0
"""For the nodes near the keys that are read often; stretched in a large run."""
FAR_SEARCH_EVERY_S = 1800.0
GREET_EVERY_S = 5.0
"""How often those to join at are dialled while we have lost them."""
JOIN_S = 8.0
REPLICAS = 5
FIRST_ANSWERS = 2
"""For each key, in the first refresh: a node that was away has missed what was stored meanwhile."""
NEAR_QUESTIONS = 8
FAR_QUESTIONS = 2
"""Nodes asked in one refresh: a question costs 1 ms of CPU over all processes."""
NEAR_BYTES_PER_S = 64e3
FAR_BYTES_PER_S = 16e3
"""Read in the background. 10 000 peers are 2.5 MB: three minutes."""
_LEAST_ANSWER_BYTES = 4096
_SAVED_S = 10.0
"""Allowances are saved up for so long."""
_RPC_S = 3.0
_SLOW_S = 0.5
"""Others are asked too when an answer takes longer. On an idle core it takes 2 ms, around the world 0.3 s."""
_REFRESH_LIMIT_S = 5.0
_SURVEY_LIMIT_S = 60.0
_SEARCH_WAIT_S = 1.0
"""A search among dead nodes takes long; our own record must be renewed meanwhile."""
_FAR_SEARCH_WAIT_S = 10.0
_ALL_NEAR = 20
"""With no more nodes in reach searching takes a moment; among more it takes a few questions for each key."""
_NEAR_STRETCH = 0.2
"""Of the other times' stretch: a newcomer is seen after 2 s in a run of 500, after 10 s in one of 10 000."""
_JOIN_GRACE_S = 0.5
"""How long to wait for the other addresses to join at once one of them is reached."""
_MOST_MET = 64
"""Peers whose addresses are kept after their records ran out, to find the swarm again when all were lost."""
_MOST_REJOINED = 20
_MET_GREETED = 2
"""Of those met and lost, so many are dialled at a time; most of them are dead."""

use_protocol(HolderProtocol)


@dataclass(slots=True)
class _Place:
    """A key that we read or write: where it is, and when it was read. Monotonic seconds."""

    key: bytes
    key_id: DHTID
    read_at: float = -math.inf
    searched_at: float = -math.inf
    near: list[tuple[DHTID, PeerID]] = field(default_factory=list)
    """Nodes that a search found; the routing table alone knows the nodes near ourselves."""

    @property
    def is_new(self) -> bool:
        """Nobody has looked where it is."""
        return self.searched_at == -math.inf


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
        self._table = Table(identity.peer_id)
        self._places: dict[str, _Place] = {}
        self._stages = 0
        """Of the run, once its manifest is known."""
        self._watched: frozenset[Stage] | None = None
        self._near = Allowance(NEAR_BYTES_PER_S, NEAR_BYTES_PER_S * _SAVED_S)
        self._far = Allowance(FAR_BYTES_PER_S, FAR_BYTES_PER_S * _SAVED_S)
        self._met: dict[PeerId, tuple[str, ...]] = {}
        """Addresses of those whose records we saw, the latest last."""
        self._moved_to: tuple[str, ...] = ()
        self.read_bytes = 0
        """That questions and their answers took so far."""
        self._refreshed = False
        self._own: PeerRecord | None = None
        self._own_expires = 0.0
        self._level = 0
        """How far we spread our own record."""
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
                cache_size=1,
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
        node.protocol.storage.maxsize = MAX_KEYS
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
        self._places.clear()
        latest = list(self._met)[-_MOST_REJOINED:]
        with self._keeper.keeping():
            await self._begin(await self._connect(self._join + self._met_addresses(latest)))

    def move(self, addresses: tuple[str, ...]) -> None:
        """Announce ourselves at these from now on."""
        self._moved_to, self._stored_at = addresses, 0.0

    def met_addresses(self) -> list[str]:
        """Direct addresses of peers whose records we saw, the latest first, each ending in `/p2p/<id>`."""
        return [
            f"{without_peer_id(address)}/p2p/{peer}"
            for peer in reversed(self._met)
            for address in self._met[peer]
            if CIRCUIT not in address
        ]

    def _met_addresses(self, peers: Iterable[PeerId]) -> list[tuple[str, PeerId]]:
        """As `_join` has them."""
        return [(without_peer_id(address), peer) for peer in peers for address in self._met[peer]]

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
        search_every_s = SEARCH_EVERY_S * self._stretch
        if not 0 <= now - self._searched_at < search_every_s or not self._neighbours_known():
            await self._search(self._places_of(self._near_stages()))
        renew_s = self._renew_s * self._stretch
        if self._own is not None and (self._stored_at == 0.0 or now - self._stored_at >= renew_s):
            await self._store_own()
        if self._manifest is not None and now - self._manifest_stored_at >= self._manifest_renew_s:
            await self._store_manifest()
        if self.run_id is not None:
            await self._read_some()

    # -- finding nodes --------------------------------------------------------------------------

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

    async def _search(self, places: Sequence[_Place], *, wait_s: float = _SEARCH_WAIT_S) -> None:
        """Look for the nodes near our own id and some keys. Waits a moment only; the search goes on."""
        if self._searching is None or self._searching.done():
            self._searched_at = time.time()
            self._searching = self._kept(self._search_for(places))
        await asyncio.wait([self._searching], timeout=wait_s)

    async def _search_for(self, places: Sequence[_Place]) -> None:
        assert self._node is not None
        for place in places:
            place.searched_at = time.monotonic()
        found = await self._node.find_nearest_nodes(
            [self._node.node_id, *(place.key_id for place in places)],
            k_nearest=REPLICAS,
            beam_size=REPLICAS,
            exclude_self=True,
        )
        for place in places:
            place.near = list(found[place.key_id].items())

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

    def _nearest(self, place: _Place, count: int) -> list[PeerID]:
        """Nodes near a key, nearest first: those found by searching, and those of the routing table; not
        us."""
        assert self._node is not None
        table = self._node.protocol.routing_table
        known = table.get_nearest_neighbors(place.key_id, count, exclude=self._node.node_id)
        near = sorted({*known, *place.near}, key=lambda one: one[0].xor_distance(place.key_id))
        return list(dict.fromkeys(peer for _, peer in near))[:count]  # a stranger may claim several places

    # -- which keys -----------------------------------------------------------------------------

    def watch(self, stages: Collection[Stage] | None) -> None:
        self._watched = None if stages is None else frozenset(stages)

    def _all_stages(self) -> list[Stage]:
        return [NO_STAGE, *sorted({*range(self._stages), *(self._watched or ())})]

    def _near_stages(self) -> list[Stage]:
        """Keepers are few, and all peers ask whether there are any."""
        return self._all_stages() if self._watched is None else [NO_STAGE, *sorted(self._watched)]

    def _place(self, key: str) -> _Place:
        if key not in self._places:
            key_id = DHTID.generate(source=key)
            self._places[key] = _Place(key_id.to_bytes(), key_id)
        return self._places[key]

    def _places_of(self, stages: Iterable[Stage]) -> list[_Place]:
        """Where records of these stages may lie, as far as we know; those that were read longest ago
        first."""
        if self.run_id is None:
            return []
        places = [
            self._place(envelopes.peers_key(self.run_id, shard))
            for stage in stages
            for shard in shards_to_read(stage, self._table.levels(stage))
        ]
        return sorted(places, key=lambda place: place.read_at)

    @property
    def _stretch(self) -> float:
        return stretch(len(self._table))

    @property
    def lag_s(self) -> float:
        places = self._places_of(self._all_stages())
        return time.monotonic() - min((place.read_at for place in places), default=-math.inf)

    # -- reading --------------------------------------------------------------------------------

    def peers(self) -> Sequence[PeerRecord]:
        return self._table.all(now=time.time())

    def at(self, stage: Stage) -> Sequence[PeerRecord]:
        return self._table.at(stage, now=time.time())

    def find(self, peer: PeerId) -> PeerRecord | None:
        return self._table.find(peer, now=time.time())

    async def refresh(self, stages: Collection[Stage] | None = None) -> Sequence[PeerRecord]:
        if stages is None:
            await self._find_stages()
        await self._read_all(self._near_stages() if stages is None else stages, _REFRESH_LIMIT_S)
        return self.peers()

    async def survey(self) -> Sequence[PeerRecord]:
        await self._find_stages()
        await self._read_all(self._all_stages(), _SURVEY_LIMIT_S)
        return self.peers()

    async def _read_all(self, stages: Collection[Stage], limit_s: float) -> None:
        """Read everything of some stages now. How far a stage is spread turns out while it is read."""
        began = time.monotonic()
        with self._keeper.keeping():
            while self._online and time.monotonic() < began + limit_s:
                places = [place for place in self._places_of(stages) if place.read_at < began]
                if not places:
                    break
                if not self._neighbours_known() or any(place.is_new for place in places):
                    wait_s = _SEARCH_WAIT_S if self.neighbours <= _ALL_NEAR else _FAR_SEARCH_WAIT_S
                    await self._search(places, wait_s=wait_s)
                if not await self._read(places, None, MAX_ANSWER_BYTES, limit_s=limit_s):
                    break  # nobody answers
        self._refreshed = self._refreshed or self._neighbours_known()

    async def _read_some(self) -> None:
        """What is due in this refresh: of the stages that we work with, then of the others."""
        near_stages = self._near_stages()
        near = self._places_of(near_stages)
        far = self._places_of(stage for stage in self._all_stages() if stage not in near_stages)
        if not self._refreshed:
            await self._read_all(near_stages, _REFRESH_LIMIT_S)
            return
        due_s = self._refresh_s * (self._stretch - 1.0) * _NEAR_STRETCH
        near = [place for place in near if time.monotonic() - place.read_at >= due_s]
        await asyncio.gather(
            self._read_in_turn(near, NEAR_QUESTIONS, self._near, search_every_s=math.inf),
            self._read_in_turn(far, FAR_QUESTIONS, self._far, search_every_s=FAR_SEARCH_EVERY_S),
        )

    async def _read_in_turn(
        self, places: Sequence[_Place], questions: int, allowance: Allowance, *, search_every_s: float
    ) -> None:
        """Read of some keys as much as so many questions and an allowance give; the rest comes next."""
        now = time.monotonic()
        old = [place for place in places if now - place.searched_at > search_every_s or place.is_new]
        if old:
            await self._search(old[:MAX_KEYS_PER_CALL])
        holders = {place.key: self._nearest(place, REPLICAS) for place in places if not place.is_new}
        asked = whom_to_ask(holders, self._random, most=questions)
        most_bytes = allowance.left(now=now) // max(1, len(asked))
        if most_bytes < _LEAST_ANSWER_BYTES:
            return
        whom = {key: peer for peer, keys in asked.items() for key in keys}
        await self._read(
            [place for place in places if place.key in whom or not holders.get(place.key, True)],
            allowance,
            most_bytes,
            limit_s=_REFRESH_LIMIT_S,
            whom=whom,
        )

    async def _read(
        self,
        places: Sequence[_Place],
        allowance: Allowance | None,
        most_bytes: int,
        *,
        limit_s: float,
        whom: Mapping[bytes, PeerID] | None = None,
    ) -> bool:
        """Ask for what is new under some keys; whether that was answered for any of them.

        Args:
            allowance: what answers are taken from.
            most_bytes: of one answer.
            whom: who is asked for a key unless it fails.
        """
        by_key = {place.key: place for place in places}
        clock = asyncio.get_running_loop().time
        began, end = time.monotonic(), clock() + limit_s
        holders: dict[bytes, list[PeerID]] = {}
        spare: dict[bytes, list[PeerID]] = {}
        for place in places:
            self._take(place.key, self._stored_here(place.key_id))
            near = self._nearest(place, 2 * REPLICAS)
            first = near[:REPLICAS] if whom is None else [whom[place.key]] if place.key in whom else []
            holders[place.key], spare[place.key] = first, [peer for peer in near if peer not in first]
            if not near:
                place.read_at = began  # we are alone
        survey = Survey(holders, spare, self._random, answers=1 if self._refreshed else FIRST_ANSWERS)
        asking: dict[asyncio.Task[bool], tuple[PeerID, list[bytes], float]] = {}
        while self._online:
            for peer, keys in survey.ask().items():
                for start in range(0, len(keys), MAX_KEYS_PER_CALL):
                    some = keys[start : start + MAX_KEYS_PER_CALL]
                    question = self._ask(peer, [by_key[key] for key in some], allowance, most_bytes)
                    asking[self._keeper.create_task(question)] = (peer, some, clock())
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
        return any(place.read_at >= began for place in places)

    async def _ask(
        self, peer: PeerID, places: Sequence[_Place], allowance: Allowance | None, most_bytes: int
    ) -> bool:
        """Take in what is new at one node under some keys; whether it answered."""
        assert self._node is not None
        now = time.time()
        known = {
            place.key: dict(islice(self._table.under(place.key, now=now).items(), MAX_SUBKEYS))
            for place in places
        }
        answered = await self._node.protocol.call_read(peer, known, most_bytes)
        if answered is None:
            for place in places:
                place.near = [one for one in place.near if one[1] != peer]
                if not place.near:
                    place.searched_at = -math.inf  # look again
            return False
        found, size = answered
        self.read_bytes += size
        if allowance is not None:
            allowance.spend(size)
        for place in places:
            one = found[place.key]
            news = self._take(place.key, one.entries)
            # Else there is more, and it is read next; unless somebody only says so.
            if not one.left or (one.entries and not news):
                place.read_at = time.monotonic()
        return True

    def _stored_here(self, key_id: DHTID) -> list[Entry]:
        assert self._node is not None
        return self._node.protocol.entries(key_id)

    def _take(self, key: bytes, entries: Iterable[Entry]) -> bool:
        """Into the table: verified, ours, unexpired, newer than what we have; whether there was any such."""
        now, news = time.time(), False
        known = self._table.under(key, now=now)
        for entry in entries:
            if entry.expires <= max(now, known.get(entry.subkey, 0.0)):
                continue
            opened = self.check.open(key, entry)
            if not isinstance(opened, Announced) or opened.record.run != self.run_id:
                continue
            if self._table.put(opened, record_ids(opened)):
                news = True
                self._meet(opened.record)
                if self._learn is not None and opened.record.addresses:
                    self._learn(opened.record.peer, opened.record.addresses)
        return news

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
        envelopes.seal_record(record, time.time(), self._identity)  # a wrong record fails here
        before = self._own
        same = before is not None and (before.run, before.stage) == (record.run, record.stage)
        with self._keeper.keeping():
            if before is not None and not same:
                await self.withdraw()  # it lies under other keys
            self._set_own(record)
            if not same or before is None or before.state != record.state:
                await self._store_own()

    async def withdraw(self) -> None:
        """Replace our record by one that says `left`, and renew it no more."""
        if self._own is None:
            return
        record = msgspec.structs.replace(self._own, state="left")
        with self._keeper.keeping():
            self._set_own(record)
            await self._store_own()
        self._set_own(None)
        self._level = 0

    def _set_own(self, record: PeerRecord | None) -> None:
        self._own = record
        self._table.set_own(record if record is not None and record.run == self.run_id else None)

    async def _store_own(self) -> None:
        assert self._own is not None
        if not self._online:
            self._stored_at = 0.0  # as soon as we are back
            return
        self._stored_at = time.time()
        # Later than any earlier one, also when the clock was set back: the DHT keeps the latest.
        life_s = min(self._life_s * self._stretch, envelopes.MAX_LIFE_S)
        self._own_expires = max(self._stored_at + life_s, self._own_expires + 2 * VERSION_S)
        record = self._own
        if self._moved_to:
            record = msgspec.structs.replace(record, addresses=self._moved_to)
        mates = sum(self._table.levels(record.stage).values()) if record.run == self.run_id else 0
        self._level = level_for(1 + mates, self._level)
        value = envelopes.seal_record(record, self._own_expires, self._identity, level=self._level)
        entry = Entry(record.peer, value, self._own_expires)
        keys = envelopes.record_keys(record, self._level)
        took = await asyncio.gather(*(self._store(key, entry) for key in keys))
        if took[0] == 1 and (self._join or self._met):
            self._stored_at = 0.0  # nobody but us has it: again in the next round

    async def _store(self, key: str, entry: Entry) -> int:
        """Put a value on the nodes nearest to the key; how many took it."""
        assert self._node is not None
        place, protocol = self._place(key), self._node.protocol
        protocol.storage.store(place.key_id, entry.value, entry.expires, subkey=entry.subkey)
        if not self._online:
            return 0
        if place.is_new:
            await self._search([place])
        answers = await asyncio.gather(
            *(
                protocol.call_store(
                    peer, [place.key_id], [entry.value], entry.expires, subkeys=[entry.subkey]
                )
                for peer in self._nearest(place, REPLICAS)
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
                await self._search([])
            await self._store_manifest()
        self._learn_stages(run_id, text)
        return run_id

    async def _find_stages(self) -> None:
        """How many stages the run has, if nobody asked for its manifest yet."""
        if self.run_id is not None and not self._stages and self._watched is None:
            with self._keeper.keeping(), contextlib.suppress(SetupError):
                await self.fetch_manifest(self.run_id, timeout_s=_SEARCH_WAIT_S)

    def _learn_stages(self, run_id: str, text: str) -> None:
        if run_id == self.run_id:
            self._stages = parse_run(text).S

    async def _store_manifest(self) -> None:
        assert self._manifest is not None
        run_id, owner, value = self._manifest
        self._manifest_stored_at = time.time() if self._online else 0.0
        entry = Entry(owner, value, time.time() + self._manifest_life_s)
        await self._store(envelopes.manifest_key(run_id), entry)

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
                    self._learn_stages(run_id, text)
                    return text
                if time.monotonic() >= deadline:
                    refused = ", ".join(sorted(self.check.rejected)[:3])
                    raise SetupError(
                        f"nobody here knows a run {run_id}: check the id, and that a peer of that run is up"
                        + (f" (refused from others: {refused})" if refused else "")
                    )
                if self._online:
                    await self._search([self._place(key)])
                await asyncio.sleep(0.3)

    async def _look_for_manifest(self, run_id: str, key: str, limit_s: float) -> str | None:
        """The manifest, from the first node near its key that has it."""
        if not self._online or self._node is None:
            return None
        place = self._place(key)
        text = self._take_manifest(run_id, place.key, self._stored_here(place.key_id))
        asking = {
            self._keeper.create_task(self._node.protocol.call_read(peer, {place.key: {}}, MAX_ANSWER_BYTES))
            for peer in self._nearest(place, 2 * REPLICAS)
        }
        end = time.monotonic() + limit_s
        while text is None and asking and time.monotonic() < end:
            done, asking = await asyncio.wait(
                asking, timeout=end - time.monotonic(), return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                answered = None if task.cancelled() else task.result()
                if answered is not None:
                    text = text or self._take_manifest(run_id, place.key, answered[0][place.key].entries)
        return text

    def _take_manifest(self, run_id: str, key: bytes, entries: Iterable[Entry]) -> str | None:
        """The text of the run's manifest, if it is among the entries; we keep it published from now on."""
        for entry in entries:
            if self.check.open(key, entry) != "":
                continue
            with contextlib.suppress(Refused):
                found, text = envelopes.open_manifest(entry.value, entry.subkey)
                if found == run_id:
                    self._manifest = (run_id, entry.subkey, entry.value)
                    # Not all peers at the same moment.
                    self._manifest_stored_at = time.time() - self._manifest_renew_s * self._random.random()
                    return text
        return None


def _explain_validation(text: str) -> str:
    if "time must be" in text:
        return f"this machine's clock is wrong, or that of the peer to join at is ({text}): set it (NTP)"
    return f"cannot join: {text}"
