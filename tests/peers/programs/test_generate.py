"""`swarm generate` and where its weights come from: the stages' checkpoints, or a model file."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peers.cli import Exit, main
from peers.options import WeightsOptions
from peers.programs.tool_options import GenerateOptions
from peers.programs.trained import fetched
from peers.storage import RESULTS_ENV, checkpoint
from peers.storage.weights import find_run, load_weights
from swarm.errors import SetupError
from swarm.manifest import CustomModelSpec, Run, demo_run, pin
from swarm.model.layout import stage_layout
from swarm.model.stage import StageCompute
from tests.model.chain import weights_of

RUN = pin(
    replace(demo_run(stages=2), model=replace(demo_run(stages=2).model, layers=2, hidden=32, heads=2)),
    "0" * 64,
    5000,
)


def save(folder: Path, run: Run, stage: int, step: int = 4) -> None:
    state = StageCompute(run, stage).state.copy()
    state["weights"] += step  # so that each step has weights of its own
    checkpoint.Checkpoint(folder, run, stage, step).save(state, keep=9)


def weights_at(step: int) -> dict[str, torch.Tensor]:
    return {
        name: weights + step
        for stage in range(RUN.S)
        for name, weights in weights_of(StageCompute(RUN, stage)).items()
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints of both stages at steps 2 and 4, and of one at step 6."""
    folder = tmp_path / "ckpt"
    for step in (2, 4):
        for stage in range(RUN.S):
            save(folder, RUN, stage, step)
    save(folder, RUN, 0, 6)
    return folder


@pytest.mark.parametrize(("step", "got"), [(None, 4), (2, 2)])
def test_the_weights_of_all_stages_come_back_by_name(folder: Path, step: int | None, got: int) -> None:
    found = load_weights(WeightsOptions(checkpoint_dir=folder, step=step))
    expected = weights_at(got)
    assert (found.run, found.step) == (RUN, got)
    assert found.by_name.keys() == expected.keys()
    assert all(torch.equal(found.by_name[name], expected[name]) for name in expected)


@pytest.mark.parametrize("from_model", [False, True])
def test_the_command_prints_the_prompt_and_what_follows(
    folder: Path, tmp_path: Path, from_model: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    source = ["--checkpoint-dir", str(folder)]
    if from_model:
        out = str(tmp_path / "model.safetensors")
        assert main(["export", *source, "--out", out]) == Exit.OK
        source = ["--model", out]
        capsys.readouterr()
    argv = ["generate", *source, "--tokens", "7", "Hello you"]
    assert main(argv) == Exit.OK
    first = capsys.readouterr().out
    assert first.startswith("Hello you")
    assert len(first) > len("Hello you\n")
    assert main(argv) == Exit.OK
    assert capsys.readouterr().out == first


def test_of_strangers_weights_no_code_is_called_that_is_not_allowed(tmp_path: Path) -> None:
    """What is beside them names a function that is installed here."""
    spec = CustomModelSpec(kind="code", source="no.such:function", stages=2)
    run = replace(RUN, model=spec, data=replace(RUN.data, root=""))
    (tmp_path / run.id).mkdir()
    (tmp_path / run.id / "run.toml").write_text(run.to_toml())
    options = GenerateOptions(checkpoint_dir=tmp_path, prompt="The ")
    with pytest.raises(SetupError, match=r"names code that is installed here: no\.such:function\."):
        fetched(options).__enter__()
    with fetched(replace(options, allow_code=("no",))) as (_, found):
        assert found == run


def test_what_a_model_says_steers_no_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its bytes are any that whoever trained it likes; those of one that learned nothing are drawn."""
    assert main(["generate", "--checkpoint-dir", str(folder), "--tokens", "60", "Hello"]) == Exit.OK
    said = capsys.readouterr().out
    assert said.replace("\n", "").replace("\t", "").isprintable() and "?" in said


def test_how_far_a_passage_is_stands_on_standard_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["generate", "--checkpoint-dir", str(folder), "--tokens", "7", "Hello"]) == Exit.OK
    said = capsys.readouterr()
    assert "generating [##" in said.err and "1 of 7 tokens" in said.err
    assert said.out.startswith("Hello") and "generating" not in said.out


def test_what_is_fetched_from_peers_is_not_left_among_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer of this machine saved stage 0 there: that is used, and stays."""
    results, there = tmp_path / "results", list[bool]()
    save(results, RUN, 0)
    before = {path: path.stat().st_ino for path in results.rglob("*") if path.is_file()}

    async def collect(run: Run, _: Any, __: Any, folder: Path, emit: Any) -> int:
        there.append(checkpoint.Checkpoint(folder, run, 0, 4).is_whole())
        save(folder, run, 1)
        return 4

    async def manifest(*_: Any) -> Run:
        return RUN

    @contextlib.asynccontextmanager
    async def node(**_: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(transport=None, directory=None)

    monkeypatch.setenv(RESULTS_ENV, str(results))
    monkeypatch.setattr("peers.programs.trained.collect", collect)
    monkeypatch.setattr("peers.programs.roles.manifest", manifest)
    monkeypatch.setattr("peers.net.node.Node", node)
    out, address = tmp_path / "model.safetensors", f"/ip4/127.0.0.1/tcp/1/p2p/12D3KooW{'A' * 44}"
    assert main(["export", "--run", RUN.id, "--join", address, "--out", str(out)]) == Exit.OK
    assert load_weights(WeightsOptions(model=out)).step == 4 and there == [True]
    assert {path: path.stat().st_ino for path in results.rglob("*") if path.is_file()} == before
    assert [path.name for path in results.iterdir()] == [RUN.id]


def test_a_stage_that_is_missing_is_said(tmp_path: Path) -> None:
    save(tmp_path, RUN, 0)
    text = rf"no step that all 2 stages of run {RUN.id} were saved at \(stage 0: 4; stage 1: none\)"
    with pytest.raises(SetupError, match=text):
        load_weights(WeightsOptions(checkpoint_dir=tmp_path))


def test_a_step_that_is_not_complete_is_refused_with_those_that_are(folder: Path) -> None:
    with pytest.raises(
        SetupError, match=r"step 6 is not complete in .*: it lacks stage 1 \(complete steps: 4 2\)"
    ):
        load_weights(WeightsOptions(checkpoint_dir=folder, step=6))


def test_a_damaged_step_is_named_and_the_one_before_it_used(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = (folder / RUN.id / "step-000000004").glob("stage-1-*.safetensors")
    os.truncate(path, path.stat().st_size - 1)
    assert load_weights(WeightsOptions(checkpoint_dir=folder)).step == 2
    said = capsys.readouterr().err
    assert said.startswith("step 4 cannot be used: the checkpoint file ") and path.name in said
    with pytest.raises(SetupError, match="is damaged"):
        load_weights(WeightsOptions(checkpoint_dir=folder, step=4))


def test_where_every_step_is_damaged_the_newest_says_why(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / RUN.id / "step-000000004" / "stage-0.json").write_text("{}")
    assert load_weights(WeightsOptions(checkpoint_dir=folder)).step == 2
    assert "step 4 cannot be used" in capsys.readouterr().err
    (folder / RUN.id / "step-000000002" / "stage-1.json").write_text("{")
    with pytest.raises(SetupError, match=r"step-000000004.stage-0\.json is damaged"):
        load_weights(WeightsOptions(checkpoint_dir=folder))


NUMEL = stage_layout(RUN, 1).numel


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"other": torch.ones(3)}, r"stage 1, step 8 in .* holds no weights"),
        ({"weights": torch.ones(3)}, r"holds weights of \[3\] numbers of torch.float32; stage 1 has \["),
        (
            {"weights": torch.ones(NUMEL).double()},
            r"numbers of torch.float64; stage 1 has ",
        ),
        ({"weights": torch.ones(NUMEL), "statistics": torch.ones(3)}, r"holds statistics of \[3\] numbers"),
    ],
)
def test_a_checkpoint_that_is_not_of_its_stage_is_refused(
    folder: Path, tensors: dict[str, torch.Tensor], words: str
) -> None:
    save(folder, RUN, 0, 8)
    checkpoint.Checkpoint(folder, RUN, 1, 8).save(tensors, keep=9)
    with pytest.raises(SetupError, match=words):
        load_weights(WeightsOptions(checkpoint_dir=folder, step=8))


def test_an_empty_folder_and_two_runs_in_one_are_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="no checkpoints in"):
        find_run(tmp_path / "nothing", None)
    other = replace(RUN, seed=5)
    save(folder, other, 0)
    with pytest.raises(SetupError, match=f"--run .*{other.id}"):
        find_run(folder, None)
    with pytest.raises(SetupError, match=r"is found in the network: of the runs in .* give the id"):
        find_run(folder, "mine@" + 20 * "a")
    with pytest.raises(SetupError, match=rf"has no checkpoints of run {'f' * 32}, only of .*{RUN.id}"):
        find_run(folder, "f" * 32)
    assert find_run(folder, RUN.id) == RUN


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            WeightsOptions(model=Path("m"), step=3),
            "--run and --step choose among checkpoints: leave them out",
        ),
    ],
)
def test_which_weights_are_meant_must_be_clear(options: WeightsOptions, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        load_weights(options)


def test_of_a_run_that_goes_on_no_older_step_can_be_had() -> None:
    """The newest was taken without a word."""
    options = GenerateOptions(run=RUN.id, join=("/ip4/127.0.0.1/tcp/1/p2p/x",), step=3)
    with pytest.raises(SetupError, match="with --join leave it out"), fetched(options):
        pass
