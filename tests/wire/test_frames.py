"""Frames: what goes in comes out, and nothing that is wrong gets in."""

from __future__ import annotations

import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.events import JoinLine, Note, to_text
from swarm.errors import BadAnswer, Busy, Leaving, NotNow, NotReady, Refused, from_wire
from swarm.wire import frames
from swarm.wire.frames import FrameError, Kind
from swarm.wire.version import PROTOCOL_VERSION


def split(frame: bytes) -> tuple[frames.Prefix, bytes]:
    prefix = frames.unpack_prefix(frame)
    header = frame[frames.PREFIX_BYTES :]
    assert prefix.header_bytes == len(header)
    return prefix, header


@given(
    call=st.integers(1, 2**32 - 1),
    method=st.text("abc.-_/é", min_size=1, max_size=30),
    header=st.binary(max_size=200),
    sizes=st.lists(st.integers(0, frames.MAX_BODY_BYTES), max_size=20),
)
def test_a_call_comes_out_as_it_went_in(call: int, method: str, header: bytes, sizes: list[int]) -> None:
    prefix, packed = split(frames.pack_call(call, method, header, sizes))
    assert prefix[:2] == (Kind.CALL, call)
    assert frames.unpack_call(packed) == frames.CallHeader(method, header, tuple(sizes))


def test_the_largest_call_and_result_fit_into_the_limit_of_a_frame() -> None:
    header, sizes = bytes(frames.MAX_HEADER_BYTES), [frames.MAX_BODY_BYTES] * frames.MAX_BUFFERS
    split(frames.pack_call(1, "m" * frames.MAX_METHOD_BYTES, header, sizes))
    prefix, packed = split(frames.pack_result(1, header, sizes))
    assert prefix.kind is Kind.RESULT
    assert frames.unpack_result(packed).header == header


def test_an_error_keeps_its_numbers() -> None:
    prefix, packed = split(frames.pack_error(7, NotReady("at 3", version=3, retry_after_s=0.5).to_wire()))
    error = from_wire("peer", frames.unpack_error(packed))
    assert prefix == (Kind.ERROR, 7, len(packed), 0)
    assert isinstance(error, NotReady)
    assert (error.version, error.retry_after_s) == (3, 0.5)


@pytest.mark.parametrize("kind", [NotNow, Busy, Leaving])
def test_a_peer_that_cannot_now_is_not_taken_for_a_faulty_one(kind: type[NotNow]) -> None:
    _, packed = split(frames.pack_error(7, kind("later", retry_after_s=1.5).to_wire()))
    error = from_wire("peer", frames.unpack_error(packed))
    assert type(error) is kind and error.retry_after_s == 1.5


def test_what_a_stranger_answers_looks_like_no_line_of_our_log() -> None:
    answer = {"code": "refused", "text": "no\n12:00:00  error: the disk is full\r\x1b[2J"}
    _, packed = split(frames.pack_error(7, answer))
    error = from_wire("peer", frames.unpack_error(packed))
    assert error.text == "no 12:00:00  error: the disk is full??[2J"
    assert len(to_text(Note(text=f"stage 0: {error.text}")).splitlines()) == 1
    quoted = "b.0 came as 'x\n12:00:00  error: GPU lost'"
    assert BadAnswer("peer", quoted).text == f"peer peer: {quoted}".replace("\n", " ")
    assert Refused(quoted).text == quoted.replace("\n", " ")
    assert len(to_text(JoinLine(line="swarm peer")).splitlines()) == 2, "our own keep theirs"


@given(
    part=st.binary(min_size=1, max_size=300) | st.binary(min_size=1, max_size=9).map(lambda few: few * 29_127)
)
def test_a_part_of_a_body_comes_out_as_it_was_packed(part: bytes) -> None:
    part = part[: frames.MAX_PACKED_BYTES]
    packed = frames.pack_part(memoryview(part))
    if len(packed) < len(part):
        assert frames.unpack_part(packed) == part


def _deflated(part: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(part) + packer.flush()


@pytest.mark.parametrize(
    ("packed", "text"),
    [
        (b"", "PACKED with 0 bytes for a part of 0, or of several"),
        (b"\xff\xff", "PACKED with a malformed part: Error -3"),
        (frames.pack_part(memoryview(bytes(1000)))[:-9], "for a part of"),
        (frames.pack_part(memoryview(bytes(1000))) + b"more", "for a part of 1000, or of several"),
        (frames.pack_part(memoryview(bytes(frames.MAX_PACKED_BYTES + 1))), "for a part of 65537"),
        (_deflated(bytes(200_000)), "bytes for a part of 1"),  # what repeats is not sent again: a bomb
        (frames.pack_part(memoryview(bytes(range(256)))), "for a part of 256, or of several"),
    ],
)
def test_no_packed_part_is_larger_than_one_or_than_what_it_unpacks_to(packed: bytes, text: str) -> None:
    with pytest.raises(FrameError, match=text):
        frames.unpack_part(packed)


def test_an_error_too_large_to_send_keeps_its_code() -> None:
    _, packed = split(frames.pack_error(1, Busy("full").to_wire() | {"more": "x" * 5000}))
    assert frames.unpack_error(packed) == {"code": "busy", "text": "(too long to send)"}


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (b"GET / HTTP/1.1\r\n", r"not a frame: it starts with b'GET '"),
        (
            frames.pack_prefix(Kind.ABORT, 1, version=200),
            "it speaks version 200 of the swarm's protocol, this program version "
            f"{PROTOCOL_VERSION}: update the older program",
        ),
        (bytes((0x53, 0x57, 99, PROTOCOL_VERSION)) + bytes(12), "unknown kind of frame: 99"),
        (frames.pack_prefix(Kind.CALL, 1, 1 << 31), "CALL with a header of 2147483648 bytes; 1 to "),
        (frames.pack_prefix(Kind.CALL, 1, 0), "CALL with a header of 0 bytes"),
        (frames.pack_prefix(Kind.CALL, 1, 5, 1), "CALL with 1 bytes of body; at most 0"),
        (frames.pack_prefix(Kind.BODY, 1, 0, frames.CHUNK_BYTES + 1), "BODY with 262145 bytes of body"),
        (frames.pack_prefix(Kind.BODY, 1, 0, 0), "BODY with 0 bytes of body"),
        (frames.pack_prefix(Kind.ERROR, 1, 5000), "ERROR with a header of 5000 bytes"),
        (frames.pack_prefix(Kind.ALIVE, 1, 4 * frames.MAX_PENDING + 4), "ALIVE with a header of 1028 bytes"),
        (frames.pack_prefix(Kind.PACKED, 1, frames.MAX_PACKED_BYTES), "PACKED with a header of 65536 bytes"),
        (frames.pack_prefix(Kind.ABORT, 0), "ABORT for call 0; calls count from 1"),
    ],
)
def test_a_wrong_prefix_is_refused_by_name(frame: bytes, text: str) -> None:
    with pytest.raises(FrameError, match=text):
        frames.unpack_prefix(frame)


_BOMB = b"\x91" * 60_000


@pytest.mark.parametrize(
    "packed",
    [
        b"\xff\xff",
        b"",
        _BOMB,
        msgspec.msgpack.encode(["", b"", []]),
        msgspec.msgpack.encode(["m" * 65, b"", []]),
        msgspec.msgpack.encode(["m", bytes(frames.MAX_HEADER_BYTES + 1), []]),
        msgspec.msgpack.encode(["m", b"", [-1]]),
        msgspec.msgpack.encode(["m", b"", [frames.MAX_BODY_BYTES + 1]]),
        msgspec.msgpack.encode(["m", b"", [0] * (frames.MAX_BUFFERS + 1)]),
        msgspec.msgpack.encode(["m", b"", [], 1]),
        msgspec.msgpack.encode({"method": "m"}),
        b"\xdd\xff\xff\xff\xff",  # an array of 4 billion
    ],
)
def test_a_malformed_header_is_refused_by_name(packed: bytes) -> None:
    with pytest.raises(FrameError, match="CALL with a malformed header: "):
        frames.unpack_call(packed)
    with pytest.raises(FrameError, match="RESULT with a malformed header: "):
        frames.unpack_result(packed)
    with pytest.raises(FrameError, match="ERROR with a malformed header: "):
        frames.unpack_error(packed if packed[:1] != b"\x81" else b"\xc1")


def test_what_we_send_ourselves_is_held_to_the_limits() -> None:
    with pytest.raises(ValueError, match="a header of 65537 bytes; at most 65536 are allowed"):
        frames.pack_call(1, "m", bytes(frames.MAX_HEADER_BYTES + 1), [])
    with pytest.raises(ValueError, match="1025 buffers; at most 1024 are allowed"):
        frames.pack_result(1, b"", [0] * (frames.MAX_BUFFERS + 1))
    with pytest.raises(ValueError, match="a method's name has 1 to 64 bytes: ''"):
        frames.pack_call(1, "", b"", [])


@given(st.binary(min_size=16, max_size=64))
def test_any_bytes_are_a_bounded_prefix_or_refused(data: bytes) -> None:
    try:
        prefix = frames.unpack_prefix(data)
    except FrameError:
        return
    assert prefix.header_bytes <= frames.MAX_FRAME_HEADER_BYTES
    assert prefix.body_bytes <= frames.CHUNK_BYTES


@given(st.binary(max_size=200))
def test_any_header_is_understood_or_refused(data: bytes) -> None:
    for unpack in (frames.unpack_call, frames.unpack_result, frames.unpack_error):
        try:
            unpack(data)
        except FrameError:
            continue
