"""`swarm plan`: what it prints, and every refusal by its words."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
import pytest

from peers.cli import Exit, main
from peers.islands.planning import render as render_islands
from peers.programs.descriptions import job_of
from peers.programs.manifest import EXAMPLE as RUN
from peers.programs.plan import (
    WORTH,
    as_json,
    islands_view,
    load_run_with_stages,
    plan,
    plan_codecs,
    plan_view,
    render,
    run_plan,
    with_codecs,
)
from peers.programs.tool_options import PlanOptions
from swarm.codecs import PACKED
from swarm.errors import SetupError
from swarm.manifest import CodecSpec, CustomModelSpec, Run, demo_run, parse_run
from swarm.monitoring.health import Observation
from swarm.plan.network import Device, Network, read_devices
from swarm.plan.overlapped import IDLE, Overlap
from swarm.records import PeerRecord
from swarm.wire.messages import LedgerCounts, LinkStatus, PeerStatus
from tests.plan.documented import DEVICES

AT_ONCE = PlanOptions(seed=1, budget=0.0)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    run, devices = tmp_path / "run.toml", tmp_path / "devices.toml"
    run.write_text(RUN)
    devices.write_text(DEVICES)
    return run, devices


def planned(files: tuple[Path, Path], *more: str) -> int:
    return main(["plan", "--manifest", str(files[0]), "--devices", str(files[1]), "--budget", "0", *more])


def test_a_plan_names_every_device_once_and_is_no_worse_than_any_rule(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(files, "--json") == Exit.OK
    said = json.loads(capsys.readouterr().out)
    names = sorted(name for stage in said["stages"] for name in stage) + sorted(said["idle"])
    assert sorted(names) == sorted([f"v100-{i}" for i in range(8)] + ["laptop-0", "laptop-1"])
    assert len(said["stages"]) == 3 and all(said["stages"])
    assert said["step_s"] <= min(said["starts_s"].values())
    assert said["tokens_per_s"] == pytest.approx(16 * 8 * 256 / said["step_s"])
    assert said["limit"]
    assert sorted(said["in_flight"]) == sorted(set(names) - set(said["idle"]))


def test_a_plan_for_people_says_the_layout_and_the_limit(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(files) == Exit.OK
    said = capsys.readouterr().out
    assert "example: 3 stages, 16 microbatches a step, 10 devices in 2 regions" in said
    assert all(f"\nstage {stage}: " in said for stage in range(3))
    assert "a step takes about" in said and "what limits it: " in said


def test_a_plan_says_what_it_needs_in_flight_and_which_memory_cannot_hold_it(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(files) == Exit.OK
    said = capsys.readouterr().out
    assert re.search(r"this layout needs \d+ microbatches in flight on v100-\d, on others no more", said)
    assert "the memory of" not in said
    files[1].write_text(DEVICES.replace("memory_gb = 16", "memory_gb = 0.5"))
    assert planned(files) == Exit.OK
    said = capsys.readouterr().out
    assert re.search(r"the memory of v100-\d holds 1 of the \d+ microbatches that it needs in flight", said)


def test_slow_boundaries_are_given_codecs_that_the_manifest_takes(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    slow = DEVICES.replace("bandwidth_mbps = 2000", "bandwidth_mbps = 2")
    files[1].write_text(slow.replace("tflops = 30", "tflops = 900"))
    assert planned(files, "--keep", "0.01") == Exit.OK
    said = capsys.readouterr().out
    table = said.split("in [codec]:\n")[1].split("a device joins")[0]
    assert "topk:0.01+blockwise8" in table
    example, count = re.subn(r"(?s)\nforward = .*?\nbackward = [^\n]*", "\n" + table, RUN)
    assert count == 1
    run = parse_run(example)
    assert run.codec.forward != "blockwise8"
    assert planned(files, "--keep", "0.01", "--json") == Exit.OK
    found = json.loads(capsys.readouterr().out)
    assert [run.codec.forward_at(boundary) for boundary in range(2)] == found["codec_forward"]
    assert found["codec_backward"] == ["blockwise8"] * 2


def test_only_what_crosses_a_slow_boundary_changes_in_either_direction() -> None:
    """8 Mbit/s between stages 0 and 1, as much as anybody wants between 1 and 2."""
    run = replace(demo_run(stages=3), codec=CodecSpec.symmetric("none"))
    devices = tuple(Device(f"d{i}", i, 1e12) for i in range(3))
    lines = np.array([[math.inf, 8e6, 8e6], [8e6, math.inf, math.inf], [8e6, math.inf, math.inf]])
    network = Network(devices, ("a", "b", "c"), np.zeros((3, 3)), lines)
    found, _ = plan_codecs(run, network, job_of(run), [0, 1, 2], 0.05)
    assert (found.forward, found.backward) == (("topk:0.05+blockwise8", "none"), ("blockwise8", "none"))
    one = demo_run(stages=1)
    assert plan_codecs(one, network, job_of(one), [0, 0, 0], 0.05)[0].forward == ()


def test_what_slow_lines_carry_follows_from_the_codecs_of_the_manifest() -> None:
    job = job_of(replace(demo_run(stages=3), codec=CodecSpec(forward="bf16", backward="blockwise8")))
    assert job.packed is not None
    sent = {"forward_bytes": "bf16", "backward_bytes": "blockwise8", "gradient_bytes": "none"}
    for what, codec in sent.items():
        sizes = [PACKED[codec] * size for size in getattr(job, what)]
        assert getattr(job.packed, what) == pytest.approx(sizes)


def test_few_microbatches_wait_for_lines_that_many_hide() -> None:
    """Each transfer takes half of what the devices compute: with many in flight that costs nothing."""
    many = replace(demo_run(stages=3), codec=CodecSpec.symmetric("none"))
    many = replace(many, batch=replace(many.batch, microbatches_per_step=256))
    few = replace(many, batch=replace(many.batch, microbatches_per_step=4))
    job = job_of(few)
    bps = 8 * job.forward_bytes[0]  # one second a transfer
    devices = tuple(Device(f"d{i}", i, 3 * max(job.forward_flops) / 2) for i in range(3))
    network = Network(devices, ("a", "b", "c"), np.zeros((3, 3)), np.full((3, 3), bps))
    hidden, hidden_s = plan_codecs(many, network, job_of(many), [0, 1, 2], 0.01)
    assert hidden.forward == ("none", "none")
    waits, waits_s = plan_codecs(few, network, job, [0, 1, 2], 0.01)
    assert waits.forward == ("bf16", "bf16") or "blockwise8" in waits.forward[0]
    as_it_is = Overlap(network, job).predict([0, 1, 2]).total_s
    assert waits_s < as_it_is / (1 + WORTH)
    assert hidden_s == pytest.approx(Overlap(network, job_of(many)).predict([0, 1, 2]).total_s, rel=1e-3)


@pytest.mark.slow
def test_the_layout_is_searched_again_with_the_codecs_that_were_chosen() -> None:
    """A fast device behind a slow line: whole activations take longer to it than the near ones compute."""
    run = replace(demo_run(stages=2), codec=CodecSpec.symmetric("none"))
    job = job_of(run)
    flops = 3 * max(job.forward_flops)
    devices = (*(Device(f"near{i}", 0, flops) for i in range(2)), Device("far", 1, 100 * flops))
    bps = np.array([[1e9, 0.5e6], [0.5e6, 1e9]])
    network = Network(devices, ("a", "b"), np.zeros((2, 2)), bps)
    first = plan(run, network, job, PlanOptions(budget=0.2))
    assert first.plan.stage_of[2] == IDLE
    _, step_s = plan_codecs(run, network, job, first.plan.stage_of, 0.02)
    again = with_codecs(first, 0.02, PlanOptions(budget=0.2))
    assert again.codecs_step_s is not None and again.codecs_step_s < 0.8 * step_s
    assert IDLE not in again.plan.stage_of


def test_what_the_loss_of_a_region_does_is_said_and_can_be_planned_for(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    files[1].write_text(DEVICES.replace("count = 2", "count = 3"))
    assert planned(files) == Exit.OK
    assert "the loss of one region can leave a stage without a device" in capsys.readouterr().out
    assert planned(files, "--survive-region") == Exit.OK
    assert re.search(
        r"any one region may be lost: without Oregon, the worst, a step takes", capsys.readouterr().out
    )


def test_without_a_budget_the_plan_is_a_function_of_the_seed(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for _ in range(2):
        assert planned(files, "--json", "--seed", "3") == Exit.OK
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]


def test_a_plan_says_what_is_handed_over_in_memory_and_how_a_machine_is_started(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    machines = (
        '[[devices]]\nname = "host"\nregion = "Oslo"\ntflops = 20\nmemory_gb = 16\ncount = 2\ncards = 4\n'
    )
    slow = "upload_mbps = 50\n[inside]\nlatency_ms = 20\nbandwidth_mbps = 100\n"
    files[0].write_text(re.sub("stages = 3 ", "stages = 4 ", RUN))
    files[1].write_text(machines + slow)
    assert planned(files) == Exit.OK
    said = capsys.readouterr().out
    assert "host-0 hands over stages 0 to 3 in memory: swarm peer --device all --stages=0,1,2,3\n" in said
    assert "idle, since with them a step takes no less: host-1/0, host-1/1, host-1/2, host-1/3" in said
    assert (
        "8 devices in 1 region\n" in said and "region may be lost" not in said and "host-1 hands" not in said
    )
    assert planned(files, "--json") == Exit.OK
    assert json.loads(capsys.readouterr().out)["machines"] == {"host-0": [0, 1, 2, 3], "host-1": [IDLE] * 4}
    network = read_devices((machines + slow).replace("count = 2", "count = 1"))
    answer = plan_view(parse_run(files[0].read_text()), network, AT_ONCE)
    some = replace(answer.plan, stage_of=np.array([3, 0, IDLE, 1]))
    said = render(replace(answer, plan=some))
    assert "host-0 hands over stages 0 to 1 in memory: swarm peer --device all --stages=3,0,-,1\n" in said


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("memory_gb = 16", "memory_gb = 0.1", "no device can hold stage 0: it needs 0.426 GB"),
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


def test_where_the_number_of_stages_is_left_out_the_one_of_the_shortest_step_is_planned(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    network = read_devices(DEVICES.replace("count = 8", "count = 2"))
    alone = {
        n: plan_view(parse_run(RUN.replace("stages = 3", f"stages = {n}")), network, PlanOptions(budget=0.0))
        for n in (1, 2, 3, 4)
    }
    steps_s = {stages: answer.plan.step.total_s for stages, answer in alone.items()}
    files[0].write_text(RUN.replace("stages = 3", ""))
    run = load_run_with_stages(files[0], network, PlanOptions())
    assert min(steps_s, key=steps_s.__getitem__) == run.S
    assert ", ".join(f"{n}: {step_s:.3g} s" for n, step_s in steps_s.items()) in capsys.readouterr().err


def test_a_manifest_that_no_number_of_stages_mends_is_refused_in_its_words(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    files[0].write_text(RUN.replace("stages = 3", "").replace("seed = ", "sead = "))
    assert planned(files) == Exit.SETUP
    assert f"{files[0]}: sead = " in capsys.readouterr().err


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
    assert f"{files[1]} cannot be read: No such file" in capsys.readouterr().err


def test_the_audit_model_is_refused(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    from swarm.manifest import audit_run

    files[0].write_text(audit_run().to_toml())
    assert planned(files) == Exit.SETUP
    assert 'model.kind = "counting": it computes nothing' in capsys.readouterr().err


# --- islands ------------------------------------------------------------------------------------------------


LONGER = RUN.replace("steps = 1000", "steps = 1320").replace("every = 100", "every = 132")
ISLANDS = LONGER + "\n[islands]\ncount = 2\n"


def test_a_plan_for_islands_names_the_cell_of_each_device_and_what_a_meeting_takes(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    files[0].write_text(ISLANDS)
    assert planned(files) == Exit.OK
    said = capsys.readouterr().out
    assert "example: 2 islands of 3 stages, 8 microbatches a step, on 10 devices in 2 regions" in said
    assert all(f"\ncell {cell} (island {cell // 3}, stage {cell % 3}): " in said for cell in range(6))
    assert re.search(r"a step takes about .* s of meeting every 32 steps, in which [\d.]+ .B are sent", said)
    assert re.search(r"without islands: [\d.]+ s \([\d.]+ times as long\); that is another run", said)
    assert "swarm peer --stage CELL" in said
    assert planned(files, "--json") == Exit.OK
    told = json.loads(capsys.readouterr().out)
    used = [name for cell in told["stages"] for name in cell]
    assert len(told["stages"]) == 6 and all(told["stages"]) and len(used + told["idle"]) == 10
    assert told["step_s"] == pytest.approx(told["inner_step_s"] + told["meeting_s"] / 32)
    assert told["tokens_per_s"] == pytest.approx(16 * 8 * 256 / told["step_s"])


def test_islands_that_cannot_be_planned_are_refused_in_words(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    files[0].write_text(ISLANDS.replace("count = 2", "count = 4"))
    assert planned(files) == Exit.SETUP
    assert "2 missing, so no peer serves cell 10 (island 3, stage 1)" in capsys.readouterr().err
    files[0].write_text(ISLANDS)
    for option in (["--keep", "0.1"], ["--survive-region"]):
        assert planned(files, *option) == Exit.SETUP
        assert "--keep and --survive-region plan for runs without islands" in capsys.readouterr().err


def test_islands_are_proposed_where_they_are_much_faster(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(files) == Exit.OK
    assert "islands" not in capsys.readouterr().out
    files[1].write_text(DEVICES.replace("memory_gb = 16", "memory_gb = 16\nupload_mbps = 5"))
    assert planned(files) == Exit.OK
    said = re.search(
        r"islands seldom reduce: with \[islands\] count = (\d), local_steps = (\d+), codec = .blockwise8. a "
        r"step takes about ([\d.]+) s, ([\d.]+) times as fast; that is another run, with another loss .*; "
        r"steps, checkpoint_every and eval.every are then multiples of (\d+)",
        capsys.readouterr().out,
    )
    assert said is not None and float(said[4]) >= 1.5 and int(said[5]) == int(said[2]) + 1
    window = int(said[5])
    steps = -(-1000 // window) * window
    proposed = f"\n[islands]\ncount = {said[1]}\nlocal_steps = {said[2]}\ncodec = 'blockwise8'\n"
    files[0].write_text(LONGER.replace("1320", str(steps)).replace("every = 132", "every = 0") + proposed)
    assert planned(files) == Exit.OK
    assert f"a step takes about {said[3]} s" in capsys.readouterr().out
    files[0].write_text(RUN.replace("delayed_updates = false", "delayed_updates = true"))
    assert planned(files) == Exit.OK
    assert "this run cannot have them: islands.count = " in capsys.readouterr().out


# --- for the peers of a run ---------------------------------------------------------------------------------


ASKED = parse_run(RUN)

Peer: TypeAlias = tuple[PeerRecord, "PeerStatus | str"]
"""A record, and the answer or why there is none."""


def peer(name: str, stage: int, *links: LinkStatus, speed: float = 2.0, why: str = "") -> Peer:
    record = PeerRecord(peer=name, run="r", stage=stage, state="serving", version=3, speed=speed)
    status = PeerStatus(
        peer=name, stage=stage, version=3, state="serving", device="cpu", done=0, inflight=0, max_inflight=4,
        speed=speed, computed=9, coordinator=name, audit=LedgerCounts(), since=1.0, links=links,
    )  # fmt: skip
    return record, why or status


def line(to: str, rtt_s: float, bandwidth_bps: float) -> LinkStatus:
    return LinkStatus(peer=to, bytes_in=1, bytes_out=1, rtt_s=rtt_s, bandwidth_bps=bandwidth_bps)


def view_of(*peers: Peer) -> Observation:
    return Observation(
        at=10.0,
        records=tuple(record for record, _ in peers),
        statuses=tuple(said for _, said in peers if not isinstance(said, str)),
        silent={record.peer: said for record, said in peers if isinstance(said, str)},
    )


def test_the_peers_of_a_run_are_planned_for_with_what_they_measured() -> None:
    """Stage 0 lies in both cities: two peers that change places would save the far transfers."""
    near, far = (0.002, 1e9), (0.2, 2e6)
    view = view_of(
        peer("a0", 0, line("a1", *near), line("b0", *far)),
        peer("a1", 1, line("a2", *near)),
        peer("a2", 2, line("b2", *far)),
        peer("b0", 0, line("b1", *near), line("a0", *far)),
        peer("b1", 1, line("b2", *near), line("a1", *far)),
        peer("b2", 2, line("b0", *near)),
    )
    answer = plan_view(ASKED, view, PlanOptions(seed=1, budget=0.3))
    network, job = answer.network, answer.job
    assert [device.name for device in network.devices] == ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert len({d.region for d in network.devices[:3]}) == len({d.region for d in network.devices[3:]}) == 1
    assert network.devices[0].flops_per_s == pytest.approx(2.0 * 3 * job.forward_flops[0])
    assert answer.now_s is not None and answer.plan.step.total_s <= answer.now_s < math.inf
    said = render(answer)
    assert f"as the peers are now: {answer.now_s:.3g} s" in said
    assert "8 of 15 pairs of peers measured, the others estimated" in said


async def test_of_a_run_no_code_is_called_that_is_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its manifest is a stranger's, and names a function that is installed here."""
    run = replace(ASKED, model=CustomModelSpec(kind="code", source="no.such:function", stages=3))

    async def observed(*_: object) -> tuple[Run, Observation]:
        return run, view_of(peer("a", 0), peer("b", 1), peer("c", 2))

    monkeypatch.setattr("peers.programs.plan.observe", observed)
    with pytest.raises(SetupError, match=r"names code that is installed here: no\.such:function"):
        await run_plan(PlanOptions(run="f" * 32, join=("/ip4/1.2.3.4/tcp/5",)))
    allowed = PlanOptions(run="f" * 32, join=("/ip4/1.2.3.4/tcp/5",), allow_code=("no",))
    with pytest.raises(SetupError, match=r"^the model no\.such:function cannot be imported here"):
        await run_plan(allowed)


def test_strangers_that_nobody_asked_are_not_planned_for() -> None:
    """A search for thousands of machines takes hours, and anybody can announce them."""
    known = view_of(peer("a", 0), peer("b", 1), peer("c", 2), peer("asked", 2))
    crowd = view_of(*(peer(f"s{i}", i % 3) for i in range(9)))
    view = msgspec.structs.replace(
        known, records=(*known.records, *crowd.records), voice={"a": 20, "b": 20, "c": 20}
    )
    network = plan_view(ASKED, view, AT_ONCE).network
    assert [device.name for device in network.devices] == ["a", "b", "c", "asked"]


def test_who_has_left_or_has_no_stage_of_the_run_is_not_planned_for() -> None:
    """What had left was to serve a stage; and one record of a stage that there is not had it said that the
    run stands still."""
    for elsewhere in ({"state": "left"}, {"state": "paused"}, {"state": "keeping"}, {"stage": 77}):
        known = view_of(peer("a", 0), peer("b", 1), peer("c", 2), peer("x", 2))
        records = (*known.records[:3], msgspec.structs.replace(known.records[3], **elsewhere))
        answer = plan_view(ASKED, msgspec.structs.replace(known, records=records), AT_ONCE)
        assert [device.name for device in answer.network.devices] == ["a", "b", "c"]
        assert answer.now_s is not None and answer.now_s < math.inf


def test_a_run_with_an_empty_stage_is_planned_for_too() -> None:
    view = view_of(peer("a", 0), peer("b", 0), peer("c", 1), peer("gone", 2, why="no answer"))
    answer = plan_view(ASKED, view, AT_ONCE)
    assert answer.now_s == math.inf and len(answer.network.devices) == 3
    assert "as the peers are now, a stage has none: no step is taken" in render(answer)
    assert as_json(answer)["now_s"] is None


def test_the_peers_of_islands_are_planned_for_by_their_cells() -> None:
    run = parse_run(ISLANDS)
    peers = [peer(f"p{cell}", cell, line(f"p{(cell + 1) % 6}", 0.002, 1e9)) for cell in range(6)]
    answer = islands_view(run, view_of(*peers), AT_ONCE)
    said = render_islands(answer)
    assert answer.now_s is not None and f"as the peers are now: {answer.now_s:.3g} s" in said
    assert "6 of 15 pairs of peers measured" in said
    spare = view_of(*peers[:5], peer("p6", 0))
    assert "as the peers are now, a cell has none" in render_islands(islands_view(run, spare, AT_ONCE))


def test_without_peers_or_speeds_there_is_no_plan() -> None:
    with pytest.raises(SetupError, match="no peer serves the run now"):
        plan_view(ASKED, view_of(peer("gone", 2, why="no answer")), AT_ONCE)
    with pytest.raises(SetupError, match="none of 3 peers has measured its speed yet"):
        plan_view(ASKED, view_of(*(peer(f"p{i}", i, speed=0.0) for i in range(3))), AT_ONCE)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "give --manifest and --devices, to plan for machines that are described; or --run and --join"),
        (["--run", "0" * 32], "--run needs --join: the address of a bootstrap or of any peer of that run"),
        (["--run", "0" * 32, "--devices", "x"], "--run plans for the peers of a run: it goes without"),
    ],
)
def test_half_of_the_arguments_are_refused_with_what_to_add(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == Exit.SETUP
    assert text in capsys.readouterr().err
