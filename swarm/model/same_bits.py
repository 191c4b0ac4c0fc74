"""What decides the last bits of a CPU's arithmetic besides the numbers: threads, and where tensors lie.

A sum that several threads share is rounded where their parts meet, so the number of threads of one operator
is the manifest's (`batch.microbatch_threads`) and no peer's. Small matrix products of MKL depend on where in
a cache line their operands begin (a third of random shapes in float32, three quarters in float64), so every
tensor that comes from elsewhere begins on one, as torch's own do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from swarm.manifest import Run

CACHE_LINE_BYTES = 64
"""What torch aligns its tensors to on the CPU."""

_threads = 0
"""The number that was set last: MKL has one for a whole process, torch one for each of its threads."""


def use_threads_of(run: Run) -> None:
    """Compute with the run's number of threads, in this thread of this process.

    Runs with different numbers may follow one another in a process, and must not be computed at once.
    """
    global _threads
    threads = run.batch.microbatch_threads
    if threads != _threads or torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
        _threads = threads


@contextlib.contextmanager
def threads_as_before() -> Iterator[None]:
    """Give the caller back the number of threads that torch had, whatever is set meanwhile."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or on the CPU a copy that begins where a cache line does."""
    if tensor.device.type == "cpu" and tensor.data_ptr() % CACHE_LINE_BYTES:
        return tensor.clone()
    return tensor
