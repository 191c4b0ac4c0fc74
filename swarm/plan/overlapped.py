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

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from swarm.codecs import SLOW_BPS
from swarm.errors import SetupError
from swarm.plan.network import BACKWARD_FORWARDS, Network, StepWork, all_reduce_s, carried_s, check_fit

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


class Parts(NamedTuple):
    """What a step is made of, of R divisions of N devices into S stages with B boundaries."""

    of: np.ndarray
    """[R, N] the stage of every device, or `IDLE`."""
    share: np.ndarray
    """[R, N + 1] of a stage's microbatches, in proportion to what a device, and it and its links, can do; 0
    of the idle and of the device that there is not."""
    forward_s: np.ndarray
    """[R, S] mean of one microbatch, by share."""
    busy_s: np.ndarray
    """[R, S] of the busiest member or its lines to all others, in one step."""
    once_s: np.ndarray
    """[R, S] what one microbatch takes of that."""
    held: np.ndarray
    """[R, S] seconds of a step for each second that a microbatch stays with the member with least room."""
    busiest: np.ndarray
    """[R, S] index of the busiest member."""
    fullest: np.ndarray
    """[R, S] index of the one with least room."""
    variance_s2: np.ndarray
    """[R, S] of what one microbatch takes to compute."""
    exchange_s: np.ndarray
    """[R, S] of the all-reduce: see `all_reduce_s`."""
    boundaries: np.ndarray
    """[R, 7, B] mean of a microbatch's way there and back, and of the way back; what the busiest line, in one
    direction, has to do in a step, and for a microbatch; variance of the way; devices at the line's ends."""
    barrier_s: np.ndarray
    """[R] there and back between the run coordinator (the first of stage 0) and the farthest device."""

    def stays_s(self) -> np.ndarray:
        """[R, S] from the forward of a microbatch to the end of its backward, if it never waits."""
        here_RS = (1 + BACKWARD_FORWARDS) * self.forward_s
        here_RS[:, :-1] += self.boundaries[:, 0]
        return here_RS[:, ::-1].cumsum(axis=1)[:, ::-1]


class Overlap:
    """Predicts the steps of divisions, many at once: with few devices numpy's calls take most of the time."""

    def __init__(self, network: Network, job: StepWork) -> None:
        """Raises SetupError: no division can be: see `check_fit`."""
        check_fit(network, job)
        self.network, self.job = network, job
        stages = range(job.stages)
        self.fits_SN = np.array([[job.least_bytes(s)] for s in stages]) <= network.memory_bytes
        """[S, N] whether a device can hold a stage."""
        lines_bps = network.bandwidth_bps, network.upload_bps, network.download_bps
        slow = min(float(each.min()) for each in lines_bps) <= SLOW_BPS
        jobs = (job, job.packed) if slow and job.packed is not None else (job,)
        sent_2SX = 8.0 * np.array([[(each.bytes_out(s), each.bytes_in(s)) for s in stages] for each in jobs])
        forward_SN = np.array(job.forward_flops)[:, None] / network.flops_per_s
        computes_SN = (1 + BACKWARD_FORWARDS) * forward_SN
        bit_XN = 1.0 / np.stack([network.upload_bps, network.download_bps])
        self._each_KSN = np.stack(
            [computes_SN, *(carried_s(sent_2SX[:, :, x, None], bit_XN[x]) for x in range(2))]
        )
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
        self._bit_s_RR = np.pad(1.0 / network.bandwidth_bps, (0, 1), constant_values=NEVER_S)
        self._up_N, self._down_N = np.pad(bit_XN, ((0, 0), (0, 1)))
        """[N + 1] seconds of a bit."""
        self._limited = bool(self._up_N.any() or self._down_N.any())
        directions = [(each.forward_bytes, each.backward_bytes) for each in jobs]
        self._bits_22B11 = 8.0 * np.array(directions)[..., None, None]
        self._gradient_bits_2S = 8.0 * np.array([each.gradient_bytes for each in jobs])

    # -- the whole step ---------------------------------------------------------------------------

    def predict(self, stage_of: Sequence[int] | np.ndarray) -> StepTime:
        """The step of a division: the stage of every device, or `IDLE`.

        Raises:
            SetupError: a stage without a device, or a device that cannot hold its stage.
        """
        parts = self._parts(np.asarray(stage_of, dtype=np.int64)[None])
        means, after_RX, spread_R, tail_RS = self._steps(parts)
        first_s, busy_s, tail_s = (float(mean_R[0]) for mean_R in means)
        if tail_RS.max() > max(busy_s, first_s):
            limit = f"the all-reduce of stage {int(tail_RS.argmax())}"
        elif first_s >= busy_s:
            limit = "the way of one microbatch through all stages: too few microbatches, or too far apart"
        elif spread_R[0] > after_RX.max():
            limit = "the longest way of a microbatch"
        else:
            limit = self._limit(parts, int(after_RX.argmax()))
        return StepTime(first_s + busy_s + tail_s, first_s, busy_s, tail_s, limit)

    def _limit(self, parts: Parts, place: int) -> str:
        """What has most to do, by its place in what `_steps` says."""
        kind, number = divmod(place, self.job.stages)
        if kind == 2:
            a, b = (self.network.devices[int(end)].name for end in parts.boundaries[0, 5:, number])
            return f"the line {a} - {b}"
        member = int((parts.busiest, parts.fullest)[kind][0, number])
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
        period_s = max(parts.busy_s.max(), parts.boundaries[:, 2].max(initial=0.0)) / self.job.microbatches
        of_N, share_N = parts.of[0], parts.share[0, :-1]
        most_N = whole_shares(share_N, self.job.microbatches, np.bincount(of_N + 1)[of_N + 1])
        needed_N = np.ceil(share_N * parts.stays_s()[0, of_N] / max(period_s, 1e-12) - 1e-9)
        found_N = np.ceil(np.clip(needed_N, 1.0, np.maximum(most_N, 1.0)))
        return np.where(of_N == IDLE, 0, found_N.astype(np.int64))

    def weigh_s(self, of_RN: np.ndarray, known: Parts | None = None) -> tuple[np.ndarray, np.ndarray, Parts]:
        """[R] the steps' seconds; and with a bit of what limits none: a search on a plain needs a slope.

        `known`, of as many divisions: what is taken from there where stages and boundaries are the same. The
        parts have `of_RN` itself, no copy.

        Raises:
            SetupError: as `predict`, of any division.
        """
        parts = self._parts(of_RN, known)
        spare_R = (parts.busy_s + parts.exchange_s).sum(axis=1) + parts.boundaries[:, 2].sum(axis=1)
        total_R = np.sum(self._steps(parts)[0], axis=0)
        return total_R, total_R + SLOPE * spare_R / self.job.stages, parts

    def besides_s(self, stage_of: np.ndarray) -> np.ndarray:
        """[S, 1] what a step takes besides the work of each stage: least for the first one."""
        stays_S1 = self._parts(stage_of[None]).stays_s()[0][:, None]
        return stays_S1[0] - AHEAD * stays_S1

    def _steps(self, parts: Parts) -> tuple[list[np.ndarray], np.ndarray, np.ndarray, np.ndarray]:
        """[3, R] `first_s`, `busy_s`, `tail_s` of `StepTime`; [R, 2 S + B] what stages, their memory and
        boundaries still have to do after the first; [R] what the last way is longer; [R, S] of each stage's
        exchange, what ends after the last backward of the first stage.
        """
        stays_RS, once_RS, boundaries = parts.stays_s(), parts.once_s, parts.boundaries
        busy_RS = parts.busy_s - once_RS - AHEAD * np.maximum(0.0, stays_RS - once_RS)
        held_RS, lines_RB = parts.held * stays_RS - stays_RS, boundaries[:, 2] - boundaries[:, 3]
        after_RX = np.concatenate([busy_RS, held_RS, lines_RB], axis=1)
        # The busiest is busy for most of a step, and the last microbatch late at its end: mostly neither
        # hides the other, nor do they add up.
        spread_R = LAST * np.sqrt(parts.variance_s2.sum(axis=1) + boundaries[:, 4].sum(axis=1))
        busy_R = np.hypot(after_RX.max(axis=1, initial=0.0), spread_R)
        # A later stage sees its last backward sooner, by the way back from it to the first stage.
        tail_RS = parts.exchange_s.copy()
        tail_RS[:, 1:] -= (BACKWARD_FORWARDS * parts.forward_s[:, :-1] + boundaries[:, 1]).cumsum(axis=1)
        tail_R = tail_RS.max(axis=1, initial=0.0) + parts.barrier_s
        return [stays_RS[:, 0], busy_R, tail_R], after_RX, spread_R, tail_RS

    # -- its parts --------------------------------------------------------------------------------

    def _members(self, of_RN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[R, S, D] the devices of each stage in their order, N where it has fewer; [R, S] their number."""
        (count, devices), stages = of_RN.shape, self.job.stages
        row_RN = np.argsort(of_RN.astype(np.int16), axis=1, kind="stable")  # 1,024 stages; sorted by digits
        cells = of_RN + np.arange(1, 1 + count * (stages + 1), stages + 1)[:, None]  # the idle before stage 0
        count_RS = np.bincount(cells.ravel(), minlength=count * (stages + 1)).reshape(count, stages + 1)
        begin_RS1 = (count_RS.cumsum(axis=1) - count_RS)[:, 1:, None]
        count_RS = count_RS[:, 1:]
        if not count_RS.all():
            raise SetupError(f"stage {int(np.argwhere(count_RS == 0)[0, 1])} has no device")
        cannot_RN = (of_RN != IDLE) & ~self.fits_SN[of_RN, np.arange(devices)]
        if cannot_RN.any():
            r, i = np.argwhere(cannot_RN)[0]
            name = self.network.devices[i].name
            raise SetupError(f"device {name!r} cannot hold stage {of_RN[r, i]} in its memory")
        place_D = np.arange(int(count_RS.max()))
        place_RSD = np.minimum(begin_RS1 + place_D, devices - 1) + devices * np.arange(count)[:, None, None]
        return np.where(place_D < count_RS[:, :, None], row_RN.take(place_RSD), devices), count_RS

    def _parts(self, of_RN: np.ndarray, known: Parts | None = None) -> Parts:
        member_RSD, count_RS = self._members(of_RN)
        (count, devices), stages = of_RN.shape, self.job.stages
        if known is None:
            changed_RS = np.ones((count, stages), dtype=bool)
            shapes = *[(count, stages)] * 8, (count, 7, stages - 1), (count,)
            parts = Parts(of_RN, np.zeros((count, devices + 1)), *map(np.empty, shapes))
        else:
            parts = Parts(of_RN, *(each.copy() for each in known[1:]))
            r_M, device_M = np.nonzero(of_RN != known.of)
            parts.share[r_M, device_M] = 0.0
            changed_RS = np.zeros((count, stages + 1), dtype=bool)
            for of in (of_RN, known.of):
                changed_RS[r_M, of[r_M, device_M]] = True
            changed_RS = changed_RS[:, :-1]  # the idle are the last, as -1 is
        near_RS = changed_RS.copy()  # their shares may be others
        near_RS[:, 1:] |= changed_RS[:, :-1]
        near_RS[:, :-1] |= changed_RS[:, 1:]
        # Boundaries of all divisions that may have changed, one after the other.
        r_K, number_K = np.nonzero(near_RS[:, :-1] | near_RS[:, 1:])
        ends_2KD = np.stack([member_RSD[r_K, number_K], member_RSD[r_K, number_K + 1]])
        count_2K = np.stack([count_RS[r_K, number_K], count_RS[r_K, number_K + 1]])
        shared_2RSD = np.zeros((2, *member_RSD.shape))
        links = list[tuple[slice, tuple[np.ndarray, ...]]]()
        for rows, (a, b) in _together(count_2K):
            before, behind = ends_2KD[0, rows, :a], ends_2KD[1, rows, :b]
            lasts_s, out_KA, in_KB = self._measure_links(number_K[rows], before, behind)
            shared_2RSD[0, r_K[rows], number_K[rows], :a] = out_KA
            shared_2RSD[1, r_K[rows], number_K[rows] + 1, :b] = in_KB
            links.append((rows, lasts_s))
        shared_KD = shared_2RSD[:, near_RS].max(axis=0)
        self._measure_stages(parts, np.nonzero(near_RS), member_RSD[near_RS], count_RS[near_RS], shared_KD)
        for rows, lasts_s in links:
            at_2K, lines_K = (r_K[rows], number_K[rows]), count_2K[:, rows].prod(axis=0)
            self._measure_boundaries(parts, at_2K, ends_2KD[:, rows], lines_K, *lasts_s)
        changed = np.nonzero(changed_RS)[1], member_RSD[changed_RS], count_RS[changed_RS]
        parts.exchange_s[changed_RS] = self._exchange_s(*changed)
        region_N = self.network.region_of
        latency_RN = self.network.latency_s[region_N[member_RSD[:, 0, :1]], region_N]
        parts.barrier_s[:] = 2.0 * (stages > 1) * np.where(of_RN == IDLE, 0.0, latency_RN).max(axis=1)
        return parts

    def _measure_stages(
        self, parts: Parts, at_2K: tuple[np.ndarray, ...], member_KD: np.ndarray, count_K: np.ndarray,
        shared_KD: np.ndarray,
    ) -> None:  # fmt: skip
        """Of K stages, `at` these divisions and numbers. `shared`: seconds that a member's links are busy."""
        which_KD = member_KD + (len(self.network) + 1) * at_2K[1][:, None]
        work_KD, slowest_KD, forward_KD, room_KD = (of_SN.take(which_KD) for of_SN in self._of_each)
        share_KD = np.reciprocal(np.maximum(work_KD, shared_KD))
        share_KD /= share_KD.sum(axis=1, keepdims=True)
        parts.share[at_2K[0][:, None], member_KD] = share_KD
        whole_KD = whole_shares(share_KD, self.job.microbatches, count_K[:, None])
        busy_KD, held_KD = whole_KD * slowest_KD, whole_KD / room_KD
        every_K = np.arange(len(count_K))
        busiest = every_K, (busy_KD - slowest_KD).argmax(axis=1)
        fullest = every_K, held_KD.argmax(axis=1)
        forward_K = np.einsum("kd,kd->k", share_KD, forward_KD)
        off_KD = forward_KD - forward_K[:, None]
        parts.forward_s[at_2K] = forward_K
        parts.busy_s[at_2K], parts.once_s[at_2K] = busy_KD[busiest], slowest_KD[busiest]
        parts.held[at_2K] = held_KD[fullest]
        parts.busiest[at_2K], parts.fullest[at_2K] = member_KD[busiest], member_KD[fullest]
        variance_K = np.einsum("kd,kd,kd->k", share_KD, off_KD, off_KD)
        parts.variance_s2[at_2K] = (1 + BACKWARD_FORWARDS) ** 2 * variance_K

    def _measure_links(
        self, number_K: np.ndarray, a_KA: np.ndarray, b_KB: np.ndarray
    ) -> tuple[tuple[np.ndarray, ...], np.ndarray, np.ndarray]:
        """[K, A, B] seconds between the members of two neighbouring stages, for K such: of a gradient on its
        way, of a microbatch there and back, and that it keeps the line busy in the direction that is busier.

        Also [K, A] that the links of a member are busy with a microbatch, as they share it
        (`LinkLatency.busy_s`), and [K, B] the same of the next stage's.
        """
        latency_s, bit_s = self._lines(a_KA, b_KB)
        bits_22K11 = self._bits_22B11[:, :, number_K]
        once_s, forth_s, back_s = carried_s(bits_22K11.max(axis=1), bit_s), bit_s, bit_s
        if self._limited:
            up_KA1, down_KA1 = self._up_N.take(a_KA)[:, :, None], self._down_N.take(a_KA)[:, :, None]
            up_K1B, down_K1B = self._up_N.take(b_KB)[:, None], self._down_N.take(b_KB)[:, None]
            forth_s = np.maximum(np.maximum(bit_s, up_KA1), down_K1B)
            back_s = np.maximum(np.maximum(bit_s, down_KA1), up_K1B)
        back_s = carried_s(bits_22K11[:, 1], back_s)
        both_s = carried_s(bits_22K11[:, 0], forth_s)
        both_s += back_s
        per_s = 2.0 / np.maximum(both_s, 1e-12)
        back_s += latency_s
        latency_s *= 2.0
        both_s += latency_s
        return (back_s, both_s, once_s), 1.0 / per_s.sum(axis=2), 1.0 / per_s.sum(axis=1)

    def _measure_boundaries(
        self, parts: Parts, at_2K: tuple[np.ndarray, ...], ends_2KD: np.ndarray, count_K: np.ndarray,
        back_s: np.ndarray, hop_s: np.ndarray, once_s: np.ndarray,
    ) -> None:  # fmt: skip
        """Of K boundaries, `at` these divisions and numbers, with `count` lines: see `_measure_links`."""
        (count, wide, most), (r_K, number_K) = hop_s.shape, at_2K
        a_KD, b_KD = parts.share[r_K[:, None], ends_2KD]
        share = a_KD[:, :wide, None] * b_KD[:, None, :most]
        busy_s = whole_shares(share, self.job.microbatches, count_K[:, None, None])
        busy_s -= 1e-9
        np.ceil(busy_s, out=busy_s)
        busy_s *= once_s
        worst_K, every_K = (busy_s - once_s).reshape(count, -1).argmax(axis=1), np.arange(count)
        line_K, (a_K, b_K) = worst_K + wide * most * every_K, np.divmod(worst_K, most)
        hop_K, back_K = (np.einsum("kab,kab->k", share, lasts_s) for lasts_s in (hop_s, back_s))
        off_s = hop_s - hop_K[:, None, None]
        variance_K = np.einsum("kab,kab,kab->k", share, off_s, off_s)
        line_2K = ends_2KD[0, every_K, a_K], ends_2KD[1, every_K, b_K]
        found = hop_K, back_K, busy_s.take(line_K), once_s.take(line_K), variance_K, *line_2K
        parts.boundaries[r_K, :, number_K] = np.stack(found, axis=1)

    def _exchange_s(self, stage_K: np.ndarray, member_KD: np.ndarray, count_K: np.ndarray) -> np.ndarray:
        """[K] of each stage's all-reduce."""
        part_2K1 = (self._gradient_bits_2S[:, stage_K] / count_K)[..., None]
        found_K = np.empty(len(count_K))
        for rows, (wide,) in _together(count_K[None]):
            members, parts_2k1 = member_KD[rows, :wide], part_2K1[:, rows]
            latency_s, bit_s = self._lines(members, members)
            part_s, others_K1 = carried_s(parts_2k1[..., None], bit_s), count_K[rows, None] - 1
            ends_N = self._up_N, self._down_N
            up_s, down_s = (others_K1 * carried_s(parts_2k1, each_N.take(members)) for each_N in ends_N)
            found_K[rows] = all_reduce_s(latency_s, part_s, up_s, down_s, members < len(self.network))
        return found_K

    def _lines(self, a_KA: np.ndarray, b_KB: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[K, A, B] latencies, and seconds of a bit between these devices and those."""
        here = (self._region_N.take(a_KA) * len(self._bit_s_RR))[:, :, None]
        here = here + self._region_N.take(b_KB)[:, None]
        return self._latency_RR.take(here), self._bit_s_RR.take(here)


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
