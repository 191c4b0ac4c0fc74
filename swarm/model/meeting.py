"""Where islands meet: what each has changed since the last time, and the step that follows from all of it.

Every few steps the islands of a run compare their weights: the mean of what they changed is the gradient of
an outer step, with Nesterov's momentum (DiLoCo, arXiv 2311.08105). Each difference is encoded by its island,
and all add up the decoded ones in the order of the islands: so they end with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from swarm.errors import Refused
from swarm.manifest import Run
from swarm.model.gpt import weights_dtype
from swarm.model.layout import MET_MOMENTUM, MET_WEIGHTS, Layout, met_vectors
from swarm.wire.codec import decode, dtype_name, encode
from swarm.wire.tensor_meta import TensorMeta, encoded_sizes


class Meetings:
    """What the state of a stage has besides, in a run of several islands.

    What an island has changed travels as one vector of bytes, each weight encoded by itself: so a weight that
    two stages hold arrives at both with the same bits.
    """

    def __init__(self, run: Run, layout: Layout, weights: torch.Tensor, statistics: torch.Tensor) -> None:
        self._run, self._layout = run, layout
        self.vectors = {
            name: torch.zeros(numel, dtype=dtype, device=weights.device)
            for name, (numel, dtype) in met_vectors(run, layout, weights.dtype).items()
        }
        if self.vectors:
            torch.cat([weights, statistics], out=self.vectors[MET_WEIGHTS])

    def difference(self, weights: torch.Tensor, statistics: torch.Tensor) -> torch.Tensor:
        """What this island has changed since the last meeting, as the others get it: bytes in host memory.

        Raises:
            Refused: a number is not finite, or too large for the codec.
        """
        changed = self.vectors[MET_WEIGHTS] - torch.cat([weights, statistics])
        codec, parts = self._run.islands.codec, list[torch.Tensor]()
        for name, (start, end, _) in self._layout.terms.items():
            buffers = encode(changed[start:end], codec, name=f"the change of {name}").buffers
            parts += [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in buffers if len(buffer)]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)

    def step(self, total: torch.Tensor, weights: torch.Tensor, statistics: torch.Tensor) -> None:
        """Write the weights after a meeting. `total`: all islands' differences, `added_up`."""
        spec, numel, met = self._run.islands, self._layout.numel, self.vectors[MET_WEIGHTS]
        mean = total.to(met.device) * (1.0 / spec.count)
        update = mean[:numel]
        if spec.outer_momentum:
            momentum = self.vectors[MET_MOMENTUM].mul_(spec.outer_momentum).add_(update)
            update = update.add(momentum, alpha=spec.outer_momentum)
        met[:numel].add_(update, alpha=-spec.outer_lr)
        met[numel:].sub_(mean[numel:])  # batch norms' statistics are averaged
        weights.copy_(met[:numel])
        statistics.copy_(met[numel:])

    def free(self) -> None:
        """Release the memory."""
        self.vectors = {}


def difference_bytes(run: Run, layout: Layout) -> int:
    """Length of what an island has changed of a stage, as it travels."""
    return sum(sum(encoded_sizes(meta)) for _, meta in _metas(run, layout))


def added_up(run: Run, layout: Layout, differences: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of what all islands have changed, each as bytes, in the order of the islands.

    Raises:
        Refused: one has another length, or a number that is not finite.
    """
    total = torch.zeros(layout.sum_numel, dtype=weights_dtype(run))
    for number, difference in enumerate(differences):
        if difference.shape != (difference_bytes(run, layout),) or difference.dtype != torch.uint8:
            raise Refused(f"what island {number} has changed has {difference.numel()} bytes")
        at, data = 0, difference.numpy().data
        for (start, end, _), meta in _metas(run, layout):
            ends = [at]
            for size in encoded_sizes(meta):
                ends.append(ends[-1] + size)
            at, buffers = ends[-1], [data[begin:end] for begin, end in pairwise(ends)]
            total[start:end] += decode(meta, buffers, name=f"a change of island {number}")
    return total


def _metas(run: Run, layout: Layout) -> Iterator[tuple[tuple[int, int, torch.Size], TensorMeta]]:
    dtype = dtype_name(weights_dtype(run))
    for span in layout.terms.values():
        yield span, TensorMeta((span.end - span.start,), dtype, run.islands.codec)
