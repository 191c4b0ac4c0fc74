# pyright: reportAttributeAccessIssue=false
# (hivemind's node does not know that its protocol is ours)
"""Our node of hivemind's DHT: joins it, finds the nodes near a key, stores values there.

No node is needed for long: a peer that joined knows the addresses of those it met, and those to join at are
greeted again whenever they were lost, so that a bootstrap that returns finds the run, and two halves become
one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections import defaultdict
from collections.abc import Awaitable, Collection, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from peers.clock import now_s
from peers.net._hivemind import DHTID, DHTNode, PeerID, TaskKeeper, use_protocol
from peers.net.dht_protocol import JOIN_S, MAX_KEYS, Entry, RecordCheck, RecordProtocol, Welcome
from peers.net.identity import CIRCUIT, split_peer_id, without_peer_id
from peers.net.p2pd_control import AttachedP2P, ControlError, DaemonControl
from swarm.errors import SetupError
from swarm.ids import PeerId
from swarm.records import PeerRecord

logger = logging.getLogger(__name__)

REPLICAS = 5
RPC_S = 3.0
SEARCH_WAIT_S = 1.0
"""A search among dead nodes takes long; our own record must be renewed meanwhile."""
_JOIN_GRACE_S = 0.5
"""How long to wait for the other addresses to join at once one of them is reached."""
_MAX_MET = 64
"""Peers whose addresses are kept after their records ran out, to find the swarm again when all were lost."""
_MET_GREETED = 2
"""Of those met and lost, so many are dialled at a time; most of them are dead."""
MAX_CLOCK_ERROR_S = 3.0
"""Between us and most of those that we join at: a record lives for 20 s."""

use_protocol(RecordProtocol)


@dataclass(slots=True)
class Place:
    """A key that we read or write: where it is, and when it was read. Monotonic seconds."""

    key: bytes
    key_id: DHTID
    read_at: float = -math.inf
    searched_at: float = -math.inf
    near: list[tuple[DHTID, PeerID]] = field(default_factory=list)
    """Nodes that a search found; the routing table alone knows the nodes near ourselves."""

    @property
    def is_new(self) -> bool:
        """No search for where it is was made yet."""
        return self.searched_at == -math.inf


class DhtStorage:
    """Where values lie. Use within `keeping`."""

    def __init__(
        self, p2p: AttachedP2P, control: DaemonControl, me: PeerId, join: Sequence[str], rng: random.Random
    ) -> None:
        """`join`: multiaddrs of peers to join at, each ending in `/p2p/<id>`."""
        self.p2p, self.control = p2p, control
        self.check = RecordCheck()
        self.join = [split_peer_id(address) for address in join]
        self.node: DHTNode | None = None
        self.online = False
        """Our p2pd runs, and the node above is on it."""
        self.met: dict[PeerId, tuple[str, ...]] = {}
        """Addresses of those whose records we saw, the latest last."""
        self.unreachable = ""
        """Why none of those to join at could be reached."""
        self.searched_at = self.greeted_at = -math.inf
        self._me, self._random = me, rng
        self._keeper = TaskKeeper()
        self._places: dict[str, Place] = {}
        self._searching: asyncio.Task[None] | None = None
        self._greeting: asyncio.Task[None] | None = None

    # -- life -----------------------------------------------------------------------------------

    def keeping(self) -> AbstractContextManager[None]:
        """Within this, `close` ends the tasks that hivemind starts."""
        return self._keeper.keeping()

    def create_task(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task that `close` ends."""
        return self._keeper.create_task(coroutine)

    def forget_places(self, p2p: AttachedP2P, control: DaemonControl) -> None:
        """A new p2pd took the place of the one that died."""
        self.p2p, self.control = p2p, control
        self.searched_at = self.greeted_at = -math.inf
        self._places.clear()

    async def close(self) -> None:
        """End all tasks."""
        if self.node is not None:
            self.node.is_alive = False
        self.online = False
        await self._keeper.close()

    async def begin(self, reached: Sequence[PeerId]) -> None:
        """A DHT node on our p2pd, joined at `reached`, and the loop that keeps it."""
        try:
            node = await DHTNode.create(
                p2p=self.p2p,
                # The same place after a restart: else others would know us under two.
                node_id=DHTID.generate(source=self._me),
                initial_peers=[f"/p2p/{peer}" for peer in reached] or None,
                bucket_size=10,
                num_replicas=REPLICAS,
                wait_timeout=RPC_S,
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
        wrong = what_is_wrong(node.protocol.welcomes)
        if wrong:
            raise SetupError(wrong)
        node.protocol.storage.maxsize = MAX_KEYS
        if self.node is not None:  # what others gave us to keep outlives our p2pd
            for key_id, item in list(self.node.protocol.storage.items()):
                for subkey, entry in list(getattr(item.value, "data", {}).items()):
                    node.protocol.storage.store(key_id, entry.value, entry.expiration_time, subkey=subkey)
        self.node, self.online = node, True

    async def connect(self, places: Sequence[tuple[str, PeerId]]) -> list[PeerId]:
        """Dial addresses; the ids of those that answer, in time or soon after the first one."""
        grouped: dict[PeerId, list[str]] = defaultdict(list)
        for address, peer in places:
            grouped[peer].append(address)
        grouped.pop(self._me, None)
        self.unreachable = ""
        if not grouped:
            return []
        dials = {
            self.create_task(self.control.connect(peer, addresses, JOIN_S)): peer
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
                break  # the others are dialled on; one that answers late is found by searching
            for dial in done:
                peer, error = dials[dial], dial.exception()
                if error is None:
                    reached.append(peer)
                elif isinstance(error, ControlError):
                    reasons.append(f"{', '.join(grouped[peer])}/p2p/{peer}: {error.text}")
                else:
                    raise error
        self.unreachable = (
            "none of the peers to join at can be reached. Check that one of them is running, that its "
            "address, port and peer id are those it printed, and that no firewall is between: "
            + "; ".join(reasons)
        )
        return sorted(reached)

    @property
    def knows_others(self) -> bool:
        """Whether we know any other node."""
        return self.node is not None and bool(self.node.protocol.routing_table.uid_to_peer_id)

    @property
    def neighbours(self) -> int:
        """How many nodes of the DHT we know."""
        return len(self.node.protocol.routing_table.uid_to_peer_id) if self.node is not None else 0

    async def search(self, places: Sequence[Place], *, wait_s: float = SEARCH_WAIT_S) -> None:
        """Look for the nodes near our own id and some keys. Waits a moment only; the search goes on."""
        if self._searching is None or self._searching.done():
            self.searched_at = now_s()
            self._searching = self._kept(self._search_for(places))
        await asyncio.wait([self._searching], timeout=wait_s)

    async def _search_for(self, places: Sequence[Place]) -> None:
        assert self.node is not None
        for place in places:
            place.searched_at = now_s()
        found = await self.node.find_nearest_nodes(
            [self.node.node_id, *(place.key_id for place in places)],
            k_nearest=REPLICAS,
            beam_size=REPLICAS,
            exclude_self=True,
        )
        for place in places:
            place.near = list(found[place.key_id].items())

    def greet(self) -> None:
        """Dial, in the background, those to join at that we lost, and some of those we met and lost.

        After a cut each half of the swarm has forgotten the other: one of them has to try. If all are lost,
        all are tried.
        """
        if self._greeting is not None and not self._greeting.done():
            return
        assert self.node is not None
        known = {str(peer) for peer in self.node.protocol.routing_table.peer_id_to_uid}
        met = [peer for peer in self.met if peer not in known]
        if known:
            met = self._random.sample(met, min(len(met), _MET_GREETED))
        lost: dict[PeerId, list[str]] = defaultdict(list)
        for address, peer in self.join + self.addresses_of(met):
            if peer not in known and peer != self._me:
                lost[peer].append(address)
        if lost:
            self._greeting = self._kept(
                asyncio.gather(*(self._greet_one(peer, addresses) for peer, addresses in lost.items()))
            )

    async def _greet_one(self, peer: PeerId, addresses: Sequence[str]) -> None:
        assert self.node is not None
        with contextlib.suppress(ControlError):
            await self.control.connect(peer, addresses, JOIN_S)
            await self.node.protocol.call_ping(PeerID.from_base58(peer))

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
                    logging.ERROR if self.online else logging.DEBUG,
                    "a search of the directory failed",
                    exc_info=True,
                )

        return self.create_task(run())

    def nearest(self, place: Place, count: int) -> list[PeerID]:
        """Nodes near a key, nearest first: those found by searching, and those of the routing table; not
        us."""
        assert self.node is not None
        table = self.node.protocol.routing_table
        known = table.get_nearest_neighbors(place.key_id, count, exclude=self.node.node_id)
        near = sorted({*known, *place.near}, key=lambda one: one[0].xor_distance(place.key_id))
        return list(dict.fromkeys(peer for _, peer in near))[:count]  # a stranger may claim several places

    def place(self, key: str) -> Place:
        if key not in self._places:
            key_id = DHTID.generate(source=key)
            self._places[key] = Place(key_id.to_bytes(), key_id)
        return self._places[key]

    def stored_here(self, key_id: DHTID) -> list[Entry]:
        assert self.node is not None
        return self.node.protocol.entries(key_id)

    async def store(self, key: str, entry: Entry) -> int:
        """Put a value on the nodes nearest to the key; how many took it."""
        assert self.node is not None
        place, protocol = self.place(key), self.node.protocol
        protocol.storage.store(place.key_id, entry.value, entry.expires, subkey=entry.subkey)
        if not self.online:
            return 0
        if place.is_new:
            await self.search([place])
        answers = await asyncio.gather(
            *(
                protocol.call_store(
                    peer, [place.key_id], [entry.value], entry.expires, subkeys=[entry.subkey]
                )
                for peer in self.nearest(place, REPLICAS)
            )
        )
        return 1 + sum(bool(answer and answer[0]) for answer in answers)

    def meet(self, record: PeerRecord) -> None:
        self.met.pop(record.peer, None)
        if record.addresses and record.state != "left":
            self.met[record.peer] = record.addresses
        while len(self.met) > _MAX_MET:
            del self.met[next(iter(self.met))]

    def met_addresses(self) -> list[str]:
        """Direct addresses of peers whose records we saw, the latest first, each ending in `/p2p/<id>`."""
        return [
            f"{without_peer_id(address)}/p2p/{peer}"
            for peer in reversed(self.met)
            for address in self.met[peer]
            if CIRCUIT not in address
        ]

    def addresses_of(self, peers: Iterable[PeerId]) -> list[tuple[str, PeerId]]:
        """As `join` has them."""
        return [(without_peer_id(address), peer) for peer in peers for address in self.met[peer]]


def what_is_wrong(welcomes: Collection[Welcome]) -> str:
    """Why a peer that got these answers cannot join; '' if it can. The majority of clocks is right."""
    if welcomes and not any(welcome.reaches_us for welcome in welcomes):
        return "cannot join: the peers to join at cannot reach this one back over its own connection"
    wrong = sorted(welcome.ahead_s for welcome in welcomes if abs(welcome.ahead_s) > MAX_CLOCK_ERROR_S)
    if 2 * len(wrong) <= len(welcomes):
        return ""
    ahead_s = wrong[len(wrong) // 2]
    return (
        f"this machine's clock is {abs(ahead_s):.0f} s {'behind' if ahead_s > 0 else 'ahead of'} that of "
        f"{len(wrong)} of the {len(welcomes)} peers to join at: set it, or theirs (NTP)"
    )
