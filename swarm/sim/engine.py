"""One run, event by event: the live policies over devices, lines, deaths and joins.

A microbatch goes as in `docs/design.md`: routed by the trainer's `Router`, forward through a peer of each
stage, loss and backward in the last one, and back, each peer taking it into its `Ledger`. Devices do one job
at a time, backwards first. When a stage has all microbatches its members reduce; when all stages have, the
run coordinator says go and the next step begins, whose first requests wait at stage 0 already. What a dead
peer had under way is given to another one of its stage, what it had in its sum is run again through the
`WorkList`.

What is coarse: control messages take no bandwidth; tokens and labels are small; a reduce is a formula
(`Lines.reduce_s`) and does not share the lines with transfers; trainers know of each other's claims at once,
so nothing is done twice and undone; full peers let requests wait instead of refusing them; a joiner serves
as soon as it has the state; a keeper has whatever a lost stage goes back to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from swarm.errors import SetupError
from swarm.ids import Stage
from swarm.plan.network import Job, Network
from swarm.sim.members import Members
from swarm.sim.pipeline import Pipeline
from swarm.sim.placing import Placing
from swarm.sim.repair import Repair
from swarm.sim.report import Settings, ThroughputReport
from swarm.sim.steps import Steps
from swarm.sim.trace import Trace, changes
from swarm.sim.trainers import Trainers
from swarm.sim.world import NOBODY, World


def simulate(
    network: Network,
    job: Job,
    layout: Sequence[Stage],
    *,
    end_s: float,
    settings: Settings | None = None,
    trace: Trace | None = None,
    steps: int | None = None,
    seed: int = 0,
) -> ThroughputReport:
    """A run from version 0, until `end_s` or after `steps` steps.

    Args:
        layout: the stage of each device of the network, `NOBODY` for those that are not used.
        trace: how many devices are up. Who is up at its beginning takes its stage from the layout, who comes
            later goes where it is needed most. None: all of the layout, for ever.

    Raises:
        SetupError: the layout, the job and the network do not fit together; the text says where.
    """
    if not 0 < end_s < math.inf:
        raise SetupError(f"cannot simulate for {end_s} s")
    run = Simulation(network, job, layout, settings or Settings(), trace, seed)
    return run.run(end_s, steps)


class Simulation:
    """See `simulate`."""

    def __init__(
        self,
        network: Network,
        job: Job,
        layout: Sequence[Stage],
        settings: Settings,
        trace: Trace | None,
        seed: int,
    ) -> None:
        _check(network, job, layout, trace)
        self._trace = trace
        self.world = world = World(network, job, settings, seed)
        world.members, world.placing = Members(world, layout), Placing(world)
        world.trainers, world.pipeline, world.repair = Trainers(world), Pipeline(world), Repair(world)
        world.steps = Steps(world)

    def run(self, end_s: float, steps: int | None) -> ThroughputReport:
        """Until `end_s`, or so many steps are taken."""
        world = self.world
        clock, every_s = world.clock, world.settings.rebalance_every_s
        if self._trace is None:
            world.members.begin()
        else:
            for change in changes(self._trace, world.seed):
                if change.at_s < end_s:
                    clock.after(change.at_s, world.members.change, change)
        if every_s:
            clock.after(every_s / 2, world.placing.rebalance, None)
        clock.after(0.0, world.trainers.wake, None)

        def over() -> bool:
            return steps is not None and world.version >= steps

        clock.run(until=over, limit_s=end_s)
        if not over():
            clock.now = end_s
        return self._told()

    def _told(self) -> ThroughputReport:
        """The report, at the end."""
        world = self.world
        report, now_s = world.report, world.clock.now
        if world.empty_since_s is not None:
            report.waited_s += now_s - world.empty_since_s
        world.members.count_out_all()
        report.end_s, report.version, report.events = now_s, world.version, world.clock.events
        report.replayed, report.open = world.trainers.replayed, world.steps.open
        return report


def _check(network: Network, job: Job, layout: Sequence[Stage], trace: Trace | None) -> None:
    if len(layout) != len(network):
        raise SetupError(f"the layout names {len(layout)} stages for {len(network)} devices")
    for device, stage in zip(network.devices, layout, strict=True):
        if not NOBODY <= stage < job.stages:
            raise SetupError(f"device {device.name!r} is put into stage {stage} of {job.stages}")
        if stage != NOBODY and not job.fits(stage, device):
            need = job.state_bytes[stage] + job.activation_bytes[stage]
            raise SetupError(
                f"stage {stage} does not fit into device {device.name!r}: it needs {need / 1e9:.2f} GB of "
                f"{device.memory_bytes / 1e9:.2f} GB"
            )
    if trace is not None:
        if max(trace.counts) > len(network):
            raise SetupError(
                f"the trace has {max(trace.counts)} devices up at once, but only {len(network)} are described"
            )
        return
    empty = sorted(set(range(job.stages)) - set(layout))
    if empty:
        raise SetupError(f"no device is in stage {', '.join(map(str, empty))}")
