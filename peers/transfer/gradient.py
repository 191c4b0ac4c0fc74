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
from peers.voices import Voices
from swarm.errors import PeerFault, SetupError
from swarm.ids import PeerId
from swarm.manifest import Run
from swarm.model.layout import named_weights
from swarm.protocol.rounds import NO_VOICE, Commit, Prepared
from swarm.protocol.voice import heard
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
    voice: Mapping[PeerId, int] = NO_VOICE,
    on_fault: Callable[[PeerFault], None] = lambda fault: None,
) -> tuple[torch.Tensor, Prepared, Commit | None, PeerId]:
    """The reduced gradient of step `t` from replicas that hold it (or applied it: then with its commit), and
    the one that gave most of it. If one of them has voice, the others are not asked.

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
    found = await download(transport, wanted, heard(sources, voice), voice=voice, on_fault=on_fault)
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
    run: Run, transport: Transport, directory: Directory, version: int, *, limit_s: float = WEIGHTS_S
) -> dict[str, torch.Tensor]:
    """The weights of all stages by name, from the peers that serve them.

    `version`: one that they have, such as the last; negative: the newest, of a run at rest.

    Tries again for `limit_s`: peers that died are still in the directory for a while, others not yet.

    Raises:
        SetupError: no peer of a stage gives them; says why each does not.
    """
    until, found = now_s() + limit_s, dict[str, torch.Tensor]()
    voices = Voices(run, transport.signer, directory)
    for stage in range(run.S):
        reasons, partial, got = dict[PeerId, str](), Partial(), None
        while got is None:
            records = await directory.refresh({stage})
            serving = [r.peer for r in records if r.stage == stage and r.state == "serving"]
            try:
                got = await download(
                    transport, state_of(run, stage, version), serving, voice=voices.of(stage), partial=partial
                )
            except DownloadFailed as failed:
                reasons.update(failed.reasons)
                if now_s() + RETRY_S >= until:
                    why = "; ".join(reasons.values()) or "no peer serves it"
                    text = f"could not download the weights of stage {stage}: {why}"
                    raise SetupError(text) from None
                await asyncio.sleep(RETRY_S)
        found |= named_weights(run, stage, got.tensors["weights"], got.tensors.get("statistics"))
    return found
