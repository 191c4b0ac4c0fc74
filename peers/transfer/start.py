"""The weights that a run starts from, for peers that cannot read them: from other peers, by their digest."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from peers.events import Emit, Note
from peers.ports import Directory, Transport
from peers.transfer.client import FIRST_SHARE, MAX_SOURCES, DownloadFailed, Partial, Wanted, download, shown
from swarm.errors import SetupError
from swarm.ids import PeerId, Stage
from swarm.manifest import Run
from swarm.model.gpt import weights_dtype
from swarm.model.layout import can_start, start_digest, start_from, start_shapes
from swarm.protocol.voice import voices
from swarm.wire.messages import START, Opened, OpenState

RETRY_S = 1.0


class FetchedStart:
    """What one stage starts with: this process has it for itself, and gives it to others."""

    def __init__(self, run: Run) -> None:
        self._run, self._stage, self._needed = run, -1, not can_start(run)

    async def prepare(self, stage: Stage, transport: Transport, directory: Directory, emit: Emit) -> None:
        """Return once a stage can start here: at once, where this process can read the weights itself."""
        if not self._needed or stage == self._stage:
            return
        tensors = await fetch_start(self._run, stage, transport, directory, emit)

        def read(names: Sequence[str], shape: torch.Size) -> torch.Tensor:
            if names[0] not in tensors:
                text = f"stage {stage} has no {names[0]}: this peer has what that stage starts with"
                raise SetupError(text)
            return tensors[names[0]]

        self._stage = stage
        start_from(self._run, read)


def start_of(run: Run, stage: Stage, shapes: Mapping[str, torch.Size]) -> Wanted:
    """What a stage starts with; of whichever peer, since the manifest has its digest."""
    dtype = weights_dtype(run)

    def fits(opened: Opened, tensors: Mapping[str, torch.Tensor]) -> str | None:
        right = start_digest(tensors, tensors.__getitem__) == run.start.digests[stage]
        return None if right else f"gives other weights for stage {stage} than the run starts from"

    return Wanted(
        name=f"what stage {stage} starts with",
        question=OpenState(run=run.id, stage=stage, version=START),
        like={name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()},
        fits=fits, gather_s=0.0,
    )  # fmt: skip


async def fetch_start(
    run: Run, stage: Stage, transport: Transport, directory: Directory, emit: Emit
) -> dict[str, torch.Tensor]:
    """The tensors that a stage starts with, from peers that have them, with voice first. Waits until one has
    them: each that gives nothing is asked again after all others, and has twice as long then.
    """
    shares = dict[PeerId, float]()
    """Of the time that each may take; the next to be asked first."""
    wanted = start_of(run, stage, await asyncio.to_thread(start_shapes, run, stage))
    wanted = replace(wanted, share=lambda peer: shares[peer])
    partial, said = Partial(), ""
    while True:
        records = sorted(await directory.lookup_all(), key=lambda r: r.stage != stage)
        others = (r.peer for r in records if r.peer != transport.peer_id and r.state != "feeding")
        there = dict.fromkeys(others, FIRST_SHARE)
        voice = voices(run.island(0), records, transport.signer, version=0)
        known = {peer: share for peer, share in shares.items() if peer in there}
        first = {peer: 1.0 for peer in there if peer in voice and peer not in known}
        shares = first | known | there | known | first  # in this order
        try:
            found = await download(
                transport, wanted, list(shares)[:MAX_SOURCES], voice=voice, partial=partial,
                progress=shown(stage, 0, emit),
            )  # fmt: skip
            return found.tensors
        except DownloadFailed as failed:
            shares |= {peer: min(1.0, 2 * shares.pop(peer)) for peer in failed.reasons}
            text = f"stage {stage} waits for the weights that the run starts from: {failed.text}"
            if text != said:
                emit(Note(text=f"{text}. Or give their folder with --start"))
                said = text
            await asyncio.sleep(RETRY_S)
