"""The plain data of an operator graph."""

from __future__ import annotations

import torch

from swarm.model.graph.ir import DTYPE_BYTES, Value


def test_bytes_are_those_of_torch() -> None:
    for name, size in DTYPE_BYTES.items():
        tensor = torch.empty((3, 0, 2), dtype=getattr(torch, name))
        assert size == tensor.element_size()
    assert Value(name="x", shape=(3, 5), dtype="bfloat16", differentiable=True).nbytes == 30
    assert Value(name="loss", shape=(), dtype="float64", differentiable=True).nbytes == 8
