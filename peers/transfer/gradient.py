"""The gradient of a step that a replica missed, and the weights of all stages: how they are fetched.

The whole state of a stage: `peers.transfer.client`. The other side: `peers.transfer.server`.
"""

from __future__ import annotations

import asyncio

import torch

from peers.clock import now_s
from peers.ports import Directory, Transport
from peers.stage.all_reduce import CHUNK_ELEMENTS, holds, read_part
from peers.stage.state import StageCore
from peers.transfer.client import DownloadFailed, Partial, download_state
from swarm.errors import BadAnswer, SetupError
from swarm.ids import PeerId, Stage
from swarm.manifest import Run
from swarm.model.stage import StageCompute
from swarm.protocol.rounds import Commit, Prepared
from swarm.wire.messages import FetchVector, VectorChunk, pack, unpack_answer

CALL_S = 30.0
"""Limit for one chunk of 4 MB: a line of 1 Mbit/s just fits."""
WEIGHTS_S = 15.0
"""A directory that was opened a moment ago may know half of the peers, and half of those may be dead."""
RETRY_S = 0.5


async def fetch_gradient(
    core: StageCore, transport: Transport, source: PeerId, t: int, round_name: str
) -> tuple[torch.Tensor, Prepared, Commit | None]:
    """The reduced gradient of step `t` from a replica that holds it (or applied it: then with its commit).

    Raises:
        PeerFault, NotReady, Refused: ask another.
    """
    vector, named = await fetch_vector(core, transport, source, t, core.compute.numel, round_name=round_name)
    held = await asyncio.to_thread(holds, named.round, vector, core.compute.shared.sqnorm)
    # Where stages share weights, what a replica says of the norm has their parts in it.
    if held.digest != named.digest or (not core.compute.shared.names and held.sqnorm != named.sqnorm):
        raise BadAnswer(source, "the gradient does not fit its digest")
    commit = Commit(t, named.total_sqnorm) if named.total_sqnorm >= 0 else None
    return vector, held, commit


async def fetch_vector(
    core: StageCore,
    transport: Transport,
    source: PeerId,
    t: int,
    numel: int,
    *,
    round_name: str = "",
    shared_with: Stage = -1,
    shared_of: Stage = -1,
) -> tuple[torch.Tensor, VectorChunk]:
    """The summed gradient of step `t` from a peer, chunk by chunk, and what was said of it.

    Raises:
        PeerFault, NotReady, Refused: ask another.
    """
    dtype = core.compute.state.dtype
    vector = torch.empty(numel, dtype=dtype)
    named: VectorChunk | None = None
    for start in range(0, numel, CHUNK_ELEMENTS):
        size = min(CHUNK_ELEMENTS, numel - start)
        wanted = FetchVector(
            run=core.run.id, t=t, round=round_name, shared_with=shared_with, shared_of=shared_of,
            start=start, numel=size,
        )  # fmt: skip
        most = size * vector.element_size()
        answer = await transport.call(source, "held", pack(wanted), max_answer_bytes=most, deadline_s=CALL_S)
        chunk = unpack_answer(source, answer.header, VectorChunk)
        if chunk.total_numel != numel or (named is not None and chunk.round != named.round):
            raise BadAnswer(source, "the chunks of a gradient are not of one round")
        named = chunk
        vector[start : start + size] = read_part(
            source, chunk.tensors, chunk.crc, answer.body, size, "none", dtype
        )
    assert named is not None
    return vector, named


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
    compute = StageCompute(run, stage)
    like, partial = compute.state.copy(), Partial()
    reasons: dict[PeerId, str] = {}
    while True:
        records = await directory.refresh({stage})
        serving = [r.peer for r in records if r.stage == stage and r.state == "serving"]
        try:
            got = await download_state(run, stage, like, transport, serving, partial=partial)
        except DownloadFailed as failed:
            reasons.update(failed.reasons)
        else:
            compute.load_state(got.opened.version, got.tensors)
            return got.opened.version, compute.state.named_weights()
        if now_s() + RETRY_S >= until:
            why = "; ".join(reasons.values()) or "no peer serves it"
            raise SetupError(f"could not download the weights of stage {stage}: {why}")
        await asyncio.sleep(RETRY_S)
