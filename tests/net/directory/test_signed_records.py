"""What the DHT may hold: signed by the peer it speaks of, or proven by its own hash. Nothing else."""

from __future__ import annotations

import dataclasses
import time
import zlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.net import signed_records
from peers.net.identity import Identity
from peers.net.lookup import homes
from swarm.errors import Refused, SetupError
from swarm.manifest import Run
from swarm.records import NO_STAGE, PeerRecord
from swarm.wire.version import PROTOCOL_VERSION
from tests.example import example_run

ME, OTHER = Identity(bytes(32)), Identity(bytes(31) + b"\1")
EXPIRES = 2_000_000_000.25


def record(**changes: Any) -> PeerRecord:
    fields = {"peer": ME.peer_id, "run": "r" * 32, "stage": 1, "state": "serving", "version": 5}
    return PeerRecord(**(fields | changes))


def signed(
    record: PeerRecord | bytes,
    expires: float = EXPIRES,
    by: Identity = ME,
    run: str = "r" * 32,
    level: int = 0,
) -> bytes:
    """A record that was not checked before it was signed."""
    packed = record if isinstance(record, bytes) else signed_records._pack(record, level)
    signature = by.sign(signed_records._to_sign(run, expires, packed))
    return msgspec.msgpack.encode([packed, expires, signature, PROTOCOL_VERSION])


def test_a_record_comes_out_as_it_was_sealed() -> None:
    direct, relayed = f"/ip4/1.2.3.4/tcp/5/p2p/{ME.peer_id}", f"/ip4/1.2.3.4/tcp/6/p2p/{OTHER.peer_id}"
    addresses = (direct, f"{relayed}/p2p-circuit/p2p/{ME.peer_id}", "/ip4/1.2.3.4/tcp/5")
    full = record(
        addresses=addresses, speed=1.5, load=0.25, movable=False, state_bytes=10**9, bandwidth_bps=1e8,
        max_inflight=7, device="cuda:0", since=1.7e9,
    )  # fmt: skip
    assert all(getattr(full, name) != getattr(record(), name) for name in ("device", "since", "movable"))
    sealed = signed_records.seal_record(full, EXPIRES, ME, level=2)
    assert signed_records.open_record(sealed, ME.peer_id, EXPIRES) == signed_records.Announced(
        full, 2, EXPIRES
    )
    assert sealed == signed_records.seal_record(full, EXPIRES, ME, level=2)


def test_a_usual_record_takes_a_quarter_of_a_kilobyte() -> None:
    usual = record(
        addresses=(f"/ip4/203.0.113.7/tcp/31337/p2p/{ME.peer_id}",), speed=1.2345, load=2.5, since=1.7e9,
        state_bytes=10**9, bandwidth_bps=1e8, max_inflight=8, device="cuda:0 NVIDIA A100",
    )  # fmt: skip
    assert len(signed_records.seal_record(usual, EXPIRES, ME)) <= 256


def test_a_record_lies_under_its_own_shard_and_perhaps_under_those_above() -> None:
    keys = signed_records.record_keys(record(), 2)
    assert keys == [signed_records.peers_key("r" * 32, shard) for shard in homes(ME.peer_id, 1, 2)]
    assert keys[0].startswith("r" * 32 + ".peers.1.2.")
    assert signed_records.record_keys(record(), 0) == ["r" * 32 + ".peers.1.0.0"]


@pytest.mark.parametrize("state", ["keeping", "feeding", "left"])
def test_a_keeper_has_no_stage(state: str) -> None:
    kept = record(stage=NO_STAGE, state=state)
    opened = signed_records.open_record(signed_records.seal_record(kept, EXPIRES, ME), ME.peer_id, EXPIRES)
    assert opened.record == kept


def test_a_record_of_a_later_version_with_more_fields_is_read() -> None:
    fields = [*msgspec.msgpack.decode(signed_records._pack(record(), 0)), "blue"]
    later = signed(msgspec.msgpack.encode(fields))
    assert signed_records.open_record(later, ME.peer_id, EXPIRES).record == record()


def test_a_record_of_another_version_of_the_protocol_is_refused_whatever_is_in_it() -> None:
    later = PROTOCOL_VERSION + 1
    for fields, spoken in (((b"new", EXPIRES, bytes(64), later), later), ((b"old", EXPIRES, bytes(64)), 0)):
        with pytest.raises(Refused) as refusal:
            signed_records.open_record(msgspec.msgpack.encode(fields), ME.peer_id, EXPIRES)
        assert refusal.value.text == (
            f"the peer of a record speaks version {spoken} of the swarm's protocol, "
            f"this one version {PROTOCOL_VERSION}: update the older program"
        )


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "a malformed record"),
        (b"\x91" * 1000, "a malformed record"),
        (bytes(2000), "a record of 2000 bytes; at most 1096 are allowed"),
        (signed(b"\xc0"), "a malformed record"),
        (signed(msgspec.msgpack.encode({"run": 5})), "a malformed record"),
        (signed(record(run="x" * 1000)), "a malformed record|a record of"),
        (signed(record(), level=4), "a malformed record: Expected `int` <= 3"),
        (signed(record(), level=-1), "a malformed record: Expected `int` >= 0"),
        (signed(record(), by=OTHER), "a wrong signature"),
        (signed(record(), run="q" * 32), "a wrong signature"),
        (signed(record(), expires=EXPIRES + 60), "stored for another time than it was signed for"),
        (signed(record(), expires=float("nan")), "stored for another time"),
        (signed(record(stage=-1)), "an impossible record: stage -1, state serving"),
        (signed(record(state="keeping")), "an impossible record: stage 1, state keeping"),
        (signed(record(state="feeding")), "an impossible record: stage 1, state feeding"),
        (signed(record(version=1 << 60)), "a malformed record: Expected `int` <"),
        (signed(record(speed=float("inf"))), "an impossible record: speed inf"),
        (signed(record(since=float("nan"))), "an impossible record: speed 0.0, since nan"),
        (signed(record(max_inflight=-3)), "a malformed record: Expected `int` >= 0"),
        (signed(record(addresses=("a",) * 17)), "a malformed record: Expected `array` of length <= 16"),
    ],
)
def test_a_wrong_record_is_refused_by_name(data: bytes, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        signed_records.open_record(data, ME.peer_id, EXPIRES)


@given(st.integers(0, 10_000), st.integers(0, 7))
def test_no_bit_of_a_record_can_be_changed(where: int, bit: int) -> None:
    data = bytearray(signed_records.seal_record(record(), EXPIRES, ME))
    data[where % len(data)] ^= 1 << bit
    with pytest.raises(Refused):
        signed_records.open_record(bytes(data), ME.peer_id, EXPIRES)


@given(st.binary(max_size=300))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(Refused):
        signed_records.open_record(data, ME.peer_id, EXPIRES)
    with pytest.raises(Refused):
        signed_records.open_manifest(data, "")


def test_our_own_records_are_held_to_the_limits() -> None:
    with pytest.raises(ValueError, match="a peer can only announce itself"):
        signed_records.seal_record(record(), EXPIRES, OTHER)
    with pytest.raises(ValueError, match=r"a record of 1[0-9]{3} bytes; at most 1000 are allowed"):
        signed_records.seal_record(record(device="x" * 1000), EXPIRES, ME)


def owned(by: Identity = ME) -> Run:
    run = example_run()
    return dataclasses.replace(run, admission=dataclasses.replace(run.admission, owner=by.peer_id))


def test_a_manifest_proves_itself_by_its_hash() -> None:
    run = example_run()
    owner, value = signed_records.seal_manifest(run, None)
    assert owner == ""
    assert signed_records.open_manifest(value, "") == (run.id, run.to_toml())


def test_an_owned_manifest_carries_its_owners_signature_to_any_node() -> None:
    run = owned()
    owner, value = signed_records.seal_manifest(run, ME)
    assert owner == ME.peer_id
    assert signed_records.open_manifest(value, ME.peer_id) == (run.id, run.to_toml())


def packed(text: str | bytes, signature: bytes = b"") -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return msgspec.msgpack.encode([zlib.compress(raw), signature])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: packed(b"\0" * 20_000_000), "a manifest of more than 16384 bytes|a manifest of "),
        (lambda: msgspec.msgpack.encode([zlib.compress(b"x" * 100)[:-5], b""]), "a manifest of more than"),
        (lambda: msgspec.msgpack.encode([b"not compressed", b""]), "a malformed manifest"),
        (lambda: packed(b"\xff\xfe"), "a malformed manifest"),
        (lambda: bytes(30_000), "a manifest of 30000 bytes; at most 16640 are allowed"),
    ],
)
def test_a_wrong_manifest_is_refused_by_name(make: Callable[[], bytes], reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        signed_records.open_manifest(make(), "")


def test_an_owned_manifest_needs_the_signature_of_that_owner_for_that_run() -> None:
    run = owned()
    for signature in (b"", OTHER.sign(signed_records._manifest_to_sign(run.id)), ME.sign(b"something else")):
        with pytest.raises(Refused, match="a manifest without its owner's signature"):
            signed_records.open_manifest(packed(run.to_toml(), signature), ME.peer_id)
    with pytest.raises(Refused, match="stored for another owner than it names"):
        signed_records.open_manifest(packed(run.to_toml(), OTHER.sign(b"")), OTHER.peer_id)
    with pytest.raises(SetupError, match=r"names .* as its owner .*: only it can publish it"):
        signed_records.seal_manifest(run, OTHER)


def test_opening_a_record_is_cheap() -> None:
    sealed = signed_records.seal_record(record(), EXPIRES, ME)
    before = time.process_time()
    for _ in range(100):
        signed_records.open_record(sealed, ME.peer_id, EXPIRES)
    assert time.process_time() - before < 0.5  # 0.1 ms each, measured; the bound is for slow machines
