# pyright: reportAttributeAccessIssue=false
# (protobuf's generated modules carry no types)
"""A node of hivemind's DHT: which others it knows, what it keeps for them, and how it is asked for it.

Messages, ids and routing table are hivemind's, the rest is ours: hivemind's own node stores whatever
strangers send, and starts tasks that it forgets.

Reading is ours (`rpc_read`): the question carries a mark and the age of each record that is known already,
the answer only what is new, and never more than was asked for. So it costs what has changed, not what there
is, whichever of the nodes near a key is asked. hivemind's answers hold everything under a key each time, and
hang beyond 4 MiB.

Identities cost nothing, so a stranger can make as many records as he likes. He can fill a key, or a node,
but a peer that sends its own record itself (libp2p proves which one it is) gets the place of one that another
peer sent. Of one identity a node keeps a few records, and takes a few a second; and an answer begins with
what its reader does not know at all, then with what it was told of longest ago. So a thousand that renew
their records all the time do not hide one that is new.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import heapq
import logging
import math
import random
import struct
from asyncio import FIRST_COMPLETED, gather, wait
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeAlias

import base58
import msgspec

from peers.clock import now_s, unix_s
from peers.net._hivemind import DHTID, RoutingTable, dht_pb2
from peers.net.bandwidth import Allowance
from peers.net.charter.signed import Revocation, key_of, open_statement
from peers.net.identity import PEER_ID_LETTERS
from peers.net.p2pd_control import DaemonControl
from peers.net.signed_records import (
    MAX_LIFE_S,
    MAX_PACKED_MANIFEST_BYTES,
    MAX_SIGNED_BYTES,
    Announced,
    manifest_key,
    open_manifest,
    open_record,
    record_keys,
)
from peers.net.tasks import TaskKeeper
from peers.waiting import within
from swarm.charter import Charter, check_life
from swarm.errors import Refused
from swarm.ids import PeerId

logger = logging.getLogger(__name__)

MAX_SUBKEYS = 2048
"""Under one key: eight times what `lookup.Scale` puts there, and a thousand strangers' besides."""
MAX_OF_ONE = 8
"""Values of one identity: its record is under 4 keys of its stage, and after a move of the last one."""
STORED_PER_S = 2.0
STORED_AT_ONCE = 128.0
"""Values of its own that one peer may offer: each costs the check of a signature, 0.1 ms. Its record is
renewed under 4 keys each 5 s."""
HANDED_ON_PER_S = 200.0
HANDED_ON_AT_ONCE = 4096.0
"""Values of others that all peers together may offer: a node that is met is given at once what it should
hold. What is refused comes with the next renewal from its own peer."""
MAX_OFFERERS = 4096
MAX_KEYS = 4096
MAX_ENTRIES = 16384
"""That a node keeps for others: about 10 MB."""
MAX_KEYS_PER_CALL = 64
MAX_ANSWER_BYTES = 1 << 19
"""Of the 4 MiB at which hivemind's unary calls hang."""
HAND_ON_BYTES = 1 << 16
"""To a node that we met, in one call."""
PING_EVERY_S = 1.0
REPLICAS = 5
RPC_S = 3.0
BOOTSTRAP_S = 1.0
"""How long to wait for the first answers of others once one of those to join at answered."""
_MAX_TOLD = 20
_MAX_ID_BYTES = 64
"""Nodes in an answer, and bytes of the id of each, that are read."""
JOIN_S = 8.0
"""For reaching a peer to join at, and again for its first answer: it may be far away, or busy."""
_CLOCK_MARGIN_S = 60.0
VERSION_S = 1 / 16
"""Versions of a record expire at least twice as far apart."""
_KNOWN = struct.Struct("<4sI")
_SALT_BYTES = 8
_FRAMING_BYTES = 64
"""Of an answer, for each key, besides its records."""


class Entry(NamedTuple):
    """A value as the DHT holds it."""

    subkey: str
    value: bytes
    expires: float

    @property
    def size(self) -> int:
        """About the bytes that it takes in an answer."""
        return len(self.value) + 80


class Found(msgspec.Struct, frozen=True, array_like=True):
    """What a node has under one key that the asker did not know."""

    entries: tuple[Entry, ...]
    left: int
    """So many more, for which there was no room."""


class Asked(msgspec.Struct, frozen=True, array_like=True):
    """One key of a question."""

    key: Annotated[bytes, msgspec.Meta(min_length=20, max_length=20)]
    known: Annotated[bytes, msgspec.Meta(max_length=_KNOWN.size * MAX_SUBKEYS)]


class Question(msgspec.Struct, frozen=True, array_like=True):
    """What else is there?"""

    most_bytes: Annotated[int, msgspec.Meta(ge=0)]
    salt: Annotated[bytes, msgspec.Meta(min_length=_SALT_BYTES, max_length=_SALT_BYTES)]
    """Another one each time: two records that look alike do so once."""
    keys: Annotated[list[Asked], msgspec.Meta(max_length=MAX_KEYS_PER_CALL)]


class Welcome(NamedTuple):
    """What a peer to join at says of us."""

    ahead_s: float
    """Its clock, of ours."""
    reaches_us: bool


_question_decoder = msgspec.msgpack.Decoder(Question)
_answer_decoder = msgspec.msgpack.Decoder(list[Found])
_encode = msgspec.msgpack.Encoder().encode


def _mark(salt: bytes, subkey: str) -> bytes:
    """Stands for a peer in one question."""
    return hashlib.blake2b(subkey.encode(), digest_size=4, key=salt).digest()


def _ticks(expires: float) -> int:
    """An expiration in as few bits as tell one version of a record from the next."""
    return int(min(max(0.0, expires), 2.0**40) / VERSION_S) % (1 << 32)


def ask(keys: Mapping[bytes, Mapping[str, float]], most_bytes: int, salt: bytes) -> bytes:
    """A question for the records under some keys. `keys`: which of them are known, with their expirations.

    A mark of four bytes may fit two peers, and one of them is not told; the next question has another salt.
    """
    return _encode(
        Question(
            most_bytes,
            salt,
            [
                Asked(key, b"".join([_KNOWN.pack(_mark(salt, p), _ticks(ends)) for p, ends in known.items()]))
                for key, known in keys.items()
            ],
        )
    )


def read_question(data: bytes) -> Question:
    """Raises Refused if it is none."""
    try:
        question = _question_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(f"a malformed question: {error}") from None
    if any(len(one.known) % _KNOWN.size for one in question.keys):
        raise Refused("a malformed question: half a record is known")
    return question


def answer(question: Question, held: Callable[[bytes], Sequence[Entry]]) -> bytes:
    """`held`: what the node has under a key, the most important first."""
    room, found = min(question.most_bytes, MAX_ANSWER_BYTES), []
    for number, one in enumerate(question.keys):
        share = room // (len(question.keys) - number)
        size, told = 0, 0
        known: dict[bytes, int] = dict(_KNOWN.iter_unpack(one.known))
        late = ((_lateness(entry, known, question.salt), entry) for entry in held(one.key))
        # Stable: of those that are as late, in the order in which they are held.
        new = [entry for by, entry in sorted(late, key=lambda one: -one[0]) if by > 0]
        for entry in new:
            # A share may be less than one record takes.
            if size + entry.size > (share if told else room):
                break
            size += entry.size
            told += 1
        room -= size
        found.append(Found(tuple(new[:told]), len(new) - told))
    return _encode(found)


def _lateness(entry: Entry, known: Mapping[bytes, int], salt: bytes) -> int:
    """How much later it expires than what the asker knows; 0: not at all. Greatest for one not known."""
    ticks = known.get(_mark(salt, entry.subkey))
    if ticks is None:
        return 1 << 31
    by = (_ticks(entry.expires) - ticks) % (1 << 32)
    return by if by < 1 << 31 else 0


# --- what may be kept ---------------------------------------------------------------------------------------


Opened: TypeAlias = Announced | Charter | Revocation
"""What lies in the DHT, besides manifests."""


@functools.lru_cache(maxsize=8192)
def _opened(key: bytes, subkey: str, value: bytes, expires: float) -> Opened | str:
    """What it is, '' for a manifest, or the reason why the DHT must not hold this. Cached: all are seen
    twice."""
    why = "a value under a key where it does not belong"
    if value[1:9] in (b"\xa7charter", b"\xa7revoked"):
        try:
            statement = open_statement(value, subkey)
        except Refused as refusal:
            return refusal.text
        return statement if key_bytes(key_of(statement, subkey)) == key else why
    is_of_peer = len(subkey) == PEER_ID_LETTERS and len(value) <= MAX_SIGNED_BYTES
    if is_of_peer:
        try:
            opened = open_record(value, subkey, expires)
            if key in record_ids(opened):
                return opened
        except Refused as refusal:
            why = refusal.text
    try:  # a manifest lies under its owner's id, or under ''
        if key_bytes(manifest_key(open_manifest(value, subkey)[0])) == key:
            return ""
    except Refused as refusal:
        why = why if is_of_peer else refusal.text
    return why


def record_ids(opened: Announced) -> list[bytes]:
    """The keys under which a record lies, as the DHT has them."""
    return [key_bytes(key) for key in record_keys(opened.record, opened.level)]


@functools.lru_cache(maxsize=4096)
def key_bytes(key: str) -> bytes:
    """A key as the DHT has it."""
    return DHTID.generate(source=key).to_bytes()


def latest_expiry(now: float) -> float:
    """The last Unix time until which a value may be stored."""
    return now + MAX_LIFE_S + _CLOCK_MARGIN_S


class RecordCheck:
    """What our node stores, and believes when it reads: see `signed_records`. Counts what it refuses."""

    def __init__(self) -> None:
        self.rejected: Counter[str] = Counter()
        self.why_not: Callable[[Announced], str] = lambda _: ""
        """Why a peer's record is refused, though it is in order; empty if it is not."""

    def open(self, key: bytes, entry: Entry) -> Opened | str | None:
        """What lies under a key: a record, '' for a manifest, None for what must not be there."""
        if not entry.expires <= latest_expiry(unix_s()):  # a NaN neither
            opened = "a value that wants to live too long"
        elif len(entry.value) > MAX_PACKED_MANIFEST_BYTES or len(entry.subkey) > 100:
            opened = "a value that is too large"
        else:
            opened = _opened(key, entry.subkey, entry.value, entry.expires)
        if isinstance(opened, Announced) and (why := self.why_not(opened)):
            opened = why
        if isinstance(opened, Charter):
            try:
                check_life(opened, now=unix_s())
            except Refused as refusal:
                opened = refusal.text
        if isinstance(opened, str) and opened:
            return self.refuse(opened)
        return opened

    def refuse(self, reason: str) -> None:
        if reason in self.rejected or len(self.rejected) < 100:
            self.rejected[reason] += 1
        logger.debug("refused a DHT record: %s", reason)


# --- the node -----------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8192)
def node_id_of(peer: PeerId) -> DHTID:
    """The place of a peer's node. It follows from its name: none stands beside a key of its choice."""
    return DHTID.generate(source=peer)


_MESSAGES: dict[str, tuple[Any, Any]] = {
    "rpc_ping": (dht_pb2.PingRequest, dht_pb2.PingResponse),
    "rpc_store": (dht_pb2.StoreRequest, dht_pb2.StoreResponse),
    "rpc_find": (dht_pb2.FindRequest, dht_pb2.FindResponse),
    "rpc_read": (dht_pb2.FindRequest, dht_pb2.FindResponse),
}
"""What is asked, and answered. Its names are those of hivemind's `DHTProtocol`, but for `rpc_read`."""


class Kept(NamedTuple):
    """A value that a node keeps for others."""

    entry: Entry
    first_hand: bool
    """Its peer sent it itself."""
    rank: tuple[int, bytes] = (0, b"")
    """Of two values of a subkey the one of higher rank stays, then the one that expires later."""


class DhtNode:
    """One node, on one p2pd after the other."""

    max_subkeys = MAX_SUBKEYS
    max_entries = MAX_ENTRIES
    bucket_size, bucket_depth = 10, 5
    """Of the routing table: see `RoutingTable`."""
    control: DaemonControl

    def __init__(self, me: PeerId, check: RecordCheck, tasks: TaskKeeper) -> None:
        self.node_id, self.check = node_id_of(me), check
        self.welcomes: list[Welcome] = []
        """What the peers that we join at answered."""
        self._me, self._tasks, self._rng = me, tasks, random.Random()
        self._info = dht_pb2.NodeInfo(node_id=self.node_id.to_bytes())
        self._kept: dict[bytes, dict[str, Kept]] = {}
        self._entries = 0
        self._of: Counter[str] = Counter()
        """How many values are kept of each subkey."""
        self._offers: dict[PeerId, Allowance] = {}
        self._handed_on = Allowance(HANDED_ON_PER_S, HANDED_ON_AT_ONCE)
        self._expired_at = self._pinged_at = -math.inf
        self.table: Any = self._empty_table()

    def _empty_table(self) -> RoutingTable:
        return RoutingTable(self.node_id, self.bucket_size, self.bucket_depth)

    async def serve(self, control: DaemonControl) -> None:
        """Be a node at this p2pd, which knows no other yet. Raises ControlError."""
        self.control, self.table = control, self._empty_table()
        for name, (kind, _) in _MESSAGES.items():
            answer = functools.partial(self._answer, getattr(self, name), kind)
            await control.serve_calls(f"DHTProtocol.{name}", answer)

    async def _answer(
        self, handler: Callable[[Any, PeerId], Awaitable[Any]], kind: Any, data: bytes, asker: PeerId
    ) -> bytes:
        request = kind.FromString(data)
        if not getattr(request, "validate", False):  # of a ping, which shows first whether it can be reached
            self._met(asker, request.peer)
        response = await handler(request, asker)
        response.peer.CopyFrom(self._info)
        return response.SerializeToString()

    async def join(self, peers: Sequence[PeerId]) -> bool:
        """Meet these, and the nodes near us that they know; whether one of them answered. See `welcomes`."""
        self.welcomes.clear()
        end = now_s() + BOOTSTRAP_S
        pings = {self._tasks.create_task(self.ping(peer, joining=True)) for peer in peers}
        done, late = await wait(pings, return_when=FIRST_COMPLETED)
        if late:
            in_time, late = await wait(late, timeout=max(0.0, end - now_s()))
            done |= in_time
        for ping in late:
            ping.cancel()
        search = self._tasks.create_task(self.search([self.node_id]))
        await wait([search], timeout=max(0.0, end - now_s()))
        return any(ping.result() for ping in done)

    # -- storing ----------------------------------------------------------------------------------

    async def rpc_store(self, request: dht_pb2.StoreRequest, asker: PeerId) -> dht_pb2.StoreResponse:
        """Keep single values with subkeys; no peer sends whole dictionaries, or values for the cache."""
        columns = (
            request.keys, request.subkeys, request.values, request.expiration_time, request.in_cache
        )  # fmt: skip
        count = len(request.keys)
        stored = [False] * min(count, MAX_KEYS_PER_CALL)
        if {len(column) for column in columns} == {count} and count <= MAX_KEYS_PER_CALL:
            stored = [self._store(asker, *row) for row in zip(*columns, strict=True)]
        return dht_pb2.StoreResponse(store_ok=stored)

    def _may_offer(self, peer: PeerId, *, first_hand: bool) -> bool:
        if not first_hand:
            return self._handed_on.take_if_there(1.0, now=now_s())
        known = self._offers.pop(peer, None) or Allowance(STORED_PER_S, STORED_AT_ONCE)
        self._offers[peer] = known
        if len(self._offers) > MAX_OFFERERS:
            del self._offers[next(iter(self._offers))]
        return known.take_if_there(1.0, now=now_s())

    def _store(
        self, sender: PeerId, key: bytes, subkey: bytes, value: bytes, expires: float, in_cache: bool
    ) -> bool:
        if in_cache or len(key) != DHTID.HASH_NBYTES:
            return False
        try:
            entry = Entry(msgspec.msgpack.decode(subkey, type=str), value, expires)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.check.refuse("a subkey that is not a text")
            return False
        first_hand, held = sender == entry.subkey, self._kept.get(key, {})
        if not self._may_offer(sender, first_hand=first_hand) or self.check.open(key, entry) is None:
            return False
        self._expire()
        few = not entry.subkey or self._of[entry.subkey] < MAX_OF_ONE
        has_room = entry.subkey in held or (few and self._has_room(key, len(held), first_hand))
        return has_room and self.keep(key, entry, first_hand=first_hand)

    def keep(self, key: bytes, entry: Entry, *, first_hand: bool) -> bool:
        """Hold a value that was checked; whether it is later than the one that is held, and not over."""
        old, opened = self._kept.get(key, {}).get(entry.subkey), self.check.open(key, entry)
        rank = opened.rank if isinstance(opened, Charter) else (0, b"")
        if entry.expires <= unix_s():
            return False
        if old is not None and (rank, entry.expires) <= (old.rank, old.entry.expires):
            return False
        self._entries += old is None
        self._of[entry.subkey] += old is None
        first_hand = first_hand or (old is not None and old.first_hand)
        self._kept.setdefault(key, {})[entry.subkey] = Kept(entry, first_hand, rank)
        return True

    def _has_room(self, key: bytes, held: int, first_hand: bool) -> bool:
        """Whether one more fits; one that its peer sent itself replaces one that another peer sent."""
        if held >= self.max_subkeys:
            return first_hand and self._drop_second_hand(key)
        if self._entries >= self.max_entries or (not held and len(self._kept) >= MAX_KEYS):
            largest_first = sorted(self._kept, key=lambda key: -len(self._kept[key]))
            return first_hand and any(map(self._drop_second_hand, largest_first))
        return True

    def _drop_second_hand(self, key: bytes) -> bool:
        dropped = next((subkey for subkey, kept in self._kept[key].items() if not kept.first_hand), None)
        if dropped is not None:
            self._drop(key, dropped)
        return dropped is not None

    def _drop(self, key: bytes, subkey: str) -> None:
        del self._kept[key][subkey]
        self._entries -= 1
        self._of -= Counter([subkey])
        if not self._kept[key]:
            del self._kept[key]

    def forget(self, subkey: str) -> None:
        """Drop the values of a subkey, under all keys: later ones may expire earlier."""
        for key in [key for key, kept in self._kept.items() if subkey in kept]:
            self._drop(key, subkey)

    def recheck(self) -> None:
        """Drop what would not be taken any more."""
        for key, held in list(self._kept.items()):
            for subkey, kept in list(held.items()):
                if self.check.open(key, kept.entry) is None:
                    self._drop(key, subkey)

    def _expire(self) -> None:
        """Drop what is over, once a second."""
        if now_s() - self._expired_at > 1.0:
            self._expired_at, now = now_s(), unix_s()
            over = [
                (key, subkey)
                for key, held in self._kept.items()
                for subkey, kept in held.items()
                if kept.entry.expires <= now
            ]
            for key, subkey in over:
                self._drop(key, subkey)

    # -- being asked ------------------------------------------------------------------------------

    async def rpc_find(self, request: dht_pb2.FindRequest, asker: PeerId) -> dht_pb2.FindResponse:
        """Which nodes are near some keys. What they hold is asked with `rpc_read`."""
        results = []
        for key in request.keys[:MAX_KEYS_PER_CALL]:
            if len(key) != DHTID.HASH_NBYTES:
                raise Refused(f"a key of {len(key)} bytes")
            near = self.near(DHTID.from_bytes(key), self.bucket_size, exclude=asker)
            results.append(
                dht_pb2.FindResult(
                    type=dht_pb2.NOT_FOUND,
                    nearest_node_ids=[node_id_of(peer).to_bytes() for peer in near],
                    nearest_peer_ids=[base58.b58decode(peer) for peer in near],
                )
            )
        return dht_pb2.FindResponse(results=results)

    async def rpc_read(self, request: dht_pb2.FindRequest, asker: PeerId) -> dht_pb2.FindResponse:
        """What is here under some keys that the asker does not know: one question, see `ask` and `answer`."""
        results = []
        for data in request.keys[:1]:
            with contextlib.suppress(Refused):
                found = answer(read_question(data), self.entries)
                results.append(dht_pb2.FindResult(type=dht_pb2.FOUND_REGULAR, value=found))
        return dht_pb2.FindResponse(results=results)

    def entries(self, key: bytes) -> list[Entry]:
        """What is here under a key: first what peers sent themselves, then the others, in any order."""
        now = unix_s()
        kept = [one for one in self._kept.get(key, {}).values() if one.entry.expires > now]
        self._rng.shuffle(kept)
        return [one.entry for one in sorted(kept, key=lambda one: not one.first_hand)]

    async def rpc_ping(self, request: dht_pb2.PingRequest, asker: PeerId) -> dht_pb2.PingResponse:
        """Whether we can call the asker as well, if it wants to know, and our clock."""
        now = unix_s()
        reached = request.validate and bool(request.peer.node_id) and await self.ping(asker)
        return dht_pb2.PingResponse(dht_time=now, available=reached)

    # -- asking -----------------------------------------------------------------------------------

    async def _call(self, peer: PeerId, name: str, request: Any, limit_s: float = RPC_S) -> Any | None:
        """A node's response; None if there is none."""
        request.peer.CopyFrom(self._info)
        data = request.SerializeToString()
        try:
            said = await within(self.control.call_peer(peer, f"DHTProtocol.{name}", data), limit_s)
            response = _MESSAGES[name][1].FromString(said)
        except Exception:  # whatever p2pd and a stranger come up with
            logger.debug("no answer from %s", peer, exc_info=True)
            self._lost(peer)
            return None
        self._met(peer, response.peer)
        return response

    async def ping(self, peer: PeerId, *, joining: bool = False) -> bool:
        """Whether a node answers. One to join at that finds fault with us decides nothing (`welcomes`)."""
        asked_at, request = unix_s(), dht_pb2.PingRequest(validate=joining)
        response = await self._call(peer, "rpc_ping", request, JOIN_S if joining else RPC_S)
        if joining and response is not None:
            # Its clock was read some time between the question and the answer.
            ahead_s = response.dht_time - min(max(response.dht_time, asked_at), unix_s())
            self.welcomes.append(Welcome(ahead_s, response.available))
        return response is not None

    async def store(self, peer: PeerId, values: Sequence[tuple[bytes, Entry]]) -> list[bool] | None:
        """Have a node keep some values; of each whether it does."""
        request = dht_pb2.StoreRequest(
            keys=[key for key, _ in values],
            subkeys=[_encode(entry.subkey) for _, entry in values],
            values=[entry.value for _, entry in values],
            expiration_time=[entry.expires for _, entry in values],
            in_cache=[False] * len(values),
        )
        response = await self._call(peer, "rpc_store", request)
        return list(response.store_ok) if response is not None else None

    async def read(
        self, peer: PeerId, keys: Mapping[bytes, Mapping[str, float]], most_bytes: int
    ) -> tuple[dict[bytes, Found], int] | None:
        """What a node has under some keys besides what is known, and the bytes that crossed the line.

        None if it did not answer, or not as it should.
        """
        request = dht_pb2.FindRequest(keys=[ask(keys, most_bytes, self._rng.randbytes(_SALT_BYTES))])
        response = await self._call(peer, "rpc_read", request)
        if response is None:
            return None
        value = b"".join(result.value for result in response.results)
        try:
            # Each entry of an answer costs a signature's check: one may not bring more than was asked for.
            if len(value) > most_bytes + _FRAMING_BYTES * (len(keys) + 1):
                raise ValueError("an answer of more bytes than were asked for")
            found = dict(zip(keys, _answer_decoder.decode(value), strict=True))
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            logger.debug("no answer from %s: %s", peer, error)
            self._lost(peer)
            return None
        return found, request.ByteSize() + response.ByteSize()

    async def search(self, ids: Sequence[DHTID]) -> dict[DHTID, list[PeerId]]:
        """The nodes nearest to each id that answer, nearest first: those near are asked for nearer ones."""
        known = {peer for one in ids for peer in self.near(one, REPLICAS)}
        asked: dict[DHTID, set[PeerId]] = defaultdict(set)
        while True:
            near, due = {one: nearest(one, known) for one in ids}, defaultdict[PeerId, list[DHTID]](list)
            for one, peers in near.items():
                for peer in set(peers) - asked[one]:
                    asked[one].add(peer)
                    due[peer].append(one)
            if not due:
                return near
            told = await gather(*(self._find(peer, some) for peer, some in due.items()))
            known = known.union(*told) - {self._me}
            known -= {peer for peer, said in zip(due, told, strict=True) if peer not in said}

    async def _find(self, peer: PeerId, ids: Sequence[DHTID]) -> set[PeerId]:
        """The nodes that one knows near some ids, itself included; none if it does not answer."""
        known = {peer}
        for start in range(0, len(ids), MAX_KEYS_PER_CALL):
            some = [one.to_bytes() for one in ids[start : start + MAX_KEYS_PER_CALL]]
            response = await self._call(peer, "rpc_find", dht_pb2.FindRequest(keys=some))
            if response is None:
                return set()
            for result in response.results[: len(some)]:
                told = (raw for raw in result.nearest_peer_ids[:_MAX_TOLD] if len(raw) <= _MAX_ID_BYTES)
                known.update(base58.b58encode(raw).decode() for raw in told)
        return known

    # -- knowing others ---------------------------------------------------------------------------

    def near(self, node_id: DHTID, count: int, *, exclude: PeerId = "") -> list[PeerId]:
        """Those that we know nearest to an id, nearest first."""
        return [
            peer for _, peer in self.table.get_nearest_neighbors(node_id, count, exclude=node_id_of(exclude))
        ]

    def _met(self, peer: PeerId, info: dht_pb2.NodeInfo) -> None:
        """A node called or answered. A full bucket is looked after once a second, not for each call of those
        without a place in it."""
        table, node_id = self.table, node_id_of(peer)
        if info.node_id != node_id.to_bytes():
            return
        bucket = table.buckets[table.get_bucket_index(node_id)]
        crowded = len(bucket.nodes_to_peer_id) >= bucket.size and node_id not in bucket.nodes_to_peer_id
        now = now_s()
        if node_id not in table:
            self._hand_on(peer)
        elif crowded and now - self._pinged_at < PING_EVERY_S:
            return
        oldest = table.add_or_update_node(node_id, peer)
        if oldest is not None:
            self._pinged_at = now
            self._tasks.create_task(self.ping(oldest[1]))

    def _lost(self, peer: PeerId) -> None:
        if (node_id := node_id_of(peer)) in self.table:
            del self.table[node_id]

    def _hand_on(self, peer: PeerId) -> None:
        """Send a node that we meet what it should hold, if we are the nearest of those that do."""
        due: list[tuple[bytes, Entry]] = []
        for key in self._kept:
            key_id = DHTID.from_bytes(key)
            near = [node_id_of(one) ^ key_id for one in self.near(key_id, REPLICAS)]
            if not near or (node_id_of(peer) ^ key_id < near[-1] and self.node_id ^ key_id < near[0]):
                due += [(key, entry) for entry in self.entries(key)]
        if due:
            self._tasks.create_task(self._send(peer, due))

    async def _send(self, peer: PeerId, due: Iterable[tuple[bytes, Entry]]) -> None:
        for some in _batches(due):
            if await self.store(peer, some) is None:
                return


def nearest(node_id: DHTID, peers: Iterable[PeerId], count: int = REPLICAS) -> list[PeerId]:
    """Those nearest to an id, nearest first."""
    return heapq.nsmallest(count, peers, key=lambda peer: node_id_of(peer) ^ node_id)


def _batches(due: Iterable[tuple[bytes, Entry]]) -> Iterable[list[tuple[bytes, Entry]]]:
    """Small enough for one call each."""
    batch: list[tuple[bytes, Entry]] = []
    size = 0
    for one in due:
        size += one[1].size
        if batch and (size > HAND_ON_BYTES or len(batch) == MAX_KEYS_PER_CALL):
            yield batch
            batch, size = [], one[1].size
        batch.append(one)
    yield batch
