"""Which samples are evaluated, and what is made of their losses: the same wherever it is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from swarm.errors import SetupError, count
from swarm.floats import total_of
from swarm.manifest import EvalSpec, Run

ALIKE = {"float32": 0.002, "float64": 0.002, "bfloat16": 0.02}
"""Of the losses of two routes, by the dtype that a run computes in: ten times what tensors differ by."""


def spread(tokens: int, window: int, samples: int, part: slice = slice(None)) -> list[int]:
    """Where `samples` windows of `window` tokens start: evenly over the text, the first at its start.

    Fewer where the text has not so many different ones. `part`: only these of them.
    """
    starts = tokens - window + 1
    count = min(samples, starts)
    return [i * starts // count for i in range(count)[part]]


def mean_loss(losses: Sequence[float], samples: Sequence[int]) -> float:
    """Of batches in order, each with so many samples."""
    return total_of(loss * count for loss, count in zip(losses, samples, strict=True)) / sum(samples)


def eval_data(run: Run) -> Run:
    """The run with the data of its evaluation as those that it has."""
    spec = run.eval
    made = {"source": "files", "code": ""} if spec.data == "files" else {"source": "code", "code": spec.data}
    data = replace(run.data, **made, sha256=spec.sha256, tokens=spec.tokens, root="", mixture="")  # type: ignore
    return replace(run, data=data, eval=EvalSpec())


def microbatches(run: Run) -> int:
    """Of one evaluation."""
    return run.eval.samples // run.batch.microbatch_size


def eval_offsets(run: Run, e: int) -> list[int]:
    """Where the samples of microbatch `e` of an evaluation start, as `swarm.data.sample_offsets` has them."""
    size, window = run.batch.microbatch_size, 1 if run.data.source == "code" else run.data.sequence_length + 1
    return spread(run.eval.tokens, window, run.eval.samples, slice(e * size, (e + 1) * size))


def check_enough(run: Run) -> None:
    """Raise SetupError if the data of the evaluation, which are pinned, have too few samples."""
    made, length = run.data.source == "code", run.data.sequence_length
    there = run.eval.tokens if made else (run.eval.tokens - 1) // length
    if there < run.eval.samples:
        what = count(there, "sample") + ("" if made else f" of {length} tokens")
        raise SetupError(
            f"eval.samples = {run.eval.samples}, but the data of the evaluation have {what}: give more data, "
            "or ask for fewer samples"
        )


def is_due(run: Run, t: int) -> bool:
    """Whether the weights of step `t` are evaluated before it; at the end of the run, after the last one."""
    return bool(run.eval.every) and (t == run.steps or (0 <= t < run.steps and t % run.eval.every == 0))


def version_of(run: Run, t: int) -> int:
    """The version of the weights that are evaluated then."""
    return run.weight_version(t) if t < run.steps else run.steps


def routes_needed(run: Run) -> int:
    """How many routes have to say the same loss of a microbatch: where strangers take part, two."""
    return 2 if run.admission.trainers else 1
