"""Receipts, as bytes: what a signature covers, and what tensors are called."""

from __future__ import annotations

import msgspec
import pytest

from peers.sim.network import SimSigner
from swarm.ids import Microbatch
from swarm.wire.receipts import (
    Answered,
    give_receipt,
    is_receipt,
    is_sent_on,
    tensors_digest,
)
from swarm.wire.tensor_meta import TensorMeta
from tests.peers.admitted import half_receipt

META = TensorMeta((2, 3), "float32", "none")
ANSWERED = Answered(1, 7, 3, b"a" * 32, b"b" * 32, b"c" * 32, b"d" * 32, 2.5)


def test_a_digest_is_of_the_bytes_and_of_how_they_are_read() -> None:
    body = bytes(range(24))
    found = {
        tensors_digest([META], [body]),
        tensors_digest([META], [bytes(24)]),
        tensors_digest([msgspec.structs.replace(META, shape=(3, 2))], [body]),
        tensors_digest([msgspec.structs.replace(META, codec="bf16")], [body]),
        tensors_digest([], []),
    }
    assert len(found) == 5
    assert tensors_digest([META], [memoryview(body).cast("i")]) == tensors_digest(
        [META], [body[:9], body[9:]]
    )


@pytest.mark.parametrize("name", ["inputs", "outputs", "output_grads", "input_grads"])
def test_a_signature_covers_all_that_came_and_went(name: str) -> None:
    signer = SimSigner("me")
    receipt = give_receipt(signer, "run", ANSWERED)
    of = (signer, "me", "run", 1, Microbatch(7, 3), 2.5)
    assert is_receipt(*of, receipt)
    assert not is_receipt(*of, msgspec.structs.replace(receipt, **{name: b"e" * 32}))
    assert len(msgspec.msgpack.encode(receipt)) < 210


def test_half_a_receipt_is_of_what_is_sent_on_and_none_of_an_answer() -> None:
    signer, mb = SimSigner("me"), Microbatch(7, 3)
    half = half_receipt(signer, "run", 1, mb, b"a" * 32, b"b" * 32, "to")
    of = (signer, "me", "run", 1, mb)
    assert is_sent_on(*of, b"b" * 32, half, "to") and not is_receipt(*of, 0.0, half)
    assert not is_sent_on(*of, b"b" * 32, half, "another")
    assert not is_sent_on(*of, b"c" * 32, half, "to")
    assert not is_sent_on(signer, "me", "run", 2, mb, b"b" * 32, half, "to")
    assert not is_sent_on(*of, b"b" * 32, msgspec.structs.replace(half, inputs=b"c" * 32), "to")
    assert not is_sent_on(*of, b"b" * 32, give_receipt(signer, "run", ANSWERED), "to")
