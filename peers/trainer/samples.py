"""A microbatch's samples as stage 0 is sent them: from the run's data, with what proves them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np

from swarm.manifest import Run
from swarm.wire.buffers import Buffer

T = TypeVar("T")


class Batches(Protocol):
    """The run's data, as `peers.storage.dataset` opens it."""

    def batch(self, offsets: list[int]) -> np.ndarray | list[np.ndarray]:
        """Tokens [B, T+1] in the run's narrow dtype; of samples that code makes an array for each input."""
        ...


@runtime_checkable
class Proving(Protocol):
    """What a run with a `data.root` needs besides."""

    def prove(self, run: Run, offsets: list[int]) -> bytes:
        """What goes with the samples; see `swarm.data.prove_samples`."""
        ...


@runtime_checkable
class Fetching(Protocol):
    """Data that may be far away: then `batch` fetches them, and may take long."""

    def has(self, offsets: list[int]) -> bool:
        """Whether nothing has to be fetched for these samples."""
        ...


def entering(run: Run, rows: np.ndarray | list[np.ndarray]) -> list[Buffer]:
    """What stage 0 is sent of a microbatch: tokens, or the inputs of a custom model.

    Raises:
        SetupError: the samples do not fit the model.
    """
    if isinstance(rows, np.ndarray) and not run.brings_model:
        return [np.ascontiguousarray(rows).data.cast("B")]
    from swarm.model.custom import model_inputs
    from swarm.wire.codec import encode

    return [buffer for tensor in model_inputs(run, rows) for buffer in encode(tensor, "none").buffers]


async def fetched(batches: Batches, offsets: list[int], made: Callable[[], T]) -> T:
    """What is made of samples: in a thread where they have to be fetched, which may take long."""
    is_here = not isinstance(batches, Fetching) or batches.has(offsets)
    return made() if is_here else await asyncio.to_thread(made)


def samples_of(run: Run, batches: Batches, offsets: list[int]) -> tuple[list[Buffer], list[Buffer]]:
    """What stage 0 is sent of samples, and what proves that they are the run's, if it is asked for."""
    body = entering(run, batches.batch(offsets))
    if not run.data.root:
        return body, []
    assert isinstance(batches, Proving), "a run with a data.root has one array of tokens"
    return body, [batches.prove(run, offsets)]
