"""`swarm simulate`: from files to a report, and every mistake in them said."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from peers.cli import Exit, main
from peers.owner.memory_limit import needs_of
from peers.programs.descriptions import job_of
from peers.programs.simulate import render, simulate_cells, simulate_run
from peers.sim.throughput.engine import divided
from peers.sim.throughput.members import Trace, read_trace
from swarm.errors import SetupError
from swarm.manifest import IslandsSpec, audit_run, demo_run
from swarm.model.gpt import layer_flops
from swarm.model.layout import stage_layout
from swarm.model.stage import StageCompute
from swarm.plan.network import read_devices
from swarm.policy.rebalance import Move
from tests.peers.runs.test_brought import resnet_run

DEVICES = """\
[defaults]
tflops = 0.01
memory_gb = 8

[[devices]]
name = "gpu"
region = "Oslo"
count = {count}

[inside]
latency_ms = 10
bandwidth_mbps = 500
"""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    texts = {
        "manifest": demo_run(stages=2).to_toml(),
        "devices": DEVICES.format(count=4),
        "trace": "0,4\n100,3\n200,1\n300,4\n600,4\n",
    }
    found = {name: tmp_path / f"{name}.txt" for name in texts}
    for name, text in texts.items():
        found[name].write_text(text, encoding="utf-8")
    return found


def simulate(files: dict[str, Path], *more: str, trace: bool = False) -> int:
    argv = ["simulate", "--manifest", str(files["manifest"]), "--devices", str(files["devices"])]
    return main([*argv, *(["--trace", str(files["trace"])] if trace else []), *more])


def test_a_run_is_told_to_people(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(files, "--hours", "0.05") == Exit.OK
    shown = capsys.readouterr().out
    assert "2 stages, 8 microbatches a step, 4 devices in 1 region" in shown
    assert "in 0:03:00:" in shown and "tokens/s" in shown and shown.count("█") > 100
    assert "4 joined, 0 vanished" in shown and "0 moves" in shown


@pytest.mark.slow
def test_with_a_trace_programs_get_one_object_and_one_seed_gives_it_again(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    told = []
    files["devices"].write_text(DEVICES.format(count=4).replace("0.01", "0.003"))
    for seed in ("1", "1", "2"):
        assert simulate(files, "--json", "--seed", seed, trace=True) == Exit.OK
        told.append(json.loads(capsys.readouterr().out))
    assert told[0] == told[1] != told[2]
    assert told[0]["seconds"] == 600.0 and told[0]["deaths"] == 3 and told[0]["joins"] == 7
    assert told[0]["steps"] > 10 and len(told[0]["utilisation"]) == 2 and len(told[0]["over_time"]) == 20
    answered = sum(rate * 30.0 for _, rate in told[0]["over_time"])
    assert answered >= told[0]["steps"] * 8 - 1e-6


def test_islands_are_simulated_as_they_are_planned(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = replace(demo_run(stages=2), islands=IslandsSpec(count=2, local_steps=9))
    files["manifest"].write_text(run.to_toml())
    files["devices"].write_text(DEVICES.format(count=4).replace("latency_ms = 10", "latency_ms = 0"))
    plan = files["manifest"].with_name("plan.json")
    argv = ["--manifest", str(files["manifest"]), "--devices", str(files["devices"])]
    assert main(["plan", *argv, "--budget", "0", "--json"]) == Exit.OK
    plan.write_text(planned := capsys.readouterr().out)
    predicted = json.loads(planned)
    assert simulate(files, "--layout", str(plan), "--json") == Exit.OK
    told = json.loads(capsys.readouterr().out)
    assert told["step_s"] == pytest.approx(max(told["inner_step_s"]) + told["meeting_s"] / 9)
    assert told["step_s"] == pytest.approx(predicted["step_s"], rel=0.1)
    assert told["meeting_bytes"] * 9 == pytest.approx(predicted["meeting_bytes"])
    assert told["tokens_per_s"] == pytest.approx(run.tokens_per_step / told["step_s"])
    assert told["reduce_bytes"] == 0.0 and 0.2 < min(told["utilisation"]) <= max(told["utilisation"]) < 1.0
    assert simulate(files) == Exit.OK
    shown = capsys.readouterr().out
    assert "2 islands of 2 stages, 4 microbatches a step, on 4 devices in 1 region" in shown
    assert "a meeting every 9 steps takes" in shown and "for its part of a meeting" in shown
    assert simulate(files, "--hours", "0.0001") == Exit.OK
    assert "took no step in 0:00:00: --hours simulates for longer" in capsys.readouterr().out


def test_an_island_that_is_slow_holds_up_the_others() -> None:
    run = replace(demo_run(stages=2), islands=IslandsSpec(count=2, local_steps=9))
    network = read_devices(DEVICES.format(count=4))
    devices = (*network.devices[:3], replace(network.devices[3], flops_per_s=1e9))
    found = simulate_cells(run, replace(network, devices=devices), end_s=6000.0, seed=0, layout=[0, 1, 2, 3])
    fast_s, slow_s = found.inner_s
    assert slow_s > 5 * fast_s and found.step_s == slow_s + found.meeting_s / 9
    assert 0.45 < found.utilisation[1] < 0.55  # one of two devices works all the time


@pytest.mark.slow
def test_islands_whose_devices_vanish_wait_for_the_slowest_and_go_back_to_a_meeting(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    files["manifest"].write_text(
        replace(demo_run(stages=2), islands=IslandsSpec(count=2, local_steps=9)).to_toml()
    )
    files["devices"].write_text(DEVICES.format(count=8).replace("0.01", "0.003"))
    assert simulate(files, "--json", "--hours", "0.05") == Exit.OK
    calm = json.loads(capsys.readouterr().out)
    files["trace"].write_text("0,8\n120,4\n240,8\n360,2\n420,8\n600,8\n")
    assert simulate(files, "--json", trace=True) == Exit.OK
    told = json.loads(capsys.readouterr().out)
    assert told["deaths"] == 4 + 6 and told["joins"] == 8 + 4 + 6
    assert told["went_back"] > 0, "with a device an island has no second stage"
    assert told["step_s"] > 1.1 * calm["step_s"]
    assert simulate(files, trace=True) == Exit.OK
    assert "10 devices vanished; an island went back to its last meeting" in capsys.readouterr().out


def test_devices_that_are_up_are_divided_among_islands_by_their_size() -> None:
    trace = Trace((0.0, 1.0, 2.0, 3.0), (10, 7, 1, 0), 4.0)
    found = divided(trace, [5, 3, 2])
    assert [one.counts for one in found] == [(5, 4, 1, 0), (3, 2, 0, 0), (2, 1, 0, 0)]
    assert all(one.times_s == trace.times_s and one.end_s == 4.0 for one in found)


def test_what_cannot_be_simulated_of_islands_is_refused(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    files["manifest"].write_text(
        replace(demo_run(stages=2), islands=IslandsSpec(count=2, local_steps=9)).to_toml()
    )
    trace = files["trace"].read_text()
    files["trace"].write_text("0,4,here\n60,4,here\n")
    assert simulate(files, trace=True) == Exit.SETUP
    assert "a trace of regions does not say which island lost a device" in capsys.readouterr().err
    files["trace"].write_text("0,99\n60,4\n")
    assert simulate(files, trace=True) == Exit.SETUP
    assert re.search(
        r"the trace has 99 devices up at once, but only \d+ are on islands, as swarm plan has it: lower",
        capsys.readouterr().err,
    )
    files["trace"].write_text("0,0\n60,0\n")
    assert simulate(files, "--json", trace=True) == Exit.OK
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (told["step_s"], told["tokens_per_s"], told["utilisation"]) == (None, 0.0, [0.0, 0.0])
    files["trace"].write_text(trace)
    plan = files["manifest"].with_name("plan.json")
    plan.write_text('{"stages": [["gpu-0"], ["gpu-1"]]}')
    assert simulate(files, "--layout", str(plan)) == Exit.SETUP
    assert "has a plan of 2 cells; the run has 4" in capsys.readouterr().err
    files["devices"].write_text(DEVICES.format(count=3))
    assert simulate(files) == Exit.SETUP
    assert "1 missing, so no peer serves cell 3 (island 1, stage 1)" in capsys.readouterr().err


def test_how_far_a_simulation_is_stands_on_standard_error(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An hour of ten devices took three minutes without a word."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert simulate(files, "--hours", "0.005") == Exit.OK
    said = capsys.readouterr()
    assert f"simulating [#{19 * '.'}] 1 of 18 virtual seconds" in said.err
    assert "simulating" not in said.out


def test_long_lists_of_moves_are_cut() -> None:
    run, network = demo_run(stages=2), read_devices(DEVICES.format(count=4))
    report = simulate_run(run, network, None, end_s=30.0, seed=0)
    report.moves = [(60.0 * i, Move(f"p{i}", 0, 1, "needed there")) for i in range(7)]
    shown = render(report, run, network)
    assert "7 moves:" in shown and "0:04:00  p4: stage 0 → 1; needed there" in shown
    assert "p5" not in shown and "… and 2 more (--json has all)" in shown


def test_the_job_of_a_run_is_what_its_stages_do_and_send() -> None:
    run = demo_run(stages=3, codec="none")
    job = job_of(run)
    tokens = run.batch.microbatch_size * run.data.sequence_length
    block, head = layer_flops(run.model, run.data.sequence_length)
    assert sum(job.forward_flops) == pytest.approx(2 * tokens * (run.built_in.layers * block + head))
    ids = tokens + run.batch.microbatch_size  # one more of each sample, for the last label
    assert job.forward_bytes == (tokens * run.built_in.hidden * 4 + ids,) * 2
    assert job.backward_bytes == (tokens * run.built_in.hidden * 4,) * 2
    assert run.adds_exactly  # 5.25 bytes of an int64 go, a float32 comes back
    assert job.gradient_bytes[1] == (5.25 + 4) / 2 * stage_layout(run, 1).numel
    # Adam: three float32.
    assert job.state_bytes[1] == pytest.approx(12 * stage_layout(run, 1).numel, rel=0.01)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_reckoned_as_the_peers_of_a_run_do(dtype: str) -> None:
    run = replace(demo_run(stages=3), dtype=dtype)
    job = job_of(run)
    for stage in range(3):
        needs = needs_of(run, stage, microbatch=StageCompute(run, stage, "cpu").saved_bytes())
        assert job.least_bytes(stage) == pytest.approx(needs.least, rel=0.01)


@pytest.mark.slow
def test_the_work_of_a_model_that_is_brought_follows_from_its_operators() -> None:
    run = resnet_run()
    job = job_of(run)
    assert min(job.forward_flops) > 0 and min(job.forward_bytes) > 0
    for stage in range(run.S):
        needs = needs_of(run, stage, microbatch=StageCompute(run, stage, "cpu").saved_bytes())
        assert job.least_bytes(stage) == pytest.approx(needs.least, rel=0.02)


def test_a_plan_is_simulated_as_it_is(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Of four devices the plan has two idle: those vanish from the simulation, too."""
    plan = files["manifest"].with_name("plan.json")
    plan.write_text(json.dumps({"stages": [["gpu-3"], ["gpu-0"]], "idle": ["gpu-1", "gpu-2"], "step_s": 1}))
    assert simulate(files, "--hours", "0.01", "--layout", str(plan)) == Exit.OK
    shown = capsys.readouterr().out
    assert "2 joined, 0 vanished" in shown and "what limits it: stage 0's compute" in shown
    assert simulate(files, "--hours", "0.01", "--layout", str(plan), "--json", trace=True) == Exit.OK
    assert json.loads(capsys.readouterr().out)["joins"] == 4


def test_a_run_without_a_step_is_told_what_limits_it(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    files["devices"].write_text(DEVICES.format(count=4).replace("500", "0.01"), encoding="utf-8")
    assert simulate(files, "--hours", "0.01") == Exit.OK
    shown = capsys.readouterr().out
    assert "0 steps in" in shown
    assert re.search(
        r"a step is predicted to take [\d.e+]+ s, longer than all of this; what limits it", shown
    )


@pytest.mark.slow
def test_stages_that_stood_empty_are_named(files: dict[str, Path]) -> None:
    run, network = demo_run(stages=2), read_devices(DEVICES.format(count=4))
    report = simulate_run(run, network, read_trace("0,4\n100,1\n400,4\n600,4\n"), end_s=600.0, seed=0)
    assert max(report.empty_s) >= 300.0 and report.waited_s >= max(report.empty_s)
    lost = report.empty_s.index(max(report.empty_s))
    assert f"stage {lost} had no peer for 0:05:" in render(report, run, network)


def test_when_a_region_dies_its_devices_are_the_ones_that_go() -> None:
    """Two cities with a peer in each stage: without one of them the run goes on."""
    more = (
        DEVICES.format(count=2)
        + """
[[devices]]
name = "far"
region = "Rome"
count = 2

[[links]]
between = ["Oslo", "Rome"]
latency_ms = 30
bandwidth_mbps = 100
"""
    )
    run, network = demo_run(stages=2), read_devices(more)
    trace = read_trace("0,2,Oslo\n0,2,Rome\n100,0,Rome\n300,0,Rome\n")
    report = simulate_run(run, network, trace, end_s=300.0, seed=0, layout=[0, 1, 0, 1])
    assert report.deaths == 2 and report.waited_s == 0.0 and report.version > 10


# --- mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("trace", "0,1\nnever,2\n", "trace.txt, line 2: 'never,2' is not `seconds,count`"),
        ("layout", "[1]", "layout.txt is not what swarm plan --json prints: Expected `object`"),
        (
            "layout",
            f'{{"x": {"[" * 100_000}',
            "layout.txt is not what swarm plan --json prints: maximum recur",
        ),
        ("layout", '{"stages": [[]]}', "layout.txt has a plan of 1 stages; the run has 2"),
        ("layout", '{"stages": [["gpu-0"], ["gpu-9"]]}', "no device is called 'gpu-9'"),
        ("layout", '{"stages": [["gpu-0"], ["gpu-0"]]}', "device 'gpu-0' is in stages 0 and 1"),
        ("trace", '{"data": [1]}', "trace.txt: Object missing required field `metadata`"),
        ("trace", "0,4\n", "trace.txt lasts for 0 s: its last line says when it ends"),
        ("trace", "0,5\n9,0\n", "the trace has 5 devices up at once, but only 4 are described"),
        ("trace", "0,5,Oslo\n9,0,Oslo\n", "5 devices up at once in 'Oslo', but only 4 are described"),
        ("trace", "0,1,Olso\n9,0,Olso\n", "names 'Olso', where no device is (did you mean Oslo?)"),
        ("devices", DEVICES.format(count=1), "1 devices cannot serve 2 stages: each stage needs at least"),
        ("devices", DEVICES.format(count=4).replace("8", "0.001"), "no device can hold stage 0: it needs"),
        ("devices", "[[devices]]\n", "devices.txt: name is missing in [[devices]] 1"),
        ("manifest", "no toml at all", "run"),
    ],
)
def test_a_file_that_cannot_be_is_refused(
    files: dict[str, Path], name: str, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files[name] = files["trace"].with_name(f"{name}.txt")
    files[name].write_text(text, encoding="utf-8")
    layout = ["--layout", str(files["layout"])] if name == "layout" else []
    assert simulate(files, *layout, trace=True) == Exit.SETUP
    shown = capsys.readouterr().err
    assert said in shown and len(shown.splitlines()) <= 4


def test_a_file_that_is_not_there_or_no_text_is_said(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    files["trace"].write_bytes(b"\xff\xfe\x00")
    assert simulate(files, trace=True) == Exit.SETUP
    assert "trace.txt cannot be read: it is not text in UTF-8" in capsys.readouterr().err
    files["devices"].unlink()
    assert simulate(files) == Exit.SETUP
    assert "devices.txt cannot be read: No such file" in capsys.readouterr().err


def test_the_audit_model_computes_nothing_to_simulate() -> None:
    with pytest.raises(SetupError, match=r'model\.kind = "counting": it computes nothing'):
        job_of(audit_run())


def test_a_trace_of_a_short_time_ends_the_simulation() -> None:
    run, network = demo_run(stages=2), read_devices(DEVICES.format(count=4))
    trace = read_trace("0,2\n45,4\n60,4")
    assert simulate_run(run, network, trace, end_s=3600.0, seed=0).end_s == 60.0
