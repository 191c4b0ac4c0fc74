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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from swarm.errors import SetupError
from swarm.plan.network import BACKWARD_FORWARDS, Network, StepWork, all_reduce_s, check_fit

SLOPE = 0.05
"""Weight of a second that delays nothing, against one that the step takes."""

MOST_PAIRS = 1 << 15
"""Of devices that are looked at together, so that what is reckoned of them stays in a processor's cache."""
NEVER_S = 1e60
"""Of a bit to a device that there is not: so long that it has no part in any sum."""

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


class Known(NamedTuple):
    """What is not measured again for R divisions that are much like these. S stages of at most D members, B
    boundaries.
    """

    members: np.ndarray
    """[R, S, D] in their order; N where a stage has fewer."""
    share: np.ndarray
    """[R, S, D] of the microbatches, in proportion to what a member, and it and its links, can do."""
    exchange_s: np.ndarray
    """[R, S]"""
    boundaries: np.ndarray
    """[R, 7, B] mean of a microbatch's way there and back, and of the way back; what the busiest line, in one
    direction, has to do in a step, and for a microbatch; variance of the way; places of the line's ends."""

    def widened(self, most: int, none: int) -> Known:
        """With so many places a stage, in which `none` is."""
        wider = (0, 0), (0, 0), (0, most - self.members.shape[2])
        members, share = np.pad(self.members, wider, constant_values=none), np.pad(self.share, wider)
        return self._replace(members=members, share=share)

    def replaced(self, by: Known, can_R: np.ndarray, none: int) -> Known:
        """Those of `by`, which are as wide or wider, where they can be."""
        pairs = zip(self.widened(by.members.shape[2], none), by, strict=True)
        return Known(*(np.where(can_R.reshape(-1, *(1,) * (new.ndim - 1)), new, old) for old, new in pairs))


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """What follows from that."""

    known: Known
    forward_s: np.ndarray
    """[R, S] mean of one microbatch, by share."""
    busy_s: np.ndarray
    """[R, S] of the busiest member or its lines to all others, in one step."""
    once_s: np.ndarray
    """[R, S] what one microbatch takes of that."""
    held: np.ndarray
    """[R, S] seconds of a step for each second that a microbatch stays with the member with least room."""
    worst: np.ndarray
    """[R, S, 2] places of the busiest member, and of the one with least room."""
    variance_s2: np.ndarray
    """[R] of what one microbatch takes to compute and on its way."""
    barrier_s: np.ndarray
    """[R] there and back between the run coordinator (the first of stage 0) and the farthest device."""

    def stays_s(self) -> np.ndarray:
        """[R, S] from the forward of a microbatch to the end of its backward, if it never waits."""
        here_RS = (1 + BACKWARD_FORWARDS) * self.forward_s
        here_RS[:, :-1] += self.known.boundaries[:, 0]
        return here_RS[:, ::-1].cumsum(axis=1)[:, ::-1]


class _Steps(NamedTuple):
    """As `StepTime`, of R divisions."""

    total_s: np.ndarray
    first_s: np.ndarray
    after_s: np.ndarray
    """[R, 2 S + B] what stages, their memory and boundaries still have to do after `first_s`."""
    spread_s: np.ndarray
    tail_s: np.ndarray
    """[R, S] of each stage's exchange, what ends after the last backward of the first stage."""


class _Links(NamedTuple):
    """Between the members of two neighbouring stages, for K such; [K, A, B] if nothing else is said."""

    rows: slice
    back_s: np.ndarray
    """Of a gradient on its way."""
    hop_s: np.ndarray
    """Of a microbatch there and back."""
    once_s: np.ndarray
    """That it keeps the line busy, in the direction that is busier."""


class Overlap:
    """Predicts the steps of divisions, many at once: with few devices numpy's calls take most of the time."""

    def __init__(self, network: Network, job: StepWork) -> None:
        """
        Raises:
            SetupError: no division can be: see `check_fit`.
        """
        check_fit(network, job)
        self.network, self.job = network, job
        stages = range(job.stages)
        self.fits_SN = np.array([[job.least_bytes(s)] for s in stages]) <= network.memory_bytes
        """[S, N] whether a device can hold a stage."""
        self._fits = np.pad(self.fits_SN, ((0, 0), (0, 1)), constant_values=True)
        out_S, in_S = np.array([(job.bytes_out(s), job.bytes_in(s)) for s in stages]).T
        forward_SN = np.array(job.forward_flops)[:, None] / network.flops_per_s
        computes_SN = (1 + BACKWARD_FORWARDS) * forward_SN
        sends_SN = 8.0 * out_S[:, None] / network.upload_bps
        self._each_KSN = np.stack([computes_SN, sends_SN, 8.0 * in_S[:, None] / network.download_bps])
        """Seconds that a device computes, uploads and downloads for a microbatch."""
        self.slowest_SN = self._each_KSN.max(axis=0)
        """[S, N] seconds of that which takes longest."""
        # Routers know what a peer computes, its upload (`Hop.work_s`) and its links (`LinkLatency.busy_s`).
        work_SN = np.maximum(self._each_KSN[:2].max(axis=0), 1e-12)
        _, firsts, kind_N = np.unique(network.memory_bytes, return_index=True, return_inverse=True)
        room_SN = np.array([[job.room(s, network.devices[i]) for i in firsts] for s in stages])[:, kind_N]
        # One device more, which there is not, fills up stages: it has no share, and is never the busiest.
        absent = ((work_SN, np.inf), (self.slowest_SN, NEVER_S), (forward_SN, 0.0), (room_SN, 1.0))
        self._of_each = [np.pad(of_SN, ((0, 0), (0, 1)), constant_values=none) for of_SN, none in absent]
        self._region_N = np.append(network.region_of, len(network.regions))
        self._latency_RR = np.pad(network.latency_s, (0, 1))
        self._bit_s_RR, self._part_s_RR = (
            np.pad(1.0 / network.bandwidth_bps, (0, 1), constant_values=none) for none in (NEVER_S, 0.0)
        )
        self._up_N, self._down_N = (
            np.append(1.0 / each_N, 0.0) for each_N in (network.upload_bps, network.download_bps)
        )
        self._limited = bool(self._up_N.any() or self._down_N.any())
        self._bits_2B11 = 8.0 * np.array([job.forward_bytes, job.backward_bytes])[:, :, None, None]

    # -- the whole step ---------------------------------------------------------------------------

    def predict(self, stage_of: Sequence[int] | np.ndarray) -> StepTime:
        """The step of a division: the stage of every device, or `IDLE`.

        Raises:
            SetupError: a stage without a device, or a device that cannot hold its stage.
        """
        parts = self._parts(np.asarray(stage_of, dtype=np.int64)[None])
        steps = self._steps(parts)
        total_s, first_s, spread_s = (
            float(each_R[0]) for each_R in (steps.total_s, steps.first_s, steps.spread_s)
        )
        tail_s, last = max(0.0, float(steps.tail_s.max())), int(steps.tail_s[0].argmax())
        after_s = max(0.0, float(steps.after_s.max()))
        busy_s, barrier_s = math.hypot(after_s, spread_s), float(parts.barrier_s[0])
        if tail_s > max(busy_s, first_s):
            limit = f"the all-reduce of stage {last}"
        elif first_s >= busy_s:
            limit = "the way of one microbatch through all stages: too few microbatches, or too far apart"
        elif spread_s > after_s:
            limit = "the longest way of a microbatch"
        else:
            limit = self._limit(parts, int(steps.after_s[0].argmax()))
        return StepTime(total_s, first_s, busy_s, tail_s + barrier_s, limit)

    def _limit(self, parts: _Parts, place: int) -> str:
        """What has most to do, by its place in `_Steps.after_s`."""
        kind, number = divmod(place, self.job.stages)
        if kind == 2:
            ends = zip((number, number + 1), parts.known.boundaries[0, 5:, number], strict=True)
            a, b = (self.network.devices[parts.known.members[0, stage, int(at)]].name for stage, at in ends)
            return f"the line {a} - {b}"
        member = int(parts.known.members[0, number, parts.worst[0, number, kind]])
        name = self.network.devices[member].name
        if kind == 1:
            return f"the memory of {name}"
        what = (f"stage {number}'s compute", f"the uplink of {name}", f"the downlink of {name}")
        return what[int(self._each_KSN[:, number, member].argmax())]

    def in_flight(self, stage_of: Sequence[int] | np.ndarray) -> np.ndarray:
        """[N] microbatches that each device has at once where none waits, 0 of those that serve nothing.

        By Little's law: its share of the rate, times the seconds from its forward to the end of its backward.
        """
        parts = self._parts(np.asarray(stage_of, dtype=np.int64)[None])
        period_s = (
            max(parts.busy_s.max(), parts.known.boundaries[:, 2].max(initial=0.0)) / self.job.microbatches
        )
        there_SD = parts.known.members[0] < len(self.network)
        share_SD, count_S1 = parts.known.share[0], there_SD.sum(axis=1, keepdims=True)
        most_SD = whole_shares(share_SD, self.job.microbatches, count_S1)
        needed_SD = np.ceil(share_SD * parts.stays_s()[0][:, None] / max(period_s, 1e-12) - 1e-9)
        found_SD = np.ceil(np.clip(needed_SD, 1.0, np.maximum(most_SD, 1.0)))
        found_N = np.zeros(len(self.network), dtype=np.int64)
        found_N[parts.known.members[0][there_SD]] = found_SD[there_SD]
        return found_N

    def weigh_s(self, of_RN: np.ndarray, known: Known | None = None) -> tuple[np.ndarray, np.ndarray, Known]:
        """[R] the steps' seconds; and with a bit of what limits none: a search on a plain needs a slope.

        `known`, of as many divisions: what those stages and boundaries took that are the same.

        Raises:
            SetupError: as `predict`, of any division.
        """
        parts = self._parts(of_RN, known)
        spare_R = (parts.busy_s + parts.known.exchange_s).sum(axis=1) + parts.known.boundaries[:, 2].sum(
            axis=1
        )
        total_R = self._steps(parts).total_s
        return total_R, total_R + SLOPE * spare_R / self.job.stages, parts.known

    def besides_s(self, stage_of: np.ndarray) -> np.ndarray:
        """[S, 1] what a step takes besides the work of each stage: least for the first one."""
        stays_S1 = self._parts(stage_of[None]).stays_s()[0][:, None]
        return stays_S1[0] - AHEAD * stays_S1

    def _steps(self, parts: _Parts) -> _Steps:
        stays_RS, once_RS, boundaries = parts.stays_s(), parts.once_s, parts.known.boundaries
        after_RX = np.concatenate(
            [
                parts.busy_s - once_RS - AHEAD * np.maximum(0.0, stays_RS - once_RS),
                parts.held * stays_RS - stays_RS,
                boundaries[:, 2] - boundaries[:, 3],
            ],
            axis=1,
        )
        # The busiest is busy for most of a step, and the last microbatch late at its end: mostly neither
        # hides the other, nor do they add up.
        spread_R = LAST * np.sqrt(parts.variance_s2)
        busy_R = np.hypot(after_RX.max(axis=1, initial=0.0), spread_R)
        # A later stage sees its last backward sooner, by the way back from it to the first stage.
        tail_RS = parts.known.exchange_s.copy()
        tail_RS[:, 1:] -= (BACKWARD_FORWARDS * parts.forward_s[:, :-1] + boundaries[:, 1]).cumsum(axis=1)
        total_R = stays_RS[:, 0] + busy_R + tail_RS.max(axis=1, initial=0.0) + parts.barrier_s
        return _Steps(total_R, stays_RS[:, 0], after_RX, spread_R, tail_RS)

    # -- its parts --------------------------------------------------------------------------------

    def _members(self, of_RN: np.ndarray, least: int) -> tuple[np.ndarray, np.ndarray]:
        """[R, S, D] the devices of each stage in their order, N where it has fewer; [R, S] their number."""
        (count, devices), stages = of_RN.shape, self.job.stages
        row_RN = np.argsort(of_RN.astype(np.int16), axis=1, kind="stable")
        cells = of_RN + np.arange(1, 1 + count * (stages + 1), stages + 1)[:, None]  # the idle before stage 0
        count_RS = np.bincount(cells.ravel(), minlength=count * (stages + 1)).reshape(count, stages + 1)
        begin_RS1 = (count_RS.cumsum(axis=1) - count_RS)[:, 1:, None]
        count_RS = count_RS[:, 1:]
        if not count_RS.all():
            raise SetupError(f"stage {int(np.argwhere(count_RS == 0)[0, 1])} has no device")
        place_D = np.arange(max(least, int(count_RS.max())))
        place_RSD = np.minimum(begin_RS1 + place_D, devices - 1) + devices * np.arange(count)[:, None, None]
        member_RSD = np.where(place_D < count_RS[:, :, None], row_RN.take(place_RSD), devices)
        return member_RSD, count_RS

    def _parts(self, of_RN: np.ndarray, known: Known | None = None) -> _Parts:
        job, stages, devices = self.job, self.job.stages, len(self.network)
        member_RSD, count_RS = self._members(of_RN, known.members.shape[2] if known else 1)
        count, _, most = member_RSD.shape
        which_RSD = member_RSD + (devices + 1) * np.arange(stages)[:, None]
        work_RSD, slowest_RSD, forward_RSD, room_RSD = (of_SN.take(which_RSD) for of_SN in self._of_each)
        self._check(member_RSD, which_RSD)
        if known is None:
            changed_RS = np.ones((count, stages), dtype=bool)
            known = Known(
                member_RSD, work_RSD, np.empty((count, stages)), np.empty((count, 7, max(0, stages - 1)))
            )
        else:
            known = known.widened(most, devices)
            changed_RS = (member_RSD != known.members).any(axis=2)
        near_RS = changed_RS.copy()  # their shares may be others
        near_RS[:, 1:] |= changed_RS[:, :-1]
        near_RS[:, :-1] |= changed_RS[:, 1:]
        # Boundaries of all divisions that may have changed, one after the other.
        r_K, number_K = np.nonzero(near_RS[:, :-1] | near_RS[:, 1:])
        before_KD, behind_KD = member_RSD[r_K, number_K], member_RSD[r_K, number_K + 1]
        count_2K = np.stack([count_RS[r_K, number_K], count_RS[r_K, number_K + 1]])
        out_RSD, in_RSD = np.zeros((2, *member_RSD.shape))
        links = list[_Links]()
        for rows, (a, b) in _together(count_2K):
            link, out_KA, in_KB = self._measure_links(
                rows, number_K[rows], before_KD[rows, :a], behind_KD[rows, :b]
            )
            out_RSD[r_K[rows], number_K[rows], :a] = out_KA
            in_RSD[r_K[rows], number_K[rows] + 1, :b] = in_KB
            links.append(link)
        share_RSD = np.reciprocal(np.maximum(np.maximum(work_RSD, out_RSD), in_RSD))
        share_RSD /= share_RSD.sum(axis=2, keepdims=True)
        share_RSD = np.where(near_RS[:, :, None], share_RSD, known.share)
        whole_RSD = whole_shares(share_RSD, job.microbatches, count_RS[:, :, None])
        busy_RSD = whole_RSD * slowest_RSD
        held_RSD = whole_RSD / room_RSD
        worst_RS2 = np.stack([(busy_RSD - slowest_RSD).argmax(axis=2), held_RSD.argmax(axis=2)], axis=2)
        at_RS = worst_RS2[:, :, 0] + most * np.arange(count * stages).reshape(count, stages)
        forward_RS = np.einsum("rsd,rsd->rs", share_RSD, forward_RSD)
        off_RSD = forward_RSD - forward_RS[:, :, None]
        variance_R = (1 + BACKWARD_FORWARDS) ** 2 * np.einsum("rsd,rsd,rsd->r", share_RSD, off_RSD, off_RSD)
        boundaries = known.boundaries.copy()
        ends_KD = share_RSD[r_K, number_K], share_RSD[r_K, number_K + 1]
        for link in links:
            found = np.stack(self._measure_boundaries(link, *ends_KD, count_2K), axis=1)
            boundaries[r_K[link.rows], :, number_K[link.rows]] = found
        exchange_RS = known.exchange_s.copy()
        exchange_RS[changed_RS] = self._exchange_s(
            np.nonzero(changed_RS)[1], member_RSD[changed_RS], count_RS[changed_RS]
        )
        return _Parts(
            Known(member_RSD, share_RSD, exchange_RS, boundaries), forward_RS, busy_RSD.take(at_RS),
            slowest_RSD.take(at_RS), held_RSD.max(axis=2), worst_RS2,
            variance_R + boundaries[:, 4].sum(axis=1), self._barrier_s(member_RSD),
        )  # fmt: skip

    def _check(self, member_RSD: np.ndarray, which_RSD: np.ndarray) -> None:
        if not self._fits.take(which_RSD).all():
            _, number, place = np.argwhere(~self._fits.take(which_RSD))[0]
            one = self.network.devices[int(member_RSD[0, number, place])]
            raise SetupError(f"device {one.name!r} cannot hold stage {number} in its memory")

    def _measure_links(
        self, rows: slice, number_K: np.ndarray, a_KA: np.ndarray, b_KB: np.ndarray
    ) -> tuple[_Links, np.ndarray, np.ndarray]:
        """Also [K, A] that the links of a member are busy with a microbatch, as they share it
        (`LinkLatency.busy_s`), and [K, B] the same of the next stage's.
        """
        latency_s, bit_s = self._lines(a_KA, b_KB, self._bit_s_RR)
        forth_bits, back_bits = self._bits_2B11[:, number_K]
        once_s, forth_s, back_s = np.maximum(forth_bits, back_bits) * bit_s, bit_s, bit_s
        if self._limited:
            up_KA1, down_KA1 = self._up_N.take(a_KA)[:, :, None], self._down_N.take(a_KA)[:, :, None]
            up_K1B, down_K1B = self._up_N.take(b_KB)[:, None], self._down_N.take(b_KB)[:, None]
            forth_s = np.maximum(np.maximum(bit_s, up_KA1), down_K1B)
            back_s = np.maximum(np.maximum(bit_s, down_KA1), up_K1B)
        back_s = back_bits * back_s
        both_s = forth_bits * forth_s
        both_s += back_s
        per_s = 2.0 / np.maximum(both_s, 1e-12)
        back_s += latency_s
        latency_s *= 2.0
        both_s += latency_s
        return _Links(rows, back_s, both_s, once_s), 1.0 / per_s.sum(axis=2), 1.0 / per_s.sum(axis=1)

    def _measure_boundaries(
        self, link: _Links, a_KD: np.ndarray, b_KD: np.ndarray, count_2K: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """[K] mean of a way, and of a gradient's; what the busiest line takes for a step, for a microbatch;
        variance of the way; places of that line's ends.
        """
        (rows, back_s, hop_s, once_s), wide = link, link.hop_s.shape[2]
        share = a_KD[rows, : hop_s.shape[1], None] * b_KD[rows, None, :wide]
        busy_s = whole_shares(share, self.job.microbatches, count_2K[:, rows].prod(axis=0)[:, None, None])
        busy_s -= 1e-9
        np.ceil(busy_s, out=busy_s)
        busy_s *= once_s
        worst_K = (busy_s - once_s).reshape(len(share), -1).argmax(axis=1)
        at_K = worst_K + once_s[0].size * np.arange(len(share))
        hop_K, back_K = (np.einsum("kab,kab->k", share, lasts_s) for lasts_s in (hop_s, back_s))
        off_s = hop_s - hop_K[:, None, None]
        variance_K = np.einsum("kab,kab,kab->k", share, off_s, off_s)
        return hop_K, back_K, busy_s.take(at_K), once_s.take(at_K), variance_K, *np.divmod(worst_K, wide)

    def _exchange_s(self, stage_K: np.ndarray, member_KD: np.ndarray, count_K: np.ndarray) -> np.ndarray:
        """[K] of each stage's all-reduce: see `Network.exchange_s`."""
        part_K = 8.0 * np.array(self.job.gradient_bytes)[stage_K] / count_K
        found_K = np.empty(len(count_K))
        for rows, (wide,) in _together(count_K[None]):
            members, part_K1 = member_KD[rows, :wide], part_K[rows, None]
            arrival_s, bit_s = self._lines(members, members, self._part_s_RR)
            bit_s *= part_K1[:, :, None]
            up_s = np.zeros(1)
            if self._limited:
                others_s, there = (count_K[rows, None] - 1) * part_K1, members < len(self.network)
                up_s, down_s = (others_s * each_N.take(members) for each_N in (self._up_N, self._down_N))
                bit_s = np.maximum(np.maximum(bit_s, up_s[:, :, None]), down_s[:, None])
                bit_s *= there[:, :, None] & there[:, None]
            arrival_s += bit_s
            arrival_s[:, np.arange(wide), np.arange(wide)] = 0.0
            found_K[rows] = all_reduce_s(arrival_s, up_s)
        return found_K

    def _lines(
        self, a_KA: np.ndarray, b_KB: np.ndarray, bit_s_RR: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """[K, A, B] latencies, and seconds of a bit between these devices and those."""
        here = (self._region_N.take(a_KA) * len(bit_s_RR))[:, :, None] + self._region_N.take(b_KB)[:, None]
        return self._latency_RR.take(here), bit_s_RR.take(here)

    def _barrier_s(self, member_RSD: np.ndarray) -> np.ndarray:
        regions_RX = self._region_N.take(member_RSD.reshape(len(member_RSD), -1))
        if member_RSD.shape[1] == 1:
            return np.zeros(len(member_RSD))
        return 2.0 * self._latency_RR[regions_RX[:, :1], regions_RX].max(axis=1)


def _together(count_XK: np.ndarray) -> Iterator[tuple[slice, list[int]]]:
    """Rows of which few enough pairs are looked at at once, and the most members of one."""
    rows, most = count_XK.shape[1], int(count_XK.max(axis=1, initial=1).prod())
    each = max(1, MOST_PAIRS // most ** (2 // len(count_XK)))
    for begin in range(0, rows, each):
        here = slice(begin, min(begin + each, rows))
        yield here, count_XK[:, here].max(axis=1).tolist()


def whole_shares(share: np.ndarray, microbatches: int, count: np.ndarray) -> np.ndarray:
    """Microbatches of each of `count`, by shares: the busiest has at least one, since they are not cut."""
    found = share * microbatches
    return np.maximum(found, np.minimum(1.0, found * count))
