"""The gradient of a step that a replica missed: how it is fetched.

The whole state of a stage: `peers.transfer.client`. The other side: `peers.transfer.server`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from peers.stage.state import StageCore
from peers.transfer.client import Wanted, download
from swarm.errors import PeerFault
from swarm.ids import PeerId
from swarm.model.meeting import difference_bytes
from swarm.model.reductions import vectors_digest
from swarm.model.stage import StageCompute
from swarm.protocol.rounds import Commit, Prepared
from swarm.protocol.voice import heard
from swarm.wire.messages import Opened, OpenHeld


async def fetch_gradient(
    core: StageCore, sources: Sequence[PeerId], t: int, round_name: str, *, digest: str = "",
    on_fault: Callable[[PeerFault], None] = lambda fault: None,
) -> tuple[torch.Tensor, Prepared, Commit | None, PeerId]:  # fmt: skip
    """The reduced gradient of step `t` from replicas that hold it (or applied it: then with its commit), and
    the one that gave most of it. If one of them has voice, the others are not asked. `digest`: what it has to
    have, whatever they say now; empty: unknown.

    Raises:
        DownloadFailed: none of them gives it.
    """

    def fits(opened: Opened, tensors: Mapping[str, torch.Tensor]) -> str | None:
        told, compute, gradient = opened.prepared, core.compute, tensors["gradient"]
        # What a replica says of the norm has in it what it got from other stages, or islands.
        if (
            told is None
            or digest not in ("", told.digest)
            or vectors_digest([gradient], on_device=False) != told.digest
            or (not compute.needs_others(t) and compute.shared.sqnorm(gradient) != told.sqnorm)
        ):
            return "the gradient does not fit its digest"
        return None

    meets, voice = core.run.meets_at(t), core.voice()
    numel = difference_bytes(core.run, core.compute.layout) if meets else core.compute.numel
    wanted = wanted_of(core.compute, OpenHeld(run=core.run.id, t=t, round=round_name), numel, fits)
    found = await download(core.transport, wanted, heard(sources, voice), voice=voice, on_fault=on_fault)
    assert found.opened.prepared is not None
    return found.tensors["gradient"], found.opened.prepared, found.opened.last_commit, found.sources[0]


def wanted_of(
    compute: StageCompute, question: OpenHeld, numel: int,
    fits: Callable[[Opened, Mapping[str, torch.Tensor]], str | None] = lambda opened, tensors: None, *,
    gather_s: float = 0.0,
) -> Wanted:  # fmt: skip
    """The result of a step, or what of it another stage shares: so many numbers."""
    dtype = torch.uint8 if compute.run.meets_at(question.t) else compute.state.dtype
    like = {"gradient": torch.empty(numel, dtype=dtype, device="meta")}
    name = f"the gradient of step {question.t}"
    return Wanted(name=name, question=question, like=like, fits=fits, gather_s=gather_s)
