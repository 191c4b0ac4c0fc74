"""`swarm plan`: what it prints, and every refusal by its words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peers.cli import Exit, main
from swarm.plan.network import EXAMPLE as DEVICES
from swarm.run import EXAMPLE as RUN


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    run, devices = tmp_path / "run.toml", tmp_path / "devices.toml"
    run.write_text(RUN)
    devices.write_text(DEVICES)
    return run, devices


def planned(files: tuple[Path, Path], *more: str) -> int:
    return main(["plan", "--manifest", str(files[0]), "--devices", str(files[1]), "--budget", "0", *more])


def test_a_plan_names_every_device_once_and_compares_itself(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(files, "--json") == Exit.OK
    said = json.loads(capsys.readouterr().out)
    names = sorted(name for stage in said["stages"] for name in stage) + sorted(said["idle"])
    assert sorted(names) == sorted([f"v100-{i}" for i in range(8)] + ["laptop-0", "laptop-1"])
    assert len(said["stages"]) == 3 and all(said["stages"])
    assert said["step_s"] <= min(said["starts_s"].values())
    assert said["step_s"] <= said["megatron_s"]
    assert said["tokens_per_s"] == pytest.approx(16 * 8 * 256 / said["step_s"])
    assert said["limit"]


def test_a_plan_for_people_says_the_layout_the_limit_and_the_comparison(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(files) == Exit.OK
    said = capsys.readouterr().out
    assert "example: 3 stages, 16 microbatches a step, 10 devices in 2 regions" in said
    assert all(f"\nstage {stage}: " in said for stage in range(3))
    for words in ("a step takes about", "what limits it: ", "a random layout: ", "as Megatron has it: "):
        assert words in said


def test_without_a_budget_the_plan_is_a_function_of_the_seed(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for _ in range(2):
        assert planned(files, "--json", "--seed", "3") == Exit.OK
        found.append({**json.loads(capsys.readouterr().out), "cpu_s": 0})
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("memory_gb = 16", "memory_gb = 0.1", "no device can hold stage 0: it needs 0.171 GB"),
        ("bandwidth_mbps = 404", "bandwidth_mbps = -404", "= -404 in [[links]] Oregon - Frankfurt"),
        ("upload_mbps = 40", "upload_mbps = 0", "device 'laptop-0' cannot be reached: its upload is 0"),
        (
            'between = ["Oregon", "Frankfurt"]',
            'between = ["Oregon", "Oregon"]',
            "'Oregon' cannot be reached from 'Frankfurt'",
        ),
    ],
)
def test_what_cannot_be_planned_is_said(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str], old: str, new: str, words: str
) -> None:
    text = DEVICES.replace("memory_gb = 8", "memory_gb = 0.1")
    assert old in text
    files[1].write_text(text.replace(old, new, 1))
    assert planned(files) == Exit.SETUP
    assert words in capsys.readouterr().err


def test_fewer_devices_than_stages_are_refused(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    files[1].write_text('[[devices]]\nname = "a"\nregion = "Oslo"\ntflops = 1\n')
    assert planned(files) == Exit.SETUP
    assert "1 devices cannot serve 3 stages: each stage needs at least one" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_said(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    files[1].unlink()
    assert planned(files) == Exit.SETUP
    assert f"cannot read {files[1]}" in capsys.readouterr().err


def test_the_audit_model_is_refused(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    from swarm.run import counting_run

    files[0].write_text(counting_run().to_toml())
    assert planned(files) == Exit.SETUP
    assert 'model.kind = "counting" computes nothing to plan for' in capsys.readouterr().err
