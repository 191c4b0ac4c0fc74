"""Runs to start from: the demo's, and the one whose weights count microbatches."""

from __future__ import annotations

from swarm.manifest.run import Run
from swarm.manifest.tables import BatchSpec, CodecSpec, DataSpec, ModelSpec, OptimizerSpec


def demo_run(*, stages: int = 3, steps: int = 300, codec: str = "blockwise8", seed: int = 1) -> Run:
    """The run of `swarm demo`: a byte-level model of little tales.

    Sizes and rate are what worked on a CPU: one process takes 0.55 s a step with one thread, and after 240
    steps the loss is 0.26, where most sentences are right. Twice as wide, with twice the microbatches and
    a rate of 0.002, it was 0.59 after 193 s.
    """
    return Run(
        name="demo",
        seed=seed,
        steps=steps,
        model=ModelSpec(
            layers=max(3, stages), hidden=128, heads=4, ffn_hidden=512, vocab_size=256, stages=stages
        ),
        data=DataSpec(source="tales", sequence_length=128),
        batch=BatchSpec(microbatch_size=4, microbatches_per_step=8),
        optimizer=OptimizerSpec(lr=5e-3, warmup_steps=min(10, steps - 1), schedule="cosine"),
        codec=CodecSpec.symmetric(codec),
    )


def audit_run(*, stages: int = 3, steps: int = 10, microbatches_per_step: int = 8, seed: int = 1) -> Run:
    """An audit run: after a step each weight is minus 1/M times how often its microbatch was counted."""
    return Run(
        name="counting",
        seed=seed,
        steps=steps,
        dtype="float64",
        model=ModelSpec(
            kind="counting", layers=stages, hidden=1, heads=1, ffn_hidden=1, vocab_size=256, stages=stages
        ),
        data=DataSpec(source="tales", tokens=4096, sequence_length=8),
        batch=BatchSpec(microbatch_size=1, microbatches_per_step=microbatches_per_step),
        optimizer=OptimizerSpec(name="sgd", lr=1.0, weight_decay=0.0, clip_norm=0.0),
        codec=CodecSpec(forward="none", backward="none"),
    )
