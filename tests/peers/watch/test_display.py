"""What the demo says of its processes: a line for each event, and some of the steps."""

from __future__ import annotations

import io
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from peers.api.run import Run
from peers.api.steps import reference
from peers.cli import build_parser
from peers.events import Event, Killed, Note, StepDone
from peers.programs import demo
from peers.programs.demo import ALONE, CURVE, STEP_LINES, STEPS, EventLines, recorded, summary, told_as_json
from peers.programs.tool_options import DemoOptions
from peers.watch.terminal import curve
from swarm.manifest import demo_run
from tests.peers.admitted import admitting

pytestmark = pytest.mark.usefixtures("greenwich")


def said(*events: Event) -> list[str]:
    out = io.StringIO()
    lines = EventLines("swarm demo", out)
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


def test_a_run_of_many_steps_is_not_silent_for_hours() -> None:
    said_of = [line.split()[2] for line in said(*(step(t, steps=200_000) for t in range(100)))[1:]]
    assert said_of == ["0", "30", "60", "90"]
    last = step(98, steps=99)
    assert [line.split()[2] for line in said(step(0, steps=99), last, last)[1:]] == ["0", "98"]


def test_a_late_report_of_an_old_step_is_not_said() -> None:
    assert len(said(step(5), step(3))) == 2


def test_what_a_terminal_would_obey_is_not_on_the_screen() -> None:
    (_, line) = said(Note(at=1030.0, text="no\x1b[2J route"))
    assert line == "00:17:10  no?[2J route"


def test_the_time_that_is_left_is_told_from_the_second_step_that_is_said() -> None:
    first, second, *_, last = said(*(step(t) for t in range(40)))[1:]
    assert " left" not in first and " left" not in last
    assert second.endswith(", 0:38 left")


RESULT = {
    "steps": 4, "tokens_per_s": 1000.0, "preemptions": 1, "replayed": 0, "missing": 0, "duplicated": 0,
    "verify": None, "_undone": 0, "_place": "stage {}".format,
    "_alone": "5.0 → 1.0  █▁", "_curve": [4.0, 3.0, 2.0, 1.0], "_work": {(0, "12D3KooWabcdef"): 7},
    "_sample": "Once there was a fox",
}  # fmt: skip


def test_the_end_of_a_demo_says_who_did_what_and_what_to_do_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peers.programs.demo.program", lambda: "swarm")
    words = summary(RESULT)
    assert "\nloss       4.000 → 1.000  █▆▃▁" in words
    assert "\none alone  5.0 → 1.0  █▁\n" in words
    assert "nothing was lost: others held" in words
    assert "\nledgers    each microbatch of each step counted once" in words
    assert "\nthanks     peer abcdef of stage 0: 7 microbatches" in words
    assert "\nOnce there was a fox\n" in words
    for line in words.partition("next:\n")[2].splitlines():
        assert build_parser().parse_args(line.strip().partition("     ")[0].split()[1:])
    verify = {"max_loss_diff": 0.0, "max_weight_diff": 0.0, "losses": [4.0, 3.0, 2.0, 1.0]}
    words = summary({**RESULT, "replayed": 2, "missing": 1, "verify": verify})
    assert "\none alone  4.000 → 1.000  █▆▃▁" in words
    assert "2 microbatches lost with it: run again" in words and "microbatches missing 1" in words
    assert json.loads(told_as_json({**RESULT, "verify": verify}))["verify"] == {
        "max_loss_diff": 0.0,
        "max_weight_diff": 0.0,
    }
    assert json.loads(told_as_json(RESULT))["verify"] is None


@pytest.mark.slow
def test_the_curve_of_one_process_is_there_unasked_and_is_what_one_process_makes() -> None:
    """Of the demo without arguments. Its first steps are computed; after a change of the demo
    `scripts/bench/loss/loss_curve.py --alone` prints the whole anew."""
    run = Run.of(demo_run(steps=STEPS))
    of, first, last, *means = ALONE.split()
    assert run.id == of
    often = STEPS // len(means)
    losses = [step.loss or 0.0 for step in itertools.islice(reference(run), often)]
    assert (losses[0], sum(losses) / often) == pytest.approx((float(first), float(means[0])), abs=0.002)
    same = [float(mean) + 0.001 for mean in means for _ in range(often)]
    words, beside = recorded(run.id, same).split("\n")
    assert words.startswith(f"{first} → {last}  ") and "(recorded; at most 0.001 beside" in beside
    assert words.endswith(curve(same, CURVE).split()[-1]), "the same bars"
    assert recorded(Run.of(demo_run(steps=50)).id, same) == "is trained and drawn here too with --verify"


def test_a_run_that_pins_what_its_trainers_prove_is_played_on_another_text(tmp_path: Path) -> None:
    run = admitting(demo_run(stages=1))
    data = replace(run.data, source="files", sha256="a" * 64, tokens=500, root="b" * 64)
    (tmp_path / "run.toml").write_text(replace(run, data=data).to_toml())
    options = DemoOptions(manifest=tmp_path / "run.toml", data=(tmp_path / "other.txt",))
    assert demo._manifest_of(options).data == replace(data, sha256="", tokens=0, root="")
