"""The overlapped objective: how long a step takes in a runtime that computes while it transfers.

A step takes as long as one microbatch is on its way, plus what the busiest device, upload, download, line or
memory still has to do meanwhile, plus the exchange that ends last (docs/design.md, *Planning*). A stage in
front begins first and ends last, so it has longer for its work. Work goes to faster replicas more often
(stochastic wiring, Ryabinin et al., SWARM Parallelism, ICML 2023, section 3.2).

All but the last microbatch's way are means: routers price a line by what is under way on it, so none is met
much more often than others, and leave slow ways to the middle of a step. The simulation that runs the live
policies mostly agrees to 10 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from swarm.errors import SetupError
from swarm.plan.network import BACKWARD_FORWARDS, Network, StepWork, check_fit

SLOPE = 0.05
"""Weight of a second that delays nothing, against one that the step takes."""

MAX_KNOWN = 20_000
"""Stages, links of stages, and boundaries, of which the numbers are kept."""

LAST = 1.25
"""Standard deviations by which a step's last microbatch has a longer way than the mean: fitted to simulations
(2026-11-29)."""

AHEAD = 0.5
"""Of the time until a stage has its first backward, how much it works for other microbatches."""

IDLE = -1
"""The stage of a device that serves none."""


class StepTime(NamedTuple):
    """What a step is predicted to take, and why."""

    total_s: float
    first_s: float
    """One microbatch from the first stage to the last and back, with no other in its way: fill and drain."""
    busy_s: float
    """Of the busiest device, line, upload or download, less what it does of that within `first_s`; and what
    the way of the last microbatch is longer."""
    tail_s: float
    """From the last backward of the first stage to the barrier."""
    limit: str
    """The longest of these, in words: what to have more of."""


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """The quantities that depend on a stage's replicas alone."""

    members: np.ndarray
    work_s: np.ndarray
    """[n] that a microbatch takes of a member, as routers know it: of its device, or of its upload."""
    slowest_s: np.ndarray
    """[n] the same, or of its download."""
    forward_s: np.ndarray
    room: np.ndarray
    """[n] microbatches that a member can hold at once."""
    exchange_s: float
    farthest_s: list[float]
    """[R] from each region to the member that is farthest from it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Stage:
    """The quantities that depend on a stage's replicas and their links."""

    group: _Group
    share: np.ndarray
    """[n] of the microbatches, in proportion to what a member can do, and what it and its links can send."""
    forward_s: float
    """Mean of one microbatch, by share."""
    variance_s2: float
    """Of what one microbatch is computed there."""
    busy_s: float
    """Of the busiest member or its lines to all others, in one step."""
    once_s: float
    """What one microbatch takes of that."""
    what: str
    held: float
    """Seconds of a step for each second that a microbatch stays with a member, of the one with least room."""
    fullest: int
    """That member."""


class _Boundary(NamedTuple):
    hop_s: float
    """Mean of one way of one microbatch: forth and back are added up."""
    variance_s2: float
    back_s: float
    busy_s: float
    """Of the busiest line, in one direction."""
    once_s: float
    what: tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class _Links:
    """Between the members of two neighbouring stages, [a, b] if nothing else is said."""

    back_s: np.ndarray
    """Of a gradient on its way."""
    hop_s: np.ndarray
    """Of a microbatch there and back."""
    once_s: np.ndarray
    """That it keeps the line busy, in the direction that is busier."""
    out_s: np.ndarray
    """[a] that the links of a member are busy with a microbatch, as they share it (`LinkLatency.busy_s`)."""
    in_s: np.ndarray
    """[b] the same of the next stage's."""


class Overlap:
    """Predicts the step of one division after another; what did not change is not computed again."""

    def __init__(self, network: Network, job: StepWork) -> None:
        """
        Raises:
            SetupError: no division can be: see `check_fit`.
        """
        check_fit(network, job)
        self.network, self.job = network, job
        self._stage = lru_cache(maxsize=MAX_KNOWN)(self._measure_stage)
        self._links = lru_cache(maxsize=MAX_KNOWN)(self._measure_links)
        self._boundary = lru_cache(maxsize=MAX_KNOWN)(self._measure_boundary)
        self._group = lru_cache(maxsize=MAX_KNOWN)(self._measure_group)
        least_S1 = np.array([[job.least_bytes(stage)] for stage in range(job.stages)])
        self.fits_SN = least_S1 <= network.memory_bytes
        """[S, N] whether a device can hold a stage."""
        out_S, in_S = np.array([(job.bytes_out(s), job.bytes_in(s)) for s in range(job.stages)]).T
        self._forward_SN = np.array(job.forward_flops)[:, None] / network.flops_per_s
        computes_SN = (1 + BACKWARD_FORWARDS) * self._forward_SN
        sends_SN = 8.0 * out_S[:, None] / network.upload_bps
        self._each_KSN = np.stack([computes_SN, sends_SN, 8.0 * in_S[:, None] / network.download_bps])
        """Seconds that a device computes, uploads and downloads for a microbatch."""
        self.slowest_SN = self._each_KSN.max(axis=0)
        """[S, N] seconds of that which takes longest."""
        # Routers know what a peer computes, its upload (`Hop.work_s`) and its links (`LinkLatency.busy_s`).
        self._work_SN = np.maximum(self._each_KSN[:2].max(axis=0), 1e-12)

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
        found_N = np.zeros(len(self.network), dtype=np.int64)
        for stage, stay_s in zip(stages, self._stays_s(stages, boundaries), strict=True):
            most_n = whole_shares(stage.share, self.job.microbatches)
            needed_n = np.ceil(stage.share * stay_s / max(period_s, 1e-12))
            found_N[stage.group.members] = np.ceil(np.clip(needed_n, 1.0, np.maximum(most_n, 1.0)))
        return found_N

    def weigh_s(self, stage_of: Sequence[int] | np.ndarray) -> tuple[float, float]:
        """The step's seconds; and with a bit of what does not limit it: a search on a plain needs a slope."""
        stages, boundaries = self._parts(stage_of)
        spare_s = sum(stage.busy_s + stage.group.exchange_s for stage in stages)
        spare_s += sum(boundary.busy_s for boundary in boundaries)
        total_s = self._step(stages, boundaries).total_s
        return total_s, total_s + SLOPE * spare_s / len(stages)

    def besides_s(self, stage_of: np.ndarray) -> np.ndarray:
        """[S, 1] what a step takes besides the work of each stage: least for the first one."""
        stays_s = np.array(self._stays_s(*self._parts(stage_of)))[:, None]
        return stays_s[0] - AHEAD * stays_s

    def _parts(self, stage_of: Sequence[int] | np.ndarray) -> tuple[list[_Stage], list[_Boundary]]:
        of_N = np.asarray(stage_of, dtype=np.int64)
        row = np.argsort(of_N, kind="stable")  # stage by stage, in each the devices in their order
        ends = np.searchsorted(of_N[row], np.arange(self.job.stages + 1)).tolist()
        groups = [self._group(s, row[a:b].tobytes()) for s, (a, b) in enumerate(pairwise(ends))]  # type: ignore
        links = [self._links(s, a, b) for s, (a, b) in enumerate(pairwise(groups))]
        beside = zip((None, *links), (*links, None), strict=True)
        stages = [self._stage(s, groups[s], *two) for s, two in enumerate(beside)]
        pairs = zip(links, pairwise(stages), strict=True)
        return stages, [self._boundary(link, a, b) for link, (a, b) in pairs]

    def _stays_s(self, stages: Sequence[_Stage], boundaries: Sequence[_Boundary]) -> list[float]:
        """Per stage, from the forward of a microbatch to the end of its backward, if it never waits."""
        stays_s, behind_s = list[float](), 0.0
        for number in reversed(range(len(stages))):
            behind_s += (1 + BACKWARD_FORWARDS) * stages[number].forward_s
            behind_s += boundaries[number].hop_s if number < len(boundaries) else 0.0
            stays_s.append(behind_s)
        return stays_s[::-1]

    def _step(self, stages: Sequence[_Stage], boundaries: Sequence[_Boundary]) -> StepTime:
        stays_s = self._stays_s(stages, boundaries)
        first_s, busy_s, what = stays_s[0], 0.0, "the way of one microbatch"
        for stage, stay_s in zip(stages, stays_s, strict=True):
            after_s = stage.busy_s - stage.once_s - AHEAD * max(0.0, stay_s - stage.once_s)
            if after_s > busy_s:
                busy_s, what = after_s, stage.what
            if stage.held * stay_s - stay_s > busy_s:
                busy_s = stage.held * stay_s - stay_s
                what = f"the memory of {self.network.devices[stage.fullest].name}"
        for boundary in boundaries:
            if boundary.busy_s - boundary.once_s > busy_s:
                busy_s = boundary.busy_s - boundary.once_s
                a, b = (self.network.devices[i].name for i in boundary.what)
                what = f"the line {a} - {b}"
        # The busiest is busy for most of a step, and the last microbatch late at its end: mostly neither
        # hides the other, nor do they add up.
        spread_s = LAST * math.sqrt(sum(part.variance_s2 for part in (*stages, *boundaries)))
        if spread_s > busy_s:
            what = "the longest way of a microbatch"
        busy_s = math.hypot(busy_s, spread_s)
        # A later stage sees its last backward sooner, by the way back from it to the first stage.
        sooner_s, tail_s, last = 0.0, 0.0, 0
        for number, stage in enumerate(stages):
            if number:
                sooner_s += BACKWARD_FORWARDS * stages[number - 1].forward_s + boundaries[number - 1].back_s
            if stage.group.exchange_s - sooner_s > tail_s:
                tail_s, last = stage.group.exchange_s - sooner_s, number
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
        run_coordinator = int(self.network.region_of[stages[0].group.members[0]])
        return (
            2.0 * max(stage.group.farthest_s[run_coordinator] for stage in stages) if len(stages) > 1 else 0.0
        )

    # -- one stage --------------------------------------------------------------------------------

    def _measure_group(self, number: int, packed_members: bytes) -> _Group:
        members = np.frombuffer(packed_members, dtype=np.int64)
        if not len(members):
            raise SetupError(f"stage {number} has no device")
        if not self.fits_SN[number, members].all():
            one = self.network.devices[int(members[~self.fits_SN[number, members]][0])]
            raise SetupError(f"device {one.name!r} cannot hold stage {number} in its memory")
        return _Group(
            members,
            self._work_SN[number, members],
            self.slowest_SN[number, members],
            self._forward_SN[number, members],
            self._room(number, members),
            self.network.exchange_s(members, self.job.gradient_bytes[number]),
            self.network.latency_s[:, self.network.region_of[members]].max(axis=1).tolist(),
        )

    def _measure_stage(
        self, number: int, group: _Group, before: _Links | None, after: _Links | None
    ) -> _Stage:
        work_n, forward_n = group.work_s, group.forward_s
        if before is not None:
            work_n = np.maximum(work_n, before.in_s)
        if after is not None:
            work_n = np.maximum(work_n, after.out_s)
        share_n = 1.0 / work_n
        share_n /= share_n.sum()
        whole_n = whole_shares(share_n, self.job.microbatches)
        busy_n = whole_n * group.slowest_s
        held_n = whole_n / group.room
        worst = int((busy_n - group.slowest_s).argmax())
        kind = int(self._each_KSN[:, number, group.members[worst]].argmax())
        name = self.network.devices[int(group.members[worst])].name
        forward_s = float(share_n @ forward_n)
        what = (f"stage {number}'s compute", f"the uplink of {name}", f"the downlink of {name}")[kind]
        return _Stage(
            group,
            share_n,
            forward_s,
            (1 + BACKWARD_FORWARDS) ** 2 * float(share_n @ (forward_n - forward_s) ** 2),
            float(busy_n[worst]),
            float(group.slowest_s[worst]),
            what,
            float(held_n.max()),
            int(group.members[held_n.argmax()]),
        )

    def _room(self, number: int, members: np.ndarray) -> np.ndarray:
        """[n] as `StepWork.room`."""
        if not self.job.activation_bytes[number] or np.isinf(self.network.memory_bytes[members]).all():
            return np.full(len(members), np.inf)
        return np.array([self.job.room(number, self.network.devices[int(i)]) for i in members])

    # -- one boundary -----------------------------------------------------------------------------

    def _measure_links(self, number: int, at: _Group, behind: _Group) -> _Links:
        job, up_N, down_N = self.job, self.network.upload_bps, self.network.download_bps
        a, b = at.members, behind.members
        latency_ab, line_ab = self.network.between(a, b)
        forward_bits, backward_bits = 8.0 * job.forward_bytes[number], 8.0 * job.backward_bytes[number]
        forth_ab = forward_bits / np.minimum(np.minimum(line_ab, up_N[a][:, None]), down_N[b])
        back_ab = backward_bits / np.minimum(np.minimum(line_ab, down_N[a][:, None]), up_N[b])
        both_ab = forth_ab + back_ab
        per_s_ab = 2.0 / np.maximum(both_ab, 1e-12)
        return _Links(
            latency_ab + back_ab, 2.0 * latency_ab + both_ab, max(forward_bits, backward_bits) / line_ab,
            1.0 / per_s_ab.sum(axis=1), 1.0 / per_s_ab.sum(axis=0),
        )  # fmt: skip

    def _measure_boundary(self, links: _Links, a: _Stage, b: _Stage) -> _Boundary:
        once_ab, hop_ab = links.once_s, links.hop_s
        busy_ab = np.ceil(whole_shares(np.outer(a.share, b.share), self.job.microbatches) - 1e-9) * once_ab
        worst = divmod(int((busy_ab - once_ab).argmax()), len(b.share))
        hop_s, back_s = float(a.share @ hop_ab @ b.share), float(a.share @ links.back_s @ b.share)
        variance_s2 = float(a.share @ (hop_ab - hop_s) ** 2 @ b.share)
        line = int(a.group.members[worst[0]]), int(b.group.members[worst[1]])
        return _Boundary(hop_s, variance_s2, back_s, float(busy_ab[worst]), float(once_ab[worst]), line)


def whole_shares(share: np.ndarray, microbatches: int) -> np.ndarray:
    """Microbatches of each, by shares of M: the busiest has at least one, since they are not cut."""
    return np.maximum(share * microbatches, np.minimum(1.0, share * microbatches * share.size))
