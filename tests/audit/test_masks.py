"""Lies beside a mask of large numbers, and what other kinds of device make of one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext

import pytest

from swarm.audit.answers import Made, distance, make, proves_answer
from swarm.audit.contributions import Recount
from swarm.errors import Refused
from swarm.manifest import Run
from swarm.model.stage import StageCompute
from swarm.wire.codec import Encoded, decode
from tests.audit.accusing import SIGNER, accusing
from tests.audit.masks import MB, OtherDevice, microbatch, stages_of
from tests.audit.roundings import tensor
from tests.seeds import cases

BARS = [-1e4, -1e9, -3e38]


def proves(
    run: Run, compute: StageCompute, inputs: Sequence[Encoded], grads: Sequence[Encoded], answer: Made
) -> bool:
    return proves_answer(compute, SIGNER, *accusing(run, compute.stage, MB, inputs, grads, answer))


def lies(made: Made, passes: Sequence[int]) -> list[Made]:
    """Each of the outputs with other signs, and as zeros: those that are large enough to be no rounding."""
    found = []
    for place, one in enumerate(made.outputs):
        values = decode(*one)
        if place in passes or not values.is_floating_point() or values.abs().max() < 1e-2:
            continue
        for lie in (-values, values.roll(1, 1), 0 * values):
            outputs = [*made.outputs[:place], tensor(lie, one.meta.codec), *made.outputs[place + 1 :]]
            found.append(made._replace(outputs=outputs))
    return found


@pytest.mark.parametrize("bar", BARS)
@pytest.mark.parametrize("stage", [0, 1])
def test_a_lie_beside_a_mask_is_evidence(stage: int, bar: float) -> None:
    run, stages = stages_of("float32", "none")
    compute = stages[stage]
    _, inputs, grads = microbatch("float32", "none", 1, bar)
    made = make(compute, MB, inputs[stage], grads[stage])
    false = lies(made, list(compute.passes))
    assert len(false) == (3 if stage == 0 else 6)
    assert all(proves(run, compute, inputs[stage], grads[stage], lie) for lie in false)
    assert all(distance(made.outputs, lie.outputs, inputs[stage]) < 0.5 for lie in false), "it tests nothing"
    assert not proves(run, compute, inputs[stage], grads[stage], made)


KINDS = ["exact", "backwards", "noisy"]
ROUNDINGS = [*itertools.product(["float32", "bfloat16", "float64"], ["none", "bf16", "blockwise8"])]
QUICK = [("float32", "none"), ("bfloat16", "blockwise8")]


@pytest.mark.parametrize(
    ("dtype", "codec"),
    cases(
        ROUNDINGS,
        name="{0}-{1}",
        quick=lambda *case: case in [("float32", "none"), ("bfloat16", "blockwise8")],
    ),
)
def test_what_another_device_makes_beside_a_mask_is_no_evidence(dtype: str, codec: str) -> None:
    """Of a softmax with barred rows, rows that are nearly equal, and numbers that cancel each other."""
    run, stages = stages_of(dtype, codec)
    for seed, bar in itertools.product(range(2), [0.0, *BARS]):
        _, inputs, grads = microbatch(dtype, codec, seed, bar)
        for kind, compute in itertools.product(KINDS, stages[:2]):
            given = inputs[compute.stage], grads[compute.stage]
            other = OtherDevice(run, compute.stage)
            other.kind = kind
            theirs = make(other, MB, *given)
            assert not proves(run, compute, *given, theirs)


class Bounded(StageCompute):
    """It takes no smaller numbers for large ones, as one that takes the logarithm of a year after 1900."""

    def nudged(self, above: float = 0.0, seed: int = 1) -> StageCompute:
        if above:
            raise Refused("an output is not finite")
        return super().nudged(above, seed)


def test_a_lie_is_evidence_where_large_numbers_cannot_be_others() -> None:
    run, stages = stages_of("float32", "none")
    _, inputs, grads = microbatch("float32", "none", 1, -1e9)
    made = make(stages[1], MB, inputs[1], grads[1])
    lie = made._replace(input_grads=[tensor(-decode(*one), one.meta.codec) for one in made.input_grads])
    assert proves(run, Bounded(run, 1), inputs[1], grads[1], lie)
    assert not proves(run, Bounded(run, 1), inputs[1], grads[1], made)


def test_what_was_sent_on_beside_a_mask_is_compared() -> None:
    """When a contribution is computed again."""
    _, stages = stages_of("float32", "none")
    _, inputs, grads = microbatch("float32", "none", 1, -1e9)
    recount = Recount(stages[1].snapshot(0), 0, (0, 100))
    outputs = recount.add(0, inputs[1], grads[1], nullcontext())
    made = Made(outputs, [])
    assert not recount.sent_other(0, outputs, outputs, inputs[1])
    for lie in lies(made, list(stages[1].passes)):
        assert recount.sent_other(0, outputs, lie.outputs, inputs[1])
