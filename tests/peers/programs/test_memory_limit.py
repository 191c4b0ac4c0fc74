"""--max-vram: what a stage needs is told from the manifest, and what does not fit is refused with numbers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peers.device import ComputeDevice
from peers.options import PeerOptions
from peers.owner.memory_limit import MEMORY_SHARE, Needs, needs_of, weight_bytes
from peers.programs.roles import Peer
from swarm.errors import SetupError
from swarm.ids import Microbatch, Stage
from swarm.manifest import IslandsSpec, OptimizerSpec, Run, demo_run
from swarm.model.gradient_sum import Gradients, GradientSums
from swarm.model.layout import stage_layout
from swarm.model.stage import StageCompute, foretold_bytes
from swarm.plan.network import MEMORY_SHARE as PLANNED
from tests.model.chain import tiny_run
from tests.peers.network import CalmNetwork

MIB = 1 << 20


def device_of(name: str, total: int) -> ComputeDevice:
    return ComputeDevice(name=name, model="", free_bytes=total, total_bytes=total)


def held_bytes(compute: StageCompute) -> int:
    """Of all vectors that a stage has on its device, with the sums of the steps that are open at once."""
    for t in range(1 + compute.run.delayed_updates):
        compute.sums.begin(t)
    vectors = [*compute.state._weights, *compute.state._low, *compute.sums._sums.values()]
    return sum(vector.nbytes for vector in (*vectors, *compute.state._besides.values()))


@pytest.mark.parametrize(
    "run",
    [
        demo_run(stages=2), replace(demo_run(stages=2), delayed_updates=True), tiny_run(),
        replace(demo_run(stages=2), dtype="bfloat16"), replace(demo_run(stages=2), exact_sums=False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stage", [0, 1])
def test_what_a_stage_needs_is_what_it_holds_and_one_vector_of_gradients(run: Run, stage: int) -> None:
    compute = StageCompute(run, stage)
    gradients = compute.layout.numel * (8 if run.dtype == "float64" else 4)
    assert needs_of(run, stage).fixed == held_bytes(compute) + gradients


@pytest.mark.parametrize("host_sums", [False, True])
@pytest.mark.parametrize(
    "optimizer",
    [
        OptimizerSpec(lr=1.0), OptimizerSpec(lr=1.0, moments="bfloat16"),
        OptimizerSpec(name="sgd", lr=1.0),
        OptimizerSpec(name="sgd", lr=1.0, momentum=0.5, moments="bfloat16"),
    ],
)  # fmt: skip
def test_bytes_a_weight_are_those_of_a_stage(optimizer: OptimizerSpec, host_sums: bool) -> None:
    run = replace(demo_run(stages=2), optimizer=optimizer)
    numel = StageCompute(run, 1).layout.numel
    assert needs_of(run, 1, host_sums=host_sums).fixed == numel * weight_bytes(optimizer, host_sums=host_sums)


def test_sums_may_be_in_the_machine_s_memory_and_are_the_same() -> None:
    run = tiny_run(dtype="float32", codec={"reduce": "rounded16"})
    compute = StageCompute(run, 1)
    there = SimpleNamespace(device=torch.device("meta"), dropped=compute.state.dropped)
    terms = {name: torch.full(span.shape, 0.25) for name, span in compute.layout.terms.items()}
    found = Gradients(mb=Microbatch(0, 0), loads=0, terms=terms, terms_wanted=True)
    sums = []
    for state, on_host in ((compute.state, False), (there, True)):
        sums.append(GradientSums(run, 1, compute.layout, state, on_host=on_host))  # type: ignore[arg-type]
        sums[-1].begin(0)
        sums[-1].add(found)
    assert sums[1].of(0).device.type == "cpu" and sums[1].of(0).any()
    assert torch.equal(sums[0].of(0), sums[1].of(0))
    elsewhere = StageCompute(run, 1, host_sums=True).snapshot(0)
    assert elsewhere._host_sums and elsewhere.sums.of(0).device.type == "cpu"


@pytest.mark.parametrize(("device", "expected"), [("cuda", True), ("cpu", False)])
def test_host_sums_are_for_devices_with_a_memory_of_their_own(
    device: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []

    def make(*_: object, **given: Any) -> SimpleNamespace:
        made.append(given)
        return SimpleNamespace(use_lock=lambda _: None)

    monkeypatch.setattr("swarm.model.stage.StageCompute", make)
    monkeypatch.setattr("peers.device.describe", lambda name: device_of(name, 1000 * MIB))
    peer = Peer(PeerOptions(run="5a", join=(), host_sums=True, max_inflight=4), emit=lambda _: None)
    peer._build(demo_run(stages=2), 1, device)
    assert made[0]["host_sums"] is expected
    each, numel = (
        weight_bytes(demo_run().optimizer),
        stage_layout(demo_run(stages=2), 0).numel,
    )  # the larger one
    limited = Peer(
        PeerOptions(run="5a", join=(), host_sums=True, max_vram=(each - 4) * numel), emit=lambda _: None
    )
    monkeypatch.setattr("swarm.model.stage.foretold_bytes", lambda *_: 0)
    assert (0 in limited._fitting(demo_run(stages=2), [0, 1], device)) is expected


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_a_stage_that_is_larger_than_a_card_is_refused_with_advice(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = demo_run(stages=2)
    least = [needs_of(run, stage).least for stage in range(2)]
    sizes = {"card": min(least)}
    monkeypatch.setattr("peers.device.describe", lambda name: device_of(name, sizes["card"]))
    computes = SimpleNamespace(use_lock=lambda _: None)
    monkeypatch.setattr("swarm.model.stage.StageCompute", lambda *_, **__: computes)
    peer = Peer(PeerOptions(run="5a", join=(), max_inflight=4), emit=lambda _: None)
    large, small = least.index(max(least)), least.index(min(least))
    with pytest.raises(
        SetupError,
        match=rf"stage {large} needs .*, and {device} has .* over several devices: take another --stage, "
        r"or have .* \(model\.stages\); swarm peer --device all serves one with each GPU",
    ):
        peer._build(run, large, device)
    assert peer._build(run, small, device)[1] == 4
    assert peer._fitting(run, range(2), device) == [small]
    with pytest.raises(
        SetupError, match=rf"no stage .*: the smallest needs .*, and .* of {device} are given"
    ):
        peer._fitting(run, [large], device)
    sizes["card"] = max(least)
    assert peer._fitting(run, range(2), device) == [0, 1]


@pytest.mark.virtual_time
async def test_a_peer_chooses_among_the_stages_that_fit_and_is_moved_only_if_all_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("peers.programs.roles.allowed_stages", lambda node, cells: list(cells))

    async def chosen(run: Run, **given: Any) -> tuple[Stage, bool]:
        network = CalmNetwork()
        new = network.join("new")
        node = SimpleNamespace(peer_id=new.peer_id, directory=new.directory, addresses=())
        peer = Peer(PeerOptions(run=run.id, join=(), **given), emit=lambda _: None)
        stage = await peer._choose_stage(node, run, "cpu")  # type: ignore[arg-type]
        await network.close()
        return stage, peer._movable

    run = demo_run(stages=3)
    sizes = [needs_of(run, s, microbatch=foretold_bytes(run, s)).least for s in range(3)]
    assert sizes[1] < sizes[0] < sizes[2]
    assert await chosen(run) == (0, True)
    assert await chosen(run, max_vram=sizes[0] - 1) == (1, False)
    assert await chosen(run, max_vram=sizes[0]) == (0, False)
    assert await chosen(run, max_vram=sizes[2]) == (0, True)
    assert await chosen(run, max_vram=sizes[0] - 1, recompute=True) == (0, True), "microbatches need less"
    islands = replace(run, islands=IslandsSpec(count=2, local_steps=2), checkpoint_every=0)
    assert await chosen(islands, max_vram=needs_of(islands, 1).least, recompute=True) == (1, False)
    with pytest.raises(SetupError, match="no stage that this peer may serve fits: the smallest needs"):
        await chosen(run, max_vram=sizes[1] - 1)


def test_a_peer_that_recomputes_layers_admits_more_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peers.device.describe", lambda name: device_of(name, 64 * MIB))
    run = tiny_run(model={"layers": 12, "hidden": 64}, batch={"microbatches_per_step": 8192})
    admitted: list[int] = []
    for given in ({}, {"recompute_layers": True}, {"recompute": True}):
        peer = Peer(PeerOptions(run="5a", join=(), **given), emit=lambda _: None)
        admitted.append(peer._build(run, 1, "cpu")[1])
    plain, layers, stage = admitted
    assert 6 * plain < layers < stage


def test_what_does_not_fit_is_refused_with_numbers() -> None:
    needs = Needs(stage=1, fixed=600 * MIB)
    needs.check(600 * MIB)
    needs.check(None)
    with pytest.raises(SetupError) as refused:
        needs.check(512 * MIB)
    assert refused.value.text == (
        "stage 1 needs 0.59 GiB (0.59 GiB for weights, optimizer and sums), and --max-vram gives 0.50 GiB: "
        "give more, or take another --stage"
    )
    needs = Needs(stage=1, fixed=20 * MIB, microbatch=8 * MIB)
    needs.check(36 * MIB)
    with pytest.raises(SetupError, match=r"16\.00 MiB to compute one microbatch.* or --recompute"):
        needs.check(35 * MIB)


def test_as_many_microbatches_are_admitted_as_fit() -> None:
    needs = Needs(stage=0, fixed=100 * MIB, microbatch=10 * MIB, boundary=MIB, open=96)
    host = 10_000 * MIB

    def fits(free: int, most: int | None = None, host_free: int = host) -> int:
        return needs.inflight(free, most, host_free=host_free)

    assert fits(10_000 * MIB) == 96, "no more are open"
    assert fits(200 * MIB) == 10
    assert fits(1000 * MIB, 200 * MIB) == 5
    assert fits(60 * MIB, 200 * MIB) == 3, "others have the rest of the device"
    assert fits(0, 120 * MIB) == 1
    assert fits(1000 * MIB, host_free=40 * MIB) == 20, "what they send is kept in the machine's memory"


def test_what_a_microbatch_sends_and_receives_is_reckoned_with_its_gradients() -> None:
    run = demo_run(stages=3, codec="none")
    (first, middle, last), M = (needs_of(run, stage) for stage in range(3)), run.M
    rows, length = run.batch.microbatch_size, run.data.sequence_length
    hidden, tokens = 4 * rows * length * run.built_in.hidden, rows * (length + 1)
    assert middle.boundary == 4 * hidden + 2 * tokens
    assert last.boundary == 2 * hidden + tokens
    assert first.boundary == last.boundary + tokens
    assert (middle.open, needs_of(replace(run, delayed_updates=True), 1).open) == (M, 2 * M)


def test_planner_and_peers_reckon_with_the_same_share_of_the_memory() -> None:
    assert MEMORY_SHARE == PLANNED


@pytest.mark.parametrize("method", ["__init__", "saved_bytes"])
def test_a_device_that_another_program_fills_is_a_clear_error(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(StageCompute, method, out_of_memory)
    peer = Peer(PeerOptions(run="5a", join=()), emit=lambda _: None)
    with pytest.raises(SetupError, match="stage 1 does not fit on cpu now: CUDA out of memory"):
        peer._build(demo_run(stages=2), 1, "cpu")
