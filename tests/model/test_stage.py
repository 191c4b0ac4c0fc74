"""One stage: its sums, its undo, its memory, its versions, and what it refuses."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch

from swarm.errors import NotReady, Refused, SetupError, Stale
from swarm.ids import Microbatch
from swarm.manifest import audit_run
from swarm.model import gradient_sum
from swarm.model.fixed_point import MOST_DROPPED, SCALE, add_exact
from swarm.model.gpt import layer_split
from swarm.model.gradient_sum import SumLost
from swarm.model.reductions import sqnorm, state_digest
from swarm.model.stage import StageCompute
from swarm.wire import whole_numbers
from swarm.wire.codec import Encoded, TensorMeta, encode
from tests.model.chain import Chain, backward, loss_backward, tiny_run, tokens_of
from tests.seeds import cases, some

MB = Microbatch(0, 0)


def accumulated(chain: Chain, *microbatches: Microbatch) -> list[torch.Tensor]:
    t = microbatches[0].t
    for stage in chain.stages:
        stage.sums.drop(t)
    chain.begin(t)
    for mb in microbatches:
        chain.microbatch(mb)
    return [stage.sums.of(t).clone() for stage in chain.stages]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# --- the same bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "dtype"),
    some(
        [*product(("none", "blockwise8"), ("float32", "bfloat16", "float64"))],
        quick=[("none", "float32"), ("blockwise8", "bfloat16")],
    ),
)
def test_the_same_microbatches_give_the_same_bits_also_when_recomputed(dtype: str, codec: str) -> None:
    run = tiny_run(
        dtype=dtype,
        model={"dropout": 0.2},
        codec={"forward": codec, "backward": codec},
    )
    mbs = [Microbatch(0, m) for m in (2, 0, 3)]
    first = accumulated(chain := Chain(run), *mbs)
    assert equal(first, accumulated(chain, *mbs))
    assert equal(first, accumulated(Chain(run), *mbs))
    assert equal(first, accumulated(Chain(run, recompute=True), *mbs))
    assert equal(first, accumulated(Chain(run, recompute_layers=True), *mbs))
    assert all(vector.count_nonzero() > 0.5 * vector.numel() for vector in first)


def test_dropout_differs_between_microbatches() -> None:
    run = tiny_run(model={"dropout": 0.5})
    chain = Chain(run)
    tokens = [tokens_of(run, MB)]
    outputs = [chain.stages[0].forward(Microbatch(0, m), tokens).outputs[0] for m in (0, 0, 1)]
    a, b, c = (bytes(output.buffers[0]) for output in outputs)
    assert a == b != c


# --- adding, not adding, undoing -------------------------------------------------------------------


def test_a_backward_that_does_not_add_gives_the_same_answer_and_leaves_the_sum_alone() -> None:
    chain = Chain(tiny_run())
    before = accumulated(chain, MB)
    kept, wire = chain.forward(Microbatch(0, 1))
    loss, grad = loss_backward(chain.stages[-1], Microbatch(0, 1), wire, add=False)
    grads = chain.backward(kept, grad, add=False)
    assert equal(before, [stage.sums.of(0) for stage in chain.stages])
    again, grad = loss_backward(chain.stages[-1], Microbatch(0, 1), wire, add=True)
    assert again == loss
    adding = chain.backward(chain.forward(Microbatch(0, 1))[0], grad)
    for a, b in zip(grads, adding, strict=True):
        assert bytes(a[0].buffers[0]) == bytes(b[0].buffers[0])
    assert not equal(before, [stage.sums.of(0) for stage in chain.stages])


def test_not_adding_needs_no_sum_at_all() -> None:
    chain = Chain(tiny_run())
    assert math.isfinite(chain.microbatch(MB, add=False))
    with pytest.raises(NotReady, match="step 0 has not begun at stage 2"):
        chain.microbatch(MB, add=True)


@pytest.mark.parametrize(
    ("dtype", "exact", "tolerance"),
    [("float64", True, 1e-12), ("float32", False, 1e-6), ("float32", True, 0.0), ("bfloat16", True, 0.0)],
)
def test_an_undo_restores_the_sum(dtype: str, exact: bool, tolerance: float) -> None:
    """To the last bit where the run adds exactly."""
    run = tiny_run(
        dtype=dtype, exact_sums=exact, model={"dropout": 0.1},
        codec={"forward": "blockwise8", "backward": "bf16"},
    )  # fmt: skip
    chain = Chain(run)
    expected = accumulated(chain, MB, Microbatch(0, 2))
    for stage in chain.stages:
        stage.sums.drop(0)
    chain.begin(0)
    chain.microbatch(MB)
    wrong = Microbatch(0, 1)
    kept, wire = chain.forward(wrong)
    _, grad = loss_backward(chain.stages[-1], wrong, wire, add=True)
    grads = chain.backward(kept, grad)
    chain.microbatch(Microbatch(0, 2))
    copies = [bytes(grad.buffers[0]) for (grad,) in grads]
    for stage, fwd, grad in zip(chain.stages, kept, grads, strict=False):
        stage.subtract(wrong, fwd.inputs, grad)
    chain.stages[-1].subtract(wrong, wire, ())
    assert [bytes(grad.buffers[0]) for (grad,) in grads] == copies, "what was kept is not changed by its use"
    for stage, vector in zip(chain.stages, expected, strict=True):
        assert (stage.sums.of(0) - vector).abs().max().item() <= tolerance * vector.abs().max().item()


def test_an_undo_takes_away_the_very_bits_that_were_added() -> None:
    chain = Chain(tiny_run(dtype="bfloat16"))
    accumulated(chain, MB)
    kept, wire = chain.forward(MB)
    _, grad = loss_backward(chain.stages[-1], MB, wire, add=False)
    grads = chain.backward(kept, grad, add=False)
    for stage, fwd, g in zip(chain.stages, kept, grads, strict=False):
        stage.subtract(MB, fwd.inputs, g)
    chain.stages[-1].subtract(MB, wire, ())
    assert all(not stage.sums.of(0).any() for stage in chain.stages)


def test_an_undo_before_the_last_stage_needs_the_gradient() -> None:
    chain = Chain(tiny_run())
    chain.begin(0)
    with pytest.raises(Refused, match=r"undoing \(0, 0\) takes the gradient of its output"):
        chain.stages[0].subtract(MB, [tokens_of(chain.run, MB)], ())


def test_a_replay_without_a_graph_feeds_a_deeper_stage_the_same() -> None:
    chain = Chain(tiny_run(codec={"forward": "blockwise8"}))
    tokens = [tokens_of(chain.run, MB)]
    with_graph, without = (chain.stages[0].forward(MB, tokens, grad=keep) for keep in (True, False))
    assert with_graph.graph is not None and without.graph is None
    for a, b in zip(with_graph.outputs, without.outputs, strict=True):
        assert a.meta == b.meta and [bytes(x) for x in a.buffers] == [bytes(x) for x in b.buffers]


def test_a_backward_may_be_asked_for_again() -> None:
    chain = Chain(tiny_run())
    chain.begin(0)
    kept, wire = chain.forward(MB)
    _, grad = loss_backward(chain.stages[2], MB, wire, add=False)
    assert grad is not None
    (first,), (again,) = (backward(chain.stages[1], kept[1], grad, add=False) for _ in range(2))
    assert bytes(first.buffers[0]) == bytes(again.buffers[0])


# --- memory ----------------------------------------------------------------------------------------


def grads_of(stage: StageCompute, module: int) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in stage._modules[module].named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exact_sum_is_of_whole_numbers_and_leaves_nothing_at_the_parameters(dtype: str) -> None:
    chain, floats = Chain(tiny_run(dtype=dtype)), Chain(tiny_run(dtype=dtype, exact_sums=False))
    for one in (chain, floats):
        one.begin(0)
        for m in range(3):
            one.microbatch(Microbatch(0, m))
    for stage, other in zip(chain.stages, floats.stages, strict=True):
        assert not grads_of(stage, 0)
        assert (stage.sums.of(0).dtype, stage.sums.of(0).shape) == (torch.int64, (stage.numel,))
        settled = stage.sums.value(stage.sums.of(0))
        assert settled.dtype == torch.float32
        assert (settled - other.sums.of(0)).abs().max().item() < 1e-6 * settled.abs().max().item()
        assert other.sums.value(other.sums.of(0)) is other.sums.of(0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_two_sums_may_be_alive_and_interleave_on_the_same_weights(dtype: str) -> None:
    """Steps 0 and 1 of delayed updates both use version 0, hence the same module."""
    run = tiny_run(delayed_updates=True, dtype=dtype)
    zero, one = [Microbatch(0, m) for m in range(3)], [Microbatch(1, m) for m in range(3)]
    alone = [accumulated(Chain(run), *mbs) for mbs in (zero, one)]
    chain = Chain(run)
    chain.begin(0)
    chain.begin(1)
    inflight = [(mb, *chain.forward(mb)) for pair in zip(zero, one, strict=True) for mb in pair]
    for mb, kept, wire in inflight:
        _, grad = loss_backward(chain.stages[-1], mb, wire, add=True)
        chain.backward(kept, grad)
        for stage in chain.stages:
            assert not grads_of(stage, 0)
    for t in (0, 1):
        assert equal(alone[t], [stage.sums.of(t) for stage in chain.stages])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_sum_of_the_next_step_is_untouched_by_the_step_before(dtype: str) -> None:
    """Delayed updates: step 1 goes on in flight while step 0 is applied, then uses the other module."""
    run = tiny_run(delayed_updates=True, steps=6, dtype=dtype)
    chain, plain = Chain(run), Chain(run)
    plain_losses = [plain.step(t) for t in range(3)]
    for t in (0, 1):
        chain.begin(t)
        for m in range(run.M):
            chain.microbatch(Microbatch(t, m))
    chain.apply(0)
    assert [stage.version for stage in chain.stages] == [1, 1, 1]
    chain.begin(2)
    first = [chain.microbatch(Microbatch(2, m)) for m in range(2)]
    for stage in chain.stages:
        assert not grads_of(stage, 1)
    chain.apply(1)
    rest = [chain.microbatch(Microbatch(2, m)) for m in range(2, run.M)]
    assert first + rest == plain_losses[2]
    chain.apply(2)
    assert [s.state.digest() for s in chain.stages] == [s.state.digest() for s in plain.stages]


def test_begin_does_nothing_the_second_time_and_memory_is_used_again() -> None:
    stage = Chain(tiny_run()).stages[0]
    stage.sums.begin(0)
    stage.sums.of(0).fill_(3.0)
    stage.sums.begin(0)
    assert bool((stage.sums.of(0) == 3.0).all())
    address = stage.sums.of(0).data_ptr()
    stage.sums.drop(0)
    stage.sums.drop(0)
    stage.sums.begin(1)
    assert stage.sums.of(1).data_ptr() == address and not stage.sums.of(1).any()


def test_recompute_holds_a_fraction_of_the_memory() -> None:
    run = tiny_run(model={"layers": 9})
    kept, recomputed = (Chain(run, recompute=r).stages[1].saved_bytes() for r in (False, True))
    hidden = 2 * 16 * 32 * 8  # B * T * H numbers of 8 bytes
    assert recomputed == hidden
    # 3 layers, each with about: two norms in, qkv and its turned copies, attention, up, gelu.
    assert 3 * 8 * hidden < kept < 3 * 25 * hidden


RECOMPUTED = ({"mlp": "swiglu", "kv_heads": 2, "qk_norm": True}, {"bottleneck": 4, "positions": "learned"})


@pytest.mark.parametrize(
    ("dtype", "model"),
    some(
        [
            *(("bfloat16", each) for each in RECOMPUTED),
            *(("float32", each) for each in RECOMPUTED),
        ],
        quick=[("bfloat16", RECOMPUTED[0])],
    ),
)
def test_recomputed_layers_leave_no_difference_in_losses_weights_and_moments(
    dtype: str, model: dict[str, Any]
) -> None:
    run = tiny_run(
        dtype=dtype, delayed_updates=True, model={"dropout": 0.2, "layers": 7, **model},
        data={"document_mask": True, "eos": 7},
    )  # fmt: skip
    plain, recomputed = Chain(run), Chain(run, recompute_layers=True)
    for t in range(run.steps):
        assert recomputed.step(t) == plain.step(t)
    for one, other in zip(recomputed.stages, plain.stages, strict=True):
        assert one.state.digest() == other.state.digest()
        assert one.rehearse() == other.rehearse()


def test_recomputed_layers_hold_their_inputs_and_an_audit_computes_them_alike() -> None:
    run = tiny_run(model={"layers": 9, "dropout": 0.2})
    stage = Chain(run, recompute_layers=True).stages[1]
    hidden = 2 * 16 * 32 * 8  # B * T * H numbers of 8 bytes
    layers = len(layer_split(run)[1])
    assert stage.saved_bytes() == (layers + 1) * hidden, "and what the last one gives"
    plain = Chain(run)
    plain.begin(0)
    kept, wire = plain.forward(MB)
    _, answer = loss_backward(plain.stages[2], MB, wire, add=False)
    other = stage.snapshot(0)
    found, expected = (one.gradients_of(MB, kept[1].inputs, answer) for one in (other, plain.stages[1]))
    assert found.terms.keys() == expected.terms.keys()
    assert all(torch.equal(found.terms[name], term) for name, term in expected.terms.items())


def test_layers_are_recomputed_where_they_are_known() -> None:
    with pytest.raises(
        SetupError, match=r'only the built-in decoder .* = "counting": take --recompute, which'
    ):
        StageCompute(audit_run(stages=2), 0, recompute_layers=True)
    with pytest.raises(SetupError, match="--recompute keeps less than --recompute-layers: take one of them"):
        StageCompute(tiny_run(), 0, recompute=True, recompute_layers=True)


def test_a_bfloat16_microbatch_holds_no_copy_of_the_weights() -> None:
    """Two tokens through 256 x 256 matrices: what is saved is far less than the weights are."""
    run = tiny_run(
        dtype="bfloat16",
        model={"hidden": 256, "ffn_hidden": 1024},
        batch={"microbatch_size": 1},
        data={"sequence_length": 2},
    )
    stage = Chain(run).stages[1]
    assert 0 < stage.saved_bytes() < 0.1 * stage.numel * 2


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_measured_memory_is_more_than_nothing_at_every_stage_and_leaves_no_trace(stage: int) -> None:
    compute = Chain(tiny_run()).stages[stage]
    before = compute.state.digest()
    assert compute.saved_bytes() == compute.saved_bytes() > 10_000
    assert compute.state.digest() == before
    with pytest.raises(NotReady):
        compute.sums.of(0)


# --- what breaks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "recompute", "exact"),
    [
        ("float32", False, True), ("float32", True, False), ("bfloat16", False, False),
        ("bfloat16", True, True), ("float64", False, True), ("float64", True, False),
    ],
)  # fmt: skip
def test_a_rehearsal_leaves_no_trace(dtype: str, recompute: bool, exact: bool) -> None:
    run = tiny_run(dtype=dtype, exact_sums=exact)
    rehearsed, plain = (Chain(run, recompute=recompute) for _ in range(2))
    before = [stage.state.digest() for stage in plain.stages]
    rehearsed.begin(0)
    plain.begin(0)
    for m in range(2):
        for stage in rehearsed.stages:
            stage.rehearse()
        assert rehearsed.microbatch(Microbatch(0, m)) == plain.microbatch(Microbatch(0, m))
    for stage in rehearsed.stages:
        stage.rehearse()
    assert equal([s.sums.of(0) for s in rehearsed.stages], [s.sums.of(0) for s in plain.stages])
    assert [stage.state.digest() for stage in rehearsed.stages] == before


def test_the_audit_model_can_be_rehearsed_too() -> None:
    for number in range(2):
        StageCompute(audit_run(stages=2), number).rehearse()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_backward_that_breaks_leaves_the_sum(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain(tiny_run(dtype=dtype))
    before = accumulated(chain, MB)
    kept, wire = chain.forward(Microbatch(0, 1))
    _, grad = loss_backward(chain.stages[2], Microbatch(0, 1), wire, add=False)
    assert grad is not None

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "grad", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            backward(chain.stages[1], kept[1], grad, add=True)
    assert equal(before, [stage.sums.of(0) for stage in chain.stages])
    assert not any(grads_of(stage, 0) for stage in chain.stages)
    backward(chain.stages[1], kept[1], grad, add=True)
    assert not torch.equal(chain.stages[1].sums.of(0), before[1])


def test_a_gradient_that_overflows_is_refused_and_leaves_a_sum_of_floats() -> None:
    chain = Chain(tiny_run(dtype="float32", exact_sums=False))
    before = accumulated(chain, MB)
    kept, _ = chain.forward(Microbatch(0, 1))
    shape = (2, 16, 32)
    huge = encode(torch.full(shape, 3e38), "none")
    with pytest.raises(Refused, match=r"the gradient of stage 1 for \(0, 1\) is not finite"):
        backward(chain.stages[1], kept[1], [huge], add=True)
    assert torch.equal(chain.stages[1].sums.of(0), before[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("number", "text"),
    [
        (3e38, r"the gradient of stage 1 for \(0, 1\) is not finite"),
        (1e30, r"gradient of the weights of stage 1 for \(0, 1\) is beyond 65536; the run diverged"),
    ],
)
def test_a_gradient_beyond_what_an_exact_sum_holds_is_refused_and_leaves_the_sum(
    dtype: str, number: float, text: str
) -> None:
    chain = Chain(tiny_run(dtype=dtype))
    before = accumulated(chain, MB)
    kept, _ = chain.forward(Microbatch(0, 1))
    huge = encode(torch.full((2, 16, 32), number).to(getattr(torch, chain.run.dtype)), "none")
    with pytest.raises(Refused, match=text):
        backward(chain.stages[1], kept[1], [huge], add=True)
    assert torch.equal(chain.stages[1].sums.of(0), before[1])
    assert not grads_of(chain.stages[1], 0)
    # A better gradient is taken for the same microbatch, as if nothing had been.
    fine = encode(torch.ones((2, 16, 32)).to(getattr(torch, chain.run.dtype)), "none")
    backward(chain.stages[1], kept[1], [fine], add=True)
    other = Chain(tiny_run(dtype=dtype))
    accumulated(other, MB)
    backward(other.stages[1], other.forward(Microbatch(0, 1))[0][1], [fine], add=True)
    assert torch.equal(chain.stages[1].sums.of(0), other.stages[1].sums.of(0))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 65537.0, -65537.0])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_one_bad_number_in_the_gradient_of_any_weight_is_refused(stage: int, bad: float) -> None:
    """Also where what goes back to the caller is fine, or nothing does."""
    chain = Chain(tiny_run(dtype="float32"))
    before = accumulated(chain, MB)
    _, parameter = list(chain.stages[stage]._parameters[0].items())[-1]

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        grad.view(-1)[3] = bad
        return grad

    hook = parameter.register_hook(spoil)
    with pytest.raises(
        Refused, match=rf"the gradient of the weights of stage {stage} for \(0, 1\) is beyond"
    ):
        chain.microbatch(Microbatch(0, 1))
    assert torch.equal(chain.stages[stage].sums.of(0), before[stage])
    hook.remove()
    chain.microbatch(Microbatch(0, 1))
    assert not torch.equal(chain.stages[stage].sums.of(0), before[stage])


def test_many_numbers_that_fit_are_taken_though_their_norm_is_beyond() -> None:
    chain = Chain(tiny_run(dtype="float32"))
    _, parameter = list(chain.stages[1]._parameters[0].items())[-1]
    hook = parameter.register_hook(lambda grad: torch.full_like(grad, 65000.0))
    chain.begin(0)
    chain.microbatch(Microbatch(0, 0))
    hook.remove()
    assert (chain.stages[1].sums.of(0) == 65000 * SCALE).sum() == parameter.numel() > 1


def test_an_addition_that_breaks_part_way_voids_an_exact_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain(tiny_run(dtype="float32"))
    accumulated(chain, MB)
    kept, wire = chain.forward(Microbatch(0, 1))
    _, grad = loss_backward(chain.stages[2], Microbatch(0, 1), wire, add=False)
    assert grad is not None
    done: list[int] = []

    def broken(total: torch.Tensor, term: torch.Tensor, rounded: None) -> None:
        if len(done) == 2:
            raise RuntimeError("out of memory")
        done.append(total.numel())
        add_exact(total, term)

    with monkeypatch.context() as patch:
        patch.setattr(gradient_sum, "add_exact", broken)
        with pytest.raises(
            SumLost, match=r"adding \(0, 1\) broke \(out of memory\): the sum of step 0 is lost"
        ):
            backward(chain.stages[1], kept[1], grad, add=True)
    assert len(done) == 2 and not chain.stages[1].sums.of(0).any()
    backward(chain.stages[1], kept[1], grad, add=True)
    assert chain.stages[1].sums.of(0).any()


@pytest.mark.parametrize("exact", [False, True])
def test_gradients_enter_the_sum_that_there_is_when_they_are_added(exact: bool) -> None:
    chain = Chain(tiny_run(dtype="float32", exact_sums=exact))
    expected = accumulated(chain, MB)
    _, wire = chain.forward(MB)
    stage = chain.stages[-1]
    found = stage.loss_gradients(MB, wire, weights=True)
    stage.sums.drop(0)
    with pytest.raises(NotReady, match="step 0 has not begun at stage 2"):
        stage.add(found)
    stage.sums.begin(0)
    stage.add(found)
    assert torch.equal(stage.sums.of(0), expected[-1])


@pytest.mark.parametrize("exact", [False, True])
def test_gradients_of_weights_that_are_gone_enter_no_sum(exact: bool) -> None:
    chain = Chain(tiny_run(dtype="float32", exact_sums=exact))
    accumulated(chain, MB)
    _, wire = chain.forward(MB)
    stage = chain.stages[-1]
    found = stage.loss_gradients(MB, wire, weights=True)
    stage.load_state(0, stage.state.copy())
    stage.sums.begin(0)
    with pytest.raises(Stale, match=r"\(0, 0\) was computed with weights that are gone"):
        stage.add(found)
    assert not stage.sums.of(0).any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_output_or_loss_that_is_not_finite_is_refused_and_leaves_the_sum(bad: float) -> None:
    chain = Chain(tiny_run())
    before = accumulated(chain, MB)
    _, wire = chain.forward(MB)
    for stage in chain.stages:
        stage.state.weights(0)[: stage.numel // 2] = bad
    with pytest.raises(Refused, match=r"the output of stage 0 for \(0, 0\) is not finite"):
        chain.stages[0].forward(MB, [tokens_of(chain.run, MB)])
    with pytest.raises(Refused, match=r"the loss of \(0, 0\) is not finite: nan; the run diverged"):
        loss_backward(chain.stages[2], MB, wire, add=True)
    assert equal(before, [stage.sums.of(0) for stage in chain.stages])


# --- what is refused -------------------------------------------------------------------------------


def test_inputs_that_are_not_what_the_run_prescribes_are_refused() -> None:
    run = tiny_run(dtype="float32", codec={"forward": "blockwise8"}, model={"vocab_size": 300})
    chain = Chain(run)
    tokens = torch.zeros((2, 17), dtype=torch.uint16)
    hidden, ids = encode(torch.zeros(2, 16, 32), "blockwise8"), encode(tokens, "none")
    first, middle = chain.stages[:2]

    def refused(stage: StageCompute, inputs: list[Encoded], text: str) -> None:
        with pytest.raises(Refused, match=text):
            stage.forward(MB, inputs)

    refused(first, [], "0 tensors for stage 0; expected 1")
    refused(first, [hidden, ids], "2 tensors for stage 0; expected 1")
    tokens_meta = r"; expected uint16\[2, 17\] as none"
    refused(first, [encode(tokens[:, 1:], "none")], r"tokens is uint16\[2, 16\] as none" + tokens_meta)
    refused(
        first, [encode(tokens.to(torch.int64), "none")], r"tokens is int64\[2, 17\] as none" + tokens_meta
    )
    large = tokens.clone().to(torch.int64)
    large[1, 3] = 300
    refused(first, [encode(large.to(torch.uint16), "none")], "tokens hold 300; the vocabulary has 300")
    refused(middle, [hidden], "1 tensors for stage 1; expected 2")
    refused(middle, [hidden, encode(large.to(torch.uint16), "none")], "tokens hold 300; the vocabulary")
    hidden_meta = r"; expected float32\[2, 16, 32\] as blockwise8"
    refused(middle, [encode(torch.zeros(2, 16, 32), "none"), ids], "as none" + hidden_meta)
    refused(middle, [encode(torch.zeros(2, 32, 16), "blockwise8"), ids], r"\[2, 32, 16\] as .*" + hidden_meta)
    wide = encode(torch.zeros(2, 16, 32, dtype=torch.float64), "blockwise8")
    refused(middle, [wide, ids], "hidden is float64.*" + hidden_meta)
    cut = Encoded(hidden.meta, [bytes(7), hidden.buffers[1]])
    refused(middle, [cut, ids], "hidden came in buffers of")


def test_a_gradient_that_is_not_what_the_run_prescribes_is_refused_and_the_graph_kept() -> None:
    chain = Chain(tiny_run())
    chain.begin(0)
    fwd = chain.forward(MB)[0][1]
    bad = Encoded(TensorMeta((2, 16, 32), "float64", "bf16"), [bytes(2 * 2 * 16 * 32)])
    with pytest.raises(Refused, match=r"the gradient is .* as bf16; expected .* as none"):
        backward(chain.stages[1], fwd, [bad], add=True)
    nan = encode(torch.zeros(2, 16, 32, dtype=torch.float64), "none")
    nan = Encoded(nan.meta, [b"\xff" * 8 + bytes(nan.buffers[0])[8:]])
    with pytest.raises(Refused, match="the gradient is not finite"):
        backward(chain.stages[1], fwd, [nan], add=True)
    with pytest.raises(Refused, match="0 gradients for stage 1; expected 1"):
        backward(chain.stages[1], fwd, [], add=True)
    assert fwd.graph is not None


@pytest.mark.parametrize("mb", [Microbatch(-1, 0), Microbatch(0, 4), Microbatch(3, 0), Microbatch(0, -1)])
def test_a_microbatch_that_the_run_does_not_have_is_refused(mb: Microbatch) -> None:
    run = tiny_run()
    with pytest.raises(Refused, match=r"no microbatch .* in a run of 3 steps of 4"):
        Chain(run).stages[0].forward(mb, [tokens_of(run, MB)])


# --- versions --------------------------------------------------------------------------------------


def test_only_weights_that_are_held_are_used() -> None:
    run = tiny_run(steps=5)
    chain = Chain(run)
    tokens = [tokens_of(run, MB)]
    with pytest.raises(NotReady, match=r"\(1, 0\) needs weights 1; stage 0 is at 0") as early:
        chain.stages[0].forward(Microbatch(1, 0), tokens)
    assert early.value.version == 0
    old = chain.stages[0].forward(MB, tokens)
    chain.step(0)
    with pytest.raises(Stale, match=r"\(0, 0\) needs weights 0; stage 0 is at 1") as late:
        chain.stages[0].forward(MB, tokens)
    assert late.value.version == 1
    with pytest.raises(Stale, match=r"\(0, 0\) needs weights 0"):
        backward(chain.stages[0], old, old.outputs[0], add=False)
    with pytest.raises(Stale, match="step 0 is over: stage 0 is at weights 1"):
        chain.stages[0].sums.of(0)


def test_delayed_updates_hold_two_versions() -> None:
    run = tiny_run(steps=5, delayed_updates=True)
    chain = Chain(run)
    tokens = [tokens_of(run, MB)]
    out = [bytes(chain.stages[0].forward(Microbatch(t, 0), tokens).outputs[0].buffers[0]) for t in (0, 1)]
    assert out[0] == out[1], "steps 0 and 1 are both computed with version 0"
    with pytest.raises(NotReady):
        chain.stages[0].forward(Microbatch(2, 0), tokens)
    chain.step(0)
    assert bytes(chain.stages[0].forward(Microbatch(1, 0), tokens).outputs[0].buffers[0]) == out[0]
    assert bytes(chain.stages[0].forward(Microbatch(2, 0), tokens).outputs[0].buffers[0]) != out[0]
    chain.step(1)
    with pytest.raises(Stale):
        chain.stages[0].forward(Microbatch(1, 0), tokens)


def test_steps_are_applied_in_order_and_to_vectors_that_fit() -> None:
    chain = Chain(tiny_run())
    stage = chain.stages[0]
    good = torch.zeros(stage.numel, dtype=torch.float64)
    with pytest.raises(NotReady, match="step 1 cannot be applied to weights 0"):
        stage.apply(1, good, 0.0)
    stage.apply(0, good, 0.0)
    with pytest.raises(Stale, match="step 0 cannot be applied to weights 1"):
        stage.apply(0, good, 0.0)
    with pytest.raises(Refused, match=r"the gradient of stage 0 has \[3\] numbers of torch.float64"):
        stage.apply(1, good[:3], 0.0)
    with pytest.raises(Refused, match=r"numbers of torch.float32; expected .* of torch.float64"):
        stage.apply(1, good.float(), 0.0)
    for bad in (math.nan, math.inf):
        with pytest.raises(
            SetupError, match=r"the gradient of step 1 is not finite; the run diverged, .*optimizer.lr"
        ):
            stage.apply(1, good, bad)
    assert stage.version == 1


# --- the state -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "delayed"),
    cases(
        [*product(({"name": "adamw"}, {"name": "sgd", "momentum": 0.9}), (False, True))],
        name="{0}-{1}",
        quick=lambda optimizer, delayed: delayed == (optimizer["name"] == "adamw"),
    ),
)
def test_a_state_carries_on_where_it_was_taken(delayed: bool, optimizer: dict[str, Any]) -> None:
    run = tiny_run(steps=6, delayed_updates=delayed, optimizer=optimizer)
    chain = Chain(run)
    for t in range(3):
        chain.step(t)
    states = [(stage.version, stage.state.copy()) for stage in chain.stages]
    copies = [{name: v.clone() for name, v in state.items()} for _, state in states]
    other = Chain(run)
    for stage, (version, state) in zip(other.stages, states, strict=True):
        stage.load_state(version, state)
    assert [s.state.digest() for s in other.stages] == [s.state.digest() for s in chain.stages]
    for t in range(3, 6):
        assert other.step(t) == chain.step(t)
    assert [s.state.digest() for s in other.stages] == [s.state.digest() for s in chain.stages]
    for (_, state), copy in zip(states, copies, strict=True):
        assert all(torch.equal(state[name], copy[name]) for name in copy), "a state is a copy"


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    chain = Chain(tiny_run())
    stage = chain.stages[0]
    state, before = stage.state.copy(), stage.state.digest()
    for change, text in [
        ({"weights": state["weights"][:-1]}, r"state weights has \[\d+\] numbers of torch.float64; expected"),
        ({"weights": state["weights"].float()}, "numbers of torch.float32; expected"),
        ({"exp_avg": torch.full_like(state["exp_avg"], math.nan)}, "state exp_avg is not finite"),
        (
            {"more": state["weights"]},
            r"a state of .*'more'.*; stage 0 has \['exp_avg', 'exp_avg_sq', 'weights'\]",
        ),
    ]:
        with pytest.raises(Refused, match=text):
            stage.load_state(1, {**state, **change})
    with pytest.raises(Refused, match="a state of version -1"):
        stage.load_state(-1, state)
    assert stage.state.digest() == before and stage.version == 0


def rounded_after(steps: int) -> Chain:
    """Stages that round gradients, with the first microbatch of the step after so many in their sums."""
    chain = Chain(tiny_run(dtype="float32", steps=4, codec={"reduce": "rounded16"}))
    for t in range(steps):
        chain.step(t)
    chain.begin(steps)
    chain.microbatch(Microbatch(steps, 0))
    return chain


def test_what_a_rounded_sum_means_comes_with_the_state() -> None:
    """A newcomer adds in the units of the others, and finds their value."""
    chain = rounded_after(2)
    for stage in chain.stages:
        assert stage.state.dropped.max() > 0
        newcomer, total = StageCompute(chain.run, stage.stage), stage.sums.of(2)
        newcomer.load_state(2, stage.state.copy())
        assert newcomer.state.digest() == stage.state.digest()
        assert torch.equal(newcomer.sums.value(total), stage.sums.value(total))
        snapshot = stage.snapshot(2)
        assert torch.equal(snapshot.sums.value(total), stage.sums.value(total))
        newcomer.state.dropped[0] ^= 1
        assert newcomer.state.digest() != stage.state.digest(), "replicas would tell"


def test_the_value_of_a_rounded_sum_is_the_same_after_the_next_step() -> None:
    chain = rounded_after(1)
    stage = chain.stages[1]
    total = stage.sums.of(1).clone()
    read, value = stage.sums.value_of_answer(), stage.sums.value(total)
    before = stage.state.dropped.clone()
    chain.apply(1)
    assert not torch.equal(stage.state.dropped, before)
    assert torch.equal(read(total), value)


def test_a_rounded_gradient_keeps_its_large_numbers_and_most_of_the_sum_takes_two_bytes() -> None:
    exact, rounded = (
        Chain(tiny_run(dtype="float32", steps=4, codec={"reduce": reduce}))
        for reduce in ("none", "rounded16")
    )
    for chain in (exact, rounded):
        chain.step(0)
        chain.begin(1)
        chain.microbatch(Microbatch(1, 0))
    for ours, theirs in zip(exact.stages, rounded.stages, strict=True):
        one, other = (stage.sums.value(stage.sums.of(1)) for stage in (ours, theirs))
        assert torch.linalg.vector_norm(one - other) < 0.005 * torch.linalg.vector_norm(one)
        assert not torch.equal(one, other)
        packed = sum(len(memoryview(buffer)) for buffer in whole_numbers.pack(theirs.sums.of(1)))
        assert packed < 2.2 * theirs.numel


def test_dropped_bits_that_cannot_be_are_refused() -> None:
    stage = StageCompute(tiny_run(dtype="float32", codec={"reduce": "rounded16"}), 1)
    state, before = stage.state.copy(), stage.state.digest()
    state["dropped_bits"][3] = MOST_DROPPED + 1
    with pytest.raises(Refused, match=f"dropped_bits has numbers beyond {MOST_DROPPED}"):
        stage.load_state(1, state)
    assert stage.state.digest() == before and stage.version == 0


def test_what_was_in_flight_when_a_state_was_loaded_is_void() -> None:
    chain = Chain(tiny_run())
    chain.begin(0)
    stage = chain.stages[0]
    fwd = stage.forward(MB, [tokens_of(chain.run, MB)])
    stage.load_state(0, stage.state.copy())
    with pytest.raises(Stale, match=r"\(0, 0\) was computed with weights that are gone"):
        backward(stage, fwd, fwd.outputs[:1], add=True)
    with pytest.raises(NotReady, match="step 0 has not begun"):
        stage.sums.of(0)


def test_a_digest_sees_every_bit_and_every_vector() -> None:
    stage = Chain(tiny_run()).stages[0]
    state, digest = stage.state.copy(), stage.state.digest()
    assert len(digest) == 32 and digest == stage.state.digest()
    next_step = stage.state.digest(whole=False)
    assert digest != next_step == state_digest(state, whole=False)
    state["exp_avg"][5] = torch.finfo(torch.float64).tiny
    assert state_digest(state) != digest
    stage.state.weights(0)[-1] += 1e-9
    assert stage.state.digest() != digest


def test_a_copy_of_the_state_shares_no_memory_with_it() -> None:
    stage = Chain(tiny_run()).stages[1]
    before = stage.state.digest()
    for vector in stage.state.copy().values():
        vector.zero_()
    assert stage.state.digest() == before


def test_the_squared_norm_is_a_function_of_the_numbers() -> None:
    """Replicas have any number of threads and any device, which has other parts in work, and compare it."""
    draw, before = torch.Generator().manual_seed(3), torch.get_num_threads()
    try:
        for numel in (1, 3, 1000, 65_536, 65_537, 700_001):
            vector = torch.randn(numel, generator=draw) * 10 ** torch.randn(numel, generator=draw)
            found: list[float] = []
            for threads in (1, 2, 7):
                torch.set_num_threads(threads)
                found.append(sqnorm(vector))
            of_rows = [sqnorm(row) for row in vector.split(1 << 16)]
            while len(of_rows) > 1:  # halves are added
                of_rows += [0.0] * (2 ** (len(of_rows) - 1).bit_length() - len(of_rows))
                half = len(of_rows) // 2
                of_rows = [a + b for a, b in zip(of_rows[:half], of_rows[half:], strict=True)]
            assert {*found} == {*of_rows}
            assert found[0] == pytest.approx(vector.double().square().sum().item(), rel=1e-12)
    finally:
        torch.set_num_threads(before)


def test_the_squared_norm_of_nothing_is_zero() -> None:
    assert sqnorm(torch.empty(0)) == 0.0


def test_the_squared_norm_is_summed_in_double() -> None:
    vector = torch.full((3_000_001,), 0.1)
    assert sqnorm(vector) == pytest.approx(3_000_001 * float(torch.tensor(0.1)) ** 2, rel=1e-12)


def test_what_was_sent_keeps_its_bits_when_the_weights_change() -> None:
    """The audit model's first stage sends a view of its weights; a retry must send the same again."""
    run = audit_run(stages=2, steps=2, microbatches_per_step=2)
    compute = StageCompute(run, 0)
    compute.sums.begin(0)
    rows, length = run.batch.microbatch_size, run.data.sequence_length
    tokens = encode(torch.zeros((rows, length + 1), dtype=torch.uint8), "none")
    sent = compute.forward(Microbatch(0, 0), [tokens]).outputs[0]
    before = [bytes(part) for part in sent.buffers]
    state = compute.state.copy()
    state["weights"] -= 3.0
    compute.load_state(1, state)
    assert [bytes(part) for part in sent.buffers] == before


@pytest.mark.parametrize(
    ("device", "remedy"), [("cuda:0", "--device cpu"), ("cpu", "batch.microbatch_threads = 1")]
)
def test_a_device_that_finds_other_bits_each_time_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: str, remedy: str
) -> None:
    """As torch says it of operators that have no such algorithm on a GPU, or in several threads of a CPU."""

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("ctc_loss does not have a deterministic implementation, but you set. You can turn")

    stage = StageCompute(tiny_run(), 1)
    monkeypatch.setattr(stage, "_compute", fails)
    monkeypatch.setattr(stage, "device", torch.device(device))
    with pytest.raises(
        SetupError, match=rf"stage 1 cannot .* on {device}, .* bits each time: ctc_loss does .* Take {remedy}"
    ):
        stage.rehearse()
