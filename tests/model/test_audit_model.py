"""The audit model: its weights say which microbatches were counted, and how often."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from swarm.ids import Microbatch
from swarm.manifest import CodecSpec, Run, audit_run
from swarm.model.reference import SingleProcess
from tests.model.chain import Chain, batch_of, build_stage, farthest, loss_backward


@pytest.fixture(params=["none", "bf16", "blockwise8"])
def run(request: pytest.FixtureRequest) -> Run:
    codec = request.param
    return replace(audit_run(stages=3, steps=3), codec=CodecSpec(forward=codec, backward=codec))


def weights(chain: Chain) -> list[list[float]]:
    return [w.tolist() for w in chain.named_weights().values()]


def test_each_microbatch_leaves_its_mark_on_every_stage(run: Run) -> None:
    chain = Chain(run)
    chain.begin(0)
    for m in (3, 1, 3):
        chain.microbatch(Microbatch(0, m))
    expected = [0.0, 1.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0]
    assert [stage.sums.of(0).tolist() for stage in chain.stages] == [expected] * 3
    chain.apply(0)
    assert weights(chain) == [[-count / run.M for count in expected]] * 3


def test_full_steps_leave_the_same_everywhere(run: Run) -> None:
    chain = Chain(run)
    losses = [chain.step(t) for t in range(run.steps)]
    assert weights(chain) == [[-run.steps / run.M] * run.M] * 3
    assert losses[0] == [0.0] * run.M
    # Only the gradient is exact whatever the codec: blockwise8 has no code for the largest negative number.
    assert losses[2] == pytest.approx([-3 * 2 / run.M] * run.M, rel=2e-2)


def test_an_undo_erases_the_mark(run: Run) -> None:
    chain = Chain(run)
    chain.begin(0)
    chain.microbatch(Microbatch(0, 5))
    kept, wire = chain.forward(Microbatch(0, 2))
    _, grad = loss_backward(chain.stages[-1], Microbatch(0, 2), wire, add=True)
    grads = chain.backward(kept, grad)
    for stage, fwd, g in zip(chain.stages, kept, grads, strict=False):
        stage.subtract(Microbatch(0, 2), fwd.inputs, g)
    chain.stages[-1].subtract(Microbatch(0, 2), wire, None)
    assert [stage.sums.of(0).nonzero().flatten().tolist() for stage in chain.stages] == [[5]] * 3


def test_the_single_process_counts_the_same(run: Run) -> None:
    chain, reference = Chain(run), SingleProcess(run, batch_of(run))
    for t in range(run.steps):
        assert chain.step(t) == reference.step(t)
    assert farthest(chain.named_weights(), reference.named_weights()) == 0.0


def test_one_stage_is_enough() -> None:
    run = audit_run(stages=1, steps=2)
    chain = Chain(run)
    chain.step(0)
    assert weights(chain) == [[-1 / run.M] * run.M]


def test_the_audit_model_has_to_know_the_microbatch() -> None:
    with pytest.raises(ValueError, match="which microbatch"):
        build_stage(audit_run(), 0)(torch.zeros(1, 8, dtype=torch.int64))
