"""Simulation of a run in virtual time: the live policies over devices, lines, deaths and joins.

A microbatch takes the route of `docs/design.md`, whose *The throughput simulation* says what is coarse here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from peers.sim.loop import Process, VirtualLoop
from peers.sim.throughput.members import Members
from peers.sim.throughput.report import Settings, ThroughputReport
from peers.sim.throughput.trainers import Trainers
from peers.sim.throughput.world import World
from swarm.errors import SetupError, did_you_mean, stages_named
from swarm.ids import Stage
from swarm.plan.network import Network, StepWork
from swarm.records import NO_STAGE
from swarm.sim.trace import Trace


def simulate(
    network: Network,
    job: StepWork,
    layout: Sequence[Stage],
    *,
    end_s: float,
    settings: Settings | None = None,
    trace: Trace | None = None,
    steps: int | None = None,
    seed: int = 0,
    progress: Callable[[float], None] = lambda _: None,
) -> ThroughputReport:
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
        report, trainers = world.report, Trainers(world)
        members = Members(world, trainers, layout)

        async def live() -> None:
            if trace is None:
                members.begin()
            else:
                loop.create_task(members.follow(trace))
            if world.settings.rebalance_every_s:
                loop.create_task(members.rebalance())
            loop.call_later(0.0, trainers.start_all)  # when all that begin together are there

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
        report.replayed, report.open = trainers.replayed, world.open
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
