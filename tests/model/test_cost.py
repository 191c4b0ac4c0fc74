"""What operators do and keep, from shapes; laws of devices; the memory of stages."""

from __future__ import annotations

import math
import random

import pytest
import torch

from peers.programs.calibrate import Calibration, calls
from swarm.errors import SetupError
from swarm.ids import Microbatch
from swarm.model.graph.ir import Value
from swarm.model.graph.stage_module import cut
from swarm.model.graph.trace import Traced, trace
from swarm.model.layout import Holding, holding_of
from swarm.model.stage import StageCompute
from swarm.partitioner.cost import DeviceModel, Law, Sample, fit
from swarm.partitioner.flops import KINDS, Work, kind_of, operations, shared_memory, work, works
from swarm.partitioner.memory import Kept, MemoryLine
from swarm.partitioner.search import Place, judge
from swarm.partitioner.segments import Facts, WireTerms
from tests.model import zoo
from tests.model.chain import tiny_run
from tests.model.graphs import Draft, device


def values(*shapes: tuple[int, ...]) -> list[Value]:
    return [Value(name="", shape=shape, dtype="float32", differentiable=True) for shape in shapes]


@pytest.mark.parametrize(
    ("target", "inputs", "weights", "output", "flops"),
    [
        ("aten.linear.default", [(2, 3, 5)], [(7, 5), (7,)], (2, 3, 7), 2 * 2 * 3 * 5 * 7),
        ("aten.addmm.default", [(6, 5)], [(7,), (5, 7)], (6, 7), 2 * 6 * 5 * 7),
        ("aten.bmm.default", [(4, 6, 5), (4, 5, 7)], [], (4, 6, 7), 2 * 4 * 6 * 5 * 7),
        ("aten.matmul.default", [(2, 3, 6, 5), (2, 3, 5, 6)], [], (2, 3, 6, 6), 2 * 6 * 6 * 5 * 6),
        ("aten.matmul.default", [(2, 6, 5)], [(5, 7)], (2, 6, 7), 2 * 12 * 5 * 7),
        ("aten.mm.default", [(6, 6)], [], (6, 6), 2 * 6 * 6 * 6),  # by itself
        ("aten.conv2d.default", [(2, 4, 9, 9)], [(6, 2, 3, 3)], (2, 6, 9, 9), 2 * 2 * 6 * 81 * 2 * 9),
        ("aten.conv_transpose2d.input", [(2, 4, 5, 5)], [(4, 3, 2, 2)], (2, 3, 10, 10), 2 * 2 * 4 * 25 * 12),
        ("aten.convolution.default", [(2, 4, 5, 5)], [(4, 4, 2, 2)], (2, 4, 10, 10), 2 * 2 * 4 * 25 * 16),
        ("aten.scaled_dot_product_attention.default", [(2, 3, 8, 4)] * 3, [], (2, 3, 8, 4), 4 * 6 * 64 * 4),
        ("aten.add.Tensor", [(3, 4), (4,)], [], (3, 4), 12),
        ("aten.no_such_call.default", [(3, 4)], [], (3,), 12),
    ],
)  # fmt: skip
def test_operations_follow_from_shapes(
    target: str,
    inputs: list[tuple[int, ...]],
    weights: list[tuple[int, ...]],
    output: tuple[int, ...],
    flops: int,
) -> None:
    found = operations(kind_of(target), values(*inputs), values(*weights), values(output))
    assert found == pytest.approx(flops)


def test_a_backward_does_what_is_asked_of_it() -> None:
    x, w, y = values((4, 5), (7, 5), (4, 7))
    both = work("linear", [x], [w], [y])
    assert both.backward_flops == 2 * both.flops and both.backward_weight_bytes == w.nbytes
    tokens = Value(name="", shape=(4, 5), dtype="float32", differentiable=False)
    assert work("linear", [tokens], [w], [y]).backward_flops == both.flops
    plain = Value(name="", shape=(4, 7), dtype="float32", differentiable=False)
    nothing = work("linear", [tokens], [], [plain])
    assert nothing.backward_flops == nothing.backward_bytes == nothing.backward_calls == 0


def test_views_cost_nothing_and_a_reshape_copies_what_was_turned() -> None:
    draft = Draft(x=4).op("a", ["x"], 12, weight=1)
    draft.op("flat", ["a"], 12, target="aten.reshape.default")
    draft.op("turned", ["flat"], 12, target="aten.transpose.int")
    graph = draft.op("copied", ["turned"], 12, target="aten.reshape.default").graph("copied")
    root, kinds = shared_memory(graph)
    assert kinds == ["other", "view", "view", "copy"]
    assert root["turned"] == "a" and root["copied"] == "copied"
    assert [one.calls for one in works(graph)] == [1, 0, 0, 1]


def test_a_value_with_several_readers_has_its_gradients_added() -> None:
    draft = Draft(x=4).op("a", ["x"], 12, weight=1).op("b", ["a"], 3).op("c", ["a"], 3)
    found = works(draft.op("d", ["a", "b", "c"], 1).graph("d"))
    assert [one.sums_bytes for one in found] == [0, 3 * 48, 3 * 48, 0]  # of a: two additions
    law = {"add": Law(0, 0, 1.0, 0, (0, 0)), "other": Law(1.0, 0, 0, 0, (0, 0))}
    model = DeviceModel(law, {"other": Law(0, 0, 0, 0, (0, 0))})
    assert model.operator_s(found[0]) == (1.0, 0.0)
    assert model.operator_s(found[1]) == (1.0, 144.0)


def doing(kind: str, flops: float, moved: float) -> Work:
    """The same forward and backward."""
    return Work(
        kind=kind, flops=flops, bytes=moved, backward_flops=flops, backward_bytes=moved, backward_calls=1.0
    )  # fmt: skip


def test_a_fit_finds_the_law_behind_samples() -> None:
    law = Law(2e-6, 1e-11, 3e-10, 0.0, (1e-10, 0.0))
    dice = random.Random(1)
    samples = []
    for kind in ("add", "linear"):
        for _ in range(20):
            flops, moved = 10 ** dice.uniform(3, 9), 10 ** dice.uniform(3, 8)
            did = Work(
                kind=kind,
                flops=flops,
                bytes=moved,
                backward_flops=flops,
                backward_bytes=moved,
                backward_calls=1,
            )
            samples.append(Sample(did, law.seconds(flops, moved, 0.0), 2 * law.seconds(flops, moved, 0.0)))
    model = fit(samples)
    unseen = Work(
        kind="linear", flops=3e7, bytes=5e6, backward_flops=3e7, backward_bytes=5e6, backward_calls=1
    )
    forward_s = law.seconds(3e7, 5e6, 0.0)
    assert model.operator_s(unseen) == pytest.approx((forward_s, 2 * forward_s), rel=1e-6)
    # A kind that was not timed is taken for `add`, its backward for `mul` or, without that, for `add`.
    other = Work(kind="softmax", flops=3e7, bytes=5e6)
    assert model.operator_s(other)[0] == pytest.approx(forward_s, rel=1e-6)


def test_a_fit_needs_sound_times() -> None:
    did = Work(kind="add", flops=1.0, bytes=8.0)
    with pytest.raises(SetupError, match="a device model needs samples of `add`"):
        fit([Sample(Work(kind="mul", flops=1.0), 1.0, 1.0)])
    for seconds in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(SetupError, match=r"a call cannot take .* s: is the device's clock right\?"):
            fit([Sample(did, seconds, 1.0)])


def test_a_calibration_knows_every_kind() -> None:
    small = [call for call in calls() if sum(math.prod(shape) for shape in call.inputs) <= 1 << 13]
    calibration = Calibration(wanted=small)
    calibration.round()
    calibration.round()
    samples = calibration.samples()
    assert {call.target for call in small} >= {"aten.linear.default", "aten.cross_entropy_loss.default"}
    model = fit(samples)
    # Everything with a kind of its own can be timed; the whole list has them all.
    timed = {kind_of(call.target) for call in calls()}
    assert set(KINDS) - timed == {"view", "other", "where", "dropout"}
    assert set(model.forward) == {sample.work.kind for sample in samples} | {"other"}
    for laws in (model.forward, model.backward):
        for law in laws.values():
            assert law.seconds(1e6, 1e6, 1e6) >= law.overhead_s >= 0 and law.flop_s >= 0 and law.byte_s >= 0


# --- memory ---


def saved_by_torch(traced: Traced, inputs: tuple[torch.Tensor, ...]) -> int:
    """Bytes that autograd holds after a forward, without weights and inputs."""
    (piece,) = cut(traced, [0] * len(traced.graph.operators), seed=0)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*piece.parameters(), *piece.buffers(), *inputs)}
    held: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        alive.append(tensor)
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        piece(*inputs, mb=Microbatch(0, 0))
    return sum(held.values())


@pytest.mark.parametrize("name", ["gpt2", "llama", "unet"])
def test_what_is_kept_is_what_autograd_keeps(name: str) -> None:
    model, sample = zoo.MODELS[name]()
    traced = trace(model.train(), sample)
    kept = sum(Kept(traced.graph).saved)
    assert kept == pytest.approx(saved_by_torch(traced, sample), rel=0.12)


@pytest.mark.parametrize(
    ("target", "input_saved", "output_saved", "beside"),
    [
        ("aten.add.Tensor", False, False, 0),
        ("aten.gelu.default", True, False, 0),
        ("aten.relu.default", False, True, 0),
        ("aten.sigmoid.default", False, True, 0),
        ("aten.rms_norm.default", True, False, 48),
        ("aten.max_pool2d.default", True, False, 96),
        ("aten.cross_entropy_loss.default", False, False, 48),
        ("aten.upsample_nearest2d.vec", False, False, 0),
        ("aten.no_such_call.default", True, False, 0),
    ],
)
def test_what_one_call_keeps(target: str, input_saved: bool, output_saved: bool, beside: int) -> None:
    graph = Draft(x=2).op("a", ["x"], 12, weight=1).op("b", ["a"], 12, target=target).graph("b")
    kept = Kept(graph)
    assert kept.saved == [48 * input_saved, 48 * output_saved + beside]
    assert kept.beside == [0, beside]


def test_the_peak_of_a_chain_by_hand() -> None:
    draft = Draft(x=2).op("a", ["x"], 10, weight=3, target="aten.linear.default")
    draft.op("b", ["a"], 20, weight=5, target="aten.gelu.default")
    graph = draft.op("c", ["b"], 1, weight=1, target="aten.gelu.default").graph("c")
    facts = Facts(graph)

    def line(**given: float) -> MemoryLine:
        return MemoryLine(graph, facts.kept, facts.reads, facts.row, Holding(**given))  # type: ignore[arg-type]

    # Inputs 16 bytes. The last backward has b (80) and a (40) saved, the gradients of its weight (4), of its
    # output (4) twice (the caller holds it) and of b (80); then of b's weight (20), and so on.
    whole = line().peak(0)
    assert whole[2] == 16 + 40 + 80 + 4 + 80 + 0
    # Another microbatch waits with its input and what is saved of it.
    assert line(inflight=2).peak(0)[2] - whole[2] == 16 + 40 + 80
    assert (line(inflight=3).peak(0) >= line(inflight=2).peak(0)).all()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("delayed", [False, True])
def test_the_state_is_that_of_a_stage(optimizer: str, delayed: bool) -> None:
    run = tiny_run(dtype="float32", optimizer={"name": optimizer}, delayed_updates=delayed)
    compute = StageCompute(run, 0)
    for t in range(2 if delayed else 1):
        compute.sums.begin(t)
    sums = sum(compute.sums.of(t).nbytes for t in range(2 if delayed else 1))
    assert holding_of(run).state_bytes(compute.numel, 4) == compute.state.nbytes + sums


def test_memory_counts_state_once_for_what_operators_share() -> None:
    draft = Draft(x=1).op("a", ["x"], 1, weight=1000).op("b", ["a"], 1, shares="a.weight")
    graph = draft.op("c", ["b"], 1, weight=1).graph("c")
    both = judge(graph, (0, 0, 1), [Place(device=device())] * 2).memory_bytes
    apart = judge(graph, (0, 1, 1), [Place(device=device())] * 2).memory_bytes
    assert both[0] == pytest.approx(20_000, rel=0.25) and apart[1] == pytest.approx(20_000, rel=0.25)
    assert WireTerms(forward_bytes=1.0).of("float32", 10) == (10.0, 40.0)
