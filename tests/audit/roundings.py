"""Inputs of which devices of two kinds, both honest, make very different gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from swarm.manifest import CodecSpec, demo_run
from swarm.model.stage import StageCompute
from swarm.model.stage_io import input_metas
from swarm.wire.codec import Encoded, encode
from tests.peers.admitted import admitting


def tensor(values: torch.Tensor, codec: str = "none") -> Encoded:
    meta, buffers = encode(values, codec)
    return Encoded(meta, [bytes(memoryview(b).cast("B")) for b in buffers])


class OtherDevice(StageCompute):
    """Its numbers are off by one unit in the last place from the beginning: so much differs in any order."""

    def _compute(self, mb: Any, version: Any, entered: Any, **how: Any) -> Any:
        one, *others = entered.values
        one = one * (1 + torch.finfo(one.dtype).eps * (torch.arange(one.shape[-1], dtype=one.dtype) % 2))
        return super()._compute(mb, version, entered._replace(values=[one, *others]), **how)


def nearly_equal_numbers(size: float, dtype: str = "float32") -> tuple[StageCompute, Any, Any, StageCompute]:
    """A stage with layer norms; its run; what comes in, numbers that differ in their last places only, and
    what comes back; and the same stage on another device.
    """
    base = demo_run(stages=3, steps=3, codec="none")
    run = admitting(
        replace(
            base,
            dtype=dtype,
            model=replace(base.model, norm="layernorm", hidden=64, heads=4, layers=3),
            data=replace(base.data, sequence_length=16),
            batch=replace(base.batch, microbatch_size=2),
            codec=CodecSpec(forward="none", backward="none"),
        )
    )
    torch.manual_seed(1)
    hidden, *others = input_metas(run, 1)
    number = getattr(torch, dtype)
    finer = torch.finfo(number).eps / torch.finfo(torch.float32).eps
    inputs = [tensor(size / finer * (1 + 2e-7 * finer * torch.randn(hidden.shape, dtype=number)))]
    inputs += [tensor(torch.zeros(meta.shape, dtype=getattr(torch, meta.dtype))) for meta in others]
    grads = [tensor(torch.randn(hidden.shape, dtype=number))]
    return StageCompute(run, 1), run, (inputs, grads), OtherDevice(run, 1)
