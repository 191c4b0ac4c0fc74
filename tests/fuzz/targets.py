"""Decoders of strangers' bytes, each with what must be true of it whatever the bytes are.

A target takes any bytes and returns, or fails: another error than the documented one escapes, a roundtrip
differs, or something impossible is accepted. `seeds` are honest inputs to begin with. The tests mutate them
plainly (`test_fuzz.py`), `scripts/bench/fuzz.py` with libFuzzer, guided by coverage.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import hashlib
import itertools
import json
import math
import os
import random
import struct
import tempfile
import zlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import torch

from peers.clock import unix_s
from peers.net import dht_protocol, identity, p2pd_control
from peers.net._hivemind import p2pd_pb2
from peers.net.bandwidth import Traffic
from peers.net.body_buffers import flat
from peers.net.charter import signed
from peers.net.connection import ClientConnection, Connection, ServedCall, ServerConnection
from peers.net.direct.handshake import AskDirect, Asking, GrantDirect, grant
from peers.net.direct.records import KEY_BYTES, Opener, Sealer
from peers.net.identity import Identity
from peers.net.p2pd_control import ControlError, DaemonControl
from peers.net.signed_records import (
    _manifest_to_sign,
    _pack,
    _to_sign,
    open_manifest,
    open_record,
    seal_manifest,
    seal_record,
)
from peers.storage import model_file, safetensors_file
from peers.storage.checkpoint import Checkpoint
from peers.system import private_folder
from peers.watch import history
from swarm import charter
from swarm.errors import PeerFault, Refused, SetupError, SwarmError, from_wire
from swarm.ids import Generation
from swarm.manifest import Run, audit_run, check_id, parse_run
from swarm.monitoring import validation
from swarm.monitoring.health import Observation
from swarm.protocol import messages as protocol_messages
from swarm.protocol.ledger import MAX_MICROBATCHES, Bitmap
from swarm.protocol.messages import (
    Directive,
    ReplicaReport,
    RunStatus,
    StageSummary,
    StepDirective,
    check_report,
    check_summary,
)
from swarm.protocol.rounds import Commit, Plan, Prepared, StepReport
from swarm.records import PeerRecord
from swarm.wire import frames, tensor_meta, whole_numbers
from swarm.wire import messages as wire_messages
from swarm.wire.codec import decode, encode
from swarm.wire.frames import FrameError, Kind
from swarm.wire.messages import PastStep, PeerStatus, Work, hear, pack, unpack
from swarm.wire.tensor_meta import TensorMeta
from swarm.wire.topk import pack_places, unpack_places
from swarm.wire.version import PROTOCOL_VERSION
from tests.example import example_run
from tests.sealed import put

# (protobuf's generated modules carry no types)


@dataclass(frozen=True)
class Target:
    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], Sequence[bytes]]
    spare_bytes: int = 1 << 20
    """Memory besides four times the input. A file is read by a megabyte at a time."""


TARGETS: dict[str, Target] = {}
RUN = example_run()
AUDIT = audit_run(stages=2, steps=4, microbatches_per_step=4)
ME = Identity(b"fuzz" * 8)
STRANGER = Identity(b"else" * 8)
SOON = 2e9
"""When what is signed here expires; Unix time."""
torch.set_num_threads(1)


def target(
    name: str, seeds: Callable[[], Sequence[bytes]], **more: Any
) -> Callable[[Callable[[bytes], None]], Callable[[bytes], None]]:
    def declared(run: Callable[[bytes], None]) -> Callable[[bytes], None]:
        TARGETS[name] = Target(name, run, seeds, **more)
        return run

    return declared


# --- frames -------------------------------------------------------------------------------------------------


def _packed(call: int, part: bytes) -> bytes:
    packed = frames.pack_part(memoryview(part))
    return frames.pack_prefix(Kind.PACKED, call, len(packed)) + packed


def _frames() -> list[bytes]:
    return [
        frames.pack_call(1, "work", b"header", [3, 0, 70000]),
        frames.pack_prefix(Kind.BODY, 1, 0, 3) + b"abc",
        _packed(1, bytes(100)),
        frames.pack_result(1, b"answer", [5]),
        frames.pack_error(1, {"code": "busy", "text": "no", "retry_after_s": 0.5}),
        frames.pack_prefix(Kind.ALIVE, 0),
        frames.pack_prefix(Kind.PING, 0),
        frames.pack_prefix(Kind.PONG, 0),
        frames.pack_prefix(Kind.ACCEPT, 1),
        frames.pack_prefix(Kind.ABORT, 1),
    ]


@target("frames", _frames)
def _(data: bytes) -> None:
    """A prefix, and a header of each kind."""
    with contextlib.suppress(FrameError):
        if len(data) >= frames.PREFIX_BYTES:
            prefix = frames.unpack_prefix(data)
            assert frames.pack_prefix(*prefix) == data[: frames.PREFIX_BYTES]
    for rest in (data, data[frames.PREFIX_BYTES :]):
        with contextlib.suppress(FrameError):
            assert len(rest) < len(frames.unpack_part(rest)) <= 8 * len(rest)
        with contextlib.suppress(FrameError):
            call = frames.unpack_call(rest)
            again = frames.pack_call(1, call.method, call.header, call.body_sizes)
            assert frames.unpack_call(again[frames.PREFIX_BYTES :]) == call
        with contextlib.suppress(FrameError):
            result = frames.unpack_result(rest)
            again = frames.pack_result(1, result.header, result.body_sizes)
            assert frames.unpack_result(again[frames.PREFIX_BYTES :]) == result
        with contextlib.suppress(FrameError):
            error = from_wire("peer", frames.unpack_error(rest))
            assert isinstance(error, SwarmError)
            frames.pack_error(1, error.to_wire())


class _Loop:
    """What a connection needs of an event loop, without one: time stands still, and nothing is called."""

    def time(self) -> float:
        return 1.0

    def call_later(self, *_: object) -> Any:
        return self

    call_soon = call_at = call_later

    def cancel(self) -> None: ...

    def get_debug(self) -> bool:
        return False

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=cast(asyncio.AbstractEventLoop, self))

    def call_exception_handler(self, _: object) -> None: ...


class _Line:
    """The transport below a connection: takes all."""

    def set_write_buffer_limits(self, **_: int) -> None: ...

    def write(self, _: object) -> None: ...

    def write_eof(self) -> None: ...

    def abort(self) -> None: ...

    resume_reading = pause_reading = abort


_LOOP = _Loop()


@contextlib.contextmanager
def _on_no_loop() -> Iterator[None]:
    before = asyncio._get_running_loop()
    asyncio._set_running_loop(cast(asyncio.AbstractEventLoop, _LOOP))
    try:
        yield
    finally:
        asyncio._set_running_loop(before)


def _feed(link: Connection, data: bytes) -> None:
    """Pieces of 1, 2, 4, … bytes, then all the rest; as the event loop does it."""
    at, piece = 0, 1
    while at < len(data) and not link.over and not link._resting:
        link.data_received(data[at : at + piece])
        at, piece = at + piece, min(piece * 2, 1 << 14)
    if link.over:
        assert isinstance(link.lost_because, PeerFault)


def _begun(waiting: Coroutine[Any, Any, Any]) -> None:
    """Run a coroutine up to where it waits."""
    with contextlib.suppress(StopIteration, SwarmError):
        waiting.send(None)
        _WAITING.append(waiting)


_WAITING: list[Coroutine[Any, Any, Any]] = []


def _end_all() -> None:
    for waiting in _WAITING:
        with contextlib.suppress(SwarmError, RuntimeError, asyncio.CancelledError):
            waiting.throw(asyncio.CancelledError())
    _WAITING.clear()


_INTRODUCTION = p2pd_control._delimited(
    p2pd_pb2.StreamInfo(peer=p2pd_control.peer_bytes(ME.peer_id), addr=b"", proto="/swarm/calls/1")
)


@target(
    "end-that-is-called",
    lambda: [
        b"".join(_frames()[:2]),
        frames.pack_call(1, "accept", b"", [2000, 0, 1])
        + frames.pack_prefix(Kind.BODY, 1, 0, 2001)
        + bytes(2001),
        frames.pack_call(1, "accept", b"", [2000]) + _packed(1, bytes(1500)) + _packed(1, b"ab" * 250),
        frames.pack_call(1, "wait", b"", [5])
        + frames.pack_prefix(Kind.BODY, 1, 0, 3)
        + b"abc"
        + frames.pack_prefix(Kind.ABORT, 1)
        + frames.pack_call(2, "answer", b"", []),
    ],
)
def _(data: bytes) -> None:
    """Handlers that accept, wait, answer at once, or refuse."""

    def called(link: ServerConnection, served: ServedCall) -> None:
        if sum(served.body_sizes) > 1 << 18 or served.method == "refuse":
            raise Refused("too large")  # as the transport does
        if served.method == "answer":
            link.answer(served, b"answer", [flat(b"body")])
        elif served.method != "wait":
            _begun(served.accept())

    with _on_no_loop():
        link = ServerConnection(lambda *_: (ME.peer_id, Traffic(most_peers=1).of(ME.peer_id)), called)
        link.connection_made(cast(asyncio.BaseTransport, _Line()))
        _feed(link, _INTRODUCTION + data)
        assert link.line.held_bytes <= 8 * len(data)
        assert len(link._calls) <= frames.MAX_PENDING
        link.connection_lost(None)
        assert not link._calls
        assert link.line.held_bytes == 0, "all is given back"
        _end_all()


@target(
    "end-that-calls",
    lambda: [
        frames.pack_prefix(Kind.ACCEPT, 1)
        + frames.pack_result(1, b"h", [3, 4])
        + frames.pack_prefix(Kind.BODY, 1, 0, 7)
        + b"7 bytes",
        frames.pack_result(1, b"h", [300, 44]) + _packed(1, bytes(344)),
        frames.pack_prefix(Kind.ALIVE, 0)
        + frames.pack_error(2, {"code": "busy", "text": "no"})
        + frames.pack_result(3, b"", []),
    ],
)
def _(data: bytes) -> None:
    """Three calls wait for an answer."""
    with _on_no_loop():
        link = ClientConnection("peer", b"request")
        link.connection_made(cast(asyncio.BaseTransport, _Line()))
        for size in (0, 10, 3 << 20):
            body = [memoryview(bytes(10))] * (size > 0) + [_LARGE] * (size > 10)
            _begun(link.call("method", b"header", body, 1 << 16))
        _feed(link, p2pd_control._delimited(p2pd_pb2.Response(type=p2pd_pb2.Response.OK)) + data)
        link.connection_lost(None)
        assert not link._calls
        _end_all()


_LARGE = memoryview(bytes(3 << 20))


# --- messages -----------------------------------------------------------------------------------------------


def message_kinds() -> list[type[msgspec.Struct]]:
    kinds = {
        kind.__name__: kind
        for module in (protocol_messages, wire_messages)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    }
    return [kinds[name] for name in sorted(kinds)]


KINDS = message_kinds()


def _of(kind: type, message: msgspec.Struct) -> bytes:
    return bytes([KINDS.index(kind)]) + pack(message)


def _messages() -> list[bytes]:
    step = StepReport(t=0, done=Bitmap(5), in_progress=Bitmap(2), prepared=Prepared("r", 1.0, "d"))
    plan = Plan("r", 0, ("a", "b"), (Bitmap(5), Bitmap(10)), (3, 4))
    filled: list[msgspec.Struct] = [
        Work(
            run="r", t=1, m=2, version=1, route=("a",), tensors=(TensorMeta((2, 3), "float32", "blockwise8"),)
        ),
        ReplicaReport(run="r", stage=0, version=1, steps=(step,), commits=(Commit(0, 1.0),)),
        Directive(
            run="r",
            stage=0,
            coordinator="a",
            version=1,
            generation=Generation(1, 2, 3, 4),
            steps=(StepDirective(t=1, plan=plan), StepDirective(t=2, retract=Bitmap(1 << 8000))),
            run_status=RunStatus(losses=((1, 2.5),)),
        ),
    ]
    seeds = [_of(type(message), message) for message in filled]
    for kind in KINDS:
        with contextlib.suppress(TypeError):
            seeds.append(_of(kind, _least(kind)))
    return seeds


def _least(kind: type[msgspec.Struct]) -> msgspec.Struct:
    """A message with all that has no default, each as small as it gets."""
    for values in ({}, {"run": "r"}):
        with contextlib.suppress(msgspec.ValidationError):
            needed = {
                field.name: _SMALL.get(field.name, 0)
                for field in msgspec.structs.fields(kind)
                if field.required
            }
            return kind(**{**needed, **values} if "run" in needed else needed)
    raise TypeError


_SMALL: dict[str, Any] = {
    "run": "r",
    "round": "r",
    "done": Bitmap(3),
    "overlap": Bitmap(0),
    "peer": "p",
    "lease": "l",
    "tensors": (),
    "state": "serving",
    "device": "cpu",
    "name": "w",
    "dtype": "float32",
    "coordinator": "c",
    "members": ("a",),
    "ledgers": (Bitmap(1),),
    "parts": (1,),
    "sources": ("a",),
    "ready": True,
    "versions": (1,),
    "digest": "d",
    "by_stage": (Bitmap(1),),
    "status": RunStatus(),
    "has": True,
    "shape": (2,),
    "codec": "none",
}


def _check_message(message: Any) -> None:
    packed = pack(message)
    assert pack(unpack(packed, type(message))) == packed
    with contextlib.suppress(Refused):
        if isinstance(message, ReplicaReport):
            check_report(message, AUDIT)
    with contextlib.suppress(Refused):
        if isinstance(message, StageSummary):
            check_summary(message, AUDIT)


@target("messages", _messages)
def _(data: bytes) -> None:
    """The first byte says the kind."""
    kind = KINDS[data[0] % len(KINDS)] if data else KINDS[0]
    try:
        message = unpack(data[1:], kind)
    except Refused:
        return
    _check_message(message)


@target("long messages", _messages, spare_bytes=3 << 20)
def _(data: bytes) -> None:
    kind = KINDS[data[0] % len(KINDS)] if data else KINDS[0]
    with contextlib.suppress(Refused):
        hear(b"", [memoryview(data[1:])], kind)


@target(
    "ledgers", lambda: [Bitmap(b).packed() for b in (0, 5, 1 << 8191, (1 << 8192) - 1, 0xF0F0F0F0 << 900)]
)
def _(data: bytes) -> None:
    try:
        bitmap = Bitmap.unpacked(data)
    except ValueError:
        return
    assert bitmap.bit_length() <= MAX_MICROBATCHES
    assert Bitmap.unpacked(bitmap.packed()) == bitmap
    assert len(bitmap.packed()) <= max(1, len(data)), "the shortest form is said"


# --- tensors ------------------------------------------------------------------------------------------------

_SHAPES = ((4, 64), (300,), (2, 3, 5), (0,), (1,), (2, 600))
_CODECS = ("none", "bf16", "blockwise8", "hadamard4", "topk:0.1", "topk:0.5+blockwise8", "topk:0.02+bf16")
_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)


def _tensors() -> list[bytes]:
    seeds = []
    torch.manual_seed(0)
    for kinds in itertools.product(range(len(_SHAPES)), range(len(_CODECS)), range(2)):
        shape, codec, dtype = _SHAPES[kinds[0]], _CODECS[kinds[1]], _TYPES[kinds[2]]
        _, buffers = encode(torch.randn(shape).to(dtype), codec)
        seeds.append(bytes(kinds) + b"".join(buffers))
    return seeds


@target("tensors", _tensors)
def _(data: bytes) -> None:
    """Three bytes say shape, codec and dtype; buffers of the right sizes follow."""
    if len(data) < 3:
        return
    shape, codec, dtype = _SHAPES[data[0] % 6], _CODECS[data[1] % len(_CODECS)], _TYPES[data[2] % 4]
    meta = TensorMeta(shape, str(dtype).removeprefix("torch."), codec)
    try:
        sizes = tensor_meta.encoded_sizes(meta)
        body = bytearray(data[3:].ljust(sum(sizes), b"\0"))
        buffers, at = [], 0
        for size in sizes:
            buffers.append(memoryview(body)[at : at + size])
            at += size
        tensor = decode(meta, buffers)
    except Refused:
        return
    assert tensor.shape == shape
    assert tensor.dtype == dtype
    assert bool(torch.isfinite(tensor).all())


def _sums() -> list[bytes]:
    widths = [torch.arange(600) << bits for bits in (0, 8, 16, 24, 32, 40, 50)]
    return [bytes([200]) + b"".join(whole_numbers.pack(values)) for values in widths]


@target("sums", _sums)
def _(data: bytes) -> None:
    """The first byte says how many numbers; the widths of their blocks and the numbers follow."""
    numel = 3 * data[0] if data else 0
    end = 1 + whole_numbers.most_bytes(numel)[0]
    try:
        values = whole_numbers.unpack([data[1:end], data[end:]], numel)
    except Refused:
        return
    packed = whole_numbers.pack(values)
    assert sum(map(len, packed)) <= len(data)
    assert torch.equal(whole_numbers.unpack(packed, numel), values)


@target(
    "tensor descriptions",
    lambda: [msgspec.msgpack.encode(TensorMeta((2, 300), "float32", codec)) for codec in _CODECS],
)
def _(data: bytes) -> None:
    try:
        meta = unpack(data, TensorMeta)
        sizes = tensor_meta.encoded_sizes(meta)
    except Refused:
        return
    assert all(0 <= size <= 2 * tensor_meta.MAX_TENSOR_BYTES for size in sizes)


@target(
    "places of a top-k",
    lambda: [bytes([n]) + pack_places(torch.arange(0, 40, 4 - n).numpy()[:10], 40) for n in range(3)],
)
def _(data: bytes) -> None:
    rows = 1 + (data[0] % 4 if data else 0)
    numel, keep = 600 * rows, (1 + len(data) % 60)
    layout = tensor_meta.index_layout(numel, rows * keep)
    packed = data[1:].ljust(layout.nbytes, b"\0")[: layout.nbytes]
    with contextlib.suppress(Refused):
        places = unpack_places(memoryview(packed), numel, rows, keep, name="it")
        assert len(places) == rows * keep
        assert pack_places(places, numel)[: layout.unary_bits // 8] == packed[: layout.unary_bits // 8]


# --- charters -----------------------------------------------------------------------------------------------


def _charter(**changes: Any) -> charter.Charter:
    fields = {"name": "demo", "run": RUN.id, "sequence": 3, "expires": int(SOON)}
    return charter.make(**(fields | changes))


def _charters() -> list[bytes]:
    full = _charter(
        peers=charter.AdmissionRule("token", (STRANGER.peer_id,)), bans=(charter.Ban(STRANGER.peer_id,
        "lies"),),
        founders=(ME.peer_id, STRANGER.peer_id), trusted_stages=(0, -1), work_bits=20,
        revocations=(STRANGER.peer_id,),
    )  # fmt: skip
    return [
        *(b"s" + charter.encode(one) for one in (_charter(), full)),
        b"r" + signed.seal_charter(full, ME),
        b"r" + signed.seal_revocation(RUN.id, ME),
    ]


@target("charters", _charters)
def _(data: bytes) -> None:
    """After `s`: a charter that its owner signed, be he a liar; else all as it came."""
    value = data[1:]
    if data[:1] == b"s":
        value = msgspec.msgpack.encode(("charter", value, ME.sign(signed._charter_to_sign(value))))
    try:
        opened = signed.open_statement(value, ME.peer_id)
    except Refused:
        return
    signed.key_of(opened, ME.peer_id)
    if isinstance(opened, charter.Charter):
        assert charter.decode(charter.encode(opened)) == opened
        terms = charter.AdmissionTerms(opened, ME.peer_id, stages=3)
        for role in charter.ROLES:
            who = charter.Applicant(STRANGER.peer_id, role, stage=1)
            assert charter.why_not_admitted(terms, who, charter.TokenUses(), now=SOON - 1).isprintable()


def _credentials() -> list[bytes]:
    token = signed.make_token(RUN.id, ME, "peer", expires=int(SOON), seed=b"k" * 32)
    _, certificate = signed.certify(token, RUN.id, STRANGER.peer_id)
    credentials = (signed.seal_credential(certificate), signed.seal_credential(None, 1 << 61))
    return [*(b"c" + one for one in credentials), b"t" + token.encode()]


@target("credentials", _credentials)
def _(data: bytes) -> None:
    """After `t`: a token, as a user pastes it; else what a caller shows."""
    if data[:1] == b"t":
        with contextlib.suppress(SetupError):
            role, certificate = signed.certify(data[1:].decode(errors="replace"), RUN.id, STRANGER.peer_id)
            assert role in charter.ROLES
            signed.seal_credential(certificate)
        return
    with contextlib.suppress(Refused):
        opened = signed.open_credential(data[1:], RUN.id, ME.peer_id, STRANGER.peer_id)
        assert 0 <= opened.stamp_bits <= 256


# --- records, manifests, questions --------------------------------------------------------------------------


def _record(**changes: Any) -> PeerRecord:
    fields: dict[str, Any] = {
        "peer": ME.peer_id,
        "run": RUN.id,
        "stage": 1,
        "state": "serving",
        "version": 7,
        "speed": 1.5,
        "addresses": (f"/ip4/192.0.2.1/tcp/5/p2p/{ME.peer_id}",),
        "since": 1e9,
    }
    return PeerRecord(**{**fields, **changes})


@target(
    "records",
    lambda: [
        b"s" + _pack(_record(), 3),
        b"s" + _pack(_record(stage=-1, state="keeping"), 0),
        b"r" + seal_record(_record(), SOON, ME),
    ],
)
def _(data: bytes) -> None:
    """After `s`: a record that its peer signed, as only a liar's own can be; else all as it came."""
    value = data[1:]
    if data[:1] == b"s":
        with contextlib.suppress(UnicodeDecodeError, msgspec.DecodeError, RecursionError):
            said = msgspec.msgpack.decode(value)
            run = said[0] if isinstance(said, list) and said and isinstance(said[0], str) else ""
            signature = ME.sign(_to_sign(run, SOON, value))
            value = msgspec.msgpack.encode([value, SOON, signature, PROTOCOL_VERSION])
    try:
        opened = open_record(value, ME.peer_id, SOON)
    except Refused:
        return
    assert opened.record.peer == ME.peer_id
    assert math.isfinite(opened.record.speed)
    tidy = validation.tidy(opened.record)
    assert tidy.device.isprintable()
    dht_protocol.record_ids(opened)


@target("manifests", lambda: [b"z" + RUN.to_toml().encode(), b"r" + seal_manifest(RUN, None)[1]])
def _(data: bytes) -> None:
    """After `z`: a text, packed as the directory has it; else all as it came."""
    value = data[1:]
    if data[:1] == b"z":
        with contextlib.suppress(UnicodeDecodeError):
            run = _parsed(value.decode())
            if run is not None:
                assert parse_run(run.to_toml()) == run
        value = msgspec.msgpack.encode([zlib.compress(value, 1), ME.sign(_manifest_to_sign(""))])
    with contextlib.suppress(Refused, SetupError):
        run_id, text = open_manifest(value, "")
        assert check_id(text, run_id).id == run_id


def _parsed(text: str) -> Run | None:
    try:
        return parse_run(text)
    except SetupError:
        return None


_HELD = [dht_protocol.Entry(f"peer {n}", bytes(200), SOON) for n in range(5)]


@target(
    "questions",
    lambda: [
        msgspec.msgpack.encode(
            dht_protocol.ask({bytes([n]) * 20: {f"peer {n}": SOON} for n in range(3)}, most, b"saltsalt")
        )
        for most in (0, 900)
    ],
)
def _(data: bytes) -> None:
    try:
        question = dht_protocol.read_request(data)
    except Refused:
        return
    if not isinstance(question, dht_protocol.Question):
        return
    said = msgspec.msgpack.encode(dht_protocol.answer(question, lambda key: _HELD))
    assert len(said) <= min(question.most_bytes, dht_protocol.MAX_ANSWER_BYTES) + 64 * (
        len(question.keys) + 1
    )
    assert len(dht_protocol._found_decoder.decode(said)) == len(question.keys)


class _Wire(DaemonControl):
    """A node's line: nobody is called."""

    def __init__(self) -> None: ...

    def call_peer(self, *_: object) -> Any:
        raise ControlError("nobody")

    def _say(self, call: bytes, **fields: Any) -> None:
        p2pd_pb2.PersistentConnectionRequest(callId=call, **fields).SerializeToString()


class _Tasks:
    """Begins nothing."""

    def create_task(self, waiting: Coroutine[Any, Any, Any]) -> Any:
        waiting.close()
        return self

    def add_done_callback(self, _: object) -> None: ...

    cancel = _Loop.cancel


def _node() -> dht_protocol.DhtNode:
    node = dht_protocol.DhtNode(ME.peer_id, dht_protocol.RecordCheck(), cast(Any, _Tasks()))
    node.control = _Wire()
    return node


def _node_messages() -> list[bytes]:
    record = _record()
    value, expires = seal_record(record, unix_s() + 300.0, ME), unix_s() + 300.0
    text, manifest = seal_manifest(RUN, None)
    keys = [dht_protocol.key_bytes(key) for key in dht_protocol.record_keys(record, 0)]
    manifest_key = dht_protocol.key_bytes(dht_protocol.manifest_key(RUN.id))
    values = [
        (keys[0], dht_protocol.Entry(record.peer, value, expires)),
        (manifest_key, dht_protocol.Entry(text, manifest, expires)),
    ]
    requests = [
        dht_protocol.Ping(joining=True), dht_protocol.Store(values), dht_protocol.Find(keys[:2]),
        dht_protocol.ask({keys[0]: {}}, 1000, b"saltsalt"),
    ]  # fmt: skip
    return [msgspec.msgpack.encode(request) for request in requests]


@target("calls to a node", _node_messages)
def _(data: bytes) -> None:
    """As p2pd passes them on. Nothing that is kept outlives its time."""
    node = _node()
    asked = node.answer(data, STRANGER.peer_id)
    with contextlib.suppress(Refused, StopIteration):
        asked.send(None)
    asked.close()
    for held in node._kept.values():
        for kept in held.values():
            assert kept.entry.expires <= dht_protocol.latest_expiry(unix_s()) + 1.0, (
                "it would be kept for ever"
            )


@target(
    "answers of a node",
    lambda: [
        msgspec.msgpack.encode([dht_protocol.FoundEntries(tuple(_HELD[:2]), 3)]),
        msgspec.msgpack.encode([[[], 0]] * 3),
    ],
)
def _(data: bytes) -> None:
    node = _node()
    for found in _decoded_answer(data):
        for entry in found.entries:
            node.check.open(bytes(20), entry)


def _decoded_answer(data: bytes) -> Sequence[dht_protocol.FoundEntries]:
    try:
        return dht_protocol._found_decoder.decode(data)
    except (ValueError, msgspec.MsgspecError, RecursionError):  # as `DhtNode.read`
        return ()


# --- p2pd ---------------------------------------------------------------------------------------------------


def _p2pd() -> list[bytes]:
    response = p2pd_pb2.Response(type=p2pd_pb2.Response.ERROR, error=p2pd_pb2.ErrorResponse(msg="no"))
    raw = p2pd_control.peer_bytes(ME.peer_id)
    asked = p2pd_pb2.PersistentConnectionResponse(
        callId=b"c" * 16, requestHandling=p2pd_pb2.CallUnaryRequest(peer=raw, proto="name", data=b"data")
    )
    answered = p2pd_pb2.PersistentConnectionResponse(
        callId=b"d" * 16, callUnaryResponse=p2pd_pb2.CallUnaryResponse(error=b"no")
    )
    return [
        response.SerializeToString(),
        p2pd_pb2.StreamInfo(peer=raw, addr=b"", proto="x").SerializeToString(),
        asked.SerializeToString(),
        answered.SerializeToString(),
    ]


@target("p2pd", _p2pd)
def _(data: bytes) -> None:
    """Answers, introductions of streams, and short calls."""
    with contextlib.suppress(ControlError):
        p2pd_control.check_response(data)
    with contextlib.suppress(FrameError):
        assert isinstance(p2pd_control.stream_peer(data), str)
    with _on_no_loop():
        control = _Wire()
        control._tasks, control._handler, control._handling = cast(Any, _Tasks()), None, {}
        waiting = _LOOP.create_future()
        control._pending = {b"d" * 16: waiting}
        message = p2pd_pb2.PersistentConnectionResponse()
        try:
            message.ParseFromString(data)
        except p2pd_control.DecodeError:
            return
        control._heard(message)
        if waiting.done() and waiting.exception() is not None:
            assert isinstance(waiting.exception(), ControlError)


@target("key files", lambda: [ME.to_file_bytes()])
def _(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert Identity.from_file_bytes(data).to_file_bytes() == data


@target(
    "addresses",
    lambda: [
        f"/ip4/192.0.2.1/tcp/5/p2p/{ME.peer_id}".encode(),
        b"/dns4/example.org/tcp/5",
        b"192.0.2.1:5",
        f"/ip6/::1/tcp/5/p2p/{ME.peer_id}/p2p-circuit".encode(),
    ],
)
def _(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    endpoint = identity.endpoint_of(text)
    if endpoint is not None and endpoint.ip is not None:
        assert str(endpoint.ip)
    assert identity.is_relay(text) or not identity.is_public(text)
    identity.tcp_endpoints([text])
    with contextlib.suppress(SetupError):
        identity.split_peer_id(text)
    if text.startswith("/"):
        with contextlib.suppress(SetupError):
            identity.to_multiaddr(text)
    with contextlib.suppress(ControlError):
        p2pd_control.peer_bytes(text)
    ME.verify(text, b"data", bytes(64))


# --- files --------------------------------------------------------------------------------------------------

_MEMORY = Path("/dev/shm")
FOLDER, _FOLDER_LOCK = private_folder(
    _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir()), "swarm-fuzz-"
)
_WEIGHTS = {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.float64)}


@atexit.register
def clean_up() -> None:
    """Remove the folder in which the targets of files work."""
    for folder, _, files in os.walk(FOLDER, topdown=False):
        for name in files:
            Path(folder, name).unlink()
        Path(folder).rmdir()


def _safetensors() -> list[bytes]:
    path = FOLDER / "seed.safetensors"
    with path.open("wb") as file:
        safetensors_file.write(file, _WEIGHTS, _WEIGHTS.__getitem__, {"run": "r"})
    return [path.read_bytes()]


@target("safetensors", _safetensors, spare_bytes=2 << 20)
def _(data: bytes) -> None:
    """A file whose digest was told right: a stranger made both."""
    path = FOLDER / "fuzz.safetensors"
    path.write_bytes(data)
    told = safetensors_file.Described(
        format=1, run="r", step=0, sha256=hashlib.sha256(data).hexdigest(), bytes=len(data)
    )
    infos = {name: safetensors_file.info(tensor) for name, tensor in _WEIGHTS.items()}
    with contextlib.suppress(safetensors_file.Damaged):
        tensors = safetensors_file.read(
            safetensors_file.FileKind("test", "Do"), path, told, ("expected", infos)
        )
        assert {name: safetensors_file.info(tensor) for name, tensor in tensors.items()} == infos
        assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())


def _checkpoints() -> list[bytes]:
    saved = Checkpoint(FOLDER / "seed", AUDIT, 0, 2)
    saved.save(_WEIGHTS)
    (tensors,) = saved.path.parent.glob("stage-0-*.safetensors")
    return [struct.pack("<I", len(saved.path.read_bytes())) + saved.path.read_bytes() + tensors.read_bytes()]


@target("checkpoints", _checkpoints, spare_bytes=2 << 20)
def _(data: bytes) -> None:
    """An index and a file; half of the time the index vouches for the file."""
    if len(data) < 4:
        return
    size = struct.unpack("<I", data[:4])[0] % (len(data) + 1)
    index, tensors = data[4 : 4 + size], data[4 + size :]
    digest = hashlib.sha256(tensors).hexdigest()
    with contextlib.suppress(ValueError, RecursionError):
        told = json.loads(index)
        if isinstance(told, dict) and len(data) % 2:
            index = json.dumps({**told, "sha256": digest, "bytes": len(tensors)}).encode()
    saved = Checkpoint(FOLDER / "fuzz", AUDIT, 0, 2)
    saved.path.parent.mkdir(parents=True, exist_ok=True)
    saved.path.write_bytes(index)
    saved._tensors_path(digest).write_bytes(tensors)
    try:
        loaded = saved.load()
        assert all(bool(torch.isfinite(tensor).all()) for tensor in loaded.values())
    except safetensors_file.Damaged:
        pass
    finally:
        saved._tensors_path(digest).unlink()


def _model_files() -> list[bytes]:
    path = FOLDER / "seed-model.safetensors"
    model_file.write(path, AUDIT, 2, _WEIGHTS, _WEIGHTS.__getitem__)
    return [path.with_suffix(".json").read_bytes()]


@target("model files", _model_files)
def _(data: bytes) -> None:
    path = FOLDER / "fuzz-model.safetensors"
    path.touch()
    path.with_suffix(".json").write_bytes(data)
    with contextlib.suppress(SetupError):
        config, run = model_file.read_config(path)
        assert 0 <= config.step <= run.steps


def _status(**changes: Any) -> PeerStatus:
    fields: dict[str, Any] = {
        "peer": ME.peer_id,
        "stage": 1,
        "state": "serving",
        "device": "cpu",
        "version": 1,
        "since": 1.5,
        "links": (wire_messages.LinkStatus(peer="p", bytes_in=1, bytes_out=2),),
        "trainers": ("t",),
    }
    return PeerStatus(**{**fields, **changes})


_HEAD = msgspec.json.encode(history._Head(AUDIT.to_toml())) + b"\n"


def _histories() -> list[bytes]:
    observation = Observation(
        at=1.0,
        records=(_record(),),
        statuses=(_status(),),
        silent={"p": "why"},
        gone=("q",),
        refused={"a": 1},
    )
    return [b"1" + msgspec.json.encode(observation) + b"\n", b"0" + _HEAD + msgspec.json.encode(observation)]


@target("histories", _histories)
def _(data: bytes) -> None:
    """After `1`: lines that follow a good first one; else the whole file."""
    path = FOLDER / "fuzz.history"
    path.write_bytes((_HEAD if data[:1] == b"1" else b"") + data[1:])
    with contextlib.suppress(SetupError):
        _, observations = history.read(path)
        for observation in observations:
            msgspec.json.encode(observation)


_PAST = (PastStep(version=1, took_s=0.5, loss=1.0),)


@target("status answers", lambda: [pack(_status()), pack(_status(past=_PAST, digest="d" * 64, kind="cpu"))])
def _(data: bytes) -> None:
    """As a monitor reads them, with what is drawn of them."""
    try:
        status = validation.checked(unpack(data, PeerStatus), _record(), AUDIT)
    except Refused:
        return
    assert all(map(str.isprintable, (status.state, status.device, status.rebalance, status.kind)))
    assert all(step.loss is None or math.isfinite(step.loss) for step in status.past)
    msgspec.json.encode(status)


# --- direct connections -------------------------------------------------------------------------------------

_PLAIN = [b"\0", *_frames(), bytes(70_000), b"x" * 300]


def _records() -> list[bytes]:
    sealer = Sealer(bytes(KEY_BYTES))
    whole = [bytes(sealer.seal([plain])) for plain in _PLAIN]
    return [b"".join(whole[:count]) for count in (1, 2, 8, len(whole))]


@target("sealed records", _records)
def _(data: bytes) -> None:
    """What comes out of any bytes is the beginning of what was sealed."""
    opener, out = Opener(bytes(KEY_BYTES)), b""
    with contextlib.suppress(Refused):
        for start in range(0, len(data), 10_000):
            out += put(opener, data[start : start + 10_000])
            assert opener.room().nbytes
    assert b"".join(_PLAIN).startswith(out)


_ASKING = Asking(STRANGER, ME.peer_id)


@target("direct questions", lambda: [pack(_ASKING.ask())])
def _(data: bytes) -> None:
    """Only what the caller signed is granted."""
    try:
        answer, keys = grant(ME, STRANGER.peer_id, unpack(data, AskDirect), 1)
    except Refused:
        return
    assert unpack(data, AskDirect) == _ASKING.ask()
    assert _ASKING.agree(answer) == keys


@target("direct grants", lambda: [pack(grant(ME, STRANGER.peer_id, _ASKING.ask(), 1)[0])])
def _(data: bytes) -> None:
    """Only what the callee signed for this question is believed."""
    with contextlib.suppress(Refused):
        given = unpack(data, GrantDirect)
        _ASKING.agree(given)
        assert given.port == 1


CORPUS = Path(__file__).parent / "corpus"


def corpus_of(name: str) -> list[bytes]:
    """Inputs that were of interest: each failed once, or reaches what no other does. In hex, a line each."""
    path = CORPUS / f"{name.replace(' ', '-')}.txt"
    return [bytes.fromhex(line) for line in path.read_text().split()] if path.exists() else []


# --- plain mutation -----------------------------------------------------------------------------------------

_INTERESTING = (
    b"\0",
    b"\xff",
    b"\x7f\xff\xff\xff\xff\xff\xff\xff",
    b"\xcb\x7f\xf8\0\0\0\0\0\0",
    b"\xcb\x7f\xf0\0\0\0\0\0\0",
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\xd3\x80\0\0\0\0\0\0\0",
    b"\xc6\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\x91" * 40,
    b"[" * 2000,
    b"\xc0",
    b"\x80",
    b"NaN",
    b"1e999",
    b'"\\ud800"',
    b"\xed\xa0\x80",
    b"\n",
)


def mutated(seeds: Sequence[bytes], dice: random.Random) -> bytes:
    """One of the seeds, changed at a few places."""
    data = bytearray(dice.choice(seeds))
    for _ in range(dice.choice((1, 1, 2, 4, 16))):
        at = dice.randrange(len(data) + 1)
        match dice.randrange(7):
            case 0 if at < len(data):
                data[at] ^= 1 << dice.randrange(8)
            case 1 if at < len(data):
                data[at] = dice.randrange(256)
            case 2:
                data[at:at] = dice.choice(_INTERESTING)
            case 3:
                word = dice.choice(_INTERESTING)
                data[at : at + len(word)] = word
            case 4:
                del data[at : at + dice.choice((1, 2, 8, 64))]
            case 5:
                other = dice.choice(seeds)
                start = dice.randrange(len(other) + 1)
                data[at:at] = other[start : start + dice.choice((1, 4, 16, 256))]
            case _:
                data[at:at] = data[at : at + dice.choice((1, 8, 100))]
    return bytes(data[: 1 << 16])
