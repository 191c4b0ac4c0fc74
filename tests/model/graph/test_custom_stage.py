"""A custom model's stages, called as peers would call them: against one process that knows no stages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from swarm.errors import Refused
from swarm.ids import Microbatch
from swarm.manifest import BatchSpec, CodecSpec, CustomModelSpec, DataSpec, OptimizerSpec, Run, write_cut
from swarm.model.graph.ir import OpGraph
from swarm.model.graph.partition import plan_stages
from swarm.model.layout import empty_state, initial_state
from swarm.model.stage import StageCompute
from swarm.model.stage_io import stage_inputs
from swarm.wire.codec import Encoded, bytes_of, decode, encode
from tests.model.chain import Chain, loss_backward, weights_of
from tests.model.graph import zoo
from tests.model.graph.parity import random_cuts, whole
from tests.seeds import some

MODELS = ["resnet", "gpt2", "llama", "unet", "encoder_decoder"]


def custom_run(name: str, assignment: Sequence[int], **changes: Any) -> Run:
    rows = len(next(iter(whole(name).inputs.values())))
    terms: dict[str, Any] = {
        "name": "custom",
        "seed": 0,
        "steps": 3,
        "dtype": "float64",
        "model": CustomModelSpec(
            kind="code", source=f"tests.model.graph.zoo:{name}", stages=max(assignment) + 1, vocab_size=41,
            cut=write_cut(assignment),
        ),
        "data": DataSpec(source="code", code="tests.model.graph.zoo:samples", sequence_length=1, tokens=1000),
        "batch": BatchSpec(microbatch_size=rows, microbatches_per_step=2),
        "optimizer": OptimizerSpec(name="sgd", lr=0.1, clip_norm=0.0, weight_decay=0.0),
        "codec": CodecSpec(forward="none", backward="none"),
    }  # fmt: skip
    return Run(**{**terms, **changes})


def cuts(graph: OpGraph, count: int, seed: int) -> Iterator[list[int]]:
    """Random ones of which every stage has weights: a run takes no others."""
    found = (
        cut
        for cut in random_cuts(graph, 40 * count, seed)
        if all(plan.parameters for plan in plan_stages(graph, cut))
    )
    return itertools.islice(found, count)


def sample_of(run: Run) -> list[Encoded]:
    """The model's own sample, as a trainer would send it."""
    assert isinstance(run.model, CustomModelSpec)
    one = whole(run.model.source.partition(":")[2])
    return [
        encode(one.inputs[what.name].to(getattr(torch, what.dtype)), "none") for what in stage_inputs(run, 0)
    ]


class CustomModel(Chain):
    """All stages of a custom model, fed with its sample."""

    def forward(self, mb: Microbatch) -> tuple[list[Any], list[Encoded]]:
        kept, wire = [], sample_of(self.run)
        for stage in self.stages[:-1]:
            kept.append(stage.forward(mb, wire))
            wire = kept[-1].outputs
        return kept, wire


@pytest.mark.parametrize("name", some(MODELS, quick=["llama"]))
def test_the_stages_of_any_cut_add_up_to_one_process(name: str) -> None:
    one = whole(name)
    for assignment in cuts(one.traced.graph, 2, seed=1):
        chain = CustomModel(custom_run(name, assignment))
        chain.begin(0)
        losses = [chain.microbatch(Microbatch(0, m)) for m in range(2)]
        assert losses == pytest.approx([one.loss.item()] * 2, rel=1e-9)
        found: dict[str, torch.Tensor] = {}
        for stage in chain.stages:
            for term, (start, end, shape) in stage.layout.terms.items():
                part = stage.sums.of(0)[start:end].view(shape)
                found[term] = found[term] + part if term in found else part
        for term, expected in one.gradients.items():
            error = (found[term] / 2 - expected).abs().max().item()
            assert error <= 1e-9 * expected.abs().max().item(), (term, assignment)


def tied(run_of: Any = custom_run, **changes: Any) -> CustomModel:
    """GPT-2 with its embedding on the first and on the last stage."""
    graph = whole("gpt2").traced.graph
    readers = [op.index for op in graph.operators if "tokens.weight" in op.parameters]
    found = cuts(graph, 40, seed=3)
    assignment = next(cut for cut in found if cut[readers[0]] != cut[readers[-1]] and max(cut) == 2)
    return CustomModel(run_of("gpt2", assignment, **changes))


@pytest.mark.parametrize("dtype", some(["float64", "float32"], quick=["float32"]))
def test_copies_of_a_tied_weight_take_the_same_step(dtype: str) -> None:
    """It is the step that one process takes, and the norm that clips counts the weight once."""
    spec = OptimizerSpec(name="sgd", lr=0.1, clip_norm=0.05, weight_decay=0.0)
    chain = tied(dtype=dtype, optimizer=spec)
    holders = [s for s in chain.stages if "tokens.weight" in s.layout.terms]
    assert len(holders) == 2 and set(holders[0].shared.names) == {holders[1].stage}
    one = whole("gpt2")
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in one.gradients.values()])).item()
    assert norm > 0.05
    chain.step(0)
    copies = [weights_of(stage)["tokens.weight"] for stage in holders]
    assert torch.equal(*copies)
    found = chain.named_weights()
    for name, gradient in one.gradients.items():
        expected = one.traced.parameters[name].detach() - 0.1 * gradient * (0.05 / (norm + 1e-6))
        torch.testing.assert_close(
            found[name].double(), expected, rtol=0, atol=1e-12 if dtype == "float64" else 1e-6
        )


def test_what_is_shared_is_asked_of_those_who_share_it_and_checked() -> None:
    chain = tied()
    chain.begin(0)
    first, last = chain.stages[0], chain.stages[-1]
    own = first.sums.value(first.sums.of(0))
    (other,) = first.shared.names
    with pytest.raises(Refused, match=r"stage 7 shares no weights with stage 0"):
        first.shared.part(own, 7)
    with pytest.raises(Refused, match=r"stage 2 gave nothing; due was \[984\] of torch.float64"):
        first.shared.complete(own, {})
    with pytest.raises(Refused, match=r"stage 2 gave \[3\] numbers of torch.float64; due was"):
        first.shared.complete(own, {other: torch.zeros(3, dtype=torch.float64)})
    assert first.shared.numel(other) == last.shared.numel(0) == 984
    assert len(first.shared.part(torch.arange(first.numel), other)) == 984


@pytest.mark.slow
def test_the_statistics_of_batch_norms_are_averaged_over_a_step_and_part_of_the_state() -> None:
    one = whole("resnet")
    chain = CustomModel(custom_run("resnet", next(cuts(one.traced.graph, 1, seed=2))))
    before = {name: b for s in chain.stages for name, b in weights_of(s).items() if "running" in name}
    digests = [stage.state.digest() for stage in chain.stages]
    chain.step(0)
    after = {name: b for s in chain.stages for name, b in weights_of(s).items() if "running" in name}
    twin, sample = zoo.MODELS["resnet"]()
    twin.load_state_dict({**twin.state_dict(), **{n: p.detach() for n, p in one.traced.parameters.items()}})
    twin.double().train()(*(x.double() if x.is_floating_point() else x for x in sample))
    told = dict(twin.named_buffers())
    assert len(after) == 2 * 23 and not any(torch.equal(before[name], after[name]) for name in after)
    for name, value in after.items():  # both microbatches are the same, so their mean is what torch takes
        torch.testing.assert_close(value, told[name], rtol=1e-9, atol=1e-12)
    assert all(stage.state.digest() != digest for stage, digest in zip(chain.stages, digests, strict=True))
    for stage in chain.stages:
        state, like = stage.state.copy(), empty_state(chain.run, stage.stage)
        assert state.keys() == like.keys()
        assert all((v.shape, v.dtype) == (like[n].shape, like[n].dtype) for n, v in state.items())
        fresh = StageCompute(chain.run, stage.stage)
        for name, vector in initial_state(chain.run, stage.stage).items():
            assert torch.equal(vector, fresh.state.copy()[name])
        fresh.load_state(1, state)
        assert fresh.state.digest() == stage.state.digest()


@pytest.mark.parametrize(
    ("dtype", "name"),
    some(
        [*itertools.product(("float32", "bfloat16"), ("gpt2", "resnet"))],
        quick=[("float32", "gpt2")],
    ),
)
def test_an_undo_takes_away_the_very_bits_statistics_included(name: str, dtype: str) -> None:
    one = whole(name)
    run = custom_run(
        name, next(cuts(one.traced.graph, 1, seed=5)), dtype=dtype,
        codec=CodecSpec(forward="blockwise8", backward="bf16"),
    )  # fmt: skip
    chain = CustomModel(run)
    chain.begin(0)
    chain.microbatch(Microbatch(0, 0))
    expected = [stage.sums.of(0).clone() for stage in chain.stages]
    kept, wire = chain.forward(Microbatch(0, 1))
    _, answer = loss_backward(chain.stages[-1], Microbatch(0, 1), wire, add=True)
    grads = chain.backward(kept, answer)
    assert not any(torch.equal(stage.sums.of(0), e) for stage, e in zip(chain.stages, expected, strict=True))
    for stage, fwd, given in zip(chain.stages, kept, grads, strict=False):
        stage.subtract(Microbatch(0, 1), fwd.inputs, given)
    chain.stages[-1].subtract(Microbatch(0, 1), wire, ())
    assert all(torch.equal(stage.sums.of(0), e) for stage, e in zip(chain.stages, expected, strict=True))
    assert all(stage.saved_bytes() > 0 for stage in chain.stages)
    for stage in chain.stages:
        stage.rehearse()


def test_a_statistic_that_is_too_large_is_named() -> None:
    one = whole("resnet")
    run = custom_run("resnet", next(cuts(one.traced.graph, 1, seed=2)), dtype="float32")
    stage = StageCompute(run, 0)
    name = next(iter(stage.layout.statistics))
    inputs = sample_of(run)
    computed = stage._compute(Microbatch(0, 0), 0, stage._boundary.enter(inputs))
    computed.statistics[name].fill_(1e6)
    stage.sums.begin(0)
    ones = [torch.ones_like(output) for output in computed.outputs]
    with pytest.raises(Refused, match=rf"{name} of stage 0 for \(0, 0\) is beyond 131072, the most that"):
        stage.add(stage._differentiate(Microbatch(0, 0), 0, computed, ones, weights=True, inputs=inputs))
    assert not stage.sums.of(0).any()


def test_a_whole_number_that_cannot_be_looked_up_is_refused() -> None:
    chain = tied()
    stage = chain.stages[0]
    beyond = stage._boundary.enter(sample_of(chain.run))
    for value in beyond.values:
        if value is not None and value.dtype == torch.int64:
            value.fill_(1000)
    with pytest.raises(Refused, match=r"stage 0 cannot look up what came for \(0, 0\): index out of range"):
        stage._compute(Microbatch(0, 0), 0, beyond)


def test_a_mask_of_infinities_crosses_a_cut() -> None:
    """As in one process. It has no gradient; what is no number is refused all the same."""
    model, sample = zoo.barred()
    spec = CustomModelSpec(kind="code", source="tests.model.graph.zoo:barred", stages=2, vocab_size=41)
    size = BatchSpec(microbatch_size=len(sample[0]), microbatches_per_step=1)
    first, last = (chain := Chain(custom_run("resnet", [0, 1], model=spec, batch=size))).stages
    chain.begin(0)
    dtypes = [getattr(torch, what.dtype) for what in stage_inputs(chain.run, 0)]
    given = [encode(one.to(dtype), "none") for one, dtype in zip(sample, dtypes, strict=True)]
    crossing = first.forward(Microbatch(0, 0), given).outputs
    tensors = [decode(*came, infinite=True) for came in crossing]
    (mask,) = (place for place, one in enumerate(tensors) if one.isinf().any())
    loss, _ = loss_backward(last, Microbatch(0, 0), crossing, add=True)
    weights = chain.named_weights()
    sample = (sample[0].double(), sample[1])
    assert loss == pytest.approx(torch.func.functional_call(model, weights, sample).item(), rel=1e-6)

    tensors[mask].view(-1)[3] = torch.nan
    body = [bytes_of(tensors[mask])]
    wrong = [*crossing[:mask], Encoded(crossing[mask].meta, body), *crossing[mask + 1 :]]
    with pytest.raises(Refused, match="is not finite"):
        last.loss_gradients(Microbatch(0, 0), wrong, weights=True)
