"""The dashboard in a terminal: golden pictures, every size, and lines off a terminal."""

from __future__ import annotations

import contextlib
import io
import os
import threading
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from peers.watch.terminal import LiveScreen, clock, render, sparkline
from peers.watch.topology import svg
from swarm.manifest import IslandsSpec
from swarm.monitoring.aggregator import Aggregator
from swarm.monitoring.health import Observation, SwarmHealth
from swarm.monitoring.validation import tidy
from tests.seeds import some
from tests.watch.pictures import RUN, START, crowd, record, status, troubled

pytestmark = pytest.mark.usefixtures("greenwich")


def drawn(health: SwarmHealth, width: int = 80, height: int = 24) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(render(health, width=width, height=height))
    return [line.rstrip() for line in out.getvalue().splitlines()]


GOLDEN = """\
demo  {id}                                  13:47:04
 step  ━━━━━━━━━━━                             12/40  4,096 tokens/s  0:56 left
 loss  4.900 → 3.800  ██▇▆▆▅▄▃▃▂▁▁
 ! stage 2 has one peer left
 ! peer peer-f does not answer: the connection broke
 ! peer peer-c answers 8× slower than its stage
 ! and 2 alerts more

stage  peers  load  version  work/s  slowest      fastest
    0      2   1.2       12    4.00  peer-a 2.00  peer-b 2.00
    1      2   1.2       12    2.25  peer-c 0.25  peer-d 2.00
    2      1   1.2       40    2.00  peer-e 2.00  peer-e 2.00

stage  peer    device  work/s  in flight  queue    up  computed  last
    0  peer-a  cpu       2.00        2/8    1.2  1:54       240  serving
    0  peer-b  cpu       2.00        2/8    1.2  1:54       240  serving
    1  peer-c  cpu       0.25        2/8    1.2  1:54       240  serving
    1  peer-d  cpu       2.00        2/8    1.2  1:54       240  serving
    2  peer-e  cpu       2.00        2/8    1.2  1:54       800  doubted
    2  peer-f  cpu       2.00          –    1.2  1:54       120  no answer
    –  keeper  cpu          –          –    1.2  1:54         0  keeping
 13:46:54  peer peer-f of stage 2 does not answer: the connection broke"""


def test_the_screen_of_a_run_in_trouble() -> None:
    aggregator, at = troubled()
    lines = drawn(aggregator.health(now=at))
    assert "\n".join(lines) == GOLDEN.format(id=RUN.id)


def test_stages_of_islands_are_named_by_both_numbers() -> None:
    run = replace(RUN, islands=IslandsSpec(count=2, local_steps=9))
    aggregator = Aggregator(run)
    records = [msgspec.structs.replace(record("p", 0), peer=f"p{n}", run=run.id, stage=n) for n in range(5)]
    aggregator.observe(Observation(at=START, records=tuple(records)))
    health = aggregator.health(now=START)
    screen = drawn(health, height=60)
    assert sum(line.startswith("island.stage  peer") for line in screen) == 2
    assert any(line.split()[:2] == ["1.1", "1"] for line in screen)
    assert " ! stage 2 of island 1 (cell 5) has no peer: the run waits until one joins" in screen
    assert "stage 1.0" in svg(health)


def test_an_empty_run_is_drawn_too() -> None:
    aggregator = Aggregator(RUN)
    assert "has no peer" not in "\n".join(drawn(aggregator.health(now=START))), "nobody has looked yet"
    aggregator.observe(Observation(at=START))
    lines = drawn(aggregator.health(now=START))
    assert lines[1].startswith(" step") and lines[1].endswith("0/40")
    assert lines[2] == " loss  –"
    assert lines[3] == " ! stage 0 has no peer: the run waits until one joins"


SMALL = """\
demo  {id:.23}…  13:47:04
 step  12/40  4,096 tokens/s  0:56 left
 loss  4.900 → 3.800  ██▇▆▆▅▄▃▃▂▁▁
 ! stage 2 has one peer left
 ! and 4 alerts more

stage  peers  load  version  work/s
    0      2   1.2       12    4.00
    1      2   1.2       12    2.25
    2      1   1.2       40    2.00"""


def test_a_small_terminal_has_fewer_columns_and_the_stages_only() -> None:
    aggregator, at = troubled()
    health = aggregator.health(now=at)
    assert "\n".join(drawn(health, 40, 10)) == SMALL.format(id=RUN.id)
    narrow = drawn(health, 40, 24)
    assert "stage  peer    work/s  last" in narrow and "    2  peer-f    2.00  no answer" in narrow


@pytest.mark.parametrize("height", some([5, 8, 10, 12, 13, 14, 16, 24, 50], quick=[5, 10, 13, 24, 50]))
@pytest.mark.parametrize("width", some([20, 40, 60, 80, 200], quick=[20, 60, 200]))
def test_it_fits_whatever_the_size_and_however_many_peers(width: int, height: int) -> None:
    aggregator, at = troubled()
    for health in (aggregator.health(now=at), crowd(), Aggregator(RUN).health(now=START)):
        lines = drawn(health, width, height)
        assert len(lines) <= height
        assert max(map(len, lines)) <= width


def test_of_many_peers_those_with_something_to_look_at_come_first() -> None:
    aggregator, at = troubled()
    lines = drawn(aggregator.health(now=at), height=19)
    shown = [line.split()[1] for line in lines if line.startswith("    ") and "cpu" in line]
    assert {"peer-c", "peer-e", "peer-f"} <= set(shown)
    assert any(line.strip().startswith("… ") and line.endswith("more peers") for line in lines)


def test_what_strangers_write_steers_no_terminal() -> None:
    aggregator = Aggregator(RUN)
    evil = msgspec.structs.replace(record("peer-x", 0), device="\x1b[2J\x1b]0;mine\x07[red]")
    aggregator.observe(Observation(at=START, records=(tidy(evil),)))
    text = "\n".join(drawn(aggregator.health(now=START)))
    assert "\x1b" not in text and "\x07" not in text
    assert "?[2J?]0;" in text


def test_on_a_terminal_it_is_a_screen_that_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    ours, theirs = os.openpty()
    read: list[bytes] = []

    def drain() -> None:
        with contextlib.suppress(OSError):  # the other end was closed
            while chunk := os.read(ours, 65536):
                read.append(chunk)

    reader = threading.Thread(target=drain)
    reader.start()
    aggregator, at = troubled()
    with os.fdopen(theirs, "w") as stream, LiveScreen(stream=stream) as screen:
        assert screen.live
        screen(aggregator.health(now=at))
    reader.join()
    os.close(ours)
    said = b"".join(read).decode()
    enter, leave = "\x1b[?1049h", "\x1b[?1049l"
    assert said.index(enter) < said.index("stage 2 has one peer left") < said.index(leave)


def test_off_a_terminal_lines_tell_what_is_new_and_each_alert_once() -> None:
    out = io.StringIO()
    aggregator = Aggregator(RUN)
    with LiveScreen(stream=out) as screen:
        assert not screen.live
        aggregator.observe(
            Observation(at=START, records=(record("peer-a", 0), record("peer-b", 1), record("peer-c", 2)))
        )
        for version in range(1, 9):
            told = tuple(status(f"peer-{n}", s, version) for s, n in enumerate("abc"))
            silent = {"peer-c": "it hangs"} if version > 4 else {}
            aggregator.observe(
                Observation(at=START + 4 * version, statuses=told[:2] if silent else told, silent=silent)
            )
            screen(aggregator.health(now=START + 4 * version))
    said = out.getvalue().splitlines()
    assert sum("step " in line for line in said) == 3
    assert [line.split("  ", 1)[1] for line in said if "step " not in line] == [
        "peer peer-c of stage 2 does not answer: it hangs",
        "stage 2 has no peer",
        "! stage 2 has no peer: the run waits until one joins",
        "! peer peer-c does not answer: it hangs",
    ]


def test_durations() -> None:
    assert [clock(7), clock(754.9), clock(3723)] == ["0:07", "12:34", "1:02:03"]


def test_a_sparkline_spans_from_the_smallest_to_the_largest() -> None:
    assert sparkline([1, 2, 3], 10) == "▁▅█"
    assert sparkline([3, 3], 10) == "▁▁"
    assert sparkline([], 10) == sparkline([1, 2], 0) == ""


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), st.integers(1, 60))
def test_a_sparkline_has_at_most_its_width(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(width, len(values))
