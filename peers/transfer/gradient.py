"""The gradient of a step that a replica missed, and the weights of all stages: how they are fetched.

The whole state of a stage: `peers.transfer.client`. The other side: `peers.transfer.server`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import torch

from peers.clock import now_s
from peers.ports import Directory, Transport
from peers.stage.all_reduce import holds
from peers.stage.state import StageCore
from peers.transfer.client import DownloadFailed, Partial, Wanted, download, state_of
from swarm.errors import PeerFault, SetupError
from swarm.ids import PeerId, Stage
from swarm.manifest import Run
from swarm.model.stage import StageCompute
from swarm.protocol.rounds import Commit, Prepared
from swarm.wire.messages import Opened, OpenHeld

WEIGHTS_S = 15.0
"""A directory that was opened a moment ago may know half of the peers, and half of those may be dead."""
RETRY_S = 0.5


async def fetch_gradient(
    core: StageCore,
    transport: Transport,
    sources: Sequence[PeerId],
    t: int,
    round_name: str,
    *,
    on_fault: Callable[[PeerFault], None] = lambda fault: None,
) -> tuple[torch.Tensor, Prepared, Commit | None, PeerId]:
    """The reduced gradient of step `t` from replicas that hold it (or applied it: then with its commit), and
    the one that gave most of it.

    Raises:
        DownloadFailed: none of them gives it.
    """

    def fits(opened: Opened, tensors: Mapping[str, torch.Tensor]) -> str | None:
        told, shared = opened.prepared, core.compute.shared
        found = holds(told.round if told else "", tensors["gradient"], shared.sqnorm)
        # Where stages share weights, what a replica says of the norm has their parts in it.
        if told is None or found.digest != told.digest or (not shared.names and found.sqnorm != told.sqnorm):
            return "the gradient does not fit its digest"
        return None

    wanted = wanted_of(core, OpenHeld(run=core.run.id, t=t, round=round_name), core.compute.numel, fits)
    found = await download(transport, wanted, sources, on_fault=on_fault)
    assert found.opened.prepared is not None
    return found.tensors["gradient"], found.opened.prepared, found.opened.last_commit, found.sources[0]


def wanted_of(
    core: StageCore,
    question: OpenHeld,
    numel: int,
    fits: Callable[[Opened, Mapping[str, torch.Tensor]], str | None] = lambda opened, tensors: None,
) -> Wanted:
    """The summed gradient of a step, or what of it another stage shares: so many numbers."""
    like = {"gradient": torch.empty(numel, dtype=core.compute.state.dtype, device="meta")}
    name = f"the gradient of step {question.t}"
    return Wanted(name=name, method="held", question=question, like=like, fits=fits, gather_s=0.0)


async def fetch_weights(
    run: Run, transport: Transport, directory: Directory, *, limit_s: float = WEIGHTS_S
) -> dict[str, torch.Tensor]:
    """The newest weights of all stages by name, from the peers that serve them.

    Tries again for `limit_s`: peers that died are still in the directory for a while, others not yet.

    Raises:
        SetupError: no peer of a stage gives them; says why each does not.
    """
    until = now_s() + limit_s
    found: dict[Stage, tuple[int, dict[str, torch.Tensor]]] = {}
    while True:
        for stage in range(run.S):
            newest = max((version for version, _ in found.values()), default=-1)
            if stage not in found or found[stage][0] < newest:
                found[stage] = await _stage_weights(run, stage, transport, directory, until)
        versions = sorted({version for version, _ in found.values()})
        if len(versions) == 1:
            return {name: weight for _, weights in found.values() for name, weight in weights.items()}
        if now_s() + RETRY_S >= until:
            raise SetupError(f"the run took a step meanwhile (versions {versions}); try again")
        await asyncio.sleep(RETRY_S)


async def _stage_weights(
    run: Run, stage: Stage, transport: Transport, directory: Directory, until: float
) -> tuple[int, dict[str, torch.Tensor]]:
    """(version, weights by name) of one stage. Raises SetupError if `until` passes without."""
    compute, partial = StageCompute(run, stage), Partial()
    reasons: dict[PeerId, str] = {}
    while True:
        records = await directory.refresh({stage})
        serving = [r.peer for r in records if r.stage == stage and r.state == "serving"]
        try:
            got = await download(transport, state_of(run, stage), serving, partial=partial)
        except DownloadFailed as failed:
            reasons.update(failed.reasons)
        else:
            compute.load_state(got.opened.version, got.tensors)
            return got.opened.version, compute.state.named_weights()
        if now_s() + RETRY_S >= until:
            why = "; ".join(reasons.values()) or "no peer serves it"
            raise SetupError(f"could not download the weights of stage {stage}: {why}")
        await asyncio.sleep(RETRY_S)
