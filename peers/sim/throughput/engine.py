"""Simulation of a run in virtual time: the live policies over devices, lines, deaths and joins.

A microbatch takes the route of `docs/design.md`, whose *The throughput simulation* says what is coarse here.
Of a run of islands each is simulated by itself, since between meetings none knows of another. A meeting is a
formula, as the reduces are: `swarm.plan.islands`. With a trace each has its share of the devices that are up,
by its size, and what comes stays on its island.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from peers.sim.loop import Process, VirtualLoop
from peers.sim.throughput.members import Members, Trace
from peers.sim.throughput.trainer import Trainer
from peers.sim.throughput.world import Settings, ThroughputReport, World
from swarm.errors import SetupError, did_you_mean, stages_named
from swarm.ids import Stage
from swarm.plan.islands import IslandLayout, meeting_bytes, meeting_s, members_of_islands, part_of
from swarm.plan.network import Network, StepWork
from swarm.records import NO_STAGE

STEPS = 16
"""Simulated of each island without a trace; the others are taken to last as long."""


def simulate(
    network: Network, job: StepWork, layout: Sequence[Stage], *, end_s: float,
    settings: Settings | None = None, trace: Trace | None = None, steps: int | None = None, seed: int = 0,
    progress: Callable[[float], None] = lambda _: None,
) -> ThroughputReport:  # fmt: skip
    """A run from version 0, until `end_s` or after `steps` steps.

    Args:
        layout: the stage of each device of the network, `NO_STAGE` for those that are not used.
        trace: how many devices are up. Those at its beginning take their stages from the layout, later ones
            go where they are needed most. None: all of the layout, for ever.
        progress: told how many virtual seconds have passed, as they do.

    Raises:
        SetupError: the layout, the job and the network do not fit together; the text says where.
    """
    if not 0 < end_s < math.inf:
        raise SetupError(f"cannot simulate for {end_s} s")
    _check(network, job, layout, trace)
    loop, everybody = VirtualLoop(), Process("everybody")
    with loop.running():
        world = World(loop, network, job, settings or Settings(), seed)
        report, trainer = world.report, Trainer(world)
        members = Members(world, trainer, layout)

        async def live() -> None:
            if trace is None:
                members.begin()
            else:
                loop.create_task(members.follow(trace))
            if world.settings.rebalance_every_s:
                loop.create_task(members.rebalance())
            loop.call_later(0.0, trainer.start_all)  # when all that begin together are there

        def over() -> bool:
            progress(loop.now_s)
            return bool(loop.bugs) or (steps is not None and world.version >= steps)

        everybody.start(loop, live())
        ended = loop.run(over, limit_s=end_s)
        assert not loop.bugs, loop.bugs[0]
        report.end_s = loop.now_s = loop.now_s if ended else end_s
        for stage in list(world.empty):
            world.filled(stage)
        for peer in world.peers.values():
            members.count_out(peer)
        report.version, report.events = world.version, loop.callbacks
        report.replayed, report.open = trainer.work.replayed, world.open
    return report


def _check(network: Network, job: StepWork, layout: Sequence[Stage], trace: Trace | None) -> None:
    if len(layout) != len(network):
        raise SetupError(f"the layout names {len(layout)} stages for {len(network)} devices")
    for device, stage in zip(network.devices, layout, strict=True):
        if not NO_STAGE <= stage < job.stages:
            raise SetupError(f"device {device.name!r} is put into stage {stage} of {job.stages}")
        if stage != NO_STAGE and not job.fits(stage, device):
            raise SetupError(
                f"stage {stage} does not fit into device {device.name!r}: it needs "
                f"{job.least_bytes(stage) / 1e9:.2f} GB of {device.memory_bytes / 1e9:.2f} GB"
            )
    if trace is not None:
        _check_counts(network, trace)
        return
    empty = sorted(set(range(job.stages)) - set(layout))
    if empty:
        raise SetupError(f"no device is in {stages_named(empty)}")


def _check_counts(network: Network, trace: Trace) -> None:
    there = Counter({"": len(network)})
    if trace.regions:
        there = Counter(network.regions[place] for place in network.place_of)
    for count, region in zip(trace.counts, trace.regions or ("",) * len(trace.counts), strict=True):
        if region and region not in there:
            raise SetupError(
                f"the trace names {region!r}, where no device is{did_you_mean(region, list(there))}"
            )
        if count > there[region]:
            where = f" in {region!r}" if region else ""
            raise SetupError(
                f"the trace has {count} devices up at once{where}, but only {there[region]} are described"
            )


# --- islands ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class IslandsReport:
    """The outcome of some steps of each island; what is said of a step has its part of a meeting in it."""

    islands: list[ThroughputReport]
    job: StepWork
    """Of one island."""
    local_steps: int
    meeting_s: float
    meeting_bytes: float
    """Sent in a meeting."""

    @property
    def inner_s(self) -> list[float]:
        """Per island, seconds of a step; inf: it took none."""
        return [each.end_s / each.version if each.version else np.inf for each in self.islands]

    @property
    def step_s(self) -> float:
        """Seconds of a step of all of them: before each meeting the slowest is waited for."""
        each_s, steps = max(self.inner_s), self.local_steps
        if (windows := min(each.version for each in self.islands) // steps) > 1:
            ends_s = [each.step_ends_s[steps - 1 : windows * steps : steps] for each in self.islands]
            each_s = float(np.diff(ends_s, prepend=0.0).max(axis=0).sum()) / (windows * steps)
        return each_s + self.meeting_s / steps

    @property
    def utilisation(self) -> list[float]:
        """Per stage: the share of their time that its devices on all islands compute."""
        busy_S, devices_S = np.zeros(self.job.stages), np.zeros(self.job.stages)
        for each in self.islands:
            busy_S += np.array(each.busy_s) / max(each.version, 1)
            devices_S += np.array(each.there_s) / each.end_s
        return (busy_S / np.maximum(devices_S, 1e-12) / self.step_s).tolist()  # type: ignore

    def sent_bytes(self, what: str) -> float:
        """In a step, of all islands: `boundary_bytes` or `reduce_bytes`."""
        return sum(getattr(each, what) / max(each.version, 1) for each in self.islands)


def simulate_islands(
    network: Network, job: StepWork, islands: IslandLayout, cell_of: Sequence[int] | np.ndarray, *,
    end_s: float, settings: Settings | None = None, trace: Trace | None = None, seed: int = 0,
) -> IslandsReport:  # fmt: skip
    """The first steps of each island, for at most `end_s`; with a trace all until then. `job`: of one;
    `cell_of`: of every device.

    Raises:
        SetupError: as `simulate`; a trace of regions.
    """
    cell_N = np.asarray(cell_of, dtype=np.int64)
    members_of = members_of_islands(cell_N, job.stages, islands.count)
    traces = [None] * islands.count if trace is None else divided(trace, [len(each) for each in members_of])
    if trace is not None:  # an island that is lost begins again at the last meeting
        settings = replace(settings or Settings(), checkpoint_every=islands.local_steps)
    reports = [
        simulate(
            part_of(network, members), job, (cell_N[members] % job.stages).tolist(), end_s=end_s,  # type: ignore
            steps=STEPS if trace is None else None, settings=settings, trace=its, seed=seed + number,
        )
        for number, (members, its) in enumerate(zip(members_of, traces, strict=True))
    ]  # fmt: skip
    return IslandsReport(
        reports, job, islands.local_steps, meeting_s(network, job, islands, cell_N),
        meeting_bytes(job, islands, cell_N),
    )  # fmt: skip


def divided(trace: Trace, sizes: Sequence[int]) -> list[Trace]:
    """How many of each island's devices are up: in proportion, with the largest remainders rounded up.

    Raises:
        SetupError: it says where devices are; or more are up than there are.
    """
    if trace.regions:
        raise SetupError("a trace of regions does not say which island lost a device: give one without")
    if max(trace.counts) > sum(sizes):
        raise SetupError(
            f"the trace has {max(trace.counts)} devices up at once, but only {sum(sizes)} are on islands, as "
            "swarm plan has it: lower its counts, or give --layout"
        )
    exact_TK = np.outer(trace.counts, sizes) / sum(sizes)
    counts_TK = np.floor(exact_TK).astype(int)
    for t, count in enumerate(trace.counts):
        rest_K = np.argsort(counts_TK[t] - exact_TK[t], kind="stable")
        counts_TK[t, rest_K[: count - counts_TK[t].sum()]] += 1
    return [trace._replace(counts=tuple(counts_TK[:, k].tolist())) for k in range(len(sizes))]
