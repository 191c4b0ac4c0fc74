"""What decides the last bits of arithmetic besides the numbers: threads, where tensors lie, and algorithms.

A sum that several threads share is rounded where their parts meet, so the number of threads of one operator
is the manifest's (`batch.microbatch_threads`) and no peer's. Small matrix products of MKL depend on where in
a cache line their operands begin (a third of random shapes in float32, three quarters in float64), so every
tensor that comes from elsewhere begins on one, as torch's own do.

On a GPU the fastest kernels add in the order in which their blocks end, which is another one each time: the
backward of attention to long sequences, for one. So do the threads of a CPU, of what one index looks up.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from swarm.manifest import Run

CACHE_LINE_BYTES = 64
"""What torch aligns its tensors to on the CPU."""


def use_same_algorithms(device: torch.device) -> None:
    """Have this process compute on a GPU with kernels that give the same bits each time. Before it does.

    An operator without such a kernel raises RuntimeError there, which says that none is deterministic.
    """
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        _same_each_time()


def _same_each_time() -> None:
    torch.set_deterministic_debug_mode("error")  # else torch imports its compiler first: 4 s
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def use_threads_of(run: Run) -> None:
    """Compute with the run's number of threads, and with denormal numbers, in this thread: 0.2 µs.

    Whatever was set before, or by a library as it was loaded, such as one that was built with -ffast-math.
    """
    torch.set_num_threads(run.batch.microbatch_threads)
    torch.set_flush_denormal(False)
    if run.batch.microbatch_threads > 1:
        _same_each_time()


@contextlib.contextmanager
def threads_as_before() -> Iterator[None]:
    """Give the caller back the number of threads that torch had, whatever is set meanwhile."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def storage_of(tensor: torch.Tensor) -> int:
    """The same number for all tensors in one piece of memory, as long as one of them is there."""
    return tensor.untyped_storage()._cdata


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or on the CPU a copy that begins where a cache line does."""
    if tensor.device.type == "cpu" and tensor.data_ptr() % CACHE_LINE_BYTES:
        return tensor.clone()
    return tensor
