"""The live screen, drawn from events: golden pictures, and plain lines off a terminal."""

from __future__ import annotations

import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from peers.events import (
    Downloading,
    Event,
    Killed,
    Note,
    PeerJoined,
    PeerLost,
    Replayed,
    StateFetched,
    StepDone,
)
from peers.watch.display import Display, clock, sparkline

PEER = "12D3KooWQmabcdef"


pytestmark = pytest.mark.usefixtures("greenwich")


def step(t: int, loss: float | None = 2.0, steps: int = 40, peers: tuple[int, ...] = (2, 1, 2)) -> StepDone:
    return StepDone(at=1000.0 + t, t=t, steps=steps, loss=loss, tokens_per_s=2345.6, peers=peers)


def picture(display: Display, now: float, width: int) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False)
    console.print(display.figures(now=now, width=width))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def after(events: list[Event], out: io.StringIO | None = None) -> Display:
    """A display on a terminal, which is not started: lines go to `out`."""
    display = Display("swarm demo", stream=out or io.StringIO(), live=True)
    for event in events:
        display(event)
    return display


EVENTS: list[Event] = [
    PeerJoined(at=1000.0, peer=PEER, stage=1, device="cpu"),
    *(step(t, 2 + 4 * math.exp(-t / 8)) for t in range(20)),
    Killed(at=1020.0, peer=PEER, stage=1),
    PeerLost(
        at=1020.0, peer=PEER, stage=1, why="the connection broke while a microbatch was on its way there"
    ),
    Replayed(at=1021.0, t=19, count=3),
]

GOLDEN_80 = """\
swarm demo
   step  ━━━━━━━━━━━━━━━━━━━━━━━━━━━                             20/40  1:15
   loss  6.000 → 2.372  █▇▇▆▅▄▄▃▃▃▂▂▂▁▁▁▁▁▁▁
  speed  2,346 tokens/s
  peers  stage 0: 2   stage 1: 1   stage 2: 2"""

GOLDEN_EMPTY = """\
swarm demo
   step                              0/?  0:00
   loss  –
  speed  –
  peers  –"""


def test_the_figures_are_steps_loss_speed_and_peers_and_other_events_are_lines_above() -> None:
    out = io.StringIO()
    assert picture(after(EVENTS, out), 1075.0, 80) == GOLDEN_80
    lines = out.getvalue().splitlines()
    assert [line.strip() for line in lines[:2]] == [
        "00:16:40  peer abcdef joined stage 1 on cpu", "00:17:00  ! peer abcdef of stage 1 killed",
    ]  # fmt: skip
    assert lines[-1] == "00:17:01  ! step 19: 3 microbatches run again"


def test_the_figures_before_anything_happened() -> None:
    assert picture(after([]), 5.0, 50) == GOLDEN_EMPTY


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_figures_fit_their_width(width: int) -> None:
    assert max(map(len, picture(after(EVENTS), 1075.0, width).splitlines())) <= width


def test_what_a_terminal_would_obey_is_not_on_the_screen() -> None:
    out = io.StringIO()
    after([Note(at=1030.0, text="no\x1b[2J route")], out)
    assert "no?[2J route" in out.getvalue() and "\x1b" not in out.getvalue()


def test_a_stage_without_peers_is_named() -> None:
    assert "stage 1: none" in picture(after([step(0, peers=(1, 0, 1))]), 1000.0, 80)


def test_a_step_without_a_loss_of_ours_keeps_the_curve() -> None:
    display = after([step(0, 3.0), step(1, None)])
    assert list(display.losses) == [3.0]
    assert display.done == 2


def test_a_late_report_of_an_old_step_does_not_go_back() -> None:
    assert after([step(5), step(3)]).done == 6


def test_a_download_is_one_line_that_grows() -> None:
    def here(megabytes: int, stage: int = 1) -> Downloading:
        return Downloading(
            at=1000.0, stage=stage, version=4, done_bytes=megabytes * 10**6, total_bytes=10**7, sources=2
        )

    out = io.StringIO()
    display = after([here(1), Note(at=1000.0, text="something else"), here(5, stage=0), here(6)], out)
    screen = picture(display, 1001, 80)
    assert "1.0 of 10.0 MB" not in screen and "MB" not in out.getvalue()
    assert "stage 1 [############........] 6.0 of 10.0 MB from 2 peers" in screen
    assert "5.0 of 10.0 MB" in screen, "of another stage"
    display(StateFetched(at=1002.0, stage=1, version=4, source=PEER, bytes=10**7, seconds=2.0, sources=2))
    assert "6.0 of" not in picture(display, 1003, 80)
    assert "version 4, 10.0 MB, from 2 peers in 2.0 s" in out.getvalue()


def test_durations() -> None:
    assert [clock(7), clock(754.9), clock(3723)] == ["0:07", "12:34", "1:02:03"]


def test_a_sparkline_spans_from_the_smallest_to_the_largest() -> None:
    assert sparkline([1, 2, 3], 10) == "▁▅█"
    assert sparkline([3, 3], 10) == "▁▁"
    assert sparkline([], 10) == sparkline([1, 2], 0) == ""


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), st.integers(1, 60))
def test_a_sparkline_has_at_most_its_width(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(width, len(values))


def test_off_a_terminal_events_are_lines_and_steps_are_thinned() -> None:
    out = io.StringIO()
    with Display("swarm demo", stream=out) as display:
        for t in range(400):
            display(step(t, steps=400))
        display(Killed(at=1020.0, peer=PEER, stage=1))
        display(Note(text="bye"))
    lines = out.getvalue().splitlines()
    assert lines[0] == "swarm demo"
    assert lines[-1].endswith("bye")
    assert sum("step " in line for line in lines) <= Display.LINES + 1
    assert any("step 399 done, 0 to go" in line for line in lines)
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_the_screen_is_drawn_in_place() -> None:
    out = io.StringIO()
    with Display("swarm demo", stream=out, live=True) as display:
        display(step(0))
    assert "swarm demo" in out.getvalue()
    assert "1/40" in out.getvalue()
