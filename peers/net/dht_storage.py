"""Our node of the DHT: joins it, finds the nodes near a key, stores values there.

Those to join at are greeted again whenever they were lost, so that a bootstrap that returns finds the run,
and two halves become one.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from peers.clock import now_s
from peers.net._hivemind import DHTID
from peers.net.dht_protocol import JOIN_S, REPLICAS, DhtNode, Entry, Pong, RecordCheck, key_bytes, nearest
from peers.net.identity import CIRCUIT, AddressBook, by_peer, with_peer_id
from peers.net.p2pd_control import ControlError, DaemonControl, NobodyListens
from peers.waiting import TaskKeeper
from swarm.errors import SetupError, Unreachable
from swarm.ids import PeerId
from swarm.wire.version import PROTOCOL_VERSION, differ

SEARCH_WAIT_S = 1.0
"""A search among dead nodes takes long; our own record must be renewed meanwhile."""
BOOTSTRAP_S = 1.0
"""How long to wait for the others to join at once one of them answered."""
DIAL_AGAIN_S = 5.5
"""A handshake may fail once where a peer listens (one of 8, at 100 ms); sooner libp2p does not dial again."""
MORE_TRIES = 3
"""To join where peers answer, and none reaches this one back: a line may be busy or cut for a while."""
_MAX_MET = 64
"""Peers that are dialled after their records ran out, to find the swarm again when all were lost."""
_MET_GREETED = 2
"""Of those met and lost, so many are dialled at a time; most of them are dead."""
MAX_CLOCK_ERROR_S = 3.0
"""Between us and most of those that we join at: a record lives for 20 s."""


@dataclass(slots=True)
class Place:
    """A key that we read or write: where it is, and when it was read. Monotonic seconds."""

    key: bytes
    read_at: float = -math.inf
    searched_at: float = -math.inf
    near: list[PeerId] = field(default_factory=list)
    """Nodes that a search found; the routing table alone knows the nodes near ourselves."""

    @property
    def key_id(self) -> DHTID:
        return DHTID.from_bytes(self.key)

    @property
    def is_new(self) -> bool:
        """No search for where it is was made yet."""
        return self.searched_at == -math.inf


class DhtStorage:
    """Where values lie."""

    def __init__(
        self, control: DaemonControl, me: PeerId, join: Sequence[str], addresses: AddressBook,
        rng: random.Random,
    ) -> None:  # fmt: skip
        """`join`: multiaddrs of peers to join at, each ending in `/p2p/<id>`; `addresses`: of those met."""
        self.check = RecordCheck()
        self.join, self.addresses = by_peer(join), addresses
        self.tasks = TaskKeeper()
        self.node = DhtNode(me, self.check, self.tasks)
        self.online = False
        """Our p2pd runs, and the node above is on it."""
        self._control, self._me, self._random = control, me, rng
        self._places: dict[str, Place] = {}
        self._searching: asyncio.Task[None] | None = None
        self._greeting: list[asyncio.Task[bool]] = []

    # -- life -----------------------------------------------------------------------------------

    async def close(self) -> None:
        self.online = False
        await self.tasks.close()

    async def begin(self) -> None:
        """Be a node on our p2pd, anew but for what others gave us to keep. Raises ControlError."""
        self.searched_at = self.greeted_at = -math.inf
        self._places.clear()
        await self.node.serve(self._control)
        self.online = True

    async def meet_first(self) -> None:
        """Meet those to join at, in time or soon after the first one, and the nodes near us that they know.

        Raises:
            SetupError: none of them can be reached, or answers, or they find fault with us; says what.
        """
        await self._meet_those_to_join_at()
        for _ in range(MORE_TRIES):
            if any(pong.reaches for _, pong in self.node.welcomes):
                break
            self.node.welcomes.clear()
            await self._meet_those_to_join_at()
        if wrong := what_is_wrong(self.node.welcomes):
            raise SetupError(wrong)
        if self.join:
            await self.search([], wait_s=BOOTSTRAP_S)

    async def _meet_those_to_join_at(self) -> None:
        places = self._addresses()
        meeting = {self.tasks.create_task(self._meet(*one, joining=True)): one for one in places.items()}
        left, answered = set(meeting), False
        while left and not answered:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            answered = any(task.exception() is None and task.result() for task in done)
        if left:  # they are dialled on; one that answers late is found by searching
            await asyncio.wait(left, timeout=BOOTSTRAP_S)
        if meeting and not answered:
            raise Unreachable(_why_none([(*one, task.exception()) for task, one in meeting.items()]))

    async def _meet(self, peer: PeerId, addresses: Sequence[str], *, joining: bool = False) -> bool:
        """Dial a peer; whether it answers. Raises ControlError: it cannot be reached."""
        try:
            await self._control.connect(peer, addresses, JOIN_S)
        except NobodyListens:
            raise
        except ControlError:
            if not joining:
                raise
            await asyncio.sleep(DIAL_AGAIN_S)
            await self._control.connect(peer, addresses, JOIN_S)
        return await self.node.ping(peer, joining=joining)

    def _addresses(self, met: Iterable[PeerId] = ()) -> dict[PeerId, list[str]]:
        """Those to join at, and some of those that we met, with the addresses that we know of them."""
        peers = dict.fromkeys([*self.join, *met])
        peers.pop(self._me, None)
        return {peer: [*self.join.get(peer, ()), *self.addresses.of(peer)] for peer in peers}

    @property
    def neighbours(self) -> int:
        """How many nodes of the DHT we know."""
        return len(self.node.table.uid_to_peer_id)

    async def search(self, places: Sequence[Place], *, wait_s: float = SEARCH_WAIT_S) -> None:
        """Look for the nodes near our own id and some keys. Waits a moment only; the search goes on."""
        if self._searching is None or self._searching.done():
            self.searched_at = now_s()
            self._searching = self.tasks.create_task(self._search_for(places))
        await asyncio.wait([self._searching], timeout=wait_s)

    async def _search_for(self, places: Sequence[Place]) -> None:
        for place in places:
            place.searched_at = now_s()
        found = await self.node.search([self.node.node_id, *(place.key_id for place in places)])
        for place in places:
            place.near = found[place.key_id]

    def greet(self) -> Sequence[asyncio.Task[bool]]:
        """Dial, in the background, those to join at that we lost, and some of those we met and lost.

        After a cut each half of the swarm has forgotten the other: one of them has to try. If all are lost,
        all are tried.
        """
        self.greeted_at = now_s()
        if any(not one.done() for one in self._greeting):
            return self._greeting
        known = self.node.table.peer_id_to_uid
        met = [peer for peer in self.addresses.latest(_MAX_MET) if peer not in known]
        if known:
            met = self._random.sample(met, min(len(met), _MET_GREETED))
        lost = {peer: ends for peer, ends in self._addresses(met).items() if peer not in known}
        self._greeting = [self.tasks.create_task(self._meet(*one)) for one in lost.items()]
        return self._greeting

    def nearest(self, place: Place, count: int) -> list[PeerId]:
        """Nodes near a key, nearest first, without us: those found by searching, and the routing table's."""
        return nearest(place.key_id, {*self.node.near(place.key_id, count), *place.near}, count)

    def some(self, count: int) -> list[PeerId]:
        """Nodes wherever they are, of all or of those that stay: all near a key may be one stranger's."""
        table = self.node.table
        stayed = [peer for part in table.buckets for peer in part.nodes_to_peer_id.values()]
        known = sorted(self._random.choice((stayed, [*table.peer_id_to_uid])))
        return self._random.sample(known, min(count, len(known)))

    def place(self, key: str) -> Place:
        return self._places.setdefault(key, Place(key_bytes(key)))

    async def store(self, key: str, entry: Entry, besides: int = 0) -> int:
        """Put a value on the nodes nearest to the key, and on some `besides`; how many took it."""
        place = self.place(key)
        self.node.keep(place.key, entry, first_hand=True)
        if not self.online:
            return 0
        if place.is_new:
            await self.search([place])
        near = {*self.nearest(place, REPLICAS), *self.some(besides)}
        answers = await asyncio.gather(*(self.node.store(peer, [(place.key, entry)]) for peer in near))
        return 1 + sum(bool(answer and answer[0]) for answer in answers)

    def met_addresses(self) -> list[str]:
        """Direct addresses of peers whose records we saw, the latest first, each ending in `/p2p/<id>`."""
        met = self.addresses.latest(_MAX_MET)
        found = [address for peer in met for address in with_peer_id(self.addresses.of(peer), peer)]
        return [address for address in found if CIRCUIT not in address]


def _why_none(failed: Sequence[tuple[PeerId, Sequence[str], BaseException | None]]) -> str:
    """Why none of the peers to join at, with its addresses and what went wrong, can be joined at."""
    silent = [peer for peer, _, error in failed if error is None]
    if silent:
        return (
            "the peers to join at can be reached, but do not answer as peers of a swarm: "
            f"{', '.join(silent)}. Do they run the same version?"
        )
    return (
        "none of the peers to join at can be reached. Check that one of them is running, that its "
        "address, port and peer id are those it printed, and that no firewall is between: "
        + "; ".join(f"{', '.join(places)}/p2p/{peer}: {error}" for peer, places, error in failed)
    )


def what_is_wrong(welcomes: Collection[tuple[float, Pong]]) -> str:
    """Why a peer that got these answers cannot join, each from a clock that is so many seconds ahead; '' if
    it can. Most versions and clocks are right."""
    others = [pong.protocol for _, pong in welcomes if pong.protocol != PROTOCOL_VERSION]
    if 2 * len(others) > len(welcomes):
        return differ("this program", PROTOCOL_VERSION, "the swarm that it joins", others[0])
    if welcomes and not any(pong.reaches for _, pong in welcomes):
        return "cannot join: the peers to join at cannot reach this one back over its own connection"
    wrong = sorted(ahead_s for ahead_s, _ in welcomes if abs(ahead_s) > MAX_CLOCK_ERROR_S)
    if 2 * len(wrong) <= len(welcomes):
        return ""
    ahead_s = wrong[len(wrong) // 2]
    return (
        f"this machine's clock is {abs(ahead_s):.0f} s {'behind' if ahead_s > 0 else 'ahead of'} that of "
        f"{len(wrong)} of the {len(welcomes)} peers to join at: set it, or theirs (NTP)"
    )
