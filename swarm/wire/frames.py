"""Frames of a stream between two peers: bytes <-> objects, nothing else.

A frame is a prefix of 16 bytes, a header and a body, each of stated and bounded length:

    prefix = magic (2) | kind (1) | version (1) | call (4) | header bytes (4) | body bytes (4)

The version is that of the protocol. A caller of another one is told so with an ERROR of its own version.

One stream carries the calls of one caller to one callee. Call ids count up from 1.

    caller to callee                       callee to caller
    CALL    what is called, body sizes     ACCEPT  send all of the body
    BODY    the next part of the body      RESULT  the answer's header and body sizes
    PACKED  the same in fewer bytes        BODY    the next part of the answer's body
    ABORT   the caller gave the call up    PACKED  the same in fewer bytes
                                           ERROR   the answer is an error
                                           ALIVE   calls are being worked on
    both: PING, and PONG at once: how long what is sent now waits on the way

At most `WINDOW_BYTES` of a body may be sent before ACCEPT, and `AHEAD_BYTES` beyond that of all bodies of a
stream. Bodies go in parts of at most `CHUNK_BYTES`, so that a heartbeat never waits behind more than a few
of them. A PACKED part is in Huffman's code, of bytes that are not all as frequent: what a codec left in
numbers of 8 bits takes a tenth less, bfloat16 a fifth. It unpacks to what was sent, so no result changes.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from swarm.errors import MALFORMED
from swarm.wire.version import PROTOCOL_VERSION, differ

MAGIC = 0x5357
PREFIX_BYTES = 16
CHUNK_BYTES = 256 * 1024
"""0.2 s at 10 Mbit/s; larger parts gain nothing on loopback, where a prefix costs 1 us."""
MAX_PACKED_BYTES = 64 * 1024
"""Of a part before it is packed. It is held until all of it is here; larger ones save no more."""
WINDOW_BYTES = 1024 * 1024
"""Bytes that a stranger can make us hold for a call that was not accepted. Less stalls a fast long line."""
AHEAD_BYTES = 4 * WINDOW_BYTES
"""So boundary tensors of some MB do not wait for ACCEPT, at each stage, for as long as the line is."""
MAX_HEADER_BYTES = 64 * 1024
"""Size of a method's header at most. The largest, a manifest, has 16 kB."""
MAX_BUFFERS = 1024
MAX_METHOD_BYTES = 64
MAX_PENDING = 256
"""Calls of one caller that may be unanswered at a time; 1 kB of ids in a heartbeat."""
MAX_FRAME_HEADER_BYTES = MAX_HEADER_BYTES + 9 * MAX_BUFFERS + MAX_METHOD_BYTES + 64
"""A call's header, at most 9 msgpack bytes for each size, the method, and what msgpack adds."""
MAX_ERROR_BYTES = 4096
MAX_BODY_BYTES = 1 << 40

_PREFIX = struct.Struct(">HBBIII")
T = TypeVar("T")


class FrameError(ValueError):
    """These bytes break the protocol; the text says how."""


class OtherVersionError(FrameError):
    """A frame of another version of the protocol."""

    def __init__(self, version: int, call: int) -> None:
        super().__init__(differ("it", version, "this program", PROTOCOL_VERSION))
        self.version, self.call = version, call


class Kind(enum.IntEnum):
    CALL = 1
    BODY = 2
    ABORT = 3
    ACCEPT = 4
    RESULT = 5
    ERROR = 6
    ALIVE = 7
    PING = 8
    PONG = 9
    PACKED = 10


class Prefix(NamedTuple):
    """What a frame is, and how many bytes follow."""

    kind: Kind
    call: int
    header_bytes: int
    body_bytes: int


_MAX_HEADER_BYTES = {
    Kind.CALL: MAX_FRAME_HEADER_BYTES,
    Kind.RESULT: MAX_FRAME_HEADER_BYTES,
    Kind.ERROR: MAX_ERROR_BYTES,
    Kind.PACKED: MAX_PACKED_BYTES - 1,
}
"""Of those kinds that have a header. Only a BODY has a body, and neither is empty."""


def pack_prefix(
    kind: Kind, call: int, header_bytes: int = 0, body_bytes: int = 0, version: int = PROTOCOL_VERSION
) -> bytes:
    """The 16 bytes of a prefix."""
    return _PREFIX.pack(MAGIC, kind, version, call, header_bytes, body_bytes)


def unpack_prefix(data: bytes | bytearray | memoryview) -> Prefix:
    """The prefix that some bytes begin with, checked.

    Raises:
        OtherVersionError: a frame of another version of the protocol.
        FrameError: not a frame of ours, an unknown kind, or a length over its limit.
    """
    magic, kind_number, version, call, header_bytes, body_bytes = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise FrameError(f"not a frame: it starts with {bytes(data[:4])!r}")
    if version != PROTOCOL_VERSION:
        raise OtherVersionError(version, call)
    try:
        kind = Kind(kind_number)
    except ValueError:
        raise FrameError(f"unknown kind of frame: {kind_number}") from None
    most = _MAX_HEADER_BYTES.get(kind, 0)
    if not min(1, most) <= header_bytes <= most:
        raise FrameError(
            f"{kind.name} with a header of {header_bytes} bytes; {min(1, most)} to {most} are allowed"
        )
    most = CHUNK_BYTES if kind is Kind.BODY else 0
    if not min(1, most) <= body_bytes <= most:
        raise FrameError(f"{kind.name} with {body_bytes} bytes of body; at most {most} are allowed")
    if call == 0 and kind not in (Kind.ALIVE, Kind.PING, Kind.PONG):
        raise FrameError(f"{kind.name} for call 0; calls count from 1")
    return Prefix(kind, call, header_bytes, body_bytes)


_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_BODY_BYTES)]
_Sizes = Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_BUFFERS)]


class CallHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    method: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_METHOD_BYTES)]
    header: Annotated[bytes, msgspec.Meta(max_length=MAX_HEADER_BYTES)]
    body_sizes: _Sizes = ()
    """Bytes of each buffer, in the order in which they follow."""


class ResultHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    header: Annotated[bytes, msgspec.Meta(max_length=MAX_HEADER_BYTES)]
    body_sizes: _Sizes = ()


_encoder = msgspec.msgpack.Encoder()


def _unpacked(kind: Kind, decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview) -> T:
    try:
        return decoder.decode(data)
    except MALFORMED as error:
        raise FrameError(f"{kind.name} with a malformed header: {error}") from None


# The header of each, or of an ERROR its fields, for `errors.from_wire`; FrameError if it is none.
unpack_call = partial(_unpacked, Kind.CALL, msgspec.msgpack.Decoder(CallHeader))
unpack_result = partial(_unpacked, Kind.RESULT, msgspec.msgpack.Decoder(ResultHeader))
unpack_error = partial(_unpacked, Kind.ERROR, msgspec.msgpack.Decoder(dict[str, str | int | float]))


def _check_outgoing(header: bytes, body_sizes: Sequence[int]) -> None:
    # What this process sends itself: a violation is a bug of the caller.
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(header)} bytes; at most {MAX_HEADER_BYTES} are allowed")
    if len(body_sizes) > MAX_BUFFERS:
        raise ValueError(f"{len(body_sizes)} buffers; at most {MAX_BUFFERS} are allowed")


def pack_part(part: memoryview) -> bytes:
    """At most `MAX_PACKED_BYTES` of a body in Huffman's code, which may be more. 90 MB a CPU-s, 140 back.

    To look for what repeats takes 2.4 to 10 times as long, and finds nothing in what codecs leave.
    """
    packer = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    return packer.compress(part) + packer.flush()


def unpack_part(packed: bytes) -> bytes:
    """The part of a body that a PACKED frame carries: more bytes than that has, at most `MAX_PACKED_BYTES`.

    Raises:
        FrameError: it carries another size, more than that, or nothing that was packed.
    """
    most = min(MAX_PACKED_BYTES, 8 * len(packed))  # in Huffman's code a byte takes a bit at least
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        part = unpacker.decompress(packed, most + 1)
    except zlib.error as error:
        raise FrameError(f"PACKED with a malformed part: {error}") from None
    if not unpacker.eof or unpacker.unused_data or not len(packed) < len(part) <= most:
        raise FrameError(f"PACKED with {len(packed)} bytes for a part of {len(part)}, or of several")
    return part


def pack_call(call: int, method: str, header: bytes, body_sizes: Sequence[int]) -> bytes:
    """A whole CALL frame.

    Raises:
        ValueError: the header, the method or the number of buffers is over its limit.
    """
    _check_outgoing(header, body_sizes)
    if not 0 < len(method.encode()) <= MAX_METHOD_BYTES:
        raise ValueError(f"a method's name has 1 to {MAX_METHOD_BYTES} bytes: {method[:80]!r}")
    packed = _encoder.encode(CallHeader(method, bytes(header), tuple(body_sizes)))
    return pack_prefix(Kind.CALL, call, len(packed)) + packed


def pack_result(call: int, header: bytes, body_sizes: Sequence[int]) -> bytes:
    """A whole RESULT frame. Raises ValueError as `pack_call` does."""
    _check_outgoing(header, body_sizes)
    packed = _encoder.encode(ResultHeader(bytes(header), tuple(body_sizes)))
    return pack_prefix(Kind.RESULT, call, len(packed)) + packed


def pack_error(call: int, fields: dict[str, str | int | float], version: int = PROTOCOL_VERSION) -> bytes:
    """A whole ERROR frame, from `SwarmError.to_wire()`. An error too large to send loses its text."""
    packed = _encoder.encode(fields)
    if len(packed) > MAX_ERROR_BYTES:
        packed = _encoder.encode({"code": str(fields.get("code"))[:40], "text": "(too long to send)"})
    return pack_prefix(Kind.ERROR, call, len(packed), version=version) + packed
