"""Events: what is written can be read back, and is said in words."""

from __future__ import annotations

import errno
import io
import json
import logging
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.events import (
    EVENTS,
    MAX_LINE_CHARS,
    AddedUp,
    Contributed,
    Downloading,
    Emitter,
    Event,
    Failed,
    JoinLine,
    Killed,
    Note,
    PeerLost,
    Problem,
    Replayed,
    RoundAborted,
    StepDone,
    StopNow,
    Trouble,
    count,
    kind,
    parse_event,
    said_in_logs,
    to_json,
    to_text,
)
from swarm.errors import printable

PEER = "12D3KooWQmabcdef"

_VALUES: dict[str, st.SearchStrategy[object]] = {
    "bool": st.booleans(),
    "int": st.integers(-(2**53), 2**53),
    "int | None": st.none() | st.integers(0, 2**53),
    "float": st.floats(allow_nan=False, allow_infinity=False),
    "float | None": st.none() | st.floats(allow_nan=False, allow_infinity=False),
    "str": st.text(max_size=50),
    "tuple[str, ...]": st.lists(st.text(max_size=20), max_size=3).map(tuple),
    "tuple[float, ...]": st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=3).map(tuple),
    "tuple[int, ...]": st.lists(st.integers(0, 1000), max_size=5).map(tuple),
}


def _annotations(cls: type[Event]) -> list[tuple[str, str]]:
    """The fields of an event and their types, as written."""
    written = {
        name: text for base in cls.__mro__ for name, text in vars(base).get("__annotations__", {}).items()
    }
    return [(name, written[name]) for name in cls.__struct_fields__]


@st.composite
def any_event(draw: st.DrawFn) -> Event:
    """Any event with any values in its fields."""
    cls = draw(st.sampled_from(EVENTS))
    return cls(**{name: draw(_VALUES[text]) for name, text in _annotations(cls)})


@given(any_event())
def test_an_event_reads_back_as_it_was_written(event: Event) -> None:
    line = to_json(event)
    assert "\n" not in line
    read = parse_event(line)
    assert read == event and read.at == event.at
    assert json.loads(line)["event"] == kind(type(event))


@given(any_event().map(lambda event: msgspec.structs.replace(event, at=0.0)))
def test_every_event_can_be_said_in_words(event: Event) -> None:
    assert printable(event.words()) in to_text(event)


def test_a_download_beyond_its_end_is_a_full_bar() -> None:
    """Events are read back from others' lines: a number must not become as many characters."""
    for done, filled in ((-(10**12), 0), (0, 0), (5, 10), (10**12, 20)):
        said = Downloading(stage=0, version=1, done_bytes=done, total_bytes=10, sources=1).words()
        assert f"[{'#' * filled}{'.' * (20 - filled)}]" in said


def test_kinds_are_distinct_and_in_snake_case() -> None:
    kinds = [kind(cls) for cls in EVENTS]
    assert len(set(kinds)) == len(kinds)
    assert kind(StepDone) == "step_done"
    assert {*Event.__subclasses__(), *Problem.__subclasses__()} == {*EVENTS, Problem}


@pytest.mark.parametrize(
    "line",
    [
        "",
        "Traceback (most recent call last):",
        "[1, 2]",
        "{",
        "{}",
        '{"event": "moon_landing"}',
        '{"event": ["note"]}',
        '{"event": "note"}',
        '{"event": "note", "text": 3}',
        '{"event": "step_done", "t": "1", "steps": 2, "loss": 1.0, "tokens_per_s": 1.0}',
        '{"event": "note", "text": "' + "a" * MAX_LINE_CHARS + '"}',
        '{"event": "note", "text": "\ud800"}',
        '{"event": "note", "mood": ' + "[" * 50_000,
    ],
)
def test_a_line_that_is_no_event_is_none(line: str) -> None:
    assert parse_event(line) is None


def test_fields_of_a_newer_version_are_skipped() -> None:
    assert parse_event('{"event": "note", "at": 1.0, "text": "hi", "mood": "good"}') == Note(text="hi")


def test_a_loss_that_is_not_finite_is_written_as_null_and_read_as_none() -> None:
    line = to_json(StepDone(t=0, steps=1, loss=math.nan, tokens_per_s=1.0))
    assert json.loads(line)["loss"] is None
    read = parse_event(line)
    assert isinstance(read, StepDone)
    assert read.loss is None


def test_words_are_sentences() -> None:
    assert Killed(peer=PEER, stage=1).words() == "peer abcdef of stage 1 killed"
    assert PeerLost(peer=PEER, stage=0, why="no heartbeat for 3.5 s").words() == (
        "peer abcdef of stage 0 is lost: no heartbeat for 3.5 s"
    )
    assert Replayed(t=7, count=1).words() == "step 7: 1 microbatch run again"
    assert Replayed(t=7, count=3).words() == "step 7: 3 microbatches run again"
    assert StepDone(t=9, steps=40, loss=2.5, tokens_per_s=12345.6, peers=(2, 1)).words() == (
        "step 9 done, 30 to go: loss 2.5000, 12,346 tokens/s, peers per stage 2 1"
    )
    met = StepDone(t=9, steps=40, loss=None, tokens_per_s=0.0, meeting=True)
    assert met.words() == "step 9 done, 30 to go: all islands have met"
    assert "its loss was not told" in StepDone(t=9, steps=40, loss=None, tokens_per_s=0.0).words()
    assert RoundAborted(stage=1, t=2, why="a part is missing").words() == (
        "stage 1: a reduce of step 2 is void and starts again: a part is missing"
    )
    assert "Ctrl-C again" in StopNow(role="peer").words()
    assert Contributed(microbatches=5, steps=1).words() == "contributed 5 microbatches in 1 step. Thank you"
    assert JoinLine(line="swarm peer --run 5a").words() == "join with:\n    swarm peer --run 5a"


def test_trouble_is_marked_in_the_log() -> None:
    assert to_text(PeerLost(peer=PEER, stage=1, why="\x1b[2Jno\r\x9b1m\nroute")).endswith("?[2Jno??1m\nroute")
    assert "! disk is slow" in to_text(Trouble(text="disk is slow"))
    assert "error: no disk" in to_text(Failed(text="no disk"))


def test_counting_words() -> None:
    assert [count(1, "peer"), count(0, "peer"), count(2, "microbatch")] == [
        "1 peer",
        "0 peers",
        "2 microbatches",
    ]


def test_the_emitter_writes_one_line_per_event_in_the_chosen_format() -> None:
    out = io.StringIO()
    emit = Emitter("json", out)
    emit(Note(text="a\nb"))
    emit(Note(text="c"))
    assert [parse_event(line) for line in out.getvalue().splitlines()] == [Note(text="a\nb"), Note(text="c")]
    out = io.StringIO()
    Emitter("text", out)(AddedUp(stage=0, t=0, missing=0, duplicated=0))  # for programs
    Emitter("text", out)(Note(text="hello"))
    assert out.getvalue().endswith("  hello\n") and out.getvalue().count("\n") == 1


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(errno.ENOSPC, "No space left on device")])
def test_what_a_program_does_goes_on_though_it_cannot_be_told(error: OSError) -> None:
    """With the log on a full disk a peer saved no checkpoint after its next step, or ended."""

    class Full(io.StringIO):
        full = True

        def flush(self) -> None:
            if self.full:
                self.truncate(self.seek(0))
                raise error

    stream = Full()
    emit = Emitter("json", stream)
    with said_in_logs(emit):
        emit(Note(text="a"))
        logging.getLogger("peers").warning("b")
        stream.full = False
        emit(Note(text="c"))
    assert parse_event(stream.getvalue()) == Note(text="c")
    stream.close()
    emit(Note(text="d"))
