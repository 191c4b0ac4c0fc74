"""What of an answer is a lie, and what is another device's rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from peers.sim.network import SimSigner
from swarm.audit import is_audited
from swarm.audit.answers import FAR, digest, distance, make, proves_answer, split_tensors
from swarm.ids import Microbatch
from swarm.manifest import CodecSpec, Run, audit_run
from swarm.model.stage import StageCompute
from swarm.model.stage_io import input_metas
from swarm.protocol.statements import Coin, Toss, sign
from swarm.wire.codec import Encoded, bytes_of, decode
from swarm.wire.evidence import WrongAnswer
from swarm.wire.tensor_meta import TensorMeta
from tests.audit.accusing import SIGNER, accusing
from tests.audit.roundings import nearly_equal_numbers, tensor
from tests.peers.admitted import admitting


def is_far(made: Sequence[Encoded], said: Sequence[Encoded], of: Sequence[Encoded]) -> bool:
    return distance(made, said, of) > FAR["float32"]


def run_of(**changes: Any) -> Run:
    return admitting(replace(audit_run(stages=3), dtype="float32", **changes))


@pytest.mark.parametrize("codec", ["none", "bf16", "blockwise8"])
def test_rounding_is_no_lie_and_gross_changes_are(codec: str) -> None:
    torch.manual_seed(1)
    for _ in range(40):
        made = torch.randn(4, 256)
        given = [tensor(torch.randn(4, 256))]
        rounded = made * (1 + 1e-6 * torch.randn(4, 256))
        assert not is_far([tensor(made, codec)], [tensor(rounded, codec)], given)
        for lie in (-made, made * 0, made * 100, made.roll(1, 0), made + 0.05 * torch.randn(4, 256)):
            assert is_far([tensor(made, codec)], [tensor(lie, codec)], given)


@pytest.mark.parametrize(
    ("size", "dtype"), [(1.0, "float32"), (1e4, "float32"), (1e5, "float32"), (1e4, "float64")]
)
def test_an_honest_answer_to_inputs_that_make_the_most_of_rounding_is_no_evidence(
    size: float, dtype: str
) -> None:
    """Of a layer norm, by another device; its opposite is evidence all the same."""
    compute, run, (inputs, grads), other = nearly_equal_numbers(size, dtype)
    made, theirs = (make(one, Microbatch(0, 0), inputs, grads) for one in (compute, other))
    apart = distance(made.input_grads, theirs.input_grads, grads)
    assert apart < 1e-3 if size == 1.0 else apart > FAR["float32"]

    def proves(answer: torch.Tensor) -> bool:
        said = theirs._replace(input_grads=[tensor(answer)])
        return proves_answer(compute, SIGNER, *accusing(run, 1, Microbatch(0, 0), inputs, grads, said))

    gradient = decode(*theirs.input_grads[0], name="a gradient")
    assert not proves(gradient)
    assert proves(-gradient)


def test_what_is_nothing_but_rounding_is_no_lie() -> None:
    """The true gradient is zero, and each kind of device gives other noise."""
    given = [tensor(torch.randn(256))]
    noise = [tensor(1e-7 * torch.randn(256)) for _ in range(2)]
    assert not is_far(noise[:1], noise[1:], given)


def test_what_is_alike_by_chance_is_still_the_rounding_of_large_numbers() -> None:
    """They cancel each other, and most of what is left is nothing, whatever they are."""
    torch.manual_seed(1)
    given = [tensor(torch.full((8, 32), 1e9))]
    made, said, other = (64.0 * (torch.rand(8, 32) < 0.1) for _ in range(3))
    assert distance([tensor(made)], [tensor(said)], given, [[tensor(other)]]) < 1e-4
    kept = torch.ones(8, 32)  # none of theirs
    assert distance([tensor(kept)], [tensor(said)], given) < 1e-4
    assert distance([tensor(kept)], [tensor(said)], given, [[tensor(kept)]]) > FAR["float32"]


@pytest.mark.parametrize("bar", [math.inf, -math.inf])
def test_nothing_is_small_beside_a_mask_of_infinities(bar: float) -> None:
    made, mask = torch.randn(4, 8), torch.zeros(4, 8)
    mask[1] = bar

    def one(values: torch.Tensor) -> Encoded:
        return Encoded(TensorMeta(tuple(values.shape), "float32", "none"), [bytes_of(values)])

    def wrong(of_made: torch.Tensor, of_mask: torch.Tensor) -> bool:
        return is_far([one(made), one(mask)], [one(of_made), one(of_mask)], [one(mask)])

    assert not wrong(made * (1 + 1e-6), mask.clone())
    assert (
        wrong(-made, mask) and wrong(made, -mask) and wrong(made, 0 * made) and wrong(made, mask.roll(1, 0))
    )


def evidence_of(run: Run, stage: int) -> tuple[StageCompute, WrongAnswer, list[Any]]:
    """What an honest peer keeps of a microbatch, as evidence against it."""
    compute = StageCompute(run, stage)
    inputs = [
        tensor(torch.from_numpy(np.ones(meta.shape, dtype=meta.dtype))) for meta in input_metas(run, stage)
    ]
    grads = [tensor(torch.ones(1, 1, 1))] if stage < run.S - 1 else []
    made = make(compute, Microbatch(0, 3), inputs, grads)
    return compute, *accusing(run, stage, Microbatch(0, 3), inputs, grads, made)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_honest_answer_is_no_evidence_whatever_is_changed(stage: int) -> None:
    compute, evidence, body = evidence_of(run_of(), stage)
    assert not proves_answer(compute, SIGNER, evidence, body)
    for index in range(len(body)):
        other = [*body[:index], bytes(len(body[index])), *body[index + 1 :]]
        assert not proves_answer(compute, SIGNER, evidence, other)
        assert not proves_answer(compute, SIGNER, evidence, body[:index])
    said = msgspec.structs.replace(evidence.statement, input_grads=bytes(32), outputs=bytes(32))
    assert not proves_answer(compute, SIGNER, msgspec.structs.replace(evidence, statement=said), body)
    assert not proves_answer(compute, SIGNER, msgspec.structs.replace(evidence, accused="b"), body)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_wrong_answer_is_evidence_if_its_peer_signed_it(stage: int) -> None:
    compute, evidence, body = evidence_of(run_of(), stage)
    lie = [*body[:-1], bytes(len(body[-1]))]  # the gradient of the inputs
    split = split_tensors(evidence.tensors, lie)
    assert split is not None
    said = msgspec.structs.replace(evidence.statement, input_grads=digest(split[3]))
    unsigned = msgspec.structs.replace(evidence, statement=said)
    assert not proves_answer(compute, SIGNER, unsigned, lie)
    signed = msgspec.structs.replace(unsigned, signature=sign(SIGNER, compute.run.id, said))
    assert proves_answer(compute, SIGNER, signed, lie)
    assert not proves_answer(StageCompute(run_of(), 0), SIGNER, signed, lie)  # of another stage


@pytest.mark.parametrize("stage", [0, 1])
def test_what_only_passes_is_compared_to_the_bit(stage: int) -> None:
    """Another label in what a stage sends on: no device rounds it so."""
    compute, evidence, body = evidence_of(run_of(), stage)
    place = len(body) - len(evidence.input_grads) - 1
    lie = [*body[:place], b"\0" + bytes(body[place])[1:], *body[place + 1 :]]
    split = split_tensors(evidence.tensors, lie)
    assert split is not None
    assert split[2][1].meta.dtype != "float32" and lie != body
    said = msgspec.structs.replace(evidence.statement, outputs=digest(split[2]))
    signed = msgspec.structs.replace(evidence, statement=said, signature=sign(SIGNER, compute.run.id, said))
    assert proves_answer(compute, SIGNER, signed, lie)


def test_which_runs_are_audited() -> None:
    assert is_audited(run_of())
    assert not is_audited(audit_run())
    assert not is_audited(run_of(codec=CodecSpec(forward="topk:0.1", backward="none")))


def test_a_coin_is_the_signers_own_and_falls_as_often_as_it_should() -> None:
    tosses = [Toss("audit", 1, t, "3 b") for t in range(4000)]
    mine = [Coin(SIGNER, "run", toss) for toss in tosses]
    assert 0.01 < sum(coin.falls(0.02) for coin in mine) / 4000 < 0.03
    assert [c.falls(0.5) for c in mine] == [Coin(SIGNER, "run", toss).falls(0.5) for toss in tosses]
    assert [c.falls(0.5) for c in mine] != [Coin(SimSigner("b"), "run", t).falls(0.5) for t in tosses]
    drawn = [coin.below(3) for coin in mine if coin.falls(0.3)]
    assert all(0.25 < drawn.count(n) / len(drawn) < 0.42 for n in range(3))
