"""Stages that are chained through their wire format equal the single process that knows nothing of them."""

from __future__ import annotations

import itertools
import random
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from swarm.errors import SetupError
from swarm.ids import Microbatch
from swarm.model.reference import SingleProcess
from swarm.model.stage import StageCompute
from swarm.model.stage_io import gradient_metas
from swarm.wire.codec import Encoded
from tests.model.chain import (
    TEXT,
    Chain,
    backward,
    batch_of,
    farthest,
    loss_backward,
    loss_of_single,
    tiny_run,
    tokens_of,
)
from tests.seeds import some

OFTEN = int(np.bincount(TEXT).argmax())
"""A token that is in many windows."""

CASES: dict[str, dict[str, Any]] = {
    "layernorm, learned": {"model": {"norm": "layernorm", "positions": "learned"}},
    "dropout": {"model": {"dropout": 0.2}},
    "delayed": {"delayed_updates": True, "steps": 5},
    "sgd": {"optimizer": {"name": "sgd", "momentum": 0.9, "weight_decay": 0.05}},
    "clipped": {"optimizer": {"clip_norm": 0.01, "name": "sgd"}},
    "not clipped": {"optimizer": {"clip_norm": 0.0, "name": "sgd"}},
    "3 microbatches": {"batch": {"microbatches_per_step": 3}},
    "warm-up, cosine": {"optimizer": {"warmup_steps": 2, "schedule": "cosine"}, "steps": 4},
    "warm-up, stable, decay": {
        "optimizer": {"warmup_steps": 1, "schedule": "wsd", "decay_steps": 2},
        "steps": 5,
    },
    "linear": {"optimizer": {"schedule": "linear"}},
    "inverse root": {"optimizer": {"warmup_steps": 1, "schedule": "inverse_sqrt"}},
    "groups": {"optimizer": {"groups": ("tokens.* lr=0.1 weight_decay=0.0", "*.qkv.* lr=2.0", "* lr=1.5")}},
    "groups, sgd": {"optimizer": {"name": "sgd", "groups": ("*.up.* weight_decay=0.5", "head.* lr=0.0")}},
    "muon": {"optimizer": {"name": "muon", "muon": ("layers.*",), "groups": ("*.up.* lr=0.5",)}, "steps": 4},
    "z-loss": {"model": {"z_loss": 0.01}},
    "llama": {"model": {"mlp": "swiglu", "kv_heads": 2, "head": "tied", "rotary_scaling": "linear 2"}},
    "bottleneck": {"model": {"bottleneck": 4, "dropout": 0.2, "head": "tied"}},
    "norms of queries and keys": {"model": {"mlp": "swiglu", "qk_norm": True, "dropout": 0.2}},
    "document mask": {"data": {"document_mask": True, "eos": OFTEN}, "model": {"kv_heads": 2}},
    "document mask, learned": {
        "data": {"document_mask": True, "eos": OFTEN},
        "model": {"positions": "learned", "bottleneck": 4},
    },
}


def test_a_step_that_is_interrupted_is_done_again_as_if_it_had_not_begun() -> None:
    """A notebook's stop button, and the same cell again: microbatches were in the sums twice."""
    run = tiny_run(dtype="float32")
    whole, again = SingleProcess(run, batch_of(run)), SingleProcess(run, batch_of(run))
    assert again.step(0) == whole.step(0)
    add, left = again.stages[1]._add, itertools.count(20, -1)

    def stopped(*given: Any) -> None:
        if not next(left):  # some gradients of a microbatch are added then, and some are not yet
            raise KeyboardInterrupt
        add(*given)

    again.stages[1]._add = stopped  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        again.step(1)
    for t in range(1, run.steps):
        assert again.step(t) == whole.step(t)
    assert farthest(again.named_weights(), whole.named_weights()) == 0.0


def test_a_step_that_is_interrupted_while_weights_change_is_not_done_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    single = SingleProcess(run := tiny_run(), batch_of(run))

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(single.stages[1], "take", stopped)
        single.step(0)
    with pytest.raises(SetupError, match="step 0 was interrupted while weights changed: begin with a new"):
        single.step(0)


def test_a_weight_without_a_gradient_stays_what_it_was_with_the_least_eps() -> None:
    """With less it became 0 / 0: nothing noticed, but no newcomer took the state, nor a checkpoint."""
    run = tiny_run(dtype="float32", optimizer={"eps": 1e-37, "weight_decay": 0.0}, model={"vocab_size": 300})
    single = SingleProcess(run, batch_of(run))
    before = single.named_weights()
    single.step(0)
    after = single.named_weights()
    assert all(bool(weights.isfinite().all()) for weights in after.values())
    assert torch.equal(after["tokens.weight"][256:], before["tokens.weight"][256:])


def both(**changes: Any) -> tuple[list[list[float]], list[list[float]], float]:
    """(losses of the chain, losses of the reference, distance of their weights after the run)."""
    run = tiny_run(**changes)
    chain, reference = Chain(run), SingleProcess(run, batch_of(run))
    ours = [chain.step(t) for t in range(run.steps)]
    theirs = [reference.step(t) for t in range(run.steps)]
    return ours, theirs, farthest(chain.named_weights(), reference.named_weights())


def differs(a: list[list[float]], b: list[list[float]]) -> float:
    return max(abs(x - y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True))


@pytest.mark.parametrize("stages", some([1, 2, 3, 4], quick=[1, 3]))
def test_any_split_equals_the_whole_model(stages: int) -> None:
    """float64, codec none: to 1e-12, in loss and in every weight after 3 steps."""
    run = tiny_run(model={"stages": stages})
    whole = tiny_run(model={"stages": 1})
    chain, reference = Chain(run), SingleProcess(whole, batch_of(whole))
    for t in range(run.steps):
        assert chain.step(t) == pytest.approx(reference.step(t), abs=1e-12)
    assert farthest(chain.named_weights(), reference.named_weights()) < 1e-12


@pytest.mark.parametrize("case", ["delayed", "muon", "llama", "document mask, learned"])
def test_the_terms_of_a_run_mean_the_same_in_the_chain_and_in_a_single_process(case: str) -> None:
    """In float64, without exact sums; with them all terms are the same to the last bit, below."""
    ours, theirs, distance = both(**CASES[case])
    assert differs(ours, theirs) < 1e-12 and distance < 1e-12


EXACT = (
    {
        f"{dtype}, {codec}": {"dtype": dtype, "codec": {"forward": codec, "backward": codec}}
        for dtype in ("float32", "bfloat16")
        for codec in ("none", "bf16", "blockwise8", "hadamard4")
    }
    | {
        f"{dtype}, topk": {
            "dtype": dtype,
            "codec": {"forward": ("topk:0.3+blockwise8", "none"), "backward": ("blockwise8", "topk:0.4")},
        }
        for dtype in ("float32", "bfloat16")
    }
    | {
        f"{dtype}, rounded16": {
            "dtype": dtype,
            "codec": {"forward": "blockwise8", "backward": "blockwise8", "reduce": "rounded16"},
        }
        for dtype in ("float32", "bfloat16")
    }
    | {"float32, rounded8": {"dtype": "float32", "codec": {"reduce": "rounded8"}}}
)
"""Runs that add exactly."""


QUICK = ("delayed", "clipped", "bottleneck")


@pytest.mark.parametrize(
    ("precision", "case"),
    some(
        [("float32, blockwise8", case) for case in CASES]
        + [("bfloat16, blockwise8", case) for case in ("dropout", "delayed", "clipped", "bottleneck")]
        + [("bfloat16, blockwise8", "document mask"), ("float32, topk", "document mask")],
        quick=[("float32, blockwise8", case) for case in QUICK]
        + [("bfloat16, blockwise8", "dropout"), ("float32, topk", "document mask")],
    ),
)
def test_sums_that_are_exact_leave_no_difference_at_all(precision: str, case: str) -> None:
    """Every loss and every weight, to the last bit, also across an 8-bit boundary."""
    ours, theirs, distance = both(**EXACT[precision], **CASES[case])
    assert ours == theirs and distance == 0.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_of_floats_are_as_near_as_their_rounding(dtype: str) -> None:
    ours, theirs, distance = both(dtype=dtype, exact_sums=False)
    assert differs(ours, theirs) < 1e-5 and distance < 1e-5


@pytest.mark.parametrize(
    ("codec", "dtype"),
    some(
        [*product(("bf16", "blockwise8"), ("float64", "bfloat16"))],
        quick=[("bf16", "float64"), ("blockwise8", "bfloat16")],
    ),
)
def test_the_codecs_at_the_boundaries_are_part_of_the_run(codec: str, dtype: str) -> None:
    changes = {"dtype": dtype, "codec": {"forward": codec, "backward": codec}}
    ours, theirs, distance = both(**changes)
    allowed = 0.0 if dtype == "bfloat16" else 1e-5
    assert differs(ours, theirs) <= allowed and distance <= allowed
    uncoded = Chain(tiny_run(dtype=dtype))
    plain = [uncoded.step(t) for t in range(uncoded.run.steps)]
    if (dtype, codec) == ("bfloat16", "bf16"):
        assert differs(ours, plain) == 0.0, "the boundary is bfloat16 already"
    else:
        assert 0 < differs(ours, plain) < 0.05, "a codec changes the run, a little"


def test_what_a_top_k_leaves_out_is_zero_to_the_gradient_too() -> None:
    """float64: the gradient of a weight of the first stage is the slope of the loss, as it is computed."""
    codec = {"forward": "topk:0.3", "backward": "none"}
    run = tiny_run(codec=codec, batch={"microbatches_per_step": 1})
    reference, mb = SingleProcess(run, batch_of(run)), Microbatch(0, 0)
    reference.compute()
    first = reference.stages[0]
    gradients, weights = first.layout.terms_of(reference.sum_of(0)), first.weights
    name = next(n for n, p in weights.items() if p.dim() == 2 and len(p) == 48 and n.startswith("layers.0"))
    weight, gradient = weights[name], gradients[name]
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1), dtype=weight.dtype)
    losses: list[float] = []
    for step in (1e-6, -1e-6):
        with torch.no_grad():
            weight.add_(direction, alpha=step)
        losses.append(loss_of_single(reference, mb))
        with torch.no_grad():
            weight.sub_(direction, alpha=step)
    slope = (losses[0] - losses[1]) / 2e-6
    assert (gradient * direction).sum().item() == pytest.approx(slope, rel=1e-5)


def test_a_gradient_comes_back_with_the_places_of_what_was_sent() -> None:
    run = tiny_run(codec={"forward": "topk:0.1+blockwise8", "backward": "bf16"})
    chain = Chain(run)
    kept, wire = chain.forward(Microbatch(0, 0))
    _, (grad,) = loss_backward(chain.stages[-1], Microbatch(0, 0), wire, add=False)
    assert (grad.meta,) == gradient_metas(run, 1)
    assert grad.meta.codec == "topk:0.1+bf16"
    assert bytes(grad.buffers[0]) == bytes(kept[-1].outputs[0].buffers[0])


def test_the_order_of_the_microbatches_changes_only_the_rounding_of_floats() -> None:
    run = tiny_run()
    forth, back = Chain(run), Chain(run)
    for chain, order in ((forth, range(run.M)), (back, reversed(range(run.M)))):
        chain.begin(0)
        for m in order:
            chain.microbatch(Microbatch(0, m))
        chain.apply(0)
    assert farthest(forth.named_weights(), back.named_weights()) < 1e-12


def replicated_step(replicas: list[Chain], t: int, draw: random.Random) -> list[float]:
    """Step `t` as a swarm may do it: in any order, by any replica of each stage, some twice and undone."""
    run, losses = replicas[0].run, [0.0] * replicas[0].run.M
    twice: list[tuple[StageCompute, Microbatch, list[Encoded], tuple[Encoded, ...]]] = []
    for replica in replicas:
        replica.begin(t)
    for m in draw.sample(range(run.M), run.M):
        mb = Microbatch(t, m)
        route = [draw.choice(replicas).stages[s] for s in range(run.S)]
        inputs, kept = [[tokens_of(run, mb)]], []
        for stage in route[:-1]:
            kept.append(stage.forward(mb, inputs[-1]))
            inputs.append(kept[-1].outputs)
        losses[m], grad = loss_backward(route[-1], mb, inputs[-1], add=True)
        grads: list[tuple[Encoded, ...]] = [()]
        for stage, fwd in zip(route[-2::-1], kept[::-1], strict=True):
            grads.insert(0, grad)
            grad = backward(stage, fwd, grad, add=True)
        # A retry raced: another replica of some stage did it too.
        s = draw.randrange(run.S)
        again = draw.choice(replicas).stages[s]
        if s == run.S - 1:
            loss_backward(again, mb, inputs[s], add=True)
        else:
            backward(again, again.forward(mb, inputs[s]), grads[s], add=True)
        twice.append((again, mb, inputs[s], grads[s]))
    for stage, mb, wires, grads_out in draw.sample(twice, len(twice)):
        stage.subtract(mb, wires, grads_out)
    totals = [
        torch.stack([replica.stages[s].sums.of(t) for replica in draw.sample(replicas, len(replicas))]).sum(0)
        for s in range(run.S)
    ]
    reduced = [stage.sums.value(total) for stage, total in zip(replicas[0].stages, totals, strict=True)]
    for replica in replicas:
        replica.apply_settled(t, reduced)
    return losses


@pytest.mark.parametrize(
    ("precision", "changes"),
    some(
        [(precision, {"steps": 3 if "rounded" in precision else 2}) for precision in EXACT]
        + [
            ("float32, blockwise8", {"delayed_updates": True}),
            ("bfloat16, bf16", {"model": {"dropout": 0.1}}),
        ],
        quick=[
            ("float32, rounded16", {"steps": 3}),
            ("float32, blockwise8", {"delayed_updates": True}),
        ],
    ),
)
def test_any_replica_in_any_order_with_undone_doubles_equals_one_process(
    precision: str, changes: dict[str, Any]
) -> None:
    run = tiny_run(**EXACT[precision], **changes)
    replicas, reference = [Chain(run) for _ in range(3)], SingleProcess(run, batch_of(run))
    draw = random.Random(precision)
    for t in range(run.steps):
        assert replicated_step(replicas, t, draw) == reference.step(t)
    for replica in replicas:
        assert farthest(replica.named_weights(), reference.named_weights()) == 0.0


@pytest.mark.slow
def test_training_lowers_the_loss() -> None:
    run = tiny_run(dtype="float32", steps=16, codec={"forward": "blockwise8", "backward": "blockwise8"})
    run_batch = batch_of(run)
    reference = SingleProcess(run, lambda _: run_batch([0, 100]))
    first, last = reference.step(0)[0], [reference.step(t)[0] for t in range(1, 16)][-1]
    assert first == pytest.approx(5.545, abs=0.1), "the logarithm of 256, nearly"
    assert last < first - 1.5


def test_the_reference_keeps_its_graph_only_when_asked() -> None:
    run = tiny_run()
    reference = SingleProcess(run, batch_of(run))
    before = reference.named_weights()
    quiet = loss_of_single(reference, Microbatch(0, 0))
    assert reference.step(0)[0] == quiet
    assert not all(torch.equal(before[name], w) for name, w in reference.named_weights().items())


def test_a_run_that_diverged_until_a_codec_refuses_its_numbers_says_so() -> None:
    run = tiny_run(codec={"forward": "bf16"})
    single = SingleProcess(run, batch_of(run))
    single.stages[0].weights["tokens.weight"].fill_(1e39)  # more than bfloat16 has
    with pytest.raises(SetupError, match="a tensor is not finite in step 0; the run diverged"):
        single.step(0)
