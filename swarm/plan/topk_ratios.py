"""Which boundaries send only a part of their numbers, and how small a part: AdaTopK.

FusionLLM (Tang et al., 2024, adaptive compression) compresses a link i by max(1, 3 r R_i / max R), R being
the estimated times of transfer, r what the slowest is compressed by, 3 what places cost. Here the same rule
with our own bytes: the slowest boundary gets the smallest part that is allowed, every other one the largest
with which it takes no longer, and those that need none of it keep their codec, or take one of all numbers in
fewer bits. A boundary that hides behind the computation needs no compression at all: `enough_s`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from swarm.codecs import PPM, Codec
from swarm.errors import SetupError
from swarm.ids import Stage
from swarm.plan.network import Network, carried_s

VALUES = "blockwise8"
"""How the numbers look that a top-k keeps."""


def boundary_codecs(
    bandwidths_bps: Callable[[int, str], tuple[float, float]],
    bytes_of: Callable[[int, str], tuple[float, float]], base: Sequence[str], *, least: float,
    enough_s: float = 0.0,
) -> tuple[str, ...]:  # fmt: skip
    """The codec of what each boundary sends forward.

    Args:
        bandwidths_bps: (boundary, codec) -> (forward, backward), as `boundary_bandwidths` has it.
        bytes_of: (boundary, codec) -> bytes of a microbatch on the wire, (activations, their gradient). A
            larger part takes no fewer.
        base: the codec of each boundary as it is.
        least: the smallest part of the numbers that may be kept.
        enough_s: a microbatch need not cross a boundary in less.

    Raises:
        SetupError: a part that cannot be.
    """
    smallest_ppm = round(least * PPM) if math.isfinite(least) else 0
    if not 1 <= smallest_ppm < PPM:
        raise SetupError(f"a part of {least} cannot be kept: it must be above 0 and below 1")

    def seconds(boundary: int, codec: str) -> float:
        both = zip(bytes_of(boundary, codec), bandwidths_bps(boundary, codec), strict=True)
        return max(8 * nbytes / bps for nbytes, bps in both)

    smallest = Codec(smallest_ppm, VALUES).name
    best = [min(seconds(b, base[b]), seconds(b, smallest)) for b in range(len(base))]
    limit_s = max([enough_s, *best])

    def chosen(boundary: int) -> str:
        for whole in (base[boundary], "bf16", VALUES, "hadamard4"):
            if seconds(boundary, whole) <= limit_s:
                return whole
        if seconds(boundary, smallest) >= limit_s:
            return smallest
        parts = range(smallest_ppm, PPM)
        found = bisect_right(parts, limit_s, key=lambda ppm: seconds(boundary, Codec(ppm, VALUES).name))
        unit = 10 ** max(0, len(str(parts[found - 1])) - 3)  # so that people can read it: 0.0371
        return Codec(max(smallest_ppm, parts[found - 1] // unit * unit), VALUES).name

    return tuple(chosen(boundary) for boundary in range(len(base)))


def boundary_bandwidths(
    network: Network, stage_of: Sequence[Stage] | np.ndarray, stages: int, packed_part: float = 1.0
) -> list[tuple[float, float]]:
    """Of each boundary (forward, backward): what all its lines carry together, in bits a second.

    A microbatch takes any pair of devices alike, so a line counts with the harmonic mean; as many are in
    use at once as the smaller stage has devices. A device between two boundaries shares its own line among
    them: it sends activations on and gradients back. `stage_of`: of each device, as a plan has it;
    `packed_part`: of a body, what slow lines carry.
    """
    inner_N = (np.asarray(stage_of) > 0) & (np.asarray(stage_of) < stages - 1)
    up_N, down_N = network.upload_bps / (1 + inner_N), network.download_bps / (1 + inner_N)
    members = [np.flatnonzero(np.asarray(stage_of) == stage) for stage in range(stages)]

    def mean(senders: np.ndarray, receivers: np.ndarray) -> float:
        _, line_ab = network.between(senders, receivers)
        line_ab = np.minimum(np.minimum(line_ab, up_N[senders][:, None]), down_N[receivers])
        seconds_a_bit = float(carried_s((1.0, packed_part), 1.0 / line_ab).mean())
        return min(len(senders), len(receivers)) / seconds_a_bit if seconds_a_bit else math.inf

    return [(mean(a, b), mean(b, a)) for a, b in pairwise(members)]
