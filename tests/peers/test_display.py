"""What the demo says of its processes: a line for each event, and some of the steps."""

from __future__ import annotations

import io

import pytest

from peers.events import Event, Killed, Note, StepDone
from peers.programs.demo import STEP_LINES, Lines

pytestmark = pytest.mark.usefixtures("greenwich")


def said(*events: Event) -> list[str]:
    out = io.StringIO()
    lines = Lines("swarm demo", out)
    for event in events:
        lines(event)
    return out.getvalue().splitlines()


def step(t: int, steps: int = 40) -> StepDone:
    return StepDone(at=1000.0 + t, t=t, steps=steps, loss=2.0, tokens_per_s=2345.6, peers=(2, 1, 2))


def test_events_are_lines_and_steps_are_thinned() -> None:
    lines = said(*(step(t, steps=400) for t in range(400)), Killed(at=1020.0, peer="abcdef", stage=1))
    assert lines[0] == "swarm demo"
    assert lines[-1] == "00:17:00  ! peer abcdef of stage 1 killed"
    assert sum("step " in line for line in lines) <= STEP_LINES + 1
    assert any("step 399 done, 0 to go" in line for line in lines)


def test_a_late_report_of_an_old_step_is_not_said() -> None:
    assert len(said(step(5), step(3))) == 2


def test_what_a_terminal_would_obey_is_not_on_the_screen() -> None:
    (_, line) = said(Note(at=1030.0, text="no\x1b[2J route"))
    assert line == "00:17:10  no?[2J route"
