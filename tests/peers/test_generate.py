"""`swarm generate`: from the stages' checkpoints to a passage of text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from peers.cli import Exit, main
from peers.disk import checkpoint
from peers.generate import find_run, newest_weights
from swarm.errors import SetupError
from swarm.model.stage import StageCompute
from swarm.run import Run, demo_run, pin

RUN = pin(
    replace(demo_run(stages=2), model=replace(demo_run(stages=2).model, layers=2, hidden=32, heads=2)),
    "0" * 64,
    5000,
)


def save(folder: Path, run: Run, stage: int, step: int = 4) -> None:
    checkpoint.save(folder, run, stage, step, StageCompute(run, stage).state(), {})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints of both stages."""
    for stage in range(RUN.S):
        save(tmp_path, RUN, stage)
    return tmp_path


def test_the_weights_of_all_stages_come_back_by_name(folder: Path) -> None:
    run = find_run(folder, None)
    assert run == RUN
    step, weights = newest_weights(folder, run)
    expected = {
        name: w for stage in range(RUN.S) for name, w in StageCompute(RUN, stage).named_weights().items()
    }
    assert step == 4
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_the_command_prints_the_prompt_and_what_follows(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", "--checkpoint-dir", str(folder), "--prompt", "Hello", "--tokens", "7"]
    assert main(argv) == Exit.OK
    first = capsys.readouterr().out
    assert first.startswith("Hello")
    assert main(argv) == Exit.OK
    assert capsys.readouterr().out == first


def test_a_stage_that_is_missing_is_said(tmp_path: Path) -> None:
    save(tmp_path, RUN, 0)
    with pytest.raises(SetupError, match="no step that all 2 stages"):
        newest_weights(tmp_path, RUN)


def test_an_empty_folder_and_two_runs_in_one_are_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="no checkpoints in"):
        find_run(tmp_path / "nothing", None)
    other = replace(RUN, seed=5)
    save(folder, other, 0)
    with pytest.raises(SetupError, match=f"--run .*{other.id}"):
        find_run(folder, None)
    assert find_run(folder, RUN.id) == RUN
