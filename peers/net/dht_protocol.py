# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportOptionalMemberAccess=false
# (protobuf's generated modules carry no types, hivemind's DHT some wrong ones)
"""What a node of the DHT keeps for others, and how it is asked for it: hivemind's protocol, with limits.

Reading is ours (`rpc_read`): the question carries a mark and the age of each record that is known already,
the answer only what is new, and never more than was asked for. So it costs what has changed, not what there
is, whichever of the nodes near a key is asked. hivemind's answers hold everything under a key each time, and
hang beyond 4 MiB.

Identities cost nothing, so a stranger can make as many records as he likes. He can fill a key, or a node,
but a peer that sends its own record itself (libp2p proves which one it is) gets the place of one that another
peer sent.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import random
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from peers.clock import now_s, unix_s
from peers.net._hivemind import (
    DHTID,
    DHTProtocol,
    DHTRecord,
    P2PContext,
    PeerID,
    RecordValidatorBase,
    create_task,
    dht_pb2,
    get_dht_time,
)
from peers.net.identity import PEER_ID_LETTERS
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
from swarm.errors import Refused

logger = logging.getLogger(__name__)

MAX_SUBKEYS = 1024
"""Under one key: eight times what `lookup.Scale` puts there."""
MAX_KEYS = 4096
MAX_ENTRIES = 16384
"""That a node keeps for others: about 10 MB."""
MAX_KEYS_PER_CALL = 64
MAX_ANSWER_BYTES = 1 << 19
"""Of the 4 MiB at which hivemind's unary calls hang."""
HAND_ON_BYTES = 1 << 16
"""To a node that we met, in one call."""
PING_EVERY_S = 1.0
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


def _is_later(ticks: int, other: int) -> bool:
    return 0 < (ticks - other) % (1 << 32) < 1 << 31


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
        new = [entry for entry in held(one.key) if _is_new(entry, known, question.salt)]
        for entry in new:
            # A share may be less than one record takes.
            if size + entry.size > (share if told else room):
                break
            size += entry.size
            told += 1
        room -= size
        found.append(Found(tuple(new[:told]), len(new) - told))
    return _encode(found)


def _is_new(entry: Entry, known: Mapping[bytes, int], salt: bytes) -> bool:
    ticks = known.get(_mark(salt, entry.subkey))
    return ticks is None or _is_later(_ticks(entry.expires), ticks)


# --- what may be kept ---------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8192)
def _opened(key: bytes, subkey: str, value: bytes, expires: float) -> Announced | str:
    """The record, '' for a manifest, or the reason why the DHT must not hold this. Cached: all are seen
    twice."""
    why = "a value under a key where it does not belong"
    is_of_peer = len(subkey) == PEER_ID_LETTERS and len(value) <= MAX_SIGNED_BYTES
    if is_of_peer:
        try:
            opened = open_record(value, subkey, expires)
            if key in record_ids(opened):
                return opened
        except Refused as refusal:
            why = refusal.text
    try:  # a manifest lies under its owner's id, or under ''
        if _id(manifest_key(open_manifest(value, subkey)[0])) == key:
            return ""
    except Refused as refusal:
        why = why if is_of_peer else refusal.text
    return why


def record_ids(opened: Announced) -> list[bytes]:
    """The keys under which a record lies, as the DHT has them."""
    return [_id(key) for key in record_keys(opened.record, opened.level)]


@functools.lru_cache(maxsize=4096)
def _id(key: str) -> bytes:
    return DHTID.generate(source=key).to_bytes()


def latest_expiry(now: float) -> float:
    """The last Unix time until which a value may be stored."""
    return now + MAX_LIFE_S + _CLOCK_MARGIN_S


class RecordCheck(RecordValidatorBase):
    """What our node stores, and believes when it reads: see `signed_records`. Counts what it refuses."""

    def __init__(self) -> None:
        self.rejected: Counter[str] = Counter()

    def validate(self, record: DHTRecord) -> bool:
        try:
            subkey = msgspec.msgpack.decode(record.subkey, type=str)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return self._refuse("a subkey that is not a text")
        opened = self.open(record.key, Entry(subkey, record.value, record.expiration_time))
        return opened is not None

    def open(self, key: bytes, entry: Entry) -> Announced | str | None:
        """What lies under a key: a record, '' for a manifest, None for what must not be there."""
        if entry.expires > latest_expiry(unix_s()):
            opened = "a value that wants to live too long"
        elif len(entry.value) > MAX_PACKED_MANIFEST_BYTES or len(entry.subkey) > 100:
            opened = "a value that is too large"
        else:
            opened = _opened(key, entry.subkey, entry.value, entry.expires)
        if isinstance(opened, str) and opened:
            self._refuse(opened)
            return None
        return opened

    def _refuse(self, reason: str) -> bool:
        if reason in self.rejected or len(self.rejected) < 100:
            self.rejected[reason] += 1
        logger.debug("refused a DHT record: %s", reason)
        return False


# --- the protocol -------------------------------------------------------------------------------------------


class RecordProtocol(DHTProtocol):
    """hivemind's DHT protocol, which stores whatever strangers send and answers all of it; with limits."""

    max_subkeys = MAX_SUBKEYS
    max_entries = MAX_ENTRIES
    _entries = 0
    _counted_at = 0.0
    _pinged_at = 0.0

    def __init__(self, *, _initialized_with_create: bool = False) -> None:
        super().__init__(_initialized_with_create=_initialized_with_create)
        self._first_hand: dict[DHTID, set[str]] = {}
        """Peers that sent their records themselves."""
        self.welcomes: list[Welcome] = []
        """What the peers that we join at answered."""
        self._rng = random.Random()

    # -- storing ----------------------------------------------------------------------------------

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        """Keep single values with subkeys; no peer sends whole dictionaries, or values for the cache."""
        self._meet(request.peer, context)
        count = len(request.keys)
        aligned = count == len(request.values) == len(request.expiration_time) == len(request.in_cache)
        stored = [False] * min(count, MAX_KEYS_PER_CALL)
        if aligned and count == len(request.subkeys) and count <= MAX_KEYS_PER_CALL:
            sender = str(context.remote_id)
            for number, (key, tag, value, expires) in enumerate(
                zip(request.keys, request.subkeys, request.values, request.expiration_time, strict=True)
            ):
                fits = len(key) == DHTID.HASH_NBYTES
                if fits and not request.in_cache[number] and self._validate_record(key, tag, value, expires):
                    entry = Entry(str(self.serializer.loads(tag)), value, expires)
                    stored[number] = self._keep(DHTID.from_bytes(key), entry, sender == entry.subkey)
        return dht_pb2.StoreResponse(store_ok=stored, peer=self.node_info)

    def _keep(self, key_id: DHTID, entry: Entry, first_hand: bool) -> bool:
        item = self.storage.get(key_id)
        held = getattr(item.value, "data", {}) if item is not None else {}
        is_new = entry.subkey not in held
        if is_new and not self._has_room(key_id, len(held), first_hand):
            return False
        if not self.storage.store_subkey(key_id, entry.subkey, entry.value, entry.expires):
            return False
        self._entries += is_new
        if first_hand:
            self._first_hand.setdefault(key_id, set()).add(entry.subkey)
        return True

    def _has_room(self, key_id: DHTID, held: int, first_hand: bool) -> bool:
        """Whether one more fits; one that its peer sent itself replaces one that another peer sent."""
        self._count()
        if held >= self.max_subkeys:
            return first_hand and self._drop_second_hand(key_id)
        if self._entries >= self.max_entries or (not held and len(self.storage.data) >= MAX_KEYS):
            return first_hand and any(self._drop_second_hand(key) for key in self._largest_first())
        return True

    def _largest_first(self) -> list[DHTID]:
        data = self.storage.data
        return sorted(data, key=lambda key: -len(getattr(data[key].value, "data", ())))

    def _drop_second_hand(self, key_id: DHTID) -> bool:
        entries: Any = self.storage.data[key_id].value
        known = self._first_hand.get(key_id, ())
        dropped = next((subkey for subkey in getattr(entries, "data", ()) if subkey not in known), None)
        if dropped is None:
            return False
        del entries[dropped]
        self._entries -= 1
        if not entries.data:
            del self.storage[key_id]
        return True

    def forget(self, subkey: str) -> None:
        """Drop the values of a subkey, under all keys: later ones may expire earlier."""
        for item in list(self.storage.data.values()):
            entries: Any = item.value
            if subkey in getattr(entries, "data", ()):
                del entries[subkey]

    def _count(self) -> None:
        """Once a second: entries expire by themselves."""
        now = now_s()
        if now - self._counted_at > 1.0:
            self._counted_at = now
            data = {key: dict(getattr(item.value, "items", tuple)()) for key, item in self.storage.items()}
            self._entries = sum(len(entries) for entries in data.values())
            self._first_hand = {
                key: {subkey for subkey in subkeys if subkey in data[key]}
                for key, subkeys in self._first_hand.items()
                if key in data
            }

    # -- being asked ------------------------------------------------------------------------------

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        """Which nodes are near some keys. What they hold is asked with `rpc_read`."""
        self._meet(request.peer, context)
        asker = DHTID.from_bytes(request.peer.node_id) if request.peer.node_id else None
        results = []
        for key in request.keys[:MAX_KEYS_PER_CALL]:
            near = self.routing_table.get_nearest_neighbors(
                DHTID.from_bytes(key), k=self.bucket_size, exclude=asker
            )
            results.append(
                dht_pb2.FindResult(
                    type=dht_pb2.NOT_FOUND,
                    nearest_node_ids=[node_id.to_bytes() for node_id, _ in near],
                    nearest_peer_ids=[peer_id.to_bytes() for _, peer_id in near],
                )
            )
        return dht_pb2.FindResponse(results=results, peer=self.node_info)

    async def rpc_read(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        """What is here under some keys that the asker does not know: one question, see `ask` and `answer`."""
        self._meet(request.peer, context)
        results = []
        for data in request.keys[:1]:
            with contextlib.suppress(Refused):
                found = answer(read_question(data), lambda key: self.entries(DHTID.from_bytes(key)))
                results.append(dht_pb2.FindResult(type=dht_pb2.FOUND_REGULAR, value=found))
        return dht_pb2.FindResponse(results=results, peer=self.node_info)

    def entries(self, key_id: DHTID) -> list[Entry]:
        """What is here under a key: first what peers sent themselves, then the others, in any order."""
        item = self.storage.get(key_id)
        entries = getattr(item.value, "data", {}) if item is not None else {}
        now = unix_s()  # hivemind drops what has expired when the next value comes
        found = [
            Entry(subkey, value, expires) for subkey, (value, expires) in entries.items() if expires > now
        ]
        self._rng.shuffle(found)
        first_hand = self._first_hand.get(key_id, ())
        return sorted(found, key=lambda entry: entry.subkey not in first_hand)

    # -- joining ----------------------------------------------------------------------------------

    async def call_ping(self, peer: PeerID, validate: bool = False, strict: bool = True) -> DHTID | None:
        """As hivemind's, but one peer to join at that finds fault with us decides nothing (`welcomes`)."""
        if not validate:
            return await super().call_ping(peer)
        asked_at, request = get_dht_time(), dht_pb2.PingRequest(peer=self.node_info, validate=True)
        try:
            async with self.rpc_semaphore:
                response = await self.get_stub(peer).rpc_ping(request, timeout=JOIN_S)
            node_id = DHTID.from_bytes(response.peer.node_id) if response.peer.node_id else None
        except Exception:  # whatever hivemind, p2pd and a stranger come up with
            logger.debug("%s does not answer a ping", peer, exc_info=True)
            node_id = None
        else:
            # Its clock was read some time between the question and the answer.
            ahead_s = response.dht_time - min(max(response.dht_time, asked_at), get_dht_time())
            self.welcomes.append(Welcome(ahead_s, response.available))
        create_task(self.update_routing_table(node_id, peer, responded=node_id is not None))
        return node_id

    # -- asking -----------------------------------------------------------------------------------

    async def call_read(
        self, peer: PeerID, keys: Mapping[bytes, Mapping[str, float]], most_bytes: int
    ) -> tuple[dict[bytes, Found], int] | None:
        """What a node has under some keys besides what is known, and the bytes that crossed the line.

        None if it did not answer, or not as it should.
        """
        question = ask(keys, most_bytes, self._rng.randbytes(_SALT_BYTES))
        try:
            request = dht_pb2.FindRequest(keys=[question], peer=self.node_info)
            async with self.rpc_semaphore:
                response = await self.get_stub(peer).rpc_read(request, timeout=self.wait_timeout)
            (result,) = response.results
            # Each entry of an answer costs a signature's check: one may not bring more than was asked for.
            if len(result.value) > most_bytes + _FRAMING_BYTES * (len(keys) + 1):
                raise ValueError("an answer of more bytes than were asked for")
            found = _answer_decoder.decode(result.value)
            if len(found) != len(keys):
                raise ValueError("an answer of another length than its question")
            node_id = DHTID.from_bytes(response.peer.node_id) if response.peer.node_id else None
        except Exception:  # whatever hivemind, p2pd and a stranger come up with
            logger.debug("no answer from %s", peer, exc_info=True)
            create_task(self.update_routing_table(None, peer, responded=False))
            return None
        if node_id is not None:
            create_task(self.update_routing_table(node_id, peer, responded=True))
        return dict(zip(keys, found, strict=True)), request.ByteSize() + response.ByteSize()

    # -- knowing others ---------------------------------------------------------------------------

    def _meet(self, node: dht_pb2.NodeInfo, context: P2PContext) -> None:
        if node.node_id:
            create_task(self.rpc_ping(dht_pb2.PingRequest(peer=node), context))

    async def update_routing_table(
        self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True
    ) -> None:
        """As hivemind's, but a full bucket is looked after once a second, not for each call of those without
        a place in it, and what a new node should hold is sent to it in pieces."""
        table: Any = self.routing_table
        node_id = node_id if node_id is not None else table.get(peer_id=peer_id)
        if node_id is None or node_id != DHTID.generate(source=str(peer_id)):
            return  # its own place follows from its name; at another it would be beside a key of its choice
        if not responded:
            if node_id in table:
                del table[node_id]
            return
        bucket = table.buckets[table.get_bucket_index(node_id)]
        crowded = len(bucket.nodes_to_peer_id) >= bucket.size and node_id not in bucket.nodes_to_peer_id
        now = now_s()
        if node_id not in table:
            self._hand_on(node_id, peer_id)
        elif crowded and now - self._pinged_at < PING_EVERY_S:
            return
        oldest = table.add_or_update_node(node_id, peer_id)
        if oldest is not None:
            self._pinged_at = now
            create_task(self.call_ping(oldest[1]))

    def _hand_on(self, node_id: DHTID, peer_id: PeerID) -> None:
        """Send a node that we meet what it should hold, if we are the nearest of those that do."""
        due: list[tuple[DHTID, Entry]] = []
        for key_id, _ in list(self.storage.items()):
            near = self.routing_table.get_nearest_neighbors(key_id, self.num_replicas, exclude=self.node_id)
            ours = not near or (
                node_id.xor_distance(key_id) < near[-1][0].xor_distance(key_id)
                and self.node_id.xor_distance(key_id) < near[0][0].xor_distance(key_id)
            )
            if ours:
                due += [(key_id, entry) for entry in self.entries(key_id)]
        if due:
            create_task(self._send(peer_id, due))

    async def _send(self, peer_id: PeerID, due: Iterable[tuple[DHTID, Entry]]) -> None:
        for some in _batches(due):
            answered = await self.call_store(
                peer_id,
                [key_id for key_id, _ in some],
                [entry.value for _, entry in some],
                [entry.expires for _, entry in some],
                subkeys=[entry.subkey for _, entry in some],
            )
            if answered is None:
                return


def _batches(due: Iterable[tuple[DHTID, Entry]]) -> Iterable[list[tuple[DHTID, Entry]]]:
    """Small enough for one call each."""
    batch: list[tuple[DHTID, Entry]] = []
    size = 0
    for one in due:
        size += one[1].size
        if batch and (size > HAND_ON_BYTES or len(batch) == MAX_KEYS_PER_CALL):
            yield batch
            batch, size = [], one[1].size
        batch.append(one)
    yield batch
