"""A node of the DHT: which others it knows, what it keeps for them, and how it is asked for it.

Kademlia, with hivemind's ids and routing table; what is ours: docs/design.md, *The directory*. Of one
identity a node keeps a few records, and takes a few a second; and an answer begins with what its reader does
not know at all, then with what it was told of longest ago. So a thousand that renew their records do not hide
a new one.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import logging
import math
import random
import struct
from asyncio import gather
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from peers.clock import now_s, unix_s
from peers.net._hivemind import DHTID, RoutingTable
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
from peers.waiting import TaskKeeper, within
from swarm.charter import Charter, why_not_held
from swarm.errors import MALFORMED, Refused
from swarm.ids import PEER_ID, PeerId
from swarm.wire.version import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

MAX_SUBKEYS = 2048
"""Under one key: eight times what `lookup.Scale` puts there, and a thousand strangers' besides."""
MAX_OF_ONE, MAX_SIGNED_BY_ONE = 8, 64
"""Records of one identity, which is under 4 keys of its stage, and after a move of the last one; and what it
signed besides, manifests and charters: any peer may store those of its former runs again."""
STORED_PER_S = 2.0
STORED_AT_ONCE = 128.0
"""Values that one peer may offer: each costs the check of a signature, 0.1 ms. Its record is renewed under 4
keys each 5 s, and what it hands on of others, a manifest and a charter, seldom."""
GIVEN_SHARE = 4
"""Of the places that are left: so large a part one may have taken for what it hands on, or a single one."""
LOOKED_THROUGH_PER_S = 32768.0
LOOKED_THROUGH_AT_ONCE = 10 * LOOKED_THROUGH_PER_S
"""Entries that one peer may have a node look through, 2.6 µs each. A peer of a run asks one node at most
three questions in 2 s, each for all that it has at most; and twice for all of it when it joins."""
CALL_COST, FIND_COST, KNOWN_BYTES_COST, TOLD_BYTES_COST = 50, 48, 1 / 128, 1 / 16
"""As many entries take as much time: of a call, of each key for which nodes near it are found, and of each
byte that is read. What is told takes the line: half a MB a second, after 5 MB at once."""
MAX_OFFERERS = 4096
MAX_KEYS = 4096
MAX_ENTRIES = 16384
"""That a node keeps for others: about 10 MB of records; 65 MB, if there is a manifest under each key."""
MAX_KEYS_PER_CALL = 64
MAX_ANSWER_BYTES = 1 << 19
PING_EVERY_S = 1.0
"""A node of a full part of the routing table, to see whether another one may have its place."""
PINGED_PER_S = 10.0
PINGED_AT_ONCE = 100.0
"""Peers that ask and are not known: nodes are those that answer, too."""
MAX_REACHING = 256
"""Peers that join are called back at a time, each once: a call that waits takes one of 512 places. More are
believed to be reached: a crowd that does not answer keeps no peer out."""
REPLICAS = 5
SEARCH_ROUNDS = 20
"""Each comes nearer by a few bits, but one can make identities that are nearer and nearer without end."""
RPC_S = 3.0
_MAX_TOLD = 20
"""Of an answer, of each key. p2pd forgives blanks in a name: each would be another place."""
JOIN_S = 8.0
"""For reaching a peer to join at, and again for its first answer: it may be far away, or busy."""
_CLOCK_MARGIN_S = 60.0
VERSION_S = 1 / 16
"""Versions of a record expire at least twice as far apart."""
_KNOWN = struct.Struct("<4sI")
_SALT_BYTES = 8
_FRAMING_BYTES = 64
"""Of an answer, for each key, besides its records."""

Key: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=20, max_length=20)]


class Entry(NamedTuple):
    """A value as the DHT holds it."""

    subkey: str
    value: bytes
    expires: float

    @property
    def size(self) -> int:
        """About the bytes that it takes in an answer."""
        return len(self.value) + 80


class FoundEntries(msgspec.Struct, frozen=True, array_like=True):
    """What a node has under one key that the asker did not know."""

    entries: tuple[Entry, ...]
    left: int
    """So many more, for which there was no room."""


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Are you there? The answer is a `Pong`. Peers of all versions understand both."""

    joining: bool
    """Can you call me, too? I want to join at you."""


class Pong(msgspec.Struct, frozen=True, array_like=True):
    unix_s: float
    reaches: bool
    protocol: int


class Store(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Keep these. The answer says of each whether it is kept."""

    values: Annotated[list[tuple[Key, Entry]], msgspec.Meta(max_length=MAX_KEYS_PER_CALL)]


class Find(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Which nodes do you know near each of these? The answer lists them, the nearest first."""

    keys: Annotated[list[Key], msgspec.Meta(max_length=MAX_KEYS_PER_CALL)]


class AskedKey(msgspec.Struct, frozen=True, array_like=True):
    """One key of a question."""

    key: Key
    known: Annotated[bytes, msgspec.Meta(max_length=_KNOWN.size * MAX_SUBKEYS)]


class Question(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """What else is there? The answer has what was `FoundEntries` under each key."""

    most_bytes: Annotated[int, msgspec.Meta(ge=0)]
    salt: Annotated[bytes, msgspec.Meta(min_length=_SALT_BYTES, max_length=_SALT_BYTES)]
    """Another one each time: two records that look alike do so once."""
    keys: Annotated[list[AskedKey], msgspec.Meta(max_length=MAX_KEYS_PER_CALL)]


Request: TypeAlias = Ping | Store | Find | Question
T = TypeVar("T")
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_found_decoder = msgspec.msgpack.Decoder(list[FoundEntries])
_near_decoder = msgspec.msgpack.Decoder(list[list[Annotated[str, msgspec.Meta(max_length=PEER_ID_LETTERS)]]])
_pong_decoder = msgspec.msgpack.Decoder(Pong)
_stored_decoder = msgspec.msgpack.Decoder(list[bool])
_encode = msgspec.msgpack.Encoder().encode


def _mark(salt: bytes, subkey: str) -> bytes:
    """Stands for a peer in one question."""
    return hashlib.blake2b(subkey.encode(), digest_size=4, key=salt).digest()


def _ticks(expires: float) -> int:
    """An expiration in as few bits as tell one version of a record from the next."""
    return int(min(max(0.0, expires), 2.0**40) / VERSION_S) % (1 << 32)


def ask(keys: Mapping[bytes, Mapping[str, float]], most_bytes: int, salt: bytes) -> Question:
    """A question for the records under some keys. `keys`: which of them are known, with their expirations.

    A mark of four bytes may fit two peers, and one of them is not told; the next question has another salt.
    """
    known = {
        key: b"".join([_KNOWN.pack(_mark(salt, peer), _ticks(ends)) for peer, ends in held.items()])
        for key, held in keys.items()
    }
    return Question(most_bytes, salt, [AskedKey(*one) for one in known.items()])


def read_request(data: bytes) -> Request:
    """Raises Refused if it is none."""
    try:
        request = _request_decoder.decode(data)
    except MALFORMED as error:
        raise Refused(f"a malformed question: {error}") from None
    if isinstance(request, Question):
        if any(len(one.known) % _KNOWN.size for one in request.keys):
            raise Refused("a malformed question: half a record is known")
        if len({one.key for one in request.keys}) < len(request.keys):
            raise Refused("a malformed question: a key stands there twice")
    return request


def answer(question: Question, held: Callable[[bytes], Sequence[Entry]]) -> list[FoundEntries]:
    """`held`: what the node has under a key, the most important first."""
    room, found = min(question.most_bytes, MAX_ANSWER_BYTES), []
    for number, one in enumerate(question.keys):
        share, size, told = room // (len(question.keys) - number), 0, 0
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
        found.append(FoundEntries(tuple(new[:told]), len(new) - told))
    return found


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


def _open(key: bytes, subkey: str, value: bytes, expires: float) -> Opened | str:
    """What it is, '' for a manifest, or why the DHT must not hold this."""
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


_opened, _opened_long = (functools.lru_cache(maxsize=most)(_open) for most in (8192, 128))
"""All are seen twice. Few of those that are longer than a record, 16 kB, and live as long as this process."""


def record_ids(opened: Announced) -> list[bytes]:
    """The keys under which a record lies, as the DHT has them."""
    return [key_bytes(key) for key in record_keys(opened.record, opened.level)]


@functools.lru_cache(maxsize=4096)
def key_bytes(key: str) -> bytes:
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
            opens = _opened if len(entry.value) <= MAX_SIGNED_BYTES else _opened_long
            opened = opens(key, entry.subkey, entry.value, entry.expires)
        if isinstance(opened, Announced) and (why := self.why_not(opened)):
            opened = why
        if isinstance(opened, Charter):
            opened = why_not_held(opened, now=unix_s()) or opened
        if isinstance(opened, str) and opened:
            if opened in self.rejected or len(self.rejected) < 100:
                self.rejected[opened] += 1
            logger.debug("refused a DHT record: %s", opened)
            return None
        return opened


# --- the node -----------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8192)
def node_id_of(peer: PeerId) -> DHTID:
    """The place of a peer's node. It follows from its name: none stands beside a key of its choice."""
    return DHTID.generate(source=peer)


class KeptEntry(NamedTuple):
    """A value that a node keeps for others."""

    entry: Entry
    rank: tuple[int, bytes] = (0, b"")
    """Of two values of a subkey the one of higher rank stays, then the one that expires later."""
    announced: Announced | None = None
    """If it is a record: it is judged again without a look at its signature."""


class DhtNode:
    """One node, on one p2pd after the other."""

    max_subkeys = MAX_SUBKEYS
    max_entries = MAX_ENTRIES
    bucket_size, bucket_depth = 10, 5
    """Of the routing table: see `RoutingTable`."""
    control: DaemonControl

    def __init__(self, me: PeerId, check: RecordCheck, tasks: TaskKeeper) -> None:
        self.node_id, self.check = node_id_of(me), check
        self.welcomes: list[tuple[float, Pong]] = []
        """What the peers that we join at answered, and how far their clocks are ahead of ours."""
        self._me, self._tasks, self._rng = me, tasks, random.Random()
        self._kept: dict[bytes, dict[str, KeptEntry]] = {}
        self._entries = 0
        self._second_hand: dict[bytes, dict[str, PeerId]] = {}
        """By key, the subkeys of values that others handed on, and the giver. They give way first: where
        there are none, a full node looks for none."""
        self._given: Counter[PeerId] = Counter()
        """How many of those are whose."""
        self._of: Counter[tuple[str, bool]] = Counter()
        """How many values are kept of each subkey: records, and others."""
        self._offers: dict[tuple[PeerId, float], Allowance] = {}
        """Of each peer: of the values that it offers, and of what is looked through for it."""
        self._strangers = Allowance(PINGED_PER_S, PINGED_AT_ONCE)
        self._reaching: set[PeerId] = set()
        """Peers that want to know whether we reach them."""
        self._expired_at = self._pinged_at = -math.inf
        self.table: Any = RoutingTable(self.node_id, self.bucket_size, self.bucket_depth)

    async def serve(self, control: DaemonControl) -> None:
        """Be a node at this p2pd, which knows no other yet. Raises ControlError."""
        self.control = control
        self.table = RoutingTable(self.node_id, self.bucket_size, self.bucket_depth)
        await control.serve_calls(self.answer)

    async def answer(self, data: bytes, asker: PeerId) -> bytes:
        """What a peer is answered. Raises Refused: it asks for nothing that there is, or for too much."""
        asks, now = self._allowance(asker, LOOKED_THROUGH_PER_S, LOOKED_THROUGH_AT_ONCE), now_s()
        if asks.take(CALL_COST + len(data) * KNOWN_BYTES_COST, now=now):
            raise Refused("other peers ask as well")
        request = read_request(data)
        if asker in self.table.peer_id_to_uid:
            self._met(asker)
        elif not isinstance(request, Ping) and self._strangers.take_if_there(1.0, now=now_s()):
            self._tasks.create_task(self.ping(asker))  # a node can be asked as well
        match request:
            case Ping():
                return _encode(await self.pong(request, asker))
            case Store():
                return _encode([self._store(asker, *value) for value in request.values])
            case Find():
                asks.take(FIND_COST * len(request.keys), now=now)
                ids = map(DHTID.from_bytes, request.keys)
                return _encode([self.near(one, self.bucket_size, exclude=asker) for one in ids])
            case Question():
                asks.take(sum(len(self._kept.get(one.key, ())) for one in request.keys), now=now)
                told = _encode(answer(request, self.entries))
                asks.take(len(told) * TOLD_BYTES_COST, now=now)
                return told

    async def pong(self, ping: Ping, asker: PeerId) -> Pong:
        """Whether we can call the asker as well, if it wants to know, and our clock."""
        now, reaches = unix_s(), len(self._reaching) >= MAX_REACHING
        if ping.joining and asker not in self._reaching and not reaches:
            self._reaching.add(asker)
            try:
                reaches = await self.ping(asker)
            finally:
                self._reaching.discard(asker)
        return Pong(now, reaches, PROTOCOL_VERSION)

    # -- storing ----------------------------------------------------------------------------------

    def _allowance(self, peer: PeerId, per_s: float, at_once: float) -> Allowance:
        """What is left to a peer of what it may do at that pace."""
        known = self._offers.pop((peer, at_once), None) or Allowance(per_s, at_once)
        self._offers[peer, at_once] = known
        if len(self._offers) > MAX_OFFERERS:
            del self._offers[next(iter(self._offers))]
        return known

    def _store(self, sender: PeerId, key: bytes, entry: Entry) -> bool:
        """Keep a value for a peer; whether it is kept."""
        first_hand, held = sender == entry.subkey, self._kept.get(key, {})
        offers = self._allowance(sender, STORED_PER_S, STORED_AT_ONCE)
        if not offers.take_if_there(1.0, now=now_s()) or entry.expires <= unix_s():
            return False  # nor opened: what is over says of no peer that it is there, and uses a token
        if (opened := self.check.open(key, entry)) is None:
            return False
        self._expire()
        is_record = isinstance(opened, Announced)
        most = MAX_OF_ONE if is_record else MAX_SIGNED_BY_ONE
        few = not entry.subkey or self._of[entry.subkey, is_record] < most
        left = self.max_entries - self._entries if held else MAX_KEYS - len(self._kept)
        may = few and (first_hand or self._given[sender] <= left // GIVEN_SHARE)
        has_room = entry.subkey in held or (may and self._has_room(key, len(held), first_hand))
        return has_room and self.keep(key, entry, first_hand=first_hand, giver=sender)

    def keep_read(self, key: bytes, entry: Entry) -> None:
        """Hold what others gave, while there is room: all nodes near its key may be one stranger's."""
        if self._has_room(key, len(self._kept.get(key, ())), False):
            self.keep(key, entry, first_hand=False)

    def keep(self, key: bytes, entry: Entry, *, first_hand: bool, giver: PeerId = "") -> bool:
        """Hold a value that was checked and is not over; whether it is later than the one that is held."""
        old, opened = self._kept.get(key, {}).get(entry.subkey), self.check.open(key, entry)
        rank = opened.rank if isinstance(opened, Charter) else (0, b"")
        announced = opened if isinstance(opened, Announced) else None
        if old is not None and (rank, entry.expires) <= (old.rank, old.entry.expires):
            return False
        self._entries += old is None
        self._of[entry.subkey, announced is not None] += old is None
        if first_hand:
            self._note_first_hand(key, entry.subkey)
        elif old is None:
            self._second_hand.setdefault(key, {})[entry.subkey] = giver
            self._given[giver] += 1
        self._kept.setdefault(key, {})[entry.subkey] = KeptEntry(entry, rank, announced)
        return True

    def _has_room(self, key: bytes, held: int, first_hand: bool) -> bool:
        """Whether one more fits; one that its peer sent itself replaces one that another peer sent."""
        if held >= self.max_subkeys:
            return first_hand and self._drop_second_hand(key)
        if self._entries >= self.max_entries or (not held and len(self._kept) >= MAX_KEYS):
            largest = max(self._second_hand, key=lambda key: len(self._kept[key]), default=b"")
            return first_hand and self._drop_second_hand(largest)
        return True

    def _drop_second_hand(self, key: bytes) -> bool:
        dropped = next(iter(self._second_hand.get(key, ())), None)
        if dropped is not None:
            self._drop(key, dropped)
        return dropped is not None

    def _note_first_hand(self, key: bytes, subkey: str) -> None:
        others = self._second_hand.get(key, {})
        if subkey in others:
            self._given[others.pop(subkey)] -= 1
        if not others:
            self._second_hand.pop(key, None)

    def _drop(self, key: bytes, subkey: str) -> None:
        self._note_first_hand(key, subkey)
        self._of[subkey, self._kept[key].pop(subkey).announced is not None] -= 1
        self._entries -= 1
        if not self._kept[key]:
            del self._kept[key]

    def drop_those(self, over: Callable[[KeptEntry], object]) -> None:
        """Keep those no longer of which that is true."""
        for key, held in list(self._kept.items()):
            for subkey in [subkey for subkey, kept in held.items() if over(kept)]:
                self._drop(key, subkey)

    def recheck(self) -> None:
        """Drop records of peers that are not admitted any more."""
        self.drop_those(lambda kept: kept.announced is not None and self.check.why_not(kept.announced))

    def _expire(self) -> None:
        """Drop what is over, once a second."""
        if now_s() - self._expired_at > 1.0:
            self._expired_at, now = now_s(), unix_s()
            self.drop_those(lambda kept: kept.entry.expires <= now)
            self._of, self._given = +self._of, +self._given  # forget peers that have none

    def entries(self, key: bytes) -> list[Entry]:
        """What is here under a key: first what peers sent themselves, then the others, in any order."""
        now, others = unix_s(), self._second_hand.get(key, {})
        kept = [one.entry for one in self._kept.get(key, {}).values() if one.entry.expires > now]
        self._rng.shuffle(kept)
        return sorted(kept, key=lambda entry: entry.subkey in others)

    # -- asking -----------------------------------------------------------------------------------

    async def _call(
        self, peer: PeerId, request: Request, form: msgspec.msgpack.Decoder[T], limit_s: float = RPC_S
    ) -> tuple[T, int] | None:
        """A node's answer, and the bytes that crossed the line; None if there is none."""
        question, most_bytes = _encode(request), MAX_ANSWER_BYTES
        if isinstance(request, Question):
            # Each entry costs a signature's check: an answer may not bring more than was asked for.
            most_bytes = request.most_bytes + _FRAMING_BYTES * (len(request.keys) + 1)
        try:
            said = await within(self.control.call_peer(peer, question), limit_s)
            if len(said) > most_bytes:
                raise ValueError("an answer of more bytes than were asked for")
            found = form.decode(said)
        except Exception:  # whatever p2pd and a stranger come up with
            logger.debug("no answer from %s", peer, exc_info=True)
            self._lost(peer)
            return None
        self._met(peer)
        return found, len(question) + len(said)

    async def ping(self, peer: PeerId, *, joining: bool = False) -> bool:
        """Whether a node answers. One to join at that finds fault with us decides nothing (`welcomes`)."""
        asked_at = unix_s()
        answered = await self._call(peer, Ping(joining), _pong_decoder, JOIN_S if joining else RPC_S)
        if joining and answered is not None:
            # Its clock was read some time between the question and the answer.
            pong = answered[0]
            ahead_s = pong.unix_s - min(max(pong.unix_s, asked_at), unix_s())
            self.welcomes.append((ahead_s, pong))
        return answered is not None

    async def store(self, peer: PeerId, values: Sequence[tuple[bytes, Entry]]) -> list[bool] | None:
        """Have a node keep some values; of each whether it does."""
        answered = await self._call(peer, Store(list(values)), _stored_decoder)
        return None if answered is None else answered[0]

    async def read(
        self, peer: PeerId, keys: Mapping[bytes, Mapping[str, float]], most_bytes: int
    ) -> tuple[dict[bytes, FoundEntries], int] | None:
        """What a node has under some keys besides what is known, and the bytes that crossed the line.

        None if it did not answer, or not as it should.
        """
        question = ask(keys, most_bytes, self._rng.randbytes(_SALT_BYTES))
        answered = await self._call(peer, question, _found_decoder)
        if answered is None or len(answered[0]) != len(keys):
            self._lost(peer)
            return None
        return dict(zip(keys, answered[0], strict=True)), answered[1]

    async def search(self, ids: Sequence[DHTID]) -> dict[DHTID, list[PeerId]]:
        """The nodes nearest to each id that answer, nearest first: those near are asked for nearer ones."""
        known = {peer for one in ids for peer in self.near(one, REPLICAS)}
        asked: dict[DHTID, set[PeerId]] = defaultdict(set)
        for _ in range(SEARCH_ROUNDS):
            due = defaultdict[PeerId, list[DHTID]](list)
            for one in ids:
                for peer in set(nearest(one, known)) - asked[one]:
                    asked[one].add(peer)
                    due[peer].append(one)
            if not due:
                break
            told = await gather(*(self._find(peer, some) for peer, some in due.items()))
            known = known.union(*told) - {self._me}
            known -= {peer for peer, said in zip(due, told, strict=True) if peer not in said}
        return {one: nearest(one, known) for one in ids}

    async def _find(self, peer: PeerId, ids: Sequence[DHTID]) -> set[PeerId]:
        """The nodes that one knows near some ids, itself included; none if it does not answer."""
        known = {peer}
        for start in range(0, len(ids), MAX_KEYS_PER_CALL):
            some = [one.to_bytes() for one in ids[start : start + MAX_KEYS_PER_CALL]]
            if (answered := await self._call(peer, Find(some), _near_decoder)) is None:
                return set()
            for near in answered[0][: len(some)]:
                known.update(filter(PEER_ID.fullmatch, near[:_MAX_TOLD]))
        return known

    # -- knowing others ---------------------------------------------------------------------------

    def near(self, node_id: DHTID, count: int, *, exclude: PeerId = "") -> list[PeerId]:
        """Those that we know nearest to an id, nearest first."""
        found = self.table.get_nearest_neighbors(node_id, count, exclude=node_id_of(exclude))
        return [peer for _, peer in found]

    def _met(self, peer: PeerId) -> None:
        """A node called or answered. Full buckets are looked after once a second, however many call."""
        table, node_id, now = self.table, node_id_of(peer), now_s()
        bucket = table.buckets[table.get_bucket_index(node_id)]
        crowded = len(bucket.nodes_to_peer_id) >= bucket.size and node_id not in bucket.nodes_to_peer_id
        if crowded and node_id in table and now - self._pinged_at < PING_EVERY_S:
            return
        oldest = table.add_or_update_node(node_id, peer)
        bucket = table.buckets[table.get_bucket_index(node_id)]
        if len(bucket.replacement_nodes) > 4 * bucket.size:  # it would keep all that ever answered
            del table[next(iter(bucket.replacement_nodes))]
        if oldest is not None:
            self._pinged_at = now
            self._tasks.create_task(self.ping(oldest[1]))

    def _lost(self, peer: PeerId) -> None:
        if (node_id := node_id_of(peer)) in self.table:
            del self.table[node_id]  # but for its name, if it was pinged
            self.table.buckets[self.table.get_bucket_index(node_id)].nodes_requested_for_ping.discard(node_id)


def nearest(node_id: DHTID, peers: Iterable[PeerId], count: int = REPLICAS) -> list[PeerId]:
    return heapq.nsmallest(count, peers, key=lambda peer: node_id_of(peer) ^ node_id)
