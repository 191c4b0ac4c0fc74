"""Headers of calls: what is packed comes back, and anything else is refused with a named reason."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import BadAnswer, Refused
from swarm.protocol.ledger import Bitmap
from swarm.protocol.messages import (
    Directive,
    ReplicaReport,
    StepDirective,
)
from swarm.protocol.rounds import Plan, Prepared, StepReport
from swarm.wire import messages
from swarm.wire.codec import TensorMeta
from swarm.wire.messages import (
    MAX_HEADER_BYTES,
    FetchChunk,
    Hop,
    Locate,
    Part,
    Work,
    WorkDone,
    pack,
    unpack,
    unpack_answer,
    with_latency,
)

KINDS = [
    kind
    for kind in vars(messages).values()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == messages.__name__
]
WORK = Work(run="r", t=1, m=2, version=1, route=("a", "b"), tensors=(TensorMeta((1, 9), "uint8", "none"),))


def encoded(**fields: object) -> bytes:
    return msgspec.msgpack.encode(fields)


def refused(data: bytes, kind: type[msgspec.Struct] = Work) -> str:
    with pytest.raises(Refused) as caught:
        unpack(data, kind)
    return caught.value.text


def test_what_is_packed_comes_back() -> None:
    report = ReplicaReport(
        run="r",
        stage=1,
        version=3,
        digest="d",
        steps=(StepReport(t=3, done=Bitmap(1), in_progress=Bitmap(2), prepared=Prepared("x", 0.5, "y")),),
    )
    plan = Plan(round="x", number=1, members=("a",), ledgers=(Bitmap(255),), parts=(7,))
    directive = Directive(
        run="r", stage=0, coordinator="a", version=3, steps=(StepDirective(t=3, plan=plan),)
    )
    for message in (WORK, report, directive, WorkDone(loss=0.25)):
        assert unpack(pack(message), type(message)) == message


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_reader_skips_fields_that_it_does_not_know(kind: type[msgspec.Struct]) -> None:
    """So peers of a newer version may say more."""
    if not kind.__struct_config__.array_like and not any(
        field.required for field in msgspec.structs.fields(kind)
    ):
        assert unpack(encoded(a_new_field=1), kind) == kind()
    assert unpack(encoded(run="r", t=1, m=2, a_new_field=[{}]), Locate) == Locate(run="r", t=1, m=2)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_messages_are_frozen_and_given_by_name(kind: type[msgspec.Struct]) -> None:
    assert kind.__struct_config__.frozen
    with pytest.raises(TypeError):
        kind(*["x"] * len(kind.__struct_fields__))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "malformed Work header: Input data was truncated"),
        (b"\xc1", "malformed Work header: MessagePack data is malformed"),
        (pack(WORK)[:-3], "malformed Work header: Input data was truncated"),
        (pack(WORK) + b"\0", "malformed Work header: MessagePack data is malformed: trailing characters"),
        (encoded(run="r", t=1, m=2), "malformed Work header: Object missing required field `version`"),
        (
            encoded(run="r", t="1", m=2, version=1),
            "malformed Work header: Expected `int`, got `str` - at `$.t`",
        ),
        (
            encoded(run="r", t=True, m=2, version=1),
            "malformed Work header: Expected `int`, got `bool` - at `$.t`",
        ),
        (
            encoded(run=b"r", t=1, m=2, version=1),
            "malformed Work header: Expected `str`, got `bytes` - at `$.run`",
        ),
        (
            encoded(run="r", t=1, m=2, version=1, tensors=[{"shape": [1.5], "dtype": "u", "codec": "n"}]),
            "malformed Work header: Expected `int`, got `float` - at `$.tensors[0].shape[0]`",
        ),
        (msgspec.msgpack.encode([1, 2]), "malformed Work header: Expected `object`, got `array`"),
        (
            b"\x81\xa3run\xa2\xff\xfe",
            "malformed Work header: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
        ),
    ],
)
def test_a_malformed_header_is_refused_and_the_text_names_the_field(data: bytes, text: str) -> None:
    assert refused(data).startswith(text)


def test_a_header_above_the_limit_is_refused_before_it_is_read() -> None:
    text = f"the header has {MAX_HEADER_BYTES + 1} bytes; at most {MAX_HEADER_BYTES} are read"
    assert refused(b"\xc1" * (MAX_HEADER_BYTES + 1)) == text


def test_nesting_without_end_is_refused() -> None:
    assert refused(b"\x81\xa1x" + b"\x91" * 60_000).startswith("malformed Work header: ")


@pytest.mark.parametrize(
    ("fields", "kind", "where"),
    [
        ({"run": "r", "lease": "x", "index": None}, FetchChunk, "$.index"),
        (
            {"run": "r", "stage": 0, "version": 1, "steps": [{"t": 1, "done": "text", "in_progress": b""}]},
            ReplicaReport,
            "$.steps[0].done",
        ),
        ({"run": "r", "t": 0, "round": "x", "start": 0, "numel": 2**64}, Part, "$.numel"),
        ({"loss": "nan"}, WorkDone, "$.loss"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(fields: dict[str, object], kind: type, where: str) -> None:
    try:
        data = encoded(**fields)
    except OverflowError:
        data = encoded(**{**fields, "numel": 1e30})
    assert where in refused(data, kind)


def test_a_bad_answer_is_the_peers_fault() -> None:
    with pytest.raises(BadAnswer, match=r"peer bcdefg: malformed WorkDone header: .*`loss`") as caught:
        unpack_answer("abcdefg", encoded(), WorkDone)
    assert caught.value.peer == "abcdefg"
    assert unpack_answer("a", pack(WorkDone(loss=1.0)), WorkDone).loss == 1.0


@given(st.binary(max_size=200), st.sampled_from(KINDS))
def test_whatever_bytes_come_they_are_read_or_refused(data: bytes, kind: type[msgspec.Struct]) -> None:
    try:
        found = unpack(data, kind)
    except Refused:
        return
    assert isinstance(found, kind)


@given(st.data())
def test_a_damaged_header_is_read_or_refused(data: st.DataObject) -> None:
    good = bytearray(pack(WORK))
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    try:
        unpack(bytes(good), Work)
    except Refused as refusal:
        assert refusal.text.startswith("malformed Work header: ")


def hop(stage: int, own_s: float, latency_s: float = 0.0) -> Hop:
    return Hop(stage=stage, peer=f"p{stage}", own_s=own_s, compute_s=own_s / 2, latency_s=latency_s)


def test_what_a_call_took_and_no_peer_spent_was_the_line_to_the_first() -> None:
    hops = with_latency((hop(1, 0.1, latency_s=7.0), hop(2, 0.2, latency_s=0.05)), 0.5, 0.02)
    assert [h.latency_s for h in hops] == [pytest.approx(0.15), 0.05]
    assert with_latency((), 0.5, 0.0) == ()


@pytest.mark.parametrize("own_s", [0.6, float("nan"), float("inf"), -9.0])
def test_of_work_done_before_and_of_times_that_cannot_be_no_way_is_known(own_s: float) -> None:
    assert with_latency((hop(1, own_s),), 0.5, 0.0)[0].latency_s == 0.0


@pytest.mark.parametrize(
    ("compute_s", "work_s"), [(0.05, 0.05), (0.0, 0.1), (0.2, 0.1), (float("nan"), 0.1), (-1.0, 0.1)]
)
def test_a_device_worked_no_longer_than_its_peer_had_the_microbatch(compute_s: float, work_s: float) -> None:
    assert Hop(stage=0, peer="p", own_s=0.1, compute_s=compute_s).work_s == work_s


@pytest.mark.parametrize(
    ("upload_s", "work_s"),
    [(0.3, 0.3), (0.02, 0.05), (float("nan"), 0.05), (float("inf"), 0.05), (-1.0, 0.05)],
)
def test_a_peer_takes_as_many_as_its_device_and_its_upload_can(upload_s: float, work_s: float) -> None:
    found = Hop(stage=0, peer="p", own_s=0.1, compute_s=0.05, upload_s=upload_s)
    assert (found.work_s, found.device_s) == (work_s, 0.05)
