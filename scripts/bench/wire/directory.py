# (protobuf's generated modules carry no types)
"""What the live directory costs a peer, by number of peers: for `scale.py`.

A peer of a middle stage, in a run that is steady: everybody renews, nobody comes. Messages and signatures are
real, encoded and checked by the classes that live peers use; how many of them pass in a minute follows from
`peers/net/timings.py`, `lookup.py` and `record_reader.py`. Each key is taken to lie at nodes of its own, as
in a large run. What one peer asks another one serves, so bytes count twice: on average all peers serve as
much as they ask.
"""

from __future__ import annotations

import random
import time
from typing import Any

from peers.net import dht_protocol, record_reader, signed_records
from peers.net.dht_protocol import (
    Entry,
    FoundEntries,
    Question,
    RecordCheck,
    Store,
    answer,
    ask,
    read_request,
    record_ids,
)
from peers.net.dht_protocol import _encode as encode
from peers.net.dht_protocol import _found_decoder as decoder
from peers.net.identity import Identity
from peers.net.lookup import DEFAULT_SCALE
from peers.net.timings import DEFAULT_TIMINGS
from peers.record_table import RecordTable
from swarm.records import PeerRecord

RUN = "f" * 32
SALT = b"saltsalt"
SEARCH_CALLS, SEARCH_BYTES = 20, 1350
"""Of one search for a key, and of a call: seen among 140 nodes of `tests/net/directory/memory_dht.py`."""


def entry(me: Identity, stage: int, level: int, expires: float) -> Entry:
    record = PeerRecord(
        peer=me.peer_id, run=RUN, stage=stage, state="serving", version=1234, speed=1.2345, load=2.5,
        state_bytes=10**9, bandwidth_bps=1e8, max_inflight=8, device="cuda:0 NVIDIA A100",
        addresses=(f"/ip4/203.0.113.7/tcp/31337/p2p/{me.peer_id}",), since=expires - 3600.0,
    )  # fmt: skip
    return Entry(me.peer_id, signed_records.seal_record(record, expires, me, level=level), expires)


class Stages:
    """The records of three stages, as a peer knows them, and as they are since a part of them was renewed."""

    def __init__(self, members: int, renewed: float) -> None:
        self.level, self.check, self.table = (
            DEFAULT_SCALE.level_for(members),
            RecordCheck(),
            RecordTable("me"),
        )
        self.held: dict[bytes, list[Entry]] = {}
        now, rng = time.time(), random.Random(members)
        for number in range(3 * members):
            me, stage = Identity((1 + number).to_bytes(32, "big")), number % 3
            old = entry(me, stage, self.level, now + 300.0)
            new = entry(me, stage, self.level, now + 310.0) if rng.random() < renewed else old
            opened = self._open(old)
            self.table.put(opened, record_ids(opened))
            for key in record_ids(opened):
                self.held.setdefault(key, []).append(new)
        self.now = now

    def _open(self, one: Entry) -> signed_records.Announced:
        return signed_records.open_record(one.value, one.subkey, one.expires)

    def question(self, keys: list[bytes]) -> bytes:
        return encode(ask({key: self.table.under(key, now=self.now) for key in keys}, 1 << 19, SALT))

    def told(self, question: bytes) -> bytes:
        asked = read_request(question)
        assert isinstance(asked, Question)
        return encode(answer(asked, lambda key: self.held[key]))

    def refresh(self) -> None:
        """All of it, as in `NetDirectory`: ask, check, take in, list."""
        for key in self.held:
            (found,) = decoder.decode(self.told(self.question([key])))
            self.take(key, found)
        for stage in range(3):
            self.table.at(stage, now=self.now)

    def take(self, key: bytes, found: FoundEntries) -> None:
        for one in found.entries:
            opened = self.check.open(key, one)
            assert isinstance(opened, signed_records.Announced), self.check.rejected
            self.table.put(opened, record_ids(opened))


def store_bytes(one: Entry) -> int:
    """Of one renewal at one node."""
    return len(encode(Store([(bytes(20), one)]))) + len(encode([True]))


def read_bytes(stages: Stages, key: bytes) -> int:
    """Of one question about a key and its answer."""
    question = stages.question([key])
    return len(question) + len(stages.told(question))


def refresh_cpu_s(stages: Stages) -> float:
    """CPU seconds of reading three stages once, and of serving as much. What is new has to be checked."""
    began_s = time.process_time()
    stages.refresh()
    return time.process_time() - began_s


def directory(peers: int, stages: int) -> dict[str, Any]:
    """The columns of one number of peers.

    `near_s`: how often the three stages are read that a peer works with; `survey_s`: all the others once;
    `life_s`: of a record, and so how long a dead peer stays listed where nobody calls it; `refresh_ms`: CPU
    of reading the three stages once; `cpu_ms_s`: CPU milliseconds of all reading and serving in a second;
    `kB_min`: sent and received in a minute, and what of it are renewals, near and far reading, and searches
    for nodes.
    """
    members, times = max(1, peers // stages), DEFAULT_SCALE.stretch(peers)
    renew_s = DEFAULT_TIMINGS.renew_s * times
    said = {DEFAULT_SCALE.level_for(members): members}
    keys = len(list(DEFAULT_SCALE.shards_to_read(0, said)))
    due_s = DEFAULT_TIMINGS.refresh_s * (1 + (times - 1) * record_reader._NEAR_STRETCH)
    near_s = max(due_s, DEFAULT_TIMINGS.refresh_s * 3 * keys / record_reader.NEAR_QUESTIONS)
    near = Stages(members, min(1.0, near_s / renew_s))
    near_bytes = sum(read_bytes(near, key) for key in near.held)
    # Of the others everything has changed since they were read, or as much as was renewed meanwhile.
    far_stages = stages - 3
    whole = Stages(members, 1.0)
    whole_bytes = sum(read_bytes(whole, key) for key in whole.held) * far_stages / 3
    turn_s = DEFAULT_TIMINGS.refresh_s * far_stages * keys / record_reader.FAR_QUESTIONS
    far_bytes = whole_bytes * min(1.0, turn_s / renew_s)
    survey_s = max(turn_s, far_bytes / record_reader.FAR_BYTES_PER_S)
    if survey_s > turn_s:
        far_bytes = whole_bytes * min(1.0, survey_s / renew_s)
        survey_s = max(turn_s, far_bytes / record_reader.FAR_BYTES_PER_S)
    one = next(iter(near.held.values()))[0]
    copies = sum(4.0**-up for up in range(near.level + 1)) * dht_protocol.REPLICAS
    searches = (
        3 * keys / (DEFAULT_TIMINGS.search_every_s * times)
        + far_stages * keys / record_reader.FAR_SEARCH_EVERY_S
    )
    per_s = {
        "renew": copies * store_bytes(one) / renew_s,
        "near": near_bytes / near_s,
        "far": far_bytes / survey_s,
        "search": searches * SEARCH_CALLS * SEARCH_BYTES,
    }
    near_cpu_s, far_cpu_s = (
        refresh_cpu_s(near),
        refresh_cpu_s(whole) * far_bytes / whole_bytes * far_stages / 3,
    )
    return {
        "record_bytes": len(one.value),
        "near_s": round(near_s, 1),
        "survey_s": round(survey_s),
        "life_s": round(DEFAULT_TIMINGS.life_s * times),
        "refresh_ms": round(1e3 * near_cpu_s, 2),
        "cpu_ms_s": round(1e3 * (near_cpu_s / near_s + far_cpu_s / survey_s), 2),
        "kB_min": round(2 * 60 * sum(per_s.values()) / 1e3),
        **{f"{what}_kB_min": round(2 * 60 * much / 1e3) for what, much in per_s.items()},
    }
