"""The plain data of an operator graph."""

from __future__ import annotations

from swarm.model.graph.ir import Value


def test_bytes_are_those_of_torch() -> None:
    assert Value(name="x", shape=(3, 5), dtype="bfloat16", differentiable=True).nbytes == 30
    assert Value(name="loss", shape=(), dtype="float64", differentiable=True).nbytes == 8
