"""The overlapped objective: how long a step takes in a runtime that computes while it transfers.

What it is a model of: trainers send each microbatch through one peer of each stage, to faster ones more often
(stochastic wiring, Ryabinin et al., SWARM Parallelism, ICML 2023, section 3.2); a device computes one thing
at a time; a line's two directions, an upload and a download are each shared by what flows there. When the
last backward of a stage is done its members add their sums up (butterfly: everybody owns a part, gets it from
the others, and gives the sum back), all stages at once; then a barrier.

So a step takes as long as one microbatch is on its way, plus what the busiest device, upload, download or
line still has to do meanwhile, plus the exchange that ends last. Unequal numbers of replicas are fine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from scipy.special import ndtri

from swarm.errors import SetupError
from swarm.plan.network import BACKWARD_FORWARDS, Job, Network, check_fit

SLOPE = 0.05
"""Weight of a second that delays nothing, against one that the step takes."""

MAX_KNOWN = 20_000
"""Stages, and boundaries, of which the numbers are kept."""

IDLE = -1
"""The stage of a device that serves none."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """What a step is predicted to take, and why."""

    total_s: float
    first_s: float
    """One microbatch from the first stage to the last and back, with no other in its way: fill and drain."""
    busy_s: float
    """Of the busiest device, line, upload or download, less the one microbatch that `first_s` has in it."""
    tail_s: float
    """From the last backward of the first stage to the barrier."""
    limit: str
    """The longest of these, in words: what to have more of."""


@dataclass(frozen=True, slots=True, eq=False)
class _Stage:
    """The quantities that depend on a stage's replicas alone."""

    members: np.ndarray
    share: np.ndarray
    """[n] of the microbatches, in proportion to what a member can do and send."""
    forward_s: float
    """Mean of one microbatch, by share."""
    variance_s2: float
    """Of forward and backward together."""
    busy_s: float
    """Of the busiest member or its lines to all others, in one step."""
    once_s: float
    """What one microbatch takes of that."""
    what: str
    exchange_s: float


@dataclass(frozen=True, slots=True, eq=False)
class _Boundary:
    hop_s: float
    """Mean of one way of one microbatch: forth and back are added up."""
    back_s: float
    variance_s2: float
    """Of forth and back together, over the pairs that a microbatch may meet."""
    busy_s: float
    """Of the busiest line, in one direction."""
    once_s: float
    uses: float
    """Microbatches that pass one of the lines that are nearly as busy."""
    what: tuple[int, int]


class Overlap:
    """Predicts the step of one division after another; what did not change is not computed again."""

    def __init__(self, network: Network, job: Job) -> None:
        """
        Raises:
            SetupError: no division can be: see `check_fit`.
        """
        check_fit(network, job)
        self.network, self.job = network, job
        self.region_N = network.region_of()
        """[N] of every device, as an index."""
        self._flops_N = np.array([device.flops_per_s for device in network.devices])
        self._up_N = np.array([device.upload_bps for device in network.devices])
        self._down_N = np.array([device.download_bps for device in network.devices])
        self._stage = lru_cache(maxsize=MAX_KNOWN)(self._measure_stage)
        self._boundary = lru_cache(maxsize=MAX_KNOWN)(self._measure_boundary)
        least_S1 = np.array([[job.least_bytes(stage)] for stage in range(job.stages)])
        self.fits_SN = least_S1 <= np.array([device.memory_bytes for device in network.devices])
        """[S, N] whether a device can hold a stage."""

    # -- the whole step ---------------------------------------------------------------------------

    def predict(self, stage_of: Sequence[int] | np.ndarray) -> StepTime:
        """The step of a division: the stage of every device, or `IDLE`.

        Raises:
            SetupError: a stage without a device, or a device that cannot hold its stage.
        """
        return self._step(*self._parts(stage_of))

    def in_flight(self, stage_of: Sequence[int] | np.ndarray) -> np.ndarray:
        """[N] microbatches that each device has at once where none waits, 0 of those that serve nothing.

        By Little's law: its share of the rate, times the seconds from its forward to the end of its backward.
        """
        stages, boundaries = self._parts(stage_of)
        period_s = max(part.busy_s for part in (*stages, *boundaries)) / self.job.microbatches
        found_N, behind_s = np.zeros(len(self.network), dtype=np.int64), 0.0
        for number in reversed(range(self.job.stages)):
            stage = stages[number]
            if number < self.job.stages - 1:
                behind_s += boundaries[number].hop_s
            behind_s += (1 + BACKWARD_FORWARDS) * stage.forward_s
            most_n = whole_shares(stage.share, self.job.microbatches)
            needed_n = np.ceil(stage.share * behind_s / max(period_s, 1e-12))
            found_N[stage.members] = np.ceil(np.clip(needed_n, 1.0, np.maximum(most_n, 1.0)))
        return found_N

    def soft_s(self, stage_of: Sequence[int] | np.ndarray) -> float:
        """The step's seconds, and a little of what does not limit it: a search on a plain needs a slope."""
        stages, boundaries = self._parts(stage_of)
        spare_s = sum(stage.busy_s + stage.exchange_s for stage in stages)
        spare_s += sum(boundary.busy_s for boundary in boundaries)
        return self._step(stages, boundaries).total_s + SLOPE * spare_s / len(stages)

    def _parts(self, stage_of: Sequence[int] | np.ndarray) -> tuple[list[_Stage], list[_Boundary]]:
        of_N = np.asarray(stage_of, dtype=np.int64)
        stages = [self._stage(s, np.flatnonzero(of_N == s).tobytes()) for s in range(self.job.stages)]
        return stages, [self._boundary(s, a, b) for s, (a, b) in enumerate(pairwise(stages))]

    def _step(self, stages: Sequence[_Stage], boundaries: Sequence[_Boundary]) -> StepTime:
        first_s = sum((1 + BACKWARD_FORWARDS) * stage.forward_s for stage in stages)
        first_s += sum(boundary.hop_s for boundary in boundaries)
        busy_s, what, uses = 0.0, "the way of one microbatch", float(self.job.microbatches)
        for stage in stages:
            if stage.busy_s - stage.once_s > busy_s:
                busy_s, what = stage.busy_s - stage.once_s, stage.what
        for boundary in boundaries:
            if boundary.busy_s - boundary.once_s > busy_s:
                busy_s = boundary.busy_s - boundary.once_s
                a, b = (self.network.devices[i].name for i in boundary.what)
                what, uses = f"the line {a} - {b}", boundary.uses
        variance_s2 = sum(part.variance_s2 for part in (*stages, *boundaries))
        # The step waits for the last of those that are on their way when what is busiest has nothing left.
        first_s += largest_of(uses * min(1.0, first_s / max(busy_s, 1e-12))) * math.sqrt(variance_s2)
        # A later stage sees its last backward sooner, by the way back from it to the first stage.
        sooner_s, tail_s, last = 0.0, 0.0, 0
        for number, stage in enumerate(stages):
            if number:
                sooner_s += BACKWARD_FORWARDS * stages[number - 1].forward_s + boundaries[number - 1].back_s
            if stage.exchange_s - sooner_s > tail_s:
                tail_s, last = stage.exchange_s - sooner_s, number
        barrier_s = self._barrier_s(stages)
        total_s = first_s + busy_s + tail_s + barrier_s
        if tail_s > max(busy_s, first_s):
            limit = f"the all-reduce of stage {last}"
        elif first_s > busy_s:
            limit = "the way of one microbatch through all stages: too few microbatches, or too far apart"
        else:
            limit = what
        return StepTime(total_s, first_s, busy_s, tail_s + barrier_s, limit)

    def _barrier_s(self, stages: Sequence[_Stage]) -> float:
        """There and back between the run coordinator (the first of stage 0) and the farthest device."""
        run_coordinator = self.region_N[stages[0].members[0]]
        regions = np.unique(np.concatenate([self.region_N[stage.members] for stage in stages]))
        return 2.0 * float(self.network.latency_s[run_coordinator, regions].max()) if len(stages) > 1 else 0.0

    # -- one stage --------------------------------------------------------------------------------

    def _measure_stage(self, number: int, packed_members: bytes) -> _Stage:
        job, devices, members = self.job, self.network.devices, np.frombuffer(packed_members, dtype=np.int64)
        if not len(members):
            raise SetupError(f"stage {number} has no device")
        if not self.fits_SN[number, members].all():
            one = devices[int(members[~self.fits_SN[number, members]][0])]
            raise SetupError(f"device {one.name!r} cannot hold stage {number} in its memory")
        forward_n = job.forward_flops[number] / self._flops_N[members]
        out_bits, in_bits = self._bits(number)
        each_s = np.stack(
            [
                (1 + BACKWARD_FORWARDS) * forward_n,
                out_bits / self._up_N[members],
                in_bits / self._down_N[members],
            ]
        )
        slowest_n = each_s.max(axis=0)
        rate_n = 1.0 / np.maximum(slowest_n, 1e-12)
        share_n = rate_n / rate_n.sum()
        busy_n = whole_shares(share_n, job.microbatches) * slowest_n
        worst = int((busy_n - slowest_n).argmax())
        kind = int(each_s[:, worst].argmax())
        name = devices[int(members[worst])].name
        forward_s = float(share_n @ forward_n)
        what = (f"stage {number}'s compute", f"the uplink of {name}", f"the downlink of {name}")[kind]
        return _Stage(
            members,
            share_n,
            forward_s,
            float(share_n @ ((1 + BACKWARD_FORWARDS) * (forward_n - forward_s)) ** 2),
            float(busy_n[worst]),
            float(slowest_n[worst]),
            what,
            self._exchange_s(members, 8.0 * job.gradient_bytes[number]),
        )

    def _bits(self, number: int) -> tuple[float, float]:
        """(out, in) of a member of a stage for one microbatch."""
        job = self.job
        before, after = number > 0, number < job.stages - 1
        out_bytes = (job.forward_bytes[number] if after else 0.0) + (
            job.backward_bytes[number - 1] if before else 0.0
        )
        in_bytes = (job.forward_bytes[number - 1] if before else 0.0) + (
            job.backward_bytes[number] if after else 0.0
        )
        return 8.0 * out_bytes, 8.0 * in_bytes

    def _exchange_s(self, members: np.ndarray, gradient_bits: float) -> float:
        """Butterfly over `members`: parts go to their owners, then their sums to all."""
        count = len(members)
        if count == 1:
            return 0.0
        part_bits = gradient_bits / count
        region_n = self.region_N[members]
        here = np.ix_(region_n, region_n)
        latency_nn = self.network.latency_s[here]
        line_s_nn = part_bits / self.network.bandwidth_bps[here]
        np.fill_diagonal(line_s_nn, 0.0)
        up_n = (count - 1) * part_bits / self._up_N[members]
        down_n = (count - 1) * part_bits / self._down_N[members]
        # Everybody sends to everybody at once, so a part has come when its line and both ends are through.
        slow_nn = np.maximum(np.maximum(line_s_nn, up_n[:, None]), down_n[None, :])
        arrival_nn = latency_nn + slow_nn
        np.fill_diagonal(arrival_nn, 0.0)
        owner_n = np.maximum(
            arrival_nn.max(axis=0), up_n
        )  # its own upload has the others' parts to send first
        return float((owner_n[:, None] + arrival_nn).max())

    # -- one boundary -----------------------------------------------------------------------------

    def _measure_boundary(self, number: int, a: _Stage, b: _Stage) -> _Boundary:
        job = self.job
        here = np.ix_(self.region_N[a.members], self.region_N[b.members])
        latency_ab, line_ab = self.network.latency_s[here], self.network.bandwidth_bps[here]
        forth = np.minimum(np.minimum(line_ab, self._up_N[a.members][:, None]), self._down_N[b.members])
        back = np.minimum(np.minimum(line_ab, self._down_N[a.members][:, None]), self._up_N[b.members])
        forward_bits, backward_bits = 8.0 * job.forward_bytes[number], 8.0 * job.backward_bytes[number]
        share_ab = a.share[:, None] * b.share
        back_ab = latency_ab + backward_bits / back
        hop_ab = latency_ab + forward_bits / forth + back_ab
        once_ab = max(forward_bits, backward_bits) / line_ab
        busy_ab = most_uses(share_ab, job.microbatches, once_ab) * once_ab
        worst = divmod(int((busy_ab - once_ab).argmax()), len(b.members))
        hop_s = float((share_ab * hop_ab).sum())
        return _Boundary(
            hop_s,
            float((share_ab * back_ab).sum()),
            float((share_ab * (hop_ab - hop_s) ** 2).sum()),
            float(busy_ab[worst]),
            float(once_ab[worst]),
            float((share_ab * job.microbatches)[busy_ab >= 0.8 * busy_ab[worst]].sum()),
            (int(a.members[worst[0]]), int(b.members[worst[1]])),
        )


def whole_shares(share_n: np.ndarray, microbatches: int) -> np.ndarray:
    """[n] microbatches of each member: shares of M, the busiest rounded up since microbatches are not cut."""
    return np.maximum(share_n * microbatches, np.minimum(1.0, share_n * microbatches * len(share_n)))


def most_uses(share_ab: np.ndarray, microbatches: int, once_ab: np.ndarray) -> np.ndarray:
    """[a, b] how often a line is used in a step if it is the unluckiest of those that matter.

    Pairs meet by chance while every member gets just its share: a count with the mean M · p · q and the
    variance M · p (1 - p) · q (1 - q) (of a table with fixed margins). K counts the lines that are at least
    half as busy as the busiest.
    """
    mean_ab = share_ab * microbatches
    busy_ab = mean_ab * once_ab
    lines = float((busy_ab >= 0.5 * busy_ab.max()).sum())
    p_a1, q_1b = share_ab.sum(axis=1, keepdims=True), share_ab.sum(axis=0, keepdims=True)
    deviation_ab = np.sqrt(mean_ab * (1 - p_a1).clip(0) * (1 - q_1b).clip(0))
    return mean_ab + largest_of(lines) * deviation_ab


def largest_of(count: float) -> float:
    """How many standard deviations the largest of `count` draws is above their mean (Blom's quantile)."""
    return max(0.0, float(ndtri((count - 0.375) / (count + 0.25)))) if count > 1 else 0.0
