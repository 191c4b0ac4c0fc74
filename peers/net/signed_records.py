"""What we keep in the DHT: a peer's record signed by that peer, and a run's manifest that proves itself.

A record lies under keys of its run and stage (`lookup.py`), subkey peer id. Its signature covers run,
expiration and record, so no stranger can move it, prolong it, or speak for another peer. It is packed without
names of fields and without what the subkey says: 220 bytes are usual. A manifest lies at `{run}.manifest`;
its hash is the run's id, and if it names an owner, the subkey is the owner and the owner's signature is with
it.

Opening is for strangers' bytes: bounded, and refused with a reason.
"""

from __future__ import annotations

import math
import zlib
from typing import Annotated

import msgspec

from peers.net.identity import MAX_ADDRESSES, SIGNATURE_BYTES, Identity, Signature, verify
from peers.net.lookup import MAX_LEVEL, StageKey, homes
from peers.record_table import Announced
from swarm.errors import Refused, SetupError, decoded
from swarm.ids import PeerId, Stage
from swarm.manifest import MAX_CELLS, Run, id_of
from swarm.records import MAX_RECORD_BYTES, NO_STAGE, PeerRecord, State, Voucher
from swarm.wire.version import PROTOCOL_VERSION, differ

MAX_MANIFEST_BYTES = 16 * 1024
MAX_SIGNED_BYTES = MAX_RECORD_BYTES + SIGNATURE_BYTES + 32
MAX_PACKED_MANIFEST_BYTES = MAX_MANIFEST_BYTES + 256
MAX_LIFE_S = 600.0
"""Nothing may be stored for longer: what a stranger leaves behind goes away by itself."""


class _Packed(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A `PeerRecord` in the DHT. New fields come last, with defaults: readers ignore unknown ones."""

    run: str
    stage: Annotated[Stage, msgspec.Meta(ge=NO_STAGE, lt=MAX_CELLS)]
    level: Annotated[int, msgspec.Meta(ge=0, le=MAX_LEVEL)]
    state: State
    version: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 48)]
    speed: Annotated[float, msgspec.Meta(ge=0)]
    load: float
    movable: bool
    state_bytes: int
    bandwidth_bps: float
    max_inflight: Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
    device: str
    addresses: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_ADDRESSES)]
    """Without the peer's own id at the end: `/p2p/`."""
    since: float
    voucher: Voucher | None = None
    credential: Annotated[bytes, msgspec.Meta(max_length=256)] = b""
    spare: bool = False
    machine: Annotated[str, msgspec.Meta(max_length=16)] = ""


class _SignedRecord(msgspec.Struct, frozen=True, array_like=True):
    record: bytes
    expires: float
    signature: Signature
    protocol: int = 0
    """That the peer speaks. Outside of the record, which another version may not be able to read."""


class _SignedManifest(msgspec.Struct, frozen=True, array_like=True):
    compressed: bytes
    signature: Annotated[bytes, msgspec.Meta(max_length=SIGNATURE_BYTES)] = b""


_encoder = msgspec.msgpack.Encoder()
_packed_decoder = msgspec.msgpack.Decoder(_Packed)
_signed_decoder = msgspec.msgpack.Decoder(_SignedRecord)
_manifest_decoder = msgspec.msgpack.Decoder(_SignedManifest)


def peers_key(run_id: str, shard: StageKey) -> str:
    return f"{run_id}.peers.{shard.stage}.{shard.level}.{shard.number}"


def record_keys(record: PeerRecord, level: int) -> list[str]:
    """Where a record belongs whose peer is on `level`; the first is its own shard."""
    return [peers_key(record.run, shard) for shard in homes(record.peer, record.stage, level)]


def manifest_key(run_id: str) -> str:
    return f"{run_id}.manifest"


def _to_sign(run: str, expires: float, record: bytes) -> bytes:
    return _encoder.encode(("swarm record 2", run, expires, record))


def _pack(record: PeerRecord, level: int, credential: bytes = b"") -> bytes:
    fields = {name: getattr(record, name) for name in PeerRecord.__struct_fields__ if name != "peer"}
    end = f"/p2p/{record.peer}"
    fields["addresses"] = tuple(
        address[: -len(record.peer)] if address.endswith(end) else address for address in record.addresses
    )
    return _encoder.encode(_Packed(level=level, credential=credential, **fields))


def _unpack(packed: _Packed, peer: PeerId) -> PeerRecord:
    fields = {name: getattr(packed, name) for name in PeerRecord.__struct_fields__ if name != "peer"}
    fields["addresses"] = tuple(
        address + peer if address.endswith("/p2p/") else address for address in packed.addresses
    )
    return PeerRecord(peer=peer, **fields)


def seal_record(
    record: PeerRecord, expires: float, identity: Identity, *, level: int = 0, credential: bytes = b""
) -> bytes:
    """The signed record. `expires`: Unix time. `level`: how far its stage is spread, see `lookup.Scale`.

    Raises:
        ValueError: the record is not the identity's own, or too large.
    """
    if record.peer != identity.peer_id:
        raise ValueError("a peer can only announce itself")
    packed = _pack(record, level, credential)
    if len(packed) > MAX_RECORD_BYTES:
        raise ValueError(f"a record of {len(packed)} bytes; at most {MAX_RECORD_BYTES} are allowed")
    signature = identity.sign(_to_sign(record.run, expires, packed))
    return _encoder.encode(_SignedRecord(packed, expires, signature, PROTOCOL_VERSION))


def open_record(data: bytes, peer: PeerId, expires: float) -> Announced:
    """The record that `peer` signed and that the DHT stores until `expires` (Unix time).

    Raises:
        Refused: oversized, malformed, of impossible values, or not signed by `peer`.
    """
    signed = decoded(data, _signed_decoder.decode, "record", MAX_SIGNED_BYTES)
    if signed.protocol != PROTOCOL_VERSION:
        raise Refused(differ("the peer of a record", signed.protocol, "this one", PROTOCOL_VERSION))
    packed = decoded(signed.record, _packed_decoder.decode, "record", MAX_RECORD_BYTES)
    if signed.expires != expires:
        raise Refused("a record stored for another time than it was signed for")
    nowhere = packed.stage == NO_STAGE
    if packed.state != "left" and nowhere != (packed.state in ("keeping", "choosing", "feeding")):
        raise Refused(f"an impossible record: stage {packed.stage}, state {packed.state}")
    if not (math.isfinite(packed.speed) and math.isfinite(packed.since)):
        raise Refused(f"an impossible record: speed {packed.speed}, since {packed.since}")
    if not verify(peer, _to_sign(packed.run, signed.expires, signed.record), signed.signature):
        raise Refused("a record with a wrong signature")
    return Announced(_unpack(packed, peer), packed.level, expires, packed.credential)


def seal_manifest(run: Run, identity: Identity | None) -> tuple[PeerId, bytes]:
    """The subkey and the value to store.

    Raises:
        SetupError: the manifest names an owner, and `identity` is not that one.
    """
    owner, signature = run.admission.owner, b""
    if owner:
        if identity is None or identity.peer_id != owner:
            raise SetupError(
                f"the manifest names {owner} as its owner (admission.owner): only it can publish it, "
                "with its key as --identity"
            )
        signature = identity.sign(_manifest_to_sign(run.id))
    return owner, _encoder.encode(_SignedManifest(zlib.compress(run.to_toml().encode(), 9), signature))


def _manifest_to_sign(run_id: str) -> bytes:
    return _encoder.encode(("swarm manifest 1", run_id))


def open_manifest(data: bytes, owner: PeerId) -> tuple[str, str]:
    """(run id, text) of a manifest stored under subkey `owner`, which is the canonical one of that id or
    none at all. It is not parsed: that takes up to a second, and the asker of an id knows what is worth it.

    Raises:
        Refused: oversized, malformed, or not signed by an owner that it names.
    """
    signed = decoded(data, _manifest_decoder.decode, "manifest", MAX_PACKED_MANIFEST_BYTES)
    try:
        unpacker = zlib.decompressobj()
        raw = unpacker.decompress(signed.compressed, MAX_MANIFEST_BYTES + 1)
        if len(raw) > MAX_MANIFEST_BYTES or not unpacker.eof:
            raise Refused(f"a manifest of more than {MAX_MANIFEST_BYTES} bytes")
        text = raw.decode()
    except (UnicodeDecodeError, zlib.error) as error:
        raise Refused(f"a malformed manifest: {error}") from None
    run_id = id_of(text)
    if owner and f'owner = "{owner}"' not in text:
        raise Refused("a manifest stored for another owner than it names")
    if owner and not verify(owner, _manifest_to_sign(run_id), signed.signature):
        raise Refused("a manifest without its owner's signature")
    return run_id, text
