"""What a direct connection rests on, without a socket: who agrees on its keys, what its records refuse."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from peers.net.bandwidth import Traffic
from peers.net.charter.doorkeeper import Doorkeeper
from peers.net.connection import ClientConnection
from peers.net.direct.handshake import AskDirect, Asking, GrantDirect, grant
from peers.net.direct.paths import DirectOptions
from peers.net.direct.records import (
    KEY_BYTES,
    LENGTH_BYTES,
    MAX_PLAIN_BYTES,
    MAX_RECORD_BYTES,
    SMALL_BYTES,
    TAG_BYTES,
    Opener,
    Sealer,
)
from peers.net.identity import Identity
from peers.net.timings import DEFAULT_TIMINGS
from peers.net.transport import Dialer
from peers.waiting import TaskKeeper
from swarm.errors import Refused
from swarm.wire import frames
from tests.sealed import put

CALLER, CALLEE, MALLORY = Identity.generate(), Identity.generate(), Identity.generate()
KEY = os.urandom(KEY_BYTES)


def sealed(*plains: bytes, key: bytes = KEY) -> list[bytes]:
    """Each as a record."""
    sealer = Sealer(key)
    return [bytes(sealer.seal([plain])) for plain in plains]


# -- records -----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([1, 16, 4000, MAX_PLAIN_BYTES, MAX_PLAIN_BYTES + 1, 300_000]), max_size=5),
    splits=st.lists(st.sampled_from([1, 3, 4, 5, 21, 1000, 65_000, 70_000, 300_000]), max_size=40),
)
def test_what_was_sealed_comes_out_in_any_split(sizes: list[int], splits: list[int]) -> None:
    sealer, opener = Sealer(KEY), Opener(KEY)
    parts = [(frames.pack_prefix(frames.Kind.BODY, 1, 0, 1), os.urandom(size)) for size in sizes]
    wire = b"".join(map(sealer.seal, parts))
    out = b""
    for size in (*splits, len(wire)):
        out, wire = out + put(opener, wire[:size]), wire[size:]
    assert out == b"".join(b"".join(part) for part in parts)


def test_a_chunk_and_its_prefix_are_four_records_in_one_piece() -> None:
    """So the kernel is asked once, and sends no packet for four bytes of length."""
    prefix, chunk = (
        frames.pack_prefix(frames.Kind.BODY, 1, 0, frames.CHUNK_BYTES),
        os.urandom(frames.CHUNK_BYTES),
    )
    piece, opener = Sealer(KEY).seal([prefix, memoryview(chunk)]), Opener(KEY)
    assert piece.nbytes == len(prefix) + len(chunk) + 4 * (LENGTH_BYTES + TAG_BYTES)
    parts = [
        put(opener, bytes(piece[at : at + MAX_RECORD_BYTES])) for at in range(0, len(piece), MAX_RECORD_BYTES)
    ]
    assert [len(part) for part in parts] == [*3 * [MAX_PLAIN_BYTES], len(chunk) + 16 - 3 * MAX_PLAIN_BYTES]
    assert b"".join(parts) == prefix + chunk


def test_small_records_are_counted_however_many_come_at_once() -> None:
    opener, wire = Opener(KEY), b"".join(sealed(*100 * [b"alive"], bytes(SMALL_BYTES)))
    opener.room()[: len(wire)] = wire
    assert len(opener.came(len(wire))) == 500 + SMALL_BYTES
    assert opener.small == 100
    opener.came(0)
    assert opener.small == 0


def test_another_key_opens_nothing() -> None:
    with pytest.raises(Refused, match="record 0 is not what was sealed"):
        put(Opener(os.urandom(KEY_BYTES)), sealed(b"secret")[0])


@pytest.mark.parametrize("bit", [0, 7, 8 * 5, 8 * 5 + 3, 8 * 15])
def test_a_changed_bit_is_refused(bit: int) -> None:
    record = bytearray(sealed(b"hello")[0])
    record[LENGTH_BYTES + bit // 8] ^= 1 << bit % 8
    with pytest.raises(Refused, match="record 0 is not what was sealed"):
        put(Opener(KEY), bytes(record))


@pytest.mark.parametrize("order", [[0, 0], [1], [0, 2], [1, 0], [0, 1, 1]])
def test_a_record_that_is_repeated_left_out_or_elsewhere_is_refused(order: list[int]) -> None:
    records, opener = sealed(b"one", b"two", b"three"), Opener(KEY)
    with pytest.raises(Refused, match="is not what was sealed"):
        for number in order:
            put(opener, records[number])


def test_what_one_end_sent_is_not_what_it_receives() -> None:
    """A mirror: each direction has its own key."""
    asking = Asking(CALLER, CALLEE.peer_id)
    answer, keys = grant(CALLEE, CALLER.peer_id, asking.ask(), 1)
    assert asking.agree(answer) == keys
    assert len({keys.ticket, keys.to_callee, keys.to_caller}) == 3
    with pytest.raises(Refused):
        put(Opener(keys.to_caller), sealed(b"mine", key=keys.to_callee)[0])


def test_a_record_cut_short_is_no_record() -> None:
    opener = Opener(KEY)
    assert put(opener, sealed(b"hello")[0][:-1]) == b""
    assert opener.room().nbytes > 0


@pytest.mark.parametrize("size", [0, 1, TAG_BYTES, MAX_PLAIN_BYTES + TAG_BYTES + 1, 0xFFFFFFFF])
def test_an_impossible_length_is_refused_before_anything_is_read(size: int) -> None:
    with pytest.raises(Refused, match=f"a record of {size} bytes"):
        put(Opener(KEY), size.to_bytes(LENGTH_BYTES, "big"))


def test_a_key_is_replaced_when_it_is_used_up_at_both_ends() -> None:
    sealer, opener, still = Sealer(KEY, 2), Opener(KEY, 2), Opener(KEY, 3)
    for number in range(7):
        record = bytes(sealer.seal([b"%d" % number]))
        assert put(opener, record) == b"%d" % number
        if number < 2:
            put(still, record)
        elif number == 2:
            with pytest.raises(Refused):
                put(still, record)


# -- who agrees ----------------------------------------------------------------------------------------------


def test_a_question_that_another_peer_signed_is_refused() -> None:
    ask = Asking(MALLORY, CALLEE.peer_id).ask()
    with pytest.raises(Refused, match="a question for a direct connection with a wrong signature"):
        grant(CALLEE, CALLER.peer_id, ask, 1)
    at_anothers = msgspec.structs.replace(Asking(CALLER, CALLEE.peer_id).ask("44.0.0.1", 5), host="44.0.0.2")
    with pytest.raises(Refused, match="a question for a direct connection with a wrong signature"):
        grant(CALLEE, CALLER.peer_id, at_anothers, 1)
    for_another = Asking(CALLER, MALLORY.peer_id).ask()
    with pytest.raises(Refused, match="a question for a direct connection with a wrong signature"):
        grant(CALLEE, CALLER.peer_id, for_another, 1)


def test_a_grant_that_another_peer_signed_or_for_another_question_is_refused() -> None:
    asking = Asking(CALLER, CALLEE.peer_id)
    answer, _ = grant(CALLEE, CALLER.peer_id, asking.ask(), 7)
    by_another = msgspec.structs.replace(answer, signature=MALLORY.sign(b"anything"))
    elsewhere = [msgspec.structs.replace(answer, **place) for place in ({"port": 8}, {"host": "44.0.0.1"})]
    for wrong in (by_another, *elsewhere):
        with pytest.raises(Refused, match="a grant of a direct connection with a wrong signature"):
            asking.agree(wrong)
    with pytest.raises(Refused, match="a grant of a direct connection with a wrong signature"):
        Asking(CALLER, CALLEE.peer_id).agree(answer)  # of an earlier session


def test_a_session_that_was_recorded_opens_nothing_in_another() -> None:
    """The same question again gets another key: neither its ticket nor its records are of any use."""
    ask = Asking(CALLER, CALLEE.peer_id).ask()
    (_, first), (_, second) = (grant(CALLEE, CALLER.peer_id, ask, 7) for _ in range(2))
    assert first.ticket != second.ticket
    with pytest.raises(Refused):
        put(Opener(second.to_callee), sealed(b"recorded", key=first.to_callee)[0])


def test_a_key_that_leaves_no_secret_is_refused() -> None:
    zero = bytes(32)
    said = msgspec.msgpack.encode(("swarm direct ask 2", CALLER.peer_id, CALLEE.peer_id, zero, ("", 0)))
    with pytest.raises(Refused, match="a key for a direct connection that is none"):
        grant(CALLEE, CALLER.peer_id, AskDirect(key=zero, signature=CALLER.sign(said)), 1)


def test_malformed_messages_are_no_messages() -> None:
    for wrong in ({"key": b"short", "signature": bytes(64)}, {"key": bytes(32), "signature": b""}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, AskDirect)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"key": bytes(32), "signature": bytes(64), "port": -1}, GrantDirect)


# -- who waits for one --------------------------------------------------------------------------------------


class Paths:
    """Finds another path after half a second, or never."""

    options = DirectOptions()

    def __init__(self, found_s: float) -> None:
        self.found_s, self.better = found_s, ClientConnection("peer", b"")

    async def dial(self, link: ClientConnection, hosts: Sequence[str]) -> ClientConnection:
        await asyncio.sleep(self.found_s)
        return self.better


class Control:
    async def connections(self, *of: str) -> dict[str, list[str]]:
        return {}


@pytest.mark.virtual_time
@pytest.mark.parametrize("found_s", [0.5, 60.0])
async def test_a_body_waits_for_a_path_past_p2pd_and_nothing_else_does(found_s: float) -> None:
    loop, traffic, tasks = asyncio.get_running_loop(), Traffic(most_peers=1), TaskKeeper()
    dialer = Dialer(Control(), DEFAULT_TIMINGS, traffic, tasks, Doorkeeper())  # type: ignore[arg-type]
    link, paths = ClientConnection("peer", b""), Paths(found_s)
    link.line, dialer.links["peer"] = traffic.of("peer"), link
    dialer.direct = paths  # type: ignore[assignment]
    assert await dialer.link_to("peer", 1000) is link
    body = asyncio.ensure_future(dialer.link_to("peer", 1 << 20))
    await asyncio.sleep(0.25)
    assert await dialer.link_to("peer", 1000) is link
    assert loop.time() == pytest.approx(0.25) and not body.done()
    assert await body is (paths.better if found_s < DEFAULT_TIMINGS.direct_s else link)
    assert loop.time() == pytest.approx(min(found_s, DEFAULT_TIMINGS.direct_s))
    await tasks.close()
