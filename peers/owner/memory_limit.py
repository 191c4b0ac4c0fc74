"""What a stage needs of its device and of the machine, against what there is and what the owner gives."""

from __future__ import annotations

from typing import NamedTuple

import torch

from swarm.errors import SetupError
from swarm.ids import Stage
from swarm.manifest import OptimizerSpec, Run
from swarm.model.custom import custom_model
from swarm.model.layout import empty_state, stage_layout
from swarm.model.optimizer import vector_layout
from swarm.model.stage_io import body_bytes, gradient_metas, input_metas

GIB = 1 << 30
MEMORY_SHARE = 0.5
"""Of the memory that is left after the weights, for microbatches in flight; as `swarm.plan.network` has it.
The rest is for what calls need for themselves, for gradients, and for the allocator."""
MAX_INFLIGHT = (1 << 20) - 1
"""A record says no more."""
GRADIENTS_SHARE = 0.25
"""Of the same, for the gradients of microbatches that are computed at once."""


class Needs(NamedTuple):
    """Of one stage on a device, in bytes."""

    stage: Stage
    fixed: int
    """Weights, those that stay as they are too, optimizer, sums and one vector of gradients."""
    gradients: int = 0
    """One more vector of gradients."""
    microbatch: int = 0
    """Each one in flight; 0: not measured yet."""
    boundary: int = 0
    """What each sends and receives, which is kept in the machine's memory."""
    open: int = MAX_INFLIGHT
    """Microbatches of all steps that are open at once: there are no more."""

    @property
    def least(self) -> int:
        """With one microbatch in flight."""
        return self.fixed + int(self.microbatch / MEMORY_SHARE)

    def check(self, most: int | None) -> None:
        """Raises SetupError: it is more than the owner gives."""
        if most is None or self.least <= most:
            return
        parts = f"{gib(self.fixed)} for weights, optimizer and sums"
        if self.microbatch:
            parts += f", {gib(self.least - self.fixed)} to compute one microbatch"
        saves = "another --stage, or --recompute" if self.microbatch else "another --stage"
        raise SetupError(
            f"stage {self.stage} needs {gib(self.least)} ({parts}), and --max-vram gives {gib(most)}: "
            f"give more, or take {saves}"
        )

    def check_device(self, device: str, total: int) -> None:
        """Raises SetupError: it is more than the device has, whatever else is on it."""
        if self.least > total:
            raise SetupError(
                f"stage {self.stage} needs {gib(self.least)}, and {device} has {gib(total)}; no stage is "
                "spread over several devices: take another --stage, or have the run's owner cut the model "
                "into more of them (model.stages); swarm peer --device all serves one with each GPU here"
            )

    def inflight(self, free: int, most: int | None, *, host_free: int) -> int:
        """Microbatches in flight that fit.

        Args:
            free: bytes that the device has left beside the fixed part.
            host_free: bytes that the machine has left.
        """
        left = free if most is None else min(free, most - self.fixed)
        on_device = MEMORY_SHARE * left // max(1, self.microbatch)
        on_host = MEMORY_SHARE * host_free // max(1, self.boundary)
        return int(max(1, min(self.open, MAX_INFLIGHT, on_device, on_host)))

    def workers(self, free: int, most: int | None) -> int:
        """Microbatches that may be computed at once, each with gradients of its own; `free` as before."""
        left = free if most is None else min(free, most - self.fixed)
        return 1 + int(max(0, GRADIENTS_SHARE * left // max(1, self.gradients)))


def needs_of(run: Run, stage: Stage, *, microbatch: int = 0, host_sums: bool = False) -> Needs:
    """From the manifest alone; builds no stage. `host_sums`: the sums are elsewhere."""
    layout, versions = stage_layout(run, stage), 2 if run.delayed_updates else 1
    number_bytes = 8 if run.dtype == "float64" else 4
    gradients = layout.numel * number_bytes
    sums = 0 if host_sums else versions * layout.sum_numel * (8 if run.adds_exactly else number_bytes)
    fixed = sum(tensor.nbytes for tensor in empty_state(run, stage).values()) + gradients + sums
    if run.dtype == "bfloat16":
        fixed += versions * layout.decayed * 2
    if run.brings_model:
        model = custom_model(run)
        fixed += sum(model.traced.buffers[name].nbytes for name in model.plans[stage].buffers)
    boundary = body_bytes(input_metas(run, stage))
    for one in range(max(0, stage - 1), min(stage + 1, run.S - 1)):
        boundary += body_bytes(gradient_metas(run, one))
    if stage < run.S - 1:
        boundary += body_bytes(input_metas(run, stage + 1))
    return Needs(
        stage=stage, fixed=fixed, gradients=gradients, microbatch=microbatch, boundary=boundary,
        open=versions * run.M,
    )  # fmt: skip


def weight_bytes(optimizer: OptimizerSpec, *, host_sums: bool = False) -> int:
    """Of each weight of a stage, in a float32 run that adds exactly: weight, optimizer, sum, gradient."""
    kept = vector_layout(optimizer, 1, torch.float32).values()
    return 8 + sum(numel * dtype.itemsize for numel, dtype in kept) + (0 if host_sums else 8)


def gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB // 10 else f"{nbytes / (1 << 20):.2f} MiB"
