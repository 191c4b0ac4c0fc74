"""Where islands meet: what each has changed since the last time, and the step that follows from all of it.

The mean of what they changed is the gradient of an outer step, with Nesterov's momentum (DiLoCo, arXiv
2311.08105). All add up the decoded differences in the order of the islands, and so end with the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from swarm.errors import Refused
from swarm.manifest import Run, parts_summed
from swarm.model.gpt import weights_dtype
from swarm.model.layout import MET_MOMENTUM, MET_WEIGHTS, Layout
from swarm.model.stage_io import body_bytes
from swarm.wire.codec import decode, dtype_name, encode
from swarm.wire.tensor_meta import BLOCK, TensorMeta, encoded_sizes

TIMES = 4.0
"""How many times as long as what the own island has changed what another has may be. Seen: 1.2 times."""
AGAINST = 0.5
"""The cosine below 0 from which on it points the other way. Seen, of text: 0.3 and more (decoders of 0.2 M
weights, 8 and 32 steps between meetings, 2026-11-26), down to -0.31 where these are of 64 tokens each."""


def difference(run: Run, layout: Layout, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """What an island has changed of a stage since the last meeting, as the others get it: bytes in host
    memory. `state`: the stage's, after so many steps.

    One vector, but each weight encoded by itself: so a weight that two stages hold arrives at both with the
    same bits.

    Raises:
        Refused: a number is not finite, or too large for the codec.
    """
    now = torch.cat([state[name] for name in ("weights", "statistics") if name in state])
    changed = state[MET_WEIGHTS] - now
    codec, parts = run.islands.codec, list[torch.Tensor]()
    for start, end in spans_of(run, layout):
        name = next(n for n, span in layout.terms.items() if span.start <= start < span.end)
        buffers = encode(changed[start:end], codec, name=f"the change of {name}").buffers
        parts += [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in buffers if len(buffer)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def meet(run: Run, layout: Layout, state: Mapping[str, torch.Tensor], total: torch.Tensor) -> None:
    """Make a stage's state that after a meeting. `total`: all islands' differences, `added_up`."""
    spec, numel, met = run.islands, layout.numel, state[MET_WEIGHTS]
    mean = total.to(met.device) * (1.0 / spec.count)
    update = mean[:numel]
    if spec.outer_momentum:
        momentum = state[MET_MOMENTUM].mul_(spec.outer_momentum).add_(update)
        update = update.add(momentum, alpha=spec.outer_momentum)
    met[:numel].add_(update, alpha=-spec.outer_lr)
    met[numel:].sub_(mean[numel:])  # batch norms' statistics are averaged
    state["weights"].copy_(met[:numel])
    if "statistics" in state:
        state["statistics"].copy_(met[numel:])
    for begun_anew in state.keys() - {"weights", "statistics", MET_WEIGHTS, MET_MOMENTUM}:
        state[begun_anew].zero_()


def spans_of(run: Run, layout: Layout, part: int | None = None) -> list[tuple[int, int]]:
    """Where the numbers of a part lie in the vector of a stage, or those of all parts, as they travel.

    No block of a codec is cut: so a number travels as the same bytes whatever the parts are.
    """
    parts = parts_summed(run.islands.count)
    if part is None:
        return [span for one in range(parts) for span in spans_of(run, layout, one)]
    block = BLOCK if run.islands.codec in ("blockwise8", "hadamard4") else 1
    ends, found = [layout.sum_numel * number // parts for number in (part, part + 1)], list[tuple[int, int]]()
    for start, end, _ in layout.terms.values():
        first, last = (end if at >= end else start + max(0, at - start) // block * block for at in ends)
        found += [(first, last)] if first < last else []
    return found


def difference_bytes(run: Run, layout: Layout, part: int | None = None, *, is_sum: bool = False) -> int:
    """Length of what an island has changed of a stage or a part, as it travels; or `is_sum`: of all of it."""
    return body_bytes([_meta(run, span, is_sum) for span in spans_of(run, layout, part)])


def part_of(run: Run, layout: Layout, difference: torch.Tensor, part: int) -> torch.Tensor:
    """A view of a part of what an island has changed. Raises Refused: there is no such part."""
    if not 0 <= part < parts_summed(run.islands.count):
        raise Refused(f"there is no part {part} of {parts_summed(run.islands.count)}")
    start = sum(difference_bytes(run, layout, before) for before in range(part))
    return difference[start : start + difference_bytes(run, layout, part)]


def added_up(
    run: Run, layout: Layout, told: Sequence[torch.Tensor], part: int | None = None, *,
    are_sums: bool = False, total: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The sum of what all islands have changed, or of a part of it, each as bytes, in the islands' order; or
    `are_sums`: of such sums, as they travel. `total`: what it is added to.

    Raises:
        Refused: one has another length, or a number that is not finite.
    """
    total = torch.zeros(layout.sum_numel, dtype=weights_dtype(run)) if total is None else total
    spans, expected = spans_of(run, layout, part), difference_bytes(run, layout, part, is_sum=are_sums)
    for number, one in enumerate(told):
        what = f"the sum of part {part}" if are_sums else f"what island {number} has changed"
        if one.shape != (expected,) or one.dtype != torch.uint8:
            raise Refused(f"{what} has {one.numel()} bytes")
        at, data = 0, one.numpy().data
        for span in spans:
            meta, ends = _meta(run, span, are_sums), [at]
            for size in encoded_sizes(meta):
                ends.append(ends[-1] + size)
            at, buffers = ends[-1], [data[begin:end] for begin, end in pairwise(ends)]
            total[slice(*span)] += decode(meta, buffers, name=what)
    return total


def unlike(own: torch.Tensor, other: torch.Tensor) -> str | None:
    """Why what another island has changed can hardly be the work of as many steps; None: it can. Numbers."""
    mine, theirs = (torch.linalg.vector_norm(each).item() for each in (own, other))
    if theirs > TIMES * mine:
        return f"a change as long as {theirs:.3g}, where that of this island is as long as {mine:.3g}"
    against = torch.dot(own, other).item() < -AGAINST * mine * theirs
    return "a change that points the other way than that of this island" if against else None


def told_of(run: Run, layout: Layout, total: torch.Tensor, part: int) -> torch.Tensor:
    """The sum of a part, as it travels: bytes."""
    numbers = [total[slice(*span)] for span in spans_of(run, layout, part)]
    return torch.cat(numbers or [total[:0]]).view(torch.uint8)


def _meta(run: Run, span: tuple[int, int], is_sum: bool = False) -> TensorMeta:
    codec = "none" if is_sum else run.islands.codec
    return TensorMeta((span[1] - span[0],), dtype_name(weights_dtype(run)), codec)
