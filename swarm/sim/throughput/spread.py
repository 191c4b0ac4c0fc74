"""A layout without a planner: devices over stages, so that all stages are about equally fast."""

from __future__ import annotations

from swarm.errors import SetupError
from swarm.ids import Stage
from swarm.plan.network import Job, Network


def spread(network: Network, job: Job) -> list[Stage]:
    """The stage of each device: the fastest first, each to the stage that is slowest so far and fits.

    Raises:
        SetupError: fewer devices than stages, or nobody left that a stage fits into.
    """
    check_fit(network, job)
    layout, speeds = [0] * len(network), [0.0] * job.stages
    order = sorted(range(len(network)), key=lambda i: (-network.devices[i].flops_per_s, i))
    for number, i in enumerate(order):
        device = network.devices[i]
        left, bare = len(order) - number, [s for s in range(job.stages) if not speeds[s]]
        open_to = bare if len(bare) >= left else range(job.stages)
        fit = [s for s in open_to if job.fits(s, device)]
        if not fit:
            if bare and len(bare) >= left:
                raise SetupError(f"nobody is left for stage {bare[0]}: it does not fit into {device.name!r}")
            layout[i] = -1
            continue
        layout[i] = min(fit, key=lambda s: (speeds[s], s))
        speeds[layout[i]] += device.flops_per_s / max(job.forward_flops[layout[i]], 1e-9)
    return layout


def check_fit(network: Network, job: Job) -> None:
    """
    Raises:
        SetupError: fewer devices than stages, or a stage that fits into none of them.
    """
    if len(network) < job.stages:
        raise SetupError(f"{len(network)} devices cannot serve {job.stages} stages: each needs one at least")
    for stage in range(job.stages):
        if not any(job.fits(stage, device) for device in network.devices):
            need = job.state_bytes[stage] + job.activation_bytes[stage]
            most = max(device.memory_bytes for device in network.devices)
            raise SetupError(
                f"stage {stage} fits into no device: it needs {need / 1e9:.2f} GB, the largest has "
                f"{most / 1e9:.2f} GB. Cut the model into more stages"
            )
