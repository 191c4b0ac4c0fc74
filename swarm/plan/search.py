"""The search for a division of devices into stages: layouts made by rule, then annealing of the best of them.

Deterministic: the seed, and what the caller's clock says, decide everything. Anytime: whenever the clock is
past the budget the best so far is the answer, and that is never worse than a layout made by rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, takewhile

import numpy as np
from scipy.optimize import linear_sum_assignment

from swarm.errors import SetupError
from swarm.plan.network import Device, Network, StepWork
from swarm.plan.overlapped import IDLE, Overlap, StepTime

WALK_STEPS = 400
"""Proposals of one annealing, if the budget lasts so long: else it cools down sooner."""
MEMBERS, HEATS = 4, (0.007, 0.003, 0.0015)
"""How many of the best layouts are annealed side by side, and how hot, in parts of the shortest step. Three
times as hot leads away from a good start, and 2,500 proposals do not lead back (2026-11-29)."""
SIDE_BY_SIDE = 1 << 15
"""Pairs of devices in neighbouring stages, of all divisions that are annealed side by side."""
DRAWN = 3
"""Proposals for each, of which the first is taken that can be."""
MOVES = 0.4
"""Part of these that move one device; the others swap two."""
POWER = 16
"""Of what devices take, where their sum is to be small: that of the slowest is most of it."""
PLACINGS = 4
"""Of one device a stage: what a stage waits for follows from the placing before."""
MAX_CLUSTERED = 1024
"""Devices up to which clusters by distance are tried, whose cost grows with N²."""

MAX_REPLICAS = 2000
"""Devices for each stage that are planned for: every pair of two stages is looked at, 4 million then."""


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """A division of devices into stages."""

    stage_of: np.ndarray
    """[N] of every device, or `IDLE`."""
    step: StepTime
    starts: dict[str, float]
    """Predicted seconds of each layout made by rule."""


def search_overlapped(
    network: Network, job: StepWork, *, seed: int, budget_s: float = 0.0,
    spent_s: Callable[[], float] = lambda: 0.0, survive: bool = False,
) -> Placement:  # fmt: skip
    """A division of small predicted step time, with as many replicas of each stage as are good for it;
    without a budget the best of those that are made by rule.

    `survive`: every stage has devices in two regions, so that the loss of any one leaves it some. Never worse
    than any layout in `starts`. Devices that only hold the others up stay idle.

    Raises:
        SetupError: fewer devices than stages, or too many; a stage that no device can hold.
    """
    if len(network) > MAX_REPLICAS * job.stages:
        raise SetupError(
            f"{len(network)} devices in {job.stages} stages are too many for a plan, which looks at every "
            f"pair of devices of two stages: plan for at most {MAX_REPLICAS} devices a stage, such as a part "
            "of each region (swarm simulate looks at no pairs)"
        )
    rng = np.random.default_rng(seed)
    overlap = Overlap(network, job)
    clusters = takewhile(lambda _: not 0.0 < budget_s <= spent_s(), clustered_layouts(overlap, rng))
    begun = [(name, repaired(overlap, of_N)) for name, of_N in chain(_starts(overlap, rng), clusters)]
    if survive:
        begun = [(name, spread_out(overlap, of_N)) for name, of_N in begun]
    starts = {name: overlap.predict(of_N).total_s for name, of_N in begun}
    members = {starts[name]: of_N for name, of_N in begun}
    best = sorted(members)[:MEMBERS]
    each = max(1, min(len(best) * len(HEATS), SIDE_BY_SIDE * job.stages // len(network) ** 2))
    kinds_N = _kinds(network)
    walks = 0
    while spent_s() < budget_s and len(network) > 1 and job.stages > 1:
        chosen = [divmod(walk, len(best)) for walk in range(walks, walks + each)]
        walks += each
        heats_s = np.array([best[0] * HEATS[heat % len(HEATS)] for heat, _ in chosen])
        of_RN, begun_s = np.array([members[best[member]] for _, member in chosen]), spent_s()

        def share(begun_s: float = begun_s) -> float:
            return (spent_s() - begun_s) / max(budget_s - begun_s, 1e-9)

        walked_RN, lowest_R = _walk(overlap, of_RN, kinds_N, heats_s, rng, share, survive)
        members |= zip(lowest_R.tolist(), walked_RN, strict=True)
        best = sorted(members)[:MEMBERS]
        members = {total_s: members[total_s] for total_s in best}
    best_N = members[best[0]]
    return Placement(best_N, overlap.predict(best_N), starts)


def _starts(overlap: Overlap, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    network, job = overlap.network, overlap.job
    even = np.arange(len(network)) * job.stages // len(network)
    yield "megatron", even  # in the order of the file
    yield "random", rng.permutation(even)
    row = fenced_row(network)
    fenced = cut_row(network, job, row)
    yield "fence", fenced
    dealt = np.empty_like(fenced)
    dealt[row] = np.arange(len(row)) % job.stages
    yield "pipelines", dealt
    yield "speed", balanced(overlap)
    # Few devices have little to exchange: where lines are slow, the fastest alone may be faster than all.
    yield "one a stage", one_a_stage(overlap)
    swift = np.argsort(-network.flops_per_s, kind="stable")
    for many in (1, 2, 4):
        if job.stages * many < len(network):
            alone = np.full(len(network), IDLE)
            chosen = np.isin(row, swift[: job.stages * many])
            alone[row[chosen]] = np.arange(job.stages * many) // many
            yield f"the fastest {job.stages * many}", alone


def fenced_row(network: Network) -> np.ndarray:
    """[N] devices, region by region, the nearest next to the nearest: so few boundaries cross slow lines."""
    near_RR = network.bandwidth_bps.copy()
    np.fill_diagonal(near_RR, 0.0)
    # The row starts at the region that is farthest from all others: an end of it, not its middle.
    row, left_R = [int(near_RR.sum(axis=1).argmin())], np.ones(len(near_RR), dtype=bool)
    while len(row) < len(near_RR):
        left_R[row[-1]] = False
        row.append(int(np.where(left_R, near_RR[row[-1]], -1.0).argmax()))
    return np.argsort(np.argsort(row)[network.region_of], kind="stable")


def cut_row(network: Network, job: StepWork, row: np.ndarray) -> np.ndarray:
    """[N] stages: the row cut so that stages have speeds in proportion to their work, each with a device."""
    speed = network.flops_per_s[row]
    work = np.maximum(np.array(job.forward_flops), 1e-12)
    ends = np.cumsum(work) / work.sum()
    middle = (np.cumsum(speed) - speed / 2) / speed.sum()
    stage = np.minimum(np.searchsorted(ends, middle), job.stages - 1)
    # No stage may be empty, and the row stays in order: at least s after s devices, at most so many that one
    # is left for each stage to come.
    place_N, of_N = np.arange(len(row)), np.empty(len(row), dtype=np.int64)
    most_N = place_N + np.minimum.accumulate(np.minimum(stage - place_N, 0))
    of_N[row] = np.maximum(most_N, place_N - (len(row) - job.stages))
    return of_N


def balanced(overlap: Overlap) -> np.ndarray:
    """[N] stages: each device, the fastest first, to the stage that has least speed for its work.

    Of those that it can hold; a device that can hold none is `IDLE`.
    """
    network, job = overlap.network, overlap.job
    speed_S, work_S = np.zeros(job.stages), np.maximum(np.array(job.forward_flops), 1e-12)
    of_N = np.full(len(network), IDLE)
    for i in np.argsort(-network.flops_per_s, kind="stable"):
        able = np.flatnonzero(overlap.fits_SN[:, i])
        if len(able):
            of_N[i] = able[(speed_S / work_S)[able].argmin()]
            speed_S[of_N[i]] += network.flops_per_s[i]
    return of_N


def one_a_stage(overlap: Overlap) -> np.ndarray:
    """[N] stages: each has the device that suits it, so that the slowest takes little longer than others; the
    slow ones in front, which begin first and end last.
    """
    network, job = overlap.network, overlap.job
    busy_SN = job.microbatches * overlap.slowest_SN
    besides_S1, found = np.zeros((job.stages, 1)), list[np.ndarray]()
    for _ in range(PLACINGS):
        step_SN = besides_S1 + busy_SN
        none_N, price_SN = np.full(len(network), IDLE), (step_SN / max(step_SN.max(), 1e-12)) ** POWER
        found.append(repaired(overlap, none_N, price_SN))
        besides_S1 = overlap.besides_s(found[-1])
    return min(found, key=lambda of_N: overlap.predict(of_N).total_s)


def repaired(overlap: Overlap, stage_of: np.ndarray, price_SN: np.ndarray | float = 1.0) -> np.ndarray:
    """The same division with every device in a stage that it can hold, and in every stage a device, if cheap.

    Raises:
        SetupError: not even the assignment of one device to each stage is possible.
    """
    fits_SN, of_N = overlap.fits_SN, stage_of.copy()
    stages, devices = fits_SN.shape
    for i in np.flatnonzero((of_N != IDLE) & ~fits_SN[of_N, np.arange(devices)]):
        able = np.flatnonzero(fits_SN[:, i])
        counts = np.bincount(of_N[of_N >= 0], minlength=stages)
        of_N[i] = int(able[counts[able].argmin()]) if len(able) else IDLE
    if len(np.unique(of_N[of_N >= 0])) == stages:
        return of_N
    # One device for each stage, as many as can be where they are; all others may stay where they are.
    price_SN = np.where(fits_SN, price_SN, 1e6) - (np.arange(stages)[:, None] == of_N) * fits_SN
    stage_of_one, one = linear_sum_assignment(price_SN)
    if not fits_SN[stage_of_one, one].all():
        short = int(stage_of_one[~fits_SN[stage_of_one, one]][0])
        raise SetupError(
            f"too few devices have the memory for stage {short}: those that could hold it are needed for "
            "others"
        )
    of_N[one] = stage_of_one
    return of_N


def outlives(overlap: Overlap, stage_of: np.ndarray, stage: int) -> bool:
    """Whether a stage has devices in two regions."""
    there = overlap.network.place_of[stage_of == stage]
    return bool((there != there[:1]).any())


def spread_out(overlap: Overlap, stage_of: np.ndarray) -> np.ndarray:
    """The same division with devices of two regions in every stage: fast ones move there, or change places.

    Raises:
        SetupError: no such move was found; there are too few devices, or in too few regions.
    """
    of_N, place_N = stage_of.copy(), overlap.network.place_of
    swift = np.argsort(-overlap.network.flops_per_s, kind="stable")
    for stage in range(overlap.job.stages):
        if outlives(overlap, of_N, stage):
            continue
        here = np.flatnonzero(of_N == stage)
        others = [int(i) for i in swift if place_N[i] != place_N[here[0]] and overlap.fits_SN[stage, i]]
        for i, j in ((i, i if j is None else j) for j in (None, *here) for i in others):
            tried, left = of_N.copy(), int(of_N[i])
            tried[j], tried[i] = left, stage  # in this order: with i = j a move
            kept = left == IDLE or (overlap.fits_SN[left, j] and outlives(overlap, tried, left))
            if kept and outlives(overlap, tried, stage):
                of_N = tried
                break
        else:
            raise SetupError(
                f"no plan was found that survives the loss of any one region: stage {stage} needs devices in "
                "two regions, and so does every other stage"
            )
    return of_N


def _kinds(network: Network) -> np.ndarray:
    """[N] of every device: alike in everything but the name have the same number."""
    seen: dict[Device, int] = {}
    return np.array([seen.setdefault(replace(device, name=""), len(seen)) for device in network.devices])


def _walk(
    overlap: Overlap, start_RN: np.ndarray, kinds_N: np.ndarray, heats_s: np.ndarray,
    rng: np.random.Generator, share: Callable[[], float], survive: bool,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Annealing of R divisions side by side, by moves and swaps of single devices, until `share` of its time
    is 1; the best that each met, and its seconds.
    """
    of_RN, (count, devices), stages = start_RN.copy(), start_RN.shape, overlap.job.stages
    every_R, every_R1 = np.arange(count), np.arange(count)[:, None]
    count_RS = (of_RN[:, :, None] == [*range(stages), IDLE]).sum(axis=1)  # the idle are the last, as -1 is
    fits_SN = np.vstack([overlap.fits_SN, np.ones(devices, dtype=bool)])
    best_R, here_R, known = overlap.weigh_s(of_RN)
    best_R, best_RN = best_R.copy(), of_RN.copy()
    for step in range(WALK_STEPS):
        if (done := max(share(), step / WALK_STEPS)) >= 1.0:
            break
        i, j = rng.integers(devices, size=(2, count, DRAWN))
        moves = rng.random((count, DRAWN)) < MOVES  # else a swap
        to = np.where(rng.random((count, DRAWN)) < 0.1, IDLE, rng.integers(stages, size=(count, DRAWN)))
        a = of_RN[every_R1, i]
        b = np.where(moves, to, of_RN[every_R1, j])
        can = (a != b) & fits_SN[b, i]
        can &= np.where(
            moves, (a == IDLE) | (count_RS[every_R1, a] > 1), (kinds_N[i] != kinds_N[j]) & fits_SN[a, j]
        )
        first = every_R, can.argmax(axis=1)
        i, j, a, b, moves, can = (each[first] for each in (i, j, a, b, moves, can))
        j, b = np.where(can & ~moves, j, i), np.where(can, b, a)
        tried_RN = of_RN.copy()
        tried_RN[every_R, j], tried_RN[every_R, i] = a, b  # in this order: a move has i = j
        total_R, after_R, tried = overlap.weigh_s(tried_RN, known)
        if survive:
            for r in np.flatnonzero(can):
                can[r] = all(stage == IDLE or outlives(overlap, tried_RN[r], stage) for stage in (a[r], b[r]))
        heat_R = heats_s * (1.0 - done) + 1e-12
        can &= rng.random(count) < np.exp(np.minimum((here_R - after_R) / heat_R, 0.0))
        for old, new in zip((here_R, *known), (after_R, *tried), strict=True):  # `of_RN` is one of them
            old[can] = new[can]
        count_RS[every_R, a] -= can & moves
        count_RS[every_R, b] += can & moves
        better = can & (total_R < best_R)
        best_RN[better], best_R[better] = tried_RN[better], total_R[better]
    return best_RN, best_R


# --- starts that keep near devices together -----------------------------------------------------------------

MAX_PLACED = 8
"""Clusters whose places are sought; the time grows with their square. More stay in order of their width."""
RANDOM_ORDERS = 8
"""From which places are sought, besides the order of width."""
MAX_SWAPS = 300
"""Of one clustering. 64 devices need fewer than 40; with 1024 it is a second."""


def clustered_layouts(overlap: Overlap, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    """(shape, [N] stages) of every shape, if the devices divide evenly into stages.

    A start cuts the devices into clusters of a · b near ones and gives each cluster `a` consecutive stages of
    `b` pipelines. The tightest clusters come into the same stages; a few change places as long as that makes
    the step shorter.
    """
    network, job = overlap.network, overlap.job
    stages, replicas = job.stages, len(network) // job.stages
    if len(network) % stages or not stages < len(network) <= MAX_CLUSTERED:
        return
    latency_NN, bandwidth_NN = network.pairs()
    near_NN = 8.0 * max(job.forward_bytes, default=0.0) / np.minimum(bandwidth_NN, bandwidth_NN.T)
    near_NN += latency_NN
    np.fill_diagonal(near_NN, 0.0)
    for a, b in shapes(stages, replicas):
        if a * b == 1:
            continue
        clusters = even_clusters(near_NN, a * b)
        width = np.array([near_NN[np.ix_(c, c)].max() for c in clusters])

        def layout(order: np.ndarray, a: int = a, b: int = b, clusters: np.ndarray = clusters) -> np.ndarray:
            blocks = clusters[order].reshape(stages // a, replicas // b, a, b)
            of_N = np.empty(len(network), dtype=np.int64)
            of_N[blocks.transpose(0, 2, 1, 3).ravel()] = np.arange(len(network)) // replicas
            return repaired(overlap, of_N)

        yield f"clusters {a} × {b}", layout(_placed(np.argsort(width, kind="stable"), layout, overlap, rng))


def _placed(
    order: np.ndarray, layout: Callable[[np.ndarray], np.ndarray], overlap: Overlap, rng: np.random.Generator
) -> np.ndarray:
    """The clusters in a cheap order, which no swap of two improves; `order` if they are many."""
    if not 2 < len(order) <= MAX_PLACED:
        return order
    i, j = np.triu_indices(len(order), 1)
    every = np.arange(len(i))
    found: list[tuple[float, np.ndarray]] = []
    for best in (order, *(rng.permutation(order) for _ in range(RANDOM_ORDERS))):
        best_s = np.inf
        while True:
            swapped_XC = np.tile(best, (len(i) + 1, 1))  # the last as it is
            swapped_XC[every, i], swapped_XC[every, j] = best[j], best[i]
            cost_X = overlap.weigh_s(np.array([layout(swapped) for swapped in swapped_XC]))[1]
            least = int(cost_X.argmin())
            if cost_X[least] >= best_s * (1 - 1e-9):
                break
            best, best_s = swapped_XC[least], float(cost_X[least])
        found.append((best_s, best))
    return min(found, key=lambda one: one[0])[1]


def shapes(stages: int, replicas: int) -> Iterator[tuple[int, int]]:
    """All (a, b) that divide the grid: by pipeline (b = 1) and by stage (a = 1) first, then the others."""
    tall = [a for a in range(stages, 0, -1) if stages % a == 0]
    wide = [b for b in range(replicas, 0, -1) if replicas % b == 0]
    yield stages, 1
    yield 1, replicas
    for a in tall:
        for b in wide:
            if (a, b) not in ((stages, 1), (1, replicas), (stages, replicas)):
                yield a, b


def even_clusters(near_NN: np.ndarray, size: int) -> np.ndarray:
    """[N / size, size] devices in clusters of one size, with small distances inside.

    Each cluster grows around the device that is farthest from all that are left; then pairs of devices change
    clusters while that makes the sum of the inner distances smaller (Kernighan and Lin's exchange, without
    their look-ahead).
    """
    devices = len(near_NN)
    count = devices // size
    if size in (1, devices):
        return np.arange(devices).reshape(count, size)
    of_N = np.empty(devices, dtype=np.int64)
    left_N = np.ones(devices, dtype=bool)
    remote_N = near_NN.sum(axis=1)
    for cluster in range(count):
        seed = int(np.where(left_N, remote_N, -1.0).argmax())
        members = [seed]
        left_N[seed] = False
        distance_N = near_NN[seed].copy()
        while len(members) < size:
            nearest = int(np.where(left_N, distance_N, np.inf).argmin())
            members.append(nearest)
            left_N[nearest] = False
            distance_N += near_NN[nearest]
        of_N[members] = cluster
        remote_N -= near_NN[:, members].sum(axis=1)
    to_NC = np.stack([near_NN[:, of_N == cluster].sum(axis=1) for cluster in range(count)], axis=1)
    every = np.arange(devices)
    for _ in range(MAX_SWAPS):
        there_NN = to_NC[:, of_N] - to_NC[every, of_N][:, None]
        change_NN = there_NN + there_NN.T - 2.0 * near_NN
        change_NN[of_N[:, None] == of_N] = 0.0
        i, j = divmod(int(change_NN.argmin()), devices)
        if change_NN[i, j] > -1e-9 * near_NN[i].sum():
            break
        ci, cj = of_N[i], of_N[j]
        to_NC[:, ci] += near_NN[:, j] - near_NN[:, i]
        to_NC[:, cj] += near_NN[:, i] - near_NN[:, j]
        of_N[i], of_N[j] = cj, ci
    return np.argsort(of_N, kind="stable").reshape(count, size)
